"""Run techniques in turn and print one table.

    ./run.sh                        each on real text, compared with one process (bench.py check)
    ./run.sh bench [FILE] [flags]   the idea, ours and torch's own, in alternating blocks of steps
    ./run.sh scale FILE [flags]     the same step on 1, 2, 4, .. ranks

The exit code is 1 if any of them failed, 2 for bad usage. calls, sent and peak are those of rank 0
in one step, ms/step is the median. Flags go to every run.

bench runs each file's VARIANTS; a side that one of them has not is left out. "As fast as torch":
the middle one of all pairs of neighbouring blocks, and in brackets the lowest and the highest. With
1 among them the two are called equal: the noise is larger than what they differ by.

scale doubles the ranks up to the number of GPUs, or of cores. The global batch is the same for all:
8, or the largest count if that is more. Efficiency is speed-up over ranks.
"""
import math
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch  # noqa: E402

from harness.flags import require  # noqa: E402
from tools.launch import CORES, technique  # noqa: E402
from tools.ranks import TECHNIQUES, Failed, measured, variants, worst_gap  # noqa: E402

USUAL = torch.cuda.device_count() or 2  # ranks
LAYOUTS = ("--dp 2 --tp 1 --pp 1", "--dp 2 --tp 1 --pp 2", "--dp 1 --tp 2 --pp 2",
           "--dp 2 --tp 2 --pp 1")  # of hybrid_3d
SIZES = "--layers 4 --width 256 --heads 8 --seq 256 --batch 8 --steps 30 --no-check"

# ---- the table -------------------------------------------------------------------

NAMES = {"idea": "idea", "scratch": "ours", "torch": "torch"}
CHECK = ("ranks", "worst gap", "sent MB", "textbook", "held MB", "peak MB", "ms/step", "tok/s")
BENCH = ("ranks", "side", "worst gap", "calls", "sent MB", "peak MB", "ms/step")
WIDTH = {CHECK: 18, BENCH: 52}  # of what stands before the columns


def aligned(label, columns, cells=None):
    """A line of the table; without cells, its head."""
    words = [str(cells[name] if cells else name).rjust(len(name) + 3) for name in columns]
    return f"{label:{WIDTH[columns]}}{''.join(words)}  "


def cells_of(report, impl):
    """-> {column: what stands there, of this side}"""
    side = report["sides"][impl]
    rows = {row["what"]: row["expected"] for row in report["textbook"]}
    sent = [f"wire {name}" for name, c in report["ranks"][0]["collectives"].items() if c["wire"]]
    expected = "-"  # where the textbook has no row for some of the collectives
    if all(what in rows for what in sent):
        expected = f"{sum(rows[what] for what in sent) / 1e6:.2f}"
    gap = "-"
    if report["check"]:
        gap = f"{worst_gap(report['check'].get('others', {}).get(impl, report['check'])):.1e}"
    return {
        "ranks": report["world_size"], "side": NAMES[impl], "worst gap": gap,
        "calls": side["calls"], "sent MB": f"{side['wire'] / 1e6:.2f}",
        "textbook": expected, "held MB": f"{side['held'] / 1e6:.2f}",
        "peak MB": f"{side['peak'] / 1e6:.2f}", "ms/step": f"{side['ms_per_step']:.1f}",
        "tok/s": f"{report['tokens_per_second']:,.0f}",
    }


def lines_of(label, columns, measure, *args):
    """measure(*args) -> a report -> a line for each side, in the order of NAMES; its exit code.
    A failure is a line."""
    try:
        report = measure(*args)
    except Failed as failure:
        return [f"{label:{WIDTH[columns]}} FAILED: {failure}"], failure.code
    sides = {impl: report["sides"][impl] for impl in NAMES if impl in report["sides"]}
    lines = []
    for impl, side in sides.items():
        last = "passed" if report["check"] else "ran"
        if impl != "torch" and "torch" in sides:
            last = beside_torch(side["block_ms"], sides["torch"]["block_ms"])
        if report["exit_code"]:
            last = "FAILED"
        lines.append(aligned(label, columns, cells_of(report, impl)) + last)
        label = ""  # only before the first
    return lines, report["exit_code"]


def beside_torch(own, torchs):
    """Medians of blocks, in turn -> how many times as fast, in words."""
    ratios = [theirs / ours for ours, theirs in zip(own, torchs)]
    verdict = f"{statistics.median(ratios):.2f}"
    if min(ratios) <= 1 <= max(ratios):
        verdict = "equal"
    return f"{verdict} ({min(ratios):.2f}..{max(ratios):.2f})"


