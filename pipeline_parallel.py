"""Pipeline parallelism: each rank holds some of the layers, and micro-batches flow through them.

    1f1b, 2 ranks, 4 micro-batches, B twice as long as F; time to the right, dots are the bubble

    rank 0   F0 F1 ......B0    F2 B1    F3 B2    ...B3
    rank 1   ...F0 B0    F1 B1    F2 B2    F3 B3    ......

A schedule is data: for each rank a list of actions, F forward, B backward, W the gradients of the
weights where a B leaves them for later. Section 1 has pictures of schedules. Each stage of the
model sends the next one its output, (batch, T, C) in a step, and gets as large a gradient back.
Each of p ranks has about 1/p of parameters, gradients and AdamW states. Ranks that both hold the
tied embedding sum its gradients; the norm is that of all ranks.

    p ranks, M micro-batches,   bubble, for M >= 2p - 1:    kept by rank r, in micro-batches
    v stages per rank           part of a step, or a time   (M large enough)
    plain GPT                   -                           all M at once
    naive                       (p-1) / p                   1
    gpipe                       (p-1) / (M + p-1)           M
    1f1b                        (p-1) / (M + p-1)           p - r
    interleaved                 (p-1) / (v M + p-1)         p + (p-1-2r) / v
    bfs                         (p-1) / (v M + p-1)         M
    zb-h1 (W <= F)              time (p-1) (F + B - W)      p
    zb-h2 (W <= F, 2W <= F+B)   time (p-1) (F + B - 2W)     2p - 1
    zb-v (F = B = W)            0                           p
    dualpipe-v (F = B = W)      time (p-1) F, pairs joined  p + 1/2
    auto --limit X              what a search finds         X
    pipedream                   that of 1f1b                p - r, each with its weights

F, B, W are the times of these actions. A B that leaves no W, as in naive to bfs, takes B + W.
Sources stand at each schedule; zb-*, auto: Qi et al. 2023, "Zero Bubble Pipeline Parallelism",
arXiv:2401.10241. At work: torch.distributed.pipelining (section 3). In your own code:

    plans = make_plans("1f1b", ranks=2, microbatches=4)
    stages = Stages([Chain(layers[:3]), Chain(layers[3:])], plans)  # layers: [(name, module), ..]
    pipeline = Pipeline(stages.here, plans, stages.groups, Boundary(size, dtype, device))
    loss = pipeline.step(x.split(rows), lambda output, m: loss_fn(output, targets[m]) / len(x))
    norm = stages.sum_and_clip(1.0)                                 # then optimizer.step()

    torchrun --standalone --nproc_per_node=2 pipeline_parallel.py --schedule zb-v
    python pipeline_parallel.py --simulate --schedule zb-h1 --pp 4 --micro 8 --times 1,1,1,0
"""
import harness  # before torch, which warns where NumPy is missing

import contextlib
import json
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from common import (
    GPT, POSITIVE, Flag, Run, Side, adamw, arguments, loss_sum, require, share)
from harness.checkpoint import pieces_of
from harness.compare import Trace
from harness.timeline import (
    bubble_rate, compare, costs, grid, in_flight, longest, measured, simulate, typical_times)

# ---- 1. the technique (copy this; it needs only torch) -----------------------
#
# "partial -> replicated" beside a line that communicates: before it each rank has a summand, after
# it all have the sum. "here -> there": one rank has it, then another; with "too" both have it.
# A stage or rank "behind" another takes its output; the one "before" it makes its input.

# ---- 1.1 schedules: what each rank does, in order ----


class Action(NamedTuple):
    """One piece of a rank's work."""

    kind: str  # F forward; B backward; W the gradients of the weights, later; U an update
    microbatch: int
    stage: int  # a part of the model's layers, 0 the first; a rank may hold several
    joined: bool = False  # an F that may run in parallel with the B that follows it in the plan


def key(action):
    """-> the name by which other actions know what this one makes."""
    return action[:3]  # (kind, micro-batch, stage)


def loop(ranks, chunks):
    """-> the stages of each rank: they go through all ranks, and then through all again."""
    return [list(range(rank, ranks * chunks, ranks)) for rank in range(ranks)]


def vee(ranks, chunks=2):
    """-> the stages of each rank: down the ranks and up again. Rank 0 has the first and last."""
    return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]


def sweep(kind, microbatches, stages, together):
    """One action for each micro-batch and stage. `together` micro-batches (at most) go through one
    stage, then through the next."""
    order = []
    for first in range(0, microbatches, together):
        some = range(first, min(first + together, microbatches))
        order += [Action(kind, microbatch, stage) for stage in stages for microbatch in some]
    return order


def turns(microbatches, warmup, stages, together=1):
    """`warmup` forwards, then a forward and a backward in turn, then the backwards left."""
    forwards = sweep("F", microbatches, stages, together)
    backwards = sweep("B", microbatches, stages[::-1], together)
    warmup = min(warmup, len(forwards))
    plan = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards):
        plan += [forward, backward]
    return plan + backwards[len(forwards) - warmup:]


def follow(plan, kind, lag):
    """Right after each B comes an action of this kind, for the micro-batch whose B came `lag` Bs
    before. The last of them go to the end."""
    longer = []
    waiting = []
    for action in plan:
        longer.append(action)
        if action.kind == "B":
            waiting.append(Action(kind, action.microbatch, action.stage))
            if len(waiting) > lag:
                longer.append(waiting.pop(0))
    return longer + waiting


def naive(rank, ranks, microbatches, stages):
    """One micro-batch at a time: one rank is at work.

    rank 0   F0 .........B0    F1 .........B1
    rank 1   ...F0 B0    .........F1 B1    ......
    """
    return turns(microbatches, 0, stages)


def gpipe(rank, ranks, microbatches, stages):
    """All forwards, then all backwards (Huang 2019, arXiv:1811.06965, figure 2c).

    rank 0   F0 F1 F2 F3 .........B0    B1    B2    B3
    rank 1   ...F0 F1 F2 F3 B0    B1    B2    B3    ......
    """
    return turns(microbatches, microbatches, stages)


def one_f_one_b(rank, ranks, microbatches, stages):
    """As early a backward as can be: a micro-batch comes back when it has been through all ranks
    behind this one (Harlap 2018, arXiv:1806.03377, figure 8). The picture is at the top of the
    file."""
    return turns(microbatches, ranks - 1 - rank, stages)


def interleaved(rank, ranks, microbatches, stages):
    """1F1B with several stages per rank: filling and draining take less time (Narayanan 2021,
    arXiv:2104.04473, figure 4). Small letters: the rank's second stage.

    rank 0   F0 F1 f0 f1 F2 ...b0    F3 b1    f2 B0    f3 B1    ...b2    ...b3    B2    B3
    rank 1   ...F0 F1 f0 b0    f1 b1    F2 B0    F3 B1    f2 b2    f3 b3    B2    B3    ......
    """
    warmup = (len(stages) - 1) * ranks + 2 * (ranks - 1 - rank)
    return turns(microbatches, warmup, stages, together=ranks)


def looped_bfs(rank, ranks, microbatches, stages):
    """GPipe with several stages per rank: all micro-batches go through one, then through the next
    (Lamy-Poirier 2022, arXiv:2211.05953). A stage's parameters are used in one run of forwards and
    one of backwards, so that sharded ones (FSDP) are gathered only twice in a step.

    rank 0   F0 F1 f0 f1 .........b0    b1    B0    B1
    rank 1   ...F0 F1 f0 f1 b0    b1    B0    B1    ......
    """
    return turns(microbatches, len(stages) * microbatches, stages, together=microbatches)


def zb_h1(rank, ranks, microbatches, stages):
    """1F1B in which rank r does the W of micro-batch m behind the B of micro-batch m + r: Bs are
    sooner done, and Ws fill the end (Qi 2023, figure 3).

    rank 0   F0 F1 ...B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
    rank 1   ...F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3
    """
    return follow(one_f_one_b(rank, ranks, microbatches, stages), "W", rank)


def zb_h2(rank, ranks, microbatches, stages):
    """Twice the warm-up of 1F1B, and each W later still: no bubble where F = B = W, at the price of
    the activations of 2p - 1 micro-batches (Qi 2023, figure 3). A rank is done a little after the
    one before.

    rank 0   F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3 ...
    rank 1   ...F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
    """
    return follow(turns(microbatches, 2 * (ranks - 1 - rank), stages), "W", 2 * rank)


class Score:
    """Makes a rank's plan out of words. A digit is a stage: 0 the rank's first, 1 its second.

    F0 the next forward of stage 0; B1 the next backward of stage 1; I1 the same, but the gradient
    of the input alone, which leaves a W; W the oldest W that is left; F0&B1 both, joined.
    """

    def __init__(self, stages):
        self.stages = stages
        self.plan = []
        self.count = Counter()  # {(F or B, stage): how many there are}
        self.late = []  # the Ws that are due

    def write(self, words, times=1):
        for word in words.split() * times:
            first, _, second = word.partition("&")
            self.add(first, joined=bool(second))
            if second:
                self.add(second)

    def add(self, word, joined=False):
        kind = word[0]
        if kind == "W":
            self.plan.append(self.late.pop(0))
            return
        stage = self.stages[int(word[1])]
        if kind == "I":
            kind = "B"
            self.late.append(Action("W", self.count["B", stage], stage))
        self.plan.append(Action(kind, self.count[kind, stage], stage, joined))
        self.count[kind, stage] += 1


