"""Tensor parallelism: every matrix is cut across ranks, and with --sp so is the sequence between the matrices.

    rank 0   x - norm -f-> [ q k v ]_0 heads_0 [ out  ]_0 -g-> + x - norm -f-> [ up ]_0 gelu [ down ]_0 -g-> + x
    rank 1   x - norm -f-> [ q k v ]_1 heads_1 [ out  ]_1 -g-> + x - norm -f-> [ up ]_1 gelu [ down ]_1 -g-> + x

               f forward    f backward        g forward         g backward     from g to f, x is
    (Shoeybi)  nothing      all-reduce        all-reduce        nothing        whole on every rank
    --sp       all-gather   reduce-scatter    reduce-scatter    all-gather     cut along T

q, k, v and up are cut by columns, out and down by rows: a head meets attention alone and a column of up meets gelu
alone, so nothing is exchanged from f to g. The token embedding, which is the head too, is cut by vocabulary, and the
cross-entropy is computed on cut logits. With --sp a block keeps its part of f's input and gathers it again in backward.

    on each rank, t ranks, in numbers       plain GPT    here                      --sp
    matrices, their column biases           12 L C^2..   1/t                       1/t
    token embedding and logits              V C, B T V   1/t, V padded             1/t, V padded
    norms, row biases, positions            ..           whole                     whole
    a block keeps: x, its norm, twice       4 B T C      whole                     1/t
        q k v heads, up, gelu               12 B T C     1/t                       1/t
    a block sends per step                  -            8 B T C (t-1)/t           10 B T C (t-1)/t
        in                                  -            4 all-reduces             6 all-gathers, 4 reduce-scatters

Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3; Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", arXiv:2205.05198, section 4.
At work: torch.distributed.tensor.parallel.parallelize_module, loss_parallel (section 3 below).

    torchrun --standalone --nproc_per_node=2 tensor_parallel.py --sp
"""
import math
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
                                               loss_parallel, parallelize_module)

from common import Run, adamw, arguments, build, loss_sum, require

# ---- 1. the technique (copy this; it needs only torch) -----------------------

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class WholeSequence:
    """What happens to (B, T, C) where matrices begin and end: f is gather, backward reduce; g is reduce, backward gather.

    Both start communicating at once and return a function that waits for the result, so that work fits in between.
    Here x is whole on every rank outside of the matrices (Shoeybi 2019, fig. 3).
    """

    def __init__(self, group=None):
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def cut(self, x, dim):
        return x

    def gather(self, x):
        return lambda: x

    def reduce(self, y):
        work = dist.all_reduce(y, group=self.group, async_op=True)  # partial -> replicated, in place
        return lambda: work.wait() and y

    def sum_gradients(self, parameters):
        """After backward. Each rank has seen all positions: the gradients of replicated parameters are complete."""


class CutSequence(WholeSequence):
    """x is cut along T outside of the matrices: norms and residuals cost 1/t too (Korthikanti 2022, fig. 5)."""

    def cut(self, x, dim):
        return x.chunk(self.size, dim)[self.rank]

    def gather(self, x):
        x = x.contiguous()
        parts = x.new_empty(self.size, *x.shape)  # (t, B, T/t, C)
        work = all_gather_single(parts.flatten(0, 1), x, group=self.group, async_op=True)  # sharded(T) -> replicated
        return lambda: work.wait() and parts.transpose(0, 1).flatten(1, 2)  # (B, T, C), a copy unless B is 1

    def reduce(self, y):
        parts = y.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()  # (t, B, T/t, C)
        mine = torch.empty_like(parts[0])
        work = reduce_scatter_single(mine, parts.flatten(0, 1), group=self.group, async_op=True)  # partial -> sharded(T)
        return lambda: work.wait() and (mine, parts)[0]  # parts must live until the wait

    def sum_gradients(self, parameters):
        """After backward: replicated parameters have seen this rank's positions only."""
        gradients = [p.grad for p in parameters if not hasattr(p, "tp_dim")]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat, group=self.group)  # partial -> replicated
        for g, total in zip(gradients, flat.split([g.numel() for g in gradients])):
            g.copy_(total.view_as(g))


