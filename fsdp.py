"""Fully sharded data parallelism: a rank keeps 1/N of every block's parameters and borrows the rest while it runs.

    compute            fwd 0   fwd 1   fwd 2   fwd 3   loss    bwd 3   bwd 2   bwd 1   bwd 0    0 to 3: blocks, freed
    gathered   0       1       2       3               3       2       1       0                    when they are done
    summed                                                             3       2       1       0

Units are the blocks and the root: all that is in no block, here the tied embedding, positions and last norm, gathered
throughout. A unit's parameters lie end to end: one all-gather brings them, one reduce-scatter sums their gradients.

    on each rank, P parameters of 4 bytes, N ranks    plain GPT     here
    parameters, gradients, AdamW states               16 P          16 P/N; gathered: the root and at most 2 blocks
    activations                                       whole batch   1/N
    sent per step, in 2L+1 all-gathers, L+1 sums      -             4 (2 P + P_blocks) (N-1)/N, --no-reshard: 8 P ..

Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv:2304.11277, sections 3, 4.
At work: torch.distributed.fsdp.fully_shard (section 3) and torch.distributed.checkpoint (checkpoint.py).

    torchrun --standalone --nproc_per_node=2 fsdp.py
"""
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from common import ANY, DTYPES, GPT, Run, adamw, arguments, build, init_weights, loss_sum, require, share
from harness import checkpoint

# ---- 1. the technique (copy this; it needs only torch) -----------------------

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Unit:
    """Parameters that come and go together, laid end to end in `full`; each rank of the group keeps 1/N of it, `shard`.
    uses: {parameter: [(module, attribute, path), ..]}, several where it is tied. The modules get views into `full`."""

    def __init__(self, uses, group, replicas=None, device=None, dtype=None, home=None, init=None):
        n, kinds, self.size = dist.get_world_size(group), {p.dtype for p in uses}, sum(p.numel() for p in uses)
        assert len(kinds) == 1, f"a unit wants parameters to train, all of one dtype, not {[*kinds]}"
        (kind,), where, self.shapes = kinds, next(iter(uses)).device, [p.shape for p in uses]
        home, device = (where if t is None and where.type != "meta" else t for t in (home, device))
        self.coming = self.going = self.flat = self.part = None
        self.group, self.replicas, self.borrowed = group, replicas, nn.ParameterList()
        self.names = [[f"{path}.{name}".lstrip(".") for _, name, path in places] for places in uses.values()]
        each = -(-self.size // n)  # the last shards may end in padding, which is zero and stays so
        self.shard = nn.Parameter(torch.zeros(each, dtype=kind, device=home))
        self.full = torch.empty(n * each, dtype=dtype or kind, device=device)
        start = -dist.get_rank(group) * each  # where a parameter starts, seen from this shard
        for (p, places), view in zip(uses.items(), self.views(self.full)):
            low, high = max(start, 0), min(start + p.numel(), each)
            if low < high:
                if p.is_meta:  # made here, one at a time, and only where a part of it is kept
                    made = nn.ParameterDict({places[0][1]: torch.empty(p.shape, dtype=kind, device=device)})
                    init(made, prefix=places[0][2])
                    p = made[places[0][1]]
                self.shard.data[low:high] = p.detach().flatten()[low - start:high - start]
            start += view.numel()
            self.borrowed.append(nn.Parameter(torch.empty(0, dtype=view.dtype, device=device)))
            self.borrowed[-1].data = view  # Parameter(view) would let autograd take a gather for a change of value
            for module, attribute, _ in places:
                setattr(module, attribute, self.borrowed[-1])
        self.free()

    def views(self, flat):
        return [v.view(s) for v, s in zip(flat[:self.size].split([s.numel() for s in self.shapes]), self.shapes)]

    def start(self):
        if not (memory := self.full.untyped_storage()).nbytes():  # else it is there, or on its way
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
        self.keep()  # what an earlier part of this backward has reduced
        self.flat = torch.empty(self.full.numel(), dtype=self.shard.dtype, device=self.full.device)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.borrowed]
        torch.cat([*(g.flatten() for g in grads), self.flat.new_zeros(self.flat.numel() - self.size)], out=self.flat)
        self.borrowed.zero_grad()
        self.part = self.flat.new_empty(self.shard.shape)
        self.going = reduce_scatter(self.part, self.flat, group=self.group, async_op=True)  # partial -> sharded

    def across_replicas(self):
        if self.flat is not None:
            self.going.wait()
            self.flat = self.going = None
            if self.replicas:
                self.going = dist.all_reduce(self.part, group=self.replicas, async_op=True)  # partial -> replicated

    def keep(self):  # adds what has arrived to shard.grad
        if self.going:
            self.going.wait()
        if self.part is not None:
            part, self.part, self.going = self.part.to(self.shard.device), None, None
            self.shard.grad = part if self.shard.grad is None else self.shard.grad.add_(part)

    def whole(self, shard):  # or its gradient -> {name: full tensor}, a tied one under each of its names
        flat = shard.new_empty(self.full.numel(), device=self.full.device)
        all_gather(flat, shard.detach().to(flat.device), group=self.group)  # sharded -> replicated
        return {name: view for names, view in zip(self.names, self.views(flat)) for name in names}


