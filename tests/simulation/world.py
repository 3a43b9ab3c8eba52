"""A host that exists in memory: its processes, GPUs, etcd, NATS and statefile, and the controller that runs on it.

Time is virtual. Shows what goes to threads in the product (statefile, event log, NVML) happens here some milliseconds
later on the same loop. Everything that is random comes from one seed, so a run can be had again.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dynamo_local.arbiter.deployment import Settings, WatcherFactory
from dynamo_local.clock import AsyncioClock, VirtualTimeLoop
from dynamo_local.core.fleet.effects import Commit, Effect, Transition
from dynamo_local.core.gpus import GpuDevice
from dynamo_local.core.prewarmed import is_prewarmed
from dynamo_local.core.types import GraphSpec, Resources, Role, ServiceSpec
from dynamo_local.system.gpus import SimInventory
from dynamo_local.system.paths import Paths
from dynamo_local.system.process_host import ExitCallback, LaunchSpec
from tests.fakes.arbiter.memory_store import MemoryFile
from tests.fakes.infra.etcd import FakeEtcd
from tests.fakes.infra.memory_nats import MemoryNats
from tests.simulation.process import Fate, SimProcess
from tests.simulation.spares import SimSpare, SpareFate

NAMESPACE = "dynamo"
FIRST_PID = 2**23
"""Above what Linux gives: a stray real `kill` finds nobody."""
BUSY_BYTES = 40 * 1024**3


class Broken(AssertionError):
    """An invariant does not hold."""


class Crash(BaseException):
    """The arbiter dies here, as by `kill -9`."""


class SimLoop(VirtualTimeLoop):
    """Virtual time, and threads that are none: their work is done at once, 1 to 20 virtual milliseconds later."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self.blocking = 0
        self.on_crash: Callable[[], None] = lambda: None

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """What `asyncio.to_thread` calls. As with a thread, cancelling the caller does not undo the work."""
        future: asyncio.Future[Any] = self.create_future()
        self.blocking += 1

        def work() -> None:
            self.blocking -= 1
            try:
                result = func(*args)
            except Crash:
                self.on_crash()
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(self._rng.uniform(0.001, 0.02), work)
        return future


