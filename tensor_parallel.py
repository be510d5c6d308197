"""Tensor parallelism cuts every matrix across ranks, and with --sp the residual stream along T.

    rank 0  x - norm -f-> [qkv]_0 heads_0 [out]_0 -g->(+)- norm -f-> [up]_0 gelu [down]_0 -g->(+)- x
    rank 1  x - norm -f-> [qkv]_1 heads_1 [out]_1 -g->(+)- norm -f-> [up]_1 gelu [down]_1 -g->(+)- x

At f and g ranks communicate. Inside is from an f to its g, outside is the rest; (+) adds the
residual. q, k, v, up (and Llama's gate) are cut by columns, out and down by rows, token embedding
and head by vocabulary. Inside no rank needs another: heads are apart, gelu is elementwise.

    x outside is       f forward   f backward                        g forward       g backward
    whole              -           all-reduce dx                     all-reduce      -
    cut along T: --sp  all-gather  all-gather x, reduce-scatter dx   reduce-scatter  all-gather

    elements on each of tp ranks                 plain GPT            here           --sp
    matrices, column biases, embeddings          12 C^2 L + V C + ..  1/tp           1/tp
    norms, row biases (Llama: norms)             (6 L + 2) C          whole          whole
    a block keeps: x and norm(x), twice          4 B T C              whole          1/tp
                   q, k, v, heads, up, gelu      12 B T C             1/tp           1/tp
    a block sends, times B T C (tp-1)/tp         -                    8, in 4 calls  10, in 10 calls

With --sp, f keeps its piece of x, and gathers x again in backward. Called as columns(x, q, k, v),
Linears share an f. A plan alone gives each its own: GPT-2 sends 12 (--sp 16), Llama 14 (19). Use:

    tp = WholeSequence(group)  # its ranks all get the same ids x. --sp: CutSequence(group)
    model = cut_model(model, tp, {"*.up": ColumnLinear, "*.down": RowLinear, ...})
    (vocab_parallel_cross_entropy(model(x), y, V, tp) / valid_targets).backward()  # V: words
    sum_gradients(model, tp)
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, gradient_norm(model, tp))  # then step

Not for: fewer key-value heads than ranks; one Linear that makes q, k and v, or gate and up; a
hidden width that tp does not divide, if the activation of 0 is not 0 (sigmoid), since training then
fills the padding; Embeddings with options; optimizers of whole matrices (Muon); torch's GradScaler,
which skips steps on one rank alone; selective checkpoints that keep what `out` or `down` returns;
deepcopies of a cut model, whose parameters tp does not know; models too large for one rank.
Shoeybi 2019, "Megatron-LM", arXiv:1909.08053, section 3. Korthikanti 2022, "Reducing Activation
Recomputation in Large Transformer Models", arXiv:2205.05198, section 4.2.
At work: torch.distributed.tensor.parallel.parallelize_module, loss_parallel (section 3 below).
Run it: torchrun --standalone --nproc_per_node=2 tensor_parallel.py --sp
"""
import fnmatch
import math
from collections import namedtuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

# imports of section 1 end here; the rest is for sections 2 to 4
import sys
from functools import partial

import torch.distributed.tensor.parallel as at_work
from torch.distributed.tensor import Replicate, Shard, init_device_mesh

from common import adamw, loss_sum
from harness.checkpoint import of_whole, pieces_of
from harness.flags import Flag, arguments, require
from harness.run import Run, Side

# ---- 1. the technique (copy this; it needs only torch) -----------------------

# In comments a tensor is partial (a summand on each rank), sharded (a piece) or replicated (whole).

