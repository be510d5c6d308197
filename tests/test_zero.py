import copy
import itertools
import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import zero
from common import GPTConfig, adamw, build, get_batch
from conftest import (
    PROOF, SMALL, alone, copied, dry_run_agrees, each, proves, run, script, some, textbook)
from harness.compare import worst_gap
from others import DecayByShape, Layerwise

# flat sizes that 2, 3 and 4 ranks do not divide
ODD = ("--vocab", "257", "--width", "33", "--heads", "3")
KINDS = [(0, "none"), (1, "none"), (1, "optimizer"), (2, "none"), (2, "optimizer"), (3, "none"),
         (3, "optimizer"), (3, "param")]  # every stage with every offload it has
STAGES = [0, 1, 2, 3]
ONE_STAGE_EACH = [(stage,) for stage in STAGES]


@pytest.mark.parametrize("world, flags", [
    (1, ["--stage", "3"]),
    (2, ["--stage", "0", "--accum", "3"]),
    (3, ["--stage", "1", "--accum", "3", "--batch", "10"]),
    (4, ["--stage", "2", "--accum", "2"]),
    (3, ["--stage", "3", "--accum", "3", "--batch", "10"]),
    (4, ["--stage", "3", "--clip", "0"]),
    (2, ["--stage", "2", "--offload", "optimizer"]),
    (2, ["--impl", "torch", "--stage", "1"]),
    (2, ["--impl", "torch", "--stage", "3"]),
])
def test_equals_one_process(world, flags):
    proves("zero", world, *ODD, *flags)


FINE_TUNING = ("--train", r"blocks\.1|norm", "--warmup", "1", "--decay", "cosine",
               "--min-lr", "1e-4", "--eval-every", "2", "--steps", "4")


@pytest.mark.parametrize("world, flags", [
    (2, ["--stage", "0"]),
    (4, ["--stage", "1", "--offload", "optimizer"]),
    (2, ["--stage", "2", "--accum", "2"]),
    (4, ["--stage", "3"]),
    (2, ["--impl", "torch", "--stage", "1"]),
    (2, ["--impl", "torch", "--stage", "2"]),
])
def test_fine_tuning_equals_one_process(world, flags):
    """Frozen layers, a schedule of the rate, and a loss on held-out text."""
    report = proves("zero", world, *ODD, *FINE_TUNING, *flags)
    assert list(report["validation"]) == ["-1", "1", "3"]  # before the first step, behind others


def check_agree():
    """After 10 steps all stages and offloads hold the same parameters."""
    corpus = torch.arange(10_000, dtype=torch.int64).mul(7919).remainder(251).to(torch.uint8)
    rank = dist.get_rank()
    rows = range(2 * rank, 2 * rank + 2)
    first = None
    for stage, offload in KINDS:
        model = build(GPTConfig(2, 12, 2, 257, 8), 0, dtype=torch.float64)
        ours = zero.parallelize(model, 1e-2, None, stage, offload)
        for step in range(10):
            x, y, valid = get_batch(corpus, 8, 0, step, 4, 0.3, rows)
            zero.train_step(ours, x, y, valid, 0.5, 1 + step % 2)
        state = zero.full_state_dict(ours)
        first = first or state
        gap, name = worst_gap(state, first)
        assert gap <= 1e-12, (stage, offload, name, gap)


def test_stages_agree():
    run(check_agree, 2)


# ---- saving ----------------------------------------------------------------------


@pytest.mark.parametrize("saved, resumed", some([
    ((2, "--stage", "0"), (3, "--stage", "3")),
    ((3, "--stage", "1", "--offload", "optimizer"), (2, "--stage", "0")),
    ((2, "--stage", "2"), (1, "--stage", "1")),
    ((3, "--stage", "3"), (2, "--stage", "2", "--offload", "optimizer")),
    ((2, "--stage", "3"), (2, "--stage", "3", "--offload", "optimizer")),
    ((2, "--impl", "torch", "--stage", "3"), (2, "--stage", "1")),
    ((2, "--stage", "1"), (2, "--impl", "torch", "--stage", "2")),
], every=2))
def test_resumes_in_another_stage(saved, resumed, tmp_path):
    """Losses and parameters of one process that has never stopped."""
    frozen = ("--train", "blocks|norm")
    world, *flags = saved
    script("zero", world, *PROOF, *ODD, *frozen, *flags, "--no-check", "--save", str(tmp_path))
    world, *flags = resumed
    report = proves("zero", world, *ODD, *frozen, *flags, "--steps", "5",
                    "--resume", str(tmp_path))
    assert len(report["loss"]) == 3


@pytest.mark.parametrize("flags", some([
    ["--stage", "0"], ["--stage", "1"], ["--stage", "2", "--offload", "optimizer"],
    ["--stage", "2"], ["--stage", "3"],
], every=2))
def test_bf16_resumes_to_the_bit(flags, tmp_path):
    """The fp32 masters are what is saved."""
    flags = [*SMALL, "--no-check", "--dtype", "bf16", *flags]
    folder = ["--save", str(tmp_path), "--save-every", "2"]
    whole = script("zero", 2, *flags, "--steps", "5", *folder)
    rest = script("zero", 2, *flags, "--steps", "5", "--resume", str(tmp_path / "4"))
    assert rest["loss"] == whole["loss"][4:]


