import math

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import zero
from common import GPTConfig, Text, adamw, build, clip_gradients, get_batch, plain_steps
from conftest import (
    PROOF, SMALL, alone, check_refused, copied, dry_run_agrees, each, proves, run, script, textbook)
from others import Llama, llama_loss, token_rows

# flat sizes that 2, 3 and 4 ranks do not divide
GPT2 = GPTConfig(2, 9, 3, 257, 8)
LLAMA = GPTConfig(2, 12, 3, 257, 8, "llama", 1, 13)
CORPUS = Text([torch.arange(10_000).mul(7919).remainder(251).to(torch.uint8)])
BATCH = 12
LEVELS = [0, 1, 2, 3]


def batch(step, rows=None):
    return get_batch(CORPUS, 8, 0, step, BATCH, 0.3, rows)


def rows_here():
    n = dist.get_world_size()
    return range(dist.get_rank() * BATCH // n, (dist.get_rank() + 1) * BATCH // n)


def gap(found, want):
    """The largest difference of two {name: tensor}, of the largest number; nan if there is one."""
    assert found.keys() == want.keys()
    largest = max(t.abs().max() for t in want.values())
    gaps = [(found[name] - t).abs().max() for name, t in want.items()]
    return (torch.stack(gaps).max() / largest).item()


lend = zero.lend


def lend_garbage(flat):
    """Memory that is lent has anything in it: here nan, which spreads."""
    empty = flat.untyped_storage().size() == 0
    lend(flat)
    if empty:
        flat.fill_(math.nan)


# ---- equal to one process ----------------------------------------------------------


def gap_of_training(cfg, level, offload="none", accum=1, steps=3):
    """The worst gap of gradients, norms and parameters to one process, on every rank the same."""
    plain = build(cfg, 0, dtype=torch.float64)
    # what ranks begin with differs: the first one's counts
    model = build(cfg, dist.get_rank(), dtype=torch.float64)
    batches = ((1e-2, *batch(step)) for step in range(steps))
    want = plain_steps(plain, adamw(plain.parameters(), 1e-2), batches, 0.5)
    ours = zero.parallelize(model, None, level, offload)
    optimizer = adamw(ours.parameter_groups(), 1e-2)
    gaps = []
    for step in range(steps):
        _, norm = next(want)
        _, found = zero.train_step(model, ours, optimizer, *batch(step, rows_here()), 0.5, accum)
        gaps.append(gap({"norm": found}, {"norm": norm}))
        gradients = {name: p.grad for name, p in plain.named_parameters()}
        gaps.append(gap(zero.full_gradients(model, ours), gradients))
        gaps.append(gap(zero.full_state_dict(model, ours), plain.state_dict()))
        x, y, _ = batch(step)
        with torch.no_grad():  # an evaluation in between leaves nothing stale
            loss = zero.loss_sum(model(x), y)
            gaps.append(gap({"loss": loss}, {"loss": zero.loss_sum(plain(x), y)}))
    return float(torch.tensor(gaps).max())


def check_equal(*case):
    zero.lend = lend_garbage
    found = gap_of_training(*case)
    assert found <= 1e-12, found


TRAININGS = [
    (GPT2, 0, "none", 3),
    (GPT2, 2, "none", 2),
    (GPT2, 3, "param", 2),
    (LLAMA, 1, "optimizer", 2),
    (LLAMA, 3, "none", 2),
]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_equals_one_process(world):
    run(each, world, check_equal, TRAININGS)


@pytest.mark.parametrize("world, flags", [
    (3, ["--stage", "3", "--accum", "2", "--batch", "9", "--train", r"blocks\.1|norm",
         "--eval-every", "1"]),
    (2, ["--stage", "3", "--model", "llama-toy", "--impl", "torch"]),
    (2, ["--stage", "1", "--impl", "torch"]),
])
def test_script_equals_one_process(world, flags):
    proves("zero", world, *flags)


def test_resumes_in_another_stage(tmp_path):
    """Losses and parameters of one process that has never stopped."""
    saved = ["--no-check", "--save", str(tmp_path)]
    script("zero", 3, *PROOF, "--stage", "3", *saved)
    report = proves("zero", 2, "--stage", "1", "--offload", "optimizer", "--steps", "4",
                    "--resume", str(tmp_path))
    assert len(report["loss"]) == 2


def test_bf16_resumes_to_the_bit(tmp_path):
    """The fp32 masters are what is saved."""
    flags = [*SMALL, "--no-check", "--dtype", "bf16", "--stage", "3", "--steps", "3"]
    whole = script("zero", 2, *flags, "--save", str(tmp_path), "--save-every", "2")
    rest = script("zero", 2, *flags, "--resume", str(tmp_path / "2"))
    assert rest["loss"] == whole["loss"][2:]


# ---- cost --------------------------------------------------------------------------


@pytest.mark.parametrize("world, flags", [
    (2, ["--stage", "0", "--accum", "2"]),
    (2, ["--stage", "1", "--offload", "optimizer", "--model", "llama-toy"]),
    (2, ["--stage", "2", "--accum", "2"]),
    (4, ["--stage", "3", "--vocab", "257", "--width", "33", "--heads", "3"]),
])
def test_cost(world, flags):
    textbook(dry_run_agrees("zero", world, *flags, ranks=[world - 1]))


HELD = [16, 4 + 12 / 4, 2 + 14 / 4, 16 / 4]  # on 4 ranks
SENT = [2, 2, 2 + 1, 3 * 2]  # with 2 micro-batches


def test_sixteen_bytes():
    """The docstring's table, in bf16; width 64 needs no padding."""
    size = ["--width", "64", "--dtype", "bf16", "--dry-run", "4", "--accum", "2"]
    reports = alone("zero", *([*SMALL, *size, "--stage", str(level)] for level in LEVELS))
    for level, report in enumerate(reports):
        textbook(report)
        total = report["parameters"]["total"]
        memory = report["ranks"][0]["memory"]
        held = memory["parameters"] + memory["gradients"] + memory["optimizer"]
        assert 0 <= held - HELD[level] * total < 4 * 40  # step counters
        collectives = report["ranks"][0]["collectives"]
        if level > 0:
            collectives.pop("all_reduce")  # the norm's
        sent = sum(collective["wire"] for collective in collectives.values())
        assert sent == SENT[level] * 2 * total * 3 / 4


def with_memory(ours, name):
    return sum(getattr(flat, name).untyped_storage().size() > 0 for flat in ours.flats)


def order_of_step(model, ours):
    """-> [what begins, in order], how much of it before reduce(), the most units with memory."""
    found = []
    most = {"full": 0, "buffer": 0}

    def noting(what, function):
        def noted(out, tensor, **options):
            here = out if what == "get" else tensor
            numbers = [i for i, flat in enumerate(ours.flats)
                       if here is flat.full or here is flat.buffer]
            found.append((what, *numbers))
            return function(out, tensor, **options)
        return noted

    def counting(tensor):
        lend(tensor)
        for name in most:
            most[name] = max(most[name], with_memory(ours, name))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero, "lend", counting)
        patch.setattr(zero, "all_gather", noting("get", zero.all_gather))
        patch.setattr(zero, "reduce_scatter", noting("sum", zero.reduce_scatter))
        x, y, valid = batch(0, rows_here())
        ours.zero_grad()
        zero.loss_sum(model(x), y).backward()
        in_backward = len(found)
        ours.reduce()
    return found, in_backward, most


