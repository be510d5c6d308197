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
    # how many tests nobody has taken
    left = multiprocessing.get_context("fork").Value("i", len(session.items))
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
        run_from_the_back(session, left, sender)
    else:
        sender.close()  # so that it ends with the child
        run_from_the_front(session, left, receiver, child)
    return True


def run_from_the_front(session, left, receiver, child):
    def show(until_the_end):
        """What the child reports is counted and printed as if it were from here."""
        hook = session.config.hook
        with contextlib.suppress(EOFError):
            while until_the_end or receiver.poll():
                data = receiver.recv()
                report = hook.pytest_report_from_serializable(config=session.config, data=data)
                hook.pytest_runtest_logreport(report=report)

    try:
        for _ in run_those_left(session, session.items, left):
            show(until_the_end=False)
        show(until_the_end=True)
    finally:  # after --maxfail and Ctrl-C, too
        left.value = 0
        receiver.close()
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        pytest.exit(f"the second half of the tests ended with {code}", returncode=1)


def run_from_the_back(session, left, sender):
    config = session.config

    class Reports:
        def pytest_runtest_logreport(self, report):
            sender.send(config.hook.pytest_report_to_serializable(config=config, report=report))

    config.pluginmanager.register(Reports())
    for _ in run_those_left(session, reversed(session.items), left):
        pass


def run_those_left(session, items, left):
    """Runs tests until all are taken, and yields after each."""
    taken = take(items, left)
    item = next(taken, None)
    while item:
        # taken before `item` runs, since pytest keeps the fixtures that both of them need
        following = next(taken, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        yield
        if session.shouldfail:  # --maxfail
            raise session.Failed(session.shouldfail)
        item = following


def take(items, left):
    for item in items:
        with left.get_lock():
            if left.value == 0:
                return
            left.value -= 1
        yield item
