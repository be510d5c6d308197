"""Plays, times and draws lists of actions: what each rank of a pipeline does, in order.

    plans     for each rank a list of actions: tuples (kind, microbatch, stage) with these names
    played    the same with times: for each rank [(action, start, end), ..]

The kinds are F forward, B backward, and W the gradients of the weights where a B leaves them for
later. A rank may hold several stages. A B whose W is in the plan is "split": it makes the gradient
of its input alone.
"""
import contextlib
import itertools
import json
import statistics
import time
from collections import defaultdict, deque
from pathlib import Path

import torch
import torch.distributed as dist

from harness.flags import program, refusing, require

# ---- what a plan says ----------------------------------------------------------


def chunks(plan):
    """How many stages a rank holds."""
    return len({action.stage for action in plan})


def splits(plan):
    """-> {(micro-batch, stage)} of the Bs that are split"""
    return {(action.microbatch, action.stage) for action in plan if action.kind == "W"}


def inputs(action, last):
    """The actions that must be done before this one can be; last: the model's last stage."""
    kind, microbatch, stage = action
    if kind == "F":
        return [("F", microbatch, stage - 1)] if stage > 0 else []
    if kind == "B":
        behind = [("B", microbatch, stage + 1)] if stage < last else []
        return [("F", microbatch, stage), *behind]
    return [("B", microbatch, stage)]


def in_flight(plan, waiting=1.0):
    """The most micro-batches whose activations a rank keeps at a time.

    It keeps them from F until B is done. Where B is split it keeps a part of them, `waiting`, until
    W is done. In each of the rank's v stages a micro-batch counts 1/v.
    """
    split = splits(plan)
    kept = 0
    most = 0
    for kind, microbatch, stage in plan:
        if kind == "F":
            kept += 1
        elif kind == "W":
            kept -= waiting
        elif kind == "B":
            kept -= 1 - waiting if (microbatch, stage) in split else 1
        most = max(most, kept)
    return most / chunks(plan)


# ---- playing -------------------------------------------------------------------


def costs(plans, F, B, W):
    """-> cost(rank, action), for simulate.

    F, B, W: the times of all of a rank's stages for a micro-batch; each stage takes an equal part.
    B is the gradient of the input alone: a B that is not split takes B + W.
    """
    times = {"F": F, "B": B, "W": W, "whole B": B + W}
    split = [splits(plan) for plan in plans]
    parts = [chunks(plan) for plan in plans]

    def cost(rank, action):
        kind, *of = action
        if kind == "B" and tuple(of) not in split[rank]:
            kind = "whole B"
        return times[kind] / parts[rank]
    return cost


def simulate(plans, cost, comm=0.0):
    """Play all ranks' plans -> for each rank [(action, start, end), ..].

    cost(rank, action) and comm, the time of a transfer, are in one unit. A transfer occupies no
    rank and waits for no other: what is made arrives `comm` later.
    """
    last = max(action.stage for plan in plans for action in plan)
    made = {}  # {action: (its rank, when it is done)}
    played = [[] for _ in plans]
    left = [deque(plan) for plan in plans]
    while any(left):
        before = len(made)
        for rank, coming in enumerate(left):
            while coming and all(need in made for need in inputs(coming[0], last)):
                action = coming.popleft()
                now = played[rank][-1][2] if played[rank] else 0.0
                for maker, end in [made[need] for need in inputs(action, last)]:
                    now = max(now, end if maker == rank else end + comm)
                end = now + cost(rank, action)
                played[rank].append((action, now, end))
                made[action] = rank, end
        assert len(made) > before, "the plans wait for each other"
    return played


# ---- figures -------------------------------------------------------------------


def longest(played):
    """The longest of the ranks' spans, each from its first action's start to its last one's end."""
    return max(done[-1][2] - done[0][1] for done in played)


def bubble_rate(played):
    """The idle part of the longest span: (cost - M (F + B + W)) / cost of Qi 2023, section 5.3."""
    busy = sum(end - start for done in played for _, start, end in done) / len(played)
    return 1 - busy / longest(played)


