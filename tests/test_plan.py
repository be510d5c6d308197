import json
import math
import shlex
from types import SimpleNamespace

import pytest

import plan
from common import PRESETS, GPTConfig
from conftest import alone, script
from estimate import HELD, MEMORY, Layout, assess, evaluate, layouts, stages, timed
from harness.timeline import bubble_rate, costs, in_flight, make_plans, simulate

A100 = dict(gpu_memory=80, gpu_tflops=312, hbm=2.0, bandwidth_intra=300, bandwidth_inter=25, efficiency=0.67, tokens=0,
            dtype="bf16", overhead=0.0, latency=0.0, share=1.0, megatron_2021=False, fixed={}, gpus_per_node=8, node=8)


def on(gpus, batch, **more):
    return SimpleNamespace(**A100 | dict(gpus=gpus, batch=batch) | more)


TABLE_1 = [  # of Narayanan 2021: heads, width, layers, tp, pp, GPUs, batch, TFLOP/s per GPU
    (24, 2304, 24, 1, 1, 32, 512, 137), (32, 3072, 30, 2, 1, 64, 512, 138), (32, 4096, 36, 4, 1, 128, 512, 142),
    (48, 6144, 40, 8, 1, 256, 1024, 135), (64, 8192, 48, 8, 2, 512, 1536, 138), (80, 10240, 60, 8, 4, 1024, 1792, 140),
    (96, 12288, 80, 8, 8, 1536, 2304, 148), (128, 16384, 96, 8, 16, 1920, 2160, 155),
    (128, 20480, 105, 8, 35, 2520, 2520, 163), (160, 25600, 128, 8, 64, 3072, 3072, 163)]


