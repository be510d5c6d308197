"""amp_accum_ckpt.py: what is kept, what is made again, and the loss scaler."""
import copy
import gc
import itertools
import re
import shutil
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import amp_accum_ckpt
from amp_accum_ckpt import LossScaler, full, selective
from common import FORMS, GPTConfig, adamw, build, loss_sum
from conftest import (
    SMALL, copied, dry_run_agrees, each, is_clear, outcome, proves, run, script, textbook)
from harness.ledger import Ledger
from others import Layer, Llama, into_flat, llama_loss, token_rows
from tensor_parallel import WholeSequence

LLAMA = ("--model", "llama-toy")
CONFIGS = {
    "gpt2": GPTConfig(1, 32, 4, 256, 16, FORMS["gpt2"], 4, 128),
    "llama": GPTConfig(1, 32, 4, 256, 16, FORMS["llama"], 2, 48),
}


@pytest.mark.parametrize("world, flags", [
    (1, [*LLAMA, "--accum", "4", "--ckpt", "selective"]),
    (2, [*LLAMA, "--accum", "2", "--ckpt", "full", "--batch", "7", "--eval-every", "1"]),
    (4, ["--accum", "2", "--ckpt", "full", "--clip", "0"]),
    (2, [*LLAMA, "--accum", "3", "--ckpt", "selective", "--impl", "both"]),
    (2, ["--accum", "2", "--ckpt", "full", "--train", r"blocks\.0\.attn\.(q|out)"]),
    (2, ["--accum", "3", "--ckpt", "selective", "--train", r"tok|bias|blocks\.1\.mlp\.down"]),
])
def test_equals_one_process(world, flags):
    """Bytes sent and kept are the textbook's, too."""
    report = proves("amp_accum_ckpt", world, *flags)
    if "--train" not in flags:
        textbook(report)


@pytest.mark.parametrize("flags", [
    ["--accum", "3", "--ckpt", "full", "--amp", "fp16"],
    [*LLAMA, "--ckpt", "selective", "--amp", "bf16"],
])
def test_dry_run(flags):
    real = dry_run_agrees("amp_accum_ckpt", 2, "--batch", "7", *flags)
    assert real["ranks"][0]["collectives"]["all_reduce"]["calls"] == 1


def test_sweep():
    """Every plan in one run, with about the losses of the first; what is kept falls."""
    plans = script("amp_accum_ckpt", 1, *SMALL, "--sweep", "--no-check")["plans"]
    assert len(plans) == 9
    for name, row in plans.items():
        assert row["gap"] < (1e-5 if name.startswith("off") else 2e-2), name
    for amp in "off", "bf16", "fp16":
        kept = [plans[f"{amp} {ckpt}"]["kept"] for ckpt in ("full", "selective", "none")]
        assert kept == sorted(kept) and kept[0] < kept[2]


# ---- what a block keeps -----------------------------------------------------------


def plainly(forward, *inputs, **keywords):
    return forward(*inputs, **keywords)


def gradients_of(module):
    return [p.grad for p in module.parameters()]


def play(form, how, autocast=False):
    """-> bytes kept between forward and backward, the most in both; matmuls; gradients"""
    cfg = CONFIGS[form]
    block = build(cfg, 0).blocks[0]
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, cfg.seq, cfg.width, generator=rng).requires_grad_()
    counter = FlopCounterMode(display=False)
    with counter, Ledger(held=lambda: {"parameters": [*block.parameters()]}) as ledger:
        with torch.autocast("cpu", enabled=autocast):
            y = how(block.forward, x)
        kept = ledger.saved_bytes
        y.backward(torch.ones_like(y))
    assert ledger.saved_bytes == 0  # nothing stays alive after backward, though y does
    flops = counter.get_flop_counts()["Global"]
    matmuls = sum(count for op, count in flops.items() if "attention" not in str(op))
    return kept, ledger.activations, matmuls, [x.grad, *gradients_of(block)]


def weights(form):
    """-> in a block's matrices"""
    block = build(CONFIGS[form], 0).blocks[0]
    return sum(p.numel() for p in block.parameters() if p.dim() == 2)


