"""One device's memory: activation checkpointing, gradient accumulation, mixed precision.

    --ckpt none       keeps x0 [all that block 0 made ] x1 [all that block 1 made ] .. x [logits]
    --ckpt selective  keeps x0 [matmuls, attention, + ] x1 [matmuls, attention, + ] .. x [logits]
    --ckpt full       keeps x0                          x1                          .. x [logits]
    --loss-chunks N   each of these without the logits
    (what is not kept is made again in backward)
    --accum M         M micro-batches in turn: gradients add up, and ranks communicate once
    --amp bf16|fp16   matmuls and attention in 2 bytes a number; weights, gradients, loss in 4

    for block in model.blocks:
        block.forward = partial(full, block.forward)  # or selective
    optimizer.zero_grad()
    for inputs, targets in zip(x.chunk(2), y.chunk(2)):  # micro-batches
        with torch.autocast("cuda", torch.bfloat16):  # float16 wants a scaler besides: train_step
            loss = loss_sum(model(inputs), targets) / valid  # targets of all ranks' batches
        loss.backward()
    sum_gradients(model.parameters())  # of ranks that have begun alike: ddp.py's begin_alike
    clip_and_step(model.parameters(), optimizer, 1.0, scaler=None)  # zero.py, fsdp.py: their own

Bytes on a CPU (CUDA's RMSNorm keeps less). P parameters, V words, C width; Llama's form: F width of
the MLP, K key-value heads, D their width:

                                   plain GPT             selective             full
    a block keeps of a token       64 C                  40 C                  4 C
        with autocast              40 C                  24 C                  4 C
    one of Llama's form            36 C + 16 F + 8 K D   16 C + 8 F + 8 K D    4 C
        with autocast              32 C + 8 F + 4 K D    12 C + 4 F + 4 K D    4 C
    parameters, gradients, AdamW   16 P                  16 P                  16 P

The loss keeps 4 V of a token; with --loss-chunks N x alone, and 4 V / N in backward. Without --ckpt
autocast keeps a block's weights in 2 bytes, too. In backward full runs a block's forward again,
selective only its cheap operations. Each of dp ranks sends 2 (dp-1)/dp * 4 P bytes, whatever M is.

Micikevicius 2018, arXiv:1710.03740, section 3. Chen 2016, arXiv:1604.06174, section 4. Korthikanti
2022, arXiv:2205.05198, section 5: Megatron's selective makes attention again, ours keeps it.
At work: torch.amp, torch.utils.checkpoint, linear_cross_entropy, part 4 below.
Not for: weights of two dtypes; fp16 with zero.py (but see its step()); checkpointed forwards that
change their arguments in place, and more under full, see there.
    torchrun --standalone --nproc_per_node=2 amp_accum_ckpt.py --amp bf16 --accum 2 --ckpt full
"""
from contextlib import suppress
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

# imports of parts 1 and 2 end here; the rest is for parts 3 to 5
import math
import shutil
import sys
from contextlib import nullcontext

from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from common import loss_sum, share

# ---- 1. the idea -------------------------------------------------------------

# Activation checkpointing: a block keeps its input alone, and backward runs the block again.


def recompute(block):  # freeze before; no dropout; forward takes a tensor, uses all parameters
    trained = [p for p in block.parameters() if p.requires_grad]
    block.forward = partial(Recompute.apply, block.forward, *trained)  # gradients go to arguments


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, *parameters_and_x):
        x = parameters_and_x[-1]
        ctx.run = run
        on = torch.is_autocast_enabled(x.device.type)
        ctx.autocast = torch.autocast(x.device.type, enabled=on)  # of the dtype in force now
        ctx.save_for_backward(*parameters_and_x)
        return run(x)  # in a Function gradients are off: nothing within is kept

    @staticmethod
    def backward(ctx, dy):
        *parameters, x = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), ctx.autocast:  # without autocast it would silently be in fp32
            y = ctx.run(x)
        return None, *torch.autograd.grad(y, (*parameters, x), dy)  # run has none


# Accumulation: gradients add up over micro-batches. Mixed precision is autocast.


