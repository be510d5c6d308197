"""amp_accum_ckpt.py: what is kept, what is made again, and the loss scaler."""
import copy
import gc
import itertools
import math
import re
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import amp_accum_ckpt
import zero
from amp_accum_ckpt import FusedLossScaler, full, loss_in_chunks, selective
from common import FORMS, GPTConfig, adamw, build, loss_sum
from conftest import (
    ROOT, SMALL, alone, check_bug_shows, check_differs, check_each, check_equal, check_refused,
    copied, dry_run_agrees, idea, rewritten, run_ranks, run_script, textbook)
from harness.ledger import Ledger
from others import Layer, OfTensors, compare, llama_loss, refuses, token_rows
from tensor_parallel import TensorParallel, ToOutside

LLAMA = ("--model", "llama-toy")
TWO_STEPS = "--steps 2 --no-check"
IDEA = ("--impl", "idea", "--ckpt", "full")
ALL_FULL = ("--impl", "all", "--ckpt", "full", "--accum", "2")
# torch's own loss in chunks came with 2.13
CHUNKS = ("--loss-chunks", "3") if hasattr(F, "linear_cross_entropy") else ()
CONFIGS = {
    "gpt2": GPTConfig(1, 32, 4, 256, 16, FORMS["gpt2"], 4, 128),
    "llama": GPTConfig(1, 32, 4, 256, 16, FORMS["llama"], 2, 48),
}


@pytest.mark.parametrize("world, flags", [
    (1, [*LLAMA, "--accum", "4", "--ckpt", "selective", "--loss-chunks", "3"]),
    (4, ["--accum", "2", "--ckpt", "full", "--clip", "0", "--loss-chunks", "2"]),
    (2, ["--accum", "3", "--ckpt", "selective", "--train", r"tok|bias|blocks\.1\.mlp\.down"]),
    (1, [*IDEA, *LLAMA, "--accum", "3"]),
    (4, [*IDEA, "--accum", "2"]),
    (2, ["--model", "qwen3-toy", "--accum", "2", "--ckpt", "selective", "--loss-chunks", "2"]),
    (2, ["--impl", "both", "--accum", "3", "--ckpt", "selective", *CHUNKS]),
    (2, [*ALL_FULL, *LLAMA, "--batch", "7", "--eval-every", "1"]),
    (2, [*ALL_FULL, "--model", "qwen3-toy"]),
    (2, [*ALL_FULL, "--batch", "7", "--train", r"blocks\.0\.attn\.(q|out)|norm"]),
    (2, [*ALL_FULL, "--train", r"blocks\.1|norm"]),
])
def test_equals_one_process(world, flags):
    """Bytes are the textbook's, too."""
    report = check_equal("amp_accum_ckpt", world, *flags)
    if "--train" not in flags:
        textbook(report)


@pytest.mark.parametrize("flags", [
    ["--accum", "3", "--ckpt", "full", "--amp", "fp16", "--loss-chunks", "2"],
    [*LLAMA, "--ckpt", "selective", "--amp", "bf16"],
    [*IDEA, "--accum", "2", "--amp", "bf16"],
])
def test_dry_run(flags):
    real = dry_run_agrees("amp_accum_ckpt", 2, "--batch", "7", *flags)
    assert real["ranks"][0]["collectives"]["all_reduce"]["calls"] == (36 if "idea" in flags else 1)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_narrow_numbers(amp):
    """Losses of the idea, ours and torch's are within 2% of fp32's."""
    flags = *SMALL, "--impl", "all", "--ckpt", "full", "--accum", "2", "--amp", amp
    check = run_script("amp_accum_ckpt", 2, *flags)["check"]
    assert check["passed"] and check["loss"] < 1e-3


# ---- what a block keeps -----------------------------------------------------------


def plainly(forward, *inputs, **keywords):
    return forward(*inputs, **keywords)


def gradients_of(module):
    return [p.grad for p in module.parameters()]


