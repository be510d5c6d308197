"""Context parallelism: every rank holds a part of each sequence; attention alone needs the rest.

A sequence is cut into chunks 0, 1, .. whose keys and values (K and V) go around a ring of cp ranks.
Below: the chunks whose K and V a rank has at each hop, marked by what its own queries see of them:
    3  all, work 2       3,4/  half, work 1       0*  up to each query, work 1       3-  nothing

    ring       hop 0  hop 1  hop 2  hop 3  work      zigzag     hop 0  hop 1  hop 2  hop 3  work
    rank 0        0*     3-     2-     1-     1      rank 0      0,7*   3,4/   2,5/   1,6/     4
    rank 1        1*      0     3-     2-     3      rank 1      1,6*   0,7/   3,4/   2,5/     4
    rank 2        2*      1      0     3-     5      rank 2      2,5*   1,6/   0,7/   3,4/     4
    rank 3        3*      2      1      0     7      rank 3      3,4*   2,5/   1,6/   0,7/     4

The hops' results are merged by their log-sum-exp. In backward K and V go around again, dK and dV
one hop behind. allgather: zigzag's blocks, but all K and V of a layer are brought and held at once.
ulysses: an all-to-all turns all heads of T/cp tokens into H/cp heads of all tokens, and back.

    on each of cp ranks              plain GPT   ring, zigzag, allgather   ulysses
    weights / activations held       all / all   all / 1/cp                all / 1/cp
    sent per block, forward          -           2 (cp-1) S                2 (cp-1)/cp (S + Q)
    sent per block, backward         -           4 (cp-1) S                2 (cp-1)/cp (S + Q)
    sent per step, P weights         -           2 (cp-1)/cp P             2 (cp-1)/cp P
    Counted are numbers: a rank's k has S, like its v, its q Q. dK and dV travel in fp32 or wider.

    replicate(model, all_ranks)                # those of all cp groups, if there are several
    ring = Zigzag(cp_group)
    for block in model.blocks:
        block.attn.attend = ring.attend        # for causal scaled_dot_product_attention
    own = ring.positions(T, device)            # (T/cp,): which tokens of x and of the shifted y
    logits = model(x[:, own], positions=own)   # or as your model is told them, for RoPE
    loss = F.cross_entropy(logits.flatten(0, 1), y[:, own].flatten(), reduction="sum")
    (loss / valid_targets_of_all_ranks).backward()  # a rank's part: the loss is the sum of all
    sum_gradients(model.parameters(), all_ranks)  # then clip and step, as one process does

Not for: masks other than causal or none (packed documents, sliding windows), dropout of weights of
attention, KV caches, v of another width than k, and layers besides attention that look at other
tokens (convolutions, means). On GPUs attention is in bf16 or fp16, and D a multiple of 8.
Liu 2023, "Ring Attention", arXiv:2310.01889, section 3. Llama team 2024, arXiv:2407.21783, section
3.3.2 (zigzag, all-gather). Jacobs 2023, "DeepSpeed Ulysses", arXiv:2309.14509, section 3. At work:
torch.distributed.tensor.experimental.context_parallel.
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

aten = torch.ops.aten
# both were renamed in torch 2.13
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# Attention to one block of keys, by kernels of scaled_dot_product_attention that return its lse.


def attend_block(q, k, v, causal):
    """Attend with q (B, H, queries, D) to k and v (B, H, keys, D), as if there were no other keys.

    -> the output, like q, and the log-sum-exp of each query's scores (B, H, queries).
    """
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    if q.is_cuda:
        kernel = aten._scaled_dot_product_flash_attention
    out, lse, *_ = kernel(q, k, v, is_causal=causal)
    return out, lse


def attend_block_backward(dout, q, out, lse, k, v, causal):
    """-> dq, dk, dv of one block.

    out and lse are those of all blocks together: exp(score - lse) is then the true probability.
    """
    rng = q.new_empty(0, dtype=torch.int64)  # there is no dropout
    if q.is_cuda:
        return aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(),  # lse may not be a slice here
            # None: the sequences of the batch are equally long
            cum_seq_q=None, cum_seq_k=None, max_q=q.shape[2], max_k=k.shape[2],
            dropout_p=0.0, is_causal=causal, philox_seed=rng, philox_offset=rng)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, dropout_p=0.0, is_causal=causal)


def repeat_heads(kv, H):
    """K and V (2, B, fewer heads, keys, D) -> two of (B, H, ..): heads that share get copies."""
    shared_by = H // kv.shape[2]
    repeated = kv.unsqueeze(3).expand(-1, -1, -1, shared_by, -1, -1)
    return repeated.flatten(2, 3).unbind()  # where shared_by is 1 nothing is copied


def sum_heads(dx, into):
    """The backward of repeat_heads: dx (B, H, ..) is summed into (B, fewer heads, ..)."""
    torch.sum(dx.unflatten(1, (into.shape[1], -1)), 2, dtype=into.dtype, out=into)


class Exchange:
    """A tensor goes to the next rank of the ring while that of the rank before comes here."""

    def __init__(self, tensor, ring):
        next_rank = (ring.cp_rank + 1) % ring.cp
        rank_before = (ring.cp_rank - 1) % ring.cp
        self.sent = tensor  # must live, and stay as it is, until wait()
        self.received = torch.empty_like(tensor)
        self.works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, self.sent, group=ring.group, group_peer=next_rank),
            dist.P2POp(dist.irecv, self.received, group=ring.group, group_peer=rank_before)])

    def wait(self):
        """-> what has come from the rank before."""
        for work in self.works:
            work.wait()
        return self.received


class ReturnByHops:
    """Brings the gradients of K and V home around the ring, one hop behind K and V themselves."""

    def __init__(self, ring):
        self.ring = ring
        self.own = None  # what this rank adds to the gradient of its own K and V
        self.passing = None  # an Exchange: the sum made here leaves, that of the rank before comes

    def add(self, part, hop):
        """Take what this rank adds to the gradient of the K and V that are here at this hop.

        The rank before sends the sum of what others have made for the same K and V. This part is
        added, and the sum sent on while the caller makes the next part. Zeros are sent, too: the
        next rank waits for them.
        """
        if hop == 0:
            self.own = part
            return
        if self.passing is not None:
            part += self.passing.wait()
        self.passing = self.ring.exchange(part, self.ring)

    def finish(self):
        """-> the whole gradient of this rank's K and V: the last hop brings what others added."""
        if self.passing is None:  # cp is 1
            return self.own
        return self.own + self.passing.wait()


