"""The memory of one device, saved thrice: narrower numbers, fewer sequences, fewer tensors kept.

    --amp bf16|fp16   matmuls and attention in 2 bytes a number; weights, gradients, loss in 4
    --accum M         M micro-batches in turn: gradients add up, and ranks communicate once
    --ckpt none       keeps x0 [all that block 0 made] x1 [all that block 1 made] x2 ..
           selective  keeps x0 [matmuls, attention   ] x1 [matmuls, attention   ] x2 ..
           full       keeps x0                         x1                         x2 ..

What is not kept for backward is made again when backward wants it. With full that is one block at
a time.

    bytes kept by a block   none                          selective             full
    fp32                    t (64 C + 4 H + 16)           t (40 C + 4 H + 16)   4 C t + 5056
    autocast                t (40 C + 4 H + 16) + 24 C^2  t (24 C + 4 H + 16)   4 C t + 5056
    FLOPs done again        -                             no matmul's           t (16 C^2 + 4 T C)

Here t are the tokens of a micro-batch on this rank, and 5056 bytes are the state of the random
numbers. With full, the one block that is being made again also has its bytes of `none`. A block's
forward takes t (24 C^2 + 4 T C) FLOPs; the last matmul is not done again, as no gradient needs its
result. P parameters, gradients and AdamW states take 16 P bytes as in the plain GPT, and dp ranks
all-reduce 4 P a step.

Micikevicius 2018, "Mixed Precision Training", arXiv:1710.03740, section 3. Chen 2016, "Training
Deep Nets with Sublinear Memory Cost", arXiv:1604.06174, section 4. Korthikanti 2022, "Reducing
Activation Recomputation in Large Transformer Models", arXiv:2205.05198, section 5.
At work: torch.amp, torch.utils.checkpoint, DistributedDataParallel.no_sync (section 3).

    torchrun --standalone --nproc_per_node=2 amp_accum_ckpt.py --amp bf16 --accum 2 --ckpt full

    replicate(model, group)                         # in your own code, at the start
    block.forward = partial(full, block.forward)    # for every block, or selective
    scaler = LossScaler("cuda")                     # for fp16; else None
    loss = accumulate(part_of_loss, microbatches, scaler)     # part_of_loss(x, y) has the autocast
    norm = update(model.parameters(), optimizer, 1.0, scaler, group)
"""
import harness  # before torch, which warns where NumPy is missing

import math
import shutil
import sys
import weakref
from collections import namedtuple
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from common import (
    ANY, POSITIVE, Flag, Run, Side, adamw, arguments, loss_sum, require, share)
from harness.checkpoint import pieces_of

# ---- 1. the technique (copy this; it needs only torch) -----------------------
# Autograd hands every tensor that it keeps for backward to a pair of hooks: pack takes it, and
# unpack must give it back. They decide what is kept, and what is made again.


def keep_as_is(tensor):
    return tensor


def outer_hooks():
    """The pair that stands around the caller's: save_on_cpu's, another checkpoint's, or none.

    Autograd calls only the innermost pair, which hands on to the outer one what it keeps.
    """
    # False: while torch.compile traces, report no pair, since autograd calls none then either
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks or (keep_as_is, keep_as_is)


class Kept:
    """A tensor that is kept, by the hooks that stand around those of a checkpoint."""

    def __init__(self, tensor, hooks):
        pack, self.unpack = hooks
        self.version = tensor._version  # grows with every change in place
        if tensor.requires_grad:
            tensor = tensor.detach()  # or it would keep the graph behind it
        self.itself = weakref.ref(tensor)  # None as soon as the hooks keep only a copy
        self.packed = pack(tensor)

    def get(self):
        tensor = self.unpack(self.packed)
        if tensor is self.itself() and tensor._version > self.version:
            raise RuntimeError("a tensor that backward needs has been changed in place: checkpoint "
                               "less, or take the operation that is not in place")
        return tensor


class Input(Kept):
    """A tensor that a checkpointed forward was called with."""

    def __init__(self, tensor, hooks):
        super().__init__(tensor, hooks)
        self.requires_grad = tensor.requires_grad

    def cut_off(self):
        """The tensor without the graph behind it, for a second forward."""
        return self.get().detach().requires_grad_(self.requires_grad)


def device_of(tensors):
    """The GPU that forward works on, or else the CPU."""
    for tensor in tensors:
        if tensor.is_cuda:
            return tensor.device
    if torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def random_states(device):
    """The states of the random numbers of the CPU, and of the device if it is a GPU."""
    states = [torch.get_rng_state()]
    if device.type == "cuda" and torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state(device))
    elif device.type == "cuda":
        states.append(torch.empty(16, dtype=torch.uint8))  # a dry run's, of a real one's size
    return states


def set_random_states(states, device):
    torch.set_rng_state(states[0])
    if device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1], device)


class Enough(Exception):
    """The second forward has made every tensor that backward may ask for."""


