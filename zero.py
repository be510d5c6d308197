"""ZeRO: data parallelism in which a rank keeps its part of what every rank would hold otherwise.

    Parameters, end to end, are cut into a chunk for each rank. Rank 1 of 4 keeps the chunks
                        ddp.py     stage 1    stage 2    stage 3
    of parameters       0 1 2 3    0 1 2 3    0 1 2 3      1
    of gradients        0 1 2 3    0 1 2 3      1          1
    of AdamW's states   0 1 2 3      1          1          1

P trained numbers, with padding; n ranks; M micro-batches a step (--accum M). Bytes of a number + of
its gradient + its AdamW states: fp32 4 + 4 + 8; bf16 2 + 2 + 12 with an fp32 master (without, as
in plain GPT and ddp.py: 2 + 2 + 4):

                bytes held between steps        numbers sent per step, in units of P (n-1)/n
                fp32            bf16
    plain GPT   16 P            8 P             0
    ddp.py      16 P            8 P             2      all-reduce of the gradients
    stage 1     (8 + 8/n) P     (4 + 12/n) P    2      states cut: reduce-scatter, then all-gather
    stage 2     (4 + 12/n) P    (2 + 14/n) P    M + 1  gradients too: M reduce-scatters, 1 gather
    stage 3     16 P/n          16 P/n          3 M    parameters too: M sums, 2 M gathers

(It gathers an untied head and embedding M times.) fsdp.py cuts as stage 3 does, but always by
blocks, in the usual loop, also from a meta model.

    zero = ZeRO3(units_of(model, model.blocks))
    optimizer = AdamW(zero.parameter_groups(), lr=1e-3)
    zero.zero_grad()  # in every step; not the model's or the optimizer's, which find no gradients
    (loss_sum(model(x), y) / valid).backward()  # of this rank's rows; valid: targets of all ranks
    zero.reduce()  # after each backward
    norm = zero.clip_grad_norm_(1.0)  # not nn.utils.clip_grad_norm_
    zero.step(optimizer)
Not for: models cut by tensor_parallel.py, experts of moe.py (hybrid_3d.py combines them); Muon,
LAMB, Adafactor (see harness/whole.py); weights stepped between forward and backward; blocks of
several dtypes, or that share weights; sparse embeddings; second derivatives; backwards that raise,
or of two models; reentrant checkpointing; weights thawed later; GradScaler. Unused weights get
gradients of 0. In stage 3 all ranks use the same; what reads them returns one tensor, ranks call it
in one order, as often (also to generate); autocast keeps copies.
Rajbhandari et al. 2019, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054, sections 5 and 7; Ren et al. 2021, "ZeRO-Offload", arXiv:2101.06840.
At work: ZeroRedundancyOptimizer (stage 1, sends 3), fully_shard (3, or sends as 2), see part 4.
    torchrun --standalone --nproc_per_node=2 zero.py --stage 3
"""
import weakref
from collections import namedtuple
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

# imports of parts 1 and 2 end here; the rest is for parts 3 to 5
import sys

from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from common import adamw, loss_sum, share

# ---- 1. the idea -------------------------------------------------------------

