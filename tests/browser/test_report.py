"""The planner's report, one file: its policy lets its own scripts draw, and a drag zooms all charts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.planned import planned_report

pytestmark = pytest.mark.full

FIRST = "#charts figure:nth-of-type(2)"
SHOWN = "uPlot.sync('report').plots.map((plot) => plot.scales.x.max - plot.scales.x.min)"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planned_report(tmp_path_factory.mktemp("report"))


def test_the_report_draws_all_charts_with_values_at_the_cursor(report: Path, open_page: Any, pictures: Path) -> None:
    page = open_page(report.as_uri(), height=1400)
    page.wait_for_selector("#charts canvas")
    titles = page.locator("#charts figcaption").all_inner_texts()
    assert titles[0].startswith("Decisions with a step")
    assert {"Requests (1/s)", "Decode workers (workers)", "GPU-hours (h)"} <= set(titles)
    assert page.locator("#charts canvas").count() == len(titles)
    page.locator(f"{FIRST} .u-over").hover()
    page.wait_for_function(f"/2026-01-01 12:/.test(document.querySelector('{FIRST} .u-legend').textContent)")
    page.screenshot(path=str(pictures / "report.png"))


def test_a_drag_zooms_all_charts_and_a_double_click_shows_everything(report: Path, open_page: Any) -> None:
    page = open_page(report.as_uri(), height=1400)
    page.wait_for_selector("#charts canvas")
    whole = page.evaluate(SHOWN)
    box = page.locator(f"{FIRST} .u-over").bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 50, steps=5)
    page.mouse.up()
    zoomed = page.evaluate(SHOWN)
    assert max(zoomed) < min(whole) / 2
    assert len({round(each) for each in zoomed}) == 1
    page.locator(f"{FIRST} .u-over").dblclick(position={"x": 100, "y": 50})
    assert page.evaluate(SHOWN) == whole
