"""--optimizer muon under each way of cutting: torch's Muon steps whole matrices, and nothing else
changes. That its momentum is resumed in other layouts: test_survival.py.
"""
import pytest
import torch

from conftest import check_bug_shows, check_equal, run_ranks
import harness.whole
from harness.whole import Share, WholeMatrices

MUON = ("--optimizer", "muon", "--steps", "4")
ODD = ("--model", "llama-toy", "--kv-heads", "2", "--hidden", "45")  # which no ranks divide
WAYS = (  # besides those of that relay
    (2, "zero --stage 1 --offload optimizer"), (4, "fsdp --hsdp 2"),
    (4, "tensor_parallel"),  # two ranks read the same head of keys and values
    (2, "tensor_parallel --width 96 --hidden 256"),  # here bf16 products depend on strides
    (8, "hybrid_3d --hidden 44 --dp 2 --tp 2 --pp 2 --zero 1 --sp"),
    (4, "hybrid_3d --hidden 44 --dp 2 --tp 2 --pp 1 --sp --experts 4"),
)


@pytest.mark.parametrize("ranks, command", WAYS)
def test_equals_one_process(ranks, command):
    name, *flags = command.split()
    report = check_equal(name, ranks, *ODD, *MUON, *flags, "--train", r"blocks\.1|norm|head")
    held = report["ranks"][0]["memory"]
    assert held["optimizer"] < 2 * held["gradients"]  # AdamW's would be twice these


def step_pieces(module):
    harness.whole.wholes_of_cuts = no_wholes  # set_up imports it when it is called


def no_wholes(ranks, matrices):
    return []


def test_muon_of_pieces_is_another_optimizer():
    check_bug_shows("tensor_parallel", 2, *ODD, *MUON, plant=step_pieces)


def check_any_optimizer():
    """Adafactor, which looks at rows and columns, over two matrices cut along different dims."""
    rank = torch.distributed.get_rank()
    wholes = [torch.nn.Parameter(torch.randn(6, 4)) for _ in range(2)]
    shares = {}
    for dim, p in enumerate(wholes):
        piece = torch.nn.Parameter(p.detach().chunk(2, dim)[rank].clone())
        shares[p] = Share(piece, p.shape, [12, 12], dim)
    whole = WholeMatrices(shares)
    ours = torch.optim.Adafactor(whole.parameter_groups([{"params": wholes}]))
    plain = torch.optim.Adafactor(wholes)
    for _ in range(3):
        for dim, p in enumerate(wholes):
            p.grad = torch.randn(6, 4)
            shares[p].part.grad = p.grad.chunk(2, dim)[rank].clone()
        with whole:
            ours.step()
        plain.step()
    for dim, p in enumerate(wholes):
        torch.testing.assert_close(shares[p].part.data, p.detach().chunk(2, dim)[rank])


def test_any_optimizer_of_whole_matrices():
    run_ranks(check_any_optimizer, 2)