def zb_v(rank, ranks, microbatches, stages):
    """Zero bubble with the memory of 1F1B, where F = B = W: a micro-batch comes back to the rank
    that it began on, so its backward begins there soon (Qi 2023, figure 8).

    rank 0   F0 F1 F2 f0 b0 w0 f1 b1 w1 F3 B0 W0 f2 b2 w2 B1 W1 f3 b3 w3 B2 W2 B3 W3 ...
    rank 1   ...F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 F3 B1 W1 f3 b2 w2 B2 b3 B3 W2 w3 W3
    """
    # In these words the digit is a stage; in the picture above it is a micro-batch.
    # They are for at least 2p - 1 micro-batches: where there are fewer, the plan is
    # written for that many, and the return leaves out the actions of those beyond
    enough = max(microbatches, 2 * ranks - 1)
    score = Score(stages)
    score.write("F0", 2 * (ranks - rank) - 1)  # until the first micro-batch is back, at stage 1
    score.write("F1 F0", rank)  # until its gradient arrives
    score.write("F1 I1 W", ranks - rank)  # the first gradients are on their way to stage 0
    score.write("F0 I0 W F1 I1 W", enough - 2 * ranks + 1 + rank)  # the steady state
    score.write("I0 W F1 I1 W", ranks - 1 - rank)  # no F0 is left
    score.write("I0 I1", rank)  # no F is left; Bs come first, since other ranks wait for them
    score.write("I0 W", ranks - rank)
    score.write("W", len(score.late))
    return [action for action in score.plan if action.microbatch < microbatches]


def dualpipe_v(rank, ranks, microbatches, stages):
    """Forwards and backwards in pairs, so that a model which talks within its layers (experts) can
    hide the one's messages behind the other's arithmetic (DeepSeek-V3, arXiv:2412.19437, section
    3.2.1). DualPipe is two pipelines, one from each end; folded into a V, one is enough (Sea AI
    Lab). The class Pipeline (section 1.4) runs the two of a pair one after the other.

    rank 0   F0 F1 F2 f0 b0 w0 f1 F3 b1    f2 B0    b2    f3 ...B1    b3    B2 W2 B3 W3
    rank 1   ...F0 f0 F1 f1 F2 b0    f2 B0    F3 b1    f3 B1    b2    B2    b3 B3 w3 W3
    """
    score = Score(stages)  # in its words the digit is a stage; above it is a micro-batch
    score.write("F0", 2 * (ranks - 1 - rank))
    score.write("F0 F1", rank + 1)
    score.write("I1 W F1", ranks - 1 - rank)
    pairs = microbatches - 2 * ranks + rank + 1
    if rank == ranks - 1:
        # the first pair, F0 and B1, is not joined here, which makes the bubble smaller
        score.write("F0 B1 F1&B0")
        pairs -= 1
    score.write("F0&B1 F1&B0", pairs)
    score.write("B1 F1&B0", ranks - 1 - rank)
    # no Fs are left: rank + 1 pairs of Bs follow, and those of the second half leave their Ws
    half = (rank + 1) // 2
    score.write("B1 B0", half)
    if rank % 2 == 0:
        score.write("B1 I0")  # the middle one of an odd number of pairs
    score.write("I1 I0", half)
    score.write("W I0", ranks - 1 - rank)  # the Bs of stage 0 that have no partner
    score.write("W", len(score.late))
    return score.plan


# The order that is found by search (Qi 2023, section 3.1), for given times


class Draft:
    """All ranks' plans while they are being made, one stage a rank, with the times they would take.

    times: of F, B, W and of a transfer. limit: the most micro-batches in flight on a rank.
    waiting: how much of a micro-batch's activations is kept from its B to its W, as a part of what
    is kept from F to B. It must be above 0.
    """

    def __init__(self, ranks, microbatches, limit, times, waiting):
        self.microbatches = microbatches
        self.limit = limit
        self.times = dict(zip("FBW", times))
        self.comm = times[3]
        self.waiting = waiting
        self.plans = [[] for _ in range(ranks)]
        self.done = [Counter() for _ in range(ranks)]  # {kind: how many a rank has done}
        self.clock = [0.0] * ranks  # when each rank is done with what is in its plan
        self.idle = [0.0] * ranks  # how long it has waited since its first action
        self.ends = {}  # {(kind, micro-batch, stage): when it is done}

    def arrival(self, rank, kind):
        """When the input of a rank's next F or B is there; 0.0 if it takes none."""
        sender = rank + 1
        if kind == "F":
            sender = rank - 1
        end = self.ends.get((kind, self.done[rank][kind], sender))
        # Whoever asks has put the sender's action before. So None means that there is no sender:
        # this is the F of the first rank or the B of the last.
        if end is None:
            return 0.0
        return end + self.comm

    def put(self, rank, kind):
        """Append a rank's next action of this kind."""
        start = self.clock[rank]
        if kind != "W":
            start = max(start, self.arrival(rank, kind))
        if self.plans[rank]:
            self.idle[rank] += start - self.clock[rank]
        microbatch = self.done[rank][kind]
        self.plans[rank].append(Action(kind, microbatch, rank))
        self.done[rank][kind] += 1
        self.clock[rank] = start + self.times[kind]
        self.ends[kind, microbatch, rank] = self.clock[rank]

    def late(self, rank):
        """How many Ws are due."""
        return self.done[rank]["B"] - self.done[rank]["W"]

    def kept(self, rank):
        """Activations, in micro-batches."""
        return self.done[rank]["F"] - self.done[rank]["B"] + self.waiting * self.late(rank)

    def put_after_w(self, rank, kind):
        """Ws where they cost nothing or are needed, then the next F or B."""
        while kind == "F" and self.late(rank) and self.kept(rank) + 1 > self.limit:
            self.put(rank, "W")  # makes room
        arrival = self.arrival(rank, kind)
        while self.late(rank) and self.clock[rank] + self.times["W"] <= arrival:
            self.put(rank, "W")  # fills the time until the input is there
        gap = arrival - self.clock[rank]
        if self.late(rank) and gap > 0 and self.idle[rank] + gap > max(self.idle):
            # A W takes longer than the gap, and delays what follows. But waiting would make this
            # rank the one that has waited longest, so the W is done all the same
            self.put(rank, "W")
        self.put(rank, kind)

    def warm_up(self, eager):
        """The first F and B of each rank, and as many Fs between as there is time for.

        eager: also an F that would not be done yet when the B could begin.
        """
        ranks = len(self.plans)
        for rank in range(ranks):
            self.put(rank, "F")
        more = [0] * ranks  # how many Fs each rank puts between its first F and its first B
        # From the last rank to the first: when its first B can begin, and how many Fs fit before
        b_done = self.clock[-1] + self.times["B"]  # of the first B on the last rank
        for rank in reversed(range(ranks - 1)):
            arrival = b_done + self.comm  # b_done is still that of the rank behind
            end = self.clock[rank]
            while more[rank] + 1 < min(self.limit, self.microbatches):
                too_long = end + self.times["F"] > arrival
                if end >= arrival or (too_long and not eager):
                    break
                end += self.times["F"]
                more[rank] += 1
            b_done = max(end, arrival) + self.times["B"]
        for rank in range(ranks):
            if rank > 0:  # at least one fewer than on the rank before, as in 1F1B
                more[rank] = max(0, min(more[rank], more[rank - 1] - 1))
            for _ in range(more[rank]):
                self.put(rank, "F")
        for rank in reversed(range(ranks)):
            self.put(rank, "B")

    def skips(self, rank):
        """Is it better to leave out an F here, since the rank behind has enough to do?"""
        ready = self.done[rank]["F"] - self.done[rank + 1]["F"]  # inputs that the rank behind has
        if ready < 2:
            return False  # it takes one in this round, and would have none for the next
        # the time until the next B can begin here: the rank behind does an F and a B before
        gap = self.clock[rank + 1] + self.times["F"] + self.times["B"] + self.comm
        gap -= self.clock[rank]
        if gap <= 0:
            return True  # the B could begin at once, and any F would delay it
        too_many = self.kept(rank) + 1 - self.limit  # micro-batches that Ws must make room for
        ws = max(0, math.ceil(too_many / self.waiting))
        delays = self.times["F"] + ws * self.times["W"] > gap
        # to wait must not make this rank the one that has waited longest
        return delays and self.idle[rank] + gap <= max(self.idle)

    def steady(self, skip):
        """One F, if any is left, and one B on each rank."""
        ranks = len(self.plans)
        # does a rank do an F in this round? It does not if all are done, or if it leaves one out
        forward = [done["F"] < self.microbatches for done in self.done]
        for rank in reversed(range(ranks - 1)):
            behind_skips = self.done[rank + 1]["F"] < self.microbatches and not forward[rank + 1]
            if behind_skips:
                forward[rank] = False  # the rank behind needs no input in this round
            elif forward[rank] and skip and self.skips(rank):
                forward[rank] = False
        for rank in range(ranks):
            if forward[rank]:
                self.put_after_w(rank, "F")
        for rank in reversed(range(ranks)):
            if rank == 0 and self.done[0]["F"] == self.microbatches:
                self.put_all(0, "W", self.late(0))  # nobody waits for a B of the first rank
            self.put_after_w(rank, "B")

    def put_all(self, rank, kind, count):
        for _ in range(count):
            self.put(rank, kind)

    def span(self):
        """The longest time from a rank's first action to its last."""
        starts = [self.ends["F", 0, rank] - self.times["F"] for rank in range(len(self.plans))]
        return max(clock - start for clock, start in zip(self.clock, starts))


