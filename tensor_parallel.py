"""Tensor parallelism: every matrix is cut across ranks, and with --sp so is the sequence outside.

    rank 0   x - norm -f-> [qkv]_0 heads_0 [out]_0 -g-> + - norm -f-> [up]_0 gelu [down]_0 -g-> + x
    rank 1   x - norm -f-> [qkv]_1 heads_1 [out]_1 -g-> + - norm -f-> [up]_1 gelu [down]_1 -g-> + x

             f forward    f backward                  g forward        g backward   x outside is
             nothing      all-reduce                  all-reduce       nothing      whole
    --sp     all-gather   all-gather, reduce-scatter  reduce-scatter   all-gather   cut along T

Inside is from f to g. q, k, v and up are cut by columns, out and down by rows. A head needs no
other head, and gelu takes one number at a time, so nothing is exchanged inside. The token
embedding, which is also the head, is cut by vocabulary, and each rank makes its part of the logits.

    on each of tp ranks, in numbers               plain GPT     here               --sp
    matrices, column biases, embeddings           12 C^2 L ..   1/tp               1/tp
    norms, row biases                             (6 L + 2) C   whole              whole
    a block keeps: x and its norm, twice          4 B T C       whole              1/tp
                   q, k, v, heads, up, gelu       12 B T C      1/tp               1/tp
    a block sends, in 4 all-reduces               -             8 B T C (tp-1)/tp
              in 6 all-gathers, 4 reduce-scatters -                               10 B T C (tp-1)/tp

Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3. Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models", arXiv:2205.05198, section 4.2.
At work: torch.distributed.tensor.parallel.parallelize_module, loss_parallel (section 3 below).

    torchrun --standalone --nproc_per_node=2 tensor_parallel.py --sp

Section 1 in your own code, where all ranks of `group` have the same batch, of `valid` targets in
a vocabulary of V:

    tp = WholeSequence(group)  # or CutSequence(group), which is --sp
    model = cut_model(model, tp, {"layers.*.up": ColumnLinear, "layers.*.down": RowLinear, ...})
    (vocab_parallel_cross_entropy(model(x), y, V, group) / valid).backward()
    sum_gradients(model, tp)
    clip_gradients(model, gradient_norm(model, tp), 1.0)  # then optimizer.step()
"""
import harness  # before torch, which warns where NumPy is missing

import contextlib
import fnmatch
import math
import sys
from collections import namedtuple

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as at_work
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from common import Flag, Run, Side, adamw, arguments, loss_sum, require
from harness.checkpoint import STATES, Piece, pieces_of

# ---- 1. the technique (copy this; it needs only torch) -----------------------

# ---- collectives that are under way, and the two ways to treat the sequence

# renamed in torch 2.13
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A tensor that is being made, by a collective that may be under way: wait() returns it."""

    def __init__(self, result, work=None, reads=None):
        self.result = result  # what the collective writes
        self.work = work  # torch's handle; None: there is nothing to wait for
        self.reads = reads  # what the collective reads, which has to live until the wait

    def wait(self):
        """On a GPU this orders streams: the host goes on at once."""
        if self.work is not None:
            self.work.wait()
        self.reads = None
        return self.result


class PendingGather(Pending):
    """An all-gather of pieces of the sequence: wait() joins them."""

    def wait(self):
        pieces = super().wait()  # (tp, .., T/tp, C)
        return pieces.movedim(0, -3).flatten(-3, -2)  # (.., T, C)


class WholeSequence:
    """Outside, x is whole on every rank of the group (Shoeybi 2019, fig. 3)."""

    def __init__(self, group=None):
        self.group = group  # a ProcessGroup; None: all ranks
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.later = None  # a list while defer_weights is entered

    def __deepcopy__(self, memo):
        return self  # the copy of a model is cut over the same ranks

    def gather(self, x):
        """From outside to inside: the x that all ranks have -> the same."""
        return Pending(x)

    def reduce(self, y):
        """From inside to outside: summands y (.., T, C) -> their sum, in y's memory if that is
        contiguous."""
        y = y.contiguous()
        # all_reduce writes into y, and autograd does not notice. With the version counted up by
        # hand, a backward that has kept the old y raises, and does not compute with the sum
        torch.autograd.graph.increment_version(y)
        work = dist.all_reduce(y, group=self.group, async_op=True)  # partial -> replicated
        return Pending(y, work)

    def inside(self, p):
        """A parameter that is whole on every rank but used inside -> the same, for use there.

        Each rank makes a summand of its gradient. Here their sum is made at once, in backward.
        """
        return CopyToTP.apply(p, self)

    @contextlib.contextmanager
    def defer_weights(self, later):
        """ColumnLinears called in here leave the gradients of their parameters for later.

        Their backward makes the gradient of x alone. If one of their parameters is trained, it also
        appends (root, None) to the list `later`. root is a scalar whose backward makes the
        gradients of the parameters. What was left is made by torch.autograd.backward, which takes
        the roots and a gradient for each of them, where None stands for 1:

            if later: torch.autograd.backward(*zip(*later))

        Zero-bubble pipelines want it: hybrid_3d.py enters this, nothing here does.
        """
        before = self.later
        self.later = later
        try:
            yield
        finally:
            self.later = before


class CutSequence(WholeSequence):
    """Outside, x is cut along T, its second dim from the right (Korthikanti 2022, fig. 5).

    So what stands outside has to treat each position by itself, as norms, residuals and dropout do.
    """

    def gather(self, x):
        """Pieces (.., T/tp, C) -> (.., T, C)."""
        x = x.contiguous()
        pieces = x.new_empty(self.size, *x.shape)  # (tp, .., T/tp, C)
        flat = pieces.flatten(0, 1)  # the same memory
        work = all_gather(flat, x, self.group, async_op=True)  # sharded(T) -> replicated
        return PendingGather(pieces, work, x)

    def reduce(self, y):
        """Summands (.., T, C) -> this rank's piece (.., T/tp, C) of their sum."""
        if y.shape[-2] % self.size != 0:
            raise ValueError(f"CutSequence: {y.shape[-2]} positions do not divide by {self.size} "
                             "ranks. Take a multiple of it, or WholeSequence.")
        pieces = y.unflatten(-2, (self.size, -1)).movedim(-3, 0).contiguous()  # (tp, .., T/tp, C)
        x = torch.empty_like(pieces[0])
        flat = pieces.flatten(0, 1)  # the same memory
        work = reduce_scatter(x, flat, group=self.group, async_op=True)  # partial -> sharded(T)
        return Pending(x, work, pieces)

    def inside(self, p):
        """Nothing is to be done: here the gradient of every whole parameter is a summand, inside or
        outside, and sum_gradients adds them all up after backward."""
        return p


