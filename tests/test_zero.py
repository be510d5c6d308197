import pytest
import torch
import torch.distributed as dist
import torch.nn as nn


import zero
from common import GPTConfig, adamw, build, get_batch
from conftest import SMALL, alone, dry_run_agrees, proves, run, script, textbook
from harness.compare import worst_gap

ODD = ("--vocab", "257", "--width", "33", "--heads", "3")  # flat sizes that 2, 3 and 4 ranks do not divide


@pytest.mark.parametrize("world, flags", [
    (1, ["--stage", "3"]), (2, ["--stage", "0", "--accum", "3"]),
    (3, ["--stage", "1", "--accum", "3", "--batch", "10"]),
    (4, ["--stage", "2", "--accum", "2"]), (3, ["--stage", "3", "--accum", "3", "--batch", "10"]),
    (4, ["--stage", "3", "--clip", "0"]), (2, ["--stage", "3", "--offload", "param", "--accum", "2"]),
    (2, ["--stage", "2", "--offload", "optimizer"]), (2, ["--impl", "torch", "--stage", "1"]),
    (2, ["--impl", "torch", "--stage", "3"])])
def test_equals_one_process(world, flags):
    proves("zero", world, *ODD, *flags)


def check_agree():
    """After 10 steps all stages and offloads hold the same parameters."""
    corpus = torch.arange(10_000, dtype=torch.int64).mul(7919).remainder(251).to(torch.uint8)
    first = None
    for stage, offload in [(0, "none"), (1, "none"), (1, "optimizer"), (2, "none"), (2, "optimizer"),
                           (3, "none"), (3, "optimizer"), (3, "param")]:
        model = build(GPTConfig(2, 12, 2, 257, 8), 0, dtype=torch.float64)
        ours = zero.parallelize(model, 1e-2, None, stage, offload)
        for step in range(10):
            x, y, valid = get_batch(corpus, 8, 0, step, 4, 0.3, range(2 * dist.get_rank(), 2 * dist.get_rank() + 2))
            zero.train_step(ours, x, y, valid, 0.5, 1 + step % 2)
        state = zero.full_state_dict(ours)
        first = first or state
        assert worst_gap(state, first)[0] <= 1e-12, (stage, offload, worst_gap(state, first))


def test_stages_agree():
    run(check_agree, 2)


# ---- cost ------------------------------------------------------------------------


@pytest.mark.parametrize("world, flags", [
    (2, ["--stage", "0"]), (4, ["--stage", "1"]), (2, ["--stage", "2", "--accum", "2"]), (4, ["--stage", "3"]),
    (2, ["--stage", "3", "--accum", "3", "--offload", "param"]), (1, ["--stage", "2"])])
def test_cost(world, flags):
    textbook(dry_run_agrees("zero", world, *ODD, *flags, ranks=sorted({0, world - 1})))


HELD = [lambda n: 16, lambda n: 4 + 12 / n, lambda n: 2 + 14 / n, lambda n: 16 / n]


def test_sixteen_bytes():
    """The paper's state bytes in bf16; width 64 needs no padding."""
    cases = [(stage, world) for stage in range(4) for world in (2, 4)]
    reports = alone("zero", *([*SMALL, "--width", "64", "--dtype", "bf16", f"--stage={stage}", f"--dry-run={world}"]
                              for stage, world in cases))
    for (stage, world), r in zip(cases, reports):
        textbook(r)
        memory, total, sent = r["ranks"][0]["memory"], r["parameters"]["total"], r["ranks"][0]["collectives"]
        counters = next(int(row["formula"].split("+ ")[1]) for row in r["textbook"] if "optimizer" in row["what"])
        assert sum(memory[k] for k in ("parameters", "gradients", "optimizer")) - counters == HELD[stage](world) * total
        moved = {k: c["wire"] for k, c in sent.items() if stage == 0 or k != "all_reduce"}
        assert sum(moved.values()) == (2, 2, 2, 3)[stage] * 2 * total * (world - 1) / world


def check_transient(stage):
    """Never more than two units of parameters gathered, nor of gradients, beside what the stage keeps."""
    model = build(GPTConfig(5, 12, 2, 256, 8), 0, dtype=torch.float64)
    most = 0
    ours = zero.parallelize(model, 1e-3, None, stage)
    lend = zero.lend

    def counting(t):
        nonlocal most
        lend(t)
        lent = [f.full if stage == 3 else f.buffer for f in ours.flats]
        most = max(most, sum(zero.has_memory(flat) for flat in lent))
    zero.lend = counting
    for _ in range(3):
        x = torch.arange(16).view(2, 8)
        zero.train_step(ours, x, x, 32, 0)
    zero.lend = lend
    assert most == 2
    assert not any(zero.has_memory(f.buffer) for f in ours.flats)


@pytest.mark.parametrize("stage", [2, 3])
def test_transient(stage):
    run(check_transient, 2, stage)


def test_bf16():
    report = script("zero", 2, "--steps", "12", "--layers", "2", "--width", "64", "--stage", "2", "--dtype", "bf16")
    assert report["check"]["passed"] and report["check"]["loss"] < 2e-2
    textbook(report)


def test_both_times_both():
    report = script("zero", 2, "--steps", "4", "--layers", "1", "--width", "32", "--impl", "both", "--stage", "2")
    assert report["speedup"] == report["torch_ms_per_step"] / report["ms_per_step"] > 0


