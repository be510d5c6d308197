"""ZeRO: data parallelism in which a rank keeps only its part of optimizer states (1), gradients (2), parameters (3).

    a block's parameters, flat   | rank 0 | rank 1 | rank 2 | rank 3 |   cut into N equal chunks, the last one padded

    stage 3    compute    fwd 0 | fwd 1 | fwd 2 | bwd 2 | bwd 1        | bwd 0 |       | step own chunks
               meanwhile  get 1 | get 2 |       | get 1 | get 0, sum 2 | sum 1 | sum 0 |

    per rank, P parameters with padding, 16 bytes each in bf16: 2, gradient 2, fp32 master and Adam states 12
               held between steps   sent per step, times 2 P (N-1)/N; M micro-batches (--accum); the plain GPT: 16 P, 0
    stage 0    16 P                 2       all-reduce of the gradients
    stage 1    (4 + 12/N) P         2       reduce-scatter after the last micro-batch, all-gather of the parameters
    stage 2    (2 + 14/N) P         M + 1   reduce-scatter in every micro-batch: there is no room to sum them first
    stage 3    16 P / N             3 M     gather in forward, gather in backward, reduce-scatter, every time

fp32 and fp64 of b bytes have no master: b P, b P and 2 b P. --offload optimizer keeps master and states, and steps,
on the CPU; --offload param (stage 3) the parameter chunks too. Production overlaps those copies with compute.

Rajbhandari et al. 2019, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054,
sections 5 and 7; Ren et al. 2021, "ZeRO-Offload", arXiv:2101.06840. At work: ZeroRedundancyOptimizer (stage 1),
fully_shard with reshard_after_forward False (2) and True (3), section 3 below.

    torchrun --standalone --nproc_per_node=2 zero.py --stage 3
"""
import sys
from collections import defaultdict
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from common import POSITIVE, Run, adamw, arguments, build, loss_sum, require, share
from flat import Flat, all_gather, lend
from harness.report import human

# ---- 1. the technique (copy this and flat.py; they need only torch) ----------


