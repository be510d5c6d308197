import functools
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint_sequential

import amp_accum_ckpt
from amp_accum_ckpt import LossScaler, full, full_at_work, parallelize, selective, selective_at_work, train_step
from common import GPTConfig, adamw, build, loss_sum
from conftest import SMALL, dry_run_agrees, proves, run, script, textbook


@pytest.mark.parametrize("world, flags", [
    (1, ["--accum", "3", "--ckpt", "full"]), (1, ["--accum", "4", "--ckpt", "selective"]), (1, ["--accum", "4"]),
    (2, ["--accum", "1", "--ckpt", "selective"]), (2, ["--accum", "3", "--ckpt", "full", "--batch", "7"]),
    (2, ["--accum", "4", "--vocab", "257"]), (4, ["--accum", "2", "--ckpt", "full", "--clip", "0"]),
    (1, ["--accum", "3", "--ckpt", "full", "--impl", "torch"]),
    (2, ["--accum", "4", "--ckpt", "selective", "--impl", "torch"])])
def test_equals_one_process(world, flags):
    proves("amp_accum_ckpt", world, *flags)


@pytest.mark.parametrize("flags", [["--accum", "2", "--ckpt", "full"], ["--ckpt", "selective", "--amp", "bf16"],
                                   ["--accum", "3", "--ckpt", "full", "--amp", "fp16"]])
def test_cost(flags):
    real = dry_run_agrees("amp_accum_ckpt", 2, "--batch", "7", *flags)
    textbook(real)
    fp16, size = "fp16" in flags, 4 * real["parameters"]["total"]
    assert real["ranks"][0]["collectives"]["all_reduce"]["payload"] == size + 4 * fp16
    assert real["ranks"][0]["memory"]["parameters"] == size


def test_sweep():
    """Every combination keeps the bytes of the docstring's table, and does again the FLOPs that it says."""
    report = script("amp_accum_ckpt", 1, *SMALL, "--sweep", "--accum", "4")
    assert len(report["plans"]) == 12
    L, C, H, T = 2, 32, 4, 16
    for amp, accum, ckpt, kept, expected, _, again, again_expected, *_, gap in report["plans"]:
        t, low = 8 // accum * T, amp != "off"
        block = t * ((40 if low else 64) * C + 4 * H + 16) + 24 * C * C * low
        if ckpt == "selective":
            block = t * ((24 if low else 40) * C + 4 * H + 16)
        assert again == again_expected == (L * 8 * T * (16 * C * C + 4 * T * C) if ckpt == "full" else 0)
        assert kept == expected
        if ckpt == "full":
            assert kept == L * (4 * C * t + 5056) + max(block - 4 * C * t, kept_outside(t, low)) + 8 * 8 * T + 8 * T
        else:
            assert kept == L * block + kept_outside(t, low) + 8 * 8 * T + 8 * T
        assert gap < (2e-2 if low else 1e-5)


def kept_outside(t, low, C=32, V=256, T=16):
    """Final norm, head and loss: the norm's input and statistics, its output, log-probabilities, targets."""
    return t * (4 * C + 8 + 4 * V + (2 if low else 4) * C) + 2 * V * C * low + 8 * 8 * T + 4


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_low_precision_learns_as_well(amp):
    report = script("amp_accum_ckpt", 1, *SMALL[:-1], "50", "--amp", amp)
    assert report["check"]["passed"] and report["check"]["loss"] < 2e-2
    assert report["loss"][-1] < 0.8 * report["loss"][0]


# ---- checkpointing of any module ------------------------------------------------


