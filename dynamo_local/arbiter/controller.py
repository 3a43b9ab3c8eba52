"""The one place where the fleet changes: an event into the machine, its effects out to the world.

The same class runs in the arbiter, under a stock circusd, in the simulator and in the simulation tests. It never waits
and knows no event loop: an `EffectRunner` begins what takes time, and the result comes back as another event.

Order: a step's locks are taken first, and if one is refused the step never happened. Its commit comes next, and its
acts when that is written. Acts on one worker are carried out one after the other; those on different workers do not
wait for each other. Ending a session, or a change of role, waits for nobody: whoever hangs in an act is ended all the
same.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dynamo_local.arbiter.effects import Act, EffectRunner
from dynamo_local.clock import NowClock
from dynamo_local.core.fleet.effects import (
    CallOff,
    CallOffFlip,
    Commit,
    Effect,
    EndSession,
    Lock,
    LookAtGpus,
    Report,
    Spawn,
    Tell,
    Transition,
    Unlock,
)
from dynamo_local.core.fleet.events import Event, GpuReserved, SpawnBegun, Stalled, Tick
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.fleet.invariants import validate
from dynamo_local.core.fleet.moves import Answer
from dynamo_local.core.fleet.step import NOTHING, next_due_s, step
from dynamo_local.system.gpu_locks import GpuLocked

AtOnce = Tell | Report | Unlock | EndSession | LookAtGpus | CallOffFlip
"""Effects that do not wait for the worker's other acts."""
LOCK_TRIES = 16
"""More devices than a host has: each refusal takes one device out of what can be chosen."""
PULSE_EVERY_S = 1.0
STALL_S = 3.0
"""A clock that was to be looked at every second and was not for so long: the arbiter itself stood still."""


@dataclass(slots=True)
class _Batch:
    """The acts of one step; they may begin once it is `committed`."""

    committed: bool = False


@dataclass(slots=True)
class _Line:
    """One worker's acts, in order; `busy` while one is under way."""

    waiting: deque[tuple[Act, _Batch]] = field(default_factory=deque)
    busy: bool = False


