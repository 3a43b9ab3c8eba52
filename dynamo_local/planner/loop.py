"""The planner's loop: pulls, lets the policy decide, has its decisions carried out, and tells whoever looks on.

It runs in the arbiter's event loop and never blocks it. One tick at a time, on absolute deadlines, so nothing overlaps
or drifts. It is supervised: a tick that fails is logged, counted and tried again; an exception never ends the scaling
in silence (lesson 15). What it does goes through the connector; a refusal is a value.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

from dynamo_local.clock import Clock
from dynamo_local.core.types import Missing
from dynamo_local.planner.load import LoadOptions, LoadPolicy
from dynamo_local.planner.local_connector import Committed, Refused
from dynamo_local.planner.observing import PlannerObserver
from dynamo_local.planner.pulling import Puller
from dynamo_local.planner.record import DecisionRecord, Outcome, StepOutcome, inputs_of, outcome_of
from dynamo_local.planner.rounds import STALE_PULLS, Policy, Rounds
from dynamo_local.planner.values import Decision, Fleet, Observation, Reading
from dynamo_local.planner.virtual_connector import Written

log = logging.getLogger(__name__)


class PlannerState(enum.StrEnum):
    """`paused` observes and decides nothing; with `no_operation` it decides, and acts on nothing."""

    STOPPED = "stopped"
    RUNNING = "running"
    PAUSED = "paused"


class World(Protocol):
    """What the loop asks the arbiter without waiting."""

    def fleet(self) -> Fleet:
        """The workers of both components, counted now."""
        ...

    def ready(self) -> tuple[str, ...]:
        """Names of the decode workers that are ready."""
        ...

    def blind(self) -> str | None:
        """Why nothing can be known of the workers now (etcd or NATS is away), in words; None while all is well."""
        ...


class Connector(Protocol):
    """What carries decisions out, step by step: `LocalConnector`."""

    async def add_component(
        self, component: str, *, stimulus_id: str | None = None
    ) -> Committed | Written | Refused: ...
    async def remove_component(
        self, component: str, *, stimulus_id: str | None = None
    ) -> Committed | Written | Refused: ...


@runtime_checkable
class WholeConnector(Protocol):
    """One that takes a decision as a whole: `VirtualConnector`."""

    async def set_component_replicas(self, targets: Mapping[str, int]) -> Written | Refused: ...


@dataclass(slots=True)
class Counts:
    """Since the loop was made. `lag_s` is by how much the last pull came late, seconds."""

    pulls: int = 0
    decisions: int = 0
    failed_ticks: int = 0
    lag_s: float = 0.0


class PlannerLoop:
    """Made stopped. `last_number` is the number of the last decision that was ever logged in this namespace."""

    def __init__(
        self,
        world: World,
        puller: Puller,
        connector: Connector,
        clock: Clock,
        *,
        last_number: int = 0,
        tell: Callable[[str], None] = log.warning,
    ) -> None:
        self.state = PlannerState.STOPPED
        self.since_s = clock.now_s()
        self.options = LoadOptions()
        self.no_operation = False
        self.observers: list[PlannerObserver] = []
        self.counts = Counts()
        self.last: DecisionRecord | None = None
        self.trouble: str | None = None
        """Why it holds, or what failed in its last tick; None while all is well."""
        self._world = world
        self._puller = puller
        self._connector = connector
        self._clock = clock
        self._number = last_number
        self._tell = tell
        self._rounds: Rounds | None = None
        self._next_s = 0.0  # of a paused loop; else the rounds say
        self._unseen = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # --- what one may ask of it ------------------------------------------------------------------

    @property
    def rounds(self) -> Rounds | None:
        """Its intervals; None while it is stopped or paused."""
        return self._rounds

    def start(self, options: LoadOptions, *, no_operation: bool, paused: bool = False) -> None:
        """Begin an interval now (or only observe). It must be stopped."""
        assert self._task is None, "the planner's loop runs already"
        self.options, self.no_operation = options, no_operation
        self._set_state(PlannerState.PAUSED if paused else PlannerState.RUNNING)
        self._task = asyncio.ensure_future(self._run())

    def change(self, options: LoadOptions, *, no_operation: bool) -> None:
        """Other options, from the next decision on."""
        self.options, self.no_operation = options, no_operation
        if self._rounds is not None:
            self._rounds.with_options(self._policy(), options)
        self._next_s = min(self._next_s, self._clock.now_s() + options.metric_pulling_interval_s)
        self._wake.set()

    def pause(self) -> None:
        """Observe only."""
        self._set_state(PlannerState.PAUSED)

    def resume(self) -> None:
        """Plan again, from what is now: the interval begins anew."""
        self._set_state(PlannerState.RUNNING)

    def on_manual_change(self) -> None:
        """A person changed the fleet: hold for an interval, then plan from what is."""
        if self._rounds is not None:
            self._rounds.on_manual_change(self._clock.now_s())

    async def stop(self) -> None:
        """Returns when the tick that may be under way has ended: nothing is done half."""
        if self._task is None:
            return
        self._set_state(PlannerState.STOPPED)
        task, self._task = self._task, None
        await task

    def act_through(self, connector: Connector) -> None:
        """Carry decisions out by this one from now on. It must be stopped."""
        assert self._task is None, "the planner's loop runs"
        self._connector = connector

    def _set_state(self, state: PlannerState) -> None:
        now_s = self._clock.now_s()
        self.state, self.since_s, self.trouble = state, now_s, None
        running = state is PlannerState.RUNNING
        self._rounds = Rounds(self._policy(), self.options, now_s) if running else None
        self._next_s = now_s + self.options.metric_pulling_interval_s
        self._wake.set()

    def _policy(self) -> Policy:
        return _Seeing(LoadPolicy(self.options), self._world)

    # --- the loop --------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self.state is not PlannerState.STOPPED:
                try:
                    if await self._until(self._due_s()):
                        await self._pull()
                except Exception as error:
                    self._failed(error)
                    if self.state is not PlannerState.STOPPED:
                        await self._until(self._clock.now_s() + self.options.metric_pulling_interval_s)
        finally:
            self._puller.close()

    def _due_s(self) -> float:
        return self._next_s if self._rounds is None else self._rounds.next_pull_at

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

    async def _pull(self) -> None:
        """One pull, and the decision that may be due."""
        now_s = self._clock.now_s()
        self.counts.pulls += 1
        self.counts.lag_s = max(0.0, now_s - self._due_s())
        self._next_s = max(self._next_s + self.options.metric_pulling_interval_s, now_s)
        reading = await self._tick()
        self._unseen = self._unseen + 1 if (unknown := _unknown(reading)) is not None else 0
        why = self._world.blind() or (unknown if self._unseen >= STALE_PULLS else None)
        self._say(None if why is None else f"holds: {why}")

    def _failed(self, error: Exception) -> None:
        self.counts.failed_ticks += 1
        log.error("a tick of the planner failed; it goes on", exc_info=error)
        self._say(f"a tick failed ({type(error).__name__}: {error}); it is tried again, the arbiter's log says more")

    def _say(self, trouble: str | None) -> None:
        """Told once, and once more when it is over."""
        if trouble == self.trouble:
            return
        self._tell(f"planner: {trouble}" if trouble is not None else f"planner: goes on (it was: {self.trouble})")
        self.trouble = trouble

    async def _tick(self) -> Reading:
        reading = await self._puller.pull(self._world.ready(), self.options.metric_pulling_interval_s)
        fleet = self._world.fleet()
        self._told(lambda observer: observer.on_reading(reading, fleet))
        rounds = self._rounds
        if rounds is None or reading.at_s < rounds.interval_began_s:
            return reading  # paused, or begun anew while we asked
        began_s, readings = rounds.interval_began_s, (*rounds.readings, reading)
        decision = rounds.on_pull(reading, fleet)
        if decision is not None:
            await self._carry_out(decision, Observation(decision.now_s, began_s, readings, fleet))
        return reading

    async def _carry_out(self, decision: Decision, observation: Observation) -> None:
        self._number += 1
        stimulus_id = f"planner:{self._number}"
        outcomes = await self._outcomes(decision, observation.fleet, stimulus_id)
        put_off = {reason.component: StepOutcome(Outcome.DEFERRED) for reason in decision.reasons if reason.deferred}
        record = DecisionRecord(
            wall_s=self._clock.wall_s(),
            stimulus_id=stimulus_id,
            inputs=inputs_of(observation, self.options),
            decision=decision,
            outcomes={**put_off, **outcomes},
        )
        self.counts.decisions += 1
        self.last = record
        self._told(lambda observer: observer.on_decision(record))

    async def _outcomes(self, decision: Decision, fleet: Fleet, stimulus_id: str) -> dict[str, StepOutcome]:
        """What becomes of each of its steps."""
        steps, connector = dict(decision.acts), self._connector
        if steps and isinstance(connector, WholeConnector):
            targets = {pool.component: pool.capacity + steps.get(pool.component, 0) for pool in fleet.pools}
            return dict.fromkeys(steps, await self._act(lambda: connector.set_component_replicas(targets)))
        outcomes = {}
        for component, step in steps.items():
            change = connector.add_component if step > 0 else connector.remove_component
            outcomes[component] = await self._act(partial(change, component, stimulus_id=stimulus_id))
        return outcomes

    async def _act(self, change: Callable[[], Awaitable[Committed | Written | Refused]]) -> StepOutcome:
        if self.no_operation:
            return StepOutcome(Outcome.NO_OPERATION)
        if (why := self._world.blind()) is not None:  # an up that waited for its GPU comes at any time
            return StepOutcome(Outcome.REFUSED, (), why, "blind", retryable=True)
        try:
            return outcome_of(await change())
        except Exception as error:  # a bug: the decision is on record all the same, and later ones are made
            self.counts.failed_ticks += 1
            log.exception("a decision could not be carried out")
            why = f"it failed: {type(error).__name__}: {error}"
            return StepOutcome(Outcome.REFUSED, (), why, "internal", retryable=True)

    def _told(self, tell: Callable[[PlannerObserver], None]) -> None:
        for observer in self.observers:
            try:
                tell(observer)
            except Exception:  # somebody who only looks on
                log.exception("%s failed; the planner goes on", type(observer).__name__)


@dataclass(frozen=True, slots=True)
class _Seeing:
    """A policy that gets no samples while nothing can be known of the workers: it holds, and its reason is `missing`.

    Samples of the interval's beginning are no ground for a change that could not be carried out, or be seen, now.
    """

    policy: Policy
    world: World

    def on_tick(self, observation: Observation) -> Decision:
        why = self.world.blind()
        if why is not None:
            readings = tuple(_unseen(reading, Missing(why)) for reading in observation.readings)
            observation = replace(observation, readings=readings)
        return self.policy.on_tick(observation)


def _unseen(reading: Reading, why: Missing) -> Reading:
    loads: Iterable[str] = reading.loads
    return Reading(reading.at_s, None if reading.queue is None else why, dict.fromkeys(loads, why))


def _unknown(reading: Reading) -> str | None:
    """What a role is held for now, in words that stay the same while it lasts."""
    if isinstance(reading.queue, Missing):
        return "the depth of the prefill queue is not known"
    if reading.loads and all(isinstance(load, Missing) for load in reading.loads.values()):
        return "no load of a decode worker is known"
    return None