# renamed in torch 2.13
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A tensor that a collective may still be writing: wait() returns it."""

    def __init__(self, result, work=None, reads=None):
        self.result = result
        self.work = work  # torch's handle; None: there is nothing to wait for
        self.reads = reads  # what the collective reads, which has to live until wait()

    def wait(self):
        if self.work is not None:
            self.work.wait()  # on a GPU this orders streams: the host goes on at once
        return self.result


class PendingPieces(Pending):
    """Pieces of the sequence, one from each rank: wait() joins them."""

    def wait(self):
        pieces = super().wait()  # (tp, .., T/tp, C)
        return pieces.movedim(0, -3).flatten(-3, -2)  # (.., tp, T/tp, C) -> (.., T, C)


class Ranks:
    """The ranks that share a model, and what of it they have cut. In shapes, tp means tp.size."""

    def __init__(self, group=None):
        self.group = group  # a ProcessGroup; None: all ranks
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.cuts = {}  # {parameter: Cut}, of those that are cut
        self.inside = set()  # parameters that are whole, but used inside
        # attributes, so that hybrid_3d.py can replace them: zero bubble puts off weights' gradients
        self.column_parallel = ColumnParallel.apply
        self.linear = F.linear


class WholeSequence(Ranks):
    """Outside, x is whole on every rank (Shoeybi 2019, fig. 3)."""

    def gather(self, x):
        """From outside to inside: the x that all ranks have -> the same."""
        return Pending(x)

    def reduce(self, y):
        """From inside to outside: summands y (.., T, C) -> their sum, in y's memory."""
        work = dist.all_reduce(y, group=self.group, async_op=True)  # partial -> replicated
        # the sum overwrites y: by its version a selective checkpoint that has kept y will notice
        torch.autograd.graph.increment_version(y)
        return Pending(y, work)


class CutSequence(Ranks):
    """Outside, x is cut along T, dim -2, which tp must divide (Korthikanti 2022, fig. 5)."""

    def gather(self, x):
        """Pieces (.., T/tp, C) -> (.., T, C)."""
        x = x.contiguous()
        pieces = x.new_empty(self.size, *x.shape)  # (tp, .., T/tp, C)
        flat = pieces.flatten(0, 1)  # the same memory; gloo wants as many dims as x has
        work = all_gather(flat, x, self.group, async_op=True)  # sharded(T) -> replicated
        return PendingPieces(pieces, work, x)

    def reduce(self, y):
        """Summands (.., T, C) -> this rank's piece (.., T/tp, C) of their sum."""
        pieces = y.unflatten(-2, (self.size, -1)).movedim(-3, 0).contiguous()  # (tp, .., T/tp, C)
        x = torch.empty_like(pieces[0])
        flat = pieces.flatten(0, 1)  # the same memory
        work = reduce_scatter(x, flat, group=self.group, async_op=True)  # partial -> sharded(T)
        return Pending(x, work, pieces)


# ---- f and g. Autograd does not see collectives: each function here states its own backward.


