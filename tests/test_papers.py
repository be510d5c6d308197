"""tools/papers.py: published numbers beside ours, and docs/papers.md, which is what it prints."""
import pytest

from conftest import ROOT
from tools import papers
from tools.papers import DIGIT, EQUAL, Row, agrees

PAGE = (ROOT / "docs" / "papers.md").read_text()


@pytest.fixture(scope="module")
def made():
    """[(table, its rows)]"""
    return [(table, table.make()) for table in papers.TABLES]


@pytest.fixture(scope="module")
def rows(made):
    return [row for _, rows in made for row in rows]


def test_each_number_is_as_published_or_says_why_not(rows):
    assert len(rows) >= 45
    assert len({row.why for row in rows if row.why}) <= 3
    for row in rows:
        assert agrees(row) != bool(row.why), row


SAME = [
    ("31.4", 31.41, DIGIT, True),
    ("4187", 4187.9, DIGIT, True),  # cut off
    ("31.4", 31.51, DIGIT, False),
    ("0.5T", 0.512e12, DIGIT, True),
    ("8192", 8193, EQUAL, False),
    ("84", 76.0, 0.08, False),
]


def test_what_is_the_same():
    for published, ours, within, same in SAME:
        assert agrees(Row("", published, ours, within)) == same


def test_the_page_is_what_is_printed(made, rows):
    assert PAGE.startswith(papers.INTRO + "\n")
    for table, own in made:
        assert f"\n## {table.paper}\n" in PAGE
        assert "\n".join(papers.lines_of(table, own)) in PAGE
    assert PAGE.endswith("\n" + papers.closing(rows) + "\n")


def test_a_planted_number_is_found(monkeypatch, capsys):
    def make():
        return [Row("a line", "65537", 65536, EQUAL)]

    monkeypatch.setattr("sys.argv", ["papers.py"])
    monkeypatch.setattr(papers, "TABLES", [papers.TABLES[0]._replace(make=make)])
    assert papers.main() == 1
    assert "| 65537 | 65,536 | DIFFERS |" in capsys.readouterr().out
