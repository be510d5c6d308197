"""tools/sweep.py: what it draws, and that it catches what is wrong. Once each with ALL=1."""
import pytest

from conftest import ALL
from tools.launch import TECHNIQUES
from tools.sweep import drawn, own_flags, sweep


def test_runs_equal_one_process(capsys):
    rounds = range(len(TECHNIQUES))
    assert {drawn(0, i)[0] for i in rounds} == set(TECHNIQUES)
    assert set(own_flags("zero")) == {"stage", "offload", "accum"}
    assert own_flags("hybrid_3d")["sp"] == ("", "--sp")
    if ALL:
        assert not sweep(rounds), capsys.readouterr().out
    assert not sweep([0], only="zero"), capsys.readouterr().out


def part_of_a_million(module):
    """Too little is divided by: what fp32 would not show."""
    for name in ("idea_step", "train_step", "train_step_at_work"):
        step = getattr(module, name)

        def wrong(model, optimizer, x, y, valid, clip, step=step):
            return step(model, optimizer, x, y, valid * (1 - 1e-6), clip)

        setattr(module, name, wrong)


def one_byte_more(module):
    """In what is measured."""
    from harness.run import Run

    old = Run.textbook

    def wrong(run, rows):
        old(run, rows)
        run.book[0]["measured"] += 1

    Run.textbook = wrong


@pytest.mark.parametrize("plant, words", [
    (part_of_a_million, "the worst gap is "),
    (one_byte_more, "'formula': "),
])
def test_catches(plant, words, capsys):
    assert sweep([0], only="ddp", plant=plant) == [0]
    said = capsys.readouterr().out
    assert words in said and "FAILED  torchrun" in said and "FAILED: [0]" in said
