"""The page stands alone, is small whatever the log, and nothing that is logged becomes markup."""

from __future__ import annotations

import re
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dynamo_local.arbiter.planner_report_data import CHANGES_MAX, Point, ReportData, collect
from dynamo_local.arbiter.planner_report_page import CHARTS, PICTURED, known_charts, page, write_report
from dynamo_local.errors import BadInput
from dynamo_local.planner.records.decision_log import DecisionLog
from tests.fakes.planner.logged_lines import BEGAN_S, line, reasons

MEGABYTE = 1_000_000
SVG = "{http://www.w3.org/2000/svg}"
NAMES = {"www.w3.org", "purl.org", "creativecommons.org"}
"""Hosts in the names of an SVG's vocabularies: nobody asks them."""


class Read(HTMLParser):
    """Tags with their attributes, and all texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.full
def test_it_asks_nobody_for_anything() -> None:
    html = page(collect([line(n, step=n % 2) for n in range(1, 9)]), "Planner of dynamo")
    read = Read(html)
    linking = {"src", "href", "data", "action", "srcset", "poster", "xlink:href"}
    linked = {value for _, attributes in read.tags for name, value in attributes.items() if name in linking}
    assert all(value is not None and value.startswith("#") for value in linked)
    assert not {"link", "iframe", "img", "object", "embed", "base", "script"} & {tag for tag, _ in read.tags}
    assert not re.search(r"url\((?!#)|@import", html)
    assert set(re.findall(r"\w+://([^/\s\"'<]*)", html)) <= NAMES
    policy = next(attributes["content"] for tag, attributes in read.tags if attributes.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")


@pytest.mark.full
def test_after_fifty_thousand_decisions_it_is_below_a_megabyte() -> None:
    full = collect([line(n, told=reasons(1, why="because " * 100)) for n in range(1, CHANGES_MAX + 10)])
    names = {one.figure for chart in CHARTS for one in chart.series}
    found = ReportData(changes=full.changes, policies=["throughput-load"])
    counts = Counter(dict.fromkeys(names, 1))
    for number in range(50_000):
        figures = dict.fromkeys(names, 1000 / 7 + number % 97)
        found.add(Point(BEGAN_S + 3.6 * number, 1, figures, counts, number / 100))
    assert len(page(found, "T").encode()) < MEGABYTE


def test_it_says_which_steps_it_leaves_out() -> None:
    """A lane without marks must not look like days without steps."""
    many = page(collect([line(n, step=1) for n in range(1, CHANGES_MAX + 10)]), "T")
    assert f"the last {CHANGES_MAX} of {CHANGES_MAX + 9:,} decisions with a step" in many
    assert "VllmWorker</text>" in many


def test_a_hostile_reason_stays_text() -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    read = Read(page(collect([line(1, told=reasons(1, why=hostile)), line(2)]), "T"))
    assert not {"img", "script"} & {tag for tag, _ in read.tags}
    assert any(hostile in word for word in read.words)


def test_without_matplotlib_it_has_its_tables_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    html = page(collect([line(1, step=1), line(2)]), "T")
    assert "<svg" not in html
    assert "pip install" in html
    assert "Which rule decided" in html


def test_a_picture_without_matplotlib_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    DecisionLog(tmp_path / "d.jsonl").append([{**line(1), "seq": 1}])
    with pytest.raises(BadInput, match="pip install"):
        write_report(tmp_path / "d.jsonl", tmp_path / "p.svg", title="T")


def test_charts_of_which_nothing_is_known_are_left_out() -> None:
    found = collect([line(n, traffic=None, prediction=None, told=()) for n in (1, 2)])
    titles = {chart.title for chart in known_charts(found.points)}
    assert {"Prefill workers", "Decode workers", "GPUs", "GPU-hours"} <= titles
    assert not {"Requests", "Prompts", "Requests that one worker serves within its target"} & titles


@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.full
def test_a_picture_is_an_svg_with_the_first_charts(count: int, tmp_path: Path) -> None:
    log, to = tmp_path / "d.jsonl", tmp_path / "p.svg"
    DecisionLog(log).append({**line(n), "seq": n} for n in range(1, count + 1))
    assert write_report(log, to, title="T") == count
    first = to.read_bytes()
    drawn = ElementTree.fromstring(first)
    axes = [group for group in drawn.iter(f"{SVG}g") if re.fullmatch(r"axes_\d+", group.get("id", ""))]
    assert len(axes) == PICTURED
    write_report(log, to, title="T")
    assert to.read_bytes() == first
