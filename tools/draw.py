"""The pictures in docs/, drawn by matplotlib (pip install matplotlib) from what runs have measured.

    python tools/draw.py                      draw docs/*.svg from the figures in docs/data/
    python tools/draw.py --measure            run everything first (minutes), keep its figures

    held.svg        what one of 64 ranks holds of a 7.4B model, and its peak, from dry runs
    step.svg        a step of ddp on two ranks: the idea, and with buckets, from profiles
    timelines.svg   pipeline schedules on two ranks: planned, and as measured
    hops.svg        who works how much at which hop of ring and zigzag attention

They stand on white and on dark: the background is empty, and what is written is grey.
"""
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from harness.flags import parse, require  # noqa: E402
from harness.timeline import bubble_rate, simulate  # noqa: E402
from pipeline_parallel import make_plans  # noqa: E402
from tools.ranks import measured  # noqa: E402

PLACE = ROOT / "docs"  # of the pictures
DATA = ROOT / "docs" / "data"
INK = "#7a7a7a"  # on white and on dark
BLUE = "#4477aa"
RED = "#ee6677"
YELLOW = "#ccbb44"
CYAN = "#66ccee"
PALE = "#88888833"
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "docs", "font.size": 9, "text.color": INK,
    "axes.facecolor": "none", "axes.edgecolor": INK, "axes.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.titlesize": 9, "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}

# ---- bars ----------------------------------------------------------------------


