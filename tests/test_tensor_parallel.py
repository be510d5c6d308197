import copy
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
from common import GPT, GPTConfig
from conftest import (
    PROOF, copied, dry_run_agrees, each, is_clear, outcome, proves, run, script, textbook)
from decoder import Decoder, batch, compare, gradients_of, loss_sum
from harness.ledger import Ledger

SP = ["--sp"]
LLAMA = ["--model", "llama-toy"]
NOTHING = {"parameters": [], "gradients": [], "optimizer": []}
B = 2
T = 8
C = 16


# ---- section 1 alone, on a model that is not ours -----------------------------------


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
    plain = Decoder(tied)
    tp = getattr(section, kind)()
    return plain, section.cut_model(copy.deepcopy(plain), tp, plan_of(section)), tp


def backward(section, logits, y, tp):
    section.vocab_parallel_cross_entropy(logits, y, 29, tp).backward()


def check_copy(kind, tied, frozen):
    """Two steps of two micro-batches, recomputed in backward: gradients, norms, parameters."""
    section = copied("tensor_parallel")
    plain, model, tp = both(section, kind, tied)
    for m in plain, model:
        for name, p in m.named_parameters():
            p.requires_grad_(not name.startswith(frozen))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for x, y in zip(*(t.chunk(2) for t in batch(step))):
            loss_sum(plain(x), y).backward()
            logits = checkpoint(model, x, use_reentrant=False)
            backward(section, logits, y, tp)
        section.sum_gradients(model, tp)
        norm = section.gradient_norm(model, tp)
        want = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        torch.testing.assert_close(norm, want, rtol=1e-10, atol=0)
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        compare(section.full_gradients(model, tp), gradients_of(plain))
        for optimizer in optimizers:
            optimizer.step()
    compare(section.full_state_dict(model, tp), plain.state_dict())


def check_usage():
    """The docstring's lines for code of one's own."""
    lines = tensor_parallel.__doc__.split("V words:\n\n")[1].split("\n\n")[0]
    lines = lines.replace('"layers.*.up"', '**plan_of(types.SimpleNamespace(**known)), "*.up_proj"')
    lines = lines.replace("layers.*.down", "*.down_proj").replace(", ...}", "}")
    torch.manual_seed(0)
    plain = Decoder()
    x, y = batch(0)
    known = {**vars(copied("tensor_parallel")), "plan_of": plan_of, "types": types}
    known.update(model=copy.deepcopy(plain), group=None, x=x, y=y, V=29, valid=7, known=known)
    exec(textwrap.dedent(lines), known)
    (loss_sum(plain(x), y) / 7).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    compare(known["full_gradients"](known["model"], known["tp"]), gradients_of(plain))


def check_autocast():
    """As the plain model under autocast: the same dtypes, values to what bf16 can tell apart."""
    section = copied("tensor_parallel")
    plain, model, tp = both(section, "CutSequence")
    plain.float()
    model.float()
    x, y = batch(0)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
        loss_sum(plain(x), y).backward()
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
    model = section.cut_model(Decoder(dropout=0.4), tp, plan)
    x, y = batch(0)
    gradients = []
    for forward in model, partial(checkpoint, model, use_reentrant=False):
        model.zero_grad()
        torch.manual_seed(1)
        backward(section, forward(x), y, tp)
        section.sum_gradients(model, tp)
        gradients.append(section.full_gradients(model, tp))
    compare(*gradients)  # recomputed, the masks are the same
    layer = model.blocks[0]
    ones = torch.ones(40)
    masks = {"WholeSequence": 1, "CutSequence": tp.size}
    assert len(distinct(layer.drop_inside(ones), tp)) == tp.size
    assert len(distinct(layer.drop_outside(ones), tp)) == masks[kind]
    model.eval()
    assert layer.drop_inside(ones) is ones


def check_kept_summands():
    """g writes into what a matmul has made: whoever has kept that must hear of it."""
    section = copied("tensor_parallel")
    _, model, tp = both(section, "WholeSequence")
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    x, y = batch(0)
    logits = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
    with pytest.raises(RuntimeError, match="mutated"):
        backward(section, logits, y, tp)


def check_loss():
    """F.cross_entropy itself: huge logits, a rank without columns, bf16."""
    section = copied("tensor_parallel")
    tp = section.WholeSequence()
    for vocab, scale, dtype in (7, 1e4, None), (1, 1, None), (8, 1, torch.bfloat16):
        logits = (scale * torch.randn(2, 5, vocab)).to(dtype).requires_grad_()
        targets = torch.full((2, 5), vocab - 1)
        targets[0, 3] = -100
        want = loss_sum(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)
        want.backward()
        cut = section.Cut(2, vocab)
        mine = section.shard(logits.detach(), cut, tp).requires_grad_()
        got = section.vocab_parallel_cross_entropy(mine, targets, vocab, tp)
        got.backward()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(mine.grad, section.shard(logits.grad, cut, tp))


def check_ids():
    """Each id is on one rank. One that does not exist is there in a row that does not exist."""
    section = copied("tensor_parallel")
    tp = section.WholeSequence()
    rows, here = section.locate(torch.tensor([0, 3, 4, 6, -1, 7]), 7, tp)
    assert rows[here].tolist() == [[0, 3, -1], [0, 2, 4]][tp.rank]  # 3 of rank 1 is padding


