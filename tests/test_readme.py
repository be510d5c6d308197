"""What README says can be typed, can be; the figures beside dry runs and simulations are what these print."""
import importlib
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from conftest import ROOT

README = (ROOT / "README.md").read_text()
PLAIN = [line for block in re.findall(r"```\n(.*?)```", README, re.S) for line in block.splitlines()]
SPANS = re.findall(r"`([^`\n]+)`", README)
COMMANDS = sorted({re.split(r"\s+#", text)[0].strip() for text in PLAIN + SPANS
                   if re.match(r"(torchrun|python|\./run\.sh|\w+\.py) ", text)} - {"torchrun", "./run.sh"})
ROWS = re.findall(r"^\| `python (\w+)\.py ([^`]*--(?:dry-run|simulate)[^`]*)` \| (.*?)(?:; (\d+) s)? \|$", README,
                  re.M)
QUICK = [row[:3] for row in ROWS if os.environ.get("ALL") or int(row[3] or 1) <= 6]  # ALL=1 ./run.sh test: all rows


class Reached(Exception):
    """The flags are good: the run would begin."""


@pytest.mark.parametrize("command", [c for c in COMMANDS if re.search(r"\b[a-z_]\w+\.py\b", c)])
def test_the_flags_of_every_command(command, monkeypatch, tmp_path):
    """Up to the point where a run begins."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    where = next(i for i, word in enumerate(words) if word.endswith(".py"))
    ranks = next((word.split("=")[1] for word in words[:where] if word.startswith("--nproc_per_node=")), "1")
    monkeypatch.setenv("WORLD_SIZE", ranks if ranks.isdigit() else "1")
    monkeypatch.setattr(sys, "argv", words[where:])
    module = importlib.import_module(words[where][:-3])

    def reached(*_):
        raise Reached
    for name in {"Run", "simulation", "search", "table", "calibrate"} & set(vars(module)):
        monkeypatch.setattr(module, name, reached)
    with pytest.raises(Reached):
        module.main()


def test_the_words_of_run_sh():
    script = (ROOT / "run.sh").read_text()
    used = {c.split()[1] for c in COMMANDS if c.startswith("./run.sh ") and len(c.split()) > 1}
    assert used >= {"test", "bench", "soak", "sweep"}
    for word in used:
        assert re.search(rf"^  ([\w |-]*\| )?{word}( \||\))", script, re.M) or (ROOT / f"{word}.py").exists(), word


@pytest.fixture(scope="module")
def printed():
    """What these commands print; two run at a time."""
    def start(row):
        command = [sys.executable, f"{row[0]}.py", *shlex.split(row[1])]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(QUICK, pool.map(start, QUICK)))


@pytest.mark.parametrize("row", QUICK)
def test_figures_are_printed(row, printed):
    """Letter by letter; but for the seconds, which are the machine's."""
    figures = row[2].split(", ")
    assert len(figures) > 1 and printed[row].returncode == 0, printed[row].stderr
    for figure in figures:
        assert figure in printed[row].stdout, figure


def test_the_table_of_layouts(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plan.py", "--table"])
    importlib.import_module("plan").main()
    printed = capsys.readouterr().out
    assert printed.count("\n") > 5 and printed in README