# ---- the commands ----------------------------------------------------------------


def check(words=()):
    """hybrid_3d on 8 ranks, since fewer would not show all three axes; once more as a Llama."""
    usual = max(n for n in (1, 2, 4) if n <= USUAL)  # the toy has 4 heads and 4 layers
    rows = [(file, file, usual, "") for file in TECHNIQUES if file != "hybrid_3d"]
    rows.append(("hybrid_3d", "hybrid_3d", 8, "--dp 2 --tp 2 --pp 2"))
    rows.append(("hybrid_3d, Llama", "hybrid_3d", 4, "--model llama-toy --tp 2 --pp 2 --sp"))
    lines = []
    failed = 0
    for done, (label, file, ranks, flags) in enumerate(rows, 1):
        if 0 < torch.cuda.device_count() < ranks:  # ranks share GPUs by gloo, without pipelines
            flags += " --device cpu"
        words = f"{file}.py on {ranks} ranks {flags}".strip()
        print(f"\n==== {done} of {len(rows)}: {words} ====", flush=True)
        found, code = lines_of(label, CHECK, measured, ranks, file, flags.split(), True)
        lines += found
        failed = max(failed, code)
    print("\n==== every technique, compared with the plain GPT (MB = 1e6 bytes, rank 0) ====")
    print(aligned("", CHECK) + "verdict", *lines, sep="\n")
    if not failed:
        print("\nAll equal one process. Next: read ddp.py; ./run.sh ddp 4 --dtype fp64 --pad 0.3")
    return int(failed > 0)


def first_accepted(impls, file, flags):
    """-> the report of the first of these --impl that the file does not refuse"""
    axes = [int(size) for size in re.findall(r"--(?:dp|cp|tp|pp) (\d+)", flags)]
    ranks = math.prod(axes) if axes else USUAL
    for impl in impls:
        try:
            return measured(ranks, file, ["--impl", impl, *flags.split()])
        except Failed as failure:
            if failure.code != 2 or impl == impls[-1]:
                raise


def sides_of(file, flags):
    """-> the report with all three sides, or with those that these flags have"""
    found = first_accepted(("all", "both", "scratch"), file, flags)
    if len(found["sides"]) == 1:  # torch has none: the idea's is a run of its own
        idea = first_accepted(("idea", "scratch"), file, flags)
        found["sides"] = {**idea["sides"], **found["sides"]}
    return found


def bench(words):
    files = TECHNIQUES
    if words and words[0][0] != "-":
        files = [technique(words.pop(0))]
    print(aligned("", BENCH) + "as fast as torch", flush=True)
    failed = 0
    for file in files:
        worth = LAYOUTS if file == "hybrid_3d" else variants(file)
        for own in worth:
            flags = " ".join([SIZES, own, *words])
            lines, code = lines_of(f"{file} {own}", BENCH, sides_of, file, flags)
            failed = max(failed, code)
            print(*lines, sep="\n", flush=True)
    return failed


def scale(words):
    require(words, "usage: ./run.sh scale FILE [flags]")
    file = technique(words[0])
    counts = rank_counts()
    flags = ["--batch", max(8, counts[-1]), *words[1:], "--no-check"]
    print(f"{'ranks':>6}{'ms/step':>10}{'tok/s':>12}{'speed-up':>10}{'efficiency':>12}", flush=True)
    rates = []  # tokens per second
    for ranks in counts:
        try:
            found = measured(ranks, file, flags)
        except Failed as failure:
            print(f"{ranks:6}   FAILED: {failure}", file=sys.stderr)
            return failure.code
        rates.append(found["tokens_per_second"])
        gain = rates[-1] / rates[0]
        print(f"{ranks:6}{found['ms_per_step']:10.1f}{rates[-1]:12,.0f}{gain:10.2f}"
              f"{gain / ranks:12.0%}", flush=True)
    return 0


def rank_counts():
    """1, 2, 4, .. as far as there are GPUs or cores."""
    most = torch.cuda.device_count() or CORES
    return [2 ** i for i in range(most.bit_length())]


def main(words):
    commands = {"check": check, "bench": bench, "scale": scale}
    require(words and words[0] in commands,
            "usage: bench.py check | bench [FILE] [flags] | scale FILE [flags]")
    if {"-h", "--help"} & set(words):
        print(__doc__, end="")
        return 0
    return commands[words[0]](words[1:])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
