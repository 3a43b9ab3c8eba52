"""The arbiter's mind: brings a deployment up, watches it, answers for it, and takes it down again.

One asyncio loop, which nothing here may block: files, NVML and fsync go through threads, etcd and NATS through
async clients, waits have deadlines. Decisions are the lifecycle table's, the plan's and `core`'s; the parts
(`operations`, `registrations`, `sampling`, `leaving`) carry them out; this composes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Coroutine
from functools import partial
from typing import Any, cast

from dynamo_local.clock import Clock
from dynamo_local.core.types import Role, WorkerState
from dynamo_local.errors import DynamoError, StartTimedOut, WorkerDied
from dynamo_local.prctl import become_subreaper
from dynamo_local.serve import leftovers
from dynamo_local.serve.adoption import Adoption, Found
from dynamo_local.serve.embedded import EmbeddedServers
from dynamo_local.serve.events import EventLog, event_log_path
from dynamo_local.serve.fleet import Fleet, Worker
from dynamo_local.serve.following import Following, follow
from dynamo_local.serve.gpus import GpuPool
from dynamo_local.serve.guarding import Guarding
from dynamo_local.serve.head import arbiter_facts, head_of, policy, without_credentials
from dynamo_local.serve.host import AdoptingHost, SupervisedHost
from dynamo_local.serve.leaving import Leaving
from dynamo_local.serve.links import INFRA_TIMEOUT_S, Links
from dynamo_local.serve.logs import Interleaver, log_tail, rotate
from dynamo_local.serve.operations import Operations
from dynamo_local.serve.plan import Deployment
from dynamo_local.serve.planning import Planning
from dynamo_local.serve.progress import View
from dynamo_local.serve.registrations import Registrations
from dynamo_local.serve.sampling import Sampling
from dynamo_local.serve.scaling import Scaler
from dynamo_local.serve.seeing import Seeing
from dynamo_local.serve.status import gpu_status, row, worker_status
from dynamo_local.state import StateStore

log = logging.getLogger(__name__)

LOG_POLL_S, QUIET_LOG_POLL_S = 0.15, 0.5
"""How often 66 log files are looked at while there is something in them, and when for a while there was not."""
ROTATE_EVERY_S = 30.0
HEALTH_EVERY_S = 2.0
NOTES_KEPT = 20


class Supervisor:
    """One run of one namespace. `start`, then wait until it is asked to leave, then `leave`."""

    def __init__(
        self,
        deployment: Deployment,
        *,
        arbiter: SupervisedHost,
        store: StateStore,
        pool: GpuPool,
        clock: Clock,
        view: View,
    ) -> None:
        namespace = deployment.graph.namespace
        self.deployment = deployment
        self.arbiter = arbiter
        self.pool = pool
        self.clock = clock
        self.view = view
        self.state = "starting"
        self.notes: list[str] = []
        self.fleet = Fleet(head_of(deployment), store, EventLog(event_log_path(deployment.paths.logs)), clock)
        self.fleet.on_trouble = self._trouble
        self.links = Links(namespace, deployment.run_id)
        marks = partial(leftovers.marks, namespace, deployment.paths.statefile, deployment.run_id)
        self.servers = EmbeddedServers(arbiter, deployment.paths, clock, marks)
        self.servers.on_change = self._record_servers
        self.guarding = Guarding(arbiter, deployment, clock)
        self.registrations = Registrations(namespace, self.fleet, self.links)
        self.sampling = Sampling(namespace, self.fleet, self.links, clock)
        self.operations = Operations(
            self.fleet,
            arbiter,
            pool,
            deployment.planner,
            self.links,
            clock,
            background=self._background,
            tell=self._trouble,
        )
        self.operations.on_failure = self._failed
        self.registrations.on_stray = self.operations.ask_again
        self.scaler = Scaler(
            self.fleet,
            pool,
            deployment.planner,
            self.operations,
            clock,
            background=self._background,
            tell=self._trouble,
        )
        self.planning = Planning(
            deployment.graph,
            deployment.load_planner,
            scaler=self.scaler,
            fleet=self.fleet,
            sampling=self.sampling,
            links=self.links,
            clock=clock,
            logs=deployment.paths.logs,
            background=self._background,
            tell=self._trouble,
        )
        self.seeing = Seeing(
            self.fleet,
            pool,
            self.sampling,
            clock,
            components=[service.name for service in deployment.graph.services],
            state=lambda: self.state,
        )
        self.seeing.watch(self.planning, deployment.planner.cwd, deployment.paths.logs, self._trouble)
        self.following: Following | None = None
        self._started_s = clock.now_s()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._logs = Interleaver(from_end=True)
        loop = asyncio.get_running_loop()
        self._death: asyncio.Future[DynamoError] = loop.create_future()
        self._asked_down: asyncio.Future[str] = loop.create_future()
        self._now = asyncio.Event()
        self._signalled = False
        self._gone = asyncio.Event()
        arbiter.supervisor = self
        arbiter.on_exit = self._on_exit

    # --- coming up -----------------------------------------------------------------------------

    async def start(self, found: Found | None = None) -> None:
        """Everything up and ready, or a typed error that says what failed, with the tail of its log.

        With `found`, take that run back instead. Whoever calls lets us leave after an error, as after a run.
        """
        become_subreaper()
        await self.seeing.start(self.deployment.settings.metrics_port)
        await self.arbiter.start()
        await (self._start_anew() if found is None else self._take_back(found))
        self.state = "ready"
        self.following = await follow(self)
        await self.planning.begin(
            starts=self.deployment.load_planner_flag if self.following is None else False,
            by_default=self.deployment.load_planner_starts,
        )
        self.view.ready(self._ready_facts())

    async def _start_anew(self) -> None:
        servers = self._choose_servers()
        await self.fleet.create()
        await self.guarding.start()  # before there is anything to be guarded
        for plan in self.deployment.workers:
            self.pool.take(plan.name, plan.gpus)
            self.fleet.add(plan)
            self._logs.watch(plan.name, plan.log_file)
        # All at once: order governs readiness, not spawning. Whoever needs a server waits for it.
        await asyncio.gather(
            *(self.servers.spawn(name) for name in servers), self.operations.start(list(self.fleet.workers), "serve")
        )
        self._background(self._show())
        await self._unless_stopped(self._connect())
        await self._unless_stopped(self._all_ready())

    async def _take_back(self, found: Found) -> None:
        """Until the very end the run is our predecessor's: its guardian watches, and a failure of ours ends nothing."""
        self.state = "adopting"
        adoption = Adoption(found, self.deployment, self, cast(AdoptingHost, self.arbiter))  # only ours is asked to
        self.fleet.head = found.state.model_copy(update={"components": {}, **arbiter_facts(self.deployment)})
        adoption.restore()
        for name in (*self.fleet.workers, *self.servers.names):
            self._logs.watch(name, self.deployment.paths.log_file(name))
        self.operations.env = adoption.env
        self._background(self._show())
        await self._unless_stopped(self._connect())
        await self._unless_stopped(self.registrations.looked_through(INFRA_TIMEOUT_S))
        await adoption.resume()
        await self.guarding.replace()
        self.fleet.head.on_arbiter_death = policy(self.deployment)
        await self._record_servers()

    async def _record_servers(self) -> None:
        """Their pids may change with every restart; an adoption needs those of now."""
        self.fleet.head.servers = self.servers.records() or None
        await self.fleet.commit_head()

    def _choose_servers(self) -> list[str]:
        """Prepare etcd and NATS where the user has none. Their addresses are known before they run: nobody waits."""
        names = []
        etcd, nats = self.deployment.etcd_endpoints, self.deployment.nats_server
        env = {}
        if etcd is None:
            name, spec = self.servers.start_etcd()
            etcd = spec.endpoint
            names.append(name)
        if nats is None:
            name, nats_spec = self.servers.start_nats()
            nats = nats_spec.url
            env["DYN_NATS_TOKEN_FILE"] = str(nats_spec.token_file)
            names.append(name)
        elif token_file := self.deployment.planner.base_env.get("DYN_NATS_TOKEN_FILE"):
            env["DYN_NATS_TOKEN_FILE"] = token_file
        self.operations.env = {**env, "ETCD_ENDPOINTS": etcd, "NATS_SERVER": nats}
        self.fleet.head.etcd_endpoints = etcd
        self.fleet.head.nats_server = without_credentials(nats)
        self.fleet.head.nats_token_file = env.get("DYN_NATS_TOKEN_FILE")
        for origin in self.servers.origins:
            self.view.event(origin)
        for name in names:
            self._logs.watch(name, self.deployment.paths.log_file(name))
        return names

    async def _connect(self) -> None:
        services = self.deployment.graph.services
        # Commands have queues of their own, if any: only a prefill component of ours pulls from this one.
        prefill = any(spec.role is Role.PREFILL and spec.runtime is None for spec in services)
        await self.links.connect(self.operations.env, prefill_queue=prefill)
        self._background(self.registrations.follow())
        self._background(self.sampling.run())
        self._background(self._watch_health())

    async def _all_ready(self) -> None:
        def ready() -> bool:
            return all(worker.state is WorkerState.READY for worker in self.fleet.workers.values())

        longest_s = max((plan.start_deadline_s for plan in self.deployment.workers), default=0.0)
        if not await self.fleet.until(ready, self._started_s + longest_s + HEALTH_EVERY_S):
            late = [worker.name for worker in self.fleet.workers.values() if worker.state is not WorkerState.READY]
            raise StartTimedOut(f"not ready in time: {', '.join(late)}")

    async def _unless_stopped(self, work: Awaitable[None]) -> None:
        """Do `work`, unless a worker fails or somebody asks us to leave first."""
        task = asyncio.ensure_future(work)
        racing: set[asyncio.Future[Any]] = {task, self._death, self._asked_down}
        await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not self._death.done():
            await task
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, DynamoError):
            await task
        if self._death.done():
            raise self._death.result()
        raise InterruptedStart(f"left before it was ready: {self._asked_down.result()}")

    # --- watching ------------------------------------------------------------------------------

    def _on_exit(self, name: str, pid: int, code: int | None) -> None:
        if not self.servers.exited(name, code) and not self.guarding.exited(name, code):
            self.operations.exited(name, pid, code)

    def _failed(self, worker: Worker, message: str) -> None:
        """A worker failed. While we start, that ends the start; later it is told, and the policy acts."""
        if self.state == "starting":
            if not self._death.done():
                late = worker.state is WorkerState.START_TIMED_OUT
                self._death.set_result(StartTimedOut(self._late(worker)) if late else WorkerDied(message))
        else:
            self.notes = [*self.notes, f"{worker.name} {worker.reason}"][-NOTES_KEPT:]
            self.view.event(message)

    def _late(self, worker: Worker) -> str:
        """Who was late, and the log of whom it waited for: a worker that waits for another has nothing to say."""
        workers = list(self.fleet.workers.values())
        ready = {other.plan.component for other in workers if other.state is WorkerState.READY}
        culprit = worker
        while waited := set(self.deployment.graph.service(culprit.plan.component).depends) - ready:
            culprit = next((other for other in workers if other.plan.component in waited), culprit)
            ready |= waited  # each is looked at once, also where two wait for each other
        waits = "" if culprit is worker else f": it waits for {culprit.name}"
        return f"{worker.name} {worker.reason}{waits}; {log_tail(culprit.plan)}"

    def _trouble(self, message: str) -> None:
        log.warning("%s", message)
        self.notes = [*self.notes, message][-NOTES_KEPT:]
        self.view.event(message)

    async def _watch_health(self) -> None:
        while True:
            await self.clock.sleep_until(self.clock.now_s() + HEALTH_EVERY_S)
            await self.operations.check_health()
            await self.fleet.heal()

    async def _show(self) -> None:
        """Progress, log lines and rotation: reading files only, in a thread."""
        rotated_s = self.clock.now_s()
        every_s = LOG_POLL_S
        while True:
            await self.clock.sleep_until(self.clock.now_s() + every_s)
            lines = await asyncio.to_thread(lambda: list(self._logs.poll())) if self.view.wants_logs else []
            for name, line in lines:
                self.view.log_line(name, line, self._logs.names)
            changing = self.state != "ready"
            every_s = LOG_POLL_S if lines or changing else min(every_s * 1.5, QUIET_LOG_POLL_S)
            if changing:
                self._show_rows()
            if self.clock.now_s() - rotated_s > ROTATE_EVERY_S:
                rotated_s = self.clock.now_s()
                await asyncio.to_thread(self._rotate_logs)

    def _rotate_logs(self) -> None:
        for name in self._logs.names:
            rotate(self.deployment.paths.log_file(name))

    def _show_rows(self) -> None:
        now_s = self.clock.now_s()
        workers = self.fleet.workers.values()
        self.view.rows(self.state, [row(worker, now_s) for worker in workers])

    def _background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the arbiter's %s failed: %s", task.get_coro(), error, exc_info=error)
            self._trouble(f"arbiter: {type(error).__name__}: {error}")

    # --- commands ------------------------------------------------------------------------------

    async def scale(
        self, component: str, target: str, *, force: bool, victim_policy: str | None, stimulus_id: str
    ) -> dict[str, Any]:
        """`dynamo scale`: returns once the intent is committed."""
        self._check_running()
        return await self.scaler.scale(
            component, target, force=force, victim_policy=victim_policy, stimulus_id=stimulus_id
        )

    async def drain(self, name: str, *, cancel: bool, force: bool, stimulus_id: str) -> dict[str, Any]:
        """`dynamo drain NAME [--cancel]`."""
        self._check_running()
        return await self.scaler.drain(name, cancel=cancel, force=force, stimulus_id=stimulus_id)

    async def restart(self, name_or_component: str, *, rolling: bool, force: bool, stimulus_id: str) -> dict[str, Any]:
        """`dynamo restart NAME|COMPONENT`."""
        self._check_running()
        return await self.scaler.restart(name_or_component, rolling_=rolling, force=force, stimulus_id=stimulus_id)

    def planner(self) -> Planning:
        """Whom the `dynamo planner` commands speak to."""
        self._check_running()
        return self.planning

    def _check_running(self) -> None:
        if self.state != "ready":
            raise DynamoError(f"the graph is {self.state}; nothing can be changed now, see `dynamo status`")

    # --- answering -----------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The object of `dynamo status --json`. Never waits."""
        now_s = self.clock.now_s()
        head = self.fleet.head
        return {
            "namespace": head.namespace,
            "run_id": head.run_id,
            "state": self.state,
            "arbiter_pid": os.getpid(),
            "guardian_pid": self.guarding.pid,
            "on_arbiter_death": head.on_arbiter_death,
            "circus_endpoint": head.circus_endpoint,
            "etcd_endpoints": head.etcd_endpoints,
            "nats_server": head.nats_server,
            "frontend_url": self.registrations.frontend_url,
            "prefill_queue": self.sampling.queue.as_json() if self.links.queue is not None else None,
            "metrics_url": self.seeing.url,
            "gpus": gpu_status(self.pool.ledger.snapshot()),
            "quarantined_gpus": self.pool.ledger.quarantined(),
            "planner": self.planning.status(),
            "follow": None if self.following is None else self.following.status(),
            "notes": self.notes[-5:],
            "workers": [worker_status(worker, now_s) for worker in self.fleet.workers.values()],
        }

    def _ready_facts(self) -> dict[str, Any]:
        return {
            "namespace": self.deployment.graph.namespace,
            "frontend_url": self.registrations.frontend_url,
            "seconds": round(self.clock.now_s() - self._started_s, 3),
        }

    # --- leaving -------------------------------------------------------------------------------

    def request_down(self, why: str, *, now: bool = False) -> int:
        """Ask to leave, however often; with `now`, to end at once, cutting what streams. Returns our pid."""
        if now:
            self._now.set()
        if not self._asked_down.done():
            self._asked_down.set_result(why)
        return os.getpid()

    def signalled(self, why: str) -> None:
        """A signal asks us to leave; the second ends at once. `dynamo down` has `--now` for that instead."""
        self.request_down(why, now=self._signalled)
        self._signalled = True

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
        self.operations.leaving = True
        await self.planning.halt()
        if self.following is not None:
            await self.following.stop()
        if self.state == "adopting":
            await self._close(for_good=False)  # nothing was taken over: nothing is ended
            await self.seeing.stop()
            await self.guarding.stop()
            self._gone.set()
            return
        self.state = "leaving"
        try:
            await Leaving(self.fleet, self.clock, self._now, self.view).end_workers()
        finally:
            await self._let_go()

    async def _close(self, *, for_good: bool) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if for_good and self.deployment.nats_server is not None:
            await self.links.delete_queue()
        await self.links.close()

    async def _let_go(self) -> None:
        self._show_rows()
        await self._close(for_good=True)
        for name in list(self.fleet.workers):
            await self.arbiter.forget(name)
        await self.operations.sweep()
        await self.servers.stop()
        await self.seeing.stop()
        await self.guarding.stop()  # last: until here it would have ended what we had not
        try:
            await asyncio.to_thread(self.fleet.store.remove_if_owned, self.deployment.run_id)
        except DynamoError as error:
            log.warning("the statefile was not removed: %s", error)
        self._gone.set()


class InterruptedStart(DynamoError):
    """Somebody asked us to leave while we were starting: no failure of the graph."""

    code = "interrupted"
    exit_code = 130
