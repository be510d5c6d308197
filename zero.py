"""ZeRO: data parallelism in which a rank keeps only its part of optimizer states (1), gradients (2), parameters (3).

    a block's parameters, flat   | rank 0 | rank 1 | rank 2 | rank 3 |   cut into N equal chunks, the last one padded

    stage 3    compute    fwd 0 | fwd 1 | fwd 2 | bwd 2 | bwd 1        | bwd 0 |       | step own chunks
               meanwhile  get 1 | get 2 |       | get 1 | get 0, sum 2 | sum 1 | sum 0 |

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from common import POSITIVE, Run, adamw, arguments, build, human, loss_sum, require, share

# ---- 1. the technique (copy this; it needs only torch) -----------------------

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def lend(flat, yes=True):
    """Give a flat tensor its memory, or take it away, under all views of it."""
    size = flat.numel() * flat.itemsize if yes else 0
    if flat.untyped_storage().size() != size:
        flat.untyped_storage().resize_(size)


class Flat:
    """A unit's parameters side by side in one tensor, padded to N equal chunks of which this rank owns one.

    full (N chunk,): the parameters are views of it. shard (chunk,): our chunk, where it lasts. master (chunk,): what
    the optimizer steps, the shard itself or a copy in fp32 or on the CPU. buffer (N chunk,): p.grad are views of it.
    grad (chunk,): our chunk of the sum. Stage 3 lends memory to full, and stages 2 and 3 to buffer, while in use.
    """

    def __init__(self, parameters, make_optimizer, group, offload, stage):
        n, rank = (dist.get_world_size(group), dist.get_rank(group)) if stage else (1, 0)
        self.group, self.stage, self.work, self.missing, self.used = group, stage, None, len(parameters), set()
        ends = [0, *accumulate(p.numel() for p in parameters)]
        chunk = -(-ends[-1] // n)
        mine, ends[-1] = slice(rank * chunk, (rank + 1) * chunk), n * chunk  # the padding goes with the last parameter
        self.full = parameters[0].new_full((n * chunk,), -0.0)
        self.buffer, self.own = self.full.clone(), self.full[mine]
        self.sum, self.ranges = self.buffer[mine], dict(zip(parameters, pairwise(ends)))
        for p, view in self.views(self.full).items():
            p.data = view.copy_(p)
        self.slots = self.views(self.buffer)
        self.shard = self.own.to("cpu" if offload == "param" else self.own.device, copy=stage == 3)
        home, wide = "cpu" if offload != "none" else self.own.device, torch.promote_types(self.own.dtype, torch.float32)
        self.master = self.shard.to(home, wide, copy=offload == "optimizer")
        self.grad = self.sum if stage < 2 else torch.zeros_like(self.own)
        cuts = {p: [min(max(end - mine.start, 0), chunk) for end in ends] for p, ends in self.ranges.items()}
        self.pieces = {p: slice(a, b) for p, (a, b) in cuts.items() if a < b}  # of our chunk
        self.optimizer = make_optimizer([nn.Parameter(self.master[piece]) for piece in self.pieces.values()])

    def views(self, flat):
        return {p: flat[a:a + p.numel()].view_as(p) for p, (a, _) in self.ranges.items()}

    def gather(self):
        """All shards -> full, when `work` is over."""
        lend(self.full)
        self.own.copy_(self.shard)  # in stages 1 and 2 they are the same
        self.work = all_gather(self.full, self.own, group=self.group, async_op=True)  # sharded -> replicated

    def reduce(self):
        """Sums gradients over ranks; the first next() starts it, the second waits for the end. What was not used adds
        -0.0, that is nothing: a sum is -0.0 only if no rank used the parameter."""
        lend(self.buffer)
        for p, (a, b) in self.ranges.items():
            self.buffer[a + p.numel() * (p.grad is not None):b].fill_(-0.0)  # all, or the padding
        self.used |= {p for p in self.ranges if p.grad is not None}
        if self.stage:
            work = reduce_scatter(self.sum, self.buffer, group=self.group, async_op=True)  # partial -> sharded
        else:
            work = dist.all_reduce(self.buffer, group=self.group, async_op=True)  # partial -> replicated
        yield
        work.wait()
        self.missing = len(self.ranges)
        if self.stage >= 2:
            self.grad += self.sum
            lend(self.buffer, False)
            for p in self.ranges:
                p.grad = None

    def step(self):
        """Steps our pieces; as in one process, parameters that no rank used are skipped."""
        for (p, piece), master in zip(self.pieces.items(), self.optimizer.param_groups[0]["params"]):
            grad = self.grad[piece]
            unused = p not in self.used and (grad.eq(0) & grad.signbit()).all()
            master.grad = None if unused else grad.to(master)  # in fp32, on the CPU: of one unit at a time
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.shard.copy_(self.master)
        if self.stage in (1, 2):
            self.gather()


class ZeRO:
    """ZeRO for any module over the ranks of `group`, in the place of its optimizer:

        zero.zero_grad(); module(x).backward(); zero.reduce(); norm = zero.norm(); zero.step()

    units: tuples of modules whose parameters lie together. Stage 3 gathers a unit on entering any of its modules, frees
    it on entering another's, and prefetches what came next in the last step. Parameters in no unit, in several, or of
    another dtype than the first are kept as in stage 2, frozen ones left alone. Gradients are summed, not averaged.
    While zero.sync is False stages 0 and 1 only accumulate; stages 2 and 3 want reduce() after every backward.
    """

    def __init__(self, module, make_optimizer, group=None, stage=1, units=(), offload="none"):
        self.module, self.group, self.stage, self.sync, self.entered, self.plan = module, group, stage, True, [], []
        where, homes = {m: i for i, unit in enumerate(units) for site in unit for m in site.modules()}, defaultdict(set)
        for m in module.modules():
            for p in m.parameters(recurse=False):
                homes[p].add(where.get(m, -1))
        lists, dtype = defaultdict(list), next(module.parameters()).dtype
        for p in filter(lambda p: p.requires_grad, homes):
            lists[homes[p].pop() if len(homes[p]) == 1 and p.dtype == dtype else -1, p.dtype].append(p)
        with torch.no_grad():
            for t in [*module.parameters(), *module.buffers()]:
                dist.broadcast(t, group=group, group_src=0)  # rank 0's -> replicated
            flats = {i: Flat(ps, make_optimizer, group, offload, stage if i[0] >= 0 else min(stage, 2))
                     for i, ps in lists.items()}
        self.flats = [*flats.values()]
        self.reset()
        for flat in self.flats:
            lend(flat.buffer, stage < 2)
            for p in flat.ranges:
                p.register_post_accumulate_grad_hook(partial(self.ready, flat))
        for flat, site in [(flat, site) for i, flat in flats.items() if flat.stage == 3 for site in units[i[0]]]:
            site.register_forward_pre_hook(partial(self.enter, flat))
            if not isinstance(site, nn.Embedding):  # whose backward needs no parameter
                site.register_forward_hook(partial(self.watch, flat))

    def reset(self):
        """Nothing is gathered or being reduced, and the units entered until now are the next plan."""
        self.plan, self.entered = self.entered or self.plan, []
        self.pending, self.flying = self.flats[::-1], iter(())
        for flat in self.flats:
            if flat.work:
                flat.work.wait()
            lend(flat.full, flat.stage < 3)

    def enter(self, flat, *_):
        """One rule for forward and backward: free the unit behind, wait for this one, send for the one ahead."""
        now = len(self.entered)
        if self.entered[-1:] == [flat]:
            return
        for behind in self.entered[-1:]:
            lend(behind.full, False)
        if not flat.full.untyped_storage().size():  # not prefetched
            flat.gather()
        flat.work.wait()
        self.entered.append(flat)
        for ahead in self.plan[now + 1:now + 2] if self.plan[now:now + 1] == [flat] else ():
            ahead.gather()

    def watch(self, flat, site, inputs, output):
        """When backward reaches this output it enters the unit."""
        for t in tree_leaves(output):
            if isinstance(t, torch.Tensor) and t.requires_grad:
                t.register_hook(partial(self.enter, flat))

    def ready(self, flat, p):
        """Autograd's call when a gradient is complete; of a tied parameter it is the sum over its uses."""
        lend(flat.buffer)
        if p.grad is not flat.slots[p]:
            p.grad = torch.add(p.grad, 0.0, out=flat.slots[p])  # a copy, but of -0.0 it makes 0.0
        flat.missing -= self.sync
        self.reduce(everything=False)

    def reduce(self, everything=True):
        """To be called after backward: sums over ranks, in the same order on all, what is not yet."""
        while self.sync and self.pending and (everything or not self.pending[0].missing):
            next(self.flying, None)  # the one before ends: never more than two buffers
            self.flying = self.pending.pop(0).reduce()
            next(self.flying)
        if self.sync and everything:
            next(self.flying, None)
            self.reset()

    def gradients(self):
        """-> [(parameter, our piece of its summed gradient)]"""
        return [(p, flat.grad[piece]) for flat in self.flats for p, piece in flat.pieces.items()]

    def norm(self):
        square = sum(torch.linalg.vector_norm(f.grad, dtype=f.master.dtype) ** 2 for f in self.flats)
        if self.stage:
            dist.all_reduce(square, group=self.group)  # partial -> replicated
        return square.sqrt()

    @torch.no_grad()
    def step(self):
        for flat in self.flats:
            flat.step()  # while the parameters of the one before are gathered
        self.reset()

    def zero_grad(self):
        self.module.zero_grad()
        for flat in self.flats:
            flat.used.clear()
            flat.grad.fill_(-0.0)

    def held(self):
        """What this rank keeps between steps, for a ledger."""
        states = [t for f in self.flats for state in f.optimizer.state.values() for t in state.values()]
        return {"parameters": [*self.module.parameters(), *self.module.buffers(), *(f.shard for f in self.flats)],
                "gradients": [f.grad for f in self.flats],
                "optimizer": states + [f.master for f in self.flats if f.master is not f.shard]}


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, lr, group=None, stage=1, offload="none"):
    *blocks, last = model.blocks  # the tied embedding is the first unit of forward and also its last
    units = [(model.tok, model.pos, model.head), *zip(blocks), (last, model.norm)]
    return ZeRO(model, partial(adamw, lr=lr), group, stage, units, offload)


