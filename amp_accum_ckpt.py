"""The memory of one device: mixed precision, gradient accumulation, activation checkpointing; on each of N ranks too.
"""
import contextlib
import functools
import math
import sys
import weakref

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from common import ANY, POSITIVE, Run, adamw, arguments, build, loss_sum, require, share

# ---- 1. the technique (copy this; it needs only torch) -----------------------


class Inputs(torch.autograd.Function):
    """A node outside of the graph, for what a block is recomputed from: any tensors, kept as autograd keeps tensors."""

    @staticmethod
    def forward(ctx, anchor, *tensors):
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError("this node is in no graph")


def outer_hooks():
    """Autograd calls only the innermost hooks on saved tensors; ours hand on to those around them (save_on_cpu, a
    ledger), so that what is kept in place of something else is still seen."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) or (lambda t: t, lambda t: t)


class Enough(Exception):
    """The recomputation has made every tensor that backward asks for."""


class Full:
    """One call of a block of which its inputs are kept, and the random state; the rest is computed again.

    The graph is built as always, but instead of a tensor it holds a number. When backward wants the first of them, the
    forward runs again, until it has made the last tensor that was numbered: the block's last matmul, and a reduction
    behind it, need not run twice. Collectives before that do run again, in the same order on every rank.
    """

    def __init__(self, forward, args):
        self.forward, self.count, self.again, self.args = forward, 0, {}, list(args)
        self.tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        kept = [args[i] for i in self.tensors]
        self.kind = kept[0].device.type
        self.autocast = torch.is_autocast_enabled(self.kind), torch.get_autocast_dtype(self.kind)
        gpu = [torch.cuda.get_rng_state(kept[0].device)] if self.kind == "cuda" else []
        anchor = torch.empty(0, requires_grad=True)
        self.node = Inputs.apply(anchor, *kept, torch.get_rng_state(), *gpu).grad_fn
        for i in self.tensors:
            self.args[i] = None

    def pack(self, tensor):
        self.count += 1
        return self.count - 1

    def unpack(self, i):
        if i not in self.again:  # the first one, or a second backward through a retained graph
            self.recompute()
        box, unpack = self.again.pop(i)
        return unpack(box)

    def recompute(self):
        saved, args = self.node.saved_tensors, list(self.args)
        for i, t in zip(self.tensors, saved):
            args[i] = t.detach().requires_grad_(t.requires_grad)
        device, states = saved[0].device, saved[len(self.tensors):]
        pack, unpack = outer_hooks()
        self.again.clear()

        def keep(tensor):
            self.again[len(self.again)] = pack(tensor.detach()), unpack
            if len(self.again) == self.count:
                raise Enough

        with torch.random.fork_rng(devices=[device] if self.kind == "cuda" else []), torch.enable_grad(), \
                torch.autocast(self.kind, self.autocast[1], self.autocast[0], cache_enabled=False), \
                torch.autograd.graph.saved_tensors_hooks(keep, self.unpack), contextlib.suppress(Enough):
            torch.set_rng_state(states[0])
            if self.kind == "cuda":
                torch.cuda.set_rng_state(states[1], device)
            self.forward(*args)
        if len(self.again) < self.count:
            raise RuntimeError(f"forward kept {self.count} tensors, and run again {len(self.again)}: it is not the same")


def full(forward, *args):
    """forward(*args), keeping nothing but the tensors among args (any shapes) for backward (Chen 2016, section 3)."""
    if not torch.is_grad_enabled():
        return forward(*args)
    call = Full(forward, args)
    with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
        return forward(*args)


# Cheap to make again, by the name of the autograd node that made it: node -> output
CHEAP = {
    "GeluBackward0": lambda n: F.gelu(n._saved_self, approximate=n._saved_approximate),
    "NativeLayerNormBackward0": lambda n: torch.addcmul(
        n._saved_bias, (n._saved_input - n._saved_result1).mul_(n._saved_result2), n._saved_weight),
    "torch::autograd::AccumulateGrad": lambda n: n.variable,  # a weight: autocast's copy of it is what is made again
}
SAME_ORDER = {f"{name}Backward0" for name in "View UnsafeView ReshapeAlias T Transpose Permute ToCopy".split()}


class Again:
    """Stands for the output of a cheap node, and makes it when backward first wants it."""

    def __init__(self, node):
        self.node, self.made = node, {}

    def get(self, dtype, *geometry):
        with torch.no_grad():
            if dtype not in self.made:
                self.made[dtype] = CHEAP[self.node.name()](self.node).to(dtype)
            return self.made[dtype].as_strided(*geometry)


def selective(forward, *args):
    """forward(*args), keeping matmul and attention outputs and sums, but no LayerNorm, GELU or cast of a weight.

    A saved tensor's grad_fn tells what made it, and holds what that was made of (Korthikanti 2022, section 5).
    """
    pack, unpack = outer_hooks()
    made = weakref.WeakValueDictionary()  # node -> Again; alive as long as a consumer waits for it

    def keep(t):
        node, cast = t.grad_fn, False
        while node is not None and node.name() in SAME_ORDER:
            node, cast = node.next_functions[0][0], cast or node.name() == "ToCopyBackward0"
        if node is None or node.name() not in CHEAP or (hasattr(node, "variable") and not cast):
            return pack(t.detach()), None
        again = made.get(node) or Again(node)
        made[node] = again
        return again, (t.dtype, t.size(), t.stride(), t.storage_offset())

    def give(kept):
        return kept[0].get(*kept[1]) if kept[1] else unpack(kept[0])

    with torch.autograd.graph.saved_tensors_hooks(keep, give):
        return forward(*args)


def checkpoint_blocks(blocks, how):
    """Let every module of a list keep less for backward: how = none, full or selective. Parameter names stay."""
    for block in blocks if how != "none" else ():
        block.forward = functools.partial({"full": full, "selective": selective}[how], block.forward)


class FlatGradients:
    """All gradients side by side in one tensor, which backward adds to: one all-reduce, one norm, one multiplication."""

    def __init__(self, parameters):
        self.parameters = [p for p in parameters if p.requires_grad]
        sizes, first = [p.numel() for p in self.parameters], self.parameters[0]
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        for p, piece in zip(self.parameters, self.flat.split(sizes)):
            p.grad = piece.view_as(p)

    def clip(self, largest):
        norm = torch.linalg.vector_norm(self.flat)
        if largest:
            self.flat.mul_((largest / (norm + 1e-6)).clamp(max=1))
        return norm


class LossScaler:
    """fp16 gradients below 6e-8 are zero: the loss is scaled up as far as they do not overflow (Micikevicius 2018, 3.2).

    Nothing here waits for the device. A fused optimizer looks at found_inf itself, and then leaves all as it was.
    """

    def __init__(self, device, scale=65536.0, growth=2.0, backoff=0.5, interval=2000):
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.scale = torch.tensor(scale, device=device)
        self.good, self.found_inf = torch.zeros((), device=device), torch.zeros((), device=device)

    def unscale(self, gradients, group=None):
        """Before the norm is taken. gradients: this rank's tensors; if any rank of the group overflows, all skip."""
        for g in gradients:
            g.mul_(1 / self.scale)
        largest = torch.stack([torch.linalg.vector_norm(g, math.inf) for g in gradients])
        self.found_inf = (~largest.isfinite()).any().float()
        dist.all_reduce(self.found_inf, op=dist.ReduceOp.MAX, group=group)  # this rank's -> any rank's, replicated

    def step(self, optimizer):
        optimizer.found_inf = self.found_inf
        optimizer.step()

    def update(self):
        """Back off after an overflow, grow after `interval` steps without one."""
        self.good = (self.good + 1) * (1 - self.found_inf)
        larger = torch.where(self.good >= self.interval, self.scale * self.growth, self.scale)
        self.good = torch.where(self.good >= self.interval, 0.0, self.good)
        larger = torch.where(larger.isfinite(), larger, self.scale)
        self.scale = torch.where(self.found_inf > 0, self.scale * self.backoff, larger)


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, ckpt="none", compile=False):
    if compile:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)
    checkpoint_blocks(model.blocks, ckpt)
    return model


