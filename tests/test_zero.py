import math

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import zero
from common import GPTConfig, Text, adamw, build, clip_gradients, freeze, get_batch, plain_steps
from conftest import (
    PROOF, SMALL, alone, copied, dry_run_agrees, each, proves, run, script, textbook)

# flat sizes that 2, 3 and 4 ranks do not divide
GPT2 = GPTConfig(2, 9, 3, 257, 8)
LLAMA = GPTConfig(2, 12, 3, 257, 8, "llama", 1, 13)
CORPUS = Text([torch.arange(10_000).mul(7919).remainder(251).to(torch.uint8)])
BATCH = 12
LEVELS = [0, 1, 2, 3]
ONE_LEVEL_EACH = [(level,) for level in LEVELS]


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


def gap_of_training(cfg, level, offload="none", accum=1, train="", steps=3):
    """The worst gap of gradients, norms and parameters to one process, on every rank the same."""
    models = []
    for seed in 0, dist.get_rank():  # what ranks begin with differs: the first one's counts
        model = build(cfg, seed, dtype=torch.float64)
        if train:
            model.load_state_dict(build(cfg, 0, dtype=torch.float64).state_dict())
            freeze(model, train)
        models.append(model)
    plain, model = models
    trained = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    batches = ((1e-2, *batch(step)) for step in range(steps))
    want = plain_steps(plain, adamw(trained.values(), 1e-2), batches, 0.5)
    ours = zero.parallelize(model, None, level, offload)
    optimizer = adamw(ours.parameter_groups(), 1e-2)
    gaps = []
    for step in range(steps):
        _, norm = next(want)
        _, found = zero.train_step(model, ours, optimizer, *batch(step, rows_here()), 0.5, accum)
        gaps.append(gap({"norm": found}, {"norm": norm}))
        gradients = {name: p.grad for name, p in trained.items()}
        gaps.append(gap(zero.full_gradients(model, ours), gradients))
        gaps.append(gap(zero.full_state_dict(model, ours), plain.state_dict()))
        x, y, _ = batch(step)
        with torch.no_grad():  # an evaluation in between leaves nothing stale
            held_out = zero.loss_sum(model(x), y)
            gaps.append(gap({"loss": held_out}, {"loss": zero.loss_sum(plain(x), y)}))
    return float(torch.tensor(gaps).max())


def check_equal(*case):
    zero.lend = lend_garbage
    found = gap_of_training(*case)
    assert found <= 1e-12, found


TRAININGS = [
    (GPT2, 0, "none", 3),
    (GPT2, 1, "optimizer", 2),
    (GPT2, 2, "none", 2),
    (GPT2, 3, "param", 2),
    (GPT2, 3, "none", 1, r"blocks\.1|norm"),
    (GPT2, 2, "none", 2, "tok"),
    (LLAMA, 0),
    (LLAMA, 1, "none", 2),
    (LLAMA, 2, "optimizer"),
    (LLAMA, 3, "none", 2),
    (LLAMA, 3, "optimizer", 1, r"blocks\.0|head"),
]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_equals_one_process(world):
    run(each, world, check_equal, TRAININGS)


FINE_TUNING = ("--train", r"blocks\.1|norm", "--eval-every", "2", "--steps", "4")


@pytest.mark.parametrize("world, flags", [
    (3, ["--stage", "3", "--accum", "2", "--batch", "9", *FINE_TUNING]),
    (2, ["--stage", "3", "--model", "llama-toy", "--impl", "torch"]),
    (2, ["--stage", "1", "--impl", "torch"]),
])
def test_script_equals_one_process(world, flags):
    proves("zero", world, *flags)


def test_both_times_both():
    report = script("zero", 2, *SMALL, "--steps", "4", "--impl", "both", "--stage", "2")
    assert report["ms_per_step"] > 0 and report["torch_ms_per_step"] > 0


def test_resumes_in_another_stage(tmp_path):
    """Losses and parameters of one process that has never stopped."""
    saved = ["--no-check", "--save", str(tmp_path)]
    script("zero", 3, *PROOF, "--stage", "3", *saved)
    report = proves("zero", 2, "--stage", "1", "--offload", "optimizer", "--steps", "4",
                    "--resume", str(tmp_path))
    assert len(report["loss"]) == 2


