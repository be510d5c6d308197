"""Plays, times and draws lists of actions: what each rank of a pipeline does, in order.

    plans     for each rank a list of actions: they have .kind, .microbatch, .stage and .joined
    played    the same with times: for each rank [(action, start, end), ..]

The kinds are F forward, B backward, W the gradients of the weights where a B leaves them for later,
and U an update. A stage is a part of the model, and a rank may hold several. An F takes what the F
of stage - 1 has made, a B what the B of stage + 1 has. A B whose W is in the plan is "split": it
makes the gradient of its input alone. Nothing here knows by which rule a plan was made.
"""
import contextlib
import json
import statistics
import time
from collections import defaultdict, namedtuple
from pathlib import Path

import torch
import torch.distributed as dist

from harness.usage import require

# ---- what a plan says ----------------------------------------------------------


def key(action):
    """-> the name of what an action makes: (kind, micro-batch, stage)."""
    return action.kind, action.microbatch, action.stage


def homes(plans):
    """-> {stage: the rank that holds it}"""
    return {action.stage: rank for rank, plan in enumerate(plans) for action in plan}


def chunks(plan):
    """How many stages a rank holds."""
    return len({action.stage for action in plan})


def inputs(action, last):
    """The actions that must be done before this one can be; last: the model's last stage."""
    kind, microbatch, stage = key(action)
    if kind == "F" and stage == 0:
        return []
    if kind == "F":
        return [("F", microbatch, stage - 1)]
    if kind == "B" and stage == last:
        return [("F", microbatch, stage)]
    if kind == "B":
        return [("F", microbatch, stage), ("B", microbatch, stage + 1)]
    return [("B", microbatch, stage)]  # W and U follow the B of their micro-batch and stage


def of_kind(plan, kind):
    """-> {(micro-batch, stage)} for which the plan has an action of this kind"""
    return {(action.microbatch, action.stage) for action in plan if action.kind == kind}


def in_flight(plan):
    """The most micro-batches whose activations a rank keeps at a time.

    It keeps them from F until B is done, or W where B is split. In each of the rank's v stages a
    micro-batch counts 1/v. A stage without backward (all of it, and all before it, is frozen) keeps
    nothing.
    """
    backward = of_kind(plan, "B")
    split = of_kind(plan, "W")
    kept = 0
    most = 0
    for action in plan:
        place = action.microbatch, action.stage
        if action.kind == "F" and place in backward:
            kept += 1
        elif action.kind == "W" or (action.kind == "B" and place not in split):
            kept -= 1
        most = max(most, kept)
    return most / chunks(plan)


# ---- playing -------------------------------------------------------------------


def costs(plans, F, B, W, sizes=None):
    """-> cost(rank, action), for simulate.

    F, B, W: the times of all of a rank's stages for a micro-batch. B is the gradient of the input
    alone: a B that is not split takes B + W. sizes[stage]: the stage's work in units of what a
    rank has on average, so that all of them add up to the number of ranks. None: a rank's stages
    share its time equally.
    """
    table = {"F": F, "B": B, "W": W, "U": 0.0}
    split = [of_kind(plan, "W") for plan in plans]
    parts = [chunks(plan) for plan in plans]

    def cost(rank, action):
        time = table[action.kind]
        if action.kind == "B" and (action.microbatch, action.stage) not in split[rank]:
            time = B + W
        if sizes is None:
            return time / parts[rank]
        return time * sizes[action.stage]
    return cost


def simulate(plans, cost, comm=0.0, joined=False):
    """Play all ranks' plans -> for each rank [(action, start, end), ..].

    cost(rank, action) and comm, the time of a transfer, are in one unit. A transfer occupies no
    rank and waits for no other: what is made arrives `comm` later.
    joined: play an F whose .joined is true and the B behind it, of another micro-batch, as one
    action, which starts when the inputs of both are there, and gives both outputs at its end.
    Raises RuntimeError, with each rank's first stuck action, if the plans wait for each other.
    """
    home = homes(plans)
    last = max(home)
    ends = {}  # {(kind, micro-batch, stage): when it is done}
    played = [[] for _ in plans]
    progress = True
    while progress:
        progress = False
        for rank, plan in enumerate(plans):
            while len(played[rank]) < len(plan):
                together = next_of(plan, len(played[rank]), joined)
                needs = [need for action in together for need in inputs(action, last)]
                if any(need not in ends for need in needs):
                    break
                times = []
                for need in needs:
                    delay = 0.0
                    if home[need[2]] != rank:
                        delay = comm
                    times.append(ends[need] + delay)
                if played[rank]:
                    times.append(played[rank][-1][2])
                play(together, max(times, default=0.0), rank, cost, played, ends)
                progress = True
    check_done(plans, played)
    return played