def idea_step(model, optimizer, inputs, targets, valid, clip, accum, dtype, scaler):
    """inputs, targets (B/dp, T); valid: all ranks'; dtype: autocast's or None; scaler: of fp16."""
    optimizer.zero_grad()
    loss = 0.0  # of this rank
    for x, y in zip(inputs.tensor_split(accum), targets.tensor_split(accum)):  # micro-batches
        with torch.autocast(x.device.type, dtype, enabled=dtype is not None):
            part = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / valid
        part.backward(scaler.scale if scaler else None)  # as (scale * part).backward()
        loss = loss + part.detach()
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        dist.all_reduce(p.grad)  # partial -> replicated
    return loss, clip_and_step(trained, optimizer, clip, scaler)


def clip_and_step(parameters, optimizer, clip, scaler):  # clip: math.inf for none
    trained = [p for p in parameters if p.grad is not None]
    if scaler:
        for p in trained:
            p.grad /= scaler.scale
    norm = nn.utils.clip_grad_norm_(trained, clip)  # before it is clipped
    if scaler:
        scaler.step(optimizer, norm)
    else:
        optimizer.step()
    return norm


# fp16 has nothing between 0 and 6e-8, so gradients are scaled up by a factor that is tried out.


class LossScaler:
    interval = 2000  # after so many steps without an overflow the scale doubles

    def __init__(self, device, scale=65536.0, good_steps=0):
        self.scale = torch.tensor(scale, device=device)
        self.good_steps = good_steps  # since the last overflow

    def step(self, optimizer, norm):
        if norm.isfinite():
            optimizer.step()
            self.good_steps += 1
            if self.good_steps % self.interval == 0:
                self.scale = self.scale * 2
        else:  # something has overflowed: this step is left out
            self.scale = self.scale / 2
            self.good_steps = 0


# ---- 2. the technique (copy this; of part 1 it takes clip_and_step, LossScaler)

# What it adds to the idea, and what each addition buys. If nothing else is said: the toy, 1 rank.
#     sum_gradients     on 2 ranks 68 calls -> 1
#     full              more arguments, dropout, a checkpoint within another; the last matmul of a
#                       block does not run twice: peak 24.5 -> 23.9 MB (no checkpoint: 48.0)
#     selective         no matmul and no collective runs twice: kept 35.8 -> 23.2 MB
#     loss_in_chunks    V = 128,256, one layer: with 8 chunks 535 -> 75 MB kept at most
#     FusedLossScaler   on a GPU the host does not wait for the norm


def sum_gradients(parameters, group=None):
    """One all-reduce for all gradients, of which it makes a second copy meanwhile, after the last
    micro-batch. All ranks must have begun with the same weights. With ddp.py, whose sums hide
    behind backward, leave it out, and put all backwards but the last into its no_sync(). What no
    rank has used gets gradients of 0."""
    trained = [p for p in parameters if p.requires_grad]
    assert not any(hasattr(p, "is_sharded") for p in trained), "FSDP has summed: leave this out"
    for p in trained:
        if p.grad is None:  # not used by this rank's rows; the others wait for its summand
            p.grad = torch.zeros_like(p)
    flat = torch.cat([p.grad.flatten() for p in trained])
    dist.all_reduce(flat, group=group)  # partial -> replicated
    for p, part in zip(trained, flat.split([p.numel() for p in trained])):
        p.grad.copy_(part.view_as(p))


# ---- what a checkpoint keeps

# The idea makes one node of a block. Here the graph stays as autograd makes it, of any forward, but
# keeps less: autograd hands each tensor that backward will want to a pair of hooks. The graph keeps
# what pack(tensor) returns, and unpack() has to make the tensor of it again.


def keeper():
    """-> keep(x), of a tensor or what else forward is called with -> a function that returns it.

    Of nested pairs of hooks autograd calls the innermost alone. So what a checkpoint keeps it hands
    to the pair around it: another checkpoint's, save_on_cpu's.
    """
    around = torch._C._autograd._top_saved_tensors_default_hooks(False)  # torch has no public way
    pack, unpack = around or (pack_checked, unpack_checked)

    def keep(x):
        if not torch.is_tensor(x):
            return lambda: x
        with torch.no_grad():  # as autograd calls it
            packed = pack(x)
        requires_grad = x.requires_grad
        return lambda: unpack(packed).detach().requires_grad_(requires_grad)

    return keep


