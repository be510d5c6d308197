"""Start a script on N ranks, as `torchrun --standalone --nproc_per_node=N` does.

    python tools/launch.py RANKS FILE.py [flags]        ./run.sh FILE RANKS [flags]

Its exit code is that of the script: 2 for bad usage, which the script itself has explained in one
line. After Ctrl-C or SIGTERM it is 130, also where all ranks have saved and ended with 0. The cores
are shared out among the ranks' threads, where OMP_NUM_THREADS does not say how.
"""
import logging
import os
import signal
import sys
import uuid
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch can do without

import torch  # noqa: E402
from torch.distributed.elastic.multiprocessing import SignalException  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: E402
from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: E402

INTERRUPTED = 128 + signal.SIGINT


def cores():
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def usual_ranks():
    """One for each GPU, else two."""
    return torch.cuda.device_count() or 2


def threads_each(ranks):
    return max(1, cores() // ranks)


def launch(ranks, script, flags):
    """-> the exit code of the first rank that failed, or 0."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # it finds a free port
        max_restarts=0,
        monitor_interval=0.1,
    )
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
    if code < 0:
        name = signal.Signals(-code).name
        print(f"run.sh: rank {rank} of {script} was ended by {name}", file=sys.stderr)
        return 1
    if code not in (2, INTERRUPTED):
        print(f"run.sh: rank {rank} of {script} ended with exit code {code}", file=sys.stderr)
    return code


def main(words):
    if len(words) < 2 or not words[0].isdecimal() or int(words[0]) < 1:
        print("launch.py: error: usage: launch.py RANKS FILE.py [flags]", file=sys.stderr)
        return 2
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL + 1)
    ranks = int(words[0])
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_each(ranks)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore:Failed to initialize NumPy")
    return launch(ranks, words[1], words[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