def full_state_dict(model):
    return getattr(model, "module", model).state_dict()


def full_gradients(model):
    return {name: p.grad for name, p in getattr(model, "module", model).named_parameters()}


def train_step(model, optimizer, gradients, scaler, micro, valid, clip, autocast, group=None):
    """micro: this rank's micro-batches [(x, y)]; valid: of the whole batch -> this rank's part of the loss, the norm."""
    gradients.flat.zero_()
    loss = 0.0
    for x, y in micro:
        with autocast():
            part = loss_sum(model(x), y) / valid
        (part * scaler.scale if scaler else part).backward()
        loss = loss + part.detach()
    if scaler:
        scaler.unscale([gradients.flat], group)
    dist.all_reduce(gradients.flat, group=group)  # partial -> replicated, once for all micro-batches
    norm = gradients.clip(clip)
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    return loss, norm


# ---- 3. at work: the same with torch's own API -------------------------------

KEEP = [torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_flash_attention, torch.ops.aten._scaled_dot_product_efficient_attention,
        torch.ops.aten._scaled_dot_product_cudnn_attention]


def parallelize_at_work(model, ckpt, compile=False):
    how = {"full": dict(), "selective": dict(context_fn=functools.partial(
        create_selective_checkpoint_contexts, [op.default for op in KEEP]))}
    for block in model.blocks:
        if compile:
            block.forward = torch.compile(block.forward)
        if ckpt != "none":
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **how[ckpt])
    return DistributedDataParallel(model, gradient_as_bucket_view=True) if dist.get_world_size() > 1 else model


