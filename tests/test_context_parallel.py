import importlib.util
import sys
import textwrap
import types
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import context_parallel
from amp_accum_ckpt import full
from common import GPTConfig, adamw, build
from conftest import (
    SMALL, alone, copied, dry_run_agrees, each, is_clear, outcome, proves, run, script, some,
    textbook)
from context_parallel import (
    KINDS, AllGather, AllToAll, Hop, Ring, Ulysses, Zigzag, check_head_width, parallelize, picture,
    train_step)
from harness.compare import worst_gap
from harness.ledger import Ledger

BLOCKWISE = (Ring, Zigzag, AllGather)


@pytest.mark.parametrize("world, attn", [(1, "zigzag"), *((4, attn) for attn in KINDS)])
def test_equals_one_process(world, attn):
    proves("context_parallel", world, "--attn", attn)


@pytest.mark.parametrize("flags", [
    ["--attn", "ring", "--seq", "15"],
    ["--attn", "zigzag", "--seq", "18"],
    ["--attn", "ulysses", "--seq", "15", "--heads", "3", "--width", "33"],
])
def test_odd_sizes(flags):
    proves("context_parallel", 3, "--vocab", "257", "--batch", "3", *flags)


SCHEDULED = ("--steps", "3", "--warmup", "1", "--decay", "cosine", "--eval-every", "2")


@pytest.mark.parametrize("attn, train", [
    ("zigzag", r"blocks\.1\.|^norm"),
    ("ring", r"blocks\.0\.attn\.q"),
    ("allgather", r"attn\.k|mlp"),
    ("ulysses", r"blocks\.0\.attn\.v|blocks\.1\.mlp"),
])
def test_frozen_parameters_and_held_out_text(attn, train):
    """Equal to one process; what has no gradient is not sent."""
    report = proves("context_parallel", 2, "--attn", attn, "--train", train, *SCHEDULED)
    textbook(report)
    assert report["check"]["validation"] <= 1e-10


def test_goes_on_with_other_ranks_and_another_attention(tmp_path):
    folder = str(tmp_path)
    script("context_parallel", 2, *SMALL, "--dtype", "fp64", "--attn", "ring", "--save", folder)
    more = ("--steps", "4", "--dtype", "fp64", "--resume", folder)
    report = script("context_parallel", 1, *SMALL, *more)
    assert report["check"]["parameter"] <= 1e-10
    assert len(report["loss"]) == 2  # steps 2 and 3


# ---- attention alone -----------------------------------------------------------


def sequences(T, kv_heads=4, B=1, H=4, D=4):
    """Whole q, k, v and the gradient of the output, the same on every rank."""
    rng = torch.Generator().manual_seed(0)
    heads = [H, kv_heads, kv_heads, H]
    return [torch.randn(B, n, T, D, generator=rng) for n in heads]


def own_group(size):
    """The group of `size` ranks in a row that this rank is in; every rank makes them all."""
    groups = []
    for first in range(0, dist.get_world_size(), size):
        groups.append(dist.new_group(range(first, first + size)))
    return groups[dist.get_rank() // size]


def check_attention(T, group_size, kv_heads, D):
    """out, dq, dk, dv of each kind, in every group of ranks, against SDPA of the whole sequence."""
    group = own_group(group_size)
    *qkv, dout = sequences(T, kv_heads, D=D)
    whole = [x.clone().requires_grad_() for x in qkv]
    out = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    out.backward(dout)
    for kind in KINDS.values():
        if kind is Ulysses and kv_heads % group_size:
            continue
        ring = kind(group)
        own = ring.positions(T)
        parts = [x[:, :, own].requires_grad_() for x in qkv]
        result = ring.attend(*parts)
        result.backward(dout[:, :, own])
        ours = [result, *(part.grad for part in parts)]
        theirs = [out, *(x.grad for x in whole)]
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b[:, :, own], rtol=0, atol=1e-12)