class ZeRO:
    """ZeRO for any module over the ranks of `group`, in the place of its optimizer; gradients are summed, not averaged:

        zero.zero_grad(); module(x).backward(); zero.reduce(); norm = zero.norm(); zero.step()

    units: tuples of modules whose parameters lie together; in stage 3 all ranks must use the same of a unit's. What is
    in no unit, in several, or of another dtype than the first is kept as in stage 2; what is frozen, left alone.
    While zero.sync is False, stages 0 and 1 only accumulate; stages 2 and 3 want reduce() after every backward.
    Between steps of stage 3 the parameters of units have no memory: full_state_dict below gathers them.
    """

    def __init__(self, module, make_optimizer, group=None, stage=1, units=(), offload="none"):
        self.module, self.group, self.stage, self.sync, self.entered, self.plan = module, group, stage, True, [], []
        where, homes = {m: i for i, unit in enumerate(units) for site in unit for m in site.modules()}, defaultdict(set)
        for m in module.modules():
            for p in m.parameters(recurse=False):
                homes[p].add(where.get(m, -1))
        lists, dtype = defaultdict(list), next(module.parameters()).dtype  # {(unit or -1, dtype): parameters}
        for p in filter(lambda p: p.requires_grad, homes):
            lists[homes[p].pop() if len(homes[p]) == 1 and p.dtype == dtype else -1, p.dtype].append(p)
        for t in [*module.parameters(), *module.buffers()]:
            dist.broadcast(t.detach(), group=group, group_src=0)  # rank 0's -> replicated
        self.flats = []
        for (i, _), parameters in lists.items():
            flat = Flat(parameters, make_optimizer, group, offload, stage if i >= 0 else min(stage, 2))
            self.flats.append(flat)
            for p in parameters:
                p.register_post_accumulate_grad_hook(partial(self.ready, flat))
            for site in units[i] if flat.stage == 3 else ():
                site.register_forward_pre_hook(partial(self.enter, flat))
                if not isinstance(site, nn.Embedding):  # whose backward needs no parameter
                    site.register_forward_hook(partial(self.watch, flat))
        self.flats.sort(key=lambda flat: flat.stage)  # in no unit: reduced last, when stage 3 gathers no more
        self.reducing = iter(())
        self.reset()

    def reset(self):
        """Nothing is gathered or being reduced, and the units entered until now are the next plan."""
        self.plan, self.entered = self.entered or self.plan, []
        next(self.reducing, None)  # it is under way if backward ended in an exception
        self.pending, self.reducing = self.flats[::-1], iter(())
        self.module.zero_grad()
        for flat in self.flats:
            flat.missing = len(flat.ranges)
            if flat.work:
                flat.work.wait()
            lend(flat.full, flat.stage < 3)

    def enter(self, flat, *_):
        """One rule for forward and backward: free the unit behind, wait for this one, send for the one ahead."""
        if self.entered[-1:] != [flat]:
            for behind in self.entered[-1:]:
                lend(behind.full, False)
            if not flat.full.untyped_storage().size():  # not prefetched
                flat.gather()
            flat.work.wait()
            now = len(self.entered)
            for ahead in self.plan[now + 1:now + 2] if self.plan[now:now + 1] == [flat] else ():
                ahead.gather()
            self.entered.append(flat)

    def watch(self, flat, site, inputs, output):
        for t in torch.utils._pytree.tree_leaves(output):
            if isinstance(t, torch.Tensor) and t.requires_grad:
                t.register_hook(partial(self.enter, flat))  # backward comes to the unit from this end

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
            next(self.reducing, None)  # the one before ends: never more than two buffers
            self.reducing = self.pending.pop(0).reduce()
            next(self.reducing)  # the collective starts
        if self.sync and everything:
            next(self.reducing, None)
            self.reset()

    def norm(self):
        square = sum(torch.linalg.vector_norm(f.grad, dtype=f.master.dtype) ** 2 for f in self.flats)
        if self.stage:
            dist.all_reduce(square, group=self.group)  # partial -> replicated
        return square.sqrt()

    def step(self):
        """Steps our pieces; as in one process, parameters that no rank used are skipped."""
        for flat in self.flats:
            for (p, piece), master in zip(flat.pieces.items(), flat.optimizer.param_groups[0]["params"]):
                grad = flat.grad[piece]
                unused = p not in flat.used and (grad.eq(0) & grad.signbit()).all()
                master.grad = None if unused else grad.to(master)  # a copy if master is wider or on the CPU
            flat.optimizer.step()
            flat.optimizer.zero_grad()
            flat.shard.copy_(flat.master)
            if flat.stage in (1, 2):
                flat.gather()  # while the next one steps
        self.reset()

    def zero_grad(self):
        self.reset()
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
    losses = []
    for xs, ys in zip(x.tensor_split(accum), y.tensor_split(accum)):
        losses.append(loss_sum(zero.module(xs), ys) / valid)
        zero.sync = zero.stage >= 2 or len(losses) == accum
        losses[-1].backward()
        zero.reduce()  # partial -> sharded
    norm = zero.norm()
    for flat in zero.flats if clip else ():
        flat.grad *= (clip / (norm.nan_to_num(0, posinf=0) + 1e-6)).clamp(max=1)
    zero.step()
    return sum(losses).detach(), norm


# ---- 3. at work: the same with torch's own API -------------------------------


def parallelize_at_work(model, lr, stage, mesh):
    if stage == 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return model, ZeroRedundancyOptimizer(model.parameters(), adamw, lr=lr)
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=stage == 3)
    return model, adamw(model.parameters(), lr)


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t  # sharded, or partial as a norm -> replicated


def full_gradients_at_work(model):
    return {name: whole(p.grad) for name, p in getattr(model, "module", model).named_parameters()}


def full_state_dict_at_work(model):
    return {name: whole(t) for name, t in getattr(model, "module", model).state_dict().items()}