# ---- f and g. Autograd does not see collectives: each function here states its own backward.


def refuse_graph():
    """Each backward calls this. Second derivatives would be wrong: collectives are in no graph."""
    if torch.is_grad_enabled():
        raise RuntimeError("create_graph=True: a cut model has no second derivatives, since sums "
                           "over ranks are not in the graph. Leave it out.")


class ColumnParallel(torch.autograd.Function):
    """f, and the Linears that share it, cut by columns: x -> (.., T, out/tp) of each.

    They are one function for the sake of backward, where the collectives of f are hidden behind
    other work: the gather of x behind dx, and the sum of dx behind the gradients of the weights.
    """

    @staticmethod
    def forward(ctx, x, tp, *parameters):
        """parameters: all weights, then as many biases, each of which may be None."""
        weights, biases = in_halves(parameters)
        ctx.tp = tp
        ctx.later = tp.later
        ctx.save_for_backward(x, *parameters)  # x as it came: gathered, it is tp times as large
        x = tp.gather(x).wait()  # sharded(T) -> replicated
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases))

    @staticmethod
    def backward(ctx, *dys):
        refuse_graph()
        x, *parameters = ctx.saved_tensors
        weights, _ = in_halves(parameters)
        trained = any(ctx.needs_input_grad[2:])
        make_now = trained and ctx.later is None
        dx = None
        gradients = [None] * len(parameters)
        if make_now:
            gathering = ctx.tp.gather(x)  # sharded(T) -> replicated, behind dx
        if ctx.needs_input_grad[0]:
            dx = input_gradient(dys, weights)
            reducing = ctx.tp.reduce(dx)  # partial -> as x is, behind the gradients of the weights
        if make_now:
            gradients = weight_gradients(gathering.wait(), dys, ctx.needs_input_grad[2:])
        elif trained:
            with torch.enable_grad():
                root = DeferredWeights.apply(ctx.tp, x.detach(), dys, *parameters)
            ctx.later.append((root, None))  # root is a scalar: autograd takes None for a 1
        if ctx.needs_input_grad[0]:
            dx = reducing.wait()
        return dx, None, *gradients


class DeferredWeights(torch.autograd.Function):
    """Returns a scalar. When that goes backward, ColumnParallel's parameters get their gradients.

    Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 2, call it W.
    """

    @staticmethod
    def forward(ctx, tp, x, dys, *parameters):
        ctx.tp = tp
        ctx.save_for_backward(x, *dys)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        refuse_graph()
        x, *dys = ctx.saved_tensors
        x = ctx.tp.gather(x).wait()  # sharded(T) -> replicated
        return None, None, None, *weight_gradients(x, dys, ctx.needs_input_grad[3:])


def in_halves(items):
    half = len(items) // 2
    return items[:half], items[half:]


def input_gradient(dys, weights):
    """This rank's summand of dx: the sum of dy @ weight over the Linears that share f."""
    first, *others = [dy.flatten(0, -2) for dy in dys]  # (N, out/tp)
    dx = first @ weights[0]
    for dy, weight in zip(others, weights[1:]):
        dx.addmm_(dy, weight)
    return dx.unflatten(0, dys[0].shape[:-1])  # (.., T, C)


def weight_gradients(x, dys, needed):
    """x (.., T, C) -> the gradients of all weights, then of all biases, None if not needed."""
    x = x.flatten(0, -2)  # (N, C)
    of_weights = []
    of_biases = []
    weights_needed, biases_needed = in_halves(needed)
    for dy, weight_needed, bias_needed in zip(dys, weights_needed, biases_needed):
        dy = dy.flatten(0, -2)  # (N, out/tp)
        of_weights.append(dy.t() @ x if weight_needed else None)
        of_biases.append(dy.sum(0) if bias_needed else None)
    return of_weights + of_biases


class ReduceFromTP(torch.autograd.Function):
    """g: summands y (.., T, C) -> x.

    WholeSequence writes the sum into the memory of y. The matmul that made y does not need it for
    its backward. If anything else has kept y, such as a selective checkpoint, torch raises.
    """

    @staticmethod
    def forward(ctx, y, tp):
        ctx.tp = tp
        y = y.detach()  # the output is in y's memory, but must be another tensor than the input
        return tp.reduce(y).wait()  # partial -> replicated, or sharded(T)

    @staticmethod
    def backward(ctx, dx):
        refuse_graph()
        return ctx.tp.gather(dx).wait(), None  # as x is -> replicated


