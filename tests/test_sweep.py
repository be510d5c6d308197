"""tools/sweep.py: what it draws, and that it catches what is wrong."""
import sys

import pytest

import hybrid_3d
from common import arguments
from sweep import FILES, drawn, main, sweep

SEED = 327  # in 9 runs: every file, 2 to 5 ranks


def test_nine(capsys):
    """A run of each file."""
    assert {drawn(SEED, i)[0] for i in range(9)} == {file.__name__ for file in FILES}
    failed = sweep(range(9), SEED)
    said = capsys.readouterr().out
    assert not failed, said
    assert said.count("\n") == 10
    assert said.count("torchrun --standalone --nproc_per_node=") == 9


def test_a_run_can_be_repeated():
    """Run i is the same one, however many are drawn; another seed draws others."""
    assert [drawn(7, i) for i in range(30)] == [drawn("7", i) for i in range(30)]
    assert len({str(drawn(seed, i)) for seed in range(10) for i in range(30)}) == 300
    assert {drawn(SEED, i)[1] for i in range(100)} == set(range(1, 9))


def args_of(i, monkeypatch):
    """-> run i of hybrid_3d's on up to 16 ranks, as it reads its flags; what it refuses, exits"""
    file, n, flags = drawn(SEED, i, "hybrid_3d", 16)
    assert file == "hybrid_3d"
    monkeypatch.setattr("sys.argv", ["hybrid_3d.py", *flags])
    launcher = dict(WORLD_SIZE=n, LOCAL_WORLD_SIZE=n, RANK=0, LOCAL_RANK=0, MASTER_PORT=29500,
                    MASTER_ADDR="127.0.0.1")
    for name, value in launcher.items():
        monkeypatch.setenv(name, str(value))
    args = arguments(hybrid_3d.__doc__, **hybrid_3d.FLAGS)
    hybrid_3d.layout(args)
    return args


def test_layouts_of_all_axes(monkeypatch):
    """hybrid_3d accepts all that is drawn for it: every choice that it has, alone and together."""
    runs = [args_of(i, monkeypatch) for i in range(300)]
    above_one = []
    for args in runs:
        axes = [args.dp, args.cp, args.tp, args.pp, args.ep]
        above_one.append(sum(size > 1 for size in axes))
    assert above_one.count(4) > 60 and above_one.count(5) > 10
    for name in ("attn", "schedule", "ckpt", "balance"):
        assert {getattr(args, name) for args in runs} == set(hybrid_3d.FLAGS[name].limits)
    assert {args.zero for args in runs} == {0, 1, 2, 3}
    assert {args.impl for args in runs} == {"scratch", "torch"}
    for name in ("sp", "shared", "pad", "capacity", "train", "eval_every", "layers_per_stage"):
        assert len({getattr(args, name) for args in runs}) > 1, name
    assert {args.world_size for args in runs} >= {1, 8, 12, 16}


def place_of(name):
    """The number of the first run of this file."""
    return [drawn(SEED, i)[0] for i in range(9)].index(name)


def mean_of_means(module):
    """In fsdp.py alone, and a part in a million: what fp32 would not show."""
    loss = module.loss_sum
    if module.__name__ == "fsdp":
        module.loss_sum = lambda logits, targets: loss(logits, targets) * (1 + 1e-6)


def test_catches_a_planted_bug(capsys):
    i = place_of("fsdp")
    assert sweep([i, i + 1], SEED, plant=mean_of_means) == [i]
    said = capsys.readouterr().out
    assert f"{i:4} " in said and "FAILED  torchrun" in said
    assert "worst gradient: " in said and f"FAILED: [{i}]" in said


def one_byte_more(module):
    """In what is measured."""
    old = module.Run.textbook

    def wrong(run, what, formula, expected, measured, **more):
        old(run, what, formula, expected, measured + 1, **more)

    module.Run.textbook = wrong


def refused(module):
    sys.argv.append("--nonsense")


def broken(module):
    module.Run.batch = None


@pytest.mark.parametrize("plant, words", [
    (one_byte_more, "'formula': "),
    (refused, "exit codes [2"),
    (broken, "TypeError: "),
])
def test_catches(plant, words, capsys):
    i = place_of("ddp")
    assert sweep([i], SEED, plant=plant) == [i]
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["x"], ["0"], ["1", "-1"], ["1", "2", "3"],
                                   ["1", "--file", "x"], ["1", "--ranks", "0"]])
def test_bad_command_lines(words, capsys):
    assert main(words) == 2
    assert "usage: python tools/sweep.py N [SEED]" in capsys.readouterr().err


@pytest.mark.parametrize("failed, code", [([], 0), ([0], 1)])
def test_the_exit_code(failed, code, monkeypatch):
    monkeypatch.setattr("sweep.sweep", lambda runs, seed, only, most: failed)
    assert main(["7", "1", "--file", "moe", "--ranks", "16"]) == code
