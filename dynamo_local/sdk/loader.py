"""`graphs.disagg:Frontend` -> a graph that can run, or a `GraphError` with the reason and the place."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from dynamo_local.errors import GraphError
from dynamo_local.sdk.checks import check_service_name, error_place, listing, nearest
from dynamo_local.sdk.service import DynamoService, Edge, linking_modules, recording

# --- graph_files
# Which graphs there are below a folder, told from their source alone: nothing is imported.

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


Service = DynamoService[Any]

GRAPHS_SHOWN = 8

_TARGET = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True)
class LoadedGraph:
    """A checked graph. `services` holds what runs, the root first, in order of links (or of `depends`).

    `targets` names where a service comes from that is not `target`'s.
    """

    root: Service
    services: Mapping[str, Service]
    namespace: str | None
    target: str
    edges: tuple[Edge, ...] = field(default=(), repr=False)
    targets: Mapping[str, str] = field(default_factory=dict)

    def bindings(self, name: str) -> dict[str, Service | None]:
        """attribute -> the service it is a client of; None for an optional dependency that does not run."""
        declared = self.services[name].depends
        return {attr: dep.on if dep.on.name in self.services else None for attr, dep in declared.items()}


def load_graph(target: str, *, base_dir: Path) -> LoadedGraph:
    """Import `module:Service` from `base_dir` (put on `sys.path`) and check that the graph can run.

    The user's modules are imported anew on each call, so that a graph has exactly the links its own import
    makes. Raises `GraphError`.
    """
    match = _TARGET.fullmatch(target)
    if match is None:
        raise GraphError(
            f"{target!r} does not name a graph: write module:Service, for example graphs.disagg:Frontend"
            f"{_graphs(target, base_dir.resolve())}"
        )
    attribute = match[2]
    base_dir = base_dir.resolve()
    with recording() as edges:
        module = _import(target, base_dir)
        root = _root(module, attribute)
        return build_graph(root, tuple(edges), target)


def build_graph(root: Service, edges: Sequence[Edge], target: str) -> LoadedGraph:
    """The graph of `root`: what its links lead to if it has any, else all that `depends` leads to."""
    linked: dict[int, list[Service]] = {}
    for edge in edges:
        linked.setdefault(id(edge.source), []).append(edge.target)
    uses_links = id(root) in linked
    reached = _reach(root, linked if uses_links else None)
    services = _by_name(reached)
    if uses_links:
        _check_dependencies(services)
    return LoadedGraph(root, services, _namespace(services.values()), target, tuple(edges))


def _reach(root: Service, linked: Mapping[int, list[Service]] | None) -> list[Service]:
    """Breadth first, each object once."""
    found, queue = [root], deque([root])
    while queue:
        current = queue.popleft()
        following = [dep.on for dep in current.depends.values()] if linked is None else linked.get(id(current), [])
        for other in following:
            if not any(other is known for known in found):
                found.append(other)
                queue.append(other)
    return found


def _by_name(reached: Iterable[Service]) -> dict[str, Service]:
    services: dict[str, Service] = {}
    lowered: dict[str, Service] = {}
    for current in reached:
        try:
            check_service_name(current.name)
        except ValueError as error:
            raise _at(current, str(error)) from None
        other = lowered.get(current.name.lower())
        if other is not None and other.name == current.name:
            raise _at(current, f"two services are named {current.name!r}; the other is at {other.place}")
        if other is not None:
            raise _at(
                current,
                f"the names {other.name!r} ({other.place}) and {current.name!r} differ only in case, "
                "and NATS subjects do not tell them apart; rename one",
            )
        services[current.name] = lowered[current.name.lower()] = current
    return services


def _check_dependencies(services: Mapping[str, Service]) -> None:
    for current in services.values():
        for attr, dependency in current.depends.items():
            wanted = dependency.on
            running = services.get(wanted.name)
            if running is not None and running is not wanted:
                raise _at(wanted, f"two services are named {wanted.name!r}; the other is at {running.place}")
            if running is None and not dependency.optional:
                raise _at(
                    current,
                    f"{current.name}.{attr} depends on {wanted.name}, which no link leads to: "
                    f"link it, or depends({wanted.name}, optional=True)",
                )


def _namespace(services: Iterable[Service]) -> str | None:
    first: Service | None = None
    for current in services:
        if current.namespace is None:
            continue
        if first is None:
            first = current
        elif first.namespace != current.namespace:
            raise _at(
                current,
                f"{current.name} is in namespace {current.namespace!r}, but {first.name} ({first.place}) "
                f"in {first.namespace!r}: a graph has one namespace",
            )
    return first.namespace if first else None


def _root(module: ModuleType, attribute: str) -> Service:
    found = {name: value for name, value in vars(module).items() if isinstance(value, DynamoService)}
    if not hasattr(module, attribute):
        raise GraphError(
            f"{module.__name__} ({module.__file__}) has no {attribute!r}; its services: {listing(found)}"
            f"{nearest(attribute, found)}",
            place=str(module.__file__),
        )
    root = getattr(module, attribute)
    if not isinstance(root, DynamoService):
        raise GraphError(
            f"{module.__name__}:{attribute} ({module.__file__}) is not a service but {_kind(root)}; "
            f"decorate the class with @service; its services: {listing(found)}",
            place=str(module.__file__),
        )
    return root


def _kind(value: Any) -> str:
    return "a plain class" if isinstance(value, type) else f"a {type(value).__name__}"


def _at(current: Service, reason: str) -> GraphError:
    return GraphError(f"{current.place}: {reason}", place=str(current.place))


# --- importing -----------------------------------------------------------------------------------

_loaded_by_us: set[str] = set()
_path_of_last_load: str | None = None


def _import(target: str, base_dir: Path) -> ModuleType:
    module_name = target.partition(":")[0]
    if not base_dir.is_dir():
        raise GraphError(f"cannot load {module_name}: no folder {base_dir}")
    _forget_earlier_loads(module_name)
    _put_on_path(str(base_dir))
    before = set(sys.modules)
    try:
        return importlib.import_module(module_name)
    except GraphError:
        raise  # from one of our decorators: it names the place already
    except ModuleNotFoundError as error:
        raise _not_found(error, target, base_dir) from None
    except (Exception, SystemExit) as error:
        # Whatever a user's module does at import, the answer is one line with its place, not a traceback.
        raise _failed(error, module_name, base_dir) from error
    finally:
        _loaded_by_us.update(name for name in set(sys.modules) - before if _is_users(name, base_dir))


def _is_users(name: str, base_dir: Path) -> bool:
    """Modules and namespace packages from below `base_dir`; never ours, never installed ones."""
    if name.partition(".")[0] == "dynamo_local":
        return False
    module = sys.modules.get(name)
    places = [getattr(module, "__file__", None), *(getattr(module, "__path__", None) or [])]
    return any(
        Path(place).is_relative_to(base_dir) and "site-packages" not in Path(place).parts for place in places if place
    )


def _forget_earlier_loads(module_name: str) -> None:
    """Take out of `sys.modules` what would hide another folder's modules, or would not say its links again."""
    again = _loaded_by_us | linking_modules() | {module_name}
    for name in again:
        if name != "__main__" and name.partition(".")[0] != "dynamo_local":
            sys.modules.pop(name, None)
    _loaded_by_us.clear()
    importlib.invalidate_caches()


