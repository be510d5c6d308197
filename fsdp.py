"""Fully sharded data parallelism: a rank keeps 1/N of every block's parameters, and borrows the rest while it runs.

    forward    gather 0 | block 0, gather 1 | free 0, block 1, gather 2 | free 1, block 2, gather 3 ...
    backward   gather 3 | block 3, gather 2 | free 3, scatter 3, block 2, gather 1 | free 2, scatter 2, ...

A unit is a block, or the root: all that is in no block, here the tied embedding, positions and last norm, which stays
gathered from the first use to the last. A unit's parameters lie end to end in one flat tensor, so that one all-gather
brings them, one reduce-scatter sums their gradients, and the optimizer sees one shard. The gather of the next unit and
the reduce-scatter of the one before travel while a unit computes.

    on each rank, P parameters of 4 bytes, N ranks     plain GPT     here
    parameters, gradients, AdamW states                16 P          16 P / N, and at most 2 blocks + the root gathered
    activations                                        whole batch   1/N
    sent per step                                      -             4 (2 P + P_blocks) (N-1)/N: 2L+1 all-gathers
                                                                     and L+1 reduce-scatters (--no-reshard: L+1 both)

Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv:2304.11277, sections 3, 4.
At work: torch.distributed.fsdp.fully_shard and torch.distributed.checkpoint (section 3 below).

    torchrun --standalone --nproc_per_node=2 fsdp.py
"""
import math
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from common import GPT, Run, adamw, arguments, init_weights, loss_sum, require, share

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# ---- 1. the technique (copy this; it needs only torch) -----------------------


class Unit:
    """Parameters that come and go together, end to end in one flat tensor; each rank of the group keeps 1/N of it.

    uses: {parameter: [(module, attribute, full name), ..]}, more than one where it is tied. The modules' parameters
    become views into the flat tensor, whose memory is there only from `gather` to `free`. The optimizer's is `shard`.
    """

    def __init__(self, uses, group, replicas=None, device=None, dtype=None, home=None, init=None):
        n, rank, first = dist.get_world_size(group), dist.get_rank(group), next(iter(uses))
        self.group, self.replicas, self.work, self.flat = group, replicas, None, None
        self.names, self.shapes = [[name for *_, name in places] for places in uses.values()], [p.shape for p in uses]
        self.size = sum(p.numel() for p in uses)
        part = -(-self.size // n)  # the last shards may hold padding, which stays zero
        self.shard = nn.Parameter(torch.zeros(part, dtype=first.dtype, device=home or device))
        self.full = torch.empty(n * part, dtype=dtype or first.dtype, device=device)
        start = -rank * part  # of a parameter, seen from this rank's shard
        for i, ((p, places), view) in enumerate(zip(uses.items(), self.views(self.full))):
            low, high = max(start, 0), min(start + p.numel(), part)
            if low < high:
                if p.is_meta:  # made here, one at a time, and only where a part of it is kept
                    p = init(places[0][-1], torch.empty(p.shape, dtype=p.dtype, device=device))
                self.shard.data[low:high] = p.detach().flatten()[low - start:high - start]
            start += view.numel()
            borrowed = nn.Parameter(torch.empty(0, dtype=view.dtype, device=device))
            borrowed.data = view  # not Parameter(view): autograd would take each gather for a change of what it saved
            borrowed.register_post_accumulate_grad_hook(lambda p, i=i: self.take(i, p))
            for module, attribute, _ in places:
                setattr(module, attribute, borrowed)
        self.free()

    def views(self, flat):
        """The parameters' places in a flat tensor."""
        sizes = [shape.numel() for shape in self.shapes]
        return [v.view(shape) for v, shape in zip(flat[:self.size].split(sizes), self.shapes)]

    def start(self):
        """Begin to gather, unless it is under way or done."""
        memory = self.full.untyped_storage()
        if not memory.nbytes():
            memory.resize_(self.full.numel() * self.full.itemsize)
            self.sent = self.shard.detach().to(self.full.device, self.full.dtype)  # kept until it has travelled
            self.work = all_gather(self.full, self.sent, group=self.group, async_op=True)  # sharded -> replicated

    def gather(self):
        self.start()
        if self.work:
            self.work.wait()
            self.work = self.sent = None

    def free(self):
        self.full.untyped_storage().resize_(0)

    def take(self, i, p):
        """Autograd has made the gradient of parameter i: of a tied one, the sum over its uses."""
        if self.flat is None:
            self.flat = torch.zeros(self.full.numel(), dtype=self.shard.dtype, device=p.device)  # unused: zero
        self.views(self.flat)[i].copy_(p.grad)
        p.grad = None

    def reduce(self):
        self.part = torch.empty(self.shard.numel(), dtype=self.flat.dtype, device=self.flat.device)
        self.work = reduce_scatter(self.part, self.flat, group=self.group, async_op=True)  # partial -> sharded

    def reduced(self):
        """The reduce-scatter must be over: frees the flat gradient. The sum over replicas goes on its way."""
        self.work.wait()
        self.work = self.flat = None
        if self.replicas:
            self.work = dist.all_reduce(self.part, group=self.replicas, async_op=True)  # partial -> replicated

    def keep(self):
        if self.work:
            self.work.wait()
        part, self.part, self.work = self.part.to(self.shard.device), None, None
        self.shard.grad = part if self.shard.grad is None else self.shard.grad.add_(part)

    def whole(self, shard):
        """A tensor like `shard` on every rank -> {name: full tensor}."""
        flat = shard.new_empty(self.full.numel(), device=self.full.device)
        all_gather(flat, shard.detach().to(flat.device), group=self.group)  # sharded -> replicated
        return {name: v for names, v in zip(self.names, self.views(flat)) for name in names}


class FSDP(nn.Module):
    """Shards any module over `group`, unit by unit: each of `blocks` (modules in it, none inside another) and the rest.

    The optimizer takes `shards`; after loss.backward() their gradients are the sums over group and replicas, added to
    those before. Parameters may be on the meta device: init(name, empty tensor) -> tensor makes their values, the same
    on every rank. Compute is in dtype; shards, gradients and their sums keep the parameters'. home="cpu" keeps shards
    off the device. reshard=False holds all blocks from forward to backward. Frozen parameters stay whole; a parameter
    without a gradient gets zero, and one of two blocks belongs to the rest. Every rank must run the same blocks.
    """

    def __init__(self, module, blocks, group=None, replicas=None, reshard=True, **unit):
        super().__init__()
        self.module, self.reshard, self.current, self.reducing = module, reshard, None, None
        uses = {}
        for path, owner in module.named_modules():
            for name, p in owner._parameters.items():
                if p is not None and p.requires_grad:
                    uses.setdefault(p, []).append((owner, name, f"{path}.{name}".lstrip(".")))
        self.units = []
        for i, block in enumerate(blocks):
            inside = set(block.modules())
            mine = [p for p, places in uses.items() if all(owner in inside for owner, *_ in places)]
            self.units.append(Unit({p: uses.pop(p) for p in mine}, group, replicas, **unit))
            block.register_forward_pre_hook(lambda *_, i=i: self.fetch(i, i + 1))
            block.register_forward_hook(lambda *_, i=i: self.leave(i))
            block.register_full_backward_pre_hook(lambda *_, i=i: self.turn(i))
        self.root = Unit(uses, group, replicas, **unit)
        self.shards = nn.ParameterList(u.shard for u in [*self.units, self.root])

    def forward(self, *args, **kwargs):
        self.root.start()
        self.units[0].start()
        self.root.gather()
        out = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            outputs = out if isinstance(out, (tuple, list)) else [out]
            torch.autograd.graph.register_multi_grad_hook(outputs, lambda _: self.begin(), mode="any")
        else:
            self.root.free()
        return out

    def fetch(self, i, following):
        self.units[i].gather()
        if 0 <= following < len(self.units):
            self.units[following].start()  # travels while unit i computes

    def leave(self, i):
        if self.reshard or not torch.is_grad_enabled():
            self.units[i].free()

    def begin(self):
        """Backward is at the root's output."""
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)  # when this backward is over
        self.root.gather()
        self.units[-1].start()

    def turn(self, i):
        """Backward comes to block i, so it is through with the one before."""
        self.close(self.current)
        self.current = self.units[i]
        self.fetch(i, i - 1)

    def close(self, unit):
        if unit:
            unit.free()
            if self.reducing:
                self.reducing.reduced()
            unit.reduce()
            self.reducing = unit

    def finish(self):
        for unit in self.current, self.root:
            self.close(unit)
        self.reducing.reduced()
        self.current = self.reducing = None
        for unit in [*self.units, self.root]:
            unit.keep()


