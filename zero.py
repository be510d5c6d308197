"""ZeRO: data parallelism in which a rank keeps only its part of the optimizer states, the gradients, the parameters.

    a block's parameters, flat     rank 0 | rank 1 | rank 2 | rank 3     cut into N equal chunks, the last one padded
    stages 1, 2, 3                 optimizer states: own chunk only
    stages 2, 3                    gradients: own chunk only, reduce-scattered block by block while backward runs
    stage 3                        parameters: own chunk only, gathered before a block computes and freed after it

    stage 3    compute    fwd 0 | fwd 1 | fwd 2 | bwd 2 | bwd 1       | bwd 0    |          | step
               meanwhile  get 1 | get 2 | get 1 |       | get 0, sum 2| sum 1    | sum 0    |

    per rank, P parameters with padding, 16 bytes each in bf16: 2, gradient 2, fp32 master and Adam states 12
               held between steps   sent per step, times 2 P (N-1)/N; M micro-batches (--accum)
    plain      16 P                 0
    stage 0    16 P                 2       all-reduce of the gradients
    stage 1    (4 + 12/N) P         2       reduce-scatter after the last micro-batch, all-gather of the parameters
    stage 2    (2 + 14/N) P         M + 1   reduce-scatter in every micro-batch: there is no room to sum them first
    stage 3    16 P / N             3 M     gather in forward, gather in backward, reduce-scatter, every time

In fp32 and fp64 of b bytes there is no master: b P, b P and 2 b P. --offload optimizer keeps master and states, and
steps, on the CPU; --offload param (stage 3) the parameter chunks too. Production overlaps those copies with compute.

Rajbhandari et al. 2019, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054,
sections 5 and 7; Ren et al. 2021, "ZeRO-Offload", arXiv:2101.06840. At work: ZeroRedundancyOptimizer (stage 1),
fully_shard with reshard_after_forward False (2) and True (3), section 3 below.

    torchrun --standalone --nproc_per_node=2 zero.py --stage 3
"""
import math
import sys
from collections import defaultdict
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


def hold(flat, yes):
    """Give a flat tensor its memory or take it away, under all views of it -> did that change anything?"""
    storage, size = flat.untyped_storage(), flat.numel() * flat.itemsize if yes else 0
    return storage.size() != size and (storage.resize_(size), True)[1]


