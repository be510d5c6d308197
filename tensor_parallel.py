"""Tensor parallelism cuts every matrix across ranks, and with --sp the residual stream along T.

    rank 0  x - norm -f-> [qkv]_0 heads_0 [out]_0 -g->(+)- norm -f-> [up]_0 gelu [down]_0 -g->(+)- x
    rank 1  x - norm -f-> [qkv]_1 heads_1 [out]_1 -g->(+)- norm -f-> [up]_1 gelu [down]_1 -g->(+)- x

f copies x in forward, and sums dx over ranks in backward; g sums in forward, copies in backward.
With --sp f gathers along T, g sums and cuts along T: a table is in part 2.
Inside is from an f to its g, outside is the rest; (+) adds the x from before the norm. q, k, v, up
(and Llama's gate) are cut by columns, out and down by rows, embedding and head by words. Inside no
rank needs another: heads are apart, gelu is elementwise.

    tp = TensorParallel(group)  # or SequenceParallel: --sp
    model = cut_model(model, tp, {"*.up": ColumnLinear, "*.down": RowLinear, ...})
    optimizer = AdamW(model.parameters())  # or before: parameters stay the same objects
    # all ranks of tp get the same ids and y
    (vocab_parallel_cross_entropy(model(ids), y, V, tp) / valid_targets).backward()
    sum_gradients(model, tp)  # in the first step also assert_alike(model, tp)
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, gradient_norm(model, tp))  # then step

B sequences of T tokens, width C, L blocks, V words, tp ranks:

    numbers on each rank                         plain GPT            here           --sp
    matrices, column biases, embeddings          12 C^2 L + V C + ..  1/tp           1/tp
    norms, row biases (Llama: norms)             (6 L + 2) C          the same       the same
    a block keeps: two x, two norm(x)            4 B T C              the same       1/tp
                   q, k, v, heads, up, gelu      12 B T C             1/tp           1/tp
    a block sends, in B T C (tp-1)/tp            -                    8, in 4 calls  10, in 10 calls

Shoeybi 2019, "Megatron-LM", arXiv:1909.08053, section 3. Korthikanti 2022, "Reducing Activation
Recomputation in Large Transformer Models", arXiv:2205.05198, section 4.2.

Not for: models with dropout, with one Linear for q, k and v (or gate and up), or with Embeddings
that have options; optimizers of whole matrices (--optimizer muon has a way); torch's GradScaler,
which skips steps on one rank alone; deepcopies of a cut model; experts of moe.py (but in
hybrid_3d.py). docs/your-model.md lists what the forward of a model may not do.

At work: torch.distributed.tensor.parallel.parallelize_module, loss_parallel (part 4).
    torchrun --standalone --nproc_per_node=2 tensor_parallel.py --sp
"""
import fnmatch
import math
from collections import namedtuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

# imports of parts 1 and 2 end here; the rest is for parts 3 to 5
import sys
from functools import partial

import torch.distributed.tensor.parallel as at_work
from torch.distributed.tensor import Replicate, Shard, init_device_mesh

from common import adamw, loss_sum

# ---- 1. the idea -------------------------------------------------------------

# gelu(X A) B is the sum over ranks r of gelu(X A_r) B_r, if ranks share out the columns of A, and
# the rows of B likewise: between the two no rank needs another. Attention is cut alike, by whole
# heads: q, k, v by columns, `out` by rows. Ranks begin alike (see ddp.py), with the whole batch.


def summed(t, group):
    """partial (each rank has a summand) -> replicated (each has the sum)."""
    t = t.clone()
    dist.all_reduce(t, group=group)  # partial -> replicated
    return t


class CopyToTP(torch.autograd.Function):
    """f: all ranks read the same x, and each makes a summand of its gradient."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, dx):
        return summed(dx, ctx.group), None  # partial -> replicated


class ReduceFromTP(torch.autograd.Function):
    """g: x is the sum of all ranks' y, so that the gradient of each y is that of x."""

    @staticmethod
    def forward(ctx, y, group):
        return summed(y, group)  # partial -> replicated

    @staticmethod
    def backward(ctx, dx):
        return dx, None


# ---- modules


def keep_piece(p, dim, group):
    """Cut p into equal pieces along dim, keep this rank's, and mark it: p.cut = dim."""
    if p is not None and not hasattr(p, "cut"):  # a head that is the embedding, too, is cut already
        assert p.shape[dim] % group.size() == 0, f"{tuple(p.shape)} on {group.size()} ranks"
        p.cut = dim
        p.data = p.data.chunk(group.size(), dim)[group.rank()].clone()


