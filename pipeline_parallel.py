"""Pipeline parallelism: each rank holds some of the layers, and micro-batches flow through them.

    1f1b, 2 ranks, 4 micro-batches; a backward is twice as long as a forward; dots: the rank waits
    rank 0   F0 F1 ......B0    F2 B1    F3 B2    ...B3
    rank 1   ...F0 B0    F1 B1    F2 B2    F3 B3    ......

    plans = make_plans("1f1b", ranks=2, microbatches=4)  # what each rank does, in order
    mail = Mail(plans, (batch // 4, T, C), torch.float32, "cpu")  # the tensors between stages
    stages = Stages([layers[:3], layers[3:]], mail)  # layers: nn.Sequential. Of others see carve
    pipeline = SplitPipeline(stages.here, mail)
    optimizer = AdamW(stages.parameters())
    loss = pipeline.step(x.chunk(4), loss_of)  # loss_of(output, m): micro-batch m's part of it
    stages.reduce()  # what is tied
    norm = stages.clip_grad_norm_(1.0)  # then optimizer.step() and zero_grad()

p ranks, each with 1/p of the layers in v stages; M micro-batches a step, in the table 2p or more. A
rank's times for a micro-batch: F forward, B gradients of inputs, W gradients of weights.
    waits    the most that any rank idles between its first action and its last
    keeps    micro-batches whose activations rank r holds at once, at most

    schedule                    waits                   keeps
    plain GPT                   0                       M, of all layers
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

For a batch (b, T) a stage sends b T C numbers to each stage beside it on another rank.
Qi 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241; others are named at the schedules.
Not for: stages that pass on anything but one tensor of one size, or change it in place; ranks
without parameters; parameters replaced later; deepcopies of Stages; GradScaler; with Ws compiled
stages, or torch's checkpoint (take amp_accum_ckpt.py's). At work: torch.distributed.pipelining.
    torchrun --standalone --nproc_per_node=2 pipeline_parallel.py --schedule zb-v
    python pipeline_parallel.py --simulate --schedule zb-h1 --pp 4 --micro 8 --times 1,1,1,0
"""
import copy
import itertools
from collections import defaultdict, deque
from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

# imports of parts 1 and 2 end here; the rest is for parts 3 to 5
import math
import sys

from common import loss_sum, share

# ---- 1. the idea -------------------------------------------------------------


def idea_plan(microbatches, warmup):
    """-> in turn m F m, in turn m + warmup B m. warmup: in 1f1b p - 1 - r, in gpipe M."""
    turns = {("F", m): m for m in range(microbatches)}
    turns |= {("B", m): m + warmup for m in range(microbatches)}
    return sorted(turns, key=turns.get)  # in one turn F comes first: it stands first


class IdeaOfPipeline(NamedTuple):
    """What a rank of the pipeline has."""

    stage: nn.Module  # its layers, from tensor to tensor; all of them are trained
    shared: dict  # {parameter that two ranks have, such as a tied embedding: their group}
    boundary: torch.Tensor  # one of the size and dtype of those that go from rank to rank
    pp: dist.ProcessGroup  # the pipeline's ranks, in order
    back: dist.ProcessGroup  # again, for gradients: in one group of NCCL sends that cross can hang


def run_pipeline(model, plan, inputs, loss_of):
    """Forward and backward of inputs -> the sum of loss_of(output, m) on the last rank, else 0."""
    rank = model.pp.rank()
    last = model.pp.size() - 1
    loss = model.boundary.new_zeros(())
    kept = {}  # {micro-batch: (input, output)}, from its F to its B
    sends = []  # (tensor, Work): the tensor has to live until it is sent
    for kind, m in plan:
        if kind == "F":
            x = inputs[m] if rank == 0 else receive(model, rank - 1, model.pp).requires_grad_()
            y = model.stage(x)
            if rank < last:
                sends.append((y, dist.isend(y.detach(), group=model.pp, group_dst=rank + 1)))
            else:
                y = loss_of(y, m)  # from here on y is the loss: its B begins with it
                loss += y.detach()
            kept[m] = x, y
        else:
            x, y = kept.pop(m)
            dy = None if rank == last else receive(model, rank + 1, model.back)
            y.backward(dy)
            if rank > 0:
                sends.append((x.grad, dist.isend(x.grad, group=model.back, group_dst=rank - 1)))
    for _, work in sends:  # not at once, since the receiver may be sending, too
        work.wait()
    return loss


def receive(model, sender, group):
    tensor = torch.empty_like(model.boundary)
    dist.recv(tensor, group=group, group_src=sender)  # on the sender -> here
    return tensor


def idea_step(model, optimizer, x, y, valid, clip, plan):
    """x, y: the whole batch, on all ranks -> this rank's part of the loss, the gradient norm."""
    optimizer.zero_grad()
    rows = len(model.boundary)  # of a micro-batch
    targets = y.split(rows)

    def loss_of(logits, m):
        return F.cross_entropy(logits.flatten(0, 1), targets[m].flatten(), reduction="sum") / valid

    loss = run_pipeline(model, plan, x.split(rows), loss_of)
    for p, group in model.shared.items():
        dist.all_reduce(p.grad, group=group)  # partial (a summand each) -> replicated (the sum)
    counted = [p.grad for p in model.stage.parameters()
               if p not in model.shared or model.shared[p].rank() == 0]  # a shared one counts once
    square = nn.utils.get_total_norm(counted).square()
    dist.all_reduce(square, group=model.pp)  # partial -> replicated
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(model.stage.parameters(), clip, norm)
    optimizer.step()
    return loss, norm


# ---- 2. the technique (copy this; of part 1 it takes idea_plan) --------------