class Awkward(nn.Module):
    """Two inputs of odd shapes, dropout, LayerNorm, GELU, a branch, and two outputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(7, 5), nn.Linear(5, 7), nn.LayerNorm(7)

    def forward(self, x, scale):
        h = nn.functional.dropout(nn.functional.gelu(self.a(self.norm(x))), 0.3) * scale
        return self.b(h), h.square().mean()


def awkward_gradients(how, twice=False):
    torch.manual_seed(1)
    module, x, scale = Awkward().double(), torch.randn(3, 7).double().requires_grad_(), torch.tensor(2.0).double()
    y, extra = functools.partial(how, module)(x, scale) if how else module(x, scale)
    z = torch.rand(4)  # other random numbers in between
    for i in range(1 + twice):
        (y.square().sum() + extra).backward(retain_graph=twice and i == 0)
    return [x.grad, *(p.grad for p in module.parameters()), z, torch.rand(4)]


@pytest.mark.parametrize("how", [full, selective, full_at_work, selective_at_work])
@pytest.mark.parametrize("twice", [False, True])
def test_any_module_with_dropout(how, twice):
    """The same gradients, and the same random numbers afterwards."""
    if twice and how not in (full, selective):
        return
    for ours, plain in zip(awkward_gradients(how, twice), awkward_gradients(None, twice)):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}])
def test_selective_layer_norms(options):
    """Of an input in any order in memory."""
    def gradients(how):
        torch.manual_seed(0)
        module = nn.Sequential(nn.LayerNorm(6, **options), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
        x = torch.randn(3, 4, 6).transpose(0, 1).requires_grad_()
        (how(module, x) if how else module(x)).square().sum().backward()
        return [x.grad, *(p.grad for p in module.parameters())]
    torch.testing.assert_close(gradients(selective), gradients(None), rtol=1e-12, atol=1e-12)


def test_random_state_not_restored(monkeypatch):
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    ours, plain = awkward_gradients(full), awkward_gradients(None)
    assert (ours[0] - plain[0]).abs().max() > 1e-2


def test_forward_that_changes():
    calls = []

    def forward(x):
        calls.append(0)
        return x.exp().sin() if len(calls) == 1 else x.exp()
    y = full(forward, torch.ones(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="when it ran again"):
        y.sum().backward()


def test_around_other_hooks():
    """Inside save_on_cpu or a ledger, these see what is kept; under no_grad nothing is."""
    seen = []
    block = build(GPTConfig(layers=1, width=16, heads=2, seq=8), 0).blocks[0]
    x = torch.randn(2, 8, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        y = full(block.forward, x)
    assert seen == [(2, 8, 16), (5056,)]
    y.sum().backward()
    with torch.no_grad():
        assert torch.equal(full(block.forward, x), y)


def test_checkpoint_sequential():
    """A second oracle: torch's, of segments of several blocks."""
    gradients = []
    for ours in True, False:
        blocks = nn.Sequential(*build(GPTConfig(layers=4, width=16, heads=2, seq=8), 0).blocks).double()
        x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
        if ours:
            y = full(blocks[2:].forward, full(blocks[:2].forward, x))
        else:
            y = checkpoint_sequential(blocks, 2, x, use_reentrant=False)
        y.square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in blocks.parameters())])
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# ---- the loss scaler ---------------------------------------------------------


def test_scaler_walks_as_torch_does():
    """Fifty steps with overflows here and there: scales, skips and updates of torch.amp.GradScaler."""
    sides = []
    for ours in True, False:
        w = nn.Parameter(torch.ones(3))
        optimizer = adamw([w], 0.1)
        scaler = LossScaler("cpu", interval=3) if ours else torch.amp.GradScaler("cpu", growth_interval=3)
        sides.append((ours, w, optimizer, scaler))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for step in range(50):
        for ours, w, optimizer, scaler in sides:
            w.grad = torch.full((3,), (step % 5 - 2) * (scaler.scale.item() if ours else scaler.get_scale()))
            if step in (0, 7, 8, 20, 41):
                w.grad[step % 3] = (torch.inf, torch.nan)[step % 2]
            if ours:
                scaler.unscale([w.grad])
                scaler.step(optimizer)
            else:
                scaler.scale(torch.zeros(()))  # torch's makes its tensors here
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
        assert sides[0][3].scale.item() == sides[1][3].get_scale(), step
        assert torch.equal(sides[0][1], sides[1][1]), step
    for gradients in [torch.ones(0), None], [torch.ones(2), torch.ones(0), None]:  # shards may be empty
        sides[0][3].unscale(gradients)
        assert sides[0][3].found_inf == 0
    with pytest.raises(AssertionError, match="fused"):
        sides[0][3].step(torch.optim.Rprop([w]))
    dist.destroy_process_group()


def inject(module, turns=1):
    """The last rank's gradients overflow in steps 1 and 2, of each implementation where two take turns of 5 steps."""
    calls, honest = itertools.count(), module.loss_sum

    def broken(logits, y):
        turn, step = divmod(next(calls), 5)
        if turn < turns and step in (1, 2) and dist.get_rank() == dist.get_world_size() - 1:
            logits.register_hook(lambda grad: grad * torch.inf)
        return honest(logits, y)
    module.loss_sum = broken


def test_scales_of_a_run():
    """Fifty steps with injected overflows, and those of a scale that grows every second step: ours as torch's."""
    report = script("amp_accum_ckpt", 1, *SMALL[:-1], "50", "--amp", "fp16", "--growth", "2", "--impl", "both",
                    "--no-check", plant=functools.partial(inject, turns=2))
    ours, theirs = report["scale scratch"], report["scale torch"]
    assert ours == theirs and len(ours) == 50
    assert ours[:5] == [65536, 32768, 16384, 16384, 32768] and max(ours) > 65536
    assert any(b < a for a, b in itertools.pairwise(ours[5:]))


