"""Mixture of experts: each MLP becomes E experts, of which a token visits K; tokens travel.

A row is a token (C numbers) on its way to an expert or back, drawn as the expert's number: 0 and 1
are on rank 0, 2 and 3 on rank 1. Each rank has 3 tokens, K is 2: 6 rows. Left of |: rank 0's.

    after     router, sort    all-to-all      experts         all-to-all      gates, sum
    rank 0    0 0 0 1 | 2 3   0 0 0 1 0 0 1   0 0 0 1 0 0 1   0 0 0 1 | 2 3   3 tokens
    rank 1    0 0 1 | 2 2 3   2 3 2 2 3       2 3 2 2 3       0 0 1 | 2 2 3   3 tokens

    mesh = dist.init_device_mesh("cuda", (n // 8, 8), mesh_dim_names=("replicas", "ep"))
    replicas, ep = mesh.get_all_groups()  # replicas: ranks with the same experts; ep: 8 with all E
    route = partial(softmax_route, top_k=2, normalize=True)
    for block in model.blocks:  # block.mlp: a router and E experts, MLPs with up, down and gate
        mine = block.mlp.experts[ep.rank() * E // 8:(ep.rank() + 1) * E // 8]
        linears = {name: [getattr(mlp, name) for mlp in mine] for name in ("up", "down", "gate")}
        block.mlp = MoE(block.mlp.router, Experts(F.silu, **linears), route, ep, alpha=0.01)
    broadcast_parameters(model, replicas)  # once, then optimizer = AdamW(model.parameters())
    optimizer.zero_grad()
    (token_losses.sum() / valid_targets_of_all_ranks).backward()
    sum_gradients(model, replicas)
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, gradient_norm(model, ep))
    optimizer.step()
    step_biases(model)  # and clears what it has counted, also where gamma is 0
    state = full_state_dict(model, ep)  # of all E, called router, experts.5.up, ..

Each of n ranks has N tokens of its own; ep of them share out E experts, of `experts` parameters in
all. The rest of the model has `dense`. A parameter has b bytes. Balanced, a rank gets K N rows.

    on each rank                           one process             here
    weights, gradients, AdamW              4 b (dense + experts)   4 b (dense + experts/ep)
    calls per layer, for rows of C         -                       2 all-to-alls, 2 more in backward
    calls per layer, for E int64 counts    -                       1 all-to-all, 1 all-reduce
    gradients all-reduced                  -                       b dense, b experts/ep if ep < n
Lepikhin 2020, "GShard", arXiv:2006.16668 (all-to-all, capacity); Fedus 2021, "Switch Transformers",
arXiv:2101.03961, eq. 4 (balancing); Zoph 2022, "ST-MoE", arXiv:2202.08906, eq. 5 (z-loss); Jiang
2024, "Mixtral", arXiv:2401.04088 (gated experts); DeepSeek-V3 2024, arXiv:2412.19437, sec. 2.1.2.
Not for: experts that are not MLPs of nn.Linear, or partly frozen; dense layers that only some ranks
use; evaluation on some ranks alone; fp16, loss scalers; deepcopies; ddp.py, zero.py, fsdp.py,
tensor_parallel.py (but see hybrid_3d.py); two backwards of a forward; padding: routed. See part 4.
    torchrun --standalone --nproc_per_node=2 moe.py
"""
import math
import re
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

# imports of parts 1 and 2 end here; the rest is for parts 3 to 5
import sys
from itertools import chain

from common import FORMS, PRESETS as DENSE, build, loss_sum, share

# ---- 1. the idea -------------------------------------------------------------


def softmax_route(logits, bias=0.0, *, top_k, normalize):
    """Logits (.., E) -> the chosen experts (.., K), their gates (.., K), probabilities (.., E).

    Mixtral and Qwen3 normalize gates, OLMoE does not. Bias and probabilities: for balance, part 2.
    """
    probs = logits.softmax(-1)
    chosen = (probs + bias).topk(top_k).indices
    gates = probs.gather(-1, chosen)
    if normalize and top_k > 1:  # a single gate would always be 1: the router would not learn
        gates = gates / gates.sum(-1, keepdim=True)
    return chosen, gates, probs


class PlainMoE(nn.Module):
    """The definition, in one process."""

    def __init__(self, router, experts, route):
        super().__init__()
        self.router = router  # a Linear, C -> E
        self.experts = experts  # a ModuleList
        self.route = route

    def forward(self, x):  # (.., C) -> (.., C)
        chosen, gates, _ = self.route(self.router(x))
        return self.mix(x, chosen, gates)

    def mix(self, x, chosen, gates):
        """All experts' answers, each times its gate, which is 0 if it is not chosen, summed."""
        return sum(gates.masked_fill(chosen != e, 0).sum(-1, keepdim=True) * expert(x)
                   for e, expert in enumerate(self.experts))


class AllToAll(torch.autograd.Function):
    """Rows (sum(send), C) -> (sum(receive), C): send[r] go to rank r, receive[r] come from it."""

    @staticmethod
    def forward(ctx, rows, send, receive, ep):
        ctx.way_back = (receive, send, ep)
        arrived = rows.new_empty(sum(receive), rows.shape[1])
        # sorted by destination -> sorted by source
        dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=ep)
        return arrived

    @staticmethod
    def backward(ctx, gradient):  # all_to_all_single has none
        return AllToAll.apply(gradient, *ctx.way_back), None, None, None


