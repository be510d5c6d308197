"""tools/curves.py: what --log-file has written, drawn."""
import json
import re

from conftest import SMALL, program, script
from tools import curves


def tool(*words, code=0):
    ended, said, errors = program("tools/curves.py", *words)
    assert ended == code, errors
    if code:
        assert re.fullmatch(r"curves\.py: error: .*\n", errors), errors
        return errors
    return said


def write_log(path, losses, validation):
    lines = []
    for step, loss in enumerate(losses):
        figures = {"step": step, "loss": loss, "ms": 32, "tokens": 64 * (step + 1)}
        if step in validation:
            figures["validation"] = validation[step]
        lines.append(json.dumps(figures))
    path.write_text("\n".join(lines) + "\n")


def grid(text):
    """The picture's rows, without labels."""
    rows = [line.split("|", 1)[1] for line in text.splitlines() if "|" in line]
    return [row.ljust(max(map(len, rows))) for row in rows]


def test_points_are_where_they_belong(tmp_path):
    """A falling line from corner to corner, and a held-out loss in the middle."""
    write_log(tmp_path / "run.jsonl", [4.0, 3.0, 2.0, 1.0, 0.0], {2: 2.5})
    text = tool(tmp_path / "run.jsonl")
    rows = grid(text)
    assert len(rows) == 16
    columns = [rows[round(3.75 * step)].index("a") for step in range(5)]
    assert columns[0] == 0 and columns == sorted(columns)
    assert rows[round(15 * 1.5 / 4)].index("A") == columns[2]
    assert rows[15].rstrip().endswith("a")
    assert "a  run loss: 0 at step 4" in text
    assert "A  run held out: 2.5 at step 2" in text


def test_several_files_and_smoothing(tmp_path):
    write_log(tmp_path / "one.jsonl", [1.0, 3.0, 5.0], {})
    write_log(tmp_path / "two.jsonl", [9.0, 9.0, 9.0], {})
    logs = {name: curves.read_log(tmp_path / name) for name in ("one.jsonl", "two.jsonl")}
    smooth = curves.curves_of(logs, "loss", "tokens", 2)
    assert smooth[0].points == [(64, 1.0), (128, 2.0), (192, 4.0)]
    assert smooth[1].points == [(64, 9.0), (128, 9.0), (192, 9.0)]
    assert [curve.letter for curve in smooth] == ["a", "b"]
    speeds = curves.curves_of(logs, "speed", "step", 1)[0].points
    assert speeds == [(0, 2e3), (1, 2e3), (2, 2e3)]


def test_what_is_no_whole_log(tmp_path):
    log = tmp_path / "run.jsonl"
    write_log(log, [4.0, 2.0], {})
    log.write_text(log.read_text() + '{"step": 2, "lo')
    assert "2 at step 1" in tool(log)
    assert "the logs have loss, ms, speed" in tool(log, "--what", "x", code=2)
    log.write_text("nonsense\n")
    assert "no line of it is a step" in tool(log, code=2)


def test_the_log_of_a_run(tmp_path):
    log = tmp_path / "ddp.jsonl"
    report = script("ddp", 2, *SMALL, "--steps", "4", "--eval-every", "2", "--no-check",
                    "--log-file", str(log))
    text = tool(log)
    assert f"a  ddp loss: {report['loss'][-1]:.4g} at step 3" in text
    assert "A  ddp held out: " in text
    for what in ("rate", "speed", "held", "peak"):
        assert f"a  ddp {what}: " in tool(log, "--what", what)
