"""tools/plan.py and tools/estimate.py beside dry runs and the simulator."""
import math
import shlex

import pytest
from test_readme import Begins, begins

import hybrid_3d
from common import PRESETS, GPTConfig
from conftest import ALL, alone, run_tool
from harness.timeline import bubble_rate, costs, in_flight, simulate
from pipeline_parallel import make_plans
from tools import estimate, plan
from tools.estimate import Layout, held, job_of
from tools.plan import TIE, layouts, search


def on(gpus, batch, *flags):
    return plan.read(["--gpus", str(gpus), "--batch", str(batch), *flags])


SMALL = "--width 256 --heads 8 --vocab 1000 --seq 128 --dtype bf16"
LLAMA = "--model llama-toy --kv-heads 4 --hidden 512"
QWEN3 = "--model qwen3-toy --kv-heads 4 --hidden 512"
ROWS = [
    "--dp 2 --tp 2 --pp 1 --experts 8 --ep 2 --shared --zero 2 --sp --layers 2 --micro 1 --batch 8",
    f"{LLAMA} --dp 2 --tp 2 --pp 1 --sp --zero 3 --layers 2 --micro 2 --batch 32 --ckpt full",
    f"{QWEN3} --dp 2 --tp 2 --pp 1 --sp --zero 3 --layers 2 --micro 2 --batch 32 --ckpt full",
    "--dp 2 --tp 1 --pp 2 --zero 2 --layers 4 --micro 2 --batch 8",
    "--dp 2 --tp 2 --pp 3 --zero 1 --ckpt selective --layers 5 --micro 3 --batch 24 --rank 4",
    "--dp 1 --cp 2 --tp 1 --pp 2 --attn ulysses --schedule zb-v --layers 4 --micro 3 --batch 12",
]


def job_of_report(report):
    """-> the job of a dry run, its rank's stage"""
    args = report["args"]
    sizes = {name: args[name] for name in plan.SIZES}
    cfg = PRESETS[args["model"]]._replace(**sizes)
    axes = {axis: args[axis] for axis in Layout._fields}
    if not args["experts"]:
        axes["ep"] = None
    at = on(report["world_size"], args["batch"])
    for name in ("experts", "top_k", "shared"):
        setattr(at, name, args[name])
    peers = args["dp"] * args["cp"] * args["tp"]
    return job_of(cfg, at, Layout(**axes)), args["rank"] // peers


def test_memory_and_bytes():
    """What is held and sent is that of hybrid_3d's dry run, the peak within 12%."""
    rows = ROWS if ALL else ROWS[:4]
    lines = []
    for row in rows:
        words = row.split()
        ranks = math.prod(int(words[words.index(axis) + 1]) for axis in words
                          if axis in ("--dp", "--cp", "--tp", "--pp"))
        lines.append([*SMALL.split(), *words, "--dry-run", str(ranks)])
    for row, report in zip(rows, alone("hybrid_3d", *lines)):
        job, stage = job_of_report(report)
        found = held(job, stage)
        real = report["ranks"][0]["memory"]
        for kind in ("parameters", "gradients", "optimizer"):
            assert math.isclose(found[kind], real[kind], rel_tol=0.01), (row, kind)
        limit = 0.25 if job.form.qk_norm else 0.12  # a CPU has no fused RMSNorm
        assert math.isclose(found["memory"], real["peak"], rel_tol=limit), row
        if job.routed:
            sent = estimate.bytes_on_ep(job, job.blocks[stage])
            measured = report["ranks"][0]["collectives"]["all_to_all"]["wire"]
            assert math.isclose(sent, measured, rel_tol=0.01), row
        if job.zero < 3:  # which has the last unit of forward for backward still
            sent = sum(report["sent"].get(axis, 0) for axis in ("data", "replicas", "ends"))
            assert math.isclose(estimate.bytes_on_dp(job, stage), sent, rel_tol=0.01), row


