"""One Chromium for a run, and a page of its own for each test. An error that a page logs fails its test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="`tox -e browser` installs Playwright")

from tests.browser.made import MadeServer  # noqa: E402

CHROMIUM = os.environ.get("DYN_CHROMIUM", "/usr/bin/chromium")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_MS = 15_000
ROOT = Path(__file__).parents[2]
PICTURES = Path(os.environ.get("DYN_PICTURES", ROOT / ".tox" / "reports" / "browser"))

Open = Callable[..., Any]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if not shutil.which(CHROMIUM):
        if os.environ.get("DYN_BROWSER_REQUIRED"):
            pytest.fail(f"{CHROMIUM} is not installed: apt-get install chromium")
        pytest.skip(f"{CHROMIUM} is not installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield opened
        opened.close()


@pytest.fixture
def made() -> Iterator[MadeServer]:
    with MadeServer() as server:
        yield server


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """`open_page(url, width=1280, **context)`: the loaded page. It fails on errors that the page logs."""
    contexts, errors = [], []

    def logged(message: Any) -> None:
        # A refusal of the server is logged by the browser itself, and is what some tests make.
        if message.type == "error" and "Failed to load resource" not in message.text:
            errors.append(message.text)

    def opening(url: str, width: int = 1280, height: int = 900, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", logged)
        page.goto(url)
        return page

    yield opening
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture(scope="session")
def pictures() -> Path:
    """Where pictures are kept as artefacts."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    return PICTURES
