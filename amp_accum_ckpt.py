"""One device's memory: fewer tensors, fewer sequences, narrower numbers, a vocabulary in chunks.

    --ckpt none       keeps x0 [all that block 0 made] x1 [all that block 1 made] .. x [logits]
    --ckpt selective  keeps x0 [matmuls, attention   ] x1 [matmuls, attention   ] .. x [logits]
    --ckpt full       keeps x0                         x1                         .. x [logits]
    --loss-chunks N   keeps no logits. Backward makes again what is not kept, here and above
    --accum M         M micro-batches in turn: gradients add up, and ranks communicate once
    --amp bf16|fp16   matmuls and attention in 2 bytes a number; weights, gradients, loss in 4

    for block in model.blocks:
        block.forward = partial(full, block.forward)  # or selective
    def part_of_loss(x, y):  # a sum over tokens; valid: how many targets the global batch has
        with torch.autocast("cuda", torch.bfloat16):
            return loss_sum(model(x), y) / valid
    loss = accumulate(part_of_loss, zip(x.chunk(2), y.chunk(2)))  # in the place of backward
    sum_over_ranks(model.parameters())  # of gradients; then clip and step as usual

C is the width, V the number of words, P of parameters; in Llama's form F is the width inside the
MLP, K the number of key-value heads, D their width. Bytes:

                                   plain GPT             selective             full
    a block keeps of a token       64 C                  40 C                  4 C
        with autocast              40 C                  24 C                  4 C
    one of Llama's form            36 C + 16 F + 8 K D   16 C + 8 F + 8 K D    4 C
        with autocast              32 C + 8 F + 4 K D    12 C + 4 F + 4 K D    4 C
    head and loss keep of a token  4 V, in N chunks 4 V / N
    parameters, gradients, AdamW   16 P, whatever is chosen

Small things come on top (docs/production.md). full runs a second forward, selective its cheap
operations. Whatever M is, each of dp ranks sends 2 (dp-1)/dp * 4 P bytes.

Micikevicius 2018, arXiv:1710.03740, section 3. Chen 2016, arXiv:1604.06174, section 4. Korthikanti
2022, arXiv:2205.05198, section 5: Megatron's selective makes attention again, ours keeps it.
At work: torch.amp, torch.utils.checkpoint, linear_cross_entropy, part 4 below.
Not for: weights of two dtypes; blocks that only some ranks use; fp16 with zero.py, which refuses
it. What is checkpointed may not change its arguments in place. With full it runs twice: it may not
count its calls (BatchNorm), call autograd.grad or own a random generator.
    torchrun --standalone --nproc_per_node=2 amp_accum_ckpt.py --amp bf16 --accum 2 --ckpt full
"""
import weakref
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

# imports of parts 1 and 2 end here; the rest is for parts 3 to 5
import math
import shutil
import sys
from contextlib import nullcontext

from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from common import loss_sum, share

# ---- 1. the idea -------------------------------------------------------------

# Fewer tensors: a block, without dropout, keeps its input alone. Backward runs it again.


def recompute(block):
    forward = block.forward
    trained = [p for p in block.parameters() if p.requires_grad]
    block.forward = lambda x: Recompute.apply(forward, x, *trained)


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x, *parameters):
        on = torch.is_autocast_enabled(x.device.type)
        ctx.autocast = torch.autocast(x.device.type, enabled=on)  # with the dtype that is in force
        ctx.run = run
        ctx.save_for_backward(x, *parameters)
        return run(x)  # in a Function gradients are off: nothing within is kept

    @staticmethod
    def backward(ctx, dy):
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), ctx.autocast:  # as in forward; else in fp32, and nothing raises
            y = ctx.run(x)
        return None, *torch.autograd.grad(y, (x, *parameters), dy)


# Fewer sequences: one micro-batch after the other.


def accumulate(part_of_loss, microbatches, scale=None):
    """-> this rank's part of the loss. Gradients add up in p.grad, `scale` times as large."""
    loss = 0.0
    for microbatch in microbatches:
        part = part_of_loss(*microbatch)
        part.backward(scale)  # frees what has been kept
        loss = loss + part.detach()
    return loss


