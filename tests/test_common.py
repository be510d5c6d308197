"""common.py, and the instruments that need no technique: the ledger, the comparison, the report."""
import json
import math
import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import common
from common import IGNORE, PRESETS, build, get_batch, hold_out, learning_rate, load_corpus
from conftest import SMALL, alone, run, script
from harness.compare import Trace, compare, tolerance, worst_gap
from harness.ledger import Ledger, storage_of
from harness.report import StepLog, bars, colored

# ---- the GPT -------------------------------------------------------------------

SIZES = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}


@pytest.mark.parametrize("model", SIZES)
def test_is_gpt2(model):
    with torch.device("meta"):
        gpt = common.GPT(PRESETS[model])
    assert sum(p.numel() for p in gpt.parameters()) == SIZES[model]


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


def test_as_much_padding_as_asked_for():
    corpus = load_corpus("", 32)
    padded = []
    for step in range(50):
        valid = get_batch(corpus, 32, 0, step, 64, pad=0.2)[2]
        padded.append(1 - valid / (64 * 32))
    assert sum(padded) / 50 == pytest.approx(0.2, abs=0.02)


def test_data_of_ones_own(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"x" * 40)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.txt").write_bytes(b"y" * 40)
    text = bytes(load_corpus(str(tmp_path), 16).tolist())
    assert text == b"y" * 40 + b"\n" + b"x" * 40
    script("ddp", 1, "--data", str(tmp_path), "--steps", "1", "--layers", "1", "--seq", "16")


