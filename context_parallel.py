"""Context parallelism: every rank holds a part of each sequence; only attention reaches for the others' tokens.

    ring       hop 0  hop 1  hop 2  hop 3  work      zigzag     hop 0  hop 1  hop 2  hop 3  work
    rank 0        0*     3-     2-     1-     1      rank 0      0,7*   3,4/   2,5/   1,6/     4
    rank 1        1*      0     3-     2-     3      rank 1      1,6*   0,7/   3,4/   2,5/     4
    rank 2        2*      1      0     3-     5      rank 2      2,5*   1,6/   0,7/   3,4/     4
    rank 3        3*      2      1      0     7      rank 3      3,4*   2,5/   1,6/   0,7/     4

    whose K and V are here: * own, causally   / half of the pairs of query and key are wanted   - none, all are later

ring and zigzag: K and V go around, and results are merged by their log-sum-exp. In backward they go around again,
dK and dV one hop behind. allgather: zigzag's blocks, but K and V are gathered, in backward once more. ulysses: an
all-to-all turns all heads of T/N tokens into H/N heads of all tokens; another one turns the result back.

    on each rank, N ranks                    plain GPT   ring, zigzag, allgather   ulysses
    activations                              all         1/N                       1/N
    sent per block, forward                  -           2 (N-1) S                 4 (N-1)/N S
    sent per block, backward                 -           4 (N-1) S                 4 (N-1)/N S
    sent per step, gradients of P weights    -           2 (N-1)/N P               2 (N-1)/N P
    in numbers of the model's dtype, dK and dV in fp32 or better; S = B T/N C are those of one of q, k, v, out

Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889, section 3. Llama team 2024, "The
Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.2 (zigzag, all-gather). Jacobs et al. 2023, "DeepSpeed
Ulysses", arXiv:2309.14509, section 3. At work: torch.distributed.tensor.experimental.context_parallel.

    torchrun --standalone --nproc_per_node=2 context_parallel.py --attn zigzag
"""
import itertools
import math
import sys
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from common import Run, adamw, arguments, build, loss_sum, require

# ---- 1. the technique (copy this; it needs only torch) -----------------------

aten = torch.ops.aten
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def contiguous(rank, n):
    """The chunks of the sequence that a rank holds, n in all over n ranks."""
    return [rank]


def zigzag(rank, n):
    """One from the front and one from the back, 2n in all (Llama 3, 3.3.2)."""
    return [rank, 2 * n - 1 - rank]


def positions(cut, rank, n, T):
    """The tokens that a rank holds of T -> (T/n,) int64"""
    chunks = cut(rank, n)
    size = T // (n * len(chunks))
    return torch.cat([torch.arange(c * size, (c + 1) * size) for c in chunks])


def seen(mine, theirs, t):
    """What t queries in chunks `mine` see of t keys in chunks `theirs` -> first query, number of keys, causal?

    Queries from the first on see keys up to that number: all of them, or causally where the chunks are the same.
    """
    if mine == theirs:
        return 0, t, True
    size = t // len(mine)
    return sum(c < theirs[0] for c in mine) * size, sum(c < mine[-1] for c in theirs) * size, False


def fused(q):
    """The width of q's numbers if torch has a fused GPU kernel for it: 2 flash, 4 memory-efficient, 0 none."""
    return q.dtype.itemsize % 8 if q.shape[-1] % 8 == 0 else 0


def attend_block(q, k, v, causal=False):
    """(B, H, T, D), k and v with their own T -> attention to these keys alone, its log-sum-exp (B, H, T)."""
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal)
    if fused(q) == 2:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    if fused(q) == 4:
        out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)[:2]
        return out, lse[:, :, :q.shape[2]]  # was padded to a multiple of 32
    return [x.to(q.device) for x in attend_block(q.cpu(), k.cpu(), v.cpu(), causal)]  # for proofs in fp64


