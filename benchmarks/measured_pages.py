"""The part of a page that a benchmark writes: between `<!-- measured: COMMAND -->` and an end mark."""

from __future__ import annotations

import re
from pathlib import Path

END = "<!-- end of what was measured -->"


def write_measured(page: Path, command: str, text: str) -> None:
    """Replace what stands between the marks. ValueError where the page has none."""
    begin = f"<!-- measured: {command} -->"
    before = page.read_text(encoding="utf-8")
    if begin not in before or END not in before:
        raise ValueError(f"{page} lacks {begin} or {END}")
    after = re.sub(
        f"{re.escape(begin)}.*{re.escape(END)}", lambda _: f"{begin}\n{text}\n{END}", before, flags=re.DOTALL
    )
    page.write_text(after, encoding="utf-8")
