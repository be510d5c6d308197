"""ZeRO: data parallelism in which a rank keeps its part of what every rank would hold otherwise.

    a unit's parameters, end to end   | rank 0 | rank 1 | rank 2 | rank 3 |   equal chunks, padded

    level 3  computing         | fwd 0 | fwd 1 | fwd 2 | bwd 2 | bwd 1 | bwd 0 |       | step
             gathering   get 0 | get 1 | get 2 |       | get 1 | get 0 |       |       |
             summing           |       |       |       |       | sum 2 | sum 1 | sum 0 |

P numbers are trained, padding included, on n ranks; M micro-batches make a step (--accum M). In
bf16 a number takes 2 bytes, its gradient (summed in bf16) 2, AdamW's fp32 master and states 12:

                bytes held between steps  numbers sent per step, in units of P (n-1)/n
    plain GPT   16 P                      0
    level 0     16 P                      2      all-reduce of the gradients
    level 1     (4 + 12/n) P              2      states cut: reduce-scatter, then all-gather
    level 2     (2 + 14/n) P              M + 1  gradients too: M reduce-scatters, one all-gather
    level 3     16 P/n                    3 M    parameters too: M reduce-scatters, 2 M all-gathers

3 M is for a tied head, whose unit comes first. An untied head, as unit 2 above, is gathered once,
since its backward comes right behind its forward; an untied embedding, too: its backward reads no
parameters. In fp32 and fp64 a number is its own master: with gradient and states 4 times its bytes.
offload="optimizer": the CPU's memory has masters and states; "param": level 3's parameters, too.

    zero = ZeRO(units_of(model, model.blocks), level=3)
    optimizer = AdamW(zero.parameter_groups(), lr=1e-3)
    zero.zero_grad()  # in every step; model.zero_grad() would not find the gradients
    (loss_sum(model(x), y) / valid).backward()  # of this rank's rows; valid: targets of all ranks
    zero.reduce()
    norm = zero.clip_grad_norm_(1.0)
    zero.step(optimizer)

Not for: optimizers that look at whole matrices (Muon, Adafactor), norms (LAMB) or all parameters
(step() runs once a unit); blocks of several dtypes; sparse embeddings; second derivatives;
backwards that raise; reentrant checkpointing; parameters changed or thawed later. Unused ones get a
gradient of 0. In level 3 blocks return one tensor; ranks use the same parameters, in one order.

Rajbhandari et al. 2019, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054, sections 5 and 7; Ren et al. 2021, "ZeRO-Offload", arXiv:2101.06840.
At work: ZeroRedundancyOptimizer (level 1), fully_shard (levels 2 and 3), section 3 below.
    torchrun --standalone --nproc_per_node=2 zero.py --stage 3
"""
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn

# imports of section 1 end here; the rest is for sections 2 to 4
import sys

from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from common import adamw, loss_sum, share
from harness.checkpoint import part_pieces, pieces_of, run_pieces
from harness.flags import POSITIVE, Flag, arguments, require
from harness.ledger import held_by
from harness.run import Run, Side, whole

# ---- 1. the technique (copy this; it needs only torch) -----------------------

# Level 1 is three lines after backward. All parameters lie end to end in `full`, the gradients in
# `buffer`; `mine` is this rank's chunk of either. Collectives may read and write it in place.
#     reduce_scatter(buffer[mine], buffer)  # partial (a summand each) -> sharded (a chunk each)
#     optimizer.step()  # of full[mine] alone: there are states for no more
#     all_gather(full, full[mine])  # sharded -> replicated (all have the same)
# What follows does the same for each unit, a block say, while another is computed or stepped.
# Between uses level 2 frees buffer and keeps a sum of buffer[mine]; level 3 also keeps full[mine].

# These two have other names since torch 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def has_memory(flat):
    return flat.untyped_storage().size() > 0


def lend(flat):
    """Give a flat tensor its memory, under all views of it. What is in it is not defined."""
    flat.untyped_storage().resize_(flat.nbytes)


