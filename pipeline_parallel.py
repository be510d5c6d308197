"""Pipeline parallelism: every rank holds some of the layers; micro-batches flow through the ranks, forward and back.

    1f1b, 2 stages, 4 micro-batches, B + W = 2 F; time to the right, dots are the bubble
    stage 0, layers 0 1    F0 F1 ......B0    F2 B1    F3 B2    ...B3
    stage 1, layers 2 3    ...F0 B0    F1 B1    F2 B2    F3 B3    ...

A schedule is a list of actions per stage: F forward, B backward, W the weight gradient where it is split off, U update.
The simulator plays the lists with given times, and the order in which it sees data move is the order in which all ranks
send and receive; the executor runs them. p stages, M micro-batches, v chunks of layers per rank, F = B + W:

    schedule       bubble of the whole      micro-batches in flight on stage s
    plain GPT      0                        all of the batch at once
    naive          (p-1) / p                1
    gpipe          (p-1) / (M+p-1)          M
    1f1b           (p-1) / (M+p-1)          p - s
    interleaved    (p-1) / (v M+p-1)        p + (p-1-2s) / v, but sends v times as much
    zb-h1          time (p-1)(F+B-W)        p: s of them wait for W only
    pipedream      none but fill and drain  p - s, and as many versions of the weights

A boundary between stages costs B T C numbers forward and as many backward; the tied embedding, held by the first and
the last stage, one all-reduce of its gradient between these two. Parameters, gradients, AdamW: 1/p of the plain GPT's.

Huang et al. 2019 (GPipe), arXiv:1811.06965; Harlap et al. 2018 (PipeDream), arXiv:1806.03377; Narayanan et al. 2021
(interleaved), arXiv:2104.04473, section 2.2; Qi et al. 2024 (zero bubble), arXiv:2401.10241, section 2.
At work: torch.distributed.pipelining (section 3 below).

    torchrun --standalone --nproc_per_node=2 pipeline_parallel.py --schedule 1f1b
    python pipeline_parallel.py --simulate --schedule zb-h1 --pp 4 --micro 8 --times 1,1,1,0
"""
import contextlib
import json
import math
import statistics
import sys
import time
from collections import deque, namedtuple
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from common import GPT, POSITIVE, Run, Trace, adamw, arguments, build, loss_sum, require, share

# ---- 1. the technique (copy this; it needs only torch) -----------------------

# kind F, B, W or U. Chunk c of rank r is stage c * ranks + r of the model. A plan without W does B and W at once
Action = namedtuple("Action", "kind microbatch chunk", defaults=(0,))


def turns(order, warmup, virtual=1):
    """As many forwards as `warmup` says, then a forward and a backward in turn, then the backwards that are left."""
    plan = []
    for i in range(len(order) + warmup):
        if i < len(order):
            plan.append(Action("F", *order[i]))
        if i >= warmup:
            microbatch, chunk = order[i - warmup]
            plan.append(Action("B", microbatch, virtual - 1 - chunk))
    return plan


def naive(stage, stages, microbatches):
    return turns([(m, 0) for m in range(microbatches)], 0)


def gpipe(stage, stages, microbatches):
    return turns([(m, 0) for m in range(microbatches)], microbatches)


def one_f_one_b(stage, stages, microbatches):
    return turns([(m, 0) for m in range(microbatches)], min(microbatches, stages - 1 - stage))


def interleaved(stage, stages, microbatches, virtual):
    """`stages` micro-batches go through a chunk, then through the next (Narayanan 2021, fig. 4)."""
    rounds = range(0, microbatches, stages)
    order = [(m, c) for first in rounds for c in range(virtual) for m in range(first, first + stages)]
    return turns(order, min(len(order), (virtual - 1) * stages + 2 * (stages - 1 - stage)), virtual)