def rows_of_each(chosen, experts):
    """-> how many rows go to each expert, (E,); for torch.bincount the host would wait."""
    chosen = chosen.flatten()
    return chosen.new_zeros(experts).scatter_add(0, chosen, torch.ones_like(chosen))


def exchange_counts(leaving, ep):
    """leaving (E,): how many rows this rank has for each expert -> counts (2, ep, E/ep):
    counts[0, r, e] leave for rank r's expert e; counts[1, r, e] arrive from r for our expert e."""
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=ep)  # sorted by destination -> by source
    return torch.stack([leaving, arriving]).view(2, ep.size(), -1)


def read_counts(counts):  # dry runs have another
    return counts.tolist()  # here the host waits for the device


class IdeaOfMoE(PlainMoE):
    """On ranks, which begin alike. Rank r has its own tokens, and E/ep experts from r E/ep on."""

    def __init__(self, router, experts, route, ep):
        super().__init__(router, experts, route)
        self.ep = ep

    def mix(self, x, chosen, gates):  # all ranks of ep call it
        counts = exchange_counts(rows_of_each(chosen, self.router.out_features), self.ep)
        to_ranks, from_ranks = read_counts(counts)  # [rank][expert]
        send = [sum(of_rank) for of_rank in to_ranks]  # rows
        receive = [sum(of_rank) for of_rank in from_ranks]
        order = chosen.flatten().argsort()  # row n K + k is token n on its way to its k-th expert
        rows = x.flatten(0, -2)[order // chosen.shape[-1]]  # sorted by expert
        rows = AllToAll.apply(rows, send, receive, self.ep)  # tokens' ranks -> experts'
        answers = []
        for arrived, sizes in zip(rows.split(receive), from_ranks):
            for expert, piece in zip(self.experts, arrived.split(sizes), strict=True):
                answers.append(expert(piece))
        answers = AllToAll.apply(torch.cat(answers), receive, send, self.ep)  # experts' -> tokens'
        answers = answers[order.argsort()].unflatten(0, gates.shape)  # by token again: (.., K, C)
        return (gates.unsqueeze(-1) * answers).sum(-2)


def dense_and_experts(model):
    """-> the parameters that every rank has, and those of this rank's experts."""
    layers = [module for module in model.modules() if hasattr(module, "ep")]  # also a MoE's wrapper
    experts = dict.fromkeys(p for layer in layers for p in layer.experts.parameters())  # each once
    return [p for p in model.parameters() if p not in experts], list(experts)


def gradient_norm(model, ep):
    """Of the whole model, in fp32 or better. All ranks have what is dense: the first counts it."""
    dense, experts = dense_and_experts(model)
    counted = dense + experts if ep.rank() == 0 else experts
    square = dense[0].new_zeros((), dtype=torch.promote_types(dense[0].dtype, torch.float32))
    for p in counted:
        if p.grad is not None:
            square += torch.linalg.vector_norm(p.grad, dtype=square.dtype).square()
    dist.all_reduce(square, group=ep)  # partial -> replicated
    return square.sqrt()


def all_reduce_gradients(model, replicas):
    """After backward, in which experts have got the gradients of all tokens of ep: so these are
    summed over replicas alone, the ranks with the same experts; what is dense over all ranks."""
    for parameters, group in zip(dense_and_experts(model), (dist.group.WORLD, replicas)):
        for p in parameters:
            if p.grad is not None:
                dist.all_reduce(p.grad, group=group)  # partial -> replicated


def idea_step(model, optimizer, x, y, valid, clip, *, replicas, ep):
    """x, y: this rank's sequences (B/n, T); valid: the number of targets in those of all ranks."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / valid
    loss.backward()
    all_reduce_gradients(model, replicas)
    norm = gradient_norm(model, ep)
    nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm)
    optimizer.step()
    return loss, norm


# ---- 2. the technique (copy this; of part 1 it takes what the next lines name)
# softmax_route, AllToAll, rows_of_each, exchange_counts, read_counts, dense_and_experts,
# gradient_norm

# What it adds to the idea, and what that buys. Calls: the toy's, on 2 ranks.
#     Experts        in stacks, rows regrouped by expert: each runs once, the idea's once for each
#                    rank's rows; on GPUs in bf16 all run at once, in one kernel
#     travel_beside  a shared expert works while rows travel: an exchange in two halves
#     balance        by losses or biases, experts are chosen about equally often
#     score          logits are fp32: rounding would change the choice
#     rows_of        under autocast rows are cast before they travel
#     sum_gradients  141 calls of a step -> 26: 1 for 56 dense gradients, none for 64 of experts
#                    (which are on one rank each), 4 more for loads; it makes a copy of them
# At the end, as an option: DeepSeek's router.

# ---- the layer

# Biases are integers, in UNITs: model.to(torch.bfloat16) would round floating-point buffers
UNIT = 2.0 ** -40


class MoE(nn.Module):
    """E experts behind a router, an nn.Linear(C, E), in place of an MLP: (.., C) -> (.., C).

    experts   the Experts of this rank, E/ep of them, on rank r of ep from number r E/ep on
    route     (logits, bias) -> chosen, gates, probs: softmax_route with its options, or another
    ep        group of the ranks that share out the experts; each brings its own tokens
    shared    a module that every token visits besides, with its gate if it has one, or None
    alpha     factor of Switch's balancing loss, such as 0.01 (transformers pools its L layers: of
              its router_aux_loss_coef about K/L). Each rank adds its own part, and the model's loss
              does not show it, step_biases does. With M micro-batches in a step give alpha/M;
              where all gradients, experts' too, are divided by n, n alpha
    beta      likewise of ST-MoE's z-loss, such as 1e-3
    gamma     by how much step_biases moves a bias, such as 1e-3

    It communicates: all ranks of ep and of `everyone` must call it, even in evaluation.
    """

    # group of the ranks whose tokens are balanced together, in a pipeline those with the same
    # stages (hybrid_3d.py sets it); None: the world
    everyone = None

    def __init__(self, router, experts, route, ep, *, shared=None, alpha=0.0, beta=0.0, gamma=0.0):
        super().__init__()
        E = len(experts.up.weight) * ep.size()
        assert router.out_features == E, f"MoE: {router.out_features} logits for {E} experts"
        refuse_forwards([router])
        self.router = router
        self.experts = experts
        self.route = route
        self.ep = ep
        self.shared = shared
        self.alpha = alpha
        self.beta = beta
        self.gamma = gamma
        self.register_buffer("bias_units", router.weight.new_zeros(E, dtype=torch.int64))
        # sums over backwards, until step_biases takes them
        self.load_of_step = 0  # (E,) int64, how often the tokens of all ranks chose each expert
        self.loss_of_step = 0  # () this rank's part of the balancing losses

    def forward(self, x):
        logits = self.score(x)
        chosen, gates, probs = self.route(logits, UNIT * self.bias_units.to(logits.dtype))
        own_load = rows_of_each(chosen, probs.shape[-1])  # of this rank's tokens
        load = own_load.clone()
        # partial -> replicated, while the experts are at work
        summing = dist.all_reduce(load, group=self.everyone, async_op=True)
        y = self.mix(x, chosen, gates, own_load)
        summing.wait()
        loss = logits.new_zeros(())  # then AddLoss notes the load alone
        if self.alpha or self.beta:
            loss = balancing_loss(load, logits, probs, chosen.shape[-1], self.alpha, self.beta)
        return AddLoss.apply(y, loss, load, self)

    def score(self, x):
        """(.., C) -> logits (.., E), in fp32 or better: rounding changes the choice."""
        exact = torch.promote_types(x.dtype, torch.float32)
        bias = self.router.bias
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(exact), self.router.weight.to(exact),
                            None if bias is None else bias.to(exact))

    def mix(self, x, chosen, gates, leaving):
        """As the idea's. leaving (E,): how many rows go to each expert."""
        counts = exchange_counts(leaving, self.ep)
        to_ranks, from_ranks = read_counts(counts)  # [rank][expert]
        send = [sum(of_rank) for of_rank in to_ranks]
        receive = [sum(of_rank) for of_rank in from_ranks]
        # row n K + k is token n on its way to its k-th expert; with capacity (part 3) the last stay
        order = chosen.flatten().argsort(stable=True)[:sum(send)]
        rows = self.rows_of(x, order, gates.shape[-1])
        if self.shared is None:
            rows = AllToAll.apply(rows, send, receive, self.ep)  # tokens' ranks -> experts'
        else:
            rows, of_shared = travel_beside(self.shared, x, rows, send, receive, self.ep)
        answers = AllToAll.apply(
            self.answer(rows, counts[1], from_ranks), receive, send, self.ep)  # and back
        by_token = answers.new_zeros(gates.numel(), answers.shape[1])
        by_token = by_token.index_copy(0, order, answers).unflatten(0, gates.shape)  # (.., K, C)
        y = (gates.to(answers.dtype).unsqueeze(-2) @ by_token).squeeze(-2)  # (.., 1, K) (.., K, C)
        return y if self.shared is None else y + of_shared

    def rows_of(self, x, order, top_k):
        """Tokens (.., C) -> rows, sorted by expert."""
        # not tokens.index_select(0, token): on GPUs its backward adds in any order
        rows = x.flatten(0, -2).repeat_interleave(top_k, 0)  # (N K, C), by token
        rows = rows.index_select(0, order)  # by expert, no row twice
        if torch.is_autocast_enabled(rows.device.type):  # or the experts would, behind the trip
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        return rows

    def answer(self, rows, pieces, from_ranks):
        """Rows, sorted by source, in pieces: from rank 0 for each expert here, from rank 1
        likewise, .. -> their answers. pieces (ep, E/ep) and from_ranks: how large they are."""
        numbers = torch.arange(pieces.shape[1], device=rows.device).expand_as(pieces).flatten()
        # each row's expert, 0 0 0 1 | 0 0 1 on rank 0 as drawn at the top, by source
        expert = numbers.repeat_interleave(pieces.flatten(), output_size=len(rows))
        regroup = expert.argsort(stable=True)  # to 0 0 0 0 0 1 1, by expert
        sizes = [sum(of_expert) for of_expert in zip(*from_ranks)]  # 5 2
        ends = pieces.sum(0).cumsum(0).int()  # 5 7, on the device
        answers = self.experts(rows.index_select(0, regroup), sizes, ends)
        return answers.index_select(0, regroup.argsort())  # by expert -> by source


