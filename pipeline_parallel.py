"""Pipeline parallelism: every rank holds some of the layers, and micro-batches flow through the ranks and back.

    1f1b, 2 stages, 4 micro-batches, B twice as long as F; time goes to the right, dots are the bubble

    stage 0   F0 F1 ......B0    F2 B1    F3 B2    ...B3
    stage 1   ...F0 B0    F1 B1    F2 B2    F3 B3    ......

A schedule is a list of actions for each stage (schedules.py): F forward, B backward, W the weight gradient where it is
split from B (split_backward.py), U an update (pipedream.py). B T C numbers go from stage to stage, and as many back
(mail.py). First and last stage both hold the tied embedding and sum its gradients; the norm is summed over all stages.
Each rank has about 1/p of parameters, gradients and AdamW states; the plain GPT has all of them.

    p stages, M micro-batches,   bubble                kept by stage s, in        sent across
    v chunks of layers per rank                        micro-batches (M >= p)     a boundary
    plain GPT                    -                     all M at once              -
    naive                        (p-1) / p             1                          2 B T C
    gpipe                        (p-1) / (M + p-1)     M                          2 B T C
    1f1b                         (p-1) / (M + p-1)     p - s                      2 B T C
    interleaved                  (p-1) / (v M + p-1)   p + (p-1-2s) / v           2 B T C, of v p - 1 boundaries
    zb-h1 (W <= F)               time (p-1)(F+B-W)     p, of which s wait for W   2 B T C
    pipedream                    that of 1f1b          p - s, and their weights   2 B T C

Huang et al. 2019, "GPipe", arXiv:1811.06965; Harlap et al. 2018, "PipeDream", arXiv:1806.03377; Narayanan et al. 2021,
arXiv:2104.04473, section 2.2; Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241.
At work: torch.distributed.pipelining (section 3 below).

    torchrun --standalone --nproc_per_node=2 pipeline_parallel.py --schedule zb-h1
    python pipeline_parallel.py --simulate --schedule zb-h1 --pp 4 --micro 8 --times 1,1,1,0
"""
import contextlib
import json
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.graph import get_gradient_edge

from common import GPT, POSITIVE, Run, adamw, arguments, build, clip_gradients, loss_sum, require, share
from mail import Mail, gather
from pipedream import Stash, stale_training, update
from harness.timeline import SCHEDULES, chunks, compare, in_flight, is_split, planned, simulation, source, summary, transfers
from split_backward import SplitLinears, input_gradient, weight_gradients

# ---- 1. the technique (copy this, schedules.py, mail.py, split_backward.py; they need only torch) ---


