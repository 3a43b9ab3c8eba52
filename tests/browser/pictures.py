"""`python -m tests.browser.pictures FOLDER` makes the docs' pictures of pages, as WebP of less than 60 kB each."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.browser.conftest import ARGUMENTS, CHROMIUM
from tests.browser.made import MadeServer
from tests.browser.planned import planned_report

BYTES_MAX = 60_000


def saved(picture: bytes, path: Path) -> None:
    """The picture in the best quality that is small enough."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    for quality in (85, 75, 65, 55, 45, 35):
        image.save(path, "WEBP", quality=quality, method=6)
        if path.stat().st_size < BYTES_MAX:
            break
    print(f"{path}: {path.stat().st_size} bytes")


def main(folder: Path) -> None:
    with MadeServer() as made, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))

        def opened(scheme: Any, height: int) -> Any:
            page = browser.new_page(viewport={"width": 1280, "height": height}, color_scheme=scheme)
            page.goto(made.link())
            page.get_by_role("button", name="1 h").click()
            page.wait_for_selector(".window:has-text('1 h 0 min')")
            page.get_by_role("button", name="5 min").click()
            page.wait_for_selector(".window:has-text('5 min 0 s')")
            page.get_by_role("button", name="VllmWorker +1 (scale up)").nth(1).click()
            page.wait_for_selector(".mark-details")
            return page

        page = opened("light", 1000)
        page.wait_for_function("document.querySelector('[data-key=demand]')?.textContent !== '–'")
        page.evaluate("new Promise((done) => setTimeout(done, 1500))")
        saved(page.screenshot(), folder / "dashboard.webp")
        page = opened("dark", 1000)
        page.locator("#workers").scroll_into_view_if_needed()
        page.get_by_role("button", name="VllmWorker +1 (scale up)").last.click()
        page.locator(".request").first.get_by_role("button").click()
        page.evaluate("document.getElementById('workers').scrollIntoView()")
        saved(page.screenshot(), folder / "dashboard-why.webp")
        with TemporaryDirectory() as made_in:
            page = browser.new_page(viewport={"width": 1180, "height": 1250})
            page.goto(planned_report(Path(made_in)).as_uri())
            page.wait_for_selector("#charts canvas")
            page.evaluate("document.getElementById('charts').scrollIntoView()")
            saved(page.screenshot(), folder / "planner-report.webp")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
