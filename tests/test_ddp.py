"""ddp.py in both forms of the toy, and its section 1 around a model of somebody else."""
import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from conftest import SMALL, copied, dry_run_agrees, each, proves, run, script, textbook

LLAMA = ("--model", "llama-toy")


@pytest.mark.parametrize("world, flags", [
    (1, []),
    (2, LLAMA),
    (4, [*LLAMA, "--bucket-mb", "0.01"]),
    (3, ["--batch", "7"]),
    (2, ["--bucket-mb", "0"]),
    (2, ["--vocab", "257", "--clip", "0", "--train", "blocks.1|norm"]),
    (2, ["--impl", "torch"]),
])
def test_equals_one_process(world, flags):
    proves("ddp", world, *flags)


@pytest.mark.parametrize("world, flags", [(1, []), (3, LLAMA)])
def test_cost(world, flags):
    """Gradients are sent once, and the dry run counts the same bytes."""
    real = dry_run_agrees("ddp", world, *flags, "--bucket-mb", "0.02", ranks=[world - 1])
    textbook(real)
    gradients = 4 * real["parameters"]["total"]
    for rank in real["ranks"]:
        sent = rank["collectives"]["all_reduce"]
        assert sent["payload"] == gradients
        assert sent["calls"] > 2


def test_frozen_cost_nothing():
    """Nothing of them is sent, summed or stepped."""
    real = dry_run_agrees("ddp", 2, "--train", "blocks.1", ranks=[1])
    size = 4 * (12 * 32 * 32 + 13 * 32)
    memory = real["ranks"][0]["memory"]
    assert real["ranks"][0]["collectives"]["all_reduce"]["payload"] == size
    assert memory["gradients"] == size
    assert memory["optimizer"] == 2 * size + 4 * 16  # a step counter for each of 16 tensors


def test_both_times_both():
    report = script("ddp", 2, *SMALL, "--steps", "4", "--impl", "both")
    assert report["ms_per_step"] > 0 and report["torch_ms_per_step"] > 0


def test_resume(tmp_path):
    """Saved by torch's on 3 ranks, resumed by ours on 2, with frozen parameters."""
    flags = [*SMALL, "--dtype", "fp64", "--train", "blocks.1|norm", "--batch", "6"]
    script("ddp", 3, *flags, "--impl", "torch", "--save", str(tmp_path))
    rest = script("ddp", 2, *flags, "--steps", "5", "--resume", str(tmp_path))
    assert rest["check"]["passed"]


