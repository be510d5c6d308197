"""Bad usage: one line on stderr, the same exit code on every rank, and no rank left behind."""
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

ANY, POSITIVE = (0, sys.maxsize), (1, sys.maxsize)


def require(condition, message, code=2):
    """Or one line on stderr from rank 0, and this exit code on every rank."""
    if condition:
        return
    if os.environ.get("RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    if os.environ.get("TORCHELASTIC_RUN_ID"):  # torchrun ends all ranks when one exits: leave together
        store, end = next(dist.rendezvous("env://"))[0], time.time() + 5
        store.add("leaving", 1)
        while store.add("leaving", 0) < int(os.environ["WORLD_SIZE"]) and time.time() < end:
            time.sleep(0.01)
        os._exit(code)
    sys.exit(code)
