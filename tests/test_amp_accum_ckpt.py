import functools
import itertools
import shutil
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint_sequential

import amp_accum_ckpt
from amp_accum_ckpt import (
    LossScaler, Row, full, full_at_work, parallelize, selective, selective_at_work,
    train_step)
from common import GPTConfig, adamw, build, loss_sum
from conftest import (
    SMALL, alone, copied, dry_run_agrees, each, is_clear, outcome, proves, run, script, textbook)
from harness.compare import worst_gap


@pytest.mark.parametrize("world, flags", [
    (1, ["--accum", "3", "--ckpt", "full"]),
    (1, ["--accum", "4", "--ckpt", "selective"]),
    (1, ["--accum", "4"]),
    (2, ["--accum", "1", "--ckpt", "selective"]),
    (2, ["--accum", "3", "--ckpt", "full", "--batch", "7"]),
    (2, ["--accum", "4", "--vocab", "257"]),
    (4, ["--accum", "2", "--ckpt", "full", "--clip", "0"]),
    (1, ["--accum", "3", "--ckpt", "full", "--impl", "torch"]),
    (2, ["--accum", "4", "--ckpt", "selective", "--impl", "torch"]),
])
def test_equals_one_process(world, flags):
    proves("amp_accum_ckpt", world, *flags)


SCHEDULED = ("--steps", "3", "--warmup", "1", "--decay", "linear", "--eval-every", "2")
FROZEN = [
    r"blocks\.1\.|^norm", r"blocks\.0\.attn\.(q|out)", r"tok|bias", r"blocks\.1\.mlp\.down\.weight",
]


@pytest.mark.parametrize("ckpt, train", [
    ("none", FROZEN[0]), ("full", FROZEN[1]), ("selective", FROZEN[2]), ("full", FROZEN[3]),
])
def test_frozen_parameters_and_held_out_text(ckpt, train):
    """Equal to one process."""
    flags = ("--accum", "2", "--ckpt", ckpt, "--train", train)
    report = proves("amp_accum_ckpt", 2, *flags, *SCHEDULED)
    textbook(report)
    assert report["check"]["validation"] <= 1e-10


def test_what_frozen_parameters_save():
    """Less is kept, and less computed: by how much, the textbook says, for every plan."""
    flags = (*SMALL, "--no-check", "--sweep", "--accum", "4", "--train")
    for report in alone("amp_accum_ckpt", *((*flags, train) for train in FROZEN)):
        assert len(report["plans"]) == 12
        for row in (Row(*row) for row in report["plans"]):
            assert row.kept == row.kept_textbook, row
            assert row.again == row.again_textbook, row


@pytest.mark.parametrize("flags", [
    ["--accum", "2", "--ckpt", "full"],
    ["--ckpt", "selective", "--amp", "bf16"],
    ["--accum", "3", "--ckpt", "full", "--amp", "fp16"],
])
def test_cost(flags):
    real = dry_run_agrees("amp_accum_ckpt", 2, "--batch", "7", *flags)
    textbook(real)
    size = 4 * real["parameters"]["total"]
    assert real["ranks"][0]["memory"]["parameters"] == size
    if "fp16" in flags:
        size += 4
    assert real["ranks"][0]["collectives"]["all_reduce"]["payload"] == size


L = 2  # sizes of SMALL
C = 32
H = 4
V = 256
T = 16


def block_by_the_docstring(amp, ckpt, t):
    """Bytes that a block keeps, of t tokens."""
    if amp == "off" and ckpt != "selective":
        return t * (64 * C + 4 * H + 16)
    if amp == "off":
        return t * (40 * C + 4 * H + 16)
    if ckpt != "selective":
        return t * (40 * C + 4 * H + 16) + 24 * C * C
    return t * (24 * C + 4 * H + 16)


def outside_by_hand(amp, t):
    """Final norm, head and loss: the norm's input and statistics, its output, log-probabilities."""
    low = 4
    copy = 0
    if amp != "off":
        low = 2
        copy = 2 * V * C  # of the head's weight
    return t * (4 * C + 8 + 4 * V + low * C) + copy + 4


