"""Benchmarks with a page of their own: their command line, the facts that they keep, and the part of the page that they
write, between `<!-- measured: COMMAND -->` and an end mark."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, Self, TypeVar

WIDTH = 120
F = TypeVar("F", bound="KeptFacts")
END = "<!-- end of what was measured -->"


class KeptFacts(Protocol):
    """The measured figures, as a file."""

    @classmethod
    def load(cls, path: Path, /) -> Self:
        """The figures that `save` wrote."""
        ...

    def save(self, path: Path, /) -> None:
        """Write them."""
        ...


def asked(command: str, doc: str | None, *, short: str, page: str) -> argparse.Namespace:
    """The command line of `python -m COMMAND`: `short`, `facts` (a path or None) and `page`, with these words for two
    of them."""
    parser = argparse.ArgumentParser(prog=f"python -m {command}", description=(doc or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help=short)
    parser.add_argument("--facts", type=Path, help="keep what was measured in this file; if it exists, show it")
    parser.add_argument("--page", action="store_true", help=f"{page} (extra: bench)")
    return parser.parse_args()


def kept_or_measured(kind: type[F], path: Path | None, measure: Callable[[], F]) -> F:
    """The figures that the file keeps. Without one they are measured now, and kept there."""
    if path is not None and path.exists():
        return kind.load(path)
    facts = measure()
    if path is not None:
        facts.save(path)
    return facts


def write_measured(page: Path, command: str, text: str) -> None:
    """Replace what stands between the marks. ValueError where the page has none."""
    begin = f"<!-- measured: {command} -->"
    before = page.read_text(encoding="utf-8")
    if begin not in before or END not in before:
        raise ValueError(f"{page} lacks {begin} or {END}")
    after = re.sub(
        f"{re.escape(begin)}.*?{re.escape(END)}",
        lambda _: f"{begin}\n{wrapped(text)}\n{END}",
        before,
        flags=re.DOTALL,
    )
    page.write_text(after, encoding="utf-8")


def wrapped(text: str) -> str:
    """Its lines of prose at the width of the pages; tables and pictures stay."""
    return "\n".join(line if line[:1] in "|!#" else _wrapped(line) for line in text.split("\n"))


def _wrapped(line: str) -> str:
    after = "  " if line.startswith(("* ", "- ")) else ""
    return textwrap.fill(line, WIDTH, subsequent_indent=after, break_long_words=False, break_on_hyphens=False)
