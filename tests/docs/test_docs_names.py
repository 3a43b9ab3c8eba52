"""Modules and names that docstrings, comments and pages speak of are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.pages import ROOT, pages, shown

PACKAGE = ROOT / "dynamo_local"
ROOMS = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
DOTTED = re.compile(r"`([a-z_][a-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)+)(?:\([^`]*\))?`")
PATHS = re.compile(r"`((?:dynamo_local/|state/|circus_plugins/|tests/)?[a-z0-9_]+(?:/[a-z0-9_]+)*(?:\.py|/))`")
TOP = ("dynamo_local", "tests", "benchmarks", "docs")
HISTORY = ("CHANGELOG.md",)


def _sources() -> list[Path]:
    modules = [path for folder in ("dynamo_local", "state", "circus_plugins") for path in (ROOT / folder).rglob("*.py")]
    return [path for path in modules if not any(parent.is_symlink() for parent in path.parents)]


def _module(path: Path) -> Path | None:
    """The file of a module or package."""
    file = path.with_suffix(".py")
    if file.is_file():
        return file
    return path / "__init__.py" if (path / "__init__.py").is_file() else None


def _is_there(dotted: str) -> bool:
    """`core.fleet.states.TRAITS`: the longest module that there is, and the next name somewhere in it."""
    parts = dotted.removeprefix("dynamo_local.").split(".")
    at, module = PACKAGE, None
    while parts and (found := _module(at / parts[0])) is not None:
        at, module, parts = at / parts[0], found, parts[1:]
    if module is None:
        return False
    return not parts or re.search(rf"\b{re.escape(parts[0])}\b", module.read_text(encoding="utf-8")) is not None


def _missing(text: str) -> Iterator[str]:
    for name in DOTTED.findall(text):
        parts = name.removeprefix("dynamo_local.").split(".")
        if parts[0] in ROOMS and parts[-1] not in ("py", "md", "json", "yaml", "toml") and not _is_there(name):
            yield name


@pytest.mark.parametrize("file", _sources(), ids=shown)
def test_what_a_module_refers_to_is_there(file: Path) -> None:
    assert list(_missing(file.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("page", [page for page in pages() if page.name not in HISTORY], ids=shown)
def test_what_a_page_refers_to_is_there(page: Path) -> None:
    """Files by their paths, from the top or in `dynamo_local`."""
    paths = [path for path in PATHS.findall(page.read_text(encoding="utf-8")) if path.split("/")[0] in (*ROOMS, *TOP)]
    assert [path for path in paths if not any((root / path).exists() for root in (ROOT, PACKAGE))] == []


def test_a_name_that_is_gone_is_noticed() -> None:
    """Else the tests above would pass for anything."""
    assert list(_missing("see `core.drains.how`, `core.fleet.states.TRAITS`, `core.fleet.states.NOTHING`")) == [
        "core.drains.how",
        "core.fleet.states.NOTHING",
    ]
