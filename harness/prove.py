"""Is a parallel training right? It is compared with the same training in one process.

    def plain():                                   # one process, the whole batch
        model, optimizer = ..
        for step in range(3):
            ..
            yield loss, gradients, parameters      # {name: whole tensor}; loss: a number, or None

    def parallel():                                # the training in question, on every rank
        for step in range(3):
            ..
            yield loss, zero.full_gradients(), zero.full_state_dict()

    sys.exit(0 if prove(plain, parallel) else 1)

Seed both alike, and do both in fp64: there right code differs by rounding, 1e-12 or less, and wrong
code by about 1. In fp32 a wrong factor or a missing piece shows, in bf16 what is large. Torch alone.
"""
import json
import math
from datetime import timedelta

import torch
import torch.distributed as dist

# (precision, the largest eps that has it, the largest gap of each kind that may be rounding)
PRECISIONS = (
    ("fp64", 1e-15, {"loss": 1e-10, "gradient": 1e-10, "parameter": 1e-10}),
    ("fp32", 1e-6, {"loss": 1e-4, "gradient": 2e-3, "parameter": 2e-2}),
    ("half precision", math.inf, {"loss": 2e-2, "gradient": 0.25, "parameter": 0.25}),
)
# No denominator is below this part of the largest tensor's. Key biases need it: their gradient is
# zero in exact arithmetic.
FLOOR = 1e-4
STEPS = 100  # are compared at most
SHOWN = 6  # tensors that differ
HINTS = {  # beyond single tensors
    "loss": "the loss is wrong, or only what is reported of it",
    "gradient": "look at what becomes of gradients in and after backward",
    "parameter": "gradients are equal: look at the optimizer (what it was made of, what it sees), "
                 "the clipping, the rate",
}


def prove(plain, parallel, tolerance=None):
    """plain, parallel: generator functions, see above -> are they equal? The same on all ranks.

    Every rank of the default process group calls it; without one this is a world of one. Rank 0
    runs plain, after parallel, and prints. tolerance: of max|parallel - plain| / max|plain|; None
    takes that of the narrowest dtype. What plain or parallel raises is passed on.
    """
    group = None
    if dist.is_initialized():
        group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    random = torch.get_rng_state()
    dtype = torch.get_default_dtype()
    steps, trouble = all_steps(parallel(), group)
    torch.set_rng_state(random)  # both begin with the same
    torch.set_default_dtype(dtype)
    is_first = group is None or dist.get_rank() == 0
    reference = iter(())
    if is_first and not trouble:
        reference = plain()
    proof = Proof(trouble, tolerance, group)
    for number, ours in enumerate(steps):
        if not proof.trouble:
            proof.judge(number, ours, next(reference, None))
    proof.conclude(len(steps), next(reference, None) is not None)
    if is_first:
        proof.tell(len(steps))
    return not proof.trouble


def all_steps(training, group):
    """Runs a generator to its end on every rank -> snapshots of its steps, what is wrong."""
    steps = []
    while True:
        step = next(training, None)
        there = exchange(step is not None, group)
        if not any(there):
            return steps, []
        if not all(there):
            return steps, [f"rank {there.index(False)} ends after {len(steps)} steps, "
                           f"rank {there.index(True)} goes on"]
        if len(steps) == STEPS:
            return steps, [f"more than {STEPS} steps: let both generators end before"]
        steps.append(snapshot(*step))


def snapshot(loss, gradients, parameters):
    """-> {kind: {name: tensor}}, in memory of their own on the CPU. DTensors become whole."""
    if loss is None:
        losses = {}
    else:
        losses = {"loss": torch.as_tensor(loss)}
    found = {}
    for kind, tensors in (("loss", losses), ("gradient", gradients), ("parameter", parameters)):
        found[kind] = {}
        for name, t in tensors.items():
            if hasattr(t, "full_tensor"):
                t = t.full_tensor()
            if t is not None:
                found[kind][name] = t.detach().to("cpu", copy=True)
    return found