class Flat:
    """Parameters of one dtype side by side in one tensor, padded to N equal chunks of which this rank owns one.

    full (N chunk,): the parameters are views of it. shard (chunk,): our chunk, where it lasts. master (chunk,): what
    the optimizer steps, the shard itself or a copy in fp32 or on the CPU. buffer (N chunk,): p.grad are views of it.
    grad (chunk,): our chunk of the sum. Stage 3 lends memory to full, and stages 2 and 3 to buffer, while in use.
    """

    def __init__(self, parameters, make_optimizer, group, stage, offload):
        n, rank = (dist.get_world_size(group), dist.get_rank(group)) if stage else (1, 0)
        self.parameters, self.group, self.stage = parameters, group, stage
        self.work, self.used, self.missing = None, set(), len(parameters)
        self.ends = [0, *accumulate(p.numel() for p in parameters)]
        chunk = -(-self.ends[-1] // n)
        self.full, self.mine = parameters[0].new_zeros(n * chunk), slice(rank * chunk, (rank + 1) * chunk)
        self.buffer = torch.zeros_like(self.full)
        for p, view in zip(parameters, self.views(self.full)):
            p.data = view.copy_(p)
        own, wide = self.full[self.mine], torch.promote_types(self.full.dtype, torch.float32)
        self.shard = own.to("cpu" if offload == "param" else own.device, copy=stage == 3)
        self.master = self.shard.to(own.device if offload == "none" else "cpu", wide, copy=offload == "optimizer")
        self.grad = self.buffer[self.mine] if stage < 2 else torch.zeros_like(own)
        self.slots = self.views(self.buffer)
        hold(self.full, stage < 3)
        hold(self.buffer, stage < 2)
        # where the parameters lie in our chunk; the padding goes with the last one
        cuts = [min(max(end - self.mine.start, 0), chunk) for end in (*self.ends[:-1], n * chunk)]
        self.pieces = [(i, slice(*c), nn.Parameter(self.master[slice(*c)])) for i, c in enumerate(pairwise(cuts)) if c[0] < c[1]]
        self.optimizer = make_optimizer([piece for _, _, piece in self.pieces])

    def views(self, flat):
        return [flat[a:b].view_as(p) for p, (a, b) in zip(self.parameters, pairwise(self.ends))]

    def gather(self):
        """All shards -> full, in the background until `wait`; nothing if stage 3 has them here or on their way."""
        if self.stage < 3 or hold(self.full, True):
            same = self.shard.device == self.full.device
            own = self.shard if same else self.full[self.mine].copy_(self.shard)
            self.work = all_gather(self.full, own, group=self.group, async_op=True)  # sharded -> replicated

    def wait(self):
        if self.work:
            self.work.wait()
        self.work = None

    def start(self):
        """Sum gradients over ranks, until `finish`. A sum is -0.0 only if all summands are: if no rank used it."""
        hold(self.buffer, True)
        self.buffer[self.ends[-1]:].fill_(-0.0)
        for i, p in enumerate(self.parameters):
            self.slots[i].fill_(-0.0) if p.grad is None else self.used.add(i)
        if self.stage:
            own = self.buffer[self.mine]
            self.work = reduce_scatter(own, self.buffer, group=self.group, async_op=True)  # partial -> sharded
        else:
            self.work = dist.all_reduce(self.buffer, group=self.group, async_op=True)  # partial -> replicated

    def finish(self):
        self.wait()
        self.missing = len(self.parameters)
        if self.stage >= 2:
            self.grad += self.buffer[self.mine]
            hold(self.buffer, False)
            for p in self.parameters:
                p.grad = None


class ZeRO:
    """ZeRO for any module over the ranks of `group`, in the place of its optimizer:

        zero.zero_grad(); module(x).backward(); zero.reduce(); norm = zero.norm(); zero.step()

    units: tuples of modules, in the order of forward; of each the parameters lie together, all of one dtype. A unit is
    reduced once backward has all its gradients. Stage 3 gathers it when its modules are entered, frees it when another's
    are, and prefetches what came next in the last step. Parameters in no unit, or in several, stay until reduce().
    Frozen ones are left alone. make_optimizer(parameters) is called for every unit. Gradients are summed, not averaged.
    While zero.sync is False, stages 0 and 1 only accumulate; 2 and 3 want reduce() after every backward.
    """

    def __init__(self, module, make_optimizer, group=None, stage=1, units=(), offload="none"):
        self.module, self.group, self.stage, self.sync, self.entered, self.plan = module, group, stage, True, [], []
        where, homes = {m: i for i, unit in enumerate(units) for site in unit for m in site.modules()}, defaultdict(set)
        for m in module.modules():
            for p in m.parameters(recurse=False):
                homes[p].add(where.get(m, -1))
        lists = defaultdict(list)
        for p in filter(lambda p: p.requires_grad, homes):
            lists[homes[p].pop() if len(homes[p]) == 1 else -1].append(p)
        with torch.no_grad():
            for t in [*module.parameters(), *module.buffers()]:
                dist.broadcast(t, group=group, group_src=0)  # rank 0's -> replicated
            flats = {i: Flat(lists[i], make_optimizer, group, stage, offload) for i in sorted(lists)}
        self.flats = [*flats.values()]
        self.reset()
        for flat in self.flats:
            for i, p in enumerate(flat.parameters):
                p.register_post_accumulate_grad_hook(partial(self.ready, flat, i))
        for i, flat in flats.items() if stage == 3 else ():
            for site in units[i] if i >= 0 else (module,):
                site.register_forward_pre_hook(partial(self.enter, flat, i >= 0))
                if i >= 0 and not isinstance(site, nn.Embedding):  # whose backward needs no parameter
                    site.register_forward_hook(partial(self.watch, flat))

    def reset(self):
        """Nothing is gathered or being reduced; the units entered until now are the next plan."""
        for flat in self.flats if self.stage == 3 else ():
            flat.wait()
            hold(flat.full, False)
        self.plan, self.entered, self.pending, self.flying = self.entered or self.plan, [], self.flats[::-1], None

    def enter(self, flat, passing=True, *_):
        """One rule for forward and backward: free the unit behind, wait for this one, send for the one ahead."""
        if passing and self.entered[-1:] != [flat]:
            for behind in self.entered[-1:]:
                hold(behind.full, False)
            self.entered.append(flat)
        flat.gather()
        flat.wait()
        now = len(self.entered)
        if passing and self.plan[now - 1:now] == [flat] and now < len(self.plan):
            self.plan[now].gather()

    def watch(self, flat, site, inputs, output):
        """When backward reaches this output, it enters the unit."""
        outputs = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        if outputs:
            register_multi_grad_hook(outputs, lambda _: self.enter(flat), mode="any")

    def ready(self, flat, i, p):
        """Autograd's call when a gradient is complete: of a tied parameter, the sum over its uses."""
        hold(flat.buffer, True)
        if p.grad is not flat.slots[i]:
            torch.add(p.grad, 0.0, out=flat.slots[i])  # copies, and turns -0.0 into 0.0
            p.grad = flat.slots[i]
        flat.missing -= self.sync
        self.reduce(complete=False)

    def reduce(self, complete=True):
        """To be called after backward: sums over ranks what is not summed yet. In the same order on all of them."""
        while self.sync and self.pending and (complete or not self.pending[0].missing):
            if self.flying:
                self.flying.finish()  # one on its way, one being filled: never more than two units of gradients
            self.flying = self.pending.pop(0)
            self.flying.start()
        if self.sync and complete:
            self.flying.finish()
            self.reset()

    def gradients(self):
        """-> [(parameter, our piece of its summed gradient)]"""
        return [(flat.parameters[i], flat.grad[part]) for flat in self.flats for i, part, _ in flat.pieces]

    def norm(self):
        square = sum(torch.linalg.vector_norm(f.grad, dtype=f.master.dtype) ** 2 for f in self.flats)
        if self.stage:
            dist.all_reduce(square, group=self.group)  # partial -> replicated
        return square.sqrt()

    @torch.no_grad()
    def step(self):
        """Step our pieces; those of parameters that no rank used are skipped, as in one process."""
        self.reset()  # what an evaluation has gathered becomes stale
        for flat in self.flats:
            for i, part, piece in flat.pieces:
                grad = flat.grad[part]
                if i in flat.used or not (grad.eq(0) & grad.signbit()).all():
                    piece.grad = grad.to(piece)  # in fp32, on the CPU: of one unit at a time
            flat.optimizer.step()
            flat.optimizer.zero_grad()
            if flat.master is not flat.shard:
                flat.shard.copy_(flat.master)
            if self.stage in (1, 2):
                flat.gather()  # while the next one steps
        for flat in self.flats:
            flat.wait()

    def zero_grad(self):
        self.module.zero_grad()
        for flat in self.flats:
            flat.used.clear()
            if self.stage >= 2:
                flat.grad.fill_(-0.0)

    def held(self):
        """What this rank keeps between steps, for a ledger."""
        states = [t for f in self.flats for state in f.optimizer.state.values() for t in state.values()]
        return {"parameters": [*self.module.parameters(), *self.module.buffers(), *(f.shard for f in self.flats)],
                "gradients": [f.grad for f in self.flats],
                "optimizer": states + [f.master for f in self.flats if f.master is not f.shard]}


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, lr, group=None, stage=1, offload="none"):
    edges = model.tok, model.pos, model.norm, model.head  # together: the tied embedding is the first and the last
    return ZeRO(model, partial(adamw, lr=lr), group, stage, [edges, *zip(model.blocks)], offload)


