"""Fully sharded data parallelism: a rank keeps 1/N of each block, and borrows the rest to run it.

    computes       fwd 0   fwd 1   fwd 2   fwd 3   loss    bwd 3   bwd 2   bwd 1   bwd 0
    gathers    0   1       2       3                       2       1       0
    sums                                                           3       2       1       0

A block is gathered while another computes, and freed after its turn; the last one stays for its
backward. The root, which is what no block has (here embeddings, last norm and head), is gathered
from the beginning of forward to the end of backward.

    model = FSDP(model, model.blocks)  # gradients are summed over ranks, not averaged
    optimizer = torch.optim.AdamW(model.parameter_groups(), lr=1e-3)
    (loss_sum(model(x), y) / valid_targets_of_all_ranks).backward()  # x, y: this rank's rows
    norm = model.clip_grad_norm_(1.0)  # nn.utils.clip_grad_norm_ would see this rank's part alone
    optimizer.step()
    optimizer.zero_grad()
    state = model.full_state_dict()  # gathers what to save: every rank gets all of it

P numbers are trained, P_again of them in blocks other than the last, on N ranks, in fp32:

    on each rank                            plain GPT     here
    parameters, gradients, AdamW states     16 P          16 P/N
    whole parameters, whole gradients       -             those of the root and at most 2 blocks
    activations                             whole batch   1/N
    sent per step                           -             4 (2 P + P_again) (N-1)/N
      with --no-reshard                     -             8 P (N-1)/N, all blocks stay gathered
    gathers and sums, L blocks and the root -             2L all-gathers, L+1 reduce-scatters

With dtype=torch.bfloat16, or a bf16 model, what is gathered has 2 bytes a number; shards, sums of
gradients and states keep 4. ZeRO-3 in zero.py cuts and gathers alike: it is the last step of a
ladder, for any units; FSDP is for blocks, leaves the loop as it was, and builds from meta.

Zhao 2023, "PyTorch FSDP", arXiv:2304.11277, sections 3, 4: a unit is one flat tensor, as here. At
work: fully_shard, part 4 below, which cuts each parameter along dim 0 instead.
Not for: blocks that share parameters, or run twice in a forward; ranks that use different blocks;
methods but model(..); optimizers of whole matrices, but within harness/whole.py (--optimizer muon);
GradScaler (ranks would skip different steps), second derivatives, reentrant checkpointing,
autograd.grad, backwards that raise, freezing or loading later. Unused ones get gradients of 0.
    torchrun --standalone --nproc_per_node=2 fsdp.py
"""
from collections import namedtuple
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

# imports of parts 1 and 2 end here; the rest is for parts 3 to 5
import argparse
import sys

from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from common import GPT, adamw, build, init_weights, loss_sum, share

# ---- 1. the idea -------------------------------------------------------------

# These two have other names since torch 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class IdeaOfUnit(nn.Module):
    """full: p0 | p1 | p2 | padding, the trained parameters of a block end to end. It has memory
    while the block runs. Of n equal chunks this rank keeps, and steps, one: its shard."""

    def __init__(self, block, group=None):
        super().__init__()
        self.block = block
        self.group = group
        ranks = dist.get_world_size(group)
        trained = {name: p for name, p in block.named_parameters() if p.requires_grad}
        self.shapes = {name: p.shape for name, p in trained.items()}
        whole = nn.utils.parameters_to_vector(trained.values()).detach()
        padding = -len(whole) % ranks
        self.sizes = [*(p.numel() for p in trained.values()), padding]
        self.full = F.pad(whole, (0, padding))
        dist.broadcast(self.full, group=group, group_src=0)  # the first rank's -> replicated
        self.shard = self.full.chunk(ranks)[dist.get_rank(group)].clone().requires_grad_()
        self.free()
        for p in trained.values():
            p.requires_grad_(False).set_()  # empty, and not taken by the root, which is made later

    def forward(self, *inputs):
        self.gather()
        full = self.full.data.requires_grad_()  # .data: autograd shall not mind the second gather
        full.register_post_accumulate_grad_hook(self.reduce)
        pieces = zip(self.shapes, full.split(self.sizes))
        views = {name: piece.view(self.shapes[name]) for name, piece in pieces}
        output = functional_call(self.block, views, inputs)
        self.free()  # what autograd keeps for backward are views of full: they have no memory now
        if output.requires_grad:
            output.register_hook(self.gather)  # when backward comes to the block they have it again
        return output

    def gather(self, *_):
        self.full.untyped_storage().resize_(self.full.nbytes)
        all_gather(self.full, self.shard.detach(), group=self.group)  # sharded -> replicated

    def free(self):
        self.full.untyped_storage().resize_(0)

    def reduce(self, full):
        """Autograd's call when all of full has its gradient: backward is through with the block."""
        self.free()
        self.shard.grad = torch.empty_like(self.shard)  # anew: one backward a step
        reduce_scatter(self.shard.grad, full.grad, group=self.group)  # partial -> sharded
        full.grad = None


