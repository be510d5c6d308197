"""Fully sharded data parallelism: a rank keeps 1/N of every block's parameters and borrows the rest while it runs.

    forward     gather 0 | 0   gather 1 | free 0, 1   gather 2 | free 1, 2   gather 3 | free 2, 3        block: computes
    backward    gather 3 | 3   gather 2 | free 3, 2   gather 1 | free 2, 1   gather 0 | free 1, 0        gather, scatter:
                                           scatter 3              scatter 2              scatter 1       travel meanwhile

A unit is a block, or the root: what is in no block, here the tied embedding, positions and last norm, gathered from
the first use to the last. A unit's parameters lie end to end in one flat tensor: one all-gather brings them, one
reduce-scatter sums their gradients, the optimizer sees one shard. Built unit by unit, from the meta device.

    on each rank, P parameters of 4 bytes, N ranks    plain GPT     here
    parameters, gradients, AdamW states               16 P          16 P/N; gathered: the root and at most 2 blocks
    activations                                       whole batch   1/N
    sent per step                                     -             4 (2 P + P_blocks) (N-1)/N, by 2L+1 all-gathers
                                                                    and L+1 reduce-scatters; --no-reshard: L+1, L+1

Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv:2304.11277, sections 3, 4.
At work: torch.distributed.fsdp.fully_shard and torch.distributed.checkpoint (section 3 below).

    torchrun --standalone --nproc_per_node=2 fsdp.py
"""
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

import checkpoint
from common import ANY, GPT, Run, adamw, arguments, init_weights, loss_sum, require, share

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# ---- 1. the technique (copy this; it needs only torch) -----------------------


class Unit:
    """Parameters that come and go together, end to end in one flat tensor, of which each rank of the group keeps 1/N.

    uses: {parameter: [(module, attribute, name), ..]}, more than one where it is tied. The modules get parameters that
    are views into `full`, whose memory is there only from gather to free. The optimizer's is `shard`.
    """

    def __init__(self, uses, group, replicas=None, device=None, dtype=None, home=None, init=None):
        n, kind, self.size = dist.get_world_size(group), next(iter(uses)).dtype, sum(p.numel() for p in uses)
        self.group, self.replicas, self.coming, self.part, self.borrowed = group, replicas, None, None, []
        self.names, self.shapes = [[name for *_, name in places] for places in uses.values()], [p.shape for p in uses]
        each = -(-self.size // n)  # the last shards may end in padding, which is zero and stays so
        self.shard = nn.Parameter(torch.zeros(each, dtype=kind, device=home or device))
        self.full = torch.empty(n * each, dtype=dtype or kind, device=device)
        start = -dist.get_rank(group) * each  # where a parameter starts, seen from this shard
        self.length = max(0, min(each, self.size + start))  # of the shard without padding
        for (p, places), view in zip(uses.items(), self.views(self.full)):
            low, high = max(start, 0), min(start + p.numel(), each)
            if low < high:
                if p.is_meta:  # made here, one at a time, and only where a part of it is kept
                    p = init(places[0][-1], torch.empty(p.shape, dtype=kind, device=device))
                self.shard.data[low:high] = p.detach().flatten()[low - start:high - start]
            start += view.numel()
            self.borrowed.append(nn.Parameter(torch.empty(0, dtype=view.dtype, device=device)))
            self.borrowed[-1].data = view  # not Parameter(view): autograd would take a gather for a change of the values
            for module, attribute, _ in places:
                setattr(module, attribute, self.borrowed[-1])
        self.free()

    def views(self, flat):
        pieces = flat[:self.size].split([shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes)]

    def start(self):
        """Begin to gather, unless it is there or on its way."""
        memory = self.full.untyped_storage()
        if not memory.nbytes():
            memory.resize_(self.full.numel() * self.full.itemsize)
            self.sent = self.shard.detach().to(self.full.device, self.full.dtype)  # must live until wait
            self.coming = all_gather(self.full, self.sent, group=self.group, async_op=True)  # sharded -> replicated

    def wait(self):
        if self.coming:
            self.coming.wait()
            self.coming = self.sent = None

    def free(self):
        self.wait()
        self.full.untyped_storage().resize_(0)

    def reduce(self):
        """Autograd's gradients, end to end, with zeros where there are none, go to the ranks that keep them."""
        self.flat = torch.empty(self.full.numel(), dtype=self.shard.dtype, device=self.full.device)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.borrowed]
        torch.cat([*(g.flatten() for g in grads), self.flat.new_zeros(self.flat.numel() - self.size)], out=self.flat)
        for p in self.borrowed:
            p.grad = None
        self.part = self.flat.new_empty(self.shard.shape)
        self.going = reduce_scatter(self.part, self.flat, group=self.group, async_op=True)  # partial -> sharded

    def reduced(self):
        self.going.wait()
        self.going = self.flat = None
        if self.replicas:
            self.going = dist.all_reduce(self.part, group=self.replicas, async_op=True)  # partial -> replicated

    def keep(self):
        if self.going:
            self.going.wait()
        part, self.part, self.going = self.part.to(self.shard.device), None, None
        self.shard.grad = part if self.shard.grad is None else self.shard.grad.add_(part)

    def whole(self, shard):
        """`shard`, or its gradient -> {name: full tensor}, a tied one under each of its names."""
        flat = shard.new_empty(self.full.numel(), device=self.full.device)
        all_gather(flat, shard.detach().to(flat.device), group=self.group)  # sharded -> replicated
        return {name: view for names, view in zip(self.names, self.views(flat)) for name in names}


