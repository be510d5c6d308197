"""Pipeline parallelism: each rank holds some of the layers, and micro-batches flow through them.

    1f1b, 2 ranks, 4 micro-batches; a backward is twice as long as a forward; dots: the rank waits
    rank 0   F0 F1 ......B0    F2 B1    F3 B2    ...B3
    rank 1   ...F0 B0    F1 B1    F2 B2    F3 B3    ......

    plans = make_plans("1f1b", ranks=2, microbatches=4)  # what each rank does, in order
    stages = Stages([layers[:3], layers[3:]], plans)  # layers: nn.Sequential, the whole model
    mail = Mail(plans, (batch // 4, T, C), torch.float32, "cpu")  # the tensors between stages
    pipeline = Pipeline(stages.here, plans, mail)
    loss = pipeline.step(x.chunk(4), loss_of)  # loss_of(output, m): micro-batch m's part of it
    norm = stages.sum_and_clip(1.0)  # then optimizer.step() and optimizer.zero_grad()

Each of p ranks has 1/p of the layers, in v stages, and M micro-batches make a step, 2p or more. A
rank spends on each the times F for its forward, B for the gradients of its inputs, and W for those
of its weights, which zb-* and dualpipe-v do later. A rank idles between its first action and its
last. What it keeps of a micro-batch are its activations in this rank's layers.

    schedule                    worst rank's idle time  kept on rank r, in micro-batches
    plain GPT                   0                       p M: it has p times the layers
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

In a step a stage sends batch T C numbers to each stage beside it that is on another rank. Qi et al.
2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241; others stand at each schedule.

Not for: stages that pass on anything but one tensor of one size, or change it in place; ranks
without parameters; parameters replaced later; compiled stages (torch.compile) in schedules with W.
At work: torch.distributed.pipelining, part 4.
    torchrun --standalone --nproc_per_node=2 pipeline_parallel.py --schedule zb-v
    python pipeline_parallel.py --simulate --schedule zb-h1 --pp 4 --micro 8 --times 1,1,1,0
"""
import copy
import itertools
import math
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

# imports of parts 1 and 2 end here; the rest is for parts 3 to 5
import sys

from common import loss_sum, share

# ---- 1. the idea -------------------------------------------------------------


def in_turn(forwards, backwards, warmup):
    """-> `warmup` forwards, then a forward and a backward in turn, then the other backwards."""
    pairs = itertools.zip_longest(forwards, [None] * warmup + backwards)
    return [action for pair in pairs for action in pair if action]


def idea_plan(microbatches, warmup):
    """-> what a rank does, in order. 1f1b: warmup is the number of ranks behind it; gpipe: M."""
    forwards = [("F", m) for m in range(microbatches)]
    backwards = [("B", m) for m in range(microbatches)]
    return in_turn(forwards, backwards, warmup)


def run_pipeline(stage, plan, inputs, loss_of, boundary, pp, back):
    """Forward and backward of micro-batches -> their loss on the last rank, 0 on others.

    stage: this rank's layers, from tensor to tensor. loss_of(output, m): m's part of the batch's
    loss. boundary: a tensor like those between ranks. back: a second group of pp's ranks, since
    NCCL does a group's transfers in order, and a send would wait for a receive.
    """
    rank = pp.rank()
    last = pp.size() - 1
    loss = boundary.new_zeros(())
    kept = {}  # {micro-batch: (input, output)}, from its F to its B
    sends = []  # (tensor, Work): it has to live until it is sent
    for kind, m in plan:
        if kind == "F":
            x = inputs[m] if rank == 0 else receive(boundary, rank - 1, pp).requires_grad_()
            y = stage(x)
            if rank < last:
                sends.append((y, dist.isend(y.detach(), group=pp, group_dst=rank + 1)))
            else:
                y = loss_of(y, m)
                loss += y.detach()
            kept[m] = x, y
        else:
            x, y = kept.pop(m)
            dy = None if rank == last else receive(boundary, rank + 1, back)
            y.backward(dy)
            if rank > 0:
                sends.append((x.grad, dist.isend(x.grad, group=back, group_dst=rank - 1)))
    for _, work in sends:  # not at once, since the receiver may be sending, too
        work.wait()
    return loss


def receive(boundary, sender, group):
    tensor = torch.empty_like(boundary)
    dist.recv(tensor, group=group, group_src=sender)  # the sender's -> here, too
    return tensor


def idea_step(stage, optimizer, x, y, valid, clip, plan, boundary, tied, pp, back, ends):
    """x, y: the whole batch, on all ranks. tied: the embedding that is the head, too, on the first
    rank and the last, whose group is `ends`; else None."""
    optimizer.zero_grad()
    targets = y.split(len(boundary))

    def loss_of(logits, m):
        return F.cross_entropy(logits.flatten(0, 1), targets[m].flatten(), reduction="sum") / valid

    loss = run_pipeline(stage, plan, x.split(len(boundary)), loss_of, boundary, pp, back)
    if tied is not None:
        dist.all_reduce(tied.grad, group=ends)  # partial (a summand each) -> replicated (the sum)
    counted = [p.grad for p in stage.parameters() if p is not tied or pp.rank() == 0]
    square = nn.utils.get_total_norm(counted).square()
    dist.all_reduce(square, group=pp)  # partial -> replicated
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(stage.parameters(), clip, norm)
    optimizer.step()
    return loss, norm