def pack_checked(tensor):  # these two are what autograd does where there is no pair
    """Detached: else softmax's node, which keeps its result, would keep itself."""
    return tensor.detach(), tensor._version  # _version counts changes in place


def unpack_checked(packed):
    tensor, version = packed
    assert tensor._version == version, "changed in place, but backward needs what it was"
    return tensor


# ---- full: recompute, for any forward

# torch.compile leaves these alone: it might compile one run of forward and not the other, and the
# two would keep different tensors.
eager = torch.compiler.disable


@eager
def full(forward, *inputs, **keywords):
    """forward(*inputs, **keywords), of which nothing is kept but the inputs (Chen 4).

        forward      up(x) -> h, gelu(h) -> g, down(g) -> y    slots for x, h, g (and weights)
        backward     down's wants g: forward runs again, fills x, h and g, and stops before down
                     gelu's wants h, up's wants x: they are there

    The second run has the same random numbers and autocast, and stops when the last slot is full:
    a last matmul, and an all-reduce behind it, do not run twice, unless dropout or a norm follows.
    Other collectives do, on all ranks alike.

    So forward may not count its calls (BatchNorm), fill a cache (of transformers' models take
    use_cache=False), call autograd.grad or own a random generator, and weights may not change
    before its backward.
    """
    if not torch.is_grad_enabled():
        return forward(*inputs, **keywords)
    rerun = Rerun(forward, inputs, keywords)
    with saved_tensors_hooks(rerun.pack, rerun.unpack):
        return forward(*inputs, **keywords)


class Slot:
    """What the graph holds in the place of a tensor."""

    def __init__(self, tensor):
        self.kind = tensor.shape, tensor.dtype
        self.again = None  # a function that returns it, when forward has run again


class Enough(BaseException):  # not an Exception: forward might catch those
    """The second run of forward has filled all slots."""


class Rerun:
    """A call of forward under `full`, and how to repeat it."""

    def __init__(self, forward, inputs, keywords):
        self.forward = forward
        self.inputs = tree_map(keeper(), (inputs, keywords))  # also those within tuples, ..
        devices = [x.device.type for x in tree_leaves((inputs, keywords)) if torch.is_tensor(x)]
        device = next((device for device in devices if device != "cpu"), "cpu")
        self.autocast = torch.autocast(device, enabled=torch.is_autocast_enabled(device))
        self.cpu_state = torch.get_rng_state()
        self.gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        self.gpu_states = [torch.cuda.get_rng_state(gpu) for gpu in self.gpus]
        self.slots = []  # those to be filled, in the order of forward

    def pack(self, tensor):
        slot = Slot(tensor)
        self.slots.append(slot)
        return slot

    def unpack(self, slot):
        if slot.again is None:
            self.repeat()
        return slot.again()

    @eager
    def repeat(self):
        inputs, keywords = tree_map(lambda again: again(), self.inputs)
        # the second run's graph is thrown away: this unpack is never called
        filling = saved_tensors_hooks(partial(self.fill, keeper()), self.unpack)
        rng = torch.random.fork_rng(self.gpus)
        # in backward gradients are off, but only with gradients on autograd saves tensors
        with suppress(Enough), torch.enable_grad(), self.autocast, rng, filling:
            torch.set_rng_state(self.cpu_state)
            for gpu, state in zip(self.gpus, self.gpu_states):
                torch.cuda.set_rng_state(state, gpu)
            self.forward(*inputs, **keywords)
        assert not self.slots, "forward saved fewer tensors when it ran again"

    @eager
    def fill(self, keep, tensor):
        """The pack of the second run."""
        slot = self.slots.pop(0)  # from now on the graph alone has it, which frees it after use
        assert (tensor.shape, tensor.dtype) == slot.kind, (
            "forward saved other tensors when it ran again: has it a cache, a counter?")
        slot.again = keep(tensor.detach())
        if not self.slots:
            raise Enough


# ---- selective: the results of cheap operations alone are made again

