"""Runs that are killed, stopped, resumed or disturbed: harness/checkpoint.py, harness/guard.py."""
import itertools
import os
import re
import resource
import shutil
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from conftest import (
    ALL, GAPS, PROOF, SMALL, _script, _start, check_refused, run, script,
)
from harness import checkpoint
from soak import soak

QUICK = (*PROOF, "--no-check")


def saved_in(folder):
    """The steps of the checkpoints there, as words. Names with a dot are drafts."""
    return sorted(path.name for path in folder.glob("[!.]*"))


def in_step(module, number, function):
    """Calls the function with the model before the number-th step."""
    step = module.train_step
    calls = itertools.count(1)

    def train_step(model, *args, **options):
        if next(calls) == number:
            function(model)
        return step(model, *args, **options)

    module.train_step = train_step


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Checkpoints after 2 and after 4 of 4 steps, and the losses of a run of 6 steps."""
    folder = tmp_path_factory.mktemp("good")
    script("ddp", 2, *QUICK, "--steps", "4", "--save", str(folder), "--save-every", "2")
    return folder, script("ddp", 1, *QUICK, "--steps", "6")["loss"]


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE = [("__0_0.distcp", flip), ("__1_0.distcp", Path.unlink), (".metadata", flip),
          ("notes.json", Path.unlink)]


def test_damaged_checkpoints_are_passed_by(good, tmp_path):
    folder, losses = good
    # of two ranks the second alone looks at the second largest file; both go back
    by_size = sorted((folder / "4").glob("__*"), key=lambda path: path.stat().st_size)
    cases = [*[("ddp", 1, *damage) for damage in DAMAGE], ("zero", 2, by_size[-2].name, flip)]
    for number, (technique, ranks, name, damage) in enumerate(cases):
        copy = tmp_path / str(number)
        shutil.copytree(folder, copy)
        damage(copy / "4" / name)
        flags = (*QUICK, "--steps", "6", "--resume", str(copy), "--save", str(copy))
        rest = script(technique, ranks, *flags)
        assert rest["loss"] == pytest.approx(losses[2:], rel=1e-12, abs=0), name
        assert saved_in(copy) == ["2", "6"]


OTHERWISE = [  # flags, and why the run does not go on from the checkpoint
    ("--resume {GOOD} --lr 1e-4", "saved with lr 0.001, not 0.0001"),
    ("--resume {GOOD} --steps 4", "4 behind it already"),
    ("--resume {GOOD}/2 --save {GOOD}", "holds step 4 already"),
    ("--save {GOOD}", "holds step 4 already"),
    ("--save {PHOTOS}", "2024 in it is no checkpoint"),
    ("--init-from {GOOD} --heads 2", "saved with heads 4, not 2"),
]


def test_checkpoints_that_do_not_fit(good, tmp_path):
    """--resume goes on with the same training, --init-from takes the weights of the same model.

    What is refused leaves the folder as it is.
    """
    folder, _ = good
    photo = tmp_path / "2024" / "photo"
    photo.parent.mkdir()
    photo.touch()
    places = {"GOOD": folder, "PHOTOS": tmp_path}
    lines = [([*QUICK, "--steps", "6", *flags.format(**places).split()], words)
             for flags, words in OTHERWISE]
    run(check_refused, 1, "ddp", lines)
    assert saved_in(folder) == ["2", "4"]
    checkpoint.clear(tmp_path / "2", tmp_path / ".2", failed="", keep=0)
    assert photo.exists()
    # what was trained for fewer positions, or without experts, has no weights for more
    weights = ("--init-from", str(folder))
    said = script("ddp", 2, *QUICK, "--seq", "17", *weights, code=2)
    assert "pos.weight is (16, 32) there, (17, 32) here" in said
    assert "it has no blocks.0.mlp." in script("moe", 2, *QUICK, *weights, code=2)
    # and none is dropped in silence
    state = {**checkpoint.read_whole(folder / "4"), "adapter.weight": torch.ones(1)}
    checkpoint.write_whole(tmp_path / "more", state, {})
    said = script("ddp", 2, *QUICK, "--init-from", str(tmp_path / "more"), code=2)
    assert "its adapter.weight is not in this model" in said


def sees_the_one_before(module):
    if os.environ["RANK"] == "1":
        checkpoint.numbered = lambda folder: [2]


def test_ranks_that_find_different_checkpoints(good):
    """The folder of rank 1's machine is not up to date."""
    flags = (*QUICK, "--steps", "6", "--resume", str(good[0]))
    said = script("ddp", 2, *flags, plant=sees_the_one_before, code=1)
    assert "--resume 4 with 4 steps behind it here, --resume 2 with 2 steps behind it there" in said


