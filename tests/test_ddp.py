"""ddp.py, alone and around modules of others."""
import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from conftest import SMALL, copied, dry_run_agrees, proves, run, script, textbook
from ddp import BucketedDDP


@pytest.mark.parametrize("world, flags", [
    (1, []),
    (2, []),
    (4, []),
    (3, ["--batch", "7"]),
    (2, ["--bucket-mb", "0"]),
    (4, ["--bucket-mb", "0.01"]),
    (2, ["--vocab", "257", "--clip", "0"]),
    (2, ["--impl", "torch"]),
    (4, ["--impl", "torch", "--batch", "4"]),
])
def test_equals_one_process(world, flags):
    proves("ddp", world, *flags)


@pytest.mark.parametrize("world", [1, 3])
def test_cost(world):
    real = dry_run_agrees("ddp", world, "--bucket-mb", "0.02", ranks=[world - 1])
    textbook(real)
    gradients = 4 * real["parameters"]["total"]
    for rank in real["ranks"]:
        sent = rank["collectives"]["all_reduce"]
        assert sent["payload"] == gradients
        assert sent["wire"] == 2 * (world - 1) * gradients / world
        assert sent["calls"] > 2


@pytest.mark.parametrize("train", ["blocks.1", "bias"])
def test_frozen_cost_nothing(train):
    """Nothing of them is sent, summed or stepped."""
    real = dry_run_agrees("ddp", 2, "--train", train, ranks=[1])
    textbook(real)
    proves("ddp", 2, "--train", train)
    if train == "blocks.1":
        size = 4 * (12 * 32 * 32 + 13 * 32)
        memory = real["ranks"][0]["memory"]
        assert real["ranks"][0]["collectives"]["all_reduce"]["payload"] == size
        assert memory["gradients"] == size
        assert memory["optimizer"] == 2 * size + 4 * 16  # a step counter for each of 16 tensors


def test_both_times_both():
    flags = "--steps", "4", "--layers", "1", "--width", "32", "--impl", "both"
    report = script("ddp", 2, *flags)
    assert report["ms_per_step"] > 0 and report["torch_ms_per_step"] > 0


def test_resume(tmp_path):
    """Saved by torch's on 3 ranks, resumed by ours on 2, with frozen parameters."""
    flags = [*SMALL, "--dtype", "fp64", "--train", "blocks.1|norm", "--batch", "6"]
    script("ddp", 3, *flags, "--impl", "torch", "--save", str(tmp_path))
    rest = script("ddp", 2, *flags, "--steps", "5", "--resume", str(tmp_path))
    assert rest["check"]["passed"]


# ---- the copy ----------------------------------------------------------------------


class Gated(nn.Module):
    """Nothing of the GPT: no biases, RMSNorm, other names, odd sizes."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(5, 7, bias=False)
        self.norm = nn.RMSNorm(7)
        self.gate = nn.Linear(7, 11, bias=False)
        self.back = nn.Linear(11, 7, bias=False)
        self.leave = nn.Linear(7, 3, bias=False)

    def forward(self, x):
        x = self.enter(x)
        x = x + self.back(nn.functional.silu(self.gate(self.norm(x))))
        return self.leave(x)


def check_copy(bucketed):
    """Three AdamW steps with clipping equal those of one process.

    bucketed: by BucketedDDP, else by all_reduce_gradients().
    """
    module = copied("ddp")
    rank = dist.get_rank()
    n = dist.get_world_size()
    torch.manual_seed(0)
    plain = Gated()
    torch.manual_seed(rank if bucketed else 0)  # BucketedDDP gives all the first one's weights
    inner = Gated()
    ours = inner
    if bucketed:
        ours = module.BucketedDDP(inner, bucket_mb=0.0005, first_bucket_mb=0.0001, average=False)
        assert len(ours.buckets) > 2
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-5) for m in (plain, inner)]
    for x in torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(1)):
        plain(x).square().sum().backward()
        ours(x.chunk(n)[rank]).square().sum().backward()
        if not bucketed:
            module.all_reduce_gradients(inner)
        for p, want in zip(inner.parameters(), plain.parameters()):
            torch.testing.assert_close(p.grad, want.grad, rtol=1e-10, atol=1e-10)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (plain, ours)]
        torch.testing.assert_close(*norms, rtol=1e-10, atol=1e-10)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(inner.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("world, bucketed", [(4, True), (2, False)])
def test_copy(world, bucketed):
    run(check_copy, world, bucketed)


# ---- BucketedDDP as a drop-in --------------------------------------------------


class Awkward(nn.Module):
    """BatchNorm, frozen, unused and tied parameters, one that rank 0 alone uses, an fp32 one."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.a.weight
        self.low = nn.Linear(6, 6, dtype=torch.float32)

    def forward(self, x):
        x = self.norm(self.a(x))
        x = self.tied(torch.relu(self.frozen(x)))
        x = x + self.low(x.float()).double()
        if dist.get_rank() == 0:
            return self.sometimes(x)
        return x


