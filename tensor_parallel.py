"""Tensor parallelism: every matrix is cut across ranks, and with --sp so is the sequence between the matrices.

    rank 0   x - norm -f-> [ q k v ]_0 heads_0 [ out ]_0 -g-> + x - norm -f-> [ up ]_0 gelu [ down ]_0 -g-> + x
    rank 1   x - norm -f-> [ q k v ]_1 heads_1 [ out ]_1 -g-> + x - norm -f-> [ up ]_1 gelu [ down ]_1 -g-> + x

             f forward     f backward                   g forward         g backward    from g to f, x is
             nothing       all-reduce                   all-reduce        nothing       whole on every rank
    --sp     all-gather    all-gather, reduce-scatter   reduce-scatter    all-gather    cut along T

q, k, v, up are cut by columns, out and down by rows: a head meets attention and a column of up meets gelu alone, so f
to g needs no exchange. The token embedding, also the head, is cut by vocabulary, and the loss is that of cut logits.

    on each rank, t ranks, in numbers               plain GPT      here               --sp
    matrices, column biases, embeddings             12 C^2 L ..    1/t                1/t
    norms, row biases                               (6 L + 2) C    whole              whole
    a block keeps: x and its norm, twice            4 B T C        whole              1/t
                   q, k, v, heads, up, gelu         12 B T C       1/t                1/t
    a block sends, in 4 all-reduces                 -              8 B T C (t-1)/t
                   6 all-gathers, 4 reduce-scatters -                                 10 B T C (t-1)/t

Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3. Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", arXiv:2205.05198, section 4.2.
At work: torch.distributed.tensor.parallel.parallelize_module, loss_parallel (section 3 below).

    torchrun --standalone --nproc_per_node=2 tensor_parallel.py --sp
"""
import math
import sys

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as at_work
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, init_device_mesh

from common import Run, adamw, arguments, build, clip_gradients, loss_sum, require

# ---- 1. the technique (copy this; it needs only torch) -----------------------

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class WholeSequence:
    """From g to f, x is whole (Shoeybi 2019, fig. 3). gather and reduce return a function that waits for them."""

    def __init__(self, group=None):
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def gather(self, x):
        return lambda: x

    def reduce(self, y):
        work = dist.all_reduce(y, group=self.group, async_op=True)  # partial -> replicated, in place
        return lambda: (work.wait(), y)[1]


class CutSequence(WholeSequence):
    """From g to f, x is cut along T, and so are norms and residuals (Korthikanti 2022, fig. 5)."""

    def gather(self, x):
        x, parts = x.contiguous(), x.new_empty(self.size, *x.shape)  # (t, B, T/t, C)
        work = all_gather(parts.flatten(0, 1), x, self.group, async_op=True)  # sharded(T) -> replicated
        return lambda: (work.wait(), parts.transpose(0, 1).flatten(1, 2), x)[1]  # (B, T, C); x must live until then

    def reduce(self, y):
        parts = y.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()  # (t, B, T/t, C)
        x = torch.empty_like(parts[0])
        work = reduce_scatter(x, parts.flatten(0, 1), group=self.group, async_op=True)  # partial -> sharded(T)
        return lambda: (work.wait(), x, parts)[1]  # parts must live until then


class ColumnParallel(torch.autograd.Function):
    """f, and the Linears that share it, cut by columns: x -> (B, T, out/t). Their backward hides f. No autocast."""

    @staticmethod
    def forward(ctx, x, tp, *weights_and_biases):
        ctx.tp, weights, biases = tp, weights_and_biases[::2], weights_and_biases[1::2]
        ctx.save_for_backward(x, *weights)  # x as it came: gathered, it would be t times as large
        x = tp.gather(x)()  # sharded(T) -> replicated
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases))

    @staticmethod
    def backward(ctx, *dys):
        x, *weights = ctx.saved_tensors
        gathered = ctx.tp.gather(x)  # sharded(T) -> replicated, behind dx
        shape, dys = dys[0].shape[:2], [dy.flatten(0, 1) for dy in dys]
        dx = dys[0] @ weights[0]
        for dy, weight in zip(dys[1:], weights[1:]):
            dx.addmm_(dy, weight)
        reduced = ctx.tp.reduce(dx.unflatten(0, shape))  # partial -> as x is, behind the other gradients
        x, biased = gathered().flatten(0, 1), ctx.needs_input_grad[3::2]  # of x, tp, w, b, w, b, ..
        gradients = [g for dy, b in zip(dys, biased) for g in (dy.t() @ x, dy.sum(0) if b else None)]
        return reduced(), None, *gradients


