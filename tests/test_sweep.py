"""tools/sweep.py: what it draws, and that it catches what is wrong. All nine files with ALL=1."""
import pytest

import hybrid_3d
from conftest import ALL
from harness.flags import arguments
from tools.sweep import FILES, drawn, main, sweep

SEED = 1


def test_runs_equal_one_process(capsys):
    """With ALL=1 one of each file."""
    assert {drawn(SEED, i)[0] for i in range(9)} == set(FILES)
    runs = range(9) if ALL else [place_of("zero")]
    assert not sweep(runs, SEED), capsys.readouterr().out


def test_what_is_drawn():
    """Run i is the same one, however many are drawn; ranks, forms and flags vary."""
    runs = [drawn(SEED, i) for i in range(100)]
    assert runs == [drawn(str(SEED), i) for i in range(100)]
    assert len({str(run) for run in runs}) == 100
    assert {n for _, n, _ in runs} == set(range(1, 9))
    for name in FILES:
        forms = {"--model llama-toy" in " ".join(drawn(SEED, i, name)[2]) for i in range(20)}
        assert forms == {True, False}, name


def args_of(i, monkeypatch):
    """-> run i of hybrid_3d's on up to 16 ranks, as it reads its flags; what it refuses, exits"""
    _, n, flags = drawn(SEED, i, "hybrid_3d", 16)
    monkeypatch.setattr("sys.argv", ["hybrid_3d.py", *flags])
    launcher = {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "RANK": 0, "LOCAL_RANK": 0,
                "MASTER_PORT": 29500, "MASTER_ADDR": "127.0.0.1"}
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
    assert above_one.count(4) > 30 and above_one.count(5) > 5
    for name in ("attn", "schedule", "ckpt", "balance"):
        values = {getattr(args, name) for args in runs}
        assert values == set(hybrid_3d.FLAGS[name].limits)
    assert {args.zero for args in runs} == {0, 1, 2, 3}
    assert {args.impl for args in runs} == {"scratch", "torch"}
    for name in ("sp", "shared", "pad", "capacity", "train", "eval_every", "model"):
        assert len({getattr(args, name) for args in runs}) > 1, name


def place_of(name):
    """The number of the first run of this file."""
    return [drawn(SEED, i)[0] for i in range(9)].index(name)


def mean_of_means(module):
    """In fsdp.py alone, and a part in a million: what fp32 would not show."""
    loss = module.loss_sum
    module.loss_sum = lambda logits, targets: loss(logits, targets) * (1 + 1e-6)


def one_byte_more(module):
    """In what is measured."""
    old = module.Run.measured

    def wrong(run, kind, what):
        return old(run, kind, what) + 1

    module.Run.measured = wrong


@pytest.mark.parametrize("plant, words", [
    (mean_of_means, "worst gradient: "),
    (one_byte_more, "'formula': "),
])
def test_catches(plant, words, capsys):
    i = place_of("fsdp")
    assert sweep([i], SEED, plant=plant) == [i]
    said = capsys.readouterr().out
    assert words in said and "FAILED  torchrun" in said and f"FAILED: [{i}]" in said


@pytest.mark.parametrize("words", ["", "0", "1 --file x"])
def test_bad_command_lines(words, capsys):
    with pytest.raises(SystemExit):
        main(words.split())
    said = capsys.readouterr().err
    assert "usage: python tools/sweep.py N [SEED]" in said and said.count("\n") == 1
