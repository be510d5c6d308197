"""docs/fine-tuning.md, docs/old-apis.md: commands that run, figures that they give, true facts."""
import importlib
import json
import os
import re
import subprocess
import sys

import pytest

from conftest import ROOT
from test_bad_usage import flags_of

FINE_TUNING = (ROOT / "docs" / "fine-tuning.md").read_text()
OLD_APIS = (ROOT / "docs" / "old-apis.md").read_text()
NUMBER = r"\d+\.\d+"
# the pages' figures are of Python 3.11's texts; another Python's differ
SAME_TEXTS = sys.version_info[:2] == (3, 11)


# ---- fine-tuning ---------------------------------------------------------------


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """What the recipe's commands print, run one after the other in an empty folder."""
    folder = tmp_path_factory.mktemp("recipe")
    for path in ROOT.glob("*.py"):
        (folder / path.name).symlink_to(path)
    (folder / "tools").symlink_to(ROOT / "tools")
    commands = "".join(re.findall(r"```sh\n(.*?)```", FINE_TUNING, re.S))
    commands = re.sub(r"^python ", f'"{sys.executable}" ', commands, flags=re.M)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    done = subprocess.run(["bash", "-ec", commands], cwd=folder, capture_output=True, text=True,
                          env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(text):
    """-> {checkpoint: [loss on code, loss on the manual]} from evaluate's table."""
    found = {}
    row = rf"^tune/(\w+) +({NUMBER})  \({NUMBER}\) +({NUMBER})  \({NUMBER}\)$"
    for name, code, manual in re.findall(row, text, re.M):
        found[name] = [float(code), float(manual)]
    return found


def test_the_figures_are_those_of_the_commands(recipe):
    rel = 0.1
    if not SAME_TEXTS:
        rel = 0.2  # 3.13: the loss of `all` on code is 2.87, on the page 3.28
    printed = losses(recipe)
    stated = losses(FINE_TUNING)
    assert stated.keys() == {"base", "all", "low", "part", "replay"}
    for name, figures in stated.items():
        assert printed[name] == pytest.approx(figures, rel=rel), name


def test_runs_and_evaluation_agree(recipe):
    """The held-out loss that a run shows at its end is that of its checkpoint."""
    last = re.findall(rf"^ +(?:299|99) .* ({NUMBER}) +{NUMBER}$", recipe, re.M)
    found = losses(recipe)
    for shown, name, text in zip(last, ("base", "all", "low", "part"), (0, 1, 1, 1)):
        assert float(shown) == pytest.approx(found[name][text], abs=2e-4)
    starts = re.findall(rf"^ start +({NUMBER})", recipe, re.M)
    assert float(starts[1]) == pytest.approx(found["base"][1], abs=2e-4)


def test_what_the_page_says_of_the_four(recipe):
    found = losses(recipe)
    code = {name: figures[0] for name, figures in found.items()}
    manual = {name: figures[1] for name, figures in found.items()}
    assert min(manual, key=manual.get) == "all"
    assert code["all"] > code["base"] + 0.5
    if SAME_TEXTS:
        assert code["all"] > code["base"] + 1
    assert code["base"] < code["low"] < code["all"]
    assert manual["all"] < manual["low"] < manual["base"]
    tuned = ("all", "low", "part", "replay")
    assert max(tuned, key=manual.get) == "part"
    assert code["part"] < code["all"]
    assert min(tuned, key=code.get) == "replay"
    assert manual["replay"] < manual["low"] and code["replay"] < code["base"] + 0.2


def test_the_curves_and_samples(recipe):
    assert re.search(r"^  c  part loss: \d", recipe, re.M)
    base, tuned = re.findall(r"^import .*", recipe, re.M)
    small = sum(letter.islower() for letter in base)
    capitals = sum(letter.isupper() for letter in tuned.removeprefix("import"))
    assert small > 20 and capitals > 20


# ---- if your tutorial says -------------------------------------------------------


def cells(column):
    """The cells of one column of the first table."""
    table = OLD_APIS.split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [row[column] for row in rows[1:]]


def resolves(name):
    """Is there something of this dotted name?"""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ImportError:
            continue
        for part in parts[i:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


HOMES = (
    "torch.nn.parallel", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining", "torch.distributed.optim", "torch.utils.checkpoint",
    "torch.distributed", "torch.distributed.tensor.experimental",
)


def test_what_is_there_today():
    """Every class and function in the column "today" can be imported."""
    text = " ".join(cells(1))
    for name in re.findall(r"`(torch(?:\.\w+)+)", text):
        assert resolves(name), name
    # DistributedDataParallel, fully_shard: somewhere in torch.distributed and its neighbours
    for name in set(re.findall(r"`([A-Z]\w+[a-z]\w*|\w+_shard\w*|parallelize_module)[`(]", text)):
        assert any(resolves(f"{home}.{name}") for home in HOMES), name


def test_what_is_gone():
    assert "`torch.distributed.pipeline.sync.Pipe`" in cells(0)[6]
    assert not resolves("torch.distributed.pipeline.sync.Pipe")


def test_the_flags_of_our_files():
    for cell in cells(2):
        names = re.findall(r"\[(\w+)\.py\]", cell)
        for flag in re.findall(r"`--([\w-]+)", cell):
            flag = flag.removeprefix("no-")
            for name in names:
                assert {f"--{flag}", flag} & set(flags_of(name)), f"{name} --{flag}"


PRINTS = """
import json, os
if os.environ["RANK"] == "0":  # torchrun's python -u writes a line and its end one after the other
    print(json.dumps(sorted(os.environ)))
"""


def test_the_variables_that_torchrun_sets(tmp_path):
    """Those that the table says it sets, in an environment that has none of them."""
    (tmp_path / "prints.py").write_text(PRINTS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               str(tmp_path / "prints.py")]
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=kept)
    found = set(json.loads(done.stdout.splitlines()[-1]))
    rows = OLD_APIS.split("## Environment variables")[1].splitlines()
    claimed = set()
    for row in rows:
        if row.startswith("| `") and "torchrun |" in row:
            claimed |= set(re.findall(r"`(\w+)", row.split(" | ")[0]))
    assert claimed >= {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"}
    assert claimed <= found, claimed - found
    assert "CUDA_VISIBLE_DEVICES" not in found