class ReturnByReduceScatter:
    """Brings the gradients of K and V home by one reduce-scatter."""

    def __init__(self, ring):
        self.ring = ring
        self.parts = None  # (cp, ..), one for each rank, in their order
        self.part = None  # the last of them, whose memory serves for the result

    def add(self, part, hop):
        if hop == 0:
            self.parts = part.new_empty(self.ring.cp, *part.shape)
        self.parts[self.ring.source(hop)] = part
        self.part = part

    def finish(self):
        # partial -> sharded; gloo: dim 0 of the input has to be cp times that of the output
        reduce_scatter(self.part.unsqueeze(0), self.parts, group=self.ring.group)
        self.parts.untyped_storage().resize_(0)  # free, though gloo's thread holds the tensor
        return self.part


class Ring:
    """K and V go around the ring of cp ranks, their gradients one hop behind (Liu 2023, section 3).

    In every block `attend` takes the place of scaled_dot_product_attention. Tokens are cut as
    `positions` says, and the model numbers them so, for its position embedding or RoPE.
    """

    GradientReturn = ReturnByHops  # of the K and V that `bring` yields, in their order

    def __init__(self, group=None, causal=True):
        self.group = group  # None: the world
        self.causal = causal  # False: each query sees all keys, as in an encoder
        self.cp_rank = dist.get_rank(group)
        self.cp = dist.get_world_size(group)
        self.attend_block = attend_block  # this and the next two can be replaced, see section 4
        self.attend_block_backward = attend_block_backward
        self.exchange = Exchange

    def source(self, hop):
        """The rank whose K and V are here after so many hops."""
        return (self.cp_rank - hop) % self.cp

    def chunks(self, hop=0):
        """The chunks of the sequence that are here after so many hops, in order."""
        return [self.source(hop)]

    def positions(self, T, device=None):
        """Which of a sequence's T tokens are this rank's -> (T/cp,) int64."""
        mine = self.chunks()
        count = self.cp * len(mine)
        assert T % count == 0, f"{T} tokens do not divide into {count} chunks: pad them"
        by_chunk = torch.arange(T, device=device).view(count, -1)
        return torch.cat([by_chunk[chunk] for chunk in mine])

    def wanted(self, hop, tokens):
        """-> (first, keys, causal): what own queries see of the keys here after so many hops.

        Queries from number `first` on see the first `keys` keys, those before it see none. If
        causal, query i sees of them only keys 0 to i. tokens: how many a rank has.
        """
        if hop == 0 or not self.causal:
            return 0, tokens, self.causal  # own tokens are in order, also where chunks are 0,7
        mine = self.chunks()
        theirs = self.chunks(hop)
        # Queries see the chunks of keys before their own. Where queries of chunks 0,7 meet keys of
        # 3,4, those of 0 see none, those of 7 all. Where queries of 3,4 meet keys of 2,5, all see 2
        # alone. So what counts is always a rectangle: the last queries and the first keys
        size = tokens // len(mine)  # of a chunk
        too_early = sum(chunk < theirs[0] for chunk in mine)  # chunks of queries before all keys
        seen = sum(chunk < mine[-1] for chunk in theirs)  # chunks of keys before the last queries
        return too_early * size, seen * size, False

    def bring(self, kv):
        """Yield own K and V, then those of each rank before, while the next are on their way."""
        for _ in range(self.cp - 1):
            passing = self.exchange(kv, self)
            yield kv
            kv = passing.wait()
        yield kv

    def attend(self, q, k, v):
        """Attention within the whole sequence: (B, H, T/cp, D) -> (B, H, T/cp, D).

        k and v may have fewer heads, a divisor of H: query heads in a row share one. Only the heads
        of k and v travel. Every rank of the group calls it, with equal shapes.
        """
        tokens = q.shape[2]
        assert tokens % len(self.chunks()) == 0, f"{tokens} tokens: cut them as positions() says"
        q, k = [x.to(v.dtype) for x in (q, k)]  # RoPE may have made fp32 of them
        return BlockwiseAttention.apply(q, torch.stack([k, v]), self)