# ---- experts in stacks


def refuse_forwards(linears):
    for linear in linears:
        is_plain = type(linear) is nn.Linear and "weight" in linear._parameters
        assert is_plain and "forward" not in vars(linear), (
            f"{linear}: its weight is used, but its forward would not be called")


class StackedLinear(nn.Module):
    """An nn.Linear per expert, in stacks: weight (E/ep, out, in), bias (E/ep, out) or None: whoever
    decays by p.dim() >= 2 decays these biases, too."""

    is_of_experts = True  # so that other files know, which do without this one

    def __init__(self, linears):
        super().__init__()
        refuse_forwards(linears)
        self.bias = None
        stacks, _ = torch.func.stack_module_state(linears)
        for name, stack in stacks.items():  # weight, and bias if there is one
            setattr(self, name, nn.Parameter(stack, stack.requires_grad))

    def forward(self, rows, sizes, ends):
        """rows (R, in), sorted by expert -> (R, out). sizes: a list, how many each has; ends: a
        tensor (E/ep,), where they end."""
        if self.one_kernel_pays(rows):
            weight = self.weight.to(rows.dtype)  # autocast casts nothing for this kernel
            return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
        biases = [None] * len(self.weight) if self.bias is None else self.bias
        pieces = rows.split(sizes)  # also of 0 rows: so every weight gets a gradient
        return torch.cat([F.linear(x, w, b) for x, w, b in zip(pieces, self.weight, biases)])

    def one_kernel_pays(self, rows):
        """On GPUs in bf16. The kernel has no biases, and needs widths that are multiples of 8. On
        Blackwell it makes gradients for experts without rows (pytorch's issue 172439)."""
        fits = all(size % 8 == 0 for size in self.weight.shape[1:])
        is_old = not torch.cuda.is_available() or torch.cuda.get_device_capability() < (10, 0)
        in_bf16 = rows.is_cuda and rows.dtype == torch.bfloat16
        return in_bf16 and is_old and fits and self.bias is None