def play(form, how, autocast=False, counts=True):
    """-> bytes kept between forward and backward, the most in both; matmuls; gradients"""
    cfg = CONFIGS[form]
    block = build(cfg, 0).blocks[0]
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, cfg.seq, cfg.width, generator=rng).requires_grad_()
    counter = FlopCounterMode(display=False)
    ledger = Ledger(held=lambda: {"parameters": [*block.parameters()]})
    with counter if counts else nullcontext(), ledger:
        with torch.autocast("cpu", enabled=autocast):
            y = how(block.forward, x)
        kept = ledger.saved_bytes
        y.backward(torch.ones_like(y))
    assert ledger.saved_bytes == 0  # nothing stays alive after backward, though y does
    flops = counter.get_flop_counts().get("Global", {})
    matmuls = sum(count for op, count in flops.items() if "attention" not in str(op))
    return kept, ledger.activations, matmuls, [x.grad, *gradients_of(block)]


def documented(form, autocast):
    """-> bytes that a block keeps, plainly and with selective, by docs/production.md. The docstring
    leaves out what does not grow with tokens times width.
    """
    cfg = CONFIGS[form]
    weights = [p for p in build(cfg, 0).blocks[0].parameters() if p.dim() == 2]
    numbers = dict(C=cfg.width, F=cfg.hidden, K=cfg.kv_heads, D=cfg.width // cfg.heads, T=cfg.seq,
                   t=2 * cfg.seq, W=sum(p.numel() for p in weights), s=4 * cfg.heads + 16)
    if form == "llama":
        numbers["s"] -= 8
    row = 2 * (form == "llama") + autocast
    page = Path(ROOT, "docs", "production.md").read_text()
    page = re.findall(r"^\| (?:GPT-2|Llama), .*", page, re.M)[row].split("|")[2:4]
    lines = amp_accum_ckpt.__doc__.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("    a block keeps"))
    doc = re.split("  +", lines[start + row])[2:4]
    formulas = [re.sub(r"(?<=\w) (?=[\w(])", " * ", column.strip()) for column in page]
    for in_doc, in_page in zip(doc, page, strict=True):
        assert f"t ({in_doc} + s)" in in_page
    return [eval(formula, dict(numbers)) for formula in formulas], numbers


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("form", CONFIGS)
def test_a_block(form, autocast):
    """Gradients are equal to the bit, the idea's nearly; matmuls and bytes as documented."""
    (by_plain, by_selective), numbers = documented(form, autocast)
    tokens = numbers["t"]
    C = numbers["C"]
    kept, _, flops, plain = play(form, plainly, autocast)
    assert kept == by_plain
    kept, most, done, ours = play(form, full, autocast)
    assert (kept, most) == (4 * C * tokens, by_plain)
    assert done == flops + 2 * tokens * (numbers["W"] - C * numbers["F"])  # all but down
    kept, most, done, others = play(form, selective, autocast)
    assert (kept, most, done) == (by_selective, by_selective, flops)
    kept, most, _, theirs = play(form, by_the_idea, autocast, counts=False)
    assert (kept, most) == (4 * C * tokens, by_plain)
    for a, b, c in zip(ours, others, plain):
        assert torch.equal(a, c)
        assert torch.equal(b, c)
    close = 2e-2 if autocast else 1e-5  # it adds them up in another order
    torch.testing.assert_close(theirs, plain, rtol=close, atol=close)


def by_the_idea(forward, x, old="", new=""):
    block = forward.__self__
    idea("amp_accum_ckpt", old, new).recompute(block)
    return block.forward(x)


def test_the_figures():
    """Part 2 begins with peaks of the idea and of full, and with what selective keeps."""
    table = Path(amp_accum_ckpt.__file__).read_text().split("what each addition buys.")[1][:700]
    ways = "--impl idea --ckpt full", "--ckpt full", "--ckpt none", "--ckpt selective"
    by_idea, ours, none, less = [
        report["ranks"][0]["memory"]
        for report in alone("amp_accum_ckpt", *[(*f"{way} {TWO_STEPS}".split(),) for way in ways])]
    assert f"peak {by_idea['peak'] / 1e6:.1f} -> {ours['peak'] / 1e6:.1f} MB" in table
    assert f"(no checkpoint: {none['peak'] / 1e6:.1f})" in table
    kept = [memory["activations"] / 1e6 for memory in (none, less)]
    assert "kept {:.1f} -> {:.1f} MB".format(*kept) in table
    many, = alone("amp_accum_ckpt", f"--impl idea --dry-run 2 {TWO_STEPS}".split())
    assert f"{many['ranks'][0]['collectives']['all_reduce']['calls']} calls -> 1" in table