# ---- the copy ----------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate_up = nn.Linear(width, 22, bias=False)
        self.back = nn.Linear(11, width, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return x + self.back(nn.functional.silu(gate) * up)


class Stranger(nn.Module):
    """Nothing of the GPT: other names, odd sizes; a tie, frozen and unused parameters, a buffer."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(13, 7)
        self.layers = nn.ModuleList(Layer(7) for _ in range(3))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.unused = nn.Linear(7, 2)
        self.leave = nn.Linear(7, 13, bias=False)
        self.leave.weight = self.words.weight
        self.register_buffer("table", torch.randn(3))

    def forward(self, idx):
        x = self.words(idx)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.leave(self.frozen(x))


def loss_of(model, rows):
    return nn.functional.cross_entropy(model(rows).flatten(0, 1), rows.flatten(), reduction="sum")


def train(model, module, batches, wait, synchronize):
    """AdamW, clipped, over micro-batches -> {name: tensor} after it, gradients of the last step."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, eps=1e-5, weight_decay=0.0)
    for microbatches in batches:
        optimizer.zero_grad()
        for rows in microbatches[:-1]:
            with wait():
                loss_of(model, rows).backward()
        loss_of(model, microbatches[-1]).backward()
        synchronize(module)
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return module.state_dict(), gradients


def check_copy(form):
    """Three steps of two micro-batches equal those of one process, whatever ranks begin with."""
    code = copied("ddp")
    rank = dist.get_rank()
    batches = torch.randint(13, (3, 2, 8, 5), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    plain = Stranger()
    want = train(plain, plain, batches, contextlib.nullcontext, lambda module: None)
    torch.manual_seed(0 if form == "naive" else rank)
    inner = Stranger()
    mine = batches.chunk(dist.get_world_size(), dim=2)[rank]
    if form == "naive":
        got = train(inner, inner, mine, contextlib.nullcontext, code.all_reduce_gradients)
    else:
        model = code.BucketedDDP(inner, bucket_mb=0.001, first_bucket_mb=2e-4, average=False)
        assert len(model.buckets) > 2
        got = train(model, inner, mine, model.no_sync, lambda module: None)
        unused = got[1].pop("unused.weight"), got[1].pop("unused.bias")
        assert not any(gradient.any() for gradient in unused)
    for ours, theirs in zip(got, want):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


def check_average():
    """As torch's DistributedDataParallel, which averages; ranks use different parameters."""
    gradients = []
    for wrap in (copied("ddp").BucketedDDP, DistributedDataParallel):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
        model(torch.full((2, 3), 1.0 + dist.get_rank())).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


class NoHostReads(TorchDispatchMode):
    """A value that the host reads would stop it until the device is done."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert "local_scalar_dense" not in str(operation) and "nonzero" not in str(operation)
        return operation(*args, **(kwargs or {}))


def check_no_host_reads():
    model = copied("ddp").BucketedDDP(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    for _ in range(2):
        with NoHostReads():
            model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(AssertionError), NoHostReads():
        torch.ones(1).item()


def check_layout():
    """Buckets are filled from the end of the model; none is above a quarter; dtypes do not mix."""
    module = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(9)))
    module[4].float()
    model = copied("ddp").BucketedDDP(module, bucket_mb=1, first_bucket_mb=1)
    order = [p for bucket in model.buckets for p in bucket.parameters]
    assert all(a is b for a, b in zip(order, reversed(list(module.parameters()))))
    for bucket in model.buckets:
        assert bucket.flat.nbytes <= sum(p.nbytes for p in order) / 4
        assert len({p.dtype for p in bucket.parameters}) == 1
        bucket.flat.copy_(torch.arange(bucket.flat.numel()))
        assert torch.equal(torch.cat([v.flatten() for v in bucket.views]), bucket.flat)


@pytest.mark.parametrize("world", [2, 4])
def test_copy(world):
    run(each, world, check_copy, [("bucketed",), ("naive",)])


def check_pure_parts():
    check_average()
    check_no_host_reads()
    check_layout()


def test_pure_parts():
    run(check_pure_parts, 2)


# ---- planted bugs: each must fail the check ------------------------------------


def left_out(module):
    """Rank 1's gradient never reaches the sum."""
    start = module.Bucket.start

    def broken(self):
        if dist.get_rank() == 1:
            self.flat.zero_()
        start(self)

    module.Bucket.start = broken


def not_awaited(module):
    """A bucket is used before its sum has arrived."""
    start = module.Bucket.start
    finish = module.Bucket.finish
    before = {}

    def keep(self):
        before[self] = self.flat.clone()
        start(self)

    def broken(self):
        finish(self)
        self.flat.copy_(before[self])

    module.Bucket.start = keep
    module.Bucket.finish = broken


def averaged(module):
    """A mean where a sum belongs."""
    module.BucketedDDP.__init__.__defaults__ = (None, 25, 1, True)
    module.parallelize = lambda model, *_: module.BucketedDDP(model)


def mean_of_means(module):
    """Every rank divides by its own valid targets and the ranks are averaged: right but for --pad.
    """
    step = module.train_step

    def broken(model, optimizer, x, y, valid, clip):
        own = (y >= 0).sum() * dist.get_world_size()
        return step(model, optimizer, x, y, own, clip)

    module.train_step = broken


def other_rows(module):
    """All ranks take the first one's rows."""
    module.share = lambda n, parts, i: range(n // parts)


@pytest.mark.parametrize("plant", [left_out, not_awaited, averaged, mean_of_means, other_rows])
def test_planted(plant):
    proves("ddp", 2, "--bucket-mb", "0.02", plant=plant)


def no_reduction(module):
    module.all_reduce_gradients = lambda model: None


def test_planted_naive():
    proves("ddp", 2, "--bucket-mb", "0", plant=no_reduction)


def check_twice():
    inner = nn.Linear(3, 3)
    wrapped = copied("ddp").BucketedDDP
    wrapped(inner)
    for again in inner, nn.Sequential(inner):
        with pytest.raises(AssertionError, match="already"):
            wrapped(again)


def test_twice():
    run(check_twice, 1)