def check_skip():
    """An overflow on rank 1 alone: both skip, the scale halves, weights and optimizer states stay; then all go on."""
    torch.set_default_dtype(torch.float32)
    model = parallelize(build(GPTConfig(layers=1, width=16, heads=2, seq=8), 0), full)
    optimizer, scaler = adamw(model.parameters(), 1e-2), LossScaler("cpu")
    autocast = functools.partial(torch.autocast, "cpu", torch.float16)
    x = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
    before = []
    for step in range(3):
        if step == 1 and dist.get_rank() == 1:
            amp_accum_ckpt.loss_sum = lambda logits, y: loss_sum(logits, y) * torch.inf
        train_step(model, optimizer, scaler, [(x[:1], x[:1]), (x[1:], x[1:])], 32, 1.0, autocast)
        amp_accum_ckpt.loss_sum = loss_sum
        states = [t for state in optimizer.state.values() for t in state.values()]
        before.append([t.detach().clone() for t in [*model.parameters(), *states]])
        assert scaler.scale == 65536 / (1 if step == 0 else 2)
    assert all(map(torch.equal, before[0], before[1])) and not all(map(torch.equal, before[1], before[2]))
    mine = torch.cat([t.flatten() for t in before[2]])
    other = mine.clone()
    dist.broadcast(other, 0)
    assert torch.equal(mine, other)


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
    step, clip = module.train_step, nn.utils.clip_grad_norm_

    def broken(model, optimizer, scaler, micro, valid, *rest):
        def late(*args):
            (x, y), nn.utils.clip_grad_norm_ = micro[-1], clip
            (loss_sum(model(x), y) / valid).backward()
            return clip(*args)
        nn.utils.clip_grad_norm_ = late
        return step(model, optimizer, scaler, micro[:-1], valid, *rest)
    module.train_step = broken


def stale_micro_batch(module):
    """Gradients are zeroed between micro-batches."""
    step = module.train_step

    def broken(model, optimizer, scaler, micro, valid, *rest):
        def zero(logits, y):
            optimizer.zero_grad(set_to_none=False)
            return loss_sum(logits, y)
        module.loss_sum = zero
        return step(model, optimizer, scaler, micro, valid, *rest)
    module.train_step = broken


@pytest.mark.parametrize("plant", [loss_of_the_micro_batch, last_not_synchronised, stale_micro_batch])
def test_planted(plant):
    proves("amp_accum_ckpt", 2, "--accum", "2", plant=plant)


def not_unscaled(module):
    """Clipped while still scaled, and unscaled after: AdamW's eps swallows what remains."""
    def unscale(self, gradients, group=None):
        self.found_inf = torch.zeros(())
        clip = module.clip_gradients

        def late(*args):
            module.clip_gradients, norm = clip, clip(*args)
            torch._foreach_mul_(gradients, 1 / self.scale)
            return norm
        module.clip_gradients = late
    module.LossScaler.unscale = unscale


def not_shared(module):
    """Rank 1 overflows once, and keeps it to itself."""
    inject(module)
    reduce = dist.all_reduce
    dist.all_reduce = lambda t, op=dist.ReduceOp.SUM, **k: None if op == dist.ReduceOp.MAX else reduce(t, op=op, **k)


@pytest.mark.parametrize("plant", [not_unscaled, not_shared])
def test_planted_in_the_scaler(plant):
    flags = (*SMALL[:-1], "12", "--amp", "fp16", "--lr", "1e-2")
    script("amp_accum_ckpt", 2, *flags, plant=plant, code=1)


def test_injected_is_skipped():
    """What not_shared breaks: the same overflows, shared, cost two steps of twelve and pass."""
    report = script("amp_accum_ckpt", 2, *SMALL[:-1], "12", "--amp", "fp16", "--lr", "1e-4", plant=inject)
    assert report["check"]["passed"] and report["scale scratch"] == [65536, 32768, *[16384] * 10]


# ---- run -----------------------------------------------------------------------


def eager_backend(module):
    """The compiler's front half only: no C++ is built."""
    module.torch.compile = functools.partial(torch.compile, backend="eager")


def test_compile():
    report = script("amp_accum_ckpt", 1, *SMALL, "--compile", "--ckpt", "full", "--peak", "0.1", plant=eager_backend)
    assert report["check"]["passed"]
    mfu, tokens = report["plans"][0][-2], 6 * report["parameters"]["total"] + 12 * 2 * 32 * 16
    assert mfu == pytest.approx(tokens * report["tokens_per_second"] / 0.1e12)


def no_compiler(module):
    module.shutil.which = lambda name: None


@pytest.mark.parametrize("world, flags, plant", [
    (2, ["--batch", "5", "--accum", "3"], None), (1, ["--amp", "bf16", "--dtype", "fp64"], None),
    (1, ["--dtype", "bf16"], None), (1, ["--impl", "both", "--dry-run", "2"], None), (1, ["--accum", "0"], None),
    (1, ["--impl", "torch", "--sweep"], None), (1, ["--compile"], no_compiler),
    (1, ["--compile", "--dry-run", "2"], None)])
def test_bad_usage(world, flags, plant):
    script("amp_accum_ckpt", world, *flags, plant=plant, code=2)


def test_both_times_both():
    report = script("amp_accum_ckpt", 2, "--steps", "4", "--layers", "1", "--width", "32", "--impl", "both")
    assert report["speedup"] == report["torch_ms_per_step"] / report["ms_per_step"] > 0