def take_back(flat):
    """Free a flat tensor's memory, under all views of it, also those saved for backward."""
    flat.untyped_storage().resize_(0)


@dataclass(eq=False)
class Unit:
    """Trained parameters of one dtype that are gathered, summed and freed together."""

    parameters: list
    sites: list  # level 3: the modules whose forwards read the parameters; no others may
    stays: bool = False  # level 3: not freed before reduce() (hybrid_3d.py: all but blocks)


@dataclass(eq=False)
class Part:
    """This rank's piece of a parameter: a run of its numbers."""

    parameter: nn.Parameter  # the module's own
    first: int  # the piece begins at this index of parameter.flatten()
    span: slice  # the piece is these numbers of this rank's chunk
    master: nn.Parameter  # 1-D: what the optimizer steps; has .grad only during Flat.step()
    grad: torch.Tensor  # 1-D: the sum of the gradient over micro-batches and ranks


class Flat:
    """A unit's parameters end to end in one tensor, padded to equal chunks: each rank owns one.

        full      p0 | p1 | p2 | padding    (n * chunk,): the parameters are views of it
        buffer    g0 | g1 | g2 | padding    likewise: gradients of this rank
                  chunk 0 | chunk 1 | ..    where both are cut, wherever that is in a parameter

    In level 0 there is one chunk, the whole, and every rank owns it. Between uses full has no
    memory in level 3, and buffer has none in levels 2 and 3.
    """

    def __init__(self, unit, group, level, offload):
        parameters = unit.parameters
        dtypes = {p.dtype for p in parameters}
        assert len(dtypes) == 1, f"a unit of {dtypes}: make one for each dtype"
        self.group = group  # the ranks that share the batch; None: all
        self.level = level  # 0 to 3
        self.stays = unit.stays
        self.shapes = {p: p.shape for p in parameters}  # in order; p is empty while full is freed
        self.size = sum(p.numel() for p in parameters)  # without padding
        chunks = dist.get_world_size(group) if level > 0 else 1
        index = dist.get_rank(group) if level > 0 else 0  # this rank owns chunk `index`
        self.chunk = -(-self.size // chunks)  # numbers in a chunk: rounded up
        self.mine = slice(index * self.chunk, (index + 1) * self.chunk)  # in full and in buffer

        self.full = parameters[0].new_zeros(chunks * self.chunk)  # what forward and backward use
        self.buffer = torch.zeros_like(self.full)
        self.places = self.views(self.full)  # {parameter: its view of full}
        self.slots = self.views(self.buffer)  # {parameter: its gradient's view of buffer}
        for p, place in self.places.items():
            place.copy_(p.detach())
            # Set as .data, full's memory comes without its version counter. With that, autograd
            # would take a gather into full for a change of p, and refuse to go backward.
            p.data = place
        dist.broadcast(self.full, group=group, group_src=0)  # the first rank's -> replicated
        self.make_chunk(offload)
        self.parts = self.cut()

        self.gathering = None  # the all-gather into full that is under way, or None
        self.reducing = None  # the sum of buffer over ranks that is under way, or None
        self.missing = set(parameters)  # those whose gradients of this backward have not come yet
        if level >= 2:
            take_back(self.buffer)
        self.free()

    def views(self, flat):
        """-> {parameter: its view of a tensor that is laid out like full}."""
        slices = flat[:self.size].split([shape.numel() for shape in self.shapes.values()])
        return {p: numbers.view(self.shapes[p]) for p, numbers in zip(self.shapes, slices)}

    def make_chunk(self, offload):
        """What this rank keeps of its chunk, (chunk,) each.

            shard   the parameters: full[mine], in level 3 a copy
            master  what is stepped: shard itself, or a copy that is wider or on the CPU
            grad    the step's gradient: buffer[mine], from level 2 on a tensor that adds those up
        """
        self.shard = self.full[self.mine]
        if self.level == 3:
            home = "cpu" if offload == "param" else self.full.device
            self.shard = self.shard.to(home, copy=True)
        self.master = self.shard.to(torch.promote_types(self.shard.dtype, torch.float32))
        if offload == "optimizer":
            self.master = self.master.to("cpu", copy=True)  # copy: also in a run on CPUs
        self.grad = self.buffer[self.mine]
        if self.level >= 2:
            self.grad = torch.zeros_like(self.grad)  # apart from buffer, whose memory is freed

    def cut(self):
        """-> [Part] of this rank's chunk; its padding is in none of them, and stays zero."""
        parts = []
        start = -self.mine.start  # where p begins, counted from here: below 0 in an earlier one
        for p, shape in self.shapes.items():
            end = start + shape.numel()
            span = slice(max(start, 0), min(end, self.chunk))
            if span.start < span.stop:
                first = span.start - start  # numbers of p before it are in earlier chunks
                parts.append(Part(p, first, span, nn.Parameter(self.master[span]), self.grad[span]))
            start = end
        return parts

    # -- parameters

    def start_gather(self):
        """Level 3: begin to gather, unless the parameters are here or on their way."""
        if has_memory(self.full):
            return
        lend(self.full)
        for p, place in self.places.items():
            p.data = place
        own = self.full[self.mine].copy_(self.shard)
        # sharded -> replicated
        self.gathering = all_gather(self.full, own, group=self.group, async_op=True)

    def wait(self):
        """After this the parameters can be used. On GPUs the stream waits for it, not the host."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def free(self):
        if self.level < 3 or not has_memory(self.full):
            return
        self.wait()  # memory into which a collective still writes must not go
        take_back(self.full)
        for p, place in self.places.items():
            # p has no elements now, but as many dims as before (a scalar gets one): autograd wants
            # a gradient to have as many, and an embedding gets its own while the unit is free.
            p.data = torch.atleast_1d(place)[:0]

    # -- gradients

    def lend_buffer(self):
        """Levels 2 and 3: buffer gets its memory, with zeros in it, unless it has it already."""
        if not has_memory(self.buffer):
            lend(self.buffer)
            self.buffer.zero_()

    def take_gradient(self, p):
        """A gradient that autograd has made is added to its slot in buffer."""
        self.lend_buffer()
        self.slots[p].add_(p.grad)
        p.grad = None

    def start_reduce(self):
        """Begin to sum the gradients over ranks."""
        self.lend_buffer()  # it has no memory yet, if this rank has used nothing of the unit
        self.missing = set(self.shapes)  # the next backward waits for all again
        if self.level == 0:  # partial -> replicated
            self.reducing = dist.all_reduce(self.buffer, group=self.group, async_op=True)
        else:  # partial -> sharded
            own = self.buffer[self.mine]  # in place: the sum of this chunk replaces the summand
            self.reducing = reduce_scatter(own, self.buffer, group=self.group, async_op=True)

    def finish_reduce(self):
        self.reducing.wait()
        self.reducing = None
        if self.level >= 2:
            self.grad += self.buffer[self.mine]
            take_back(self.buffer)

    # -- a step

    def step(self, optimizer):
        """This rank's chunk is stepped. In levels 1 and 2 it begins to travel: call wait() then."""
        grad = self.grad.to(self.master)  # (chunk,): a copy if master is wider or on the CPU
        for part in self.parts:
            part.master.grad = grad[part.span]
        optimizer.step()  # other units' masters have no gradient now, and are left alone
        for part in self.parts:  # also those that another optimizer steps
            part.master.grad = None
        self.shard.copy_(self.master)  # does nothing if master is shard
        if self.level in (1, 2):  # the other chunks of full are old: sharded -> replicated
            self.gathering = all_gather(self.full, self.shard, group=self.group, async_op=True)


OFFLOAD = {"none": 0, "optimizer": 1, "param": 3}  # {offload: the lowest level that can do it}


class ZeRO:
    """ZeRO for lists of parameters, over the ranks of `group`, which share the batch.

    units: [Unit], in the order of forward, for example units_of(model, model.blocks)
    offload: "none"; "optimizer": masters and states are on the CPU; "param", in level 3: shards too

    Gradients are summed over ranks. Call reduce() after every backward. If a step has several, then
    in levels 0 and 1 set zero.sync = False before all but the last. Levels 2 and 3 sum each.

    Ranks begin with the first one's trained parameters; what is frozen, and buffers, must agree.
    The module keeps its parameters, as views of larger tensors; in level 3 they are empty while
    they are not gathered. Load weights before: what is loaded later does not always reach masters.
    """

    def __init__(self, units, group=None, level=1, offload="none"):
        self.group = group
        self.level = level
        self.sync = True  # False: the next backward only adds to gradients, no sum over ranks
        self.is_summed = True  # False: gradients have come since the last sum
        assert level >= OFFLOAD[offload], f"offload {offload!r} needs level {OFFLOAD[offload]}"
        trained = [p for unit in units for p in unit.parameters]
        self.trained = set(trained)
        assert len(trained) == len(self.trained), "a parameter is in two units"
        self.flats = [Flat(unit, group, level, offload) for unit in units]
        self.parts = [part for flat in self.flats for part in flat.parts]
        self.pending = []  # [Flat] not summed yet, in the order of summing: the last unit first
        self.travelling = None  # the Flat whose sum is under way, or None
        self.entered = []  # [Flat] in the order of use in this micro-batch, forward then backward
        self.expected = []  # `entered` of the micro-batch before: tells what to gather ahead
        for unit, flat in zip(units, self.flats):
            self.add_hooks(flat, unit.sites)
        self.zero_grad()

    def add_hooks(self, flat, sites):
        for p in flat.shapes:
            p.register_post_accumulate_grad_hook(partial(self.ready, flat))
        if flat.level == 3:
            for site in sites:
                site.register_state_dict_pre_hook(refuse_state_dict)
                site.register_forward_pre_hook(partial(self.enter, flat))
                if type(site) is not nn.Embedding:  # an embedding's backward reads no parameter
                    site.register_forward_hook(partial(self.watch, flat))

    def parameter_groups(self, groups=None):
        """groups: a list of dicts, as for an optimizer -> the same with this rank's masters."""
        master_of = {part.parameter: part.master for part in self.parts}
        ours = []
        for group in groups or [{"params": list(master_of)}]:
            assert not torch.is_tensor(group["params"]), "params: a list of parameters"
            theirs = list(group["params"])
            assert all(p in self.trained or not p.requires_grad for p in theirs), "p is in no unit"
            masters = [master_of[p] for p in theirs if p in master_of]  # those with a piece here
            ours.append({**group, "params": masters})
        return ours

    # -- parameters in level 3

    def watch(self, flat, site, inputs, output):
        """After a unit's forward: its backward begins when its output gets a gradient."""
        if output.requires_grad:
            output.register_hook(partial(self.enter, flat))

    def enter(self, flat, *hook_arguments):
        """When forward or backward reaches a unit: free others, gather it, prefetch the next."""
        if not flat.stays:  # entering what stays frees nothing: the last block is next after a head
            for other in self.flats:
                if other is not flat and not other.stays:
                    other.free()
        flat.start_gather()  # does nothing if it is here, or was prefetched
        flat.wait()
        # what the micro-batch before has entered next is gathered while this unit computes
        visit = len(self.entered)
        self.entered.append(flat)
        if visit + 1 < len(self.expected) and self.expected[visit] is flat:
            self.expected[visit + 1].start_gather()

    def free_units(self):
        """Free what level 3 has gathered; begin a new list. After an evaluation it saves memory."""
        for flat in self.flats:
            flat.free()
        self.entered = []

    # -- gradients

    def zero_grad(self):
        assert self.is_summed, "gradients are not summed: call reduce() after backward, with sync"
        self.free_units()  # those that an evaluation has left
        self.pending = self.flats[::-1]  # as backward goes
        for flat in self.flats:
            kept = flat.grad if self.level >= 2 else flat.buffer  # of which grad is a view
            kept.zero_()

    def ready(self, flat, p):
        """Autograd's call when p's gradient is complete: once in a backward, also if p is tied."""
        assert flat in self.pending, (
            "gradients are summed already: call zero_grad() in every step, reduce() after each "
            "backward; in levels 0 and 1 set sync to False before all but a step's last")
        flat.take_gradient(p)
        self.is_summed = False
        if not self.sync:
            return
        flat.missing.discard(p)
        # in the order of the list: ranks must agree on collectives
        while self.pending and not self.pending[0].missing:
            self.reduce_next()

    def reduce_next(self):
        """The next sum begins. The one before ends first, which frees its buffer."""
        self.finish_last()
        self.travelling = self.pending.pop(0)
        self.travelling.start_reduce()  # partial -> sharded, in level 0 replicated

    def finish_last(self):
        if self.travelling is not None:
            self.travelling.finish_reduce()
            self.travelling = None

    def reduce(self):
        """To be called after each backward, on all ranks: sums what has not been summed yet."""
        if not self.sync:
            return
        while self.pending:
            self.reduce_next()
        self.finish_last()
        self.is_summed = True
        self.expected = self.entered
        self.free_units()
        if self.level >= 2:
            self.pending = self.flats[::-1]  # a further backward is added to what has been summed

    def clip_grad_norm_(self, max_norm):
        """Scale the whole gradient to a norm of max_norm at most (0: do not) -> its norm before."""
        assert self.is_summed, "gradients are not summed: reduce() comes first"
        grads = [flat.grad for flat in self.flats]
        norms = torch._foreach_norm(grads, dtype=self.flats[0].master.dtype)
        square = torch.stack(norms).square().sum()
        if self.level > 0:
            dist.all_reduce(square, group=self.group)  # partial -> replicated
        norm = square.sqrt()
        if max_norm:
            finite = norm.nan_to_num(0, posinf=0)  # inf or nan counts as 0: nothing is scaled
            torch._foreach_mul_(grads, (max_norm / (finite + 1e-6)).clamp(max=1))
        return norm

    def step(self, optimizer):
        assert self.is_summed, "gradients are not summed: call reduce() after backward, with sync"
        self.free_units()  # what is gathered is old after this
        for flat in self.flats:
            flat.step(optimizer)  # what levels 1 and 2 gather travels while the next one is stepped
        for flat in self.flats:
            flat.wait()
        self.pending = []  # until zero_grad(): ready() refuses gradients

    # -- the whole

    def full_parameters(self):
        """-> {parameter: whole copy, in its own dtype}, on every rank. All must call it."""
        return self.gathered([flat.shard for flat in self.flats])

    def full_gradients(self):
        """-> {parameter: its whole gradient}, on every rank. All must call it."""
        return self.gathered([flat.grad for flat in self.flats])

    def gathered(self, chunks):
        found = {}  # {parameter: what all ranks' chunks have of it}
        for flat, chunk in zip(self.flats, chunks):
            if self.level == 0:
                full = chunk.clone()
            else:
                full = torch.empty_like(flat.full)
                all_gather(full, chunk.to(full.device), group=self.group)  # sharded -> replicated
            found.update(flat.views(full))
        return found


def refuse_state_dict(site, prefix, keep_vars):
    # with keep_vars=True the Parameters serve as keys of full_parameters()
    assert keep_vars, "in level 3 parameters are empty: save what zero.full_parameters() gathers"


def units_of(model, blocks):
    """-> [Unit] of all that is trained: what comes before the blocks, each block, what comes after.

    Modules must be registered in the order in which they run, and read no others' parameters. In
    level 3 what contains blocks owns no parameters. A tied head belongs to what comes before.
    """
    blocks = list(blocks)
    before = Unit([], [])
    middle = [Unit([p for p in block.parameters() if p.requires_grad], [block]) for block in blocks]
    after = Unit([], [])
    inside = {m for block in blocks for m in block.modules()}
    here = before
    for m in model.modules():
        if m in inside:
            here = after  # from the first block on
            continue
        trained = [p for p in m.parameters(recurse=False) if p.requires_grad]
        tied = set(trained) & set(before.parameters)  # the head's
        unit = before if tied else here
        unit.parameters += [p for p in trained if p not in tied]
        if trained:
            unit.sites.append(m)
    if all(p.dim() == 1 for p in after.parameters):  # the last norm travels with the last block
        middle[-1].parameters += after.parameters
        middle[-1].sites += after.sites
        after = Unit([], [])
    return [unit for unit in (before, *middle, after) if unit.parameters]


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, group=None, level=1, offload="none"):
    return ZeRO(units_of(model, model.blocks), group, level, offload)


