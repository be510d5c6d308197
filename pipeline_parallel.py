"""Pipeline parallelism: every rank holds some of the layers, and micro-batches flow through the ranks and back.

    1f1b, 2 stages, 4 micro-batches, B twice as long as F; time goes to the right, dots are the bubble

    stage 0   F0 F1 ......B0    F2 B1    F3 B2    ...B3
    stage 1   ...F0 B0    F1 B1    F2 B2    F3 B3    ......

A schedule is a list of actions for each stage (schedules.py): F forward, B backward, W the weight gradient where it is
split from B, U an update. From stage to stage go B T C numbers forward and as many backward. The tied embedding is held
by the first stage and by the last, which sum its gradients; the norm is summed over all stages.

    p stages, M micro-batches,   bubble                kept by stage s,           sent across
    v chunks of layers per rank  (F = B + W)           in micro-batches           a boundary
    plain GPT                    -                     all M at once              -
    naive                        (p-1) / p             1                          2 B T C
    gpipe                        (p-1) / (M + p-1)     M                          2 B T C
    1f1b                         (p-1) / (M + p-1)     p - s                      2 B T C
    interleaved                  (p-1) / (v M + p-1)   p + (p-1-2s) / v           2 B T C, v times as many boundaries
    zb-h1                        time (p-1)(F+B-W)     p, of which s wait for W   2 B T C
    pipedream                    that of 1f1b          p - s, and their weights   2 B T C

Each rank has about 1/p of parameters, gradients and AdamW states; the plain GPT has all of them.

Huang et al. 2019, "GPipe", arXiv:1811.06965; Harlap et al. 2018, "PipeDream", arXiv:1806.03377; Narayanan et al. 2021,
arXiv:2104.04473, section 2.2; Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241.
At work: torch.distributed.pipelining (section 3 below).

    torchrun --standalone --nproc_per_node=2 pipeline_parallel.py --schedule zb-h1
    python pipeline_parallel.py --simulate --schedule zb-h1 --pp 4 --micro 8 --times 1,1,1,0
"""
import contextlib
import json
import math
import statistics
import sys
import time
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from common import GPT, POSITIVE, Run, adamw, arguments, build, loss_sum, require, share
from measure import Trace
from schedules import (
    SCHEDULES,
    Action,
    bubble_rate,
    chunks,
    costs,
    grid,
    in_flight,
    is_split,
    longest,
    make_plans,
    simulate,
    source,
    transfers,
)

# ---- 1. the technique (copy this and schedules.py; they need only torch) -----


