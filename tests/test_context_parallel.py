import textwrap
from functools import partial

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
from harness.ledger import Ledger

LLAMA = ("--model", "llama-toy")


@pytest.mark.parametrize("world, attn, flags", [
    (1, "zigzag", LLAMA),
    (2, "ring", LLAMA),
    (2, "zigzag", []),
    (2, "allgather", LLAMA),
    (4, "ring", []),
    (4, "zigzag", [*LLAMA, "--kv-heads", "1"]),
    (4, "allgather", []),
    (4, "ulysses", [*LLAMA, "--kv-heads", "4"]),
    (3, "zigzag", ["--seq", "18", "--vocab", "257", "--batch", "3"]),
    (3, "ulysses", ["--seq", "15", "--heads", "3", "--width", "33"]),
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


def test_attention_alone():
    """Longer than a block of the kernel, with fewer heads of k and v, without the causal mask."""
    run(each, 4, check_attention, [  # T, group_size, kv_heads, D, causal
        (1024, 4, 4, 4, True),
        (512, 2, 4, 4, True),
        (24, 4, 1, 3, True),
        (24, 2, 2, 5, False),
        (256, 4, 4, 4, False),
    ])


def check_autocast():
    """As scaled_dot_product_attention, attend casts what RoPE has made fp32."""
    q, k, v, _ = [x.float() for x in sequences(16)]
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    ring = KINDS["zigzag"]()
    own = ring.positions(16)
    with torch.autocast("cpu", torch.bfloat16):
        found = ring.attend(q[:, :, own], k[:, :, own], v[:, :, own].bfloat16())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted[:, :, own], rtol=0, atol=0.03)


def test_autocast():
    run(check_autocast, 2)


# ---- the copy --------------------------------------------------------------------


class Layer(nn.Module):
    """Rotary positions, grouped queries, gates, no biases: of Llama's form, and not our toy's."""

    def __init__(self, width, heads, kv_heads, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.before = nn.RMSNorm(width)
        self.query = nn.Linear(width, heads * head_dim, bias=False)
        self.key = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.value = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.merge = nn.Linear(heads * head_dim, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)

    def heads(self, linear, x):
        return linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def turned(self, x, positions):
        """By an angle that grows with the position."""
        even, odd = x.chunk(2, -1)
        angle = positions[:, None] * 0.1
        first = even * angle.cos() - odd * angle.sin()
        second = even * angle.sin() + odd * angle.cos()
        return torch.cat([first, second], -1)

    def forward(self, x, positions):
        h = self.before(x)
        q = self.turned(self.heads(self.query, h), positions)
        k = self.turned(self.heads(self.key, h), positions)
        y = self.attend(q, k, self.heads(self.value, h))
        y = self.merge(y.transpose(1, 2).flatten(2))
        return x + y * F.silu(self.gate(x))


class Reader(nn.Module):
    def __init__(self, heads=6, kv_heads=2, head_dim=6, width=10, vocabulary=23):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        layers = [Layer(width, heads, kv_heads, head_dim) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.out = nn.Linear(width, vocabulary, bias=False)
        self.out.weight = self.words.weight
        layers[0].query.requires_grad_(False)

    def forward(self, tokens, positions):
        x = self.words(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, positions, use_reentrant=False)
        return self.out(x)


def loss_sum(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def train(model, tokens, targets, positions, finish, valid):
    """Two clipped steps of two micro-batches each -> gradients, norms, parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = {}
    for step in range(2):
        optimizer.zero_grad()
        for x, y in zip(tokens[step], targets[step]):
            (loss_sum(model(x, positions), y) / valid).backward()
        finish(model)
        seen[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for name, p in model.named_parameters():
            if p.requires_grad:
                seen[f"{name} {step}"] = p.grad.clone()
        optimizer.step()
    return {**seen, **model.state_dict()}


def text(*shape):
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 23, shape, generator=rng)
    return tokens[..., :-1], tokens[..., 1:]


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-10, atol=1e-12)


def check_copy(name, heads, kv_heads):
    T = 24
    copy = copied("context_parallel")
    ring = getattr(copy, name)()
    tokens, targets = text(2, 2, 3, T + 1)  # steps, micro-batches, rows, tokens
    torch.manual_seed(0)
    plain = Reader(heads, kv_heads)
    wanted = train(plain, tokens, targets, torch.arange(T), lambda model: None, valid=6 * T)

    torch.manual_seed(ring.cp_rank)  # every rank starts with weights of its own
    model = Reader(heads, kv_heads)
    copy.replicate(model)
    for layer in model.layers:
        layer.attend = ring.attend
    own = ring.positions(T)

    def finish(model):
        copy.sum_gradients(model.parameters())

    same(train(model, tokens[..., own], targets[..., own], own, finish, valid=6 * T), wanted)


def test_section_one_alone():
    """Accumulation, clipping, recomputation, a tied weight, a frozen one."""
    run(each, 2, check_copy, [  # name, heads, heads of k and v
        ("Ring", 3, 3), ("Zigzag", 6, 2), ("AllGather", 3, 1), ("Ulysses", 6, 2)])


def check_usage():
    """The docstring's lines for code of one's own, with section 1 and torch alone."""
    lines = textwrap.dedent(context_parallel.__doc__.split("\n\n")[5])
    assert lines.startswith("replicate(")
    model = Reader()
    model.blocks = model.layers
    for layer in model.layers:
        layer.attn = layer
    x, y = text(2, 17)
    known = vars(copied("context_parallel"))
    known["replicate"](model)
    (loss_sum(model(x, torch.arange(16)), y) / 32).backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    known.update(model=model, group=None, T=16, device="cpu", x=x, y=y,
                 valid_targets_of_all_ranks=32)
    exec(lines, known)
    same({name: p.grad for name, p in model.named_parameters() if p.requires_grad}, wanted)


def test_the_docstrings_usage():
    run(check_usage, 2)


def check_asserts():
    with pytest.raises(AssertionError, match="18 tokens do not divide into 4 chunks"):
        KINDS["zigzag"]().positions(18)
    odd = torch.ones(1, 2, 3, 8)
    with pytest.raises(AssertionError, match="3 tokens: cut them as positions"):
        KINDS["zigzag"]().attend(odd, odd, odd)


def test_what_would_be_silently_wrong_is_refused():
    run(check_asserts, 2)


# ---- cost ----------------------------------------------------------------------


def watched(step):
    """What step() communicates -> {collective: (calls, bytes this rank sends)}"""
    nothing = {"parameters": [], "gradients": [], "optimizer": []}
    with Ledger(held=lambda: nothing) as ledger:
        step()
    found = {}
    for name, figures in ledger.collectives.items():
        if name != "recv":
            found[name] = (figures["calls"], figures["wire"])
    return found


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


def test_bytes_of_attention():
    """On 4 ranks: on 2, cp and 2 (cp - 1) are the same."""
    run(each, 4, check_bytes, [(kind,) for kind in KINDS.values()])


@pytest.mark.parametrize("world, attn, flags", [
    (4, "ring", LLAMA),
    (2, "zigzag", ["--dtype", "bf16"]),
    (4, "allgather", LLAMA),
    (2, "ulysses", LLAMA),
    (1, "zigzag", []),
])
def test_cost(world, attn, flags):
    ranks = sorted({0, world - 1})
    real = dry_run_agrees("context_parallel", world, "--attn", attn, *flags, ranks=ranks)
    textbook(real)
    size = 4 * real["parameters"]["total"]
    if "bf16" in flags:
        size /= 2
    for rank in real["ranks"]:
        assert rank["memory"]["parameters"] == rank["memory"]["gradients"] == size


# ---- pure parts ------------------------------------------------------------------


@pytest.mark.parametrize("attn", ["ring", "zigzag", "allgather"])
@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_every_pair_is_seen_once(attn, cp):
    T = 12 * cp
    tokens = T // cp
    count = torch.zeros(T, T)
    for cp_rank in range(cp):
        ring = on_paper(attn, cp_rank, cp)
        mine = ring.positions(T)
        before = count.sum()
        for hop in range(cp):
            theirs = on_paper(attn, ring.source(hop), cp).positions(T)
            first, keys, causal = ring.wanted(hop, tokens)
            block = torch.ones(tokens - first, keys)
            if causal:
                block = block.tril()
            count[mine[first:, None], theirs[None, :keys]] += block
        whole_blocks = (cp - 1) / 2  # as many of the other ranks' keys are before this rank's
        if attn == "ring":
            whole_blocks = cp_rank  # all of those of the ranks before, and none behind
        work = (count.sum() - before).item()
        assert work == tokens * (tokens + 1) / 2 + tokens * tokens * whole_blocks
    assert torch.equal(count, torch.ones(T, T).tril())


def last_column(rows):
    return [int(row.split()[-1]) for row in rows[1:]]


def test_picture():
    """The docstring shows what the program prints; ring's work is 1 : 2 cp - 1, zigzag's equal."""
    ring = picture("ring", 4)
    zigzag = picture("zigzag", 4)
    for left, right in zip(ring, zigzag):
        assert f"{left}      {right}" in context_parallel.__doc__
    assert last_column(ring) == [1, 3, 5, 7]
    assert last_column(zigzag) == [4, 4, 4, 4]
    assert last_column(picture("zigzag", 16)) == [16] * 8


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
        self.hop.wait()
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
    ("zigzag", positions_not_shifted, []),
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
        (["--dry-run", "3", "--attn", "ulysses", "--seq", "18"], "--heads 4 does not divide"),
        (["--dry-run", "4", "--attn", "ulysses", *LLAMA], "--kv-heads 2 does not divide over 4"),
        (["--impl", "torch", "--device", "cpu"], "needs GPUs"),
        (["--impl", "both", "--dry-run", "2"], "take --impl scratch"),
    ]:
        code, _, said = outcome("context_parallel", flags)
        assert code == 2 and is_clear("context_parallel", said, words), (code, said)