# ---- a large vocabulary ---------------------------------------------------------------


def at_once(x, weight, y):
    return loss_sum(F.linear(x, weight), y)


def in_chunks(x, weight, y):
    return loss_in_chunks(lambda x, y: at_once(x, weight, y), x, y, 4)


def test_loss_in_chunks():
    """V = 128,256 in fp64: a quarter of the log-probabilities at a time; the same gradients as at
    once."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 16, 8, generator=rng).double().requires_grad_()
    weight = torch.randn(128_256, 8, generator=rng).double().requires_grad_()
    y = torch.randint(128_256, (2, 16), generator=rng)
    y[0, 12:] = -100
    of_all = 8 * 128_256 * y.numel()
    rest = 8 * (1 + x.numel() + y.numel())  # a number, x, y
    plain = torch.autograd.grad(at_once(x, weight, y), [x, weight])
    for loss_of, most in (at_once, of_all), (in_chunks, of_all / 4):
        with Ledger(held=lambda: {"parameters": [weight]}) as ledger:
            found = torch.autograd.grad(loss_of(x, weight, y), [x, weight])
        assert ledger.activations == most + rest
        assert_equal(found, plain)


def test_chunks_under_autocast():
    """Gradients of many chunks do not add up in 2 bytes."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(512, 32, generator=rng)
    weight = torch.randn(64, 32, generator=rng).requires_grad_()
    y = torch.randint(64, (512,), generator=rng)

    def gradient(loss_of, amp=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = loss_of(x[None], weight, y[None])
        return torch.autograd.grad(loss, weight)[0]

    exact = gradient(at_once, amp=False)
    usual = (gradient(at_once) - exact).norm()
    many = gradient(lambda x, weight, y: loss_in_chunks(
        lambda x, y: at_once(x, weight, y), x, y, 64))
    assert (many - exact).norm() < 1.5 * usual


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

    def nested(forward, x, **positions):
        return full(partial(how, forward), x, **positions)

    assert_equal(layer_of_others(nested), plain)


class EndsCheap(nn.Linear):
    """Its output has a recipe, which the next layer must not follow: run again, it has none."""

    def forward(self, x):
        return 0.7 * (x + super().forward(x))


@pytest.mark.parametrize("around", [(selective, full), (full, selective, full)])
def test_selective_within_full(around):
    def gradients(around):
        torch.manual_seed(0)
        layers = nn.Sequential(EndsCheap(4, 4), EndsCheap(4, 4))
        for layer in layers:
            for how in around:
                layer.forward = partial(how, layer.forward)
        layers(torch.randn(3, 4)).square().sum().backward()
        return [p.grad for p in layers.parameters()]

    assert_equal(gradients(around), gradients([]))


@pytest.mark.parametrize("how", [full, selective])
def test_what_is_kept_has_changed(how):
    """Also in a tuple. Autograd refuses it, too; but it does not look at what hooks keep."""
    pair = torch.ones(2, requires_grad=True), torch.ones(2)
    y = how(lambda pair: (pair[0] * pair[1]).exp(), pair)
    pair[1].add_(1)
    refuses("changed in place", y.sum().backward)


def test_a_recipe_of_what_has_changed():
    """It is not followed: neither the result of a cheap operation nor its input is what it was."""

    def gradient(how):
        weight = torch.linspace(-1, 1, 9).view(3, 3).requires_grad_()

        def forward(x):
            h = x @ x.t()
            cheap = h.clone()
            h.add_(1)
            return cheap @ weight + F.gelu(h).mul_(2).square()

        x = torch.linspace(-1, 2, 9).view(3, 3).requires_grad_()
        return torch.autograd.grad(how(forward, x).square().sum(), [x, weight])

    assert_equal(gradient(selective), gradient(plainly))
    for old, new in (" or x._version > 0:", ":"), ("if versions(inputs) == before:", "if True:"):
        wrong = copied("amp_accum_ckpt", 2, old, new).selective
        refuses("not close", assert_equal, gradient(wrong), gradient(plainly))


@pytest.mark.parametrize("first, second, words", [
    (torch.sin, lambda x: x[:2].sin(), "other tensors when it ran again"),
    (lambda x: x.exp() * x.sin(), torch.exp, "fewer tensors when it ran again"),
])
def test_forward_that_changes(first, second, words):
    turns = iter([first, second])
    y = full(lambda x: next(turns)(x), torch.ones(4, requires_grad=True))
    refuses(words, y.sum().backward)


@pytest.mark.parametrize("how", [full, selective])
def test_inside_a_compiled_model(how):
    """Right, though nobody compiles what is checkpointed."""

    def compiled(forward, x, positions):
        model = torch.compile(lambda x: how(forward, x, positions=positions), backend="aot_eager")
        return model(x)

    assert_equal(layer_of_others(compiled), layer_of_others(plainly))


@pytest.mark.parametrize("how", [full, selective])
def test_a_forward_without_backward_leaves_nothing(how):
    """No circle, for a garbage collector to find, though softmax keeps its result."""
    made = []

    def forward(x):
        y = x.softmax(-1)
        made.append(weakref.ref(y))
        return y.exp()

    gc.disable()
    how(forward, torch.ones(2, requires_grad=True))
    gc.enable()
    assert made[0]() is None


def check_collectives(how, calls):
    """With g of tensor_parallel.py."""
    module = Layer(4, 2, 0.0)
    tp = TensorParallel()

    def forward(x):
        x = F.gelu(ToOutside.apply(module(x), tp))
        scale = x.detach() * 0.5  # cheap, but what is written into it is no recipe's
        dist.all_reduce(scale)
        x = x * scale
        return F.gelu(ToOutside.apply(module(x), tp)).sin()

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
    run_ranks(check_each, 2, check_collectives, [(selective, 3), (full, 6)])


def check_copy(ckpt, scaled, *bug):
    """Three steps of a Llama of others, beside torch's own on one rank."""
    is_idea = ckpt == "idea"
    code = copied("amp_accum_ckpt", 1 if is_idea else 2, *bug)
    model = OfTensors()
    plain = copy.deepcopy(model)
    for layer in model.layers:
        if is_idea:
            code.recompute(layer)
        else:
            layer.forward = partial(getattr(code, ckpt), layer.forward)
    model = copy.deepcopy(model)  # which runs its own layers
    optimizer, judge = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True)
                        for m in (model, plain)]
    scaler = None
    if scaled:
        scaler = code.LossScaler("cpu", 64.0) if is_idea else code.FusedLossScaler("cpu")
    rng = torch.Generator().manual_seed(1)
    rows = slice(dist.get_rank(), None, dist.get_world_size())
    for _ in range(3):
        x, y = token_rows(rng, 8)
        judge.zero_grad()
        llama_loss(plain, x, y).backward()
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        judge.step()
        if is_idea:
            _, norm = code.idea_step(model, optimizer, x[rows], y[rows], 1, 0.05, 2, None, scaler)
        else:
            losses = partial(llama_loss, model)
            _, norm = code.train_step(
                model, optimizer, x[rows], y[rows], 1, 0.05, 3, None, scaler, losses)
        assert_equal(norm, wanted)
        assert_equal(gradients_of(model), gradients_of(plain))
    assert_equal([*model.parameters()], [*plain.parameters()])