class ColumnParallel(torch.autograd.Function):
    """f, and the Linears that share it, cut by columns: x -> (.., T, out/tp) of each."""

    @staticmethod
    def forward(ctx, tp, x, *parameters):
        """parameters: weight, bias, weight, bias, .. Each bias may be None."""
        ctx.tp = tp
        ctx.save_for_backward(x, *parameters)  # before the gather: with --sp x grows by it
        x = tp.gather(x).wait()  # replicated or sharded(T) -> replicated
        pairs = zip(parameters[::2], parameters[1::2])
        return tuple(F.linear(x, weight, bias) for weight, bias in pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        """Hide collectives: start x's gather, make dx, start its sum, make weights' gradients."""
        x, *parameters = ctx.saved_tensors
        _, dx_needed, *needed = ctx.needs_input_grad  # for tp, x and each parameter
        gradients = [None] * len(parameters)
        reducing = Pending(None)  # if x needs no gradient, dx is None
        if any(needed):
            gathering = ctx.tp.gather(x)  # replicated or sharded(T) -> replicated
        if dx_needed:
            summand = input_gradient(dys, parameters[::2])
            reducing = ctx.tp.reduce(summand)  # partial -> replicated or sharded(T)
        if any(needed):
            gradients = weight_gradients(gathering.wait(), dys, parameters[1::2])
        return None, reducing.wait(), *gradients


def input_gradient(dys, weights):
    """This rank's summand of dx: the sum of dy @ weight over the Linears that share f."""
    first, *others = [dy.flatten(0, -2) for dy in dys]  # (N, out/tp)
    dx = first @ weights[0]
    for dy, weight in zip(others, weights[1:]):
        dx.addmm_(dy, weight)
    return dx.unflatten(0, dys[0].shape[:-1])  # (.., T, C)


def weight_gradients(x, dys, biases):
    """x (.., T, C) -> the gradients of weight, bias, weight, bias, .."""
    x = x.flatten(0, -2)  # (N, C)
    gradients = []
    for dy, bias in zip(dys, biases):
        dy = dy.flatten(0, -2)  # (N, out/tp)
        gradients.append(dy.t() @ x)
        gradients.append(None if bias is None else dy.sum(0))
    return gradients


class ReduceFromTP(torch.autograd.Function):
    """g: summands y (.., T, C) -> x. WholeSequence writes the sum into the memory of y."""

    @staticmethod
    def forward(ctx, y, tp):
        ctx.tp = tp
        y = y.detach()  # the same memory; if y itself were returned, autograd would forbid x += ..
        return tp.reduce(y).wait()  # partial -> replicated or sharded(T)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        return ctx.tp.gather(dx).wait(), None  # replicated or sharded(T) -> replicated


# ---- pieces of parameters

# dim: along which a parameter is cut. plain_size: the plain parameter's size along dim.
Cut = namedtuple("Cut", "dim plain_size")


def shard(t, cut, tp):
    """A whole tensor -> this rank's piece. All pieces have one size: the last ones end in zeros.

    They stay zeros in training: gelu, silu and relu make 0 of 0, and the loss leaves out padding.
    """
    padding = -cut.plain_size % tp.size  # up to the next multiple
    padded = F.pad(t.movedim(cut.dim, -1), (0, padding))  # F.pad pads the last dim
    piece = padded.chunk(tp.size, -1)[tp.rank].movedim(-1, cut.dim)
    return piece.clone(memory_format=torch.contiguous_format)


def unshard(t, cut, tp):
    """A piece -> the whole tensor, on every rank. cut is None: it is whole already."""
    if cut is None:
        return t
    pieces = t.new_empty(tp.size, *t.shape)
    all_gather(pieces.flatten(0, 1), t.detach(), tp.group)  # sharded -> replicated
    return torch.cat(pieces.unbind(), cut.dim).narrow(cut.dim, 0, cut.plain_size)


def locate(ids, vocab, tp):
    """Token ids -> each one's row on this rank (0 if another has it), and whether it is here."""
    each = math.ceil(vocab / tp.size)  # rows of a piece
    rows = ids - tp.rank * each
    here = (rows >= 0) & (rows < each)
    # Ids that no rank has keep a wrong row, whose lookup raises: on the first rank always, but the
    # last may have padding there
    elsewhere = ~here & (ids >= 0) & (ids < vocab)
    return rows.masked_fill(elsewhere, 0), here


# ---- modules that take the places of plain ones


class CutModule(nn.Module):
    """Has the parameters of the plain module in whose place it stands, those in `dims` cut."""

    replaces = nn.Linear
    dims = {}  # {name of a parameter: along which dim it is cut}

    def __init__(self, plain, tp):
        super().__init__()
        assert type(plain) is self.replaces, f"{type(self)} is for {self.replaces}, not {plain}."
        assert getattr(plain, "padding_idx", None) is None, f"{plain}: padding_idx would be lost."
        self.tp = tp  # WholeSequence or CutSequence
        self.weight = plain.weight
        self.bias = getattr(plain, "bias", None)
        for name, dim in self.dims.items():
            p = getattr(self, name)
            if p is not None and p not in tp.cuts:  # if it is tied, it may be cut already
                tp.cuts[p] = Cut(dim, p.shape[dim])
                p.data = shard(p.data, tp.cuts[p], tp)  # p stays, and with it names and ties


class ColumnLinear(CutModule):
    """f, and a Linear cut by columns: x -> (.., T, out/tp)."""

    # columns of A in Y = X A are rows of weight, dim 0: nn.Linear stores A transposed
    dims = {"weight": 0, "bias": 0}

    def forward(self, x):
        return columns(x, self)[0]


def columns(x, *linears):
    """ColumnLinears that read the same x, as q, k and v do, with one f -> what each returns."""
    tp = linears[0].tp
    operands = [x]
    for linear in linears:
        operands += [linear.weight, linear.bias]
    # Cast here, before it is saved: in backward autocast is off, and dy @ weight needs one dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        operands = [None if t is None else t.to(dtype) for t in operands]
    return tp.column_parallel(tp, *operands)


class RowLinear(CutModule):
    """A Linear cut by rows, and g: (.., T, in/tp) -> x. The bias is whole, and added to the sum."""

    dims = {"weight": 1}  # rows of A are columns of weight

    def forward(self, y):
        # With 2 dims F.linear returns the matmul's own result, which selective checkpoints keep, so
        # that tp.reduce raises its version. With 3 it returns another tensor on the same memory
        product = self.tp.linear(y.flatten(0, -2), self.weight, None)  # (N, C)
        summand = product.unflatten(0, y.shape[:-1])  # (.., T, C)
        x = ReduceFromTP.apply(summand, self.tp)  # partial -> replicated or sharded(T)
        return x if self.bias is None else x + self.bias.to(x.dtype)


class VocabEmbedding(CutModule):
    """An Embedding cut by its rows, dim 0, and g: token ids (.., T) -> x."""

    replaces = nn.Embedding
    dims = {"weight": 0}

    def forward(self, ids):
        rows, here = locate(ids, self.tp.cuts[self.weight].plain_size, self.tp)
        y = F.embedding(rows, self.weight)  # (.., T, C)
        y = y.masked_fill(~here.unsqueeze(-1), 0)  # a summand: other ranks have the other tokens
        return ReduceFromTP.apply(y, self.tp)  # partial -> replicated or sharded(T)


def inside(module, tp):
    """For a plan: a module that is used inside, and stays whole, as a norm of q's heads."""
    tp.inside.update(module.parameters())
    return module


class SeededDropout(nn.Dropout):
    """Each mask has a seed of its own: a random number that all ranks draw alike, plus `offset`.

    They draw it from the CPU's default generator: cut_model gives it one state on all ranks, none
    may draw from it alone, and activation checkpointing restores it to run forward again.
    """

    def __init__(self, dropout, offset):
        super().__init__(dropout.p)
        self.training = dropout.training
        self.offset = offset

    def forward(self, x):
        if not self.training:
            return x
        seed = torch.randint(2 ** 48, (), device="cpu").item() + self.offset
        rng = torch.Generator(x.device).manual_seed(seed)
        keep = torch.empty_like(x).bernoulli_(1 - self.p, generator=rng)
        return x * keep / max(1 - self.p, 1e-9)  # of p = 1: zeros, not 0/0


def outside_dropout(dropout, tp):
    """For a plan: if x is whole all ranks draw the same mask, if it is cut each draws its own."""
    return SeededDropout(dropout, tp.rank if isinstance(tp, CutSequence) else 0)


def inside_dropout(dropout, tp):
    """For a plan: each rank draws a mask of its own (Shoeybi 2019, appendix B.2)."""
    return SeededDropout(dropout, tp.rank)


def cut_model(model, tp, plan):
    """Put cut modules in the place of plain ones -> the model, with the first rank's weights.

    plan: {pattern: kind}. Patterns are fnmatch's, for names of modules: * matches dots, too.
    kind is a class above, or inside, inside_dropout, outside_dropout, or a function of yours:
    kind(plain module, tp) returns what takes the module's place. The module's hooks are lost.
    Before the call, each rank has the whole model, on a device that tp.group's backend can use.
    tp must divide the number of key-value heads. Nothing here warns you if, in your forward,

    - heads are counted, as by view(B, T, heads, -1): write view(B, T, -1, head_dim)
    - inside, the whole last dim is needed, as by softmax over it
    - inside, parameters are whole, as of norms of q and k: name these modules in the plan, `inside`
    - dropout is a function, or an argument of attention: make it a module
    - outside, with CutSequence, T is read from x: read it from q
    - outside, with CutSequence, positions are brought together, as by x.mean(1)
    - outside, with CutSequence, x comes from an Embedding that the plan does not cut
    """
    for t in model.state_dict().values():
        dist.broadcast(t, group=tp.group, group_src=0)  # the first rank's -> replicated
    modules = dict(model.named_modules(remove_duplicate=False))
    kinds = {}  # {name of a module: kind}
    for pattern, kind in plan.items():
        names = fnmatch.filter(modules, pattern)
        assert names, f"No module of this model is called {pattern}."
        for name in names:
            assert name not in kinds, f"{name}: two patterns name it."
            kinds[name] = kind
    for name, kind in kinds.items():
        model.set_submodule(name, kind(modules[name], tp))
    for name, module in model.named_modules():
        forgotten = type(module) is nn.Dropout and module.p > 0
        assert not forgotten, f"{name}: the plan must call it outside_dropout or inside_dropout."
        if not isinstance(module, CutModule):
            tied = [key for key, p in module.named_parameters(recurse=False) if p in tp.cuts]
            assert not tied, f"{name} shares {tied} with a cut module: cut {name}, too."
    if any(isinstance(module, SeededDropout) for module in model.modules()):
        state = torch.get_rng_state().to(next(model.parameters()).device)
        dist.broadcast(state, group=tp.group, group_src=0)  # the first rank's -> replicated
        torch.set_rng_state(state.cpu())
    return model


# ---- the loss of cut logits


class VocabParallelCrossEntropy(torch.autograd.Function):
    """logits (N, V/tp), each target's column and whether it is here, both (N, 1) -> losses (N,)."""

    @staticmethod
    def forward(ctx, logits, column, here, words, tp):
        own_log_sum = logits[:, :words].logsumexp(1)  # (N,); columns from `words` on are padding
        largest = own_log_sum.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, tp.group)  # own log sums -> largest, replicated
        summand = (own_log_sum - largest).exp()  # of softmax's denominator, divided by exp(largest)
        target_logit = logits.gather(1, column).masked_fill(~here, 0)  # 0: another rank has it
        sums = torch.stack([summand, target_logit.squeeze(1)])  # (2, N)
        dist.all_reduce(sums, group=tp.group)  # partial -> replicated
        log_sum = sums[0].log() + largest  # (N,), the log of the denominator
        ctx.save_for_backward(logits, column, here, log_sum)
        ctx.words = words
        return log_sum - sums[1]

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):  # (N,)
        logits, column, here, log_sum = ctx.saved_tensors
        dlogits = (logits - log_sum.unsqueeze(1)).exp_()  # softmax
        dlogits[:, ctx.words:] = 0
        dlogits.scatter_add_(1, column, -here.to(dlogits.dtype))
        return dlogits.mul_(dloss.unsqueeze(1)), None, None, None, None


