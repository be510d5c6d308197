"""The pictures in docs/, drawn by matplotlib (pip install matplotlib) from what runs have measured.

    python tools/draw.py                      draw docs/NAME.svg from docs/data/NAME.json
    python tools/draw.py --measure            run everything first (minutes), keep its figures

    held        what one of 64 ranks holds of a 7.4B model, and its peak, from dry runs
    step        a step of ddp on two ranks: the idea, and with buckets, from profiles
    timelines   pipeline schedules on two ranks: planned, and as measured
    hops        who works how much at which hop of ring and zigzag attention

Each is made of panels: {title: {row: [(start, end, what it is), ..]}}, and its file has no more.
They stand on white and on dark: the background is empty, and what is written is grey.
"""
import json
import sys
import tempfile
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from harness.flags import parse, require  # noqa: E402
from harness.timeline import bubble_rate, without_waiting  # noqa: E402
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
COMPUTES = "computes (a full cell: every query with every key)"
COLORS = {  # in the order of the legends
    "forward": BLUE, "backward": RED, "gradients of weights": YELLOW, "all-reduce": CYAN,
    "parameters": BLUE, "gradients": RED, "optimizer": YELLOW, "activations": CYAN,
    COMPUTES: BLUE, "waiting": PALE, "more at the peak": PALE}
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "docs", "font.size": 9, "text.color": INK,
    "axes.facecolor": "none", "axes.edgecolor": INK, "axes.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.titlesize": 9, "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}

# ---- bars ----------------------------------------------------------------------


def picture(name, panels, height, xlabel, title=None, alike=True):
    """Draws panels, one below the other, into docs/NAME.svg. alike: have they one scale?"""
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
    shown = set()
    for drawing, (words, rows) in zip(drawings, panels.items()):
        for place, bars in enumerate(rows.values()):
            for start, end, what in bars:
                drawing.barh(place, end - start, left=start, color=COLORS[what], height=0.8,
                             edgecolor="#ffffff66", lw=0.3)
                shown.add(what)
        drawing.set_yticks(range(len(rows)), rows)
        drawing.invert_yaxis()
        drawing.set_title(words)
        drawing.margins(x=0)
        drawing.locator_params("x", integer=True)
    drawing.set_xlabel(xlabel)
    figure.suptitle(title, color=INK)
    handles = [Patch(color=COLORS[what], label=what) for what in COLORS if what in shown]
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center")
    figure.savefig(PLACE / f"{name}.svg", transparent=True,
                   metadata={"Date": None, "Creator": None})


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
HELD = ("parameters", "gradients", "optimizer", "activations")


def held():
    panels = {}
    for panel, (flags, holders) in HOLDERS.items():
        panels[panel] = {}
        for label, command in holders.items():
            file, *words = f"{command} {SIZES} {flags}".split()
            memory = measured(1, file, words)["ranks"][0]["memory"]
            peak = memory["peak"] / 1e9
            ends = list(accumulate(memory[kind] / 1e9 for kind in HELD))
            row = f"{label}: {ends[-1]:,.1f} GB, peak {peak:,.1f}"
            panels[panel][row] = [(0, peak, "more at the peak"), *zip([0, *ends], ends, HELD)]
    return panels


# ---- a step of ddp -----------------------------------------------------------------

RUN = "--layers 8 --width 256 --heads 8 --seq 256 --steps 4 --no-check"
TOLD = {"idea": "the idea: sums after backward", "scratch": "with buckets: sums under backward"}


def step():
    panels = {}
    with tempfile.TemporaryDirectory() as folder:
        measured(2, "ddp", ["--impl", "all", *RUN.split(), "--profile", folder])
        for impl, words in TOLD.items():
            trace = json.loads(Path(folder, f"ddp-{impl}-rank0.json").read_text())
            rows = rows_of(trace["traceEvents"])
            panels[f"{words}: {rows['rank 0'][-1][1]:.0f} ms"] = rows
    return panels


