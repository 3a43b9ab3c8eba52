"""KV that was computed here and waits to be pulled by another engine, each under a lease. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Handoff:
    """The blocks of one prompt. While pinned (a pull is under way) it does not expire."""

    request_id: str
    blocks: list[int]
    num_tokens: int
    expires_at_s: float
    pinned: bool = False


class HandoffTable:
    """Entries that leave the table are returned: the caller frees their blocks."""

    __slots__ = ("_held", "expiry_s")

    def __init__(self) -> None:
        self._held: dict[str, Handoff] = {}
        self.expiry_s = math.inf
        """When the next lease ends."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def hold(self, handoff: Handoff) -> None:
        """Keep the KV until it is pulled, released or expired."""
        self._held[handoff.request_id] = handoff
        self.expiry_s = min(self.expiry_s, handoff.expires_at_s)

    def pin(self, request_id: str) -> Handoff:
        """No expiry until `unpin` or `pop`. KeyError if it is not held."""
        handoff = self._held[request_id]
        handoff.pinned = True
        self._find_expiry()
        return handoff

    def unpin(self, request_id: str) -> None:
        """The lease counts again; an unknown one is no error."""
        if request_id in self._held:
            self._held[request_id].pinned = False
            self._find_expiry()

    def pop(self, request_id: str) -> Handoff | None:
        """Take it out; None if it is not held."""
        handoff = self._held.pop(request_id, None)
        self._find_expiry()
        return handoff

    def pop_expired(self, now_s: float) -> list[Handoff]:
        """Take out those whose lease is over at `now_s`, in the order in which they were held."""
        if self.expiry_s > now_s:
            return []
        expired = [h for h in self._held.values() if not h.pinned and h.expires_at_s <= now_s]
        for handoff in expired:
            del self._held[handoff.request_id]
        self._find_expiry()
        return expired

    def _find_expiry(self) -> None:
        self.expiry_s = min((h.expires_at_s for h in self._held.values() if not h.pinned), default=math.inf)
