"""Keeps a long run from failing silently. It serves any PyTorch program, and needs only torch.

    patience          a line about what one waits for, if it takes long, and an end
    prepare           collectives give up after a while, also those of groups that are made later
    gather_ranks      waits until all ranks are here
    fault             what is inf or nan at the end of a step
"""
import contextlib
import faulthandler
import math
import os
import sys
import threading
import time

import torch.distributed as dist

# ---- ranks that wait for each other -------------------------------------------


def prepare(timeout):
    """Call it before init_process_group. timeout: a timedelta, for the groups made by new_group."""
    # gloo aborts the process where sizes differ between ranks: this names the line
    faulthandler.enable(2)  # sys.stderr may be pytest's, which is no file
    # new_group has these defaults, whatever the first group was given
    dist.distributed_c10d.default_pg_timeout = timeout
    dist.distributed_c10d.default_pg_nccl_timeout = timeout


@contextlib.contextmanager
def patience(words, limit=threading.TIMEOUT_MAX, seconds=5):
    """Says words() on stderr if what is inside takes so long; ends the process after `limit`."""
    over = threading.Event()

    def watch():
        if over.wait(min(seconds, limit)):
            return
        if seconds < limit:
            print(words(), file=sys.stderr, flush=True)
            if over.wait(limit - seconds):
                return
        print(f"{words()}: given up after {limit} s", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def gather_ranks(store, launch, missing):
    """Waits until all ranks see the store -> a part of it that ranks of an earlier attempt, which
    torchrun has restarted, have not written to. missing: a set, of those that are not here yet.
    """
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    store.set(f"here {launch.rank}", "")
    missing.update(range(launch.world_size))
    while missing:
        for rank in sorted(missing):
            if store.check([f"here {rank}"]):
                missing.remove(rank)
        time.sleep(0.001)
    return store


# ---- values --------------------------------------------------------------------


def fault(loss, norm, gradients, state):
    """At the end of a step -> what is inf or nan, in words, the same on all ranks, or "".

    loss, norm: of the whole batch. gradients(), state() -> {name: tensor} of all parameters, whole.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return ""
    found = "all gradients and parameters are finite"
    for tensors in (state(), gradients()):  # these come first where both are not
        names = [name for name, t in tensors.items() if not t.isfinite().all()]
        if names:
            found = f"not finite: {names[0]} and {len(names) - 1} more"
    return f"loss {loss:g}, gradient norm {norm:g}; {found}"