def zb_h1(stage, stages, microbatches):
    """1F1B whose W comes `stage` micro-batches late: B goes upstream sooner, W fills the end (Qi 2024, fig. 3)."""
    plan = []
    for a in one_f_one_b(stage, stages, microbatches):
        plan.append(a)
        if a.kind == "B" and a.microbatch >= stage:
            plan.append(Action("W", a.microbatch - stage))
    return plan + [Action("W", m) for m in range(max(0, microbatches - stage), microbatches)]


def pipedream(stage, stages, microbatches):
    """1F1B with an update after every backward; the last one's is the step's own (Harlap 2018, section 3.3)."""
    plan = one_f_one_b(stage, stages, microbatches)
    return [b for a in plan for b in ([a, Action("U", a.microbatch)] if a.kind == "B" else [a])][:-1]


SCHEDULES = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb-h1": zb_h1,
             "pipedream": pipedream}


def make_plans(name, stages, microbatches, virtual):
    more = (virtual,) if name == "interleaved" else ()
    return [SCHEDULES[name](stage, stages, microbatches, *more) for stage in range(stages)]


def needs(a, stage, last):
    """What must have been done before an action: [(kind, micro-batch, stage)]. Another stage's is always of its kind."""
    m = a.microbatch
    if a.kind == "F":
        return [("F", m, stage - 1)] if stage else []
    if a.kind == "B":
        return [("F", m, stage)] + ([("B", m, stage + 1)] if stage < last else [])
    return [("B", m, stage)]


def simulate(plans, cost, comm=0.0):
    """All ranks' plans, cost(rank, action) and comm in one unit of time -> per rank [(action, start, end), ..].

    Raises RuntimeError with each rank's first stuck action if the plans deadlock.
    """
    ranks, last = len(plans), len(plans) * (1 + max(a.chunk for a in plans[0])) - 1
    ends, played, moved = {}, [[] for _ in plans], True
    while moved:
        moved = False
        for rank, (plan, done) in enumerate(zip(plans, played)):
            for a in plan[len(done):]:
                stage = a.chunk * ranks + rank
                wanted = needs(a, stage, last)
                if any(key not in ends for key in wanted):
                    break
                start = max([done[-1][2] if done else 0.0]
                            + [ends[key] + comm * (key[2] % ranks != rank) for key in wanted])
                ends[a.kind, a.microbatch, stage] = start + cost(rank, a)
                done.append((a, start, start + cost(rank, a)))
                moved = True
    stuck = [(rank, plan[len(done)]) for rank, (plan, done) in enumerate(zip(plans, played)) if len(done) < len(plan)]
    if stuck:
        raise RuntimeError("deadlock: " + ", ".join(f"stage {r} waits at {a.kind}{a.microbatch}" for r, a in stuck))
    return played


def transfers(plans):
    """-> [((kind, micro-batch, stage that made it), from rank, to rank), ..], one order that suits all ranks.

    It is the order of a simulation: a transfer never depends on a later one, so ranks that keep to it cannot block.
    """
    ranks, moves = len(plans), []
    played = simulate(plans, lambda rank, a: 1.0)
    ends = {(a.kind, a.microbatch, a.chunk * ranks + r): end for r, done in enumerate(played) for a, _, end in done}
    last = max(stage for _, _, stage in ends)
    for rank, plan in enumerate(plans):
        for a in plan:
            for key in needs(a, a.chunk * ranks + rank, last):
                if key[2] % ranks != rank:
                    moves.append((ends[key], key, key[2] % ranks, rank))
    return [move[1:] for move in sorted(moves)]


def in_flight(plan):
    """The most micro-batches whose activations a rank keeps at a time; one chunk's count as 1/v of a micro-batch."""
    now = most = 0
    final = "W" if any(a.kind == "W" for a in plan) else "B"
    for a in plan:
        now += (a.kind == "F") - (a.kind == final)
        most = max(most, now)
    return most / (1 + max(a.chunk for a in plan))


