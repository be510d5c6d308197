"""Fully sharded data parallelism: a rank keeps 1/N of each block, and borrows the rest to run it.

    computes       fwd 0   fwd 1   fwd 2   fwd 3   loss    bwd 3   bwd 2   bwd 1   bwd 0
    gathers    0   1       2       3                       2       1       0
    sums                                                           3       2       1       0

A block is gathered while another computes, and freed after its turn; the last one stays for its
backward. Not drawn is the root, what no block has (here embeddings, last norm and head): gathered
from the beginning of forward to the end of backward.

    model = FSDP(model, model.blocks)  # gradients are summed over ranks, not averaged
    optimizer = torch.optim.AdamW(model.parameter_groups(), lr=1e-3)  # not parameters()
    (loss_sum(model(x), y) / valid_targets_of_all_ranks).backward()  # x, y: this rank's rows
    norm = model.clip_grad_norm_(1.0)  # nn.utils.clip_grad_norm_ would see this rank's part alone
    optimizer.step()
    optimizer.zero_grad()
    state = model.full_state_dict()  # whole, on every rank; load_full_state_dict(state) loads it

P numbers are trained on N ranks in fp32, P_again of them in blocks other than the last:

    on each rank                            plain GPT     here
    parameters, gradients, AdamW states     16 P          16 P/N
    whole parameters, whole gradients       -             root and 2 blocks
      at the end of backward                -             root's gradients, twice
    activations                             whole batch   1/N
    sent per forward and backward           -             4 (2 P + P_again) (N-1)/N
    gathers and sums, L blocks and the root -             2L all-gathers, L+1 reduce-scatters
      sent with --no-reshard                -             8 P (N-1)/N, all blocks stay gathered
With dtype=torch.bfloat16, or a bf16 model, what is gathered has 2 bytes a number; shards, sums of
gradients and states keep 4. Autocast would keep bf16 copies of all weights until backward.
ZeRO-3 in zero.py cuts alike, for any units; FSDP leaves the loop as it was, and builds from meta.
Zhao 2023, "PyTorch FSDP", arXiv:2304.11277, sections 3, 4: a unit is one flat tensor, as here.
At work: fully_shard, part 4 below, which cuts each parameter along dim 0 instead.
Not for: models cut by tensor_parallel.py, experts of moe.py (hybrid_3d.py has both); optimizers of
whole matrices (see harness/whole.py); weights stepped between a forward and its backward; blocks
called by yourself or twice in a forward, or that share parameters; ranks that use different blocks
(two forwards before a backward: parameters); GradScaler; freezing, loading, setting .data later;
reentrant checkpointing, autograd.grad, second derivatives, backwards that raise; models that return
an object that is no container and train no block. Unused ones get 0.
    torchrun --standalone --nproc_per_node=2 fsdp.py
"""
from collections import namedtuple
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

# imports of parts 1 and 2 end here; the rest is for parts 3 to 5
import argparse
import sys

from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from common import GPT, adamw, build, init_weight, loss_sum, share

# ---- 1. the idea -------------------------------------------------------------

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # since 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class IdeaOfUnit(nn.Module):
    """A block whose parameters have memory while it runs. Between runs a rank keeps 1/N of them.

    full     p0 | p1 | p2 | padding    what trains, end to end: the block runs on views of it
             chunk 0   | chunk 1       one for each rank: this rank's chunk is its shard
    """

    def __init__(self, block, group=None):
        super().__init__()
        self.block = block
        self.group = group
        ranks = dist.get_world_size(group)
        trained = {name: p for name, p in block.named_parameters()
                   if p.requires_grad and not name.endswith(".shard")}  # of a unit within
        self.shapes = {name: p.shape for name, p in trained.items()}
        whole = nn.utils.parameters_to_vector(trained.values()).detach()
        self.full = F.pad(whole, (0, -len(whole) % ranks))
        dist.broadcast(self.full, group=group, group_src=0)  # the first rank's -> replicated
        self.shard = nn.Parameter(self.full.chunk(ranks)[dist.get_rank(group)].clone())
        self.free()
        for p in trained.values():
            p.requires_grad_(False).set_()  # empty: the shard is trained in its place

    def forward(self, *inputs):
        self.gather()
        full = self.full.data.requires_grad_()  # the same memory, a leaf: it gets one .grad
        full.register_post_accumulate_grad_hook(self.reduce)
        output = functional_call(self.block, self.views(full), inputs)
        self.free()  # what autograd keeps for backward are views of full: they have no memory now
        if output.requires_grad:  # when backward comes to the block, they have it again
            output.register_hook(lambda gradient: self.gather())
        return output

    def views(self, full):  # {name: parameter, as a view}
        sizes = [shape.numel() for shape in self.shapes.values()]
        *pieces, _ = full.split([*sizes, len(full) - sum(sizes)])  # the last one is padding
        return {name: piece.view(self.shapes[name]) for name, piece in zip(self.shapes, pieces)}

    def gather(self):
        self.full.untyped_storage().resize_(self.full.nbytes)
        all_gather(self.full, self.shard.detach(), group=self.group)  # sharded -> replicated

    def free(self):
        self.full.untyped_storage().resize_(0)

    def reduce(self, leaf):  # autograd calls it when full has its gradient: the block is done
        self.free()
        self.shard.grad = torch.empty_like(self.shard)  # replaces the last one: one backward a step
        reduce_scatter(self.shard.grad, leaf.grad, group=self.group)  # partial -> sharded
        leaf.grad = None


