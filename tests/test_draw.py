"""docs/*.svg are drawn by tools/draw.py from docs/data, as the code is now."""
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


STATES = {
    "ddp": 16,
    "zero, stage 1": 8 + 8 / 64,
    "zero, stage 2": 4 + 12 / 64,
    "zero, stage 3": 16 / 64,
    "fsdp": 16 / 64,
    "ddp, full checkpointing": 16,
}


def test_held_is_what_the_textbook_says():
    """The figures are too large to be made again here; the formulas of README are not."""
    held = draw.read("held")
    total = 64 * (12 * 3072**2 + 13 * 3072) + (51200 + 2048 + 2) * 3072
    assert f"GPT with {total / 1e9:.1f} billion" in draw.TITLE
    for label, expected in STATES.items():
        states = sum(held[label][kind] for kind in ("parameters", "gradients", "optimizer"))
        assert states / total == pytest.approx(expected, rel=0.02), label
