import json
import math
import shlex
from types import SimpleNamespace

import estimate
import plan
import pytest
from conftest import alone, script
from estimate import MEMORY, TIME, Layout, assess, layouts, stages, timed

from common import PRESETS, GPTConfig
from harness.timeline import bubble_rate, costs, in_flight, simulate
from pipeline_parallel import make_plans

A100 = dict(
    gpu_memory=80, gpu_tflops=312, hbm=2.0, bandwidth_intra=300, bandwidth_inter=25,
    efficiency=0.67, tokens=0, dtype="bf16", overhead=0.0, latency=0.0, share=1.0,
    megatron_2021=False, fixed={}, gpus_per_node=8, node=8)


def on(gpus, batch, **more):
    """The flags of plan.py for so many GPUs."""
    return SimpleNamespace(**{**A100, "gpus": gpus, "batch": batch, **more})


def layout(dp=1, tp=1, pp=1, micro=1, schedule="1f1b", sp=False, zero=0, ckpt="none"):
    return Layout(dp, tp, pp, micro, schedule, sp, zero, ckpt)


# ---- against what others have measured ---------------------------------------

TABLE_1 = [  # of Narayanan 2021: heads, width, layers, tp, pp, GPUs, batch, TFLOP/s per GPU
    (24, 2304, 24, 1, 1, 32, 512, 137),
    (32, 3072, 30, 2, 1, 64, 512, 138),
    (32, 4096, 36, 4, 1, 128, 512, 142),
    (48, 6144, 40, 8, 1, 256, 1024, 135),
    (64, 8192, 48, 8, 2, 512, 1536, 138),
    (80, 10240, 60, 8, 4, 1024, 1792, 140),
    (96, 12288, 80, 8, 8, 1536, 2304, 148),
    (128, 16384, 96, 8, 16, 1920, 2160, 155),
    (128, 20480, 105, 8, 35, 2520, 2520, 163),
    (160, 25600, 128, 8, 64, 3072, 3072, 163),
]


