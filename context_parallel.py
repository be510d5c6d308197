"""Context parallelism: every rank holds a part of each sequence; attention alone needs the rest.

A sequence is cut into cp chunks (zigzag: 2 cp, half as long), whose keys and values go around a
ring of cp ranks. At each hop a rank scores its own queries with the keys of the chunks shown:
    no mark: with all of these keys (work 2)   /: half of the scores (1)   .: none (0)
    *: its own keys, each query with those up to itself (1)

    ring       hop 0  hop 1  hop 2  hop 3  work      zigzag     hop 0  hop 1  hop 2  hop 3  work
    rank 0        0*     3.     2.     1.     1      rank 0      0,7*   3,4/   2,5/   1,6/     4
    rank 1        1*      0     3.     2.     3      rank 1      1,6*   0,7/   3,4/   2,5/     4
    rank 2        2*      1      0     3.     5      rank 2      2,5*   1,6/   0,7/   3,4/     4
    rank 3        3*      2      1      0     7      rank 3      3,4*   2,5/   1,6/   0,7/     4

    begin_alike(model)                   # all ranks begin with the weights of the first
    ring = Zigzag()                      # of all ranks; else give a group to all three
    for layer in model.layers:  # whose attention calls self.attend(q, k, v), else nothing changes
        layer.attn.attend = ring.attend  # causal. In each batch, if sequences are packed:
        # .. = partial(ring.attend, documents=d), d (B, T): the number of each token's document
    own = ring.positions(T, device)      # (T/cp,); all ranks have the same x, y (B, T)
    logits = model(x[:, own], positions=own)  # the model has to be told where its tokens stand
    (loss_sum(logits, y[:, own]) / valid).backward()  # loss_sum: of tokens; valid: targets in y
    sum_gradients(model.parameters())    # then clip and step, as one process does
    # (torch's DDP and FSDP average gradients: leave this out, and multiply the loss by cp)

P parameters. In a layer a rank's queries have Q elements, its keys S, its values S:

    elements on each rank        plain GPT   ring, zigzag, allgather         ulysses
    weights                      all         all                             all
    saved activations            all         1/cp                            1/cp
    sent in a layer's forward    -           2 (cp-1) S                      2 (cp-1)/cp (S + Q)
    sent in a layer's backward   -           2 (cp-1) S, and as many in fp32 2 (cp-1)/cp (S + Q)
    sent to sum gradients        -           2 (cp-1)/cp P                   2 (cp-1)/cp P

Liu 2023, arXiv:2310.01889, section 3 (ring). Llama team 2024, arXiv:2407.21783, section 3.3.2
(zigzag's chunks, allgather). Jacobs 2023, arXiv:2309.14509, section 3 (ulysses).
Not for: sliding windows, scales other than D ** -0.5, dropout in attention, KV caches, v of another
width than k; layers besides attention that look at other tokens (convolutions, means), angles that
depend on T; documents that change before a backward that recomputes; experts (see hybrid_3d.py).
At work: torch.distributed.tensor.experimental.context_parallel, part 4 below.
    torchrun --standalone --nproc_per_node=2 context_parallel.py --attn zigzag
"""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

# imports of parts 1 and 2 end here; the rest is for parts 3 to 5
import sys
from functools import cache, partial

from common import clip_gradients, loss_sum

# ---- 1. the idea -------------------------------------------------------------


def positions(T, device=None, group=None):
    """Which of a sequence's T tokens are this rank's -> (T/cp,)."""
    assert T % dist.get_world_size(group) == 0, f"{T} tokens do not divide: pad the end"
    return torch.arange(T, device=device).chunk(dist.get_world_size(group))[dist.get_rank(group)]


