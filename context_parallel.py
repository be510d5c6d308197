"""Context parallelism: every rank holds a part of each sequence; only attention reaches for the others' tokens.

    ring       hop 0  hop 1  hop 2  hop 3  work      zigzag     hop 0  hop 1  hop 2  hop 3  work
    rank 0        0*     3-     2-     1-     1      rank 0      0,7*   3,4/   2,5/   1,6/     4
    rank 1        1*      0     3-     2-     3      rank 1      1,6*   0,7/   3,4/   2,5/     4
    rank 2        2*      1      0     3-     5      rank 2      2,5*   1,6/   0,7/   3,4/     4
    rank 3        3*      2      1      0     7      rank 3      3,4*   2,5/   1,6/   0,7/     4
    whose K and V are here: * own, causally   / half of the pairs with own queries are wanted   - none, all are later

ring and zigzag: K and V go around, and results are merged by their log-sum-exp. In backward they go around again,
dK and dV one hop behind. allgather: zigzag's blocks, but a rank gathers all K and V of a layer, in backward once more.
ulysses: an all-to-all turns all heads of T/N tokens into H/N heads of all tokens; another one turns the result back.

    on each rank, N ranks                    plain GPT   ring, zigzag, allgather   ulysses
    activations kept (weights: all)          all         1/N                       1/N
    sent per block, forward                  -           2 (N-1) S                 4 (N-1)/N S
    sent per block, backward                 -           4 (N-1) S                 4 (N-1)/N S
    sent per step, gradients of P weights    -           2 (N-1)/N P               2 (N-1)/N P
    in numbers of the model's dtype, dK and dV in fp32 or better; S = B T/N C are those of one of q, k, v, out

Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889, section 3. Llama team 2024, "The
Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.2 (zigzag, all-gather). Jacobs et al. 2023, "DeepSpeed
Ulysses", arXiv:2309.14509, section 3. At work: torch.distributed.tensor.experimental.context_parallel.

    torchrun --standalone --nproc_per_node=2 context_parallel.py --attn zigzag
"""
import math
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from common import Run, adamw, arguments, build, clip_gradients, loss_sum, require

# ---- 1. the technique (copy this; it needs only torch) -----------------------

aten = torch.ops.aten
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def attend_block(q, k, v, causal):
    """(B, H, T, D), k and v with their own T -> attention to these keys alone, its log-sum-exp (B, H, T)."""
    if q.is_cuda and q.dtype.itemsize == 2:  # GPUs' kernels want D to be a multiple of 8, in fp32 of 4, up to 256
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    if q.is_cuda and q.dtype.itemsize == 4:
        out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)[:2]
        return out, lse[:, :, :q.shape[2]]  # was padded to a multiple of 32
    return [x.to(q.device) for x in aten._scaled_dot_product_flash_attention_for_cpu(
        q.cpu(), k.cpu(), v.cpu(), is_causal=causal)]  # also for proofs on GPUs, which have no such kernel in fp64


def attend_block_backward(dout, q, out, lse, k, v, causal):
    """-> dq, dk, dv of one block. With out and lse of all blocks, exp(score - lse) is the true probability."""
    rng = torch.empty(0, dtype=torch.int64, device=q.device)  # there is no dropout
    if q.is_cuda and q.dtype.itemsize == 2:
        return aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, rng, rng)
    if q.is_cuda and q.dtype.itemsize == 4:
        lse = F.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
        return aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, lse, rng, rng, 0.0, [True, True, True, False], causal)[:3]
    return [x.to(q.device) for x in aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(x.cpu() for x in (dout, q, k, v, out, lse)), 0.0, causal)]


class Ring:
    """K and V go around the ring of n ranks, their gradients one hop behind (Liu 2023, section 3)."""
    def __init__(self, rank, n, group=None):
        self.rank, self.n, self.group = rank, n, group

    def chunks(self, hop=0):
        return [(self.rank - hop) % self.n]  # of n; those that the rank so many hops before holds

    def positions(self, T):
        return torch.arange(T).view(self.n * len(self.chunks()), -1)[self.chunks()].flatten()  # own ones, (T/N,)

    def seen(self, hop, t):
        """t own queries, t keys of so many hops before -> first query to see any, keys it and the rest see, causal?"""
        if hop == 0:
            return 0, t, True
        mine, theirs, size = self.chunks(), self.chunks(hop), t // len(self.chunks())
        return sum(c < theirs[0] for c in mine) * size, sum(c < mine[-1] for c in theirs) * size, False

    def hop(self, tensor):
        """Starts it on its way to the next rank -> wait(), which returns what has come from the rank before."""
        received = torch.empty_like(tensor)
        works = dist.batch_isend_irecv([  # own -> the rank before's
            dist.P2POp(dist.isend, tensor, group=self.group, group_peer=(self.rank + 1) % self.n),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=(self.rank - 1) % self.n)])

        def wait(sent=tensor):  # which must live until then
            for work in works:
                work.wait()
            return received
        return wait

    def bring(self, kv):
        """Own K and V, then those of each rank before, which travel while the caller works on those yielded."""
        for _ in range(self.n - 1):
            wait = self.hop(kv)
            yield kv
            kv = wait()
        yield kv

    def give_back(self, parts):
        """parts: what this rank adds to the gradient of each K and V that bring yields -> the sum for its own. A part
        joins the sum from the rank before and goes on while the caller makes the next. Zeros travel, too."""
        own, wait = next(parts), None
        for part in parts:
            if wait:
                part += wait()
            wait = self.hop(part)
        return own + wait() if wait else own  # the last hop brings home what the others have added

    def attend(self, q, k, v):
        return BlockwiseAttention.apply(q, torch.stack([k, v]), self)  # each (B, H, T/N, D)


