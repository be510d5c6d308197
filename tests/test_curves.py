"""tools/curves.py: what --log-file has written, drawn."""
import json

from conftest import SMALL, program, script


def tool(*words, code=0):
    ended, said, errors = program("tools/curves.py", *words)
    assert ended == code and errors.count("\n") == code // 2, errors
    return errors or said


def test_points_are_where_they_belong(tmp_path):
    """A falling line from corner to corner, and a held-out loss in the middle."""
    lines = []
    for step in range(5):
        lines.append(json.dumps({"step": step, "loss": 4.0 - step}))
    lines[2] = json.dumps({"step": 2, "loss": 2.0, "validation": 2.5})
    log = tmp_path / "run.jsonl"
    log.write_text("\n".join([*lines, '{"step": 5, "lo']))  # cut off
    text = tool(log)
    rows = [line.split("|", 1)[1] for line in text.splitlines() if "|" in line]
    assert len(rows) == 16
    columns = [rows[round(3.75 * step)].index("a") for step in range(5)]
    assert columns[0] == 0 and columns == sorted(columns)
    assert rows[round(15 * 1.5 / 4)].index("A") == columns[2]
    assert "a  run loss: 0 at step 4" in text
    assert "A  run held out: 2.5 at step 2" in text
    log.write_text("nonsense\n")
    assert "no line of it is a step" in tool(log, code=2)


def test_the_log_of_a_run(tmp_path):
    log = tmp_path / "ddp.jsonl"
    report = script("ddp", 2, *SMALL, "--steps", "4", "--eval-every", "2", "--no-check",
                    "--log-file", str(log))
    text = tool(log)
    assert f"a  ddp loss: {report['loss'][-1]:.4g} at step 3" in text
    assert "A  ddp held out: " in text
    assert "a  ddp speed: " in tool(log, log, "--what", "speed")
    assert "no finite number of x" in tool(log, "--what", "x", code=2)
