"""Distributed tests on CPU.

Ranks fork from a server that has imported torch and all that is here (warm.py): hundredths of a
second each instead of seconds.
"""
import contextlib
import gc
import importlib
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
import types
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these tests are for CPUs; ./run.sh gpu has the others
os.environ["RES_OPTIONS"] = "attempts:0"  # torch asks what 127.0.0.1 is called: up to 5 s
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it would say that it got no answer
import common  # noqa: E402
from tools import ranks  # noqa: E402
from tools.ranks import GAPS, worst_gap  # noqa: E402, F401

ALL = bool(os.environ.get("ALL"))  # ALL=1 ./run.sh test: also what takes minutes more

multiprocessing.set_forkserver_preload(["tests.warm"])  # found from ROOT, where pytest is started

load = common.load_corpus
STDLIB = load("", 1)  # this Python's library, read once, not by every rank
# a Text of its own for each run: a dry run puts other parts in
common.load_corpus = lambda path, seq: load(path, seq) if path else common.Text(STDLIB.parts)

SMALL = ("--layers", "2", "--width", "32", "--heads", "4", "--seq", "16", "--steps", "2")
# right code shows gaps of 1e-12, wrong code of 1
PROOF = (*SMALL, "--dtype", "fp64", "--pad", "0.3", "--clip", "0.5")


def pytest_collection_finish():
    gc.freeze()  # what is imported by now need not be looked through again and again


# ---- ranks ---------------------------------------------------------------------


def with_transformers(check, world, first):
    """check(block of your-model.md that begins so) on ranks, where transformers is installed."""
    if not find_spec("transformers"):
        print("transformers is not installed: nothing is compared")
        return
    page = (ROOT / "docs" / "your-model.md").read_text()
    block, = re.findall(rf"```python\n({re.escape(first)}.*?)```", page, re.S)
    run_ranks(check, world, block)


def be_rank(rank, world, port, check, args):
    ranks.environment(rank, world, port)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)  # plain models are alike on all ranks
    dist.init_process_group("gloo")
    dist.barrier()  # else a check without collectives might end while others still connect
    check(*args)
    gc.collect()
    dist.destroy_process_group()


def run_ranks(check, world, *args):
    """check(*args) on `world` ranks joined by gloo, float64 by default."""
    codes = ranks.start(be_rank, world, check, args)
    assert codes == [0] * world, f"exit codes {codes}: see the tracebacks"


def check_each(check, cases):
    """check(*case) for each case, in one world. The traceback ends with the case that failed."""
    for case in cases:
        try:
            check(*case)
        except BaseException as error:  # pytest's Failed is no Exception
            raise AssertionError(f"{check.__name__}{tuple(case)}") from error


def check_differs(check, *case):
    """Numbers that check(*case) compares are not equal, since a bug is planted."""
    with pytest.raises(AssertionError, match="not close|it is summed already"):
        check(*case)


def run_script(name, world, *flags, plant=None, code=0, limit=120):
    """name.py's main() with these flags on `world` ranks -> its --json report, or what was said on
    stderr where there is none. All ranks must end with `code`.

    plant(module) is called before main, on every rank: it puts in a bug. It travels to the ranks
    by pickle: a function of a test module, or partial(of one, ..); no lambda, no inner function.
    """
    codes, report, said = ranks.report(world, name, flags, plant, limit)
    if codes != [code] * world:  # no assert: pytest would add a diff of its own
        command = f"{name}.py on {world} ranks {' '.join(flags)}"
        raise AssertionError(f"{command}: exit codes {codes}\n{said}")
    if code == 2:
        assert is_clear(name, said), said
    return report or said


def to_file(path, module):
    """A plant: what rank 0 prints goes there."""
    if os.environ["RANK"] == "0":
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 1)


def run_tool(name, *words, code=0):
    """name.py's main() with these words -> what it prints; with code 2 its line on stderr."""
    ended, said, errors = outcome(name, map(str, words))
    assert (ended or 0) == code, errors
    if code == 2:
        assert is_clear(name, errors), errors
        return errors
    return said


def outcome(name, flags):
    """name.py's main() with these flags -> exit code, what it printed, what it said on stderr."""
    sys.argv = [f"{name}.py", *flags]
    module = name if (ROOT / f"{name}.py").exists() else f"tools.{name}"
    out = io.StringIO()
    said = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            code = importlib.import_module(module).main()
        except SystemExit as end:
            code = end.code
        except Exception as error:  # what is accepted gets here: the process group is made already
            code = repr(error)
    return code, out.getvalue(), said.getvalue()


