"""common.py alone: both forms of the GPT, the text, the rate; and what a run does with them."""
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import common
import harness.run
from common import IGNORE, PRESETS, Text, build, get_batch, learning_rate, load_corpus
from conftest import ROOT, SMALL, alone, script
from harness.report import StepLog
from harness.validate import HeldOut

# ---- the GPT -------------------------------------------------------------------

SIZES = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}


def test_presets_have_the_published_sizes():
    for model, size in SIZES.items():
        with torch.device("meta"):
            gpt = common.GPT(PRESETS[model])
        assert sum(p.numel() for p in gpt.parameters()) == size, model


def test_rotary_positions():
    """Scores depend on how far apart two tokens are, and on nothing else of their places."""
    q, k = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64)
    places = torch.arange(5)
    scores = []
    for start in (0, 7):
        turned = [common.rotate(x, places + start, 1e4) for x in (q, k)]
        scores.append(turned[0] @ turned[1].transpose(2, 3))
    torch.testing.assert_close(*scores)
    assert not torch.allclose(scores[0], q @ k.transpose(2, 3))


def test_common_needs_torch_alone(tmp_path):
    """Imported in a folder where nothing else is."""
    (tmp_path / "common.py").write_bytes((ROOT / "common.py").read_bytes())
    code = "import common, sys; print(sorted({'harness', 'tools'} & sys.modules.keys()))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "[]\n", done.stderr


def test_weights_do_not_depend_on_what_is_built():
    cfg = PRESETS["toy"]
    model = build(cfg, 0)
    block = common.Block(cfg)
    common.init_weights(block, cfg.layers, 0, prefix="blocks.2")
    for name, p in block.named_parameters():
        assert torch.equal(p, model.blocks[2].get_parameter(name))
    wide = build(cfg, 0, dtype=torch.float64)
    for p, q in zip(model.parameters(), wide.parameters()):
        assert torch.equal(p.double(), q)


def test_weights_are_gpt2s():
    model = build(PRESETS["toy"], 0)
    assert model.head.weight is model.tok.weight
    assert not torch.equal(build(PRESETS["toy"], 1).tok.weight, model.tok.weight)
    assert model.tok.weight.std().item() == pytest.approx(0.02, rel=0.02)
    residual = model.blocks[0].mlp.down.weight
    assert residual.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.02)


# ---- the data ------------------------------------------------------------------


def test_padding_is_uneven_and_counted():
    x, y, valid = get_batch(load_corpus("", 32), 32, 0, 5, 7, pad=0.3)
    there = y != IGNORE
    assert valid == there.sum() < y.numel()
    assert torch.equal(x[:, 1:][there[:, :-1]], y[:, :-1][there[:, :-1]])
    assert len(set(there.sum(1).tolist())) > 1


def test_any_part_of_any_batch():
    corpus = load_corpus("", 32)
    assert len(corpus) > 1e6
    x, y, valid = get_batch(corpus, 32, 0, 5, 7, pad=0.3)
    for i in range(7):
        part_x, part_y, part_valid = get_batch(corpus, 32, 0, 5, 7, pad=0.3, rows=[i])
        assert torch.equal(part_x[0], x[i])
        assert torch.equal(part_y[0], y[i])
        assert part_valid == valid
    for seed, step in ((0, 6), (1, 5)):
        assert not torch.equal(get_batch(corpus, 32, seed, step, 7)[0], x)


def test_data_of_ones_own(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"x" * 40)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.txt").write_bytes(b"y" * 40)
    text = load_corpus(str(tmp_path), 16)
    whole = b"y" * 40 + b"\n" + b"x" * 40
    assert len(text) == len(whole)
    for start in range(60):
        assert bytes(text.window(start, 17).tolist()) == whole[start:start + 17]
        part = text.between(start, 81)
        assert bytes(part.window(0, len(part)).tolist()) == whole[start:]
    script("ddp", 1, "--data", str(tmp_path), "--steps", "1", "--layers", "1", "--seq", "16")


