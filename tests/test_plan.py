"""tools/plan.py and tools/estimate.py: beside published runs, dry runs and the simulator."""
import json
import math
import shlex

import pytest

import hybrid_3d
from common import PRESETS, GPTConfig
from conftest import ALL, alone, tool
from harness.flags import arguments
from harness.timeline import bubble_rate, costs, in_flight, simulate
from moe import PRESETS as MIXTURES
from pipeline_parallel import make_plans
from tools import estimate, plan
from tools.estimate import Layout, assess, job_of, layouts, search


def on(gpus, batch, *flags):
    return plan.read(["--gpus", str(gpus), "--batch", str(batch), *flags])


SMALL = "--width 256 --heads 8 --vocab 1000 --seq 128 --dtype bf16"
LLAMA = "--model llama-toy --kv-heads 4 --hidden 512"
ROWS = [
    "--dp 2 --tp 2 --pp 1 --experts 8 --ep 2 --shared --zero 2 --sp --layers 2 --micro 1 --batch 8",
    f"{LLAMA} --dp 2 --tp 2 --pp 1 --sp --zero 3 --layers 2 --micro 2 --batch 32 --ckpt full",
    "--dp 2 --tp 2 --pp 3 --zero 1 --ckpt selective --layers 5 --micro 3 --batch 24 --rank 4",
    "--dp 1 --cp 2 --tp 1 --pp 2 --attn ulysses --schedule zb-v --layers 4 --micro 3 --batch 12",
]


def job_of_report(report):
    """-> the job of a dry run, its rank's stage"""
    args = report["args"]
    cfg = PRESETS[args["model"]]._replace(**{name: args[name] for name in plan.SIZES})
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
    rows = ROWS if ALL else ROWS[:2]
    lines = []
    for row in rows:
        words = row.split()
        ranks = math.prod(int(words[words.index(axis) + 1]) for axis in words
                          if axis in ("--dp", "--cp", "--tp", "--pp"))
        lines.append([*SMALL.split(), *words, "--dry-run", str(ranks)])
    for row, report in zip(rows, alone("hybrid_3d", *lines)):
        job, stage = job_of_report(report)
        found = assess(job, stage)
        real = report["ranks"][0]["memory"]
        for kind in ("parameters", "gradients", "optimizer"):
            assert math.isclose(found[kind], real[kind], rel_tol=1e-3), (row, kind)
        assert math.isclose(found["memory"], real["peak"], rel_tol=0.12), row
        if job.experts:
            rows = estimate.bytes_on_ep(job, job.blocks[stage])
            measured = report["ranks"][0]["collectives"]["all_to_all"]["wire"]
            assert math.isclose(rows, measured, rel_tol=0.01), row
            job.at.megatron_2021 = True  # which hides nothing
            sent = estimate.seconds_on_dp(job, stage, 0) * estimate.bandwidth(job.at, job.at.gpus)
            lines = {line["what"]: line["measured"] for line in report["textbook"]}
            over_copies = lines["wire data"] + lines.get("wire replicas", 0)
            assert math.isclose(sent, over_copies, rel_tol=0.01), row


@pytest.mark.parametrize("schedule", estimate.SCHEDULES)
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
    (4, ["--experts", "4", "--shared"]), (8, CUT), (4, ["--schedule", "dualpipe-v"])])
def test_all_layouts_are_possible(gpus, flags, monkeypatch):
    """Each of them is one that hybrid_3d accepts, by the line that is printed."""
    at = on(gpus, 8, *flags)
    found = list(layouts(at.cfg, at, at.fixed))
    assert len(found) == len(set(found)) >= 5
    for lay in found[::max(1, len(found) // 20)]:
        words = shlex.split(plan.command(lay, at).partition("hybrid_3d.py")[2])
        monkeypatch.setattr("sys.argv", ["hybrid_3d.py", *words, "--dry-run", str(gpus)])
        args = arguments(hybrid_3d.__doc__, presets=MIXTURES, **hybrid_3d.FLAGS)
        hybrid_3d.layout(args)
        for axis, value in lay._asdict().items():
            if axis != "ep" or value:
                assert getattr(args, axis) == value


def test_tables_and_advice(tmp_path):
    file = tmp_path / "plan.json"
    flags = "--gpus 12 --layers 6 --batch 24 --tokens 1e9 --price 2 --exact 1 --json"
    said = tool("plan", *flags.split(), file)
    row = json.loads(file.read_text())["rows"][0]
    assert row["command"] in said
    assert row["cost"] == 2 * row["gpu_hours"] and "GPU-hours, which cost 0" in said
    assert row["memory"] == pytest.approx(row["exact"], rel=0.2)
    flags = "--model gpt3-175b --batch 64 --gpus 8 --dp 1 --cp 1"
    said = tool("plan", *flags.split(), code=1)
    assert "nothing fits 80 GB" in said
    flags = "--gpus 1024 --batch 7 --no-sp"
    said = tool("plan", *flags.split(), code=2)
    assert "--batch 7 --no-sp:" in said