class Pipeline:
    """Runs one rank's part of a schedule, over modules that map one tensor to one tensor.

    modules: this rank's chunks. plans: all ranks'. boundary: size, dtype and device of what goes from stage to stage.
    sync(chunk, last) is the context in which a backward adds to a chunk's gradients; `last` says that it is the step's
    last one for this chunk, so that the reduction of gradients over data can start while it runs.
    """

    def __init__(self, modules, plans, group, boundary, sync=lambda chunk, last: contextlib.nullcontext()):
        self.modules, self.group, self.boundary, self.sync = modules, group, boundary, sync
        self.rank, self.ranks, self.last = dist.get_rank(group), len(plans), len(plans) * len(modules) - 1
        self.plan = plans[self.rank]
        self.split = is_split(self.plan)
        self.adds = "W" if self.split else "B"  # the kind of action that adds to .grad
        self.final = {a.chunk: a for a in self.plan if a.kind == self.adds}  # each chunk's last
        self.route = [move for move in transfers(plans) if self.rank in move[1:]]
        dist.barrier(group)  # NCCL wants all ranks of a group in its first call, and not all are in a transfer

    def step(self, inputs, loss_fn, update=None, clock=lambda: 0):
        """A batch forward and backward: .grad is added to. Returns this rank's sum of losses.

        inputs[m]: micro-batch m, for the first stage. loss_fn(output, m): its part of the loss, for the last stage.
        update(): what U does. self.played is [(action, start, end), ..] by clock(), self.most the most chunks kept.
        """
        self.todo, self.made, self.coming, self.going, self.kept = deque(self.route), {}, {}, None, {}
        self.played, self.most, loss = [], 0, torch.zeros((), device=self.boundary["device"])
        for a in self.plan:
            self.communicate()
            stage, out = a.chunk * self.ranks + self.rank, None
            there = source(a, stage, self.last)
            taken = [] if there is None else [self.take((a.kind, a.microbatch, there))]
            start = clock()
            if a.kind == "F" and stage == self.last:
                loss = loss + self.forward(a, *taken or [inputs[a.microbatch]], loss_fn)
            elif a.kind == "F":
                out = self.forward(a, *taken or [inputs[a.microbatch]])
            elif a.kind == "U":
                update()
            else:
                with self.sync(a.chunk, a == self.final[a.chunk]) if a.kind == self.adds else contextlib.nullcontext():
                    out = self.backward(a, *taken) if a.kind == "B" else self.weights(a)
            if out is not None:
                self.made[a.kind, a.microbatch, stage] = out
            self.played.append((a, start, clock()))
            self.most = max(self.most, len(self.kept))
        self.communicate()
        self.finish_sending()
        return loss

    def forward(self, a, x, loss_fn=None):
        x, later = x.requires_grad_(x.is_floating_point()), []
        with SplitLinears(later) if self.split else contextlib.nullcontext():
            y = self.modules[a.chunk](x)
            y = loss_fn(y, a.microbatch) if loss_fn else y
        self.kept[a.microbatch, a.chunk] = x, get_gradient_edge(y), later  # not y: once sent, it is free
        return y.detach()

    def backward(self, a, grad=None):
        x, edge, later = self.kept.pop((a.microbatch, a.chunk))
        if not self.split:
            torch.autograd.backward(edge, grad)
            return x.grad
        leaves = [x] * x.requires_grad + [p for p in self.modules[a.chunk].parameters() if p.requires_grad]
        grads = torch.autograd.grad(edge, leaves, grad, allow_unused=True)
        # those of norms and embeddings are made already, but all go to .grad in W: hooks see each parameter once
        later += [(leaf, g) for leaf, g in zip(leaves, grads) if leaf is not x and g is not None]
        self.kept[a.microbatch, a.chunk] = later
        return grads[0] if x.requires_grad else None

    def weights(self, a):
        torch.autograd.backward(*zip(*self.kept.pop((a.microbatch, a.chunk))))

    def communicate(self):
        """Start this rank's transfers in the order of all, up to the first whose tensor it has yet to make."""
        while self.todo and (self.todo[0][1] != self.rank or self.todo[0][0] in self.made):
            ops, out, key = [], None, None
            if self.todo[0][1] == self.rank:
                made, _, there = self.todo.popleft()
                self.finish_sending()
                out = self.made.pop(made).contiguous()
                assert out.shape == self.boundary["size"], f"{made}: {tuple(out.shape)}, not {self.boundary['size']}"
                ops.append(dist.P2POp(dist.isend, out, group=self.group, group_peer=there))  # here -> there too
            if self.todo and self.todo[0][1] != self.rank:  # one receive, since NCCL ends a batch as a whole
                key, there, _ = self.todo.popleft()
                buffer = torch.empty(**self.boundary)
                ops.append(dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=there))  # there -> here too
            works = dist.batch_isend_irecv(ops)
            if out is not None:
                self.going = works[0], out
            if key:
                self.coming[key] = works[-1], buffer

    def finish_sending(self):
        """Wait for the last send, and let go of its tensor, which nobody else holds."""
        if self.going:
            self.going[0].wait()
        self.going = None

    def take(self, key):
        if self.ranks == 1:
            return self.made.pop(key)
        work, tensor = self.coming.pop(key)
        work.wait()
        return tensor