def full(forward, *inputs, **keywords):
    """forward(*inputs, **keywords), of which only the inputs are kept (Chen 2016, section 4).

    The graph is built as always, but holds numbers in the place of tensors. When backward wants the
    first one, forward runs again, with the same random numbers and autocast, until it has made the
    last tensor that has a number. So the last matmul, and a reduction of its result, run once.
    Collectives before it run twice, on every rank in the same order. What forward changes besides,
    such as running statistics, changes twice. For each torch.autograd.grad in forward, it runs once
    more.

    Inputs may be anything; tensors in tuples, lists and dicts among them are found. full may be
    nested in itself, in selective and in torch's checkpoint, and they in it.
    """
    if not torch.is_grad_enabled():
        return forward(*inputs, **keywords)
    call = Call(forward, inputs, keywords)
    with torch.autograd.graph.saved_tensors_hooks(call.number, call.fetch):
        outputs = forward(*inputs, **keywords)
    call.hooks = None  # forward has ended
    return outputs


class Repetition:
    """What forward makes when it runs again.

    Autograd keeps the hooks with every tensor that they have packed, so the second graph keeps this
    object alive by keep(). It has no reference to the Call, which would else live as long.
    """

    def __init__(self, numbered, hooks):
        self.numbered = numbered  # shape and dtype of every tensor, as the first forward made it
        self.hooks = hooks  # a pair that keeps what the repetition makes
        self.kept = {}  # {number: Kept}, what has not been fetched yet

    def keep(self, tensor):
        number = len(self.kept)  # nothing is fetched before this forward has ended
        if self.numbered[number] != (tensor.shape, tensor.dtype):
            raise RuntimeError(f"tensor {number} of a block was {self.numbered[number]}, but "
                               f"{(tensor.shape, tensor.dtype)} when it ran again")
        kept = Kept(tensor, self.hooks)
        self.kept[number] = kept
        if number == len(self.numbered) - 1:
            raise Enough(self)
        return weakref.ref(kept)  # the second graph may outlive the fetching


def look_up(reference):
    """For a backward inside the forward that runs again: what keep() has kept."""
    return reference().get()


class Call:
    """A call of a checkpointed forward: how to repeat it, and what the repetition has made."""

    def __init__(self, forward, inputs, keywords):
        hooks = outer_hooks()
        self.forward = forward
        leaves, self.structure = tree_flatten((inputs, keywords))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.device = device_of(tensors)
        kept = {}  # {id of a tensor: its Input}, one even if the tensor is several inputs
        for tensor in tensors:
            if id(tensor) not in kept:
                kept[id(tensor)] = Input(tensor, hooks)
        # inputs and keywords, each tensor replaced by its Input
        self.leaves = [kept.get(id(leaf), leaf) for leaf in leaves]
        self.states = [Kept(state, hooks) for state in random_states(self.device)]
        self.autocast = []  # arguments of torch.autocast
        for kind in sorted({"cpu", self.device.type}):
            dtype = torch.get_autocast_dtype(kind)
            enabled = torch.is_autocast_enabled(kind)
            self.autocast.append((kind, dtype, enabled, torch.is_autocast_cache_enabled()))
        self.numbered = []  # shape and dtype of every tensor that autograd wanted to keep
        self.repetition = None  # from the first fetch on
        # The pair of hooks that keeps what a repetition makes. Once forward has ended, full() sets
        # None, and fetch() takes the pair that stands around the backward. While forward still
        # runs, a backward inside it (torch.autograd.grad) may fetch. The innermost pair is then
        # number() and fetch() of this very Call, so the repetition keeps its tensors as they are
        self.hooks = (keep_as_is, keep_as_is)

    def number(self, tensor):
        self.numbered.append((tensor.shape, tensor.dtype))
        return len(self.numbered) - 1

    def fetch(self, number):
        # a backward fetches each number once, so one that is gone is wanted by a second backward
        if self.repetition is None or number not in self.repetition.kept:
            self.repetition = Repetition(self.numbered, self.hooks or outer_hooks())
            self.repeat()
        return self.repetition.kept.pop(number).get()

    def repeat(self):
        """Run forward again, until the repetition has enough."""
        states = [state.get() for state in self.states]
        before = random_states(self.device)
        set_random_states(states, self.device)
        try:
            self.forward_again()
        except Enough as enough:
            if enough.args[0] is not self.repetition:  # but another's, around this one
                raise
            return
        finally:
            set_random_states(before, self.device)
        # forward has come to its end: it has made fewer tensors than the first time
        count = len(self.repetition.kept)
        raise RuntimeError(f"a block kept {len(self.numbered)} tensors, but {count} when it ran "
                           "again: it must do the same both times")

    def forward_again(self):
        hooks = torch.autograd.graph.saved_tensors_hooks(self.repetition.keep, look_up)
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for arguments in self.autocast:
                stack.enter_context(torch.autocast(*arguments))
            stack.enter_context(hooks)
            inputs, keywords = self.inputs_again()
            self.forward(*inputs, **keywords)

    def inputs_again(self):
        """-> inputs, keywords, as forward had them the first time, but cut off from the graph."""
        tensors = {}  # {Input: tensor}
        leaves = []
        for leaf in self.leaves:
            if isinstance(leaf, Input):
                if leaf not in tensors:
                    tensors[leaf] = leaf.cut_off()
                leaf = tensors[leaf]
            leaves.append(leaf)
        return tree_unflatten(leaves, self.structure)


# Selective checkpointing makes again what is cheap. The node of an operation in autograd's graph
# holds its inputs: AGAIN[the node's name] makes the output from them.


def gelu_again(node):
    return F.gelu(node._saved_self, approximate=node._saved_approximate)


