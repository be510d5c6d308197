"""Ranks on this machine that fork from a server: hundredths of a second each instead of seconds.

The server has imported torch already, see multiprocessing.set_forkserver_preload.
"""
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist


def start(target, world, *args, limit=120):
    """Run target(rank, world, port, *args) on `world` ranks -> their exit codes.

    When one has failed the others have a few seconds more, then they are killed. If all hang, with
    none that has failed, it is an AssertionError.
    """
    # the store that torchrun's agent would have
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    ranks = []
    for rank in range(world):
        ranks.append(context.Process(target=target, args=(rank, world, store.port, *args)))
    for process in ranks:
        process.start()
    failed = wait_for(ranks, limit)
    hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        process.kill()
        process.join()
    assert failed or not hung, f"ranks {hung} hang"
    return [process.exitcode for process in ranks]


def wait_for(processes, limit, patience=5):
    """Waits until all have ended, for `limit` seconds, or for `patience` once one has failed.

    -> has one failed?
    """
    end = time.time() + limit
    failed = False
    while any(process.is_alive() for process in processes) and time.time() < end:
        alive = [process.sentinel for process in processes if process.is_alive()]
        multiprocessing.connection.wait(alive, 1)
        if not failed and any(process.exitcode for process in processes):
            failed = True
            end = min(end, time.time() + patience)
    return failed


def environment(rank, world, port):
    """As torchrun would make it. port: of the store; 0 for a rank that has none."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE=str(port > 0),
    )
    torch.set_num_threads(1)


def be_rank(rank, world, port, name, flags, plant, said):
    """Be a rank of name.py: what it says goes to a file."""
    environment(rank, world, port)
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream)
    sys.argv = [f"{name}.py", *flags]
    module = importlib.import_module(name)
    if plant:
        plant(module)
    sys.exit(module.main())


def report(world, name, flags, plant=None):
    """name.py's main() on `world` ranks -> its --json report, the lines that it has said.

    The report is None if any rank has failed. plant(module) is called before main, on every rank:
    it puts in a bug.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        said = Path(folder, "said")
        said.touch()
        codes = start(be_rank, world, name, ["--json", str(path), *flags], plant, str(said))
        lines = said.read_text().splitlines()
        if any(codes):
            return None, [*lines, f"exit codes {codes}"]
        return json.loads(path.read_text()), lines
