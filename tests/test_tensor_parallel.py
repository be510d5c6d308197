import copy
import math
import re
import textwrap
import types
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tensor_parallel
from conftest import (
    PROOF, SMALL, alone, copied, dry_run_agrees, each, proves, run, script, textbook)

SP = ["--sp"]
LLAMA = ["--model", "llama-toy"]
KINDS = ["WholeSequence", "CutSequence"]


# ---- section 1 alone, on a model that is not ours -----------------------------------


class Attention(nn.Module):
    """Grouped queries, norms of each head's q and k, rotary positions."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(12, 16, bias=False)
        self.k_proj = nn.Linear(12, 8, bias=False)
        self.v_proj = nn.Linear(12, 8, bias=False)
        self.q_norm = nn.RMSNorm(4)
        self.k_norm = nn.RMSNorm(4)
        self.o_proj = nn.Linear(16, 12, bias=False)

    def forward(self, x):
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, 4))).transpose(-3, -2)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, 4))).transpose(-3, -2)
        v = self.v_proj(x).unflatten(-1, (-1, 4)).transpose(-3, -2)
        angles = torch.arange(q.shape[-2])[:, None] / torch.tensor([1.0, 100.0])  # T is read from q
        q = turned(q, angles).to(v.dtype)
        k = turned(k, angles).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(-3, -2).flatten(-2))


def turned(x, angles):
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(),
                      first * angles.sin() + second * angles.cos()], -1)


class Layer(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.input_norm = nn.RMSNorm(12)
        self.self_attn = Attention()
        self.post_norm = nn.RMSNorm(12)
        self.gate_proj = nn.Linear(12, 20)
        self.up_proj = nn.Linear(12, 20)
        self.drop_inside = nn.Dropout(dropout)
        self.down_proj = nn.Linear(20, 12)
        self.drop_outside = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.self_attn(self.input_norm(x))
        y = self.post_norm(x)
        y = self.drop_inside(F.silu(self.gate_proj(y)) * self.up_proj(y))
        return x + self.drop_outside(self.down_proj(y))


class Llama(nn.Module):
    def __init__(self, tied=False, dropout=0.0):
        super().__init__()
        self.embed_tokens = nn.Embedding(29, 12)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(2))
        self.norm = nn.RMSNorm(12)
        self.lm_head = nn.Linear(12, 29, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def plan_of(section):
    return {
        "embed_tokens": section.VocabEmbedding,
        "*.[qkv]_proj": section.ColumnLinear,
        "*.[qk]_norm": section.inside,
        "*.o_proj": section.RowLinear,
        "*.gate_proj": section.ColumnLinear,
        "*.up_proj": section.ColumnLinear,
        "*.down_proj": section.RowLinear,
        "lm_head": section.ColumnLinear,
    }


def both(section, kind, tied=False):
    """-> a plain model, its cut copy, and tp."""
    torch.manual_seed(0)
    plain = Llama(tied)
    tp = getattr(section, kind)()
    return plain, section.cut_model(copy.deepcopy(plain), tp, plan_of(section)), tp


def token_batch(seed=0):
    tokens = torch.randint(29, (4, 9), generator=torch.Generator().manual_seed(seed))
    targets = tokens[:, 1:].masked_fill(tokens[:, 1:] > 26, -100)
    return tokens[:, :-1], targets


def plain_loss(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")


def backward(section, logits, y, tp):
    section.vocab_parallel_cross_entropy(logits, y, 29, tp).backward()


def compare(tensors, wanted):
    """Every one, by name; those that are None in `wanted` may not be there."""
    assert tensors.keys() == {name for name, want in wanted.items() if want is not None}
    for name, got in tensors.items():
        gap = (got - wanted[name]).abs().max().item()
        assert gap < 1e-10, f"{name}: {gap}"


def compare_gradients(plain, gradients):
    compare(gradients, {name: p.grad for name, p in plain.named_parameters()})


def check_copy(kind, tied, frozen):
    """Two steps of two micro-batches, recomputed in backward: gradients, norms, parameters."""
    section = copied("tensor_parallel")
    plain, model, tp = both(section, kind, tied)
    for m in plain, model:
        for name, p in m.named_parameters():
            p.requires_grad_(not frozen or not re.search(frozen, name))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for x, y in zip(*(t.chunk(2) for t in token_batch(step))):
            plain_loss(plain, x, y).backward()
            logits = checkpoint(model, x, use_reentrant=False)
            backward(section, logits, y, tp)
        section.sum_gradients(model, tp)
        norm = section.gradient_norm(model, tp)
        want = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        torch.testing.assert_close(norm, want, rtol=1e-10, atol=0)
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        compare_gradients(plain, section.full_gradients(model, tp))
        for optimizer in optimizers:
            optimizer.step()
    compare(section.full_state_dict(model, tp), plain.state_dict())


CASES = [(False, None), (True, "layers.0"), (False, "embed|_proj|lm_head")]


def test_the_copy_trains_a_llama():
    run(each, 2, check_copy, [(kind, *case) for kind in KINDS for case in CASES])


def check_usage():
    """The docstring's lines for code of one's own."""
    lines = tensor_parallel.__doc__.split("V words:\n\n")[1].split("\n\n")[0]
    lines = lines.replace('"layers.*.up"', '**plan_of(types.SimpleNamespace(**known)), "*.up_proj"')
    lines = lines.replace("layers.*.down", "*.down_proj").replace(", ...}", "}")
    torch.manual_seed(0)
    plain = Llama()
    x, y = token_batch()
    known = {**vars(copied("tensor_parallel")), "plan_of": plan_of, "types": types}
    known.update(model=copy.deepcopy(plain), group=None, x=x, y=y, V=29, valid=7, known=known)
    exec(textwrap.dedent(lines), known)
    (plain_loss(plain, x, y) / 7).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    compare_gradients(plain, known["full_gradients"](known["model"], known["tp"]))


def check_autocast(kind):
    """As the plain model under autocast: the same dtypes, values to what bf16 can tell apart."""
    section = copied("tensor_parallel")
    plain, model, tp = both(section, kind)
    plain.float()
    model.float()
    x, y = token_batch()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
        plain_loss(plain, x, y).backward()
        backward(section, logits, y, tp)
    assert logits.dtype == torch.bfloat16
    section.sum_gradients(model, tp)
    for name, gradient in section.full_gradients(model, tp).items():
        want = plain.get_parameter(name).grad
        assert gradient.dtype == want.dtype == torch.float32
        gap = (gradient - want).norm() / want.norm()
        assert gap < 0.03, f"{name}: {gap}"


def distinct(t, tp):
    """The different values that ranks have of a tensor."""
    parts = [torch.empty_like(t) for _ in range(tp.size)]
    dist.all_gather(parts, t.detach())
    return {tuple(part.flatten().tolist()) for part in parts}


def check_dropout(kind):
    """Copies stay equal; masks of what is cut differ, of what is whole they do not."""
    section = copied("tensor_parallel")
    tp = getattr(section, kind)()
    torch.manual_seed(tp.rank)  # cut_model gives all the first rank's weights and random state
    plan = plan_of(section)
    plan["*.drop_inside"] = section.InsideDropout
    plan["*.drop_outside"] = section.OutsideDropout
    model = section.cut_model(Llama(dropout=0.4), tp, plan)
    x, y = token_batch()
    gradients = []
    for forward in model, partial(checkpoint, model, use_reentrant=False):
        model.zero_grad()
        torch.manual_seed(1)
        backward(section, forward(x), y, tp)
        section.sum_gradients(model, tp)
        gradients.append(section.full_gradients(model, tp))
    compare(*gradients)  # recomputed, the masks are the same
    for name, p in model.named_parameters():
        assert p in tp.cuts or len(distinct(p.grad, tp)) == 1, name
    layer = model.layers[0]
    ones = torch.ones(40)
    assert len(distinct(layer.drop_inside(ones), tp)) == tp.size
    masks = {"WholeSequence": 1, "CutSequence": tp.size}
    assert len(distinct(layer.drop_outside(ones), tp)) == masks[kind]
    assert set(layer.drop_inside(ones).tolist()) == {0.0, 1 / 0.6}
    model.eval()
    assert layer.drop_inside(ones) is ones


def check_kept_summands():
    """g writes into what a matmul has made: whoever has kept that must hear of it."""
    section = copied("tensor_parallel")
    _, model, tp = both(section, "WholeSequence")
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    x, y = token_batch()
    logits = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
    with pytest.raises(RuntimeError, match="mutated"):
        backward(section, logits, y, tp)


def check_loss():
    """F.cross_entropy itself: bf16, huge and infinite logits, a rank without columns."""
    section = copied("tensor_parallel")
    tp = section.WholeSequence()
    for vocab, dtype, scale in (8, None, 1), (7, None, 1e4), (1, None, 1), (8, torch.bfloat16, 1):
        logits = (scale * torch.randn(2, 5, vocab)).to(dtype)
        if vocab == 8:
            logits[..., :4] = -math.inf  # all of rank 0's
        logits.requires_grad_()
        targets = torch.full((2, 5), vocab - 1)
        targets[0, 3] = 3
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        want = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="sum",
                               ignore_index=3)
        want.backward()
        cut = section.Cut(2, vocab)
        mine = section.shard(logits.detach(), cut, tp).requires_grad_()
        got = section.vocab_parallel_cross_entropy(mine, targets, vocab, tp, ignore_index=3)
        got.backward()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(mine.grad, section.shard(logits.grad, cut, tp))


def check_shards():
    """A shard and its cut make the whole again; all shards are of one size."""
    section = copied("tensor_parallel")
    tp = section.WholeSequence()
    for shape, dim in ((3, 7), 0), ((7, 3), 1), ((8, 5), 0), ((1, 5), 0), ((5,), 0):
        whole = torch.randn(shape)
        cut = section.Cut(dim, shape[dim])
        piece = section.shard(whole, cut, tp)
        assert piece.is_contiguous() and piece.shape[dim] == math.ceil(shape[dim] / tp.size)
        assert section.unshard(piece, cut, tp).equal(whole)


def check_ids():
    """Each id is on one rank. One that does not exist is there in a row that does not exist."""
    section = copied("tensor_parallel")
    tp = section.WholeSequence()
    rows, here = section.locate(torch.tensor([0, 3, 4, 7, -1, 8]), 4, tp)
    assert rows[here].tolist() == [[0, 3, -1], [0, 3, 4]][tp.rank]
    assert not rows[~here].any()


def check_parts():
    for check in check_usage, check_kept_summands, check_loss, check_shards, check_ids:
        check()
    for check in check_autocast, check_dropout:
        each(check, [(kind,) for kind in KINDS])


def test_parts():
    run(check_parts, 2)


def refused(words, act, *args):
    with pytest.raises(Exception) as caught:
        act(*args)
    assert words in str(caught.value), str(caught.value)


def check_refusals():
    section = copied("tensor_parallel")
    tp = section.WholeSequence()

    def cut(plan, *options):
        section.cut_model(Llama(*options), section.WholeSequence(), plan)

    def train(kind, T, vocab):
        _, model, tp = both(section, kind)
        x = torch.zeros(2, T, dtype=torch.int64)
        section.vocab_parallel_cross_entropy(model(x), x, vocab, tp)

    column = section.ColumnLinear
    refused("called nowhere.*", cut, {"nowhere.*": column})
    refused("ColumnLinear in the place of RMSNorm", cut, {"norm": column})
    refused("layers.0.drop_inside: the plan must call it", cut, {}, False, 0.1)
    refused("embed_tokens is tied", cut, {"lm_head": column}, True)
    refused("2 ranks do not divide it", section.RowLinear, nn.Linear(7, 4), tp)
    refused("multiply up to the size", train, "CutSequence", 7, 29)
    refused("Is the head cut", train, "WholeSequence", 8, 31)


def test_what_would_be_silently_wrong_raises():
    run(check_refusals, 2)


@pytest.mark.parametrize("flags, words", [
    (["--heads", "3", "--width", "12"], "3 heads"),
    ([*LLAMA, "--kv-heads", "1"], "2 ranks cannot share 4 heads, 1 of keys and values"),
    ([*LLAMA, "--hidden", "7"], "--hidden 7 does not divide by 2 ranks"),
    (["--seq", "15", "--sp"], "2 ranks cannot cut --seq 15 evenly"),
])
def test_refused_flags(flags, words):
    assert words in script("tensor_parallel", 1, "--dry-run", "2", *flags, code=2)


# ---- the program: equal to one process ----------------------------------------------

ODD = ["--vocab", "257"]
SOME_FROZEN = ["--train", r"blocks\.1\.|norm1", *ODD, "--warmup", "1", "--eval-every", "1"]


@pytest.mark.parametrize("world, flags", [
    (1, LLAMA),
    (3, ["--heads", "6", "--width", "24", "--seq", "15", *SP]),
    (4, ODD),
    (4, [*ODD, *SP]),
    (2, [*ODD, *LLAMA]),
    (4, [*ODD, *LLAMA, "--kv-heads", "4", *SP]),
    (2, [*ODD, *SP, "--impl", "torch"]),
    (2, [*ODD, *LLAMA, "--impl", "torch"]),
    (2, [*SOME_FROZEN, *SP]),
    (2, [*SOME_FROZEN, "--impl", "torch"]),
])
def test_equals_one_process(world, flags):
    proves("tensor_parallel", world, *flags)


def test_goes_on_from_a_checkpoint_of_another_layout(tmp_path):
    script("tensor_parallel", 4, *PROOF, *ODD, *SP, "--no-check", "--save", str(tmp_path))
    report = proves("tensor_parallel", 2, *ODD, "--steps", "4", "--resume", str(tmp_path))
    assert len(report["loss"]) == 2


def test_both_times_both():
    report = script("tensor_parallel", 2, *SMALL, "--dtype", "bf16", "--impl", "both")
    assert report["speedup"] > 0
    textbook(report)


# ---- what it costs: the docstring's table --------------------------------------------


@pytest.mark.parametrize("world, flags", [
    (2, []),
    (4, SP),
    (2, LLAMA),
    (4, [*LLAMA, "--kv-heads", "4", *SP]),
])
def test_cost(world, flags):
    textbook(dry_run_agrees("tensor_parallel", world, *ODD, *flags, ranks=[world - 1]))


# conftest's SMALL
B = 8
T = 16
C = 32


def of_a_block(form, tp, *flags):
    """A third block is what is added to two -> calls, bytes sent, bytes that autograd keeps."""
    dry = [*SMALL, "--model", form, "--dry-run", str(tp), *flags, "--layers"]
    reports = alone("tensor_parallel", (*dry, "2"), (*dry, "3"))
    two, three = [report["ranks"][0] for report in reports]
    calls = {}
    sent = 0
    for kind, figures in three["collectives"].items():
        calls[kind] = figures["calls"] - two["collectives"][kind]["calls"]
        sent += figures["wire"] - two["collectives"][kind]["wire"]
    kept = three["memory"]["activations"] - two["memory"]["activations"]
    return calls, sent, kept


def test_a_block():
    x = 4 * B * T * C
    calls, sent, kept = of_a_block("toy", 4)
    assert calls == {"all_reduce": 4}
    assert sent == 8 * x * 3 / 4
    # mean and 1/std of two LayerNorms; attention's log-sum-exp, of the heads here
    statistics = 4 * (4 * B * T + B * T * 4 / 4)
    assert kept - statistics == 4 * x + 12 * x / 4


def test_a_block_of_a_cut_sequence():
    x = 4 * B * T * C
    calls, sent, kept = of_a_block("toy", 2, *SP)
    assert calls == {"all_gather": 6, "reduce_scatter": 4, "all_reduce": 0}
    assert sent == 10 * x / 2 + 4 * 6 * C  # gradients of norms and row biases, in one all-reduce
    assert kept == of_a_block("toy", 1)[2] / 2


# ---- planted bugs: each must fail the check ------------------------------------------


def f_without_all_reduce(module):
    """Every rank goes on with its own part of the gradient."""
    backward = module.ColumnParallel.backward

    def broken(ctx, *dys):
        ctx.tp = types.SimpleNamespace(gather=ctx.tp.gather, reduce=module.Pending)
        return backward(ctx, *dys)

    module.ColumnParallel.backward = staticmethod(broken)


def not_gathered_again(module):
    """Weight gradients are made from this rank's own positions, tp times."""
    gradients = module.weight_gradients

    def broken(x, *rest):
        own = x.chunk(2, 1)[dist.get_rank()]
        return gradients(own.repeat(1, 2, 1), *rest)

    module.weight_gradients = broken


