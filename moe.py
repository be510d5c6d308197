"""Mixture of experts: each MLP becomes E experts, of which a token visits K; tokens travel.

              router, sort    all-to-all    the experts      all-to-all    gates
    rank 0    0 0 0 1 | 2 3   0 0 0 1 0 1   experts 0, 1     0 0 0 1 2 3   sum of a token's K rows
    rank 1    0 1 | 2 2 3 3   2 3 2 2 3 3   experts 2, 3     0 1 2 2 3 3   sum of a token's K rows

A digit is a row: a token on its way to one of its K experts. The digit is that expert's number, and
| divides the rows for one rank from those for the next. The ranks that share out the experts also
share out the batch. When ep of all n ranks share out the experts (--ep), an expert is on n/ep
ranks, which sum its gradient; all other gradients are summed over all n. Splits are uneven, and no
token is dropped, unless --capacity A is given: then an expert takes at most ceil(A K N / E) rows
from each rank of N tokens, those of the first tokens.

    on each rank, a number has b bytes   plain MoE               here
    parameters, gradients, AdamW states  4 b (dense + experts)   4 b (dense + experts/ep)
    rows of C, to experts and back       -                       2 K N per layer, in backward again
    all-to-alls per layer                -                       4 of rows, 1 of 8 E bytes
    all-reduced in a step                -                       b (dense + experts/ep)
    all-reduced per layer                -                       8 E bytes

Lepikhin 2020, "GShard", arXiv:2006.16668 (all-to-all, capacity); Fedus 2021, "Switch Transformers",
arXiv:2101.03961, eq. 4 (balancing); Zoph 2022, "ST-MoE", arXiv:2202.08906, eq. 5 (z-loss);
DeepSeek-V3 2024, arXiv:2412.19437, sec. 2.1.2 (bias, there of sigmoids). At work: torchtitan's
models/moe, Megatron's core/transformer/moe; torch has parts of it, which section 3 uses.

In your own model, on every rank: of three groups of ranks, those in `ep` share out the experts,
those in `replicas` hold the same ones, and `everyone` is all.

    block.mlp = MoE(router, Experts(up=ups, down=downs), top_k=2, ep=ep, everyone=everyone)
    broadcast_parameters(model, replicas, everyone)          # once
    (token_losses.sum() / valid_targets_of_all_ranks).backward()
    sum_gradients(model, replicas, everyone)
    clip_gradients(model, gradient_norm(model, ep), 1.0)
    optimizer.step()
    step_biases(model)

    torchrun --standalone --nproc_per_node=2 moe.py
"""
import harness  # before torch, which warns where NumPy is missing

import copy
import math
import sys
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from common import (
    ANY, MLP, POSITIVE, Flag, Run, Side, adamw, arguments, build, init_weights, loss_sum,
    require, share)
from harness.checkpoint import STATES, Piece, pieces_of

# ---- 1. the technique (copy this; it needs only torch) -----------------------
# Autograd does not see collectives: each one here states its own backward.