def train_step_at_work(model, optimizer, _, scaler, micro, valid, clip, autocast):
    optimizer.zero_grad()
    loss = 0.0
    for i, (x, y) in enumerate(micro):
        last = i == len(micro) - 1 or dist.get_world_size() == 1
        with contextlib.nullcontext() if last else model.no_sync():
            with autocast():
                part = loss_sum(model(x), y) / valid
            scaler.scale(part * dist.get_world_size()).backward()  # DistributedDataParallel averages
        loss = loss + part.detach()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    scaler.step(optimizer)
    scaler.update()
    return loss, norm


# ---- 4. run ------------------------------------------------------------------


def main():
    args = arguments(__doc__, amp=("off", "x", ("off", "bf16", "fp16")), accum=(1, "micro-batches", POSITIVE),
                     ckpt=("none", "x", ("none", "full", "selective")), growth=(2000, "x", POSITIVE),
                     compile=(False, "x"))
    n = args.world_size
    require(args.batch >= n * args.accum, "batch")
    run = Run(args)
    with run:
        sides = {}
        low = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[args.amp]
        autocast = functools.partial(torch.autocast, run.device.type, low, enabled=low is not None)
        rows = share(args.batch, n, run.rank)
        for impl in run.impls:
            model = build(run.cfg, args.seed, run.device, run.dtype)
            total = sum(p.numel() for p in model.parameters())
            if impl == "scratch":
                model, gradients = parallelize(model, args.ckpt, args.compile), FlatGradients(model.parameters())
                scaler = LossScaler(run.device, interval=args.growth) if args.amp == "fp16" else None
                sides[impl] = train_step, model, adamw(model.parameters(), args.lr), gradients, scaler
            else:
                scaler = torch.amp.GradScaler(run.device.type, enabled=args.amp == "fp16", growth_interval=args.growth)
                model = parallelize_at_work(model, args.ckpt, args.compile)
                sides[impl] = train_step_at_work, model, adamw(model.parameters(), args.lr), None, scaler
        for impl, step in run.steps():
            step_fn, model, optimizer, gradients, scaler = sides[impl]
            x, y, valid = run.batch(step, rows)
            micro = [(x[r.start:r.stop], y[r.start:r.stop]) for r in (share(len(x), args.accum, i) for i in range(args.accum))]
            with run.measure(impl, step, model, optimizer):
                loss, norm = step_fn(model, optimizer, gradients, scaler, micro, valid, args.clip, autocast)
            run.log(impl, step, loss, norm)
            if run.keeps(step):
                run.trace[impl].keep(step, full_gradients(model), full_state_dict(model))
        if args.amp != "off":
            args.dtype = "bf16"
        return run.finish(total, total)


if __name__ == "__main__":
    sys.exit(main())
