"""Run techniques in turn and print one table.

    ./run.sh                        each on real text, compared with one process (bench.py check)
    ./run.sh bench [flags]          ours against torch's own, in alternating blocks
    ./run.sh scale FILE [flags]     the same step on 1, 2, 4, .. ranks

The exit code is 1 if any of them failed, 2 for a flag that the first of them refuses.

scale doubles the ranks up to the number of GPUs, or of cores. The global batch is the same for all
counts: what --batch says, or else 8, or the largest count if that is more. Speed-up is tokens per
second over those of one rank, efficiency is speed-up over ranks.
"""
import os
import sys
from collections import namedtuple
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch  # noqa: E402

from harness.usage import require  # noqa: E402
from tools.launch import INTERRUPTED, Failed, cores, report, usual_ranks, worst_gap  # noqa: E402

Row = namedtuple("Row", "label file ranks flags", defaults=("",))

FILES = ("ddp", "zero", "fsdp", "tensor_parallel", "pipeline_parallel", "context_parallel", "moe",
         "amp_accum_ckpt")
BENCH_SIZES = "--layers 4 --width 256 --heads 8 --seq 256 --batch 8 --steps 20 --no-check"
LONG = "--impl scratch --seq 4096 --layers 2 --batch 1"
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")

# What is timed. A row is compared with the row of one process that does the same work, see
# efficiency(). torch's context parallelism runs on GPUs only: LONG has no side of torch's.
BENCH = (
    Row("one_process", "ddp", 1, "--impl scratch"),
    Row("ddp", "ddp", 2),
    *[Row(f"zero_{stage}", "zero", 2, f"--stage {stage}") for stage in (1, 2, 3)],
    Row("fsdp", "fsdp", 2),
    Row("tensor_parallel", "tensor_parallel", 2),
    Row("tensor_parallel_sp", "tensor_parallel", 2, "--sp"),
    *[Row(name, "pipeline_parallel", 2, f"--micro 8 --schedule {name}") for name in SCHEDULES],
    Row("amp_accum_ckpt", "amp_accum_ckpt", 2),
    Row("hybrid_dp", "hybrid_3d", 2, "--dp 2 --tp 1 --pp 1"),
    Row("hybrid_tp_pp", "hybrid_3d", 4, "--dp 1 --tp 2 --pp 2"),
    Row("hybrid_dp_pp", "hybrid_3d", 4, "--dp 2 --tp 1 --pp 2"),
    Row("hybrid_dp_tp", "hybrid_3d", 4, "--dp 2 --tp 2 --pp 1"),
    # efficiency() goes by the end of a label: _long, _moe
    Row("one_process_long", "context_parallel", 1, LONG),
    Row("zigzag_long", "context_parallel", 2, f"--attn zigzag {LONG}"),
    Row("one_process_moe", "moe", 1, "--impl scratch"),
    Row("moe_moe", "moe", 2),
)


def check_rows():
    """Every technique once; hybrid_3d on 8 ranks, since fewer would not show all three axes, and
    once more in Llama's form."""
    usual = usual_ranks()
    ranks = max(n for n in (1, 2, 4) if n <= usual)  # the toy has 4 heads and 4 layers
    llama = "--model llama-toy --dp 1 --tp 2 --pp 2 --sp"
    return [*(Row(file, file, ranks) for file in FILES),
            Row("hybrid_3d", "hybrid_3d", 8, "--dp 2 --tp 2 --pp 2"),
            Row("hybrid_3d, Llama", "hybrid_3d", 4, llama)]


# ---- running -----------------------------------------------------------------


def run_all(rows, flags):
    """-> {label: report, or None where the run has ended without one}"""
    reports = dict.fromkeys(row.label for row in rows)
    for done, row in enumerate(rows, 1):
        words = f"{row.label}: {row.file}.py on {row.ranks} ranks {row.flags}"
        print(f"\n==== {done} of {len(rows)}: {words} ====", flush=True)
        words = [*flags, *row.flags.split()]  # of two flags the later one counts
        try:
            reports[row.label] = report(row.ranks, f"{row.file}.py", words, shown=True)
        except Failed as failure:
            if failure.code == 2 and done == 1:
                sys.exit(2)  # it refuses a flag, and has said so
    return reports


# ---- the table ---------------------------------------------------------------