def search(ranks, microbatches, limit, times, waiting=1.0):
    """-> the plans of the shortest of four drafts (Qi 2023, section 3.1)."""
    if not waiting > 0:
        raise ValueError(f"waiting {waiting}: W keeps some of a micro-batch's activations")
    drafts = []
    for eager in (False, True):
        for skip in (False, True):
            draft = Draft(ranks, microbatches, limit, times, waiting)
            draft.warm_up(eager)
            for _ in range(microbatches - 1):
                draft.steady(skip)
            for rank in range(ranks):
                draft.put_all(rank, "W", draft.late(rank))
            if all(done["F"] == microbatches for done in draft.done):  # else it has skipped some
                drafts.append(draft)
    return min(drafts, key=Draft.span).plans


def pipedream(rank, ranks, microbatches, stages):
    """1F1B with an update after each backward. The last update is not in the plan: whoever calls
    step() makes it (Harlap 2018, section 3). Section 1.5 says which weights a micro-batch meets.

    rank 0   F0 F1 ......B0    U F2 B1    U F3 B2    U ...B3
    rank 1   ...F0 B0    U F1 B1    U F2 B2    U F3 B3
    """
    plan = follow(one_f_one_b(rank, ranks, microbatches, stages), "U", 0)
    return plan[:-1]  # without the last U


class Schedule(NamedTuple):
    """How the plans of a schedule are made."""

    order: Callable | None  # (rank, ranks, micro-batches, its stages) -> plan; None: by search
    place: Callable = loop  # (ranks, chunks) -> the stages of each rank
    chunks: int | None = 1  # stages per rank; None: as many as one likes


SCHEDULES = {
    "naive": Schedule(naive),
    "gpipe": Schedule(gpipe),
    "1f1b": Schedule(one_f_one_b),
    "interleaved": Schedule(interleaved, chunks=None),
    "bfs": Schedule(looped_bfs, chunks=None),
    "zb-h1": Schedule(zb_h1),
    "zb-h2": Schedule(zb_h2),
    "zb-v": Schedule(zb_v, vee, 2),
    "dualpipe-v": Schedule(dualpipe_v, vee, 2),
    "auto": Schedule(None),
    "pipedream": Schedule(pipedream),
}


def chunks_of(name, chunks):
    """How many stages a rank has in this schedule; chunks: where one may choose."""
    return SCHEDULES[name].chunks or chunks


def make_plans(name, ranks, microbatches, chunks=2, limit=None, times=(1.0, 1.0, 1.0, 0.0)):
    """-> for each rank a list of actions. Raises ValueError where dualpipe-v has none.

    interleaved is meant for as many micro-batches as there are ranks, or a multiple of that. For
    other numbers some of its plans cannot be run, and route_of refuses these.

    chunks: stages per rank, of interleaved and bfs. limit (micro-batches in flight on a rank, the
    number of ranks if None) and times (of F, B, W and a transfer) are for auto.
    """
    if name == "dualpipe-v" and microbatches < 2 * ranks:
        raise ValueError(f"dualpipe-v needs {2 * ranks} micro-batches or more, not {microbatches}")
    if name == "auto":
        return search(ranks, microbatches, limit or ranks, times)
    order, place, _ = SCHEDULES[name]
    placement = place(ranks, chunks_of(name, chunks))
    return [order(rank, ranks, microbatches, placement[rank]) for rank in range(ranks)]


def stages_of(plan):
    """-> the stages that a rank holds."""
    return sorted({action.stage for action in plan})


def homes(plans):
    """-> {stage: the rank that holds it}"""
    return {action.stage: rank for rank, plan in enumerate(plans) for action in plan}


def split_of(plan):
    """-> {(micro-batch, stage)} whose B makes the gradient of its input alone, and leaves a W."""
    return {(action.microbatch, action.stage) for action in plan if action.kind == "W"}


def stages_with_backward(plans):
    """-> {stage} that have a B in the plans. Frozen ones at the front have none in the plans that
    without_backward() has made."""
    return {action.stage for plan in plans for action in plan if action.kind == "B"}


def without_backward(plans, first):
    """The plans of a model in which nothing is trained before stage `first`."""
    return [[action for action in plan if action.kind == "F" or action.stage >= first]
            for plan in plans]


# ---- 1.2 mail: tensors between ranks, in an order in which no rank can block another ----


class Boundary(NamedTuple):
    """What goes from stage to stage: one tensor a micro-batch, always of this kind."""

    size: tuple
    dtype: torch.dtype
    device: torch.device  # or its name


class Move(NamedTuple):
    """A tensor goes from one rank to another."""

    key: tuple  # of the action that makes the tensor
    sender: int
    receiver: int

    @property
    def link(self):
        return self.sender, self.receiver


def source(action, last):
    """The key of what an action takes from another stage; None if it takes nothing: the F of the
    first stage has the model's input, the B of the last one (`last`) follows its own F."""
    if action.kind == "F" and action.stage > 0:
        return "F", action.microbatch, action.stage - 1
    if action.kind == "B" and action.stage < last:
        return "B", action.microbatch, action.stage + 1
    return None


def own_source(action):
    """The key of this rank's own action that must come before."""
    before = {"F": None, "B": "F", "W": "B", "U": "B"}[action.kind]
    if before is None:
        return None
    return before, action.microbatch, action.stage


def beats(plans):
    """{key: when it is done} if F, B and W take a beat each, and a B that is not split takes two.

    Raises ValueError if the plans would wait for each other for ever.
    """
    last = max(homes(plans))
    split = [split_of(plan) for plan in plans]
    beat = {"F": 1, "B": 2, "W": 1, "U": 0}
    done = {}
    clock = [0] * len(plans)
    position = [0] * len(plans)
    moving = True
    while moving:
        moving = False
        for rank, plan in enumerate(plans):
            for action in plan[position[rank]:]:
                needs = {source(action, last), own_source(action)} - {None}
                if not needs <= done.keys():
                    break
                duration = beat[action.kind]
                if action.kind == "B" and (action.microbatch, action.stage) in split[rank]:
                    duration = 1
                clock[rank] = max([clock[rank]] + [done[need] for need in needs]) + duration
                done[key(action)] = clock[rank]
                position[rank] += 1
                moving = True
    for rank, plan in enumerate(plans):
        if position[rank] < len(plan):
            action = plan[position[rank]]
            raise ValueError(f"rank {rank} would wait for ever to do {action.kind}"
                             f"{action.microbatch} of stage {action.stage}")
    return done


def route_of(plans):
    """-> [Move, ..], all that ranks send each other, in an order that suits all of them.

    No move depends on a later one, so ranks that each start their own in this order cannot
    deadlock. What goes from one stage of a rank to another stage of it is not sent.
    """
    home = homes(plans)
    last = max(home)
    done = beats(plans)
    moves = []
    for rank, plan in enumerate(plans):
        for action in plan:
            need = source(action, last)
            if need is None:
                continue
            _, _, stage = need
            if home[stage] != rank:
                moves.append(Move(need, home[stage], rank))
    return sorted(moves, key=lambda move: (done[move.key], move))


class Groups:
    """The process groups of this rank's pipeline."""

    def __init__(self, ranks, group):
        self.ranks = ranks  # the global ranks of the pipeline, in its order
        self.rank = ranks.index(dist.get_rank())  # this rank's place among them
        self.group = group  # all of them
        self.links = {}  # {(sender, receiver): group of two}; empty: all use `group`
        self.sharing = {}  # {stages that hold a tied parameter: group of their ranks}


def make_groups(plans, shared=(), pipelines=None, group=None):
    """-> the Groups of this rank's pipeline. Every rank of the world calls this.

    shared: tuples of stages that hold a tied parameter. pipelines: for each pipeline its list of
    global ranks; None: all ranks are one pipeline, in the world's group unless another is given.
    group: the one of this rank's pipeline, if it exists already; None: each of `pipelines` gets a
    new one here.

    Every rank makes every group, in the same order, also those that it is not in: NCCL splits them
    off the world's communicator, and all ranks have to take part in that. NCCL runs what goes
    through one group in order, so that a receive which waits would block the sends behind it: each
    pair of ranks gets a group for each direction. gloo matches every transfer by itself.
    """
    home = homes(plans)
    if pipelines is None:
        pipelines = [list(range(dist.get_world_size()))]
        if group is None:
            group = dist.group.WORLD
    links = []
    if dist.get_backend() not in ("gloo", "fake"):  # NCCL, alone or beside gloo
        links = sorted({move.link for move in route_of(plans)})
    found = None
    for ranks in pipelines:
        whole = group  # wrong for other ranks' pipelines, but only this rank's is kept
        if group is None:
            whole = dist.new_group(ranks)
        made = {link: dist.new_group([ranks[r] for r in link]) for link in links}
        sharing = {}
        for stages in shared:
            holders = sorted({ranks[home[stage]] for stage in stages})
            if len(holders) > 1:
                sharing[stages] = dist.new_group(holders)
        if dist.get_rank() in ranks:
            found = Groups(ranks, whole)
            found.sharing = sharing
            found.links = {link: g for link, g in made.items() if found.rank in link}
    return found


