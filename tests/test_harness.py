"""Instruments of the harness, alone: what they say of faults and of other people's traces."""
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from common import adamw
from conftest import run_ranks
from harness.compare import Trace, compare
from harness.ledger import Ledger, storage_of
from harness.profiler import exposed_time
from harness.prove import differences
from harness.report import verdict


def test_a_host_that_launches_a_collective_moves_nothing():
    """Of 16 units NCCL's kernel takes 6, 4 of which a multiplication hides."""
    events = []
    for name, start, length, kind in (
            ("gemm", 0, 14, "kernel"), ("ncclDevKernel_AllReduce", 10, 6, "kernel"),
            ("nccl:all_reduce", 0, 90, "user_annotation")):
        events.append({"ph": "X", "name": name, "ts": start, "dur": length, "cat": kind})
    assert exposed_time(events) == (6, 2)


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
    mine = [1, 2, 3][rank]
    with Ledger(model, torch.optim.SGD(model.parameters())) as ledger:
        dist.all_reduce(x)
        dist.reduce(x, dst=1)
        dist.all_gather(list(big.split(6)), x)
        dist.all_to_all_single(torch.empty_like(big), big)
        dist.all_to_all_single(torch.empty(3 * mine), x, [mine] * 3, [1, 2, 3])
        if rank < 2:
            dist.all_reduce(x, group=half)
            exchange(x)
    want = {  # calls, payload, wire
        "all_reduce": (1, 48, 48 * 4 / 3),
        "reduce": (1, 48, 32),
        "all_gather": (1, 144, 96),
        "all_to_all": (2, 144 + 48, 96 + 48 * (1 - mine / 6)),
    }
    if rank < 2:
        want["all_reduce"] = (2, 96, 48 * 4 / 3 + 48)
        want["send"] = (1, 48, 48)
        want["recv"] = (1, 48, 0)
    assert {kind: tuple(c.values()) for kind, c in ledger.collectives.items()} == want


def test_collectives_are_counted():
    run_ranks(check_collectives, 3)


def test_memory_is_counted():
    layer = nn.Linear(10, 20, bias=False)  # 800 bytes
    optimizer = adamw(layer.parameters(), 1e-3)
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
    assert ledger.memory == {**held, "activations": 600, "peak": ledger.peaks["cpu"]}
    # at the peak, in backward: weights, states, gradient, y, z, the sum, and up to three tensors
    # of the sum's size on the way
    assert 800 + 1604 + 800 + 800 <= ledger.peaks["cpu"] <= 800 + 1604 + 2 * 800 + 5 * 400
    assert ledger.saved_bytes == 0


def test_resized_storage_is_followed():
    layer = nn.Linear(4, 4)
    with Ledger(layer, torch.optim.SGD(layer.parameters())) as ledger:
        before = ledger.live["cpu"]
        t = torch.empty(1000)
        storage_of(t).resize_(0)
        assert ledger.live["cpu"] == before
        storage_of(t).resize_(8000)
        assert ledger.live["cpu"] == before + 8000
        del t
        assert ledger.live["cpu"] == before and ledger.peaks["cpu"] == before + 8000


PLAIN = {"a": torch.tensor([1.0, -2.0]), "b": torch.zeros(2), "c": torch.tensor(1e-3)}


def worst_gap(ours, plain):
    found = differences(ours, plain, limit=1e-10, ranks=2)
    name = max(found, key=lambda name: found[name][0])
    return found[name][0], name


def test_gaps():
    """Every tensor must be there."""
    assert worst_gap(PLAIN, PLAIN)[0] == 0
    off = {**PLAIN, "a": torch.tensor([1.0, -2.2])}
    assert worst_gap(off, PLAIN) == (pytest.approx(0.1), "a")
    off = {**PLAIN, "b": torch.full((2,), 2e-6)}
    assert worst_gap(off, PLAIN) == (pytest.approx(0.01), "b")  # over the floor, 1e-4 of 2
    off = {**PLAIN, "a": torch.tensor([1.0, math.nan])}
    assert worst_gap(off, PLAIN) == (math.inf, "a")
    more = {**PLAIN, "d": PLAIN["a"]}
    other = {**PLAIN, "b": torch.zeros(3)}
    for wrong in ({"a": PLAIN["a"]}, more, other):
        assert worst_gap(wrong, PLAIN)[0] == math.inf


def trace(loss=2.0, norm=1.0, gradient=1.0, weight=1.0, validation=3.0):
    made = Trace()
    made.log(0, torch.tensor(loss), norm)
    made.validation[0] = torch.tensor(validation)
    made.keep(0, {"w": torch.tensor([gradient])}, {"w": torch.tensor([weight])})
    return made


def test_compare_judges_everything():
    assert compare(trace(), trace(), 0, "fp64", 2)["passed"]
    for wrong in ("loss", "norm", "gradient", "weight", "validation"):
        for value in (1.1, math.nan):
            check = compare(trace(**{wrong: value}), trace(), 0, "fp64", 2)
            assert not check["passed"] and check["gradient_worst"] == "w"
    for dtype in ("bf16", "fp64"):  # bf16 is judged by the loss: gradients are far away
        check = compare(trace(gradient=2.0), trace(), 0, dtype, 2)
        assert check["passed"] == (dtype == "bf16")
        assert ("nothing else is judged" in verdict(check)) == (dtype == "bf16")