# What it adds to the idea, what that buys, and what it costs. Peaks: the toy, 2 ranks, M = 8.
#     Mail            keeps one send at a time: rank 0's peak falls, 12.46 -> 12.07 MB
#                     begins receives early: tensors travel while the rank is at work
#     Stages, Chain   a model's own forward, cut; all dtypes; frozen layers; dp x pp
#     W by itself     fills waiting time, and keeps more for it: rank 1's peak, 1f1b -> zb-h1,
#                     9.77 -> 12.26 MB
#     schedules       several stages a rank: less waiting, as in the table above
# Calls and bytes sent stay those of the idea wherever a rank has one stage.

# ---- 2.1 plans: what each rank does, in order ----


class Action(NamedTuple):
    """A piece of a rank's work."""

    kind: str  # F forward, B backward; in 2.5 also W, the gradients of weights
    microbatch: int
    stage: int  # a part of the model's layers, 0 the first; a rank may hold several


def homes(plans):
    """-> {stage: its place}, in order. A place is the rank within its pipeline: plans[place]."""
    home = {action.stage: place for place, plan in enumerate(plans) for action in plan}
    return dict(sorted(home.items()))


# ---- 2.2 the pipeline: plays a plan ----


class Pipeline:
    """Plays this rank's plan of Fs and Bs.

    modules: {stage: module}, this rank's; each maps one tensor to one. mail: see Mail
    """

    def __init__(self, modules, mail):
        self.modules = modules
        self.mail = mail
        self.plan = mail.plans[mail.place]
        self.microbatches = 1 + max(action.microbatch for action in self.plan)
        self.kept = {}  # {(micro-batch, stage): (input, edge of the output)}, from F to B
        self.loss = None  # this batch's, as far as it is known here

    def step(self, inputs, loss_of):
        """Runs a batch forward and backward, and adds to .grad -> this rank's sum of losses.

        inputs: M micro-batches, which the first stage reads. loss_of(output, m): the sum of the
        losses of micro-batch m's tokens, divided by the number of tokens in the whole batch: the
        last stage calls it. Under autocast: all of step, or Chain's call.
        """
        return self.play(self.plan, inputs, loss_of)

    @torch.no_grad()
    def evaluate(self, inputs, loss_of):
        """The forwards alone -> this rank's sum of losses. Whoever calls it calls eval() before."""
        return self.play([action for action in self.plan if action.kind == "F"], inputs, loss_of)

    def play(self, actions, inputs, loss_of):
        assert len(inputs) == self.microbatches, f"{len(inputs)} inputs for {self.microbatches}"
        wide = torch.promote_types(self.mail.dtype, torch.float32)  # the losses' dtype
        self.loss = torch.zeros((), dtype=wide, device=self.mail.device)
        self.mail.open(actions)
        for action in actions:
            received = self.mail.take(action)
            if action.kind == "F" and action.stage == 0:
                received = inputs[action.microbatch]
            result = self.do(action, received, loss_of)
            self.mail.put(action, result)
            del received, result  # what nobody keeps is free before the next action
        self.mail.finish_send()
        return self.loss

    def do(self, action, received, loss_of):
        """received: from another stage, or an input -> the tensor for another stage, or the loss"""
        kind, m, stage = action
        if kind == "F":
            return self.forward(m, stage, received, loss_of)
        return self.backward(m, stage, received)

    def forward(self, m, stage, x, loss_of):
        if stage > 0:
            x = x.detach().requires_grad_()  # a leaf, whose .grad goes to the stage before
        y = self.modules[stage](x)
        if stage == self.mail.last:
            y = loss_of(y, m)
            self.loss += y.detach()
        if y.requires_grad:  # not in an evaluation, nor in a first stage that is frozen
            # the graph alone: the memory of y is free when y has been sent
            self.kept[m, stage] = x, get_gradient_edge(y)
        return y.detach()

    def backward(self, m, stage, grad):
        """-> the gradient of the stage's input."""
        if (m, stage) not in self.kept:
            return None  # a first stage that is frozen; or a W, which its B has done
        x, edge = self.kept.pop((m, stage))
        torch.autograd.backward(edge, grad)
        return x.grad


# ---- 2.3 mail: tensors between stages ----


