"""Checkpoints that are damaged, ranks that die, hang or differ, several machines: guard.py and checkpoint.py."""
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from conftest import PROOF, ROOT, SMALL, _script, _start, alone, run, script
from harness import checkpoint, guard
from soak import soak

# ---- damaged checkpoints: the one before is taken, or one line says what is wrong ---


def overwrite(name, change):
    def damage(folder):
        file = folder / name
        data = bytearray(file.read_bytes())
        change(data)
        file.write_bytes(data)
    return damage


def truncate(data):
    del data[-100:]


def zero(data):
    data[:] = bytes(len(data))


def flip(data):
    data[len(data) // 2] ^= 1


def half_renamed(folder):
    folder.rename(folder.parent / f".{folder.name}")


def half_written(folder):
    (folder / "notes.json").unlink()


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGE = [overwrite("__0_0.distcp", change) for change in (truncate, zero, flip)]
DAMAGE += [overwrite(name, flip) for name in (".metadata", "notes.json", "__0_generators.pt")]
DAMAGE += [lambda folder: (folder / "__0_0.distcp").unlink(), lambda folder: (folder / ".metadata").unlink(),
           half_renamed, half_written, emptied]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """After 2 and after 4 of 4 steps, and the losses of the run that goes on to 6."""
    folder = tmp_path_factory.mktemp("good")
    script("ddp", 2, *PROOF, "--steps", "4", "--no-check", "--save", str(folder), "--save-every", "2")
    return folder, script("ddp", 1, *PROOF, "--steps", "6", "--no-check")["loss"]


def test_damaged_checkpoints_are_passed_by(good, tmp_path):
    folder, losses = good
    copies = [tmp_path / str(i) for i in range(len(DAMAGE))]
    for copy, damage in zip(copies, DAMAGE):
        shutil.copytree(folder, copy)
        damage(copy / "4")
    rests = alone("ddp", *((*PROOF, "--steps", "6", "--no-check", "--resume", str(copy), "--save", str(copy))
                           for copy in copies))
    for copy, rest in zip(copies, rests):
        assert rest["loss"] == pytest.approx(losses[2:], rel=1e-12, abs=0), copy
        assert sorted(p.name for p in copy.glob("[0-9]*")) == ["2", "6"]
    shutil.rmtree(tmp_path / "0" / "2")
    (tmp_path / "0" / "6" / "notes.json").unlink()
    assert "6: No such file" in script("ddp", 1, *PROOF, "--steps", "9", "--resume", str(tmp_path / "0"), code=2)


def nobody(module):
    """chmod holds back everybody but root."""
    sys.argv[sys.argv.index("--json") + 1] = ""
    if os.geteuid() == 0:
        os.seteuid(65534)


def test_checkpoints_that_do_not_fit(good, tmp_path):
    folder, _ = good
    flags = *PROOF, "--steps", "6", "--resume"
    (tmp_path / "empty").mkdir()
    closed = tmp_path / "closed"
    shutil.copytree(folder, closed)
    closed.chmod(0)
    for source, more, says in (
            ("empty", [], "no whole checkpoint"), ("none", [], "No such file"),
            (folder, ["--width", "64"], "width 32, not 64"), (folder, ["--impl", "torch"], "impl scratch, not torch"),
            (folder, ["--lr", "1e-4"], "lr 0.001, not 0.0001"), (folder, ["--steps", "4"], "4 behind it already"),
            (folder / "2", ["--save", str(folder)], "holds step 4 already")):
        assert says in script("ddp", 1, *flags, str(tmp_path / source), *more, code=2)
    try:
        assert "Permission denied" in script("ddp", 1, *flags, str(closed), plant=nobody, code=2)
        assert "Permission" in script("ddp", 1, *PROOF, "--save", str(closed / "x"), plant=nobody, code=2)
    finally:
        closed.chmod(0o700)


def sees_the_one_before(module):
    """The folder of rank 1's machine is not up to date."""
    newest = module.checkpoint.newest

    def stale(folder, flag):
        return newest(str(Path(folder, "2")) if os.environ["RANK"] == "1" else folder, flag)
    module.checkpoint.newest = stale


@pytest.mark.parametrize("name", ["ddp", "hybrid_3d"])
def test_ranks_that_find_different_checkpoints(name, tmp_path):
    script(name, 2, *PROOF, "--no-check", "--steps", "4", "--save", str(tmp_path), "--save-every", "2")
    flags = *PROOF, "--no-check", "--steps", "6", "--resume", str(tmp_path)
    assert "4 steps behind it here, 2 there" in script(name, 2, *flags, plant=sees_the_one_before, code=1)


def requeued(module):
    os.environ["SLURM_RESTART_COUNT"] = "1"


def test_a_job_that_slurm_has_requeued(tmp_path):
    flags = *PROOF, "--no-check", "--save", str(tmp_path), "--steps"
    assert len(script("ddp", 2, *flags, "2", plant=requeued)["loss"]) == 2  # before its first checkpoint
    assert len(script("ddp", 2, *flags, "5", plant=requeued)["loss"]) == 3
    assert "--resume it" in script("ddp", 2, *flags, "6", code=2)


def groups(folder):
    """Parameters with and without weight decay: every group's moments come back."""
    def fresh():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3)
        return model, torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0}])
    model, optimizer = fresh()
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    dcp.save(checkpoint.state_of(model, optimizer), checkpoint_id=folder, no_dist=True)
    torch.save({"cpu": torch.get_rng_state()}, Path(folder, "__0_generators.pt"))
    again, other = fresh()
    checkpoint.restore(checkpoint.Start(folder, 1, 1), again, other)
    torch.testing.assert_close(other.state_dict(), optimizer.state_dict(), check_dtype=False)


