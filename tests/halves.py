"""Two processes share out a long run of tests, since most tests leave a core idle.

Once pytest has found the tests it forks. The parent takes them from the front, the child from the
back, and the parent shows what the child reports. conftest.py takes pytest's hook from here.
"""
import contextlib
import multiprocessing
import os

import pytest

MANY = 100  # tests; for fewer one process will do


def pytest_runtestloop(session):
    """-> True: the tests have run. None: pytest is to run them one after the other."""
    option = session.config.option
    is_watched = option.usepdb or option.trace or option.capture == "no"
    is_alone = is_watched or option.collectonly or option.basetemp  # which both would empty
    if session.testsfailed or is_alone or len(session.items) < MANY:
        return None
    untaken, filled = os.pipe()  # a byte for each test that nobody has taken
    os.write(filled, bytes(len(session.items)))
    os.close(filled)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    capture = session.config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # two processes cannot share the files that it writes to
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    capture.start_global_capturing()
    capture.suspend_global_capture()
    if child == 0:
        receiver.close()
        run_from_the_back(session, untaken, sender)
    else:
        sender.close()  # so that it ends with the child
        run_from_the_front(session, untaken, receiver, child)
    return True


def run_from_the_front(session, untaken, receiver, child):
    def show(until_the_end):
        """What the child reports is counted and printed as if it were from here."""
        hook = session.config.hook
        with contextlib.suppress(EOFError):
            while until_the_end or receiver.poll():
                data = receiver.recv()
                report = hook.pytest_report_from_serializable(config=session.config, data=data)
                hook.pytest_runtest_logreport(report=report)

    try:
        for _ in run_those_left(session, session.items, untaken):
            show(until_the_end=False)
        show(until_the_end=True)
    finally:  # after --maxfail and Ctrl-C, too
        os.read(untaken, len(session.items))
        receiver.close()
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        pytest.exit(f"the second half of the tests ended with {code}", returncode=1)


def run_from_the_back(session, untaken, sender):
    config = session.config

    class Reports:
        def pytest_runtest_logreport(self, report):
            sender.send(config.hook.pytest_report_to_serializable(config=config, report=report))

    config.pluginmanager.register(Reports())
    for _ in run_those_left(session, reversed(session.items), untaken):
        pass


def run_those_left(session, items, untaken):
    """Runs tests until all are taken, and yields after each."""
    taken = (item for item in items if os.read(untaken, 1))
    item = next(taken, None)
    while item:
        # taken before `item` runs, since pytest keeps the fixtures that both of them need
        following = next(taken, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        yield
        if session.shouldfail:  # --maxfail
            raise session.Failed(session.shouldfail)
        item = following
