"""Lead times: how long each scaling option takes until one more worker serves, as measured. Pure.

Scaling options, from the quickest to the slowest: a role flip, a wake from each level of sleep, a start from a
prewarmed process, a cold start. A lead time is the time from the decision until the worker
serves. The time to put a worker to sleep, from the decision until its GPU is free, is kept beside them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

KEPT = 50
"""So many of the latest lead times of a scaling option and a component are kept."""


class OptionKind(enum.StrEnum):
    """The ways, in the order of what they cost."""

    FLIP_TO_DECODE = "flip_to_decode"
    FLIP_TO_PREFILL = "flip_to_prefill"
    WAKE_1 = "wake_1"
    WAKE_2 = "wake_2"
    PREWARMED = "spare"
    COLD = "cold"
    SLEEP_1 = "sleep_1"
    """No way to one more: until the streams of one have ended and it sleeps, so that its GPU may be another's."""
    SLEEP_2 = "sleep_2"


@dataclass(frozen=True, slots=True)
class LeadTimeSummary:
    """The lead times of one scaling option of one component, in seconds; `count` is that of the kept samples."""

    count: int
    last_s: float
    median_s: float
    p90_s: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> LeadTimeSummary | None:
        """The summary of these seconds, the latest last; None without a sample."""
        if not samples:
            return None
        ordered = sorted(samples)
        p90_s = ordered[min(len(ordered) - 1, int(len(ordered) * 0.9))]
        return cls(len(ordered), samples[-1], median(ordered), p90_s)

    def as_json(self) -> dict[str, Any]:
        """For `dynamo status --json`."""
        return {
            "count": self.count,
            "last_s": round(self.last_s, 4),
            "median_s": round(self.median_s, 4),
            "p90_s": round(self.p90_s, 4),
        }


Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""Component -> scaling option -> lead times in seconds, the oldest first. An option may be of a newer version."""


@dataclass(frozen=True, slots=True)
class LeadTimes:
    """All that was measured: in this `run`, and before it on this `host`."""

    run: Samples = field(default_factory=dict)
    host: Samples = field(default_factory=dict)

    def noted(self, option: str, component: str, seconds: float) -> LeadTimes:
        """One more of this run. ValueError for a time that none can be."""
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"a lead of {seconds} s")
        return LeadTimes(with_sample(self.run, option, component, seconds), self.host)

    def of(self, option: str, component: str) -> LeadTimeSummary | None:
        """The summary of the latest of this host and this run; None if none was ever measured."""
        return LeadTimeSummary.of([*_found(self.host, option, component), *_found(self.run, option, component)][-KEPT:])

    def medians(self, component: str) -> dict[str, float]:
        """Median seconds by scaling option, of those that were measured."""
        leads = {str(option): self.of(option, component) for option in OptionKind}
        return {option: lead.median_s for option, lead in leads.items() if lead is not None}

    def rows(self) -> Iterable[tuple[str, str, LeadTimeSummary | None, LeadTimeSummary]]:
        """Component, scaling option, the summary of this run (None: no sample yet), and that of this host."""
        options = [*OptionKind, *sorted((_options(self.run) | _options(self.host)) - set(OptionKind))]
        for component in dict.fromkeys((*self.run, *self.host)):
            for option in dict.fromkeys(map(str, options)):
                known = self.of(option, component)
                if known is not None:
                    yield component, option, LeadTimeSummary.of(_found(self.run, option, component)), known

    def as_json(self) -> list[dict[str, Any]]:
        """For `dynamo status --json`: `host` counts this run, too."""
        return [
            {
                "component": component,
                "rung": option,
                "run": None if run is None else run.as_json(),
                "host": host.as_json(),
            }
            for component, option, run, host in self.rows()
        ]


def with_sample(samples: Samples, option: str, component: str, seconds: float) -> Samples:
    """With one more, and the oldest forgotten."""
    of_component = samples.get(component, {})
    kept = (*of_component.get(option, ()), seconds)[-KEPT:]
    return {**samples, component: {**of_component, option: kept}}


def _found(samples: Samples, option: str, component: str) -> Sequence[float]:
    return samples.get(component, {}).get(option, ())


def _options(samples: Samples) -> set[str]:
    return {option for of_component in samples.values() for option in of_component}
