import copy
import functools
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from common import GPTConfig, build, loss_sum
from conftest import SMALL, alone, dry_run_agrees, proves, run, script, textbook
from tensor_parallel import (
    CutSequence,
    WholeSequence,
    column_linear,
    cut,
    embedding,
    parallelize,
    row_linear,
    squared_norm,
    train_step,
    unshard,
    vocab_parallel_cross_entropy,
)

SP = ["--sp"]


@pytest.mark.parametrize("sp", [[], SP])
@pytest.mark.parametrize("world, flags", [
    (1, []), (2, ["--vocab", "257"]), (4, ["--vocab", "257"]), (3, ["--heads", "6", "--width", "24", "--seq", "15"]),
    (2, ["--vocab", "257", "--impl", "torch"])])
def test_equals_one_process(world, flags, sp):
    proves("tensor_parallel", world, *flags, *sp)


# ---- what it costs: the docstring's table ---------------------------------------

B, T, C, V = 8, 16, 32, 257  # conftest's SMALL


@pytest.mark.parametrize("world, flags", [(1, []), (2, []), (4, []), (2, SP), (4, SP)])
def test_cost(world, flags):
    textbook(dry_run_agrees("tensor_parallel", world, "--vocab", "257", *flags, ranks=[world - 1]))


@functools.cache
def of_a_block(world, *flags):
    """A third block is what is added to two -> calls, bytes sent, bytes that autograd keeps: rank 0's, of a block."""
    sizes = "--dry-run", str(world), "--width", "32", "--heads", "4", "--seq", "16", *flags, "--layers"
    two, three = (r["ranks"][0] for r in alone("tensor_parallel", (*sizes, "2"), (*sizes, "3")))
    more = {k: {name: c[k] - two["collectives"][name][k] for name, c in three["collectives"].items()}
            for k in ("calls", "wire")}
    return more["calls"], sum(more["wire"].values()), three["memory"]["activations"] - two["memory"]["activations"]


@pytest.mark.parametrize("t", [2, 4])
def test_a_block(t):
    x = 4 * B * T * C
    calls, sent, kept = of_a_block(t)
    assert calls == {"all_reduce": 4} and sent == 8 * x * (t - 1) / t
    statistics = 4 * (4 * B * T + B * T * 4 / t)  # of two LayerNorms, and a number per token and head
    assert kept - statistics == 4 * x + 12 * x / t
    calls, sent, kept = of_a_block(t, "--sp")
    norms = 2 * 4 * 6 * C * (t - 1) / t  # gradients of norms and row biases, in the step's one all-reduce
    assert calls == {"all_gather": 6, "reduce_scatter": 4, "all_reduce": 0} and sent == 10 * x * (t - 1) / t + norms
    assert kept == of_a_block(1)[2] / t


def test_no_rank_has_whole_logits():
    """Numbers that are sent for the loss: three per token. 50,000 more words cost no byte more."""
    flags = "--dry-run", "4", "--layers", "1", "--vocab"
    few, many = (r["ranks"][0] for r in alone("tensor_parallel", (*flags, "256"), (*flags, "50256")))
    assert few["collectives"] == many["collectives"]
    kept = many["memory"]["activations"] - few["memory"]["activations"]
    assert kept == 4 * 8 * 128 * 50000 / 4  # the logits, cut


def test_gpt3_dry():
    """A slice of 6 of 96 layers, for time's sake. 96 of them: 174.6e9 parameters, 21.8e9 on each of 8 ranks."""
    report = script("tensor_parallel", 1, "--dry-run", "8", "--model", "gpt3-175b", "--layers", "6")
    textbook(report)
    total, own = report["parameters"]["total"], report["parameters"]["per_rank"][0]
    per_layer = 12 * 12288 ** 2 + 13 * 12288
    assert total + 90 * per_layer == 174_604_259_328
    assert own + 90 * (per_layer - 6 * 12288) // 8 + 90 * 6 * 12288 == 21_831_757_824


def test_both_times_both():
    report = script("tensor_parallel", 2, "--steps", "4", "--layers", "1", "--width", "32", "--impl", "both")
    assert report["speedup"] == report["torch_ms_per_step"] / report["ms_per_step"] > 0
    textbook(report)


# ---- the parts, on their own -----------------------------------------------------