def shard_blocks(model, blocks, group=None):
    """The model as a unit, its blocks too: each trains something. What is frozen must be alike."""
    for i, block in enumerate(blocks):
        blocks[i] = IdeaOfUnit(block, group)
    return IdeaOfUnit(model, group)  # of what is left: embeddings, last norm, head


def idea_step(model, optimizer, x, y, valid, clip):
    """x, y: this rank's rows (B/N, T); valid: the number of targets in all ranks' rows."""
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / valid
    loss.backward()
    square = sum(p.grad.square().sum() for p in model.parameters() if p.requires_grad)
    dist.all_reduce(square, group=model.group)  # partial -> replicated
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm)
    optimizer.step()
    return loss, norm


# ---- 2. the technique (copy this; of part 1 it takes all_gather, reduce_scatter)

# What it adds to the idea, and what that buys. Figures are those of the toy on 2 ranks.
#     blocks have hooks, no wrappers    they keep names, arguments, outputs; may be recomputed
#     asynchronous collectives          10 of 13 travel while others compute, of the idea's 15 none
#     last block and root stay          4.56 MB are sent, not 5.05
#     shards in fp32, on any device     bf16 weights, offload
#     a part for each parameter         parameter groups, checkpoints
#     replicas (HSDP)                   gathers stay within a copy of the model, such as a node
#     from_meta()                       no rank has to make the whole model


# What this rank has of a parameter p.
# run      where it is in p.flatten()
# here     where it is in its unit's shard, and its gradients in a sum
# master   the nn.Parameter that the optimizer steps: it shares shard's memory
Part = namedtuple("Part", "parameter run here master")


