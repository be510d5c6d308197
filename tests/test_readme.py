"""What README and docs/ say can be typed, can be; links resolve; figures are what is printed."""
import contextlib
import importlib
import io
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import moe
from common import FORMS, GPT, PRESETS, GPTConfig, build, get_batch, load_corpus, plain_steps
from conftest import ALL, ROOT, copied, run_ranks, run_script, to_file
from fsdp import FSDP, from_meta
from harness.prove import prove
from others import compare, gradients_of
from test_repo import TECHNIQUES

PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
README = PAGES["README.md"]
T = 16  # tokens of a sequence
CHINESE = (ROOT / "README.zh.md").read_text()


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


COMMANDS = set().union(*(commands(page) for page in PAGES.values()))
SCRIPTS = sorted(command for command in COMMANDS if re.search(r"\b[a-z_]\w+\.py\b", command))


def test_links_resolve_and_the_chinese_page_says_nothing_else():
    """Shorter, without table and blocks: its commands, links and figures are among README's."""
    for name, text in PAGES.items():
        folder = ROOT if name == "README.md" else ROOT / "docs"
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (folder / link).exists(), link
    assert commands(CHINESE) <= commands(README)
    assert fenced(CHINESE)[0] == fenced(README)[0]
    prose = re.sub("```.*?```", "", CHINESE, flags=re.S)
    for kind in (r"\]\((?!README\.md)([^)]+)\)", r"\d+(?:\.\d+)?%?"):
        assert set(re.findall(kind, prose)) <= set(re.findall(kind, README))


class Begins(Exception):
    """The flags are good: the run would begin."""


def begins(*_, **__):
    raise Begins


@pytest.mark.parametrize("command", SCRIPTS)
def test_the_flags_of_every_command(command, monkeypatch, tmp_path):
    """Up to the point where a run begins."""
    words = shlex.split(command)
    where = next(i for i, word in enumerate(words) if word.endswith(".py"))
    name = Path(words[where]).stem
    if name not in [*TECHNIQUES, "plan"]:
        assert (ROOT / words[where]).exists() or name == "FILE", command
        return
    ranks = re.search(r"--nproc_per_node=(\d+)", command)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", ranks[1] if ranks else "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setattr(sys, "argv", [word for word in words[where:] if word != "$FLAGS"])
    module = importlib.import_module("tools.plan" if name == "plan" else name)
    for start in {"Run", "simulation", "search", "table", "calibrate"} & set(vars(module)):
        monkeypatch.setattr(module, start, begins)
    for start in ("harness.run.Run", "harness.timeline.simulation"):
        monkeypatch.setattr(start, begins)
    with pytest.raises(Begins):
        module.main()


MEASURED = re.findall(
    r"^\| `python (\w+)\.py ([^`]*--(?:dry-run|simulate)[^`]*)` \| (.*?)(?:; (\d+) s)? \|$",
    PAGES["production.md"], re.M,
)
QUICK = [row[:3] for row in MEASURED if ALL or int(row[3] or 1) <= 2]  # seconds


@pytest.mark.parametrize("name, flags, figures", QUICK)
def test_figures_are_printed(name, flags, figures, tmp_path):
    """Letter by letter; but for the seconds, which are the machine's."""
    printed = tmp_path / "printed"
    run_script(name, 1, *shlex.split(flags), plant=partial(to_file, printed), limit=580)
    for figure in figures.split(", "):
        assert figure in printed.read_text(), figure


LARGEST_IDEA = {"tensor_parallel": 100, "moe": 100, "hybrid_3d": 100}  # lines that are not blank


def part_one(name):
    source = (ROOT / f"{name}.py").read_text()
    return source.split("# ---- 1. ")[1].split("\n", 1)[1].split("\n# ---- 2. ")[0].strip()


def test_one_idea_in_full_and_the_lines_of_all():
    assert part_one("ddp") in [block.strip() for block in fenced(README, "python")]
    for name in TECHNIQUES:
        stated = re.search(rf"^\| \[{name}\.py\].*?\| (\d+) \|", README, re.M)[1]
        lines = [line for line in part_one(name).splitlines() if line.strip()]
        assert int(stated) == len(lines) <= LARGEST_IDEA.get(name, 60), f"{name}: {len(lines)}"


PROGRAMS = [block for block in fenced(README, "python") if block.startswith("# train")]