class GatherSequence(torch.autograd.Function):
    """Keys or values of this rank's tokens (B, K, T/cp, D) -> of all tokens (B, K, T, D)."""

    @staticmethod
    def forward(ctx, own, group):
        ctx.group = group
        pieces = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, own, group=group)  # sharded -> replicated
        return torch.cat(pieces, 2)

    @staticmethod
    def backward(ctx, gradient):  # (B, K, T, D), partial: of this rank's queries alone
        pieces = [piece.contiguous() for piece in gradient.chunk(dist.get_world_size(ctx.group), 2)]
        own = torch.empty_like(pieces[0])
        dist.reduce_scatter(own, pieces, group=ctx.group)  # partial -> sharded
        return own, None


def attend(q, k, v, documents=None, group=None):
    """In the place of causal attention: q (B, H, T/cp, D), k and v (B, K, T/cp, D) -> like q. K is
    the number of k's heads.

    documents (B, T): the number of each token's document, where a sequence is packed of several.
    """
    k = GatherSequence.apply(k.contiguous(), group)
    v = GatherSequence.apply(v.contiguous(), group)
    T = k.shape[2]
    own = positions(T, k.device, group)
    mask = own.unsqueeze(1) >= torch.arange(T, device=k.device)  # (T/cp, T): no key from later on
    if documents is not None:
        is_same = documents[:, own].unsqueeze(2) == documents.unsqueeze(1)  # (B, T/cp, T)
        mask = mask & is_same.unsqueeze(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def all_reduce_gradients(model, group=None):
    """After backward: a rank's gradients are of its own tokens' losses, so the sum is needed."""
    for p in model.parameters():
        if p.requires_grad:
            if p.grad is None:  # not used by this rank's tokens; the others wait for its summand
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)  # partial -> replicated


def begin_alike(model, group=None):
    """Once, before the first step."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.contiguous()  # a broadcast sends memory, whatever the strides
        dist.broadcast(tensor.data, group=group, group_src=0)  # the first rank's -> replicated


def idea_step(model, optimizer, x, y, valid, clip):
    """x, y (B, T): whole sequences, the same on all ranks; valid: the number of their targets.
    -> this rank's part of the loss, the norm of the whole gradient.

    The model calls `attend` for its attention; its tokens stand at positions(T), T of the whole.
    """
    optimizer.zero_grad()
    own = positions(x.shape[1], x.device)
    logits = model(x[:, own])  # (B, T/cp, V)
    loss = F.cross_entropy(logits.flatten(0, 1), y[:, own].flatten(), reduction="sum") / valid
    loss.backward()
    all_reduce_gradients(model)
    # from here on every rank does the same, and they stay alike
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss, norm


# ---- 2. the technique (copy this; of part 1 it takes begin_alike) ------------

# What it adds to the idea, and what that buys:
#     1  blocks of keys: no mask and no scores of T/cp x T
#     2  kernels: no scores in memory at all (on GPUs in bf16 and fp16 alone, and without documents)
#     3  equal work: half of the scores, as many on every rank
#     4  others' keys and values are not kept, but sent again in backward: all at once (AllGather),
#        or one rank's at a time, while scores are computed (Ring, Zigzag)
#     5  Ulysses, another way: fewer bytes here, but cp has to divide k's heads
#     6  one all-reduce for the gradients of all 68 parameters
# A step of the toy, --seq 2048 --batch 1 on 4 ranks, of the idea and with all of this:
#                          calls   MB sent   MB at the peak
#         the idea           84      19.1      56.9
#         AllGather          13      25.4      34.3
#         Zigzag             37      25.4      32.9
#         Ulysses            33      12.8      33.6
# Llama 3 took AllGather: where all keys are at hand any mask is easy, such as that of documents.

aten = torch.ops.aten
# both were renamed in torch 2.13
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# 1. Not all keys at once: attention to one block of keys, as if there were no others.


def attend_block(q, k, v, causal, is_same):
    """q (B, H, queries, D) attends to k and v (B, K, keys, D). Heads 0 to H/K - 1 of q share head 0
    of k and v, and so on.

    causal: query i sees keys 0 to i alone. is_same (B, queries, keys): are the query and the key of
    one document? None: all are.
    -> the output, of q's shape, and lse: the log-sum-exp of each query's scores (B, H, queries).
    """
    q, k, v = grouped(k.shape[1], q, k, v)
    scores = scores_of(q, k, causal, is_same)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ v
    return out.flatten(1, 2), lse.flatten(1, 2)


def merge(out, lse, block_out, block_lse):
    """Adds a block, in place, to what out and lse have of other blocks."""
    # In the softmax over all of these keys those of the block together have the share
    # e^block_lse / (e^block_lse + e^lse), a sigmoid; it is 1 where lse is still -inf
    share = torch.sigmoid(block_lse - lse)
    out.lerp_(block_out.to(out.dtype), share.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, block_lse))


def attend_block_backward(dout, q, out, lse, k, v, causal, is_same):
    """-> dq, dk, dv of one block.

    out and lse are of attention to all blocks: exp(score - lse) is then the true probability.
    """
    dout, q, out, lse, k, v = grouped(k.shape[1], dout, q, out, lse, k, v)
    P = (scores_of(q, k, causal, is_same) - lse.unsqueeze(-1)).exp()
    dP = dout @ v.mT
    # softmax's backward takes off the mean of dP, weighted by P: the sum of dout * out
    dscores = P * (dP - (dout * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    dq = dscores @ k
    dk = dscores.mT @ q
    dv = P.mT @ dout
    return dq.flatten(1, 2), dk.sum(2), dv.sum(2)  # over the heads of q that share one of k


def grouped(K, *tensors):
    """(B, heads, ..) -> (B, K, heads/K, ..), in fp32 or better: q's heads beside the head of k that
    they share."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return [x.unflatten(1, (K, -1)).to(wide) for x in tensors]