class Unit:
    """Parameters that travel together: end to end in one tensor, cut into a chunk for each rank.

        full      p0 | p1 | p2 | padding    (N * chunk,): the parameters are views of it
        buffer    g0 | g1 | g2 | padding    likewise: the gradients of this rank's rows
                  chunk 0 | chunk 1 | ..    equal chunks of both; a parameter may be in several

        shard     this rank's chunk of the parameters, (chunk,), in fp32 or wider: it stays
        own       its chunk of the sum of all ranks' buffers

    Between uses full has no memory, and parameters are empty. What autograd has saved for backward
    are views of full: they lose and regain memory with it.
    """

    def __init__(self, parameters, group, replicas, dtype, home, fill):
        """As FSDP's. dtype: full's."""
        assert len({p.dtype for p in parameters}) == 1, "a block, or the root, has several dtypes"
        ranks = dist.get_world_size(group)
        rank = dist.get_rank(group)
        like = parameters[0]
        wide = torch.promote_types(like.dtype, torch.float32)
        self.group = group
        self.replicas = replicas
        self.shapes = {p: p.shape for p in parameters}  # in order; p itself is empty at times
        self.spans = {}  # {parameter: where it lies in full and in buffer}
        size = 0  # without padding
        for p in parameters:
            self.spans[p] = slice(size, size + p.numel())
            size += p.numel()
        self.full = like.new_empty(size + -size % ranks, dtype=dtype)  # with padding
        self.chunk = len(self.full) // ranks  # numbers in a chunk
        self.mine = slice(rank * self.chunk, (rank + 1) * self.chunk)  # in full and in buffer
        self.places = self.views(self.full)  # {parameter: its view of full}
        self.shard = like.new_zeros(self.chunk, dtype=wide, device=home)
        self.gathering = None  # the all-gather into full that is under way
        self.cut()
        self.take(fill)
        self.free()  # from here on the whole is in no rank's memory

    def views(self, flat):
        """-> {parameter: its view of a tensor that is laid out like full}."""
        return {p: flat[span].view(self.shapes[p]) for p, span in self.spans.items()}

    def cut(self):
        """Makes the parts of this rank's chunk. Its padding is in none of them, and stays zero."""
        self.parts = []
        for p, span in self.spans.items():
            low = max(span.start, self.mine.start)
            high = min(span.stop, self.mine.stop)
            if low < high:  # the numbers of p from low to high in full are in this rank's chunk
                run = slice(low - span.start, high - span.start)
                here = slice(low - self.mine.start, high - self.mine.start)
                self.parts.append(Part(p, run, here, nn.Parameter(self.shard[here])))

    def take(self, whole_of):
        """Fills shard with this rank's parts of the parameters. whole_of(p) -> all of p."""
        for part in self.parts:
            whole = whole_of(part.parameter).detach()
            shape = self.shapes[part.parameter]
            assert whole.shape == shape, f"{whole.shape} for a parameter of {shape}"
            part.master.data.copy_(whole.flatten()[part.run])

    # -- parameters

    def gather(self):
        """Begins to gather the unit, unless it is here or on its way."""
        memory = self.full.untyped_storage()
        if memory.nbytes() == 0:
            memory.resize_(self.full.nbytes)
            for p, place in self.places.items():
                # By .data p gets full's memory, but not its version counter, by which autograd
                # would take each gather for a change of p, and refuse to go backward.
                p.data = place
            own = self.full[self.mine]
            own.copy_(self.shard)  # in full's dtype, on full's device
            # sharded -> replicated, in place
            self.gathering = all_gather(self.full, own, group=self.group, async_op=True)

    def wait(self):
        """After this the parameters can be used. On GPUs the stream waits for it, not the host."""
        if self.gathering:
            self.gathering.wait()
            self.gathering = None

    def free(self):
        """Memory goes from under all views of full, also those that autograd keeps for backward."""
        self.wait()  # not while a collective writes into it
        self.full.untyped_storage().resize_(0)
        for p, place in self.places.items():
            # Empty, but with as many dims as before (a scalar gets one): autograd wants a gradient
            # to have as many, and users make groups by p.dim()
            p.data = torch.atleast_1d(place)[:0]

    def gathered(self, chunk):
        """chunk: shard, or what is laid out like it -> {parameter: whole tensor} of all ranks'."""
        full = chunk.new_empty(self.full.shape, device=self.full.device)
        all_gather(full, chunk.to(full.device), group=self.group)  # sharded -> replicated
        return self.views(full)

    # -- gradients

    def start_sum(self):
        """Begins to sum over the group what autograd has left in the parameters' grad."""
        buffer = self.shard.new_zeros(self.full.shape, device=self.full.device)
        for p, slot in self.views(buffer).items():
            if p.grad is not None:  # this backward has used it
                slot.copy_(p.grad)  # in shard's dtype: bf16 gradients are summed in fp32
                p.grad = None
        own = buffer.new_empty(self.chunk)
        work = reduce_scatter(own, buffer, group=self.group, async_op=True)  # partial -> sharded
        return own, work, buffer  # which lives until the work is done

    def add(self, gradient):
        """Adds a backward's sum, (chunk,), to the masters' gradients."""
        gradient = gradient.to(self.shard.device)
        for part in self.parts:
            new = gradient[part.here]
            if part.master.grad is None:
                part.master.grad = new
            else:  # of a micro-batch before
                part.master.grad += new


