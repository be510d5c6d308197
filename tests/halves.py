"""Two processes share out a long run of tests, since most tests leave a core idle.

The first one takes tests from the front. It starts a second pytest that takes them from the back,
and shows what that one reports beside its own. conftest.py takes pytest's hook from here.
"""
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

FOLDER = "HALVES_FOLDER"  # environment variable of the second process: where the two meet
MANY = 200  # tests; for fewer one process will do


def pytest_runtestloop(session):
    """-> True: the tests have run. None: pytest is to run them one after the other."""
    if FOLDER in os.environ:
        run_from_the_back(session, Path(os.environ.pop(FOLDER)))
        return True
    option = session.config.option
    is_watched = option.usepdb or option.trace or option.capture == "no"
    is_alone = is_watched or option.basetemp  # a folder that the second one would empty
    if session.testsfailed or option.collectonly or is_alone or len(session.items) < MANY:
        return None
    with tempfile.TemporaryDirectory() as folder:
        run_from_the_front(session, Path(folder))
    return True


# ---- the first process -----------------------------------------------------------


class Second:
    """The other process, and what it has reported so far."""

    def __init__(self, session, folder):
        self.session = session
        self.folder = folder
        invocation = session.config.invocation_params
        command = [sys.executable, "-m", "pytest", *map(str, invocation.args)]
        self.process = subprocess.Popen(command, cwd=invocation.dir, stdout=subprocess.DEVNULL,
                                        env={**os.environ, FOLDER: str(folder)})
        self.shown = 0  # reports

    def show(self):
        """Whatever has come since the last call is counted and printed, as if it were from here."""
        config = self.session.config
        while (path := self.folder / f"report {self.shown}").exists():
            data = json.loads(path.read_text())
            report = config.hook.pytest_report_from_serializable(config=config, data=data)
            config.hook.pytest_runtest_logreport(report=report)
            self.shown += 1
        stop_if_asked(self.session)

    def end(self):
        self.process.send_signal(signal.SIGINT)  # if it is there still
        return self.process.wait()


def run_from_the_front(session, folder):
    second = Second(session, folder)
    try:
        for _ in run_unclaimed(session, session.items, folder):
            second.show()
        while second.process.poll() is None:
            second.show()
            time.sleep(0.2)
        second.show()
    finally:
        code = second.end()
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        pytest.exit(f"the second half of the tests ended with {code}", returncode=1)


# ---- the second process ----------------------------------------------------------


class Reports:
    """A plugin that writes every report into a file of its own."""

    def __init__(self, config, folder):
        self.config = config
        self.folder = folder
        self.count = 0

    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        unfinished = self.folder / "unfinished"
        unfinished.write_text(json.dumps(data))
        unfinished.rename(self.folder / f"report {self.count}")
        self.count += 1


def run_from_the_back(session, folder):
    session.config.pluginmanager.register(Reports(session.config, folder))
    for _ in run_unclaimed(session, session.items[::-1], folder):
        pass


# ---- both ------------------------------------------------------------------------


def run_unclaimed(session, items, folder):
    """Runs what the other process has not claimed, and yields after each test."""
    unclaimed = (item for item in items if claim(item, folder))
    item = next(unclaimed, None)
    while item:
        # claimed before `item` runs, since pytest keeps the fixtures that both of them need
        following = next(unclaimed, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        stop_if_asked(session)
        yield
        item = following


def claim(item, folder):
    """Is this test this process's? Who comes first has it."""
    owner = folder / hashlib.sha256(item.nodeid.encode()).hexdigest()
    try:
        owner.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def stop_if_asked(session):
    """As pytest's own loop does, for --maxfail and for a test that asks for the end."""
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