@pytest.mark.parametrize("size", [300, 1000, 12345])
def test_held_out_text_is_the_end_and_never_trained_on(size):
    corpus = torch.arange(size) % 251
    text, held_out = hold_out(corpus, 16, "--eval-every")
    assert torch.equal(torch.cat([text, held_out]), corpus)
    assert len(held_out) == max(size // 20, 17)


def test_every_window_is_read_once():
    text = torch.arange(101)
    seen = []
    batches = common.held_out_batches(text, 10, 4)
    for k in range(batches):
        x, y, valid = common.held_out_batch(text, 10, k, 4)
        there = y != IGNORE
        assert there.sum() == valid
        seen += y[there].tolist()
        part = common.held_out_batch(text, 10, k, 4, rows=[3])
        assert torch.equal(part[0][0], x[3]) and torch.equal(part[1][0], y[3])
    assert seen == list(range(1, 101))


def test_share():
    assert [list(common.share(7, 3, i)) for i in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]


def test_a_model_that_cannot_be_built_leaves_the_default_dtype():
    before = torch.get_default_dtype()
    with pytest.raises(ZeroDivisionError):
        build(common.GPTConfig(heads=0), 0, dtype=torch.bfloat16)
    assert torch.get_default_dtype() == before


def test_an_interrupted_run_counts_the_steps_it_has_resumed(monkeypatch):
    said = []
    monkeypatch.setattr(os, "_exit", sys.exit)
    run = SimpleNamespace(dry=False, impls=["scratch"], times={"scratch": [1.0] * 3}, first=10,
                          args=SimpleNamespace(steps=20), say=said.append)
    with pytest.raises(SystemExit):
        common.Run.__exit__(run, KeyboardInterrupt)
    assert said == ["interrupted after 13 of 20 steps"]


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


def test_a_wrong_validation_loss_fails():
    flags = (*SMALL, "--eval-every", "1", "--dtype", "fp64", "--steps", "3")
    report = script("ddp", 2, *flags, plant=half_of_the_validation, code=1)
    assert report["check"]["validation"] > 0.1 > report["check"]["loss"]


def half_of_the_validation(module):
    module.evaluate = lambda model, x, y: common.loss_sum(model(x[:1]), y[:1])


def test_a_pattern_that_matches_nothing():
    assert "matches no parameter" in script("ddp", 2, *SMALL, "--train", "heads", code=2)


def test_the_log_of_steps(tmp_path):
    path = tmp_path / "log"
    script("ddp", 2, *SMALL, "--steps", "3", "--eval-every", "3", "--log", str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert {"loss", "norm", "rate", "ms", "tokens"} <= lines[0].keys()
    assert "validation" in lines[2] and "validation" not in lines[1]


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
    common.CHECKED = 3


# ---- bad usage -----------------------------------------------------------------


@pytest.mark.parametrize("make", ["empty file", "empty folder", "short file", "unreadable"])
def test_bad_data(tmp_path, make):
    path = tmp_path / "text"
    if make == "empty folder":
        path = tmp_path
    elif make == "empty file":
        path.touch()
    elif make == "short file":
        path.write_bytes(b"x" * 128)
    else:
        path = tmp_path / "loop"
        path.symlink_to(path)
    assert "--data" in script("ddp", 2, "--data", str(path), code=2)


# ---- the ledger ----------------------------------------------------------------


def exchange(x):
    """Ranks 0 and 1 swap tensors."""
    other = 1 - dist.get_rank()
    sending = dist.P2POp(dist.isend, x, other)
    receiving = dist.P2POp(dist.irecv, x.clone(), other)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()


def check_collectives():
    n = dist.get_world_size()
    rank = dist.get_rank()
    model = nn.Linear(1, 1)
    x = torch.zeros(6)
    big = torch.zeros(6 * n)
    half = dist.new_group([0, 1])
    splits = [1, 2, 3]
    mine = splits[rank]
    inside = rank < 2
    with Ledger(model, torch.optim.SGD(model.parameters())) as ledger:
        dist.all_reduce(x)
        dist.all_gather(list(big.split(6)), x)
        dist.all_to_all_single(torch.empty_like(big), big)
        dist.all_to_all_single(torch.empty(3 * mine), x, [mine] * 3, splits)
        dist.broadcast(x, 0)
        if inside:
            dist.all_reduce(x, group=half)
            exchange(x)
    want = {  # calls, payload, wire
        "all_reduce": (1, 48, 48 * 4 / 3),
        "all_gather": (1, 144, 96),
        "all_to_all": (2, 144 + 48, 96 + 48 * (1 - mine / 6)),
        "broadcast": (1, 48, 32),
    }
    if inside:
        want["all_reduce"] = (2, 96, 48 * 4 / 3 + 48)
        want["send"] = (1, 48, 48)
        want["recv"] = (1, 48, 0)
    assert {kind: tuple(c.values()) for kind, c in ledger.collectives.items()} == want


def test_collectives_are_counted():
    run(check_collectives, 3)


def test_memory_is_counted():
    layer = nn.Linear(10, 20, bias=False)  # 800 bytes
    optimizer = common.adamw(layer.parameters(), 1e-3)
    x = torch.ones(5, 10)
    for _ in range(2):
        with Ledger(layer, optimizer) as ledger:
            optimizer.zero_grad()
            y = layer(x)  # 400 bytes; x is kept for backward: 200
            z = y.square()  # 400 bytes, y is kept: 400
            z.sum().backward()
            optimizer.step()
            del y, z
    held = {"parameters": 800, "gradients": 800, "optimizer": 1604}
    assert ledger.memory == {**held, "activations": 600, "peak": ledger.peak}
    # at the peak, in backward: weights, states, gradient, y, z, the sum, and up to three tensors
    # of the sum's size on the way
    assert 800 + 1604 + 800 + 800 <= ledger.peak <= 800 + 1604 + 2 * 800 + 5 * 400
    assert ledger.saved_bytes == 0


def test_resized_storage_is_followed():
    layer = nn.Linear(4, 4)
    with Ledger(layer, torch.optim.SGD(layer.parameters())) as ledger:
        before = ledger.live["cpu"]
        t = torch.empty(1000)
        assert ledger.live["cpu"] == before + 4000
        assert storage_of(t).resize_(0) is not None
        assert ledger.live["cpu"] == before
        storage_of(t).resize_(8000)
        assert ledger.live["cpu"] == before + 8000
        del t
        assert ledger.live["cpu"] == before
        assert ledger.peak == before + 8000


def test_ledgers_may_be_nested():
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters())
    resize = torch.UntypedStorage.resize_
    with Ledger(layer, optimizer) as outer:
        with Ledger(layer, optimizer) as inner:
            t = torch.empty(1000)
            storage_of(t).resize_(8000)
        assert outer.peak == inner.peak
        storage_of(t).resize_(16000)
        assert outer.peak == inner.peak + 8000
    assert torch.UntypedStorage.resize_ is resize


def test_host_and_device_bytes_are_apart():
    with Ledger(held=lambda: {"parameters": [], "gradients": []}, device="meta") as ledger:
        on_device = torch.empty(100, device="meta")
        on_host = torch.empty(50)
    assert (ledger.memory["peak"], ledger.memory["host"]) == (on_device.nbytes, on_host.nbytes)


# ---- the comparison ------------------------------------------------------------

PLAIN = {"a": torch.tensor([1.0, -2.0]), "b": torch.zeros(2), "c": torch.tensor(1e-3)}


def test_gaps():
    assert worst_gap(PLAIN, PLAIN)[0] == 0
    off = {**PLAIN, "a": torch.tensor([1.0, -2.2])}
    assert worst_gap(off, PLAIN) == (pytest.approx(0.1), "a")
    off = {**PLAIN, "b": torch.full((2,), 2e-6)}
    assert worst_gap(off, PLAIN) == (pytest.approx(0.01), "b")  # over the floor, 1e-4 of 2
    off = {**PLAIN, "a": torch.tensor([1.0, math.nan])}
    assert worst_gap(off, PLAIN) == (math.inf, "a")


@pytest.mark.parametrize("wrong", [
    {"a": PLAIN["a"]},
    {**PLAIN, "d": PLAIN["a"]},
    {**PLAIN, "b": torch.zeros(3)},
])
def test_every_tensor_must_be_there(wrong):
    with pytest.raises(AssertionError):
        worst_gap(wrong, PLAIN)


def trace(loss=2.0, norm=1.0, gradient=1.0, weight=1.0, validation=3.0):
    made = Trace()
    made.log(0, torch.tensor(loss), norm)
    made.validation[0] = torch.tensor(validation)
    made.keep(0, {"w": torch.tensor([gradient])}, {"w": torch.tensor([weight])})
    return made


@pytest.mark.parametrize("wrong", ["loss", "norm", "gradient", "weight", "validation"])
def test_compare_judges_everything(wrong):
    assert compare(trace(), trace(), "fp64")["passed"]
    check = compare(trace(**{wrong: 1.1}), trace(), "fp64")
    assert not check["passed"] and check["gradient_worst"] == "w, step 0"
    assert not compare(trace(**{wrong: math.nan}), trace(), "fp32")["passed"]


def test_the_tolerance_is_bounded():
    assert tolerance("fp32", 3) == tolerance("fp32", 20) == pytest.approx(2e-3)
    assert tolerance("fp32", 200) == tolerance("fp32", 10**6) == pytest.approx(2e-2)
    assert tolerance("fp64", 10**6) == 1e-10


# ---- the terminal --------------------------------------------------------------


def test_bars():
    lines = bars([("parameters", 2e6), ("gradients", 1e6)])
    assert lines[0].count("#") == 2 * lines[1].count("#") == 40
    assert lines[1].endswith("1.000 MB")


def test_colors_are_for_terminals_alone():
    assert colored("PASSED", "32") == "PASSED"


def test_this_suite_runs_on_cpus():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def no_room_for_the_plain_model(module):
    def plain(run):
        raise torch.OutOfMemoryError

    common.Run.plain = plain


def test_where_the_plain_model_does_not_fit_the_run_goes_on_unchecked():
    report = script("ddp", 2, *SMALL, plant=no_room_for_the_plain_model)
    assert report["check"] is None and report["plain_loss"] is None
    assert len(report["loss"]) == 2
    assert report["args"]["timeout"] == common.TIMEOUT["gloo"]  # as resolved


def test_the_report_has_args_as_resolved():
    result, = alone("ddp", ["--layers", "2", "--steps", "1", "--no-check"])
    args = result["args"]
    preset = PRESETS[args["model"]]
    for name in "width", "heads", "vocab", "seq":
        assert args[name] == getattr(preset, name), name
    assert args["layers"] == 2 and args["batch"] == 8