def shard_blocks(model, blocks, group=None):
    """blocks: the model's nn.ModuleList -> the model, and what this rank keeps and steps of it."""
    for i, block in enumerate(blocks):
        blocks[i] = IdeaOfUnit(block, group)
    root = IdeaOfUnit(model, group)  # of what no block has: embeddings, last norm, head
    return root, [unit.shard for unit in [*blocks, root]]


def idea_step(model, shards, optimizer, x, y, valid, clip):
    """x, y: this rank's rows (B/n, T); valid: the number of targets in all ranks' rows."""
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / valid
    loss.backward()
    square = nn.utils.get_total_norm([shard.grad for shard in shards]).square()
    dist.all_reduce(square, group=model.group)  # partial -> replicated
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(shards, clip, norm)
    optimizer.step()
    return loss, norm


# ---- 2. the technique (copy this; it needs only torch) -----------------------

# What it adds to the idea, and what that buys. Figures are those of the toy on 2 ranks.
#     hooks and p.data, no wrapper    names, arguments and outputs stay; blocks may checkpoint
#     gathers and sums under way      10 of 13 travel while others compute; the idea waits for 15
#     last block and root stay        5.06 MB sent -> 4.56 MB, 26.3 MB at the peak -> 25.4 MB
#     a part for each parameter       parameter groups, micro-batches, offload; of bf16 fp32 sums
#     HSDP                            gathers stay within a copy of the model, such as a node
#     from_meta()                     no rank ever has the whole model

# What this rank steps of a parameter p: p.flatten()[first:first + len(value)].
# value: an nn.Parameter on shard[span], so that the optimizer steps shard
Part = namedtuple("Part", "parameter first span value")