class FSDP(nn.Module):
    """Shards any module over `group`, unit by unit: each of `blocks`, modules in it in the order they run, and the rest.

    The optimizer takes `shards`. After loss.backward() their gradients are sums over group and replicas, added to what
    was there. A parameter on the meta device is made by init(name, empty tensor), the same on every rank. Compute is in
    dtype; shards, gradients and sums stay in the parameters'. home="cpu" keeps shards there (unpinned, so that copies
    to a GPU do not overlap). reshard=False holds blocks from forward to backward. Frozen parameters stay whole, one tied
    across blocks belongs to the rest, an unused one gets zeros. Every rank must run the same blocks.
    """

    def __init__(self, module, blocks, group=None, replicas=None, reshard=True, **unit):
        super().__init__()
        self.module, self.units, self.reducing, uses = module, [], None, {}
        for path, owner in module.named_modules():
            for name, p in owner._parameters.items():
                if p is not None and p.requires_grad:
                    uses.setdefault(p, []).append((owner, name, f"{path}.{name}".lstrip(".")))
        for i, block in enumerate(blocks):
            inside = set(block.modules())
            mine = [p for p, places in uses.items() if all(owner in inside for owner, *_ in places)]
            self.units.append(Unit({p: uses.pop(p) for p in mine}, group, replicas, **unit))
            block.register_forward_pre_hook(lambda *_, i=i: self.fetch(i, i + 1))
            if reshard:
                block.register_forward_hook(lambda *_, i=i: self.units[i].free())
            block.register_full_backward_pre_hook(lambda *_, i=i: self.turn(i))
        self.root = Unit(uses, group, replicas, **unit)
        self.every = [*self.units, self.root]
        self.shards = nn.ParameterList(unit.shard for unit in self.every)

    def forward(self, *args, **kwargs):
        for unit in self.every:
            unit.free()  # what a forward without backward has left here may be stale
        self.fetch(-1, 0)
        out = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            outputs = [out] if torch.is_tensor(out) else list(out)
            torch.autograd.graph.register_multi_grad_hook(outputs, lambda _: self.turn(len(self.units)), mode="any")
        return out

    def fetch(self, i, following):
        """Unit i must be here; the following block's parameters travel while it computes. The last unit is the root."""
        self.every[i].start()
        if 0 <= following < len(self.units):
            self.units[following].start()
        self.every[i].wait()

    def turn(self, i):
        """Backward comes to unit i, to the root first, and so is through with block i + 1."""
        if i == len(self.units):
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)  # when this backward is over
        for unit in self.units[i + 1:i + 2]:
            self.close(unit)
        self.fetch(i, i - 1)

    def close(self, unit):
        unit.free()
        if any(p.grad is not None for p in unit.borrowed):
            if self.reducing:
                self.reducing.reduced()
            unit.reduce()
            self.reducing = unit

    def finish(self):
        for unit in self.every:
            self.close(unit)
        self.reducing.reduced()
        self.reducing = None
        for unit in self.every:
            if unit.part is not None:
                unit.keep()

    def clip_grad_norm_(self, max_norm):
        """Every parameter lies once in the group's shards, and padding is zero -> norm of them all, before clipping."""
        norm = nn.utils.get_total_norm([s.grad for s in self.shards if s.grad is not None]).to(self.root.full.device)
        norm = norm.square()
        dist.all_reduce(norm, group=self.root.group)  # partial -> replicated
        if max_norm:
            nn.utils.clip_grads_with_norm_(self.shards, max_norm, norm.sqrt())
        return norm.sqrt()


