"""Two processes share out a long run of tests, since most tests leave a core idle.

The first one takes tests from the front. It starts a second pytest that takes them from the back,
and shows what that one reports beside its own. conftest.py takes pytest's hook from here.
"""
import contextlib
import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

SECOND = "HALVES_SECOND"  # environment variable of the second process: its pipe, the claims' folder
MANY = 100  # tests; for fewer one process will do


def pytest_runtestloop(session):
    """-> True: the tests have run. None: pytest is to run them one after the other."""
    if SECOND in os.environ:
        pipe, folder = os.environ.pop(SECOND).split(" ", 1)
        run_from_the_back(session, Path(folder), Connection(int(pipe)))
        return True
    option = session.config.option
    is_watched = option.usepdb or option.trace or option.capture == "no"
    is_alone = is_watched or option.collectonly or option.basetemp  # which the second would empty
    if session.testsfailed or is_alone or len(session.items) < MANY:
        return None
    with tempfile.TemporaryDirectory() as folder:
        run_from_the_front(session, Path(folder))
    return True


def run_from_the_front(session, folder):
    config = session.config
    reports, pipe = multiprocessing.Pipe(duplex=False)
    command = [sys.executable, "-m", "pytest", *map(str, config.invocation_params.args)]
    second = subprocess.Popen(
        command, cwd=config.invocation_params.dir, stdout=subprocess.DEVNULL,
        env={**os.environ, SECOND: f"{pipe.fileno()} {folder}"}, pass_fds=[pipe.fileno()])
    pipe.close()  # so that it ends with the second process

    def show(until_the_end):
        """What the second process reports is counted and printed as if it were from here."""
        with contextlib.suppress(EOFError):
            while until_the_end or reports.poll():
                data = reports.recv()
                report = config.hook.pytest_report_from_serializable(config=config, data=data)
                config.hook.pytest_runtest_logreport(report=report)
                stop_if_asked(session)

    try:
        for _ in run_unclaimed(session, session.items, folder):
            show(until_the_end=False)
        show(until_the_end=True)
        code = second.wait()
    finally:
        second.send_signal(signal.SIGINT)  # if it is there still
        second.wait()
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        pytest.exit(f"the second half of the tests ended with {code}", returncode=1)


def run_from_the_back(session, folder, pipe):
    config = session.config

    class Reports:
        def pytest_runtest_logreport(self, report):
            pipe.send(config.hook.pytest_report_to_serializable(config=config, report=report))

    config.pluginmanager.register(Reports())
    for _ in run_unclaimed(session, session.items[::-1], folder):
        pass


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
    with contextlib.suppress(FileExistsError):
        owner.touch(exist_ok=False)
        return True
    return False


def stop_if_asked(session):
    """As pytest's own loop does, for --maxfail."""
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