def test_starts_from_weights(tmp_path):
    script("ddp", 2, *PROOF, *ODD, "--no-check", "--save", str(tmp_path))
    proves("zero", 2, *ODD, "--stage", "3", "--init-from", str(tmp_path))


# ---- cost ------------------------------------------------------------------------


@pytest.mark.parametrize("world, flags", [
    (2, ["--stage", "0"]),
    (4, ["--stage", "1"]),
    (2, ["--stage", "2", "--accum", "2"]),
    (4, ["--stage", "3"]),
    (2, ["--stage", "3", "--accum", "3", "--offload", "param"]),
    (1, ["--stage", "2"]),
])
def test_cost(world, flags):
    ranks = sorted({0, world - 1})
    textbook(dry_run_agrees("zero", world, *ODD, *flags, ranks=ranks))


PARTS = [
    r"blocks\.1|norm",  # forward turns around in the last unit
    "pos",  # an embedding, whose backward needs no parameter
    "tok",  # forward begins and ends in this unit
    r"blocks\.0\.attn",
]


@pytest.mark.parametrize("train, stage", [
    *itertools.product(PARTS, some(["3", "2"], every=2)), (PARTS[0], "1"),
])
def test_frozen_parameters_cost_nothing(train, stage):
    flags = ["--train", train, "--stage", stage, "--accum", "2"]
    textbook(dry_run_agrees("zero", 2, *ODD, *flags, ranks=[1]))


HELD = [lambda dp: 16, lambda dp: 4 + 12 / dp, lambda dp: 2 + 14 / dp, lambda dp: 16 / dp]
SENT = [2, 2, 2, 3]


def test_sixteen_bytes():
    """The paper's bytes in bf16; width 64 needs no padding."""
    world = 4
    runs = []
    for stage in STAGES:
        size = ["--width", "64", "--dtype", "bf16"]
        runs.append([*SMALL, *size, f"--stage={stage}", f"--dry-run={world}"])
    for stage, report in enumerate(alone("zero", *runs)):
        textbook(report)
        total = report["parameters"]["total"]
        memory = report["ranks"][0]["memory"]
        held = memory["parameters"] + memory["gradients"] + memory["optimizer"]
        [row] = [row for row in report["textbook"] if row["what"] == "optimizer held"]
        # the formula is "BYTES / RANKS + COUNTERS"
        counters = int(row["formula"].split("+ ")[1])
        assert held - counters == HELD[stage](world) * total
        sent = 0
        for name, collective in report["ranks"][0]["collectives"].items():
            if stage == 0 or name != "all_reduce":  # which is the norm's
                sent += collective["wire"]
        assert sent == SENT[stage] * 2 * total * (world - 1) / world


def check_transient(stage):
    """Never more than two units of parameters gathered, nor of gradients, but what is kept."""
    model = build(GPTConfig(5, 12, 2, 256, 8), 0, dtype=torch.float64)
    ours = zero.parallelize(model, 1e-3, None, stage)
    lend = zero.lend
    most = {"full": 0, "buffer": 0}

    def counting(t):
        lend(t)
        for name in most:
            there = sum(zero.has_memory(getattr(flat, name)) for flat in ours.flats)
            most[name] = max(most[name], there)

    zero.lend = counting
    for _ in range(3):
        x = torch.arange(16).view(2, 8)
        zero.train_step(ours, x, x, 32, 0)
    zero.lend = lend
    assert most["buffer"] == 2
    assert stage < 3 or most["full"] == 2
    assert not any(zero.has_memory(flat.buffer) for flat in ours.flats)
    assert stage < 3 or not any(zero.has_memory(flat.full) for flat in ours.flats)


def test_transient():
    run(each, 2, check_transient, [(2,), (3,)])


class Operators(TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func._opname] = self.calls.get(func._opname, 0) + 1
        return func(*args, **(kwargs or {}))


def check_few_kernels():
    """A step in bf16 casts a unit's gradients at once, and reads nothing back to the host."""
    model = build(GPTConfig(3, 12, 2, 256, 8), 0, dtype=torch.bfloat16)
    ours = zero.parallelize(model, 1e-3, None, 1)
    x = torch.arange(16).view(2, 8)
    zero.train_step(ours, x, x, 32, 1)
    ours.zero_grad()
    model(x).float().sum().backward()
    ours.reduce()
    with Operators() as seen:
        ours.clip_grad_norm_(1.0)
        ours.step()
    units = len(ours.flats)
    assert units == 4
    assert len(ours.parts) > 3 * units
    assert seen.calls["_to_copy"] == units  # gradients to fp32
    assert seen.calls["copy_"] == units  # masters to bf16
    assert seen.calls["_foreach_mul_"] == 1
    assert "_local_scalar_dense" not in seen.calls


def test_few_kernels_and_no_host_waits():
    run(check_few_kernels, 2)


def test_bf16():
    report = script("zero", 2, *SMALL, "--steps", "12", "--stage", "2", "--dtype", "bf16")
    assert report["check"]["passed"]
    textbook(report)