def full_state_dict(zero):
    for flat in zero.flats if zero.stage == 3 else ():
        zero.enter(flat, False)
    state = {name: t.clone() for name, t in zero.module.state_dict().items()}
    zero.reset()
    return state


def full_gradients(zero):
    found = {}
    for flat in zero.flats:
        full = torch.empty_like(flat.full)
        all_gather(full, flat.grad, group=zero.group) if zero.stage else full.copy_(flat.grad)  # sharded -> replicated
        found.update(zip(flat.parameters, flat.views(full)))
    return {name: found[p] for name, p in zero.module.named_parameters()}


def train_step(zero, x, y, valid, clip, accum=1):
    """x, y: this rank's rows (B/N, T); valid: of the whole batch -> this rank's part of the loss, gradient norm."""
    zero.zero_grad()
    parts = []
    for xs, ys in zip(x.tensor_split(accum), y.tensor_split(accum)):
        zero.sync = zero.stage >= 2 or len(parts) == accum - 1
        loss = loss_sum(zero.module(xs), ys) / valid
        loss.backward()
        zero.reduce()  # partial -> sharded
        parts.append(loss.detach())
    norm = zero.norm()
    for _, grad in zero.gradients() if clip else ():
        grad *= (clip / (norm + 1e-6)).clamp(max=1)
    zero.step()
    return sum(parts), norm


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


