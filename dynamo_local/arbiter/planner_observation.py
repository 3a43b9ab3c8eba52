"""Observes workers for the arbiter's planner: requests, forward passes, loads and the prefill queue.

Workers answer questions (`transport.observation`). They send nothing by themselves. Requests are counted every five
seconds while a policy needs them, and passes are read when a policy wants them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any

from dynamo_local.arbiter.controller import FleetController
from dynamo_local.arbiter.links import Links
from dynamo_local.arbiter.planner_options import prometheus_options
from dynamo_local.arbiter.profile_check import ProfileDrift
from dynamo_local.arbiter.sampler import Sampling
from dynamo_local.clock import Clock, Turns
from dynamo_local.components.commands.launch import DYNAMO_1X
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.config.resolve import planned_components
from dynamo_local.core.fleet.fleet import Worker
from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.notes import Tell
from dynamo_local.core.types import WAKES, Actuator, GraphSpec, Load, Missing, Role
from dynamo_local.errors import DynamoError
from dynamo_local.planner.collector import Sampled
from dynamo_local.planner.policies.pools import pools_of
from dynamo_local.planner.prometheus import PrometheusTraffic
from dynamo_local.planner.scaling_times import ScalingTimes
from dynamo_local.planner.sources import SCRAPE_EVERY_S, Counted, CounterHistory, PassTracker, ReadyWorker
from dynamo_local.planner.values import Capabilities, Ended, Engines, Requests, Traffic, WorkerPools

log = logging.getLogger(__name__)

ENGINES = frozenset({Role.PREFILL, Role.DECODE, Role.AGGREGATED})
ANSWER = frozenset({None, DYNAMO_1X})
"""The runtimes whose frontends and engines answer. None stands for our own components."""


class ObservationSources:
    """The `TrafficSource`, `RequestSource` and `PassSource` of one graph.

    `follow` prepares for a planner's options, `close` ends that. `background` runs coroutines that nobody awaits.
    """

    def __init__(
        self,
        graph: Callable[[], GraphSpec],
        controller: FleetController,
        links: Links,
        clock: Clock,
        background: Callable[[Coroutine[Any, Any, None]], None],
        tell: Tell,
    ) -> None:
        self._graph = graph
        self._controller = controller
        self._links = links
        self._clock = clock
        self._background = background
        self._history = CounterHistory()
        self._tracker = PassTracker()
        self._measured: dict[str, dict[str, Any]] = {}
        """Answers by component and by a worker's configuration (`Worker.launched`). The newest is last."""
        self._learns = False
        self._observer: Any = None
        self._counting: asyncio.Task[None] | None = None
        self._asking = asyncio.Lock()
        self._elsewhere: PrometheusTraffic | None = None
        self.drift = ProfileDrift(self._passes_for, clock, tell)

    # --- what is wanted ----------------------------------------------------------------------------

    def follow(self, options: PlannerConfig) -> None:
        """Prepare for a planner with these options: a window needs counts from before its end."""
        self.drift.follow(options)
        self._learns = options.policy == "throughput-load" and options.optimization_target == "sla"
        prometheus = prometheus_options(options, self._graph().namespace)
        if self._elsewhere is not None and prometheus != self._elsewhere.options:
            self._leave_elsewhere()
        if prometheus is not None and self._elsewhere is None:
            self._elsewhere = PrometheusTraffic(prometheus, self._clock)
        if options.policy == "load" or prometheus is not None:
            self._stop_counting()
            return
        self._history.keep_s = options.throughput_adjustment_interval_seconds
        if self._counting is None:
            self._counting = asyncio.create_task(self._count(), name="counting requests")

    def close(self) -> None:
        """Ask no worker any more."""
        self.drift.close()
        self._stop_counting()
        self._leave_elsewhere()

    def _stop_counting(self) -> None:
        task, self._counting = self._counting, None
        if task is not None:
            task.cancel()

    def _leave_elsewhere(self) -> None:
        elsewhere, self._elsewhere = self._elsewhere, None
        if elsewhere is not None:
            self._background(elsewhere.close())

    # --- the sources ---------------------------------------------------------------------------------

    async def traffic(self, window_s: float) -> Traffic | Missing:
        if self._elsewhere is not None:
            return await self._elsewhere.traffic(window_s)
        await self._scrape()
        return self._history.traffic(window_s, self._clock.now_s())

    async def requests(self, window_s: float) -> Requests | Missing:
        from dynamo_local.transport.observation import Question

        if self._elsewhere is not None:
            return Missing("Prometheus counts requests together")
        workers = self._controller.fleet.workers.values()
        expected = frozenset(worker.name for worker in workers if worker.ready and worker.role is Role.FRONTEND)
        heard = await self._ask(Question(requests_s=window_s), expected)
        answers = {name: one for name, one in heard.items() if one.requests is not None}
        if not expected or expected - answers.keys():
            return Missing(f"{', '.join(sorted(expected - answers.keys())) or 'nobody'} told no single requests")
        now_s = self._clock.now_s()
        began = sorted(one.at_s - age_s for one in answers.values() for age_s in one.requests.began_s)
        ended = [
            Ended(one.at_s - each.age_s, each.isl, each.osl, each.ttft_s, each.itl_s)
            for one in answers.values()
            for each in one.requests.answered
        ]
        ended.sort(key=lambda each: each.at_s)
        return Requests(now_s - window_s, now_s, tuple(began), tuple(ended))

    async def passes(self) -> Engines:
        ready = self._ready()
        await self._ask_passes(ready)
        return self._tracker.take(_serving(ready), self._clock.now_s())

    async def _passes_for(self, tracker: PassTracker) -> Engines:
        """The passes since that tracker's last ones, independent of other readers. Raises `NatsUnavailable`."""
        from dynamo_local.transport.observation import Question

        ready = self._ready()
        heard = await self._ask(Question(passes=True, after=tracker.after()), frozenset(ready))
        for name in heard.keys() & ready.keys():
            one = heard[name]
            tracker.heard(name, one.passes, ranks=one.limits.get("dp_size") or 1, missed=one.missed)
        return tracker.take(_serving(ready), self._clock.now_s())

    def capabilities(self) -> Mapping[str, Capabilities]:
        return self._tracker.capabilities()

    # --- asking --------------------------------------------------------------------------------------

    async def _count(self) -> None:
        next_s = self._clock.now_s()
        while True:
            await self._clock.sleep_until(next_s)
            try:
                await self._scrape()
                await self._ask_benchmarks()
            except Exception:  # a defect must not end the counting in silence
                log.exception("counting the requests failed, and is tried again")
            next_s = max(next_s + SCRAPE_EVERY_S, self._clock.now_s())

    async def _scrape(self) -> None:
        """Read all counters once. A concurrent caller waits and reads again."""
        from dynamo_local.transport.observation import Question

        async with self._asking:
            ready = [
                worker for worker in self._controller.fleet.workers.values() if worker.ready and self._counts(worker)
            ]
            expected = frozenset(worker.name for worker in ready)
            try:
                heard = await self._ask(Question(counters=True), expected)
            except DynamoError as error:
                self._history.failed(str(error))
                return
            counted = [self._counted(name, one) for name, one in heard.items() if one.counters is not None]
            answers = {one.name for one in counted}
            absent = [w.name for w in ready if w.role is Role.FRONTEND and w.name not in answers]
            self._history.add(self._clock.now_s(), counted, absent=absent)

    def _counted(self, name: str, one: Any) -> Counted:
        """A draining frontend counts, too: clients made its requests."""
        frontends = {spec.name for spec in self._graph().services if spec.role is Role.FRONTEND}
        prefills = next(filter(None, planned_components(self._graph())))  # an aggregated graph has one kind
        return Counted(
            frontend=one.component in frontends,
            prefills=one.component == prefills,
            name=name,
            epoch=one.epoch,
            up_since_s=one.up_since_s,
            counters=one.counters,
        )

    def _ready(self) -> dict[str, Worker]:
        """The ready workers with an engine, by name."""
        workers = self._controller.fleet.workers
        return {name: worker for name, worker in workers.items() if worker.ready and self._has_engine(worker)}

    async def _ask_benchmarks(self) -> None:
        """Ask for benchmarks before the first passes are wanted, so that the first decision has them."""
        from dynamo_local.transport.observation import Question

        ready = self._ready()
        names = self._unmeasured(ready.values()) if self._learns else []
        try:
            heard = await self._ask(Question(benchmarks=names), frozenset(names))
        except DynamoError as error:
            log.debug("no benchmarks: %s", error)
            return
        for name in heard.keys() & frozenset(names):
            self._measured_itself(ready[name], heard[name])

    def _measured_itself(self, worker: Worker, one: Any) -> None:
        if one.benchmark is not None:
            self._measured.setdefault(worker.component, {})[worker.start.launched] = one.benchmark

    async def _ask_passes(self, expected: Mapping[str, Worker]) -> None:
        from dynamo_local.transport.observation import Question

        unmeasured = self._unmeasured(expected.values()) if self._learns else []
        question = Question(passes=True, after=self._tracker.after(), benchmarks=unmeasured)
        try:
            heard = await self._ask(question, frozenset(expected))
        except DynamoError as error:
            log.debug("no passes: %s", error)
            return
        turns = Turns()
        for name, one in heard.items():
            await turns.next()
            if name not in expected:
                continue
            self._measured_itself(expected[name], one)
            known = self._measured.get(one.component, {})
            limits = {limit: value for limit, value in one.limits.items() if value is not None}
            can = Capabilities(**limits, benchmark=next(reversed(known.values()), None))
            self._tracker.can(one.component, can)
            self._tracker.heard(name, one.passes, ranks=can.dp_size, missed=one.missed)

    def _unmeasured(self, ready: Iterable[Worker]) -> list[str]:
        """One worker of each component and configuration whose benchmark is unknown."""
        by_component: dict[str, dict[str, str]] = {}
        for worker in ready:
            by_component.setdefault(worker.component, {}).setdefault(worker.start.launched, worker.name)
        for component, current in by_component.items():
            known = self._measured.get(component, {})
            self._measured[component] = {
                launched: answers for launched, answers in known.items() if launched in current
            }
        return [
            name
            for component, current in by_component.items()
            for launched, name in current.items()
            if launched not in self._measured[component]
        ]

    async def _ask(self, question: Any, expected: frozenset[str]) -> Mapping[str, Any]:
        from dynamo_local.transport.observation import Observer

        if self._observer is None:
            self._observer = Observer(self._links.nats, self._graph().namespace, self._clock)
        return await self._observer.ask(question, expected)

    def _counts(self, worker: Worker) -> bool:
        return worker.role in ENGINES | {Role.FRONTEND} and self._runtime(worker) in ANSWER

    def _has_engine(self, worker: Worker) -> bool:
        return worker.component in planned_components(self._graph()) and worker.role in ENGINES and self._counts(worker)

    def _runtime(self, worker: Worker) -> str | None:
        return next((spec.runtime for spec in self._graph().services if spec.name == worker.component), None)