class ReduceFromTP(torch.autograd.Function):
    """g: partial sums y (B, T, C) -> x, in the memory of y, which nobody may need, nor the backward of what made y."""

    @staticmethod
    def forward(ctx, y, tp):
        ctx.tp = tp
        return tp.reduce(y.detach())()  # partial -> replicated, or sharded(T)

    @staticmethod
    def backward(ctx, dx):
        return ctx.tp.gather(dx)(), None  # as x is -> replicated


def cut(forward, dim, tp, *modules):
    """Cut plain modules where they stand, padded with zeros until they divide, and give them a forward from below."""
    for module in modules:
        for name, p in list(module.named_parameters(recurse=False)):
            if dim < p.dim():  # a bias has no dim 1: it stays whole
                padded = F.pad(p.detach(), [0, 0] * (p.dim() - 1 - dim) + [0, -p.shape[dim] % tp.size])
                part = nn.Parameter(padded.chunk(tp.size, dim)[tp.rank].clone(), p.requires_grad)
                part.tp_dim, part.tp_whole = dim, p.shape[dim]
                setattr(module, name, part)
        module.tp, module.__class__ = tp, type(forward.__name__, (type(module),), {"forward": forward})


def unshard(t, p, tp):
    """p whole again, or t which is cut like p, such as its gradient. What was not cut stays as it is."""
    if not hasattr(p, "tp_dim"):
        return t.full_tensor() if hasattr(t, "full_tensor") else t  # torch's DTensors (section 3) have their own
    parts = [torch.empty_like(t) for _ in range(tp.size)]
    dist.all_gather(parts, t.detach(), group=tp.group)  # sharded -> replicated
    return torch.cat(parts, p.tp_dim).narrow(p.tp_dim, 0, p.tp_whole)


def column_linear(self, x):
    """f, and a Linear cut by columns, dim 0 of its weight, which is transposed: x -> (B, T, out/t)"""
    return ColumnParallel.apply(x, self.tp, self.weight, self.bias)[0]


def row_linear(self, y):
    """A Linear cut by rows, dim 1, and g: (B, T, in/t) -> x. The bias is added once, to the sum."""
    return ReduceFromTP.apply(F.linear(y, self.weight), self.tp) + self.bias


def attention(self, x):
    """x -> x with column_linears q, k, v, which share one f, a row_linear out, a head_dim, and attend."""
    qkv = ColumnParallel.apply(x, self.tp, *(p for m in (self.q, self.k, self.v) for p in (m.weight, m.bias)))
    q, k, v = (y.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for y in qkv)  # (B, H/t, T, D)
    return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def embedding(self, idx):
    """An Embedding cut by rows, dim 0, and g: (B, T) or (T,) -> x"""
    idx = idx.view(-1, idx.shape[-1]) - self.tp.rank * len(self.weight)
    others = (idx < 0) | (idx >= len(self.weight))
    y = F.embedding(idx.masked_fill(others, 0), self.weight).masked_fill(others.unsqueeze(-1), 0)
    return ReduceFromTP.apply(y, self.tp)


