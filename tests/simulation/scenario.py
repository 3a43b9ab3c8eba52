"""What happens to a shell: a script that a seed writes, and the end, at which everything must have come right."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from dynamo_local.core.types import WorkerState
from dynamo_local.serve.fleet import Worker
from tests.simulation.process import Fate, SimProcess
from tests.simulation.shell import Shell, check_sufficient
from tests.simulation.world import Broken, SimLoop, World, graph, simulated_system

SETTLES_WITHIN_S = 1_500.0
"""Virtual. The longest that anything may take: restarts with all their back-offs, drains, a GPU's memory."""
QUIET = (WorkerState.READY, WorkerState.FAULTED)


@dataclass
class Outcome:
    """What a run was, for those who look at many."""

    story: list[str] = field(default_factory=list)
    writes: int = 0
    actions: int = 0


class Scenario:
    """One seed's script on one world."""

    def __init__(self, rng: random.Random, loop: SimLoop) -> None:
        self.rng = rng
        self.loop = loop
        big = rng.random() < 0.25
        self.graph = graph(rng.choice((1, 1, 2, 3)), rng.choice((0, 1, 1, 2)), big)
        asked = sum(spec.workers * spec.resources.gpu for spec in self.graph.services)
        self.world = World(rng, loop, asked + rng.choice((0, 1, 1, 2, 3)))
        self.runs = 0
        self.shell = self._shell()
        self.commands = 0
        self.passing: list[asyncio.TimerHandle] = []

    def _shell(self, crash_at: int | None = None, crash_when: str = "before") -> Shell:
        self.runs += 1
        shell = Shell(self.world, self.graph, f"run-{self.runs}", crash_at=crash_at, crash_when=crash_when)
        shell.follow_decisions()
        return shell

    # --- the script ----------------------------------------------------------------------------------

    async def run(self, *, crash_at: int | None = None, crash_when: str = "before", steps: int | None = None) -> None:
        """Start, let things happen, calm down, see that all came right, leave."""
        self.shell.crash_at, self.shell.crash_when = crash_at, crash_when
        await self.shell.start()
        await self._wait(self.rng.choice((0.0, 0.3, 2.0)))
        for _ in range(steps or self.rng.randint(3, 14)):
            if self.shell.dead:
                await self._start_anew()
            self.rng.choices(list(ACTIONS), list(ACTIONS.values()))[0](self)
            await self._wait(self.rng.choice((0.0, 0.0, 0.01, 0.1, 0.5, self.rng.expovariate(0.3))))
        self.calm()
        if self.shell.dead:
            await self._start_anew()
        await self.settle()
        await self._leave()

    async def _wait(self, seconds: float) -> None:
        """Let time pass, and look at everything a few times."""
        for _ in range(4):
            await asyncio.sleep(seconds / 4)
            self.shell.check()

    async def _start_anew(self) -> None:
        """The guardian's default after a crash: all workers are ended, their leases revoked; then `serve` again."""
        check_sufficient(self.world)
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
        self.shell = self._shell()
        await self.shell.start()

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
        world.fates, world.refusals, world.spawn_s, world.kind = [], [], 0.003, Fate()
        world.etcd.fail_next(0)
        for process in world.living():
            process.signal(signal.SIGCONT)
            process.hang(False)

    async def settle(self) -> None:
        """Wait until nothing is under way, then look whether it is what was wanted."""
        deadline_s = self.loop.time() + SETTLES_WITHIN_S
        still = 0
        while still < 3:
            if self.loop.time() > deadline_s:
                raise Broken(f"nothing comes to rest: {self._states()}")
            await asyncio.sleep(2.5)
            self.shell.check()
            workers = self.shell.fleet.workers.values()
            still = still + 1 if all(self._rests(worker) for worker in workers) else 0
        self._check_wanted()
        self._check_registered()
        self._check_statefile()

    def _rests(self, worker: Worker) -> bool:
        """Nothing is under way with it. One that exited waits for its GPUs' memory, then its entry goes."""
        if worker.state is WorkerState.EXITED:
            return not worker.gpus and worker.name.count("_") == 1
        return worker.state in QUIET or self._starved(worker)

    def _states(self) -> dict[str, str]:
        return {w.name: f"{w.state}/{w.course}" for w in self.shell.fleet.workers.values()}

    def _starved(self, worker: Worker) -> bool:
        """It waits for GPUs which will not come: what was never returned is quarantined."""
        needs = worker.plan.gpus_per_worker
        return (
            worker.state in (WorkerState.PENDING, WorkerState.BACKING_OFF)
            and len(worker.gpus) < needs
            and len(self.shell.pool.ledger.free()) < needs
        )

    def _check_wanted(self) -> None:
        workers = self.shell.fleet.workers
        starved = {w.name for w in workers.values() if self._starved(w)}
        serving = {w.name for w in workers.values() if w.state is WorkerState.READY}
        if serving != self.shell.wanted - starved:
            gone, over = self.shell.wanted - starved - serving, serving - self.shell.wanted
            raise Broken(f"wanted and not there: {gone or 'none'}; there and not wanted: {over or 'none'}")
        for worker in workers.values():
            if worker.state is WorkerState.FAULTED and worker.gpus:
                raise Broken(f"{worker.name} is {worker.state} and holds {worker.gpus}")

    def _check_registered(self) -> None:
        """Who serves is who the arbiter thinks serves."""
        for process in self.world.living():
            worker = self.shell.fleet.workers[process.name]
            if not process.serves or worker.state is not WorkerState.READY:
                raise Broken(f"{process.name}: serves {process.serves}, its entry is {worker.state}")

    def _check_statefile(self) -> None:
        state = check_sufficient(self.world)
        for name, worker in self.shell.fleet.workers.items():
            entry = state.components[name]
            facts = (entry.state, entry.pid, entry.resources.gpu_uuids or [], entry.lease)
            known = (worker.state, worker.pid, [device.uuid for device in worker.gpus], worker.lease)
            if facts != known:
                raise Broken(f"{name}: the statefile says {facts}, the arbiter knows {known}")

    async def _leave(self) -> None:
        await self.shell.leave()
        if living := self.world.living():
            raise Broken(f"left behind: {[(process.name, process.pid) for process in living]}")

    # --- helpers of the actions ------------------------------------------------------------------------

    def someone(self) -> SimProcess | None:
        """A process that lives."""
        living = self.world.living()
        return self.rng.choice(living) if living else None

    def some_name(self) -> str:
        """A worker's name; now and then one that does not exist."""
        names = [*self.shell.fleet.workers, "dynamo_VllmWorker_7"]
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


