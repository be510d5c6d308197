import ast
import json
import math
import shlex
import sys
from types import SimpleNamespace

import estimate
import plan
import pytest
import torch
from conftest import alone, script
from estimate import MEMORY, TIME, Layout, assess, layouts, timed

import hybrid_3d
from common import PRESETS, GPTConfig, arguments
from harness.timeline import bubble_rate, costs, in_flight, simulate
from pipeline_parallel import make_plans


A100 = dict(
    gpu_memory=80, gpu_tflops=312, hbm=2.0, bandwidth_intra=300, bandwidth_inter=25,
    efficiency=0.67, tokens=0, dtype="bf16", overhead=0.0, latency=0.0, share=1.0,
    megatron_2021=False, fixed={}, gpus_per_node=8, node=8, experts=0, top_k=2, shared=False,
    capacity=0.0, balance="aux")


def on(gpus, batch, **more):
    """The flags of plan.py for so many GPUs."""
    return SimpleNamespace(**{**A100, "gpus": gpus, "batch": batch, **more})


def layout(**axes):
    plain = dict(dp=1, tp=1, pp=1, micro=1, schedule="1f1b", sp=False, zero=0, ckpt="none")
    return Layout(**{**plain, **axes})


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

SMALL = "--width 256 --heads 8 --vocab 1000 --seq 128 --dtype bf16 --batch 24"
PLAIN = [  # layouts, and whose dry run it is
    "--dp 2 --tp 2 --pp 3 --zero 1 --ckpt selective --layers 5 --micro 3 --rank 4",
    "--dp 1 --tp 2 --pp 2 --schedule zb-h1 --sp --layers 4 --micro 2 --rank 2 --batch 16",
]
ALL_AXES = [
    "--dp 2 --tp 2 --pp 1 --zero 3 --ckpt selective --layers 1 --micro 2 --batch 8 --rank 3",
    "--dp 2 --tp 2 --pp 1 --experts 8 --ep 2 --shared --zero 2 --sp --layers 2 --micro 1 --batch 8",
    "--dp 1 --cp 2 --tp 1 --pp 2 --attn ulysses --schedule zb-v --experts 4 --layers 4 --micro 3 "
    "--batch 12",
    "--dp 2 --cp 2 --tp 1 --pp 2 --attn allgather --zero 2 --ckpt selective --layers 2 --micro 3 "
    "--batch 12 --rank 4",
    "--dp 2 --tp 1 --pp 2 --schedule zb-h2 --experts 4 --ep 1 --zero 2 --layers 2 --micro 4 "
    "--capacity 0.5 --batch 32 --rank 3",
    # few tokens: at the peak are gradients of two blocks, and no activations worth mentioning
    "--dp 2 --tp 1 --pp 1 --zero 3 --ckpt full --layers 3 --micro 1 --batch 2",
]


@pytest.fixture(scope="module")
def dry():
    """{row: report of hybrid_3d's dry run}"""
    rows = [*PLAIN, *ALL_AXES]
    lines = []
    for row in rows:
        words = row.split()
        axes = [words[words.index(f"--{axis}") + 1] for axis in ("dp", "tp", "pp")]
        if "--cp" in words:
            axes.append(words[words.index("--cp") + 1])
        lines.append([*SMALL.split(), *words, "--dry-run", str(math.prod(map(int, axes)))])
    return dict(zip(rows, alone("hybrid_3d", *lines)))


