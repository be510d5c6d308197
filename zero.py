"""ZeRO: data parallelism in which every rank keeps a part of the optimizer states, gradients and parameters only.

    one unit (a block), flat, cut for N = 4 ranks     |<-- rank 0 -->|<-- rank 1 -->|<-- rank 2 -->|<-- rank 3 -->|
    optimizer states    stages 1, 2, 3: own part             #
    gradients           stages 2, 3: own part, reduce-scattered unit by unit while backward runs
    parameters          stage 3: own part, gathered before a unit computes and freed as the next one begins:

    stage 3, rank 0     compute    fwd 0 | fwd 1 | fwd 2 | loss, bwd 2 | bwd 1        | bwd 0        | step
                        in flight  get 1 | get 2 | get 1 |    get 1    | get 0, red 2 | red 1        | red 0

Each rank runs forward and backward on its rows of the batch, sums its own part of the gradients over all ranks, steps
its own part of AdamW, and the updated parameters are gathered again.

    per rank in bf16; P parameters (padded per unit to a multiple of N), each 2 bytes + 2 gradient + 12 fp32 master and
    Adam states; M micro-batches (--accum). Other types: b bytes each, and 2 b of Adam states where these are
              held between steps      sent per step, times 2 P (N-1)/N     calls
    plain     16 P                    0
    stage 0   16 P                    2         all-reduce                 once a step
    stage 1   (4 + 12/N) P            2         reduce-scatter, all-gather once a step
    stage 2   (2 + 14/N) P            M + 1     reduce-scatter, all-gather every micro-batch; once a step
    stage 3   16 P / N                3 M       reduce-scatter, 2 x gather every micro-batch

--offload optimizer keeps master and states, and steps, on the CPU; --offload param (stage 3) the parameter shards too.

Rajbhandari et al. 2019, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054,
sections 5 and 7; Ren et al. 2021, "ZeRO-Offload", arXiv:2101.06840. At work: ZeroRedundancyOptimizer (stage 1),
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

from common import POSITIVE, Run, adamw, arguments, build, human, loss_sum, require, share

# ---- 1. the technique (copy this; it needs only torch) -----------------------

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def host(tensor):
    """A copy on the CPU, in pinned memory if it comes from a GPU."""
    return tensor.cpu().pin_memory() if tensor.is_cuda else tensor.clone()


class Flat:
    """Parameters of one dtype and device, side by side in one tensor padded to N equal chunks, one of them ours.

    full    (N chunk,)  the parameters are views of it. Stage 3 takes its memory away while nobody computes with it
    shard   (chunk,)    the lasting copy of our chunk: a view of full, in stage 3 a tensor of its own
    master  (chunk,)    what the optimizer steps: the shard itself, or a copy in fp32 or on the CPU
    buffer  (N chunk,)  p.grad are views of it. Stages 2 and 3 lend it memory for the unit's backward only
    grad    (chunk,)    our chunk of the gradients' sum over ranks
    """

    def __init__(self, parameters, make_optimizer, group, stage, offload):
        self.parameters, self.stage, self.group = parameters, stage, group
        n, rank = (dist.get_world_size(group), dist.get_rank(group)) if stage else (1, 0)
        sizes = [p.numel() for p in parameters]
        chunk = -(-sum(sizes) // n)
        padding, self.mine = n * chunk - sum(sizes), slice(rank * chunk, (rank + 1) * chunk)
        self.full = parameters[0].new_zeros(n * chunk)
        for p, view in zip(parameters, self.full.split([*sizes, padding])):
            p.data = view.view_as(p).copy_(p)
        self.own, self.arrival, self.optimizer = self.full[self.mine], None, None
        self.shard = host(self.own) if offload == "param" else self.own.clone() if stage == 3 else self.own
        if stage == 3:
            self.free()
        if not parameters[0].requires_grad:
            return
        wide = self.shard.to(torch.promote_types(self.shard.dtype, torch.float32))
        self.master = host(wide) if offload == "optimizer" else wide
        self.buffer, self.open, self.used = torch.zeros_like(self.full), False, set()
        self.grad = self.buffer[self.mine] if stage < 2 else torch.zeros_like(self.own)
        self.slots = [slot.view_as(p) for p, slot in zip(parameters, self.buffer.split([*sizes, padding]))]
        if stage >= 2:
            self.buffer.untyped_storage().resize_(0)
        ends = [0, *accumulate(sizes[:-1]), n * chunk]  # the padding goes with the last parameter
        cuts = [min(max(end - self.mine.start, 0), chunk) for end in ends]  # where they lie in our chunk
        self.pieces = [(i, slice(a, b), nn.Parameter(self.master[a:b])) for i, (a, b) in enumerate(pairwise(cuts)) if a < b]
        self.optimizer = make_optimizer([piece for _, _, piece in self.pieces])
        for i, p in enumerate(parameters):
            p.register_hook(partial(self.arrive, i))

    def gather(self):
        """Everybody's shards -> full, in the background until `wait`."""
        if self.stage == 3:
            storage = self.full.untyped_storage()
            if storage.size():
                return  # it is here, or on its way
            storage.resize_(self.full.numel() * self.full.itemsize)
        here = self.shard.device == self.full.device
        own = self.shard if here else self.own.copy_(self.shard, non_blocking=True)
        self.arrival = all_gather(self.full, own, group=self.group, async_op=True)  # sharded -> replicated

    def wait(self):
        if self.arrival:
            self.arrival.wait()
        self.arrival = None

    def free(self):
        self.wait()
        self.full.untyped_storage().resize_(0)

    def begin(self):
        """Make room for gradients. -0.0 is nothing at all: a sum is -0.0 only where no rank used the parameter."""
        if self.stage >= 2:
            self.buffer.untyped_storage().resize_(self.buffer.numel() * self.buffer.itemsize)
        self.buffer.fill_(-0.0)
        for p, slot in zip(self.parameters, self.slots):
            p.grad = slot
        self.open = True

    def arrive(self, i, _):
        """Autograd is about to add a gradient (of a tied parameter the sum over all its uses) to parameter i's slot."""
        if not self.open:
            self.begin()
        self.used.add(i)

    def start(self):
        """Sum gradients over ranks, in the background until `finish`."""
        if not self.open:
            self.begin()
        if self.stage == 0:
            self.work = dist.all_reduce(self.buffer, group=self.group, async_op=True)  # partial -> replicated
        else:
            own = self.buffer[self.mine]
            self.work = reduce_scatter(own, self.buffer, group=self.group, async_op=True)  # partial -> sharded

    def finish(self):
        self.work.wait()
        self.work, self.open = None, False
        for p in self.parameters:  # outside our chunk the buffer still holds parts of sums: not to be read
            p.grad = None
        if self.stage >= 2:
            self.grad += self.buffer[self.mine]
            self.buffer.untyped_storage().resize_(0)

    def step(self):
        """Step our pieces. As in one process, parameters that nobody used are skipped: they have no gradient."""
        for i, part, piece in self.pieces:
            grad = self.grad[part]
            if i in self.used or not (grad.eq(0) & grad.signbit()).all():
                piece.grad = grad.to(piece)  # to fp32, to the CPU: of one unit at a time
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.master is not self.shard:
            self.shard.copy_(self.master, non_blocking=True)
        if self.stage in (1, 2):
            self.gather()


