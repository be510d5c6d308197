"""Saved training: what N ranks have saved, any other number of ranks in any layout reads.

    --save DIR [--save-every K]    DIR/100, DIR/200, ..: a folder per checkpoint, named by its steps
    --save-async                   training goes on while they are written
    --resume DIR                   go on from the newest that is whole (or from DIR/100 itself)
    --init-from DIR                take the weights alone, and start at step 0

A checkpoint holds whole tensors under the names of the plain model, and their AdamW states as
NAME.exp_avg and NAME.exp_avg_sq. No rank need have a whole tensor: each tells which boxes of it
lie in its memory, and that is a Piece. So every script and every layout reads every other's.

    rank 0     Piece("up.weight", (8, 4), (0, 0), its rows 0 to 3)
    rank 1     Piece("up.weight", (8, 4), (4, 0), its rows 4 to 7)

The files are those of torch.distributed.checkpoint: see dcp.py. It writes its table of contents,
.metadata, last: a folder that has one is whole. The last two are kept. What makes the run the same
is inside: parameters, AdamW states, the steps behind it (hence the place in the data), the flags.
Nothing here draws random numbers while it trains. DIR is a folder that all ranks see.
"""
import json
import math
import shutil
import tempfile
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

Piece = namedtuple("Piece", "name shape start tensor writes", defaults=(True,))
# name     of the whole tensor, in the plain model; of AdamW's states, + ".exp_avg" or ".exp_avg_sq"
# shape    of the whole tensor, without padding
# start    where this box begins in it, an index for each dimension
# tensor   this rank's box: a view of the memory that training uses, since loading copies into it
# writes   False: it is loaded, but what is saved is another piece of the same box
# Several pieces may be the same box (tied copies, a master and what computes with it): all are
# loaded, each in its own dtype. What several ranks hold is saved once.