def full_state_dict(zero):
    for flat in zero.flats if zero.stage else ():
        flat.gather()
        flat.work.wait()
    state = {name: t.clone() for name, t in zero.module.state_dict().items()}
    zero.reset()
    return state


def full_gradients(zero):
    found = {}
    for flat in zero.flats:
        full = torch.empty_like(flat.full)
        all_gather(full, flat.grad, group=zero.group) if zero.stage else full.copy_(flat.grad)  # sharded -> replicated
        found.update(flat.views(full))
    return {name: found[p] for name, p in zero.module.named_parameters()}


def train_step(zero, _, x, y, valid, clip, accum=1):
    """x, y: this rank's rows (B/N, T); valid: of the whole batch -> this rank's part of the loss, gradient norm."""
    zero.zero_grad()
    total = torch.zeros((), device=x.device)
    for i, (xs, ys) in enumerate(zip(x.tensor_split(accum), y.tensor_split(accum))):
        zero.sync = zero.stage >= 2 or i == accum - 1
        loss = loss_sum(zero.module(xs), ys) / valid
        loss.backward()
        zero.reduce()  # partial -> sharded
        total = total + loss.detach()
    norm = zero.norm()
    for _, grad in zero.gradients() if clip else ():
        grad *= (clip / (norm + 1e-6)).clamp(max=1)
    zero.step()
    return total, norm