def full_by_hand(block, outside, t):
    """Bytes beside the indices that are kept where blocks are checkpointed in full, at most.

    That is when forward has ended or, in backward, when a block has run again. By then the loss
    does not keep its targets any more.
    """
    state = 5056  # of torch's random number generator, kept for each block
    targets = 8 * 8 * T
    again = block - 4 * C * t  # what the block keeps beside its input, which is there already
    return L * (4 * C * t + state) + max(outside, again - targets)


def test_sweep():
    """Every plan keeps the bytes of the docstring's table, and does again the FLOPs it says."""
    report = script("amp_accum_ckpt", 1, *SMALL, "--sweep", "--accum", "4")
    assert len(report["plans"]) == 12
    indices = 2 * 8 * 8 * T  # inputs, and targets
    for row in (Row(*row) for row in report["plans"]):
        t = 8 // row.accum * T
        block = block_by_the_docstring(row.amp, row.ckpt, t)
        outside = outside_by_hand(row.amp, t)
        again = 0
        kept = L * block + outside
        if row.ckpt == "full":
            again = L * 8 * T * (16 * C * C + 4 * T * C)
            kept = full_by_hand(block, outside, t)
        assert row.again == row.again_textbook == again
        assert row.kept == row.kept_textbook == kept + indices + 8 * T
        tolerance = 1e-5
        if row.amp != "off":
            tolerance = 2e-2
        assert row.loss_gap < tolerance


def test_low_precision_learns_as_well():
    flags = (*SMALL, "--steps", "50", "--amp")
    for report in alone("amp_accum_ckpt", (*flags, "bf16"), (*flags, "fp16")):
        assert report["loss"][-1] < 0.8 * report["loss"][0]


# ---- checkpointing of any module ------------------------------------------------


