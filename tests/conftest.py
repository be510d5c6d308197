"""Distributed tests on CPU. Ranks fork from a server that has imported torch already: 0.1 s each instead of seconds."""
import ast
import builtins
import gc
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
import types
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import common  # noqa: E402

multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "torch.distributed.fsdp",
                                        "torch.distributed.tensor.parallel", "torch.distributed.pipelining",
                                        "torch.testing._internal.distributed.fake_pg", "pytest", "conftest",
                                        *(path.stem for path in ROOT.glob("*.py")), "plan", "warm"])
gc.freeze()  # what is imported by now need not be looked through again and again
os.environ["RES_OPTIONS"] = "attempts:0"  # torch asks what 127.0.0.1 is called: up to 5 s
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it would say that it got no answer
if not importlib.util.find_spec("numpy"):
    sys.modules["numpy"] = None  # else torch searches the disk for it in every operation of a dry run
_load, _STDLIB = common.load_corpus, common.load_corpus("", 1)  # read once, not by every rank
common.load_corpus = lambda path, seq: _load(path, seq) if path or len(_STDLIB) <= seq else _STDLIB

SMALL = ("--layers", "2", "--width", "32", "--heads", "4", "--seq", "16", "--steps", "2")
PROOF = (*SMALL, "--dtype", "fp64", "--pad", "0.3", "--clip", "0.5")  # right code: gaps of 1e-12; wrong code: 1


def _environment(rank, world, port):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE=str(port > 0))
    torch.set_num_threads(1)


def _check(rank, world, port, check, args):
    _environment(rank, world, port)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    check(*args)
    gc.collect()
    dist.destroy_process_group()


def _script(rank, world, port, name, flags, plant, errors):
    _environment(rank, world, port)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    sys.argv = [f"{name}.py", *flags]
    module = importlib.import_module(name)
    if plant:
        plant(module)
    sys.exit(module.main())


def _start(target, world, *args, limit=120):
    """Run target(rank, world, port, *args) on `world` ranks -> their exit codes. One that fails ends the others."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=target, args=(rank, world, store.port, *args)) for rank in range(world)]
    for p in ranks:
        p.start()
    end, failed = time.time() + limit, None
    while any(p.is_alive() for p in ranks) and time.time() < min(end, (failed or end) + 5):
        multiprocessing.connection.wait([p.sentinel for p in ranks if p.is_alive()], 1)
        failed = failed or (time.time() if any(p.exitcode for p in ranks) else None)
    hung = [r for r, p in enumerate(ranks) if p.is_alive()]
    for p in ranks:
        p.kill()
        p.join()
    assert failed or not hung, f"ranks {hung} hang"
    return [p.exitcode for p in ranks]


def run(check, world, *args):
    """check(*args) on `world` ranks joined by gloo, float64 by default. An exception on any rank fails the test."""
    codes = _start(_check, world, check, args)
    assert codes == [0] * world, f"exit codes {codes}: see the tracebacks"


def script(name, world, *flags, plant=None, code=0):
    """name.py's main() with these flags on `world` ranks -> its --json report. All ranks must end with `code`.

    With code=2 nothing may be on stderr but one line "name.py: error: ...", which is returned. A run that ends before
    its report returns what it said on stderr.
    plant(module) is called before main, on every rank: it puts in a bug.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, errors = Path(folder, "report.json"), Path(folder, "stderr")
        errors.touch()
        codes = _start(_script, world, name, ("--json", str(path), *flags), plant, str(errors))
        said = errors.read_text()
        if codes != [code] * world:  # no assert: pytest would add a diff of its own, longer where CI is set
            raise AssertionError(f"{name}.py on {world} ranks {' '.join(flags)}: exit codes {codes}\n{said}")
        if code == 2:
            assert said.startswith(f"{name}.py: error: ") and said.count("\n") == 1, said
            return said
        return json.loads(path.read_text()) if path.exists() else said


def proves(name, world, *flags, plant=None):
    """The run passes its own check in fp64, every gap at most 1e-10 -> report. With a planted bug: it must fail."""
    report = script(name, world, *PROOF, *flags, plant=plant, code=1 if plant else 0)
    gaps = [report["check"][k] for k in ("loss", "gradient", "grad_norm", "parameter")]
    if plant:
        assert max(gaps) > 1e-6, f"the planted bug shows only {max(gaps)}"
    else:
        assert max(gaps) <= 1e-10 and report["check"]["passed"], report["check"]
    return report


def _alone(rank, world, _, name, runs, folder):
    for i in range(rank, len(runs), world):
        try:
            _script(0, 1, 0, name, (*runs[i], "--json", f"{folder}/{i}"), None, f"{folder}/stderr")
        except SystemExit as end:
            if end.code:
                raise


def alone(name, *runs):
    """name.py's main() with each of these lists of flags, in a world of one rank -> reports.

    Two processes take turns.
    """
    with tempfile.TemporaryDirectory() as folder:
        codes = _start(_alone, min(2, len(runs)), name, runs, folder)
        assert not any(codes), Path(folder, "stderr").read_text()
        return [json.loads(Path(folder, str(i)).read_text()) for i in range(len(runs))]


def dry_run_agrees(name, world, *flags, ranks=None, plant=None):
    """A dry run at this world size counts the very bytes that a real run measures, on the given ranks (all)."""
    real, ranks = script(name, world, *SMALL, *flags, "--no-check", plant=plant), ranks or range(world)
    dry = alone(name, *((*SMALL, *flags, "--dry-run", str(world), "--rank", str(rank)) for rank in ranks))
    assert [report["ranks"] for report in dry] == [[real["ranks"][rank]] for rank in ranks]
    return real


def textbook(report):
    """Every row of the report's textbook whose name is not explained to differ: measured as expected."""
    assert report["textbook"]
    for row in report["textbook"]:
        assert row["expected"] == row["measured"], row


# ---- the copy --------------------------------------------------------------------


def section_one(name):
    """What somebody would copy from name.py: its imports of torch and the standard library, and section 1."""
    source = (ROOT / f"{name}.py").read_text()
    tree = ast.parse(source)
    lines = source.splitlines()
    kept = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module]
        else:
            continue
        if all(module.split(".")[0] in ALLOWED for module in modules):
            kept += lines[node.lineno - 1:node.end_lineno]
    first = source.index("\n# ---- 1. ")
    second = source.index("\n# ---- 2. ")
    return "\n".join(kept) + "\n" + source[first:second]


ALLOWED = {"torch", *sys.stdlib_module_names}


def copied(name):
    """Execute section 1 of name.py alone, in an empty folder, where it may import torch and nothing else -> module."""
    module = types.ModuleType("copied_" + name)

    def only_torch(wanted, namespace=None, *rest):
        if namespace and namespace.get("__name__") == module.__name__:
            assert wanted.split(".")[0] in ALLOWED, f"section 1 of {name}.py imports {wanted}"
        return builtins.__import__(wanted, namespace, *rest)

    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": only_torch}
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        sys.modules[module.__name__] = module  # dataclasses look their module up
        exec(compile(section_one(name), f"section 1 of {name}.py", "exec"), module.__dict__)
        os.chdir(here)
    return module