class ZeRO:
    """ZeRO for any module over the ranks of `group`. It takes the place of the optimizer:

        zero.zero_grad(); loss = module(x); loss.backward(); zero.reduce(); zero.clip(zero.norm(), 1.0); zero.step()

    Gradients are summed, not averaged. With sync = False stages 0 and 1 only accumulate and reduce() does nothing;
    stages 2 and 3 want reduce() after every backward. make_optimizer(parameters) is called once per flat tensor with
    pieces of its parameters: any optimizer that works element by element.
    units: modules, or tuples of modules that share a flat tensor. A unit is reduced when backward leaves it. Stage 3
    gathers it when forward or backward enters it, frees it on entering another and prefetches the one entered next
    in the last step. What is in no unit, or in several, stays gathered from forward to reduce().
    """

    def __init__(self, module, make_optimizer, group=None, stage=1, units=(), offload="none"):
        self.module, self.group, self.stage, self.sync = module, group, stage, True
        units = [unit if isinstance(unit, tuple) else (unit,) for unit in units]
        with torch.no_grad():
            for t in [*module.parameters(), *module.buffers()]:
                dist.broadcast(t, group=group, group_src=0)  # rank 0's -> replicated
            self.units = [[Flat(ps, make_optimizer, group, stage, offload) for ps in lists] for lists in self.layout(units)]
        self.flats = [flat for unit in self.units for flat in unit]
        self.trained = [flat for flat in self.flats if flat.optimizer]
        self.current = self.coming = self.flying = None  # unit computing, unit being gathered; flat being reduced
        self.entered, self.plan, self.uses = [], [], Counter()  # stage 3: this step's units so far, the last step's
        self.reset()
        for i, unit in enumerate(units):
            for site in unit:
                if stage == 3:
                    site.register_forward_pre_hook(lambda *_, i=i: self.enter(i))
                site.register_forward_hook(partial(self.on_forward, i))
        if stage == 3:
            module.register_forward_pre_hook(lambda *_: self.fetch(-1))

    def layout(self, units):
        """-> for each unit, and last for the rest, the lists of parameters that can share a flat tensor."""
        where, homes = {m: i for i, unit in enumerate(units) for site in unit for m in site.modules()}, defaultdict(set)
        for m in self.module.modules():
            for p in m.parameters(recurse=False):
                homes[p].add(where.get(m, -1))
        lists = [defaultdict(list) for _ in range(len(units) + 1)]
        for p, home in homes.items():
            if p.requires_grad or self.stage == 3:
                lists[home.pop() if len(home) == 1 else -1][p.dtype, p.device, p.requires_grad].append(p)
        return [kinds.values() for kinds in lists]

    def reset(self):
        self.pending = [*range(len(self.units))][-2::-1] + [len(self.units) - 1]  # in the order of backward
        self.active = None
        self.uses.clear()

    def fetch(self, i):
        for flat in self.units[i]:
            flat.gather()
        for flat in self.units[i]:
            flat.wait()

    def leave(self, i):
        for flat in self.units[i] if i is not None else ():
            flat.free()

    def enter(self, i):
        """One rule for forward and backward: free the unit behind, wait for this one, send for the one ahead."""
        if i == self.current:
            return
        self.leave(self.current)
        if self.coming != i:
            self.leave(self.coming)
        self.fetch(i)
        self.current, self.coming, now = i, None, len(self.entered) + 1
        self.entered.append(i)
        if self.plan[now - 1:now] == [i] and now < len(self.plan):
            self.coming = self.plan[now]
            for flat in self.units[self.coming]:
                flat.gather()

    def on_forward(self, i, site, inputs, output):
        """Watch for backward to enter unit i by this output. An embedding's backward needs no parameters."""
        outputs = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        self.uses[i] += len(outputs) > 0
        if outputs and not isinstance(site, nn.Embedding):
            register_multi_grad_hook(outputs, lambda _: self.on_backward(i), mode="any")

    def on_backward(self, i):
        left, self.active = self.active, i
        self.uses[i] -= 1
        if self.sync and left not in (None, i) and not self.uses[left]:
            self.start(left)
        if self.stage == 3:
            self.enter(i)

    def start(self, i):
        self.pending.remove(i)
        for flat in self.units[i]:
            if flat.optimizer:
                if self.flying:
                    self.flying.finish()  # one in flight, one being filled: never more than two units of gradients
                flat.start()
                self.flying = flat

    def reduce(self):
        """After backward: sum over ranks what is not summed yet."""
        if not self.sync:
            return
        for i in [*self.pending]:
            self.start(i)
        if self.flying:
            self.flying.finish()
        self.flying = None
        self.reset()
        if self.stage == 3:
            self.leave(self.current)
            self.leave(-1)
            self.current = None

    def gradients(self):
        """-> [(parameter, our piece of its gradient)], both flat, after reduce()."""
        return [(f.parameters[i], f.grad[part]) for f in self.trained for i, part, _ in f.pieces]

    def norm(self):
        """The norm of all gradients, on all ranks."""
        wide = torch.promote_types(self.trained[0].grad.dtype, torch.float32)
        squares = torch.stack([torch.linalg.vector_norm(f.grad, dtype=wide) for f in self.trained]).square().sum()
        if self.stage:
            dist.all_reduce(squares, group=self.group)  # partial -> replicated
        return squares.sqrt()

    def clip(self, norm, limit):
        for flat in self.trained:
            flat.grad.mul_((limit / (norm + 1e-6)).clamp(max=1))

    @torch.no_grad()
    def step(self):
        for flat in self.trained:
            flat.step()  # the next flat steps while this one's parameters are gathered
        for flat in self.trained:
            flat.wait()
        self.plan, self.entered = self.entered, []

    def zero_grad(self):
        for flat in self.trained:
            flat.used.clear()
            if self.stage >= 2:
                flat.grad.fill_(-0.0)

    def held(self):
        states = [t for f in self.trained for s in f.optimizer.state.values() for t in s.values()]
        masters = [f.master for f in self.trained if f.master is not f.shard]
        shards = [f.shard for f in self.flats]
        return {"parameters": [*self.module.parameters(), *self.module.buffers(), *shards],
                "gradients": [f.grad for f in self.trained], "optimizer": [*masters, *states]}


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, lr, group=None, stage=1, offload="none"):
    edges = model.tok, model.pos, model.norm, model.head  # one unit: the tied embedding is its first and last
    return ZeRO(model, partial(adamw, lr=lr), group, stage, [edges, *model.blocks], offload)