class ColumnParallel(torch.autograd.Function):
    """f, then the Linears that share its output, each cut by columns: x -> a (B, T, out/t) each.

    One function, because what f communicates in backward can hide behind the matmuls of the Linears.
    """

    @staticmethod
    def forward(ctx, x, tp, *weights_and_biases):
        weights, biases = weights_and_biases[::2], weights_and_biases[1::2]
        ctx.tp = tp
        ctx.save_for_backward(x, *weights)  # not the gathered x
        x = tp.gather(x)()  # sharded(T) -> replicated
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases))

    @staticmethod
    def backward(ctx, *dys):
        x, *weights = ctx.saved_tensors
        gathered = ctx.tp.gather(x)  # sharded(T) -> replicated, while dx is computed
        shape, dys = dys[0].shape[:2], [dy.flatten(0, 1) for dy in dys]
        dx = dys[0] @ weights[0]
        for dy, w in zip(dys[1:], weights[1:]):
            dx.addmm_(dy, w)
        reduced = ctx.tp.reduce(dx.view(*shape, -1))  # partial -> as x is, while dw and db are computed
        x = gathered().flatten(0, 1)
        gradients = []
        for i, dy in enumerate(dys):
            gradients += [dy.t() @ x, dy.sum(0) if ctx.needs_input_grad[2 * i + 3] else None]
        return reduced(), None, *gradients


class ReduceFromTP(torch.autograd.Function):
    """g: each rank's partial sum (B, T, C) -> the sum; takes y's memory for it where it can."""

    @staticmethod
    def forward(ctx, y, tp):
        ctx.tp, total = tp, tp.reduce(y)()  # partial -> replicated, or sharded(T)
        if total is y:
            ctx.mark_dirty(y)
        return total

    @staticmethod
    def backward(ctx, dy):
        return ctx.tp.gather(dy)(), None  # sharded(T) -> replicated


COLUMNS, ROWS = 0, 1  # of A in Y = X A; nn.Linear stores A transposed


def shard(t, dim, tp):
    """This rank's part of a tensor, as a Parameter that knows where it was cut. Those without tp_dim are replicated."""
    if t.shape[dim] % tp.size:
        raise ValueError(f"dim {dim} of {tuple(t.shape)} does not divide by {tp.size} ranks")
    part = nn.Parameter(t.detach().chunk(tp.size, dim)[tp.rank].clone(memory_format=torch.contiguous_format))
    part.tp_dim = dim
    return part


def unshard(t, dim, tp):
    parts = [torch.empty_like(t) for _ in range(tp.size)]
    dist.all_gather(parts, t.detach().contiguous(), group=tp.group)  # sharded(dim) -> replicated
    return torch.cat(parts, dim)


class ColumnLinear(nn.Module):
    """f and an nn.Linear cut by columns, bias too."""

    def __init__(self, linear, tp):
        super().__init__()
        self.tp, self.weight, self.bias = tp, shard(linear.weight, COLUMNS, tp), shard(linear.bias, 0, tp)

    def forward(self, x):
        return ColumnParallel.apply(x, self.tp, self.weight, self.bias)[0]  # (B, T, out/t)


class RowLinear(nn.Module):
    """An nn.Linear cut by rows, and g. The bias is added once, to the sum."""

    def __init__(self, linear, tp):
        super().__init__()
        self.tp, self.weight, self.bias = tp, shard(linear.weight, ROWS, tp), linear.bias

    def forward(self, y):  # (B, T, in/t)
        return ReduceFromTP.apply(F.linear(y, self.weight), self.tp) + self.bias


class HeadParallelAttention(nn.Module):
    """Any attention made of Linears q, k, v, out, a head_dim, and attend(q, k, v). q, k, v share one f."""

    def __init__(self, attn, tp):
        super().__init__()
        self.tp, self.head_dim, self.attend = tp, attn.head_dim, attn.attend
        self.q, self.k, self.v = (ColumnLinear(m, tp) for m in (attn.q, attn.k, attn.v))
        self.out = RowLinear(attn.out, tp)

    def forward(self, x):
        qkv = ColumnParallel.apply(x, self.tp, *self.q.parameters(), *self.k.parameters(), *self.v.parameters())
        q, k, v = (y.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for y in qkv)  # (B, H/t, T, D)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class VocabParallelEmbedding(nn.Module):
    """An nn.Embedding cut by vocabulary, padded with zeros until it divides: (B, T) -> x."""

    def __init__(self, embedding, tp):
        super().__init__()
        self.tp, self.vocab = tp, len(embedding.weight)
        self.weight = shard(F.pad(embedding.weight.detach(), (0, 0, 0, -self.vocab % tp.size)), 0, tp)

    def forward(self, idx):
        idx = idx - self.tp.rank * len(self.weight)
        others = (idx < 0) | (idx >= len(self.weight))
        x = F.embedding(idx.masked_fill(others, 0), self.weight).masked_fill_(others.unsqueeze(-1), 0)
        return ReduceFromTP.apply(x, self.tp)