def full_state_dict(model, zero):
    """-> the plain GPT's state, on every rank."""
    found = zero.full_parameters()
    state = model.state_dict(keep_vars=True)
    return {name: found.get(t, t).detach() for name, t in state.items()}  # frozen ones are whole


def full_gradients(model, zero):
    found = zero.full_gradients()
    return {name: found[p] for name, p in model.named_parameters() if p in found}


def train_step(model, zero, optimizer, x, y, valid, clip, accum=1):
    """x, y: this rank's rows (B/n, T); valid: all ranks' targets -> its part of the loss, norm."""
    zero.zero_grad()
    total = 0
    microbatches = zip(x.tensor_split(accum), y.tensor_split(accum))
    for number, (xs, ys) in enumerate(microbatches, 1):
        zero.sync = zero.level >= 2 or number == accum
        loss = loss_sum(model(xs), ys) / valid
        loss.backward()
        zero.reduce()  # partial -> sharded, in level 0 replicated
        total = total + loss.detach()
    norm = zero.clip_grad_norm_(clip)
    zero.step(optimizer)
    return total, norm


# ---- 3. at work: the same with torch's own API -------------------------------


def parallelize_at_work(model, lr, level, mesh):
    if level == 1:
        trained = [p for p in model.parameters() if p.requires_grad]
        module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        # it calls adamw(this rank's parameters, lr=lr) as it would call an optimizer's class
        return module, ZeroRedundancyOptimizer(trained, adamw, lr=lr)
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=level == 3)
    return model, adamw(model.parameters(), lr)  # of DTensors


