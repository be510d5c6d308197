"""What README and docs/ say can be typed, can be; links resolve; figures are what is printed."""
import importlib
import re
import shlex
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from conftest import ALL, ROOT, alone, copied, run
from test_bad_usage import flags_of, torchruns_parser
from test_repo import TECHNIQUES
from tools import everything

PATHS = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
PAGES = {path.name: path.read_text() for path in PATHS}
README = PAGES["README.md"]
CHINESE = (ROOT / "README.zh.md").read_text()
SLOW = 6  # seconds


def fenced(text, language=""):
    """The code blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def commands(text):
    """Lines in code blocks, and spans between backticks, that can be typed."""
    lines = [line for block in fenced(text) for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub("```.*?```", "", text, flags=re.S))
    found = set()
    for line in lines:
        typed = re.split(r"\s+#", line)[0].strip().removesuffix(" ..")
        if re.match(r"(torchrun|python|\./run\.sh|\w+\.py) ", typed):
            found.add(typed)
    return found


COMMANDS = sorted(set().union(*(commands(page) for page in PAGES.values())))
SCRIPTS = [command for command in COMMANDS if re.search(r"\b[a-z_]\w+\.py\b", command)]


# ---- the pages -----------------------------------------------------------------


def test_readme_is_short():
    assert README.count("\n") < 150


@pytest.mark.parametrize("name", PAGES)
def test_links_resolve(name):
    folder = ROOT if name == "README.md" else ROOT / "docs"
    for link in re.findall(r"\]\(([^)#:]+)\)", PAGES[name]):
        assert (folder / link).exists(), link


def test_every_technique_is_in_the_reading_order():
    rows = re.findall(r"^\| \[(\w+)\.py\]", README, re.M)
    assert sorted(rows) == sorted(TECHNIQUES)


def test_the_chinese_page_says_the_same():
    """The same commands, links and numbers."""
    assert commands(CHINESE) == commands(README)
    assert fenced(CHINESE, "python") == fenced(README, "python")

    def links(text):
        return sorted(re.findall(r"\]\(([^)]+)\)", text))

    def numbers(text):
        prose = re.sub("```.*?```", "", text, flags=re.S)
        return sorted(re.findall(r"\d+(?:\.\d+)?%?", prose))

    assert links(CHINESE) == links(README)
    assert numbers(CHINESE) == numbers(README)


# ---- the commands --------------------------------------------------------------


class Reached(Exception):
    """The flags are good: the run would begin."""


def reached(*args, **more):
    raise Reached


def split(command):
    """-> the path of the script, its flags, how many ranks."""
    words = shlex.split(command)
    where = next(i for i, word in enumerate(words) if word.endswith(".py"))
    ranks = "1"
    for word in words[:where]:
        if word.startswith("--nproc_per_node=") and word[17:].isdigit():
            ranks = word[17:]
    return words[where], words[where + 1:], ranks


@pytest.mark.parametrize("command", SCRIPTS)
def test_the_flags_of_every_command(command, monkeypatch, tmp_path):
    """Up to the point where a run begins."""
    path, flags, ranks = split(command)
    name = Path(path).stem
    if name not in [*TECHNIQUES, "plan"]:
        assert (ROOT / path).exists() or name == "FILE", command
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setattr(sys, "argv", [path, *[flag for flag in flags if flag != "$FLAGS"]])
    module = importlib.import_module(name)
    for start in {"Run", "simulation", "search", "table", "calibrate"} & set(vars(module)):
        monkeypatch.setattr(module, start, reached)
    with pytest.raises(Reached):
        module.main()


def test_the_words_of_run_sh():
    script = (ROOT / "run.sh").read_text()
    used = {command.split()[1] for command in COMMANDS if command.startswith("./run.sh ")}
    assert used >= {"test", "bench", "soak"}
    for word in used - {"FILE"}:
        assert re.search(rf"^  ([\w |-]*\| )?{word}( \||\))", script, re.M) or word in TECHNIQUES


TORCHRUNS = {"nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id"}
SLURMS = {"nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "signal", "requeue"}


def known_flags():
    """All flags of our scripts, of torchrun and of SLURM; and no other word."""
    found = {"standalone", "max-restarts"} | TORCHRUNS | SLURMS
    for name in TECHNIQUES:
        found |= {flag.removeprefix("--") for flag in flags_of(name)}
    for action in torchruns_parser()._actions:
        found |= {option.removeprefix("--") for option in action.option_strings}
    for tool in (ROOT / "tools").glob("*.py"):
        source = tool.read_text()
        found |= set(re.findall(r'"--([a-z][\w-]+)"', source))
        for name in re.findall(r'^ +"(\w+)": \(?', source, re.M):
            found.add(name.replace("_", "-"))
    return found | {f"no-{flag}" for flag in found}


def test_every_flag_that_is_mentioned_exists():
    known = known_flags()
    for name, text in {**PAGES, "README.zh.md": CHINESE}.items():
        if name == "old-apis.md":
            continue  # speaks of others' flags
        for flag in set(re.findall(r"(?<![\w-])--([a-z][\w-]+)", text)):
            assert flag in known, f"{name}: --{flag}"


# ---- the figures ---------------------------------------------------------------

ROWS = re.findall(
    r"^\| `python (\w+)\.py ([^`]*--(?:dry-run|simulate)[^`]*)` \| (.*?)(?:; (\d+) s)? \|$",
    PAGES["measured.md"], re.M,
)
QUICK = [row[:3] for row in ROWS if ALL or int(row[3] or 1) <= SLOW]


@pytest.fixture(scope="module")
def printed():
    """What these commands print; two run at a time."""
    def start(row):
        command = [sys.executable, f"{row[0]}.py", *shlex.split(row[1])]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(QUICK, pool.map(start, QUICK)))


@pytest.mark.parametrize("row", QUICK)
def test_figures_are_printed(row, printed):
    """Letter by letter; but for the seconds, which are the machine's."""
    figures = row[2].split(", ")
    assert len(figures) > 1 and printed[row].returncode == 0, printed[row].stderr
    for figure in figures:
        assert figure in printed[row].stdout, figure


