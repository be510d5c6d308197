"""Random runs of every file: whatever ranks, sizes and flags, it equals the plain GPT to 1e-10.

    python tools/sweep.py N [SEED]      N runs, a line for each; exit code 1 if any failed
        --file hybrid_3d                of this file alone: else the files take turns
        --ranks 16                      up to 16 ranks, often many; else up to 8

All is in float64, and what a run has measured must be what its textbook says. The form of the GPT,
ranks, sizes and most flags of a file are drawn; run i of a seed, a file and a --ranks is always the
same one. What a file has to refuse is not drawn, so that exit code 2 is a failure too: of the file,
or of the drawing here.
"""
import argparse
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

import context_parallel  # noqa: E402
import hybrid_3d  # noqa: E402
import pipeline_parallel  # noqa: E402
from harness.usage import require  # noqa: E402
from tools import ranks  # noqa: E402
from tools.estimate import VEES, divisors  # noqa: E402
from tools.launch import worst_gap  # noqa: E402

LIMIT = 1e-10
CAPACITIES = (0, 0, 0.5, 1, 1.25, 2)
BALANCES = ("aux", "bias", "none")

# ---- what a file takes ---------------------------------------------------------
# Each function draws the flags of one file for n ranks. `sizes` holds the common flags drawn
# already; a function changes those that its own flags constrain.


