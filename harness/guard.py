"""Keeps a long run from failing silently. It serves any PyTorch program, and needs only torch.

    patience          a line about what one waits for, if it takes long, and an end
    prepare           collectives give up after a while, also those of groups that are made later
    among_the_living  a store that hides what ranks have set before torchrun restarted them
    last_collective   what this rank called last. After a hang compare what ranks say: the first
                      call that some of them have made and others have not is its cause
    fault             what is wrong at the end of a step: numbers that are inf or nan, copies that
                      differ between ranks
    Request           SIGTERM, which is heard at the end of a step
"""
import contextlib
import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
import uuid

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

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


def among_the_living(store, rank, missing):
    """A rendezvous' store -> the same under a prefix that only these ranks know.

    missing: the ranks that this one waits for, a set that empties: rank 0 for the others.

    torchrun's store outlives the ranks that it restarts, and still has what the dead have set:
    without this, gloo finds their addresses and fails to connect. Rank 0 makes up the prefix. It
    cannot leave it under a fixed key, where a rank might read what a dead rank 0 has left. So every
    other rank makes up a name, sets it under "here RANK", and waits for "prefix for NAME".
    """
    if rank == 0:
        prefix = uuid.uuid4().hex
        tell_the_others(store, prefix, missing)
    else:
        myself = uuid.uuid4().hex
        store.set(f"here {rank}", myself)
        prefix = store.get(f"prefix for {myself}").decode()  # waits for rank 0
        store.set(f"{prefix} {rank}", "heard")
        missing.clear()
    return dist.PrefixStore(prefix, store)


def tell_the_others(store, prefix, missing):
    """Rank 0's part: until every other rank has heard the prefix.

    A rank may be late, and what stands under "here RANK" until then is the name of a dead one: so
    it is read again and again, and whoever is named there is told the prefix.
    """
    while missing:
        for rank in sorted(missing):
            if store.check([f"here {rank}"]):
                name = store.get(f"here {rank}").decode()
                store.set(f"prefix for {name}", prefix)
            if store.check([f"{prefix} {rank}"]):
                missing.remove(rank)
        time.sleep(0.001)


def recorded():
    """-> the entries of torch's flight recorders, dicts, of all groups in no order."""
    # True, False: collectives are in it, and not only those that are still under way
    dumps = [c10d._dump_fr_trace_json(True, False)]  # of gloo
    if hasattr(c10d, "_dump_nccl_trace_json"):
        dumps.append(c10d._dump_nccl_trace_json(True, False))  # of NCCL, up to torch 2.13
    try:
        # of NCCL in later ones, which call it nccl2
        dumps.append(c10d._dump_fr_trace_json(True, False, backend="nccl2"))
    except TypeError:
        pass  # an older torch, which does not know the argument
    entries = []
    for dump in dumps:
        entries += json.loads(dump).get("entries") or []
    return entries


def last_collective():
    """-> "all_reduce of (1000) float, number 7 of group 0 (default_pg)", or "none".

    Over gloo, sends and receives are not recorded.
    """
    entries = recorded()
    if not entries:
        return "none"
    last = max(entries, key=lambda entry: entry["time_created_ns"])
    words = last["profiling_name"].split(":")[-1]
    tensors = []
    for size, kind in zip(last["input_sizes"], last["input_dtypes"]):
        numbers = ", ".join(str(n) for n in size)
        tensors.append(f"({numbers}) {kind.lower()}")
    if tensors:
        words += " of " + ", ".join(tensors)
    name, description = last["process_group"]
    number = last["collective_seq_id"]
    if last.get("is_p2p"):  # sends and receives are counted by themselves
        number = last["p2p_seq_id"]
    return f"{words}, number {number} of group {name} ({description})"


def testify(rank, step):
    """Call it after an exception: it says a line on stderr.

    A collective that times out over NCCL raises none: a thread of torch's ends the process.
    """
    last = last_collective()
    print(f"rank {rank}, step {step}: the last collective here was {last}", file=sys.stderr,
          flush=True)


# ---- values --------------------------------------------------------------------

# by bytes per element; one of 16 (complex128) is two words
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def digest(t):
    """64 bits that differ between tensors that differ in exactly one word.

    A word is one number, or half of one complex128. The digest is the sum of (2 i + 1) bits_i
    modulo 2^64 over the words i, in which the differences of two words may cancel.
    """
    bits = t.detach().contiguous().flatten().view(WORDS[t.dtype.itemsize]).long()
    factors = torch.arange(1, 2 * len(bits) + 1, 2, device=t.device)
    return (bits * factors).sum()


def different(tensors, group=None):
    """-> (name, rank) of the first tensor that ranks of a group hold different values of, or None.

    tensors: {name: tensor}, the same names on all ranks. The rank, by its number in the world, is
    the first of the group that does not have what the group's first one has.
    """
    mine = torch.stack([digest(t) for t in tensors.values()])
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, mine, group=group)  # each its own -> replicated
    table = torch.stack(everyones)  # (ranks, names)
    unlike = (table != table[0]).cpu()
    for i, name in enumerate(tensors):
        if unlike[:, i].any():
            position = unlike[:, i].int().argmax().item()
            return name, dist.get_process_group_ranks(group)[position]
    return None


def not_finite(tensors):
    """{name: tensor} -> the names of those with inf or nan in them."""
    return [name for name, t in tensors.items() if not t.isfinite().all()]


def fault(loss, norm, watched, gradients, state, ties=()):
    """At the end of a step -> what is wrong, in words, the same on all ranks, or "".

    loss, norm: of the whole batch. gradients(), state() -> {name: tensor} of all parameters, whole.
    Where every rank has a copy of a parameter, state() gives this rank's own; if watched is true,
    the copies are compared, and so are two names of one parameter, which are the ties.
    """
    if not math.isfinite(loss) or not math.isfinite(norm):
        found = "all gradients and parameters are finite"
        names = not_finite(gradients()) or not_finite(state())
        if names:
            found = f"not finite: {names[0]} and {len(names) - 1} more"
        return f"loss {loss:g}, gradient norm {norm:g}; {found}"
    if watched:
        return drift(state(), ties)
    return ""


def drift(state, ties=()):
    """-> in words, which parameter has gone another way on some rank, or ""."""
    unlike = different(state)
    if unlike:
        name, rank = unlike
        return f"{name} of rank {rank} is not what it is on rank 0"
    for name, other in ties:
        if digest(state[name]) != digest(state[other]):
            return f"{name} is not {other}, to which it is tied"
    return ""


def ties_of(module):
    """-> [(name, the first name of the same parameter)]"""
    first = {}
    found = []
    for name, p in module.named_parameters(remove_duplicate=False):
        if p in first:
            found.append((name, first[p]))
        first.setdefault(p, name)
    return found


# ---- the end -------------------------------------------------------------------


class Request:
    """Has this process been asked to end? SIGTERM is what schedulers send before they preempt."""

    def __init__(self):
        self.made = False
        signal.signal(signal.SIGTERM, self.hear)

    def hear(self, *_):
        self.made = True

    def heard_by_any(self, device):
        """Have ranks, of which all call this, heard it?"""
        heard = torch.tensor(float(self.made), device=device)
        dist.all_reduce(heard)  # partial -> replicated
        return heard.item() > 0
