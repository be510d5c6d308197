"""What README and docs/ say can be typed, can be; links resolve; figures are what is printed."""
import importlib
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import moe
from common import GPTConfig, build, loss_sum, plain_steps
from conftest import ALL, ROOT, alone, copied, program, run
from harness.prove import prove
from test_bad_usage import flags_of, torchruns_parser
from test_repo import TECHNIQUES
from tools import bench

PATHS = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
PAGES = {path.name: path.read_text() for path in PATHS}
README = PAGES["README.md"]
CHINESE = (ROOT / "README.zh.md").read_text()
SLOW = 1  # seconds


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


def links(text):
    return set(re.findall(r"\]\(([^)]+)\)", text))


def test_the_chinese_page_is_short_and_says_nothing_else():
    """Half as long, without the blocks: its commands, links and figures are among README's."""
    assert CHINESE.count("\n") <= 72
    assert commands(CHINESE) <= commands(README)
    assert links(CHINESE) <= links(README) | {"README.md"}
    assert fenced(CHINESE)[:2] == fenced(README)[:2]
    prose = re.sub("```.*?```", "", CHINESE, flags=re.S)
    figures = re.findall(r"\d+(?:\.\d+)?%?", prose)
    assert set(figures) <= set(re.findall(r"\d+(?:\.\d+)?%?", README))
    assert all(f"[{name}.py]({name}.py)" in CHINESE for name in TECHNIQUES)


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

MEASURED = re.findall(
    r"^\| `python (\w+)\.py ([^`]*--(?:dry-run|simulate)[^`]*)` \| (.*?)(?:; (\d+) s)? \|$",
    PAGES["measured.md"], re.M,
)
QUICK = [row[:3] for row in MEASURED if ALL or int(row[3] or 1) <= SLOW]


@pytest.mark.parametrize("name, flags, figures", QUICK)
def test_figures_are_printed(name, flags, figures):
    """Letter by letter; but for the seconds, which are the machine's."""
    code, printed, errors = program(f"{name}.py", *shlex.split(flags))
    assert code == 0, errors
    for figure in figures.split(", "):
        assert figure in printed, figure


# ---- in your own code ----------------------------------------------------------


def examples():
    """-> {"ddp": the block of README that uses its section 1}"""
    found = {}
    files = r"^\[(\w+)\.py\]\(\1\.py\):(.*?)^(?=\[|## )"
    for name, text in re.findall(files, README, re.M | re.S):
        found[name] = "".join(fenced(text, "python"))
    return found


EXAMPLES = examples()
ROWS = {"ddp", "zero", "fsdp", "amp_accum_ckpt", "moe"}  # a rank has rows; others the whole batch
T = 16


def test_every_technique_is_in_the_reading_order():
    assert sorted(EXAMPLES) == sorted(TECHNIQUES)
    for name, block in EXAMPLES.items():
        assert bool(block) == (name != "hybrid_3d")
        assert block.count("\n") <= 9


def somebodys_model(name):
    """Two blocks of Llama's form; with moe, its MLPs are mixtures of four experts."""
    cfg = GPTConfig(2, 32, 4, 256, T, "llama", 2, 44)
    model = build(cfg, 0, dtype=torch.float64)
    if name == "moe":
        moe.mixture(model, 0, cfg, experts=4, top_k=2)
        for block in model.blocks:
            block.mlp.alpha = 0.01  # what MoE takes where nothing is said
            block.mlp.beta = 1e-3
    return model


def batches():
    """The second one's gradient is too small to be clipped."""
    rng = torch.Generator().manual_seed(0)
    for valid in (10, 10_000):
        ids = torch.randint(256, (8, T + 1), generator=rng)
        yield ids[:, :-1], ids[:, 1:], valid


def plain_training(name):
    model = somebodys_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    extra_loss = None
    if name == "moe":
        extra_loss = moe.plain_balancing_losses
    rated = [(1e-3, *batch) for batch in batches()]
    clipped = []
    for _, norm in plain_steps(model, optimizer, rated, 1.0, extra_loss):
        clipped.append(norm > 1)
        yield None, gradients_of(model), model.state_dict()
    assert clipped == [True, False]


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters()}