def bubble_rate(played):
    """Idle part of the longest span that a rank is at work, from its first start to its last end (Qi 2024, section 4)."""
    longest = max(done[-1][2] - done[0][1] for done in played)
    busy = sum(end - start for done in played for _, start, end in done) / len(played)
    return (longest - busy) / longest


def grid(played, width=110):
    """Ranks as rows, time to the right, idle as dots -> str. Odd chunks are written small."""
    spans = [(r, a, start, end) for r, done in enumerate(played) for a, start, end in done if end > start]
    first, total = min(s for _, _, s, _ in spans), max(e for *_, e in spans) - min(s for _, _, s, _ in spans)
    label = max(len(f"{a.kind}{a.microbatch} ") for _, a, _, _ in spans)
    scale = min(label / min(e - s for _, _, s, e in spans), max(width, 2 * len(played[0])) / total)
    rows = [["."] * math.ceil(scale * total) for _ in played]
    for r, a, start, end in spans:
        text = f"{a.kind if a.chunk % 2 == 0 else a.kind.lower()}{a.microbatch}"
        left, right = round(scale * (start - first)), round(scale * (end - first))
        rows[r][left:right] = text.ljust(right - left)[:right - left]
    return "\n".join(f"  stage {r}  " + "".join(row) for r, row in enumerate(rows))


class WeightGradient(torch.autograd.Function):
    """Nothing forward. backward: what a Linear's weight and bias get from its input and its output's gradient."""

    @staticmethod
    def forward(ctx, weight, bias, x, grad):
        ctx.save_for_backward(x, grad)
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        x, grad = (t.flatten(0, -2) for t in ctx.saved_tensors)
        return grad.T @ x, grad.sum(0) if ctx.needs_input_grad[1] else None, None, None


class SplitLinear(torch.autograd.Function):
    """F.linear whose backward gives the input's gradient (B) and puts a WeightGradient into `later` (W)."""

    @staticmethod
    def forward(ctx, later, x, weight, bias=None):
        ctx.later, ctx.weight, ctx.bias = later, weight, bias
        ctx.save_for_backward(x)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            ctx.later.append((WeightGradient.apply(ctx.weight, ctx.bias, ctx.saved_tensors[0].detach(), grad), None))
        return None, grad @ ctx.weight, None, None


class SplitLinears(TorchFunctionMode):
    """Within it, every F.linear of any module is a SplitLinear."""

    def __init__(self, later):
        super().__init__()
        self.later = later

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and torch.is_grad_enabled() and not kwargs:
            return SplitLinear.apply(self.later, *args)
        return func(*args, **(kwargs or {}))