def layer_norm_again(node):
    x = node._saved_input
    mean = node._saved_result1
    reciprocal_std = node._saved_result2
    # contiguous, as forward's result was: Remade finds its tensor by its place in memory
    out = (x.contiguous() - mean).mul_(reciprocal_std)
    if node._saved_weight is not None:
        out.mul_(node._saved_weight)
    if node._saved_bias is not None:
        out.add_(node._saved_bias)
    return out.to(x.dtype)


def weight_again(node):
    return node.variable


WEIGHT = "torch::autograd::AccumulateGrad"
AGAIN = {
    "GeluBackward0": gelu_again,
    "NativeLayerNormBackward0": layer_norm_again,
    WEIGHT: weight_again,  # autocast makes copies of weights in another dtype
}
# These make a tensor in the memory of another
VIEWS = {"ViewBackward0", "ReshapeAliasBackward0"}
TRANSPOSES = {"TBackward0", "TransposeBackward0", "PermuteBackward0"}
CAST = "ToCopyBackward0"  # makes a copy, in another dtype, on another device, or in another order


class Recipe:
    """How to make again what a node of the graph has made.

    It is made once for all who want it: the Linears q, k and v want the same LayerNorm's output. A
    Recipe lives until the last of them is done.
    """

    def __init__(self, node):
        self.node = node
        self.version = 0  # of a weight, which must not change in place before backward
        if node.name() == WEIGHT:
            self.version = node.variable._version
        self.made = {}  # {dtype: tensor}

    def make(self, dtype):
        if self.node.name() == WEIGHT and self.node.variable._version != self.version:
            raise RuntimeError("a weight has been changed in place between forward and backward")
        if dtype not in self.made:
            make_again = AGAIN[self.node.name()]
            self.made[dtype] = make_again(self.node).to(dtype)
        return self.made[dtype]


def order_in_memory(tensor):
    """-> its dimensions, the one of the longest stride first: of channels_last 0, 2, 3, 1."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def put_in_order(tensor, order):
    """-> the same tensor, with its dimensions in this order in memory."""
    in_order = tensor.permute(order).contiguous()
    return in_order.permute([order.index(dim) for dim in range(len(order))])


class KeptForSeveral(Kept):
    """A tensor that is kept by a node of the graph, and read by it and by a recipe.

    Outer hooks are asked once: some would do their work again, or refuse.
    """

    def __init__(self, tensor, hooks):
        super().__init__(tensor, hooks)
        self.stride = tensor.stride()
        self.order = order_in_memory(tensor)
        self.unpacked = None  # from the first look on, until the node lets go of all of this

    def get(self):
        if self.unpacked is None:
            tensor = super().get()
            if tensor.stride() != self.stride:  # outer hooks may lose it, and recipes go by it
                tensor = put_in_order(tensor, self.order)
            self.unpacked = tensor
        return self.unpacked


class Remade:
    """A tensor that is not kept: a recipe, and the tensor's place in what the recipe makes.

    Only tensors come here that are what the recipe makes, a view of that, a cast of either, or a
    view of the cast: origin() sees to that. A cast has memory of its own, in the shape of what was
    cast, and perhaps with its dimensions in another order.
    """

    def __init__(self, recipe, tensor):
        self.recipe = recipe
        self.dtype = tensor.dtype
        self.device = tensor.device
        whole = tensor  # what the recipe makes, or its cast
        if tensor._base is not None:  # the tensor is a view of it
            whole = tensor._base
        self.whole_size = whole.size()
        self.whole_order = order_in_memory(whole)
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset() - whole.storage_offset()

    def get(self):
        made = self.recipe.make(self.dtype).to(self.device)
        whole = put_in_order(made.view(self.whole_size), self.whole_order)
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)


def origin(tensor):
    """-> the node of the graph that made the tensor's numbers, and whether they were cast since.

    The walk goes back in time, from the tensor to its origin. Views and transposes of the cast's
    result are passed: Remade notes the tensor's place in that result. What was done before the
    cast is passed only if it is a view: Remade fills the cast's result with the recipe's numbers in
    their order, which a transpose has changed. A second cast may have rounded, so the walk ends
    there, and the tensor is kept. Without any cast, all views and transposes are passed.
    """
    node = tensor.grad_fn
    cast = False
    passed = VIEWS | TRANSPOSES | {CAST}
    while node is not None and node.name() in passed:
        if node.name() == CAST:
            cast = True
            passed = VIEWS
        node = node.next_functions[0][0]
    return node, cast


def selective(forward, *inputs, **keywords):
    """Keep what matmuls, attention and sums make, but no LayerNorm, GELU or cast (Chen 2016, 4.2).

    These are made again from what is kept, without running forward. Any module will do: what is
    unknown is kept.
    """
    hooks = outer_hooks()
    recipes = weakref.WeakValueDictionary()  # {node: Recipe}, one for all that came from it

    def keep(tensor):
        node, cast = origin(tensor)
        known = node is not None and node.name() in AGAIN
        weight_itself = known and node.name() == WEIGHT and not cast
        if not known or weight_itself:  # a weight is there anyway
            return KeptForSeveral(tensor, hooks)
        recipe = recipes.get(node)
        if recipe is None:
            recipe = Recipe(node)
            recipes[node] = recipe
        return Remade(recipe, tensor)

    def fetch(kept):
        return kept.get()

    with torch.autograd.graph.saved_tensors_hooks(keep, fetch):
        return forward(*inputs, **keywords)


class LossScaler:
    """Scales the loss, and with it the gradients, up as far as nothing overflows.

    The smallest number of fp16 is 6e-8: without scaling, small gradients would become zero.
    (loss * scaler.scale).backward(); unscale; sum and clip; step. Nothing waits for the device.
    (Micikevicius 2018, section 3.2)
    """

    def __init__(self, device, scale=65536.0, growth=2.0, backoff=0.5, interval=2000):
        self.growth = growth  # what the scale is multiplied by after `interval` good steps
        self.backoff = backoff  # and after an overflow
        self.interval = interval
        self.scale = torch.full((), scale, dtype=torch.float32, device=device)
        self.good = torch.zeros_like(self.scale)  # steps without overflow since it changed
        self.found_inf = None  # from unscale to step: 1.0 if any rank has overflowed, or 0.0

    def unscale(self, gradients, group=None):
        """Divide this rank's gradients, or its shards of them, by the scale, in place.

        If any rank of the group has overflowed, all of them will skip the step. A gradient that is
        None or empty is passed over.
        """
        if self.found_inf is not None:
            raise RuntimeError("a second unscale before step: give it all gradients in one call")
        gradients = [g for g in gradients if g is not None and g.numel() > 0]
        self.found_inf = torch.zeros_like(self.good)
        if gradients:
            torch._foreach_mul_(gradients, 1 / self.scale)
            largest = torch.stack(torch._foreach_norm(gradients, math.inf))
            self.found_inf += largest.isfinite().logical_not().any()
        dist.all_reduce(self.found_inf, op=dist.ReduceOp.MAX, group=group)  # partial -> replicated

    def step(self, optimizer):
        """Step the optimizer, unless a gradient has overflowed; then adjust the scale.

        After an overflow it backs off. After `interval` good steps in a row it grows, if it stays
        finite. A fused optimizer skips by itself, so that the host need not know.
        """
        if self.found_inf is None:
            raise RuntimeError("unscale the gradients before the step")
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(f"{type(optimizer).__name__} would step after an overflow: take a "
                             "fused optimizer, such as AdamW(.., fused=True)")
        optimizer.found_inf = self.found_inf
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # or it would skip steps that others make
        good = (self.good + 1) * (1 - self.found_inf)  # 0 after an overflow
        grow = (good >= self.interval) & (self.scale * self.growth).isfinite()
        factor = torch.where(grow, self.growth, 1.0)
        factor = torch.where(self.found_inf > 0, self.backoff, factor)
        self.scale = self.scale * factor
        self.good = good * (good < self.interval)  # and 0 after `interval` of them
        self.found_inf = None


# The rest of a correct train step: ranks hold equal weights, and each has its part of the batch.


@torch.no_grad()
def replicate(module, group=None):
    """Give all ranks of the group the weights and buffers of its first rank."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dense = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(dense, group=group, group_src=0)  # the first rank's -> replicated
        tensor.copy_(dense)