@pytest.mark.parametrize("stage", ["0", "3"])
def test_bf16_resumes_to_the_bit(stage, tmp_path):
    """The fp32 masters are what is saved."""
    flags = [*SMALL, "--no-check", "--dtype", "bf16", "--stage", stage]
    folder = ["--save", str(tmp_path), "--save-every", "2"]
    whole = script("zero", 2, *flags, "--steps", "3", *folder)
    rest = script("zero", 2, *flags, "--steps", "3", "--resume", str(tmp_path / "2"))
    assert rest["loss"] == whole["loss"][2:]


# ---- cost --------------------------------------------------------------------------


@pytest.mark.parametrize("world, flags", [
    (2, ["--stage", "0", "--accum", "2"]),
    (4, ["--stage", "1"]),
    (2, ["--stage", "2", "--accum", "2"]),
    (4, ["--stage", "3", "--vocab", "257", "--width", "33", "--heads", "3"]),
    (2, ["--stage", "3", "--accum", "2", "--offload", "param", "--model", "llama-toy"]),
])
def test_cost(world, flags):
    textbook(dry_run_agrees("zero", world, *flags, ranks=[world - 1]))


HELD = [lambda n: 16, lambda n: 4 + 12 / n, lambda n: 2 + 14 / n, lambda n: 16 / n]
SENT = [2, 2, lambda M: M + 1, lambda M: 3 * M]


def test_sixteen_bytes():
    """The docstring's table, in bf16; width 64 needs no padding."""
    n = 4
    size = ["--width", "64", "--dtype", "bf16", "--dry-run", str(n), "--accum", "2"]
    reports = alone("zero", *([*SMALL, *size, "--stage", str(level)] for level in LEVELS))
    for level, report in enumerate(reports):
        textbook(report)
        total = report["parameters"]["total"]
        memory = report["ranks"][0]["memory"]
        held = memory["parameters"] + memory["gradients"] + memory["optimizer"]
        assert 0 <= held - HELD[level](n) * total < 4 * 40  # step counters
        collectives = report["ranks"][0]["collectives"]
        if level > 0:
            collectives.pop("all_reduce")  # the norm's
        sent = sum(collective["wire"] for collective in collectives.values())
        units = SENT[level]
        if level >= 2:
            units = units(2)
        assert sent == units * 2 * total * (n - 1) / n


def with_memory(ours, name):
    return sum(getattr(flat, name).untyped_storage().size() > 0 for flat in ours.flats)


def order_of_step(model, ours):
    """-> [what begins, in order], how much of it before reduce(), the most units with memory."""
    found = []
    most = {"full": 0, "buffer": 0}

    def noting(what, function):
        def noted(flat):
            found.append((what, ours.flats.index(flat)))
            function(flat)
        return noted

    def counting(tensor):
        lend(tensor)
        for name in most:
            most[name] = max(most[name], with_memory(ours, name))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero, "lend", counting)
        for what, name in ("get", "start_gather"), ("sum", "start_reduce"):
            patch.setattr(zero.Flat, name, noting(what, getattr(zero.Flat, name)))
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


# ---- the copy: a model that is not ours --------------------------------------------


class Layer(nn.Module):
    """A gated MLP with a scalar parameter, one that nobody uses, and dropout."""

    def __init__(self):
        super().__init__()
        self.scale = nn.RMSNorm(7)
        self.gate = nn.Linear(7, 11, bias=False)
        self.into = nn.Linear(7, 11, bias=False)
        self.out = nn.Linear(11, 7, bias=False)
        self.strength = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        h = self.scale(x)
        h = self.out(F.silu(self.gate(h)) * self.into(h))
        return x + self.dropout(h) * self.strength