@pytest.mark.parametrize("world, cases", [  # T, group_size, kv_heads, D
    (1, [(512, 1, 4, 4)]),
    (2, [(4096, 2, 4, 4), (24, 2, 2, 5)]),
    (4, [(512, 4, 4, 4), (512, 2, 4, 4), (24, 4, 1, 3)]),
])
def test_attention_alone(world, cases):
    """With fewer heads of k and v than of q, too, and with odd head widths."""
    run(each, world, check_attention, cases)


def without_gradient_of(names, T=16):
    """Gradients of q, k, v where those named need none, by blocks and whole."""
    ring = Zigzag()
    *qkv, dout = sequences(T)
    own = ring.positions(T)
    whole = [x.clone() for x in qkv]
    parts = [x[:, :, own] for x in qkv]
    for name, x, part in zip("qkv", whole, parts):
        x.requires_grad_(name not in names)
        part.requires_grad_(name not in names)
    F.scaled_dot_product_attention(*whole, is_causal=True).backward(dout)
    ring.attend(*parts).backward(dout[:, :, own])
    for name, x, part in zip("qkv", whole, parts):
        if name in names:
            assert part.grad is None
        else:
            torch.testing.assert_close(part.grad, x.grad[:, :, own], rtol=0, atol=1e-12)


def test_some_need_no_gradient():
    run(each, 2, without_gradient_of, [("q",), ("k",), ("kv",), ("qk",)])


GOOD = {"q": (2, 4, 6, 8), "k": (2, 4, 6, 8), "v": (2, 4, 6, 8)}
REFUSED = [  # other shapes of some, and what is said
    ({"q": (4, 6, 8)}, "each must be (B, H, T/cp, D)"),
    ({"v": (2, 4, 6, 4)}, "k and v must have the same shape"),
    ({"q": (1, 4, 6, 8)}, "the same B and D"),
    ({"q": (2, 4, 6, 4)}, "the same B and D"),
    ({"q": (2, 4, 8, 8)}, "as many keys as queries"),
    ({"q": (2, 6, 6, 8)}, "must divide those of q"),
    (dict.fromkeys("qkv", (2, 4, 5, 8)), "5 tokens on this rank do not divide into 2"),
    (dict.fromkeys("qkv", (2, 4, 0, 8)), "0 tokens"),
]


@pytest.mark.parametrize("other, words", REFUSED)
def test_shapes_that_are_refused(other, words):
    """Before anything is sent."""
    shapes = {**GOOD, **other}
    q, k, v = (torch.ones(shape) for shape in shapes.values())
    with pytest.raises(ValueError) as error:
        Zigzag(cp_rank=0, cp=2).attend(q, k, v)
    assert words in str(error.value)


def test_other_inputs_that_are_refused():
    q = torch.ones(2, 4, 6, 8)
    with pytest.raises(ValueError, match="cast or move them"):
        Ring(cp_rank=0, cp=2).attend(q, q.double(), q.double())
    k = q[:, :2]
    with pytest.raises(ValueError, match="2 of k and v: ulysses on 4 ranks needs multiples"):
        Ulysses(cp_rank=0, cp=4).attend(q, k, k)
    with pytest.raises(ValueError, match="9 tokens do not divide into 4 chunks"):
        Zigzag(cp_rank=0, cp=2).positions(9)


@pytest.mark.parametrize("D, dtype", [
    (12, torch.bfloat16), (264, torch.float16), (6, torch.float32),
])
def test_head_widths_that_are_refused_on_gpus(D, dtype):
    with pytest.raises(ValueError, match=f"head width {D} in {dtype} on a GPU"):
        check_head_width(D, dtype)
    check_head_width(24, dtype)
    check_head_width(D, torch.float64)