def check_linears(kind):
    """Any MLP, of a hidden width that does not divide: outputs and gradients are the plain ones."""
    torch.manual_seed(0)
    tp, plain, x = kind(), nn.ModuleList([nn.Linear(6, 7), nn.Linear(7, 6)]), torch.randn(2, 12, 6)
    want = plain[1](F.gelu(plain[0](x)))
    want.square().sum().backward()
    grads = [p.grad for p in plain.parameters()]
    up, down = (nn.Linear(m.in_features, m.out_features) for m in plain)
    for mine, theirs in zip((up, down), plain):
        mine.load_state_dict(theirs.state_dict())
    cut(column_linear, 0, tp, up)
    cut(row_linear, 1, tp, down)
    part = x.chunk(tp.size, 1)[tp.rank] if kind is CutSequence else x
    got = down(F.gelu(up(part)))
    got.square().sum().backward()
    torch.testing.assert_close(got, want.chunk(tp.size, 1)[tp.rank] if kind is CutSequence else want)
    for p, grad in zip([*up.parameters(), *down.parameters()], grads):
        if kind is CutSequence and not hasattr(p, "tp_dim"):
            dist.all_reduce(p.grad)
        torch.testing.assert_close(unshard(p.grad, p, tp), grad)


def check_loss():
    """F.cross_entropy itself, in fp64 and bf16, with huge logits, ignored targets, ranks that hold padding only."""
    cases = (8, torch.float64, 1), (7, torch.float64, 1e4), (2, torch.float64, 1), (8, torch.bfloat16, 1)
    for vocab, dtype, scale in cases:
        torch.manual_seed(0)
        tp, columns = WholeSequence(), -(-vocab // dist.get_world_size())
        logits = (scale * torch.randn(2, 5, vocab)).to(dtype).requires_grad_()
        targets = torch.randint(vocab, (2, 5)).masked_fill_(torch.tensor([0, 1, 0, 0, 1], dtype=torch.bool), -100)
        want = F.cross_entropy(logits.to(torch.promote_types(dtype, torch.float32)).flatten(0, 1), targets.flatten(),
                               reduction="sum")
        want.backward()
        padded = F.pad(logits.detach(), (0, columns * tp.size - vocab))
        mine = padded[..., tp.rank * columns:][..., :columns].clone().requires_grad_()
        got = vocab_parallel_cross_entropy(mine, targets, vocab)
        got.backward()
        torch.testing.assert_close(got, want)
        grad = F.pad(logits.grad, (0, columns * tp.size - vocab))
        torch.testing.assert_close(mine.grad, grad[..., tp.rank * columns:][..., :columns])


def check_shards():
    """A shard remembers how to become whole again; the norm counts every number of it once, and no padding."""
    tp = WholeSequence()
    for rows, columns, dim in (3, 7, 0), (7, 3, 1), (8, 5, 0), (1, 5, 0):
        torch.manual_seed(0)
        linear, plain = nn.Linear(columns, rows), nn.Linear(columns, rows)
        plain.load_state_dict(linear.state_dict())
        cut(row_linear if dim else column_linear, dim, tp, linear)
        assert isinstance(linear, nn.Linear) and hasattr(linear.bias, "tp_dim") == (dim == 0)
        assert linear.weight.is_contiguous() and linear.weight.shape[dim] == -(-plain.weight.shape[dim] // tp.size)
        for p, q in zip(linear.parameters(), plain.parameters()):
            torch.testing.assert_close(unshard(p, p, tp), q, rtol=0, atol=0)
            p.grad = p.detach().clone()
        want = sum(q.detach().square().sum() for q in plain.parameters())
        torch.testing.assert_close(squared_norm(list(linear.parameters()), tp), want)


def check_embedding():
    torch.manual_seed(0)
    plain, tp = nn.Embedding(7, 4), CutSequence()
    mine = nn.Embedding.from_pretrained(plain.weight.detach().clone(), freeze=False)
    cut(embedding, 0, tp, mine)
    idx = torch.randint(7, (2, 12))
    got, want = mine(idx), plain(idx)
    torch.testing.assert_close(got, want.chunk(tp.size, 1)[tp.rank])
    torch.testing.assert_close(mine(idx[0]), want[:1].chunk(tp.size, 1)[tp.rank])  # positions come without B
    got.square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(unshard(mine.weight.grad, mine.weight, tp), plain.weight.grad)


def check_frozen():
    """What was frozen stays frozen, and the others' gradients are the plain GPT's."""
    plain, tp = build(GPTConfig(2, 8, 2, 257, 4), 0, dtype=torch.float64), CutSequence()
    plain.blocks[0].requires_grad_(False)
    model, x = parallelize(copy.deepcopy(plain), tp), torch.arange(8).view(2, 4)
    loss_sum(plain(x), x).backward()
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), x, x, 1, 0, tp)
    for (name, want), p in zip(plain.named_parameters(), model.parameters()):
        assert p.requires_grad == want.requires_grad == (p.grad is not None), name
        if p.requires_grad:
            torch.testing.assert_close(unshard(p.grad, p, tp), want.grad)


