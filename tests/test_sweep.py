"""tools/sweep.py: what it draws, and that it catches what is wrong. All nine files with ALL=1."""
import pytest

from conftest import ALL
from tools.sweep import FILES, drawn, sweep

SEED = 369  # whose runs of zero and fsdp are small


def place_of(name):
    """The number of the first run of this file."""
    return [drawn(SEED, i)[0] for i in range(9)].index(name)


def test_runs_equal_one_process(capsys):
    assert {drawn(SEED, i)[0] for i in range(9)} == set(FILES)
    runs = range(9) if ALL else [place_of("zero")]
    assert not sweep(runs, SEED), capsys.readouterr().out


def mean_of_means(module):
    """In fsdp.py alone, and a part in a million: what fp32 would not show."""
    loss = module.loss_sum
    module.loss_sum = lambda logits, targets: loss(logits, targets) * (1 + 1e-6)


def one_byte_more(module):
    """In what is measured."""
    old = module.Run.textbook

    def wrong(run, rows):
        old(run, rows)
        run.book[0]["measured"] += 1

    module.Run.textbook = wrong


@pytest.mark.parametrize("plant, words", [
    (mean_of_means, "worst gradient: "),
    (one_byte_more, "'formula': "),
])
def test_catches(plant, words, capsys):
    i = place_of("fsdp")
    assert sweep([i], SEED, plant=plant) == [i]
    said = capsys.readouterr().out
    assert words in said and "FAILED  torchrun" in said and f"FAILED: [{i}]" in said