PLANTED_IN_A_COPY = [
    ("idea", True, "            p.grad /= scaler.scale", "            pass"),
    ("full", False, "    dist.all_reduce(flat, group=group)", "    pass"),
    ("full", False, "        p.grad.copy_(part.view_as(p))", "        pass"),
]


def test_copies():
    run_ranks(check_each, 2, check_copy, [("full", False), ("selective", True), ("idea", True)])
    run_ranks(check_each, 2, check_differs, [(check_copy, *case) for case in PLANTED_IN_A_COPY])


# ---- the loss scaler ---------------------------------------------------------


def walk(make):
    """Fifty steps with overflows here and there: scales, skips and updates of torch's GradScaler.
    The idea's doubles after 3 steps, too.
    """
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    optimizer, theirs = [adamw([weight], 0.1) for weight in weights]
    scaler = make("cpu")
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


def test_scalers_walk_as_torch_does(monkeypatch):
    monkeypatch.setattr(FusedLossScaler, "interval", 3)
    walk(FusedLossScaler)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))])  # it would not skip
    refuses("fused", FusedLossScaler("cpu").step, optimizer, torch.tensor(1.0))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], 0.1, 0.9, fused=True)
    refuses("AdamW", FusedLossScaler("cpu").step, optimizer, torch.tensor(1.0))  # nan as momentum
    walk(scaler_of_the_idea())
    for old, new in ("if norm.isfinite():", "if True:"), ("self.scale = self.scale / 2", "pass"):
        with pytest.raises(AssertionError):
            walk(scaler_of_the_idea(old, new))