# Narrower numbers: bf16 wants no more than autocast. fp16 has none between 0 and 6e-8: gradients
# are scaled up, from the loss on, as far as nothing overflows.


class LossScaler:
    def __init__(self, device, scale=65536.0, good_steps=0):
        self.scale = torch.tensor(scale, device=device)
        self.good_steps = good_steps  # since the last overflow

    def step(self, optimizer, norm):
        if norm.isfinite():
            optimizer.step()
            self.good_steps += 1
            if self.good_steps % 2000 == 0:
                self.scale = self.scale * 2
        else:  # something has overflowed: this step is left out
            self.scale = self.scale / 2
            self.good_steps = 0


def idea_step(model, optimizer, x, y, valid, clip, accum, autocast, scaler):
    """x, y: this rank's rows (B/dp, T); valid: targets of all ranks' rows. scaler: a LossScaler,
    or for fp32 and bf16 a NoScaler (part 3)."""

    def part_of_loss(x, y):  # over all targets of the step: a mean of means would be another loss
        with autocast():
            return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / valid

    optimizer.zero_grad()
    microbatches = zip(x.tensor_split(accum), y.tensor_split(accum))
    loss = accumulate(part_of_loss, microbatches, scaler.scale)
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        dist.all_reduce(p.grad)  # partial -> replicated
        p.grad /= scaler.scale
    norm = nn.utils.clip_grad_norm_(trained, clip)
    scaler.step(optimizer, norm)
    return loss, norm


# ---- 2. the technique (copy this; it needs only torch) -----------------------

# What it adds to the idea, and what each addition buys. Figures: the toy, 1 rank; calls: 2.
#     sum_over_ranks    68 calls -> 1
#     full              any arguments, dropout, one checkpoint in another; the last matmul of a
#                       block does not run twice: peak 24.5 -> 23.9 MB (none 48.0)
#     selective         no matmul and no collective runs twice: kept 35.8 -> 23.2 MB
#     FusedLossScaler   on a GPU the host does not wait for the norm
#     loss_in_chunks    V = 128,256, one layer: 8 chunks keep 535 -> 75 MB


def sum_over_ranks(parameters, group=None):
    """One sum for all gradients, after the last micro-batch; takes 4 P bytes for a moment.

    All ranks have begun alike. With ddp.py, whose sums hide behind backward, leave it out.
    """
    trained = [p for p in parameters if p.grad is not None]
    flat = torch.cat([p.grad.flatten() for p in trained])
    dist.all_reduce(flat, group=group)  # partial -> replicated
    for p, part in zip(trained, flat.split([p.numel() for p in trained])):
        p.grad = part.view_as(p)  # a piece of flat: nothing is copied back


# ---- full: recompute, for any forward

# The idea makes one node of a block. full leaves autograd's graph as it is, and changes what the
# graph keeps: autograd hands each tensor that backward will want to a pair of hooks, keeps what
# pack(tensor) returns, and has unpack() make the tensor of it again. Of nested pairs autograd calls
# the innermost alone, so a checkpoint hands what it keeps itself to the pair around it.


def hooks_around():
    """-> pack, unpack: save_on_cpu's, another checkpoint's; without any, what autograd does."""
    pair = torch._C._autograd._top_saved_tensors_default_hooks(False)  # torch has no public way
    return pair or (pack_checked, unpack_checked)


def pack_checked(tensor):
    """Without its graph: softmax keeps its own result, and so would keep itself alive."""
    return tensor.detach(), tensor._version  # which counts changes in place


def unpack_checked(packed):
    tensor, version = packed
    assert tensor._version == version, "changed in place, but backward needs what it was"
    return tensor


class Kept:
    """A tensor that a checkpoint keeps, in the care of the hooks around it."""

    def __init__(self, tensor, hooks):
        pack, self.unpack = hooks
        self.packed = pack(tensor)
        self.requires_grad = tensor.requires_grad

    def restore(self):
        tensor = self.unpack(self.packed)
        return tensor.detach().requires_grad_(self.requires_grad)  # as forward had it