class Mail:
    """Each rank puts what it has made and takes what it needs.

    rank 0   put(F0)  put(F1)  take(B0)  put(F2)  ..      route: F0 to 1, F1 to 1, B0 to 0, ..
    rank 1   take(F0) put(B0)  take(F1)  put(B1)  ..      the same on all ranks

    A receive is started long before its tensor is taken, so that it travels while ranks compute.
    What is sent is kept until the next send.
    """

    def __init__(self, groups, boundary):
        self.groups = groups
        self.boundary = boundary
        self.todo = deque()  # the Moves of this rank that have not been started
        self.made = {}  # {key: tensor} that is to be sent or taken
        self.moving = {}  # {key: (work, tensor)} that has been started
        self.sent = None  # the key of the last send
        # gloo sends and receives the memory of CPUs alone: tensors of a GPU go through it
        on_cpu = torch.device(boundary.device).type == "cpu"
        self.by_host = dist.get_backend(groups.group) == "gloo" and not on_cpu
        # NCCL wants all ranks of a group in its first call, and not all are in a transfer
        dist.barrier(groups.group)
        for link in sorted(groups.links):
            dist.barrier(groups.links[link])

    def open(self, route):
        """Begin with all transfers of a step, in this order."""
        rank = self.groups.rank
        self.todo = deque(move for move in route if rank in (move.sender, move.receiver))
        self.made = {}
        self.moving = {}
        self.sent = None
        self.start()

    def put(self, key, tensor):
        self.made[key] = tensor
        self.start()

    def take(self, key):
        """-> what another rank sends, or another stage of this rank has put."""
        # start() stops at nothing but a send whose tensor is not made yet. The route is in the
        # order in which beats() has the tensors made. So what this rank sends before this receive
        # is made before the action that takes what it receives: it has been put already, and the
        # receive is moving by now. A key that is not moving is of another stage of this rank.
        if key not in self.moving:
            return self.made.pop(key)
        work, tensor = self.moving.pop(key)
        work.wait()
        if self.by_host:
            return tensor.to(self.boundary.device)
        return tensor

    def finish_send(self):
        """Wait until what was sent last has left."""
        if self.sent is not None:
            work, _ = self.moving.pop(self.sent)
            work.wait()
        self.sent = None

    def start(self):
        """Start transfers up to the first whose tensor is yet to be made here."""
        while self.todo:
            move = self.todo[0]
            if move.sender == self.groups.rank and move.key not in self.made:
                return
            self.todo.popleft()
            if move.sender == self.groups.rank:
                self.send(move)
            else:
                self.receive(move)

    def send(self, move):
        self.finish_send()  # one send at a time: the memory of the one before is free
        tensor = self.made.pop(move.key).contiguous()
        size, dtype, _ = self.boundary
        if tensor.shape != size or tensor.dtype != dtype:  # the other rank would read noise
            raise ValueError(f"{move.key} made {tensor.dtype} {tuple(tensor.shape)}, "
                             f"but the boundary is {dtype} {tuple(size)}")
        if self.by_host:
            tensor = tensor.cpu()
        self.sent = move.key
        self.begin(dist.isend, tensor, move, self.groups.ranks[move.receiver])  # here -> there too

    def receive(self, move):
        size, dtype, device = self.boundary
        if self.by_host:
            device = "cpu"
        tensor = torch.empty(size, dtype=dtype, device=device)
        self.begin(dist.irecv, tensor, move, self.groups.ranks[move.sender])  # there -> here too

    def begin(self, operation, tensor, move, peer):
        group = self.groups.links.get(move.link, self.groups.group)
        # in a batch NCCL uses the group's own communicator, begun in __init__, and makes no other
        works = dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, group)])
        self.moving[move.key] = works[0], tensor


# ---- 1.3 a backward in two parts, for any module ----
#
#     y = x A^T, for every Linear        B    grad_x = grad_y A       the stage before waits for it
#                                        W    grad_A = grad_y^T x     nobody waits: x and grad_y are
#                                                                     kept until then
#
# A Linear is whatever calls F.linear(x, A, b) with leaves A and b under autograd. The gradients of
# all other parameters are made in B, beside grad_x, and added to .grad in W: those of norms,
# embeddings, weights that are computed from others, all weights under autocast, those of
# nn.MultiheadAttention, whose calls of F.linear are not seen. torch.utils.checkpoint around a
# Linear makes torch raise a RuntimeError, unless that Linear is the last to be computed again.
# Hooks of register_hook() would be called in B and in W, and are refused. (Qi 2023, section 2)


class WeightGradient(torch.autograd.Function):
    """W of a Linear, set up in its B, when x and the output's gradient are known.

    It is a scalar that means nothing, but a backward from it makes the gradients of weight and
    bias.
    """

    @staticmethod
    def forward(ctx, weight, bias, x, grad):
        ctx.save_for_backward(x, grad)
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        x, grad = ctx.saved_tensors  # (N, in), (N, out)
        grad_weight = None
        grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_weight = grad.T @ x
        if ctx.needs_input_grad[1]:
            grad_bias = grad.sum(0)
        return grad_weight, grad_bias, None, None


class SplitLinear(torch.autograd.Function):
    """F.linear whose backward is B alone; it leaves a WeightGradient in `later`."""

    @staticmethod
    def forward(ctx, later, x, weight, bias):  # x is (N, in)
        ctx.later = later
        # not by save_for_backward: saved_tensors_hooks may hand back copies, but W has to add to
        # the .grad of the leaves themselves
        ctx.weight = weight
        ctx.bias = bias
        ctx.save_for_backward(x)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        with torch.enable_grad():
            root = WeightGradient.apply(ctx.weight, ctx.bias, x.detach(), grad)
        ctx.later.append((root, None))  # None: the gradient of a scalar is 1
        grad_x = None
        if ctx.needs_input_grad[1]:
            grad_x = grad @ ctx.weight
        return None, grad_x, None, None


class SplitLinears(TorchFunctionMode):
    """While it is entered, every F.linear is a SplitLinear, but for those that are called inside
    another of torch's functions."""

    def __init__(self, later):
        super().__init__()
        self.later = later  # [(root or parameter, its gradient)], what W is to do

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            return self.linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def linear(self, input, weight, bias=None):
        parameters = [t for t in (weight, bias) if t is not None]
        leaves = all(t.is_leaf for t in parameters)
        trained = any(t.requires_grad for t in parameters) and torch.is_grad_enabled()
        if not leaves or not trained or torch.is_autocast_enabled(input.device.type):
            return F.linear(input, weight, bias)
        # reshaped out here and not inside SplitLinear: autograd lets nobody change in place a view
        # that a Function has returned, and the modules that follow may want to
        rows = input.reshape(-1, input.shape[-1])  # (.., in) -> (N, in)
        out = SplitLinear.apply(self.later, rows, weight, bias)
        return out.view(*input.shape[:-1], len(weight))  # (N, out) -> (.., out)


def leaves_of(node):
    """-> the tensors whose gradients a backward from this node of autograd's graph makes."""
    found = []
    todo = [node]
    seen = {None}  # next_functions have None where no gradient goes
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            found.append(node.variable)
        todo += [behind for behind, _ in node.next_functions]
    return found


def input_gradient(edge, grad, later):
    """B. edge: the gradient edge of a stage's output, whose gradient is `grad`."""
    leaves = leaves_of(edge.node)
    if any(leaf._backward_hooks for leaf in leaves):
        raise ValueError("a hook of register_hook() on a parameter, which B and W would call: take "
                         "register_post_accumulate_grad_hook(), which W alone calls")
    # All leaves are asked for, so that autograd runs through the whole graph. Two kinds get no
    # gradient (None) here, since a backward on the way puts it elsewhere: weights of split Linears
    # (SplitLinear.backward), and the anchor of Entry in section 1.4 (Entry.backward)
    grads = torch.autograd.grad(edge, leaves, grad, allow_unused=True)
    for leaf, gradient in zip(leaves, grads):
        if gradient is not None:
            later.append((leaf, gradient))  # added to .grad in W: post-accumulate hooks run once


def weight_gradients(later):
    """W."""
    if later:
        roots, grads = zip(*later)
        torch.autograd.backward(roots, grads)


# ---- 1.4 the pipeline ----


class Slot:
    """A tensor on its way into a stage's graph, and its gradient on the way out."""

    def __init__(self, tensor):
        self.tensor = tensor  # None once it is in the graph
        self.grad = None  # until its backward is done


class Entry(torch.autograd.Function):
    """Where a received tensor enters the graph: no leaf, so that a stage may change it in place.

    anchor: an empty tensor that wants a gradient; a Function without one makes no graph.
    """

    @staticmethod
    def forward(ctx, anchor, slot):
        ctx.slot = slot
        tensor = slot.tensor
        slot.tensor = None
        return tensor

    @staticmethod
    def backward(ctx, grad):
        ctx.slot.grad = grad
        return None, None


class Kept(NamedTuple):
    """What is kept of a micro-batch in a stage, from F to B; then `later` alone, from B to W."""

    slot: Slot | None  # of its input; None if nobody wants the gradient of that
    edge: GradientEdge | None  # of its output (not the output: once sent, it is free)
    later: list  # what W is to do


def nothing(stage, is_last):
    """What is called before and after an action by default."""


