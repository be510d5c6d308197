"""Saved training: what N ranks have saved, any other number of ranks in any layout reads.

A checkpoint, DIR/100 after 100 steps, holds whole tensors under the names of the plain model, and
the optimizer's states as NAME.exp_avg and NAME.exp_avg_sq (of Muon NAME.momentum_buffer), flags and
the steps behind it. No rank need have a whole tensor: each tells which boxes of it lie in its
memory, and that is a Piece. So every script and every layout reads every other's.

    rank 0     Piece("up.weight", (8, 4), (0, 0), its rows 0 to 3)
    rank 1     Piece("up.weight", (8, 4), (4, 0), its rows 4 to 7)

The files are those of torch.distributed.checkpoint: see dcp.py, which is imported where it is used,
since it takes half as long as torch to load. It writes its table of contents, .metadata, last: a
folder that has one is whole.
"""
import json
import math
import shutil
import tempfile
from collections import ChainMap, namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from harness.flags import require

# ---- pieces ------------------------------------------------------------------

Piece = namedtuple("Piece", "name shape start tensor writes", defaults=(True,))
# name     of the whole tensor, in the plain model; of an optimizer's states + "." + one of STATES
# shape    of the whole tensor, without padding
# start    where this box begins in it, an index for each dimension
# tensor   this rank's box: a view of the memory that training uses, since loading copies into it
# writes   False: it is loaded, but what is saved is another piece, a master of what computes
# Several pieces may be the same box, on one rank or on several: all are loaded, each in its own
# dtype, and it is saved once.

# what AdamW holds for each parameter, besides the step, and Muon for each matrix
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def pieces_of(named_parameters, optimizer):
    """Of an ordinary module's parameters, whole or DTensors -> {parameter: [Piece]}, of it and of
    what the optimizer, if it has run, holds for it. make_states() makes that before."""
    found = {}
    for name, p in named_parameters:
        tensors = with_states(name, p, optimizer)
        found[p] = [piece_of(full_name, t) for full_name, t in tensors.items()]
    return found


def with_states(name, p, optimizer):
    """-> {name: tensor} of a parameter and its states."""
    states = optimizer.state.get(p, {})
    found = {f"{name}.{kind}": states[kind] for kind in STATES if kind in states}
    return {name: p, **found}


def piece_of(name, tensor, writes=True):
    """A whole tensor or a DTensor -> its piece on this rank."""
    tensor = tensor.detach()
    if not hasattr(tensor, "full_tensor"):
        return Piece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor, writes)
    [box] = tensor.__create_chunk_list__()
    local = tensor.to_local()
    if local.shape != box.sizes:  # _StridedShard: what this rank has does not lie side by side
        raise ValueError(f"{name}: {tensor.placements} of {tuple(tensor.shape)} is no box")
    return Piece(name, tuple(tensor.shape), tuple(box.offsets), local, writes)


def pieces_of_units(units, named_parameters, optimizer):
    """As pieces_of, if the optimizer steps 1-D parts of parameters, as in zero.py and fsdp.py."""
    names = {}
    found = {}
    for name, p in named_parameters:
        names[p] = name
        found[p] = []
        if p.numel():  # what forward reads: to be loaded, and if it is frozen to be saved
            found[p].append(piece_of(name, p, writes=not p.requires_grad))
    for unit in units:
        for part in unit.parts:
            p = part.parameter
            # part.here is in the unit's chunk, unit.mine and unit.spans are in the whole unit
            place = unit.shapes[p], unit.mine.start + part.here.start - unit.spans[p].start
            # what forward reads where p is empty between steps; it does no harm elsewhere
            found[p] += run_pieces(names[p], *place, unit.shard[part.here], writes=False)
            for full_name, flat in with_states(names[p], part.master, optimizer).items():
                found[p] += run_pieces(full_name, *place, flat.detach())
    return found


def run_pieces(name, shape, first, flat, writes=True):
    """Pieces of a run, a part of the flattened whole tensor: at most 2n - 1 boxes in n dimensions.

    flat: 1-D, holds the elements first, first + 1, .. of the flattened whole. What of it lies
    before the whole (first is negative) or behind it, such as padding, is left out.
    """
    low = max(first, 0)
    high = min(first + len(flat), math.prod(shape))
    pieces = []
    while low < high:
        start, box = largest_box(shape, low, high)
        view = flat[low - first:low - first + math.prod(box)].view(box)
        pieces.append(Piece(name, tuple(shape), start, view, writes))
        low += view.numel()
    return pieces


