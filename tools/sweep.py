"""Random runs of every file: whatever ranks, sizes and flags, it equals the plain GPT to 1e-10.

    ./run.sh sweep N [SEED]         N runs, a line for each; exit code 1 if any failed
        --file hybrid_3d            of this file alone: else the files take turns

All is in float64, and what a run has measured must be what its textbook says. What is drawn is
drawn again where a file refuses it; run i of a seed and a file is always the same one.
"""
import importlib
import math
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402

from harness.flags import parse  # noqa: E402
from tools import ranks  # noqa: E402
from tools.ranks import TECHNIQUES, worst_gap  # noqa: E402

LIMIT = 1e-10
TRIES = 100  # of which one has to be taken
COUNTS = (1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 8)  # ranks

# ---- what is drawn -------------------------------------------------------------

# of a file's own flags: switches and choices are drawn as they are, numbers from these
NUMBERS = {"bucket-mb": (0, 0.001, 0.02, 25), "accum": (1, 2, 3), "hsdp": (0, 1, 2, 3),
           "chunks": (1, 2), "zero": range(4), "top-k": (1, 2, 3), "ep": (0, 1),
           "capacity": (0, 0, 0.5, 1, 1.25)}
NEVER = ("amp", "compile", "sweep", "simulate")  # fp64 has no use for them, or they train nothing
MIXTURE = ("top-k", "ep", "shared", "capacity", "balance")  # in hybrid_3d only with experts
COURSE = {
    "impl": ("scratch", "scratch", "scratch", "idea", "torch"),
    "model": ("toy", "llama-toy", "qwen3-toy"),
    "vocab": (256, 257, 263, 300),
    "steps": (2, 3),
    "seed": range(1000),
    "pad": (0, 0.1, 0.3, 0.7),
    "clip": (0, 0.1, 1, 10),
    "lr": (1e-3, 1e-2),
    "warmup": (0, 1),
    "decay": ("none", "linear", "cosine"),
    "eval-every": (0, 0, 1, 2),
    "train": ("", "", "", r"blocks\.[02]|tok", "norm"),
}
CUTS = {"tensor_parallel": "tp", "pipeline_parallel": "pp", "context_parallel": "cp"}  # else dp


def own_flags(file):
    """-> {flag: the words that it may be given as}"""
    found = {}
    for name, flag in importlib.import_module(file).FLAGS.items():
        name = name.removeprefix("--")
        if "choices" in flag:
            found[name] = [f"--{name}={choice}" for choice in flag["choices"]]
        elif "action" in flag:
            off = "" if flag["action"] == "store_true" else f"--no-{name}"
            found[name] = (off, f"--{name}")
        elif name in NUMBERS:
            found[name] = [f"--{name}={number}" for number in NUMBERS[name]]
    return {name: words for name, words in found.items() if name not in NEVER}


def drawn(seed, i, only=None, attempt=0):
    """-> file, ranks, flags of run i. Files take turns, if none is asked for."""
    name = only or TECHNIQUES[i % len(TECHNIQUES)]
    draw = random.Random(f"{seed} run {i} attempt {attempt}")
    n = draw.choice(COUNTS)
    flags = {flag: draw.choice(values) for flag, values in COURSE.items()}
    own = {flag: draw.choice(words) for flag, words in own_flags(name).items()}
    axes = axes_of(name, n, draw)
    if name == "hybrid_3d":
        flags.update(axes)
    if name == "moe" or (name == "hybrid_3d" and draw.random() < 0.5):
        flags["experts"] = axes["dp"] * axes["cp"] * draw.choice((1, 2))
    elif name == "hybrid_3d":
        own = {flag: words for flag, words in own.items() if flag not in MIXTURE}
    accum = int(own.get("accum", "=1").split("=")[1])
    flags.update(sizes_of(axes, flags, "schedule" in own, accum, draw))
    words = [f"--{flag}={value}" for flag, value in flags.items()]
    return name, n, ["--dtype=fp64", "--device=cpu", *words, *filter(None, own.values())]


def axes_of(name, n, draw):
    """-> {axis: ranks}"""
    axes = {"dp": 1, "cp": 1, "tp": 1, "pp": 1}
    if name != "hybrid_3d":
        return {**axes, CUTS.get(name, "dp"): n}
    for prime in (2, 3, 5, 7):
        while n % prime == 0:
            axes[draw.choice(list(axes))] *= prime
            n //= prime
    return axes


