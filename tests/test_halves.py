import shutil
import subprocess
import sys
from pathlib import Path

CASES = """
import os, pytest, time
@pytest.mark.parametrize("i", range(300))
def test(i):
    with open("runs", "a") as file:
        print(i, os.getpid(), file=file)
    time.sleep(0.01)
    assert i not in (1, 298), f"this is {i}"
"""


def test_each_test_runs_once(tmp_path):
    """By two processes; one line at the end counts all of them."""
    (tmp_path / "test_cases.py").write_text(CASES)
    shutil.copy(Path(__file__).with_name("halves.py"), tmp_path / "conftest.py")
    command = [sys.executable, "-m", "pytest", "-q"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "2 failed, 298 passed" in done.stdout and "this is 298" in done.stdout
    runs = [line.split() for line in (tmp_path / "runs").read_text().splitlines()]
    assert sorted(int(i) for i, _ in runs) == list(range(300))
    assert len({process for _, process in runs}) == 2
