"""Random runs of every file: whatever ranks, sizes and flags, it equals the plain GPT to 1e-10.

    python tools/sweep.py N [SEED]      N runs, a line for each; exit code 1 if any failed
        --file hybrid_3d                of this file alone: else the files take turns
        --ranks 16                      up to 16 ranks, often many; else up to 8

All is in float64, and what a run has measured must be what its textbook says. Ranks, sizes and most
flags of a file are drawn; run i of a seed, a file and a --ranks is always the same one. What a file
has to refuse is not drawn, so that exit code 2 is a failure too: of the file, or of the drawing
here.
"""
import argparse
import math
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import torch  # noqa: E402
from conftest import GAPS, script  # noqa: E402
from tools.estimate import VEES  # noqa: E402, schedules with two stages a rank, placed as a V

LIMIT = 1e-10

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
        return self.choice([d for d in range(1, n + 1) if n % d == 0])

    def multiple(self, n, low, high):
        """A multiple of n between low and high, or the first one above."""
        least = -(-low // n)
        most = max(least, high // n)
        return n * self.randint(least, most)

    def spread(self, n, axes):
        """n ranks over axes: each prime factor goes to one, rather to one that has none yet."""
        sizes = dict.fromkeys(axes, 1)
        for prime in primes(n):
            free = [axis for axis in axes if sizes[axis] == 1]
            if not free or self.random() < 0.2:
                free = axes
            sizes[self.choice(free)] *= prime
        return sizes

    def course(self, freezes, evaluates):
        """How the rate goes, what is held out, and what is frozen, where the file takes that."""
        flags = self.maybe("--warmup", 1, "--decay", self.choice(("linear", "cosine")))
        # drawn even where it is not used: so the draws after it are the same for all files
        frozen = self.maybe("--train", r"blocks\.[02]|tok", chance=0.2)
        if freezes:
            flags += frozen
        held_out = self.maybe("--eval-every", self.randint(1, 2), chance=0.3)
        if evaluates:
            flags += held_out
        return flags


def primes(n):
    """-> the prime factors of n, the largest first"""
    factors = []
    while n > 1:
        factor = next(d for d in range(2, n + 1) if n % d == 0)
        factors.insert(0, factor)
        n //= factor
    return factors


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
    if sp or impl:
        # torch cuts 20 positions for 6 ranks into 4 4 4 4 4 0, and fails on 0
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
    if schedule in VEES:
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
    # --ep 0 stands for all ranks
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
    axes = draw.spread(n, ["dp", "cp", "tp", "pp"])
    dp = axes["dp"]
    experts = mixture(draw, dp * axes["cp"])
    impl = []
    if axes["cp"] == 1 and not experts:
        impl = draw.torch()
    schedule, zero, ckpt = combined(draw, axes["pp"], impl)
    flags = ["--schedule", schedule, "--zero", zero, "--ckpt", ckpt]
    chunks, micro, more = slices(draw, schedule, axes["pp"], impl)
    if chunks > 1 and axes["pp"] == 1:  # torch has no such schedule
        impl = []
    if schedule in VEES and dp > 1:  # fully_shard would untie the embedding
        impl = []
    if schedule in VEES and torch.__version__ < (2, 13):  # whose schedules gloo cannot run
        impl = []
    flags += ["--micro", micro, *more, *attention(draw, axes, sizes, impl)]
    stages = axes["pp"] * chunks
    sizes["layers"] = stages + draw.randrange(4)
    sizes["batch"] = dp * micro * draw.randint(1, 2)
    flags += uneven(draw, stages, sizes["layers"])
    three = [["--dp", dp], ["--tp", axes["tp"]], ["--pp", axes["pp"]]]
    # where one of the three is not said, it follows from the other two and the ranks
    for flag_and_size in draw.sample(three, draw.randint(2, 3)):
        flags += flag_and_size
    trained = draw.choice((r"blocks\.[02]|tok", "norm", "mlp", "attn|pos"))
    flags += draw.maybe("--train", trained, chance=0.2)
    return flags + experts + impl


def mixture(draw, data):
    """Experts, for so many ranks of dp x cp, or plain MLPs."""
    if draw.random() < 0.4:
        return []
    ep = draw.choice((data, draw.divisor(data)))
    experts = draw.multiple(ep, 1, 3 * ep)
    # --ep 0 stands for all of them
    flags = ["--experts", experts, "--ep", ep % data, "--top-k", draw.randint(1, min(experts, 4))]
    flags += draw.maybe("--shared")
    flags += ["--capacity", draw.choice((0, 0, 0.5, 1, 1.25, 2))]
    return flags + ["--balance", draw.choice(("aux", "bias", "none"))]


def combined(draw, pp, impl):
    """-> schedule, zero and ckpt that go together"""
    stages_of_zero = [0, 1]
    if not impl:
        stages_of_zero.append(2)
        if pp == 1:
            stages_of_zero.append(3)
    zero = draw.choice(stages_of_zero)
    ckpt = "none"
    if not impl:
        ckpt = draw.choice(("none", "full", "selective"))
    schedules = ["gpipe", "1f1b", "interleaved", "bfs"]
    if ckpt != "full":  # a backward that makes all again cannot be split into B and W
        schedules += ["zb-h1", "zb-v", "dualpipe-v"]
    if ckpt != "full" and not impl:  # torch has no such schedules
        schedules += ["zb-h2", "auto"]
    schedule = draw.choice(schedules)
    if zero == 3:
        schedule = "1f1b"
    return schedule, zero, ckpt


def slices(draw, schedule, pp, impl):
    """-> stages of a rank, micro-batches, the flags of the schedule besides"""
    chunks = 1
    flags = []
    least = 1
    if impl:  # torch's 1f1b wants one for each stage
        least = pp
    micro = draw.randint(least, max(pp, 6))
    if schedule in ("interleaved", "bfs"):
        most = 3
        if pp > 4:
            most = 2
        chunks = draw.randint(1, most)
        flags = ["--chunks", chunks]
    if schedule == "interleaved":
        micro = draw.multiple(pp, pp, 2 * pp)
    if schedule in VEES:
        chunks = 2
    if schedule == "dualpipe-v" or (schedule == "zb-v" and impl):
        micro = draw.randint(2 * pp, 2 * pp + 4)
    if schedule == "auto":
        flags = draw.maybe("--times", draw.choice(("1,2,1,0", "1,1.5,0.5,0.2")))
        flags += draw.maybe("--limit", draw.randint(pp, 2 * pp))
    return chunks, micro, flags


def attention(draw, axes, sizes, impl):
    """The flags of cp and sp, and what they ask of sequence and heads."""
    cp = axes["cp"]
    tp = axes["tp"]
    sp = draw.maybe("--sp")
    attn = draw.choice(("ring", "zigzag", "allgather", "ulysses"))
    sizes["heads"] = draw.multiple(tp, 1, 6)
    if attn == "ulysses":
        sizes["heads"] = draw.multiple(cp * tp, 1, 6)
    parts = 1  # that the sequence divides into
    if sp or impl:
        parts = cp * tp
    if cp > 1:
        chunks = cp
        if attn in ("zigzag", "allgather"):
            chunks = 2 * cp
        parts = math.lcm(parts, chunks)
    if parts > 1:
        sizes["seq"] = draw.multiple(parts, 8, 32)
    if cp == 1:
        return sp
    return sp + ["--cp", cp, "--attn", attn]


def uneven(draw, stages, layers):
    """How many layers each stage has, if they are not equal parts."""
    balanced = ["--layers-per-stage", "balanced"]
    counts = [1] * stages
    for _ in range(layers - stages):
        counts[draw.randrange(stages)] += 1
    said = ["--layers-per-stage", ",".join(map(str, counts))]
    flags = draw.choice((balanced, said))
    return draw.maybe(*flags, chance=0.3)


FILES = (
    ddp, zero, fsdp, tensor_parallel, pipeline_parallel, context_parallel, moe, amp_accum_ckpt,
    hybrid_3d,
)

# ---- the runs ------------------------------------------------------------------


FEW = (1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8)  # how many ranks, each as often as it is here
MANY = (1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 9, 10, 12, 12, 15, 16, 16, 16, 16, 16)


def drawn(seed, i, only=None, most=8):
    """-> file, ranks, flags of run i. Each nine runs are one of each file, if none is asked for."""
    order = Draw(f"{seed} round {i // len(FILES)}").sample(FILES, len(FILES))
    file = order[i % len(FILES)]
    if only:
        by_name = {one.__name__: one for one in FILES}
        file = by_name[only]
    draw = Draw(f"{seed} run {i}")
    counts = MANY if most > 8 else FEW
    n = draw.choice([count for count in counts if count <= most])
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
    hybrid = file is hybrid_3d
    torchs_vee = hybrid and "torch" in own and set(own) & set(VEES)
    freezes = not hybrid  # hybrid_3d has drawn that itself
    evaluates = not torchs_vee  # eval() of torch's does not know these
    own += draw.course(freezes, evaluates)
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
    """-> worst gap, []; or None and what was said, if the run failed.

    plant(module) is what every rank calls before main().
    """
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


def sweep(runs, seed=0, only=None, most=8, plant=None):
    """Prints a line per run -> those that failed.

    only: the name of the only file; most: ranks. plant(module) puts in a bug.
    """
    failed = []
    worst = 0.0
    start = time.time()
    for i in runs:
        file, n, flags = drawn(seed, i, only, most)
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


USAGE = "python tools/sweep.py N [SEED] [--file NAME] [--ranks MOST]"


def main(words):
    parser = argparse.ArgumentParser(prog="sweep.py", usage=USAGE, allow_abbrev=False)
    parser.error = wrong
    parser.add_argument("runs", type=positive)
    parser.add_argument("seed", type=whole, nargs="?", default=0)
    parser.add_argument("--file", choices=[file.__name__ for file in FILES])
    parser.add_argument("--ranks", type=positive, default=8)
    try:
        args = parser.parse_args(words)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return int(bool(sweep(range(args.runs), args.seed, args.file, args.ranks)))


def whole(word):
    """A type for argparse, which calls parser.error where this raises a ValueError."""
    if not word.isdigit():
        raise ValueError
    return int(word)


def positive(word):
    number = whole(word)
    if number < 1:
        raise ValueError
    return number


def wrong(message):
    """In the place of parser.error, which prints several lines: main() catches this, prints one."""
    raise ValueError(f"sweep.py: error: {message}; usage: {USAGE}, N at least 1")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