# ---- 3. at work: the same with torch's own API -------------------------------


def parallelize_at_work(model, lr, stage, mesh):
    if stage < 2:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        make = ZeroRedundancyOptimizer if stage else lambda parameters, adamw, lr: adamw(parameters, lr)
        return model, make(model.parameters(), adamw, lr=lr)
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=stage == 3)
    return model, adamw(model.parameters(), lr)


def full_at_work(model):
    model, full = getattr(model, "module", model), lambda t: getattr(t, "full_tensor", lambda: t)()  # -> replicated
    return {n: full(p.grad) for n, p in model.named_parameters()}, {n: full(t) for n, t in model.state_dict().items()}


def train_step_at_work(model, optimizer, x, y, valid, clip, accum=1):
    optimizer.zero_grad()
    total = torch.zeros((), device=x.device)
    for i, (xs, ys) in enumerate(zip(x.tensor_split(accum), y.tensor_split(accum))):
        model.require_backward_grad_sync = i == accum - 1  # DistributedDataParallel's no_sync()
        loss = loss_sum(model(xs), ys) / valid
        (loss * dist.get_world_size()).backward()  # both average; the sum is wanted here
        total = total + loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    optimizer.step()
    return total, getattr(norm, "full_tensor", lambda: norm)()


# ---- 4. run ------------------------------------------------------------------