# ---- 2. the technique (copy this; it needs only torch) -----------------------

# What it adds to the idea, what that buys, and what it costs. Peaks: the toy, 2 ranks, M = 16.
#     Mail            keeps one send at a time: rank 0's peak falls, 12.98 -> 12.07 MB; and begins
#                     receives two actions early: tensors travel while the rank is at work
#     Stages, Chain   any model's own forward, in four lines; all dtypes; frozen layers; dp x pp
#     W by itself     fills what was idle, for activations: rank 1's peak grows, 9.72 -> 12.21 MB
#     schedules       several stages a rank: idle times are the table above
# Calls and bytes sent stay those of the idea wherever a rank has one stage.

# ---- 2.1 plans: what each rank does, in order ----


class Action(NamedTuple):
    """One piece of a rank's work."""

    kind: str  # F forward, B backward; later also W, gradients of weights, and U, an update
    microbatch: int
    stage: int  # a part of the model's layers, 0 the first; a rank may hold several


def homes(plans):
    """plans: for each place in the pipeline a list of actions -> {stage: the place that has it}"""
    return {action.stage: place for place, plan in enumerate(plans) for action in plan}


# ---- 2.2 the pipeline: plays a plan ----


class Pipeline:
    """Plays this rank's plan of Fs and Bs. Ws and Us are for its subclasses.

    modules: {stage: module}, this rank's; each maps one tensor to one. mail: see Mail
    """

    def __init__(self, modules, plans, mail):
        self.modules = modules
        self.mail = mail
        self.plan = plans[mail.place]
        self.microbatches = 1 + max(action.microbatch for action in self.plan)
        self.kept = {}  # {(micro-batch, stage): (input, edge of the output)}, from F to B

    def step(self, inputs, loss_of):
        """Runs a batch forward and backward, and adds to .grad -> this rank's sum of losses.

        inputs: M micro-batches, which the first stage reads. loss_of(output, m): of the last
        stage's output, the sum of the losses of m's tokens, divided by the number of tokens in the
        whole batch.
        """
        return self.play(self.plan, inputs, loss_of)

    @torch.no_grad()
    def evaluate(self, inputs, loss_of):
        """The forwards alone -> this rank's sum of losses. Whoever calls it calls eval() before."""
        return self.play([action for action in self.plan if action.kind == "F"], inputs, loss_of)

    def play(self, actions, inputs, loss_of):
        assert len(inputs) == self.microbatches, f"{len(inputs)} inputs for {self.microbatches}"
        wide = torch.promote_types(self.mail.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=self.mail.device)
        self.mail.open(actions)
        for action in actions:
            taken = self.mail.take(action)  # what the stage before, or behind, has made for it
            if action.kind == "F" and action.stage == 0:
                taken = inputs[action.microbatch]
            made = self.do(action, taken, loss_of)
            if action.kind == "F" and action.stage == self.mail.end:
                loss += made
            self.mail.put(action, made)
            del taken, made  # what nobody keeps is free before the next action
        self.mail.finish_send()
        return loss

    def do(self, action, taken, loss_of):
        """-> the tensor for another stage, or the loss, or None."""
        kind, m, stage = action
        if kind == "F":
            return self.forward(m, stage, taken, loss_of)
        if kind == "B":
            return self.backward(m, stage, taken)
        return None

    def forward(self, m, stage, x, loss_of):
        if stage > 0:
            x = x.detach().requires_grad_()  # a leaf, whose .grad goes to the stage before
        y = self.modules[stage](x)
        if stage == self.mail.end:
            y = loss_of(y, m)
        if y.requires_grad:  # not in an evaluation, nor in a first stage that is frozen
            # the graph alone: the memory of y is free when y has been sent
            self.kept[m, stage] = x, get_gradient_edge(y)
        return y.detach()

    def backward(self, m, stage, grad):
        """-> the gradient of the stage's input."""
        if (m, stage) not in self.kept:
            return None  # a first stage that is frozen
        x, edge = self.kept.pop((m, stage))
        torch.autograd.backward(edge, grad)
        return x.grad


# ---- 2.3 mail: tensors between stages ----

WAY = {"F": 1, "B": -1}  # outputs go to the next stage, gradients of inputs to the one before


