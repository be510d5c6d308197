"""Start a technique on N ranks with torchrun, and say in one line what torchrun adds in a page.

    ./run.sh FILE [N] [flags]           python tools/launch.py FILE [N] [flags]

N is the number of GPUs, or 2. The exit code is that of the first rank that failed: 2 for bad usage,
which the file has explained in a line of its own. After Ctrl-C or SIGTERM it is 130. The cores are
shared out among the ranks' threads, where OMP_NUM_THREADS does not say how.
"""
import logging
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402
from torch.distributed import run as torchrun  # noqa: E402
from torch.distributed.elastic.multiprocessing import SignalException  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: E402

from harness.flags import require  # noqa: E402
from tools.ranks import TECHNIQUES  # noqa: E402

INTERRUPTED = 128 + signal.SIGINT
CORES = len(os.sched_getaffinity(0))
MOST = max(64, 4 * CORES)  # a rank takes a third of a GB: with more a machine only starts to swap


def technique(word):
    """ddp or ddp.py -> ddp"""
    file = word.removesuffix(".py")
    require(file in TECHNIQUES,
            f"no technique {file}; one of: {' '.join(TECHNIQUES)} (./run.sh help has all words)")
    return file


def main(words):
    file = technique("".join(words[:1]))
    flags = words[1:]
    ranks = torch.cuda.device_count() or 2
    if flags and flags[0].isdecimal():
        ranks = int(flags.pop(0))
    require(1 <= ranks <= MOST, f"{ranks} ranks: on this machine 1 to {MOST}; one of any number, "
            f"without the others, is python {file}.py --dry-run N")
    if {"-h", "--help"} & set(flags):
        ranks = 1  # one help is enough
    logging.disable()  # of its own lines: explain() has one
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, CORES // ranks)))
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