class Pipeline:
    """Runs one rank's plan, over modules that map one tensor to one tensor.

    modules: {stage: module}, this rank's. plans: all ranks'. boundary: what goes between stages.
    before(stage, is_last) and after(stage, is_last) are called around each action that adds to the
    gradients of a stage. is_last: no later action of the step adds to them, so that they can be
    reduced over copies of the stage. split(later): a context for the forward of a micro-batch whose
    B leaves a W. The modules' backward then appends what W is to do to the list `later`.
    """

    def __init__(self, modules, plans, groups, boundary, before=nothing, after=nothing,
                 split=SplitLinears):
        self.modules = modules
        self.groups = groups
        self.boundary = boundary
        self.before = before
        self.after = after
        self.split = split
        self.plan = plans[groups.rank]
        self.home = homes(plans)
        self.end = max(self.home)  # the last stage
        self.microbatches = 1 + max(action.microbatch for action in self.plan)  # of a step
        self.apart = split_of(self.plan)  # the Bs that leave a W
        self.with_backward = stages_with_backward(plans)
        self.final = {}  # {stage: the last action that adds to its gradients}
        for action in self.plan:
            if self.adds(action):
                self.final[action.stage] = action
        self.route = route_of(plans)
        self.forward_route = [move for move in self.route if move.key[0] == "F"]
        self.mail = Mail(groups, boundary)
        self.anchor = torch.empty(0, device=boundary.device, requires_grad=True)  # see Entry
        self.clock = None  # or an object with mark(), called before and after each action
        self.kept = {}  # {(micro-batch, stage): Kept} of the step that runs
        self.most = 0  # the most of these at a time in the last step
        self.played = []  # [(action, mark, mark), ..] of the last step, if there is a clock
        self.check()

    def check(self):
        """A plan that would leave a parameter without its gradient is refused."""
        if sorted(self.modules) != stages_of(self.plan):
            raise ValueError(f"the plan is for the stages {stages_of(self.plan)}, "
                             f"the modules are {sorted(self.modules)}")
        for stage, module in self.modules.items():
            trained = any(p.requires_grad for p in module.parameters())
            if trained and stage not in self.with_backward:
                raise ValueError(f"stage {stage} has something to train, but no B in the plan")
        backward = {(a.microbatch, a.stage) for a in self.plan if a.kind == "B"}
        for action in self.plan:
            place = (action.microbatch, action.stage)
            wanted = action.kind == "F" and action.stage in self.with_backward
            if wanted and place not in backward:
                raise ValueError("the plan has no B of micro-batch {} in stage {}".format(*place))

    def adds(self, action):
        """Does it add to .grad?"""
        if action.kind == "B":
            return (action.microbatch, action.stage) not in self.apart
        return action.kind == "W"

    def step(self, inputs, loss_fn, update=None):
        """A batch forward and backward: .grad is added to. -> this rank's sum of losses.

        inputs[m]: micro-batch m, for the first stage. loss_fn(output, m): its part of the loss, for
        the last stage. update(): what U does (section 1.5).
        """
        if update is None and any(action.kind == "U" for action in self.plan):
            raise ValueError("the plan has updates: step(inputs, loss_fn, update) makes them")
        self.kept = {}
        self.most = 0
        self.played = []
        return self.play(self.plan, self.route, inputs, loss_fn, update, self.clock)

    @torch.no_grad()
    def evaluate(self, inputs, loss_fn):
        """The forwards alone, without a graph -> this rank's sum of losses."""
        forwards = [action for action in self.plan if action.kind == "F"]
        return self.play(forwards, self.forward_route, inputs, loss_fn)

    def play(self, plan, route, inputs, loss_fn, update=None, clock=None):
        if 0 in self.modules and len(inputs) != self.microbatches:
            raise ValueError(
                f"{len(inputs)} inputs for a plan of {self.microbatches} micro-batches")
        # of one dtype on all ranks, which may want to sum it
        wide = torch.promote_types(self.boundary.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=self.boundary.device)
        self.mail.open(route)
        for action in plan:
            taken = self.take(action, inputs)  # there -> here too
            start = None
            if clock:
                start = clock.mark()
            made = self.do(action, taken, loss_fn, update)
            if clock:
                self.played.append((action, start, clock.mark()))
            self.most = max(self.most, len(self.kept))
            if action.kind == "F" and action.stage == self.end:
                loss = loss + made.to(loss.dtype)
            elif made is not None:
                self.mail.put(key(action), made)  # here -> there too
            del taken, made  # what nobody keeps is free before the next action
        self.mail.finish_send()
        return loss

    def take(self, action, inputs):
        """What an action takes from another stage, or from the batch."""
        if action.kind == "F" and action.stage == 0:
            return inputs[action.microbatch]
        need = source(action, self.end)
        if need is None:
            return None
        taken = self.mail.take(need)
        _, _, stage = need
        if action.kind == "F" and self.home[stage] == self.groups.rank:
            # the stage before is on this rank, and may need its output in backward: this stage gets
            # a copy, which it may change in place
            return taken.clone()
        return taken

    def do(self, action, taken, loss_fn, update):
        """-> what the next stage takes, or the loss, or None."""
        if action.kind == "F":
            return self.forward(action, taken, loss_fn)
        if action.kind == "U":
            update()
            return None
        if not self.adds(action):  # a B that leaves a W
            return self.backward(action, taken)
        is_last = action == self.final[action.stage]
        self.before(action.stage, is_last)
        made = None
        if action.kind == "B":
            made = self.backward(action, taken)
        else:
            weight_gradients(self.kept.pop((action.microbatch, action.stage)).later)
        self.after(action.stage, is_last)
        return made

    def forward(self, action, x, loss_fn):
        place = action.microbatch, action.stage
        slot = None
        upstream = action.stage - 1  # the stage that takes the gradient of x
        if upstream in self.with_backward and torch.is_grad_enabled():
            slot = Slot(x)
            x = Entry.apply(self.anchor, slot)
        later = []
        context = contextlib.nullcontext()
        if place in self.apart:
            context = self.split(later)
        with context:
            y = self.modules[action.stage](x)
            if action.stage == self.end:
                y = loss_fn(y, action.microbatch)
        if action.stage in self.with_backward and torch.is_grad_enabled():
            edge = None  # stays None if nothing is trained up to here, and B has nothing to do
            if y.requires_grad:
                edge = get_gradient_edge(y)
            self.kept[place] = Kept(slot, edge, later)
        return y.detach()

    def backward(self, action, grad):
        """-> the gradient of the stage's input, None if nobody wants it."""
        place = action.microbatch, action.stage
        slot, edge, later = self.kept.pop(place)
        if place in self.apart:
            self.kept[place] = Kept(None, None, later)
        if edge is not None and place in self.apart:
            input_gradient(edge, grad, later)
        elif edge is not None:
            torch.autograd.backward(edge, grad)
        if slot is None:
            return None
        if slot.grad is None:  # the output does not depend on the input, whose gradient is awaited
            size, dtype, device = self.boundary
            return torch.zeros(size, dtype=dtype, device=device)
        return slot.grad


class Chain(nn.ModuleDict):
    """Some layers of an nn.Sequential, by their names there: [(name, layer), ..]."""

    def forward(self, x):
        for layer in self.values():
            x = layer(x)
        return x


class Origin(NamedTuple):
    """Where a tensor of the model's state comes from."""

    rank: int  # that has it, or the first of those that do
    shape: torch.Size
    dtype: torch.dtype


def tied_parameters(whole):
    """-> {parameter: the stages that hold it}, of those that several stages hold."""
    holders = {}
    for stage, module in enumerate(whole):
        for p in module.parameters():
            holders.setdefault(p, []).append(stage)
    return {p: tuple(stages) for p, stages in holders.items() if len(stages) > 1}


class Stages(nn.ModuleList):
    """This rank's stages of a model, and what is known of the others.

    whole: all stages of the model, in order, on every rank; this rank keeps its own. In its stage a
    parameter has the name that it has in the whole model. A parameter that several stages hold is
    tied: each of their ranks has a copy, and their gradients are summed.
    """

    def __init__(self, whole, plans, groups=None):
        table = tied_parameters(whole)
        groups = groups or make_groups(plans, list(table.values()))
        home = homes(plans)
        numbers = stages_of(plans[groups.rank])
        super().__init__([whole[number] for number in numbers])
        self.here = dict(zip(numbers, self))  # {stage: module}
        self.groups = groups
        self.origins = {}  # {name: Origin} of the whole model's state
        self.aliases = {}  # {second name of a tied parameter: its first}
        self.trained = {}  # {first name: Origin} of parameters that are trained
        self.tied = {}  # {trained parameter that other ranks hold too: their group}
        self.elsewhere = set()  # parameters that another rank counts in the norm, and saves
        self.dtype = torch.float32  # of the gradient norm: fp32, or that of a wider gradient
        self.device = next(p.device for module in [*self, *whole] for p in module.parameters())
        self.look_at(whole, home)
        for p, stages in table.items():
            self.note_tied(p, stages, [home[stage] for stage in stages])

    def look_at(self, whole, home):
        """Note the names of all stages' parameters."""
        tensors = {}  # {name: parameter or buffer}
        names = {}  # {parameter or buffer: its first name}
        for stage, module in enumerate(whole):
            for name, t in module.state_dict(keep_vars=True).items():
                if name in tensors and tensors[name] is not t:
                    raise ValueError(
                        f"two stages have a {name!r}: give each the names of the whole model, as "
                        "Chain does for the layers of an nn.Sequential")
                tensors[name] = t
                origin = self.origins.setdefault(name, Origin(home[stage], t.shape, t.dtype))
                first_name = names.setdefault(t, name)
                if first_name != name:
                    self.aliases[name] = first_name
                elif t.requires_grad:
                    self.trained[name] = origin
                    self.dtype = torch.promote_types(t.dtype, self.dtype)

    def note_tied(self, p, stages, ranks):
        """p: a parameter; stages: those that hold it; ranks: where each of these is."""
        if self.groups.rank in ranks and self.groups.rank != ranks[0]:
            self.elsewhere.add(p)
        if len(set(ranks)) == 1 or not p.requires_grad:
            return  # the rank has it once, or it has no gradient
        if stages not in self.groups.sharing:
            raise ValueError(f"the stages {stages} hold a tied parameter, and there is no group to "
                             f"sum its gradient: make_groups(plans, shared=[{stages}]) makes one")
        if self.groups.rank in ranks:
            self.tied[p] = self.groups.sharing[stages]

    def named(self):
        """-> {first name in the whole model: parameter} of this rank's parameters."""
        found = {}
        for stage in self:
            for name, p in stage.named_parameters(remove_duplicate=False):
                found[self.aliases.get(name, name)] = p
        return found

    def sum_tied_gradients(self):
        """Ranks that hold a copy of a parameter sum what each has of its gradient."""
        for p, group in self.tied.items():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)  # partial -> replicated among those that hold it

    def gradient_norm(self):
        """-> the norm of the whole model's gradient, in which a tied parameter counts once."""
        counted = [p.grad for p in self.parameters() if p not in self.elsewhere]
        counted = [grad for grad in counted if grad is not None]
        square = torch.zeros((), dtype=self.dtype, device=self.device)
        if counted:
            norms = torch._foreach_norm(counted, dtype=self.dtype)
            square = torch.stack(norms).square().sum()
        dist.all_reduce(square, group=self.groups.group)  # partial -> replicated
        return square.sqrt()

    def sum_and_clip(self, clip):
        """What is left to do between backward and the optimizer's step -> the gradient norm."""
        self.sum_tied_gradients()
        norm = self.gradient_norm()
        clip_gradients(self.parameters(), clip, norm)
        return norm

    def full_state_dict(self):
        """-> {name: tensor} of the whole model, on every rank."""
        mine = {}
        for stage in self:
            mine |= stage.state_dict()
        return gather(mine, self.origins, self.groups, self.device)

    def full_gradients(self):
        """-> {name: gradient} of all that is trained, on every rank."""
        mine = {}
        for name, p in self.named().items():
            mine[name] = p.grad
            if p.grad is None:
                mine[name] = torch.zeros_like(p)  # the stage has it, and does not use it
        return gather(mine, self.trained, self.groups, self.device)