class CopyToTP(torch.autograd.Function):
    """f alone, without Linears and where nothing is cut along T."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        refuse_graph()
        if dx is None:  # the result is not in the loss
            return None, None
        dx = dx.clone()  # reduce writes into it, and others may hold the one that came
        return ctx.tp.reduce(dx).wait(), None  # partial -> replicated


# ---- pieces of parameters

# dim: along which a parameter is cut. whole: its size there in the plain model.
Cut = namedtuple("Cut", "dim whole")


def extent(cut, tp):
    """Which rows (dim 0) or columns (dim 1) of the plain parameter this rank has -> a range.

    All ranks have equally many but the last ones, which may have fewer, or none.
    """
    each = math.ceil(cut.whole / tp.size)
    first = min(tp.rank * each, cut.whole)
    end = min(first + each, cut.whole)
    return range(first, end)


def shard(t, cut, tp):
    """A whole tensor -> this rank's piece, filled up with zeros to the size of the first rank's."""
    mine = extent(cut, tp)
    sizes = list(t.shape)
    sizes[cut.dim] = math.ceil(cut.whole / tp.size)
    piece = t.new_zeros(sizes)
    piece.narrow(cut.dim, 0, len(mine)).copy_(t.narrow(cut.dim, mine.start, len(mine)))
    return piece


def unshard(t, cut, tp):
    """A piece -> the whole tensor, on every rank. Without a cut (None) it is whole already."""
    if cut is None:
        return t
    pieces = [torch.empty_like(t) for _ in range(tp.size)]
    dist.all_gather(pieces, t.detach().contiguous(), group=tp.group)  # sharded -> replicated
    return torch.cat(pieces, cut.dim).narrow(cut.dim, 0, cut.whole)


def without_padding(p, cut, tp):
    """A piece without the zeros that it is filled up with.

    Padding must stay out of the forward, or it may be trained. A padded column of up gives 0. If a
    sigmoid follows, the 0 becomes 0.5, and by that down's padding would get a gradient.
    """
    count = len(extent(cut, tp))
    if count == p.shape[cut.dim]:
        return p
    return p.narrow(cut.dim, 0, count)


def locate(ids, cut, tp, other):
    """Token ids -> the row or column of each in this rank's piece, and whether it is elsewhere.

    An id that is elsewhere gets the row `other`. One that does not exist gets a row that does not
    exist, so that its use raises.
    """
    each = math.ceil(cut.whole / tp.size)
    elsewhere = ids // each != tp.rank
    rows = (ids - tp.rank * each).masked_fill(elsewhere, other)
    missing = ids.clamp(0, cut.whole - 1) != ids
    return rows.masked_fill(missing, cut.whole), elsewhere


def cuts(model):
    """-> {parameter: its Cut} of all that are cut in a model, or in a part of one."""
    found = {}
    for module in model.modules():
        if isinstance(module, CutModule):
            for name, cut in module.cuts.items():
                found[getattr(module, name)] = cut
    return found


def cast_as_autocast(*tensors):
    """Operands of a Linear, cast as torch.autocast would cast them where it is on.

    Autocast does not reach into the backward of an autograd.Function: cast before entering one.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    operands = []
    for t in tensors:
        if t is not None and t.dtype != torch.float64:
            t = t.to(dtype)
        operands.append(t)
    return operands


# ---- modules, built from plain ones whose weights they slice


class CutModule(nn.Module):
    """Stands in the place of a plain module, with pieces of its parameters under the same names."""

    replaces = None  # the plain class, whose forward is known

    def __init__(self, plain, tp):
        super().__init__()
        # weight_norm, a parametrization, or no weight at all
        derived = not isinstance(getattr(plain, "weight", None), nn.Parameter)
        if derived or not computes_as(plain, self.replaces):
            raise TypeError(f"{type(self).__name__} replaces an nn.{self.replaces.__name__}, but "
                            f"this {type(plain).__name__} has a forward, hooks or a weight of its "
                            "own. Cut the model before you change it so, or leave this module out.")
        self.training = plain.training
        self.tp = tp  # WholeSequence or CutSequence
        self.cuts = {}  # {name of a parameter: Cut} of those that are cut
        self.register_parameter("weight", None)  # this rank's piece, padded, or the whole
        self.register_parameter("bias", None)  # likewise; None where the plain module has none

    def cut(self, name, p, dim):
        """Keep this rank's piece of the plain module's parameter p under its name."""
        self.cuts[name] = Cut(dim, p.shape[dim])
        piece = shard(p.detach(), self.cuts[name], self.tp)
        setattr(self, name, nn.Parameter(piece, p.requires_grad))

    def used(self, name):
        """The parameter of this name without padding, or None."""
        p = getattr(self, name)
        if p is None:
            return None
        return without_padding(p, self.cuts[name], self.tp)


def computes_as(module, kind):
    """Whether a module computes what its kind does: it has the kind's forward and no hooks."""
    forward = getattr(module.forward, "__func__", None)  # None: module.forward was replaced
    return forward is kind.forward and not hooks_of(module)


def hooks_of(module):
    """Hooks of a module and its parameters: what stands in their place would not call them."""
    hooks = [module._forward_hooks, module._forward_pre_hooks,
             module._backward_hooks, module._backward_pre_hooks]
    for p in module.parameters():
        hooks += [p._backward_hooks, p._post_accumulate_grad_hooks]
    return [registered for registered in hooks if registered]


class ColumnLinear(CutModule):
    """f, and a Linear cut by columns: x -> (.., T, out/tp).

    Of A in Y = X A each rank has columns. nn.Linear stores A transposed: they are rows of weight,
    dim 0. The result is whole along T also where x is cut: read T from the result's shape.
    """

    replaces = nn.Linear

    def __init__(self, linear, tp):
        super().__init__(linear, tp)
        self.cut("weight", linear.weight, 0)
        if linear.bias is not None:
            self.cut("bias", linear.bias, 0)

    def operands(self):
        """-> weight and bias as this rank multiplies and adds them."""
        return self.used("weight"), self.used("bias")

    def forward(self, x):
        return columns(x, self)[0]


def columns(x, *linears):
    """ColumnLinears that read the same x, with one f for all -> a tuple of what each returns.

    Called one by one they return the same, but each has an f of its own, which communicates.
    """
    weights = []
    biases = []
    for linear in linears:
        weight, bias = linear.operands()
        weights.append(weight)
        biases.append(bias)
    x, *parameters = cast_as_autocast(x, *weights, *biases)
    return ColumnParallel.apply(x, linears[0].tp, *parameters)


class SharedHeadLinear(ColumnLinear):
    """A Linear that makes fewer heads than there are ranks: k or v, of grouped queries.

    It is whole on every rank, and a rank makes the one head that its heads of q share.
    """

    def __init__(self, linear, tp, heads):
        CutModule.__init__(self, linear, tp)  # not ColumnLinear's, which would cut
        self.weight = linear.weight
        self.bias = linear.bias
        head_dim = linear.out_features // heads
        head = tp.rank * heads // tp.size
        self.rows = slice(head * head_dim, (head + 1) * head_dim)  # of weight: this rank's head

    def operands(self):
        weight = self.tp.inside(self.weight)[self.rows]
        if self.bias is None:
            return weight, None
        return weight, self.tp.inside(self.bias)[self.rows]


