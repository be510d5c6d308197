"""Pieces: any tensor, cut in any way, saved and read back in any other way, exactly."""
import itertools
import math
import os
import pickle
import random
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from conftest import be_rank, run_ranks
from harness import checkpoint, dcp
from harness.checkpoint import Piece, Saver, piece_of, run_pieces
from tools.ranks import start

SHAPES = {"cube": (3, 5, 7), "tok": (13, 5), "norm": (11,), "scale": (), "four": (2, 3, 1, 5)}
NOTES = {"identity": {}, "extra": {}}


def values(name, shape, dtype):
    """The whole tensor: every element another number that bfloat16 can hold."""
    seed = sum(name.encode())
    numbers = torch.arange(math.prod(shape), dtype=torch.float64).view(shape) + seed
    return (numbers % 199).to(dtype)


def boxes_for(rng, dtype, world, rank):
    """A grid of pieces of all of SHAPES, dealt to ranks at random, some held twice -> this rank's.
    """
    pieces = []
    for name, shape in SHAPES.items():
        whole = values(name, shape, dtype)
        spans = []
        for length in shape:
            at = rng.randrange(length + 1)  # 0 and the whole give a part without elements
            spans.append([(0, at), (at, length)])
        for box in itertools.product(*spans):
            start = tuple(low for low, _ in box)
            part = whole[tuple(slice(*span) for span in box)]
            for writes in True, False:
                if rng.randrange(world) == rank:
                    pieces.append(Piece(name, shape, start, part.clone(), writes))
    return pieces


def runs_for(rng, dtype, world, rank):
    """The same tensors laid end to end and cut into runs, as flat shards are."""
    flat = torch.cat([values(name, SHAPES[name], dtype).flatten() for name in SHAPES])
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


def round_trips(folder, seeds):
    """Whatever has been saved as boxes or runs is read back as others, in either dtype.

    Every other one is written in the background, while its tensors change already.
    """
    world = dist.get_world_size()
    rank = dist.get_rank()
    for seed in range(seeds):
        rng = random.Random(seed)  # the same on every rank
        makers = [rng.choice([boxes_for, runs_for]) for _ in range(2)]
        kinds = [rng.choice([torch.float64, torch.bfloat16]) for _ in range(2)]
        saver = Saver(folder, seed % 2 == 1)
        saved = makers[0](rng, kinds[0], world, rank)
        saver.save(seed + 1, saved, NOTES)
        for piece in saved:
            piece.tensor.fill_(-2)
        saver.wait()
        wanted = makers[1](rng, kinds[1], world, rank)
        for piece in wanted:
            piece.tensor.fill_(-1)
        dcp.load(Path(folder, str(seed + 1)), wanted)
        for piece in wanted:
            whole = values(piece.name, piece.shape, piece.tensor.dtype)
            for dim, length in enumerate(piece.tensor.shape):
                whole = whole.narrow(dim, piece.start[dim], length)
            assert torch.equal(piece.tensor, whole), piece
        dist.barrier()
    if rank == 0:
        assert checkpoint.numbered(folder) == [seeds - 1, seeds]
        dcp_to_torch_save(f"{folder}/{seeds}", f"{folder}/whole.pt")  # other tools read it
        ours = checkpoint.read_whole(Path(folder, str(seeds)))
        theirs = torch.load(f"{folder}/whole.pt")
        assert ours.keys() == SHAPES.keys()
        for name, tensor in ours.items():
            assert tensor.dtype == kinds[0] and torch.equal(tensor, theirs[name])
            assert torch.equal(tensor, values(name, SHAPES[name], kinds[0]))


def test_round_trips(tmp_path):
    run_ranks(round_trips, 3, str(tmp_path), 8)


def hole(folder, change):
    """Two ranks have half a tensor each; then something is missing, or there twice."""
    rank = dist.get_rank()
    saver = Saver(folder)
    good = Piece("w", (4, 3), (2 * rank, 0), torch.zeros(2, 3))
    saver.save(1, [good], NOTES)
    wrong = {"missing": good._replace(writes=rank == 0), "twice": good._replace(start=(rank, 0))}
    saver.save(2, [wrong[change]], NOTES)


@pytest.mark.parametrize("change", ["missing", "twice"])
def test_what_is_not_whole_is_not_saved(change, tmp_path):
    assert start(be_rank, 2, hole, (str(tmp_path), change)) == [1, 1]
    assert checkpoint.numbered(tmp_path) == [1]


def killed(folder, number, in_background):
    """This process ends when it touches the folder for the number-th time."""
    touched = []

    def touch(event, words):
        kinds = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")
        if event in kinds and str(words[0]).startswith(folder):
            touched.append(event)
            if len(touched) == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(touch)
    saver = Saver(folder, in_background)
    saver.save(2, [piece_of("w", torch.full((9,), 2.0))], NOTES)
    saver.wait()


def test_a_kill_at_any_time_leaves_a_whole_one(tmp_path):
    kinds = set()
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        checkpoint.write_whole(folder, {"w": torch.ones(9)}, {})
        (folder / "0").rename(folder / "1")
        in_background = number % 2 == 0
        codes = start(be_rank, 1, killed, (str(folder), number, in_background))
        place, notes = checkpoint.newest(folder, "")
        kinds.add(place.name)
        assert torch.equal(checkpoint.read_whole(place)["w"], torch.full((9,), float(place.name)))
        if codes == [0]:
            break
        assert codes == [-signal.SIGKILL]
    assert number > 4 and kinds == {"1", "2"}


class Attack:
    """Unpickled, it runs a command."""

    def __reduce__(self):
        return os.system, ("touch mark",)


def test_a_folder_from_somebody_else_can_at_worst_fail(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint.write_whole(tmp_path, {"w": torch.arange(3.0)}, {})
    file = tmp_path / "0" / ".metadata"
    good = file.read_bytes()
    attacks = {"is not in the folder": good.replace(b"\x0c__0_0.distcp", b"\x0c../secret.pt"),
               "posix.system has no place": pickle.dumps(Attack()),
               "metadata: ": good[:-40]}
    for words, data in attacks.items():
        assert data != good
        file.write_bytes(data)
        with pytest.raises(ValueError, match=words):
            checkpoint.read_whole(tmp_path / "0")
    assert not Path("mark").exists()