def column_linear(linear, group):
    """x (.., C) -> this rank's columns of the product (.., out/tp)."""
    keep_piece(linear.weight, 0, group)  # columns of A are rows of weight, which is A transposed
    keep_piece(linear.bias, 0, group)

    def forward(x):
        x = CopyToTP.apply(x, group)
        return F.linear(x, linear.weight, linear.bias)

    linear.forward = forward


def row_linear(linear, group):
    """y (.., in/tp), this rank's columns of a product -> x (.., C)."""
    keep_piece(linear.weight, 1, group)

    def forward(y):
        x = ReduceFromTP.apply(F.linear(y, linear.weight), group)  # partial -> replicated
        return x if linear.bias is None else x + linear.bias  # the bias is whole: added once

    linear.forward = forward


def locate(ids, words, rank):
    """-> each id's row in this rank's piece of so many words, or 0; has it one?"""
    rows = ids - rank * words
    here = (rows >= 0) & (rows < words)
    return rows.masked_fill(~here, 0), here


def vocab_embedding(embedding, group):
    """Token ids (.., T) -> x (.., T, C). Words of other ranks are zeros here."""
    keep_piece(embedding.weight, 0, group)

    def forward(ids):
        rows, here = locate(ids, len(embedding.weight), group.rank())
        y = F.embedding(rows, embedding.weight).masked_fill(~here.unsqueeze(-1), 0)
        return ReduceFromTP.apply(y, group)  # partial -> replicated

    embedding.forward = forward


def cut_by_name(model, plan, group):
    """plan: such as {"words": vocab_embedding, "*.up": column_linear, "*.down": row_linear, ..}"""
    for name, module in model.named_modules():
        for pattern, cut in plan.items():
            if fnmatch.fnmatch(name, pattern):
                cut(module, group)


# ---- a step


def cross_entropy_by_words(logits, targets, group, ignore_index=-100):
    """Logits (N, V/tp) of this rank's words, targets (N,) -> the sum of losses, on every rank."""
    most = logits.detach().amax(1, keepdim=True)  # (N, 1)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)  # each rank's own -> the largest, replicated
    logits = logits - most  # which leaves softmax as it is, and exp can be 1 at most
    denominator = ReduceFromTP.apply(logits.exp().sum(1), group)  # partial -> replicated
    column, here = locate(targets, logits.shape[1], group.rank())
    own_logit = logits.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill(~here, 0)
    target_logit = ReduceFromTP.apply(own_logit, group)  # partial -> replicated
    return (denominator.log() - target_logit).masked_fill(targets == ignore_index, 0).sum()


def norm_of_pieces(model, group):
    """-> norm of the whole gradient. What is whole is the same on all: the first rank counts it."""
    square = next(model.parameters()).new_zeros(())
    for p in model.parameters():
        if p.grad is not None and (hasattr(p, "cut") or group.rank() == 0):
            square += p.grad.square().sum()
    return summed(square, group).sqrt()  # partial -> replicated


def idea_step(model, optimizer, x, y, valid, clip, group):
    """x, y: the whole batch (B, T), on every rank; valid: the number of its targets."""
    optimizer.zero_grad()
    logits = model(x).flatten(0, 1)  # (B T, V/tp)
    loss = cross_entropy_by_words(logits, y.flatten(), group) / valid
    loss.backward()
    norm = norm_of_pieces(model, group)
    nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm)
    optimizer.step()
    return loss, norm


# ---- 2. the technique (copy this; of part 1 it takes locate; a model may want CopyToTP, summed)

# What it adds to the idea, and what that buys. Figures are of the toy's step on two ranks.
#     columns(x, q, k, v): one f         30 calls -> 22, 13.6 MB sent -> 9.5
#     dx before weights' gradients       its sum travels while they are computed
#     a loss with one buffer (N, V/tp)   of 16,384 words: a peak of 207 MB -> 107
#     a plan                             models of other names
#     --sp                               x outside is cut, too: 22.7 MB of activations -> 17.9, but
#                                        22 calls -> 51, 9.5 MB sent -> 11.9
#     pieces of any size, whole tensors  tp need not divide the vocabulary and the hidden width; any
#                                        checkpoint, and back to one process
#     key_values, at the end             more ranks than heads of keys and values

# renamed in torch 2.13
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# ---- who shares a model, and how x goes inside and out

# x outside is    f forward   f backward                        g forward       g backward
# whole           -           all-reduce dx                     all-reduce      -
# cut along T     all-gather  all-gather x, reduce-scatter dx   reduce-scatter  all-gather
#
# The first is TensorParallel, the second SequenceParallel (--sp).

# how a parameter is cut: along dim, of which the plain one has plain_size
Cut = namedtuple("Cut", "dim plain_size")


