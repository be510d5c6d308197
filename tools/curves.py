"""Draws what --log-file FILE has written, in the terminal.

    ./run.sh curves FILES                           loss, and held-out loss where there is one
    ./run.sh curves FILES --what rate               or speed (tokens a second), or what the log has
    ./run.sh curves FILES --over tokens --smooth 10

Every file is a letter, small for training and capital for held-out text. A log that a kill has cut
off, or one that is still being written, is drawn as far as it goes.
"""
import argparse
import contextlib
import json
import math
import shutil
import signal
import sys
from collections import deque, namedtuple
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness.flags import check_bounds, require  # noqa: E402

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ALONG = ("step", "tokens")

# points: [(x, y)] in the order of the log, y finite
Curve = namedtuple("Curve", "label letter points")


# ---- reading -------------------------------------------------------------------


def read_log(path):
    """-> the lines of a log, dicts; one that is not whole is left out."""
    lines = []
    try:
        text = Path(path).read_text(errors="replace")
    except OSError as error:
        require(False, f"{path}: {error.strerror}")  # ends the program
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    lines = [figures for figures in lines if isinstance(figures, dict) and "step" in figures]
    for figures in lines:
        if figures.get("ms") and "tokens" in figures:
            of_a_step = figures["tokens"] / (figures["step"] + 1)
            figures["speed"] = 1e3 * of_a_step / figures["ms"]
    require(lines, f"{path}: no line of it is a step: --log-file FILE of any script writes them")
    return lines


def figures_in(logs):
    """-> what can be drawn of logs, loss first. Held-out loss is drawn with the loss."""
    names = {name: True for lines in logs.values() for figures in lines for name in figures}
    return [name for name in names if name not in (*ALONG, "validation")]


def points_of(lines, what, over):
    """-> [(x, y)] where there is a finite number."""
    points = [(figures.get(over), figures.get(what)) for figures in lines]
    return [(x, y) for x, y in points
            if x is not None and isinstance(y, (int, float)) and math.isfinite(y)]


def smoothed(points, count):
    """Each y is the mean of the last `count`."""
    last = deque(maxlen=count)
    smooth = []
    for x, y in points:
        last.append(y)
        smooth.append((x, sum(last) / len(last)))
    return smooth


def curves_of(logs, what, over, count):
    """logs: {path: lines} -> [Curve], those with points."""
    curves = []
    for letter, (path, lines) in zip(LETTERS, logs.items()):
        name = Path(path).stem
        points = points_of(lines, what, over)
        if points:
            curves.append(Curve(f"{name} {what}", letter, smoothed(points, count)))
        held_out = points_of(lines, "validation", over)
        if what == "loss" and held_out:  # not smoothed: each is a mean over batches already
            curves.append(Curve(f"{name} held out", letter.upper(), held_out))
    return curves


# ---- drawing -------------------------------------------------------------------


def bounds(curves, axis):
    """-> the smallest and largest x (axis 0) or y (axis 1) of all curves, never the same."""
    values = [point[axis] for curve in curves for point in curve.points]
    if min(values) == max(values):
        return values[0] - 0.5, values[0] + 0.5
    return min(values), max(values)


def in_the_terminal(curves, over, width, height=16):
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
            label = f"{top - i / (height - 1) * (top - bottom):.4g}"
        lines.append(f"{label:>9} |{''.join(row)}".rstrip())
    lines.append(" " * 10 + "+" + "-" * width)
    ends = f"{left:.4g} {over}"
    lines.append(" " * 11 + ends + f"{right:.4g}".rjust(width - len(ends)))
    for curve in curves:
        x, y = curve.points[-1]
        lines.append(f"  {curve.letter}  {curve.label}: {y:.4g} at {over} {x:.4g}")
    return lines


# ---- the program ---------------------------------------------------------------


def main():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, without a traceback
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.error = lambda message: require(False, message)
    parser.add_argument("files", nargs="+", metavar="FILE", help="what --log-file has written")
    parser.add_argument("--what", default="loss", help="which figure (loss)")
    parser.add_argument("--over", choices=ALONG, default="step", help="along (step)")
    parser.add_argument("--smooth", type=int, default=1, help="mean of so many steps (1)")
    args = parser.parse_args()
    check_bounds("--smooth", args.smooth, 1)
    require(len(args.files) <= len(LETTERS), f"{len(args.files)} files: {len(LETTERS)} at most")
    logs = {path: read_log(path) for path in args.files}
    names = figures_in(logs)
    require(args.what in names, f"--what {args.what}: the logs have {', '.join(names)}")
    curves = curves_of(logs, args.what, args.over, args.smooth)
    require(curves, f"no finite number to draw in {', '.join(args.files)}")
    width = max(20, shutil.get_terminal_size().columns - 14)
    print("\n".join(in_the_terminal(curves, args.over, width)), flush=True)


if __name__ == "__main__":
    main()
