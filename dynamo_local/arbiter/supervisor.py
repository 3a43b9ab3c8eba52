"""One run in its arbiter: brings a deployment up, answers commands, and takes it down again.

It runs on one asyncio loop, which nothing may block. Files, NVML and fsync use threads, etcd and NATS use async
clients, and every wait has a deadline. `core.fleet.step` decides about workers, and the controller carries that out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from dynamo_local.arbiter.adoption import Adoption, Found
from dynamo_local.arbiter.apply import ApplyCommand
from dynamo_local.arbiter.commands import ApplyDeployment
from dynamo_local.arbiter.composition import compose
from dynamo_local.arbiter.controller import PULSE_EVERY_S
from dynamo_local.arbiter.deployment import Deployment, WatcherFactory
from dynamo_local.arbiter.links import INFRA_TIMEOUT_S
from dynamo_local.arbiter.planner_following import DecisionFollower, layout_to_follow
from dynamo_local.arbiter.planning import ArbiterPlanner
from dynamo_local.arbiter.progress import ShownLogs, View
from dynamo_local.arbiter.servers import choose_servers
from dynamo_local.arbiter.statefile import arbiter_facts, policy
from dynamo_local.arbiter.status import ready_facts, row, run_status
from dynamo_local.clock import Clock, sleep_to_next
from dynamo_local.core.fleet import draining as leaving
from dynamo_local.core.fleet.events import Command, Leave, Resume, StartAll
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.types import GraphSpec, WorkerState, suffix_of
from dynamo_local.errors import DynamoError, StartTimedOut, WorkerDied
from dynamo_local.state.store import StateStore
from dynamo_local.system.descriptors import ReservedDescriptors
from dynamo_local.system.gpu_pool import GpuPool
from dynamo_local.system.prctl import become_subreaper
from dynamo_local.system.process_host import AdoptingHost, ExitCallback, SupervisedHost


class InterruptedStart(DynamoError):
    """Somebody asked the run to leave during its start. The graph did not fail."""

    code = "interrupted"
    exit_code = 130


def too_late(worker: Worker, fleet: Fleet, factory: WatcherFactory, waits_for: Mapping[str, str]) -> str:
    """Which worker was late, with the end of the log of the worker that it waited for.

    A worker that waits for another has nothing useful in its own log. `waits_for` has the workers' own answers.
    """
    culprit = waited_for(worker, fleet, factory.graph)
    waits = "" if culprit is worker else f": it waits for {culprit.name}"
    if culprit.name in waits_for:
        waits += (
            f", which waits for {waits_for[culprit.name]}" if waits else f": it waits for {waits_for[culprit.name]}"
        )
    return f"{worker.name} {worker.reason}{waits}; {factory.log_tail_of(culprit)}"


def waited_for(worker: Worker, fleet: Fleet, graph: GraphSpec) -> Worker:
    """The worker that an unready worker waits for in the end, or itself."""
    workers = list(fleet.workers.values())
    ready = {other.component for other in workers if other.ready}
    culprit = worker
    while waited := set(graph.service(culprit.component).depends) - ready:
        culprit = next((other for other in workers if other.component in waited), culprit)
        ready |= waited  # each is visited once, also if two wait for each other
    return culprit


log = logging.getLogger(__name__)

HEAL_EVERY_S = 2.0


class Supervisor:
    """One run of one namespace. `start`, then wait until it is asked to leave, then `leave`."""

    def __init__(
        self,
        deployment: Deployment,
        make_host: Callable[[Supervisor, ExitCallback], SupervisedHost],
        *,
        store: StateStore,
        pool: GpuPool,
        clock: Clock,
        view: View,
    ) -> None:
        self.deployment = deployment
        self.clock = clock
        self.view = view
        self.state = "starting"
        self.following: DecisionFollower | None = None
        self.parts = compose(
            deployment,
            host=make_host(self, self._on_exit),
            store=store,
            pool=pool,
            clock=clock,
            view=view,
            failed=self._failed,
            state=lambda: self.state,
            follows=lambda: None if self.following is None else self.following.status(),
            on_change=self._record_others,
        )
        self._applying = ApplyCommand(self.parts)
        self._descriptors = ReservedDescriptors(self.parts.notes.tell)
        self._started_s = clock.now_s()
        loop = asyncio.get_running_loop()
        self._death: asyncio.Future[DynamoError] = loop.create_future()
        self._down_requested: asyncio.Future[str] = loop.create_future()
        self._signalled = self._now = False
        self._gone = asyncio.Event()

    # --- commands ------------------------------------------------------------------------------

    async def run(self, command: Command) -> dict[str, Any]:
        """Answer a command once its intent is committed. Raises its refusal, and `DynamoError` unless we are ready."""
        self._check_running()
        if isinstance(command, ApplyDeployment):
            return await self._applying.apply(command)
        return await self.parts.commands.run(command)

    async def would(self, command: Command) -> dict[str, Any]:
        """The answer that the command would get. Nothing changes. Raises as `run` does."""
        self._check_running()
        return await self.parts.commands.would(command)

    def planner(self) -> ArbiterPlanner:
        """The planner, for the `dynamo planner` commands."""
        self._check_running()
        return self.parts.planning

    def _check_running(self) -> None:
        if self.state != "ready":
            raise DynamoError(f"the graph is {self.state}; nothing can be changed now, see `dynamo status`")

    # --- coming up -----------------------------------------------------------------------------

    async def start(self, found: Found | None = None) -> None:
        """Bring everything up, or raise a typed error with the end of the failed worker's log.

        With `found`, adopt that run instead. The caller calls `leave` after an error, as after a run.
        """
        become_subreaper()
        parts = self.parts
        parts.lead_times.remember()
        parts.tasks.keep("descriptor check", partial(self._descriptors.run, self.clock))
        await parts.exporter.start()
        parts.tasks.keep("planner's reports", parts.views.reports.run)
        await parts.control_api.start()
        await parts.host.start()
        parts.tasks.keep("runtime folder check", parts.runtime_folder.run)
        await (self._start_anew() if found is None else self._take_back(found))
        self.state = "ready"
        parts.prewarmed.begin(parts.tasks)
        parts.tasks.keep("held requests", parts.shares.follow)
        parts.tasks.keep("shares of the GPUs", parts.shares.run)
        if parts.dashboard.wanted:
            parts.tasks.keep("the page's process", parts.dashboard.run)
        await self._follow()
        await parts.planning.begin(
            starts=self.deployment.load_planner_flag if self.following is None else False,
            by_default=self.deployment.load_planner_starts,
        )
        if self.deployment.settings.dashboard is not None:
            self.view.event(f"page: dynamo dashboard --open -n {self.deployment.graph.namespace}")
        self.view.ready(ready_facts(parts, self.clock.now_s() - self._started_s))

    async def _start_anew(self) -> None:
        parts, fleet = self.parts, self.parts.controller.fleet
        servers, parts.effects.env = await choose_servers(self.deployment, parts.servers, parts.statefile.head)
        for origin in parts.servers.origins:
            self.view.event(origin)
        await parts.statefile.create()
        await parts.guardian.start()  # before there is anything to guard
        workers = {}
        for plan in self.deployment.workers:
            uuids = fleet.gpus.held_uuids.get(plan.name, ())
            parts.pool.lock(plan.name, uuids)
            n, role = suffix_of(plan.name, fleet.namespace, plan.component), fleet.template(plan.component).role
            workers[plan.name] = Worker(plan.name, plan.component, role, n, gpus=uuids)
        parts.controller.fleet = replace(fleet, workers=workers)
        # All at once: order matters for readiness, not for spawning. A worker that needs a server waits for it.
        parts.controller.feed(StartAll(stimulus_id="serve"))
        await asyncio.gather(*(parts.servers.spawn(name) for name in servers))
        self._show_logs(from_end=False)
        await self._unless_stopped(parts.servers.while_starting(self._connect()))
        await self._unless_stopped(self._all_ready())

    async def _take_back(self, found: Found) -> None:
        """Until the end of the adoption the run is the predecessor's: its guardian watches, and our failure ends
        nothing.
        """
        self.state = "adopting"
        parts, controller = self.parts, self.parts.controller
        said = dict(self.deployment.command_line) or None
        facts = {**arbiter_facts(self.deployment), "command_line": said}
        parts.statefile.head = found.state.model_copy(update={"components": {}, **facts})
        adoption = Adoption(found, cast(AdoptingHost, parts.host))  # only our own host is asked to
        parts.effects.env = adoption.env(self.deployment.nats_server)
        controller.fleet = adoption.workers(controller.fleet, self.clock.now_s())
        controller.fleet = adoption.watch(controller.fleet, parts.effects.spec)
        adoption.watch_servers(parts.servers, self.deployment.paths)
        self._show_logs(from_end=True)
        await self._unless_stopped(self._connect())
        await self._unless_stopped(parts.registrations.looked_through(INFRA_TIMEOUT_S))
        controller.feed(Resume(stimulus_id="adopt", gone=adoption.gone))
        await parts.statefile.write(controller.fleet.workers, self._fleet)
        for restart in controller.fleet.restarts:
            names = ", ".join(name for name, _ in restart.todo)
            parts.notes.tell(f"the restart that was under way goes on: {names}")
        await parts.guardian.replace()
        parts.statefile.head.on_arbiter_death = policy(self.deployment)
        await self._record_others()

    async def _record_others(self) -> None:
        """Record the pids of servers and prewarmed processes: an adoption needs the present ones."""
        self.parts.statefile.head.servers = self.parts.servers.records() or None
        self.parts.statefile.head.spares = self.parts.prewarmed.records() or None
        await self.parts.statefile.write_head(self._fleet)

    async def _connect(self) -> None:
        parts = self.parts
        env = {**self.deployment.factory.base_env, **parts.effects.env}  # the variables by which a worker connects
        await parts.links.connect(env, lambda: self.deployment.graph)
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
            self.parts.controller.pulse()

    async def _follow(self) -> None:
        """Follow another planner's decisions, if the run is to. The run is ready, and its own planner has not begun."""
        parts, deployment = self.parts, self.deployment
        plans = bool(deployment.load_planner_flag)
        layout = await layout_to_follow(parts.statefile, self._fleet, deployment.follow, plans=plans)
        if layout is None:
            return
        self.following = DecisionFollower(
            parts.links.kv,
            deployment.graph.namespace,
            layout,
            fleet=parts.planning.world().worker_pools,
            waiting=parts.waiting,
            record=parts.events.record,
            run=parts.commands.run,
            clock=self.clock,
            tell=parts.notes.tell,
        )
        self.following.start()

    async def _all_ready(self) -> None:
        def late() -> list[str]:
            workers = self.parts.controller.fleet.workers.values()
            return [worker.name for worker in workers if not (worker.ready or worker.stands_by)]

        longest_s = max((plan.start_deadline_s for plan in self.deployment.workers), default=0.0)
        deadline_s = self._started_s + longest_s + HEAL_EVERY_S
        if not await self.parts.waiting.until(lambda: not late(), deadline_s):
            raise StartTimedOut(f"not ready in time: {', '.join(late())}")

    async def _unless_stopped(self, work: Awaitable[None]) -> None:
        """Do `work`, unless a worker fails or a request to leave comes first."""
        task = asyncio.ensure_future(work)
        racing: set[asyncio.Future[Any]] = {task, self._death, self._down_requested}
        await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not self._death.done():
            await task
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, DynamoError):
            await task
        if self._death.done():
            raise self._death.result()
        raise InterruptedStart(f"left before it was ready: {self._down_requested.result()}")

    def _fleet(self) -> Fleet:
        return self.parts.controller.fleet

    # --- watching ------------------------------------------------------------------------------

    def _on_exit(self, name: str, pid: int, code: int | None) -> None:
        parts = self.parts
        ours = parts.servers.exited(name, code) or parts.guardian.exited(name, code)
        if not ours and not parts.prewarmed.exited(name, pid, code):
            parts.effects.exited(name, pid, code)

    def _failed(self, worker: Worker, reason: str) -> None:
        """A worker failed. During the start this ends the start. Later it is noted, and the restart policy acts."""
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
        """Show progress and log lines, and rotate logs, until the end."""
        parts = self.parts
        workers, servers = lambda: parts.controller.fleet.workers, lambda: parts.servers.names
        shown = ShownLogs(self.view, self.clock, workers, servers, self.deployment.paths.log_file, self._rows)
        if from_end:
            shown.skip_to_end()
        parts.tasks.keep("log display", partial(shown.run, changing=lambda: self.state != "ready"))

    def _rows(self) -> None:
        now_s, fleet = self.clock.now_s(), self.parts.controller.fleet
        waits_for = self.parts.starts.waits_for.get
        self.view.rows(self.state, [row(each, fleet, now_s, waits_for(each.name)) for each in fleet.workers.values()])

    # --- answering -----------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The object of `dynamo status --json`. Never waits."""
        return run_status(self.parts, self.state, self.following)

    # --- leaving -------------------------------------------------------------------------------

    def request_down(self, why: str, *, now: bool = False) -> int:
        """Ask the run to leave. With `now` it ends at once and cuts streams. Returns our pid."""
        if now and self.parts.controller.fleet.leaving is not None:
            self.parts.controller.feed(Leave(stimulus_id="down", now=True))
        self._now = self._now or now
        if not self._down_requested.done():
            self._down_requested.set_result(why)
        return os.getpid()

    def signalled(self, why: str) -> None:
        """A signal asks the run to leave. The second one ends it at once. `dynamo down` has `--now` for that."""
        self.request_down(why, now=self._signalled)
        self._signalled = True

    async def wait_down_request(self) -> str:
        """The reason of the request to leave."""
        return await asyncio.shield(self._down_requested)

    async def down(self, why: str) -> None:
        """Leave, and return when everything but the arbiter itself is gone."""
        self.request_down(why)
        await self._gone.wait()

    async def leave(self) -> None:
        """End the workers in order, then NATS and etcd. Then remove our files."""
        parts = self.parts
        if not self._down_requested.done():
            self._down_requested.set_result("the run ended")
        await parts.planning.halt()
        if self.following is not None:
            await self.following.stop()
        if self.state == "adopting":
            await self._close(for_good=False)  # nothing was taken over, so nothing is ended
            await parts.control_api.stop()
            await parts.views.reports.close()
            await parts.exporter.stop()
            await parts.guardian.stop()
            self._gone.set()
            return
        self.state = "leaving"
        await parts.prewarmed.close()
        try:
            parts.controller.feed(Leave(stimulus_id="down", now=self._now))
            await parts.waiting.until(lambda: leaving.has_left(parts.controller.fleet))
        finally:
            await self._let_go()

    async def _close(self, *, for_good: bool) -> None:
        self.parts.controller.stopped = True
        await self.parts.tasks.close()
        self._descriptors.close()
        await self.parts.effects.close()
        if for_good and self.deployment.nats_server is not None:
            await self.parts.links.delete_queue()
        await self.parts.links.close()

    async def _let_go(self) -> None:
        parts = self.parts
        self._rows()
        await parts.effects.written()
        await self._close(for_good=True)
        for name in parts.controller.fleet.workers:
            await parts.host.forget(name)
        await parts.system.end_what_is_left()
        await parts.servers.stop()
        await parts.dashboard.stop()
        await parts.control_api.stop()
        await parts.views.reports.close()
        await parts.exporter.stop()
        await parts.guardian.stop()  # last: until here it would have ended what we had not
        try:
            await asyncio.to_thread(parts.statefile.store.remove_if_owned, self.deployment.run_id)
        except DynamoError as error:
            log.warning("the statefile was not removed: %s", error)
        self._gone.set()
