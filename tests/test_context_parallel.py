"""context_parallel.py in all forms of the toy; its idea and its technique around a model of
somebody else, and attention alone."""
import copy
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import amp_accum_ckpt
import context_parallel
from common import FORMS, GPTConfig, adamw, attend, build
from conftest import (
    ROOT, alone, check_bug_shows, check_each, check_equal, check_refused, copied, dry_run_agrees,
    idea, rewritten, run_ranks, textbook, with_transformers)
from context_parallel import (
    KINDS, AllGather, Ulysses, Zigzag, attend_block, attend_block_backward, fast_attend_block,
    fast_attend_block_backward)
from others import Llama, compare, gradients_of, loss_sum, micro_batches, trained

LLAMA = ("--model", "llama-toy")
QWEN = ("--model", "qwen3-toy", "--head-dim", "6")
IDEA = ("--impl", "idea")


@pytest.mark.parametrize("world, flags", [
    (1, IDEA),
    (2, [*IDEA, *LLAMA]),
    (4, IDEA),
    (2, ["--attn", "allgather", *LLAMA]),
    (4, ["--attn", "allgather"]),
    (2, ["--attn", "ulysses"]),
    (2, ["--attn", "ulysses", *QWEN]),
    (4, ["--attn", "zigzag", *LLAMA]),
    (4, ["--attn", "zigzag", *QWEN]),
    (3, ["--attn", "ring", "--seq", "18"]),
    (2, ["--train", r"blocks\.1\.|^norm", "--eval-every", "2", "--attn", "ring"]),
])
def test_equals_one_process(world, flags):
    check_equal("context_parallel", world, *flags)


# ---- attention alone -------------------------------------------------------------


def check_attention(T=12, compiled=True):
    """out, dq, dk, dv of each kind, against SDPA of the whole sequence."""
    rng = torch.Generator().manual_seed(0)
    kv_heads = dist.get_world_size()
    *qkv, dout = [torch.randn(2, H, T, 5, generator=rng) for H in (4, kv_heads, kv_heads, 4)]
    whole = [x.clone().requires_grad_() for x in qkv]
    out = attend(*whole)
    out.backward(dout)
    for kind in AllGather, Zigzag, Ulysses:  # Ring compiles as Zigzag
        ranks = kind()
        own = ranks.positions(T)
        # strided as einsum leaves them
        as_einsum = partial(torch.clone, memory_format=torch.channels_last)
        q, k, v = [x[:, :, own] for x in qkv]
        parts = [x.requires_grad_() for x in (q, as_einsum(k), as_einsum(v))]
        ours = torch.compile(ranks.attend, backend="aot_eager") if compiled else ranks.attend
        result = ours(*parts)
        result.backward(as_einsum(dout[:, :, own]))
        found = [result, *(part.grad for part in parts)]
        for a, b in zip(found, [out, *(x.grad for x in whole)]):
            torch.testing.assert_close(a, b[:, :, own], rtol=0, atol=1e-12)


def check_backward_under_autocast():
    """Also where there is no kernel, since documents have a mask."""
    rng = torch.Generator().manual_seed(0)
    q, k, v, dout = [torch.randn(1, 2, 4, 4, generator=rng) for _ in range(4)]
    gradients = []
    for enabled in False, True:
        q.requires_grad_().grad = None
        out = Zigzag().attend(q, k, v, torch.ones(1, 8))
        with torch.autocast("cpu", torch.bfloat16, enabled):
            out.backward(dout)
        gradients.append(q.grad)
    assert torch.equal(*gradients)


def check_used_on_one_rank():
    """Ranks whose tokens use other parameters, all of one size: each has its own sum."""
    cp = context_parallel
    for sum_up in cp.all_reduce_gradients, cp.sum_gradients, amp_accum_ckpt.sum_gradients:
        model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        model[dist.get_rank()](torch.ones(1, 2)).sum().backward()
        sum_up(model if sum_up is cp.all_reduce_gradients else model.parameters())
        assert all((layer.weight.grad == 1).all() for layer in model)


