"""ddp.py in both forms of the toy; its idea and its technique around a model of somebody else."""
import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from common import adamw
from conftest import (
    PROOF, check_bug_shows, check_differs, check_dry_runs, check_equal, copied, idea, rewritten,
    run_ranks, textbook)
from others import (
    compare, gradients_of, llama_loss, micro_batches, mine, recomputed, refuses, trained)

LLAMA = ("--model", "llama-toy")
IDEA = ("--impl", "idea")


@pytest.mark.parametrize("world, flags", [
    (3, ["--batch", "7"]),
    (2, ["--bucket-mb", "0"]),
    (1, IDEA),
    (3, [*IDEA, *LLAMA, "--batch", "7", "--train", "blocks.1|norm"]),
    (2, ["--vocab", "257", "--clip", "0", "--train", "blocks.1|norm"]),
    (2, ["--impl", "all"]),
])
def test_equals_one_process(world, flags):
    check_equal("ddp", world, *flags)


@pytest.mark.parametrize("world, flags", [(1, []), (4, [*LLAMA, "--bucket-mb", "0.01"]), (4, IDEA)])
def test_equals_one_process_at_the_cost_that_is_said(world, flags):
    """Gradients are sent once; a dry run counts the same bytes."""
    report = check_equal("ddp", world, *flags)
    textbook(report)
    check_dry_runs(report, "ddp", *PROOF, *flags, ranks=[world - 1])


# ---- the copy --------------------------------------------------------------------


def stranger(seed):
    """Not the GPT: others' Llama, tied, recomputed, with a frozen layer, a buffer, and parameters
    that nobody uses."""
    model = recomputed(seed, tied=True)
    model.layers[1].requires_grad_(False)
    model.register_buffer("table", torch.randn(3))
    return model


def check_copy(form, *bug):
    """Training equals one process's, whatever ranks begin with."""
    inner = stranger(dist.get_rank())
    if form == "idea":
        code = idea("ddp", *bug)
        code.begin_alike(inner)
        model = inner
        wait = nullcontext
    else:
        model = copied("ddp").BucketedDDP(inner, bucket_mb=0.001)
        assert len(model.buckets) > 2
        wait = model.no_sync
    optimizer = adamw(inner.parameters(), 1e-2)
    for step, (_, gradients, norm, state) in enumerate(trained(stranger(0))):
        first, second = micro_batches(step)
        optimizer.zero_grad()
        with wait():
            llama_loss(model, *mine(first)).backward()
        llama_loss(model, *mine(second)).backward()
        if form == "idea":
            code.all_reduce_gradients(inner)
        compare(nn.utils.clip_grad_norm_(inner.parameters(), 0.5), norm)
        compare(gradients_of(inner), gradients)
        optimizer.step()
        compare(dict(inner.state_dict()), state)


def check_unused():
    """Zeros, not the last step's gradients, of what a step does not use."""
    inner = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    x = torch.full((2,), 1.0 + dist.get_rank())
    inner.forward = lambda number: inner[number](x).sum()
    model = copied("ddp").BucketedDDP(inner)
    for number in 0, 1:
        model.zero_grad()
        model(number).backward()
        assert (inner[number].weight.grad == 3).all() and not inner[1 - number].weight.grad.any()


def check_overlap():
    """Buckets travel while backward still runs, and a sum is not added to."""
    inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model = copied("ddp").BucketedDDP(inner, bucket_mb=1e-4)
    started = []  # buckets, when backward has come to the first layer
    inner[0].register_forward_hook(lambda module, inputs, output: output.register_hook(
        lambda gradient: started.append(len(model.buckets) - len(model.to_start))) and None)
    model(torch.ones(8)).sum().backward()
    assert 1 <= started[0] < len(model.buckets)
    with model.no_sync():  # one rank's would be added to the sum of two
        refuses("added to a sum", model(torch.ones(8)).sum().backward)
    refuses("added to a sum", model(torch.ones(8)).sum().backward)


def check_two_optimizers():
    """Of a part alone somebody has called zero_grad()."""
    inner = nn.ModuleDict({"one": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    model = copied("ddp").BucketedDDP(inner)
    inner.forward = lambda x: inner["other"](inner["one"](x)).sum()
    model(torch.ones(2)).backward()
    inner["other"].zero_grad()
    inner.forward = lambda x: inner["other"](x).sum()
    refuses("summed twice", model(torch.ones(2)).backward)


def check_copies():
    check_copy("bucketed")
    check_copy("idea")
    broadcast = "dist.broadcast(tensor.data, group=group, group_src=0)"
    check_differs(check_copy, "idea", broadcast, "pass")


def check_strides():
    """Rank 0's weight is transposed; a fused optimizer would walk memory."""
    torch.manual_seed(dist.get_rank())
    inner = nn.Linear(4, 8)
    if dist.get_rank() == 0:
        inner.weight = nn.Parameter(torch.randn(4, 8).t())
    section = copied("ddp")
    model = section.BucketedDDP(inner, dist.new_group())
    refuses("wrapped already", section.BucketedDDP, inner)
    section.BucketedDDP(copy.deepcopy(inner))
    model(torch.randn(3, 4)).square().sum().backward()
    assert inner.weight.is_contiguous() and inner.weight.grad.is_contiguous()
    copy.deepcopy(model)  # an average of weights begins with one
    everyones = [torch.empty(8, 4) for _ in range(2)]
    dist.all_gather(everyones, inner.weight.detach().contiguous())
    compare(*everyones)


@pytest.mark.parametrize("world, check", [
    (2, check_copies), (4, check_copies), (2, check_unused), (2, check_overlap), (2, check_strides),
    (2, check_two_optimizers),
])
def test_copy(world, check):
    run_ranks(check, world)


# ---- planted bugs ----------------------------------------------------------------


@pytest.mark.parametrize("flags, old, new", [
    ("--bucket-mb 0.02", "self.all_reduce(flat)", "self.all_reduce(flat.clone())"),
    ("--bucket-mb 0.02", "self.all_reduce(flat)", "self.all_reduce(flat.div_(2))"),
    ("--bucket-mb 0.02", "share(args.batch, n, run.rank)", "share(args.batch, n, 0)"),
    ("--impl idea", "            dist.all_reduce(p.grad, group=group)", "            pass"),
    ("--impl idea", "    all_reduce_gradients(model)\n", "    pass\n"),
    ("--impl idea", 'reduction="sum") / valid', 'reduction="mean")'),
])
def test_planted(flags, old, new):
    check_bug_shows("ddp", 2, *flags.split(), plant=partial(rewritten, old, new, last=5))
