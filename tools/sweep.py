"""Random runs of every file: whatever ranks, sizes and flags, it equals the plain GPT to 1e-10.

    python tools/sweep.py N [SEED]      N runs, a line for each; exit code 1 if any failed

All is in float64, and what a run has measured must be what its textbook says. The files take turns.
Ranks (1 to 8), sizes and all flags of a file are drawn; run i of a seed is always the same one.
What a file has to refuse is not drawn, so that exit code 2 is a failure too: of the file, or of
the drawing here.
"""
import math
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from conftest import GAPS, script  # noqa: E402

LIMIT = 1e-10

# ---- what a file takes ---------------------------------------------------------
# Each function draws the flags of one file for n ranks. `sizes` holds the common flags drawn
# already; a function changes those that its own flags ask something of.


class Draw(random.Random):
    def maybe(self, *flags, chance=0.5):
        if self.random() < chance:
            return list(flags)
        return []

    def torch(self):
        return self.maybe("--impl", "torch", chance=0.2)

    def divisor(self, n):
        return self.choice([d for d in range(1, n + 1) if n % d == 0])

    def multiple(self, n, low, high):
        """A multiple of n between low and high, or the first one above."""
        least = -(-low // n)
        most = max(least, high // n)
        return n * self.randint(least, most)

    def course(self, freezes):
        """How the rate goes, what is held out, and what is frozen, where the file takes that."""
        flags = self.maybe("--warmup", 1, "--decay", self.choice(("linear", "cosine")))
        frozen = self.maybe("--train", r"blocks\.[02]|tok", chance=0.2)
        if freezes:
            flags += frozen
        return flags + self.maybe("--eval-every", self.randint(1, 2), chance=0.3)


def ddp(draw, n, sizes):
    impl = draw.torch()
    if impl:
        sizes["batch"] = draw.multiple(n, n, 3 * n)
    else:
        sizes["batch"] = n + draw.randrange(6)
    return ["--bucket-mb", draw.choice((0, 0.001, 0.02, 25)), *impl]


def zero(draw, n, sizes):
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


def fsdp(draw, n, sizes):
    sizes["batch"] = n + draw.randrange(6)
    flags = draw.maybe("--no-reshard") + draw.maybe("--hsdp", draw.divisor(n))
    impl = draw.torch()
    if impl:
        return flags + impl
    return flags + draw.maybe("--offload")


def tensor_parallel(draw, n, sizes):
    sizes["heads"] = draw.multiple(n, 1, 6)
    sp = draw.maybe("--sp")
    impl = draw.torch()
    if sp or impl:  # of 20 positions torch gives 5 ranks 4, and fails on the sixth, which has none
        sizes["seq"] = draw.multiple(n, 8, 32)
    return sp + impl


SCHEDULES = (
    "naive", "gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v",
    "auto", "pipedream",
)


def pipeline_parallel(draw, n, sizes):
    schedule = draw.choice(SCHEDULES)
    flags = ["--schedule", schedule]
    chunks = 1
    micro = draw.randint(1, 8)
    if schedule in ("interleaved", "bfs"):
        chunks = draw.randint(1, 3)
        flags += ["--chunks", chunks]
    if schedule == "interleaved":
        micro = draw.multiple(n, n, 2 * n)
    if schedule in ("zb-v", "dualpipe-v"):
        chunks = 2
        micro = draw.randint(2 * n, 2 * n + 4)
    sizes["layers"] = n * chunks + draw.randrange(4)
    sizes["batch"] = micro * draw.randint(1, 2)
    flags += ["--micro", micro]
    if schedule in ("gpipe", "interleaved", "zb-h1") or (schedule == "1f1b" and micro >= n):
        flags += draw.torch()
    return flags


def context_parallel(draw, n, sizes):
    attn = draw.choice(("ring", "zigzag", "allgather", "ulysses"))
    chunks = n
    if attn in ("zigzag", "allgather"):
        chunks = 2 * n
    sizes["seq"] = draw.multiple(chunks, 8, 32)
    if attn == "ulysses":
        sizes["heads"] = draw.multiple(n, 1, 6)
    return ["--attn", attn]


def moe(draw, n, sizes):
    ep = draw.divisor(n)
    experts = draw.multiple(ep, 1, 3 * ep)
    sizes["batch"] = draw.multiple(n, n, 3 * n)
    flags = ["--experts", experts, "--ep", ep % n, "--top-k", draw.randint(1, min(experts, 4))]
    flags += draw.maybe("--shared")
    flags += ["--capacity", draw.choice((0, 0, 0.5, 1, 1.25, 2))]
    flags += ["--balance", draw.choice(("aux", "bias", "none"))]
    return flags + draw.torch()


def amp_accum_ckpt(draw, n, sizes):
    accum = draw.randint(1, 4)
    sizes["batch"] = n * accum + draw.randrange(6)
    flags = ["--accum", accum, "--ckpt", draw.choice(("none", "full", "selective"))]
    impl = draw.torch()
    if impl:
        return flags + impl
    return flags + draw.maybe("--sweep", chance=0.1)


def hybrid_3d(draw, n, sizes):
    dp = draw.divisor(n)
    tp = draw.divisor(n // dp)
    pp = n // dp // tp
    impl = draw.torch()
    sp = draw.maybe("--sp")
    ckpt = "none"
    if not impl:
        ckpt = draw.choice(("none", "full", "selective"))
    schedules = ["gpipe", "1f1b", "interleaved"]
    if ckpt != "full":
        schedules.append("zb-h1")
    schedule = draw.choice(schedules)
    least = 1
    if impl:
        least = pp  # torch's 1f1b wants one for each stage
    micro = draw.randint(least, max(pp, 6))
    stages = pp
    if schedule == "interleaved":
        stages = 2 * pp
        micro = draw.multiple(pp, pp, 2 * pp)
        if pp == 1:
            impl = []  # refused: torch's has no such schedule
    sizes["layers"] = stages + draw.randrange(4)
    sizes["batch"] = dp * micro * draw.randint(1, 2)
    sizes["heads"] = draw.multiple(tp, 1, 6)
    if sp or impl:
        sizes["seq"] = draw.multiple(tp, 8, 32)
    axes = [["--dp", dp], ["--tp", tp], ["--pp", pp]]
    flags = sum(draw.sample(axes, draw.randint(2, 3)), [])  # the third follows
    flags += ["--micro", micro, "--schedule", schedule, *sp]
    return flags + ["--zero", draw.randrange(2), "--ckpt", ckpt, *impl]


FILES = (
    ddp, zero, fsdp, tensor_parallel, pipeline_parallel, context_parallel, moe, amp_accum_ckpt,
    hybrid_3d,
)

# ---- the runs ------------------------------------------------------------------


def drawn(seed, i):
    """-> file, ranks, flags of run i. Each nine runs are one of each file."""
    order = Draw(f"{seed} round {i // len(FILES)}").sample(FILES, len(FILES))
    file = order[i % len(FILES)]
    draw = Draw(f"{seed} run {i}")
    n = draw.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8))
    head_width = draw.choice((4, 5, 6, 8))
    sizes = dict(
        layers=draw.randint(1, 4),
        heads=draw.randint(2, 6),
        vocab=draw.choice((256, 257, 263, 300)),
        seq=draw.randint(8, 32),
        batch=draw.randint(1, 8),
        steps=draw.randint(2, 3),
        seed=draw.randrange(1000),
        pad=draw.choice((0, 0.1, 0.3, 0.7)),
        clip=draw.choice((0, 0.1, 1, 10)),
        lr=draw.choice((1e-3, 1e-2)),
    )
    own = file(draw, n, sizes)
    twin_refuses = file is hybrid_3d and "torch" in own  # frozen layers
    own += draw.course(freezes=not twin_refuses)
    sizes["width"] = sizes["heads"] * head_width
    flags = [str(word) for word in own] + ["--dtype", "fp64"]
    flags += [f"--{name}={value}" for name, value in sizes.items()]
    return file.__name__, n, flags


def to_file(log, plant, module):
    """On every rank, before main(): what it prints goes into a file."""
    sys.stdout = open(log, "a")
    if plant:
        plant(module)


def attempt(file, n, flags, plant=None):
    """-> worst gap, []; or None and what was said, if the run failed."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        try:
            report = script(file, n, *flags, plant=partial(to_file, log, plant))
        except AssertionError as error:
            return None, complaints(log, error)
    gap = max(report["check"][kind] for kind in GAPS)
    trouble = []
    if gap > LIMIT:
        trouble.append(f"the worst gap is {gap}")
    for row in report["textbook"]:
        if not math.isclose(row["expected"], row["measured"], rel_tol=1e-12):
            trouble.append(str(row))
    if trouble:
        return None, trouble
    return gap, []


def complaints(log, error):
    """What a failed run has said that matters."""
    lines = []
    if log.exists():
        for line in log.read_text().splitlines():
            if "gradients" in line or "FAILED" in line:
                lines.append(line)
    return lines + str(error).splitlines()[-20:]


def sweep(runs, seed=0, plant=None):
    """Prints a line per run -> those that failed. plant(module) puts in a bug."""
    failed = []
    worst = 0.0
    start = time.time()
    for i in runs:
        file, n, flags = drawn(seed, i)
        since = time.time()
        gap, trouble = attempt(file, n, flags, plant)
        result = "FAILED" if gap is None else f"{gap:.1e}"
        command = f"torchrun --standalone --nproc_per_node={n} {file}.py"
        seconds = time.time() - since
        print(f"{i:4} {seconds:5.1f} s {result:>8}  {command}", *flags, flush=True)
        for line in trouble:
            print("     " + line, flush=True)
        if gap is None:
            failed.append(i)
        else:
            worst = max(worst, gap)
    result = f"each equal to the plain GPT, the worst gap is {worst:.1e}"
    if failed:
        result = f"FAILED: {failed}"
    print(f"seed {seed}: {len(runs)} runs in {time.time() - start:.0f} s, {result}")
    return failed


def main(words):
    numbers = all(word.isdigit() for word in words)
    if not numbers or len(words) not in (1, 2) or int(words[0]) < 1:
        print("sweep.py: error: usage: python tools/sweep.py N [SEED], whole numbers, N at least 1",
              file=sys.stderr)
        return 2
    return int(bool(sweep(range(int(words[0])), *words[1:])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