class Zigzag(Ring):
    """The ring with equal work for all: of 2 cp chunks a rank has an early and a late one."""

    def chunks(self, hop=0):
        early = self.source(hop)
        late = 2 * self.cp - 1 - early
        return [early, late]


class AllGather(Zigzag):
    """The same blocks, but one collective each way (Llama 3, section 3.3.2)."""

    GradientReturn = ReturnByReduceScatter

    def bring(self, kv):
        all_kv = kv.new_empty(self.cp, *kv.shape)  # gloo's thread lets go of it during the hops
        # sharded -> replicated; gloo: dim 0 of the output has to be cp times that of the input
        all_gather(all_kv, kv.unsqueeze(0), group=self.group)
        for hop in range(self.cp):
            yield all_kv[self.source(hop)]


class BlockwiseAttention(torch.autograd.Function):
    """Own queries attend to the keys and values of all ranks; no T x T matrix is made."""

    @staticmethod
    def forward(ctx, q, own, ring):  # q: (B, H, T/cp, D); own K and V: (2, B, H or fewer, T/cp, D)
        H, tokens = q.shape[1:3]
        out = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        lse = out.new_full(q.shape[:3], -math.inf)
        for hop, kv in enumerate(ring.bring(own)):
            first, keys, causal = ring.wanted(hop, tokens)
            if keys == 0:
                continue
            block_out, block_lse = ring.attend_block(
                q[:, :, first:], *repeat_heads(kv[..., :keys, :], H), causal)
            # In the softmax over all keys so far, those of this block have together the share
            # e^block_lse / (e^block_lse + e^lse), which is a sigmoid
            weight = torch.sigmoid(block_lse - lse[:, :, first:])
            out[:, :, first:].lerp_(block_out.to(out.dtype), weight.unsqueeze(-1))
            lse[:, :, first:] = torch.logaddexp(lse[:, :, first:], block_lse)
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, own, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        ring = ctx.ring
        q, own, out, lse = ctx.saved_tensors
        H, tokens = q.shape[1:3]
        wide = lse.dtype  # fp32 or better
        dq = torch.zeros_like(q, dtype=wide)
        returning = ring.GradientReturn(ring)
        for hop, kv in enumerate(ring.bring(own)):
            first, keys, causal = ring.wanted(hop, tokens)
            dkv = torch.zeros_like(own, dtype=wide)
            if keys > 0:
                block_dq, block_dk, block_dv = ring.attend_block_backward(
                    dout[:, :, first:], q[:, :, first:], out[:, :, first:], lse[:, :, first:],
                    *repeat_heads(kv[..., :keys, :], H), causal)
                dq[:, :, first:] += block_dq
                sum_heads(block_dk, into=dkv[0, :, :, :keys])
                sum_heads(block_dv, into=dkv[1, :, :, :keys])
            returning.add(dkv, hop)
        own_gradient = returning.finish()  # dK, dV: partial -> sharded
        return dq.to(q.dtype), own_gradient.to(q.dtype), None


