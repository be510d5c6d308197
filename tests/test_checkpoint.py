"""Pieces: any tensor, cut in any way, saved and read back in any other way, exactly."""
import itertools
import json
import math
import random
import socket
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from conftest import PROOF, ROOT, run
from harness import checkpoint
from harness.checkpoint import Piece, Start, boxes_of_run, piece_of, pieces_of, run_pieces

SHAPES = {
    "cube.weight": (3, 5, 7),
    "tok.weight": (13, 5),
    "norm.bias": (11,),
    "scale": (),
    "four.weight": (2, 3, 1, 5),
}
DTYPES = [torch.float64, torch.bfloat16]


def values(name, shape, dtype):
    """The whole tensor: every element another number that bfloat16 can hold."""
    seed = sum(name.encode())
    numbers = torch.arange(math.prod(shape), dtype=torch.float64).view(shape) + seed
    return (numbers % 199).to(dtype)


def part_of(whole, start, box):
    """The box of this shape that begins at `start`."""
    index = []
    for first, length in zip(start, box):
        index.append(slice(first, first + length))
    return whole[tuple(index)]


# ---- runs of a flattened tensor ------------------------------------------------


def test_boxes_of_a_run_are_the_run():
    """Every run of a small tensor of 1 to 4 dimensions, in the fewest boxes that 2n - 1 allows."""
    for shape in [(7,), (3, 4), (2, 3, 4), (2, 3, 2, 2), (4, 1, 3), (1, 1)]:
        size = math.prod(shape)
        whole = torch.arange(size).view(shape)
        for low, high in itertools.combinations_with_replacement(range(size + 1), 2):
            boxes = boxes_of_run(shape, low, high)
            assert len(boxes) <= 2 * len(shape) - 1
            found = []
            for start, box, begin in boxes:
                cut = part_of(whole, start, box)
                assert cut.shape == box
                assert cut.flatten()[0] == begin
                found += cut.flatten().tolist()
            assert found == list(range(low, high)), (shape, low, high)


def test_run_pieces_leave_out_what_is_not_of_the_tensor():
    """A flat shard that begins in the parameter before and ends in padding."""
    flat = torch.arange(-3, 20)
    pieces = run_pieces("w", (3, 5), -3, flat, True)
    assert [p.start for p in pieces] == [(0, 0)]
    assert torch.equal(pieces[0].tensor, torch.arange(15).view(3, 5))
    assert run_pieces("w", (3, 5), 15, flat, True) == []
    assert run_pieces("w", (3, 5), -99, flat, True) == []
    pieces[0].tensor.zero_()
    assert flat[3:18].eq(0).all()  # views, not copies
    assert flat[2] == -1
    assert flat[18] == 15


# ---- a round trip --------------------------------------------------------------


def cut(rng, shape):
    """A random partition of a box that begins at 0 -> [(start, shape of the part)]."""
    parts = [((0,) * len(shape), shape)]
    for _ in range(rng.randrange(6)):
        if not shape:
            break
        start, box = parts.pop(rng.randrange(len(parts)))
        dim = rng.randrange(len(shape))
        at = rng.randrange(box[dim] + 1)  # 0 and the whole give a part without elements
        first = list(box)
        first[dim] = at
        parts.append((start, tuple(first)))
        second = list(box)
        second[dim] -= at
        behind = list(start)
        behind[dim] += at
        parts.append((tuple(behind), tuple(second)))
    return parts


def boxes_for(rng, dtype, world, rank):
    """Pieces of all of SHAPES, dealt to ranks at random, some held twice -> those of this rank."""
    pieces = []
    for name, shape in SHAPES.items():
        whole = values(name, shape, dtype)
        for start, box in cut(rng, shape):
            writer = rng.randrange(world)
            twin = rng.randrange(world)
            part = part_of(whole, start, box)
            if writer == rank:
                pieces.append(Piece(name, shape, start, part.clone(), True))
            if twin == rank:
                pieces.append(Piece(name, shape, start, part.clone(), False))
    return pieces