def next_of(plan, position, joined):
    """The action at this position, with the one behind it if the two are one."""
    if joined and plan[position].joined:
        return plan[position:position + 2]
    return plan[position:position + 1]


def play(together, start, rank, cost, played, ends):
    """Do an action, or two that are one, on a rank."""
    for action in together:
        end = start + cost(rank, action)
        played[rank].append((action, start, end))
        start = end
    # what they make is there when the last of them ends
    for action in together:
        ends[key(action)] = end


def check_done(plans, played):
    stuck = []
    for rank, plan in enumerate(plans):
        if len(played[rank]) < len(plan):
            action = plan[len(played[rank])]
            stuck.append(f"rank {rank} waits to do {action.kind}{action.microbatch}")
    if stuck:
        raise RuntimeError("deadlock: " + ", ".join(stuck))


# ---- figures -------------------------------------------------------------------


def longest(played):
    """The longest of the ranks' spans, each from its first action's start to its last one's end."""
    return max(done[-1][2] - done[0][1] for done in played)


def span(plans, times):
    """How long the plans take. times: F, B, W of a rank and of a transfer, as in costs()."""
    F, B, W, comm = times
    return longest(simulate(plans, costs(plans, F, B, W), comm))


def bubble_rate(played):
    """The idle part of the longest span: (cost - M (F + B + W)) / cost of Qi 2023, section 5.3."""
    busy = sum(end - start for done in played for _, start, end in done) / len(played)
    return 1 - busy / longest(played)


Cell = namedtuple("Cell", "rank letter text start end")  # text: the letter with a number


def grid(played, width=105):
    """Ranks as rows, time to the right, idle as dots -> str.

    Every second stage of a rank is in small letters. Where a cell has no room for its number it has
    only its letter.
    """
    cells = []
    for rank, done in enumerate(played):
        stages = sorted({action.stage for action, _, _ in done})
        for action, start, end in done:
            kind = action.kind
            if stages.index(action.stage) % 2:
                kind = kind.lower()
            if end > start:
                cells.append(Cell(rank, kind, f"{kind}{action.microbatch}", start, end))
    first = min(cell.start for cell in cells)
    last = max(cell.end for cell in cells)
    shortest = min(cell.end - cell.start for cell in cells)
    label = 1 + max(len(cell.text) for cell in cells)
    # characters per unit of time: the shortest cell has room, unless the grid were too wide
    scale = min(label / shortest, width / (last - first))
    rows = [["."] * round(scale * (last - first)) for _ in played]
    for cell in cells:
        left = round(scale * (cell.start - first))
        right = round(scale * (cell.end - first))
        text = cell.text
        if len(text) > right - left:
            text = cell.letter
        rows[cell.rank][left:right] = text.ljust(right - left)[:right - left]
    return "\n".join(f"  rank {rank:<3d} {''.join(row)}" for rank, row in enumerate(rows))


# ---- a step as it is planned, and as it was --------------------------------------

POST_VALIDATION = """\
The rate is (cost - M (F + B + W)) / cost, cost the longest span of a rank (Qi 2023, section 5.3).
When its plan is done, each rank waits for the norm of all. Qi's post-validation (section 4) would
spare that: a rank steps on what those before it have told it, and takes the step back in the rare
case that the whole norm says otherwise."""


def planned(plans, times, sizes=None):
    """-> a step as text, figures. times: F, B, W of a rank, and a transfer. sizes: see costs()."""
    F, B, W, comm = times
    cost = costs(plans, F, B, W, sizes)
    played = simulate(plans, cost, comm)
    figures = {
        "bubble_rate": bubble_rate(played),
        "in_flight": [in_flight(plan) for plan in plans],
        "cost": longest(played),
    }
    flying = " ".join(f"{count:g}" for count in figures["in_flight"])
    lines = [grid(played)]
    lines.append(f"{longest(played):g} from first to last, bubble rate {bubble_rate(played):.4f}, "
                 f"micro-batches in flight by rank {flying}")
    if any(action.joined for plan in plans for action in plan):
        pairs = simulate(plans, cost, comm, joined=True)
        figures["joined_bubble_rate"] = bubble_rate(pairs)
        lines.append(f"with each F and B that are a pair as one action: {longest(pairs):g}, bubble "
                     f"rate {bubble_rate(pairs):.4f}")
    return "\n".join([*lines, POST_VALIDATION]), figures


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


def simulation(script, args, plans, times, sizes=None):
    """--simulate: no ranks, no model -> exit code."""
    text, figures = planned(plans, times, sizes)
    print(text)
    if args.json:
        own = {name: value for name, value in vars(args).items() if name != "cfg"}
        report = dict(script=script, args=own, **figures)
        Path(args.json).write_text(json.dumps(report, indent=1))
    return 0


