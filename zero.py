"""ZeRO: data parallelism in which a rank keeps its part of what else every rank would hold whole.

    a unit's parameters, end to end  | rank 0 | rank 1 | rank 2 | rank 3 |  equal chunks, then padding

    stage 3   compute     fwd 0 | fwd 1 | fwd 2 | bwd 2 | bwd 1        | bwd 0 |       | own chunks
              meanwhile   get 1 | get 2 |       | get 1 | get 0, sum 2 | sum 1 | sum 0 |   step

P numbers are trained, padding included, on dp ranks. Bytes per rank in bf16: a number takes 2, its
gradient 2, AdamW's master and states 12. M: micro-batches per step (--accum).

                held between steps   sent per step    x 2 P (dp-1)/dp
    plain GPT   16 P                 0
    stage 0     16 P                 2                all-reduce of the gradients
    stage 1     (4 + 12/dp) P        2                optimizer cut: reduce-scatter, all-gather
    stage 2     (2 + 14/dp) P        M + 1            gradients too: reduce-scatter M times
    stage 3     16 P/dp              3 M              parameters too: all-gather twice M times

In fp32 and fp64 the parameter is its own master: b, b and 2 b bytes. --offload optimizer keeps master
and states on the CPU and steps there, --offload param (stage 3) the parameters' chunks too.

fsdp.py does what stage 3 does by other means. Here the model keeps its own parameters, whose memory
comes and goes under them; units run in any order, which is recorded for prefetching; a unit in which
forward turns around stays; all stages are one class. There a unit lends parameters to the model in
their place, blocks run in the order given, and replicas (HSDP) and the meta device are possible.

Rajbhandari et al. 2019, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054, sections 5 and 7; Ren et al. 2021, "ZeRO-Offload", arXiv:2101.06840.
At work: ZeroRedundancyOptimizer (stage 1), fully_shard (2: reshard_after_forward=False, and 3).

    zero = ZeRO(model, lambda groups: torch.optim.AdamW(groups, lr=1e-3), stage=3, units=model.blocks)
    zero.zero_grad()
    loss_of(model, rows_of_this_rank).backward()  # its summand of the loss over all ranks
    zero.reduce()
    zero.clip_grad_norm_(1.0)
    zero.step()

    torchrun --standalone --nproc_per_node=2 zero.py --stage 3
"""
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
from harness.checkpoint import Piece, piece_of, pieces_of, run_pieces
from harness.report import human

# ---- 1. the technique (copy this; it needs only torch) -----------------------

