"""Context parallelism: every rank holds a part of each sequence; attention alone needs the rest.

A sequence is cut into chunks 0, 1, .. whose keys and values (K and V) go around a ring of cp ranks.
Here are the chunks whose K and V a rank has at each hop, with a mark for the scores it computes:
    no mark: all (work 2)   /: half (1)   *: each query up to itself (1)   -: none (0)

    ring       hop 0  hop 1  hop 2  hop 3  work      zigzag     hop 0  hop 1  hop 2  hop 3  work
    rank 0        0*     3-     2-     1-     1      rank 0      0,7*   3,4/   2,5/   1,6/     4
    rank 1        1*      0     3-     2-     3      rank 1      1,6*   0,7/   3,4/   2,5/     4
    rank 2        2*      1      0     3-     5      rank 2      2,5*   1,6/   0,7/   3,4/     4
    rank 3        3*      2      1      0     7      rank 3      3,4*   2,5/   1,6/   0,7/     4

The hops' results are merged by their log-sum-exp (lse). In backward K and V go around again, and
one hop behind them dK and dV, to which each rank adds; they end at the owner. allgather: zigzag's
chunks, but all K and V come at once. ulysses: an all-to-all turns all heads of T/cp tokens into
H/cp heads of all tokens; another undoes it. In a layer a rank's q has Q elements, k and v S each:

    elements on each rank        plain GPT   ring, zigzag, allgather         ulysses
    weights                      all         all                             all
    saved activations            all         1/cp                            1/cp
    sent in a layer's forward    -           2 (cp-1) S                      2 (cp-1)/cp (S + Q)
    sent in a layer's backward   -           4 (cp-1) S, dK and dV in fp32   2 (cp-1)/cp (S + Q)
    sent to sum P gradients      -           2 (cp-1)/cp P                   2 (cp-1)/cp P

    replicate(model)                     # all ranks begin with the weights of the first
    ring = Zigzag()                      # of all ranks; else Zigzag(group)
    for layer in model.layers:
        layer.attn.attend = ring.attend  # attend(q, k, v) for a causal scaled_dot_product_attention
    own = ring.positions(T, device)      # (T/cp,): which tokens of x, and of the shifted y
    loss = loss_sum(model(x[:, own], positions=own), y[:, own])  # positions: for RoPE or a table
    (loss / valid).backward()            # loss_sum is in common.py; valid: targets of all ranks
    sum_gradients(model.parameters())    # of all ranks; then clip and step, as one process does

Not for: masks other than causal or none (packed documents, sliding windows), scales other than
D ** -0.5, dropout in attention, KV caches, v of another width than k, and layers besides attention
that look at other tokens (convolutions, means). On GPUs (Ampere on) all but ulysses want bf16,
fp16, D a multiple of 8, at most 256. Liu 2023, arXiv:2310.01889, section 3 (ring). Llama team 2024,
arXiv:2407.21783, section 3.3.2 (zigzag, allgather). Jacobs 2023, arXiv:2309.14509, section 3
(ulysses). At work: torch.distributed.tensor.experimental.context_parallel.
    torchrun --standalone --nproc_per_node=2 context_parallel.py --attn zigzag
"""
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

# imports of section 1 end here; the rest is for sections 2 to 4
import sys
from functools import cache, partial
from importlib.util import find_spec

from common import adamw, clip_gradients, loss_sum
from harness.flags import Flag, arguments, require
from harness.run import Run, Side

# ---- 1. the technique (copy this; it needs only torch) -----------------------

# In comments a tensor is partial (a summand on each rank), sharded (a piece) or replicated (whole).

aten = torch.ops.aten
# both were renamed in torch 2.13
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# Attention to one block of keys, by scaled_dot_product_attention's kernels, which return the lse.


def attend_block(q, k, v, causal):
    """q (B, H, queries, D) attends to k and v (B, H, keys, D) as if there were no other keys.

    -> the output, like q, and lse: the log-sum-exp of each query's scores (B, H, queries).
    """
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    if q.is_cuda:
        kernel = aten._scaled_dot_product_flash_attention
    out, lse, *_ = kernel(q, k, v, is_causal=causal)
    return out, lse