class Draw(random.Random):
    def maybe(self, *flags, chance=0.5):
        if self.random() < chance:
            return list(flags)
        return []

    def torch(self):
        """--impl torch, now and then, else nothing"""
        return self.maybe("--impl", "torch", chance=0.2)

    def divisor(self, n):
        return self.choice(divisors(n))

    def multiple(self, n, low, high):
        """A multiple of n between low and high, or the first one above."""
        least = -(-low // n)
        most = max(least, high // n)
        return n * self.randint(least, most)

    def heads(self, sizes, n):
        """Heads, key-value heads and a hidden width that n ranks can share."""
        sizes["kv_heads"] = self.multiple(n, 1, 4)
        sizes["heads"] = sizes["kv_heads"] * self.choice((1, 1, 2, 3))
        sizes["hidden"] = self.multiple(n, 8, 48)

    def spread(self, n, axes):
        """n ranks over axes: each prime factor goes to one, rather to one that has none yet."""
        sizes = dict.fromkeys(axes, 1)
        for prime in primes(n):
            free = [axis for axis in axes if sizes[axis] == 1]
            if not free or self.random() < 0.2:
                free = axes
            sizes[self.choice(free)] *= prime
        return sizes

    def experts(self, data):
        """The flags of a mixture, for so many ranks of data."""
        ep = self.divisor(data)
        experts = self.multiple(ep, 1, 3 * ep)
        flags = ["--experts", experts, "--top-k", self.randint(1, min(experts, 4))]
        flags += ["--ep", ep % data]  # 0 stands for all ranks
        flags += self.maybe("--shared") + ["--capacity", self.choice(CAPACITIES)]
        return flags + ["--balance", self.choice(BALANCES)]


def primes(n):
    """-> the prime factors of n, the largest first"""
    if n == 1:
        return []
    least = divisors(n)[1]
    return primes(n // least) + [least]


def of_ddp(draw, n, sizes):
    impl = draw.torch()
    sizes["batch"] = n + draw.randrange(6)
    if impl:
        sizes["batch"] = draw.multiple(n, n, 3 * n)
    return ["--bucket-mb", draw.choice((0, 0.001, 0.02, 25)), *impl]


def of_zero(draw, n, sizes):
    stage = draw.randrange(4)
    accum = draw.randint(1, 3)
    sizes["batch"] = n * accum + draw.randrange(6)
    if stage and draw.torch():
        return ["--stage", stage, "--impl", "torch"]
    places = ["none"]
    if stage > 0:
        places.append("optimizer")
    if stage == 3:
        places.append("param")
    return ["--stage", stage, "--offload", draw.choice(places), "--accum", accum]


def of_fsdp(draw, n, sizes):
    sizes["batch"] = n + draw.randrange(6)
    flags = draw.maybe("--no-reshard") + draw.maybe("--hsdp", draw.divisor(n))
    return flags + (draw.torch() or draw.maybe("--offload"))


def of_tensor_parallel(draw, n, sizes):
    draw.heads(sizes, n)
    flags = draw.maybe("--sp") + draw.torch()
    if flags:
        # torch cuts 20 positions for 6 ranks into 4 4 4 4 4 0, and fails on 0
        sizes["seq"] = draw.multiple(n, 8, 32)
    return flags


def of_pipeline_parallel(draw, n, sizes):
    schedule = draw.choice(pipeline_parallel.NAMES)
    chunks, micro, flags = slices(draw, schedule, n)
    sizes["layers"] = n * chunks + draw.randrange(4)
    sizes["batch"] = micro * draw.randint(1, 2)
    counts = [sizes["layers"] - n * chunks + 1] + [1] * (n * chunks - 1)
    flags += draw.maybe("--layers-per-stage", ",".join(map(str, counts)), chance=0.3)
    if schedule in pipeline_parallel.ONE_STAGE and micro >= n:
        flags += draw.torch()
    return ["--schedule", schedule, *flags]


def slices(draw, schedule, pp):
    """-> stages of a rank, micro-batches, their flags"""
    chunks = 1
    flags = []
    micro = draw.randint(1, max(pp, 6))
    if schedule in ("interleaved", "bfs"):
        chunks = draw.randint(1, 3)
        flags = ["--chunks", chunks]
    if schedule == "interleaved":
        micro = draw.multiple(pp, pp, 2 * pp)
    if schedule in VEES:
        chunks = 2
        micro = draw.randint(2 * pp, 2 * pp + 4)
    return chunks, micro, [*flags, "--micro", micro]


def of_context_parallel(draw, n, sizes):
    attn = draw.choice(list(context_parallel.KINDS))
    sizes["seq"] = draw.multiple(chunks_of(attn, n), 8, 32)
    if attn == "ulysses":
        draw.heads(sizes, n)
    return ["--attn", attn]


def chunks_of(attn, cp):
    return cp * len(context_parallel.on_paper(attn, 0, cp).chunks())


def of_moe(draw, n, sizes):
    sizes["batch"] = draw.multiple(n, n, 3 * n)
    return draw.experts(n) + draw.torch()


def of_amp_accum_ckpt(draw, n, sizes):
    accum = draw.randint(1, 4)
    sizes["batch"] = n * accum + draw.randrange(6)
    flags = ["--accum", accum, "--ckpt", draw.choice(("none", "full", "selective"))]
    return flags + draw.torch()


def of_hybrid_3d(draw, n, sizes):
    axes = draw.spread(n, ["dp", "cp", "tp", "pp"])
    dp = axes["dp"]
    pp = axes["pp"]
    experts = []
    if draw.random() < 0.6:
        experts = draw.experts(dp * axes["cp"])
    schedule = draw.choice(hybrid_3d.SCHEDULES)
    zero = draw.choice((0, 1, 2, 3))
    if zero == 3 and (pp > 1 or draw.random() < 0.5):
        zero = 2
    if zero == 3 or (pp == 1 and schedule.startswith(("zb", "dual"))):  # no rank waits for a W
        schedule = "1f1b"
    chunks, micro, flags = slices(draw, schedule, pp)
    sizes["layers"] = pp * chunks + draw.randrange(4)
    sizes["batch"] = dp * micro * draw.randint(1, 2)
    is_plain = axes["cp"] == 1 and not experts and zero < 2
    if is_plain and schedule in pipeline_parallel.ONE_STAGE and micro >= pp and draw.torch():
        flags += ["--impl", "torch"]
    else:
        flags += ["--ckpt", draw.choice(("none", "full", "selective"))]
    flags += ["--schedule", schedule, "--zero", zero]
    flags += attention(draw, axes, sizes, experts, flags)
    three = [["--dp", dp], ["--tp", axes["tp"]], ["--pp", pp]]
    # where one of the three is not said, it follows from the other two and the ranks
    for flag_and_size in draw.sample(three, draw.randint(2, 3)):
        flags += flag_and_size
    trained = draw.choice((r"blocks\.[02]|tok", "norm", "mlp", "attn|pos"))
    return flags + experts + draw.maybe("--train", trained, chance=0.2)


def attention(draw, axes, sizes, experts, flags):
    """The flags of cp and sp, and what they ask of sequence and heads."""
    cp = axes["cp"]
    tp = axes["tp"]
    sp = draw.maybe("--sp")
    if experts and tp > 1:  # else its ranks would all route the same tokens
        sp = ["--sp"]
    attn = draw.choice(list(context_parallel.KINDS))
    draw.heads(sizes, tp)
    if attn == "ulysses":
        draw.heads(sizes, cp * tp)
    parts = 1  # that the sequence divides into
    if sp or "--impl" in flags:
        parts = cp * tp
    if cp > 1:
        parts = math.lcm(parts, chunks_of(attn, cp))
    if parts > 1:
        sizes["seq"] = draw.multiple(parts, 8, 32)
    return sp + ["--cp", cp, "--attn", attn]


FILES = {
    "ddp": of_ddp,
    "zero": of_zero,
    "fsdp": of_fsdp,
    "tensor_parallel": of_tensor_parallel,
    "pipeline_parallel": of_pipeline_parallel,
    "context_parallel": of_context_parallel,
    "moe": of_moe,
    "amp_accum_ckpt": of_amp_accum_ckpt,
    "hybrid_3d": of_hybrid_3d,
}

# ---- the runs ------------------------------------------------------------------


# how many ranks, each as often as it is here
COUNTS = (1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 8, 9, 10, 12, 15, 16, 16, 16, 16, 16)


def drawn(seed, i, only=None, most=8):
    """-> file, ranks, flags of run i. Each nine runs are one of each file, if none is asked for."""
    order = Draw(f"{seed} round {i // len(FILES)}").sample(list(FILES), len(FILES))
    name = only or order[i % len(FILES)]
    draw = Draw(f"{seed} run {i}")
    n = draw.choice([count for count in COUNTS if count <= most])
    sizes = dict(
        layers=draw.randint(1, 4),
        vocab=draw.choice((256, 257, 263, 300)),
        seq=draw.randint(8, 32),
        batch=draw.randint(1, 8),
        steps=draw.randint(2, 3),
        seed=draw.randrange(1000),
        pad=draw.choice((0, 0.1, 0.3, 0.7)),
        clip=draw.choice((0, 0.1, 1, 10)),
        lr=draw.choice((1e-3, 1e-2)),
    )
    draw.heads(sizes, 1)
    flags = FILES[name](draw, n, sizes) + course(draw, name)
    flags += form(draw, sizes)
    flags = [str(word) for word in flags] + ["--dtype", "fp64", "--device", "cpu"]
    flags += [f"--{size.replace('_', '-')}={value}" for size, value in sizes.items()]
    return name, n, flags


def form(draw, sizes):
    """GPT-2's or Llama's; only this one has key-value heads and a hidden width of its own."""
    if draw.random() < 0.5:
        sizes["width"] = sizes["heads"] * draw.choice((4, 6, 8))  # rotary positions want pairs
        return ["--model", "llama-toy"]
    sizes["width"] = sizes["heads"] * draw.choice((4, 5, 6, 8))
    del sizes["kv_heads"]
    del sizes["hidden"]
    return []


def course(draw, name):
    """How the rate goes, what is held out, and what is frozen."""
    flags = draw.maybe("--warmup", 1, "--decay", draw.choice(("linear", "cosine")))
    if name != "hybrid_3d":  # which has drawn that itself
        flags += draw.maybe("--train", r"blocks\.[02]|tok", chance=0.2)
    return flags + draw.maybe("--eval-every", draw.randint(1, 2), chance=0.3)


def attempt(name, n, flags, plant=None):
    """-> the worst gap, []; or None and what was said, if the run failed."""
    try:
        report, said = ranks.report(n, name, flags, plant)
    except AssertionError as error:  # they hang
        return None, [str(error)]
    if report is None:
        failed = [line for line in said if "gradients" in line or "FAILED" in line]
        return None, failed + said[-20:]
    trouble = []
    for row in report["textbook"]:
        if not math.isclose(row["expected"], row["measured"], rel_tol=1e-12):
            trouble.append(str(row))
    gap = worst_gap(report)
    if gap is None:
        gap = 0.0  # pipedream trains something else, and compares nothing
    if gap > LIMIT:
        trouble.append(f"the worst gap is {gap}")
    if trouble:
        return None, trouble
    return gap, []


def sweep(runs, seed=0, only=None, most=8, plant=None):
    """Prints a line per run -> those that failed. only: the name of the only file; most: ranks.
    plant(module) puts in a bug."""
    failed = []
    worst = 0.0
    for i in runs:
        name, n, flags = drawn(seed, i, only, most)
        since = time.time()
        gap, trouble = attempt(name, n, flags, plant)
        result = "FAILED" if gap is None else f"{gap:.1e}"
        command = f"torchrun --standalone --nproc_per_node={n} {name}.py"
        seconds = time.time() - since
        print(f"{i:4} {seconds:5.1f} s {result:>8}  {command}", *flags, *trouble, flush=True)
        if gap is None:
            failed.append(i)
        else:
            worst = max(worst, gap)
    result = f"each equal to the plain GPT, the worst gap is {worst:.1e}"
    if failed:
        result = f"FAILED: {failed}"
    print(f"seed {seed}: {len(runs)} runs, {result}")
    return failed


def main(words):
    usage = "python tools/sweep.py N [SEED] [--file NAME] [--ranks MOST], N at least 1"
    parser = argparse.ArgumentParser(prog="sweep.py", allow_abbrev=False)
    parser.error = lambda message: require(False, f"{message}; usage: {usage}")
    parser.add_argument("runs", type=int)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--file", choices=FILES)
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args(words)
    if min(args.runs, args.seed + 1, args.ranks) < 1:
        parser.error("N and --ranks are 1 or more, SEED is 0 or more")
    return int(bool(sweep(range(args.runs), args.seed, args.file, args.ranks)))


if __name__ == "__main__":
    torch.set_num_threads(1)  # other threads would not be there in a process that is forked
    os.chdir(ROOT)
    # a server runs this file's imports, once for all ranks; it finds the file from ROOT
    preloaded = ["tools.sweep", "torch.distributed.pipelining", "torch.distributed.fsdp"]
    multiprocessing.set_forkserver_preload(preloaded)
    sys.exit(main(sys.argv[1:]))