# torch.compile leaves these alone: it might compile one run of forward and not the other, and the
# two would keep different tensors.
eager = torch.compiler.disable


@eager
def full(forward, *inputs, **keywords):
    """forward(*inputs, **keywords), of which nothing is kept but the inputs (Chen 4).

    The graph has a Slot in the place of each tensor. When backward wants the first of them, forward
    runs again, with the same random numbers and autocast, and fills all slots. It stops when the
    last is full: this is the last matmul's input, so neither that matmul nor an all-reduce behind
    it runs twice. Other collectives do, on all ranks alike.
    """
    if not torch.is_grad_enabled():
        return forward(*inputs, **keywords)
    rerun = Rerun(forward, inputs, keywords)
    with saved_tensors_hooks(rerun.pack, rerun.unpack):
        return forward(*inputs, **keywords)


class Slot:
    """What the graph holds in the place of a tensor, as long as backward may want it."""

    made = None  # a Kept, when forward has run again


class Enough(BaseException):  # not an Exception: forward might catch those
    """The second run of forward has filled all slots."""


class Rerun:
    """A call of forward under `full`, and how to repeat it."""

    def __init__(self, forward, inputs, keywords):
        tensors = [x for x in (*inputs, *keywords.values()) if torch.is_tensor(x)]
        device = tensors[0].device.type
        self.autocast = torch.autocast(device, enabled=torch.is_autocast_enabled(device))
        self.forward = forward
        self.keywords = keywords  # held as they are: no hooks, and no check for changes
        hooks = hooks_around()
        self.inputs = [Kept(x, hooks) if torch.is_tensor(x) else x for x in inputs]
        self.states = random_states()
        self.slots = []  # (shape of the tensor, weak reference: a slot lives as long as the graph)

    def pack(self, tensor):
        slot = Slot()
        self.slots.append((tensor.shape, weakref.ref(slot)))
        return slot

    def unpack(self, slot):
        if slot.made is None:
            self.repeat()
        return slot.made.restore()

    @eager
    def repeat(self):
        hooks = hooks_around()
        empty = self.slots[::-1]

        @eager
        def fill(tensor):  # the pack of this run
            shape, reference = empty.pop()
            assert tensor.shape == shape, "forward made others when it ran again"
            slot = reference()
            if slot is not None:
                slot.made = Kept(tensor.detach(), hooks)  # without this run's graph
            if not empty:
                raise Enough

        filling = saved_tensors_hooks(fill, restored)  # this run has no backward: no unpack
        inputs = [restored(x) for x in self.inputs]
        before = random_states()
        set_random_states(*self.states)
        # Backward runs with gradients off, but autograd calls hooks only with gradients on.
        with suppress(Enough), torch.enable_grad(), self.autocast, filling:
            self.forward(*inputs, **self.keywords)
        set_random_states(*before)
        assert not empty, "forward made fewer when it ran again"


def random_states():
    """The states of the random numbers of the CPU and, if one is in use, of the GPU."""
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), gpu


def set_random_states(cpu, gpu):
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)


# ---- selective: the results of cheap operations alone are made again

aten = torch.ops.aten
CHEAP = {
    aten.native_layer_norm.default, aten._fused_rms_norm.default, aten.mul.Tensor,
    aten.gelu.default, aten.silu.default,
    aten._to_copy.default,  # autocast's copies of activations and weights
    aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int,
    aten.unsqueeze.default, aten.expand.default, aten.clone.default, aten.detach.default,
}


class Recipe:
    """How to make a tensor again: a cheap operation, and what it was given."""

    def __init__(self, op, inputs, keywords):
        self.op = op
        self.inputs = inputs  # once kept: a Kept or Recipe in the place of each tensor
        self.keywords = keywords
        self.read = [(x, x._version) for x in inputs if torch.is_tensor(x)]  # as op read them
        self.result = None  # made once: q, k and v all ask for the result of a norm

    def restore(self):
        if self.result is None:
            inputs = [restored(x) for x in self.inputs]
            self.result = main_output(self.op(*inputs, **self.keywords))
        return self.result


