"""Mixture of experts: each MLP becomes E experts, of which a token visits K; tokens travel.

A row is a token (C numbers) on its way to an expert, or back, drawn as the expert's number. Here
each rank has 3 tokens, K is 2. Rank 0 has experts 0 and 1, rank 1 has 2 and 3; | parts the two.

    after     router, sort    all-to-all    sort, experts   sort, all-to-all   gates, sum
    rank 0    0 0 0 1 | 2 3   0 0 0 1 0 1   0 0 0 0 1 1     0 0 0 1 | 2 3      3 tokens
    rank 1    0 1 | 2 2 3 3   2 3 2 2 3 3   2 2 2 3 3 3     0 1 | 2 2 3 3      3 tokens

Each of n ranks has its own part of the batch, N tokens. Groups `ep`, of ep ranks each, share out
the experts; ranks with the same ones are a group `replicas`. `dense` weights are outside experts,
`experts` weights in them; each has b bytes.

    on each rank, experts being balanced   one process             here
    bytes of weights, gradients, AdamW     4 b (dense + experts)   4 b (dense + experts/ep)
    calls per layer, for K N rows          -                       2 all-to-alls, 2 more in backward
    calls per layer, for E int64 counts    -                       1 all-to-all, 1 all-reduce
    bytes of gradients all-reduced         -                       b dense, b experts/ep if ep < n

    mesh = dist.init_device_mesh("cuda", (n // 8, 8), mesh_dim_names=("replicas", "ep"))  # ep = 8
    replicas, ep = mesh.get_all_groups()
    # ups, downs, gates (SwiGLU's): lists of E/ep nn.Linears; rank r of ep has expert r E/ep and on
    block.mlp = MoE(router, Experts(F.silu, ups, downs, gates), top_k=2, normalize=True, ep=ep)
    broadcast_parameters(model, replicas)  # once, before training
    optimizer = torch.optim.AdamW(model.parameters())  # only now: Experts has copied the weights
    optimizer.zero_grad()
    (token_losses.sum() / valid_targets_of_all_ranks).backward()
    sum_gradients(model, replicas)
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, gradient_norm(model, ep))
    optimizer.step()
    step_biases(model)  # after every step, also without biases: it starts new sums of losses

Not for: routers with a bias or a forward of their own (sigmoids, groups of experts); experts that
are partly frozen or are not MLPs of nn.Linear; evaluation on some ranks alone; fp16, loss scalers.

Lepikhin 2020, "GShard", arXiv:2006.16668 (all-to-all, capacity); Fedus 2021, "Switch Transformers",
arXiv:2101.03961, eq. 4 (balancing); Zoph 2022, "ST-MoE", arXiv:2202.08906, eq. 5 (z-loss); Jiang
2024, "Mixtral", arXiv:2401.04088 (gated experts); DeepSeek-V3 2024, arXiv:2412.19437, sec. 2.1.2
(bias). At work: torchtitan's models/moe, Megatron's core/transformer/moe; torch has parts of it.
    torchrun --standalone --nproc_per_node=2 moe.py
"""
import math
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

# imports of section 1 end here; the rest is for sections 2 to 4
import sys

from common import FORMS, GPTConfig, adamw, build, init_weights, loss_sum, share
from harness.checkpoint import of_stack, pieces_of
from harness.flags import ANY, POSITIVE, Flag, arguments, require
from harness.run import Run, Side

# ---- 1. the technique (copy this; it needs only torch) -----------------------
# In comments a tensor is partial (a summand on each rank), sharded (a piece) or replicated (whole).


class AllToAll(torch.autograd.Function):
    """Rows (sum(send), C) -> (sum(receive), C): receive[r] come from rank r, send[r] go to it."""

    @staticmethod
    def forward(ctx, rows, receive, send, group):  # receive before send, as torch has them
        ctx.way_back = (send, receive, group)
        arrived = rows.new_empty(sum(receive), *rows.shape[1:])
        # sorted by destination -> sorted by source
        dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
        return arrived

    @staticmethod
    def backward(ctx, grad):  # gradients go the way back; all_to_all_single alone has no backward
        return AllToAll.apply(grad, *ctx.way_back), None, None, None