class FleetController:
    """Holds the fleet of now. `validates`: check every fleet (tests, the simulation)."""

    def __init__(
        self,
        fleet: Fleet,
        runner: EffectRunner,
        clock: NowClock,
        *,
        validates: bool = False,
    ) -> None:
        self.fleet = fleet
        self._on_event: list[Callable[[Event], None]] = []
        self._on_transition: list[Callable[[Worker, Transition], None]] = []
        self._on_fleet: list[Callable[[Fleet], None]] = []
        self._runner = runner
        self._clock = clock
        self._validates = validates
        self._lines: dict[str, _Line] = {}
        self._alive_s: float | None = None
        self.stopped = False
        """Set by whoever lets go of the fleet: nothing is carried out any more."""

    def subscribe(
        self,
        *,
        on_event: Callable[[Event], None] | None = None,
        on_transition: Callable[[Worker, Transition], None] | None = None,
        on_fleet: Callable[[Fleet], None] | None = None,
    ) -> None:
        """Call these in each step, in this order. Each must return at once.

        `on_transition` gets the worker as it is after the step, `on_fleet` the new fleet.
        """
        self._on_event += [] if on_event is None else [on_event]
        self._on_transition += [] if on_transition is None else [on_transition]
        self._on_fleet += [] if on_fleet is None else [on_fleet]

    # --- in ------------------------------------------------------------------------------------

    def feed(self, event: Event, *, committed: Callable[[], None] | None = None) -> Answer:
        """Let the machine take a step, and carry it out. `committed` is called when its intent is written.

        Raises the `DynamoError` of a command that is refused; then nothing has changed.
        """
        if self.stopped:
            return NOTHING
        self._notice_stall(self._clock.now_s())  # whatever is heard first after a stop: that it was one, goes before
        for tries_left in reversed(range(LOCK_TRIES)):
            fleet, effects, answer = step(self.fleet, event, self._clock.now_s())
            try:
                self._lock(effects)
                break
            except GpuLocked as refused:
                if not tries_left:
                    raise
                cause = event.stimulus_id
                self.feed(GpuReserved(stimulus_id=cause, uuid=refused.uuid, who=refused.who))
        self._adopt(event, fleet, effects, answer, committed)
        return answer

    def would(self, command: Event) -> tuple[Fleet, Answer]:
        """The fleet after the command, and its answer, if it were given now. Nothing changes. Raises its refusal."""
        fleet, _, answer = step(self.fleet, command, self._clock.now_s())
        return fleet, answer

    def tick(self) -> None:
        """Time has passed (`EffectRunner.wake_at` asked for this call)."""
        now_s = self._clock.now_s()
        self._notice_stall(now_s)
        due_s = next_due_s(self.fleet)
        if due_s is None:
            return
        if due_s <= now_s:
            self.feed(Tick())
            due_s = next_due_s(self.fleet)
        if due_s is not None:
            self._runner.wake_at(due_s)

    def pulse(self) -> None:
        """Called every `PULSE_EVERY_S` by an arbiter that may be stopped: by its absence a stop is noticed."""
        now_s = self._clock.now_s()
        self._notice_stall(now_s)
        self._alive_s = now_s

    def _notice_stall(self, now_s: float) -> None:
        if self._alive_s is not None and now_s - self._alive_s > STALL_S:
            for_s, self._alive_s = now_s - self._alive_s, now_s
            self.feed(Stalled(for_s=for_s))

    # --- out -----------------------------------------------------------------------------------

    def _lock(self, effects: Sequence[Effect]) -> None:
        """All of the step's devices, or none of them."""
        taken: list[str] = []
        try:
            for each in effects:
                if isinstance(each, Lock):
                    taken += self._runner.lock(each.name, each.uuids)
        except GpuLocked:
            self._runner.unlock(taken)
            raise

    def _adopt(
        self,
        event: Event,
        fleet: Fleet,
        effects: tuple[Effect, ...],
        answer: Answer,
        committed: Callable[[], None] | None,
    ) -> None:
        if self._validates:
            validate(fleet)
        before, self.fleet = self.fleet, fleet
        for on_event in self._on_event:
            on_event(event)
        batch = _Batch()
        commit: Commit | None = None
        at_once: list[AtOnce] = []
        names: dict[str, None] = {}
        for each in effects:
            match each:
                case Commit():
                    commit = each
                case Lock():
                    pass
                case CallOff(name=name):
                    self._call_off(name)
                case Tell() | Report() | Unlock() | EndSession() | LookAtGpus() | CallOffFlip():
                    at_once.append(each)
                case _:
                    self._lines.setdefault(each.name, _Line()).waiting.append((each, batch))
                    names[each.name] = None

        due_s = next_due_s(fleet)
        if due_s is not None and due_s != next_due_s(before):
            self._runner.wake_at(due_s)

        def go_on() -> None:
            batch.committed = True
            if self.stopped:
                return
            for each in at_once:
                self._at_once(each)
            for name in names:
                self._pump(name)
            if committed is not None:
                committed()

        self._tell_observers(before, () if commit is None else commit.transitions)
        if commit is None:
            go_on()
        else:
            self._runner.commit(commit, fleet, effects, go_on)

    def _tell_observers(self, before: Fleet, transitions: tuple[Transition, ...]) -> None:
        for transition in transitions:
            worker = self.fleet.workers.get(transition.name) or before.workers.get(transition.name)
            if worker is None:
                continue
            for on_transition in self._on_transition:
                on_transition(worker, transition)
        for on_fleet in self._on_fleet:
            on_fleet(self.fleet)

    def _at_once(self, each: AtOnce) -> None:
        match each:
            case Tell(text=text, about=about):
                self._runner.tell(text, about)
            case Report(name=name, reason=reason, state=state):
                worker = self.fleet.workers.get(name)
                if worker is not None:
                    self._runner.report(replace(worker, state=state), reason)
            case Unlock(uuids=uuids):  # somebody else of ours may have been given one since
                self._runner.unlock([uuid for uuid in uuids if not self.fleet.gpus.in_use(uuid)])
            case EndSession(name=name) | CallOffFlip(name=name):
                self._runner.begin(each, self._worker(name), self._observed)
            case LookAtGpus():
                self._runner.begin(each, None, self._observed)

    def _pump(self, name: str) -> None:
        """Begin the worker's next act, if none is under way and its intent is written."""
        line = self._lines.get(name)
        if line is None or line.busy or self.stopped:
            return
        if not line.waiting:
            del self._lines[name]
            return
        act, batch = line.waiting[0]
        if not batch.committed:
            return
        line.waiting.popleft()
        line.busy = True

        def done(seen: Event | None) -> None:
            line.busy = False
            try:
                self._observed(seen)
            finally:  # a defect in one step must not hold up all that is still to be done for that worker
                self._pump(name)

        if isinstance(act, Spawn):
            self.feed(SpawnBegun(stimulus_id=act.stimulus_id, name=name))
        self._runner.begin(act, self._worker(name), done)

    def _call_off(self, name: str) -> None:
        """Forget a `Spawn` that has not been begun. Whether its intent is written does not matter any more."""
        line = self._lines.get(name)
        if line is not None:
            line.waiting = deque(each for each in line.waiting if not isinstance(each[0], Spawn))

    def _worker(self, name: str) -> Worker | None:
        return self.fleet.workers.get(name)

    def _observed(self, seen: Event | None) -> None:
        if seen is not None and not self.stopped:
            self.feed(seen)


# --- waiting
# Waiting for a condition on the fleet.


class Waiting:
    """Lets tasks wait for a condition on the fleet."""

    def __init__(self, controller: FleetController, now_s: Callable[[], float]) -> None:
        self._controller = controller
        self._now_s = now_s
        self._changed = asyncio.Event()
        controller.subscribe(on_fleet=lambda _: self.notify())

    def notify(self) -> None:
        """Wake everybody who waits, though the fleet is the same."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, done: Callable[[], bool], deadline_s: float | None = None) -> bool:
        """Wait for a condition on the fleet. True when it holds, False at the deadline (of the arbiter's clock)."""
        while not done():
            changed = self._changed
            left_s = None if deadline_s is None else deadline_s - self._now_s()
            if left_s is not None and left_s <= 0:
                return False
            try:
                # Not wait_for: before Python 3.12 it swallows a cancellation that comes together with the change.
                async with asyncio.timeout(left_s):
                    await changed.wait()
            except TimeoutError:
                return done()
        return True
