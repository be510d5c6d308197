"""Saved training, with torch.distributed.checkpoint (DCP): what N ranks have saved, any other number of ranks reads.

    --save DIR [--save-every K]    DIR/100, DIR/200, ..: a folder per checkpoint, named by the steps behind it
    --resume DIR                   go on from the newest of them that is whole (or from DIR/100 itself)
    --init-from DIR                take the weights alone, and start at step 0

A checkpoint is written aside and renamed into view: it is there as a whole or not at all, and checked to the last byte
(sizes and checksums, notes.json) before use. The last two are kept. What makes the run the same is inside: parameters,
AdamW states, the steps behind it (hence the place in the data), the flags, every rank's random number generator.

DIR is one that all ranks see. Tensors are read with weights_only, but DCP's own table of contents, .metadata, is a
pickle: resume from folders that you trust.
"""
import contextlib
import json
import os
import pickle
import shutil
import sys
import warnings
import zlib
from collections import namedtuple
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from harness.usage import ANY, require

FLAGS = {"save": ("", "folder for checkpoints, each in a folder named by its steps"),
         "save_every": (0, "steps between checkpoints (0: one, at the end)", ANY),
         "resume": ("", "go on from the newest checkpoint in this folder, on any number of ranks"),
         "init_from": ("", "start with the weights of the newest checkpoint in this folder")}
MODEL, COURSE = ("impl", "dtype"), ("seq", "seed", "batch", "data", "pad", "lr", "clip")
Start = namedtuple("Start", "folder steps ranks", defaults=(None, 0, 0))  # ranks: those that saved; 0: weights alone

# ---- which one ---------------------------------------------------------------


def numbered(folder):
    """Steps of the checkpoints in a folder, in order."""
    return sorted(int(path.name) for path in Path(folder).glob("*") if path.name.isdigit()) if folder else []


def identity(args):
    """What a run and its continuation have in common: that of the model, and that of the course of its losses."""
    model = dict(script=Path(sys.argv[0]).stem, **args.cfg._asdict(), **{name: getattr(args, name) for name in MODEL})
    return model, {name: getattr(args, name) for name in COURSE if name not in model}


def checksum(path):
    """-> [bytes, crc32] of a file, without holding it."""
    size = crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def verify(folder):
    """-> the notes of a checkpoint. Raises OSError or ValueError unless its files are to the last byte as saved."""
    text, _, crc = Path(folder, "notes.json").read_bytes().rpartition(b"\n")
    if crc != str(zlib.crc32(text)).encode():
        raise ValueError("notes.json is damaged")
    notes = json.loads(text)
    for name, saved in notes["files"].items():
        if checksum(Path(folder, name)) != saved:
            raise ValueError(f"{name} is damaged")
    return notes


def newest(folder, flag):
    """-> the newest whole checkpoint in a folder, its notes. Those that are not whole are named and passed by."""
    try:
        itself, passed = "notes.json" in os.listdir(folder), []
    except OSError as error:
        require(False, f"{flag} {folder}: {error.strerror}")
    for place in [Path(folder)] if itself else [Path(folder, str(steps)) for steps in reversed(numbered(folder))]:
        try:
            notes = verify(place)
        except (OSError, ValueError) as error:
            passed.append(f"{place}: {getattr(error, 'strerror', None) or error}")
            continue
        if os.environ.get("RANK", "0") == "0":
            print("; ".join([*passed, f"{flag} takes {place}, {notes['steps']} steps behind it"]), flush=True)
        return place, notes
    require(False, f"{flag} {folder}: no whole checkpoint there{': ' * bool(passed)}{'; '.join(passed)}")


