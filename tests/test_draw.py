"""docs/*.svg are drawn by tools/draw.py from docs/data, and show what stands there."""
import importlib.util
import re
import xml.etree.ElementTree

import pytest

from conftest import ROOT, run_tool
from tools import draw

PICTURES = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.svg")}


def texts(name):
    """What is written in a picture."""
    found = xml.etree.ElementTree.fromstring(PICTURES[name]).iter()
    return [each.text.strip() for each in found if each.tag.endswith("}text")]


def test_matplotlib_is_used_or_asked_for(tmp_path, monkeypatch):
    """Where it is, all pictures are drawn, and no others; where it is not, a line says so."""
    monkeypatch.setattr(draw, "PLACE", tmp_path)
    assert "--bogus" in run_tool("draw", "--bogus", code=2)
    if importlib.util.find_spec("matplotlib"):
        monkeypatch.setattr("sys.argv", ["draw.py"])
        draw.main()
        assert {path.name for path in tmp_path.iterdir()} == set(PICTURES)
    else:
        assert "pip install matplotlib" in run_tool("draw", code=2)


def test_pictures_show_their_figures():
    held = draw.read("held")
    for rows in held.values():
        for label, sizes in rows.items():
            total = sum(sizes[kind] for kind in draw.HELD) / 1e9
            words = f"{label}: {total:,.1f} GB, peak {sizes['peak'] / 1e9:,.1f}"
            assert words in texts("held.svg")
    assert set(held) == set(draw.HOLDERS)
    for parts in draw.read("step").values():
        end = parts["optimizer"][0][1]
        assert any(words.endswith(f": {end:.0f} ms") for words in texts("step.svg"))
        assert max(stop for spans in parts.values() for _, stop in spans) == end
    for schedule, measured in draw.read("timelines").items():
        end = max(row[-1][-1] for row in measured)
        words = f"{schedule}, measured: {end:.0f} ms, bubble"
        assert any(text.startswith(words) for text in texts("timelines.svg"))
        planned = draw.planned(schedule, measured)
        assert [len(row) for row in planned] == [len(row) for row in measured]
        assert max(row[-1][-1] for row in planned) <= 1.05 * end
    assert "ring: 7 halves, a hop takes as long as its slowest rank" in texts("hops.svg")


def test_pictures_stand_on_white_and_on_dark():
    for name, text in PICTURES.items():
        assert not re.search("fill: #(fff|000|ffffff|000000)(;|\")", text), name
        assert "fill: #7a7a7a" in text, name


def test_held_is_what_the_textbook_says():
    """The figures are too large to be made again here; the formulas of README are not."""
    held = draw.read("held")[draw.SHORT]
    width = 3072
    layers = 64
    total = layers * (12 * width**2 + 13 * width) + (51200 + 2048 + 2) * width
    per_parameter = {
        "ddp": 16,
        "ddp, full checkpointing": 16,
        "zero, stage 1": 8 + 8 / 64,
        "zero, stage 2": 4 + 12 / 64,
        "zero, stage 3": 16 / 64,
        "fsdp": 16 / 64,
    }
    assert set(per_parameter) < set(held)
    for label, expected in per_parameter.items():
        states = sum(held[label][kind] for kind in ("parameters", "gradients", "optimizer"))
        assert states / total == pytest.approx(expected, rel=0.02), label
    words, = [text for text in texts("held.svg") if " billion " in text]
    assert f" {total / 1e9:.1f} billion " in words