def given(name):
    """What README takes as given."""
    rank = dist.get_rank()
    replicas = [dist.new_group([other]) for other in range(dist.get_world_size())]
    return {
        "model": somebodys_model(name), "AdamW": torch.optim.AdamW, "partial": partial, "F": F,
        "clip_grad_norm_": nn.utils.clip_grad_norm_, "loss_sum": loss_sum, "rank": rank,
        "clip_grads_with_norm_": nn.utils.clip_grads_with_norm_, "ep": dist.group.WORLD,
        "replicas": replicas[rank], "B": 8, "T": T, "C": 32, "dtype": torch.float64,
        "device": torch.device("cpu"),
    }


def example_training(name, block):
    """The lines as they stand, with the names of section 1 and what README takes as given."""
    lines = block.splitlines()
    begins = re.compile("zero_grad|loss_sum|cross_entropy")  # what stands before it is done once
    first = next(i for i, line in enumerate(lines) if begins.search(line))
    names = {**vars(copied(name)), **given(name)}
    whole = names["model"]
    exec("\n".join(lines[:first]), names)
    if "optimizer" not in names:
        names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=1e-3)
    for x, y, valid in batches():
        names.update(x=x, y=y, valid=valid)
        if name in ROWS:
            names["x"] = x.chunk(2)[dist.get_rank()]
            names["y"] = y.chunk(2)[dist.get_rank()]
        names["optimizer"].zero_grad()
        exec("\n".join(lines[first:]), names)
        yield None, *gathered(name, names, whole)


def gathered(name, names, whole):
    """-> gradients and parameters of the whole model, by its names."""
    model = names["model"]
    if name == "ddp":
        return gradients_of(model.module), model.module.state_dict()
    if name == "zero":
        zero = names["zero"]
        called = {p: name for name, p in whole.named_parameters()}
        found = zero.full_gradients(), zero.full_parameters()
        return [{called[p]: t for p, t in of_kind.items()} for of_kind in found]
    if name == "tensor_parallel":
        tp = names["tp"]
        return names["full_gradients"](model, tp), names["full_state_dict"](model, tp)
    if name == "moe":
        ep = names["ep"]
        return moe.full_gradients(model, ep), moe.full_state_dict(model, ep)
    if name == "pipeline_parallel":
        layers = ["tok", *[f"blocks.{i}" for i in range(len(whole.blocks))], "norm", "head"]
        found = model.full_gradients(), model.full_state_dict()
        return [{re.sub(r"^\d+", lambda number: layers[int(number[0])], name): t
                 for name, t in of_kind.items()} for of_kind in found]
    if name == "fsdp":
        return model.full_gradients(), model.full_state_dict()
    return gradients_of(model), model.state_dict()


# a mistake in the block of README, which has to show
PLANTED = {
    "context_parallel": ("for block in model.blocks:", "for block in model.blocks[:1]:"),
    "ddp": ("average=False", "average=True"),
    "zero": ("zero.clip_grad_norm_(1.0)\n", ""),
    "moe": ("sum_gradients(model, replicas)\n", ""),
    "pipeline_parallel": (" / valid", " / valid / 2"),
}


def check_examples():
    """Each block trains what one process trains, and a planted mistake shows."""
    for name, block in EXAMPLES.items():
        if block:
            plain = partial(plain_training, name)
            assert prove(plain, partial(example_training, name, block)), name
            if name in PLANTED:
                spoiled = block.replace(*PLANTED[name])
                assert spoiled != block
                assert not prove(plain, partial(example_training, name, spoiled)), name


def test_examples_train_as_one_process_does():
    run(check_examples, 2)


BENCHED = dict(re.findall(r"^\| ([\w-]+) \| \d \| (.*) \|$", PAGES["measured.md"], re.M))


def test_bytes_beside_the_times_are_those_of_a_dry_run():
    [row] = [row for row in bench.BENCH if row.label == "1f1b"]
    sizes = bench.BENCH_SIZES.replace("--no-check", "").split()
    flags = [*sizes, *row.flags.split(), "--dry-run", str(row.ranks)]
    [report] = alone(row.file, flags)
    sent, _, held, peak = bench.megabytes(report)
    assert BENCHED[row.label].split(" | ")[:3] == [sent, held, peak]
