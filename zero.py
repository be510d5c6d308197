"""ZeRO: data parallelism in which a rank keeps its part of what every rank would hold otherwise.

    a unit's parameters, end to end   | rank 0 | rank 1 | rank 2 | rank 3 |   equal chunks, padded

    stage 3   compute     fwd 0 | fwd 1 | fwd 2 | bwd 2 | bwd 1        | bwd 0 |       | step
              meanwhile   get 1 | get 2 |       | get 1 | get 0, sum 2 | sum 1 | sum 0 |

P numbers are trained, padding included, on dp ranks. Bytes per rank in bf16: a number takes 2, its
gradient 2, AdamW's master and states 12. M: micro-batches per step (--accum).

                held between steps   sent per step, in units of 2 P (dp-1)/dp
    plain GPT   8 P                  0          no master: in bf16 AdamW's states are bf16, too
    stage 0     16 P                 2          all-reduce of the gradients
    stage 1     (4 + 12/dp) P        2          optimizer cut: reduce-scatter, then all-gather
    stage 2     (2 + 14/dp) P        M + 1      gradients too: M times reduce-scatter
    stage 3     16 P/dp              3 M        parameters too: M times two all-gathers

In fp32 and fp64, of b = 4 and 8 bytes, a parameter is its own master: a number takes b, its
gradient b, its states 2 b. --offload optimizer keeps master and states on the CPU and steps there;
--offload param (stage 3) keeps the parameters there too.

fsdp.py does what stage 3 does by other means. Here the model keeps its own parameters, whose memory
comes and goes under them; units run in any order, which is recorded so that the next one is sent
for in time; and all stages are one class. In fsdp.py a unit puts parameters of its own into the
model, blocks run in the order given, and replicas (HSDP) and the meta device are possible.

Rajbhandari et al. 2019, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054, sections 5 and 7; Ren et al. 2021, "ZeRO-Offload", arXiv:2101.06840.
At work: ZeroRedundancyOptimizer (stage 1), fully_shard (stages 2 and 3), section 3 below.

    zero = ZeRO(model, lambda groups: AdamW(groups, lr=1e-3), stage=3, units=model.blocks)
    zero.zero_grad()
    loss_of(model, rows_of_this_rank).backward()  # its summand of the loss over all ranks
    zero.reduce()
    norm = zero.clip_grad_norm_(1.0)
    zero.step()

    torchrun --standalone --nproc_per_node=2 zero.py --stage 3
"""
import harness  # before torch, which warns where NumPy is missing

import sys
from dataclasses import dataclass, fields, is_dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from common import POSITIVE, Flag, Run, Side, adamw, arguments, loss_sum, require, share
from harness.checkpoint import piece_of, pieces_of, run_pieces
from harness.report import human

# ---- 1. the technique (copy this; it needs only torch) -----------------------

# These two have other names since torch 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Names, in small letters, of optimizers that look at shapes, at norms of tensors or at all numbers
# together.
NOT_ELEMENTWISE = {
    "adafactor", "adalomo", "adam_mini", "adammini", "adamp", "apollo", "came", "dadaptadam",
    "dadaptsgd", "dion", "distributedshampoo", "fusedlamb", "fusednovograd", "galoreadamw", "kfac",
    "kron", "lamb", "lars", "lbfgs", "lomo", "muon", "novograd", "prodigy", "scion", "sgdp",
    "shampoo", "sm3", "soap", "sparseadam", "stableadamw",
}


def has_memory(flat):
    return flat.untyped_storage().size() > 0


def lend(flat):
    """Give a flat tensor its memory, under all views of it. What is in it is not defined."""
    if not has_memory(flat):
        flat.untyped_storage().resize_(flat.numel() * flat.itemsize)


def take_back(flat):
    """Free a flat tensor's memory, under all views of it."""
    if has_memory(flat):
        flat.untyped_storage().resize_(0)


def refuse_copy(memo):
    raise TypeError("in stage 3 a parameter has no memory between steps: copy what "
                    "zero.full_state_dict() gathers")


@dataclass(eq=False)
class Part:
    """This rank's piece of a parameter: a run of its numbers, in 1-D tensors.

    The last part of a flat has the padding, too: its tensors are longer than size.
    """

    parameter: nn.Parameter  # the module's own
    first: int  # the place in parameter.flatten() where the piece begins
    size: int  # how many numbers of the parameter the piece has; 0 if there is only padding here
    shard: torch.Tensor  # what this rank keeps of the parameter
    master: nn.Parameter  # what the optimizer steps; it has a gradient during step() only
    grad: torch.Tensor  # the sum of the gradient over micro-batches and ranks