# These two have other names since torch 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class IdeaOfZeRO1:
    """An all-reduce is a reduce-scatter and an all-gather. Between the two a rank has the sum of
    one chunk: if it steps that alone, it needs 1/n of AdamW's states. What is frozen must be alike.

    full      p0 | p1 | p2 | padding    all trained parameters, end to end: they are views of it
    buffer    g0 | g1 | g2 | padding    their gradients likewise
              chunk 0   | chunk 1       one for each rank: this rank's chunk of full is its shard
    """

    def __init__(self, model, group=None):
        self.group = group
        ranks = dist.get_world_size(group)
        rank = dist.get_rank(group)
        parameters = [p for p in model.parameters() if p.requires_grad]  # a tied one comes once
        sizes = [p.numel() for p in parameters]
        size = sum(sizes)
        self.full = parameters[0].new_zeros(size + -size % ranks)  # up to a multiple of ranks
        self.buffer = torch.zeros_like(self.full)
        places = self.full[:size].split(sizes)
        slots = self.buffer[:size].split(sizes)
        for p, place, slot in zip(parameters, places, slots):
            place.copy_(p.detach().flatten())
            p.data = place.view_as(p)
            p.grad = slot.view_as(p)  # backward adds to what it finds there
        dist.broadcast(self.full, group=group, group_src=0)  # the first rank's -> replicated
        self.shard = nn.Parameter(self.full.chunk(ranks)[rank])  # a view, too
        self.shard.grad = self.buffer.chunk(ranks)[rank]  # the sum replaces this rank's summand

    def step(self, optimizer, clip):
        """optimizer: of [zero.shard], elementwise as AdamW -> the whole gradient's norm"""
        reduce_scatter(self.shard.grad, self.buffer, group=self.group)  # partial -> sharded
        square = self.shard.grad.square().sum()
        dist.all_reduce(square, group=self.group)  # partial -> replicated
        norm = square.sqrt()
        nn.utils.clip_grads_with_norm_(self.shard, clip, norm)
        optimizer.step()
        all_gather(self.full, self.shard.detach(), group=self.group)  # sharded -> replicated
        return norm


def idea_step(model, zero, optimizer, x, y, valid, clip):
    """x, y: this rank's rows (B/n, T); valid: the number of targets in all ranks' rows."""
    zero.buffer.zero_()  # zero_grad() would take the views of it away
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / valid
    loss.backward()
    norm = zero.step(optimizer, clip)
    return loss, norm


# ---- 2. the technique (copy this; of part 1 it takes all_gather, reduce_scatter)

# What it adds to the idea, and what that buys. Figures are those of the toy on 2 ranks.
#     a unit for each block        5 of 6 sums travel while backward makes the gradients of the next
#                                  unit
#     a part for each parameter    parameter groups, fp32 masters of bf16, offload, checkpoints
#     reduce() apart from step()   micro-batches
#     ZeRO2                        gradients are held as 1/n: 10.1 MB held -> 8.4
#     ZeRO3                        parameters, too, and two of the 6 units at a time whole:
#                                  6.7 MB held, but 3.4 MB sent -> 5.1


# What a rank steps of a parameter.
# here           where it is in its unit's shard, grad and masters
# grad, master   unit.grad[here], and the nn.Parameter that the optimizer steps: unit.masters[here]
Part = namedtuple("Part", "parameter here grad master")


