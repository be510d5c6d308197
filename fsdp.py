"""Fully sharded data parallelism: a rank keeps 1/N of each block, and borrows the rest to run it.

    computes       fwd 0   fwd 1   fwd 2   fwd 3   loss    bwd 3   bwd 2   bwd 1   bwd 0
    gathers    0   1       2       3                       2       1       0
    sums                                                           3       2       1       0

0 to 3 are blocks. One is gathered while its neighbour computes, and freed when it is done; the last
one stays for its backward. What no block has, here embeddings, last norm and head, is the root: it
is gathered from the beginning of a step to its end. Each block and the root is a unit: its
parameters lie end to end, so that one all-gather brings them and one reduce-scatter sums their
gradients. P_again of the P parameters are gathered twice: those of all blocks but the last.

    on each rank, P parameters of 4 bytes   plain GPT     here, on N ranks
    parameters, gradients, AdamW states     16 P          16 P/N
    whole parameters, whole gradients       -             those of the root and at most 2 blocks
    activations                             whole batch   1/N
    sent per step                           -             4 (2 P + P_again) (N-1)/N
      with --no-reshard                     -             8 P (N-1)/N, all blocks stay gathered
    gathers and sums, L blocks and the root -             2L all-gathers, L+1 reduce-scatters

--hsdp N: every N ranks share a copy of the model, and the copies all-reduce chunks of gradients.

    model = FSDP(model, model.blocks)  # gradients are summed over ranks, not averaged
    optimizer = torch.optim.AdamW(model.parameter_groups(), lr=1e-3)
    (loss_sum(model(x), y) / valid_targets_of_all_ranks).backward()  # x, y: this rank's rows
    norm = model.clip_grad_norm_(1.0)  # nn.utils.clip_grad_norm_ would see this rank's pieces alone
    optimizer.step()
    optimizer.zero_grad()
    state = model.full_state_dict()  # gathers what to save: every rank gets all of it

Not for: optimizers that look at whole matrices (Muon, Shampoo, LAMB, Adafactor); ranks that use
different blocks in a step; two forwards in a loss that use different parameters of a block; blocks
that run twice in a forward, or share parameters; methods of the module but model(..); hooks or
attributes of parameters (new ones replace them); freezing, loading later; sparse gradients; second
derivatives; reentrant checkpointing; autograd.grad(loss, x). Unused ones: gradients of 0.
Zhao 2023, "PyTorch FSDP", arXiv:2304.11277, sections 3, 4. At work: fully_shard, section 3 below.

    torchrun --standalone --nproc_per_node=2 fsdp.py
"""
import math
from collections import namedtuple
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._pytree import tree_leaves

# imports of section 1 end here; the rest is for sections 2 to 4
import sys

from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from common import GPT, adamw, build, init_weights, loss_sum, share
from harness.checkpoint import part_pieces, pieces_of
from harness.flags import ANY, Flag, arguments, require
from harness.run import Run, Side

# ---- 1. the technique (copy this; it needs only torch) -----------------------

# These two have other names since torch 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# What this rank has of a parameter p: p.flatten()[first:first + len(piece)], which is shard[span].
# piece: an nn.Parameter on this memory, so that the optimizer steps shard
Part = namedtuple("Part", "first span piece")


