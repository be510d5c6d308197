"""Run every technique in turn and print one table: `./run.sh` and `./run.sh bench`.

    python tools/everything.py check            each on real text, compared with one process
    python tools/everything.py bench [flags]    ours against torch's own, in alternating blocks

The exit code is 1 if any of them failed. After a bench it says what the machine allows: how long
two processes take that have nothing to tell each other, and how fast gloo is.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from harness.report import RED, colored  # noqa: E402
from tools.launch import usual_ranks  # noqa: E402

Row = namedtuple("Row", "label file ranks flags", defaults=("",))

FILES = (
    "ddp", "zero", "fsdp", "tensor_parallel", "pipeline_parallel", "context_parallel", "moe",
    "amp_accum_ckpt",
)
BENCH_SIZES = "--layers 4 --width 256 --heads 8 --seq 256 --batch 8 --steps 20 --no-check"
LONG = "--impl scratch --seq 4096 --layers 2 --batch 1"

# What is timed. A row is compared with the row of one process that does the same work, see
# baseline(). torch's context parallelism runs on GPUs only: LONG has no side of torch's.
BENCH = (
    Row("one_process", "ddp", 1, "--impl scratch"),
    Row("ddp", "ddp", 2),
    Row("zero_1", "zero", 2, "--stage 1"),
    Row("zero_2", "zero", 2, "--stage 2"),
    Row("zero_3", "zero", 2, "--stage 3"),
    Row("fsdp", "fsdp", 2),
    Row("tensor_parallel", "tensor_parallel", 2),
    Row("tensor_parallel_sp", "tensor_parallel", 2, "--sp"),
    Row("gpipe", "pipeline_parallel", 2, "--micro 8 --schedule gpipe"),
    Row("1f1b", "pipeline_parallel", 2, "--micro 8 --schedule 1f1b"),
    Row("interleaved", "pipeline_parallel", 2, "--micro 8 --schedule interleaved"),
    Row("zb-h1", "pipeline_parallel", 2, "--micro 8 --schedule zb-h1"),
    Row("zb-v", "pipeline_parallel", 2, "--micro 8 --schedule zb-v"),
    Row("dualpipe-v", "pipeline_parallel", 2, "--micro 8 --schedule dualpipe-v"),
    Row("amp_accum_ckpt", "amp_accum_ckpt", 2),
    Row("hybrid_dp", "hybrid_3d", 2, "--dp 2 --tp 1 --pp 1"),
    Row("hybrid_tp_pp", "hybrid_3d", 4, "--dp 1 --tp 2 --pp 2"),
    Row("hybrid_dp_pp", "hybrid_3d", 4, "--dp 2 --tp 1 --pp 2"),
    Row("hybrid_dp_tp", "hybrid_3d", 4, "--dp 2 --tp 2 --pp 1"),
    # baseline() goes by the end of a label: _long, _moe
    Row("one_process_long", "context_parallel", 1, LONG),
    Row("zigzag_long", "context_parallel", 2, f"--attn zigzag {LONG}"),
    Row("one_process_moe", "moe", 1, "--impl scratch"),
    Row("moe_moe", "moe", 2),
)


def check_rows():
    """Every technique once; hybrid_3d on 8 ranks, since fewer would not show all three axes."""
    ranks = min(usual_ranks(), 4)  # the toy has 4 heads and 4 layers
    if ranks == 3:
        ranks = 2
    rows = [Row(file, file, ranks) for file in FILES]
    rows.append(Row("hybrid_3d", "hybrid_3d", 8, "--dp 2 --tp 2 --pp 2"))
    return rows


# ---- running -----------------------------------------------------------------


def start(row, flags, path):
    """-> the exit code of a row's run, whose report goes to `path`."""
    words = [*flags, *row.flags.split(), "--json", str(path)]  # of two flags the later one counts
    print(f"\n==== {row.label}: {row.file}.py on {row.ranks} ranks {row.flags} ====", flush=True)
    launch = [sys.executable, "tools/launch.py", str(row.ranks), f"{row.file}.py", *words]
    return subprocess.run(launch, cwd=ROOT).returncode


def run_all(rows, flags):
    """-> {label: report, or None where the run has ended without one}"""
    reports = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for done, row in enumerate(rows):
            path = Path(folder, row.label + ".json")
            code = start(row, flags, path)
            reports[row.label] = None
            if path.exists():  # also where the check failed
                reports[row.label] = {**json.loads(path.read_text()), "exit_code": code}
            if sys.stdout.isatty():
                each = (time.monotonic() - began) / (done + 1)
                left = each * (len(rows) - done - 1)
                print(f"[{done + 1} of {len(rows)}, about {left:.0f} s left]", flush=True)
    return reports


# ---- the table ---------------------------------------------------------------


def megabytes(n):
    return f"{n / 1e6:.2f}"


def sent(report):
    return sum(c["wire"] for c in report["ranks"][0]["collectives"].values())