def test_second_derivatives_are_refused():
    """The kernels have none: a graph of the backward would be silently cut."""
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    out = Ring(cp_rank=0, cp=1).attend(q, q, q)
    with pytest.raises(ValueError, match="no second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


class SaidToBeOnGPU:
    """Looks like a tensor on a GPU, as far as a Hop looks before it sends."""

    is_cuda = True
    device = torch.device("cpu")

    def __init__(self, tensor):
        self.tensor = tensor

    def cpu(self):
        return self.tensor


def check_staging():
    ring = Ring()
    on_host = torch.full((3,), float(ring.cp_rank))
    hop = Hop(SaidToBeOnGPU(on_host), ring)
    assert hop.sent is on_host
    assert hop.wait().tolist() == [float((ring.cp_rank - 1) % ring.cp)] * 3


def test_gloo_sends_from_the_host():
    run(check_staging, 2)


# ---- the copy --------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * self.scale


class Layer(nn.Module):
    """Rotary positions, grouped queries, no biases: nothing of the toy GPT's."""

    def __init__(self, width, heads, kv_heads, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.before = Norm(width)
        self.query = nn.Linear(width, heads * head_dim, bias=False)
        self.key = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.value = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.merge = nn.Linear(heads * head_dim, width, bias=False)
        self.attention = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)

    def heads(self, linear, x):
        B, tokens, _ = x.shape
        return linear(x).view(B, tokens, -1, self.head_dim).transpose(1, 2)

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
        y = self.attention(q, k, self.heads(self.value, h))
        return x + torch.tanh(self.merge(y.transpose(1, 2).flatten(2)))


class Reader(nn.Module):
    def __init__(self, heads, kv_heads, head_dim, width=9, vocabulary=23):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList()
        for _ in range(2):
            self.layers.append(Layer(width, heads, kv_heads, head_dim))
        self.out = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, positions):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.out(x)


