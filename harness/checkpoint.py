"""Saved training: what N ranks have saved, any other number of ranks in any layout reads.

    --save DIR [--save-every K]    DIR/100, DIR/200, ..: a folder per checkpoint, named by its steps
    --resume DIR                   go on from the newest that is whole (or from DIR/100 itself)
    --init-from DIR                take the weights alone, and start at step 0

A checkpoint holds whole tensors under the names of the plain model, and their AdamW states as
NAME.exp_avg and NAME.exp_avg_sq. No rank need have a whole tensor: each tells which boxes of it
lie in its memory, and that is a Piece. So every script and every layout reads every other's.

    rank 0     Piece("up.weight", (8, 4), (0, 0), its rows 0 to 3, writes=True)
    rank 1     Piece("up.weight", (8, 4), (4, 0), its rows 4 to 7, writes=True)

The files are those of torch.distributed.checkpoint (DCP), which torch's own tools read as well. A
checkpoint is written aside and renamed into view: it is there as a whole or not at all, and is
checked to the last byte (sizes and checksums, in notes.json) before use. The last two are kept.
What makes the run the same is inside: parameters, AdamW states, the steps behind it (hence the
place in the data), the flags, every rank's random number generator.

DIR is a folder that all ranks see. One run at a time saves there: it holds a lock. A folder from
somebody else can at worst fail to load: tensors are read with weights_only, and DCP's own table of
contents, .metadata, through an unpickler that admits the classes of that table alone.
"""
import fcntl
import functools
import io
import json
import math
import os
import pickle
import re
import shutil
import socket
import sys
import tempfile
import uuid
import zlib
from collections import namedtuple
from pathlib import Path

import torch
import torch.distributed as dist

from harness.report import say
from harness.usage import agents_store, require

# ---- pieces ------------------------------------------------------------------

Piece = namedtuple("Piece", "name shape start tensor writes")
# name     of the whole tensor, in the plain model; of AdamW's states, + ".exp_avg" or ".exp_avg_sq"
# shape    of the whole tensor, without padding
# start    where this box begins in it, an index for each dimension
# tensor   this rank's box: a view of the memory that training uses, since loading copies into it
# writes   whether this rank, of those that hold the box, is the one that saves it
# Several pieces may be the same box (tied copies, a master and what computes with it): all are
# loaded, each in its own dtype, and one writes.

STATES = ("exp_avg", "exp_avg_sq")  # what AdamW holds for each parameter, besides the step


def pieces_of(named_parameters, optimizer, writes):
    """(name, parameter) pairs of an ordinary module -> pieces of them and of their AdamW states.

    Parameters may be DTensors, of which replicas are written by their first rank. optimizer may be
    None: then the parameters alone. An AdamW that has not run yet has no states: see adamw_states.
    """
    pieces = []
    for name, parameter in named_parameters:
        pieces.append(piece_of(name, parameter, writes))
        if optimizer is None or parameter not in optimizer.state:
            continue
        for kind in STATES:
            if kind in optimizer.state[parameter]:
                state = optimizer.state[parameter][kind]
                pieces.append(piece_of(f"{name}.{kind}", state, writes))
    return pieces


