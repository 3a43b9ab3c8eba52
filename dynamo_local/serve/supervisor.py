"""The arbiter's mind: brings a deployment up, watches it, answers for it, and takes it down again.

One asyncio loop, which nothing here may block: files, NVML and fsync go through threads, etcd and NATS through
async clients, waits have deadlines. Decisions are the lifecycle table's and the plan's; this carries them out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from dynamo_local.circus_plugins.arbiter import DynamoArbiter, WorkerWatcher
from dynamo_local.clock import Clock
from dynamo_local.core.lifecycle import LeaseRevoked, ProcessExited, Registered, Spawned, SpawnFailed, SpawnRequested
from dynamo_local.core.types import WorkerState
from dynamo_local.errors import DynamoError, InfraUnavailable, StartTimedOut, WorkerDied
from dynamo_local.ports import DeleteEvent, KeyValueStore, PutEvent, SnapshotEvent, WatchEvent
from dynamo_local.serve.embedded import EmbeddedServers
from dynamo_local.serve.fleet import RUNNING, Fleet, Worker
from dynamo_local.serve.gpus import GpuPool
from dynamo_local.serve.leaving import Leaving
from dynamo_local.serve.logs import Interleaver, rotate, tail
from dynamo_local.serve.plan import Deployment, WatcherPlan
from dynamo_local.serve.processes import become_subreaper, kill_session, start_time_s
from dynamo_local.serve.progress import Row, View
from dynamo_local.state import Environment, State, StateStore, SystemResources

log = logging.getLogger(__name__)

INFRA_TIMEOUT_S = 30.0
LOG_POLL_S = 0.15
ROTATE_EVERY_S = 30.0
SAMPLE_EVERY_S = 1.0


class Supervisor:
    """One run of one namespace. `start`, then `run` until it is asked to leave; `down` is idempotent."""

    def __init__(
        self,
        deployment: Deployment,
        *,
        arbiter: DynamoArbiter,
        store: StateStore,
        pool: GpuPool,
        clock: Clock,
        view: View,
    ) -> None:
        self.deployment = deployment
        self.arbiter = arbiter
        self.store = store
        self.pool = pool
        self.clock = clock
        self.view = view
        self.fleet = Fleet(store, clock)
        self.servers = EmbeddedServers(arbiter, deployment.paths, clock)
        self.kv: KeyValueStore | None = None
        self.nats: Any = None
        self.state = "starting"
        self.facts: dict[str, str] = {}
        self.notes: list[str] = []
        self._started_s = clock.now_s()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._logs = Interleaver(from_end=True)
        self._death: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        self._asked_down: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._now = asyncio.Event()
        self._gone = asyncio.Event()
        arbiter.supervisor = self
        arbiter.on_exit = self._on_exit

    # --- coming up -----------------------------------------------------------------------------

    async def start(self) -> None:
        """Everything up and ready, or a typed error that says what failed, with the tail of its log.

        Whoever calls takes everything down after an error, as after a run.
        """
        become_subreaper()
        await self.arbiter.start()
        env, pending = await self._start_infra()
        for plan in self.deployment.workers:
            self._add(plan, env)
        await self.fleet.apply({name: SpawnRequested(stimulus_id="serve") for name in self.fleet.workers})
        await asyncio.gather(*pending, *(self._spawn(name) for name in self.fleet.workers))
        self._background(self._show())
        await self._until_ready(self._connect(env))
        await self._until_ready(self._all_ready())
        self.state = "ready"
        self.view.ready(self._ready_facts())

    async def _start_infra(self) -> tuple[dict[str, str], list[Awaitable[int]]]:
        """Choose or prepare etcd and NATS. Their addresses are known before they run, so nobody waits here."""
        pending: list[Awaitable[int]] = []
        etcd, nats = self.deployment.etcd_endpoints, self.deployment.nats_server
        if etcd is None:
            name, spec = self.servers.start_etcd()
            etcd = spec.endpoint
            pending.append(self._spawn_server(name))
        env = {"ETCD_ENDPOINTS": etcd}
        if nats is None:
            name, nats_spec = self.servers.start_nats()
            nats = nats_spec.url
            env["DYN_NATS_TOKEN_FILE"] = str(nats_spec.token_file)
            pending.append(self._spawn_server(name))
        env["NATS_SERVER"] = nats
        for origin in self.servers.origins:
            self.view.event(origin)
        self.facts |= {"etcd_endpoints": etcd, "nats_server": _without_credentials(nats)}
        await self._write_head(env)
        return env, pending

    async def _spawn_server(self, name: str) -> int:
        self._logs.watch(name, self.deployment.paths.log_file(name))
        return await self.servers.spawn(name)

    async def _write_head(self, env: dict[str, str]) -> None:
        deployment = self.deployment
        state = State(
            namespace=deployment.graph.namespace,
            run_id=deployment.run_id,
            circus_endpoint=deployment.paths.circus_endpoint,
            arbiter_pid=os.getpid(),
            arbiter_start_time=start_time_s(os.getpid()),
            etcd_endpoints=self.facts["etcd_endpoints"],
            nats_server=self.facts["nats_server"],
            nats_token_file=env.get("DYN_NATS_TOKEN_FILE"),
            runtime_dir=str(deployment.paths.runtime),
            target=deployment.graph.target,
            gpus=deployment.gpus_option,
            environment=Environment(
                DYNAMO_SERVICE_CONFIG=deployment.state_config_json,
                SYSTEM_RESOURCES=SystemResources(
                    total_gpus=len(deployment.gpus), gpu_info=[str(device.index) for device in deployment.gpus]
                ),
            ),
        )
        await asyncio.to_thread(self.store.create, state)

    def _add(self, plan: WatcherPlan, env: dict[str, str]) -> None:
        """A watcher for the worker. It inherits its GPUs' locks: they stay taken as long as *it* lives."""
        self.pool.take(plan.name, plan.gpus)
        self.fleet.add(plan)
        self.arbiter.add_worker(
            WorkerWatcher(
                plan.name,
                plan.argv,
                env={**plan.env, **env},
                cwd=plan.cwd,
                log_file=plan.log_file,
                graceful_timeout_s=plan.drain_deadline_s,
                death_signal=signal.SIGKILL,
                inherited_fds=self.pool.inherited_fds(plan.gpus),
            )
        )
        self._logs.watch(plan.name, plan.log_file)

    async def _spawn(self, name: str) -> None:
        worker = self.fleet.workers[name]
        try:
            pid = await self.arbiter.spawn(name)
        except OSError as error:
            worker.reason = str(error)
            await self.fleet.apply({name: SpawnFailed(stimulus_id="spawn", reason=str(error))})
            self._report_death(worker, f"{name} cannot be started: {error}")
            return
        worker.pid, worker.pid_start_time = pid, start_time_s(pid)
        worker.started_s, worker.started_at = self.clock.now_s(), self.clock.wall_s()
        await self.fleet.apply({name: Spawned(stimulus_id="spawn", pid=pid, pid_start_time=worker.pid_start_time)})

    async def _connect(self, env: dict[str, str]) -> None:
        from dynamo_local.runtime.etcd import EtcdStore
        from dynamo_local.runtime.load import LoadSampler
        from dynamo_local.runtime.nats import connect_nats
        from dynamo_local.runtime.prefill_queue import JetStreamPrefillQueue
        from dynamo_local.serve.infra import probe_etcd, probe_nats

        token_file = Path(env["DYN_NATS_TOKEN_FILE"]) if "DYN_NATS_TOKEN_FILE" in env else None
        token = token_file.read_text().strip() if token_file else None
        await asyncio.gather(
            probe_etcd(env["ETCD_ENDPOINTS"], INFRA_TIMEOUT_S), probe_nats(env["NATS_SERVER"], token, INFRA_TIMEOUT_S)
        )
        self.kv = await EtcdStore.connect(env["ETCD_ENDPOINTS"])
        self.nats = await connect_nats(
            env["NATS_SERVER"], token_file, name=f"{self.deployment.graph.namespace}-arbiter"
        )
        namespace = self.deployment.graph.namespace
        self._background(self._follow_registrations())
        self._background(self._sample_load(LoadSampler(self.nats, namespace)))
        queue = JetStreamPrefillQueue(self.nats, namespace, self.deployment.run_id)
        await queue.start(purge_stale=True)  # lesson 18: a stale queue from the last run jams the next
        await queue.close()

    async def _all_ready(self) -> None:
        """Each worker ready within its own start deadline."""
        for worker in list(self.fleet.workers.values()):
            deadline_s = self._started_s + worker.plan.start_deadline_s

            def ready(worker: Worker = worker) -> bool:
                return worker.state is WorkerState.READY

            if not await self.fleet.until(ready, deadline_s):
                raise StartTimedOut(
                    f"{worker.name} was not ready within {worker.plan.start_deadline_s:g} s (it is "
                    f"{worker.state}); the end of its log, {worker.plan.log_file}:\n{_quoted_tail(worker.plan)}"
                )

    async def _until_ready(self, work: Awaitable[None]) -> None:
        """Do `work`, unless a worker dies or somebody asks us to leave first."""
        task = asyncio.ensure_future(work)
        racing: set[asyncio.Future[Any]] = {task, self._death, self._asked_down}
        await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, DynamoError):
            await task
        if self._death.done():
            raise self._death.result()
        raise InterruptedStart(f"left before it was ready: {self._asked_down.result()}")

    # --- watching ------------------------------------------------------------------------------

    async def _follow_registrations(self) -> None:
        """A worker's last key, `{ns}/workers/{watcher}:{lease}`, says that all of its endpoints are registered."""
        assert self.kv is not None
        prefix = f"{self.deployment.graph.namespace}/workers/"
        async for event in self.kv.watch_prefix(prefix):
            await self._registration(prefix, event)

    async def _registration(self, prefix: str, event: WatchEvent) -> None:
        if isinstance(event, SnapshotEvent):
            for kv in event.kvs:
                await self._registered(*_split_key(prefix, kv.key), json.loads(kv.value))
        elif isinstance(event, PutEvent):
            await self._registered(*_split_key(prefix, event.kv.key), json.loads(event.kv.value))
        elif isinstance(event, DeleteEvent):
            await self._deregistered(*_split_key(prefix, event.key))

    async def _registered(self, name: str, lease: str, facts: dict[str, Any]) -> None:
        worker = self.fleet.workers.get(name)
        if worker is None or worker.pid is None or worker.pid != facts.get("pid"):
            return  # a key of a worker that is gone, until its lease is
        worker.lease, worker.endpoints = lease, tuple(facts.get("endpoints", ()))
        if url := facts.get("frontend_url"):
            self.facts["frontend_url"] = url
        if worker.state in (WorkerState.STARTING, WorkerState.READY):
            await self.fleet.apply({name: Registered(stimulus_id=f"etcd:{lease}", lease=lease)})

    async def _deregistered(self, name: str, lease: str) -> None:
        """The key is gone while the process lives: its lease was revoked, so it is draining."""
        worker = self.fleet.workers.get(name)
        if worker is not None and worker.lease == lease and worker.runs and worker.state in RUNNING:
            worker.lease, worker.endpoints = None, ()
            await self.fleet.apply({name: LeaseRevoked(stimulus_id=f"etcd:{lease}", lease=lease)})

    def _on_exit(self, name: str, pid: int, code: int) -> None:
        """From the arbiter, within milliseconds of an exit."""
        kill_session(pid)  # what an engine left behind in its session: orphans keep VRAM (lesson 3)
        if not self.servers.exited(name, code):
            self._background(self._worker_exited(name, pid, code))

    async def _worker_exited(self, name: str, pid: int, code: int) -> None:
        worker = self.fleet.workers[name]
        if worker.pid != pid:
            return
        leaving = worker.state in (WorkerState.DRAINING, WorkerState.DRAIN_TIMED_OUT)
        lease = worker.lease
        worker.pid = worker.pid_start_time = worker.started_s = worker.started_at = worker.load = worker.lease = None
        worker.endpoints, worker.exit_code = (), code
        worker.reason = None if leaving and code == 0 else _how_it_ended(code)
        await self.fleet.apply({name: ProcessExited(stimulus_id=f"exit:{pid}", exit_code=code)})
        if lease is not None and self.kv is not None:
            try:
                await self.kv.revoke(int(lease, 16))  # else it is routed to until the lease's TTL
            except InfraUnavailable as error:
                log.warning("%s: its lease %s could not be revoked (%s); it expires by itself", name, lease, error)
        if not leaving:
            self._report_death(worker, f"{name} {worker.reason} while {self.state}")

    def _report_death(self, worker: Worker, what: str) -> None:
        message = f"{what}; the end of its log, {worker.plan.log_file}:\n{_quoted_tail(worker.plan)}"
        self.notes.append(f"{worker.name}: {worker.reason}")
        if self.state == "starting":
            if not self._death.done():
                self._death.set_result(WorkerDied(message))
        else:
            self.view.event(message)

    async def _sample_load(self, sampler: Any) -> None:
        """One scatter request a second for all workers; a worker that does not answer has no load, not zero."""
        next_s = self.clock.now_s()
        while True:
            next_s = max(next_s + SAMPLE_EVERY_S, self.clock.now_s())
            await self.clock.sleep_until(next_s)
            try:
                reports = await sampler.sample(expected=len(self.fleet.running()))
            except DynamoError as error:
                log.debug("no load sample: %s", error)
                reports = {}
            for worker in self.fleet.workers.values():
                report = reports.get(worker.name)
                worker.load = report.load if report is not None else None

    async def _show(self) -> None:
        """Progress, log lines and rotation: reading files only, in a thread."""
        rotated_s = self.clock.now_s()
        while True:
            await self.clock.sleep_until(self.clock.now_s() + LOG_POLL_S)
            for name, line in await asyncio.to_thread(lambda: list(self._logs.poll())):
                self.view.log_line(name, line, self._logs.names)
            if self.state != "ready":
                self.show_rows()
            if self.clock.now_s() - rotated_s > ROTATE_EVERY_S:
                rotated_s = self.clock.now_s()
                await asyncio.to_thread(self._rotate_logs)

    def _rotate_logs(self) -> None:
        for name in self._logs.names:
            rotate(self.deployment.paths.log_file(name))

    def show_rows(self) -> None:
        """Tell the view how things stand."""
        now_s = self.clock.now_s()
        rows = [
            Row(
                name=worker.name,
                state=str(worker.state),
                gpus=",".join(str(device.index) for device in worker.plan.gpus),
                since_s=now_s - worker.since_s,
                note=_in_flight(worker),
            )
            for worker in self.fleet.workers.values()
        ]
        self.view.rows(self.state, rows)

    def _background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the arbiter's %s failed: %s", task.get_coro(), error, exc_info=error)
            self.notes.append(f"arbiter: {type(error).__name__}: {error}")

    # --- answering -----------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The object of `dynamo status --json`. Never waits."""
        now_s = self.clock.now_s()
        return {
            "namespace": self.deployment.graph.namespace,
            "run_id": self.deployment.run_id,
            "state": self.state,
            "arbiter_pid": os.getpid(),
            "circus_endpoint": self.deployment.paths.circus_endpoint,
            "etcd_endpoints": self.facts.get("etcd_endpoints"),
            "nats_server": self.facts.get("nats_server"),
            "frontend_url": self.facts.get("frontend_url"),
            "notes": self.notes[-5:],
            "workers": [_worker_status(worker, now_s) for worker in self.fleet.workers.values()],
        }

    def _ready_facts(self) -> dict[str, Any]:
        return {
            "namespace": self.deployment.graph.namespace,
            "frontend_url": self.facts.get("frontend_url"),
            "seconds": round(self.clock.now_s() - self._started_s, 3),
        }

    # --- leaving -------------------------------------------------------------------------------

    def request_down(self, why: str, *, now: bool = False) -> int:
        """Ask to leave; a second time, or with `now`, to end at once. Returns our pid."""
        if now or self._asked_down.done():
            self._now.set()
        if not self._asked_down.done():
            self._asked_down.set_result(why)
        return os.getpid()

    async def wait_down_request(self) -> str:
        """Who asked us to leave."""
        return await asyncio.shield(self._asked_down)

    async def down(self, why: str) -> None:
        """Ask to leave and wait until everything is gone but the arbiter itself."""
        self.request_down(why)
        await self._gone.wait()

    async def leave(self) -> None:
        """End the workers in order, then NATS and etcd, then remove what is ours on disk."""
        if not self._asked_down.done():
            self._asked_down.set_result("the run ended")
        self.state = "leaving"
        try:
            await Leaving(self.fleet, self.arbiter, self.clock, self._now, self.view).end_workers()
        finally:
            await self._let_go()

    async def _let_go(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for name in list(self.fleet.workers):
            self.arbiter.remove(name)
        if self.nats is not None:
            from dynamo_local.runtime.nats import close_quietly

            await close_quietly(self.nats)
        if self.kv is not None:
            await self.kv.close()
        await self.servers.stop()
        await asyncio.to_thread(self.store.remove_if_owned, self.deployment.run_id)
        self._gone.set()


class InterruptedStart(DynamoError):
    """Somebody asked us to leave while we were starting: no failure of the graph."""

    code = "interrupted"
    exit_code = 130


def _split_key(prefix: str, key: str) -> tuple[str, str]:
    name, _, lease = key.removeprefix(prefix).rpartition(":")
    return name, lease


def _without_credentials(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return scheme + separator + rest.rpartition("@")[2]


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code} unasked"


def _quoted_tail(plan: WatcherPlan) -> str:
    lines = tail(plan.log_file)
    return "\n".join(f"  | {line}" for line in lines) if lines else "  | (it wrote nothing)"


def _in_flight(worker: Worker) -> str:
    if worker.load is None or not worker.load.request_active_slots:
        return worker.reason or ""
    return f"{worker.load.request_active_slots} in flight"


def _worker_status(worker: Worker, now_s: float) -> dict[str, Any]:
    load = worker.load
    return {
        "watcher_name": worker.name,
        "component": worker.plan.component,
        "role": str(worker.plan.role),
        "state": str(worker.state),
        "pid": worker.pid,
        "gpus": [str(device.index) for device in worker.plan.gpus],
        "lease": worker.lease,
        "endpoints": list(worker.endpoints),
        "uptime_s": None if worker.started_s is None else round(now_s - worker.started_s, 3),
        "reason": worker.reason,
        "log_file": str(worker.plan.log_file),
        "load": None if load is None else {name: getattr(load, name) for name in type(load).__slots__},
    }