def rows_of(trace):
    """What a rank does and what is sent, in ms since forward began."""
    first = spans_of(trace, "aten::embedding")[0][0]
    loss = spans_of(trace, "aten::cross_entropy_loss")[0][1]
    backward = spans_of(trace, "autograd::engine::evaluate_function")
    rows = {
        "rank 0": [(first, loss, "forward"), (backward[0][0], backward[-1][1], "backward")],
        "sent": [(*span, "all-reduce") for span in spans_of(trace, "gloo:all_reduce")],
    }
    rows["rank 0"] += [(*span, "optimizer") for span in spans_of(trace, "Optimizer.step")]
    return {row: [(start - first, end - first, what) for start, end, what in bars]
            for row, bars in rows.items()}


def spans_of(trace, name):
    """-> [(start, end)] in ms of the events whose name begins so, in order"""
    events = [event for event in trace if event.get("ph") == "X" and event["name"].startswith(name)]
    return sorted((event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3) for event in events)


# ---- schedules -----------------------------------------------------------------

MICRO = 8
DRAWN = ("gpipe", "1f1b", "interleaved", "zb-v")
ACTIONS = {"F": "forward", "B": "backward", "W": "gradients of weights"}


def timelines():
    panels = {}
    for schedule in DRAWN:
        flags = f"--schedule {schedule} --micro {MICRO} --batch 16 {RUN}".split()
        ranks = measured(2, "pipeline_parallel", flags)["timeline"]
        ran = [[(action, start, end) for *action, start, end in done] for done in ranks]
        planned = without_waiting(make_plans(schedule, len(ran), MICRO), ran)
        for side, played in {"planned": planned, "measured": ran}.items():
            end = max(done[-1][-1] for done in played)
            rows = {}
            for rank, done in enumerate(played):
                bars = [(start, stop, ACTIONS[kind]) for (kind, *_), start, stop in done]
                rows[f"rank {rank}"] = [(0, end, "waiting"), *bars]
            panels[f"{schedule}, {side}: {end:.0f} ms, bubble {bubble_rate(played):.0%}"] = rows
    return panels


# ---- rings ---------------------------------------------------------------------

RANKS = 4


# Work of each rank at each hop, in halves of attention without a mask. Among its own tokens: 1. In
# the ring all see the keys of a rank before them, none those of one behind; by zigzag half of the
# queries see all keys, or all see half.
WORK = {
    "ring": [[1, *[2] * rank, *[0] * (RANKS - 1 - rank)] for rank in range(RANKS)],
    "zigzag": [[1] * RANKS] * RANKS,
}


def hops():
    panels = {}
    for attn, work in WORK.items():
        rows = {}
        for rank, halves in enumerate(work):
            bars = [[(hop, hop + 0.9, "waiting"), (hop, hop + 0.45 * half, COMPUTES)]
                    for hop, half in enumerate(halves)]
            rows[f"rank {rank}"] = sum(bars, [])
        total = sum(map(max, zip(*work)))
        panels[f"{attn}: {total} halves, a hop takes as long as its slowest rank"] = rows
    return panels


# ---- all of them -----------------------------------------------------------------

PICTURES = {  # what makes the panels, and how they are drawn
    held: dict(height=4.6, xlabel="GB", alike=False,
               title="What rank 0 of 64 holds of a GPT with 7.4 billion parameters, fp32"),
    step: dict(height=2.6, xlabel="ms"),
    timelines: dict(height=7, xlabel="ms", title=f"{MICRO} micro-batches on 2 ranks"),
    hops: dict(height=3.6, xlabel="hop"),
}


def main():
    flags = {"--measure": dict(action="store_true", help="run everything first: minutes")}
    args = parse(__doc__, flags)
    for make, how in PICTURES.items():
        name = make.__name__
        file = DATA / f"{name}.json"
        if args.measure:
            file.write_text(json.dumps(make()) + "\n")
        picture(name, json.loads(file.read_text()), **how)


if __name__ == "__main__":
    main()