def train_step_at_work(model, optimizer, x, y, valid, clip, accum=1):
    optimizer.zero_grad()
    parts = []
    for xs, ys in zip(x.tensor_split(accum), y.tensor_split(accum)):
        model.require_backward_grad_sync = len(parts) == accum - 1  # DistributedDataParallel's no_sync()
        parts.append(loss_sum(model(xs), ys) / valid)
        (parts[-1] * dist.get_world_size()).backward()  # both average; the sum is wanted here
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    optimizer.step()
    return sum(parts).detach(), getattr(norm, "full_tensor", lambda: norm)()


# ---- 4. run ------------------------------------------------------------------


def book(stage, n, size, states, accum):
    """The paper: parameters, gradients, optimizer states held and bytes sent, by one rank."""
    cut = [n if stage >= least else 1 for least in (3, 2, 1)]
    return size / cut[0], size / cut[1], states / cut[2], (2, 2, accum + 1, 3 * accum)[stage] * size * (n - 1) / n


def account(run, zero, accum):
    """One table: the stages in the paper, and this run; then this run's row as the ledger's textbook."""
    n, flat, kinds = run.world_size, zero.flats[0], ("parameters", "gradients", "optimizer")
    count, wide = sum(f.full.numel() for f in zero.flats), flat.master.itemsize
    width = wide * (2 + (flat.master is not flat.shard))
    run.say(f"\n{'stage':>10}", *(f"{k:>12}" for k in (*kinds, "sent", "activations", "peak")))
    for stage in range(4):
        run.say(f"{stage:10}", *(f"{human(v):>12}" for v in book(stage, n, count * run.dtype.itemsize, count * width, accum)))
    held, sent = run.ledger["scratch"].memory, sum(c["wire"] for c in run.ledger["scratch"].collectives.values())
    measured = [*(held[k] for k in kinds), sent]
    run.say(f"{zero.stage}, measured", *(f"{human(v):>12}" for v in (*measured, held["activations"], held["peak"])))
    expected = book(zero.stage, n, count * run.dtype.itemsize, count * width, accum)
    counters, norm = 4 * sum(len(f.pieces) for f in zero.flats), bool(zero.stage) * 2 * (n - 1) / n * wide
    moves = (2, 2, accum + 1, 3 * accum)[zero.stage]
    for what, formula, extra, want, got in zip(
            ("parameters held", "gradients held", "optimizer held", "wire in all"),
            ("b P", "b P", f"{width} P", f"{moves} (N-1)/N b P + the norm's"), (0, 0, counters, norm), expected, measured):
        run.textbook(what, formula, want + extra, got)


def main():
    args = arguments(__doc__, stage=(1, "shard 1: optimizer states, 2: and gradients, 3: and parameters", (0, 3)),
                     offload=("none", "what lives on the CPU", ("none", "optimizer", "param")),
                     accum=(1, "micro-batches per step", POSITIVE))
    n, stage, ours = args.world_size, args.stage, args.impl == "scratch"
    require(args.batch >= n * args.accum, f"--batch {args.batch}: {n} ranks x --accum {args.accum} need {n * args.accum}")
    require(args.offload == "none" or stage >= (1 if args.offload == "optimizer" else 3),
            f"--offload {args.offload} with --stage {stage}: optimizer needs stage 1, param stage 3")
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
        if run.impls[0] == "scratch":
            account(run, zero, args.accum)
        return run.finish(total, total)


if __name__ == "__main__":
    sys.exit(main())
