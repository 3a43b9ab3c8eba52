"""What became of decisions about prefills, in numbers that only grow: how many, why, and how well estimates held."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Why(enum.StrEnum):
    """Why a prompt is prefilled where it is."""

    FEWER_MISSES = "fewer_misses"
    """The other way would cost more expected misses of targets."""
    SOONER = "sooner"
    """Both ways cost as many; people wait less this way."""
    THRESHOLD = "threshold"
    """By length and queue, as the seed did: the policy is threshold, or slo has no profile."""
    NO_PREFILL_WORKER = "no_prefill_worker"
    QUEUE_UNKNOWN = "queue_unknown"
    CANNOT_TRAVEL = "cannot_travel"
    """A prefill worker would not get all that the prompt is: images, an adapter, log-probabilities of the prompt."""
    CAME_BACK = "came_back"
    """It was sent away, and no KV came in time: prefilled here after all. Counted once more."""


@dataclass(slots=True)
class FirstTokens:
    """Of requests that went one way: how long until the first token was estimated, and how long it was (seconds)."""

    count: int = 0
    estimated_s: float = 0.0
    seen_s: float = 0.0
    error_s: float = 0.0
    """Sum of the distances between the two."""

    def came(self, estimated_s: float, seen_s: float) -> None:
        """One more."""
        self.count += 1
        self.estimated_s += estimated_s
        self.seen_s += seen_s
        self.error_s += abs(seen_s - estimated_s)

    def numbers(self, way: str) -> Mapping[str, float]:
        """By name, for `DispatchCounts.numbers`."""
        return {
            f"first_tokens.{way}": self.count,
            f"first_token_estimated_s.{way}": self.estimated_s,
            f"first_token_seen_s.{way}": self.seen_s,
            f"first_token_error_s.{way}": self.error_s,
        }


@dataclass(slots=True)
class Prefills:
    """Decisions by way and reason."""

    by: dict[tuple[str, Why], int] = field(default_factory=dict)

    def decided(self, *, remote: bool, why: Why) -> None:
        """One more."""
        key = ("remote" if remote else "local", why)
        self.by[key] = self.by.get(key, 0) + 1

    def count(self, *, remote: bool) -> int:
        """Decisions of one way; a prompt that came back counts as both."""
        way = "remote" if remote else "local"
        return sum(count for (each, _), count in self.by.items() if each == way)