# what AdamW holds for each parameter, besides the step, and Muon for each matrix
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def pieces_of(named_parameters, optimizer, writes=True):
    """(name, parameter) pairs of an ordinary module -> pieces of them and of their AdamW states.

    Parameters may be DTensors. optimizer may be None: then the parameters alone. An AdamW that has
    not run yet has no states: see make_states.
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


def piece_of(name, tensor, writes=True):
    """A whole tensor or a DTensor -> its piece on this rank."""
    tensor = tensor.detach()
    if not hasattr(tensor, "full_tensor"):
        start = (0,) * tensor.dim()
        return Piece(name, tuple(tensor.shape), start, tensor, writes)
    [box] = tensor.__create_chunk_list__()
    local = tensor.to_local()
    if local.shape != box.sizes:  # _StridedShard: what this rank has does not lie side by side
        raise ValueError(f"{name}: {tensor.placements} of {tuple(tensor.shape)} is no box")
    return Piece(name, tuple(tensor.shape), tuple(box.offsets), local, writes)


def run_pieces(name, shape, first, flat, writes=True):
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


def part_pieces(name, shape, first, p, optimizer, writes=True):
    """Pieces of a part of a parameter, and of its AdamW states.

    p: a 1-D parameter, the optimizer's, which holds the elements first, first + 1, .. of the
    flattened tensor `name` of this shape.
    """
    pieces = []
    for full_name, flat in with_states(name, p, optimizer):
        pieces += run_pieces(full_name, shape, first, flat, writes)
    return pieces


def pieces_of_units(units, names, optimizer):
    """Of parameters whose optimizer steps 1-D parts of them, as in zero.py and fsdp.py.

    names: {parameter: its name} -> {parameter: [Piece] of it and of its states}
    """
    found = {p: [] for p in names}
    for p, name in names.items():
        if p.numel():  # what forward reads: to be loaded, and if it is frozen to be saved
            found[p] += pieces_of([(name, p)], None, writes=not p.requires_grad)
    for unit in units:
        for part in unit.parts:
            p = part.parameter
            place = names[p], unit.shapes[p], part.first
            # what forward reads where p is empty between steps; it does no harm elsewhere
            found[p] += run_pieces(*place, part.value, writes=False)
            found[p] += part_pieces(*place, part.master, optimizer)
    return found


def all_pieces_of_units(units, named_parameters, optimizer):
    """-> [Piece] of all of them."""
    names = {p: name for name, p in named_parameters}
    found = pieces_of_units(units, names, optimizer)
    return [piece for pieces in found.values() for piece in pieces]


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


def pieces_of_cuts(ranks, named_parameters, optimizer):
    """As pieces_of, if parameters are cut along a dim each. ranks: as wholes_of_cuts takes them."""
    found = []
    for name, p in named_parameters:
        copies = ranks.copies(p)
        for piece in pieces_of([(name, p)], optimizer, writes=ranks.rank % copies == 0):
            if p in ranks.cuts:
                dim, plain_size, *_ = ranks.cuts[p]
                piece = of_whole(piece, dim, plain_size, ranks.rank // copies)
            if piece.tensor.numel():  # of padding nothing is left
                found.append(piece)
    return found


def pieces_of_units_of_cuts(units, ranks, names, optimizer):
    """As pieces_of_units, of what `ranks` has cut before: see pieces_of_cuts."""
    found = pieces_of_units(units, names, optimizer)
    for p, boxes in found.items():
        if p in ranks.cuts:
            dim, plain_size, *_ = ranks.cuts[p]
            boxes = [of_whole(box, dim, plain_size, ranks.rank // ranks.copies(p)) for box in boxes]
        found[p] = [box for box in boxes if box.tensor.numel()]  # of padding nothing is left
    return found


def of_stack(piece, index, rename):
    """A box of one of equally large stacks -> a box of each tensor in it. index: of the stack.

    rename(name of the stacks, number) -> the name of that tensor of all of them.
    """
    first = index * piece.shape[0] + piece.start[0]
    return [Piece(rename(piece.name, number), piece.shape[1:], piece.start[1:], box, piece.writes)
            for number, box in enumerate(piece.tensor, first)]


def pieces_of_stacks(named_parameters, optimizer, group, replicas, rename):
    """As pieces_of, if some parameters are stacks, of which a rank of `group` has its own, and all
    ranks of `replicas` the same.

    rename: as of_stack takes it; it leaves the name of what is no stack as it is.
    """
    found = []
    for piece in pieces_of(named_parameters, optimizer, writes=replicas.rank() == 0):
        if rename(piece.name, 0) == piece.name:
            found.append(piece._replace(writes=piece.writes and group.rank() == 0))
        else:
            found += of_stack(piece, group.rank(), rename)
    return found


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


def all_pieces(pieces, optimizer):
    """With those of what Muon keeps of matrices that are cut, each on the rank that owns it."""
    momenta = getattr(optimizer, "momenta", list)()
    return [*pieces, *(piece_of(f"{name}.momentum_buffer", t) for name, t in momenta)]


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

Start = namedtuple("Start", "folder flag resumes steps extra constants group",
                   defaults=(None, "", False, 0, {}, {}, None))
# folder   of the checkpoint to begin with, None: there is none
# flag     what the user has said to get it: --resume or --init-from
# resumes  False: the weights alone are wanted
# steps    that training has behind it there; 0 if the weights alone are wanted
# extra    what the run that wrote it has added: see Side.extra
# constants  of the model there which have no flags: the base of rotary angles, eps of the norms
# group    of all ranks, on the CPU: what they tell each other about checkpoints goes through it

# Where these differ, so do names or shapes of tensors. Not seq, although learned positions have a
# row for each: --init-from may take the first rows of more, see restore().
SIZES = ("layers", "width", "vocab", "form", "kv_heads", "hidden", "head_dim")
# What losses depend on. What one of two scripts has no flag for is not compared.
COURSE = ("heads", "seq", "dtype", "seed", "batch", "data", "pad", "lr", "clip",
          "warmup", "decay", "min_lr", "train")  # and a script's own flags with `course`


def identity(args):
    """What a run tells about itself in its checkpoints -> {name: value}."""
    mine = {name: getattr(args, name) for name in (*COURSE, *args.course)}
    mine.update(args.cfg._asdict(), form=args.cfg.form.name)
    held_out = bool(args.eval_every)  # the corpus is shorter then
    mine.update(course=args.course, held_out=held_out)
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


def newest(folder, flag):
    """-> the newest whole checkpoint in a folder, or the folder if it is one itself, and its notes.
    """
    place = Path(folder)
    if not is_whole(folder):
        steps = numbered(folder)
        require(steps, f"{flag} {folder}: no whole checkpoint there")
        place = place / str(steps[-1])
    try:
        return place, notes_of(place)
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        require(False, f"{flag} {place}: {reason(error)}")


def begin(args):
    """Before anything is built -> Start."""
    if args.save or args.resume or args.init_from:
        require(args.impl in ("scratch", "torch") and not args.dry_run, "--save, --resume and "
                "--init-from are for one --impl, scratch or torch, and no dry run")
    require(args.save or not args.save_every, "--save-every wants --save DIR")
    require(args.save or not args.save_async, "--save-async wants --save DIR")
    require(not (args.resume and args.init_from),
            "--resume goes on, --init-from starts anew: take one of them")
    start = Start()
    if args.resume:
        start = start_from(args.resume, "--resume", args)
    if args.init_from:
        start = start_from(args.init_from, "--init-from", args)
    if args.save:
        refuse_unusable(Path(args.save), start)
    return start


def start_from(folder, flag, args):
    """-> the Start with the newest checkpoint in a folder."""
    place, notes = newest(folder, flag)
    found = notes["identity"]
    now = identity(args)
    names = ["heads", *SIZES]  # the number of heads shows in no shape
    if flag == "--resume":
        names += [*COURSE, *args.course, "held_out", "steps"]
    for name in names:
        require(name not in found or name not in now or found[name] == now[name],
                f"{flag} {place}: saved with {name} {found.get(name)}, not {now.get(name)}")
    constants = {name: found[name] for name in ("theta", "eps") if name in found}
    if flag == "--init-from":
        return Start(place, flag, constants=constants)
    steps = notes["steps"]
    require(steps < args.steps, f"--steps {args.steps}: {place} has {steps} behind it already")
    return Start(place, flag, True, steps, notes["extra"], constants)


def refuse_unusable(folder, start):
    """Ends the run if its checkpoints cannot be saved there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        require(False, f"--save {folder}: {reason(error)}")
    goes_on = start.resumes and start.folder.resolve().parent == folder.resolve()
    for steps in reversed(numbered(folder)):
        require(goes_on and steps <= start.steps,
                f"--save {folder}: holds step {steps} already: --resume it, or save elsewhere")