class Awkward(nn.Module):
    """Two inputs of odd shapes, dropout, LayerNorm, GELU, a branch, and two outputs."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(7, 5)
        self.b = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)

    def forward(self, x, scale):
        h = F.dropout(F.gelu(self.a(self.norm(x))), 0.3) * scale
        return self.b(h), h.square().mean()


def plainly(forward, *inputs, **keywords):
    return forward(*inputs, **keywords)


def awkward_gradients(how, twice=False):
    torch.manual_seed(1)
    module = Awkward().double()
    x = torch.randn(3, 7).double().requires_grad_()
    scale = torch.tensor(2.0).double()
    y, extra = how(module, x, scale)
    between = torch.rand(4)  # other random numbers
    loss = y.square().sum() + extra
    if twice:
        loss.backward(retain_graph=True)
    loss.backward()
    return [x.grad, *(p.grad for p in module.parameters()), between, torch.rand(4)]


def assert_equal(ours, plain):
    assert len(ours) == len(plain)
    for a, b in zip(ours, plain):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", [full, selective, full_at_work, selective_at_work])
def test_any_module_with_dropout(how):
    """The same gradients, and the same random numbers afterwards."""
    assert_equal(awkward_gradients(how), awkward_gradients(plainly))


@pytest.mark.parametrize("how", [full, selective])
def test_two_backwards(how):
    assert_equal(awkward_gradients(how, twice=True), awkward_gradients(plainly, twice=True))


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selective_layer_norms(options, dtype):
    """Of an input in any order in memory; in bf16 the output is rounded as the first time."""

    def gradients(how):
        torch.manual_seed(0)
        layers = [nn.LayerNorm(6, **options), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)]
        module = nn.Sequential(*layers).to(dtype)
        x = torch.randn(3, 4, 6, dtype=dtype).transpose(0, 1).requires_grad_()
        how(module, x).square().sum().backward()
        return [x.grad, *(p.grad for p in module.parameters())]

    tolerance = 1e-12
    if dtype == torch.bfloat16:
        tolerance = 4e-3
    for a, b in zip(gradients(selective), gradients(plainly)):
        assert (a - b).norm() <= tolerance * b.norm()


CHECKPOINTS = {
    "full": full, "selective": selective,
    "torch": full_at_work, "torch, selective": selective_at_work,
}


def nested_gradients(*how):
    """A block within a block within a block, the outermost checkpointed by the first of `how`."""
    torch.manual_seed(0)
    layers = []
    for _ in range(4):
        layers.append(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.2)))
    layers = nn.ModuleList(layers).double()
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)

    def level(depth, x):
        x = layers[depth](x)
        if depth < len(how):
            x = x + how[depth](partial(level, depth + 1), x)
        return layers[depth](x)

    level(0, x).square().sum().backward()
    return [x.grad, *(p.grad for p in layers.parameters() if p.grad is not None), torch.rand(2)]


@pytest.mark.parametrize("outer", CHECKPOINTS)
@pytest.mark.parametrize("inner", CHECKPOINTS)
def test_a_checkpoint_inside_another(outer, inner):
    plain = nested_gradients(plainly, plainly)
    assert_equal(nested_gradients(CHECKPOINTS[outer], CHECKPOINTS[inner]), plain)


def test_three_levels():
    plain = nested_gradients(plainly, plainly, plainly)
    assert_equal(nested_gradients(full, full, full), plain)
    assert_equal(nested_gradients(full, full_at_work, full), plain)
    assert_equal(nested_gradients(full_at_work, full, selective), plain)


@pytest.mark.parametrize("inner, times", [(full, 3), (selective, 2), (plainly, 2)])
def test_how_often_a_nested_forward_runs(inner, times):
    """Once forward, once for the outer full, and once more if it is checkpointed fully itself."""
    calls = []

    def forward(x):
        calls.append(0)
        return F.gelu(F.layer_norm(x, (4,))).exp()

    x = torch.randn(2, 4, requires_grad=True)
    full(lambda x: inner(forward, x.sin()).cos(), x).sum().backward()
    assert len(calls) == times


def many_inputs(x, none, flag, pair, *, factor=1.0, mask=None, extra=None):
    """Tensors, None, numbers, words and containers, by place and by keyword."""
    cosine, sine = pair
    h = (x * cosine + x.exp() * sine) * factor
    if none is None and flag == "yes":
        h = h * extra["weight"]
    if mask is not None:
        h = h.masked_fill(mask, 0.0)
    return h.sin()


@pytest.mark.parametrize("how", [full, selective])
def test_inputs_of_any_kind(how):
    def gradients(how):
        rng = torch.Generator().manual_seed(0)
        tensors = []
        for _ in range(4):
            tensors.append(torch.randn(3, 4, generator=rng, requires_grad=True))
        x, cosine, sine, weight = tensors
        mask = torch.tensor([True, False, False, True])
        y = how(many_inputs, x, None, "yes", (cosine, sine), factor=2.0, mask=mask,
                extra={"weight": weight})
        y.square().sum().backward()
        return [t.grad for t in tensors]

    assert_equal(gradients(how), gradients(plainly))


def test_no_tensor_among_the_inputs():
    weight = nn.Parameter(torch.ones(3))
    full(lambda power: (weight.exp() ** power).sum(), 2.0).backward()
    torch.testing.assert_close(weight.grad, 2 * torch.ones(3).exp() ** 2)


def test_one_tensor_as_several_inputs():
    """nn.MultiheadAttention takes another way where q, k and v are the same."""

    def gradients(how):
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(6, 2, batch_first=True).double()
        x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
        y, _ = how(attention, x, x, x, need_weights=False)
        y.square().sum().backward()
        return [x.grad, *(p.grad for p in attention.parameters())]

    assert_equal(gradients(full), gradients(plainly))
    assert_equal(gradients(selective), gradients(plainly))


def test_random_state_not_restored(monkeypatch):
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    ours = awkward_gradients(full)
    plain = awkward_gradients(plainly)
    assert (ours[0] - plain[0]).abs().max() > 1e-2


@pytest.mark.parametrize("first, second", [
    (lambda x: x.exp().sin(), lambda x: x.exp()),
    (lambda x: x.exp(), lambda x: x[:2].exp()),
    (lambda x: x.exp(), lambda x: x.double().exp()),
])
def test_forward_that_changes(first, second):
    """Makes fewer tensors, or of other shapes or dtypes."""
    turns = iter([first, second])
    y = full(lambda x: next(turns)(x), torch.ones(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="when it ran again"):
        y.sum().backward()


@pytest.mark.parametrize("how", [full, selective])
def test_changes_in_place_are_refused(how):
    """Autograd refuses them too; but it does not look at what hooks keep."""
    x = torch.ones(3, requires_grad=True)
    h = x * 2
    y = how(lambda h: h * h, h)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_weights_changed_under_autocast_are_refused():
    """Their copies are not kept, but made again: they would be those of other weights."""
    linear = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = selective(linear, x)
    with torch.no_grad():
        linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match="a weight has been changed"):
        y.float().sum().backward()


def test_around_other_hooks():
    """Inside save_on_cpu or a ledger, these see what is kept; under no_grad nothing is."""
    seen = []

    def pack(tensor):
        seen.append(tensor.shape)
        return tensor

    block = build(GPTConfig(layers=1, width=16, heads=2, seq=8), 0).blocks[0]
    x = torch.randn(2, 8, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = full(block.forward, x)
        with torch.no_grad():
            assert torch.equal(full(block.forward, x), y)
    assert seen == [(2, 8, 16), (5056,)]
    y.sum().backward()


def test_hooks_that_lose_the_order_in_memory():
    """Around a GELU of a transposed input, such as save_on_cpu's with pinned memory."""

    def contiguous(tensor):
        return tensor.clone(memory_format=torch.contiguous_format)

    def gradients(how):
        torch.manual_seed(0)
        linear = nn.Linear(4, 4).double()
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(contiguous, lambda tensor: tensor):
            how(lambda x: linear(F.gelu(x.t())), x).square().sum().backward()
        return [x.grad, linear.weight.grad, linear.bias.grad]

    assert_equal(gradients(selective), gradients(plainly))