class Flat:
    """Parameters side by side in one tensor, padded to equal chunks: each rank owns one of them.

        full      p0 | p1 | p2 | padding    the parameters are views of it
        buffer    g0 | g1 | g2 | padding    their gradients are views of it
                  chunk 0 | chunk 1 | ..    where both are cut, wherever that is in a parameter

    In stage 0 there is one chunk, the whole, and every rank owns it. make_chunk lists this rank's
    tensors. Those that are not always needed are without memory in between: full in stage 3, buffer
    in stages 2 and 3.
    """

    def __init__(self, parameters, group, stage, offload):
        self.group = group  # the ranks that share the batch; None: all
        self.stage = stage  # 0 to 3
        self.lay_out(parameters)
        self.make_whole(parameters[0])
        self.make_chunk(offload)
        self.parts = self.cut()  # [Part]: this rank's chunk, parameter by parameter
        self.versions = self.count_changes()  # as step() expects to find them

        self.around = []  # flats of the units that this one's unit lies inside of (stage 3)
        self.gathering = None  # the all-gather into full that is under way, or None
        self.reducing = None  # the sum of buffer over ranks that is under way, or None
        self.missing = len(parameters)  # how many gradients of this backward have not come yet
        self.closed = False  # has a sum begun, so that no further gradient may come?
        self.used = set()  # parameters that have had a gradient on this rank since zero_grad()
        if stage >= 2:
            take_back(self.buffer)
        if stage == 3:
            take_back(self.full)
            for p in parameters:
                p.__deepcopy__ = refuse_copy  # copy.deepcopy(p) would crash the process

    def lay_out(self, parameters):
        """Where everything is, counted in numbers."""
        ranks = 1
        rank = 0
        if self.stage > 0:
            ranks = dist.get_world_size(self.group)
            rank = dist.get_rank(self.group)
        self.starts = {}  # {parameter: where it begins in full}, in this order
        self.size = 0  # of all parameters, without padding
        for p in parameters:
            self.starts[p] = self.size
            self.size += p.numel()
        self.chunk = -(-self.size // ranks)  # size of a chunk, rounded up
        self.length = ranks * self.chunk  # of all chunks, padding included
        self.begin = rank * self.chunk  # where this rank's chunk begins in full

    def make_whole(self, like):
        """The tensors of all chunks, (length,), and the parameters as views."""
        self.full = like.new_zeros(self.length)  # what forward and backward use; padding is 0
        self.buffer = like.new_zeros(self.length)  # gradients of this rank
        self.places = self.views(self.full)  # {parameter: view of full, of the parameter's shape}
        self.slots = self.views(self.buffer)  # {parameter: view of buffer, of its shape}
        for p, place in self.places.items():
            # A parameter that gets its memory in this way keeps a count of changes of its own
            # (p._version). What a gather or a step writes into full is no change of p to autograd.
            p.data = place.copy_(p.detach())

    def make_chunk(self, offload):
        """The tensors of this rank's chunk, (chunk,).

        own     of full, a view
        shard   the parameters in memory that is always there: own, or in stage 3 a copy
        master  what the optimizer steps: the shard, or a copy in fp32 or on the CPU
        sum     of buffer, a view: gradients summed over ranks
        grad    these summed over micro-batches too: sum, or in stages 2 and 3 apart from it
        """
        mine = slice(self.begin, self.begin + self.chunk)
        self.own = self.full[mine]
        self.shard = self.own
        if self.stage == 3:
            home = "cpu" if offload == "param" else self.own.device
            self.shard = self.own.to(home, copy=True)
        wide = torch.promote_types(self.shard.dtype, torch.float32)
        self.master = self.shard.to(wide)  # the shard itself if it is wide already, else a copy
        if offload == "optimizer":
            self.master = self.shard.to("cpu", wide, copy=True)
        self.sum = self.buffer[mine]
        self.grad = self.sum
        if self.stage >= 2:
            self.grad = self.sum.clone()

    def views(self, flat):
        """-> {parameter: its place in a tensor that is laid out like full}."""
        found = {}
        for p, start in self.starts.items():
            found[p] = flat[start:start + p.numel()].view(p.shape)
        return found

    def cut(self):
        """-> [Part] of this rank's chunk, which they cover end to end."""
        parts = []
        last = list(self.starts)[-1]
        for p, start in self.starts.items():
            offset = start - self.begin  # where it begins, seen from this chunk: may be before it
            low = max(offset, 0)
            high = min(offset + p.numel(), self.chunk)
            size = max(high - low, 0)
            if p is last:
                high = self.chunk  # its tensors also have the padding, which size does not count
            if low < high:
                run = slice(low, high)
                master = nn.Parameter(self.master[run])
                part = Part(p, low - offset, size, self.shard[run], master, self.grad[run])
                parts.append(part)
        return parts

    # -- parameters

    def start_gather(self):
        """All chunks begin to arrive in full."""
        lend(self.full)
        if self.stage == 3:
            self.own.copy_(self.shard)
        # sharded -> replicated
        self.gathering = all_gather(self.full, self.own, group=self.group, async_op=True)

    def wait(self):
        """What start_gather has sent for is here. On GPUs the stream waits for it, not the host."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def free(self):
        self.wait()  # memory into which a collective still writes must not go
        take_back(self.full)

    def publish(self):
        """The parameters take over the masters' numbers.

        In stages 1 and 2 those of the other ranks are then under way: wait() waits for them.
        """
        if self.shard is not self.master:
            self.shard.copy_(self.master)
        if self.stage in (1, 2):
            self.start_gather()

    def open(self):
        """The parameters can be written into: they have memory, and this rank's chunk is right."""
        self.wait()
        if not has_memory(self.full):
            lend(self.full)
            self.own.copy_(self.shard)

    @torch.no_grad()
    def adopt(self):
        """What has been written into the parameters is in the shard and in the master, too."""
        if self.stage == 3 and has_memory(self.full):
            self.shard.copy_(self.own)
            take_back(self.full)
        changes = self.count_changes()
        if self.master is not self.shard:
            for part in self.parts:
                p = part.parameter
                # A parameter that nobody has written into keeps its master, which is more exact
                # than the shard.
                if changes[p] != self.versions[p]:
                    part.master.copy_(part.shard)
        self.versions = changes

    def count_changes(self):
        """-> {parameter: how often others have changed it in place}, as autograd counts."""
        return {p: p._version for p in self.starts}

    def refuse_changes(self):
        """Raises if somebody else has changed a parameter, and step() would undo or miss that."""
        storage = self.full.untyped_storage()._cdata
        for p in self.starts:
            if p.untyped_storage()._cdata != storage:
                raise RuntimeError("a parameter has left the memory that ZeRO gave it: "
                                   "module.to() and p.data = .. must come before ZeRO(module)")
        if self.master is self.own:
            return  # what has changed the parameters has changed their master
        if self.count_changes() != self.versions:
            raise RuntimeError("a parameter was changed in place, which its master would undo: "
                               "do it before ZeRO(module), or by module.load_state_dict()")

    # -- gradients

    def take_gradient(self, p):
        """A gradient that autograd has made moves to its slot in buffer, if it is not there yet."""
        lend(self.buffer)
        slot = self.slots[p]
        if p.grad is not slot:
            # a copy in which -0.0 becomes 0.0: start_reduce gives -0.0 the meaning "not used"
            torch.add(p.grad, 0.0, out=slot)
            p.grad = slot

    def start_reduce(self):
        """The gradients begin to be summed over ranks."""
        lend(self.buffer)  # where this rank has used no parameter at all, it has none yet
        # -0.0 stands for no gradient: a sum is -0.0 only if no rank has used the parameter
        for p, slot in self.slots.items():
            if p.grad is None:
                slot.fill_(-0.0)
            else:
                self.used.add(p)
                p.grad = None  # a further gradient must not be added to what is being summed
        # the padding too, or else the last part would never look unused to unused()
        self.buffer[self.size:].fill_(-0.0)
        self.closed = True
        if self.stage == 0:
            work = dist.all_reduce(self.buffer, group=self.group, async_op=True)
            self.reducing = work  # partial -> replicated
        else:
            work = reduce_scatter(self.sum, self.buffer, group=self.group, async_op=True)
            self.reducing = work  # partial -> sharded

    def finish_reduce(self):
        self.reducing.wait()
        self.reducing = None
        if self.stage >= 2:
            self.grad += self.sum
            take_back(self.buffer)

    def forget_gradients(self):
        """The parameters lose theirs, so that the next backward may come; sums over ranks stay."""
        for p in self.starts:
            p.grad = None
        self.missing = len(self.starts)
        # In stages 0 and 1 the sum lies in buffer itself, which stays closed until zero_grad().
        if self.stage >= 2:
            self.closed = False
            take_back(self.buffer)  # it is there if backward has ended in an exception

    def give_gradients(self, skipped):
        """The optimizer's parameters get their gradients, those in `skipped` none."""
        grads = self.grad.to(self.master)  # (chunk,): a copy if master is wider or on the CPU
        lengths = [len(part.master) for part in self.parts]
        for part, grad in zip(self.parts, grads.split(lengths)):
            if part not in skipped:
                part.master.grad = grad

    def drop_gradients(self):
        for part in self.parts:
            part.master.grad = None


class ZeRO:
    """ZeRO for any module, over the ranks of `group`. In a train step it is the optimizer:

        zero.zero_grad()
        loss.backward()  # loss: this rank's summand of the loss over all ranks
        zero.reduce()  # gradients are summed over ranks, not averaged
        norm = zero.clip_grad_norm_(1.0)
        zero.step()

    make_optimizer(groups) makes a torch optimizer, for example AdamW(groups, lr=1e-3). `groups` are
    torch's parameter groups, [{"params": [..], "weight_decay": 0.1}, ..]; None is one group of all
    that is trained. zero.optimizer has them in this order, so that torch's LR schedulers work, but
    what it steps are 1-D pieces, this rank's: it must treat every number alike and alone, as SGD
    and Adam do. Others are refused by their names (NOT_ELEMENTWISE) or after a trial, for which
    make_optimizer is called twice more. step() refuses one that counts its steps in a group.

    units: modules, or tuples of modules, whose parameters lie together; one may be inside another.
    In stage 3 these parameters can be read in the forward of these modules only, and all ranks must
    run the same units in the same order, whichever of their parameters they use. Parameters in no
    unit, in several, or of another dtype than their unit's first are kept as in stage 2. Frozen
    ones stay whole and cost nothing else. With reentrant checkpointing the sums of stage 3 begin in
    reduce(), not during backward.

    With several micro-batches call reduce() after every backward. While zero.sync is False stages 0
    and 1 only add up: set it to True for the last backward of a step. Stages 2 and 3 have no room
    for that, and sum every time.

    The module keeps its parameters, as views of larger tensors. Between steps they can be loaded by
    module.load_state_dict(), with the same values on all ranks. In stage 3 they then have no
    memory, and to read them crashes: full_state_dict() gathers them. Buffers are not summed over
    ranks.
    Raises ValueError for models and optimizers that would be trained wrongly.
    """

    def __init__(self, module, make_optimizer, group=None, stage=1, units=(), offload="none",
                 groups=None):
        refuse_model(module, stage, offload)
        self.module = module
        self.group = group  # the ranks that share the batch; None: all
        self.stage = stage  # 0 to 3
        self.sync = True  # False: stages 0 and 1 do not sum yet what the next backward brings
        self.frozen = [p for p in module.parameters() if not p.requires_grad]  # left alone
        self.flats = []  # [Flat] of all that is trained
        self.homes = {}  # {module: {Flat} of its own parameters}
        self.pending = []  # [Flat] whose sums have not begun, on all ranks from the last one back
        self.reducing = None  # the Flat whose sum is under way, or None
        self.stepping = False  # is step() under way?
        self.plan = []  # [Flat]: stage 3's `entered` at the last reduce()
        # In stage 3, of the time since the last reset():
        self.inside = None  # the Flat to whose unit forward or backward came last, or None
        self.gathered = []  # [Flat] that have memory; the last one's content may be on its way
        self.entered = []  # [Flat] to whose units forward and backward came, in order
        self.begun = set()  # forwards of units whose backward has begun
        self.visited = set()  # {Flat} of units that have run a forward with gradients enabled

        for t in [*module.parameters(), *module.buffers()]:
            broadcast(t, group)
        units = [unit if isinstance(unit, tuple) else (unit,) for unit in units]
        self.make_flats(units, offload)
        self.parts = [part for flat in self.flats for part in flat.parts]  # [Part] of this rank
        self.optimizer = self.make_groups(make_optimizer, groups)  # torch's, of the parts' masters
        self.optimizer.register_step_pre_hook(self.refuse_step)
        self.watch_states()
        self.zero_grad()

    def make_flats(self, units, offload):
        """A Flat for the parameters of each unit, and the hooks by which they come and go."""
        made = {}  # {index of a unit: its Flat}
        for index, parameters in sort_by_unit(self.module, units):
            stage = self.stage
            if index is None:
                stage = min(stage, 2)
            flat = Flat(parameters, self.group, stage, offload)
            if index is not None:
                made[index] = flat
            self.flats.append(flat)
            for p in parameters:
                p.register_post_accumulate_grad_hook(partial(self.ready, flat))
        if self.stage == 3:
            for index, unit in enumerate(units):
                if index in made:
                    self.hook(made[index], unit)
                    outer = surroundings(units, index)
                    made[index].around = [made[i] for i in outer if i in made]
        # In stage 3 those in no unit are of stage 2. They come first, and are summed last, in
        # reduce(): ranks may differ in when they use them.
        self.flats.sort(key=lambda flat: flat.stage)

    def hook(self, flat, unit):
        for site in unit:  # a module of the unit's tuple
            if any(p in flat.starts for p in site.parameters()):
                site.register_forward_pre_hook(partial(self.arrive, flat))
                if type(site) is not nn.Embedding:  # its backward needs no parameter
                    site.register_forward_hook(partial(self.watch, flat))

    def make_groups(self, make_optimizer, groups):
        """-> make_optimizer's optimizer of the parts' masters, in groups like the user's."""
        trained = [p for flat in self.flats for p in flat.starts]
        if groups is None:
            groups = [{"params": trained}]
        group_of = {}  # {parameter: the index of its group}
        ours = []  # the groups, with masters in the place of parameters
        for index, options in enumerate(groups):
            for p in options["params"]:
                if p in group_of:
                    raise ValueError("a parameter is in two of the groups")
                group_of[p] = index
            ours.append({**options, "params": []})
        refuse_groups(group_of, trained)
        if self.parts and dist.get_backend(self.group) != "fake":  # a dry run has no numbers
            refuse_after_trial(make_optimizer, groups, self.parts[0].master)
        for part in self.parts:
            ours[group_of[part.parameter]]["params"].append(part.master)
        # before make_optimizer has the groups in its hands: it may change the lists
        given = [list(map(id, options["params"])) for options in ours]
        optimizer = make_optimizer(ours)
        refuse_by_name(optimizer)
        refuse_other_groups(optimizer, given)
        return optimizer

    # -- parameters in stage 3

    def arrive(self, flat, site, inputs):
        """Before a unit's forward. When its inputs have their gradients, its backward is over."""
        if torch.is_grad_enabled():
            # Backward takes units in the reverse order of forward. When it is back at these inputs,
            # only the units that have run before this one are still to come, and pass_by() begins
            # the sums of all others, this unit's too: it is added to visited after the copy.
            before = set(self.visited)
            self.call_back(inputs, partial(self.pass_by, before))
            self.visited.add(flat)
        self.enter(flat)

    def enter(self, flat):
        """Forward or backward comes to a unit. One rule for both, in four steps."""
        if self.inside is not None and (flat is self.inside or flat in self.inside.around):
            return  # it is here already
        needed = [*flat.around, flat]
        # 1. What lies behind is freed.
        for other in self.gathered:
            if other not in needed:
                other.free()
        self.gathered = [other for other in self.gathered if other in needed]
        # 2. What is needed is sent for, unless step 4 has done so when the unit before was entered.
        for wanted in needed:
            self.send_for(wanted)
        # 3. It is waited for.
        for wanted in needed:
            wanted.wait()
        self.inside = flat
        # 4. Suppose the last micro-batch entered this unit at this point as well. Then the unit
        # that it entered next is sent for now, and travels while this one computes.
        visit = len(self.entered)
        self.entered.append(flat)
        if visit + 1 < len(self.plan) and self.plan[visit] is flat:
            self.send_for(self.plan[visit + 1])

    def send_for(self, flat):
        if flat not in self.gathered:
            self.gathered.append(flat)
            flat.start_gather()  # sharded -> replicated

    def watch(self, flat, site, inputs, output):
        """After a unit's forward: its backward begins when one of its outputs gets a gradient.

        The first output to get one counts. Another may get its own only when the backward of many
        units is over: T5's position bias, for example, which passes through all of them.
        """
        forward = object()  # stands for this run of forward, since a unit may run several times
        # When backward is at these outputs, this unit is still to come, and so it is in this copy:
        # arrive() has added it.
        visited = set(self.visited)
        self.call_back(output, partial(self.come_back, flat, forward, visited))

    def call_back(self, value, hook):
        """hook(gradient) is to be called when backward comes to what made one of these tensors."""
        for t in tensors_in(value):
            # Not of a leaf, such as a parameter that a unit hands on. Its hook is called as soon as
            # backward is through with all of its uses, perhaps far behind this place in forward:
            # units that ran between this place and those uses may not have gone backward yet. The
            # hook of a computed tensor is called when all that ran after it in forward is through.
            if t.grad_fn is not None:
                t.register_hook(hook)

    def come_back(self, flat, forward, visited, gradient):
        if forward not in self.begun:
            self.begun.add(forward)
            self.pass_by(visited, gradient)
            self.enter(flat)

    def pass_by(self, visited, gradient):
        """In stage 3, sums begin here: of all units but `visited`, whose backward is still to come.

        visited: the units that had run when forward was at this place. Autograd takes what was
        computed last first: when it is back at this place, all other units are through.
        Their sums wait for no gradient: ranks may differ in which parameters of a unit they use,
        but must agree on the order of collectives.
        """
        if not self.is_trained_now():
            return
        while self.pending and self.pending[0].stage == 3 and self.pending[0] not in visited:
            self.reduce_next()

    def is_trained_now(self):
        """Does the backward under way end in parameters? torch.autograd.grad(loss, x) does not."""
        for flat in self.pending:
            for p in flat.starts:
                node = torch.autograd.graph.get_gradient_edge(p).node
                if torch._C._will_engine_execute_node(node):
                    return True
        return False

    def free_units(self):
        """To be called after a forward without backward, such as an evaluation: memory is freed."""
        for flat in self.gathered:
            flat.free()
        self.gathered = []
        self.entered = []
        self.inside = None

    # -- gradients

    def ready(self, flat, p):
        """Autograd's call when a gradient is complete, of a tied parameter the sum of its uses."""
        if p.grad.layout != torch.strided:
            raise RuntimeError("a sparse gradient: make the layer with sparse=False")
        if p.grad.requires_grad:
            raise RuntimeError("backward(create_graph=True): ZeRO has no gradients of gradients")
        if flat.closed:
            raise RuntimeError(
                "a gradient comes after the sum over ranks has begun: call zero.zero_grad() before "
                "a step and zero.reduce() after each backward; in stages 0 and 1 set zero.sync to "
                "False before all backwards of a step but the last")
        flat.take_gradient(p)
        if self.stage < 3 and self.sums_now():  # for stage 3 see pass_by
            flat.missing -= 1
            while self.pending and self.pending[0].missing == 0:
                self.reduce_next()

    def sums_now(self):
        """Are gradients of the backward under way to be summed over ranks?"""
        return self.sync or self.stage >= 2

    def reduce_next(self):
        """The next sum begins. The one before ends first, so that there are at most two buffers."""
        if self.reducing is not None:
            self.reducing.finish_reduce()
        self.reducing = self.pending.pop(0)
        self.reducing.start_reduce()  # partial -> sharded, in stage 0 replicated

    def reduce(self):
        """To be called after each backward, on all ranks: sums what has not been summed yet."""
        if not self.sums_now():
            return
        while self.pending:
            self.reduce_next()
        self.plan = self.entered
        self.reset()

    def norm(self):
        """-> the norm of the whole gradient, the same on all ranks."""
        if not self.flats:
            return torch.zeros(())
        wide = self.flats[0].master.dtype
        for flat in self.flats:
            wide = torch.promote_types(wide, flat.master.dtype)
        norms = [torch.linalg.vector_norm(flat.grad, dtype=wide) for flat in self.flats]
        square = torch.stack(norms).square().sum()
        if self.stage > 0:
            dist.all_reduce(square, group=self.group)  # partial -> replicated
        return square.sqrt()

    def scale_to_norm(self, max_norm, norm):
        """Scales the gradient, whose norm this is, down to max_norm. 0: there is no limit."""
        if max_norm and self.flats:
            finite = norm.nan_to_num(0, posinf=0)  # inf and nan stay, for others to see
            scale = (max_norm / (finite + 1e-6)).clamp(max=1)
            torch._foreach_mul_([flat.grad for flat in self.flats], scale)

    def clip_grad_norm_(self, max_norm):
        """-> the norm of the whole gradient before it was scaled down to max_norm. 0: no limit."""
        norm = self.norm()
        self.scale_to_norm(max_norm, norm)
        return norm

    # -- a step

    def zero_grad(self):
        self.reset()
        for flat in self.flats:
            flat.closed = False
            flat.used.clear()
            flat.grad.fill_(-0.0)  # there is none: see start_reduce

    def step(self):
        """Steps this rank's parts, but for parameters that no rank has used, as in one process."""
        self.refuse_changes()
        skipped = self.unused()
        before = self.options()
        self.stepping = True
        try:
            for flat in self.flats:
                flat.give_gradients(skipped)
                self.optimizer.step()  # parts of other flats have no gradient, and are left alone
                flat.drop_gradients()
                # in stages 1 and 2 sharded -> replicated, while the next one is stepped
                flat.publish()
        finally:
            self.stepping = False
        if self.options() != before:
            raise RuntimeError("this optimizer keeps account of its steps in param_groups, "
                               "but ZeRO calls it once for each unit")
        self.reset()

    def unused(self):
        """-> [Part] of parameters that no rank has used: their sums are -0.0 throughout."""
        doubtful = [part for flat in self.flats for part in flat.parts
                    if part.parameter not in flat.used]
        if not doubtful:
            return []  # a rank that has used all of its parameters need not look, nor wait
        verdicts = [(part.grad.eq(0) & part.grad.signbit()).all() for part in doubtful]
        absent = torch.stack(verdicts).tolist()  # the host waits
        return [part for part, is_absent in zip(doubtful, absent) if is_absent]

    def refuse_changes(self):
        """Raises if others have changed parameters so that they would not be trained."""
        known = set()
        for flat in self.flats:
            flat.refuse_changes()
            known.update(flat.starts)
        for p in self.module.parameters():
            if p.requires_grad and p.numel() and p not in known:
                raise RuntimeError("a parameter is trained that was frozen, or not there, when "
                                   "ZeRO(module) was made")

    def options(self):
        """-> [the options of a group, for each group]; those that are tensors are left out."""
        found = []
        for group in self.optimizer.param_groups:
            options = {}
            for name, value in group.items():
                if name != "params" and not isinstance(value, torch.Tensor):
                    options[name] = value
            found.append(options)
        return found

    def refuse_step(self, *_):
        if not self.stepping:
            raise RuntimeError("call zero.step(): zero.optimizer's own would do nothing")

    def reset(self):
        """Nothing is gathered or being summed, and no parameter has a gradient of this rank."""
        if self.reducing is not None:
            self.reducing.finish_reduce()
            self.reducing = None
        self.pending = self.flats[::-1]  # as backward goes
        self.free_units()
        self.begun.clear()
        self.visited.clear()
        for flat in self.flats:
            flat.wait()
            flat.forget_gradients()

    # -- the whole

    def full_state_dict(self):
        """-> module.state_dict() with copies of whole tensors, on every rank. All must call it."""
        self.free_units()
        whole = {}  # {parameter: copy}
        for flat in self.flats:
            if flat.stage == 3:
                flat.start_gather()  # sharded -> replicated
                flat.wait()
            for p, place in flat.places.items():
                whole[p] = place.clone()
            if flat.stage == 3:
                flat.free()
        state = self.module.state_dict(keep_vars=True)
        for name, t in state.items():
            if isinstance(t, torch.Tensor):
                state[name] = whole[t] if t in whole else t.detach().clone()
        return state

    def full_gradients(self):
        """-> {name: whole gradient} of all that is trained, on every rank. All must call it."""
        found = {}  # {parameter: gradient}
        for flat in self.flats:
            full = torch.empty_like(flat.full)
            if flat.stage == 0:
                full.copy_(flat.grad)
            else:
                all_gather(full, flat.grad, group=self.group)  # sharded -> replicated
            found.update(flat.views(full))
        gradients = {}
        for name, p in self.module.named_parameters():
            if p in found:
                gradients[name] = found[p]
            elif p.requires_grad:
                gradients[name] = torch.zeros_like(p)  # it has no numbers
        return gradients

    def held(self):
        """-> {kind: [tensors]}: what this rank keeps between steps.

        The ledger counts the storages behind these, each of them once and whole. Views of one
        tensor count as that tensor: in stages 0 and 1, flat.grad stands for all of flat.buffer.
        """
        states = []
        for state in self.optimizer.state.values():
            states += [t for t in state.values() if isinstance(t, torch.Tensor)]
        masters = [flat.master for flat in self.flats if flat.master is not flat.shard]
        shards = [flat.shard for flat in self.flats]
        return {
            "parameters": [*self.module.parameters(), *self.module.buffers(), *shards],
            "gradients": [flat.grad for flat in self.flats],
            "optimizer": states + masters,
        }

    # -- the module's own state_dict, load_state_dict and copies

    def watch_states(self):
        """load_state_dict() is to reach what is kept of the parameters, in every stage."""
        flats = {p: flat for flat in self.flats for p in flat.starts}
        for m in self.module.modules():
            self.homes[m] = {flats[p] for p in m.parameters(recurse=False) if p in flats}
            if self.homes[m]:
                m.register_load_state_dict_pre_hook(self.before_load)
                m.register_load_state_dict_post_hook(self.after_load)
                m.register_state_dict_pre_hook(self.before_state_dict)

    def before_load(self, module, state_dict, prefix, metadata, *_):
        flats = self.homes.get(module, ())
        if flats and metadata.get("assign_to_params_buffers"):
            raise RuntimeError("load_state_dict(assign=True) would take ZeRO's parameters out of "
                               "the module: leave assign out")
        for flat in flats:
            self.free_units()
            flat.open()

    def after_load(self, module, incompatible_keys):
        for flat in self.homes.get(module, ()):
            flat.adopt()

    def before_state_dict(self, module, prefix, keep_vars):
        flats = self.homes.get(module, ())
        if not keep_vars and not all(has_memory(flat.full) for flat in flats):
            raise RuntimeError("between steps of stage 3 the parameters have no memory: "
                               "use zero.full_state_dict()")

    def __deepcopy__(self, memo):
        """A copy of the module, such as one for an average of weights, shares this object.

        The copied hooks call it; for modules that it does not know they do nothing.
        """
        return self


def refuse_model(module, stage, offload):
    """Raises ValueError for what would be trained wrongly, and says what to do."""
    least = {"none": 0, "optimizer": 1, "param": 3}  # {offload: the lowest stage}
    if stage not in (0, 1, 2, 3) or offload not in least or stage < least[offload]:
        raise ValueError(f"stage {stage}, offload {offload}: stages are 0 to 3; offload is none, "
                         "from stage 1 optimizer, in stage 3 param")
    for name, m in module.named_modules():
        if not isinstance(m, (nn.Embedding, nn.EmbeddingBag)) or not m.weight.requires_grad:
            continue
        if m.sparse:
            raise ValueError(f"{name} has sparse=True, which makes sparse gradients: leave it out")
        if m.max_norm is not None:
            raise ValueError(f"{name} has max_norm, which changes the weight in forward, on each "
                             "rank other rows: leave it out")
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for name, p in trained.items():
        if p.is_complex():
            raise ValueError(f"{name} is complex: keep real numbers, and use torch.view_as_complex")
        if p.is_meta or p.layout != torch.strided or hasattr(p, "placements"):
            raise ValueError(f"{name} is on the meta device, sparse or a DTensor: ZeRO wants all "
                             "of its values here")
    devices = sorted({str(p.device) for p in trained.values()})
    if len(devices) > 1:
        raise ValueError(f"trained parameters are on {devices}: a rank has one device")
    filled = [p for p in trained.values() if p.numel()]
    addresses = {(p.untyped_storage()._cdata, p.storage_offset()) for p in filled}
    if len(addresses) < len(filled):
        raise ValueError("two parameters share memory without being one: tie them by using the "
                         "same nn.Parameter, as in head.weight = embedding.weight")


def refuse_groups(grouped, trained):
    """grouped: the parameters in the user's groups. trained: those of the module."""
    lost = len(set(trained) - set(grouped))
    if lost:
        raise ValueError(f"{lost} trained parameters are in no group: add or freeze them")
    for p in set(grouped) - set(trained):
        if p.requires_grad and p.numel():
            raise ValueError("a group has a parameter to train that the module has not: make "
                             "groups of module.parameters()")


def not_elementwise(kind):
    return ValueError(f"{kind.__name__} looks at more than a number alone: ZeRO's optimizer sees "
                      "1-D pieces of the parameters of one rank")


def refuse_by_name(optimizer):
    for kind in type(optimizer).__mro__:
        if kind.__name__.lower() in NOT_ELEMENTWISE:
            raise not_elementwise(kind)


def refuse_other_groups(optimizer, given):
    """given: the ids of the parameters in its groups, as they should be."""
    found = [list(map(id, group["params"])) for group in optimizer.param_groups]
    if found != given:
        raise ValueError("make_optimizer must keep the groups that it is given, of 1-D pieces: "
                         "make groups of the module's own parameters, ZeRO(.., groups=[..])")


def refuse_after_trial(make_optimizer, groups, like):
    """Raises if the optimizer steps pieces of a matrix otherwise than the whole of it."""
    matrix = torch.linspace(-1, 1, 24).view(4, 6).to(like)
    pieces = matrix.flatten().split(10)
    results = []
    for tensors in ([matrix], pieces):
        trial = []
        for options in groups:
            trial.append({**options, "params": [nn.Parameter(t.clone()) for t in tensors]})
        tried = [p for options in trial for p in options["params"]]
        optimizer = make_optimizer(trial)
        refuse_by_name(optimizer)  # before a step: some want a closure
        for options in optimizer.param_groups:
            if "lr" in options:
                options["lr"] = 0.1  # with a rate of 0, or a small one, all results would be alike
        for _ in range(2):
            for p in tried:
                p.grad = p.detach().square() + 0.1
            optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in tried]).cpu())
    if not torch.allclose(*results):
        raise not_elementwise(type(optimizer))