def grid(played, width=105):
    """Ranks as rows, time to the right, idle as dots -> str.

    Every second stage of a rank is in small letters. Where a cell has no room for its number it has
    only its letter.
    """
    cells = []  # [(rank, text, start, end)]
    for rank, done in enumerate(played):
        stages = sorted({action.stage for action, _, _ in done})
        for (kind, microbatch, stage), start, end in done:
            text = f"{kind}{microbatch}"
            if end > start:
                cells.append((rank, text.lower() if stages.index(stage) % 2 else text, start, end))
    _, texts, starts, ends = zip(*cells)
    first = min(starts)
    length = max(ends) - first
    shortest = min(end - start for start, end in zip(starts, ends))
    # characters per unit of time: the shortest cell has room, unless the grid were too wide
    scale = min((1 + max(map(len, texts))) / shortest, width / length)
    rows = [""] * len(played)
    for rank, text, start, end in cells:
        row = rows[rank].ljust(round(scale * (start - first)), ".")
        room = round(scale * (end - first)) - len(row)
        rows[rank] = row + (text if len(text) <= room else text[0]).ljust(room)[:room]
    length = round(scale * length)
    return "\n".join(f"  rank {rank:<3d} {row.ljust(length, '.')}" for rank, row in enumerate(rows))


# ---- what the flags say ----------------------------------------------------------


def numbers(flag, text, count, kind=float):
    """A flag's text, such as 1,1,1,0 -> as many numbers as it must have."""
    try:
        found = [kind(word) for word in text.split(",")]
    except ValueError:
        found = []
    require(len(found) == count, f"{flag} {text}: {count} numbers are needed")
    return found


def read_times(text):
    """--times -> F, B, W, COMM."""
    times = numbers("--times", text, 4)
    require(all(0 <= time <= 1e9 for time in times) and sum(times[:3]) >= 1e-9,
            f"--times {text}: F,B,W,COMM are from 0 to 1e9, F + B + W 1e-9 or more")
    return times


def read_layers(args, stages, split_layers):
    """-> how many layers each stage has: --layers-per-stage, or as split_layers has it."""
    text = args.layers_per_stage
    if not text:
        with refusing():
            return split_layers(args.layers, stages)
    layers = numbers("--layers-per-stage", text, stages, int)
    # the first has the embeddings, the last the head
    good = sum(layers) == args.layers and min(layers) >= 0 and 0 not in layers[1:-1]
    require(good, f"--layers-per-stage {text}: they are {sum(layers)}, --layers {args.layers}; the "
            "first and the last alone may have none")
    return layers


def read_plans(args, ranks, times, make_plans, late_ws):
    """-> all ranks' plans of --schedule. auto: the quickest that search finds."""
    if args.schedule == "auto":
        return search(late_ws, ranks, args.micro, args.limit or ranks, times)
    with refusing():
        return make_plans(args.schedule, ranks, args.micro, args.chunks)


def search(late_ws, ranks, M, limit, times, waiting=1.0):
    """-> plans for M micro-batches, the quickest of a family; not by Qi 2023's search, section 3.1.

    late_ws(M, warmup, rank, ranks, lag) -> a rank's plan: it begins with `warmup` more Fs than 1,
    and its Ws come `lag` Bs late. limit: what a rank may keep, in micro-batches, counted as in
    in_flight(plan, waiting): with fused attention what W waits for is nearly all. times: see
    planned().
    """
    found = []
    # by how much warmup grows towards rank 0, and lag away from it; 1f1b: 1, zb-h1: 1 and 1
    for slope, late in itertools.product((0.5, 1, 1.5, 2, 2.5, 3), [n / 2 for n in range(9)]):
        for most in range(limit - 1, -1, -1):
            warmups = [int(min(slope * (ranks - 1 - r), most)) for r in range(ranks)]
            plans = [late_ws(M, warmups[r], r, ranks, int(late * r)) for r in range(ranks)]
            if all(in_flight(plan, waiting) <= limit + 1e-9 for plan in plans):
                found.append(plans)
                break  # the longest warm-up that fits: a shorter one has more bubble
    return min(found, key=lambda plans: planned(plans, times)[1]["cost"])


