"""What keeps a long run from failing silently: for any PyTorch program, it needs only torch.

    prepare          collectives give up after a while, also those of groups that are made later
    among_the_living a store without what is left of ranks that torchrun has restarted
    last_collective  what this rank called last: of a hang, the first call that differs between ranks is the cause
    fault            what is wrong at the end of a step: numbers that are inf or nan, copies that differ
    Request          SIGTERM, heard at the end of a step
"""
import faulthandler
import json
import math
import signal
import sys
import time
import uuid

import torch
import torch.distributed as dist


def prepare(timeout):
    """Before init_process_group. timeout: a timedelta."""
    faulthandler.enable(sys.__stderr__)  # gloo aborts where sizes differ between ranks: this names the line
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):  # new_group takes these, not the first group's
        setattr(dist.distributed_c10d, name, timeout)


def among_the_living(store, rank, world_size):
    """-> the store, under a name that only these ranks know, rank, world_size.

    torchrun's store outlives the ranks that it restarts, and still has what the dead have set: without this, gloo finds
    their addresses and fails to connect. Rank 0 makes up the name, and tells it to those who are here by their own.
    """
    me = name = uuid.uuid4().hex
    if rank:
        store.set(f"here {rank}", me)
        name = store.get(f"name for {me}").decode()  # waits
        store.set(f"{name} {rank}", "heard")
    missing, end = set(range(1, world_size)) if rank == 0 else (), time.monotonic() + store.timeout.total_seconds()
    while missing and time.monotonic() < end:
        for other in [r for r in missing if store.check([f"here {r}"])]:  # it may have been set by one of the dead
            store.set(f"name for {store.get(f'here {other}').decode()}", name)
        missing = {r for r in missing if not store.check([f"{name} {r}"])}
        time.sleep(0.001)
    return dist.PrefixStore(name, store), rank, world_size


def last_collective():
    """-> "all_reduce of (1000,) float, number 7 of group 0 (default_pg)", from torch's flight recorder, or "none".

    Over gloo, sends and receives are not recorded.
    """
    recorders = (getattr(torch._C._distributed_c10d, f"_dump_{kind}_trace_json", None) for kind in ("nccl", "fr"))
    calls = [e for dump in recorders if dump for e in json.loads(dump(True, False)).get("entries", [])]
    if not calls:
        return "none"
    last = max(calls, key=lambda e: e["time_created_ns"])
    sizes = ", ".join(f"({', '.join(map(str, size))}) {kind.lower()}"
                      for size, kind in zip(last["input_sizes"], last["input_dtypes"]))
    name, description = last["process_group"]
    return (f"{last['profiling_name'].split(':')[-1]}{' of ' * bool(sizes)}{sizes}, "
            f"number {last['collective_seq_id']} of group {name} ({description})")


def testify(rank, step):
    """After an exception: one line on stderr. (NCCL's timeout is none: its watchdog names the call, and aborts.)"""
    print(f"rank {rank}, step {step}: the last collective here was {last_collective()}", file=sys.stderr, flush=True)


WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(t):
    """64 bits, different for tensors that differ in one number: the sum of (2 i + 1) bits_i modulo 2^64."""
    bits = t.detach().contiguous().flatten().view(WORDS[t.dtype.itemsize]).long()
    return (bits * torch.arange(1, 2 * len(bits), 2, device=t.device)).sum()


def different(tensors, group=None):
    """{name: tensor}, the same names on all ranks of a group -> the first that ranks hold different values of, and one
    of these ranks (of the group; the other is its first), or None."""
    mine = torch.stack([digest(t) for t in tensors.values()])
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, mine, group=group)  # each its own -> replicated
    unlike = torch.stack([theirs != everyones[0] for theirs in everyones]).cpu()  # (ranks, names)
    for i, name in enumerate(tensors):
        if unlike[:, i].any():
            return name, unlike[:, i].int().argmax().item()
    return None


def not_finite(tensors):
    """{name: tensor} -> the names of those with inf or nan in them."""
    return [name for name, t in tensors.items() if not t.isfinite().all()]


def fault(loss, norm, watched, gradients, state):
    """At the end of a step -> what is wrong, in words, the same on all ranks, or "".

    loss, norm: of the whole batch. gradients(), state(): of all parameters, by name, gathered where they are sharded.
    Of what ranks hold alike each returns its own; if `watched`, these are compared.
    """
    if not (math.isfinite(loss) and math.isfinite(norm)):
        names = not_finite(gradients()) or not_finite(state()) or ["no parameter"]
        return f"loss {loss:g}, gradient norm {norm:g}; not finite: {names[0]} and {len(names) - 1} more"
    if watched:
        tensors = state()
        unlike, tied = different(tensors), [tensors[name] for name in ("tok.weight", "head.weight") if name in tensors]
        if unlike:
            return "{} of rank {} is not what it is on rank 0".format(*unlike)
        if len(tied) == 2 and digest(tied[0]) != digest(tied[1]):
            return "head.weight is not tok.weight, to which it is tied"
    return ""


class Request:
    """Has this process been asked to end (SIGTERM, as schedulers send before they preempt)?"""

    def __init__(self):
        self.made = False
        signal.signal(signal.SIGTERM, self.hear)

    def hear(self, *_):
        self.made = True