def route(logits, top_k, bias, normalize):
    """Logits (N, E) -> chosen experts (N, K), their gates (N, K), probabilities (N, E)."""
    probs = logits.softmax(-1)
    chosen = (probs + bias).topk(top_k).indices  # the bias (E,) does not change gates
    gates = probs.gather(-1, chosen)
    if normalize and top_k > 1:  # a single gate would always be 1: the router would not learn
        gates = gates / gates.sum(-1, keepdim=True)
    return chosen, gates, probs


def balancing_loss(load, logits, probs, top_k, alpha, beta):
    """This rank's part of alpha E sum_e f_e P_e (Switch) + beta mean(logsumexp^2) (ST-MoE).

    f_e is the share of expert e in all ranks' rows before any is dropped, P_e its mean probability.
    load (E,): how many tokens of all ranks chose each. logits, probs (N, E): of this rank's tokens.
    """
    load = load.to(probs.dtype)
    f = load / load.sum()
    num_tokens = load.sum() / top_k  # of all ranks
    part_of_P = probs.sum(0) / num_tokens
    switch = len(f) * (f @ part_of_P)
    z = logits.logsumexp(-1).square().sum() / num_tokens
    return alpha * switch + beta * z


def most_rows(capacity, top_k, num_tokens, experts):
    """-> how many rows an expert takes at most from a rank that has num_tokens tokens."""
    if not capacity:
        return num_tokens  # none of them chooses the same expert twice
    # rounded, since 1.1 * 2 * 40 / 8 is 11.000000000000002, whose ceil is 12
    return math.ceil(round(capacity * top_k * num_tokens / experts, 6))


def read_counts(routing):  # a function, so that a dry run can replace it
    return routing.counts.tolist()  # here alone the host waits for the device


class Routing:
    """Which rows go where. Row number t K + k is token t on its way to its k-th expert.

    Rows leave sorted by expert. They arrive sorted by the rank that they come from, then by expert.
    """

    def __init__(self, chosen, wanted, limit, ep):
        """chosen (N, K): experts. wanted (E,): rows for each expert. At most `limit` of each go."""
        self.limit = limit
        self.ep = ep
        self.order = chosen.flatten().argsort(stable=True)  # row numbers, by expert, then token
        leaving = wanted.clamp(max=limit)
        arriving = torch.empty_like(leaving)
        # this rank's rows for every expert -> every rank's rows for the experts here
        dist.all_to_all_single(arriving, leaving, group=ep)
        ranks = dist.get_world_size(ep)
        self.counts = torch.stack([wanted, leaving, arriving]).view(3, ranks, -1)
        self.sizes_on_device = arriving.view(ranks, -1).sum(0)  # (E/ep,) rows of each expert here
        # from here on lists, [rank][expert of that rank]; by_source: [rank][expert of this rank]
        wanted, leaving, self.by_source = read_counts(self)  # rows, as they leave or arrive
        if limit < len(chosen):  # keep the first `limit` rows of each expert, drop the others
            rows_of_each = self.order.split(list(chain(*wanted)))
            self.order = torch.cat([rows[:limit] for rows in rows_of_each])
        self.sent = [sum(sizes) for sizes in leaving]  # rows to each rank of ep
        self.received = [sum(sizes) for sizes in self.by_source]  # rows from each rank of ep
        self.by_expert = list(zip(*self.by_source))  # [expert here][rank]: as experts want them
        self.sizes = [sum(sizes) for sizes in self.by_expert]  # sizes_on_device, as a list


def transpose_blocks(rows, grid):
    """Rows in blocks of grid[i][j] rows each, sorted by i, then j -> by j, then i: a transpose."""
    blocks = rows.split(list(chain(*grid)))
    J = len(grid[0])  # block (i, j) is number i J + j
    return torch.cat([block for j in range(J) for block in blocks[j::J]])


