"""Measures that no linter takes: sizes of modules and functions, packages and layers, circles, docstrings.

`dynamo_local`, `state` and `circus_plugins` are the product; tests, benchmarks, examples and docs are measured too.
There are no exceptions: a module that grows past its bound usually hides two things.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

from tests.tools.house import circles, layers, package

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("dynamo_local", "state", "circus_plugins")
OTHERS = ("tests", "benchmarks", "examples", "docs")
MODULE_LINES = 850
FUNCTION_LINES = 60

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _modules(folders: tuple[str, ...]) -> list[Path]:
    """Files below the folders; `dynamo_local/state` and `dynamo_local/circus_plugins` are links to other folders."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if not any(parent.is_symlink() for parent in path.parents)]


def _shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


EVERYWHERE = pytest.mark.parametrize("folders", [PRODUCT, OTHERS], ids=["product", "others"])


# --- sizes -------------------------------------------------------------------------------------


@EVERYWHERE
def test_no_module_is_too_long(folders: tuple[str, ...]) -> None:
    lines = {_shown(path): len(path.read_text(encoding="utf-8").splitlines()) for path in _modules(folders)}
    assert {path: count for path, count in lines.items() if count > MODULE_LINES} == {}


@EVERYWHERE
def test_no_function_is_too_long(folders: tuple[str, ...]) -> None:
    long = {}
    for path in _modules(folders):
        for node in ast.walk(_tree(path)):
            if isinstance(node, FUNCTIONS) and (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES:
                long[f"{_shown(path)}::{node.name}"] = lines
    assert long == {}


# --- who imports whom ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """Module -> the modules that it imports, inside of functions and for annotations (`TYPE_CHECKING`) included."""
    graph = grimp.build_graph("dynamo_local", cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_no_module_imports_itself_in_a_circle(imported: dict[str, set[str]]) -> None:
    assert circles(imported) == []


def test_no_package_imports_itself_in_a_circle(imported: dict[str, set[str]]) -> None:
    """`.importlinter` lets packages of one layer import each other; here each pair has one direction."""
    packages: dict[str, set[str]] = {package(module): set() for module in imported}
    for module, targets in imported.items():
        packages[package(module)] |= {package(target) for target in targets} - {package(module)}
    assert circles(packages) == []


def test_there_are_at_most_sixteen_packages_in_six_layers() -> None:
    """`state` and `circus_plugins` are links to folders at the top level, which the design card names."""
    folders = [path for path in (ROOT / "dynamo_local").iterdir() if (path / "__init__.py").is_file()]
    assert len([folder for folder in folders if not folder.is_symlink()]) <= 16
    assert layers(ROOT) <= 6


def test_a_circle_is_found() -> None:
    """Else the test above would pass for anything."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


# --- docstrings ----------------------------------------------------------------------------------


def _undocumented(path: Path) -> Iterator[str]:
    """The module, and its public classes, without a docstring."""
    tree = _tree(path)
    if not ast.get_docstring(tree):
        yield _shown(path)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
            yield f"{_shown(path)}::{node.name}"


def test_modules_and_public_classes_say_what_they_are_for() -> None:
    """Functions and methods have a docstring only where it says what the name cannot."""
    assert [name for path in _modules(PRODUCT) for name in _undocumented(path)] == []


def test_no_docstring_only_points_elsewhere() -> None:
    found = [
        f"{_shown(path)}:{node.lineno}"
        for path in _modules(PRODUCT)
        for node in ast.walk(_tree(path))
        if isinstance(node, Definition) and re.fullmatch(r"See `?[\w.]+`?\.?", ast.get_docstring(node) or "")
    ]
    assert found == []
