"""Fully sharded data parallelism: a rank keeps 1/N of each block, and borrows the rest to run it.

    computes       fwd 0   fwd 1   fwd 2   fwd 3   loss    bwd 3   bwd 2   bwd 1   bwd 0
    gathers    0   1       2       3               3       2       1       0
    sums                                                           3       2       1       0

0 to 3 are blocks. One is gathered while its neighbour computes, and freed when it is done. What is
in no block, here the tied embedding, the positions and the last norm, is the root: it is gathered
from the beginning of a step to its end. Each block and the root is a unit: its parameters lie end
to end, so that one all-gather brings them and one reduce-scatter sums their gradients. P_blocks of
the P parameters lie in blocks.

    on each rank, P parameters of 4 bytes   plain GPT     here, on N ranks
    parameters, gradients, AdamW states     16 P          16 P/N
    gathered at one time                    -             the root and at most 2 blocks
    activations                             whole batch   1/N
    sent per step                           -             4 (2 P + P_blocks) (N-1)/N
      by                                    -             2L+1 all-gathers, L+1 reduce-scatters
    with --no-reshard                       -             8 P (N-1)/N, all blocks stay gathered

zero.py --stage 3 holds the same 16 P/N. It is the last rung of a ladder that begins with the
optimizer: ZeRO takes the optimizer's place and finds out by itself in which order units run. FSDP
begins with the module: it is told the blocks, any elementwise optimizer steps the shards, no rank
ever needs the whole model (meta device), and groups of ranks can be replicas (--hsdp).

    model = FSDP(model, model.blocks)  # any module; gradients are summed over ranks, not averaged
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
    (loss_sum(model(x), y) / valid_targets_of_all_ranks).backward()  # x, y: this rank's rows
    norm = model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    state = model.full_state_dict()  # gathers what to save

Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
arXiv:2304.11277, sections 3 and 4. At work: torch.distributed.fsdp.fully_shard, section 3 below.

    torchrun --standalone --nproc_per_node=2 fsdp.py
"""
import harness  # before torch, which warns where NumPy is missing

import dataclasses
import math
import sys
from collections import namedtuple
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from common import (
    ANY, GPT, Flag, Run, Side, adamw, arguments, build, init_weights, loss_sum, require, share)
from harness.checkpoint import STATES, pieces_of, run_pieces

# ---- 1. the technique (copy this; it needs only torch) -----------------------

# renamed in torch 2.13
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# A place where a module has a parameter. path: the name of that module in the whole model
Use = namedtuple("Use", "module attribute path")

# Elements start to stop of a shard: a view of them, as a parameter that an optimizer steps
Segment = namedtuple("Segment", "start stop parameter")