class StackedLinear(nn.Module):
    """An nn.Linear per expert, copied into stacks: weight (E/ep, F, C), bias (E/ep, F) or None."""

    def __init__(self, linears):
        super().__init__()
        stacked, _ = torch.func.stack_module_state(linears)  # {"weight": .., perhaps "bias": ..}
        parameters = {name: nn.Parameter(t, t.requires_grad) for name, t in stacked.items()}
        self.weight = parameters["weight"]
        self.bias = parameters.get("bias")

    def one_by_one(self):
        """-> for each expert a function of its R rows, (R, C) -> (R, F)."""
        biases = [None] * len(self.weight) if self.bias is None else self.bias
        return [partial(F.linear, weight=w, bias=b) for w, b in zip(self.weight, biases)]

    def at_once(self, rows, sizes):
        """All experts in one kernel: rows (R, C) sorted by expert, sizes (E/ep,) -> (R, F)."""
        y = F.grouped_mm(rows, self.weight.transpose(1, 2), offs=sizes.cumsum(0).int())
        if self.bias is None:
            return y
        # Each row gets its expert's bias by a matmul, whose backward sums the bias's gradient in
        # fp32. On GPUs index_select's backward would add in any order, rounding every addition
        eye = torch.eye(len(sizes), dtype=y.dtype, device=y.device)
        one_hot = eye.repeat_interleave(sizes, 0, output_size=len(rows))  # (R, E/ep)
        return torch.addmm(y, one_hot, self.bias)


class Experts(nn.Module):
    """The experts of one rank, with stacked weights. Each of them is an MLP,

        y = down(activation(up(x)))    or, with gate,    y = down(activation(gate(x)) * up(x))

    up, down, gate: lists, an nn.Linear for each expert here. GPT-2: GELU, no gate; Mixtral: SiLU.
    Each rank of `ep` needs weights of its own: from one seed, all ranks would draw the same.
    """

    def __init__(self, activation, up, down, gate=None):
        super().__init__()
        self.activation = activation
        self.up = StackedLinear(up)
        self.down = StackedLinear(down)
        self.gate = None if gate is None else StackedLinear(gate)

    def forward(self, rows, routing):  # (R, C) sorted by expert -> (R, C)
        linears = [self.up, self.down]  # in the order of mlp's arguments
        if self.gate is not None:
            linears.append(self.gate)
        if self.one_kernel_pays(rows):
            grouped = [partial(linear.at_once, sizes=routing.sizes_on_device) for linear in linears]
            return self.mlp(rows, *grouped)
        of_each_expert = zip(*[linear.one_by_one() for linear in linears])  # (up, down[, gate])
        parts = rows.split(routing.sizes)  # empty ones stay, so that gradients are never None
        return torch.cat([self.mlp(x, *functions) for x, functions in zip(parts, of_each_expert)])

    def mlp(self, x, up, down, gate=None):
        if gate is None:
            return down(self.activation(up(x)))
        return down(self.activation(gate(x)) * up(x))

    def one_kernel_pays(self, rows):
        """Yes on GPUs in bf16. The kernel needs widths that are multiples of 8."""
        weight = self.up.weight
        aligned = all(width % 8 == 0 for width in weight.shape[1:])
        return rows.is_cuda and rows.dtype == weight.dtype == torch.bfloat16 and aligned


class AddLoss(torch.autograd.Function):
    """Returns y. In backward the gradient of `loss` is 1, as if the model's loss had this term.

    So the layer need not return `loss` (Megatron's MoEAuxLossAutoScaler does the same). layer.loss
    and layer.load grow in backward: a forward that is checkpointed runs twice, and would add twice.
    """

    @staticmethod
    def forward(ctx, y, loss, load, layer):
        ctx.kept = (loss.detach(), load, layer)
        return y

    @staticmethod
    def backward(ctx, grad):
        loss, load, layer = ctx.kept
        layer.loss = layer.loss + loss
        layer.load = layer.load + load
        return grad, torch.ones_like(loss), None, None


