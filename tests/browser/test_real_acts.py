"""A flip, a sleep with its wake, and an `apply`, by a person on the page of a real graph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.browser.test_real_page import LONG_MS, row_of
from tests.drivers.served import EXAMPLE, Served

pytestmark = [pytest.mark.infra, pytest.mark.full, pytest.mark.timeout(300)]


def config(folder: Path, decode: int) -> Path:
    """The shipped graph with two prefill workers and so many that decode. Any of them may sleep."""
    made = yaml.safe_load((EXAMPLE / "configs" / "disagg.yaml").read_text())
    made["Host"] = {"gpus": "sim:5", "dashboard": 0}
    made["Frontend"]["port"] = 0
    for name, workers in (("PrefillWorker", 2), ("VllmWorker", decode)):
        made[name]["ServiceArgs"] |= {"workers": workers, "standby": 0}
    path = folder / f"{decode}.yaml"
    path.write_text(yaml.safe_dump(made))
    return path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = config(tmp_path_factory.mktemp("served"), 2)
    with Served(target=("graphs.disagg:Frontend", "-f", str(file)), frontend=False).started() as graph:
        yield graph


@pytest.fixture
def page(served: Served, open_page: Any) -> Any:
    opened = open_page(served.ok("dashboard", "--print-url").strip())
    opened.set_default_timeout(LONG_MS)
    opened.wait_for_selector(".connection.live, .connection.poll")
    opened.get_by_role("button", name="All actions").click()
    return opened


def acted(page: Any, on: str, act: str, *, confirm: str | None = None, value: str | None = None) -> None:
    """Choose the act, look at what it would do, confirm, and wait for its end."""
    page.get_by_role("button", name=on, exact=True).click()
    dialog = page.locator("dialog")
    dialog.get_by_role("radio", name=re.compile(f"^{act}")).check()
    if value is not None:
        dialog.get_by_label("Configuration file").fill(value)
    dialog.get_by_role("button", name="Show what it would do").click()
    dialog.get_by_label("What it would do").wait_for()
    if confirm is not None:
        dialog.get_by_label("to confirm").fill(confirm)
    dialog.get_by_role("button", name=f"{act} now").click()
    dialog.get_by_text("Done.").wait_for()
    dialog.get_by_role("button", name="Close").click()


def test_a_flip(served: Served, page: Any, pictures: Path) -> None:
    whole = f"{served.namespace}_VllmWorker_1"
    acted(page, f"Act on {whole}", "Flip the role", confirm=whole)
    page.locator("#workers").get_by_text("PrefillWorker × 3").wait_for()
    page.locator("#actions").get_by_text(re.compile("VllmWorker_1: .*flipping")).first.wait_for()
    page.screenshot(path=str(pictures / "real-flipped.png"), full_page=True)
    row_of(page, "PrefillWorker_2").locator(".state.good").wait_for()
    whole = f"{served.namespace}_PrefillWorker_2"
    acted(page, f"Act on {whole}", "Flip the role", confirm=whole)
    row_of(page, "VllmWorker_1").locator(".state.good").wait_for()


def test_a_sleep_and_a_wake(served: Served, page: Any, pictures: Path) -> None:
    whole = f"{served.namespace}_VllmWorker_1"
    acted(page, f"Act on {whole}", "Sleep", confirm=whole)
    row_of(page, "VllmWorker_1").locator(".state.idle").wait_for()
    page.screenshot(path=str(pictures / "real-asleep.png"), full_page=True)
    acted(page, f"Act on {whole}", "Wake")
    row_of(page, "VllmWorker_1").locator(".state.good").wait_for()


def test_an_apply_of_a_file(served: Served, page: Any, tmp_path: Path) -> None:
    file = config(tmp_path, 3)
    acted(page, "Act…", "Apply a file", value=str(file), confirm=file.name)
    page.locator("#workers").get_by_text("VllmWorker × 3").wait_for()
    row_of(page, "VllmWorker_2").locator(".state.good").wait_for()