def largest_box(shape, low, high):
    """-> where the largest box starts that is a run of elements from low on, its shape.

    It is of whole rows, along the first dim that has one between low and high.
    """
    index = [int(i) for i in torch.unravel_index(torch.tensor(low), shape)]
    for dim, length in enumerate(shape):
        row = math.prod(shape[dim + 1:])
        if low % row == 0 and low + row <= high:
            rows = min((high - low) // row, length - index[dim])
            return tuple(index), (*[1] * dim, rows, *shape[dim + 1:])
    return (), ()  # of a tensor without dimensions


# What is cut further: found is what pieces_of and pieces_of_units return, of this rank's cut as if
# it were the whole, and so is the result.


def of_cuts(found, ranks):
    """Where ranks have cuts along a dim: see wholes_of_cuts of whole.py."""
    for p in found.keys() & ranks.cuts.keys():
        found[p] = [of_cut(piece, ranks, *ranks.cuts[p]) for piece in found[p]]
    return found


def of_cut(piece, ranks, dim, plain_size):
    """The box of this rank's cut -> of the whole, which has plain_size along dim."""
    start = list(piece.start)
    start[dim] += ranks.rank * ranks.each(plain_size)
    shape = list(piece.shape)
    shape[dim] = plain_size
    return piece._replace(shape=tuple(shape), start=tuple(start))


def of_stacks(found, index, rename):
    """Where ranks have equally large stacks, of whose tensors the checkpoint knows each by itself.

    index: of this rank's. rename(name of the stacks, number) -> the name of that tensor of all of
    them; a name that is no stack's it leaves as it is.
    """
    for p, pieces in found.items():
        found[p] = []
        for piece in pieces:
            if rename(piece.name, 0) == piece.name:
                found[p].append(piece)
                continue
            first = index * piece.shape[0] + piece.start[0]
            for number, box in enumerate(piece.tensor, first):
                name = rename(piece.name, number)
                found[p].append(Piece(name, piece.shape[1:], piece.start[1:], box, piece.writes))
    return found


def all_pieces(found, optimizer):
    """-> [Piece], with those of what Muon keeps of matrices that are cut, on the rank that owns
    them."""
    momenta = getattr(optimizer, "momenta", list)()
    return [*chain(*found.values()), *(piece_of(f"{name}.{STATES[-1]}", t) for name, t in momenta)]


def make_states(optimizer, start):
    """Of an optimizer that has not run yet, so that they can be loaded into."""
    for one in getattr(optimizer, "optimizers", [optimizer]):
        for group in one.param_groups:
            for p in group["params"]:
                if p.requires_grad:  # else the optimizer holds nothing for it
                    one.state[p] = new_state(one, p, start)


def new_state(optimizer, p, start):
    if isinstance(optimizer, torch.optim.Muon):
        shape = getattr(p, "whole", p.shape)  # where p is of WholeMatrices, and empty now
        return {"momentum_buffer": p.new_zeros(shape)}
    steps = start.extra.get("updates", start.steps)  # in fp16 some steps are skipped
    # a fused AdamW has it in fp32, where the parameter is
    step = torch.full((), steps, dtype=torch.float32, device=p.device)
    return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


# ---- which one ---------------------------------------------------------------

Start = namedtuple("Start", "folder flag steps extra", defaults=(None, "", 0, {}))
# folder   of the checkpoint to begin with, None: there is none
# flag     what the user has said to get it: --resume, or --init-from, for the weights alone
# steps    that training has behind it there; 0 if the weights alone are wanted
# extra    what the run that wrote it has added: see Side.extra

# What losses depend on besides the model. What one of two scripts has no flag for is not compared.
COURSE = ("dtype", "seed", "batch", "data", "pad", "lr", "clip", "warmup", "decay", "min_lr",
          "train")  # and a script's own flags with `course`


def identity(args):
    """What a run tells about itself in its checkpoints -> {name: value}."""
    mine = {name: getattr(args, name) for name in (*COURSE, *args.course)}
    mine.update(args.cfg._asdict(), form=args.cfg.form.name)
    mine["held_out"] = bool(args.eval_every)  # the corpus is shorter then
    if args.decay != "none":
        mine["steps"] = args.steps  # the rate at every step depends on it
    return mine


def is_whole(place):
    return Path(place, ".metadata").is_file()


def numbered(folder):
    """-> the steps of the whole checkpoints in a folder, in order."""
    paths = Path(folder).glob("[0-9]*")
    return sorted(int(path.name) for path in paths if path.name.isdecimal() and is_whole(path))


def reason(error):
    """-> what an exception says; of the operating system's, without its number and path."""
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if "inline_container" in said:  # torch.save's, when it has written less than it wanted
        return "a file was cut off: is the disk full?"
    return said.splitlines()[0]


@contextmanager
def loading(flag, place):
    """What cannot be read in here, on a rank alone, ends the run."""
    from harness.dcp import checkpoint

    try:
        yield
    except checkpoint.CheckpointException as fault:
        [(error, _)] = fault.failures.values()
        require(False, f"{flag} {place}: a file of it is missing or damaged ({reason(error)}); "
                "one before it may be whole")
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        require(False, f"{flag} {place}: {reason(error)}")


def newest(folder, flag):
    """-> the newest whole checkpoint in a folder, or the folder if it is one itself, and its notes.
    """
    place = Path(folder)
    if not is_whole(folder):
        steps = numbered(folder)
        require(steps, f"{flag} {folder}: no whole checkpoint there")
        place = place / str(steps[-1])
    with loading(flag, place):
        found = read_whole(place, lambda name: name == "notes")
        require(found, f"{flag} {place}: is of another program, without notes of --save")
        notes = json.loads(bytes(found["notes"].tolist()))
        return place, {name: notes[name] for name in ("steps", "identity", "extra")}


def begin(args):
    """Before anything is built -> Start. args.cfg gets what has no flags: theta, eps of the norms.
    """
    if args.save or args.resume or args.init_from:
        require(args.impl in ("scratch", "torch") and not args.dry_run, "--save, --resume and "
                "--init-from are for one --impl, scratch or torch, and no dry run")
    require(args.save or not (args.save_every or args.save_async),
            "--save-every and --save-async want --save DIR")
    require(not (args.resume and args.init_from),
            "--resume goes on, --init-from starts anew: take one of them")
    start = Start()
    for flag, folder in (("--resume", args.resume), ("--init-from", args.init_from)):
        if folder:
            start = start_from(folder, flag, args)
    if args.save:
        refuse_unusable(Path(args.save), start)
    return start


def start_from(folder, flag, args):
    """-> the Start with the newest checkpoint in a folder."""
    place, notes = newest(folder, flag)
    found = notes["identity"]
    kept = {name: found[name] for name in ("theta", "eps") if name in found}
    args.cfg = args.cfg._replace(**kept)
    now = identity(args)
    names = list(now)
    if flag == "--init-from":  # not seq: it takes the first rows of more positions, see misfit()
        names = [name for name in (*args.cfg._fields, *args.of_model) if name != "seq"]
    for name in names:
        word = "--eval-every" if name == "held_out" else name
        if name in found and name in now:
            require(found[name] == now[name],
                    f"{flag} {place}: saved with {word} {found[name]}, not {now[name]}")
    if flag == "--init-from":
        return Start(place, flag)
    steps = notes["steps"]
    require(steps < args.steps, f"--steps {args.steps}: {place} has {steps} behind it already")
    return Start(place, flag, steps, notes["extra"])


def refuse_unusable(folder, start):
    """Ends the run if its checkpoints cannot be saved there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        require(False, f"--save {folder}: {reason(error)}")
    goes_on = start.steps and start.folder.resolve().parent == folder.resolve()
    for steps in reversed(numbered(folder)):
        require(goes_on and steps <= start.steps,
                f"--save {folder}: holds step {steps} already: --resume it, or save elsewhere")


# ---- saving ------------------------------------------------------------------


def notes_piece(notes):
    data = torch.tensor(list(json.dumps(notes).encode()), dtype=torch.uint8)
    return Piece("notes", tuple(data.shape), (0,), data)


class Saver:
    """Writes a run's checkpoints, one after the other; in_background: while training goes on.

    Then a save takes as long as a copy of what this rank writes, and waits for the one before.
    """

    def __init__(self, folder, in_background=False):
        self.folder = Path(folder)
        self.pending = None  # the Future of one that is under way
        self.thread = ThreadPoolExecutor(1) if in_background else None
        # of its own: a disk may be slow, and NCCL is not for a thread beside the training
        self.group = dist.new_group(backend="gloo", timeout=timedelta(hours=1))

    def save(self, steps, pieces, notes):
        """All ranks together. notes: {"identity", "extra"}, which newest() gives back."""
        self.wait()
        pieces = [piece for piece in pieces if piece.writes]
        if dist.get_rank() == 0:
            pieces.append(notes_piece({**notes, "steps": steps}))
        if self.thread:
            copies = [piece._replace(tensor=piece.tensor.to("cpu", copy=True)) for piece in pieces]
            self.pending = self.thread.submit(self.write, steps, copies)
        else:
            self.write(steps, pieces)

    def write(self, steps, pieces):
        from harness import dcp

        place = self.folder / str(steps)
        if dist.get_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)  # of a run that was killed here
        dist.barrier(self.group)
        try:
            dcp.save(place, pieces, self.group)
        except dcp.checkpoint.CheckpointException as fault:  # on all ranks
            rank, (error, _) = min(fault.failures.items())
            require(False, f"--save {place}: not saved: rank {rank}: {reason(error)}", code=1)
        if dist.get_rank() == 0:
            for old in numbered(self.folder)[:-2]:
                shutil.rmtree(self.folder / str(old), ignore_errors=True)

    def wait(self):
        """Until the last checkpoint is written."""
        if self.pending:
            self.pending.result()


def write_whole(folder, state, identity):
    """Saves FOLDER/0 from {name: whole tensor}, in this process alone: --init-from reads it."""
    from harness import dcp

    pieces = [piece_of(name, tensor) for name, tensor in state.items()]
    pieces.append(notes_piece({"identity": identity, "extra": {}, "steps": 0}))
    dcp.save(Path(folder, "0"), pieces)


# ---- loading -----------------------------------------------------------------


def restore(start, side):
    """Begins where a checkpoint ends, all ranks together. side: see run.py; it has not run yet."""
    from harness import dcp

    if start.flag == "--resume":
        make_states(side.optimizer, start)
    pieces = all_pieces(side.pieces(), side.optimizer)
    of_ranks = [None] * dist.get_world_size()
    group = dist.new_group(backend="gloo")  # NCCL would take the words through the GPUs
    dist.all_gather_object(of_ranks, {piece.name: piece.shape for piece in pieces}, group=group)
    wrong = misfit(dcp.table_of(start.folder), ChainMap(*of_ranks))
    require(not wrong, f"{start.flag} {start.folder}: {wrong}")
    with loading(start.flag, start.folder):
        dcp.load(start.folder, pieces)


def misfit(saved, here):
    """A table of contents, {name: shape} of all ranks -> why they do not fit, in words, or ""."""
    for name, shape in here.items():
        if name not in saved:
            return f"it has no {name}"
        there = tuple(saved[name].size)
        # What has a row for each position: a shorter --seq uses the first ones. Other first
        # dimensions are sizes, which have been compared.
        if there[1:] != shape[1:] or there[:1] < shape[:1]:
            return f"{name} is {there} there, {shape} here"
    for name in saved:
        if is_weight(name) and name not in here:
            return f"its {name} is not in this model"
    return ""


def is_weight(name):
    """Is this the name of a parameter, not of an optimizer's state or the notes?"""
    return name != "notes" and name.rpartition(".")[2] not in STATES


def read_plain(start, model, optimizer):
    """Loads a checkpoint into an ordinary module and its AdamW, in this process alone."""
    from harness import dcp

    if start.flag == "--resume":
        make_states(optimizer, start)
    dcp.load(start.folder, all_pieces(pieces_of(model.named_parameters(), optimizer), optimizer))


def read_whole(folder, wanted=is_weight):
    """-> {name: tensor} of what a checkpoint holds under names that are wanted."""
    from harness import dcp

    state = {}
    for name, entry in dcp.table_of(folder).items():
        if wanted(name):
            state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp.load(folder, [piece_of(name, tensor) for name, tensor in state.items()])
    return state