@pytest.mark.parametrize("how", [full, selective])
def test_hooks_that_copy(how):
    """They write into a tensor of their own, as save_on_cpu does with pinned memory.

    That is no change in place of what is kept.
    """

    def pack(tensor):
        copy = torch.empty_like(tensor)
        return copy.copy_(tensor)

    def gradients(how):
        torch.manual_seed(0)
        linear = nn.Linear(4, 4).double()
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = how(lambda x: F.dropout(linear(F.gelu(x)), 0.2).exp(), x)
        y.square().sum().backward()
        return [x.grad, linear.weight.grad, linear.bias.grad]

    assert_equal(gradients(how), gradients(plainly))


def forces(x, weight):
    """Gradients of an energy, as models of molecules have them: a backward inside forward."""
    energy = (x.tanh() @ weight).sin().square().sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize("outer", [plainly, full, selective, full_at_work])
@pytest.mark.parametrize("inner", [full, selective])
@pytest.mark.parametrize("more", [False, True])
def test_gradients_inside_forward(outer, inner, more):

    def gradients(outer, inner):
        rng = torch.Generator().manual_seed(0)
        x = torch.randn(3, 4, generator=rng, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(4, 2, generator=rng, dtype=torch.float64, requires_grad=True)

        def forward(x):
            y = inner(forces, x.sin(), weight)
            if more:
                y = y.exp() * x
            return y

        outer(forward, x).square().sum().backward()
        return [x.grad, weight.grad]

    assert_equal(gradients(outer, inner), gradients(plainly, plainly))


def test_gradients_inside_two_forwards():
    """The outer one's go back through the inner one."""

    def gradients(how):
        x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2).requires_grad_()
        weight = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)

        def forward(x):
            y = how(forces, x.sin(), weight)
            return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]

        how(forward, x).square().sum().backward()
        return [x.grad, weight.grad]

    assert_equal(gradients(full), gradients(plainly))
    assert_equal(gradients(selective), gradients(plainly))


