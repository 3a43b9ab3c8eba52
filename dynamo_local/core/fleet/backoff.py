"""When a worker that died unasked is started again: back-off, fault, or wait for etcd and NATS.

Two counters, for two purposes. The *streak* of failures sets the delay and is reset by one good run: a worker that
served for an hour and died starts again at once. The *window* decides on the fault and is not reset by a good run:
a worker that dies every two minutes for ever is broken too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Delays grow from `first_s` by `factor` up to `max_s`, each with up to `jitter` (a fraction) on top.

    A run of `ran_well_s` after it became ready resets the delay (default: as long as the longest delay, so that
    it serves at least half of the time). `failures_max` failures within `window_s` are a fault.
    """

    first_s: float = 1.0
    max_s: float = 60.0
    factor: float = 2.0
    jitter: float = 0.25
    ran_well_s: float = 60.0
    failures_max: int = 5
    window_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.max_s:
            raise ValueError(f"0 < first_s <= max_s is needed, not {self.first_s} and {self.max_s}")
        if self.factor < 1 or self.jitter < 0 or self.ran_well_s < 0 or self.window_s <= 0:
            raise ValueError("factor >= 1, jitter >= 0, ran_well_s >= 0 and window_s > 0 are needed")
        if self.failures_max < 1:
            raise ValueError(f"failures_max must be 1 or more, not {self.failures_max}")

    def delay_s(self, streak: int, unit: float) -> float:
        """The delay after `streak` earlier failures in a row; `unit` (0..1) places it within its jitter.

        Always within `first_s`..`max_s`, and jitter is left at the longest delay: workers that died together
        must not come back together for ever.
        """
        if not 0 <= unit <= 1:
            raise ValueError(f"unit is a fraction, not {unit}")
        top_s = max(self.first_s, self.max_s / (1 + self.jitter))
        grown = streak * math.log(self.factor) >= math.log(top_s / self.first_s)  # factor ** streak may overflow
        base_s = top_s if grown else self.first_s * self.factor**streak
        return min(self.max_s, base_s * (1 + self.jitter * unit))


DEFAULT_POLICY = RestartPolicy()
OUTAGE_SPREAD_S = 5.0
"""All that failed while etcd or NATS was away come back within so long of each other: they load the same disks."""
NOTICED_LATE_S = 10.0
"""An outage is noticed so much later than the first worker may die of it, at most: a lease's time to live."""


def back_after_outage_s(unit: float, policy: RestartPolicy) -> float:
    """Seconds from the return of etcd and NATS to the start of a worker that waited for them; `unit` is 0..1."""
    return policy.delay_s(0, 0.0) + OUTAGE_SPREAD_S * unit


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """A worker's remembered failures. `failures_s` are times, ascending. A person's restart clears them."""

    failures_s: tuple[float, ...] = ()
    streak: int = 0


@dataclass(frozen=True, slots=True)
class BackOff:
    """Start it again after `delay_s`."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Fault:
    """Do not start it again; `reason` is one line for a person, to which the end of its log belongs."""

    reason: str


@dataclass(frozen=True, slots=True)
class WaitForInfra:
    """Start it again when etcd and NATS can both be reached, about `delay_s` after that (`back_after_outage_s`)."""

    delay_s: float


Verdict = BackOff | Fault | WaitForInfra


def after_exit(
    history: RestartHistory,
    *,
    now_s: float,
    ran_s: float,
    infra_ok: bool,
    unit: float,
    why: str,
    policy: RestartPolicy = DEFAULT_POLICY,
) -> tuple[RestartHistory, Verdict]:
    """The verdict after an unasked exit, a failed spawn, a hang or a start timeout. All of these count.

    `ran_s` is how long it was ready, 0 if it never was. `unit` is a uniform random number, 0..1. `why` says how it
    ended. A failure with `infra_ok` false counts towards nothing, but a good run before it still resets the streak.
    """
    if ran_s >= policy.ran_well_s:
        history = replace(history, streak=0)
    if not infra_ok:
        return history, WaitForInfra(back_after_outage_s(unit, policy))
    recent = tuple(at_s for at_s in history.failures_s if at_s > now_s - policy.window_s)
    counted = RestartHistory((*recent, now_s), history.streak + 1)
    failures = len(counted.failures_s)
    if failures >= policy.failures_max:
        times = f"{failures} failure{'s' * (failures != 1)}"
        return counted, Fault(f"{times} within {policy.window_s:g} s, the last: {why}")
    return counted, BackOff(policy.delay_s(history.streak, unit))


def forgive(history: RestartHistory, *, since_s: float) -> RestartHistory:
    """Without the failures counted since then: etcd or NATS turned out to have been away.

    An outage is noticed later than the first worker dies of it.
    """
    kept = tuple(at_s for at_s in history.failures_s if at_s < since_s)
    forgiven = len(history.failures_s) - len(kept)
    return RestartHistory(kept, max(0, history.streak - forgiven))
