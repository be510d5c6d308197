"""The two instruments, for any PyTorch program. They need only torch.

Ledger watches one training step, real or on fake tensors, and counts its bytes:

    with Ledger(model, optimizer) as ledger:
        train_step()
    ledger.collectives    {"all_reduce": {calls, payload, wire}, ..}: what this rank communicated in the step
    ledger.groups         {name of a process group: wire bytes}
    ledger.memory         {parameters, gradients, optimizer}: what it holds after the step
                          {activations}: the most that autograd kept for backward at one time, parameters left out
                          {peak}: the most that was alive at one time

It is a TorchDispatchMode: below autograd and above the kernels, so it sees every tensor that an op makes and every
collective of COLLECTIVES, those of DistributedDataParallel's C++ reducer, fully_shard and DTensor included; not reduce,
gather and scatter.

Trace holds what training did, and compare() says how far two of them are apart.
"""
import re
import time
import weakref
from collections import Counter, defaultdict
from fractions import Fraction

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# ---- bytes -------------------------------------------------------------------

# name of an op -> collective, and which argument is the whole logical buffer (None: the result): c10d's, functional's
COLLECTIVES = {
    "all_?reduce": ("all_reduce", 0, 0), "all_?gather": ("all_gather", 0, None), "broadcast": ("broadcast", 0, 0),
    "reduce_scatter": ("reduce_scatter", 1, 0), "all_?to_?all": ("all_to_all", 1, 0),
    "send": ("send", 0, 0), "recv": ("recv", 0, 0),
}


def group_of(args):
    """The process group among a collective's arguments, where it is bare, boxed or a name."""
    for a in args:
        if isinstance(a, torch.ScriptObject) and str(a._type()).endswith("ProcessGroup"):
            a = dist.ProcessGroup.unbox(a)
        if isinstance(a, dist.ProcessGroup):
            return a
    return dist.distributed_c10d._resolve_process_group([a for a in args if isinstance(a, str)][-1])


def storage_of(tensor):
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()  # of a DTensor: this rank's part


def nbytes(tensors):
    """Bytes of the storages behind the tensors, each storage once."""
    return sum({s._cdata: s.nbytes() for s in map(storage_of, tensors)}.values())


def held(model, optimizer):
    """What a rank keeps between steps -> {parameters, gradients, optimizer: [tensors]}. A model.held() knows better."""
    if hasattr(model, "held"):
        return model.held()
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return {"parameters": [*model.parameters(), *model.buffers()],
            "gradients": [p.grad for p in model.parameters() if p.grad is not None], "optimizer": states}


class Box(list):
    """A list that can be referred to weakly."""


class Ledger(TorchDispatchMode):
    """All figures are bytes of this rank. payload is the whole logical buffer: of all_reduce the tensor, of all_gather
    the output, of reduce_scatter and all_to_all the input. wire is what the rank sends of it with ring algorithms."""

    def __init__(self, model, optimizer):
        super().__init__()
        self.collectives = defaultdict(lambda: Counter(calls=0, payload=0, wire=0))
        self.memory, self.sizes, self.saved, self.groups = {}, {}, Counter(), Counter()
        self.live = self.peak = self.saved_bytes = self.activations = 0
        self.held, self.last = lambda: held(model, optimizer), None
        self.gloo = dist.is_initialized() and dist.get_backend() == "gloo"
        self.parameters = {storage_of(p)._cdata for p in self.held()["parameters"]}
        for t in sum(self.held().values(), []):
            self.follow(storage_of(t))
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.save, lambda box: box[0])

    def __enter__(self):
        def resize_(storage, size):  # this is how sharded parameters come and go; no op tells of it
            torch._C.StorageBase.resize_(storage, size)
            self.follow(storage)
        torch.UntypedStorage.resize_ = resize_
        self.hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *exc):
        super().__exit__(*exc)
        self.last = None
        self.hooks.__exit__(*exc)
        del torch.UntypedStorage.resize_  # StorageBase's shows again
        self.memory = {kind: nbytes(tensors) for kind, tensors in self.held().items()}
        self.memory.update(activations=self.activations, peak=self.peak)
        for c in self.collectives.values():
            c["wire"] = float(c["wire"])  # was a Fraction: exact sums

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # let it unfold into local tensors and collectives first
        out = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace:
            self.last = args  # gloo lets go of them a moment after wait(): hold them, in dry runs too, until the next
        for name, (kind, *place) in COLLECTIVES.items() if "c10d" in func.namespace else ():
            if re.match("_?" + name, func._opname):
                place = place[func.namespace != "c10d"]
                self.count(kind, args, sum(t.nbytes for t in tree_leaves(out if place is None else args[place])))
        if func is torch.ops.aten.split.Tensor and storage_of(args[0])._cdata not in self.sizes:
            return out  # of what no op has made: the hidden copy in which gloo scatters a reduced tensor
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.follow(storage_of(t))
        return out

    def count(self, kind, args, payload):
        group, splits = group_of(args), [a for a in args if isinstance(a, list) and a and isinstance(a[0], int)]
        n = group.size()
        sent = Fraction({"all_reduce": 2 * (n - 1), "send": n, "recv": 0}.get(kind, n - 1), n)
        if kind == "all_to_all" and splits:  # output and input splits; what a rank keeps is not sent
            sent = 1 - Fraction(splits[-1][group.rank()], sum(splits[-1]) or 1)
        self.collectives[kind].update(calls=1, payload=payload, wire=sent * payload)
        self.groups[group.group_name] += sent * payload

    def follow(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.sizes:
            weakref.finalize(storage, lambda: setattr(self, "live", self.live - self.sizes.pop(key))).atexit = False
        self.live += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        if self.live > self.peak and self.last and self.gloo:
            time.sleep(2e-4)  # before a new peak: gloo's thread may be about to let go of what it has sent
        self.peak = max(self.peak, self.live)

    def save(self, tensor):
        """Called for each tensor that autograd keeps; the box lives exactly as long as it is kept."""
        box, storage = Box([tensor]), storage_of(tensor)
        if storage._cdata not in self.parameters:
            self.keep(storage._cdata, storage.nbytes(), 1)
            weakref.finalize(box, self.keep, storage._cdata, storage.nbytes(), -1).atexit = False
        return box

    def keep(self, key, size, change):
        before, self.saved[key] = self.saved[key], self.saved[key] + change
        self.saved_bytes += size * (bool(self.saved[key]) - bool(before))
        self.activations = max(self.activations, self.saved_bytes)