def vocab_parallel_cross_entropy(logits, targets, vocab, group=None, ignore_index=-100):
    """Logits (.., V/t), targets (..) -> the sum of losses, on every rank. It sends three numbers per token."""
    tp, logits, targets = WholeSequence(group), logits.flatten(0, -2), targets.flatten()  # (N, V/t), (N,)
    logits = logits.float() if logits.dtype.itemsize == 2 else logits
    start, end = (min(i * logits.shape[1], vocab) for i in (tp.rank, tp.rank + 1))
    logits = logits[:, :end - start]  # the rest is the vocabulary's padding
    mine = (targets - start).masked_fill((targets < start) | (targets >= end), -1)
    chosen = -F.nll_loss(logits, mine, ignore_index=-1, reduction="none")  # 0 if the target is another rank's
    lse = logits.logsumexp(1)
    highest = lse.detach().clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)  # each rank's own -> replicated
    total, chosen = ReduceFromTP.apply(torch.stack([(lse - highest).exp(), chosen]), tp)  # partial -> replicated
    return (total.log() + highest - chosen).masked_fill(targets == ignore_index, 0).sum()


def sum_gradients(gradients, tp):
    """After backward, where x was cut: those of norms and row biases have seen this rank's positions only."""
    flat = torch.cat([grad.flatten() for grad in gradients])
    dist.all_reduce(flat, group=tp.group)  # partial -> replicated
    for grad, total in zip(gradients, flat.split([grad.numel() for grad in gradients])):
        grad.copy_(total.view_as(grad))


def squared_norm(parameters, tp):
    """Of the whole model's gradient: sharded ones are summed over ranks, replicated ones counted once."""
    sharded, whole = ([p.grad for p in parameters if hasattr(p, "tp_dim") is yes] for yes in (True, False))
    square = nn.utils.get_total_norm(sharded).square()
    dist.all_reduce(square, group=tp.group)  # partial -> replicated
    return square + nn.utils.get_total_norm(whole).square()


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, tp):
    """GPT.forward stays as it is, but gives (B, T, V/t)."""
    for attn, mlp in ((block.attn, block.mlp) for block in model.blocks):
        cut(column_linear, 0, tp, attn.q, attn.k, attn.v, mlp.up)  # q, k, v are not called: attention has one f for all
        cut(row_linear, 1, tp, attn.out, mlp.down)
        cut(attention, 0, tp, attn)
    cut(embedding, 0, tp, model.tok, model.pos)
    cut(column_linear, 0, tp, model.head)
    model.head.weight = model.tok.weight
    return model


def full_state_dict(model, tp):
    return {name: unshard(p, p, tp).detach() for name, p in model.state_dict(keep_vars=True).items()}


def full_gradients(model, tp):
    return {name: unshard(p.grad, p, tp) for name, p in model.named_parameters()}


def train_step(model, optimizer, x, y, valid, clip, tp):
    """x, y: the whole batch (B, T), on every rank -> the loss and gradient norm, on every rank."""
    optimizer.zero_grad()
    loss = vocab_parallel_cross_entropy(model(x), y, model.tok.weight.tp_whole, tp.group) / valid
    loss.backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    if isinstance(tp, CutSequence):
        sum_gradients([p.grad for p in parameters if not hasattr(p, "tp_dim")], tp)  # partial -> replicated
    norm = clip_gradients(parameters, clip, squared_norm(parameters, tp).sqrt())  # partial -> replicated
    optimizer.step()
    return loss, norm


# ---- 3. at work: the same with torch's own API -------------------------------


def parallelize_at_work(model, mesh, sp):
    x, whole = Shard(1) if sp else Replicate(), Replicate()
    norm = at_work.SequenceParallel()
    norm.sequence_sharding = (x,)  # without --sp: not cut, but the same kind of parameters as all others
    block = {"attn mlp": at_work.PrepareModuleInput(input_layouts=x, desired_input_layouts=whole),  # f once for q, k, v
             "attn.q attn.k attn.v mlp.up": at_work.ColwiseParallel(),
             "attn.out mlp.down": at_work.RowwiseParallel(output_layouts=x), "norm1 norm2": norm}
    plan = {f"blocks.*.{name}": style for names, style in block.items() for name in names.split()}
    plan.update(tok=at_work.RowwiseParallel(input_layouts=whole, output_layouts=x), norm=norm,
                pos=at_work.RowwiseParallel(input_layouts=whole, output_layouts=Shard(0) if sp else whole),
                head=at_work.ColwiseParallel(input_layouts=x, output_layouts=Shard(-1), use_local_output=False))
    at_work.parallelize_module(model, mesh, plan)
    model.head.weight = model.tok.weight
    return model