class Mail:
    """Brings each tensor from the action that makes it to the one that takes it.

        rank 0   F0 F1 B0 B1    rank 0's F0 makes a tensor, and rank 1's F0 takes it
        rank 1   F0 B0 F1 B1    rank 1's B0 makes a tensor, and rank 0's B0 takes it

    Here a tensor is called by its maker, the action that makes it. On its way it has no name:
    tensors are received in the order in which they are sent, that of the sender's plan.

    size, dtype, device: of every tensor, under autocast that of residuals. mail.size may be another
        in the next step or evaluation
    pipelines: for each its ranks, in order of their places; None: there is one, of all ranks
    """

    def __init__(self, plans, size, dtype, device, pipelines=None):
        self.size = torch.Size(size)
        self.dtype = dtype
        self.device = device
        self.plans = plans
        self.pipelines = pipelines or [list(range(dist.get_world_size()))]
        [self.ranks] = [ranks for ranks in self.pipelines if dist.get_rank() in ranks]
        assert len(self.ranks) == len(plans), (
            f"plans of {len(plans)} ranks for a pipeline of {len(self.ranks)}")
        self.place = self.ranks.index(dist.get_rank())  # this rank's
        self.links = make_links(plans, self.pipelines)
        self.home = homes(plans)
        self.last = max(self.home)  # the last stage
        # {action: its number in its rank's plan}
        self.turn = {action: i for plan in plans for i, action in enumerate(plan)}
        # {maker: the action that takes its tensor}, an F's output or the gradient that a B makes
        self.taker = {}
        for action in self.turn:
            beside = {"F": action.stage + 1, "B": action.stage - 1}.get(action.kind)  # of W none
            if beside in self.home:
                self.taker[action] = action._replace(stage=beside)
        self.maker = {taker: maker for maker, taker in self.taker.items()}
        self.coming = deque()  # makers on other ranks; receives of their tensors are yet to begin
        self.inbox = {}  # {maker: (tensor, Work of its receive; None: it was made here)}
        self.sent = None  # (tensor, Work) of the last send

    def open(self, actions):
        """Before this rank plays these actions: list what other ranks make for them."""
        makers = [self.maker[action] for action in actions if action in self.maker]
        coming = [maker for maker in makers if self.home[maker.stage] != self.place]
        self.coming = deque(sorted(coming, key=self.turn.get))  # each sender's in its own order

    def take(self, action):
        """-> the tensor that an action takes from another stage, or None."""
        maker = self.maker.get(action)
        if maker is None:
            return None
        while maker not in self.inbox:
            self.begin_receive()
        tensor, work = self.inbox.pop(maker)
        if work:
            work.wait()  # on a GPU the stream waits, not the host
        return tensor

    def put(self, action, tensor):
        """After each action: begin the receives that are due, and send what the action has made.

        With NCCL a send lasts until its receive has begun. If receives began in take() alone, ranks
        that send to each other would wait for ever (interleaved, bfs). Neighbours are at about the
        same place in their plans. So after its i-th action a rank begins to receive what others
        make in theirs up to the (i + 2)-th: with fewer, senders wait in some schedules.
        """
        while self.coming and self.turn[self.coming[0]] <= self.turn[action] + 2:
            self.begin_receive()
        taker = self.taker.get(action)
        if taker is None:
            return
        receiver = self.home[taker.stage]
        if receiver == self.place:
            self.inbox[action] = tensor, None
            return
        found = tensor.shape, tensor.dtype  # gloo would deliver another shape as noise
        assert found == (self.size, self.dtype), (
            f"stage {action.stage} has made {found}, not {self.size}, {self.dtype}; see Chain")
        self.finish_send()
        tensor = tensor.contiguous()
        # here -> there
        self.sent = tensor, self.begin(dist.isend, tensor, receiver, (self.place, receiver))

    def finish_send(self):
        """Wait for the last send: so one sent tensor is kept at a time."""
        if self.sent:
            self.sent[1].wait()
        self.sent = None

    def begin_receive(self):
        maker = self.coming.popleft()
        sender = self.home[maker.stage]
        tensor = torch.empty(self.size, dtype=self.dtype, device=self.device)
        # there -> here
        self.inbox[maker] = tensor, self.begin(dist.irecv, tensor, sender, (sender, self.place))

    def begin(self, operation, tensor, peer, link):
        # as a batch of one: for a bare isend NCCL would make a communicator beside the group's
        one = dist.P2POp(operation, tensor, self.ranks[peer], self.links[link])
        return dist.batch_isend_irecv([one])[0]


def make_links(plans, pipelines):
    """-> {(sender, receiver): group} of this rank's links; both are places in its pipeline.

    Every rank calls it. NCCL does a group's transfers in order, and a receive that waits would hold
    up the sends behind it: so each direction between two ranks has a group there.
    """
    places = list(homes(plans).values())
    # of outputs, and of gradients
    pairs = {*itertools.pairwise(places), *itertools.pairwise(reversed(places))}
    if dist.get_backend() in ("gloo", "fake"):  # fake: a dry run's
        group, _ = dist.new_subgroups_by_enumeration(pipelines)
        return dict.fromkeys(pairs, group)
    links = {}
    for ranks in pipelines:
        for sender, receiver in sorted(pairs):
            if sender != receiver:
                group = dist.new_group([ranks[sender], ranks[receiver]])  # every rank makes it
                if dist.get_rank(group) >= 0:  # this rank is in the group
                    links[sender, receiver] = group
                    dist.barrier(group)  # NCCL makes its communicator here: no send waits for it
    return links


# ---- 2.4 stages: what makes them one model ----


class Stages(nn.ModuleList):
    """This rank's stages of a model, and what makes them one model with those of other ranks.

    whole: all stages, in order: slices of an nn.Sequential, or carve's. Those of other ranks may be
    on the meta device; to("meta") and to_empty() make two parameters of a tied one: tie them anew.

    A parameter that several ranks have begins as on the first of them, and its gradients are summed
    in each step: a tied embedding's, or all if pipelines share the batch, as dp = 2 x pp = 2:
        pipelines = [[0, 2], [1, 3]]  # loss_of divides by the tokens of both
        mail = Mail(plans, size, dtype, device, pipelines)
    """

    def __init__(self, whole, mail):
        home = mail.home
        assert len(whole) == len(home), f"{len(whole)} stages for plans of {len(home)}"
        here = {stage: whole[stage] for stage in home if home[stage] == mail.place}
        super().__init__(here.values())
        self.here = here  # {stage: module}
        names = names_of(whole)
        self.names = {p: names[p] for _, p in super().named_parameters()}  # of this rank's alone
        self.shared = {}  # {parameter that other ranks have, too: the group of its ranks}
        new_group = cache(dist.new_group)  # one group for the same ranks
        for part in nn.ModuleList(whole).modules():
            differs = hasattr(part, "tp") or hasattr(part, "is_of_experts")
            assert len(mail.pipelines) == 1 or not differs, (
                "ranks may have different pieces, or different experts: take hybrid_3d.py")
        of_stages = [set(stage.parameters()) for stage in whole]
        for p in names:
            places = sorted({home[stage] for stage, ps in enumerate(of_stages) if p in ps})
            ranks = tuple(ranks[place] for ranks in mail.pipelines for place in places)
            if len(ranks) > 1:
                group = new_group(ranks)  # every rank makes it
                if dist.get_rank() in ranks:
                    self.shared[p] = group
                    p.data = p.data.contiguous()  # a broadcast sends memory, whatever the strides
                    dist.broadcast(p.data, group=group, group_src=0)  # -> replicated

    def named_parameters(self, *args, **options):
        """By the whole model's names. What is tied has one, on all ranks: an optimizer's groups may
        go by names."""
        for name, p in super().named_parameters(*args, **options):
            yield self.names.get(p, name), p

    def reduce(self):
        """After all backwards of a step: sums the gradients of what several ranks have. What none
        of them has used gets 0."""
        for p, group in self.shared.items():
            if p.requires_grad:
                if p.grad is None:  # not used here; the others wait for its summand
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad, group=group)  # partial -> replicated

    def clip_grad_norm_(self, max_norm):
        """Scale the whole gradient to a norm of max_norm at most (0: do not) -> its norm before."""
        like = next(self.parameters())
        wide = torch.promote_types(like.dtype, torch.float32)
        counted = [p for p in self.parameters()
                   if p not in self.shared or dist.get_rank(self.shared[p]) == 0]  # each once
        grads = [p.grad for p in counted if p.grad is not None]
        grads.append(like.new_zeros(1))  # _foreach_norm wants one, also where all is frozen
        square = torch.stack(torch._foreach_norm(grads, dtype=wide)).square().sum()
        dist.all_reduce(square)  # partial -> replicated
        norm = square.sqrt()
        if max_norm:
            finite = norm.nan_to_num(0, posinf=0)  # inf, nan -> 0: then nothing is scaled
            nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, finite)
        return norm