def attend_block_backward(dout, q, k, v, out, lse, causal=False):
    """-> dq, dk, dv of one block. With out and lse of all blocks, exp(score - lse) is the true probability."""
    rng = torch.empty(0, dtype=torch.int64, device=q.device)  # there is no dropout
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, causal)
    if fused(q) == 2:
        return aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, rng, rng)
    if fused(q) == 4:
        lse = F.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
        return aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, lse, rng, rng, 0.0, [True, True, True, False], causal)[:3]
    return [x.to(q.device) for x in attend_block_backward(*(x.cpu() for x in (dout, q, k, v, out, lse)), causal)]


def merge(out, lse, block_out, block_lse):
    """In place: attention to some keys, and to others -> to both. The weights are each one's share of exp(score)."""
    out.lerp_(block_out.to(out.dtype), torch.sigmoid(block_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, block_lse))


class Hop:
    """A tensor on its way to the next rank of the ring, while the one from the rank before arrives."""

    def __init__(self, tensor, group):
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        self.sent, self.received = tensor, torch.empty_like(tensor)
        self.works = dist.batch_isend_irecv([  # own -> that of the rank before
            dist.P2POp(dist.isend, self.sent, group=group, group_peer=(rank + 1) % n),
            dist.P2POp(dist.irecv, self.received, group=group, group_peer=(rank - 1) % n)])

    def wait(self):
        for work in self.works:
            work.wait()
        self.sent = self.works = None  # only now may its memory go
        return self.received


def bring_by_ring(kv, group):
    """Yields rank, its K and V: own ones, then of each rank before. Meanwhile the next ones are on their way."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    for hop in range(n):
        travel = Hop(kv, group) if hop < n - 1 else None
        yield (rank - hop) % n, kv
        kv = travel.wait() if travel else None


def return_by_ring(parts, group):
    """parts: what this rank adds to the gradient of each K and V, as bring_by_ring yields them -> that of its own.

    A part joins the sum from the rank before and goes on, while the caller makes the next one. Zeros travel, too:
    a hop that one rank leaves out is a hop that the others wait for.
    """
    own, travel = next(parts), None
    for part in parts:
        if travel:
            part += travel.wait()
        travel = Hop(part, group)
    return own + travel.wait() if travel else own  # the last hop brings home what the others have added


def bring_by_gather(kv, group):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    everyone = kv.new_empty(n, *kv.shape)
    all_gather(everyone, kv.unsqueeze(0), group=group)  # sharded -> replicated
    for i in range(n):
        yield (rank - i) % n, everyone[(rank - i) % n]


def return_by_gather(parts, group):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    own = next(parts)
    everyone = own.new_empty(n, *own.shape)
    for i, part in enumerate(itertools.chain([own], parts)):
        everyone[(rank - i) % n] = part
    reduce_scatter(own.unsqueeze(0), everyone, group=group)  # partial -> sharded
    return own


class BlockwiseAttention(torch.autograd.Function):
    """Causal attention of own queries to the keys and values of all ranks, block by block (Liu 2023, section 3)."""

    @staticmethod
    def forward(ctx, q, k, v, group, cut, bring, give_back):
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        own = torch.stack([k, v])  # (2, B, H, T/N, D)
        for source, (k, v) in bring(own, group):
            first, keys, causal = seen(cut(rank, n), cut(source, n), q.shape[2])
            if causal:  # own keys come first
                out, lse = attend_block(q, k, v, causal)
                out = out.to(lse.dtype)  # fp32 or better
            elif keys:
                block = attend_block(q[:, :, first:], k[:, :, :keys], v[:, :, :keys])
                merge(out[:, :, first:], lse[:, :, first:], *block)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own, out, lse)
        ctx.how = group, cut, bring, give_back
        return out

    @staticmethod
    def backward(ctx, dout):
        (q, own, out, lse), (group, cut, bring, give_back) = ctx.saved_tensors, ctx.how
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        dq = torch.zeros_like(q, dtype=lse.dtype)

        def parts():
            for source, (k, v) in bring(own, group):
                first, keys, causal = seen(cut(rank, n), cut(source, n), q.shape[2])
                dkv = torch.zeros_like(own, dtype=lse.dtype)
                if keys:
                    mine = [x[:, :, first:] for x in (dout, q, out, lse)]
                    block = attend_block_backward(*mine[:2], k[:, :, :keys], v[:, :, :keys], *mine[2:], causal)
                    dq[:, :, first:] += block[0]
                    dkv[0, :, :, :keys], dkv[1, :, :, :keys] = block[1:]
                yield dkv

        dk, dv = give_back(parts(), group).to(q.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None, None


class AllToAll(torch.autograd.Function):
    """Cut along dim `cut`, a part for every rank; join along dim `join` what comes from every rank."""

    @staticmethod
    def forward(ctx, x, cut, join, group):
        ctx.dims = join, cut, group
        parts = torch.stack(x.chunk(dist.get_world_size(group), cut)).contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)  # sharded(join) -> sharded(cut)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, *ctx.dims), None, None, None


def ulysses_attention(q, k, v, group=None):
    q, k, v = (AllToAll.apply(x, 1, 2, group) for x in (q, k, v))  # (B, H/N, T, D)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # any attention would do
    return AllToAll.apply(out, 2, 1, group)  # (B, H, T/N, D)


RING, GATHER = (bring_by_ring, return_by_ring), (bring_by_gather, return_by_gather)
ATTENTION = {  # name: attention(q, k, v, group), each (B, H, T/N, D); the tokens that a rank holds
    "ring": (lambda *qkvg: BlockwiseAttention.apply(*qkvg, contiguous, *RING), contiguous),
    "zigzag": (lambda *qkvg: BlockwiseAttention.apply(*qkvg, zigzag, *RING), zigzag),
    "allgather": (lambda *qkvg: BlockwiseAttention.apply(*qkvg, zigzag, *GATHER), zigzag),
    "ulysses": (ulysses_attention, contiguous)}


def sum_gradients(parameters, group=None):
    """Every rank has the gradients of its own tokens: one all-reduce of all, side by side, of one dtype."""
    parameters = [p for p in parameters if p.grad is not None]
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat, group=group)  # partial -> replicated
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = part.view_as(p)


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, attn, group=None):
    """The model then takes a rank's own tokens: x[:, positions(cut, rank, n, T)]."""
    (attention, cut), rank, n = ATTENTION[attn], dist.get_rank(group), dist.get_world_size(group)
    for block in model.blocks:
        block.attn.attend = lambda q, k, v: attention(q, k, v, group)
    # the GPT counts its tokens 0, 1, ..; their positions are cut like the tokens themselves
    model.pos.register_forward_pre_hook(lambda _, x: positions(cut, rank, n, n * len(x[0])).to(x[0].device))
    return model


