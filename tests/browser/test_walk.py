"""The walk of a new user: from `dynamo serve --model … --dashboard` to "why did it add a worker?" in three clicks."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.test_real_page import LONG_MS, stream_of
from tests.drivers.served import Served, until

pytestmark = [pytest.mark.infra, pytest.mark.full, pytest.mark.timeout(240)]

WORDS = (
    "--dashboard",
    "--max-model-len=1900",
    "--planner",
    "--VllmWorker.ServiceArgs.workers=1",
    "--VllmWorker.sim.speed=0.1",
    "--VllmWorker.sim.num-gpu-blocks=30",
    "--Planner.policy=load",
    "--Planner.adjustment-interval=1.5",
    "--Planner.metric-pulling-interval=0.25",
    "--Planner.max-gpu-budget=3",
    "--Planner.decode-kv-scale-up-threshold=0.5",
    "--Planner.decode-kv-scale-down-threshold=0.1",
)
ADDED = re.compile(r"VllmWorker \+1 \(scale up\)")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(*WORDS, target=("--model", "sim-tiny")).started() as graph:
        yield graph


def test_why_a_worker_was_added_is_three_clicks_away(served: Served, open_page: Any, pictures: Path) -> None:
    shown = until(lambda: served.status()["dashboard"])
    ended = threading.Event()

    def ask(name: str) -> None:
        while not ended.is_set():
            stream_of(served.url, name, 150)

    asking = [threading.Thread(target=ask, args=(f"walk-{each}",)) for each in range(12)]
    for each in asking:
        each.start()
    try:
        _walk(served, shown, open_page, pictures)
    finally:
        ended.set()
        for each in asking:
            each.join()


def _walk(served: Served, shown: Any, open_page: Any, pictures: Path) -> None:
    link = served.ok(*shown["link"].split()[1:]).strip()
    page = open_page(link)  # the first click
    page.set_default_timeout(LONG_MS)
    page.get_by_text(re.compile("VllmWorker × [23]")).wait_for()
    page.screenshot(path=str(pictures / "walk-1.png"))
    page.get_by_role("button", name="All actions").click()
    page.locator("#actions").get_by_role("button", name=ADDED).first.click()
    why = page.locator("#actions .mark-details")
    why.get_by_text(re.compile(r"scale[ _]up")).first.wait_for()
    words = why.inner_text()
    assert "Rule:" in words, words
    assert re.search(r"KV|kv", words), words
    page.locator("#actions").scroll_into_view_if_needed()
    page.locator("#actions").screenshot(path=str(pictures / "walk-3.png"))