CASTS = {
    "order": lambda x: x.to(memory_format=torch.channels_last),
    "order and dtype": lambda x: x.to(torch.float64, memory_format=torch.channels_last),
    "back": lambda x: x.transpose(1, 3).to(torch.float64, memory_format=torch.contiguous_format),
    "after a view": lambda x: x.view(2, 3, 20, 1).to(memory_format=torch.channels_last),
    "before a transpose": lambda x: x.to(memory_format=torch.channels_last).transpose(1, 3),
    "neither": lambda x: x.double(),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("cheap", [F.gelu, lambda x: F.layer_norm(x, (5,))])
def test_selective_of_a_cast_to_another_order_in_memory(cast, cheap):

    def gradients(how):
        torch.manual_seed(0)
        x = torch.randn(2, 3, 4, 5, requires_grad=True)
        shape = CASTS[cast](x).shape
        weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        how(lambda x: (CASTS[cast](cheap(x)) * weight).sin(), x).sum().backward()
        return [x.grad, weight.grad]

    assert_equal(gradients(selective), gradients(plainly))


def test_selective_of_a_weight_in_the_midst_of_memory():
    """Its copy in another order is made again from where the weight lies."""

    def gradients(how):
        flat = torch.arange(100, dtype=torch.float64)
        weight = nn.Parameter(flat[40:].view(1, 3, 4, 5))
        x = torch.ones(1, 3, 4, 5, dtype=torch.float64, requires_grad=True)
        how(lambda x: x * weight.to(memory_format=torch.channels_last), x).sum().backward()
        return [x.grad, weight.grad]

    assert_equal(gradients(selective), gradients(plainly))


def test_selective_of_a_move_to_another_device():
    """What is made again lies on the device that the tensor was moved to."""
    x = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(4, 4, device="meta", requires_grad=True)
    y = selective(lambda x: F.gelu(x).to("meta") @ weight, x)
    assert torch.autograd.grad(y.sum(), weight)[0].is_meta


def test_selective_does_not_leave_out_a_rounding():
    """A cast to a narrow dtype and back is not made again in one."""

    def gradients(how):
        torch.manual_seed(0)
        linear = nn.Linear(4, 4)
        x = torch.randn(3, 4, requires_grad=True)
        how(lambda x: linear(F.gelu(x).bfloat16().float()), x).square().sum().backward()
        return [x.grad, linear.weight.grad, linear.bias.grad]

    assert_equal(gradients(selective), gradients(plainly))


def test_checkpoint_sequential():
    """A second oracle: torch's, of segments of several blocks."""

    def gradients(in_segments):
        blocks = build(GPTConfig(layers=4, width=16, heads=2, seq=8), 0).blocks
        blocks = nn.Sequential(*blocks).double()
        rng = torch.Generator().manual_seed(0)
        x = torch.randn(2, 8, 16, generator=rng, dtype=torch.float64, requires_grad=True)
        in_segments(blocks, x).square().sum().backward()
        return [x.grad, *(p.grad for p in blocks.parameters())]

    def ours(blocks, x):
        return full(blocks[2:].forward, full(blocks[:2].forward, x))

    def theirs(blocks, x):
        return checkpoint_sequential(blocks, 2, x, use_reentrant=False)

    assert_equal(gradients(ours), gradients(theirs))


# ---- the copy --------------------------------------------------------------------


class Mixer(nn.Module):
    """Nothing of the toy GPT's: an RMSNorm, no biases, a gate, a GELU, odd sizes."""

    def __init__(self, width=7, hidden=13):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.gate = nn.Linear(width, hidden, bias=False)
        self.value = nn.Linear(width, hidden, bias=False)
        self.project = nn.Linear(hidden, width, bias=False)

    def forward(self, x, factor, mask=None):
        h = x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * self.scale
        y = self.project(F.gelu(self.gate(h)) * self.value(h)) * factor
        if mask is not None:
            y = y * mask
        return x + y


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 7)
        self.mixers = nn.ModuleList(Mixer() for _ in range(3))
        self.norm = nn.LayerNorm(7, bias=False)
        self.out = nn.Linear(7, 11, bias=False)

    def forward(self, tokens):
        x = self.words(tokens)
        for mixer in self.mixers:
            x = mixer(x, 0.5, mask=(tokens > 0).unsqueeze(-1))
        return self.out(self.norm(x))


def stack_loss(model, tokens, targets):
    logits = model(tokens).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum") / 8 / 6


