"""The pictures in docs/: SVG drawn from what runs have measured.

    python tools/draw.py                      draw docs/*.svg from the figures in docs/data/
    python tools/draw.py --measure            run everything first (minutes), keep its figures
    python tools/draw.py --measure held ..    run for these pictures only

    held.svg        what one of 64 ranks holds of a 7.4B model, from dry runs
    timelines.svg   pipeline schedules: planned, and as a run of two ranks measured it
    hops.svg        who works how much at which hop of ring and zigzag attention
    buckets.svg     ddp's buckets travelling while backward runs, from a profile
    losses.svg      eight techniques, one loss curve; a mixture of experts beside it
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PLACE = ROOT / "docs"  # of the pictures
DATA = ROOT / "docs" / "data"

COLORS = {
    "parameters": "#4477aa",
    "gradients": "#ee6677",
    "optimizer": "#ccbb44",
    "activations": "#66ccee",
    # actions of a pipeline: forward, backward, gradients of weights, update
    "F": "#4477aa",
    "B": "#ee6677",
    "W": "#ccbb44",
    "U": "#aa3377",
}
STYLE = """
text { font: 12px sans-serif; fill: #222 } .small { font-size: 10px } .title { font-weight: bold }
.axis { stroke: #888; fill: none } .idle { fill: #8884 } .key { stroke: #888 }
.line { fill: none; stroke-linejoin: round }
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
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{words}</text>'
        )

    def box(self, x, y, width, height, color="", kind=""):
        paint = f' fill="{color}"' if color else ""
        self.elements.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.2f}" height="{height:.1f}" '
            f'class="{kind}"{paint}/>'
        )

    def line(self, points, color="", kind="axis", width=1):
        paint = f' stroke-width="{width}"'
        if color:
            paint += f' stroke="{color}"'
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.elements.append(f'<polyline points="{path}" class="{kind}"{paint}/>')

    def save(self, name):
        """Into docs/, or where an absolute path says."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}"><style>{STYLE}</style>\n'
        )
        (PLACE / name).write_text(head + "\n".join(self.elements) + "\n</svg>\n")


def read(name):
    return json.loads((DATA / f"{name}.json").read_text())


def write(name, figures):
    DATA.mkdir(parents=True, exist_ok=True)
    (DATA / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")


def report_of(command):
    """Runs python with this command -> the --json report that it has written."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        words = [sys.executable, *command.split(), "--json", str(path)]
        subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())


# ---- what a rank holds ---------------------------------------------------------