class Pipeline:
    """Runs one rank's part of a schedule over its chunks, modules that map one tensor to one tensor.

    chunks: this rank's, in order; plans: all ranks'; boundary: size, dtype and device of what goes between stages, the
    same everywhere. sync(chunk, last) is the context in which a backward adds to the gradients of a chunk; last says that
    it is the step's last for this chunk, so that a data-parallel reduction can start within it.
    """

    def __init__(self, chunks, plans, group, boundary, sync=lambda chunk, last: contextlib.nullcontext()):
        self.chunks, self.group, self.boundary, self.sync = chunks, group, boundary, sync
        self.rank, self.ranks = dist.get_rank(group), len(plans)
        self.plan, self.last = plans[self.rank], len(plans) * len(chunks) - 1
        self.split = any(a.kind == "W" for a in self.plan)
        final = {a.chunk: i for i, a in enumerate(self.plan) if a.kind == ("W" if self.split else "B")}
        self.final = set(final.values())
        self.route = [move for move in transfers(plans) if self.rank in move[1:]]
        dist.barrier(group)  # NCCL: the first call in a group must be one that all its ranks make

    def step(self, inputs, loss_fn, update=None, clock=None):
        """inputs: the M micro-batches, for the first stage. loss_fn(output, m) -> the last stage's part of the loss.

        -> this rank's sum of losses, and [(action, start, end)] if there is a clock(). update() carries out a U.
        """
        self.todo, self.made, self.arrived, self.sending = deque(self.route), {}, {}, None
        self.kept, self.later, played = {}, {}, []
        loss = torch.zeros((), dtype=self.boundary["dtype"], device=self.boundary["device"])
        for i, a in enumerate(self.plan):
            self.communicate()
            stage, out = a.chunk * self.ranks + self.rank, None
            got = [self.take(key) for key in needs(a, stage, self.last) if key[0] == a.kind]  # from another stage
            start = clock() if clock else 0
            if a.kind == "F":
                out = self.forward(a, got[0].requires_grad_() if got else inputs[a.microbatch], loss_fn)
                if stage == self.last:
                    loss, out = loss + out, None
            elif a.kind == "U":
                update()
            else:
                with self.sync(a.chunk, i in self.final):
                    out = self.backward(a, *got) if a.kind == "B" else self.weights(a)
            if out is not None:  # one rank alone hands it to itself
                self.made[a.kind, a.microbatch, stage] = out
            played.append((a, start, clock() if clock else 0))
        self.communicate()
        self.finish_send()
        return loss, played

    def forward(self, a, x, loss_fn):
        later = []
        with SplitLinears(later) if self.split else contextlib.nullcontext():
            y = self.chunks[a.chunk](x)
            if a.chunk * self.ranks + self.rank == self.last:
                y = loss_fn(y, a.microbatch)
        self.kept[a.microbatch, a.chunk] = x, get_gradient_edge(y), later  # not y: it is free once it is sent
        return y.detach()

    def backward(self, a, grad=None):
        x, edge, later = self.kept.pop((a.microbatch, a.chunk))
        if not self.split:
            torch.autograd.backward(edge, grad)
            return x.grad
        leaves = [x] * x.requires_grad + [p for p in self.chunks[a.chunk].parameters() if p.requires_grad]
        grads = torch.autograd.grad(edge, leaves, grad, allow_unused=True)
        later += [(leaf, g) for leaf, g in zip(leaves, grads) if leaf is not x and g is not None]  # norms, embeddings
        self.later[a.microbatch, a.chunk] = later
        return grads[0] if x.requires_grad else None

    def weights(self, a):
        torch.autograd.backward(*zip(*self.later.pop((a.microbatch, a.chunk))))

    def communicate(self):
        """Start this rank's next transfers, up to the first whose tensor it has yet to make."""
        while self.todo and (self.todo[0][1] != self.rank or self.todo[0][0] in self.made):
            ops, sent, key = [], None, None
            if self.todo[0][1] == self.rank:
                made, _, target = self.todo.popleft()
                sent = self.made.pop(made).contiguous()
                assert sent.shape == self.boundary["size"], f"{made}: {tuple(sent.shape)}, not {self.boundary['size']}"
                ops.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=target))  # here -> there as well
            if self.todo and self.todo[0][1] != self.rank:  # one receive: NCCL completes a batch as a whole
                key, source, _ = self.todo.popleft()
                buffer = torch.empty(**self.boundary)
                ops.append(dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=source))  # there -> here as well
            if sent is not None:
                self.finish_send()
            works = dist.batch_isend_irecv(ops)
            if sent is not None:
                self.sending = works[0], sent
            if key:
                self.arrived[key] = works[-1], buffer

    def finish_send(self):
        """Wait for the last send, so that its tensor is free."""
        if self.sending:
            self.sending[0].wait()
        self.sending = None

    def take(self, key):
        if self.ranks == 1:
            return self.made.pop(key)  # from itself
        work, tensor = self.arrived.pop(key)
        work.wait()
        return tensor


