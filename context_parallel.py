"""Context parallelism: every rank holds a part of each sequence; attention alone needs the rest.

    ring       hop 0  hop 1  hop 2  hop 3  work      zigzag     hop 0  hop 1  hop 2  hop 3  work
    rank 0        0*     3-     2-     1-     1      rank 0      0,7*   3,4/   2,5/   1,6/     4
    rank 1        1*      0     3-     2-     3      rank 1      1,6*   0,7/   3,4/   2,5/     4
    rank 2        2*      1      0     3-     5      rank 2      2,5*   1,6/   0,7/   3,4/     4
    rank 3        3*      2      1      0     7      rank 3      3,4*   2,5/   1,6/   0,7/     4

A sequence is cut into chunks 0, 1, .. The table shows whose keys and values (K and V) a rank has
at each hop, and which pairs of its queries and these keys count: * the causal half of its own,
/ half, - none since all keys are later, no mark: all. Work is counted in units of one *.

ring, zigzag: K and V go around, and results are merged by their log-sum-exp. In backward they go
around again, with dK and dV one hop behind. allgather: zigzag's blocks, but all K and V of a layer
are gathered at once. ulysses: an all-to-all turns all heads of T/cp tokens into H/cp heads of all
tokens, and another one turns the result back.

    on each of cp ranks              plain GPT   ring, zigzag, allgather   ulysses
    activations kept (weights: all)  all         1/cp                      1/cp
    sent per block, forward          -           2 (cp-1) S                4 (cp-1)/cp S
    sent per block, backward         -           4 (cp-1) S                4 (cp-1)/cp S
    sent per step, P weights         -           2 (cp-1)/cp P             2 (cp-1)/cp P
    in numbers of the model's dtype, dK and dV in fp32 or better; S = B T/cp C is one of q, k, v

Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889, section 3. Llama
team 2024, arXiv:2407.21783, section 3.3.2 (zigzag, all-gather). Jacobs et al. 2023, "DeepSpeed
Ulysses", arXiv:2309.14509, section 3.
At work: torch.distributed.tensor.experimental.context_parallel (section 3).

    torchrun --standalone --nproc_per_node=2 context_parallel.py --attn zigzag

    replicate(model, group)                     # in your own code, at the start
    ring = Zigzag(group)
    own = ring.positions(T, device)             # (T/cp,): this rank's tokens
    attention.attend = ring.attend              # where it called scaled_dot_product_attention
    logits = model(x[:, own], positions=own)    # (B, T/cp, V)
    loss = F.cross_entropy(logits.flatten(0, 1), y[:, own].flatten(), reduction="sum")
    (loss / valid_targets_of_all_ranks).backward()
    sum_gradients(model.parameters(), group)
    norm = clip_gradients(model.parameters(), 1.0)  # then optimizer.step()
"""
import harness  # before torch, which warns where NumPy is missing

import importlib.util
import math
import sys
from collections import namedtuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from common import DTYPES, Flag, Run, Side, adamw, arguments, loss_sum, require, share
from harness.checkpoint import pieces_of

# ---- 1. the technique (copy this; it needs only torch) -----------------------

aten = torch.ops.aten
# both were renamed in torch 2.13
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def need(condition, sentence):
    if not condition:
        raise ValueError(sentence)


# Attention to one block of keys, by the kernels of scaled_dot_product_attention, which keeps the
# log-sum-exp to itself.


def attend_block(q, k, v, causal):
    """Attend with q (B, H, queries, D) to k and v (B, H, keys, D), as if there were no other keys.

    -> the output, like q, and the log-sum-exp of each query's scores (B, H, queries).
    """
    if q.is_cuda and q.dtype.itemsize == 2:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)
        return out, lse
    if q.is_cuda and q.dtype.itemsize == 4:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_bias=None, compute_log_sumexp=True, is_causal=causal)
        return out, lse[:, :, :q.shape[2]]  # it was padded to a multiple of 32
    # GPUs have no such kernel in fp64, which is for proofs: there the CPU does it
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q.cpu(), k.cpu(), v.cpu(), is_causal=causal)
    return out.to(q.device), lse.to(q.device)