class Experts(nn.Module):
    """The experts of one rank, with stacked weights. Each of them is an MLP,

        y = down(activation(up(x)))    or, with gate,    y = down(activation(gate(x)) * up(x))

    up, down, gate: lists, an nn.Linear for each expert here. GPT-2 has GELU and no gate,
    Mixtral has SiLU and one; a token's gates are something else. If a rank makes its own Linears
    alone, give each rank a seed of its own.
    """

    def __init__(self, activation, *, up, down, gate=None):
        super().__init__()
        self.activation = activation
        self.up = StackedLinear(up)
        self.down = StackedLinear(down)
        self.gate = None if gate is None else StackedLinear(gate)

    def forward(self, rows, sizes, ends):  # as StackedLinear's
        y = self.up(rows, sizes, ends)
        if self.gate is None:
            y = self.activation(y)
        else:
            y = self.activation(self.gate(rows, sizes, ends)) * y
        return self.down(y, sizes, ends)


# ---- balance: experts are chosen about equally often


def balancing_loss(load, logits, probs, top_k, alpha, beta):
    """This rank's summand of alpha E sum_e f_e P_e (Switch) + beta mean(logsumexp^2) (ST-MoE).

    f_e: the fraction of all ranks' rows that go to expert e; P_e: the mean of its probability.
    load (E,): how many tokens of all ranks chose each. logits, probs (.., E): of this rank's.
    """
    load = load.to(probs.dtype)
    f = load / load.sum()
    num_tokens = load.sum() / top_k  # of all ranks
    P = probs.flatten(0, -2).sum(0) / num_tokens  # this rank's summand
    switch = len(f) * (f * P).sum()  # autocast would make bf16 of f @ P
    z = logits.logsumexp(-1).square().sum() / num_tokens
    return alpha * switch + beta * z


class AddLoss(torch.autograd.Function):
    """Returns y, and in backward gives `loss` the gradient 1, as if it were added to the model's
    loss (as Megatron's MoEAuxLossAutoScaler), so that the layer need not return it. It also notes
    loss and load."""

    @staticmethod
    def forward(ctx, y, loss, load, layer):
        ctx.kept = (loss.detach(), load, layer)
        return y

    @staticmethod
    def backward(ctx, grad):
        loss, load, layer = ctx.kept
        # here, and not in forward, which runs twice if it is checkpointed
        layer.loss_of_step = layer.loss_of_step + loss
        layer.load_of_step = layer.load_of_step + load
        return grad, torch.ones_like(loss), None, None


def bias_step(load, gamma):
    """load (E,): how often each expert was chosen -> (E,), what its bias moves by, in UNITs.

    gamma for one chosen less often than the mean, -gamma for one chosen more often (DeepSeek-V3,
    whose gamma was 1e-3, then 0).
    """
    return round(gamma / UNIT) * (load.sum() - len(load) * load).sign()


# ---- a step


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, MoE)]


@torch.no_grad()
def broadcast_parameters(model, replicas):
    """Dense tensors get the values of the first rank, experts those of the first replica."""
    dense, experts = dense_and_experts(model)
    for tensor in [*dense, *model.buffers()]:
        tensor.data = tensor.data.contiguous()  # a broadcast sends memory, whatever the strides
        dist.broadcast(tensor, 0)  # the first rank's -> replicated
    for tensor in experts:
        dist.broadcast(tensor, group=replicas, group_src=0)  # the first replica's -> replicated


def sum_gradients(model, replicas):
    """all_reduce_gradients, once a step, after the last backward: by one all-reduce for all that is
    dense and one for experts."""
    is_cut = any(hasattr(m, "tp") for m in model.modules())
    assert not is_cut, "ranks have different pieces: take hybrid_3d.py"
    for parameters, group in zip(dense_and_experts(model), (dist.group.WORLD, replicas)):
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients and group.size() > 1:
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat, group=group)  # partial -> replicated
            parts = flat.split([g.numel() for g in gradients])
            views = [part.view_as(g) for g, part in zip(gradients, parts)]
            torch._foreach_copy_(gradients, views)