def loss_sum(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def train(model, tokens, targets, positions, finish):
    """Three steps -> losses, gradients and norm of each, parameters; finish sums and clips."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = {}
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_sum(model(tokens[step], positions), targets[step]) / targets[step].numel()
        loss.backward()
        seen[f"norm {step}"] = finish(model)
        for name, p in model.named_parameters():
            seen[f"gradient {name} {step}"] = p.grad.clone()
        optimizer.step()
    return {**seen, **model.state_dict()}


def clip_alone(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def check_copy(name, heads, kv_heads):
    head_dim = 6
    T = 24
    copy = copied("context_parallel")
    ring = getattr(copy, name)()
    rng = torch.Generator().manual_seed(1)
    text = torch.randint(0, 23, (3, 2, T + 1), generator=rng)  # steps, rows, tokens
    tokens = text[..., :-1]
    targets = text[..., 1:]
    torch.manual_seed(0)
    plain = Reader(heads, kv_heads, head_dim)
    wanted = train(plain, tokens, targets, torch.arange(T), clip_alone)

    torch.manual_seed(ring.cp_rank)  # every rank starts with weights of its own
    model = Reader(heads, kv_heads, head_dim)
    copy.replicate(model)
    for layer in model.layers:
        layer.attention = ring.attend
    own = ring.positions(T)

    def finish(model):
        for p in model.parameters():
            p.grad /= ring.cp  # train divided by this rank's tokens alone
        copy.sum_gradients(model.parameters())
        return copy.clip_gradients(model.parameters(), 0.05)

    found = train(model, tokens[..., own], targets[..., own], own, finish)
    assert worst_gap(found, wanted)[0] <= 1e-10


@pytest.mark.parametrize("world, cases", [  # name, heads, kv_heads
    (2, [("Ring", 3, 3), ("Zigzag", 6, 2), ("Ulysses", 6, 2)]),
    (4, [("AllGather", 3, 1), ("Zigzag", 3, 3), ("Ulysses", 8, 4)]),
])
def test_section_one_alone(world, cases):
    run(each, world, check_copy, cases)


def check_usage():
    """The docstring's lines for code of one's own, with section 1 and torch alone."""
    lines = context_parallel.__doc__.split("context_parallel.py --attn zigzag\n\n")[1]
    model = Reader(heads=2, kv_heads=2, head_dim=4)
    # plain attention, until the docstring's lines assign another to attention.attend
    attention = types.SimpleNamespace(attend=model.layers[0].attention)
    for layer in model.layers:
        layer.attention = lambda q, k, v: attention.attend(q, k, v)
    rng = torch.Generator().manual_seed(1)
    text = torch.randint(0, 23, (2, 17), generator=rng)
    x = text[:, :-1]
    y = text[:, 1:]
    known = vars(copied("context_parallel"))
    known["replicate"](model)
    (loss_sum(model(x, torch.arange(16)), y) / 32).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    wanted = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    known.update(model=model, attention=attention, group=None, T=16, device="cpu", x=x, y=y,
                 valid_targets_of_all_ranks=32)
    exec(textwrap.dedent(lines), known)
    found = {name: p.grad for name, p in model.named_parameters()}
    assert worst_gap(found, wanted)[0] <= 1e-10


def test_the_docstrings_usage():
    run(check_usage, 2)


def check_sum_of_gradients(name):
    """Unused here, unused everywhere, frozen, of another dtype: as if one process had done it."""
    copy = copied(name)
    rank = dist.get_rank()
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(5)]
    both, second_only, nobody, frozen, half = parameters
    half.data = half.data.bfloat16()
    frozen.requires_grad_(False)
    both.grad = torch.full((3,), 1.0 + rank)
    half.grad = torch.full((3,), 2.0 + rank, dtype=torch.bfloat16)
    if rank == 1:
        second_only.grad = torch.zeros(3)
    copy.sum_gradients(parameters)
    assert both.grad.tolist() == [3.0] * 3
    assert half.grad.tolist() == [5.0] * 3 and half.grad.dtype == torch.bfloat16
    assert second_only.grad.tolist() == [0.0] * 3
    assert nobody.grad is None and frozen.grad is None
    norm = copy.clip_gradients([both, nobody], 1.0)
    assert norm.item() == pytest.approx(27 ** 0.5)
    assert both.grad.norm().item() == pytest.approx(1.0)


def check_order_in_memory(name):
    """Fused optimizers ignore strides: a gradient lies in memory as its parameter does."""
    copy = copied(name)
    used = nn.Parameter(torch.ones(2, 3, 4).transpose(0, 2))
    used.grad = torch.ones_like(used)
    unused = nn.Parameter(torch.ones(2, 3, 4).transpose(0, 2))
    if dist.get_rank() == 1:
        unused.grad = torch.ones_like(unused)
    copy.sum_gradients([used, unused])
    assert used.grad.stride() == used.stride() and used.grad.eq(2).all()
    assert unused.grad.stride() == unused.stride() and unused.grad.eq(1).all()


def check_signs(name):
    """What rank 1 alone has used is summed on rank 0 too, be it negative or -0.0 everywhere."""
    copy = copied(name)
    for value in (-3.0, -0.0, 0.0, 3.0):
        p = nn.Parameter(torch.ones(2))
        if dist.get_rank() == 1:
            p.grad = torch.full((2,), value)
        copy.sum_gradients([p])
        assert p.grad.tolist() == [value] * 2


def check_summing(name):
    check_sum_of_gradients(name)
    check_order_in_memory(name)
    check_signs(name)


def test_sum_of_gradients():
    run(each, 2, check_summing, [("context_parallel",), ("amp_accum_ckpt",)])


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
    """The docstring's table: S is the bytes of one of q, k, v on this rank, of k here.

    Of k and v only the heads that there are travel: half as many as q has.
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
    S = parts[1].nbytes
    if kind is Ulysses:
        sent = 2 * (cp - 1) / cp * (S + parts[0].nbytes)
        assert forward == backward == {"all_to_all": (4, sent)}
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


@pytest.mark.parametrize("world, attn, flags", some([
    (4, "zigzag", []),
    (4, "ring", []),
    (4, "ulysses", []),
    (4, "allgather", []),
    (2, "ring", ["--dtype", "bf16"]),
    (1, "zigzag", []),
    (3, "allgather", ["--seq", "18"]),
], every=2))
def test_cost(world, attn, flags):
    ends = sorted({0, world - 1})
    if attn == "ulysses":
        ends = [0]  # all ranks do the same
    real = dry_run_agrees("context_parallel", world, "--attn", attn, *flags, ranks=ends)
    textbook(real)
    size = 4 * real["parameters"]["total"]
    if "bf16" in flags:
        size /= 2
    for rank in real["ranks"]:
        reduced = {"calls": 1, "payload": size, "wire": 2 * (world - 1) * size / world}
        assert rank["collectives"]["all_reduce"] == reduced
        assert rank["memory"]["parameters"] == rank["memory"]["gradients"] == size


@pytest.mark.parametrize("attn", some(["zigzag", "allgather", "ulysses"], every=2))
def test_activations(attn):
    """At a fixed T they fall as 1/cp; at fixed memory T grows as cp."""
    sizes = ("--layers", "2", "--width", "32", "--heads", "8", "--batch", "1", "--attn", attn)
    runs = []
    for cp, T in (8, 1024), (2, 256), (8, 256):
        runs.append((*sizes, "--dry-run", str(cp), "--seq", str(T)))
    kept = []
    for report in alone("context_parallel", *runs):
        kept.append(report["ranks"][0]["memory"]["activations"] - 4)  # one scalar of the loss
    longer, fewer, more = kept
    assert longer == fewer == 4 * more


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts[operation._opname] += 1
        return operation(*args, **(kwargs or {}))


def check_positions_are_there():
    torch.set_default_dtype(torch.float32)
    ring = Zigzag()
    assert ring.positions(16, "cpu") is ring.positions(16, "cpu")
    model = build(GPTConfig(layers=1, width=16, heads=2, seq=16), 0)
    model = parallelize(model, ring)
    optimizer = adamw(model.parameters(), 1e-3)
    x = torch.zeros(2, 8, dtype=torch.int64)
    train_step(model, optimizer, x, x, 32, 1.0)
    with Operations() as operations:
        train_step(model, optimizer, x, x, 32, 1.0)
    assert operations.counts["arange"] == 1  # the GPT's own
    for waits in "index", "_local_scalar_dense", "_to_copy":
        assert operations.counts[waits] == 0, waits


def test_a_step_makes_no_positions_and_waits_for_no_number():
    run(check_positions_are_there, 2)


# ---- inside other techniques -----------------------------------------------------


def small_model(kind, group=None):
    """A GPT that attends so, and this rank's tokens of a batch."""
    cfg = GPTConfig(layers=2, width=16, heads=4, seq=16)
    model = parallelize(build(cfg, 0, dtype=torch.float64), kind(group))
    return model, torch.arange(16).view(2, 8) + dist.get_rank()


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters()}