class Zigzag(Ring):  # the same, but of 2n chunks one early and one late
    def chunks(self, hop=0):
        return [rank := (self.rank - hop) % self.n, 2 * self.n - 1 - rank]


class AllGather(Zigzag):  # the same blocks, but one collective each way (Llama 3, section 3.3.2)
    def bring(self, kv):
        everyone = kv.new_empty(self.n, *kv.shape)
        all_gather(everyone, kv.unsqueeze(0), group=self.group)  # sharded -> replicated
        yield from (everyone[self.rank - hop] for hop in range(self.n))  # below 0: from the end

    def give_back(self, parts):
        everyone = None
        for hop, part in enumerate(parts):
            everyone = part.new_empty(self.n, *part.shape) if everyone is None else everyone
            everyone[self.rank - hop] = part
        reduce_scatter(part.unsqueeze(0), everyone, group=self.group)  # partial -> sharded, over what is in everyone
        everyone.untyped_storage().resize_(0)  # now: the backend's thread may hold on to it for a while
        return part


class BlockwiseAttention(torch.autograd.Function):  # own queries, the keys and values of all ranks; no T x T matrix
    @staticmethod
    def forward(ctx, q, own, ring):  # own K and V: (2, B, H, T/N, D)
        out = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        lse = out.new_full(q.shape[:3], -math.inf)
        for hop, kv in enumerate(ring.bring(own)):
            first, keys, causal = ring.seen(hop, q.shape[2])
            if keys:  # attention to these and to those before: each weighs its share of the sum of exp(score)
                block, block_lse = attend_block(q[:, :, first:], *kv[..., :keys, :], causal)
                out[:, :, first:].lerp_(block.to(out.dtype), torch.sigmoid(block_lse - lse[:, :, first:])[..., None])
                lse[:, :, first:] = torch.logaddexp(lse[:, :, first:], block_lse)
        ctx.ring, out = ring, out.to(q.dtype)
        ctx.save_for_backward(q, own, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, own, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=lse.dtype)

        def parts():
            for hop, kv in enumerate(ctx.ring.bring(own)):
                first, keys, causal = ctx.ring.seen(hop, q.shape[2])
                dkv = torch.zeros_like(own, dtype=lse.dtype)
                if keys:
                    mine = (x[:, :, first:] for x in (dout, q, out, lse))
                    block = attend_block_backward(*mine, *kv[..., :keys, :], causal)
                    dq[:, :, first:] += block[0]
                    dkv[0, ..., :keys, :], dkv[1, ..., :keys, :] = block[1:]
                yield dkv

        return dq.to(q.dtype), ctx.ring.give_back(parts()).to(q.dtype), None  # dK, dV: partial -> sharded


class AllToAll(torch.autograd.Function):  # cut along one dim, a part for every rank; join along another
    @staticmethod
    def forward(ctx, x, cut, join, group):
        ctx.back = join, cut, group
        parts = torch.stack(x.chunk(dist.get_world_size(group), cut)).contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)  # sharded(join) -> sharded(cut)
        joined = torch.cat(received.unbind(), join)
        for buffer in (parts, received):
            buffer.untyped_storage().resize_(0)  # now: the backend's thread may hold on to it for a while
        return joined

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, *ctx.back), None, None, None


class Ulysses(Ring):
    def attend(self, q, k, v):
        q, k, v = (AllToAll.apply(x, 1, 2, self.group) for x in (q, k, v))  # (B, H/N, T, D)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # any attention would do
        return AllToAll.apply(out, 2, 1, self.group)  # (B, H, T/N, D)


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, ring):
    """The model then takes a rank's own tokens, x[:, ring.positions(T)]."""
    for block in model.blocks:
        block.attn.attend = ring.attend
    # the GPT counts its tokens 0, 1, ..; their positions are cut like the tokens themselves
    model.pos.register_forward_pre_hook(lambda _, x: ring.positions(ring.n * len(x[0])).to(x[0].device))
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
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(flat, group=group)  # partial -> replicated
    nn.utils.vector_to_parameters(flat, gradients)  # they become views of it
    norm = clip_gradients(model.parameters(), clip)  # replicated: no communication
    optimizer.step()
    return loss, norm