def check_copy(ckpt, scaled):
    copy = copied("amp_accum_ckpt")
    rng = torch.Generator().manual_seed(1)
    text = torch.randint(0, 11, (3, 8, 7), generator=rng)  # steps, rows, tokens
    torch.manual_seed(0)
    plain = Stack()
    torch.manual_seed(dist.get_rank())  # every rank starts with weights of its own
    model = Stack()
    copy.replicate(model)
    for mixer in model.mixers:
        mixer.forward = partial(getattr(copy, ckpt), mixer.forward)
    scaler = None
    if scaled:
        scaler = copy.LossScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    judge = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    rows = slice(dist.get_rank(), None, dist.get_world_size())
    for tokens in text:
        judge.zero_grad()
        stack_loss(plain, tokens[:, :-1], tokens[:, 1:]).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        judge.step()
        optimizer.zero_grad()
        micro = [(part[:, :-1], part[:, 1:]) for part in tokens[rows].tensor_split(3)]
        copy.accumulate(partial(stack_loss, model), micro, scaler)
        ours = copy.update(model.parameters(), optimizer, 0.05, scaler)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        wanted = {name: p.grad for name, p in plain.named_parameters()}
        assert worst_gap(gradients, wanted)[0] <= 1e-10
        torch.testing.assert_close(ours, norm, rtol=1e-10, atol=0)
    assert worst_gap(model.state_dict(), plain.state_dict())[0] <= 1e-10


@pytest.mark.parametrize("world, cases", [  # ckpt, scaled
    (2, [("full", False), ("selective", True)]),
    (4, [("full", True)]),
])
def test_section_one_alone(world, cases):
    run(each, world, check_copy, cases)


# ---- the loss scaler ---------------------------------------------------------


class OneParameter:
    """A weight, whose gradients are given, with its optimizer and a scaler."""

    def __init__(self, scaler):
        self.weight = nn.Parameter(torch.ones(3))
        self.optimizer = adamw([self.weight], 0.1)
        self.scaler = scaler


def step_by_ours(side):
    side.scaler.unscale([side.weight.grad])
    side.scaler.step(side.optimizer)
    return side.scaler.scale.item()


def step_by_theirs(side):
    side.scaler.scale(torch.zeros(()))  # torch's makes its tensors here
    side.scaler.unscale_(side.optimizer)
    side.scaler.step(side.optimizer)
    side.scaler.update()
    return side.scaler.get_scale()


def scaled_gradient(step, scale):
    gradient = torch.full((3,), (step % 5 - 2) * scale)
    if step in (0, 8, 20):
        gradient[step % 3] = torch.inf
    elif step in (7, 41):
        gradient[step % 3] = torch.nan
    return gradient


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_scaler_walks_as_torch_does(world_of_one):
    """Fifty steps with overflows here and there: scales, skips and updates of its GradScaler."""
    ours = OneParameter(LossScaler("cpu", interval=3))
    theirs = OneParameter(torch.amp.GradScaler("cpu", growth_interval=3))
    scale = 65536.0
    for step in range(50):
        ours.weight.grad = scaled_gradient(step, scale)
        theirs.weight.grad = scaled_gradient(step, scale)
        scale = step_by_ours(ours)
        assert scale == step_by_theirs(theirs), step
        assert torch.equal(ours.weight, theirs.weight), step


def test_shards_may_be_empty_or_missing(world_of_one):
    for gradients in [torch.ones(0), None], [torch.ones(2), torch.ones(0), None]:
        scaler = LossScaler("cpu")
        scaler.unscale(gradients)
        assert scaler.found_inf == 0


def test_a_second_unscale_is_refused(world_of_one):
    """It would forget an overflow that the first has found, or divide the same gradients again."""
    side = OneParameter(LossScaler("cpu"))
    side.weight.grad = torch.full((3,), torch.inf)
    side.scaler.unscale([side.weight.grad])
    with pytest.raises(RuntimeError, match="in one call"):
        side.scaler.unscale([torch.ones(3)])
    side.scaler.step(side.optimizer)
    assert side.weight.tolist() == [1.0] * 3
    side.weight.grad = torch.ones(3)
    step_by_ours(side)
    assert (side.weight < 1.0).all()


def test_an_optimizer_that_would_not_skip_is_refused(world_of_one):
    scaler = LossScaler("cpu")
    weight = nn.Parameter(torch.ones(3))
    scaler.unscale([torch.ones(3)])
    with pytest.raises(ValueError, match="fused"):
        scaler.step(torch.optim.Rprop([weight]))


