"""Bad usage ends in one line on stderr and exit code 2 on every rank, and leaves no rank behind."""
import contextlib
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

PATIENCE = 5  # seconds in which ranks that leave wait for each other


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
    # the store of torchrun's agent is there before the ranks are, unless it keeps it to itself
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        alone = os.environ.get("WORLD_SIZE", "1") == "1"  # whatever a stale LOCAL_RANK says
        if alone or os.environ.get("LOCAL_RANK", "0") == "0":
            complain(message)
        sys.exit(code)
    store = next(dist.rendezvous("env://"))[0]
    key = f"leaving, attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    leaving = store.add(key, 1)
    if leaving == 1:
        complain(message)
    end = time.monotonic() + PATIENCE
    while leaving < int(os.environ["WORLD_SIZE"]) and time.monotonic() < end:
        time.sleep(0.01)  # torchrun ends all ranks as soon as one has left: leave together
        leaving = store.add(key, 0)
    print(end="", flush=True)  # what stdout still holds
    os._exit(code)


@contextlib.contextmanager
def refusing():
    """What a technique asserts in here is bad usage: see require."""
    try:
        yield
    except AssertionError as error:
        require(False, str(error))


def complain(message):
    print(f"{program()}: error: {message}", file=sys.stderr, flush=True)