class Unit:
    """Parameters that travel together: end to end in one tensor, cut into a chunk for each rank.

        full      p0 | p1 | p2 | padding    (n * chunk,): the parameters are views of it
        buffer    g0 | g1 | g2 | padding    likewise: the gradients of this rank's rows
                  chunk 0 | chunk 1 | ..    equal chunks of both; a parameter may be in several

        shard     this rank's chunk of the parameters, (chunk,), in fp32 or wider: it stays
        sum       its chunk of all ranks' gradients

    Between uses full has no memory, and parameters have no elements. What autograd has saved for
    backward are views of full: they lose and regain memory with it.
    """

    def __init__(self, parameters, group, dtype, home, begin):
        """dtype: full's. home: the device of shard. begin(unit): fills shard, see begin_alike."""
        assert len({p.dtype for p in parameters}) == 1, "make a unit for each dtype"
        own = parameters[0].dtype
        device = parameters[0].device
        ranks = dist.get_world_size(group)
        rank = dist.get_rank(group)
        self.group = group
        self.shapes = {p: p.shape for p in parameters}  # in order; p itself is empty at times
        self.size = sum(p.numel() for p in parameters)  # without padding
        self.chunk = -(-self.size // ranks)  # numbers in a chunk: rounded up
        self.mine = slice(rank * self.chunk, (rank + 1) * self.chunk)  # in full and in buffer
        self.full = torch.empty(ranks * self.chunk, dtype=dtype or own, device=device)
        self.places = self.views(self.full)  # {parameter: its view of full}
        self.shard = torch.zeros(self.chunk, device=home or device,
                                 dtype=torch.promote_types(own, torch.float32))
        self.parts = list(self.cut())
        self.gathering = None  # the all-gather into full that is under way
        self.sending = None  # what it reads, in full's dtype: kept until it is over
        self.reducing = None  # the sum over ranks that is under way
        begin(self)
        self.free()  # from here on the whole is in no rank's memory

    def views(self, flat):
        """-> {parameter: its view of a tensor that is laid out like full}."""
        slices = flat[:self.size].split([shape.numel() for shape in self.shapes.values()])
        return {p: numbers.view(self.shapes[p]) for p, numbers in zip(self.shapes, slices)}

    def cut(self):
        """The parts of this rank's chunk. Its padding is in none of them, and stays zero."""
        start = -self.mine.start  # where p begins, counted from here: below 0 in an earlier chunk
        for p, shape in self.shapes.items():
            end = start + shape.numel()
            span = slice(max(start, 0), min(end, self.chunk))
            if span.start < span.stop:
                first = span.start - start  # numbers of p before it are in earlier chunks
                yield Part(p, first, span, nn.Parameter(self.shard[span]))
            start = end

    # -- parameters

    def gather(self):
        """Begin to, unless the parameters are here or on their way."""
        memory = self.full.untyped_storage()
        if memory.nbytes() == 0:
            memory.resize_(self.full.nbytes)
            for p, place in self.places.items():
                # Set as .data, full's memory comes without its version counter. With that, autograd
                # would take a gather into full for a change of p, and refuse to go backward.
                p.data = place
            self.sending = self.shard.to(self.full.device, self.full.dtype)
            # sharded -> replicated
            self.gathering = all_gather(self.full, self.sending, group=self.group, async_op=True)

    def wait(self):
        """After this the parameters can be used. On GPUs the stream waits for it, not the host."""
        if self.gathering:
            self.gathering.wait()
            self.gathering = None
            self.sending = None

    def free(self):
        """Memory goes from under all views of full, also those that autograd keeps for backward."""
        self.wait()  # not while a collective writes into it
        self.full.untyped_storage().resize_(0)
        for p, place in self.places.items():
            # as many dims as before (a scalar gets one): optimizer groups may be made by p.dim()
            p.data = torch.atleast_1d(place)[:0]

    def gathered(self, chunk):
        """chunk: this rank's, of shard's kind -> {parameter: whole tensor}; all ranks call it."""
        full = chunk.new_empty(self.full.shape, device=self.full.device)
        all_gather(full, chunk.to(full.device), group=self.group)  # sharded -> replicated
        return self.views(full)

    # -- gradients

    def start_sum(self):
        """Begin to sum over the group what autograd has left in the parameters' grad."""
        self.buffer = self.shard.new_zeros(self.full.shape, device=self.full.device)
        for p, slot in self.views(self.buffer).items():
            if p.grad is not None:  # this backward has used it
                slot.copy_(p.grad)  # in shard's dtype: bf16 gradients are summed in fp32
                p.grad = None
        self.sum = self.buffer.new_empty(self.chunk)
        # partial -> sharded
        self.reducing = reduce_scatter(self.sum, self.buffer, group=self.group, async_op=True)

    def wait_sum(self):
        if self.reducing:
            self.reducing.wait()
            self.reducing = None
            self.buffer = None

    def finish_sum(self):
        """Wait for the sum, and add it to the parts' gradients."""
        self.wait_sum()
        gradient = self.sum.to(self.shard.device)
        self.sum = None
        for part in self.parts:
            new = gradient[part.span]
            if part.value.grad is None:
                part.value.grad = new
            else:  # of a micro-batch before
                part.value.grad += new


def begin_alike(unit):
    """Fills the shard of this rank with what the group's first rank has."""
    whole = unit.shard.new_zeros(unit.full.shape, device=unit.full.device)
    for p, place in unit.views(whole).items():
        place.copy_(p.detach())
    dist.broadcast(whole, group=unit.group, group_src=0)  # the first rank's -> replicated
    unit.shard.copy_(whole[unit.mine])


class FSDP(nn.Module):
    """Shards a module over the ranks of `group`: a unit for each of `blocks`, and the root.

    In loss.backward() gradients are summed over ranks, and added to those of this rank's `values`.

    blocks: submodules, in the order in which they run
    reshard: free blocks after forward, and gather them again for backward
    dtype: of whole weights (None: the module's); the caller casts inputs
    home: the device of shards (None: the module's)
    begin: fills a unit's shard, see from_meta

    Ranks begin with the first one's parameters and buffers. Frozen ones stay whole, in `dtype`.
    """

    def __init__(self, module, blocks, group=None, reshard=True, dtype=None, home=None,
                 begin=begin_alike):
        super().__init__()
        self.module = module
        self.group = group
        self.reshard = reshard
        module.zero_grad()  # what is left from before is of no step here
        frozen = [p for p in module.parameters() if not p.requires_grad]
        for p in frozen:
            p.data = p.data.to(dtype or p.dtype)
        self.whole = [*module.buffers(), *frozen]  # what every rank has
        for tensor in self.whole:
            dist.broadcast(tensor, group=group, group_src=0)  # the first rank's -> replicated
        self.summing = []  # units whose sums this backward has started, in order
        self.in_backward = False  # True: a forward of a block is one that a checkpoint runs again

        self.block_units = []  # in the order of blocks, but for those that are frozen
        inside = set()
        for block in blocks:
            trained = [p for p in block.parameters() if p.requires_grad]
            if trained:
                i = len(self.block_units)
                block.register_forward_pre_hook(partial(self.enter, i))
                block.register_forward_hook(partial(self.after_forward, i))
                self.block_units.append(Unit(trained, group, dtype, home, begin))
                inside.update(trained)
        rest = [p for p in module.parameters() if p.requires_grad and p not in inside]
        self.root = Unit(rest, group, dtype, home, begin) if rest else None
        self.units = [unit for unit in [*self.block_units, self.root] if unit]
        self.parts = [part for unit in self.units for part in unit.parts]
        self.values = nn.ParameterList(part.value for part in self.parts)  # optimizers step them

    # -- forward: a block is gathered while the one before it computes

    def forward(self, *args, **kwargs):
        self.free()  # what a forward without a backward has left
        self.gather_root()
        self.prefetch(0)
        output = self.module(*args, **kwargs)
        watch(output, self.backward_begins)
        if not torch.is_grad_enabled():  # an evaluation: no backward will come
            self.free()
        return output

    def free(self):
        for unit in self.units:
            unit.free()

    def gather_root(self):
        if self.root:
            self.root.gather()
            self.root.wait()

    def prefetch(self, i):
        if 0 <= i < len(self.block_units):
            self.block_units[i].gather()

    def enter(self, i, *hook_arguments):
        """Before block i computes: gather it, if that was not done, and prefetch the next one."""
        self.prefetch(i)
        self.prefetch(i - 1 if self.in_backward else i + 1)
        self.block_units[i].wait()

    def after_forward(self, i, block, inputs, output):
        watch(output, partial(self.backward_reaches, i))
        if self.reshard and not self.in_backward and i + 1 < len(self.block_units):
            self.block_units[i].free()  # the last one stays through the loss: its backward is next

    # -- backward: a block is gathered, and one is summed, while the block between them computes

    def backward_begins(self, gradient):
        """Backward has come to an output of the model, or of a block."""
        if not self.in_backward:
            self.in_backward = True
            # autograd calls backward_ends when all of this backward is over
            torch.autograd.Variable._execution_engine.queue_callback(self.backward_ends)
        self.gather_root()  # does nothing unless another forward or backward has freed it

    def backward_reaches(self, i, gradient):
        """Backward has come to the output of block i: it is through with block i + 1."""
        self.backward_begins(gradient)  # it may have come past the model's output
        if i + 1 < len(self.block_units):
            unit = self.block_units[i + 1]
            unit.free()
            if any(p.grad is not None for p in unit.shapes):
                self.start_sum(unit)
        self.enter(i)

    def start_sum(self, unit):
        if self.summing:
            self.travelled(self.summing[-1])  # during this unit's backward
        unit.start_sum()
        self.summing.append(unit)

    def travelled(self, unit):
        """Between the start of a unit's sum and its end."""
        unit.wait_sum()

    def backward_ends(self):
        self.free()
        for unit in self.units:
            if unit not in self.summing:  # the first block and the root; zeros of what is unused
                self.start_sum(unit)
        self.travelled(self.summing[-1])
        for unit in self.summing:
            unit.finish_sum()
        self.summing = []
        self.in_backward = False

    # -- a step

    def parameter_groups(self, groups=None):
        """groups: a list of dicts, as for an optimizer -> the same with this rank's values."""
        value_of = {part.parameter: part.value for part in self.parts}
        ours = []
        for group in groups or [{"params": list(value_of)}]:
            values = [value_of[p] for p in group["params"] if p in value_of]  # with a part here
            ours.append({**group, "params": values})
        return ours

    def clip_grad_norm_(self, max_norm):
        """Scale the whole gradient to a norm of max_norm at most (0: do not) -> its norm before."""
        own = nn.utils.get_total_norm([value.grad for value in self.values])  # 0 without values
        square = own.to(self.units[0].full.device, self.units[0].shard.dtype).square()
        dist.all_reduce(square, group=self.group)  # partial -> replicated
        norm = square.sqrt()
        if max_norm:
            finite = norm.nan_to_num(0, posinf=0)  # inf or nan counts as 0: nothing is scaled
            nn.utils.clip_grads_with_norm_(self.values, max_norm, finite)
        return norm

    # -- the whole

    def full_state_dict(self):
        """-> {name: whole tensor} on every rank; all must call it. What is trained is as shards."""
        found = {}  # {parameter: whole tensor}
        for unit in self.units:
            found.update(unit.gathered(unit.shard))
        state = self.module.state_dict(keep_vars=True)  # the Parameters themselves, keys of found
        return {name: found.get(t, t).detach() for name, t in state.items()}

    def refuse(self, *_, **__):
        raise RuntimeError("FSDP: save full_state_dict(); move and cast the module before")

    state_dict = refuse  # parameters have no elements
    _apply = refuse  # of to(), cuda(), half(): values would be on shards no longer


def watch(output, reached):
    """Call `reached` when backward comes to one of the tensors that a module has returned."""
    for t in tree_leaves(output):
        if isinstance(t, torch.Tensor) and t.requires_grad:
            t.register_hook(reached)


class HSDP(FSDP):
    """Copies of a sharded model: gathers and sums stay within a copy's `group`, but for one sum.

    replicas: the group of ranks that have the same shard, one in each copy
    """

    def __init__(self, module, blocks, group, replicas, **options):
        super().__init__(module, blocks, group, **options)
        self.replicas = replicas
        for tensor in self.whole:
            dist.broadcast(tensor, group=replicas, group_src=0)  # the first copy's -> replicated
        for unit in self.units:
            shard = unit.shard.to(unit.full.device)
            dist.broadcast(shard, group=replicas, group_src=0)  # the first copy's -> replicated
            unit.shard.copy_(shard)

    def travelled(self, unit):
        """The sum within a copy is there: begin the one over copies, of 1/n of the numbers."""
        super().travelled(unit)
        # partial -> replicated
        unit.reducing = dist.all_reduce(unit.sum, group=self.replicas, async_op=True)


def from_meta(module, device, init):
    """Makes a module on the meta device one for FSDP, which no rank ever has as a whole.

    init(name, tensor): fills a tensor of the module. Values must depend on the name alone: a rank
    calls it only for what it keeps

    -> what FSDP takes as `begin`
    """
    new = {}  # {tensor on the meta device: what replaces it}
    for name, t in [*module.named_parameters(), *module.named_buffers()]:
        if t.requires_grad:  # one number is enough: shards alone are filled
            new[t] = nn.Parameter(torch.zeros((), dtype=t.dtype, device=device).expand(t.shape))
        else:
            new[t] = torch.empty_like(t, device=device)
            init(name, new[t])
            if isinstance(t, nn.Parameter):
                new[t] = nn.Parameter(new[t], requires_grad=False)
    for owner in module.modules():
        for tensors in owner._parameters, owner._buffers:
            for name, t in tensors.items():
                tensors[name] = new.get(t)  # None stays None
    names = {p: name for name, p in module.named_parameters()}

    def begin(unit):
        for p, first, span, value in unit.parts:
            whole = torch.empty(unit.shapes[p], dtype=value.dtype, device=device)
            init(names[p], whole)
            unit.shard[span] = whole.flatten()[first:first + len(value)]

    return begin


# ---- 3. the toy GPT, parallelized --------------------------------------------


def parallelize(model, mesh, seed, device, **options):
    """model: on the meta device, so that no rank ever has all of it. mesh: (replicate, shard)."""

    def init(name, tensor):
        path, _, attribute = name.rpartition(".")
        module = nn.ParameterDict({attribute: tensor})  # init_weights wants a module
        init_weights(module, len(model.blocks), seed, path)

    options["begin"] = from_meta(model, device, init)
    group = mesh["shard"].get_group()
    if mesh["replicate"].size() == 1:
        return FSDP(model, model.blocks, group, **options)
    return HSDP(model, model.blocks, group, mesh["replicate"].get_group(), **options)


def full_gradients(model):
    """-> {name: whole gradient} of what is trained, a tied one once."""
    found = {}  # {parameter: whole gradient}
    for unit in model.units:
        gradient = torch.zeros_like(unit.shard)
        for part in unit.parts:
            gradient[part.span] = part.value.grad
        found.update(unit.gathered(gradient))
    return {name: found[p] for name, p in model.module.named_parameters() if p in found}


def train_step(model, optimizer, x, y, valid, clip):
    """x, y: this rank's rows (B/N, T); valid: targets of the whole batch.

    -> this rank's part of the loss, gradient norm.
    """
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    loss.backward()  # partial -> sharded, inside FSDP
    norm = model.clip_grad_norm_(clip)
    optimizer.step()
    return loss, norm


def idea_gathered(model, chunk_of):
    """chunk_of(unit): its shard, or the gradient -> {parameter of the plain model: whole tensor}"""
    found = {}
    for unit in model.modules():
        if isinstance(unit, IdeaOfUnit):
            full = torch.empty_like(unit.full)
            all_gather(full, chunk_of(unit).detach(), group=unit.group)  # sharded -> replicated
            for (name, shape), numbers in zip(unit.shapes.items(), full.split(unit.sizes)):
                found[unit.block.get_parameter(name)] = numbers.view(shape)
    return found


# ---- 4. at work: the same with torch's own API -------------------------------


def parallelize_at_work(model, mesh, reshard=True, dtype=None):
    """dtype: what computes. On GPUs fully_shard also takes offload_policy=CPUOffloadPolicy()."""
    if mesh["replicate"].size() == 1:
        mesh = mesh["shard"]
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=model.tok.weight.dtype)
    shard = partial(fully_shard, mesh=mesh, mp_policy=precision)
    for block in model.blocks:
        shard(block, reshard_after_forward=reshard and block is not model.blocks[-1])
    shard(model)
    # fully_shard finds out by itself what to prefetch in backward
    for block, following in zip(model.blocks, model.blocks[1:]):
        block.set_modules_to_forward_prefetch([following])
    return model


