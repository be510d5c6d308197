"""Mixture of experts: each MLP becomes E, a token visits K of them, and tokens travel to the ranks that hold them.

                 chosen, sorted by expert     all-to-all      grouped matmul     all-to-all      gates
    rank 0   x   0 0 0 1 1 | 2 3 3 3       0 0 0 1 1 0 0 1    experts 0 1       home again   sum of K rows
    rank 1   x   0 0 1 | 2 2 2 2 3 3       2 3 3 3 2 2 2 2 3 3    experts 2 3   home again   sum of K rows

The batch is spread over the same ranks. With --ep R of W ranks, W/R ranks hold the same experts and sum their gradients;
all others (router, attention, shared expert) are summed over all W. Splits are uneven: no token waits, none is dropped,
unless --capacity C says so: then an expert takes ceil(C K N / E) of a source rank's N tokens, in their order; the
others pass it by on the residual.

    on each rank, D dense and X experts' parameters of b bytes     plain MoE     here
    parameters, gradients, AdamW states                            4 b (D + X)   4 b (D + X/R)
    all-to-alls per layer                                          -             1 + 4: sizes, then rows there and back, twice
    rows sent per token and layer, C elements each                 -             K there, K back; backward the same
    sizes sent per layer, 8 bytes each                             -             E, and E by an all-reduce (for balancing)

Shazeer 2017, arXiv:1701.06538 (top k); Lepikhin 2020, "GShard", arXiv:2006.16668 (all-to-all); Fedus 2021, "Switch
Transformers", arXiv:2101.03961, eq. 4 (balancing loss); Zoph 2022, "ST-MoE", arXiv:2202.08906, eq. 5 (z-loss);
DeepSeek-V3 2024, arXiv:2412.19437, section 2.1.2 (balancing bias); Gale 2022, "MegaBlocks", arXiv:2211.15841 (dropless).
At work: torch has all_to_all_single with autograd (torch.distributed.nn.functional) and F.grouped_mm, no module. The
modules are torchtitan's torchtitan/distributed/expert_parallel.py and Megatron's megatron/core/transformer/moe/.

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
# N tokens of this rank   K experts per token   E experts   F FFN width   R ranks of a group "ep" share out the experts

# tokens: the ranks over which the batch is spread. ep: those that share out the experts. replicas: holders of the same
Groups = namedtuple("Groups", "tokens ep replicas")
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # named so from torch 2.13 on


class AllToAll(torch.autograd.Function):
    """Rows (sum(send), C) -> (sum(receive), C). send[r] of them go to rank r of the group, receive[r] come from it."""

    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.route = send, receive, group
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)  # by source -> by destination
        return out

    @staticmethod
    def backward(ctx, g):
        """Gradients go back the way the rows came. Autograd does not see collectives: without this, experts get none."""
        send, receive, group = ctx.route
        return AllToAll.apply(g, receive, send, group), None, None, None


class GroupedLinear(torch.autograd.Function):
    """Rows (n, C) sorted by expert, sizes[e] of expert e -> (n, F): each times its expert's weight (E, F, C), plus bias.

    Results and gradients are written in place: nothing is concatenated or stacked. No rows: zero gradient, not None.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, sizes):
        ctx.save_for_backward(x, weight)
        ctx.sizes, out = sizes, x.new_empty(len(x), weight.shape[1])
        for rows, w, b, y in zip(x.split(sizes), weight, bias, out.split(sizes)):
            torch.addmm(b, rows, w.T, out=y)
        return out

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        dx, dw, db = torch.empty_like(x), torch.empty_like(weight), weight.new_empty(weight.shape[:2])
        for i, (rows, out) in enumerate(zip(x.split(ctx.sizes), g.split(ctx.sizes))):
            torch.mm(out.T, rows, out=dw[i])
            torch.sum(out, 0, out=db[i])
        for out, w, d in zip(g.split(ctx.sizes), weight, dx.split(ctx.sizes)):
            torch.mm(out, w, out=d)
        return dx, dw, db, None


def one_grouped_mm(x, weight, bias, sizes):
    """The same as one kernel for all experts: torch's, in bf16 where F and C are multiples of 8."""
    sizes = torch.tensor(sizes, device=x.device)
    y = F.grouped_mm(x, weight.transpose(1, 2), offs=sizes.cumsum(0).int())
    return y + bias.repeat_interleave(sizes, 0, output_size=len(x))