aten = torch.ops.aten
# Add the cheap operations of your model: results of what is not named are kept. Such as make one
# tensor of tensors (no list of them, as split and cat), without random numbers (no dropout). A
# norm that is written by hand, as transformers', wants aten.pow.Tensor_Scalar, mean.dim, rsqrt.
CHEAP = {
    aten.native_layer_norm.default, aten._fused_rms_norm.default, aten.mul.Tensor,
    aten.gelu.default, aten.silu.default,
    aten._to_copy.default,  # autocast's copies of activations and weights
    aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int,
    aten.unsqueeze.default, aten.expand.default, aten.clone.default, aten.detach.default,
}
# Collectives that write in place, which _version does not count.
IN_PLACE = {torch.ops.c10d.allreduce_.default, torch.ops.c10d.broadcast_.default}


@eager
def selective(forward, *inputs, **keywords):
    """forward(*inputs, **keywords), of which no result of a CHEAP operation is kept (Chen 4.2).

        forward      up(x) -> h, gelu(h) -> g, down(g) -> y    h is kept, and g's recipe: gelu of h
        backward     down's wants g: gelu(h) runs again

    Kept are the results of matmuls, attention, additions, sums over ranks; backward makes the cheap
    ones again from them, so what is kept may not be changed in place later. forward does not run
    again. If it is compiled, torch runs it uncompiled here: Recipes has to see its operations.
    """
    if not torch.is_grad_enabled():
        return forward(*inputs, **keywords)
    recipes = Recipes()
    with saved_tensors_hooks(recipes.pack, lambda again: again()), recipes:
        return forward(*inputs, **keywords)


class Recipes(TorchDispatchMode):
    """Sees every operation of forward, and notes of what the results of cheap ones are made."""

    def __init__(self):
        super().__init__()
        self.keep = keeper()
        # both forget a result when nobody has it any more
        self.recipes = WeakTensorKeyDictionary()  # {result: (make, inputs, their versions)}
        self.again = WeakTensorKeyDictionary()  # {result whose recipe is kept: makes it again}

    def __torch_dispatch__(self, op, types, inputs=(), keywords=None):
        make = partial(op, **(keywords or {}))
        outputs = make(*inputs)
        if op in IN_PLACE:
            torch.autograd.graph.increment_version(inputs[0])
        # gradients are off within autograd Functions, where other collectives may write unseen
        if op in CHEAP and torch.is_grad_enabled():
            # autograd packs the very tensor that comes out here
            self.recipes[first(outputs)] = make, inputs, versions(inputs)
        return outputs

    def pack(self, x):
        """-> a function that returns x again: x is kept, or what it is made of."""
        if not torch.is_tensor(x) or x._version > 0:  # a recipe would make it as it was
            return self.keep(x)
        if x in self.recipes:
            make, inputs, before = self.recipes.pop(x)  # inputs need not stay alive
            if versions(inputs) == before:
                kept = [self.pack(y) for y in inputs]
                # made once, though q, k and v all ask for the result of a norm
                self.again[x] = cache(lambda: first(make(*[again() for again in kept])))
        return self.again.get(x) or self.keep(x)


def first(outputs):  # norms return their statistics besides
    return outputs[0] if isinstance(outputs, tuple) else outputs


def versions(inputs):  # some are no tensors
    return [getattr(x, "_version", 0) for x in inputs]


# ---- a large vocabulary


def loss_in_chunks(loss_of, x, y, chunks):
    """-> the sum of loss_of(x, y), head and loss in one, over chunks of the tokens.

        model.head.forward = lambda x: x  # once: the model returns x
        loss_of = lambda x, y: loss_sum(F.linear(x, model.head.weight), y)
        loss = loss_in_chunks(loss_of, model(ids), y, 8)
    Only x is kept, (B, T, C); backward makes a chunk's logits again, one more matmul. With ZeRO3
    the next forward comes after this one's backward; with FSDP, too, if each has its own.
    """
    loss = 0.0
    device = x.device.type
    # each chunk casts the weight anew: with one cast their gradients would add up in 2 bytes
    with torch.autocast(device, enabled=torch.is_autocast_enabled(device), cache_enabled=False):
        for rows, targets in zip(x.flatten(0, 1).chunk(chunks), y.flatten().chunk(chunks)):
            loss = loss + full(loss_of, rows, targets)  # rows: (B T / chunks, C)
    return loss


# ---- mixed precision, without waiting

# Autocast casts fp32 weights to 2 bytes in each forward. Weights in bf16 need no casts and have
# gradients of half the bytes, but a step of less than 1/512 of a weight would be lost: so zero.py
# and fsdp.py, not this file, step fp32 masters of them.