def attend_block_backward(dout, q, out, lse, k, v, causal):
    """-> dq, dk, dv of one block.

    out and lse are those of all blocks together: exp(score - lse) is then the true probability.
    """
    rng = torch.empty(0, dtype=torch.int64, device=q.device)  # there is no dropout
    if q.is_cuda and q.dtype.itemsize == 2:
        return aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(),
            cum_seq_q=None, cum_seq_k=None,  # all sequences are of one length
            max_q=q.shape[2], max_k=k.shape[2],
            dropout_p=0.0, is_causal=causal, philox_seed=rng, philox_offset=rng)
    if q.is_cuda and q.dtype.itemsize == 4:
        # padded again, so that padding counts for nothing: exp(score - inf) is 0
        lse = F.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, lse, rng, rng,  # None: no bias, and no gradient of it
            dropout_p=0.0, grad_input_mask=[True, True, True, False], is_causal=causal)
        return dq, dk, dv
    inputs = [x.cpu() for x in (dout, q, k, v, out, lse)]
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *inputs, dropout_p=0.0, is_causal=causal)
    return [x.to(q.device) for x in gradients]


def repeat_heads(x, H):
    """K or V (B, fewer heads, ..) -> (B, H, ..): query heads that share one get a copy each."""
    shared_by = H // x.shape[1]
    if shared_by == 1:
        return x
    return x.repeat_interleave(shared_by, dim=1)


def sum_heads(dx, fewer):
    """The backward of repeat_heads: (B, H, ..) -> (B, fewer, ..)."""
    if dx.shape[1] == fewer:
        return dx
    return dx.unflatten(1, (fewer, -1)).sum(2)


def first_keys(kv, keys, H):
    """K and V (2, B, fewer heads, T/cp, D) -> two of (B, H, keys, D)."""
    return [repeat_heads(x[:, :, :keys], H) for x in kv]


class Hop:
    """A tensor goes to the next rank of the ring while that of the rank before comes here."""

    def __init__(self, tensor, ring):
        next_rank = (ring.cp_rank + 1) % ring.cp
        rank_before = (ring.cp_rank - 1) % ring.cp
        self.device = tensor.device
        if tensor.is_cuda and dist.get_backend(ring.group) == "gloo":
            tensor = tensor.cpu()  # gloo sends and receives from host memory only
        self.sent = tensor  # must live, and stay as it is, until wait()
        self.received = torch.empty_like(tensor)
        self.works = dist.batch_isend_irecv([  # own -> the rank before's
            dist.P2POp(dist.isend, self.sent, group=ring.group, group_peer=next_rank),
            dist.P2POp(dist.irecv, self.received, group=ring.group, group_peer=rank_before)])

    def wait(self):
        """-> what has come from the rank before."""
        for work in self.works:
            work.wait()
        return self.received.to(self.device)


class ReturnByHops:
    """Brings the gradients of K and V home around the ring, one hop behind K and V themselves."""

    def __init__(self, ring):
        self.ring = ring
        self.own = None  # what this rank adds to the gradient of its own K and V
        self.hop = None  # the sum for others' K and V that is on its way to the next rank

    def add(self, part):
        """Take what this rank adds to the gradient of the K and V that are here now.

        At hop h that is the gradient for rank r - h. The rank before, r - 1, has made its part for
        the same rank one hop earlier, and that part comes here now. The sum of both goes on to rank
        r + 1 while the caller makes the next part, and the last hop brings it to its owner. Parts
        that are all zero travel, too: the next rank waits for them.
        """
        if self.own is None:
            self.own = part
            return
        if self.hop is not None:
            part += self.hop.wait()
        self.hop = Hop(part, self.ring)

    def finish(self):
        """-> the whole gradient of this rank's K and V: the last hop brings what others added."""
        if self.hop is None:
            return self.own
        return self.own + self.hop.wait()


