"""Which graphs there are below a folder, told from their source alone: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

FILES_MAX = 300
FILE_BYTES_MAX = 256 * 1024
DEPTH_MAX = 3
"""Folders below the one that `dynamo` was started in: somebody may have started it in /."""
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "tests"})


def graphs_below(folder: Path) -> list[str]:
    """`graphs.agg:Frontend`, … in order: each module that links services, with the service at the links' beginning."""
    return sorted(
        f"{'.'.join(path.relative_to(folder).with_suffix('').parts)}:{root}"
        for path in islice(_modules(folder, DEPTH_MAX), FILES_MAX)
        for root in _roots(path)
    )


def _modules(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    yield from (path for path in entries if path.suffix == ".py" and path.stem.isidentifier() and path.is_file())
    if depth == 0:
        return
    for path in entries:
        if path.name.isidentifier() and path.name not in _SKIPPED and path.is_dir() and not path.is_symlink():
            yield from _modules(path, depth - 1)


def _roots(path: Path) -> set[str]:
    """Services at the beginning of a chain of links: of `A.link(B).link(C)`, A; none that another links to."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            return set()
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return set()
    sources: set[str] = set()
    targets: set[str] = set()
    for statement in tree.body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "link":
            targets.update(argument.id for argument in call.args if isinstance(argument, ast.Name))
            if isinstance(call.func.value, ast.Name):
                sources.add(call.func.value.id)
            call = call.func.value
    return sources - targets