def runs_for(rng, dtype, world, rank):
    """The same tensors laid end to end and cut into runs, as flat shards are."""
    flats = []
    for name, shape in SHAPES.items():
        flats.append(values(name, shape, dtype).flatten())
    flat = torch.cat(flats)
    ends = sorted(rng.randrange(len(flat)) for _ in range(world - 1))
    borders = [0, *ends, len(flat)]
    low = borders[rank]
    shard = flat[low:borders[rank + 1]].clone()
    begin = 0
    pieces = []
    for name, shape in SHAPES.items():
        pieces += run_pieces(name, shape, low - begin, shard, True)
        begin += math.prod(shape)
    return pieces


def check_values(pieces):
    for piece in pieces:
        whole = values(piece.name, piece.shape, piece.tensor.dtype)
        part = part_of(whole, piece.start, piece.tensor.shape)
        assert torch.equal(piece.tensor, part), piece


def round_trips(folder, seeds):
    """Whatever has been saved as boxes or runs is read back as others, in either dtype."""
    world = dist.get_world_size()
    rank = dist.get_rank()
    for seed in range(seeds):
        rng = random.Random(seed)  # the same on every rank
        makers = [rng.choice([boxes_for, runs_for]) for _ in range(2)]
        kinds = [rng.choice(DTYPES) for _ in range(2)]
        saved = makers[0](rng, kinds[0], world, rank)
        assert checkpoint.write(folder, seed + 1, saved, {}, keep=seed)
        wanted = makers[1](rng, kinds[1], world, rank)
        for piece in wanted:
            piece.tensor.fill_(-1)
        checkpoint.load(Path(folder, str(seed + 1)), wanted)
        check_values(wanted)
    kept = sorted(int(path.name) for path in Path(folder).glob("[0-9]*"))
    assert kept == [seeds - 1, seeds]
    whole = checkpoint.read_whole(Path(folder, str(seeds)))
    assert whole.keys() == SHAPES.keys()
    for name, tensor in whole.items():
        assert tensor.dtype == kinds[0]
        assert torch.equal(tensor, values(name, SHAPES[name], kinds[0]))


@pytest.mark.parametrize("world, seeds", [(1, 6), (3, 30)])
def test_round_trips(world, seeds, tmp_path):
    run(round_trips, world, str(tmp_path), seeds)


def read_by_torch(folder):
    """Other tools read it: torch's own makes a file for torch.load of it."""
    rng = random.Random(1)
    pieces = boxes_for(rng, torch.float64, dist.get_world_size(), dist.get_rank())
    checkpoint.write(folder, 7, pieces, {})
    if dist.get_rank() == 0:
        dcp_to_torch_save(f"{folder}/7", f"{folder}/whole.pt")
        for name, tensor in torch.load(f"{folder}/whole.pt").items():
            assert torch.equal(tensor, values(name, SHAPES[name], torch.float64))
    dist.barrier()


def test_torch_reads_it(tmp_path):
    run(read_by_torch, 2, str(tmp_path))


def test_what_a_kill_has_left_is_written_over(tmp_path):
    state = {"w": torch.arange(3.0)}
    (tmp_path / ".0").mkdir()
    checkpoint.write_whole(tmp_path, state, {})
    assert torch.equal(checkpoint.read_whole(tmp_path / "0")["w"], state["w"])


def test_a_folder_from_somebody_else_names_its_own_files_alone(tmp_path):
    """Its notes may have a right checksum, and say what they like."""
    checkpoint.write_whole(tmp_path, {"w": torch.arange(3.0)}, {})
    folder = tmp_path / "0"
    good = checkpoint.notes_of(folder)
    (tmp_path / "outside").write_text("private")
    assert checkpoint.is_whole(folder)
    for name in "../outside", str(tmp_path / "outside"):
        note(folder, {**good, "files": {name: checkpoint.checksum(tmp_path / "outside")}})
        assert not checkpoint.is_whole(folder)
        with pytest.raises(ValueError, match="is not in the folder"):
            checkpoint.read_box(folder, SimpleNamespace(relative_path=name))
    for notes in {}, [], 3, {"files": {}}:
        note(folder, notes)
        assert not checkpoint.is_whole(folder)