class Pipeline:
    """Runs one rank's part of a schedule, over modules that map one tensor to one tensor.

    modules: this rank's chunks. plans: all ranks'. boundary: size, dtype and device of what goes from stage to stage.
    sync(chunk, last) is called before a backward adds to a chunk's gradients; `last` says that it is the step's last
    one for this chunk, so that the reduction of gradients over data can start while it runs.
    """

    def __init__(self, modules, plans, group, boundary, sync=lambda chunk, last: None):
        self.modules, self.sync, self.device, self.clock = modules, sync, boundary["device"], time.time
        self.rank, self.ranks, self.end = dist.get_rank(group), len(plans), len(plans) * len(modules) - 1
        self.plan, self.split = plans[self.rank], is_split(plans[self.rank])
        self.adds = "W" if self.split else "B"  # the kind of action that adds to .grad
        self.final = {a.chunk: a for a in self.plan if a.kind == self.adds}  # each chunk's last
        self.mail = Mail(transfers(plans), group, boundary)

    def step(self, inputs, loss_fn, update=None):
        """A batch forward and backward: .grad is added to. Returns this rank's sum of losses.

        inputs[m]: micro-batch m, for the first stage. loss_fn(output, m): its part of the loss, for the last stage.
        update(): what U does. self.played is [(action, start, end), ..] by clock(), self.most the most chunks kept.
        """
        self.kept, self.most, self.played, loss = {}, 0, [], torch.zeros((), device=self.device)
        self.mail.open({("F", m, None): x for m, x in enumerate(inputs)} if self.rank == 0 else {})
        for a in self.plan:
            stage, out = a.chunk * self.ranks + self.rank, None
            taken = self.mail.take((a.kind, a.microbatch, source(a, stage, self.end)))  # there -> here
            start = self.clock()
            if a.kind == self.adds:
                self.sync(a.chunk, a == self.final[a.chunk])
            if a.kind == "F" and stage == self.end:
                loss = loss + self.forward(a, taken, loss_fn)
            elif a.kind == "F":
                out = self.forward(a, taken)
            elif a.kind == "B":
                out = self.backward(a, taken)
            elif a.kind == "W":
                weight_gradients(self.kept.pop((a.microbatch, a.chunk)))
            else:
                update()
            self.played.append((a, start, self.clock()))
            self.most = max(self.most, len(self.kept))
            if out is not None:
                self.mail.put((a.kind, a.microbatch, stage), out)  # here -> there too
        self.mail.close()
        return loss

    def forward(self, a, x, loss_fn=None):
        x, later = x.requires_grad_((self.rank, a.chunk) != (0, 0)), []  # nobody wants the gradient of the input
        with SplitLinears(later) if self.split else contextlib.nullcontext():
            y = self.modules[a.chunk](x)
            y = loss_fn(y, a.microbatch) if loss_fn else y
        self.kept[a.microbatch, a.chunk] = x, get_gradient_edge(y), later  # not y: once sent, it is free
        return y.detach()

    def backward(self, a, grad):
        x, edge, later = self.kept.pop((a.microbatch, a.chunk))
        if self.split:
            self.kept[a.microbatch, a.chunk] = later
            return input_gradient(x, edge, grad, self.modules[a.chunk].parameters(), later)
        torch.autograd.backward(edge, grad)
        return x.grad


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
    ends = {dist.get_process_group_ranks(group)[i] for i in (0, -1)}  # the first and the last stage
    stages.ends = dist.new_group(sorted(ends), use_local_synchronization=True)
    stages.tied = [model.tok.weight] if ranks > 1 and rank in (0, ranks - 1) else []
    return stages


def parallelize(model, plans, group, boundary, name):
    stages, size = carve(model, group, chunks(plans[0])), boundary["size"][0]
    modules = [Stash(stage) for stage in stages] if name == "pipedream" else list(stages)
    stages.pipeline = Pipeline(modules, plans, group, boundary)

    def run(x, y, valid, update):
        targets = y.split(size)
        return stages.pipeline.step(x.split(size), lambda out, m: loss_sum(out, targets[m]) / valid, update)
    stages.run = run
    return stages


def full_state_dict(model):
    return gather(model, {n: t for stage in model for n, t in stage.state_dict().items()})


def full_gradients(model):
    mine = {n: p.grad for stage in model for n, p in stage.named_parameters(remove_duplicate=False)}
    return {n: g for n, g in gather(model, mine).items() if n != "head.weight"}  # is tok.weight


def train_step(model, optimizer, x, y, valid, clip):
    """x, y: the whole batch (B, T); the first stage needs x, the last y -> this rank's part of the loss, the norm."""
    optimizer.zero_grad()
    loss = model.run(x, y, valid, lambda: update([list(model.parameters())], model.tied, optimizer, clip))
    for p in model.tied:
        dist.all_reduce(p.grad, group=model.ends)  # partial -> replicated on the first and the last stage
    elsewhere = set(model.tied if model.rank else ())  # the tied embedding counts on the first stage
    square = nn.utils.get_total_norm([p.grad for p in model.parameters() if p not in elsewhere]).square()
    dist.all_reduce(square, group=model.group)  # partial -> replicated
    norm = clip_gradients(model.parameters(), clip, square.sqrt())
    optimizer.step()
    return loss, norm


