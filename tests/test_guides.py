"""Pages of docs/ that one follows: their commands print what they say, and facts are facts."""
import contextlib
import importlib.util
import io
import json
import os
import re
import sys
import types
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import tensor_parallel as section
from common import FORMS, PRESETS, GPTConfig, adamw, build, loss_sum, plain_steps
from conftest import ROOT, run_ranks, run_script, run_tool, to_file
from harness.prove import prove
from test_bad_usage import flags_of
from test_readme import batches

YOUR_MODEL = (ROOT / "docs" / "your-model.md").read_text()
FINE_TUNING = (ROOT / "docs" / "fine-tuning.md").read_text()
RUN_PAGE = (ROOT / "docs" / "how-a-run-works.md").read_text()

# {"mine": the code block that begins with # mine.py}
PAGE = dict(re.findall(r"```python\n(?=# (\w+)\.py)(.*?)```", YOUR_MODEL, re.S))


def said_by(source):
    """What a script prints, the last word: its exit code or the error that it raises."""
    said = io.StringIO()
    end = "exit 0"
    with contextlib.redirect_stdout(said):
        try:
            exec(source, {"__name__": "__main__"})
        except SystemExit as error:
            end = f"exit {error.code}"
        except AssertionError as error:
            end = f"AssertionError: {error}"
    return said.getvalue() + end


def run_scripts(names, path):
    """Scripts of the page, one after the other -> what rank 0 says, as JSON in a file."""
    dist.init_process_group = lambda backend: None
    dist.destroy_process_group = lambda: None
    for name in ("mine", "with_tp", "with_hybrid"):  # which others import
        sys.modules[name] = types.ModuleType(name)
        exec(PAGE[name], vars(sys.modules[name]))
    said = [said_by(PAGE[name]) for name in names]
    if dist.get_rank() == 0:
        path.write_text(json.dumps(said))


def without_rounding(text):
    """Gaps of right code are rounding, which differs between machines; so does the speed."""
    text = re.sub(r"(speed|compute) .*", r"\1", text)
    return re.sub(r"\d\.\de(-1[2-9]|\+00)( \([\w.]+\))?", "rounding", text)


def test_what_the_scripts_print(tmp_path):
    """Word for word."""
    command_and_output = r"```\n(?:python|torchrun [^\n]*=(\d)) (\w+)\.py\n```\n\n```\n(.*?)```"
    found = re.findall(command_and_output, YOUR_MODEL, re.S)
    assert [name for _, name, _ in found] == list(PAGE)
    on_two = [name for ranks, name, _ in found if ranks != "8"]
    run_ranks(run_scripts, 2, on_two, tmp_path / "two")
    run_ranks(run_scripts, 8, [name for name in PAGE if name not in on_two], tmp_path / "eight")
    printed = [*json.loads((tmp_path / "two").read_text()),
               *json.loads((tmp_path / "eight").read_text())]
    for (_, _, stated), said in zip(found, printed, strict=True):
        assert without_rounding(said) == without_rounding(stated) + "exit 0"


def test_the_report_of_the_page_is_printed(tmp_path):
    flags = re.search(r"`./run.sh ddp 2 (.*)` ends with", RUN_PAGE)[1]
    report, = re.findall(r"ends with\n\n```\n(.*?)```", RUN_PAGE, re.S)
    run_script("ddp", 2, *flags.split(), plant=partial(to_file, str(tmp_path / "said")))
    printed = (tmp_path / "said").read_text()
    assert without_rounding(printed).endswith("\n" + without_rounding(report))


BLOCKS = dict(re.findall(r"```python\n# (\w+)(?:\.py)?\n(.*?)```", FINE_TUNING, re.S))
EXTRAS = ("tokenizers", "transformers", "safetensors")