def torchs_own(module):
    return DistributedDataParallel(module, find_unused_parameters=True)


def gradients_of_three(wrap):
    """Gradients after three backwards, the first two under no_sync -> {name: gradient or None}."""
    torch.manual_seed(dist.get_rank())  # the weights of all must become the first rank's
    model = wrap(Awkward())
    rng = torch.Generator().manual_seed(dist.get_rank())
    for step in range(3):
        x = torch.randn(5, 6, generator=rng)
        waiting = model.no_sync() if step < 2 else contextlib.nullcontext()
        with waiting:
            model(x).square().sum().backward()
    return {name: p.grad for name, p in model.module.named_parameters()}


def check_drop_in():
    theirs = gradients_of_three(torchs_own)
    small = partial(BucketedDDP, bucket_mb=0.0002, first_bucket_mb=0.0001)
    ours = gradients_of_three(small)
    for name, want in theirs.items():
        assert (ours[name] is None) == (want is None), name
        if want is not None:
            rtol = 1e-12 if want.dtype == torch.float64 else 1e-5
            torch.testing.assert_close(ours[name], want, rtol=rtol, atol=1e-12)
    assert ours["unused.weight"] is None and ours["frozen.weight"] is None
    assert ours["sometimes.weight"] is not None


def check_unused_then_used():
    """A parameter that rests for a step gets no stale gradient, and the next step reduces it."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(3, 1, bias=False) for _ in range(2))
    model = BucketedDDP(layers, average=False)
    x = torch.full((1, 3), 1.0 + dist.get_rank())
    total = sum(range(1, dist.get_world_size() + 1))
    for used in (0, 1), (0,), (0, 1):
        model.zero_grad()
        sum(layers[i](x) for i in used).sum().backward()
        for i, layer in enumerate(layers):
            if i in used:
                assert torch.equal(layer.weight.grad, torch.full((1, 3), float(total)))
            else:
                assert layer.weight.grad is None


def break_off():
    raise ZeroDivisionError


def gradients_after(broken):
    """Gradients of a backward, perhaps after one that ended in an exception."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    model = BucketedDDP(module, bucket_mb=0.0001, first_bucket_mb=0.0001)
    x = torch.full((1, 3), 1.0 + dist.get_rank())
    if broken:
        y = module[1](module[0](x))
        y.register_hook(lambda _: break_off())
        with contextlib.suppress(ZeroDivisionError):
            module[3](module[2](y)).sum().backward()
        model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad for p in module.parameters()]


def check_exception():
    """A backward that breaks off, on all ranks, leaves nothing behind that spoils the next."""
    torch.testing.assert_close(gradients_after(broken=True), gradients_after(broken=False))


class Chosen(nn.Module):
    """Each call uses one of its two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x, number):
        return self.layers[number](x).tanh()


def check_checkpoint_around_it():
    """In backward a checkpoint calls the wrapper again, when a bucket may be on its way already."""
    found = []
    for wrap in (lambda module: module, partial(BucketedDDP, bucket_mb=1e-6, average=False)):
        torch.manual_seed(0)
        module = Chosen()
        model = wrap(module)
        y = checkpoint(model, torch.arange(12.0).view(4, 3), 0, use_reentrant=False)
        checkpoint(model, y, 1, use_reentrant=False).square().sum().backward()
        found.append([p.grad for p in module.parameters()])
    one_process, ours = found
    # all ranks have the same rows
    torch.testing.assert_close(ours, [g * dist.get_world_size() for g in one_process])


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


class Strided(nn.Module):
    """Parameters and buffers whose memory is not one run."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 7)[:, :3])
        self.turned = nn.Parameter(torch.randn(5, 6).T, requires_grad=False)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.register_buffer("table", torch.randn(6, 5)[:, ::2])


