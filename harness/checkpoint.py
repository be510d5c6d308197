"""Saved training: what N ranks have saved, any other number of ranks in any layout reads.

    --save DIR [--save-every K]    DIR/100, DIR/200, ..: a folder per checkpoint, named by its steps
    --save-async                   training goes on while they are written
    --resume DIR                   go on from the newest that is whole (or from DIR/100 itself)
    --init-from DIR                take the weights alone, and start at step 0

A checkpoint holds whole tensors under the names of the plain model, and their AdamW states as
NAME.exp_avg and NAME.exp_avg_sq. No rank need have a whole tensor: each tells which boxes of it
lie in its memory, and that is a Piece. So every script and every layout reads every other's.

    rank 0     Piece("up.weight", (8, 4), (0, 0), its rows 0 to 3, writes=True)
    rank 1     Piece("up.weight", (8, 4), (4, 0), its rows 4 to 7, writes=True)

The files are those of torch.distributed.checkpoint: see dcp.py. A checkpoint is written aside and
renamed into view: it is there as a whole or not at all. Before use the ranks share out its files,
and check each to the last byte (sizes and checksums, in notes.json). The last two are kept: where
the newest is damaged, a line says so, and all ranks go on from the one before.
What makes the run the same is inside: parameters, AdamW states, the steps behind it (hence the
place in the data), the flags, every rank's random number generator.

DIR is a folder that all ranks see. One run at a time saves there.
"""
import contextlib
import json
import math
import os
import pickle
import re
import shutil
import sys
import tempfile
import zlib
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from harness.report import say
from harness.usage import require


def dcp():
    """-> harness.dcp. It takes half as long as torch to load, and a run without need not wait."""
    from harness import dcp

    return dcp


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
        for full_name, tensor in with_states(name, parameter, optimizer):
            pieces.append(piece_of(full_name, tensor, writes))
    return pieces


def with_states(name, parameter, optimizer):
    """-> [(name, tensor)] of a parameter and of what AdamW, if it has run, holds for it."""
    found = [(name, parameter.detach())]
    if optimizer is not None:
        states = optimizer.state.get(parameter, {})
        found += [(f"{name}.{kind}", states[kind]) for kind in STATES if kind in states]
    return found


def piece_of(name, tensor, writes):
    """A whole tensor or a DTensor -> its piece on this rank."""
    tensor = tensor.detach()
    if not hasattr(tensor, "full_tensor"):
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
    for start, box in boxes_of_run(shape, low, high):
        view = flat[low - first:low - first + math.prod(box)].view(box)
        pieces.append(Piece(name, tuple(shape), start, view, writes))
        low += view.numel()
    return pieces


def part_pieces(name, shape, first, p, optimizer, writes):
    """Pieces of a part of a parameter, and of its AdamW states.

    p: a 1-D parameter, the optimizer's, which holds the elements first, first + 1, .. of the
    flattened tensor `name` of this shape.
    """
    pieces = []
    for full_name, flat in with_states(name, p, optimizer):
        pieces += run_pieces(full_name, shape, first, flat, writes)
    return pieces


def of_whole(piece, dim, whole, index):
    """A box of one of equally large cuts along `dim` -> the box of the whole tensor, which has
    `whole` there; what is behind that is padding. index: of the cut."""
    start = list(piece.start)
    start[dim] += index * piece.shape[dim]
    shape = list(piece.shape)
    shape[dim] = whole
    room = max(0, whole - start[dim])
    tensor = piece.tensor.narrow(dim, 0, min(room, piece.tensor.shape[dim]))
    return piece._replace(shape=tuple(shape), start=tuple(start), tensor=tensor)


def of_stack(piece, index, rename):
    """A box of one of equally large stacks -> a box of each tensor in it. index: of the stack.

    rename(name of the stacks, number) -> the name of that tensor of all of them.
    """
    first = index * piece.shape[0] + piece.start[0]
    return [Piece(rename(piece.name, number), piece.shape[1:], piece.start[1:], box, piece.writes)
            for number, box in enumerate(piece.tensor, first)]


