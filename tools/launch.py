"""Start a technique on N ranks with torchrun, and say in one line what torchrun says in a page.

    ./run.sh FILE [N] [flags]           python tools/launch.py FILE [N] [flags]

N is the number of GPUs, or 2. The exit code is that of the first rank that failed: 2 for bad usage,
which the file has explained in a line of its own. After Ctrl-C or SIGTERM it is 130. The cores are
shared out among the ranks' threads, where OMP_NUM_THREADS does not say how.

report() does the same for other tools, and hands them what the file has measured.
"""
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402
from torch.distributed import run as torchrun  # noqa: E402
from torch.distributed.elastic.multiprocessing import SignalException  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: E402

from harness.usage import require  # noqa: E402

TECHNIQUES = sorted({path.stem for path in ROOT.glob("*.py")} - {"common"})
INTERRUPTED = 128 + signal.SIGINT
GAPS = ("loss", "gradient", "grad_norm", "parameter")  # of a report's check


def cores():
    return len(os.sched_getaffinity(0))


def usual_ranks():
    """One for each GPU, else two."""
    return torch.cuda.device_count() or 2


def main(words):
    file = "".join(words[:1]).removesuffix(".py")
    flags = words[1:]
    require(file in TECHNIQUES, f"no technique {file}; one of: {' '.join(TECHNIQUES)}")
    ranks = usual_ranks()
    if flags and flags[0].isdecimal():
        ranks = int(flags.pop(0))
    # a rank takes a third of a GB: with more than these a machine only starts to swap
    most = max(64, 4 * cores())
    require(1 <= ranks <= most, f"{ranks} ranks: on this machine 1 to {most}; one of any number, "
            f"without the others, is python {file}.py --dry-run N")
    if {"-h", "--help"} & set(flags):
        ranks = 1  # one help is enough
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL + 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    words = ["--standalone", f"--nproc-per-node={ranks}", str(ROOT / f"{file}.py"), *flags]
    try:
        torchrun.run(torchrun.parse_args(words))
    except ChildFailedError as error:
        return explain(file, *error.get_first_failure())
    except (KeyboardInterrupt, SignalException):
        return INTERRUPTED
    return 0


def explain(file, rank, failure):
    """One line about the first rank that failed, unless the file has said it -> exit code."""
    code = failure.exitcode
    end = f"ended with exit code {code}"
    if code < 0:
        end = f"was ended by {signal.Signals(-code).name}"
    if code not in (2, INTERRUPTED):
        print(f"run.sh: rank {rank} of {file}.py {end}", file=sys.stderr)
    return max(1, code)


# ---- for other tools -------------------------------------------------------------


def variants(file):
    """-> the flags with which a technique is worth running, from its part 5; they make a world of
    one, too."""
    return getattr(importlib.import_module(file), "VARIANTS", ("",))


class Failed(Exception):
    """A run has left no report; what went wrong, in a line, and its exit code."""

    def __init__(self, words, code):
        super().__init__(words)
        self.code = code


def report(ranks, file, flags, shown=False):
    """Runs a technique -> its --json report, and "exit_code", since a failed check leaves one too.

    flags: a list of words. shown: what it says goes where our own words go.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        command = [sys.executable, __file__, file, ranks, *flags, "--json", path]
        stream = None if shown else subprocess.PIPE
        # not run(), which at Ctrl-C kills the launcher before that has ended its ranks
        job = subprocess.Popen(map(str, command), cwd=ROOT, text=True, stdout=stream, stderr=stream)
        out, errors = job.communicate()
        if path.exists():
            return {**json.loads(path.read_text()), "exit_code": job.returncode}
    lines = (errors or out or "nothing said").strip().splitlines()
    raise Failed(f"exit code {job.returncode}: {lines[-1]}", job.returncode)


def worst_gap(report):
    """Of loss, gradients, norm and parameters; None without a check."""
    check = report["check"]
    return max(check[kind] for kind in GAPS) if check else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