class TensorParallel:
    """The ranks that share a model, how x goes inside and out, and a record of what they have cut.

    Outside, x is whole on every rank (Shoeybi 2019, fig. 3). In shapes, tp means tp.size. gather
    and reduce begin a collective, and return wait, a function that returns the result.
    """

    cuts_x = False  # is x outside cut along T? In SequenceParallel it is

    def __init__(self, group=None):
        self.group = group or dist.group.WORLD
        self.size = self.group.size()
        self.rank = self.group.rank()
        self.cuts = {}  # {parameter: Cut}; others are whole
        self.inside = set()  # whole parameters that are used inside, see inside()

    def gather(self, x):
        """From outside to inside: here every rank has all of x already."""
        return lambda: x

    def reduce(self, y):
        """From inside to outside: summands y (.., T, C) -> their sum, in y's place."""
        work = dist.all_reduce(y, group=self.group, async_op=True)  # partial -> replicated
        return lambda: finished(work, y)

    def each(self, plain_size):
        """How much of it a rank gets. The last ones get less, or nothing, if it is not even."""
        return math.ceil(plain_size / self.size)


class SequenceParallel(TensorParallel):
    """Outside, x is cut along T, dim -2, which tp must divide (Korthikanti 2022, fig. 5).

    So norms and row biases see 1/tp of the tokens, and make summands (is_summand). What is added
    to x must be cut as x is: a table of learned positions becomes a VocabEmbedding, whose g cuts
    along T. docs/your-model.md has what else a model may not do then.
    """

    cuts_x = True

    def gather(self, x):
        """Pieces (.., T/tp, C) -> (.., T, C)."""
        x = x.contiguous()
        pieces = x.new_empty(self.size, *x.shape)  # (tp, .., T/tp, C)
        flat = pieces.flatten(0, 1)  # the same memory; gloo wants as many dims as x has
        work = all_gather(flat, x, self.group, async_op=True)  # sharded(T) -> replicated
        return lambda: finished(work, pieces).movedim(0, -3).flatten(-3, -2)

    def reduce(self, y):
        """Summands (.., T, C) -> this rank's piece (.., T/tp, C) of their sum."""
        pieces = y.unflatten(-2, (self.size, -1)).movedim(-3, 0).contiguous()  # (tp, .., T/tp, C)
        x = torch.empty_like(pieces[0])
        flat = pieces.flatten(0, 1)
        work = reduce_scatter(x, flat, group=self.group, async_op=True)  # partial -> sharded(T)
        return lambda: finished(work, x)


def finished(work, t):
    """-> t, which a collective has filled by then."""
    work.wait()  # on a GPU this orders streams: the host goes on at once
    return t


def shard(t, cut, tp):
    """A whole tensor -> this rank's piece."""
    assert t.shape[cut.dim] == cut.plain_size, f"{tuple(t.shape)}: not {cut.plain_size} to cut"
    each = tp.each(cut.plain_size)
    rows = t.movedim(cut.dim, 0)[tp.rank * each:(tp.rank + 1) * each]  # fewer where t ends
    return rows.movedim(0, cut.dim).clone(memory_format=torch.contiguous_format)


class ToOutside(torch.autograd.Function):
    """g: summands y (.., T, C) -> x as it is outside."""

    @staticmethod
    def forward(ctx, y, tp):
        ctx.tp = tp
        # TensorParallel writes to it; torch's selective checkpointing keeps y, a matmul's result
        y = y if tp.cuts_x else y.clone()
        return tp.reduce(y)()  # partial -> replicated or sharded(T)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        return ctx.tp.gather(dx)(), None  # replicated or sharded(T) -> replicated


# ---- one f for the Linears that read the same x, and dx before weights' gradients