def vocab_parallel_cross_entropy(logits, targets, vocab, tp, ignore_index=-100):
    """This rank's logits (.., V/tp), targets (..), vocab V -> the sum of losses, on every rank."""
    each = logits.shape[-1]
    assert each == math.ceil(vocab / tp.size), "Is the head cut, and vocab that of the plain one?"
    words = min(max(0, vocab - tp.rank * each), each)  # the rest of the columns are padding
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.flatten(0, -2).to(wide)  # (N, V/tp)
    targets = targets.flatten().unsqueeze(1)  # (N, 1)
    ignored = targets == ignore_index
    column, here = locate(targets.masked_fill(ignored, 0), vocab, tp)
    losses = VocabParallelCrossEntropy.apply(logits, column, here, words, tp)  # replicated
    return losses.masked_fill(ignored.squeeze(1), 0).sum()


# ---- after backward: sums over ranks, norm, gathering


def sum_over_ranks(tensors, group):
    """Sum each tensor over the ranks, in its place, by one all-reduce for all of them."""
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat, group=group)  # partial -> replicated
    parts = flat.split([t.numel() for t in tensors])
    torch._foreach_copy_(tensors, [part.view_as(t) for t, part in zip(tensors, parts)])


def sum_gradients(model, tp):
    """Once a step, after the last backward: sum those gradients that are a summand on each rank."""
    summands = [p for p in model.parameters() if p.grad is not None and p not in tp.cuts]
    if isinstance(tp, WholeSequence):  # whole x gives whole gradients, but for what is used inside
        summands = [p for p in summands if p in tp.inside]
    if summands:
        sum_over_ranks([p.grad for p in summands], tp.group)  # partial -> replicated


