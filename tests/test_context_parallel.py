import textwrap

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import context_parallel
from conftest import (
    copied, dry_run_agrees, each, is_clear, outcome, proves, run, textbook)
from context_parallel import KINDS, AllGather, AllToAll, Ulysses, on_paper, picture
from decoder import Decoder, batch, compare, gradients_of, loss_sum
from harness.ledger import Ledger

LLAMA = ("--model", "llama-toy")


@pytest.mark.parametrize("world, attn, flags", [
    (1, "zigzag", LLAMA),
    (2, "allgather", LLAMA),
    (2, "ulysses", []),
    (4, "ring", LLAMA),
    (4, "zigzag", [*LLAMA, "--kv-heads", "1"]),
    (3, "zigzag", ["--seq", "18", "--vocab", "257", "--batch", "3"]),
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


# ---- attention alone -----------------------------------------------------------


def sequences(T, kv_heads=4, H=4, D=4):
    """Whole q, k, v and the gradient of the output, the same on every rank."""
    rng = torch.Generator().manual_seed(0)
    heads = [H, kv_heads, kv_heads, H]
    return [torch.randn(1, n, T, D, generator=rng) for n in heads]


def own_group(size):
    """The group of `size` ranks in a row that this rank is in; every rank makes them all."""
    groups = []
    for first in range(0, dist.get_world_size(), size):
        groups.append(dist.new_group(range(first, first + size)))
    return groups[dist.get_rank() // size]


def check_attention(T, group_size, kv_heads, D, causal):
    """out, dq, dk, dv of each kind, in every group of ranks, against SDPA of the whole sequence."""
    group = own_group(group_size)
    *qkv, dout = sequences(T, kv_heads, D=D)
    whole = [x.clone().requires_grad_() for x in qkv]
    out = F.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True)
    out.backward(dout)
    for kind in KINDS.values():
        if kind is Ulysses and kv_heads % group_size:
            continue
        ring = kind(group, causal)
        own = ring.positions(T)
        parts = [x[:, :, own].requires_grad_() for x in qkv]
        result = ring.attend(*parts)
        result.backward(dout[:, :, own])
        ours = [result, *(part.grad for part in parts)]
        theirs = [out, *(x.grad for x in whole)]
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b[:, :, own], rtol=0, atol=1e-12)


def check_autocast():
    """As scaled_dot_product_attention, attend casts what RoPE has made fp32."""
    q, k, v, _ = [x.float() for x in sequences(16)]
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for kind, sends in (KINDS["zigzag"], "send"), (Ulysses, "all_to_all"):
        ring = kind()
        own = ring.positions(16)
        parts = [q[:, :, own], k[:, :, own], v[:, :, own].bfloat16()]
        found = []
        with torch.autocast("cpu", torch.bfloat16):
            sent = watched(lambda: found.append(ring.attend(*parts)))
        assert found[0].dtype == torch.bfloat16
        # 2 ranks: k and v once, or half of q, k, v and the result
        assert sent[sends][1] == 2 * parts[2].nbytes
        torch.testing.assert_close(found[0].float(), wanted[:, :, own], rtol=0, atol=0.03)


# ---- the copy --------------------------------------------------------------------


def train(model, positions, own, finish):
    """Two clipped steps of two micro-batches each -> gradients, norms, parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = {}
    for step in range(2):
        optimizer.zero_grad()
        for x, y in batch(2 * step), batch(2 * step + 1):
            logits = checkpoint(model, x[:, own], positions, use_reentrant=False)
            (loss_sum(logits, y[:, own]) / 64).backward()
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
    plain = Decoder(True, 0.0, heads, kv_heads)
    torch.manual_seed(ring.cp_rank)  # every rank starts with weights of its own
    model = Decoder(True, 0.0, heads, kv_heads)
    copy.replicate(model)
    for block in model.blocks:
        block.attn.attend = ring.attend
    for m in plain, model:
        m.blocks[0].attn.q_proj.requires_grad_(False)
    wanted = train(plain, None, slice(None), lambda parameters: None)
    compare(train(model, own, own, copy.sum_gradients), wanted)


def check_usage():
    """The docstring's lines for code of one's own, with section 1 and torch alone."""
    lines = textwrap.dedent(context_parallel.__doc__.split("\n\n")[5])
    torch.manual_seed(0)
    model = Decoder()
    x, y = batch(0)
    (loss_sum(model(x), y) / 32).backward()
    wanted = gradients_of(model)
    model.zero_grad()
    known = vars(copied("context_parallel"))
    known.update(model=model, group=None, T=8, device="cpu", x=x, y=y,
                 valid_targets_of_all_ranks=32)
    exec(lines, known)
    compare(gradients_of(model), wanted)


def check_section_one():
    each(check_copy, [  # name, heads, heads of k and v
        ("Ring", 3, 3), ("Zigzag", 6, 2), ("AllGather", 3, 1), ("Ulysses", 6, 2)])
    check_usage()
    check_autocast()
    check_asserts()


def check_asserts():
    zigzag = copied("context_parallel").Zigzag()
    with pytest.raises(AssertionError, match="18 tokens do not divide into 4 chunks"):
        zigzag.positions(18)
    odd = torch.ones(1, 2, 3, 8)
    with pytest.raises(AssertionError, match="3 tokens: cut them as positions"):
        zigzag.attend(odd, odd, odd)


def test_section_one_alone():
    """Accumulation, clipping, recomputation, a tied weight, a frozen one; autocast; refusals."""
    run(check_section_one, 2)


# ---- cost ----------------------------------------------------------------------


def watched(step):
    """What step() communicates -> {collective: (calls, bytes this rank sends)}"""
    nothing = {"parameters": [], "gradients": [], "optimizer": []}
    with Ledger(held=lambda: nothing) as ledger:
        step()
    sent = {name: figures for name, figures in ledger.collectives.items() if name != "recv"}
    return {name: (figures["calls"], figures["wire"]) for name, figures in sent.items()}


def check_bytes(kind):
    """The docstring's table. Of k and v only the heads that there are travel, half as many as q's.
    """
    T = 16
    *qkv, dout = sequences(T, kv_heads=4, H=8)
    ring = kind()
    own = ring.positions(T)
    parts = [x[:, :, own].requires_grad_() for x in qkv]
    results = []
    forward = watched(lambda: results.append(ring.attend(*parts)))
    backward = watched(lambda: results[0].backward(dout[:, :, own]))
    cp = ring.cp
    Q = parts[0].nbytes
    S = parts[1].nbytes
    if kind is Ulysses:
        assert forward == backward == {"all_to_all": (4, 2 * (cp - 1) / cp * (S + Q))}
    elif kind is AllGather:
        gathered = {"all_gather": (1, 2 * (cp - 1) * S)}
        assert forward == gathered
        assert backward == {**gathered, "reduce_scatter": (1, 2 * (cp - 1) * S)}
    else:
        assert forward == {"send": (cp - 1, 2 * (cp - 1) * S)}
        assert backward == {"send": (2 * (cp - 1), 4 * (cp - 1) * S)}


def check_four_ranks():
    each(check_attention, [  # T, group_size, kv_heads, D, causal
        (1024, 4, 4, 4, True),  # longer than a block of the kernel
        (24, 4, 1, 3, True),
        (24, 2, 2, 5, False),
        (256, 4, 4, 4, False),
    ])
    each(check_bytes, [(kind,) for kind in KINDS.values()])


def test_attention_alone():
    """Values and bytes. On 2 ranks cp and 2 (cp - 1) would be the same."""
    run(check_four_ranks, 4)


@pytest.mark.parametrize("world, attn, flags", [
    (2, "zigzag", ["--dtype", "bf16"]),
    (4, "allgather", LLAMA),
    (2, "ulysses", LLAMA),
])
def test_cost(world, attn, flags):
    last = [world - 1]
    textbook(dry_run_agrees("context_parallel", world, "--attn", attn, *flags, ranks=last))


# ---- pure parts ------------------------------------------------------------------


@pytest.mark.parametrize("attn", ["ring", "zigzag"])
@pytest.mark.parametrize("cp", [1, 3, 8])
def test_every_pair_is_seen_once(attn, cp):
    T = 12 * cp
    tokens = T // cp
    count = torch.zeros(T, T)
    for cp_rank in range(cp):
        ring = on_paper(attn, cp_rank, cp)
        mine = ring.positions(T)
        for hop in range(cp):
            theirs = on_paper(attn, ring.source(hop), cp).positions(T)
            first, keys, causal = ring.wanted(hop, tokens)
            block = torch.ones(tokens - first, keys)
            if causal:
                block = block.tril()
            count[mine[first:, None], theirs[None, :keys]] += block
    assert torch.equal(count, torch.ones(T, T).tril())


def test_picture():
    """The docstring shows what the program prints."""
    for left, right in zip(picture("ring", 4), picture("zigzag", 4)):
        assert f"{left}      {right}" in context_parallel.__doc__
    assert [line.split()[-1] for line in picture("zigzag", 16)[1:]] == ["16"] * 8


# ---- planted bugs: each must fail the check --------------------------------------


def one_hop_missing(module):
    wanted = module.Ring.wanted

    def broken(self, hop, tokens):
        if hop == self.cp - 1:
            return module.Wanted(tokens, 0, False)
        return wanted(self, hop, tokens)

    module.Ring.wanted = broken


def plain_average(module):
    """Blocks are averaged, whatever their log-sum-exp."""
    attend_block = module.attend_block

    def broken(*args):
        out, lse = attend_block(*args)
        return out, torch.zeros_like(lse)

    module.attend_block = broken


def positions_not_shifted(module):
    module.count_as = lambda model, ring: None


def last_hop_not_returned(module):
    """What the others add to dK and dV never comes home."""

    def broken(self):
        self.sending.wait()
        return self.own

    module.ReturnByHops.finish = broken


def not_scattered(module):
    module.ReturnByReduceScatter.finish = lambda self: self.everyone[self.ring.cp_rank]


def one_of_the_heads_that_share(module):
    """dK and dV of one query head instead of the sum of those that share them."""

    def broken(dx, out):
        out.copy_(dx.unflatten(1, (out.shape[1], -1))[:, :, 0])

    module.sum_heads = broken


def not_turned_back(module):
    """Heads and tokens come back from the wrong ranks."""

    def broken(ctx, grad):
        back = AllToAll.apply(grad, *ctx.way_back)
        return back.flip(2), None, None, None

    AllToAll.backward = staticmethod(broken)


def gradients_not_summed(module):
    """What is summed is something else."""
    module.sum_gradients = lambda parameters, group: dist.all_reduce(torch.zeros(1), group=group)


@pytest.mark.parametrize("attn, plant, flags", [
    ("ring", one_hop_missing, []),
    ("zigzag", plain_average, []),
    ("zigzag", positions_not_shifted, LLAMA),
    ("ring", last_hop_not_returned, []),
    ("allgather", not_scattered, []),
    ("zigzag", one_of_the_heads_that_share, LLAMA),
    ("ulysses", not_turned_back, []),
    ("ulysses", gradients_not_summed, []),
])
def test_planted(attn, plant, flags):
    proves("context_parallel", 2, "--attn", attn, *flags, plant=plant)


# ---- bad usage -------------------------------------------------------------------


def test_bad_usage():
    for flags, words in [
        (["--dry-run", "2", "--attn", "ring", "--seq", "15"], "does not divide into 2 chunks"),
        (["--dry-run", "2", "--seq", "18"], "--seq 18 does not divide into 4 chunks, for zigzag"),
        (["--dry-run", "4", "--attn", "ulysses", *LLAMA],
         "4 ranks cannot share 4 heads, 2 of keys and values"),
        (["--impl", "torch", "--device", "cpu"], "needs GPUs"),
        (["--impl", "both", "--dry-run", "2"], "take --impl scratch"),
    ]:
        code, _, said = outcome("context_parallel", flags)
        assert code == 2 and is_clear("context_parallel", said, words), (code, said)