# --- the actions ---------------------------------------------------------------------------------------


def scale(it: Scenario) -> None:
    """One more, one fewer, or a number."""
    rng = it.rng
    target = rng.choice(("+1", "+1", "+2", "-1", "-1", "=1", "=2", "=3", "=0"))
    policy = rng.choice((None, "least-loaded", "coldest"))
    force = rng.random() < 0.2
    it.shell.run(it.shell.scale(it.some_component(), target, force=force, policy=policy, stimulus_id=it.stimulus()))


def drain(it: Scenario) -> None:
    """One by its name."""
    force = it.rng.random() < 0.2
    it.shell.run(it.shell.drain(it.some_name(), cancel=False, force=force, stimulus_id=it.stimulus()))


def cancel(it: Scenario) -> None:
    """Of one that drains, if one does."""
    draining = [w.name for w in it.shell.fleet.workers.values() if w.state is WorkerState.DRAINING]
    name = it.rng.choice(draining) if draining else it.some_name()
    it.shell.run(it.shell.drain(name, cancel=True, force=False, stimulus_id=it.stimulus()))


def restart(it: Scenario) -> None:
    """One, or all of a component."""
    target = it.rng.choice((it.some_name(), it.some_component()))
    it.shell.run(it.shell.restart(target, force=it.rng.random() < 0.2, stimulus_id=it.stimulus()))


def crash(it: Scenario) -> None:
    """A worker dies: a signal, a code, or 0 without having been asked."""
    if (process := it.someone()) is not None:
        it.world.note(f"* {process.name} ({process.pid}) dies")
        it.world.exits(process, it.rng.choice((-9, -11, 0, 1, 137)))


def stop(it: Scenario) -> None:
    """SIGSTOP, and SIGCONT some time later, perhaps past its lease."""
    if (process := it.someone()) is not None:
        it.world.note(f"* {process.name} ({process.pid}) is stopped")
        process.signal(signal.SIGSTOP)
        it.later(lambda: process.signal(signal.SIGCONT), 40.0)


def hang(it: Scenario) -> None:
    """It answers nothing; its lease lives."""
    if (process := it.someone()) is not None:
        it.world.note(f"* {process.name} ({process.pid}) hangs")
        process.hang(True)
        it.later(lambda: process.hang(False), 60.0)


def revoke(it: Scenario) -> None:
    """Somebody revokes a lease by hand."""
    process = it.someone()
    if process is not None and process.lease_id and it.world.etcd.available:
        it.world.note(f"* the lease of {process.name} ({process.pid}) is revoked from outside")
        it.world.revoked_outside.add(process.pid)
        it.shell.run(it.world.etcd.revoke(process.lease_id))


