"""In docs/lessons.md, docs/security.md and docs/seeds.md each row has a test, and each named test exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.tools.pages import ROOT

LESSONS, SECURITY, SEEDS = (ROOT / "docs" / name for name in ("lessons.md", "security.md", "seeds.md"))
PAGES = (LESSONS, SECURITY, SEEDS)
NAMED = re.compile(r"`(?P<file>tests/[\w/]+\.py)::(?P<test>test_\w+)`")
FAULTS = range(1, 25)


def _named() -> list[tuple[str, str]]:
    found = dict.fromkeys(
        (match["file"], match["test"]) for page in PAGES for match in NAMED.finditer(page.read_text())
    )
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
    rows = [line for line in LESSONS.read_text().splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(FAULTS)
    assert [row for row in rows if not NAMED.search(row)] == []


def _rows(text: str) -> list[str]:
    """The rows of all tables, without their heads."""
    lines = text.splitlines()
    pairs = zip(lines, [*lines[1:], ""], strict=True)
    return [line for line, below in pairs if line.startswith("| ") and not re.match(r"\|[\s:|-]+$", below)]


def test_each_protection_names_its_test() -> None:
    """A protection without a test is only intended."""
    protections = _rows(SECURITY.read_text())
    assert protections
    assert [row for row in protections if not NAMED.search(row)] == []


def test_each_feature_of_the_seeds_names_its_test() -> None:
    """Except for the features that the page lists as missing."""
    features = _rows(SEEDS.read_text().partition("## What is not there")[0])
    assert features
    assert [row for row in features if not NAMED.search(row)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_backticked_test_escapes_the_check(page: Path) -> None:
    """A path that is written in another way would not be looked at."""
    text = page.read_text()
    assert len(re.findall(r"`tests/[^`]*::[^`]*`", text)) == len(NAMED.findall(text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_row_has_a_test_that_runs_each_time(page: Path) -> None:
    """What is left to `tox -m full` protects nobody on the day of a change: of each row at least one is not."""
    rows = [list(NAMED.finditer(row)) for row in page.read_text().splitlines() if row.startswith("| ")]
    assert [row[0].string for row in rows if row and all(_is_full(name["file"], name["test"]) for name in row)] == []


def _is_full(file: str, test: str) -> bool:
    """Whether that test, or its whole module, is marked `full`."""
    body = ast.parse((ROOT / file).read_text()).body
    assigned = [node for node in body if isinstance(node, ast.Assign)]
    marks = [ast.unparse(node.value) for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"]
    functions = [node for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    marks += [ast.unparse(mark) for function in functions if function.name == test for mark in function.decorator_list]
    return any(mark == "pytest.mark.full" or (mark.startswith("[") and "pytest.mark.full" in mark) for mark in marks)
