"""Optimizers that look at whole matrices, such as Muon, where each rank has a piece of each.

              between steps       in a step           between steps
    rank 0    a0 b0 c0 d0         a0 a1 a2 a3         a0 b0 c0 d0      a, b, c, d: matrices
    rank 1    a1 b1 c1 d1    ->   b0 b1 b2 b3    ->   a1 b1 c1 d1      a1: rank 1's piece of a
    rank 2    a2 b2 c2 d2         c0 c1 c2 c3         a2 b2 c2 d2
    rank 3    a3 b3 c3 d3         d0 d1 d2 d3         a3 b3 c3 d3

Each matrix has an owner. For a step it gets the pieces of the weights and of their gradients, steps
the whole, and gives the pieces back. What the optimizer keeps, as Muon's momentum, stays with it.

    on each of n ranks, P elements in matrices   AdamW      here, Muon
    states                                       2 P/n      P/n
    sent in a step, besides                      -          3 P/n (n-1)/n or less, in 3 all-to-alls
    orthogonalizes                               -          1/n of the matrices

    [whole] = wholes_of_units(zero.units, zero.group, matrices)
    muon = torch.optim.Muon(whole.parameter_groups([{"params": matrices}]), lr=1e-3)
    whole.zero_grad()  # in the place of muon.zero_grad()
    loss.backward()
    with whole:  # when gradients are summed and clipped
        muon.step()

What no rank cuts (in ddp.py, in pipelines) Muon takes as it is. It needs torch alone.

Not for: pieces on another device than the group's (offload, on GPUs); matrices without a gradient.
Liu 2025, "Muon is Scalable for LLM Training", arXiv:2502.16982, section 2.3.
"""
import math
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn as nn


@dataclass(eq=False)
class Share:
    """What this rank has of a parameter that is cut over ranks."""

    part: nn.Parameter  # has .grad in a step; may be without elements
    shape: tuple  # of the whole: (A, B), or (E, A, B), a stack of matrices
    sizes: list  # how many of its elements each rank has. A single one: every rank has the whole
    dim: int = 0  # all ranks' pieces lie along this dim, in the order of ranks
    matrices: tuple = ()  # on the rank that owns it, what the optimizer steps

    def elements(self, kind):
        """kind: "data" or "grad" -> what is here, flat."""
        return getattr(self.part, kind).movedim(self.dim, 0).flatten()

    def set_elements(self, elements):
        t = self.part.data.movedim(self.dim, 0)
        t.copy_(elements.view(t.shape))

    def whole(self):
        """The owner's -> all ranks' elements, in order, flat."""
        return torch.cat([m.data.movedim(self.dim, 0).flatten() for m in self.matrices])

    def set_whole(self, kind, elements):
        others = [*self.shape]
        first = others.pop(self.dim)
        whole = elements.view(first, *others).movedim(0, self.dim).contiguous()
        for matrix, t in zip(self.matrices, whole.view(len(self.matrices), *self.shape[-2:])):
            setattr(matrix, kind, t)


class WholeMatrices:
    """Within `with`, each matrix is whole on one rank of `group`, where an optimizer may step it.

    shares: {parameter: Share}, on all ranks with the same shapes and sizes in the same order
    """

    def __init__(self, shares, group=None):
        self.shares = shares
        self.group = group
        n = max((len(share.sizes) for share in shares.values()), default=1)
        self.rank = dist.get_rank(group) if n > 1 else 0
        self.owned = [[] for _ in range(n)]  # what each rank owns: [Share]
        load = [0] * n
        for share in sorted(shares.values(), key=lambda share: -math.prod(share.shape)):
            # the rank that owns little so far, and has much of this one already
            owner = min(range(n), key=lambda r: load[r] - share.sizes[r])
            load[owner] += math.prod(share.shape)
            self.owned[owner].append(share)
        self.mine = self.owned[self.rank]
        for share in self.mine:
            count = math.prod(share.shape[:-2])  # 1, or those of a stack
            share.matrices = [nn.Parameter(share.part.new_empty(0, 0)) for _ in range(count)]
            for matrix in share.matrices:
                matrix.whole = share.shape[-2:]  # its shape within `with`

    def parameter_groups(self, groups):
        """groups: as for an optimizer -> the same, with the matrices that this rank steps."""
        ours = []
        for group in groups:
            params = []
            for p in group["params"]:
                params += self.shares[p].matrices if p in self.shares else [p]
            ours.append({**group, "params": params})
        return ours

    def zero_grad(self):
        """Of the pieces, which an optimizer of wholes does not know."""
        for share in self.shares.values():
            if share.part.numel():
                share.part.grad = None

    def __enter__(self):
        """sharded -> whole on the owner"""
        for kind in ("data", "grad"):
            pieces = []  # for each rank, of what it owns
            sizes = []  # from each rank, of what is owned here
            for rank, owned in enumerate(self.owned):
                pieces.append([share.elements(kind) for share in owned])
                sizes.append([share.sizes[rank] for share in self.mine])
            arrived = self.exchange(pieces, sizes)  # by the rank that it comes from, then by share
            for i, share in enumerate(self.mine):
                share.set_whole(kind, torch.cat(arrived[i::len(self.mine)]))

    def __exit__(self, *_):
        """whole on the owner -> sharded"""
        wholes = [share.whole().split(share.sizes) for share in self.mine]
        pieces = []  # for each rank, of what is owned here
        sizes = []  # from each rank, of what it owns
        for rank, owned in enumerate(self.owned):
            pieces.append([whole[rank] for whole in wholes])
            sizes.append([share.sizes[self.rank] for share in owned])
        arrived = self.exchange(pieces, sizes)
        for share, elements in zip(chain(*self.owned), arrived):
            share.set_elements(elements)
        for matrix in chain(*(share.matrices for share in self.mine)):
            matrix.data = matrix.new_empty(0, 0)
            matrix.grad = None

    def exchange(self, pieces, sizes):
        """pieces[r]: flat tensors for rank r -> the flat tensors that come, of sizes[r] from it."""
        if len(pieces) == 1:
            return pieces[0]
        nothing = next(iter(self.shares.values())).part.new_empty(0)  # a rank may own no matrix
        flat = torch.cat([nothing, *chain(*pieces)])
        sent = [sum(map(len, of_rank)) for of_rank in pieces]
        received = [sum(of_rank) for of_rank in sizes]
        arrived = flat.new_empty(sum(received))
        # pieces -> wholes, or back
        dist.all_to_all_single(arrived, flat, received, sent, group=self.group)
        return arrived.split(list(chain(*sizes)))


