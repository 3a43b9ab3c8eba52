"""What a component offers whose worker can change its role: the process and its engine stay, the component is another.

The next component is made beside the old one, with a context of its own, in which `inherited` is what the old one
handed over. What stays is closed with the process (`WorkerContext.keep`), never by a component.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

FORMER_INSTANCE = "former_instance"
"""In `inherited`: the id of the instance that the process was in its role before."""


@runtime_checkable
class Flippable(Protocol):
    """See `worker.flipping`, which calls these in this order."""

    def hand_over(self) -> Mapping[str, Any]:
        """What the next component goes on with, by name: its engine first of all. Changes nothing: a flip may fail."""
        ...

    async def try_out(self) -> None:
        """In the new role, before anybody knows of it: whether it works. Raises the `DynamoError` that says why not."""
        ...

    async def settle(self) -> None:
        """In the old role, once it is given up: return when all that it has in hand beside its endpoints' streams is
        finished. The process, and what is kept in it, goes on."""
        ...


@runtime_checkable
class FlipsIdle(Flippable, Protocol):
    """A `Flippable` whose engine changes its role only while it has nothing to do: the old role is taken out of routing
    and finished first, and `try_out` is what changes the engine."""

    async def until_idle(self) -> None:
        """In the old role, out of routing: return when its engine has nothing in hand. May be cancelled."""
        ...

    async def go_back(self) -> None:
        """In the old role, whose flip has failed: return when the engine has that role, whichever it had. Where that is
        impossible the worker is useless, and ends."""
        ...
