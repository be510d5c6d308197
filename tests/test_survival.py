"""Runs that are killed, stopped, resumed or disturbed: harness/checkpoint.py, harness/guard.py."""
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from conftest import (
    ALL, GAPS, PROOF, ROOT, SMALL, _script, _start, alone, check_refused, run, script,
)
import common
from common import GPTConfig, build
from harness import checkpoint, guard
from soak import soak

QUICK = (*PROOF, "--no-check")


def saved_in(folder):
    """The steps of the checkpoints there, as words. Names with a dot are the lock and drafts."""
    return sorted(path.name for path in Path(folder).glob("[!.]*"))


def in_step(module, number, function):
    """Calls the function before the number-th step."""
    step = module.train_step
    calls = []

    def train_step(*args, **options):
        calls.append(1)
        if len(calls) == number:
            function()
        return step(*args, **options)

    module.train_step = train_step


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Checkpoints after 2 and after 4 of 4 steps, and the losses of a run of 6 steps."""
    folder = tmp_path_factory.mktemp("good")
    script("ddp", 2, *QUICK, "--steps", "4", "--save", str(folder), "--save-every", "2")
    return folder, script("ddp", 1, *QUICK, "--steps", "6")["loss"]


# ---- damaged checkpoints: the one before is taken, or one line says what is wrong --------


def truncate(file, data):
    file.write_bytes(data[:-100])


def zero(file, data):
    file.write_bytes(bytes(len(data)))


def flip(file, data):
    middle = len(data) // 2
    file.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1:])


def remove(file, data):
    file.unlink()


DAMAGE = [
    ("__0_0.distcp", truncate), ("__0_0.distcp", zero), ("__0_0.distcp", flip),
    ("__1_0.distcp", remove), ("__0_generators.pt", flip), (".metadata", flip),
    (".metadata", remove), ("notes.json", flip), ("notes.json", remove),
]


def test_damaged_checkpoints_are_passed_by(good, tmp_path):
    folder, losses = good
    copies = [tmp_path / str(i) for i in range(len(DAMAGE))]
    runs = []
    for copy, (name, damage) in zip(copies, DAMAGE):
        shutil.copytree(folder, copy)
        file = copy / "4" / name
        damage(file, file.read_bytes())
        runs.append((*QUICK, "--steps", "6", "--resume", str(copy), "--save", str(copy)))
    for copy, rest in zip(copies, alone("ddp", *runs)):
        assert rest["loss"] == pytest.approx(losses[2:], rel=1e-12, abs=0), copy
        assert saved_in(copy) == ["2", "6"]
    shutil.rmtree(copies[0] / "2")
    (copies[0] / "6" / "notes.json").unlink()
    said = script("ddp", 1, *PROOF, "--steps", "9", "--resume", str(copies[0]), code=2)
    assert "6: No such file" in said


def test_two_ranks_share_out_the_files(good, tmp_path):
    """Either of them may find what is wrong; both go back to the one before."""
    folder, losses = good
    for name in "__0_0.distcp", "__1_generators.pt":
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        file = copy / "4" / name
        flip(file, file.read_bytes())
        rest = script("zero", 2, *QUICK, "--steps", "6", "--resume", str(copy))
        assert rest["loss"] == pytest.approx(losses[2:], rel=1e-12, abs=0)


# ---- checkpoints that do not fit, folders that cannot be used ----------------------------


OTHERWISE = [  # flags, and why the run does not go on from the checkpoint
    ("--resume GOOD --lr 1e-4", "saved with lr 0.001, not 0.0001"),
    ("--resume GOOD --width 64", "saved with width 32, not 64"),
    ("--resume GOOD --heads 2", "saved with heads 4, not 2"),
    ("--resume GOOD --eval-every 2", "saved with held_out False, not True"),
    ("--resume GOOD --decay cosine", "saved with decay none, not cosine"),
    ("--resume GOOD --steps 4", "4 behind it already"),
    ("--resume GOOD/2 --save GOOD", "holds step 4 already"),
    ("--save GOOD", "holds step 4 already"),
    ("--save-async", "--save-async wants --save DIR"),
    ("--resume EMPTY", "no whole checkpoint"),
    ("--resume NONE", "No such file"),
    ("--init-from GOOD --layers 3", "saved with layers 2, not 3"),
    ("--init-from GOOD --heads 2", "saved with heads 4, not 2"),
]


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_checkpoints_that_do_not_fit(good, tmp_path):
    """--resume goes on with the same training, --init-from takes the weights of the same model.

    What is refused leaves the folder as it is.
    """
    folder, _ = good
    empty = tmp_path / "empty"
    empty.mkdir()
    before = files_in(folder)
    lines = []
    for flags, words in OTHERWISE:
        flags = flags.replace("GOOD", str(folder)).replace("EMPTY", str(empty))
        flags = flags.replace("NONE", str(tmp_path / "none"))
        lines.append(([*QUICK, "--steps", "6", *flags.split()], words))
    run(check_refused, 1, "ddp", lines)
    assert files_in(folder) == before


def test_other_peoples_folders_stay(tmp_path):
    """A folder with a number for a name may hold something else than a checkpoint."""
    photo = tmp_path / "2024" / "photo"
    photo.parent.mkdir()
    photo.touch()
    said = script("ddp", 1, *QUICK, "--steps", "2", "--save", str(tmp_path), code=2)
    assert "2024 in it is no checkpoint" in said
    checkpoint.clear(tmp_path / "2", tmp_path / ".2", failed="", keep=0)
    assert photo.exists()


def sees_the_one_before(module):
    """The folder of rank 1's machine is not up to date."""
    newest = checkpoint.newest

    def stale(folder, flag, passed):
        if os.environ["RANK"] == "1":
            folder = str(Path(folder, "2"))
        return newest(folder, flag, passed)

    checkpoint.newest = stale