class Timed:
    """Times the actions of a pipeline's next step: its do() is another until read().

    Every rank makes one. run has the device, its clock, and a store; see harness/run.py.
    """

    def __init__(self, run, pipeline):
        self.run = run
        self.pipeline = pipeline
        self.do = pipeline.do
        self.marks = []  # [(before, after)] of each action
        pipeline.do = self.timed
        if run.device.type == "cuda":
            torch.cuda.synchronize()  # the host may wait here: no action is being timed
        dist.barrier()
        # this moment by two clocks: the host's, by which ranks are compared (those of several nodes
        # have to agree), and the run's, which times actions
        self.host = time.time()
        self.origin = run.clock.mark()

    def timed(self, action, *rest):
        start = self.run.clock.mark()
        made = self.do(action, *rest)
        self.marks.append((start, self.run.clock.mark()))
        return made

    def read(self, plans, label):
        """-> the step as all ranks have played it, in seconds. label: of the store's entries."""
        self.pipeline.do = self.do
        spans = []
        for marks in self.marks:
            spans.append([self.host + 1e-3 * self.run.clock.ms(self.origin, m) for m in marks])
        store = self.run.store
        store.set(f"{label} {self.run.rank}", json.dumps(spans))
        reports = [store.get(f"{label} {rank}") for rank in range(self.run.world_size)]
        return measured(plans, reports)


def measured(plans, reports):
    """Each rank's [(start, end), ..] in seconds, as JSON, in the order of its plan -> played."""
    played = []
    for plan, report in zip(plans, reports, strict=True):
        spans = json.loads(report)
        played.append([(action, *span) for action, span in zip(plan, spans, strict=True)])
    return played


def typical_times(plans, played):
    """A measured step -> F, B, W of a rank, and COMM, for which simulate gives nearly the same.

    All plans must be split. COMM is the shortest time between the end of an action and the start of
    one on another rank that takes its output.
    """
    home = homes(plans)
    last = max(home)
    ends = {key(action): end for done in played for action, _, end in done}
    durations = defaultdict(list)
    gaps = []
    for rank, done in enumerate(played):
        for action, start, end in done:
            # an action is of one of the rank's stages, and costs() wants the time of all of them
            durations[action.kind].append((end - start) * chunks(plans[rank]))
            gaps += [start - ends[need] for need in inputs(action, last) if home[need[2]] != rank]
    work = [statistics.median(durations[kind]) for kind in "FBW"]
    if not all(work):  # the clock saw no time pass
        work = [1.0, 1.0, 1.0]
    return *work, max(0.0, min(gaps, default=0.0))


def compare(plans, played):
    """A measured step -> its simulation and, below that, the step itself, as text; figures.

    In the simulation all actions of one rank, kind and stage take their median time.
    """
    if longest(played) == 0:
        return "measured: the clock saw no time pass", {}
    durations = defaultdict(list)
    for rank, done in enumerate(played):
        for action, start, end in done:
            durations[rank, action.kind, action.stage].append(end - start)

    def cost(rank, action):
        return statistics.median(durations[rank, action.kind, action.stage])
    planned = simulate(plans, cost)
    lines = []
    for word, times in (("planned", planned), ("measured", played)):
        lines.append(f"{word}: {1e3 * longest(times):.1f} ms, bubble {bubble_rate(times):.3f}")
        lines.append(grid(times))
    figures = {
        "timeline": in_ms(played),
        "bubble_rate": bubble_rate(played),
        "planned_bubble_rate": bubble_rate(planned),
        "measured_ms": 1e3 * longest(played),
        "planned_ms": 1e3 * longest(planned),
    }
    return "\n".join(lines), figures


@contextlib.contextmanager
def watched(run, impl, step, plans, pipeline):
    """Shows the last of our steps but one as planned and as it was, action by action."""
    if impl != "scratch" or run.dry or step != max(run.first, run.last - 1):
        yield
        return
    timed = Timed(run, pipeline)
    yield
    text, figures = compare(plans, timed.read(plans, "step"))
    run.say(text)
    run.extra.update(figures)  # its bubble_rate takes the place of the simulation's


def in_ms(played):
    """-> for each rank [(kind, micro-batch, stage, start, end), ..]; the first start is 0."""
    begin = min(done[0][1] for done in played)
    timeline = []
    for done in played:
        spans = [(1e3 * (start - begin), 1e3 * (end - begin)) for _, start, end in done]
        timeline.append([(*key(action), *span) for (action, _, _), span in zip(done, spans)])
    return timeline