class Mail:
    """Brings each tensor from the action that makes it, by which it is called, to the one that
    takes it.

    Between ranks tensors travel without names: on each link, from one rank to another, the receiver
    begins its receives in the order in which the sender's plan makes the tensors.

    size, dtype, device: of every tensor
    group: the pipeline's ranks, in order of their places; None: all ranks
    links: what make_links returns; None: there is one pipeline, and Mail calls it
    """

    def __init__(self, plans, size, dtype, device, group=None, links=None):
        self.size = torch.Size(size)
        self.dtype = dtype
        self.device = device
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.place = dist.get_rank(group)  # this rank's
        self.links = make_links(plans, [self.ranks]) if links is None else links
        self.home = homes(plans)
        self.end = max(self.home)  # the last stage
        # {action: its number in the plan of its rank}
        self.number = {action: i for plan in plans for i, action in enumerate(plan)}
        self.coming = deque()  # other ranks' actions; receives of their tensors are yet to begin
        self.inbox = {}  # {action: (the receive's Work, None if it is made here; tensor)}
        self.sent = None  # (Work, tensor) of the last send

    def neighbour(self, action, steps):
        """-> 1: the action that takes what this one makes; -1: the one that makes what this one
        takes; None where there is no such action."""
        if action.kind not in WAY:
            return None
        stage = action.stage + steps * WAY[action.kind]
        return action._replace(stage=stage) if stage in self.home else None

    def open(self, actions):
        """Before this rank plays these actions: list what other ranks make for them."""
        makers = filter(None, [self.neighbour(action, -1) for action in actions])
        coming = [maker for maker in makers if self.home[maker.stage] != self.place]
        # each sender's in its own order; between senders any order would do
        self.coming = deque(sorted(coming, key=self.number.get))

    def take(self, action):
        """-> the tensor that an action takes from another stage, or None if it takes none."""
        maker = self.neighbour(action, -1)
        if maker is None:
            return None
        while maker not in self.inbox:
            self.begin_receive()
        work, tensor = self.inbox.pop(maker)
        if work:
            work.wait()  # on a GPU the stream waits, not the host
        return tensor

    def put(self, action, tensor):
        """After each action: begin receives, and send the tensor that the action has made.

        Ranks play their plans side by side: what another rank makes with its action number i is
        awaited from this rank's number i - 2 on. Two is the least that never costs time where sends
        end when they are received (NCCL). In take() it may be too late: ranks wait to send.
        """
        while self.coming and self.number[self.coming[0]] <= self.number[action] + 2:
            self.begin_receive()
        taker = self.neighbour(action, 1)
        if taker is None:
            return
        receiver = self.home[taker.stage]
        if receiver == self.place:
            self.inbox[action] = None, tensor
        else:
            found = tensor.shape, tensor.dtype  # gloo would deliver other ones as noise
            assert found == (self.size, self.dtype), f"{found}, not {self.size}, {self.dtype}"
            self.finish_send()
            tensor = tensor.contiguous()
            link = self.place, receiver
            self.sent = self.begin(dist.isend, tensor, receiver, link), tensor  # here -> there, too

    def finish_send(self):
        """Wait for the last send: so one sent tensor is kept at a time."""
        if self.sent:
            self.sent[0].wait()
        self.sent = None

    def begin_receive(self):
        maker = self.coming.popleft()
        sender = self.home[maker.stage]
        tensor = torch.empty(self.size, dtype=self.dtype, device=self.device)
        link = sender, self.place
        self.inbox[maker] = self.begin(dist.irecv, tensor, sender, link), tensor  # there -> here

    def begin(self, operation, tensor, peer, link):
        group = self.links.get(link, self.group)
        # as a batch of one: for a bare isend NCCL would make a communicator beside the group's
        return dist.batch_isend_irecv([dist.P2POp(operation, tensor, self.ranks[peer], group)])[0]


def make_links(plans, pipelines):
    """-> {(sender, receiver): group} of this rank's links; both are places in its pipeline.

    pipelines: for each its ranks. Every rank calls it. NCCL does a group's transfers in order, and
    a receive that waits would hold up the sends behind it: so each direction between two ranks has
    a group there. gloo needs none.
    """
    if dist.get_backend() in ("gloo", "fake"):
        return {}
    home = homes(plans)
    pairs = {(home[stage], home[stage + 1]) for stage in range(max(home))}  # an F's output
    pairs |= {(behind, before) for before, behind in pairs}  # a B's gradient, the other way
    mine = {}
    for ranks, link in itertools.product(pipelines, sorted(pairs)):
        if link[0] != link[1]:
            group = dist.new_group([ranks[place] for place in link])  # every rank makes it
            if dist.get_rank(group) >= 0:  # this rank is in the group
                mine[link] = group
                dist.barrier(group)  # NCCL makes the communicator here: no send waits for it
    return mine


# ---- 2.4 stages: any model, cut between its layers ----