@pytest.mark.parametrize("schedule", estimate.IDLE)
def test_simulator(schedule):
    """The bubble, and the micro-batches in flight, are what the simulator says."""
    for pp, micro in ((2, 4), (3, 9), (6, 18)):
        plans = make_plans(schedule, pp, micro)
        job = job_of(GPTConfig(2 * pp, 64, 2, 256, 8), on(pp, micro),
                     Layout(1, 1, pp, micro, schedule, sp=False, zero=0, ckpt="none"))
        rate = bubble_rate(simulate(plans, costs(plans, 1.0, 1.0, 1.0)))
        idle = estimate.IDLE[schedule] * (pp - 1) / micro
        assert math.isclose(idle, rate / (1 - rate), abs_tol=1e-9)
        for stage, one in enumerate(plans):
            assert estimate.in_flight(job, stage) == in_flight(one)


CUT = ["--seq", "16384", "--layers", "4", "--width", "64", "--heads", "8"]


def test_new_axes():
    """Long sequences want cp, experts ep."""
    at = on(8, 8, *CUT, "--gpu-memory", "0.04")
    assert search(at.cfg, at)[0][0][1].cp > 1
    at = on(8, 16, "--experts", "64", "--width", "512", "--gpu-memory", "3")
    assert search(at.cfg, at)[0][0][1].ep > 1


@pytest.mark.parametrize("gpus, flags", [
    (4, ["--experts", "4", "--shared"]), (8, CUT), (8, ["--schedule", "interleaved"])])
def test_all_layouts_are_possible(gpus, flags, monkeypatch):
    """Each of them is one that hybrid_3d accepts, by the line that is printed."""
    at = on(gpus, 8, *flags)
    found = list(layouts(at.cfg, at))
    assert len(found) == len(set(found)) >= 5
    for module in ("harness.run", "hybrid_3d"):
        monkeypatch.setattr(f"{module}.Run", begins, raising=False)
    for lay in found[::max(1, len(found) // 20)]:
        words = shlex.split(plan.command(lay, at).partition("hybrid_3d.py")[2])
        monkeypatch.setattr("sys.argv", ["hybrid_3d.py", *words, "--dry-run", str(gpus)])
        with pytest.raises(Begins):
            hybrid_3d.main()


def test_ties():
    """What is as fast as the fastest is called so, and the simplest of it comes first; there is one
    row of each mesh. Nothing is hidden that does not run behind arithmetic."""
    at = on(8, 512, "--model", "gpt2-xl")
    rows, _ = search(at.cfg, at)
    ties = [tie for tie, *_ in rows]
    assert ties == sorted(ties) and ties[0] == 0
    assert plan.text(rows[0][1]) == "dp 8, micro 8"
    meshes = [plan.mesh_of(lay) for _, lay, _, _ in rows]
    assert len(meshes) == len(set(meshes))
    fastest = min(time["seconds"] for *_, time in rows)
    for tie, _, memory, time in rows:
        assert fastest * (1 + TIE) ** tie * 0.999 <= time["seconds"]
        assert memory["memory"] <= 0.9 * 80e9
    slow = on(8, 512, "--model", "gpt2-xl", "--bandwidth-intra", "0.1")
    lay = Layout(8, 1, 1, 4, "1f1b", False, 3, "none")
    job = job_of(slow.cfg, slow, lay)
    time = estimate.timed(job)
    sent = estimate.bytes_on_dp(job, 0) / 0.1e9
    hidden = time["matmul"] + time["recompute"] + time["bound"]
    assert time["dp"] == pytest.approx(sent - hidden) and time["dp"] > hidden
    words = [plan.two_digits(x) for x in (39632.5, 4.96, 0.0123, 0)]
    assert words == ["40,000", "5.0", "0.012", "0"]


def test_tables_and_advice():
    flags = "--gpus 12 --layers 6 --batch 24 --tokens 1e15 --price 2"
    said = run_tool("plan", *flags.split())
    assert "GPU-hours, which cost " in said
    assert "\n  1  dp " in said and "hybrid_3d.py --model toy " in said
    flags = "--model gpt3-175b --batch 64 --gpus 8 --dp 1 --cp 1"
    said = run_tool("plan", *flags.split(), code=1)
    assert "nothing fits 80 GB" in said
    assert "1000000 or less" in run_tool("plan", "--batch", "1", "--gpus", 10**9, code=2)
    assert "1 or less" in run_tool("plan", *flags.split(), "--efficiency", "5", code=2)
    flags = "--gpus 1024 --batch 7 --no-sp"
    said = run_tool("plan", *flags.split(), code=2)
    assert "--batch 7 --no-sp:" in said