def broadcast(tensor, group):
    """Gives all ranks the first rank's values; as bytes, since backends do not know every dtype."""
    values = tensor.detach()
    dense = values.contiguous()  # values itself, unless it has other strides
    if dense.numel():
        numbers = dense.view(-1).view(torch.uint8)
        dist.broadcast(numbers, group=group, group_src=0)  # the first rank's -> replicated
    values.copy_(dense)


def tensors_in(output, seen=None):
    """-> the tensors in a module's output, whatever it is: a tuple, a dict, a dataclass, .."""
    if seen is None:
        seen = set()  # ids of what has been looked into, since objects may refer to each other
    if isinstance(output, torch.Tensor):
        return [output]
    if id(output) in seen or isinstance(output, (str, bytes, type, nn.Module)):
        return []
    seen.add(id(output))
    if isinstance(output, dict):
        inner = output.values()
    elif isinstance(output, (tuple, list, set)):
        inner = output
    elif is_dataclass(output):
        inner = [getattr(output, field.name) for field in fields(output)]
    else:
        inner = getattr(output, "__dict__", {}).values()
    found = []
    for thing in inner:
        found += tensors_in(thing, seen)
    return found


def sort_by_unit(module, units):
    """-> [(index of a unit, trained parameters that lie together)].

    The index is None for those that are in no unit, in several, or of another dtype than their
    unit's first. They lie together by dtype.
    """
    owner = innermost(units)
    units_of = {}  # {parameter: indices of the units of all modules that have it}
    for m in module.modules():
        for p in m.parameters(recurse=False):
            if p.requires_grad and p.numel():
                found = units_of.setdefault(p, set())
                found.add(owner.get(m))  # None: m is in no unit
    first_dtype = {}  # {index: dtype of the unit's first parameter}
    together = {}  # {(index, dtype): [parameter]}
    for p, indices in units_of.items():
        index = None
        if len(indices) == 1:
            [index] = indices
        first_dtype.setdefault(index, p.dtype)
        if p.dtype != first_dtype[index]:
            index = None
        together.setdefault((index, p.dtype), []).append(p)
    return [(index, parameters) for (index, _), parameters in together.items()]


