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
from harness.timeline import bubble_rate, simulate  # noqa: E402
from harness.usage import require  # noqa: E402
from pipeline_parallel import make_plans  # noqa: E402
from tools.launch import report  # noqa: E402

PLACE = ROOT / "docs"  # of the pictures
DATA = ROOT / "docs" / "data"
INK = "#7a7a7a"  # on white and on dark
BLUE = "#4477aa"
RED = "#ee6677"
YELLOW = "#ccbb44"
CYAN = "#66ccee"
PALE = "#88888833"


def canvas(rows, height, width=8.6):
    """-> matplotlib's figure, one drawing below the other"""
    try:
        import matplotlib
    except ImportError:
        require(False, "pictures want matplotlib: pip install matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "docs", "font.size": 9, "text.color": INK,
        "axes.facecolor": "none", "axes.edgecolor": INK, "axes.labelcolor": INK,
        "xtick.color": INK, "ytick.color": INK, "axes.titlesize": 9, "axes.titlelocation": "left",
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
    import matplotlib.pyplot as plt
    return plt.subplots(rows, 1, squeeze=False, figsize=(width, height), layout="constrained")


def finish(figure, name):
    figure.savefig(PLACE / name, transparent=True, metadata={"Date": None, "Creator": None})


def legend(drawing, kinds, **place):
    """kinds: {what it is: its color}"""
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=label) for label, color in kinds.items()]
    drawing.legend(handles=handles, ncols=len(kinds), **place)


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
        "ddp": "ddp",
        **{f"zero, stage {stage}": f"zero --stage {stage}" for stage in (1, 2, 3)},
        "fsdp": "fsdp",
        "ddp, full checkpointing": "amp_accum_ckpt --ckpt full",
        "tensor parallel, sp": "tensor_parallel --sp",
        "pipeline, 1f1b": "pipeline_parallel --schedule 1f1b --micro 64",
    }),
    LONG: ("--seq 131072 --batch 1", {
        "one process": "ddp",
        "context parallel": "context_parallel --attn zigzag",
    }),
}
HELD = {"parameters": BLUE, "gradients": RED, "optimizer": YELLOW, "activations": CYAN}


def measure_held():
    figures = {}
    for panel, (flags, holders) in HOLDERS.items():
        figures[panel] = {}
        for label, command in holders.items():
            file, *own = command.split()
            ranks = 1 if label == "one process" else 64
            words = [*own, *SIZES.split(), *flags.split(), "--dry-run", ranks]
            memory = report(1, file, words)["ranks"][0]["memory"]
            figures[panel][label] = {kind: memory[kind] for kind in (*HELD, "peak")}
    write("held", figures)


def draw_held():
    figures = read("held")
    figure, drawings = canvas(2, 4.6)
    for drawing, (panel, rows) in zip(drawings[:, 0], figures.items()):
        for place, sizes in enumerate(rows.values()):
            start = 0
            for kind, color in HELD.items():
                drawing.barh(place, sizes[kind] / 1e9, left=start, color=color, height=0.7)
                start += sizes[kind] / 1e9
            peak = sizes["peak"] / 1e9
            drawing.plot([peak, peak], [place - 0.4, place + 0.4], color=INK, lw=2)
            words = f"  {start:,.1f} GB, peak {peak:,.1f}"
            drawing.text(max(start, peak), place, words, va="center")
        drawing.set_yticks(range(len(rows)), rows)
        drawing.invert_yaxis()
        drawing.set_title(panel)
        drawing.margins(x=0.3)  # room for the numbers
        drawing.set_xlim(left=0)
    drawings[0, 0].get_gridspec().set_height_ratios([8, 2.6])
    figure.suptitle("What rank 0 of 64 holds of a GPT with 7.4 billion parameters, fp32", color=INK)
    legend(figure, {**HELD, "peak": INK}, loc="outside lower center")
    finish(figure, "held.svg")


# ---- a step of ddp -----------------------------------------------------------------

RUN = "--layers 8 --width 256 --heads 8 --seq 256 --steps 4 --no-check"
ATTEMPTS = 3  # of which the fastest is kept
STEP = {"forward": BLUE, "backward": RED, "all-reduce": YELLOW, "optimizer": CYAN}


def spans_of(trace, name):
    """-> [(start, end)] in ms of the events whose name begins so, in order"""
    events = [event for event in trace if event.get("ph") == "X" and event["name"].startswith(name)]
    return sorted((event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3) for event in events)


def measure_step():
    """{impl: {part of STEP: [(start, end)] in ms}}"""
    found = []
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryDirectory() as folder:
            report(2, "ddp", ["--impl", "all", *RUN.split(), "--profile", folder])
            paths = {impl: Path(folder, f"ddp-{impl}-rank0.json") for impl in ("idea", "scratch")}
            traces = {impl: json.loads(path.read_text())["traceEvents"]
                      for impl, path in paths.items()}
        found.append({impl: parts_of(trace) for impl, trace in traces.items()})
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
    figures = read("step")
    figure, drawings = canvas(2, 2.6)
    end = max(parts["optimizer"][0][1] for parts in figures.values())
    words = {"idea": "the idea: sums after backward",
             "scratch": "with buckets: sums under backward"}
    for drawing, (impl, parts) in zip(drawings[:, 0], figures.items()):
        for part, spans in parts.items():
            row = int(part == "all-reduce")
            bars = [(start, stop - start) for start, stop in spans]
            drawing.broken_barh(bars, (row, 0.8), color=STEP[part], lw=0)
        drawing.set_yticks([0.4, 1.4], ["rank 0", "sent"])
        drawing.invert_yaxis()
        drawing.set_xlim(0, end)
        drawing.set_title(f"{words[impl]}: {parts['optimizer'][0][1]:.0f} ms")
    drawings[1, 0].set_xlabel("ms")
    legend(figure, STEP, loc="outside lower center")
    finish(figure, "step.svg")