# ---- 3. at work: the same with torch's own API -------------------------------


def train_step_at_work(model, optimizer, x, y, valid, clip, mesh):
    """x, y: all tokens (B, T), which torch cuts in place, as zigzag does."""
    from torch.distributed.tensor.experimental import context_parallel  # takes seconds, and NumPy
    order = torch.arange(x.shape[1]).to(x)
    shards = dict(buffers=[x, y, order], buffer_seq_dims=[1, 1, 0], no_restore_buffers={x, y, order})
    with model.pos.register_forward_pre_hook(lambda *_: order), context_parallel(mesh, **shards):
        return train_step(model, optimizer, x, y, valid, clip)  # FSDP or DDP would sum the gradients


# ---- 4. run ------------------------------------------------------------------


def picture(kind, n):
    """The docstring's table, of at most 8 ranks and hops. Work is in units of causal attention within T/N tokens."""
    yield f"{kind.__name__.lower():9}" + "".join(f"  hop {hop}" for hop in range(min(n, 8))) + "  work"
    for ring in (kind(rank, n) for rank in range(min(n, 8))):
        pairs = [(2 - first) * keys / (1 + causal) for first, keys, causal in (ring.seen(h, 2) for h in range(n))]
        marks = ["*"] + [{0: "-", 2: "/", 4: ""}[p] for p in pairs[1:8]]
        row = "".join(f"{','.join(map(str, ring.chunks(hop))) + mark:>7}" for hop, mark in enumerate(marks))
        yield f"rank {ring.rank:<4}{row}{sum(pairs) / 2:6.0f}"


def main():
    kinds = {kind.__name__.lower(): kind for kind in (Ring, Zigzag, AllGather, Ulysses)}
    args = arguments(__doc__, attn=("zigzag", "how queries meet the keys of other ranks", tuple(kinds)))
    n, T, H, kind = args.world_size, args.cfg.seq, args.cfg.heads, kinds[args.attn]
    chunks, gpus = n * len(kind(0, n).chunks()), args.device != "cpu" and torch.cuda.is_available()
    require(args.impl == "scratch" or gpus and args.dtype != "fp64" and not args.dry_run,
            f"--impl {args.impl}: torch's context_parallel needs GPUs and fp32 or bf16; take --impl scratch")
    require(T % chunks == 0, f"--seq {T} does not divide into {chunks} chunks, for {args.attn} on {n} ranks")
    require(kind != Ulysses or H % n == 0, f"--heads {H} does not divide over {n} ranks, for ulysses")
    run, sides = Run(args), {}
    mesh = dist.init_device_mesh(run.device.type, (n,))
    with run:
        ring, own = kind(run.rank, n), kind(run.rank, n).positions(T).to(run.device)
        for impl in run.impls:
            model = build(run.cfg, args.seed, run.device, run.dtype)
            sides[impl] = parallelize(model, ring) if impl == "scratch" else model, adamw(model.parameters(), args.lr)
        total = sum(p.numel() for p in model.parameters())
        b, LS = run.dtype.itemsize, run.cfg.layers * args.batch * T // n * run.cfg.width
        run.say(f"context_parallel: {n} ranks on {run.device.type}, {args.dtype}, {total:,} parameters on each; "
                f"work in {LS * T // n:,} multiply-adds")
        run.say("\n".join(picture(kind, n)) if kind != Ulysses else f"rank r: all chunks of heads r H/N .., work {n}")
        for impl, step in run.steps():
            (model, optimizer), (x, y, valid), step_fn, over = sides[impl], run.batch(step), train_step_at_work, mesh
            if impl == "scratch":
                x, y, step_fn, over = x[:, own], y[:, own], train_step, None  # (B, T/N)
            with run.measure(impl, step, model, optimizer):
                loss, norm = step_fn(model, optimizer, x, y, valid, args.clip, over)
            run.log(impl, step, loss, norm, full_gradients, full_state_dict, model)
        sent = {name: c["wire"] for name, c in run.ledger[run.impls[0]].collectives.items()}
        run.textbook("wire all_reduce", "2 (N-1)/N b P", 2 * (n - 1) * b * total / n, sent.pop("all_reduce"))
        formula, size = "L (N-1) S (4 b + 2 d), d bytes a dK", (n - 1) * LS * (4 * b + 2 * max(4, b))
        if kind == Ulysses:
            formula, size = "L 8 (N-1)/N S b", 8 * (n - 1) * LS * b / n
        if args.impl != "torch":
            run.textbook("wire of attention", formula, size, sum(sent.values()))
        return run.finish(total, total)


if __name__ == "__main__":
    sys.exit(main())