class Unit:
    """Parameters of one dtype that are gathered and freed together.

    Laid end to end they are `full`, and each of the group's n ranks keeps 1/n of it, its `shard`.
    The modules use views into `full`. Its memory comes and goes, the tensor object stays.
    """

    def __init__(self, places, group, replicas, device, dtype, home, init):
        """places: {parameter: [Use, ..]}, several where it is tied. replicas: a group or None.

        device, dtype: where and in what it computes (dtype None: the parameters' own). home: where
        the shard lives. init: fills parameters that are on the meta device, see FSDP.
        """
        dtypes = {p.dtype for p in places}
        if len(dtypes) > 1:
            raise ValueError(f"FSDP: a unit's parameters must be of one dtype, not {dtypes}: make "
                             "a block of what has another")
        own_dtype = dtypes.pop()
        n = dist.get_world_size(group)
        self.group = group  # n ranks, each with a shard of its own
        self.replicas = replicas  # ranks with the same shard, each in another copy, or None
        self.names = [names_of(uses) for uses in places.values()]  # [[full name, ..], ..]
        self.owners = {use.module for uses in places.values() for use in uses}  # their modules
        self.shapes = [p.shape for p in places]
        self.ranges = []  # where each parameter begins and ends in full
        self.size = 0  # elements of all of them
        for p in places:
            self.ranges.append((self.size, self.size + p.numel()))
            self.size += p.numel()
        # elements of a shard; the last shards may end in padding, which is zero and stays so
        each = -(-self.size // n)
        self.first = dist.get_rank(group) * each  # where this rank's shard begins in full
        self.shard = nn.Parameter(torch.zeros(each, dtype=own_dtype, device=home))  # (each,)
        self.full = torch.empty(n * each, dtype=dtype or own_dtype, device=device)  # (n each,)
        self.borrowed = [self.borrow(view) for view in self.views(self.full)]  # what modules use
        self.segments = [Segment(0, each, self.shard)]  # what optimizers step
        self.gathering = None  # Work of an all-gather that is under way
        self.sending = None  # (each,), what that all-gather reads: kept until it is over
        self.reducing = None  # Work of a reduce-scatter or an all-reduce that is under way
        self.flat = None  # (n each,), this rank's gradients while a reduce-scatter reads them
        self.part = None  # (each,), the sum for this shard until the segments' gradients have it

        self.replace(places, init)
        self.free()

    def replace(self, places, init):
        """Keep this rank's part of the parameters, and give the modules the borrowed ones."""
        for i, (p, uses) in enumerate(places.items()):
            low, high = self.overlap(i)
            if low < high:
                if p.is_meta:  # made here, one at a time, and only where a part of it is kept
                    p = made(p, uses[0], self.full.device, init)
                self.store(i, p.detach())
            for use in uses:
                setattr(use.module, use.attribute, self.borrowed[i])

    def borrow(self, view):
        """A parameter in the memory of the view.

        nn.Parameter(view) would share its count of changes with `full`: autograd would take a
        gather for a change of the parameter, and refuse to go backward.
        """
        parameter = nn.Parameter(torch.empty(0, dtype=view.dtype, device=view.device))
        parameter.data = view
        return parameter

    def views(self, flat):
        """(n each,) -> the parameters in it, in their shapes."""
        pieces = []
        for shape, (start, stop) in zip(self.shapes, self.ranges):
            pieces.append(flat[start:stop].view(shape))
        return pieces

    def overlap(self, i):
        """-> low, high: the elements of the shard that are parameter i's; none if low >= high."""
        start, stop = self.ranges[i]
        low = max(start - self.first, 0)
        high = min(stop - self.first, self.shard.numel())
        return low, high

    def store(self, i, whole):
        """Copy this rank's part of parameter i into the shard."""
        low, high = self.overlap(i)
        if low < high:
            begin = low + self.first - self.ranges[i][0]  # where that part begins in the parameter
            self.shard.data[low:high] = whole.flatten()[begin:begin + high - low]

    def start_gather(self):
        """Begin to gather, unless the parameters are here or on their way."""
        memory = self.full.untyped_storage()
        if memory.nbytes() == 0:
            memory.resize_(self.full.numel() * self.full.itemsize)
            self.sending = self.shard.detach().to(self.full.device, self.full.dtype)
            work = all_gather(self.full, self.sending, group=self.group, async_op=True)
            self.gathering = work  # sharded -> replicated

    def wait(self):
        """After this the parameters can be used."""
        if self.gathering:
            self.gathering.wait()
            self.gathering = None
            self.sending = None

    def free(self):
        self.wait()
        self.full.untyped_storage().resize_(0)

    def has_gradients(self):
        return any(p.grad is not None for p in self.borrowed)

    def start_reduce(self):
        """Begin to sum over ranks what autograd has left in the parameters' grad.

        One that this rank's backward did not use adds zeros.
        """
        # If backward has come to this unit before (a block that runs twice), self.part may still
        # hold that sum. It goes to the segments first, since self.part is made anew. By now it is
        # complete: FSDP.close() finishes every sum before it begins the next.
        self.collect()
        self.flat = torch.empty(self.full.numel(), dtype=self.shard.dtype, device=self.full.device)
        pieces = []
        for p in self.borrowed:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            pieces.append(gradient.flatten())
        pieces.append(self.flat.new_zeros(self.flat.numel() - self.size))  # padding
        torch.cat(pieces, out=self.flat)
        self.forget_gradients()
        self.part = self.flat.new_empty(self.shard.shape)
        work = reduce_scatter(self.part, self.flat, group=self.group, async_op=True)
        self.reducing = work  # partial -> sharded

    def finish_reduce(self):
        """Wait for the sum over the group; where there are replicas, begin to sum over them."""
        if self.flat is not None:  # a reduce-scatter is under way
            self.reducing.wait()
            self.reducing = None
            self.flat = None
            if self.replicas:
                work = dist.all_reduce(self.part, group=self.replicas, async_op=True)
                self.reducing = work  # partial -> replicated

    def collect(self):
        """After finish_reduce: wait for the sum, and add it to the gradients of the segments."""
        if self.reducing:
            self.reducing.wait()
            self.reducing = None
        if self.part is not None:
            part = self.part.to(self.shard.device)
            self.part = None
            for start, stop, parameter in self.segments:
                if parameter.grad is None:
                    parameter.grad = part[start:stop]
                else:
                    parameter.grad.add_(part[start:stop])

    def forget_gradients(self):
        for p in self.borrowed:
            p.grad = None

    def reset(self):
        """Begin anew, also after a backward that ended in an exception."""
        self.free()
        self.forget_gradients()
        if self.reducing:
            self.reducing.wait()  # its memory may be used again only after that
        self.reducing = None
        self.flat = None
        self.part = None

    def cut(self, groups):
        """Make a segment of each run of parameters that belong to the same group of an optimizer.

        groups: for each parameter a number, or None -> [(number or None, nn.Parameter), ..].
        """
        runs = []  # [(number, start, stop)]
        for i, number in enumerate(groups):
            low, high = self.overlap(i)
            if low >= high:
                continue  # nothing of it is in this shard
            if runs and runs[-1][0] == number:
                _, low, _ = runs.pop()  # the run before goes on
            runs.append((number, low, high))
        self.segments = []
        result = []
        for number, start, stop in runs:
            parameter = nn.Parameter(self.shard.data[start:stop])
            self.segments.append(Segment(start, stop, parameter))
            result.append((number, parameter))
        return result

    def gradient(self):
        """(each,), the gradient of the shard; zeros where there is none."""
        gradient = torch.zeros_like(self.shard)
        for start, stop, parameter in self.segments:
            if parameter.grad is not None:
                gradient[start:stop] = parameter.grad
        return gradient

    def gathered(self, shard):
        """(each,) -> {name: whole tensor}, a tied one under each of its names; collective."""
        flat = shard.new_empty(self.full.numel(), device=self.full.device)
        all_gather(flat, shard.detach().to(flat.device), group=self.group)  # sharded -> replicated
        found = {}
        for names, view in zip(self.names, self.views(flat)):
            for name in names:
                found[name] = view
        return found


class FSDP(nn.Module):
    """Shards any module over the ranks of `group`: a unit for each of `blocks`, one for the rest.

    model(x) and loss.backward() are as ever. When backward returns, each rank has its part of the
    gradients, summed over all ranks and added to what was there before. optimizer() makes what
    steps them, clip_grad_norm_() knows the norm over all ranks, full_state_dict() gathers.

    blocks: submodules, best in the order in which they run; those with nothing to train are skipped
    replicas: a group of the ranks that hold the same shard in other copies of the model, or None
    reshard: free blocks after forward, and gather them again for backward
    dtype: what computes and travels, if it is not the parameters' own; shards and sums keep theirs
    device, home: where the module computes, and where the shards live (None: there as well)
    init(holder, prefix): fills the only parameter of the module `holder`, which was on the meta
        device, with the same values on every rank. holder.named_parameters(prefix=prefix) gives
        the name that the parameter has in the whole model

    All ranks begin with the first one's parameters and buffers, but for what init fills; then each
    has buffers of its own. Frozen parameters stay whole on every rank, in `dtype`. All ranks must
    use the same units in a step. In a unit that is used, a parameter that no rank uses has a
    gradient of zeros, not None. Between steps the module's parameters have no memory. Call the
    FSDP, and let the module call its blocks (not a method of theirs). Blocks return tensors, or
    tuples, lists, dicts and dataclasses of them.
    """

    def __init__(self, module, blocks, group=None, replicas=None, reshard=True, dtype=None,
                 device=None, home=None, init=None):
        super().__init__()
        blocks = list(dict.fromkeys(blocks))  # one that runs several times is one block
        check(module, blocks)
        self.module = module  # whose parameters are borrowed from now on
        self.group = group  # the ranks that share the shards
        self.reshard = reshard
        self.device = torch.device(device or device_of(module))  # where it computes
        self.state_names = names_in_state(module)  # {state_dict name: parameter or buffer name}
        self.frozen = []  # parameters that are not trained
        self.blocks = []  # units of the blocks, in their order
        self.root = None  # the unit of what is in no block, if there is anything
        self.units = []  # all of them, the root last
        self.summed = None  # the unit whose reduce-scatter is under way
        self.queued = False  # will autograd call finish() when this backward is over?
        self.grouped = False  # have the shards been cut by an optimizer's groups?

        self.unify(group, replicas)
        self.move_buffers()
        places = places_of(module)
        self.keep_whole(places, dtype, init)
        options = dict(group=group, replicas=replicas, device=self.device, dtype=dtype,
                       home=home or self.device, init=init)
        for block in blocks:
            taken = self.take(places, set(block.modules()))
            if taken:
                self.add_hooks(block, len(self.blocks))
                self.blocks.append(Unit(taken, **options))
        self.units += self.blocks
        if places:
            self.root = Unit(places, **options)
            self.units.append(self.root)
        self.shards = nn.ParameterList(unit.shard for unit in self.units)  # what optimizers step
        for unit in self.units:
            for p in unit.borrowed:
                p.register_post_accumulate_grad_hook(self.expect_end)
            for owner in unit.owners:
                owner.register_state_dict_pre_hook(refuse_state)
                owner.register_load_state_dict_pre_hook(refuse_state)

    def unify(self, group, replicas):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            if not tensor.is_meta:
                broadcast(tensor, group, replicas, self.device)

    def move_buffers(self):
        for owner in self.module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                setattr(owner, name, buffer.to(self.device))

    def keep_whole(self, places, dtype, init):
        """Take what is frozen or empty out of `places`: it moves to where the module computes."""
        left_alone = [p for p in places if not p.requires_grad or p.numel() == 0]
        for p in left_alone:
            uses = places.pop(p)
            if p.is_meta:
                p = nn.Parameter(made(p, uses[0], self.device, init), p.requires_grad)
                for use in uses:
                    setattr(use.module, use.attribute, p)
            p.data = p.data.to(self.device)
            if dtype and p.is_floating_point():
                p.data = p.data.to(dtype)
            if not p.requires_grad:
                self.frozen.append(p)

    def take(self, places, inside):
        """Take those parameters out of `places` that are used within these modules alone."""
        taken = {}
        for p in list(places):
            if all(use.module in inside for use in places[p]):
                taken[p] = places.pop(p)
        return taken

    def add_hooks(self, block, i):
        block.register_forward_pre_hook(partial(self.before_forward, i))
        block.register_forward_hook(partial(self.after_forward, i))

    # forward: a block is gathered while the one before it computes

    def forward(self, *args, **kwargs):
        if not in_backward():
            self.begin()
        self.gather_root(following=0)
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            watch(tensors_in(output), self.backward_begins)
        elif not in_backward():  # an evaluation: no backward will come and free the units
            self.refuse_own(self.root, output)
            for unit in self.units:
                unit.free()
        return output

    def begin(self):
        """Leave nothing behind of a forward without backward, or of a backward that broke off.

        Raises where requires_grad has changed since FSDP was made, unless of a whole unit.
        """
        changed = any(p.requires_grad for p in self.frozen)
        for unit in self.units:
            unit.reset()
            trained = [p.requires_grad for p in unit.borrowed]
            if any(trained) and not all(trained):  # a whole unit may be frozen or thawed
                changed = True
        if changed:
            raise RuntimeError("FSDP: requires_grad has changed: freeze and thaw before FSDP, or "
                               "all of a unit together")
        self.summed = None
        self.queued = False

    def gather_root(self, following):
        """The root is here after this, and the block that follows on its way."""
        if self.root:
            self.root.start_gather()
        self.prefetch(following)
        if self.root:
            self.root.wait()

    def prefetch(self, i):
        if 0 <= i < len(self.blocks):
            self.blocks[i].start_gather()

    def before_forward(self, i, block, inputs):
        self.blocks[i].start_gather()
        if not in_backward():  # recomputation goes through the blocks from the last to the first
            self.prefetch(i + 1)
        self.blocks[i].wait()

    def after_forward(self, i, block, inputs, output):
        tensors = tensors_in(output)
        if not tensors:
            raise TypeError(f"FSDP: no tensor is found in the {type(output).__name__} that a block "
                            "returns: return tensors, tuples, lists, dicts or dataclasses")
        if torch.is_grad_enabled():
            watch(tensors, partial(self.backward_reaches, i))
        if self.reshard and not in_backward():
            self.refuse_own(self.blocks[i], output)
            self.blocks[i].free()

    def refuse_own(self, unit, output):
        """An output that lies in the memory of a parameter would be gone."""
        for t in tensors_in(output):
            if unit and t.untyped_storage()._cdata == unit.full.untyped_storage()._cdata:
                raise RuntimeError("FSDP: a module returns a view of its own parameter, whose "
                                   "memory is freed now: return a clone")

    # backward: a block is gathered, and one is summed, while the block between them computes

    def expect_end(self, *_):
        """Backward has come to something of ours: finish() shall be called when it is over."""
        if torch.is_grad_enabled():
            raise RuntimeError("FSDP: create_graph=True: sums over ranks are not in the graph")
        if not self.queued:
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
            self.queued = True

    def backward_begins(self, gradient):
        self.expect_end()
        self.gather_root(following=len(self.blocks) - 1)

    def backward_reaches(self, i, gradient):
        """Backward is at the end of block i: it is through with i + 1, and i - 1 comes next."""
        self.expect_end()
        if i + 1 < len(self.blocks):
            self.close(self.blocks[i + 1])
        self.blocks[i].start_gather()
        self.prefetch(i - 1)
        self.blocks[i].wait()

    def close(self, unit):
        unit.free()
        if unit.has_gradients():
            if self.summed:
                self.summed.finish_reduce()  # it had the time of this unit's backward to travel
            unit.start_reduce()
            self.summed = unit

    def finish(self):
        for unit in self.units:
            # Block 0 and the root are closed here for the first time. A unit that was closed before
            # has something to sum only if autograd has given it a gradient since
            self.close(unit)
        for unit in self.units:
            unit.finish_reduce()
            unit.collect()
        self.summed = None
        self.queued = False

    # the step

    def clip_grad_norm_(self, max_norm):
        """Scale gradients to a norm of at most max_norm over all ranks -> what it was.

        Where max_norm is 0 there is no limit. A norm of inf or nan leaves them as they are, so that
        one can see whose it is.
        """
        gradients = [p.grad for p in self.shards if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        wide = torch.float32  # at least: in fp16 the square of 256 is inf
        for unit in self.units:
            wide = torch.promote_types(wide, unit.shard.dtype)
        # the norm is at the shards' home, and ranks communicate on self.device; without gradients
        # it is a zero in fp32, whatever other ranks' dtype is
        square = norm.to(self.device, wide).square()
        dist.all_reduce(square, group=self.group)  # partial -> replicated
        norm = square.sqrt()
        # inf and nan are passed on as 0, since gradients of norm 0 are not scaled
        finite = norm.nan_to_num(0, posinf=0)
        nn.utils.clip_grads_with_norm_(self.shards, max_norm or math.inf, finite)
        return norm

    def optimizer(self, kind, groups=None, **options):
        """kind(this rank's shards, **options), refused unless it is elementwise.

        A shard is a flat piece of several parameters. What looks at a parameter's shape or norm,
        such as Adafactor, Muon or LAMB, would train something else. groups: see parameter_groups.
        """
        tried = [{}]  # without groups there are no options but **options
        if groups:
            tried = groups
        for group in tried:
            own = {name: value for name, value in group.items() if name != "params"}
            check_elementwise(kind, options, own, self.units[0].shard.device)
        return kind(self.parameter_groups(groups), **options)

    def parameter_groups(self, groups=None):
        """What an elementwise optimizer takes: flat shards. All are 1-D, matrices and biases alike.

        groups: None, or [{"params": parameters of the module, "weight_decay": .., ..}, ..], taken
        from the module after it was sharded: they have their names and shapes then, but no values.
        A rank may have nothing of a group. The shards are cut by groups, so this is done once.
        """
        if groups is None:
            return [{"params": list(self.shards)}]
        number_of = self.numbers(groups)
        if self.grouped or any(p.grad is not None for p in self.shards):
            raise RuntimeError("FSDP: groups are made once, and before the first backward")
        self.grouped = True
        result = [{**group, "params": []} for group in groups]
        shards = []
        for unit in self.units:
            numbers = [number_of.get(p) for p in unit.borrowed]  # None: it is in no group
            for number, parameter in unit.cut(numbers):
                shards.append(parameter)
                if number is not None:
                    result[number]["params"].append(parameter)
        self.shards = nn.ParameterList(shards)
        return result

    def numbers(self, groups):
        """-> {parameter: the number of its group}."""
        known = set(self.module.parameters())
        numbers = {}
        for number, group in enumerate(groups):
            for p in group["params"]:
                if p not in known:
                    raise ValueError("FSDP: a group has a parameter that the module has not: make "
                                     "groups of module.parameters() after FSDP")
                if p in numbers:
                    raise ValueError("FSDP: a parameter is in two groups")
                numbers[p] = number
        return numbers

    # the state, gathered

    def full_state_dict(self):
        """-> {name: whole tensor}, the state_dict of the module as it was; collective.

        Frozen parameters are of `dtype` here, if that was given, and all others of their own. What
        no unit has (frozen parameters, buffers) is not copied: it is the module's own memory.
        """
        found = dict(self.rest())
        for unit in self.units:
            found.update(unit.gathered(unit.shard))
        return {name: found[own] for name, own in self.state_names.items()}

    def full_gradients(self):
        """-> {name: whole gradient}, of what is trained, a tied one once; collective."""
        found = {}
        for unit in self.units:
            found.update(unit.gathered(unit.gradient()))
        return {name: found[name] for name, _ in self.module.named_parameters() if name in found}

    def load_full_state_dict(self, state):
        """The inverse of full_state_dict: every rank is given all of it, and keeps its part."""
        if set(state) != set(self.state_names):
            different = sorted(set(state) ^ set(self.state_names))
            raise KeyError(f"FSDP: names that the module or the state has not: {different}")
        given = {own: state[name] for name, own in self.state_names.items()}
        shapes = {name: tensor.shape for name, tensor in self.rest()}
        for unit in self.units:
            for names, shape in zip(unit.names, unit.shapes):
                shapes[names[0]] = shape
        for name, shape in shapes.items():
            if given[name].shape != shape:
                raise ValueError(f"FSDP: {name} is {tuple(shape)} here: nothing was loaded")
        for unit in self.units:
            for i, names in enumerate(unit.names):
                unit.store(i, given[names[0]])
        for name, tensor in self.rest():
            tensor.copy_(given[name])

    def rest(self):
        """(name, tensor) of what is in no unit, but in the state_dict: frozen ones and buffers."""
        sharded = self.sharded_names()
        tensors = dict(self.module.named_parameters(remove_duplicate=False))
        tensors.update(self.module.named_buffers(remove_duplicate=False))
        for name in dict.fromkeys(self.state_names.values()):
            if name not in sharded:
                yield name, tensors[name].detach()

    def sharded_names(self):
        return {name for unit in self.units for names in unit.names for name in names}

    def _apply(self, *_, **__):
        raise RuntimeError("FSDP: give device, home and dtype when it is made")

    def __reduce_ex__(self, protocol):
        raise TypeError("FSDP: cannot be copied: make another one, of a module of its own, and "
                        "let it load_full_state_dict()")


# what Unit and FSDP use


def places_of(module):
    """-> {parameter: [Use, ..]}, every place of every parameter."""
    places = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for name, p in owner.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(p, []).append(Use(owner, name, path))
    return places


def names_in_state(module):
    """-> {name in its state_dict: name among its parameters and buffers}.

    They differ where torch's CheckpointWrapper is: it leaves its own name out of the state_dict's.
    """
    own = dict(module.named_parameters(remove_duplicate=False))
    own.update(module.named_buffers(remove_duplicate=False))
    name_of = {}  # {tensor: its first name}
    for name, tensor in own.items():
        name_of.setdefault(tensor, name)
    found = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name in own:
            found[name] = name
        elif isinstance(tensor, torch.Tensor) and tensor in name_of:
            found[name] = name_of[tensor]
        else:
            raise ValueError(f"FSDP: {name} of the state_dict is no parameter or buffer: FSDP can "
                             "neither gather nor load it")
    return found


def names_of(uses):
    return [f"{use.path}.{use.attribute}".lstrip(".") for use in uses]


def device_of(module):
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.is_meta:
            return tensor.device
    return torch.get_default_device()


def made(parameter, use, device, init):
    """A parameter that is on the meta device, with memory and filled by `init` -> tensor."""
    if init is None:
        raise ValueError("FSDP: a parameter is on the meta device: give init=, which fills it")
    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    holder = nn.Module()  # with nothing else in it
    holder.register_parameter(use.attribute, nn.Parameter(empty, parameter.requires_grad))
    init(holder, prefix=use.path)
    return getattr(holder, use.attribute).detach()


def broadcast(tensor, group, replicas, device):
    """Give all ranks the first one's values, whatever the tensor's strides and its device."""
    whole = tensor.detach()
    needs_copy = tensor.device != device or not tensor.is_contiguous()
    if needs_copy:
        whole = whole.to(device, memory_format=torch.contiguous_format, copy=True)
    dist.broadcast(whole, group=group, group_src=0)  # the first rank's -> replicated in the group
    if replicas:
        dist.broadcast(whole, group=replicas, group_src=0)  # the first group's -> replicated
    if needs_copy:
        tensor.detach().copy_(whole)


def tensors_in(value):
    """All tensors in tuples, lists, dicts and dataclasses, however nested."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = ()
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, (tuple, list)):
        parts = value
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    found = []
    for part in parts:
        found += tensors_in(part)
    return found


def watch(tensors, reached):
    """Call `reached` when backward comes to the first of these tensors.

    Leaves do not count. A parameter that a block hands on has its gradient as soon as its own uses
    are through. The next block may not have begun its backward by then, and backward_reaches()
    would free that block too early.
    """
    wanted = [t for t in tensors if t.grad_fn is not None]
    if wanted:
        torch.autograd.graph.register_multi_grad_hook(wanted, reached, mode="any")


def in_backward():
    """Does autograd call us? Then a forward is the second one of activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def check(module, blocks):
    """Refuse what would go wrong later."""
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError("FSDP: the module has no parameter to train")
    inside = set(module.modules())
    for block in blocks:
        if block not in inside:
            raise ValueError(f"FSDP: block {type(block).__name__} is no part of the module")
        within = set(block.modules()) - {block}
        for other in blocks:
            if other in within:
                raise ValueError(f"FSDP: of {type(block).__name__} and a {type(other).__name__} "
                                 "within it only one can be a block")
    for owner in inside:
        if isinstance(owner, FSDP):
            raise ValueError("FSDP: a part of the module is an FSDP already: take one for all")
        if getattr(owner, "sparse", False) and isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError("FSDP: gradients are summed as dense tensors: take sparse=False")
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise ValueError(f"FSDP: buffer {name} is on the meta device: give it memory before")


def refuse_state(*_):
    raise RuntimeError("FSDP: a module's parameters are sharded: full_state_dict() of the FSDP "
                       "around it gathers them, load_full_state_dict(state) loads")


def check_elementwise(kind, options, own, device):
    """Refuse an optimizer that steps pieces of a parameter otherwise than the whole of it.

    options: of the optimizer. own: of one of its groups. With a rate near 0 all steps would agree,
    so the trial takes 0.1 where a rate is given.
    """
    options = dict(options)
    own = dict(own)
    for settings in options, own:
        if settings.get("lr") is not None:
            settings["lr"] = 0.1
    matrix = torch.linspace(-1, 1, 24, device=device).view(4, 6)
    pieces = matrix.flatten().split(10)
    results = []
    # two steps on the whole matrix, then two on its pieces: they must agree
    for tensors in ([matrix], pieces):
        parameters = [nn.Parameter(t.clone()) for t in tensors]
        optimizer = kind([{"params": parameters, **own}], **options)
        for _ in range(2):
            for p in parameters:
                p.grad = p.detach().square() + 0.1
            optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in parameters]).cpu())
    if not torch.allclose(*results):
        raise ValueError(f"FSDP: {kind.__name__} looks at whole parameters, and a rank has flat "
                         "pieces of them: take an elementwise optimizer, such as AdamW or SGD")


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, mesh, seed, **options):
    """mesh: (replicate, shard). With a model on the meta device no rank ever holds all of it."""
    replicas = None
    if mesh["replicate"].size() > 1:
        replicas = mesh["replicate"].get_group()

    def init(holder, prefix):
        init_weights(holder, len(model.blocks), seed, prefix)

    shard = mesh["shard"].get_group()
    return FSDP(model, model.blocks, shard, replicas, init=init, **options)


