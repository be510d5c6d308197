"""ZeRO: data parallelism in which a rank keeps only its part of the optimizer states, the gradients, the parameters.

    a block's parameters, flat      rank 0 | rank 1 | rank 2 | rank 3    cut into N equal chunks, the last one padded
    stages 1, 2, 3                  optimizer states: own chunk only
    stages 2, 3                     gradients: own chunk only, reduce-scattered block by block while backward runs
    stage 3                         parameters: own chunk only, gathered before a block computes and freed after it

    stage 3      compute    fwd 0 | fwd 1 | fwd 2 | bwd 2     | bwd 1             | bwd 0     |          | step
                 gather     1     | 2     |       | 1         | 0                 |           |          |
                 reduce           |       |       |           | 2                 | 1         | 0        |

    per rank, of P parameters (with padding); bf16: 2 bytes, gradient 2, fp32 master and Adam states 12; M micro-batches
               held between steps    sent per step, times 2 P (N-1)/N
    plain      16 P                  0
    stage 0    16 P                  2        an all-reduce of the gradients
    stage 1    (4 + 12/N) P          2        reduce-scatter after the last micro-batch, all-gather of parameters
    stage 2    (2 + 14/N) P          M + 1    reduce-scatter in every micro-batch, for there is no room to sum first
    stage 3    16 P / N              3 M      gather in forward, gather in backward and reduce-scatter, every time

In fp32 and fp64, b bytes each, there is no master: b P, b P and 2 b P. --offload optimizer keeps master and states, and
steps, on the CPU; --offload param (stage 3) the parameter chunks too.

Rajbhandari et al. 2019, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054,
sections 5 and 7; offload: Ren et al. 2021, "ZeRO-Offload", arXiv:2101.06840. At work: ZeroRedundancyOptimizer (1),
fully_shard with reshard_after_forward False (2) and True (3), section 3 below.

    torchrun --standalone --nproc_per_node=2 zero.py --stage 3
"""
import math
import sys
from collections import Counter, defaultdict
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from common import POSITIVE, Run, adamw, arguments, build, loss_sum, require, share

