"""common.py alone: both forms of the GPT, the text, the rate; and what a run does with them."""
import json
import math
from types import SimpleNamespace

import pytest
import torch

import common
import harness.run
from common import IGNORE, PRESETS, Text, build, get_batch, learning_rate, load_corpus
from conftest import SMALL, run_script
from harness.run import hold_out

SIZES = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
    "llama3-405b": 405_853_388_800,
}


def test_presets_have_the_published_sizes():
    for model, size in SIZES.items():
        with torch.device("meta"):
            gpt = common.GPT(PRESETS[model])
        assert sum(p.numel() for p in gpt.parameters()) == size, model


def test_weights_are_gpt2s():
    model = build(PRESETS["toy"], 0)
    assert model.head.weight is model.tok.weight
    assert model.tok.weight.std().item() == pytest.approx(0.02, rel=0.02)
    residual = model.blocks[0].mlp.down.weight
    assert residual.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.02)


def test_any_part_of_any_batch():
    """Padding is uneven, and its targets are not counted."""
    corpus = load_corpus("", 32)
    x, y, valid = get_batch(corpus, 32, 0, 5, 7, pad=0.3)
    there = y != IGNORE
    assert valid == there.sum() < y.numel() and len(set(there.sum(1).tolist())) > 1
    assert torch.equal(x[:, 1:][there[:, :-1]], y[:, :-1][there[:, :-1]])
    for i in range(7):
        part_x, part_y, part_valid = get_batch(corpus, 32, 0, 5, 7, pad=0.3, rows=[i])
        assert torch.equal(part_x[0], x[i]) and torch.equal(part_y[0], y[i])
        assert part_valid == valid
    for seed, step in ((0, 6), (1, 5)):
        assert not torch.equal(get_batch(corpus, 32, seed, step, 7)[0], x)


def test_data_of_ones_own(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"x" * 40)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.txt").write_bytes(b"y" * 40)
    text = load_corpus(str(tmp_path), 16)
    whole = b"y" * 40 + b"\n" + b"x" * 40
    size = len(text)
    assert size == len(whole)
    for start in range(len(text) - 17):
        part = text.between(start, len(text)).between(0, 17)
        assert bytes(torch.cat(part.parts).tolist()) == whole[start:start + 17]


def test_held_out_text_is_the_end():
    corpus = torch.arange(2020)
    rest, held_out = hold_out(Text([corpus]), 10)
    assert torch.equal(torch.cat([*rest.parts, *held_out.parts]), corpus)
    assert len(held_out) == 101


def test_the_rate():
    def rates(decay, warmup=2):
        args = SimpleNamespace(lr=8.0, warmup=warmup, decay=decay, min_lr=2.0, steps=6)
        return [learning_rate(step, args) for step in range(6)]

    assert rates("linear") == [4, 8, 8, 6.5, 5, 3.5]
    cosine = [5 + 3 * math.cos(math.pi * quarter / 4) for quarter in range(4)]
    assert rates("cosine") == pytest.approx([4, 8, *cosine])
    assert rates("none", warmup=0) == [8] * 6


def test_tokens_and_their_vocabulary(tmp_path):
    """nanoGPT's files; one that does not belong to the model ends in a line."""
    ids = torch.arange(300).mul(7).remainder(301)
    formats = {".bin": torch.uint16, ".u32": torch.uint32}
    for suffix, dtype in formats.items():
        path = tmp_path / ("tokens" + suffix)
        numbers = ids.to(dtype).numpy()
        path.write_bytes(numbers.tobytes())
        corpus = load_corpus(str(path), 299)
        x, y, _ = get_batch(corpus, 299, 0, 0, 1)
        assert torch.equal(x[0], ids[:-1])
        assert torch.equal(y[0], ids[1:])
    flags = (*SMALL, "--data", str(path))
    run_script("ddp", 2, *flags, "--vocab", "301")
    with pytest.raises(ValueError, match="tokens.bin has token ids"):
        load_corpus(str(tmp_path), 16)
    ids = torch.ones(340, dtype=torch.int64)
    ids[-1] = 999  # a target, in held-out text alone
    path.write_bytes(ids.to(dtype).numpy().tobytes())
    for more in ("--seq", "339"), ("--eval-every", "1"):
        said = run_script("ddp", 2, *flags, *more, code=2)
        assert "token 999 is beyond" in said


COURSE = ("--warmup 2 --decay cosine --min-lr 1e-4 --eval-every 2 --steps 5 --dtype fp64 "
          r"--train blocks\.1|norm").split()


def test_the_plain_run_has_the_rate_the_text_and_the_frozen_layers(tmp_path):
    path = tmp_path / "log"
    files = "--log-file", str(path), "--profile", str(tmp_path)
    report = run_script("ddp", 2, *SMALL, *COURSE, *files)
    block = 12 * 32**2 + 13 * 32
    multiplied = 2 * block + 2 * 32 + 256 * 32  # with the last norm and the head, which is tied
    attention = 12 * 2 * 32 * 16
    assert report["flops"]["per_token"] == 6 * multiplied + attention
    check = report["check"]
    assert check["passed"] and check["validation"] <= 1e-10
    assert list(report["validation"]) == ["-1", "1", "3", "4"]
    block = 16 - 4  # of a block's tensors, norms are counted among the norms
    assert check["gradients_compared"] == block + 2 * 4 + 2
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert {"loss", "norm", "rate", "ms", "tokens", "held", "process_peak"} <= lines[0].keys()
    assert "validation" in lines[4]
    assert max(line.get("communication", 0) for line in lines) > 0


def test_a_long_run_is_checked_in_its_first_steps():
    report = run_script("ddp", 2, *SMALL, "--steps", "6", plant=check_three_steps)
    assert len(report["loss"]) == 6 and len(report["plain_loss"]) == 3
    assert report["check"]["passed"]


def check_three_steps(module):
    harness.run.CHECKED = 3


def no_room_for_the_plain_model(module):
    def plain(run):
        raise torch.OutOfMemoryError

    harness.run.Run.plain = plain


def test_where_the_plain_model_does_not_fit_the_run_goes_on_unchecked():
    report = run_script("ddp", 2, *SMALL, plant=no_room_for_the_plain_model)
    assert report["check"] is None and report["plain_loss"] is None
    assert report["args"]["vocab"] == 256  # as resolved
