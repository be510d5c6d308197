"""Mixture of experts: each MLP becomes E experts, of which a token visits K; tokens travel to the ranks that hold them.

              router, sort    all-to-all    grouped matmul    all-to-all    gates
    rank 0    0 0 0 1 | 2 3   0 0 0 1 0 1   experts 0 and 1   0 0 0 1 2 3   sum of a token's K rows
    rank 1    0 1 | 2 2 3 3   2 3 2 2 3 3   experts 2 and 3   0 1 2 2 3 3   sum of a token's K rows

The ranks that share out the experts also share out the batch. With --ep R < W, each expert is on W/R ranks, and its
gradient is summed over these alone; all others (router, attention, shared expert) are summed over all W ranks. Splits
are uneven and no choice is dropped, unless --capacity C says so: then an expert takes the first ceil(C K N / E) of a
source rank's N tokens that chose it; the others get nothing from it but their residual.

    on each rank, D dense and X experts' parameters of b bytes      plain MoE    here
    parameters, gradients, AdamW states                             4 b (D + X)  4 b (D + X/R)
    elements to and from experts, per token and layer               -            K C + K C, and again in backward
    all-to-alls per layer                                           -            4, and 1 of E sizes of 8 bytes
    all-reduced per step                                            -            b (D + X/R), and 8 E per layer: load

Shazeer et al. 2017, arXiv:1701.06538 (top k); Lepikhin et al. 2020, "GShard", arXiv:2006.16668 (all-to-all, capacity);
Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961, eq. 4 (balancing loss); Zoph et al. 2022, "ST-MoE",
arXiv:2202.08906, eq. 5 (z-loss); DeepSeek-AI 2024, "DeepSeek-V3", arXiv:2412.19437, section 2.1.2 (balancing bias).
At work: no module in torch, but all_to_all_single with autograd and F.grouped_mm (section 3 below). Whole layers are in
torchtitan (torchtitan/models/moe, distributed/expert_parallel.py) and Megatron (megatron/core/transformer/moe).

    torchrun --standalone --nproc_per_node=2 moe.py
"""
import math
import sys
from collections import namedtuple
from fractions import Fraction

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_to_all_single

from common import ANY, MLP, POSITIVE, Run, adamw, arguments, build, init_weights, loss_sum, require, share
from measure import Trace

# ---- 1. the technique (copy this; it needs only torch) -----------------------

# ranks that share out the batch, ranks that share out the experts, ranks that hold the same experts
Groups = namedtuple("Groups", "tokens ep replicas")


class AllToAll(torch.autograd.Function):
    """Rows (sum(send), C) -> (sum(receive), C): send[r] of them go to rank r, receive[r] come from it."""

    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.way = send, receive, group
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)  # by destination -> by source
        return out

    @staticmethod
    def backward(ctx, g):
        """Gradients go back as the rows came. Autograd does not see collectives: without this, no expert gets any."""
        send, receive, group = ctx.way
        return AllToAll.apply(g, receive, send, group), None, None, None


class Stack(nn.Module):
    """Linears of one shape as one weight (E, F, C) and one bias (E, F). forward: rows (n, C), sizes[e] of expert e."""

    def __init__(self, linears):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.stack([getattr(f, name).detach() for f in linears]))
                                  for name in ("weight", "bias"))
        # one kernel for all experts, where it pays
        self.grouped = self.weight.is_cuda and self.weight.dtype == torch.bfloat16 and hasattr(F, "grouped_mm")

    def forward(self, x, sizes):  # (n, C) -> (n, F); an expert without rows gets the gradient zero, not None
        if not self.grouped:
            return torch.cat([F.linear(*of_one) for of_one in zip(x.split(sizes), self.weight, self.bias)])
        sizes = torch.tensor(sizes, device=x.device)
        y = F.grouped_mm(x, self.weight.transpose(1, 2), offs=sizes.cumsum(0).int())
        return y + self.bias.repeat_interleave(sizes, 0, output_size=len(x))


def route(logits, top_k, bias=None):
    """(N, E) -> chosen experts (N, K), their gates (N, K), all probabilities (N, E).

    The bias enters the choice, never the gate (DeepSeek-V3, eq. 16). Gates are renormalized to the sum 1; a single one
    is its probability (Switch, eq. 2): renormalized it would always be 1, and the router would learn nothing.
    """
    probs = logits.softmax(-1)
    chosen = (probs if bias is None else probs + bias).topk(top_k).indices
    gates = probs.gather(-1, chosen)
    return chosen, gates / gates.sum(-1, keepdim=True) if top_k > 1 else gates, probs