def test_the_optimizer_is_free_after_an_overflow(world_of_one):
    """A step without the scaler is a step, although the one before was skipped."""
    side = OneParameter(LossScaler("cpu"))
    side.weight.grad = torch.full((3,), torch.inf)
    step_by_ours(side)
    assert side.weight.tolist() == [1.0] * 3
    side.weight.grad = torch.ones(3)
    side.optimizer.step()
    assert (side.weight < 1.0).all()


def inject(module, turns=1):
    """The last rank's gradients overflow in steps 1 and 2 of each of the first `turns` turns.

    A turn is 5 steps. With --impl both the implementations take turns: 2 is the first of each.
    """
    calls = itertools.count()
    honest = module.loss_sum

    def broken(logits, y):
        turn, step = divmod(next(calls), 5)
        last = dist.get_rank() == dist.get_world_size() - 1
        if turn < turns and step in (1, 2) and last:
            logits.register_hook(lambda grad: grad * torch.inf)
        return honest(logits, y)

    module.loss_sum = broken


FP16 = (*SMALL, "--steps", "12", "--amp", "fp16", "--lr")


def test_scales_of_a_run():
    """Fifty steps with overflows, and a scale that grows every second step: ours as torch's."""
    flags = (*SMALL, "--steps", "50", "--amp", "fp16", "--growth", "2", "--impl", "both")
    report = script("amp_accum_ckpt", 1, *flags, "--no-check", plant=partial(inject, turns=2))
    ours = report["scale scratch"]
    assert ours == report["scale torch"] and len(ours) == 50
    assert ours[:5] == [65536, 32768, 16384, 16384, 32768] and max(ours) > 65536
    assert any(after < before for before, after in itertools.pairwise(ours[5:]))


@pytest.mark.parametrize("impl", ["scratch", "torch"])
def test_a_resumed_run_has_the_scale(tmp_path, impl):
    """As one that was never interrupted, the number of updates included.

    It grows after three good steps: one is before the interruption, two are after.
    """
    flags = (*SMALL, "--steps", "8", "--amp", "fp16", "--growth", "3", "--no-check", "--impl", impl)
    save = ("--save", str(tmp_path), "--save-every", "4")
    whole = script("amp_accum_ckpt", 2, *flags, *save, plant=inject)
    rest = script("amp_accum_ckpt", 2, *flags, "--resume", str(tmp_path / "4"))
    scales = rest[f"scale {impl}"]
    assert scales == whole[f"scale {impl}"][4:] and scales[0] < scales[1]
    assert rest["loss"] == whole["loss"][4:]


def overflow_on_rank_1(logits, y):
    loss = loss_sum(logits, y)
    if dist.get_rank() == 1:
        loss = loss * torch.inf
    return loss


def check_skip():
    """An overflow on rank 1 alone: both skip, the scale halves, nothing moves; then all go on."""
    torch.set_default_dtype(torch.float32)
    model = parallelize(build(GPTConfig(layers=1, width=16, heads=2, seq=8), 0), full)
    optimizer = adamw(model.parameters(), 1e-2)
    scaler = LossScaler("cpu")
    autocast = partial(torch.autocast, "cpu", torch.float16)
    rng = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randint(256, (2, 8), generator=rng)
    micro = [(x[:1], x[:1]), (x[1:], x[1:])]
    scales = []
    states = []  # after each step
    for step in range(3):
        amp_accum_ckpt.loss_sum = loss_sum
        if step == 1:
            amp_accum_ckpt.loss_sum = overflow_on_rank_1
        train_step(model, optimizer, scaler, micro, 32, 1.0, autocast)
        scales.append(scaler.scale.item())
        state = [*model.parameters()]
        for tensors in optimizer.state.values():
            state += tensors.values()
        states.append(torch.cat([t.detach().flatten() for t in state]))
    assert scales == [65536, 32768, 32768]
    assert torch.equal(states[0], states[1]) and not torch.equal(states[1], states[2])
    first = states[2].clone()
    dist.broadcast(first, 0)
    assert torch.equal(states[2], first)


def test_skip():
    run(check_skip, 2)


# ---- planted bugs: each must fail the check --------------------------------------