class VocabParallelHead(VocabParallelEmbedding):
    """x -> logits (B, T, V/t); tie its weight to the embedding's, or let it be a copy on another pipeline stage."""

    def forward(self, x):
        return ColumnParallel.apply(x, self.tp, self.weight, None)[0]


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Logits (B, T, V/t), targets (B, T) -> sum of losses over targets that are not ignored, on every rank the same.

    The whole logits are nowhere: three numbers per token are exchanged. Columns from vocab on are padding.
    """

    @staticmethod
    def forward(ctx, logits, targets, vocab, tp, ignore=-100):
        p = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        start = tp.rank * p.shape[-1]
        p[..., max(0, vocab - start):] = -math.inf
        highest = p.amax(-1, keepdim=True)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=tp.group)  # partial -> replicated
        p -= highest
        at = (targets - start).unsqueeze(-1)
        others = (at < 0) | (at >= p.shape[-1])
        at = at.masked_fill(others, 0)
        at_target = p.gather(-1, at).masked_fill_(others, 0)
        sums = torch.cat([p.exp_().sum(-1, keepdim=True), at_target], -1)  # (B, T, 2)
        dist.all_reduce(sums, group=tp.group)  # partial -> replicated
        p /= sums[..., :1]
        counts = (targets != ignore).unsqueeze(-1)
        ctx.save_for_backward(p, at, ~others & counts, counts)
        ctx.dtype = logits.dtype
        return ((sums[..., 0].log() - sums[..., 1]) * counts.squeeze(-1)).sum()

    @staticmethod
    def backward(ctx, dloss):
        p, at, mine, counts = ctx.saved_tensors
        dlogits = p * counts
        dlogits.scatter_add_(-1, at, -mine.to(p.dtype))
        return dlogits.mul_(dloss).to(ctx.dtype), None, None, None, None


def squared_norm(parameters, tp):
    """Sum of squares over all gradients of the whole model: sharded ones over all ranks, replicated ones once."""
    parameters = [p for p in parameters if p.grad is not None]
    sharded, whole = ([p.grad for p in parameters if hasattr(p, "tp_dim") == cut] for cut in (True, False))
    total = nn.utils.get_total_norm(sharded).square()
    dist.all_reduce(total, group=tp.group)  # partial -> replicated
    return total + nn.utils.get_total_norm(whole).square()


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize_block(block, tp):
    block.attn = HeadParallelAttention(block.attn, tp)
    block.mlp.up, block.mlp.down = ColumnLinear(block.mlp.up, tp), RowLinear(block.mlp.down, tp)


def parallelize(model, tp):
    """GPT.forward stays as it is, (B, T) -> (B, T, V/t)."""
    for block in model.blocks:
        parallelize_block(block, tp)
    model.tok, model.head = VocabParallelEmbedding(model.tok, tp), VocabParallelHead(model.tok, tp)
    model.head.weight = model.tok.weight
    model.pos.register_forward_pre_hook(lambda _, positions: tp.cut(*positions, 0))
    return model


def full_tensors(tensors, model, tp):
    """{name: parameter or its gradient}"""


def full_state_dict(model, tp):
    state = {n: unshard(p, p.tp_dim, tp) if hasattr(p, "tp_dim") else p for n, p in model.state_dict(keep_vars=True).items()}
    return {n: t[:model.tok.vocab] if n in ("tok.weight", "head.weight") else t for n, t in state.items()}


def full_gradients(model, tp):
    state = {n: unshard(p.grad, p.tp_dim, tp) if hasattr(p, "tp_dim") else p.grad for n, p in model.named_parameters()}
    return {n: t[:model.tok.vocab] if n == "tok.weight" else t for n, t in state.items()}


def train_step(model, optimizer, x, y, valid, clip, tp):
    """x, y: the whole batch (B, T), on every rank -> loss and gradient norm, on every rank the same."""
    optimizer.zero_grad()
    loss = VocabParallelCrossEntropy.apply(model(x), y, model.tok.vocab, tp) / valid
    loss.backward()
    tp.sum_gradients(model.parameters())
    norm = squared_norm(model.parameters(), tp).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), clip or math.inf, norm)
    optimizer.step()
    return loss, norm


# ---- 3. at work: the same with torch's own API -------------------------------


def parallelize_at_work(model, mesh, sp):
    stream = Shard(1) if sp else Replicate()
    into = PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate())  # f, once for q, k, v
    columns, rows, norm = ColwiseParallel(), RowwiseParallel(output_layouts=stream), SequenceParallel()
    block = {"attn": into, "attn.q": columns, "attn.k": columns, "attn.v": columns, "attn.out": rows,
             "mlp": into, "mlp.up": columns, "mlp.down": rows}
    plan = {f"blocks.*.{name}": style for name, style in block.items()}
    plan["tok"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    plan["pos"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0) if sp else Replicate())
    plan["head"] = ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)
    if sp:
        plan.update({"norm": norm, "blocks.*.norm1": norm, "blocks.*.norm2": norm})
    parallelize_module(model, mesh, plan)
    model.head.weight = model.tok.weight
    return model


def full_at_work(tensors):
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}


def train_step_at_work(model, optimizer, x, y, valid, clip, tp):
    optimizer.zero_grad()
    with loss_parallel():
        loss = loss_sum(model(x), y) / valid
        loss.backward()
    norms = [nn.utils.get_total_norm([p.grad for p in group["params"]]) for group in optimizer.param_groups]
    norms = full_at_work(dict(enumerate(norms)))
    norm = torch.stack(list(norms.values())).square().sum().sqrt()
    for group in optimizer.param_groups:
        nn.utils.clip_grads_with_norm_(group["params"], clip or math.inf, norm)
    optimizer.step()
    return loss.full_tensor(), norm


# ---- 4. run ------------------------------------------------------------------


def main():
    args = arguments(__doc__, sp=(False, "sequence parallel: norms and residuals are cut along T"))
    t, cfg = args.world_size, args.cfg
    require(4 * cfg.width % t == 0, f"--width {cfg.width}: {t} ranks cannot share {4 * cfg.width} MLP columns evenly")
    require(cfg.heads % t == 0, f"--heads {cfg.heads}: {t} ranks cannot share them evenly")
    require(not args.sp or cfg.seq % t == 0, f"--seq {cfg.seq}: with --sp {t} ranks cannot share it evenly")
    run = Run(args)
    mesh = init_device_mesh(run.device.type, (t,))
    with run:
        tp = (CutSequence if args.sp else WholeSequence)()
        sides = {}
        for impl in run.impls:
            model = build(cfg, args.seed, run.device, run.dtype)
            total = sum(p.numel() for p in model.parameters())
            if impl == "scratch":
                model, step_fn = parallelize(model, tp), train_step
                own = sum(p.numel() for p in model.parameters())
                optimizer = adamw(model.parameters(), args.lr)
            else:
                model, step_fn = parallelize_at_work(model, mesh, args.sp), train_step_at_work
                groups = [[p for p in model.parameters() if isinstance(p, DTensor) == cut] for cut in (True, False)]
                own = sum(p.to_local().numel() for p in groups[0]) + sum(p.numel() for p in groups[1])
                optimizer = adamw([{"params": group} for group in groups if group], args.lr)
            sides[impl] = model, optimizer, step_fn
        run.say(f"tensor_parallel: {t} ranks on {run.device.type}, {args.dtype}, {total:,} parameters, {own:,} on this rank")
        for impl, step in run.steps():
            model, optimizer, step_fn = sides[impl]
            x, y, valid = run.batch(step)
            with run.measure(impl, step, model, optimizer):
                loss, norm = step_fn(model, optimizer, x, y, valid, args.clip, tp)
            run.log(impl, step, loss / t, norm)
            if run.keeps(step):
                if impl == "scratch":
                    run.trace[impl].keep(step, full_gradients(model, tp), full_state_dict(model, tp))
                else:
                    run.trace[impl].keep(step, full_at_work({n: p.grad for n, p in model.named_parameters()}),
                                         full_at_work(model.state_dict()))
        return run.finish(total, own)


if __name__ == "__main__":
    sys.exit(main())