def test_groups(tmp_path):
    run(groups, 1, str(tmp_path))


@pytest.mark.parametrize("name", ["ddp", "fsdp", "hybrid_3d"])
def test_weights_alone(name, tmp_path):
    """Fine-tuning on another text starts at step 0, from the saved weights, and equals the plain GPT's."""
    text = tmp_path / "text"
    text.write_text("to be or not to be " * 99)
    first = script(name, 2, *PROOF, "--no-check", "--save", str(tmp_path / "saved"))
    tuned = script(name, 2, *PROOF, "--data", str(text), "--lr", "1e-4", "--init-from", str(tmp_path / "saved"))
    plain = script(name, 1, *PROOF, "--data", str(text), "--no-check")
    assert len(tuned["loss"]) == 2 and tuned["check"]["passed"] and max(tuned["check"][k] for k in (
        "loss", "gradient", "grad_norm", "parameter")) <= 1e-10
    assert tuned["loss"][0] != first["loss"][0] and tuned["loss"][0] != plain["loss"][0]


# ---- signals -------------------------------------------------------------------


def asked_to_end(module):
    """SIGTERM for rank 1 alone, in its third step."""
    step, calls = module.train_step, []

    def train_step(*args):
        calls.append(1)
        if len(calls) == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*args)
    module.train_step = train_step


@pytest.mark.parametrize("name", ["ddp", "fsdp", "hybrid_3d"])
def test_sigterm_saves_and_ends(name, tmp_path):
    flags, place = (*PROOF, "--steps", "5"), str(tmp_path)
    script(name, 2, *flags, "--save", place, plant=asked_to_end)  # exit code 0 on both
    assert [p.name for p in tmp_path.glob("[!.]*")] == ["3"]
    rest = script(name, 2, *flags, "--resume", place)
    assert len(rest["loss"]) == 2 and rest["check"]["passed"]


# ---- ranks that die, hang or differ ----------------------------------------------


def fails(name, *flags, plant):
    """-> exit codes and stderr of a run on 2 ranks that has to fail, and within 20 s."""
    with tempfile.NamedTemporaryFile() as errors:
        start = time.monotonic()
        codes = _start(_script, 2, name, (*SMALL, "--timeout", "2", "--no-check", *flags), plant, errors.name)
        assert time.monotonic() - start < 20 and all(codes), codes
        return codes, Path(errors.name).read_text()


def in_the_fifth_all_reduce(change):
    """plant: change(rank, tensor) -> the tensor that is reduced."""
    def plant(module):
        reduce, calls = dist.all_reduce, []

        def all_reduce(t, *args, **kwargs):
            calls.append(1)
            t = change(int(os.environ["RANK"]), t) if len(calls) == 5 else t
            return reduce(t, *args, **kwargs)
        dist.all_reduce = all_reduce
    return plant


def dies(rank, t):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return t


def other_shape(rank, t):
    return t.new_zeros(7) if rank else t


def nobody_joins(rank, t):
    if rank == 0:
        dist.barrier()
    else:
        time.sleep(3)
    return t


def plant_dies(module):
    in_the_fifth_all_reduce(dies)(module)


def plant_other_shape(module):
    in_the_fifth_all_reduce(other_shape)(module)


def plant_nobody_joins(module):
    in_the_fifth_all_reduce(nobody_joins)(module)


def test_a_rank_that_dies_takes_the_others_down():
    codes, said = fails("ddp", plant=plant_dies)
    assert codes[1] == -signal.SIGKILL
    assert re.search(r"rank 0, step \d: the last collective here was all_reduce of \(\d+\) float, number \d+ of group",
                     said), said


def test_a_collective_of_another_shape():
    """gloo aborts one of the two, in C++: of that one faulthandler names the line, gloo the sizes."""
    codes, said = fails("ddp", plant=plant_other_shape)
    assert sorted(codes) == [-signal.SIGABRT, 1]
    assert re.search(r"rank \d, step \d: the last collective here was all_reduce of \(\d+\)", said)
    assert re.search(r"Fatal Python error: Aborted.*?ddp.py\", line \d+ in train_step", said, re.S), said


