"""The planner's loop: pulls what the policy wants to see, lets it decide, has decisions carried out, informs observers.

It runs in the arbiter's event loop and never blocks it. One tick at a time, on absolute deadlines, so nothing overlaps
or drifts. It is supervised: a tick that fails is logged, counted and tried again; an exception never ends the scaling
in silence. The connector carries decisions out; a refusal is a value.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from dynamo_local.clock import Clock
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.notes import About, Elsewhere, Tell
from dynamo_local.core.types import Missing
from dynamo_local.planner.collector import Collector, LoopLatency
from dynamo_local.planner.connectors import Committed, Connector, Refused, Written
from dynamo_local.planner.driver import Pipeline, PolicyDriver, Recorder
from dynamo_local.planner.policies.load_planner import STALE_PULLS, LoadPlanner
from dynamo_local.planner.policies.protocol import Policy
from dynamo_local.planner.records.decision_log import DecisionRecord, Outcome, StepOutcome, inputs_of, outcome_of
from dynamo_local.planner.sources import Forecaster
from dynamo_local.planner.values import (
    Capabilities,
    Decision,
    Engines,
    EngineSeen,
    FixedFleet,
    IntervalObservation,
    Needs,
    Observation,
    PolicyStatus,
    Reading,
    Requests,
    WorkerPools,
)

# --- observing
# Observers of the planner: its log, TensorBoard, Prometheus, `dynamo top`.


class PlannerObserver(Protocol):
    """Called on the arbiter's event loop, so it must return at once and leave files and sockets to a thread.

    Its exceptions are logged, and affect nothing else.
    """

    def on_observation(self, observation: Observation) -> None:
        """One observation; also while the planner is paused, or holds for an adjustment."""
        ...

    def on_decision(self, record: DecisionRecord) -> None:
        """One decision with its outcome; a hold is one, too."""
        ...


log = logging.getLogger(__name__)

PULL_GAP_MIN_S = 0.01
"""A policy that wants its next observation at once waits this long; nothing can make the arbiter's loop spin."""


def _logged(text: str, about: About = None) -> None:
    """A person reads it in the log."""
    log.warning("%s", text)


class PlannerState(enum.StrEnum):
    """`paused` observes and decides nothing; with `no_operation` it decides, and acts on nothing."""

    STOPPED = "stopped"
    RUNNING = "running"
    PAUSED = "paused"


class World(Protocol):
    """The state of the arbiter that the loop reads without waiting."""

    def worker_pools(self) -> WorkerPools:
        """The workers of both components, counted now."""
        ...

    def ready(self) -> tuple[str, ...]:
        """Names of the decode workers that are ready."""
        ...

    def blind(self) -> str | None:
        """Why the workers cannot be observed now (etcd or NATS is away), in words; None while they can."""
        ...


@dataclass(slots=True)
class Counts:
    """Counters since the loop was made. `lag_s` is the lateness of the last observation, in seconds; `held`: for how
    long the arbiter's loop was held by one step of a tick, or of a source."""

    pulls: int = 0
    decisions: int = 0
    failed_ticks: int = 0
    lag_s: float = 0.0
    latency: LoopLatency = field(default_factory=LoopLatency)

    def as_json(self) -> dict[str, Any]:
        """As the planner's status has them."""
        held = {
            what: {"wall": round(longest.elapsed_s * 1e3, 3), "cpu": round(longest.cpu_s * 1e3, 3)}
            for what, longest in self.latency.longest.items()
        }
        return {
            "pulls": self.pulls,
            "decisions": self.decisions,
            "failed_ticks": self.failed_ticks,
            "lag_s": round(self.lag_s, 4),
            "loop_held_max_ms": held,
        }