def train_step_at_work(model, optimizer, x, y, valid, clip, _):
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    (loss * dist.get_world_size()).backward()  # both average; the sum is wanted here
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
    optimizer.step()
    return loss, whole(norm)


# ---- 4. run ------------------------------------------------------------------


def account(run, zero, accum):
    """The paper's figures for every stage, and what the ledger has measured for this one."""
    n, flat, ledger = run.world_size, zero.flats[0], run.ledger["scratch"]
    P, b, wide = sum(f.full.numel() for f in zero.flats), run.dtype.itemsize, flat.master.itemsize
    k, steps = wide * (2 + (flat.master is not flat.shard)), 4 * sum(len(f.pieces) for f in zero.flats)
    run.say(f"\n{'stage':>8}{'parameters':>13}{'gradients':>13}{'optimizer':>13}{'sent':>13}   of the paper")
    for s, times in enumerate((2, 2, accum + 1, 3 * accum)):
        cut, moved = [n if s >= least else 1 for least in (3, 2, 1)], times * b * P * (n - 1) / n
        held = [size * P / parts for size, parts in zip((b, b, k), cut)]
        run.say(f"{s:8}" + "".join(f"{human(size):>13}" for size in (*held, moved)))
        if s == zero.stage:
            for kind, size, parts, more, want in zip(ledger.memory, (b, b, k), cut, (0, 0, steps), held):
                run.textbook(f"{kind} held", f"{size} P / {parts} + {more}", want + more, ledger.memory[kind])
            norm, sent = 2 * (n - 1) / n * wide * bool(s), sum(c["wire"] for c in ledger.collectives.values())
            run.textbook("wire in all", f"{times} (N-1)/N {b} P + {norm:g} for the norm", moved + norm, sent)


def main():
    args = arguments(__doc__, stage=(1, "shard 1: optimizer states, 2: and gradients, 3: and parameters", (0, 3)),
                     offload=("none", "what lives on the CPU", ("none", "optimizer", "param")),
                     accum=(1, "micro-batches per step", POSITIVE))
    n, stage, ours = args.world_size, args.stage, args.impl == "scratch"
    least = {"none": 0, "optimizer": 1, "param": 3}[args.offload]
    require(stage >= least, f"--offload {args.offload} with --stage {stage}: needs stage {least} or more")
    require(ours or args.accum == 1 and not least and stage > bool(args.dry_run),
            f"--impl {args.impl} --stage {stage}: torch's has stages 1 to 3 (dry run: 2, 3), no --offload, no --accum")
    require(args.batch >= n * args.accum, f"--batch {args.batch}: fewer than {n} ranks x {args.accum} micro-batches")
    run = Run(args)
    mesh, sides = dist.init_device_mesh(run.device.type, (n,)), {}
    with run:
        for impl in run.impls:
            model = build(run.cfg, args.seed, run.device, run.dtype)
            total = sum(p.numel() for p in model.parameters())
            if impl == "scratch":
                zero = parallelize(model, args.lr, None, stage, args.offload)
                sides[impl] = zero, None, train_step, (full_gradients, full_state_dict)
            else:
                full = full_gradients_at_work, full_state_dict_at_work
                sides[impl] = *parallelize_at_work(model, args.lr, stage, mesh), train_step_at_work, full
        run.say(f"zero: stage {stage}, {n} ranks on {run.device.type}, {args.dtype}, {total:,} parameters")
        for impl, step in run.steps():
            model, optimizer, step_fn, full = sides[impl]
            x, y, valid = run.batch(step, share(args.batch, n, run.rank))
            with run.measure(impl, step, model, optimizer):
                loss, norm = step_fn(model, optimizer, x, y, valid, args.clip, args.accum)
            run.log(impl, step, loss, norm, *full, model)
        if "scratch" in run.impls:
            account(run, zero, args.accum)
        return run.finish(total, run.ledger[run.impls[0]].memory["parameters"] // run.dtype.itemsize)


if __name__ == "__main__":
    sys.exit(main())
