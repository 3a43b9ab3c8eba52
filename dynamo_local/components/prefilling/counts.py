"""What a worker's dispatch did, in numbers that only grow: decisions and why, estimates, deferrals, refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_local.core.dispatch.prefilling import DecodeSide
from dynamo_local.core.dispatch.tally import Prefills, Why


@dataclass(slots=True)
class DispatchCounts:
    """Of one decode worker. `fallbacks` are decisions that `slo` was to make, and the seed's rule made: with no profile
    (`lacking`), or because the queue's length was not known. `refused` are requests that it answered by 429."""

    prefills: Prefills = field(default_factory=Prefills)
    fallbacks: int = 0
    refused: int = 0
    lacking: bool = False
    side: DecodeSide | None = None

    @property
    def remote(self) -> int:
        """Prompts that were sent away."""
        return self.prefills.count(remote=True)

    @property
    def local(self) -> int:
        """Prompts that were prefilled here, those that came back included."""
        return self.prefills.count(remote=False)

    def decided(self, *, remote: bool, why: Why, fallback: bool = False) -> None:
        """One more decision; `fallback`: the seed's rule made it for want of numbers."""
        self.prefills.decided(remote=remote, why=why)
        if fallback or self.lacking:
            self.fallbacks += 1

    def came_back(self) -> None:
        """A prompt that was sent away is prefilled here after all."""
        self.prefills.decided(remote=False, why=Why.CAME_BACK)

    def numbers(self) -> Mapping[str, float]:
        """As the worker's observations tell them."""
        return {
            "prefills_remote": self.remote,
            "prefills_local": self.local,
            "dispatch_fallbacks": self.fallbacks,
        }

    def told(self) -> Mapping[str, float]:
        """As `dynamo status` and `/metrics` show them: `NAME`, `NAME.WAY` or `NAME.WAY.WHY`; see
        `telemetry.dispatch_metrics`."""
        found = {f"prefills.{way}.{why}": float(count) for (way, why), count in self.prefills.by.items()}
        found |= {"fallbacks": self.fallbacks, "refused": self.refused}
        if (side := self.side) is not None:
            for way, tokens in side.first_tokens.items():
                found |= tokens.numbers(way)
            found |= {
                "correction.local": side.local_correction.factor,
                "correction.remote": side.remote_correction.factor,
                "correction.itl": side.itl_correction.factor,
            }
        return found
