import math

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import common
from common import IGNORE, PRESETS, build, get_batch, load_corpus
from conftest import run, script
from harness.compare import Trace, compare, worst_gap
from harness.ledger import Ledger, storage_of

# ---- the GPT and its data ------------------------------------------------------


@pytest.mark.parametrize("model, parameters", [
    ("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200)])
def test_is_gpt2(model, parameters):
    with torch.device("meta"):
        assert sum(p.numel() for p in common.GPT(PRESETS[model]).parameters()) == parameters


def test_weights_do_not_depend_on_what_is_built():
    cfg = PRESETS["toy"]
    model, again = build(cfg, 0), build(cfg, 0, dtype=torch.float64)
    block = common.Block(cfg)
    common.init_weights(block, cfg.layers, 0, prefix="blocks.2")
    for name, p in block.named_parameters():
        assert torch.equal(p, model.blocks[2].get_parameter(name))
    for p, q in zip(model.parameters(), again.parameters()):
        assert torch.equal(p.double(), q)
    assert model.head.weight is model.tok.weight
    assert not torch.equal(build(cfg, 1).tok.weight, model.tok.weight)
    assert model.tok.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.blocks[0].mlp.down.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.02)


def test_any_part_of_any_batch():
    corpus = load_corpus("", 32)
    assert len(corpus) > 1e6
    x, y, valid = get_batch(corpus, 32, 0, 5, 7, pad=0.3)
    assert valid == (y != IGNORE).sum() < y.numel()
    assert torch.equal(x[:, 1:][y[:, :-1] != IGNORE], y[:, :-1][y[:, :-1] != IGNORE])
    assert len(set((y != IGNORE).sum(1).tolist())) > 1, "padding is uneven"
    for i in range(7):
        part = get_batch(corpus, 32, 0, 5, 7, pad=0.3, rows=[i])
        assert torch.equal(part[0][0], x[i]) and torch.equal(part[1][0], y[i]) and part[2] == valid
    for seed, step in (0, 6), (1, 5):
        assert not torch.equal(get_batch(corpus, 32, seed, step, 7)[0], x)
    pads = [1 - get_batch(corpus, 32, 0, step, 64, pad=0.2)[2] / (64 * 32) for step in range(50)]
    assert sum(pads) / 50 == pytest.approx(0.2, abs=0.02)


def test_data_of_ones_own(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"x" * 40)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.txt").write_bytes(b"y" * 40)
    assert bytes(load_corpus(str(tmp_path), 16).tolist()) == b"y" * 40 + b"\n" + b"x" * 40
    script("ddp", 1, "--data", str(tmp_path), "--steps", "1", "--layers", "1", "--seq", "16")


def test_share():
    assert [list(common.share(7, 3, i)) for i in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]


# ---- bad usage -----------------------------------------------------------------


@pytest.mark.parametrize("flags, word", [
    (["--nonsense"], "--nonsense"), (["--steps", "-1"], "--steps"), (["--steps", "x"], "--steps"),
    (["--data", "no/such/file"], "no/such/file"), (["--model", "gpt9"], "gpt9"), (["--heads", "3"], "--heads 3"),
    (["--vocab", "255"], "255"), (["--lr", "nan"], "nan"), (["--pad", "1"], "--pad"), (["--clip", "-1"], "--clip"),
    (["--rank", "1"], "--rank"), (["--dry-run", "4", "--rank", "4"], "--rank 4"), (["--dry-run", "0"], "--dry-run"),
    (["--seq", "99999999"], "--seq"), (["--batch", "0"], "--batch"), (["--json", "no/such/r.json"], "no/such")])
def test_bad_usage(flags, word):
    assert word in script("ddp", 1, *flags, code=2)


@pytest.mark.parametrize("make", ["empty file", "empty folder", "short file", "unreadable"])
def test_bad_data(tmp_path, make):
    path = tmp_path if make == "empty folder" else tmp_path / "text"
    if make != "empty folder":
        path.write_bytes(b"" if make == "empty file" else b"x" * 128)
    if make == "unreadable":
        path = tmp_path / "loop"
        path.symlink_to(path)
    assert "--data" in script("ddp", 2, "--data", str(path), code=2)


# ---- the instruments -----------------------------------------------------------


def check_collectives():
    n = dist.get_world_size()
    model = nn.Linear(1, 1)
    x, big = torch.zeros(6), torch.zeros(6 * n)
    half = dist.new_group([0, 1])
    with Ledger(model, torch.optim.SGD(model.parameters())) as ledger:
        dist.all_reduce(x)
        dist.all_reduce(x, group=half) if dist.get_rank() < 2 else None
        dist.all_gather(list(big.split(6)), x)
        dist.all_to_all_single(torch.empty_like(big), big)
        splits = [1, 2, 3]
        dist.all_to_all_single(torch.empty(3 * splits[dist.get_rank()]), x, [splits[dist.get_rank()]] * 3, splits)
        dist.broadcast(x, 0)
        if dist.get_rank() < 2:
            other = 1 - dist.get_rank()
            ops = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, x.clone(), other)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
    inside, share = dist.get_rank() < 2, splits[dist.get_rank()] / 6
    want = {"all_reduce": (1 + inside, 48 * (1 + inside), 48 * 4 / 3 + 48 * inside), "all_gather": (1, 144, 96),
            "all_to_all": (2, 144 + 48, 96 + 48 * (1 - share)), "broadcast": (1, 48, 32)}
    if inside:
        want.update(send=(1, 48, 48), recv=(1, 48, 0))
    assert {k: tuple(c.values()) for k, c in ledger.collectives.items()} == want


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
    assert ledger.memory == {"parameters": 800, "gradients": 800, "optimizer": 1604, "activations": 600,
                             "peak": ledger.peak}
    # at the peak, in backward: weights, states, gradient, y, z, the sum, and up to three of its size on the way
    assert 800 + 1604 + 800 + 800 <= ledger.peak <= 800 + 1604 + 2 * 800 + 5 * 400
    assert ledger.saved_bytes == 0


def test_resized_storage_is_followed():
    layer = nn.Linear(4, 4)
    with Ledger(layer, torch.optim.SGD(layer.parameters())) as ledger:
        before = ledger.live["cpu"]
        t = torch.empty(1000)
        assert ledger.live["cpu"] == before + 4000
        storage_of(t).resize_(0)
        assert ledger.live["cpu"] == before
        storage_of(t).resize_(8000)
        assert ledger.live["cpu"] == before + 8000
        del t
        assert ledger.live["cpu"] == before and ledger.peak == before + 8000


def test_gaps():
    plain = {"a": torch.tensor([1.0, -2.0]), "b": torch.zeros(2), "c": torch.tensor(1e-3)}
    assert worst_gap(plain, plain)[0] == 0
    assert worst_gap({**plain, "a": torch.tensor([1.0, -2.2])}, plain) == (pytest.approx(0.1), "a")
    assert worst_gap({**plain, "b": torch.full((2,), 2e-6)}, plain) == (pytest.approx(0.01), "b")  # floor: 1e-4 of 2
    assert worst_gap({**plain, "a": torch.tensor([1.0, math.nan])}, plain) == (math.inf, "a")
    for wrong in ({"a": plain["a"]}, {**plain, "d": plain["a"]}, {**plain, "b": torch.zeros(3)}):
        with pytest.raises(AssertionError):
            worst_gap(wrong, plain)


def test_compare_judges_everything():
    def trace(loss=2.0, norm=1.0, gradient=1.0, weight=1.0):
        t = Trace()
        t.log(0, torch.tensor(loss), norm)
        t.keep(0, {"w": torch.tensor([gradient])}, {"w": torch.tensor([weight])})
        return t
    assert compare(trace(), trace(), "fp64")["passed"]
    for wrong in ("loss", "norm", "gradient", "weight"):
        check = compare(trace(**{wrong: 1.1}), trace(), "fp64")
        assert not check["passed"] and check["gradient_worst"] == "w, step 0"
        assert not compare(trace(**{wrong: math.nan}), trace(), "fp32")["passed"]