class AllToAll(torch.autograd.Function):
    """Cut a tensor along one dim, a part for every rank, and join along another what arrives."""

    @staticmethod
    def forward(ctx, x, cut, join, group):
        ctx.way_back = (join, cut, group)
        parts = torch.stack(x.chunk(dist.get_world_size(group), cut))  # (cp, ..)
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)  # sharded(join) -> sharded(cut)
        joined = torch.cat(received.unbind(), join)
        for buffer in (parts, received):
            buffer.untyped_storage().resize_(0)  # free, though gloo's thread holds the tensor
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
        by_heads = [AllToAll.apply(x, self.HEADS, self.TOKENS, self.group) for x in qkv]
        # (B, H/cp, T, D); any attention would do
        out = F.scaled_dot_product_attention(*by_heads, is_causal=self.causal, enable_gqa=True)
        return AllToAll.apply(out, self.TOKENS, self.HEADS, self.group)  # (B, H, T/cp, D)


# The rest of a correct train step: weights are replicated, their gradients partial on every rank.


def replicate(model, group=None):
    """Give all ranks of the group the weights and buffers of its first rank."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), group=group, group_src=0)  # the first rank's -> replicated


def sum_gradients(parameters, group=None):
    """After backward, of one micro-batch or several: one all-reduce for all gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([t.flatten() for t in gradients])
    dist.all_reduce(flat, group=group)  # partial -> replicated
    parts = flat.split([t.numel() for t in gradients])
    torch._foreach_copy_(gradients, [part.view_as(t) for t, part in zip(gradients, parts)])


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, ring):
    """Let a model attend by the ring -> the model, which takes own tokens, x[:, positions(T)]."""
    for block in model.blocks:
        block.attn.attend = ring.attend
    number_tokens(model, ring)
    return model


def number_tokens(model, ring):
    """Number tokens by where they stand in the sequence, instead of 0, 1, .., T/cp - 1."""

    @cache  # in Llama form every layer asks
    def positions(length, device):
        return ring.positions(ring.cp * length, device)

    model.positions = positions
    for block in model.blocks:
        block.attn.positions = positions