class Unit:
    """Parameters that travel together: end to end in one tensor, cut into a chunk for each rank.

        full      p0 | p1 | p2 | padding    (n * chunk,): the parameters are views of it
        buffer    g0 | g1 | g2 | padding    likewise: the gradients of this rank's rows
                  chunk 0 | chunk 1 | ..    equal chunks of both; a parameter may be in several

        shard     this rank's chunk of the parameters, (chunk,)
        grad      its chunk of the whole batch's gradient
        masters   what the optimizer steps: shard itself, or a copy in fp32, or on the CPU
        parts     of shard, grad and masters: what is of one parameter, see Part

    What each stage cuts shows in which of these have memory, and when:

                  ZeRO1             ZeRO2                      ZeRO3
        full      always            always                     from gather to free
        buffer    always            first gradient .. its sum  first gradient .. its sum
        shard     a view of full    a view of full             its own
        grad      a view of buffer  its own                    its own
    """

    def __init__(self, parameters, sites, ranks, rank, reduce_dtype):
        self.sites = sites  # the modules whose forwards read the parameters
        self.shapes = {p: p.shape for p in parameters}  # in order; in ZeRO3 p is empty at times
        self.spans = {}  # {parameter: where it lies in full and in buffer}
        size = 0  # without padding
        for p in parameters:
            self.spans[p] = slice(size, size + p.numel())
            size += p.numel()
        self.full = parameters[0].new_zeros(size + -size % ranks)  # with padding
        self.chunk = len(self.full) // ranks  # numbers in a chunk
        self.mine = slice(rank * self.chunk, (rank + 1) * self.chunk)  # in full and in buffer
        for p, place in self.views(self.full).items():
            place.copy_(p.detach())
            p.data = place
        self.shard = self.full[self.mine]
        self.buffer = None  # see make_buffer
        self.reduce_dtype = reduce_dtype or self.full.dtype  # of buffer and grad
        self.gathering = None  # the all-gather into full that is under way

    def views(self, flat):
        """-> {parameter: its view of a tensor that is laid out like full}."""
        return {p: flat[span].view(self.shapes[p]) for p, span in self.spans.items()}

    def make_buffer(self):
        if self.buffer is None:
            self.buffer = torch.zeros_like(self.full, dtype=self.reduce_dtype)

    # -- what the optimizer steps

    def cut(self, offload):
        """Makes masters and parts. Padding is in none of the parts, and stays zero."""
        wide = torch.promote_types(self.shard.dtype, torch.float32)
        if offload == "optimizer":
            self.masters = self.shard.to("cpu", wide, copy=True)
        else:
            self.masters = self.shard.to(wide)  # of bf16 a copy; what is wide is shard itself
        self.parts = []
        for p, span in self.spans.items():
            low = max(span.start, self.mine.start)
            high = min(span.stop, self.mine.stop)
            if low < high:  # the numbers of p from low to high in full are in this rank's chunk
                here = slice(low - self.mine.start, high - self.mine.start)
                master = nn.Parameter(self.masters[here])
                self.parts.append(Part(p, here, self.grad[here], master))

    # -- full

    def gather(self, group):
        """Begins to gather other ranks' chunks of full."""
        own = self.full[self.mine]
        # sharded -> replicated, in place
        self.gathering = all_gather(self.full, own, group=group, async_op=True)

    def wait(self):
        """After this the parameters can be used. On GPUs the stream waits for it, not the host."""
        if self.gathering:
            self.gathering.wait()
            self.gathering = None

    # -- ZeRO3's: full has no memory between uses

    def fetch(self, group):
        """Begins to gather, unless full is here or on its way."""
        memory = self.full.untyped_storage()
        if memory.nbytes() == 0:
            memory.resize_(self.full.nbytes)
            for p, place in self.views(self.full).items():
                # By .data p gets full's memory, but not its version counter, by which autograd
                # would take each gather for a change of p, and refuse to go backward.
                p.data = place
            self.full[self.mine].copy_(self.shard)  # which may be on the CPU
            self.gather(group)

    def free(self):
        """Memory goes from under all views of full, also those that autograd keeps for backward."""
        self.wait()  # not while a collective writes into it
        for p in self.shapes:
            # Empty, but with as many dims as before (a scalar gets one): autograd wants a gradient
            # to have as many, and users make groups by p.dim()
            p.data = torch.atleast_1d(p.data)[:0]
        self.full.untyped_storage().resize_(0)


