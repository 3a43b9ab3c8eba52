"""Ten viewers for a long time, two in the browser and eight on the stream alone: no process's memory may grow.

`DYN_PAGE_SOAK_S` says for how long: two minutes, where it is not set. The page keeps an hour of points, so its own heap
is full after an hour.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import pytest

from dynamo_local.dashboard.process import ask_running
from tests.browser.test_real_page import stream_of
from tests.drivers.page import link_of, readers
from tests.drivers.served import AGG, Served

SOAK_S = float(os.environ.get("DYN_PAGE_SOAK_S", "120"))
pytestmark = [pytest.mark.infra, pytest.mark.full, pytest.mark.timeout(SOAK_S + 240)]

IN_BROWSER, ON_STREAM = 2, 8
ACT_EVERY_S = 30.0
MIB = 2**20
GROWTH_MAX = 1.05
SLACK_MIB = 4.0
"""An allocator takes so much and gives it back."""
HEAP_MIB_MAX = 40.0
"""A page with an hour of points needs at most so much, after a collection."""


def test_no_memory_grows_with_ten_viewers(open_page: Any) -> None:
    with Served("--dashboard", target=AGG, namespace="soak").started() as graph, ExitStack() as stack:
        pages = [open_page(link_of(graph)) for _ in range(IN_BROWSER)]
        for page in pages:
            page.wait_for_selector(".connection.live")
        seen = stack.enter_context(readers(link_of(graph) for _ in range(ON_STREAM)))
        stack.enter_context(asking(graph.url))
        watched = {"page": ask_running(graph.paths)["pid"], "arbiter": graph.status()["arbiter_pid"]}  # type: ignore[index]
        taken: dict[str, list[float]] = {name: [] for name in watched}
        end_s, act_s, wanted = time.monotonic() + SOAK_S, 0.0, 1
        while time.monotonic() < end_s:
            for name, pid in watched.items():
                taken[name].append(psutil.Process(pid).memory_info().rss / MIB)
            if time.monotonic() - act_s > ACT_EVERY_S:
                act_s, wanted = time.monotonic(), 3 - wanted
                graph.ok("scale", "VllmWorker", str(wanted), "-n", "soak")
            pages[0].wait_for_timeout(1_000)  # it lets both pages run, too
        heaps = [heap_mib(page) for page in pages]
        for page in pages:
            assert page.locator(".connection.live, .connection.poll").count() == 1
        assert min(seen) > SOAK_S / 2, seen
    print(
        f"after {SOAK_S:g} s:", {name: shown(values) for name, values in taken.items()}, "heaps", heaps, "events", seen
    )
    for values in taken.values():
        second, last = quarter(values, 1), quarter(values, 3)
        assert last <= second * GROWTH_MAX + SLACK_MIB
    assert max(heaps) < HEAP_MIB_MAX


def quarter(values: list[float], number: int) -> float:
    """The median of one quarter of the time."""
    size = len(values) // 4
    return statistics.median(values[number * size : (number + 1) * size])


def shown(values: list[float]) -> list[float]:
    return [round(quarter(values, number), 1) for number in range(4)]


def heap_mib(page: Any) -> float:
    """The page's own memory, after a collection."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    return round(session.send("Runtime.getHeapUsage")["usedSize"] / MIB, 1)


@contextmanager
def asking(url: str) -> Iterator[None]:
    """Some requests a second, one after the other, until the block ends."""
    ended = threading.Event()

    def ask() -> None:
        number = 0
        while not ended.wait(0.3):
            number += 1
            stream_of(url, f"soak-{number}", 40)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(60)
    assert not thread.is_alive()