class MoE(nn.Module):
    """E experts behind a router, an nn.Linear(C, E), in place of an MLP: (.., C) -> (.., C).

    experts    the Experts of this rank, E/ep of them: those of rank r begin with number r E/ep
    top_k      K, the experts that a token visits
    normalize  do the gates of K > 1 experts sum to 1? Mixtral: yes. OLMoE, Qwen2-MoE: no
    ep         group of the ranks that share out the experts; each brings its own tokens
    everyone   group of the ranks whose tokens are balanced together; None: the world
    shared     a module that every token visits besides, or None
    capacity   A: a rank sends an expert ceil(A K N / E) rows at most, drops the rest; 0: all rows
    alpha      the factor of Switch's balancing loss; give alpha/M if a step has M micro-batches
    beta       the factor of ST-MoE's z-loss; give beta/M if a step has M micro-batches
    gamma      step_biases moves the bias added before the choice by this: never change it; 0: none

    It communicates in `ep` and in `everyone`: all their ranks must call it, even in evaluation.
    """

    def __init__(self, router, experts, *, top_k, normalize, ep, everyone=None, shared=None,
                 capacity=0.0, alpha=0.01, beta=1e-3, gamma=0.0):
        super().__init__()
        assert router.bias is None, "MoE: a router without bias is wanted, the bias would be lost"
        E = len(experts.up.weight) * dist.get_world_size(ep)
        assert router.out_features == E, f"MoE: {router.out_features} logits for {E} experts"
        self.router = router
        self.experts = experts
        self.top_k = top_k
        self.normalize = normalize
        self.ep = ep
        self.everyone = everyone
        self.shared = shared
        self.capacity = capacity
        self.alpha = alpha
        self.beta = beta
        self.gamma = gamma
        self.exchange = AllToAll.apply  # how rows change ranks; can be replaced
        # (E,) gamma times this is the bias. Integers, since .to(bfloat16) does not round them
        self.register_buffer("bias_steps", router.weight.new_zeros(E, dtype=torch.int64))
        # sums over the backwards of a step, until step_biases
        self.load = 0  # (E,) int64, how often the tokens of all ranks chose each expert
        self.loss = 0  # () this rank's part of the balancing losses

    def forward(self, x):  # (.., C)
        tokens = x.flatten(0, -2)  # (N, C)
        logits = self.score(tokens)  # (N, E)
        bias = self.gamma * self.bias_steps.to(logits.dtype)
        chosen, gates, probs = route(logits, self.top_k, bias, self.normalize)
        wanted = chosen.new_zeros(self.router.out_features)  # no bincount(): the host would wait
        wanted.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
        load = wanted.clone()  # since the all-reduce is in place
        # partial -> replicated, while the experts are at work
        summing = dist.all_reduce(load, group=self.everyone, async_op=True)
        limit = most_rows(self.capacity, self.top_k, len(tokens), len(wanted))
        routing = Routing(chosen, wanted, limit, self.ep)  # an all-to-all of counts
        y = self.visit(tokens, gates, routing)  # (N, C)
        summing.wait()
        loss = logits.new_zeros(())
        if self.alpha or self.beta:
            loss = balancing_loss(load, logits, probs, self.top_k, self.alpha, self.beta)
        y = AddLoss.apply(y, loss, load, self).view(x.shape)
        if self.shared is not None:
            y = y + self.shared(x)
        return y

    def score(self, tokens):
        """Tokens (N, C) -> logits (N, E), in fp32 or better: rounding changes the choice."""
        exact = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            return F.linear(tokens.to(exact), self.router.weight.to(exact))

    def visit(self, tokens, gates, routing):
        """Tokens (N, C) -> (N, C): for each the sum of its K experts' answers, times gates."""
        N, C = tokens.shape
        # K copies of each token. (tokens[order // K] would sum a token's K gradients in any order)
        rows = tokens.unsqueeze(1).expand(-1, self.top_k, -1).flatten(0, 1)  # (N K, C)
        rows = rows.index_select(0, routing.order)  # by token -> by expert, no row twice
        # on the tokens' ranks -> on the experts' ranks
        rows = self.exchange(rows, routing.received, routing.sent, routing.ep)
        rows = transpose_blocks(rows, routing.by_source)  # sorted by source -> sorted by expert
        rows = self.experts(rows, routing)
        rows = transpose_blocks(rows, routing.by_expert)  # sorted by expert -> sorted by source
        # on the experts' ranks -> on the tokens' ranks: now what was sent is received
        rows = self.exchange(rows, routing.sent, routing.received, routing.ep)
        answers = rows.new_zeros(N * self.top_k, C)  # rows that are dropped stay zeros
        answers = answers.index_copy(0, routing.order, rows).view(N, self.top_k, C)
        return (gates.to(rows.dtype).unsqueeze(1) @ answers).view(N, C)  # (N, 1, K) @ (N, K, C)


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, MoE)]


def dense_and_experts(model):
    """-> the parameters that every rank has, and those of the experts that are here."""
    experts = [p for layer in layers_of(model) for p in layer.experts.parameters()]
    of_experts = set(experts)
    dense = [p for p in model.parameters() if p not in of_experts]
    return dense, experts