def settle(args, start):
    """When the process group is there -> the Start with a group of its own."""
    if not start.folder and not args.save:
        return start
    # a disk may be slow, and NCCL's collectives are not for a thread beside the training
    patience = timedelta(seconds=max(600, args.timeout))
    group = dist.new_group(backend="gloo", timeout=patience, group_desc="checkpoints")
    if start.folder and dist.get_rank() == 0:
        behind = f"{start.steps} steps behind it" if start.resumes else "its weights alone"
        say(f"{start.flag} takes {start.folder}, {behind}")
    return start._replace(group=group)


# ---- saving ------------------------------------------------------------------


def notes_piece(notes):
    data = torch.tensor(list(json.dumps(notes).encode()), dtype=torch.uint8)
    return Piece("notes", tuple(data.shape), (0,), data)


class Saver:
    """Writes a run's checkpoints, one after the other; in_background: while training goes on.

    Then a save takes as long as a copy of what this rank writes, and waits for the one before.
    """

    def __init__(self, folder, start, in_background=False):
        self.folder = Path(folder)
        self.group = start.group
        self.kept = start.steps  # the newest that is written
        self.pending = None  # the Future of one that is under way
        self.copies = {}  # {box: its copy}
        self.thread = None
        if in_background:
            self.thread = ThreadPoolExecutor(1)

    def save(self, steps, pieces, notes):
        """All ranks together. notes: {"identity", "extra"}, which come back in Start."""
        self.wait()
        pieces = [piece for piece in pieces if piece.writes]
        notes = {**notes, "steps": steps}
        if dist.get_rank() == 0:
            pieces.append(notes_piece(notes))
        if self.thread:
            pieces = [self.copy(piece) for piece in pieces]
            self.pending = self.thread.submit(self.write, steps, pieces)
        else:
            self.write(steps, pieces)

    def copy(self, piece):
        """In memory that is kept for the next time: to make it takes longer than to copy."""
        box = piece.name, tuple(piece.start), piece.tensor.shape
        if box not in self.copies:
            self.copies[box] = torch.empty_like(piece.tensor, device="cpu")
        return piece._replace(tensor=self.copies[box].copy_(piece.tensor))

    def write(self, steps, pieces):
        place = self.folder / str(steps)
        if dist.get_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)  # of a run that was killed here
        dist.barrier(self.group)
        try:
            dcp().save(place, pieces, self.group)
        except dcp().checkpoint.CheckpointException as fault:  # on all ranks
            rank, (error, _) = min(fault.failures.items())
            if dist.get_rank() == 0:
                shutil.rmtree(place, ignore_errors=True)
            require(False, f"--save {place}: not saved: rank {rank}: {reason(error)}", code=1)
        if dist.get_rank() == 0:
            for other in numbered(self.folder):
                if other not in (steps, self.kept):
                    shutil.rmtree(self.folder / str(other), ignore_errors=True)
        self.kept = steps

    def wait(self):
        """Until the last checkpoint is written."""
        if self.pending:
            self.pending.result()
            self.pending = None