class FusedLossScaler(LossScaler):
    """LossScaler's `if norm.isfinite()` has the host wait for the GPU. Here a fused AdamW skips
    a step by itself, where its found_inf is 1 (Micikevicius 3.2). norm is that of all ranks'
    gradients, so that all skip, or none. To be saved: float(scale), int(good_steps).
    """

    def step(self, optimizer, norm):
        of_adam = isinstance(optimizer, torch.optim.Adam)  # AdamW, too
        assert of_adam and optimizer.defaults["fused"], "take AdamW, fused=True: it skips steps"
        overflow = norm.isfinite().logical_not()
        optimizer.found_inf = overflow.float()
        optimizer.step()
        del optimizer.found_inf  # else a later step without this scaler would skip, too
        self.good_steps = torch.where(overflow, 0, self.good_steps + 1)
        doubles = self.good_steps % self.interval == 0
        factor = torch.where(overflow, 0.5, torch.where(doubles, 2.0, 1.0))
        self.scale = (self.scale * factor).clamp(1.0, 2.0 ** 100)  # it would stay 0 or inf for ever


# ---- a step


def train_step(model, optimizer, inputs, targets, valid, clip, accum, dtype, scaler, losses):
    """As idea_step. losses(x, y) -> the sum of a micro-batch's token losses. dtype None: no
    autocast, also if there is one around."""
    optimizer.zero_grad()
    loss = 0.0
    for x, y in zip(inputs.tensor_split(accum), targets.tensor_split(accum)):
        with torch.autocast(x.device.type, dtype, enabled=dtype is not None):
            part = losses(x, y) / valid
        part.backward(scaler.scale if scaler else None)
        loss = loss + part.detach()
    sum_gradients(model.parameters())
    return loss, clip_and_step(model.parameters(), optimizer, clip, scaler)


# ---- 3. the toy GPT, parallelized --------------------------------------------

CHECKPOINT = {"none": None, "full": full, "selective": selective}


def parallelize(model, checkpointing=None, loss_chunks=1):
    """checkpointing: full or selective; None keeps everything."""
    if checkpointing is not None:
        for block in model.blocks:
            block.forward = partial(checkpointing, block.forward)
    if loss_chunks > 1:
        model.head.forward = lambda x: x  # loss_in_chunks gets its weight, see set_up
    return model


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


def parallelize_at_work(model, ckpt, loss_chunks):
    model = parallelize(model, CHECKPOINT_AT_WORK[ckpt], loss_chunks)
    if dist.get_world_size() == 1:
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def loss_in_chunks_at_work(weight, x, y, chunks):
    rows = math.ceil(y.numel() / chunks)
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=rows, chunking_method=None)
    x = x.flatten(0, 1)
    return F.linear_cross_entropy(x, weight, y.flatten(), reduction="sum", options=options)


def train_step_at_work(model, optimizer, inputs, targets, valid, clip, accum, dtype, scaler,
                       losses):
    ranks = dist.get_world_size()
    optimizer.zero_grad()
    loss = 0.0
    microbatches = zip(inputs.tensor_split(accum), targets.tensor_split(accum))
    for i, (x, y) in enumerate(microbatches):
        waits = ranks > 1 and i < accum - 1  # DDP sums over ranks in the last backward alone
        with model.no_sync() if waits else nullcontext():
            with torch.autocast(x.device.type, dtype, enabled=dtype is not None):
                part = losses(x, y) / valid
            scaler.scale(part * ranks).backward()  # DDP averages; the sum is wanted
        loss = loss + part.detach()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    return loss, norm


# ---- 5. run ------------------------------------------------------------------

AMP = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}
FLAGS = {
    "--amp": dict(default="off", choices=tuple(AMP), course=True, help="autocast to"),
    "--accum": dict(type=int, default=1, least=1, metavar="M", help="micro-batches"),
    "--ckpt": dict(default="none", choices=tuple(CHECKPOINT), help="keep less for backward"),
    "--loss-chunks": dict(type=int, default=1, least=1, help="logits of 1/N of the tokens"),
    "--compile": dict(action="store_true", help="blocks; our --ckpt selective undoes it"),
}
VARIANTS = ("", "--accum 2", "--ckpt full", "--ckpt selective", "--loss-chunks 4")  # worth running


