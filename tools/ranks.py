"""Techniques on ranks of this machine, for tools and tests, and what they have measured.

Ranks come from multiprocessing's server. Where that has imported torch already (see
set_forkserver_preload), one starts in hundredths of a second.
"""
import importlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def techniques(folder):
    """The programs there that have VARIANTS: not common.py, nor what readers put beside it."""
    files = [path for path in folder.glob("*.py") if "\nVARIANTS = " in path.read_text()]
    return sorted(path.stem for path in files)


TECHNIQUES = techniques(ROOT)
GAPS = ("loss", "gradient", "grad_norm", "parameter")  # of a report's check


def start(target, world, *args, limit=120):
    """Run target(rank, world, port, *args) on `world` ranks -> their exit codes.

    After `limit` seconds, or a few once one has failed, the others are killed. If all hang, with
    none that has failed, it is an AssertionError.
    """
    # the store that torchrun's agent would have
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    ranks = []
    for rank in range(world):
        ranks.append(context.Process(target=target, args=(rank, world, store.port, *args)))
        ranks[-1].start()
    end = time.time() + limit
    failed = False
    hung = list(range(world))
    try:
        while hung and time.time() < end:
            multiprocessing.connection.wait([ranks[rank].sentinel for rank in hung], 1)
            if any(process.exitcode for process in ranks):
                failed = True
                end = min(end, time.time() + 5)
            hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    finally:  # also after Ctrl-C
        for process in ranks:
            process.kill()
            process.join()
    assert failed or not hung, f"ranks {hung} hang"
    return [process.exitcode for process in ranks]


def environment(rank, world, port):
    """As torchrun would make it. port: of the store; 0 for a rank that has none."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE=str(port > 0),
    )
    torch.set_num_threads(1)


def be_rank(rank, world, port, file, flags, plant, quiet, errors):
    """Be a rank of file.py: what it says on stderr goes to a file."""
    environment(rank, world, port)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    if quiet:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = [f"{file}.py", *flags]
    module = importlib.import_module(file)
    if plant:
        plant(module)
    sys.exit(module.main())


def report(world, file, flags, plant=None, limit=120, quiet=False):
    """file.py's main() on `world` ranks -> exit codes, its --json report, what it said on stderr.

    The report is None where there is none. plant(module) is called before main, on every rank: it
    puts in a bug. It is pickled: a function of a module, or a partial of one. quiet: nothing goes
    to stdout.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        errors = Path(folder, "stderr")
        errors.touch()
        flags = ["--json", str(path), *flags]
        codes = start(be_rank, world, file, flags, plant, quiet, str(errors), limit=limit)
        found = json.loads(path.read_text()) if path.exists() else None
        return codes, found, errors.read_text()


class Failed(Exception):
    """A run has left no report; what went wrong, in a line, and its exit code."""

    def __init__(self, words, code):
        super().__init__(words)
        self.code = code


def measured(world, file, flags, shown=False):
    """Runs a technique, however long it takes -> its report, and "exit_code", since a failed check
    leaves one too. shown: what it says goes where our own words go, errors at its end.
    """
    words = [str(word) for word in flags]
    codes, found, said = report(world, file, words, limit=math.inf, quiet=not shown)
    code = int(max(*codes, any(codes)))  # a rank that was ended by a signal has a negative one
    if shown:
        print(said, end="", file=sys.stderr)
    if found is None:
        last = (said.strip() or "nothing said").splitlines()[-1]
        raise Failed(f"exit code {code}: {last}", code)
    return {**found, "exit_code": code}


def variants(file):
    """-> the flags with which a technique is worth running, from its part 5; they make a world of
    one, too."""
    return importlib.import_module(file).VARIANTS


def worst_gap(check):
    """Of loss, gradients, norm and parameters."""
    return max(check[kind] for kind in GAPS)