def full_state_dict(zero):
    for i in range(len(zero.units)) if zero.stage == 3 else ():
        zero.fetch(i)
    state = {name: t.clone() for name, t in zero.module.state_dict().items()}
    for i in range(len(zero.units)) if zero.stage == 3 else ():
        zero.leave(i)
    return state


def full_gradients(zero):
    found = {}
    for flat in zero.trained:
        full = flat.grad
        if zero.stage:
            full = torch.empty_like(flat.full)
            all_gather(full, flat.grad.contiguous(), group=zero.group)  # sharded -> replicated
        ends = [0, *accumulate(p.numel() for p in flat.parameters)]
        found.update({p: full[a:b].view_as(p) for p, (a, b) in zip(flat.parameters, pairwise(ends))})
    return {name: found[p] for name, p in zero.module.named_parameters()}


def train_step(zero, x, y, valid, clip, accum=1):
    """x, y: this rank's rows (B/N, T); valid: of the whole batch -> this rank's part of the loss, gradient norm."""
    zero.zero_grad()
    total = 0
    for i in range(accum):
        rows = share(len(x), accum, i)
        loss = loss_sum(zero.module(x[rows.start:rows.stop]), y[rows.start:rows.stop]) / valid
        zero.sync = zero.stage >= 2 or i == accum - 1
        loss.backward()
        zero.reduce()  # partial -> sharded
        total = total + loss.detach()
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