def full_disk(module, size=50_000):
    """No file of this process can grow beyond this."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def full_until_the_fourth_step(module):
    full_disk(module)
    in_step(module, 4, lambda model: full_disk(module, resource.RLIM_INFINITY))


def test_a_full_disk(good, tmp_path):
    """At the last save: one line, exit code 1 on all ranks, no draft, and what was saved before is
    still there. Before, the run goes on, and saves when there is room.
    """
    place = tmp_path / "saved"
    shutil.copytree(good[0], place)
    flags = (*QUICK, "--steps", "6", "--resume", str(place), "--save", str(place))
    said = script("ddp", 2, *flags, plant=full_disk, code=1)
    assert said == f"--save {place}/6: File too large: not saved\n"
    assert {path.name for path in place.iterdir()} == {"2", "4"}
    flags = (*QUICK, "--steps", "5", "--save", str(tmp_path / "new"), "--save-every", "2")
    report = script("ddp", 2, *flags, "--save-async", plant=full_until_the_fourth_step)
    assert len(report["loss"]) == 5 and saved_in(tmp_path / "new") == ["4", "5"]


def requeued(module):
    os.environ.update(SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1")


def test_a_job_that_is_started_again_goes_on_from_its_own(good, tmp_path):
    """What another one has saved is refused, at every start."""
    flags = (*QUICK, "--save", str(tmp_path), "--steps")
    assert len(script("ddp", 2, *flags, "2", plant=requeued)["loss"]) == 2
    assert len(script("ddp", 2, *flags, "5", plant=requeued)["loss"]) == 3
    others = (*QUICK, "--save", str(good[0]), "--steps", "6")
    assert "--resume it" in script("ddp", 2, *others, code=2, plant=requeued)


def test_weights_alone(good, tmp_path):
    """Training for shorter sequences starts at step 0 from the saved weights, as the plain GPT
    does. Where it is resumed, the plain GPT begins there.
    """
    folder, losses = good
    flags = (*PROOF, "--lr", "1e-4", "--seq", "9")
    tuned = script("hybrid_3d", 2, *flags, "--init-from", str(folder), "--save", str(tmp_path))
    rest = script("ddp", 2, *flags, "--resume", str(tmp_path), "--steps", "3")
    assert len(tuned["plain_loss"]) == 2 and len(rest["plain_loss"]) == 1
    assert tuned["loss"][0] < losses[0] - 0.01
    for report in tuned, rest:
        assert max(report["check"][kind] for kind in GAPS) <= 1e-10


RELAY = (  # not moe: experts are of no other script but hybrid_3d
    ("ddp", 2), ("zero", 2, "--stage", "3"), ("fsdp", 2), ("tensor_parallel", 2),
    ("pipeline_parallel", 2), ("context_parallel", 2), ("amp_accum_ckpt", 2, "--amp", "off"),
    ("hybrid_3d", 4, "--dp", "2", "--tp", "2", "--pp", "1"), ("ddp", 1),
    # DTensors: cut unevenly, and both cut and replicated
    ("fsdp", 3, "--impl", "torch"), ("tensor_parallel", 2, "--impl", "torch"), ("ddp", 1),
)


def test_many_runs_are_one_training(tmp_path):
    """Each script goes on where another one has stopped, with the losses of a single run."""
    together = []
    folder = str(tmp_path)
    for number, (name, ranks, *flags) in enumerate(RELAY, 1):
        if together:
            flags += ["--resume", folder]
        steps = str(2 * number)
        report = script(name, ranks, *QUICK, *flags, "--steps", steps, "--save", folder)
        together += report["loss"]
    alone = script("ddp", 1, *QUICK, "--steps", str(2 * len(RELAY)))
    assert together == pytest.approx(alone["loss"], rel=1e-10, abs=0)


def ask_rank_1(model):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_saves_and_ends(tmp_path):
    flags = (*PROOF, "--steps", "5")
    asked = partial(in_step, number=3, function=ask_rank_1)
    script("ddp", 2, *flags, "--save", str(tmp_path), "--save-async", plant=asked)  # exit code 0
    assert saved_in(tmp_path) == ["3"]
    rest = script("ddp", 2, *flags, "--resume", str(tmp_path))
    assert len(rest["loss"]) == 2 and rest["check"]["passed"]


def fails(change):
    """-> exit codes and stderr of ddp on 2 ranks that has to fail, and soon. change(model) is
    called before the second step.
    """
    with tempfile.NamedTemporaryFile() as errors:
        plant = partial(in_step, number=2, function=change)
        words = (*SMALL, "--timeout", "1", "--no-check")
        codes = _start(_script, 2, "ddp", words, plant, errors.name, limit=20)
        assert all(codes), codes
        return codes, Path(errors.name).read_text()


def die(model):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def wait_alone(model):
    if os.environ["RANK"] == "0":
        dist.barrier()
    time.sleep(2)


def test_a_rank_that_dies_or_hangs_takes_the_others_down():
    codes, said = fails(die)
    assert codes[1] == -signal.SIGKILL
    assert "error: rank 0, step 1: " in said, said
    _, said = fails(wait_alone)
    assert "error: rank 0, step 1: " in said and "dist.barrier()" in said, said


def poison(model):
    parameter = model.get_parameter("module.blocks.0.attn.q.bias")
    parameter.register_hook(lambda gradient: gradient * float("nan"))


def test_what_is_nan_is_named():
    _, said = fails(poison)
    line = r"step 1: loss 5\.\d+, gradient norm nan; not finite: blocks.0.attn.q.bias and 0 more"
    assert re.search(line, said), said


if ALL:
    @pytest.mark.parametrize("kind", [(), ("--save-async",)])
    def test_a_killed_rank_loses_nothing(kind):
        """One kill; ./run.sh soak makes twenty, and twenty more of hybrid_3d's ranks."""
        assert soak(1, 1, "ddp", 2, *SMALL[:-2], *kind, steps=15) == 1  # it says the steps