def is_dtensor(tensor):
    """Does not import what makes DTensors, which takes long: where nobody has, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def piece_of(name, tensor, writes):
    """A whole tensor or a DTensor -> its piece on this rank."""
    tensor = tensor.detach()
    if not is_dtensor(tensor):
        start = (0,) * tensor.dim()
        return Piece(name, tuple(tensor.shape), start, tensor, writes)
    [box] = tensor.__create_chunk_list__()
    coordinate = tensor.device_mesh.get_coordinate()
    for position, placement in zip(coordinate, tensor.placements):
        if placement.is_replicate() and position > 0:
            writes = False
    local = tensor.to_local()
    if local.shape != box.sizes:  # _StridedShard: what this rank has does not lie side by side
        raise ValueError(f"{name}: {tensor.placements} of {tuple(tensor.shape)} is no box")
    return Piece(name, tuple(tensor.shape), tuple(box.offsets), local, writes)


def run_pieces(name, shape, first, flat, writes):
    """Pieces of a run, a part of the flattened whole tensor: at most 2n - 1 boxes in n dimensions.

    flat: 1-D, holds the elements first, first + 1, .. of the flattened whole. What of it lies
    before the whole (first is negative) or behind it, such as padding, is left out.
    """
    low = max(first, 0)
    high = min(first + len(flat), math.prod(shape))
    pieces = []
    for start, box, begin in boxes_of_run(tuple(shape), low, high):
        view = flat[begin - first:begin - first + math.prod(box)].view(box)
        pieces.append(Piece(name, tuple(shape), start, view, writes))
    return pieces


def parts_pieces(parts, optimizer, writes):
    """Pieces of flat shards and of their AdamW states.

    parts: (name, shape, first, p): p is a 1-D parameter, the optimizer's, which holds the elements
    first, first + 1, .. of the flattened tensor `name` of this shape.
    """
    pieces = []
    for name, shape, first, p in parts:
        pieces += run_pieces(name, shape, first, p.detach(), writes)
        for kind in STATES:
            if kind in optimizer.state.get(p, {}):
                state = optimizer.state[p][kind]
                pieces += run_pieces(f"{name}.{kind}", shape, first, state, writes)
    return pieces


def boxes_of_run(shape, low, high):
    """Elements low to high of a flattened tensor -> [(start, shape of the box, first element)].

    A run is the end of a row, then whole rows, then the beginning of a row; rows are cut likewise.
    """
    if low >= high:
        return []
    if len(shape) == 0:
        return [((), (), low)]
    if len(shape) == 1:
        return [((low,), (high - low,), low)]
    row_shape = shape[1:]
    size = math.prod(row_shape)
    begin = -(-low // size)  # the rows from begin to end - 1 lie in the run as a whole
    end = high // size
    if begin > end:  # the run begins and ends inside one row
        return boxes_in_row(row_shape, end, low, high)
    # The run begins inside row begin - 1 and ends inside row end. Where it begins or ends between
    # two rows that part is empty, gives no boxes, and its row need not exist (-1, or one too many).
    boxes = boxes_in_row(row_shape, begin - 1, low, begin * size)
    if begin < end:
        start = (begin,) + (0,) * len(row_shape)
        boxes.append((start, (end - begin, *row_shape), begin * size))
    return boxes + boxes_in_row(row_shape, end, end * size, high)


def boxes_in_row(row_shape, row, low, high):
    """As boxes_of_run, for elements low to high of the whole, all of which lie in this row."""
    before = row * math.prod(row_shape)
    boxes = []
    for start, box, begin in boxes_of_run(row_shape, low - before, high - before):
        boxes.append(((row, *start), (1, *box), begin + before))
    return boxes


def adamw_states(optimizer, steps):
    """Makes the states of an AdamW that has not run yet, so that they can be loaded into.

    steps: how many updates they have behind them.
    """
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue  # AdamW holds nothing for it
            state = optimizer.state[parameter]
            if on_device:
                step = torch.tensor(steps, dtype=torch.float32, device=parameter.device)
            else:
                step = torch.tensor(steps, dtype=torch.get_default_dtype())
            state["step"] = step
            for kind in STATES:
                state[kind] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


# ---- which one ---------------------------------------------------------------

Start = namedtuple("Start", "folder steps ranks flag save extra constants",
                   defaults=(None, 0, 0, "", "", {}, {}))
# folder   of the checkpoint to begin with, None: there is none
# steps    that training has behind it there; 0 if the weights alone are wanted
# ranks    how many have saved it; 0 if the weights alone are wanted
# flag     what the user has said to get it: --resume, --init-from, or --save after a restart
# save     the folder that this run saves to, or ""
# extra    what the run that wrote it has given to write()
# constants  of the model there which have no flags: the base of rotary angles, eps of the norms

# Where these differ, so do names or shapes of tensors. seq is not among them, although learned
# positions have a row for each: --init-from may take the first rows of more, see misfit().
SIZES = ("layers", "width", "vocab", "form", "kv_heads", "hidden")
# What the losses of a run and of its continuation depend on. Those that one of the two scripts has
# no flag for are not compared.
COURSE = ("heads", "seq", "dtype", "seed", "batch", "data", "pad", "lr", "clip",
          "warmup", "decay", "min_lr", "train")  # and what a script names: Flag.course


def identity(args):
    """What a run tells about itself in its checkpoints -> {name: value}."""
    mine = {"script": Path(sys.argv[0]).stem, "impl": args.impl, **args.cfg._asdict()}
    for name in (*COURSE, *args.course):
        if name not in mine and hasattr(args, name):
            mine[name] = getattr(args, name)
    mine["course"] = args.course
    mine["held_out"] = bool(getattr(args, "eval_every", 0))  # the corpus is shorter then
    mine["job"] = job()
    if getattr(args, "decay", "none") != "none":
        mine["steps"] = args.steps  # the rate at every step depends on it
    return mine


def job():
    """-> {launcher: its name for this job, which stays when it starts the job's ranks again}."""
    return {"TORCHELASTIC": name_by_torchrun(), "SLURM": os.environ.get("SLURM_JOB_ID", "")}


@functools.cache
def name_by_torchrun():
    """The --rdzv_id, which --standalone makes up; "" without torchrun.

    Where neither flag is given, torchrun calls every job "none". Then the first rank that asks
    makes up a name here, and it is kept in the store of torchrun's agent, which stays as long as
    torchrun does.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if name != "none":
        return name
    store = agents_store()
    if store is None:
        return ""
    return store.compare_set("the job's name", "", uuid.uuid4().hex).decode()


def other_course(saved, now, fresh):
    """-> in words, why this run cannot go on from a checkpoint, or "".

    saved, now: identity() of the run that wrote it and of this one. fresh: the weights alone are
    wanted. Then the course of training does not matter, but the sizes do, and the number of heads,
    which no shape shows.
    """
    names = ["heads", *SIZES]
    if not fresh:
        names += [*COURSE, *now["course"], "held_out", "steps"]
    for name in names:
        if name in saved and name in now and saved[name] != now[name]:
            return f"saved with {name} {saved[name]}, not {now[name]}"
    return ""


def numbered(folder):
    """-> the steps of the checkpoints in a folder, in order."""
    if not folder:
        return []
    found = []
    for path in Path(folder).glob("*"):
        if path.name.isdecimal() and path.name == str(int(path.name)):
            found.append(int(path.name))
    return sorted(found)


def is_foreign(place):
    """Is it no folder, or is there a file in it that no checkpoint has? Then it must stay."""
    if not place.is_dir():
        return True
    own = re.compile(r"notes\.json|\.metadata|__\d+_0\.distcp|__\d+_generators\.pt")
    return not all(own.fullmatch(path.name) for path in place.iterdir())


def checksum(path):
    """-> [bytes, crc32] of a file, without holding it."""
    size = 0
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return [size, crc]


def notes_of(folder):
    """-> the notes of a checkpoint. Raises OSError or ValueError unless they are as saved."""
    text, _, crc = Path(folder, "notes.json").read_bytes().rpartition(b"\n")
    if crc != str(zlib.crc32(text)).encode():
        raise ValueError("notes.json is damaged")
    notes = json.loads(text)
    if not isinstance(notes, dict) or not {"steps", "ranks", "files"} <= notes.keys():
        raise ValueError("notes.json is no checkpoint's")
    return notes


def verify(folder):
    """-> the notes of a checkpoint. Raises OSError or ValueError unless all files are as saved."""
    notes = notes_of(folder)
    for name, saved in notes["files"].items():
        if checksum(file_in(folder, name)) != saved:
            raise ValueError(f"{name} is damaged")
    read_table(Path(folder, ".metadata"))
    return notes


def file_in(folder, name):
    """-> the path of a file of a checkpoint. Raises ValueError for a name that leads elsewhere."""
    if Path(name).name != name:
        raise ValueError(f"{name} is not in the folder")
    return Path(folder, name)


def is_whole(folder):
    try:
        verify(folder)
    except (OSError, ValueError):
        return False
    return True


def reason(error):
    """-> what an exception says; of the operating system's, without its number and path."""
    return getattr(error, "strerror", None) or str(error)


def newest(folder, flag, quiet=False):
    """-> the newest whole checkpoint in a folder, and its notes.

    Those that are not whole are named, unless quiet, and passed by. None at all is bad usage.
    """
    try:
        is_checkpoint = "notes.json" in os.listdir(folder)
    except OSError as error:
        require(False, f"{flag} {folder}: {reason(error)}")
    places = [Path(folder)]
    if not is_checkpoint:
        places = [Path(folder, str(steps)) for steps in reversed(numbered(folder))]
    passed = []
    for place in places:
        try:
            notes = verify(place)
        except (OSError, ValueError) as error:
            passed.append(f"{place}: {reason(error)}")
            continue
        if os.environ.get("RANK", "0") == "0" and not quiet:
            taken = f"{flag} takes {place}, {notes['steps']} steps behind it"
            say("; ".join([*passed, taken]))
        return place, notes
    why = "; ".join(["no whole checkpoint there", *passed])
    require(False, f"{flag} {folder}: {why}")


def source(args):
    """-> (flag, folder) that say where to begin, or ("", "").

    Ranks that torchrun has restarted, and jobs that SLURM has requeued, go on from what they have
    saved themselves. Until there is something, they begin as the first start of the job did: with
    --resume or --init-from, or at step 0. What other jobs have saved does not count as their own.
    """
    for launcher in ("TORCHELASTIC", "SLURM"):
        restarts = int(os.environ.get(f"{launcher}_RESTART_COUNT", 0))
        if restarts and has_own(args.save, launcher):
            return "--save", args.save
    if args.resume:
        return "--resume", args.resume
    if args.init_from:
        return "--init-from", args.init_from
    return "", ""


def has_own(folder, launcher):
    """Is there a whole checkpoint in a folder that this job has saved, as its launcher names jobs?
    """
    for steps in numbered(folder):
        try:
            notes = notes_of(Path(folder, str(steps)))
        except (OSError, ValueError):
            continue
        name = notes.get("identity", {}).get("job", {}).get(launcher)
        if name and name == job()[launcher] and is_whole(Path(folder, str(steps))):
            return True
    return False


def begin(args):
    """Before anything is built -> Start. Bad usage: one line, exit code 2."""
    if args.save or args.resume or args.init_from:
        require(args.impl != "both" and not args.dry_run, "--save, --resume and --init-from are "
                "for one --impl, scratch or torch, and no dry run")
    require(args.save or not args.save_every, "--save-every wants --save DIR")
    require(not (args.resume and args.init_from),
            "--resume goes on, --init-from starts anew: take one of them")
    flag, folder = source(args)
    start = Start(save=args.save)
    if flag:
        fresh = flag == "--init-from"
        place, notes = newest(folder, flag)
        differs = other_course(notes.get("identity", {}), identity(args), fresh)
        require(not differs, f"{flag} {place}: {differs}")
        found = notes.get("identity", {})
        constants = {name: found[name] for name in ("theta", "eps") if name in found}
        start = start._replace(folder=place, flag=flag, constants=constants)
        if not fresh:
            start = start._replace(
                steps=notes["steps"], ranks=notes["ranks"], extra=notes.get("extra", {}))
            if flag == "--save" and start.steps == args.steps:
                sys.exit(0)  # it was killed after its last step
            require(start.steps < args.steps,
                    f"--steps {args.steps}: {place} has {start.steps} behind it already")
    if args.save:
        refuse_unusable(args.save, start)
    return start


def refuse_unusable(folder, start):
    """Ends the run if its checkpoints cannot be saved there."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        wrong = reason(error)
        if os.path.isfile(folder):
            wrong = "is a file, give a folder"
        require(False, f"--save {folder}: {wrong}")
    # Does this run go on from a checkpoint of this folder? ranks is 0 if it takes weights alone.
    goes_on = start.ranks and start.folder.resolve().parent == Path(folder).resolve()
    for steps in reversed(numbered(folder)):
        place = Path(folder, str(steps))
        require(not is_foreign(place),
                f"--save {folder}: {steps} in it is no checkpoint, save elsewhere")
        if goes_on and steps <= start.steps:
            continue
        # one that is damaged may be written over
        require(not is_whole(place),
                f"--save {folder}: holds step {steps} already: --resume it, or save elsewhere")


def claim(folder):
    """Keeps other runs from saving there as long as this process lives -> "", or who does so.

    The operating system drops the lock when the process ends, however it ends: none is left behind.
    """
    try:
        lock = os.open(Path(folder, ".lock"), os.O_RDWR | os.O_CREAT)  # closed with the process
    except OSError as error:
        return f"--save {folder}: .lock: {reason(error)}"
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        owner = os.read(lock, 1000).decode().strip()
        return f"--save {folder}: {owner} is saving there: take another folder"
    except OSError:
        return ""  # a file system without locks
    os.truncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return ""


# ---- what ranks tell each other (no object collectives: these need NumPy) -----


def collectives_device():
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def first_said(sentence):
    """-> the sentence of the first rank that has one, the same on all ranks, or ""."""
    data = sentence.encode(errors="backslashreplace")
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=collectives_device())
    sizes[dist.get_rank()] = len(data)
    dist.all_reduce(sizes)  # partial -> replicated
    sizes = sizes.tolist()
    speakers = [rank for rank, size in enumerate(sizes) if size]
    if not speakers:
        return ""
    first = speakers[0]
    letters = torch.zeros(sizes[first], dtype=torch.uint8, device=collectives_device())
    if dist.get_rank() == first:
        letters.copy_(torch.tensor([*data], dtype=torch.uint8))
    dist.broadcast(letters, first)  # the first speaker's -> replicated
    return bytes(letters.tolist()).decode()


def agree(start):
    """-> is there something to restore? The same on all ranks, or it ends the run.

    Each rank has looked for itself, and a folder that machines share may show one of them what it
    was a moment ago.
    """
    place = "no checkpoint"
    if start.folder is not None:
        # the last part of the path alone: machines may have folders of their own
        place = f"{start.flag} {start.folder.name} with {start.steps} steps behind it"
    first = first_said(place)  # rank 0's
    other = first_said("" if place == first else place)  # the first that is not the same
    require(not other, f"ranks begin with different checkpoints: {first} here, {other} there",
            code=1)
    return start.folder is not None


# ---- DCP's table of contents --------------------------------------------------


def dcp():
    """-> the module of DCP's classes. It is imported when a checkpoint is written or read: it takes
    half as long as the import of torch, which a run without checkpoints need not wait for."""
    from torch.distributed.checkpoint import metadata
    return metadata


@functools.cache
def admitted():
    """-> {torch's name in the pickle of a table of contents: what it becomes here}."""
    from torch.distributed.checkpoint import filesystem, metadata

    class Properties(metadata.TensorProperties):
        """Properties as any torch has written them: newer ones append what nothing here needs."""

        def __setstate__(self, state):
            # dtype, layout, requires_grad, memory format, pin_memory
            super().__setstate__(state[:5])

    found = {"torch.distributed.checkpoint.filesystem._StorageInfo": filesystem._StorageInfo,
             "torch.serialization._get_layout": torch.serialization._get_layout,
             "torch.Size": torch.Size}
    for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata",
                 "_MEM_FORMAT_ENCODING"):
        found[f"torch.distributed.checkpoint.metadata.{name}"] = getattr(metadata, name)
    found["torch.distributed.checkpoint.metadata.TensorProperties"] = Properties
    for kind in vars(torch).values():
        if isinstance(kind, torch.dtype):
            found[str(kind)] = kind
    return found


class TableUnpickler(pickle.Unpickler):
    """Unpickles DCP's table of contents, and nothing that could run code."""

    def find_class(self, module, name):
        full_name = f"{module}.{name}"
        if full_name not in admitted():
            raise pickle.UnpicklingError(f"{full_name} has no place in a table of contents")
        return admitted()[full_name]


def read_table(path):
    """-> the Metadata in a file of DCP's. Raises ValueError if there is anything else in it."""
    with open(path, "rb") as file:
        try:
            table = TableUnpickler(file).load()
        except Exception as error:  # damaged bytes can make an unpickler raise anything
            raise ValueError(f"{path}: {error}") from error
    if not isinstance(table, dcp().Metadata):
        raise ValueError(f"{path} is no table of contents")
    return table


def add_entry(entries, name, shape, dtype, boxes):
    """Adds boxes to a tensor's entry in a table, which is made where there is none.

    A piece that is not written brings no boxes, and may be of another dtype (a bf16 copy of an fp32
    master): the entry has the dtype of what is written.
    """
    if name not in entries:
        entries[name] = dcp().TensorStorageMetadata(dcp().TensorProperties(dtype=dtype), shape, [])
    entry = entries[name]
    if entry.size != shape:
        raise ValueError(f"{name} is {tuple(entry.size)} and {tuple(shape)}")
    if boxes:
        entry.properties = dcp().TensorProperties(dtype=dtype)
        entry.chunks.extend(boxes)


def box_of(piece):
    return dcp().ChunkStorageMetadata(torch.Size(piece.start), piece.tensor.shape)


def common_part(one, other):
    """Two boxes of a tensor -> start (in the tensor) and shape of what both have, or None."""
    start = []
    shape = []
    for dim in range(len(one.sizes)):
        low = max(one.offsets[dim], other.offsets[dim])
        high = min(one.offsets[dim] + one.sizes[dim], other.offsets[dim] + other.sizes[dim])
        if low >= high:
            return None
        start.append(low)
        shape.append(high - low)
    return start, shape


def part(tensor, box, start, shape):
    """The view of a box's tensor that begins at `start` of the whole."""
    for dim, length in enumerate(shape):
        tensor = tensor.narrow(dim, start[dim] - box.offsets[dim], length)
    return tensor


# ---- saving ------------------------------------------------------------------


def put(path, data):
    """Writes a file that is on the disk when this returns."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def due(args, step, stopping=False):
    """Is this a step to save after? stopping: this run is asked to end."""
    if not args.save:
        return False
    behind = step + 1
    return behind % (args.save_every or args.steps) == 0 or behind == args.steps or stopping


def write(folder, steps, pieces, identity, keep=0, extra=None):
    """Saves FOLDER/STEPS, all ranks together -> whether that has been possible.

    If not (a full disk), rank 0 has said so in a line, nothing of it is left, and what was saved
    before is still there. Raises RuntimeError unless ranks write each number of a tensor once.

    pieces: this rank's. identity: identity(args). keep: the steps of one earlier checkpoint that
    stays; all others go. extra: a dict of numbers and words, which comes back as Start.extra.

    With NumPy a bare dcp.save would do: its ranks agree by object collectives, which need it, and
    hang without. So here each rank writes alone, and the first joins their tables of contents to
    what dcp.save would have written.
    """
    rank = dist.get_rank()
    place = Path(folder, str(steps))
    draft = Path(folder, f".{steps}")
    if rank == 0:
        shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed here
    dist.barrier()
    failed = first_said(attempt(write_part, draft, rank, pieces))  # the same on all ranks
    wrong = ""
    if rank == 0 and not failed:
        ranks = dist.get_world_size()
        notes = {"steps": steps, "ranks": ranks, "identity": identity, "extra": extra or {}}
        wrong, failed = join(draft, place, notes)
    wrong = first_said(wrong)  # rank 0 alone knew these two
    failed = first_said(failed)
    if rank == 0:
        clear(place, draft, wrong or failed, keep)
    if wrong:
        raise RuntimeError(wrong)
    if rank == 0 and failed:
        print(f"--save {place}: {failed}: not saved", file=sys.stderr, flush=True)
    dist.barrier()
    return not failed


def join(draft, place, notes):
    """On rank 0: makes a checkpoint of what all ranks have written -> wrong, failed.

    Both are words, or "". wrong: which pieces do not make up a tensor, the caller's fault. failed:
    why the disk did not take it.
    """
    try:
        table = table_of_ranks(draft, notes["ranks"])
    except OSError as error:
        return "", reason(error)
    except ValueError as error:  # ranks differ in the shape of a tensor
        return str(error), ""
    wrong = uncovered(table)
    if wrong:
        return wrong, ""
    return "", attempt(publish, draft, place, notes, table)


def clear(place, draft, failed, keep):
    """Removes what has failed, or else what the new checkpoint has made superfluous."""
    shutil.rmtree(draft, ignore_errors=True)
    if failed:
        return
    for steps in numbered(place.parent):
        other = place.parent / str(steps)
        if steps not in (int(place.name), keep) and not is_foreign(other):
            shutil.rmtree(other, ignore_errors=True)


def write_whole(folder, state, identity):
    """Saves FOLDER/0 from {name: whole tensor}, in this process alone: --init-from reads it.

    A FOLDER/0 that is there already is replaced.
    """
    draft = Path(folder, ".0")
    shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed here
    draft.mkdir(parents=True)
    write_part(draft, 0, [piece_of(name, tensor, writes=True) for name, tensor in state.items()])
    notes = {"steps": 0, "ranks": 1, "identity": identity, "extra": {}}
    publish(draft, Path(folder, "0"), notes, table_of_ranks(draft, 1))


def attempt(function, *arguments):
    """Calls a function that writes -> "", or in words, why the disk did not take it."""
    try:
        function(*arguments)
    except Exception as error:
        # on a full disk torch.save raises an error of its own, with the OSError as its context
        cause = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is None:
            raise
        return reason(cause)
    return ""


def write_part(draft, rank, pieces):
    """This rank's files: its boxes, its random number generators, a table and checksums of them."""
    draft.mkdir(exist_ok=True)
    table = write_boxes(draft / f"__{rank}_0.distcp", pieces)
    put(draft / f"__{rank}.metadata", pickle.dumps(table))
    generators = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        generators["cuda"] = torch.cuda.get_rng_state()
    torch.save(generators, draft / f"__{rank}_generators.pt")
    sums = {file.name: checksum(file) for file in draft.glob(f"__{rank}_*")}
    put(draft / f"{rank}.json", json.dumps(sums).encode())


def write_boxes(path, pieces):
    """Writes this rank's boxes into a file, one after the other -> their table of contents.

    What this rank holds and does not write has an entry without boxes, so that a tensor that
    nobody writes is seen.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # see dcp()

    table = dcp().Metadata({}, storage_data={})
    with open(path, "wb") as file:
        for piece in pieces:
            boxes = []
            if piece.writes and piece.tensor.numel():
                boxes = [box_of(piece)]
                begin = file.tell()
                # a copy: of a view torch.save would write the whole storage
                tensor = piece.tensor.to("cpu", copy=True)
                torch.save(tensor, file)
                where = _StorageInfo(path.name, begin, file.tell() - begin)
                table.storage_data[dcp().MetadataIndex(piece.name, piece.start)] = where
            add_entry(table.state_dict_metadata, piece.name, torch.Size(piece.shape),
                      piece.tensor.dtype, boxes)
        file.flush()
        os.fsync(file.fileno())
    return table


def table_of_ranks(draft, ranks):
    """Joins the tables of contents of all ranks -> Metadata."""
    table = dcp().Metadata({}, storage_data={}, version="1.0.0")
    for rank in range(ranks):
        theirs = read_table(draft / f"__{rank}.metadata")
        table.storage_data.update(theirs.storage_data)
        for name, entry in theirs.state_dict_metadata.items():
            add_entry(table.state_dict_metadata, name, entry.size, entry.properties.dtype,
                      entry.chunks)
    return table


def uncovered(table):
    """-> in words, which tensor is not written exactly once, or ""."""
    for name, entry in table.state_dict_metadata.items():
        written = sum(math.prod(box.sizes) for box in entry.chunks)
        inside = all(is_inside(box, entry.size) for box in entry.chunks)
        if written != math.prod(entry.size) or not inside or overlap(entry.chunks):
            return (f"checkpoint: {name} of {tuple(entry.size)} is not written exactly once: "
                    f"{written} of {math.prod(entry.size)} elements, in {len(entry.chunks)} boxes")
    return ""


def is_inside(box, shape):
    ends = [start + size for start, size in zip(box.offsets, box.sizes)]
    return all(end <= size for end, size in zip(ends, shape))


def overlap(boxes):
    """Do any two of these boxes have an element in common?"""
    boxes = sorted(boxes, key=lambda box: tuple(box.offsets))
    for i, box in enumerate(boxes):
        for other in boxes[i + 1:]:
            # a scalar has no dimensions
            if box.sizes and other.offsets[0] >= box.offsets[0] + box.sizes[0]:
                break  # those behind it begin later still
            if common_part(box, other):
                return True
    return False


def publish(draft, place, notes, table):
    """On rank 0: completes what all ranks have written, and renames it into view."""
    put(draft / ".metadata", pickle.dumps(table))
    files = {".metadata": checksum(draft / ".metadata")}
    for rank in range(notes["ranks"]):
        sums = draft / f"{rank}.json"
        files.update(json.loads(sums.read_text()))
        sums.unlink()
        (draft / f"__{rank}.metadata").unlink()
    text = json.dumps({**notes, "files": files}).encode()
    put(draft / "notes.json", text + b"\n" + str(zlib.crc32(text)).encode())
    # what write() finds there is damaged: refuse_unusable() has refused folders with a whole one
    shutil.rmtree(place, ignore_errors=True)
    draft.rename(place)


# ---- loading -----------------------------------------------------------------


def is_state(name):
    """Is this the name of an AdamW state?"""
    return name.endswith(tuple(f".{kind}" for kind in STATES))


def misfit(table, pieces):
    """-> in words, why this rank's pieces cannot be read from a checkpoint, or ""."""
    for piece in pieces:
        if piece.name not in table.state_dict_metadata:
            return f"it has no {piece.name}"
        saved = tuple(table.state_dict_metadata[piece.name].size)
        if saved == piece.shape:
            continue
        # What has a row for each position: a shorter --seq uses the first ones. Other first
        # dimensions are SIZES, which have been compared.
        if saved[1:] == piece.shape[1:] and saved[0] > piece.shape[0]:
            continue
        return f"{piece.name} is {saved} there, {piece.shape} here"
    return ""


def unclaimed(table, pieces, sum_over_ranks=None):
    """-> in words, which weight of a checkpoint has no place in these pieces, or "".

    sum_over_ranks: dist.all_reduce if the pieces of all ranks together are to have the places; None
    if this process is alone.
    """
    names = sorted(name for name in table.state_dict_metadata if not is_state(name))
    held = {piece.name for piece in pieces}
    counts = torch.tensor([name in held for name in names], dtype=torch.int64)
    if sum_over_ranks is not None:
        counts = counts.to(collectives_device())
        sum_over_ranks(counts)
    for name, count in zip(names, counts.tolist()):
        if count == 0:
            return f"its {name} is not in this model"
    return ""


@torch.no_grad()
def load(folder, pieces):
    """Fills the pieces' tensors, whatever their dtype. Every rank reads what it needs, alone.

    Raises ValueError if a name or a shape is not there.
    """
    table = read_table(Path(folder, ".metadata"))
    wrong = misfit(table, pieces)
    if wrong:
        raise ValueError(f"{folder}: {wrong}")
    by_name = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    for name, wanted in by_name.items():
        for box in table.state_dict_metadata[name].chunks:
            shared = [common_part(box, box_of(piece)) for piece in wanted]
            if not any(shared):
                continue
            saved = read_box(folder, table.storage_data[dcp().MetadataIndex(name, box.offsets)])
            for piece, common in zip(wanted, shared):
                if common:
                    start, shape = common
                    target = part(piece.tensor, box_of(piece), start, shape)
                    target.copy_(part(saved, box, start, shape))


def read_box(folder, where):
    with open(file_in(folder, where.relative_path), "rb") as file:
        file.seek(where.offset)
        data = io.BytesIO(file.read(where.length))
    return torch.load(data, map_location="cpu", weights_only=True)


def restore(start, pieces, optimizer):
    """Begins where a checkpoint ends, all ranks together.

    start: what begin() has returned. pieces: callable -> this rank's pieces. optimizer: an AdamW
    that has not run yet, or something with its param_groups and state.
    """
    if not start.flag and not start.save:
        return
    found = agree(start)
    if start.save:
        other = ""
        if dist.get_rank() == 0:
            other = claim(start.save)
        other = first_said(other)
        require(not other, other)
    if not found:
        return
    if start.ranks:  # not --init-from, which takes the weights alone
        # in fp16 some steps are skipped, and "updates" says how many were not
        adamw_states(optimizer, start.extra.get("updates", start.steps))
    mine = pieces()
    table = read_table(Path(start.folder, ".metadata"))
    wrong = first_said(misfit(table, mine))
    if not wrong:
        wrong = unclaimed(table, mine, dist.all_reduce)  # partial -> replicated
    require(not wrong, f"{start.flag} {start.folder}: {wrong}")
    load(start.folder, mine)
    if start.ranks:
        restore_generators(start)


def read_plain(start, model, optimizer=None):
    """Loads a checkpoint into an ordinary module, in this process alone.

    With an AdamW that has not run yet its states are loaded, too. Raises ValueError if names or
    shapes differ.
    """
    if optimizer is not None:
        # as in restore()
        adamw_states(optimizer, start.extra.get("updates", start.steps))
    pieces = pieces_of(model.named_parameters(), optimizer, writes=False)
    wrong = unclaimed(read_table(Path(start.folder, ".metadata")), pieces)
    if wrong:
        raise ValueError(f"{start.folder}: {wrong}")
    load(start.folder, pieces)


def read_whole(folder):
    """-> {name: tensor} of all that a checkpoint holds, AdamW's states among them."""
    table = read_table(Path(folder, ".metadata"))
    state = {}
    for name, entry in table.state_dict_metadata.items():
        state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    load(folder, [piece_of(name, tensor, writes=False) for name, tensor in state.items()])
    return state


def restore_generators(start):
    """Random number generators; a rank beyond those of the saved run keeps its own."""
    if dist.get_rank() < start.ranks:
        file = Path(start.folder, f"__{dist.get_rank()}_generators.pt")
        states = torch.load(file, weights_only=True)
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