def clip_gradients(parameters, clip, norm):
    """Scale gradients down to a norm of at most clip (0: any). If the norm is inf or nan they stay.
    """
    norm = norm.nan_to_num(0, posinf=0)
    nn.utils.clip_grads_with_norm_(parameters, clip or math.inf, norm)


def gather(mine, origins, groups, device):
    """{name: tensor} of this rank -> of all ranks of the pipeline. origins: {name: Origin} of all,
    in the same order on all ranks."""
    together = {}  # {(rank, dtype): names of what goes in one message}
    for name, origin in origins.items():
        together.setdefault((origin.rank, origin.dtype), []).append(name)
    whole = {}
    for (rank, dtype), names in together.items():
        shapes = [origins[name].shape for name in names]
        sizes = [shape.numel() for shape in shapes]
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        if rank == groups.rank:
            flat = torch.cat([mine[name].flatten() for name in names])
        # on one rank -> replicated
        dist.broadcast(flat, src=groups.ranks[rank], group=groups.group)
        for name, shape, part in zip(names, shapes, flat.split(sizes)):
            whole[name] = part.view(shape)
    return whole


# ---- 1.5 PipeDream: an update after every micro-batch, while others are under way ----
#
#     rank 0, in order   F0 F1 B0 U F2 B1 U F3 B2 U B3    F1 sees no update, F2 one, F3 two
#     rank 1, in order   F0 B0 U F1 B1 U F2 B2 U F3 B3    F1 sees one, F2 two, F3 three


class Stash(nn.Module):
    """A micro-batch's backward uses the weights of its forward, copied until then (Harlap 2018)."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        weights = {name: p.clone() for name, p in self.module.named_parameters()}
        return torch.func.functional_call(self.module, weights, (x,))


def update_stages(stages, tied, optimizer, clip):
    """U. stages: a list of parameters for each. A stage clips by its own norm, so that it need not
    wait for the others'. Gradients of tied parameters, on which two stages would have to agree, are
    kept for the end of the step."""
    waiting = [p.grad for p in tied]
    for p in tied:
        p.grad = None
    for parameters in stages:
        nn.utils.clip_grad_norm_(parameters, clip or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    for p, grad in zip(tied, waiting):
        p.grad = grad


# ---- 2. the toy GPT, parallelized --------------------------------------------


def split_layers(count, plans, head=None):
    """-> how many of the layers each stage gets: about equally many.

    head: what the head is worth in layers. If it is given, ranks have equally much to do, the head
    counted; then each stage but the last has a layer at least.
    """
    home = homes(plans)
    stages = len(home)
    if head is None:
        return [len(share(count, stages, stage)) for stage in range(stages)]
    layers = [1] * (stages - 1) + [0]
    load = Counter(home[stage] for stage in range(stages - 1))  # {rank: layers}
    load[home[stages - 1]] += head
    for _ in range(count - sum(layers)):
        # to the rank that has least, and there to the stage that has least
        stage = min(range(stages), key=lambda s: (load[home[s]], layers[s], s))
        layers[stage] += 1
        load[home[stage]] += 1
    return layers


class Stage(nn.Module):
    """The plain GPT's modules of one stage, by the names that they have there."""

    def __init__(self, model, layers, first, last):
        super().__init__()
        self.first = first  # has it the embeddings?
        self.last = last  # has it the head?
        if first:
            self.tok = model.tok
            self.pos = model.pos
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in layers})
        if last:
            self.norm = model.norm
            self.head = model.head

    embed = GPT.embed

    def forward(self, x):  # the first (B/M, T), the others (B/M, T, C)
        if self.first:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        if self.last:
            x = self.head(self.norm(x))
        return x  # (B/M, T, C), the last (B/M, T, V)


def carve(model, layers):
    """The plain GPT -> all its stages, which share its modules. layers: how many each gets."""
    whole = []
    begin = 0
    for stage, count in enumerate(layers):
        last = stage == len(layers) - 1
        whole.append(Stage(model, range(begin, begin + count), stage == 0, last))
        begin += count
    return whole


def trim(whole, plans):
    """The plans without backward where nothing is trained, neither in a stage nor before it."""
    for stage, module in enumerate(whole):
        if any(p.requires_grad for p in module.parameters()):
            return without_backward(plans, stage)
    return without_backward(plans, len(whole))


def as_it_is(stage):
    return stage


class PipelinedGPT(Stages):
    """This rank's stages of the GPT, and the Pipeline that runs them."""

    def __init__(self, whole, plans, groups, boundary, wrap=as_it_is):
        super().__init__(whole, plans, groups)
        self.plans = plans  # all ranks'
        self.rows = boundary.size[0]  # of a micro-batch
        modules = {number: wrap(stage) for number, stage in self.here.items()}
        self.pipeline = Pipeline(modules, plans, groups, boundary)

    def forward_backward(self, x, y, valid, update=None):
        """-> this rank's part of the loss of the batch: the last stage has all of it."""
        targets = y.split(self.rows)

        def loss_of(logits, microbatch):
            return loss_sum(logits, targets[microbatch]) / valid
        return self.pipeline.step(x.split(self.rows), loss_of, update)

    def evaluate(self, x, y):
        """-> this rank's part of the sum of token losses; no graph."""
        targets = y.split(self.rows)

        def loss_of(logits, microbatch):
            return loss_sum(logits, targets[microbatch])
        return self.pipeline.evaluate(x.split(self.rows), loss_of)


def parallelize(model, plans, boundary, layers=None, groups=None, wrap=as_it_is):
    """The plain GPT -> this rank's part of it. wrap(stage): around each (PipeDream's Stash)."""
    if layers is None:
        layers = split_layers(len(model.blocks), plans)
    whole = carve(model, layers)
    if groups is None:
        groups = make_groups(plans, list(tied_parameters(whole).values()))
    return PipelinedGPT(whole, trim(whole, plans), groups, boundary, wrap)


def full_state_dict(model):
    return model.full_state_dict()


def full_gradients(model):
    return model.full_gradients()


def train_step(model, optimizer, x, y, valid, clip):
    """x, y: the whole batch (B, T); the first stage needs x, the last y -> this rank's part of the
    loss, the gradient norm."""
    optimizer.zero_grad()
    loss = model.forward_backward(x, y, valid)
    norm = model.sum_and_clip(clip)
    optimizer.step()
    return loss, norm


def train_step_pipedream(model, optimizer, x, y, valid, clip):
    """The same with an update of each stage after each of its backwards (section 1.5)."""
    def update_here():
        update_stages([list(model.parameters())], list(model.tied), optimizer, clip)
    optimizer.zero_grad()
    loss = model.forward_backward(x, y, valid, update_here)
    norm = model.sum_and_clip(clip)
    optimizer.step()
    return loss, norm


def evaluate(model, x, y):
    return model.evaluate(x, y)


def stale_step(model, optimizer, x, y, valid, clip, stages, plans):
    """A step of PipeDream in one process -> loss, norm: what the pipeline is checked against.

    stages: the trained parameters of the plain model in each stage. versions[n] are the weights
    after n updates. In micro-batch m a stage uses versions[n] if its rank's plan has n Us before
    its F of m.
    """
    optimizer.zero_grad()
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    held = Counter(p for parameters in stages for p in parameters)  # {parameter: its stages}
    tied = [p for p in names if held[p] > 1]
    microbatches = 1 + max(action.microbatch for action in plans[0])
    total = 0.0
    versions = []  # versions[n]: {parameter: its value after n updates}
    for m, (rows, targets) in enumerate(zip(x.chunk(microbatches), y.chunk(microbatches))):
        versions.append({p: p.detach().clone() for p in names})
        seen = {}  # {parameter: its value in this micro-batch's forward}
        for rank, parameters in enumerate(stages):  # one stage a rank
            begin = plans[rank].index(Action("F", m, rank))
            updates = [action for action in plans[rank][:begin] if action.kind == "U"]
            version = versions[len(updates)]
            for p in parameters:
                # a tied p is in two stages, but all its versions are equal: update_stages() does
                # not step it
                seen[p] = version[p].requires_grad_()
        weights = {names[p]: value for p, value in seen.items()}
        logits = torch.func.functional_call(model, weights, (rows,))
        loss = loss_sum(logits, targets) / valid
        grads = torch.autograd.grad(loss, list(seen.values()))
        for p, grad in zip(seen, grads):
            if p.grad is not None:  # of a tied one, kept by update_stages()
                grad = grad + p.grad
            p.grad = grad
        total += loss.detach()
        if m < microbatches - 1:
            update_stages(stages, tied, optimizer, clip)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    optimizer.step()
    return total, norm


