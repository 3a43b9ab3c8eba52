"""What is left of a rolling restart: a value that the fleet carries, and the statefile keeps for a successor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RestartPlan:
    """What is left to restart, in order: `(watcher name, its Worker.starts when the plan was made)`.

    `begun` are those told to go or to start: one that serves again with its old process was called back by a person,
    and is skipped. `bring_back` are templates, named by a person: their having exited is no reason to leave them alone.
    `in_place` are those that go before anything takes their place, even as the last that serve. `substitutes` are
    workers that were started first, by the name of the one that leaves for good when they are ready. `stopped` says at
    which worker the sequence came to its end, and why.

    Of an `apply`, before all that: `removed` are workers that leave for good, of components that are wanted no more,
    once those that come instead (`awaited`) are ready.
    """

    stimulus_id: str
    todo: tuple[tuple[str, int], ...]
    begun: frozenset[str] = frozenset()
    bring_back: frozenset[str] = frozenset()
    in_place: frozenset[str] = frozenset()
    substitutes: Mapping[str, str] = field(default_factory=dict)
    done: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    awaited: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    stopped: tuple[str, str] | None = None