# These two have other names since torch 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Optimizers that look at shapes, at norms of tensors or at all numbers together, in small letters.
NOT_ELEMENTWISE = {
    "adafactor", "adalomo", "adamini", "apollo", "came", "dadaptadam", "dadaptsgd", "dion",
    "distributedshampoo", "fusedlamb", "fusednovograd", "galoreadamw", "kfac", "kron", "lamb", "lars",
    "lbfgs", "lomo", "muon", "novograd", "prodigy", "scion", "shampoo", "sm3", "soap", "sparseadam",
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


@dataclass(eq=False)
class Part:
    """This rank's piece of a parameter: a run of its numbers, as 1-D tensors of one length.

    The last part of a flat also has the padding behind it: the tensors are then longer than size.
    """

    parameter: nn.Parameter  # the module's own
    first: int  # the place in parameter.flatten() where the piece begins
    size: int  # how many numbers of the parameter the piece has; 0 if there is only padding here
    shard: torch.Tensor  # what this rank keeps of the parameter
    master: nn.Parameter  # what the optimizer steps; it has a gradient during step() only
    grad: torch.Tensor  # the sum of the gradient over micro-batches and ranks


class Flat:
    """Parameters side by side in one tensor, padded to equal chunks: each rank owns one of them.

        p0 | p1 | p2 | padding    full: the parameters are views of it; buffer: their gradients are
        chunk 0 | chunk 1 | ..    own, shard, master, sum, grad: this rank's chunk

    In stage 0 there is one chunk, the whole, and every rank owns it. Tensors that are not always
    needed are without memory in between: full in stage 3, buffer in stages 2 and 3.
    """

    def __init__(self, parameters, group, stage, offload):
        ranks = dist.get_world_size(group) if stage else 1
        rank = dist.get_rank(group) if stage else 0
        self.group = group  # the ranks that share the batch; None: all
        self.stage = stage  # 0 to 3
        self.size = sum(p.numel() for p in parameters)  # numbers, without padding
        self.chunk = -(-self.size // ranks)  # numbers of a rank
        self.begin = rank * self.chunk  # the place in full where this rank's chunk begins
        self.starts = {}  # {parameter: the place in full where it begins}, in the order of full
        start = 0
        for p in parameters:
            self.starts[p] = start
            start += p.numel()

        length = ranks * self.chunk
        self.full = parameters[0].new_zeros(length)  # (ranks * chunk,) parameters, padding is 0
        self.buffer = parameters[0].new_zeros(length)  # (ranks * chunk,) gradients of this rank
        self.places = self.views(self.full)  # {parameter: view of full, of the parameter's shape}
        self.slots = self.views(self.buffer)  # {parameter: view of buffer, of the parameter's shape}
        for p, place in self.places.items():
            p.data = place.copy_(p.detach())
        self.make_chunk(offload)
        self.parts = self.cut()  # [Part]: this rank's chunk, parameter by parameter
        self.versions = {}  # {parameter: autograd's count of changes in place, when master was equal}
        self.count_changes()

        self.around = []  # flats of the units that this one's unit lies inside of (stage 3)
        self.gathering = None  # the all-gather into full that is under way, or None
        self.reducing = None  # the sum of buffer over ranks that is under way, or None
        self.missing = len(parameters)  # how many gradients of this backward have not come yet
        self.closed = False  # has a sum begun, so that no further gradient may come?
        self.used = set()  # parameters that have had a gradient on this rank since zero_grad
        if stage >= 2:
            take_back(self.buffer)
        if stage == 3:
            take_back(self.full)

    def make_chunk(self, offload):
        """This rank's chunk, (chunk,) in all of its forms."""
        mine = slice(self.begin, self.begin + self.chunk)
        self.own = self.full[mine]  # parameters, a view of full
        if self.stage < 3:
            self.shard = self.own  # parameters, in memory that is always there
        elif offload == "param":
            self.shard = self.own.to("cpu", copy=True)
        else:
            self.shard = self.own.clone()
        wide = torch.promote_types(self.shard.dtype, torch.float32)
        if offload == "optimizer":
            self.master = self.shard.to("cpu", wide, copy=True)  # what the optimizer steps
        else:
            self.master = self.shard.to(wide)  # shard itself, unless bf16 or fp16 need a wider one
        self.sum = self.buffer[mine]  # gradients summed over ranks, a view of buffer
        if self.stage < 2:
            self.grad = self.sum  # gradients summed over ranks and micro-batches
        else:
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
        *_, last = self.starts
        for p, start in self.starts.items():
            start -= self.begin  # seen from this chunk
            end = start + p.numel()
            low = max(start, 0)
            high = min(end, self.chunk)
            stop = self.chunk if p is last else high  # the padding goes with the last one
            if low >= stop:
                continue
            master = nn.Parameter(self.master[low:stop])
            size = max(high - low, 0)
            parts.append(Part(p, low - start, size, self.shard[low:stop], master, self.grad[low:stop]))
        return parts

    # parameters

    def start_gather(self):
        """All chunks begin to arrive in full."""
        lend(self.full)
        if self.stage == 3:
            self.own.copy_(self.shard)
        self.gathering = all_gather(self.full, self.own, self.group, async_op=True)  # sharded -> replicated

    def wait(self):
        """What was sent for is here. On GPUs the stream waits for it, not the host."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def free(self):
        self.wait()  # memory that a collective is still writing must not go
        take_back(self.full)

    def publish(self):
        """The parameters follow the masters; in stages 1 and 2 wait() says when those of others have."""
        if self.shard is not self.master:
            self.shard.copy_(self.master)
        if self.stage in (1, 2):
            self.start_gather()

    def open(self):
        """Parameters can be written into: they have memory, and this rank's chunk of it is right."""
        self.wait()
        if not has_memory(self.full):
            lend(self.full)
            self.own.copy_(self.shard)

    def adopt(self):
        """What was written into the parameters is theirs from now on, and the master's."""
        if self.stage == 3 and has_memory(self.full):
            self.shard.copy_(self.own)
            take_back(self.full)
        if self.master is not self.shard:
            self.master.copy_(self.shard)
        self.count_changes()

    def count_changes(self):
        self.versions = {p: p._version for p in self.starts}

    def refuse_changes(self):
        """Raises where a parameter was changed behind our back, so that the step would undo it or miss it."""
        storage = self.full.untyped_storage()._cdata
        for p in self.starts:
            if p.untyped_storage()._cdata != storage:
                raise RuntimeError("a parameter has other memory than ZeRO gave it: module.to(), .half() "
                                   "and p.data = .. must come before ZeRO(module)")
            if self.master is not self.own and p._version != self.versions[p]:
                raise RuntimeError("a parameter was changed in place, which its master copy would undo: "
                                   "change it before ZeRO(module), or by module.load_state_dict()")

    # gradients

    def take_gradient(self, p):
        """A parameter's gradient of this backward moves to its slot in buffer, if it is not there yet."""
        lend(self.buffer)
        slot = self.slots[p]
        if p.grad is not slot:
            torch.add(p.grad, 0.0, out=slot)  # a copy, but -0.0 becomes 0.0
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
        self.buffer[self.size:].fill_(-0.0)
        self.closed = True
        if self.stage:
            self.reducing = reduce_scatter(self.sum, self.buffer, group=self.group, async_op=True)  # partial -> sharded
        else:
            self.reducing = dist.all_reduce(self.buffer, group=self.group, async_op=True)  # partial -> replicated

    def finish_reduce(self):
        self.reducing.wait()
        self.reducing = None
        if self.stage >= 2:
            self.grad += self.sum
            take_back(self.buffer)

    def give_gradients(self, skipped):
        """The optimizer's parameters get their gradients, those in `skipped` none."""
        wide = self.grad.to(self.master)  # (chunk,): a copy if master is wider or on the CPU
        lengths = [len(part.master) for part in self.parts]
        for part, grad in zip(self.parts, wide.split(lengths)):
            if part not in skipped:
                part.master.grad = grad

    def drop_gradients(self):
        for part in self.parts:
            part.master.grad = None


class ZeRO:
    """ZeRO for any module over the ranks of `group`. It takes the optimizer's place in a train step:

        zero.zero_grad()
        loss.backward()              # loss: this rank's summand of the global loss
        zero.reduce()                # gradients are summed over ranks, not averaged
        norm = zero.clip_grad_norm_(1.0)
        zero.step()

    make_optimizer(groups) makes a torch optimizer, such as AdamW(groups, lr=1e-3). `groups` is torch's
    list of parameter groups, [{"params": [..], "weight_decay": 0.1}, ..], or None for one group of all
    trained parameters. zero.optimizer then has groups in the same order, for torch's LR schedulers,
    but of this rank's 1-D pieces: it must work number by number, as SGD and Adam do. Those that do
    not are refused where their names tell (NOT_ELEMENTWISE), and so are counters in param_groups.

    units: modules, or tuples of modules, whose parameters lie together; they may be inside one another.
    In stage 3 their parameters may be read in the forward of these modules alone, and all ranks must
    use the same units in the same order. What is in no unit, in several of them, or of another dtype
    than the rest of its unit is kept as in stage 2. Frozen parameters stay whole, and cost nothing.

    Micro-batches: call reduce() after every backward. While zero.sync is False stages 0 and 1 only add
    up, so set it for the last backward of a step; stages 2 and 3 sum every time, having no room to wait.

    The module's parameters stay those that they were, but they are views of larger tensors. Between
    steps they can be loaded by module.load_state_dict(), with the same values on every rank. In stage 3
    they have no memory then: full_state_dict() gathers them. Buffers are never summed over ranks.
    Raises ValueError for models and optimizers that it would train wrongly.
    """

    def __init__(self, module, make_optimizer, group=None, stage=1, units=(), offload="none", groups=None):
        refuse_model(module, stage, offload)
        self.module = module
        self.group = group  # the ranks that share the batch; None: all
        self.stage = stage  # 0 to 3
        self.sync = True  # False: stages 0 and 1 do not sum yet what backward brings
        self.frozen = [p for p in module.parameters() if not p.requires_grad]
        self.flats = []  # [Flat]: all trained parameters, those in units first
        self.pending = []  # [Flat] whose sums have not begun, in the order of their sums on all ranks
        self.reducing = None  # the Flat whose sum is under way, or None
        # Stage 3, between two calls of reset():
        self.inside = None  # the Flat that forward or backward came to last, or None
        self.gathered = []  # [Flat] that have memory, or are on their way
        self.entered = []  # [Flat]: all that forward and backward came to, in order
        self.plan = []  # [Flat]: what `entered` was up to the last reduce()
        self.begun = set()  # forwards of units whose backward has begun

        for t in [*module.parameters(), *module.buffers()]:
            broadcast(t, group)
        units = [unit if isinstance(unit, tuple) else (unit,) for unit in units]
        self.make_flats(units, offload)
        self.parts = [part for flat in self.flats for part in flat.parts]  # [Part]: all that is this rank's
        self.optimizer = self.adopt_optimizer(make_optimizer, groups)  # a torch optimizer of the parts' masters
        self.watch_loading()
        self.reset()

    def make_flats(self, units, offload):
        """A Flat for the parameters of each unit, and the hooks by which it comes and goes."""
        made = {}  # {index of a unit: its Flat}
        for (index, _), parameters in sort_by_unit(self.module, units).items():
            stage = min(self.stage, 2) if index is None else self.stage
            flat = Flat(parameters, self.group, stage, offload)
            self.flats.append(flat)
            made[index] = flat
            for p in parameters:
                p.register_post_accumulate_grad_hook(partial(self.ready, flat))
        for index, unit in enumerate(units):
            if self.stage == 3 and index in made:
                self.hook(made[index], unit)
                made[index].around = [made[outer] for outer in surroundings(units, index) if outer in made]
        # In no unit: summed last, when stage 3 gathers no more, since ranks may use different ones of these.
        self.flats.sort(key=lambda flat: flat.stage)

    def hook(self, flat, unit):
        for site in unit:
            if any(p in flat.starts for p in site.parameters()):
                site.register_forward_pre_hook(partial(self.enter, flat))
                if type(site) is not nn.Embedding:  # its backward needs no parameter
                    site.register_forward_hook(partial(self.watch, flat))

    def adopt_optimizer(self, make_optimizer, groups):
        """-> make_optimizer's optimizer of the parts' masters, in the user's groups."""
        trained = [p for flat in self.flats for p in flat.starts]
        if groups is None:
            groups = [{"params": trained}]
        homes = {}  # {parameter: index of its group}
        ours = []  # the groups, with masters in the place of parameters
        for index, options in enumerate(groups):
            for p in options["params"]:
                if p in homes:
                    raise ValueError("a parameter is in two of the groups")
                homes[p] = index
            ours.append({**options, "params": []})
        lost = sum(p not in homes for p in trained)
        if lost:
            raise ValueError(f"{lost} trained parameters are in none of the groups: add or freeze them")
        for part in self.parts:
            ours[homes[part.parameter]]["params"].append(part.master)
        asked = [list(map(id, options["params"])) for options in ours]
        optimizer = make_optimizer(ours)
        got = [list(map(id, options["params"])) for options in optimizer.param_groups]
        if got != asked:
            raise ValueError("make_optimizer must keep the groups that it is given, whose parameters are "
                             "1-D pieces: make groups of the module's parameters, ZeRO(.., groups=[..])")
        for kind in type(optimizer).__mro__:
            if kind.__name__.lower() in NOT_ELEMENTWISE:
                raise ValueError(f"{kind.__name__} does not work number by number, as ZeRO needs: its "
                                 "optimizer sees 1-D pieces of the parameters of one rank")
        return optimizer

    # parameters, stage 3

    def enter(self, flat, *_):
        """Forward or backward comes to a unit. One rule for both, in four steps."""
        if self.inside is not None and (flat is self.inside or flat in self.inside.around):
            return  # it is here already
        needed = [*flat.around, flat]
        # 1. What lies behind is freed.
        for other in self.gathered:
            if other not in needed:
                other.free()
        self.gathered = [other for other in self.gathered if other in needed]
        # 2. What is needed is sent for, unless step 4 of the unit before has done so,
        for wanted in needed:
            self.send_for(wanted)
        # 3. and waited for.
        for wanted in needed:
            wanted.wait()
        self.inside = flat
        # 4. If the last step came by here as well, the next unit can travel while this one computes.
        place = len(self.entered)
        self.entered.append(flat)
        if place + 1 < len(self.plan) and self.plan[place] is flat:
            self.send_for(self.plan[place + 1])

    def send_for(self, flat):
        if flat not in self.gathered:
            self.gathered.append(flat)
            flat.start_gather()

    def watch(self, flat, site, inputs, output):
        """After a unit's forward: its backward begins where a gradient first comes to one of its outputs.

        Later ones must not count: a tensor that passes through many units (T5's position bias) gets its
        gradient when the backward of all of them is over.
        """
        forward = object()  # this one, of however many
        for t in tensors_in(output):
            if t.requires_grad:
                t.register_hook(partial(self.come_back, flat, forward))

    def come_back(self, flat, forward, gradient):
        if forward not in self.begun:
            self.begun.add(forward)
            self.enter(flat)

    def free_units(self):
        """No unit has memory in stage 3. To be called after a forward without backward, such as an evaluation."""
        for flat in self.gathered:
            flat.free()
        self.gathered = []
        self.entered = []
        self.inside = None

    # gradients

    def ready(self, flat, p):
        """Autograd's call when a parameter's gradient is complete; of a tied one it is the sum over its uses."""
        if p.grad.layout != torch.strided:
            raise RuntimeError("a sparse gradient: make the layer with sparse=False")
        if p.grad.requires_grad:
            raise RuntimeError("backward(create_graph=True): ZeRO has no gradients of gradients")
        if flat.closed:
            raise RuntimeError("a gradient for a sum over ranks that has begun already: call zero.zero_grad() before "
                               "each step and zero.reduce() after each backward; in stages 0 and 1 set "
                               "zero.sync = False for all backwards of a step but the last")
        flat.take_gradient(p)
        if self.sync or self.stage >= 2:
            flat.missing -= 1
            while self.pending and not self.pending[0].missing:
                self.reduce_next()

    def reduce_next(self):
        """The next sum begins. The one before ends first: there are never more than two buffers."""
        if self.reducing is not None:
            self.reducing.finish_reduce()
        self.reducing = self.pending.pop(0)
        self.reducing.start_reduce()

    def reduce(self):
        """To be called after each backward, on all ranks: what is not summed yet is, in one order on all."""
        if not self.sync and self.stage < 2:
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
        if self.stage:
            dist.all_reduce(square, group=self.group)  # partial -> replicated
        return square.sqrt()

    def scale_to_norm(self, max_norm, norm):
        """Scales a gradient of this norm down to max_norm. 0 as max_norm is no limit; inf and nan are let through."""
        if max_norm and self.flats:
            scale = max_norm / (norm.nan_to_num(0, posinf=0) + 1e-6)
            torch._foreach_mul_([flat.grad for flat in self.flats], scale.clamp(max=1))

    def clip_grad_norm_(self, max_norm):
        """-> the norm of the whole gradient, before it is scaled down to max_norm (0: no limit)."""
        norm = self.norm()
        self.scale_to_norm(max_norm, norm)
        return norm

    # a step

    def zero_grad(self):
        self.reset()
        for flat in self.flats:
            flat.closed = False
            flat.used.clear()
            flat.grad.fill_(-0.0)  # no gradient: see start_reduce

    def step(self):
        """Steps this rank's parts, and the parameters follow. What no rank has used is skipped, as in one process."""
        if any(p.requires_grad for p in self.frozen):
            raise RuntimeError("a parameter was frozen when ZeRO(module) was made: ZeRO does not train it")
        for flat in self.flats:
            flat.refuse_changes()
        skipped = self.unused()
        for flat in self.flats:
            before = self.options()
            flat.give_gradients(skipped)
            self.optimizer.step()  # only this flat's parts have gradients, and are stepped
            flat.drop_gradients()
            if self.options() != before:
                raise RuntimeError("this optimizer counts its steps in param_groups, but ZeRO calls it once a unit")
            flat.publish()  # stages 1 and 2: travels while the next ones are stepped
        self.reset()

    def unused(self):
        """-> [Part] of parameters that no rank has used, whose sums are -0.0 throughout."""
        doubtful = []  # a rank that has used all of its parameters need not look at values
        for flat in self.flats:
            doubtful += [part for part in flat.parts if part.parameter not in flat.used]
        if not doubtful:
            return []
        absent = [(part.grad.eq(0) & part.grad.signbit()).all() for part in doubtful]
        absent = torch.stack(absent).tolist()
        return [part for part, is_absent in zip(doubtful, absent) if is_absent]

    def options(self):
        """-> the optimizer's options, a dict per group; those that are tensors are left out."""
        found = []
        for group in self.optimizer.param_groups:
            plain = {k: v for k, v in group.items() if k != "params" and not isinstance(v, torch.Tensor)}
            found.append(plain)
        return found

    def reset(self):
        """Nothing is gathered, nothing is being summed, and no parameter has a gradient of this rank's own."""
        if self.reducing is not None:
            self.reducing.finish_reduce()
            self.reducing = None
        self.pending = self.flats[::-1]  # as backward goes
        self.free_units()
        self.begun.clear()
        self.module.zero_grad()
        for flat in self.flats:
            flat.wait()
            flat.missing = len(flat.starts)
            if flat.stage >= 2:
                flat.closed = False
                take_back(flat.buffer)  # an exception may have left it

    # the whole

    def refresh(self):
        """The parameters follow their masters, on all ranks: to be called when these were written into."""
        for flat in self.flats:
            flat.publish()
        self.reset()

    def full_state_dict(self):
        """-> the module's state_dict with whole tensors, copies, on every rank. All ranks must call it."""
        self.free_units()
        whole = {}  # {parameter: copy}
        for flat in self.flats:
            flat.publish()
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
        """-> {name: the whole gradient} of trained parameters, on every rank. All ranks must call it."""
        found = {}  # {parameter: its gradient}
        for flat in self.flats:
            full = torch.empty_like(flat.full)
            if flat.stage:
                all_gather(full, flat.grad, group=self.group)  # sharded -> replicated
            else:
                full.copy_(flat.grad)
            found.update(flat.views(full))
        named = self.module.named_parameters()
        return {name: found[p] for name, p in named if p in found}

    def held(self):
        """-> {kind: [tensors]}: what this rank keeps between steps, as harness/ledger.py wants it."""
        states = []
        for state in self.optimizer.state.values():
            states += [t for t in state.values() if isinstance(t, torch.Tensor)]
        masters = [flat.master for flat in self.flats if flat.master is not flat.shard]
        shards = [flat.shard for flat in self.flats]
        return {"parameters": [*self.module.parameters(), *self.module.buffers(), *shards],
                "gradients": [flat.grad for flat in self.flats],
                "optimizer": states + masters}

    # loading

    def watch_loading(self):
        """module.load_state_dict() is to reach what is kept of the parameters, in every stage."""
        homes = {p: flat for flat in self.flats for p in flat.starts}
        for m in self.module.modules():
            flats = {homes[p] for p in m.parameters(recurse=False) if p in homes}
            if flats:
                m.register_load_state_dict_pre_hook(partial(self.before_load, flats))
                m.register_load_state_dict_post_hook(partial(self.after_load, flats))
                m.register_state_dict_pre_hook(partial(self.before_state_dict, flats))

    def before_load(self, flats, module, state_dict, prefix, metadata, *_):
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError("load_state_dict(assign=True) would take ZeRO's parameters out of the module")
        self.free_units()
        for flat in flats:
            flat.open()

    def after_load(self, flats, module, incompatible_keys):
        for flat in flats:
            flat.adopt()

    def before_state_dict(self, flats, module, prefix, keep_vars):
        if not keep_vars and any(not has_memory(flat.full) for flat in flats):
            raise RuntimeError("the parameters have no memory between steps of stage 3: use zero.full_state_dict()")


def refuse_model(module, stage, offload):
    """Raises ValueError for what would be trained wrongly, and says what to do."""
    least = {"none": 0, "optimizer": 0, "param": 3}
    if stage not in (0, 1, 2, 3) or offload not in least or stage < least[offload]:
        raise ValueError(f"stage {stage}, offload {offload}: stages are 0 to 3, offload is none, optimizer "
                         "or, in stage 3, param")
    for name, m in module.named_modules():
        if getattr(m, "sparse", False) is True:
            raise ValueError(f"{name}: sparse=True makes sparse gradients; make it with sparse=False")
        if getattr(m, "max_norm", None) is not None and isinstance(m, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(f"{name}: max_norm changes the weight in forward; clamp it in the optimizer's place")
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for name, p in trained.items():
        if p.is_complex():
            raise ValueError(f"{name} is complex: keep it as real numbers, torch.view_as_real")
        if p.is_meta or p.layout != torch.strided:
            raise ValueError(f"{name} is on the meta device or sparse: ZeRO wants dense values")
    devices = {str(p.device) for p in trained.values()}
    if len(devices) > 1:
        raise ValueError(f"the parameters are on {sorted(devices)}: a rank has one device")


def broadcast(tensor, group):
    """Gives all ranks the first rank's values. Bytes, because backends do not know every dtype."""
    dense = tensor.detach().contiguous()
    if dense.numel():
        dist.broadcast(dense.view(-1).view(torch.uint8), group=group, group_src=0)  # the first's -> replicated
    if not tensor.is_contiguous():
        tensor.detach().copy_(dense)  # dense was a copy


def tensors_in(output, seen=None):
    """-> the tensors in a module's output: in tuples, lists, dicts, dataclasses and objects of other classes."""
    seen = set() if seen is None else seen  # ids of objects on the way, which may be in a circle
    if isinstance(output, torch.Tensor):
        return [output]
    if id(output) in seen or isinstance(output, (str, bytes, type, nn.Module)):
        return []
    seen.add(id(output))
    if isinstance(output, dict):
        inner = list(output.values())
    elif isinstance(output, (tuple, list, set)):
        inner = list(output)
    elif is_dataclass(output):
        inner = [getattr(output, field.name) for field in fields(output)]
    else:
        inner = list(getattr(output, "__dict__", {}).values())
    found = []
    for thing in inner:
        found += tensors_in(thing, seen)
    return found


def sort_by_unit(module, units):
    """-> {(index of a unit, or None for none or several; dtype): [trained parameters that lie together]}."""
    owner = {}  # {module: index of the innermost unit that it lies in}
    sites = [(site, index) for index, unit in enumerate(units) for site in unit]
    if len({site for site, _ in sites}) < len(sites):
        raise ValueError("a module is in two of the units")
    sites.sort(key=lambda place: len(list(place[0].modules())), reverse=True)
    for site, index in sites:  # the largest come first, so that the innermost has the last word
        for m in site.modules():
            owner[m] = index
    homes = {}  # {parameter: the units of the modules that have it}
    for m in module.modules():
        for p in m.parameters(recurse=False):
            if p.requires_grad and p.numel():
                homes.setdefault(p, set()).add(owner.get(m))
    dtypes = {}  # {index of a unit: dtype of its first parameter}
    sorted_ = {}
    for p, indices in homes.items():
        index = None
        if len(indices) == 1:
            *_, index = indices
        if dtypes.setdefault(index, p.dtype) != p.dtype:
            index = None
        sorted_.setdefault((index, p.dtype), []).append(p)
    return sorted_


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
    """-> ZeRO. The tied embedding is in the first unit of forward, which is its last one as well."""
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
    losses = []
    for xs, ys in zip(x.tensor_split(accum), y.tensor_split(accum)):
        loss = loss_sum(zero.module(xs), ys) / valid
        losses.append(loss.detach())
        zero.sync = len(losses) == accum
        loss.backward()
        zero.reduce()  # partial -> sharded
    norm = zero.clip_grad_norm_(clip)
    zero.step()
    return sum(losses), norm


def evaluate(zero, x, y):
    """x, y: this rank's rows of held-out text -> its part of the sum of token losses."""
    loss = loss_sum(zero.module(x), y)
    zero.free_units()
    return loss


def pieces(zero):
    """-> [checkpoint.Piece] by the plain GPT's names: masters as the parameters, and AdamW's states."""
    names = {p: name for name, p in zero.module.named_parameters()}
    is_first = dist.get_rank(zero.group) == 0
    writes = zero.stage > 0 or is_first  # in stage 0 all ranks hold the same
    found = []
    for part in zero.parts:
        held = {"": part.master.detach()}  # {what a piece's name ends in: 1-D tensor}
        for kind, state in zero.optimizer.state.get(part.master, {}).items():
            if kind != "step":
                held["." + kind] = state
        for kind, tensor in held.items():
            numbers = tensor[:part.size]  # without padding
            name = names[part.parameter] + kind
            found += run_pieces(name, part.parameter.shape, part.first, numbers, writes)
    frozen = [(names[p], p) for p in zero.frozen]
    return found + pieces_that_follow(zero, names) + pieces_of(frozen, None, is_first)


def pieces_that_follow(zero, names):
    """What computes, where it is not the master itself: it is loaded like the master, but never saved."""
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
    trained = [p for p in model.parameters() if p.requires_grad]
    if stage == 1:
        module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return module, ZeroRedundancyOptimizer(trained, adamw, lr=lr)
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=stage == 3)
    return model, adamw([p for p in model.parameters() if p.requires_grad], lr)


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
    """-> [Flat]: the all-gathers of a micro-batch in stage 3. A unit in which forward turns around stays."""
    model = zero.module
    embeddings = [model.tok, model.pos]  # their backward needs no parameter
    rest = [*model.blocks, model.norm, model.head]
    sites = embeddings + rest + rest[::-1]
    visited = []
    for site in sites:
        for flat in zero.flats:
            is_here = any(p in flat.starts for p in site.parameters())
            if is_here and visited[-1:] != [flat]:
                visited.append(flat)
    return visited


def held_in_stage(run, zero, stage):
    """-> {kind: (bytes of all P numbers, over how many ranks they are cut)}, without frozen ones."""
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
    """-> bytes that a rank sends in a step of this stage, a formula for them; without the norm's."""
    dp = run.world_size
    M = run.args.accum
    P = sum(flat.full.numel() for flat in zero.flats)
    G = sum(flat.full.numel() for flat in units_gathered(zero))
    b = run.dtype.itemsize
    if stage < 2:
        numbers, formula = 2 * P, "2 P"
    elif stage == 2:
        numbers, formula = (M + 1) * P, "(M + 1) P"
    else:
        numbers, formula = M * (P + G), f"M (P + {G})"
    return b * numbers * (dp - 1) / dp, f"b (dp-1)/dp {formula}"


def account(run, zero):
    """The paper's figures for every stage, and what the ledger has measured for this one."""
    run.say(f"\n{'stage':>8}{'parameters':>13}{'gradients':>13}{'optimizer':>13}{'sent':>13}   of the paper")
    for stage in range(4):
        sizes = [size / ranks for size, ranks in held_in_stage(run, zero, stage).values()]
        sent, _ = sent_in_stage(run, zero, stage)
        columns = [f"{human(size):>13}" for size in (*sizes, sent)]
        run.say(f"{stage:8}" + "".join(columns))
    account_held(run, zero)
    account_sent(run, zero)


def account_held(run, zero):
    apart = {
        "parameters": sum(p.nbytes for p in zero.frozen),  # frozen ones are whole on every rank
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
    require(scratch or args.offload == "none", f"--impl {args.impl}: --offload is for --impl scratch")
    saved = args.save or args.resume or args.init_from
    require(scratch or stage >= 2 or not (args.dry_run or saved),
            f"--impl {args.impl} --stage 1: torch's optimizer there makes no dry run and is not saved")
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
    args = run.args
    module, optimizer = parallelize_at_work(model, args.lr, args.stage, mesh)
    return Side(
        model=module,
        optimizer=optimizer,
        train_step=lambda x, y, valid: train_step_at_work(module, optimizer, x, y, valid, args.clip),
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
        total = sum(p.numel() for p in getattr(model, "module", model).parameters())
        run.say(f"zero: stage {args.stage}, {run.world_size} ranks on {run.device.type}, {args.dtype}, "
                f"{total:,} parameters")
        for impl, step in run.steps():
            side = sides[impl]
            run.set_rate(side.optimizer, step)
            x, y, valid = run.batch(step, rows)
            with run.measure(impl, step):
                loss, norm = side.train_step(x, y, valid)
            run.log(impl, step, loss, norm)
        if "scratch" in run.impls:
            account(run, model)
        own = run.ledger[run.impls[0]].memory["parameters"] // run.dtype.itemsize
        return run.finish(total, own)


if __name__ == "__main__":
    sys.exit(main())
