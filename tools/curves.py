"""Draws what --log-file FILE has written: in the terminal, and as SVG.

    python tools/curves.py FILES                        loss, and held-out loss where there is one
    python tools/curves.py FILES --what rate            or norm, ms, loss, validation
    python tools/curves.py FILES --over tokens --smooth 10 --svg curves.svg

Every file is a letter, small for training and capital for held-out text. A log that a kill has cut
off, or one that is still being written, is drawn as far as it goes.
"""
import argparse
import json
import math
import os
import shutil
import sys
import warnings
from collections import namedtuple
from pathlib import Path

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch can do without
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness.usage import require  # noqa: E402
from tools.draw import Drawing  # noqa: E402

WHAT = ("loss", "validation", "norm", "rate", "ms")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")

# points: [(x, y)] in the order of the log, y finite
Curve = namedtuple("Curve", "label letter points")


# ---- reading -------------------------------------------------------------------


def read_log(path):
    """-> the lines of a log, dicts; one that is not whole is left out."""
    lines = []
    try:
        text = Path(path).read_text()
    except OSError as error:
        require(False, f"{path}: {error.strerror}")  # ends the program
    except UnicodeDecodeError:
        require(False, f"{path}: is no text")
    for line in text.splitlines():
        try:
            figures = json.loads(line)
        except ValueError:
            continue
        if isinstance(figures, dict) and "step" in figures:
            lines.append(figures)
    require(lines, f"{path}: no line of it is a step: --log-file FILE of any script writes them")
    return lines


def points_of(lines, what, over):
    """-> [(x, y)] where there is a finite number."""
    points = []
    for figures in lines:
        x = figures.get(over)
        y = figures.get(what)
        if x is not None and y is not None and math.isfinite(y):
            points.append((x, y))
    return points


def smoothed(points, count):
    """Each y is the mean of the last `count`."""
    smooth = []
    for i, (x, _) in enumerate(points):
        first = max(0, i + 1 - count)
        last = [y for _, y in points[first:i + 1]]
        smooth.append((x, sum(last) / len(last)))
    return smooth


def curves_of(files, wanted, over, count):
    """-> [Curve], those with points."""
    curves = []
    for letter, path in zip(LETTERS, files):
        lines = read_log(path)
        for what in wanted:
            points = points_of(lines, what, over)
            if not points:
                continue
            name = Path(path).stem
            if what == "validation":  # not smoothed: each is a mean over batches already
                curve = Curve(f"{name} held out", letter.upper(), points)
            else:
                curve = Curve(f"{name} {what}", letter, smoothed(points, count))
            curves.append(curve)
    require(curves, f"no {' or '.join(wanted)} in {', '.join(map(str, files))}")
    return curves


# ---- drawing -------------------------------------------------------------------


def bounds(curves, axis):
    """-> (low, high) of all points' x (axis 0) or y (axis 1), never the same."""
    values = [point[axis] for curve in curves for point in curve.points]
    low = min(values)
    high = max(values)
    if low == high:
        return low - 0.5, high + 0.5
    return low, high


def number(value):
    return f"{value:.4g}"


def in_the_terminal(curves, over, width, height):
    """-> lines of text. Where curves meet, the later one is seen."""
    left, right = bounds(curves, 0)
    bottom, top = bounds(curves, 1)
    rows = [[" "] * width for _ in range(height)]
    for curve in curves:
        for x, y in curve.points:
            column = round((x - left) / (right - left) * (width - 1))
            row = round((top - y) / (top - bottom) * (height - 1))
            rows[row][column] = curve.letter
    lines = []
    for i, row in enumerate(rows):
        label = ""
        if i % 5 == 0 or i == height - 1:
            label = number(top - i / (height - 1) * (top - bottom))
        lines.append(f"{label:>9} |{''.join(row)}".rstrip())
    lines.append(" " * 10 + "+" + "-" * width)
    ends = f"{number(left)} {over}"
    lines.append(" " * 11 + ends + number(right).rjust(width - len(ends)))
    for curve in curves:
        x, y = curve.points[-1]
        lines.append(f"  {curve.letter}  {curve.label}: {number(y)} at {over} {number(x)}")
    return lines


def ticks(low, high, count=5):
    """Round numbers between low and high, `count` or so."""
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    steps = [power, 2 * power, 5 * power, 10 * power]
    step = min(steps, key=lambda one: abs(one - rough))
    first = math.ceil(low / step)
    last = math.floor(high / step)
    return [i * step for i in range(first, last + 1)]


def as_svg(curves, over, path):
    drawing = Drawing(720, 360 + 16 * len(curves))
    left, right = bounds(curves, 0)
    bottom, top = bounds(curves, 1)

    def place(x, y):
        across = 60 + (x - left) / (right - left) * 640
        down = 20 + (top - y) / (top - bottom) * 280
        return across, down

    drawing.line([place(left, top), place(left, bottom), place(right, bottom)])
    for x in ticks(left, right):
        across, down = place(x, bottom)
        drawing.text(across, down + 16, number(x), "middle")
    for y in ticks(bottom, top):
        across, down = place(left, y)
        drawing.text(across - 6, down + 4, number(y), "end")
    drawing.text(380, 332, over, "middle")
    for i, curve in enumerate(curves):
        color = COLORS[i % len(COLORS)]
        drawing.line([place(x, y) for x, y in curve.points], color, "line")
        drawing.box(60, 344 + 16 * i, 12, 10, color)
        drawing.text(78, 353 + 16 * i, curve.label)
    try:
        drawing.save(Path(path).resolve())  # a relative path would be one in docs/
    except OSError as error:
        require(False, f"--svg {path}: {error.strerror}")


# ---- the program ---------------------------------------------------------------


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.error = lambda message: require(False, message)
    parser.add_argument("files", nargs="+", metavar="FILE", help="what --log-file has written")
    parser.add_argument("--what", choices=WHAT, help="one figure (loss and validation)")
    parser.add_argument("--over", choices=("step", "tokens"), default="step", help="along (step)")
    parser.add_argument("--smooth", type=int, default=1, help="mean of so many steps (1)")
    parser.add_argument("--height", type=int, default=16, help="lines in the terminal (16)")
    parser.add_argument("--svg", default="", metavar="FILE", help="draw that, too")
    args = parser.parse_args()
    require(args.smooth >= 1, f"--smooth {args.smooth}: must be 1 or more")
    require(args.height >= 2, f"--height {args.height}: must be 2 or more")
    require(len(args.files) <= len(LETTERS), f"{len(args.files)} files: {len(LETTERS)} at most")
    return args


def main():
    args = arguments()
    wanted = ("loss", "validation")
    if args.what:
        wanted = (args.what,)
    curves = curves_of(args.files, wanted, args.over, args.smooth)
    width = max(20, shutil.get_terminal_size().columns - 14)
    try:
        print("\n".join(in_the_terminal(curves, args.over, width, args.height)), flush=True)
    except BrokenPipeError:  # whoever reads, such as `| head`, has closed the pipe
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # else the flush at exit fails as well
    if args.svg:
        as_svg(curves, args.over, args.svg)


if __name__ == "__main__":
    main()