def typed(command, folder):
    """A command of the page, run from here -> what it says, or the report of a technique."""
    if command.startswith("torchrun"):
        words = command.split()
        file = next(i for i, word in enumerate(words) if word.endswith(".py"))
        plant = partial(to_file, folder / "said")
        return run_script(words[file][:-3], 2, *words[file + 1:], plant=plant)
    program, *words = command.removeprefix("python ").split()
    if program == "tools/weights.py":
        return run_tool("weights", *words)
    exec(BLOCKS[program[:-3]].replace("tune/", f"{folder}/tune/"), {})
    return ""


def test_from_tokens_to_a_tuned_model(tmp_path, monkeypatch):
    """The page's files and commands, and what they say. It takes the libraries that the page names:
    where they are not installed, nothing of it can be typed."""
    if not all(map(importlib.util.find_spec, EXTRAS)):
        print(f"not run: {EXTRAS} are not installed")
        return
    monkeypatch.chdir(tmp_path)
    said = []
    lines = "".join(re.findall(r"```sh\n(.*?)```", FINE_TUNING, re.S)).splitlines()
    for line in lines:
        line = os.path.expandvars(line.replace("tune/", f"{tmp_path}/tune/"))
        name, is_setting, value = line.partition('="')
        if is_setting:
            monkeypatch.setenv(name, value[:-1])
        else:
            said.append(typed(line, tmp_path))
    imported = re.search(r"```\n(170,400 .*?)```", FINE_TUNING, re.S)[1]
    assert imported.strip() in said[2].replace(f"{tmp_path}/", "")
    first, last = [report for report in said if isinstance(report, dict)]
    assert first["check"]["passed"] and last["check"]["passed"]
    held_out = re.findall(r" (\d\.\d+)$", (tmp_path / "said").read_text(), re.M)
    assert float(held_out[0]) == pytest.approx(7.0, abs=0.1)
    assert float(held_out[-1]) == pytest.approx(5.7, abs=0.2)


def test_a_head_of_ones_own():
    names = {"nn": nn, "F": F, "model": build(PRESETS["toy"], 0)}
    names.update(ids=torch.zeros(2, 8, dtype=torch.int64), labels=torch.tensor([0, 2]))
    exec(BLOCKS["head"], names)
    names["loss"].backward()
    model = names["model"]
    assert model.tok.weight.grad is not None and model.head.weight is not model.tok.weight


def adapted():
    """The toy in Llama's form with the page's adapters."""
    model = build(GPTConfig(2, 32, 4, 256, 16, FORMS["llama"], 2, 44), 0, dtype=torch.float64)
    torch.manual_seed(0)
    exec(BLOCKS["adapters"], {"nn": nn, "model": model})
    return model


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def plain_adapters():
    model = adapted()
    optimizer = adamw(trained(model), 1e-2)
    for loss, _ in plain_steps(model, optimizer, [(1e-2, *batch) for batch in batches()], 0.1):
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        yield loss, gradients, model.state_dict()


def adapters_under_tensor_parallel():
    tp = section.TensorParallel()
    names = {**vars(section)}
    exec(BLOCKS["plan"], names)
    model = section.cut_model(adapted(), tp, names["PLAN"])
    optimizer = adamw(trained(model), 1e-2)
    for x, y, valid in batches():
        optimizer.zero_grad()
        loss = loss_sum(model(x), y) / valid
        loss.backward()
        section.sum_gradients(model, tp)
        nn.utils.clip_grads_with_norm_(trained(model), 0.1, section.gradient_norm(model, tp))
        optimizer.step()
        yield loss, section.full_gradients(model, tp), section.full_state_dict(model, tp)


def check_adapters():
    assert prove(plain_adapters, adapters_under_tensor_parallel)


def test_adapters():
    run_ranks(check_adapters, 2)


def test_the_flags_of_our_files():
    for names, flags in re.findall(r"\| (\[\w+\.py\][^|`]*)([^|]*) \|$", RUN_PAGE, re.M):
        for name in re.findall(r"\[(\w+)\.py\]", names):
            for flag in re.findall(r"`--([\w-]+)", flags):
                assert f"--{flag.removeprefix('no-')}" in flags_of(name), f"{name} --{flag}"