class ReturnByReduceScatter:
    """Brings the gradients of K and V home by one reduce-scatter."""

    def __init__(self, ring):
        self.ring = ring
        self.everyone = None  # (cp, ..): this rank's parts, in the order of the ranks they are for
        self.part = None  # the part that was added last; finish() writes the result over it
        self.hops = 0  # parts added so far

    def add(self, part):
        if self.everyone is None:
            self.everyone = part.new_empty(self.ring.cp, *part.shape)
        self.everyone[self.ring.source(self.hops)] = part
        self.part = part
        self.hops += 1

    def finish(self):
        # partial -> sharded
        reduce_scatter(self.part.unsqueeze(0), self.everyone, group=self.ring.group)
        release(self.everyone)
        return self.part


def release(buffer):
    """Free at once what a finished collective has read or written.

    A thread of gloo may hold on to it for a while. NCCL is safe: the stream that waited for the
    collective is the one that gets the memory back, so nothing reuses it earlier.
    """
    buffer.untyped_storage().resize_(0)


# Which pairs of own queries and of the keys that are here count at a hop.
# first_query  queries before this one see no key
# keys         how many keys, the first ones, the other queries see
# causal       of these keys query i sees those up to key i; if False, every query sees all
Wanted = namedtuple("Wanted", "first_query keys causal")


class Ring:
    """K and V go around the ring of cp ranks, their gradients one hop behind (Liu 2023, section 3).

    `attend` takes the place of causal scaled_dot_product_attention. Tokens are cut as `positions`
    says, into equally many for each rank of the group. Made from cp_rank and cp, without a group,
    it tells what that rank would do, but cannot attend.
    """

    def __init__(self, group=None, cp_rank=None, cp=None):
        if cp is None:
            cp_rank = dist.get_rank(group)
            cp = dist.get_world_size(group)
        self.group = group  # None: the world
        self.cp_rank = cp_rank
        self.cp = cp
        self.chunk_count = cp * len(self.chunks())  # of a whole sequence
        self.known_positions = {}  # {(T, device): (T/cp,)}

    def __deepcopy__(self, memo):
        return self  # the copy of a model attends with the same ranks

    def source(self, hop):
        """The rank whose K and V are here after so many hops."""
        return (self.cp_rank - hop) % self.cp

    def chunks(self, hop=0):
        """The chunks of the sequence that are here after so many hops, in order."""
        return [self.source(hop)]

    def positions(self, T, device=None):
        """Which of a sequence's T tokens are this rank's -> (T/cp,) int64, made once per device."""
        need(T % self.chunk_count == 0,
             f"{T} tokens do not divide into {self.chunk_count} chunks: pad them")
        key = (T, str(device))
        if key not in self.known_positions:
            with torch.inference_mode(False):  # or training could not use what evaluation has made
                by_chunk = torch.arange(T, device=device).view(self.chunk_count, -1)
                own = [by_chunk[chunk] for chunk in self.chunks()]
                self.known_positions[key] = torch.cat(own)
        return self.known_positions[key]

    def wanted(self, hop, tokens):
        """What `tokens` own queries want of the `tokens` keys that are here after so many hops."""
        if hop == 0:
            return Wanted(0, tokens, True)
        mine = self.chunks()
        theirs = self.chunks(hop)
        # Queries see the chunks of keys before theirs. Where there are two of each and queries 0,7
        # meet keys 3,4, 0 sees none and 7 sees both; where 3,4 meet 2,5, both see 2 alone. So what
        # counts is always a rectangle: the last queries and the first keys
        size = tokens // len(mine)  # of a chunk
        too_early = sum(chunk < theirs[0] for chunk in mine)  # chunks of queries before all keys
        seen = sum(chunk < mine[-1] for chunk in theirs)  # chunks of keys before the last queries
        return Wanted(too_early * size, seen * size, False)

    def bring(self, kv):
        """Yield own K and V, then those of each rank before.

        The next ones travel while the caller works on those yielded.
        """
        for _ in range(self.cp - 1):
            hop = Hop(kv, self)
            yield kv
            kv = hop.wait()
        yield kv

    def bring_back(self):
        """-> what takes the gradients of the K and V that `bring` yields, in their order."""
        return ReturnByHops(self)

    def attend(self, q, k, v):
        """Causal attention within the whole sequence: (B, H, T/cp, D) -> (B, H, T/cp, D).

        k and v may have fewer heads, a divisor of H: query heads in a row share one, and only these
        few travel. Every rank of the group calls it, with equal shapes.
        """
        check_shapes(q, k, v, len(self.chunks()))
        if q.is_cuda:
            check_head_width(q.shape[3], q.dtype)
        return BlockwiseAttention.apply(q, torch.stack([k, v]), self)


