"""One run, from its start to its end: brings a deployment up, answers for it, and takes it down again.

One asyncio loop, which nothing here may block: files, NVML and fsync go through threads, etcd and NATS through
async clients, waits have deadlines. What becomes of workers is decided by `core.fleet.step` and done by the shell.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from dynamo_local.arbiter.adoption import Adoption, Found
from dynamo_local.arbiter.apply import Applying
from dynamo_local.arbiter.composition import Parts, compose
from dynamo_local.arbiter.controller import PULSE_EVERY_S
from dynamo_local.arbiter.deployment import Deployment, WatcherFactory
from dynamo_local.arbiter.links import INFRA_TIMEOUT_S
from dynamo_local.arbiter.planner_following import Following, layout_to_follow
from dynamo_local.arbiter.planning import Planning
from dynamo_local.arbiter.progress import View
from dynamo_local.arbiter.server_choice import choose_servers
from dynamo_local.arbiter.shown_logs import ShownLogs
from dynamo_local.arbiter.statefile import arbiter_facts, policy
from dynamo_local.arbiter.status import ready_facts, row, run_status
from dynamo_local.clock import Clock, sleep_to_next
from dynamo_local.core.fleet import draining as leaving
from dynamo_local.core.fleet.events import Leave, Resume, StartAll
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.types import GraphSpec, Role, WorkerState, suffix_of
from dynamo_local.errors import DynamoError, StartTimedOut, WorkerDied
from dynamo_local.state.store import StateStore
from dynamo_local.system.descriptors import ReservedDescriptors
from dynamo_local.system.gpu_pool import GpuPool
from dynamo_local.system.prctl import become_subreaper
from dynamo_local.system.process_host import AdoptingHost, SupervisedHost

# --- start_failures
# How a start can fail, and who is to blame.


class InterruptedStart(DynamoError):
    """Somebody asked us to leave while we were starting: no failure of the graph."""

    code = "interrupted"
    exit_code = 130


def too_late(worker: Worker, fleet: Fleet, factory: WatcherFactory, told: Mapping[str, str]) -> str:
    """Who was late, and the log of the worker that it waited for: one that waits for another has nothing to say.

    `told` has what starting workers wait for, as they said.
    """
    culprit = waited_for(worker, fleet, factory.graph)
    waits = "" if culprit is worker else f": it waits for {culprit.name}"
    if culprit.name in told:
        waits += f", which waits for {told[culprit.name]}" if waits else f": it waits for {told[culprit.name]}"
    return f"{worker.name} {worker.reason}{waits}; {factory.log_tail_of(culprit)}"


def waited_for(worker: Worker, fleet: Fleet, graph: GraphSpec) -> Worker:
    """Of a worker that is not ready: whom it waits for in the end; itself where it waits for nobody."""
    workers = list(fleet.workers.values())
    ready = {other.component for other in workers if other.ready}
    culprit = worker
    while waited := set(graph.service(culprit.component).depends) - ready:
        culprit = next((other for other in workers if other.component in waited), culprit)
        ready |= waited  # each is looked at once, also where two wait for each other
    return culprit


# --- commands
# What people and circus may have a run do: each command is answered only while the run is ready.


class RunCommands:
    """The commands of a `Supervisor`, which has what is named here. Each raises `DynamoError` while it is not ready."""

    state: str
    parts: Parts
    _applying: Applying

    async def scale(
        self,
        component: str,
        target: str,
        *,
        force: bool,
        victim_policy: str | None,
        stimulus_id: str,
        wake: bool = True,
    ) -> dict[str, Any]:
        """`dynamo scale`: returns once the intent is committed."""
        self._check_running()
        return await self.parts.orders.scale(
            component, target, force=force, victim_policy=victim_policy, stimulus_id=stimulus_id, wake=wake
        )

    async def sleep(self, name: str, *, level: int, force: bool, stimulus_id: str) -> dict[str, Any]:
        """`dynamo sleep NAME`."""
        self._check_running()
        return await self.parts.orders.sleep(name, level=level, force=force, stimulus_id=stimulus_id)

    async def wake(self, name: str, *, stimulus_id: str) -> dict[str, Any]:
        """`dynamo wake NAME`."""
        self._check_running()
        return await self.parts.orders.wake(name, stimulus_id=stimulus_id)

    async def drain(self, name: str, *, cancel: bool, force: bool, stimulus_id: str) -> dict[str, Any]:
        """`dynamo drain NAME [--cancel]`."""
        self._check_running()
        return await self.parts.orders.drain(name, cancel=cancel, force=force, stimulus_id=stimulus_id)

    async def flip(self, name: str, *, cancel: bool, force: bool, stimulus_id: str) -> dict[str, Any]:
        """`dynamo flip NAME [--cancel]`."""
        self._check_running()
        if cancel:
            return await self.parts.flips.cancel(name, stimulus_id=stimulus_id)
        return await self.parts.flips.flip(name, force=force, stimulus_id=stimulus_id)

    async def scale_flip(
        self, gives: str, takes: str, count: int, *, force: bool, victim_policy: str | None, stimulus_id: str
    ) -> dict[str, Any]:
        """`dynamo scale GIVES -N TAKES +N --flip`."""
        self._check_running()
        return await self.parts.flips.scale(
            gives, takes, count, force=force, victim_policy=victim_policy, stimulus_id=stimulus_id
        )

    async def restart(self, name_or_component: str, *, rolling: bool, force: bool, stimulus_id: str) -> dict[str, Any]:
        """`dynamo restart NAME|COMPONENT`."""
        self._check_running()
        return await self.parts.orders.restart(name_or_component, force=force, stimulus_id=stimulus_id)

    async def apply(self, deployment: Any, *, dry_run: bool, force: bool, stimulus_id: str) -> dict[str, Any]:
        """`dynamo apply -f FILE`."""
        self._check_running()
        return await self._applying.apply(deployment, dry_run=dry_run, force=force, stimulus_id=stimulus_id)

    def planner(self) -> Planning:
        """Whom the `dynamo planner` commands speak to."""
        self._check_running()
        return self.parts.planning

    def _check_running(self) -> None:
        if self.state != "ready":
            raise DynamoError(f"the graph is {self.state}; nothing can be changed now, see `dynamo status`")


log = logging.getLogger(__name__)

HEAL_EVERY_S = 2.0


class Supervisor(RunCommands):
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
        self.deployment = deployment
        self.clock = clock
        self.view = view
        self.state = "starting"
        self.following: Following | None = None
        self.parts = compose(
            deployment,
            host=arbiter,
            store=store,
            pool=pool,
            clock=clock,
            view=view,
            failed=self._failed,
            state=lambda: self.state,
        )
        self._applying = Applying(self.parts)
        self._spare = ReservedDescriptors(self.parts.notes.tell)
        self._started_s = clock.now_s()
        loop = asyncio.get_running_loop()
        self._death: asyncio.Future[DynamoError] = loop.create_future()
        self._asked_down: asyncio.Future[str] = loop.create_future()
        self._signalled = self._now = False
        self._gone = asyncio.Event()
        self.parts.servers.on_change = self._record_others
        arbiter.supervisor = self
        arbiter.on_exit = self._on_exit

    # --- coming up -----------------------------------------------------------------------------

    async def start(self, found: Found | None = None) -> None:
        """Everything up and ready, or a typed error that says what failed, with the tail of its log.

        With `found`, take that run back instead. Whoever calls lets us leave after an error, as after a run.
        """
        become_subreaper()
        parts = self.parts
        parts.leads.remember()
        parts.tasks.keep("descriptor check", partial(self._spare.run, self.clock))
        await parts.exporter.start()
        await parts.control_api.start()
        await parts.host.start()
        parts.tasks.keep("runtime folder check", parts.runtime_folder.run)
        await (self._start_anew() if found is None else self._take_back(found))
        self.state = "ready"
        parts.spared.begin(parts.tasks, self._record_others)
        await self._follow()
        await parts.planning.begin(
            starts=self.deployment.load_planner_flag if self.following is None else False,
            by_default=self.deployment.load_planner_starts,
        )
        self.view.ready(ready_facts(parts, self.clock.now_s() - self._started_s))

    async def _start_anew(self) -> None:
        parts, fleet = self.parts, self.parts.shell.fleet
        servers, parts.effects.env = await choose_servers(self.deployment, parts.servers, parts.statefile.head)
        for origin in parts.servers.origins:
            self.view.event(origin)
        await parts.statefile.create()
        await parts.guarding.start()  # before there is anything to be guarded
        workers = {}
        for plan in self.deployment.workers:
            uuids = fleet.gpus.held_uuids.get(plan.name, ())
            parts.pool.lock(plan.name, uuids)
            n = suffix_of(plan.name, fleet.namespace, plan.component)
            workers[plan.name] = Worker(plan.name, plan.component, plan.role, n, gpus=uuids)
        parts.shell.fleet = replace(fleet, workers=workers)
        # All at once: order governs readiness, not spawning. Whoever needs a server waits for it.
        parts.shell.feed(StartAll(stimulus_id="serve"))
        await asyncio.gather(*(parts.servers.spawn(name) for name in servers))
        self._show_logs(from_end=False)
        await self._unless_stopped(self._connect())
        await self._unless_stopped(self._all_ready())

    async def _take_back(self, found: Found) -> None:
        """Until the very end the run is our predecessor's: its guardian watches, and a failure of ours ends nothing."""
        self.state = "adopting"
        parts, shell = self.parts, self.parts.shell
        parts.statefile.head = found.state.model_copy(update={"components": {}, **arbiter_facts(self.deployment)})
        adoption = Adoption(found, cast(AdoptingHost, parts.host))  # only ours is asked to
        parts.effects.env = adoption.env(self.deployment.nats_server)
        shell.fleet = adoption.workers(shell.fleet, self.clock.now_s())
        shell.fleet = adoption.watch(shell.fleet, parts.effects.spec)
        adoption.watch_servers(parts.servers, self.deployment.paths)
        self._show_logs(from_end=True)
        await self._unless_stopped(self._connect())
        await self._unless_stopped(parts.registrations.looked_through(INFRA_TIMEOUT_S))
        shell.feed(Resume(stimulus_id="adopt", gone=adoption.gone))
        await parts.statefile.write(shell.fleet.workers, self._fleet)
        for restart in shell.fleet.restarts:
            names = ", ".join(name for name, _ in restart.todo)
            parts.notes.tell(f"the restart that was under way goes on: {names}")
        await parts.guarding.replace()
        parts.statefile.head.on_arbiter_death = policy(self.deployment)
        await self._record_others()

    async def _record_others(self) -> None:
        """Pids of servers and spares may change with every restart; an adoption needs those of now."""
        self.parts.statefile.head.servers = self.parts.servers.records() or None
        self.parts.statefile.head.spares = self.parts.spared.records() or None
        await self.parts.statefile.write_head(self._fleet)

    async def _connect(self) -> None:
        parts, services = self.parts, self.deployment.graph.services
        # Commands have queues of their own, if any: only a prefill component of ours pulls from this one.
        prefill = any(spec.role is Role.PREFILL and spec.runtime is None for spec in services)
        env = {**self.deployment.factory.base_env, **parts.effects.env}  # with what a worker connects
        await parts.links.connect(env, prefill_queue=prefill)
        parts.tasks.keep("registry watch", parts.registrations.follow, on_death=lambda: parts.links.etcd_seen(False))
        parts.tasks.keep("load sampling", parts.sampling.run)
        parts.tasks.keep("start watch", parts.starts.run)
        parts.tasks.keep("statefile check", self._heal)
        parts.tasks.keep("pulse", self._beat)

    async def _heal(self) -> None:
        while True:
            await sleep_to_next(self.clock, HEAL_EVERY_S)
            await self.parts.statefile.heal(self._fleet)

    async def _beat(self) -> None:
        while True:
            await sleep_to_next(self.clock, PULSE_EVERY_S)
            self.parts.shell.pulse()

    async def _follow(self) -> None:
        """Begin to carry out another planner's decisions, if we are to. The run is ready, its own planner not begun."""
        parts, deployment = self.parts, self.deployment
        plans = bool(deployment.load_planner_flag)
        layout = await layout_to_follow(parts.statefile, self._fleet, deployment.follow, plans=plans)
        if layout is None:
            return
        self.following = Following(
            parts.links.kv,
            deployment.graph.namespace,
            layout,
            fleet=parts.planning.world().worker_pools,
            waiting=parts.waiting,
            record=parts.events.record,
            scaler=parts.orders,
            clock=self.clock,
            tell=parts.notes.tell,
        )
        parts.planning.follows = self.following.status
        self.following.start()

    async def _all_ready(self) -> None:
        def late() -> list[str]:
            workers = self.parts.shell.fleet.workers.values()
            return [worker.name for worker in workers if not (worker.ready or worker.stands_by)]

        longest_s = max((plan.start_deadline_s for plan in self.deployment.workers), default=0.0)
        deadline_s = self._started_s + longest_s + HEAL_EVERY_S
        if not await self.parts.waiting.until(lambda: not late(), deadline_s):
            raise StartTimedOut(f"not ready in time: {', '.join(late())}")

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

    def _fleet(self) -> Fleet:
        return self.parts.shell.fleet

    # --- watching ------------------------------------------------------------------------------

    def _on_exit(self, name: str, pid: int, code: int | None) -> None:
        parts = self.parts
        ours = parts.servers.exited(name, code) or parts.guarding.exited(name, code)
        if not ours and not parts.spared.exited(name, pid, code):
            parts.effects.exited(name, pid, code)

    def _failed(self, worker: Worker, reason: str) -> None:
        """A worker failed. While we start, that ends the start; later it is told, and the policy acts."""
        message = f"{worker.name} {reason}; {self.parts.launcher.factory.log_tail_of(worker)}"
        if self.state == "starting":
            late = worker.state is WorkerState.START_TIMED_OUT
            if not self._death.done():
                self._death.set_result(self._too_late(worker) if late else WorkerDied(message))
        elif self.state != "leaving":
            self.parts.notes.failed(worker.name, reason)
            self.view.event(message)

    def _too_late(self, worker: Worker) -> StartTimedOut:
        parts = self.parts
        return StartTimedOut(too_late(worker, self._fleet(), parts.launcher.factory, parts.starts.waits_for))

    def _show_logs(self, *, from_end: bool) -> None:
        """Progress, log lines and rotation, for as long as we live."""
        parts = self.parts
        workers, servers = lambda: parts.shell.fleet.workers, lambda: parts.servers.names
        shown = ShownLogs(self.view, self.clock, workers, servers, self.deployment.paths.log_file, self._rows)
        if from_end:
            shown.skip_to_end()
        parts.tasks.keep("log display", partial(shown.run, changing=lambda: self.state != "ready"))

    def _rows(self) -> None:
        now_s, fleet = self.clock.now_s(), self.parts.shell.fleet
        waits_for = self.parts.starts.waits_for.get
        self.view.rows(self.state, [row(each, fleet, now_s, waits_for(each.name)) for each in fleet.workers.values()])

    # --- answering -----------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The object of `dynamo status --json`. Never waits."""
        return run_status(self.parts, self.state, self.following)

    # --- leaving -------------------------------------------------------------------------------

    def request_down(self, why: str, *, now: bool = False) -> int:
        """Ask to leave, however often; with `now`, to end at once, cutting what streams. Returns our pid."""
        if now and self.parts.shell.fleet.leaving is not None:
            self.parts.shell.feed(Leave(stimulus_id="down", now=True))
        self._now = self._now or now
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
        parts = self.parts
        if not self._asked_down.done():
            self._asked_down.set_result("the run ended")
        await parts.planning.halt()
        if self.following is not None:
            await self.following.stop()
        if self.state == "adopting":
            await self._close(for_good=False)  # nothing was taken over: nothing is ended
            await parts.control_api.stop()
            await parts.exporter.stop()
            await parts.guarding.stop()
            self._gone.set()
            return
        self.state = "leaving"
        await parts.spared.close()
        try:
            parts.shell.feed(Leave(stimulus_id="down", now=self._now))
            await parts.waiting.until(lambda: leaving.has_left(parts.shell.fleet))
        finally:
            await self._let_go()

    async def _close(self, *, for_good: bool) -> None:
        self.parts.shell.stopped = True
        await self.parts.tasks.close()
        self._spare.close()
        await self.parts.effects.close()
        if for_good and self.deployment.nats_server is not None:
            await self.parts.links.delete_queue()
        await self.parts.links.close()

    async def _let_go(self) -> None:
        parts = self.parts
        self._rows()
        await parts.effects.written()
        await self._close(for_good=True)
        for name in parts.shell.fleet.workers:
            await parts.host.forget(name)
        await parts.system.end_what_is_left()
        await parts.servers.stop()
        await parts.control_api.stop()
        await parts.exporter.stop()
        await parts.guarding.stop()  # last: until here it would have ended what we had not
        try:
            await asyncio.to_thread(parts.statefile.store.remove_if_owned, self.deployment.run_id)
        except DynamoError as error:
            log.warning("the statefile was not removed: %s", error)
        self._gone.set()
