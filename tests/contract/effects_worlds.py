"""The parties of the `EffectRunner` contract: the tests' fake, the arbiter's own on a simulated host, the simulator's.

Each has one ready decode worker, and can be told to let things go on. `journal` says in which order the controller
asked for what, and when it heard that it was done.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from dynamo_local.arbiter.controller import FleetController
from dynamo_local.arbiter.effects import Act, Done, EffectRunner
from dynamo_local.core.fleet.effects import Commit, Effect, describe
from dynamo_local.core.fleet.events import Change, Event, Scale
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.gpus import GpuLedger
from dynamo_local.simulator.fleet import VirtualFleet
from dynamo_local.simulator.process import Agenda, What
from dynamo_local.simulator.simulation import Simulation
from dynamo_local.system.gpu_locks import GpuLocks, LockHolder
from dynamo_local.system.gpus import SimInventory
from tests.fakes.arbiter.fleet_views import DECODE
from tests.fakes.arbiter.machine_world import MachineWorld
from tests.fakes.planner.twins import PERF, options
from tests.simulation.arbiter import Arbiter
from tests.simulation.world import SimLoop, World, graph

COMPONENT = "VllmWorker"
OTHERS = LockHolder("other", "other_W", 1)


class EffectsWorld(Protocol):
    """`acts_take_time`: an act is under way for a while, so that its order can be seen."""

    acts_take_time: bool
    controller: FleetController
    effects: EffectRunner
    journal: list[str]

    def now_s(self) -> float:
        """The controller's time."""
        ...

    async def advance(self, seconds: float) -> None:
        """So much time passes; all that was begun and can end by then ends."""
        ...

    def taken_elsewhere(self, uuid: str) -> None:
        """Another namespace locks that device. Where nobody else can, `TypeError`."""
        ...

    def committed(self, name: str) -> str | None:
        """The worker's state as it was last written."""
        ...

    def hang(self, name: str) -> None:
        """The worker answers nothing any more. Where none can, `TypeError`."""
        ...

    def leaves_unheard(self, name: str) -> None:
        """Its lease is revoked from outside and it leaves; the controller hears of its exit first."""
        ...


def change(count: int) -> Scale:
    """`dynamo scale VllmWorker`"""
    return Scale(stimulus_id="test", component=COMPONENT, target=Change(count, relative=True), force=True)


class Recorder:
    """Notes what a controller asks of its effects. `on_begin` is called before each act begins."""

    def __init__(self, controller: FleetController, effects: Any) -> None:
        self.journal: list[str] = []
        self.states: dict[str, str] = {}
        self.on_begin: Callable[[Act], None] = lambda act: None
        self._commit, self._begin, self._tick = effects.commit, effects.begin, controller.tick
        effects.commit, effects.begin, controller.tick = self.commit, self.begin, self.tick  # type: ignore[method-assign]

    def commit(self, commit: Commit, fleet: Fleet, instructions: Sequence[Effect], then: Callable[[], None]) -> None:
        names = ", ".join(commit.names)
        self.journal.append(f"commit {names}".strip())

        def written() -> None:
            self.journal.append(f"written {names}".strip())
            for name in commit.names:
                found = fleet.workers.get(name)
                self.states[name] = "gone" if found is None else str(found.state)
            then()

        self._commit(commit, fleet, instructions, written)

    def begin(self, act: Act, worker: Worker | None, done: Done) -> None:
        what = f"{describe(act).split()[0]} {getattr(act, 'name', '')}".strip()
        self.journal.append(f"begin {what}")
        self.on_begin(act)

        def ended(seen: Event | None) -> None:
            self.journal.append(f"end {what}")
            done(seen)

        self._begin(act, worker, ended)

    def tick(self) -> None:
        self.journal.append("tick")
        self._tick()


class FakeWorld:
    """`FakeEffects`, played by the property machine's world."""

    acts_take_time = True

    def __init__(self) -> None:
        ledger = GpuLedger.of(SimInventory(4).sample())
        self.world = MachineWorld(Fleet("dynamo", (DECODE,), gpus=ledger))
        self.effects, self.controller = self.world.effects, self.world.controller
        self.controller.feed(change(1))
        for _ in range(5):
            self.world.settle()
        self.recorder = Recorder(self.controller, self.effects)
        self.journal = self.recorder.journal
        self.effects.wakes.clear()

    def now_s(self) -> float:
        return self.world.clock.now_s()

    async def advance(self, seconds: float) -> None:
        end_s = self.now_s() + seconds
        for _ in range(5):
            self.world.settle()
        while due := [at_s for at_s in self.effects.wakes if at_s <= end_s]:
            self.effects.wakes = [at_s for at_s in self.effects.wakes if at_s > end_s]
            for at_s in sorted(due):
                self.world.clock.at_s = max(self.now_s(), at_s)
                self.controller.tick()
                self.world.settle()
        self.world.clock.at_s = end_s

    def taken_elsewhere(self, uuid: str) -> None:
        self.effects.elsewhere[uuid] = str(OTHERS)

    def committed(self, name: str) -> str | None:
        return self.recorder.states.get(name)

    def hang(self, name: str) -> None:
        self.world.procs[self.controller.fleet.workers[name].pid or 0].hung = True

    def leaves_unheard(self, name: str) -> None:
        proc = self.world.procs[self.controller.fleet.workers[name].pid or 0]
        self.world.revoke(proc.lease)
        self.world.news.clear()
        self.world.end(proc, 0)


