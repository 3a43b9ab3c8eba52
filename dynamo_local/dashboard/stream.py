"""The stream of the page: numbered events in a ring, merge patches, and what a viewer gets next.

All viewers share one ring. A viewer is a number: the last event that it has. So a slow viewer costs no memory, and one
that fell behind the ring gets a snapshot.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["snapshot", "state", "point", "mark", "request", "gap"]
RING_MAX = 4_096
"""Events: some minutes of a graph that serves ten requests a second, an hour of one that is idle."""
CATCH_UP_MAX = 1_000
"""A viewer that missed more gets a snapshot."""
UPDATE_EVERY_S = 0.2
"""A viewer gets at most five updates a second."""
KEEP_ALIVE_S = 15.0

Json = Any


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `data` is encoded once, for all viewers."""

    number: int
    kind: Kind
    data: str


def encoded(value: Json) -> str:
    """JSON on one line. `<` is escaped, so that a name is never markup, whatever reads it."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False, default=str)
    except ValueError:  # rare: a walk through the value costs more than its encoding
        text = json.dumps(finite(value), separators=(",", ":"), default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e")


def finite(value: Json) -> Json:
    """The value with null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


def merge_patch(before: Json, after: Json) -> dict[str, Json]:
    """RFC 7386: what makes `after` of `before`. Both are objects. A key with null is gone or unknown: the same here."""
    patch: dict[str, Json] = {key: None for key in before if key not in after and before[key] is not None}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := merge_patch(old, value):
                patch[key] = inner
        elif value != old:
            patch[key] = value
    return patch


class Stream:
    """The ring. `epoch` is another one for each run of the process, so that old ids are never taken for new ones."""

    def __init__(self, epoch: str, snapshot: Callable[[], Mapping[str, Json]]) -> None:
        self.epoch = epoch
        self.state: dict[str, Json] = {}
        self.viewers = 0
        self._snapshot = snapshot
        self._ring: deque[Event] = deque(maxlen=RING_MAX)
        self._number = 0
        self._news = asyncio.Event()
        self._whole: tuple[int, str] | None = None

    @property
    def last_id(self) -> str:
        """The id of the newest event."""
        return f"{self.epoch}-{self._number}"

    def put(self, kind: Kind, value: Json) -> None:
        """Add an event, and wake the viewers."""
        self._number += 1
        self._ring.append(Event(self._number, kind, encoded(value)))
        news, self._news = self._news, asyncio.Event()
        news.set()

    def put_state(self, state: dict[str, Json]) -> None:
        """Add what differs from the last state; nothing if nothing does."""
        patch = merge_patch(self.state, state)
        self.state = state
        if patch:
            self.put("state", patch)

    async def wait(self, after: str, timeout_s: float) -> bool:
        """Return True when there is an event after that id, or False after the timeout."""
        if after != self.last_id:
            return True
        news = self._news
        try:
            async with asyncio.timeout(timeout_s):
                await news.wait()
        except TimeoutError:
            return False
        return True

    def since(self, after: str | None) -> list[tuple[str, Kind, str]]:
        """`(id, kind, data)` of what a viewer with that last id gets: what it missed, or a snapshot."""
        number = self._known(after)
        if number is None:
            if self._whole is None or self._whole[0] != self._number:
                self._whole = (self._number, encoded({"state": self.state, **self._snapshot()}))
            return [(self.last_id, "snapshot", self._whole[1])]
        missed = [event for event in self._ring if event.number > number] if number < self._number else []
        return [(f"{self.epoch}-{event.number}", event.kind, event.data) for event in missed]

    def _known(self, after: str | None) -> int | None:
        """The number of an id of this run that the ring still follows; else None."""
        epoch, _, text = (after or "").rpartition("-")
        if epoch != self.epoch or not text.isdecimal() or len(text) > 18:
            return None
        number = int(text)
        oldest = self._number - len(self._ring)
        return number if oldest <= number <= self._number and self._number - number <= CATCH_UP_MAX else None


def server_sent(found: list[tuple[str, Kind, str]]) -> bytes:
    """The events as `text/event-stream`."""
    return "".join(f"id: {name}\nevent: {kind}\ndata: {data}\n\n" for name, kind, data in found).encode()