def attend_block_backward(dout, q, out, lse, k, v, causal):
    """-> dq, dk, dv of one block.

    out and lse are of attention to all blocks: exp(score - lse) is then the true probability.
    """
    if q.is_cuda:
        unused = q.new_empty(0, dtype=torch.int64)  # seed and offset of dropout: there is none
        return aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(),  # this kernel takes no slice of an lse
            # cum_seq is for sequences of several lengths
            cum_seq_q=None, cum_seq_k=None, max_q=q.shape[2], max_k=k.shape[2],
            dropout_p=0.0, is_causal=causal, philox_seed=unused, philox_offset=unused)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, dropout_p=0.0, is_causal=causal)


def repeat_heads(kv, H):
    """k, v, each of K heads: (2, B, K, keys, D) -> two (B, H, keys, D), each head H/K times."""
    times = H // kv.shape[2]
    repeated = kv.unsqueeze(3).expand(-1, -1, -1, times, -1, -1)  # (2, B, K, times, keys, D)
    return repeated.flatten(2, 3).unbind()  # flatten copies, unless times is 1


def sum_heads(dx, into):
    """The backward of repeat_heads: overwrite `into` (B, K, ..) with the sums of dx (B, H, ..)."""
    torch.sum(dx.unflatten(1, (into.shape[1], -1)), 2, dtype=into.dtype, out=into)


class Exchange:
    """A tensor goes to the next rank of the ring while that of the rank before comes here."""

    def __init__(self, tensor, group):
        rank = dist.get_rank(group)
        size = dist.get_world_size(group)
        self.sent = tensor  # it must live, unchanged, until wait()
        self.received = torch.empty_like(tensor)
        self.works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, self.sent, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, self.received, group=group, group_peer=(rank - 1) % size)])

    def wait(self):
        """-> what has come from the rank before."""
        for work in self.works:
            work.wait()
        return self.received


class Ring:
    """K and V go around the ring of cp ranks, their gradients one hop later (Liu 2023, section 3).

    In every layer `attend` takes the place of scaled_dot_product_attention. The model is given the
    tokens at `positions` alone, and the same positions for its position embedding or RoPE.
    """

    def __init__(self, group=None, causal=True):
        self.group = group  # None: the world
        self.causal = causal  # False: each query sees all keys, padding too, as in an encoder
        self.cp_rank = dist.get_rank(group)
        self.cp = dist.get_world_size(group)
        # attributes, so that kernels for other dtypes and another transport can take their place
        self.attend_block = attend_block
        self.attend_block_backward = attend_block_backward
        self.Exchange = Exchange

    def source(self, hop):
        """The rank whose K and V are here after so many hops."""
        return (self.cp_rank - hop) % self.cp

    def chunks(self, hop=0):
        """The chunks here after so many hops, in order."""
        return [self.source(hop)]

    def positions(self, T, device=None):
        """Which of a sequence's T tokens are this rank's -> (T/cp,) int64."""
        mine = self.chunks()
        count = self.cp * len(mine)
        assert T % count == 0, f"{T} tokens do not divide into {count} chunks: pad the end"
        by_chunk = torch.arange(T, device=device).view(count, -1)
        return torch.cat([by_chunk[chunk] for chunk in mine])

    def seen(self, hop, tokens):
        """-> (first, key_count, causal): what this rank's queries see of the keys of a hop.

        Queries from number `first` on see the first `key_count` keys; the queries before it see
        none. If causal, query i sees of these only keys 0 to i. tokens: how many a rank has.
        """
        if not self.causal:
            return 0, tokens, False
        if hop == 0:
            return 0, tokens, True  # a rank's tokens are in order, also those of chunks 0,7
        # Zigzag's pairs are nested. If theirs is inside mine (3,4 in 0,7), my later chunk sees both
        # and my earlier one none; if mine is (3,4 in 2,5), both of mine see the earlier of theirs
        mine = self.chunks()
        theirs = self.chunks(hop)
        size = tokens // len(mine)  # of a chunk
        blind = [chunk for chunk in mine if chunk < theirs[0]]  # see none of these keys
        visible = [chunk for chunk in theirs if chunk < mine[-1]]  # seen by all others of mine
        return len(blind) * size, len(visible) * size, False

    def bring(self, kv):
        """Yield this rank's K and V, then those of each rank before it, hop by hop."""
        for _ in range(self.cp - 1):
            passing = self.Exchange(kv, self.group)  # under way while the caller works with kv
            yield kv
            kv = passing.wait()
        yield kv

    def bring_back(self, parts):
        """-> the whole gradient of this rank's K and V: the sum of what all ranks add to it.

        parts yields for each hop what this rank adds to the gradient of the K and V that are here:
        zeros if its queries see none of them, since the next rank waits for the sum.
        """
        own = next(parts)  # for this rank's own K and V, which are here at hop 0
        if self.cp == 1:
            return own
        passing = self.Exchange(next(parts), self.group)
        for part in parts:  # each is made while the sum so far is on its way here
            part += passing.wait()  # the sum over the ranks that had these K and V before
            passing = self.Exchange(part, self.group)  # to the rank that has them at the next hop
        return own + passing.wait()  # the sum over all others: the last hop goes to the owner

    def attend(self, q, k, v):
        """Attention within the whole sequence: (B, H, T/cp, D) -> (B, H, T/cp, D).

        k and v may have K heads, a divisor of H: H/K query heads in a row share one. Only
        these K heads are sent. Every rank of the group calls `attend`, with equal shapes.
        """
        tokens = q.shape[2]
        assert tokens % len(self.chunks()) == 0, f"{tokens} tokens: cut them as positions() says"
        assert k.shape[2] == tokens, f"{k.shape[2]} keys for {tokens} queries: take equally many"
        assert q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} heads of q, {k.shape[1]} of k"
        assert q.stride(-1) == 1, "q: numbers of a head must lie side by side, as kernels want it"
        q, k = [x.to(v.dtype) for x in (q, k)]  # RoPE may have made fp32 of them
        return BlockwiseAttention.apply(q, torch.stack([k, v]), self)


