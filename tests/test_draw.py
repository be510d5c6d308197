"""docs/*.svg are drawn by tools/draw.py from docs/data, as the code is now."""
import re
import xml.etree.ElementTree

import pytest

import draw
from conftest import ROOT

PICTURES = sorted(draw.PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_shows_its_figures(name, tmp_path, monkeypatch):
    monkeypatch.setattr(draw, "PLACE", tmp_path)
    _, draw_it = draw.PICTURES[name]
    draw_it()
    drawn = (tmp_path / f"{name}.svg").read_text()
    assert drawn == (ROOT / "docs" / f"{name}.svg").read_text()
    picture = xml.etree.ElementTree.fromstring(drawn)
    assert picture.get("viewBox")


def test_no_picture_without_its_program():
    drawn = {path.stem for path in (ROOT / "docs").glob("*.svg")}
    assert drawn == set(PICTURES)


def test_hops_are_what_the_rings_work():
    from context_parallel import Ring, Zigzag

    assert draw.read("hops") == {"ring": draw.work_of(Ring), "zigzag": draw.work_of(Zigzag)}


@pytest.mark.parametrize("schedule", draw.DRAWN)
def test_timelines_are_what_is_planned(schedule):
    kept = draw.read("timelines")[schedule]["planned"]
    now = draw.simulated(schedule)
    assert kept["bubble"] == now["bubble"]
    assert kept["rows"] == [[list(action) for action in row] for row in now["rows"]]
    run = draw.read("timelines")[schedule]["measured"]
    forwards = [action for row in run["rows"] for action in row if action[0] == "F"]
    assert len(forwards) % draw.MICRO == 0 and len(run["rows"]) == 2


def test_held_is_what_the_textbook_says():
    """The figures are too large to be made again here; the formulas of README are not."""
    held = draw.read("held")
    width = 3072
    layers = 64
    total = layers * (12 * width**2 + 13 * width) + (51200 + 2048 + 2) * width
    assert f"{total / 1e9:.1f}" in re.search(r"a GPT with ([\d.]+) billion", draw.TITLE)[1]
    per_parameter = {
        "ddp": 16,
        "zero, stage 1": 8 + 8 / 64,
        "zero, stage 2": 4 + 12 / 64,
        "zero, stage 3": 16 / 64,
        "fsdp": 16 / 64,
        "ddp, full checkpointing": 16,
    }
    assert set(per_parameter) < set(held) == set(draw.HOLDERS)
    for label, expected in per_parameter.items():
        states = sum(held[label][kind] for kind in ("parameters", "gradients", "optimizer"))
        assert states / total == pytest.approx(expected, rel=0.02), label


def test_losses_are_one_line():
    losses = draw.read("losses")
    assert set(losses) == set(draw.TRAINED)
    first = losses["ddp"]
    for label, curve in losses.items():
        assert len(curve) == len(first) == draw.STEPS
        if label != draw.MIXTURE:
            assert curve == pytest.approx(first, rel=1e-5), label


def test_buckets_travel_under_backward():
    spans = draw.read("buckets")
    ends = [end for _, end in spans["backward"]]
    begun_before_the_end = [start for start, _ in spans["buckets"] if start < max(ends)]
    assert len(spans["buckets"]) > 2
    assert len(begun_before_the_end) >= len(spans["buckets"]) - 1