class PlannerLoop:
    """The loop, stopped at first. `last_number` is the number of the last decision logged in this namespace."""

    def __init__(
        self,
        world: World,
        collector: Collector,
        connector: Connector,
        clock: Clock,
        *,
        last_number: int = 0,
        tell: Tell = _logged,
        forecaster: Forecaster | None = None,
        recorder: Recorder | None = None,
        observers: Iterable[PlannerObserver] = (),
    ) -> None:
        self.state = PlannerState.STOPPED
        self.since_s = clock.now_s()
        self.options = PlannerConfig()
        self._policy: Policy[Any] = LoadPlanner(self.options)
        self.no_operation = False
        self.observers: list[PlannerObserver] = list(observers)
        self.counts = Counts(latency=collector.latency)
        self.last: DecisionRecord | None = None
        self.trouble: str | None = None
        """Why it holds, or what failed in its last tick; None while all is well."""
        self._world = world
        self._collector = collector
        self._connector = connector
        self._clock = clock
        self._number = last_number
        self._tell = tell
        self._forecaster = forecaster
        self._recorder = recorder
        self._pipeline: Pipeline | None = None
        self._driver: PolicyDriver | None = None
        self._next_s = 0.0  # used while paused; otherwise the policy decides
        self._pulled_s = clock.now_s()
        self._unseen = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # --- what one may ask of it ------------------------------------------------------------------

    @property
    def status(self) -> PolicyStatus | None:
        """Where its policy stands; None while it is stopped or paused."""
        return None if self._driver is None else self._driver.status

    @property
    def fixed_fleet(self) -> FixedFleet | None:
        """The cheapest fixed fleet of the last day or hour, if its policy compares itself with one."""
        status = self.status
        return None if status is None else status.fixed_fleet

    def start(self, options: PlannerConfig, policy: Policy[Any], *, no_operation: bool, paused: bool = False) -> None:
        """Begin now with the policy of these options (or only observe). It must be stopped."""
        assert self._task is None, "the planner's loop runs already"
        self.options, self._policy, self.no_operation = options, policy, no_operation
        self._set_state(PlannerState.PAUSED if paused else PlannerState.RUNNING)
        self._task = asyncio.ensure_future(self._run())

    def change(self, options: PlannerConfig, policy: Policy[Any], *, no_operation: bool) -> None:
        """Other options, from the next decision on; or another policy, which then begins."""
        self.options, self._policy, self.no_operation = options, policy, no_operation
        if self._driver is not None:
            self._driver.change(policy, self._clock.now_s())
        self._next_s = min(self._next_s, self._clock.now_s() + options.metric_pulling_interval)
        self._wake.set()

    def pause(self) -> None:
        """Observe only."""
        self._set_state(PlannerState.PAUSED)

    def resume(self, policy: Policy[Any] | None = None) -> None:
        """Plan again, from the present state: the policy begins anew, or this one does."""
        self._policy = policy or self._policy
        self._set_state(PlannerState.RUNNING)

    def on_manual_change(self) -> None:
        """A person changed the number of workers: the policy holds for a while, then plans from the present state."""
        if self._driver is not None:
            self._driver.manual(self._clock.now_s())

    async def stop(self) -> None:
        """Returns when a tick that is under way has ended, so that nothing is half done."""
        if self._task is None:
            return
        self._set_state(PlannerState.STOPPED)
        task, self._task = self._task, None
        await task

    def act_through(self, connector: Connector, pipeline: Pipeline | None = None) -> None:
        """Use this connector from now on, and let these plugins have a say. The loop must be stopped."""
        assert self._task is None, "the planner's loop runs"
        self._connector, self._pipeline = connector, pipeline

    def _set_state(self, state: PlannerState) -> None:
        now_s = self._clock.now_s()
        self.state, self.since_s, self.trouble = state, now_s, None
        self._driver = self._driven(now_s) if state is PlannerState.RUNNING else None
        self._next_s = now_s + self.options.metric_pulling_interval
        self._wake.set()

    def _driven(self, now_s: float) -> PolicyDriver:
        return PolicyDriver(
            self._policy, now_s, forecaster=self._forecaster, pipeline=self._pipeline, recorder=self._recorder
        )

    # --- the loop --------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self.state is not PlannerState.STOPPED:
                try:
                    if await self._until(self._due_s()):
                        await self._observation()
                except Exception as error:
                    self._failed(error)
                    if self.state is not PlannerState.STOPPED:
                        await self._until(self._clock.now_s() + self.options.metric_pulling_interval)
        finally:
            self._collector.close()

    def _due_s(self) -> float:
        if self._driver is None:
            return self._next_s
        return max(self._driver.next_at_s, self._pulled_s + PULL_GAP_MIN_S)

    async def _until(self, deadline_s: float) -> bool:
        """True at the deadline; False where something was changed before."""
        self._wake.clear()
        sleep = asyncio.ensure_future(self._clock.sleep_until(deadline_s))
        wake = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait((sleep, wake), return_when=asyncio.FIRST_COMPLETED)
            return not wake.done()
        finally:
            for waiter in (sleep, wake):
                waiter.cancel()
            await asyncio.wait((sleep, wake))

    async def _observation(self) -> None:
        """One observation, and the decision that may be due."""
        now_s = self._clock.now_s()
        self.counts.pulls += 1
        self.counts.lag_s = max(0.0, now_s - self._due_s())
        self._pulled_s = now_s
        self._next_s = max(self._next_s + self.options.metric_pulling_interval, now_s)
        reading = await self.counts.latency.timed("tick", self._tick())
        self._unseen = self._unseen + 1 if (unknown := _unknown(reading)) is not None else 0
        why = self._world.blind() or (unknown if self._unseen >= STALE_PULLS else None)
        self._say(None if why is None else f"holds: {why}")

    def _failed(self, error: Exception) -> None:
        self.counts.failed_ticks += 1
        log.error("a tick of the planner failed; the loop goes on", exc_info=error)
        self._say(f"a tick failed ({type(error).__name__}: {error}); it is tried again, the arbiter's log says more")

    def _say(self, trouble: str | None) -> None:
        """Report a trouble once, and once more when it is over."""
        if trouble == self.trouble:
            return
        reported = f"planner: {trouble}" if trouble is not None else f"planner: goes on (it was: {self.trouble})"
        self._tell(reported, Elsewhere())
        self.trouble = trouble

    async def _tick(self) -> Reading:
        driver = self._driver
        observation = await self._observed(Needs() if driver is None else driver.needs)
        self._tell_observers(lambda observer: observer.on_observation(observation))
        await asyncio.sleep(0)  # gauges, and then a decision: not in one step
        if driver is not None and driver is self._driver:  # else it was paused meanwhile
            decision = await driver.tick(observation)
            if decision is not None and driver is self._driver:
                await self._carry_out(decision, observation, driver)
        return observation.reading

    async def _observed(self, needs: Needs) -> Observation:
        interval_s = self.options.metric_pulling_interval
        window_s = needs.traffic_window_s
        reading, traffic, requests, (engines, limits) = await asyncio.gather(
            self._collector.collect(self._world.ready(), interval_s),
            self._collector.traffic(window_s),
            self._collector.requests(window_s) if needs.requests and window_s is not None else _no_requests(),
            self._collector.engines(interval_s) if needs.passes else _no_engines(),
        )
        blind = self._world.blind()
        if blind is not None:
            why = Missing(blind)
            traffic, requests = None if traffic is None else why, None
            engines = {engine: EngineSeen(seen.component, last=why) for engine, seen in engines.items()}
        return Observation(reading, self._world.worker_pools(), traffic, engines, limits, blind, requests)

    async def _carry_out(self, decision: Decision, observation: Observation, driver: PolicyDriver) -> None:
        self._number += 1
        stimulus_id = f"planner:{self._number}"
        status = driver.status
        seen = IntervalObservation(decision.now_s, status.interval_began_s, status.readings, observation.pools)
        inputs = inputs_of(
            seen, self.options, traffic=observation.traffic, prediction=driver.prediction, engines=observation.engines
        )
        outcomes = await self._outcomes(decision, observation.pools, stimulus_id)
        put_off = {reason.component: StepOutcome(Outcome.DEFERRED) for reason in decision.reasons if reason.deferred}
        record = DecisionRecord(
            wall_s=self._clock.wall_s(),
            stimulus_id=stimulus_id,
            inputs=inputs,
            decision=decision,
            outcomes={**put_off, **outcomes},
        )
        self.counts.decisions += 1
        self.last = record
        await asyncio.sleep(0)
        self._tell_observers(lambda observer: observer.on_decision(record))

    async def _outcomes(self, decision: Decision, pools: WorkerPools, stimulus_id: str) -> dict[str, StepOutcome]:
        """Carry the decision's steps out; the outcome of each by component."""
        steps, connector = dict(decision.acts), self._connector
        if not steps:
            return {}
        if connector.whole or not decision.apart:
            named = [pool for pool in pools.all if connector.whole or pool.component in steps]
            targets = {pool.component: pool.capacity + steps.get(pool.component, 0) for pool in named}
            result = await self._act(partial(connector.set_component_replicas, targets, stimulus_id=stimulus_id))
            return {component: _outcome(result, component) for component in steps}
        outcomes = {}
        for component, step in steps.items():
            change = connector.add_component if step > 0 else connector.remove_component
            result = await self._act(partial(change, component, stimulus_id=stimulus_id))
            outcomes[component] = _outcome(result, component)
        return outcomes

    async def _act(
        self, change: Callable[[], Awaitable[Committed | Written | Refused]]
    ) -> Committed | Written | Refused | StepOutcome:
        if self.no_operation:
            return StepOutcome(Outcome.NO_OPERATION)
        if (why := self._world.blind()) is not None:  # a deferred up may come at any time
            return Refused(why, "blind", retryable=True)
        try:
            return await change()
        except Exception as error:  # a bug: the decision is still recorded, and the loop goes on
            self.counts.failed_ticks += 1
            log.exception("a decision could not be carried out")
            why = f"it failed: {type(error).__name__}: {error}"
            return Refused(why, "internal", retryable=True)

    def _tell_observers(self, tell: Callable[[PlannerObserver], None]) -> None:
        for observer in self.observers:
            try:
                tell(observer)
            except Exception:  # an observer must not stop the planner
                log.exception("%s failed; the planner goes on", type(observer).__name__)


def _outcome(result: Committed | Written | Refused | StepOutcome, component: str) -> StepOutcome:
    return result if isinstance(result, StepOutcome) else outcome_of(result, component)


async def _no_requests() -> Requests | None:
    return None


async def _no_engines() -> tuple[Engines, Mapping[str, Capabilities]]:
    """Where no passes are wanted."""
    return {}, {}


def _unknown(reading: Reading) -> str | None:
    """Why a role is held now, in words that stay the same while that lasts."""
    if isinstance(reading.queue, Missing):
        return "the depth of the prefill queue is not known"
    if reading.loads and all(isinstance(load, Missing) for load in reading.loads.values()):
        return "no load of a decode worker is known"
    return None