def gradient_norm(model, tp):
    """After sum_gradients: the norm of the whole model's gradient, whole gradients counted once."""
    trained = [p for p in model.parameters() if p.grad is not None]
    pieces = [p.grad for p in trained if p in tp.cuts]
    whole = [p.grad for p in trained if p not in tp.cuts]
    wide = torch.promote_types(trained[0].dtype, torch.float32)  # squares overflow fp16
    squares = torch.stack(torch._foreach_norm(pieces + whole, dtype=wide)).square()
    square = squares[:len(pieces)].sum()
    dist.all_reduce(square, group=tp.group)  # partial -> replicated
    return (square + squares[len(pieces):].sum()).sqrt()


def full_state_dict(model, tp):
    """-> the plain model's state_dict, on every rank. What is not cut shares the model's memory."""
    state = model.state_dict(keep_vars=True)
    return {name: unshard(t, tp.cuts.get(t), tp).detach() for name, t in state.items()}


def full_gradients(model, tp):
    """-> {the plain model's name: whole gradient} of parameters that have one, on every rank."""
    trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
    return {name: unshard(p.grad, tp.cuts.get(p), tp) for name, p in trained.items()}


# ---- 2. the toy GPT, parallelized --------------------------------------------


def attention_with_one_f(attn, x):
    """The toy GPT's attention on this rank's heads. x is as outside, and so is the result."""
    qkv = columns(x, attn.q, attn.k, attn.v)  # each (B, T, heads here x D)
    q, k, v = [y.unflatten(-1, (-1, attn.head_dim)).transpose(1, 2) for y in qkv]  # (B, .., T, D)
    q = attn.q_norm(q)
    k = attn.k_norm(k)
    if attn.rotate is not None:
        positions = attn.positions(q.shape[2], q.device)  # (T,), also where x is cut along T
        q = attn.rotate(q, positions)
        k = attn.rotate(k, positions)
    y = attn.attend(q, k, v)
    return attn.out(y.transpose(1, 2).flatten(2))


