"""A unit of parameters as one flat tensor, cut into equal chunks: what ZeRO's stages hold and move. Needs only torch.

    p0 | p1 | p2 | padding        full: the parameters are views of it; buffer: their gradients are
    chunk 0 | chunk 1 | ..        shard, master, grad: this rank's chunk
"""
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
import torch.nn as nn

# renamed in torch 2.13
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def lend(flat, yes=True):
    """Give a flat tensor its memory, or take it away, under all views of it."""
    storage, size = flat.untyped_storage(), yes * flat.numel() * flat.itemsize
    if storage.size() != size:
        storage.resize_(size)


class Flat:
    """A unit's parameters side by side in `full`, p.grad in `buffer`, padded to N equal chunks: this rank owns one.

    shard (chunk,): ours of full, in stage 3 in memory of its own. master (chunk,): what the optimizer steps, the shard
    itself or a copy in fp32 or on the CPU. grad (chunk,): ours of the sum over ranks. In stage 3 full has memory only
    while it is lent some, in stages 2 and 3 buffer.
    """

    def __init__(self, parameters, make_optimizer, group, offload, stage):
        n, rank = (dist.get_world_size(group), dist.get_rank(group)) if stage else (1, 0)
        self.group, self.stage, self.work, self.missing, self.used = group, stage, None, len(parameters), set()
        ends = [0, *accumulate(p.numel() for p in parameters)]
        chunk = -(-ends[-1] // n)
        mine, ends[-1] = slice(rank * chunk, (rank + 1) * chunk), n * chunk  # the padding goes with the last parameter
        self.ranges, shape = dict(zip(parameters, pairwise(ends))), (n * chunk,)
        self.full, self.buffer = parameters[0].new_zeros(shape), parameters[0].new_zeros(shape)
        self.own, self.sum, self.slots = self.full[mine], self.buffer[mine], self.views(self.buffer)
        for p, view in self.views(self.full).items():
            p.data = view.copy_(p.detach())
        self.shard = self.own.to("cpu" if offload == "param" else self.own.device, copy=stage == 3)
        home, wide = "cpu" if offload != "none" else self.own.device, torch.promote_types(self.own.dtype, torch.float32)
        self.master = self.shard.to(home, wide, copy=offload == "optimizer")
        self.grad = self.sum if stage < 2 else self.sum.clone()
        cuts = {p: [min(max(end - mine.start, 0), chunk) for end in ends] for p, ends in self.ranges.items()}
        self.pieces = {p: slice(a, b) for p, (a, b) in cuts.items() if a < b}  # of our chunk
        self.optimizer = make_optimizer([nn.Parameter(self.master[piece]) for piece in self.pieces.values()])
        lend(self.buffer, stage < 2)

    def views(self, flat):
        return {p: flat[a:a + p.numel()].view_as(p) for p, (a, _) in self.ranges.items()}

    def gather(self):
        lend(self.full)
        self.own.copy_(self.shard)  # in stages 1 and 2 they are the same
        self.work = all_gather(self.full, self.own, group=self.group, async_op=True)  # sharded -> replicated

    def reduce(self):
        """Sums gradients over ranks; the first next() starts it, the second waits for the end."""
        lend(self.buffer)
        for p, (a, b) in self.ranges.items():  # -0.0 is nothing: a sum is -0.0 only if no rank used the parameter
            self.buffer[a + (p.grad is not None) * p.numel():b].fill_(-0.0)
        self.used.update(p for p in self.ranges if p.grad is not None)
        if self.stage:
            work = reduce_scatter(self.sum, self.buffer, group=self.group, async_op=True)  # partial -> sharded
        else:
            work = dist.all_reduce(self.buffer, group=self.group, async_op=True)  # partial -> replicated
        yield
        work.wait()
        if self.stage >= 2:
            self.grad += self.sum
            lend(self.buffer, False)