def begin(args):
    """Before anything is built -> Start. Bad: one line, exit code 2. Ranks that torchrun has restarted, and jobs that
    SLURM has requeued, go on from the newest checkpoint in --save, if there is one."""
    given, start = args.save or args.resume or args.init_from, Start()
    require(not given or not args.dry_run and args.impl != "both",
            "--save, --resume and --init-from are for one --impl, scratch or torch, and no dry run")
    require(args.save or not args.save_every, "--save-every wants --save DIR")
    require(not (args.resume and args.init_from), "--resume goes on, --init-from starts anew: take one of them")
    again = any(int(os.environ.get(f"{by}_RESTART_COUNT", 0)) for by in ("TORCHELASTIC", "SLURM"))
    restarted = again and numbered(args.save)
    fresh = args.init_from and not restarted
    flag = "--save" if restarted else "--init-from" if fresh else "--resume"
    if source := getattr(args, flag[2:].replace("-", "_")) if restarted or args.resume or fresh else "":
        folder, notes = newest(source, flag)
        for kind, now in zip(("model", "course"), identity(args)):
            for name in now if kind == "model" or not fresh else ():
                saved = notes[kind].get(name)
                require(saved == now[name], f"{flag} {folder}: saved with {name} {saved}, not {now[name]}")
        start = Start(folder) if fresh else Start(folder, notes["steps"], notes["ranks"])
        if restarted and start.steps == args.steps:
            sys.exit(0)  # killed after its last step
        require(start.steps < args.steps, f"--steps {args.steps}: {folder} has {start.steps} behind it already")
    if args.save:
        usable(args.save, start)
    return start


def usable(folder, start):
    """Can the checkpoints of this run be saved there?"""
    try:
        probe = Path(folder, f".{os.getpid()}")
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        wrong = "is a file, give a folder" if os.path.isfile(folder) else error.strerror
        require(False, f"--save {folder}: {wrong}")
    ours = start.ranks and start.folder.resolve().parent == Path(folder).resolve()
    for steps in reversed(numbered(folder)):
        with contextlib.suppress(OSError, ValueError):
            # verify raises if it is damaged: it may be written over
            require(ours and (steps <= start.steps or not verify(Path(folder, str(steps)))),
                    f"--save {folder}: holds step {steps} already: --resume it, or save elsewhere")


# ---- saving ------------------------------------------------------------------


def put(path, data):
    """A file that is on the disk when this returns."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def due(run, step):
    """Is this a step to save after?"""
    args = run.args
    return args.save and ((step + 1) % (args.save_every or args.steps) == 0 or step + 1 == args.steps or run.stopping)


def write(run, step, state):
    """Every rank writes its part, `state`: {name: tensor or DTensor}. What several ranks hold, one of them brings.

    With NumPy a bare dcp.save would do: its ranks agree by object collectives, which need it, and hang without. So here
    each rank writes alone, and the first joins their tables of contents to what dcp.save would have written.
    """
    args, rank, world_size = run.args, dist.get_rank(), dist.get_world_size()
    folder, draft = Path(args.save, f"{step + 1}"), Path(args.save, f".{step + 1}")
    if rank == 0:
        shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed here
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that another rank was faster
        dcp.save(state, checkpoint_id=draft, use_collectives=False)
    generators = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        generators["cuda"] = torch.cuda.get_rng_state()
    torch.save(generators, draft / f"__{rank}_generators.pt")
    mine = {file.name: checksum(file) for file in draft.glob(f"__{rank}_*")}
    put(draft / f"{rank}.json", json.dumps(mine).encode())
    dist.barrier()
    if rank == 0:
        join(draft, world_size, *identity(args), step + 1)
        shutil.rmtree(folder, ignore_errors=True)  # one that is damaged, or it would have been resumed
        draft.rename(folder)
        run.saved.append(step + 1)
        for steps in set(numbered(args.save)) - set([run.first, *run.saved][-2:]):
            shutil.rmtree(Path(args.save, str(steps)))
    dist.barrier()


def join(draft, ranks, model, course, steps):
    """Tables of contents of all ranks -> .metadata; checksums of all and what the run was -> notes.json."""
    parts = [draft / f"__{rank}.metadata" for rank in range(ranks)]
    table, *others = [pickle.loads(part.read_bytes()) for part in parts]  # written by this very run
    for other in others:
        table.storage_data.update(other.storage_data)
        for name, entry in other.state_dict_metadata.items():
            known = getattr(table.state_dict_metadata.setdefault(name, entry), "chunks", [])
            known += [chunk for chunk in getattr(entry, "chunks", []) if chunk not in known]  # of replicated ones, one
    put(draft / ".metadata", pickle.dumps(table))
    sums, files = [draft / f"{rank}.json" for rank in range(ranks)], {".metadata": checksum(draft / ".metadata")}
    for part in sums:
        files |= json.loads(part.read_text())
    for part in parts + sums:
        part.unlink()
    notes = json.dumps(dict(steps=steps, ranks=ranks, model=model, course=course, files=files)).encode()
    put(draft / "notes.json", notes + b"\n" + str(zlib.crc32(notes)).encode())


# ---- loading -----------------------------------------------------------------


def load(folder, state):
    """Fills the tensors of `state` in place -> state. Every rank reads what it needs; they need not talk."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a single process
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def restore_generators(start):
    """Random number generators; a rank that the saved run had not keeps its own."""
    if dist.get_rank() < start.ranks:
        states = torch.load(Path(start.folder, f"__{dist.get_rank()}_generators.pt"), weights_only=True)
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])


