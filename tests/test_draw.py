"""docs/*.svg are drawn by tools/draw.py from docs/data, and show what stands there."""
import importlib.util
import json
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


def figures(name):
    return json.loads((draw.DATA / f"{name}.json").read_text())


def test_pictures_show_their_figures():
    """Titles and rows are in the picture, and say what the bars are."""
    for path in draw.DATA.iterdir():
        for title, rows in figures(path.stem).items():
            assert {title, *rows} <= set(texts(f"{path.stem}.svg"))
    for rows in figures("held").values():
        for label, (peak, *bars) in rows.items():
            assert [what for *_, what in bars] == list(draw.HELD)
            assert label.endswith(f": {bars[-1][1]:,.1f} GB, peak {peak[1]:,.1f}")
    assert set(figures("held")) == set(draw.HOLDERS)
    assert "ring: 7 halves, a hop takes as long as its slowest rank" in figures("hops")
    assert figures("hops") == json.loads(json.dumps(draw.hops()))


def test_pictures_stand_on_white_and_on_dark():
    for name, text in PICTURES.items():
        assert not re.search("fill: #(fff|000|ffffff|000000)(;|\")", text), name
        assert "fill: #7a7a7a" in text, name


def test_held_is_what_the_textbook_says():
    """The figures are too large to be made again here; the formulas of README are not."""
    held = {row.split(":")[0]: bars for row, bars in figures("held")[draw.SHORT].items()}
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
        states = held[label][3][1] * 1e9  # where parameters, gradients and optimizer end
        assert held[label][3][2] == "optimizer"
        assert states / total == pytest.approx(expected, rel=0.02), label
    words, = [text for text in texts("held.svg") if " billion " in text]
    assert f" {total / 1e9:.1f} billion " in words