def check_programs():
    """Word for word, but in fp64, of 24 short sequences; against the same loop in one process. Rank
    0 prints the loss of the last batch of each epoch."""
    model = build(PRESETS["llama-toy"], 0, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y, _ = get_batch(load_corpus("", T), T, 0, 0, 24)
    said = ""
    for epoch in range(3):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(epoch))  # the sampler's
        rated = [(1e-3, x[rows], y[rows], y[rows].numel()) for rows in order.split(8)]
        *_, (loss, _) = plain_steps(model, optimizer, rated, 1.0)
        said += f"epoch {epoch}: loss {loss:.3f}\n"
    for program in PROGRAMS:
        lines = program.replace("batch=160", "batch=24").replace("128", str(T))
        lines = lines.replace("seed=0).to", "seed=0, dtype=DTYPE).to")
        names = {"DTYPE": torch.float64}
        lines = re.sub(r"\ndist\.(init|destroy)_process_group.*", "", lines)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(lines, names)
        assert printed.getvalue() == (said if dist.get_rank() == 0 else "")
        trained = names["model"]
        state = trained.full_state_dict() if "FSDP" in program else trained.module.state_dict()
        compare(state, model.state_dict())
    block, = [block for block in fenced(README, "python") if block.startswith("# from meta")]
    names = {"GPT": GPT, "cfg": PRESETS["llama-toy"], "device": "cpu", "state": state}
    names.update(torch=torch, FSDP=FSDP, from_meta=from_meta)
    exec(block, names)
    compare(names["model"].full_state_dict(), state)


def test_the_programs_of_readme():
    assert len(PROGRAMS) == 2
    run_ranks(check_programs, 2)


# {"zero": the block of your-model.md that uses its part 2}
EXAMPLES = {}
BLOCK = r"^\[(\w+)\.py\]\(\.\./\1\.py\):(.*?)^(?=\[|## )"
YOUR_MODEL = PAGES["your-model.md"]
for technique, text in re.findall(BLOCK, YOUR_MODEL, re.M | re.S):
    EXAMPLES[technique] = "".join(fenced(text, "python"))
GIVEN, = [block for block in fenced(YOUR_MODEL, "python") if block.startswith("# given")]
ROWS = {"zero", "amp_accum_ckpt", "moe"}  # a rank has rows; others the whole batch


def somebodys_model(name):
    """Two blocks of Llama's form; with moe, its MLPs are mixtures of four experts."""
    cfg = GPTConfig(2, 32, 4, 256, T, FORMS["llama"], 2, 44)
    if name == "moe":
        cfg = moe.mixture(cfg, experts=4, top_k=2)
    model = build(cfg, 0, dtype=torch.float64)
    if name == "moe":
        for block in model.blocks:
            block.mlp.alpha = 0.01  # as the page
            block.mlp.beta = 0.0
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
    extra_loss = moe.plain_balancing_losses if name == "moe" else None
    rated = [(1e-3, *batch) for batch in batches()]
    for _ in plain_steps(model, optimizer, rated, 1.0, extra_loss):
        yield None, gradients_of(model), model.state_dict()


def given(name):
    """What the page takes as given."""
    names = {"model": somebodys_model(name)}
    exec(GIVEN, names)
    return names


def example_training(name, block):
    """The lines as they stand, with the names of part 2 and what the page takes as given."""
    imports = rf"^from {name} import (\(.*?\)|.*?)$"  # the file has more than parts 1 and 2
    lines = re.sub(imports, "", block, flags=re.M | re.S).splitlines()
    first = lines.index("# each step")
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
        exec("\n".join(lines[first:]), names)
        yield None, *gathered(name, names, whole)


def gathered(name, names, whole):
    """-> gradients and parameters of the whole model, by its names."""
    model = names["model"]
    of_ranks = {"zero": "zero", "tensor_parallel": "tp", "moe": "ep"}
    if name in of_ranks:
        section = importlib.import_module(name)
        group = names[of_ranks[name]]
        return section.full_gradients(model, group), section.full_state_dict(model, group)
    if name == "pipeline_parallel":
        layers = ["tok", *[f"blocks.{i}" for i in range(len(whole.blocks))], "norm", "head"]
        section = importlib.import_module(name)
        found = section.full_gradients(model), section.full_state_dict(model)
        return [{re.sub(r"^\d+", lambda number: layers[int(number[0])], name): t
                 for name, t in of_kind.items()} for of_kind in found]
    return gradients_of(model), model.state_dict()


def check_examples():
    # ddp, fsdp and hybrid_3d are elsewhere; a further file may do without
    missing = {"zero", "tensor_parallel", "pipeline_parallel", "context_parallel", "moe",
               "amp_accum_ckpt"} - {*EXAMPLES}
    assert not missing, f"your-model.md has no block for {missing}"
    for name, block in EXAMPLES.items():
        plain = partial(plain_training, name)
        assert prove(plain, partial(example_training, name, block)), name


def test_examples_train_as_one_process_does():
    run_ranks(check_examples, 2)
