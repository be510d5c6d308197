from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import context_parallel
from conftest import alone, dry_run_agrees, proves, run, script, textbook
from context_parallel import AllGather, AllToAll, Ring, Ulysses, Zigzag, picture
from harness.ledger import Ledger

KINDS = {"ring": Ring, "zigzag": Zigzag, "allgather": AllGather, "ulysses": Ulysses}


@pytest.mark.parametrize("attn", KINDS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_equals_one_process(attn, world):
    proves("context_parallel", world, "--attn", attn)


@pytest.mark.parametrize("flags", [["--attn", "ring", "--seq", "15"], ["--attn", "zigzag", "--seq", "18"],
                                   ["--attn", "ulysses", "--seq", "15", "--heads", "3", "--width", "33"]])
def test_odd_sizes(flags):
    proves("context_parallel", 3, "--vocab", "257", "--batch", "3", *flags)


# ---- attention alone -----------------------------------------------------------


def sequences(T, B=1, H=4, D=4):
    """Whole q, k, v and the gradient of the output, the same on every rank."""
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, T, D, generator=rng) for _ in range(4)]


def check_attention(T, group_size):
    """out, dq, dk, dv of each kind, in every group of ranks, against SDPA of the whole sequence in one process."""
    groups = [dist.new_group(range(i, i + group_size)) for i in range(0, dist.get_world_size(), group_size)]
    group = groups[dist.get_rank() // group_size]
    *qkv, dout = sequences(T)
    whole = [x.clone().requires_grad_() for x in qkv]
    out = F.scaled_dot_product_attention(*whole, is_causal=True)
    out.backward(dout)
    for kind in KINDS.values():
        ring = kind(group)
        own = ring.positions(T)
        parts = [x[:, :, own].requires_grad_() for x in qkv]
        result = ring.attend(*parts)
        result.backward(dout[:, :, own])
        for ours, theirs in zip((result, *(p.grad for p in parts)), (out, *(w.grad for w in whole))):
            torch.testing.assert_close(ours, theirs[:, :, own], rtol=0, atol=1e-12)


@pytest.mark.parametrize("world, group_size, T", [(1, 1, 512), (2, 2, 4096), (4, 4, 512), (4, 2, 512)])
def test_attention_alone(world, group_size, T):
    run(check_attention, world, T, group_size)


# ---- cost ----------------------------------------------------------------------


def watched(step):
    """What step() communicates -> {collective: (calls, bytes this rank sends)}"""
    nothing = {"parameters": [], "gradients": [], "optimizer": []}
    with Ledger(held=lambda: nothing) as ledger:
        step()
    return {name: (c["calls"], c["wire"]) for name, c in ledger.collectives.items() if name != "recv"}


def check_bytes(kind):
    """The docstring's table: S is the bytes of one of q, k, v, out on this rank."""
    n, T = dist.get_world_size(), 16
    *qkv, dout = sequences(T)
    ring = kind()
    own = ring.positions(T)
    parts, result = [x[:, :, own].requires_grad_() for x in qkv], []
    forward = watched(lambda: result.append(ring.attend(*parts)))
    backward = watched(lambda: result[0].backward(dout[:, :, own]))
    S = parts[0].nbytes
    if kind is Ulysses:
        assert forward == backward == {"all_to_all": (4, 4 * (n - 1) / n * S)}
    elif kind is AllGather:
        assert forward == {"all_gather": (1, 2 * (n - 1) * S)}
        assert backward == {"all_gather": (1, 2 * (n - 1) * S), "reduce_scatter": (1, 2 * (n - 1) * S)}
    else:
        assert forward == {"send": (n - 1, 2 * (n - 1) * S)}
        assert backward == {"send": (2 * (n - 1), 4 * (n - 1) * S)}


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize("world", [2, 4])
def test_bytes_of_attention(kind, world):
    run(check_bytes, world, kind)


@pytest.mark.parametrize("world, attn, flags", [*((4, attn, []) for attn in KINDS), (1, "zigzag", []),
                                                (2, "ring", ["--dtype", "bf16"]), (3, "allgather", ["--seq", "18"])])
def test_cost(world, attn, flags):
    real = dry_run_agrees("context_parallel", world, "--attn", attn, *flags, ranks=sorted({0, world - 1}))
    textbook(real)
    P, b = real["parameters"]["total"], 2 if flags[-1:] == ["bf16"] else 4
    for rank in real["ranks"]:
        reduced = {"calls": 1, "payload": b * P, "wire": 2 * (world - 1) * b * P / world}
        assert rank["collectives"]["all_reduce"] == reduced
        assert rank["memory"]["parameters"] == rank["memory"]["gradients"] == b * P


@pytest.mark.parametrize("attn", ["zigzag", "allgather", "ulysses"])
def test_activations(attn):
    """At a fixed T they fall as 1/n; at fixed memory T grows as n."""
    flags = "--layers", "2", "--width", "32", "--heads", "8", "--batch", "1", "--attn", attn, "--dry-run"
    layouts = ("8", "1024"), ("2", "256"), ("8", "256")
    reports = alone("context_parallel", *((*flags, n, "--seq", T) for n, T in layouts))
    longer, fewer, more = (r["ranks"][0]["memory"]["activations"] - 4 for r in reports)  # one scalar of the loss
    assert longer == fewer == 4 * more


# ---- pure parts ------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Ring, Zigzag, AllGather])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_every_pair_is_seen_once(kind, n):
    T = 12 * n
    count, work = torch.zeros(T, T), []
    for ring in (kind(cp_rank=rank, cp=n) for rank in range(n)):
        mine = ring.positions(T)
        before = count.sum()
        for hop in range(n):
            theirs = kind(cp_rank=(ring.cp_rank - hop) % n, cp=n).positions(T)
            first, keys, causal = ring.wanted(hop, len(mine))
            block = torch.ones(len(mine) - first, keys)
            count[mine[first:, None], theirs[None, :keys]] += block.tril() if causal else block
        work.append((count.sum() - before).item())
    assert torch.equal(count, torch.ones(T, T).tril())
    t = T // n
    assert work == [t * (t + 1) / 2 + t * t * (r if kind is Ring else (n - 1) / 2) for r in range(n)]


def test_picture():
    """The docstring shows what the program prints; ring's work is 1 : 2n-1, zigzag's equal."""
    ring, zigzag = list(picture(Ring, 4)), list(picture(Zigzag, 4))
    for a, b in zip(ring, zigzag):
        assert f"{a}      {b}" in context_parallel.__doc__
    assert [int(row.split()[-1]) for row in ring[1:]] == [1, 3, 5, 7]
    assert [int(row.split()[-1]) for row in zigzag[1:]] == [4, 4, 4, 4]
    assert [int(row.split()[-1]) for row in list(picture(Zigzag, 16))[1:]] == [16] * 8


# ---- planted bugs: each must fail the check --------------------------------------


def one_hop_missing(module):
    seen = module.Ring.seen
    module.Ring.seen = lambda self, hop, t: (t, 0, False) if hop == self.n - 1 else seen(self, hop, t)


def plain_average(module):
    """Blocks are averaged, whatever their log-sum-exp."""
    block = module.attend_block
    module.attend_block = lambda *args: [x * (x.dim() == 4) for x in block(*args)]


def positions_not_shifted(module):
    parallelize = module.parallelize

    def broken(model, ring):
        parallelize(model, ring).pos._forward_pre_hooks.clear()
        return model
    module.parallelize = broken


def last_hop_not_returned(module):
    """What the others add to dK and dV never comes home."""
    def broken(self, parts):
        own, wait = next(parts), None
        for part in parts:
            if wait:
                part += wait()
            wait = self.hop(part)
        wait()
        return own
    module.Ring.give_back = broken


def not_scattered(module):
    module.AllGather.give_back = lambda self, parts: list(parts)[0]


def averaged_per_rank(module):
    step = module.train_step
    module.train_step = lambda m, o, x, y, _, *rest: step(m, o, x, y, (y >= 0).sum() * dist.get_world_size(), *rest)


def not_turned_back(module):
    """Heads and tokens come back from the wrong ranks."""
    AllToAll.backward = staticmethod(lambda ctx, grad: (AllToAll.apply(grad, *ctx.back).flip(2), None, None, None))


def gradients_not_summed(module):
    module.nn.utils.vector_to_parameters = lambda flat, gradients: None


@pytest.mark.parametrize("attn, plant", [
    ("ring", one_hop_missing), ("zigzag", one_hop_missing), ("zigzag", plain_average),
    ("zigzag", positions_not_shifted), ("ring", last_hop_not_returned), ("zigzag", last_hop_not_returned),
    ("allgather", not_scattered), ("ring", averaged_per_rank), ("ulysses", not_turned_back),
    ("ulysses", gradients_not_summed)])
def test_planted(attn, plant):
    proves("context_parallel", 2, "--attn", attn, plant=plant)


@pytest.mark.parametrize("world, flags", [
    (2, ["--attn", "ring", "--seq", "15"]), (2, ["--attn", "zigzag", "--seq", "18"]),
    (3, ["--attn", "ulysses", "--seq", "18"]), (1, ["--attn", "spiral"]), (2, ["--impl", "torch", "--device", "cpu"]),
    (1, ["--impl", "both", "--dry-run", "2"])])
def test_bad_usage(world, flags):
    script("context_parallel", world, *flags, code=2)
