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
from others import Llama, llama_loss, token_rows

LLAMA = ("--model", "llama-toy")


@pytest.mark.parametrize("world, flags", [
    (1, []),
    (4, [*LLAMA, "--bucket-mb", "0.01"]),
    (3, ["--batch", "7"]),
    (2, ["--bucket-mb", "0"]),
    (2, ["--vocab", "257", "--clip", "0", "--train", "blocks.1|norm"]),
    (2, ["--impl", "torch"]),
])
def test_equals_one_process(world, flags):
    proves("ddp", world, *flags)


@pytest.mark.parametrize("world, flags", [(3, LLAMA), (2, ["--train", "blocks.1"])])
def test_cost(world, flags):
    """Gradients are sent once, those of frozen parameters not; a dry run counts the same bytes."""
    real = dry_run_agrees("ddp", world, *flags, "--bucket-mb", "0.02", ranks=[world - 1])
    memory = real["ranks"][0]["memory"]
    sent = real["ranks"][0]["collectives"]["all_reduce"]
    if flags == LLAMA:
        textbook(real)
        assert sent["payload"] == 4 * real["parameters"]["total"]
        assert sent["calls"] > 2
    else:
        size = 4 * (12 * 32 * 32 + 13 * 32)
        assert sent["payload"] == memory["gradients"] == size
        assert memory["optimizer"] == 2 * size + 4 * 16  # a step counter for each of 16 tensors


def test_resume(tmp_path):
    """Saved by torch's on 3 ranks, resumed by ours on 2, with frozen parameters."""
    flags = [*SMALL, "--dtype", "fp64", "--train", "blocks.1|norm", "--batch", "6"]
    script("ddp", 3, *flags, "--impl", "torch", "--save", str(tmp_path))
    rest = script("ddp", 2, *flags, "--steps", "5", "--resume", str(tmp_path))
    assert rest["check"]["passed"]


# ---- the copy ----------------------------------------------------------------------


class Recomputed(nn.Module):
    """A layer under activation checkpointing, with a parameter that nobody uses."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def stranger():
    """Not the GPT: others' Llama, tied, with a frozen layer and a buffer."""
    model = Llama()
    model.lm_head.weight = model.embed_tokens.weight
    model.layers[1].requires_grad_(False)
    model.layers = nn.ModuleList(Recomputed(layer) for layer in model.layers)
    model.register_buffer("table", torch.randn(3))
    return model


def train(model, module, batches, wait, synchronize):
    """AdamW, clipped, over micro-batches -> {name: tensor} after it, gradients of the last step."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, eps=1e-5, weight_decay=0.0)
    for first, second in batches:
        optimizer.zero_grad()
        with wait():
            llama_loss(model, *first).backward()
        llama_loss(model, *second).backward()
        synchronize(module)
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    gradients = {name: p.grad for name, p in module.named_parameters() if "unused" not in name}
    return module.state_dict(), gradients


def rows_of(part, parts):
    """-> three steps of two micro-batches."""
    rng = torch.Generator().manual_seed(1)
    steps = []
    for _ in range(3):
        both = [token_rows(rng, 8), token_rows(rng, 8)]
        steps.append([[t.chunk(parts)[part] for t in rows] for rows in both])
    return steps


def check_copy(form):
    """Three steps of two micro-batches equal those of one process, whatever ranks begin with."""
    code = copied("ddp")
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = stranger()
    want = train(plain, plain, rows_of(0, 1), contextlib.nullcontext, lambda module: None)
    torch.manual_seed(0 if form == "naive" else rank)
    inner = stranger()
    mine = rows_of(rank, dist.get_world_size())
    if form == "naive":
        got = train(inner, inner, mine, contextlib.nullcontext, code.all_reduce_gradients)
    else:
        model = code.BucketedDDP(inner, bucket_mb=0.001, first_bucket_mb=2e-4, average=False)
        assert len(model.buckets) > 2
        got = train(model, inner, mine, model.no_sync, lambda module: None)
    for ours, theirs in zip(got, want):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


class NoHostReads(TorchDispatchMode):
    """A value that the host reads would stop it until the device is done."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert "local_scalar_dense" not in str(operation) and "nonzero" not in str(operation)
        return operation(*args, **(kwargs or {}))


def check_average():
    """As torch's DistributedDataParallel, which averages; no value goes to the host."""
    gradients = []
    for wrap in (copied("ddp").BucketedDDP, DistributedDataParallel):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
        with NoHostReads() if wrap is not DistributedDataParallel else contextlib.nullcontext():
            model(torch.full((2, 3), 1.0 + dist.get_rank())).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


def check_unused():
    """What a step does not use has a gradient of zeros, not the last step's."""
    inner = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    inner.forward = lambda number: inner[number](torch.ones(2)).sum()
    model = copied("ddp").BucketedDDP(inner)
    for number in 0, 1:
        model.zero_grad()
        model(number).backward()
        assert inner[number].weight.grad.all() and not inner[1 - number].weight.grad.any()


@pytest.mark.parametrize("world", [2, 4])
def test_copy(world):
    run(each, world, check_copy, [("bucketed",), ("naive",)])


def test_average():
    run(check_average, 2)
    run(check_unused, 2)


# ---- planted bugs: each must fail the check ------------------------------------


def left_out(module):
    """Rank 1's gradient never reaches the sum."""
    start = module.Bucket.start

    def broken(self):
        if dist.get_rank() == 1:
            self.flat.zero_()
        start(self)
    module.Bucket.start = broken


def averaged(module):
    """A mean where a sum belongs."""
    module.parallelize = lambda model, *_: module.BucketedDDP(model)


def other_rows(module):
    """All ranks take the first one's rows."""
    module.share = lambda n, parts, i: range(n // parts)


@pytest.mark.parametrize("plant", [left_out, averaged, other_rows])
def test_planted(plant):
    proves("ddp", 2, "--bucket-mb", "0.02", plant=plant)


def check_twice():
    inner = nn.Linear(3, 3)
    wrapped = copied("ddp").BucketedDDP
    wrapped(inner)
    for again in inner, nn.Sequential(inner):
        with pytest.raises(AssertionError, match="already"):
            wrapped(again)


def test_a_module_is_wrapped_once():
    run(check_twice, 1)
