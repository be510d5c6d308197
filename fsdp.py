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
import io
import json
import pickle
import sys
import warnings
import zipfile
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from common import ANY, GPT, Run, adamw, arguments, init_weights, loss_sum, require, share

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
        self.group, self.replicas, self.work, self.borrowed = group, replicas, None, []
        self.names, self.shapes = [[name for *_, name in places] for places in uses.values()], [p.shape for p in uses]
        self.size = sum(p.numel() for p in uses)
        part = -(-self.size // n)  # the last shards may hold padding, which stays zero
        self.shard = nn.Parameter(torch.zeros(part, dtype=first.dtype, device=home or device))
        self.full = torch.empty(n * part, dtype=dtype or first.dtype, device=device)
        start = -rank * part  # of a parameter, seen from this rank's shard
        for (p, places), view in zip(uses.items(), self.views(self.full)):
            low, high = max(start, 0), min(start + p.numel(), part)
            if low < high:
                if p.is_meta:  # made here, one at a time, and only where a part of it is kept
                    p = init(places[0][-1], torch.empty(p.shape, dtype=p.dtype, device=device))
                self.shard.data[low:high] = p.detach().flatten()[low - start:high - start]
            start += view.numel()
            self.borrowed.append(nn.Parameter(torch.empty(0, dtype=view.dtype, device=device)))
            self.borrowed[-1].data = view  # not Parameter(view): autograd would take gathers for changes of what it saved
            for module, attribute, _ in places:
                setattr(module, attribute, self.borrowed[-1])
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

    def has_gradient(self):
        return any(p.grad is not None for p in self.borrowed)

    def reduce(self):
        """Autograd's gradients go into one flat tensor; where there is none, and into the padding, zeros."""
        self.flat = torch.empty(self.full.numel(), dtype=self.shard.dtype, device=self.full.device)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.borrowed]
        padding = self.flat.new_zeros(self.flat.numel() - self.size)
        torch.cat([*(g.flatten() for g in gradients), padding], out=self.flat)
        for p in self.borrowed:
            p.grad = None
        self.part = torch.empty_like(self.shard, device=self.flat.device, requires_grad=False)
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

    def clip_grad_norm_(self, max_norm):
        """Every parameter is in one shard of the group, and padding is zero -> norm over all of them, before clipping."""
        norm = nn.utils.get_total_norm([s.grad for s in self.shards]).square().to(self.root.full.device)
        dist.all_reduce(norm, group=self.root.group)  # partial -> replicated
        norm = norm.sqrt()
        if max_norm:
            nn.utils.clip_grads_with_norm_(self.shards, max_norm, norm)
        return norm

    def finish(self):
        for unit in [self.current, self.root, *(u for u in self.units if u is not self.current and u.has_gradient())]:
            self.close(unit)
        self.reducing.reduced()
        self.current = self.reducing = None
        for unit in [*self.units, self.root]:
            unit.keep()


def sharded_state(model, optimizer, mesh):
    """What training holds -> {name: DTensor over the mesh of the ranks that share the shards}, without padding.

    A flat tensor cut into equal runs is what Shard(0) means, so torch.distributed.checkpoint reads it back on any number
    of ranks. It shares memory with the model and the optimizer: loading into it loads them.
    """
    state = {}
    for i, unit in enumerate([*model.units, model.root]):
        length = max(0, min(unit.size - mesh.get_local_rank() * unit.shard.numel(), unit.shard.numel()))
        moments = {k: t for k, t in optimizer.state[unit.shard].items() if t.shape == unit.shard.shape}
        for kind, t in {"parameter": unit.shard, **moments}.items():
            state[f"unit {i} {kind}"] = DTensor.from_local(t.detach()[:length], mesh, [Shard(0)], run_check=False,
                                                           shape=(unit.size,), stride=(1,))
    return state


def save(folder, state, group=None):
    """A checkpoint of all ranks' parts, whole or not there at all. With NumPy, dcp.save(state) alone would do: its ranks
    agree by object collectives, which need it. Here each writes alone, and the first joins their tables of contents."""
    draft = folder.with_name(f".{folder.name}")
    dcp.save(state, checkpoint_id=draft, process_group=group, use_collectives=False)
    if dist.get_rank(group) == 0:
        contents, *others = [pickle.loads(file.read_bytes()) for file in sorted(draft.glob("__*.metadata"))]
        for other in others:
            contents.storage_data.update(other.storage_data)
            for name, entry in contents.state_dict_metadata.items():
                known = getattr(entry, "chunks", [])  # replicated entries have one chunk, on every rank the same
                known += [chunk for chunk in getattr(other.state_dict_metadata[name], "chunks", []) if chunk not in known]
        table = pickle.dumps(contents)
        (draft / ".metadata").write_bytes(table + zlib.crc32(table).to_bytes(4, "big"))  # pickle ignores what follows
        draft.rename(folder)
    dist.barrier(group)