def gradients_of(model):
    """-> the gradients of dense_and_experts' parameters, where there are any."""
    dense, experts = dense_and_experts(model)
    return [[p.grad for p in ps if p.grad is not None] for ps in (dense, experts)]


@torch.no_grad()
def broadcast_parameters(model, replicas, everyone=None):
    """Gives everyone the first rank's dense tensors, and replicas their first rank's experts."""
    dense, experts = dense_and_experts(model)
    for tensor in [*dense, *model.buffers()]:
        dist.broadcast(tensor, group=everyone, group_src=0)  # the first rank's -> replicated
    for tensor in experts:
        dist.broadcast(tensor, group=replicas, group_src=0)  # the first replica's -> replicated


def sum_gradients(model, replicas, everyone=None):
    """Sums dense gradients over everyone, those of experts over replicas. None means the world."""
    dense, experts = gradients_of(model)
    sum_over_ranks(dense, everyone)  # partial -> replicated; ddp.py does it during backward
    sum_over_ranks(experts, replicas)  # partial -> replicated


def sum_over_ranks(tensors, group):
    """Sum each tensor over the ranks, in its place, by one all-reduce for all of them."""
    if not tensors or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat, group=group)  # partial -> replicated
    parts = flat.split([t.numel() for t in tensors])
    torch._foreach_copy_(tensors, [part.view_as(t) for t, part in zip(tensors, parts)])


def gradient_norm(model, ep):
    """After sum_gradients: the norm of the whole model's gradient, each expert counted once."""
    dense, experts = gradients_of(model)
    dense.append(next(model.parameters()).new_zeros(1))  # so that there is a dense[0]
    wide = torch.promote_types(dense[0].dtype, torch.float32)
    squares = torch.stack(torch._foreach_norm(dense + experts, dtype=wide)).square()
    square_of_experts = squares[len(dense):].sum()
    dist.all_reduce(square_of_experts, group=ep)  # partial -> replicated; dense is already
    return (squares[:len(dense)].sum() + square_of_experts).sqrt()


@torch.no_grad()
def step_biases(model):
    """After every step of the optimizer: moves biases, and starts new sums of load and loss.

    The bias of an expert that was chosen less often than the mean grows by gamma (DeepSeek-V3:
    1e-3), and that of one chosen more often shrinks by it. Biases of a frozen router stay.
    """
    for layer in layers_of(model):
        if layer.gamma and layer.router.weight.requires_grad:
            load = torch.as_tensor(layer.load)  # the number 0 without a backward
            layer.bias_steps += (load.sum() - len(layer.bias_steps) * load).sign()
        layer.load = 0
        layer.loss = 0


def balancing_losses(model):
    """Before step_biases: this rank's part of the step's balancing losses, to be printed."""
    return sum(layer.loss for layer in layers_of(model))


# ---- 2. the toy GPT, parallelized --------------------------------------------

BALANCES = {  # alpha, beta and gamma of MoE, for runs of some hundred steps
    "aux": (0.1, 1e-3, 0.0),
    "bias": (0.0, 0.0, 1e-2),
    "none": (0.0, 0.0, 0.0),
}