def train_step(model, optimizer, x, y, valid, clip, group=None):
    """x, y: this rank's tokens (B, T/cp); valid: targets of the whole batch.

    -> this rank's part of the loss, the norm.
    """
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    loss.backward()
    sum_gradients(model.parameters(), group)  # partial -> replicated
    norm = clip_gradients(model.parameters(), clip)  # replicated: no communication
    optimizer.step()
    return loss, norm


# ---- 3. at work: the same with torch's own API -------------------------------


def cut_in_place(mesh, x, y):
    """-> torch's context, in which x and y (B, T) are (B, T/cp), cut as zigzag does."""
    from torch.distributed.tensor.experimental import context_parallel  # takes seconds, and NumPy

    return context_parallel(mesh, buffers=[x, y], buffer_seq_dims=[1, 1],
                            no_restore_buffers={x, y})


def train_step_at_work(model, optimizer, x, y, valid, clip, mesh):
    """x, y: all tokens (B, T)."""
    with cut_in_place(mesh, x, y):
        # only the cut and attention are torch's here; at work FSDP or DDP sums gradients
        return train_step(model, optimizer, x, y, valid, clip)


def evaluate_at_work(model, mesh, x, y):
    with cut_in_place(mesh, x, y):
        return loss_sum(model(x), y)


# ---- 4. run ------------------------------------------------------------------

KINDS = {"ring": Ring, "zigzag": Zigzag, "allgather": AllGather, "ulysses": Ulysses}
MARKS = {0: "-", 1: "/", 2: ""}  # what the picture shows of a hop's work


def on_paper(attn, cp_rank, cp):
    """A ring without a group: it cannot attend, but tells what rank cp_rank of cp would do."""
    ring = object.__new__(KINDS[attn])  # __init__ would ask the group for these two
    ring.cp_rank = cp_rank
    ring.cp = cp
    ring.causal = True
    return ring


def picture(attn, cp):
    """The docstring's table -> lines. Work is in units of causal attention within T/cp tokens."""
    if attn == "ulysses":
        return [f"rank r: all chunks of H/cp heads, from r H/cp on; work {cp}"]
    shown = range(min(cp, 8))  # of ranks and hops
    hops = "".join(f"  hop {hop}" for hop in shown)
    lines = [f"{attn:9}{hops}  work"]
    for cp_rank in shown:
        ring = on_paper(attn, cp_rank, cp)
        line = f"rank {cp_rank:<4}"
        for hop in shown:
            chunks = ",".join(str(chunk) for chunk in ring.chunks(hop))
            mark = "*" if hop == 0 else MARKS[work(ring, hop)]
            line += f"{chunks + mark:>7}"
        total = sum(work(ring, hop) for hop in range(cp))
        lines.append(f"{line}{total:6.0f}")
    return lines


def work(ring, hop):
    """What a hop costs, if all keys for all queries cost 2. So causal attention costs 1."""
    if hop == 0:
        return 1
    tokens = 2  # of a rank: one in each chunk of zigzag's
    first, keys, _ = ring.wanted(hop, tokens)
    return (tokens - first) * keys / 2  # half of the pairs: 2 x 2 cost 2


# Section 1 attends on GPUs in bf16 and fp16. Proofs want more digits, and ranks that share a GPU.


def for_proofs(ring):
    """Let a ring attend in every dtype and on every backend -> it."""
    ring.attend_block = attend_block_in_any_dtype
    ring.attend_block_backward = attend_block_backward_in_any_dtype
    if dist.get_backend(ring.group) == "gloo":
        ring.exchange = ExchangeByHost
    return ring