class WeightGradient(torch.autograd.Function):
    """W of a Linear: a root without a value, whose backward makes the gradients of weight and bias."""

    @staticmethod
    def forward(ctx, weight, bias, x, grad):
        ctx.save_for_backward(x, grad)
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        x, grad = (t.flatten(0, -2) for t in ctx.saved_tensors)
        return grad.T @ x, grad.sum(0) if ctx.needs_input_grad[1] else None, None, None


class SplitLinear(torch.autograd.Function):
    """F.linear whose backward is B alone; it leaves a WeightGradient in `later`."""

    @staticmethod
    def forward(ctx, later, x, weight, bias=None):
        ctx.later, ctx.weight, ctx.bias = later, weight, bias
        ctx.save_for_backward(x)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            root = WeightGradient.apply(ctx.weight, ctx.bias, ctx.saved_tensors[0].detach(), grad)
        ctx.later.append((root, None))
        return None, grad @ ctx.weight, None, None


class SplitLinears(TorchFunctionMode):
    """While it is entered, every F.linear is a SplitLinear, whatever module calls it."""

    def __init__(self, later):
        super().__init__()
        self.later = later

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and torch.is_grad_enabled() and args[1].requires_grad:
            return SplitLinear.apply(self.later, *args)
        return func(*args, **(kwargs or {}))


class Stash(nn.Module):
    """PipeDream's weight stashing: a micro-batch's backward uses the weights of its forward, copied until then."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        weights = {name: p.clone() for name, p in self.module.named_parameters()}
        return torch.func.functional_call(self.module, weights, (x,))


# ---- 2. the toy GPT, parallelized --------------------------------------------


class Stage(nn.Module):
    """The plain GPT's modules of one stage, by the names that they have there."""

    def __init__(self, model, stage, stages):
        super().__init__()
        self.first, self.last = stage == 0, stage == stages - 1
        if self.first:
            self.tok, self.pos = model.tok, model.pos
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in share(len(model.blocks), stages, stage)})
        if self.last:
            self.norm, self.head = model.norm, model.head

    embed = GPT.embed

    def forward(self, x):  # (B/M, T) first, (B/M, T, C) else -> (B/M, T, C), last (B/M, T, V)
        x = self.embed(x) if self.first else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def carve(model, group, virtual):
    """The plain GPT -> this rank's stages of it, in a ModuleList that also says what every rank knows of the others."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    everything = [Stage(model, stage, ranks * virtual) for stage in range(ranks * virtual)]
    stages = nn.ModuleList(everything[rank::ranks])
    stages.group, stages.rank, stages.ranks = group, rank, ranks
    stages.homes = {n: (i % ranks, t.shape) for i, part in enumerate(everything) for n, t in part.state_dict().items()}
    stages.ends = dist.new_group(sorted({0, ranks - 1}))  # first and last; every rank must make it
    stages.tied = [model.tok.weight] if ranks > 1 and rank in (0, ranks - 1) else []
    return stages


def parallelize(model, plans, group, boundary, clock):
    stages, size = carve(model, group, chunks(plans[0])), boundary["size"][0]
    stale = any(a.kind == "U" for plan in plans for a in plan)
    pipeline = Pipeline([Stash(s) for s in stages] if stale else list(stages), plans, group, boundary)

    def run(x, y, valid, update):
        targets = y.split(size)
        return pipeline.step(x.split(size), lambda out, m: loss_sum(out, targets[m]) / valid, update, clock)
    stages.pipeline, stages.run = pipeline, run
    return stages


def gather(model, mine):
    """{name: tensor} on each stage -> of all stages, on every rank."""
    like = next(iter(mine.values()))
    whole = {n: mine[n].contiguous() if n in mine else like.new_empty(shape) for n, (_, shape) in model.homes.items()}
    for name, (rank, _) in model.homes.items():
        dist.broadcast(whole[name], group=model.group, group_src=rank)  # on one stage -> replicated
    return whole


def full_state_dict(model):
    return gather(model, {n: t for stage in model for n, t in stage.state_dict().items()})


def full_gradients(model):
    mine = {n: p.grad for stage in model for n, p in stage.named_parameters(remove_duplicate=False)}
    return {n: g for n, g in gather(model, mine).items() if n != "head.weight"}  # is tok.weight


def clip_gradients(model, clip):
    """-> the norm over all stages; the tied embedding counts on the first."""
    counted = [p.grad for p in model.parameters() if not (model.rank and any(p is t for t in model.tied))]
    square = nn.utils.get_total_norm(counted).square()
    dist.all_reduce(square, group=model.group)  # partial -> replicated
    nn.utils.clip_grads_with_norm_(model.parameters(), clip or math.inf, square.sqrt())
    return square.sqrt()


def update(stages, tied, optimizer, clip):
    """PipeDream's U. Each of `stages`, lists of parameters, has its own norm: none waits to hear the others'. The tied
    embedding, which two stages would have to agree on, waits for the end of the step."""
    waiting = [p.grad for p in tied]
    for p in tied:
        p.grad = None
    for parameters in stages:
        nn.utils.clip_grad_norm_(parameters, clip or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    for p, grad in zip(tied, waiting):
        p.grad = grad


def train_step(model, optimizer, x, y, valid, clip):
    """x, y: the whole batch (B, T); the first stage needs x, the last y -> this rank's part of the loss, the norm."""
    optimizer.zero_grad()
    loss = model.run(x, y, valid, lambda: update([list(model.parameters())], model.tied, optimizer, clip))
    for p in model.tied:
        dist.all_reduce(p.grad, group=model.ends)  # partial -> replicated on the first and the last stage
    norm = clip_gradients(model, clip)
    optimizer.step()
    return loss, norm