class PlainMoE(nn.Module):
    """The definition: all experts, times their gates, of which all but K are zero."""

    def __init__(self, cfg, *, experts, top_k, shared=False, balance="aux", capacity=0.0,
                 sources=None):
        super().__init__()
        self.E = experts
        self.top_k = top_k
        self.capacity = capacity
        self.alpha, self.beta, self.gamma = BALANCES[balance]
        mlp = cfg.form.mlp
        self.router = nn.Linear(cfg.width, experts, bias=False)
        self.experts = nn.ModuleList(mlp(cfg) for _ in range(experts))
        self.shared = mlp(cfg) if shared else None
        self.register_buffer("bias_steps", torch.zeros(experts, dtype=torch.int64))  # as MoE's
        # [micro-batch][rank]: (N,) numbers of the tokens that a rank routes; None: one rank has all
        self.sources = sources
        self.loss = 0  # the balancing loss of the last forward in training

    def forward(self, x):  # (.., C) of all ranks
        tokens = x.flatten(0, -2)  # (N, C)
        logits = self.router(tokens)  # (N, E)
        probs = logits.softmax(-1)
        chosen = (probs + self.gamma * self.bias_steps).topk(self.top_k).indices
        visits = F.one_hot(chosen, self.E).sum(1)  # (N, E) of 0 and 1
        gates = probs * visits
        if self.top_k > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        losses = []
        for microbatch in self.sources or [[torch.arange(len(tokens))]]:
            for own in microbatch:  # one rank's tokens
                place = visits[own].cumsum(0)  # (N, E): token's place in expert's queue, from 1
                limit = most_rows(self.capacity, self.top_k, len(own), self.E)
                gates[own] = gates[own] * (place <= limit)  # those not chosen are 0 already
            together = torch.cat(microbatch)
            losses.append(balancing_loss(
                visits[together].sum(0), logits[together], probs[together],
                self.top_k, self.alpha, self.beta))
        y = sum(gates[:, e:e + 1] * self.experts[e](tokens) for e in range(self.E))
        if self.shared is not None:
            y = y + self.shared(tokens)
        if y.requires_grad:  # not in evaluation
            self.loss = sum(losses) / len(losses)
            if self.gamma and self.router.weight.requires_grad:  # as step_biases does
                load = visits.sum(0)
                self.bias_steps += (load.sum() - self.E * load).sign()
        return y.view_as(x)


def mixture(model, seed, cfg, **options):
    """The plain GPT with a PlainMoE of these options in place of each MLP."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(model.tok.weight.dtype)
    with model.tok.weight.device:  # new tensors are made there
        for block in model.blocks:
            block.mlp = PlainMoE(cfg, **options)
    torch.set_default_dtype(before)
    init_weights(model, cfg.layers, seed)  # draws each expert by its own name
    return model


def parallelize(model, ep, everyone=None, microbatches=1):
    """Each PlainMoE becomes a MoE with this rank's experts. microbatches: those of a step, M."""
    for block in model.blocks:
        plain = block.mlp
        here = [plain.experts[e] for e in share(plain.E, ep.size(), ep.rank())]
        names = [name for name, _ in here[0].named_children()]  # up, down, in Llama's form gate
        linears = {name: [getattr(mlp, name) for mlp in here] for name in names}
        activation = F.silu if "gate" in names else partial(F.gelu, approximate="tanh")
        block.mlp = MoE(
            plain.router, Experts(activation, **linears), top_k=plain.top_k, normalize=True, ep=ep,
            everyone=everyone, shared=plain.shared, capacity=plain.capacity,
            alpha=plain.alpha / microbatches, beta=plain.beta / microbatches, gamma=plain.gamma)
        block.mlp.bias_steps.copy_(plain.bias_steps)
    return model


def plain_name(name, e):
    """blocks.0.mlp.experts.up.weight, 5 -> blocks.0.mlp.experts.5.up.weight"""
    return name.replace(".experts.", f".experts.{e}.")


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


def pieces(model, optimizer, replicas, ep):
    """What this rank holds of the plain MoE: all that is dense, and some experts, each whole."""
    found = []
    for piece in pieces_of(model.named_parameters(), optimizer, writes=replicas.rank() == 0):
        if ".experts." not in piece.name:
            found.append(piece._replace(writes=piece.writes and ep.rank() == 0))
            continue
        found += of_stack(piece, ep.rank(), plain_name)
    return found


def train_step(model, optimizer, x, y, valid, clip, *, replicas, ep):
    """x, y: (B/n, T) of this rank; valid: targets of all -> its part of the loss, the norm."""
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    loss.backward()  # AddLoss adds the balancing losses' gradients
    sum_gradients(model, replicas)  # partial -> replicated
    norm = gradient_norm(model, ep)
    finite = norm.nan_to_num(0, posinf=0)  # 0: gradients stay as they are, and show the fault
    nn.utils.clip_grads_with_norm_(model.parameters(), clip or math.inf, finite)
    optimizer.step()
    loss = loss.detach() + balancing_losses(model)
    step_biases(model)
    return loss, norm


# ---- 3. at work: the same with torch's own API -------------------------------


def parallelize_at_work(model, ep):
    """torch has no such layer: routing, sorting and bookkeeping stay section 1's."""
    from torch.distributed import _functional_collectives as functional  # slow to import

    grouped_mm_works = model.tok.weight.dtype != torch.float64
    parallelize(model, ep)
    for layer in layers_of(model):
        layer.exchange = functional.all_to_all_single_autograd
        layer.experts.one_kernel_pays = lambda rows: grouped_mm_works
    return model