def innermost(units):
    """-> {module: index of the innermost unit it lies in}."""
    unit_of = {}  # {a unit's module: index of the unit}
    for index, unit in enumerate(units):
        for site in unit:
            if site in unit_of:
                raise ValueError("a module is in two of the units")
            unit_of[site] = index
    # what lies inside another module has fewer modules: the innermost comes last, and has the last
    # word
    outer_first = sorted(unit_of, key=lambda site: len(list(site.modules())), reverse=True)
    owner = {}
    for site in outer_first:
        for m in site.modules():
            owner[m] = unit_of[site]
    return owner


def surroundings(units, index):
    """-> indices of the units that unit `index` lies inside of."""
    found = []
    for outer, unit in enumerate(units):
        inside = {m for site in unit for m in site.modules()}
        if outer != index and any(site in inside for site in units[index]):
            found.append(outer)
    return found


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, lr, group=None, stage=1, offload="none"):
    """-> ZeRO, with a unit for each block.

    The head is tied to the embedding, so the two ends of forward are one unit. The last norm runs
    right behind the last block, and travels with it.
    """
    ends = (model.tok, model.pos, model.head)
    *blocks, last = model.blocks
    units = [ends, *blocks, (last, model.norm)]
    return ZeRO(model, partial(adamw, lr=lr), group, stage, units, offload)