def account(run, zero, accum):
    """The paper's table and what this run's ledger has measured, also as rows of the textbook."""
    n, stage, flat, ledger = run.world_size, zero.stage, zero.flats[0], run.ledger["scratch"]
    P, b, wide = sum(f.full.numel() for f in zero.flats), run.dtype.itemsize, flat.master.itemsize
    k, times = wide * (2 if flat.master is flat.shard else 3), (2, 2, accum + 1, 3 * accum)
    paper = [(b * P / (n if s > 2 else 1), b * P / (n if s > 1 else 1), k * P / (n if s else 1),
              times[s] * b * P * (n - 1) / n) for s in range(4)]
    *held, activations, peak = ledger.memory.values()
    got = *held, sum(c["wire"] for c in ledger.collectives.values())
    run.say(f"\n{'stage':>8}{'parameters':>12}{'gradients':>12}{'optimizer':>12}{'sent':>12}")
    for s, sizes in (*enumerate(paper), (f"here {stage}", got)):
        run.say(f"{s:>8}", *(f"{human(size):>11}" for size in sizes))
    counters, norm = 4 * sum(len(f.pieces) for f in zero.flats), (stage > 0) * 2 * (n - 1) / n * wide
    for row in zip(("parameters held", "gradients held", "optimizer held", "wire in all"),
                   (f"{b} P" + " / N" * (stage > 2), f"{b} P" + " / N" * (stage > 1),
                    f"{k} P" + " / N" * (stage > 0) + f" + {counters} (step counters)",
                    f"{times[stage]} (N-1)/N {b} P" + " + the norm's square" * (stage > 0)),
                   (want + more for want, more in zip(paper[stage], (0, 0, counters, norm))), got):
        run.textbook(*row)


def main():
    args = arguments(__doc__, stage=(1, "shard 1: optimizer states, 2: and gradients, 3: and parameters", (0, 3)),
                     offload=("none", "what lives on the CPU", ("none", "optimizer", "param")),
                     accum=(1, "micro-batches per step", POSITIVE))
    n, stage, ours = args.world_size, args.stage, args.impl == "scratch"
    least = {"none": 0, "optimizer": 1, "param": 3}[args.offload]
    require(stage >= least, f"--offload {args.offload} with --stage {stage}: needs stage {least} or more")
    require(ours or not least, f"--offload {args.offload} needs --impl scratch")
    require(ours or stage > 1 or not args.dry_run, f"--dry-run of stage {stage} needs --impl scratch: DDP wants real ranks")
    require(args.batch >= n * args.accum, f"--batch {args.batch}: {n} ranks x --accum {args.accum} need {n * args.accum}")
    run = Run(args)
    mesh, sides = init_device_mesh(run.device.type, (n,)), {}
    with run:
        for impl in run.impls:
            model = build(run.cfg, args.seed, run.device, run.dtype)
            total = sum(p.numel() for p in model.parameters())
            if impl == "scratch":
                zero = parallelize(model, args.lr, None, stage, args.offload)
                sides[impl] = zero, None, train_step, lambda zero: (full_gradients(zero), full_state_dict(zero))
            else:
                sides[impl] = *parallelize_at_work(model, args.lr, stage, mesh), train_step_at_work, full_at_work
        run.say(f"zero: stage {stage}, {n} ranks on {run.device.type}, {args.dtype}, {total:,} parameters")
        for impl, step in run.steps():
            model, optimizer, step_fn, full = sides[impl]
            x, y, valid = run.batch(step, share(args.batch, n, run.rank))
            with run.measure(impl, step, model, optimizer):
                loss, norm = step_fn(model, optimizer, x, y, valid, args.clip, args.accum)
            run.log(impl, step, loss, norm)
            if run.keeps(step):
                run.trace[impl].keep(step, *full(model))
        if "scratch" in run.impls:
            account(run, zero, args.accum)
        return run.finish(total, run.ledger[run.impls[0]].memory["parameters"] // run.dtype.itemsize)


if __name__ == "__main__":
    sys.exit(main())
