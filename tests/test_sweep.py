"""tools/sweep.py: what it draws, and that it catches what is wrong."""
import sys

import pytest

from sweep import FILES, drawn, main, sweep

SEED = 210  # in 12 runs: every file, 1 to 8 ranks


def test_twelve(capsys):
    assert {drawn(SEED, i)[0] for i in range(12)} == {file.__name__ for file in FILES}
    failed = sweep(range(12), SEED)
    said = capsys.readouterr().out
    assert not failed, said
    assert said.count("\n") == 13
    assert said.count("torchrun --standalone --nproc_per_node=") == 12


def test_a_run_can_be_repeated():
    """Run i is the same one, however many are drawn; another seed draws others."""
    assert [drawn(7, i) for i in range(30)] == [drawn("7", i) for i in range(30)]
    assert len({str(drawn(seed, i)) for seed in range(10) for i in range(30)}) == 300
    assert {drawn(SEED, i)[1] for i in range(100)} == set(range(1, 9))


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
    assert sweep([i, i + 1], SEED, mean_of_means) == [i]
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
    module.train_step = None


@pytest.mark.parametrize("plant, words", [
    (one_byte_more, "'formula': "),
    (refused, "exit codes [2"),
    (broken, "TypeError: "),
])
def test_catches(plant, words, capsys):
    i = place_of("ddp")
    assert sweep([i], SEED, plant) == [i]
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["x"], ["0"], ["1", "-1"], ["1", "2", "3"]])
def test_bad_command_lines(words, capsys):
    assert main(words) == 2
    assert "usage: python tools/sweep.py N [SEED]" in capsys.readouterr().err


@pytest.mark.parametrize("failed, code", [([], 0), ([0], 1)])
def test_the_exit_code(failed, code, monkeypatch):
    monkeypatch.setattr("sweep.sweep", lambda runs, seed: failed)
    assert main(["7", "1"]) == code