def write_whole(folder, state, identity):
    """Saves FOLDER/0 from {name: whole tensor}, in this process alone: --init-from reads it."""
    notes = {"identity": identity, "extra": {}, "steps": 0}
    pieces = [piece_of(name, tensor) for name, tensor in state.items()]
    Path(folder).mkdir(parents=True, exist_ok=True)
    dcp().save(Path(folder, "0"), [*pieces, notes_piece(notes)])


# ---- loading -----------------------------------------------------------------


def is_weight(name):
    """Is this the name of a parameter, not of an AdamW state or the notes?"""
    return name != "notes" and name.rpartition(".")[2] not in STATES


def misfit(saved, pieces):
    """-> in words, why this rank's pieces cannot be read from a checkpoint, or ""."""
    for piece in pieces:
        if piece.name not in saved:
            return f"it has no {piece.name}"
        shape = tuple(saved[piece.name].size)
        # What has a row for each position: a shorter --seq uses the first ones. Other first
        # dimensions are SIZES, which have been compared.
        if shape[1:] != piece.shape[1:] or shape[:1] < piece.shape[:1]:
            return f"{piece.name} is {shape} there, {piece.shape} here"
    return ""


def restore(start, pieces, optimizer):
    """Begins where a checkpoint ends, all ranks together.

    start: what settle() has returned. pieces: callable -> this rank's pieces. optimizer: an AdamW
    that has not run yet, or something with its param_groups and state.
    """
    if not start.folder:
        return
    if start.resumes:
        make_states(optimizer, start)
    mine = all_pieces(pieces(), optimizer)
    saved = dcp().Reader(start.folder).read_metadata().state_dict_metadata
    everyones = [None] * dist.get_world_size()
    own = misfit(saved, mine), sorted({piece.name for piece in mine})
    dist.all_gather_object(everyones, own, group=start.group)
    held = set().union(*(names for _, names in everyones))
    lost = sorted(name for name in saved if is_weight(name) and name not in held)
    wrong = [words for words, _ in everyones if words]
    wrong += [f"its {name} is not in this model" for name in lost]
    require(not wrong, f"{start.flag} {start.folder}: {''.join(wrong[:1])}")
    dcp().load(start.folder, mine)


def read_plain(start, model, optimizer):
    """Loads a checkpoint into an ordinary module and its AdamW, in this process alone."""
    if start.resumes:  # not --init-from, which takes the weights alone
        make_states(optimizer, start)
    dcp().load(start.folder, pieces_of(model.named_parameters(), optimizer))


def read_whole(folder, wanted=is_weight):
    """-> {name: tensor} of what a checkpoint holds under names that are wanted."""
    state = {}
    for name, entry in dcp().Reader(folder).read_metadata().state_dict_metadata.items():
        if wanted(name):
            state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp().load(folder, [piece_of(name, tensor) for name, tensor in state.items()])
    return state


def notes_of(folder):
    """-> the notes of a checkpoint. Raises OSError, ValueError, LookupError or RuntimeError."""
    [text] = read_whole(folder, lambda name: name == "notes").values()
    notes = json.loads(bytes(text.tolist()))
    return {"steps": notes["steps"], "identity": notes["identity"], "extra": notes["extra"]}
