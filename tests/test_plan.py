"""tools/plan.py and tools/estimate.py: beside published runs, dry runs and the simulator."""
import json
import math
import shlex

import pytest

import hybrid_3d
from common import PRESETS, GPTConfig
from conftest import alone
from harness.flags import arguments
from harness.timeline import bubble_rate, costs, in_flight, simulate
from moe import PRESETS as MIXTURES
from pipeline_parallel import make_plans
from tools import estimate, papers, plan
from tools.estimate import Layout, assess, job_of, layouts, parameters_of, search, timed


def on(gpus, batch, *flags):
    """plan.py's flags, for so many GPUs."""
    return plan.read(["--gpus", str(gpus), "--batch", str(batch), *flags])


def layout(**axes):
    plain = dict(dp=1, tp=1, pp=1, micro=1, schedule="1f1b", sp=False, zero=0, ckpt="none")
    return Layout(**{**plain, **axes})


# ---- against what others have published ------------------------------------------

TABLE_1 = [label for label in papers.RUNS if label != "174.6B"]  # which is of table 2


def test_narayanan():
    """One efficiency for ten measured runs of 1.7B to 1T parameters."""
    gaps = []
    for label in TABLE_1:
        job = papers.job_in_2021(label)
        measured = float(papers.RUNS[label][-1])
        gaps.append(abs(timed(job)["tflops"] / measured - 1))
        assert assess(job)["memory"] < 80e9
    assert len(gaps) == 10
    assert max(gaps) < 0.08
    assert sum(gaps) / len(gaps) < 0.036


def test_parameters():
    assert parameters_of(PRESETS["llama3-405b"]) == 405_853_388_800
    assert parameters_of(MIXTURES["mixtral-8x7b"], experts=8) == 46_702_792_704


def test_llama3_70b():
    """Its bytes and FLOPs, on one GPU that held it: b, 2 b and 12 bytes a parameter; 6 FLOPs of
    each number that multiplies, and 12 C for each pair of positions."""
    cfg = PRESETS["llama3-70b"]
    P = 70_553_706_496
    at = on(1, 1)
    job = job_of(cfg, at, layout())
    found = assess(job)
    assert found["parameters"] == found["gradients"] == 2 * P
    assert found["optimizer"] == 12 * P
    norms = (2 * 80 + 1) * 8192
    embedding = 128256 * 8192
    flops = 8192 * (6 * (P - norms - embedding) + 12 * 80 * 8192 * 8192)
    time = timed(job)
    assert math.isclose(time["mfu"] * 312e12 * time["seconds"], flops, rel_tol=1e-12)
    # a GPU of tp 8 keeps of a block: 4 C outside, and of q, k, v, attention 2.25 C, of the MLP 4 F
    eighth = job_of(cfg, on(8, 1), layout(tp=8, sp=True))
    kept = 2 * 8192 * (4 * 8192 + 2.25 * 8192 + 4 * 28672) / 8
    assert estimate.kept_by_block(eighth, "none") == kept


# ---- against dry runs ------------------------------------------------------------

SMALL = "--width 256 --heads 8 --vocab 1000 --seq 128 --dtype bf16"
LLAMA = "--model llama-toy --kv-heads 4 --hidden 512"
ROWS = [
    "--dp 2 --tp 2 --pp 3 --zero 1 --ckpt selective --layers 5 --micro 3 --batch 24 --rank 4",
    "--dp 2 --tp 2 --pp 1 --experts 8 --ep 2 --shared --zero 2 --sp --layers 2 --micro 1 --batch 8",
    "--dp 1 --cp 2 --tp 1 --pp 2 --attn ulysses --schedule zb-v --layers 4 --micro 3 --batch 12",
    f"{LLAMA} --dp 2 --tp 2 --pp 1 --sp --zero 3 --layers 2 --micro 2 --batch 32 --ckpt full",
]