def test_ranks_that_find_different_checkpoints(good):
    folder, _ = good
    said = script("ddp", 2, *QUICK, "--steps", "6", "--resume", str(folder),
                  plant=sees_the_one_before, code=1)
    assert "--resume 4 with 4 steps behind it here, --resume 2 with 2 steps behind it there" in said


# ---- one run saves, on a disk that may be full -------------------------------------------


def test_two_runs_do_not_save_to_one_folder(tmp_path):
    """While this process saves there, another one is refused. What a dead one left is no lock."""
    other = os.fork()
    if other == 0:
        checkpoint.claim(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(other, 0)
    script("ddp", 2, *QUICK, "--save", str(tmp_path))
    assert checkpoint.claim(tmp_path) == ""
    said = script("ddp", 2, *QUICK, "--steps", "6", "--resume", str(tmp_path), "--save",
                  str(tmp_path), code=2)
    assert "another run is saving there" in said
    assert saved_in(tmp_path) == ["2"]


def limit_files(size):
    """No file of this process can grow beyond this: what a full disk looks like from here."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def full_disk(module):
    limit_files(50_000)


def disk_full_until_the_fourth_step(module):
    limit_files(50_000)
    in_step(module, 4, lambda: limit_files(resource.RLIM_INFINITY))


@pytest.mark.parametrize("kind", ["--save", "--save-async"])
def test_a_full_disk(kind, good, tmp_path):
    """At the last save: one line, exit code 1 on all ranks, no draft, and what was saved before is
    still there. Before, the run goes on, and saves when there is room.
    """
    folder, _ = good
    place = tmp_path / "saved"
    shutil.copytree(folder, place)
    more = [kind][kind == "--save":]
    flags = (*QUICK, *more, "--steps", "6", "--resume", str(place), "--save", str(place))
    said = script("ddp", 2, *flags, plant=full_disk, code=1)
    assert said == f"--save {place}/6: File too large: not saved\n"
    assert sorted(path.name for path in place.iterdir()) == [".lock", "2", "4"]
    flags = (*QUICK, *more, "--steps", "5", "--save", str(tmp_path / "new"), "--save-every", "2")
    report = script("ddp", 2, *flags, plant=disk_full_until_the_fourth_step)
    assert len(report["loss"]) == 5 and saved_in(tmp_path / "new") == ["4", "5"]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


# ---- from one run to another -------------------------------------------------------------


def requeued(module):
    os.environ.update(SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1")


def test_a_job_that_is_started_again_goes_on_from_its_own(good, tmp_path):
    """What another one has saved is refused, at every start."""
    flags = (*QUICK, "--save", str(tmp_path), "--steps")
    before_its_first_checkpoint = script("ddp", 2, *flags, "2", plant=requeued)
    assert len(before_its_first_checkpoint["loss"]) == 2
    assert len(script("ddp", 2, *flags, "5", plant=requeued)["loss"]) == 3
    others = (*QUICK, "--save", str(good[0]), "--steps", "6")
    assert "--resume it" in script("ddp", 2, *others, code=2, plant=requeued)


def test_the_name_of_a_job(monkeypatch):
    """torchrun calls every job "none", and a store is one job's alone: its ranks agree there."""
    stores = [dist.HashStore(), dist.HashStore()]
    names = []
    for store in (*stores, *stores):
        monkeypatch.setattr(checkpoint, "agents_store", lambda store=store: store)
        names.append(checkpoint.job.__wrapped__())
    assert names[:2] == names[2:] and names[0] != names[1]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "my run")
    assert checkpoint.job.__wrapped__() == "my run"