# ---- 4. run ------------------------------------------------------------------

IMPLS = {"scratch": parallelize, "torch": parallelize_at_work}
PRESETS = {
    "mixtral-toy": GPTConfig(form=FORMS["llama"], kv_heads=2, hidden=448, theta=1e6),
    "mixtral-8x7b": GPTConfig(32, 4096, 32, 32000, 4096, FORMS["llama"], kv_heads=8,
                              hidden=14336, theta=1e6),
}
FLAGS = {  # course: a checkpoint is not continued with another value
    "experts": Flag(8, "E in each layer", POSITIVE, course=True),
    "top_k": Flag(2, "K, experts per token", POSITIVE, course=True),
    "ep": Flag(0, "ranks that share out the experts (0: all)", ANY),
    "shared": Flag(False, "one for every token"),
    "capacity": Flag(0.0, "A: an expert takes A times its share (0: everything)", ANY, course=True),
    "balance": Flag("aux", "by a loss, or a bias in the choice", tuple(BALANCES), course=True),
}


def refuse(args):
    n = args.world_size
    ep = args.ep or n
    require(args.top_k <= args.experts,
            f"--top-k {args.top_k} of --experts {args.experts}: choose {args.experts} at most")
    require(n % ep == 0 and args.experts % ep == 0,
            f"--ep {ep}: take a divisor of {n} ranks and of --experts {args.experts}")
    require(args.batch % n == 0, f"--batch {args.batch} for {n} ranks: take a multiple of {n}")
    # in a dry run grouped_mm takes bf16 alone; fp64 does without it
    require(args.impl == "scratch" or args.dtype != "fp32" or not args.dry_run,
            f"--impl {args.impl} --dry-run: take --dtype bf16 or fp64")


def build_plain(args, cfg, seed, device, dtype, sources=None):
    """The plain model. sources: as PlainMoE's, by default one micro-batch cut over all ranks."""
    numbers = torch.arange(args.batch * cfg.seq, device=device)  # of tokens
    return mixture(build(cfg, seed, device, dtype), seed, cfg, experts=args.experts,
                   top_k=args.top_k, shared=args.shared, balance=args.balance,
                   capacity=args.capacity, sources=sources or [numbers.chunk(args.world_size)])


def plain_trace(run):
    """The same steps by the plain model. It does not replay the steps before a checkpoint."""
    run.replays = False  # another number of ranks may have run them, and dropped other rows
    model = run.build()
    set_biases(model, run)
    return run.plain(model, extra_loss=plain_balancing_losses)


def plain_balancing_losses(model):
    return sum(block.mlp.loss for block in model.blocks)


def set_biases(model, run):
    """Biases as the checkpoint has them, if the run starts from one."""
    for block, steps in zip(model.blocks, run.start.extra.get("bias_steps", [])):
        block.mlp.bias_steps.copy_(torch.tensor(steps))


