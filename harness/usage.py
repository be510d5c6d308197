"""Bad usage ends in one line on stderr and exit code 2 on every rank, and leaves no rank behind."""
import os
import sys
import time
from collections import namedtuple
from pathlib import Path

import torch.distributed as dist

ANY = (0, sys.maxsize)  # bounds of a number
POSITIVE = (1, sys.maxsize)
REMEDY = "unset it, or start with torchrun"
PATIENCE = 5  # seconds in which ranks that leave wait for each other

Launch = namedtuple("Launch", "rank world_size local_rank local_world_size")


def program():
    """The name of the script that runs."""
    return Path(sys.argv[0]).name


def require(condition, message, code=2):
    """Go on if the condition holds; else end every rank, after one line on stderr.

    Under torchrun the first rank that sees the fault speaks. Without torchrun, ranks cannot know
    who is the first, and the first one of each machine speaks.
    """
    if condition:
        return
    store = agents_store()
    if store is None:
        alone = os.environ.get("WORLD_SIZE", "1") == "1"  # whatever a stale LOCAL_RANK says
        if alone or os.environ.get("LOCAL_RANK", "0") == "0":
            complain(message)
        sys.exit(code)
    key = f"leaving, attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    leaving = store.add(key, 1)
    if leaving == 1:
        complain(message)
    end = time.monotonic() + PATIENCE
    while leaving < int(os.environ["WORLD_SIZE"]) and time.monotonic() < end:
        time.sleep(0.01)  # torchrun ends all ranks as soon as one has left: leave together
        leaving = store.add(key, 0)
    if sys.stdout is not None:
        sys.stdout.flush()
    os._exit(code)


def complain(message):
    print(f"{program()}: error: {message}", file=sys.stderr, flush=True)


def agents_store():
    """The store of torchrun's agent, which is there before the ranks are. None without torchrun, or
    where it keeps its store to itself."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return next(dist.rendezvous("env://"))[0]


def launched():
    """What the environment says of this process and the others -> Launch.

    A plain `python script.py` is a world of one. Raises ValueError if the variables contradict each
    other: ranks that believed them would wait for ever.
    """
    numbers = {}
    for name, alone in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        text = os.environ.get(name, str(alone))
        if not text.isdecimal():
            raise ValueError(f"{name}={text} in the environment is no number: {REMEDY}")
        numbers[name.lower()] = int(text)
    found = Launch(**numbers)
    if found.rank >= found.world_size:
        raise ValueError(
            f"RANK={found.rank} in the environment, of WORLD_SIZE={found.world_size}: {REMEDY}"
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if found.world_size > 1 and name not in os.environ:
            raise ValueError(
                f"WORLD_SIZE={found.world_size} in the environment, but no {name}: {REMEDY}"
            )
    return found