class Flat:
    """A unit's parameters, end to end in one tensor that is padded to n equal chunks.

        full      p0 | p1 | p2 | padding    (n * chunk,): the parameters are views of it
        buffer    g0 | g1 | g2 | padding    likewise: gradients of this rank, while they are summed
                  chunk 0 | chunk 1 | ..    equal chunks of both; a parameter may be in several

    Each rank keeps its chunk, the shard. Between uses full has no memory, parameters no elements.
    What autograd has saved for backward are views of full: they lose and regain memory with it.
    """

    def __init__(self, olds, group, replicas, device, dtype, home):
        """olds: the module's parameters. device, dtype: full's. home: shard's device"""
        own = olds[0].dtype  # of the shard
        assert all(p.dtype == own for p in olds), "FSDP: a unit's parameters must be of one dtype"
        self.group = group  # n ranks
        self.replicas = replicas  # the group of the ranks with the same shard, or None
        self.size = sum(old.numel() for old in olds)  # without padding
        n = dist.get_world_size(group)
        self.chunk = -(-self.size // n)  # numbers in a chunk: rounded up
        self.shard = torch.zeros(self.chunk, dtype=own, device=home)  # (chunk,)
        self.full = torch.empty(n * self.chunk, dtype=dtype or own, device=device)  # (n * chunk,)
        # new ones, not olds: the .data of one on the meta device takes no tensor of another device
        self.parameters = [nn.Parameter(self.full.new_empty(0)) for _ in olds]
        self.shapes = {p: old.shape for p, old in zip(self.parameters, olds)}
        self.places = self.views(self.full)  # {parameter: its view of full}
        self.parts = self.cut()
        self.gathering = None  # Work of an all-gather that is under way
        self.sending = None  # (chunk,), what that all-gather reads: kept until it is over
        self.reducing = None  # Work of a reduce-scatter or an all-reduce that is under way
        self.buffer = None  # (n * chunk,), while a reduce-scatter reads it
        self.sum = None  # (chunk,), the gradients' sum over ranks, until the parts have it
        self.free()

    def views(self, flat):
        """-> {parameter: its view of a tensor that is laid out like full}."""
        slices = flat[:self.size].split([shape.numel() for shape in self.shapes.values()])
        return {p: numbers.view(self.shapes[p]) for p, numbers in zip(self.shapes, slices)}

    def cut(self):
        """-> {parameter: Part} of this rank's chunk; its padding is in none, and stays zero."""
        parts = {}
        start = -dist.get_rank(self.group) * self.chunk  # where p begins, counted from here
        for p, shape in self.shapes.items():
            end = start + shape.numel()
            span = slice(max(start, 0), min(end, self.chunk))
            if span.start < span.stop:
                first = span.start - start  # numbers of p before it are in earlier chunks
                parts[p] = Part(first, span, nn.Parameter(self.shard[span]))
            start = end
        return parts

    def store(self, p, whole):
        """Keep this rank's piece of a parameter that is given whole."""
        if p in self.parts:
            first, span, piece = self.parts[p]
            self.shard[span] = whole.flatten()[first:first + len(piece)]

    # parameters

    def start_gather(self):
        """Begin to gather, unless the parameters are here or on their way."""
        memory = self.full.untyped_storage()
        if memory.nbytes() == 0:
            memory.resize_(self.full.nbytes)
            for p, place in self.places.items():
                # Set as .data, full's memory comes without its version counter. With that, autograd
                # would take a gather into full for a change of p, and refuse to go backward.
                p.data = place
            self.sending = self.shard.to(self.full.device, self.full.dtype)
            # sharded (a chunk each) -> replicated (all have the same)
            self.gathering = all_gather(self.full, self.sending, group=self.group, async_op=True)

    def wait(self):
        """After this the parameters can be used. On GPUs the stream waits for it, not the host."""
        if self.gathering:
            self.gathering.wait()
            self.gathering = None
            self.sending = None

    def free(self):
        self.wait()  # memory into which a collective still writes must not go
        for p, place in self.places.items():
            # as many dims as before (a scalar gets one): optimizer groups may be made by p.dim()
            p.data = torch.atleast_1d(place)[:0]
        self.full.untyped_storage().resize_(0)

    def gathered(self, shard):
        """All ranks' chunks of a tensor, (chunk,) each -> {parameter: whole tensor}; collective."""
        full = shard.new_empty(self.full.numel(), device=self.full.device)
        all_gather(full, shard.to(full.device), group=self.group)  # sharded -> replicated
        return self.views(full)

    # gradients: start_sum, continue_sum and finish_sum are called in this order, once in a backward

    def start_sum(self):
        """Begin to sum over the group what autograd has left in the parameters' grad."""
        self.buffer = self.shard.new_zeros(self.full.shape, device=self.full.device)
        for p, slot in self.views(self.buffer).items():
            if p.grad is not None:  # this backward has used it
                slot.copy_(p.grad)
                p.grad = None
        self.sum = self.buffer.new_empty(self.chunk)
        # partial (a summand each) -> sharded
        self.reducing = reduce_scatter(self.sum, self.buffer, group=self.group, async_op=True)

    def continue_sum(self):
        """Wait for the sum over the group. Where there are replicas, begin to sum over them."""
        self.reducing.wait()
        self.reducing = None
        self.buffer = None
        if self.replicas:
            # partial -> replicated
            self.reducing = dist.all_reduce(self.sum, group=self.replicas, async_op=True)

    def finish_sum(self):
        """Wait for the sum over replicas, if there are any. Add the sum to the parts' gradients."""
        if self.reducing:
            self.reducing.wait()
            self.reducing = None
        gradient = self.sum.to(self.shard.device)
        self.sum = None
        for part in self.parts.values():
            new = gradient[part.span]
            if part.piece.grad is not None:
                new += part.piece.grad
            part.piece.grad = new


class FSDP(nn.Module):
    """Shards a module over the ranks of `group`: a unit for each of `blocks`, one for the rest.

    In loss.backward() gradients are summed over all ranks, and added to those of a rank's `pieces`.

    blocks: submodules, in the order in which they run
    replicas: the group of ranks with the same shard, one in each copy of the model (None: one copy)
    reshard: free blocks after forward, and gather them again for backward
    dtype: of gathered weights (None: the module's, which shards and sums keep); inputs are not cast
    device: where the module computes (None: where it is); home: where shards live (None: on device)
    init(name, tensor): fills a tensor of a module on the meta device, which also needs `device`.
        Values must depend on the name alone: a rank calls it only for what it keeps a piece of

    All ranks begin with the first one's parameters and buffers, but for what init fills. Frozen
    parameters stay whole on every rank, in `dtype`. Between steps trained ones have no elements.
    """

    def __init__(self, module, blocks, group=None, replicas=None, reshard=True, dtype=None,
                 device=None, home=None, init=None):
        super().__init__()
        self.module = module
        self.group = group
        self.replicas = replicas
        self.reshard = reshard
        self.device = torch.device(device or next(module.parameters()).device)
        self.init = init
        self.units = []  # [Flat], the blocks' in their order, then the root's
        self.unit_of = {}  # {parameter: its unit}
        self.summing = []  # [Flat] whose sums this backward has started, in order
        self.in_backward = False  # True: a forward of a block is one that a checkpoint runs again

        for name, buffer in list(module.named_buffers()):
            self.replace({buffer: self.value_of(buffer, name)})
        for name, p in list(module.named_parameters()):
            if not p.requires_grad:
                whole = self.value_of(p, name).to(dtype or p.dtype)
                self.replace({p: nn.Parameter(whole, requires_grad=False)})
        for block in blocks:
            i = len(self.units)
            if self.make_unit(block, dtype, home):  # None if nothing in it is trained
                block.register_forward_pre_hook(partial(self.enter, i))
                block.register_forward_hook(partial(self.after_forward, i))
        self.block_units = list(self.units)  # those up to here
        self.root = self.make_unit(module, dtype, home)  # of what no block has, or None
        parts = [part for unit in self.units for part in unit.parts.values()]
        self.pieces = nn.ParameterList(part.piece for part in parts)  # what optimizers step

    def make_unit(self, submodule, dtype, home):
        """-> Flat of what is trained in a submodule and is in no unit yet, or None."""
        names = {p: name for name, p in self.module.named_parameters() if p.requires_grad}
        olds = [p for p in submodule.parameters() if p in names and p not in self.unit_of]
        if not olds:
            return None
        unit = Flat(olds, self.group, self.replicas, self.device, dtype, home or self.device)
        self.units.append(unit)
        self.unit_of.update(dict.fromkeys(unit.parameters, unit))
        self.replace(dict(zip(olds, unit.parameters)))
        for old, p in zip(olds, unit.parameters):
            if not old.is_meta or p in unit.parts:  # value_of broadcasts, unless old is on meta
                unit.store(p, self.value_of(old, names[old]))
        return unit

    def value_of(self, tensor, name):
        """-> what a parameter or buffer begins with, whole; collective, but for the meta device."""
        if tensor.is_meta:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            self.init(name, value)
            return value
        value = tensor.detach().to(self.device)
        dist.broadcast(value, group=self.group, group_src=0)  # the first rank's -> replicated
        if self.replicas:
            dist.broadcast(value, group=self.replicas, group_src=0)  # the first group's, too
        return value

    def replace(self, new):
        """new: {a parameter or buffer of the module: what replaces it, under all its names}."""
        for owner in self.module.modules():
            for name, old in [*owner._parameters.items(), *owner._buffers.items()]:
                if old in new:
                    setattr(owner, name, new[old])

    # forward: a block is gathered while the one before it computes

    def forward(self, *args, **kwargs):
        assert not self.in_backward, "FSDP: a backward has raised (make the model anew) or runs"
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
            self.root.start_gather()
            self.root.wait()

    def prefetch(self, i):
        if 0 <= i < len(self.block_units):
            self.block_units[i].start_gather()

    def enter(self, i, *hook_arguments):
        """Before block i computes, in forward or in backward: gather it, prefetch the next one."""
        self.prefetch(i)  # does nothing if that was done
        self.prefetch(i - 1 if self.in_backward else i + 1)
        self.block_units[i].wait()

    def after_forward(self, i, block, inputs, output):
        watch(output, partial(self.backward_reaches, i))
        if self.reshard and not self.in_backward and i + 1 < len(self.block_units):
            self.block_units[i].free()  # the last one stays through the loss: its backward is next

    # backward: a block is gathered, and one is summed, while the block between them computes

    def backward_begins(self, gradient):
        """Backward has come to an output of the model or of a block."""
        if not self.in_backward:
            self.in_backward = True
            # autograd calls backward_ends when all of this backward is over
            torch.autograd.Variable._execution_engine.queue_callback(self.backward_ends)
        self.gather_root()  # does nothing unless another forward or backward has freed it

    def backward_reaches(self, i, gradient):
        """Backward has come to the output of block i: it is through with block i + 1."""
        self.backward_begins(gradient)  # it has, if the loss is of the model's output
        if i + 1 < len(self.block_units):
            self.close(self.block_units[i + 1])
        self.enter(i)

    def close(self, unit):
        """Free a unit, and start the sum of its gradients, if it has any."""
        unit.free()
        if any(p.grad is not None for p in unit.parameters):
            if self.summing:
                self.summing[-1].continue_sum()  # its sum travelled during this unit's backward
            unit.start_sum()
            self.summing.append(unit)

    def backward_ends(self):
        for unit in self.units:
            self.close(unit)  # the first block and the root; others are closed, unless skipped
        self.summing[-1].continue_sum()  # close() has continued the others
        for unit in self.summing:
            unit.finish_sum()
        self.summing.clear()
        self.in_backward = False

    # the step

    def parameter_groups(self, groups=None):
        """What an optimizer takes: the user's groups, with this rank's pieces for parameters.

        groups: made of model.module.named_parameters(), after FSDP was made, by name or by p.dim().
        """
        ours = []
        for group in groups or [{"params": list(self.unit_of)}]:
            assert not torch.is_tensor(group["params"]), "params: a list of parameters"
            parts = [self.unit_of[p].parts.get(p) for p in group["params"] if p.requires_grad]
            ours.append({**group, "params": [part.piece for part in parts if part]})
        return ours

    def clip_grad_norm_(self, max_norm):
        """Scale gradients to a norm of at most max_norm (0: no limit) -> what it was."""
        grads = [p.grad for p in self.pieces if p.grad is not None]
        wide = torch.promote_types(self.units[0].shard.dtype, torch.float32)  # squares exceed fp16
        grads = grads or [torch.zeros(1, dtype=wide)]  # this rank may have none
        square = torch.stack(torch._foreach_norm(grads, dtype=wide)).square().sum().to(self.device)
        dist.all_reduce(square, group=self.group)  # partial -> replicated
        norm = square.sqrt()
        finite = norm.nan_to_num(0, posinf=0)  # inf or nan counts as 0: nothing is scaled
        nn.utils.clip_grads_with_norm_(self.pieces, max_norm or math.inf, finite)
        return norm

    # the state, gathered

    def full_state_dict(self):
        """-> {name: whole tensor} on each rank's device, frozen ones in `dtype`; collective."""
        whole = {}  # {parameter: whole tensor}
        for unit in self.units:
            whole.update(unit.gathered(unit.shard))
        state = self.module.state_dict(keep_vars=True)  # the Parameters themselves, keys of whole
        return {name: whole.get(t, t).detach() for name, t in state.items()}

    def full_gradients(self):
        """-> {name: whole gradient} of what is trained, a tied one once; for prove()."""
        whole = {}  # {parameter: whole gradient}
        for unit in self.units:
            gradient = torch.zeros_like(unit.shard)
            for part in unit.parts.values():
                if part.piece.grad is not None:
                    gradient[part.span] = part.piece.grad
            whole.update(unit.gathered(gradient))
        return {name: whole[p] for name, p in self.module.named_parameters() if p in whole}

    def state_dict(self, *_, **__):
        raise RuntimeError("FSDP: parameters are sharded. full_state_dict() gathers them")

    def _apply(self, *_, **__):
        raise RuntimeError("FSDP cannot be moved by to() and such. Make it with device, dtype")


def watch(output, reached):
    """Call `reached` when backward comes to one of the tensors that a module has returned."""
    tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    assert tensors or not torch.is_grad_enabled(), "FSDP: a module's output has no tensor to train"
    for t in tensors:
        t.register_hook(reached)


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, mesh, seed, **options):
    """mesh: (replicate, shard). With a model on the meta device no rank ever holds all of it."""
    replicas = mesh["replicate"].get_group() if mesh["replicate"].size() > 1 else None

    def init(name, tensor):
        path, _, attribute = name.rpartition(".")
        module = nn.ParameterDict({attribute: tensor})  # init_weights wants a module
        init_weights(module, len(model.blocks), seed, path)

    return FSDP(model, model.blocks, mesh["shard"].get_group(), replicas, init=init, **options)


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
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    optimizer.step()
    return loss, norm.full_tensor()  # partial -> replicated


