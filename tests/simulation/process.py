"""A simulated worker process: the real lease keeper, drain and control endpoint; no engine, no operating system."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_local.core.types import instance_key, lease_hex, lease_key, ready_key
from dynamo_local.errors import DynamoError, EtcdUnavailable
from dynamo_local.system.process_host import LaunchSpec
from dynamo_local.transport.control import ControlServer
from dynamo_local.transport.lease import LeaseKeeper
from dynamo_local.transport.load import WireLoad, WireReport, load_subject
from dynamo_local.worker.drain import Drain, Phase
from dynamo_local.worker.process import Entry, EntryWriter
from tests.fakes.arbiter.memory_store import MemoryStore
from tests.simulation.process_kv import ProcessKv
from tests.simulation.role_changes import RoleChanges
from tests.simulation.standby import SimStandby

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass(frozen=True, slots=True)
class Fate:
    """How one process will behave. `start_s` None: never ready; `start_code`: it exits with that instead of serving.

    `wake_s` None: it never wakes.
    """

    start_s: float | None = 0.5
    start_code: int | None = None
    work_s: float = 1.0
    dies_in_s: float = 0.003
    memory_s: float | None = 0.2
    wake_s: float | None = 0.3
    wakes_badly: bool = False
    recycles_after: int | None = None
    cannot_sleep: str | None = None


class SimProcess(RoleChanges):
    """One process. Everything of it ends with `die`; its exit is the world's to tell."""

    def __init__(self, world: World, pid: int, spec: LaunchSpec, fate: Fate) -> None:
        self.world = world
        self.pid = pid
        self.spec = spec
        self.fate = fate
        self.name = spec.name
        self.component = spec.argv[-1]
        self.gpus = tuple(uuid for uuid in spec.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if uuid)
        self.alive = True
        self.nats = world.nats.client()
        self._go = asyncio.Event()
        self._go.set()
        self._kv = ProcessKv(world, self._go)
        self._store = MemoryStore(world.file, run_id=spec.env["DYN_RUN_ID"])
        self._entry = EntryWriter(self._store, self.name, self._truth)
        self._lease: LeaseKeeper | None = None
        self._leases: list[LeaseKeeper] = []
        self._keys: dict[str, tuple[Callable[[int], str], Callable[[int], str]]] = {}
        self._endpoint_keys: dict[str, Callable[[int], str]] = {}
        self._control: ControlServer | None = None
        self._flipping: asyncio.Task[None] | None = None
        self._becomes = ""
        self._past = False
        self._lease_gone = self._registered = False
        self._follows = True
        self.drain = Drain(self)
        self.standby = SimStandby(self)
        self._ending: asyncio.Future[None] | None = None
        self._tasks = {asyncio.ensure_future(self._main())}

    # --- what is done to it ----------------------------------------------------------------------

    @property
    def lease_id(self) -> int:
        """0 before it has one, or when it has given it back."""
        return 0 if self._lease is None or self._lease_gone else self._lease.lease_id

    @property
    def serves(self) -> bool:
        """It is registered, or says so."""
        return self.alive and self._registered

    @property
    def stopped(self) -> bool:
        """By SIGSTOP."""
        return not self._go.is_set()

    def signal(self, signum: int) -> None:
        """SIGTERM begins a drain (once it goes on, where it is stopped), SIGSTOP and SIGCONT stop it and go on."""
        if signum == signal.SIGSTOP:
            self._go.clear()
            self.nats.go.clear()
        elif signum == signal.SIGCONT:
            self._go.set()
            self.nats.go.set()
        elif signum == signal.SIGTERM:
            self._spawn(self._sigterm())

    def hang(self, hangs: bool) -> None:
        """Its loop for answers hangs; its lease lives on."""
        if hangs:
            self.nats.go.clear()
        else:
            self.nats.go.set()

    def die(self) -> None:
        """Nothing of it runs any more."""
        self.alive = False
        self.nats.close_now()
        self._go.clear()  # what its parts still ask of etcd until they have ended, a lease's return, is asked by nobody
        for task in (*self._tasks, self._flipping):
            if task is not None:
                task.cancel()
        self._ending = asyncio.ensure_future(self._end_parts())

    async def _end_parts(self) -> None:
        parts = self.drain, self.standby.sleeping, self._entry, *self._leases
        await asyncio.gather(*(part.close() for part in parts), return_exceptions=True)

    async def _sigterm(self) -> None:
        await self._go.wait()
        self.drain.begin("SIGTERM")

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- its life ----------------------------------------------------------------------------------

    async def _main(self) -> None:
        code = 1
        try:
            code = await self._live()
        except DynamoError:
            code = 1  # etcd or NATS stayed away for too long
        finally:
            if self.alive and not _cancelled_now():
                self.world.exits(self, code)

    async def _live(self) -> int:
        if self.fate.start_code is not None:
            await asyncio.sleep(self.fate.start_s or 0.0)
            return self.fate.start_code
        starting = asyncio.ensure_future(self._start())
        self._tasks.add(starting)
        await asyncio.wait({starting, self.drain.left}, return_when=asyncio.FIRST_COMPLETED)
        if not self.drain.left.done() or starting.done():
            await starting
        else:
            starting.cancel()
        self.drain.started()
        await self.drain.left
        await self.drain.close()
        if self._lease is not None and self._lease.lease_id and not self._lease_gone:
            try:
                await self._give_back(2.0)
            except EtcdUnavailable:
                pass  # as the real one: it expires by itself
        await self._go.wait()
        return 0

    async def _start(self) -> None:
        while not self.nats.is_connected:
            await asyncio.sleep(0.1)
        self._control = await self._answer(self.name)
        self._lease = await self._granted(self.name)
        self._spawn(self._until_revoked())
        self._entry.touch()
        if self.fate.start_s is None:
            await asyncio.Event().wait()
        await asyncio.sleep(self.fate.start_s or 0.0)
        await self._go.wait()
        await self.nats.subscribe(load_subject(self.world.namespace), cb=self._on_load_request)
        self._registered = True
        self._entry.touch()
        await self._lease.register(self._endpoint_of(self.component), _about_nothing)
        await self._entry.flush(2.0)
        await self._lease.register(self._keys_of(self.name)[1], self._ready_value)

    async def _answer(self, name: str) -> ControlServer:
        ops = {
            "status": self._op_status,
            "cancel_drain": self._op_cancel,
            "flip": self._op_flip,
            "cancel_flip": self._op_cancel_flip,
            "sleep": self.standby.op_sleep,
            "wake": self.standby.op_wake,
        }
        control = ControlServer(self.nats, self.world.namespace, name, ops)  # type: ignore[arg-type]
        await control.start()
        return control

    async def _granted(self, name: str) -> LeaseKeeper:
        lease = LeaseKeeper(
            self._kv,  # type: ignore[arg-type]
            is_draining=self._is_draining,
            on_regrant=self._on_regrant,
            ttl_s=10,
            clock=self.world.clock,
        )
        self._leases.append(lease)
        await lease.start()
        about = json.dumps({"pid": self.pid}).encode()
        await lease.register(self._keys_of(name)[0], lambda _lease: about)
        return lease

    def _keys_of(self, name: str) -> tuple[Callable[[int], str], Callable[[int], str]]:
        """Its lease's key and its ready key under that name: the same functions each time."""
        names = self.world.namespace, name
        return self._keys.setdefault(name, (partial(lease_key, *names), partial(ready_key, *names)))

    def _endpoint_of(self, component: str) -> Callable[[int], str]:
        """The key by which that component's clients find it."""
        where = self.world.namespace, component, "generate"
        return self._endpoint_keys.setdefault(component, partial(instance_key, *where))

    async def _until_revoked(self) -> None:
        assert self._lease is not None
        while True:
            lease = self._lease
            waiting = asyncio.ensure_future(lease.revoked.wait())
            await asyncio.wait({waiting}, timeout=1.0)
            waiting.cancel()
            if self._lease is not lease or not lease.revoked.is_set():
                continue
            if self._follows:
                self.drain.begin("its lease was revoked")
            while self._lease.revoked.is_set():
                await asyncio.sleep(0.05)

    async def _is_draining(self) -> bool:
        return self.drain.phase in (Phase.DRAINING, Phase.LEAVING) or await self._entry.drains()

    async def _on_regrant(self, _lease: int) -> None:
        self._entry.touch()

    def _endpoints(self, lease: int) -> list[str]:
        return [instance_key(self.world.namespace, self.component, "generate", lease)]

    def _ready_value(self, lease: int) -> bytes:
        about = {"pid": self.pid, "endpoints": self._endpoints(lease) if self._registered else []}
        return json.dumps({**about, "standby": self.standby.facts()}).encode()

    def _truth(self) -> Entry:
        lease = self.lease_id
        return Entry(
            pid=self.pid,
            lease=lease_hex(lease) if lease else None,
            endpoints=tuple(self._endpoints(lease)) if lease and self._registered else (),
            draining=self.drain.reason if self.drain.phase is Phase.DRAINING and not self._registered else None,
            frontend_url=None,
        )

    # --- draining (worker.drain.DrainSteps) -------------------------------------------------------------

    def unfollow_lease(self) -> None:
        """See `Steps`."""
        self._follows = False

    async def deregister(self) -> None:
        """See `DrainSteps`."""
        await self._stay()
        self._registered = False
        self._entry.touch(resumed=False)
        while True:
            try:
                return await self._give_back(5.0)
            except EtcdUnavailable:
                await asyncio.sleep(0.2)

    async def _give_back(self, timeout_s: float) -> None:
        assert self._lease is not None
        await self._lease.revoke(timeout_s)
        self._lease_gone, self._registered = True, False
        self._entry.touch()

    def stop_accepting(self, linger_s: float) -> None:
        """See `DrainSteps`."""

    async def finish(self) -> None:
        """See `DrainSteps`."""
        await asyncio.sleep(0.25 + self.fate.work_s)
        await self._go.wait()

    async def resume(self) -> None:
        """See `DrainSteps`."""
        assert self._lease is not None
        await self._give_back(1.0)
        await self._lease.reinstate(1.0)
        self._follows = True
        self._lease_gone, self._registered = False, True
        self._entry.touch(resumed=True)

    # --- standby (see `SimStandby`) ------------------------------------------------------------------

    async def end_standby(self) -> None:
        """See `DrainSteps`."""
        await self.standby.sleeping.close()

    async def goes(self) -> None:
        """Return once it is not stopped."""
        await self._go.wait()

    async def withdraw(self) -> None:
        """Out of routing."""
        assert self._lease is not None
        self._registered = False
        self._entry.touch(resumed=False)
        await self._lease.withdraw(self._keys_of(self.name))

    async def come_back(self) -> None:
        """Into routing again."""
        assert self._lease is not None
        await self._lease.restore()
        self._registered = True
        self._entry.touch()

    async def tell(self) -> None:
        """Put the ready key."""
        assert self._lease is not None
        await self._lease.put_again(self._keys_of(self.name)[1])

    # --- what it answers ---------------------------------------------------------------------------

    async def _op_status(self, _args: Mapping[str, Any]) -> dict[str, Any]:
        requests = ["r1"] if self.drain.phase is Phase.DRAINING else []
        return {"state": str(self.drain.phase), "requests": requests, "in_flight": len(requests)}

    async def _op_cancel(self, _args: Mapping[str, Any]) -> dict[str, Any]:
        await self.drain.cancel()
        return {"state": str(self.drain.phase)}

    async def _on_load_request(self, message: Any) -> None:
        if message.reply and self.nats.is_connected:
            report = WireReport(self.name, self.component, self.lease_id, self.world.clock.wall_s(), _IDLE)
            await self.nats.publish(message.reply, msgspec.json.encode(report))


_IDLE = WireLoad(
    request_active_slots=1,
    request_total_slots=8,
    kv_active_blocks=1,
    kv_total_blocks=64,
    num_requests_waiting=0,
    gpu_cache_usage_perc=0.1,
    gpu_prefix_cache_hit_rate=0.0,
    remaining_tokens=10,
    itl_ms=10.0,
)


def _about_nothing(_lease: int) -> bytes:
    """Only that an endpoint is there is looked at."""
    return b"{}"


def _cancelled_now() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