def row_bias_on_every_rank(module):
    def forward(self, y):
        return module.ReduceFromTP.apply(F.linear(y, self.weight, self.bias), self.tp)

    module.RowLinear.forward = forward


def norms_not_summed(module):
    module.sum_gradients = lambda model, tp: None


def replicated_counted_on_each_rank(module):
    """The norm's all-reduce adds up what every rank has whole, too."""
    def broken(model, tp):
        square = nn.utils.get_total_norm([p.grad for p in model.parameters()]).square()
        dist.all_reduce(square)
        return square.sqrt()

    module.gradient_norm = broken


def padding_not_masked(module):
    """The head makes a logit for the padding, and the loss counts it."""
    loss = module.vocab_parallel_cross_entropy

    def broken(logits, targets, vocab, tp):
        return loss(logits, targets, vocab + 1, tp)

    module.vocab_parallel_cross_entropy = broken


def positions_of_a_piece(module):
    """Rotary positions as if each rank had the first tokens."""
    attention = module.TPAttention
    init = attention.__init__

    def broken(self, plain, tp):
        init(self, plain, tp)
        self.positions = lambda length, device: torch.arange(length) % (length // tp.size)

    attention.__init__ = broken


@pytest.mark.parametrize("plant, flags", [
    (f_without_all_reduce, []),
    (not_gathered_again, [*LLAMA, *SP]),
    (row_bias_on_every_rank, []),
    (norms_not_summed, [*LLAMA, *SP]),
    (replicated_counted_on_each_rank, []),
    (padding_not_masked, ODD),
    (positions_of_a_piece, [*LLAMA, *SP]),
])
def test_planted(plant, flags):
    proves("tensor_parallel", 2, *flags, plant=plant)