class AllToAll(torch.autograd.Function):
    """Rows (sum(send), C) -> (sum(receive), C).

    send[r] of this rank's rows go to rank r of the group; receive[r] rows come from it.
    """

    @staticmethod
    def forward(ctx, rows, send, receive, group):
        ctx.send = send
        ctx.receive = receive
        ctx.group = group
        arrived = rows.new_empty(sum(receive), *rows.shape[1:])
        # sorted by destination -> sorted by source
        dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
        return arrived

    @staticmethod
    def backward(ctx, grad):  # gradients go back the way the rows came: else no expert gets one
        return AllToAll.apply(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def exchange_rows(rows, send, receive, group):
    return AllToAll.apply(rows, send, receive, group)


def rows_of(n, group, rank):
    """Which of n rows are this rank's, where the group shares them out evenly -> range."""
    size = dist.get_world_size(group)
    return range(rank * n // size, (rank + 1) * n // size)


def own_rows(rows, group):
    """Rows (n, C) that all ranks of the group have -> this rank's part of them."""
    mine = rows_of(len(rows), group, dist.get_rank(group))
    return rows[mine.start:mine.stop]


def all_rows(rows, n, group):
    """This rank's part of n rows -> all of them, (n, C)."""
    counts = [len(rows_of(n, group, rank)) for rank in range(dist.get_world_size(group))]
    padding = max(counts) - len(rows)  # all_gather takes parts of one size
    padded = F.pad(rows, (0, 0, 0, padding))
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)  # sharded(0) -> replicated
    return torch.cat([part[:count] for part, count in zip(parts, counts)])


class CutRows(torch.autograd.Function):
    """Rows (n, C) that all ranks have -> this rank's part: so each is routed and sent once."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.n = len(rows)
        ctx.group = group
        return own_rows(rows, group).clone()

    @staticmethod
    def backward(ctx, grad):
        return all_rows(grad, ctx.n, ctx.group), None  # sharded(0) -> replicated


class JoinRows(torch.autograd.Function):
    """This rank's part of n rows -> all of them, (n, C)."""

    @staticmethod
    def forward(ctx, rows, n, group):
        ctx.group = group
        return all_rows(rows, n, group)  # sharded(0) -> replicated

    @staticmethod
    def backward(ctx, grad):
        # all ranks of the group have the same gradient, and each keeps that of its own rows
        return own_rows(grad, ctx.group), None, None


def route(logits, top_k, bias):
    """Logits (N, E) -> chosen experts (N, K), their gates (N, K), probabilities (N, E).

    The bias (E,) has a say in the choice alone.
    """
    probs = logits.softmax(-1)
    chosen = (probs + bias).topk(top_k).indices
    gates = probs.gather(-1, chosen)
    if top_k > 1:  # they sum to 1. A single one would then always be 1, and teach nothing
        gates = gates / gates.sum(-1, keepdim=True)
    return chosen, gates, probs


def balancing_loss(load, logits, probs, top_k, alpha=0.1, beta=1e-3):
    """This rank's part of alpha E sum_e f_e P_e (Switch) + beta mean(logsumexp^2) (ST-MoE).

    f_e is expert e's share of all choices and P_e its mean probability, both over the tokens of
    all ranks. load (E,): the choices of all ranks' tokens. logits, probs (N, E): of this rank's.
    Switch has an alpha of 0.01.
    """
    choices = load.sum().clamp(min=1)  # 1: no rank has a token
    tokens = choices / top_k
    f = load.to(probs.dtype) / choices
    switch = len(f) * (f @ probs.sum(0))
    z = logits.logsumexp(-1).square().sum()
    return (alpha * switch + beta * z) / tokens


def capacity(factor, top_k, tokens, experts):
    """The rows that an expert takes of one source rank's tokens."""
    rows = factor * top_k * tokens / experts
    return math.ceil(round(rows, 6))  # 1.1 * 2 * 40 / 8 is 11.000000000000002


@dataclass
class Routing:
    """Which rows go where. Choice number n K + k is the k-th expert that token n has chosen."""
    choices: torch.Tensor  # (sum(sent),) those that are sent, sorted by expert, then by token
    sent: list  # rows to each rank of ep
    received: list  # rows from each rank of ep
    by_expert: torch.Tensor  # (sum(received),) the order that sorts received rows by expert
    sizes: list  # rows of each expert here, from all sources
    sizes_on_device: torch.Tensor  # (E/ep,) the same

    @cached_property
    def ends(self):
        """Where each expert's rows end, once they are sorted: (E/ep,) int32."""
        return self.sizes_on_device.cumsum(0).int()

    @cached_property
    def one_hot(self):
        """(n, E/ep) of False and True: is the sorted row this expert's?"""
        sizes = self.sizes_on_device
        numbers = torch.arange(len(sizes), device=sizes.device)
        expert_of_row = numbers.repeat_interleave(sizes, output_size=sum(self.sizes))
        return expert_of_row.unsqueeze(1) == numbers


def how_often(chosen, experts):
    """Chosen experts (N, K) -> how often each of all is chosen, (E,) int64."""
    choices = chosen.flatten()
    counts = choices.new_zeros(experts)
    return counts.scatter_add_(0, choices, torch.ones_like(choices))


def plan_routing(chosen, wanted, most, ep, balanced):
    """chosen: experts (N, K) -> Routing.

    wanted (E,): how often each expert is chosen here. most: the rows that it takes of one source.
    """
    ranks = dist.get_world_size(ep)
    here = len(wanted) // ranks  # experts on each rank
    taken = wanted.clamp(max=most)
    # (E,), to be seen as (ep, E/ep): from each rank, its rows for each of the experts here
    coming = torch.empty_like(taken)
    # this rank's rows for every expert -> every rank's rows for the experts here
    dist.all_to_all_single(coming, taken, group=ep)
    if balanced:
        counts = balanced_counts(chosen.numel(), len(wanted), most, ep)
    else:
        counts = torch.stack([wanted, taken, coming]).tolist()  # here alone the host waits
    wanted_counts, taken_counts, coming_counts = counts

    all_choices = chosen.flatten().argsort(stable=True)  # sorted by expert
    choices = all_choices
    if most < len(chosen):  # else there is room for all: a token chooses an expert once at most
        of_experts = all_choices.split(wanted_counts)
        taken_choices = [of_one[:count] for of_one, count in zip(of_experts, taken_counts)]
        choices = torch.cat(taken_choices)
    # of each entry of `coming`: the expert whose rows it counts, numbered from 0 on this rank
    experts = torch.arange(here, device=chosen.device).repeat(ranks)
    expert_of_row = experts.repeat_interleave(coming, output_size=sum(coming_counts))
    # counts lie by rank, then by expert: a rank's are a run, an expert's are every here-th
    return Routing(
        choices=choices,
        sent=[sum(taken_counts[r * here:(r + 1) * here]) for r in range(ranks)],
        received=[sum(coming_counts[r * here:(r + 1) * here]) for r in range(ranks)],
        by_expert=expert_of_row.argsort(stable=True),
        sizes=[sum(coming_counts[e::here]) for e in range(here)],
        sizes_on_device=coming.view(ranks, here).sum(0),
    )


def balanced_counts(choices, experts, most, ep):
    """The three counts of plan_routing where all ranks choose all experts equally often."""
    ranks = dist.get_world_size(ep)
    here = experts // ranks
    first = dist.get_rank(ep) * here  # number of the first expert here
    wanted = [(choices + e) // experts for e in range(experts)]
    taken = [min(most, count) for count in wanted]
    coming = taken[first:first + here] * ranks
    return wanted, taken, coming


def linear_by_loop(rows, weight, bias, routing):
    """Rows (n, C), sorted by expert, times their expert's weight, plus its bias -> (n, F).

    weight (E/ep, F, C) and bias (E/ep, F) are stacked, an expert after the other; bias may be None.
    An expert without rows gets zeros for a gradient, not None.
    """
    weights = weight.unbind()
    biases = [None] * len(weights)
    if bias is not None:
        biases = bias.unbind()
    outputs = []
    for e, of_expert in enumerate(rows.split(routing.sizes)):
        outputs.append(F.linear(of_expert, weights[e], biases[e]))
    return torch.cat(outputs)


def linear_in_one_kernel(rows, weight, bias, routing):
    """The same as linear_by_loop.

    The bias is added by a matmul, whose backward is a matmul as well: it sums in fp32. With an
    index_select the backward would be an index_add, which on GPUs adds rows in any order and rounds
    each sum.
    """
    y = F.grouped_mm(rows, weight.transpose(1, 2), offs=routing.ends)
    if bias is None:
        return y
    return torch.addmm(y, routing.one_hot.to(y.dtype), bias)


def linear_by_kind(rows, weight, bias, routing):
    """One kernel where that pays (bf16 on GPUs) and runs (widths of multiples of 8), else loop."""
    aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
    if weight.is_cuda and weight.dtype == torch.bfloat16 and aligned:
        return linear_in_one_kernel(rows, weight, bias, routing)
    return linear_by_loop(rows, weight, bias, routing)


def gelu(x):
    return F.gelu(x, approximate="tanh")


class Experts(nn.Module):
    """The experts that one rank holds, MLPs whose weights are stacked. Each one is

        y = down(activation(up(x)))    or, with gate,    y = down(activation(gate(x)) * up(x))

    up, down, gate: lists of nn.Linear, with biases or without, one for each expert, in order. All
    of a list have one shape, and are all trained or all frozen, on the other ranks, too.
    linear: one of the three functions above.
    """

    def __init__(self, up, down, gate=None, activation=gelu, linear=linear_by_kind):
        super().__init__()
        self.activation = activation
        self.linear = linear
        self.stack("up", up)  # up_weight (E/ep, F, C), up_bias (E/ep, F) or None
        self.stack("down", down)  # down_weight (E/ep, C, F), down_bias (E/ep, C) or None
        self.stack("gate", gate)  # gate_weight and gate_bias like up's, or None
        lengths = {len(linears) for linears in (up, down, gate) if linears is not None}
        if len(lengths) != 1:
            raise ValueError("Experts: give up, down and gate as many Linears, one for each expert")

    def stack(self, name, linears):
        """A list of Linears -> two parameters, which are None where there is nothing."""
        self.register_parameter(f"{name}_weight", None)
        self.register_parameter(f"{name}_bias", None)
        if linears is None:
            return
        if not linears:
            raise ValueError(f"Experts: {name} is empty, but each rank holds an expert or more")
        for linear in linears:
            refuse_others(name, linear)
            if what_is_stacked(linear) != what_is_stacked(linears[0]):
                raise ValueError(f"Experts: {name} has Linears of different shapes or types, with a"
                                 " bias and without, or trained and frozen: make them alike")
        for kind, p in linears[0].named_parameters():
            stacked = torch.stack([getattr(linear, kind).detach() for linear in linears])
            setattr(self, f"{name}_{kind}", nn.Parameter(stacked, p.requires_grad))

    def forward(self, rows, routing):  # (n, C) sorted by expert -> (n, C)
        hidden = self.linear(rows, self.up_weight, self.up_bias, routing)  # (n, F)
        if self.gate_weight is None:
            hidden = self.activation(hidden)
        else:
            gate = self.linear(rows, self.gate_weight, self.gate_bias, routing)
            hidden = self.activation(gate) * hidden
        return self.linear(hidden, self.down_weight, self.down_bias, routing)


def refuse_others(name, linear):
    """Raise if a Linear is more than a weight and a bias: stacking would lose the rest."""
    if type(linear) is not nn.Linear:
        kind = type(linear).__name__
        raise TypeError(f"Experts: {name} has a {kind}, but only nn.Linear can be stacked")
    parameters = {kind for kind, _ in linear.named_parameters()}
    if not parameters <= {"weight", "bias"} or has_hooks(linear):
        raise TypeError(f"Experts: {name} has a Linear with hooks, or whose weight is made of other"
                        " parameters: remove them (torch.nn.utils.parametrize, weight_norm) first")


def has_hooks(linear):
    hooks = [linear._forward_hooks, linear._forward_pre_hooks,
             linear._backward_hooks, linear._backward_pre_hooks]
    for p in linear.parameters():
        hooks += [p._backward_hooks, p._post_accumulate_grad_hooks]
    return any(hooks)


def what_is_stacked(linear):
    return [(p.shape, p.dtype, p.device, p.requires_grad) for p in linear.parameters()]


@dataclass
class Count:
    """What the layer counts of a forward."""
    load: torch.Tensor  # (E,) int64, how often the tokens of all ranks chose each expert
    loss: torch.Tensor  # () this rank's part of the balancing loss, without graph
    chosen: torch.Tensor  # (N, K) experts that this rank's tokens chose; None: nobody wants to know
    number: int  # how many forwards with grad enabled came before: the key in MoE.choices
    sent: list  # rows to each rank of ep
    received: list  # rows from each rank of ep


class AddLoss(torch.autograd.Function):
    """Returns y. In backward, `loss` gets the gradient that a term of the model's loss has.

    In the middle of a pipeline, or where checkpointing runs forward twice, a layer cannot leave a
    loss to be added by others (Megatron's MoEAuxLossAutoScaler). For the same reason the layer adds
    up its counts here: there is one backward, and none without training.
    """

    @staticmethod
    def forward(ctx, y, loss, layer, count):
        ctx.layer = layer
        ctx.count = count
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        ctx.layer.add_up(ctx.count)
        grad_loss = torch.ones_like(ctx.count.loss) * ctx.layer.loss_scale
        return grad, grad_loss, None, None


class MoE(nn.Module):
    """E experts behind a router, an nn.Linear(C, E), in place of an MLP: (.., C) -> (.., C).

    The router may have hooks, more parameters or a forward of its own, from tokens to logits.

    experts       the Experts of this rank, E/ep of them, from number ep_rank E/ep on
    top_k         K, the experts that a token visits
    ep            group of the ranks that share out the experts; each brings its own tokens
    everyone      group of the ranks whose tokens are balanced together; None: the world
    same_tokens   None, or a group of ranks that all bring the same tokens (tensor parallel ranks,
                  without --sp): each routes its part of them, and results are joined. Gradients of
                  router and experts are then partial over this group as well
    shared        a module that every token visits besides, or None
    balance       "aux": a loss; "bias": step_biases moves a bias in the choice; "none"
    capacity      A, or 0: no token is dropped
    microbatches  how many forwards, of equally many tokens, make up a step. The step's balancing
                  loss is the mean of those of its forwards, each over all ranks' tokens in it: when
                  the first goes backward, nobody knows what the last will choose
    balanced      for dry runs: no number is read from the device; all experts are taken to be
                  chosen equally often
    exchange      the function that moves rows between ranks
    """

    def __init__(self, router, experts, *, top_k, ep, everyone=None, same_tokens=None, shared=None,
                 balance="aux", capacity=0.0, microbatches=1, balanced=False,
                 exchange=exchange_rows):
        super().__init__()
        self.router = router
        self.experts = experts
        self.top_k = top_k
        self.ep = ep
        self.everyone = everyone
        self.same_tokens = same_tokens
        self.shared = shared
        self.balance = balance
        self.capacity = capacity
        self.microbatches = microbatches
        self.balanced = balanced
        self.exchange = exchange
        self.check()
        # float64, so that no small step is rounded away; _apply keeps it so in .to(bfloat16)
        bias = torch.zeros(router.out_features, dtype=torch.float64, device=router.weight.device)
        self.register_buffer("bias", bias)  # (E,) is added to probabilities, for the choice alone
        self.loss_scale = 1.0  # what the model's loss is multiplied by, by a loss scaler say
        self.choices = None  # put a dict here: it gets {number of a forward: chosen (N, K)}
        self.forwards = 0  # how many with gradients there have been
        # What the backwards of a step have counted. To be read after step_biases; the next
        # backward begins a new count
        self.closed = True  # is the count complete?
        self.load = None  # (E,) int64, how often the tokens of all ranks chose each expert
        self.loss = None  # () this rank's part of balancing losses, already in the gradients
        self.sent = None  # [rows to each rank of ep]
        self.received = None  # [rows from each rank of ep]

    def check(self):
        experts = len(self.experts.up_weight) * dist.get_world_size(self.ep)
        if self.router.out_features != experts:
            raise ValueError(f"MoE: the router knows {self.router.out_features} experts, the ranks "
                             f"of ep hold {experts}: give each rank as many, in order")
        if not 1 <= self.top_k <= experts:
            raise ValueError(f"MoE: top_k {self.top_k} of {experts} experts: take 1 to {experts}")
        if self.balance not in ("aux", "bias", "none"):
            raise ValueError(f"MoE: balance {self.balance}: take aux, bias or none")
        if self.capacity < 0 or self.microbatches < 1:
            raise ValueError("MoE: capacity is 0 or more, microbatches 1 or more")

    def forward(self, x):  # (.., C)
        tokens = x.flatten(0, -2)  # (N, C)
        total = len(tokens)
        if self.same_tokens is not None:
            tokens = CutRows.apply(tokens, self.same_tokens)  # replicated -> sharded(0)
        logits = self.score(tokens)  # (N, E)
        chosen, gates, probs = route(logits, self.top_k, self.bias)
        wanted = how_often(chosen, len(self.bias))  # (E,)
        load = wanted.clone()
        trains = torch.is_grad_enabled()
        if trains:
            # partial -> replicated, while the experts are at work
            summing = dist.all_reduce(load, group=self.everyone, async_op=True)
        most = len(tokens)
        if self.capacity:
            most = capacity(self.capacity, self.top_k, len(tokens), len(wanted))
        routing = plan_routing(chosen, wanted, most, self.ep, self.balanced)
        y = self.visit(tokens, gates, routing)  # (N, C)
        if trains:
            summing.wait()
            loss = logits.new_zeros(())
            if self.balance == "aux":
                loss = balancing_loss(load, logits, probs, self.top_k) / self.microbatches
            count = self.new_count(load, loss, chosen, routing)
            if y.requires_grad:
                y = AddLoss.apply(y, loss, self, count)
            else:  # all is frozen up to here: there will be no backward
                self.add_up(count)
        if self.same_tokens is not None:
            y = JoinRows.apply(y, total, self.same_tokens)  # sharded(0) -> replicated
        y = y.view(x.shape)
        if self.shared is not None:
            y = y + self.shared(x)
        return y

    def score(self, tokens):
        """Tokens (N, C) -> logits (N, E), in fp32 or better even under autocast.

        In bf16, rounding would make tokens choose other experts.
        """
        exact = torch.promote_types(tokens.dtype, torch.float32)
        parameters = {name: p.to(exact) for name, p in self.router.named_parameters()}
        with torch.autocast(tokens.device.type, enabled=False):
            return torch.func.functional_call(self.router, parameters, tokens.to(exact))

    def visit(self, tokens, gates, routing):
        """Tokens (N, C) go to their experts and come back -> each one's K rows times gates, summed.
        """
        N, C = tokens.shape
        token_of_row = routing.choices // self.top_k  # choice n K + k is token n's
        rows = tokens.index_select(0, token_of_row)
        # on the tokens' ranks -> on the experts' ranks
        rows = self.exchange(rows, routing.sent, routing.received, self.ep)
        rows = rows.index_select(0, routing.by_expert)
        rows = self.experts(rows, routing)
        rows = torch.empty_like(rows).index_copy(0, routing.by_expert, rows)  # by source again
        # on the experts' ranks -> on the tokens' ranks
        rows = self.exchange(rows, routing.received, routing.sent, self.ep)
        answers = rows.new_zeros(N * self.top_k, C)  # of choices that are dropped: zeros
        answers = answers.index_copy(0, routing.choices, rows).view(N, self.top_k, C)
        y = gates.to(rows.dtype).unsqueeze(1) @ answers  # (N, 1, K) @ (N, K, C)
        return y.view(N, C)

    def new_count(self, load, loss, chosen, routing):
        if self.choices is None:
            chosen = None
        count = Count(load=load, loss=loss.detach(), chosen=chosen, number=self.forwards,
                      sent=routing.sent, received=routing.received)
        self.forwards += 1
        return count

    def add_up(self, count):
        """Adds the count of a forward to those of the step, in its backward."""
        if self.closed:
            self.load = torch.zeros_like(count.load)
            self.loss = torch.zeros_like(count.loss)
            self.sent = [0] * len(count.sent)
            self.received = [0] * len(count.received)
            self.closed = False
        self.load += count.load
        self.loss += count.loss
        self.sent = [a + b for a, b in zip(self.sent, count.sent)]
        self.received = [a + b for a, b in zip(self.received, count.received)]
        if self.choices is not None and count.chosen is not None:
            self.choices[count.number] = count.chosen

    def _apply(self, fn, recurse=True):
        """.to(device) moves the bias, but .to(bfloat16) does not cast it."""
        exact = self.bias
        super()._apply(fn, recurse)
        if self.bias.dtype != exact.dtype:
            self.bias = exact.to(self.bias.device)
        return self

    def __deepcopy__(self, memo):
        """A copy, of a moving average say, talks to the same ranks."""
        for group in (self.ep, self.everyone, self.same_tokens):
            memo[id(group)] = group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, MoE)]