class Zigzag(Ring):
    """The ring with equal work for all: of 2 cp chunks a rank has an early and a late one."""

    def chunks(self, hop=0):
        early = self.source(hop)
        late = 2 * self.cp - 1 - early
        return [early, late]


class AllGather(Zigzag):
    """Zigzag, with one collective each way; a layer holds all K and V (Llama 3, section 3.3.2)."""

    def bring(self, kv):
        all_kv = kv.new_empty(self.cp, *kv.shape)
        # sharded -> replicated. Not blocking: torch.compile would call another one, which hung
        all_gather(all_kv.view(-1), kv.view(-1), group=self.group, async_op=True).wait()
        for hop in range(self.cp):
            yield all_kv[self.source(hop)]

    def bring_back(self, parts):
        for hop, part in enumerate(parts):
            if hop == 0:
                by_rank = part.new_empty(self.cp, *part.shape)
            by_rank[self.source(hop)] = part
        result = torch.empty_like(by_rank[0])
        reduce_scatter(result.view(-1), by_rank.view(-1), group=self.group)  # partial -> sharded
        return result


class BlockwiseAttention(torch.autograd.Function):
    """This rank's queries attend to the K and V of all ranks; no T x T matrix is made."""

    @staticmethod
    def forward(ctx, q, own_kv, ring):  # q (B, H, T/cp, D), own_kv (2, B, K, T/cp, D)
        H, tokens = q.shape[1:3]
        out = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        lse = out.new_full(q.shape[:3], -math.inf)
        for hop, kv in enumerate(ring.bring(own_kv)):
            first, key_count, causal = ring.seen(hop, tokens)
            if key_count == 0:
                continue
            block_out, block_lse = ring.attend_block(
                q[:, :, first:], *repeat_heads(kv[..., :key_count, :], H), causal)
            # In the softmax over all keys so far, the keys of this block together have the share
            # e^block_lse / (e^block_lse + e^lse), a sigmoid; it is 1 at hop 0, where lse is -inf
            share = torch.sigmoid(block_lse - lse[:, :, first:])
            out[:, :, first:].lerp_(block_out.to(out.dtype), share.unsqueeze(-1))
            lse[:, :, first:] = torch.logaddexp(lse[:, :, first:], block_lse)
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, own_kv, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        ring = ctx.ring
        q, own_kv, out, lse = ctx.saved_tensors
        H, tokens = q.shape[1:3]
        wide = lse.dtype  # fp32 or better
        dq = torch.zeros_like(q, dtype=wide)

        def parts():
            """At each hop add to dq, and yield a summand of dK and dV, for the K and V here."""
            for hop, kv in enumerate(ring.bring(own_kv)):
                first, key_count, causal = ring.seen(hop, tokens)
                dkv = torch.zeros_like(own_kv, dtype=wide)
                if key_count > 0:
                    block_dq, block_dk, block_dv = ring.attend_block_backward(
                        dout[:, :, first:], q[:, :, first:], out[:, :, first:], lse[:, :, first:],
                        *repeat_heads(kv[..., :key_count, :], H), causal)
                    dq[:, :, first:] += block_dq
                    sum_heads(block_dk, into=dkv[0, :, :, :key_count])
                    sum_heads(block_dv, into=dkv[1, :, :, :key_count])
                yield dkv

        own_dkv = ring.bring_back(parts())  # partial -> sharded; runs parts(): dq is whole now
        return dq.to(q.dtype), own_dkv.to(q.dtype), None