class ColumnParallel(torch.autograd.Function):
    """f, and the matrices that share it, cut by columns: x -> (.., T, out/tp) of each."""

    @staticmethod
    def forward(ctx, tp, x, *weights):
        ctx.tp = tp
        ctx.save_for_backward(x, *weights)  # not the gathered x: backward gathers it again
        whole = tp.gather(x)()  # replicated or sharded(T) -> replicated
        return tuple(F.linear(whole, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        """Start x's gather, make dx, start its sum, make weights' gradients, wait for dx."""
        x, *weights = ctx.saved_tensors
        trains = any(ctx.needs_input_grad[2:])
        wait_for_x = ctx.tp.gather(x) if trains else None  # replicated or sharded(T) -> replicated
        wait_for_dx = None
        gradients = [None] * len(weights)
        if ctx.needs_input_grad[1]:  # partial -> replicated or sharded(T)
            wait_for_dx = ctx.tp.reduce(input_gradient(dys, weights))
        if trains:
            whole = wait_for_x().flatten(0, -2)  # (N, C)
            gradients = [dy.flatten(0, -2).t() @ whole for dy in dys]
        return None, wait_for_dx and wait_for_dx(), *gradients


def input_gradient(dys, weights):
    """This rank's summand of dx: the sum of dy @ weight over the matrices that share f."""
    dx = dys[0] @ weights[0]  # (.., T, C)
    for dy, weight in zip(dys[1:], weights[1:]):
        dx.view(-1, dx.shape[-1]).addmm_(dy.flatten(0, -2), weight)
    return dx


# ---- modules that take the places of plain ones


class CutModule(nn.Module):
    """Takes the place of a plain module: has its parameters, and cuts those in `dims`."""

    dims = {}  # {name of a parameter: the dim along which it is cut}

    def __init__(self, plain, tp):
        super().__init__()
        # else its weight is computed, as by spectral_norm
        is_plain = type(plain) in (nn.Linear, nn.Embedding) and "weight" in plain._parameters
        assert is_plain and getattr(plain, "padding_idx", None) is None, (
            f"{plain}: only a plain Linear or Embedding can be cut.")
        self.tp = tp
        self.weight = plain.weight
        self.bias = getattr(plain, "bias", None)
        for name, dim in self.dims.items():
            p = getattr(self, name)
            if p is not None and p not in tp.cuts:  # a tied one is cut already
                tp.cuts[p] = Cut(dim, p.shape[dim])
                p.data = shard(p.data, tp.cuts[p], tp)  # p stays, and with it names and ties


class ColumnLinear(CutModule):
    """f, and a Linear cut by columns: x -> (.., T, out/tp)."""

    dims = {"weight": 0, "bias": 0}
    multiply = staticmethod(ColumnParallel.apply)  # hybrid_3d.py has another

    def forward(self, x):
        return columns(x, self)[0]

    def operands(self):
        return [self.weight, self.bias]


def columns(x, *linears):
    """Linears that read the same x share an f: q, k, v = columns(x, attn.q, attn.k, attn.v)."""
    weights, biases = zip(*[linear.operands() for linear in linears])
    operands = [x, *weights]
    # F.linear would cast by itself, but backward multiplies what was saved: so cast before
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        operands = [t.to(dtype) for t in operands]
    ys = linears[0].multiply(linears[0].tp, *operands)
    return [y if bias is None else y + bias.to(y.dtype) for y, bias in zip(ys, biases)]


class RowLinear(CutModule):
    """A Linear cut by rows, and g: (.., T, in/tp) -> x. The bias is whole, and added to the sum."""

    dims = {"weight": 1}
    multiply = staticmethod(F.linear)  # hybrid_3d.py has another

    def forward(self, y):
        summand = self.multiply(y, self.weight)
        x = ToOutside.apply(summand, self.tp)  # partial -> replicated or sharded(T)
        return x if self.bias is None else x + self.bias.to(x.dtype)


class VocabEmbedding(CutModule):
    """An Embedding cut by words, and g: token ids (.., T) -> x."""

    dims = {"weight": 0}

    def forward(self, ids):
        words = self.tp.each(self.tp.cuts[self.weight].plain_size)
        rows, here = locate(ids, words, self.tp.rank)
        # a rank without words looks up a row that counts nowhere
        weight = self.weight if len(self.weight) else F.pad(self.weight, (0, 0, 0, 1))
        y = F.embedding(rows, weight).masked_fill(~here.unsqueeze(-1), 0)  # (.., T, C)
        return ToOutside.apply(y, self.tp)  # partial -> replicated or sharded(T)


# ---- the loss of cut logits, with one buffer


class VocabParallelCrossEntropy(torch.autograd.Function):
    """The idea's formulas, but both sums in one all-reduce, and a backward that makes one buffer.

    Logits (N, V/tp), targets (N,) -> losses (N,). words: V/tp, rounded up.
    """

    @staticmethod
    def forward(ctx, logits, targets, words, tp):
        own_log_sum = logits.logsumexp(1)  # (N,)
        most = own_log_sum.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, tp.group)  # each rank's own -> the largest
        summand = (own_log_sum - most).exp()
        column, here = locate(targets.unsqueeze(1), words, tp.rank)  # (N, 1)
        own_logit = logits.gather(1, column).masked_fill(~here, 0).squeeze(1)
        sums = torch.stack([summand, own_logit])  # (2, N)
        dist.all_reduce(sums, group=tp.group)  # partial -> replicated
        log_sum = sums[0].log() + most
        ctx.save_for_backward(logits, column, here, log_sum)
        return log_sum - sums[1]

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):  # (N,)
        logits, column, here, log_sum = ctx.saved_tensors
        dlogits = (logits - log_sum.unsqueeze(1)).exp_()  # softmax
        dlogits.scatter_add_(1, column, -here.to(dlogits.dtype))  # - 1 at the target
        return dlogits.mul_(dloss.unsqueeze(1)), None, None, None