def _put_on_path(base_dir: str) -> None:
    global _path_of_last_load
    if sys.path[:1] == [base_dir]:
        return
    if _path_of_last_load in sys.path:  # the same folder, too: others may have put themselves before it
        sys.path.remove(_path_of_last_load)
    sys.path.insert(0, base_dir)
    _path_of_last_load = base_dir


def _not_found(error: ModuleNotFoundError, target: str, base_dir: Path) -> GraphError:
    missing, module_name = error.name or "", target.partition(":")[0]
    if module_name != missing and not module_name.startswith(f"{missing}."):
        return _failed(error, module_name, base_dir)
    return GraphError(
        f"no module {missing!r} below {base_dir}{_instead(target, missing, base_dir)} "
        "(run dynamo from the folder that holds it)",
        place=str(base_dir),
    )


def _instead(target: str, missing: str, base_dir: Path) -> str:
    """Which graphs there are; the nearest module where there are none."""
    if graphs := _graphs(target, base_dir):
        return graphs
    *parents, name = missing.split(".")
    folder = base_dir.joinpath(*parents)
    paths = folder.glob("*") if folder.is_dir() else ()
    return nearest(name, [path.stem for path in paths if path.suffix == ".py" or path.is_dir()])


def _graphs(target: str, base_dir: Path) -> str:
    """`; did you mean 'graphs.disagg:Frontend'? graphs here: …`, empty where there are none."""
    graphs = graphs_below(base_dir)
    if not graphs:
        return ""
    shown = listing(graphs[:GRAPHS_SHOWN]) + (", …" if len(graphs) > GRAPHS_SHOWN else "")
    near = nearest(target, graphs)
    return f"{near} graphs here: {shown}" if near else f"; graphs here: {shown}"


def _failed(error: BaseException, module_name: str, base_dir: Path) -> GraphError:
    place = error_place(error, base_dir)
    reason = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    what = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    return GraphError(f"{place or module_name}: importing {module_name} failed with {what}", place=str(place))