# ---- 1. the technique (copy this; it needs only torch) -----------------------

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def hold(tensor, yes):
    """Give a flat tensor its memory or take it away; all views of it keep their place."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize if yes else 0)


class Flat:
    """Parameters of one dtype and device, side by side in one tensor padded to N equal chunks, one of them ours.

    full    (N chunk,)  the parameters are views of it. Stage 3 takes its memory away while nobody computes with it
    shard   (chunk,)    our chunk, where it lasts: a view of full, in stage 3 a tensor of its own
    master  (chunk,)    what the optimizer steps: the shard itself, or a copy in fp32 or on the CPU
    buffer  (N chunk,)  p.grad are views of it. Stages 2 and 3 lend it memory for the unit's backward only
    grad    (chunk,)    our chunk of the gradients' sum over ranks
    """

    def __init__(self, parameters, make_optimizer, group, stage, offload):
        n, rank = (dist.get_world_size(group), dist.get_rank(group)) if stage else (1, 0)
        self.parameters, self.group, self.stage, self.optimizer = parameters, group, stage, None
        self.arrival, self.open, self.used = None, False, set()
        self.ends = [0, *accumulate(p.numel() for p in parameters)]
        chunk = -(-self.ends[-1] // n)
        self.full, self.mine = parameters[0].new_zeros(n * chunk), slice(rank * chunk, (rank + 1) * chunk)
        for p, view in zip(parameters, self.views(self.full)):
            p.data = view.copy_(p)
        own, home = self.full[self.mine], self.full.device
        self.shard = own.to("cpu" if offload == "param" else home, copy=stage == 3)
        if stage == 3:
            hold(self.full, False)
        if not parameters[0].requires_grad:
            return
        wide = torch.promote_types(own.dtype, torch.float32)
        self.master = self.shard.to("cpu" if offload != "none" else home, wide, copy=offload == "optimizer")
        self.buffer = torch.zeros_like(self.full)
        self.grad = self.buffer[self.mine] if stage < 2 else torch.zeros_like(own)
        if stage >= 2:
            hold(self.buffer, False)
        ends = [*self.ends[:-1], n * chunk]  # the padding goes with the last parameter
        cuts = [min(max(end - self.mine.start, 0), chunk) for end in ends]  # where they lie in our chunk
        self.pieces = [(i, slice(a, b)) for i, (a, b) in enumerate(pairwise(cuts)) if a < b]
        self.optimizer = make_optimizer([nn.Parameter(self.master[part]) for _, part in self.pieces])
        for i, p in enumerate(parameters):
            p.register_hook(partial(self.arrive, i))

    def views(self, flat):
        return [flat[a:b].view_as(p) for p, (a, b) in zip(self.parameters, pairwise(self.ends))]

    def gather(self):
        """Everybody's shards -> full, in the background until `wait`."""
        if self.stage == 3:
            if self.full.untyped_storage().size():
                return  # it is here, or on its way
            hold(self.full, True)
        same = self.shard.device == self.full.device
        own = self.shard if same else self.full[self.mine].copy_(self.shard)
        self.arrival = all_gather(self.full, own, group=self.group, async_op=True)  # sharded -> replicated

    def wait(self):
        if self.arrival:
            self.arrival.wait()
            self.arrival = None

    def free(self):
        self.wait()
        hold(self.full, False)

    def arrive(self, i=None, _=None):
        """Autograd is about to add a gradient (of a tied parameter, the sum over its uses) to that of parameter i.

        -0.0 adds nothing, and a sum is -0.0 only if all summands are: so a parameter that no rank used can be told.
        """
        if not self.open:
            if self.stage >= 2:
                hold(self.buffer, True)
            self.buffer.fill_(-0.0)
            for p, view in zip(self.parameters, self.views(self.buffer)):
                p.grad = view
        self.open = True
        self.used |= {i}

    def start(self):
        """Sum gradients over ranks, in the background until `finish`."""
        self.arrive()  # makes room if this rank used no parameter
        if self.stage:
            own = self.buffer[self.mine]
            self.work = reduce_scatter(own, self.buffer, group=self.group, async_op=True)  # partial -> sharded
        else:
            self.work = dist.all_reduce(self.buffer, group=self.group, async_op=True)  # partial -> replicated

    def finish(self):
        self.work.wait()
        self.work, self.open = None, False
        for p in self.parameters:  # outside our chunk the buffer still holds partial sums: not to be read
            p.grad = None
        if self.stage >= 2:
            self.grad += self.buffer[self.mine]
            hold(self.buffer, False)

    def step(self):
        """Step our pieces. As in one process, parameters without a gradient are skipped."""
        pieces = self.optimizer.param_groups[0]["params"]
        for (i, part), piece in zip(self.pieces, pieces):
            grad = self.grad[part]
            if i in self.used or not (grad.eq(0) & grad.signbit()).all():
                piece.grad = grad.to(piece)  # to fp32, to the CPU: of one flat tensor at a time
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.master is not self.shard:
            self.shard.copy_(self.master)
        if self.stage == 3:
            self.free()  # what an evaluation has gathered is stale now
        elif self.stage:
            self.gather()