class ZeRO1:
    """Optimizer states are cut: a rank steps its chunk of each unit, and is sent the others.

    units: [(parameters, sites)] in the order of forward, such as units_of(model, model.blocks).
        parameters: trained ones. sites: the modules that read them, in ZeRO3 these alone
    group: the ranks that share the batch, over which gradients are summed
    offload: "optimizer" keeps masters and states in the CPU's memory; "param" (ZeRO3) shards, too
    reduce_dtype: of gradients that are kept, added up and sent (None: their parameter's).
        torch.float32 for bf16 parameters: a bf16 sum of many micro-batches is rounded at each

    Call reduce() after every backward. In stage 1 one sum is enough for the M micro-batches of a
    step: set sync = False before all backwards but the last, and do not call reduce() after these.
    Stages 2 and 3 leave sync True: else buffers would stay, with whole gradients. There all ranks
    have as many backwards in a step.

    Ranks begin with the first one's trained parameters; what is frozen, and buffers, must agree.
    Weights that are loaded later go through load_full_state_dict, else masters would not know.
    """

    offloads = "none", "optimizer"

    def __init__(self, units, group=None, offload="none", reduce_dtype=None):
        assert offload in self.offloads, f"offload {offload}: take one of {self.offloads}"
        self.group = group
        self.offload = offload
        self.sync = True  # does the next backward begin sums? False: it only adds to gradients
        self.now = "zeroed"  # then "adding" gradients, "summed", "stepping", "stepped": for asserts
        self.units = []
        self.unit_of = {}  # {parameter: its unit}
        ready = weakref.WeakMethod(self.ready)  # a hook with self in it would keep it for ever
        for parameters, sites in units:
            guard(parameters, sites)  # only refuses
            unit = Unit(parameters, sites, *self.place_of_rank(), reduce_dtype)
            dist.broadcast(unit.full, group=group, group_src=0)  # the first rank's -> replicated
            self.keep(unit)
            unit.cut(offload)
            self.units.append(unit)
            for p in parameters:
                p.grad = None  # left from before: it is of no step here
                self.unit_of[p] = unit
                p.register_post_accumulate_grad_hook(lambda p: ready()(p))
        self.parts = [part for unit in self.units for part in unit.parts]
        for part in self.parts:
            part.master.stepped_by = self  # for refuse_step
        self.summing = None  # (unit, work): the sum that is under way
        self.begin_micro_batch()

    # -- what a rank keeps of a unit between uses, see Unit

    def place_of_rank(self):  # hybrid_3d.py has another
        """-> into how many chunks units are cut, and which of them is this rank's."""
        return dist.get_world_size(self.group), dist.get_rank(self.group)

    def keep(self, unit):
        """Makes grad."""
        unit.make_buffer()
        unit.grad = unit.buffer[unit.mine]

    # -- gradients: a unit's are summed while backward makes those of the unit before it

    def zero_grad(self):
        self.assert_summed()
        self.begin_micro_batch()  # what an evaluation has left in ZeRO3 goes
        for unit in self.units:
            unit.grad.zero_()
        self.now = "zeroed"

    def begin_micro_batch(self):
        self.pending = self.units[::-1]  # not summed yet, in the order of summing: as backward goes
        self.arrived = set()  # parameters whose gradients of this backward are complete

    def ready(self, p):
        """Autograd's call when p's gradient is complete: once in a backward, also if p is tied."""
        unit = self.unit_of[p]
        refuse_gradient(self, unit, p)
        unit.make_buffer()
        unit.buffer[unit.spans[p]].add_(p.grad.flatten())
        p.grad = None
        self.now = "adding"
        if self.sync:  # this backward is one that ends in a sum
            self.arrived.add(p)
            # in the order of the list: ranks must agree on collectives
            while self.pending and self.arrived.issuperset(self.pending[0].shapes):
                self.sum_next()

    def sum_next(self):
        """Ends the sum that is under way, and begins the next one: so from stage 2 on two units'
        buffers have memory at most, if sync stays True and all parameters are used."""
        if self.summing:
            unit, work = self.summing
            work.wait()
            self.keep_sum(unit)
            self.summing = None
        if self.pending:
            unit = self.pending.pop(0)
            unit.make_buffer()  # this rank may have used nothing of the unit
            self.summing = unit, self.start_sum(unit)

    def start_sum(self, unit):
        own = unit.buffer[unit.mine]
        # partial -> sharded, in place: the sum replaces this rank's chunk
        return reduce_scatter(own, unit.buffer, group=self.group, async_op=True)

    def keep_sum(self, unit):
        """grad, a view of buffer, is the sum now. This rank's summands of other chunks have been
        sent: they become 0, lest the next sum count them again."""
        unit.buffer[:unit.mine.start].zero_()
        unit.buffer[unit.mine.stop:].zero_()

    def reduce(self):
        """To be called after backward, on all ranks: sums what has not been summed yet."""
        while self.pending or self.summing:
            self.sum_next()
        self.begin_micro_batch()
        self.now = "summed"

    def assert_summed(self):
        assert self.now != "adding", "gradients are not summed: call reduce() after backward"

    # -- a step

    def parameter_groups(self, groups=None):
        """groups: dicts, as an optimizer takes them, of parameters -> dicts with our masters."""
        master_of = {part.parameter: part.master for part in self.parts}
        known = {p for unit in self.units for p in unit.shapes}
        groups = groups or [{"params": list(master_of)}]
        ours = []
        for group in groups:
            params = list(group["params"])  # it may be a generator
            assert all(p in known or not p.requires_grad for p in params), "p is in no unit"
            masters = [master_of[p] for p in params if p in master_of]  # with a part here
            ours.append({**group, "params": masters})
        return ours

    def clip_grad_norm_(self, max_norm):
        """Scale the whole gradient to a norm of max_norm at most (0: do not) -> its norm before."""
        self.assert_summed()
        grads = [unit.grad for unit in self.units]
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        square = torch.stack(torch._foreach_norm(grads, dtype=wide)).square().sum()
        dist.all_reduce(square, group=self.group)  # partial -> replicated
        norm = square.sqrt()
        if max_norm:
            finite = norm.nan_to_num(0, posinf=0)  # inf, nan -> 0: then nothing is scaled
            nn.utils.clip_grads_with_norm_(self.units, max_norm, finite)  # it reads their grad
        return norm

    def step(self, optimizer):
        """Around what steps in an optimizer's place, such as a loss scaler, call these two."""
        self.begin_step()
        optimizer.step()
        self.end_step()

    def begin_step(self):
        """Lends the masters their gradients."""
        self.assert_summed()
        self.now = "stepping"
        for part in self.parts:
            if part.parameter.requires_grad:  # frozen since: an optimizer steps none without grad
                # the part's own, or a copy in master's dtype, on its device
                part.master.grad = part.grad.to(part.master)

    def end_step(self):
        for part in self.parts:
            part.master.grad = None
        for unit in self.units:
            unit.shard.copy_(unit.masters)  # where they are one tensor it is there already
            self.renew(unit)
        for unit in self.units:
            unit.wait()
        self.now = "stepped"

    def renew(self, unit):
        unit.gather(self.group)  # what full has of the other ranks' chunks is old

    # -- the whole: {parameter: whole tensor} on every rank. All must call it

    def full_parameters(self):
        """In masters' dtype, so that nothing is lost: fp32, fp64."""
        return {p: t for unit in self.units for p, t in self.whole(unit, unit.masters).items()}

    def full_gradients(self):
        return {p: t for unit in self.units for p, t in self.whole(unit, unit.grad).items()}

    def whole(self, unit, chunk):
        """chunk: masters, grad -> {parameter: whole tensor} of all ranks'."""
        full = torch.empty_like(unit.full, dtype=chunk.dtype)
        all_gather(full, chunk.to(full.device), group=self.group)  # sharded -> replicated
        return unit.views(full)