def plain_pipedream(run, plans):
    """PipeDream in one process -> Trace. A micro-batch meets each stage's weights as old as that stage's plan says."""
    args, M, p = run.args, run.args.micro, len(plans)
    model, trace = build(run.cfg, args.seed, run.device, run.dtype), Trace()
    optimizer, tied = adamw(model.parameters(), args.lr), [model.tok.weight] * (p > 1)
    stages = [list(Stage(model, stage, p).parameters()) for stage in range(p)]
    seen = [[sum(a.kind == "U" for a in plan[:plan.index(Action("F", m))]) for m in range(M)] for plan in plans]

    def load(stage, values):
        for parameter, value in zip(stages[stage], values):
            parameter.data = value.clone()
    for step in range(run.last + 1):
        (x, y, valid), loss, versions = run.batch(step), 0, []
        optimizer.zero_grad()
        for m, (xs, ys) in enumerate(zip(x.chunk(M), y.chunk(M))):
            versions.append([[parameter.data for parameter in parameters] for parameters in stages])
            for stage in range(p):
                load(stage, versions[seen[stage][m]][stage])
            part = loss_sum(model(xs), ys) / valid
            part.backward()
            loss += part.detach()
            for stage in range(p):
                load(stage, versions[m][stage])
            if m < M - 1:
                update(stages, tied, optimizer, args.clip)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
        optimizer.step()
        trace.log(step, loss, norm)
        if run.keeps(step):
            trace.keep(step, {n: q.grad for n, q in model.named_parameters()}, model.state_dict())
    return trace


# ---- 3. at work: the same with torch's own API -------------------------------

AT_WORK = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
           "zb-h1": "ScheduleInterleavedZeroBubble"}