def check_overlap():
    """A unit is sent for before the one in front of it computes; sums begin during backward.

    There are never more than two units of parameters, nor of gradients.
    """
    model = build(LLAMA, 0, dtype=torch.float64)
    ours = zero.parallelize(model, None, 3)  # embedding, two blocks, norm and head
    order_of_step(model, ours)
    found, in_backward, most = order_of_step(model, ours)
    assert found == [("get", 0), ("get", 1), ("get", 2), ("get", 3), ("get", 2), ("sum", 3),
                     ("get", 1), ("sum", 2), ("sum", 1), ("sum", 0)]
    assert in_backward == len(found)
    assert most == {"full": 2, "buffer": 2}, most
    assert with_memory(ours, "full") == with_memory(ours, "buffer") == 0


def test_overlap():
    run(check_overlap, 2)


# ---- the copy: section 1 alone, on a Llama of others ---------------------------------


class Recomputed(nn.Module):
    """A layer under activation checkpointing, with a parameter that nobody uses."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def llama(tied):
    model = Llama()
    if tied:
        model.lm_head.weight = model.embed_tokens.weight
    model.layers = nn.ModuleList(Recomputed(layer) for layer in model.layers)
    return model


def check_copy(level, tied):
    """Three steps of two micro-batches equal one process's."""
    code = copied("zero")
    code.lend = lend_garbage
    torch.manual_seed(0)
    plain = llama(tied)
    torch.manual_seed(dist.get_rank())
    model = llama(tied)
    zero = code.ZeRO(code.units_of(model, model.layers), level=level)
    reference = adamw(plain.parameters(), 1e-2)
    optimizer = adamw(zero.parameter_groups(), 1e-2)
    rng = torch.Generator().manual_seed(1)

    def compare(found, want):
        found = {name: found[p] for name, p in model.named_parameters() if name in want}
        assert gap(found, want) <= 1e-12

    for _ in range(3):
        zero.zero_grad()
        reference.zero_grad()
        for number in range(2):
            rows = token_rows(rng, 4)
            llama_loss(plain, *rows).backward()
            zero.sync = level >= 2 or number == 1
            llama_loss(model, *(t.chunk(2)[dist.get_rank()] for t in rows)).backward()
            zero.reduce()
        used = {name: p for name, p in plain.named_parameters() if p.grad is not None}
        compare(zero.full_gradients(), {name: p.grad for name, p in used.items()})
        clip_gradients(plain.parameters(), 1.0)
        zero.clip_grad_norm_(1.0)
        reference.step()
        zero.step(optimizer)
        compare(zero.full_parameters(), used)