@pytest.fixture(scope="module")
def dry():
    """[report of hybrid_3d's dry run of each row]"""
    lines = []
    for row in ROWS:
        words = row.split()
        ranks = math.prod(int(words[words.index(axis) + 1]) for axis in words
                          if axis in ("--dp", "--cp", "--tp", "--pp"))
        lines.append([*SMALL.split(), *words, "--dry-run", str(ranks)])
    return alone("hybrid_3d", *lines)


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


def test_memory(dry):
    """What is held between steps is that of hybrid_3d's dry run, the peak is within 12%."""
    for row, report in zip(ROWS, dry):
        job, stage = job_of_report(report)
        found = assess(job, stage)
        real = report["ranks"][0]["memory"]
        for kind in ("parameters", "gradients", "optimizer"):
            assert math.isclose(found[kind], real[kind], rel_tol=1e-3), (row, kind)
        assert math.isclose(found["memory"], real["peak"], rel_tol=0.12), row


def test_bytes(dry):
    """What the time model sends along ep and over copies is what was measured. (Along tp, cp and pp
    it is hybrid_3d's own textbook.)"""
    for row, report in zip(ROWS, dry):
        job, stage = job_of_report(report)
        measured = report["ranks"][0]["collectives"]
        if job.experts:
            rows = estimate.bytes_on_ep(job, job.blocks[stage])
            assert math.isclose(rows, measured["all_to_all"]["wire"], rel_tol=0.01), row
        if job.zero < 3 and job.pp == 1:
            job.at.megatron_2021 = True  # which hides nothing
            sent = estimate.seconds_on_dp(job, stage, 0) * estimate.bandwidth(job.at, job.at.gpus)
            lines = {line["what"]: line["measured"] for line in report["textbook"]}
            over_copies = lines["wire data"] + lines.get("wire replicas", 0)
            assert math.isclose(sent, over_copies, rel_tol=0.01), row


# ---- against the simulator -------------------------------------------------------


@pytest.mark.parametrize("schedule", estimate.SCHEDULES)
def test_simulator(schedule):
    """The bubble, and the micro-batches in flight, are what the simulator says."""
    for pp in (2, 3, 6):
        least = 2 * pp
        if schedule in ("gpipe", "1f1b"):
            least = 1
        for micro in range(least, 3 * pp + 1, pp if schedule == "interleaved" else 3):
            plans = make_plans(schedule, pp, micro)
            job = job_of(GPTConfig(2 * pp, 64, 2, 256, 8), on(pp, micro),
                         layout(pp=pp, micro=micro, schedule=schedule))
            rate = bubble_rate(simulate(plans, costs(plans, 1.0, 1.0, 1.0)))
            idle = estimate.IDLE[schedule] * (pp - 1) / micro
            assert math.isclose(idle, rate / (1 - rate), abs_tol=1e-9)
            for stage, one in enumerate(plans):
                assert estimate.in_flight(job, stage) == in_flight(one)


# ---- the search ------------------------------------------------------------------


def test_best():
    """175B on 1024 GPUs: tp stays inside a node, and no neighbour is faster."""
    at = on(1024, 1536, "--model", "gpt3-175b")
    fits, _ = search(at.cfg, at)
    seconds, best = fits[0]
    assert best.tp <= 8
    assert assess(job_of(at.cfg, at, best))["memory"] <= 80e9
    assert all(time >= seconds for time, _ in fits)
    assert len({lay[:3] for _, lay in fits}) > 20


CUT = ["--seq", "16384", "--layers", "4", "--width", "64", "--heads", "8"]


def test_new_axes():
    """Long sequences want cp, experts ep."""
    at = on(8, 8, *CUT, "--gpu-memory", "0.04")
    fits, _ = search(at.cfg, at)
    assert fits[0][1].cp > 1
    at = on(8, 16, "--experts", "64", "--width", "512", "--gpu-memory", "3")
    fits, _ = search(at.cfg, at)
    assert fits[0][1].ep > 1