class Zigzag(Ring):
    """The ring with equal work for all: of 2 cp chunks a rank has an early and a late one."""

    def chunks(self, hop=0):
        early = self.source(hop)
        late = 2 * self.cp - 1 - early
        return [early, late]


class AllGather(Zigzag):
    """The same blocks, but one collective each way (Llama 3, section 3.3.2)."""

    def bring(self, kv):
        everyone = kv.new_empty(self.cp, *kv.shape)
        all_gather(everyone, kv.unsqueeze(0), group=self.group)  # sharded -> replicated
        for hop in range(self.cp):
            yield everyone[self.source(hop)]

    def bring_back(self):
        return ReturnByReduceScatter(self)


def check_shapes(q, k, v, chunks):
    """Refuse what would be silently wrong or fail in a kernel. chunks: how many this rank has."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    need(q.dim() == k.dim() == v.dim() == 4, f"{shapes}: each must be (B, H, T/cp, D)")
    need(k.shape == v.shape, f"{shapes}: k and v must have the same shape")
    B, H, tokens, D = q.shape
    need(k.shape[0] == B and k.shape[3] == D, f"{shapes}: must have the same B and D")
    need(k.shape[2] == tokens, f"{shapes}: causal attention needs as many keys as queries")
    need(k.shape[1] > 0 and H % k.shape[1] == 0,
         f"{shapes}: the heads of k and v must divide those of q")
    need(tokens > 0 and tokens % chunks == 0,
         f"{tokens} tokens on this rank do not divide into {chunks} chunks: pad the sequence")
    need(q.dtype == k.dtype == v.dtype and q.device == k.device == v.device,
         f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype} on {q.device}, {k.device}, {v.device}: "
         "cast or move them to the same")


def check_head_width(D, dtype):
    """GPUs' kernels take up to 256 numbers a head, and read 16 bytes at a time.

    None takes fp64: there the CPU attends, and any width will do.
    """
    step = 16 // dtype.itemsize
    need(dtype == torch.float64 or (D % step == 0 and D <= 256),
         f"head width {D} in {dtype} on a GPU must be a multiple of {step}, up to 256")


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
            block_out, block_lse = attend_block(q[:, :, first:], *first_keys(kv, keys, H), causal)
            # A softmax of all keys so far weighs each output by its sum of exp(score): this block's
            # is e^block_lse / (e^block_lse + e^lse), and that is a sigmoid
            weight = torch.sigmoid(block_lse - lse[:, :, first:])
            out[:, :, first:].lerp_(block_out.to(out.dtype), weight.unsqueeze(-1))
            lse[:, :, first:] = torch.logaddexp(lse[:, :, first:], block_lse)
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, own, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        need(not torch.is_grad_enabled(), "create_graph: the kernels have no second derivative")
        q, own, out, lse = ctx.saved_tensors
        H, tokens = q.shape[1:3]
        fewer = own.shape[2]  # heads of K and V
        dq = torch.zeros_like(q, dtype=lse.dtype)
        returning = ctx.ring.bring_back()
        for hop, kv in enumerate(ctx.ring.bring(own)):
            first, keys, causal = ctx.ring.wanted(hop, tokens)
            dkv = torch.zeros_like(own, dtype=lse.dtype)
            if keys > 0:
                block_dq, block_dk, block_dv = attend_block_backward(
                    dout[:, :, first:], q[:, :, first:], out[:, :, first:], lse[:, :, first:],
                    *first_keys(kv, keys, H), causal)
                dq[:, :, first:] += block_dq
                dkv[0, :, :, :keys] = sum_heads(block_dk, fewer)
                dkv[1, :, :, :keys] = sum_heads(block_dv, fewer)
            if ctx.needs_input_grad[1]:
                returning.add(dkv)
        if not ctx.needs_input_grad[1]:
            return dq.to(q.dtype), None, None
        own_gradient = returning.finish()  # dK, dV: partial -> sharded
        return dq.to(q.dtype), own_gradient.to(q.dtype), None


class AllToAll(torch.autograd.Function):
    """Cut a tensor along one dim, a part for every rank, and join along another what arrives."""

    @staticmethod
    def forward(ctx, x, cut, join, group):
        ctx.cut = cut
        ctx.join = join
        ctx.group = group
        parts = torch.stack(x.chunk(dist.get_world_size(group), cut)).contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)  # sharded(join) -> sharded(cut)
        joined = torch.cat(received.unbind(), join)
        release(parts)
        release(received)
        return joined

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.join, ctx.cut, ctx.group), None, None, None


class Ulysses(Ring):
    """All tokens of some heads instead of all heads of some tokens (Jacobs 2023, section 3)."""

    HEADS = 1  # dims of (B, H, T, D)
    TOKENS = 2

    def attend(self, q, k, v):
        """As Ring's; the heads of q and those of k and v must be multiples of cp."""
        check_shapes(q, k, v, len(self.chunks()))
        need(q.shape[1] % self.cp == 0 and k.shape[1] % self.cp == 0,
             f"{q.shape[1]} heads of q, {k.shape[1]} of k and v: ulysses on {self.cp} ranks needs "
             "multiples of that; take ring, zigzag or allgather, or repeat heads of k and v")
        q = AllToAll.apply(q, self.HEADS, self.TOKENS, self.group)  # (B, H/cp, T, D)
        k = AllToAll.apply(k, self.HEADS, self.TOKENS, self.group)
        v = AllToAll.apply(v, self.HEADS, self.TOKENS, self.group)
        k = repeat_heads(k, q.shape[1])
        v = repeat_heads(v, q.shape[1])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # any attention would do
        return AllToAll.apply(out, self.TOKENS, self.HEADS, self.group)  # (B, H, T/cp, D)


