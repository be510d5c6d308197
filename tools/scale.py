"""How a technique scales on this machine: the same step on 1, 2, 4, .. ranks.

    python tools/scale.py FILE [flags]        ./run.sh scale ddp --width 256

Ranks double up to the number of GPUs, or of cores. The global batch is the same for all of these
counts (strong scaling): what --batch says, or else 8, or the largest count if that is more.
--batch-per-rank B makes it grow with the ranks (weak scaling).

    speed-up      tokens per second over those of one rank
    efficiency    speed-up over ranks
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402

from tools.launch import cores  # noqa: E402


def rank_counts():
    """1, 2, 4, .. as far as there are GPUs or cores."""
    most = torch.cuda.device_count() or cores()
    counts = [1]
    while 2 * counts[-1] <= most:
        counts.append(2 * counts[-1])
    return counts


def measure(file, ranks, flags):
    """-> the report of a run, or None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        command = [sys.executable, "tools/launch.py", str(ranks), f"{file}.py", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "--json", str(path)], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
        )
        if done.returncode:
            return None
        return json.loads(path.read_text())


def arguments(words):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("file", help="a technique, e.g. ddp")
    parser.add_argument("--batch-per-rank", type=int, default=0, metavar="B")
    args, flags = parser.parse_known_args(words)
    args.file = args.file.removesuffix(".py")
    if not (ROOT / f"{args.file}.py").exists():
        parser.error(f"no file {args.file}.py")
    return args, flags


def main(words):
    args, flags = arguments(words)
    print(f"{'ranks':>6}{'ms/step':>10}{'tok/s':>12}{'speed-up':>10}{'efficiency':>12}")
    first = None  # tokens per second of one rank
    counts = rank_counts()
    # The default: one sequence or more for each rank of the largest count. A --batch among the
    # user's flags comes behind it, and of two flags the later one counts.
    flags = ["--batch", str(max(8, counts[-1])), *flags]
    for ranks in counts:
        batch = []
        if args.batch_per_rank:
            batch = ["--batch", str(args.batch_per_rank * ranks)]
        report = measure(args.file, ranks, [*flags, *batch, "--no-check"])
        if report is None:
            print(f"{ranks:6}   FAILED")
            return 1
        speed = report["tokens_per_second"]
        first = first or speed
        gain = speed / first
        line = f"{ranks:6}{report['ms_per_step']:10.1f}{speed:12,.0f}{gain:10.2f}"
        print(f"{line}{gain / ranks:12.0%}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