def key_value_linear(heads):
    """For a plan: the kind of a Linear that makes this many heads of k or v, all ranks together.

    They are shared out over the ranks, or each is shared by several ranks. A rank has fewer heads
    of k and v than of q, as F.scaled_dot_product_attention(.., enable_gqa=True) takes them.
    """

    def kind(linear, tp):
        if heads % tp.size == 0:
            return ColumnLinear(linear, tp)
        if tp.size % heads == 0:
            return SharedHeadLinear(linear, tp, heads)
        raise ValueError(f"{heads} heads of k and v on {tp.size} ranks: one number has to be a "
                         "multiple of the other. Take another number of ranks.")

    return kind


class RowLinear(CutModule):
    """A Linear cut by rows, and g: (.., T, in/tp) -> x.

    A row of A is a column of weight, dim 1. The bias is whole, and added once, to the sum.
    """

    replaces = nn.Linear

    def __init__(self, linear, tp):
        super().__init__(linear, tp)
        self.cut("weight", linear.weight, 1)
        self.bias = linear.bias

    def forward(self, y):
        # y goes in as a matrix. With 3 dims F.linear would return a reshaped tensor, in the memory
        # of its matmul's result but with a version counter of its own. A selective checkpoint that
        # has saved the result would then not see that g changes it, and would not raise. The view
        # that unflatten returns shares the counter of `rows`
        rows = F.linear(y.flatten(0, -2), self.used("weight"))  # (N, C)
        y = rows.unflatten(0, y.shape[:-1])  # (.., T, C), a summand
        x = ReduceFromTP.apply(y, self.tp)  # partial -> replicated, or sharded(T)
        if self.bias is None:
            return x
        return x + self.bias.to(x.dtype)


class VocabEmbedding(CutModule):
    """An Embedding cut by its rows, dim 0, and g: token ids (.., T) -> x."""

    replaces = nn.Embedding

    def __init__(self, embedding, tp):
        super().__init__(embedding, tp)
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            raise ValueError("VocabEmbedding has no max_norm, scale_grad_by_freq or sparse: "
                             "turn them off.")
        self.cut("weight", embedding.weight, 0)
        self.padding_idx = None  # which row here gets no gradient
        ids = extent(self.cuts["weight"], tp)
        if embedding.padding_idx in ids:
            self.padding_idx = embedding.padding_idx - ids.start

    def forward(self, ids):
        rows, elsewhere = locate(ids, self.cuts["weight"], self.tp, other=0)
        y = F.embedding(rows, self.weight, self.padding_idx)  # (.., T, C)
        y = y.masked_fill(elsewhere.unsqueeze(-1), 0)  # a summand: others have the other tokens
        return ReduceFromTP.apply(y, self.tp)  # partial -> replicated, or sharded(T)


class Inside(nn.Module):
    """A module that stays whole although it stands inside, such as a norm of each head's q.

    A rank uses it for its own heads only, so autograd makes a summand of its gradient there.
    """

    def __init__(self, module, tp):
        super().__init__()
        if next(module.buffers(), None) is not None or next(module.children(), None) is not None:
            raise TypeError("Inside is for modules that have parameters and nothing else, "
                            f"which {type(module).__name__} is not. Write out what it does.")
        refuse_dropout(module)
        self.training = module.training
        self.tp = tp
        self.plain = [module]  # in a list, so that it is no child and names stay as they were
        for name, p in module.named_parameters():
            self.register_parameter(name, p)

    def forward(self, *inputs):
        parameters = {name: self.tp.inside(p) for name, p in self.named_parameters()}
        self.plain[0].training = self.training
        return torch.func.functional_call(self.plain[0], parameters, inputs)


def outside(module, tp):
    """For a plan: this module stands outside, and stays as it is."""
    return module


class InsideDropout(nn.Module):
    """Dropout of what is cut: each rank draws a mask of its own (Shoeybi 2019, appendix B.2).

    Its seed comes from the CPU's default generator, which stays the same on all ranks. So if torch
    restores that generator to run a checkpointed forward again, the mask is the same again.
    """

    def __init__(self, dropout, tp):
        super().__init__()
        if not computes_as(dropout, nn.Dropout):
            raise TypeError(f"{type(self).__name__} replaces an nn.Dropout, but this "
                            f"{type(dropout).__name__} has a forward or hooks of its own. Set its "
                            "rate to 0, or take an nn.Dropout.")
        self.training = dropout.training
        self.tp = tp
        self.rate = dropout.p  # how much is dropped

    def mask_number(self):
        """Ranks with the same number draw the same mask."""
        return self.tp.rank

    def forward(self, x):
        if not self.training:
            return x
        if self.rate == 1:
            return x * 0  # nothing is left that could be scaled up
        seed = torch.randint(2 ** 48, (), device="cpu").item() + self.mask_number()
        rng = torch.Generator(x.device).manual_seed(seed)
        keep = torch.empty_like(x).bernoulli_(1 - self.rate, generator=rng)
        return x * keep / (1 - self.rate)


class OutsideDropout(InsideDropout):
    """Dropout outside. Where x is whole, all ranks draw the same mask. Where it is cut along T,
    each draws one of its own."""

    def mask_number(self):
        if isinstance(self.tp, CutSequence):
            return self.tp.rank
        return 0


# ---- a whole model


def cut_model(model, tp, plan):
    """Put cut modules in the place of plain ones -> the model.

    plan: {pattern: kind}. A pattern is the name of modules, with * for any part between dots. A
    kind is a class or function of this section, or your own: kind(plain module, tp) takes the
    module's place. Parameters keep their names and ties. All ranks of the group call this with the
    same weights. If the model or the plan is seen to be wrong, a ValueError or TypeError says what
    to do. Some things that a forward does itself are not seen:

    - a dropout whose rate is in no attribute with "drop" in its name, such as F.dropout(x, 0.1)
    - a number of heads, view(B, T, heads, -1), where a rank has fewer: write -1 for the heads
    - between a ColumnLinear and a RowLinear, what needs the whole last dim: softmax, a norm, or
      chunk(2, -1) of one Linear that makes two projections (take a ColumnLinear for each of them)
    - with CutSequence, what brings positions together outside and is no module: x.mean(1)
    """
    ties = tied_names(model)
    compare_ranks(model.state_dict(keep_vars=True), tp)
    replaced = replace_modules(model, tp, plan)
    for first, other in ties:
        tie(model, first, other)
    refuse_dropout(model)
    refuse_unnamed(model, replaced)
    if isinstance(tp, CutSequence):
        refuse_mixing(model)
    if any(isinstance(module, InsideDropout) for module in model.modules()):
        numbers = torch.get_rng_state().to(next(model.parameters()).device)
        what = "The state of torch's default generator, which dropout uses,"  # begins the message
        compare_ranks({what: numbers}, tp)
    return model