def scores_of(q, k, causal, is_same):
    """-> (B, K, H/K, queries, keys)"""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    mask = torch.ones_like(scores[0, 0, 0], dtype=torch.bool)
    if causal:
        mask = mask.tril()
    if is_same is not None:
        mask = mask & is_same[:, None, None]
    # not -inf, which would make nan of a query that sees none of these keys
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)


# 2. The same by kernels, which scaled_dot_product_attention hides: they make no scores in memory.


def has_kernel(q, is_same):
    # flash attention of GPUs wants 16 bits, and D of 8, 16, .., 256
    on_gpu = q.is_cuda and q.dtype.itemsize == 2 and q.shape[-1] in range(8, 257, 8)
    return is_same is None and q.stride(-1) == 1 and (q.is_cpu or on_gpu)


def fast_attend_block(q, k, v, causal, is_same):
    if not has_kernel(q, is_same):
        return attend_block(q, k, v, causal, is_same)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    if q.is_cuda:
        kernel = aten._scaled_dot_product_flash_attention
    out, lse, *_ = kernel(q, k, v, is_causal=causal)
    return out, lse


def fast_attend_block_backward(dout, q, out, lse, k, v, causal, is_same):
    if not has_kernel(q, is_same):
        return attend_block_backward(dout, q, out, lse, k, v, causal, is_same)
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, dropout_p=0.0, is_causal=causal)
    unused = q.new_empty(0, dtype=torch.int64)  # seed and offset of dropout: there is none
    return aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse,
        # cum_seq is for sequences of several lengths
        cum_seq_q=None, cum_seq_k=None, max_q=q.shape[2], max_k=k.shape[2],
        dropout_p=0.0, is_causal=causal, philox_seed=unused, philox_offset=unused)


# 3. Equal work: the rank with the last chunk would see all keys, the first rank hardly any.