def plain_pipedream(run, plans, layers):
    """PipeDream's steps by one process -> Trace."""
    model = run.build()
    stages = [[p for p in stage.parameters() if p.requires_grad] for stage in carve(model, layers)]
    optimizer = adamw(model.parameters(), run.args.lr)
    trace = Trace()
    for step in range(run.plain_start(model, optimizer), run.checked + 1):
        if step == run.first and run.args.eval_every:
            trace.validation[step - 1] = run.validate_plain(model)
        run.set_rate(optimizer, step)
        x, y, valid = run.batch(step)
        loss, norm = stale_step(model, optimizer, x, y, valid, run.args.clip, stages, plans)
        if step >= run.first:
            trace.log(step, loss, norm)
            if run.validates(step):
                trace.validation[step] = run.validate_plain(model)
        if run.keeps(step):
            named = model.named_parameters()
            gradients = {name: p.grad for name, p in named if p.requires_grad}
            trace.keep(step, gradients, model.state_dict())
    return trace


# ---- 3. at work: the same with torch's own API -------------------------------

AT_WORK = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "bfs": "ScheduleLoopedBFS",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
ONE_STAGE = "gpipe", "1f1b"  # classes for one stage per rank


class PipelinedGPTAtWork(PipelinedGPT):
    """The same, trained by torch's schedule. Evaluation is ours: torch 2.13's eval() does not know
    V-shaped schedules."""

    def __init__(self, whole, plans, groups, boundary, name):
        from torch.distributed import pipelining  # takes as long to import as all the rest
        super().__init__(whole, plans, groups, boundary)
        self.valid = 1  # targets of the batch that runs
        self.has_first = 0 in self.here
        self.has_last = len(whole) - 1 in self.here
        stages = [self.stage_at_work(pipelining, number, len(whole), boundary)
                  for number in self.here]
        if name in ONE_STAGE:
            [stages] = stages  # these classes take the stage itself, not a list
        microbatches = 1 + max(action.microbatch for action in plans[0])
        self.schedule = getattr(pipelining.schedules, AT_WORK[name])(
            stages, microbatches, loss_fn=self.loss_of, scale_grads=False)  # gradients are a sum

    def stage_at_work(self, pipelining, number, stages, boundary):
        """-> torch's stage, told all shapes: to ask other ranks for them torch needs NumPy."""
        module = self.here[number]
        edge = torch.empty(boundary.size, dtype=boundary.dtype, device=boundary.device)
        edge.requires_grad_()
        taken = edge
        made = edge
        if module.first:
            taken = edge.new_empty(boundary.size[:2], dtype=torch.int64)
        if module.last:
            made = edge.new_empty(*boundary.size[:2], module.head.out_features)
        return pipelining.PipelineStage(
            module, number, stages, boundary.device,
            input_args=taken, output_args=made, group=self.groups.group)

    def loss_of(self, logits, targets):
        return loss_sum(logits, targets) / self.valid

    def forward_backward(self, x, y, valid):
        self.valid = valid
        inputs = []
        target = None
        losses = []
        if self.has_first:
            inputs = [x]
        if self.has_last:
            target = y
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        return sum(losses, start=torch.zeros((), device=x.device))


def parallelize_at_work(model, plans, boundary, name, layers, groups):
    whole = carve(model, layers)
    return PipelinedGPTAtWork(whole, trim(whole, plans), groups, boundary, name)


# ---- 4. run ------------------------------------------------------------------

FLAGS = {
    "schedule": Flag("1f1b", "order of the work", tuple(SCHEDULES)),
    "micro": Flag(4, "M, micro-batches", POSITIVE),
    "chunks": Flag(2, "v, stages per rank (interleaved and bfs)", POSITIVE),
    "limit": Flag(int, "micro-batches in flight on a rank (auto; as many as ranks)", POSITIVE),
    "layers_per_stage": Flag("", "5,6,..; or balanced, the head counted (equally many each)"),
    "simulate": Flag(False, "play the schedule without ranks"),
    "pp": Flag(int, "p, ranks (simulation only)", POSITIVE),
    "times": Flag(str, "F,B,W,COMM of a rank and micro-batch (simulation: 1,1,1,0; auto measures)"),
}


def refuse(args):
    """What cannot run ends here, in one line, before anything is built."""
    name = args.schedule
    ranks = args.pp or args.world_size
    stages = ranks * chunks_of(name, args.chunks)
    require(args.simulate or not args.pp, "--pp is for --simulate only")
    require(args.simulate or not args.times or name == "auto",
            "--times is for --simulate and --schedule auto only")
    require(not args.limit or name == "auto", f"--limit is for --schedule auto, not for {name}")
    require(name != "interleaved" or args.micro % ranks == 0,
            f"--micro {args.micro}: interleaved needs a multiple of the {ranks} ranks")
    if args.simulate:
        return
    require(args.layers_per_stage or stages <= args.layers, too_few(args.layers, stages))
    scratch = args.impl == "scratch"
    require(args.batch % args.micro == 0,
            f"--batch {args.batch} does not divide into --micro {args.micro} micro-batches")
    require(name != "pipedream" or not (args.save or args.resume),
            "--schedule pipedream takes no --save and no --resume: checkpoints do not say how "
            "often each parameter was updated, which differs here")
    require(scratch or name in AT_WORK, f"--schedule {name}: torch has {', '.join(AT_WORK)} only")
    require(scratch or not args.dry_run,
            "--dry-run needs --impl scratch: torch's asks other ranks")
    require(not args.dry_run or name != "auto" or args.times,
            "--dry-run --schedule auto needs --times: nothing can be measured")
    if not scratch:
        refuse_at_work(name, args.micro, ranks)


