"""Ranks find each other: a line about whom one waits for, if it takes long, and an end."""
import contextlib
import faulthandler
import os
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from common import choose_backend, join_world, rendezvous
from harness.flags import program

TIMEOUT = {"gloo": 30, "nccl": 600}  # seconds until a collective is given up
START = 300  # seconds until a rank gives up to find the others


def meet(args, launch, device):
    """Makes the process group of all ranks -> the store that they see. Fills in args.timeout."""
    limit = args.timeout or START
    missing = {0} - {launch.rank}  # rank 0 has the store, and without it nobody is seen

    def waiting():
        whom = ", ".join(f"rank {rank}" for rank in sorted(missing)[:8]) or "the others"
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        who = f"{program()}: rank {launch.rank} of {launch.world_size}"
        return f"{who} waits for {whom} at {where}"

    try:
        with patience(waiting, limit):
            # a little longer than our own patience, whose words are clearer
            store = rendezvous(timedelta(seconds=limit + 10))
            # what ranks of an earlier attempt, which torchrun has restarted, have not written to
            store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
            store.set(f"here {launch.rank}", "")
            missing.update(range(launch.world_size))
            while missing:
                missing -= {rank for rank in missing if store.check([f"here {rank}"])}
                time.sleep(0.001)
            backend = choose_backend(device, store, launch)
        args.timeout = args.timeout or TIMEOUT[backend]
        timeout = timedelta(seconds=args.timeout)
        # gloo aborts the process where sizes differ between ranks: this names the line
        faulthandler.enable(2)  # sys.stderr may be pytest's, which is no file
        # new_group has these defaults, whatever the first group was given
        dist.distributed_c10d.default_pg_timeout = timeout
        dist.distributed_c10d.default_pg_nccl_timeout = timeout
        join_world(store, launch, backend, timeout)
    except (RuntimeError, OSError, ValueError) as error:
        print(f"{waiting()}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        sys.exit(1)
    return store


@contextlib.contextmanager
def patience(words, limit, seconds=5):
    """Says words() on stderr if what is inside takes so long; ends the process after `limit`."""
    over = threading.Event()

    def watch():
        if over.wait(min(seconds, limit)):
            return
        print(words(), file=sys.stderr, flush=True)
        if not over.wait(max(0, limit - seconds)):
            print(f"{words()}: given up after {limit} s", file=sys.stderr, flush=True)
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
