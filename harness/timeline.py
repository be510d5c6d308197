"""Pipeline schedules as data, and a simulator that plays them. Plain Python: pipeline_parallel.py runs the same lists.

A schedule is a pure function (stage, stages, microbatches[, virtual]) -> [Action, ..], what one rank does, in order:

    F forward   B backward   W weight gradient, where a schedule splits it from B   U update within the step

Nothing is said of communication: what an action takes from another stage follows from what it is. In the order in which
tensors move in a simulation no transfer needs a later one: ranks that all start theirs in that order cannot deadlock.

Narayanan et al. 2021, arXiv:2104.04473, section 2.2; Qi et al. 2023, "Zero Bubble Pipeline Parallelism",
arXiv:2401.10241, section 2; Harlap et al. 2018, "PipeDream", arXiv:1806.03377, section 3.
"""
import json
import statistics
from collections import defaultdict, namedtuple
from pathlib import Path

# chunk c of rank r is stage c * ranks + r of the model; all schedules but the interleaved have one chunk per rank
Action = namedtuple("Action", "kind microbatch chunk", defaults=(0,))

# ---- schedules ---------------------------------------------------------------


def turns(microbatches, warmup, together=1, virtual=1):
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left.

    With chunks, so many micro-batches `together` (at most) go through one chunk and then through the next.
    """
    rounds = [range(microbatches)[first:first + together] for first in range(0, microbatches, together)]
    order = [(m, c) for some in rounds for c in range(virtual) for m in some]
    warmup, plan = min(warmup, len(order)), []
    for i in range(len(order) + warmup):
        if i < len(order):
            plan.append(Action("F", *order[i]))
        if i >= warmup:
            microbatch, chunk = order[i - warmup]
            plan.append(Action("B", microbatch, virtual - 1 - chunk))
    return plan


def follow(plan, kind, lag):
    """Behind the backward of micro-batch m goes an action for micro-batch m - lag; the last ones go to the end."""
    longer = []
    for a in plan:
        longer.append(a)
        if a.kind == "B" and a.microbatch >= lag:
            longer.append(Action(kind, a.microbatch - lag))
    last = plan[-1].microbatch
    return longer + [Action(kind, m) for m in range(max(0, last + 1 - lag), last + 1)]


def naive(stage, stages, microbatches):
    """One micro-batch at a time: of all stages one is at work."""
    return turns(microbatches, 0)


def gpipe(stage, stages, microbatches):
    return turns(microbatches, microbatches)


def one_f_one_b(stage, stages, microbatches):
    """As early a backward as can be: its forward comes back after the stages behind this one."""
    return turns(microbatches, stages - 1 - stage)


def interleaved(stage, stages, microbatches, virtual):
    """Narayanan 2021, figure 4: v chunks per rank, so that filling and draining take 1/v of the time."""
    return turns(microbatches, (virtual - 1) * stages + 2 * (stages - 1 - stage), stages, virtual)


def zb_h1(stage, stages, microbatches):
    """1F1B with W `stage` micro-batches late: B goes on sooner, W fills the end (Qi 2023, figure 3)."""
    return follow(one_f_one_b(stage, stages, microbatches), "W", stage)


def pipedream(stage, stages, microbatches):
    """1F1B with an update after each backward but the last, whose update is the step's (Harlap 2018, section 3)."""
    return follow(one_f_one_b(stage, stages, microbatches), "U", 0)[:-1]


SCHEDULES = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb-h1": zb_h1,
             "pipedream": pipedream}


def make_plans(name, stages, microbatches, virtual=1):
    more = (virtual,) if name == "interleaved" else ()
    return [SCHEDULES[name](stage, stages, microbatches, *more) for stage in range(stages)]


# ---- simulation --------------------------------------------------------------


def source(a, stage, last):
    """The stage whose output an action takes: F the stage before's, B the stage behind's. None: no other stage's."""
    there = {"F": stage - 1, "B": stage + 1}.get(a.kind, -1)
    return there if 0 <= there <= last else None


def is_split(plan):
    return any(a.kind == "W" for a in plan)


def chunks(plan):
    return 1 + max(a.chunk for a in plan)


def costs(plans, F, B, W):
    """Times of a whole stage per micro-batch -> cost(rank, action). Where W is not split off, B takes both at once."""
    table = {"F": F, "B": B if is_split(plans[0]) else B + W, "W": W, "U": 0.0}
    return lambda rank, a: table[a.kind] / chunks(plans[rank])


def simulate(plans, cost, comm=0.0):
    """Play all ranks' plans -> for each rank [(action, start, end), ..].

    cost(rank, action) and comm, the time of a transfer, which occupies nobody, are in one unit. Raises RuntimeError,
    with each rank's first stuck action, if the plans deadlock.
    """
    ranks, last = len(plans), len(plans) * chunks(plans[0]) - 1
    ends, played, moved = {}, [[] for _ in plans], True
    while moved:
        moved = False
        for rank, (plan, done) in enumerate(zip(plans, played)):
            for a in plan[len(done):]:
                stage = a.chunk * ranks + rank
                there, before = source(a, stage, last), {"B": "F", "W": "B", "U": "B"}.get(a.kind)
                wanted = [(before, a.microbatch, stage)] * bool(before)
                wanted += [(a.kind, a.microbatch, there)] * (there is not None)
                if not all(key in ends for key in wanted):
                    break
                ready = [ends[key] + comm * (key[2] % ranks != rank) for key in wanted]
                start = max(ready + [end for _, _, end in done[-1:]], default=0.0)
                ends[a.kind, a.microbatch, stage] = end = start + cost(rank, a)
                done.append((a, start, end))
                moved = True
    stuck = [(rank, plan[len(done)]) for rank, (plan, done) in enumerate(zip(plans, played)) if len(done) < len(plan)]
    if stuck:
        raise RuntimeError("deadlock: " + ", ".join(f"stage {r} waits to do {a.kind}{a.microbatch}" for r, a in stuck))
    return played


