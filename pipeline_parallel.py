"""Pipeline parallelism: each rank holds some of the layers, and micro-batches flow through them.

    1f1b, 2 ranks, 4 micro-batches, B (does W, too) as long as two Fs; dots: the rank waits
    rank 0   F0 F1 ......B0    F2 B1    F3 B2    ...B3
    rank 1   ...F0 B0    F1 B1    F2 B2    F3 B3    ......

A schedule is data: each rank has a list of actions. F is a micro-batch's forward in a stage, B its
backward, which may leave the gradients of nn.Linears' weights to a later action, W. A stage sends
its output, (batch/M, T, C), to the next, and gets back a gradient of that size. Rank r of 0 to p-1
has 1/p of the layers, in v stages. In the table, for M >= 2p, F, B and W are a rank's times for one
micro-batch (a B that leaves no W takes B + W). Idle counts from a rank's first action to its last.

    schedule                    worst rank's idle time  activations kept on rank r, in micro-batches
    plain GPT                   0                       p M: it has all layers
    naive                       (p-1) (F + B + W) M     1
    gpipe                       (p-1) (F + B + W)       M
    1f1b                        (p-1) (F + B + W)       p - r
    pipedream                   (p-1) (F + B + W)       p - r, each with a copy of the weights
    interleaved                 (p-1) (F + B + W) / v   p + (p-1-2r) / v
    bfs                         (p-1) (F + B + W) / v   M
    zb-h1 (W <= F)              (p-1) (F + B - W)       p
    zb-h2 (W <= F, 2W <= F+B)   (p-1) (F + B - 2W)      2p - 1
    zb-v (F = B = W)            0                       p
    dualpipe-v (F = B = W)      (p-1) F / 2             p + 1/2

    plans = make_plans("1f1b", ranks=2, microbatches=4)
    stages = Stages([layers[:3], layers[3:]], plans)  # layers: nn.Sequential, the whole model
    mail = Mail(plans, ranks=[0, 1], group=None, links=make_links(plans, [[0, 1]]),
                size=(batch // 4, T, C), dtype=torch.float32, device="cpu")
    pipeline = Pipeline(stages.here, plans, mail)
    loss = pipeline.step(x.chunk(4), loss_fn)  # of loss_fn(output, m); 0 without the last stage
    norm = stages.sum_and_clip(1.0)        # then optimizer.step() and optimizer.zero_grad()

Not for: stages that pass on anything but one tensor of one size, or change their input in place;
ranks without parameters; parameters replaced later; several pipelines. Other ranks' layers may be
on the meta device. Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241; others
stand at each schedule. At work: torch.distributed.pipelining (section 3).

    torchrun --standalone --nproc_per_node=2 pipeline_parallel.py --schedule zb-v
    python pipeline_parallel.py --simulate --schedule zb-h1 --pp 4 --micro 8 --times 1,1,1,0
"""
import copy
import itertools
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

# imports of section 1 end here; the rest is for sections 2 to 4
import sys

from common import adamw, loss_sum, share
from harness.checkpoint import pieces_of
from harness.flags import POSITIVE, Flag, arguments, require
from harness.run import Run, Side
from harness.timeline import in_flight, numbers, planned, read_times, simulation, span, watched
from harness.usage import refusing

# ---- 1. the technique (copy this; it needs only torch) -----------------------
# In comments a tensor is "partial" if each rank has a summand of it, "replicated" if all have it.

# ---- 1.1 schedules: what each rank does, in order ----


class Action(NamedTuple):
    """One piece of a rank's work. It is also the name of the tensor that it makes."""

    kind: str  # F forward; B backward; W gradients of weights that a B left; U update
    microbatch: int
    stage: int  # a part of the model's layers, 0 the first; a rank may hold several
    joined = False  # no field, a constant: see Joined


class Joined(Action):
    """An F that can overlap with the B that follows it: a simulation may play both as one action.
    Pipeline plays it like the Action with the same fields, to which it is equal."""

    joined = True


def sweep(kind, microbatches, stages, at_once):
    """-> actions of this kind in rounds of `at_once` micro-batches. All micro-batches of a round
    go through one stage, then all through the next; after the last stage the next round begins."""
    order = []
    for first in range(0, microbatches, at_once):
        in_round = range(first, min(first + at_once, microbatches))
        order += [Action(kind, microbatch, stage) for stage in stages for microbatch in in_round]
    return order


def turns(microbatches, warmup, stages, at_once=1):
    """-> `warmup` forwards, then a forward and a backward in turn, then the remaining backwards."""
    forwards = sweep("F", microbatches, stages, at_once)
    backwards = sweep("B", microbatches, stages[::-1], at_once)
    plan = forwards[:warmup]
    steady = forwards[warmup:]
    for pair in zip(steady, backwards):
        plan += pair
    return plan + backwards[len(steady):]


def follow(plan, kind, lag):
    """-> the plan with an action of this kind after each B: with lag 0 it belongs to this B, with
    lag n to the B that came n Bs earlier. The plan ends with those that are still waiting."""
    longer = []
    waiting = []
    for action in plan:
        longer.append(action)
        if action.kind == "B":
            waiting.append(Action(kind, action.microbatch, action.stage))
            if len(waiting) > lag:
                longer.append(waiting.pop(0))
    return longer + waiting