def documented(form, autocast, chosen):
    """The docstring's formula -> bytes that a block keeps of 2 x 16 tokens."""
    cfg = CONFIGS[form]
    sizes = dict(
        C=cfg.width, H=cfg.heads, F=cfg.hidden, K=cfg.kv_heads, D=cfg.width // cfg.heads,
        T=cfg.seq, t=2 * cfg.seq, W=weights(form),
    )
    sizes["s"] = 4 * cfg.heads
    sizes["s"] += 16 if form == "gpt2" else 8
    rows = [line for line in amp_accum_ckpt.__doc__.splitlines() if "t (" in line]
    columns = re.split("  +", rows[2 * (form == "llama") + autocast])
    product = re.sub(r"(?<=\w) (?=[\w(])", " * ", columns[-1 if chosen else -2])
    return eval(product, sizes)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("form", CONFIGS)
def test_a_block(form, autocast):
    """Gradients are equal to the bit, matmuls and bytes as the docstring says."""
    cfg = CONFIGS[form]
    tokens = 2 * cfg.seq
    kept_by_plain, _, flops, plain = play(form, plainly, autocast)
    assert kept_by_plain == documented(form, autocast, chosen=False)
    kept, most, done, ours = play(form, full, autocast)
    assert kept == 4 * cfg.width * tokens
    assert most == kept_by_plain
    assert done == flops + 2 * tokens * (weights(form) - cfg.width * cfg.hidden)  # all but down
    kept, most, done, others = play(form, selective, autocast)
    assert kept == most == documented(form, autocast, chosen=True)
    assert done == flops
    for a, b, c in zip(ours, others, plain):
        assert torch.equal(a, c)
        assert torch.equal(b, c)


# ---- checkpointing of any module ---------------------------------------------------


def layer_of_others(how, hooks=None):
    """-> gradients, in two backwards as in zero bubble; random numbers that were drawn between
    forward and backward, and after"""
    torch.manual_seed(1)
    module = Layer(4, 2, dropout=0.3).double()
    x = torch.randn(2, 5, 12).double().requires_grad_()
    with hooks or torch.enable_grad():
        loss = how(module, x, positions=torch.arange(3, 8)).square().sum()
    between = torch.rand(4)
    of_input, = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    return [of_input, *gradients_of(module), between, torch.rand(4)]


def assert_equal(ours, plain):
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", [full, selective])
def test_a_layer_with_dropout(how):
    """The same gradients and random numbers, in save_on_cpu and in another checkpoint, too."""
    plain = layer_of_others(plainly)
    assert_equal(layer_of_others(how), plain)
    assert_equal(layer_of_others(how, torch.autograd.graph.save_on_cpu()), plain)
    copies = lambda x: torch.empty_like(x).copy_(x), lambda copy: copy  # which have a version of 1
    assert_equal(layer_of_others(how, torch.autograd.graph.saved_tensors_hooks(*copies)), plain)

    def nested(forward, x, **positions):
        return full(partial(how, forward), x, **positions)

    assert_equal(layer_of_others(nested), plain)


@pytest.mark.parametrize("how", [full, selective])
def test_what_is_kept_has_changed(how):
    """Autograd refuses it, too; but it does not look at what hooks keep."""
    x = torch.ones(3, requires_grad=True)
    h = x * 2
    y = how(lambda h: h * h, h)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(AssertionError, match="changed in place"):
        y.sum().backward()


def test_a_recipe_of_what_has_changed():
    """It is not followed."""

    def gradient(how):
        x = torch.linspace(-1, 1, 6, requires_grad=True)
        y = how(lambda x: F.gelu(x).mul_(2).square(), x)
        return torch.autograd.grad(y.sum(), x)

    assert_equal(gradient(selective), gradient(plainly))