def tied_names(model):
    """-> pairs of names of one parameter."""
    first = {}
    pairs = []
    for name, p in model.named_parameters(remove_duplicate=False):
        if p in first:
            pairs.append((first[p], name))
        else:
            first[p] = name
    return pairs


def replace_modules(model, tp, plan):
    """-> the names of the modules that the plan has replaced."""
    modules = dict(model.named_modules(remove_duplicate=False))
    replaced = {}  # {plain module: the one in its place}
    found = []
    for pattern, kind in plan.items():
        matching = [name for name in modules if matches(name, pattern)]
        if not matching:
            raise ValueError(f"No module of this model is called {pattern}, as the plan has it.")
        for name in matching:
            if name in found:
                raise ValueError(f"{name} matches two patterns of the plan: make it one.")
            plain = modules[name]
            if plain not in replaced:  # else under another of its names
                replaced[plain] = kind(plain, tp)
                replaced[plain].training = plain.training
            model.set_submodule(name, replaced[plain])
        found += matching
    return found


def matches(name, pattern):
    parts = name.split(".")
    patterns = pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def tie(model, first, other):
    """Two names that were one parameter's become one parameter's again."""
    one = model.get_parameter(first)
    two = model.get_parameter(other)
    table = cuts(model)
    if table.get(one) != table.get(two):
        raise ValueError(f"{first} and {other} are one parameter: let the plan cut both, along the "
                         "same dim, or none of them.")
    module, _, name = other.rpartition(".")
    setattr(model.get_submodule(module), name, one)


def refuse_dropout(model):
    """Raise if each rank would draw a dropout mask of its own: copies would drift apart."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ValueError(f"{name} drops {module.p}: set it to 0 or name it in the plan, as "
                             "InsideDropout between a ColumnLinear and a RowLinear, else as "
                             "OutsideDropout.")
        for attribute, value in vars(module).items():
            if "drop" in attribute and isinstance(value, float) and value > 0:
                where = f"{name}.{attribute}".strip(".")
                raise ValueError(f"{where} is {value}: dropout that is no module cannot be given "
                                 "the right masks. Set it to 0, or use an nn.Dropout.")


def refuse_unnamed(model, named):
    """Raise if a module with a ColumnLinear and a RowLinear has other parameters, and the plan does
    not name them.

    Its forward decides whether it uses them inside or outside, and nobody can look into that.
    """
    for parent_name, parent in model.named_modules():
        kinds = {type(child) for child in parent.children()}
        if not (ColumnLinear in kinds and RowLinear in kinds):
            continue
        for name, _ in parent.named_parameters():
            owner, _, _ = name.rpartition(".")
            full_name = f"{parent_name}.{owner}".strip(".")
            known = isinstance(parent.get_submodule(owner), (CutModule, Inside))
            if full_name not in named and not known:
                raise ValueError(f"{full_name or 'The model'} has parameters next to cut Linears. "
                                 "Name it in the plan: Inside, if its forward is used between "
                                 "them, else outside.")


CONVOLUTIONS = nn.modules.conv._ConvNd
BATCH_NORMS = nn.modules.batchnorm._BatchNorm
MIXING = (nn.MultiheadAttention, nn.RNNBase, CONVOLUTIONS, BATCH_NORMS)


def refuse_mixing(model):
    """What brings positions together would see this rank's positions only."""
    for name, module in model.named_modules():
        if isinstance(module, MIXING):
            raise ValueError(f"{name} ({type(module).__name__}) needs all positions, but stands "
                             "outside, where CutSequence has a part of them: take WholeSequence.")


def compare_ranks(tensors, tp):
    """Raise if one of the tensors, by their names, is not the same on all ranks of the group."""
    if dist.get_backend(tp.group) == "fake" or not tensors:
        return  # a dry run has no other ranks
    differs = []
    for t in tensors.values():
        mine = t.detach().contiguous().flatten().view(torch.uint8)
        first = mine.clone()
        dist.broadcast(first, group=tp.group, group_src=0)  # rank 0's -> replicated
        differs.append((mine != first).any())
    anywhere = torch.stack(differs).int()
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=tp.group)  # each its own -> replicated
    for name, differing in zip(tensors, anywhere.bool().tolist()):
        if differing:
            raise ValueError(f"{name} is not the same on all ranks that share a model. Load the "
                             "same weights on all, or draw them after the same torch.manual_seed.")


# ---- the loss of cut logits


class VocabParallelCrossEntropy(torch.autograd.Function):
    """logits (N, V/tp), and of each target its column here or -1 -> the loss of each of N tokens.

    In backward each rank makes its columns of the softmax: it has kept log_sum, the log of the
    denominator that all columns share.
    """

    @staticmethod
    def forward(ctx, logits, column, group):
        own_log_sum = logits.logsumexp(1)  # (N,), of this rank's columns; -inf if it has none
        highest = own_log_sum.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)  # each its own -> replicated
        # Each target's logit, or 0 if another rank has it. nll_loss returns minus the logit, and
        # raises for a column that does not exist
        chosen = -F.nll_loss(logits, column, ignore_index=-1, reduction="none")
        sums = torch.stack([(own_log_sum - highest).exp(), chosen])  # (2, N)
        dist.all_reduce(sums, group=group)  # partial -> replicated
        log_sum = sums[0].log() + highest  # of all columns
        ctx.save_for_backward(logits, column, log_sum)
        return log_sum - sums[1]

    @staticmethod
    def backward(ctx, dloss):  # (N,)
        refuse_graph()
        logits, column, log_sum = ctx.saved_tensors
        dlogits = (logits - log_sum.unsqueeze(1)).exp_()  # softmax
        if dlogits.shape[1] > 0:  # the last ranks may have no columns
            here = (column >= 0).to(logits.dtype)  # (N,)
            dlogits.scatter_add_(1, column.clamp(min=0).unsqueeze(1), -here.unsqueeze(1))
        return dlogits.mul_(dloss.unsqueeze(1)), None, None


