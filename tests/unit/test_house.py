"""The house's measures, which a linter does not take: sizes of modules, functions and folders, circles, docstrings.

`dynamo_local`, `state` and `circus_plugins` are the product; tests, benchmarks, examples and docs are measured too.
There are no exceptions: a module that grows past its bound usually hides two things.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("dynamo_local", "state", "circus_plugins")
OTHERS = ("tests", "benchmarks", "examples", "docs")
MODULE_LINES = 850
FUNCTION_LINES = 60

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_INTERFACE = ("Protocol", "Generic", "BaseModel", "enum.Enum", "enum.StrEnum", "Exception", "object")
"""Bases that say nothing about a class's methods; any other base of a library does."""
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


def test_no_module_imports_itself_in_a_circle() -> None:
    """`.importlinter` keeps circles out between rooms; this looks at modules, imports inside of functions included.

    Imports for annotations only (`if TYPE_CHECKING:`) are none when the program runs.
    """
    graph = grimp.build_graph("dynamo_local", exclude_type_checking_imports=True, cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert _circles(imported) == []


def _circles(imported: dict[str, set[str]]) -> list[set[str]]:
    """Modules that reach each other: what is left after taking away, again and again, whoever imports nobody left,
    and whoever is imported by nobody left. An empty list for a graph without circles."""
    left = {module: set(targets) for module, targets in imported.items()}
    while True:
        targets = set().union(*left.values()) if left else set()
        ends = {module for module, to in left.items() if not to or module not in targets}
        if not ends:
            return [set(left)] if left else []
        left = {module: to - ends for module, to in left.items() if module not in ends}


def test_a_circle_is_found() -> None:
    """Else the test above would pass for anything."""
    assert _circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


# --- docstrings ----------------------------------------------------------------------------------


def _classes() -> dict[str, list[ast.ClassDef]]:
    """All classes of the product by name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for path in _modules(PRODUCT):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def _base_names(node: ast.ClassDef) -> list[str]:
    """`base.Driver` for `class X(base.Driver[Config])`."""
    return [ast.unparse(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases]


def _documented(node: ast.ClassDef) -> set[str]:
    return {child.name for child in node.body if isinstance(child, FUNCTIONS) and ast.get_docstring(child)}


def _inherits(node: ast.ClassDef, method: str, classes: dict[str, list[ast.ClassDef]]) -> bool:
    """Whether a base of the class says what the method does; a library's base does."""
    for name in _base_names(node):
        ours = classes.get(name.rpartition(".")[2], [])
        if not ours and name not in NO_INTERFACE:
            return True
        if any(method in _documented(base) or _inherits(base, method, classes) for base in ours):
            return True
    return False


def _undocumented(path: Path, classes: dict[str, list[ast.ClassDef]], of_protocols: set[str]) -> Iterator[str]:
    tree = _tree(path)
    if not ast.get_docstring(tree):
        yield _shown(path)

    def look(body: list[ast.stmt], owner: ast.ClassDef | None) -> Iterator[str]:
        for node in body:
            if not isinstance(node, Definition) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node) and not any("overload" in ast.unparse(d) for d in node.decorator_list):
                known = owner is not None and (node.name in of_protocols or _inherits(owner, node.name, classes))
                if not known:
                    yield f"{_shown(path)}::{owner.name + '.' if owner else ''}{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from look(node.body, node)

    yield from look(tree.body, None)


def test_everything_public_says_what_it_does() -> None:
    """Each module, class, function and method; whoever implements a Protocol, or a base, need not repeat what is said
    there."""
    classes = _classes()
    protocols = [node for nodes in classes.values() for node in nodes if "Protocol" in _base_names(node)]
    of_protocols = {name for node in protocols for name in _documented(node)}
    missing = [name for path in _modules(PRODUCT) for name in _undocumented(path, classes, of_protocols)]
    assert missing == []