def vocab_parallel_cross_entropy(logits, targets, vocab, tp, ignore_index=-100):
    """This rank's logits (.., V/tp), targets (..), vocab V -> the sum of losses, on every rank.

    Targets are below V, or ignore_index. Others are not checked: they raise, or losses are wrong.
    """
    words = tp.each(vocab)
    here = min(words, vocab - tp.rank * words)  # on the last rank fewer
    assert logits.shape[-1] == here > 0, f"logits of {here} words are wanted: is the head cut?"
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.flatten(0, -2).to(wide)  # (N, V/tp)
    targets = targets.flatten()
    losses = VocabParallelCrossEntropy.apply(logits, targets, words, tp)  # replicated
    return losses.masked_fill(targets == ignore_index, 0).sum()


# ---- a plan for any model


def inside(module, tp):
    """For a plan: a module that stays whole, but is used inside, as a norm of q's heads. Each rank
    makes a summand of its gradient."""
    tp.inside.update(module.parameters())
    return module


def cut_model(model, tp, plan):
    """Put cut modules in the place of plain ones -> the model, with the first rank's weights.

    plan: {pattern for names of modules: kind}. A * matches dots, too, and of two patterns that
    match the first one counts. kind(module, tp) -> what takes its place: ColumnLinear, inside, ..
    or yours. Hooks and other forwards of what is replaced are lost.
    """
    for t in model.state_dict(keep_vars=True).values():
        if not t.is_meta and t not in tp.cuts:  # in the cuts: by a cut_model before
            t.data = t.data.contiguous()  # a broadcast sends memory, whatever the strides
            dist.broadcast(t.data, group=tp.group, group_src=0)  # the first rank's -> replicated
    modules = dict(model.named_modules(remove_duplicate=False))  # that no pattern has matched yet
    for pattern, kind in plan.items():
        names = fnmatch.filter(modules, pattern)
        assert names, f"No module of this model is called {pattern}, or none is left for it."
        for name in names:
            model.set_submodule(name, kind(modules.pop(name), tp))
    refuse_silent_mistakes(model, tp)
    return model


# ---- after backward


def is_summand(p, tp):
    """Does each rank make a summand of p's gradient? What is whole has seen this rank's heads, or
    1/tp of the tokens."""
    return p not in tp.cuts and (p in tp.inside or tp.cuts_x)


def sum_gradients(model, tp):
    """Once a step, after the last backward: one all-reduce of all gradients that are summands."""
    trained = [p for p in model.parameters() if p.grad is not None]
    assert trained, "no gradients: if ZeRO or FSDP has them, take hybrid_3d.py, which sums those"
    gradients = [p.grad for p in trained if is_summand(p, tp)]
    if gradients and tp.size > 1:
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat, group=tp.group)  # partial -> replicated
        parts = flat.split([g.numel() for g in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for g, part in zip(gradients, parts)])


def gradient_norm(model, tp):
    """-> norm of the whole model's gradient, after sum_gradients."""
    like = next(model.parameters())
    square = like.new_zeros((), dtype=torch.promote_types(like.dtype, torch.float32))
    trained = [p for p in model.parameters() if p.grad is not None]
    counted = [p.grad for p in trained if tp.rank == 0 or p in tp.cuts]  # what is whole: once
    if counted:
        square = torch.stack(torch._foreach_norm(counted, dtype=square.dtype)).square().sum()
    dist.all_reduce(square, group=tp.group)  # partial -> replicated
    return square.sqrt()


# ---- whole tensors


def unshard(t, cut, tp):
    """A piece -> the whole tensor, on every rank. cut is None: it is whole already."""
    if cut is None:
        return t
    rows = t.detach().movedim(cut.dim, 0)
    piece = rows.new_zeros(tp.each(cut.plain_size), *rows.shape[1:])  # all of one size
    piece[:len(rows)] = rows
    whole = piece.new_empty(tp.size * len(piece), *piece.shape[1:])
    all_gather(whole, piece, tp.group)  # sharded -> replicated
    # cloned: else a file of it would have the padding, too, or safetensors refuse it
    return whole[:cut.plain_size].movedim(0, cut.dim).clone(memory_format=torch.contiguous_format)


def full_state_dict(model, tp):
    """-> the plain model's state_dict, on every rank. What is not cut shares the model's memory."""
    state = model.state_dict(keep_vars=True)
    return {name: unshard(t, tp.cuts.get(t), tp).detach() for name, t in state.items()}


def full_gradients(model, tp):
    """After sum_gradients -> {the plain model's name: whole gradient, if any}, on every rank."""
    trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
    return {name: unshard(p.grad, tp.cuts.get(p), tp) for name, p in trained.items()}