def test_a_collective_that_nobody_joins():
    _, said = fails("ddp", plant=plant_nobody_joins)
    assert re.search(r"rank 0, step \d: the last collective here was barrier", said), said


def drifts(module):
    """From the second step on rank 1 holds another value."""
    step = module.train_step

    def train_step(model, *args):
        out = step(model, *args)
        if os.environ["RANK"] == "1" and len(drifted) == 1:
            with torch.no_grad():
                dict(model.named_parameters())[drifted[0]].view(-1)[3] += 1e-6
        drifted[:] = [n for n, _ in model.named_parameters() if n.endswith("blocks.1.norm2.bias")]
        return out
    drifted = []
    module.train_step = train_step


@pytest.mark.parametrize("name, flags", [("ddp", ()), ("tensor_parallel", ()), ("context_parallel", ())])
def test_watch_names_what_differs(name, flags):
    _, said = fails(name, "--watch", "2", *flags, plant=drifts)
    assert "error: step 1: blocks.1.norm2.bias of rank 1 is not what it is on rank 0" in said


def unties(module):
    """The last stage forgets that its head is shared, and goes its own way."""
    everything = module.train_step

    def train_step(model, *args):
        out = everything(model, *args)
        if os.environ["RANK"] == "1":
            with torch.no_grad():
                model.tied[0][0, 0] += 1e-6
        return out
    module.train_step = train_step


def test_watch_sees_tied_copies():
    assert "head.weight is not tok.weight" in fails("hybrid_3d", "--pp", "2", "--watch", "2", plant=unties)[1]


def poisons(module):
    """One gradient of the second step is nan."""
    clip, calls = module.clip_gradients, []

    def clip_gradients(parameters, *args):
        parameters = list(parameters)
        calls.append(1)
        if len(calls) == 2:
            parameters[5].grad.view(-1)[0] = float("nan")
        return clip(parameters, *args)
    module.clip_gradients = clip_gradients


def test_nan_stops_with_step_and_parameter():
    _, said = fails("ddp", plant=poisons)
    assert re.search(r"step 1: loss 5\.\d+, gradient norm nan; not finite: blocks.0.attn.q.bias and 0 more", said)


def digests():
    torch.manual_seed(0)
    for dtype in torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8:
        t = torch.randn(5, 7).mul(9).to(dtype)
        other = t.clone()
        assert guard.digest(t) == guard.digest(other) and guard.different({"t": t}) is None
        other[2, 3] += 1
        assert guard.digest(t) != guard.digest(other) != guard.digest(t.T.contiguous())
        mine = {"same": t, "other": other if dist.get_rank() == 2 else t}
        assert guard.different(mine) == ("other", 2)


def test_digests():
    run(digests, 3)


# ---- several machines -----------------------------------------------------------


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


BOTH = """
import sys
import ddp
import hybrid_3d
for module, flags in (ddp, []), (hybrid_3d, ["--dp", "2", "--pp", "2"]):
    sys.argv[0] = f"{module.__name__}.py"
    sys.argv[1:] = {flags} + flags
    if module.main():
        sys.exit(1)
"""


def test_two_nodes_with_slurm(tmp_path):
    """README's batch script. Its srun starts an agent for each of two nodes on this machine, of two ranks each."""
    text = re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    (tmp_path / "both.py").write_text(BOTH.replace("{flags}", repr([*PROOF])))
    (tmp_path / "job.sh").write_text(text.replace("29500", free_port()).replace(" ddp.py ", " both.py "))
    for name, line in dict(
            scontrol='[[ "$*" == "show hostnames node[1-2]" ]] && echo 127.0.0.1',
            srun='[[ $1 == --cpus-per-task=2 ]] && shift; "$@" & "$@" & wait -n && wait -n',
            torchrun=f'"{sys.executable}" -m torch.distributed.run --local_addr=127.0.0.1 "$@"').items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    slurm = dict(SLURM_NNODES="2", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="node[1-2]", SLURM_GPUS_ON_NODE="2", FLAGS="",
                 SLURM_CPUS_PER_TASK="2")
    job = subprocess.run(["bash", "job.sh"], cwd=tmp_path, capture_output=True, text=True, timeout=100, env={
        **os.environ, **slurm, "OMP_NUM_THREADS": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT)})
    assert job.returncode == 0 and job.stdout.count("PASSED") == 2, job.stdout + job.stderr
    assert "ddp: 4 ranks" in job.stdout and "hybrid_3d: 4 ranks" in job.stdout


def test_a_killed_rank_loses_nothing():
    """./run.sh soak makes twenty kills."""
    def undisturbed(folder, flags):
        script("ddp", 2, "--no-check", "--save", folder, *flags)
    assert soak(1, 1, "ddp", *SMALL[:-2], steps=15, undisturbed=undisturbed) == 1