@pytest.mark.parametrize("name", ["ddp", "hybrid_3d"])
def test_weights_alone(name, tmp_path):
    """Training on another text starts at step 0 from the saved weights, as the plain GPT does."""
    text = tmp_path / "text"
    text.write_text("to be or not to be " * 99)
    folder = str(tmp_path / "saved")
    first = script(name, 2, *QUICK, "--save", folder)
    other = ("--data", str(text), "--lr", "1e-4")
    tuned = script(name, 2, *PROOF, *other, "--init-from", folder)
    plain = script(name, 1, *QUICK, *other)
    assert len(tuned["loss"]) == 2 and tuned["check"]["passed"]
    assert max(tuned["check"][kind] for kind in GAPS) <= 1e-10
    assert tuned["loss"][0] not in (first["loss"][0], plain["loss"][0])


def test_tuning_is_resumed(good, tmp_path):
    """The plain GPT cannot replay it from step 0, and begins where the resumed run does."""
    folder, _ = good
    saved = str(tmp_path)
    script("ddp", 1, *QUICK, "--init-from", str(folder), "--save", saved)
    script("ddp", 1, *QUICK, "--resume", saved, "--save", saved, "--steps", "3")
    rest = script("ddp", 1, *PROOF, "--resume", saved, "--steps", "4")
    assert len(rest["plain_loss"]) == 1
    assert max(rest["check"][kind] for kind in GAPS) <= 1e-10


def test_weights_for_a_shorter_sequence_in_another_dtype(good):
    """The first positions are used: the loss is that of the plain GPT with just these."""
    folder, _ = good
    flags = (*SMALL, "--no-check", "--pad", "0.3", "--steps", "1", "--seq", "9", "--dtype", "fp32")
    tuned = script("ddp", 2, *flags, "--init-from", str(folder))
    assert tuned["loss"][0] == pytest.approx(loss_with(folder / "4", seq=9), rel=1e-5)
    said = script("ddp", 2, *QUICK, "--seq", "17", "--init-from", str(folder), code=2)
    assert "pos.weight is (16, 32) there, (17, 32) here" in said


def loss_with(folder, seq):
    """The plain GPT's loss of step 0, with these weights."""
    cfg = common.GPTConfig(layers=2, width=32, heads=4, vocab=256, seq=seq)
    state = checkpoint.read_whole(folder)
    state = {name: t for name, t in state.items() if not checkpoint.is_state(name)}
    state["pos.weight"] = state["pos.weight"][:seq]
    state["head.weight"] = state["tok.weight"]
    model = common.build(cfg, 0, "cpu", torch.float64)
    model.load_state_dict(state)
    x, y, valid = common.get_batch(common.load_corpus("", seq), seq, 0, 0, 8, 0.3)
    return (common.loss_sum(model(x), y) / valid).item()