class FSDP(nn.Module):
    """Shards a module over the ranks of `group`: a unit for each of `blocks`, and the root.

    loss.backward() sums gradients over ranks, and adds the sums to gradients of `masters`, which
    are this rank's parts of the parameters.

    blocks: submodules, in the order in which they run
    replicas: HSDP, if there are copies of the sharded model, each on a `group` of its own: the
        group of ranks with the same shards, one of each copy. Gathers stay within a copy
    reshard: free blocks after forward, and gather them again for backward
    dtype: of whole weights (None: the module's); the caller casts inputs
    home: the device of shards (None: the module's)
    fill: from_meta's. Without it all ranks begin with the first one's parameters and buffers

    Frozen parameters stay whole, in `dtype`.
    """

    def __init__(self, module, blocks, group=None, replicas=None, reshard=True, dtype=None,
                 home=None, fill=None):
        super().__init__()
        guard(module, group, replicas)
        self.module = module
        self.group = group
        self.reshard = reshard
        module.zero_grad()  # what is left from before is of no step here
        self.frozen = [p for p in module.parameters() if not p.requires_grad]
        for p in self.frozen:
            if p.is_floating_point():
                p.data = p.data.to(dtype or p.dtype)
        if fill is None:
            fill = begin_alike(module, group, replicas)
        new_unit = partial(Unit, group=group, replicas=replicas, dtype=dtype, home=home, fill=fill)
        sharded = [block for block in blocks if trained(block)]  # the others stay whole
        self.block_units = [new_unit(trained(block)) for block in sharded]
        in_blocks = {p for unit in self.block_units for p in unit.shapes}
        rest = [p for p in trained(module) if p not in in_blocks]
        self.root_units = [new_unit(rest)] if rest else []  # none if all of it is frozen
        self.units = self.block_units + self.root_units
        self.parts = [part for unit in self.units for part in unit.parts]
        self.masters = nn.ParameterList(part.master for part in self.parts)
        self.summing = None  # (unit, own, work, buffer): the sum over the group that is under way
        self.adding = []  # [(unit, own, work)]: sums over replicas, which end with backward
        self.summed = set()  # units whose sums this backward has begun
        self.in_backward = False
        self.add_hooks(sharded)

    def add_hooks(self, sharded):
        eager = torch.compiler.disable  # hooks move memory: torch.compile would die of it
        self.module.register_forward_pre_hook(eager(self.begin))
        self.module.register_forward_hook(eager(self.end))
        for i, block in enumerate(sharded):
            block.register_forward_pre_hook(eager(partial(self.enter, i)))
            block.register_forward_hook(eager(partial(self.leave, i)))

    def gather_root(self):
        for unit in self.root_units:
            unit.gather()
            unit.wait()

    def gather_block(self, i):
        if 0 <= i < len(self.block_units):  # before the first and behind the last there is none
            self.block_units[i].gather()

    def free(self):
        for unit in self.units:
            unit.free()

    # -- forward: while a block computes, the next one is gathered

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def begin(self, *_):
        thawed = any(p.requires_grad for p in self.frozen)
        assert not thawed, "FSDP: thawed since, so nobody sums its gradient: make the model anew"
        self.free()  # a forward without a backward has left numbers from before the last step
        self.gather_root()
        self.gather_block(0)

    def end(self, module, inputs, output):
        watch(output, self.begin_backward)

    def enter(self, i, *hook_arguments):
        """Block i is about to compute. The next one travels meanwhile."""
        self.gather_block(i)
        # in backward, also if it is a checkpoint's forward that calls this, i - 1 is next
        self.gather_block(i - 1 if self.in_backward else i + 1)
        self.block_units[i].wait()

    def leave(self, i, block, inputs, output):
        """Block i has computed. The last one stays, since its backward is next."""
        can_see = watch(output, partial(self.backward_reaches, i))
        assert can_see, f"blocks return tensors, or tuples or dicts of them, not {type(output)}"
        is_last = i + 1 == len(self.block_units)
        if self.reshard and not self.in_backward and not is_last:
            self.block_units[i].free()

    # -- backward: while a block computes, the next one is gathered, and the one before is summed

    def begin_backward(self, gradient):
        """Backward has come to an output of the model or of a block."""
        if not self.in_backward:
            self.in_backward = True
            # autograd calls end_backward when all of this backward is over
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        self.gather_root()  # another backward since forward may have freed it

    def backward_reaches(self, i, gradient):
        """Backward has come to the output of block i, and is through with block i + 1."""
        self.begin_backward(gradient)
        if i + 1 < len(self.block_units):
            unit = self.block_units[i + 1]
            unit.free()
            # none yet if an earlier forward of the same loss is still to come
            if any(p.grad is not None for p in unit.shapes):
                self.sum_next(unit)
        self.enter(i)

    def sum_next(self, unit):
        """Ends the sum that is under way, if any, and begins this one: one at a time."""
        self.end_sum()
        self.summing = unit, *unit.start_sum()
        self.summed.add(unit)

    def end_sum(self):
        if self.summing:
            unit, own, work, _ = self.summing
            self.summing = None
            work.wait()
            if unit.replicas is None:
                unit.add(own)
            else:  # partial -> replicated, of 1/N of the numbers
                work = dist.all_reduce(own, group=unit.replicas, async_op=True)
                self.adding.append((unit, own, work))

    def end_backward(self):
        self.free()
        for unit in self.units:
            late = any(p.grad is not None for p in unit.shapes)  # of casts that autocast has kept
            if late or unit not in self.summed:  # also what this rank has not used, but others have
                self.sum_next(unit)
        self.end_sum()
        for unit, own, work in self.adding:
            work.wait()
            unit.add(own)
        self.adding = []
        self.summed = set()
        self.in_backward = False

    # -- a step

    def parameter_groups(self, groups=None):
        """groups: dicts, as an optimizer takes them, of the module's parameters, which still have
        their p.dim() -> dicts with this rank's masters, which are 1-D."""
        master_of = {part.parameter: part.master for part in self.parts}
        known = {p for unit in self.units for p in unit.shapes}
        groups = groups or [{"params": list(master_of)}]
        ours = []
        for group in groups:
            params = [p for p in group["params"] if p.requires_grad]
            assert known.issuperset(params), "make groups of model.module.parameters()"
            masters = [master_of[p] for p in params if p in master_of]  # with a part here
            ours.append({**group, "params": masters})
        return ours

    def clip_grad_norm_(self, max_norm):
        """Scale the whole gradient to a norm of max_norm at most (0: do not) -> its norm before."""
        unit = self.units[0]
        own = nn.utils.get_total_norm([master.grad for master in self.masters])
        # own is on the CPU with home="cpu", and where a rank has no parts: of [] it is a 0 there
        square = own.to(unit.full.device, unit.shard.dtype).square()
        dist.all_reduce(square, group=self.group)  # partial -> replicated
        norm = square.sqrt()
        if max_norm:
            finite = norm.nan_to_num(0, posinf=0)  # inf or nan counts as 0: nothing is scaled
            nn.utils.clip_grads_with_norm_(self.masters, max_norm, finite)
        return norm

    # -- the whole: {name: whole tensor} on every rank. All must call it

    def full_state_dict(self):
        """What is trained in shards' dtype, fp32 or fp64, views of a unit; the rest as it is."""
        found = {}  # {parameter: whole tensor}
        for unit in self.units:
            found.update(unit.gathered(unit.shard))
        state = self.module.state_dict(keep_vars=True)  # the Parameters themselves, keys of found
        return {name: found.get(t, t).detach() for name, t in state.items()}

    def full_gradients(self):
        """Of what is trained; a tied parameter's once."""
        found = {}  # {parameter: whole gradient}
        for unit in self.units:
            gradient = torch.zeros_like(unit.shard)
            for part in unit.parts:
                gradient[part.here] = part.master.grad
            found.update(unit.gathered(gradient))
        return {name: found[p] for name, p in self.module.named_parameters() if p in found}

    def load_full_state_dict(self, state):
        """full_state_dict's inverse. A rank takes its parts of what is the same on all ranks."""
        tensors = self.module.state_dict(keep_vars=True)
        assert state.keys() <= tensors.keys(), f"{state.keys() - tensors} are not in this model"
        # the first of two tied names, which is the one that safetensors has
        names = {t: name for name, t in reversed(tensors.items())}
        self.free()
        for unit in self.units:
            unit.take(lambda p: state[names[p]])
        for t, name in names.items():
            if t.numel():  # not empty, as all is that units have: what is frozen, buffers
                assert state[name].shape == t.shape, f"{name}: {state[name].shape}"
                t.data.copy_(state[name])

    def refuse(self, *_, **__):
        raise RuntimeError("FSDP: move, cast and copy the module before; average model.masters")

    # masters would no longer be views of shards
    _apply = refuse  # to(), cuda(), half() call it
    __deepcopy__ = refuse


