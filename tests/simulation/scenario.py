"""Shows what happens to a controller."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dynamo_local.core.fleet.fleet import Worker
from dynamo_local.core.types import WorkerState
from tests.simulation.arbiter import Arbiter
from tests.simulation.checks import always_served, check, check_sufficient
from tests.simulation.process import Fate, SimProcess
from tests.simulation.spares import mishaps
from tests.simulation.world import Broken, SimLoop, World, graph

SETTLES_WITHIN_S = 1_500.0
"""Virtual. The longest that anything may take: restarts with all their back-offs, drains, a GPU's memory."""
QUIET = (WorkerState.READY, WorkerState.FAULTED, WorkerState.SLEEPING)


@dataclass
class RunOutcome:
    """Shows what a run was, for those who look at many."""

    story: list[str] = field(default_factory=list)
    writes: int = 0
    actions: int = 0


Actions = Mapping[Callable[["Scenario"], None], int]
"""What may happen, each with its weight."""


class Scenario:
    """One seed's script on one world. `gentle`: nothing is forced, and somebody always serves."""

    def __init__(
        self,
        rng: random.Random,
        loop: SimLoop,
        actions: Actions,
        *,
        adopts: bool = False,
        gentle: bool = False,
        spares: int = 0,
    ) -> None:
        self.actions = actions
        self.adopts = adopts
        self.gentle = gentle
        self.rng = rng
        self.loop = loop
        big = rng.random() < 0.25
        self.graph = graph(rng.choice((1, 1, 2, 3)), rng.choice((0, 1, 1, 2)), big, rng.choice((None, 0, 0, 1, 2)))
        asked = sum(spec.workers * spec.resources.gpu for spec in self.graph.services)
        self.world = World(rng, loop, asked + rng.choice((0, 1, 1, 2, 3)))
        self.world.spares_wanted = spares
        self.runs = 0
        self.arbiter = self._arbiter()
        self.commands = 0
        self.passing: list[asyncio.TimerHandle] = []
        self.watching: asyncio.Task[None] | None = None

    def _arbiter(self, crash_at: int | None = None, crash_when: str = "before") -> Arbiter:
        self.runs += 1
        arbiter = Arbiter(self.world, self.graph, f"run-{self.runs}", crash_at=crash_at, crash_when=crash_when)
        return arbiter

    # --- the script ----------------------------------------------------------------------------------

    async def run(self, *, crash_at: int | None = None, crash_when: str = "before", steps: int | None = None) -> None:
        """Start, let things happen, calm down, see that all came right, leave."""
        self.arbiter.crash_at, self.arbiter.crash_when = crash_at, crash_when
        await self.arbiter.foreground(self.arbiter.start())
        await self._wait(self.rng.choice((0.0, 0.3, 2.0)))
        if self.gentle:
            await self._begin_gently()  # all spares are there once
        spoiling = asyncio.ensure_future(mishaps(self.world)) if self.world.spares_wanted else None
        for _ in range(steps or self.rng.randint(3, 14)):
            if self.arbiter.dead:
                await self._start_anew()
            self.rng.choices(list(self.actions), list(self.actions.values()))[0](self)
            await self._wait(self.rng.choice((0.0, 0.0, 0.01, 0.1, 0.5, self.rng.expovariate(0.3))))
        if spoiling is not None:
            spoiling.cancel()
        self.calm()
        if self.arbiter.dead:
            await self._start_anew()
        if not await self.settle():
            await self._start_anew()
            await self.settle()
        if self.watching is not None:
            self.watching.cancel()
        await self._leave()

    async def _begin_gently(self) -> None:
        """All have started; what a process asks of etcd takes its time from now on."""
        await self.settle()
        self.world.etcd_s = self.rng.choice((0.0, 0.02, 0.2))
        self.watching = asyncio.ensure_future(always_served(self.arbiter))

    async def _wait(self, seconds: float) -> None:
        """Let time pass, and look at everything a few times."""
        for _ in range(4):
            await asyncio.sleep(seconds / 4)
            check(self.arbiter)

    async def _start_anew(self) -> None:
        """The guardian's default after a crash: all workers are ended, their leases revoked; then `serve` again.

        With `adopts` they are kept, and `serve --adopt` takes them over where there is something to take over.
        """
        file = self.world.file
        intact = not file.edited and not file.full and not self.arbiter.statefile.unwritten
        if intact:
            check_sufficient(self.world)  # else the marks in the processes' environment are all there is
        file.edited = False
        if self.adopts and intact and file.text is not None and self.world.living():
            self.calm()
            self.world.note("another arbiter takes over")
            before, self.arbiter = self.arbiter, Arbiter(self.world, self.graph, f"run-{self.runs}")
            return await self.arbiter.foreground(self.arbiter.adopt(before))
        for process in self.world.living():
            self.world.exits(process, -signal.SIGKILL)
            if process.lease_id:
                await self._revoke(process.lease_id)
        self.world.file.text = None
        while self.world.gpus.busy & set(self._needed()) and self.loop.time() < 10_000:
            await asyncio.sleep(1.0)  # as `serve` does: it refuses to start on occupied devices
            if all(p.fate.memory_s is None for p in self.world.processes.values()):
                break
        self.world.gpus.busy.clear()
        self.calm()
        self.world.note("the arbiter is started again")
        self.arbiter = self._arbiter()
        await self.arbiter.foreground(self.arbiter.start())

    def _needed(self) -> list[str]:
        return [device.uuid for device in self.world.gpus.devices]

    async def _revoke(self, lease: int) -> None:
        await self.world.etcd.revoke(lease) if self.world.etcd.available else None

    def calm(self) -> None:
        """Nothing more goes wrong; what is wrong for good stays so."""
        world = self.world
        world.note("--- it calms down")
        for handle in self.passing:
            handle.cancel()
        world.etcd.available, world.nats.up, world.file.full = True, True, False
        world.flip_s, world.flips_fail = 0.05, False
        world.spare_fates = []
        world.fates, world.refusals, world.spawn_s, world.kind = [], [], 0.003, Fate()
        world.etcd.fail_next(0)
        for process in world.living():
            process.signal(signal.SIGCONT)
            process.hang(False)

    async def settle(self) -> bool:
        """Wait until nothing is under way, then look whether it is what was wanted. False: the arbiter died."""
        deadline_s = self.loop.time() + SETTLES_WITHIN_S
        still = 0
        while still < 3:
            if self.loop.time() > deadline_s:
                raise Broken(f"nothing comes to rest: {self._states()}")
            await asyncio.sleep(2.5)
            if self.arbiter.dead:
                return False
            check(self.arbiter)
            workers = self.arbiter.workers.values()
            still = still + 1 if all(self._rests(worker) for worker in workers) and self.arbiter.spares.full else 0
        self._check_wanted()
        self._check_registered()
        self._check_statefile()
        return True

    def _rests(self, worker: Worker) -> bool:
        """Nothing is under way with it. One that exited waits for its GPUs' memory, then its entry goes."""
        if worker.state is WorkerState.EXITED:
            return not worker.gpus and worker.name.count("_") == 1
        if worker.state is WorkerState.SLEEPING:
            return worker.standby.wanted
        if worker.state is WorkerState.READY and worker.standby.wanted:
            return False
        return worker.state in QUIET or self._starved(worker)

    def _states(self) -> dict[str, str]:
        return {w.name: f"{w.state}/{w.intent}" for w in self.arbiter.workers.values()}

    def _starved(self, worker: Worker) -> bool:
        """It waits for GPUs which will not come: what was never returned is quarantined."""
        needs = self.arbiter.controller.fleet.template_of(worker).gpus_per_worker
        return (
            worker.state in (WorkerState.PENDING, WorkerState.BACKING_OFF)
            and len(worker.gpus) < needs
            and len(self.arbiter.controller.fleet.gpus.free) < needs
        )

    def _check_wanted(self) -> None:
        workers = self.arbiter.workers
        starved = {w.name for w in workers.values() if self._starved(w)}
        serving = {w.name for w in workers.values() if w.state is WorkerState.READY}
        if serving != self.arbiter.wanted - starved:
            gone, over = self.arbiter.wanted - starved - serving, serving - self.arbiter.wanted
            raise Broken(f"wanted and not there: {gone or 'none'}; there and not wanted: {over or 'none'}")
        for worker in workers.values():
            if worker.state is WorkerState.FAULTED and worker.gpus:
                raise Broken(f"{worker.name} is {worker.state} and holds {worker.gpus}")

    def _check_registered(self) -> None:
        """Who serves is who the arbiter thinks serves."""
        for process in self.world.living():
            worker = self.arbiter.workers[process.name]
            asleep = worker.state is WorkerState.SLEEPING and process.standby.sleeping.asleep and not process.serves
            if not asleep and not (process.serves and worker.state is WorkerState.READY):
                raise Broken(f"{process.name}: serves {process.serves}, its entry is {worker.state}")

    def _check_statefile(self) -> None:
        state = check_sufficient(self.world)
        for name, worker in self.arbiter.workers.items():
            entry = state.components[name]
            facts = (entry.state, entry.pid, entry.resources.gpu_uuids or [], entry.lease)
            known = (worker.state, worker.pid, list(worker.gpus), worker.lease)
            if facts != known:
                raise Broken(f"{name}: the statefile says {facts}, the arbiter knows {known}")

    async def _leave(self) -> None:
        await self.arbiter.foreground(self.arbiter.leave())
        if self.arbiter.dead and not self.arbiter.left:
            await self._start_anew()
            await self.arbiter.foreground(self.arbiter.leave())
        if living := self.world.living():
            raise Broken(f"left behind: {[(process.name, process.pid) for process in living]}")
        if self.world.spares:
            raise Broken(f"spares left behind: {list(self.world.spares)}")

    # --- helpers of the actions ------------------------------------------------------------------------

    def forces(self, share: float) -> bool:
        """Whether a command is given with `--force`, as it is so often."""
        return self.rng.random() < share and not self.gentle

    def someone(self) -> SimProcess | None:
        """A process that lives."""
        living = self.world.living()
        return self.rng.choice(living) if living else None

    def some_name(self) -> str:
        """A worker's name; now and then one that does not exist."""
        names = [*self.arbiter.workers, "dynamo_VllmWorker_7"]
        return self.rng.choice(names)

    def some_component(self) -> str:
        return self.rng.choice([spec.name for spec in self.graph.services if spec.resources.gpu])

    def stimulus(self) -> str:
        self.commands += 1
        return f"command:{self.commands}"

    def later(self, action: Callable[[], None], most_s: float = 15.0) -> None:
        """Something that passes by itself."""
        delay_s = self.rng.choice((0.05, 0.5, 3.0, self.rng.uniform(0.0, most_s)))
        self.passing.append(self.loop.call_later(delay_s, action))