@pytest.mark.parametrize("gpus, flags", [
    (4, ["--experts", "4", "--shared"]), (8, CUT), (4, ["--cp", "4", "--attn", "ring"]),
    (4, ["--schedule", "dualpipe-v"]), (4, ["--model", "llama-toy"])])
def test_all_layouts_are_possible(gpus, flags, monkeypatch):
    """Each of them is one that hybrid_3d accepts, by the line that is printed."""
    at = on(gpus, 8, *flags)
    found = list(layouts(at.cfg, at, at.fixed))
    assert len(found) == len(set(found)) >= 5
    for lay in found[::max(1, len(found) // 40)]:
        words = shlex.split(plan.command(lay, at).partition("hybrid_3d.py")[2])
        monkeypatch.setattr("sys.argv", ["hybrid_3d.py", *words, "--dry-run", str(gpus)])
        args = arguments(hybrid_3d.__doc__, presets=MIXTURES, **hybrid_3d.FLAGS)
        hybrid_3d.layout(args)
        for axis, value in lay._asdict().items():
            if axis != "ep" or value:
                assert getattr(args, axis) == value


# ---- the program -----------------------------------------------------------------


def report(capsys, monkeypatch, tmp_path, flags, code=0):
    """-> the --json of plan.py with these flags, and what it said"""
    file = tmp_path / "plan.json"
    monkeypatch.setattr("sys.argv", ["plan.py", *flags.split(), "--json", str(file)])
    assert plan.main() == code
    return json.loads(file.read_text()), capsys.readouterr().out


def test_tables_and_cost(capsys, monkeypatch, tmp_path):
    flags = "--gpus 12 --layers 6 --batch 24 --tokens 1e9 --price 2.5"
    found, said = report(capsys, monkeypatch, tmp_path, flags)
    row = found["rows"][0]
    assert row["command"] in said and f"{row['rate']:,.0f}" in said
    assert "12 GPUs are not full nodes of 8: taken as 2 of 6" in said
    assert math.isclose(row["cost"], 2.5 * 12 * 1e9 / row["rate"] / 3600)


def test_nothing_fits(capsys, monkeypatch, tmp_path):
    flags = "--model gpt3-175b --batch 64 --gpus 8"
    found, said = report(capsys, monkeypatch, tmp_path, flags, code=1)
    assert not found["rows"]
    assert "nothing fits 80 GB" in said
    assert "fits on 64 GPUs" in said


def test_exact_peaks(capsys, monkeypatch, tmp_path):
    """Those of a dry run, beside the estimate."""
    monkeypatch.setattr(plan, "report", lambda ranks, script, flags: alone(
        "hybrid_3d", list(map(str, flags)))[0])
    flags = "--gpus 4 --layers 2 --width 256 --batch 8 --pp 2 --exact 1"
    found, _ = report(capsys, monkeypatch, tmp_path, flags)
    row = found["rows"][0]
    assert math.isclose(row["memory"], row["exact"], rel_tol=0.1)


@pytest.mark.parametrize("flags, said", [
    ("--batch 8", "give both"),
    ("--gpus 1024 --batch 7 --no-sp", "--batch 7 --no-sp:"),
    ("--gpus 8 --batch 64 --schedule zb-h1 --ckpt full", "have to go together"),
    ("--gpus 8 --batch 8 --heads 3", "--heads 3"),
    ("--gpus 8 --batch 8 --experts 4 --top-k 5", "--top-k 5"),
    ("--gpus 8 --batch 8 --shared", "--shared"),
])
def test_bad_usage(capsys, monkeypatch, flags, said):
    monkeypatch.setattr("sys.argv", ["plan.py", *flags.split()])
    with pytest.raises(SystemExit) as leave:
        plan.main()
    error = capsys.readouterr().err
    assert leave.value.code == 2
    assert error.startswith("plan.py: error: ")
    assert error.count("\n") == 1
    assert said in error