def attend_block_in_any_dtype(q, k, v, causal):
    if q.is_cuda and q.dtype == torch.float32:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_bias=None, compute_log_sumexp=True, is_causal=causal)
        return out, lse[:, :, :q.shape[2]]  # it was padded to a multiple of 32
    if q.is_cuda and q.dtype == torch.float64:  # GPUs have no such kernel
        out, lse = attend_block(q.cpu(), k.cpu(), v.cpu(), causal)
        return out.to(q.device), lse.to(q.device)
    return attend_block(q, k, v, causal)


def attend_block_backward_in_any_dtype(dout, q, out, lse, k, v, causal):
    if q.is_cuda and q.dtype == torch.float32:
        rng = torch.empty(0, dtype=torch.int64, device=q.device)  # there is no dropout
        # padded again, so that padding counts for nothing: exp(score - inf) is 0
        lse = F.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, lse, rng, rng,  # None: no bias, and no gradient of it
            dropout_p=0.0, grad_input_mask=[True, True, True, False], is_causal=causal)
        return dq, dk, dv
    if q.is_cuda and q.dtype == torch.float64:
        inputs = [x.cpu() for x in (dout, q, out, lse, k, v)]
        return [x.to(q.device) for x in attend_block_backward(*inputs, causal)]
    return attend_block_backward(dout, q, out, lse, k, v, causal)


class ExchangeByHost(Exchange):
    """gloo sends and receives from host memory only."""

    def __init__(self, tensor, ring):
        self.device = tensor.device
        super().__init__(tensor.cpu(), ring)

    def wait(self):
        return super().wait().to(self.device)


def refuse(args):
    """What cannot run ends here, in one line, before anything is built."""
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
        require(args.dtype == "bf16" or cfg.seq % (64 * cp) == 0,
                f"--impl {args.impl}: in fp32 --seq has to be a multiple of {64 * cp}")


def set_up(run, impl, ring):
    model = run.build()
    optimizer = adamw(model.parameters(), run.args.lr)
    if impl == "scratch":
        parallelize(model, ring)
        own = ring.positions(run.cfg.seq, run.device)
        return Side(model=model, optimizer=optimizer, train_step=train_step,
                    evaluate=lambda x, y: loss_sum(model(x[:, own]), y[:, own]))
    number_tokens(model, Zigzag())  # torch cuts x as zigzag does, but leaves positions to us
    mesh = dist.init_device_mesh(run.device.type, (ring.cp,))
    return Side(model=model, optimizer=optimizer,
                train_step=partial(train_step_at_work, mesh=mesh),
                evaluate=partial(evaluate_at_work, model, mesh))


def textbook(run, cp):
    """-> rows. P numbers are trained, in L blocks; k or v of a block are S numbers, and q is Q.

    A number has b bytes, but one of dK and dV has d.
    """
    cfg = run.cfg
    L = cfg.layers
    Q = run.args.batch * cfg.seq // cp * cfg.width
    S = Q * cfg.kv_heads // cfg.heads
    b = run.dtype.itemsize
    d = max(4, b)
    hops = [("wire send", "2 (cp-1) L (2 b + d) S", 2 * (cp - 1) * L * (2 * b + d) * S)]
    others = {
        "allgather": [
            ("wire all_gather", "4 (cp-1) L b S", 4 * (cp - 1) * L * b * S),
            ("wire reduce_scatter", "2 (cp-1) L d S", 2 * (cp - 1) * L * d * S)],
        "ulysses": [
            ("wire all_to_all", "4 (cp-1)/cp L b (S + Q)", 4 * (cp - 1) * L * b * (S + Q) / cp)],
    }
    weights = ("wire all_reduce", "2 (cp-1)/cp b P", 2 * (cp - 1) * b * run.total / cp)
    return [weights, *others.get(run.args.attn, hops)]


def main():
    args = arguments(__doc__, attn=Flag("zigzag", "how queries meet others' keys", tuple(KINDS)))
    refuse(args)
    with Run(args) as run:
        ring = for_proofs(KINDS[args.attn]())
        own = ring.positions(run.cfg.seq, run.device)
        sides = {impl: set_up(run, impl, ring) for impl in run.impls}
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