def vocab_parallel_cross_entropy(logits, targets, vocab, group=None, ignore_index=-100):
    """This rank's logits (.., V/tp), targets (..) -> the sum of token losses, on every rank.

    It is made in fp32 or better, and three numbers per token are sent. vocab is V. A target that is
    out of range raises as in F.cross_entropy: IndexError, or on a GPU an assertion on the device.
    """
    tp = WholeSequence(group)  # for its rank and size: logits are whole along T in any case
    cut = Cut(1, vocab)
    mine = extent(cut, tp)
    with_padding = -(-vocab // tp.size)
    if logits.shape[-1] not in (len(mine), with_padding):
        raise ValueError(f"{logits.shape[-1]} columns of logits: of {vocab} this rank should have "
                         f"{len(mine)}. Is vocab the size of the plain head?")
    logits = logits.flatten(0, -2)[:, :len(mine)]  # (N, V/tp)
    if logits.dtype.itemsize == 2:
        logits = logits.float()
    targets = targets.flatten()  # (N,)
    ignored = targets == ignore_index
    column, _ = locate(targets.masked_fill(ignored, 0), cut, tp, other=-1)
    losses = VocabParallelCrossEntropy.apply(logits, column, group)  # replicated
    return losses.masked_fill(ignored, 0).sum()


# ---- after backward: sums over ranks, norm, clipping, gathering


def partial_parameters(model, tp):
    """-> the parameters of whose gradient each rank has a summand after backward.

    Where x is cut along T these are all that are whole: norms and row biases have seen this rank's
    positions only.
    """
    if not isinstance(tp, CutSequence):
        return []
    table = cuts(model)
    return [p for p in model.parameters() if p not in table]


def sum_over_ranks(tensors, tp):
    """Sum each tensor over the ranks, in its place, by one all-reduce for all of them."""
    if not tensors:
        return
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat, group=tp.group)  # partial -> replicated
    sizes = [t.numel() for t in tensors]
    sums = [total.view_as(t) for t, total in zip(tensors, flat.split(sizes))]
    torch._foreach_copy_(tensors, sums)


def sum_gradients(model, tp):
    """After backward, of one micro-batch or several: sums over ranks what are still summands."""
    gradients = [p.grad for p in partial_parameters(model, tp) if p.grad is not None]
    sum_over_ranks(gradients, tp)  # partial -> replicated


def gradient_norm(model, tp):
    """The norm of the whole model's gradient: pieces add up over ranks, whole ones count once."""
    table = cuts(model)
    sharded = []
    replicated = []
    for p in model.parameters():
        if p.grad is None:
            continue
        if p in table:
            sharded.append(p.grad)
        else:
            replicated.append(p.grad)
    any_parameter = next(model.parameters())
    square = squared_norm(sharded, any_parameter)
    dist.all_reduce(square, group=tp.group)  # partial -> replicated
    square = square + squared_norm(replicated, any_parameter)
    return square.sqrt()


def squared_norm(tensors, like):
    """like: a tensor of the dtype and device that the sum over no tensors has."""
    if not tensors:
        return like.new_zeros(())
    return nn.utils.get_total_norm(tensors).square()


def clip_gradients(model, norm, clip):
    """Scale gradients of this norm down to clip. They stay if clip is 0 or the norm inf or nan."""
    limit = clip or math.inf
    finite = norm.nan_to_num(0, posinf=0)  # with a norm of 0 nothing is scaled
    nn.utils.clip_grads_with_norm_(model.parameters(), limit, finite)


def full_state_dict(model, tp):
    """The plain model's state_dict, on every rank."""
    table = cuts(model)
    state = model.state_dict(keep_vars=True)
    return {name: unshard(t, table.get(t), tp).detach() for name, t in state.items()}


def full_gradients(model, tp):
    """-> {the plain model's name: whole gradient} of parameters that have one, on every rank."""
    table = cuts(model)
    trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
    return {name: unshard(p.grad, table.get(p), tp) for name, p in trained.items()}


# ---- 2. the toy GPT, parallelized --------------------------------------------