def accumulate(part_of_loss, microbatches, scaler=None):
    """Run backward for one micro-batch after the other, so that their gradients add up.

    part_of_loss(*microbatch) -> the sum of its token losses, divided by the valid targets of the
    whole global batch: means of micro-batches must not be averaged, they weigh differently.
    -> this rank's part of the loss.
    """
    loss = 0.0
    for microbatch in microbatches:
        part = part_of_loss(*microbatch)
        if scaler is None:
            part.backward()
        else:
            (part * scaler.scale).backward()
        loss = loss + part.detach()
    return loss


def sum_gradients(parameters, group=None):
    """Sum the gradients of all ranks, in one call per dtype.

    Frozen parameters are left out. One that no rank has used keeps the gradient None, as in one
    process. The sign of a zero sum shows which: a rank sends its own zeros as 0.0, and -0.0 for a
    gradient that is missing. The sum is -0.0 only if every rank has sent -0.0.
    """
    trained = [p for p in parameters if p.requires_grad]
    missing = {p for p in trained if p.grad is None}
    for dtype in sorted({p.dtype for p in trained}, key=str):
        alike = [p for p in trained if p.dtype == dtype]
        gradients = [torch.zeros_like(p) if p in missing else p.grad for p in alike]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        flat += 0.0  # makes 0.0 of -0.0
        parts = flat.split([p.numel() for p in alike])
        for p, part in zip(alike, parts):
            if p in missing:
                part.fill_(-0.0)
        dist.all_reduce(flat, group=group)  # partial -> replicated
        # into the gradients, which lie in memory as p does: fused optimizers ignore strides
        sums = [part.view_as(p) for p, part in zip(alike, parts)]
        torch._foreach_copy_(gradients, sums)
        for p, gradient in zip(alike, gradients):
            p.grad = gradient
    for p in missing:
        if (p.grad.eq(0) & p.grad.signbit()).all():
            p.grad = None


def clip_gradients(parameters, clip):
    """Scale replicated gradients to a norm of at most `clip` (0: leave them) -> the norm before.

    Where the norm is inf or nan they are left, so that whoever looks finds out whose they are.
    """
    with_gradient = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in with_gradient])
    if clip:
        finite = norm.nan_to_num(0, posinf=0)  # a norm of 0 needs no scaling
        nn.utils.clip_grads_with_norm_(with_gradient, clip, finite)
    return norm


