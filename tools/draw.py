"""The pictures in docs/: SVG drawn from what runs have measured.

    python tools/draw.py                      draw docs/*.svg from the figures in docs/data/
    python tools/draw.py --measure            run everything first (minutes), keep its figures

    held.svg        what one of 64 ranks holds of a 7.4B model, from dry runs
    timelines.svg   pipeline schedules: planned, and as a run of two ranks measured it
    hops.svg        who works how much at which hop of ring and zigzag attention
    buckets.svg     ddp's buckets travelling while backward runs, from a profile
"""
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from context_parallel import KINDS as RINGS, seen  # noqa: E402
from harness.timeline import bubble_rate, costs, simulate  # noqa: E402
from pipeline_parallel import make_plans  # noqa: E402
from tools.launch import report  # noqa: E402

PLACE = ROOT / "docs"  # of the pictures
DATA = ROOT / "docs" / "data"

COLORS = {
    "parameters": "#4477aa", "gradients": "#ee6677", "optimizer": "#ccbb44",
    "activations": "#66ccee",
    # actions of a pipeline: forward, backward, gradients of weights
    "F": "#4477aa", "B": "#ee6677", "W": "#ccbb44",
}
STYLE = """
text { font: 12px sans-serif; fill: #222 } .small { font-size: 10px } .title { font-weight: bold }
.idle { fill: #8884 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } }
"""


class Drawing:
    """SVG elements, one after the other."""

    def __init__(self, width, height):
        self.width = width
        self.height = height
        self.elements = []

    def text(self, x, y, words, anchor="start", kind=""):
        words = str(words).replace("&", "&amp;").replace("<", "&lt;")
        self.elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{words}</text>')

    def box(self, x, y, width, height, color="", kind=""):
        paint = f' fill="{color}"' if color else ""
        self.elements.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.2f}" height="{height:.1f}" '
            f'class="{kind}"{paint}/>')

    def legend(self, x, y, kinds):
        """kinds: {one of COLORS: what it is}"""
        for number, (kind, words) in enumerate(kinds.items()):
            self.box(x + 110 * number, y, 12, 12, COLORS[kind])
            self.text(x + 110 * number + 16, y + 10, words)

    def save(self, name):
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}"><style>{STYLE}</style>\n')
        (PLACE / name).write_text(head + "\n".join(self.elements) + "\n</svg>\n")


def read(name):
    return json.loads((DATA / f"{name}.json").read_text())


def write(name, figures):
    (DATA / f"{name}.json").write_text(json.dumps(figures, separators=(",", ":")) + "\n")


# ---- what a rank holds ---------------------------------------------------------

SIZES = "--layers 64 --width 3072 --heads 64 --vocab 51200 --seq 2048 --batch 64"
HOLDERS = {
    "ddp": "ddp.py",
    **{f"zero, stage {level}": f"zero.py --stage {level}" for level in (1, 2, 3)},
    "fsdp": "fsdp.py",
    "ddp, full checkpointing": "amp_accum_ckpt.py --ckpt full",
    "tensor parallel, sp": "tensor_parallel.py --sp",
    "pipeline, 1f1b": "pipeline_parallel.py --schedule 1f1b --micro 64",
    "context parallel": "context_parallel.py --attn zigzag",
}
TITLE = "What rank 0 of 64 holds of a GPT with 7.4 billion parameters, fp32"
HELD = ("parameters", "gradients", "optimizer", "activations")


def measure_held():
    figures = {}
    for label, command in HOLDERS.items():
        script, *flags = command.split()
        found = report(1, script, [*flags, *SIZES.split(), "--dry-run", 64])
        memory = found["ranks"][0]["memory"]
        figures[label] = {kind: memory[kind] for kind in HELD}
    write("held", figures)


def draw_held():
    figures = read("held")
    left = 170
    scale = 540 / max(sum(sizes.values()) for sizes in figures.values())
    drawing = Drawing(820, 70 + 28 * len(figures))
    drawing.text(10, 20, TITLE, kind="title")
    drawing.legend(left, 32, {kind: kind for kind in HELD})
    for number, (label, sizes) in enumerate(figures.items()):
        y = 58 + 28 * number
        drawing.text(left - 8, y + 14, label, "end")
        x = left
        for kind in HELD:
            drawing.box(x, y, scale * sizes[kind], 20, COLORS[kind])
            x += scale * sizes[kind]
        drawing.text(x + 6, y + 14, f"{sum(sizes.values()) / 1e9:.1f} GB")
    drawing.save("held.svg")


# ---- schedules -----------------------------------------------------------------

STAGES = 4
MICRO = 8
DRAWN = ("gpipe", "1f1b", "interleaved", "zb-v")
RUN = "--layers 8 --width 256 --heads 8 --seq 256 --steps 4 --no-check"


def simulated(schedule):
    """-> the idle part, for each rank [(kind, start, end), ..]; F = B = W = 1."""
    plans = make_plans(schedule, STAGES, MICRO)
    played = simulate(plans, costs(plans, 1.0, 1.0, 1.0))
    rows = [[(action.kind, start, end) for action, start, end in done] for done in played]
    return bubble_rate(played), rows


def measure_timelines():
    """As a run of two ranks goes, in ms."""
    figures = {}
    for schedule in DRAWN:
        flags = f"--schedule {schedule} --micro {MICRO} --batch 16 {RUN}"
        found = report(2, "pipeline_parallel.py", flags.split())
        rows = []
        for done in found["timeline"]:
            rows.append([(kind, round(start, 2), round(end, 2)) for kind, _, _, start, end in done])
        figures[schedule] = [round(found["bubble_rate"], 4), rows]
    write("timelines", figures)


