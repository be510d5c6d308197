"""Instruments of the harness, alone: what they say of faults and of other people's traces."""
import json
import math
import resource

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from conftest import run
from harness import checkpoint, guard
from harness.compare import Trace, compare, worst_gap
from harness.ledger import Ledger
from harness.report import StepLog, Table, say, textbook_line, verdict
from harness.profiler import exposed_time
from test_tools import event


def test_what_differs_from_zeros_is_infinitely_far():
    """No gap has a denominator where every tensor of the plain run is zero."""
    zeros = {"a": torch.zeros(2), "b": torch.zeros(3)}
    assert worst_gap(zeros, zeros)[0] == 0
    assert worst_gap({**zeros, "b": torch.ones(3)}, zeros) == (math.inf, "b")


def test_what_ends_a_run_at_once_leaves_the_log_of_earlier_steps(tmp_path):
    """No file may be longer than 8 bytes: what is to be kept cannot be written."""
    path = tmp_path / "log"
    path.write_text('{"step": 0}\n{"step": 1}\n')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
    with pytest.raises(OSError):
        StepLog(str(path), 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'


def check_output_splits():
    """Rank r sends r + 1 numbers to each: its input is even, what it receives is not."""
    rank = dist.get_rank()
    layer = torch.nn.Linear(1, 1)
    with Ledger(layer, torch.optim.SGD(layer.parameters())) as ledger:
        x = torch.zeros(2 * (rank + 1))
        dist.all_to_all_single(torch.empty(3), x, output_split_sizes=[1, 2])
    assert ledger.collectives["all_to_all"]["wire"] == x.nbytes / 2


def test_all_to_all_with_output_splits_alone():
    run(check_output_splits, 2)


def test_all_to_all_of_lists():
    """Of 10 numbers rank 0 keeps 1. gloo refuses uneven ones; the figures are for JSON."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    layer = torch.nn.Linear(1, 1)
    with Ledger(layer, torch.optim.SGD(layer.parameters())) as ledger:
        dist.all_to_all([torch.zeros(1), torch.zeros(9)], [torch.zeros(1), torch.zeros(9)])
        dist.all_reduce(torch.zeros(3))
    dist.destroy_process_group()
    sent = ledger.collectives["all_to_all"]
    assert (sent["payload"], sent["wire"]) == (10 * 4, 9 * 4)
    assert list(json.loads(json.dumps(ledger.groups)).values()) == [9 * 4 + 3 * 4]


def test_tensors_without_elements_are_equal():
    empty = torch.zeros(0, 3)
    assert worst_gap({"a": empty}, {"a": empty}) == (0, "a")


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex128])
def test_a_digest_tells_tensors_of_any_dtype_apart(dtype):
    zeros = torch.zeros(3, dtype=dtype)
    other = zeros.clone()
    other[2] = 1
    assert guard.digest(zeros) == guard.digest(zeros.clone()) != guard.digest(other)
    assert guard.digest(zeros[:0]) == 0


def check_a_part_of_the_world():
    """Ranks 1 and 2 compare, and rank 2 is the second of their group."""
    group = dist.new_group([1, 2])
    rank = dist.get_rank()
    if rank > 0:
        state = {"same": torch.zeros(0), "other": torch.full((3,), float(rank))}
        assert guard.different(state, group) == ("other", 2)


def test_a_rank_that_differs_is_named_by_its_number_in_the_world():
    run(check_a_part_of_the_world, 3)


@pytest.mark.parametrize("dtype, says", [
    ("bf16", "losses equal one process's, and nothing else is judged in low precision; worst"),
    ("fp64", "1 tensors' gradients should equal one process's, and all else that training does; "),
])
def test_what_was_judged_is_said(dtype, says):
    """Gradients are far from the plain run's, and losses are not."""
    ours = Trace()
    plain = Trace()
    for trace, gradient in ((ours, 1.0), (plain, 2.0)):
        trace.log(0, torch.tensor(5.0), 1.0)
        trace.keep(0, {"w": torch.tensor([gradient])}, {"w": torch.tensor([1.0])})
    check = compare(ours, plain, dtype)
    assert check["passed"] == (dtype == "bf16")
    assert verdict(check).startswith(says)
    assert "gradients 5.0e-01" in verdict(check)


def test_letters_that_stdout_has_not_are_escaped(capfd, monkeypatch):
    monkeypatch.setattr("sys.stdout", open(1, "w", encoding="ascii", closefd=False))
    say("saved in", "\u00fcber", end="!\n")
    say("and on")
    assert capfd.readouterr() == ("saved in \\xfcber!\nand on\n", "")


def test_the_number_of_a_send(monkeypatch):
    """NCCL's sends are counted apart from its collectives, which stay at the last one's number."""
    entry = {"profiling_name": "nccl:send 0->1", "time_created_ns": 1, "input_sizes": [[2, 3]],
             "input_dtypes": ["Float"], "process_group": ("1", "pp"), "is_p2p": True,
             "collective_seq_id": 7, "p2p_seq_id": 12}
    monkeypatch.setattr(guard, "recorded", lambda: [entry])
    assert guard.last_collective() == "send 0->1 of (2, 3) float, number 12 of group 1 (pp)"


def test_how_many_lines_a_table_has():
    counts = [sum(map(Table(0, last, False).is_due, range(last + 1))) for last in range(300)]
    assert max(counts) == counts[18] == 19


def test_a_host_that_launches_a_collective_moves_nothing():
    """Of 16 units NCCL's kernel takes 6, 4 of which a multiplication hides."""
    events = [
        event("gemm", 0, 14, "kernel"),
        event("ncclDevKernel_AllReduce", 10, 6, "kernel"),
        event("nccl:all_reduce", 0, 90, "user_annotation"),
    ]
    assert exposed_time(events) == (16, 2)


def test_a_folder_whose_name_is_no_number_is_no_checkpoint(tmp_path):
    for name in "10", "\u00b2", "9", "other":
        (tmp_path / name).mkdir()
    assert checkpoint.numbered(tmp_path) == [9, 10]


def test_a_count_is_not_shown_in_bytes():
    row = {"what": "micro-batches kept", "formula": "p", "expected": 2.0, "measured": 3.0}
    line = "micro-batches kept = p = "
    assert textbook_line({**row, "unit": "count"}) == line + "2: measured 3"
    assert textbook_line({**row, "unit": "bytes"}) == line + "2 B: measured 3 B"