def full_state_dict(zero):
    return zero.full_state_dict()


def full_gradients(zero):
    return zero.full_gradients()


def train_step(zero, x, y, valid, clip, accum=1):
    """x, y: this rank's rows (B/dp, T) -> this rank's part of the loss, the gradient norm.

    valid: the number of targets in the whole batch.
    """
    zero.zero_grad()
    total = 0
    microbatches = zip(x.tensor_split(accum), y.tensor_split(accum))
    for number, (xs, ys) in enumerate(microbatches, 1):
        loss = loss_sum(zero.module(xs), ys) / valid
        zero.sync = number == accum
        loss.backward()
        zero.reduce()  # partial -> sharded, in stage 0 replicated
        total = total + loss.detach()
    norm = zero.clip_grad_norm_(clip)
    zero.step()
    return total, norm


def evaluate(zero, x, y):
    """x, y: this rank's rows of held-out text -> its part of the sum of token losses."""
    loss = loss_sum(zero.module(x), y)
    zero.free_units()
    return loss


def pieces(zero):
    """-> [Piece] by the plain GPT's names: masters as the parameters, and AdamW's states."""
    names = {p: name for name, p in zero.module.named_parameters()}
    is_first = dist.get_rank(zero.group) == 0
    writes = zero.stage > 0 or is_first  # in stage 0 all ranks hold the same
    found = []
    for part in zero.parts:
        held = {"": part.master.detach()}  # {end of a piece's name, such as ".exp_avg": 1-D tensor}
        for kind, state in zero.optimizer.state.get(part.master, {}).items():
            if kind != "step":
                held["." + kind] = state
        for end, tensor in held.items():
            numbers = tensor[:part.size]  # without padding
            name = names[part.parameter] + end
            found += run_pieces(name, part.parameter.shape, part.first, numbers, writes)
    frozen = [(names[p], p) for p in zero.frozen]
    return found + pieces_that_follow(zero, names) + pieces_of(frozen, None, is_first)