class FSDP(nn.Module):
    """Shards any module over `group`: a unit for each of `blocks`, in the order they run, and one for the rest.

    The optimizer takes `shards` (on home), whose gradients are sums over group and replicas, added to what was there.
    Ranks must start with equal weights, or on the meta device: init(holder, prefix) fills one parameter there, known by
    its full name alone. dtype is for computing only. Frozen parameters stay whole, one tied across blocks belongs to
    the rest, one unused gets zeros; all ranks must use the same units. Between steps the module's have no memory.
    """

    def __init__(self, module, blocks, group=None, replicas=None, reshard=True, **unit):
        super().__init__()
        self.module, self.units, self.turned, uses = module, [], False, {}
        for path, owner in module.named_modules():
            for name, p in owner._parameters.items():
                if p is not None and p.requires_grad:
                    uses.setdefault(p, []).append((owner, name, path))
        for i, block in enumerate(blocks):
            mine = [p for p, places in uses.items() if {owner for owner, *_ in places} <= {*block.modules()}]
            self.units.append(Unit({p: uses.pop(p) for p in mine}, group, replicas, **unit))
            block.register_forward_pre_hook(lambda *_, i=i: self.fetch(i, i if self.turned else i + 1))
            block.register_forward_hook(lambda *_, i=i: self.units[i].free() if reshard and not self.turned else None)
            block.register_full_backward_pre_hook(lambda *_, i=i: self.turn(i))
        self.units.append(Unit(uses, group, replicas, **unit))  # the root
        self.shards = nn.ParameterList(unit.shard for unit in self.units)

    def forward(self, *args, **kwargs):
        self.turned = False  # backward has not begun; once it has, a block's forward is checkpointing's
        for unit in self.units:  # it may have been left by a forward without backward, a backward with an exception
            unit.free()
            unit.borrowed.zero_grad()
            unit.going = unit.flat = unit.part = None
        self.fetch(-1, 0)
        out = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            outputs = [t for t in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(t)]
            torch.autograd.graph.register_multi_grad_hook(outputs, lambda _: self.turn(-1), mode="any")
        return out

    def fetch(self, i, following):
        """Unit i must be here, -1 is the root; the following block's parameters travel while it computes."""
        self.units[i].start()
        if following < len(self.units) - 1:
            self.units[following].start()
        self.units[i].wait()

    def turn(self, i):
        """Backward comes to unit i, to the root first, and so is through with block i + 1."""
        self.turned = True
        if i == -1:
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)  # when this backward is over
        elif i < len(self.units) - 2:
            self.close(self.units[i + 1])
        self.fetch(i, (i - 1) % len(self.units))  # before the root's backward the last block; after block 0's, none

    def close(self, unit):
        unit.free()
        if any(p.grad is not None for p in unit.borrowed):
            for other in self.units:
                other.across_replicas()  # at most the one before, which had this unit's time to travel
            unit.reduce()

    def finish(self):
        for unit in self.units:
            self.close(unit)
        for unit in self.units:
            unit.across_replicas()
            unit.keep()

    def clip_grad_norm_(self, max_norm):
        unit, norm = self.units[0], nn.utils.get_total_norm([s.grad for s in self.shards if s.grad is not None])
        dist.all_reduce(norm := norm.to(unit.full.device).square(), group=unit.group)  # partial -> replicated
        nn.utils.clip_grads_with_norm_(self.shards, max_norm or float("inf"), norm.sqrt_().nan_to_num(0, posinf=0))
        return norm


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, mesh, seed, **options):
    """mesh: (replicate, shard). The model may be on the meta device, so that no rank ever holds all of it."""
    shard, replicate = mesh["shard"].get_group(), mesh["replicate"].get_group()
    return FSDP(model, model.blocks, shard, replicate if mesh["replicate"].size() > 1 else None, **options,
                init=lambda part, prefix: init_weights(part, len(model.blocks), seed, prefix))


def full_state_dict(model, of=torch.Tensor.detach):
    if isinstance(model, FSDP):
        return {name: t for unit in model.units for name, t in unit.whole(of(unit.shard)).items()}
    return {name: of(t).full_tensor() for name, t in model.state_dict(keep_vars=True).items()}  # sharded -> replicated


def full_gradients(model):
    found = full_state_dict(model, lambda p: p.grad)
    return {name: found[name] for name, _ in getattr(model, "module", model).named_parameters()}  # tied ones once


