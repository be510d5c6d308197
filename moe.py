"""Mixture of experts: each MLP becomes E experts, of which a token visits K; tokens travel to the ranks that hold them.

              router, sort    all-to-all    grouped matmul    all-to-all    gates
    rank 0    0 0 0 1 | 2 3   0 0 0 1 0 1   experts 0 and 1   0 0 0 1 2 3   sum of a token's K rows
    rank 1    0 1 | 2 2 3 3   2 3 2 2 3 3   experts 2 and 3   0 1 2 2 3 3   sum of a token's K rows

The ranks that share out the experts also share out the batch. With --ep R of W ranks an expert is on W/R of them,
which sum its gradient; all else is summed over W. Splits are uneven and no token is dropped; or (--capacity A) an
expert takes the first ceil(A K N / E) of a source rank's N tokens that chose it, and no more.

    on each rank, D dense and X experts' parameters of b bytes   plain MoE     here
    parameters, gradients, AdamW states                          4 b (D + X)   4 b (D + X/R)
    elements to experts and back, per token and layer            -             2 K C, and in backward 2 K C again
    all-to-alls per layer                                        -             4 of rows and 1 of sizes (8 E bytes)
    all-reduced per step                                         -             b (D + X/R), and load: 8 E per layer

Lepikhin 2020, "GShard", arXiv:2006.16668 (all-to-all, capacity); Fedus 2021, "Switch Transformers", arXiv:2101.03961,
eq. 4 (balancing); Zoph 2022, "ST-MoE", arXiv:2202.08906, eq. 5 (z-loss); DeepSeek-V3 2024, arXiv:2412.19437, sec. 2.1.2
(bias, there of sigmoids). At work: torchtitan/models/moe, Megatron's core/transformer/moe; torch has parts (section 3).

    torchrun --standalone --nproc_per_node=2 moe.py
"""
import math
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_to_all_single

from common import ANY, MLP, POSITIVE, Run, adamw, arguments, build, init_weights, loss_sum, require, share

# ---- 1. the technique (copy this; it needs only torch) -----------------------


class AllToAll(torch.autograd.Function):
    """Rows (sum(send), C) -> (sum(receive), C): send[r] of them go to rank r, receive[r] come from it."""

    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.way, out = (receive, send, group), x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)  # by destination -> by source
        return out

    @staticmethod
    def backward(ctx, g):  # autograd does not see collectives: without this no expert gets a gradient
        return AllToAll.apply(g, *ctx.way), None, None, None  # gradients go back the way the rows came


def grouped_linear(x, weight, bias, sizes, one_kernel):
    """Rows (n, C) sorted by expert, sizes[e] of e, times each one's weight (E, F, C) and plus its bias -> (n, F)."""
    if not one_kernel:  # an expert without rows gets the gradient zero, not None
        return torch.cat([F.linear(*of_one) for of_one in zip(x.split(sizes), weight, bias)])
    sizes = torch.tensor(sizes, device=x.device)
    y = F.grouped_mm(x, weight.transpose(1, 2), offs=sizes.cumsum(0).int())
    return y + bias.repeat_interleave(sizes, 0, output_size=len(x))


def route(logits, top_k, bias):
    """(N, E) -> chosen experts (N, K), gates (N, K), probabilities (N, E). The bias (E,) is for the choice alone."""
    probs = logits.softmax(-1)
    chosen = (probs + bias).topk(top_k).indices
    gates = probs.gather(-1, chosen)  # K > 1: made to sum to 1. A single one would always be 1 and teach nothing
    return chosen, (gates / gates.sum(-1, keepdim=True) if top_k > 1 else gates), probs


def balancing_loss(load, logits, probs, top_k, alpha=0.1, beta=1e-3):
    """alpha E sum f_i P_i (Switch: 0.01) + beta mean(logsumexp^2) (ST-MoE): this rank's part of it. load (E,):
    choices of all ranks' tokens, so that f is the global batch's; logits, probs (N, E): of this rank's tokens."""
    f, tokens = load.to(probs.dtype) / load.sum(), load.sum() / top_k
    return (alpha * len(f) * (f @ probs.sum(0)) + beta * logits.logsumexp(-1).square().sum()) / tokens


