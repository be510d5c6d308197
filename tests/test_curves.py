"""tools/curves.py: what --log-file has written, drawn."""
import json

from conftest import SMALL, script, tool
from tools import curves


def write_log(path, losses, validation):
    """The last line is cut off."""
    lines = []
    for step, loss in enumerate(losses):
        figures = {"step": step, "loss": loss}
        figures["ms"] = 32
        figures["tokens"] = 64 * (step + 1)
        if step in validation:
            figures["validation"] = validation[step]
        lines.append(json.dumps(figures))
    path.write_text("\n".join([*lines, '{"step": 9, "lo']))


def test_points_are_where_they_belong(tmp_path):
    """A falling line from corner to corner, and a held-out loss in the middle."""
    log = tmp_path / "run.jsonl"
    write_log(log, [4.0, 3.0, 2.0, 1.0, 0.0], {2: 2.5})
    text = tool("curves", log)
    rows = [line.split("|", 1)[1] for line in text.splitlines() if "|" in line]
    assert len(rows) == 16
    columns = [rows[round(3.75 * step)].index("a") for step in range(5)]
    assert columns[0] == 0
    assert columns == sorted(columns)
    assert rows[round(15 * 1.5 / 4)].index("A") == columns[2]
    assert rows[15].rstrip().endswith("a")
    assert "a  run loss: 0 at step 4" in text
    assert "A  run held out: 2.5 at step 2" in text
    assert "the logs have loss, ms, speed" in tool("curves", log, "--what", "x", code=2)
    log.write_text("nonsense\n")
    assert "no line of it is a step" in tool("curves", log, code=2)


def test_several_files_and_smoothing(tmp_path):
    write_log(tmp_path / "one.jsonl", [1.0, 3.0, 5.0], {})
    write_log(tmp_path / "two.jsonl", [9.0, 9.0, 9.0], {})
    logs = {name: curves.read_log(tmp_path / name) for name in ("one.jsonl", "two.jsonl")}
    smooth = curves.curves_of(logs, "loss", "tokens", 2)
    assert smooth[0].points == [(64, 1.0), (128, 2.0), (192, 4.0)]
    assert smooth[1].points == [(64, 9.0), (128, 9.0), (192, 9.0)]
    assert [curve.letter for curve in smooth] == ["a", "b"]


def test_the_log_of_a_run(tmp_path):
    log = tmp_path / "ddp.jsonl"
    flags = ("--steps", "4", "--eval-every", "2", "--no-check", "--log-file", str(log))
    loss = script("ddp", 2, *SMALL, *flags)["loss"]
    text = tool("curves", log)
    assert f"a  ddp loss: {loss[-1]:.4g} at step 3" in text
    assert "A  ddp held out: " in text
    for what in ("rate", "speed", "held", "peak"):
        assert f"a  ddp {what}: " in tool("curves", log, "--what", what)
