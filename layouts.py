"""Layouts of hybrid_3d: which are possible, and what is saved so that any other can go on.

Every parameter and AdamW state is saved under the plain GPT's name. A rank holds pieces: of a stage (pp), of a matrix
(tp), and with ZeRO-1 of the optimizer's states (dp). The last are gathered before they are saved; a piece of a matrix
is a DTensor over tp, which torch.distributed.checkpoint (DCP) reads back in pieces of any other size. What several
ranks hold is saved by the first of them.
"""
import json
import math
import pickle
import warnings
import zlib
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard

import checkpoint
import pipeline_parallel
from common import require

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def layout(args):
    """-> D, T, P, M, chunks per rank, all of them possible; of --dp --tp --pp some may have been left out."""
    n, sizes, cfg, B, schedule = args.world_size, [args.pp, args.tp, args.dp], args.cfg, args.batch, args.schedule
    if not any(sizes) and n % 4 == 0:
        sizes[:2] = 2, 2
    while None in sizes:  # those left out are 1, but for the last of them
        sizes[sizes.index(None)] = 1 if sizes.count(None) > 1 else n // math.prod(size or 1 for size in sizes)
    P, T, D = sizes
    M, virtual = args.micro or math.gcd(4, max(1, B // max(1, D))), 1 + (schedule == "interleaved")
    for possible, message in (
            (D * T * P == n, f"--dp {D} x --tp {T} x --pp {P} is {D * T * P}, but there are {n} ranks: leave one out"),
            (B % max(1, D * M) == 0, f"--batch {B} does not divide into --dp {D} x --micro {M} micro-batches"),
            (cfg.heads % T == 0, f"--heads {cfg.heads} do not divide over --tp {T}"),
            (not args.sp or cfg.seq % T == 0, f"--seq {cfg.seq} does not divide over --tp {T}, which --sp wants"),
            (virtual * P <= cfg.layers, f"--layers {cfg.layers}: fewer than stages, {virtual * P} with {schedule}"),
            (virtual == 1 or M % P == 0, f"--micro {M}: interleaved wants a multiple of --pp {P}"),
            (schedule != "zb-h1" or args.ckpt != "full", "--schedule zb-h1 cannot split what --ckpt full runs twice")):
        require(possible, message)
    ours = args.dry_run or args.save or args.resume or args.ckpt != "none" or args.dtype == "bf16"
    require(args.impl == "scratch" or not ours, "--dry-run, --save, --resume, --ckpt, --dtype bf16 want --impl scratch")
    return D, T, P, M, virtual


KINDS = "", ".exp_avg", ".exp_avg_sq"  # of what training holds for each parameter


def whole_shape(p):
    return torch.Size(p.tp_whole if i == getattr(p, "tp_dim", None) else n for i, n in enumerate(p.shape))


def gather(model, mine):
    """{name: tensor} of this rank's stages -> of all stages, on every rank."""
    plain = SimpleNamespace(homes=model.homes, group=model.group, parameters=lambda: iter(mine.values()))  # no DTensors
    return pipeline_parallel.gather(plain, mine)  # over pp: on one stage -> replicated


def canonical(model, flat, wholes):
    """One flat tensor for each of KINDS -> {the plain GPT's name + kind: the same memory}, cut ones as DTensors."""
    named, tp = {}, model.mesh["tp"]
    for kind, p, t in [(k, *view) for k in KINDS for view in flat.views(wholes[k]).items()]:
        if hasattr(p, "tp_dim"):
            size, whole = t.shape[p.tp_dim], torch.empty(whole_shape(p), device="meta")
            t = t.narrow(p.tp_dim, 0, min(max(p.tp_whole - tp.get_local_rank() * size, 0), size))  # without padding
            t = DTensor.from_local(t, tp, [Shard(p.tp_dim)], run_check=False, shape=whole.shape, stride=whole.stride())
        named[model.names[p].replace("head.", "tok.") + kind] = t
    return named


def sharded_state(model):
    """-> {name: tensor or DTensor}; what several ranks hold is on the first of them only, or each would write it."""
    state, (_, copy, piece) = {}, model.mesh.get_coordinate()
    for flat in model.flats:
        states, wholes = [flat.optimizer.state[p] for p in flat.optimizer.param_groups[0]["params"]], {}
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


def restore(model, folder, steps):
    """A checkpoint of any layout into a model that has not run yet."""
    for flat in model.flats:
        wholes = {kind: flat.master.new_zeros(flat.full.numel()) for kind in KINDS}
        checkpoint.load(folder, canonical(model, flat, wholes))
        start = flat.own.storage_offset()
        mine = slice(start, start + len(flat.own))
        flat.full.copy_(wholes[""])
        flat.master.copy_(wholes[""][mine])
        for part, p in zip(flat.pieces.values(), flat.optimizer.param_groups[0]["params"]):
            flat.optimizer.state[p] = {kind[1:]: wholes[kind][mine][part].clone() for kind in KINDS[1:]}
            flat.optimizer.state[p]["step"] = torch.tensor(float(steps), device=p.device)


def due(args, step):
    """Is this step one to save after?"""
    return bool(args.save) and ((step + 1) % (args.save_every or args.steps) == 0 or step + 1 >= args.steps)


def write(args, step, state):
    """Each rank writes what it has, without the object collectives of a bare dcp.save, which need NumPy; the first
    joins the tables of contents. The checkpoint is there as a whole or not at all."""
    folder, draft = Path(args.save, f"{step + 1}"), Path(args.save, f".{step + 1}")
    state["notes"] = json.dumps({"steps": step + 1, "flags": checkpoint.identity(args)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that another rank was faster
        dcp.save(state, checkpoint_id=draft, use_collectives=False)
    if dist.get_rank() == 0:
        files = [draft / f"__{rank}.metadata" for rank in range(dist.get_world_size())]
        table, *others = [pickle.loads(file.read_bytes()) for file in files]
        for other in others:
            table.storage_data.update(other.storage_data)
            for name, entry in other.state_dict_metadata.items():
                known = getattr(table.state_dict_metadata.setdefault(name, entry), "chunks", [])
                known += [chunk for chunk in getattr(entry, "chunks", []) if chunk not in known]
        for file in files:
            file.unlink()
        table = pickle.dumps(table)
        (draft / ".metadata").write_bytes(table + zlib.crc32(table).to_bytes(4, "big"))  # as checkpoint.verify wants it
        draft.rename(folder)
    dist.barrier()
