"""The ledger watches one training step, real or on fake tensors, and counts its bytes.

    with Ledger(model, optimizer) as ledger:
        train_step()
    ledger.collectives    {"all_reduce": {calls, payload, wire}, ..}: what this rank communicated
    ledger.groups         {name of a process group: wire bytes}
    ledger.memory         {parameters, gradients, optimizer}: what it holds after the step
                          {activations}: the most that autograd kept for backward at one time,
                          parameters left out
                          {peak}: the most that was alive at one time

It is a TorchDispatchMode: below autograd and above the kernels, so it sees every tensor that an
operation makes and every collective of COLLECTIVES, those of DistributedDataParallel's C++ reducer,
of fully_shard and of DTensor included. It does not see gather, scatter and an all_to_all of lists.
It needs only torch.
"""
import re
import time
import weakref
from collections import Counter, defaultdict, namedtuple
from fractions import Fraction

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Collective = namedtuple("Collective", "kind c10d functional")
# kind: the name under which it is counted. What is counted is one tensor, or one list of them: the
# payload, see Ledger. Every operation exists in two forms, which have the payload in different
# places. c10d and functional are the number of that argument in each form:
# c10d         what torch.distributed calls: (output, input, ..), or (buffer, ..) that is both
# functional   torch.distributed._functional_collectives: (input, ..), and they return the output
RESULT = None  # no argument: the payload is what the operation returns
COLLECTIVES = {
    re.compile("_?all_?reduce"): Collective("all_reduce", 0, 0),
    re.compile("_?all_?gather"): Collective("all_gather", 0, RESULT),
    re.compile("_?broadcast"): Collective("broadcast", 0, 0),
    re.compile("reduce_$"): Collective("reduce", 0, 0),
    re.compile("_?reduce_scatter"): Collective("reduce_scatter", 1, 0),
    re.compile("_?all_?to_?all_(base|single)"): Collective("all_to_all", 1, 0),
    re.compile("_?send"): Collective("send", 0, 0),
    re.compile("_?recv"): Collective("recv", 0, 0),
}


def group_of(args):
    """The process group among a collective's arguments: bare, boxed, or by its name."""
    for a in args:
        if isinstance(a, torch.ScriptObject) and str(a._type()).endswith("ProcessGroup"):
            return dist.ProcessGroup.unbox(a)
        if isinstance(a, dist.ProcessGroup):
            return a
    # the last string: the name of the reduction comes before
    names = [a for a in args if isinstance(a, str)]
    return dist.distributed_c10d._resolve_process_group(names[-1])


def sent_fraction(kind, group, args):
    """How much of the payload this rank sends with ring algorithms; of broadcast and reduce, where
    one rank sends nothing, the mean over ranks."""
    n = group.size()
    lists = [a for a in args if isinstance(a, list)]
    if kind == "all_to_all" and lists and sum(lists[-1]) > 0:  # the splits of its input come last
        return 1 - Fraction(lists[-1][group.rank()], sum(lists[-1]))  # what a rank keeps stays
    fixed = {"send": Fraction(1), "recv": Fraction(0), "all_reduce": Fraction(2 * (n - 1), n)}
    return fixed.get(kind, Fraction(n - 1, n))


def storage_of(tensor):
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()  # of a DTensor: this rank's


def nbytes(tensors, on=None):
    """Bytes of the storages behind tensors, each counted once. on: a type of device, None: all."""
    sizes = {}
    for tensor in tensors:
        if on is None or tensor.device.type == on:
            storage = storage_of(tensor)
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def held_by(model, optimizer, units=()):
    """What a module and an optimizer keep between steps -> {kind: [tensors]}. units: zero.py's, if
    they have what is trained."""
    states = tree_leaves(list(optimizer.state.values()))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    masters = [unit.masters for unit in units if unit.masters is not unit.shard]
    return {
        "parameters": [*model.parameters(), *model.buffers(), *(unit.shard for unit in units)],
        "gradients": gradients + [unit.grad for unit in units],
        "optimizer": masters + [t for t in states if isinstance(t, torch.Tensor)],
    }


class Saved(list):
    """A list of one tensor that autograd keeps for backward, which can be referred to weakly."""