def full_state_dict(model):
    return model.state_dict()  # replicated


def full_gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def train_step(model, optimizer, x, y, valid, clip, group=None):
    """x, y: this rank's tokens (B, T/N); valid: targets of the whole batch -> this rank's part of the loss, norm."""
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    loss.backward()
    sum_gradients(model.parameters(), group)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)  # replicated: no communication
    optimizer.step()
    return loss, norm


# ---- 3. at work: the same with torch's own API -------------------------------


def train_step_at_work(model, optimizer, x, y, valid, clip, mesh):
    """x, y: all tokens (B, T), which torch cuts in place, as zigzag does."""
    from torch.distributed.tensor.experimental import context_parallel  # takes seconds
    order = torch.arange(x.shape[1], device=x.device)
    shards = dict(buffers=[x, y, order], buffer_seq_dims=[1, 1, 0], no_restore_buffers={x, y, order})
    with model.pos.register_forward_pre_hook(lambda *_: order), context_parallel(mesh, **shards):
        return train_step(model, optimizer, x, y, valid, clip)  # FSDP or DDP would sum the gradients


# ---- 4. run ------------------------------------------------------------------


def work(attn, rank, n):
    """Multiply-adds of a rank's attention, in units of causal attention within T/N tokens."""
    cut = ATTENTION[attn][1]
    blocks = [seen(cut(rank, n), cut(source, n), 2) for source in range(n)]
    return n if attn == "ulysses" else sum((2 - first) * keys / (2 + 2 * causal) for first, keys, causal in blocks)