def parallelize_at_work(model, plans, group, boundary, name):
    from torch.distributed import pipelining  # takes as long to import as all the rest
    stages, total = carve(model, group, chunks(plans[0])), len(plans) * chunks(plans[0])
    edge = torch.empty(**boundary, requires_grad=True)  # told all shapes, torch need not ask ranks, which takes NumPy
    ids = edge.new_empty(edge.shape[:2], dtype=torch.int64)
    logits = edge.new_empty(*edge.shape[:2], model.head.out_features)
    parts = [pipelining.PipelineStage(
        stage, stages.rank + i * stages.ranks, total, edge.device, group=group,
        input_args=ids if stage.first else edge, output_args=logits if stage.last else edge)
        for i, stage in enumerate(stages)]
    first, last, valid_targets = parts[0].is_first, parts[-1].is_last, [1]
    schedule = getattr(pipelining, AT_WORK[name])(
        parts if name in ("interleaved", "zb-h1") else parts[0], len({a.microbatch for a in plans[0]}),
        loss_fn=lambda out, targets: loss_sum(out, targets) / valid_targets[0], scale_grads=False)  # a sum

    def run(x, y, valid, _):
        valid_targets[0], losses = valid, []
        schedule.step(*[x] * first, target=y if last else None, losses=losses if last else None, return_outputs=False)
        return sum(losses, start=torch.zeros((), device=x.device))
    stages.run = run
    return stages


# ---- 4. run ------------------------------------------------------------------


def settings():
    """-> args, all ranks' plans, and the simulation of them: what is wrong with either is said before a run starts."""
    args = arguments(
        __doc__, schedule=("1f1b", "order of the work", tuple(SCHEDULES)), micro=(4, "M, micro-batches", POSITIVE),
        virtual=(2, "v, chunks of layers per rank (interleaved only)", POSITIVE),
        simulate=(False, "play the schedule without ranks"), pp=(int, "p, stages (simulation only)", POSITIVE),
        times=(str, "F,B,W,COMM per stage and micro-batch (simulation only; 1,1,1,0)"))
    name, M, p, L = args.schedule, args.micro, args.pp or args.world_size, args.cfg.layers
    require(args.simulate or not (args.pp or args.times), "--pp and --times are for --simulate only")
    require(name != "interleaved" or M % p == 0, f"--micro {M}: interleaved needs a multiple of the {p} stages")
    try:
        *times, comm = (float(t) for t in (args.times or "1,1,1,0").split(","))
        require(len(times) == 3 and min(*times, comm) >= 0, f"--times {args.times}: four are needed, none below 0")
        plans = make_plans(name, p, M, args.virtual)
        played = simulate(plans, costs(plans, *times), comm)
    except ValueError:
        require(False, f"--times {args.times}: F,B,W,COMM are four numbers")
    except RuntimeError as error:
        require(False, f"--schedule {name}: {error}")
    if not args.simulate:
        stages = p * chunks(plans[0])
        require(stages <= L, f"--layers {L} for {stages} stages: give each at least one")
        require(args.batch % M == 0, f"--batch {args.batch} does not divide into --micro {M} micro-batches")
        require(args.impl == "scratch" or name in AT_WORK, f"--schedule {name}: torch has {', '.join(AT_WORK)} only")
        require(args.impl == "scratch" or not args.dry_run, "--dry-run needs --impl scratch: torch's asks other ranks")
    return args, plans, played


def simulation(args, plans, played):
    """--simulate: no ranks, no model."""
    result = dict(bubble_rate=bubble_rate(played), in_flight=[in_flight(plan) for plan in plans], cost=longest(played))
    print(grid(played))
    print(f"{args.schedule}: {result['cost']:g} from first to last, bubble rate {result['bubble_rate']:.4f},",
          "micro-batches in flight by stage", *(f"{n:g}" for n in result["in_flight"]))
    if args.json:
        own = {k: value for k, value in vars(args).items() if k != "cfg"}
        Path(args.json).write_text(json.dumps(dict(script="pipeline_parallel", args=own, **result), indent=1))
    return 0