def begin_alike(module, group, replicas):
    """Gives all ranks what the first one has -> what Unit takes as `fill`."""
    for tensor in [*module.parameters(), *module.buffers()]:
        has_memory = tensor.untyped_storage().nbytes() >= tensor.nbytes
        assert has_memory or not tensor.requires_grad, "a module of from_meta: give fill"
        tensor.data = tensor.data.contiguous()  # a broadcast sends memory, whatever the strides
        dist.broadcast(tensor.data, group=group, group_src=0)  # the first rank's -> replicated
        if replicas is not None:
            dist.broadcast(tensor.data, group=replicas, group_src=0)  # the first copy's, likewise
    return lambda p: p


def trained(module):
    return [p for p in module.parameters() if p.requires_grad]


def watch(output, reached):
    """Calls `reached` when backward comes to one of the tensors that a module has returned -> were
    there any?"""
    tensors = [t for t in tree_leaves(output) if torch.is_tensor(t)]
    for t in tensors:
        if t.requires_grad:
            t.register_hook(reached)
    return bool(tensors)


def from_meta(module, device, init):
    """A module on the meta device -> what FSDP takes as `fill`.

    Afterwards the module is on `device`, what is frozen is filled, what is trained has no memory.
    init(name, tensor): fills a tensor of the module, a trained one in fp32 or wider. Values must
    depend on the name alone: a rank calls it only for what it keeps, and has at most one whole
    trained parameter at a time, besides the memory of a unit's full
    """

    def replacement(name, t):
        if t.requires_grad:
            number = torch.zeros((), dtype=t.dtype, device=device)
            return nn.Parameter(number.expand(t.shape))  # without memory for more
        filled = torch.empty(t.shape, dtype=t.dtype, device=device)
        init(name, filled)
        return nn.Parameter(filled, False) if isinstance(t, nn.Parameter) else filled  # a buffer

    made = {}  # {tensor on the meta device: what replaces it, under each of its names}
    all_names = dict(remove_duplicate=False)
    for name, t in [*module.named_parameters(**all_names), *module.named_buffers(**all_names)]:
        if t not in made:
            made[t] = replacement(name, t)
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, made[t])
    names = {p: name for name, p in module.named_parameters()}

    def fill(p):
        whole = torch.empty_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        init(names[p], whole)
        return whole

    return fill