def is_clear(name, said, words=""):
    """It is one line, and has the words."""
    one_line = said.startswith(f"{name}.py: error: ") and said.count("\n") == 1
    return one_line and words in said and len(said) < 300


def check_refused(name, lines):
    """lines: [(flags, what is said)], each refused on every rank; without an agent, 0 speaks.
    flags: a list, or a string to be split.
    """
    speaks = True
    if dist.is_initialized():
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        speaks = dist.get_rank() == 0
    for flags, words in lines:
        flags = flags.split() if isinstance(flags, str) else flags
        code, out, said = outcome(name, flags)
        command = f"{name}.py {' '.join(flags)}"
        assert code == 2 and re.fullmatch(r"(--\S+ takes .*\n)?", out), f"{command}: {code}, {out}"
        good = is_clear(name, said, words) if speaks else said == ""
        assert good, f"{command}: not {words!r} but {said!r}"


def check_equal(name, world, *flags):
    """The run passes its own check in fp64, every gap at most 1e-10 -> report."""
    report = run_script(name, world, *PROOF, *flags)
    assert report["check"]["passed"] and worst_gap(report["check"]) <= 1e-10, report["check"]
    return report


def check_bug_shows(name, world, *flags, plant):
    """With the bug that plant(module) puts in, the run fails its own check in fp64."""
    report = run_script(name, world, *PROOF, *flags, plant=plant, code=1)
    assert isinstance(report, dict), report  # else it did not get as far as its check
    assert worst_gap(report["check"]) > 1e-6, report["check"]


def alone(name, *runs):
    """name.py's main() with each of these lists of flags, here, one after another -> reports."""
    reports = []
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        file = Path(folder, "report")
        for flags in runs:
            run_tool(name, *flags, "--json", file)
            reports.append(json.loads(file.read_text()))
    return reports


def dry_run_agrees(name, world, *flags, ranks=None, plant=None):
    """A dry run of each of `ranks`, by default all, counts the very bytes that a real run measures
    -> the real run's report.
    """
    real = run_script(name, world, *SMALL, *flags, "--no-check", plant=plant)
    check_dry_runs(real, name, *SMALL, *flags, ranks=ranks or range(world))
    return real


def check_dry_runs(real, name, *flags, ranks):
    """real: the report of a run with these flags. A dry run of each rank counts the very bytes."""
    dry = (*flags, "--dry-run", real["world_size"], "--rank")
    for rank, report in zip(ranks, alone(name, *[(*dry, rank) for rank in ranks])):
        found = report["ranks"][0]
        wanted = real["ranks"][rank]
        if torch.__version__ < (2, 13) and real["dtype"] == "fp64":
            # its tensors without memory have lse, which attention keeps, in fp32
            found = found["collectives"]
            wanted = wanted["collectives"]
        assert found == wanted


def textbook(report):
    """Every row of the report's textbook is measured as expected."""
    assert report["textbook"]
    for row in report["textbook"]:
        assert row["expected"] == row["measured"], row


# ---- the copy --------------------------------------------------------------------


def parts(name, last, old="", new=""):
    """name.py to the end of part `last`, without the imports of later parts: what is copied. Each
    line stands where it stands there. `new` is in the place of `old`.
    """
    above, rest = (ROOT / f"{name}.py").read_text().split("# imports of parts 1 and 2 end here")
    docstring, imports = above.rsplit('"""\n', 1)
    others, kept = rest.split("# ---- 1. ")
    kept = kept.split(f"# ---- {last + 1}. ")[0]
    gaps = ["\n" * text.count("\n") for text in (docstring, others)]
    source = f"\n{gaps[0]}{imports}{gaps[1]}# {kept}"
    if old and source.count(old) != 1:  # no assert, which might be taken for the bug's own
        raise LookupError(f"{name}: {old!r} stands {source.count(old)} times")
    return source.replace(old, new) if old else source


def copied(name, last=2, old="", new=""):
    """parts(..) -> module."""
    module = types.ModuleType("copied_" + name)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(parts(name, last, old, new), f"{name}.py", "exec"), vars(module))
    return module


def idea(name, old="", new=""):
    return copied(name, 1, old, new)


def rewritten(old, new, module, last=1):
    """A plant, as partial(rewritten, old, new): `new` stands in the place of `old` in part 1, or in
    the parts to the `last`.
    """
    exec(parts(module.__name__, last, old, new), vars(module))