class Ledger(TorchDispatchMode):
    """All figures are bytes of this rank.

    payload is the whole logical buffer: of all_reduce the tensor, of all_gather the output, of
    reduce_scatter and all_to_all the input. wire is what the rank sends of it with ring algorithms.
    held() -> {parameters, gradients, optimizer: [tensors]}: given where model and optimizer do not
    tell, such as sharded ones.
    """

    def __init__(self, model=None, optimizer=None, held=None, device="cpu"):
        super().__init__()
        self.held = held or (lambda: held_by(model, optimizer))
        self.device = torch.device(device).type
        self.collectives = defaultdict(lambda: Counter(calls=0, payload=0, wire=0))
        self.groups = Counter()
        self.memory = {}  # filled at the end
        self.sizes = {}  # {key of a storage: its bytes}, of all that are alive
        self.places = {}  # {key of a storage: type of device}: a fake one does not tell
        self.live = Counter()  # {type of device: bytes}
        self.peaks = Counter()  # the most of live
        self.saved = Counter()  # {key of a storage: how many boxes keep it}
        self.saved_bytes = 0
        self.activations = 0  # the most of saved_bytes
        self.last = None  # arguments of the last collective
        self.gloo = dist.is_initialized() and dist.get_backend() == "gloo"
        self.resize = None  # UntypedStorage.resize_ as it was before
        self.parameters = {storage_of(p)._cdata for p in self.held()["parameters"]}
        for tensors in self.held().values():
            for t in tensors:
                self.follow(storage_of(t), t.device.type)
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.save, lambda box: box[0])

    def __enter__(self):
        self.resize = torch.UntypedStorage.resize_

        # this is how sharded parameters come and go; no operation tells of it
        def resize_(storage, size):
            self.resize(storage, size)
            self.follow(storage, self.places.get(storage._cdata, self.device))
            return storage

        torch.UntypedStorage.resize_ = resize_
        self.hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.last = None
        self.hooks.__exit__(*exception)
        torch.UntypedStorage.resize_ = self.resize
        for kind, tensors in self.held().items():
            self.memory[kind] = nbytes(tensors, self.device)
        self.memory["activations"] = self.activations
        self.memory["peak"] = self.peaks[self.device]
        for figures in (self.groups, *self.collectives.values()):
            for name, number in figures.items():
                if isinstance(number, Fraction):  # until here sums are exact
                    figures[name] = float(number)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # let it unfold into local tensors and collectives first
        out = operation(*args, **(kwargs or {}))
        if "c10d" in operation.namespace:
            # gloo's thread lets go of the arguments a moment after wait(). Held until the next
            # collective, they are counted for as long in every run.
            self.last = args
            self.count(operation, args, out)
        if operation is torch.ops.aten.split.Tensor:
            if storage_of(args[0])._cdata not in self.sizes:
                # Gloo's reduce-scatter splits a copy of its input that it has made out of sight.
                # The parts would bring in the copy's storage, and a dry run has no such copy.
                return out
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.follow(storage_of(t), t.device.type)
        return out

    def count(self, operation, args, out):
        found = [c for pattern, c in COLLECTIVES.items() if pattern.match(operation._opname)]
        if not found:
            return
        [collective] = found
        index = collective.c10d if operation.namespace == "c10d" else collective.functional
        buffer = out if index is RESULT else args[index]
        payload = sum(t.nbytes for t in tree_leaves(buffer))
        group = group_of(args)
        wire = payload * sent_fraction(collective.kind, group, args)
        self.collectives[collective.kind].update(calls=1, payload=payload, wire=wire)
        self.groups[group.group_name] += wire

    def follow(self, storage, place):
        """Count a storage on this device until it is freed, or take the new size of a known one."""
        key = storage._cdata
        size = storage.nbytes()
        if key not in self.sizes:
            self.places[key] = place
            # torch keeps this Python object as long as the storage lives, even if nothing in
            # Python refers to it: it is finalized when the memory is freed
            end = weakref.finalize(storage, self.forget, key)
            end.atexit = False  # at the end of the process nothing is counted
        self.live[place] += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        new_peak = self.live[place] > self.peaks[place]
        if new_peak and self.last and self.gloo:
            # The new peak may be an accident of timing: gloo's thread may not have let go yet of
            # the arguments of the collective before self.last (see __torch_dispatch__). It gets
            # time to do so. Then forget() lowers live, and the line below records what is left.
            time.sleep(2e-4)
        self.peaks[place] = max(self.peaks[place], self.live[place])

    def forget(self, key):
        self.live[self.places.pop(key)] -= self.sizes.pop(key)

    def save(self, tensor):
        """Called for each tensor that autograd keeps -> a box that lives as long as it is kept."""
        box = Saved([tensor])
        storage = storage_of(tensor)
        key = storage._cdata
        if key not in self.parameters:
            size = storage.nbytes()
            if self.saved[key] == 0:
                self.saved_bytes += size
                self.activations = max(self.activations, self.saved_bytes)
            self.saved[key] += 1
            end = weakref.finalize(box, self.release, key, size)
            end.atexit = False
        return box

    def release(self, key, size):
        self.saved[key] -= 1
        if self.saved[key] == 0:
            self.saved_bytes -= size
