"""The planner in its arbiter: keeps its options, starts and stops its loop, and answers `dynamo planner`.

`planner.loop` plans. Only this module knows both the loop and the rest of the arbiter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from dynamo_local.arbiter.commands import Commands
from dynamo_local.arbiter.controller import FleetController
from dynamo_local.arbiter.links import Links
from dynamo_local.arbiter.logged_decisions import LoggedDecisions, LoggedTicks
from dynamo_local.arbiter.planner_following import connected_virtually
from dynamo_local.arbiter.planner_observation import ArbiterWorld, ObservationSources, prefills_wait_in
from dynamo_local.arbiter.planner_options import actuators, changed_options
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
from dynamo_local.planner.plugins.pipeline import PluginPipeline
from dynamo_local.planner.plugins.registry import Counters, PluginRow
from dynamo_local.planner.plugins.service import PluginService
from dynamo_local.planner.policies.protocol import Policy
from dynamo_local.planner.records import decision_log as decisions
from dynamo_local.planner.records.decision_log import DecisionLog, decision_log_path
from dynamo_local.planner.records.ticks import Recorded, TickLog, recorded_requests, tick_log_path
from dynamo_local.planner.scaling_times import ScalingTimes
from dynamo_local.planner.values import FixedFleet
from dynamo_local.state.schema import PlannerEntry
from dynamo_local.system.json_lines import Skipped

log = logging.getLogger(__name__)

NOT_STARTED = Trouble("the planner's start")

NOT_OPTIONS = frozenset({"enabled", "namespace"})
"""Keys of the section that are no options of a policy."""
AT_START = {
    "log_dir": "--log-dir",
    "environment": "--environment",
    "virtual_keys": "--virtual-keys",
    "scheduling": "another configuration",
    "plugin_registration": "another configuration",
}
"""Options that can be chosen at a start only, and how."""


class ArbiterPlanner:
    """The planner of one run, stopped at first. Its commands raise `DynamoError`s for people.

    `beside` gives the fields of a logged decision beside its record.
    """

    def __init__(
        self,
        graph: GraphSpec,
        options: PlannerConfig,
        *,
        commands: Commands,
        controller: FleetController,
        statefile: Statefile,
        sampling: Sampling,
        links: Links,
        clock: Clock,
        logs: Path,
        background: Callable[[Coroutine[Any, Any, Any]], None],
        tell: Tell,
        times: ScalingTimes | None = None,
        follows: Callable[[], dict[str, Any] | None] = lambda: None,
        plugins: PlannerPlugins | None = None,
        beside: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._graph = graph
        self._controller = controller
        self._statefile = statefile
        self._clock = clock
        self._commands = commands
        self._sampling = sampling
        self._links = links
        self._background = background
        self.sources = ObservationSources(lambda: self._graph, controller, links, clock, background, tell)
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
        self._times = ScalingTimes(clock.now_s) if times is None else times
        controller.subscribe(on_transition=self._times.on_transition)  # from the first start on
        self._log_path = decision_log_path(logs)
        self._beside = beside
        self.options = options
        self.follows = follows
        self._observers: list[PlannerObserver] = []
        self._on_start: list[Callable[[PlannerConfig], Awaitable[None]]] = []
        self._on_stop: list[Callable[[], Awaitable[None]]] = []
        self._status_parts: list[Callable[[], dict[str, Any]]] = []

    def subscribe(
        self,
        *observers: PlannerObserver,
        on_start: Callable[[PlannerConfig], Awaitable[None]] | None = None,
        on_stop: Callable[[], Awaitable[None]] | None = None,
        status: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """Only before the first start. `observers` get every pull and decision; `status` adds to the planner's status.

        `on_start` gets the options of each start, and refuses it with a `DynamoError`.
        """
        self._observers += observers
        self._on_start += [] if on_start is None else [on_start]
        self._on_stop += [] if on_stop is None else [on_stop]
        self._status_parts += [] if status is None else [status]

    async def begin(self, *, starts: bool | None, by_default: bool) -> None:
        """The graph is ready: start the planner, if it is to run.

        `starts` is the command line's choice. Without one, an adopted planner keeps its state, and a new run's planner
        starts if the configuration asks for it.
        """
        entry = self._statefile.head.planner  # of the arbiter whose run was adopted
        before = None if entry is None else PlannerState(entry.state)
        wanted = starts if starts is not None else by_default if before is None else before is not PlannerState.STOPPED
        try:
            if entry is not None:
                self.options = self._merged(entry.options, base=PlannerConfig())
            if wanted:
                paused = starts is None and before is PlannerState.PAUSED
                await self._start(self.options, paused=paused, goes_on=before not in (None, PlannerState.STOPPED))
            elif before not in (None, PlannerState.STOPPED):
                await self._keep()
        except DynamoError as error:  # the graph serves without a planner
            self._tell(f"the planner was not started: {error}; `dynamo planner start` tries again", NOT_STARTED)
            self._refused = True

    async def halt(self) -> None:
        """The run leaves: plan no more."""
        if self._loop is not None and self._loop.state is not PlannerState.STOPPED:
            await self._stop(self._loop)

    async def start(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """`dynamo planner start`: start with these options over the present ones."""
        async with self._changing:
            if self.state is not PlannerState.STOPPED:
                raise DynamoError(
                    f"the planner is {self.state} already; `dynamo planner set` changes its options, "
                    "`dynamo planner resume` ends a pause"
                )
            await self._start(self._merged(options))
            return self.status()

    async def stop(self) -> dict[str, Any]:
        """`dynamo planner stop`: returns when the present tick has ended."""
        async with self._changing:
            await self._stop(self._running("stop"))
            await self._keep()
            return self.status()

    async def pause(self) -> dict[str, Any]:
        """`dynamo planner pause`: the planner goes on observing."""
        async with self._changing:
            loop = self._running("pause")
            if loop.state is not PlannerState.PAUSED:
                loop.pause()
                await self._keep()
            return self.status()

    async def resume(self) -> dict[str, Any]:
        """`dynamo planner resume`: its interval begins again."""
        async with self._changing:
            loop = self._running("resume")
            if loop.state is not PlannerState.RUNNING:
                loop.resume(await self.prepared(self.options, begins=True, goes_on=True))
                await self._keep()
            return self.status()

    async def set(self, options: Mapping[str, Any], *, within_s: float | None = None) -> dict[str, Any]:
        """`dynamo planner set KEY=VALUE …`: change all of these options, or none.

        A stopped planner takes them at its next start. Raises TimeoutError, with nothing changed, if the change cannot
        begin within `within_s`.
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
            deadline.reschedule(None)  # from here on it takes effect as a whole
            self._change(merged, policy)
            await self._keep()
            return self.status()

    async def prepared(self, options: PlannerConfig, *, begins: bool = False, goes_on: bool = False) -> Policy[Any]:
        """The policy of these options. One that begins, or that judges otherwise than the present one, knows the
        recorded requests. One that `goes_on` knows its own run's before those of `history`; one that does not begin
        goes on. Raises `ConfigError`."""
        by_name = {spec.name: spec.resources.gpu for spec in self._graph.services}
        prefill, decode = planned_components(self._graph)
        gpus = (0 if prefill is None else max(1, by_name[prefill]), max(1, by_name[decode]))
        starts_s = [
            self._times.start_up_s(component) or 0.0 for component in (prefill, decode) if component is not None
        ]
        if self._ticks is not None:
            await self._ticks.written()
        before, ticks = None if begins else self.options, tick_log_path(self._log_path.parent)
        goes_on = (goes_on or not begins) and options.history == self.options.history
        return await asyncio.to_thread(_policy_of, options, before, gpus, max(starts_s), ticks, goes_on)

    def reconfigure(
        self, graph: GraphSpec, options: PlannerConfig | None = None, policy: Policy[Any] | None = None
    ) -> None:
        """`dynamo apply`: take another graph, and other options with their policy, which was checked against it.

        This notes them in the head of the statefile, which the caller writes.
        """
        self._graph = graph
        if options is not None and policy is not None:
            self._change(options, policy)
            self._note()

    async def written(self) -> None:
        """Returns when all decisions and ticks so far are in their logs, or could not be written."""
        for logged in (self._logged, self._ticks):
            if logged is not None:
                await logged.written()

    async def history(self, count: int) -> list[dict[str, Any]]:
        """The last `count` decisions, as logged."""
        found = await asyncio.to_thread(decisions.read, self._log_path, last=count)
        return [dict(record) for record in found]

    async def explain(self, count: int) -> list[str]:
        """The last `count` decisions in words."""
        return [decisions.describe(record) for record in await self.history(count)]

    @property
    def graph(self) -> GraphSpec:
        return self._graph

    @property
    def state(self) -> PlannerState:
        return PlannerState.STOPPED if self._loop is None else self._loop.state

    @property
    def since_s(self) -> float:
        """When it entered its state, on its clock."""
        return 0.0 if self._loop is None else self._loop.since_s

    @property
    def counts(self) -> Counts:
        """The loop's counters since this arbiter made it."""
        return Counts() if self._loop is None else self._loop.counts

    @property
    def fixed_fleet(self) -> FixedFleet | None:
        """`PlannerLoop.fixed_fleet`."""
        return None if self._loop is None else self._loop.fixed_fleet

    def status(self) -> dict[str, Any]:
        """The object of `dynamo planner status --json`, and `planner` in `dynamo status --json`. Never waits."""
        options = self.options.model_dump(mode="json", include=set(self.options.named) - NOT_OPTIONS)
        status: dict[str, Any] = {
            "state": str(self.state),
            "no_operation": self.options.no_operation,
            "options": options,
            "follow": self.follows(),
            "virtual": None if self._virtual is None else self._virtual.status(),
            "plugins": dict(NOBODY) if self.plugins is None else self.plugins.status(),
        }
        for part in self._status_parts:
            status |= part()
        fixed = self.fixed_fleet
        status["fixed_fleet"] = None if fixed is None else fixed.as_json()
        loop, now_s = self._loop, self._clock.now_s()
        if loop is None:
            return {**status, "last_decision": None, "trouble": None}
        policy_status = loop.status
        next_s = None if policy_status is None else policy_status.next_tick_at
        return {
            **status,
            "for_s": round(now_s - loop.since_s, 3),
            "adjusting": policy_status is not None and policy_status.adjusting,
            "next_decision_s": None if next_s is None else round(next_s - now_s, 3),
            "waiting_for_gpus": [] if policy_status is None else list(policy_status.deferred),
            "models": {} if policy_status is None else dict(policy_status.models),
            **loop.counts.as_json(),
            "trouble": loop.trouble,
            "last_decision": None if loop.last is None else decisions.as_json(loop.last),
        }

    async def _start(self, options: PlannerConfig, *, paused: bool = False, goes_on: bool = False) -> None:
        if self.follows() is not None:
            raise DynamoError(
                "this run carries out another planner's decisions (--follow), and two planners would undo each "
                "other's; to plan here, `dynamo serve` it without --follow"
            )
        policy = await self.prepared(options, begins=True, goes_on=goes_on)
        if self._loop is None or self._world is None:
            self._world = self.world()
            self._loop = await self._made(self._world)
        connector = await self._connected(options, self._world)
        try:
            pipeline = None if self.plugins is None else await self.plugins.start(options)
            for on_start in self._on_start:
                await on_start(options)
        except BaseException:
            await self._disconnect()
            raise
        self.options = options
        self.sources.follow(options)
        self._loop.act_through(connector, pipeline)
        self._loop.start(options, policy, no_operation=options.no_operation, paused=paused)
        await self._keep()
        if self._refused:
            self._refused = False
            self._tell("the planner is started", Over(NOT_STARTED.name))

    async def _connected(self, options: PlannerConfig, world: ArbiterWorld) -> Connector:
        """The connector that carries its decisions out. Raises `EtcdUnavailable`."""
        match options.environment:
            case "local":
                return LocalConnector(self._commands.run, actuators=lambda: actuators(self.options))
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
        # Together: a tick that waits for a forecast ends with the forecasting process, not at its deadline.
        await asyncio.gather(loop.stop(), self._forecaster.close())
        self.sources.close()
        await self._disconnect()
        for on_stop in self._on_stop:
            await on_stop()

    async def _disconnect(self) -> None:
        virtual, self._virtual = self._virtual, None
        if virtual is not None:
            await virtual.close()
        if self.plugins is not None:
            await self.plugins.stop()

    def world(self) -> ArbiterWorld:
        """Raises `ConfigError` for a graph that no planner can scale."""
        prefill, decode = planned_components(self._graph)
        return ArbiterWorld(
            self._controller,
            self._sampling,
            self._links,
            prefill,
            decode,
            self._clock,
            self._times,
            waiting_in=prefills_wait_in(self._graph, prefill),
            actuators=lambda: actuators(self.options),
            pending=lambda: self._virtual is not None and self._virtual.pending(),
        )

    async def _made(self, world: ArbiterWorld) -> PlannerLoop:
        prefill, _ = planned_components(self._graph)
        await asyncio.to_thread(decisions.prepare)
        logged = await asyncio.to_thread(
            LoggedDecisions, DecisionLog, self._log_path, self._background, self._tell, self._beside
        )
        self._logged = logged
        ticks_path = tick_log_path(self._log_path.parent)
        self._ticks = await asyncio.to_thread(LoggedTicks, TickLog, ticks_path, self._background, self._tell)
        return PlannerLoop(
            world,
            Collector(
                world,
                world if prefill is not None else None,
                self._clock,
                traffic=self.sources,
                passes=self.sources,
                requests=self.sources,
            ),
            LocalConnector(self._commands.run),
            self._clock,
            last_number=logged.log.last_seq,
            tell=self._tell,
            forecaster=self._forecaster,
            recorder=self._ticks,
            observers=[logged, *self._observers],
        )

    def on_manual_change(self) -> None:
        """A person's command has changed something: the policy holds for a while."""
        if self._loop is not None:
            self._loop.on_manual_change()

    def _running(self, what: str) -> PlannerLoop:
        if self._loop is None or self._loop.state is PlannerState.STOPPED:
            raise DynamoError(f"the planner is stopped: nothing to {what}; `dynamo planner start` starts it")
        return self._loop

    def _merged(self, options: Mapping[str, Any], base: PlannerConfig | None = None) -> PlannerConfig:
        return changed_options(self.options if base is None else base, options, self._graph)

    def _change(self, options: PlannerConfig, policy: Policy[Any]) -> None:
        self.options = options
        if self.state is not PlannerState.STOPPED:
            self.sources.follow(options)
        if self._loop is not None:
            self._loop.change(options, policy, no_operation=options.no_operation)
        if self._virtual is not None:
            self._virtual.change(max_wait_s=options.virtual_max_wait, blocking=options.virtual_blocking)

    async def _keep(self) -> None:
        """Write the planner's state, with which a later arbiter goes on."""
        self._note()
        await self._statefile.write_head(lambda: self._controller.fleet)

    def _note(self) -> None:
        options = self.options.model_dump(mode="json", exclude_unset=True, exclude={"enabled"})
        self._statefile.head.planner = PlannerEntry(state=self.state.value, options=options)