def scaler_of_the_idea(old="", new=""):
    scaler = idea("amp_accum_ckpt", old, new).LossScaler
    scaler.interval = 3
    return scaler


def check_zero(stage):
    """By itself scaler.step(optimizer, norm) would step nothing, and is refused. Between begin_step
    and end_step it steps as without a scale, or leaves a step out."""
    x, y = torch.arange(64).view(2, 4, 8)
    plain, model = (build(CONFIGS["gpt2"], 0).double() for _ in range(2))
    sharded = zero.parallelize(model, None, stage)
    optimizers = adamw(plain.parameters(), 0.1), adamw(sharded.parameter_groups(), 0.1)
    scaler = FusedLossScaler("cpu")
    refuses("call zero.step", scaler.step, optimizers[1], torch.tensor(1.0))
    for overflows in False, True, False:
        sharded.zero_grad()
        loss_sum(model(x), y).backward(scaler.scale * (math.inf if overflows else 1))
        sharded.reduce()
        for unit in sharded.units:
            unit.grad /= scaler.scale
        norm = sharded.clip_grad_norm_(1.0)
        sharded.begin_step()
        scaler.step(optimizers[1], norm)
        sharded.end_step()
        if not overflows:
            optimizers[0].zero_grad()
            loss_sum(plain(x), y).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizers[0].step()
        compare(zero.full_state_dict(model, sharded), dict(plain.state_dict()))


def test_zero():
    run_ranks(check_each, 1, check_zero, [(1,), (2,), (3,)])


def test_scale_comes_back():
    """From the least and the greatest. More good steps than the interval double it, too."""
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = adamw([weight], 0.1)
    good, bad = torch.tensor([1.0, torch.nan])
    scaler = FusedLossScaler("cpu", scale=2.0, good_steps=5)
    scaler.interval = 1
    scaler.step(optimizer, good)
    assert scaler.scale == 4
    for norm, least_or_greatest, back in (bad, 1, good), (good, 2.0 ** 100, bad):
        for _ in range(300):
            scaler.step(optimizer, norm)
        assert scaler.scale == least_or_greatest
        scaler.step(optimizer, back)
        assert scaler.scale == least_or_greatest * (0.5 if back is bad else 2)


def inject(module):
    """The last rank's gradients overflow in steps 1 and 2."""
    calls = itertools.count()
    honest = module.loss_sum

    def broken(logits, y):
        if next(calls) in (1, 2) and dist.get_rank() == dist.get_world_size() - 1:
            logits.register_hook(lambda grad: grad * torch.inf)
        return honest(logits, y)

    module.loss_sum = broken


def twice_halved(module):
    """A plant, of a run that goes on: its scaler is as it was."""
    make = module.make_scaler

    def judged(run, impl):
        scaler = make(run, impl)
        state = module.state_of(scaler)
        assert state["scale"] == 65536 / 4 and state["_growth_tracker"] == 1
        return scaler

    module.make_scaler = judged