class Stash(nn.Module):
    """PipeDream's weight stashing: a micro-batch's backward uses the weights of its forward, updated since or not.

    Whoever updates a parameter in place while micro-batches are in flight gives it new memory first: p.data = p.data.clone().
    """

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        weights = {name: Version.apply(p) for name, p in self.module.named_parameters()}
        return torch.func.functional_call(self.module, weights, (x,))


class Version(torch.autograd.Function):
    """A parameter as it is now; its gradient goes to the parameter as it will be then."""

    @staticmethod
    def forward(ctx, p):
        return p.data  # .data, not detach(): autograd is not to see that p is updated meanwhile

    @staticmethod
    def backward(ctx, grad):
        return grad


# ---- 2. the toy GPT, parallelized --------------------------------------------


def home(name, layers, stages):
    """A parameter of the plain GPT -> the stage that holds it."""
    part, *rest = name.split(".")
    if part == "blocks":
        return next(stage for stage in range(stages) if int(rest[0]) in share(layers, stages, stage))
    return 0 if part in ("tok", "pos") else stages - 1


class Stage(nn.Module):
    """The modules of the plain GPT that live on one stage, under their names there."""

    def __init__(self, model, stage, stages):
        super().__init__()
        parts = {name: part for name, part in model.named_children() if name != "blocks"}
        blocks = {str(i): block for i, block in enumerate(model.blocks)}
        self.first, self.last = stage == 0, stage == stages - 1
        for name, part in parts.items():
            if home(name, len(blocks), stages) == stage:
                self.add_module(name, part)
        self.blocks = nn.ModuleDict({i: b for i, b in blocks.items() if home(f"blocks.{i}", len(blocks), stages) == stage})

    embed = GPT.embed

    def forward(self, x):  # (B/M, T) on the first stage, (B/M, T, C) on others -> (B/M, T, C), on the last (B/M, T, V)
        x = self.embed(x) if self.first else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


class Stages(nn.ModuleList):
    """One rank's stages, and what every rank knows of the whole. run: how a step's forwards and backwards are done."""

    def __init__(self, model, group, virtual):
        self_rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        layers, n = len(model.blocks), ranks * virtual
        super().__init__(Stage(model, stage, n) for stage in range(self_rank, n, ranks))
        self.group, self.rank, self.ranks, self.run, self.clock, self.played = group, self_rank, ranks, None, None, []
        self.homes = {name: (home(name, layers, n) % ranks, t.shape) for name, t in model.state_dict().items()}
        self.pair = dist.new_group(sorted({0, ranks - 1}))
        self.tied = model.tok.weight if ranks > 1 and self_rank in (0, ranks - 1) else None


def parallelize(model, plans, group, boundary):
    """The plain GPT -> this rank's stages of it, run by a Pipeline."""
    stages = Stages(model, group, 1 + max(a.chunk for a in plans[0]))
    stale = any(a.kind == "U" for plan in plans for a in plan)
    pipeline = Pipeline([Stash(s) for s in stages] if stale else list(stages), plans, group, boundary)

    def run(x, y, valid, update):
        size = boundary["size"][0]
        xs, ys = x.split(size), y.split(size)
        loss, stages.played = pipeline.step(xs, lambda out, m: loss_sum(out, ys[m]) / valid, update, stages.clock)
        return loss
    stages.run = run
    return stages


def gather(model, mine):
    """{name: tensor} of every stage -> of all stages, on every rank."""
    whole, like = {}, next(model.parameters())
    for name, (rank, shape) in model.homes.items():
        whole[name] = mine[name].contiguous() if rank == model.rank else like.new_empty(shape)
        dist.broadcast(whole[name], group=model.group, group_src=rank)  # on one stage -> replicated
    return whole


def full_state_dict(model):
    return gather(model, {name: t for stage in model for name, t in stage.state_dict().items()})


def full_gradients(model):
    grads = gather(model, {name: p.grad for stage in model for name, p in stage.named_parameters(remove_duplicate=False)})
    return {name: g for name, g in grads.items() if name != "head.weight"}  # tied: tok.weight's