def boxes_of_run(shape, low, high):
    """Elements low to high of a flattened tensor -> [(start, shape of the box)], in order.

    A run is the end of a row, then whole rows, then the beginning of a row; rows are cut likewise.
    """
    if low >= high:
        return []
    if not shape:
        return [((), ())]
    size = math.prod(shape[1:])  # of a row
    first = min(-(-low // size) * size, high)  # where whole rows begin
    last = max(high // size * size, first)  # and end
    boxes = []
    for begin, end in ((low, first), (last, high)):
        row = begin // size
        for start, box in boxes_of_run(shape[1:], begin - row * size, end - row * size):
            boxes.append(((row, *start), (1, *box)))
    if first < last:
        start = (first // size, *[0] * len(shape[1:]))
        boxes.append((start, ((last - first) // size, *shape[1:])))
    return sorted(boxes)


def adamw_states(optimizer, start):
    """Makes the states of common's AdamW that has not run yet, so that they can be loaded into."""
    steps = start.extra.get("updates", start.steps)  # in fp16 some steps are skipped
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:  # else AdamW holds nothing for it
                state = optimizer.state[parameter]
                # a fused AdamW has it in fp32, where the parameter is
                state["step"] = torch.full((), steps, dtype=torch.float32,
                                           device=parameter.device)
                for kind in STATES:
                    state[kind] = torch.zeros_like(parameter)


# ---- which one ---------------------------------------------------------------

Start = namedtuple("Start", "folder files flag save damaged group steps ranks extra constants",
                   defaults=(None, {}, "", "", {}, None, 0, 0, {}, {}))
# folder   of the checkpoint to begin with, None: there is none
# files    of it: {name: checksum()}
# flag     what the user has said to get it: --resume, --init-from, or --save after a restart
# save     the folder that this run saves to, or ""
# damaged  {folder: what is wrong} of newer ones, which are not taken
# group    of all ranks, on the CPU: what they tell each other about checkpoints goes through it
# steps    that training has behind it there; 0 if the weights alone are wanted
# ranks    how many have saved it; 0 if the weights alone are wanted
# extra    what the run that wrote it has added: see Side.extra
# constants  of the model there which have no flags: the base of rotary angles, eps of the norms

# Where these differ, so do names or shapes of tensors. Not seq, although learned positions have a
# row for each: --init-from may take the first rows of more, see restore().
SIZES = ("layers", "width", "vocab", "form", "kv_heads", "hidden")
# What losses depend on. What one of two scripts has no flag for is not compared.
COURSE = ("heads", "seq", "dtype", "seed", "batch", "data", "pad", "lr", "clip",
          "warmup", "decay", "min_lr", "train")  # and what a script names: Flag.course


def identity(args):
    """What a run tells about itself in its checkpoints -> {name: value}."""
    mine = {name: getattr(args, name) for name in (*COURSE, *args.course)}
    mine.update(args.cfg._asdict())
    held_out = bool(args.eval_every)  # the corpus is shorter then
    mine.update(course=args.course, job=job(), held_out=held_out)
    if args.decay != "none":
        mine["steps"] = args.steps  # the rate at every step depends on it
    return mine


def numbered(folder):
    """-> the steps of the checkpoints in a folder, in order."""
    names = [path.name for path in Path(folder).glob("[0-9]*")]
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


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
    """-> the notes of a checkpoint. Raises OSError or ValueError unless they are as saved, and all
    files there and as long as they were. What is in the files is not read: see damage().
    """
    text, _, crc = Path(folder, "notes.json").read_bytes().rpartition(b"\n")
    if crc != str(zlib.crc32(text)).encode():
        raise ValueError("notes.json is damaged")
    notes = json.loads(text)
    if not isinstance(notes, dict) or not {"steps", "ranks", "files"} <= notes.keys():
        raise ValueError("notes.json is no checkpoint's")
    for name, (size, _) in notes["files"].items():
        if Path(name).name != name:
            raise ValueError(f"{name} is not in the folder")
        if Path(folder, name).stat().st_size != size:
            raise ValueError(f"{name} is damaged")
    return notes


def damage(folder, files, rank=0, ranks=1):
    """-> in words, what is wrong with a checkpoint's files, or "".

    files: of its notes. Each of `ranks` ranks looks at another part of them.
    """
    largest_first = sorted(files, key=lambda name: files[name], reverse=True)
    try:
        for name in largest_first[rank::ranks]:
            if checksum(Path(folder, name)) != files[name]:
                return f"{name} is damaged"
        dcp().read_table(folder)
    except (OSError, ValueError) as error:
        return reason(error)
    return ""


def reason(error):
    """-> what an exception says; of the operating system's, without its number and path."""
    return getattr(error, "strerror", None) or str(error)


def newest(folder, flag, damaged):
    """-> the newest whole checkpoint in a folder, or the folder if it is one itself, and its notes.

    damaged: {folder: what is wrong}; to which those whose notes cannot be read are added.
    """
    places = [Path(folder)]
    if not Path(folder, "notes.json").exists():
        places = [Path(folder, str(steps)) for steps in reversed(numbered(folder))]
    for place in places:
        if place in damaged:
            continue
        try:
            return place, notes_of(place)
        except (OSError, ValueError) as error:
            damaged[place] = reason(error)
    require(False, "; ".join([f"{flag} {folder}: no whole checkpoint there", *words_for(damaged)]))


def words_for(damaged):
    return [f"{place}: {wrong}" for place, wrong in damaged.items()]


def source(args):
    """-> (flag, folder) that say where to begin, or ("", "").

    Ranks that torchrun has restarted, and jobs that SLURM has requeued, go on from what they have
    saved themselves. Until there is something, they begin as the first start of the job did: with
    --resume or --init-from, or at step 0. What other jobs have saved does not count as their own.
    """
    counts = [os.environ.get(f"{launcher}_RESTART_COUNT", "0")
              for launcher in ("TORCHELASTIC", "SLURM")]
    if args.save and counts != ["0", "0"]:
        for steps in numbered(args.save):
            # what is damaged, or of weights from elsewhere, is passed by
            with contextlib.suppress(OSError, ValueError, LookupError):
                if notes_of(Path(args.save, str(steps)))["identity"]["job"] == job():
                    return "--save", args.save
    for flag, folder in (("--resume", args.resume), ("--init-from", args.init_from)):
        if folder:
            return flag, folder
    return "", ""


def job():
    """The launcher's name for this job, which stays when its ranks are started again."""
    return os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "")


def begin(args, damaged=None):
    """Before anything is built -> Start; settle() is next. damaged: as in Start."""
    if args.save or args.resume or args.init_from:
        require(args.impl in ("scratch", "torch") and not args.dry_run, "--save, --resume and "
                "--init-from are for one --impl, scratch or torch, and no dry run")
    require(args.save or not args.save_every, "--save-every wants --save DIR")
    require(args.save or not args.save_async, "--save-async wants --save DIR")
    require(not (args.resume and args.init_from),
            "--resume goes on, --init-from starts anew: take one of them")
    flag, folder = source(args)
    start = Start(flag=flag, save=args.save, damaged=damaged or {})
    if flag:
        start = start_from(folder, args, start)
    if args.save:
        refuse_unusable(start)
    return start


def start_from(folder, args, start):
    """-> the Start with the newest checkpoint in a folder."""
    flag = start.flag
    place, notes = newest(folder, flag, start.damaged)
    found = notes.get("identity", {})
    now = identity(args)
    names = ["heads", *SIZES]  # the number of heads shows in no shape
    if flag != "--init-from":
        names += [*COURSE, *args.course, "held_out", "steps"]
    for name in names:
        require(name not in found or name not in now or found[name] == now[name],
                f"{flag} {place}: saved with {name} {found.get(name)}, not {now.get(name)}")
    constants = {name: found[name] for name in ("theta", "eps") if name in found}
    start = start._replace(folder=place, files=notes["files"], constants=constants)
    if flag == "--init-from":
        return start
    steps = notes["steps"]
    is_done = flag == "--save" and steps == args.steps  # it was killed after its last step
    require(steps < args.steps or is_done,
            f"--steps {args.steps}: {place} has {steps} behind it already")
    return start._replace(steps=steps, ranks=notes["ranks"], extra=notes.get("extra", {}))


def refuse_unusable(start):
    """Ends the run if its checkpoints cannot be saved there."""
    folder = Path(start.save)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        require(False, f"--save {folder}: {reason(error)}")
    # Does this run go on from a checkpoint of this folder? ranks is 0 if it takes weights alone.
    goes_on = start.ranks and start.folder.resolve().parent == folder.resolve()
    for steps in reversed(numbered(folder)):
        place = folder / str(steps)
        require(not is_foreign(place),
                f"--save {folder}: {steps} in it is no checkpoint, save elsewhere")
        require(place in start.damaged or (goes_on and steps <= start.steps),
                f"--save {folder}: holds step {steps} already: --resume it, or save elsewhere")


def settle(args, start):
    """When the process group is there -> the Start of all ranks, whose files are whole: of an older
    checkpoint than begin() has found if that one is damaged."""
    if not start.flag and not start.save:
        return start
    # a disk may be slow, and NCCL's collectives are not for a thread beside the training
    patience = timedelta(seconds=max(600, args.timeout))
    group = dist.new_group(backend="gloo", timeout=patience, group_desc="checkpoints")
    agree(start, group)
    rank = dist.get_rank()
    while start.folder:
        wrong = first_said(damage(start.folder, start.files, rank, dist.get_world_size()), group)
        if not wrong:
            break
        start = begin(args, {**start.damaged, start.folder: wrong})
        agree(start, group)
    if start.folder and rank == 0:
        behind = f"{start.steps} steps behind it" if start.ranks else "its weights alone"
        say("; ".join([*words_for(start.damaged), f"{start.flag} takes {start.folder}, {behind}"]))
    if start.flag == "--save" and start.steps == args.steps:
        dist.destroy_process_group()  # else a rank of gloo aborts now and then
        sys.exit(0)
    return start._replace(group=group)


def agree(start, group):
    """A folder that machines share may show a rank what it was a moment ago: that ends the run."""
    place = "no checkpoint"
    if start.folder:
        # the last part of the path alone: machines may have folders of their own
        place = f"{start.flag} {start.folder.name} with {start.steps} steps behind it"
    first = first_said(place, group)  # rank 0's
    other = first_said("" if place == first else place, group)  # the first that is not the same
    require(not other, f"ranks begin with different checkpoints: {first} here, {other} there",
            code=1)


LONGEST = 1000  # bytes of what a rank says to the others


def first_said(sentence, group=None):
    """-> the sentence of the first rank that has one, the same on all ranks, or ""."""
    # not by object collectives: these need NumPy
    data = sentence.encode(errors="backslashreplace")[:LONGEST]
    mine = torch.zeros(LONGEST, dtype=torch.uint8)
    mine[:len(data)] = torch.tensor([*data], dtype=torch.uint8)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine, group=group)  # each its own -> replicated
    said = [bytes(t[t > 0].tolist()).decode(errors="replace") for t in everyones]
    return next(filter(None, said), "")


# ---- saving ------------------------------------------------------------------


class Saver:
    """Writes a run's checkpoints, one after the other; in_background: while training goes on.

    Then a save takes as long as a copy of what this rank writes, and waits for the one before.
    """

    def __init__(self, start, in_background=False):
        self.start = start
        self.kept = start.steps  # the newest that is written
        self.written = True  # is the last one?
        self.pending = None  # the Future of one that is under way
        self.copies = {}  # {box: its copy}
        self.thread = None
        if in_background:
            self.thread = ThreadPoolExecutor(1)

    def save(self, steps, pieces, notes):
        self.wait()
        generators = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            generators["cuda"] = torch.cuda.get_rng_state()
        if self.thread:
            copies = [self.copy(piece) for piece in pieces if piece.writes]
            self.pending = self.thread.submit(self.write, steps, copies, notes, generators)
        else:
            self.write(steps, pieces, notes, generators)

    def copy(self, piece):
        """In memory that is kept for the next time: to make it takes longer than to copy."""
        box = piece.name, piece.start, piece.tensor.shape
        if box not in self.copies:
            self.copies[box] = torch.empty_like(piece.tensor, device="cpu")
        return piece._replace(tensor=self.copies[box].copy_(piece.tensor))

    def write(self, steps, *contents):
        self.written = write(self.start.save, steps, *contents, self.kept, self.start.group)
        if self.written:
            self.kept = steps

    def wait(self):
        """-> is the last checkpoint written? Raises what its writing has raised."""
        if self.pending:
            self.pending.result()
            self.pending = None
        return self.written


def write(folder, steps, pieces, notes, generators=None, keep=0, group=None):
    """Saves FOLDER/STEPS, all ranks together -> whether that has been possible.

    If not (a full disk), rank 0 has said so in a line, and what was saved before is still there.

    pieces: this rank's; together they must write each number of a tensor once. notes: {"identity",
    "extra"}, which come back in Start. keep: the steps of the earlier checkpoint that stays.
    """
    rank = dist.get_rank()
    place = Path(folder, str(steps))
    draft = Path(folder, f".{steps}")
    if rank == 0:
        shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed here
    dist.barrier(group)
    failed = first_said(attempt(write_part, draft, rank, pieces, generators), group)
    if rank == 0 and not failed:
        notes = {"steps": steps, "ranks": dist.get_world_size(), **notes}
        failed = attempt(publish, draft, place, notes)
    failed = first_said(failed, group)
    if rank == 0:
        clear(place, draft, failed, keep)
        if failed:
            print(f"--save {place}: {failed}: not saved", file=sys.stderr, flush=True)
    return not failed


def attempt(function, *arguments):
    """Calls a function that writes -> "", or in words, why it could not."""
    try:
        function(*arguments)
    except Exception as error:
        # on a full disk torch.save raises an error of its own, with the OSError as its context
        cause = error
        while cause is not None and not isinstance(cause, (OSError, ValueError)):
            cause = cause.__context__
        if cause is None:
            raise
        return reason(cause)
    return ""


def write_part(draft, rank, pieces, generators=None):
    """This rank's files: its boxes, its random number generators, a table and checksums of them."""
    draft.mkdir(exist_ok=True)
    table = dcp().write_boxes(draft, rank, pieces)
    torch.save(generators, draft / f"__{rank}_generators.pt")
    table.planner_data = {file.name: checksum(file) for file in draft.glob(f"__{rank}_*")}
    put(draft / f"__{rank}.metadata", pickle.dumps(table))


def put(path, data):
    """Writes a file that is on the disk when this returns."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def publish(draft, place, notes):
    """On rank 0: makes a checkpoint of what all ranks have written, and renames it into view."""
    files = {}
    tables = []
    for rank in range(notes["ranks"]):  # of every rank: one that is not seen here fails the rest
        name = f"__{rank}.metadata"
        tables.append(dcp().read_table(draft, name))
        files.update(tables[-1].planner_data)
        (draft / name).unlink()
    put(draft / ".metadata", pickle.dumps(dcp().joined(tables)))
    files[".metadata"] = checksum(draft / ".metadata")
    text = json.dumps({**notes, "files": files}).encode()
    put(draft / "notes.json", text + b"\n" + str(zlib.crc32(text)).encode())
    shutil.rmtree(place, ignore_errors=True)  # refuse_unusable() allows a damaged one alone
    draft.rename(place)


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
    """Saves FOLDER/0 from {name: whole tensor}, in this process alone: --init-from reads it."""
    draft = Path(folder, ".0")
    shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed here
    draft.mkdir(parents=True)
    write_part(draft, 0, [piece_of(name, tensor, writes=True) for name, tensor in state.items()])
    publish(draft, Path(folder, "0"), {"steps": 0, "ranks": 1, "identity": identity, "extra": {}})


# ---- loading -----------------------------------------------------------------


def is_state(name):
    """Is this the name of an AdamW state?"""
    return name.rpartition(".")[2] in STATES


def misfit(table, pieces):
    """-> in words, why this rank's pieces cannot be read from a checkpoint, or ""."""
    for piece in pieces:
        if piece.name not in table.state_dict_metadata:
            return f"it has no {piece.name}"
        saved = tuple(table.state_dict_metadata[piece.name].size)
        # What has a row for each position: a shorter --seq uses the first ones. Other first
        # dimensions are SIZES, which have been compared.
        fits = saved[1:] == piece.shape[1:] and saved[:1] >= piece.shape[:1]
        if not fits:
            return f"{piece.name} is {saved} there, {piece.shape} here"
    return ""


def unclaimed(table, pieces, group):
    """-> in words, which weight of a checkpoint has no place in the pieces of all ranks, or ""."""
    names = sorted(name for name in table.state_dict_metadata if not is_state(name))
    held = {piece.name for piece in pieces}
    counts = torch.tensor([int(name in held) for name in names])
    dist.all_reduce(counts, group=group)  # partial -> replicated
    if all(counts):
        return ""
    return f"its {names[counts.tolist().index(0)]} is not in this model"


def restore(start, pieces, optimizer):
    """Begins where a checkpoint ends, all ranks together.

    start: what settle() has returned. pieces: callable -> this rank's pieces. optimizer: an AdamW
    that has not run yet, or something with its param_groups and state.
    """
    if not start.folder:
        return
    if start.ranks:
        adamw_states(optimizer, start)
    mine = pieces()
    table = dcp().read_table(start.folder)
    wrong = first_said(misfit(table, mine), start.group) or unclaimed(table, mine, start.group)
    require(not wrong, f"{start.flag} {start.folder}: {wrong}")
    dcp().load(start.folder, table, mine)
    if dist.get_rank() < start.ranks:  # a rank beyond those of the saved run keeps its own
        file = Path(start.folder, f"__{dist.get_rank()}_generators.pt")
        states = torch.load(file, weights_only=True)
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])


def read_plain(start, model, optimizer):
    """Loads a checkpoint into an ordinary module and its AdamW, in this process alone."""
    if start.ranks:  # not --init-from, which takes the weights alone
        adamw_states(optimizer, start)
    pieces = pieces_of(model.named_parameters(), optimizer, writes=False)
    dcp().load(start.folder, dcp().read_table(start.folder), pieces)


def read_whole(folder):
    """-> {name: tensor} of all that a checkpoint holds, AdamW's states among them."""
    table = dcp().read_table(folder)
    state = {}
    for name, entry in table.state_dict_metadata.items():
        state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp().load(folder, table, [piece_of(name, tensor, False) for name, tensor in state.items()])
    return state