def update(parameters, optimizer, clip, scaler=None, group=None):
    """After the last micro-batch: unscale, sum over ranks, clip, step -> the gradients' norm.

    An overflow is looked for before gradients are summed, on every rank, and heeded by all.
    """
    trained = [p for p in parameters if p.requires_grad]
    if scaler is not None:
        scaler.unscale([p.grad for p in trained], group)
    sum_gradients(trained, group)  # partial -> replicated
    norm = clip_gradients(trained, clip)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
    return norm


# ---- 2. the toy GPT, parallelized --------------------------------------------

CHECKPOINT = {"none": None, "full": full, "selective": selective}


def parallelize(model, checkpointing=None, compiled=False):
    """checkpointing: full or selective, or one like them; None keeps everything."""
    for block in model.blocks:
        forward = block.forward
        if compiled:
            forward = torch.compile(forward)
        if checkpointing is not None:
            forward = partial(checkpointing, forward)
        block.forward = forward
    return model


def full_state_dict(model):
    return model.state_dict()  # replicated


def full_gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def train_step(model, optimizer, scaler, microbatches, valid, clip, autocast, group=None):
    """microbatches: this rank's, [(x, y)]; valid: targets of the whole batch.

    -> this rank's part of the loss, the norm.
    """

    def part_of_loss(x, y):
        with autocast():
            return loss_sum(model(x), y) / valid

    optimizer.zero_grad()
    loss = accumulate(part_of_loss, microbatches, scaler)
    norm = update(model.parameters(), optimizer, clip, scaler, group)
    return loss, norm


def evaluate(model, autocast, x, y):
    """-> this rank's part of the sum of token losses."""
    with torch.no_grad(), autocast():
        return loss_sum(model(x), y)


# ---- 3. at work: the same with torch's own API -------------------------------


def count_attention_on_cpus():
    """torch's FLOP counter knows the attention of GPUs; that of CPUs counts the same."""
    aten = torch.ops.aten
    flop_registry[aten._scaled_dot_product_flash_attention_for_cpu] = (
        flop_registry[aten._scaled_dot_product_flash_attention])
    flop_registry[aten._scaled_dot_product_flash_attention_for_cpu_backward] = (
        flop_registry[aten._scaled_dot_product_flash_attention_backward])


count_attention_on_cpus()
# what the FLOP counter knows, matmuls and attention; not all entries have a `default`
MATMULS = [op.default for op in flop_registry if hasattr(op, "default")]
# for several blocks at once torch also has checkpoint_sequential, which is not used here
full_at_work = partial(checkpoint, use_reentrant=False)
keep_matmuls = partial(create_selective_checkpoint_contexts, MATMULS)
selective_at_work = partial(full_at_work, context_fn=keep_matmuls)
CHECKPOINT_AT_WORK = {"none": None, "full": full_at_work, "selective": selective_at_work}


def train_step_at_work(model, optimizer, scaler, microbatches, valid, clip, autocast):
    optimizer.zero_grad()
    loss = 0.0
    for x, y in microbatches[:-1]:
        with no_sync(model):
            loss = loss + backward_at_work(model, scaler, x, y, valid, autocast)
    x, y = microbatches[-1]
    loss = loss + backward_at_work(model, scaler, x, y, valid, autocast)
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    scaler.step(optimizer)
    scaler.update()
    return loss, norm


def no_sync(model):
    """Where gradients only add up: DistributedDataParallel then does not communicate."""
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return nullcontext()


def backward_at_work(model, scaler, x, y, valid, autocast):
    with autocast():
        part = loss_sum(model(x), y) / valid
    ranks = dist.get_world_size()
    scaler.scale(part * ranks).backward()  # DistributedDataParallel averages; the sum is wanted
    return part.detach()


# ---- 4. run ------------------------------------------------------------------

AMP = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLAGS = {
    "amp": Flag("off", "autocast to", tuple(AMP)),
    "accum": Flag(1, "M, micro-batches", POSITIVE),
    "ckpt": Flag("none", "keep less for backward", tuple(CHECKPOINT)),
    "compile": Flag(False, "torch.compile blocks"),
    "growth": Flag(2000, "fp16: steps without overflow until the scale doubles", POSITIVE),
    "sweep": Flag(False, "--amp off and bf16, --accum 1 and M, every --ckpt, in one table"),
    "peak": Flag(0.0, "TFLOP/s of a device in bf16, from its data sheet, for MFU", ANY),
}
# what a run trains: one plan for each implementation, or with --sweep each combination
Plan = namedtuple("Plan", "amp accum ckpt")


def refuse(args):
    """What cannot run ends here, in one line, before anything is built."""
    dp = args.world_size
    require(args.batch >= dp * args.accum,
            f"--batch {args.batch}: fewer than {dp} ranks x --accum {args.accum}")
    fits = args.dtype == "fp32" or (args.dtype == "fp64" and args.amp == "off")
    require(fits, f"--dtype {args.dtype} --amp {args.amp}: take fp32 with any --amp, or fp64 with "
            "--amp off")
    require(args.impl == "scratch" or not (args.dry_run or args.sweep),
            "--dry-run and --sweep want --impl scratch")
    if args.compile:
        require(shutil.which("c++") and not args.dry_run,
                "--compile needs c++, and no --dry-run")
    require(not (args.sweep and args.save), "--save wants one plan: leave out --sweep")