def clip_gradients(model, clip):
    """-> the norm over all stages, the tied embedding counted once."""
    counted = [p.grad for p in model.parameters() if p.grad is not None and not (p is model.tied and model.rank)]
    square = nn.utils.get_total_norm(counted).square()
    dist.all_reduce(square, group=model.group)  # partial -> replicated
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), clip or math.inf, norm)
    return norm


def update(model, optimizer, clip):
    """PipeDream's, within a step: this stage's own. What two stages share waits for the end of the step."""
    shared = None if model.tied is None else model.tied.grad
    if shared is not None:
        model.tied.grad = None
    nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    for p in model.parameters():
        p.data = p.data.clone()
    optimizer.step()
    optimizer.zero_grad()
    if shared is not None:
        model.tied.grad = shared


def train_step(model, optimizer, x, y, valid, clip):
    """x, y: the whole batch (B, T) -> this rank's part of the loss (the last stage's is all of it), gradient norm."""
    optimizer.zero_grad()
    loss = model.run(x, y, valid, lambda: update(model, optimizer, clip))
    if model.tied is not None:
        dist.all_reduce(model.tied.grad, group=model.pair)  # partial -> replicated on first and last stage
    norm = clip_gradients(model, clip)
    optimizer.step()
    return loss, norm


def plain_pipedream(run, plans):
    """PipeDream in one process: micro-batch m meets a stage's weights after as many updates as its plan makes before."""
    args, M = run.args, sum(a.kind == "F" for a in plans[0])
    model, trace = build(run.cfg, args.seed, run.device, run.dtype), Trace()
    optimizer, parameters = adamw(model.parameters(), args.lr), dict(model.named_parameters())
    homes = {name: home(name, run.cfg.layers, len(plans)) for name in parameters}
    tied = {"tok.weight"} if len(plans) > 1 else set()
    for step in range(run.last + 1):
        x, y, valid = run.batch(step)
        optimizer.zero_grad()
        versions, loss = [], 0
        for m, (xs, ys) in enumerate(zip(x.chunk(M), y.chunk(M))):
            versions.append({name: p.data.clone() for name, p in parameters.items()})
            for name, p in parameters.items():
                plan = plans[homes[name]]
                p.data = versions[sum(a.kind == "U" for a in plan[:plan.index(Action("F", m))])][name]
            part = loss_sum(model(xs), ys) / valid
            part.backward()
            loss += part.detach()
            for name, p in parameters.items():
                p.data = versions[-1][name].clone()
            if m < M - 1:
                kept = {name: parameters[name].grad for name in tied}
                for name in tied:
                    parameters[name].grad = None
                for stage in range(len(plans)):
                    nn.utils.clip_grad_norm_([p for n, p in parameters.items() if homes[n] == stage], args.clip or math.inf)
                optimizer.step()
                optimizer.zero_grad()
                for name in tied:
                    parameters[name].grad = kept[name]
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
        optimizer.step()
        trace.log(step, loss, norm)
        if run.keeps(step):
            trace.keep(step, {n: p.grad for n, p in parameters.items()}, model.state_dict())
    return trace


# ---- 3. at work: the same with torch's own API -------------------------------


def parallelize_at_work(model, plans, group, schedule):
    from torch.distributed import pipelining
    names = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
             "zb-h1": "ScheduleInterleavedZeroBubble"}
    virtual, M = 1 + max(a.chunk for a in plans[0]), sum(a.kind == "F" and a.chunk == 0 for a in plans[0])
    stages = Stages(model, group, virtual)
    device, n = next(model.parameters()).device, stages.ranks * virtual
    parts = [pipelining.PipelineStage(stage, stages.rank + i * stages.ranks, n, device, group=group)
             for i, stage in enumerate(stages)]
    valid_targets = []
    theirs = getattr(pipelining, names[schedule])(
        parts if virtual > 1 or schedule == "zb-h1" else parts[0], M,
        loss_fn=lambda out, y: loss_sum(out, y) / valid_targets[-1], scale_grads=False)

    def run(x, y, valid, update):
        valid_targets[:] = [valid]
        losses = []
        inputs = (x,) if stages.rank == 0 else ()
        last = stages.rank == stages.ranks - 1
        theirs.step(*inputs, target=y if last else None, losses=losses if last else None, return_outputs=False)
        return torch.stack(losses).sum().detach() if last else torch.zeros((), device=device)
    stages.run = run
    return stages