def check_under_checkpointing(kind):
    """Forward runs twice, and communicates twice, with the same gradients."""
    plain, x = small_model(kind)

    def two_forwards():
        plain(x)
        plain(x).square().sum().backward()

    model, x = small_model(kind)
    for block in model.blocks:
        block.forward = partial(full, block.forward)
    assert watched(lambda: model(x).square().sum().backward()) == watched(two_forwards)
    assert worst_gap(gradients_of(model), gradients_of(plain))[0] <= 1e-12


def test_under_activation_checkpointing():
    run(each, 2, check_under_checkpointing, [(Zigzag,), (AllGather,), (Ulysses,)])


def check_deepcopy(kind):
    """A copy of a model, such as a moving average of its weights, attends with the same ranks.

    They are two of three.
    """
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return
    model, x = small_model(kind, group)
    average = torch.optim.swa_utils.AveragedModel(model)
    torch.testing.assert_close(average(x), model(x), rtol=0, atol=0)


def test_a_deepcopy_attends_too():
    run(each, 3, check_deepcopy, [(Zigzag,), (Ulysses,)])


# ---- pure parts ------------------------------------------------------------------


@pytest.mark.parametrize("kind", BLOCKWISE)
@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_every_pair_is_seen_once(kind, cp):
    T = 12 * cp
    tokens = T // cp
    count = torch.zeros(T, T)
    for cp_rank in range(cp):
        ring = kind(cp_rank=cp_rank, cp=cp)
        mine = ring.positions(T)
        before = count.sum()
        for hop in range(cp):
            theirs = kind(cp_rank=ring.source(hop), cp=cp).positions(T)
            first, keys, causal = ring.wanted(hop, tokens)
            block = torch.ones(tokens - first, keys)
            if causal:
                block = block.tril()
            count[mine[first:, None], theirs[None, :keys]] += block
        whole_blocks = (cp - 1) / 2  # as many of the other ranks' keys are before this rank's
        if kind is Ring:
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