class AllToAll(torch.autograd.Function):
    """A tensor sharded along one dim -> the same tensor sharded along another."""

    @staticmethod
    def forward(ctx, x, old_dim, new_dim, group):
        ctx.way_back = (new_dim, old_dim, group)
        parts = torch.stack(x.chunk(dist.get_world_size(group), new_dim))  # (cp, ..)
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)  # sharded(old_dim) -> sharded(new_dim)
        joined = torch.cat(received.unbind(), old_dim)
        for buffer in (parts, received):  # the collective is over, but gloo may keep references
            buffer.untyped_storage().resize_(0)  # frees the memory at once
        return joined

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, *ctx.way_back), None, None, None


class Ulysses(Ring):
    """All tokens of some heads instead of all heads of some tokens (Jacobs 2023, section 3)."""

    HEADS = 1  # dims of (B, H, T, D)
    TOKENS = 2

    def attend(self, q, k, v):
        """As Ring's; the heads of q and those of k and v must be multiples of cp."""
        assert k.shape[1] % self.cp == 0, f"{k.shape[1]} heads of k for {self.cp} ranks: take Ring"
        qkv = [x.to(v.dtype) for x in (q, k, v)]  # RoPE may have made fp32 of q and k
        # sharded(TOKENS) -> sharded(HEADS): (B, H/cp, T, D); any attention function may follow
        by_heads = [AllToAll.apply(x, self.TOKENS, self.HEADS, self.group) for x in qkv]
        out = F.scaled_dot_product_attention(*by_heads, is_causal=self.causal, enable_gqa=True)
        # sharded(HEADS) -> sharded(TOKENS): (B, H, T/cp, D)
        return AllToAll.apply(out, self.HEADS, self.TOKENS, self.group)


# The rest of a correct train step: weights are replicated, their gradients partial on every rank.


def replicate(model, group=None):
    """Give all ranks of the group the weights and buffers of its first rank."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), group=group, group_src=0)  # the first rank's -> replicated


def sum_gradients(parameters, group=None):
    """Once a step, after the last backward: one all-reduce for all gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([t.flatten() for t in gradients])
    dist.all_reduce(flat, group=group)  # partial -> replicated
    parts = flat.split([t.numel() for t in gradients])
    torch._foreach_copy_(gradients, [part.view_as(t) for t, part in zip(gradients, parts)])


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, ring):
    """Let a model attend by the ring -> the model, for the tokens at ring.positions(T) alone."""
    for block in model.blocks:
        block.attn.attend = ring.attend
    number_tokens(model, ring)
    return model


def number_tokens(model, ring):
    """Number tokens by where they stand in the sequence, instead of 0, 1, .., T/cp - 1."""

    # cached, since every layer of Llama's form asks for the same
    positions = cache(lambda length, device: ring.positions(ring.cp * length, device))
    model.positions = positions
    for block in model.blocks:
        block.attn.positions = positions


def train_step(model, optimizer, x, y, valid, clip):
    """x, y (B, T/cp); valid: the whole batch's targets -> this rank's part of the loss, norm."""
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    loss.backward()
    sum_gradients(model.parameters())  # partial -> replicated
    norm = clip_gradients(model.parameters(), clip)  # replicated: no communication
    optimizer.step()
    return loss, norm


# ---- 3. at work: the same with torch's own API -------------------------------


def cut_in_place(mesh, x, y):
    """-> torch's context, in which x and y (B, T) are (B, T/cp), cut as zigzag does."""
    from torch.distributed.tensor.experimental import context_parallel  # slow, and needs NumPy

    return context_parallel(mesh, buffers=[x, y], buffer_seq_dims=[1, 1], no_restore_buffers={x, y})