def load_full_state_dict(model, tp, state):
    """full_state_dict's inverse. state[name] is a whole tensor: if it is read from a file when it
    is asked for, a rank never has the whole model. Names that the model lacks are left there.

    A model that was cut on the meta device gets its memory here, on the device of state[name]; not
    by to_empty() or load_state_dict(assign=True): of other parameters tp knows nothing.
    """
    # the first of two tied names, which is the one that safetensors has
    names = {t: name for name, t in reversed(model.state_dict(keep_vars=True).items())}
    for t, name in names.items():
        piece = state[name].to(t.dtype)
        if t in tp.cuts:
            piece = shard(piece, tp.cuts[t], tp)
        assert piece.shape == t.shape, f"{name}: {tuple(piece.shape)}, not {tuple(t.shape)}"
        if t.is_meta:
            piece = piece.clone()
            if isinstance(t, nn.Parameter):  # else it is a buffer
                piece = nn.Parameter(piece, t.requires_grad)
            torch.utils.swap_tensors(t, piece)  # t stays, and with it names and ties
        else:
            t.data.copy_(piece)


# ---- mistakes that nobody would see


def refuse_silent_mistakes(model, tp):
    for name, module in model.named_modules():
        drops = isinstance(module, nn.Dropout) and module.p > 0
        assert not drops, f"{name}: ranks would draw masks of their own, also where x is whole."
        cut = [key for key, p in module.named_parameters(recurse=False) if p in tp.cuts]
        knows = isinstance(module, CutModule) or not cut
        assert knows, f"{name} shares {cut} with a cut module: cut {name}, too."


def assert_alike(model, tp):
    """Once, after the first sum_gradients: raises where ranks have different gradients of what is
    whole. Then the plan lacks an `inside`, or ranks have drawn different dropout. SequenceParallel
    has summed these: with it this sees nothing."""
    found = {name: p for name, p in model.named_parameters() if p.grad is not None}
    assert found, "no gradients here: hybrid_3d.py has its own assert_alike"
    assert_same({name: p.grad for name, p in found.items() if p not in tp.cuts}, tp.group)


def assert_same(tensors, group):
    """{name: tensor}, of gradients, or x.double()."""
    for name, t in tensors.items():
        ends = torch.stack([t, -t])
        dist.all_reduce(ends, dist.ReduceOp.MAX, group)  # each rank's own -> the largest
        spread = ends.sum(0).norm()  # of largest - smallest
        assert spread <= 1e-3 * t.norm(), (
            f"{name} differs between ranks (does the plan lack an inside?), or has a nan")


# ---- more ranks than heads of keys and values


class FewHeads(ColumnLinear):
    """k or v of fewer heads than ranks: it stays whole, is used inside, and ranks in a row read the
    same head. So each of 8 ranks keeps 4 heads, and reads one, of Qwen3-235B-A22B's k and v.
    """

    dims = {}

    def __init__(self, plain, tp, heads):
        super().__init__(inside(plain, tp), tp)
        self.heads = heads

    def operands(self):
        head = self.tp.rank * self.heads // self.tp.size
        return [t if t is None else t.chunk(self.heads)[head] for t in (self.weight, self.bias)]


def key_values(heads):
    """For a plan: k and v of so many heads, where tp divides heads, or heads divides tp."""

    def kind(plain, tp):
        assert heads % tp.size == 0 or tp.size % heads == 0, f"{heads} heads on {tp.size} ranks"
        return ColumnLinear(plain, tp) if heads >= tp.size else FewHeads(plain, tp, heads)

    return kind


# ---- 3. the toy GPT, parallelized --------------------------------------------


def one_f(*names):
    """For a plan: an Attention or SwiGLU of common.py, whose `project` calls these Linears. (An MLP
    has no gate, and does not call `project`.)"""

    def kind(module, tp):
        module.project = lambda x: columns(x, *[getattr(module, name) for name in names])
        return module

    return kind