class Stages(nn.ModuleList):
    """This rank's stages of a model, and what makes them one model with those of other ranks.

    whole: all stages, in order: slices of an nn.Sequential, or carve's. Those of other ranks may be
    on the meta device, where to() and to_empty() untie: tie anew.

    What several ranks have begins as on the first of them, and its gradients are summed: a tied
    embedding, or all of it if several pipelines share the batch, as dp = 2 x pp = 2:
        pipelines = [[0, 2], [1, 3]]  # loss_of divides by the tokens of both
        group, _ = dist.new_subgroups_by_enumeration(pipelines)
        mail = Mail(plans, size, dtype, device, group, make_links(plans, pipelines))
    """

    def __init__(self, whole, plans, pipelines=None):
        pipelines = pipelines or [range(dist.get_world_size())]
        rank = dist.get_rank()
        [own] = [ranks for ranks in pipelines if rank in ranks]
        home = homes(plans)
        here = {stage: whole[stage] for stage in sorted(home) if own[home[stage]] == rank}
        super().__init__(here.values())
        self.here = here  # {stage: module}
        self.counted = []  # parameters that this rank counts in the norm
        self.shared = {}  # {parameter that other ranks have, too: their group}
        places = defaultdict(set)  # {parameter: where in a pipeline it is}
        for stage, module in enumerate(whole):
            for p in module.parameters():
                places[p].add(home[stage])
        groups = {}  # {ranks: their group}
        for p, of_p in places.items():
            holders = tuple(ranks[place] for ranks in pipelines for place in sorted(of_p))
            if rank == holders[0]:
                self.counted.append(p)
            if len(holders) > 1 and holders not in groups:
                groups[holders] = dist.new_group(holders)  # every rank makes it
            if len(holders) > 1 and rank in holders:
                self.shared[p] = groups[holders]
                # the first's -> replicated
                dist.broadcast(p.data, group=groups[holders], group_src=0)

    def sum_and_clip(self, clip):
        """What is left to do between backward and the optimizer's step -> the gradient norm."""
        for p, group in self.shared.items():
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


@dataclass(kw_only=True)
class Chain:
    """Where the layers of a model are, so that it can be cut between them. Names are of modules.

    The model's own forward runs in every stage, with its masks and angles. In place of a module
    that is on another stage it finds HandsOn, or None if `absent` has the name. So between the
    modules named here it may not change x.

    first    of the first stage alone: the token embedding, positions
    layers   an nn.ModuleList
    last     of the last stage alone: the norm and, at the end, the Linear of the logits
    absent   names in first or last for which the model's forward asks `is None`
    call     call(forward, x) -> a tensor: how the model's forward, or a stage's, is called
    """

    first: list
    layers: str
    last: list
    absent: tuple = ()
    call: Callable = lambda forward, x: forward(x)


class HandsOn(nn.Module):
    """In place of a layer, norm, head or token embedding it hands on x. Learned positions, whose
    input is integers, are added to x: it gives 0."""

    def forward(self, x, *others, **keywords):
        return x if x.is_floating_point() else 0


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
    for key, value in vars(module).items():
        if isinstance(value, dict):  # of its modules, of its hooks: the twin has dicts of its own
            vars(twin)[key] = value.copy()
    for name, child in module._modules.items():
        place = path + name
        if place in others:
            twin._modules[name] = others[place]
        elif any(other.startswith(f"{place}.") for other in others):
            twin._modules[name] = exchange(child, others, f"{place}.")
    return twin


# ---- 2.5 W: the half of a backward that nobody waits for ----
# For every nn.Linear, y = x A^T (Qi 2023, section 2):
#     B    grad_x = grad_y A       the stage before waits for it
#     W    grad_A = grad_y^T x     nobody waits for it: grad_y and x are kept until then


class SplitLinear(torch.autograd.Function):
    """F.linear, whose backward is B. It appends W to the list `later`, or calls W if that is None.

    parameters: weight and bias. In a tuple autograd does not see them; else (torch 2.13) B would
    call their post-accumulate hooks, though it makes no gradient of theirs.
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


class SplitPipeline(Pipeline):
    """Its plan may have Ws, and their Bs leave them. Without Ws it is a Pipeline."""

    def __init__(self, modules, plans, mail):
        super().__init__(modules, plans, mail)
        self.split = {(a.microbatch, a.stage) for a in self.plan if a.kind == "W"}  # split Bs
        self.ws = {}  # {(micro-batch, stage): [what W calls for each Linear]}, from B to W
        if self.split:
            for module in nn.ModuleList(modules.values()).modules():
                if type(module) is nn.Linear:  # the W of a subclass stays in its B
                    module.forward = partial(split_linear, weight=module.weight, bias=module.bias)

    def do(self, action, taken, loss_of):
        kind, m, stage = action
        if kind != "W":
            return super().do(action, taken, loss_of)
        ws = self.ws.pop((m, stage))
        while ws:  # from the last layer to the first, as in backward
            ws.pop(0)()  # popped, so that what it holds is free at once
        return None

    def backward(self, m, stage, grad):
        if (m, stage) in self.split:
            SplitLinear.later = self.ws[m, stage] = []  # each SplitLinear appends to it
        made = super().backward(m, stage, grad)
        SplitLinear.later = None
        return made


# ---- 2.6 schedules ----


def turns(M, warmup, stages, at_once=1):
    """-> a plan like the idea's for a rank that has these stages."""
    forwards = sweep("F", M, stages, at_once)
    backwards = sweep("B", M, stages[::-1], at_once)
    return in_turn(forwards, backwards, warmup)