def balancing_loss(load, logits, probs, top_k, alpha=1e-2, beta=1e-3):
    """alpha E sum f_i P_i (Switch) + beta mean(logsumexp^2) (ST-MoE). logits, probs (N, E) are of this rank's tokens.

    load (E,) are the choices of all ranks' tokens, so f is the global batch's, without gradient; sums over this rank's
    tokens are divided by the global number of tokens, so the ranks' parts add up to the loss.
    """
    load = load.to(probs.dtype)
    switch, z = len(load) * (load / load.sum() @ probs.sum(0)), logits.logsumexp(-1).square().sum()
    return (alpha * switch + beta * z) * top_k / load.sum()


def capacity(factor, top_k, tokens, experts):
    return math.ceil(round(factor * top_k * tokens / experts, 6))  # rounded: 1.1 * 2 * 40 / 8 = 11.000000000000002


def transpose(x, sizes):
    """Rows in chunks of sizes[i][j], laid out by i and then j -> the same chunks by j and then i."""
    chunks, columns = x.split(sum(sizes, [])), len(sizes[0])
    return torch.cat([chunks[i * columns + j] for j in range(columns) for i in range(len(sizes))])


class MoE(nn.Module):
    """E experts behind a router, in place of an MLP. `mlps` are this ep rank's E/R, with Linears up and down.

    A forward leaves `loss`, this rank's part of the balancing loss, to be added to the model's; `load` (E,), how often
    all ranks' tokens chose each expert; `rows` that this rank sent, received, and sent to itself, one way.
    `balanced` takes experts to be chosen equally often and reads no values: for tensors that have none.
    """

    def __init__(self, router, mlps, shared, groups, top_k, balance="aux", capacity=0.0, balanced=False):
        super().__init__()
        self.router, self.shared, self.groups, self.here = router, shared, groups, len(mlps)
        self.up, self.down = Stack([m.up for m in mlps]), Stack([m.down for m in mlps])
        self.top_k, self.balance, self.capacity, self.balanced, self.loss = top_k, balance, capacity, balanced, 0
        self.register_buffer("bias", torch.zeros_like(router.weight[:, 0]) if balance == "bias" else None)
        self.exchange = AllToAll.apply  # an attribute, so that it can be exchanged

    def forward(self, x):  # (.., C)
        tokens, k, precise = x.flatten(0, -2), self.top_k, torch.promote_types(x.dtype, torch.float32)  # (N, C)
        logits = F.linear(tokens.to(precise), self.router.weight.to(precise))  # (N, E)
        chosen, gates, probs = route(logits, k, self.bias)
        slots = chosen.flatten()  # one for each choice of each token: (N K)
        own = torch.zeros_like(probs[0], dtype=torch.int64).scatter_add_(0, slots, torch.ones_like(slots))
        self.load = own.clone()
        summing = dist.all_reduce(self.load, group=self.groups.tokens, async_op=True)  # partial -> replicated
        own, send, come = self.sizes(own, len(tokens))
        slots = slots.argsort(stable=True)  # by expert, and of each expert in the order of tokens
        slots = torch.cat([chose[:n] for chose, n in zip(slots.split(own), send)])  # (S), the others are dropped
        rows = self.visit(tokens.index_select(0, slots // k), send, come)  # (S, C)
        rows = rows.new_zeros(len(tokens) * k, x.shape[-1]).index_copy(0, slots, rows).view(len(tokens), k, -1)
        y = (gates.to(x.dtype).unsqueeze(1) @ rows).view_as(x)  # (N, 1, K) @ (N, K, C)
        summing.wait()
        if self.balance == "aux":
            self.loss = balancing_loss(self.load, logits, probs, k)
        return y if self.shared is None else y + self.shared(x)

    def sizes(self, own, tokens):
        """This rank's choices (E,) -> a list; rows it sends to each expert; rows that come: R lists of E/R."""
        limit = capacity(self.capacity, self.top_k, tokens, len(own)) if self.capacity else tokens
        send = own.clamp(max=limit)
        come = torch.empty_like(send)
        dist.all_to_all_single(come, send, group=self.groups.ep)  # by expert -> by source, of the experts here
        if self.balanced:
            own, first = [(tokens * self.top_k + i) // len(own) for i in range(len(own))], dist.get_rank(self.groups.ep)
            send = [min(limit, n) for n in own]
            come = send[first * self.here:][:self.here] * (len(own) // self.here)
        else:
            own, send, come = torch.stack([own, send, come]).tolist()  # the only time that the host waits
        return own, send, [come[i:i + self.here] for i in range(0, len(come), self.here)]

    def visit(self, rows, send, come):
        """Rows (S, C) sorted by expert -> what the experts make of them, in the same order."""
        there = [sum(send[i:i + self.here]) for i in range(0, len(send), self.here)]
        back, columns = [sum(sizes) for sizes in come], [list(sizes) for sizes in zip(*come)]
        sizes, self.rows = [sum(c) for c in columns], (sum(there), sum(back), there[dist.get_rank(self.groups.ep)])
        rows = self.exchange(rows, there, back, self.groups.ep)  # on the token's rank -> on the expert's, by source
        rows = F.gelu(self.up(transpose(rows, come), sizes), approximate="tanh")  # by expert
        rows = transpose(self.down(rows, sizes), columns)  # by source again
        return self.exchange(rows, back, there, self.groups.ep)  # on the expert's rank -> on the token's

    @torch.no_grad()
    def move_bias(self, gamma=1e-3):
        """Once a step, towards experts chosen less often than the mean (DeepSeek-V3, section 2.1.2)."""
        if self.balance == "bias":
            load = self.load.to(self.bias.dtype)
            self.bias += gamma * (load.mean() - load).sign()


def expert_parameters(model):
    return dict.fromkeys(p for m in model.modules() if isinstance(m, Stack) for p in m.parameters())


def sum_gradients(model, groups):
    """After backward: dense gradients over all ranks, experts' over the holders of the same -> norm of the whole.

    One flat all-reduce each, after backward: ddp.py shows how to hide it.
    """
    experts, squares = expert_parameters(model), []
    for parameters, group in ([p for p in model.parameters() if p not in experts], groups.tokens), (experts, groups.replicas):
        # None here may be a gradient elsewhere, and all ranks must reduce the same
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        dist.all_reduce(flat, group=group)  # partial -> replicated
        for p, grad in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad = grad.view_as(p)
        squares.append(flat.norm().square())
    dist.all_reduce(squares[1], group=groups.ep)  # partial -> replicated: every expert counts once
    return sum(squares).sqrt()


# ---- 2. the toy GPT, parallelized --------------------------------------------


class PlainMoE(nn.Module):
    """The definition, in one process: a sum over experts, each for the tokens that chose it. parts: rows of each rank"""

    def __init__(self, cfg, args):
        super().__init__()
        self.router, self.shared = nn.Linear(cfg.width, args.experts, bias=False), MLP(cfg) if args.shared else None
        self.experts, self.args = nn.ModuleList(MLP(cfg) for _ in range(args.experts)), args
        self.register_buffer("bias", torch.zeros(args.experts) if args.balance == "bias" else None)

    def forward(self, x):
        args, (B, T, C), x = self.args, x.shape, x.flatten(0, 1)
        logits = self.router(x)
        probs = logits.softmax(1)
        score = probs if self.bias is None else probs + self.bias
        chose = F.one_hot(score.topk(args.top_k).indices, args.experts).sum(1)  # (N, E) of 0 and 1
        gates = probs * chose / ((probs * chose).sum(1, keepdim=True) if args.top_k > 1 else 1)
        if args.capacity:
            parts = chose.split([T * len(share(B, args.world_size, r)) for r in range(args.world_size)])
            kept = [n.cumsum(0) <= capacity(args.capacity, args.top_k, len(n), args.experts) for n in parts]
            gates = gates * torch.cat(kept)
        y = self.shared(x) if self.shared else torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = gates[:, e].nonzero()[:, 0]
            y = y.index_add(0, rows, gates[rows, e, None] * expert(x[rows]))
        load = chose.sum(0).to(x.dtype)
        switch = args.experts * (load * probs.mean(0)).sum() / load.sum()
        self.loss = 1e-2 * switch + 1e-3 * (logits.logsumexp(1) ** 2).mean()
        if args.balance == "bias":
            self.bias += 1e-3 * (load.mean() - load).sign()  # for the next step
        return y.view(B, T, C)


def build_plain(run):
    model = build(run.cfg, run.args.seed, run.device, run.dtype)
    for block in model.blocks:
        block.mlp = PlainMoE(run.cfg, run.args).to(model.pos.weight)
    init_weights(model, run.cfg.layers, run.args.seed)  # every expert by its own name
    return model


def plain_run(run):
    """The same steps by the plain MoE in this process -> Trace"""
    model, trace, args = build_plain(run), Trace(), run.args
    optimizer = adamw(model.parameters(), args.lr)
    for step in range(run.last + 1):
        x, y, valid = run.batch(step)
        optimizer.zero_grad()
        loss = loss_sum(model(x), y) / valid + (args.balance == "aux") * sum(block.mlp.loss for block in model.blocks)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
        optimizer.step()
        trace.log(step, loss, norm)
        if run.keeps(step):
            trace.keep(step, {n: p.grad for n, p in model.named_parameters()}, model.state_dict())
    return trace


def parallelize(model, groups, balanced=False):
    """Each layer of the plain MoE -> one with this rank's share of its experts."""
    for block in model.blocks:
        plain, args = block.mlp, block.mlp.args
        mine = share(args.experts, dist.get_world_size(groups.ep), dist.get_rank(groups.ep))
        block.mlp = MoE(plain.router, [plain.experts[e] for e in mine], plain.shared, groups,
                        args.top_k, args.balance, args.capacity, balanced)
    return model


def full_state_dict(model, groups, tensors=None):
    """{name: tensor} of the plain MoE, each expert by its number: the state, or other tensors by the same names."""
    whole = {}
    for name, t in (tensors or model.state_dict()).items():
        if ".mlp.up." in name or ".mlp.down." in name:
            parts = [torch.empty_like(t) for _ in range(dist.get_world_size(groups.ep))]
            dist.all_gather(parts, t.contiguous(), group=groups.ep)  # sharded(0) -> replicated
            whole.update((name.replace("mlp", f"mlp.experts.{e}"), one) for e, one in enumerate(torch.cat(parts)))
        else:
            whole[name] = t
    return whole


def full_gradients(model, groups):
    return full_state_dict(model, groups, {name: p.grad for name, p in model.named_parameters()})


def train_step(model, optimizer, x, y, valid, clip, groups):
    """x, y: this rank's rows (B/W, T); valid: of the whole batch -> this rank's part of the loss, gradient norm."""
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid + sum(block.mlp.loss for block in model.blocks)
    loss.backward()
    norm = sum_gradients(model, groups)  # partial -> replicated
    nn.utils.clip_grads_with_norm_(model.parameters(), clip or math.inf, norm)
    optimizer.step()
    for block in model.blocks:
        block.mlp.move_bias()
    return loss, norm


# ---- 3. at work: the same with torch's own API -------------------------------


def exchange_at_work(x, send, receive, group):
    return all_to_all_single(x.new_empty(sum(receive), *x.shape[1:]), x, receive, send, group=group)


def parallelize_at_work(model, groups, balanced=False):
    """torch has no such layer: routing, sorting and bookkeeping stay section 1's. grouped_mm knows no fp64."""
    for block in parallelize(model, groups, balanced).blocks:
        block.mlp.exchange = exchange_at_work
        block.mlp.up.grouped = block.mlp.down.grouped = block.mlp.up.weight.dtype != torch.float64
    return model


# ---- 4. run ------------------------------------------------------------------


def textbook(run, model, tokens, own, experts, r):
    """Of this rank: tokens of the batch, parameters, and those of them in experts. r: ranks that share out the experts"""
    args, b, n, ledger = run.args, run.dtype.itemsize, run.world_size, run.ledger[run.impls[0]]
    sent, come, stay = (sum(column) for column in zip(*(block.mlp.rows for block in model.blocks)))
    row, sizes = 2 * b * run.cfg.width, 8 * run.cfg.layers * args.experts
    if not args.capacity:
        run.textbook("rows to experts", "L K N", run.cfg.layers * args.top_k * tokens, sent)
    run.textbook("all-to-alls", "2 b C (rows out + rows in) + 8 L E", row * (sent + come) + sizes,
                 ledger.collectives["all_to_all"]["payload"])
    run.textbook("wire all_to_all", "2 b C (rows out + rows in - 2 rows staying) + (R-1)/R 8 L E",
                 row * (sent + come - 2 * stay) + Fraction(r - 1, r) * sizes, ledger.collectives["all_to_all"]["wire"])
    run.textbook("wire all_reduce", "2 (W-1)/W (b D + 8 L E) + 2 (W-R)/W b X/R + 2 (R-1)/R b",
                 Fraction(2 * (n - 1), n) * (b * (own - experts) + sizes) + Fraction(2 * (n - r), n) * b * experts
                 + Fraction(2 * (r - 1), r) * b, ledger.collectives["all_reduce"]["wire"])
    extra = sum(t.nbytes for t in model.buffers()) + 4 * len(list(model.parameters()))
    run.textbook("parameters, gradients, AdamW states", "4 b (D + X/R) + biases + 4 per tensor (step counter)",
                 4 * b * own + extra, sum(ledger.memory[k] for k in ("parameters", "gradients", "optimizer")))


def show_load(run, loads, dropped):
    """How often the experts of the least even layer were chosen, at the first and at the last step, over their mean."""
    first, last = (load / load.mean(1, keepdim=True) for load in loads)  # (L, E)
    layer = last.max(1).values.argmax()
    run.say(f"\nexpert load over the mean, layer {layer}, at the first and at the last step")
    for e, pair in enumerate(zip(first[layer].tolist(), last[layer].tolist())):
        run.say(f"  expert {e:<3}", "   ".join(f"{n:5.2f} {'#' * round(10 * n):30.30}" for n in pair))
    run.say(f"  largest of any layer: {first.max():.2f}, then {last.max():.2f}; dropped at the last step: {dropped:.1%}")
    run.extra["load"], run.extra["dropped"] = dict(first=first.tolist(), last=last.tolist()), dropped


def main():
    args = arguments(__doc__, experts=(8, "E in each layer", POSITIVE), top_k=(2, "K, experts per token", POSITIVE),
                     ep=(0, "R, ranks that share out the experts (0: all)", ANY), shared=(False, "one for every token"),
                     capacity=(0.0, "C: an expert takes C times its share (0: everything)", ANY),
                     balance=("aux", "a loss, a bias in the choice, or nothing", ("aux", "bias", "none")))
    n, e, r = args.world_size, args.experts, args.ep or args.world_size
    require(args.batch >= n, f"--batch {args.batch} sequences for {n} ranks: give each at least one")
    require(args.top_k <= e, f"--top-k {args.top_k} of --experts {e}: choose {e} at most")
    require(n % r == 0, f"--ep {r} does not divide the {n} ranks")
    require(e % r == 0, f"--experts {e} cannot be shared out equally to {r} ranks: take a multiple, or another --ep")
    run = Run(args)
    mesh = init_device_mesh(run.device.type, (n // r, r), mesh_dim_names=("replicas", "ep"))
    groups = Groups(dist.group.WORLD, mesh["ep"].get_group(), mesh["replicas"].get_group())
    with run:
        sides, loads = {}, []
        for impl in run.impls:
            model = (parallelize if impl == "scratch" else parallelize_at_work)(build_plain(run), groups, run.dry)
            sides[impl] = model, adamw(model.parameters(), args.lr)
        own, experts = (sum(p.numel() for p in parts) for parts in (model.parameters(), expert_parameters(model)))
        total = own + (r - 1) * experts
        run.say(f"moe: {n} ranks on {run.device.type}, {args.dtype}, {e} experts on {r}, {total:,} parameters, "
                f"{own:,} on this rank" + ", dry run: experts taken to be balanced" * run.dry)
        for impl, step in run.steps():
            model, optimizer = sides[impl]
            x, y, valid = run.batch(step, share(args.batch, n, run.rank))
            with run.measure(impl, step, model, optimizer):
                loss, norm = train_step(model, optimizer, x, y, valid, args.clip, groups)
            run.log(impl, step, loss, norm)
            if run.keeps(step):
                run.trace[impl].keep(step, full_gradients(model, groups), full_state_dict(model, groups))
            if step in (0, run.last) and impl == run.impls[0]:
                loads.append(torch.stack([block.mlp.load for block in model.blocks]).double())
        textbook(run, sides[run.impls[0]][0], x.numel(), own, experts, r)
        if not run.dry:
            kept = torch.tensor(float(sum(block.mlp.rows[0] for block in model.blocks)), device=run.device)
            dist.all_reduce(kept)  # partial -> replicated
            show_load(run, (loads[0], loads[-1]), 1 - kept.item() / loads[-1].sum().item())
        plain = plain_run(run) if args.check and not run.dry and run.rank == 0 else None
        return run.finish(total, own, plain)


if __name__ == "__main__":
    sys.exit(main())