def test_narayanan():
    """One efficiency for ten measured runs of 1.7B to 1T parameters."""
    gaps = []
    measured = [row[-1] for row in TABLE_1]
    for heads, width, layers, tp, pp, gpus, batch, tflops in TABLE_1:
        cfg = GPTConfig(layers, width, heads, 51200, 2048)
        dp = gpus // tp // pp
        lay = layout(dp=dp, tp=tp, pp=pp, micro=batch // dp, ckpt="full")
        names = timed(assess(cfg, on(gpus, batch, megatron_2021=True), lay))
        gaps.append(abs(names["tflops"] / tflops - 1))
        assert names["memory"] < 80e9
    best_guess = 1
    for guess in range(120, 180):
        average = sum(abs(guess / tflops - 1) for tflops in measured) / len(measured)
        best_guess = min(best_guess, average)
    assert max(gaps) < 0.08
    assert sum(gaps) / len(gaps) < 0.036
    assert best_guess > 0.05


# ---- memory, against dry runs ------------------------------------------------

SMALL = "--width 256 --heads 8 --vocab 1000 --seq 128 --dtype bf16 --batch 24".split()

LAYOUTS = [  # dp, tp, pp, schedule, sp, zero, ckpt, stage
    (1, 1, 1, "1f1b", 0, 0, "none", 0),
    (2, 1, 1, "1f1b", 0, 1, "selective", 0),
    (1, 2, 1, "1f1b", 1, 0, "full", 0),
    (1, 2, 2, "1f1b", 1, 0, "none", 1),
    (2, 2, 3, "1f1b", 0, 1, "selective", 1),
    (1, 1, 3, "gpipe", 0, 0, "none", 0),
    (1, 4, 2, "1f1b", 1, 0, "full", 0),
    (1, 1, 2, "interleaved", 0, 0, "none", 0),
    (2, 2, 2, "interleaved", 1, 1, "selective", 1),
    (1, 1, 3, "zb-h1", 0, 0, "none", 1),
    (1, 2, 2, "zb-h1", 1, 0, "none", 1),
    (1, 2, 3, "zb-h1", 0, 0, "selective", 2),
]


def flags_of(dp, tp, pp, schedule, sp, zero, ckpt, stage):
    """-> those of hybrid_3d's dry run, as the first rank of the stage"""
    layers = {1: 2, 2: 4, 3: 5}[pp]
    micro = 3
    if schedule == "interleaved":
        micro = 2
    axes = dict(dp=dp, tp=tp, pp=pp, schedule=schedule, zero=zero, ckpt=ckpt, layers=layers,
                micro=micro, rank=stage * dp * tp)
    flags = [f"--{name}={value}" for name, value in axes.items()]
    if sp:
        flags.append("--sp")
    return [*SMALL, *flags, f"--dry-run={dp * tp * pp}"]


@pytest.fixture(scope="module")
def dry():
    """{row of LAYOUTS: report of hybrid_3d's dry run}"""
    reports = alone("hybrid_3d", *(flags_of(*row) for row in LAYOUTS))
    return dict(zip(LAYOUTS, reports))


@pytest.mark.parametrize("row", LAYOUTS)
def test_memory(row, dry):
    """Within 2% of the peak of hybrid_3d's dry run; what is held between steps, to a part in a
    thousand. And its textbook's bytes are those of the time model."""
    dp, tp, pp, schedule, sp, zero, ckpt, stage = row
    report = dry[row]
    args = report["args"]
    real = report["ranks"][0]["memory"]
    cfg = GPTConfig(args["layers"], 256, 8, 1000, 128)
    lay = layout(dp, tp, pp, args["micro"], schedule, bool(sp), zero, ckpt)
    names = assess(cfg, on(dp * tp * pp, 24), lay, stage)
    for kind in ("parameters", "gradients", "optimizer"):
        assert math.isclose(names[kind], real[kind], rel_tol=1e-3), kind
    assert math.isclose(names["memory"], real["peak"], rel_tol=0.02), (names["memory"], real)

    timed(names)
    sent = {row["what"]: row["expected"] for row in report["textbook"]}
    if "wire dp" in sent:
        ring = 2 * (dp - 1) / dp * names["parameters"]
        assert math.isclose(sent["wire dp"], ring, rel_tol=1e-3)
    middle = 0 < stage < pp - 1
    if "wire pp" in sent and middle:
        across = names["pp_time"] * names["pp_bandwidth"]
        assert math.isclose(sent["wire pp"], across, rel_tol=1e-3)
    if "wire tp" in sent and middle and not sp:
        of_fullest = names["tp_time"] * names["tp_bandwidth"]
        assert math.isclose(sent["wire tp"], of_fullest * names["blocks"] / names["most"])


# ---- time, against the simulator ---------------------------------------------


@pytest.mark.parametrize("schedule, v, tp", [
    ("gpipe", 1, 1), ("1f1b", 1, 1), ("interleaved", 2, 1), ("zb-h1", 1, 1), ("zb-h1", 1, 2),
    ("1f1b", 1, 2)])
def test_simulator(schedule, v, tp):
    """The bubble, and the micro-batches in flight, are what the simulator says."""
    late = 1
    if tp > 1:  # of a block's 12 C C, out and down have 5: the others' gradients are made in B
        late = 5 / 12
    for pp in range(2, 8):
        first = 1
        if schedule in ("interleaved", "zb-h1"):
            first = pp
        step = 1
        if schedule == "interleaved":
            step = pp
        for micro in range(first, 25, step):
            plans = make_plans(schedule, pp, micro, chunks=v)
            rate = bubble_rate(simulate(plans, costs(plans, 1.0, 2 - late, late)))
            lay = layout(tp=tp, pp=pp, micro=micro, schedule=schedule)
            names = timed(assess(GPTConfig(pp * v, 64, 2, 1, 8), on(pp * tp, micro), lay))
            bubble = names["bubble"] / names["work"] * names["heavy"] / names["mean"]
            assert math.isclose(bubble, rate / (1 - rate))
            for stage, one in enumerate(plans):
                assert estimate.flight(schedule, micro, pp, stage) == in_flight(one)


@pytest.mark.parametrize("share, micro", [(1, 2), (2, 1), (2, 3), (2, 8), (4, 1)])
def test_ranks_that_take_turns(share, micro):
    """Four stages on 4/share cores: the pipeline's span at full speed, or all its work on these."""
    plans = make_plans("gpipe", 4, micro)
    rate = bubble_rate(simulate(plans, costs(plans, 1.0, 1.0, 1.0)))
    span = 1 / (1 - rate)  # in times of a stage's work
    lay = layout(pp=4, micro=micro, schedule="gpipe")
    names = timed(assess(GPTConfig(4, 64, 1, 1, 8), on(4, micro, share=share), lay))
    expected = max(1, span / share)
    assert math.isclose(1 + names["bubble"] / names["work"], expected, rel_tol=2e-3)


def test_launch():
    """Blocks of every micro-batch, and collectives: 4 all-reduces a block, messages both ways,
    gradients."""
    at = on(8, 8, overhead=1.0, latency=100.0)
    names = timed(assess(GPTConfig(8, 64, 4, 64, 8), at, layout(dp=2, tp=2, pp=2, micro=4)))
    micro = 4
    blocks = 4
    collectives = micro * (blocks * 4 + 2) + 2
    assert names["launch"] == micro * blocks * 1 + 100 * collectives


def test_formulas_can_be_called():
    """Each is a function of what its parameters name, and all of these are there before it."""
    names = assess(GPTConfig(4, 64, 4, 256, 8), on(4, 8), layout(tp=2, pp=2, micro=4, sp=True))
    timed(names)
    assert estimate.N(B=8, T=128, dp=2, micro=4) == 128
    for formula in (*MEMORY, *TIME):
        arguments = {name: names[name] for name in estimate.needs(formula)}
        assert formula(**arguments) == names[formula.__name__]
        assert formula.__doc__


# ---- the search --------------------------------------------------------------


def test_best():
    """175B on 1024 GPUs: tp stays inside a node, and no neighbour is faster."""
    cfg = PRESETS["gpt3-175b"]
    at = on(1024, 1536)
    fits, _ = plan.search(cfg, at)
    seconds, best = fits[0]
    assert best.tp <= 8
    assert timed(assess(cfg, at, best))["memory"] <= 80e9
    near = 0
    for more, less in [(a, b) for a in ("dp", "tp", "pp") for b in ("dp", "tp", "pp") if a != b]:
        if getattr(best, less) % 2:
            continue
        other = best._replace(
            **{more: getattr(best, more) * 2, less: getattr(best, less) // 2})
        times = [time for time, lay in fits if lay[:3] == other[:3]]
        near += bool(times)
        assert all(time >= seconds for time in times)
    assert near >= 3


def test_all_layouts_are_possible():
    """Each of them is one that hybrid_3d accepts; of those that it does not, none is there."""
    found = list(layouts(GPTConfig(), 8, 4))
    assert len(found) == len(set(found)) > 100
    for lay in found:
        assert lay.dp * lay.tp * lay.pp == 4
        assert 8 % (lay.dp * lay.micro) == 0
        assert lay.schedule != "zb-h1" or lay.ckpt != "full"
        assert lay.tp > 1 or not lay.sp
        counts, _ = stages(4, lay.pp, 1)
        assert sum(counts) == 4


# ---- the program -------------------------------------------------------------


def report(capsys, monkeypatch, tmp_path, *flags, code=0):
    """-> the --json of plan.py with these flags, and what it said"""
    file = tmp_path / "plan.json"
    monkeypatch.setattr("sys.argv", ["plan.py", *map(str, flags), "--json", str(file)])
    assert plan.main() == code
    return json.loads(file.read_text()), capsys.readouterr().out


@pytest.mark.parametrize("flags", [
    ["--gpus", 4], ["--gpus", 12, "--layers", 6, "--batch", 24, "--sp", "--tokens", 1e9]])
def test_command(capsys, monkeypatch, tmp_path, flags):
    """hybrid_3d takes the line that is printed, and it is among all that is said."""
    found, said = report(capsys, monkeypatch, tmp_path, "--batch", 8, "--micro", 2, *flags)
    row = found["rows"][0]
    assert row["command"] in said
    assert f"{row['rate']:,.0f}" in said
    assert "activations" in said
    where, _, line = row["command"].partition("hybrid_3d.py ")
    assert f"--nproc_per_node={found['flags']['node']}" in where
    gpus = found["flags"]["gpus"]
    dry = script("hybrid_3d", 1, *shlex.split(line), "--dry-run", str(gpus))
    assert dry["parameters"]["per_rank"][0] > 0
    if gpus == 12:
        assert "12 GPUs are not full nodes of 8: taken as 2 of 6" in said
        assert "days" in said


def test_explain(capsys, monkeypatch, tmp_path):
    """Every formula, each line of it that was executed, with numbers that give its result."""
    found, said = report(capsys, monkeypatch, tmp_path, "--gpus", 12, "--layers", 6, "--batch", 24,
                         "--sp", "--explain", 2)
    names = found["rows"][1]
    assert names["command"] in said
    for formula in (*MEMORY, *TIME):
        name = formula.__name__
        lines = explained(said, name)
        *_, numbers, result = lines[-1].split(" = ")
        assert result == f"{names[name]:.6g}", name
        if numbers != "result":
            assert math.isclose(eval(numbers), names[name], rel_tol=1e-3, abs_tol=1e-9), name


def explained(said, name):
    """-> the lines on how a formula was worked out"""
    _, _, rest = said.partition(f"\n  {name} ")
    own = []
    for line in rest.split("\n")[1:]:
        if not line.startswith(" " * 15):  # the next formula
            break
        own.append(line.strip())
    return own


def test_nothing_fits(capsys, monkeypatch, tmp_path):
    large = "--model", "gpt3-175b", "--batch", 64
    found, said = report(capsys, monkeypatch, tmp_path, *large, "--gpus", 8, code=1)
    assert not found["rows"]
    assert "nothing fits 80 GB" in said
    assert "fits on 64 GPUs" in said
    fixed = "--zero", 0, "--ckpt", "none", "--pp", 1
    _, said = report(capsys, monkeypatch, tmp_path, *large, "--gpus", 64, *fixed, code=1)
    assert "fits without --pp 1" in said


def test_table(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["plan.py", "--table"])
    assert plan.main() == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 2 + len(plan.MODELS)
    assert "| gpt3-175b | needs " in said


@pytest.mark.parametrize("flags, said", [
    ("--model gpt5 --gpus 8 --batch 8", "gpt5"),
    ("--gpus 8 --batch 8 --gpu-memory 0", "--gpu-memory 0"),
    ("--batch 8", "--gpus 0"),
    ("--gpus 8", "--batch 0"),
    ("--gpus 1024 --batch 7", "--batch 7"),
    ("--gpus 8 --batch 8 --tp 3", "--tp 3"),
    ("--gpus 8 --batch 8 --explain 11", "--explain 11"),
    ("--gpus 8 --batch 8 --heads 3", "--heads 3"),
    ("--gpus 8 --batch 8 --gpu-tflops nan", "--gpu-tflops nan"),
    ("--gpus 8 --batch 8 --zero 2", "zero"),
    ("--gpus 8 --batch 8 --nonsense", "--nonsense"),
    ("--gpus -1 --batch 8", "--gpus -1"),
    ("--gpus 8 --batch x", "x"),
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


def test_calibrate():
    """On two ranks: what is measured takes the place of the flags."""
    found = script("plan", 2, "--calibrate", "--batch", "8", "--dtype", "fp32")
    flags = found["flags"]
    assert flags["gpus"] == 2
    assert flags["efficiency"] == 1
    assert flags["bandwidth_intra"] == flags["bandwidth_inter"]
    assert found["rows"][0]["gpu_tflops"] == flags["gpu_tflops"] != 312
    assert 0 < flags["overhead"] < 1
    assert 0 < flags["latency"] < 1
    assert 1 <= flags["share"] < 99


def test_attempt():
    """--try really runs the line that is printed."""
    sizes = {name: None for name in GPTConfig._fields}
    at = on(1, 2, **{**sizes, "node": 1, "model": "toy", "layers": 1, "width": 32, "dtype": "fp32"})
    assert 0 < plan.attempt(layout(micro=2), at) < math.inf
    assert plan.attempt(layout(tp=3), at) == math.inf
