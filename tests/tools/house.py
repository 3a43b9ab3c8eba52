"""The size and shape of a checkout: `python tests/tools/house.py [--root PATH] [--json]`.

A line of code holds a token that is no comment and no docstring. The checkout may be of any commit: packages are found,
not listed. The four ways are lists of waypoints, `module:name`, in the order in which they are passed. For the layout
before this file they are the counts of a reader who walked them.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import io
import itertools
import json
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PRODUCT = ("dynamo_local", "state", "circus_plugins")
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
MESSAGES = {
    "core/life": ("stimuli.py", "lifecycle.py", "decisions/moves.py", "instructions.py"),
    "core/fleet": ("events.py", "lifecycle.py", "moves.py", "effects.py"),
}
"""Where the machine's messages are, before and after the move."""
WALKED_BEFORE = {"scale": (44, 17), "crash and restart": (35, 19), "completion": (63, 18), "tick under slo": (61, 13)}
"""Modules and changes of package at commit e24a6e2, as a reader counted them."""


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file of the product; the links in `dynamo_local` are not followed twice."""
    found = {}
    for top in PRODUCT:
        for path in sorted((root / top).rglob("*.py")):
            if any(parent.is_symlink() for parent in path.parents if parent != root):
                continue
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts if top == "dynamo_local" else ("dynamo_local", *parts))
            found[name.removesuffix(".__init__")] = path
    return found


def code_lines(path: Path) -> int:
    """Lines with a token that is neither a comment nor a part of a docstring."""
    source = path.read_text(encoding="utf-8")
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


def imports(found: dict[str, Path]) -> dict[str, set[str]]:
    """Module -> modules of the product that it imports, inside of functions and for annotations included."""
    result: dict[str, set[str]] = {name: set() for name in found}
    for name, path in found.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for target in names:
                known = next((each for each in (target, target.rpartition(".")[0]) if each in found), None)
                if known is not None and known != name:
                    result[name].add(known)
    return result


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of nodes that reach each other (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = set()
            while not group or node not in group:
                group.add(stack.pop())
            if len(group) > 1:
                groups.append(group)

    sys.setrecursionlimit(10_000)
    for node in graph:
        if node not in index:
            visit(node)
    return groups


def package(name: str) -> str:
    """`dynamo_local.core.fleet.step` -> `core`."""
    return name.split(".")[1] if "." in name else name


def classes(path: Path) -> list[str]:
    return [node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]


def messages(root: Path) -> int:
    """Classes of events, transitions, moves and effects of the machine of a worker's life."""
    for folder, files in MESSAGES.items():
        if (root / "dynamo_local" / folder).is_dir():
            paths = [root / "dynamo_local" / folder / file for file in files]
            return sum(len(classes(path)) for path in paths if path.is_file())
    return 0


def worker_fields(root: Path) -> int:
    """Fields of the record `Worker` of the fleet."""
    for folder in MESSAGES:
        for path in sorted((root / "dynamo_local" / folder).glob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and node.name == "Worker":
                    return sum(isinstance(child, ast.AnnAssign) for child in node.body)
    return 0


def layers(root: Path) -> int:
    """Layers of the import contract."""
    contracts = configparser.ConfigParser()
    contracts.read(root / ".importlinter")
    return sum(bool(line.strip()) for line in contracts["importlinter:contract:layers"]["layers"].splitlines())


def way(waypoints: list[str]) -> tuple[int, int]:
    """Different modules on a way, and how often the next waypoint is in another package."""
    names = [each.partition(":")[0] for each in waypoints]
    packages = [each.split(".")[0] for each in names]
    return len(set(names)), sum(a != b for a, b in itertools.pairwise(packages))


def ways(root: Path) -> dict[str, list[str]]:
    """Name -> waypoints, from `house_ways.txt` beside this file; none for a checkout that has no such file."""
    file = root / "tests" / "tools" / "house_ways.txt"
    found: dict[str, list[str]] = defaultdict(list)
    name = ""
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        if line.startswith("# ") or not line.strip():
            continue
        if line.startswith("["):
            name = line.strip("[]")
        else:
            found[name].append(line.strip())
    return dict(found)


def missing_waypoints(root: Path) -> Iterator[str]:
    """Waypoints whose module or name is not there."""
    found = modules(root)
    for name, waypoints in ways(root).items():
        for waypoint in waypoints:
            module, _, attribute = waypoint.partition(":")
            path = found.get(f"dynamo_local.{module}")
            text = path.read_text(encoding="utf-8") if path else ""
            last = attribute.rpartition(".")[2]
            if path is None or not re.search(rf"\b(def|class) {re.escape(last)}\b|^{re.escape(last)}\b", text, re.M):
                yield f"{name}: {waypoint}"


def measured(root: Path) -> dict[str, object]:
    """All figures of one checkout."""
    found = modules(root)
    graph = imports(found)
    between: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        for target in targets:
            if package(name) != package(target) and not name.endswith(".__main__"):
                between[package(name)].add(package(target))
    folders = [path for path in (root / "dynamo_local").iterdir() if path.is_dir() and any(path.glob("*.py"))]
    pages = [*(root / "docs").glob("*.md"), *root.glob("*.md")]
    walked = {name: way(points) for name, points in ways(root).items()} or WALKED_BEFORE
    return {
        "lines of code": sum(code_lines(path) for path in found.values()),
        "modules": len(found),
        "classes of messages": messages(root),
        "fields of Worker": worker_fields(root),
        "packages": len([path for path in folders if not path.is_symlink()]),
        "layers": layers(root),
        "circles of modules": len(circles(graph)),
        "circles of packages": len(circles(between)),
        **{f"{name}: modules, package changes": f"{count}, {changes}" for name, (count, changes) in walked.items()},
        "lines of tests": sum(len(path.read_text("utf-8").splitlines()) for path in (root / "tests").rglob("*.py")),
        "words of pages": sum(len(path.read_text(encoding="utf-8").split()) for path in pages),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, action="append", help="a checkout; may be given twice, to compare")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    roots = options.root or [Path(__file__).resolve().parents[2]]
    figures = {str(root): measured(root) for root in roots}
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    for key in next(iter(figures.values())):
        print(f"{key:48}", *(f"{each.get(key, '')!s:>12}" for each in figures.values()))


if __name__ == "__main__":
    main()