# ---- schedules -----------------------------------------------------------------

MICRO = 8
DRAWN = ("gpipe", "1f1b", "interleaved", "zb-v")
ACTIONS = {"forward": BLUE, "backward": RED, "gradients of weights": YELLOW}


def measure_timelines():
    """{schedule: for each of two ranks [(kind, micro-batch, stage, start, end), ..] in ms}"""
    figures = {}
    for schedule in DRAWN:
        flags = f"--schedule {schedule} --micro {MICRO} --batch 16 {RUN}".split()
        found = [report(2, "pipeline_parallel", flags) for _ in range(ATTEMPTS)]
        best = min(found, key=lambda one: one["measured_ms"])["timeline"]
        figures[schedule] = [[(*action, round(start, 1), round(end, 1))
                              for *action, start, end in done] for done in best]
    write("timelines", figures)


def planned(schedule, measured):
    """-> the same as it would be if no rank waited but for its inputs, each kind of action on a
    rank taking its median time"""
    times = defaultdict(list)
    for rank, done in enumerate(measured):
        for kind, _, stage, start, end in done:
            times[rank, kind, stage].append(end - start)
    played = simulate(make_plans(schedule, len(measured), MICRO),
                      lambda rank, action: median(times[rank, action.kind, action.stage]))
    return [[(*action[:3], start, end) for action, start, end in done] for done in played]


def draw_timelines():
    figures = read("timelines")
    figure, drawings = canvas(2 * len(figures), 7)
    places = iter(drawings[:, 0])
    for schedule, measured in figures.items():
        sides = {"planned": planned(schedule, measured), "measured": measured}
        last = max(end for rows in sides.values() for row in rows for *_, end in row)
        for side, rows in sides.items():
            drawing = next(places)
            end = max(row[-1][-1] for row in rows)
            for rank, row in enumerate(rows):
                drawing.barh(rank, end, color=PALE, height=0.8)
                for kind, _, _, start, stop in row:
                    color = list(ACTIONS.values())["FBW".index(kind)]
                    drawing.barh(rank, stop - start, left=start, color=color, height=0.8,
                                 edgecolor="#ffffff66", lw=0.3)
            idle = bubble_rate([[(None, *span[-2:]) for span in row] for row in rows])
            drawing.set_title(f"{schedule}, {side}: {end:.0f} ms, bubble {idle:.0%}")
            drawing.set_yticks([0, 1], ["rank 0", "rank 1"])
            drawing.invert_yaxis()
            drawing.set_xlim(0, last)
    legend(figure, {**ACTIONS, "waiting": PALE}, loc="outside lower center")
    figure.suptitle(f"{MICRO} micro-batches on 2 ranks", color=INK)
    finish(figure, "timelines.svg")


# ---- rings ---------------------------------------------------------------------

RANKS = 4


def work(rank, hop, is_zigzag):
    """Of rank's queries with the keys that reach it at this hop, in halves of an attention without
    a mask: 1 is causal attention among a rank's own tokens."""
    source = (rank - hop) % RANKS
    if hop == 0:
        return 1
    if is_zigzag:  # half of its queries see all these keys, or all see half of them
        return 1
    return 2 if source < rank else 0


def draw_hops():
    figure, drawings = canvas(2, 3.6, width=6)
    for drawing, attn in zip(drawings[:, 0], ("ring", "zigzag")):
        for rank in range(RANKS):
            for hop in range(RANKS):
                share = work(rank, hop, attn == "zigzag") / 2
                drawing.barh(rank, 0.9, left=hop, color=PALE, height=0.8)
                drawing.barh(rank, 0.9 * share, left=hop, color=BLUE, height=0.8)
        lengths = [max(work(rank, hop, attn == "zigzag") for rank in range(RANKS))
                   for hop in range(RANKS)]
        drawing.set_title(f"{attn}: {sum(lengths)} halves, a hop takes as long as its slowest rank")
        drawing.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)])
        drawing.set_xticks([hop + 0.45 for hop in range(RANKS)],
                           [f"hop {hop}" for hop in range(RANKS)])
        drawing.invert_yaxis()
    legend(figure, {"computes (a full cell: every query with every key)": BLUE, "waits": PALE},
           loc="outside lower center")
    finish(figure, "hops.svg")


DRAW = (draw_held, draw_step, draw_timelines, draw_hops)
MEASURE = (measure_held, measure_step, measure_timelines)  # hops need none


def main():
    words = sys.argv[1:]
    require(words in ([], ["--measure"]), "usage: python tools/draw.py [--measure]")
    if words:
        for measure in MEASURE:
            measure()
    for draw in DRAW:
        draw()


if __name__ == "__main__":
    main()