# ---- ZeRO on any module ------------------------------------------------------------


class Awkward(nn.Module):
    """Frozen, unused, used by rank 0 only, tied across units, of another dtype, outside any unit, in place."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.a, self.frozen, self.unused = nn.Linear(5, 5), nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 5)
        self.sometimes, self.tied, self.twice = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.tied.weight = self.a.weight
        self.low, self.act = nn.Linear(5, 5, dtype=torch.float32), nn.ReLU(inplace=True)

    def forward(self, x, extra):
        x = self.twice(self.frozen(self.act(self.a(x)))) * self.scale
        low, x = self.low(x.detach().float()), self.twice(self.tied(x))
        return torch.cat([self.sometimes(x) if extra else x, low.double()], -1)

    def units(self):
        return [(self.a, self.unused), (self.tied, self.frozen), (self.twice, self.low)]  # `sometimes` in none


def check_any_module(stage, offload):
    """Steps on our share of the rows give what one process with all rows gets; nobody uses `sometimes` in the last."""
    n, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    plain = Awkward()
    reference = adamw(plain.parameters(), 1e-2)
    torch.manual_seed(rank)  # other weights on every rank: rank 0's count
    module = Awkward()
    ours = zero.ZeRO(module, lambda ps: adamw(ps, 1e-2), None, stage, module.units(), offload)
    x = torch.randn(4, n, 6, 5, generator=torch.Generator().manual_seed(1))
    for step in range(4):
        reference.zero_grad()
        sum(plain(x[step, r], r == 0 and step < 3).square().sum() for r in range(n)).backward()
        reference.step()
        with torch.no_grad():
            module(x[step, rank], False)  # an evaluation in between must leave nothing stale
        ours.zero_grad()
        module(x[step, rank], rank == 0 and step < 3).square().sum().backward()
        ours.reduce()
        ours.step()
    state = zero.full_state_dict(ours)
    for name, want in plain.state_dict().items():
        tight = want.dtype == torch.float64
        torch.testing.assert_close(state[name], want, rtol=1e-9 if tight else 1e-4, atol=1e-12 if tight else 1e-5)


def check_exception(stage):
    """A backward that breaks off, on all ranks, leaves nothing behind that spoils the next."""
    def gradients(breaks):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        ours = zero.ZeRO(module, lambda ps: adamw(ps, 1e-2), None, stage, [*zip(module)])
        if breaks:
            y = module[1](module[0](x))
            y.register_hook(lambda _: 1 / 0)
            ours.zero_grad()
            with pytest.raises(ZeroDivisionError):
                module[3](module[2](y)).sum().backward()
        ours.zero_grad()
        module(x).square().sum().backward()
        ours.reduce()
        return zero.full_gradients(ours)
    x = torch.full((1, 3), 1.0 + dist.get_rank())
    torch.testing.assert_close(gradients(True), gradients(False))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_exception(stage):
    run(check_exception, 2, stage)


@pytest.mark.parametrize("world, stage, offload", [
    (2, 0, "none"), (3, 1, "none"), (3, 2, "optimizer"), (2, 3, "none"), (3, 3, "param")])
def test_any_module(world, stage, offload):
    run(check_any_module, world, stage, offload)


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
    step = module.ZeRO.norm

    def broken(self):
        for flat in self.flats:
            flat.grad /= dist.get_world_size()
        return step(self)
    module.ZeRO.norm = broken


def padding_counted(module):
    """The gradient norm takes the padding in."""
    norm = module.ZeRO.norm

    def broken(self):
        total = norm(self) ** 2
        padding = sum(f.full.numel() - f.size for f in self.flats)
        assert padding
        return (total + padding).sqrt()
    module.ZeRO.norm = broken


def stale(module):
    """What was gathered before the step is used after it."""
    gather = module.Flat.start_gather

    def broken(self):
        if not hasattr(self, "old"):
            gather(self)
            self.wait()
            self.old = self.full.clone()
        module.lend(self.full)
        self.full.copy_(self.old)
    module.Flat.start_gather = broken


def tied_twice(module):
    """The tied weight gets a second parameter, with shards and gradients of its own."""
    parallelize = module.parallelize

    def broken(model, *rest):
        model.head.weight = nn.Parameter(model.tok.weight.detach().clone())
        return parallelize(model, *rest)
    module.parallelize = broken
    full = module.full_gradients
    module.full_gradients = lambda z: {k: v for k, v in full(z).items() if k != "head.weight"}


@pytest.mark.parametrize("plant, flags", [
    (last_microbatch, ["--stage", "2", "--accum", "2"]), (mean, ["--stage", "1"]), (padding_counted, ["--stage", "2"]),
    (stale, ["--stage", "3"]), (tied_twice, ["--stage", "3"])])
def test_planted(plant, flags):
    proves("zero", 2, *ODD, *flags, plant=plant)


@pytest.mark.parametrize("world, flags", [
    (2, ["--offload", "optimizer", "--stage", "0"]), (1, ["--offload", "param", "--stage", "2"]), (1, ["--stage", "4"]),
    (1, ["--accum", "9"]), (1, ["--impl", "torch", "--offload", "optimizer"]), (1, ["--impl", "both", "--accum", "2"]),
    (1, ["--impl", "torch", "--dry-run", "2", "--stage", "1"])])
def test_bad_usage(world, flags):
    script("zero", world, *flags, code=2)
