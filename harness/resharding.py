"""Layouts of hybrid_3d: which are possible, and what is saved so that any other can go on.

Every parameter and AdamW state is saved under the plain GPT's name. A rank holds pieces: of a stage (pp), of a matrix
(tp), and with ZeRO-1 of the optimizer's states (dp). The last are gathered before they are saved; a piece of a matrix
is a DTensor over tp, which torch.distributed.checkpoint (DCP) reads back in pieces of any other size. What several
ranks hold is saved by the first of them.
"""
import math
from itertools import accumulate
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import pipeline_parallel
from common import require
from harness import checkpoint

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def layout(args):
    """-> D, T, P, M, chunks per rank, all of them possible; of --dp --tp --pp some may have been left out."""
    n, sizes, cfg, B, schedule = args.world_size, [args.pp, args.tp, args.dp], args.cfg, args.batch, args.schedule
    if not any(sizes) and n % 4 == 0:
        sizes[:2] = 2, 2
    while None in sizes:  # those left out are 1, but for the last of them
        sizes[sizes.index(None)] = 1 if sizes.count(None) > 1 else n // math.prod(size or 1 for size in sizes)
    P, T, D = sizes
    given = " x ".join(f"--{axis} {size}" for axis, size in (("dp", D), ("tp", T), ("pp", P)) if size)
    M, virtual = args.micro or math.gcd(4, max(1, B // max(1, D))), 1 + (schedule == "interleaved")
    for possible, message in (
            (D * T * P == n, f"{given}: no product is {n}, the ranks there are"),
            (B % max(1, D * M) == 0, f"--batch {B} does not divide into --dp {D} x --micro {M} micro-batches"),
            (cfg.heads % T == 0, f"--heads {cfg.heads} do not divide over --tp {T}"),
            (not args.sp or cfg.seq % T == 0, f"--seq {cfg.seq} does not divide over --tp {T}, which --sp wants"),
            (virtual * P <= cfg.layers, f"--layers {cfg.layers} for {virtual * P} stages: give each at least one"),
            (virtual == 1 or M % P == 0, f"--micro {M}: interleaved wants a multiple of --pp {P}"),
            (schedule != "zb-h1" or args.ckpt != "full", "--schedule zb-h1 cannot split what --ckpt full runs twice")):
        require(possible, message)
    ours = args.dry_run or args.save or args.resume or args.ckpt != "none" or args.dtype == "bf16"
    require(args.impl == "scratch" or not ours, "--dry-run, --save, --resume, --ckpt, --dtype bf16 want --impl scratch")
    require(args.impl == "scratch" or cfg.seq > (T - 1) * -(-cfg.seq // T),
            f"--seq {cfg.seq}: torch leaves the last of --tp {T} no positions: take a multiple of {T}")
    require(args.impl == "scratch" or schedule != "1f1b" or M >= P, f"--micro {M}: torch's 1f1b wants --pp {P} or more")
    return D, T, P, M, virtual


KINDS = "", ".exp_avg", ".exp_avg_sq"  # of what training holds for each parameter


def whole_shape(p, cut):
    return torch.Size(cut.whole if cut and i == cut.dim else n for i, n in enumerate(p.shape))


def gather(model, mine):
    """{name: tensor} of this rank's stages -> of all stages, on every rank."""
    plain = SimpleNamespace(homes=model.homes, group=model.group, parameters=lambda: iter(mine.values()))  # no DTensors
    return pipeline_parallel.gather(plain, mine)  # over pp: on one stage -> replicated


def canonical(model, flat, wholes):
    """{kind of KINDS: flat tensor} -> {the plain GPT's name + kind: the same memory}, cut ones as DTensors."""
    named, tp = {}, model.mesh["tp"]
    for kind, p, t in [(k, *view) for k in wholes for view in flat.views(wholes[k]).items()]:
        cut = model.cuts.get(p)
        if cut:
            size, whole = t.shape[cut.dim], torch.empty(whole_shape(p, cut), device="meta")
            t = t.narrow(cut.dim, 0, min(max(cut.whole - tp.get_local_rank() * size, 0), size))  # without padding
            t = DTensor.from_local(t, tp, [Shard(cut.dim)], run_check=False, shape=whole.shape, stride=whole.stride())
        named[model.names[p].replace("head.", "tok.") + kind] = t
    return named


def sharded_state(model):
    """-> {name: tensor or DTensor}; what several ranks hold is on the first of them only, or each would write it."""
    state, (_, copy, piece) = {}, model.mesh.get_coordinate()
    for zero, flat in [(zero, flat) for zero in model.zeros for flat in zero.flats]:
        states, wholes = [zero.optimizer.state[part.master] for part in flat.parts], {}
        for kind in KINDS:
            own = torch.cat([held[kind[1:]] for held in states]) if kind else flat.master
            wholes[kind] = own.new_empty(flat.full.numel())
            if flat.stage:
                all_gather(wholes[kind], own, group=flat.group)  # over dp: sharded -> replicated
            else:
                wholes[kind].copy_(own)
        twice = {"tok.weight" + kind for kind in KINDS} if model.mesh.get_local_rank("pp") else set()
        named = canonical(model, flat, wholes).items() if copy == 0 else ()
        state |= {name: t for name, t in named if name not in twice and (isinstance(t, DTensor) or piece == 0)}
    return state


def restore(model, start):
    """A checkpoint of any layout into a model that has not run yet; start: a checkpoint.Start."""
    if not checkpoint.agree(start):
        return
    for zero, flat in [(zero, flat) for zero in model.zeros for flat in zero.flats]:
        kinds = KINDS if start.ranks else KINDS[:1]  # all, or weights alone
        wholes = {kind: flat.master.new_zeros(flat.full.numel()) for kind in kinds}
        checkpoint.load(start.folder, canonical(model, flat, wholes))
        offset = flat.own.storage_offset()
        mine = slice(offset, offset + len(flat.own))
        flat.full.copy_(wholes[""])
        flat.master.copy_(wholes[""][mine])
        ends = [0, *accumulate(len(part.master) for part in flat.parts)]
        for part, low, high in zip(flat.parts, ends, ends[1:]) if start.ranks else ():
            states = {kind[1:]: wholes[kind][mine][low:high].clone() for kind in KINDS[1:]}
            states["step"] = torch.tensor(float(start.steps), device=part.master.device)
            zero.optimizer.state[part.master] = states
    checkpoint.restore_generators(start)