def test_both_times_both():
    size = ["--steps", "4", "--layers", "1", "--width", "32"]
    report = script("zero", 2, *size, "--impl", "both", "--stage", "2")
    assert report["ms_per_step"] > 0 and report["torch_ms_per_step"] > 0


# ---- the copy ----------------------------------------------------------------------


class Layer(nn.Module):
    """A gated MLP behind an RMSNorm, without biases."""

    def __init__(self, width, inner):
        super().__init__()
        self.scale = nn.RMSNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.into = nn.Linear(width, inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        h = self.scale(x)
        return x + self.out(F.silu(self.gate(h)) * self.into(h))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(5, 7, bias=False)
        self.layers = nn.ModuleList(Layer(7, 11) for _ in range(3))
        self.write = nn.Linear(7, 3, bias=False)

    def forward(self, x):
        x = self.read(x)
        for layer in self.layers:
            x = layer(x)
        return self.write(x)


def make_adamw(groups):
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-5)


def assert_same(found, want):
    assert found.keys() == want.keys()
    want = {name: t for name, t in want.items() if t.numel()}
    gap, name = worst_gap({name: found[name] for name in want}, want)
    assert gap <= 1e-10, (name, gap)


def check_copy(stage):
    n = dist.get_world_size()
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = Tower()
    torch.manual_seed(rank)
    model = Tower()
    ours = copied("zero").ZeRO(model, make_adamw, stage=stage, units=model.layers)
    reference = make_adamw(plain.parameters())
    x, y = torch.randn(2, 3, 2 * n, 5, generator=torch.Generator().manual_seed(1))
    y = y[..., :3]
    for step in range(3):
        reference.zero_grad()
        (plain(x[step]) - y[step]).square().sum().backward()
        gradients = {name: p.grad.clone() for name, p in plain.named_parameters()}
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        reference.step()

        mine = slice(2 * rank, 2 * rank + 2)
        ours.zero_grad()
        (model(x[step, mine]) - y[step, mine]).square().sum().backward()
        ours.reduce()
        assert_same(ours.full_gradients(), gradients)
        assert_same({"norm": ours.clip_grad_norm_(1.0)}, {"norm": norm})
        ours.step()
        assert_same(ours.full_state_dict(), plain.state_dict())


def test_copy():
    run(each, 4, check_copy, ONE_STAGE_EACH)


# ---- ZeRO on any module ------------------------------------------------------------


class Awkward(nn.Module):
    """Frozen, unused, used by rank 0 only, tied over units, of two dtypes, in no unit, in place."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.a = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.unused = nn.Linear(5, 5)
        self.sometimes = nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5)
        self.twice = nn.Linear(5, 5)
        self.tied.weight = self.a.weight
        self.low = nn.Linear(5, 5, dtype=torch.float32)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x, extra):
        x = self.twice(self.frozen(self.act(self.a(x)))) * self.scale
        low = self.low(x.detach().float())
        x = self.twice(self.tied(x))
        if extra:
            x = self.sometimes(x)
        return torch.cat([x, low.double()], -1)

    def units(self):  # `sometimes` is in none
        return [(self.a, self.unused), (self.tied, self.frozen), (self.twice, self.low)]


def check_any_module(stage, offload):
    """Steps on a share of the rows give what one process gets from all.

    Nobody uses `sometimes` in the last step.
    """
    n = dist.get_world_size()
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = Awkward()
    reference = adamw(plain.parameters(), 1e-2)
    torch.manual_seed(rank)  # other weights on every rank: rank 0's count
    module = Awkward()
    ours = zero.ZeRO(module, partial(adamw, lr=1e-2), None, stage, module.units(), offload)
    x = torch.randn(4, n, 6, 5, generator=torch.Generator().manual_seed(1))
    for step in range(4):
        reference.zero_grad()
        for r in range(n):
            plain(x[step, r], r == 0 and step < 3).square().sum().backward()
        reference.step()
        with torch.no_grad():
            module(x[step, rank], False)  # an evaluation in between must leave nothing stale
        ours.zero_grad()
        module(x[step, rank], rank == 0 and step < 3).square().sum().backward()
        ours.reduce()
        ours.step()
    state = zero.full_state_dict(ours)
    for name, want in plain.state_dict().items():
        rtol = 1e-4
        atol = 1e-5
        if want.dtype == torch.float64:
            rtol = 1e-9
            atol = 1e-12
        torch.testing.assert_close(state[name], want, rtol=rtol, atol=atol)


def test_any_module():
    cases = [(0, "none"), (1, "none"), (2, "optimizer"), (3, "none")]
    run(each, 3, check_any_module, cases)


def linears(count=4, width=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def gradients_after(module, stage, breaks):
    ours = zero.ZeRO(module, make_adamw, None, stage, module)
    x = torch.full((1, 3), 1.0 + dist.get_rank())
    if breaks:
        y = module[1](module[0](x))
        y.register_hook(lambda _: 1 / 0)
        ours.zero_grad()
        with pytest.raises(ZeroDivisionError):
            module[3](module[2](y)).sum().backward()
    ours.zero_grad()
    module(x).square().sum().backward()
    ours.reduce()
    return ours.full_gradients()


def check_exception(stage):
    """A backward that breaks off, on all ranks, leaves nothing behind that spoils the next."""
    want = gradients_after(linears(), stage, breaks=False)
    torch.testing.assert_close(gradients_after(linears(), stage, breaks=True), want)


def test_exception():
    run(each, 2, check_exception, ONE_STAGE_EACH[1:])


def losses_agree(make, stage, units, inputs, loss):
    """Two steps of ZeRO around make(), against one process.

    loss(module, inputs) is each rank's summand, the same on all ranks.
    """
    torch.manual_seed(0)
    plain = make()
    reference = make_adamw([p for p in plain.parameters() if p.requires_grad])
    torch.manual_seed(0)
    module = make()
    ours = zero.ZeRO(module, make_adamw, None, stage, units(module))
    n = dist.get_world_size()
    for _ in range(2):
        reference.zero_grad()
        (n * loss(plain, inputs)).backward()
        want = {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}
        reference.step()
        ours.zero_grad()
        loss(module, inputs).backward()
        ours.reduce()
        found = ours.full_gradients()
        assert_same({name: found[name] for name in want}, want)
        ours.step()
    assert_same(ours.full_state_dict(), plain.state_dict())
    return ours


class Biased(nn.Module):
    """T5's way: the first block makes a bias, which all later ones use and hand on."""

    def __init__(self, makes):
        super().__init__()
        self.up = nn.Linear(3, 3)
        self.make = None
        if makes:
            self.make = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

    def forward(self, x, bias):
        if self.make is not None:
            bias = self.make(x)
        return self.up(x + bias).tanh(), bias


class SharedBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Biased(i == 0) for i in range(4))

    def forward(self, x):
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


@dataclass
class Output:
    hidden: torch.Tensor
    more: dict


class Wrapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return Output(None, {"y": [self.linear(x).tanh()]})


class Dataclasses(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Wrapping() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).more["y"][0]
        return x


class Nested(nn.Module):
    """A parameter of the outer unit is used before and behind the inner ones."""

    def __init__(self):
        super().__init__()
        self.before = nn.Parameter(torch.randn(3, 3))
        self.inner = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.behind = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        x = (x @ self.before).tanh()
        for inner in self.inner:
            x = inner(x * self.behind.sum()).tanh()
        return (x @ self.behind @ self.before).tanh()


def two_nested():
    return nn.Sequential(Nested(), nn.Linear(3, 3), Nested())


def units_of_nested(module, reverse):
    units = [*module]
    for outer in (module[0], module[2]):
        units += outer.inner
    if reverse:
        units = units[::-1]
    return units


def sum_of_squares(module, x):
    return module(x).square().sum()


def recomputed(module, x):
    return checkpoint(module, x, use_reentrant=False).square().sum()


def check_stage_3():
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    cases = [
        (SharedBias, lambda m: m.blocks, sum_of_squares),
        (Dataclasses, lambda m: m.blocks, sum_of_squares),
        (two_nested, partial(units_of_nested, reverse=False), sum_of_squares),
        (two_nested, partial(units_of_nested, reverse=True), sum_of_squares),
        (two_nested, partial(units_of_nested, reverse=True), recomputed),
        (linears, lambda m: m, recomputed),
    ]
    for make, units, loss in cases:
        ours = losses_agree(make, 3, units, x, loss)
        assert any(flat.stage == 3 for flat in ours.flats)
        assert not any(zero.has_memory(flat.full) for flat in ours.flats if flat.stage == 3)