class ContextParallel:
    """The ranks that share each sequence. The classes below add attend()."""

    chunks_each = 1  # on a rank; 2: one of them sees little, and one sees much

    def __init__(self, group=None):
        self.group = group  # None: the world
        self.cp_rank = dist.get_rank(group)
        self.cp = dist.get_world_size(group)

    def chunks(self, rank):
        """Which of the cp * chunks_each chunks a rank has."""
        return [rank, 2 * self.cp - 1 - rank][:self.chunks_each]

    def positions(self, T, device=None, rank=None):
        """As the idea's. rank: among those of the group; None: this one"""
        count = self.cp * self.chunks_each
        assert T % count == 0, f"{T} tokens do not divide into {count} chunks: pad the end"
        chunks = self.chunks(self.cp_rank if rank is None else rank)
        return torch.arange(T, device=device).view(count, -1)[chunks].flatten()

    def pairs(self, source, documents):
        """Which of this rank's chunks see which of another's.

        -> (i, j, causal, is_same), for each pair that does: the i-th of this rank's, the j-th of
        the other's, and what attend_block wants to know of them.
        """
        for i, mine in enumerate(self.chunks(self.cp_rank)):
            for j, theirs in enumerate(self.chunks(source)):
                if theirs <= mine:
                    is_same = None
                    if documents is not None:
                        of_chunks = documents.unflatten(1, (self.cp * self.chunks_each, -1))
                        is_same = of_chunks[:, mine, :, None] == of_chunks[:, theirs, None]
                    yield i, j, theirs == mine, is_same


# 4. One rank's keys after the other. They come by the idea's collectives, or around a ring.


class Blockwise(ContextParallel):
    """What AllGather and Ring share. They add how keys and values come, and gradients go:

    bring(own_kv) yields (a rank, its K and V) for one rank after the other
    bring_in_backward(own_kv, own_dkv) yields (a rank, its K and V, zeros): to the zeros the caller
        adds what its queries give to dK and dV. own_dkv, zeros at first, ends as all ranks' sum
    """

    def attend(self, q, k, v, documents=None):
        """As the idea's. Every rank calls it, with equal shapes."""
        # the kernel of a CPU would read beyond k
        assert q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} heads of q for {k.shape[1]} of k"
        q, k = [x.to(v.dtype) for x in (q, k)]  # RoPE may have made fp32 of them
        # (B, H, T/cp, D) -> (chunks, B, H, size, D): q[i] is the i-th chunk
        q, k, v = [x.unflatten(2, (self.chunks_each, -1)).movedim(2, 0) for x in (q, k, v)]
        kv = torch.stack([k, v], 1)  # k, v = kv[j]
        with torch.autocast(q.device.type, enabled=False):  # it would make bf16 of fp32 scores
            out = BlockwiseAttention.apply(q, kv, documents, self)
        return out.movedim(0, 2).flatten(2, 3)  # (B, H, T/cp, D)


class BlockwiseAttention(torch.autograd.Function):
    """This rank's queries attend to the keys of one rank after the other. ranks, a Blockwise,
    brings keys, and sends their gradients home."""

    # q (chunks, B, H, size, D), own_kv (chunks, 2, B, K, size, D): of this rank
    @staticmethod
    def forward(ctx, q, own_kv, documents, ranks):
        out = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        lse = out.new_full(q.shape[:-1], -math.inf)
        for source, kv in ranks.bring(own_kv):
            for i, j, causal, is_same in ranks.pairs(source, documents):
                block = fast_attend_block(q[i], *kv[j], causal, is_same)
                merge(out[i], lse[i], *block)
        out = out.to(q.dtype)
        ctx.ranks = ranks
        ctx.save_for_backward(q, out, lse, own_kv, documents)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, out, lse, own_kv, documents = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=lse.dtype)  # fp32 or better
        own_dkv = torch.zeros_like(own_kv, dtype=lse.dtype)
        with torch.autocast(q.device.type, enabled=False):  # as in forward
            for source, kv, dkv in ctx.ranks.bring_in_backward(own_kv, own_dkv):
                for i, j, causal, is_same in ctx.ranks.pairs(source, documents):
                    block_dq, block_dk, block_dv = fast_attend_block_backward(
                        dout[i], q[i], out[i], lse[i], *kv[j], causal, is_same)
                    dq[i] += block_dq
                    dkv[j, 0] += block_dk
                    dkv[j, 1] += block_dv
        return dq.to(dout.dtype), own_dkv.to(dout.dtype), None, None


