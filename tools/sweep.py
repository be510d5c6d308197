"""Random runs of every file: whatever ranks, sizes and flags it takes, it equals the plain GPT in float64, to 1e-10,
and what it has measured is what its textbook says.

    python tools/sweep.py N [SEED]      N runs, a line for each; exit code 1 if any failed

The files take turns. Ranks (1 to 8), sizes and all flags of a file are drawn; run i of a seed is always the same one.
What a file has to refuse is not drawn, so that exit code 2 is a failure too: of the file, or of the drawing here.
"""
import math
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / name) for name in ("", "tests")]
from conftest import script  # noqa: E402

LIMIT, GAPS = 1e-10, ("loss", "gradient", "grad_norm", "parameter")

# ---- what a file takes: (draw, ranks, sizes) -> its own flags; sizes are changed to what these ask for ---------------


class Draw(random.Random):
    def maybe(self, *flags, chance=0.5):
        return list(flags) if self.random() < chance else []

    def torch(self):
        return self.maybe("--impl", "torch", chance=0.2)

    def divisor(self, n):
        return self.choice([d for d in range(1, n + 1) if n % d == 0])

    def multiple(self, n, low, high):
        """Of n, between low and high, or the first one above."""
        return n * self.randint(-(-low // n), max(-(-low // n), high // n))


def ddp(draw, n, sizes):
    impl = draw.torch()
    sizes["batch"] = draw.multiple(n, n, 3 * n) if impl else n + draw.randrange(6)
    return ["--bucket-mb", draw.choice((0, 0.001, 0.02, 25)), *impl]


def zero(draw, n, sizes):
    stage, accum = draw.randrange(4), draw.randint(1, 3)
    offload = draw.choice(["none"] + ["optimizer"] * (stage > 0) + ["param"] * (stage == 3))
    sizes["batch"] = n * accum + draw.randrange(6)
    if stage and draw.torch():
        return ["--stage", stage, "--impl", "torch"]
    return ["--stage", stage, "--offload", offload, "--accum", accum]


def fsdp(draw, n, sizes):
    sizes["batch"] = n + draw.randrange(6)
    return [*draw.maybe("--no-reshard"), *draw.maybe("--hsdp", draw.divisor(n)),
            *(draw.torch() or draw.maybe("--offload"))]


def tensor_parallel(draw, n, sizes):
    sizes["heads"], sp, impl = draw.multiple(n, 1, 6), draw.maybe("--sp"), draw.torch()
    if sp or impl:  # of 20 positions torch gives 5 ranks 4, and fails on the sixth, which has none
        sizes["seq"] = draw.multiple(n, 8, 32)
    return [*sp, *impl]


def pipeline_parallel(draw, n, sizes):
    schedule = draw.choice(("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "pipedream"))
    chunks, micro = draw.randint(1, 3) if schedule == "interleaved" else 1, draw.randint(1, 8)
    if schedule == "interleaved":
        micro = draw.multiple(n, n, 2 * n)
    sizes["layers"], sizes["batch"] = n * chunks + draw.randrange(4), micro * draw.randint(1, 2)
    theirs = schedule not in ("naive", "pipedream") and (schedule != "1f1b" or micro >= n)
    return ["--schedule", schedule, "--micro", micro, "--virtual", chunks, *(draw.torch() if theirs else [])]


def context_parallel(draw, n, sizes):
    attn = draw.choice(("ring", "zigzag", "allgather", "ulysses"))
    sizes["seq"] = draw.multiple(2 * n if attn in ("zigzag", "allgather") else n, 8, 32)
    if attn == "ulysses":
        sizes["heads"] = draw.multiple(n, 1, 6)
    return ["--attn", attn]


def moe(draw, n, sizes):
    ep, sizes["batch"] = draw.divisor(n), draw.multiple(n, n, 3 * n)
    experts = draw.multiple(ep, 1, 3 * ep)
    return ["--experts", experts, "--ep", ep % n, "--top-k", draw.randint(1, min(experts, 4)), *draw.maybe("--shared"),
            "--capacity", draw.choice((0, 0, 0.5, 1, 1.25, 2)), "--balance", draw.choice(("aux", "bias", "none")),
            *draw.torch()]


def amp_accum_ckpt(draw, n, sizes):
    accum = draw.randint(1, 4)
    sizes["batch"] = n * accum + draw.randrange(6)
    return ["--accum", accum, "--ckpt", draw.choice(("none", "full", "selective")),
            *(draw.torch() or draw.maybe("--sweep", chance=0.1))]


def hybrid_3d(draw, n, sizes):
    dp, impl = draw.divisor(n), draw.torch()
    tp = draw.divisor(n // dp)
    pp, sp = n // dp // tp, draw.maybe("--sp")
    micro = draw.randint(pp if impl else 1, max(pp, 6))  # torch's 1f1b wants one for each stage
    ckpt = "none" if impl else draw.choice(("none", "full", "selective"))
    schedule = draw.choice(["gpipe", "1f1b", "interleaved"] + ["zb-h1"] * (ckpt != "full"))
    if schedule == "interleaved":
        micro = draw.multiple(pp, pp, 2 * pp)
    sizes["layers"] = pp * (1 + (schedule == "interleaved")) + draw.randrange(4)
    sizes["batch"], sizes["heads"] = dp * micro * draw.randint(1, 2), draw.multiple(tp, 1, 6)
    if sp or impl:
        sizes["seq"] = draw.multiple(tp, 8, 32)
    axes = [["--dp", dp], ["--tp", tp], ["--pp", pp]]
    return [*sum(draw.sample(axes, draw.randint(2, 3)), []), "--micro", micro, "--schedule", schedule, *sp,
            "--zero", draw.randrange(2), "--ckpt", ckpt, *impl]


FILES = ddp, zero, fsdp, tensor_parallel, pipeline_parallel, context_parallel, moe, amp_accum_ckpt, hybrid_3d

# ---- the runs ------------------------------------------------------------------


def drawn(seed, i):
    """-> file, ranks, flags of run i. Each nine runs are one of each file."""
    file = Draw(f"{seed} round {i // len(FILES)}").sample(FILES, len(FILES))[i % len(FILES)]
    draw = Draw(f"{seed} run {i}")
    n, head = draw.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8)), draw.choice((4, 5, 6, 8))
    sizes = dict(layers=draw.randint(1, 4), heads=draw.randint(2, 6), vocab=draw.choice((256, 257, 263, 300)),
                 seq=draw.randint(8, 32), batch=draw.randint(1, 8), steps=draw.randint(2, 3), seed=draw.randrange(1000),
                 pad=draw.choice((0, 0.1, 0.3, 0.7)), clip=draw.choice((0, 0.1, 1, 10)), lr=draw.choice((1e-3, 1e-2)))
    own = file(draw, n, sizes)
    sizes["width"] = sizes["heads"] * head
    return file.__name__, n, [*map(str, own), "--dtype", "fp64", *(f"--{k}={v}" for k, v in sizes.items())]


def to_file(log, plant, module):
    """On every rank, before main(): what it prints goes into a file."""
    sys.stdout = open(log, "a")
    if plant:
        plant(module)


def attempt(file, n, flags, plant=None):
    """-> worst gap, or None and what was said if the run failed."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        try:
            report = script(file, n, *flags, plant=partial(to_file, log, plant))
        except AssertionError as error:
            said = log.read_text().splitlines() if log.exists() else []
            return None, [line for line in said if "gaps: " in line or "FAILED" in line] + str(error).splitlines()[-20:]
    gap = max(report["check"][kind] for kind in GAPS)
    unlike = [row for row in report["textbook"] if not math.isclose(row["expected"], row["measured"], rel_tol=1e-12)]
    return (gap, []) if gap <= LIMIT and not unlike else (None, [f"the worst gap is {gap}", *unlike])


def sweep(runs, seed=0, plant=None):
    """Prints a line per run -> those that failed. plant(module) puts in a bug."""
    failed, worst, start = [], 0.0, time.time()
    for i in runs:
        file, n, flags = drawn(seed, i)
        since = time.time()
        gap, trouble = attempt(file, n, flags, plant)
        print(f"{i:4} {time.time() - since:5.1f} s {'FAILED' if gap is None else f'{gap:.1e}':>8}",
              f" torchrun --standalone --nproc_per_node={n} {file}.py", *flags, flush=True)
        if gap is None:
            print(*(f"     {line}" for line in trouble), sep="\n", flush=True)
            failed.append(i)
        worst = max(worst, gap or 0.0)
    print(f"seed {seed}: {len(runs)} runs in {time.time() - start:.0f} s,",
          f"FAILED: {failed}" if failed else f"each equal to the plain GPT, the worst gap is {worst:.1e}")
    return failed


def main(words):
    if not 1 <= len(words) <= 2 or not all(word.isdigit() for word in words) or int(words[0]) < 1:
        print("sweep.py: error: usage: python tools/sweep.py N [SEED], whole numbers, N at least 1", file=sys.stderr)
        return 2
    return int(bool(sweep(range(int(words[0])), *words[1:])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
