"""Replays a log of ticks: the same policy object is shown the same pulls, and its decisions are held against the log's.

Forecasts are made anew, here and now: the same task has the same answer. What plugins said is not in the log; where
they had a say the decisions differ, and that shows. With another policy, or other options, the replay says what it
would have decided from what was recorded; it does not know what would have come of that, and what the log does not
have (the log of `load` has no traffic) is missing for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Missing
from dynamo_local.errors import BadInput
from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.forecasting.answers import InlineForecaster
from dynamo_local.planner.records import ticks
from dynamo_local.planner.records.ticks import Decided
from dynamo_local.planner.values import Observation
from dynamo_local.system.json_lines import Record

NOT_RECORDED = Missing("the log of ticks does not have it: the policy that was recorded did not ask for it")


@dataclass(frozen=True, slots=True)
class Replayed:
    """One tick in which one of both decided something: `then` is the log's decision, `now` the replay's."""

    seq: int
    at_s: float
    then: Decided | None
    now: Decided | None

    @property
    def agrees(self) -> bool:
        """Targets, steps and rules are the same."""
        return self.then == self.now


@dataclass(slots=True)
class Replay:
    """Shows a policy what is in a log. `options` None: the recorded ones. The counts grow while `run` is iterated.

    `whole` is False where the log does not have its planner's beginning: then what the policy had learned before is not
    known, and it may decide otherwise until it has learned it again.
    """

    options: PlannerConfig | None = None
    ticks: int = 0
    without: int = 0
    """Ticks in which the policy wanted something that the log does not have."""
    whole: bool = True
    policies: list[str] = field(default_factory=list)
    """Those that were shown something."""
    _driver: PolicyDriver | None = None

    def run(self, records: Iterable[Record]) -> Iterator[Replayed]:
        """In order. Raises `BadInput` for a record that cannot be read."""
        for record in records:
            kind, at_s = record["kind"], float(record["at_s"])
            if kind == ticks.TICK:
                yield from self._tick(record)
            elif kind == ticks.MANUAL:
                if self._driver is not None:
                    self._driver.manual(at_s)
            elif kind == ticks.BEGAN or (self._driver is None and kind in (ticks.GOES_ON, ticks.CHANGED)):
                self.whole = self.whole and kind == ticks.BEGAN
                self._driver = PolicyDriver(policy_of(self._chosen(record)), at_s, forecaster=InlineForecaster())
            elif kind == ticks.CHANGED and self._driver is not None:
                self._driver.change(policy_of(self._chosen(record)), at_s)
            elif kind != ticks.GOES_ON:
                raise BadInput(f"record {record['seq']} of the log of ticks is a {kind[:40]!r}: not known here")

    def _chosen(self, record: Record) -> PlannerConfig:
        options = self.options or ticks.options_in(record)
        if options.policy not in self.policies:
            self.policies.append(options.policy)
        return options

    def _tick(self, record: Record) -> Iterator[Replayed]:
        if self._driver is None:  # the options of its time have gone with the log's beginning
            self.whole = False
            return
        observation, then = ticks.tick_in(record)
        self.ticks += 1
        now = ticks.decided(self._driver.tick_now(self._as_wanted(self._driver, observation)))
        if then is not None or now is not None:
            yield Replayed(int(record["seq"]), observation.at_s, then, now)

    def _as_wanted(self, driver: PolicyDriver, observation: Observation) -> Observation:
        needs = driver.needs
        no_traffic = needs.traffic_window_s is not None and observation.traffic is None
        if no_traffic or (needs.passes and not observation.engines):
            self.without += 1
        return replace(observation, traffic=NOT_RECORDED) if no_traffic else observation