def restored(x):  # what never was a tensor stays as it is
    return x.restore() if isinstance(x, (Kept, Recipe)) else x


def main_output(outputs):  # norms return their statistics besides
    return outputs[0] if isinstance(outputs, tuple) else outputs


class WriteRecipes(TorchDispatchMode):
    """Sees every operation, and gives the results of cheap ones a recipe."""

    def __torch_dispatch__(self, op, types, inputs=(), keywords=None):
        keywords = keywords or {}
        outputs = op(*inputs, **keywords)
        # Not within autograd Functions, whose collectives write into tensors unseen by _version.
        if op in CHEAP and torch.is_grad_enabled():
            main_output(outputs).recipe = Recipe(op, inputs, keywords)
        return outputs


def pack_or_recipe(x, hooks):
    """-> what is kept of x: its recipe, or a Kept if that is missing or out of date."""
    recipe = getattr(x, "recipe", None)
    if recipe is None or x._version > 0 or any(y._version > then for y, then in recipe.read):
        return Kept(x, hooks)  # x or what the recipe has read was changed in place
    recipe.inputs = [pack_or_recipe(y, hooks) if torch.is_tensor(y) else y for y in recipe.inputs]
    recipe.read = []  # compared once, they need not stay alive
    return recipe


def selective(forward, *inputs, **keywords):
    """forward(*inputs, **keywords), of which no result of a CHEAP operation is kept (Chen 4.2).

    Backward makes these again from what is kept: the results of matmuls, attention, additions, sums
    over ranks. forward does not run again. Compiled, it runs uncompiled under a TorchDispatchMode.
    """
    pack = partial(pack_or_recipe, hooks=hooks_around())
    with saved_tensors_hooks(pack, restored), WriteRecipes():
        return forward(*inputs, **keywords)


# ---- narrower numbers, without waiting

# Autocast copies fp32 weights to 2 bytes in each forward. bf16 weights save copies and half of the
# gradients; but to their 8 bits a step of less than 1/512 adds nothing: the optimizer steps fp32
# masters, as in zero.py. In FP8 matmuls read 1 byte a number, with a scale for each tensor.


class FusedLossScaler(LossScaler):
    """Nobody reads the norm: a fused optimizer skips the step by itself (Micikevicius 3.2).

    loss = accumulate(part_of_loss, microbatches, scaler.scale)
    scaler.unscale(model.parameters())
    norm = clip_grad_norm_(model.parameters(), 1.0)  # of all ranks' gradients: all skip, or none
    scaler.step(optimizer, norm)
    """

    interval = 2000  # so many good steps in turn double the scale

    def unscale(self, parameters):
        for p in parameters:
            if p.grad is not None:
                p.grad /= self.scale

    def step(self, optimizer, norm):
        assert optimizer.defaults.get("fused"), "take fused=True: other optimizers skip no step"
        overflow = norm.isfinite().logical_not()
        optimizer.found_inf = overflow.float()  # which fused optimizers look at
        optimizer.step()
        del optimizer.found_inf  # else a later step without this scaler would skip, too
        good_steps = torch.where(overflow, 0, self.good_steps + 1)
        doubles = good_steps >= self.interval
        factor = torch.where(overflow, 0.5, torch.where(doubles, 2.0, 1.0))
        self.scale = (self.scale * factor).clamp(1.0, 2.0 ** 100)  # 0 and inf would never change
        self.good_steps = torch.where(doubles, 0, good_steps)


# ---- a large vocabulary


def loss_in_chunks(loss_of, x, y, chunks):
    """-> the sum of loss_of(x, y), head and loss in one, over chunks of the tokens.

    Only x is kept, (B, T, C); backward makes a chunk's logits again, one more matmul.
    """
    loss = 0.0
    for some_x, some_y in zip(x.flatten(0, 1).chunk(chunks), y.flatten().chunk(chunks)):
        loss = loss + full(loss_of, some_x, some_y)  # some_x: (B T / chunks, C)
    return loss


# ---- 3. the toy GPT, parallelized --------------------------------------------