class SimClock(AsyncioClock):
    """The loop's time, and a wall clock that somebody may set."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def wall_s(self) -> float:
        return 1.8e9 + self.now_s() + self.ahead_s


class SimGpus:
    """Devices whose memory shows who is, or was, on them."""

    simulated = True

    def __init__(self, count: int) -> None:
        self.devices = SimInventory(count).sample()
        self.busy: set[str] = set()
        self._full = {device.uuid: replace(device, memory_used_bytes=BUSY_BYTES) for device in self.devices}

    def sample(self) -> tuple[GpuDevice, ...]:
        """See `Inventory`."""
        return tuple(self._full[d.uuid] if d.uuid in self.busy else d for d in self.devices)

    def close(self) -> None:
        """See `Inventory`."""


class NoLocks:
    """Nobody else is on this host."""

    def acquire(self, uuids: Any, holder: Any) -> None: ...
    def try_acquire(self, uuids: Any, holder: Any) -> None: ...
    def take_free(self, uuids: Any, holder: Any) -> None: ...
    def release(self, uuids: Any) -> None: ...
    def close(self) -> None: ...

    def held(self) -> frozenset[str]:
        return frozenset()

    def fds_for(self, uuids: Any) -> list[int]:
        return []

    def holders_of(self, uuids: Any) -> dict[str, str]:
        return {}


def graph(decode: int, prefill: int, big: bool, standby: int | None = None) -> GraphSpec:
    """A frontend, decode workers, perhaps prefill workers, and perhaps a component that needs two GPUs at once."""
    one = Resources(gpu=1)
    services = [
        ServiceSpec("Frontend", Role.FRONTEND),
        ServiceSpec("VllmWorker", Role.DECODE, workers=decode, resources=one, standby=standby),
    ]
    if prefill:
        services[-1] = replace(services[-1], flips_to="PrefillWorker")
        services.append(
            ServiceSpec(
                "PrefillWorker",
                Role.PREFILL,
                workers=prefill,
                resources=one,
                standby=standby and 0,
                flips_to="VllmWorker",
            )
        )
    if big:
        services.append(ServiceSpec("Router", Role.OTHER, workers=1, resources=Resources(gpu=2)))
    return GraphSpec(NAMESPACE, "graphs.sim:Frontend", tuple(services))


def factory_for(spec: GraphSpec, run_id: str) -> WatcherFactory:
    """How workers are run; nothing of it exists on disk."""
    root = Path("/simulated")
    return WatcherFactory(
        graph=spec,
        settings=Settings(start_deadline_s=20.0, drain_deadline_s=15.0),
        paths=Paths(NAMESPACE, root / "run", root / "state.json", root / "logs"),
        run_id=run_id,
        cwd=root,
        service_config_json="{}",
        base_env={},
    )


class World:
    """Everything that outlives an arbiter."""

    namespace = NAMESPACE

    def __init__(self, rng: random.Random, loop: SimLoop, gpus: int) -> None:
        self.rng = rng
        self.loop = loop
        self.clock = SimClock()
        self.etcd = FakeEtcd()
        self.nats = MemoryNats()
        self.file = MemoryFile()
        self.gpus = SimGpus(gpus)
        self.processes: dict[int, SimProcess] = {}
        self.revoked_outside: set[int] = set()
        aside = random.Random()
        aside.setstate(rng.getstate())  # what a seed chooses beside does not change
        self.restart_revoked = aside.random() < 0.25
        self.fates: list[Fate] = []
        self.refusals: list[OSError] = []
        self.spawn_s = 0.003
        self.etcd_s = 0.0
        self.flip_s = 0.05
        self.flips_fail = False
        self.kind = Fate()
        self.spares_wanted = 0
        self.spares: dict[int, SimSpare] = {}
        self.spare_fates: list[SpareFate] = []
        self.host: SimHost | None = None
        self.story: list[str] = []
        self._pids = itertools.count(FIRST_PID)

    def note(self, text: str) -> None:
        """One line of what happened, shown when the seed fails."""
        self.story.append(f"{self.loop.time():8.3f}  {text}")

    # --- processes -------------------------------------------------------------------------------

    def living(self) -> list[SimProcess]:
        """Those that run, by pid."""
        return [process for process in self.processes.values() if process.alive]

    def spawn(self, spec: LaunchSpec, pid: int | None = None) -> SimProcess:
        """A new process, or what that one is from now on. Two on one GPU, or one on memory that was not returned, is
        what must never be."""
        fate = self.fates.pop(0) if self.fates else self.kind
        pid = next(self._pids) if pid is None else pid
        process = SimProcess(self, pid, spec, fate)
        for other in self.living():
            if process.name in (other.name, other.spec.name):
                raise Broken(f"{process.name} has a second process, {pid} beside {other.pid}")
            if other.standby.on_gpus and (shared := set(other.gpus) & set(process.gpus)):
                raise Broken(f"{process.name} is started on {shared}, which {other.name} is on")
        if unreturned := set(process.gpus) & self.gpus.busy:
            raise Broken(f"{process.name} is started on {unreturned}, whose memory was not returned")
        self.processes[pid] = process
        self.gpus.busy.update(process.gpus)
        self.note(f"{process.name} started as {pid} on {[uuid[-1] for uuid in process.gpus]}, {fate}")
        return process

    def spare(self, spec: LaunchSpec) -> SimSpare:
        """A new spare."""
        fate = self.spare_fates.pop(0) if self.spare_fates else SpareFate()
        spare = SimSpare(self, next(self._pids), spec, fate)
        self.spares[spare.pid] = spare
        self.note(f"{spec.name} started as {spare.pid}, {fate}")
        return spare

    def becomes(self, spare: SimSpare, spec: LaunchSpec) -> None:
        """It is a worker from now on."""
        del self.spares[spare.pid]
        self.note(f"{spare.spec.name} ({spare.pid}) becomes {spec.name}")
        self.spawn(spec, spare.pid)

    def spare_exits(self, spare: SimSpare, code: int) -> None:
        """It is gone, unless it is a worker by now."""
        if self.spares.pop(spare.pid, None) is None:
            return
        spare.die()
        self.note(f"{spare.spec.name} ({spare.pid}) is gone, code {code}")
        if self.host is not None:
            self.loop.call_later(self.rng.uniform(0.0, 0.01), self.host.exited, spare, code)

    def let_go(self, process: SimProcess) -> None:
        """It sleeps: its memory is free at once, but for a residue that is too little to be seen."""
        self.gpus.busy.difference_update(process.gpus)
        self.note(f"{process.name} ({process.pid}) sleeps")

    def takes(self, process: SimProcess) -> None:
        """It wakes, on devices that nobody else may be on."""
        for other in self.living():
            if other is not process and other.standby.on_gpus and (shared := set(other.gpus) & set(process.gpus)):
                raise Broken(f"{process.name} wakes on {shared}, which {other.name} is on")
        if unreturned := set(process.gpus) & self.gpus.busy:
            raise Broken(f"{process.name} wakes on {unreturned}, whose memory was not returned")
        self.gpus.busy.update(process.gpus)
        self.note(f"{process.name} ({process.pid}) wakes")

    def exits(self, process: SimProcess, code: int) -> None:
        """The process is gone; its memory comes back when its fate says so."""
        if not process.alive:
            return
        process.die()
        self.note(f"{process.name} ({process.pid}) is gone, code {code}")
        if process.fate.memory_s is not None and process.standby.on_gpus:
            self.loop.call_later(process.fate.memory_s, self.gpus.busy.difference_update, process.gpus)
        if self.host is not None:
            self.loop.call_later(self.rng.uniform(0.0, 0.01), self.host.exited, process, code)

    def kill(self, pid: int, signum: int = signal.SIGKILL) -> None:
        """`kill -9`: it takes the kernel a moment, and a stuck driver longer."""
        if (spare := self.spares.get(pid)) is not None:
            self.spare_exits(spare, -signum)
        process = self.processes.get(pid)
        if process is not None and process.alive:
            self.loop.call_later(process.fate.dies_in_s, self.exits, process, -signum)

    def send_signal(self, pid: int, signum: int) -> None:
        """`os.kill`, whoever is there."""
        process = self.processes.get(pid)
        if process is not None and process.alive:
            process.signal(signum)


class SimHost:
    """The `ProcessHost` of one arbiter; after its death nothing of it has an effect."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.dead = False
        self.on_exit: ExitCallback | None = None
        self.called: dict[int, str] = {}

    def rename(self, was: str, name: str, pid: int) -> None:
        """See `ProcessHost`."""
        self.called[pid] = name

    def adopt_process(self, spec: LaunchSpec, pid: int) -> None:
        """See `AdoptingHost`."""
        if not self.world.processes[pid].alive:
            raise ProcessLookupError(pid)
        self.called[pid] = spec.name

    async def start_process(self, spec: LaunchSpec) -> int:
        """See `ProcessHost`."""
        await asyncio.sleep(self.world.spawn_s)
        if self.dead:
            raise asyncio.CancelledError
        if self.world.refusals:
            raise self.world.refusals.pop(0)
        if is_prewarmed(spec.name, NAMESPACE):
            pid = self.world.spare(spec).pid
            self.called[pid] = spec.name  # whatever it becomes, until it is renamed
            return pid
        return self.world.spawn(spec).pid

    def rename_process(self, name: str, spec: LaunchSpec) -> int:
        """See `PrewarmingHost`."""
        for pid, called in self.called.items():
            if called == name and pid in self.world.processes and self.world.processes[pid].alive:
                self.called[pid] = spec.name
                return pid
        raise ProcessLookupError(f"{name} has ended")

    async def end(self, pid: int, timeout_s: float) -> None:
        """SIGKILL; returns when it is gone, or past the timeout."""
        self.world.kill(pid)
        deadline_s = self.world.loop.time() + timeout_s
        while self.world.loop.time() < deadline_s:
            if pid not in self.world.spares and pid not in {process.pid for process in self.world.living()}:
                return
            await asyncio.sleep(0.01)

    async def forget(self, name: str) -> None:
        """See `ProcessHost`."""

    def exited(self, process: SimProcess | SimSpare, code: int) -> None:
        """Told by the world."""
        if self.on_exit is not None and not self.dead:
            self.on_exit(self.called.get(process.pid, process.spec.name), process.pid, code)


class MemoryEvents:
    """The event log, as a list."""

    def __init__(self) -> None:
        self.transitions: list[Transition] = []

    async def append(self, commit: Commit, effects: Sequence[Effect]) -> None:
        """See `EventWriter`."""
        self.transitions += commit.transitions


class SimSystem:
    """The operating system of this world. See `arbiter.arbiter_effects.System`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def send_signal(self, pid: int, signum: int) -> None:
        """See `System`."""
        self._world.send_signal(pid, signum)

    async def end_session(self, pid: int) -> None:
        """See `System`."""
        self._world.kill(pid)

    def start_time_s(self, pid: int) -> float | None:
        """See `System`."""
        return float(pid)

    async def end_children(self, name: str) -> list[str]:
        """See `System`. Processes here have no children, but a live one of that mark would be ended with them."""
        if found := [each for each in self._world.living() if each.spec.name == name != each.name]:
            raise Broken(f"the sweep of {name} ends {[(each.name, each.pid) for each in found]}")
        return []

    def put_log_aside(self, path: Path) -> None:
        """See `System`. There are no files here."""
