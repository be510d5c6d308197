"""Distributed tests on CPU.

Ranks fork from a server that has imported torch and all that is here (warm.py): hundredths of a
second each instead of seconds.
"""
import ast
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
from pathlib import Path

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

ALL = bool(os.environ.get("ALL"))  # ALL=1 ./run.sh test: also what takes minutes more

multiprocessing.set_forkserver_preload(["tests.warm"])  # found from ROOT, where pytest is started
gc.freeze()  # what is imported by now need not be looked through again and again

load = common.load_corpus
STDLIB = load("", 1)  # this Python's library, read once, not by every rank
# a Text of its own for each run: a dry run puts other parts in
common.load_corpus = lambda path, seq: load(path, seq) if path else common.Text(STDLIB.parts)

SMALL = ("--layers", "2", "--width", "32", "--heads", "4", "--seq", "16", "--steps", "2")
# right code shows gaps of 1e-12, wrong code of 1
PROOF = (*SMALL, "--dtype", "fp64", "--pad", "0.3", "--clip", "0.5")


# ---- ranks ---------------------------------------------------------------------


def be_rank(rank, world, port, check, args):
    ranks.environment(rank, world, port)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)  # plain models are alike on all ranks
    dist.init_process_group("gloo")
    check(*args)
    gc.collect()
    dist.destroy_process_group()


def run_ranks(check, world, *args):
    """check(*args) on `world` ranks joined by gloo, float64 by default."""
    codes = ranks.start(be_rank, world, check, args)
    assert codes == [0] * world, f"exit codes {codes}: see the tracebacks"


def check_each(check, cases):
    """check(*case) for each of them, in one world. The traceback ends with the case that failed."""
    for case in cases:
        try:
            check(*case)
        except Exception as error:
            raise AssertionError(f"{check.__name__}{tuple(case)}") from error


def check_all(*cases):
    """Each of them is (check, *case). All in one world, as check_each."""
    for check, *case in cases:
        check_each(check, [case])


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
    """lines: [(flags, what is said)], each refused on every rank; without an agent, 0 speaks."""
    speaks = True
    if dist.is_initialized():
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        speaks = dist.get_rank() == 0
    for flags, words in lines:
        code, out, said = outcome(name, flags)
        command = f"{name}.py {' '.join(flags)}"
        assert code == 2 and re.fullmatch(r"(--\S+ takes .*\n)?", out), f"{command}: {code}, {out}"
        good = is_clear(name, said, words) if speaks else said == ""
        assert good, f"{command}: not {words!r} but {said!r}"


GAPS = ("loss", "gradient", "grad_norm", "parameter")


def check_equal(name, world, *flags):
    """The run passes its own check in fp64, every gap at most 1e-10 -> report."""
    report = run_script(name, world, *PROOF, *flags)
    assert report["check"]["passed"] and worst_gap(report) <= 1e-10, report["check"]
    return report


def check_bug_shows(name, world, *flags, plant):
    """With the bug that plant(module) puts in, the run fails its own check in fp64."""
    report = run_script(name, world, *PROOF, *flags, plant=plant, code=1)
    assert isinstance(report, dict), report  # else it did not get as far as its check
    assert worst_gap(report) > 1e-6, report["check"]


def worst_gap(report):
    return max(report["check"][kind] for kind in GAPS)


def alone(name, *runs):
    """name.py's main() with each of these lists of flags, one after another on one rank
    -> reports."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(number)) for number in range(len(runs))]
        lines = [("--json", str(file), *flags) for file, flags in zip(files, runs)]
        assert ranks.start(be_alone, 1, name, lines) == [0], "see the traceback"
        return [json.loads(file.read_text()) for file in files]


def be_alone(rank, world, port, name, lines):
    ranks.environment(rank, world, 0)  # each run makes a store of its own
    module = importlib.import_module(name)
    for flags in lines:
        sys.argv = [f"{name}.py", *flags]
        assert not module.main(), flags


def dry_run_agrees(name, world, *flags, ranks=None, plant=None):
    """A dry run of each of `ranks`, by default all, counts the very bytes that a real run measures
    -> the real run's report.
    """
    real = run_script(name, world, *SMALL, *flags, "--no-check", plant=plant)
    check_dry_runs(real, name, *SMALL, *flags, ranks=ranks)
    return real


def check_dry_runs(real, name, *flags, ranks=None):
    """real: the report of a run with these flags. A dry run of each rank counts the very bytes."""
    world = real["world_size"]
    if ranks is None:
        ranks = range(world)
    dry = (*flags, "--dry-run", str(world), "--rank")
    for rank, report in zip(ranks, alone(name, *[(*dry, str(rank)) for rank in ranks])):
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

ALLOWED = {"torch", *sys.stdlib_module_names}


def imported(node):
    """The packages that this node names, if it is an import statement."""
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {node.module.split(".")[0]}
    return set()


def part_of(name, first, last):
    """Parts `first` to `last` of name.py with their imports. Each line stands where it stands
    there."""
    source = (ROOT / f"{name}.py").read_text()
    lines = source.splitlines()
    rulers = {line[:10]: i for i, line in enumerate(lines) if line.startswith("# ---- ")}
    kept = set(range(rulers[f"# ---- {first}. "], rulers[f"# ---- {last + 1}. "]))
    for node in ast.walk(ast.parse(source)):
        wanted = imported(node)
        if wanted and wanted <= ALLOWED and node.col_offset == 0:
            kept |= set(range(node.lineno - 1, node.end_lineno))
        elif wanted and node.lineno - 1 in kept:
            assert wanted <= ALLOWED, f"part {first} of {name}.py imports {wanted}"
    return "\n".join(line if i in kept else "" for i, line in enumerate(lines))


def section_one(name):
    """What is copied: the idea and the technique."""
    return part_of(name, 1, 2)


def copied(name, last=None, old="", new=""):
    """Parts 1 and 2 of name.py -> module. It imports nothing but torch and the standard library."""
    source = part_of(name, 1, last) if last else section_one(name)
    assert not old or source.count(old) == 1, f"{name}: {old!r} stands {source.count(old)} times"
    source = source.replace(old, new) if old else source
    module = types.ModuleType("copied_" + name)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(source, str(ROOT / f"{name}.py"), "exec"), module.__dict__)
    return module


def idea(name, old="", new=""):
    """Part 1 of name.py alone, `old` of it replaced by `new` -> module."""
    return copied(name, 1, old, new)


def rewritten(old, new, module):
    """A plant, as partial(rewritten, old, new): `new` stands in the place of `old` in part 1."""
    new_names = vars(idea(module.__name__, old, new)).items()
    vars(module).update({name: value for name, value in new_names if name[:2] != "__"})