def loss_of_the_micro_batch(module):
    """Divided by the micro-batch's own valid targets instead of the global batch's."""
    step = module.train_step

    def broken(model, optimizer, scaler, micro, valid, *rest):
        module.loss_sum = lambda logits, y: loss_sum(logits, y) * valid / (y >= 0).sum()
        return step(model, optimizer, scaler, micro, valid, *rest)

    module.train_step = broken


def last_not_synchronised(module):
    """The last micro-batch's gradient is added after the all-reduce."""
    accumulate = module.accumulate
    clip_gradients = module.clip_gradients
    late = []

    def all_but_the_last(part_of_loss, microbatches, scaler):
        late.append(lambda: part_of_loss(*microbatches[-1]).backward())
        return accumulate(part_of_loss, microbatches[:-1], scaler)

    def clip(parameters, largest):
        late.pop()()
        return clip_gradients(parameters, largest)

    module.accumulate = all_but_the_last
    module.clip_gradients = clip


def stale_micro_batch(module):
    """Gradients are zeroed between micro-batches."""
    step = module.train_step

    def broken(model, optimizer, *rest):
        def zero(logits, y):
            optimizer.zero_grad(set_to_none=False)
            return loss_sum(logits, y)

        module.loss_sum = zero
        return step(model, optimizer, *rest)

    module.train_step = broken


@pytest.mark.parametrize("plant", [
    loss_of_the_micro_batch, last_not_synchronised, stale_micro_batch])
def test_planted(plant):
    proves("amp_accum_ckpt", 2, "--accum", "2", plant=plant)


def not_unscaled(module):
    """Clipped while still scaled, and unscaled after: AdamW's eps swallows what remains."""
    clip_gradients = module.clip_gradients
    scale = []

    def unscale(self, gradients, group):
        self.found_inf = torch.zeros(())
        scale.append(self.scale)

    def late(parameters, clip):
        norm = clip_gradients(parameters, clip)
        torch._foreach_mul_([p.grad for p in parameters], 1 / scale.pop())
        return norm

    module.LossScaler.unscale = unscale
    module.clip_gradients = late


def not_shared(module):
    """Rank 1 overflows, and keeps it to itself."""
    inject(module)
    all_reduce = dist.all_reduce

    def broken(tensor, op=dist.ReduceOp.SUM, **options):
        if op != dist.ReduceOp.MAX:
            all_reduce(tensor, op=op, **options)

    dist.all_reduce = broken


def test_planted_in_unscale():
    """The check fails: the run goes to its end and has a report."""
    report = script("amp_accum_ckpt", 2, *FP16, "1e-2", plant=not_unscaled, code=1)
    assert report["check"]["passed"] is False


def test_planted_in_what_is_shared():
    """Rank 0 takes a step with what has overflowed: the run ends where its loss is not finite."""
    said = script("amp_accum_ckpt", 2, *FP16, "1e-2", plant=not_shared, code=1)
    assert "error: step 2: loss nan" in said and "not finite" in said, said


def test_injected_is_skipped():
    """What not_shared breaks: the same overflows, shared, cost two steps of twelve and pass."""
    report = script("amp_accum_ckpt", 2, *FP16, "1e-4", plant=inject)
    assert report["scale scratch"] == [65536, 32768, *[16384] * 10]


# ---- run -----------------------------------------------------------------------


def eager_backend(module):
    """The compiler's front half only: no C++ is built."""
    module.torch.compile = functools.partial(torch.compile, backend="eager")


def test_compile():
    report = script("amp_accum_ckpt", 1, *SMALL, "--compile", "--ckpt", "full", "--peak", "0.1",
                    plant=eager_backend)
    [row] = report["plans"]
    flops = 6 * report["parameters"]["total"] + 12 * L * C * T
    assert Row(*row).mfu == pytest.approx(flops * report["tokens_per_second"] / 0.1e12)


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", sys.argv)  # outcome() changes it
    code, _, said = outcome("amp_accum_ckpt", ["--compile"])
    assert code == 2 and is_clear("amp_accum_ckpt", said, "--compile needs c++"), (code, said)


def test_both_times_both():
    report = script("amp_accum_ckpt", 2, "--steps", "4", "--layers", "1", "--width", "32",
                    "--impl", "both")
    assert report["speedup"] > 0