def test_frozen():
    run(check_frozen, 2)


def test_bf16():
    report = script("tensor_parallel", 2, *SMALL, "--dtype", "bf16")
    assert report["check"]["passed"]
    textbook(report)


@pytest.mark.parametrize("world", [1, 3])
def test_parts(world):
    run(check_parts, world)


def check_parts():
    check_linears(WholeSequence)
    check_linears(CutSequence)
    check_loss()
    check_shards()
    check_embedding()


# ---- planted bugs: each must fail the check ------------------------------------


def f_without_all_reduce(module):
    """Every rank goes on with its own part of the gradient."""
    backward = module.ColumnParallel.backward

    def broken(ctx, *dys):
        ctx.tp = types.SimpleNamespace(gather=ctx.tp.gather, reduce=lambda dx: lambda: dx)
        return backward(ctx, *dys)
    module.ColumnParallel.backward = staticmethod(broken)


def row_bias_on_every_rank(module):
    def row_linear(self, y):
        return module.ReduceFromTP.apply(F.linear(y, self.weight, self.bias), self.tp)
    module.row_linear = row_linear


def norms_not_summed(module):
    module.sum_gradients = lambda gradients, tp: None


def highest_not_shared(module):
    """Each rank subtracts the maximum of its own columns."""
    all_reduce = dist.all_reduce

    def broken(x, op=dist.ReduceOp.SUM, *args, **kwargs):
        return None if op == dist.ReduceOp.MAX else all_reduce(x, op, *args, **kwargs)
    module.dist = types.SimpleNamespace(**{**vars(dist), "all_reduce": broken})


def replicated_counted_on_each_rank(module):
    """The norm's all-reduce adds up what every rank has whole, too."""
    def broken(parameters, tp):
        square = nn.utils.get_total_norm([p.grad for p in parameters]).square()
        dist.all_reduce(square)
        return square
    module.squared_norm = broken


def not_gathered_again(module):
    """Weight gradients from this rank's own positions, t times."""
    backward = module.ColumnParallel.backward

    def broken(ctx, *dys):
        ctx.tp = types.SimpleNamespace(gather=lambda x: lambda: x.repeat(1, tp.size, 1), reduce=(tp := ctx.tp).reduce)
        return backward(ctx, *dys)
    module.ColumnParallel.backward = staticmethod(broken)


def padding_not_masked(module):
    loss = module.vocab_parallel_cross_entropy
    module.vocab_parallel_cross_entropy = lambda logits, y, vocab, group: loss(logits, y, vocab + 1, group)


def tie_cut(module):
    """The head goes its own way."""
    parallelize = module.parallelize

    def broken(model, tp):
        model = parallelize(model, tp)
        model.head.weight = nn.Parameter(model.tok.weight.detach().clone())
        model.head.weight.tp_dim, model.head.weight.tp_whole = 0, model.tok.weight.tp_whole
        return model
    gradients = module.full_gradients
    module.parallelize = broken
    module.full_gradients = lambda *args: {n: g for n, g in gradients(*args).items() if n != "head.weight"}


@pytest.mark.parametrize("plant, flags", [
    (f_without_all_reduce, []), (row_bias_on_every_rank, []), (row_bias_on_every_rank, SP), (norms_not_summed, SP),
    (highest_not_shared, []), (replicated_counted_on_each_rank, []), (not_gathered_again, SP), (tie_cut, []),
    (padding_not_masked, ["--vocab", "257"])])
def test_planted(plant, flags):
    proves("tensor_parallel", 2, *flags, plant=plant)


@pytest.mark.parametrize("world, flags, said", [
    (3, ["--width", "24"], "--heads 4"), (8, ["--heads", "3", "--width", "9"], "--width 9"),
    (2, ["--seq", "127", "--sp"], "--seq 127")])
def test_bad_usage(world, flags, said):
    assert said in script("tensor_parallel", 1, *flags, "--dry-run", str(world), code=2)


def test_bad_usage_of_ranks():
    script("tensor_parallel", 2, "--heads", "1", "--width", "32", code=2)