def swiglu_with_one_f(mlp, x):
    gate, up = columns(x, mlp.gate, mlp.up)
    return mlp.down(F.silu(gate) * up)


def with_forward(forward):
    """-> a kind for plans: the module stays, but its forward(x) becomes forward(module, x)."""
    def kind(module, tp):
        module.forward = partial(forward, module)
        return module
    return kind


OF_BOTH = {
    "tok": VocabEmbedding, "head": ColumnLinear,
    "blocks.*.attn.[qkv]": ColumnLinear, "blocks.*.attn.out": RowLinear,
    "blocks.*.mlp.up": ColumnLinear, "blocks.*.mlp.down": RowLinear,
    "blocks.*.attn": with_forward(attention_with_one_f),
}
PLANS = {
    # pos is small, but with --sp what tok returns is cut along T, and what pos returns must be, too
    "gpt2": {**OF_BOTH, "pos": VocabEmbedding},
    "llama": {**OF_BOTH, "blocks.*.mlp.gate": ColumnLinear, "blocks.*.attn.[qk]_norm": inside,
              "blocks.*.mlp": with_forward(swiglu_with_one_f)},
}


def parallelize(model, tp):
    """GPT.forward stays as it is, but returns (B, T, V/tp)."""
    return cut_model(model, tp, PLANS["llama" if model.pos is None else "gpt2"])


