import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from conftest import dry_run_agrees, proves, run, script, textbook
from ddp import BucketedDDP


@pytest.mark.parametrize("world, flags", [
    (1, []), (2, []), (4, []), (3, ["--batch", "7"]), (2, ["--bucket-mb", "0"]), (4, ["--bucket-mb", "0.01"]),
    (2, ["--vocab", "257", "--clip", "0"]), (2, ["--impl", "torch"]), (4, ["--impl", "torch", "--batch", "4"])])
def test_equals_one_process(world, flags):
    proves("ddp", world, *flags)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_cost(world):
    real = dry_run_agrees("ddp", world, "--bucket-mb", "0.02")
    textbook(real)
    gradients = 4 * real["parameters"]["total"]
    for rank in real["ranks"]:
        sent = rank["collectives"]["all_reduce"]
        assert sent["payload"] == gradients and sent["wire"] == 2 * (world - 1) * gradients / world
        assert sent["calls"] > 2


def test_both_times_both():
    report = script("ddp", 2, "--steps", "4", "--layers", "1", "--width", "32", "--impl", "both")
    assert report["speedup"] == report["torch_ms_per_step"] / report["ms_per_step"] > 0


# ---- BucketedDDP as a drop-in --------------------------------------------------


class Awkward(nn.Module):
    """BatchNorm, a frozen layer, one that no rank uses, one that rank 0 alone uses, a tied weight, an fp32 one."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.frozen = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6).requires_grad_(False)
        self.unused, self.sometimes, self.tied = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.tied.weight = self.a.weight
        self.low = nn.Linear(6, 6, dtype=torch.float32)

    def forward(self, x):
        x = self.tied(torch.relu(self.frozen(self.norm(self.a(x)))))
        x = x + self.low(x.float()).double()
        return self.sometimes(x) if dist.get_rank() == 0 else x


def both_gradients(world, **flags):
    """Gradients of the same three backwards, the first two under no_sync -> {name: gradient or None}: theirs, ours."""
    result = []
    for wrap in (lambda m: DistributedDataParallel(m, find_unused_parameters=True), lambda m: BucketedDDP(m, **flags)):
        torch.manual_seed(dist.get_rank())  # other weights and data on every rank: the broadcast must make them agree
        model = wrap(Awkward())
        x = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
        for step in range(3):
            with model.no_sync() if step < 2 else contextlib.nullcontext():
                model(x[step]).square().sum().backward()
        result.append({n: p.grad for n, p in model.module.named_parameters()})
    return result


def check_drop_in():
    theirs, ours = both_gradients(dist.get_world_size(), bucket_mb=0.0002, first_bucket_mb=0.0001)
    for name, want in theirs.items():
        assert (ours[name] is None) == (want is None), name
        if want is not None:
            rtol = 1e-12 if want.dtype == torch.float64 else 1e-5
            torch.testing.assert_close(ours[name], want, rtol=rtol, atol=1e-12)
    assert ours["unused.weight"] is ours["frozen.weight"] is None and ours["sometimes.weight"] is not None


def check_unused_then_used():
    """A parameter that rests for a step gets no stale gradient, and the next step reduces it again."""
    torch.manual_seed(0)
    model = BucketedDDP(nn.ModuleList([nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)]), average=False)
    x = torch.full((1, 3), 1.0 + dist.get_rank())
    total = sum(range(1, dist.get_world_size() + 1))
    for used in (0, 1), (0,), (0, 1):
        model.zero_grad()
        sum(model.module[i](x) for i in used).sum().backward()
        for i, layer in enumerate(model.module):
            if i in used:
                assert torch.equal(layer.weight.grad, torch.full((1, 3), float(total)))
            else:
                assert layer.weight.grad is None


def check_exception():
    """A backward that breaks off, on all ranks, leaves nothing behind that spoils the next."""
    def gradients(breaks):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        model = BucketedDDP(module, bucket_mb=0.0001, first_bucket_mb=0.0001)
        for broken in (breaks, False):
            model.zero_grad()
            y = module[1](module[0](x)) if broken else x
            with contextlib.suppress(ZeroDivisionError):
                if broken:
                    y.register_hook(lambda _: 1 / 0)
                    module[3](module[2](y)).sum().backward()
                model(x).square().sum().backward()
        return [p.grad for p in module.parameters()]
    x = torch.full((1, 3), 1.0 + dist.get_rank())
    torch.testing.assert_close(gradients(True), gradients(False))


def check_strides():
    """Gradients lie in memory as their parameters do: fused optimizers go by memory."""
    def trained(wrap):
        torch.manual_seed(0)
        model = wrap(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        model(x).square().sum().backward()
        optimizer.step()
        return list(model.parameters())
    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(trained(BucketedDDP), trained(lambda module: module))


@pytest.mark.parametrize("check", [check_drop_in, check_unused_then_used, check_exception, check_strides])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_drop_in(check, world):
    run(check, world)


def check_layout():
    sizes = [3, 500, 20, 20, 20, 1000]  # float64: 8 bytes each
    module = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in sizes])
    module.append(nn.Parameter(torch.zeros(7, dtype=torch.float32)))
    ddp = BucketedDDP(module, bucket_mb=0.0005, first_bucket_mb=0.0001)
    assert [b.flat.numel() for b in ddp.buckets] == [7, 1000, 60, 500, 3]
    for bucket in ddp.buckets:
        bucket.flat.copy_(torch.arange(bucket.flat.numel()))
        assert torch.equal(torch.cat([v.flatten() for v in bucket.views]), bucket.flat)


def test_layout():
    run(check_layout, 1)


# ---- planted bugs: each must fail the check ------------------------------------


def left_out(module):
    """Rank 1's gradient never reaches the sum."""
    start = module.Bucket.start

    def broken(self, group):
        if dist.get_rank() == 1:
            self.flat.zero_()
        start(self, group)
    module.Bucket.start = broken


def not_awaited(module):
    """A bucket is used before its sum has arrived."""
    start, finish = module.Bucket.start, module.Bucket.finish

    def keep(self, group):
        self.before = self.flat.clone()
        start(self, group)

    def broken(self, divisor):
        finish(self, divisor)
        self.flat.copy_(self.before)
    module.Bucket.start, module.Bucket.finish = keep, broken


def mean_of_means(module):
    """Every rank divides by its own valid targets and the ranks are averaged: right but for --pad."""
    step = module.train_step
    module.train_step = lambda m, o, x, y, valid, clip: step(m, o, x, y, (y >= 0).sum() * dist.get_world_size(), clip)


def no_reduction(module):
    module.all_reduce_gradients = lambda model: None


@pytest.mark.parametrize("plant", [left_out, not_awaited, mean_of_means])
def test_planted(plant):
    proves("ddp", 2, "--bucket-mb", "0.02", plant=plant)


def test_planted_naive():
    proves("ddp", 2, "--bucket-mb", "0", plant=no_reduction)


@pytest.mark.parametrize("world, flags", [
    (2, ["--batch", "1"]), (3, ["--impl", "torch", "--batch", "8"]), (1, ["--impl", "torch", "--dry-run", "2"]),
    (1, ["--bucket-mb", "-1"])])
def test_bad_usage(world, flags):
    script("ddp", world, *flags, code=2)