def balanced_counts(routing):
    """Replaces read_counts in a dry run: ranks are taken to choose all experts equally often."""
    _, ranks, here = routing.counts.shape
    E = ranks * here
    of_each = [(len(routing.order) + e) // E for e in range(E)]  # the last ones get the remainder
    wanted = [of_each[e:e + here] for e in range(0, E, here)]
    leaving = [[min(routing.limit, size) for size in sizes] for sizes in wanted]
    # all ranks choose alike: from each of them comes what this one sends to itself
    arriving = [leaving[dist.get_rank(routing.ep)]] * ranks
    return wanted, leaving, arriving


def set_up(run, impl, replicas, ep):
    model = IMPLS[impl](run.build(), ep)
    set_biases(model, run)
    optimizer = adamw(model.parameters(), run.args.lr)
    return Side(
        model=model, optimizer=optimizer, train_step=partial(train_step, replicas=replicas, ep=ep),
        full_gradients=partial(full_gradients, model, ep),
        full_state_dict=partial(full_state_dict, model, ep),
        pieces=partial(pieces, model, optimizer, replicas, ep),
        extra=lambda: {"bias_steps": [layer.bias_steps.tolist() for layer in layers_of(model)]})


def watch_traffic(model):
    """-> {Experts: (rows sent to each rank of ep, rows of each expert)}, of the last step."""
    traffic = {}

    def note(experts, inputs, output):
        _, routing = inputs
        if torch.is_grad_enabled():
            traffic[experts] = routing.sent, routing.sizes

    for layer in layers_of(model):
        layer.experts.register_forward_hook(note)
    return traffic


def account(run, model, ep, traffic):
    """The textbook: a number has b bytes; the square of the gradients' norm has at least 4."""
    n = run.world_size
    e = ep.size()
    b = run.dtype.itemsize
    # numbers in dense parameters, and in this rank's experts: the textbook's experts/ep
    dense, of_experts = [sum(p.numel() for p in ps) for ps in dense_and_experts(model)]
    int64s = 8 * len(traffic) * run.args.experts  # bytes of one for each expert of each layer
    moving = 0  # rows to other ranks and from them
    for sent, sizes in traffic.values():
        moving += sum(sent) + sum(sizes) - 2 * sent[ep.rank()]
    return [
        ("wire all_to_all", "2 b C (rows out + rows in, but those that stay) + (ep-1)/ep 8 L E",
         2 * b * run.cfg.width * moving + (e - 1) / e * int64s),  # forward and backward
        ("wire all_reduce",
         "2 (n-1)/n (b dense + 8 L E) + 2 (n-ep)/n b experts/ep + 2 (ep-1)/ep max(4, b)",
         2 * (n - 1) / n * (b * dense + int64s) + 2 * (n - e) / n * b * of_experts
         + 2 * (e - 1) / e * max(4, b)),
        ("held states", "4 b (dense + experts/ep) + 4 per tensor (steps) + 8 L E",
         4 * b * (dense + of_experts) + 4 * len(list(model.parameters())) + int64s),  # bias_steps
    ]


def picture(run, ep, traffic):
    """Prints how many rows experts got in the last step, in the worst layer."""
    load = torch.zeros(len(traffic), ep.size(), run.args.experts // ep.size(), device=run.device)
    load[:, ep.rank()] = torch.tensor([sizes for _, sizes in traffic.values()])
    dist.all_reduce(load)  # partial -> replicated
    load = load.flatten(1).cpu()  # (L, E)
    wanted = len(traffic) * run.args.top_k * run.args.batch * run.cfg.seq
    dropped = 1 - load.sum().item() / wanted
    load = (load / load.mean(1, keepdim=True)).nan_to_num()  # a layer without load shows zeros
    worst = load.max(1).values.argmax()
    run.extra.update(load=load.tolist(), dropped=dropped)
    run.say(f"\nrows over the mean in layer {worst}, last step; {dropped:.1%} dropped")
    for e, times in enumerate(load[worst].tolist()):
        run.say(f"  expert {e:<3} {times:5.2f} {'#' * min(60, round(10 * times))}")


def main():
    args = arguments(__doc__, presets=PRESETS, **FLAGS)
    refuse(args)
    run = Run(args, build=partial(build_plain, args))
    size = args.ep or run.world_size
    mesh = dist.init_device_mesh(run.device.type, (run.world_size // size, size),
                                 mesh_dim_names=("replicas", "ep"))
    replicas, ep = mesh.get_all_groups()
    if run.dry:
        global read_counts
        read_counts = balanced_counts  # Routing calls it
        run.say("experts are taken to be balanced")
    with run:
        sides = {impl: set_up(run, impl, replicas, ep) for impl in run.impls}
        model = sides[run.impls[0]].model
        traffic = watch_traffic(model)
        own = share(args.batch, run.world_size, run.rank)  # this rank's sequences of every batch
        for impl, step, x, y, valid in run.steps(sides, own):
            side = sides[impl]
            with run.measure(impl, step):
                loss, norm = side.train_step(side.model, side.optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss, norm)
        run.textbook(account(run, model, ep, traffic))
        if not run.dry:
            picture(run, ep, traffic)
        judged_as = args.dtype
        if args.check and args.dtype == "fp32":
            run.say("\nin fp32 rounding decides near ties: only losses are judged; fp64 judges all")
            judged_as = "bf16"  # as a run in bf16, of which finish() judges losses alone
        return run.finish(partial(plain_trace, run), judged_as)


if __name__ == "__main__":
    sys.exit(main())
