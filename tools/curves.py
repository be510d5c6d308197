"""Draws in the terminal what --log-file FILE has written.

    ./run.sh curves FILES                   loss, and held-out loss where there is one
    ./run.sh curves FILES --what rate       or speed (tokens a second), or what the log has

Every file is a letter, small for training and capital for held-out text. A log that a kill has cut
off, or one that is still being written, is drawn as far as it goes.
"""
import argparse
import json
import math
import shutil
import signal
import sys
from collections import namedtuple
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness.usage import require  # noqa: E402

LETTERS = "abcdefghijklmnopqrstuvwxyz"
HEIGHT = 16  # lines of text

# points: [(step, y)], y finite
Curve = namedtuple("Curve", "label letter points")


def read_log(path):
    """-> the lines of a log, dicts; one that is not whole is left out."""
    lines = []
    try:
        text = Path(path).read_text(errors="replace")
    except OSError as error:
        require(False, f"{path}: {error.strerror}")  # ends the program
    for line in text.splitlines():
        try:
            figures = json.loads(line)
        except ValueError:
            continue
        if isinstance(figures, dict) and "step" in figures:
            if figures.get("ms") and "tokens" in figures:
                of_a_step = figures["tokens"] / (figures["step"] + 1)
                figures["speed"] = 1e3 * of_a_step / figures["ms"]
            lines.append(figures)
    require(lines, f"{path}: no line of it is a step: --log-file FILE of any script writes them")
    return lines


def points_of(lines, what):
    """-> [(step, y)] where there is a finite number."""
    points = []
    for figures in lines:
        y = figures.get(what)
        if isinstance(y, (int, float)) and math.isfinite(y):
            points.append((figures["step"], y))
    return points


def curves_of(paths, what):
    """-> [Curve], those with points."""
    curves = []
    for letter, path in zip(LETTERS, paths):
        name = Path(path).stem
        lines = read_log(path)
        curves.append(Curve(f"{name} {what}", letter, points_of(lines, what)))
        if what == "loss":
            held_out = points_of(lines, "validation")
            curves.append(Curve(f"{name} held out", letter.upper(), held_out))
    return [curve for curve in curves if curve.points]


def bounds(values):
    """-> the smallest and the largest, never the same."""
    low = min(values)
    high = max(values)
    if low == high:
        return low - 0.5, high + 0.5
    return low, high


def drawn(curves, width):
    """-> lines of text. Where curves meet, the later one is seen."""
    points = [point for curve in curves for point in curve.points]
    left, right = bounds([x for x, _ in points])
    bottom, top = bounds([y for _, y in points])
    rows = [[" "] * width for _ in range(HEIGHT)]
    for curve in curves:
        for x, y in curve.points:
            column = round((x - left) / (right - left) * (width - 1))
            row = round((top - y) / (top - bottom) * (HEIGHT - 1))
            rows[row][column] = curve.letter
    lines = []
    for i, row in enumerate(rows):
        label = ""
        if i % 5 == 0:
            label = f"{top - i / (HEIGHT - 1) * (top - bottom):.4g}"
        lines.append(f"{label:>9} |{''.join(row)}".rstrip())
    lines.append(" " * 10 + "+" + "-" * width)
    ends = f"{left:.4g} step"
    lines.append(" " * 11 + ends + f"{right:.4g}".rjust(width - len(ends)))
    for curve in curves:
        x, y = curve.points[-1]
        lines.append(f"  {curve.letter}  {curve.label}: {y:.4g} at step {x}")
    return lines


def main():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, without a traceback
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.error = lambda message: require(False, message)
    parser.add_argument("files", nargs="+", metavar="FILE", help="what --log-file has written")
    parser.add_argument("--what", default="loss", help="what is drawn (loss)")
    args = parser.parse_args()
    require(len(args.files) <= len(LETTERS), f"{len(args.files)} files: {len(LETTERS)} at most")
    curves = curves_of(args.files, args.what)
    require(curves, f"no finite number of {args.what} in {', '.join(args.files)}")
    width = max(20, shutil.get_terminal_size().columns - 14)
    print("\n".join(drawn(curves, width)), flush=True)


if __name__ == "__main__":
    main()