CHECKPOINT = {"none": None, "full": full, "selective": selective}


def parallelize(model, checkpointing=None, loss_chunks=1):
    """checkpointing: full or selective; None keeps everything."""
    if checkpointing is not None:
        for block in model.blocks:
            block.forward = partial(checkpointing, block.forward)
    if loss_chunks > 1:
        model.head.forward = lambda x: x  # in_chunks() has the head
    return model


def in_chunks(weight, chunks, x, y):
    """As loss_sum, with the head's weight in it. x: what the head reads."""
    return loss_in_chunks(lambda x, y: loss_sum(F.linear(x, weight), y), x, y, chunks)


class NoScaler(LossScaler):
    """For fp32 and bf16."""

    def unscale(self, parameters):
        pass

    def step(self, optimizer, norm):
        optimizer.step()


def train_step(model, optimizer, x, y, valid, clip, accum, scaler, losses):
    """x, y: this rank's rows; valid: the whole batch's targets. losses(x, y) -> their sum.

    -> this rank's part of the loss, norm of the gradients
    """
    optimizer.zero_grad()
    microbatches = zip(x.tensor_split(accum), y.tensor_split(accum))
    loss = accumulate(lambda x, y: losses(x, y) / valid, microbatches, scaler.scale)
    sum_over_ranks(model.parameters())
    scaler.unscale(model.parameters())
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer, norm)
    return loss, norm


# ---- 4. at work: the same with torch's own API -------------------------------

MATMULS_AND_ATTENTION = [
    aten.mm.default, aten.addmm.default, aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]
full_at_work = partial(checkpoint, use_reentrant=False)
keep_matmuls = partial(create_selective_checkpoint_contexts, MATMULS_AND_ATTENTION)
selective_at_work = partial(full_at_work, context_fn=keep_matmuls)
CHECKPOINT_AT_WORK = {"none": None, "full": full_at_work, "selective": selective_at_work}


def in_chunks_at_work(weight, chunks, x, y):
    rows = math.ceil(y.numel() / chunks)
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=rows, chunking_method=None)
    x = x.flatten(0, 1)
    return F.linear_cross_entropy(x, weight, y.flatten(), reduction="sum", options=options)


def train_step_at_work(model, optimizer, x, y, valid, clip, accum, scaler, losses):
    ranks = dist.get_world_size()
    optimizer.zero_grad()
    loss = 0.0
    microbatches = zip(x.tensor_split(accum), y.tensor_split(accum))
    for i, (inputs, targets) in enumerate(microbatches):
        only_adds_up = ranks > 1 and i < accum - 1  # DDP does not communicate then
        with model.no_sync() if only_adds_up else nullcontext():
            part = losses(inputs, targets) / valid
            scaler.scale(part * ranks).backward()  # DDP averages; the sum is wanted
        loss = loss + part.detach()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    return loss, norm


# ---- 5. run ------------------------------------------------------------------

AMP = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLAGS = {
    "--amp": dict(default="off", choices=tuple(AMP), course=True, help="autocast to"),
    "--accum": dict(type=int, default=1, least=1, metavar="M", help="micro-batches"),
    "--ckpt": dict(default="none", choices=tuple(CHECKPOINT), help="keep less for backward"),
    "--loss-chunks": dict(type=int, default=1, least=1, help="logits of 1/N of the tokens"),
    "--compile": dict(action="store_true", help="blocks; our --ckpt selective undoes it"),
}
# flags with which the file is worth running
VARIANTS = ("", "--accum 2", "--ckpt full", "--ckpt selective", "--loss-chunks 4")


def make_scaler(run, impl):
    """-> the scaler, which goes on where a resumed run has ended."""
    fp16 = run.args.amp == "fp16"
    saved = run.start.extra
    if impl == "torch":
        scaler = torch.amp.GradScaler(run.device.type, enabled=fp16)
        scaler.load_state_dict({**scaler.state_dict(), **saved})
        return scaler
    if not fp16:
        return NoScaler(run.device, 1.0)
    kind = LossScaler if impl == "idea" else FusedLossScaler
    return kind(run.device, saved.get("scale", 65536.0), saved.get("_growth_tracker", 0))