def grouped_linear(x, weight, bias, sizes):
    pays = x.is_cuda and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm")
    return (one_grouped_mm if pays else GroupedLinear.apply)(x, weight, bias, sizes)


class Stack(nn.Module):
    """Linears of one shape, as one parameter each for weights (E, F, C) and biases (E, F)."""

    def __init__(self, linears):
        super().__init__()
        self.weight = nn.Parameter(torch.stack([f.weight.detach() for f in linears]))
        self.bias = nn.Parameter(torch.stack([f.bias.detach() for f in linears]))
        self.multiply = grouped_linear  # an attribute, so that it can be exchanged

    def forward(self, x, sizes):
        return self.multiply(x, self.weight, self.bias, sizes)


class Experts(nn.Module):
    """MLPs with Linears `up` and `down`, side by side. Their gradients are this rank's own: see sum_gradients."""

    def __init__(self, mlps):
        super().__init__()
        self.up, self.down = Stack([m.up for m in mlps]), Stack([m.down for m in mlps])

    def forward(self, x, sizes):  # (n, C) sorted by expert
        return self.down(F.gelu(self.up(x, sizes), approximate="tanh"), sizes)


def route(logits, top_k, bias=None):
    """(N, E) -> chosen experts (N, K), their gates (N, K), probabilities (N, E).

    The bias enters the choice and never the gate (DeepSeek-V3, eq. 16). Gates are renormalized to a sum of 1; a single
    one is its probability (Switch, eq. 2), since renormalized it would be 1 and the router would learn nothing.
    """
    probs = logits.softmax(-1)
    chosen = (probs if bias is None else probs + bias).topk(top_k).indices
    gates = probs.gather(-1, chosen)
    return chosen, gates / gates.sum(-1, keepdim=True) if top_k > 1 else gates, probs


ALPHA, BETA = 1e-2, 1e-3  # of the balancing loss (Switch) and of the z-loss (ST-MoE)


def switch_loss(load, probs, top_k):
    """E sum f_i P_i (Switch, eq. 4), this rank's part. load (E,): the choices of all ranks; probs (N, E): of this one.

    f has no gradient and P is a mean over all ranks' tokens, so that the parts add up to the loss of the whole batch.
    """
    f = load.to(probs.dtype) / load.sum()
    return len(load) * (f @ probs.sum(0)) * top_k / load.sum()


def z_loss(load, logits, top_k):
    """Mean squared log-sum-exp of the router's logits (ST-MoE, eq. 5), this rank's part: it keeps them small."""
    return logits.logsumexp(-1).square().sum() * top_k / load.sum()


def capacity(tokens, experts, top_k, factor):
    """Rows that an expert takes of one source rank's N tokens: ceil(C K N / E)."""
    return math.ceil(round(factor * top_k * tokens / experts, 6))  # 1.1 * 2 * 40 / 8 is 11.000000000000002


def transpose(x, sizes):
    """Rows in chunks of sizes[i][j], laid out by i and then j -> the same chunks by j and then i."""
    chunks, columns = x.split(sum(sizes, [])), len(sizes[0])
    return torch.cat([chunks[i * columns + j] for j in range(columns) for i in range(len(sizes))])