def test_positions_made_in_inference_serve_training():
    ring = Zigzag(cp_rank=1, cp=2)
    with torch.inference_mode():
        own = ring.positions(8)
    assert own.tolist() == [2, 3, 4, 5]
    nn.Embedding(8, 3)(own).sum().backward()


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
    module.cut_positions = lambda embedding, ring: None


def last_hop_not_returned(module):
    """What the others add to dK and dV never comes home."""

    def broken(self):
        self.hop.wait()
        return self.own

    module.ReturnByHops.finish = broken


def not_scattered(module):
    module.ReturnByReduceScatter.finish = lambda self: self.everyone[self.ring.cp_rank]


def averaged_per_rank(module):
    step = module.train_step

    def broken(model, optimizer, x, y, valid, *rest):
        own_valid = (y >= 0).sum() * dist.get_world_size()
        return step(model, optimizer, x, y, own_valid, *rest)

    module.train_step = broken


def not_turned_back(module):
    """Heads and tokens come back from the wrong ranks."""

    def broken(ctx, grad):
        back = AllToAll.apply(grad, ctx.join, ctx.cut, ctx.group)
        return back.flip(2), None, None, None

    AllToAll.backward = staticmethod(broken)


def gradients_not_summed(module):
    """What is summed is something else."""
    module.sum_gradients = lambda parameters, group: dist.all_reduce(torch.zeros(1), group=group)


@pytest.mark.parametrize("attn, plant", [
    ("ring", one_hop_missing),
    ("zigzag", plain_average),
    ("zigzag", positions_not_shifted),
    ("ring", last_hop_not_returned),
    ("allgather", not_scattered),
    ("ring", averaged_per_rank),
    ("ulysses", not_turned_back),
    ("ulysses", gradients_not_summed),
])
def test_planted(attn, plant):
    proves("context_parallel", 2, "--attn", attn, plant=plant)


# ---- bad usage -------------------------------------------------------------------


@pytest.mark.parametrize("flags, words", [
    (["--dtype", "bf16", "--width", "48", "--heads", "4"], "head width 12 in torch.bfloat16"),
    (["--width", "24", "--heads", "4"], "head width 6 in torch.float32 on a GPU"),
    (["--impl", "torch"], "torch's context_parallel needs NumPy"),
])
def test_bad_usage_on_gpus(flags, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # also where NumPy is
    monkeypatch.setattr(sys, "argv", sys.argv)  # outcome() changes it
    code, _, said = outcome("context_parallel", flags)
    assert code == 2 and is_clear("context_parallel", said, words), (code, said)


def taken_at_work(world, seq, dtype, batch=8, eval_every=0):
    """Would --impl torch run with these flags, on GPUs and with NumPy?"""
    args = types.SimpleNamespace(
        impl="torch", dry_run=0, world_size=world, cfg=types.SimpleNamespace(seq=seq), dtype=dtype,
        batch=batch, eval_every=eval_every)
    try:
        context_parallel.refuse_at_work(args, on_gpu=True)
    except SystemExit:
        return False
    return True


def test_what_torch_takes(monkeypatch):
    """As torch 2.15 does. What it does not take would end in a traceback."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    for world, seq, dtype in [(1, 40, "fp32"), (2, 128, "fp32"), (8, 512, "fp32"), (2, 32, "bf16")]:
        assert taken_at_work(world, seq, dtype), (world, seq, dtype)
    for world, seq, dtype in [(2, 64, "fp32"), (2, 96, "fp32"), (4, 128, "fp32"), (2, 34, "bf16")]:
        assert not taken_at_work(world, seq, dtype), (world, seq, dtype)
    # it trains whole batches, and evaluates rows of each rank's own
    assert taken_at_work(2, 128, "fp32", batch=1)
    assert taken_at_work(2, 128, "fp32", batch=2, eval_every=1)
    assert not taken_at_work(2, 128, "fp32", batch=1, eval_every=1)