def check_all_begin_alike():
    torch.manual_seed(dist.get_rank())
    model = BucketedDDP(Strided())
    torch.manual_seed(0)
    want = Strided().state_dict()
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor, want[name]), name


def check_each(checks):
    """In one world: each begins with a seed of its own."""
    for check in checks:
        check()


@pytest.mark.parametrize("world, checks", [
    (2, [check_drop_in, check_unused_then_used, check_exception, check_checkpoint_around_it,
         check_strides, check_all_begin_alike]),
    (3, [check_drop_in]),
])
def test_drop_in(world, checks):
    run(check_each, world, checks)


class Odd(nn.Module):
    """A last parameter without numbers, and complex ones: one that all ranks use, one that rank 0
    alone does, one that nobody does.
    """

    def __init__(self):
        super().__init__()
        self.waves = nn.ParameterList()
        for _ in range(3):
            self.waves.append(nn.Parameter(torch.randn(3, 2, dtype=torch.cdouble)))
        self.weight = nn.Parameter(torch.randn(3))
        self.empty = nn.Parameter(torch.randn(0, 3))

    def forward(self, x):
        y = (self.waves[0] * x[:, None]).abs().sum() + (self.weight * x).sum() + self.empty.sum()
        if dist.get_rank() == 0:
            y = y + self.waves[1].real.square().sum()
        return y


def check_odd():
    torch.manual_seed(0)
    model = BucketedDDP(Odd())
    x = torch.tensor([1.0, 2.0, 3.0]) * (1 + dist.get_rank())
    model(x).backward()
    module = model.module
    n = dist.get_world_size()
    mean = (1 + n) / 2
    angles = module.waves[0].detach().sgn()
    want = angles * torch.tensor([1.0, 2.0, 3.0])[:, None] * mean
    torch.testing.assert_close(module.waves[0].grad, want)
    want = 2 * module.waves[1].detach().real / n
    torch.testing.assert_close(module.waves[1].grad, want.to(torch.cdouble))
    assert module.waves[2].grad is None
    torch.testing.assert_close(module.weight.grad, torch.tensor([1.0, 2.0, 3.0]) * mean)
    assert module.empty.grad.shape == (0, 3)


def test_complex_and_empty_parameters():
    run(check_odd, 2)


class Words(nn.Module):
    """A sparse embedding of which each rank uses other rows, one that only the last rank uses."""

    def __init__(self, sparse):
        super().__init__()
        self.words = nn.Embedding(9, 3, sparse=sparse)
        self.rare = nn.EmbeddingBag(5, 3, sparse=sparse)
        self.unused = nn.Embedding(4, 3, sparse=sparse)
        self.out = nn.Linear(3, 2)

    def forward(self, tokens, rare):
        x = self.words(tokens)
        if rare:
            x = x + self.rare(tokens[:, :2] % 5)[:, None]
        return self.out(x)


def check_sparse(average):
    """As dense ones, and sparse: two steps, the second with gradients of two backwards."""
    n = dist.get_world_size()
    rank = dist.get_rank()
    results = []
    for sparse in True, False:
        torch.manual_seed(0)
        model = BucketedDDP(Words(sparse), average=average)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rng = torch.Generator().manual_seed(rank)
        tokens = torch.randint(0, 9, (3, 2, 4), generator=rng)
        found = []
        for waiting, last in ([], 0), ([1], 2):  # numbers of micro-batches
            with model.no_sync():
                for i in waiting:
                    model(tokens[i], rare=False).square().sum().backward()
            model(tokens[last], rare=rank == n - 1).square().sum().backward()
            assert model.module.unused.weight.grad is None
            assert model.module.words.weight.grad.is_sparse == sparse
            assert model.module.rare.weight.grad.is_sparse == sparse
            for p in model.module.words.weight, model.module.rare.weight, model.module.out.weight:
                found.append(p.grad.to_dense().clone())
            optimizer.step()
            optimizer.zero_grad()
        if average:
            assert not model.sums  # an average may be averaged again: no gradient need be kept
        results.append([*found, *model.parameters()])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("world, average", [(1, True), (2, False), (3, True)])
def test_sparse_embeddings(world, average):
    run(check_sparse, world, average)


# ---- refused, in words --------------------------------------------------------------