class ZeRO2(ZeRO1):
    """Gradients are cut, too: a unit has a buffer only from its first gradient to its sum."""

    def keep(self, unit):
        # buffers come and go: their sums are added up here
        unit.grad = torch.zeros_like(unit.shard, dtype=unit.reduce_dtype)

    def keep_sum(self, unit):
        unit.grad += unit.buffer[unit.mine]
        unit.buffer = None


class ZeRO3(ZeRO2):
    """Parameters are cut, too: a unit's full has memory while it computes, or is about to.

        computing         | fwd 0 | fwd 1 | fwd 2 | bwd 2 | bwd 1 | bwd 0 |       | step
        gathering   get 0 | get 1 | get 2 |       | get 1 | get 0 |       |       |
        summing           |       |       |       |       | sum 2 | sum 1 | sum 0 |
    """

    offloads = *ZeRO2.offloads, "param"

    expected = ()  # the units that the micro-batch before has entered: by it this one gathers ahead

    def keep(self, unit):
        super().keep(unit)
        home = "cpu" if self.offload == "param" else unit.full.device
        unit.shard = unit.shard.to(home, copy=True)  # it stays when full goes
        unit.free()
        for site in unit.sites:
            site.register_state_dict_pre_hook(refuse_state_dict)
            site.register_forward_pre_hook(partial(self.enter, unit))
            if type(site) is not nn.Embedding:  # an embedding's backward reads no parameter
                site.register_forward_hook(partial(self.watch, unit))

    def __deepcopy__(self, memo):  # a copied model comes here by its hooks
        raise RuntimeError("in stage 3 parameters are empty: copy the model before ZeRO3")

    @torch.compiler.disable  # else torch.compile would compile it anew for each unit
    def watch(self, unit, site, inputs, output):
        """After a unit's forward: its backward begins when its output gets a gradient."""
        assert torch.is_tensor(output), f"in stage 3 a {type(site).__name__} returns one tensor"
        if output.requires_grad and all(output is not x for x in inputs):  # else it did nothing
            output.register_hook(partial(self.enter, unit))

    @torch.compiler.disable
    def enter(self, unit, *hook_arguments):
        """Forward or backward has come to a unit: free the last, gather this, prefetch the next."""
        visit = len(self.entered)
        if visit > 0 and self.entered[-1] is not unit:
            self.entered[-1].free()
        unit.fetch(self.group)
        unit.wait()
        self.entered.append(unit)
        # The micro-batch before entered expected[visit + 1] after this unit. It travels meanwhile.
        if visit + 1 < len(self.expected) and self.expected[visit] is unit:
            self.expected[visit + 1].fetch(self.group)

    def begin_micro_batch(self):
        super().begin_micro_batch()
        self.entered = []  # this micro-batch's units in the order of use, forward then backward
        for unit in self.units:
            unit.free()  # the last one, and what an evaluation has left

    def reduce(self):
        self.expected = self.entered
        super().reduce()

    def renew(self, unit):
        """An evaluation may have left old numbers in full. The next use gathers the new ones."""
        unit.free()


