"""docs/lessons.md: each fault of the predecessor has a test, and each test that is named there exists."""

from __future__ import annotations

import ast
import re

import pytest

from tests.fakes.pages import ROOT

PAGE = ROOT / "docs" / "lessons.md"
NAMED = re.compile(r"`(?P<file>tests/[\w/]+\.py)::(?P<test>test_\w+)`")
FAULTS = range(1, 24)


def _named() -> list[tuple[str, str]]:
    found = dict.fromkeys((match["file"], match["test"]) for match in NAMED.finditer(PAGE.read_text()))
    assert found
    return list(found)


@pytest.mark.parametrize(("file", "test"), _named(), ids=lambda value: value)
def test_a_test_that_is_named_exists(file: str, test: str) -> None:
    """Renamed or removed, its row would promise what nobody checks."""
    path = ROOT / file
    assert path.is_file()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    assert test in {node.name for node in ast.parse(path.read_text()).body if isinstance(node, functions)}


def test_each_fault_has_a_row_with_a_test() -> None:
    """In order, none left out."""
    rows = [line for line in PAGE.read_text().splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(FAULTS)
    assert [row for row in rows if not NAMED.search(row)] == []


def test_no_backticked_test_escapes_the_check() -> None:
    """A path that is written in another way would not be looked at."""
    assert len(re.findall(r"`tests/[^`]*::[^`]*`", PAGE.read_text())) == len(NAMED.findall(PAGE.read_text()))
