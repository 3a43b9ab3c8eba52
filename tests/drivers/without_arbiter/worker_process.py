"""Worker processes on real etcd and NATS, without an arbiter: what `serve_dynamo` does by itself.

async with worker_host(etcd_server, nats_server, namespace, tmp_path) as host:
    worker = await host.start("Counter")              # a service of `tests.drivers.without_arbiter.counting`
    await host.control.call(worker.name, "drain")
    assert await worker.exit_code() == 0
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from dynamo_local.core.types import Load, WorkerState, lease_hex, watcher_name
from dynamo_local.errors import DynamoError, EtcdUnavailable
from dynamo_local.ports import EndpointClient, KeyValue
from dynamo_local.state.schema import ComponentEntry, State
from dynamo_local.state.store import StateStore
from dynamo_local.transport.control import ControlClient
from dynamo_local.transport.etcd import EtcdStore
from dynamo_local.transport.load import LoadSampler
from dynamo_local.transport.nats import close_quietly, connect_nats
from dynamo_local.transport.requests.client import RequestPlane
from tests.drivers.servers import RealEtcd, RealNats

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "llm"
COUNTING = "tests.drivers.without_arbiter.counting:All"
WAIT_S = 15.0

T = TypeVar("T")


class WorkerUnderTest:
    """One process, and what it says of itself."""

    def __init__(self, host: WorkerHost, name: str, process: asyncio.subprocess.Process, log_file: Path) -> None:
        self.host = host
        self.name = name
        self.process = process
        self.log_file = log_file

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    async def exit_code(self, timeout_s: float = 60.0) -> int:
        try:
            return await asyncio.wait_for(self.process.wait(), timeout_s)
        except TimeoutError:
            raise AssertionError(f"{self.name} has not ended within {timeout_s:g} s\n{self.log}") from None

    async def call(self, op: str, timeout_s: float = WAIT_S, **args: Any) -> dict[str, Any]:
        return await self.host.control.call(self.name, op, timeout_s, **args)

    async def status(self) -> dict[str, Any]:
        return await self.call("status")

    async def reaches(self, **wanted: Any) -> dict[str, Any]:
        async def there() -> dict[str, Any] | None:
            try:
                status = await self.status()
            except DynamoError:
                return None
            return status if all(status[key] == value for key, value in wanted.items()) else None

        return await self.host.until(there, what=f"{self.name} reaches {wanted}")

    async def registered(self) -> str:
        """The lease (hex) of its ready key, once that is there."""
        prefix = f"workers/{self.name}:"

        async def there() -> str | None:
            assert self.process.returncode is None, f"exit {self.process.returncode}"
            return next((key.removeprefix(prefix) for key in await self.host.keys(prefix)), None)

        return await self.host.until(there, what=f"{self.name} is registered")

    def entry(self) -> ComponentEntry:
        return self.host.store.read().components[self.name]


class WorkerHost:
    """One namespace: its statefile, its servers, a client of everything."""

    def __init__(self, etcd: RealEtcd, nats: RealNats, namespace: str, folder: Path) -> None:
        self.namespace = namespace
        self.folder = folder
        self.store = StateStore(folder / f"{namespace}.json", run_id="run")
        self.workers: list[WorkerUnderTest] = []
        self.components: dict[str, ComponentEntry] = {}
        self.kv: EtcdStore
        self.control: ControlClient
        self._etcd = etcd
        self._servers = nats

    async def connect(self) -> None:
        self.kv = await EtcdStore.connect(self._etcd.endpoint)
        self.nats = await connect_nats(self._servers.url, self._servers.access, name="test")
        self.plane = RequestPlane(self.nats)
        await self.plane.start()
        self.control = ControlClient(self.nats, self.namespace)
        self.sampler = LoadSampler(self.nats, self.namespace)
        self.store.create(State(namespace=self.namespace, run_id="run"))

    async def spawn(
        self, component: str, n: int = 0, *, target: str = COUNTING, config: Mapping[str, Any] | None = None, **env: str
    ) -> WorkerUnderTest:
        name = watcher_name(self.namespace, component, n)
        with self.store.transaction() as state:
            state.components[name] = ComponentEntry(watcher_name=name, component=component, state=WorkerState.READY)
        log_file = self.folder / f"{name}.log"
        with log_file.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "dynamo_local.worker.serve_dynamo", target, "--service-name", component),
                cwd=ROOT if target == COUNTING else EXAMPLE,
                env={
                    "PATH": os.environ["PATH"],
                    # A checkout that is not the installed one (a git worktree) is tested by its own code.
                    **{name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
                    "DYN_NAMESPACE": self.namespace,
                    "DYN_RUN_ID": "run",
                    "DYN_WATCHER_NAME": name,
                    "DYN_STATEFILE": str(self.store.path),
                    "DYN_NATS_TOKEN_FILE": str(self._servers.token_file),
                    "ETCD_ENDPOINTS": self._etcd.endpoint,
                    "NATS_SERVER": self._servers.url,
                    "DYNAMO_SERVICE_CONFIG": json.dumps(config or {}),
                    "PYTHONDONTWRITEBYTECODE": "1",
                    **env,
                },
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        worker = WorkerUnderTest(self, name, process, log_file)
        self.workers.append(worker)
        return worker

    async def start(self, component: str, n: int = 0, **options: Any) -> WorkerUnderTest:
        worker = await self.spawn(component, n, **options)
        await worker.registered()
        await worker.reaches(state="ready")
        return worker

    async def client(self, component: str, endpoint: str) -> EndpointClient:
        return await self.plane.client(self.kv, self.namespace, component, endpoint)

    async def count(self, to: int, interval_s: float = 0.01, *, instance_id: int | None = None) -> list[int]:
        """A whole answer of a `Counter`; a request that produced nothing is sent on to another, as clients do."""
        client = await self.client("Counter", "count")
        payload = {"to": to, "interval_s": interval_s}
        for attempt in range(20):
            items: list[int] = []
            try:
                stream = await client.call(payload, instance_id=instance_id)
                try:
                    async for item in stream:
                        items.append(item)
                finally:
                    await stream.aclose()
                return items
            except DynamoError as error:
                if items or not error.retryable or instance_id is not None or attempt == 19:
                    raise
                await asyncio.sleep(0.02)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def counting(self, worker: WorkerUnderTest, to: int, interval_s: float = 0.01) -> asyncio.Task[list[int]]:
        lease = (await worker.status())["lease"]
        client = await self.client("Counter", "count")

        async def seen() -> bool:
            return any(lease_hex(i.lease_id) == lease for i in client.instances())

        await self.until(seen, what=f"{worker.name} is seen")
        before = (await worker.status())["in_flight"]
        task = asyncio.create_task(self.count(to, interval_s, instance_id=int(lease, 16)))

        async def taken() -> bool:
            return task.done() or (await worker.status())["in_flight"] > before

        await self.until(taken, what=f"{worker.name} took the request")
        return task

    async def loads(self) -> dict[str, Load]:
        """The workers' answers to the arbiter's probe, by watcher name."""
        alive = sum(worker.process.returncode is None for worker in self.workers)
        return {name: report.load for name, report in (await self.sampler.sample(1.0, alive)).items()}

    async def keys(self, prefix: str = "") -> list[str]:
        """All keys of the namespace under the prefix, without the namespace; waits for an etcd that comes back."""

        async def answer() -> tuple[list[KeyValue], int] | None:
            with suppress(EtcdUnavailable):
                return await self.kv.get_prefix(f"{self.namespace}/{prefix}")
            return None

        kvs, _ = await self.until(answer, what="etcd answers")
        return [kv.key.removeprefix(f"{self.namespace}/") for kv in kvs]

    async def until(
        self, condition: Callable[[], Awaitable[T | None]], timeout_s: float = WAIT_S, *, what: str = ""
    ) -> T:
        """The condition's first true value; past the timeout an AssertionError with `what` and the logs."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while not (value := await condition()):
            assert asyncio.get_running_loop().time() < deadline_s, f"not within {timeout_s:g} s: {what}\n{self.logs()}"
            await asyncio.sleep(0.01)
        return value

    def logs(self) -> str:
        return "\n".join(f"--- {w.name} (exit {w.process.returncode})\n{w.log[-2500:]}" for w in self.workers)

    async def close(self) -> None:
        for worker in self.workers:
            if worker.process.returncode is None:
                worker.process.kill()
            await worker.process.wait()
        await self.plane.close()
        await close_quietly(self.nats)
        await self.kv.close()


@asynccontextmanager
async def worker_host(etcd: RealEtcd, nats: RealNats, namespace: str, folder: Path) -> AsyncIterator[WorkerHost]:
    """Connected; afterwards every process is gone. An error carries the workers' logs."""
    host = WorkerHost(etcd, nats, namespace, folder)
    await host.connect()
    try:
        yield host
    except BaseException as error:
        error.add_note(host.logs())
        raise
    finally:
        await host.close()