# ---- 2. the toy GPT, parallelized --------------------------------------------


def initializer(layers, seed):
    def init(name, empty):
        module, _, attribute = name.rpartition(".")
        init_weights(nn.ParameterDict({attribute: empty}), layers, seed, module)
        return empty
    return init


def parallelize(model, mesh, **options):
    """mesh: (replicate, shard). The model may be on the meta device, so that no rank ever holds all of it."""
    replicas = mesh["replicate"].get_group() if mesh["replicate"].size() > 1 else None
    return FSDP(model, model.blocks, mesh["shard"].get_group(), replicas, **options)


def full_state_dict(model):
    return {name: t for unit in model.every for name, t in unit.whole(unit.shard).items()}


def full_gradients(model):
    found = {name: t for unit in model.every for name, t in unit.whole(unit.shard.grad).items()}
    return {name: found[name] for name, _ in model.module.named_parameters()}  # tied ones once


def train_step(model, optimizer, x, y, valid, clip):
    """x, y: this rank's rows (B/N, T); valid: of the whole batch -> this rank's part of the loss, gradient norm."""
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    loss.backward()  # partial -> sharded, inside FSDP
    norm = model.clip_grad_norm_(clip)
    optimizer.step()
    return loss, norm


# ---- 3. at work: the same with torch's own API -------------------------------


def parallelize_at_work(model, mesh, device, init, reshard=True, dtype=None, home=None):
    policy = dict(mesh=mesh if mesh["replicate"].size() > 1 else mesh["shard"],
                  mp_policy=MixedPrecisionPolicy(dtype, torch.float32) if dtype else MixedPrecisionPolicy(),
                  offload_policy=CPUOffloadPolicy() if home else OffloadPolicy())
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, **policy)
    fully_shard(model, **policy)
    for block, following in zip(model.blocks, model.blocks[1:]):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    model.to_empty(device=home or device)
    for name, p in model.named_parameters():
        whole = init(name, torch.empty(p.shape, dtype=p.dtype, device=home or device))
        p.data.copy_(distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None))
    return model


def train_step_at_work(model, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    (loss * dist.get_world_size()).backward()  # fully_shard averages; the sum is wanted here
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).full_tensor()
    optimizer.step()
    return loss, norm


# ---- 4. run ------------------------------------------------------------------


def snapshot(model):
    if isinstance(model, FSDP):
        return full_gradients(model), full_state_dict(model)
    return ({name: p.grad.full_tensor() for name, p in model.named_parameters()},
            {name: t.full_tensor() for name, t in model.state_dict().items()})