def test_a_recipe_whose_input_has_changed():
    """It is not followed: h has changed before a matmul wants the result."""

    def gradient(how):
        weight = torch.linspace(-1, 1, 9).view(3, 3).requires_grad_()

        def forward(x):
            h = x @ x.t()
            cheap = h.clone()
            h.add_(1)
            return cheap @ weight + h

        x = torch.linspace(-1, 2, 9).view(3, 3).requires_grad_()
        y = how(forward, x)
        y.square().sum().backward()
        return [weight.grad]

    assert_equal(gradient(selective), gradient(plainly))


def test_forward_that_changes():
    W = torch.ones(4, 2, requires_grad=True)
    turns = iter([lambda x: x @ W, torch.sin])
    y = full(lambda x: next(turns)(x), torch.ones(4, 4, requires_grad=True))
    with pytest.raises(AssertionError, match="others when it ran again"):
        y.sum().backward()
    turns = iter([lambda x: x.exp() * x.sin(), torch.exp])
    y = full(lambda x: next(turns)(x), torch.ones(4, requires_grad=True))
    with pytest.raises(AssertionError, match="fewer when it ran again"):
        y.sum().backward()


def test_a_forward_that_catches_exceptions():
    """It does not catch the end of the second run."""

    def forward(x):
        try:
            h = x.exp() * x.sin()
        except Exception:
            h = x
        return h * h

    x = torch.linspace(0, 1, 4, requires_grad=True)
    ours, = torch.autograd.grad(full(forward, x).sum(), x)
    plain, = torch.autograd.grad(forward(x).sum(), x)
    assert torch.equal(ours, plain)


def tensors():
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("form", CONFIGS)
@pytest.mark.parametrize("how", [full, selective])
@pytest.mark.parametrize("around", [plainly, full, selective])
def test_dropped_forwards_leave_nothing(how, around, form, no_collector):
    """No backward follows: evaluation with gradients on, or an exception. Nothing has to look for
    circles, though attention, norms and softmax save their results."""
    forwards = [
        build(CONFIGS[form], 0).blocks[0],
        lambda x: x.softmax(-1).exp(),
        lambda x: x.softmax(-1) * x.softmax(-1).detach().exp(),
    ]
    x = torch.ones(2, 16, 32, requires_grad=True)
    for autocast in False, True:
        for forward in forwards:
            for turn in range(5):
                with torch.autocast("cpu", enabled=autocast):
                    around(partial(how, forward), x)
                if turn == 0:  # the first may leave what torch makes once
                    before = tensors()
            assert tensors() == before


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", [full, selective])
def test_with_gradients_off(how, off):
    """Forward runs as it is, and hooks around see nothing."""
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda x: x), off():
        x = torch.linspace(0, 1, 4) * 2
        assert torch.equal(how(lambda x, factor: x.exp() * factor, x, factor=3), x.exp() * 3)
    assert not packed


@pytest.mark.parametrize("how", [full, selective])
def test_inside_a_compiled_model(how):
    """Right, though nobody compiles what is checkpointed."""

    def compiled(forward, x, positions):
        model = torch.compile(lambda x: how(forward, x, positions=positions), backend="aot_eager")
        return model(x)

    assert_equal(layer_of_others(compiled), layer_of_others(plainly))


def test_compiled_forward_stays_compiled():
    """Both runs of it: torch.compiler.disable would take torch.compile's wrapper off."""
    runs = []

    def backend(graph, inputs):
        return lambda *inputs: runs.append(1) or graph(*inputs)

    forward = torch.compile(lambda x: x.sin().exp(), backend=backend)
    full(forward, torch.ones(2, requires_grad=True)).sum().backward()
    assert len(runs) == 2


def test_half_compiled_forward():
    """torch.compile has traced our hooks behind what stays eager, with _version as a constant."""
    eager = torch.compiler.disable(nn.Linear(2, 2), recursive=False)
    forward = torch.compile(lambda x: eager(x).sin(), backend="aot_eager")
    full(forward, torch.ones(2, requires_grad=True)).sum().backward()