class Tower(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.offset = nn.Parameter(torch.randn(7))  # the model's own
        self.embedding = nn.Embedding(23, 7)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.scale = nn.RMSNorm(7)
        self.head = nn.Linear(7, 23, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, idx, recompute):
        x = self.embedding(idx) + self.offset
        for layer in self.layers:
            if recompute:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return self.head(self.scale(x))


def loss_of(model, idx, recompute=False):
    return F.cross_entropy(model(idx, recompute).flatten(0, 1), idx.flatten(), reduction="sum")


def grouped(model):
    """AdamW's groups: matrices decay, vectors do not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": vectors, "weight_decay": 0.0, "lr": 3e-2}, {"params": matrices}]


def make_adamw(groups):
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, eps=1e-5)


def by_name(model, found):
    return {name: found[p] for name, p in model.named_parameters()}


def check_copy(level, tied, recompute):
    code = copied("zero")
    code.lend = lend_garbage
    torch.manual_seed(0)
    plain = Tower(tied)
    torch.manual_seed(dist.get_rank())
    model = Tower(tied)
    ours = code.ZeRO(code.units_of(model, model.layers), level=level)
    model_groups = grouped(plain)
    names = {id(p): name for name, p in plain.named_parameters()}
    own = dict(model.named_parameters())
    groups = [{**group, "params": [own[names[id(p)]] for p in group["params"]]}
              for group in model_groups]
    reference = make_adamw(model_groups)
    optimizer = make_adamw(ours.parameter_groups(groups))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        microbatches = torch.randint(23, (2, 4, 5), generator=generator)
        reference.zero_grad()
        ours.zero_grad()
        for number, idx in enumerate(microbatches):
            loss_of(plain, idx).backward()
            ours.sync = level >= 2 or number == 1
            loss_of(model, idx.chunk(2)[dist.get_rank()], recompute).backward()
            ours.reduce()
        for p in plain.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)  # ours steps with zeros
        gradients = {name: p.grad for name, p in plain.named_parameters()}
        assert gap(by_name(model, ours.full_gradients()), gradients) <= 1e-12
        norm = clip_gradients(plain.parameters(), 1.0)
        reference.step()
        assert gap({"norm": ours.clip_grad_norm_(1.0)}, {"norm": norm}) <= 1e-12
        ours.step(optimizer)
        whole = by_name(model, ours.full_parameters())
        assert gap(whole, dict(plain.named_parameters())) <= 1e-12


def test_copy():
    cases = [(0, True, True), (1, True, False), (2, False, True), (3, True, False),
             (3, True, True), (3, False, True)]
    run(each, 2, check_copy, cases)


def check_autocast():
    """Levels 2 and 3 add up micro-batches like level 1, with bf16 arithmetic around fp32."""
    losses = []
    for level in LEVELS:
        torch.manual_seed(0)
        model = Tower(tied=True).float()
        ours = zero.ZeRO(zero.units_of(model, model.layers), level=level)
        optimizer = make_adamw(ours.parameter_groups())
        for _ in range(2):
            ours.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, torch.arange(20).view(4, 5), recompute=level == 3)
            loss.backward()
            ours.reduce()
            ours.step(optimizer)
        losses.append(loss.item())
    assert losses == losses[:1] * 4


def test_autocast():
    run(check_autocast, 2)


def check_split_backward(level):
    """A backward in two halves, as zero bubble's: sums wait for both, and begin in the second."""
    plain = build(LLAMA, 0, dtype=torch.float64)
    model = build(LLAMA, 0, dtype=torch.float64)
    x, y, _ = batch(0)
    zero.loss_sum(plain(x), y).backward()
    ours = zero.parallelize(model, None, level)
    ours.zero_grad()
    loss = zero.loss_sum(model(x), y) / dist.get_world_size()
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    rest = [p for name, p in model.named_parameters() if "norm" not in name]
    ours.sync = False
    loss.backward(inputs=norms, retain_graph=True)
    assert len(ours.pending) == len(ours.flats)
    ours.sync = True
    loss.backward(inputs=rest)
    assert not ours.pending or level < 2
    ours.reduce()
    want = {name: p.grad for name, p in plain.named_parameters()}
    assert gap(zero.full_gradients(model, ours), want) <= 1e-12


def test_split_backward():
    run(each, 2, check_split_backward, ONE_LEVEL_EACH[:3])


# ---- what is silent elsewhere ------------------------------------------------------


def check_empty_between_steps():
    """In level 3 a parameter that is read while it is not gathered does not end the process."""
    model = build(LLAMA, 0, dtype=torch.float64)
    ours = zero.parallelize(model, None, 3)
    x, y, _ = batch(0, rows_here())
    for _ in range(2):
        for p in model.parameters():
            assert p.numel() == p.clone().numel() == 0 and p.sum() == 0
        ours.zero_grad()
        zero.loss_sum(model(x), y).backward()
        ours.reduce()
        ours.step(adamw(ours.parameter_groups(), 1e-2))
    ours.zero_grad()
    penalty = sum(p.square().sum() for p in model.blocks[0].parameters())
    with pytest.raises(RuntimeError):
        (zero.loss_sum(model(x), y) + penalty).backward()
    with pytest.raises(AssertionError, match="full_parameters"):
        model.state_dict()


def test_empty_between_steps():
    run(check_empty_between_steps, 2)


def check_refused(level):
    model = build(GPT2, 0, dtype=torch.float64)
    ours = zero.parallelize(model, None, level)
    optimizer = adamw(ours.parameter_groups(), 1e-2)
    x, y, _ = batch(0, rows_here())

    def backward(sync=True):
        ours.sync = sync
        zero.loss_sum(model(x), y).backward()

    for sync in True, False:
        ours.zero_grad()
        backward(sync)
        with pytest.raises(AssertionError, match="call reduce"):
            ours.step(optimizer)
    ours.zero_grad()
    backward()
    with pytest.raises(AssertionError, match="after each backward"):
        backward()
    ours.zero_grad()
    backward()
    ours.reduce()
    if level < 2:  # the last micro-batch alone would count
        with pytest.raises(AssertionError, match="set sync to False"):
            backward()


def check_refused_units():
    mixed = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).float())]
    with pytest.raises(AssertionError, match="each dtype"):
        zero.ZeRO([zero.Unit(mixed, [])])
    model = build(GPT2, 0, dtype=torch.float64)
    ends = [zero.Unit([m.weight], [m]) for m in (model.tok, model.head)]
    with pytest.raises(AssertionError, match="twice in the units"):
        zero.ZeRO(ends)


