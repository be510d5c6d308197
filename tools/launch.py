"""Start a script on N ranks, as `torchrun --standalone --nproc_per_node=N` does.

    python tools/launch.py RANKS FILE.py [flags]        ./run.sh FILE RANKS [flags]

Its exit code is that of the script: 2 for bad usage, which the script itself has explained in one
line. After Ctrl-C or SIGTERM it is 130, also where all ranks have saved and ended with 0. The cores
are shared out among the ranks' threads, where OMP_NUM_THREADS does not say how.

report() does the same for other tools, and hands them what the script has measured.
"""
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import uuid
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch can do without

import torch  # noqa: E402
from torch.distributed.elastic.multiprocessing import SignalException  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: E402
from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
INTERRUPTED = 128 + signal.SIGINT


# ---- starting ranks --------------------------------------------------------------


def cores():
    return len(os.sched_getaffinity(0))


def usual_ranks():
    """One for each GPU, else two."""
    return torch.cuda.device_count() or 2


def refuse(message):
    print(f"run.sh: error: {message}", file=sys.stderr)
    return 2


def launch(ranks, script, flags):
    """-> the exit code of the first rank that failed, or 0."""
    config = LaunchConfig(  # at port 0, for which it finds a free one
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=uuid.uuid4().hex, max_restarts=0,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", monitor_interval=0.1)
    try:
        elastic_launch(config, sys.executable)("-u", script, *flags)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return explain(script, rank, failure)
    except (KeyboardInterrupt, SignalException):
        return INTERRUPTED
    return 0


def explain(script, rank, failure):
    """One line about the first rank that failed, unless the script has said it -> exit code."""
    code = failure.exitcode
    end = f"ended with exit code {code}"
    if code < 0:
        end = f"was ended by {signal.Signals(-code).name}"
    if code not in (2, INTERRUPTED):
        print(f"run.sh: rank {rank} of {script} {end}", file=sys.stderr)
    return max(1, code)


def main(words):
    if len(words) < 2 or not words[0].isdecimal():
        return refuse("usage: launch.py RANKS FILE.py [flags]")
    ranks = int(words[0])
    # a rank takes a third of a GB: with more than these a machine only starts to swap
    most = max(64, 4 * cores())
    if not 1 <= ranks <= most:
        return refuse(f"{ranks} ranks: on this machine 1 to {most}; one of any number, without "
                      f"the others, is python {words[1]} --dry-run N")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL + 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore:Failed to initialize NumPy")
    return launch(ranks, words[1], words[2:])


# ---- for other tools -------------------------------------------------------------


class Failed(Exception):
    """A run has left no report; what went wrong, in a line, and its exit code."""

    def __init__(self, words, code):
        super().__init__(words)
        self.code = code


def report(ranks, script, flags, shown=False):
    """Runs a script -> its --json report, and "exit_code", since a failed check leaves one too.

    flags: a list of words. shown: what it says goes where our own words go.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        command = [sys.executable, __file__, str(ranks), script, *map(str, flags)]
        command += ["--json", str(path)]
        stream = None if shown else subprocess.PIPE
        # not run(), which at Ctrl-C kills the launcher before that has ended its ranks
        job = subprocess.Popen(command, cwd=ROOT, text=True, stdout=stream, stderr=stream)
        out, errors = job.communicate()
        if path.exists():
            return {**json.loads(path.read_text()), "exit_code": job.returncode}
    lines = (errors or out or "nothing said").strip().splitlines()
    raise Failed(f"exit code {job.returncode}: {lines[-1]}", job.returncode)


def worst_gap(report):
    """Of loss, gradients, norm and parameters; None without a check."""
    check = report["check"]
    if not check:
        return None
    return max(check[kind] for kind in ("loss", "gradient", "grad_norm", "parameter"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