def test_narayanan():
    """One efficiency for ten measured runs of 1.7B to 1T parameters."""
    gaps, measured = [], [row[-1] for row in TABLE_1]
    for heads, width, layers, tp, pp, gpus, batch, tflops in TABLE_1:
        cfg, dp = GPTConfig(layers, width, heads, 51200, 2048), gpus // tp // pp
        lay = Layout(dp, tp, pp, batch // dp, "1f1b", False, 0, "full")
        names = timed(assess(cfg, on(gpus, batch, megatron_2021=True), lay))
        gaps.append(abs(names["tflops"] / tflops - 1))
        assert names["memory"] < 80e9
    guesses = [sum(abs(guess / x - 1) for x in measured) / 10 for guess in range(120, 180)]
    assert max(gaps) < 0.08 and sum(gaps) / 10 < 0.036 < 0.05 < min(guesses)


SMALL = "--width 256 --heads 8 --vocab 1000 --seq 128 --dtype bf16 --batch 24 --micro 3".split()


LAYOUTS = [  # dp, tp, pp, schedule, sp, zero, ckpt, stage
    (1, 1, 1, "1f1b", 0, 0, "none", 0), (2, 1, 1, "1f1b", 0, 1, "selective", 0), (1, 2, 1, "1f1b", 1, 0, "full", 0),
    (1, 2, 2, "1f1b", 1, 0, "none", 1), (2, 2, 3, "1f1b", 0, 1, "selective", 1),
    (1, 1, 3, "gpipe", 0, 0, "none", 0), (1, 4, 2, "1f1b", 1, 0, "full", 0),
    (1, 1, 2, "interleaved", 0, 0, "none", 0), (2, 2, 2, "interleaved", 1, 1, "selective", 1),
    (1, 1, 3, "zb-h1", 0, 0, "none", 1), (1, 2, 2, "zb-h1", 1, 0, "none", 1), (1, 2, 3, "zb-h1", 0, 0, "selective", 2)]


@pytest.fixture(scope="module")
def dry():
    """Layout -> report of hybrid_3d's dry run."""
    runs = []
    for dp, tp, pp, schedule, sp, zero, ckpt, stage in LAYOUTS:
        axes = dict(dp=dp, tp=tp, pp=pp, schedule=schedule, zero=zero, ckpt=ckpt, layers={1: 2, 2: 4, 3: 5}[pp],
                    rank=stage * dp * tp, dry_run=dp * tp * pp)
        runs.append([*SMALL, *(f"--{k.replace('_', '-')}={v}" for k, v in axes.items()), *["--sp"] * sp,
                     *["--micro", "2"] * (schedule == "interleaved")])
    return dict(zip(LAYOUTS, alone("hybrid_3d", *runs)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory(layout, dry):
    """Within 2% of the peak of hybrid_3d's dry run; what is held between steps, to a part in a thousand."""
    dp, tp, pp, schedule, sp, zero, ckpt, stage = layout
    args, real = dry[layout]["args"], dry[layout]["ranks"][0]["memory"]
    names = assess(GPTConfig(args["layers"], 256, 8, 1000, 128), on(dp * tp * pp, 24), Layout(
        dp, tp, pp, args["micro"], schedule, bool(sp), zero, ckpt), stage)
    for kind in HELD[:3]:
        assert math.isclose(names[kind], real[kind], rel_tol=1e-3), kind
    assert math.isclose(names["memory"], real["peak"], rel_tol=0.02), (names["memory"], real)
    timed(names)
    sent = {row["what"]: row["expected"] for row in dry[layout]["textbook"]}
    if "wire dp" in sent:
        assert math.isclose(sent["wire dp"], 2 * (dp - 1) / dp * names["parameters"], rel_tol=1e-3)
    if "wire pp" in sent and 0 < stage < pp - 1:
        assert math.isclose(sent["wire pp"], names["pp_time"] * names["pp_bandwidth"], rel_tol=1e-3)
    if "wire tp" in sent and 0 < stage < pp - 1 and not sp:
        assert math.isclose(sent["wire tp"], names["tp_time"] * names["tp_bandwidth"] * names["blocks"] / names["most"])


@pytest.mark.parametrize("schedule, v, tp", [
    ("gpipe", 1, 1), ("1f1b", 1, 1), ("interleaved", 2, 1), ("zb-h1", 1, 1), ("zb-h1", 1, 2), ("1f1b", 1, 2)])
def test_simulator(schedule, v, tp):
    """The bubble, and the micro-batches in flight, are what the simulator says."""
    for pp in range(2, 8):
        for micro in range(1 if schedule in ("gpipe", "1f1b") else pp, 25, pp if v > 1 else 1):
            plans = make_plans(schedule, pp, micro, v)
            late = 1 if tp == 1 else 5 / 12  # of a block's 12 C C, out and down have 5: the others' gradients are in B
            rate = bubble_rate(simulate(plans, costs(plans, 1.0, 2 - late, late)))
            names = timed(assess(GPTConfig(pp * v, 64, 2, 1, 8), on(pp * tp, micro), Layout(
                1, tp, pp, micro, schedule, False, 0, "none")))
            assert math.isclose(names["bubble"] / names["work"] * names["heavy"] / names["mean"], rate / (1 - rate))
            for stage, one in enumerate(plans):
                known = dict(schedule=schedule, micro=micro, pp=pp, stage=stage)
                assert evaluate(["flight"], known)["flight"] == in_flight(one)


@pytest.mark.parametrize("share, micro", [(1, 2), (2, 1), (2, 3), (2, 8), (4, 1)])
def test_ranks_that_take_turns(share, micro):
    """Four stages on 4/share cores: the pipeline's span at full speed, or all the work on these cores."""
    plans = make_plans("gpipe", 4, micro, 1)
    span = 1 / (1 - bubble_rate(simulate(plans, costs(plans, 1.0, 1.0, 1.0))))  # in times of a stage's work
    names = timed(assess(GPTConfig(4, 64, 1, 1, 8), on(4, micro, share=share), Layout(
        1, 1, 4, micro, "gpipe", False, 0, "none")))
    assert math.isclose(1 + names["bubble"] / names["work"], max(1, span / share), rel_tol=2e-3)


def test_launch():
    """Blocks of every micro-batch, and collectives: 4 all-reduces a block, messages both ways, gradients."""
    names = timed(assess(GPTConfig(8, 64, 4, 64, 8), on(8, 8, overhead=1.0, latency=100.0), Layout(
        2, 2, 2, 4, "1f1b", False, 0, "none")))
    assert names["launch"] == 4 * 4 * 1 + 100 * (4 * 4 * 4 + 4 * 2 + 2)


def test_best():
    """175B on 1024 GPUs: tp stays inside a node, and no neighbour is faster."""
    cfg, at = PRESETS["gpt3-175b"], on(1024, 1536)
    fits, _ = plan.search(cfg, at)
    seconds, best = fits[0]
    assert best.tp <= 8 and timed(assess(cfg, at, best))["memory"] <= 80e9
    axes, near = ("dp", "tp", "pp"), 0
    for more, less in ((a, b) for a in axes for b in axes if a != b and getattr(best, b) % 2 == 0):
        other = {more: getattr(best, more) * 2, less: getattr(best, less) // 2}
        sizes = [other.get(axis, getattr(best, axis)) for axis in axes]
        times = [time for time, lay in fits if [lay.dp, lay.tp, lay.pp] == sizes]
        near += bool(times)
        assert all(time >= seconds for time in times)
    assert near >= 3


def test_all_layouts_are_possible():
    """Each of them is one that hybrid_3d accepts; of those that it does not, none is there."""
    found = set(layouts(GPTConfig(), 8, 4))
    assert len(found) == len(list(layouts(GPTConfig(), 8, 4))) > 100
    for lay in found:
        assert lay.dp * lay.tp * lay.pp == 4 and 8 % (lay.dp * lay.micro) == 0
        assert not (lay.schedule == "zb-h1" and lay.ckpt == "full") and (lay.tp > 1 or not lay.sp)
        assert sum(stages(4, lay.pp, 1)[0]) == 4


def report(capsys, monkeypatch, tmp_path, *flags, code=0):
    monkeypatch.setattr("sys.argv", ["plan.py", *map(str, flags), "--json", str(tmp_path / "plan.json")])
    assert plan.main() == code
    return json.loads((tmp_path / "plan.json").read_text()), capsys.readouterr().out


def test_command(capsys, monkeypatch, tmp_path):
    """hybrid_3d takes the line that is printed, and it is among all that is said."""
    for flags in ["--gpus", 4], ["--gpus", 12, "--layers", 6, "--batch", 24, "--sp", "--tokens", 1e9, "--explain", 2]:
        found, said = report(capsys, monkeypatch, tmp_path, "--batch", 8, "--micro", 2, *flags)
        row = found["rows"][max(0, found["flags"]["explain"] - 1)]
        assert row["command"] in said and f"{row['rate']:,.0f}" in said and "activations" in said
        where, _, line = row["command"].partition("hybrid_3d.py ")
        assert f"--nproc_per_node={found['flags']['node']}" in where
        dry = script("hybrid_3d", 1, *shlex.split(line), "--dry-run", str(found["flags"]["gpus"]))
        assert dry["parameters"]["per_rank"][0] > 0
    assert "12 GPUs are not full nodes of 8: taken as 2 of 6" in said and "days" in said
    assert all(f"\n  {name} " in said for name in MEMORY)


def test_nothing_fits(capsys, monkeypatch, tmp_path):
    large = "--model", "gpt3-175b", "--batch", 64
    found, said = report(capsys, monkeypatch, tmp_path, *large, "--gpus", 8, code=1)
    assert not found["rows"] and "nothing fits 80 GB" in said and "fits on 64 GPUs" in said
    fixed = "--zero", 0, "--ckpt", "none", "--pp", 1
    _, said = report(capsys, monkeypatch, tmp_path, *large, "--gpus", 64, *fixed, code=1)
    assert "fits without --pp 1" in said


@pytest.mark.parametrize("flags, said", [
    ("--model gpt5 --gpus 8 --batch 8", "gpt5"), ("--gpus 8 --batch 8 --gpu-memory 0", "--gpu-memory 0"),
    ("--batch 8", "--gpus 0"), ("--gpus 8", "--batch 0"), ("--gpus 1024 --batch 7", "--batch 7"),
    ("--gpus 8 --batch 8 --tp 3", "--tp 3"), ("--gpus 8 --batch 8 --explain 11", "--explain 11"),
    ("--gpus 8 --batch 8 --heads 3", "--heads 3"), ("--gpus 8 --batch 8 --gpu-tflops nan", "--gpu-tflops nan"),
    ("--gpus 8 --batch 8 --zero 2", "zero"), ("--gpus 8 --batch 8 --nonsense", "--nonsense"),
    ("--gpus -1 --batch 8", "--gpus -1"), ("--gpus 8 --batch x", "x")])
def test_bad_usage(capsys, monkeypatch, flags, said):
    monkeypatch.setattr("sys.argv", ["plan.py", *flags.split()])
    with pytest.raises(SystemExit) as leave:
        plan.main()
    error = capsys.readouterr().err
    assert leave.value.code == 2 and error.startswith("plan.py: error: ") and error.count("\n") == 1 and said in error


def test_calibrate():
    """On two ranks: what is measured takes the place of the flags."""
    found = script("plan", 2, "--calibrate", "--batch", "8", "--dtype", "fp32")
    flags = found["flags"]
    assert flags["gpus"] == 2 and flags["efficiency"] == 1 and flags["bandwidth_intra"] == flags["bandwidth_inter"]
    assert found["rows"][0]["gpu_tflops"] == flags["gpu_tflops"] != 312
    assert 0 < flags["overhead"] < 1 and 0 < flags["latency"] < 1 <= flags["share"] < 99