class ZeRO:
    """ZeRO for any module over the ranks of `group`. It takes the place of the optimizer:

        zero.zero_grad(); loss = module(x); loss.backward(); zero.reduce(); zero.clip(zero.norm(), 1.0); zero.step()

    Gradients are summed, not averaged. Stages 0 and 1 only accumulate while zero.sync is False; stages 2 and 3 want
    reduce() after every backward. make_optimizer(parameters): any that works element by element; one per flat tensor.
    units: modules, or tuples of modules whose parameters lie together. Backward reduces a unit on leaving it. Stage 3
    gathers it on entering it and prefetches the next; what is in no unit, or in several, stays until reduce().
    """

    def __init__(self, module, make_optimizer, group=None, stage=1, units=(), offload="none"):
        self.module, self.group, self.stage, self.sync = module, group, stage, True
        sites = [unit if isinstance(unit, tuple) else (unit,) for unit in units]
        with torch.no_grad():
            for t in [*module.parameters(), *module.buffers()]:
                dist.broadcast(t, group=group, group_src=0)  # rank 0's -> replicated
            self.units = [[Flat(ps, make_optimizer, group, stage, offload) for ps in unit] for unit in self.layout(sites)]
        self.flats = [flat for unit in self.units for flat in unit]
        self.trained = [flat for flat in self.flats if flat.optimizer]
        self.entered, self.current, self.flying = [], None, []
        self.reset()
        for unit, modules in zip(self.units[1:], sites):
            for site in modules:
                site.register_forward_pre_hook(lambda *_, unit=unit: self.enter(unit))
                site.register_forward_hook(partial(self.on_forward, unit))
        module.register_forward_pre_hook(lambda *_: self.fetch(self.units[0]))

    def layout(self, sites):
        """-> for the rest and for each unit, the lists of parameters that can share a flat tensor."""
        where, homes = {m: i for i, unit in enumerate(sites) for site in unit for m in site.modules()}, defaultdict(set)
        for m in self.module.modules():
            for p in m.parameters(recurse=False):
                homes[p].add(where.get(m, -1) + 1)
        lists = [defaultdict(list) for _ in range(len(sites) + 1)]
        for p, home in homes.items():
            if p.requires_grad or self.stage == 3:
                lists[home.pop() if len(home) == 1 else 0][p.dtype, p.device, p.requires_grad].append(p)
        return [kinds.values() for kinds in lists]

    def reset(self):
        self.plan, self.entered, self.current = self.entered, [], None  # the units of the last forward and backward
        self.pending, self.behind, self.uses = self.units[::-1], None, Counter()

    def fetch(self, unit):
        for flat in unit if self.stage == 3 else ():
            flat.gather()
            flat.wait()

    def enter(self, unit):
        """One rule for forward and backward: free the unit behind, wait for this one, send for the one ahead."""
        if self.stage < 3 or unit is self.current:
            return self.fetch(unit)
        for flat in self.current or ():
            flat.free()
        self.fetch(unit)
        self.current = unit
        self.entered.append(unit)
        now = len(self.entered)
        for flat in self.plan[now] if self.plan[now - 1:now] == [unit] and now < len(self.plan) else ():
            flat.gather()

    def on_forward(self, unit, site, inputs, output):
        """When backward reaches this output it enters the unit; not so an embedding's, which needs no parameter."""
        outputs = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        self.uses[id(unit)] += bool(outputs)
        if outputs and not isinstance(site, nn.Embedding):
            register_multi_grad_hook(outputs, lambda _: self.on_backward(unit), mode="any")

    def on_backward(self, unit):
        behind, self.behind = self.behind, unit
        self.uses[id(unit)] -= 1
        if behind not in (None, unit) and self.sync and not self.uses[id(behind)]:
            self.start(behind)  # on all ranks at the same point, whatever parameters each of them used
        self.enter(unit)

    def start(self, unit):
        for flat in self.flying:
            flat.finish()  # one unit in flight, one being filled: never more than two of gradients
        self.flying = [flat for flat in unit if flat.optimizer]
        for flat in self.flying:
            flat.start()
        self.pending = [other for other in self.pending if other is not unit]

    def reduce(self):
        """To be called after backward: sums over ranks what is not summed yet."""
        if self.sync:
            for unit in [*self.pending, []]:
                self.start(unit)
            for flat in self.flats if self.stage == 3 else ():
                flat.free()
            self.reset()

    def gradients(self):
        """-> [(parameter, our piece of its gradient, flat)], after reduce()."""
        return [(flat.parameters[i], flat.grad[part]) for flat in self.trained for i, part in flat.pieces]

    def norm(self):
        """The norm of the whole gradient, on all ranks."""
        square = sum(torch.linalg.vector_norm(f.grad, dtype=f.master.dtype) ** 2 for f in self.trained)
        if self.stage:
            dist.all_reduce(square, group=self.group)  # partial -> replicated
        return square.sqrt()

    def clip(self, norm, limit):
        for flat in self.trained:
            flat.grad *= (limit / (norm + 1e-6)).clamp(max=1)

    @torch.no_grad()
    def step(self):
        for flat in self.trained:
            flat.step()  # the next one steps while the parameters of this one are gathered
        for flat in self.trained:
            flat.wait()

    def zero_grad(self):
        for flat in self.trained:
            flat.used.clear()
            if self.stage >= 2:
                flat.grad.fill_(-0.0)

    def held(self):
        """What this rank keeps between steps, for a ledger."""
        states = [t for f in self.trained for state in f.optimizer.state.values() for t in state.values()]
        return {"parameters": [*self.module.parameters(), *self.module.buffers(), *(f.shard for f in self.flats)],
                "gradients": [f.grad for f in self.trained],
                "optimizer": [*states, *(f.master for f in self.trained if f.master is not f.shard)]}


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, lr, group=None, stage=1, offload="none"):
    edges = model.tok, model.pos, model.norm, model.head  # together: the tied embedding is the first and the last
    return ZeRO(model, partial(adamw, lr=lr), group, stage, [edges, *model.blocks], offload)