def token_losses(model, x, y, tp):
    """x, y: the whole batch (B, T), on every rank -> the sum of token losses, on every rank."""
    return vocab_parallel_cross_entropy(model(x), y, tp.cuts[model.tok.weight].plain_size, tp)


def train_step(model, optimizer, x, y, valid, clip, tp):
    """-> the loss and the gradient norm, on every rank."""
    optimizer.zero_grad()
    loss = token_losses(model, x, y, tp) / valid
    loss.backward()
    sum_gradients(model, tp)  # partial -> replicated
    norm = gradient_norm(model, tp)
    finite = norm.nan_to_num(0, posinf=0)  # 0: gradients stay as they are, and show the fault
    nn.utils.clip_grads_with_norm_(model.parameters(), clip or math.inf, finite)
    optimizer.step()
    return loss, norm


# ---- 3. at work: the same with torch's own API -------------------------------


def parallelize_at_work(model, mesh, sp):
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    outside = Shard(-2) if sp else Replicate()  # the layout of x there: cut along T, or whole
    f = at_work.PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate())
    column = at_work.ColwiseParallel()
    head = at_work.ColwiseParallel(input_layouts=outside, use_local_output=False)  # -> a DTensor
    row = at_work.RowwiseParallel(output_layouts=outside)
    embedding = at_work.RowwiseParallel(input_layouts=Replicate(), output_layouts=outside)
    norm = at_work.SequenceParallel()  # without --sp, too: parameters of norms must be DTensors
    norm.sequence_sharding = (outside,)  # the layout of its x, for which it has no argument
    at_work.parallelize_module(model, mesh, {
        "tok": embedding, "pos": embedding,
        "blocks.*.norm[12]": norm, "norm": norm,
        "blocks.*.attn": f, "blocks.*.mlp": f,  # once for q, k and v, once for gate and up
        "blocks.*.attn.[qkv]": column, "blocks.*.attn.out": row,
        "blocks.*.mlp.gate": column, "blocks.*.mlp.up": column, "blocks.*.mlp.down": row,
        "head": head,
    })
    if model.pos is not None:
        model.head.weight = model.tok.weight  # they are tied: torch has made two of one
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
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    optimizer.step()
    return loss.full_tensor(), norm.full_tensor()


def evaluate_at_work(model, x, y):
    with at_work.loss_parallel():
        return loss_sum(model(x), y).full_tensor() / dist.get_world_size()  # Run sums over ranks


# ---- 4. run ------------------------------------------------------------------


def refuse(args):
    ranks = args.world_size
    cfg = args.cfg  # arguments() has filled in kv_heads and hidden: they are not 0
    require(cfg.kv_heads % ranks == 0, f"{ranks} ranks cannot share {cfg.heads} heads, "
            f"{cfg.kv_heads} of keys and values, evenly: change --heads or --kv-heads")
    require(args.impl == "scratch" or cfg.hidden % ranks == 0,
            f"--impl {args.impl}: {ranks} ranks cannot cut --hidden {cfg.hidden} evenly")
    require(not args.sp or cfg.seq % ranks == 0,
            f"--sp: {ranks} ranks cannot cut --seq {cfg.seq} evenly")