@torch.no_grad()
def step_biases(model):
    """After a step: moves the biases by its loads; frozen routers keep theirs. -> this rank's part
    of the balancing losses, to be printed, of layers that a backward has reached."""
    total = 0
    for layer in layers_of(model):
        if torch.is_tensor(layer.load_of_step) and layer.router.weight.requires_grad:
            layer.bias_units += bias_step(layer.load_of_step, layer.gamma)
        total += layer.loss_of_step
        layer.load_of_step = layer.loss_of_step = 0
    return total


# ---- the whole: a model.state_dict() has, by the same names, other experts on each rank of ep


def full_state_dict(model, ep):
    """-> {name: whole tensor} of a model whose experts are numbered: router, experts.5.up, ..;
    those of a layer are views of one tensor. Besides, each layer's bias_units, which a plain model
    has not. All ranks must call it. Of a model that is too large for one device gather one stack
    after the other: one_by_one({name: tensor}, ep)."""
    return one_by_one(model.state_dict(), ep)


def load_full_state_dict(model, ep, state):
    """Its inverse. state: {name: whole tensor}, the same on all ranks."""
    tensors = model.state_dict(keep_vars=True)
    # the first of two tied names, which is the one that safetensors has
    first_name = {t: name for name, t in reversed(tensors.items())}
    known = set(tensors)
    mine = {}
    for name, t in tensors.items():
        if is_stack(name):
            every = [plain_name(name, e) for e in range(len(t) * ep.size())]
            known.update(every)
            first = ep.rank() * len(t)
            mine[name] = torch.stack([state[each] for each in every[first:first + len(t)]])
        elif name.endswith("bias_units") and name not in state:  # a plain model has none
            mine[name] = torch.zeros_like(t)
        else:
            mine[name] = state[first_name[t]]
    unknown = set(state) - known if isinstance(state, dict) else None
    assert not unknown, f"{unknown} are not in this model"
    model.load_state_dict(mine)


def one_by_one(tensors, ep=None):
    """Stacks of experts' weights -> an entry for each expert, as the plain model has them. ep: the
    group that shares out the stacks; None: they are whole."""
    found = {}
    for name, tensor in tensors.items():
        if not is_stack(name):
            found[name] = tensor
            continue
        if ep is not None:
            here = tensor.detach().contiguous()
            of_ranks = [torch.empty_like(here) for _ in range(ep.size())]
            dist.all_gather(of_ranks, here, group=ep)  # sharded(0) -> replicated
            tensor = torch.cat(of_ranks)
        for e, of_expert in enumerate(tensor):
            found[plain_name(name, e)] = of_expert
    return found


def is_stack(name):
    return plain_name(name, 0) != name


def plain_name(name, e):
    """blocks.0.mlp.experts.up.weight, 5 -> blocks.0.mlp.experts.5.up.weight. Others stay as they
    are, also if a MoE itself is called experts. _orig_mod: of torch.compile."""
    return re.sub(r"(^|\.)experts\.(_orig_mod\.)?(up|down|gate)\.", rf"\1experts.{e}.\3.", name)


# ---- a shared expert hides the way to the others: AllToAll in two halves

#     forward     Leave starts   the shared expert   Arrive waits
#     backward    Arrive starts  the shared expert   Leave waits


def travel_beside(shared, x, rows, send, receive, ep):
    """-> rows with their experts, and shared(x), computed while they travel."""
    trip = Trip(send, receive, ep)
    rows = Leave.apply(rows, trip)  # tokens' ranks -> experts'
    of_shared = shared(x)
    return Arrive.apply(rows, trip), of_shared


class Trip:
    """Rows on their way to experts; in backward, their gradients on the way back."""

    def __init__(self, send, receive, ep):
        self.send = send
        self.receive = receive
        self.ep = ep
        self.work = None  # Work of the all-to-all under way
        self.rows = None  # its result

    def start(self, rows, send, receive):
        self.rows = rows.new_empty(sum(receive), rows.shape[1])
        self.work = dist.all_to_all_single(
            self.rows, rows.contiguous(), receive, send, group=self.ep, async_op=True)

    def finish(self):
        self.work.wait()  # on GPUs the stream waits for it, not the host
        rows = self.rows
        self.work = self.rows = None
        return rows


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, trip):
        ctx.trip = trip
        trip.start(rows, trip.send, trip.receive)
        return trip.rows  # still on the way: Arrive alone may read them

    @staticmethod
    def backward(ctx, gradient):  # autograd comes here after what was computed between the two
        return ctx.trip.finish(), None


class Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, trip):
        ctx.trip = trip
        return trip.finish()

    @staticmethod
    def backward(ctx, gradient):
        ctx.trip.start(gradient, ctx.trip.receive, ctx.trip.send)
        return gradient, None  # Leave takes its own from the trip; autograd wants a tensor here


# ---- another router


def sigmoid_route(logits, bias=0.0, *, top_k, scale=1.0, groups=1, top_groups=1):
    """DeepSeek-V3's: a token chooses among the experts of its best groups alone. A group is as good
    as the sum of its two best biased scores. A group has two experts or more, the best groups
    together top_k or more, and top_k is two or more: a single gate would always be `scale`."""
    scores = logits.sigmoid()
    by_group = (scores + bias).unflatten(-1, (groups, -1))  # (.., groups, E/groups)
    best = by_group.topk(2).values.sum(-1).topk(top_groups).indices
    is_best = torch.zeros_like(by_group[..., 0]).scatter(-1, best, 1.0).bool()
    eligible = by_group.masked_fill(~is_best.unsqueeze(-1), -math.inf).flatten(-2)
    chosen = eligible.topk(top_k).indices
    gates = scores.gather(-1, chosen)
    probs = scores / scores.sum(-1, keepdim=True)
    return chosen, scale * gates / gates.sum(-1, keepdim=True), probs