NOBODY: Mapping[str, Any] = {"plugins": [], "not_taken": {}, "gateway": None, "last_tick": None}


class PlannerPlugins:
    """The plugins of one run. `runtime` has the gateway's socket. Secrets come from `environ` and files."""

    def __init__(self, clock: Clock, *, environ: Mapping[str, str], runtime: Path, tell: Tell) -> None:
        self._clock = clock
        self._environ = environ
        self._runtime = runtime
        self._tell = tell
        self._service: PluginService | None = None

    async def start(self, options: PlannerConfig) -> PluginPipeline:
        """Start the plugins of these options.

        Raises `ConfigError` if the gateway cannot listen, or a secret is unreadable.
        """
        service = PluginService(
            options.scheduling,
            options.plugin_registration,
            clock=self._clock,
            environ=self._environ,
            runtime=self._runtime,
            tell=self._tell,
        )
        try:
            await service.start()
        except BaseException:
            await service.stop()
            raise
        self._service = service
        return service.pipeline

    async def stop(self) -> None:
        service, self._service = self._service, None
        if service is not None:
            await service.stop()

    def status(self) -> dict[str, Any]:
        return dict(NOBODY) if self._service is None else self._service.status()

    def rows(self) -> tuple[PluginRow, ...]:
        return () if self._service is None else self._service.rows()

    @property
    def counters(self) -> Counters:
        """The counters since the planner's last start."""
        return Counters() if self._service is None else self._service.registry.counters


def _policy_of(
    options: PlannerConfig,
    before: PlannerConfig | None,
    gpus: tuple[int, int],
    start_up_s: float,
    ticks: Path,
    goes_on: bool = False,
) -> Policy[Any]:
    """`choosing.policy_of`. The first call imports all policies, and some of them read files: call it in a thread.

    Without `history` the policy `slo` begins with the requests of the tick log, as far as they can be read; so does one
    that `goes_on`, if there are any. It begins without options `before`, and with others by which it judges.
    """
    from dynamo_local.planner import choosing

    recorded: Recorded = []
    begins = before is None or choosing.begins_anew(before, options)
    if begins and options.policy == "slo" and (goes_on or options.history is None):
        skipped = Skipped()
        try:
            recorded = recorded_requests(ticks, skipped)
        except OSError as error:
            log.warning("the planner begins without its recorded requests: %s", error)
        if (warning := skipped.warning("the planner's recorded requests")) is not None:
            log.warning("%s", warning)
        if recorded:
            log.info("the planner begins with %d requests of its last %.1f h", len(recorded), -recorded[0][0] / 3600)
    reads = begins and not recorded
    return choosing.policy_of(options, start_up_s=start_up_s, gpus=gpus, recorded=recorded, begins=reads)