def expert_parameters(model):
    """Those that differ from one rank of ep to the next. All others are dense: alike everywhere."""
    return {p for layer in layers_of(model) for p in layer.experts.parameters()}


def trained_parameters(model):
    """-> the dense ones, and those of experts: two lists, without what is frozen."""
    of_experts = expert_parameters(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    dense = [p for p in trained if p not in of_experts]
    experts = [p for p in trained if p in of_experts]
    return dense, experts


@torch.no_grad()
def broadcast_parameters(model, replicas, everyone=None):
    """Before training: all start with the values of the first rank of those that hold the same."""
    of_experts = expert_parameters(model)
    for tensor in [*model.parameters(), *model.buffers()]:
        group = everyone
        if tensor in of_experts:
            group = replicas
        values = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(values, group=group, group_src=0)  # the first rank's -> replicated
        tensor.detach().copy_(values)


def sum_gradients(model, replicas, everyone=None):
    """After backward: dense gradients over everyone, experts' over those that hold the same ones.

    What has no gradient, because this rank's forward did not use it, counts as zero.
    """
    dense, experts = trained_parameters(model)
    sum_together(dense, everyone)  # partial -> replicated; ddp.py hides it behind backward
    sum_together(experts, replicas)  # partial -> replicated


def sum_together(parameters, group):
    """All gradients of one dtype in one all-reduce."""
    by_dtype = {}  # {dtype: gradients}
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        by_dtype.setdefault(p.dtype, []).append(p.grad)
    if dist.get_world_size(group) == 1:
        return
    for gradients in by_dtype.values():
        flat = torch.cat([grad.flatten() for grad in gradients])
        dist.all_reduce(flat, group=group)  # partial -> replicated
        parts = flat.split([grad.numel() for grad in gradients])
        sums = [part.view_as(grad) for part, grad in zip(parts, gradients)]
        torch._foreach_copy_(gradients, sums)


def gradient_norm(model, ep):
    """After sum_gradients: the norm of the whole model's gradient, each expert counted once."""
    dense, experts = trained_parameters(model)
    like = next(model.parameters())
    square = square_sum(experts, like)
    dist.all_reduce(square, group=ep)  # partial -> replicated
    return (square_sum(dense, like) + square).sqrt()


def square_sum(parameters, like):
    """The squared norm of their gradients. Without parameters: 0, on the device of `like`."""
    if not parameters:
        return like.new_zeros(())
    return nn.utils.get_total_norm([p.grad for p in parameters]).square()


def clip_gradients(model, norm, clip):
    """Scales gradients down until their norm is `clip` at most (0: any) -> the norm before.

    If it is inf or nan they stay as they are, and whoever looks at it can tell.
    """
    finite = norm.nan_to_num(0, posinf=0)  # a norm of 0 needs no scaling
    nn.utils.clip_grads_with_norm_(model.parameters(), clip or math.inf, finite)
    return norm


@torch.no_grad()
def step_biases(model, gamma=1e-2):
    """After the optimizer's step, whatever the balance: moves biases, and completes the counts.

    The bias of an expert that was chosen less often than the mean, in all backwards since the last
    call, grows by gamma (DeepSeek-V3: 1e-3, in 10^5 steps), and that of one chosen more often
    shrinks by it. Where the router is frozen, biases stay.
    """
    for layer in layers_of(model):
        trains = any(p.requires_grad for p in layer.router.parameters())
        if layer.balance == "bias" and trains and not layer.closed:
            # in integers: E times what is missing to the mean
            missing = layer.load.sum() - len(layer.load) * layer.load
            layer.bias += gamma * missing.sign().double()
        layer.closed = True


def balancing_losses(model):
    """This rank's part of the step's balancing losses of all layers, to be printed."""
    losses = [layer.loss for layer in layers_of(model) if layer.loss is not None]
    return sum(losses, torch.zeros((), device=next(model.parameters()).device))


# ---- 2. the toy GPT, parallelized --------------------------------------------


class PlainMoE(nn.Module):
    """The definition, in one process: all experts times their gates, all but K of which are zero.

    which: the numbers of the experts to be built (None: all), for a model that parallelize() will
    take apart.
    """

    def __init__(self, cfg, *, experts, top_k, shared=False, balance="aux", capacity=0.0,
                 which=None):
        super().__init__()
        self.E = experts
        self.top_k = top_k
        self.balance = balance
        self.capacity = capacity
        self.router = nn.Linear(cfg.width, experts, bias=False)
        if which is None:
            which = range(experts)
        self.experts = nn.ModuleDict({str(e): MLP(cfg) for e in which})
        self.shared = None
        if shared:
            self.shared = MLP(cfg)
        self.register_buffer("bias", torch.zeros(experts, dtype=torch.float64))  # (E,)
        self.sources = None  # which tokens travel together, see set_sources; None: all do
        # [(N, K) or None] of the training steps to come: the experts that tokens visit. The router
        # chooses in a step that has None, and in all steps after the end of the list
        self.choices = []
        self.loss = 0  # the balancing loss of the last forward in training

    def forward(self, x):  # (B, T, C) of all ranks
        tokens = x.flatten(0, 1)  # (N, C)
        logits = self.router(tokens)  # (N, E)
        probs = logits.softmax(-1)
        visits = F.one_hot(self.choose(probs), self.E).sum(1)  # (N, E) of 0 and 1
        gates = probs * visits
        if self.top_k > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        if self.capacity:
            gates = gates * self.in_time(visits)
        y = torch.zeros_like(tokens)
        for e in range(self.E):
            y = y + gates[:, e:e + 1] * self.experts[str(e)](tokens)
        if self.shared is not None:
            y = y + self.shared(tokens)
        if torch.is_grad_enabled():  # not in evaluation
            self.balance_experts(visits, logits, probs)
        return y.view_as(x)

    def choose(self, probs):
        chosen = None
        if self.choices and torch.is_grad_enabled():
            chosen = self.choices.pop(0)
        if chosen is not None:
            return chosen
        return (probs + self.bias).topk(self.top_k).indices

    def microbatches(self, tokens):
        """-> for each micro-batch, for each rank, the numbers of its tokens."""
        if self.sources is None:
            return [[torch.arange(tokens)]]
        return self.sources

    def in_time(self, visits):
        """Visits (N, E) -> the same without those for which an expert had no room."""
        kept = torch.zeros_like(visits)
        for of_ranks in self.microbatches(len(visits)):
            for tokens in of_ranks:
                place = visits[tokens].cumsum(0)  # in the line of those that chose this expert
                most = capacity(self.capacity, self.top_k, len(tokens), self.E)
                kept[tokens] = visits[tokens] * (place <= most)
        return kept

    def balance_experts(self, visits, logits, probs):
        """The loss of this step, or the bias for the next."""
        if self.balance == "aux":
            losses = []
            for of_ranks in self.microbatches(len(visits)):
                tokens = torch.cat(of_ranks)
                load = visits[tokens].sum(0).to(probs.dtype)
                switch = self.E * (load * probs[tokens].mean(0)).sum() / load.sum()
                z = logits[tokens].logsumexp(-1).square().mean()
                losses.append(0.1 * switch + 1e-3 * z)
            self.loss = sum(losses) / len(losses)
        if self.balance == "bias" and self.router.weight.requires_grad:
            load = visits.sum(0).double()
            self.bias += 1e-2 * (load.mean() - load).sign()


def mixture(model, seed, cfg, **options):
    """The plain GPT with a PlainMoE of these options in place of each MLP."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(model.tok.weight.dtype)
    with torch.device(model.tok.weight.device):
        for block in model.blocks:
            block.mlp = PlainMoE(cfg, **options)
    torch.set_default_dtype(before)
    init_weights(model, cfg.layers, seed)  # every expert by its own name
    return model


def set_sources(model, sources):
    """Tells a plain model which tokens travel together.

    sources[m][r]: of micro-batch m, the tokens that rank r routes, 1-D and in its order: their
    numbers in the B T tokens of the global batch.
    """
    for block in model.blocks:
        block.mlp.sources = sources


def parallelize(model, *, ep, everyone=None, same_tokens=None, microbatches=1, balanced=False,
                exchange=exchange_rows, linear=linear_by_kind):
    """Each PlainMoE becomes a MoE with this rank's experts. The arguments are explained there."""
    for block in model.blocks:
        plain = block.mlp
        mine = [plain.experts[str(e)] for e in share(plain.E, ep.size(), ep.rank())]
        ups = [mlp.up for mlp in mine]
        downs = [mlp.down for mlp in mine]
        block.mlp = MoE(
            plain.router, Experts(up=ups, down=downs, linear=linear), top_k=plain.top_k, ep=ep,
            everyone=everyone, same_tokens=same_tokens, shared=plain.shared, balance=plain.balance,
            capacity=plain.capacity, microbatches=microbatches, balanced=balanced,
            exchange=exchange)
        block.mlp.bias.copy_(plain.bias)
    return model


def plain_name(name, e):
    """blocks.0.mlp.experts.up_weight, 5 -> blocks.0.mlp.experts.5.up.weight

    What follows the name, such as .exp_avg, stays.
    """
    stem, kind = name.split(".experts.")
    return f"{stem}.experts.{e}.{kind.replace('_', '.', 1)}"


def gather_experts(tensors, ep):
    """{name: tensor or stack of this rank's experts} -> {name in the plain MoE: tensor}."""
    whole = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            whole[name] = tensor
            continue
        stacks = [torch.empty_like(tensor) for _ in range(ep.size())]
        dist.all_gather(stacks, tensor.detach().contiguous(), group=ep)  # sharded(0) -> replicated
        for e, of_expert in enumerate(torch.cat(stacks)):
            whole[plain_name(name, e)] = of_expert
    return whole


def full_state_dict(model, ep):
    return gather_experts(model.state_dict(), ep)


def full_gradients(model, ep):
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return gather_experts(gradients, ep)


def expert_pieces(name, stacked, first, writes):
    """A stack of this rank's experts, from number `first` on, or of their states -> [Piece]"""
    found = []
    for i, of_expert in enumerate(stacked.detach()):
        shape = tuple(of_expert.shape)
        start = (0,) * len(shape)
        found.append(Piece(plain_name(name, first + i), shape, start, of_expert, writes))
    return found


def pieces(model, optimizer, *, replicas, ep):
    """What this rank holds of the plain MoE: all that is dense, and some experts, each whole."""
    of_experts = expert_parameters(model)
    dense = [(name, p) for name, p in model.named_parameters() if p not in of_experts]
    stacks = [(name, p) for name, p in model.named_parameters() if p in of_experts]
    found = pieces_of(dense, optimizer, writes=replicas.rank() == 0 and ep.rank() == 0)
    writes = replicas.rank() == 0
    for name, p in stacks:
        first = ep.rank() * len(p)
        found += expert_pieces(name, p, first, writes)
        states = optimizer.state.get(p, {})
        for kind in STATES:
            if kind in states:
                found += expert_pieces(f"{name}.{kind}", states[kind], first, writes)
    return found


def remember_choices(model, wanted):
    """From here on every layer keeps which experts its tokens choose, or none does."""
    for layer in layers_of(model):
        layer.choices = {} if wanted else None


def choices_here(model):
    """What this rank's tokens chose in the step: of each layer here (M, N, K).

    remember_choices(model, True) comes before the step. The layers have forgotten them afterwards.
    """
    of_layers = []
    for layer in layers_of(model):
        of_forwards = [layer.choices[number] for number in sorted(layer.choices)]
        of_layers.append(torch.stack(of_forwards))
        layer.choices.clear()
    return of_layers


def join_choices(choices, sources):
    """choices[r]: (M, N, K) of rank r's tokens -> (B T, K), in the order of the global batch."""
    top_k = choices[0].shape[-1]
    total = sum(of_rank.numel() for of_rank in choices) // top_k  # B T
    joined = choices[0].new_empty(total, top_k)
    for m, of_ranks in enumerate(sources):
        for r, tokens in enumerate(of_ranks):
            joined[tokens] = choices[r][m]
    return joined


def train_step(model, optimizer, x, y, valid, clip, *, replicas, ep):
    """x, y: this rank's rows (B/n, T); valid: targets of the whole batch.

    -> this rank's part of the loss, the norm.
    """
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    loss.backward()  # AddLoss adds the balancing losses' gradients
    sum_gradients(model, replicas)  # partial -> replicated
    norm = clip_gradients(model, gradient_norm(model, ep), clip)
    optimizer.step()
    step_biases(model)
    return loss.detach() + balancing_losses(model), norm


def evaluate(model, x, y):
    """-> this rank's part of the sum of token losses."""
    with torch.no_grad():
        return loss_sum(model(x), y)


# ---- 3. at work: the same with torch's own API -------------------------------


def exchange_at_work(rows, send, receive, group):
    from torch.distributed import _functional_collectives as functional  # slow to import

    # sorted by destination -> sorted by source
    return functional.all_to_all_single_autograd(rows, receive, send, group)


def parallelize_at_work(model, **groups):
    """torch has no such layer: routing, sorting and bookkeeping stay section 1's."""
    linear = linear_in_one_kernel
    if model.tok.weight.dtype == torch.float64:  # which grouped_mm does not know
        linear = linear_by_loop
    return parallelize(model, exchange=exchange_at_work, linear=linear, **groups)


# ---- 4. run ------------------------------------------------------------------


def build_plain(args, cfg, seed, device, dtype):
    """The plain model, told which tokens are which rank's."""
    model = build(cfg, seed, device, dtype)
    model = mixture(
        model, seed, cfg, experts=args.experts, top_k=args.top_k, shared=args.shared,
        balance=args.balance, capacity=args.capacity)
    set_sources(model, sources_of(args, device))
    return model


def sources_of(args, device):
    """One micro-batch, in which each rank has the tokens of its rows."""
    tokens = torch.arange(args.batch * args.cfg.seq, device=device)
    return [list(tokens.chunk(args.world_size))]


def plain_trace(run, choices):
    """The same steps by the plain model.

    choices: of the steps of this run, for each layer (B T, K). In fp32 rounding decides near ties,
    so the plain model follows the ranks. In fp64 there are none, and it chooses itself.
    """
    model = run.build()
    if run.plain_first() > 0:  # the plain run begins where this one does
        before = []
        set_biases(model, run.start.extra["biases"])
    else:  # it also repeats the steps before the resume, and chooses itself in those
        before = [None] * run.first
    for i, block in enumerate(model.blocks):
        block.mlp.choices = before + [of_layers[i] for of_layers in choices]
    return run.plain(model, extra_loss=plain_balancing_losses)


def plain_balancing_losses(model):
    return sum(block.mlp.loss for block in model.blocks)


def gather_choices(run, model):
    """-> for each layer, what all ranks' tokens have chosen in the step, (B T, K)"""
    mine = torch.stack(choices_here(model))  # (L, 1, B T / n, K)
    of_ranks = [torch.empty_like(mine) for _ in range(run.world_size)]
    dist.all_gather(of_ranks, mine)  # sharded(2) -> replicated
    sources = sources_of(run.args, run.device)
    return [join_choices([of_rank[i] for of_rank in of_ranks], sources) for i in range(len(mine))]


# This script's way to put tokens together for routing (see notes): each batch is one micro-batch.
ROUTED_HERE = "as in moe.py"


def notes(run, model):
    """What a checkpoint notes besides weights and AdamW's states."""
    found = {"biases": [block.mlp.bias.tolist() for block in model.blocks]}
    # Checkpoints of this script and of hybrid_3d.py can be resumed by either. "routed" lists the
    # ways in which the runs of this training have put tokens together for routing. An entry of
    # hybrid_3d.py is a list, which is empty where the way makes no difference. Without an entry
    # all steps count as routed in this script's way, so there is nothing to note until
    # hybrid_3d.py has noted another. From then on there are two ways: this run adds its own, and
    # main() below replays no step of the runs before
    routed = run.start.extra.get("routed", [])
    if any(routed):
        found["routed"] = [*routed]
        if ROUTED_HERE not in routed:
            found["routed"].append(ROUTED_HERE)
    return found


def set_biases(model, values):
    for block, value in zip(model.blocks, values):
        block.mlp.bias.copy_(torch.tensor(value, dtype=torch.float64))


def loads_of(model):
    """-> how often the experts of each layer have been chosen in the step, (L, E)"""
    return torch.stack([layer.load for layer in layers_of(model)])


class Sizes:
    """How many numbers a rank holds."""

    def __init__(self, model):
        dense, experts = trained_parameters(model)
        self.own = sum(p.numel() for p in model.parameters())  # parameters here
        self.experts = sum(p.numel() for p in expert_parameters(model))  # of these, experts'
        self.trained_dense = sum(p.numel() for p in dense)
        self.trained_experts = sum(p.numel() for p in experts)
        self.trained_tensors = len(dense) + len(experts)

    def total(self, ep):
        """Parameters of the plain model."""
        return self.own + (ep.size() - 1) * self.experts


def exchanges(model):
    """How often a step sends the rows of layer.sent, and how often those of layer.received.

    -> for each layer, both numbers. In forward, tokens go to experts (sent) and results come back
    (received). In backward, gradients of results go to experts (sent), if experts or anything
    before them is trained, and gradients of tokens come back (received), if anything before is.
    """
    counts = []
    before = any_trained([model.tok.weight, model.pos.weight])  # is anything trained so far?
    for block in model.blocks:
        outside = [p for name, p in block.named_parameters() if not name.startswith("mlp.")]
        before = before or any_trained(outside)
        sent = 1
        received = 1
        if before or any_trained(block.mlp.experts.parameters()):
            sent += 1
        if before:
            received += 1
        counts.append((sent, received))
        before = before or any_trained(block.mlp.parameters())
    return counts


def any_trained(parameters):
    return any(p.requires_grad for p in parameters)


def account_exchange(run, model, moved):
    """The all-to-alls: of rows, and of how many there will be."""
    layers = layers_of(model)
    ep = layers[0].ep
    row = run.dtype.itemsize * run.cfg.width
    counts = 8 * len(layers) * run.args.experts
    rows = 0
    staying = 0  # of these, rows for experts of this rank
    for layer, (times_sent, times_received) in zip(layers, exchanges(model)):
        rows += times_sent * sum(layer.sent) + times_received * sum(layer.received)
        # what a rank sends to itself it also receives from itself
        staying += (times_sent + times_received) * layer.sent[ep.rank()]
    measured = moved["all_to_all"]
    run.textbook("all-to-all", "2 b C (rows out + rows in) + 8 L E", row * rows + counts,
                 measured["payload"])
    wire = row * (rows - staying) + counts * (ep.size() - 1) / ep.size()
    run.textbook("wire all_to_all",
                 "2 b C (rows out + rows in - 2 rows staying) + (ep-1)/ep 8 L E", wire,
                 measured["wire"])


def account_sums(run, model, sizes, moved):
    """The all-reduces: of gradients and loads, over n ranks or fewer, and of a square."""
    layers = layers_of(model)
    n = run.world_size
    ep = layers[0].ep.size()
    b = run.dtype.itemsize
    loads = 8 * len(layers) * run.args.experts
    # 2/n is taken out of the formula's three terms. What is left are integers, so their sum is
    # exact: 2 (ep-1)/ep b, for example, is 2/n (n - n/ep) b.
    of_all = (n - 1) * (b * sizes.trained_dense + loads)
    of_replicas = (n - ep) * b * sizes.trained_experts
    of_the_square = (n - n // ep) * b
    run.textbook("wire all_reduce",
                 "2 (n-1)/n (b dense + 8 L E) + 2 (n-ep)/n b experts/ep + 2 (ep-1)/ep b",
                 2 * (of_all + of_replicas + of_the_square) / n, moved["all_reduce"]["wire"])


def account_held(run, model, sizes, held):
    b = run.dtype.itemsize
    trained = sizes.trained_dense + sizes.trained_experts
    biases = 8 * len(layers_of(model)) * run.args.experts
    steps = 4 * sizes.trained_tensors  # AdamW counts its steps for each tensor
    run.textbook("parameters, gradients, AdamW states",
                 "b (dense + experts/ep) + 3 b of those trained + 4 per tensor (steps) + 8 L E",
                 b * sizes.own + 3 * b * trained + steps + biases,
                 held["parameters"] + held["gradients"] + held["optimizer"])


def picture(run, model, loads):
    """Print how often experts are chosen in the worst layer. loads: of each step, (L, E)."""
    load = torch.stack(loads) / loads[0].double().mean()  # (steps, L, E)
    n = math.ceil(len(loads) / 10)  # a tenth of the steps
    first = load[:n].mean(0)  # (L, E)
    last = load[-n:].mean(0)
    worst = last.max(1).values.argmax()
    # of the last step, but all steps have equally many choices
    rows = sum(sum(layer.sent) for layer in layers_of(model))
    dropped = 1 - rows * run.world_size / loads[0].sum().item()
    run.extra["load"] = {"first": first.tolist(), "last": last.tolist()}
    run.extra["dropped"] = dropped
    run.say(f"\nload over the mean in layer {worst}, first and last {n} steps; "
            f"rank 0 dropped {dropped:.1%}")
    for e in range(run.args.experts):
        run.say(f"  expert {e:<3} {bar(first[worst, e])}   {bar(last[worst, e])}")


def bar(load):
    marks = "#" * round(10 * load.item())
    return f"{load.item():5.2f} {marks:30.30}"


FLAGS = {
    "experts": Flag(8, "E in each layer", POSITIVE),
    "top_k": Flag(2, "K, experts per token", POSITIVE),
    "ep": Flag(0, "ranks that share out the experts (0: all)", ANY),
    "shared": Flag(False, "one for every token"),
    "capacity": Flag(0.0, "A: an expert takes A times its share (0: everything)", ANY),
    "balance": Flag("aux", "a loss, a bias in the choice, or nothing", ("aux", "bias", "none")),
}


def refuse(args):
    """What cannot run ends here, in one line, before anything is built."""
    n = args.world_size
    ep = args.ep or n
    experts = args.experts
    require(args.top_k <= experts,
            f"--top-k {args.top_k} of --experts {experts}: choose {experts} at most")
    require(n % ep == 0, f"--ep {ep} does not divide the {n} ranks: take a divisor of {n}")
    require(experts % ep == 0,
            f"--experts {experts} for {ep} ranks: take a multiple of {ep}, or another --ep")
    require(args.batch % n == 0,
            f"--batch {args.batch} sequences for {n} ranks: take a multiple of {n}")
    if args.impl != "scratch":
        require(args.dtype == "bf16" or not args.dry_run, "torch's dry run wants --dtype bf16")
        aligned = {"bf16": 8, "fp32": 4, "fp64": 1}[args.dtype]  # 16 bytes; fp64 goes without
        require(args.cfg.width % aligned == 0, f"--width {args.cfg.width}: torch's grouped_mm "
                f"wants a multiple of {aligned} in {args.dtype}")


def refuse_other_sources(run):
    """With a capacity, who has which tokens decides which of them are dropped."""
    ranks = run.start.ranks  # 0: this run does not go on from steps of another
    require(not run.args.capacity or ranks in (0, run.world_size),
            f"--resume: {ranks} ranks have saved it, and with --capacity only {ranks} can go on")


def refuse_mixed(model):
    """--train takes the experts of a layer together: their weights are stacked."""
    for i, block in enumerate(model.blocks):
        for kind in ("up.weight", "up.bias", "down.weight", "down.bias"):
            trained = {mlp.get_parameter(kind).requires_grad for mlp in block.mlp.experts.values()}
            require(len(trained) == 1, f"--train: takes {kind} of some experts of block {i}, not "
                    "of others: their weights are one tensor, take all or none")


def set_up(run, impl, replicas, ep):
    """-> a Side: the model of this implementation, and what a run does with it."""
    args = run.args
    model = run.build()
    refuse_mixed(model)
    if impl == "scratch":
        model = parallelize(model, ep=ep, balanced=run.dry)
    else:
        model = parallelize_at_work(model, ep=ep, balanced=run.dry)
    # a fresh start has none, nor a run without experts, whose checkpoint begin() will refuse
    if "biases" in run.start.extra:
        set_biases(model, run.start.extra["biases"])
    broadcast_parameters(model, replicas)  # they are equal already; copies of section 1 need it
    optimizer = adamw(model.parameters(), args.lr)
    rows = share(args.batch, run.world_size, run.rank)  # of every batch, this rank's
    return Side(
        model=model,
        optimizer=optimizer,
        train_step=partial(train_step, replicas=replicas, ep=ep),
        full_gradients=lambda: full_gradients(model, ep),
        full_state_dict=lambda: full_state_dict(model, ep),
        evaluate=lambda k: evaluate(model, *run.held_out(k, rows)),
        pieces=lambda: pieces(model, optimizer, replicas=replicas, ep=ep),
        extra=partial(notes, run, model),
    )


def make_groups(run):
    """-> the groups of the ranks that hold the same experts, and of those that share them out."""
    ep = run.args.ep or run.world_size
    shape = (run.world_size // ep, ep)
    names = ("replicas", "ep")
    mesh = dist.init_device_mesh(run.device.type, shape, mesh_dim_names=names)
    return mesh.get_group("replicas"), mesh.get_group("ep")


def train(run, sides):
    """All steps -> loads of each step, (L, E), and choices of each, a (B T, K) for each layer."""
    first = sides[run.impls[0]].model
    # the plain run will follow these choices
    keeps_choices = run.args.check and run.args.dtype != "fp64" and not run.dry
    remember_choices(first, keeps_choices)
    rows = share(run.args.batch, run.world_size, run.rank)
    loads = []
    choices = []
    for impl, step in run.steps():
        side = sides[impl]
        run.set_rate(side.optimizer, step)
        x, y, valid = run.batch(step, rows)
        with run.measure(impl, step):
            loss, norm = side.train_step(side.model, side.optimizer, x, y, valid, run.args.clip)
        run.log(impl, step, loss, norm)
        if side.model is first:
            loads.append(loads_of(first))
            if keeps_choices and step <= run.checked:
                choices.append(gather_choices(run, first))
            if step == run.checked:
                remember_choices(first, False)  # nobody takes them any more
    return loads, choices


def main():
    args = arguments(__doc__, **FLAGS)
    refuse(args)
    run = Run(args, build=partial(build_plain, args))
    refuse_other_sources(run)
    # steps that hybrid_3d.py has routed in another way cannot be replayed
    run.replays = not any(run.start.extra.get("routed", []))
    replicas, ep = make_groups(run)
    with run:
        sides = {impl: set_up(run, impl, replicas, ep) for impl in run.impls}
        run.begin(sides)
        model = sides[run.impls[0]].model
        sizes = Sizes(model)
        run.say(f"moe: {run.world_size} ranks on {run.device.type}, {args.dtype}, "
                f"{sizes.total(ep):,} parameters, {sizes.own:,} here")
        if run.dry:
            run.say("experts are taken to be balanced")
        loads, choices = train(run, sides)
        moved = run.ledger[run.impls[0]].collectives
        held = run.ledger[run.impls[0]].memory
        account_exchange(run, model, moved)
        account_sums(run, model, sizes, moved)
        account_held(run, model, sizes, held)
        if not run.dry:
            picture(run, model, loads)
        return run.finish(sizes.total(ep), sizes.own, plain=lambda: plain_trace(run, choices))


if __name__ == "__main__":
    sys.exit(main())
