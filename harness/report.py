"""What a run tells: a table while it trains, and at the end what was proved, counted and timed."""
import json
import math
import os
import re
import sys
from pathlib import Path

from harness.usage import complain

BAR = 40  # characters of the longest bar
SHOWN = 6  # tensors that differ

# ---- the terminal ------------------------------------------------------------


def say(*words, end="\n"):
    """Print, or go on in silence if nobody reads (`| head -1`): the run is worth more."""
    try:
        print(*words, end=end, flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        print("stdout is closed: the run goes on without it", file=sys.stderr, flush=True)


def human(n):
    """Bytes for people: MB = 1e6."""
    if n >= 1e9:
        return f"{n / 1e9:.3f} GB"
    if n >= 1e4:
        return f"{n / 1e6:.3f} MB"
    return f"{n:.6g} B"


def bars(rows):
    """[(label, bytes)] -> lines with bars, the longest of BAR characters."""
    unit = max(size for _, size in rows) / BAR
    return [f"  {label:12} {'#' * round(size / unit):{BAR}} {human(size)}" for label, size in rows]


class Table:
    """The steps of a run: at most 19 lines, or more if more have a loss on held-out text. Between
    these, on a terminal, the time left."""

    def __init__(self, first, last, validates):
        self.first = first  # step
        self.last = last
        self.validates = validates  # is there a column for the loss on held-out text?
        self.spent = 0.0  # ms so far
        self.done = 0  # steps so far, of all implementations

    def head(self):
        held_out = f" {'held out':>9} {'perplexity':>11}" if self.validates else ""
        say(f"{'step':>6} {'loss':>9} {'norm':>9} {'rate':>9} {'tok/s':>9}{held_out}")

    def row(self, step, loss, norm, rate, tokens_per_second, validation=None):
        line = f"{step:6d} {loss:9.4f} {norm:9.4f} {rate:9.2e} {tokens_per_second:9,.0f}"
        if validation is not None:
            line += validation_columns(validation)
        say(line)

    def before(self, validation):
        """The loss on held-out text before the first step."""
        say(f"{'start':>6}" + " " * 40 + validation_columns(validation))

    def is_due(self, step):
        every = max(1, (self.last + 1) // 10)
        return step == self.last or step % every == 0

    def progress(self, step, ms, implementations):
        """One more step has taken so many ms."""
        self.spent += ms
        self.done += 1
        steps_left = implementations * (self.last + 1 - self.first) - self.done
        on_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: `>&-`
        if on_terminal and steps_left > 0:
            seconds = self.spent / 1e3 / self.done * steps_left
            # back to the beginning of the line: what follows is longer, and covers it
            say(f"{step + 1:6d} of {self.last + 1}, {seconds:.0f} s left   \r", end="")


def validation_columns(loss):
    return f" {loss:9.4f} {math.exp(min(loss, 700)):11.2f}"


# ---- the report --------------------------------------------------------------


def show(report):
    """The closing report. Of bytes it shows those of the first rank it lists."""
    check = report["check"]
    if check:
        say("\n" + verdict(check))
        for impl, other in check.get("others", {}).items():
            say(f"  {impl}: {gaps_of(other)}")
    mine = report["ranks"][0]
    say(f"\nrank {mine['rank']}, one step")
    held = [f"{kind} {human(size)}" for kind, size in mine["memory"].items()]
    say("  held     ", "   ".join(held))
    for name, c in mine["collectives"].items():
        moved = f"payload {human(c['payload'])}   sent {human(c['wire'])}"
        say(f"  {name:14} {c['calls']} calls   {moved}")
    for row in report["textbook"]:
        say("  textbook ", textbook_line(row))
    if report["ms_per_step"]:
        line = f"{report['ms_per_step']:.1f} ms/step, {report['tokens_per_second']:,.0f} tok/s"
        if "speedup" in report:
            line += f", {report['speedup']:.2f} times as fast as torch's own"
        say("  speed    ", line)
        flops = report["flops"]
        line = f"{flops['per_second'] / 1e12:.3g} TFLOP/s"
        if "utilization" in flops:
            line += f", {flops['utilization']:.1%} of what the GPUs could do in bf16 (MFU)"
        say("  compute  ", line)
    if check and check["passed"]:
        say("PASSED")
        say("to try next: " + NEXT)
    elif check:
        for line in check["differ"][:SHOWN]:
            say("  " + line)
        say(f"FAILED, worst gradient: {check['gradient_worst']}")


NEXT = "--impl all times the idea, ours and torch's; --dtype fp64 proves; --dry-run 512 counts"

WORDS = {
    "gradient": "gradients",
    "loss": "losses",
    "grad_norm": "gradient norms",
    "parameter": "parameters",
    "validation": "held-out losses",
}


def verdict(check):
    """What was proved, in a sentence."""
    relation = "equal"
    if not check["passed"]:
        relation = "should equal"
    proved = (f"{check['gradients_compared']} tensors' gradients {relation} one process's, "
              "and all else that training does")
    if "gradient" not in check["judged"]:
        what = "losses"
        if "validation" in check["judged"]:
            what = "losses, also on held-out text,"
        proved = f"{what} {relation} one process's, and nothing else is judged in low precision"
    return f"{proved}; worst gaps:\n  {gaps_of(check)} (tolerance {check['tolerance']:.0e})"


def gaps_of(check):
    return ", ".join(f"{word} {check[kind]:.1e}" for kind, word in WORDS.items() if kind in check)


def textbook_line(row):
    in_words = "{:g}".format if row["unit"] == "count" else human
    line = f"{row['what']} = {row['formula']} = {in_words(row['expected'])}: "
    if row["expected"] == row["measured"]:
        return line + "equal"
    return line + f"measured {in_words(row['measured'])}"


# ---- files -------------------------------------------------------------------


def write_json(path, report):
    """-> has it been written?"""
    try:
        Path(path).write_text(json.dumps(report, indent=1))
    except OSError as error:
        complain(f"--json {path}: {error.strerror}")
        return False
    return True


class StepLog:
    """--log-file FILE: a line of JSON per step, written as it happens, so that it survives a kill.

    A run that goes on from a checkpoint keeps the lines before it.
    """

    def __init__(self, path, first):
        mode = "w"
        if first and Path(path).is_file():
            # a kill may have cut off the last line; one here leaves the file as it was
            lines = re.findall(r'^({"step": (\d+).*}\n)', Path(path).read_text(), re.MULTILINE)
            new = f"{os.path.realpath(path)}.new"
            Path(new).write_text("".join(line for line, step in lines if int(step) < first))
            os.replace(new, os.path.realpath(path))
            mode = "a"
        self.file = open(path, mode, buffering=1)  # by lines
        self.full = False  # could a line not be written?

    def write(self, **figures):
        """The run goes on without a log that is full."""
        try:
            self.file.write(json.dumps(figures) + "\n")
        except OSError as error:
            if not self.full:
                complain(f"--log-file {self.file.name}: {error.strerror}: "
                         "the run goes on without it")
            self.full = True