def pieces(model, optimizer, tp):
    """-> [Piece]: what this rank holds of the plain model's parameters and AdamW states."""
    found = []
    for name, p in model.named_parameters():
        own = pieces_of([(name, p)], optimizer, writes=p in tp.cuts or tp.rank == 0)
        if p in tp.cuts:
            own = [of_whole(piece, *tp.cuts[p], tp.rank) for piece in own]
        found += own
    return [piece for piece in found if piece.tensor.numel() > 0]


def set_up(run, impl, tp, mesh):
    if impl == "torch":
        model = parallelize_at_work(run.build(), mesh, run.args.sp)
        return Side(model=model, optimizer=adamw(model.parameters(), run.args.lr),
                    train_step=train_step_at_work, evaluate=partial(evaluate_at_work, model))
    model = parallelize(run.build(), tp)
    optimizer = adamw(model.parameters(), run.args.lr)
    return Side(model=model, optimizer=optimizer, train_step=partial(train_step, tp=tp),
                full_gradients=partial(full_gradients, model, tp),
                full_state_dict=partial(full_state_dict, model, tp),
                evaluate=lambda x, y: token_losses(model, x, y, tp) / tp.size,  # summed by Run
                pieces=partial(pieces, model, optimizer, tp))


def textbook(run, model, tp):
    """-> rows (what, formula, expected bytes). b: bytes of a number, s: of one in the loss.

    P: this rank's parameters, W: those that are not cut, T': T if positions are learned, else 0.
    """
    cfg = run.cfg
    b = run.dtype.itemsize
    parameters = list(model.parameters())
    P = sum(p.numel() for p in parameters)
    tokens = run.args.batch * cfg.seq
    positions = cfg.seq if cfg.form.learned_positions else 0
    sent = (tp.size - 1) / tp.size
    every_f_and_g = sent * b * (tokens * (4 * cfg.layers + 2) + positions) * cfg.width
    sums = 2 * sent * max(b, 4) * (3 * tokens + 1)  # of the loss, and of the gradient norm
    held = ("held states", "4 b P + 4 per tensor (steps)", 4 * b * P + 4 * len(parameters))
    if not run.args.sp:
        formula = "2 (tp-1)/tp (b [B T (4 L + 2) + T'] C + s (3 B T + 1))"
        return [held, ("wire all_reduce", formula, 2 * every_f_and_g + sums)]
    W = sum(p.numel() for p in parameters if p not in tp.cuts)
    every_f = sent * b * tokens * (2 * cfg.layers + 1) * cfg.width  # gathers x again in backward
    return [
        held,
        ("wire all_gather", "(tp-1)/tp b [B T (6 L + 3) + T'] C", every_f_and_g + every_f),
        ("wire reduce_scatter", "(tp-1)/tp b [B T (4 L + 2) + T'] C", every_f_and_g),
        ("wire all_reduce", "2 (tp-1)/tp (b W + s (3 B T + 1))", 2 * sent * b * W + sums),
    ]


def main():
    args = arguments(__doc__, sp=Flag(False, "sequence parallel: cut x along T outside, too"))
    refuse(args)
    run = Run(args)
    mesh = init_device_mesh(run.device.type, (run.world_size,))
    with run:  # from here on a dry run's tensors have no memory
        tp = CutSequence() if args.sp else WholeSequence()
        sides = {impl: set_up(run, impl, tp, mesh) for impl in run.impls}
        for impl, step, x, y, valid in run.steps(sides, range(args.batch)):  # all rows, everywhere
            side = sides[impl]
            with run.measure(impl, step):
                loss, norm = side.train_step(side.model, side.optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss / tp.size, norm)  # Run sums over ranks
        if "scratch" in sides:
            run.textbook(textbook(run, sides["scratch"].model, tp))
        return run.finish()


if __name__ == "__main__":
    sys.exit(main())