class AllGather(Blockwise):
    """K and V are gathered, and in backward gathered anew."""

    chunks_each = 2

    def bring(self, own_kv):
        all_kv = own_kv.new_empty(self.cp, *own_kv.shape)
        # sharded -> replicated. (torch.compile exchanges the blocking call for one that hung)
        all_gather(all_kv.view(-1), own_kv.view(-1), group=self.group, async_op=True).wait()
        return enumerate(all_kv)

    def bring_in_backward(self, own_kv, own_dkv):
        all_kv = self.bring(own_kv)
        all_dkv = own_dkv.new_zeros(self.cp, *own_dkv.shape)
        for source, kv in all_kv:
            yield source, kv, all_dkv[source]
        reduce_scatter(own_dkv.view(-1), all_dkv.view(-1), group=self.group)  # partial -> sharded


def pass_on(tensor, group):
    """Begins to send a tensor to the next rank of the ring.

    -> a function that waits for both, and returns what has come from the rank before
    """
    device = tensor.device
    if dist.get_backend(group) == "gloo":
        tensor = tensor.cpu()  # else ranks could not share a GPU
    received = torch.empty_like(tensor)
    rank = dist.get_rank(group)
    cp = dist.get_world_size(group)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % cp),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % cp)])

    def receive(sent=tensor):  # so it lives until then
        for work in works:
            work.wait()
        return received.to(device)

    return receive


class Ring(Blockwise):
    """K and V go around the ring, and their gradients one hop behind them (Liu 2023, section 3).

        rank 0 of 3            hop 0    hop 1    hop 2
        has K and V of         rank 0   rank 2   rank 1
        sends dK, dV of                 rank 2   rank 1    to rank 1
        is sent dK, dV of               rank 1   rank 0    by rank 2
    """

    def bring(self, kv):
        # this rank's own, then those of the rank before it, ..
        for hop in range(self.cp - 1):
            receive = pass_on(kv, self.group)  # under way while the caller computes with kv
            yield (self.cp_rank - hop) % self.cp, kv
            kv = receive()
        yield (self.cp_rank + 1) % self.cp, kv  # the last one is passed on to nobody

    def bring_in_backward(self, own_kv, own_dkv):
        receive = None
        for hop, (source, kv) in enumerate(self.bring(own_kv)):
            dkv = torch.zeros_like(own_dkv) if hop > 0 else own_dkv
            yield source, kv, dkv
            if hop > 1:
                dkv += receive()  # the sum of the ranks that had these K and V before
            if hop > 0:
                receive = pass_on(dkv, self.group)  # to who has them at the next hop; also a 0
        if self.cp > 1:
            own_dkv += receive()  # partial -> sharded


class Zigzag(Ring):
    """The ring with equal work for all."""

    chunks_each = 2


# 5. All tokens of some heads instead of all heads of some tokens.


class AllToAll(torch.autograd.Function):
    """A tensor sharded along one dim -> the same tensor sharded along another."""

    @staticmethod
    def forward(ctx, x, old_dim, new_dim, group):
        ctx.way_back = (new_dim, old_dim, group)
        outgoing = torch.stack(x.chunk(dist.get_world_size(group), new_dim))  # (cp, ..)
        outgoing = outgoing.contiguous()  # of channels_last, as einsum makes it, stack keeps that
        received = torch.empty_like(outgoing)
        dist.all_to_all_single(received, outgoing, group=group)
        return torch.cat(received.unbind(), old_dim)  # sharded(old_dim) -> sharded(new_dim)

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, *ctx.way_back), None, None, None