def in_words(stages, *lines):
    """-> the plan of a rank with two stages. Each line has words, and how many times they come.

    F, B    the next forward, the next backward of the first stage; f, b of the second
    I, i    a B, a b that makes the gradient of its input alone and leaves a W
    W       the oldest W that is left, of either stage; those left after all lines end the plan
    F&, f&  an F, an f that is Joined
    """
    plan = []
    upcoming = defaultdict(int)  # {(F or B, stage): its next micro-batch}
    left = deque()  # Ws
    for words, times in lines:
        for word in words.split() * times:
            if word == "W":
                plan.append(left.popleft())
                continue
            kind = "F" if word[0] in "Ff" else "B"
            stage = stages[0] if word[0].isupper() else stages[1]
            microbatch = upcoming[kind, stage]
            upcoming[kind, stage] += 1
            make = Joined if word.endswith("&") else Action
            plan.append(make(kind, microbatch, stage))
            if word in "Ii":
                left.append(Action("W", microbatch, stage))
    return plan + list(left)


def zb_v(r, p, M, stages):
    n = max(M, 2 * p - 1)  # the words want that many micro-batches; those beyond M are dropped
    plan = in_words(
        stages,
        ("F", 2 * (p - r) - 1),  # until the first micro-batch comes to the second stage
        ("f F", r),  # until the first gradient comes to the second stage
        ("f i W", p - r),  # until the first gradient comes to the first stage
        ("F I W f i W", n - 2 * p + 1 + r),  # the steady state
        ("I W f i W", p - 1 - r),  # no F is left
        ("I i", r),  # no f is left; Ws are put off, since other ranks wait for Bs
        ("I W", p - r),
    )
    return [action for action in plan if action.microbatch < M]


