"""harness/prove.py: right training is equal, each planted mistake is seen, named and guessed."""
import contextlib
import io
import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn

from common import PRESETS, build, loss_sum
from conftest import check_each, run_ranks
from harness.prove import prove
from others import gradients_of


def make(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(dtype=torch.float64):
    rng = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield torch.randn(8, 6, generator=rng, dtype=torch.float64).to(dtype)


def plain(dtype=torch.float64):
    model, optimizer = make(dtype)
    for x in batches(dtype):
        optimizer.zero_grad()
        loss = model(x).square().sum() / len(x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        yield loss, gradients_of(model), model.state_dict()


def training(dtype=torch.float64, mistake=""):
    """Data parallel by hand, in which something may go wrong."""
    rank = dist.get_rank()
    n = dist.get_world_size()

    def parallel():
        model, optimizer = make(dtype)
        for x in batches(dtype):
            if mistake != "gradients pile up":
                optimizer.zero_grad()
            loss = model(x.chunk(n)[rank]).square().sum() / len(x)
            loss.backward()
            if mistake != "not summed":
                for p in model.parameters():
                    dist.all_reduce(p.grad)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            spoil(mistake, model, optimizer)
            optimizer.step()
            if mistake == "one rank":
                model[2].bias.data += 1e-6 * rank
            total = loss.detach().clone()
            dist.all_reduce(total)
            yield total, gradients_of(model), model.state_dict()

    return parallel


def spoil(mistake, model, optimizer):
    """What goes wrong before the optimizer's step."""
    if mistake == "rate":
        optimizer.param_groups[0]["lr"] = 0.9e-2
    elif mistake == "mean":
        for p in model.parameters():
            p.grad /= dist.get_world_size()
    elif mistake == "rows":
        model[0].weight.grad[4:] = 0
    elif mistake == "not finite":
        model[2].weight.grad[0, 0] = math.nan


MISTAKES = [
    ("rate", "parameter", "gradients are equal: look at the optimizer"),
    ("gradients pile up", "step 1, gradient", "equal until step 0"),
    ("not summed", "gradient", "ranks disagree with each other"),
    ("mean", "gradient", "0.500 times what it should be: a mean over the 2 ranks"),
    ("rows", "0.weight differs in rows 4 to 7 of 8 (rank 1's piece)", "zero: nothing arrives"),
    ("one rank", "parameter: 1 of 4", "2.bias on rank 1 alone"),
    ("not finite", "gradient: 1 of 4", "2.weight is not finite"),
]


def check_right():
    """Right code passes in each precision, and a factor of two shows."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert prove(partial(plain, dtype), training(dtype))
    assert not prove(partial(plain, torch.bfloat16), training(torch.bfloat16, "mean"))
    assert not prove(plain, training(mistake="rate"), tolerance=1e-10)
    assert prove(plain, training(mistake="rate"), tolerance=1.0)


def of_bf16(rate, n=1, rank=0):
    """A GPT-2 in bf16, whose biases begin as 0: AdamW makes whole steps of rounding."""
    model = build(PRESETS["toy"]._replace(layers=2, width=64, seq=32), 0, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    rng = torch.Generator().manual_seed(0)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randint(256, (8, 33), generator=rng).chunk(n)[rank]
        (loss_sum(model(x[:, :-1]), x[:, 1:]) / 256).backward()
        for p in model.parameters():
            if n > 1:
                dist.all_reduce(p.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield None, gradients_of(model), model.state_dict()


def check_bf16():
    for rate, is_right in (1e-3, True), (2e-3, False), (0.0, False):
        assert prove(lambda: of_bf16(1e-3), partial(of_bf16, rate, 2, dist.get_rank())) == is_right


def check_mistake(mistake, where, words):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert not prove(plain, training(mistake=mistake))
    if dist.get_rank() == 0:
        for expected in (where, words, "NOT EQUAL"):
            assert expected in said.getvalue(), said.getvalue()


def test_right_and_wrong():
    run_ranks(check_right, 2)
    run_ranks(check_bf16, 2)
    run_ranks(check_each, 2, check_mistake, MISTAKES)


def empty():
    yield None, {}, {}


def zeros():
    yield 0.0, {"a": torch.zeros(2)}, {"a": torch.ones(2)}


def cut(training, count):
    """The first so many steps of a training."""
    for step, _ in zip(training(), range(count)):
        yield step


def without_end():
    while True:
        yield from zeros()


def check_nothing_proved():
    for generator in (empty, zeros):
        assert not prove(generator, generator)
    parallel = training()
    assert not prove(plain, lambda: cut(parallel, 2 - dist.get_rank()))
    assert not prove(plain, lambda: cut(parallel, 2))
    assert not prove(lambda: cut(plain, 2), parallel)
    assert not prove(zeros, without_end)
    assert not prove(without_end, zeros)


def test_nothing_proved():
    run_ranks(check_nothing_proved, 2)


def without_gradient(change):
    """A row has none: what becomes of it is no rounding."""
    gradient = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    yield None, {"rows": gradient}, {"rows": torch.tensor([[1.0, 1.0], [1.0, change]])}


def test_alone():
    assert not prove(partial(without_gradient, 1.0), partial(without_gradient, 2.0))
    assert prove(plain, plain)
    assert not prove(plain, lambda: cut(plain, 1))