def check_block(kind):
    """The docstring's table: what a block holds, keeps and sends."""
    tp = getattr(tensor_parallel, kind)()
    model = GPT(GPTConfig(1, C, 4, 256, T)).float()
    block = tensor_parallel.parallelize(model, tp).blocks[0]
    parameters = list(block.parameters())
    with Ledger(held=lambda: {**NOTHING, "parameters": parameters}) as ledger:
        outside = T // tp.size if kind == "CutSequence" else T
        y = block(torch.ones(B, outside, C, dtype=torch.float32, requires_grad=True))
        kept = ledger.saved_bytes
        y.sum().backward()
    calls = {name: figures["calls"] for name, figures in ledger.collectives.items()}
    sent = sum(figures["wire"] for figures in ledger.collectives.values())
    x = 4 * B * T * C
    norms = 4 * 4 * B * T  # mean and 1/std of two LayerNorms
    scores = 4 * 4 * B * T  # attention's log-sum-exp
    assert sum(p.numel() for p in parameters) == (12 * C * C + 7 * C) / 2 + 6 * C
    if kind == "WholeSequence":
        assert calls == {"all_reduce": 4} and sent == 8 * x / 2
        assert kept == norms + 4 * x + (scores + 12 * x) / 2
    else:
        assert calls == {"all_gather": 6, "reduce_scatter": 4} and sent == 10 * x / 2
        assert kept == (norms + scores + 16 * x) / 2


def check_parts():
    each(check_copy, [("WholeSequence", False, "nothing"), ("CutSequence", True, "blocks.0")])
    for check in check_dropout, check_block:
        each(check, [("WholeSequence",), ("CutSequence",)])
    for check in check_usage, check_autocast, check_kept_summands, check_loss, check_ids:
        check()
    check_refusals()


def check_refusals():
    section = copied("tensor_parallel")
    tp = section.WholeSequence()

    def cut(plan, *options):
        section.cut_model(Decoder(*options), tp, plan)

    def train(kind, T, vocab):
        _, model, tp = both(section, kind)
        x = torch.zeros(2, T, dtype=torch.int64)
        section.vocab_parallel_cross_entropy(model(x), x, vocab, tp)

    column = section.ColumnLinear
    for words, act, *options in [
        ("called nowhere.*", cut, {"nowhere.*": column}),
        ("ColumnLinear in the place of RMSNorm", cut, {"norm": column}),
        ("Cannot be cut: .*padding_idx=1", section.VocabEmbedding, nn.Embedding(4, 2, 1), tp),
        ("blocks.0.drop_inside: the plan must call it", cut, {}, False, 0.1),
        ("embed_tokens is tied", cut, {"lm_head": column}, True),
        ("multiply up to the size", train, "CutSequence", 7, 29),
        ("Is the head cut", train, "WholeSequence", 8, 31),
    ]:
        with pytest.raises(Exception, match=words):
            act(*options)


def test_the_copy():
    """It trains as the plain model does; what would be silently wrong raises."""
    run(check_parts, 2)


def test_refused_flags():
    for flags, words in [
        (["--heads", "3", "--width", "12"], "3 heads"),
        ([*LLAMA, "--kv-heads", "1"], "2 ranks cannot share 4 heads, 1 of keys and values"),
        ([*LLAMA, "--hidden", "7"], "--hidden 7 does not divide by 2 ranks"),
        (["--seq", "15", "--sp"], "2 ranks cannot cut --seq 15 evenly"),
    ]:
        code, _, said = outcome("tensor_parallel", ["--dry-run", "2", *flags])
        assert code == 2 and is_clear("tensor_parallel", said, words), (code, said)


# ---- the program: equal to one process ----------------------------------------------

ODD = ["--vocab", "257"]
SOME_FROZEN = ["--train", r"blocks\.1\.|norm1", *ODD, "--warmup", "1", "--eval-every", "1"]


@pytest.mark.parametrize("world, flags", [
    (1, LLAMA),
    (4, ODD),
    (4, [*ODD, *LLAMA, "--kv-heads", "4", *SP]),
    (2, [*ODD, *LLAMA]),
    (2, [*SOME_FROZEN, *SP, "--impl", "both"]),
    (2, [*ODD, *LLAMA, *SP, "--impl", "torch"]),
    (2, [*SOME_FROZEN, "--impl", "torch"]),
])
def test_equals_one_process(world, flags):
    proves("tensor_parallel", world, *flags)


def test_goes_on_from_a_checkpoint_of_another_layout(tmp_path):
    script("tensor_parallel", 4, *PROOF, *ODD, *SP, "--no-check", "--save", str(tmp_path))
    report = proves("tensor_parallel", 2, *ODD, "--steps", "4", "--resume", str(tmp_path))
    assert len(report["loss"]) == 2


# ---- what it costs: the docstring's table --------------------------------------------


@pytest.mark.parametrize("world, flags", [(4, SP), (2, [*LLAMA, "--dtype", "bf16"])])
def test_cost(world, flags):
    textbook(dry_run_agrees("tensor_parallel", world, *ODD, *flags, ranks=[world - 1]))


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