def check_evaluated_first():
    """In inference mode, before the first step: it makes positions that are cached, and trained
    with."""
    cfg = GPTConfig(1, 8, 2, 16, 4, FORMS["gpt2"], 2, 16)
    model = context_parallel.parallelize(build(cfg, 0), Zigzag())
    x = torch.zeros(1, 2, dtype=torch.int64)
    with torch.inference_mode():
        model(x)
    model(x).sum().backward()


@pytest.mark.parametrize("check", [
    check_attention, partial(check_attention, compiled=False), check_backward_under_autocast,
    check_used_on_one_rank, check_evaluated_first])
def test_on_two_ranks(check):
    run_ranks(check, 2)


def test_chunks_longer_than_a_block_of_the_kernel():
    run_ranks(check_attention, 4, 1024, False)


@pytest.mark.parametrize("dtype, gap", [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_formulas_are_what_kernels_compute(dtype, gap):
    """lse and gradients too, of fewer keys than queries, and of numbers that lie apart."""
    rng = torch.Generator().manual_seed(0)
    q, dout = [torch.randn(2, 6, 8, 5, generator=rng).to(dtype) for _ in range(2)]
    k, v = [torch.randn(2, 3, 5, 5, generator=rng).to(dtype) for _ in range(2)]

    def both(q, forward=fast_attend_block, backward=fast_attend_block_backward):
        out, lse = forward(q, k, v, False, None)
        return out, lse, *backward(dout, q, out.to(dtype), lse, k, v, False, None)

    formulas = both(q, attend_block, attend_block_backward)
    apart = both(q.mT.contiguous().mT)  # for which a kernel would read other numbers
    for formula, *others in zip(formulas, both(q), apart):
        for other in others:
            torch.testing.assert_close(other.float(), formula.float(), rtol=0, atol=gap)


# ---- the copy --------------------------------------------------------------------


def plain_attend(q, k, v, documents):
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def loss_of(model, x, y, attend, packed, own=slice(None), **positions):
    documents = (x % 5 == 0).cumsum(1) if packed else None
    for layer in model.layers:
        layer.self_attn.attend = partial(attend, documents=documents)
    output = checkpoint(model, x[:, own], use_reentrant=False, **positions)
    return loss_sum(output["logits"], y[:, own])


def llama(heads, kv_heads, seed):
    torch.manual_seed(seed)
    model = Llama(2, heads, kv_heads, tied=True)
    model.layers[0].self_attn.q_proj.requires_grad_(False)
    return model


def check_copy(name, heads, kv_heads, *bug):
    """name: a class of part 2, or "idea". Ranks begin with weights of their own."""
    if name == "idea":
        ranks = copy = idea("context_parallel", *bug)
    else:
        copy = copied("context_parallel", 2, *bug)
        ranks = getattr(copy, name)()
    own = ranks.positions(8)
    for packed in False, True:
        model = llama(heads, kv_heads, dist.get_rank())
        copy.begin_alike(model)
        optimizer = adamw(model.parameters(), 1e-2)
        plain = partial(loss_of, attend=plain_attend, packed=packed)
        steps = trained(llama(heads, kv_heads, 0), loss_of=plain)
        for step, (_, gradients, norm, state) in enumerate(steps):
            optimizer.zero_grad()
            for rows in micro_batches(step):
                loss_of(model, *rows, ranks.attend, packed, own, positions=own).backward()
            if name == "idea":
                copy.all_reduce_gradients(model)
            else:
                copy.sum_gradients(model.parameters())
            compare(nn.utils.clip_grad_norm_(model.parameters(), 0.5), norm)
            compare(gradients_of(model), gradients)
            optimizer.step()
            compare(dict(model.state_dict()), state)


def check_parts_one_and_two():
    check_each(check_copy, [  # name, heads, heads of k and v
        ("Ring", 3, 3), ("Zigzag", 6, 2), ("AllGather", 3, 1), ("Ulysses", 6, 2), ("idea", 6, 2)])
    copy = copied("context_parallel")
    q = torch.ones(1, 2, 4, 8, dtype=torch.float32)
    with pytest.raises(AssertionError, match="3 heads of q for 2 of k"):
        copy.Zigzag().attend(torch.ones(1, 3, 4, 8), q, q)
    with torch.autocast("cpu", torch.bfloat16):  # RoPE has made q and k fp32
        for kind in copy.Zigzag, copy.Ulysses:
            assert kind().attend(q, q, q.bfloat16()).dtype == torch.bfloat16
        far = 9 * torch.randn(1, 2, 64, 8)
        v = torch.randn(1, 2, 64, 8).bfloat16()
        one = torch.zeros(1, 128, dtype=torch.int64)  # document: formulas in the place of kernels
        packed, whole = [copy.Zigzag().attend(far, far, v, documents) for documents in (one, None)]
        torch.testing.assert_close(packed, whole, rtol=0, atol=2e-2)


def test_copy():
    """Accumulation, clipping, recomputation, a tied weight, a frozen one; documents; autocast."""
    run_ranks(check_parts_one_and_two, 2)


def check_transformers(block):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=88, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    torch.manual_seed(0)
    plain = Qwen3ForCausalLM(Qwen3Config(**sizes)).double()
    ring = Zigzag()
    own = ring.positions(8)
    x, y = micro_batches(0)[0]
    loss_sum(plain(x, use_cache=False).logits, y).backward()
    model = copy.deepcopy(plain)
    model.zero_grad()
    names = dict(torch=torch, model=model, ring=ring, x=x, own=own)
    exec(block, names)
    with pytest.raises(AssertionError, match="pad on the right"):
        model(x[:, own], position_ids=own.flip(0)[None])
    loss_sum(names["logits"], y[:, own]).backward()
    context_parallel.sum_gradients(model.parameters())
    compare(gradients_of(model), gradients_of(plain), 1e-6)  # their norms compute in fp32


def test_a_model_of_transformers():
    """Their Qwen3, by the page's lines."""
    with_transformers(check_transformers, 2, "# their attention")


# ---- cost ------------------------------------------------------------------------


@pytest.mark.parametrize("world, flags", [
    (4, ["--attn", "zigzag", *LLAMA, "--dtype", "bf16"]),  # on 2 ranks cp is 2 (cp - 1)
    (4, ["--attn", "allgather", *QWEN]),
    (2, ["--attn", "ulysses", *LLAMA]),
    (4, [*IDEA, *LLAMA]),
])
def test_cost(world, flags):
    textbook(dry_run_agrees("context_parallel", world, *flags, ranks=[world - 1]))


ADDED = {"the idea": IDEA, "AllGather": ("--attn", "allgather"), "Zigzag": ("--attn", "zigzag"),
         "Ulysses": ("--attn", "ulysses")}


def test_what_is_added_to_the_idea():
    """The table at the beginning of part 2; of an exchange it counts the send."""
    source = (ROOT / "context_parallel.py").read_text()
    sizes = ("--dry-run", "4", "--seq", "2048", "--batch", "1")
    reports = alone("context_parallel", *[(*sizes, *flags) for flags in ADDED.values()])
    for words, report in zip(ADDED, reports):
        [rank] = report["ranks"]
        sums = {kind: sum(figures[kind] for name, figures in rank["collectives"].items()
                          if name != "recv") for kind in ("calls", "wire")}
        peak = rank["memory"]["peak"]
        shown = re.search(rf"# .* {words}.* (\d+) +([\d.]+) +([\d.]+)\n", source).groups()
        assert shown == (str(sums["calls"]), f"{sums['wire'] / 1e6:.1f}", f"{peak / 1e6:.1f}")


@pytest.mark.parametrize("attn", ["ring", "zigzag"])
def test_picture(attn):
    """The docstring shows which chunks meet at each hop, and what work that is."""
    ring = KINDS[attn].__new__(KINDS[attn])  # without a process group
    ring.cp = 4
    for rank in range(4):
        ring.cp_rank = rank
        line = f"rank {rank}   "
        total = 0
        for hop in range(4):
            source = (rank - hop) % 4
            theirs = ring.chunks(source)
            halves = 0  # of 8: all pairs of query and key
            for *_, causal, _ in ring.pairs(source, None):
                pairs = (2 // ring.chunks_each) ** 2
                halves += pairs if causal else 2 * pairs
            work = halves // 4
            mark = "*" if hop == 0 else "./ "[work].strip()
            line += f"{','.join(map(str, theirs)) + mark:>7}"
            total += work
        assert f"{line}{total:6}" in context_parallel.__doc__


# ---- planted bugs ----------------------------------------------------------------


IN_A_COPY = [
    ("idea", "dist.broadcast(tensor.data, group=group, group_src=0)", "pass"),
    ("idea", "dist.all_gather(pieces, own, group=group)", "pieces = [own for _ in pieces]"),
    ("idea", "dist.reduce_scatter(own, pieces, group=ctx.group)",
     "own = pieces[dist.get_rank(ctx.group)]"),
    ("idea", "own.unsqueeze(1) >=", "own.unsqueeze(1) - own[0] >="),  # as if all were the first
    ("idea", "mask = mask & is_same.unsqueeze(1)", "pass"),
    ("idea", "dist.all_reduce(p.grad, group=group)", "pass"),
    ("Zigzag", "mask = mask.tril()", "pass"),
    ("Zigzag", "mask = mask & is_same[:, None, None]", "pass"),
    ("Zigzag", "torch.finfo(scores.dtype).min", "-math.inf"),
    ("Zigzag", "dP - (dout * out).sum(-1, keepdim=True)", "dP"),
    ("Zigzag", "torch.sigmoid(block_lse - lse)", "torch.full_like(block_lse, 0.5)"),
    ("Zigzag", "lse.copy_(torch.logaddexp(lse, block_lse))", "pass"),
    ("Zigzag", "if theirs <= mine:", "if True:"),
    ("Zigzag", "i, j, theirs == mine", "i, j, i == j"),
    ("Zigzag", "i, j, theirs == mine", "i, j, False"),
    ("Ring", "dkv[j, 1] += block_dv", "pass"),
    ("Ring", "own_dkv += receive()", "receive()"),
    ("AllGather", "reduce_scatter(own_dkv.view(-1), all_dkv.view(-1), group=self.group)",
     "own_dkv.copy_(all_dkv[self.cp_rank])"),
    ("Ulysses", "ctx.way_back = (new_dim, old_dim, group)",
     "ctx.way_back = (old_dim, new_dim, group)"),
    ("Ulysses", "mask = is_same.tril()", "mask = is_same"),
    ("Ulysses", "dist.all_reduce(flat, group=group)", "pass"),
]


def check_planted(name, old, new):
    with pytest.raises((AssertionError, RuntimeError), match="not close|shape|size"):
        check_copy(name, 6, 2, old, new)


def test_planted_in_a_copy():
    run_ranks(check_each, 2, check_planted, IN_A_COPY)


@pytest.mark.parametrize("old, new", [
    ("[dist.get_rank(group)]", "[0]"),  # all ranks have the first tokens
    ('reduction="sum") / valid', 'reduction="mean")'),
    ("model(x[:, own])", "model(x[:, :len(own)])"),
    ("y[:, own].flatten()", "y[:, :len(own)].flatten()"),
])
def test_planted_in_the_step(old, new):
    check_bug_shows("context_parallel", 2, *IDEA, plant=partial(rewritten, old, new))


def test_bad_usage():
    check_refused("context_parallel", [
        (["--dry-run", "2", "--seq", "18"], "--seq 18 does not divide into 4 chunks, for 2 ranks"),
        (["--dry-run", "4", "--seq", "18", *IDEA], "--seq 18 does not divide into 4 chunks"),
        (["--dry-run", "4", "--attn", "ulysses", *LLAMA], "4 ranks cannot share 2 heads of keys"),
        (["--impl", "torch", "--device", "cpu"], "needs GPUs"),
    ])