def refuse(args, require):
    n = args.world_size
    require(args.batch >= n * args.accum,
            f"--batch {args.batch}: fewer than {n} ranks x --accum {args.accum}")
    require(args.dtype == "fp32" or (args.dtype == "fp64" and args.amp == "off"),
            f"--dtype {args.dtype} --amp {args.amp}: take fp32, or fp64 with --amp off")
    require(args.amp != "fp16" or args.optimizer == "adamw",
            f"--amp fp16 --optimizer {args.optimizer}: the scaler skips steps of AdamW alone")
    require(not args.compile or shutil.which("c++"), "--compile needs c++")
    if args.impl in ("torch", "both", "all"):
        require(not args.dry_run,
                "--dry-run needs --impl scratch or idea: torch's C++ reducer wants real ranks")
        require(args.loss_chunks == 1 or hasattr(F, "linear_cross_entropy"),
                f"--impl {args.impl} --loss-chunks: torch has linear_cross_entropy since 2.13")
    if args.impl in ("idea", "all"):
        require(args.ckpt != "selective" and args.loss_chunks == 1,
                f"--impl {args.impl}: the idea has no --ckpt selective and no --loss-chunks")
        require(not args.dry_run or args.amp != "fp16",
                "--dry-run has no values: the idea's fp16 asks whether the norm is finite")


def make_scaler(run, impl):
    """-> for fp16 a scaler that goes on as a resumed run has ended; else None, or torch's, idle."""
    fp16 = run.args.amp == "fp16"
    saved = {"scale": 65536.0, "_growth_tracker": 0, **run.start.extra}  # by GradScaler's names
    if impl == "torch":
        scaler = torch.amp.GradScaler(run.device.type, enabled=fp16)
        scaler.load_state_dict({**scaler.state_dict(), **saved})
        return scaler
    kind = LossScaler if impl == "idea" else FusedLossScaler
    return kind(run.device, saved["scale"], saved["_growth_tracker"]) if fp16 else None


def state_of(scaler):
    """-> what --save writes besides."""
    if isinstance(scaler, torch.amp.GradScaler):
        return scaler.state_dict()
    good_steps = int(scaler.good_steps % scaler.interval)  # since the scale has changed
    return {"scale": float(scaler.scale), "_growth_tracker": good_steps}


def set_up(run, impl):
    """-> a Side: the model, and how this implementation trains it."""
    args = run.args
    dtype = AMP[args.amp]
    model = run.build()
    head = model.head
    optimizer = run.optimizer(model.named_parameters())
    scaler = make_scaler(run, impl)
    if args.compile:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)
    in_chunks = partial(loss_in_chunks, lambda x, y: loss_sum(F.linear(x, head.weight), y))
    if impl == "torch":
        in_chunks = partial(loss_in_chunks_at_work, head.weight)

    def losses(x, y):
        if args.loss_chunks == 1:
            return loss_sum(model(x), y)
        return in_chunks(model(x), y, args.loss_chunks)

    if impl == "idea":
        if args.ckpt == "full":
            for block in model.blocks:
                recompute(block)
        step = idea_step
    elif impl == "scratch":
        model = parallelize(model, CHECKPOINT[args.ckpt], args.loss_chunks)
        step = partial(train_step, losses=losses)
    else:
        model = parallelize_at_work(model, args.ckpt, args.loss_chunks)
        step = partial(train_step_at_work, losses=losses)
    step = partial(step, accum=args.accum, dtype=dtype, scaler=scaler)
    evaluate = torch.autocast(run.device.type, dtype, enabled=dtype is not None)(losses)
    fp16 = args.amp == "fp16"
    extra = partial(state_of, scaler) if fp16 else dict
    return run.side(model, optimizer, step, evaluate=evaluate, extra=extra, may_overflow=fp16)


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
    refuse(args, require)
    with Run(args) as run:
        sides = {impl: set_up(run, impl) for impl in run.impls}
        run.train(sides, rows=share(args.batch, run.world_size, run.rank))
        run.textbook(textbook(run, list(sides[run.impls[0]].model.parameters())))
        # under autocast the check is that of bf16: losses alone, to 2%
        return run.finish(judged_as=args.dtype if args.amp == "off" else "bf16")


if __name__ == "__main__":
    sys.exit(main())