class Ulysses(ContextParallel):
    """A rank attends for its heads, by any attention function (Jacobs 2023, section 3)."""

    def attend(self, q, k, v, documents=None):
        """As the idea's; the heads of q and those of k and v must be multiples of cp."""
        assert k.shape[1] % self.cp == 0, f"{k.shape[1]} heads of k for {self.cp} ranks: take Ring"
        # (B, H, T/cp, D) -> (B, H/cp, T, D). RoPE may have made fp32 of q and k
        q, k, v = [AllToAll.apply(x.to(v.dtype), 2, 1, self.group) for x in (q, k, v)]
        mask = None
        if documents is not None:
            is_same = documents[:, None, :, None] == documents[:, None, None, :]  # (B, 1, T, T)
            mask = is_same.tril()
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        return AllToAll.apply(out, 1, 2, self.group)  # (B, H/cp, T, D) -> (B, H, T/cp, D)


# 6. One all-reduce for all gradients.


def sum_gradients(parameters, group=None):
    """Once a step, after the last backward. What no rank has used gets gradients of 0."""
    trained = [p for p in parameters if p.requires_grad]
    for p in trained:
        if p.grad is None:  # not used by this rank's tokens; the others wait for its summand
            p.grad = torch.zeros_like(p)
    flat = torch.cat([p.grad.flatten() for p in trained])
    dist.all_reduce(flat, group=group)  # partial -> replicated
    for p, part in zip(trained, flat.split([p.numel() for p in trained])):
        p.grad.copy_(part.view_as(p))


# ---- 3. the toy GPT, parallelized --------------------------------------------


class Idea(ContextParallel):
    """Part 1, as parallelize() wants it."""

    attend = staticmethod(attend)
    positions = staticmethod(positions)


def parallelize(model, ring):
    """ring: a Zigzag, or another kind. Lets the model attend by it, and number its tokens by where
    they stand in the sequence, not 0, 1, .., T/cp - 1.
    -> the model, for the tokens at ring.positions(T)
    """

    @cache  # every layer of Llama's form asks for the same
    @torch.inference_mode(False)  # also if the first is an evaluation: training will use it
    def where(length, device):  # this rank has `length` tokens
        return ring.positions(ring.cp * length, device)

    for block in model.blocks:
        block.attn.attend = ring.attend
    number_tokens(model, where)
    return model


def number_tokens(model, positions):
    model.positions = positions
    for block in model.blocks:
        block.attn.positions = positions


def loss_of_own(model, x, y, ring):
    """x, y (B, T): whole sequences -> the sum of this rank's token losses."""
    own = ring.positions(x.shape[1], x.device)
    return loss_sum(model(x[:, own]), y[:, own])


def train_step(model, optimizer, x, y, valid, clip, ring):
    """valid: the whole batch's targets -> this rank's part of the loss, gradient norm."""
    optimizer.zero_grad()
    loss = loss_of_own(model, x, y, ring) / valid
    loss.backward()
    sum_gradients(model.parameters())  # partial -> replicated
    norm = clip_gradients(model.parameters(), clip)  # replicated: no communication
    optimizer.step()
    return loss, norm


# ---- 4. at work: the same with torch's own API -------------------------------


def torchs_context(mesh, model, x, y):
    """From it on x and y (B, T) themselves are (B, T/cp), cut as zigzag does."""
    from torch.distributed.tensor.experimental import context_parallel  # slow

    where = torch.arange(x.shape[1], device=x.device)
    number_tokens(model, lambda length, device: where)
    whole = {x: 1, y: 1, where: 0}  # {tensor: the dim along which it is cut}
    return context_parallel(mesh, buffers=list(whole), buffer_seq_dims=list(whole.values()),
                            no_restore_buffers=set(whole))


def train_step_at_work(model, optimizer, x, y, valid, clip, mesh):
    optimizer.zero_grad()
    with torchs_context(mesh, model, x, y):
        loss = loss_sum(model(x), y) / valid
        loss.backward()
    sum_gradients(model.parameters())  # ours
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss, norm


def evaluate_at_work(model, mesh, x, y):
    with torchs_context(mesh, model, x, y):
        return loss_sum(model(x), y)


# ---- 5. run ------------------------------------------------------------------