def plain_pipedream(run, plans):
    """PipeDream in one process -> Trace: what this schedule is checked against."""
    model = build(run.cfg, run.args.seed, run.device, run.dtype)
    stages = [list(Stage(model, stage, len(plans)).parameters()) for stage in range(len(plans))]
    return stale_training(run, model, adamw(model.parameters(), run.args.lr), loss_sum, stages, plans)


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
    try:
        plans, played = planned(name, p, M, args.virtual, args.times or "1,1,1,0")
    except ValueError as error:
        require(False, error)
    if not args.simulate:
        stages, scratch = p * chunks(plans[0]), args.impl == "scratch"
        require(stages <= L, f"--layers {L} for {stages} stages: give each at least one")
        require(args.batch % M == 0, f"--batch {args.batch} does not divide into --micro {M} micro-batches")
        require(scratch or name in AT_WORK, f"--schedule {name}: torch has {', '.join(AT_WORK)} only")
        require(scratch or not args.dry_run, "--dry-run needs --impl scratch: torch's asks other ranks")
    return args, plans, played


def account(run, plans, model):
    """The textbook's rows for this rank, s: b bytes a number, P parameters here."""
    (_, C, _, V, T), B, b, p, s = run.cfg, run.args.batch, run.dtype.itemsize, len(plans), run.rank
    ledger, v, sizes = run.ledger[run.impls[0]], chunks(plans[s]), [q.numel() for q in model.parameters()]
    held, sent = ledger.memory, {kind: c["wire"] for kind, c in ledger.collectives.items()}
    crossed = (p > 1) * (2 * v - (s == 0) - (s == p - 1))
    run.textbook("wire send", f"b B T C, {crossed} times: v forward and v backward, but nothing beyond the ends",
                 b * crossed * B * T * C, sent.get("send", 0))
    run.textbook("wire all_reduce", "b V C on first and last for the tied embedding + 2 (p-1)/p b for the norm",
                 b * (len(model.tied) * V * C + 2 * (p - 1) / p), sent.get("all_reduce", 0))
    run.textbook("parameters held", "b P", b * sum(sizes), held["parameters"])
    run.textbook("gradients held", "b P", b * sum(sizes), held["gradients"])
    run.textbook("AdamW states held", "2 b P + 4 per tensor", 2 * b * sum(sizes) + 4 * len(sizes), held["optimizer"])
    if run.impls[0] == "scratch":
        run.textbook("micro-batches kept", "the schedule's", in_flight(plans[s]), model.pipeline.most / v)


def main():
    args, plans, played = settings()
    if args.simulate:  # no ranks, no model
        return simulation("pipeline_parallel", args, plans, played)
    run, sides = Run(args), {}
    boundary = dict(size=(args.batch // args.micro, run.cfg.seq, run.cfg.width), dtype=run.dtype, device=run.device)
    run.extra.update(summary(plans, played))
    with run:
        for impl in run.impls:
            model = build(run.cfg, args.seed, run.device, run.dtype)
            total = sum(p.numel() for p in model.parameters())
            model = (parallelize if impl == "scratch" else parallelize_at_work)(
                model, plans, None, boundary, args.schedule)
            sides[impl] = model, adamw(model.parameters(), args.lr)
        own = sum(p.numel() for p in model.parameters())
        run.say(f"pipeline_parallel: {args.schedule}, {len(plans)} ranks on {run.device.type}, {args.dtype}, "
                f"{total:,} parameters, {own:,} of them here")
        for impl, step in run.steps():
            model, optimizer = sides[impl]
            x, y, valid = run.batch(step)
            watched = impl == "scratch" and step == max(0, run.last - 1) and not run.dry
            if watched and run.device.type == "cuda":  # when work is done; other streams may receive
                model.pipeline.clock = lambda: torch.cuda.current_stream().synchronize() or time.time()
            with run.measure(impl, step, model, optimizer):
                loss, norm = train_step(model, optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss, norm, full_gradients, full_state_dict, model)
            if watched:
                run.store.set(f"played {run.rank}", json.dumps(model.pipeline.played))
                text, figures = compare(plans, [run.store.get(f"played {r}") for r in range(run.world_size)])
                run.say(text)
                run.extra.update(figures)
        account(run, plans, sides[run.impls[0]][0])
        stale = args.schedule == "pipedream" and args.check and run.rank == 0 and not run.dry
        return run.finish(total, own, plain_pipedream(run, plans) if stale else None)


if __name__ == "__main__":
    sys.exit(main())
