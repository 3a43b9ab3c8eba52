"""A month of made history in the real file, panned on the page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.dashboard.history import BYTES_MAX, DAY_S, LEVELS, HistoryReader, HistoryWriter
from tests.browser.made import MadeServer, values
from tests.browser.test_made_page import PAN, text_of

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]
ANSWER_MS_MAX = 2_000


@pytest.fixture(scope="module")
def month(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Points as often as they are kept: each minute, ten seconds, and second of the last month, week and day."""
    path, now_s = tmp_path_factory.mktemp("month") / "history.sqlite", int(time.time())
    writer = HistoryWriter(path)
    t = now_s - LEVELS[60]
    while t < now_s:
        writer.add(t, values(t))
        left_s = now_s - t
        t += 60 if left_s > LEVELS[10] else 10 if left_s > DAY_S else 1
        if t % 7200 < 2:
            writer.flush(now_s)
    writer.close(now_s)
    return path


@pytest.mark.timing
def test_a_month_is_panned_from_its_file(month: Path, made: MadeServer, open_page: Any) -> None:
    assert month.stat().st_size < BYTES_MAX
    made.collector.reader = HistoryReader(month)  # type: ignore[assignment]
    page = open_page(made.link())
    page.wait_for_selector(".gpu")
    answers: list[float] = []
    page.on(
        "requestfinished", lambda each: answers.append(each.timing["responseEnd"]) if "/api/history" in each.url else 0
    )
    page.get_by_role("button", name="1 month").click()
    page.wait_for_selector(".window:has-text('30 d')")
    for name in ("1 week", "1 month"):
        page.get_by_role("button", name=name).click()
        seen = page.evaluate(PAN, 3_000)
        print(f"panning at {name}:", seen)
        assert seen["frames"] > 10
        page.get_by_role("button", name="Earlier").click()
        page.get_by_role("button", name="Now").click()
    page.get_by_role("button", name="Queue as a table").click()
    assert page.locator(".table-view tr").count() > 20
    assert "now" in text_of(page, ".window")
    print("answers of the history after ms:", [round(each) for each in answers])
    assert answers
    assert sorted(answers)[len(answers) // 2] < ANSWER_MS_MAX