class MoE(nn.Module):
    """E experts behind a router, in place of an MLP. `mlps` are those held here: E/R, in the order of the ep ranks.

    A forward leaves `loss`, this rank's part of the balancing loss, to be added to the model's over all layers; `load`
    (E,), how often all ranks' tokens chose each expert; `rows` sent, received, and staying here in each direction.
    `balanced` takes experts to be chosen equally often and reads no values: for tensors that have none.
    """

    def __init__(self, router, mlps, top_k, groups, balance="aux", capacity=0.0, shared=None, balanced=False):
        super().__init__()
        self.router, self.experts, self.shared, self.here = router, Experts(mlps), shared, len(mlps)
        self.top_k, self.groups, self.balance, self.capacity = top_k, groups, balance, capacity
        self.loss, self.balanced, self.exchange = 0.0, balanced, AllToAll.apply  # an attribute, so that it can be exchanged
        bias = router.weight.new_zeros(len(router.weight), dtype=torch.promote_types(router.weight.dtype, torch.float32))
        self.register_buffer("bias", bias if balance == "bias" else None)

    def forward(self, x):  # (.., C)
        tokens, k = x.flatten(0, -2), self.top_k  # (N, C)
        weight = self.router.weight.to(torch.promote_types(x.dtype, torch.float32))
        logits = F.linear(tokens.to(weight.dtype), weight)  # (N, E)
        chosen, gates, probs = route(logits, k, self.bias)
        slots = chosen.flatten()  # slot k of a token is its k-th choice: (N K)
        load = torch.zeros_like(weight[:, 0], dtype=torch.int64).scatter_add_(0, slots, torch.ones_like(slots))
        self.load = load.clone()
        summing = dist.all_reduce(self.load, group=self.groups.tokens, async_op=True)  # partial -> replicated
        sizes, send, come = self.sizes(load, len(tokens))
        slots = slots.argsort(stable=True)  # by expert, and each expert's tokens in their order
        if sum(send) < sum(sizes):
            slots = torch.cat([own[:kept] for own, kept in zip(slots.split(sizes), send)])
        rows = self.visit(tokens.index_select(0, slots // k), send, come)  # (S, C)
        y = rows.new_zeros(len(tokens) * k, x.shape[-1]).index_copy(0, slots, rows)  # dropped choices add nothing
        y = (gates.to(x.dtype).unsqueeze(1) @ y.view(-1, k, x.shape[-1])).view_as(x)
        summing.wait()
        if self.balance == "aux":
            self.loss = ALPHA * switch_loss(self.load, probs, k) + BETA * z_loss(self.load, logits, k)
        return y if self.shared is None else y + self.shared(x)

    def sizes(self, load, tokens):
        """This rank's choices (E,) -> as a list; the rows it sends to each expert; the rows that come, R lists of E/R."""
        limit = capacity(tokens, len(load), self.top_k, self.capacity) if self.capacity else tokens
        send = load.clamp(max=limit)
        come = torch.empty_like(send)
        dist.all_to_all_single(come, send, group=self.groups.ep)  # by expert -> by source, of the experts here
        if self.balanced:
            load = [(tokens * self.top_k + i) // len(load) for i in range(len(load))]  # as equal as they can be
            send, first = [min(limit, size) for size in load], dist.get_rank(self.groups.ep) * self.here
            come = send[first:first + self.here] * (len(send) // self.here)
        else:
            load, send, come = torch.stack([load, send, come]).tolist()  # the host waits here, and only here
        return load, send, [come[i:i + self.here] for i in range(0, len(come), self.here)]

    def visit(self, rows, send, come):
        """Rows sorted by expert (S, C) -> what their experts make of them."""
        there = [sum(send[i:i + self.here]) for i in range(0, len(send), self.here)]  # to each rank
        back, by_expert = [sum(sizes) for sizes in come], [list(sizes) for sizes in zip(*come)]
        self.rows = sum(there), sum(back), there[dist.get_rank(self.groups.ep)]
        rows = self.exchange(rows, there, back, self.groups.ep)  # token's rank -> expert's rank, by source
        rows = self.experts(transpose(rows, come), [sum(sizes) for sizes in by_expert])
        return self.exchange(transpose(rows, by_expert), back, there, self.groups.ep)  # expert's rank -> token's rank

    @torch.no_grad()
    def move_bias(self, gamma=1e-3):
        """After a step, once: towards the experts chosen less than the mean (DeepSeek-V3, section 2.1.2)."""
        load = self.load.to(self.bias.dtype)
        self.bias += gamma * (load.mean() - load).sign()


def split_parameters(model):
    """-> parameters that all ranks hold, parameters of experts."""
    experts = {p: None for m in model.modules() if isinstance(m, Experts) for p in m.parameters()}
    return [p for p in model.parameters() if p not in experts], list(experts)


def sum_gradients(model, groups):
    """After backward: dense gradients over all ranks, an expert's only over the ranks that hold it. One flat all-reduce
    each, after backward; ddp.py hides them behind it."""
    for parameters, group in zip(split_parameters(model), (groups.tokens, groups.replicas)):
        # None here may be a gradient on other ranks, and all must reduce the same
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat, group=group)  # partial -> replicated
        for p, g in zip(parameters, flat.split([g.numel() for g in grads])):
            p.grad = g.view_as(p)


def clip_gradients(model, limit, groups):
    """-> norm of the whole gradient: dense ones counted once, experts' over the ep ranks. Scales it to `limit` at most."""
    dense, experts = ([p.grad for p in parameters] for parameters in split_parameters(model))
    square = nn.utils.get_total_norm(experts).square()
    dist.all_reduce(square, group=groups.ep)  # partial -> replicated
    norm = (square + nn.utils.get_total_norm(dense).square()).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parts(cfg, args, layer, experts, like):
    """Router, the given experts and the shared one of a layer, each drawn by its own name, whoever holds it."""
    def drawn(module, name):
        init_weights(module, cfg.layers, args.seed, f"blocks.{layer}.mlp.{name}")
        return module
    with torch.device(like.device):
        router = drawn(nn.Linear(cfg.width, args.experts, bias=False, dtype=like.dtype), "router")
        mlps = [drawn(MLP(cfg).to(like.dtype), f"experts.{e}") for e in experts]
        return router, mlps, drawn(MLP(cfg).to(like.dtype), "shared") if args.shared else None


def parallelize(model, cfg, args, groups):
    """Each MLP becomes experts, of which this rank holds its share."""
    for i, block in enumerate(model.blocks):
        mine = share(args.experts, dist.get_world_size(groups.ep), dist.get_rank(groups.ep))
        router, mlps, shared = parts(cfg, args, i, mine, model.pos.weight)
        block.mlp = MoE(router, mlps, args.top_k, groups, args.balance, args.capacity, shared, bool(args.dry_run))
    return model


def layers(model):
    return [block.mlp for block in model.blocks]


def full(tensors, groups):
    """{name: tensor}, this rank's -> the plain MoE's: every expert by its number."""
    whole = {}
    for name, t in tensors:
        if ".experts." not in name:
            whole[name] = t
            continue
        gathered = t.new_empty(dist.get_world_size(groups.ep) * len(t), *t.shape[1:])
        gather_single(gathered, t.detach().contiguous(), group=groups.ep)  # sharded(0) -> replicated
        whole.update((name.replace("experts", f"experts.{e}"), one) for e, one in enumerate(gathered))
    return whole


def full_state_dict(model, groups):
    return full(model.state_dict().items(), groups)


def full_gradients(model, groups):
    return full([(name, p.grad) for name, p in model.named_parameters()], groups)


def train_step(model, optimizer, x, y, valid, clip, groups):
    """x, y: this rank's rows (B/W, T); valid: of the whole batch -> this rank's part of the loss, gradient norm."""
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid + sum(layer.loss for layer in layers(model))
    loss.backward()
    sum_gradients(model, groups)  # partial -> replicated
    norm = clip_gradients(model, clip or math.inf, groups)
    optimizer.step()
    for layer in layers(model):
        if layer.balance == "bias":
            layer.move_bias()
    return loss, norm


class PlainMoE(nn.Module):
    """What the above must equal, as the definition has it: all experts in one process, one after the other.

    A call takes the tokens of one source rank, as capacity counts; what balancing needs of them is kept in `seen`.
    """

    def __init__(self, router, mlps, shared, args):
        super().__init__()
        self.router, self.experts, self.shared, self.seen = router, nn.ModuleList(mlps), shared, []
        self.args, bias = args, torch.zeros_like(router.weight[:, 0])
        self.register_buffer("bias", bias if args.balance == "bias" else None)

    def forward(self, x):
        a, x, shape = self.args, x.flatten(0, 1), x.shape
        logits = self.router(x)
        probs = logits.exp() / logits.exp().sum(1, keepdim=True)
        chosen = (probs if self.bias is None else probs + self.bias).argsort(1, descending=True)[:, :a.top_k]
        self.seen.append((logits, probs, F.one_hot(chosen, a.experts).sum((0, 1))))
        picked = probs.gather(1, chosen)
        y = self.shared(x) if self.shared else torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            took = (chosen == e).any(1).nonzero()[:, 0][:math.ceil(a.capacity * a.top_k * len(x) / a.experts) or None]
            gate = (picked * (chosen == e)).sum(1) / (picked.sum(1) if a.top_k > 1 else 1)
            y = y.index_add(0, took, gate[took, None] * expert(x[took]))
        return y.view(shape)

    def balance(self):
        """All parts seen -> the balancing loss; or the bias moves, for the next step."""
        logits, probs, load = (f([s[i] for s in self.seen]) for i, f in enumerate((torch.cat, torch.cat, sum)))
        self.seen = []
        if self.args.balance == "bias":
            self.bias += 1e-3 * (load.sum() / len(load) - load).sign()
        f, p = load.to(probs.dtype) / load.sum(), probs.mean(0)
        aux = ALPHA * len(load) * (f * p).sum() + BETA * (logits.exp().sum(1).log() ** 2).mean()
        return aux if self.args.balance == "aux" else 0


def plain_moe(run):
    """The same steps in one process: each step's batch in the parts that the ranks had -> Trace"""
    args, trace = run.args, Trace()
    model = build(run.cfg, args.seed, run.device, run.dtype)
    for i, block in enumerate(model.blocks):
        block.mlp = PlainMoE(*parts(run.cfg, args, i, range(args.experts), model.pos.weight), args)
    optimizer = adamw(model.parameters(), args.lr)
    for step in range(run.last + 1):
        loss = 0
        optimizer.zero_grad()
        for rank in range(run.world_size):
            x, y, valid = run.batch(step, share(args.batch, run.world_size, rank))
            loss = loss + loss_sum(model(x), y) / valid
        loss = loss + sum(layer.balance() for layer in layers(model))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
        optimizer.step()
        trace.log(step, loss, norm)
        if run.keeps(step):
            grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
            trace.keep(step, grads, model.state_dict())
    return trace


# ---- 3. at work: the same with torch's own API -------------------------------


def exchange_at_work(x, send, receive, group):
    """Token's rank -> expert's rank, or back, with a backward."""
    return all_to_all_single(x.new_empty(sum(receive), *x.shape[1:]), x, receive, send, group=group)


def multiply_at_work(x, weight, bias, sizes):
    """One kernel for all experts; where torch has none (fp64), one per expert."""
    if x.dtype != torch.float64 and hasattr(F, "grouped_mm"):
        return one_grouped_mm(x, weight, bias, sizes)
    return torch.cat([F.linear(rows, w, b) for rows, w, b in zip(x.split(sizes), weight, bias)])


def parallelize_at_work(model, *args):
    """There is no module to take: routing, sorting and bookkeeping stay section 1's."""
    for layer in layers(parallelize(model, *args)):
        layer.exchange = exchange_at_work
        layer.experts.up.multiply = layer.experts.down.multiply = multiply_at_work
    return model


# ---- 4. run ------------------------------------------------------------------


def bars(before, after):
    """Loads (E,) of the layer that ended least even, in units of their mean."""
    for e, loads in enumerate(zip(before, after)):
        yield f"  expert {e:3}  " + "   ".join(f"{'#' * round(10 * n):<25.25} {n:4.2f}" for n in loads)


def report_load(run, model, loads):
    """Prints and reports how even the experts' loads are, as choices of an expert over the mean; what was dropped."""
    first, last = (load / load.mean(1, keepdim=True) for load in loads)  # (L, E)
    layer = last.max(1).values.argmax().item()
    run.extra["load"] = dict(before=first.tolist(), after=last.tolist())
    run.say(f"\nload of layer {layer}'s experts over the mean, at the first step and at the last")
    for line in bars(first[layer].tolist(), last[layer].tolist()):
        run.say(line)
    run.say(f"  largest of all layers' {first.max():.2f}, then {last.max():.2f}")
    if run.args.capacity:
        kept = torch.tensor([float(layer.rows[0]) for layer in layers(model)], device=run.device)
        dist.all_reduce(kept)  # partial -> replicated
        run.extra["dropped"] = 1 - kept.sum().item() / loads[1].sum().item()
        run.say(f"  dropped {run.extra['dropped']:.1%} of the last step's choices")


def textbook(run, model, tokens, dense, experts, groups):
    """dense, experts: parameters on this rank; tokens: in its part of the batch."""
    args, c, b, n, r = run.args, run.cfg.width, run.dtype.itemsize, run.world_size, dist.get_world_size(groups.ep)
    held, moved = run.ledger[run.impls[0]].memory, run.ledger[run.impls[0]].collectives
    out, back, stay = (sum(column) for column in zip(*(layer.rows for layer in layers(model))))
    sizes, own = 8 * run.cfg.layers * args.experts, dense + experts
    biases = list(model.buffers())
    if not args.capacity:
        run.textbook("choices sent to experts", "L K N", run.cfg.layers * args.top_k * tokens, out)
    run.textbook("rows and sizes all-to-all", "2 b C (out + back) + 8 L E", 2 * b * c * (out + back) + sizes,
                 moved["all_to_all"]["payload"])
    run.textbook("wire all_to_all", "2 b C (out + back - 2 stay) + (R-1)/R 8 L E",
                 2 * b * c * (out + back - 2 * stay) + Fraction(r - 1, r) * sizes, moved["all_to_all"]["wire"])
    run.textbook("wire all_reduce", "2 (W-1)/W (b D + 8 L E) + 2 (W-R)/W b X/R + 2 (R-1)/R b",
                 Fraction(2 * (n - 1), n) * (b * dense + sizes) + Fraction(2 * (n - r), n) * b * experts
                 + Fraction(2 * (r - 1), r) * b, moved["all_reduce"]["wire"])
    run.textbook("parameters held", "b (D + X/R) + biases", b * own + sum(t.nbytes for t in biases), held["parameters"])
    run.textbook("gradients held", "b (D + X/R)", b * own, held["gradients"])
    run.textbook("AdamW states held", "2 b (D + X/R) + 4 per tensor (step counter)",
                 2 * b * own + 4 * len(list(model.parameters())), held["optimizer"])


def main():
    args = arguments(__doc__, experts=(8, "E, in each layer", POSITIVE), top_k=(2, "K, experts per token", POSITIVE),
                     ep=(0, "R, ranks that share out the experts; 0: all", ANY), shared=(False, "one expert for all tokens"),
                     capacity=(0.0, "C: an expert takes C times its share, the rest is dropped; 0: all", ANY),
                     balance=("aux", "by a loss, a bias in the choice, or not at all", ("aux", "bias", "none")))
    n, e, r = args.world_size, args.experts, args.ep or args.world_size
    require(args.batch >= n, f"--batch {args.batch} sequences for {n} ranks: give each at least one")
    require(args.top_k <= e, f"--top-k {args.top_k} of --experts {e}: choose {e} at most")
    require(n % r == 0, f"--ep {r} does not divide {n} ranks")
    require(e % r == 0, f"--experts {e} on {r} ranks: take a multiple of {r}, or --ep a divisor of {e}")
    run = Run(args)
    mesh = init_device_mesh(run.device.type, (n // r, r), mesh_dim_names=("replicas", "ep"))
    groups = Groups(dist.group.WORLD, mesh["ep"].get_group(), mesh["replicas"].get_group())
    with run:
        sides, loads = {}, []
        for impl in run.impls:
            model = build(run.cfg, args.seed, run.device, run.dtype)
            model = (parallelize if impl == "scratch" else parallelize_at_work)(model, run.cfg, args, groups)
            sides[impl] = model, adamw(model.parameters(), args.lr)
        dense, experts = (sum(p.numel() for p in parameters) for parameters in split_parameters(model))
        total = dense + experts * r
        run.say(f"moe: {n} ranks on {run.device.type}, {args.dtype}, {total:,} parameters, of which {experts * r:,} in "
                f"{run.cfg.layers} x {e} experts\n{r} ranks share them: {dense:,} + {experts:,} parameters on this one")
        run.say("dry run: experts are taken to be balanced") if run.dry else None
        for impl, step in run.steps():
            model, optimizer = sides[impl]
            x, y, valid = run.batch(step, share(args.batch, n, run.rank))
            with run.measure(impl, step, model, optimizer):
                loss, norm = train_step(model, optimizer, x, y, valid, args.clip, groups)
            run.log(impl, step, loss, norm)
            if run.keeps(step):
                run.trace[impl].keep(step, full_gradients(model, groups), full_state_dict(model, groups))
            if step in (0, run.last) and impl == run.impls[0]:
                loads.append(torch.stack([layer.load for layer in layers(model)]).double())
        model, optimizer = sides[run.impls[0]]
        textbook(run, model, len(x) * run.cfg.seq, dense, experts, groups)
        if not run.dry:
            report_load(run, model, (loads[0], loads[-1]))
        plain = plain_moe(run) if args.check and run.rank == 0 and not run.dry else None
        return run.finish(total, dense + experts, plain)


if __name__ == "__main__":
    sys.exit(main())
