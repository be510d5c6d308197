"""tools/papers.py: published numbers beside ours, and docs/papers.md, which is what it prints."""
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from conftest import ALL, ROOT
from tools import papers
from tools.papers import BELOW, DIGIT, EQUAL, Row, agrees

PAGE = (ROOT / "docs" / "papers.md").read_text()
LONG = ("ZERO_1", "QI_5", "QI_5_AUTO", "QI_8")
QUICK = r"^7.5B, |, m (24|32|48|64) "


def quick_ones(text):
    lines = text.strip().splitlines()
    return "\n".join(line for line in lines if re.search(QUICK, line))


@pytest.fixture(scope="module")
def made():
    """[(table, its rows)]"""
    torch.rand(1000, 1000).softmax(-1)  # with threads, which no process that is forked will have
    with pytest.MonkeyPatch.context() as patch:
        for name in LONG:
            if not ALL:
                patch.setattr(papers, name, quick_ones(getattr(papers, name)))
        return list(papers.make_all())


@pytest.fixture(scope="module")
def rows(made):
    return [row for _, rows in made for row in rows]


def squeezed(line):
    """Without what only aligns columns."""
    return re.sub(r"-+", "-", re.sub(r" +", " ", line))


# ---- the numbers -----------------------------------------------------------------


def test_each_number_is_as_published_or_says_why_not(rows):
    assert len(rows) >= 120
    for row in rows:
        assert agrees(row) != bool(row.why), row


def shifted(row):
    """The same row with a wrong published number."""
    scale = papers.scale_of(row.published)
    decimals = papers.decimals_of(row.published)
    value = papers.value_of(row.published)
    if isinstance(row.within, float):
        value *= 1 + 3 * row.within
        decimals += 3
    elif row.within == BELOW:
        value /= 2
    else:
        value += 2 * scale * 10 ** -decimals
    suffix = row.published[-1] if row.published[-1] in papers.SCALES else ""
    return row._replace(published=f"{value / scale:.{decimals}f}{suffix}")


def test_a_wrong_published_number_differs(rows):
    for row in rows:
        if agrees(row):
            assert not agrees(shifted(row)), row


@pytest.mark.parametrize("published, ours, within, same", [
    ("31.4", 31.41, DIGIT, True),
    ("4187", 4187.9, DIGIT, True),  # cut off
    ("4188", 4187.5, DIGIT, True),  # rounded
    ("31.4", 31.51, DIGIT, False),
    ("0.5T", 0.512e12, DIGIT, True),
    ("117M", 124439808, DIGIT, False),
    ("43%", 0.435, DIGIT, True),
    ("8,192", 8192, EQUAL, True),
    ("8192", 8193, EQUAL, False),
    ("20%", 0.2, BELOW, False),
    ("84", 86.6, 0.08, True),
    ("84", 76.0, 0.08, False),
])
def test_what_is_the_same(published, ours, within, same):
    assert agrees(Row("", "", published, ours, within)) == same


def test_strides_are_those_of_the_mesh(monkeypatch):
    data = list(range(0, 1000, 5))
    mesh = SimpleNamespace(group={"tp": [0, 3], "data": data, "pp": [0, 7]})
    monkeypatch.setattr(papers, "Mesh", lambda *sizes: mesh)
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda ranks: ranks)
    last = papers.llama_4()[-5:]
    assert [row.ours for row in last] == [16384, 3, 5, 7, data[16]]


def test_the_command_line_stays_where_plan_leaves():
    before = sys.argv
    with pytest.raises(SystemExit):
        papers.cluster(0, 8)
    assert sys.argv is before


# ---- the page --------------------------------------------------------------------


def test_the_page_is_what_is_printed(made):
    page = [squeezed(line) for line in PAGE.splitlines()]
    assert PAGE.startswith(papers.INTRO + "\n")
    for table, rows in made:
        assert f"## {table.paper}" in page
        for line in papers.lines_of(table, rows):
            assert squeezed(line) in page, line
    if ALL:
        every = [row for _, rows in made for row in rows]
        sources = {table.paper for table, _ in made}
        assert PAGE.endswith("\n" + papers.closing(every, len(sources)) + "\n")


def test_the_pages_last_line_counts_its_numbers():
    *above, last = PAGE.strip().splitlines()
    cells = [cell for line in above if line.startswith("|") for cell in line.split("|")]
    numbers = [cell for cell in cells if re.search(r"\d%?[KMBT]? / [\d.,]+", cell)]
    total, _, same, near, differ = [int(number) for number in re.findall(r"\d+", last)]
    assert total == len(numbers) == same + near + differ
    assert total >= 120
    assert differ == sum(cell.rstrip().endswith(")") for cell in numbers)
    assert "DIFFERS" not in PAGE


def test_the_page_has_every_published_number():
    """Also those that only ALL=1 makes."""
    lines = PAGE.splitlines()
    for name in LONG:
        for line in getattr(papers, name).strip().splitlines():
            label, _, published = line.partition(" | ")
            cells = [f"| {number} / " for number in published.split()]
            own = [one for one in lines if one.startswith(f"| {label.strip()} ")]
            assert any(all(cell in one for cell in cells) for one in own), line


# ---- the program -----------------------------------------------------------------


def run(monkeypatch, *flags):
    monkeypatch.setattr("sys.argv", ["papers.py", *map(str, flags)])
    return papers.main()


@pytest.fixture
def one_table(monkeypatch):
    tables = [table for table in papers.TABLES if table.make is papers.scaler_defaults]
    monkeypatch.setattr(papers, "TABLES", tables)


def test_json(one_table, monkeypatch, capsys, tmp_path):
    file = tmp_path / "papers.json"
    assert run(monkeypatch, "--json", file) == 0
    found = json.loads(file.read_text())
    assert [one["published"] for one in found] == ["65536", "2.0", "0.5", "2000"]
    assert all(one["agrees"] and one["ours"] == one["value"] for one in found)
    said = capsys.readouterr()
    assert "4 numbers from 1 sources: 4 are the same" in said.out
    assert said.err == ""  # progress is for terminals


def test_a_planted_number_is_found(one_table, monkeypatch, capsys):
    monkeypatch.setattr(papers, "SCALER", papers.SCALER.replace("65536", "65537"))
    assert run(monkeypatch) == 1
    said = capsys.readouterr().out
    assert "65537 / 65,536 DIFFERS" in said
    assert "1 are not, for the reasons given. Of 1 nobody knows why." in said


def leave():
    raise SystemExit(2)


def test_a_table_that_leaves_does_not_hang(one_table, monkeypatch, capsys):
    monkeypatch.setattr(papers, "TABLES", [papers.TABLES[0]._replace(make=leave)])
    with pytest.raises(RuntimeError, match="exit code 2"):
        run(monkeypatch)


def test_progress_is_for_terminals(one_table, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(papers, "TABLES", papers.TABLES * 2)
    assert run(monkeypatch) == 0
    assert "[1 of 2 tables, about " in capsys.readouterr().err


def test_bad_usage(monkeypatch, capsys):
    for flags in (["--json", "no/such/folder/file"], ["--nonsense"]):
        with pytest.raises(SystemExit) as leave:
            run(monkeypatch, *flags)
        assert leave.value.code == 2
        assert capsys.readouterr().err.startswith("papers.py: error: ")
