"""zero.py: its section 1 around a model of others, its scripts, their costs, what is refused."""
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import zero
from common import adamw, clip_gradients
from conftest import (
    PROOF, SMALL, alone, check_refused, copied, dry_run_agrees, each, proves, run, script, textbook)
from others import Llama, compare, into_flat, llama_loss, token_rows


def llama(tied=False):
    """Its layers are recomputed, and have a parameter that nobody uses."""
    model = Llama(layers=2, tied=tied)
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        layer.unused = nn.Parameter(torch.ones(3))
    return model


def mine(rows):
    return [t.chunk(dist.get_world_size())[dist.get_rank()] for t in rows]


def lend_garbage(flat):
    """Memory that is lent has anything in it: here nan, which spreads."""
    zero.lend(flat)
    flat.fill_(math.nan)


def check_copy(level, tied=False, offload="none", plant=None):
    """Two steps of two micro-batches equal one process's, whatever ranks begin with."""
    module = copied("zero")
    module.lend = lend_garbage
    if plant:
        plant(module)
    torch.manual_seed(0)
    plain = llama(tied)
    torch.manual_seed(dist.get_rank())
    model = llama(tied)
    ours = module.ZeRO(module.units_of(model, model.layers), level=level, offload=offload)
    reference = adamw(plain.parameters(), 1e-2)
    [group] = ours.parameter_groups()
    optimizers = [adamw(group["params"][first::2], 1e-2) for first in range(2)]
    rng = torch.Generator().manual_seed(1)
    for _ in range(2):
        ours.zero_grad()
        for p in plain.parameters():
            p.grad = torch.zeros_like(p)
        for number in range(2):
            rows = token_rows(rng, 4)
            llama_loss(plain, *rows).backward()
            ours.sync = level >= 2 or number == 1
            llama_loss(model, *mine(rows)).backward()
            ours.reduce()
        compare(list(ours.full_gradients().values()), [p.grad for p in plain.parameters()])
        norm = clip_gradients(plain.parameters(), 1.0)
        torch.testing.assert_close(ours.clip_grad_norm_(1.0), norm, rtol=1e-10, atol=0)
        reference.step()
        for optimizer in optimizers:
            ours.step(optimizer)
        with torch.no_grad():  # an evaluation in between leaves nothing stale
            model(rows[0])
        compare(list(ours.full_parameters().values()), [p.data for p in plain.parameters()])


@pytest.mark.parametrize("world, cases", [
    (1, [(3,)]),
    (2, [(0, True), (1, False, "optimizer"), (2, True), (3, True), (3, False, "param")]),
    (4, [(1,), (3,)]),
])
def test_copy(world, cases):
    run(each, world, check_copy, cases)


def use_first(flat, first={}):
    flat.wait()
    flat.full.copy_(first.setdefault(flat, flat.full.clone()))


# a method of Flat, when something else is done, what, and the level that shows it
PLANTED = {
    "only the last micro-batch counts": (
        "start_reduce", "before", lambda flat: flat.grad.zero_(), 2),
    "gradients are replaced": ("take_gradient", "before", lambda flat, p: flat.slots[p].zero_(), 1),
    "averaged over ranks": ("finish_reduce", "after", lambda flat: flat.grad.div_(2), 1),
    "a sum waits for nothing": ("take_gradient", "before", lambda flat, p: flat.missing.clear(), 1),
    "what was gathered first is used for ever": ("start_gather", "after", use_first, 3),
    "a rank clips by the norm of its chunk": ("all_reduce", "left out", None, 2),
    "ranks begin with weights of their own": ("broadcast", "left out", None, 1),
}


def check_planted(what):
    *bug, level = PLANTED[what]
    with pytest.raises(AssertionError):
        check_copy(level, plant=into_flat(*bug))


def test_planted():
    run(each, 2, check_planted, [(what,) for what in PLANTED])


@pytest.mark.parametrize("world, flags", [
    (3, ["--stage", "3", "--accum", "2", "--batch", "9", "--train", r"blocks\.1|norm",
         "--eval-every", "1"]),
    (4, ["--stage", "3", "--offload", "param", "--vocab", "257", "--model", "llama-toy"]),
    (2, ["--stage", "3", "--impl", "torch", "--model", "llama-toy"]),
    (2, ["--stage", "1", "--impl", "torch"]),
])
def test_script_equals_one_process(world, flags):
    proves("zero", world, *flags)


def test_resumes(tmp_path):
    """In another stage; and in bf16 to the bit, since the fp32 masters are what is saved."""
    script("zero", 3, *PROOF, "--stage", "3", "--no-check", "--save", str(tmp_path))
    report = proves("zero", 2, "--stage", "1", "--offload", "optimizer", "--steps", "4",
                    "--resume", str(tmp_path))
    assert len(report["loss"]) == 2
    flags = [*SMALL, "--no-check", "--dtype", "bf16", "--stage", "3", "--steps", "3"]
    place = tmp_path / "bf16"
    whole = script("zero", 2, *flags, "--save", str(place), "--save-every", "2")
    rest = script("zero", 2, *flags, "--resume", str(place / "2"))
    assert rest["loss"] == whole["loss"][2:]


@pytest.mark.parametrize("world, flags", [
    (2, ["--stage", "1", "--offload", "optimizer", "--model", "llama-toy"]),
    (4, ["--stage", "3", "--vocab", "257", "--width", "33", "--heads", "3"]),
])
def test_cost(world, flags):
    textbook(dry_run_agrees("zero", world, *flags, ranks=[world - 1]))


