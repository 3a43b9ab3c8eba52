"""The ways to one more worker: one row each. A flip or a wake is one more row.

The name of a way is its rung's (`core.lead_times.Rung`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dynamo_local.core.lead_times import Rung
from tests.drivers.scaled import PATIENCE_S, ascale, settled
from tests.drivers.served import Served, auntil


@dataclass(frozen=True, slots=True)
class Way:
    """`words` are for `dynamo serve`. `prepare` brings the graph to where the way begins, `begin` gives the command and
    returns when it is committed, `undo` takes the worker away again. `component` serves afterwards."""

    rung: Rung
    words: tuple[str, ...]
    prepare: Callable[[Served], Awaitable[None]]
    begin: Callable[[Served], Awaitable[None]]
    undo: Callable[[Served], Awaitable[None]]
    component: str = "VllmWorker"


async def _nothing(served: Served) -> None:
    """The graph is where it should be."""


async def _one_more(served: Served) -> None:
    await ascale(served, "VllmWorker", "+1")


async def _one_less(served: Served) -> None:
    await ascale(served, "VllmWorker", "-1")
    await settled(served, PATIENCE_S)


async def _warm(served: Served) -> None:
    """A spare is there, and nothing imports."""

    def is_warm() -> bool:
        told = served.status()["spares"]
        return bool(told["spares"]) and all(spare["state"] == "warm" for spare in told["spares"])

    await auntil(is_warm, PATIENCE_S, what=lambda: served.status()["spares"])


WAYS: tuple[Way, ...] = (
    Way(Rung.SPARE, ("--Host.spares=1",), _warm, _one_more, _one_less),
    Way(Rung.COLD, (), _nothing, _one_more, _one_less),
)