def draw_rows(drawing, x, y, width, rows):
    """The ranks of a timeline, one below the other, each 12 high."""
    first = min(start for row in rows for _, start, _ in row)
    last = max(end for row in rows for _, _, end in row)
    scale = width / (last - first)
    for number, row in enumerate(rows):
        top = y + 14 * number
        drawing.box(x, top, width, 12, kind="idle")
        for kind, start, end in row:
            left = x + scale * (start - first)
            drawing.box(left, top, scale * (end - start) - 0.4, 12, COLORS[kind])


def draw_timelines():
    figures = read("timelines")
    drawing = Drawing(900, 40 + 84 * len(figures))
    title = f"{MICRO} micro-batches: 4 stages as planned, F = B = W, and 2 ranks as measured"
    drawing.text(10, 20, title, kind="title")
    for number, (schedule, measured) in enumerate(figures.items()):
        y = 40 + 84 * number
        drawing.text(10, y + 12, schedule, kind="title")
        sides = (110, "planned", simulated(schedule)), (510, "measured", measured)
        for x, side, (bubble, rows) in sides:
            drawing.text(x, y + 10, f"{side}: bubble {bubble:.1%}", kind="small")
            draw_rows(drawing, x, y + 16, 370, rows)
    drawing.legend(570, 10, {"F": "forward", "B": "backward", "W": "weights"})
    drawing.save("timelines.svg")


# ---- rings ---------------------------------------------------------------------

RANKS = 4


def work(kind, rank, hop):
    """The work of attention at a hop: 1 for half of the pairs of query and key, 2 for all."""
    if hop == 0:
        return 1  # causal
    tokens = 2  # of a rank: at least one in each of zigzag's chunks
    source = (rank - hop) % RANKS
    first, count, _ = seen(kind.chunks(rank, RANKS), kind.chunks(source, RANKS), tokens)
    return 2 * (tokens - first) * count // tokens**2


def draw_hops():
    drawing = Drawing(760, 210)
    drawing.text(10, 20, "Work at each hop around a ring of 4 ranks; a hop takes as long as its "
                 "slowest rank", kind="title")
    for place, attn in enumerate(("ring", "zigzag")):
        x = 30 + 370 * place
        drawing.text(x, 46, attn, kind="title")
        for hop in range(RANKS):
            drawing.text(x + 60 + 60 * hop, 64, f"hop {hop}", kind="small")
        for rank in range(RANKS):
            y = 72 + 30 * rank
            drawing.text(x, y + 15, f"rank {rank}")
            # 1 is causal attention among a rank's own tokens, 2 is attention without a mask
            row = [work(RINGS[attn], rank, hop) for hop in range(RANKS)]
            for hop, share in enumerate(row):
                drawing.box(x + 60 + 60 * hop, y, 52, 22, kind="idle")
                drawing.box(x + 60 + 60 * hop, y, 52 * share / 2, 22, COLORS["parameters"])
            drawing.text(x + 304, y + 15, f"{sum(row):g}")
    drawing.save("hops.svg")


# ---- buckets -------------------------------------------------------------------


def measure_buckets():
    """In microseconds: how long backward takes, and each bucket's all-reduce from its start on."""
    with tempfile.TemporaryDirectory() as folder:
        report(2, "ddp.py", [*RUN.split(), "--bucket-mb", 4, "--profile", folder])
        trace = json.loads(Path(folder, "ddp-scratch-rank0.json").read_text())["traceEvents"]
    backward = spans_of(trace, "autograd::engine::evaluate_function")
    first = backward[0][0]
    buckets = [[round(start - first), round(end - first)]
               for start, end in spans_of(trace, "gloo:all_reduce")]
    write("buckets", {"backward": round(backward[-1][1] - first), "buckets": buckets})


def spans_of(trace, name):
    """-> [[start, end]] of the events whose name begins so, in order"""
    events = [event for event in trace if event.get("ph") == "X" and event["name"].startswith(name)]
    return sorted([event["ts"], event["ts"] + event["dur"]] for event in events)


def draw_buckets():
    figures = read("buckets")
    buckets = figures["buckets"]
    last = max(figures["backward"], buckets[-1][1])
    scale = 640 / last
    drawing = Drawing(820, 90 + 22 * len(buckets))
    drawing.text(10, 20, "Backward on one of two ranks, and the buckets that travel meanwhile",
                 kind="title")
    drawing.text(112, 52, "backward", "end")
    drawing.box(120, 40, scale * figures["backward"], 16, COLORS["B"])
    for number, (start, end) in enumerate(buckets):
        y = 64 + 22 * number
        drawing.text(112, y + 12, f"bucket {number}", "end")
        drawing.box(120 + scale * start, y, scale * (end - start), 16, COLORS["F"])
    drawing.text(120, 80 + 22 * len(buckets), "0 ms", kind="small")
    drawing.text(760, 80 + 22 * len(buckets), f"{last / 1e3:.0f} ms", "end", "small")
    drawing.save("buckets.svg")


DRAW = (draw_held, draw_timelines, draw_hops, draw_buckets)
MEASURE = (measure_held, measure_timelines, measure_buckets)  # hops need none


def main(words):
    if words not in ([], ["--measure"]):
        print("draw.py: error: usage: python tools/draw.py [--measure]", file=sys.stderr)
        return 2
    programs = [*MEASURE, *DRAW] if words else DRAW
    for make in programs:
        make()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