# The rest of a correct train step: weights are replicated, their gradients partial on every rank.


@torch.no_grad()
def replicate(module, group=None):
    """Give all ranks of the group the weights and buffers of its first rank."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dense = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(dense, group=group, group_src=0)  # the first rank's -> replicated
        tensor.copy_(dense)


def sum_gradients(parameters, group=None):
    """Sum the gradients of all ranks, in one call per dtype.

    Frozen parameters are left out. One that no rank has used keeps the gradient None, as in one
    process. Its sum shows that by the sign of zero: a rank sends -0.0 for what is missing, and for
    its own zeros 0.0. The sum is -0.0 only if every rank has sent -0.0.
    """
    trained = [p for p in parameters if p.requires_grad]
    missing = {p for p in trained if p.grad is None}
    for dtype in sorted({p.dtype for p in trained}, key=str):
        alike = [p for p in trained if p.dtype == dtype]
        gradients = [torch.zeros_like(p) if p in missing else p.grad for p in alike]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        flat += 0.0  # makes 0.0 of -0.0
        parts = flat.split([p.numel() for p in alike])
        for p, part in zip(alike, parts):
            if p in missing:
                part.fill_(-0.0)
        dist.all_reduce(flat, group=group)  # partial -> replicated
        # into the gradients, which lie in memory as p does: fused optimizers ignore strides
        sums = [part.view_as(p) for p, part in zip(alike, parts)]
        torch._foreach_copy_(gradients, sums)
        for p, gradient in zip(alike, gradients):
            p.grad = gradient
    for p in missing:
        if (p.grad.eq(0) & p.grad.signbit()).all():
            p.grad = None


def clip_gradients(parameters, clip):
    """Scale replicated gradients to a norm of at most `clip` (0: leave them) -> the norm before.

    Where the norm is inf or nan they are left, so that whoever looks finds out whose they are.
    """
    with_gradient = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in with_gradient])
    if clip:
        finite = norm.nan_to_num(0, posinf=0)  # with a norm of 0 nothing is scaled
        nn.utils.clip_grads_with_norm_(with_gradient, clip, finite)
    return norm


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, ring):
    """Let a model, or a stage of one, attend by the ring -> it.

    It then takes a rank's own tokens, x[:, ring.positions(T)].
    """
    for block in model.blocks:
        block.attn.attend = ring.attend
    if hasattr(model, "pos"):
        cut_positions(model.pos, ring)
    return model


def cut_positions(embedding, ring):
    """Have this rank's positions looked up: the GPT numbers the tokens that it is given 0, 1, .."""

    def own_positions(_, inputs):
        counted = inputs[0]  # (T/cp,)
        return ring.positions(ring.cp * len(counted), counted.device)

    embedding.register_forward_pre_hook(own_positions)