# ---- 3. the toy GPT, parallelized --------------------------------------------

# ---- capacity, for comparison: dropless mixtures, as above, are usual today; none of it is copied


def most_rows(capacity, top_k, num_tokens, experts):
    """-> how many rows an expert takes at most from a rank that has num_tokens tokens."""
    # rounded, since 1.1 * 2 * 100 / 4 is 55.00000000000001, whose ceil is 56
    return math.ceil(round(capacity * top_k * num_tokens / experts, 6))


def first_in_queue(chosen, experts, capacity):
    """A rank's chosen (N, K) -> (N, K): is the token among the first whom this expert takes?"""
    tokens, top_k = chosen.shape
    visits = torch.zeros(tokens, experts, dtype=torch.int64, device=chosen.device)
    place = visits.scatter(1, chosen, 1).cumsum(0)  # (N, E): in the expert's queue, from 1
    return place.gather(1, chosen) <= most_rows(capacity, top_k, tokens, experts)


class MoEWithCapacity(MoE):
    """A rank sends an expert most_rows at most (GShard, Switch). The load has the dropped, too."""

    def __init__(self, *args, capacity, **options):
        super().__init__(*args, **options)
        self.capacity = capacity

    def mix(self, x, chosen, gates, leaving):
        experts = len(leaving)
        chosen = chosen.flatten(0, -2)
        kept = first_in_queue(chosen, experts, self.capacity)
        # dropped rows get the number E: sorted behind all others, cut off, their answers stay 0
        chosen = chosen.masked_fill(~kept, experts)
        return super().mix(x, chosen, gates, rows_of_each(chosen, experts + 1)[:experts])


# ---- in one process: each MLP becomes a ToyMoE

PRESETS = {
    "mixtral-toy": DENSE["llama-toy"]._replace(hidden=448, theta=1e6),
    "mixtral-8x7b": DENSE["llama3-8b"]._replace(vocab=32000, seq=4096, theta=1e6),
    "qwen3-moe-toy": DENSE["qwen3-toy"]._replace(form=FORMS["qwen3"], hidden=128),
    "qwen3-30b-a3b": DENSE["qwen3-8b"]._replace(layers=48, width=2048, kv_heads=4, hidden=768),
}
MIXTURES = {"qwen3-moe-toy": (16, 4), "qwen3-30b-a3b": (128, 8)}  # E, K


def of_preset(model):
    """-> E, K"""
    return MIXTURES.get(model, (8, 2))


BALANCES = {  # alpha, beta and gamma of MoE, for runs of some hundred steps
    "aux": (0.1, 1e-3, 0.0),
    "bias": (0.0, 0.0, 1e-2),
    "none": (0.0, 0.0, 0.0),
}


class ToyMoE(PlainMoE):
    """PlainMoE in training, for the tokens of all ranks: what a MoE is compared with."""

    def __init__(self, cfg, *, mlp, experts, top_k, shared=False, balance="aux", capacity=0.0,
                 sources=None):
        super().__init__(nn.Linear(cfg.width, experts, bias=False),
                         nn.ModuleList(mlp(cfg) for _ in range(experts)),
                         partial(softmax_route, top_k=top_k, normalize=True))
        self.shared = mlp(cfg) if shared else None
        self.alpha, self.beta, self.gamma = BALANCES[balance]
        self.capacity = capacity
        # [micro-batch][rank]: the numbers (N,) of its tokens. None: one rank has all, at once
        self.sources = sources
        self.register_buffer("bias_units", torch.zeros(experts, dtype=torch.int64))  # as MoE's
        self.loss = 0  # the balancing loss of the last forward in training

    def forward(self, x):  # (.., C)
        tokens = x.flatten(0, -2)
        sources = self.sources or [[torch.arange(len(tokens), device=x.device)]]
        logits = self.router(tokens)
        chosen, gates, probs = self.route(logits, UNIT * self.bias_units.to(logits.dtype))
        if self.capacity:
            kept = torch.zeros_like(chosen, dtype=torch.bool)
            for own in chain(*sources):
                kept[own] = first_in_queue(chosen[own], len(self.experts), self.capacity)
            gates = gates.masked_fill(~kept, 0)
        y = self.mix(tokens, chosen, gates).view_as(x)
        if y.requires_grad:  # not in evaluation
            self.balance(logits, chosen, probs, sources)
        return y if self.shared is None else y + self.shared(x)

    def balance(self, logits, chosen, probs, sources):
        losses = []
        for of_ranks in sources:
            own = torch.cat(of_ranks)
            load = rows_of_each(chosen[own], len(self.experts))
            losses.append(balancing_loss(
                load, logits[own], probs[own], chosen.shape[1], self.alpha, self.beta))
        self.loss = sum(losses) / len(losses)
        if self.router.weight.requires_grad:
            self.bias_units += bias_step(rows_of_each(chosen, len(self.experts)), self.gamma)


def mixture(cfg, **options):
    """cfg of a GPT -> cfg of one with a ToyMoE of these options in the place of each MLP."""
    mlp = partial(ToyMoE, mlp=cfg.form.mlp, **options)
    return cfg._replace(form=cfg.form._replace(mlp=mlp))


# ---- on ranks: each ToyMoE becomes a MoE


def mlps_here(plain, ep):
    return [plain.experts[e] for e in share(len(plain.experts), ep.size(), ep.rank())]