def note(folder, notes):
    text = json.dumps(notes).encode()
    checkpoint.put(folder / "notes.json", text + b"\n" + str(zlib.crc32(text)).encode())


# ---- what must not be saved ----------------------------------------------------


def holes(folder):
    """Something is missing, held but not written, written twice, or outside: an error each."""
    rank = dist.get_rank()
    half = torch.zeros(2, 3)
    good = [Piece("w", (4, 3), (2 * rank, 0), half, True)]
    assert checkpoint.write(folder, 1, good, {})
    twice = [Piece("w", (4, 3), (rank, 0), half, True)]
    missing = [Piece("w", (4, 3), (2 * rank, 0), half, rank == 0)]
    nobody = [*good, Piece("b", (4, 3), (2 * rank, 0), half, False)]
    outside = [Piece("w", (4, 3), (2 * rank, rank), half, True)]
    uneven = [Piece("w", (5, 3), (2 * rank, 0), torch.zeros(2 + rank, 3), True)]
    other = [Piece("w", (4, 3 + rank), (2 * rank, 0), torch.zeros(2, 3 + rank), True)]
    with pytest.raises(RuntimeError, match=r"w is \(4, 3\) and \(4, 4\)"):
        checkpoint.write(folder, 2, other, {}, keep=1)
    for wrong in (twice, missing, nobody, outside):
        with pytest.raises(RuntimeError, match="is not written exactly once"):
            checkpoint.write(folder, 2, wrong, {}, keep=1)
    assert checkpoint.write(folder, 3, uneven, {}, keep=1)
    assert sorted(path.name for path in Path(folder).glob("*")) == ["1", "3"]


def test_every_tensor_is_written_exactly_once(tmp_path):
    run(holes, 2, str(tmp_path))


# ---- modules, DTensors, AdamW ----------------------------------------------------


def trained(seed):
    """A small model after an AdamW step: two groups, one of them fused, one parameter frozen."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    model[1].bias.requires_grad_(False)
    weights = [model[0].weight, model[1].weight, model[1].bias]
    groups = [
        {"params": weights},
        {"params": [model[0].bias], "weight_decay": 0, "fused": True},
    ]
    return model, torch.optim.AdamW(groups, lr=0.1)


def train_once(model, optimizer):
    model.zero_grad()
    model(torch.ones(3)).square().sum().backward()
    optimizer.step()


def groups_come_back(folder):
    """Each group's moments and steps are what they were, and the next step is the same."""
    model, optimizer = trained(0)
    train_once(model, optimizer)
    pieces = pieces_of(model.named_parameters(), optimizer, True)
    assert len(pieces) == 4 + 2 * 3
    checkpoint.write(folder, 1, pieces, {})
    other, again = trained(1)

    def fresh():
        return pieces_of(other.named_parameters(), again, True)

    checkpoint.restore(Start(Path(folder, "1"), 1, 1, "--resume"), fresh, again)
    assert again.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    torch.testing.assert_close(again.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    train_once(model, optimizer)
    train_once(other, again)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_groups(tmp_path):
    run(groups_come_back, 1, str(tmp_path))


def dtensors(folder):
    """Cut unevenly, replicated, both: saved once and read into another placement."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wholes = {}
    for name, shape in SHAPES.items():
        if shape:
            wholes[name] = values(name, shape, torch.float64)
    placements = list(itertools.product((Replicate(), Shard(0)), repeat=2))
    steps = 0
    for first, second in itertools.permutations(placements, 2):
        steps += 1
        state = {name: distribute_tensor(t, mesh, first) for name, t in wholes.items()}
        checkpoint.write(folder, steps, all_pieces(state, True), {})
        state = {name: distribute_tensor(t * 0, mesh, second) for name, t in wholes.items()}
        checkpoint.load(Path(folder, str(steps)), all_pieces(state, False))
        for name, t in state.items():
            assert isinstance(t, DTensor)
            assert torch.equal(t.full_tensor(), wholes[name]), name


def all_pieces(state, writes):
    return [piece_of(name, t, writes) for name, t in state.items()]


def test_dtensors(tmp_path):
    run(dtensors, 4, str(tmp_path))


# ---- where a run begins ----------------------------------------------------------


STUMBLES = """
import os
import signal
import sys
sys.path.insert(0, {root!r})
import ddp
step = ddp.train_step
calls = []
def train_step(*args):
    calls.append(1)
    if len(calls) == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*args)