class Gated(nn.Module):
    """A unit with a parameter that only some ranks use."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.gate = nn.Parameter(torch.randn(3))

    def forward(self, x, gated):
        x = self.linear(x).tanh()
        if gated:
            x = x * self.gate
        return x


class GatedTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)  # in no unit
        self.blocks = nn.ModuleList(Gated() for _ in range(4))

    def forward(self, x, gated):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, gated)
        return x


def order_of_collectives(ours, module, x, gated):
    """-> [("gather" or "sum", index of the flat)] in order, and how many of them backward has done.
    """
    found = []

    def noting(what, function):
        def noted(flat):
            found.append((what, ours.flats.index(flat)))
            function(flat)
        return noted

    with pytest.MonkeyPatch.context() as patch:
        for what, name in ("gather", "start_gather"), ("sum", "start_reduce"):
            patch.setattr(zero.Flat, name, noting(what, getattr(zero.Flat, name)))
        module(x, gated).square().sum().backward()
        before = len(found)
        ours.reduce()
    return found, before


def check_used_by_some_ranks():
    """In stage 3 ranks gather and sum in one order, whichever parameters of a unit they use.

    Units are flats 1 to 4, which are summed while backward runs. Flat 0 is what is in no unit, and
    is summed in reduce().
    """
    plain = GatedTower()
    module = GatedTower()
    module.load_state_dict(plain.state_dict())
    ours = zero.ZeRO(module, make_adamw, None, 3, module.blocks)
    x = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(1))
    rank = dist.get_rank()
    for _ in range(2):
        ours.zero_grad()
        order, in_backward = order_of_collectives(ours, module, x[rank], rank == 0)
    expected = [("gather", 1), ("gather", 2), ("gather", 3), ("gather", 4), ("gather", 3)]
    expected += [("sum", 4), ("gather", 2), ("sum", 3), ("gather", 1), ("sum", 2), ("sum", 1)]
    assert order == [*expected, ("sum", 0)]
    assert in_backward == len(expected)
    gradients = ours.full_gradients()
    sum(plain(x[r], r == 0).square().sum() for r in range(2)).backward()
    assert_same(gradients, {name: p.grad for name, p in plain.named_parameters()})


def test_used_by_some_ranks():
    run(check_used_by_some_ranks, 2)


def test_tensors_that_cross_units():
    """Shared by units, in dataclasses, units inside units, activation checkpointing."""
    run(check_stage_3, 2)


def gathers_of_step(ours, module, x):
    calls = []
    gather = zero.Flat.start_gather

    def counting(flat):
        calls.append(flat)
        gather(flat)

    zero.Flat.start_gather = counting
    ours.zero_grad()
    sum_of_squares(module, x).backward()
    ours.reduce()
    zero.Flat.start_gather = gather
    ours.step()
    return len(calls)


def check_many_forwards():
    """50 forwards without backward, with a graph and without, do nothing to the next step."""
    module = linears()
    ours = zero.ZeRO(module, make_adamw, None, 3, module)
    x = torch.ones(2, 3)
    gathers_of_step(ours, module, x)
    steady = gathers_of_step(ours, module, x)
    assert steady == 2 * 4 - 1  # the last unit stays
    for _ in range(50):
        module(x)
    with torch.no_grad():
        for _ in range(50):
            module(x)
    ours.free_units()
    assert not any(zero.has_memory(flat.full) for flat in ours.flats)
    assert gathers_of_step(ours, module, x) == steady
    ours.zero_grad()
    sum(sum_of_squares(module, x) for _ in range(50)).backward()
    ours.reduce()
    many = ours.full_gradients()
    ours.zero_grad()
    sum_of_squares(module, x).backward()
    ours.reduce()
    one = ours.full_gradients()
    assert_same(many, {name: 50 * gradient for name, gradient in one.items()})
    ours.zero_grad()
    leaf = x.clone().requires_grad_()
    torch.autograd.grad(sum_of_squares(module, leaf), leaf)  # is no reason to sum anything
    sum_of_squares(module, x).backward()
    ours.reduce()
    assert_same(ours.full_gradients(), one)


def test_many_forwards():
    run(check_many_forwards, 2)


class LastIsEmpty(nn.Module):
    """A unit whose last parameter has no numbers, and a unit that has no other."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(5.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.void = nn.Linear(3, 0)

    def forward(self, x):
        return x * self.weight.square() + self.empty.sum() + self.void(x[:3]).sum()


def check_empty_parameter():
    for stage in STAGES:
        x = torch.ones(5)
        ours = losses_agree(LastIsEmpty, stage, lambda m: [m, m.void], x, sum_of_squares)
        names = {"weight", "empty", "void.weight", "void.bias"}
        assert set(ours.full_gradients()) == names
        assert len(ours.flats) == 1


def test_zero_sized_last_parameter():
    run(check_empty_parameter, 2)


# ---- what ranks start with ---------------------------------------------------------


class Strided(nn.Module):
    """Parameters and buffers that are not dense, and dtypes that backends do not know."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 6), value)[:, :3])
        self.frozen = nn.Parameter(torch.full((4, 6), value).T[1:4], requires_grad=False)
        self.register_buffer("table", torch.full((5, 8), value)[:, ::3])
        self.register_buffer("count", torch.full((), int(value), dtype=torch.int16))
        self.register_buffer("flags", torch.full((3,), value > 1))


def check_first_ranks_values():
    for stage in STAGES:
        module = Strided(1.0 + dist.get_rank())
        ours = zero.ZeRO(module, make_adamw, None, stage)
        for name, t in ours.full_state_dict().items():
            assert (t == (name != "flags")).all(), (stage, name, t)


def test_first_ranks_values_count_whatever_the_layout():
    run(check_first_ranks_values, 2)


# ---- parameter groups and schedules of the rate ------------------------------------


def groups_by_shape(module):
    matrices = [p for p in module.parameters() if p.dim() > 1]
    vectors = [p for p in module.parameters() if p.dim() == 1]
    return [{"params": vectors, "weight_decay": 0.0, "lr": 3e-2},
            {"params": matrices, "weight_decay": 0.3}]


def sgd(groups):
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)


def schedules_of(optimizer):
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, rest], [2])


def check_groups(stage, offload):
    for make in (make_adamw, sgd):
        plain = linears()
        reference = make(groups_by_shape(plain))
        module = linears()
        groups = groups_by_shape(module)
        ours = zero.ZeRO(module, make, None, stage, module, offload, groups)
        schedules = [schedules_of(reference), schedules_of(ours.optimizer)]
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
        for _ in range(5):
            reference.zero_grad()
            sum_of_squares(plain, x).backward()
            reference.step()
            ours.zero_grad()
            sum_of_squares(module, x[dist.get_rank():][:1]).backward()
            ours.reduce()
            ours.step()
            for schedule in schedules:
                schedule.step()
            want = [group["lr"] for group in reference.param_groups]
            assert [group["lr"] for group in ours.optimizer.param_groups] == want
        assert_same(ours.full_state_dict(), plain.state_dict())


def test_parameter_groups_and_schedules():
    run(each, 2, check_groups, [(0, "none"), (2, "optimizer"), (3, "none")])


# ---- what is refused ---------------------------------------------------------------


class Lamb(torch.optim.AdamW):
    """Not elementwise, by its name."""


class AdamP(torch.optim.AdamW):
    """Not elementwise, by its name: it projects a parameter's gradient."""


