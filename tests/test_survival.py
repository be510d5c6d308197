"""Runs that are resumed, killed or disturbed: harness/checkpoint.py, harness/run.py."""
import itertools
import json
import os
import re
import resource
import shutil
import signal
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from conftest import (
    PROOF, SMALL, check_equal, check_refused, run_ranks, run_script, worst_gap)
from harness import checkpoint, dcp, run
from harness.meet import patience
from tools import ranks

QUICK = (*PROOF, "--no-check")


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
    run_script("ddp", 2, *QUICK, "--steps", "4", "--save", str(folder), "--save-every", "2")
    return folder, run_script("ddp", 1, *QUICK, "--steps", "6")["loss"]


def test_one_that_was_not_finished_is_passed_by(good, tmp_path):
    """Its table of contents, which is written last, is not there. It is written again."""
    folder, losses = good
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "4" / ".metadata").unlink()
    log = tmp_path / "log"
    log.write_text('{"step": 1}\n{"st')  # a full disk has cut off a line
    flags = (*QUICK, "--steps", "4", "--resume", str(copy), "--save", str(copy))
    rest = run_script("zero", 2, *flags, "--log-file", str(log))
    assert rest["loss"] == pytest.approx(losses[2:4], rel=1e-12, abs=0)
    assert checkpoint.numbered(copy) == [2, 4]
    # the log goes on behind what is there
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3]


def shorter(module):
    """The text has been changed since."""
    usual = run.load_corpus
    run.load_corpus = lambda path, seq: usual(path, seq).between(0, 999)


OTHERWISE = [  # flags, and why the run does not go on from the checkpoint
    ("--resume {GOOD} --lr 1e-4", "saved with lr 0.001, not 0.0001"),
    ("--resume {GOOD} --steps 4", "4 behind it already"),
    ("--resume {GOOD}/2 --save {GOOD}", "holds step 4 already"),
    ("--save {GOOD}", "holds step 4 already"),
    ("--init-from {GOOD} --heads 2", "saved with heads 4, not 2"),
]


def test_checkpoints_that_do_not_fit(good, tmp_path):
    """--resume goes on with the same training, --init-from takes the weights of the same model.

    What is refused leaves the folder as it is.
    """
    folder, _ = good
    lines = [([*QUICK, "--steps", "6", *flags.format(GOOD=folder).split()], words)
             for flags, words in OTHERWISE]
    run_ranks(check_refused, 1, "ddp", lines)
    assert checkpoint.numbered(folder) == [2, 4]
    # what was trained for fewer positions, or without experts, has no weights for more
    weights = ("--init-from", str(folder))
    said = run_script("ddp", 2, *QUICK, "--seq", "17", *weights, code=2)
    assert "pos.weight is (16, 32) there, (17, 32) here" in said
    assert "it has no blocks.0.mlp." in run_script("moe", 2, *QUICK, *weights, code=2)
    # and none is dropped in silence
    state = {**checkpoint.read_whole(folder / "4"), "adapter.weight": torch.ones(1)}
    checkpoint.write_whole(tmp_path / "more", state, {})
    said = run_script("ddp", 2, *QUICK, "--init-from", str(tmp_path / "more"), code=2)
    assert "its adapter.weight is not in this model" in said
    dcp.save(tmp_path / "theirs", [checkpoint.piece_of("w", torch.ones(1))])
    said = run_script("ddp", 2, *QUICK, "--init-from", str(tmp_path / "theirs"), code=2)
    assert "theirs: is of another program" in said
    longer = (*QUICK, "--steps", "6", "--resume", str(folder))
    said = run_script("ddp", 2, *longer, plant=shorter, code=2)
    assert "--data (the default): 999 tokens, but " in said
    for lost in "01":  # a file that rank 0 has written, with the notes, or rank 1
        shutil.copytree(folder, tmp_path / lost)
        (tmp_path / lost / "4" / f"__{lost}_0.distcp").unlink()
        flags = (*QUICK, "--steps", "6", "--resume", str(tmp_path / lost))
        said = run_script("ddp", 2, *flags, code=2)
        assert "/4: a file of it is missing or damaged (No such file" in said


def test_held_out_text_goes_on(tmp_path):
    """Its loss is that of one training, too."""
    flags = ("--eval-every", "1", "--save", str(tmp_path))
    run_script("ddp", 2, *QUICK, *flags)
    rest = check_equal("zero", 2, *flags, "--steps", "4", "--resume", str(tmp_path))
    assert list(rest["validation"]) == ["1", "2", "3"] and rest["check"]["validation"] <= 1e-10
    said = run_script("ddp", 1, *QUICK, "--steps", "6", "--resume", str(tmp_path), code=2)
    assert "saved with --eval-every True, not False" in said