def etcd_away(it: Scenario) -> None:
    """etcd is killed, and comes back with its data, or without."""
    lost = it.rng.random() < 0.3
    it.world.note(f"* etcd goes away{', and loses its data' * lost}")
    it.world.etcd.available = False
    it.later(lambda: it.world.etcd.restart(lose_data=lost), 25.0)


def nats_away(it: Scenario) -> None:
    """NATS is killed, and comes back."""
    it.world.note("* NATS goes away")
    it.world.nats.up = False

    def back() -> None:
        it.world.nats.up = True

    it.later(back, 25.0)


def disk_full(it: Scenario) -> None:
    """No room for the statefile, for a while."""
    it.world.note("* the disk is full")
    it.world.file.full = True

    def room() -> None:
        it.world.file.full = False

    it.later(room)


def edit(it: Scenario) -> None:
    """Somebody edits, cuts or removes the statefile."""
    file = it.world.file
    if file.text is None:
        return
    kind = it.rng.choice(("cut", "garbage", "removed", "entries", "run", "pid"))
    it.world.note(f"* the statefile: {kind}")
    if kind == "cut":
        file.text = file.text[: len(file.text) // 2]
    elif kind == "garbage":
        file.text = "\x00\x01 not a statefile"
    elif kind == "removed":
        file.text = None
    elif kind == "entries":
        file.text = file.text.replace('"dynamo_VllmWorker"', '"dynamo_Vllm"')
    elif kind == "run":
        file.text = file.text.replace('"run-', '"walk-')
    else:
        file.text = file.text.replace('"pid": ', '"pid": 1')
    file.edited = True
    file.version += 1


def refuse(it: Scenario) -> None:
    """The next processes cannot be made."""
    it.world.refusals += [OSError(12, "Cannot allocate memory")] * it.rng.choice((1, 1, 2, 6))


def slow_spawn(it: Scenario) -> None:
    """Making a process takes long."""
    it.world.spawn_s = it.rng.choice((0.003, 0.5, 5.0))


def fates(it: Scenario) -> None:
    """How the next processes behave."""
    rng = it.rng
    bad = (
        Fate(start_code=1, start_s=0.2),
        Fate(start_code=0, start_s=1.0),
        Fate(start_s=None),
        Fate(work_s=40.0),
        Fate(work_s=8.0, dies_in_s=4.0),
        Fate(memory_s=3.0),
        Fate(memory_s=60.0),
        Fate(memory_s=None),
        Fate(start_s=9.0),
    )
    it.world.fates += rng.choices(bad, k=rng.choice((1, 2, 2, 7)))


def many(it: Scenario) -> None:
    """Commands without end, all at once."""
    for _ in range(it.rng.choice((5, 12))):
        it.rng.choice((scale, drain, cancel, restart))(it)


def clock_jumps(it: Scenario) -> None:
    """Somebody sets the wall clock."""
    it.world.clock.ahead_s += it.rng.choice((-86_400.0, -3.0, 3.0, 86_400.0))


ACTIONS: dict[Callable[[Scenario], None], int] = {
    scale: 26,
    drain: 12,
    cancel: 12,
    restart: 8,
    crash: 14,
    stop: 6,
    hang: 4,
    revoke: 5,
    etcd_away: 6,
    nats_away: 5,
    disk_full: 5,
    edit: 5,
    refuse: 4,
    slow_spawn: 4,
    fates: 12,
    many: 4,
    clock_jumps: 2,
}


def run_seed(
    seed: int, *, crash_at: int | None = None, crash_when: str = "before", steps: int | None = None
) -> Outcome:
    """One whole run. Raises `Broken` whose notes are the story."""
    rng = random.Random(seed)
    made: list[Scenario] = []
    with asyncio.Runner(loop_factory=lambda: SimLoop(rng)) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SimLoop)

        async def main() -> None:
            scenario = Scenario(rng, loop)
            made.append(scenario)
            with simulated_system(scenario.world):
                try:
                    await scenario.run(crash_at=crash_at, crash_when=crash_when, steps=steps)
                finally:
                    for process in scenario.world.living():
                        process.die()
                    scenario.shell.died()
                    await asyncio.sleep(0)

        try:
            runner.run(main())
        except BaseException as error:
            for line in made[0].world.story if made else ():
                error.add_note(line)
            raise
    scenario = made[0]
    return Outcome(scenario.world.story, scenario.shell.writes, scenario.commands)