class Heir(torch.optim.Adafactor):
    """Not elementwise, by its parent's name."""


class Counting(torch.optim.AdamW):
    """Counts its calls in its groups, as fused optimizers of others do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        super().step(closure)


def by_shape(groups):
    """Sees 1-D pieces, where its author thought of matrices."""
    pieces = [p for group in groups for p in group["params"]]
    return torch.optim.AdamW([{"params": [p for p in pieces if p.dim() > 1]},
                              {"params": [p for p in pieces if p.dim() == 1]}])


def shared_memory():
    module = linears()
    module[1].weight = nn.Parameter(module[0].weight.data)
    return module


def check_refused_at_construction():
    linear = linears()
    everything = list(linear.parameters())
    strange = list(linears().parameters())
    cases = [
        ("number alone", linear, Lamb, {}),
        ("number alone", linear, Heir, {}),
        ("number alone", linear, AdamP, {}),
        ("number alone", linear, torch.optim.LBFGS, {"groups": [{"params": everything}]}),
        ("number alone", linear, partial(Layerwise, lr=0.0), {}),
        ("number alone", linear, partial(DecayByShape, lr=0.1), {}),
        ("must keep the groups", linear, by_shape, {}),
        ("in no group", linear, sgd, {"groups": [{"params": everything[1:]}]}),
        ("module has not", linear, sgd, {"groups": [{"params": everything + strange}]}),
        ("two of the groups", linear, sgd, {"groups": [{"params": everything + everything[:1]}]}),
        ("two of the units", linear, sgd, {"units": [linear[0], (linear[0], linear[1])]}),
        ("sparse=True", nn.Embedding(5, 3, sparse=True), sgd, {}),
        ("max_norm", nn.Embedding(5, 3, max_norm=1.0), sgd, {}),
        ("complex", nn.Linear(3, 3, dtype=torch.complex128), sgd, {}),
        ("meta", nn.Linear(3, 3, device="meta"), sgd, {}),
        ("share memory", shared_memory(), sgd, {}),
        ("stages are 0 to 3", linear, sgd, {"stage": 4}),
        ("stages are 0 to 3", linear, sgd, {"offload": "param"}),
        ("stages are 0 to 3", linear, sgd, {"stage": 0, "offload": "optimizer"}),
    ]
    for words, module, make, options in cases:
        with pytest.raises(ValueError, match=words):
            zero.ZeRO(module, make, **options)


def test_refused_at_construction():
    run(check_refused_at_construction, 1)


def check_refused_later(stage):
    module = linears()
    x = torch.ones(2, 3)
    ours = zero.ZeRO(module, make_adamw, None, stage, module)

    ours.zero_grad()
    with pytest.raises(RuntimeError, match="create_graph"):
        sum_of_squares(module, x).backward(create_graph=True)
    ours.zero_grad()
    sum_of_squares(module, x).backward()
    with pytest.raises(RuntimeError, match="zero.sync"):
        sum_of_squares(module, x).backward()
    ours.zero_grad()
    sum_of_squares(module, x).backward()
    ours.reduce()
    with pytest.raises(ZeroDivisionError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours.optimizer, "step", lambda: 1 / 0)
        ours.step()
    with pytest.raises(RuntimeError, match="zero.step"):
        ours.optimizer.step()
    ours.step()

    with pytest.raises(RuntimeError, match="assign"):
        module.load_state_dict(linears().state_dict(), assign=True)
    if stage == 3:
        with pytest.raises(RuntimeError, match="full_state_dict"):
            module.state_dict()
        with pytest.raises(TypeError, match="full_state_dict"):
            copy.deepcopy(module)
    module[0].weight.data = torch.ones(3, 3)
    with pytest.raises(RuntimeError, match="has left the memory"):
        ours.step()


def check_refused_parameters_and_optimizers(stage):
    functional = nn.Embedding(5, 3)
    zero.ZeRO(functional, make_adamw, None, stage)
    with pytest.raises(RuntimeError, match="sparse"):
        F.embedding(torch.tensor([1]), functional.weight, sparse=True).sum().backward()

    module = linears()
    module[0].weight.requires_grad_(False)
    ours = zero.ZeRO(module, Counting, None, stage)
    module[0].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="was frozen"):
        ours.step()
    module[0].weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(RuntimeError, match="or not there"):
        ours.step()
    module[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="keeps account"):
        ours.step()


@pytest.mark.parametrize("check", [
    check_refused_later, check_refused_parameters_and_optimizers,
])
def test_refused_in_words(check):
    run(each, 2, check, ONE_STAGE_EACH)


def check_in_place(stage, dtype, offload):
    """A parameter that is changed in place is trained on from there, or that is refused."""
    plain = linears()
    module = linears().to(dtype)
    ours = zero.ZeRO(module, make_adamw, None, stage, (), offload)
    with torch.no_grad():
        for p in [*plain.parameters(), *module.parameters()]:
            p.mul_(0.5)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    ours.zero_grad()
    sum_of_squares(module, x[dist.get_rank():][:1].to(dtype)).backward()
    ours.reduce()
    if dtype == torch.bfloat16 or offload == "optimizer":
        with pytest.raises(RuntimeError, match="in place"):
            ours.step()
        return
    ours.step()
    sum_of_squares(plain, x).backward()
    make_adamw(plain.parameters()).step()
    assert_same(ours.full_state_dict(), plain.state_dict())


def test_changes_in_place():
    run(each, 2, check_in_place, [
        (0, torch.float64, "none"), (1, torch.float64, "none"), (2, torch.float64, "none"),
        (1, torch.bfloat16, "none"), (2, torch.float64, "optimizer"),
    ])


# ---- loading -----------------------------------------------------------------------


class Owner(nn.Module):
    """A unit with parameters of its own and of its children."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)

    def forward(self, x):
        return self.b(self.a(x).tanh() * self.scale)