def full_state_dict(model):
    return model.state_dict()  # replicated


def full_gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def evaluate(model, x, y):
    """x, y: this rank's tokens -> its part of the sum of token losses."""
    with torch.no_grad():
        return loss_sum(model(x), y)


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


def train_step_at_work(model, optimizer, x, y, valid, clip, mesh):
    """x, y: all tokens (B, T), which torch cuts in place, as zigzag does."""
    from torch.distributed.tensor.experimental import context_parallel  # takes seconds, and NumPy
    order = torch.arange(x.shape[1]).to(x)  # where each token of x stands; it is cut as x is
    cut_in_place = context_parallel(mesh, buffers=[x, y, order], buffer_seq_dims=[1, 1, 0],
                                    no_restore_buffers={x, y, order})

    def own_positions(module, inputs):
        return order

    with model.pos.register_forward_pre_hook(own_positions), cut_in_place:
        # x and y are (B, T/cp) in here, and order (T/cp,).
        # Gradients are summed by train_step; a program at work leaves that to FSDP or DDP
        return train_step(model, optimizer, x, y, valid, clip)


# ---- 4. run ------------------------------------------------------------------

KINDS = {"ring": Ring, "zigzag": Zigzag, "allgather": AllGather, "ulysses": Ulysses}
SHOWN = 8  # ranks and hops of the picture, at most


def picture(name, cp):
    """The docstring's table -> lines. Work is in units of causal attention within T/cp tokens."""
    shown = min(cp, SHOWN)
    hops = "".join(f"  hop {hop}" for hop in range(shown))
    lines = [f"{name:9}{hops}  work"]
    for cp_rank in range(shown):
        ring = KINDS[name](cp_rank=cp_rank, cp=cp)
        cells = ""
        for hop in range(shown):
            chunks = ",".join(str(chunk) for chunk in ring.chunks(hop))
            cells += f"{chunks + mark(ring, hop):>7}"
        total = sum(work(ring, hop) for hop in range(cp))
        lines.append(f"rank {cp_rank:<4}{cells}{total:6.0f}")
    return lines


