"""What a decode worker decided about prefills, in numbers that only grow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class DispatchCounts:
    """`fallbacks` are decisions that `slo` was to make, and the seed's rule made: with no profile (`lacking`), or
    because the queue's length was not known."""

    remote: int = 0
    local: int = 0
    fallbacks: int = 0
    lacking: bool = False

    def decided(self, *, remote: bool, fallback: bool = False) -> None:
        """One more decision; `fallback`: the seed's rule made it for want of numbers."""
        if remote:
            self.remote += 1
        else:
            self.local += 1
        if fallback or self.lacking:
            self.fallbacks += 1

    def numbers(self) -> Mapping[str, float]:
        """As the worker's observations tell them."""
        return {
            "prefills_remote": self.remote,
            "prefills_local": self.local,
            "dispatch_fallbacks": self.fallbacks,
        }