def plans_of(args):
    """-> {name: Plan}"""
    if args.impl == "both":
        return dict.fromkeys(["scratch", "torch"], Plan(args.amp, args.accum, args.ckpt))
    if not args.sweep:
        return {args.impl: Plan(args.amp, args.accum, args.ckpt)}
    plans = {}
    for amp in "off", "bf16":
        for accum in sorted({1, args.accum}):
            for ckpt in CHECKPOINT:
                plans[f"{amp} {accum} {ckpt}"] = Plan(amp, accum, ckpt)
    return plans


def set_up(run, name, plan):
    """-> a Side: the model of this plan, and what a run does with it."""
    if name == "torch":
        return set_up_at_work(run, plan)
    model = parallelize(run.build(), CHECKPOINT[plan.ckpt], run.args.compile)
    scaler = None
    if plan.amp == "fp16":
        scale = run.start.extra.get("scale", 65536.0)
        scaler = LossScaler(run.device, scale, interval=run.args.growth)
        scaler.good.fill_(run.start.extra.get("good", 0))

    def state_of_scaler():  # is called with fp16 only
        return {"scale": scaler.scale.item(), "good": scaler.good.item()}

    return side_of(run, plan, model, model, train_step, scaler, state_of_scaler)


def set_up_at_work(run, plan):
    plain = parallelize(run.build(), CHECKPOINT_AT_WORK[plan.ckpt], run.args.compile)
    model = plain
    if run.world_size > 1:
        model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    fp16 = plan.amp == "fp16"
    scaler = torch.amp.GradScaler(
        run.device.type, enabled=fp16, growth_interval=run.args.growth,
        init_scale=run.start.extra.get("scale", 65536.0))
    good = int(run.start.extra.get("good", 0))
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": good})

    def state_of_scaler():
        return {"scale": scaler.get_scale(), "good": scaler.state_dict()["_growth_tracker"]}

    return side_of(run, plan, model, plain, train_step_at_work, scaler, state_of_scaler)


def side_of(run, plan, model, plain, step, scaler, state_of_scaler):
    """plain: the GPT in the model, under its own names."""
    args = run.args
    rows = share(args.batch, run.world_size, run.rank)  # of every batch, this rank's
    optimizer = adamw(plain.parameters(), args.lr)
    enabled = plan.amp != "off"
    autocast = partial(torch.autocast, run.device.type, AMP[plan.amp], enabled=enabled)
    fp16 = plan.amp == "fp16"

    def train(microbatches, valid):
        return step(model, optimizer, scaler, microbatches, valid, args.clip, autocast)

    def extra():
        return {**state_of_scaler(), "updates": updates(optimizer)}

    return Side(
        model=model,
        optimizer=optimizer,
        train_step=train,
        full_gradients=lambda: full_gradients(plain),
        full_state_dict=lambda: full_state_dict(plain),
        evaluate=lambda k: evaluate(plain, autocast, *run.held_out(k, rows)),
        pieces=lambda: pieces_of(plain.named_parameters(), optimizer, writes=run.rank == 0),
        extra=extra if fp16 else None,
        may_overflow=fp16,
    )


def updates(optimizer):
    """How many steps AdamW has made, without those that overflowed."""
    states = list(optimizer.state.values())
    if not states:
        return 0
    return int(states[0]["step"].item())


# What the textbook says. Both the bytes that a block keeps and its FLOPs follow from which of its
# values need a gradient: all, or with --train fewer.

# of a block: the outputs of norm1, attention, norm2 and up, and the block's own
Needs = namedtuple("Needs", "h1 attention h2 up out")


def any_trained(module):
    return any(p.requires_grad for p in module.parameters())


def needs_of_blocks(model):
    """-> Needs of every block, and whether the final norm's output needs a gradient."""
    x = any_trained(model.tok) or any_trained(model.pos)  # does a block's input?
    needs = []
    for block in model.blocks:
        attn = block.attn
        h1 = x or any_trained(block.norm1)
        attention = h1 or any(any_trained(linear) for linear in (attn.q, attn.k, attn.v))
        middle = x or attention or any_trained(attn.out)
        h2 = middle or any_trained(block.norm2)
        up = h2 or any_trained(block.mlp.up)
        out = middle or up or any_trained(block.mlp.down)
        needs.append(Needs(h1, attention, h2, up, out))
        x = out
    return needs, x or any_trained(model.norm)


def linears_of(block, needs):
    """(Linear, whether its input needs a gradient)"""
    attn = block.attn
    mlp = block.mlp
    return [(attn.q, needs.h1), (attn.k, needs.h1), (attn.v, needs.h1), (attn.out, needs.attention),
            (mlp.up, needs.h2), (mlp.down, needs.up)]


@dataclass
class Sizes:
    """Sizes of a step on this rank. A number has b bytes, and `low` where it goes into matmuls."""

    L: int
    C: int
    H: int
    V: int
    T: int
    rows: int  # sequences
    t: int  # tokens of its largest micro-batch
    b: int
    low: int
    cast: bool  # is there autocast?
    state: int  # bytes of the random numbers' states


