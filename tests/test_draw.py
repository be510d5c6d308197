"""docs/*.svg are drawn by tools/draw.py from docs/data, as the code is now."""
import re
import xml.etree.ElementTree

import pytest

from conftest import ROOT
from tools import draw


def test_pictures_show_their_figures(tmp_path, monkeypatch):
    """All that are in docs/, and no others."""
    monkeypatch.setattr(draw, "PLACE", tmp_path)
    assert draw.main([]) == 0 and draw.main(["--bogus"]) == 2
    names = {path.name for path in (ROOT / "docs").glob("*.svg")}
    assert names == {path.name for path in tmp_path.iterdir()}
    for name in names:
        drawn = (tmp_path / name).read_text()
        assert drawn == (ROOT / "docs" / name).read_text(), name
        assert xml.etree.ElementTree.fromstring(drawn).get("viewBox")


def test_held_is_what_the_textbook_says():
    """The figures are too large to be made again here; the formulas of README are not."""
    held = draw.read("held")
    width = 3072
    layers = 64
    total = layers * (12 * width**2 + 13 * width) + (51200 + 2048 + 2) * width
    assert f"{total / 1e9:.1f}" in re.search(r"a GPT with ([\d.]+) billion", draw.TITLE)[1]
    per_parameter = {
        "ddp": 16,
        "ddp, full checkpointing": 16,
        "zero, stage 1": 8 + 8 / 64,
        "zero, stage 2": 4 + 12 / 64,
        "zero, stage 3": 16 / 64,
        "fsdp": 16 / 64,
    }
    assert set(per_parameter) < set(held) == set(draw.HOLDERS)
    for label, expected in per_parameter.items():
        states = sum(held[label][kind] for kind in ("parameters", "gradients", "optimizer"))
        assert states / total == pytest.approx(expected, rel=0.02), label