def pieces_that_follow(zero, names):
    """-> [Piece] of the tensors that forward reads or gathers: loaded like masters, not saved."""
    found = []
    for flat in zero.flats:
        if flat.stage < 3:
            for p, place in flat.places.items():
                found.append(piece_of(names[p], place, writes=False))
        elif flat.shard is not flat.master:
            for part in flat.parts:
                numbers = part.shard[:part.size]
                name = names[part.parameter]
                found += run_pieces(name, part.parameter.shape, part.first, numbers, writes=False)
    return found


# ---- 3. at work: the same with torch's own API -------------------------------


def parallelize_at_work(model, lr, stage, mesh):
    """-> the module to call, its optimizer."""
    if stage == 1:
        trained = [p for p in model.parameters() if p.requires_grad]
        module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        # it calls adamw(this rank's parameters, lr=lr) as it would call an optimizer's class
        return module, ZeroRedundancyOptimizer(trained, adamw, lr=lr)
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=stage == 3)
    trained = [p for p in model.parameters() if p.requires_grad]  # DTensors now
    return model, adamw(trained, lr)


def whole(t):
    """A DTensor, sharded or (a norm) partial -> replicated. An ordinary tensor is whole already."""
    if isinstance(t, DTensor):
        return t.full_tensor()
    return t