class Proof:
    """What has been compared so far, and what is wrong: the same on all ranks."""

    def __init__(self, trouble, tolerance, group):
        self.trouble = trouble  # lines
        self.tolerance = tolerance  # None: that of the precision
        self.group = group
        self.ranks = 1 if group is None else dist.get_world_size()
        self.eps = 0.0  # of the narrowest dtype
        self.worst = {}  # {kind: (gap, name)}
        self.moved = False  # was any gradient of plain not zero?

    def judge(self, number, ours, plain):
        """ours: this rank's snapshot of a step. plain: the step, on rank 0; None: there is none."""
        if plain is not None:
            plain = snapshot(*plain)
        self.eps = max(self.eps, *exchange(max(eps_of(ours), eps_of(plain)), self.group))
        plain = from_first(plain, self.group)
        if plain is None:
            self.trouble = [f"plain ends after {number} steps, parallel goes on"]
            return
        self.moved = self.moved or any(t.any() for t in plain["gradient"].values())
        for kind in plain:
            if kind == "loss" and not (ours[kind] and plain[kind]):
                continue  # one of them says nothing
            noise = set()
            if kind == "parameter" and self.eps > 1e-15:
                noise = without_direction(plain["gradient"])
            found = differences(ours[kind], plain[kind], self.limit(kind), self.ranks, noise)
            lines = self.merge(kind, exchange(found, self.group))
            if lines:  # what comes of it differs as well: one kind is enough
                self.trouble = [f"step {number}, {kind}: {len(lines)} of {len(found)} differ",
                                *lines[:SHOWN], "  " + HINTS[kind]]
                if number > 0:
                    self.trouble.append(f"  equal until step {number - 1}: something does not "
                                        "follow the step (zero_grad, rate, data, a stale copy)")
                return

    def limit(self, kind):
        if self.tolerance is not None:
            return self.tolerance
        return precision(self.eps)[2][kind]

    def merge(self, kind, of_ranks):
        """of_ranks: what differences() says on each of them -> a line for each that differs."""
        lines = []
        for name in dict.fromkeys(name for found in of_ranks for name in found):
            gaps = [found.get(name, (0.0, ""))[0] for found in of_ranks]
            worst = max(range(len(gaps)), key=gaps.__getitem__)
            if gaps[worst] >= self.worst.get(kind, (0.0, ""))[0]:
                self.worst[kind] = gaps[worst], name
            wrong = [str(rank) for rank, gap in enumerate(gaps) if gap > self.limit(kind)]
            if wrong:
                where = ""
                if len(wrong) < len(gaps):
                    where = f"on rank {', '.join(wrong)} alone "
                lines.append(f"  {name} {where}{of_ranks[worst][name][1]}")
        return lines

    def conclude(self, steps, plain_goes_on):
        goes_on = exchange(plain_goes_on, self.group)[0]
        if self.trouble:
            return
        if goes_on:
            self.trouble = [f"parallel ends after {steps} steps, plain goes on"]
        elif "parameter" not in self.worst or not self.moved:
            self.trouble = ["nothing is proved: no parameters, or no gradients but zeros"]

    def tell(self, steps):
        for line in self.trouble:
            print(f"prove: {line}")
        gaps = [f"{kind} {gap:.1e} ({name})" for kind, (gap, name) in self.worst.items()]
        words = precision(self.eps)[0]
        if words != "fp64":
            words += ", where smaller mistakes cannot be told from rounding (fp64 can)"
        print(f"prove: {steps} steps on {self.ranks} ranks in {words}; worst gaps:",
              ", ".join(gaps) or "none")
        print("prove: NOT EQUAL" if self.trouble else "prove: EQUAL", flush=True)


# ---- two sets of tensors -------------------------------------------------------


def differences(ours, plain, limit, ranks, noise=()):
    """Two {name: tensor} -> {name: (gap, in words what a gap above limit looks like)}.

    The gap is max|ours - plain| / max|plain|. NaN is infinitely far, and so is what one side lacks.
    No denominator is below FLOOR times the largest max|plain|. noise: names that are not judged.
    """
    sizes = {name: largest(t) for name, t in plain.items()}
    floor = FLOOR * max(sizes.values(), default=0.0)
    found = {}
    for name in dict.fromkeys([*plain, *ours]):
        if name not in ours:
            found[name] = math.inf, "is missing in parallel"
        elif name not in plain:
            found[name] = math.inf, "is unknown in plain"
        elif ours[name].shape != plain[name].shape:
            shapes = f"{tuple(ours[name].shape)}, not {tuple(plain[name].shape)}"
            found[name] = math.inf, f"has the shape {shapes}: a piece that nobody has gathered?"
        elif name not in noise:
            scale = max(sizes[name], floor)
            mine = ours[name].double()
            theirs = plain[name].double()
            gap = gap_of(mine, theirs, scale)
            words = ""
            if gap > limit:
                words = looks_like(mine, theirs, limit * scale, ranks)
            found[name] = gap, words
    return found


