"""context_parallel.py in all forms of the toy; its idea and its technique around a model of
somebody else, and attention alone."""
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import context_parallel
from conftest import (
    ROOT, alone, check_refused, copied, dry_run_agrees, each, idea, proves, rewritten, run,
    textbook)
from context_parallel import KINDS, AllToAll, Ulysses, seen
from others import Llama, compare, gradients_of, loss_sum, token_rows

LLAMA = ("--model", "llama-toy")
QWEN = ("--model", "qwen3-toy", "--head-dim", "6")
IDEA = ("--impl", "idea")


@pytest.mark.parametrize("world, flags", [
    (1, IDEA),
    (2, [*IDEA, *LLAMA, "--documents"]),
    (4, IDEA),
    (2, ["--attn", "allgather", *LLAMA]),
    (4, ["--attn", "allgather", "--documents"]),
    (2, ["--attn", "ulysses"]),
    (2, ["--attn", "ulysses", *QWEN, "--documents"]),
    (4, ["--attn", "zigzag", *LLAMA]),
    (4, ["--attn", "zigzag", *QWEN, "--documents"]),
    (3, ["--attn", "ring", "--seq", "18", "--documents"]),
])
def test_equals_one_process(world, flags):
    proves("context_parallel", world, *flags)


def test_goes_on_with_other_ranks_and_another_attention(tmp_path):
    frozen = ("--train", r"blocks\.1\.|^norm", "--eval-every", "2", "--documents")
    proves("context_parallel", 2, *frozen, "--attn", "ring", "--save", str(tmp_path))
    report = proves("context_parallel", 1, *frozen, "--steps", "4", "--resume", str(tmp_path))
    assert report["check"]["validation"] <= 1e-10
    assert len(report["loss"]) == 2  # steps 2 and 3


# ---- attention alone -------------------------------------------------------------


def own_group(size):
    """The group of `size` ranks in a row that this rank is in; every rank makes them all."""
    groups = []
    for first in range(0, dist.get_world_size(), size):
        groups.append(dist.new_group(range(first, first + size)))
    return groups[dist.get_rank() // size]


def check_attention(T, group_size, kv_heads, D, packed=False, compiled=False, plain=False):
    """out, dq, dk, dv of each kind, in every group of ranks, against SDPA of the whole sequence."""
    group = own_group(group_size)
    rng = torch.Generator().manual_seed(0)
    *qkv, dout = [torch.randn(2, H, T, D, generator=rng) for H in (4, kv_heads, kv_heads, 4)]
    whole = [x.clone().requires_grad_() for x in qkv]
    documents = None
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    if packed:
        documents = (torch.rand(2, T, generator=rng) < 0.1).cumsum(1)
        mask = mask & (documents.unsqueeze(1) == documents.unsqueeze(2)).unsqueeze(1)
    out = F.scaled_dot_product_attention(*whole, attn_mask=mask, enable_gqa=True)
    out.backward(dout)
    for kind in KINDS.values():
        if kind is Ulysses and kv_heads % group_size:
            continue
        ranks = kind(group)
        own = ranks.positions(T)
        parts = [x[:, :, own].requires_grad_() for x in qkv]
        attend = torch.compile(ranks.attend, backend="aot_eager") if compiled else ranks.attend
        with pytest.MonkeyPatch.context() as patch:
            if plain:
                patch.setattr(context_parallel, "has_kernel", lambda q, same: False)
            result = attend(*parts, documents)
            result.backward(dout[:, :, own])
        ours = [result, *(part.grad for part in parts)]
        theirs = [out, *(x.grad for x in whole)]
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b[:, :, own], rtol=0, atol=1e-12)


def test_attention_alone():
    run(each, 4, check_attention, [  # T, group_size, kv_heads, D, packed, compiled, plain
        (1024, 4, 4, 4),  # longer than a block of the kernel
        (24, 4, 1, 3),
        (24, 4, 2, 3, False, False, True),
        (72, 4, 2, 3, True),
        (24, 2, 2, 5, True),
        (24, 2, 2, 5, False, True),
    ])


