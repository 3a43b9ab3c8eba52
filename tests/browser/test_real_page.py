"""The page of a real graph shows what happens there: a scale, a drain with its end, a crash, a failed request."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.drivers.served import MODEL, Served

pytestmark = [pytest.mark.infra, pytest.mark.timeout(240)]
LONG_MS = 60_000
"""A worker starts or drains beside other tests."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--Processor.migration-limit=0", "--Host.dashboard=0").started() as graph:
        yield graph


@pytest.fixture
def page(served: Served, open_page: Any) -> Any:
    link = served.ok("dashboard", "--print-url").strip()
    opened = open_page(link)
    opened.set_default_timeout(LONG_MS)
    opened.wait_for_selector(".connection.live, .connection.poll")
    opened.get_by_role("button", name="All actions").click()
    return opened


def stream_of(url: str, name: str, tokens: int, *, stream: bool = False) -> int:
    """Ask for tokens under that id; the status, or 0 if the answer broke."""
    asked = {"model": MODEL, "prompt": "a b c d e f g h", "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    try:
        return httpx.post(f"{url}/v1/completions", json=asked, headers={"x-request-id": name}, timeout=60).status_code
    except httpx.HTTPError:
        return 0


def row_of(page: Any, worker: str) -> Any:
    return page.locator("table.workers tr", has=page.get_by_role("button", name=worker))


def workers_of(served: Served, component: str) -> list[str]:
    return sorted(name for name in served.pids() if name.startswith(component))


def test_a_request_is_shown_with_its_phases(served: Served, page: Any) -> None:
    assert stream_of(served.url, "request-of-the-test", 20) == 200
    row = page.locator(".request", has_text="request-of-the-test")
    row.wait_for()
    assert "decode" in row.locator(".waterfall").get_attribute("aria-label")
    page.get_by_label("Find by x-request-id").fill("request-of-the-test")
    page.keyboard.press("Enter")
    page.locator(".request-id", has_text=re.compile("^request-of-the-test$")).wait_for()


def test_a_scale_and_a_drain_with_its_end(served: Served, page: Any, pictures: Any) -> None:
    before = set(workers_of(served, "VllmWorker"))
    page.get_by_role("button", name="Scale VllmWorker").click()
    page.get_by_label("Workers (such as").fill("+1")
    page.get_by_role("button", name="Show what it would do").click()
    page.get_by_role("button", name="Scale now").click()
    page.locator("dialog").get_by_text("Done.").wait_for()
    page.get_by_role("button", name="Close").click()
    page.locator("#workers").get_by_text("VllmWorker × 2").wait_for()
    (added,) = set(workers_of(served, "VllmWorker")) - before
    row_of(page, added).locator(".state.good").wait_for()
    page.screenshot(path=str(pictures / "real-scaled.png"), full_page=True)
    whole = f"{served.namespace}_{added}"
    page.get_by_role("button", name=f"Act on {whole}").click()
    page.get_by_role("button", name="Show what it would do").click()
    page.get_by_label("to confirm").fill(whole)
    page.get_by_role("button", name="Drain now").click()
    page.locator("dialog").get_by_text("Done.").wait_for()
    page.get_by_role("button", name="Close").click()
    page.locator("#actions").get_by_text(re.compile(f"{added}: .*draining")).first.wait_for()
    row_of(page, added).wait_for(state="detached")
    assert added not in served.pids()


def test_a_crash_and_the_request_that_it_cost(served: Served, page: Any, pictures: Any) -> None:
    (worker,) = workers_of(served, "VllmWorker")
    args = (served.url, "request-that-fails", 4_000)  # a whole answer would be generated once more
    asking = threading.Thread(target=stream_of, args=args, kwargs={"stream": True})
    asking.start()
    row_of(page, worker).get_by_text("1 running").wait_for()
    os.kill(served.pids()[worker], signal.SIGKILL)
    page.locator("#actions").get_by_text(re.compile(f"{worker}: .*(crashed|faulted|restarting)")).first.wait_for()
    asking.join()
    page.get_by_role("button", name="failed", exact=True).click()
    failed = page.locator(".request", has_text="request-that-fails")
    failed.wait_for()
    failed.get_by_role("button").click()
    assert "Phase" in failed.inner_text()
    page.locator(".last-words").first.wait_for()
    page.screenshot(path=str(pictures / "real-crashed.png"), full_page=True)