def _serving(ready: Mapping[str, Worker]) -> Iterable[ReadyWorker]:
    return (ReadyWorker(name, worker.component, _worker_id(worker)) for name, worker in ready.items())


def _worker_id(worker: Worker) -> str:
    """The engine's id: a command's own lease, else the worker's."""
    lease = next(iter(worker.other_leases), worker.lease)
    return "" if lease is None else str(int(lease, 16))


class ArbiterWorld:
    """The planner's view of its arbiter: `loop.World`, and both sources of metrics.

    `pending` says whether another environment has yet to carry a decision out, `actuators` how decisions may be
    carried out. Prefill workers that are commands have no queue of ours. For them `waiting_in` has, by component, the
    field of a worker's load that counts requests waiting for a prefill.
    """

    def __init__(
        self,
        controller: FleetController,
        sampling: Sampling,
        links: Links,
        prefill: str | None,
        decode: str,
        clock: Clock,
        times: ScalingTimes,
        *,
        waiting_in: Mapping[str, str] = {},
        actuators: Callable[[], frozenset[Actuator]] = lambda: WAKES,
        pending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._controller = controller
        self._sampling = sampling
        self._links = links
        self._prefill = prefill
        self._decode = decode
        self._clock = clock
        self._times = times
        self._waiting_in = waiting_in
        self._actuators = actuators
        self._pending = pending

    def worker_pools(self) -> WorkerPools:
        """The present counts. A draining worker whose keys are still in etcd may still get requests."""
        workers = self._controller.fleet.workers.values()
        routed = {w.name for w in workers if TRAITS[w.state].drains and w.lease is not None}
        pools = pools_of(
            self._controller.fleet,
            decode=self._decode,
            prefill=self._prefill,
            routed=routed,
            actuators=self._actuators(),
        )
        return replace(self._times.reported(pools), pending=self._pending())

    def ready(self) -> tuple[str, ...]:
        """Names of the ready decode workers."""
        return tuple(worker.name for worker in self._controller.fleet.ready(self._decode))

    def blind(self) -> str | None:
        """Why the planner cannot see: without etcd the ready workers are unknown, without NATS none can be asked."""
        if not self._links.etcd_answers:
            return "etcd does not answer, so the ready workers are not known"
        if not self._links.answer:
            return "NATS is not connected, so loads and the prefill queue are not known"
        return None

    async def loads(self) -> Mapping[str, Sampled[Load]] | Missing:
        sample = await self._sampling.loads()
        if sample.failed is not None:
            return sample.failed
        return {name: Sampled(load, at_s) for name, (load, at_s) in sample.loads.items()}

    async def depth(self) -> Sampled[int] | Missing:
        if self._waiting_in:
            return await self._prefills_waiting()
        depth = await self._sampling.depth()
        return depth if isinstance(depth, Missing) else Sampled(depth.pending, self._clock.now_s())

    async def _prefills_waiting(self) -> Sampled[int] | Missing:
        """Requests that wait in prefill workers, and in the frontends' routers for one.

        If one of them does not answer, the sum is missing.
        """
        sample = await self._sampling.loads()
        if sample.failed is not None:
            return sample.failed
        waiting, taken_s = 0, self._clock.now_s()
        for worker in [worker for worker in self._controller.fleet.workers.values() if worker.ready]:
            field = self._waiting_in.get(worker.component)
            if field is None:
                continue
            if worker.name not in sample.loads:
                return Missing(f"{worker.name} does not say what waits there")
            load, at_s = sample.loads[worker.name]
            count = getattr(load, field)
            if count is None:
                return Missing(f"{worker.name} does not say how many requests wait for a prefill")
            waiting, taken_s = waiting + count, min(taken_s, at_s)
        return Sampled(waiting, taken_s)


def prefills_wait_in(graph: GraphSpec, prefill: str | None) -> dict[str, str]:
    """`ArbiterWorld.waiting_in`: prefill workers that are commands, and Dynamo's frontends, whose routers hold
    requests.
    """
    if prefill is None or graph.service(prefill).runtime is None:
        return {}
    fields = {DYNAMO_1X: "prefills_waiting"}
    return {
        spec.name: fields.get(spec.runtime or "", "num_requests_waiting")
        for spec in graph.services
        if spec.name == prefill or (spec.role is Role.FRONTEND and spec.runtime == DYNAMO_1X)
    }