def picture(attn, n):
    """The docstring's table, line by line: who works on which chunks at each hop. At most 8 ranks and hops."""
    cut, few = ATTENTION[attn][1], range(min(n, 8))
    yield f"{attn:9}" + "".join(f"  hop {hop}" for hop in few) + "  work"
    for rank in few:
        row = f"rank {rank:<4}"
        for source in ((rank - hop) % n for hop in few):
            first, keys, causal = seen(cut(rank, n), cut(source, n), 2)
            mark = "*" if causal else {0: "-", 2: "/", 4: ""}[(2 - first) * keys]
            row += f"{','.join(map(str, cut(source, n))) + mark:>7}"
        yield f"{row}{work(attn, rank, n):6.0f}"


def textbook(run, args, total, tensors):
    n, b, L = run.world_size, run.dtype.itemsize, run.cfg.layers
    d, S, ledger = max(4, b), args.batch * run.cfg.seq // n * run.cfg.width, run.ledger[run.impls[0]]
    rows = [("all_reduce", "2 (N-1)/N b P", 2 * (n - 1) / n * b * total)]
    rows += {"allgather": [("all_gather", "L 4 (N-1) S b", L * 4 * (n - 1) * S * b),
                           ("reduce_scatter", "L 2 (N-1) S d, d bytes a dK", L * 2 * (n - 1) * S * d)],
             "ulysses": [("all_to_all", "L 8 (N-1)/N S b", L * 8 * (n - 1) / n * S * b)],
             }.get(args.attn, [("send", "L (N-1) S (4 b + 2 d), d bytes a dK", L * (n - 1) * S * (4 * b + 2 * d))])
    for kind, formula, expected in rows:
        run.textbook(f"wire {kind}", formula, expected, ledger.collectives.get(kind, {"wire": 0})["wire"])
    run.textbook("parameters held", "b P", b * total, ledger.memory["parameters"])
    run.textbook("gradients held", "b P", b * total, ledger.memory["gradients"])
    run.textbook("AdamW states held", "2 b P + 4 per tensor", 2 * b * total + 4 * tensors, ledger.memory["optimizer"])


def main():
    args = arguments(__doc__, attn=("zigzag", "how queries meet the keys of other ranks", tuple(ATTENTION)))
    n, T, H, cut = args.world_size, args.cfg.seq, args.cfg.heads, ATTENTION[args.attn][1]
    chunks, gpus = n * len(cut(0, n)), args.device != "cpu" and torch.cuda.is_available()
    require(args.impl == "scratch" or gpus and args.dtype != "fp64" and not args.dry_run,
            "--impl torch: torch's context_parallel needs GPUs and fp32 or bf16; take --impl scratch")
    require(T % chunks == 0, f"--seq {T} does not divide into {chunks} chunks, for {args.attn} on {n} ranks")
    require(args.attn != "ulysses" or H % n == 0, f"--heads {H} does not divide over {n} ranks, for ulysses")
    run = Run(args)
    mesh = init_device_mesh(run.device.type, (n,)) if "torch" in run.impls else None
    with run:
        sides, own = {}, positions(cut, run.rank, n, T).to(run.device)
        for impl in run.impls:
            model = build(run.cfg, args.seed, run.device, run.dtype)
            total, tensors = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
            step_fn = partial(train_step_at_work, mesh=mesh)
            if impl == "scratch":
                model, step_fn = parallelize(model, args.attn), train_step
            sides[impl] = model, adamw(model.parameters(), args.lr), step_fn
        run.say(f"context_parallel, {args.attn}: {n} ranks on {run.device.type}, {args.dtype}, "
                f"{total:,} parameters, all of them on each rank")
        run.say("\n".join(picture(args.attn, n)))
        for impl, step in run.steps():
            model, optimizer, step_fn = sides[impl]
            x, y, valid = run.batch(step)
            if impl == "scratch":
                x, y = x[:, own], y[:, own]  # (B, T/N)
            with run.measure(impl, step, model, optimizer):
                loss, norm = step_fn(model, optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss, norm)
            if run.keeps(step):
                run.trace[impl].keep(step, full_gradients(model), full_state_dict(model))
        run.extra["work"] = [work(args.attn, rank, n) for rank in range(n)]
        textbook(run, args, total, tensors)
        return run.finish(total, total)


if __name__ == "__main__":
    sys.exit(main())
