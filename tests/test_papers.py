"""tools/papers.py: published numbers beside ours, and docs/papers.md, which is what it prints."""
import pytest

from conftest import ROOT
from tools import papers
from tools.papers import EQUAL, Row, agrees

PAGE = (ROOT / "docs" / "papers.md").read_text()


@pytest.fixture(scope="module")
def made():
    """[(table, its rows)]"""
    return [(table, table.make()) for table in papers.TABLES]


def test_each_number_is_as_published_or_says_why_not(made):
    """And a wrong one differs."""
    rows = [row for _, rows in made for row in rows]
    assert len(rows) >= 60
    assert len({row.why for row in rows if row.why}) <= 4
    for row in rows:
        assert agrees(row) != bool(row.why), row
        scale, digits = papers.digits_of(row.published)
        wrong = row.ours + 2 * scale * 10 ** -digits
        if isinstance(row.within, float):
            wrong = row.ours * (1 + 3 * row.within)
        assert row.why or not agrees(row._replace(ours=wrong)), row


def test_the_page_is_what_is_printed(made):
    assert PAGE.startswith(papers.INTRO + "\n")
    for table, own in made:
        assert f"\n## {table.paper}\n" in PAGE
        assert "\n".join(papers.lines_of(table, own)) in PAGE
    rows = [row for _, rows in made for row in rows]
    assert PAGE.endswith("\n" + papers.closing(rows) + "\n")


def test_a_planted_number_is_found(monkeypatch, capsys):
    table = papers.TABLES[0]._replace(make=lambda: [Row("a line", "65537", 65536, EQUAL)])
    monkeypatch.setattr("sys.argv", ["papers.py"])
    monkeypatch.setattr(papers, "TABLES", [table])
    assert papers.main() == 1
    assert "| 65537 | 65,536 | DIFFERS |" in capsys.readouterr().out