def pictures(run, plans, mine):
    """A step as it was, below the simulation of it with the median time of each rank's actions of a kind."""
    run.store.set(f"played {run.rank}", json.dumps(mine))
    if run.rank:
        return
    measured = [[(Action(*a), start, end) for a, start, end in json.loads(run.store.get(f"played {rank}"))]
                for rank in range(run.world_size)]
    times = {}
    for rank, done in enumerate(measured):
        for a, start, end in done:
            times.setdefault((rank, a.kind, a.chunk), []).append(end - start)
    planned = simulate(plans, lambda rank, a: statistics.median(times[rank, a.kind, a.chunk]))
    for word, played in ("planned", planned), ("measured", measured):
        run.say(f"{word}: {1e3 * longest(played):.1f} ms, bubble {bubble_rate(played):.3f}\n{grid(played)}")
    run.extra.update(bubble_rate=bubble_rate(measured), planned_bubble_rate=bubble_rate(planned),
                     measured_ms=1e3 * longest(measured), planned_ms=1e3 * longest(planned))


def accounts(run, plans, model):
    args, cfg, p, v, r = run.args, run.cfg, len(plans), chunks(plans[0]), run.rank
    b, ledger = run.dtype.itemsize, run.ledger[run.impls[0]]
    held, sent = ledger.memory, {kind: c["wire"] for kind, c in ledger.collectives.items()}
    sizes, crossed = [q.numel() for q in model.parameters()], (p > 1) * (2 * v - (r == 0) - (r == p - 1))
    run.textbook("wire send", f"b B T C, {crossed} times: v forward and v backward, but nothing beyond the ends",
                 b * crossed * args.batch * cfg.seq * cfg.width, sent.get("send", 0))
    run.textbook("wire all_reduce", "b V C on first and last for the tied embedding + 2 (p-1)/p b for the norm",
                 b * (len(model.tied) * cfg.vocab * cfg.width + 2 * (p - 1) / p), sent.get("all_reduce", 0))
    run.textbook("parameters held", "b P, P this rank's", b * sum(sizes), held["parameters"])
    run.textbook("gradients held", "b P", b * sum(sizes), held["gradients"])
    run.textbook("AdamW states held", "2 b P + 4 per tensor", 2 * b * sum(sizes) + 4 * len(sizes), held["optimizer"])
    if run.impls[0] == "scratch":
        run.textbook("micro-batches kept", "the schedule's", in_flight(plans[r]), model.pipeline.most / v)


def main():
    args, plans, played = settings()
    if args.simulate:
        return simulation(args, plans, played)
    run, sides = Run(args), {}
    boundary = dict(size=(args.batch // args.micro, run.cfg.seq, run.cfg.width), dtype=run.dtype, device=run.device)

    def clock():
        if watched and run.device.type == "cuda":
            torch.cuda.synchronize()
        return time.time()
    with run:
        for impl in run.impls:
            model = build(run.cfg, args.seed, run.device, run.dtype)
            total = sum(p.numel() for p in model.parameters())
            if impl == "scratch":
                model = parallelize(model, plans, None, boundary, clock)
            else:
                model = parallelize_at_work(model, plans, None, boundary, args.schedule)
            sides[impl] = model, adamw(model.parameters(), args.lr)
        own = sum(p.numel() for p in model.parameters())
        run.say(f"pipeline_parallel: {args.schedule}, {len(plans)} ranks on {run.device.type}, {args.dtype}, "
                f"{total:,} parameters, {own:,} of them here")
        run.extra.update(bubble_rate=bubble_rate(played), in_flight=[in_flight(plan) for plan in plans])
        for impl, step in run.steps():
            model, optimizer = sides[impl]
            x, y, valid = run.batch(step)
            watched = impl == "scratch" and step == max(0, run.last - 1) and not run.dry
            with run.measure(impl, step, model, optimizer):
                loss, norm = train_step(model, optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss, norm)
            if run.keeps(step):
                run.trace[impl].keep(step, full_gradients(model), full_state_dict(model))
            if watched:
                pictures(run, plans, model.pipeline.played)
        accounts(run, plans, sides[run.impls[0]][0])
        stale = args.schedule == "pipedream" and args.check and run.rank == 0 and not run.dry
        return run.finish(total, own, plain_pipedream(run, plans) if stale else None)


if __name__ == "__main__":
    sys.exit(main())