SIZES = "--layers 64 --width 3072 --heads 64 --vocab 51200 --seq 2048 --batch 64"
HOLDERS = {
    "ddp": "ddp.py",
    "zero, stage 1": "zero.py --stage 1",
    "zero, stage 2": "zero.py --stage 2",
    "zero, stage 3": "zero.py --stage 3",
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
        report = report_of(f"{command} {SIZES} --dry-run 64")
        memory = report["ranks"][0]["memory"]
        figures[label] = {kind: memory[kind] for kind in HELD}
    write("held", figures)


def draw_held():
    figures = read("held")
    left = 170
    scale = 540 / max(sum(sizes.values()) for sizes in figures.values())
    drawing = Drawing(820, 70 + 28 * len(figures))
    drawing.text(10, 20, TITLE, kind="title")
    x = left
    for kind in HELD:
        drawing.box(x, 32, 12, 12, COLORS[kind])
        drawing.text(x + 16, 42, kind)
        x += 110
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
DRAWN = (
    "naive", "gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "auto",
)


def simulated(schedule):
    """-> {bubble: idle part, rows: [(kind, micro-batch, start, end)] per rank}; F = B = W = 1."""
    from harness.timeline import bubble_rate, costs, simulate
    from pipeline_parallel import make_plans

    plans = make_plans(schedule, STAGES, MICRO)
    played = simulate(plans, costs(plans, 1.0, 1.0, 1.0))
    rows = []
    for done in played:
        rows.append([(action.kind, action.microbatch, start, end) for action, start, end in done])
    return {"bubble": bubble_rate(played), "rows": rows}


def measured(schedule):
    """The same of a run on two ranks, in ms."""
    command = (
        f"tools/launch.py 2 pipeline_parallel.py --schedule {schedule} --micro {MICRO} --layers 8 "
        "--width 256 --heads 8 --seq 256 --batch 16 --steps 4 --no-check"
    )
    report = report_of(command)
    rows = []
    for done in report["timeline"]:
        rows.append([(kind, micro, start, end) for kind, micro, _, start, end in done])
    return {"bubble": report["bubble_rate"], "rows": rows}


def measure_timelines():
    figures = {}
    for schedule in DRAWN:
        figures[schedule] = {"planned": simulated(schedule), "measured": measured(schedule)}
    write("timelines", figures)


def draw_rows(drawing, x, y, width, played):
    """The ranks of a timeline, one below the other, each 12 high."""
    actions = [action for row in played["rows"] for action in row]
    first = min(start for _, _, start, _ in actions)
    last = max(end for _, _, _, end in actions)
    scale = width / (last - first)
    for number, row in enumerate(played["rows"]):
        top = y + 14 * number
        drawing.box(x, top, width, 12, kind="idle")
        for kind, _, start, end in row:
            left = x + scale * (start - first)
            drawing.box(left, top, scale * (end - start) - 0.4, 12, COLORS[kind])


def draw_timelines():
    figures = read("timelines")
    height = 40 + 84 * len(figures)
    drawing = Drawing(900, height)
    title = f"{MICRO} micro-batches: 4 stages as planned, F = B = W, and 2 ranks as measured"
    drawing.text(10, 20, title, kind="title")
    for number, (schedule, sides) in enumerate(figures.items()):
        y = 40 + 84 * number
        drawing.text(10, y + 12, schedule, kind="title")
        for x, side in ((110, "planned"), (510, "measured")):
            drawing.text(x, y + 10, f"{side}: bubble {sides[side]['bubble']:.1%}", kind="small")
            draw_rows(drawing, x, y + 16, 370, sides[side])
    legend = (("F", "forward"), ("B", "backward"), ("W", "weights"))
    for number, (kind, words) in enumerate(legend):
        x = 620 + 90 * number
        drawing.box(x, 10, 12, 12, COLORS[kind])
        drawing.text(x + 16, 20, words)
    drawing.save("timelines.svg")


# ---- rings ---------------------------------------------------------------------

RANKS = 4


def work_of(kind):
    """-> for each rank its work at each hop. 1 is causal attention among a rank's own tokens."""
    tokens = 2  # a rank's: one for each chunk of zigzag
    unit = tokens * tokens / 2
    rows = []
    for cp_rank in range(RANKS):
        ring = kind(cp_rank=cp_rank, cp=RANKS)
        row = []
        for hop in range(RANKS):
            wanted = ring.wanted(hop, tokens)
            pairs = (tokens - wanted.first_query) * wanted.keys
            if wanted.causal:
                pairs /= 2
            row.append(pairs / unit)
        rows.append(row)
    return rows


def measure_hops():
    from context_parallel import Ring, Zigzag

    write("hops", {"ring": work_of(Ring), "zigzag": work_of(Zigzag)})


def draw_hops():
    figures = read("hops")
    drawing = Drawing(760, 210)
    drawing.text(10, 20, "Work at each hop around a ring of 4 ranks; a hop takes as long as its "
                 "slowest rank", kind="title")
    for place, (label, rows) in enumerate(figures.items()):
        x = 30 + 370 * place
        drawing.text(x, 46, label, kind="title")
        for hop in range(RANKS):
            drawing.text(x + 60 + 60 * hop, 64, f"hop {hop}", kind="small")
        for rank, row in enumerate(rows):
            y = 72 + 30 * rank
            drawing.text(x, y + 15, f"rank {rank}")
            for hop, work in enumerate(row):
                # the box is full at 2, attention without a mask
                drawing.box(x + 60 + 60 * hop, y, 52, 22, kind="idle")
                drawing.box(x + 60 + 60 * hop, y, 52 * work / 2, 22, COLORS["parameters"])
            drawing.text(x + 304, y + 15, f"{sum(row):g}")
    drawing.save("hops.svg")


# ---- buckets -------------------------------------------------------------------


def measure_buckets():
    """Spans in microseconds of a step: backward's operators, and each bucket's all-reduce."""
    with tempfile.TemporaryDirectory() as folder:
        command = (
            "tools/launch.py 2 ddp.py --layers 8 --width 256 --heads 8 --seq 256 --steps 4 "
            f"--bucket-mb 4 --no-check --profile {folder}"
        )
        report_of(command)
        trace = json.loads(Path(folder, "ddp-scratch-rank0.json").read_text())["traceEvents"]
    backward = []
    buckets = []
    for event in trace:
        if event.get("ph") != "X":
            continue
        span = [event["ts"], event["ts"] + event["dur"]]
        if event["name"].startswith("gloo:all_reduce"):
            buckets.append(span)
        elif event["name"].startswith("autograd::engine::evaluate_function"):
            backward.append(span)
    first = min(start for start, _ in backward)
    write("buckets", {
        "backward": [[start - first, end - first] for start, end in backward],
        "buckets": [[start - first, end - first] for start, end in sorted(buckets)],
    })


def draw_buckets():
    figures = read("buckets")
    buckets = figures["buckets"]
    last = max(end for spans in figures.values() for _, end in spans)
    scale = 640 / last
    drawing = Drawing(820, 90 + 22 * len(buckets))
    drawing.text(10, 20, "Backward on one of two ranks, and the buckets that travel meanwhile",
                 kind="title")
    drawing.text(112, 52, "backward", "end")
    for start, end in figures["backward"]:
        drawing.box(120 + scale * start, 40, scale * (end - start), 16, COLORS["B"])
    for number, (start, end) in enumerate(buckets):
        y = 64 + 22 * number
        drawing.text(112, y + 12, f"bucket {number}", "end")
        drawing.box(120 + scale * start, y, scale * (end - start), 16, COLORS["F"])
    drawing.text(120, 80 + 22 * len(buckets), "0 ms", kind="small")
    drawing.text(760, 80 + 22 * len(buckets), f"{last / 1e3:.0f} ms", "end", "small")
    drawing.save("buckets.svg")


# ---- losses --------------------------------------------------------------------

STEPS = 60
MIXTURE = "mixture of experts"  # another model, which has a line of its own
TRAINED = {  # ranks, file and flags, as tools/launch.py takes them
    "ddp": "2 ddp.py",
    "zero": "2 zero.py --stage 3",
    "fsdp": "2 fsdp.py",
    "tensor parallel": "2 tensor_parallel.py --sp",
    "pipeline": "2 pipeline_parallel.py --schedule zb-h1",
    "context parallel": "2 context_parallel.py",
    "accumulation, checkpointing": "2 amp_accum_ckpt.py --accum 2 --ckpt full",
    "hybrid, 2 x 2": "4 hybrid_3d.py --dp 2 --tp 2 --pp 1",
    MIXTURE: "2 moe.py",
}


def measure_losses():
    figures = {}
    for label, command in TRAINED.items():
        report = report_of(f"tools/launch.py {command} --steps {STEPS} --no-check")
        figures[label] = report["loss"]
    write("losses", figures)


def draw_losses():
    """Eight lines that are one: each is drawn thinner than the one below it."""
    figures = read("losses")
    every = [loss for losses in figures.values() for loss in losses]
    low = min(every)
    high = max(every)
    drawing = Drawing(860, 360)
    title = "Loss by step on the same text: eight techniques, one line; a mixture is another model"
    drawing.text(10, 20, title, kind="title")
    drawing.line([(60, 40), (60, 320), (620, 320)])
    for value in (low, high):
        y = 320 - 270 * (value - low) / (high - low)
        drawing.text(54, y + 4, f"{value:.2f}", "end", "small")
    palette = (
        "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#ffffff",
        "#999999",
    )
    for number, (label, losses) in enumerate(figures.items()):
        points = []
        for step, loss in enumerate(losses):
            x = 60 + 560 * step / (len(losses) - 1)
            points.append((x, 320 - 270 * (loss - low) / (high - low)))
        width = 1.5
        if label != MIXTURE:
            width = 15 - 2 * number
        drawing.line(points, palette[number], "line", width)
        drawing.box(640, 48 + 22 * number, 12, 12, palette[number], "key")
        drawing.text(658, 58 + 22 * number, label)
    drawing.text(340, 345, f"{len(losses)} steps", "middle")
    drawing.save("losses.svg")


PICTURES = {
    "held": (measure_held, draw_held),
    "timelines": (measure_timelines, draw_timelines),
    "hops": (measure_hops, draw_hops),
    "buckets": (measure_buckets, draw_buckets),
    "losses": (measure_losses, draw_losses),
}


def main(words):
    asked = words[1:]  # behind --measure
    usable = set(asked) <= set(PICTURES)
    if words and words[0] != "--measure":
        usable = False
    if not usable:
        names = " ".join(PICTURES)
        print(f"draw.py: error: usage: python tools/draw.py [--measure [{names}]]", file=sys.stderr)
        return 2
    if words:
        for name in asked or PICTURES:
            print(f"measuring {name}", flush=True)
            measure, _ = PICTURES[name]
            measure()
    for _, draw in PICTURES.values():
        draw()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