# ---- in your own code ----------------------------------------------------------


def examples():
    """-> {"ddp": the lines of README that use its section 1}"""
    found = {}
    for line in "".join(fenced(README, "python")).splitlines():
        name = re.match(r"# (\w+)\.py", line)
        if name:
            current = found.setdefault(name[1], [])
        else:
            current.append(line)
    return found


EXAMPLES = examples()


def test_every_technique_has_an_example():
    assert set(EXAMPLES) == set(TECHNIQUES) - {"hybrid_3d"}
    for lines in EXAMPLES.values():
        assert len(lines) <= 6


def check_example(name):
    """The lines as they stand, with the names of section 1 and what README takes as given."""
    namespace = {**vars(given()), **vars(copied(name))}
    exec("\n".join(EXAMPLES[name]), namespace)


def given():
    """Somebody's model, its blocks, and this rank's part of a batch."""
    from common import GPTConfig, build, loss_sum

    names = types.SimpleNamespace(torch=torch, partial=partial, loss_sum=loss_sum)
    names.group = dist.group.WORLD
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    names.replicas = groups[dist.get_rank()]
    names.model = build(GPTConfig(2, 32, 4, 256, 16), 0, dtype=torch.float64)
    names.blocks = names.model.blocks
    names.layers = [("embed", Embedded(names.model)), ("rest", Rest(names.model))]
    names.x = torch.arange(64).view(4, 16)
    names.y = names.x + 1
    names.valid = 64 * dist.get_world_size()
    names.loss_fn = lambda logits, targets: loss_sum(logits, targets) / 64
    names.microbatches = [(names.x[:2], names.y[:2]), (names.x[2:], names.y[2:])]
    names.optimizer = torch.optim.AdamW(names.model.parameters())
    names.router = torch.nn.Linear(32, 4, bias=False)
    names.up = [torch.nn.Linear(32, 64) for _ in range(2)]
    names.down = [torch.nn.Linear(64, 32) for _ in range(2)]
    return names


class Embedded(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.tok = model.tok

    def forward(self, x):
        return self.tok(x)


class Rest(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.block = model.blocks[0]
        self.out = torch.nn.Linear(32, 256)

    def forward(self, x):
        return self.out(self.block(x))


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name):
    run(check_example, 2, name)


BENCHED = dict(re.findall(r"^\| ([\w-]+) \| \d \| (.*) \|$", PAGES["measured.md"], re.M))


def test_the_table_of_times_has_the_rows_of_bench():
    assert list(BENCHED) == [row.label for row in everything.BENCH]


@pytest.mark.parametrize("label", ["zero_3", "1f1b"])
def test_bytes_beside_the_times_are_those_of_a_dry_run(label):
    [row] = [row for row in everything.BENCH if row.label == label]
    sizes = everything.BENCH_SIZES.replace("--no-check", "").split()
    flags = [*sizes, *row.flags.split(), "--dry-run", str(row.ranks)]
    [report] = alone(row.file, flags)
    figures = [everything.sent(report), everything.held(report)]
    figures.append(report["ranks"][0]["memory"]["peak"])
    said = BENCHED[label].split(" | ")[:3]
    assert said == [everything.megabytes(figure) for figure in figures]