def refuse_at_work(name, micro, ranks):
    """Refuses what torch's schedules would raise for."""
    is_vee = SCHEDULES[name].place is vee
    require(not is_vee or torch.__version__ >= (2, 13),
            f"--schedule {name}: torch {torch.__version__} sends from a rank to itself there, and "
            "gloo cannot: take torch 2.13, or --impl scratch")
    require(name != "1f1b" or micro >= ranks,
            f"--micro {micro}: torch's 1f1b wants {ranks} or more, one for each stage")
    rounds = max(1, micro // ranks)
    require(name != "zb-h1" or micro % rounds == 0,
            f"--micro {micro}: torch's zb-h1 wants {rounds} rounds of equally many")


def too_few(layers, stages):
    return f"--layers {layers} for {stages} stages: give each at least one"


def read_times(text):
    """--times -> F, B, W, COMM."""
    wrong = f"--times {text}: F,B,W,COMM are four numbers"
    try:
        times = [float(number) for number in text.split(",")]
    except ValueError:
        require(False, wrong)
    require(len(times) == 4, f"--times {text}: four are needed, not {len(times)}")
    require(all(0 <= time <= 1e9 for time in times), f"{wrong} from 0 to 1e9")
    require(sum(times[:3]) >= 1e-9, f"{wrong}, F + B + W 1e-9 or more")
    return times


def read_plans(args, times):
    """-> all ranks' plans."""
    ranks = args.pp or args.world_size
    try:
        plans = make_plans(args.schedule, ranks, args.micro, args.chunks, args.limit, times)
    except ValueError as error:
        require(False, f"--micro {args.micro}: {error}")
    return plans


def read_layers(args, plans):
    """--layers-per-stage -> how many layers each stage has."""
    text = args.layers_per_stage
    stages = len(homes(plans))
    if not text:
        return split_layers(args.layers, plans)
    if text == "balanced":
        require(stages <= args.layers, too_few(args.layers, stages))
        return split_layers(args.layers, plans, head_in_layers(args.cfg))
    wrong = f"--layers-per-stage {text}: {stages} numbers are needed, one a stage"
    try:
        layers = [int(count) for count in text.split(",")]
    except ValueError:
        require(False, wrong)
    require(len(layers) == stages, wrong)
    least = min(layers[1:-1], default=1)  # the ends have the embeddings and the head
    require(least >= 1 and min(layers) >= 0,
            f"--layers-per-stage {text}: give each at least one, but for the first and the last")
    require(sum(layers) == args.layers,
            f"--layers-per-stage {text}: they are {sum(layers)}, but --layers {args.layers}")
    return layers


def head_in_layers(cfg):
    """The matmul of the head, V C, in those of a block, 12 C C."""
    return cfg.vocab / (12 * cfg.width)


def simulated(args, plans, layers, times, joined=False):
    """-> the plans with times, for each rank [(action, start, end), ..].

    With --layers-per-stage a stage takes time in proportion to its layers, the head counted, and F,
    B, W are what a rank takes on average.
    """
    sizes = None
    if args.layers_per_stage:
        work = [float(count) for count in layers]
        work[-1] += head_in_layers(args.cfg)
        mean = sum(work) / len(plans)  # of a rank
        sizes = [amount / mean for amount in work]
    F, B, W, comm = times
    try:
        return simulate(plans, costs(plans, F, B, W, sizes), comm, joined)
    except RuntimeError as error:
        require(False, f"--schedule {args.schedule}: {error}")


def summary(plans, played):
    return {
        "bubble_rate": bubble_rate(played),
        "in_flight": [in_flight(plan) for plan in plans],
    }


POST_VALIDATION = """\
The rate is (cost - M (F + B + W)) / cost, cost the longest span of a rank (Qi 2023, section 5.3).
When its plan is done, each rank waits for the norm of all. Qi's post-validation (section 4) would
spare that: a rank steps on what those before it have told it, and takes the step back in the rare
case that the whole norm says otherwise."""


def simulation(args, plans, layers, times):
    """--simulate: no ranks, no model -> exit code."""
    played = simulated(args, plans, layers, times)
    result = dict(summary(plans, played), cost=longest(played))
    flying = " ".join(f"{count:g}" for count in result["in_flight"])
    print(grid(played))
    print(f"{args.schedule}: {result['cost']:g} from first to last, bubble rate "
          f"{result['bubble_rate']:.4f}, micro-batches in flight by rank {flying}")
    if any(action.joined for plan in plans for action in plan):
        pairs = simulated(args, plans, layers, times, joined=True)
        result["joined_bubble_rate"] = bubble_rate(pairs)
        print(f"with each F and B that are a pair as one action: {longest(pairs):g}, bubble rate "
              f"{bubble_rate(pairs):.4f}")
    print(POST_VALIDATION)
    if args.json:
        own = {name: value for name, value in vars(args).items() if name != "cfg"}
        report = dict(script="pipeline_parallel", args=own, **result)
        Path(args.json).write_text(json.dumps(report, indent=1))
    return 0


def start_clock(run, pipeline):
    """From here on each action is timed -> this moment by two clocks: the host's, by which ranks
    are compared (those of several nodes have to agree), and the run's, which times actions."""
    if run.device.type == "cuda":
        torch.cuda.synchronize()  # between two steps the host may wait: no action is being timed
    dist.barrier()
    pipeline.clock = run.clock
    return time.time(), run.clock.mark()


def read_clock(run, pipeline, begin, plans, label):
    """-> the step as all ranks have played it, in seconds. begin: what start_clock has given."""
    pipeline.clock = None
    host, origin = begin
    spans = []
    for _, *marks in pipeline.played:
        spans.append([host + 1e-3 * run.clock.ms(origin, mark) for mark in marks])
    run.store.set(f"{label} {run.rank}", json.dumps(spans))
    reports = [run.store.get(f"{label} {rank}") for rank in range(run.world_size)]
    return measured(plans, reports)


def measure_times(run, groups, boundary):
    """For --schedule auto without --times: F, B, W, COMM of the third pass as zb-h1."""
    plans = make_plans("zb-h1", run.world_size, run.args.micro)
    model = parallelize(run.build(), plans, boundary, groups=groups)
    plans = model.plans  # without backward where nothing is trained
    x, y, valid = run.batch(0)
    for trial in range(3):  # the first two warm up
        begin = start_clock(run, model.pipeline)
        model.forward_backward(x, y, valid)
        played = read_clock(run, model.pipeline, begin, plans, f"trial {trial}")
    *work, transfer = typical_times(plans, played)
    if not all(work):  # the clock saw no time pass
        work = [1.0, 1.0, 1.0]
    return *work, transfer


def set_up(run, impl, plans, layers, groups, boundary):
    """-> a Side: the model of this implementation, and what a run does with it."""
    name = run.args.schedule
    step = train_step
    if impl == "torch":
        model = parallelize_at_work(run.build(), plans, boundary, name, layers, groups)
    elif name == "pipedream":
        model = parallelize(run.build(), plans, boundary, layers, groups, wrap=Stash)
        step = train_step_pipedream
    else:
        model = parallelize(run.build(), plans, boundary, layers, groups)
    optimizer = adamw(model.parameters(), run.args.lr)
    return Side(
        model=model,
        optimizer=optimizer,
        train_step=step,
        full_gradients=lambda: full_gradients(model),
        full_state_dict=lambda: full_state_dict(model),
        evaluate=lambda k: evaluate(model, *run.held_out(k)),
        pieces=lambda: pieces(model, optimizer),
    )


def pieces(model, optimizer):
    """What this rank holds, by the plain GPT's names; a tied parameter is saved by its first rank.
    """
    own = {name: p for name, p in model.named().items() if p not in model.elsewhere}
    copies = {name: p for name, p in model.named().items() if p in model.elsewhere}
    return (pieces_of(own.items(), optimizer, writes=True)
            + pieces_of(copies.items(), optimizer, writes=False))


def account(run, model):
    """The textbook's rows for this rank: b bytes a number, P parameters here."""
    ledger = run.ledger[run.impls[0]]
    account_sent(run, model, ledger.collectives)
    account_held(run, model, ledger.memory)
    if run.impls[0] == "scratch":
        # `most` counts a micro-batch once for each stage that keeps it
        kept = model.pipeline.most / len(model.here)
        run.textbook("micro-batches kept", "the schedule's",
                     in_flight(model.plans[run.rank]), kept, unit="count")


def account_sent(run, model, collectives):
    cfg = run.cfg
    b = run.dtype.itemsize
    w = max(b, 4)
    ranks = run.world_size
    sent = {kind: count["wire"] for kind, count in collectives.items()}
    crossed = crossings(model.plans, run.rank)
    run.textbook(
        "wire send", f"b B T C, {crossed} times: from each stage here to its neighbours elsewhere, "
        "forward, and backward to what is trained",
        b * crossed * run.args.batch * cfg.seq * cfg.width, sent.get("send", 0))
    tied = len(model.tied) * cfg.vocab * cfg.width
    run.textbook(
        "wire all_reduce", "b V C where a rank shares the tied embedding with another "
        "+ 2 (p-1)/p w for the norm, w = max(b, 4)",
        b * tied + 2 * (ranks - 1) / ranks * w, sent.get("all_reduce", 0))


def crossings(plans, rank):
    """How many times a micro-batch's tensor goes from this rank to another."""
    home = homes(plans)
    with_backward = stages_with_backward(plans)
    count = 0
    for stage in stages_of(plans[rank]):
        if stage + 1 in home and home[stage + 1] != rank:
            count += 1  # its output
        if stage - 1 in with_backward and home[stage - 1] != rank:
            count += 1  # the gradient of its input
    return count


def account_held(run, model, held):
    b = run.dtype.itemsize
    everything = b * sum(p.numel() for p in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    size = b * sum(p.numel() for p in trained)
    run.textbook("parameters held", "b P", everything, held["parameters"])
    run.textbook("gradients held", "b P that are trained", size, held["gradients"])
    run.textbook("AdamW states held", "2 b P that are trained + 4 per tensor",
                 2 * size + 4 * len(trained), held["optimizer"])


def show_step(run, plans, played):
    """The step before the last, as planned and as it was."""
    text, figures = compare(plans, played)
    run.say(text)
    run.extra.update(figures)  # its bubble_rate takes the place of the simulation's


def train(run, sides):
    """All steps. Of ours the last but one is timed, action by action, but not in a dry run."""
    watched = max(run.first, run.last - 1)
    for impl, step in run.steps():
        side = sides[impl]
        run.set_rate(side.optimizer, step)
        x, y, valid = run.batch(step)
        begin = None
        if impl == "scratch" and step == watched and not run.dry:
            begin = start_clock(run, side.model.pipeline)
        with run.measure(impl, step):
            loss, norm = side.train_step(side.model, side.optimizer, x, y, valid, run.args.clip)
        run.log(impl, step, loss, norm)
        if begin:
            plans = side.model.plans
            show_step(run, plans, read_clock(run, side.model.pipeline, begin, plans, "step"))


def main():
    args = arguments(__doc__, **FLAGS)
    refuse(args)
    times = read_times(args.times or "1,1,1,0")
    plans = read_plans(args, times)
    layers = read_layers(args, plans)
    if args.simulate:
        return simulation(args, plans, layers, times)
    run = Run(args)
    rows = args.batch // args.micro
    boundary = Boundary(torch.Size((rows, run.cfg.seq, run.cfg.width)), run.dtype, run.device)
    with run:
        shared = [(0, len(layers) - 1)]  # the stages of the tied embedding
        groups = make_groups(plans, shared)
        if args.schedule == "auto" and not args.times:
            times = measure_times(run, groups, boundary)
            plans = read_plans(args, times)
            run.say("auto: F, B, W, COMM take {:.3g}, {:.3g}, {:.3g}, {:.3g} s".format(*times))
        sides = {}
        for impl in run.impls:
            sides[impl] = set_up(run, impl, plans, layers, groups, boundary)
        run.begin(sides)
        model = sides[run.impls[0]].model
        run.extra.update(summary(model.plans, simulated(args, model.plans, layers, times)))
        total = sum(p.numel() for p in run.build().parameters())
        own = sum(p.numel() for p in model.parameters())
        run.say(f"pipeline_parallel: {args.schedule}, {run.world_size} ranks on {run.device.type}, "
                f"{args.dtype}, {total:,} parameters, {own:,} of them here")
        train(run, sides)
        account(run, model)
        plain = None
        if args.schedule == "pipedream":
            plain = partial(plain_pipedream, run, model.plans, layers)
        return run.finish(total, own, plain)


if __name__ == "__main__":
    sys.exit(main())