RELAY = (  # not moe: experts are of no other script but hybrid_3d
    ("ddp", 2), ("zero", 2, "--stage", "3"), ("fsdp", 2), ("tensor_parallel", 2),
    ("pipeline_parallel", 2), ("context_parallel", 2), ("amp_accum_ckpt", 2, "--amp", "off"),
    ("hybrid_3d", 4, "--dp", "2", "--tp", "2", "--pp", "1"), ("ddp", 1),
)


def test_nine_runs_are_one_training(tmp_path):
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


def test_weights_with_and_without_experts(good, tmp_path):
    folder, _ = good
    said = script("moe", 2, *QUICK, "--init-from", str(folder), code=2)
    assert "it has no blocks.0.mlp." in said
    script("moe", 2, *QUICK, "--save", str(tmp_path))
    said = script("ddp", 2, *QUICK, "--init-from", str(tmp_path), code=2)
    assert "it has no blocks.0.mlp.up" in said


# ---- signals -----------------------------------------------------------------------------


def asked_in_the_third(module):
    """SIGTERM for rank 1 alone, in the third step."""
    in_step(module, 3, lambda: os.environ["RANK"] == "1" and os.kill(os.getpid(), signal.SIGTERM))


@pytest.mark.parametrize("name", ["ddp", "hybrid_3d"])
def test_sigterm_saves_and_ends(name, tmp_path):
    flags = (*PROOF, "--steps", "5")
    folder = str(tmp_path)
    words = ("--save", folder, "--save-async")
    script(name, 2, *flags, *words, plant=asked_in_the_third)  # exit code 0 on both
    assert saved_in(folder) == ["3"]
    rest = script(name, 2, *flags, "--resume", folder)
    assert len(rest["loss"]) == 2 and rest["check"]["passed"]


# ---- ranks that die, hang or differ ------------------------------------------------------


def fails(name, *flags, plant):
    """-> exit codes and stderr of a run on 2 ranks that has to fail, and within 20 s."""
    with tempfile.NamedTemporaryFile() as errors:
        start = time.monotonic()
        words = (*SMALL, "--timeout", "2", "--no-check", *flags)
        codes = _start(_script, 2, name, words, plant, errors.name)
        assert time.monotonic() - start < 20 and all(codes), codes
        return codes, Path(errors.name).read_text()


def in_the_fifth_all_reduce(change, module):
    """The tensor that is reduced is change(rank, tensor)."""
    reduce = dist.all_reduce
    calls = []

    def all_reduce(t, *args, **kwargs):
        calls.append(1)
        if len(calls) == 5:
            t = change(int(os.environ["RANK"]), t)
        return reduce(t, *args, **kwargs)

    dist.all_reduce = all_reduce


def dies(rank, t):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return t


def other_shape(rank, t):
    if rank == 1:
        return t.new_zeros(7)
    return t


def nobody_joins(rank, t):
    if rank == 0:
        dist.barrier()
    else:
        time.sleep(3)
    return t


def test_a_rank_that_dies_takes_the_others_down():
    codes, said = fails("ddp", plant=partial(in_the_fifth_all_reduce, dies))
    assert codes[1] == -signal.SIGKILL
    last = r"rank 0, step \d: the last collective here was all_reduce of \(\d+\) float, number \d+"
    assert re.search(last + " of group", said), said


def test_a_collective_of_another_shape():
    """gloo aborts one of the two, in C++: of that one faulthandler names the line, gloo the sizes.
    """
    codes, said = fails("ddp", plant=partial(in_the_fifth_all_reduce, other_shape))
    assert sorted(codes) == [-signal.SIGABRT, 1]
    assert re.search(r"Fatal Python error: Aborted.*?ddp.py\", line \d+ in train_step", said, re.S)


def test_a_collective_that_nobody_joins():
    _, said = fails("ddp", plant=partial(in_the_fifth_all_reduce, nobody_joins))
    assert re.search(r"rank 0, step \d: the last collective here was barrier", said), said


NORM = "blocks.1.norm2.bias"