def full_gradients_at_work(model):
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}


def full_state_dict_at_work(model):
    return {name: whole(t) for name, t in model.state_dict().items()}


def train_step_at_work(module, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss = loss_sum(module(x), y) / valid
    (loss * dist.get_world_size()).backward()  # both average over ranks; the sum is wanted here
    norm = nn.utils.clip_grad_norm_(module.parameters(), clip or float("inf"))
    optimizer.step()
    return loss.detach(), whole(norm)


def evaluate_at_work(module, x, y):
    return loss_sum(module(x), y)


# ---- 4. run ------------------------------------------------------------------


def units_gathered(zero):
    """-> [Flat]: the all-gathers of a micro-batch in stage 3.

    A unit in which forward turns into backward is gathered once.
    """
    model = zero.module
    embeddings = [model.tok, model.pos]  # their backward needs no parameter
    rest = [*model.blocks, model.norm, model.head]
    sites = embeddings + rest + rest[::-1]
    home = {p: flat for flat in zero.flats for p in flat.starts}
    visited = []
    for site in sites:
        for p in site.parameters():
            if p in home and (not visited or visited[-1] is not home[p]):
                visited.append(home[p])
    return visited


def held_in_stage(run, zero, stage):
    """-> {kind: (bytes of all P numbers, over how many ranks they are cut)}."""
    dp = run.world_size
    P = sum(flat.full.numel() for flat in zero.flats)
    flat = zero.flats[0]
    wide = flat.master.itemsize
    states = 2 * wide
    if flat.master is not flat.shard:
        states += wide
    return {
        "parameters": (run.dtype.itemsize * P, dp if stage == 3 else 1),
        "gradients": (run.dtype.itemsize * P, dp if stage >= 2 else 1),
        "optimizer": (states * P, dp if stage >= 1 else 1),
    }


def sent_in_stage(run, zero, stage):
    """-> bytes that a rank sends in a step of this stage, but for the norm; their formula."""
    dp = run.world_size
    M = run.args.accum
    P = sum(flat.full.numel() for flat in zero.flats)
    G = sum(flat.full.numel() for flat in units_gathered(zero))
    b = run.dtype.itemsize
    if stage < 2:
        numbers = 2 * P
        formula = "2 P"
    elif stage == 2:
        numbers = (M + 1) * P
        formula = "(M + 1) P"
    else:
        numbers = M * (P + G)
        formula = f"M (P + {G} gathered)"
    return b * numbers * (dp - 1) / dp, f"b (dp-1)/dp {formula}"


def account(run, zero):
    """The paper's figures for every stage, and what the ledger has measured for this one."""
    heads = ["parameters", "gradients", "optimizer", "sent"]
    columns = [f"{head:>13}" for head in heads]
    # these are computed, not measured
    run.say(f"\n{'stage':>8}" + "".join(columns) + "   of the paper")
    for stage in range(4):
        sizes = [size / ranks for size, ranks in held_in_stage(run, zero, stage).values()]
        sent, _ = sent_in_stage(run, zero, stage)
        columns = [f"{human(size):>13}" for size in (*sizes, sent)]
        run.say(f"{stage:8}" + "".join(columns))
    account_held(run, zero)
    account_sent(run, zero)


def account_held(run, zero):
    apart = {
        "parameters": sum(p.nbytes for p in zero.frozen),  # they are whole on every rank
        "gradients": 0,
        "optimizer": 4 * len(zero.parts),  # a step counter for each
    }
    memory = run.ledger["scratch"].memory
    for kind, (size, ranks) in held_in_stage(run, zero, zero.stage).items():
        formula = f"{size} / {ranks} + {apart[kind]}"
        run.textbook(f"{kind} held", formula, size / ranks + apart[kind], memory[kind])


def account_sent(run, zero):
    dp = run.world_size
    expected, formula = sent_in_stage(run, zero, zero.stage)
    if zero.stage:
        norm = 2 * (dp - 1) / dp * zero.flats[0].master.itemsize
        expected += norm
        formula += f" + {norm:g} for the norm"
    collectives = run.ledger["scratch"].collectives
    measured = sum(collective["wire"] for collective in collectives.values())
    run.textbook("wire in all", formula, expected, measured)


def refuse(args):
    """What cannot run ends here, in one line, before anything is built."""
    dp = args.world_size
    stage = args.stage
    scratch = args.impl == "scratch"
    least = {"none": 0, "optimizer": 1, "param": 3}[args.offload]
    require(stage >= least,
            f"--offload {args.offload} with --stage {stage}: needs stage {least} or more")
    require(scratch or stage >= 1, f"--impl {args.impl} --stage 0: torch's has stages 1 to 3")
    require(scratch or args.accum == 1, f"--impl {args.impl}: --accum is for --impl scratch")
    require(scratch or args.offload == "none",
            f"--impl {args.impl}: --offload is for --impl scratch")
    saved = args.save or args.resume or args.init_from
    require(scratch or stage >= 2 or not (args.dry_run or saved),
            f"--impl {args.impl} --stage 1: torch's optimizer has no dry run and is not saved")
    require(args.batch >= dp * args.accum,
            f"--batch {args.batch}: fewer than {dp} ranks x {args.accum} micro-batches")


def set_up(run, impl, mesh):
    """-> a Side: the model of this implementation, and what a run does with it."""
    args = run.args
    rows = share(args.batch, run.world_size, run.rank)  # of every batch, this rank's
    model = run.build()
    if impl == "torch":
        return set_up_at_work(run, model, rows, mesh)
    zero = parallelize(model, args.lr, None, args.stage, args.offload)
    return Side(
        model=zero,
        optimizer=zero.optimizer,
        train_step=lambda x, y, valid: train_step(zero, x, y, valid, args.clip, args.accum),
        full_gradients=lambda: full_gradients(zero),
        full_state_dict=lambda: full_state_dict(zero),
        evaluate=lambda k: evaluate(zero, *run.held_out(k, rows)),
        pieces=lambda: pieces(zero),
        held=zero.held,
    )


def set_up_at_work(run, model, rows, mesh):
    clip = run.args.clip
    module, optimizer = parallelize_at_work(model, run.args.lr, run.args.stage, mesh)
    return Side(
        model=module,
        optimizer=optimizer,
        train_step=lambda x, y, valid: train_step_at_work(module, optimizer, x, y, valid, clip),
        full_gradients=lambda: full_gradients_at_work(model),
        full_state_dict=lambda: full_state_dict_at_work(model),
        evaluate=lambda k: evaluate_at_work(module, *run.held_out(k, rows)),
        pieces=lambda: pieces_of(model.named_parameters(), optimizer, writes=True),
    )


def main():
    args = arguments(
        __doc__,
        stage=Flag(1, "cuts 1: optimizer states, 2: gradients too, 3: parameters too", (0, 3)),
        offload=Flag("none", "what lives on the CPU", ("none", "optimizer", "param")),
        accum=Flag(1, "micro-batches per step", POSITIVE),
    )
    refuse(args)
    run = Run(args)
    mesh = dist.init_device_mesh(run.device.type, (run.world_size,))
    rows = share(args.batch, run.world_size, run.rank)
    with run:
        sides = {impl: set_up(run, impl, mesh) for impl in run.impls}
        run.begin(sides)
        model = sides[run.impls[0]].model
        plain = getattr(model, "module", model)  # fully_shard puts nothing around the model
        total = sum(p.numel() for p in plain.parameters())
        run.say(f"zero: stage {args.stage}, {run.world_size} ranks on {run.device.type}, "
                f"{args.dtype}, {total:,} parameters")
        for impl, step in run.steps():
            side = sides[impl]
            run.set_rate(side.optimizer, step)
            x, y, valid = run.batch(step, rows)
            with run.measure(impl, step):
                loss, norm = side.train_step(x, y, valid)
            run.log(impl, step, loss, norm)
        if "scratch" in run.impls:
            account(run, sides["scratch"].model)
        run.show_held()
        own = run.ledger[run.impls[0]].memory["parameters"] // run.dtype.itemsize
        return run.finish(total, own)


if __name__ == "__main__":
    sys.exit(main())