def test_copy():
    run(each, 2, check_copy, [(0, True), (1, False), (2, True), (3, True), (3, False)])


# ---- what is silent elsewhere ------------------------------------------------------


def check_empty_between_steps():
    """In level 3 a parameter that is read while it is not gathered does not end the process."""
    model = build(LLAMA, 0, dtype=torch.float64)
    ours = zero.parallelize(model, None, 3)
    x, y, _ = batch(0, rows_here())
    for _ in range(2):
        for p in model.parameters():
            assert p.numel() == p.clone().numel() == 0 and p.sum() == 0
        with pytest.raises(AssertionError, match="full_parameters"):
            model.state_dict()
        zero.loss_sum(model(x), y).backward()
        ours.reduce()


def test_empty_between_steps():
    run(check_empty_between_steps, 2)


def check_misuse(level):
    model = build(GPT2, 0, dtype=torch.float64)
    ours = zero.parallelize(model, None, level)
    x, y, _ = batch(0, rows_here())
    for sync in True, False:
        ours.zero_grad()
        ours.sync = sync
        zero.loss_sum(model(x), y).backward()
        with pytest.raises(AssertionError, match="call reduce"):
            ours.step(None)
    ours.sync = True
    ours.reduce()
    ours.zero_grad()
    zero.loss_sum(model(x), y).backward()
    with pytest.raises(AssertionError, match="set sync to False"):
        zero.loss_sum(model(x), y).backward()


