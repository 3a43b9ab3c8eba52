"""The load planner in its arbiter: options checked and kept, its view of the fleet, its log, and what commands ask.

`planner.loop` plans; this starts and stops it, and is the only one that knows both it and the rest of the arbiter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from dynamo_local.arbiter.commands import Orders
from dynamo_local.arbiter.controller import Shell
from dynamo_local.arbiter.links import Links
from dynamo_local.arbiter.logged_decisions import LoggedDecisions, LoggedTicks
from dynamo_local.arbiter.planner_following import connected_virtually
from dynamo_local.arbiter.planner_observation import ArbiterObserver, ArbiterWorld, prefills_wait_in
from dynamo_local.arbiter.planner_options import actuators, changed_options
from dynamo_local.arbiter.planner_plugins import NOBODY, PlannerPlugins
from dynamo_local.arbiter.sampler import Sampling
from dynamo_local.arbiter.statefile import Statefile
from dynamo_local.clock import Clock
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.config.resolve import not_in_a_pod, planned_components
from dynamo_local.core.notes import Over, Tell, Trouble
from dynamo_local.core.types import GraphSpec
from dynamo_local.errors import BadInput, DynamoError
from dynamo_local.planner.collector import Collector
from dynamo_local.planner.connectors import Connector, LocalConnector, VirtualConnector
from dynamo_local.planner.forecasting.answers import ArbiterForecaster
from dynamo_local.planner.loop import Counts, PlannerLoop, PlannerObserver, PlannerState
from dynamo_local.planner.policies.protocol import Policy
from dynamo_local.planner.records import decision_log as decisions
from dynamo_local.planner.records.decision_log import DecisionLog, decision_log_path
from dynamo_local.planner.records.ticks import TickLog, tick_log_path
from dynamo_local.planner.scaling_times import ScalingTimes
from dynamo_local.state.schema import PlannerEntry

log = logging.getLogger(__name__)

NOT_STARTED = Trouble("the planner's start")

NOT_OPTIONS = frozenset({"enabled", "namespace"})
"""Keys of the section that say where and whether, not how."""
AT_START = {
    "log_dir": "--log-dir",
    "environment": "--environment",
    "virtual_keys": "--virtual-keys",
    "scheduling": "another configuration",
    "plugin_registration": "another configuration",
}
"""Options that can be chosen at a start only, with their names on the command line."""


class Planning:
    """The planner of one run. Made stopped; its commands raise `DynamoError`s fit for a person."""

    def __init__(
        self,
        graph: GraphSpec,
        options: PlannerConfig,
        *,
        orders: Orders,
        shell: Shell,
        statefile: Statefile,
        sampling: Sampling,
        links: Links,
        clock: Clock,
        logs: Path,
        background: Callable[[Coroutine[Any, Any, Any]], None],
        tell: Tell,
        plugins: PlannerPlugins | None = None,
    ) -> None:
        self._graph = graph
        self._shell = shell
        self._statefile = statefile
        self._clock = clock
        self._orders = orders
        self._sampling = sampling
        self._links = links
        self._background = background
        self.observing = ArbiterObserver(lambda: self._graph, shell, links, clock, background, tell)
        self._tell = tell
        self._refused = False
        self._forecaster = ArbiterForecaster()
        self.plugins = plugins
        self._loop: PlannerLoop | None = None
        self._logged: LoggedDecisions | None = None
        self._ticks: LoggedTicks | None = None
        self._world: ArbiterWorld | None = None
        self._virtual: VirtualConnector | None = None
        self._changing = asyncio.Lock()
        self.times = ScalingTimes(clock.now_s)
        shell.observers.append(self.times)  # from the first start on
        self._log_path = decision_log_path(logs)
        self.options = options
        self.observers: list[PlannerObserver] = []
        """Called with every reading and decision; whoever wants to look on adds itself before the graph is ready."""
        self.before_start: Callable[[PlannerConfig], Awaitable[None]] = _nothing
        """Called with the options of each start; a `DynamoError` refuses it."""
        self.after_stop: Callable[[], Awaitable[None]] = _nothing
        self.onlookers_say: Callable[[], dict[str, Any]] = dict
        """The fields that observers add to the status."""
        self.follows: Callable[[], dict[str, Any] | None] = lambda: None
        """The name of another planner whose decisions the run carries out. This planner then stays stopped."""

    # --- with the run ----------------------------------------------------------------------------

    async def begin(self, *, starts: bool | None, by_default: bool) -> None:
        """The graph is ready. `starts` is what the command line says; else an adopted run's planner goes on as it
        was, and a new run's starts if the configuration asks for it."""
        entry = self._statefile.head.planner  # of the arbiter whose run was adopted
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
            self._tell(f"the planner was not started: {error}; `dynamo planner start` tries again", NOT_STARTED)
            self._refused = True

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

    async def set(self, options: Mapping[str, Any], *, within_s: float | None = None) -> dict[str, Any]:
        """`dynamo planner set KEY=VALUE …`: all of them, or none. On a stopped planner they apply at its next start.

        TimeoutError, with nothing changed, where that cannot begin within so many seconds.
        """
        if not options:
            raise BadInput("say what to change: KEY=VALUE, for example decode-kv-scale-up-threshold=0.8")
        async with asyncio.timeout(within_s) as deadline, self._changing:
            merged = self._merged(options)
            for name, option in AT_START.items() if self.state is not PlannerState.STOPPED else ():
                if getattr(merged, name) != getattr(self.options, name):
                    why = f"{name} can be chosen at the start only: stop the planner, and start it with {option}"
                    raise BadInput(why)
            policy = await self.prepared(merged)
            deadline.reschedule(None)  # from here on it is done whole
            self._change(merged, policy)
            await self._keep()
            return self.status()

    async def prepared(self, options: PlannerConfig) -> Policy[Any]:
        """The policy of these options. Raises `ConfigError` where it cannot be made."""
        return await asyncio.to_thread(_policy_of, options)

    def reconfigure(
        self, graph: GraphSpec, options: PlannerConfig | None = None, policy: Policy[Any] | None = None
    ) -> None:
        """`dynamo apply`: another graph and, where given, other options with their policy, which were checked against
        it.

        Noted in the statefile's head; the caller has that written.
        """
        self._graph = graph
        if options is not None and policy is not None:
            self._change(options, policy)
            self._note()

    async def written(self) -> None:
        """Returns when decisions and ticks so far are in their logs, as far as these can be written."""
        for logged in (self._logged, self._ticks):
            if logged is not None:
                await logged.written()

    async def history(self, count: int) -> list[dict[str, Any]]:
        """The last so many decisions, as logged."""
        found = await asyncio.to_thread(decisions.read, self._log_path, last=count)
        return [dict(record) for record in found]

    async def explain(self, count: int) -> list[str]:
        """The last `count` decisions in words."""
        return [decisions.describe(record) for record in await self.history(count)]

    # --- answering -------------------------------------------------------------------------------

    @property
    def graph(self) -> GraphSpec:
        """The graph that is planned."""
        return self._graph

    @property
    def state(self) -> PlannerState:
        """Stopped, until somebody has started it."""
        return PlannerState.STOPPED if self._loop is None else self._loop.state

    @property
    def since_s(self) -> float:
        """When it came into that state, on its clock."""
        return 0.0 if self._loop is None else self._loop.since_s

    @property
    def counts(self) -> Counts:
        """The counters of the loop since this arbiter made it."""
        return Counts() if self._loop is None else self._loop.counts

    def status(self) -> dict[str, Any]:
        """The object of `dynamo planner status --json`, and `planner` in `dynamo status --json`. Never waits."""
        options = self.options.model_dump(mode="json", include=set(self.options.named) - NOT_OPTIONS)
        reported: dict[str, Any] = {
            "state": str(self.state),
            "no_operation": self.options.no_operation,
            "options": options,
            "follow": self.follows(),
            "virtual": None if self._virtual is None else self._virtual.status(),
            "plugins": dict(NOBODY) if self.plugins is None else self.plugins.status(),
            **self.onlookers_say(),
        }
        loop, now_s = self._loop, self._clock.now_s()
        if loop is None:
            return {**reported, "last_decision": None, "trouble": None}
        status = loop.status
        next_s = None if status is None else status.next_tick_at
        return {
            **reported,
            "for_s": round(now_s - loop.since_s, 3),
            "adjusting": status is not None and status.adjusting,
            "next_decision_s": None if next_s is None else round(next_s - now_s, 3),
            "waiting_for_gpus": [] if status is None else list(status.deferred),
            "models": {} if status is None else dict(status.models),
            **loop.counts.as_json(),
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
        policy = await self.prepared(options)
        if self._loop is None or self._world is None:
            self._world = self.world()
            self._loop = await self._made(self._world)
        connector = await self._connected(options, self._world)
        try:
            pipeline = None if self.plugins is None else await self.plugins.start(options)
            await self.before_start(options)
        except BaseException:
            await self._disconnect()
            raise
        self.options = options
        self.observing.follow(options)
        self._loop.act_through(connector, pipeline)
        self._loop.start(options, policy, no_operation=options.no_operation, paused=paused)
        await self._keep()
        if self._refused:
            self._refused = False
            self._tell("the planner is started", Over(NOT_STARTED.name))

    async def _connected(self, options: PlannerConfig, world: ArbiterWorld) -> Connector:
        """The connector that carries decisions out. Raises `EtcdUnavailable`."""
        match options.environment:
            case "local":
                return LocalConnector(self._orders, actuators=lambda: actuators(self.options))
            case "virtual":
                self._virtual = await connected_virtually(
                    options, self._graph, world, links=self._links, clock=self._clock, tell=self._tell
                )
                return self._virtual
            case "kubernetes":
                raise not_in_a_pod()

    async def _stop(self, loop: PlannerLoop) -> None:
        if self._virtual is not None:
            self._virtual.release()
        # Together: a tick that waits for a forecast ends with the process that makes it, not at its deadline.
        await asyncio.gather(loop.stop(), self._forecaster.close())
        self.observing.close()
        await self._disconnect()
        await self.after_stop()

    async def _disconnect(self) -> None:
        virtual, self._virtual = self._virtual, None
        if virtual is not None:
            await virtual.close()
        if self.plugins is not None:
            await self.plugins.stop()
        if self._world is not None:
            self._world.pending = lambda: False

    def world(self) -> ArbiterWorld:
        """The observer of the arbiter for the planner. Raises `ConfigError` for a graph that no planner can scale."""
        prefill, decode = planned_components(self._graph)
        world = ArbiterWorld(self._shell, self._sampling, self._links, prefill, decode, self._clock, self.times)
        world.waiting_in = prefills_wait_in(self._graph, prefill)
        world.actuators = lambda: actuators(self.options)
        return world

    async def _made(self, world: ArbiterWorld) -> PlannerLoop:
        prefill, _ = planned_components(self._graph)
        logged = await asyncio.to_thread(LoggedDecisions, DecisionLog, self._log_path, self._background, self._tell)
        self._logged = logged
        ticks_path = tick_log_path(self._log_path.parent)
        self._ticks = await asyncio.to_thread(LoggedTicks, TickLog, ticks_path, self._background, self._tell)
        loop = PlannerLoop(
            world,
            Collector(
                world,
                world if prefill is not None else None,
                self._clock,
                traffic=self.observing,
                passes=self.observing,
                requests=self.observing,
            ),
            LocalConnector(self._orders),
            self._clock,
            last_number=logged.log.last_seq,
            tell=self._tell,
            forecaster=self._forecaster,
            recorder=self._ticks,
        )
        loop.observers = self.observers
        self.observers.insert(0, logged)
        self._orders.on_manual.append(lambda _: loop.on_manual_change())
        return loop

    def _running(self, what: str) -> PlannerLoop:
        if self._loop is None or self._loop.state is PlannerState.STOPPED:
            raise DynamoError(f"the planner is stopped: nothing to {what}; `dynamo planner start` starts it")
        return self._loop

    def _merged(self, options: Mapping[str, Any], base: PlannerConfig | None = None) -> PlannerConfig:
        return changed_options(self.options if base is None else base, options, self._graph)

    def _change(self, options: PlannerConfig, policy: Policy[Any]) -> None:
        self.options = options
        if self.state is not PlannerState.STOPPED:
            self.observing.follow(options)
        if self._loop is not None:
            self._loop.change(options, policy, no_operation=options.no_operation)
        if self._virtual is not None:
            self._virtual.change(max_wait_s=options.virtual_max_wait, blocking=options.virtual_blocking)

    async def _keep(self) -> None:
        """The planner's part of the statefile: an arbiter that adopts the run goes on from there."""
        self._note()
        await self._statefile.write_head(lambda: self._shell.fleet)

    def _note(self) -> None:
        options = self.options.model_dump(mode="json", exclude_unset=True, exclude={"enabled"})
        self._statefile.head.planner = PlannerEntry(state=self.state.value, options=options)


async def _nothing(*_: Any) -> None:
    """Nobody else cares."""


def _policy_of(options: PlannerConfig) -> Policy[Any]:
    """`choosing.policy_of`. The first call imports all policies, and some of them read files: call it in a thread."""
    from dynamo_local.planner import choosing

    return choosing.policy_of(options)