class TPAttention(nn.Module):
    """The toy GPT's attention on this rank's heads, with one f for q, k and v."""

    def __init__(self, attention, tp):
        super().__init__()
        self.head_dim = attention.head_dim
        heads = attention.q.out_features // self.head_dim
        if heads % tp.size != 0:
            raise ValueError(f"{heads} heads do not divide over {tp.size} ranks: take a multiple.")
        self.q = ColumnLinear(attention.q, tp)
        self.k = ColumnLinear(attention.k, tp)
        self.v = ColumnLinear(attention.v, tp)
        self.out = RowLinear(attention.out, tp)
        self.attend = attention.attend  # three (B, H/tp, T, D) -> one, can be exchanged

    def forward(self, x):  # as it is outside -> as it is outside
        q, k, v = [y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H/tp, T, D)
                   for y in columns(x, self.q, self.k, self.v)]
        y = self.attend(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


EMBEDDINGS = {"tok": VocabEmbedding, "pos": VocabEmbedding, "head": ColumnLinear}
ATTENTION = {"blocks.*.attn": TPAttention}
MLP = {"blocks.*.mlp.up": ColumnLinear, "blocks.*.mlp.down": RowLinear}
PLAN = {**EMBEDDINGS, **ATTENTION, **MLP}


def parallelize(model, tp, plan=PLAN):
    """GPT.forward stays as it is, but returns (B, T, V/tp)."""
    return cut_model(model, tp, plan)


def vocabulary(model):
    return model.tok.cuts["weight"].whole


def train_step(model, optimizer, x, y, valid, clip, tp):
    """x, y: the whole batch (B, T), on every rank -> the loss and gradient norm, on every rank."""
    optimizer.zero_grad()
    loss = vocab_parallel_cross_entropy(model(x), y, vocabulary(model), tp.group) / valid
    loss.backward()
    sum_gradients(model, tp)  # partial -> replicated
    norm = gradient_norm(model, tp)
    clip_gradients(model, norm, clip)
    optimizer.step()
    return loss, norm


@torch.no_grad()
def evaluate(model, x, y, tp):
    """-> 1/tp of the sum of token losses, which every rank has: a run adds up all ranks' results.
    """
    return vocab_parallel_cross_entropy(model(x), y, vocabulary(model), tp.group) / tp.size


# ---- 3. at work: the same with torch's own API -------------------------------


def parallelize_at_work(model, mesh, sp):
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    x = Shard(1) if sp else Replicate()  # as it is outside
    column = at_work.ColwiseParallel()
    row = at_work.RowwiseParallel(output_layouts=x)
    # SequenceParallel makes DTensors of the norms' parameters, as all others are. It takes its
    # input for a piece along T, which is true with --sp only. sequence_sharding is where torch's
    # class keeps that placement
    norm = at_work.SequenceParallel()
    norm.sequence_sharding = (x,)
    f = at_work.PrepareModuleInput(input_layouts=x, desired_input_layouts=Replicate())
    at_work.parallelize_module(model, mesh, {
        "tok": at_work.RowwiseParallel(input_layouts=Replicate(), output_layouts=x),
        "pos": at_work.RowwiseParallel(input_layouts=Replicate(),
                                       output_layouts=Shard(0) if sp else Replicate()),
        "blocks.*.norm1": norm,
        "blocks.*.attn": f,  # once for q, k and v
        "blocks.*.attn.q": column,
        "blocks.*.attn.k": column,
        "blocks.*.attn.v": column,
        "blocks.*.attn.out": row,
        "blocks.*.norm2": norm,
        "blocks.*.mlp": f,
        "blocks.*.mlp.up": column,
        "blocks.*.mlp.down": row,
        "norm": norm,
        "head": at_work.ColwiseParallel(
            input_layouts=x, output_layouts=Shard(-1),
            use_local_output=False),  # loss_parallel wants a DTensor
    })
    model.head.weight = model.tok.weight  # torch has made two parameters of one
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


@torch.no_grad()
def evaluate_at_work(model, x, y, ranks):
    with at_work.loss_parallel():
        return loss_sum(model(x), y).full_tensor() / ranks


def whole(t):
    """A DTensor -> the tensor that it is a piece of, on every rank."""
    if isinstance(t, DTensor):
        return t.full_tensor()  # sharded -> replicated
    return t


def full_state_dict_at_work(model):
    return {name: whole(t).detach() for name, t in model.state_dict().items()}


def full_gradients_at_work(model):
    trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
    return {name: whole(p.grad) for name, p in trained.items()}


# ---- 4. run ------------------------------------------------------------------


def refuse(args):
    """What cannot run ends here, in one line, before anything is built."""
    tp = args.world_size
    cfg = args.cfg
    require(cfg.heads % tp == 0,
            f"--heads {cfg.heads}, --width {cfg.width}: {tp} ranks cannot share heads evenly")
    require(not args.sp or cfg.seq % tp == 0,
            f"--seq {cfg.seq} does not divide by {tp} ranks, as --sp needs")
    # torch cuts the embedding of positions by its rows: so many for each rank but the last
    positions = math.ceil(cfg.seq / tp)
    require(args.impl == "scratch" or cfg.seq > (tp - 1) * positions,
            f"--seq {cfg.seq}: torch leaves the last of {tp} ranks no positions: "
            f"take a multiple of {tp}")


def pieces(model, optimizer, tp):
    """-> [Piece]: what this rank holds of parameters and AdamW states, without padding."""
    table = cuts(model)
    found = []
    for name, p in model.named_parameters():
        found.append(piece(name, p.detach(), table.get(p), tp))
        state = optimizer.state.get(p, {})
        for kind in STATES:
            if kind in state:
                found.append(piece(f"{name}.{kind}", state[kind], table.get(p), tp))
    return [one for one in found if one.tensor.numel() > 0]


def piece(name, t, cut, tp):
    """t: a parameter, or a state of the same shape."""
    start = [0] * t.dim()
    if cut is None:
        return Piece(name, tuple(t.shape), tuple(start), t, writes=tp.rank == 0)
    shape = list(t.shape)
    shape[cut.dim] = cut.whole
    start[cut.dim] = extent(cut, tp).start
    return Piece(name, tuple(shape), tuple(start), without_padding(t, cut, tp), writes=True)


def set_up(run, impl, tp, mesh):
    """-> a Side: the model of this implementation, and what a run does with it."""
    args = run.args
    if impl == "torch":
        return set_up_at_work(run, mesh)
    model = parallelize(run.build(), tp)
    optimizer = adamw(model.parameters(), args.lr)
    return Side(
        model=model,
        optimizer=optimizer,
        train_step=lambda x, y, valid: train_step(model, optimizer, x, y, valid, args.clip, tp),
        full_gradients=lambda: full_gradients(model, tp),
        full_state_dict=lambda: full_state_dict(model, tp),
        evaluate=lambda k: evaluate(model, *run.held_out(k), tp),
        pieces=lambda: pieces(model, optimizer, tp),
    )


def set_up_at_work(run, mesh):
    args = run.args
    model = parallelize_at_work(run.build(), mesh, args.sp)
    optimizer = adamw(model.parameters(), args.lr)
    return Side(
        model=model,
        optimizer=optimizer,
        train_step=lambda x, y, valid: train_step_at_work(model, optimizer, x, y, valid, args.clip),
        full_gradients=lambda: full_gradients_at_work(model),
        full_state_dict=lambda: full_state_dict_at_work(model),
        evaluate=lambda k: evaluate_at_work(model, *run.held_out(k), run.world_size),
        pieces=lambda: pieces_of(model.named_parameters(), optimizer, writes=True),
    )


def count_numbers(model):
    """-> numbers in the plain model's parameters, and in those of this rank, with padding."""
    table = cuts(model)
    total = 0
    own = 0
    for p in model.parameters():
        if isinstance(p, DTensor):
            total += p.numel()
            own += p.to_local().numel()
            continue
        own += p.numel()
        if p in table:
            cut = table[p]
            total += p.numel() // p.shape[cut.dim] * cut.whole
        else:
            total += p.numel()
    return total, own


# ---- what a step costs: the textbook's rows. A number has b bytes, in the loss s bytes.

Region = namedtuple("Region", "norm columns row")  # from f to g, and the norm before it


def regions(model):
    """In the order of forward. The last one is the head's, which has no g."""
    found = []
    for block in model.blocks:
        attn = block.attn
        mlp = block.mlp
        found.append(Region(block.norm1, [attn.q, attn.k, attn.v], attn.out))
        found.append(Region(block.norm2, [mlp.up], mlp.down))
    found.append(Region(model.norm, [model.head], None))
    return found


def trained(*modules):
    return any(p.requires_grad for module in modules for p in module.parameters())


# How often backward communicates, which is less often if --train freezes something:
# f          for the f of a region, if anything before it is trained
# weights    for the gathered x of a region, if one of its column-parallel Linears is trained
# g          for the g of a region or of the token embedding, if anything before it is trained
Passes = namedtuple("Passes", "f weights g")


def count_passes(model):
    f = 0
    weights = 0
    g = 0
    if trained(model.tok):
        g += 1
    reached = trained(model.tok, model.pos)  # does x need a gradient here?
    for region in regions(model):
        if trained(region.norm):
            reached = True
        if reached:
            f += 1
        if trained(*region.columns):
            weights += 1
            reached = True
        if region.row is None:
            break
        if region.row.weight.requires_grad:  # inside, before g
            reached = True
        if reached:
            g += 1
        if region.row.bias.requires_grad:  # outside, after g
            reached = True
    return Passes(f, weights, g)


def account(run, model, tp):
    passes = count_passes(model)
    if run.args.sp:
        account_gathered(run, passes, trained(model.pos))
        account_scattered(run, passes)
        account_summed(run, model, tp)
    else:
        account_reduced(run, passes)
    account_parameters(run)
    account_gradients(run, model)


def wire(run, kind, formula, payload):
    """A row: what a rank sends of this payload, in all calls of one kind of collective."""
    tp = run.world_size
    passages = 2 if kind == "all_reduce" else 1  # a ring sums up and hands out
    sent = passages * (tp - 1) * payload / tp
    measured = run.ledger["scratch"].collectives[kind]["wire"]
    run.textbook(f"wire {kind}", f"(tp-1)/tp {formula}", sent, measured)


def payloads(run):
    """-> bytes of an x (B, T, C), of the positions (T, C), and of the loss and the norm."""
    cfg = run.cfg
    b = run.dtype.itemsize
    s = max(b, 4)
    x_bytes = b * run.args.batch * cfg.seq * cfg.width
    position_bytes = b * cfg.seq * cfg.width
    loss_bytes = 3 * s * run.args.batch * cfg.seq  # three numbers per token
    return x_bytes, position_bytes, loss_bytes + b


def account_reduced(run, passes):
    x, positions, sums = payloads(run)
    forward = 2 * run.cfg.layers + 1  # the g of all blocks, and that of the token embedding
    payload = (forward + passes.f) * x + positions + sums
    formula = f"2 [b (B T (2 L + 1 + {passes.f}) + T) C + 3 s B T + b]"
    wire(run, "all_reduce", formula, payload)


def account_gathered(run, passes, positions_trained):
    x, positions, _ = payloads(run)
    forward = 2 * run.cfg.layers + 1  # the f of all blocks, and that of the head
    backward = passes.weights + passes.g
    payload = (forward + backward) * x
    formula = f"b B T (2 L + 1 + {backward}) C"
    if positions_trained:
        payload += positions
        formula = f"b (B T (2 L + 1 + {backward}) + T) C"
    wire(run, "all_gather", formula, payload)


def account_scattered(run, passes):
    x, positions, _ = payloads(run)
    forward = 2 * run.cfg.layers + 1  # the g of all blocks, and that of the token embedding
    payload = (forward + passes.f) * x + positions
    wire(run, "reduce_scatter", f"b (B T (2 L + 1 + {passes.f}) + T) C", payload)


def account_summed(run, model, tp):
    """Where x is cut: the gradients of norms and row biases, the loss, the norm."""
    _, _, sums = payloads(run)
    whole = [p for p in partial_parameters(model, tp) if p.requires_grad]
    count = sum(p.numel() for p in whole)
    formula = f"2 [b {count} + 3 s B T + b]"
    if len(whole) == 6 * run.cfg.layers + 2:  # nothing is frozen
        formula = "2 [b (6 L + 2) C + 3 s B T + b]"
    wire(run, "all_reduce", formula, run.dtype.itemsize * count + sums)


def account_parameters(run):
    L, C, _, V, T = run.cfg
    tp = run.world_size
    rows = math.ceil(V / tp) + math.ceil(T / tp)  # of embeddings: V'/tp and T'/tp
    cut = (12 * C + 7) * L * C // tp + rows * C
    whole = (6 * L + 2) * C
    formula = "b [((12 C + 7) L + V' + T') C / tp + (6 L + 2) C], V' and T' with padding"
    held = run.ledger["scratch"].memory["parameters"]
    run.textbook("parameters held", formula, run.dtype.itemsize * (cut + whole), held)


def account_gradients(run, model):
    """P are this rank's trained parameters."""
    b = run.dtype.itemsize
    own = [p.numel() for p in model.parameters() if p.requires_grad]
    memory = run.ledger["scratch"].memory
    run.textbook("gradients held", "b P", b * sum(own), memory["gradients"])
    run.textbook("AdamW states held", "2 b P + 4 per tensor (step counter)",
                 2 * b * sum(own) + 4 * len(own), memory["optimizer"])


def main():
    args = arguments(__doc__, sp=Flag(False, "sequence parallel: cut x along T outside, too"))
    refuse(args)
    run = Run(args)
    mesh = init_device_mesh(run.device.type, (run.world_size,))
    with run:
        kind = CutSequence if args.sp else WholeSequence
        tp = kind()
        sides = {impl: set_up(run, impl, tp, mesh) for impl in run.impls}
        run.begin(sides)
        model = sides[run.impls[0]].model
        total, own = count_numbers(model)
        run.say(f"tensor_parallel: {run.world_size} ranks on {run.device.type}, {args.dtype}, "
                f"{total:,} parameters, {own:,} here")
        for impl, step in run.steps():
            side = sides[impl]
            run.set_rate(side.optimizer, step)
            x, y, valid = run.batch(step)
            with run.measure(impl, step):
                loss, norm = side.train_step(x, y, valid)
            run.log(impl, step, loss / run.world_size, norm)  # each rank has the whole
        if "scratch" in run.impls:
            account(run, sides["scratch"].model, tp)
        return run.finish(total, own)


if __name__ == "__main__":
    sys.exit(main())
