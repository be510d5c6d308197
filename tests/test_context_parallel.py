import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import context_parallel
from conftest import check_refused, copied, dry_run_agrees, each, proves, run, textbook
from context_parallel import KINDS, AllToAll, Ulysses, picture
from others import Llama, compare, gradients_of, loss_sum, token_rows

LLAMA = ("--model", "llama-toy")


@pytest.mark.parametrize("world, attn, flags", [
    (2, "allgather", LLAMA),
    (2, "ulysses", []),
    (4, "zigzag", LLAMA),
])
def test_equals_one_process(world, attn, flags):
    proves("context_parallel", world, "--attn", attn, *flags)


def test_goes_on_with_other_ranks_and_another_attention(tmp_path):
    frozen = ("--train", r"blocks\.1\.|^norm", "--eval-every", "2")
    proves("context_parallel", 2, *frozen, "--attn", "ring", "--save", str(tmp_path))
    more = ("--steps", "4", "--resume", str(tmp_path))
    report = proves("context_parallel", 1, *frozen, *more)
    assert report["check"]["validation"] <= 1e-10
    assert len(report["loss"]) == 2  # steps 2 and 3


def own_group(size):
    """The group of `size` ranks in a row that this rank is in; every rank makes them all."""
    groups = []
    for first in range(0, dist.get_world_size(), size):
        groups.append(dist.new_group(range(first, first + size)))
    return groups[dist.get_rank() // size]


def check_attention(T, group_size, kv_heads, D, causal, compiled=False):
    """out, dq, dk, dv of each kind, in every group of ranks, against SDPA of the whole sequence."""
    group = own_group(group_size)
    rng = torch.Generator().manual_seed(0)
    *qkv, dout = [torch.randn(1, H, T, D, generator=rng) for H in (4, kv_heads, kv_heads, 4)]
    whole = [x.clone().requires_grad_() for x in qkv]
    out = F.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True)
    out.backward(dout)
    for kind in KINDS.values():
        if kind is Ulysses and kv_heads % group_size:
            continue
        ring = kind(group, causal)
        own = ring.positions(T)
        parts = [x[:, :, own].requires_grad_() for x in qkv]
        attend = torch.compile(ring.attend, backend="aot_eager") if compiled else ring.attend
        result = attend(*parts)
        result.backward(dout[:, :, own])
        ours = [result, *(part.grad for part in parts)]
        theirs = [out, *(x.grad for x in whole)]
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b[:, :, own], rtol=0, atol=1e-12)


def test_attention_alone():
    run(each, 4, check_attention, [  # T, group_size, kv_heads, D, causal, compiled
        (1024, 4, 4, 4, True),  # longer than a block of the kernel
        (24, 4, 1, 3, True),
        (24, 2, 2, 5, False),
        (24, 2, 2, 5, True, True),
    ])


def train(model, own, finish, **positions):
    """Two clipped steps of two micro-batches each -> gradients, norms, parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rng = torch.Generator().manual_seed(0)
    seen = {}
    for step in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            x, y = token_rows(rng, 4)
            output = checkpoint(model, x[:, own], use_reentrant=False, **positions)
            (loss_sum(output["logits"], y[:, own]) / 64).backward()
        finish(model.parameters())
        seen[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for name, gradient in gradients_of(model).items():
            seen[f"{name} {step}"] = gradient
        optimizer.step()
    return {**seen, **model.state_dict()}


def check_copy(name, heads, kv_heads):
    copy = copied("context_parallel")
    ring = getattr(copy, name)()
    own = ring.positions(8)
    torch.manual_seed(0)
    plain = Llama(2, heads, kv_heads, tied=True)
    torch.manual_seed(ring.cp_rank)  # every rank starts with weights of its own
    model = Llama(2, heads, kv_heads, tied=True)
    copy.replicate(model)
    for layer in model.layers:
        layer.self_attn.attend = ring.attend
    for m in plain, model:
        m.layers[0].self_attn.q_proj.requires_grad_(False)
    wanted = train(plain, slice(None), lambda parameters: None)
    compare(train(model, own, copy.sum_gradients, positions=own), wanted)


def check_section_one():
    each(check_copy, [  # name, heads, heads of k and v
        ("Ring", 3, 3), ("Zigzag", 6, 2), ("AllGather", 3, 1), ("Ulysses", 6, 2)])
    section = copied("context_parallel")
    zigzag = section.Zigzag()
    q = torch.ones(1, 2, 4, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):  # RoPE has made q and k fp32
        for kind in zigzag, section.Ulysses():
            assert kind.attend(q, q, q.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(AssertionError, match="18 tokens do not divide into 4 chunks"):
        zigzag.positions(18)
    with pytest.raises(AssertionError, match="1 heads of k for 2 ranks"):
        section.Ulysses().attend(q, q[:, :1], q[:, :1])
    with pytest.raises(AssertionError, match="3 tokens: cut them as positions"):
        zigzag.attend(q[:, :, :3], q[:, :, :3], q[:, :, :3])
    with pytest.raises(AssertionError, match="4 keys for 2 queries"):
        zigzag.attend(q[:, :, :2], q, q)
    with pytest.raises(AssertionError, match="1 heads of q, 2 of k"):
        zigzag.attend(q[:, :1], q, q)
    with pytest.raises(AssertionError, match="side by side"):  # kernels would read other numbers
        zigzag.attend(q.mT.contiguous().mT, q, q)


def test_section_one_alone():
    """Accumulation, clipping, recomputation, a tied weight, a frozen one; autocast; refusals."""
    run(check_section_one, 2)


@pytest.mark.parametrize("world, attn, flags", [
    (4, "zigzag", [*LLAMA, "--dtype", "bf16"]),  # on 2 ranks cp and 2 (cp - 1) would be the same
    (4, "allgather", LLAMA),
    (2, "ulysses", LLAMA),
])
def test_cost(world, attn, flags):
    flags = ("--attn", attn, *flags)
    textbook(dry_run_agrees("context_parallel", world, *flags, ranks=[world - 1]))


def test_picture():
    """The docstring shows what the program prints."""
    for left, right in zip(picture("ring", 4), picture("zigzag", 4)):
        assert f"{left}      {right}" in context_parallel.__doc__


def plain_average(module):
    """Blocks are averaged, whatever their log-sum-exp."""
    attend_block = module.attend_block

    def broken(*args):
        out, lse = attend_block(*args)
        return out, torch.zeros_like(lse)

    module.attend_block = broken


def not_brought_back(module):
    """What the others add to dK and dV never comes home."""
    for kind in module.Ring, module.AllGather:
        kind.bring_back = lambda self, parts: [*parts][0]


def not_turned_back(module):
    def broken(ctx, grad):
        back = AllToAll.apply(grad, *ctx.way_back)
        return back.flip(2), None, None, None

    AllToAll.backward = staticmethod(broken)


@pytest.mark.parametrize("attn, plant", [
    ("zigzag", plain_average),
    ("ring", not_brought_back),
    ("allgather", not_brought_back),
    ("ulysses", not_turned_back),
])
def test_planted(attn, plant):
    proves("context_parallel", 2, "--attn", attn, plant=plant)


def test_bad_usage():
    check_refused("context_parallel", [
        (["--dry-run", "2", "--seq", "18"], "--seq 18 does not divide into 4 chunks, for zigzag"),
        (["--dry-run", "4", "--attn", "ulysses", *LLAMA],
         "4 ranks cannot share 4 heads, 2 of keys and values"),
        (["--impl", "torch", "--device", "cpu"], "needs GPUs"),
        (["--impl", "both", "--dry-run", "2"], "take --impl scratch"),
    ])