def plan_of(model):
    attn = model.blocks[0].attn
    plan = {
        "tok": VocabEmbedding, "head": ColumnLinear,
        "blocks.*.attn.q": ColumnLinear, "blocks.*.attn.out": RowLinear,
        "blocks.*.attn.[kv]": key_values(attn.k.out_features // attn.head_dim),
        # one_f reads q, k and v when it runs: by then they are cut
        "blocks.*.attn": one_f("q", "k", "v"), "blocks.*.attn.[qk]_norm": inside,
        "blocks.*.mlp.[gu]*": ColumnLinear, "blocks.*.mlp.down": RowLinear,  # up, maybe a gate
        "blocks.*.mlp": one_f("gate", "up"),
    }
    if model.pos is not None:
        plan["pos"] = VocabEmbedding  # to save memory; --sp has to
    return plan


def parallelize(model, tp):
    """GPT.forward stays as it is, but returns (B, T, V/tp)."""
    return cut_model(model, tp, plan_of(model))


def norm_inside(norm, group):
    """Qwen3's norms of q and k are whole, but see a rank's own heads: each makes a summand."""
    for p in norm.parameters():
        if p.requires_grad:
            p.register_hook(lambda gradient: summed(gradient, group))


PLAN_OF_IDEA = {
    "tok": vocab_embedding, "head": column_linear,
    "*.attn.[qkv]": column_linear, "*.attn.[qk]_norm": norm_inside, "*.attn.out": row_linear,
    "*.mlp.gate": column_linear, "*.mlp.up": column_linear, "*.mlp.down": row_linear,
}


def parallelize_idea(model, tp):
    """tp notes what part 1 has cut, so that full_state_dict can make it whole."""
    cut_by_name(model, PLAN_OF_IDEA, tp.group)
    for p in model.parameters():
        if hasattr(p, "cut"):
            tp.cuts[p] = Cut(p.cut, tp.size * p.shape[p.cut])
    for block in model.blocks:  # for textbook's G alone
        inside(block.attn.q_norm, tp)
        inside(block.attn.k_norm, tp)
    return model


def token_losses(model, x, y, tp):
    """x, y: the whole batch (B, T), on every rank -> the sum of token losses, on every rank."""
    return vocab_parallel_cross_entropy(model(x), y, tp.cuts[model.head.weight].plain_size, tp)


def train_step(model, optimizer, x, y, valid, clip, tp):
    """-> the loss and the gradient norm, on every rank."""
    optimizer.zero_grad()
    loss = token_losses(model, x, y, tp) / valid
    loss.backward()
    sum_gradients(model, tp)  # partial -> replicated
    norm = gradient_norm(model, tp)
    finite = norm.nan_to_num(0, posinf=0)  # 0: nothing is scaled, and nan and inf can be seen
    nn.utils.clip_grads_with_norm_(model.parameters(), clip, finite)
    optimizer.step()
    return loss, norm


# ---- 4. at work: the same with torch's own API -------------------------------


def parallelize_at_work(model, mesh, sp):
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    tied = model.head.weight is model.tok.weight
    outside = Shard(-2) if sp else Replicate()  # the layout of x there: cut along T, or whole
    f = at_work.PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate())
    column = at_work.ColwiseParallel()
    head = at_work.ColwiseParallel(input_layouts=outside, use_local_output=False)  # -> a DTensor
    row = at_work.RowwiseParallel(output_layouts=outside)
    embedding = at_work.RowwiseParallel(input_layouts=Replicate(), output_layouts=outside)
    # without --sp, too: parameters of norms must be DTensors, as the others are
    norm = at_work.SequenceParallel()
    norm.sequence_sharding = (outside,)  # the layout of its x, for which it has no argument
    plan = {
        "[tp]o*": embedding,  # tok, and pos, if there is one
        "blocks.*.norm[12]": norm, "norm": norm,
        "blocks.*.attn": f, "blocks.*.mlp": f,  # once for q, k and v, once for gate and up
        "blocks.*.attn.[qkv]": column, "blocks.*.attn.out": row,
        "blocks.*.mlp.[gu]*": column, "blocks.*.mlp.down": row,  # gate, if there is one, and up
        "head": head,
    }
    if list(model.blocks[0].attn.q_norm.parameters()):  # if they are norms: of (B, H/tp, T, D)
        plan["blocks.*.attn.[qk]_norm"] = at_work.SequenceParallel(
            sequence_dim=1, use_local_output=True)
    at_work.parallelize_module(model, mesh, plan)
    if tied:
        model.head.weight = model.tok.weight  # torch has made two of one
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen)  # which torch forgets
    return model