def owners():
    return nn.Sequential(Owner(), nn.Linear(3, 3), Owner())


def check_load(stage, offload, dtype):
    """What load_state_dict brings after wrapping stays, and is trained on from there."""
    torch.manual_seed(1)
    loaded = owners().to(dtype)
    torch.manual_seed(0)
    module = owners().to(dtype)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    ours = zero.ZeRO(module, make_adamw, None, stage, module, offload)
    x = torch.ones(2, 3, dtype=dtype)
    with torch.no_grad():
        module(x)  # the last unit is still gathered
    module[2].load_state_dict(loaded[2].state_dict())
    want = dict(before)
    for name, t in loaded.state_dict().items():
        if name.startswith("2."):
            want[name] = t
    assert_same(ours.full_state_dict(), want)
    missing, _ = module.load_state_dict({"0.a.bias": loaded[0].a.bias}, strict=False)
    assert len(missing) == len(want) - 1
    want["0.a.bias"] = loaded[0].a.bias.detach()
    assert_same(ours.full_state_dict(), want)
    module.load_state_dict(loaded.state_dict())
    ours.zero_grad()
    ours.step()  # without gradients: masters are written back
    assert_same(ours.full_state_dict(), loaded.state_dict())
    torch.testing.assert_close(module(x), loaded(x))


def test_load_state_dict_after_wrapping():
    dtypes = torch.float64, torch.bfloat16
    run(each, 2, check_load, [(*kind, dtype) for kind in KINDS for dtype in dtypes])


def check_load_of_a_part(stage):
    """Masters of what the loaded part does not name stay as fine as they were."""
    torch.manual_seed(0)
    module = owners().bfloat16()
    ours = zero.ZeRO(module, make_adamw, None, stage, module)
    ours.zero_grad()
    sum_of_squares(module, torch.ones(2, 3, dtype=torch.bfloat16)).backward()
    ours.reduce()
    ours.step()  # masters are now finer than the parameters
    masters = [flat.master.clone() for flat in ours.flats]
    loaded = torch.full((3,), 7.0)
    module.load_state_dict({"1.bias": loaded}, strict=False)
    changed = 0
    for flat, before in zip(ours.flats, masters):
        differs = flat.master != before
        assert (flat.master[differs] == 7).all()
        changed += int(differs.sum())
    total = torch.tensor(changed)
    if stage > 0:
        dist.all_reduce(total)
    assert total == 3
    assert (ours.full_state_dict()["1.bias"] == 7).all()


@pytest.mark.parametrize("stage", [1, 3])
def test_load_of_a_part(stage):
    run(check_load_of_a_part, 2, stage)


def check_deepcopy(stage):
    """A copy of the module, such as an average, is nobody's: it does not touch what is trained."""
    group = dist.new_group([0, 1])
    torch.manual_seed(0)
    module = owners().bfloat16()
    ours = zero.ZeRO(module, make_adamw, group, stage, module)
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    ours.zero_grad()
    sum_of_squares(module, x).backward()
    ours.reduce()
    ours.step()  # masters are now finer than the parameters
    masters = [flat.master.clone() for flat in ours.flats]
    average = copy.deepcopy(module)
    assert_same(average.state_dict(), module.state_dict())
    average.load_state_dict({name: t + 1 for name, t in average.state_dict().items()})
    assert all(p.grad is None for p in average.parameters())
    sum_of_squares(average, x).backward()
    assert all(p.grad is not None for p in average.parameters())
    for flat, master in zip(ours.flats, masters):
        assert torch.equal(flat.master, master)
        assert not flat.closed or stage < 2


def test_deepcopy():
    run(each, 2, check_deepcopy, ONE_STAGE_EACH[:3])


# ---- side by side ------------------------------------------------------------------