# ---- 4. run ------------------------------------------------------------------


def refuse(args, n):
    ranks = args.world_size
    require(args.batch >= ranks, f"--batch {args.batch} for {ranks} ranks: give each at least one")
    require(ranks % n == 0, f"--hsdp {n} does not divide {ranks} ranks")
    require(not args.offload or args.impl == "scratch", "--offload is for --impl scratch alone")


def set_up(run, impl, plain, mesh, shard_dtype):
    args = run.args
    if impl == "torch":
        model = run.freeze(build(run.cfg, args.seed, run.device, shard_dtype))
        model = parallelize_at_work(model, mesh, args.reshard, run.dtype)
        optimizer = adamw(model.parameters(), args.lr)
        return Side(model=model, optimizer=optimizer, train_step=train_step_at_work)
    model = parallelize(plain, mesh, args.seed, reshard=args.reshard, dtype=run.dtype,
                        device=run.device, home="cpu" if args.offload else None)
    optimizer = adamw(model.parameter_groups(), args.lr)
    return Side(model=model, optimizer=optimizer, train_step=train_step,
                pieces=partial(pieces, model, optimizer, mesh.get_local_rank("replicate") == 0))


def pieces(model, optimizer, writes):
    """What this rank gives to a checkpoint, or takes from it. writes: does it save its shards?"""
    found = []
    for name, p in model.module.named_parameters():
        unit = model.unit_of.get(p)
        if unit is None:  # frozen
            found += pieces_of([(name, p)], None, writes=dist.get_rank() == 0)
        elif p in unit.parts:
            first, _, piece = unit.parts[p]
            found += part_pieces(name, unit.shapes[p], first, piece, optimizer, writes)
    return found