def state_of(scaler):
    """-> what --save writes besides, by GradScaler's names."""
    if isinstance(scaler, LossScaler):
        return {"scale": float(scaler.scale), "_growth_tracker": int(scaler.good_steps)}
    return scaler.state_dict()


def set_up(run, impl):
    args = run.args
    model = run.build()
    optimizer = run.optimizer(model.named_parameters())
    autocast = partial(torch.autocast, run.device.type, AMP[args.amp], enabled=args.amp != "off")
    scaler = make_scaler(run, impl)
    loss_of = loss_sum
    if args.loss_chunks > 1:
        how = in_chunks_at_work if impl == "torch" else in_chunks
        loss_of = partial(how, model.head.weight, args.loss_chunks)
    if args.compile:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)

    def losses(x, y):
        with autocast():
            return loss_of(model(x), y)

    step = partial(train_step, losses=losses)
    if impl == "idea":
        step = partial(idea_step, autocast=autocast)
        if args.ckpt == "full":
            for block in model.blocks:
                recompute(block)
    elif impl == "torch":
        step = partial(train_step_at_work, losses=losses)
        model = parallelize(model, CHECKPOINT_AT_WORK[args.ckpt], args.loss_chunks)
        if run.world_size > 1:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        model = parallelize(model, CHECKPOINT[args.ckpt], args.loss_chunks)
    fp16 = args.amp == "fp16"
    return run.side(
        model, optimizer, partial(step, accum=args.accum, scaler=scaler), evaluate=losses,
        may_overflow=fp16, extra=partial(state_of, scaler) if fp16 else None)


def textbook(run, parameters):
    dp = run.world_size
    size = run.dtype.itemsize * sum(p.numel() for p in parameters)  # b P
    return [
        ("wire all_reduce", "2 (dp-1)/dp b P", 2 * (dp - 1) / dp * size),
        ("held parameters", "b P", size),
        ("held gradients", "b P", size),
        ("held optimizer", "2 b P + 4 per tensor (step counter)", 2 * size + 4 * len(parameters)),
    ]


def main():
    from harness.flags import arguments, require  # not above: imported without harness/
    from harness.run import Run

    args = arguments(__doc__, FLAGS)
    n = args.world_size
    require(args.batch >= n * args.accum,
            f"--batch {args.batch}: fewer than {n} ranks x --accum {args.accum}")
    require(args.dtype == "fp32" or (args.dtype == "fp64" and args.amp == "off"),
            f"--dtype {args.dtype} --amp {args.amp}: take fp32, or fp64 with --amp off")
    require(args.amp != "fp16" or args.optimizer == "adamw",
            f"--amp fp16 --optimizer {args.optimizer}: the scaler skips steps of AdamW alone")
    in_idea = args.ckpt != "selective" and args.loss_chunks == 1
    require(in_idea or args.impl not in ("idea", "all"),
            f"--impl {args.impl}: the idea has no --ckpt selective and no --loss-chunks")
    has_torch = args.impl in ("torch", "both", "all")
    require(not has_torch or args.loss_chunks == 1 or hasattr(F, "linear_cross_entropy"),
            f"--impl {args.impl} --loss-chunks: torch has linear_cross_entropy since 2.13")
    require(not args.compile or shutil.which("c++"), "--compile needs c++")
    require(not has_torch or not args.dry_run,
            "--dry-run needs --impl scratch or idea: torch's C++ reducer wants real ranks")
    require(not args.dry_run or args.impl != "idea" or args.amp != "fp16",
            "--dry-run has no values: the idea's fp16 asks whether the norm is finite")
    with Run(args) as run:
        sides = {impl: set_up(run, impl) for impl in run.impls}
        run.train(sides, rows=share(args.batch, run.world_size, run.rank))
        run.textbook(textbook(run, list(sides[run.impls[0]].model.parameters())))
        # with autocast only losses are judged, to 2%
        return run.finish(judged_as=args.dtype if args.amp == "off" else "bf16")


if __name__ == "__main__":
    sys.exit(main())