def drifts(module):
    """From the second step on rank 1 holds another value."""
    step = module.train_step
    calls = []

    def train_step(model, *args, **options):
        out = step(model, *args, **options)
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) == 2:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if name.endswith(NORM):
                        p.view(-1)[3] += 1e-6
        return out

    module.train_step = train_step


@pytest.mark.parametrize("name", ["ddp", "tensor_parallel"])
def test_watch_names_what_differs(name):
    _, said = fails(name, "--watch", "2", plant=drifts)
    assert f"error: step 1: {NORM} of rank 1 is not what it is on rank 0" in said


def tied_copies():
    ties = guard.ties_of(build(GPTConfig(1, 8, 2, 256, 4), 0))
    assert ties == [("head.weight", "tok.weight")]
    assert not guard.ties_of(build(GPTConfig(1, 8, 2, 256, 4, "llama", 1, 12), 0))
    state = {"tok.weight": torch.zeros(3), "head.weight": torch.zeros(3)}
    assert guard.drift(state, ties) == ""
    state["head.weight"][1] = 1e-6
    assert guard.drift(state, ties) == "head.weight is not tok.weight, to which it is tied"


def test_watch_sees_tied_copies():
    run(tied_copies, 1)


def poisons(module):
    """One gradient of the second step is nan."""
    clip = module.clip_gradients
    calls = []

    def clip_gradients(parameters, *args):
        parameters = list(parameters)
        calls.append(1)
        if len(calls) == 2:
            parameters[5].grad.view(-1)[0] = float("nan")
        return clip(parameters, *args)

    module.clip_gradients = clip_gradients


def test_nan_stops_with_step_and_parameter():
    _, said = fails("ddp", plant=poisons)
    line = r"step 1: loss 5\.\d+, gradient norm nan; not finite: blocks.0.attn.q.bias and 0 more"
    assert re.search(line, said), said


# ---- several machines --------------------------------------------------------------------


BOTH = f"""
import sys
import ddp
import hybrid_3d
for module, flags in (ddp, []), (hybrid_3d, ["--dp", "2", "--pp", "2"]):
    sys.argv = [module.__name__ + ".py", *{PROOF}, *flags]
    if module.main():
        sys.exit(1)
"""


def programs(folder, **lines):
    """Shell programs of one line each, to be found in PATH."""
    for name, line in lines.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)


def test_two_nodes_with_slurm(tmp_path):
    """clusters.md's batch script. Its srun starts an agent for each of two nodes of two ranks."""
    page = (ROOT / "docs/clusters.md").read_text()
    text = re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", page, re.S)[1]
    job = text.replace("29500", free_port()).replace(" ddp.py ", " both.py ")
    (tmp_path / "job.sh").write_text(job)
    (tmp_path / "both.py").write_text(BOTH)
    programs(
        tmp_path,
        scontrol='[[ "$*" == "show hostnames node[1-2]" ]] && echo 127.0.0.1',
        srun='[[ $1 == --cpus-per-task=2 ]] && shift; "$@" & "$@" & wait -n && wait -n',
        torchrun=f'"{sys.executable}" -m torch.distributed.run --local_addr=127.0.0.1 "$@"',
    )
    slurm = {
        "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_GPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "2", "FLAGS": "",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    job = subprocess.run(["bash", "job.sh"], cwd=tmp_path, capture_output=True, text=True,
                         timeout=100, env={**os.environ, **slurm})
    assert job.returncode == 0 and job.stdout.count("PASSED") == 2, job.stdout + job.stderr
    assert "ddp: 4 ranks" in job.stdout and "hybrid_3d: 4 ranks" in job.stdout


@pytest.mark.parametrize("kind", [(), ("--save-async",)])
def test_a_killed_rank_loses_nothing(kind):
    """One kill; ./run.sh soak makes twenty, and twenty more of hybrid_3d's ranks."""
    kills = 1
    seed = 1
    assert soak(kills, seed, "ddp", 2, *SMALL[:-2], *kind, steps=15) == kills  # it says the steps


if not ALL:  # these start torchrun: ALL=1
    del test_two_nodes_with_slurm, test_a_killed_rank_loses_nothing
