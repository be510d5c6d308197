"""Is a parallel training right? It is compared with the same training in one process.

    def plain():                                   # one process, the whole batch
        model, optimizer = ..
        for step in range(3):
            ..
            yield loss, gradients, parameters      # {name: whole tensor}; loss: a number, or None

    def parallel():                                # the training in question, on every rank
        for step in range(3):
            ..
            yield loss, hybrid.full_gradients(), hybrid.full_state_dict()

    sys.exit(0 if prove(plain, parallel) else 1)

Seed both alike, and do both in fp64: there right code differs by rounding, 1e-12 or less, and
wrong code by about 1. In fp32 a wrong factor or a missing piece shows, in bf16 what is large.
Needs torch alone.
"""
import itertools
import json
import math
import time
from datetime import timedelta

import torch
import torch.distributed as dist

# {precision: {kind: the largest gap that may be rounding}}; a run's own check has the same
TOLERANCES = {
    "fp64": {"loss": 1e-10, "gradient": 1e-10, "parameter": 1e-10},
    "fp32": {"loss": 1e-4, "gradient": 2e-3, "parameter": 2e-2},
    "half precision": {"loss": 2e-2, "gradient": 0.25, "parameter": 0.25},
}
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

    Every rank calls it, in the default process group or without one. Rank 0 runs plain, after
    parallel, and prints. tolerance: of max|parallel - plain| / max|plain|; None takes that of the
    gradients' narrowest dtype (under autocast say one, such as 0.05). What they raise is passed on.
    """
    ranks = Ranks()
    random = torch.get_rng_state()
    dtype = torch.get_default_dtype()
    try:
        ours, trouble = all_steps(parallel(), ranks)
    except TimeoutError:  # the others are not there to agree on it
        print(f"prove: rank {ranks.rank} makes no more steps, others go on\nprove: NOT EQUAL",
              flush=True)
        return False
    torch.set_rng_state(random)  # both begin with the same
    torch.set_default_dtype(dtype)
    theirs = []
    if ranks.rank == 0:
        theirs = [snapshot(*step) for step in itertools.islice(plain(), len(ours) + 1)]
    count = ranks.exchange(len(theirs))[0]
    if not trouble and count != len(ours):
        trouble = [f"parallel makes {len(ours)} steps, plain {count} or more"]
    precision = precision_of(ours + theirs, ranks)
    limits = TOLERANCES[precision]
    limits = limits if tolerance is None else dict.fromkeys(limits, tolerance)
    worst = {}  # {kind: (gap, name)}
    noise = None if precision == "fp64" else {}  # see add_noise
    moved = False  # has plain had any gradient that is not zero?
    for number, (mine, wanted) in enumerate(itertools.zip_longest(ours, theirs[:len(ours)])):
        if not trouble:
            wanted = ranks.from_first(wanted)
            moved = moved or any(t.any() for t in wanted["gradient"].values())
            trouble = judge(number, mine, wanted, limits, ranks, worst, noise)
    if not trouble and not (moved and "parameter" in worst):
        trouble = ["nothing is proved: no parameters, or no gradients but zeros"]
    if ranks.rank == 0:
        tell(trouble, worst, precision, len(ours))
    return not trouble


def all_steps(training, ranks):
    """Runs a generator to its end on every rank -> snapshots of its steps, what is wrong.

    Raises TimeoutError on a rank that has ended, if others seem to wait for it in a collective.
    """
    steps = []
    patience = 20.0  # seconds
    while True:
        start = time.monotonic()
        step = next(training, None)
        patience = max(patience, 10 * (time.monotonic() - start))
        there = ranks.exchange(step is not None, 86400.0 if step else patience)
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
    if loss is not None:
        loss = torch.as_tensor(loss, dtype=torch.float64).reshape(())
    found = {"loss": {"loss": loss}, "gradient": gradients, "parameter": parameters}
    for kind, tensors in found.items():
        found[kind] = {}
        for name, t in tensors.items():
            if hasattr(t, "full_tensor"):
                t = t.full_tensor()
            if t is not None:
                found[kind][name] = t.detach().to("cpu", copy=True)
    return found


def judge(number, ours, plain, limits, ranks, worst, noise):
    """Two snapshots of a step, plain's from rank 0 -> what is wrong, in lines. Updates worst, and
    noise, if it is not None."""
    trouble = []
    for kind, limit in limits.items():
        left_out = noise if kind == "parameter" else None
        if left_out is not None:
            add_noise(noise, plain["gradient"], limits["gradient"] / 4)
        found = {}
        if kind != "loss" or (ours[kind] and plain[kind]):  # a loss need not be told
            found = differences(ours[kind], plain[kind], limit, ranks.size, left_out)
        lines = merge(ranks.exchange(found), limit, kind, worst)
        if lines:
            heading = f"step {number}, {kind}: {len(lines)} of {len(found)} differ"
            trouble += [heading, *lines[:SHOWN], "  " + HINTS[kind]]
        if trouble and kind == "gradient":
            break  # then so do parameters
    if trouble and number > 0:
        trouble.append(f"  equal until step {number - 1}: something does not follow the step "
                       "(zero_grad, the rate, the data, a stale copy)")
    return trouble


def merge(of_ranks, limit, kind, worst):
    """What differences() has found on each rank -> a line for each tensor that differs."""
    lines = []
    for name in dict.fromkeys(itertools.chain(*of_ranks)):
        gaps, words, sizes = zip(*(found.get(name, (0.0, "", 0.0)) for found in of_ranks))
        rank = gaps.index(max(gaps))
        worst[kind] = max(worst.get(kind, (0.0, name)), (gaps[rank], name))
        wrong = [str(rank) for rank, gap in enumerate(gaps) if gap > limit]
        line = f"  {name} {words[rank]}"
        if len(wrong) < len(gaps):
            line = f"  {name} on rank {', '.join(wrong)} alone {words[rank]}"
        elif max(sizes) - min(sizes) > 1e-6 * max(sizes):
            line += "; ranks disagree with each other"
        if wrong:
            lines.append(line)
    return lines


def tell(trouble, worst, precision, steps):
    for line in trouble:
        print(f"prove: {line}")
    gaps = [f"{kind} {gap:.1e} ({name})" for kind, (gap, name) in worst.items()]
    if precision != "fp64":
        precision += ", where smaller mistakes cannot be told from rounding (fp64 can)"
    print(f"prove: {steps} steps in {precision}; worst gaps: {', '.join(gaps) or 'none'}")
    print("prove: NOT EQUAL" if trouble else "prove: EQUAL", flush=True)


# ---- two sets of tensors -------------------------------------------------------


def differences(ours, plain, limit, ranks, noise=None):
    """Two {name: tensor} -> {name: (gap, in words what a gap above limit looks like, a size)}.

    The gap is max|ours - plain| / max|plain|. NaN is infinitely far, and so is what one side lacks.
    No denominator is below FLOOR times the largest max|plain|. noise: {name: mask of elements that
    are not judged}.
    """
    sizes = {name: largest(t) for name, t in plain.items()}
    floor = FLOOR * max(sizes.values(), default=0.0)
    found = {}
    for name in dict.fromkeys([*plain, *ours]):
        if name not in ours:
            found[name] = math.inf, "is missing in parallel", 0.0
        elif name not in plain:
            found[name] = math.inf, "is unknown in plain", 0.0
        elif ours[name].shape != plain[name].shape:
            shapes = f"{tuple(ours[name].shape)}, not {tuple(plain[name].shape)}"
            found[name] = math.inf, f"has the shape {shapes}: a piece that nobody gathers?", 0.0
        else:
            scale = max(sizes[name], floor, 1e-300)  # all may be zero
            mine = ours[name].double()
            theirs = plain[name].double()
            if noise and name in noise:
                mine = torch.where(noise[name], theirs, mine)
            gap = largest(mine - theirs) / scale
            if math.isnan(gap):
                gap = math.inf
            words = looks_like(mine, theirs, limit * scale, ranks) if gap > limit else ""
            found[name] = gap, words, mine.abs().sum().item()
    return found


def largest(t):
    """-> max|t|, of a tensor without elements 0."""
    return t.double().abs().max().item() if t.numel() else 0.0


def looks_like(ours, plain, limit, ranks):
    """In words: how do two tensors of fp64 differ? limit: of |ours - plain|, below is rounding."""
    if not ours.isfinite().all():
        return "is not finite"
    if not plain.isfinite().all():
        return "is finite, but plain's is not"
    for dim, lines in zip(range(plain.dim()), ("rows", "columns")):
        size = plain.shape[dim]
        wrong = ((ours - plain).abs() > limit).transpose(0, dim).reshape(size, -1).any(1).nonzero()
        first = int(wrong[0])
        count = int(wrong[-1]) + 1 - first
        if ours.any() and len(wrong) == count < size:
            is_piece = count * ranks == size and first % count == 0
            whose = f" (rank {first // count}'s piece)" if is_piece else ""
            part = pattern(ours.narrow(dim, first, count), plain.narrow(dim, first, count), ranks)
            return f"differs in {lines} {first} to {first + count - 1} of {size}{whose}: {part}"
    return "is " + pattern(ours, plain, ranks)


def pattern(ours, plain, ranks):
    if not ours.any():
        return "zero: nothing arrives"
    factor = ((ours * plain).sum() / (plain * plain).sum()).item()
    if not largest(ours - factor * plain) <= 1e-3 * largest(ours):
        return "another tensor, with no simple pattern"
    if math.isclose(factor, 1, rel_tol=1e-3):
        return f"{factor:.7f} times what it should be: does clipping hide a factor? Leave it out"
    words = f"{factor:.3f} times what it should be"
    count = round(max(factor, 1 / factor))
    parts = f"{count} micro-batches, or the ranks of one axis,"
    if count == ranks:
        parts = f"the {count} ranks, or as many micro-batches,"
    if 1 < count <= 1024 and math.isclose(factor, count, rel_tol=1e-3):
        return f"{words}: a sum over {parts} where a mean belongs, or it counts {count} times"
    if 1 < count <= 1024 and math.isclose(factor, 1 / count, rel_tol=1e-3):
        return f"{words}: a mean over {parts} where a sum belongs, or one of {count} summands"
    return f"{words}: another clipping, loss scale, rate or number of targets"


def add_noise(noise, gradients, part):
    """Notes the elements that are mostly rounding, of which Adam makes whole steps all the same:
    those up to this part of their tensor's largest, or all, if that is below FLOOR of all tensors'.
    Rows of zeros, as of words that are not in the batch, are no rounding. noise: {name: mask}
    """
    floor = FLOOR * max(map(largest, gradients.values()), default=0.0)
    for name, t in gradients.items():
        most = largest(t)
        mask = t.abs() <= (most if most <= floor else part * most)
        if most > floor and t.dim() > 1:
            mask &= t.any(-1, keepdim=True)
        noise[name] = mask | noise.get(name, mask)


def precision_of(steps, ranks):
    """Of the narrowest dtype among gradients, on any rank."""
    eps = [torch.finfo(t.dtype).eps for step in steps for t in step["gradient"].values()]
    eps = max(ranks.exchange(max(eps, default=0.0)))
    if eps < 1e-15:
        return "fp64"
    if eps < 1e-6:
        return "fp32"
    return "half precision"


# ---- between ranks -------------------------------------------------------------


class Ranks:
    """The ranks of the default process group, or this process alone. What they say to each other
    goes through the store: a rank that waits for another is not stuck in a collective."""

    def __init__(self):
        self.rank = 0
        self.size = 1
        self.said = 0  # so many things so far
        if dist.is_initialized():
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()
            self.group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
            store = dist.distributed_c10d._get_default_store()
            self.store = dist.PrefixStore(f"prove {self.group.group_name}", store)

    def exchange(self, thing, patience=86400.0):
        """What each rank has, of what JSON can say -> the list of all ranks' things. Raises
        TimeoutError if the others are not there after so many seconds."""
        if self.size == 1:
            return [thing]
        self.said += 1
        self.store.set(f"{self.said} {self.rank}", json.dumps(thing))
        keys = [f"{self.said} {rank}" for rank in range(self.size)]
        try:
            self.store.wait(keys, timedelta(seconds=patience))
        except RuntimeError as error:  # each kind of store has its own
            raise TimeoutError from error
        return [json.loads(self.store.get(key)) for key in keys]

    def from_first(self, snapshot):
        """Rank 0's snapshot -> on every rank, in fp64."""
        if self.size == 1:
            return snapshot
        shapes = {kind: {name: t.shape for name, t in tensors.items()}
                  for kind, tensors in (snapshot or {}).items()}
        received = self.exchange(shapes)[0]
        for kind, tensors in received.items():
            for name, shape in tensors.items():
                tensors[name] = torch.empty(shape, dtype=torch.float64, device="cpu")
                if snapshot is not None:
                    tensors[name].copy_(snapshot[kind][name])
                dist.broadcast(tensors[name], 0, group=self.group)
        return received