def full_disk(module, size=50_000):
    """No file of this process can grow beyond this."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.parametrize("flags", [(), ("--save-async",)])
def test_a_full_disk(good, tmp_path, flags):
    """One line, exit code 1 on all ranks, and what was saved before is still there."""
    place = tmp_path / "saved"
    shutil.copytree(good[0], place)
    flags = (*QUICK, "--steps", "6", "--resume", str(place), "--save", str(place), *flags)
    said = run_script("ddp", 2, *flags, plant=full_disk, code=1)
    words = f"ddp.py: error: --save {place}/6: not saved: rank 0: a file was cut "
    assert said.startswith(words), said
    assert said.count("\n") == 1, said
    assert checkpoint.numbered(place) == [2, 4]


def test_weights_alone(good, tmp_path):
    """Training for shorter sequences starts at step 0 from the saved weights, as the plain GPT
    does. Where it is resumed, the plain GPT begins there.
    """
    folder, losses = good
    flags = (*PROOF, "--lr", "1e-4", "--seq", "9")
    tuned = run_script("hybrid_3d", 2, *flags, "--init-from", str(folder), "--save", str(tmp_path))
    rest = run_script("ddp", 2, *flags, "--resume", str(tmp_path), "--steps", "3")
    assert len(tuned["plain_loss"]) == 2 and len(rest["plain_loss"]) == 1
    assert tuned["loss"][0] < losses[0] - 0.01
    for report in tuned, rest:
        assert worst_gap(report["check"]) <= 1e-10


RELAY = [  # not moe: experts are of no other script but hybrid_3d
    "ddp 2", "zero 3 --stage 3", "fsdp 2", "tensor_parallel 2",
    "pipeline_parallel 2 --layers-per-stage 0,4", "pipeline_parallel 2 --schedule zb-v",
    "context_parallel 2", "amp_accum_ckpt 2 --amp off", "hybrid_3d 4 --dp 2 --pp 2 --zero 1",
    "hybrid_3d 4 --dp 2 --tp 2 --sp --zero 3", "hybrid_3d 4 --cp 2 --pp 2 --zero 2", "ddp 1",
    # DTensors: cut unevenly, and both cut and replicated
    "fsdp 3 --impl torch", "tensor_parallel 2 --impl torch", "ddp 1",
]
OF_LLAMA = [  # with frozen parameters
    "ddp 3 --impl torch", "fsdp 4 --hsdp 2", "tensor_parallel 4",  # 2 heads of keys and values
    "zero 2 --stage 1 --offload optimizer", "ddp 2",
]
OF_MUON = [
    "zero 2 --stage 3", "fsdp 3", "tensor_parallel 2 --sp", "ddp 1",
    "hybrid_3d 4 --dp 2 --pp 2 --zero 2", "zero 2 --stage 1",
]


@pytest.mark.parametrize("form, legs", [
    ("--layers 4", RELAY), ("--model llama-toy --train blocks.1|norm|head", OF_LLAMA),
    ("--model llama-toy --kv-heads 2 --hidden 45 --optimizer muon", OF_MUON),
])
def test_many_runs_are_one_training(form, legs, tmp_path):
    """Each script goes on where another one has stopped, equal to one process in gradients and
    parameters, with the losses of a single run."""
    flags = ("--vocab", "257", *form.split())
    folder = str(tmp_path)
    together = []
    for number, leg in enumerate(legs, 1):
        name, world, *more = leg.split()
        if together:
            more += ["--resume", folder]
        more += ["--steps", str(2 * number), "--save", folder]
        together += check_equal(name, int(world), *flags, *more)["loss"]
    alone = check_equal("ddp", 1, *flags, "--steps", str(2 * len(legs)))
    assert together == pytest.approx(alone["loss"], rel=1e-10, abs=0)


def fails(change, timeout=20):
    """-> exit codes and stderr of ddp on 2 ranks that has to fail, and soon. change(model) is
    called before the second step. timeout: in seconds; on a busy machine a rank may need some.
    """
    plant = partial(in_step, number=2, function=change)
    words = (*SMALL, "--timeout", str(timeout), "--no-check")
    codes, _, said = ranks.report(2, "ddp", words, plant, limit=40)
    assert all(codes), codes
    return codes, said


def wait_for_nobody(rank, world, port, path):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)
    with patience(lambda: "rank 0 waits for rank 1", limit=0.2, seconds=0.1):
        time.sleep(60)


def test_one_that_waits_says_so_and_gives_up(tmp_path):
    assert ranks.start(wait_for_nobody, 1, tmp_path / "said") == [1]
    lines = ["rank 0 waits for rank 1", "rank 0 waits for rank 1: given up after 0.2 s"]
    assert (tmp_path / "said").read_text().splitlines() == lines


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
    _, said = fails(wait_alone, timeout=1)
    assert "error: rank 0, step 1: " in said and "dist.barrier()" in said, said
    assert "--timeout" in said, said


def poison(model):
    parameter = model.get_parameter("module.blocks.0.attn.q.bias")
    parameter.register_hook(lambda gradient: gradient * float("nan"))


def test_what_is_nan_is_named():
    _, said = fails(poison)
    line = r"step 1: loss 5\.\d+, gradient norm nan; not finite: blocks.0.attn.q.bias and 0 more"
    assert re.search(line, said), said