def train_step_at_work(model, optimizer, x, y, valid, clip, accum=1):
    optimizer.zero_grad()
    total = 0
    for i in range(accum):
        rows = share(len(x), accum, i)
        model.require_backward_grad_sync = i == accum - 1  # DistributedDataParallel's no_sync()
        loss = loss_sum(model(x[rows.start:rows.stop]), y[rows.start:rows.stop]) / valid
        (loss * dist.get_world_size()).backward()  # both average; the sum is wanted here
        total = total + loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    optimizer.step()
    return total, getattr(norm, "full_tensor", lambda: norm)()


# ---- 4. run ------------------------------------------------------------------


def main():
    args = arguments(__doc__, stage=(1, "what is sharded: 1 optimizer states, 2 and gradients, 3 and parameters", (0, 3)),
                     offload=("none", "what lives on the CPU", ("none", "optimizer", "param")),
                     accum=(1, "micro-batches per step", POSITIVE))
    n, stage = args.world_size, args.stage
    require(args.batch >= n * args.accum, f"--batch {args.batch} for {n} ranks x --accum {args.accum}: at least {n * args.accum}")
    run = Run(args)
    mesh = init_device_mesh(run.device.type, (n,))
    rows = share(args.batch, n, run.rank)
    with run:
        sides = {}
        for impl in run.impls:
            model = build(run.cfg, args.seed, run.device, run.dtype)
            total = sum(p.numel() for p in model.parameters())
            if impl == "scratch":
                zero = parallelize(model, args.lr, None, stage, args.offload)
                sides[impl] = zero, None
            else:
                sides[impl] = parallelize_at_work(model, args.lr, stage, mesh)
        for impl, step in run.steps():
            x, y, valid = run.batch(step, rows)
            model, optimizer = sides[impl]
            with run.measure(impl, step, model, optimizer):
                if impl == "scratch":
                    loss, norm = train_step(zero, x, y, valid, args.clip, args.accum)
                else:
                    loss, norm = train_step_at_work(model, optimizer, x, y, valid, args.clip, args.accum)
            run.log(impl, step, loss, norm)
            if run.keeps(step):
                if impl == "scratch":
                    run.trace[impl].keep(step, full_gradients(zero), full_state_dict(zero))
        return run.finish(total, total)


if __name__ == "__main__":
    sys.exit(main())