def parallelize(model, ep, microbatches=1):
    """Each ToyMoE becomes a MoE with this rank's experts. microbatches: those of a step, M."""
    for block in model.blocks:
        plain = block.mlp
        here = mlps_here(plain, ep)
        names = [name for name in ("up", "down", "gate") if hasattr(here[0], name)]
        linears = {name: [getattr(mlp, name) for mlp in here] for name in names}
        activation = F.silu if "gate" in names else partial(F.gelu, approximate="tanh")
        experts = Experts(activation, **linears)
        kind = partial(MoEWithCapacity, capacity=plain.capacity) if plain.capacity else MoE
        block.mlp = kind(
            plain.router, experts, plain.route, ep, shared=plain.shared,
            alpha=plain.alpha / microbatches, beta=plain.beta / microbatches, gamma=plain.gamma)
        block.mlp.bias_units.copy_(plain.bias_units)
    return model


def parallelize_idea(model, ep):
    for block in model.blocks:
        plain = block.mlp
        block.mlp = IdeaOfMoE(plain.router, nn.ModuleList(mlps_here(plain, ep)), plain.route, ep)
        block.mlp.register_buffer("bias_units", plain.bias_units)  # unused: the plain model has it
    return model


def full_gradients(model, ep):
    """-> {name: whole tensor}, after a step's sums, of parameters that have a gradient."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return one_by_one(in_stacks(gradients), ep)


def in_stacks(tensors):
    """The idea's experts, numbered from 0 on -> stacks, such as a MoE has already."""
    found = {}
    for name, tensor in tensors.items():
        stack = re.sub(r"\.experts\.\d+", ".experts", name)
        if stack == name:
            found[name] = tensor
        else:
            found.setdefault(stack, []).append(tensor)
    return {name: torch.stack(t) if isinstance(t, list) else t for name, t in found.items()}


def train_step(model, optimizer, x, y, valid, clip, *, replicas, ep):
    """x, y: (B/n, T) of this rank; valid: targets of all -> its part of the loss, the norm."""
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    loss.backward()  # AddLoss adds the balancing losses' gradients
    sum_gradients(model, replicas)  # partial -> replicated
    norm = gradient_norm(model, ep)
    finite = norm.nan_to_num(0, posinf=0)  # inf, nan -> 0: nothing is scaled, the fault shows
    nn.utils.clip_grads_with_norm_(model.parameters(), clip, finite)
    optimizer.step()
    model.loads = [layer.load_of_step for layer in layers_of(model)]  # for show_load
    return loss.detach() + step_biases(model), norm


# ---- for the check and for dry runs


def build_plain(run, sources=None):
    """The plain model, with the biases of the checkpoint from which the run starts, if there is
    one. sources: as ToyMoE's, by default one micro-batch cut over all ranks."""
    args = run.args
    tokens = torch.arange(args.batch * run.cfg.seq, device=run.device)
    cfg = mixture(run.cfg, experts=args.experts, top_k=args.top_k, shared=args.shared,
                  balance=args.balance, capacity=args.capacity,
                  sources=sources or [tokens.chunk(run.world_size)])
    model = build(cfg, args.seed, run.device, run.dtype)
    for block, units in zip(model.blocks, run.start.extra.get("bias_units", [])):
        block.mlp.bias_units.copy_(torch.tensor(units))
    of_expert = sum(p.numel() for p in model.blocks[0].mlp.experts[0].parameters())
    run.idle = cfg.layers * (args.experts - args.top_k) * of_expert  # of what is not chosen
    return model


def plain_balancing_losses(model):
    return sum(block.mlp.loss for block in model.blocks)


def plain_trace(run):
    """The same steps by the plain model."""
    run.replays = False  # those before a checkpoint: other ranks may have dropped other rows
    return run.plain(extra_loss=plain_balancing_losses)


def name_experts(model, names, ep, experts):
    """names: {parameter: name}. A stack of matrices gets a list of names, one for each."""
    here = share(experts, ep.size(), ep.rank())
    for layer in model.modules():
        if isinstance(layer, StackedLinear):
            names[layer.weight] = [plain_name(names[layer.weight], e) for e in here]


def balanced_counts(counts):
    """What takes the place of read_counts where tensors have no values (dry runs, null devices)."""
    return balanced_counts.expected


def expect_balanced(args, tokens, ep):
    """Experts are chosen equally often. tokens: how many a rank routes at a time."""
    E = args.experts
    rows = tokens * args.top_k
    if args.capacity:
        rows = min(rows, E * most_rows(args.capacity, args.top_k, tokens, E))
    of_each = (rows + torch.arange(E)) // E  # the last ones get the remainder
    leaving = of_each.view(ep.size(), -1).tolist()  # [rank][expert]
    balanced_counts.expected = leaving, [leaving[ep.rank()]] * ep.size()


# ---- 4. at work: the same with torch's own API -------------------------------

# torch has no such layer, but parts of it: F.grouped_mm, which Experts takes on GPUs in bf16, and
# all_to_all_single_autograd in torch.distributed._functional_collectives, which is our AllToAll.
# The layers to use are torchtitan's, models/moe, and Megatron's, core/transformer/moe.

# ---- 5. run ------------------------------------------------------------------