@pytest.mark.parametrize("dtype, gap", [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_formulas_are_what_kernels_compute(dtype, gap, monkeypatch):
    """lse and gradients too, of fewer keys than queries, and of numbers that lie apart."""
    rng = torch.Generator().manual_seed(0)
    q, dout = [torch.randn(2, 6, 8, 5, generator=rng).to(dtype) for _ in range(2)]
    k, v = [torch.randn(2, 3, 5, 5, generator=rng).to(dtype) for _ in range(2)]

    def both(q):
        out, lse = context_parallel.attend_block(q, k, v, False, None)
        inputs = (dout, q, out.to(dtype), lse, k, v)
        return out, lse, *context_parallel.attend_block_backward(*inputs, False, None)

    kernels = both(q)
    apart = both(q.mT.contiguous().mT)  # for which a kernel would read other numbers
    monkeypatch.setattr(context_parallel, "has_kernel", lambda q, same: False)
    for formula, *others in zip(both(q), kernels, apart):
        for other in others:
            torch.testing.assert_close(other.float(), formula.float(), rtol=0, atol=gap)


def test_nothing_seen_is_no_nan():
    """A query whose document is not in this block counts for nothing."""
    q, k, v = torch.randn(3, 1, 2, 4, 5)
    same = torch.zeros(1, 4, 4, dtype=torch.bool)
    out, lse = context_parallel.attend_block(q, k, v, True, same)
    assert out.isfinite().all() and (lse < -1e30).all()
    of_all = torch.zeros_like(lse)  # of blocks with keys that it sees
    gradients = context_parallel.attend_block_backward(q, q, out, of_all, k, v, True, same)
    assert not any(x.any() for x in gradients)


# ---- the copy --------------------------------------------------------------------


def train(model, own, finish, documents=None, **positions):
    """Two clipped steps of two micro-batches each -> gradients, norms, parameters.

    documents(x): lets the model's attention know them.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rng = torch.Generator().manual_seed(0)
    found = {}
    for step in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            x, y = token_rows(rng, 4)
            if documents:
                documents((x % 5 == 0).cumsum(1))
            output = checkpoint(model, x[:, own], use_reentrant=False, **positions)
            (loss_sum(output["logits"], y[:, own]) / 64).backward()
        finish(model)
        found[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for name, gradient in gradients_of(model).items():
            found[f"{name} {step}"] = gradient
        optimizer.step()
    return {**found, **model.state_dict()}


def attend_by(model, attend):
    for layer in model.layers:
        layer.self_attn.attend = attend


def packed(model, attend):
    return lambda documents: attend_by(model, partial(attend, documents=documents))


def check_copy(name, heads, kv_heads, *bug):
    """name: a class of part 2, or "idea"."""
    torch.manual_seed(0)
    plain = Llama(2, heads, kv_heads, tied=True)
    torch.manual_seed(dist.get_rank())  # every rank starts with weights of its own
    model = Llama(2, heads, kv_heads, tied=True)
    if name == "idea":
        copy = idea("context_parallel", *bug)
        attend = copy.attend
        own = copy.positions(8)
        finish = copy.all_reduce_gradients
    else:
        copy = copied("context_parallel")
        ranks = getattr(copy, name)()
        attend = ranks.attend
        own = ranks.positions(8)
        finish = lambda model: copy.sum_gradients(model.parameters())  # noqa: E731
    copy.begin_alike(model)
    attend_by(model, attend)
    for m in plain, model:
        m.layers[0].self_attn.q_proj.requires_grad_(False)
    wanted = train(plain, slice(None), lambda model: None)
    compare(train(model, own, finish, positions=own), wanted)
    wanted = train(plain, slice(None), lambda model: None, packed(plain, plain_attend))
    compare(train(model, own, finish, packed(model, attend), positions=own), wanted)


def plain_attend(q, k, v, documents):
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=same.tril(), enable_gqa=True)


def check_parts_one_and_two():
    each(check_copy, [  # name, heads, heads of k and v
        ("Ring", 3, 3), ("Zigzag", 6, 2), ("AllGather", 3, 1), ("Ulysses", 6, 2), ("idea", 6, 2)])
    copy = copied("context_parallel")
    q = torch.ones(1, 2, 4, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):  # RoPE has made q and k fp32
        for kind in copy.Zigzag, copy.Ulysses:
            assert kind().attend(q, q, q.bfloat16()).dtype == torch.bfloat16
        far = 9 * torch.randn(1, 2, 64, 8)
        v = torch.randn(1, 2, 64, 8).bfloat16()
        one = torch.zeros(1, 128, dtype=torch.int64)  # document: formulas in the place of kernels
        packed, whole = [copy.Zigzag().attend(far, far, v, documents) for documents in (one, None)]
        torch.testing.assert_close(packed, whole, rtol=0, atol=2e-2)
    with pytest.raises(AssertionError, match="18 tokens do not divide into 4 chunks"):
        copy.Zigzag().positions(18)
    with pytest.raises(AssertionError, match="1 heads of k for 2 ranks"):
        copy.Ulysses().attend(q, q[:, :1], q[:, :1])


def test_copy():
    """Accumulation, clipping, recomputation, a tied weight, a frozen one; documents; autocast."""
    run(check_parts_one_and_two, 2)


# ---- cost ------------------------------------------------------------------------


@pytest.mark.parametrize("world, flags", [
    (4, ["--attn", "zigzag", *LLAMA, "--dtype", "bf16"]),  # on 2 ranks cp is 2 (cp - 1)
    (4, ["--attn", "allgather", *QWEN]),
    (2, ["--attn", "ulysses", *LLAMA, "--documents"]),
    (4, [*IDEA, *LLAMA]),
])
def test_cost(world, flags):
    textbook(dry_run_agrees("context_parallel", world, *flags, ranks=[world - 1]))


ADDED = {"the idea": IDEA, "AllGather:": ("--attn", "allgather"), "Zigzag:": ("--attn", "zigzag"),
         "Ulysses:": ("--attn", "ulysses")}


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


def works(kind, cp):
    """-> [[the work of a rank at a hop: 1 for half of the pairs of query and key, 2 for all]]"""
    rows = []
    for rank in range(cp):
        row = [1]  # causal
        for hop in range(1, cp):
            theirs = kind.chunks((rank - hop) % cp, cp)
            first, count, causal = seen(kind.chunks(rank, cp), theirs, 2)
            assert not causal
            row.append(2 * (2 - first) * count // 4)
        rows.append(row)
    return rows


@pytest.mark.parametrize("attn", ["ring", "zigzag"])
def test_picture(attn):
    """The docstring shows which chunks meet at each hop, and what work that is."""
    kind = KINDS[attn]
    for rank, row in enumerate(works(kind, 4)):
        line = f"rank {rank}   "
        for hop, work in enumerate(row):
            chunks = ",".join(map(str, kind.chunks((rank - hop) % 4, 4)))
            mark = "*" if hop == 0 else "-/ "[work].strip()
            line += f"{chunks + mark:>7}"
        assert f"{line}{sum(row):6}" in context_parallel.__doc__


# ---- planted bugs ----------------------------------------------------------------


def plain_average(module):
    """Blocks are averaged, whatever their log-sum-exp."""
    attend_block = module.attend_block

    def broken(*args):
        out, lse = attend_block(*args)
        return out, torch.zeros_like(lse)

    module.attend_block = broken


def kept_from_the_sum(module):
    """What a rank adds to the others' dK and dV gets lost."""
    add_gradients = module.Blockwise.add_gradients

    def broken(self, dq, dkv, source, *rest):
        add_gradients(self, dq, dkv, source, *rest)
        if source != self.cp_rank:
            dkv.zero_()

    module.Blockwise.add_gradients = broken


def one_document(module):
    """Blocks do not tell documents apart."""
    view = module.Blockwise.view
    module.Blockwise.view = lambda self, source, tokens, documents: view(self, source, tokens, None)


def not_turned_back(module):
    def broken(ctx, grad):
        back = AllToAll.apply(grad, *ctx.way_back)
        return back.flip(2), None, None, None

    AllToAll.backward = staticmethod(broken)


@pytest.mark.parametrize("attn, plant, flags", [
    ("zigzag", plain_average, []),
    ("ring", kept_from_the_sum, []),
    ("allgather", kept_from_the_sum, []),
    ("zigzag", one_document, ["--documents"]),
    ("ulysses", not_turned_back, []),
])
def test_planted(attn, plant, flags):
    proves("context_parallel", 2, "--attn", attn, *flags, plant=plant)


@pytest.mark.parametrize("old, new", [
    ("[dist.get_rank(group)]", "[0]"),  # all ranks have the first tokens
    ("dist.all_gather(pieces, own, group=group)", "pieces = [own for _ in pieces]"),
    ("dist.reduce_scatter(own, pieces, group=ctx.group)",
     "own = pieces[dist.get_rank(ctx.group)]"),
    ("own.unsqueeze(1) >=", "own.unsqueeze(1) - own[0] >="),  # as if each rank's were the first
    ("mask = mask & same.unsqueeze(1)", "pass"),
    ("dist.all_reduce(p.grad, group=group)", "pass"),
    ('reduction="sum") / valid', 'reduction="mean")'),
    ("model(x[:, own])", "model(x[:, :len(own)])"),
    ("y[:, own].flatten()", "y[:, :len(own)].flatten()"),
])
def test_planted_in_the_idea(old, new):
    plant = partial(rewritten, old, new)
    proves("context_parallel", 2, *IDEA, "--documents", plant=plant)


def check_planted_in_the_beginning():
    with pytest.raises(AssertionError, match="not close"):
        check_copy("idea", 6, 2, "dist.broadcast(tensor.data, group=group, group_src=0)", "pass")


def test_planted_in_the_beginning():
    run(check_planted_in_the_beginning, 2)


def test_bad_usage():
    check_refused("context_parallel", [
        (["--dry-run", "2", "--seq", "18"], "--seq 18 does not divide into 4 chunks, for zigzag"),
        (["--dry-run", "4", "--seq", "18", *IDEA], "--seq 18 does not divide into 4 chunks"),
        (["--dry-run", "4", "--attn", "ulysses", *LLAMA],
         "4 ranks cannot share 4 heads, 2 of keys and values"),
        (["--impl", "torch", "--device", "cpu"], "needs GPUs"),
        (["--impl", "both", "--dry-run", "2"], "take --impl scratch"),
    ])
