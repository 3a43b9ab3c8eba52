"""`EffectRunner` without a world: what was given is kept, and goes on when a test says so, or is answered at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from dynamo_local.arbiter.controller import FleetController
from dynamo_local.arbiter.effects import Act, Done
from dynamo_local.clock import NowClock
from dynamo_local.core.fleet.effects import Commit, Effect, Spawn, Sweep, Transition, describe
from dynamo_local.core.fleet.events import Event, ProcessMade, Swept
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.notes import About
from dynamo_local.core.types import WorkerState
from dynamo_local.system.gpu_locks import GpuLocked
from tests.fakes.arbiter.hand_clock import HandClock

Answer = Callable[[Act], Event | None]


@dataclass(eq=False)
class Begun:
    """An act under way. `finish` ends it, with what was observed by it."""

    act: Act
    worker: Worker | None
    done: Done
    effects: FakeEffects

    def finish(self, seen: Event | None = None) -> None:
        self.effects.begun.remove(self)
        self.done(seen)


@dataclass(eq=False)
class Write:
    """A commit that waits for the disk, with the fleet that it was given."""

    commit: Commit
    fleet: Fleet
    effects: Sequence[Effect]
    then: Callable[[], None]


class FakeEffects:
    """See `arbiter.effects.EffectRunner`. `journal` says in order what was asked for, in words; `asked` are the acts.

    `elsewhere` are devices that another namespace has locked, `locked` those that we have; `refuse_locks` are raised by
    the next locks, one each. With `quick` commits are written at once. With `answers` acts end at once: kind of act ->
    result. Absent: a process is made, a sweep ends, nothing else is observed. None: the act never ends.
    """

    def __init__(self, *, quick: bool = False, answers: Mapping[type, Answer | None] | None = None) -> None:
        self.quick = quick
        self.answers = None if answers is None else {Spawn: self._made, Sweep: _swept, **answers}
        self.journal: list[str] = []
        self.asked: list[Act] = []
        self.elsewhere: dict[str, str] = {}
        self.refuse_locks: list[GpuLocked] = []
        self.locked: set[str] = set()
        self.writes: list[Write] = []
        self.written: list[Commit] = []
        self.begun: list[Begun] = []
        self.wakes: list[float] = []
        self.told: list[str] = []
        self.reports: list[tuple[str, str, WorkerState]] = []
        self._pids = count(7000)

    # --- EffectRunner -------------------------------------------------------------------------------

    def lock(self, name: str, uuids: Sequence[str]) -> tuple[str, ...]:
        if self.refuse_locks:
            raise self.refuse_locks.pop(0)
        wanted = tuple(uuid for uuid in uuids if uuid not in self.locked)
        for uuid in wanted:
            if uuid in self.elsewhere:
                self.journal.append(f"refused {uuid}")
                raise GpuLocked(uuid, self.elsewhere[uuid])
        self.journal.append(f"lock {name}")
        self.locked.update(wanted)
        return wanted

    def unlock(self, uuids: Sequence[str]) -> None:
        self.locked.difference_update(uuids)

    def commit(self, commit: Commit, fleet: Fleet, effects: Sequence[Effect], then: Callable[[], None]) -> None:
        self.journal.append(f"commit {', '.join(commit.names)}")
        self.writes.append(Write(commit, fleet, effects, then))
        if self.quick:
            self.write()

    def begin(self, act: Act, worker: Worker | None, done: Done) -> None:
        self.journal.append(f"{describe(act)} {getattr(act, 'name', '')}".strip())
        self.asked.append(act)
        begun = Begun(act, worker, done, self)
        self.begun.append(begun)
        answer = None if self.answers is None else self.answers.get(type(act), _nothing)
        if answer is not None:
            begun.finish(answer(act))

    def wake_at(self, at_s: float) -> None:
        self.wakes.append(at_s)

    def tell(self, text: str, about: About = None) -> None:
        self.told.append(text)

    def report(self, worker: Worker, reason: str) -> None:
        self.reports.append((worker.name, reason, worker.state))

    def _made(self, act: Act) -> Event:
        assert isinstance(act, Spawn)
        pid = next(self._pids)
        return ProcessMade(stimulus_id=act.stimulus_id, name=act.name, pid=pid, start_time=float(pid), started_at=1.8e9)

    # --- what a test does ------------------------------------------------------------------------

    @property
    def transitions(self) -> list[Transition]:
        return [transition for commit in self.written for transition in commit.transitions]

    def write(self) -> None:
        while self.writes:
            each = self.writes.pop(0)
            self.written.append(each.commit)
            each.then()

    def acts(self, kind: type[Act] | None = None, name: str | None = None) -> list[Begun]:
        fits = (each for each in self.begun if kind is None or isinstance(each.act, kind))
        return [each for each in fits if name is None or getattr(each.act, "name", None) == name]

    def act(self, kind: type[Act], name: str | None = None) -> Begun:
        (found,) = self.acts(kind, name)
        return found


def _swept(act: Act) -> Event:
    assert isinstance(act, Sweep)
    return Swept(stimulus_id=f"sweep:{act.name}", name=act.name)


def _nothing(_: Act) -> Event | None:
    return None


def shell_of(fleet: Fleet, effects: FakeEffects | None = None, clock: NowClock | None = None) -> FleetController:
    """A controller on that fleet, which is validated at every step; time stands still unless there is a clock.

    Without `effects` everything is written at once, and all acts end at once.
    """
    return FleetController(fleet, effects or FakeEffects(quick=True, answers={}), clock or HandClock(), validates=True)
