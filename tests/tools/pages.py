"""The project's pages as values: files, fenced blocks, inline code, headings."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
SHELL = frozenset({"sh", "bash", "console"})

_FENCE = re.compile(r"^```(?P<language>[a-z]*)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`(?P<code>[^`\n]+)`(?!`)")
_HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)


def pages() -> list[Path]:
    """Every page that is written for people; test data and installed packages are none."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    return sorted(found)


def shown(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block and where it begins."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(shown(page), text.count("\n", 0, match.start()) + 1, match["language"], match["text"])
        for match in _FENCE.finditer(text)
    ]


def without_blocks(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def inline_code(page: Path) -> list[str]:
    return [match["code"] for match in _INLINE.finditer(without_blocks(page))]


def anchors(page: Path) -> set[str]:
    titles = (match["title"].lower().replace("`", "") for match in _HEADING.finditer(without_blocks(page)))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def shell_commands(text: str) -> Iterator[list[str]]:
    """Each simple command's words: prompts, quotes over lines, comments and lists of commands are understood."""
    for words in _lines(text.replace("\\\n", " ")):
        command: list[str] = []
        for word in [*words, ";"]:
            if word and set(word) <= set(";&|()"):
                if command:
                    yield command
                command = []
            else:
                command.append(word)


def _lines(text: str) -> Iterator[list[str]]:
    """Words of each line; a line whose quotes are open goes on in the next."""
    begun = ""
    for line in text.splitlines():
        begun += line.removeprefix("$ ") + "\n"
        lexer = shlex.shlex(begun, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            continue
        begun = ""
        yield words
    if begun:
        raise ValueError(f"a quote is not closed: {begun!r}")


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