def clip_grad_norm_(shards, max_norm, group=None):
    """Every parameter is in one shard of the group, and padding is zero -> norm over all of them, before clipping."""
    norm = nn.utils.get_total_norm([s.grad for s in shards]).square()
    dist.all_reduce(norm, group=group)  # partial -> replicated
    norm = norm.sqrt()
    if max_norm:
        nn.utils.clip_grads_with_norm_(shards, max_norm, norm)
    return norm


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, group=None, replicas=None, **options):
    return FSDP(model, model.blocks, group, replicas, **options)


def full_state_dict(model):
    return {name: t for u in [*model.units, model.root] for name, t in u.whole(u.shard).items()}


def full_gradients(model):
    tied = {name for u in [*model.units, model.root] for names in u.names for name in names[1:]}
    found = {name: t for u in [*model.units, model.root] for name, t in u.whole(u.shard.grad).items()}
    return {name: t for name, t in found.items() if name not in tied}


def train_step(model, optimizer, x, y, valid, clip):
    """x, y: this rank's rows (B/N, T); valid: of the whole batch -> this rank's part of the loss, gradient norm."""
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    loss.backward()  # shards' gradients: partial -> sharded, inside FSDP
    norm = clip_grad_norm_(model.shards, clip, model.root.group)
    optimizer.step()
    return loss, norm


# ---- 4. run ------------------------------------------------------------------


def main():
    args = arguments(__doc__, reshard=(True, "free each block after its forward"))
    n = args.world_size
    require(args.batch >= n, f"--batch {args.batch} sequences for {n} ranks: give each at least one")
    run = Run(args)
    mesh = init_device_mesh(run.device.type, (1, n), mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model = GPT(run.cfg).to(run.dtype)
    with run:
        total = sum(p.numel() for p in model.parameters())

        def init(name, t):
            module, _, leaf = name.rpartition(".")
            init_weights(nn.ParameterDict({leaf: t}), run.cfg.layers, args.seed, module)
            return t
        model = parallelize(model, mesh["shard"].get_group(), device=run.device, reshard=args.reshard, init=init)
        optimizer = adamw(model.shards, args.lr)
        for impl, step in run.steps():
            x, y, valid = run.batch(step, share(args.batch, n, run.rank))
            with run.measure(impl, step, model, optimizer):
                loss, norm = train_step(model, optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss, norm)
            if run.keeps(step):
                run.trace[impl].keep(step, full_gradients(model), full_state_dict(model))
        return run.finish(total, sum(s.numel() for s in model.shards))


if __name__ == "__main__":
    sys.exit(main())
