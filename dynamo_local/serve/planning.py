"""The load planner in its arbiter: options checked and kept, its view of the fleet, its log, and what commands ask.

`planner.loop` plans; this starts and stops it, and is the only one that knows both it and the rest of the arbiter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dynamo_local.clock import Clock
from dynamo_local.config import PlannerConfig, check_planner, planned_components
from dynamo_local.core.types import GraphSpec, Load, Missing, Role, WorkerState
from dynamo_local.core.virtual import Layout
from dynamo_local.errors import BadInput, DynamoError, StateError
from dynamo_local.planner.local_connector import LocalConnector
from dynamo_local.planner.loop import Connector, Counts, PlannerLoop, PlannerState
from dynamo_local.planner.observing import PlannerObserver
from dynamo_local.planner.pools import fleet_of
from dynamo_local.planner.pulling import Puller, Sampled
from dynamo_local.planner.record import DecisionRecord
from dynamo_local.planner.values import Fleet, Reading
from dynamo_local.planner.virtual_connector import VirtualConnector
from dynamo_local.planner.virtual_keys import VirtualKeys
from dynamo_local.runtimes.launching import DYNAMO_1X
from dynamo_local.sdk.settings import validate_section
from dynamo_local.serve import decisions
from dynamo_local.serve.decisions import DecisionLog, decision_log_path
from dynamo_local.serve.fleet import Fleet as Workers
from dynamo_local.serve.links import Links
from dynamo_local.serve.planner_options import load_options
from dynamo_local.serve.sampling import Sampling
from dynamo_local.serve.scaling import Scaler
from dynamo_local.state import PlannerEntry

log = logging.getLogger(__name__)

NOT_OPTIONS = frozenset({"enabled", "namespace"})
"""Keys of the section that say where and whether, not how."""
AT_START = {"log_dir": "--log-dir", "environment": "--environment", "virtual_keys": "--virtual-keys"}
"""What can be chosen at a start only, and its option there."""


class Planning:
    """The planner of one run. Made stopped; its commands raise `DynamoError`s fit for a person."""

    def __init__(
        self,
        graph: GraphSpec,
        options: PlannerConfig,
        *,
        scaler: Scaler,
        fleet: Workers,
        sampling: Sampling,
        links: Links,
        clock: Clock,
        logs: Path,
        background: Callable[[Coroutine[Any, Any, Any]], None],
        tell: Callable[[str], None],
    ) -> None:
        self._graph = graph
        self._fleet = fleet
        self._clock = clock
        self._scaler = scaler
        self._sampling = sampling
        self._links = links
        self._background = background
        self._tell = tell
        self._loop: PlannerLoop | None = None
        self._world: ArbiterWorld | None = None
        self._virtual: VirtualConnector | None = None
        self._changing = asyncio.Lock()
        self._log_path = decision_log_path(logs)
        self.options = options
        self.observers: list[PlannerObserver] = []
        """Told of every reading and decision; whoever wants to look on adds itself before the graph is ready."""
        self.before_start: Callable[[PlannerConfig], Awaitable[None]] = _nothing
        """Called with the options of each start; a `DynamoError` refuses it."""
        self.after_stop: Callable[[], Awaitable[None]] = _nothing
        self.onlookers_say: Callable[[], dict[str, Any]] = dict
        """What they add to the status."""
        self.follows: Callable[[], dict[str, Any] | None] = lambda: None
        """What is said of another planner whose decisions the run carries out: then this one stays stopped."""

    # --- with the run ----------------------------------------------------------------------------

    async def begin(self, *, starts: bool | None, by_default: bool) -> None:
        """The graph is ready. `starts` is what the command line says; else an adopted run's planner goes on as it
        was, and a new run's starts if the configuration asks for it."""
        entry = self._fleet.head.planner  # of the arbiter whose run was adopted
        before = None if entry is None else PlannerState(entry.state)
        wanted = starts if starts is not None else by_default if before is None else before is not PlannerState.STOPPED
        try:
            if entry is not None:
                self.options = self._merged(entry.options, base=PlannerConfig())
            if wanted:
                await self._start(self.options, paused=starts is None and before is PlannerState.PAUSED)
            elif before not in (None, PlannerState.STOPPED):
                await self._keep()
        except DynamoError as error:  # the graph serves all the same
            self._tell(f"the planner was not started: {error}; `dynamo planner start` tries again")

    async def halt(self) -> None:
        """The run is leaving: nothing is planned any more."""
        if self._loop is not None and self._loop.state is not PlannerState.STOPPED:
            await self._stop(self._loop)

    # --- commands --------------------------------------------------------------------------------

    async def start(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """`dynamo planner start`: with the options of now, and these over them."""
        async with self._changing:
            if self.state is not PlannerState.STOPPED:
                raise DynamoError(
                    f"the planner is {self.state} already; `dynamo planner set` changes its options, "
                    "`dynamo planner resume` ends a pause"
                )
            await self._start(self._merged(options))
            return self.status()

    async def stop(self) -> dict[str, Any]:
        """`dynamo planner stop`: returns when a tick that was under way has ended."""
        async with self._changing:
            await self._stop(self._running("stop"))
            await self._keep()
            return self.status()

    async def pause(self) -> dict[str, Any]:
        """`dynamo planner pause`: it goes on observing."""
        async with self._changing:
            loop = self._running("pause")
            if loop.state is not PlannerState.PAUSED:
                loop.pause()
                await self._keep()
            return self.status()

    async def resume(self) -> dict[str, Any]:
        """`dynamo planner resume`: its interval begins anew."""
        async with self._changing:
            loop = self._running("resume")
            if loop.state is not PlannerState.RUNNING:
                loop.resume()
                await self._keep()
            return self.status()

    async def set(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """`dynamo planner set KEY=VALUE …`: all of them, or none. Of a stopped planner: for its next start."""
        if not options:
            raise BadInput("say what to change: KEY=VALUE, for example decode-kv-scale-up-threshold=0.8")
        async with self._changing:
            merged = self._merged(options)
            for name, option in AT_START.items() if self.state is not PlannerState.STOPPED else ():
                if getattr(merged, name) != getattr(self.options, name):
                    why = f"{name} can be chosen at the start only: stop the planner, and start it with {option}"
                    raise BadInput(why)
            self.options = merged
            if self._loop is not None:
                self._loop.change(load_options(self.options), no_operation=self.options.no_operation)
            if self._virtual is not None:
                self._virtual.change(max_wait_s=merged.virtual_max_wait, blocking=merged.virtual_blocking)
            await self._keep()
            return self.status()

    async def history(self, count: int) -> list[dict[str, Any]]:
        """The last so many decisions, as logged."""
        found = await asyncio.to_thread(decisions.read, self._log_path, last=count)
        return [dict(record) for record in found]

    async def explain(self, count: int) -> list[str]:
        """The same in words."""
        return [decisions.words(record) for record in await self.history(count)]

    # --- answering -------------------------------------------------------------------------------

    @property
    def state(self) -> PlannerState:
        return PlannerState.STOPPED if self._loop is None else self._loop.state

    @property
    def counts(self) -> Counts:
        """Of this arbiter's time."""
        return Counts() if self._loop is None else self._loop.counts

    def status(self) -> dict[str, Any]:
        """The object of `dynamo planner status --json`, and `planner` in `dynamo status --json`. Never waits."""
        options = self.options.model_dump(mode="json", exclude=set(NOT_OPTIONS))
        told: dict[str, Any] = {
            "state": str(self.state),
            "no_operation": self.options.no_operation,
            "options": options,
            "follow": self.follows(),
            "virtual": None if self._virtual is None else self._virtual.status(),
            **self.onlookers_say(),
        }
        loop, now_s = self._loop, self._clock.now_s()
        if loop is None:
            return {**told, "last_decision": None, "trouble": None}
        rounds = loop.rounds
        next_s = None if rounds is None else rounds.next_tick_at
        return {
            **told,
            "for_s": round(now_s - loop.since_s, 3),
            "adjusting": rounds is not None and rounds.adjusting,
            "next_decision_s": None if next_s is None else round(next_s - now_s, 3),
            "waiting_for_gpus": [] if rounds is None else list(rounds.deferred),
            "pulls": loop.counts.pulls,
            "decisions": loop.counts.decisions,
            "failed_ticks": loop.counts.failed_ticks,
            "lag_s": round(loop.counts.lag_s, 4),
            "trouble": loop.trouble,
            "last_decision": None if loop.last is None else decisions.as_json(loop.last),
        }

    # --- inside ----------------------------------------------------------------------------------

    async def _start(self, options: PlannerConfig, *, paused: bool = False) -> None:
        if self.follows() is not None:
            raise DynamoError(
                "this run carries out another planner's decisions (--follow), and two planners would undo each "
                "other's; to plan here, `dynamo serve` it without --follow"
            )
        if self._loop is None or self._world is None:
            self._world = self.world()
            self._loop = await self._made(self._world)
        connector = await self._connected(options, self._world)
        try:
            await self.before_start(options)
        except BaseException:
            await self._disconnect()
            raise
        self.options = options
        self._loop.act_through(connector)
        self._loop.start(load_options(options), no_operation=options.no_operation, paused=paused)
        await self._keep()

    async def _connected(self, options: PlannerConfig, world: ArbiterWorld) -> Connector:
        """What carries its decisions out. Raises `EtcdUnavailable`."""
        if options.environment == "local":
            return LocalConnector(self._scaler)
        prefill, decode = planned_components(self._graph)
        keys = VirtualKeys(self._links.kv, self._graph.namespace, Layout(options.virtual_keys))
        virtual = VirtualConnector(
            keys,
            self._clock,
            prefill=prefill,
            decode=decode,
            counts=lambda: {pool.component: pool.capacity for pool in world.fleet().pools},
            max_wait_s=options.virtual_max_wait,
            blocking=options.virtual_blocking,
            tell=self._tell,
        )
        await virtual.start()
        self._virtual, world.pending = virtual, virtual.pending
        return virtual

    async def _stop(self, loop: PlannerLoop) -> None:
        if self._virtual is not None:
            self._virtual.release()
        await loop.stop()
        await self._disconnect()
        await self.after_stop()

    async def _disconnect(self) -> None:
        virtual, self._virtual = self._virtual, None
        if virtual is not None:
            await virtual.close()
        if self._world is not None:
            self._world.pending = lambda: False

    def world(self) -> ArbiterWorld:
        """What a planner sees of the arbiter. Raises `ConfigError` for a graph that no planner can scale."""
        prefill, decode = planned_components(self._graph)
        world = ArbiterWorld(self._scaler, self._fleet, self._sampling, self._links, prefill, decode, self._clock)
        world.waiting_in = _waiting_in(self._graph, prefill)
        return world

    async def _made(self, world: ArbiterWorld) -> PlannerLoop:
        prefill, _ = planned_components(self._graph)
        logged = await asyncio.to_thread(_Logged, DecisionLog, self._log_path, self._background, self._tell)
        loop = PlannerLoop(
            world,
            Puller(world, world if prefill is not None else None, self._clock),
            LocalConnector(self._scaler),
            self._clock,
            last_number=logged.log.last_seq,
            tell=self._tell,
        )
        loop.observers = self.observers
        self.observers.insert(0, logged)
        self._scaler.on_manual = lambda _: loop.on_manual_change()
        return loop

    def _running(self, what: str) -> PlannerLoop:
        if self._loop is None or self._loop.state is PlannerState.STOPPED:
            raise DynamoError(f"the planner is stopped: nothing to {what}; `dynamo planner start` starts it")
        return self._loop

    def _merged(self, options: Mapping[str, Any], base: PlannerConfig | None = None) -> PlannerConfig:
        """These over the options of now, checked as a whole. Raises `ConfigError` that names the option."""
        given = {key.replace("-", "_"): value for key, value in options.items()}
        if "enabled" in given:
            raise BadInput("enabled belongs to the configuration's Planner section; say start or stop")
        now = (self.options if base is None else base).model_dump(exclude_unset=True, exclude={"enabled"})
        config = validate_section(PlannerConfig, "Planner", {**now, **given})
        planned_components(self._graph)
        check_planner(config, self._graph)
        return config

    async def _keep(self) -> None:
        """What the statefile says of it: an arbiter that adopts the run goes on from there."""
        options = self.options.model_dump(mode="json", exclude_unset=True, exclude={"enabled"})
        self._fleet.head.planner = PlannerEntry(state=self.state.value, options=options)
        await self._fleet.commit_head()


def _waiting_in(graph: GraphSpec, prefill: str | None) -> dict[str, str]:
    """`ArbiterWorld.waiting_in`: prefill workers that are commands, and Dynamo's frontends, whose routers hold back."""
    if prefill is None or graph.service(prefill).runtime is None:
        return {}
    fields = {DYNAMO_1X: "prefills_waiting"}
    return {
        spec.name: fields.get(spec.runtime or "", "num_requests_waiting")
        for spec in graph.services
        if spec.name == prefill or (spec.role is Role.FRONTEND and spec.runtime == DYNAMO_1X)
    }


async def _nothing(*_: Any) -> None:
    """Nobody else cares."""


class ArbiterWorld:
    """What the planner sees of its arbiter: `loop.World`, and both sources of metrics."""

    def __init__(
        self,
        scaler: Scaler,
        fleet: Workers,
        sampling: Sampling,
        links: Links,
        prefill: str | None,
        decode: str,
        clock: Clock,
    ) -> None:
        self._scaler = scaler
        self._workers = fleet.workers
        self._sampling = sampling
        self._links = links
        self._prefill = prefill
        self._decode = decode
        self._clock = clock
        self.pending: Callable[[], bool] = lambda: False
        """Whether another environment has yet to carry a decision out."""
        self.waiting_in: Mapping[str, str] = {}
        """Where prefill workers are commands there is no queue of ours: component -> the field of its workers' loads
        that says what waits there for a prefill."""

    def fleet(self) -> Fleet:
        """Counted now. A draining worker whose keys are still in etcd can be given requests yet."""
        workers = self._workers.values()
        routed = {w.name for w in workers if w.state is WorkerState.DRAINING and w.lease is not None}
        fleet = fleet_of(self._scaler.view(), decode=self._decode, prefill=self._prefill, routed=routed)
        return replace(fleet, pending=self.pending())

    def ready(self) -> tuple[str, ...]:
        """Names of the ready decode workers."""
        return tuple(worker.name for worker in self._scaler.view().ready(self._decode))

    def blind(self) -> str | None:
        """While etcd is away nobody knows who serves; while NATS is, nobody can be asked."""
        if not self._links.etcd_answers:
            return "etcd does not answer, so who serves is not known"
        if not self._links.answer:
            return "NATS is not connected, so loads and the prefill queue are not known"
        return None

    async def loads(self) -> Mapping[str, Sampled[Load]] | Missing:
        """See `LoadSource`."""
        sample = await self._sampling.loads()
        if sample.failed is not None:
            return sample.failed
        return {name: Sampled(load, at_s) for name, (load, at_s) in sample.loads.items()}

    async def depth(self) -> Sampled[int] | Missing:
        """See `QueueSource`."""
        if self.waiting_in:
            return await self._prefills_waiting()
        depth = await self._sampling.depth()
        return depth if isinstance(depth, Missing) else Sampled(depth.pending, self._clock.now_s())

    async def _prefills_waiting(self) -> Sampled[int] | Missing:
        """Requests that wait in the prefill workers, and in the frontends' routers for one. All must say it: a part
        of the sum is no sum."""
        sample = await self._sampling.loads()
        if sample.failed is not None:
            return sample.failed
        waiting, taken_s = 0, self._clock.now_s()
        for worker in [worker for worker in self._workers.values() if worker.state is WorkerState.READY]:
            field = self.waiting_in.get(worker.plan.component)
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


class _Logged:
    """Writes the decision log, in a thread, in order. Made in a thread: it reads the last number."""

    def __init__(
        self,
        make: Callable[[Path], DecisionLog],
        path: Path,
        background: Callable[[Coroutine[Any, Any, Any]], None],
        tell: Callable[[str], None],
    ) -> None:
        self.log = make(path)
        self._background = background
        self._tell = tell
        self._waiting: list[dict[str, Any]] = []
        self._writing = asyncio.Lock()

    def on_reading(self, reading: Reading, fleet: Fleet) -> None:
        """Of no interest here."""

    def on_decision(self, record: DecisionRecord) -> None:
        """Write it soon."""
        self._waiting.append(decisions.as_json(record))
        self._background(self._write())

    async def _write(self) -> None:
        async with self._writing:
            waiting, self._waiting = self._waiting, []
            try:
                await asyncio.to_thread(self.log.append, waiting)
            except StateError as error:
                self._tell(str(error))