@pytest.mark.parametrize("impl", ["scratch", "torch"])
def test_a_resumed_run_has_the_scale(tmp_path, impl):
    """An overflow on one rank costs all of them the step; scale, good steps, updates are saved."""
    flags = (*SMALL, "--amp", "fp16", "--steps", "6", "--lr", "1e-4", "--impl", impl)
    whole = run_script("amp_accum_ckpt", 2, *flags, "--save", str(tmp_path), "--save-every", "4",
                       plant=inject)
    assert whole["check"]["passed"]
    rest = run_script("amp_accum_ckpt", 2, *flags, "--no-check", "--resume", str(tmp_path / "4"),
                      plant=twice_halved)
    assert rest["loss"] == whole["loss"][4:]


# ---- planted bugs: each must fail the check --------------------------------------


@pytest.mark.parametrize("old, new", [
    ("in zip(inputs.tensor_split(accum), targets.tensor_split(accum)):",
     "in [*zip(inputs.tensor_split(accum), targets.tensor_split(accum))][-1:]:"),
    ("        dist.all_reduce(p.grad)", "        pass"),
    ("/ valid\n", "/ (y >= 0).sum()\n"),
    ("*torch.autograd.grad(y, (*parameters, x), dy)",
     "*torch.autograd.grad(y, parameters, dy), dy"),
    ("norm = nn.utils.clip_grad_norm_(trained, clip)",
     "norm = nn.utils.get_total_norm([p.grad for p in trained])"),
    ("    optimizer.zero_grad()\n", ""),
])
def test_planted_in_the_idea(old, new):
    check_bug_shows("amp_accum_ckpt", 2, *IDEA, "--accum", "2", plant=partial(rewritten, old, new))


@pytest.mark.parametrize("how, old, new", [
    ("full", "            torch.set_rng_state(self.cpu_state)\n", ""),
    ("full", "self.autocast, rng, filling", "self.autocast, filling"),
    ("full", ".requires_grad_(requires_grad)", ".requires_grad_(False)"),
    ("full", "suppress(Enough), torch.enable_grad(), ", "suppress(Enough), "),
    ("full", "        if not self.slots:", "        if len(self.slots) < 2:"),
    ("selective", "cache(lambda: first(", "cache(lambda: 2 * first("),
])
def test_planted_in_the_technique(how, old, new):
    wrong = getattr(copied("amp_accum_ckpt", 2, old, new), how)
    with pytest.raises((AssertionError, AttributeError, RuntimeError)):
        assert_equal(layer_of_others(wrong), layer_of_others(plainly))


def test_autocast_not_restored(monkeypatch):
    """The idea runs again in fp32, and nothing raises; full raises."""
    planted = partial(by_the_idea, old=", ctx.autocast:", new=":")
    plain, right, wrong = [play("gpt2", how, autocast=True, counts=False)[-1]
                           for how in (plainly, by_the_idea, planted)]
    gaps = [max((a - b).abs().max() for a, b in zip(found, plain)) for found in (right, wrong)]
    assert gaps[1] > 4 * gaps[0]
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    refuses("other tensors when it ran again", play, "gpt2", full, autocast=True)


# ---- run -----------------------------------------------------------------------


def eager_backend(module):
    """The compiler's front half only: no C++ is built."""
    module.torch.compile = partial(torch.compile, backend="eager")


def test_compile():
    flags = *SMALL, "--compile", "--ckpt", "full"
    assert run_script("amp_accum_ckpt", 1, *flags, plant=eager_backend)["check"]["passed"]


def test_refused(monkeypatch):
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)  # as in torch 2.11
    check_refused("amp_accum_ckpt", [(flags.split(), words) for flags, words in [
        ("--amp fp16 --optimizer muon", "the scaler skips steps of AdamW alone"),
        ("--amp bf16 --dtype fp64", "--dtype fp64"),
        ("--accum 9", "--batch 8: fewer than 1 ranks x --accum 9"),
        ("--impl torch --dry-run 2", "--dry-run needs --impl scratch or idea"),
        ("--impl idea --amp fp16 --dry-run 2", "--dry-run has no values"),
        ("--impl all --ckpt selective", "the idea has no --ckpt selective"),
        ("--impl torch --loss-chunks 2", "torch has linear_cross_entropy since 2.13"),
        ("--compile", "--compile needs c++"),
    ]])