ddp.train_step = train_step
sys.exit(ddp.main())
"""


def torchrun(restarts, script, *flags):
    """One rank that is started again if it fails; all of torchrun's jobs are called "none"."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--master_port={port}",
               f"--max-restarts={restarts}", script, *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_restarts_go_on_from_what_their_own_job_has_saved(tmp_path):
    """The first job is killed in its fourth step, the second one finds what the first has saved."""
    program = tmp_path / "stumbles.py"
    program.write_text(STUMBLES.format(root=str(ROOT)))
    folder = tmp_path / "saved"
    flags = (*PROOF, "--no-check", "--save", str(folder), "--save-every", "2", "--steps")
    first = torchrun(2, str(program), *flags, "5")
    assert first.returncode == 0, first.stderr
    assert first.stdout.count(f"--save takes {folder}/2, 2 steps behind it") == 1
    second = torchrun(1, "ddp.py", *flags, "5")
    assert second.returncode != 0 and "takes" not in second.stdout
    assert second.stderr.count("holds step 5 already") == 2, second.stderr


@pytest.mark.parametrize("launcher, own", [("TORCHELASTIC", "7"), ("SLURM", "8")])
def test_a_restart_asks_the_launcher_that_has_made_it(launcher, own, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "name_by_torchrun", lambda: "7")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    args = SimpleNamespace(save=str(tmp_path), resume="there", init_from="")
    monkeypatch.setenv(f"{launcher}_RESTART_COUNT", "1")
    checkpoint.write_whole(tmp_path, {}, {"layers": 2})  # whoever imports weights has no job
    assert checkpoint.source(args) == ("--resume", "there")
    checkpoint.write_whole(tmp_path, {}, {"job": {**checkpoint.job(), launcher: "6"}})
    assert checkpoint.source(args) == ("--resume", "there")
    checkpoint.write_whole(tmp_path, {}, {"job": {launcher: own}})
    assert checkpoint.source(args) == ("--save", str(tmp_path))
    monkeypatch.setenv(f"{launcher}_RESTART_COUNT", "0")
    assert checkpoint.source(args) == ("--resume", "there")


def raises(condition, message, code):
    """In the place of require: the process goes on."""
    if not condition:
        raise RuntimeError(message)


def different_folders():
    """The steps that are behind ranks may be equal, and what they begin with may not."""
    checkpoint.require = raises
    rank = dist.get_rank()
    for fresh in (True, False):
        if fresh:
            start = Start(Path("saved", str(4 + rank)), flag="--init-from")
            says = "--init-from 4 with 0 steps .* here, --init-from 5 with 0 steps .* there"
        else:
            start = Start(Path("saved/4"), 4, 2, ("--save", "--resume")[rank])
            says = "--save 4 with 4 steps .* here, --resume 4 with 4 steps .* there"
        with pytest.raises(RuntimeError, match=says):
            checkpoint.agree(start)
    with pytest.raises(RuntimeError, match="no checkpoint here, --init-from 4 .* there"):
        checkpoint.agree((Start(), Start(Path("4"), flag="--init-from"))[rank])
    # machines may have folders of their own
    assert checkpoint.agree(Start(Path(f"machine {rank}", "4"), flag="--init-from"))
    assert not checkpoint.agree(Start())


def test_ranks_begin_with_one_checkpoint():
    run(different_folders, 2)