def megabytes(report):
    """-> what rank 0 has sent, by the textbook, what it held and its peak, in words"""
    first = report["ranks"][0]
    sent = sum(figures["wire"] for figures in first["collectives"].values())
    expected = sum(row["expected"] for row in report["textbook"] if row["what"].startswith("wire"))
    memory = first["memory"]
    held = memory["parameters"] + memory["gradients"] + memory["optimizer"]
    return [f"{size / 1e6:.2f}" for size in (sent, expected, held, memory["peak"])]


# what stands above a column: how wide it is
COLUMNS = {"worst gap": 11, "sent MB": 10, "textbook": 10, "held MB": 9, "peak MB": 9, "ms/step": 9,
           "tok/s": 9, "vs torch": 10, "efficiency": 12}


def line(label, report, reports, timed):
    """A row of the table."""
    gap = worst_gap(report)
    cells = ["-" if gap is None else f"{gap:.1e}", *megabytes(report)]
    cells += [f"{report['ms_per_step']:.1f}", f"{report['tokens_per_second']:,.0f}"]
    if timed:
        cells.append(f"{report['speedup']:.2f}x" if "speedup" in report else "-")
        cells.append(efficiency(label, report, reports))
    verdict = "passed" if report["check"] else "ran"
    if report["exit_code"] != 0:
        verdict = "FAILED"
    return f"{label:18}{report['world_size']:6}{aligned(cells)}  {verdict}"


def aligned(cells):
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values()))


def efficiency(label, report, reports):
    """Beside the row of one process that does the same work, if it has run."""
    kind = "".join(kind for kind in ("_long", "_moe") if label.endswith(kind))
    one_process = reports.get("one_process" + kind)
    ranks = report["world_size"]
    if one_process is None or ranks > 2:  # these may share cores, where less is to be gained
        return "-"
    return f"{one_process['ms_per_step'] / report['ms_per_step'] / ranks:.0%}"


def table(title, reports, timed):
    """Print it -> did all pass?"""
    print(f"\n==== {title} ====")
    heads = list(COLUMNS) if timed else list(COLUMNS)[:7]
    print(f"{'':18} ranks{aligned(heads)}  verdict")
    for label, report in reports.items():
        print(line(label, report, reports, timed) if report else f"{label:18}FAILED")
    return all(report and report["exit_code"] == 0 for report in reports.values())


# ---- more and more ranks ---------------------------------------------------------


def rank_counts():
    """1, 2, 4, .. as far as there are GPUs or cores."""
    most = torch.cuda.device_count() or cores()
    return [2 ** i for i in range(most.bit_length())]


def scale(words):
    file = "".join(words[:1]).removesuffix(".py")
    require(file in (*FILES, "hybrid_3d"), "usage: ./run.sh scale FILE [flags]")
    os.environ["OMP_NUM_THREADS"] = "1"
    counts = rank_counts()
    flags = ["--batch", max(8, counts[-1]), *words[1:], "--no-check"]
    print(f"{'ranks':>6}{'ms/step':>10}{'tok/s':>12}{'speed-up':>10}{'efficiency':>12}", flush=True)
    first = None  # tokens per second of one rank
    for ranks in counts:
        try:
            found = report(ranks, f"{file}.py", flags)
        except Failed as failure:
            print(f"{ranks:6}   FAILED: {failure}", file=sys.stderr)
            return failure.code
        rate = found["tokens_per_second"]
        first = first or rate
        gain = rate / first
        print(f"{ranks:6}{found['ms_per_step']:10.1f}{rate:12,.0f}{gain:10.2f}{gain / ranks:12.0%}",
              flush=True)
    return 0


# ---- the commands --------------------------------------------------------------


def check():
    title = "every technique, compared with the plain GPT (MB = 1e6 bytes, rank 0)"
    good = table(title, run_all(check_rows(), []), timed=False)
    if good:
        print("\nAll equal one process. Next: read ddp.py; ./run.sh ddp 4 --dtype fp64 --pad 0.3")
    return int(not good)


def bench(flags):
    os.environ["OMP_NUM_THREADS"] = "1"
    reports = run_all(BENCH, ["--impl", "both", *BENCH_SIZES.split(), *flags])
    good = table("ours against torch's own: medians of alternating blocks", reports, timed=True)
    return int(not good)


def main(words):
    command = "".join(words[:1])
    if words == ["check"]:
        return check()
    if command == "bench":
        return bench(words[1:])
    require(command == "scale", "usage: bench.py check | bench [flags] | scale FILE [flags]")
    return scale(words[1:])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