def train_step_at_work(model, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    (loss * dist.get_world_size()).backward()  # fully_shard averages; the sum is wanted here
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss, norm.full_tensor()  # partial -> replicated


# ---- 5. run ------------------------------------------------------------------


FLAGS = {
    "--reshard": dict(action=argparse.BooleanOptionalAction, default=True, help="free blocks after "
                      "forward, gather them again for backward"),
    "--hsdp": dict(type=int, default=0, least=0, help="N, ranks that share one copy of the model "
                   "(0: all)"),
    "--offload": dict(action="store_true", help="keep shards and optimizer states in the CPU's "
                      "memory"),
}
VARIANTS = ("", "--no-reshard", "--hsdp 1")  # flags with which the file is worth running


def set_up(run, impl, mesh, on_meta):
    from harness.whole import WholeMatrices, shares_of_runs

    args = run.args
    if impl == "idea":
        return set_up_idea(run)
    if impl == "torch":
        shard_dtype = torch.promote_types(run.dtype, torch.float32)  # of sums, too
        model = run.freeze(build(run.cfg, args.seed, run.device, shard_dtype))
        model = parallelize_at_work(model, mesh, args.reshard, run.dtype)
        return run.side(model, adamw(model.parameters(), args.lr), train_step_at_work)
    model = parallelize(on_meta, mesh, args.seed, run.device, reshard=args.reshard,
                        home="cpu" if args.offload else None)
    values = {part.parameter: part.value for part in model.parts}

    def wholes(matrices):
        return [WholeMatrices(shares_of_runs(model.units, values, matrices), model.group)]

    optimizer = run.optimizer(model.module.named_parameters(), groups=model.parameter_groups,
                              wholes=wholes)
    return run.side(model, optimizer, train_step, full_state_dict=model.full_state_dict,
                    full_gradients=partial(full_gradients, model),
                    pieces=partial(pieces, model, optimizer))


def set_up_idea(run):
    plain = run.build()
    state = plain.state_dict(keep_vars=True)
    trained = dict(plain.named_parameters())
    model, shards = shard_blocks(plain, plain.blocks)
    optimizer = adamw(shards, run.args.lr)

    def step(model, *rest):
        return idea_step(model, shards, *rest)

    def held():
        states = [t for states in optimizer.state.values() for t in states.values()]
        return {"parameters": shards, "gradients": [shard.grad for shard in shards],
                "optimizer": states}

    def whole(tensors, chunk_of):
        found = idea_gathered(model, chunk_of)
        return {name: found.get(t, t) for name, t in tensors.items()}

    return run.side(model, optimizer, step, held=held,
                    full_gradients=partial(whole, trained, lambda unit: unit.shard.grad),
                    full_state_dict=partial(whole, state, lambda unit: unit.shard))


def pieces(model, optimizer):
    """What this rank gives to a checkpoint, or takes from it."""
    from harness.checkpoint import part_pieces, pieces_of

    names = {p: name for name, p in model.module.named_parameters()}
    found = pieces_of([(name, p) for p, name in names.items() if not p.requires_grad], None)
    for unit in model.units:
        for p, first, _, value in unit.parts:
            found += part_pieces(names[p], unit.shapes[p], first, value, optimizer)
    return found


def textbook(model, mesh):
    """b, c: the bytes of a number in shard, in full. P_again: what is gathered twice, all in the
    idea. own: this rank's numbers, in FSDP without padding; AdamW counts steps for each value."""
    R, N = mesh.shape
    others = (N - 1) / N
    if isinstance(model, FSDP):
        units = model.units
        values = model.values
        again = model.block_units[:-1] if model.reshard else []
    else:
        units = [unit for unit in model.modules() if isinstance(unit, IdeaOfUnit)]
        values = [unit.shard for unit in units]
        again = units
    b = units[0].shard.itemsize
    c = units[0].full.itemsize
    P = sum(unit.full.numel() for unit in units)
    P_again = sum(unit.full.numel() for unit in again)
    own = sum(value.numel() for value in values)
    return [
        ("held parameters", f"b P/N, P = {P:,} with padding", b * P / N),
        ("held gradients", "b P/N", b * P / N),
        ("held optimizer", "2 b own + 4 per value", 2 * b * own + 4 * len(values)),
        ("wire all_gather", "c (P + P_again) (N-1)/N", c * (P + P_again) * others),
        ("wire reduce_scatter", "b P (N-1)/N", b * P * others),
        ("wire all_reduce", "norm: 2 b (N-1)/N, R copies: 2 b P/N (R-1)/R",
         2 * b * others + 2 * b * P / N * (R - 1) / R),
    ]


def main():
    from harness.flags import arguments, require  # not above: fsdp.py is imported without harness/
    from harness.run import Run

    args = arguments(__doc__, FLAGS)
    n = args.hsdp or args.world_size  # ranks that share one copy
    require(args.batch >= args.world_size, f"--batch {args.batch}: give each rank at least one")
    require(args.world_size % n == 0, f"--hsdp {n} does not divide {args.world_size} ranks")
    require(not args.offload or args.impl == "scratch", "--offload is for --impl scratch alone")
    bare = args.reshard and n == args.world_size and not args.train
    require(bare or args.impl not in ("idea", "all"),
            f"--impl {args.impl}: without --no-reshard, --hsdp, --train")
    run = Run(args)
    mesh = dist.init_device_mesh(run.device.type, (args.world_size // n, n),
                                 mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        on_meta = run.freeze(GPT(run.cfg).to(run.dtype))
    with run:  # from here on a dry run's tensors have no memory
        sides = {impl: set_up(run, impl, mesh, on_meta) for impl in run.impls}
        run.train(sides, rows=share(args.batch, run.world_size, run.rank))
        if args.impl != "torch":
            run.textbook(textbook(sides[run.impls[0]].model, mesh))
        run.show_held()
        return run.finish()


if __name__ == "__main__":
    sys.exit(main())