HELD = [16, 4 + 12 / 4, 2 + 14 / 4, 16 / 4]  # on 4 ranks
SENT = [2, 2, 2 + 1, 3 * 2]  # with 2 micro-batches


def test_sixteen_bytes():
    """The docstring's table, in bf16; width 64 needs no padding."""
    size = [*SMALL, "--width", "64", "--dtype", "bf16", "--dry-run", "4", "--accum", "2"]
    reports = alone("zero", *([*size, "--stage", str(level)] for level in range(4)))
    for level, report in enumerate(reports):
        textbook(report)
        total = report["parameters"]["total"]
        memory = report["ranks"][0]["memory"]
        held = memory["parameters"] + memory["gradients"] + memory["optimizer"]
        assert 0 <= held - HELD[level] * total < 4 * 40  # step counters
        collectives = report["ranks"][0]["collectives"]
        sent = sum(collective["wire"] for collective in collectives.values())
        assert 0 <= sent - SENT[level] * 2 * total * 3 / 4 < 10  # the norm


def check_overlap():
    """A unit is gathered before the one in front of it computes; sums begin during backward, and
    two units at most have memory. Between steps a parameter is empty, and to read it is safe."""
    module = copied("zero")
    model = Llama(layers=2)
    ours = module.ZeRO(module.units_of(model, model.layers), level=3)
    begun = []  # [(what, of which unit)]
    most = []  # units with memory then

    def note(what, flat):
        if what == "reduce" or not module.has_memory(flat.full):
            begun.append((what, ours.flats.index(flat)))

    def count(name, _):
        most.append(sum(module.has_memory(getattr(flat, name)) for flat in ours.flats))

    for what, name in ("gather", "full"), ("reduce", "buffer"):
        into_flat(f"start_{what}", "before", partial(note, what))(module)
        into_flat(f"start_{what}", "after", partial(count, name))(module)
    for _ in range(2):
        assert all(p.numel() == p.clone().numel() == 0 for p in model.parameters())
        with pytest.raises(AssertionError, match="full_parameters"):
            model.state_dict()
        ours.zero_grad()
        begun.clear()
        llama_loss(model, *mine(token_rows(torch.Generator(), 4))).backward()
        assert begun[-1] == ("reduce", 0)  # before reduce()
        ours.reduce()
    assert begun == [
        ("gather", 0), ("gather", 1), ("gather", 2), ("gather", 3), ("gather", 2), ("reduce", 3),
        ("gather", 1), ("reduce", 2), ("reduce", 1), ("reduce", 0)]
    assert max(most) == 2


def test_overlap():
    run(check_overlap, 2)


def check_misuse():
    for level in range(4):
        model = Llama(layers=1)
        ours = zero.ZeRO(zero.units_of(model, model.layers), level=level)
        rows = token_rows(torch.Generator(), 2)
        llama_loss(model, *rows).backward()
        with pytest.raises(AssertionError, match="call reduce"):
            ours.step(None)
        with pytest.raises(AssertionError, match="reduce.. comes first"):
            ours.clip_grad_norm_(1.0)
        with pytest.raises(AssertionError, match="call reduce"):
            ours.zero_grad()  # it would forget some of them alone
        with pytest.raises(AssertionError, match="set sync to False"):
            llama_loss(model, *rows).backward()
        ours.reduce()
        before = [part.grad.clone() for part in ours.parts]
        ours.reduce()  # once more: there is nothing to add
        ours.clip_grad_norm_(1e9)  # far away: nothing is scaled
        torch.testing.assert_close([part.grad for part in ours.parts], before, rtol=0, atol=0)
        ours.step(torch.optim.SGD(ours.parameter_groups(), 0.1))
        with pytest.raises(AssertionError, match="zero_grad.. in every step"):
            llama_loss(model, *rows).backward()
    mixed = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).float())]
    with pytest.raises(AssertionError, match="each dtype"):
        zero.ZeRO([zero.Unit(mixed, [])])
    shared = [zero.Unit(mixed[:1], []), zero.Unit(mixed[:1], [])]
    with pytest.raises(AssertionError, match="in two units"):
        zero.ZeRO(shared)
    model = Llama(layers=1)
    with pytest.raises(AssertionError, match="'param' needs level 3"):
        zero.ZeRO(shared[:1], offload="param")
    with pytest.raises(AssertionError, match="in no unit"):
        zero.ZeRO(shared[:1]).parameter_groups([{"params": model.parameters()}])
    with pytest.raises(AssertionError, match="a list"):  # in level 3 it would be an empty list
        zero.ZeRO(shared[:1]).parameter_groups([{"params": shared[0].parameters[0]}])
    frozen = model.requires_grad_(False).parameters()
    assert zero.ZeRO(shared[:1]).parameter_groups([{"params": frozen}]) == [{"params": []}]


def test_misuse():
    run(check_misuse, 1)


def test_refused_flags():
    run(check_refused, 2, "zero", [(flags.split(), words) for flags, words in [
        ("--stage 2 --offload param", "needs --stage 3"),
        ("--batch 3 --accum 2", "2 micro-batches"),
        ("--impl torch --stage 0", "--stage 1 to 3"),
        ("--impl torch --save no/such", "no dry run"),
    ]])