def train_step_at_work(model, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    with at_work.loss_parallel():
        loss = loss_sum(model(x), y) / valid
        loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            # SequenceParallel leaves a norm's gradient partial, and torch 2.11 would not clip it
            p.grad = p.grad.redistribute(placements=p.placements)  # partial -> replicated
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.full_tensor(), norm.full_tensor()


def evaluate_at_work(model, x, y):
    with at_work.loss_parallel():
        return loss_sum(model(x), y).full_tensor()


# ---- 5. run ------------------------------------------------------------------

FLAGS = {"--sp": dict(action="store_true", help="sequence parallel: cut x along T outside, too")}
VARIANTS = ("", "--sp")  # flags with which the file is worth running


def refuse(args, require):
    n = args.world_size
    cfg = args.cfg
    ours = args.impl == "scratch"
    idea = args.impl in ("idea", "all")
    require(not (idea and args.sp), f"--impl {args.impl}: no --sp in the idea")
    few = ours and n % cfg.kv_heads == 0  # with key_values
    require(cfg.heads % n == 0 and (few or cfg.kv_heads % n == 0),
            f"{n} ranks cannot share {cfg.heads} heads, {cfg.kv_heads} of keys and values, evenly")
    require(ours or cfg.hidden % n == 0, f"{n} ranks cannot cut --hidden {cfg.hidden} evenly")
    require(not idea or cfg.vocab % n == 0, f"{n} ranks cannot cut --vocab {cfg.vocab} evenly")
    require(not args.sp or cfg.seq % n == 0, f"{n} ranks cannot cut --seq {cfg.seq} evenly")


def set_up(run, impl, tp, mesh):
    """-> a Side: what the run steps, judges and saves, see harness/run.py."""
    from harness.checkpoint import of_cuts, pieces_of
    from harness.whole import wholes_of_cuts

    side = partial(run.side, copies=tp.size)  # every rank has the whole loss
    model = run.build()
    if impl == "torch":
        parallelize_at_work(model, mesh, run.args.sp)
        return side(model, adamw(model.parameters(), run.args.lr), train_step_at_work,
                    evaluate=partial(evaluate_at_work, model))
    if impl == "idea":
        parallelize_idea(model, tp)
        step = partial(idea_step, group=tp.group)
    else:
        parallelize(model, tp)
        step = partial(train_step, tp=tp)
    named = list(model.named_parameters())
    optimizer = run.optimizer(named, wholes=partial(wholes_of_cuts, tp))
    return side(model, optimizer, step, evaluate=partial(token_losses, model, tp=tp),
                full_gradients=partial(full_gradients, model, tp),
                full_state_dict=partial(full_state_dict, model, tp),
                pieces=lambda: of_cuts(pieces_of(named, optimizer), tp))


def textbook(run, impl, model, tp):
    """-> rows. b: bytes of a number, s: of one in the loss. P: numbers of parameters here, G: of
    gradients that are summed after backward. k: how many f and g a block has. T': T if positions
    are cut, else 0.
    """
    b = run.dtype.itemsize
    s = max(b, 4)
    k = 4
    if impl == "idea":  # no fp32 for the loss, and an f for each Linear
        s = b
        k = 7 if hasattr(model.blocks[0].mlp, "gate") else 6
    L = run.cfg.layers
    N = run.args.batch * run.cfg.seq  # B T
    sent = 1 - 1 / tp.size  # of a tensor, by an all-gather or a reduce-scatter
    x = sent * b * N * run.cfg.width
    has_positions = model.pos is not None and model.pos.weight in tp.cuts
    positions = x / run.args.batch if has_positions else 0
    parameters = list(model.parameters())
    P = sum(p.numel() for p in parameters)
    G = sum(p.numel() for p in parameters if is_summand(p, tp))
    sums = 2 * sent * (b * G + s * (3 * N + 1))  # 3 sums of the loss; the gradient norm
    rows = [("held states", "4 b P + 4 per tensor (steps)", 4 * b * P + 4 * len(parameters))]
    if run.args.sp:  # f gathers x again in backward
        return rows + [
            ("wire all_gather", "(tp-1)/tp b [B T (6 L + 3) + T'] C", (6 * L + 3) * x + positions),
            ("wire reduce_scatter", "(tp-1)/tp b [B T (4 L + 2) + T'] C",
             (4 * L + 2) * x + positions),
            ("wire all_reduce", "2 (tp-1)/tp (b G + s (3 B T + 1))", sums)]
    formula = f"2 (tp-1)/tp (b [B T ({k} L + 2) + T'] C + b G + s (3 B T + 1))"
    return rows + [("wire all_reduce", formula, 2 * ((k * L + 2) * x + positions) + sums)]


def main():
    from harness.flags import arguments, require  # not above: the file is imported without harness/
    from harness.run import Run

    args = arguments(__doc__, FLAGS)
    refuse(args, require)
    run = Run(args)
    mesh = init_device_mesh(run.device.type, (run.world_size,))
    with run:  # from here on a dry run's tensors have no memory
        tp = SequenceParallel(dist.group.WORLD) if args.sp else TensorParallel(dist.group.WORLD)
        sides = {impl: set_up(run, impl, tp, mesh) for impl in run.impls}
        run.train(sides, rows=range(args.batch))  # all rows, everywhere
        if args.impl != "torch":
            run.textbook(textbook(run, run.impls[0], sides[run.impls[0]].model, tp))
        return run.finish()


if __name__ == "__main__":
    sys.exit(main())