# ---- 4. run ------------------------------------------------------------------


def main():
    args = arguments(
        __doc__, schedule=("1f1b", "order of the work", tuple(SCHEDULES)), micro=(4, "M, micro-batches", POSITIVE),
        virtual=(2, "chunks of layers per rank (interleaved only)", POSITIVE),
        simulate=(False, "play the schedule, without ranks"), pp=(int, "P, stages (simulation only)", POSITIVE),
        times=(str, "F,B,W,COMM of a stage and micro-batch (simulation only)"))
    name, M, p = args.schedule, args.micro, args.pp or args.world_size
    virtual = args.virtual if name == "interleaved" else 1
    require(args.simulate or not (args.pp or args.times), "--pp and --times are for --simulate only")
    require(name != "interleaved" or M % p == 0, f"--micro {M}: interleaved needs a multiple of the {p} stages")
    plans = make_plans(name, p, M, virtual)
    try:
        unit = [1.0, 1.0, 1.0, 0.0]
        times = [float(t) for t in args.times.split(",")] if args.times else unit
        require(len(times) == 4, "")
        played = simulate(plans, cost_of(plans, *times[:3]), times[3])
    except (ValueError, RuntimeError) as error:
        require(False, str(error))
    if args.simulate:
        print(grid(played))
        report = dict(schedule=name, bubble_rate=bubble_rate(played), in_flight=[in_flight(plan) for plan in plans])
        print(report)
        if args.json:
            Path(args.json).write_text(json.dumps(report))
        return 0
    require(virtual * p <= args.cfg.layers, f"--layers {args.cfg.layers}: fewer than the {p} x {virtual} stages")
    require(args.batch % M == 0, f"--batch {args.batch} does not divide into --micro {M} micro-batches")
    run = Run(args)
    with run:
        sides = {}
        for impl in run.impls:
            model = build(run.cfg, args.seed, run.device, run.dtype)
            total = sum(q.numel() for q in model.parameters())
            if impl == "scratch":
                boundary = dict(size=(args.batch // M, run.cfg.seq, run.cfg.width), dtype=run.dtype, device=run.device)
                model = parallelize(model, plans, None, boundary)
            else:
                model = parallelize_at_work(model, plans, None, name)
            own = sum(q.numel() for q in model.parameters())
            sides[impl] = model, adamw(model.parameters(), args.lr)
        run.say(f"pipeline_parallel: {name}, {p} stages")
        for impl, step in run.steps():
            model, optimizer = sides[impl]
            x, y, valid = run.batch(step)
            with run.measure(impl, step, model, optimizer):
                loss, norm = train_step(model, optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss, norm)
            if run.keeps(step):
                run.trace[impl].keep(step, full_gradients(model), full_state_dict(model))
        plain = plain_pipedream(run, plans) if name == "pipedream" and run.rank == 0 and args.check and not run.dry else None
        return run.finish(total, own, plain)


def cost_of(plans, F, B, W):
    virtual, split = 1 + max(a.chunk for a in plans[0]), any(a.kind == "W" for a in plans[0])
    table = {"F": F, "B": B if split else B + W, "W": W, "U": 0.0}
    return lambda rank, a: table[a.kind] / virtual


if __name__ == "__main__":
    sys.exit(main())