def textbook_sent(report):
    rows = [row for row in report["textbook"] if row["what"].startswith("wire")]
    return sum(row["expected"] for row in rows)


def held(report):
    memory = report["ranks"][0]["memory"]
    return memory["parameters"] + memory["gradients"] + memory["optimizer"]


def worst_gap(check):
    if not check:
        return "-"
    worst = max(check[kind] for kind in ("loss", "gradient", "grad_norm", "parameter"))
    return f"{worst:.1e}"


def verdict(report):
    if report["exit_code"] != 0:
        return "FAILED"
    if report["check"]:
        return "passed"
    return "ran"


def head(timed):
    line = (
        f"{'':18}{'ranks':>6}{'worst gap':>11}{'sent MB':>10}{'textbook':>10}{'held MB':>9}"
        f"{'peak MB':>9}{'ms/step':>9}{'tok/s':>9}"
    )
    if timed:
        line += f"{'vs torch':>10}{'efficiency':>12}"
    return line + "  verdict"


def line(label, report, one_process, timed):
    """A row of the table. one_process: ms of the same work in one process, or None."""
    peak = report["ranks"][0]["memory"]["peak"]
    text = (
        f"{label:18}{report['world_size']:6}{worst_gap(report['check']):>11}"
        f"{megabytes(sent(report)):>10}{megabytes(textbook_sent(report)):>10}"
        f"{megabytes(held(report)):>9}{megabytes(peak):>9}"
        f"{report['ms_per_step']:9.1f}{report['tokens_per_second']:9,.0f}"
    )
    if timed:
        text += beside_torch(report) + efficiency(report, one_process)
    return f"{text}  {verdict(report)}"


def beside_torch(report):
    if "speedup" not in report:
        return f"{'-':>10}"
    return f"{report['speedup']:9.2f}x"


def efficiency(report, one_process):
    ranks = report["world_size"]
    if one_process is None or ranks > 2:  # these may share cores, where less is to be gained
        return f"{'-':>12}"
    return f"{one_process / report['ms_per_step'] / ranks:12.0%}"


def baseline(label):
    """The label of the run in one process that does the same work."""
    for kind in ("_long", "_moe"):
        if label.endswith(kind):
            return "one_process" + kind
    return "one_process"


def table(title, reports, timed):
    """Print it -> did all pass?"""
    print(f"\n==== {title} ====")
    print(head(timed))
    good = True
    for label, report in reports.items():
        if report is None:
            good = False
            print(f"{label:18}" + colored("FAILED", RED))
            continue
        one = reports.get(baseline(label))
        ms = None
        if one is not None:
            ms = one["ms_per_step"]
        print(line(label, report, ms, timed))
        if report["exit_code"] != 0:
            good = False
    return good


# ---- what the machine allows ---------------------------------------------------


def half_of_batch(sizes):
    """-> half of what is said behind the last --batch"""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--batch", type=int)
    known, _ = parser.parse_known_args(sizes)
    return max(1, known.batch // 2)


def apart(sizes):
    """ms a step of two processes that have nothing to tell each other, with half a batch each.

    None where they have failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "apart.json")
        flags = [*sizes, "--impl", "scratch", "--batch", str(half_of_batch(sizes))]
        command = [sys.executable, "ddp.py", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        quiet = dict(cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        other = subprocess.Popen(command, **quiet, stderr=subprocess.DEVNULL)  # the same again
        subprocess.run([*command, "--json", str(path)], **quiet)
        other.wait()
        if not path.exists():
            return None  # it has said why
        return json.loads(path.read_text())["ms_per_step"]


def limits(sizes):
    """Print what two processes take, and how fast gloo is -> has that been possible?"""
    ms = apart(sizes)
    if ms is None:
        return False
    half = half_of_batch(sizes)
    print(f"\ntwo processes apart, with a batch of {half} each, take {ms:.1f} ms a step")
    sys.stdout.flush()
    command = [sys.executable, "tools/launch.py", "2", "tools/bandwidth.py"]
    return subprocess.run(command, cwd=ROOT).returncode == 0


# ---- the two commands ----------------------------------------------------------


def check():
    reports = run_all(check_rows(), [])
    title = "every technique, compared with the plain GPT (MB = 1e6 bytes, rank 0)"
    good = table(title, reports, timed=False)
    if good:
        print("\nAll equal one process. Next: read ddp.py; ./run.sh ddp 4 --dtype fp64 --pad 0.3")
    return int(not good)


def bench(flags):
    os.environ["OMP_NUM_THREADS"] = "1"
    sizes = BENCH_SIZES.split() + flags
    reports = run_all(BENCH, ["--impl", "both", *sizes])
    good = table("ours against torch's own: medians of alternating blocks", reports, timed=True)
    good = limits(sizes) and good
    return int(not good)


def main(words):
    if words == ["check"]:
        return check()
    if words[:1] == ["bench"]:
        return bench(words[1:])
    print("everything.py: error: usage: everything.py check | bench [flags]", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