def dualpipe_v(r, p, M, stages):
    # the last rank does not join its first F and b: that can make the bubble smaller
    first = "F b f& B" if r == p - 1 else "F& b f& B"
    return in_words(
        stages,
        ("F", 2 * (p - 1 - r)),
        ("F f", r + 1),
        ("i W f", p - 1 - r),
        (first, 1),
        ("F& b f& B", M - 2 * p + r),
        ("b f& B", p - 1 - r),  # no F is left
        ("b B", (r + 1) // 2),  # no f is left, but r + 1 bs and Bs each
        ("b I", (r + 1) % 2),
        ("i I", (r + 1) // 2),  # the later half of them leave Ws
        ("W I", p - 1 - r),  # no b is left
    )


def loop(r, p, chunks):
    """-> the stages of rank r of p, if stage s is on rank s % p."""
    return list(range(r, p * chunks, p))


def vee(r, p, chunks):
    """-> the same, if stages go down the ranks and up again: rank 0 has the first and the last."""
    return [r, 2 * p - 1 - r]  # chunks is 2


class Schedule(NamedTuple):
    place: Callable  # (rank r, of p, chunks) -> the stages of the rank
    chunks: int | None  # stages per rank; None: as many as make_plans is told
    order: Callable  # (rank r, of p, micro-batches M, its stages s) -> the rank's plan


# The pictures are for F = B = W and 2 ranks with 4 micro-batches (naive, bfs: 2). Small letters are
# a rank's second stage. A B that leaves no W is twice as long: it does the W, too.
SCHEDULES = {
    # One micro-batch at a time: one rank is at work.
    #     rank 0   F0 .........B0    F1 .........B1
    #     rank 1   ...F0 B0    .........F1 B1    ......
    "naive": Schedule(loop, 1, lambda r, p, M, s: turns(M, 0, s)),
    # All forwards, then all backwards (Huang 2019, arXiv:1811.06965, figure 2c).
    #     rank 0   F0 F1 F2 F3 .........B0    B1    B2    B3
    #     rank 1   ...F0 F1 F2 F3 B0    B1    B2    B3    ......
    "gpipe": Schedule(loop, 1, lambda r, p, M, s: turns(M, M, s)),
    # Each backward as early as can be: rank r begins with one F for each later rank; then an F and
    # a B take turns (Harlap 2018, arXiv:1806.03377, figure 8). The docstring has the picture.
    "1f1b": Schedule(loop, 1, lambda r, p, M, s: turns(M, p - 1 - r, s)),
    # 1f1b with several stages per rank: filling and draining take less time (Narayanan 2021,
    # arXiv:2104.04473, figure 4). M has to be a multiple of p. A rank begins with p Fs in each of
    # its stages but the last, and two more for each later rank: there and back.
    #     rank 0   F0 F1 f0 f1 F2 ...b0    F3 b1    f2 B0    f3 B1    ...b2    ...b3    B2    B3
    #     rank 1   ...F0 F1 f0 b0    f1 b1    F2 B0    F3 B1    f2 b2    f3 b3    B2    B3    ......
    "interleaved": Schedule(
        loop, None, lambda r, p, M, s: turns(M, (len(s) - 1) * p + 2 * (p - 1 - r), s, at_once=p)),
    # gpipe with several stages per rank (Lamy-Poirier 2022, arXiv:2211.05953): all micro-batches go
    # through one, then through the next. So FSDP gathers the parameters of a stage only twice.
    #     rank 0   F0 F1 f0 f1 .........b0    b1    B0    B1
    #     rank 1   ...F0 F1 f0 f1 b0    b1    B0    B1    ......
    "bfs": Schedule(loop, None, lambda r, p, M, s: turns(M, len(s) * M, s, at_once=M)),
    # 1f1b in which rank r does the W of micro-batch m after the B of micro-batch m + r: Bs are done
    # sooner, and Ws fill the end (Qi 2023, figure 3).
    #     rank 0   F0 F1 ...B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
    #     rank 1   ...F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3
    "zb-h1": Schedule(loop, 1, lambda r, p, M, s: follow(turns(M, p - 1 - r, s), "W", r)),
    # Twice the warm-up of 1f1b, each W later still: no bubble if F + B = 2W, for the activations
    # of 2p - 1 micro-batches (Qi 2023, figure 3). A rank is done a little after the one before.
    #     rank 0   F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3 ...
    #     rank 1   ...F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
    "zb-h2": Schedule(loop, 1, lambda r, p, M, s: follow(turns(M, 2 * (p - 1 - r), s), "W", 2 * r)),
    # Zero bubble with the memory of 1f1b: a micro-batch comes back to the rank that it began on, so
    # its backward begins there soon (Qi 2023, figure 8).
    #     rank 0   F0 F1 F2 f0 b0 w0 f1 b1 w1 F3 B0 W0 f2 b2 w2 B1 W1 f3 b3 w3 B2 W2 B3 W3 ...
    #     rank 1   ...F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 F3 B1 W1 f3 b2 w2 B2 b3 B3 W2 w3 W3
    "zb-v": Schedule(vee, 2, zb_v),
    # Pairs of an F, which is Joined, and a B: the all-to-alls of one's mixture of experts can hide
    # behind the other's arithmetic (DeepSeek-V3, arXiv:2412.19437, section 3.2.1; folded into a V
    # by Sea AI Lab). M has to be 2p or more.
    #     rank 0   F0 F1 F2 f0 b0 w0 f1 F3 b1    f2 B0    b2    f3 ...B1    b3    B2 W2 B3 W3
    #     rank 1   ...F0 f0 F1 f1 F2 b0    f2 B0    F3 b1    f3 B1    b2    B2    b3 B3 w3 W3
    "dualpipe-v": Schedule(vee, 2, dualpipe_v),
    # 1f1b with an update after each backward; [:-1] drops the last, which whoever calls step()
    # makes. Here each step drains the pipeline, which Harlap 2018, section 3, never does.
    #     rank 0   F0 F1 ......B0    U F2 B1    U F3 B2    U ...B3
    #     rank 1   ...F0 B0    U F1 B1    U F2 B2    U F3 B3    ......
    "pipedream": Schedule(loop, 1, lambda r, p, M, s: follow(turns(M, p - 1 - r, s), "U", 0)[:-1]),
}


def make_plans(name, ranks, microbatches, chunks=2):
    """-> for each rank a list of actions. chunks: how many stages a rank has (interleaved, bfs)."""
    M = microbatches
    # with other numbers the ranks could wait for each other for ever
    if name == "interleaved":
        assert M % ranks == 0, f"interleaved takes multiples of {ranks} micro-batches, not {M}"
    if name == "dualpipe-v":
        assert M >= 2 * ranks, f"dualpipe-v needs {2 * ranks} or more micro-batches, not {M}"
    place, fixed, order = SCHEDULES[name]
    return [order(rank, ranks, M, place(rank, ranks, fixed or chunks)) for rank in range(ranks)]


def homes(plans):
    """-> {stage: the rank that holds it}"""
    return {action.stage: rank for rank, plan in enumerate(plans) for action in plan}


def source(action, end):
    """-> the action of another stage that makes what this one takes, or None. end: last stage."""
    kind, microbatch, stage = action
    if kind == "F" and stage > 0:
        return Action("F", microbatch, stage - 1)
    if kind == "B" and stage < end:
        return Action("B", microbatch, stage + 1)
    return None


# ---- 1.2 mail: tensors between ranks ----


class Mail:
    """Brings each tensor from the action that makes it to the action that takes it.

    Tensors have no tags: on the link from one rank to another the receiver starts its receives in
    the order in which the sender's plan makes the tensors.

    plans: all ranks'. ranks: the global ranks of this pipeline. group: theirs, None if they are all
    ranks. links: what make_links returns. size, dtype, device: of every tensor.
    """

    def __init__(self, plans, ranks, group, links, size, dtype, device):
        self.ranks = ranks
        self.rank = ranks.index(dist.get_rank())  # this rank's place among them
        self.group = group
        self.links = links
        self.size = torch.Size(size)
        self.dtype = dtype
        self.device = device
        self.home = homes(plans)
        self.end = max(self.home)  # the last stage
        self.position = {a: i for plan in plans for i, a in enumerate(plan)}  # in its plan
        self.coming = deque()  # actions of other ranks; no receive of their tensors has begun
        self.inbox = {}  # {action: (work of the receive, or None if made here; tensor)}
        self.sent = None  # (work, tensor) of the last send

    def open(self, actions):
        """Before this rank plays these actions: list what other ranks make for them, in order."""
        makers = filter(None, [source(action, self.end) for action in actions])
        coming = [maker for maker in makers if self.home[maker.stage] != self.rank]
        # a sender's tensors come in its own order; between senders any order would do
        self.coming = deque(sorted(coming, key=self.position.get))

    def begin_receive(self):
        maker = self.coming.popleft()
        tensor = torch.empty(self.size, dtype=self.dtype, device=self.device)
        work = self.begin(dist.irecv, tensor, self.home[maker.stage])  # another rank -> this one
        self.inbox[maker] = work, tensor

    def take(self, action):
        """-> the tensor that an action takes from another stage, or None if it takes none."""
        maker = source(action, self.end)
        if maker is None:
            return None
        while maker not in self.inbox:
            self.begin_receive()
        work, tensor = self.inbox.pop(maker)
        if work:
            work.wait()  # on a GPU the stream waits, not the host
        return tensor

    def put(self, action, tensor):
        """After each action: start receives, and send the tensor that the action has made.

        Ranks keep step: what is made at place i of another plan is awaited from place i - 2 of this
        one on. In take() it could be too late: each of two ranks waits to send (in bfs)."""
        while self.coming and self.position[self.coming[0]] <= self.position[action] + 2:
            self.begin_receive()
        taker = {"F": action.stage + 1, "B": action.stage - 1}.get(action.kind)  # a stage
        receiver = self.home.get(taker)  # its rank; None: no such stage, nobody takes the tensor
        if receiver == self.rank:
            self.inbox[action] = None, tensor
        elif receiver is not None:
            found = tensor.shape, tensor.dtype  # gloo would deliver other ones as noise
            assert found == (self.size, self.dtype), f"{found}, not {self.size}, {self.dtype}"
            self.finish_send()
            tensor = tensor.contiguous()
            work = self.begin(dist.isend, tensor, receiver)  # this rank -> another
            self.sent = work, tensor

    def finish_send(self):
        """Wait for the last send, so that the tensor of one alone has to be kept."""
        if self.sent:
            self.sent[0].wait()
        self.sent = None

    def begin(self, operation, tensor, peer):
        link = (self.rank, peer) if operation is dist.isend else (peer, self.rank)
        group = self.links.get(link, self.group)
        # as a batch of one: for a bare isend NCCL would make a communicator beside the group's
        return dist.batch_isend_irecv([dist.P2POp(operation, tensor, self.ranks[peer], group)])[0]


def make_links(plans, pipelines):
    """-> {(sender, receiver): group} of this rank's links; both are places in a pipeline.

    Every rank calls it. pipelines: for each the global ranks. NCCL runs a group's transfers in
    order: a receive that waits would hold up the sends after it. gloo needs no groups.
    """
    if dist.get_backend() in ("gloo", "fake"):
        return {}
    home = homes(plans)
    pairs = {(home[stage], home[stage + 1]) for stage in range(max(home))}  # an F's output
    pairs |= {(taker, maker) for maker, taker in pairs}  # a B's gradient, the other way
    mine = {}
    for ranks, link in itertools.product(pipelines, sorted(pairs)):
        if link[0] != link[1]:
            group = dist.new_group([ranks[place] for place in link])  # every rank makes it
            if dist.get_rank(group) >= 0:  # this rank is in the group
                mine[link] = group
                dist.barrier(group)  # NCCL makes the communicator here: no send waits for it
    return mine


# ---- 1.3 a backward in two parts ----
# For every nn.Linear, y = x A^T (Qi 2023, section 2):
#     B    grad_x = grad_y A       the stage before waits for it
#     W    grad_A = grad_y^T x     nobody waits for it: grad_y and x are kept until then


class SplitLinear(torch.autograd.Function):
    """F.linear, whose backward is B. It appends W to the list `later`, or calls W if that is None.

    parameters: weight and bias in a tuple, so that autograd does not see them. Else (torch 2.13) B
    would fire their post-accumulate hooks, though it makes no gradient of theirs.
    """

    later = None  # a list during a B that leaves a W

    @staticmethod
    def forward(ctx, x, parameters):
        ctx.weight, _ = parameters
        with torch.enable_grad():  # a second graph, from the parameters alone: its backward is W
            y = F.linear(x.detach(), *parameters)
        ctx.edge = get_gradient_edge(y)
        return y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        w = partial(torch.autograd.backward, ctx.edge, grad)
        if SplitLinear.later is None:
            w()
        else:
            SplitLinear.later.append(w)
        return grad @ ctx.weight.to(grad.dtype), None  # under autocast their dtypes may differ


def split_linear(x, weight, bias):
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    if not trained or not torch.is_grad_enabled():
        return F.linear(x, weight, bias)  # no W
    if not x.requires_grad:
        x = x.detach().requires_grad_()  # else autograd, which sees x alone, would skip backward
    return SplitLinear.apply(x, (weight, bias))


# ---- 1.4 the pipeline ----


class Pipeline:
    """Plays this rank's plan.

    modules: {stage: module}, those of this rank; each maps one tensor to one. plans: all ranks'.
    """

    def __init__(self, modules, plans, mail):
        self.modules = modules
        self.mail = mail
        self.plan = plans[mail.rank]
        self.microbatches = 1 + max(action.microbatch for action in self.plan)
        self.updates = any(action.kind == "U" for action in self.plan)
        self.leaves_w = {(a.microbatch, a.stage) for a in self.plan if a.kind == "W"}  # a B does
        self.kept = {}  # {(micro-batch, stage): (input, edge of the output)}, from F to B
        self.ws = {}  # {(micro-batch, stage): [what W calls for each Linear]}, from B to W
        if self.leaves_w:
            assert not self.updates, "Ws read the module's weights: no updates within a step"
            for module in nn.ModuleList(modules.values()).modules():
                if type(module) is nn.Linear:  # the W of a subclass stays in its B
                    module.forward = partial(split_linear, weight=module.weight, bias=module.bias)

    def step(self, inputs, loss_fn, update=None):
        """Runs a batch forward and backward, and adds to .grad -> this rank's sum of losses.

        inputs[m]: micro-batch m; a rank without the first stage may give any M things. The last
        stage calls loss_fn(output, m) for m's part of the batch's loss: a sum over the tokens of m,
        divided by the number of tokens in the whole batch. update(): what U does (section 1.5).
        """
        return self.play("FBWU", inputs, loss_fn, update)

    @torch.no_grad()
    def evaluate(self, inputs, loss_fn):
        """The forwards alone -> this rank's sum of losses. Whoever calls it calls eval() before."""
        return self.play("F", inputs, loss_fn)

    def play(self, kinds, inputs, loss_fn, update=None):
        assert len(inputs) == self.microbatches, f"{len(inputs)} inputs for {self.microbatches}"
        wide = torch.promote_types(self.mail.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=self.mail.device)
        actions = [action for action in self.plan if action.kind in kinds]
        self.mail.open(actions)
        for action in actions:
            taken = self.mail.take(action)
            if action.kind == "F" and action.stage == 0:
                taken = inputs[action.microbatch]
            made = self.do(action, taken, loss_fn, update)
            if action.kind == "F" and action.stage == self.mail.end:
                loss += made
            self.mail.put(action, made)
            del taken, made  # what nobody keeps is free before the next action
        self.mail.finish_send()
        return loss

    def do(self, action, taken, loss_fn, update):
        """-> the tensor for another stage, or the loss, or None."""
        kind, m, stage = action
        if kind == "F":
            return self.forward(m, stage, taken, loss_fn)
        if kind == "B":
            return self.backward(m, stage, taken)
        if kind == "U":
            return update()
        ws = self.ws.pop((m, stage), [])  # kind is W; there is nothing if the stage is frozen
        while ws:  # from the last layer to the first, as in backward
            ws.pop(0)()  # popped, so that what it holds is free at once
        return None

    def forward(self, m, stage, x, loss_fn):
        if stage > 0:
            x = x.detach().requires_grad_()  # a leaf, whose .grad goes to the stage before
        module = self.modules[stage]
        if self.updates:  # until its backward a micro-batch keeps the weights of its forward
            weights = {name: p.clone() for name, p in module.named_parameters()}
            module = partial(torch.func.functional_call, module, weights)
        y = module(x)
        if stage == self.mail.end:
            y = loss_fn(y, m)
        if y.requires_grad:  # False in an evaluation, and in a first stage that is frozen
            # the graph alone: the memory of y is free when y has been sent
            self.kept[m, stage] = x, get_gradient_edge(y)
        return y.detach()

    def backward(self, m, stage, grad):
        """-> the gradient of the stage's input."""
        if (m, stage) not in self.kept:
            return None  # a first stage that is frozen
        x, edge = self.kept.pop((m, stage))
        if (m, stage) in self.leaves_w:
            self.ws[m, stage] = []
            SplitLinear.later = self.ws[m, stage]  # each SplitLinear appends to it
        try:
            torch.autograd.backward(edge, grad)
        finally:
            SplitLinear.later = None
        return x.grad


def gather(mine, origins, group):
    """{name: tensor} of this rank -> of the whole model, on every rank of the pipeline.

    origins: {name: (rank in the group that has the tensor, meta tensor of its shape and dtype)}
    """
    whole = {}
    device = next(iter(mine.values())).device
    for name, (rank, like) in origins.items():
        tensor = torch.empty_like(like, device=device)
        if dist.get_rank(group) == rank:
            tensor.copy_(mine[name].detach())
        dist.broadcast(tensor, group=group, group_src=rank)  # on one rank -> replicated
        whole[name] = tensor
    return whole


@dataclass(kw_only=True)
class Chain:
    """Where the layers of a model are, so that it can be cut between them. Names are of modules.

    first    what the first stage alone has: the token embedding, positions
    layers   an nn.ModuleList
    last     what the last stage alone has: the norm and, at the end, the Linear of the logits
    absent   those of them which the model takes for None where they are not. All others, and
             layers, hand on the x that they are given
    call     call(forward, x) -> a tensor: how the model's forward, or a stage's, is called
    """

    first: list
    layers: str
    last: list
    absent: tuple = ()
    call: Callable = lambda forward, x: forward(x)


class HandsOn(nn.Module):
    """Stands for a module that is on another stage."""

    def forward(self, x, *others, **keywords):
        return x


def carve(model, chain, layers):
    """-> all stages: copies of the model that share its modules. layers: how many each gets."""
    count = len(model.get_submodule(chain.layers))
    assert sum(layers) == count, f"layers {layers} of {count}"
    stages = []
    for number, size in enumerate(layers):
        begin = sum(layers[:number])
        here = range(begin, begin + size)
        elsewhere = [f"{chain.layers}.{i}" for i in range(count) if i not in here]
        if number > 0:
            elsewhere += chain.first
        if number < len(layers) - 1:
            elsewhere += chain.last
        others = {name: None if name in chain.absent else HandsOn() for name in elsewhere}
        stage = exchange(model, others)
        stage.forward = partial(chain.call, stage.forward)
        stages.append(stage)
    return stages


def exchange(module, others, path=""):
    """-> a copy of the module that has other submodules, {name: module}, and shares the rest."""
    twin = copy.copy(module)
    own = {key: value.copy() for key, value in vars(module).items() if isinstance(value, dict)}
    vars(twin).update(own)  # of modules, hooks, ..
    for name, child in module._modules.items():
        place = path + name
        if place in others:
            twin._modules[name] = others[place]
        elif any(other.startswith(f"{place}.") for other in others):
            twin._modules[name] = exchange(child, others, f"{place}.")
    return twin


class Stages(nn.ModuleList):
    """This rank's stages of a model, whose pipeline is all ranks of the world.

    whole: all stages, in order; other ranks' may be on meta (tie anew after to(), to_empty()).
    All must name a parameter as the whole model does: slices of one nn.Sequential do. A parameter
    of stages on several ranks is tied: copies begin as the first rank's, and gradients are summed.
    """

    def __init__(self, whole, plans):
        home = homes(plans)
        rank = dist.get_rank()
        here = {stage: whole[stage] for stage in sorted(home) if home[stage] == rank}
        super().__init__(here.values())
        self.here = here  # {stage: module}
        self.origins = {}  # of all ranks' parameters, as gather() takes them
        by_name = {}  # {name: parameter}
        names = {}  # {parameter: its first name}
        holders = defaultdict(set)  # {parameter: the ranks that have it}
        for stage, module in enumerate(whole):
            for name, p in module.named_parameters(remove_duplicate=False):
                self.origins.setdefault(name, (home[stage], p.detach().to("meta")))
                earlier = by_name.setdefault(name, p)  # the first that has this name
                assert p is earlier, f"{name}: two parameters; take names of the whole model"
                names.setdefault(p, name)
                holders[p].add(home[stage])
        self.names = {p: names[p] for p in self.parameters()}
        self.trained = {name: self.origins[name] for p, name in names.items() if p.requires_grad}
        self.counted = [p for p in self.parameters() if min(holders[p]) == rank]  # in the norm
        self.tied = {}  # {parameter that other ranks hold, too: their group}
        for p, ranks in holders.items():
            if len(ranks) > 1:
                group = dist.new_group(sorted(ranks))  # every rank makes it
                if rank in ranks:
                    dist.broadcast(p.data, group=group, group_src=0)  # the first's -> replicated
                    self.tied[p] = group

    def sum_and_clip(self, clip):
        """What is left to do between backward and the optimizer's step -> the gradient norm."""
        for p, group in self.tied.items():
            if p.requires_grad:
                dist.all_reduce(p.grad, group=group)  # partial -> replicated
        like = next(self.parameters())
        wide = torch.promote_types(like.dtype, torch.float32)
        grads = [p.grad for p in self.counted if p.grad is not None]
        grads.append(like.new_zeros(1))  # _foreach_norm wants one, also where all is frozen
        square = torch.stack(torch._foreach_norm(grads, dtype=wide)).square().sum()
        dist.all_reduce(square)  # partial -> replicated
        norm = square.sqrt()
        if clip:
            finite = norm.nan_to_num(0, posinf=0)  # inf, nan -> 0: then nothing is scaled
            nn.utils.clip_grads_with_norm_(self.parameters(), clip, finite)
        return norm

    def full_state_dict(self):
        """-> {name: parameter} of the whole model, on every rank."""
        mine = {name: p for stage in self
                for name, p in stage.named_parameters(remove_duplicate=False)}
        return gather(mine, self.origins, None)

    def full_gradients(self):
        """-> {name: gradient} of all that is trained, on every rank."""
        mine = {name: torch.zeros_like(p) if p.grad is None else p.grad
                for p, name in self.names.items()}
        return gather(mine, self.trained, None)


# ---- 1.5 PipeDream: an update after every micro-batch, while others are under way ----
# On rank r, micro-batch m's F and B use the weights after max(0, m - (p-1-r)) updates of the step.


def update_stage(stages, optimizer, clip):
    """What U does: step() takes partial(update_stage, stages, optimizer, clip) as its `update`.

    No rank waits for another here. So each clips by the norm of its own stages, and the gradients
    of tied parameters stay as they are until sum_and_clip sums them, at the end of the step.
    """
    kept = {p: p.grad for p in stages.tied}
    for p in kept:
        p.grad = None  # clipping and the optimizer pass over it
    nn.utils.clip_grad_norm_(stages.parameters(), clip or torch.inf)
    optimizer.step()
    optimizer.zero_grad()
    for p, grad in kept.items():
        p.grad = grad


# ---- 2. the toy GPT, parallelized --------------------------------------------


def split_layers(count, stages):
    """-> how many of the layers each stage gets: about equally many."""
    return [len(share(count, stages, stage)) for stage in range(stages)]


CHAIN = Chain(first=["tok", "pos"], layers="blocks", last=["norm", "head"], absent=("pos",))


class PipelinedGPT(Stages):
    """The GPT's stages here and their Pipeline. boundary: size, dtype, device of what they send."""

    def __init__(self, model, plans, layers, boundary):
        super().__init__(carve(model, CHAIN, layers), plans)
        ranks = list(range(dist.get_world_size()))
        mail = Mail(plans, ranks, None, make_links(plans, [ranks]), *boundary)
        self.pipeline = Pipeline(self.here, plans, mail)

    def forward_backward(self, x, y, valid, update=None):
        """-> this rank's part of the loss of the batch: the last stage has all of it."""
        return self.pipeline.step(*self.in_microbatches(x, y, valid), update)

    def evaluate(self, x, y):
        """-> this rank's part of the sum of token losses."""
        return self.pipeline.evaluate(*self.in_microbatches(x, y, 1))

    def in_microbatches(self, x, y, valid):
        """-> the inputs, and what makes a micro-batch's part of the loss."""
        M = self.pipeline.microbatches
        targets = y.chunk(M)
        return x.chunk(M), lambda logits, m: loss_sum(logits, targets[m]) / valid


def parallelize(model, plans, layers, boundary):
    """The plain GPT -> this rank's part of it."""
    return PipelinedGPT(model, plans, layers, boundary)


def train_step(model, optimizer, x, y, valid, clip):
    """x, y: the whole batch, (batch, T). -> this rank's part of the loss, the gradient norm."""
    update = partial(update_stage, model, optimizer, clip)  # only PipeDream's plan calls it
    optimizer.zero_grad()
    loss = model.forward_backward(x, y, valid, update)
    norm = model.sum_and_clip(clip)
    optimizer.step()
    return loss, norm


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


def schedule_at_work(name, here, plans, boundary, logits, loss_of, group=None):
    """-> torch's schedule, which runs {number: Stage}, those here. logits: their shape."""
    from torch.distributed import pipelining  # takes as long to import as all the rest

    size, dtype, device = boundary
    # examples of what stages take and make; without them torch would ask other ranks, by NumPy
    between = torch.empty(size, dtype=dtype, device=device, requires_grad=True)
    ids = between.new_empty(logits[:2], dtype=torch.int64)
    stages = []
    count = len(homes(plans))
    for number, stage in here.items():
        stages.append(pipelining.PipelineStage(
            stage, number, count, device, group=group,
            input_args=ids if number == 0 else between,
            output_args=between.new_empty(logits) if number == count - 1 else between))
    if name in ("gpipe", "1f1b"):
        stages = stages[0]  # their classes take the stage itself, not a list
    microbatches = 1 + max(action.microbatch for action in plans[0])
    return getattr(pipelining.schedules, AT_WORK[name])(
        stages, microbatches, loss_fn=loss_of, scale_grads=False)  # gradients: a sum, no mean


class PipelinedGPTAtWork(PipelinedGPT):
    """The same, trained by torch's schedule; evaluated by ours, as torch's knows no V shapes."""

    def __init__(self, model, plans, layers, boundary, name):
        # our Pipeline only evaluates; given Ws it would change Linears that torch's schedule runs
        without_w = [[action for action in plan if action.kind != "W"] for plan in plans]
        super().__init__(model, without_w, layers, boundary)
        rows, T, _ = boundary[0]
        logits = (rows, T, model.head.out_features)  # of a micro-batch
        self.schedule = schedule_at_work(name, self.here, plans, boundary, logits, self.loss_of)
        self.valid = 1  # targets of the batch that runs

    def loss_of(self, logits, targets):
        return loss_sum(logits, targets) / self.valid

    def forward_backward(self, x, y, valid, update=None):
        self.valid = valid
        losses = []
        self.schedule.step(x, target=y, losses=losses, return_outputs=False)
        return sum(losses, start=torch.zeros((), device=x.device))


# ---- 4. run ------------------------------------------------------------------


def search(ranks, microbatches, limit, time_of, waiting=1.0):
    """-> the quickest of some plans like zb-h1 and zb-h2; not by Qi 2023's search, section 3.1.

    limit: what a rank may keep, in micro-batches. time_of(plans): how long they take. waiting: what
    is kept of a micro-batch from B to W, as a part of what is kept from F to B.
    """
    family = []
    for slope, lag in itertools.product((0.5, 1, 1.5, 2, 2.5, 3), [n / 2 for n in range(9)]):
        for most in range(min(int(slope * (ranks - 1)), limit - 1), -1, -1):
            plans = [sloped(rank, ranks, microbatches, slope, most, lag) for rank in range(ranks)]
            if max(in_flight(plan, waiting) for plan in plans) <= limit + 1e-9:
                family.append(plans)
                break  # the longest warm-up that fits: a shorter one has more bubble
    return min(family, key=time_of)


def sloped(rank, ranks, microbatches, slope, most, lag):
    """-> a rank's plan. Its warm-up has `slope` more Fs than the next rank's, and `most` at most.
    Rank r's Ws come `lag` r Bs late."""
    warmup = min(int(slope * (ranks - 1 - rank)), most)
    return follow(turns(microbatches, warmup, [rank]), "W", int(lag * rank))


NAMES = (*SCHEDULES, "auto")
FLAGS = {  # Flag(int, ..) has no default
    "schedule": Flag("1f1b", "order of the work", NAMES),
    "micro": Flag(4, "M, micro-batches", POSITIVE),
    "chunks": Flag(2, "v, stages per rank (interleaved and bfs)", POSITIVE),
    "limit": Flag(int, "micro-batches kept on a rank (auto; as many as ranks)", POSITIVE),
    "layers_per_stage": Flag("", "5,6,.. (default: equally many; simulations ignore it)"),
    "simulate": Flag(False, "play the schedule without ranks"),
    "pp": Flag(int, "p, ranks (simulation only)", POSITIVE),
    "times": Flag("1,1,1,0", "F,B,W,COMM of a rank and micro-batch (simulation, auto)"),
}


def chunks_of(name, chunks):
    """How many stages a rank has in this schedule; chunks: where one may choose."""
    return SCHEDULES[name].chunks or chunks


def refuse(args):
    name = args.schedule
    require(name == "auto" or not args.limit, f"--limit is for --schedule auto, not for {name}")
    require(args.simulate or not args.pp, "--pp is for --simulate only")
    if args.simulate:
        return
    require(args.batch % args.micro == 0, f"--micro {args.micro} cannot cut --batch {args.batch}")
    # checkpoints do not say how often each parameter was updated
    saved = args.save or args.resume
    require(name != "pipedream" or not saved, "--schedule pipedream takes no --save, --resume")
    if args.impl != "scratch":
        require(not args.dry_run, "--dry-run needs --impl scratch: torch's asks other ranks")
        refuse_at_work(name, args.micro, args.world_size)


def refuse_at_work(name, micro, ranks):
    """Refuses what torch's schedules would raise for."""
    require(name in AT_WORK, f"--schedule {name}: torch has {', '.join(AT_WORK)} only")
    # before torch 2.13 a rank that has two stages in a row sends to itself, and gloo cannot
    able = SCHEDULES[name].place is loop or torch.__version__ >= (2, 13)  # it compares with tuples
    require(able, f"--schedule {name}: needs torch 2.13, or --impl scratch")
    enough = name != "1f1b" or micro >= ranks
    require(enough, f"--micro {micro}: torch's 1f1b wants {ranks} or more, one for each stage")
    equal = name != "zb-h1" or micro % max(1, micro // ranks) == 0  # rounds of one size
    require(equal, f"--micro {micro}: torch's zb-h1 wants equal rounds: take a multiple of {ranks}")


def too_few(layers, stages):
    return f"--layers {layers} for {stages} stages: give each at least one"


def read_plans(args, times):
    """-> all ranks' plans."""
    ranks = args.pp or args.world_size
    if args.schedule != "auto":
        with refusing():
            return make_plans(args.schedule, ranks, args.micro, args.chunks)
    waiting = 1.0  # with fused attention a block keeps nearly as much from B to W as from F to B
    if args.simulate:
        # Qi 2023: W needs 32 C of the 34 C + 5 H T bytes of a token, attention's matrix among them
        waiting = 32 * args.width / (34 * args.width + 5 * args.heads * args.seq)
    return search(ranks, args.micro, args.limit or ranks, partial(span, times=times), waiting)


def read_layers(args, plans):
    """--layers-per-stage -> how many layers each stage has."""
    text = args.layers_per_stage
    stages = len(homes(plans))
    if not text:
        require(stages <= args.layers, too_few(args.layers, stages))
        return split_layers(args.layers, stages)
    layers = numbers("--layers-per-stage", text, stages, int)
    # the first has the embeddings, the last the head
    good = sum(layers) == args.layers and min(layers) >= 0 and 0 not in layers[1:-1]
    require(good, f"--layers-per-stage {text}: they are {sum(layers)}, --layers {args.layers}; the "
            "first and the last alone may have none")
    return layers


def set_up(run, impl, plans, layers, boundary):
    """-> a Side: the model of this implementation, and what a run does with it."""
    if impl == "torch":
        model = PipelinedGPTAtWork(run.build(), plans, layers, boundary, run.args.schedule)
    else:
        model = parallelize(run.build(), plans, layers, boundary)
    optimizer = adamw(model.parameters(), run.args.lr)
    return Side(model=model, optimizer=optimizer, train_step=train_step,
                pieces=partial(pieces, model, optimizer))


def pieces(model, optimizer):
    """What this rank holds, by the plain GPT's names. The first rank saves a tied parameter."""
    found = []
    counted = set(model.counted)
    for p, name in model.names.items():
        found += pieces_of([(name, p)], optimizer, writes=p in counted)
    return found


def textbook(run, model, plans):
    """b: bytes of a number. P: parameters here. n: neighbours of stages here, on other ranks."""
    p = run.world_size
    b = run.dtype.itemsize
    parameters = list(model.parameters())
    size = b * sum(q.numel() for q in parameters)
    home = homes(plans)
    ends = [end for stage in model.here for end in (stage - 1, stage + 1)]
    n = sum(home[end] != run.rank for end in ends if end in home)
    sent = b * run.args.batch * run.cfg.seq * run.cfg.width
    return [
        ("held parameters", "b P", size),
        ("held gradients", "b P", size),
        ("held optimizer", "2 b P + 4 per tensor (step counter)", 2 * size + 4 * len(parameters)),
        ("wire all_reduce", "b V C where a rank shares a tied embedding + 2 (p-1)/p w for the norm,"
         " w = max(b, 4)", sum(b * q.numel() for q in model.tied) + 2 * (p - 1) / p * max(b, 4)),
        ("wire send", f"n b batch T C, n = {n}: outputs and gradients of inputs", n * sent),
    ]


def main():
    args = arguments(__doc__, **FLAGS)
    refuse(args)
    times = read_times(args.times)
    plans = read_plans(args, times)
    if args.simulate:
        return simulation(args, plans, times)
    layers = read_layers(args, plans)
    if args.schedule == "pipedream":
        args.check = False  # its weights are stale by design: tests have an oracle of their own
    with Run(args) as run:
        require(run.dry or run.device.type == "cpu" or dist.get_backend() == "nccl",
                "ranks that share a GPU talk by gloo, which sends CPU tensors alone: --device cpu")
        boundary = (args.batch // args.micro, run.cfg.seq, run.cfg.width), run.dtype, run.device
        sides = {impl: set_up(run, impl, plans, layers, boundary) for impl in run.impls}
        _, figures = planned(plans, times)
        run.extra.update(figures)
        for impl, step, x, y, valid in run.steps(sides, range(args.batch)):
            side = sides[impl]
            with watched(run, impl, step, plans, side.model.pipeline), run.measure(impl, step):
                loss, norm = side.train_step(side.model, side.optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss, norm)
        run.textbook(textbook(run, sides[run.impls[0]].model, plans))
        return run.finish()


if __name__ == "__main__":
    sys.exit(main())