def account(run, model, n, replicas):
    """Textbook rows. n: ranks that share the shards; b, c: bytes of an element of a shard, and of what computes."""
    memory, sent = run.ledger["scratch"].memory, run.ledger["scratch"].collectives
    P, b, c = sum(u.full.numel() for u in model.every), model.root.shard.itemsize, model.root.full.itemsize
    blocks, part = run.args.reshard * (P - model.root.full.numel()), (n - 1) / n
    run.textbook("parameters held", f"b P/N, P = {P:,} with padding", b * P / n, memory["parameters"])
    run.textbook("gradients held", "b P/N", b * P / n, memory["gradients"])
    run.textbook("AdamW states held", "2 b P/N + 4 per unit", 2 * b * P / n + 4 * len(model.every), memory["optimizer"])
    run.textbook("wire all_gather", "c (P + P_blocks if resharded) (N-1)/N", c * (P + blocks) * part, sent["all_gather"]["wire"])
    run.textbook("wire reduce_scatter", "b P (N-1)/N", b * P * part, sent["reduce_scatter"]["wire"])
    run.textbook("wire all_reduce", "norm: 2 b (N-1)/N, R replicas: 2 b P/N (R-1)/R",
                 2 * b * part + 2 * b * P / n * (replicas - 1) / replicas, sent["all_reduce"]["wire"])


def main():
    args = arguments(__doc__, reshard=(True, "free blocks after forward, gather them again for backward"),
                     hsdp=(0, "R, ranks that share the shards: groups of R are replicas (0: all ranks)", ANY),
                     offload=(False, "keep shards and optimizer states in the CPU's memory"), **checkpoint.FLAGS)
    ranks, n = args.world_size, args.hsdp or args.world_size
    require(args.batch >= ranks, f"--batch {args.batch} sequences for {ranks} ranks: give each at least one")
    require(ranks % n == 0, f"--hsdp {n} does not divide {ranks} ranks")
    require(not args.offload or args.impl == "scratch" or torch.cuda.is_available(), "--offload: torch's needs a GPU")
    folder, first = checkpoint.resumed(args)
    run, sides, half = Run(args), {}, args.dtype == "bf16"
    run.first = first
    mesh = init_device_mesh(run.device.type, (ranks // n, n), mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        models = {impl: GPT(run.cfg).to(torch.float32 if half else run.dtype) for impl in run.impls}
    options = dict(device=run.device, init=initializer(run.cfg.layers, args.seed), reshard=args.reshard,
                   dtype=run.dtype if half else None, home="cpu" if args.offload else None)
    with run:
        for impl, model in models.items():
            total = sum(p.numel() for p in model.parameters())
            model = (parallelize if impl == "scratch" else parallelize_at_work)(model, mesh, **options)
            optimizer = adamw(list(getattr(model, "shards", model.parameters())), args.lr)
            sides[impl] = model, optimizer, train_step if impl == "scratch" else train_step_at_work
            if folder:
                checkpoint.restore(folder, first, model, optimizer, mesh)
            own = sum(getattr(p, "_local_tensor", p).numel() for p in optimizer.param_groups[0]["params"])
        run.say(f"fsdp: {ranks} ranks on {run.device.type}, {args.dtype}, {total:,} parameters, {own:,} on this rank")
        for impl, step in run.steps():
            model, optimizer, step_fn = sides[impl]
            x, y, valid = run.batch(step, share(args.batch, ranks, run.rank))
            with run.measure(impl, step, model, optimizer):
                loss, norm = step_fn(model, optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss, norm)
            if run.keeps(step):
                run.trace[impl].keep(step, *snapshot(model))
            checkpoint.save(args, step, model, optimizer, mesh)
        if args.impl != "torch":
            account(run, sides["scratch"][0], n, ranks // n)
        return run.finish(total, own)


if __name__ == "__main__":
    sys.exit(main())