def train_step_at_work(model, optimizer, x, y, valid, clip, tp):
    optimizer.zero_grad()
    with at_work.loss_parallel():
        loss = loss_sum(model(x), y) / valid
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    optimizer.step()
    return loss.full_tensor(), norm.full_tensor()


# ---- 4. run ------------------------------------------------------------------


def main():
    args = arguments(__doc__, sp=(False, "sequence parallel: cut x along T between the matrices"))
    t, cfg = args.world_size, args.cfg
    require(cfg.heads % t == 0, f"--heads {cfg.heads}, --width {cfg.width}: {t} ranks cannot share heads evenly")
    require(not args.sp or cfg.seq % t == 0, f"--seq {cfg.seq} does not divide by {t} ranks, as --sp needs")
    require(args.impl == "scratch" or cfg.seq > (t - 1) * -(-cfg.seq // t),
            f"--seq {cfg.seq}: torch leaves the last of {t} ranks no positions: take a multiple of {t}")
    run = Run(args)
    mesh = init_device_mesh(run.device.type, (t,))
    with run:
        sides, tp = {}, CutSequence() if args.sp else WholeSequence()
        for impl in run.impls:
            model = build(cfg, args.seed, run.device, run.dtype)
            total = sum(p.numel() for p in model.parameters())
            model = parallelize(model, tp) if impl == "scratch" else parallelize_at_work(model, mesh, args.sp)
            step_fn = train_step if impl == "scratch" else train_step_at_work
            sides[impl] = model, adamw(model.parameters(), args.lr), step_fn
        own = sum(getattr(p, "_local_tensor", p).numel() for p in sides[run.impls[0]][0].parameters())
        run.say(f"tensor_parallel: {t} ranks on {run.device.type}, {args.dtype}, {total:,} parameters, {own:,} here")
        for impl, step in run.steps():
            model, optimizer, step_fn = sides[impl]
            x, y, valid = run.batch(step)
            with run.measure(impl, step, model, optimizer):
                loss, norm = step_fn(model, optimizer, x, y, valid, args.clip, tp)
            part = loss / t  # each rank has the whole
            run.log(impl, step, part, norm, full_gradients, full_state_dict, model, tp)
        if "scratch" in run.impls:  # V' and T' are padded until they divide; a number has b bytes, in the loss s bytes
            (L, C, _, V, T), B, b, ledger = cfg, args.batch, run.dtype.itemsize, run.ledger["scratch"]
            replicated, shards = b * (6 * L + 2) * C, b * ((12 * C + 7) * L + V + -V % t + T + -T % t) * C // t
            acts, sums = b * (B * T * (4 * L + 2) + T) * C, max(b, 4) * 3 * B * T + b
            rows = [("all_reduce", 2 * (acts + sums), "2 [b (B T (4 L + 2) + T) C + 3 s B T + b]")]
            if args.sp:
                rows = [("all_gather", acts + b * B * T * (2 * L + 1) * C, "b (B T (6 L + 3) + T) C"),
                        ("reduce_scatter", acts, "b (B T (4 L + 2) + T) C"),
                        ("all_reduce", 2 * (replicated + sums), "2 [b (6 L + 2) C + 3 s B T + b]")]
            for name, sent, text in rows:
                run.textbook(f"wire {name}", f"(t-1)/t {text}", (t - 1) * sent / t, ledger.collectives[name]["wire"])
            text = "b [((12 C + 7) L + V' + T') C / t + (6 L + 2) C]"
            run.textbook("parameters held", text, shards + replicated, ledger.memory["parameters"])
        return run.finish(total, own)


if __name__ == "__main__":
    sys.exit(main())
