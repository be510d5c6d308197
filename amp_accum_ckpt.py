"""The memory of one device, saved in three ways: narrower numbers, fewer sequences at a time, fewer tensors kept.

    --amp bf16|fp16   matmuls and attention in 2 bytes a number; weights, gradients, norms, sums and loss in 4
    --accum M         M micro-batches in turn: gradients add up, and ranks communicate once, after the last
    --ckpt none       x0 [everything in block 0] x1 [everything in block 1] x2 [..   is kept for backward
           selective  x0 [matmuls and attention] x1 [matmuls and attention] x2 [..   the rest is made again
           full       x0                         x1                         x2       one block at a time is

    bytes kept by a block   plain GPT, --ckpt none           selective             full
    fp32                    t (64 C + 4 H + 16)              t (40 C + 4 H + 16)   4 C t + 5056 (random state)
    autocast                t (40 C + 4 H + 16) + 24 C^2     t (24 C + 4 H + 16)   the same. Both: and one block
    FLOPs done again        -                                no matmul's           t (16 C^2 + 4 T C)

t: tokens of a micro-batch here. full does forward, t (24 C^2 + 4 T C), again but for the block's last matmul, whose
result no gradient needs. P parameters and what belongs to them: 16 P, as plain; N ranks all-reduce 4 P per step.

Micikevicius 2018, "Mixed Precision Training", arXiv:1710.03740, section 3; Chen 2016, "Training Deep Nets with
Sublinear Memory Cost", arXiv:1604.06174, section 4; Korthikanti 2022, "Reducing Activation Recomputation in Large
Transformer Models", arXiv:2205.05198, section 5. At work: torch.amp, torch.utils.checkpoint, no_sync (section 3).

    torchrun --standalone --nproc_per_node=2 amp_accum_ckpt.py --amp bf16 --accum 2 --ckpt full
"""
import math
import shutil
import sys
import weakref
from contextlib import nullcontext, suppress
from functools import cache, partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from common import ANY, POSITIVE, Run, Trace, adamw, arguments, build, clip_gradients, loss_sum, require, share

# ---- 1. the technique (copy this; it needs only torch) -----------------------