def work(ring, hop):
    """What a hop costs, if all keys for all queries cost 2. So causal attention costs 1."""
    tokens = 2  # on each rank, which is one in each chunk of zigzag's
    wanted = ring.wanted(hop, tokens)
    queries = tokens - wanted.first_query
    cost = queries * wanted.keys / tokens
    if wanted.causal:
        cost /= 2
    return cost


def mark(ring, hop):
    if hop == 0:
        return "*"
    marks = {0: "-", 1: "/", 2: ""}
    return marks[work(ring, hop)]


def refuse(args):
    """What cannot run ends here, in one line, before anything is built."""
    cp = args.world_size
    T = args.cfg.seq
    H = args.cfg.heads
    on_gpu = is_on_gpu(args)
    if args.impl != "scratch":
        refuse_at_work(args, on_gpu)
    chunks = KINDS[args.attn](cp_rank=0, cp=cp).chunk_count
    require(T % chunks == 0,
            f"--seq {T} does not divide into {chunks} chunks, for {args.attn} on {cp} ranks")
    if args.attn == "ulysses":
        require(H % cp == 0, f"--heads {H} does not divide over {cp} ranks, for ulysses")
    elif on_gpu:
        refuse_head_width(args.cfg, DTYPES[args.dtype])


def is_on_gpu(args):
    """Will this run be on a GPU, or count as if it were?"""
    if args.device == "auto" and not args.dry_run:
        return torch.cuda.is_available()
    return args.device == "cuda"