def check_refused():
    x = torch.ones(2, 3)
    model = BucketedDDP(nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="create_graph"):
        model(x).sum().backward(create_graph=True)
    model.zero_grad()
    model(x).sum().backward()
    with pytest.raises(TypeError, match="copy the module inside"):
        copy.deepcopy(model)
    copy.deepcopy(model.module)

    module = nn.Linear(3, 3)
    module.bias.requires_grad_(False)
    model = BucketedDDP(module)
    module.bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match="frozen when BucketedDDP was made.*unwrap"):
        model(x)

    words = nn.Embedding(3, 3, sparse=True)
    model = BucketedDDP(nn.Sequential(words))
    with pytest.raises(RuntimeError, match="sparse=False"):
        (model(torch.tensor([1])).sum() + words.weight.square().sum()).backward()


def check_sums_are_not_summed_again():
    """With average=False, two backwards without zero_grad between; an average stays one."""
    tokens = torch.tensor([0, 1])
    for build in lambda: nn.Embedding(3, 3), lambda: nn.Embedding(3, 3, sparse=True):
        model = BucketedDDP(build(), average=False)
        model(tokens).sum().backward()
        with pytest.raises(RuntimeError, match="summed again"):
            model(tokens).sum().backward()
        model.zero_grad()
        with model.no_sync():
            model(tokens).sum().backward()
        model(tokens).sum().backward()
        assert model.module.weight.grad.to_dense().sum() == 2 * 6 * dist.get_world_size()
        with pytest.raises(RuntimeError, match="summed again"), model.no_sync():
            model(tokens).sum().backward()

        model = BucketedDDP(build())
        for _ in range(2):
            model(tokens).sum().backward()
        assert model.module.weight.grad.to_dense().sum() == 2 * 6


def check_unused_sums_are_not_summed_again():
    """Nor those of a parameter that the second backward does not use."""
    tokens = torch.tensor([0, 1])
    for sparse in False, True:
        layers = nn.ModuleList(nn.Embedding(3, 3, sparse=sparse) for _ in range(2))
        model = BucketedDDP(layers, average=False)
        (layers[0](tokens) + layers[1](tokens)).sum().backward()
        before = layers[1].weight.grad.to_dense().clone()
        layers[0].zero_grad()
        with pytest.raises(RuntimeError, match="summed again"):
            layers[0](tokens).sum().backward()
        assert model.started == 0
        assert torch.equal(layers[1].weight.grad.to_dense(), before)


def test_refused():
    checks = [check_refused, check_sums_are_not_summed_again,
              check_unused_sums_are_not_summed_again]
    run(check_each, 2, checks)


def check_wrapped_again():
    """A second BucketedDDP around what the first has unwrapped: the first sums nothing any more."""
    module = nn.Linear(3, 3)
    module.bias.requires_grad_(False)
    first = BucketedDDP(module, average=False)
    module.bias.requires_grad_(True)
    second = BucketedDDP(first.unwrap(), average=False)
    for _ in range(2):
        second(torch.ones(2, 3)).sum().backward()
        assert (module.weight.grad == 4).all() and (module.bias.grad == 4).all()
        assert not any(bucket.flat.any() for bucket in first.buckets)
        second.zero_grad()


def test_wrapped_again():
    run(check_wrapped_again, 2)


# ---- layout and order --------------------------------------------------------------


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


class NoHostReads(TorchDispatchMode):
    """A value that the host reads would stop it until the device is done."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert "local_scalar_dense" not in str(operation) and "nonzero" not in str(operation)
        return operation(*args, **(kwargs or {}))


def check_no_host_reads():
    model = BucketedDDP(Gated(), bucket_mb=0.0001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        with NoHostReads():
            model(torch.ones(2, 5)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(AssertionError), NoHostReads():
        torch.ones(1).item()


def test_no_host_reads_in_a_step():
    run(check_no_host_reads, 2)


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


def mean_of_means(module):
    """Every rank divides by its own valid targets and the ranks are averaged: right but for --pad.
    """
    step = module.train_step

    def broken(model, optimizer, x, y, valid, clip):
        own = (y >= 0).sum() * dist.get_world_size()
        return step(model, optimizer, x, y, own, clip)

    module.train_step = broken


def no_reduction(module):
    module.all_reduce_gradients = lambda model: None


@pytest.mark.parametrize("plant", [left_out, not_awaited, mean_of_means])
def test_planted(plant):
    proves("ddp", 2, "--bucket-mb", "0.02", plant=plant)


def test_planted_naive():
    proves("ddp", 2, "--bucket-mb", "0", plant=no_reduction)