def full_state_dict(model):
    return model.full_state_dict()


def full_gradients(model):
    return model.full_gradients()


def evaluate(model, x, y):
    """x, y: this rank's rows of held-out text -> its part of the sum of token losses."""
    return loss_sum(model(x), y)


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


# ---- 3. at work: the same with torch's own API -------------------------------


def parallelize_at_work(model, mesh, reshard=True, dtype=None):
    """fully_shard for each block and for the rest. reshard: as in FSDP; dtype: what computes.

    On GPUs fully_shard also takes offload_policy=CPUOffloadPolicy().
    """
    if mesh["replicate"].size() == 1:
        mesh = mesh["shard"]
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=model.tok.weight.dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    # fully_shard finds out by itself what to prefetch in backward
    for block, following in zip(model.blocks, model.blocks[1:]):
        block.set_modules_to_forward_prefetch([following])
    return model


def full_state_dict_at_work(model):
    found = {}
    for name, t in model.state_dict().items():
        found[name] = t.full_tensor()  # sharded -> replicated
    return found


def full_gradients_at_work(model):
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            found[name] = p.grad.full_tensor()  # sharded -> replicated
    return found


def train_step_at_work(model, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    (loss * dist.get_world_size()).backward()  # fully_shard averages; the sum is wanted here
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    optimizer.step()
    return loss, norm.full_tensor()  # partial -> replicated


# ---- 4. run ------------------------------------------------------------------


def refuse(args, n):
    """What cannot run ends here, in one line, before anything is built."""
    ranks = args.world_size
    require(args.batch >= ranks,
            f"--batch {args.batch} sequences for {ranks} ranks: give each at least one")
    require(ranks % n == 0, f"--hsdp {n} does not divide {ranks} ranks")
    require(not args.offload or args.impl == "scratch",
            "--offload is for --impl scratch; torch's own wants a GPU")


def dtype_of_shards(run):
    """--dtype bf16 is for computing: shards, sums of gradients and AdamW's states are fp32."""
    return torch.promote_types(run.dtype, torch.float32)


def set_up(run, model, mesh):
    """model: on the meta device -> a Side: the model sharded, and what a run does with it."""
    args = run.args
    home = run.device
    if args.offload:
        home = "cpu"
    model = parallelize(model, mesh, args.seed, reshard=args.reshard, dtype=run.dtype,
                        device=run.device, home=home)
    optimizer = adamw(list(model.shards), args.lr)
    rows = share(args.batch, run.world_size, run.rank)  # of every batch, this rank's
    is_first = mesh.get_local_rank("replicate") == 0  # of the ranks with the same shard
    return Side(
        model=model,
        optimizer=optimizer,
        train_step=train_step,
        full_gradients=lambda: full_gradients(model),
        full_state_dict=lambda: full_state_dict(model),
        evaluate=lambda k: evaluate(model, *run.held_out(k, rows)),
        pieces=lambda: pieces(model, optimizer, is_first),
    )


def set_up_at_work(run, mesh):
    model = build(run.cfg, run.args.seed, run.device, dtype_of_shards(run))
    model = parallelize_at_work(run.freeze(model), mesh, run.args.reshard, run.dtype)
    optimizer = adamw(model.parameters(), run.args.lr)
    rows = share(run.args.batch, run.world_size, run.rank)
    return Side(
        model=model,
        optimizer=optimizer,
        train_step=train_step_at_work,
        full_gradients=lambda: full_gradients_at_work(model),
        full_state_dict=lambda: full_state_dict_at_work(model),
        evaluate=lambda k: evaluate(model, *run.held_out(k, rows)),
        pieces=lambda: pieces_of(model.named_parameters(), optimizer, writes=True),
    )


def pieces(model, optimizer, writes):
    """What this rank holds of the plain GPT's parameters, and of their AdamW states.

    writes: is this rank, of those with the same shard, the one that saves it?
    """
    found = []
    for unit in model.units:
        flats = {"": unit.shard.detach()}  # {end of a piece's name, such as ".exp_avg": (each,)}
        for kind in STATES:
            if kind in optimizer.state[unit.shard]:
                flats["." + kind] = optimizer.state[unit.shard][kind]
        for names, shape, (start, _) in zip(unit.names, unit.shapes, unit.ranges):
            # Where the shard begins, seen from the parameter: negative if the parameter begins
            # inside it. run_pieces leaves out what is not the parameter's.
            first = unit.first - start
            for end, flat in flats.items():
                name = names[0] + end  # of a tied one, the first name
                found += run_pieces(name, shape, first, flat, writes)
    sharded = model.sharded_names()
    whole = [(n, p) for n, p in model.module.named_parameters() if n not in sharded]
    return found + pieces_of(whole, None, writes=dist.get_rank() == 0)


def account(run, model, n):
    """The textbook's rows: P trained parameters, in all units and with padding, on n ranks.

    b bytes each in a shard, c where they compute; F parameters are frozen.
    """
    ledger = run.ledger["scratch"]
    held = ledger.memory
    sent = ledger.collectives
    b = model.units[0].shard.itemsize
    c = model.units[0].full.itemsize
    P = sum(unit.full.numel() for unit in model.units)
    P_blocks = sum(unit.full.numel() for unit in model.blocks)
    F = sum(p.numel() for p in model.frozen)
    part = (n - 1) / n
    replicas = run.world_size // n

    gathered = P
    if run.args.reshard:
        gathered += P_blocks
    run.textbook(
        "parameters, gradients, AdamW states",
        f"4 b P/N + 4 per unit + c F, P = {P:,} with padding",
        4 * b * P / n + 4 * len(model.units) + c * F,
        held["parameters"] + held["gradients"] + held["optimizer"],
    )
    run.textbook("wire all_gather", "c (P + P_blocks if resharded) (N-1)/N",
                 c * gathered * part, sent["all_gather"]["wire"])
    run.textbook("wire reduce_scatter", "b P (N-1)/N",
                 b * P * part, sent["reduce_scatter"]["wire"])
    norm = 2 * b * part
    among_replicas = 2 * b * P / n * (replicas - 1) / replicas
    run.textbook("wire all_reduce", "norm: 2 b (N-1)/N, R replicas: 2 b P/N (R-1)/R",
                 norm + among_replicas, sent["all_reduce"]["wire"])


def parameters_here(run, sides):
    """-> how many parameters this rank keeps between steps, padding included."""
    size = dtype_of_shards(run).itemsize
    held = run.ledger[run.impls[0]].memory["parameters"]
    if run.impls[0] == "scratch":
        # Frozen parameters are held in the dtype that computes. Each of their numbers is to count
        # `size` bytes, as all others do, since the sum is divided by `size`
        for p in sides["scratch"].model.frozen:
            held += p.numel() * (size - p.itemsize)
    return held // size


def main():
    args = arguments(
        __doc__,
        reshard=Flag(True, "free blocks after forward, gather them again for backward"),
        hsdp=Flag(0, "ranks that share the shards, N: groups of N are replicas (0: all)", ANY),
        offload=Flag(False, "keep shards and optimizer states in the CPU's memory"),
    )
    n = args.hsdp or args.world_size  # ranks that share the shards
    refuse(args, n)
    run = Run(args)
    mesh = dist.init_device_mesh(run.device.type, (args.world_size // n, n),
                                 mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model = GPT(run.cfg).to(dtype_of_shards(run))
    model = run.freeze(model)
    total = sum(p.numel() for p in model.parameters())
    with run:
        sides = {}
        if "scratch" in run.impls:
            sides["scratch"] = set_up(run, model, mesh)
        if "torch" in run.impls:
            sides["torch"] = set_up_at_work(run, mesh)
        run.begin(sides)
        run.say(f"fsdp: {run.world_size} ranks on {run.device.type}, {args.dtype}, "
                f"{total:,} parameters, each rank keeps 1/{n}")
        for impl, step in run.steps():
            side = sides[impl]
            run.set_rate(side.optimizer, step)
            x, y, valid = run.batch(step, share(args.batch, run.world_size, run.rank))
            with run.measure(impl, step):
                loss, norm = side.train_step(side.model, side.optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss, norm)
        if "scratch" in sides:
            account(run, sides["scratch"].model, n)
        run.show_held()
        return run.finish(total, parameters_here(run, sides))


if __name__ == "__main__":
    sys.exit(main())