KINDS = {"ring": Ring, "zigzag": Zigzag, "allgather": AllGather, "ulysses": Ulysses}
FLAGS = {
    "--attn": dict(default="zigzag", choices=tuple(KINDS), help="how queries meet others' keys"),
}
VARIANTS = ("--attn ring", "--attn zigzag", "--attn allgather", "--attn ulysses")


def refuse(args, require):
    cp = args.world_size
    seq = args.cfg.seq
    kind = Idea if args.impl == "idea" else KINDS[args.attn]
    chunks = cp * kind.chunks_each
    require(seq % chunks == 0, f"--seq {seq} does not divide into {chunks} chunks, for {cp} ranks")
    require(kind is not Ulysses or args.cfg.kv_heads % cp == 0,
            f"--attn ulysses: {cp} ranks cannot share {args.cfg.kv_heads} heads of keys and values")
    if args.impl not in ("idea", "scratch"):
        on_gpu = torch.cuda.is_available() and args.device != "cpu" and not args.dry_run
        # in fp32 torch does not cut off the padding of its kernel, to a multiple of 32 queries
        fits = args.dtype == "bf16" or args.dtype == "fp32" and seq % (64 * cp) == 0
        require(on_gpu and fits, "torch's context_parallel needs GPUs, bf16 (or fp32 and --seq a "
                f"multiple of {64 * cp})")


def set_up(run, impl):
    """-> a Side: what the run steps, judges and saves, see harness/run.py."""
    model = run.build()
    optimizer = run.optimizer(model.named_parameters())
    if impl == "torch":
        mesh = dist.init_device_mesh(run.device.type, (run.world_size,))
        return run.side(model, optimizer, partial(train_step_at_work, mesh=mesh),
                        evaluate=partial(evaluate_at_work, model, mesh))
    begin_alike(model)
    ring = Idea() if impl == "idea" else KINDS[run.args.attn]()
    parallelize(model, ring)
    step = idea_step if impl == "idea" else partial(train_step, ring=ring)
    return run.side(model, optimizer, step, evaluate=partial(loss_of_own, model, ring=ring))


def textbook(run):
    """-> rows. P parameters, L layers; a rank's q has Q numbers in a layer, its k and v S each."""
    cp = run.world_size
    b = run.dtype.itemsize  # bytes of a number
    d = max(4, b)  # bytes of one in dK and dV
    Q = run.args.batch * run.cfg.seq // cp * run.cfg.heads * run.cfg.head_dim
    S = Q * run.cfg.kv_heads // run.cfg.heads
    L = run.cfg.layers
    kv = 2 * (cp - 1) * L * S  # numbers in all others' K and V
    ring = [("wire send", "2 (cp-1) L (2 b + d) S", kv * (2 * b + d))]
    rows = {
        "idea": [("wire all_gather", "2 (cp-1) L b S", kv * b),
                 ("wire reduce_scatter", "2 (cp-1) L b S", kv * b)],
        "ring": ring,
        "zigzag": ring,
        "allgather": [("wire all_gather", "4 (cp-1) L b S", 2 * kv * b),
                      ("wire reduce_scatter", "2 (cp-1) L d S", kv * d)],
        "ulysses": [("wire all_to_all", "4 (cp-1)/cp L b (S + Q)",
                     4 * (cp - 1) * L * b * (S + Q) / cp)],
    }
    weights = ("wire all_reduce", "2 (cp-1)/cp b P", 2 * (cp - 1) * b * run.total / cp)
    return [weights, *rows["idea" if run.impls[0] == "idea" else run.args.attn]]


def main():
    from harness.flags import arguments, require  # not above: the file is imported without harness/
    from harness.run import Run

    args = arguments(__doc__, FLAGS)
    refuse(args, require)
    with Run(args) as run:
        run.train({impl: set_up(run, impl) for impl in run.impls}, rows=range(args.batch))
        if args.impl != "torch":
            run.textbook(textbook(run))
        return run.finish()


if __name__ == "__main__":
    sys.exit(main())