def gap_of(ours, plain, scale):
    difference = largest(ours - plain)
    if difference == 0:
        return 0.0
    if math.isfinite(difference) and scale > 0:
        return difference / scale
    return math.inf


def largest(t):
    """-> max|t|, of a tensor without elements 0."""
    if t.numel() == 0:
        return 0.0
    return t.double().abs().max().item()


def looks_like(ours, plain, limit, ranks):
    """In words: how do two tensors of fp64 differ? limit: of |ours - plain|, below is rounding."""
    if not ours.isfinite().all():
        return "is not finite"
    for dim, lines in zip(range(plain.dim()), ("rows", "columns")):
        size = plain.shape[dim]
        wrong = ((ours - plain).abs() > limit).transpose(0, dim).reshape(size, -1).any(1).nonzero()
        first = int(wrong[0])
        count = int(wrong[-1]) + 1 - first
        if ours.any() and len(wrong) == count < size:
            whose = ""
            if size % ranks == 0 and count == size // ranks and first % count == 0:
                whose = f" (rank {first // count}'s piece)"
            part = pattern(ours.narrow(dim, first, count), plain.narrow(dim, first, count), ranks)
            return f"differs in {lines} {first} to {first + count - 1} of {size}{whose}: {part}"
    return "is " + pattern(ours, plain, ranks)


def pattern(ours, plain, ranks):
    if not ours.any():
        return "zero: nothing arrives"
    factor = ((ours * plain).sum() / (plain * plain).sum()).item()
    if not largest(ours - factor * plain) <= 1e-3 * largest(ours):
        return "another tensor, with no simple pattern"
    words = f"{factor:.3f} times what it should be"
    for count in range(2, 1025):
        parts = f"{count} micro-batches, or the ranks of one axis,"
        if count == ranks:
            parts = f"the {count} ranks, or as many micro-batches,"
        if math.isclose(factor, count, rel_tol=1e-3):
            return f"{words}: a sum over {parts} where a mean belongs, or it counts {count} times"
        if math.isclose(factor, 1 / count, rel_tol=1e-3):
            return f"{words}: a mean over {parts} where a sum belongs, or one of {count} summands"
    return f"{words}: another clipping, loss scale, rate or number of targets"


def without_direction(gradients):
    """-> names of gradients that are zero but for rounding, of which Adam makes whole steps."""
    floor = FLOOR * max(map(largest, gradients.values()), default=0.0)
    return {name for name, t in gradients.items() if largest(t) <= floor}


def eps_of(snapshot):
    """Of the narrowest dtype among its gradients and parameters."""
    if snapshot is None:
        return 0.0
    tensors = [*snapshot["gradient"].values(), *snapshot["parameter"].values()]
    return max((torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point()), default=0.0)


def precision(eps):
    return next(row for row in PRECISIONS if eps <= row[1])


# ---- between ranks -------------------------------------------------------------


def exchange(thing, group):
    """What each rank has, of what JSON can say -> the list of all ranks' things."""
    if group is None:
        return [thing]
    mine = json.dumps(thing).encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=group)
    padded = torch.tensor(list(mine.ljust(max(map(int, sizes)))), dtype=torch.uint8)
    rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(rows, padded, group=group)
    return [json.loads(bytes(row.tolist())) for row in rows]


def from_first(snapshot, group):
    """Rank 0's snapshot, or None -> on every rank, in fp64 on those that had none."""
    shapes = None
    if snapshot is not None:
        shapes = {kind: {name: t.shape for name, t in of_kind.items()}
                  for kind, of_kind in snapshot.items()}
    shapes = exchange(shapes, group)[0]
    if group is None or shapes is None:
        return snapshot
    received = {}
    for kind, of_kind in shapes.items():
        received[kind] = {}
        for name, shape in of_kind.items():
            t = torch.empty(shape, dtype=torch.float64)
            if dist.get_rank() == 0:
                t.copy_(snapshot[kind][name])
            dist.broadcast(t, 0, group=group)
            received[kind][name] = t
    return received
