"""The page stands alone, is small whatever the log, and nothing that is logged becomes markup."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.arbiter.planner_report_data import CHANGES_MAX, Point, ReportData, collect
from dynamo_local.arbiter.planner_report_page import CHARTS, known_charts, page, write_report
from dynamo_local.errors import BadInput
from dynamo_local.planner.records.decision_log import DecisionLog
from tests.fakes.planner.logged_lines import BEGAN_S, line, reasons

MEGABYTE = 1_000_000
NAMES = {"github.com"}
"""Of a comment of uPlot's: nobody asks it."""


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


def drawn_in(html: str) -> dict[str, Any]:
    """The data of its charts."""
    found: dict[str, Any] = json.loads(html.partition('id="data">')[2].partition("</script>")[0])
    return found


@pytest.mark.full
def test_it_asks_nobody_for_anything() -> None:
    html = page(collect([line(n, step=n % 2) for n in range(1, 9)]), "Planner of dynamo")
    read = Read(html)
    linking = {"src", "href", "data", "action", "srcset", "poster", "xlink:href"}
    linked = {value for _, attributes in read.tags for name, value in attributes.items() if name in linking}
    assert all(value is not None and value.startswith("#") for value in linked)
    assert not {"link", "iframe", "img", "object", "embed", "base"} & {tag for tag, _ in read.tags}
    assert not re.search(r"url\((?!#)|@import", html)
    assert set(re.findall(r"\w+://([^/\s\"'<]*)", html)) <= NAMES
    policy = next(attributes["content"] for tag, attributes in read.tags if attributes.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "'unsafe-inline'" not in policy.partition("script-src")[2]


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
    drawn = drawn_in(many)
    assert drawn["lanes"] == ["VllmWorker"]
    assert len(drawn["steps"]) == CHANGES_MAX


def test_a_hostile_reason_stays_text() -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    read = Read(page(collect([line(1, told=reasons(1, why=hostile)), line(2)]), "T"))
    assert [tag for tag, _ in read.tags if tag in ("img", "script")] == ["script"] * 3
    assert any(hostile in word for word in read.words)


def test_a_hostile_component_is_a_lane_s_name_and_no_markup() -> None:
    hostile = "</script><script>alert(1)</script>"
    told = tuple(replace(each, component=hostile) for each in reasons(1))
    html = page(collect([line(1, told=told), line(2)]), "T")
    assert [tag for tag, _ in Read(html).tags if tag == "script"] == ["script"] * 3
    assert drawn_in(html)["lanes"] == [hostile]


def test_a_picture_is_refused_with_the_name_of_a_page(tmp_path: Path) -> None:
    DecisionLog(tmp_path / "d.jsonl").append([{**line(1), "seq": 1}])
    with pytest.raises(BadInput, match=r"p\.html"):
        write_report(tmp_path / "d.jsonl", tmp_path / "p.svg", title="T")


def test_charts_of_which_nothing_is_known_are_left_out() -> None:
    found = collect([line(n, traffic=None, prediction=None, told=()) for n in (1, 2)])
    titles = {chart.title for chart in known_charts(found.points)}
    assert {"Prefill workers", "Decode workers", "GPUs", "GPU-hours"} <= titles
    assert not {"Requests", "Prompts", "Requests that one worker serves within its target"} & titles