def test_refused():
    run(each, 2, check_refused, ONE_LEVEL_EACH)
    run(check_refused_units, 1)


# ---- pure parts --------------------------------------------------------------------


def check_parts():
    """The parts of all ranks are every parameter once; padding is in none."""
    n = dist.get_world_size()
    for sizes in [(1,), (7, 1), (3, 3, 1, 1), (2, 20, 5)]:
        parameters = [nn.Parameter(torch.randn(size)) for size in sizes]
        original = {p: p.detach().clone() for p in parameters}
        ours = zero.ZeRO([zero.Unit(parameters, [])])
        [flat] = ours.flats
        assert flat.chunk == math.ceil(sum(sizes) / n)
        seen = {p: torch.zeros(p.shape) for p in parameters}
        for part in ours.parts:
            run_of = slice(part.first, part.first + part.master.numel())
            seen[part.parameter][run_of] += 1
            assert torch.equal(part.master, original[part.parameter][run_of])
        for count in seen.values():
            dist.all_reduce(count)  # partial -> replicated
            assert (count == 1).all()


def test_parts():
    run(check_parts, 3)


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
    freeze(llama, "blocks.1")
    [unit] = zero.units_of(llama, llama.blocks)
    assert unit.sites == [llama.blocks[1]]


# ---- planted bugs: each must show ----------------------------------------------------


def first(do):
    """do is done before a method of Flat."""
    def breaking(method):
        def broken(flat, *args):
            do(flat, *args)
            method(flat, *args)
        return broken
    return breaking


def then(do):
    """do is done after it."""
    def breaking(method):
        def broken(flat, *args):
            method(flat, *args)
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
        zero.Flat, "start_reduce", first(lambda flat: flat.grad.zero_()), (GPT2, 2, "none", 2)),
    "in levels 0 and 1 a gradient replaces the one before": (
        zero.Flat, "take_gradient", first(lambda flat, p: flat.filled.discard(p)),
        (GPT2, 1, "none", 2)),
    "averaged over ranks, as production APIs do": (
        zero.Flat, "finish_reduce", then(lambda flat: flat.grad.div_(2)), (LLAMA, 1)),
    "what lent memory has in it is summed where no parameter lies": (
        zero.Flat, "start_reduce",
        first(lambda flat: setattr(flat, "padding", flat.padding.clone())), (GPT2, 3)),
    "a sum does not wait for the gradients that are missing": (
        zero.Flat, "take_gradient", then(lambda flat, p: flat.missing.clear()), (LLAMA, 1)),
    "what was gathered first is used for ever": (
        zero.Flat, "start_gather", then(use_old), (GPT2, 3)),
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


@pytest.mark.parametrize("flags, words", [
    (["--stage", "2", "--offload", "param"], "needs stage 3"),
    (["--stage", "0", "--offload", "optimizer"], "needs stage 1"),
    (["--batch", "3", "--accum", "2"], "2 micro-batches"),
    (["--impl", "torch", "--stage", "0"], "--stage 1 to 3"),
    (["--impl", "torch", "--accum", "2"], "--accum 1"),
    (["--impl", "torch", "--dry-run", "2"], "no dry run"),
])
def test_refused_flags(flags, words):
    world = 1 if "--dry-run" in flags else 2
    assert words in script("zero", world, *flags, code=2)