def check_collectives(how, calls):
    """With g of tensor_parallel.py."""
    module = Layer(4, 2, 0.0)
    tp = WholeSequence()

    def forward(x):
        x = F.gelu(tp.leave(module(x)))
        return F.gelu(tp.leave(module(x))).sin()

    def gradients(how):
        x = torch.ones(2, 3, 12).cumsum(0).requires_grad_()
        y = how(forward, x)
        return torch.autograd.grad(y.sum(), [x, *module.parameters()])

    plain = gradients(plainly)
    with Ledger(nn.Module(), torch.optim.SGD(module.parameters())) as ledger:
        ours = gradients(how)
    assert ledger.collectives["all_reduce"]["calls"] == calls
    assert_equal(ours, plain)


def test_collectives_inside():
    """None is repeated by selective; by full all but what comes behind the last kept tensor."""
    run(each, 2, check_collectives, [(selective, 2), (full, 4)])


def check_copy(ckpt, scaled):
    """Three steps of a Llama of others, beside torch's own on one rank."""
    section = copied("amp_accum_ckpt")
    torch.manual_seed(dist.get_rank())  # every rank starts with weights of its own
    model = Llama()
    section.replicate(model)
    plain = copy.deepcopy(model)
    for layer in model.layers:
        layer.forward = partial(getattr(section, ckpt), layer.forward)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    judge = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    scaler = section.LossScaler("cpu") if scaled else None
    rng = torch.Generator().manual_seed(1)
    rows = slice(dist.get_rank(), None, dist.get_world_size())
    for _ in range(3):
        x, y = token_rows(rng, 8)
        judge.zero_grad()
        llama_loss(plain, x, y).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        judge.step()
        optimizer.zero_grad()
        micro = zip(x[rows].tensor_split(3), y[rows].tensor_split(3))
        section.accumulate(partial(llama_loss, model), micro, scaler)
        assert_equal(section.update(model.parameters(), optimizer, 0.05, scaler), norm)
        assert_equal(gradients_of(model), gradients_of(plain))
    assert_equal([*model.parameters()], [*plain.parameters()])


def test_section_one_alone():
    run(each, 2, check_copy, [("full", False), ("selective", True)])  # ckpt, scaled


# ---- the loss scaler ---------------------------------------------------------


def test_scaler_walks_as_torch_does():
    """Fifty steps with overflows here and there: scales, skips and updates of its GradScaler."""
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    optimizer, theirs = [adamw([weight], 0.1) for weight in weights]
    scaler = LossScaler("cpu", interval=3)
    judge = torch.amp.GradScaler("cpu", growth_interval=3)
    for step in range(50):
        gradient = torch.full((3,), (step % 5 - 2) * scaler.scale.item())
        if step in (0, 8, 20):
            gradient[step % 3] = torch.inf
        elif step in (7, 41):
            gradient[step % 3] = torch.nan
        weights[0].grad = gradient / scaler.scale
        scaler.step(optimizer, weights[0].grad.norm())
        weights[1].grad = gradient
        judge.scale(torch.zeros(()))  # it makes its tensors here
        judge.step(theirs)
        judge.update()
        assert scaler.scale.item() == judge.get_scale(), step
        assert torch.equal(*weights), step
    weights[0].grad = torch.ones(3)
    optimizer.step()  # without the scaler: it does not skip
    assert not torch.equal(*weights)
    with pytest.raises(AssertionError, match="fused"):  # it would not skip
        scaler.step(torch.optim.AdamW(weights), torch.tensor(1.0))


def test_scale_comes_back():
    """From the least scale and the greatest; more good steps than the interval double it, too."""
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = adamw([weight], 0.1)
    good, bad = torch.tensor([1.0, torch.nan])
    scaler = LossScaler("cpu", good_steps=5, interval=1)
    for _ in range(300):
        scaler.step(optimizer, bad)
    assert scaler.scale == 1
    scaler.step(optimizer, good)
    assert scaler.scale == 2
    for _ in range(300):
        scaler.step(optimizer, good)
    assert scaler.scale == 2.0 ** 100
    scaler.step(optimizer, bad)
    assert scaler.scale == 2.0 ** 99
    scaler = LossScaler("cpu", good_steps=5, interval=3)
    scaler.step(optimizer, good)
    assert scaler.scale == 2 * 65536 and scaler.good_steps == 0