def sizes_of(axes, flags, is_pipeline, accum, draw):
    """-> sizes that these axes can share, mostly"""
    pp = axes["pp"]
    cut = axes["tp"] * axes["cp"]
    sizes = {"layers": draw.randint(1, 4), "seq": draw.randint(8, 32)}
    if cut > 1:
        sizes["seq"] = 2 * cut * draw.randint(1, 3)
    kv_heads = cut * draw.choice((1, 2))
    sizes["heads"] = kv_heads * draw.choice((1, 1, 2, 3))
    sizes["width"] = sizes["heads"] * draw.choice((4, 6, 8))
    if flags["model"] != "toy":
        sizes["kv-heads"] = kv_heads
        sizes["hidden"] = cut * draw.randint(4, 16)
    if flags["model"] == "qwen3-toy":
        sizes["head-dim"] = draw.choice((4, 6, 10))
    batch = axes["dp"] * accum
    if is_pipeline:
        sizes["layers"] = 2 * pp + draw.randrange(4)
        sizes["micro"] = draw.choice((1, 3, pp, 2 * pp, 2 * pp))
        batch *= sizes["micro"]
    sizes["batch"] = batch * draw.choice((1, 2))
    if not is_pipeline and draw.random() < 0.5:  # ranks have different numbers of rows
        sizes["batch"] += draw.randrange(6)
    return sizes


# ---- the runs ------------------------------------------------------------------


def run(seed, i, only=None, plant=None):
    """-> the command, the worst gap, what is wrong. plant(module) puts in a bug."""
    for attempt in range(TRIES):
        name, n, flags = drawn(seed, i, only, attempt)
        command = f"torchrun --standalone --nproc_per_node={n} {name}.py {' '.join(flags)}"
        try:
            codes, report, said = ranks.report(n, name, flags, plant, quiet=True)
        except AssertionError as error:  # they hang
            return command, 0.0, [str(error)]
        if codes == [2] * n:
            continue
        if report is None:
            return command, 0.0, [f"exit codes {codes}", said[-2000:]]
        gap = 0.0  # pipedream trains something else, and compares nothing
        if report["check"]:
            gap = worst_gap(report["check"])
        trouble = [str(row) for row in report["textbook"]
                   if not math.isclose(row["expected"], row["measured"], rel_tol=1e-12)]
        if gap > LIMIT or any(codes):
            trouble += [f"the worst gap is {gap}, exit codes {codes}", *report["check"]["differ"]]
        return command, gap, trouble
    return f"{name}.py", 0.0, [f"it refuses everything: {said}"]


def sweep(numbers, seed=0, only=None, plant=None):
    """Prints a line per run -> those that failed. only: the name of the only file."""
    failed = []
    worst = 0.0
    for i in numbers:
        since = time.time()
        command, gap, trouble = run(seed, i, only, plant)
        worst = max(worst, gap)
        if trouble:
            failed.append(i)
        result = "FAILED" if trouble else f"{gap:.1e}"
        print(f"{i:4} {time.time() - since:5.1f} s {result:>8}  {command}", *trouble, flush=True)
    result = f"each equal to the plain GPT, the worst gap is {worst:.1e}"
    if failed:
        result = f"FAILED: {failed}"
    print(f"seed {seed}: {len(numbers)} runs, {result}")
    return failed


FLAGS = {
    "N": dict(type=int, least=1, help="runs"),
    "SEED": dict(type=int, nargs="?", default=0, help="of what is drawn"),
    "--file": dict(choices=TECHNIQUES, help="of this one alone"),
}


def main(words):
    args = parse(__doc__, FLAGS, words)
    return int(bool(sweep(range(args.N), args.SEED, args.file)))


if __name__ == "__main__":
    torch.set_num_threads(1)  # other threads would not be there in a process that is forked
    os.chdir(ROOT)
    # a server runs this file's imports, once for all ranks; it finds the file from ROOT
    multiprocessing.set_forkserver_preload(
        ["tools.sweep", "hybrid_3d", "torch.distributed.pipelining", "torch.distributed.fsdp"])
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