# -- around the ladder


def units_of(model, blocks):
    """-> [(parameters, sites)] of what is trained before the blocks, in each block, after them.

    Modules must be registered in the order in which they run, and read no others' parameters. In
    stage 3 what contains blocks owns no parameters. A tied head belongs to what comes before.
    """
    blocks = set(blocks)
    inside = {m for block in blocks for m in block.modules()}
    units = [({}, [])]  # dicts serve as ordered sets: {parameter: None}
    for m in model.modules():
        own = trained(m, recurse=m in blocks)
        if m in blocks:
            units += [(dict.fromkeys(own), [m]), ({}, [])]  # and what comes behind it
        elif own and m not in inside:
            tied = [unit for unit in units if unit[0].keys() & own]  # a head, to the embedding
            parameters, sites = (tied or units)[-1]
            parameters.update(dict.fromkeys(own))
            sites.append(m)
    return [(list(parameters), sites) for parameters, sites in units if parameters]


def trained(module, recurse=True):
    return [p for p in module.parameters(recurse) if p.requires_grad]


def full_state_dict(model, zero):
    """-> {name: whole tensor} of the plain model, see full_parameters. All ranks must call it."""
    found = zero.full_parameters()
    state = model.state_dict(keep_vars=True)  # the Parameters themselves, which are keys of found
    return {name: found.get(t, t).detach() for name, t in state.items()}  # frozen ones are whole


def load_full_state_dict(model, zero, state):
    """full_state_dict's inverse: a rank takes its chunks of whole tensors, alike on all ranks."""
    tensors = model.state_dict(keep_vars=True)
    assert state.keys() <= tensors.keys(), f"{state.keys() - tensors} are not in this model"
    # the first of two tied names, which is the one that safetensors has
    names = {t: name for name, t in reversed(tensors.items())}
    for unit in zero.units:
        whole = torch.zeros_like(unit.full, dtype=unit.masters.dtype)
        for p, place in unit.views(whole).items():
            assert state[names[p]].shape == place.shape, f"{names[p]} is {tuple(place.shape)}"
            place.copy_(state[names[p]])
        unit.masters.copy_(whole[unit.mine])
        unit.shard.copy_(unit.masters)
    for t, name in names.items():
        if t.numel():  # not empty
            assert state[name].shape == t.shape, f"{name}: {tuple(state[name].shape)}"
            t.data.copy_(state[name])


# -- mistakes that nobody would see


def guard(parameters, sites):
    assert len({p.dtype for p in parameters}) == 1, (
        "a unit of several dtypes: ZeRO1 and ZeRO2 can have one for each")
    for p in parameters:
        known = hasattr(p, "stepped_by")
        assert not known, "parameters of two units, or of another ZeRO: make the model anew"
        p.stepped_by = None  # for refuse_step: no optimizer steps it
    for module in {module for site in sites for module in site.modules()}:
        module.register_load_state_dict_pre_hook(refuse_load)


