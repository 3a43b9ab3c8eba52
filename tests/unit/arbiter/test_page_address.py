"""The page's address in the status: told by the page itself, and forgotten when it no longer asks."""

from __future__ import annotations

from pathlib import Path

from dynamo_local.arbiter.dashboard import HEARD_S, DashboardProcess
from dynamo_local.arbiter.deployment import Settings
from dynamo_local.system.paths import Paths
from tests.fakes.arbiter.hand_clock import HandClock

URL = "http://127.0.0.1:8700/"


def test_the_page_s_address_stands_in_the_status_as_long_as_it_asks(tmp_path: Path) -> None:
    clock = HandClock()
    paths = Paths.of("box", {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)})
    page = DashboardProcess(paths, Settings(), clock)
    assert page.status() is None
    page.heard(URL)
    assert page.status() == {"url": URL, "link": "dynamo dashboard --print-url -n box"}
    clock.at_s += HEARD_S
    assert page.status() is None