# ---- what training holds -----------------------------------------------------


def state_of(model, optimizer, mesh=None):
    """-> {name: tensor or DTensor}, in memory shared with the model and the optimizer's states.

    Of a plain module, parameters and states by the parameters' names. Of fsdp.py's: a flat tensor cut into equal runs
    is what Shard(0) means, so DCP can reshard units of parameters laid end to end, model.units, each with its shard and
    its size, which leaves out the padding.
    """
    if mesh is None:
        named = {name: {"": p.detach(), **optimizer.state[p]} for name, p in model.named_parameters()}
        return {f"{n}.{k}".strip("."): t for n, kinds in named.items() for k, t in kinds.items() if k != "step"}
    if not hasattr(model, "units"):  # torch's own
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    state, home = {}, model.shards[0].device.type
    if home != mesh.device_type:  # with the GPUs' mesh a DTensor would be a copy of an offloaded shard
        mesh = DeviceMesh.from_group(mesh.get_group(), home)
    for i, unit in enumerate(model.units):
        moments = {k: t for k, t in optimizer.state[unit.shard].items() if k != "step"}
        length = max(0, min(unit.shard.numel(), unit.size - mesh.get_local_rank() * unit.shard.numel()))
        for kind, t in {"parameter": unit.shard.detach(), **moments}.items():
            state[f"unit {i} {kind}"] = DTensor.from_local(t[:length], mesh, [Shard(0)], run_check=False,
                                                           shape=(unit.size,), stride=(1,))
    return state


def agree(start):
    """-> is there something to restore? The same on all ranks, or it ends the run: each has looked for itself, and a
    folder that machines share may show one of them what it was a moment ago."""
    if dist.get_backend() == "fake":
        return False
    ends = torch.tensor([start.steps, -start.steps], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(ends, dist.ReduceOp.MAX)  # each rank's own -> replicated
    last, first = ends.tolist()
    require(last == -first, f"--resume: the newest checkpoint has {last} steps behind it here, {-first} there", code=1)
    return start.folder is not None


def restore(start, model, optimizer, mesh=None):
    """Into a model and an AdamW that have not run yet. mesh: None, or that of the ranks that share the shards."""
    if not agree(start):
        return
    named = mesh is None or hasattr(model, "units")
    for p in [p for group in optimizer.param_groups for p in group["params"]] if start.ranks and named else []:
        optimizer.state[p] = {"step": torch.tensor(float(start.steps), dtype=torch.float32, device=p.device),
                              "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    state = load(start.folder, state_of(model, optimizer, mesh))
    restore_generators(start)
    if not named and start.ranks:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    elif not named:
        set_model_state_dict(model, state["model"])
        optimizer.state.clear()


def save(run, step, model, optimizer, mesh=None, brings=True):
    """If this step is one to save after; of ranks that hold the same, one brings it."""
    if due(run, step):
        write(run, step, state_of(model, optimizer, mesh) if brings else {})