def check_side_by_side(stage):
    """Two ZeROs train different parts of the same blocks."""
    plain = owners()
    reference = make_adamw(plain.parameters())
    module = owners()
    module.load_state_dict(plain.state_dict())
    inner = nn.ModuleList([module[0].a, module[2].a])
    outer = nn.ModuleList([module[1], module[0].b, module[2].b])
    for owner in module[0], module[2]:
        owner.b.register_parameter("scale", owner.scale)
    both = [
        zero.ZeRO(inner, make_adamw, None, stage, [(m,) for m in inner]),
        zero.ZeRO(outer, make_adamw, None, stage, [(m,) for m in module]),
    ]
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        reference.zero_grad()
        sum_of_squares(plain, x).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        reference.step()
        for ours in both:
            ours.zero_grad()
        sum_of_squares(module, x[dist.get_rank():][:1]).backward()
        for ours in both:
            ours.reduce()
        whole = torch.stack([ours.norm() for ours in both]).square().sum().sqrt()
        assert_same({"norm": whole}, {"norm": norm})
        for ours in both:
            ours.scale_to_norm(1.0, whole)
            ours.step()
    want = plain.state_dict()
    found = both[0].full_state_dict()
    assert_same(found, {"0.weight": want["0.a.weight"], "0.bias": want["0.a.bias"],
                        "1.weight": want["2.a.weight"], "1.bias": want["2.a.bias"]})
    found = both[1].full_state_dict()
    assert_same({"scale": found["1.scale"]}, {"scale": want["0.scale"]})


def test_side_by_side():
    run(each, 2, check_side_by_side, ONE_STAGE_EACH)


# ---- pure parts --------------------------------------------------------------------


def check_parts():
    """The parts of all ranks are every parameter once, end to end, and padding."""
    n = dist.get_world_size()
    for sizes in [(1,), (7, 1), (3, 3, 1, 1), (2, 20, 5)]:
        module = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes)
        original = [p.detach().clone() for p in module]
        ours = zero.ZeRO(module, make_adamw, None, 1)
        [flat] = ours.flats
        assert flat.size == sum(sizes)
        assert flat.chunk == math.ceil(flat.size / n)
        assert sum(len(part.master) for part in ours.parts) == flat.chunk  # padding included
        seen = [torch.zeros(size) for size in sizes]
        names = {p: i for i, p in enumerate(module)}
        for part in ours.parts:
            run_of = slice(part.first, part.first + part.size)
            i = names[part.parameter]
            seen[i][run_of] += 1
            assert torch.equal(part.master[:part.size], original[i][run_of])
        for count in seen:
            dist.all_reduce(count)  # partial -> replicated
            assert (count == 1).all()


@pytest.mark.parametrize("world", [1, 3])
def test_parts(world):
    run(check_parts, world)


def test_tensors_in():
    a, b, c = torch.ones(3, 1)

    class Plain:
        pass

    thing = Plain()
    thing.itself = thing
    thing.c = c
    found = zero.tensors_in(({"a": [a]}, Output(b, {}), thing, "text", None, 3))
    assert [id(t) for t in found] == [id(a), id(b), id(c)]


# ---- planted bugs: each must fail the check ------------------------------------------


def last_microbatch(module):
    """Only the last micro-batch's gradient is kept."""
    start = module.Flat.start_reduce

    def broken(self):
        self.grad.zero_()
        start(self)

    module.Flat.start_reduce = broken


def mean(module):
    """Averaged over ranks, as production APIs do."""
    norm = module.ZeRO.norm

    def broken(self):
        for flat in self.flats:
            flat.grad /= dist.get_world_size()
        return norm(self)

    module.ZeRO.norm = broken


def padding_counted(module):
    """The gradient norm takes the padding in."""
    norm = module.ZeRO.norm

    def broken(self):
        padding = sum(flat.length - flat.size for flat in self.flats)
        assert padding
        return (norm(self) ** 2 + padding).sqrt()

    module.ZeRO.norm = broken


def stale(module):
    """What was gathered before the step is used after it."""
    gather = module.Flat.start_gather
    first = {}

    def broken(self):
        if self not in first:
            gather(self)
            self.wait()
            first[self] = self.full.clone()
        module.lend(self.full)
        self.full.copy_(first[self])

    module.Flat.start_gather = broken


def tied_twice(module):
    """The tied weight gets a second parameter, with shards and gradients of its own."""
    parallelize = module.parallelize
    full = module.full_gradients

    def broken(model, *rest):
        model.head.weight = nn.Parameter(model.tok.weight.detach().clone())
        return parallelize(model, *rest)

    def without_head(ours):
        return {name: t for name, t in full(ours).items() if name != "head.weight"}

    module.parallelize = broken
    module.full_gradients = without_head


def frozen_in_the_norm(module):
    """What is frozen has a gradient that only the norm sees."""
    norm = module.ZeRO.norm

    def broken(self):
        return (norm(self) ** 2 + sum(p.square().sum() for p in self.frozen)).sqrt()

    module.ZeRO.norm = broken


@pytest.mark.parametrize("plant, flags", [
    (last_microbatch, ["--stage", "2", "--accum", "2"]),
    (mean, ["--stage", "1"]),
    (padding_counted, ["--stage", "2"]),
    (stale, ["--stage", "3"]),
    (tied_twice, ["--stage", "3"]),
    (frozen_in_the_norm, ["--stage", "1", "--train", "blocks"]),
])
def test_planted(plant, flags):
    proves("zero", 2, *ODD, *flags, plant=plant)