def train_step_at_work(model, optimizer, x, y, valid, clip, mesh):
    with cut_in_place(mesh, x, y):
        # only the cut and attention are torch's here; at work FSDP or DDP sums gradients
        return train_step(model, optimizer, x, y, valid, clip)


def evaluate_at_work(model, mesh, x, y):
    with cut_in_place(mesh, x, y):
        return loss_sum(model(x), y)


# ---- 4. run ------------------------------------------------------------------

KINDS = {"ring": Ring, "zigzag": Zigzag, "allgather": AllGather, "ulysses": Ulysses}
MARKS = {0: "-", 1: "/", 2: ""}  # {work: what the picture shows}, but for hop 0


def on_paper(attn, cp_rank, cp):
    """A ring without a process group: it cannot attend, but knows what rank cp_rank of cp does."""

    class OnPaper(KINDS[attn]):
        def __init__(self):  # Ring's would ask a process group for these numbers
            self.cp_rank = cp_rank
            self.cp = cp
            self.causal = True

    return OnPaper()


def picture(attn, cp):
    """The docstring's picture -> lines, of the first 8 ranks and hops."""
    if attn == "ulysses":
        return [f"rank r: all chunks, heads r H/cp to (r+1) H/cp - 1; work {cp}"]
    shown = range(min(cp, 8))
    more = "  .." if cp > 8 else ""
    hops = "".join(f"  hop {hop}" for hop in shown)
    lines = [f"{attn:9}{hops}{more}  work"]
    for cp_rank in shown:
        ring = on_paper(attn, cp_rank, cp)
        works = [work(ring, hop) for hop in range(cp)]
        line = f"rank {cp_rank:<4}"
        for hop in shown:
            chunks = ",".join(str(chunk) for chunk in ring.chunks(hop))
            mark = "*" if hop == 0 else MARKS[works[hop]]
            line += f"{chunks + mark:>7}"
        lines.append(f"{line}{more}{sum(works):6}")
    return lines


def work(ring, hop):
    """The work of attention at a hop: 1 for half of the pairs of query and key, 2 for all."""
    if hop == 0:
        return 1  # causal
    tokens = 2  # of a rank: at least one in each of zigzag's chunks
    first, key_count, _ = ring.seen(hop, tokens)
    return 2 * (tokens - first) * key_count // tokens**2


# On GPUs section 1 wants bf16 or fp16, and NCCL. Proofs run in fp32 and fp64, too, and by gloo.


def for_proofs(ring):
    """Let a ring attend in every dtype and on every backend -> the ring."""
    ring.attend_block = attend_block_in_any_dtype
    ring.attend_block_backward = attend_block_backward_in_any_dtype
    if dist.get_backend(ring.group) == "gloo":
        ring.Exchange = ExchangeByHost
    return ring


def attend_block_in_any_dtype(q, k, v, causal):
    if q.is_cuda and q.dtype == torch.float32:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_bias=None, compute_log_sumexp=True, is_causal=causal)
        return out, lse[:, :, :q.shape[2]]  # the kernel pads lse to a multiple of 32
    if q.is_cuda and q.dtype == torch.float64:  # GPUs have no such kernel
        out, lse = attend_block(q.cpu(), k.cpu(), v.cpu(), causal)
        return out.to(q.device), lse.to(q.device)
    return attend_block(q, k, v, causal)


def attend_block_backward_in_any_dtype(dout, q, out, lse, k, v, causal):
    if q.is_cuda and q.dtype == torch.float32:
        unused = q.new_empty(0, dtype=torch.int64)  # seed and offset of dropout: there is none
        # the kernel wants lse padded; inf counts for nothing, since exp(score - inf) is 0
        lse = F.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
        return aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, lse, unused, unused,  # None: no bias, hence the False below
            dropout_p=0.0, grad_input_mask=[True, True, True, False], is_causal=causal)[:3]
    if q.is_cuda and q.dtype == torch.float64:
        inputs = [x.cpu() for x in (dout, q, out, lse, k, v)]
        return [x.to(q.device) for x in attend_block_backward(*inputs, causal)]
    return attend_block_backward(dout, q, out, lse, k, v, causal)