def of_report(report):
    """-> {name: value} for the layout of a dry run and its rank's stage, in time, too"""
    args = dict(report["args"])
    cfg = GPTConfig(args["layers"], 256, 8, 1000, args["seq"])
    axes = {axis: args[axis] for axis in Layout._fields}
    axes["ep"] = axes["ep"] or None
    ranks = args["dp"] * args["cp"] * args["tp"]
    mixture = {name: args[name] for name in ("experts", "top_k", "shared", "capacity")}
    at = on(ranks * args["pp"], args["batch"], **mixture)
    return timed(assess(cfg, at, Layout(**axes), args["rank"] // ranks))


@pytest.mark.parametrize("row", [*PLAIN, *ALL_AXES])
def test_memory(row, dry):
    """Within 2% (3%) of the peak of hybrid_3d's dry run; what is held between steps, to a part in a
    thousand."""
    real = dry[row]["ranks"][0]["memory"]
    names = of_report(dry[row])
    for kind in ("parameters", "gradients", "optimizer"):
        assert math.isclose(names[kind], real[kind], rel_tol=1e-3), kind
    near = 0.03
    if row in PLAIN:
        near = 0.02
    assert math.isclose(names["memory"], real["peak"], rel_tol=near), (names["memory"], real)


@pytest.mark.parametrize("row", [*PLAIN, *ALL_AXES])
def test_bytes(row, dry):
    """The textbook's bytes are those of the time model."""
    names = of_report(dry[row])
    sent = {line["what"]: line["expected"] for line in dry[row]["textbook"]}
    if names["zero"] < 3:
        summed = names["sums"] * names["dp_bandwidth"]
        real = sent["wire dp"] + sent.get("wire replicas", 0)
        assert math.isclose(real, summed, rel_tol=1e-3)
    if names["cp"] > 1:
        assert math.isclose(sent["wire cp"], names["cp_sent"] * names["blocks"])
    if names["E"]:
        rows = names["ep_time"] * names["ep_bandwidth"] * names["blocks"] / names["most"]
        assert math.isclose(sent["wire ep"], rows, rel_tol=5e-3)
    if 0 < names["stage"] < names["pp"] - 1:
        across = names["pp_time"] * names["pp_bandwidth"]
        assert math.isclose(sent["wire pp"], across, rel_tol=1e-3)
        of_fullest = names["tp_time"] * names["tp_bandwidth"]
        assert math.isclose(sent["wire tp"], of_fullest * names["blocks"] / names["most"])


# ---- time, against the simulator ---------------------------------------------


@pytest.mark.parametrize("schedule, v", [
    ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("bfs", 2), ("zb-h1", 1), ("zb-h2", 1),
    ("zb-v", 2), ("dualpipe-v", 2), ("auto", 1)])
def test_simulator(schedule, v):
    """The bubble, and the micro-batches in flight, are what the simulator says."""
    for pp in range(2, 7):
        least = pp
        if schedule in ("gpipe", "1f1b"):
            least = 1
        elif schedule in ("zb-h2", "zb-v", "dualpipe-v"):
            least = 2 * pp
        step = 3
        if schedule == "interleaved":
            step = pp
        for micro in range(least, 3 * pp + 1, step):
            plans = make_plans(schedule, pp, micro, chunks=v)
            assert math.isclose(bubble_of(schedule, pp, micro, v), idle(plans), abs_tol=1e-9)
            for stage, one in enumerate(plans):
                assert estimate.flight(schedule, micro, pp, stage) == in_flight(one)


def idle(plans):
    """-> the idle part of a step by its working part, in the simulator"""
    rate = bubble_rate(simulate(plans, costs(plans, 1.0, 1.0, 1.0)))
    return rate / (1 - rate)


def bubble_of(schedule, pp, micro, v):
    """-> the same in the time model"""
    lay = layout(pp=pp, micro=micro, schedule=schedule)
    names = timed(assess(GPTConfig(pp * v, 64, 2, 1, 8), on(pp, micro), lay))
    return names["bubble"] / names["work"] * names["heavy"] / names["mean"]


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
    units = blocks + 1  # of gradients: each block, and the embedding or the head
    collectives = micro * (blocks * 4 + 2) + units
    assert names["launch"] == micro * blocks * 1 + 100 * collectives


def test_calls_on_cp():
    """As many as a dry run of context_parallel.py counts: hops, or collectives, of three blocks."""
    kinds = ("ring", "zigzag", "allgather", "ulysses")
    runs = [["--dry-run", "4", "--attn", attn, "--layers", "3"] for attn in kinds]
    for attn, report in zip(kinds, alone("context_parallel", *runs)):
        counted = report["ranks"][0]["collectives"]
        started = sum(figures["calls"] for figures in counted.values())
        started -= counted["all_reduce"]["calls"]  # of gradients
        started -= counted.get("recv", {"calls": 0})["calls"]  # a hop sends and receives
        lay = layout(cp=4, attn=attn)
        names = timed(assess(GPTConfig(3, 128, 4, 256, 128), on(4, 8), lay))
        units = names["most"] + 1
        assert names["calls"] == started + units, attn


def test_rows_of_the_routed_alone():
    """A shared expert is one MLP more in the traffic, but its rows are not sorted."""
    plain = estimate.traffic(False, 1, 1, 1, 4, 128, mlps=1, E=8, shared=0)
    shared = estimate.traffic(False, 1, 1, 1, 4, 128, mlps=2, E=8, shared=1)
    assert shared - plain == 16


def test_formulas_can_be_called():
    """Each is a function of what its parameters name, and all of these are there before it."""
    names = assess(GPTConfig(4, 64, 4, 256, 8), on(4, 8), layout(tp=2, pp=2, micro=4, sp=True))
    timed(names)
    assert estimate.N(B=8, T=128, dp=2, cp=1, micro=4) == 128
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


LONG = GPTConfig(4, 64, 8, 256, 16384)


@pytest.mark.parametrize("cfg, gpus, more", [
    (GPTConfig(), 4, {}), (GPTConfig(), 4, {"experts": 4}), (LONG, 8, {}),
    (GPTConfig(), 4, {"fixed": {"cp": 4, "attn": "ring"}}),
    (GPTConfig(), 4, {"fixed": {"schedule": "dualpipe-v"}}),
    (GPTConfig(), 4, {"fixed": {"schedule": "zb-h2"}}),
])
def test_all_layouts_are_possible(cfg, gpus, more, monkeypatch):
    """Each of them is one that hybrid_3d accepts."""
    at = on(gpus, 8, **more)
    sizes = {"model": "toy", **cfg._asdict()}
    found = [lay for lay in layouts(cfg, at, at.fixed) if estimate.is_as_fixed(lay, at.fixed)]
    assert len(found) == len(set(found)) >= 5
    assert {lay.zero for lay in found} >= {0, 1, 2}
    assert (max(lay.cp for lay in found) > 1) == (cfg is LONG or "cp" in at.fixed)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(gpus))
    for name, value in dict(RANK=0, LOCAL_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=1).items():
        monkeypatch.setenv(name, str(value))
    for lay in found[::max(1, len(found) // 60)]:
        line = plan.command(lay, SimpleNamespace(**{**vars(at), **sizes}))
        monkeypatch.setattr("sys.argv", shlex.split(line.partition("hybrid_3d.py")[2]))
        monkeypatch.setattr("sys.argv", ["hybrid_3d.py", *sys.argv])
        args = arguments(hybrid_3d.__doc__, **hybrid_3d.FLAGS)
        hybrid_3d.layout(args)
        for axis, value in lay._asdict().items():
            assert getattr(args, axis) == (value or 0), line


def test_new_axes():
    """Long sequences want cp, experts ep, small memories ZeRO-2 or 3."""
    fits, _ = plan.search(LONG, on(8, 8, gpu_memory=0.04))
    assert fits[0][1].cp > 1
    experts = {"experts": 64, "top_k": 2}
    model = GPTConfig(8, 512, 8, 1000, 512)
    fits, _ = plan.search(model, on(8, 16, gpu_memory=4, **experts))
    assert fits[0][1].ep > 1
    _, least = plan.search(model, on(8, 16, gpu_memory=0.01, fixed={"tp": 1, "pp": 1}))
    _, lay = least
    assert lay.zero > 1


# ---- the program -------------------------------------------------------------


def report(capsys, monkeypatch, tmp_path, *flags, code=0):
    """-> the --json of plan.py with these flags, and what it said"""
    file = tmp_path / "plan.json"
    monkeypatch.setattr("sys.argv", ["plan.py", *map(str, flags), "--json", str(file)])
    assert plan.main() == code
    return json.loads(file.read_text()), capsys.readouterr().out


COMMANDS = [
    "--gpus 4",
    "--gpus 12 --layers 6 --batch 24 --sp --tokens 1e9",
    "--gpus 8 --cp 2 --experts 4 --shared --balance bias --zero 2",
]


def test_command(capsys, monkeypatch, tmp_path):
    """hybrid_3d takes the lines that are printed, and they are among all that is said."""
    lines = []
    for flags in COMMANDS:
        found, said = report(capsys, monkeypatch, tmp_path, "--batch=8", "--micro=2",
                             *flags.split())
        row = found["rows"][0]
        assert row["command"] in said
        assert f"{row['rate']:,.0f}" in said
        assert "activations" in said
        where, _, line = row["command"].partition("hybrid_3d.py ")
        assert f"--nproc_per_node={found['flags']['node']}" in where
        gpus = found["flags"]["gpus"]
        lines.append([*shlex.split(line), "--dry-run", str(gpus)])
        if gpus == 12:
            assert "12 GPUs are not full nodes of 8: taken as 2 of 6" in said
            assert "days" in said
        assert ("    ep    " in said) == (gpus == 8)
    for dry in alone("hybrid_3d", *lines[1:]):
        assert dry["parameters"]["per_rank"][0] > 0


@pytest.mark.parametrize("flags", [
    "--gpus 12 --layers 6 --batch 24 --sp --explain 2",
    "--gpus 4 --batch 8 --cp 2 --experts 4 --ckpt selective --explain 2",
])
def test_explain(flags, capsys, monkeypatch, tmp_path):
    """Every formula, each line of it that was executed, with numbers that give its result."""
    found, said = report(capsys, monkeypatch, tmp_path, *flags.split())
    names = found["rows"][1]
    assert names["command"] in said
    for formula in (*MEMORY, *TIME):
        name = formula.__name__
        lines = explained(said, name)
        *_, numbers, result = lines[-1].split(" = ")
        assert result == f"{names[name]:.6g}", name
        if numbers != "result":
            assert math.isclose(eval(numbers), names[name], rel_tol=1e-3, abs_tol=1e-9), name


@pytest.mark.parametrize("statement, said", [
    ("total += 2 * x", "total + 2 * x = 30 + 2 * 4"),
    ("total -= x + y", "total - (x + y) = 30 - (4 + 0.5)"),
    ("total = of(x, 'ring')", "total = of(x, 'ring') = of(4, 'ring')"),
    ("total = 3", "total = 3"),
])
def test_worked_out(statement, said):
    node, = ast.parse(statement).body
    assert plan.worked_out(node, {"total": 30, "x": 4, "y": 0.5}) == said


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
    small = "--gpus 2 --batch 2 --seq 1024 --gpu-memory 0.012 --tp 2 --zero 0 --no-sp"
    _, said = report(capsys, monkeypatch, tmp_path, *small.split(), code=1)
    assert "fits without --no-sp: " in said


@pytest.mark.parametrize("gigabytes, more", [(0.006, "8 GPUs without --tp 1:"), (0.012, "8 GPUs:")])
def test_more_gpus_keep_what_is_fixed(gigabytes, more, capsys, monkeypatch, tmp_path):
    """On more GPUs, too, the flags that are given count; where they cannot, advice says so."""
    small = f"--gpus 2 --batch 4 --seq 1024 --tp 1 --gpu-memory {gigabytes}"
    _, said = report(capsys, monkeypatch, tmp_path, *small.split(), code=1)
    line, = [line for line in said.split("\n") if "fits on" in line]
    assert f"fits on {more}" in line
    assert ("tp" in line.partition(":")[2]) == ("without" in more)


def test_table(capsys, monkeypatch):
    models = {"gpt2": PRESETS["gpt2"], "wide": GPTConfig(4, 12288, 96, 50257, 2048)}
    monkeypatch.setattr(plan, "MODELS", models)
    monkeypatch.setattr("sys.argv", ["plan.py", "--table"])
    assert plan.main() == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 2 + len(plan.MODELS)
    assert "| wide | needs " in said
    monkeypatch.setattr("sys.argv", ["plan.py", "--table", "--tp", "4"])
    assert plan.main() == 0
    assert "| gpt2 | no layout | dp 2 x tp 4" in capsys.readouterr().out


@pytest.mark.parametrize("flags, said", [
    ("--model gpt5 --gpus 8 --batch 8", "gpt5"),
    ("--gpus 8 --batch 8 --gpu-memory 0", "--gpu-memory 0"),
    ("--batch 8", "--gpus 0"),
    ("--gpus 8", "--batch 0"),
    ("--gpus 1024 --batch 7", "--batch 7"),
    ("--gpus 1024 --batch 7 --sp", "--batch 7 --sp:"),
    ("--gpus 1024 --batch 7 --no-sp", "--batch 7 --no-sp:"),
    ("--gpus 8 --batch 8 --tp 3", "--tp 3"),
    ("--gpus 8 --batch 64 --schedule zb-h1 --ckpt full", "have to go together"),
    ("--gpus 8 --batch 8 --json .", "--json .: is a folder"),
    ("--gpus 8 --batch 8 --explain 11", "--explain 11"),
    ("--gpus 8 --batch 8 --heads 3", "--heads 3"),
    ("--gpus 8 --batch 8 --vocab 100", "--vocab 100: must be 256 or more"),
    ("--gpus 8 --batch 8 --gpu-tflops nan", "--gpu-tflops nan"),
    ("--gpus 8 --batch 8 --zero 4", "--zero 4"),
    ("--gpus 8 --batch 8 --experts 4 --top-k 5", "--top-k 5"),
    ("--gpus 8 --batch 8 --shared", "--shared"),
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


def test_rates_wait_for_the_gpu(monkeypatch):
    """Also for what is done before the clock is started."""
    order = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: order.append("wait"))
    monkeypatch.setattr("time.perf_counter", lambda: order.append("clock") or len(order))
    plan.Rates(torch.device("cuda")).so_often(2, lambda: order.append("job"))
    assert order == ["job", "wait", "clock", "job", "wait", "job", "wait", "clock"]


def test_attempt(monkeypatch):
    """--try really runs the line that is printed, and tells if that fails."""
    sizes = {name: None for name in GPTConfig._fields}
    at = on(1, 2, **{**sizes, "node": 1, "model": "toy", "layers": 1, "width": 32, "dtype": "fp32"})
    assert 0 < plan.attempt(layout(micro=2), at) < math.inf
    failed = SimpleNamespace(returncode=1)
    monkeypatch.setattr("subprocess.run", lambda *line, **options: failed)
    assert plan.attempt(layout(tp=3), at) == math.inf