def sweep(kind, M, stages, at_once):
    """-> actions of this kind. The first `at_once` micro-batches go through one stage, then through
    the next, and so on; behind the last stage the next `at_once` micro-batches follow."""
    order = []
    for first in range(0, M, at_once):
        group = range(first, min(first + at_once, M))
        order += [Action(kind, microbatch, stage) for stage in stages for microbatch in group]
    return order


def follow(plan, kind, lag):
    """-> the plan with an action of this kind for each B: `lag` Bs later, or at the plan's end."""
    longer = []
    waiting = []
    for action in plan:
        longer.append(action)
        if action.kind == "B":
            waiting.append(action._replace(kind=kind))
            if len(waiting) > lag:
                longer.append(waiting.pop(0))
    return longer + waiting


def in_words(M, stages, *lines):
    """-> the plan of a rank with two stages. Each line has words, and how many times they come.

    F, B    the next forward, the next backward of the first stage; this B leaves a W
    BW      the same backward with its W; f, b, bw: likewise, of the second stage
    W       the oldest W that is left, of either stage; those left after all lines end the plan
    """
    upcoming = {}  # {(kind, stage): the actions that are yet to come}
    for kind, stage in itertools.product("FB", stages):
        upcoming[kind, stage] = itertools.count()
    plan = []
    left = deque()  # Ws
    for words, times in lines:
        for word in words.split() * times:
            if word == "W":
                plan.append(left.popleft())
                continue
            kind = word[0].upper()
            stage = stages[0] if word.isupper() else stages[1]
            action = Action(kind, next(upcoming[kind, stage]), stage)
            plan.append(action)
            if word in ("B", "b"):
                left.append(action._replace(kind="W"))
    return [action for action in [*plan, *left] if action.microbatch < M]


def zb_v(r, p, M, stages):
    n = max(M, 2 * p - 1)  # the words want that many micro-batches: in_words drops those beyond M
    return in_words(
        M, stages,
        ("F", 2 * (p - r) - 1),  # until the first micro-batch comes to the second stage
        ("f F", r),  # until the first gradient comes to the second stage
        ("f b W", p - r),  # until the first gradient comes to the first stage
        ("F B W f b W", n - 2 * p + 1 + r),  # the steady state
        ("B W f b W", p - 1 - r),  # no F is left
        ("B b", r),  # no f is left; Ws are put off, since other ranks wait for Bs
        ("B W", p - r),
    )