def train_step(model, optimizer, x, y, valid, clip):
    """x, y: this rank's rows (B/N, T); valid: of the whole batch -> this rank's part of the loss, gradient norm."""
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    loss.backward()  # partial -> sharded, inside FSDP
    norm = model.clip_grad_norm_(clip)
    optimizer.step()
    return loss, norm


# ---- 3. at work: the same with torch's own API -------------------------------


def parallelize_at_work(model, mesh, reshard=True, dtype=None):  # on GPUs also offload_policy=CPUOffloadPolicy()
    policy = dict(mesh=mesh if mesh["replicate"].size() > 1 else mesh["shard"],
                  mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=model.tok.weight.dtype))
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, **policy)
    fully_shard(model, **policy)
    for block, following in zip(model.blocks, model.blocks[1:]):
        block.set_modules_to_forward_prefetch([following])  # backward's it finds itself
    return model


def train_step_at_work(model, optimizer, x, y, valid, clip):
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    (loss * dist.get_world_size()).backward()  # fully_shard averages; the sum is wanted here
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).full_tensor()  # partial -> replicated
    optimizer.step()
    return loss, norm


# ---- 4. run ------------------------------------------------------------------


def account(run, model, n, replicas):  # n ranks share the shards
    held, sent, part = run.ledger["scratch"].memory, run.ledger["scratch"].collectives, (n - 1) / n
    b, c = model.shards[0].itemsize, model.units[0].full.itemsize  # bytes of an element of a shard, of what computes
    P, P_blocks = (sum(u.full.numel() for u in units) for units in (model.units, model.units[:-1]))
    run.textbook("parameters, gradients, AdamW states", f"4 b P/N + 4 per unit, P = {P:,} with padding",
                 4 * b * P / n + 4 * len(model.units), held["parameters"] + held["gradients"] + held["optimizer"])
    run.textbook("wire all_gather", "c (P + P_blocks if resharded) (N-1)/N",
                 c * (P + run.args.reshard * P_blocks) * part, sent["all_gather"]["wire"])
    run.textbook("wire reduce_scatter", "b P (N-1)/N", b * P * part, sent["reduce_scatter"]["wire"])
    run.textbook("wire all_reduce", "norm: 2 b (N-1)/N, R replicas: 2 b P/N (R-1)/R",
                 2 * b * (part + P / n * (replicas - 1) / replicas), sent["all_reduce"]["wire"])


def main():
    args = arguments(__doc__, reshard=(True, "free blocks after forward, gather them again for backward"),
                     hsdp=(0, "R, ranks that share the shards: groups of R are replicas (0: all ranks)", ANY),
                     offload=(False, "keep shards and optimizer states in the CPU's memory"), **checkpoint.FLAGS)
    ranks, n = args.world_size, args.hsdp or args.world_size
    require(args.batch >= ranks, f"--batch {args.batch} sequences for {ranks} ranks: give each at least one")
    require(ranks % n == 0, f"--hsdp {n} does not divide {ranks} ranks")
    require(not args.offload or args.impl == "scratch", "--offload is for --impl scratch; torch's own wants a GPU")
    start = checkpoint.begin(args)
    run, sides, kind = Run(args), {}, torch.float32 if args.dtype == "bf16" else DTYPES[args.dtype]
    mesh = dist.init_device_mesh(run.device.type, (ranks // n, n), mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model = GPT(run.cfg).to(kind)
    total = sum(p.numel() for p in model.parameters())
    with run:
        for impl in run.impls:
            if impl == "scratch":
                model = parallelize(model, mesh, args.seed, reshard=args.reshard, dtype=run.dtype, device=run.device,
                                    home="cpu" if args.offload else run.device)
            else:
                model = build(run.cfg, args.seed, run.device, kind)
                model = parallelize_at_work(model, mesh, args.reshard, run.dtype)
            optimizer = adamw(list(getattr(model, "shards", model.parameters())), args.lr)
            sides[impl] = model, optimizer, train_step if impl == "scratch" else train_step_at_work
            checkpoint.restore(start, model, optimizer, mesh["shard"])
            run.go_on(start, full_state_dict, model)
        run.say(f"fsdp: {ranks} ranks on {run.device.type}, {args.dtype}, {total:,} parameters, each rank keeps 1/{n}")
        for impl, step in run.steps():
            model, optimizer, step_fn = sides[impl]
            x, y, valid = run.batch(step, share(args.batch, ranks, run.rank))
            with run.measure(impl, step, model, optimizer):
                loss, norm = step_fn(model, optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss, norm, full_gradients, full_state_dict, model)
            checkpoint.save(run, step, model, optimizer, mesh["shard"], brings=mesh.get_local_rank("replicate") == 0)
        if args.impl != "torch":
            account(run, sides["scratch"][0], n, ranks // n)
        return run.finish(total, run.ledger[run.impls[0]].memory["parameters"] // kind.itemsize)


if __name__ == "__main__":
    sys.exit(main())