def load(folder, state):
    """Fills the state's tensors in place; the ranks need not talk."""
    with warnings.catch_warnings(action="ignore"):  # of a single process, which each rank is
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def verify(folder):
    """Raises unless every byte of a checkpoint is as `save` wrote it."""
    table = Path(folder, ".metadata").read_bytes()
    if zlib.crc32(table[:-4]) != int.from_bytes(table[-4:], "big"):
        raise ValueError("its .metadata is damaged, or not of this program")
    for place in pickle.loads(table).storage_data.values():
        with open(Path(folder, place.relative_path), "rb") as file:
            file.seek(place.offset)
            if zipfile.ZipFile(io.BytesIO(file.read(place.length))).testzip():  # torch.save writes checksums
                raise ValueError(f"{place.relative_path} is damaged")


# ---- 2. the toy GPT, parallelized --------------------------------------------


def parallelize(model, mesh, device, **options):
    """model may be on the meta device; mesh: (replicate, shard)."""
    shard, replicate = mesh["shard"].get_group(), mesh["replicate"].get_group()
    return FSDP(model, model.blocks, shard, replicate if mesh.size(0) > 1 else None, device=device, **options)


def full_state_dict(model):
    return {name: t for u in [*model.units, model.root] for name, t in u.whole(u.shard).items()}


def full_gradients(model):
    found = {name: t for u in [*model.units, model.root] for name, t in u.whole(u.shard.grad).items()}
    return {name: found[name] for name, _ in model.module.named_parameters()}


def train_step(model, optimizer, x, y, valid, clip):
    """x, y: this rank's rows (B/N, T); valid: of the whole batch -> this rank's part of the loss, gradient norm."""
    optimizer.zero_grad()
    loss = loss_sum(model(x), y) / valid
    loss.backward()  # shards' gradients: partial -> sharded, inside FSDP
    norm = model.clip_grad_norm_(clip)
    optimizer.step()
    return loss, norm


# ---- 3. at work: the same with torch's own API -------------------------------


def parallelize_at_work(model, mesh, device, reshard=True, dtype=None, home=None, init=None):
    policy = dict(mesh=mesh if mesh.size(0) > 1 else mesh["shard"], mp_policy=MixedPrecisionPolicy(dtype, torch.float32)
                  if dtype else MixedPrecisionPolicy(), offload_policy=CPUOffloadPolicy() if home else OffloadPolicy())
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, **policy)
    fully_shard(model, **policy)  # the root stays gathered
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


def full_at_work(model):
    return ({name: p.grad.full_tensor() for name, p in model.named_parameters()},
            {name: t.full_tensor() for name, t in model.state_dict().items()})


# ---- 4. run ------------------------------------------------------------------


def main():
    args = arguments(__doc__, reshard=(True, "free each block after its forward"), hsdp=(0, "R", ANY), offload=(False, "offload"))
    n = args.world_size
    require(args.batch >= n, f"--batch {args.batch} sequences for {n} ranks: give each at least one")
    run = Run(args)
    R = args.hsdp or n
    mesh = init_device_mesh(run.device.type, (n//R, R), mesh_dim_names=("replicate", "shard"))
    half = args.dtype == "bf16"
    sides = {}
    for impl in run.impls:
        with torch.device("meta"):
            sides[impl] = GPT(run.cfg).to(torch.float32 if half else run.dtype)
    with run:
        total = sum(p.numel() for p in sides[impl].parameters())

        def init(name, t):
            module, _, leaf = name.rpartition(".")
            init_weights(nn.ParameterDict({leaf: t}), run.cfg.layers, args.seed, module)
            return t
        options = dict(reshard=args.reshard, dtype=run.dtype if half else None, home="cpu" if args.offload else None, init=init)
        for impl in run.impls:
            model = (parallelize if impl == "scratch" else parallelize_at_work)(sides[impl], mesh, run.device, **options)
            sides[impl] = model, adamw(model.shards if impl == "scratch" else model.parameters(), args.lr)
        for impl, step in run.steps():
            model, optimizer = sides[impl]
            x, y, valid = run.batch(step, share(args.batch, n, run.rank))
            with run.measure(impl, step, model, optimizer):
                loss, norm = (train_step if impl == "scratch" else train_step_at_work)(model, optimizer, x, y, valid, args.clip)
            run.log(impl, step, loss, norm)
            if run.keeps(step):
                if impl=="scratch": run.trace[impl].keep(step, full_gradients(model), full_state_dict(model))
                else: run.trace[impl].keep(step, *full_at_work(model))
        return run.finish(total, total)


if __name__ == "__main__":
    sys.exit(main())