def capacity(factor, top_k, tokens, experts):
    return math.ceil(round(factor * top_k * tokens / experts, 6))  # 1.1 * 2 * 40 / 8 is 11.000000000000002


class MoE(nn.Module):
    """E experts behind a router, in place of an MLP. `mlps`: this ep rank's E/R, with Linears up and down. Groups: ep
    shares out the experts, everyone the tokens. A forward leaves `loss`, this rank's part of the balancing loss, to be
    added to the model's; `load` (E,), how often all ranks' tokens chose each expert; the experts `chosen` here; and the
    rows `sent` to and `came` from each ep rank. `balanced`: they are taken to be chosen equally often, unread."""

    def __init__(self, router, mlps, shared, top_k, ep, everyone=None, balance="aux", limit=0.0, balanced=False):
        super().__init__()
        self.router, self.shared, self.top_k, self.ep, self.everyone = router, shared, top_k, ep, everyone
        self.balance, self.limit, self.balanced, self.exchange = balance, limit, balanced, AllToAll.apply
        stacks = torch.func.stack_module_state(mlps)[0]  # up.weight (E/R, F, C), up.bias (E/R, F), and down's
        self.experts = nn.ParameterDict({name.replace(".", "_"): p for name, p in stacks.items()})
        self.one_kernel = router.weight.is_cuda and router.weight.dtype == torch.bfloat16  # where it pays
        self.register_buffer("bias", torch.zeros_like(router.weight[:, 0], dtype=torch.float64))  # bf16 is too coarse

    def forward(self, x):  # (.., C)
        x, shape, k, here = x.flatten(0, -2), x.shape, self.top_k, len(self.experts.up_bias)  # (N, C)
        with torch.autocast(x.device.type, enabled=False):  # the router in fp32 or better, whatever is around
            logits = F.linear(*(t.to(torch.promote_types(t.dtype, torch.float32)) for t in (x, self.router.weight)))
        self.chosen, gates, probs = route(logits, k, self.bias)
        slots = self.chosen.flatten()  # (N K), one for each choice of each token
        own = torch.zeros_like(self.bias, dtype=torch.int64).scatter_add_(0, slots, torch.ones_like(slots))
        self.load = own.clone()
        summing = dist.all_reduce(self.load, group=self.everyone, async_op=True)  # partial -> replicated
        most = capacity(self.limit, k, len(x), len(own)) if self.limit else len(x)
        send, come = own.clamp(max=most), torch.empty_like(own)
        dist.all_to_all_single(come, send, group=self.ep)  # mine for each expert -> each rank's for the experts here
        if self.balanced:
            own = [(len(slots) + i) // len(own) for i in range(len(own))]
            send = [min(most, n) for n in own]
            counts = send[dist.get_rank(self.ep) * here:][:here] * (len(own) // here)
        else:
            own, send, counts = torch.stack([own, send, come]).tolist()  # the host waits here, and only here
        self.sent, self.came = ([sum(n[i:i + here]) for i in range(0, len(n), here)] for n in (send, counts))
        slots = slots.argsort(stable=True)  # by expert, and those of one expert by token
        slots = torch.cat([chose[:n] for chose, n in zip(slots.split(own), send)])  # (S), without the dropped
        which = torch.arange(here, device=x.device).repeat(len(self.came))  # expert of each count, source by source
        by_expert = which.repeat_interleave(come, output_size=sum(counts)).argsort(stable=True)
        sizes = [sum(counts[e::here]) for e in range(here)]
        rows = self.exchange(x.index_select(0, slots // k), self.sent, self.came, self.ep)  # home -> experts' ranks
        rows, w = rows.index_select(0, by_expert), self.experts
        rows = F.gelu(grouped_linear(rows, w.up_weight, w.up_bias, sizes, self.one_kernel), approximate="tanh")
        rows = grouped_linear(rows, w.down_weight, w.down_bias, sizes, self.one_kernel)
        rows = torch.empty_like(rows).index_copy(0, by_expert, rows)  # by source again
        rows = self.exchange(rows, self.came, self.sent, self.ep)  # experts' ranks -> home
        rows = rows.new_zeros(len(x) * k, x.shape[1]).index_copy(0, slots, rows).view(-1, k, x.shape[1])  # dropped: 0
        y = (gates.to(x.dtype).unsqueeze(1) @ rows).view(shape)  # (N, 1, K) @ (N, K, C)
        summing.wait()
        self.loss = balancing_loss(self.load, logits, probs, k) if self.balance == "aux" else 0
        return y if self.shared is None else y + self.shared(x.view(shape))


def sum_gradients(model, replicas, ep, everyone=None, gamma=1e-2):
    """After backward: experts' gradients over holders of the same, others over all ranks -> norm. Moves the biases."""
    layers, squares = [m for m in model.modules() if isinstance(m, MoE)], []
    experts = {p for m in layers for p in m.experts.parameters()}
    for of_expert, group in (False, everyone), (True, replicas):
        grads = [p.grad for p in model.parameters() if (p in experts) == of_expert and p.grad is not None]
        if grads and dist.get_world_size(group) > 1:
            flat = nn.utils.parameters_to_vector(grads)
            dist.all_reduce(flat, group=group)  # partial -> replicated; ddp.py hides it behind backward
            nn.utils.vector_to_parameters(flat, grads)
        squares.append(nn.utils.get_total_norm(grads).square())
    dist.all_reduce(squares[1], group=ep)  # partial -> replicated: every expert counts once
    for m in layers:  # towards experts chosen less often than the mean (DeepSeek-V3: 1e-3, in 10^5 steps)
        m.bias += gamma * (m.balance == "bias") * (m.load.sum() - len(m.load) * m.load).sign().double()
    return sum(squares).sqrt()


# ---- 2. the toy GPT, parallelized --------------------------------------------


class PlainMoE(nn.Module):
    """The definition, in one process: the sum of all experts times their gates, all but K of which are zero."""

    def __init__(self, cfg, args):
        super().__init__()
        self.args, self.router = args, nn.Linear(cfg.width, args.experts, bias=False)
        self.experts = nn.ModuleList(MLP(cfg) for _ in range(args.experts))
        self.shared = MLP(cfg) if args.shared else None
        self.register_buffer("bias", torch.zeros(args.experts))

    def forward(self, x):  # (B, T, C) of all ranks
        a, logits = self.args, self.router(x)  # (B, T, E)
        probs = logits.softmax(-1)
        chosen = self.choices.pop(0) if self.choices else (probs + self.bias).topk(a.top_k).indices
        chose = F.one_hot(chosen, a.experts).sum(-2).view_as(probs)  # (B, T, E) of 0 and 1
        gates = probs * chose / ((probs * chose).sum(-1, keepdim=True) if a.top_k > 1 else 1)
        if a.capacity:  # of each source rank's tokens
            turn = chose.view(a.world_size, -1, a.experts).cumsum(1)
            gates = gates * (turn <= capacity(a.capacity, a.top_k, turn.shape[1], a.experts)).view_as(gates)
        load = chose.sum((0, 1)).to(x.dtype)
        switch, z = a.experts * (load * probs.mean((0, 1))).sum() / load.sum(), logits.logsumexp(-1).square().mean()
        self.loss = 0.1 * switch + 1e-3 * z if a.balance == "aux" else 0
        self.bias += 1e-2 * (load.mean() - load).sign() * (a.balance == "bias")  # for the next step
        y = (gates[..., e, None] * expert(x) for e, expert in enumerate(self.experts))
        return sum(y, self.shared(x) if self.shared else 0)


def build_plain(run, choices=()):  # the ranks' choices, since in fp32 rounding decides near ties
    model = build(run.cfg, run.args.seed, run.device, run.dtype)
    torch.set_default_dtype(run.dtype)
    with torch.device(run.device):
        for i, block in enumerate(model.blocks):
            block.mlp = PlainMoE(run.cfg, run.args)
            block.mlp.choices = [torch.cat([of_rank[i] for of_rank in step]) for step in choices]
    init_weights(model, run.cfg.layers, run.args.seed)  # every expert by its own name
    return model


def parallelize(model, mesh, balanced=False):
    """Each layer of the plain MoE -> one with this rank's share of its experts. mesh: replicas x ep."""
    for block in model.blocks:
        old, args, ep = block.mlp, block.mlp.args, mesh.get_group("ep")
        mine = [old.experts[e] for e in share(args.experts, ep.size(), ep.rank())]
        block.mlp = MoE(old.router, mine, old.shared, args.top_k, ep, None, args.balance, args.capacity, balanced)
    return model


def full_state_dict(model, mesh, tensors=None):
    """{name: tensor} of the plain MoE, each expert by its number: the state, or other tensors of the same names."""
    full = dict(tensors or model.state_dict())
    for name in [name for name in full if ".experts." in name]:
        parts = [torch.empty_like(full[name]) for _ in range(mesh["ep"].size())]
        dist.all_gather(parts, full.pop(name), group=mesh.get_group("ep"))  # sharded(0) -> replicated
        stem, kind = name.replace("_", ".").split("experts")
        full.update((f"{stem}experts.{e}{kind}", t) for e, t in enumerate(torch.cat(parts)))
    return full


def full_gradients(model, mesh):
    return full_state_dict(model, mesh, {name: p.grad for name, p in model.named_parameters()})


def train_step(model, optimizer, x, y, valid, clip, mesh):
    """x, y: this rank's rows (B/W, T); valid: of the whole batch -> this rank's part of the loss, gradient norm."""
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid + sum(block.mlp.loss for block in model.blocks)
    loss.backward()
    norm = sum_gradients(model, *mesh.get_all_groups())  # partial -> replicated
    nn.utils.clip_grads_with_norm_(model.parameters(), clip or math.inf, norm.nan_to_num(0, posinf=0))
    optimizer.step()
    return loss, norm


# ---- 3. at work: the same with torch's own API -------------------------------


def parallelize_at_work(model, mesh, balanced=False):
    """torch has no such layer: routing, sorting and bookkeeping stay section 1's. grouped_mm knows no fp64."""
    for block in parallelize(model, mesh, balanced).blocks:
        block.mlp.exchange = lambda x, send, receive, group: all_to_all_single(
            x.new_empty(sum(receive), x.shape[1]), x, receive, send, group)
        block.mlp.one_kernel = block.mlp.router.weight.dtype != torch.float64
    return model


# ---- 4. run ------------------------------------------------------------------


def report(run, layers, loads, dense, experts, tensors):  # this rank's parameters, in so many tensors
    b, w, r, ledger = run.dtype.itemsize, run.world_size, layers[0].ep.size(), run.ledger[run.impls[0]]
    row, sizes, moved = 2 * b * run.cfg.width, 8 * len(layers) * run.args.experts, ledger.collectives
    rows, stay = sum(sum(m.sent + m.came) for m in layers), 2 * sum(m.sent[m.ep.rank()] for m in layers)
    run.textbook("all-to-all", "2 b C (rows out + rows in) + 8 L E", row * rows + sizes, moved["all_to_all"]["payload"])
    run.textbook("wire all_to_all", "2 b C (rows out + rows in - 2 rows staying) + (R-1)/R 8 L E",
                 row * (rows - stay) + sizes * (r - 1) / r, moved["all_to_all"]["wire"])
    reduced = 2 * ((w - 1) * (b * dense + sizes) + (w - r) * b * experts + (w - w // r) * b) / w
    run.textbook("wire all_reduce", "2 (W-1)/W (b D + 8 L E) + 2 (W-R)/W b X/R + 2 (R-1)/R b",
                 reduced, moved["all_reduce"]["wire"])
    run.textbook("parameters, gradients, AdamW states", "4 b (D + X/R) + 4 per tensor (steps) + 8 L E of biases",
                 4 * b * (dense + experts) + 4 * tensors + sizes, sum(list(ledger.memory.values())[:3]))
    if not run.dry:
        load, n = torch.stack(loads) / loads[0].double().mean(), math.ceil(len(loads) / 10)  # (S, L, E), a tenth of S
        first, last = load[:n].mean(0), load[-n:].mean(0)
        worst, dropped = last.max(1).values.argmax(), 1 - sum(sum(m.sent) for m in layers) * w / loads[0].sum().item()
        run.extra.update(load=dict(first=first.tolist(), last=last.tolist()), dropped=dropped)
        run.say(f"\nload over the mean in layer {worst}, first and last {n} steps; rank 0 dropped {dropped:.1%}")
        for e, pair in enumerate(zip(first[worst].tolist(), last[worst].tolist())):
            run.say(f"  expert {e:<3}", "   ".join(f"{x:5.2f} {'#' * round(10 * x):30.30}" for x in pair))


def main():
    args = arguments(__doc__, experts=(8, "E in each layer", POSITIVE), top_k=(2, "K, experts per token", POSITIVE),
                     ep=(0, "R, ranks that share out the experts (0: all)", ANY), shared=(False, "one for every token"),
                     capacity=(0.0, "A: an expert takes A times its share (0: everything)", ANY),
                     balance=("aux", "a loss, a bias in the choice, or nothing", ("aux", "bias", "none")))
    w, e, r = args.world_size, args.experts, args.ep or args.world_size
    require(args.top_k <= e, f"--top-k {args.top_k} of --experts {e}: choose {e} at most")
    require(w % r == 0, f"--ep {r} does not divide the {w} ranks: take a divisor of {w}")
    require(e % r == 0, f"--experts {e} for {r} ranks: take a multiple of {r}, or another --ep")
    require(args.batch % w == 0, f"--batch {args.batch} sequences for {w} ranks: take a multiple of {w}")
    require(args.impl == "scratch" or not args.dry_run or args.dtype == "bf16", "torch's dry run wants --dtype bf16")
    run = Run(args)
    mesh = dist.init_device_mesh(run.device.type, (w // r, r), mesh_dim_names=("replicas", "ep"))
    with run:
        sides, loads, choices = {}, [], []
        for impl in run.impls:
            model = (parallelize if impl == "scratch" else parallelize_at_work)(build_plain(run), mesh, run.dry)
            sides[impl] = model, adamw(model.parameters(), args.lr), [block.mlp for block in model.blocks]
        sizes = [p.numel() for p in model.parameters()]
        experts = sum(p.numel() for m in sides[impl][2] for p in m.experts.parameters())
        run.say(f"moe: {w} ranks on {run.device.type}, {args.dtype}, {sum(sizes) + (r - 1) * experts:,} parameters, "
                f"{sum(sizes):,} here" + run.dry * "; dry run: experts are taken to be balanced")
        for impl, step in run.steps():
            model, optimizer, layers = sides[impl]
            x, y, valid = run.batch(step, share(args.batch, w, run.rank))
            with run.measure(impl, step, model, optimizer):
                loss, norm = train_step(model, optimizer, x, y, valid, args.clip, mesh)
            run.log(impl, step, loss, norm, full_gradients, full_state_dict, model, mesh)
            if impl == run.impls[0]:
                loads.append(torch.stack([m.load for m in layers]))
            if impl == run.impls[0] and args.check and args.dtype != "fp64" and not run.dry:
                choices.append([torch.stack([m.chosen for m in layers]) for _ in range(w)])  # (L, N, K) of each rank
                dist.all_gather(choices[-1], choices[-1][run.rank])  # sharded(1) -> replicated
        report(run, sides[run.impls[0]][2], loads, sum(sizes) - experts, experts, len(sizes))
        plain = run.plain(build_plain(run, choices)) if args.check and not run.dry and run.rank == 0 else None
        return run.finish(sum(sizes) + (r - 1) * experts, sum(sizes), plain)


if __name__ == "__main__":
    sys.exit(main())