def dualpipe_v(r, p, M, stages):
    return in_words(
        M, stages,
        ("F", 2 * (p - 1 - r)),
        ("F f", r + 1),
        ("b W f", p - 1 - r),
        ("F bw f BW", M - 2 * p + r + 1),  # the steady state: pairs, which can overlap
        ("bw f BW", p - 1 - r),  # no F is left
        # no f is left. r + 1 bs and r + 1 Bs take turns, of which the later half leave Ws
        ("bw BW", (r + 1) // 2),
        ("bw B", (r + 1) % 2),
        ("b B", (r + 1) // 2),
        ("W B", p - 1 - r),  # no b is left
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


# The pictures are for F = B = W and 2 ranks with 4 micro-batches; naive and bfs have 2. Small
# letters are a rank's second stage. A B that leaves no W is twice as long: it does the W, too.
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
    # 1f1b with several stages per rank, which fills and drains in less time (Narayanan 2021,
    # arXiv:2104.04473, figure 4). Rank r begins with p Fs in each stage but its last, and two more
    # for each later rank: there and back.
    #     rank 0   F0 F1 f0 f1 F2 ...b0    F3 b1    f2 B0    f3 B1    ...b2    ...b3    B2    B3
    #     rank 1   ...F0 F1 f0 b0    f1 b1    F2 B0    F3 B1    f2 b2    f3 b3    B2    B3    ......
    "interleaved": Schedule(
        loop, None, lambda r, p, M, s: turns(M, (len(s) - 1) * p + 2 * (p - 1 - r), s, at_once=p)),
    # gpipe with several stages per rank: all micro-batches go through one, then through the next,
    # so FSDP gathers a stage only twice (Lamy-Poirier 2022, arXiv:2211.05953).
    #     rank 0   F0 F1 f0 f1 .........b0    b1    B0    B1
    #     rank 1   ...F0 F1 f0 f1 b0    b1    B0    B1    ......
    "bfs": Schedule(loop, None, lambda r, p, M, s: turns(M, len(s) * M, s, at_once=M)),
    # 1f1b in which rank r does the W of micro-batch m after the B of micro-batch m + r: Bs are done
    # sooner, and Ws fill the end (Qi 2023, figure 3).
    #     rank 0   F0 F1 ...B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
    #     rank 1   ...F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3
    "zb-h1": Schedule(loop, 1, lambda r, p, M, s: follow(turns(M, p - 1 - r, s), "W", r)),
    # Twice the warm-up, and Ws twice as late: no bubble if F + B = 2W (Qi 2023, figure 3). Rank r
    # begins and ends r F late; since sum_and_clip's all-reduce waits for the last, a step is
    # (p-1) F longer than the table says, zb-v's (p-1) F/2. Qi 2023, section 4, does not wait, but
    # takes a step back if the norm was too large.
    #     rank 0   F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3 ...
    #     rank 1   ...F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
    "zb-h2": Schedule(loop, 1, lambda r, p, M, s: follow(turns(M, 2 * (p - 1 - r), s), "W", 2 * r)),
    # Zero bubble with the memory of 1f1b: a micro-batch comes back to the rank that it began on, so
    # its backward begins there soon (Qi 2023, figure 8).
    #     rank 0   F0 F1 F2 f0 b0 w0 f1 b1 w1 F3 B0 W0 f2 b2 w2 B1 W1 f3 b3 w3 B2 W2 B3 W3 ...
    #     rank 1   ...F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 F3 B1 W1 f3 b2 w2 B2 b3 B3 W2 w3 W3
    "zb-v": Schedule(vee, 2, zb_v),
    # Pairs of an F and a B of the other stage: the all-to-alls of one's mixture of experts can hide
    # behind the other's arithmetic (DeepSeek-V3, arXiv:2412.19437, section 3.2.1; folded into a V
    # by Sea AI Lab). This is the schedule alone: here nothing of a pair overlaps.
    #     rank 0   F0 F1 F2 f0 b0 w0 f1 F3 b1    f2 B0    b2    f3 ...B1    b3    B2 W2 B3 W3
    #     rank 1   ...F0 f0 F1 f1 F2 b0    f2 B0    F3 b1    f3 B1    b2    B2    b3 B3 w3 W3
    "dualpipe-v": Schedule(vee, 2, dualpipe_v),
    # 1f1b with an update after each B; behind the last stands optimizer.step(), as ever. PipeDream
    # (Harlap 2018, section 3), which never drains the pipeline, here drains it once a step.
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


# ---- 3. the toy GPT, parallelized --------------------------------------------

CHAIN = Chain(first=["tok", "pos"], layers="blocks", last=["norm", "head"], absent=("pos",))


def split_layers(count, stages):
    """-> how many of the layers each stage gets: about equally many."""
    return [len(share(count, stages, stage)) for stage in range(stages)]


def parallelize(model, plans, layers, size, dtype, device):
    """The plain GPT -> this rank's Stages, and the Pipeline that plays its plan.

    layers: how many each stage gets. size, dtype, device: of what goes from stage to stage.
    """
    stages = Stages(carve(model, CHAIN, layers), plans)
    return stages, SplitPipeline(stages.here, plans, Mail(plans, size, dtype, device))


def train_step(pipeline, stages, optimizer, x, y, valid, clip):
    """x, y: the whole batch, (batch, T). -> this rank's part of the loss, the gradient norm."""
    optimizer.zero_grad()
    loss = pipeline.step(*in_microbatches(pipeline, x, y, valid))
    norm = stages.sum_and_clip(clip)
    optimizer.step()
    return loss, norm


def evaluate(pipeline, x, y):
    """-> this rank's part of the sum of token losses."""
    return pipeline.evaluate(*in_microbatches(pipeline, x, y, 1))


def in_microbatches(pipeline, x, y, valid):
    """-> the inputs, and what makes a micro-batch's part of the loss."""
    targets = y.chunk(pipeline.microbatches)
    return x.chunk(pipeline.microbatches), lambda logits, m: loss_sum(logits, targets[m]) / valid


def full_state_dict(stages, group=None):
    """-> {name: tensor} of the whole model, on every rank. group: of the pipeline's ranks"""
    mine = {}
    for stage in stages:
        mine.update(stage.state_dict())
    return gather(mine, group)


def full_gradients(stages, names, group=None):
    """-> {name: gradient} of all that is trained, on every rank. names: {parameter: its name}"""
    mine = {}
    for p in stages.parameters():
        if p.requires_grad:
            mine[names[p]] = torch.zeros_like(p) if p.grad is None else p.grad
    return gather(mine, group)


def gather(mine, group):
    """{name: tensor} of each rank -> of all of them, on every one. What several have is alike."""
    told = [None] * dist.get_world_size(group)  # by each rank: what it has
    here = {name: (t.shape, t.dtype, t.device.type) for name, t in mine.items()}
    dist.all_gather_object(told, here, group)
    whole = {}
    for place, theirs in enumerate(told):
        for name, (shape, dtype, device) in theirs.items():
            if name not in whole:
                tensor = torch.empty(shape, dtype=dtype, device=device)
                if place == dist.get_rank(group):
                    tensor.copy_(mine[name].detach())
                dist.broadcast(tensor, group=group, group_src=place)  # on one rank -> replicated
                whole[name] = tensor
    return whole


# PipeDream, for comparison: an update after every micro-batch, while others are under way. The
# weights are stale by design, and few train so today: it is no part of what is copied.


class PipeDream(Pipeline):
    """On rank r, micro-batch m's F and B use the weights after max(0, m - (p-1-r)) updates.

    stages: Stages. optimizer: of their parameters. No rank waits for another in an update: each
    clips by the norm of its own stages, and what ranks share keeps its gradients until
    sum_and_clip, at the end of the step.
    """

    def __init__(self, stages, plans, mail, optimizer, clip):
        copied = {stage: partial(with_copies, module) for stage, module in stages.here.items()}
        super().__init__(copied, plans, mail)
        self.stages = stages
        self.optimizer = optimizer
        self.clip = clip

    def do(self, action, taken, loss_of):
        if action.kind == "U":
            return self.update()
        return super().do(action, taken, loss_of)

    def update(self):
        kept = {p: p.grad for p in self.stages.shared}
        for p in kept:
            p.grad = None  # clipping and the optimizer pass over it
        nn.utils.clip_grad_norm_(self.stages.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for p, grad in kept.items():
            p.grad = grad


def with_copies(module, x):
    """The module's forward. Until its backward a micro-batch keeps the weights of its forward."""
    weights = {name: p.clone() for name, p in module.named_parameters()}
    return torch.func.functional_call(module, weights, (x,))


# ---- 4. at work: the same with torch's own API -------------------------------

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
    """-> torch's schedule, which runs {number: stage}, those here. logits: their shape. boundary:
    size, dtype, device of what goes from stage to stage."""
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


class LossAtWork:
    """What torch's schedule calls: it takes the function once, for all batches."""

    def __init__(self):
        self.valid = 1  # targets of the batch that runs

    def __call__(self, logits, targets):
        return loss_sum(logits, targets) / self.valid


def train_step_at_work(schedule, loss_of, stages, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss_of.valid = valid
    losses = []
    schedule.step(x, target=y, losses=losses, return_outputs=False)
    norm = stages.sum_and_clip(clip)
    optimizer.step()
    return sum(losses, start=torch.zeros((), device=x.device)), norm


# ---- 5. run ------------------------------------------------------------------

FLAGS = {
    "--schedule": dict(default="1f1b", choices=(*SCHEDULES, "auto"), help="order of the work"),
    "--micro": dict(type=int, default=4, least=1, metavar="M", help="micro-batches"),
    "--chunks": dict(type=int, default=2, least=1, help="stages per rank (interleaved and bfs)"),
    "--limit": dict(type=int, least=1, help="micro-batches kept on a rank (auto; default: ranks)"),
    "--layers-per-stage": dict(default="", metavar="5,6,..", help="default: equally many"),
    "--simulate": dict(action="store_true", help="play the schedule without ranks"),
    "--pp": dict(type=int, least=1, metavar="P", help="ranks (simulation only)"),
    "--times": dict(default="1,1,1,0", metavar="F,B,W,COMM", help="for simulations and auto"),
}
# flags with which the file is worth running
VARIANTS = tuple(f"--micro 8 --schedule {name}" for name in SCHEDULES if name != "pipedream")


def chunks_of(name, chunks):
    """How many stages a rank has in this schedule; chunks: where one may choose."""
    return SCHEDULES[name].chunks or chunks


def late_plans(p, M, slope, lag, most):
    """--schedule auto takes the best of them. Rank r begins with `slope` Fs for each later rank,
    `most` at most; its Ws come lag x r Bs after their own. 1f1b: slope 1; zb-h1: lag 1, too."""
    plans = []
    for r in range(p):
        warmup = int(min(slope * (p - 1 - r), most))
        plans.append(follow(turns(M, warmup, [r]), "W", int(lag * r)))
    return plans


def refuse(args, require):
    name = args.schedule
    require(name == "auto" or not args.limit, f"--limit is for --schedule auto, not for {name}")
    require(args.simulate or not args.pp, "--pp is for --simulate only")
    if args.simulate:
        return
    require(args.batch % args.micro == 0, f"--micro {args.micro} cannot cut --batch {args.batch}")
    # checkpoints do not say how often each parameter was updated
    saved = args.save or args.resume
    require(name != "pipedream" or not saved, "--schedule pipedream takes no --save, --resume")
    if args.impl in ("idea", "all"):
        require(name in ("gpipe", "1f1b") and not args.train,
                f"--schedule {name}: the idea has 1f1b and gpipe, and no --train")
    if args.impl in ("torch", "both", "all"):
        require(not args.dry_run, "--dry-run is not for torch's schedules, which ask other ranks")
        refuse_at_work(require, name, args.micro, args.world_size)


def refuse_at_work(require, name, micro, ranks):
    """Refuses what torch's schedules would raise for."""
    require(name in AT_WORK, f"--schedule {name}: torch has {', '.join(AT_WORK)} only")
    # before torch 2.13 a rank that has two stages in a row sends to itself, and gloo cannot
    able = SCHEDULES[name].place is loop or torch.__version__ >= (2, 13)
    require(able, f"--schedule {name}: needs torch 2.13, or --impl scratch")
    enough = name != "1f1b" or micro >= ranks
    require(enough, f"--micro {micro}: torch's 1f1b wants {ranks} or more, one for each stage")
    equal = name != "zb-h1" or micro % max(1, micro // ranks) == 0  # rounds of one size
    require(equal, f"--micro {micro}: torch's zb-h1 wants equal rounds: take a multiple of {ranks}")


def too_few(layers, stages):
    return f"--layers {layers} for {stages} stages: give each at least one"


def read_layers(args, plans, require):
    """-> how many layers each stage has: --layers-per-stage, or equally many."""
    from harness.timeline import numbers

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


def set_up(run, impl, plans, layers, watched):
    """-> a Side: this rank's stages, and how this implementation trains them."""
    args = run.args
    model = run.build()
    names = {p: name for name, p in model.named_parameters()}
    boundary = (args.batch // args.micro, run.cfg.seq, run.cfg.width), run.dtype, run.device
    stages, pipeline = parallelize(model, plans, layers, *boundary)
    optimizer = run.optimizer([(names[p], p) for p in stages.parameters()])
    side = partial(
        run.side, stages, optimizer, evaluate=partial(evaluate, pipeline),
        pieces=partial(pieces, stages, names, optimizer),
        full_gradients=partial(full_gradients, stages, names),
        full_state_dict=partial(full_state_dict, stages))
    if impl == "idea":
        return side(idea_at(stages, plans, boundary))
    if impl == "torch":
        loss_of = LossAtWork()
        logits = *boundary[0][:2], run.cfg.vocab
        schedule = schedule_at_work(args.schedule, stages.here, plans, boundary, logits, loss_of)
        return side(partial(train_step_at_work, schedule, loss_of))
    if args.schedule == "pipedream":
        pipeline = PipeDream(stages, plans, pipeline.mail, optimizer, args.clip or math.inf)
    return side(partial(train_step, pipeline), watch=partial(watched, run, plans, pipeline))


def idea_at(stages, plans, boundary):
    """-> idea_step in the form of train_step, with all that it takes besides."""
    size, dtype, device = boundary
    plan = [(action.kind, action.microbatch) for action in plans[dist.get_rank()]]
    told = dict(
        plan=plan, boundary=torch.empty(size, dtype=dtype, device=device),
        tied=next(iter(stages.shared), None), pp=dist.group.WORLD, back=dist.new_group(),
        ends=dist.new_group(sorted({0, len(plans) - 1})))
    return lambda stages, *others: idea_step(stages[0], *others, **told)


def pieces(stages, names, optimizer):
    """What this rank holds, by the plain GPT's names. The first rank saves a tied parameter."""
    from harness.checkpoint import pieces_of

    found = []
    counted = set(stages.counted)
    for p in stages.parameters():
        found += pieces_of([(names[p], p)], optimizer, writes=p in counted)
    return found


def textbook(run, plans, side):
    """b: bytes of a number. P: parameters here. n: stages beside those here, on other ranks."""
    p = run.world_size
    b = run.dtype.itemsize
    parameters = list(side.model.parameters())
    size = b * sum(q.numel() for q in parameters)
    home = homes(plans)
    pairs = [(home[stage], home[stage + 1]) for stage in range(max(home))]
    n = sum(pair.count(run.rank) == 1 for pair in pairs)
    tied = b * run.cfg.vocab * run.cfg.width if side.model.shared else 0
    norm = 2 * (p - 1) / p * max(b, 4)
    return [
        ("held parameters", "b P", size),
        ("held gradients", "b P", size),
        ("held optimizer", "2 b P + 4 per tensor (step counter)", 2 * size + 4 * len(parameters)),
        ("wire all_reduce", "b V C where a rank shares a tied embedding + 2 (p-1)/p w for the norm,"
         " w = max(b, 4)", tied + norm),
        ("wire send", f"n b batch T C, n = {n}: outputs and gradients of inputs",
         n * b * run.args.batch * run.cfg.seq * run.cfg.width),
    ]


def main():
    from harness.flags import arguments, require  # not above: the file is imported without harness/
    from harness.run import Run
    from harness.timeline import planned, read_plans, read_times, simulation, watched

    args = arguments(__doc__, FLAGS)
    refuse(args, require)
    times = read_times(args.times)
    plans = read_plans(args, args.pp or args.world_size, times, make_plans, late_plans)
    if args.simulate:
        return simulation(args, plans, times)
    layers = read_layers(args, plans, require)
    if args.schedule == "pipedream":
        args.check = False  # its weights are stale by design: tests have an oracle of their own
    with Run(args) as run:
        require(run.dry or run.device.type == "cpu" or dist.get_backend() == "nccl",
                "ranks that share a GPU talk by gloo, which sends CPU tensors alone: --device cpu")
        sides = {impl: set_up(run, impl, plans, layers, watched) for impl in run.impls}
        run.extra.update(planned(plans, times)[1])
        run.train(sides, rows=range(args.batch))
        run.textbook(textbook(run, plans, sides[run.impls[0]]))
        return run.finish()


if __name__ == "__main__":
    sys.exit(main())