def train_step_at_work(module, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss = loss_sum(module(x), y) / valid
    (loss * dist.get_world_size()).backward()  # both average over ranks; the sum is wanted here
    norm = nn.utils.clip_grad_norm_(module.parameters(), clip or float("inf"))
    optimizer.step()
    return loss, whole(norm)  # of a DTensor: partial -> replicated


# ---- 4. run ------------------------------------------------------------------


def refuse(args):
    n = args.world_size
    least = OFFLOAD[args.offload]
    require(args.stage >= least, f"--offload {args.offload} needs --stage {least} or more")
    require(args.batch >= n * args.accum,
            f"--batch {args.batch}: fewer than {n} ranks x {args.accum} micro-batches")
    if args.impl != "scratch":
        require(args.stage >= 1 and args.accum == 1 and args.offload == "none",
                f"--impl {args.impl} wants --stage 1 to 3, --accum 1 and --offload none")
        kept = args.dry_run or args.save or args.resume or args.init_from
        require(args.stage >= 2 or not kept,
                f"--impl {args.impl} --stage 1: torch's optimizer has no dry run and is not saved")


def pieces_of_each(flats, names, optimizer, is_first):
    """-> {parameter: [Piece] of it that this rank holds}, and of its AdamW states.

    names: {parameter: its name}. is_first(p): is this rank the first that holds the same of p?
    """
    found = {p: [] for p in names}
    for p, name in names.items():
        if p.numel():  # what forward reads: to be loaded, and if it is frozen to be saved
            writes = not p.requires_grad and is_first(p)
            found[p] += pieces_of([(name, p)], None, writes)
    for flat in flats:
        for part in flat.parts:
            p = part.parameter
            place = names[p], flat.shapes[p], part.first
            # what forward reads in level 3, where p is empty; it does no harm elsewhere
            found[p] += run_pieces(*place, flat.shard[part.span], writes=False)
            found[p] += part_pieces(*place, part.master, optimizer, is_first(p))
    return found


def held(model, zero, optimizer):
    """-> {kind: [tensors]}: what this rank keeps between steps; the ledger counts storages once."""
    kinds = held_by(model, optimizer)
    kinds["parameters"] += [flat.shard for flat in zero.flats]
    kinds["gradients"] += [flat.grad for flat in zero.flats]
    kinds["optimizer"] += [flat.master for flat in zero.flats if flat.master is not flat.shard]
    return kinds


def set_up(run, impl, model, mesh):
    args = run.args
    if impl == "torch":
        module, optimizer = parallelize_at_work(model, args.lr, args.stage, mesh)
        return Side(model=module, optimizer=optimizer, train_step=train_step_at_work)
    zero = parallelize(model, None, args.stage, args.offload)
    names = {p: name for name, p in model.named_parameters()}

    def is_first(p):
        return run.rank == 0 or (p.requires_grad and zero.level > 0)  # cut: each has its own

    optimizer = adamw(zero.parameter_groups(), args.lr)
    return Side(
        model=zero, optimizer=optimizer, train_step=partial(train_step, model, accum=args.accum),
        full_gradients=partial(full_gradients, model, zero),
        full_state_dict=partial(full_state_dict, model, zero),
        evaluate=lambda x, y: loss_sum(model(x), y),
        pieces=lambda: sum(pieces_of_each(zero.flats, names, optimizer, is_first).values(), []),
        held=partial(held, model, zero, optimizer))


def textbook(run, zero):
    """The docstring's table. What --offload keeps elsewhere is not in it."""
    n = run.world_size
    M = run.args.accum
    level = zero.level
    b = run.dtype.itemsize
    w = zero.flats[0].master.itemsize
    P = sum(flat.full.numel() for flat in zero.flats)
    G = 2 * P  # what level 3 gathers in a micro-batch
    if run.cfg.form == "llama":  # embedding and head once: they are untied
        G -= zero.flats[0].full.numel() + zero.flats[-1].full.numel()
    sums = (0, P, M * P, M * P)[level]
    gathers = (0, P, P, M * G)[level]
    sent = (n - 1) / n  # of what is summed or gathered
    rows = [
        ("wire reduce_scatter", "b P (n-1)/n, from level 2 on M times", b * sums * sent),
        ("wire all_gather", "b P (n-1)/n, level 3: M b G (n-1)/n", b * gathers * sent),
        ("wire all_reduce", f"2 {w} (n-1)/n, the norm", 2 * w * sent),
    ]
    if level == 0:
        rows = [("wire all_reduce", "2 b P (n-1)/n", 2 * b * P * sent)]
    if run.args.offload != "none":
        return rows
    each = 2 * w if w == b else 3 * w  # with masters
    return rows + [
        ("held parameters", "b P, from level 3 on / n", b * P / (n if level >= 3 else 1)),
        ("held gradients", "b P, from level 2 on / n", b * P / (n if level >= 2 else 1)),
        ("held optimizer", f"{each} P, from level 1 on / n, + 4 a part (step counter)",
         each * P / (n if level >= 1 else 1) + 4 * len(zero.parts)),
    ]


def main():
    args = arguments(
        __doc__,
        stage=Flag(1, "cuts 1: optimizer states, 2: gradients too, 3: parameters too", (0, 3)),
        offload=Flag("none", "what lives on the CPU", tuple(OFFLOAD)),
        accum=Flag(1, "micro-batches per step", POSITIVE),
    )
    refuse(args)
    run = Run(args)
    mesh = dist.init_device_mesh(run.device.type, (run.world_size,))
    with run:  # from here on a dry run's tensors have no memory
        sides = {impl: set_up(run, impl, run.build(), mesh) for impl in run.impls}
        rows = share(args.batch, run.world_size, run.rank)  # of every batch, this rank's
        for impl, step, x, y, valid in run.steps(sides, rows):
            side = sides[impl]
            with run.measure(impl, step):
                loss, norm = side.train_step(side.model, side.optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss, norm)
        if "scratch" in sides:
            run.textbook(textbook(run, sides["scratch"].model))
        run.show_held()
        return run.finish()


if __name__ == "__main__":
    sys.exit(main())