def sizes_of(run, plan):
    cfg = run.cfg
    rows = len(share(run.args.batch, run.world_size, run.rank))
    b = run.dtype.itemsize
    state = 5056
    if run.device.type == "cuda":
        state += 16
    return Sizes(
        L=cfg.layers, C=cfg.width, H=cfg.heads, V=cfg.vocab, T=cfg.seq,
        rows=rows,
        t=-(-rows // plan.accum) * cfg.seq,
        b=b,
        low=b if plan.amp == "off" else 2,
        cast=plan.amp != "off",
        state=state,
    )


def kept_by_block(block, needs, s, makes_again):
    """-> bytes that a block keeps for backward: for each token, and of weights that are cast.

    makes_again: is checkpointing selective?
    """
    each = 0
    if needs.h1:
        each += s.b * (s.C + 2)  # norm1: its input, mean, 1/std
    if needs.attention:
        each += s.low * 4 * s.C + s.b * s.H  # q, k, v, out, log-sum-exp
    elif block.attn.out.weight.requires_grad:
        each += s.low * s.C  # attention's output alone: the Linear behind it keeps it
    if needs.h2:
        each += s.b * (s.C + 2)  # norm2
    if needs.up:
        each += s.low * 4 * s.C  # GELU's input
    each += kept_of_cheap(block, needs, s, makes_again)
    weights = 0
    for linear, input_needs in linears_of(block, needs):
        # autocast's copy, which the input's gradient needs; only a trained weight has a recipe
        made_again = makes_again and linear.weight.requires_grad
        if s.cast and input_needs and not made_again:
            weights += s.low * linear.weight.numel()
    return each, weights


def kept_of_cheap(block, needs, s, makes_again):
    """-> bytes per token of LayerNorms' and GELU's outputs that Linears keep.

    Selective checkpointing makes them again, if they have a place in the graph.
    """
    attn = block.attn
    users = [linear.weight.requires_grad for linear in (attn.q, attn.k, attn.v)]
    kept = 0
    if not (makes_again and needs.h1):
        if s.cast:
            kept += s.low * s.C * sum(users)  # each of q, k, v casts its own
        elif any(users):
            kept += s.b * s.C
    if block.mlp.up.weight.requires_grad and not (makes_again and needs.h2):
        kept += s.low * s.C
    if block.mlp.down.weight.requires_grad and not (makes_again and needs.up):
        kept += s.low * 4 * s.C
    return kept


def kept_by_head(model, norm_needs, s, fp16):
    """-> bytes that the final norm, the head and the loss keep."""
    each = s.b * s.V  # log-probabilities
    once = s.b  # a scalar of cross_entropy's, by which it divides when it is asked for a mean
    once += 8 * s.rows * s.T  # targets: of all micro-batches, since views keep the whole tensor
    if norm_needs:
        each += s.b * (s.C + 2)
        if s.cast:
            once += s.low * s.V * s.C  # the head's weight, cast
    if model.tok.weight.requires_grad:
        each += s.low * s.C  # the head's input
    if fp16:
        once += 4  # the scale
    return each * s.t + once


def kept_by_embeddings(model, s):
    indices = 0
    if model.tok.weight.requires_grad:
        indices += 8 * s.rows * s.T  # of all micro-batches, as targets
    if model.pos.weight.requires_grad:
        indices += 8 * s.T
    return indices


def activations(model, plan, s):
    """-> formula, and the most bytes that a step keeps for backward at one time."""
    needs, norm_needs = needs_of_blocks(model)
    head = kept_by_head(model, norm_needs, s, plan.amp == "fp16")
    of_blocks = [kept_by_block(block, n, s, plan.ckpt == "selective")
                 for block, n in zip(model.blocks, needs)]
    if plan.ckpt == "full":
        formula, most = most_with_full(needs, of_blocks, head, s)
    else:
        formula, most = all_that_is_kept(of_blocks, head, s)
    return formula, most + kept_by_embeddings(model, s)


def all_that_is_kept(of_blocks, head, s):
    """of_blocks: what kept_by_block says of each -> formula, bytes when forward is over."""
    each, weights = of_blocks[-1]
    formula = f"L ({each} t + {weights}) + head"
    if len(set(of_blocks)) > 1:
        formula = f"blocks, the last {each} t + {weights}, + head"
    return formula, sum(each * s.t + weights for each, weights in of_blocks) + head


def most_with_full(needs, of_blocks, head, s):
    """The same with full: formula, and the bytes at the worst moment, of the head or a block."""
    inputs = 0  # bytes of the inputs and random states of the blocks so far
    most = 0  # with those of a block that runs again
    for n, (each, weights) in zip(needs, of_blocks):
        if not n.out:  # no backward comes here, so nothing is kept
            continue
        inputs += s.b * s.C * s.t + s.state
        if n.h1:
            each -= s.b * s.C  # norm1 keeps the input itself
        most = max(most, inputs + each * s.t + weights)
    formula = f"L ({s.b * s.C} t + {s.state}) + max(block, head)"
    return formula, max(most, inputs + head)


def flops_of_step(model, s):
    """-> FLOPs of a step that does nothing twice, on this rank."""
    needs, norm_needs = needs_of_blocks(model)
    head = 2 * s.C * s.V
    attention = 4 * s.T * s.C
    a_token = s.L * (24 * s.C * s.C + attention) + head  # forward
    for block, n in zip(model.blocks, needs):
        if n.attention:
            a_token += 2.5 * attention  # 5 matmuls; forward has 2
        for linear, input_needs in linears_of(block, n):
            matmul = 2 * linear.weight.numel()
            if input_needs:
                a_token += matmul
            if linear.weight.requires_grad:
                a_token += matmul
    if norm_needs:
        a_token += head
    if model.tok.weight.requires_grad:
        a_token += head
    return a_token * s.rows * s.T


def flops_again(model, plan, s):
    """-> FLOPs of a step that are done a second time."""
    if plan.ckpt != "full":
        return 0
    needs, _ = needs_of_blocks(model)
    a_token = 0
    for block, n in zip(model.blocks, needs):
        if n.up or block.mlp.down.weight.requires_grad:  # else backward wants nothing of it
            a_token += 16 * s.C * s.C + 4 * s.T * s.C
    return a_token * s.rows * s.T


# a plan's row of the table: textbook and measured, in bytes, FLOPs, ms and tokens per second
Row = namedtuple("Row", "amp accum ckpt kept kept_textbook peak again again_textbook ms speed mfu "
                 "loss_gap")
HEAD = (f"\n{'amp':>4} {'M':3} {'ckpt':9} {'MB kept':>10} {'textbook':>10} {'peak':>9} "
        f"{'MFLOP again':>11} {'textbook':>9} {'ms/step':>9} {'tok/s':>9} {'MFU':>6} "
        f"{'loss gap':>8}")


def line(row):
    return (f"{row.amp:>4} {row.accum:3} {row.ckpt:9} {row.kept / 1e6:10.3f} "
            f"{row.kept_textbook / 1e6:10.3f} {row.peak / 1e6:9.3f} {row.again / 1e6:11.3f} "
            f"{row.again_textbook / 1e6:9.3f} {row.ms:9.1f} {row.speed:9,.0f} {row.mfu:6.1%} "
            f"{row.loss_gap:8.1e}")


def row_of(run, name, plan, counter, plain_trace):
    args = run.args
    model = run.sides[name].model
    model = getattr(model, "module", model)  # DistributedDataParallel's
    s = sizes_of(run, plan)
    memory = run.ledger[name].memory
    ms = run.ms(name) or math.inf
    speed = 1e3 * args.batch * s.T / ms  # of all ranks
    total = sum(p.numel() for p in model.parameters())
    flops_a_token = 6 * total + 12 * s.L * s.C * s.T  # as MFU is defined, whatever is frozen
    peak_flops = math.inf
    if args.peak:
        peak_flops = 1e12 * args.peak
    gap = 0.0
    if plain_trace:
        losses = run.trace[name].until(run.checked).loss
        gap = max(abs(loss / plain_trace.loss[step] - 1).item() for step, loss in losses.items())
    return Row(
        *plan,
        kept=memory["activations"],
        kept_textbook=activations(model, plan, s)[1],
        peak=memory["peak"],
        again=counter.get_total_flops() - flops_of_step(model, s),
        again_textbook=flops_again(model, plan, s),
        ms=ms, speed=speed,
        mfu=speed * flops_a_token / run.world_size / peak_flops,
        loss_gap=gap,
    )


def account(run, plans):
    """The textbook's rows, of the first plan: P parameters that are trained, of b bytes."""
    first = run.impls[0]
    plan = plans[first]
    dp = run.world_size
    model = run.sides[first].model
    size = run.dtype.itemsize * sum(p.numel() for p in model.parameters() if p.requires_grad)
    if plan.amp == "fp16" and first != "torch":
        size += 4  # found_inf
    sent = run.ledger[first].collectives["all_reduce"]["wire"]
    run.textbook("wire all_reduce", "2 (dp-1)/dp (b P, in fp16 + 4)", 2 * (dp - 1) * size / dp,
                 sent)
    if first == "scratch":
        formula, kept = activations(model, plan, sizes_of(run, plan))
        run.textbook("activations kept", formula, kept, run.ledger[first].memory["activations"])


def compare_plans(run, plans, counters, plain_trace=None):
    """Print the table."""
    rows = [row_of(run, name, plans[name], counters[name], plain_trace) for name in plans]
    run.extra["plans"] = rows
    run.say(HEAD)
    for row in rows:
        run.say(line(row))


def main():
    args = arguments(__doc__, **FLAGS)
    refuse(args)
    plans = plans_of(args)
    run = Run(args, impls=tuple(plans))
    with run:
        sides = {name: set_up(run, name, plan) for name, plan in plans.items()}
        run.begin(sides)
        total = sum(p.numel() for p in sides[run.impls[0]].model.parameters())
        counters = {name: FlopCounterMode(display=False) for name in plans}
        for name, step in run.steps():
            side = sides[name]
            run.set_rate(side.optimizer, step)
            x, y, valid = run.batch(step, share(args.batch, run.world_size, run.rank))
            accum = plans[name].accum
            microbatches = list(zip(x.tensor_split(accum), y.tensor_split(accum)))
            counter = nullcontext()
            if step == run.last:
                counter = counters[name]
            with run.measure(name, step), counter:
                loss, norm = side.train_step(microbatches, valid)
            run.log(name, step, loss, norm)
            if side.extra and not run.dry:
                run.extra.setdefault(f"scale {name}", []).append(side.extra()["scale"])
        account(run, plans)

        def plain():  # finish() calls it, on rank 0; only then the table's loss gaps are known
            trace = run.plain()
            compare_plans(run, plans, counters, trace)
            return trace

        if run.dry or not args.check:
            compare_plans(run, plans, counters)
        judged_as = args.dtype
        if plans[run.impls[0]].amp != "off":
            judged_as = "bf16"  # the loss to 2%: see compare
        return run.finish(total, total, plain=plain, judged_as=judged_as)


if __name__ == "__main__":
    sys.exit(main())
