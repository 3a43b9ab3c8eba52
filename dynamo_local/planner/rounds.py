"""The planner's intervals as a state machine without clock or I/O: the arbiter's loop and the twin both drive it.

    rounds = Rounds(LoadPolicy(options), options, now_s)
    while True:
        sleep until rounds.next_pull_at
        decision = rounds.on_pull(reading, fleet)
        carry out decision.acts, if there is a decision

The rules, in prose:

* Pulls are due at `began + n × metric_pulling_interval`, the last of them exactly where the interval ends. These are
  absolute times: work in between makes nothing drift, and pulls that were slept over are left out, not made up for.
* An interval ends in one decision, from its own readings. The next begins where it ended.
* While an adjustment is under way nothing is sampled or decided; the interval begins anew when it has ended (rule 2).
* A person's change is respected: the interval begins anew, then it is planned from what is. An up that waited for a
  GPU is forgotten.
* A tick that fails (the policy raises) costs its interval and nothing else.
* New options apply from the next decision on; the interval keeps its beginning and its readings.
* An up that a decision deferred waits here until GPUs are really free under the budget, and is then carried out
  by a decision of its own (`Rule.GPU_FREED`). Until then it counts as capacity on its way (rule 5). If a drain is
  taken back and its GPU does not come after all (in three pulls, since a step takes a moment to be seen), the up is
  forgotten. While another environment has yet to carry the down out (`Fleet.pending`), it waits for that first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, TypeVar

from dynamo_local.core.types import Missing
from dynamo_local.planner.options import LoadOptions
from dynamo_local.planner.values import Decision, Fleet, Observation, Pool, Reading, Reason, Rule

T = TypeVar("T")

STALE_PULLS = 3
"""A value older than so many pulls is missing; what is not seen in so many pulls does not come."""

_SLACK = 1e-6
"""Share of a pulling interval by which a pull's time may miss the interval's end and still be it (rounding)."""


class Policy(Protocol):
    """What decides at the end of an interval."""

    def on_tick(self, observation: Observation) -> Decision: ...


def fresh(value: T, *, taken_at_s: float, now_s: float, pulling_interval_s: float) -> T | Missing:
    """The value, or `Missing` where it is older than three pulls."""
    age_s = now_s - taken_at_s
    if age_s > STALE_PULLS * pulling_interval_s:
        return Missing(f"{age_s:.1f} s old, and older than {STALE_PULLS} pulls of {pulling_interval_s:g} s")
    return value


class Rounds:
    """Collects the readings of an interval, asks the policy at its end, and says when the next pull is due."""

    def __init__(self, policy: Policy, options: LoadOptions, now_s: float) -> None:
        self._policy = policy
        self._options = options
        self._deferred: dict[str, int] = {}
        self._in_vain = 0
        self._notes: tuple[str, ...] = ()
        self._readings: list[Reading] = []
        self._pulls = 0
        self._observation: Observation | None = None
        self._begin(now_s)

    # --- what one may ask ----------------------------------------------------------------------

    @property
    def options(self) -> LoadOptions:
        """Those in force."""
        return self._options

    @property
    def next_pull_at(self) -> float:
        """The absolute time of the next pull."""
        pull_s = self._options.metric_pulling_interval_s
        at_s = self._began_s + (self._pulls + 1) * pull_s
        if not self._adjusting and at_s > self._due_s - _SLACK * pull_s:
            return self._due_s
        return at_s

    @property
    def next_tick_at(self) -> float | None:
        """When the next decision is due; None while an adjustment is under way."""
        return None if self._adjusting else self._due_s

    @property
    def interval_began_s(self) -> float:
        """The beginning of this interval, or of this wait for an adjustment to end."""
        return self._began_s

    @property
    def adjusting(self) -> bool:
        """It waits for an adjustment to end."""
        return self._adjusting

    @property
    def readings(self) -> tuple[Reading, ...]:
        """Those of this interval until now."""
        return tuple(self._readings)

    @property
    def observation(self) -> Observation | None:
        """What the last decision was made from; None before the first."""
        return self._observation

    @property
    def deferred(self) -> tuple[str, ...]:
        """Components with an up that waits for a GPU."""
        return tuple(self._deferred)

    # --- what happens --------------------------------------------------------------------------

    def on_pull(self, reading: Reading, fleet: Fleet) -> Decision | None:
        """Take in one pull. A decision where one is due, else None. Whatever the policy raises passes through; the
        next interval has begun by then.
        """
        now_s = reading.at_s
        freed = None if fleet.pending else self._freed(fleet, now_s)
        if freed is not None:
            self._observation = Observation(now_s, self._began_s, self.readings, fleet)
            self._begin(now_s, adjusting=True)
            return freed
        if fleet.adjusting or self._adjusting:
            self._begin_or_count(now_s, fleet)
            return None
        self._readings.append(reading)
        self._count(now_s)
        if now_s < self._due_s - _SLACK * self._options.metric_pulling_interval_s:
            return None
        return self._tick(max(now_s, self._due_s), fleet)

    def on_manual_change(self, now_s: float) -> None:
        """A person changed the number of workers: hold for an interval from now."""
        self._forget_deferred("a person changed the number of workers")
        self._begin(now_s)

    def with_options(self, policy: Policy, options: LoadOptions) -> None:
        """Other options from now on. The interval keeps its beginning; its end moves with the new length."""
        began_s, pulls, readings, adjusting = self._began_s, self._pulls, self._readings, self._adjusting
        last_s = self.next_pull_at - self._options.metric_pulling_interval_s
        pull_s = options.metric_pulling_interval_s
        same_grid = pull_s == self._options.metric_pulling_interval_s
        self._policy, self._options = policy, options
        self._begin(began_s, adjusting=adjusting)
        self._readings = readings
        self._pulls = pulls if same_grid else max(0, int((last_s - began_s) / pull_s))

    # --- inside --------------------------------------------------------------------------------

    def _begin(self, now_s: float, *, adjusting: bool = False) -> None:
        self._began_s = now_s
        self._due_s = now_s + self._options.adjustment_interval_s
        self._pulls = 0
        self._adjusting = adjusting
        self._readings = []

    def _begin_or_count(self, now_s: float, fleet: Fleet) -> None:
        """Begin to wait, go on waiting, or begin the interval anew."""
        if fleet.adjusting and self._adjusting:
            self._count(now_s)
        else:
            self._begin(now_s, adjusting=fleet.adjusting)

    def _count(self, now_s: float) -> None:
        """This pull is done, and so are all whose time has passed."""
        self._pulls = max(self._pulls + 1, self._passed(now_s))

    def _passed(self, now_s: float) -> int:
        return int((now_s - self._began_s) / self._options.metric_pulling_interval_s + _SLACK)

    def _tick(self, now_s: float, fleet: Fleet) -> Decision:
        observation = Observation(now_s, self._began_s, self.readings, self._with_deferred(fleet))
        self._observation = observation
        notes, self._notes = self._notes, ()
        interval_s = self._options.adjustment_interval_s
        # Set before the policy is asked: if it raises, this interval is over all the same.
        self._begin(self._due_s + interval_s * int((now_s - self._due_s) / interval_s))
        self._pulls = self._passed(now_s)
        decision = self._policy.on_tick(observation)
        self._due_s = decision.next_tick_at
        self._defer(decision, fleet)
        return replace(decision, notes=(*notes, *decision.notes)) if notes else decision

    # --- an up that waits for a GPU ------------------------------------------------------------

    def _defer(self, decision: Decision, fleet: Fleet) -> None:
        sizes = {pool.component: pool.gpus_per_worker for pool in fleet.pools}
        for reason in decision.reasons:
            if not reason.deferred:
                continue
            if reason.step > 0:
                self._in_vain = 0
                self._deferred[reason.component] = sizes[reason.component]
            else:
                self._deferred.pop(reason.component, None)

    def _forget_deferred(self, why: str) -> None:
        for component in self._deferred:
            self._notes += (f"{component} +1 waited for a GPU and was dropped: {why}",)
        self._deferred = {}

    def _with_deferred(self, fleet: Fleet) -> Fleet:
        def counted(pool: Pool) -> Pool:
            if pool.component not in self._deferred:
                return pool
            return replace(pool, coming=pool.coming + 1, waiting=pool.waiting + 1, deferred=1)

        return Fleet(None if fleet.prefill is None else counted(fleet.prefill), counted(fleet.decode))

    def _freed(self, fleet: Fleet, now_s: float) -> Decision | None:
        """The deferred up whose GPUs are free now, as a decision."""
        if not self._deferred:
            return None
        held, budget = fleet.gpus_spoken_for, self._options.max_gpu_budget
        leaving = sum(pool.gpus_leaving for pool in fleet.pools)
        component, size = next(iter(self._deferred.items()))
        if held + size <= budget:
            del self._deferred[component]
            pool = next(pool for pool in fleet.pools if pool.component == component)
            numbers = {"gpus_counted": held, "gpus_per_worker": size, "max_gpu_budget": budget}
            reason = Reason(component, 1, Rule.GPU_FREED, numbers)
            return Decision(now_s, {component: pool.capacity + 1}, (reason,), now_s)
        self._in_vain = self._in_vain + 1 if held - leaving + size > budget else 0
        if self._in_vain >= STALE_PULLS:
            self._forget_deferred("the drain whose GPU it waited for was taken back")
        return None
