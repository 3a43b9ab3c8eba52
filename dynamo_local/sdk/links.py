"""Edges made by `link`, kept apart from the services, so that two graphs of one process do not mix.

`graphs/agg.py` and `graphs/disagg.py` link the same `Frontend` object in different ways. An edge therefore
belongs to the recording during which it was made: `load_graph` opens one for each graph that it imports.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_local.sdk.checks import Place

if TYPE_CHECKING:
    from dynamo_local.sdk.service import DynamoService


@dataclass(frozen=True, slots=True)
class Edge:
    """`source.link(target)`, the line that said so, and the module if that was at its top level. `colocate`: the target
    runs in the source's processes, unless the configuration says otherwise."""

    source: DynamoService[Any]
    target: DynamoService[Any]
    module: str | None
    place: Place
    colocate: bool = False


_edges: list[Edge] = []
_linking_modules: set[str] = set()


def record(edge: Edge) -> None:
    """Add an edge to the recording of now. Saying the same twice is no second edge."""
    if edge.module is not None:
        _linking_modules.add(edge.module)
    if not any(known.source is edge.source and known.target is edge.target for known in _edges):
        _edges.append(edge)


@contextmanager
def recording() -> Iterator[list[Edge]]:
    """Collect the edges made inside; those made before are set aside and come back."""
    global _edges
    before, _edges = _edges, []
    try:
        yield _edges
    finally:
        _edges = before


def edges() -> tuple[Edge, ...]:
    """Edges of the recording of now."""
    return tuple(_edges)


def linking_modules() -> frozenset[str]:
    """Modules that ever called `link` while imported: they must be imported again to say their links again."""
    return frozenset(_linking_modules)


def reset_links() -> None:
    """Forget all edges. For tests that link without `load_graph`."""
    _edges.clear()