# -- mistakes that nobody would see


def guard(module, group, replicas):
    assert replicas is None or group is not None, "replicas wants a group: the ranks of one copy"
    assert not any(hasattr(m, "is_of_experts") for m in module.modules()), (
        "ranks have different experts: take hybrid_3d.py")
    known = any(hasattr(p, "is_sharded") for p in module.parameters())
    assert not known, "these parameters are in an FSDP already: make the model anew"
    for p in trained(module):
        p.is_sharded = True  # for refuse_step
    module.register_state_dict_pre_hook(refuse_state_dict)


def refuse_step(optimizer, *_):
    """torch calls it before every step of every optimizer, once this file is imported."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    of_model = any(hasattr(p, "is_sharded") for p in params)  # they have no gradients
    assert not of_model, "FSDP: make the optimizer afterwards, of model.parameter_groups()"


register_optimizer_step_pre_hook(refuse_step)


def refuse_state_dict(module, prefix, keep_vars):
    # with keep_vars=True the Parameters serve as keys of full_state_dict
    assert keep_vars, "FSDP: parameters are empty: save full_state_dict()"


# ---- 3. the toy GPT, parallelized --------------------------------------------


def parallelize(model, mesh, seed, device, **options):
    """model: on the meta device: no rank has to make all of it. mesh: (replicate, shard)."""
    fill = from_meta(model, device, partial(init_weight, layers=len(model.blocks), seed=seed))
    copies = mesh["replicate"]
    replicas = copies.get_group() if copies.size() > 1 else None
    return FSDP(model, model.blocks, mesh["shard"].get_group(), replicas, fill=fill, **options)


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


def idea_units(model):
    return [unit for unit in model.modules() if isinstance(unit, IdeaOfUnit)]


def idea_gathered(model, tensors, kind):
    """tensors: the plain model's, by name. kind: "data" or "grad", of shards

    -> {name: whole tensor}
    """
    found = {}  # {parameter: whole tensor}
    for unit in idea_units(model):
        full = torch.empty_like(unit.full)
        all_gather(full, getattr(unit.shard, kind), group=unit.group)  # sharded -> replicated
        for name, view in unit.views(full).items():
            found[unit.block.get_parameter(name)] = view
    return {name: found.get(t, t) for name, t in tensors.items()}


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


def refuse(args, require, N):
    """N: ranks that share one copy of the model."""
    require(args.batch >= args.world_size, f"--batch {args.batch}: give each rank at least one")
    require(args.world_size % N == 0, f"--hsdp {N} does not divide {args.world_size} ranks")
    require(args.impl == "scratch" or not args.offload, "--offload is for --impl scratch alone")
    ours = not args.reshard or N < args.world_size or args.train
    require(args.impl not in ("idea", "all") or not ours,
            f"--impl {args.impl}: without --no-reshard, --hsdp, --train")


def set_up(run, impl, mesh, on_meta):
    """-> a Side: what the run steps, judges and saves, see harness/run.py."""
    from harness.checkpoint import pieces_of_units
    from harness.whole import wholes_of_units

    args = run.args
    if impl == "torch":
        shard_dtype = torch.promote_types(run.dtype, torch.float32)  # of sums, too
        model = run.freeze(build(run.cfg, args.seed, run.device, shard_dtype))
        model = parallelize_at_work(model, mesh, args.reshard, run.dtype)
        return run.side(model, adamw(model.parameters(), args.lr), train_step_at_work)
    if impl == "idea":
        plain = run.build()
        state = plain.state_dict(keep_vars=True)
        gradients = dict(plain.named_parameters())
        model = shard_blocks(plain, plain.blocks)
        return run.side(model, adamw(model.parameters(), args.lr), idea_step,
                        full_gradients=partial(idea_gathered, model, gradients, "grad"),
                        full_state_dict=partial(idea_gathered, model, state, "data"))
    home = "cpu" if args.offload else None
    model = parallelize(on_meta, mesh, args.seed, run.device, reshard=args.reshard, home=home)
    named = list(model.module.named_parameters())
    optimizer = run.optimizer(named, groups=model.parameter_groups,
                              wholes=partial(wholes_of_units, model.units, model.group))
    return run.side(model, optimizer, train_step,
                    pieces=partial(pieces_of_units, model.units, named, optimizer),
                    full_gradients=model.full_gradients,
                    full_state_dict=model.full_state_dict)


def textbook(model, mesh):
    """b, c: bytes of a number in shard, in full. P_again: what is gathered for backward again.
    own: numbers that the optimizer steps here, in FSDP no padding."""
    R, N = mesh.shape
    if isinstance(model, FSDP):
        units = model.units
        masters = model.masters
        again = model.block_units[:-1] if model.reshard else []
    else:
        units = idea_units(model)
        masters = [unit.shard for unit in units]
        again = units
    b = units[0].shard.itemsize
    c = units[0].full.itemsize
    P = sum(unit.full.numel() for unit in units)
    P_again = sum(unit.full.numel() for unit in again)
    own = sum(master.numel() for master in masters)
    others = (N - 1) / N
    return [
        ("held parameters", f"b P/N, P = {P:,} with padding", b * P / N),
        ("held gradients", "b P/N", b * P / N),
        ("held optimizer", "2 b own + 4 per master (step counter)", 2 * b * own + 4 * len(masters)),
        ("wire all_gather", "c (P + P_again) (N-1)/N", c * (P + P_again) * others),
        ("wire reduce_scatter", "b P (N-1)/N", b * P * others),
        ("wire all_reduce", "norm: 2 b (N-1)/N, R copies: 2 b P/N (R-1)/R",
         2 * b * others + 2 * b * P / N * (R - 1) / R),
    ]


def main():
    from harness.flags import arguments, require  # not above: fsdp.py is imported without harness/
    from harness.run import Run

    args = arguments(__doc__, FLAGS)
    N = args.hsdp or args.world_size
    refuse(args, require, N)
    run = Run(args)
    mesh = dist.init_device_mesh(run.device.type, (args.world_size // N, N),
                                 mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        on_meta = run.freeze(GPT(run.cfg).to(run.dtype))
    with run:  # from here on a dry run's tensors have no memory
        sides = {impl: set_up(run, impl, mesh, on_meta) for impl in run.impls}
        run.train(sides, rows=share(args.batch, run.world_size, run.rank))
        if args.impl != "torch":
            run.textbook(textbook(sides[run.impls[0]].model, mesh))
        return run.finish()


if __name__ == "__main__":
    sys.exit(main())