def refuse_head_width(cfg, dtype):
    try:
        check_head_width(cfg.width // cfg.heads, dtype)
    except ValueError as error:
        require(False, f"--width {cfg.width} --heads {cfg.heads}: {error}; ulysses takes any")


def refuse_at_work(args, on_gpu):
    require(on_gpu and args.dtype != "fp64" and not args.dry_run,
            f"--impl {args.impl}: torch's context_parallel needs GPUs and fp32 or bf16; take "
            "--impl scratch")
    require(importlib.util.find_spec("numpy"),
            f"--impl {args.impl}: torch's context_parallel needs NumPy: pip install numpy")
    chunks = 2 * args.world_size
    require(args.cfg.seq % chunks == 0,
            f"--seq {args.cfg.seq} does not divide into torch's {chunks} chunks")
    require(not args.eval_every or args.batch >= args.world_size,
            f"--batch {args.batch} --eval-every: --impl {args.impl} wants a sequence for each of "
            f"{args.world_size} ranks")
    # its attention in fp32 pads the log-sums of a chunk to a multiple of 32, and then torch cannot
    # put hops together
    require(args.world_size == 1 or args.dtype != "fp32" or args.cfg.seq % (32 * chunks) == 0,
            f"--seq {args.cfg.seq} --impl {args.impl}: torch wants a multiple of {32 * chunks} in "
            "fp32, 32 for each of its chunks; take that or --dtype bf16")


def set_up(run, impl, ring):
    """-> a Side: the model of this implementation, and what a run does with it."""
    args = run.args
    model = run.build()
    optimizer = adamw(model.parameters(), args.lr)
    own = ring.positions(run.cfg.seq, run.device)  # (T/cp,)
    if impl == "scratch":
        parallelize(model, ring)

        def step(x, y, valid):
            return train_step(model, optimizer, x, y, valid, args.clip)

        def held_out(k):
            x, y = run.held_out(k)
            return evaluate(model, x[:, own], y[:, own])
    else:
        mesh = dist.init_device_mesh(run.device.type, (ring.cp,))
        rows = share(args.batch, ring.cp, ring.cp_rank)

        def step(x, y, valid):
            return train_step_at_work(model, optimizer, x, y, valid, args.clip, mesh)

        def held_out(k):
            return evaluate(model, *run.held_out(k, rows))  # whole sequences, some of them

    return Side(
        model=model,
        optimizer=optimizer,
        train_step=step,
        full_gradients=lambda: full_gradients(model),
        full_state_dict=lambda: full_state_dict(model),
        evaluate=held_out,
        pieces=lambda: pieces_of(model.named_parameters(), optimizer, writes=run.rank == 0),
    )


def any_trained(module):
    return any(p.requires_grad for p in module.parameters())


def needs_of_blocks(model):
    """-> for every block: do q, k and v need a gradient? All do, unless --train freezes some."""
    x = any_trained(model.tok) or any_trained(model.pos)  # the block's input
    needs = []
    for block in model.blocks:
        attn = block.attn
        normed = x or any_trained(block.norm1)
        q = normed or any_trained(attn.q)
        k = normed or any_trained(attn.k)
        v = normed or any_trained(attn.v)
        needs.append((q, k, v))
        x = x or any_trained(block)
    return needs


def account(run, model):
    """The textbook's rows: P trained numbers of b bytes; a number of dK and dV has d bytes.

    Forward communicates in all L blocks. If --train freezes some, fewer have a backward, and fewer
    still a backward for K and V.
    """
    cp = run.world_size
    b = run.dtype.itemsize
    d = max(4, b)
    S = run.args.batch * run.cfg.seq // cp * run.cfg.width
    L = run.cfg.layers
    needs = needs_of_blocks(model)
    collectives = run.ledger[run.impls[0]].collectives
    sent = {name: figures["wire"] for name, figures in collectives.items()}
    P = sum(p.numel() for p in model.parameters() if p.requires_grad)
    run.textbook("wire all_reduce", "2 (cp-1)/cp b P", 2 * (cp - 1) * b * P / cp,
                 sent.pop("all_reduce"))
    if run.args.impl == "torch":
        return
    backwards = sum(any(qkv) for qkv in needs)  # blocks whose attention has a backward
    if run.args.attn == "ulysses":
        of_inputs = sum(sum(qkv) for qkv in needs)  # gradients of q, of k and of v
        gradients = backwards + of_inputs  # one of out for each backward
        formula = f"(cp-1)/cp S b (4 L + {gradients})"
        expected = (cp - 1) * S * b * (4 * L + gradients) / cp
    else:
        backwards_of_kv = sum(k or v for _, k, v in needs)
        formula = f"2 (cp-1) S (b (L + {backwards}) + {backwards_of_kv} d)"
        expected = 2 * (cp - 1) * S * (b * (L + backwards) + d * backwards_of_kv)
    run.textbook("wire of attention", formula, expected, sum(sent.values()))


def main():
    args = arguments(__doc__, attn=Flag("zigzag", "how queries meet others' keys", tuple(KINDS)))
    refuse(args)
    run = Run(args)
    with run:
        ring = KINDS[args.attn]()
        sides = {impl: set_up(run, impl, ring) for impl in run.impls}
        run.begin(sides)
        cp = run.world_size
        T = run.cfg.seq
        own = ring.positions(T, run.device)
        total = sum(p.numel() for p in sides[run.impls[0]].model.parameters())
        # of one *, in all layers: two matmuls, each for half of (T/cp)^2 scores
        unit = run.cfg.layers * args.batch * run.cfg.width * (T // cp) ** 2
        run.say(f"context_parallel: {cp} ranks on {run.device.type}, {args.dtype}, "
                f"{total:,} parameters on each; work in {unit:,} multiply-adds")
        if args.attn == "ulysses":
            run.say(f"rank r: all chunks of heads r H/cp .., work {cp}")
        else:
            run.say("\n".join(picture(args.attn, cp)))
        for impl, step in run.steps():
            side = sides[impl]
            run.set_rate(side.optimizer, step)
            x, y, valid = run.batch(step)  # (B, T), all tokens
            if impl == "scratch":
                x = x[:, own]  # (B, T/cp)
                y = y[:, own]
            with run.measure(impl, step):
                loss, norm = side.train_step(x, y, valid)
            run.log(impl, step, loss, norm)
        account(run, sides[run.impls[0]].model)
        return run.finish(total, total)


if __name__ == "__main__":
    sys.exit(main())
