"""What is done to one worker: start it, ask it to leave, take that back, end it, and deal with its exit.

Each step is an event that is committed before it is acted on. Steps of one worker are in order; those of different
workers do not wait for each other: two drains of minutes block nobody (lesson 13). *Which* steps, is `core`'s.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from dynamo_local.clock import Clock
from dynamo_local.core.fleet_view import Course
from dynamo_local.core.lifecycle import (
    BackoffElapsed,
    BackoffStarted,
    Faulted,
    HealthFailed,
    ProcessExited,
    Removed,
    RestartRequested,
    Spawned,
    SpawnFailed,
    SpawnRequested,
    StartDeadlinePassed,
)
from dynamo_local.core.restarts import Fault, RestartHistory, after_exit
from dynamo_local.core.types import WorkerState
from dynamo_local.errors import DynamoError, GpuError
from dynamo_local.serve import leftovers
from dynamo_local.serve.draining import Draining
from dynamo_local.serve.fleet import Fleet, Worker
from dynamo_local.serve.gpus import GpuPool
from dynamo_local.serve.host import ProcessHost, ProcessSpec
from dynamo_local.serve.links import Links
from dynamo_local.serve.logs import log_tail, set_aside
from dynamo_local.serve.plan import WorkerPlanner
from dynamo_local.serve.processes import how_it_ended, kill_session, start_time_s

log = logging.getLogger(__name__)

INFRA_POLL_S = 0.25
GPU_POLL_S = 0.5
CONTROL_TIMEOUT_S = 2.0
SIGN_POLL_S = 0.005
NAMED_REQUESTS = 20
ADOPTED = "adopt"
LEFT = (WorkerState.DRAINING, WorkerState.DRAIN_TIMED_OUT)
WAITS = (WorkerState.PENDING, WorkerState.BACKING_OFF)
FAILED = (WorkerState.CRASHED, WorkerState.START_TIMED_OUT)


class Operations:
    """The hands of the supervisor. `env` (etcd, NATS) is added to every worker's environment."""

    def __init__(
        self,
        fleet: Fleet,
        host: ProcessHost,
        pool: GpuPool,
        planner: WorkerPlanner,
        links: Links,
        clock: Clock,
        *,
        background: Callable[[Coroutine[Any, Any, Any]], None],
        tell: Callable[[str], None],
    ) -> None:
        self.fleet = fleet
        self.env: dict[str, str] = {}
        self.leaving = False
        self.on_failure: Callable[[Worker, str], None] = lambda worker, message: None
        self._host = host
        self._pool = pool
        self._planner = planner
        self._links = links
        self._clock = clock
        self._background = background
        self._tell = tell
        self.end_children = partial(leftovers.end_children, planner.paths, planner.run_id)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        namespace = planner.graph.namespace
        self.draining = Draining(namespace, fleet, links, clock, self._locks, background=background, tell=tell)
        self.ask_again = self.draining.ask_again

    # --- starting ------------------------------------------------------------------------------

    async def start(self, names: Iterable[str], stimulus_id: str) -> None:
        """Make the processes of pending workers, all at once. Failures are the workers' states, not exceptions."""
        workers = [self.fleet.workers[name] for name in names]
        await self.fleet.apply({worker.name: SpawnRequested(stimulus_id=stimulus_id) for worker in workers})
        await asyncio.gather(*(self.spawn(worker, stimulus_id) for worker in workers))

    async def start_when_possible(self, worker: Worker, stimulus_id: str) -> None:
        """Start a pending worker as soon as it has its GPUs: those it lacks are taken when they are free."""
        needed = worker.plan.gpus_per_worker
        while len(worker.gpus) < needed:
            if self.leaving or worker.state is not WorkerState.PENDING or not self._is_current(worker):
                return
            if not await self._try_allocate(worker):
                await self._clock.sleep_until(self._clock.now_s() + GPU_POLL_S)
        if worker.state is WorkerState.PENDING and self._is_current(worker):
            await self.start([worker.name], stimulus_id)

    async def _try_allocate(self, worker: Worker) -> bool:
        await self._pool.refresh()
        if worker.gpus or worker.state not in WAITS or not self._is_current(worker):
            return False  # it was taken back, or somebody else gave it some, while we looked
        try:
            devices = self._pool.allocate(worker.name, worker.plan.gpus_per_worker)
        except GpuError as error:
            log.debug("%s waits for GPUs: %s", worker.name, error)
            return False
        self.assign(worker, devices)
        await self.fleet.commit([worker.name])
        return True

    def assign(self, worker: Worker, devices: tuple[Any, ...]) -> None:
        """Plan the worker anew on these devices: its environment pins it to them."""
        worker.gpus = devices
        worker.plan = self._planner.plan(self._planner.graph.service(worker.plan.component), worker.name, devices)

    def _is_current(self, worker: Worker) -> bool:
        return self.fleet.workers.get(worker.name) is worker

    async def spawn(self, worker: Worker, stimulus_id: str) -> None:
        """Make the process of a worker whose start is committed. A failure is the worker's state, not an exception."""
        async with self._locks[worker.name]:
            try:
                if worker.starts == 1:
                    await asyncio.to_thread(set_aside, worker.plan.log_file)
                pid = await self._host.start_process(self.spec(worker))
            except OSError as error:
                worker.reason = f"could not be started: {error}"
                await self.fleet.apply({worker.name: SpawnFailed(stimulus_id=stimulus_id, reason=str(error))})
                left = worker.state is WorkerState.EXITED  # it was asked to leave before it was there
                now_s = self._clock.now_s()
                self._background(self._gone(worker) if left else self._after_failure(worker, 0.0, now_s))
                return
            reason = worker.reason
            worker.process_began(pid, start_time_s(pid), self._clock)
            leaves = worker.state is WorkerState.DRAINING
            if leaves:
                worker.asked_s, worker.reason = self._clock.now_s(), reason
            event = Spawned(stimulus_id=stimulus_id, pid=pid, pid_start_time=worker.pid_start_time)
            await self.fleet.apply({worker.name: event})
        self._background(self.draining.ask_to_leave(worker, stimulus_id) if leaves else self._watch_start(worker, pid))

    def spec(self, worker: Worker) -> ProcessSpec:
        """How it is run."""
        plan = worker.plan
        return ProcessSpec(
            name=plan.name,
            argv=plan.argv,
            env={**plan.env, **self.env},
            cwd=plan.cwd,
            log_file=plan.log_file,
            graceful_timeout_s=plan.drain_deadline_s,
            death_signal=None if self._planner.settings.keep_on_arbiter_death else signal.SIGKILL,
            asks_itself=True,
            inherited_fds=tuple(self._pool.inherited_fds(worker.gpus)),
        )

    async def _watch_start(self, worker: Worker, pid: int) -> None:
        """Past its start deadline a worker is ended, and the failure named with the tail of its log."""
        deadline_s = self._clock.now_s() + worker.plan.start_deadline_s

        def settled() -> bool:
            return worker.pid != pid or worker.state is not WorkerState.STARTING

        if await self.fleet.until(settled, deadline_s) or self.leaving:
            return
        worker.reason = f"was not ready within {worker.plan.start_deadline_s:g} s"
        event = StartDeadlinePassed(stimulus_id="start-deadline", deadline_s=worker.plan.start_deadline_s)
        await self.fleet.apply({worker.name: event})
        kill_session(pid)

    # --- exits ---------------------------------------------------------------------------------

    def exited(self, name: str, pid: int, code: int | None) -> None:
        """From the host, within milliseconds of an exit."""
        kill_session(pid)  # what an engine left behind in its session keeps VRAM (lesson 3)
        worker = self.fleet.workers.get(name)
        if worker is not None and worker.pid == pid:
            self._background(self._exited(worker, pid, code))

    async def _exited(self, worker: Worker, pid: int, code: int | None) -> None:
        left, lease, ended_s = worker.state in LEFT, worker.lease, self._clock.now_s()
        ran_s = 0.0 if worker.ready_s is None else ended_s - worker.ready_s
        if not left and worker.state in (WorkerState.STARTING, WorkerState.READY):
            worker.reason = how_it_ended(code)
        elif left and code not in (0, None) and worker.state is WorkerState.DRAINING:
            worker.reason = f"{worker.reason or 'was leaving'}; {how_it_ended(code)}"
        for other in worker.other_leases:  # first of all: requests are still sent to what is behind it
            self._background(self._links.try_revoke(other, worker.name))
        worker.process_ended(code)
        await self.fleet.apply({worker.name: ProcessExited(stimulus_id=f"exit:{pid}", exit_code=code)})
        if not self.leaving:
            await self._end_children(worker.name)
        await self._links.try_revoke(lease, worker.name)
        if left:
            await self._gone(worker)
        else:
            if worker.state is WorkerState.START_TIMED_OUT:
                await self.free_gpus(worker)  # it may have died of its devices: the next start looks for any
            await self._after_failure(worker, ran_s, ended_s)

    async def _end_children(self, name: str) -> None:
        """Those that left its session: only their environment tells whose they are. Nothing runs under its name now."""
        await self._swept(lambda: self.end_children(name))

    async def sweep(self) -> None:
        """The same for all workers, when all are gone."""
        await self._swept(lambda: leftovers.end_workers(self._planner.paths, leftovers.Recorded()))

    async def _swept(self, end: Callable[[], list[str]]) -> None:
        try:
            ended = await asyncio.to_thread(end)
        except DynamoError as error:
            self._tell(f"something of a worker that is gone stays behind: {error}")
        else:
            for what in ended:
                log.warning("left behind by a worker that is gone, ended: %s", what)

    async def _gone(self, worker: Worker) -> None:
        """A worker that left: it is started again if that was the intent, else its entry goes, or is the template."""
        if worker.course in (Course.RESTARTING, Course.RETURNING) and not self.leaving:
            await self.revive(worker, "restart")
        else:
            await self.remove(worker)

    async def remove(self, worker: Worker) -> None:
        """No process any more: its GPUs go back, a suffixed entry goes with it, the bare one stays as a template.

        Somebody may want it again in the meantime: then it is theirs, with its GPUs.
        """
        await self.free_gpus(worker)
        async with self._locks[worker.name]:
            if not self._has_exited(worker):
                return
            await self._host.forget(worker.name)
            if not self._has_exited(worker):
                return
            worker.course = Course.STEADY
            if worker.name != self.bare_name(worker) and not self.leaving:
                await self.fleet.drop(worker.name)
        self.fleet.notify()

    def _has_exited(self, worker: Worker) -> bool:
        return self._is_current(worker) and worker.state is WorkerState.EXITED

    def bare_name(self, worker: Worker) -> str:
        """The name of its component's template."""
        return f"{self._planner.graph.namespace}_{worker.plan.component}"

    async def free_gpus(self, worker: Worker, *, only_busy: bool = False) -> None:
        """Give its devices back once their memory is returned; those that never are, are quarantined and told of.

        With `only_busy` it keeps them for its next process where all came back.
        """
        devices, then = worker.gpus, (worker.state, worker.starts)
        if not devices or worker.runs:
            return
        busy = await self._pool.returned(devices, self._clock)
        if (worker.state, worker.starts) != then or worker.gpus is not devices or (only_busy and not busy):
            return  # started again while we waited, it is on them itself
        for trouble in self._pool.give_back(worker.name, devices, busy):
            self._tell(trouble)
        worker.gpus = ()
        await self.fleet.commit([worker.name])
        self.fleet.notify()

    # --- failing and starting again ------------------------------------------------------------

    async def _after_failure(self, worker: Worker, ran_s: float, ended_s: float) -> None:
        """Restart with back-off, counted from the end of the process, or give up: `core.restarts` decides."""
        self.on_failure(worker, f"{worker.name} {worker.reason}; {log_tail(worker.plan)}")
        if self.leaving or worker.state not in FAILED or not self._is_current(worker):
            return  # restarted, or gone, before we came to it
        if worker.course is Course.LEAVING:  # taken back meanwhile
            await self.fleet.apply({worker.name: Removed(stimulus_id="restart-policy")})
            await self.remove(worker)
            return
        worker.history, verdict = after_exit(
            worker.history,
            now_s=self._clock.now_s(),
            ran_s=ran_s,
            infra_ok=self._links.answer,
            unit=random.random(),
            why=worker.reason or "it failed",
            policy=self._planner.settings.restart,
        )
        if isinstance(verdict, Fault):
            worker.reason = verdict.reason
            await self.fleet.apply({worker.name: Faulted(stimulus_id="restart-policy", reason=verdict.reason)})
            await self.free_gpus(worker)
            self._tell(f"{worker.name} is faulted: {worker.reason}; `dynamo restart {worker.name}` tries again")
            return
        await self.fleet.apply({worker.name: BackoffStarted(stimulus_id="restart-policy", delay_s=verdict.delay_s)})
        await self._clock.sleep_until(ended_s + verdict.delay_s)
        await self._start_again(worker)

    async def _start_again(self, worker: Worker) -> None:
        while not self._links.answer:  # restarts wait for etcd and NATS
            await self._clock.sleep_until(self._clock.now_s() + INFRA_POLL_S)
        if not self._backs_off(worker):
            return
        await self._regain_gpus(worker)
        while len(worker.gpus) < worker.plan.gpus_per_worker and self._backs_off(worker):
            if not await self._try_allocate(worker):
                await self._clock.sleep_until(self._clock.now_s() + GPU_POLL_S)
        if self._backs_off(worker):
            await self.fleet.apply({worker.name: BackoffElapsed(stimulus_id="restart-policy")})
            await self.spawn(worker, "restart-policy")

    def _backs_off(self, worker: Worker) -> bool:
        """Nobody restarted, removed or ended it meanwhile."""
        return self._is_current(worker) and worker.state is WorkerState.BACKING_OFF and not self.leaving

    async def revive(self, worker: Worker, stimulus_id: str) -> None:
        """Start a worker that has no process again, under its name."""
        worker.course = Course.STEADY
        await self.fleet.apply({worker.name: RestartRequested(stimulus_id=stimulus_id)})
        await self.bring_back(worker, stimulus_id)

    async def bring_back(self, worker: Worker, stimulus_id: str) -> None:
        """Start a worker whose restart is committed, with the configuration of now; its failures are forgotten."""
        worker.history = RestartHistory()
        await self._regain_gpus(worker)
        self.assign(worker, worker.gpus)
        await self.start_when_possible(worker, stimulus_id)

    async def _regain_gpus(self, worker: Worker) -> None:
        """The devices of the process that is gone, for the next one; else none, and others are looked for."""
        if not self._pool.relock(worker.name, worker.gpus):
            self._pool.let_go(worker.name, worker.gpus)
            worker.gpus = ()
        else:
            await self.free_gpus(worker, only_busy=True)

    # --- after a killed arbiter ----------------------------------------------------------------

    def resume(self, worker: Worker, gone: int | None) -> None:
        """Go on with an adopted worker where the killed arbiter stood. `gone` is the pid of a process that has ended
        while nobody watched: as if it ended now."""
        if gone is not None:
            self._background(self._exited(worker, gone, None))
        elif worker.pid is not None:
            self._resume_running(worker, worker.pid)
        elif worker.state is WorkerState.PENDING:
            self._background(self.start_when_possible(worker, ADOPTED))
        elif worker.state in (WorkerState.CRASHED, WorkerState.START_TIMED_OUT):
            self._background(self._after_failure(worker, 0.0, self._clock.now_s()))
        elif worker.state is WorkerState.BACKING_OFF:
            self._background(self._start_again(worker))
        elif worker.state is WorkerState.EXITED:
            self._background(self._gone(worker))

    def _resume_running(self, worker: Worker, pid: int) -> None:
        if worker.state is WorkerState.STARTING:
            self._background(self._watch_start(worker, pid))
        elif worker.state is WorkerState.DRAINING:
            self._background(self.draining.resume(worker, ADOPTED))
        elif worker.state is not WorkerState.READY:
            kill_session(pid)  # as was decided

    # --- health --------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Treat as crashed whoever has been silent for the bound while etcd and NATS answered."""
        now_s = self._clock.now_s()
        for worker in self.fleet.running():
            if worker.heard_s is None or self.leaving:
                continue
            silent_s = now_s - worker.heard_s
            if silent_s > self._planner.settings.health_bound_s:
                await self._hung(worker, f"is hung: it has answered nothing for {silent_s:.0f} s")

    async def _hung(self, worker: Worker, reason: str) -> None:
        pid, asked = worker.pid, worker.asked_s is not None
        if pid is not None and worker.state is WorkerState.DRAINING and asked:
            await self.draining.end_hung(worker, pid, reason)
            return
        if worker.state not in (WorkerState.READY, WorkerState.DRAINING):
            return  # a start has its own deadline
        worker.reason = reason
        await self.fleet.apply({worker.name: HealthFailed(stimulus_id="health", reason=reason)})
        await self._links.try_revoke(worker.lease, worker.name)
        if pid is not None:
            kill_session(pid)