def refuse_gradient(zero, unit, p):
    assert unit in zero.pending, "it is summed already: call reduce() after each backward"
    assert zero.now != "stepped", "a gradient of the step before: call zero.zero_grad()"
    assert p.untyped_storage() is unit.full.untyped_storage(), (
        "a parameter has other memory: cast, move and load the model before ZeRO")


def refuse_step(optimizer, *_):
    """torch calls it before every step of every optimizer, once this file is imported. One that has
    the model's own parameters, or is stepped without zero.step(), would change nothing."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    zeros = {p.stepped_by for p in params if hasattr(p, "stepped_by")}
    assert None not in zeros, "make the optimizer of the parameter_groups() of ZeRO, or Hybrid"
    assert all(zero.now == "stepping" for zero in zeros), (
        "call zero.step(optimizer) (train_step of hybrid_3d), not optimizer.step()")


register_optimizer_step_pre_hook(refuse_step)


def refuse_load(site, *_):
    is_copy = not any(hasattr(p, "stepped_by") for p in site.parameters())  # by deepcopy, of an EMA
    assert is_copy, "ZeRO's masters would not know: take load_full_state_dict"


def refuse_state_dict(site, prefix, keep_vars):
    # with keep_vars=True the Parameters serve as keys of full_parameters()
    assert keep_vars, "in stage 3 parameters are empty: save what zero.full_parameters() gathers"


# ---- 3. the toy GPT, parallelized --------------------------------------------

STAGES = {1: ZeRO1, 2: ZeRO2, 3: ZeRO3}


def parallelize(model, group=None, stage=1, offload="none"):
    return STAGES[stage](units_of(model, model.blocks), group, offload)


def full_gradients(model, zero):
    found = zero.full_gradients()
    return {name: found[p] for name, p in model.named_parameters() if p in found}


def idea_gradients(model, zero):
    all_gather(zero.buffer, zero.shard.grad)  # sharded -> replicated, in place: gradients are views
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def train_step(model, zero, optimizer, x, y, valid, clip, accum=1):
    """x, y: this rank's rows (B/n, T); valid: all ranks' targets -> its part of the loss, norm."""
    zero.zero_grad()
    total = 0
    microbatches = zip(x.tensor_split(accum), y.tensor_split(accum))
    for number, (xs, ys) in enumerate(microbatches, 1):
        zero.sync = number == accum or isinstance(zero, ZeRO2)  # stages 2 and 3 keep sums alone
        loss = loss_sum(model(xs), ys) / valid
        loss.backward()
        if zero.sync:
            zero.reduce()  # partial -> sharded
        total = total + loss.detach()
    norm = zero.clip_grad_norm_(clip)
    zero.step(optimizer)
    return total, norm


# ---- 4. at work: the same with torch's own API -------------------------------


def parallelize_at_work(model, lr, stage, mesh):
    if stage == 1:
        module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        # it calls adamw(this rank's parameters, lr=lr) as it would call an optimizer's class
        return module, ZeroRedundancyOptimizer(trained(model), adamw, lr=lr)
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=stage == 3)
    return model, adamw(model.parameters(), lr)  # of DTensors


def train_step_at_work(module, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss = loss_sum(module(x), y) / valid
    (loss * dist.get_world_size()).backward()  # both average over ranks; the sum is wanted here
    norm = nn.utils.clip_grad_norm_(module.parameters(), clip)
    optimizer.step()
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()  # of a DTensor: partial -> replicated
    return loss, norm


# ---- 5. run ------------------------------------------------------------------

FLAGS = {
    "--stage": dict(type=int, default=1, choices=tuple(STAGES), help="cuts 1: optimizer states, "
                    "2: gradients too, 3: parameters too"),
    "--offload": dict(default="none", choices=("none", "optimizer", "param"),
                      help="what lives on the CPU"),
    "--accum": dict(type=int, default=1, least=1, metavar="M", help="micro-batches per step"),
}
VARIANTS = ("--stage 1", "--stage 2", "--stage 3")  # flags with which the file is worth running


def refuse(args, require):
    n = args.world_size
    require(args.stage == 3 or args.offload != "param", "--offload param needs --stage 3")
    require(args.batch >= n * args.accum,
            f"--batch {args.batch}: fewer than {n} ranks x {args.accum} micro-batches")
    ours = args.accum > 1 or args.offload != "none"
    require(args.impl == "scratch" or not ours,
            f"--impl {args.impl} wants --accum 1 and --offload none")
    require(args.impl not in ("idea", "all") or args.stage == 1,
            f"--impl {args.impl}: the idea is --stage 1")
    kept = args.dry_run or args.save or args.resume or args.init_from
    require(args.impl in ("idea", "scratch") or args.stage > 1 or not kept,
            f"--impl {args.impl} --stage 1: torch's optimizer has no dry run and is not saved")


def set_up(run, impl, mesh):
    """-> a Side: what the run steps, judges and saves, see harness/run.py."""
    from harness.checkpoint import pieces_of_units
    from harness.ledger import held_by
    from harness.whole import wholes_of_units

    args = run.args
    model = run.build()
    if impl == "torch":
        module, optimizer = parallelize_at_work(model, args.lr, args.stage, mesh)
        return run.side(module, optimizer, train_step_at_work)
    if impl == "idea":
        zero = IdeaOfZeRO1(model)
        return run.side(zero, adamw([zero.shard], args.lr), partial(idea_step, model),
                        held_of=model, full_gradients=partial(idea_gradients, model, zero))
    zero = parallelize(model, None, args.stage, args.offload)
    named = list(model.named_parameters())
    optimizer = run.optimizer(named, groups=zero.parameter_groups,
                              wholes=partial(wholes_of_units, zero.units, zero.group))
    step = partial(train_step, model, accum=args.accum)
    return run.side(zero, optimizer, step, held_of=model,
                    held=partial(held_by, model, optimizer, zero.units),
                    pieces=partial(pieces_of_units, zero.units, named, optimizer),
                    full_gradients=partial(full_gradients, model, zero),
                    full_state_dict=partial(full_state_dict, model, zero))


def textbook(run, zero):
    """The docstring's table. b: bytes of a number, w: of its master and of each AdamW state."""
    n = run.world_size
    M = run.args.accum
    stage = run.args.stage
    b = run.dtype.itemsize
    w = b if run.impls[0] == "idea" else max(b, 4)
    per_number = 2 * w if w == b else 3 * w
    sizes = [unit.full.numel() for unit in getattr(zero, "units", [zero])]  # the idea: one unit,
    parts = getattr(zero, "parts", [zero])  # one part
    P = sum(sizes)
    # Stage 3 gathers Q for backward once more: not an untied embedding, of which backward reads
    # nothing, nor an untied head, which is there
    Q = P if run.cfg.form.tied else sum(sizes[1:-1])
    sums = P if stage == 1 else M * P
    gathers = M * (P + Q) if stage == 3 else P
    sent = (n - 1) / n  # of what is summed or gathered
    rows = [
        ("wire reduce_scatter", "b P (n-1)/n, from stage 2 on M times", b * sums * sent),
        ("wire all_gather", "b P (n-1)/n; stage 3: M b (P + Q) (n-1)/n", b * gathers * sent),
        ("wire all_reduce", f"2 {w} (n-1)/n, the norm", 2 * w * sent),
        ("held parameters", "b P, in stage 3 / n", b * P / (n if stage == 3 else 1)),
        ("held gradients", "b P, from stage 2 on / n", b * P / (n if stage >= 2 else 1)),
        ("held optimizer", f"{per_number} P / n + 4 a part (step counter)",
         per_number * P / n + 4 * len(parts)),
    ]
    return rows if run.args.offload == "none" else rows[:3]  # the rest is on the CPU


def main():
    from harness.flags import arguments, require  # not above: zero.py is imported without harness/
    from harness.run import Run

    args = arguments(__doc__, FLAGS)
    refuse(args, require)
    run = Run(args)
    mesh = dist.init_device_mesh(run.device.type, (run.world_size,))
    with run:  # from here on a dry run's tensors have no memory
        sides = {impl: set_up(run, impl, mesh) for impl in run.impls}
        run.train(sides, rows=share(args.batch, run.world_size, run.rank))
        if args.impl != "torch":
            run.textbook(textbook(run, sides[run.impls[0]].model))
        return run.finish()


if __name__ == "__main__":
    sys.exit(main())