@pytest.mark.parametrize("size", [300, 1000, 12345])
def test_held_out_text_is_the_end_and_never_trained_on(size):
    corpus = torch.arange(size) % 251
    held_out = HeldOut(Text([corpus]), 16, 4)
    parts = [text.window(0, len(text)) for text in (held_out.rest, held_out.text)]
    assert torch.equal(torch.cat(parts), corpus)
    assert len(held_out.text) == max(size // 20, 17)


def test_every_window_is_read_once():
    held_out = HeldOut(Text([torch.arange(2020)]), 10, 4)
    seen = []
    for k in range(held_out.batches):
        x, y = held_out.batch(k)
        seen += y[y != IGNORE].tolist()
        part = held_out.batch(k, rows=[3])
        assert torch.equal(part[0][0], x[3]) and torch.equal(part[1][0], y[3])
    assert seen == list(range(1920, 2020)) and held_out.targets == 100


# ---- the rate ------------------------------------------------------------------


def rates(decay, warmup=2):
    args = SimpleNamespace(lr=8.0, warmup=warmup, decay=decay, min_lr=2.0, steps=6)
    return [learning_rate(step, args) for step in range(6)]


def test_the_rate():
    assert rates("none") == [4, 8, 8, 8, 8, 8]
    assert rates("linear") == [4, 8, 8, 6.5, 5, 3.5]
    cosine = [5 + 3 * math.cos(math.pi * quarter / 4) for quarter in range(4)]
    assert rates("cosine") == pytest.approx([4, 8, *cosine])
    assert rates("none", warmup=0) == [8] * 6


SCHEDULE = ("--warmup", "2", "--decay", "cosine", "--min-lr", "1e-4", "--eval-every", "2")


def test_the_plain_run_has_the_rate_the_text_and_the_frozen_layers():
    flags = (*SMALL, *SCHEDULE, "--train", r"blocks\.1|norm", "--dtype", "fp64", "--steps", "5")
    report = script("ddp", 2, *flags)
    check = report["check"]
    assert check["passed"] and check["validation"] <= 1e-10
    assert list(report["validation"]) == ["-1", "1", "3", "4"]
    block = 16 - 4  # of a block's tensors, norms are counted among the norms
    assert check["gradients_compared"] == block + 2 * 4 + 2


def test_a_rate_that_does_not_change_fails():
    """Planted in the ranks' steps alone: the plain run keeps its own."""
    report = script("ddp", 2, *SMALL, *SCHEDULE, "--steps", "4", plant=step_at_full_rate, code=1)
    assert report["check"]["parameter"] > 1e-3


def step_at_full_rate(module):
    step = module.train_step

    def wrong(model, optimizer, *batch):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        return step(model, optimizer, *batch)

    module.train_step = wrong


def test_a_pattern_that_matches_nothing():
    assert "matches no parameter" in script("ddp", 2, *SMALL, "--train", "heads", code=2)


HELD = ("parameters", "gradients", "optimizer")


def test_the_log_of_steps(tmp_path):
    path = tmp_path / "log"
    flags = ("--steps", "3", "--eval-every", "3", "--log-file", str(path))
    report = script("ddp", 2, *SMALL, *flags, "--profile", str(tmp_path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert {"loss", "norm", "rate", "ms", "tokens", "held", "peak"} <= lines[0].keys()
    memory = report["ranks"][0]["memory"]
    held = [memory[kind] for kind in HELD]
    assert lines[2]["held"] == sum(held)
    assert "validation" in lines[2]
    assert "validation" not in lines[1]
    assert lines[1]["communication"] > 0
    assert "communication" not in lines[2]


def test_a_log_goes_on_where_a_killed_run_was(tmp_path):
    path = tmp_path / "log"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    log = StepLog(str(path), 2)
    log.write(step=2, loss=1.0)
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2, "loss": 1.0}\n'


def test_a_long_run_is_checked_in_its_first_steps():
    report = script("ddp", 2, *SMALL, "--steps", "6", plant=check_three_steps)
    assert len(report["loss"]) == 6 and len(report["plain_loss"]) == 3
    assert report["check"]["passed"]


def check_three_steps(module):
    harness.run.CHECKED = 3


# ---- a run ---------------------------------------------------------------------


def no_room_for_the_plain_model(module):
    def plain(run):
        raise torch.OutOfMemoryError

    harness.run.Run.plain = plain


def test_where_the_plain_model_does_not_fit_the_run_goes_on_unchecked():
    report = script("ddp", 2, *SMALL, plant=no_room_for_the_plain_model)
    assert report["check"] is None and report["plain_loss"] is None
    assert len(report["loss"]) == 2
    assert report["args"]["timeout"] == harness.run.TIMEOUT["gloo"]  # as resolved


def test_the_report_has_args_as_resolved():
    result, = alone("ddp", ["--layers", "2", "--steps", "1", "--no-check"])
    args = result["args"]
    preset = PRESETS[args["model"]]
    for name in "width", "heads", "vocab", "seq":
        assert args[name] == getattr(preset, name), name
    assert args["layers"] == 2 and args["batch"] == 8