def outer_hooks():
    """Autograd calls only the innermost hooks on saved tensors; ours call those around them (a ledger, save_on_cpu)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) or (lambda t: t, lambda t: t)


class Enough(Exception):
    """The second forward has made every tensor that backward asks for."""


def full(forward, *inputs):
    """forward(*inputs), keeping those tensors (any shapes) and the random state (Chen 2016, section 4).

    The graph is built as always, but holds numbers in the place of tensors. When backward wants the first one, forward
    runs again until it has made the last tensor that was numbered: the last matmul, and a reduction of its result, do
    not run twice. Collectives before it do, on every rank and in the same order. Inputs must not change in place.
    """
    kind, gpus = inputs[0].device.type, [inputs[0].device][:inputs[0].is_cuda]
    autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    (pack, unpack), numbers, again = outer_hooks(), [], {}
    kept = [(pack(t.detach()), t.requires_grad) for t in inputs]
    states = [pack(state) for state in (torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus))]

    def keep(tensor):
        again[len(again)] = pack(tensor.detach())
        if len(again) == len(numbers):
            raise Enough

    def fetch(i):
        if i not in again:  # wanted for the first time, or once more by a second backward
            again.clear()
            with torch.random.fork_rng(gpus), torch.enable_grad(), torch.autocast(*autocast), \
                    torch.autograd.graph.saved_tensors_hooks(keep, unpack), suppress(Enough):
                for state, restore in zip(states, (torch.set_rng_state, torch.cuda.set_rng_state)):
                    restore(unpack(state))
                forward(*(unpack(t).detach().requires_grad_(grad) for t, grad in kept))
                raise RuntimeError(f"a block kept {len(numbers)} tensors, but {len(again)} when it ran again")
        return unpack(again.pop(i))

    with torch.autograd.graph.saved_tensors_hooks(lambda _: numbers.append(0) or len(numbers) - 1, fetch):
        return forward(*inputs)


# Cheap to make again, by the name of the node in the graph that made it: the node still holds what it made that of
CHEAP = {
    "GeluBackward0": lambda n: torch.nn.functional.gelu(n._saved_self, approximate=n._saved_approximate),
    "NativeLayerNormBackward0": lambda n: (n._saved_input.contiguous() - n._saved_result1).mul_(n._saved_result2).mul_(
        1 if n._saved_weight is None else n._saved_weight).add_(0 if n._saved_bias is None else n._saved_bias),
    "torch::autograd::AccumulateGrad": lambda n: n.variable,  # of a weight, autocast's copy
}
SAME_ORDER = {f"{name}Backward0" for name in "View UnsafeView ReshapeAlias T Transpose Permute ToCopy".split()}


def selective(forward, *inputs):
    """Keep what matmuls, attention and sums make, but no LayerNorm, GELU or cast (Chen 2016, section 4.2)."""
    (pack, unpack), cheap = outer_hooks(), weakref.WeakValueDictionary()

    def keep(t):
        node, cast = t.grad_fn, False
        while node is not None and node.name() in SAME_ORDER:
            node, cast = node.next_functions[0][0], cast or node.name() == "ToCopyBackward0"
        if node is None or node.name() not in CHEAP or (hasattr(node, "variable") and not cast):
            return None, pack(t.detach())
        again = cheap.get(node) or cache(lambda dtype: CHEAP[node.name()](node).to(dtype))
        cheap[node] = again  # one for q, k and v together, until the last of them has used it
        return again, (t.dtype, t.size(), t.stride(), t.storage_offset())

    def fetch(kept):
        again, t = kept
        return again(t[0]).as_strided(*t[1:]) if again else unpack(t)

    with torch.autograd.graph.saved_tensors_hooks(keep, fetch):
        return forward(*inputs)


class LossScaler:
    """fp16 ends at 6e-8: scale the loss up, as far as gradients do not overflow (Micikevicius 2018, section 3.2):
    (loss * scaler.scale).backward(), unscale, sum and clip, step. Nothing waits for the device.
    """

    def __init__(self, device, scale=65536.0, growth=2.0, backoff=0.5, interval=2000):
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.scale, self.good = torch.full((), scale, device=device), torch.zeros((), device=device)

    def unscale(self, gradients, group=None):
        """gradients: this rank's, or its shards. If any rank of the group has overflowed, all of them will skip."""
        gradients, self.found_inf = [g for g in gradients if g is not None and g.numel()], torch.zeros_like(self.good)
        if gradients:
            torch._foreach_mul_(gradients, 1 / self.scale)
            self.found_inf += (~torch.stack(torch._foreach_norm(gradients, math.inf)).isfinite()).any()
        dist.all_reduce(self.found_inf, op=dist.ReduceOp.MAX, group=group)  # this rank's -> any rank's, replicated

    def step(self, optimizer):
        """Or back off, after an overflow. Grow after `interval` steps in a row without, unless to infinity."""
        assert getattr(optimizer, "_step_supports_amp_scaling", False), "take a fused optimizer: it heeds found_inf"
        optimizer.found_inf = self.found_inf
        optimizer.step()
        self.good = (self.good + 1) * (1 - self.found_inf)
        grow = (self.good >= self.interval) & (self.scale * self.growth).isfinite()
        self.scale = self.scale * torch.where(self.found_inf > 0, self.backoff, torch.where(grow, self.growth, 1.0))
        self.good = self.good * (self.good < self.interval)


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, ckpt=None, compiled=False):
    for block in model.blocks:
        forward = torch.compile(block.forward) if compiled else block.forward
        block.forward = partial(ckpt, forward) if ckpt else forward
    return model


def full_state_dict(model):
    return getattr(model, "module", model).state_dict()


def full_gradients(model):
    return {name: p.grad for name, p in getattr(model, "module", model).named_parameters()}


def train_step(model, optimizer, scaler, micro, valid, clip, autocast, group=None):
    """micro: this rank's micro-batches [(x, y)]; valid: of the whole batch -> this rank's part of the loss, the norm"""
    optimizer.zero_grad()
    loss = 0.0
    for x, y in micro:
        with autocast():
            part = loss_sum(model(x), y) / valid
        (part * scaler.scale if scaler else part).backward()
        loss = loss + part.detach()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if scaler:
        scaler.unscale(gradients, group)
    dist.all_reduce(sums := torch.nn.utils.parameters_to_vector(gradients), group=group)  # partial -> replicated
    torch.nn.utils.vector_to_parameters(sums, gradients)  # one call for all; they are views of it from here on
    norm = clip_gradients(model.parameters(), clip)
    scaler.step(optimizer) if scaler else optimizer.step()
    return loss, norm


