"""Saved training, with torch.distributed.checkpoint (DCP): what N ranks have saved, any other number of ranks reads.

    --save DIR [--save-every K]    DIR/100, DIR/200, ..: a folder per checkpoint, named by the steps behind it
    --resume DIR                   go on from the newest of them (or from DIR/100)

A checkpoint is there as a whole or not at all, is never written over, and is checked to the last byte before use.
"""
import io
import json
import pickle
import warnings
import zipfile
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Shard

from common import ANY, require

FLAGS = {"save": ("", "folder for checkpoints, each in a folder named by its steps"),
         "save_every": (0, "steps between checkpoints (0: one, at the end)", ANY),
         "resume": ("", "go on from the newest checkpoint in this folder, on any number of ranks")}
SAME = ("impl", "dtype", "seed", "batch", "data", "pad", "lr", "clip")  # besides the model's sizes


def numbered(folder):
    """Steps of the checkpoints in a folder."""
    return [int(path.name) for path in Path(folder).glob("*") if folder and path.name.isdigit()]


def identity(args):
    """What a run and its continuation must have in common, or the losses would not continue."""
    return {**args.cfg._asdict(), **{name: getattr(args, name) for name in SAME}}


def resumed(args):
    """Before anything is built -> folder to resume from or None, steps behind it. Bad: one line, exit code 2."""
    require(not (args.save or args.resume) or not args.dry_run and args.impl != "both",
            "--save and --resume are for one --impl, scratch or torch, and no dry run")
    require(args.save or not args.save_every, "--save-every wants --save DIR")
    folder, first = None, 0
    if args.resume:
        folder = Path(args.resume, *map(str, sorted(numbered(args.resume))[-1:]))
        try:
            verify(folder)
            notes = json.loads(load(folder, {"notes": ""})["notes"])
        except Exception as error:  # whatever a damaged file makes of the readers
            require(False, " ".join(f"--resume {folder}: no whole checkpoint of ours: {error}".split()))
        for name, value in identity(args).items():
            saved = notes["flags"].get(name)
            require(saved == value, f"--resume {folder}: saved with --{name} {saved}, not {value}")
        first = notes["steps"]
        require(first < args.steps, f"--steps {args.steps}: the checkpoint has {first} behind it already")
    later = max(numbered(args.save), default=0)
    require(later <= first, f"--save {args.save}: holds step {later} already: --resume it, or save elsewhere")
    require(not Path(args.save or ".").is_file(), f"--save {args.save}: is a file")
    return folder, first


def state_of(model, optimizer, mesh):
    """What training holds -> {name: DTensor}, of which each rank has its part.

    A flat tensor cut into equal runs is what Shard(0) means: so DCP can reshard units of parameters laid end to end,
    model.units, each with its shard and its size, which leaves out the padding. The DTensors share memory with the
    shards and the optimizer's states.
    """
    if not hasattr(model, "units"):  # torch's own
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    state = {}
    for i, unit in enumerate(model.units):
        moments = {k: t for k, t in optimizer.state[unit.shard].items() if t.shape == unit.shard.shape}
        length = max(0, min(unit.shard.numel(), unit.size - mesh.get_local_rank() * unit.shard.numel()))
        for kind, t in {"parameter": unit.shard.detach(), **moments}.items():
            state[f"unit {i} {kind}"] = DTensor.from_local(t[:length], mesh, [Shard(0)], run_check=False,
                                                           shape=(unit.size,), stride=(1,))
    return state


def restore(folder, steps, model, optimizer, mesh):
    """Into a model and an optimizer that have not run yet, unless folder is None. mesh: (replicate, shard)."""
    if folder is None:
        return
    for p in optimizer.param_groups[0]["params"] if hasattr(model, "units") else []:
        optimizer.state[p] = {"step": torch.tensor(float(steps), dtype=torch.float32, device=p.device),
                              "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    state = load(folder, state_of(model, optimizer, mesh["shard"]))
    if not hasattr(model, "units"):
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def save(args, step, model, optimizer, mesh):
    """If this step is one to save after. Of replicas, the first writes.

    With NumPy a bare dcp.save would do: its ranks agree by object collectives, which need it, and hang without. So here
    each rank writes alone, and the first joins their tables of contents to what dcp.save would have written.
    """
    every = args.save_every or args.steps
    if not args.save or (step + 1) % every and step + 1 < args.steps or mesh.get_local_rank("replicate"):
        return
    folder, draft, group = Path(args.save, f"{step + 1}"), Path(args.save, f".{step + 1}"), mesh["shard"].get_group()
    state = state_of(model, optimizer, mesh["shard"])
    state["notes"] = json.dumps({"steps": step + 1, "flags": identity(args)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that another rank was faster
        dcp.save(state, checkpoint_id=draft, process_group=group, use_collectives=False)
    if dist.get_rank(group) == 0:
        join(draft, dist.get_world_size(group))
        draft.rename(folder)
    dist.barrier(group)


def join(draft, ranks):
    """Tables of contents of all ranks -> one, with its checksum at the end, where pickle does not look."""
    files = [draft / f"__{rank}.metadata" for rank in range(ranks)]
    table, *others = [pickle.loads(file.read_bytes()) for file in files]
    for other in others:
        table.storage_data.update(other.storage_data)
        for name, entry in other.state_dict_metadata.items():
            known = getattr(table.state_dict_metadata[name], "chunks", [])
            known += [chunk for chunk in getattr(entry, "chunks", []) if chunk not in known]  # of replicated ones, one
    for file in files:
        file.unlink()
    table = pickle.dumps(table)
    (draft / ".metadata").write_bytes(table + zlib.crc32(table).to_bytes(4, "big"))


def load(folder, state):
    """Fills the tensors of `state` in place -> state. Every rank reads what it needs; they need not talk."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a single process
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def verify(folder):
    """Raises unless the files are to the last byte as they were saved."""
    table = Path(folder, ".metadata").read_bytes()
    if zlib.crc32(table[:-4]) != int.from_bytes(table[-4:], "big"):
        raise ValueError(".metadata is damaged, or another program's")
    for place in pickle.loads(table).storage_data.values():
        with open(Path(folder, place.relative_path), "rb") as file:
            file.seek(place.offset)
            try:  # torch.save's format is zip, with a checksum for every part
                bad = zipfile.ZipFile(io.BytesIO(file.read(place.length))).testzip()
            except zipfile.BadZipFile as error:
                bad = error
        if bad:
            raise ValueError(f"{place.relative_path} is damaged: {bad}")