def check_refused_units():
    mixed = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).float())]
    with pytest.raises(AssertionError, match="each dtype"):
        zero.ZeRO([zero.Unit(mixed, [])])
    model = build(GPT2, 0, dtype=torch.float64)
    ends = [zero.Unit([m.weight], [m]) for m in (model.tok, model.head)]
    with pytest.raises(AssertionError, match="twice in the units"):
        zero.ZeRO(ends)


def test_refused():
    run(each, 2, check_misuse, [(level,) for level in LEVELS])
    run(check_refused_units, 1)


def test_units_of():
    """What is before the blocks, blocks, what is after; a tied head is before."""
    gpt2 = build(GPT2, 0)
    units = zero.units_of(gpt2, gpt2.blocks)
    first, last = gpt2.blocks
    sites = [[gpt2.tok, gpt2.pos, gpt2.head], [first], [last, gpt2.norm]]
    assert [unit.sites for unit in units] == sites
    assert units[0].parameters == [gpt2.tok.weight, gpt2.pos.weight]
    llama = build(LLAMA, 0)
    units = zero.units_of(llama, llama.blocks)
    assert units[0].sites == [llama.tok]
    assert units[-1].sites == [llama.norm, llama.head]


# ---- planted bugs: each must show ----------------------------------------------------


def added(do, before=True):
    """do is done before a method of Flat, or after it."""
    def breaking(method):
        def broken(flat, *args):
            if before:
                do(flat, *args)
            method(flat, *args)
            if not before:
                do(flat, *args)
        return broken
    return breaking


def left_out(function):
    return lambda *_, **__: None


OLD = {}  # {Flat: what it gathered first}


def use_old(flat):
    flat.wait()
    flat.full.copy_(OLD.setdefault(flat, flat.full.clone()))


PLANTED = {
    "levels 2 and 3 keep the last micro-batch's gradient alone": (
        zero.Flat, "start_reduce", added(lambda flat: flat.grad.zero_()), (GPT2, 2, "none", 2)),
    "in levels 0 and 1 a gradient replaces the one before": (
        zero.Flat, "take_gradient", added(lambda flat, p: flat.filled.discard(p)),
        (GPT2, 1, "none", 2)),
    "averaged over ranks, as production APIs do": (
        zero.Flat, "finish_reduce", added(lambda flat: flat.grad.div_(2), False), (LLAMA, 1)),
    "what lent memory has in it is summed where no parameter lies": (
        zero.Flat, "start_reduce",
        added(lambda flat: setattr(flat, "padding", flat.padding.clone())), (GPT2, 3)),
    "a sum does not wait for the gradients that are missing": (
        zero.Flat, "take_gradient", added(lambda flat, p: flat.missing.clear()), (LLAMA, 1)),
    "what was gathered first is used for ever": (
        zero.Flat, "start_gather", added(use_old, False), (GPT2, 3)),
    "a rank clips by the norm of its chunk": (dist, "all_reduce", left_out, (LLAMA, 2)),
    "ranks begin with weights of their own": (dist, "broadcast", left_out, (LLAMA, 1)),
}


def check_planted(what):
    target, name, breaking, case = PLANTED[what]
    zero.lend = lend_garbage
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, breaking(getattr(target, name)))
        try:
            found = gap_of_training(*case)
        except AssertionError:
            found = math.inf  # refused
    found = torch.tensor(found).nan_to_num(math.inf)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    assert found > 1e-6, found


def test_planted():
    run(each, 2, check_planted, [(what,) for what in PLANTED])


# ---- what is refused on the command line ---------------------------------------------


REFUSED = [
    ("--stage 2 --offload param", "needs --stage 3"),
    ("--stage 0 --offload optimizer", "needs --stage 1"),
    ("--batch 3 --accum 2", "2 micro-batches"),
    ("--impl torch --stage 0", "--stage 1 to 3"),
    ("--impl torch --save no/such", "no dry run"),
]


def test_refused_flags():
    run(check_refused, 2, "zero", [(flags.split(), words) for flags, words in REFUSED])