def full_state_dict(zero):
    for unit in zero.units:
        zero.fetch(unit)
    return {name: t.clone() for name, t in zero.module.state_dict().items()}


def full_gradients(zero):
    found = {}
    for flat in zero.trained:
        full = torch.empty_like(flat.full) if zero.stage else flat.grad
        if zero.stage:
            all_gather(full, flat.grad, group=zero.group)  # sharded -> replicated
        found.update(zip(flat.parameters, flat.views(full)))
    return {name: found[p] for name, p in zero.module.named_parameters()}


def train_step(zero, x, y, valid, clip, accum):
    """x, y: this rank's rows (B/N, T); valid: of the whole batch -> this rank's part of the loss, gradient norm."""
    zero.zero_grad()
    total = 0
    for i, rows in enumerate(torch.arange(len(x)).tensor_split(accum)):
        zero.sync = zero.stage >= 2 or i == accum - 1
        loss = loss_sum(zero.module(x[rows]), y[rows]) / valid
        loss.backward()
        zero.reduce()  # partial -> sharded
        total += loss.detach()
    norm = zero.norm()
    if clip:
        zero.clip(norm, clip)
    zero.step()
    return total, norm


# ---- 3. at work: the same with torch's own API -------------------------------


def parallelize_at_work(model, lr, stage, mesh):
    if stage < 2:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return model, ZeroRedundancyOptimizer(model.parameters(), adamw, lr=lr) if stage else adamw(model.parameters(), lr)
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=stage == 3)
    return model, adamw(model.parameters(), lr)


def full_at_work(tensors):
    return {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in tensors}  # sharded -> replicated


def train_step_at_work(model, optimizer, x, y, valid, clip, accum):
    optimizer.zero_grad()
    total = 0
    for i, (xs, ys) in enumerate(zip(x.tensor_split(accum), y.tensor_split(accum))):
        model.require_backward_grad_sync = i == accum - 1  # DistributedDataParallel's no_sync()
        loss = loss_sum(model(xs), ys) / valid
        (loss * dist.get_world_size()).backward()  # both average; the sum is wanted here
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    optimizer.step()
    return total, getattr(norm, "full_tensor", lambda: norm)()


# ---- 4. run ------------------------------------------------------------------


def book(stage, n, size, states, accum):
    """The paper's bytes. size: of all parameters; states: of all that the optimizer keeps."""
    return {"parameters": size // (n if stage == 3 else 1), "gradients": size // (n if stage >= 2 else 1),
            "optimizer": states // (n if stage else 1), "wire": (2, 2, accum + 1, 3 * accum)[stage] * size * (n - 1) / n}


def main():
    args = arguments(__doc__, stage=(1, "shard 1: optimizer states, 2: and gradients, 3: and parameters", (0, 3)),
                     offload=("none", "what lives on the CPU", ("none", "optimizer", "param")),
                     accum=(1, "micro-batches per step", POSITIVE))
    n, stage = args.world_size, args.stage
    run = Run(args)
    mesh, sides = init_device_mesh(run.device.type, (n,)), {}
    with run:
        for impl in run.impls:
            model = build(run.cfg, args.seed, run.device, run.dtype)
            total = sum(p.numel() for p in model.parameters())
            if impl == "scratch":
                zero = parallelize(model, args.lr, None, stage, args.offload)
                sides[impl] = zero, None, partial(train_step, zero)
            else:
                model, optimizer = parallelize_at_work(model, args.lr, stage, mesh)
                sides[impl] = model, optimizer, partial(train_step_at_work, model, optimizer)
        for impl, step in run.steps():
            x, y, valid = run.batch(step, share(args.batch, n, run.rank))
            model, optimizer, step_fn = sides[impl]
            with run.measure(impl, step, model, optimizer):
                loss, norm = step_fn(x, y, valid, args.clip, args.accum)
            run.log(impl, step, loss, norm)
            if run.keeps(step) and impl == "scratch":
                run.trace[impl].keep(step, full_gradients(zero), full_state_dict(zero))
            elif run.keeps(step):
                plain = getattr(model, "module", model)
                grads = full_at_work((name, p.grad) for name, p in plain.named_parameters())
                run.trace[impl].keep(step, grads, full_at_work(plain.state_dict().items()))
        return run.finish(total, total)


if __name__ == "__main__":
    sys.exit(main())