def names_of(stages):
    """All stages of a model -> {parameter: its name in the first stage that has it}"""
    names = {}
    named = {}
    for stage in stages:
        for name, p in stage.named_parameters():
            assert named.setdefault(name, p) is p, (
                f"two stages have a {name}: a state_dict would lose one; take slices, or carve")
            names.setdefault(p, name)
    return names


def full_state_dict(stages, group=None):
    """-> {name: tensor} of the whole model, on every rank. group: of the pipeline's ranks

    A carved stage takes its own again: stage.load_state_dict(whole, strict=False) misses no key
    """
    mine = {}
    for stage in stages:
        mine.update(stage.state_dict())
    return gather(mine, group)


def gather(mine, group):
    """{name: tensor} of each rank -> of all of them, on every one. What several have is alike."""
    here = {name: (t.shape, t.dtype, t.device.type) for name, t in mine.items()}
    listed = [None] * dist.get_world_size(group)  # what each rank has
    dist.all_gather_object(listed, here, group)
    whole = {}
    for place, theirs in enumerate(listed):
        for name, (shape, dtype, device) in theirs.items():
            if name not in whole:
                whole[name] = torch.empty(shape, dtype=dtype, device=device)
                if place == dist.get_rank(group):
                    whole[name].copy_(mine[name].detach())
                dist.broadcast(whole[name], group=group, group_src=place)  # one has it -> all
    return whole


# ---- 2.5 W: the half of a backward that nobody waits for ----
# For every nn.Linear, y = x A^T (Qi 2023, section 2):
#     B    grad_x = grad_y A       the stage before waits for it
#     W    grad_A = grad_y^T x     nobody waits for it: grad_y and x are kept until then


class Split(torch.autograd.Function):
    """A function with a backward in two parts: autograd's backward is B, and puts W, a function,
    into the list `later`; without a list it does W at once."""

    later = None  # a list during a B that leaves a W

    @staticmethod
    def forward(ctx, function, gradient_of_x, x, parameters):
        with torch.enable_grad():  # a second graph, from the parameters alone: its backward is W
            ys = function(x.detach(), *parameters)
        ctx.edges = [get_gradient_edge(y) for y in ys]
        ctx.gradient_of_x = gradient_of_x
        return tuple(y.detach() for y in ys)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        w = partial(torch.autograd.backward, ctx.edges, gradients)
        if Split.later is None:
            w()
        else:
            Split.later.append(w)
        return None, None, ctx.gradient_of_x(*gradients), None


def split(function, gradient_of_x, x, *parameters):
    """-> function(x, *parameters), a tuple of tensors. gradient_of_x(their gradients) is B's."""
    trained = any(p is not None and p.requires_grad for p in parameters)
    if not trained or not torch.is_grad_enabled():
        return function(x, *parameters)  # no W
    if not x.requires_grad:
        x = x.detach().requires_grad_()  # else autograd, which sees x alone, would skip backward
    # Parameters are in a tuple, where autograd does not see them; else (torch 2.13) B would call
    # their post-accumulate hooks, though it makes no gradient of theirs.
    return Split.apply(function, gradient_of_x, x, parameters)


def split_linear(x, weight, bias):
    def product(*operands):
        return (F.linear(*operands),)

    def gradient_of_x(grad):
        return grad @ weight.to(grad.dtype)  # under autocast their dtypes may differ

    return split(product, gradient_of_x, x, weight, bias)[0]


class SplitLinear(nn.Linear):
    """What SplitPipeline makes of an nn.Linear."""

    def forward(self, input):
        return split_linear(input, self.weight, self.bias)


class SplitPipeline(Pipeline):
    """Its plan may have Ws: a B that has one leaves that work to it. Without Ws it is a Pipeline.

        B    later = []; each Split, from the last layer to the first, appends its w
        W    calls them in this order
    """

    def __init__(self, modules, mail):
        super().__init__(modules, mail)
        self.split = {(a.microbatch, a.stage) for a in self.plan if a.kind == "W"}  # split Bs
        self.ws = {}  # {(micro-batch, stage): [what W calls for each Linear]}, from B to W
        if self.split:
            for module in nn.ModuleList(modules.values()).modules():
                if type(module) is nn.Linear:  # the W of a subclass stays in its B
                    module.__class__ = SplitLinear

    def do(self, action, received, loss_of):
        kind, m, stage = action
        if kind != "W":
            return super().do(action, received, loss_of)
        ws = self.ws.pop((m, stage))
        while ws:
            ws.pop(0)()  # popped, so that what it holds is free at once

    def backward(self, m, stage, grad):
        if (m, stage) in self.split:
            self.ws[m, stage] = []
            Split.later = self.ws[m, stage]  # each Split appends to it
        try:
            return super().backward(m, stage, grad)
        finally:  # also if it raises, and somebody goes on
            Split.later = None