class HostWorld:
    """`ArbiterEffects` on the simulated host, with real locks between namespaces."""

    acts_take_time = True

    def __init__(self, loop: SimLoop, rng: random.Random, folder: Path) -> None:
        self.world = World(rng, loop, 4)
        spec = graph(1, 0, big=False)
        self._others = GpuLocks(folder)
        self.arbiter = Arbiter(self.world, spec, "run-1", locks=GpuLocks(folder))
        self.effects, self.controller = self.arbiter.effects, self.arbiter.controller
        self.recorder = Recorder(self.controller, self.effects)
        self.journal = self.recorder.journal

    async def start(self) -> None:
        """Until everybody serves."""
        await self.arbiter.foreground(self.arbiter.start())
        await self.advance(5.0)
        assert all(worker.ready for worker in self.controller.fleet.workers.values())
        self.journal.clear()

    async def close(self) -> None:
        """The arbiter dies; nothing of it runs any more."""
        self.arbiter.died()
        for process in self.world.living():
            self.world.exits(process, -9)
        await asyncio.sleep(1.0)
        self._others.close()
        self.arbiter.pool.close()
        if self.arbiter.failure is not None:
            raise self.arbiter.failure

    def now_s(self) -> float:
        return self.world.clock.now_s()

    async def advance(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def taken_elsewhere(self, uuid: str) -> None:
        self._others.acquire([uuid], OTHERS)

    def committed(self, name: str) -> str | None:
        entry = self.arbiter.statefile.store.read().components.get(name)
        return None if entry is None else str(entry.state)

    def hang(self, name: str) -> None:
        self.world.processes[self.controller.fleet.workers[name].pid or 0].signal(signal.SIGSTOP)

    def leaves_unheard(self, name: str) -> None:
        process = self.world.processes[self.controller.fleet.workers[name].pid or 0]
        etcd = self.world.etcd
        etcd.available = False
        etcd.advance(20.0)  # all leases end, its own too; the other worker registers again
        self.world.exits(process, 0)
        self.world.loop.call_later(1.0, setattr, etcd, "available", True)


class TwinWorld:
    """`VirtualFleet`. Everything but a start-up takes no time, there is no file, and nobody else is on the host."""

    acts_take_time = False

    def __init__(self) -> None:
        twin = replace(options(0, 1), start_up_s=0.5)
        self._agenda = Agenda()
        make = Simulation(twin, [], perf=PERF).flow.make_process
        self._now_s = 0.0
        self.effects = VirtualFleet(twin, self._agenda, make, 0.0)
        self.controller = self.effects.controller
        self.recorder = Recorder(self.controller, self.effects)
        self.journal = self.recorder.journal

    def now_s(self) -> float:
        return self._now_s

    async def advance(self, seconds: float) -> None:
        end_s = self._now_s + seconds
        while self._agenda.next_at_s is not None and self._agenda.next_at_s <= end_s:
            at_s, what, index = self._agenda.pop()
            self._now_s = at_s
            if what == What.EXIT:
                self.effects.exit_due(index, at_s)
            elif what == What.DEADLINE:
                self.effects.due(at_s)
            elif what == What.STARTED:
                self.effects.started(index, at_s)
        self._now_s = end_s

    def taken_elsewhere(self, uuid: str) -> None:
        raise TypeError("nobody else is on this host")

    def committed(self, name: str) -> str | None:
        return self.recorder.states.get(name)

    def hang(self, name: str) -> None:
        raise TypeError("nothing hangs here")

    def leaves_unheard(self, name: str) -> None:
        process = self.effects.processes[name]
        process.deregistered_s = self._now_s
        self.effects.check_exit(process, self._now_s)


@contextmanager
def on_a_loop(kind: str, folder: Path) -> Iterator[tuple[asyncio.Runner, EffectsWorld]]:
    """A world, and what runs coroutines in it. `kind` is fake, host or twin."""
    rng = random.Random(7)
    with asyncio.Runner(loop_factory=lambda: SimLoop(rng)) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SimLoop)
        if kind != "host":
            yield runner, FakeWorld() if kind == "fake" else TwinWorld()
            return
        host = runner.run(_made(loop, rng, folder))
        yield runner, host
        runner.run(host.close())


async def _made(loop: SimLoop, rng: random.Random, folder: Path) -> HostWorld:
    host = HostWorld(loop, rng, folder)
    await host.start()
    return host