# ---- a step as it is planned, and as it was --------------------------------------


def planned(plans, times):
    """-> the plans played, figures. times: F, B, W of a rank, and of a transfer, as in costs()."""
    *of_rank, comm = times
    played = simulate(plans, costs(plans, *of_rank), comm)
    flying = [in_flight(plan) for plan in plans]
    return played, dict(bubble_rate=bubble_rate(played), in_flight=flying, cost=longest(played))


def simulation(args, plans, times):
    """--simulate: no ranks, no model -> exit code."""
    played, figures = planned(plans, times)
    flying = " ".join(f"{count:g}" for count in figures["in_flight"])
    print(grid(played))
    print(f"{longest(played):g} from first to last, bubble rate {bubble_rate(played):.4f}, "
          f"micro-batches in flight by rank {flying}")
    if args.json:
        own = {name: value for name, value in vars(args).items() if name != "cfg"}
        report = dict(script=Path(program()).stem, args=own, **figures)
        Path(args.json).write_text(json.dumps(report, indent=1))
    return 0


@contextlib.contextmanager
def watched(run, plans, pipeline, step):
    """Every rank trains a step inside. Of the last but one it shows when each action was planned,
    and when it was. run has the device, mark() and between(); see harness/run.py."""
    if run.dry or step != max(run.first, run.last - 1):
        yield
        return
    do = pipeline.do
    marks = []  # [(before, after)] of each action

    def noting(action, *rest):
        start = run.mark()
        made = do(action, *rest)
        marks.append((start, run.mark()))
        return made

    pipeline.do = noting
    if run.device.type == "cuda":
        torch.cuda.synchronize()  # the host may wait here: no action is being timed
    dist.barrier()
    # this moment by two clocks: the host's, by which ranks are compared (those of several nodes
    # have to agree), and the run's, which times actions
    host = time.time()
    origin = run.mark()
    yield
    pipeline.do = do
    if not marks:  # it was another implementation's step
        return
    spans = [[host + 1e-3 * run.between(origin, mark) for mark in pair] for pair in marks]
    run.store.set(f"actions {run.rank}", json.dumps(spans))
    played = []
    for rank, plan in enumerate(plans):
        spans = json.loads(run.store.get(f"actions {rank}"))
        played.append([(action, *span) for action, span in zip(plan, spans, strict=True)])
    text, figures = compare(plans, played)
    run.say(text)
    run.extra.update(figures)  # its bubble_rate takes the place of the simulation's


def without_waiting(plans, played):
    """A measured step -> as it would be if no rank waited but for its inputs: all actions of one
    rank, kind and stage take their median time."""
    durations = defaultdict(list)
    for rank, done in enumerate(played):
        for (kind, _, stage), start, end in done:
            durations[rank, kind, stage].append(end - start)

    def cost(rank, action):
        return statistics.median(durations[rank, action.kind, action.stage])
    return simulate(plans, cost)


def compare(plans, played):
    """A measured step -> its simulation and, below that, the step itself, as text; figures."""
    if longest(played) == 0:
        return "measured: the clock saw no time pass", {}
    simulated = without_waiting(plans, played)
    begin = min(done[0][1] for done in played)
    lines = []
    for word, times in (("planned", simulated), ("measured", played)):
        lines.append(f"{word}: {1e3 * longest(times):.1f} ms, bubble {bubble_rate(times):.3f}")
        lines.append(grid(times))
    figures = {
        # in ms: (kind, micro-batch, stage, start, end) by rank
        "timeline": [[(*action, 1e3 * (start - begin), 1e3 * (end - begin))
                      for action, start, end in done] for done in played],
        "bubble_rate": bubble_rate(played),
        "measured_ms": 1e3 * longest(played),
        "planned_ms": 1e3 * longest(simulated),
    }
    return "\n".join(lines), figures