FLAGS = {
    "--experts": dict(type=int, metavar="E", least=1, course=True, help="per layer (8, or the "
                      "preset's)"),
    "--top-k": dict(type=int, metavar="K", least=1, course="model", help="experts per token (2, or "
                    "the preset's)"),
    "--ep": dict(type=int, default=0, least=0, metavar="R", help="ranks that share out E (0: all)"),
    "--shared": dict(action="store_true", help="one more expert, for every token"),
    "--capacity": dict(type=float, default=0.0, least=0, course=True, help="an expert takes so "
                       "many times its share (0: everything)"),
    "--balance": dict(default="aux", choices=tuple(BALANCES), course=True, help="by a loss, or a "
                      "bias in the choice (--impl idea, all: none)"),
}
VARIANTS = ("", "--balance bias --shared")  # flags with which the file is worth running


def refuse(args):
    from harness.flags import refuse_flags, require

    n = args.world_size
    require(args.impl in ("idea", "scratch", "all"),
            f"--impl {args.impl}: torch has no such layer; part 4 says who has one")
    require(args.top_k <= args.experts,
            f"--top-k {args.top_k} of --experts {args.experts}: choose {args.experts} at most")
    require(n % args.ep == 0 and args.experts % args.ep == 0,
            f"--ep {args.ep}: take a divisor of {n} ranks and of --experts {args.experts}")
    require(args.batch % n == 0, f"--batch {args.batch} for {n} ranks: take a multiple of {n}")
    if args.impl != "scratch":
        refuse_flags(args, FLAGS, "--shared --capacity --balance --save --resume --init-from")
        args.balance = "none"


def set_up(run, impl, replicas, ep):
    """-> what the run trains, and how it finds whole tensors, for the check and checkpoints."""
    from harness.checkpoint import of_stacks, pieces_of
    from harness.whole import wholes_of_stacks

    make, step = {"idea": (parallelize_idea, idea_step), "scratch": (parallelize, train_step)}[impl]
    model = make(run.build(), ep)
    named = list(model.named_parameters())
    names = {p: name for name, p in named}
    name_experts(model, names, ep, run.args.experts)
    optimizer = run.optimizer(named, wholes=wholes_of_stacks, names=names)
    return run.side(
        model, optimizer, partial(step, replicas=replicas, ep=ep),
        full_gradients=partial(full_gradients, model, ep),
        full_state_dict=lambda: one_by_one(in_stacks(model.state_dict()), ep),
        pieces=lambda: of_stacks(pieces_of(named, optimizer), ep.rank(), plain_name),
        extra=lambda: {"bias_units": [layer.bias_units.tolist() for layer in layers_of(model)]})


def textbook(run, model, ep):
    """The docstring's table. b: bytes of a number; the norm's square has 4 at least."""
    n = run.world_size
    e = ep.size()
    b = run.dtype.itemsize
    L = run.cfg.layers
    dense, here = [sum(p.numel() for p in ps) for ps in dense_and_experts(model)]
    counts = 8 * L * run.args.experts  # bytes, of an int64 for each expert of each layer
    loads = counts if layers_of(model) else 0  # the idea sums none
    over_all = 2 * (n - 1) / n * (b * dense + loads)
    over_replicas = 2 * (n - e) / n * b * here  # n/e ranks: 2 (n/e - 1)/(n/e)
    norm = 2 * (e - 1) / e * max(4, b)
    return [
        ("calls all_to_all", "5 L", 5 * L),
        ("wire all_reduce",  # the idea's without 8 L E
         "2 (n-1)/n (b dense + 8 L E) + 2 (n-ep)/n b experts/ep + 2 (ep-1)/ep max(4, b)",
         over_all + over_replicas + norm),
        ("held states", "4 b (dense + experts/ep) + 4 per tensor (steps) + 8 L E",
         4 * b * (dense + here) + 4 * len(list(model.parameters())) + counts),  # bias_units
    ]


def show_load(run, model):
    """How often all ranks' tokens chose each expert in the last step, beside the mean."""
    loads = [load / load.double().mean() for load in model.loads if torch.is_tensor(load)]
    run.extra["load"] = [load.tolist() for load in loads]  # of layers that a backward came by
    times = " ".join(f"{load.max():.2f}" for load in loads)
    run.say(f"\nbusiest experts, by layer: {times} times the mean")


def main():
    from harness.flags import arguments  # not above: moe.py is imported without harness/
    from harness.run import Run

    args = arguments(__doc__, FLAGS, PRESETS)
    experts, top_k = of_preset(args.model)
    args.experts = args.experts or experts
    args.top_k = args.top_k or top_k
    args.ep = args.ep or args.world_size
    refuse(args)
    impls = ("scratch", "idea") if args.impl == "all" else None
    run = Run(args, impls, build_plain)
    mesh = dist.init_device_mesh(run.device.type, (run.world_size // args.ep, args.ep),
                                 mesh_dim_names=("replicas", "ep"))
    replicas, ep = mesh.get_all_groups()
    expect_balanced(args, args.batch * run.cfg.seq // run.world_size, ep)
    if run.dry:
        global read_counts
        read_counts = balanced_counts
        run.say("experts are taken to be balanced")
    with run:
        sides = {impl: set_up(run, impl, replicas, ep) for impl in run.impls}
        run.train(sides, rows=share(args.batch, run.world_size, run.rank))
        model = sides[run.impls[0]].model
        run.textbook(textbook(run, model, ep))
        if layers_of(model) and not run.dry:
            show_load(run, model)
        judged_as = None
        if args.dtype == "fp32" and args.check and not run.dry:
            run.say("\nin fp32 rounding decides near ties: only losses are judged; fp64 judges all")
            judged_as = "bf16"  # of which finish() judges losses alone
        return run.finish(partial(plain_trace, run), judged_as)


if __name__ == "__main__":
    sys.exit(main())