def transfers(plans):
    """[((kind, micro-batch, stage that made it), from rank, to rank), ..] in an order that suits all ranks.

    None depends on a later one, so ranks that each start their own in this order cannot deadlock.
    """
    ranks, last, found = len(plans), len(plans) * chunks(plans[0]) - 1, []
    played = simulate(plans, costs(plans, 1, 1, 1))
    ends = {(a.kind, a.microbatch, a.chunk * ranks + rank): end for rank in range(ranks) for a, _, end in played[rank]}
    for rank, plan in enumerate(plans):
        for a in plan:
            there = source(a, a.chunk * ranks + rank, last)
            if there is not None and there % ranks != rank:
                key = a.kind, a.microbatch, there
                found.append((ends[key], key, there % ranks, rank))
    return [move[1:] for move in sorted(found)]


def in_flight(plan):
    """The most micro-batches whose activations a rank keeps at a time, from F to the end of backward, W included.

    In micro-batches of a whole stage: one in one of v chunks counts 1/v.
    """
    kept = most = 0
    final = "W" if is_split(plan) else "B"
    for a in plan:
        kept += (a.kind == "F") - (a.kind == final)
        most = max(most, kept)
    return most / chunks(plan)


def longest(played):
    """The longest of the ranks' spans, each from its first action's start to its last one's end."""
    return max(done[-1][2] - done[0][1] for done in played)


def bubble_rate(played):
    """The idle part of the longest span; a rank's work is M (F + B + W) (Qi 2023, section 5.3)."""
    busy = sum(end - start for done in played for _, start, end in done) / len(played)
    return 1 - busy / longest(played)


def grid(played, width=120):
    """Ranks as rows, time to the right, idle as dots; odd chunks in small letters -> str."""
    cells = [(rank, a, start, end) for rank, done in enumerate(played) for a, start, end in done if end > start]
    first, last = min(start for _, _, start, _ in cells), max(end for *_, end in cells)
    label = 1 + max(len(f"{a.kind}{a.microbatch}") for _, a, _, _ in cells)
    scale = min(label / min(end - start for _, _, start, end in cells), width / (last - first))
    rows = [["."] * round(scale * (last - first)) for _ in played]
    for rank, a, start, end in cells:
        text = f"{a.kind.lower() if a.chunk % 2 else a.kind}{a.microbatch}"
        left, right = round(scale * (start - first)), round(scale * (end - first))
        rows[rank][left:right] = text.ljust(right - left)[:right - left]
    return "\n".join(f"  stage {rank:<3d} {''.join(row)}" for rank, row in enumerate(rows))


# ---- reports -----------------------------------------------------------------


def planned(name, stages, microbatches, virtual=1, times="1,1,1,0"):
    """times: F,B,W,COMM -> all stages' plans, the simulation of them. Raises ValueError, which says what is wrong."""
    if name == "interleaved" and microbatches % stages:
        raise ValueError(f"--micro {microbatches}: interleaved needs a multiple of the {stages} stages")
    try:
        *work, comm = (float(t) for t in times.split(","))
    except ValueError:
        raise ValueError(f"--times {times}: F,B,W,COMM are four numbers") from None
    if len(work) != 3 or not all(0 <= t < float("inf") for t in (*work, comm)) or not sum(work):
        raise ValueError(f"--times {times}: four are needed, none below 0, F + B + W above")
    plans = make_plans(name, stages, microbatches, virtual)
    try:
        return plans, simulate(plans, costs(plans, *work), comm)
    except RuntimeError as error:
        raise ValueError(f"--schedule {name}: {error}") from None


def summary(plans, played):
    return dict(bubble_rate=bubble_rate(played), in_flight=[in_flight(plan) for plan in plans])


def simulation(script, args, plans, played):
    """What --simulate says, and writes to args.json -> exit code."""
    result = dict(summary(plans, played), cost=longest(played))
    print(grid(played))
    print(f"{args.schedule}: {result['cost']:g} from first to last, bubble rate {result['bubble_rate']:.4f},",
          "micro-batches in flight by stage", *(f"{n:g}" for n in result["in_flight"]))
    if args.json:
        own = {name: value for name, value in vars(args).items() if name != "cfg"}
        Path(args.json).write_text(json.dumps(dict(script=script, args=own, **result), indent=1))
    return 0


def compare(plans, reports):
    """A step as it was, each rank's list of (action, start, end) in seconds as JSON, below the simulation of it, in
    which all actions of one rank, kind and chunk take their median time -> both as text, figures."""
    measured = [[(Action(*a), *span) for a, *span in json.loads(report)] for report in reports]
    times = defaultdict(list)
    for rank, done in enumerate(measured):
        for a, start, end in done:
            times[rank, a.kind, a.chunk].append(end - start)
    simulated = simulate(plans, lambda rank, a: statistics.median(times[rank, a.kind, a.chunk]))
    text = [f"{word}: {1e3 * longest(played):.1f} ms, bubble {bubble_rate(played):.3f}\n{grid(played)}"
            for word, played in (("planned", simulated), ("measured", measured))]
    return "\n".join(text), dict(bubble_rate=bubble_rate(measured), planned_bubble_rate=bubble_rate(simulated),
                                 measured_ms=1e3 * longest(measured), planned_ms=1e3 * longest(simulated))
