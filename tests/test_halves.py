"""Two processes run each test once, and one line at the end counts all of them."""
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
CONFTEST = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from halves import pytest_runtestloop
"""
CASES = """
import os
import time
from pathlib import Path

import pytest

@pytest.mark.parametrize("i", range(300))
def test(i):
    with open(Path(__file__).parent / "runs", "a") as file:
        print(i, os.getpid(), file=file)
    time.sleep(0.01)
    assert i not in (1, 298), f"this is {i}"
"""


def pytest_in(folder, *flags):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags, str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_each_test_runs_once(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_cases.py").write_text(CASES)
    done = pytest_in(tmp_path)
    assert done.returncode == 1
    assert "2 failed, 298 passed" in done.stdout
    for failed in 1, 298:
        assert f"AssertionError: this is {failed}" in done.stdout
    runs = [line.split() for line in (tmp_path / "runs").read_text().splitlines()]
    assert sorted(int(i) for i, _ in runs) == list(range(300))
    assert len({process for _, process in runs}) == 2