def picture(name, panels, kinds, height, xlabel, title=None, alike=True):
    """Draws panels, one below the other, into docs/NAME.

    panels: {title: {row: [(start, end, color), ..]}}. kinds: {what a color means: the color}
    alike: have they one scale?
    """
    try:
        import matplotlib
    except ImportError:
        require(False, "pictures want matplotlib: pip install matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams.update(STYLE)
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, drawings = plt.subplots(
        len(panels), 1, figsize=(8.6, height), layout="constrained", sharex=alike,
        height_ratios=[len(rows) for rows in panels.values()])
    for drawing, (words, rows) in zip(drawings, panels.items()):
        for place, bars in enumerate(rows.values()):
            for start, end, color in bars:
                drawing.barh(place, end - start, left=start, color=color, height=0.8,
                             edgecolor="#ffffff66", lw=0.3)
        drawing.set_yticks(range(len(rows)), rows)
        drawing.invert_yaxis()
        drawing.set_title(words)
        drawing.margins(x=0)
        drawing.locator_params("x", integer=True)
    drawing.set_xlabel(xlabel)
    figure.suptitle(title, color=INK)
    handles = [Patch(color=color, label=label) for label, color in kinds.items()]
    figure.legend(handles=handles, ncols=len(kinds), loc="outside lower center")
    figure.savefig(PLACE / name, transparent=True, metadata={"Date": None, "Creator": None})


def read(name):
    return json.loads((DATA / f"{name}.json").read_text())


def write(name, figures):
    (DATA / f"{name}.json").write_text(json.dumps(figures, separators=(",", ":")) + "\n")


# ---- what a rank holds ---------------------------------------------------------

SIZES = "--layers 64 --width 3072 --heads 64 --vocab 51200"
SHORT = "64 sequences of 2,048 tokens"
LONG = "one sequence of 131,072 tokens"
HOLDERS = {  # {panel: (its flags, {label: command})}
    SHORT: ("--seq 2048 --batch 64", {
        "ddp": "ddp --dry-run 64",
        "zero, stage 1": "zero --dry-run 64 --stage 1",
        "zero, stage 2": "zero --dry-run 64 --stage 2",
        "zero, stage 3": "zero --dry-run 64 --stage 3",
        "fsdp": "fsdp --dry-run 64",
        "ddp, full checkpointing": "amp_accum_ckpt --dry-run 64 --ckpt full",
        "tensor parallel, sp": "tensor_parallel --dry-run 64 --sp",
        "pipeline, 1f1b": "pipeline_parallel --dry-run 64 --schedule 1f1b --micro 64",
    }),
    LONG: ("--seq 131072 --batch 1", {
        "one process": "ddp --dry-run 1",
        "context parallel": "context_parallel --dry-run 64 --attn zigzag",
    }),
}
HELD = {"parameters": BLUE, "gradients": RED, "optimizer": YELLOW, "activations": CYAN}


def measure_held():
    figures = {}
    for panel, (flags, holders) in HOLDERS.items():
        figures[panel] = {}
        for label, command in holders.items():
            file, *words = f"{command} {SIZES} {flags}".split()
            memory = measured(1, file, words)["ranks"][0]["memory"]
            figures[panel][label] = {kind: memory[kind] for kind in (*HELD, "peak")}
    write("held", figures)


def draw_held():
    panels = {}
    for panel, holders in read("held").items():
        panels[panel] = {}
        for label, sizes in holders.items():
            bars = []
            end = 0
            for kind, color in HELD.items():
                start = end
                end += sizes[kind] / 1e9
                bars.append((start, end, color))
            peak = sizes["peak"] / 1e9
            words = f"{label}: {end:,.1f} GB, peak {peak:,.1f}"
            panels[panel][words] = [(0, peak, PALE), *bars]
    picture("held.svg", panels, {**HELD, "more at the peak": PALE}, 4.6, "GB",
            "What rank 0 of 64 holds of a GPT with 7.4 billion parameters, fp32", alike=False)


# ---- a step of ddp -----------------------------------------------------------------

RUN = "--layers 8 --width 256 --heads 8 --seq 256 --steps 4 --no-check"
ATTEMPTS = 3  # of which the fastest is kept
STEP = {"forward": BLUE, "backward": RED, "all-reduce": YELLOW, "optimizer": CYAN}
TOLD = {"idea": "the idea: sums after backward", "scratch": "with buckets: sums under backward"}


def spans_of(trace, name):
    """-> [(start, end)] in ms of the events whose name begins so, in order"""
    events = [event for event in trace if event.get("ph") == "X" and event["name"].startswith(name)]
    return sorted((event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3) for event in events)


def measure_step():
    """{impl: {part of STEP: [(start, end)] in ms}}"""
    found = []
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryDirectory() as folder:
            measured(2, "ddp", ["--impl", "all", *RUN.split(), "--profile", folder])
            sides = {}
            for impl in TOLD:
                trace = json.loads(Path(folder, f"ddp-{impl}-rank0.json").read_text())
                sides[impl] = parts_of(trace["traceEvents"])
        found.append(sides)
    write("step", min(found, key=lambda sides: sides["scratch"]["optimizer"][0][1]))


def parts_of(trace):
    backward = spans_of(trace, "autograd::engine::evaluate_function")
    first = spans_of(trace, "aten::embedding")[0][0]
    loss = spans_of(trace, "aten::cross_entropy_loss")[0][1]
    found = {"forward": [(first, loss)], "backward": [(backward[0][0], backward[-1][1])],
             "all-reduce": spans_of(trace, "gloo:all_reduce"),
             "optimizer": spans_of(trace, "Optimizer.step")}
    return {part: [(round(start - first, 1), round(end - first, 1)) for start, end in spans]
            for part, spans in found.items()}


def draw_step():
    panels = {}
    for impl, parts in read("step").items():
        rows = {"rank 0": [], "sent": []}
        for part, spans in parts.items():
            row = "sent" if part == "all-reduce" else "rank 0"
            rows[row] += [(start, end, STEP[part]) for start, end in spans]
        panels[f"{TOLD[impl]}: {parts['optimizer'][0][1]:.0f} ms"] = rows
    picture("step.svg", panels, STEP, 2.6, "ms")


# ---- schedules -----------------------------------------------------------------

MICRO = 8
DRAWN = ("gpipe", "1f1b", "interleaved", "zb-v")
ACTIONS = {"F": BLUE, "B": RED, "W": YELLOW}


def measure_timelines():
    """{schedule: for each of two ranks [(kind, micro-batch, stage, start, end), ..] in ms}"""
    figures = {}
    for schedule in DRAWN:
        flags = f"--schedule {schedule} --micro {MICRO} --batch 16 {RUN}".split()
        found = [measured(2, "pipeline_parallel", flags) for _ in range(ATTEMPTS)]
        best = min(found, key=lambda one: one["measured_ms"])["timeline"]
        figures[schedule] = [[(*action, round(start, 1), round(end, 1))
                              for *action, start, end in done] for done in best]
    write("timelines", figures)


def planned(schedule, ran):
    """-> the same as it would be if no rank waited but for its inputs, each kind of action on a
    rank taking its median time"""
    times = defaultdict(list)
    for rank, done in enumerate(ran):
        for kind, _, stage, start, end in done:
            times[rank, kind, stage].append(end - start)
    played = simulate(make_plans(schedule, len(ran), MICRO),
                      lambda rank, action: median(times[rank, action.kind, action.stage]))
    return [[(*action[:3], start, end) for action, start, end in done] for done in played]


def draw_timelines():
    panels = {}
    for schedule, ran in read("timelines").items():
        for side, ranks in {"planned": planned(schedule, ran), "measured": ran}.items():
            end = max(done[-1][-1] for done in ranks)
            rows = {}
            for rank, done in enumerate(ranks):
                spans = [(start, stop, ACTIONS[kind]) for kind, _, _, start, stop in done]
                rows[f"rank {rank}"] = [(0, end, PALE), *spans]
            idle = bubble_rate([[(None, *span[-2:]) for span in done] for done in ranks])
            panels[f"{schedule}, {side}: {end:.0f} ms, bubble {idle:.0%}"] = rows
    meanings = {"forward": BLUE, "backward": RED, "gradients of weights": YELLOW, "waiting": PALE}
    picture("timelines.svg", panels, meanings, 7, "ms", f"{MICRO} micro-batches on 2 ranks")


# ---- rings ---------------------------------------------------------------------

RANKS = 4


def work(rank, hop, attn):
    """Of rank's queries with the keys that reach it at this hop, in halves of an attention without
    a mask: 1 is causal attention among a rank's own tokens."""
    if hop == 0 or attn == "zigzag":  # half of its queries see all these keys, or all see half
        return 1
    return 2 if hop <= rank else 0  # from a rank before it: all; from one behind: none


def draw_hops():
    panels = {}
    for attn in ("ring", "zigzag"):
        rows = {f"rank {rank}": [] for rank in range(RANKS)}
        halves = 0
        for hop in range(RANKS):
            shares = [work(rank, hop, attn) for rank in range(RANKS)]
            halves += max(shares)
            for row, share in zip(rows.values(), shares):
                row += [(hop, hop + 0.9, PALE), (hop, hop + 0.45 * share, BLUE)]
        panels[f"{attn}: {halves} halves, a hop takes as long as its slowest rank"] = rows
    meanings = {"computes (a full cell: every query with every key)": BLUE, "waits": PALE}
    picture("hops.svg", panels, meanings, 3.6, "hop")


DRAW = (draw_held, draw_step, draw_timelines, draw_hops)
MEASURE = (measure_held, measure_step, measure_timelines)  # hops need none


def main():
    flags = {"--measure": dict(action="store_true", help="run everything first: minutes")}
    if parse(__doc__, flags).measure:
        for measure in MEASURE:
            measure()
    for draw in DRAW:
        draw()


if __name__ == "__main__":
    main()
