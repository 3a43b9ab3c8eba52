"""What a worker's record says about standby, and what a worker itself says about it in its ready key."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.core.types import Missing


@dataclass(frozen=True, slots=True)
class Standby:
    """Part of a worker's record.

    `wanted`: it is to sleep, now or as soon as it can; it is no capacity then. `order` counts the orders to sleep or to
    wake that its process was given: what it says about an earlier one is out of date. `level` is that of the last order
    to sleep. `ask_s`: when the order is given again, because nobody knows whether it arrived. `cannot`: why its engine
    cannot sleep (None: it can, or nobody knows yet). `drained`: it was told to leave while it was on standby, so that
    there is no way back into routing. `host_bytes` is how much main memory level 1 took when it was rehearsed.
    """

    wanted: bool = False
    order: int = 0
    level: int = 1
    ask_s: float | None = None
    cannot: str | None = None
    drained: bool = False
    host_bytes: int | Missing = Missing("not rehearsed yet")  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True)
class StandbyFacts:
    """What a worker says of itself. `order` is that of the last order that it has carried out.

    While it is `asleep`: the `level`; what it keeps on each of its devices and in main memory, in bytes, and the pids
    of its processes. `recycle` says why its process should be replaced (its memory has grown). `note` says why an order
    came to nothing. `rehearsed_bytes` is the main memory that level 1 took when it was rehearsed.
    """

    order: int = 0
    asleep: bool = False
    level: int = 1
    cannot: str | None = None
    vram_bytes: int | Missing = Missing("not measured")  # noqa: RUF009 - frozen
    host_bytes: int | Missing = Missing("not measured")  # noqa: RUF009 - frozen
    rehearsed_bytes: int | Missing = Missing("not rehearsed yet")  # noqa: RUF009 - frozen
    pids: frozenset[int] = frozenset()
    recycle: str | None = None
    note: str | None = None