class ExchangeByHost(Exchange):
    """gloo sends and receives from host memory only."""

    def __init__(self, tensor, group):
        self.device = tensor.device
        super().__init__(tensor.cpu(), group)

    def wait(self):
        return super().wait().to(self.device)


def refuse(args):
    cfg = args.cfg
    cp = args.world_size
    chunks = cp * len(on_paper(args.attn, 0, cp).chunks())
    require(cfg.seq % chunks == 0,
            f"--seq {cfg.seq} does not divide into {chunks} chunks, for {args.attn} on {cp} ranks")
    require(args.attn != "ulysses" or cfg.kv_heads % cp == 0,
            f"--attn ulysses: {cp} ranks cannot share {cfg.heads} heads, {cfg.kv_heads} of keys "
            "and values, evenly: change --heads or --kv-heads")
    if args.impl != "scratch":
        on_gpu = torch.cuda.is_available() and args.device != "cpu" and not args.dry_run
        require(on_gpu and args.dtype != "fp64" and find_spec("numpy"),
                "torch's context_parallel needs GPUs, fp32 or bf16, and NumPy; take --impl scratch")
        # The kernel for fp32 pads lse to a multiple of 32 queries, and torch does not cut the
        # padding off: the queries of each of a rank's 2 chunks have to be such a multiple
        require(args.dtype == "bf16" or cfg.seq % (64 * cp) == 0,
                f"--impl {args.impl}: in fp32 --seq has to be a multiple of {64 * cp}")


def set_up(run, impl, ring, own):
    model = run.build()
    optimizer = adamw(model.parameters(), run.args.lr)
    if impl == "scratch":
        parallelize(model, ring)
        return Side(model=model, optimizer=optimizer, train_step=train_step,
                    evaluate=lambda x, y: loss_sum(model(x[:, own]), y[:, own]))
    number_tokens(model, Zigzag())  # torch cuts x as zigzag does, but leaves positions to us
    mesh = dist.init_device_mesh(run.device.type, (ring.cp,))
    return Side(model=model, optimizer=optimizer, train_step=partial(train_step_at_work, mesh=mesh),
                evaluate=partial(evaluate_at_work, model, mesh))


def textbook(run, cp):
    """-> rows. P parameters, L layers; a rank's q has Q numbers in a layer, its k and v S each."""
    cfg = run.cfg
    L = cfg.layers
    Q = run.args.batch * cfg.seq // cp * cfg.width
    S = Q * cfg.kv_heads // cfg.heads
    b = run.dtype.itemsize  # bytes of a number
    d = max(4, b)  # bytes of one in dK and dV
    hops = [("wire send", "2 (cp-1) L (2 b + d) S", 2 * (cp - 1) * L * (2 * b + d) * S)]
    gathers = [
        ("wire all_gather", "4 (cp-1) L b S", 4 * (cp - 1) * L * b * S),
        ("wire reduce_scatter", "2 (cp-1) L d S", 2 * (cp - 1) * L * d * S)]
    turns = [("wire all_to_all", "4 (cp-1)/cp L b (S + Q)", 4 * (cp - 1) * L * b * (S + Q) / cp)]
    rows = {"ring": hops, "zigzag": hops, "allgather": gathers, "ulysses": turns}
    weights = ("wire all_reduce", "2 (cp-1)/cp b P", 2 * (cp - 1) * b * run.total / cp)
    return [weights, *rows[run.args.attn]]


def main():
    args = arguments(__doc__, attn=Flag("zigzag", "how queries meet others' keys", tuple(KINDS)))
    refuse(args)
    with Run(args) as run:
        ring = for_proofs(KINDS[args.attn]())
        own = ring.positions(run.cfg.seq, run.device)
        sides = {impl: set_up(run, impl, ring, own) for impl in run.impls}
        run.say("\n".join(picture(args.attn, ring.cp)))
        for impl, step, x, y, valid in run.steps(sides, range(args.batch)):
            side = sides[impl]
            if impl == "scratch":
                x = x[:, own]  # (B, T/cp)
                y = y[:, own]
            with run.measure(impl, step):
                loss, norm = side.train_step(side.model, side.optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss, norm)
        if "scratch" in sides:
            run.textbook(textbook(run, ring.cp))
        return run.finish()


if __name__ == "__main__":
    sys.exit(main())