# ---- 2.6 schedules ----
# M micro-batches on rank r of p. The pictures are for F = B = W and 2 ranks with 4 micro-batches;
# naive and bfs have 2. Small letters are a rank's second stage. A B that leaves no W is twice as
# long: it does the W, too.


def sweep(kind, M, stages, together):
    """-> actions of one kind, for each group of `together` micro-batches: stage by stage."""
    actions = [Action(kind, m, stage) for stage in stages for m in range(M)]
    return sorted(actions, key=lambda action: action.microbatch // together)  # a stable sort


def turns(M, warmup, stages, together=1):
    """-> the idea's plan for several stages, each kind in the order of sweep."""
    forwards = sweep("F", M, stages, together)
    backwards = sweep("B", M, stages[::-1], together)
    plan = idea_plan(len(forwards), warmup)
    return [forwards[i] if kind == "F" else backwards[i] for kind, i in plan]


# {name: (rank r, of p, M micro-batches, v stages of each rank if one may choose) -> r's plan}
SCHEDULES = {
    # One micro-batch at a time: one rank is at work.
    #     rank 0   F0 .........B0    F1 .........B1
    #     rank 1   ...F0 B0    .........F1 B1    ......
    "naive": lambda r, p, M, v: turns(M, 0, [r]),
    # All forwards, then all backwards (Huang 2019, arXiv:1811.06965, figure 2c).
    #     rank 0   F0 F1 F2 F3 .........B0    B1    B2    B3
    #     rank 1   ...F0 F1 F2 F3 B0    B1    B2    B3    ......
    "gpipe": lambda r, p, M, v: turns(M, M, [r]),
    # Each backward as early as can be: rank r begins with one F for each later rank; then an F and
    # a B take turns (Harlap 2018, arXiv:1806.03377, figure 8). The docstring has the picture.
    "1f1b": lambda r, p, M, v: turns(M, p - 1 - r, [r]),
    # 1f1b with several stages per rank, which fills and drains in less time (Narayanan 2021,
    # arXiv:2104.04473, figure 4). Rank r begins with p Fs in each stage but its last, and two more
    # for each later rank: there and back.
    #     rank 0   F0 F1 f0 f1 F2 ...b0    F3 b1    f2 B0    f3 B1    ...b2    ...b3    B2    B3
    #     rank 1   ...F0 F1 f0 b0    f1 b1    F2 B0    F3 B1    f2 b2    f3 b3    B2    B3    ......
    "interleaved": lambda r, p, M, v: turns(
        M, (v - 1) * p + 2 * (p - 1 - r), range(r, p * v, p), together=p),
    # gpipe with several stages per rank: all micro-batches go through one, then through the next,
    # so FSDP gathers a stage only twice (Lamy-Poirier 2022, arXiv:2211.05953).
    #     rank 0   F0 F1 f0 f1 .........b0    b1    B0    B1
    #     rank 1   ...F0 F1 f0 f1 b0    b1    B0    B1    ......
    "bfs": lambda r, p, M, v: turns(M, v * M, range(r, p * v, p), together=M),
}


# With Ws a plan is spelled in words.


def spell(words, M, r, p):
    """-> the plan of rank r of p. It has stage r (capitals) and, if stages go down the ranks and up
    again, as a V, stage 2p - 1 - r (small letters). Words:

    F, f     the next forward
    B, b     the next backward; it leaves a W
    BW, bw   the next backward with its W
    W        the oldest W that is left, of either stage; those left in the end come then

    Micro-batches from M on are left out.
    """
    plan = []
    left = deque()  # Ws
    numbers = defaultdict(itertools.count)  # {(kind, stage): its micro-batches, in order}
    for word in words.split():
        if word == "W":
            plan.append(left.popleft())
            continue
        kind = word[0].upper()
        stage = r if word.isupper() else 2 * p - 1 - r
        action = Action(kind, next(numbers[kind, stage]), stage)
        plan.append(action)
        if word in ("B", "b"):
            left.append(action._replace(kind="W"))
    return [action for action in [*plan, *left] if action.microbatch < M]


def late_ws(M, warmup, r, p, lag):
    """-> rank r's plan: after `warmup` Fs an F and a B in turn; Ws, too, but `lag` Bs late."""
    return spell("F " * warmup + "F B " * lag + "F B W " * M, M, r, p)


SCHEDULES |= {
    # 1f1b in which rank r does the W of micro-batch m after the B of micro-batch m + r: Bs are done
    # sooner, and Ws fill the end (Qi 2023, figure 3).
    #     rank 0   F0 F1 ...B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
    #     rank 1   ...F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3
    "zb-h1": lambda r, p, M, v: late_ws(M, p - 1 - r, r, p, r),
    # Twice the warm-up, and Ws twice as late: nobody waits if F + B = 2W (Qi 2023, figure 3). But
    # rank r begins r F later than rank 0 and ends as much later, if B <= 2W, and all wait for the
    # last one's norm: a step takes M (F + B + W) + (p-1) F. Qi 2023, section 4, does not wait for
    # it, but takes back a step whose norm was too large.
    #     rank 0   F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3 ...
    #     rank 1   ...F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
    "zb-h2": lambda r, p, M, v: late_ws(M, 2 * (p - 1 - r), r, p, 2 * r),
}


def zb_v(r, p, M, v):
    # No rank keeps more than rank 0 does in 1f1b: a micro-batch comes back to the rank that it
    # began on, so that its backward begins there soon (Qi 2023, figure 8). A step takes
    # M (F + B + W) and (p-1) F/2, since the last rank begins so much later.
    #     rank 0   F0 F1 F2 f0 b0 w0 f1 b1 w1 F3 B0 W0 f2 b2 w2 B1 W1 f3 b3 w3 B2 W2 B3 W3 ...
    #     rank 1   ...F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 F3 B1 W1 f3 b2 w2 B2 b3 B3 W2 w3 W3
    n = max(M, 2 * p - 1)  # spell leaves out those from M on
    words = (
        "F " * (2 * (p - r) - 1)  # until the first micro-batch comes to the second stage
        + "f F " * r  # until the first gradient comes to the second stage
        + "f b W " * (p - r)  # until the first gradient comes to the first stage
        + "F B W f b W " * (n - 2 * p + 1 + r)  # the steady state
        + "B W f b W " * (p - 1 - r)  # no F is left
        + "B b " * r  # no f is left; Ws are put off, since other ranks wait for Bs
        + "B W " * (p - r)
    )
    return spell(words, M, r, p)


SCHEDULES["zb-v"] = zb_v


def make_plans(name, ranks, microbatches, chunks=2):
    """-> for each rank a list of actions. chunks: v, a rank's stages, of interleaved and bfs."""
    M = microbatches
    if name == "interleaved":  # else the ranks could wait for each other for ever
        assert M % ranks == 0, f"interleaved takes multiples of {ranks} micro-batches, not {M}"
    return [SCHEDULES[name](rank, ranks, M, chunks) for rank in range(ranks)]


# ---- 2.7 any model, cut between its layers ----


class Chain(NamedTuple):
    """Where the layers of a model are, so that it can be cut between them. Names are of modules.

    The model's own forward runs in every stage, with its masks and angles. In the place of a module
    that is on another stage it finds HandsOn, which hands on x. So outside of the modules named
    here it must leave x alone: every stage would do x * 0.5, or F.linear(x, tok.weight) (let the
    head be an nn.Linear with this weight). assert_carves finds it. Later stages get x, (B, T, C),
    in the place of ids, and nothing else, such as a mask. Layers may get more, of what forward
    makes, but return x alone, no tuple. docs/your-model.md has an example.

    first    of the first stage alone: the token embedding, positions, their dropout and norm
    layers   an nn.ModuleList
    last     of the last stage alone: the norm and, at the end, the Linear of the logits
    call     call(forward, x) -> a tensor: how the model's forward, or a stage's, is called, such as
             under autocast: then a loss of one's own has to make fp32 of logits
    """

    first: list
    layers: str
    last: list
    call: Callable = lambda forward, x: forward(x)


def assert_carves(model, chain, x):
    """Once: raises if the model does anything to x outside of what chain names, which every stage
    would do. x: random, (B, T, C), where the model is, and in its dtype."""
    layers = len(model.get_submodule(chain.layers))
    _, empty, _ = carve(model, chain, [layers, 0, 0])
    with torch.no_grad():
        assert torch.equal(empty(x), x), "name modules for what forward does besides, see Chain"


def carve(model, chain, layers):
    """-> all stages: copies of the model that share its modules. layers: how many each gets.

        chain = Chain(first=["embed"], layers="layers", last=["norm", "head"])
        assert_carves(model, chain, torch.randn(2, T, C))
        stages = Stages(carve(model, chain, [2, 2]), mail)
    To free what is on other stages: del model; gc.collect()
    """
    count = len(model.get_submodule(chain.layers))
    assert sum(layers) == count, f"layers {layers} of {count}"
    numbers = [number for number, size in enumerate(layers) for _ in range(size)]  # [2, 1]: 0 0 1
    home = {f"{chain.layers}.{i}": number for i, number in enumerate(numbers)}  # {name: its stage}
    home.update(dict.fromkeys(chain.first, 0))
    home.update(dict.fromkeys(chain.last, len(layers) - 1))
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in home:  # None: a model without learned positions may have it in their place
        is_module = name in modules or attrgetter(name)(model) is None
        assert is_module, f"{name} is no module: every stage would run it"
    stages = []
    for number in range(len(layers)):
        stage = cut_out(number, model, home)
        stage.forward = partial(chain.call, stage.forward)
        stages.append(stage)
    return stages


def cut_out(number, module, home, path=""):
    """-> a copy of the module, with HandsOns for what is not stage `number`'s. It shares the rest.

    home: {name: its stage}, of modules that one stage runs. path: the module's own name, and a dot
    """
    assert "forward" not in vars(module), "its forward would see all layers: replace it after carve"
    twin = copy.copy(module)
    # copy.copy shares the dicts of submodules, of hooks, .. as well: the twin gets its own
    dicts = {key: value.copy() for key, value in vars(module).items() if isinstance(value, dict)}
    vars(twin).update(dicts)
    for key, child in module._modules.items():
        name = path + key
        if home.get(name, number) != number:
            twin._modules[key] = HandsOn(child)
        elif any(each.startswith(f"{name}.") for each in home):
            twin._modules[key] = cut_out(number, child, home, f"{name}.")
    return twin


class HandsOn(nn.Module):
    """What a stage has in the place of a layer, norm, head or token embedding: it hands on x. In
    the place of learned positions, whose input is integers, it is 0, which the model adds to x.
    old: what was there; a forward may read its words and numbers (transformers' attention_type)"""

    def __init__(self, old=None):
        super().__init__()
        known = {} if old is None else vars(getattr(old, "_orig_mod", old))  # if it is compiled
        for name, value in known.items():
            if value is None or isinstance(value, (str, int, float)):
                vars(self)[name] = value

    def forward(self, x, *others, **keywords):
        return x if x.is_floating_point() else x.new_zeros(())


# ---- 3. the toy GPT, parallelized --------------------------------------------

CHAIN = Chain(first=["tok", "pos"], layers="blocks", last=["norm", "head"])


def chunks_of(name, chunks):
    """How many stages a rank has in this schedule; chunks: where one may choose."""
    return {"interleaved": chunks, "bfs": chunks, "zb-v": 2, "dualpipe-v": 2}.get(name, 1)


def too_few(layers, stages):
    return f"--layers {layers} for {stages} stages: give each at least one"


def split_layers(count, stages):
    """-> how many of the layers each stage gets: about equally many."""
    assert stages <= count, too_few(count, stages)
    return [len(share(count, stages, stage)) for stage in range(stages)]


def parallelize(model, plans, layers, size, dtype, device):
    """The plain GPT -> this rank's Stages, and the Mail between them and other ranks'.

    layers: how many each stage gets. size, dtype, device: of what goes from stage to stage.
    """
    mail = Mail(plans, size, dtype, device)
    return Stages(carve(model, CHAIN, layers), mail), mail


def parallelize_idea(stages, plans, size, dtype, device):
    """This rank's Stages, of one stage -> what the idea trains, and this rank's plan for it."""
    pp = dist.group.WORLD
    back = dist.new_group()
    boundary = torch.empty(size, dtype=dtype, device=device)
    plan = [(action.kind, action.microbatch) for action in plans[pp.rank()]]
    return IdeaOfPipeline(stages[0], stages.shared, boundary, pp, back), plan


def full_gradients(stages, group=None):
    """-> {name: gradient} of all that is trained, on every rank"""
    mine = {}
    for name, p in stages.named_parameters():
        if p.requires_grad:
            mine[name] = torch.zeros_like(p) if p.grad is None else p.grad
    return gather(mine, group)


def train_step(pipeline, stages, optimizer, x, y, valid, clip):
    """x, y: the whole batch, (batch, T). -> this rank's part of the loss, the gradient norm."""
    optimizer.zero_grad()
    loss = pipeline.step(*in_microbatches(pipeline, x, y, valid))
    stages.reduce()  # partial -> replicated
    norm = stages.clip_grad_norm_(clip)
    optimizer.step()
    return loss, norm


def evaluate(pipeline, x, y):
    """-> this rank's part of the sum of token losses."""
    return pipeline.evaluate(*in_microbatches(pipeline, x, y, 1))


def in_microbatches(pipeline, x, y, valid):
    """-> what Pipeline.step takes: inputs, and what makes a micro-batch's part of the loss."""
    targets = y.chunk(pipeline.microbatches)

    def loss_of(logits, m):
        return loss_sum(logits, targets[m]) / valid

    return x.chunk(pipeline.microbatches), loss_of


# Two more schedules, for comparison: they are no part of what is copied.


def dualpipe_v(r, p, M, v):
    # Pairs of an F and a B of the other stage: the all-to-alls of one's mixture of experts can hide
    # behind the other's arithmetic (DeepSeek-V3, arXiv:2412.19437, section 3.2.1; folded into a V
    # by Sea AI Lab). This is the schedule alone: here nothing of a pair overlaps.
    #     rank 0   F0 F1 F2 f0 b0 w0 f1 F3 b1    f2 B0    b2    f3 ...B1    b3    B2 W2 B3 W3
    #     rank 1   ...F0 f0 F1 f1 F2 b0    f2 B0    F3 b1    f3 B1    b2    B2    b3 B3 w3 W3
    # With fewer micro-batches the ranks would wait for each other for ever
    assert M >= 2 * p, f"dualpipe-v needs {2 * p} or more micro-batches, not {M}"
    words = (
        "F " * (2 * (p - 1 - r))  # until the first micro-batch comes to the second stage
        + "F f " * (r + 1)  # until the first gradient comes to the second stage
        + "b W f " * (p - 1 - r)  # until the first gradient comes to the first stage
        + "F bw f BW " * (M - 2 * p + r + 1)  # the steady state: pairs, which can overlap
        + "bw f BW " * (p - 1 - r)  # no F is left
        # no f is left. r + 1 bs and r + 1 Bs take turns, of which the later half leave Ws
        + "bw BW " * ((r + 1) // 2)
        + "bw B " * ((r + 1) % 2)
        + "b B " * ((r + 1) // 2)
        + "W B " * (p - 1 - r)  # no b is left
    )
    return spell(words, M, r, p)


SCHEDULES["dualpipe-v"] = dualpipe_v

# PipeDream: an update after every micro-batch, while others are under way. The weights are stale by
# design, and few train so today.
SCHEDULES["pipedream"] = SCHEDULES["1f1b"]


class PipeDream(Pipeline):
    """An optimizer's step after each B but the last; train_step does that one.

        rank 0   F0 F1 ......B0 U  F2 B1 U  F3 B2 U  ...B3      U: a step, within the B before
        rank 1   ...F0 B0 U  F1 B1 U  F2 B2 U  F3 B3    ......

    On rank r, F and B of micro-batch m use the weights after max(0, m - (p-1-r)) steps. No rank
    waits for another in a step: each clips by the norm of its own stages, and what ranks share
    keeps its gradients until reduce(). Harlap 2018, section 3, never drains the pipeline; here
    it is drained at the end of each batch.
    """

    def __init__(self, stages, mail, optimizer, clip):
        copied = {stage: partial(with_copies, module) for stage, module in stages.here.items()}
        super().__init__(copied, mail)
        self.stages = stages
        self.optimizer = optimizer
        self.clip = clip

    def backward(self, m, stage, grad):
        made = super().backward(m, stage, grad)
        if m < self.microbatches - 1:
            self.update()
        return made

    def update(self):
        of_shared = {p: p.grad for p in self.stages.shared}
        for p in of_shared:
            p.grad = None  # clipping and the optimizer pass over it
        nn.utils.clip_grad_norm_(self.stages.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for p, grad in of_shared.items():
            p.grad = grad


def with_copies(module, x):
    """The module's forward with a copy of its weights, which is kept with the graph until the
    backward: updates do not change it."""
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
    # examples of what stages take and make; without them torch asks other ranks
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


def refuse_at_work(require, name, micro, ranks):
    """Refuses what torch's schedules would raise for."""
    require(name in AT_WORK, f"--schedule {name}: torch has {', '.join(AT_WORK)} only")
    # before torch 2.13 a rank that has two stages in a row sends to itself, which gloo cannot
    able = name not in ("zb-v", "dualpipe-v") or torch.__version__ >= (2, 13)
    require(able, f"--schedule {name}: needs torch 2.13, or --impl scratch")
    enough = name != "1f1b" or micro >= ranks
    require(enough, f"--micro {micro}: torch's 1f1b wants {ranks} or more, one for each stage")
    equal = name != "zb-h1" or micro % max(1, micro // ranks) == 0  # rounds of one size
    require(equal, f"--micro {micro}: torch's zb-h1 wants equal rounds: take a multiple of {ranks}")


def parallelize_at_work(name, stages, plans, boundary, vocab):
    """-> torch's schedule for this rank's stages, and a cell for the number of targets in the whole
    batch: the schedule is made once, so its loss reads them where each step writes them."""
    valid = torch.ones((), device=boundary[2])
    logits = *boundary[0][:2], vocab

    def loss_of(logits, targets):
        return loss_sum(logits, targets) / valid

    return schedule_at_work(name, stages.here, plans, boundary, logits, loss_of), valid


def train_step_at_work(schedule, valid_cell, stages, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    valid_cell.fill_(valid)
    losses = []
    schedule.step(x, target=y, losses=losses, return_outputs=False)
    stages.reduce()  # partial -> replicated
    norm = stages.clip_grad_norm_(clip)
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


def set_up(run, impl, plans, layers):
    """-> a Side: this rank's stages, and how this implementation trains them."""
    from harness.checkpoint import pieces_of
    from harness.timeline import watched

    args = run.args
    boundary = (args.batch // args.micro, run.cfg.seq, run.cfg.width), run.dtype, run.device
    stages, mail = parallelize(run.build(), plans, layers, *boundary)
    named = list(stages.named_parameters())
    optimizer = run.optimizer(named)
    model = stages
    pipeline = Pipeline(stages.here, mail)  # of the idea and of torch it evaluates alone
    if impl == "idea":
        model, plan = parallelize_idea(stages, plans, *boundary)
        step = partial(idea_step, plan=plan)
    elif impl == "torch":
        at_work = parallelize_at_work(args.schedule, stages, plans, boundary, run.cfg.vocab)
        step = partial(train_step_at_work, *at_work)
    else:
        pipeline = SplitPipeline(stages.here, mail)
        if args.schedule == "pipedream":
            pipeline = PipeDream(stages, mail, optimizer, args.clip or math.inf)
        step = partial(train_step, pipeline)
    return run.side(
        model, optimizer, step, held_of=stages, evaluate=partial(evaluate, pipeline),
        pieces=partial(pieces_of, named, optimizer),
        full_gradients=partial(full_gradients, stages),
        full_state_dict=partial(full_state_dict, stages),
        watch=partial(watched, run, plans, pipeline))


def textbook(run, plans, stages):
    """b: bytes of a number. P: parameters here. n: pairs of neighbouring stages, of which one is
    here and one on another rank."""
    p = run.world_size
    b = run.dtype.itemsize
    size = b * sum(q.numel() for q in stages.parameters())
    tensors = len(list(stages.parameters()))
    here = [place == run.rank for place in homes(plans).values()]  # is the stage here?
    n = sum(one != other for one, other in itertools.pairwise(here))
    tied = b * run.cfg.vocab * run.cfg.width if stages.shared else 0
    norm = 2 * (p - 1) / p * max(b, 4)
    return [
        ("held parameters", "b P", size),
        ("held gradients", "b P", size),
        ("held optimizer", "2 b P + 4 per tensor (step counter)", 2 * size + 4 * tensors),
        ("wire all_reduce", "b V C where a rank shares a tied embedding + 2 (p-1)/p w for the norm,"
         " w = max(b, 4)", tied + norm),
        ("wire send", f"n b batch T C, n = {n}: outputs and gradients of inputs",
         n * b * run.args.batch * run.cfg.seq * run.cfg.width),
    ]


def refuse_shared_gpus(run, pp, require):
    require(run.dry or pp == 1 or run.device.type == "cpu" or dist.get_backend() == "nccl",
            "ranks that share a GPU talk by gloo, which sends CPU tensors alone: --device cpu")


def main():
    from harness.flags import arguments, require  # not above: the file is imported without harness/
    from harness.run import Run
    from harness.timeline import planned, read_layers, read_plans, read_times, simulation

    args = arguments(__doc__, FLAGS)
    refuse(args, require)
    times = read_times(args.times)
    plans = read_plans(args, args.pp or args.world_size, times, make_plans, late_ws)
    if args.simulate:
        return simulation(args, plans, times)
    layers = read_layers(args, len(homes(plans)), split_layers)
    if args.schedule == "pipedream":
        args.check = False  # its weights are stale by design: tests have an oracle of their own
    with Run(args) as run:
        refuse_shared_gpus(run, args.world_size, require)
        sides = {impl: set_up(run, impl, plans, layers) for impl in run.impls}
        run.extra.update(planned(plans, times)[1])
        run.train(sides, rows=range(args.batch))
        run.textbook(textbook(run, plans, sides[run.impls[0]].held_of))
        return run.finish()


if __name__ == "__main__":
    sys.exit(main())