def three_good_steps(module):
    """They double the scale."""
    module.LossScaler.__init__.__defaults__ = (65536.0, 0, 3)
    module.torch.amp.GradScaler = partial(torch.amp.GradScaler, growth_interval=3)


def inject(module):
    """The last rank's gradients overflow in steps 1 and 2."""
    three_good_steps(module)
    calls = itertools.count()
    honest = module.loss_sum

    def broken(logits, y):
        if next(calls) in (1, 2) and dist.get_rank() == dist.get_world_size() - 1:
            logits.register_hook(lambda grad: grad * torch.inf)
        return honest(logits, y)

    module.loss_sum = broken


FP16 = (*SMALL, "--amp", "fp16", "--steps", "8", "--lr", "1e-4")


@pytest.mark.parametrize("impl", ["scratch", "torch"])
def test_a_resumed_run_has_the_scale(tmp_path, impl):
    """An overflow on one rank costs all of them the step. A resumed run knows scale, good steps and
    updates."""
    flags = (*FP16, "--impl", impl)
    save = ("--save", str(tmp_path), "--save-every", "4")
    whole = script("amp_accum_ckpt", 2, *flags, *save, plant=inject)
    assert whole["check"]["passed"]
    assert whole[f"scale {impl}"] == [65536, 32768, *[16384] * 3, *[32768] * 3]
    rest = script("amp_accum_ckpt", 2, *flags, "--no-check", "--resume", str(tmp_path / "4"),
                  plant=three_good_steps)
    assert rest[f"scale {impl}"] == [16384, *[32768] * 3]
    assert rest["loss"] == whole["loss"][4:]


# ---- planted bugs: each must fail the check --------------------------------------


def loss_of_the_micro_batch(module):
    """Divided by the micro-batch's own valid targets instead of the global batch's."""
    step = module.train_step

    def broken(model, optimizer, x, y, valid, *rest, **options):
        module.loss_sum = lambda logits, y: loss_sum(logits, y) * valid / (y >= 0).sum()
        return step(model, optimizer, x, y, valid, *rest, **options)

    module.train_step = broken


def last_micro_batch(module):
    """Gradients are zeroed between micro-batches."""
    accumulate = module.accumulate
    module.accumulate = lambda part, batches, scaler: accumulate(part, [*batches][-1:], scaler)


def not_summed(module):
    """Each rank steps with its own part of the gradient."""
    into_flat("all_reduce", "left out", None)(module)


@pytest.mark.parametrize("plant", [loss_of_the_micro_batch, last_micro_batch, not_summed])
def test_planted(plant):
    proves("amp_accum_ckpt", 2, "--accum", "2", plant=plant)


def test_random_state_not_restored(monkeypatch):
    monkeypatch.setattr(amp_accum_ckpt, "set_random_states", lambda cpu, gpu: None)
    difference = layer_of_others(full)[0] - layer_of_others(plainly)[0]
    assert difference.abs().max() > 1e-2


def test_autocast_not_restored(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    with pytest.raises(RuntimeError, match="same dtype"):
        play("gpt2", full, autocast=True)


# ---- run -----------------------------------------------------------------------


def eager_backend(module):
    """The compiler's front half only: no C++ is built."""
    module.torch.compile = partial(torch.compile, backend="eager")


def test_compile():
    report = script("amp_accum_ckpt", 1, *SMALL, "--compile", "--ckpt", "full",
                    plant=eager_backend)
    assert report["check"]["passed"]


REFUSED = """
    --amp bf16 --dtype fp64             --dtype fp64
    --accum 9                           --batch 8: fewer than 1 ranks x --accum 9
    --impl torch --dry-run 2            --dry-run and --sweep want --impl scratch
    --sweep --save no/such              --sweep trains several models: leave out --save
    --compile                           --compile needs c++
"""


def test_refused(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", sys.argv)  # outcome() changes it
    for line in REFUSED.strip().splitlines():
        flags, words = line.strip().split("   ", 1)
        code, _, said = outcome("amp_accum_ckpt", flags.split())
        assert code == 2 and is_clear("amp_accum_ckpt", said, words.strip()), (code, said)
