"""Two processes share out a long run of tests, since most tests leave a core idle.

Once pytest has found the tests it forks. The parent takes them from the front, the child from the
back, and the parent shows in the end what the child reports. conftest.py takes the hook from here.
"""
import json
import os
import tempfile

import pytest

MANY = 100  # tests; for fewer one process will do


def pytest_runtestloop(session):
    """-> True: the tests have run. None: pytest is to run them one after the other."""
    config = session.config
    option = config.option
    is_watched = option.usepdb or option.trace or option.capture == "no"
    is_alone = is_watched or option.collectonly or option.basetemp  # which both would empty
    if session.testsfailed or is_alone or len(session.items) < MANY:
        return None
    untaken, filled = os.pipe()  # a byte for each test that nobody has taken
    os.write(filled, bytes(len(session.items)))
    os.close(filled)
    reports = tempfile.TemporaryFile("w+")  # of the child, one a line
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # two processes cannot share the files that it writes to
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    capture.start_global_capturing()
    capture.suspend_global_capture()
    if child == 0:
        config.pluginmanager.register(Reporter(config, reports))
        run_those_left(session, reversed(session.items), untaken)
        return True
    try:
        run_those_left(session, session.items, untaken)
    finally:  # after --maxfail and Ctrl-C, too
        os.read(untaken, len(session.items))  # the child takes no more
        _, status = os.waitpid(child, 0)
        show(config, reports)
    code = os.waitstatus_to_exitcode(status)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        pytest.exit(f"the second half of the tests ended with {code}", returncode=1)
    return True


def run_those_left(session, items, untaken):
    """Runs tests until all are taken."""
    taken = (item for item in items if os.read(untaken, 1))
    item = next(taken, None)
    while item:
        # taken before `item` runs, since pytest keeps the fixtures that both of them need
        following = next(taken, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:  # --maxfail
            os.read(untaken, len(session.items))
            raise session.Failed(session.shouldfail)
        item = following


class Reporter:
    def __init__(self, config, reports):
        self.config = config
        self.reports = reports

    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        print(json.dumps(data), file=self.reports, flush=True)


def show(config, reports):
    """What the child reports is counted and printed as if it were from here."""
    reports.seek(0)
    for line in reports:
        report = config.hook.pytest_report_from_serializable(config=config, data=json.loads(line))
        config.hook.pytest_runtest_logreport(report=report)