def textbook(model, mesh):
    """b, c: the bytes of a number in shard, in full. AdamW has a step counter for each piece."""
    R, N = mesh.shape
    others = (N - 1) / N
    b = model.units[0].shard.itemsize
    c = model.units[0].full.itemsize
    P = sum(unit.full.numel() for unit in model.units)  # with the padding of all units
    P_again = sum(unit.full.numel() for unit in model.block_units[:-1]) if model.reshard else 0
    own = sum(p.numel() for p in model.pieces)  # of this rank, without padding
    return [
        ("held parameters", f"b P/N, P = {P:,} with padding", b * P / N),
        ("held gradients", "b P/N", b * P / N),
        ("held optimizer", "2 b own + 4 per piece", 2 * b * own + 4 * len(model.pieces)),
        ("wire all_gather", "c (P + P_again if resharded) (N-1)/N", c * (P + P_again) * others),
        ("wire reduce_scatter", "b P (N-1)/N", b * P * others),
        ("wire all_reduce", "norm: 2 b (N-1)/N, R copies: 2 b P/N (R-1)/R",
         2 * b * others + 2 * b * P / N * (R - 1) / R),
    ]


def main():
    args = arguments(
        __doc__,
        reshard=Flag(True, "free blocks after forward, gather them again for backward"),
        hsdp=Flag(0, "N, ranks that share one copy of the model (0: all)", ANY),
        offload=Flag(False, "keep shards and optimizer states in the CPU's memory"),
    )
    n = args.hsdp or args.world_size  # ranks that share one copy
    refuse(args, n)
    run = Run(args)
    mesh = dist.init_device_mesh(run.device.type, (args.world_size // n, n),
                                 mesh_dim_names=("replicate", "shard"))
    shard_dtype = torch.promote_types(run.dtype, torch.float32)  # of sums, too
    with torch.device("meta"):
        plain = run.freeze(GPT(run.cfg).to(shard_dtype))  # for FSDP
    with run:  # from here on a dry run's tensors have no memory
        sides = {impl: set_up(run, impl, plain, mesh, shard_dtype) for impl in run.impls}
        rows = share(args.batch, run.world_size, run.rank)  # of every batch, this rank's
        for impl, step, x, y, valid in run.steps(sides, rows):
            side = sides[impl]
            with run.measure(impl, step):
                loss, norm = side.train_step(side.model, side.optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss, norm)
        if "scratch" in sides:
            run.textbook(textbook(sides["scratch"].model, mesh))
        run.show_held()
        return run.finish()


if __name__ == "__main__":
    sys.exit(main())
