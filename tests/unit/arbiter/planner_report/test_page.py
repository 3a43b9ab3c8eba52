"""The page stands alone, is small whatever the log, and nothing that is logged becomes markup."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from dynamo_local.arbiter.planner_report.charts import CHARTS, known_charts, picture, y_ticks
from dynamo_local.arbiter.planner_report.data import CHANGES_MAX, Gathered, Point, gathered
from dynamo_local.arbiter.planner_report.page import page
from tests.fakes.planner.logged_lines import BEGAN_S, line, reasons

MEGABYTE = 1_000_000
SVG = "{http://www.w3.org/2000/svg}"


class Read(HTMLParser):
    """Tags with their attributes, and the texts of scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and not self.scripts[-1]:
            self.scripts[-1] = data
        else:
            self.words.append(data)


def test_it_asks_nobody_for_anything() -> None:
    html = page(gathered([line(n, step=n % 2) for n in range(1, 9)]), "Planner of dynamo")
    read = Read(html)
    linking = {"src", "href", "data", "action", "srcset", "poster", "xlink:href"}
    assert not [tag for tag, attributes in read.tags if linking & set(attributes)]
    assert not {"link", "iframe", "img", "object", "embed", "base"} & {tag for tag, _ in read.tags}
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|WebSocket", html)
    assert set(re.findall(r"\w+://[^\s\"'<]*", html)) == {"http://www.w3.org/2000/svg"}  # a name, not a place
    policy = next(attributes["content"] for tag, attributes in read.tags if attributes.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_after_fifty_thousand_decisions_it_is_below_a_megabyte() -> None:
    full = gathered([line(n, told=reasons(1, why="because " * 100)) for n in range(1, CHANGES_MAX + 10)])
    names = {one.figure for chart in CHARTS for one in chart.series}
    found = Gathered(changes=full.changes, policies=["throughput-load"])
    counts = Counter(dict.fromkeys(names, 1))
    for number in range(50_000):
        figures = dict.fromkeys(names, 1000 / 7 + number % 97)
        found.add(Point(BEGAN_S + 3.6 * number, 1, figures, counts, number / 100))
    assert len(page(found, "T").encode()) < MEGABYTE


def test_the_timeline_has_whole_names_and_says_what_it_leaves_out() -> None:
    """Of a log of days only the last steps are told; a lane without marks must not look like days without steps."""
    both = tuple(replace(reason, step=1) for reason in reasons(1))
    few = page(gathered([line(n, told=both) for n in range(1, 9)]), "T")
    many = page(gathered([line(n, step=1) for n in range(1, CHANGES_MAX + 10)]), "T")
    assert f"(the last {CHANGES_MAX} of {CHANGES_MAX + 9:,})" in many
    assert "(the last" not in few
    assert "PrefillWorker</text>" in few


def test_a_hostile_reason_stays_text() -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    read = Read(page(gathered([line(1, told=reasons(1, why=hostile)), line(2)]), "T"))
    assert len(read.scripts) == 2
    assert "img" not in {tag for tag, _ in read.tags}
    assert any(hostile in text for change in json.loads(read.scripts[0])["changes"] for text in change["words"])
    assert any("alert(1)" in word for word in read.words)


def test_the_data_has_a_value_or_none_for_each_point() -> None:
    lines = [line(1), line(2, traffic=None, prediction=None), line(3)]
    data = json.loads(Read(page(gathered(lines), "T")).scripts[0])
    assert len(data["times"]) == 3
    assert data["figures"]["observed_ttft_ms"] == [240, None, 240]
    assert {len(values) for values in data["figures"].values()} == {3}
    assert {figure for chart in data["charts"] for figure, *_ in chart} == set(data["figures"])


def test_charts_of_which_nothing_is_known_are_left_out() -> None:
    found = gathered([line(n, traffic=None, prediction=None, told=()) for n in (1, 2)])
    titles = {chart.title for chart in known_charts(found.points)}
    assert {"Prefill workers", "Decode workers", "GPUs", "GPU-hours"} <= titles
    assert not {"Requests", "Prompts", "What one worker takes within its target"} & titles


@pytest.mark.parametrize("count", [1, 2, 40])
def test_a_picture_is_an_svg_with_a_curve_for_each_series(count: int) -> None:
    points = gathered([line(n) for n in range(1, count + 1)]).points
    charts = known_charts(points)
    drawn = ElementTree.fromstring(picture(charts, points))
    curves = drawn.findall(f".//{SVG}svg[@class='curves']")
    assert [len(curve.findall(f"{SVG}path")) for curve in curves] == [len(chart.series) for chart in charts]
    numbers = [float(n) for path in drawn.iter(f"{SVG}path") for n in re.findall(r"[\d.]+", path.attrib["d"])]
    assert all(0 <= number <= 10_000 for number in numbers)


@pytest.mark.parametrize("highest", [0.0, 1e-9, 0.37, 1.0, 3.0, 7.7, 999.0, 1e9])
def test_an_axis_has_round_numbers_up_to_the_highest(highest: float) -> None:
    ticks = y_ticks(highest)
    assert ticks[0] == 0
    assert ticks[-1] >= highest
    assert 2 <= len(ticks) <= 6