# ---- 3. at work: the same with torch's own API -------------------------------

for end in "", "_backward":  # torch's FLOP counter knows the attention of GPUs; that of CPUs counts the same
    cpu, gpu = (getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{on}{end}") for on in ("_for_cpu", ""))
    flop_registry[cpu] = flop_registry[gpu]
MATMULS = [op.default for op in flop_registry if hasattr(op, "default")]
full_at_work = partial(checkpoint, use_reentrant=False)  # of an nn.Sequential: checkpoint_sequential
selective_at_work = partial(full_at_work, context_fn=partial(create_selective_checkpoint_contexts, MATMULS))


def train_step_at_work(model, optimizer, scaler, micro, valid, clip, autocast):
    optimizer.zero_grad()
    loss, n = 0.0, dist.get_world_size()
    for i, (x, y) in enumerate(micro):
        with model.no_sync() if n > 1 and i < len(micro) - 1 else nullcontext():
            with autocast():
                part = loss_sum(model(x), y) / valid
            scaler.scale(part * n).backward()  # DistributedDataParallel averages; the sum is wanted here
        loss = loss + part.detach()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    scaler.step(optimizer)
    scaler.update()
    return loss, norm


# ---- 4. run ------------------------------------------------------------------

AMP = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CKPT = {"none": (None, None), "full": (full, full_at_work), "selective": (selective, selective_at_work)}
HEAD = "\n amp   M ckpt         MB kept   textbook      peak MFLOP again  textbook   ms/step     tok/s    MFU loss gap"
ROW = "{:>4} {:3} {:9} {:10.3f} {:10.3f} {:9.3f} {:11.3f} {:9.3f} {:9.1f} {:9,.0f} {:6.1%} {:8.1e}".format


def textbook(run, amp, accum, ckpt):
    """-> formula and bytes kept for backward; FLOPs of a step that does nothing again, and those done again"""
    (L, C, H, V, T), w, low = run.cfg, run.dtype.itemsize // 4, amp != "off"
    rows, x = len(share(run.args.batch, run.world_size, run.rank)), 4 * w * C
    t, ids = -(-rows // accum) * T, 8 * rows * T  # and as many for targets
    head = (w * (4 * C + 8 + 4 * V) + (4 * w, 2)[low] * C) * t + 2 * V * C * low + ids + 4 * w + 4 * (amp == "fp16")
    each = w * (((40, 24) if ckpt == "selective" else (64, 40))[low] * C + 4 * H + 16)
    more = 24 * C * C * (low and ckpt != "selective")
    if ckpt == "full":
        each, more, head = x, 5056 + 16 * (run.device.type == "cuda"), max(head, (each - x) * t + more)
    return (f"L ({each} t + {more}) + " + ("max(block, head)" if ckpt == "full" else "head"),
            L * (each * t + more) + head + ids + 8 * T, (72 * L * C * C + 6 * C * V + 14 * L * T * C) * rows * T,
            L * (16 * C * C + 4 * T * C) * rows * T * (ckpt == "full"))


def setup(run, theirs, amp, ckpt):
    """-> the train step, and its model, optimizer, scaler, autocast"""
    args, kind, fp16 = run.args, run.device.type, amp == "fp16"
    model = build(run.cfg, args.seed, run.device, run.dtype)
    model = parallelize(model, CKPT[ckpt][theirs], args.compile)
    scaler = LossScaler(run.device, interval=args.growth) if fp16 else None
    if theirs:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True) if run.world_size > 1 else model
        scaler = torch.amp.GradScaler(kind, enabled=fp16, growth_interval=args.growth)
    autocast = partial(torch.autocast, kind, AMP[amp], enabled=amp != "off")
    return train_step_at_work if theirs else train_step, model, adamw(model.parameters(), args.lr), scaler, autocast


def report(run, plans, counters, total):
    """The textbook beside what was measured: of the first plan as everywhere, of all of them in a table -> plain"""
    args, (L, C, _, _, T), n, first = run.args, run.cfg, run.world_size, run.impls[0]
    size = total * run.dtype.itemsize + 4 * (plans[first][0] == "fp16" and first != "torch")
    run.textbook("wire all_reduce", "2 (N-1)/N (b P, in fp16 + 4)", 2 * (n - 1) * size / n,
                 run.ledger[first].collectives["all_reduce"]["wire"])
    plain = run.plain() if args.check and not run.dry and run.rank == 0 else None
    run.say(HEAD)
    for name, plan in plans.items():
        formula, kept, once, again = textbook(run, *plan)
        held, ms = run.ledger[name].memory, run.ms(name) or math.inf
        speed, done_again = 1e3 * args.batch * T / ms, counters[name].get_total_flops() - once
        mfu = speed * (6 * total + 12 * L * C * T) / n / (1e12 * args.peak or math.inf)
        gap = max(abs(a / plain.loss[i] - 1).item() for i, a in run.trace[name].loss.items()) if plain else 0
        row = [*plan, held["activations"], kept, held["peak"], done_again, again, ms, speed, mfu, gap]
        run.say(ROW(*plan, *(x / 1e6 for x in row[3:8]), *row[8:]))
        run.extra.setdefault("plans", []).append(row)
        if name == "scratch":
            run.textbook("activations kept", formula, kept, held["activations"])
    return plain


def main():
    args = arguments(__doc__, amp=("off", "autocast to", tuple(AMP)), accum=(1, "M, micro-batches", POSITIVE),
                     ckpt=("none", "keep less for backward", tuple(CKPT)), compile=(False, "torch.compile blocks"),
                     growth=(2000, "fp16: steps without overflow until the loss scale doubles", POSITIVE),
                     sweep=(False, "--amp off and bf16, --accum 1 and M, every --ckpt, in one table"),
                     peak=(0.0, "TFLOP/s of a device in bf16, from its data sheet, for MFU", ANY))
    n = args.world_size
    require(args.batch >= n * args.accum, f"--batch {args.batch}: fewer than {n} ranks x --accum {args.accum}")
    require(args.dtype == "fp32" or (args.dtype, args.amp) == ("fp64", "off"),
            f"--dtype {args.dtype} --amp {args.amp}: take fp32 with any --amp, or fp64 with --amp off")
    require(args.impl == "scratch" or not (args.dry_run or args.sweep), "--dry-run and --sweep want --impl scratch")
    require(not args.compile or not args.dry_run and shutil.which("c++"), "--compile needs c++, and no --dry-run")
    run = Run(args)
    plans = {impl: (args.amp, args.accum, args.ckpt) for impl in run.impls}
    if args.sweep:
        plans = {f"{a} {m} {c}": (a, m, c) for a in ("off", "bf16") for m in sorted({1, args.accum}) for c in CKPT}
    run.impls, run.trace, run.times = tuple(plans), {p: Trace() for p in plans}, {p: [] for p in plans}
    with run:
        sides = {name: setup(run, name == "torch", amp, ckpt) for name, (amp, _, ckpt) in plans.items()}
        counters = {p: FlopCounterMode(display=False) for p in plans}
        total = sum(p.numel() for p in sides[run.impls[0]][1].parameters())
        for name, step in run.steps():
            (amp, accum, _), (step_fn, model, optimizer, scaler, autocast) = plans[name], sides[name]
            x, y, valid = run.batch(step, share(args.batch, n, run.rank))
            micro = list(zip(x.tensor_split(accum), y.tensor_split(accum)))
            with run.measure(name, step, model, optimizer), counters[name] if step == run.last else nullcontext():
                loss, norm = step_fn(model, optimizer, scaler, micro, valid, args.clip, autocast)
            run.log(name, step, loss, norm, full_gradients, full_state_dict, model)
            if amp == "fp16" and not run.dry:
                run.extra.setdefault("scale " + name, []).append(
                    scaler.get_scale() if name == "torch" else scaler.scale.item())
        args.judged_as = args.dtype if plans[run.impls[0]][0] == "off" else "bf16"  # the loss to 2%: see compare
        return run.finish(total, total, report(run, plans, counters, total))


if __name__ == "__main__":
    sys.exit(main())