# ---- the shares that ways of cutting make ----------------------------------------

# Each makes a list of WholeMatrices, to be entered in this order: see harness/optimizers.py.


def wholes_of_units(units, group, parameters):
    """Of parameters that lie end to end, cut anywhere, as in zero.py and fsdp.py.

    units: have full, chunk, shapes and spans; and parts, whose masters are what is here, 1-D
    """
    masters = {part.parameter: part.master for unit in units for part in unit.parts}
    nothing = nn.Parameter(next(iter(masters.values())).new_empty(0))
    nothing.grad = nothing.detach()
    wanted = set(parameters)
    found = {}
    for unit in units:
        for p, span in unit.spans.items():
            if p in wanted:
                sizes = []
                for chunk in range(0, unit.full.numel(), unit.chunk):  # one on each rank
                    inside = range(max(span.start, chunk), min(span.stop, chunk + unit.chunk))
                    sizes.append(len(inside))
                found[p] = Share(masters.get(p, nothing), unit.shapes[p], sizes)
    return [WholeMatrices(found, group)]


def wholes_of_cuts(ranks, parameters):
    """Of parameters that are cut along a dim, as in tensor_parallel.py.

    ranks: has group, size and cuts, where cuts[p] is (dim, size of the whole along it), and
        each(size), how much of it a rank gets, but for the last ones
    """
    shares = {p: share_of_cut(ranks, p, p, p.shape) for p in parameters if p in ranks.cuts}
    return [WholeMatrices(shares, ranks.group)]


def wholes_of_units_of_cuts(zeros, ranks, names, parameters):
    """Of what both have cut: first zeros' parts become a piece, then the whole.

    zeros: ZeROs, around what `ranks` has cut, see wholes_of_cuts
    names: {parameter: its name}; gets the names of these pieces, too
    """
    wholes = []
    shares = {}  # of the pieces
    for zero in zeros:
        here = {p for unit in zero.units for p in unit.shapes}
        mine = [p for p in parameters if p in here]
        wholes += wholes_of_units(zero.units, zero.group, mine)
        for p, share in wholes[-1].shares.items():
            if p in ranks.cuts:
                for piece in share.matrices:
                    names[piece] = names[p]
                    shares[piece] = share_of_cut(ranks, p, piece, piece.whole)
    return [*wholes, WholeMatrices(shares, ranks.group)]


def share_of_cut(ranks, p, part, shape):
    """part: this rank's, of this shape when ZeRO has not emptied it."""
    dim, plain_size = ranks.cuts[p]
    each = ranks.each(plain_size)
    of_line = math.prod(shape[:dim] + shape[dim + 1:])
    whole = list(shape)
    whole[dim] = plain_size
    sizes = []
    for rank in range(ranks.size):
        lines = range(rank * each, min((rank + 1) * each, plain_size))
        sizes.append(len(lines) * of_line)
    return Share(part, whole, sizes, dim)


def wholes_of_stacks(parameters):
    """Of stacks, as experts are: each matrix is whole on its rank, but the stack is no matrix."""
    stacks = [p for p in parameters if p.dim() == 3]
    return [WholeMatrices({p: Share(p, p.shape, [p.numel()]) for p in stacks})]
