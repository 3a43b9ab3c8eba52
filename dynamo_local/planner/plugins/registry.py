"""The plugins that there are: who comes in, who goes, and what is known of each."""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dynamo_local.clock import NowClock
from dynamo_local.config.planner import AuthConfig, ExternalPluginConfig, InProcessPluginConfig
from dynamo_local.core.notes import Over, Tell, Trouble
from dynamo_local.core.secrets import parse_source
from dynamo_local.errors import DynamoError
from dynamo_local.planner.plugins import registration as circuits
from dynamo_local.planner.plugins import registration as scheduling
from dynamo_local.planner.plugins.registration import (
    PLUGINS_MAX,
    Circuit,
    CircuitState,
    Endpoint,
    Registering,
    Rules,
    Turn,
    endpoint_of,
    reject_reason,
    spec_of,
)
from dynamo_local.planner.stages import Answer, HoldPolicy, PipelineContext, PluginSpec, Stage
from dynamo_local.planner.values import OverrideType, Proposal
from dynamo_local.system.key_files import ApiKeys

# --- calling
# How a plugin is asked, wherever it runs.


class PluginFailed(DynamoError):
    """A plugin gave no answer that can be used: it was too late, away, or wrong. It contributes nothing."""

    code = "plugin_failed"


class Plugin(Protocol):
    """One plugin. At most one call to it is under way."""

    @property
    def transport(self) -> str:
        """`in_process`, `unix` or `grpc`."""
        ...

    @property
    def where(self) -> str:
        """Where it runs: its endpoint, or its class."""
        ...

    async def ask(
        self, stage: Stage, context: PipelineContext, proposals: Sequence[Proposal], timeout_s: float
    ) -> Answer:
        """Its answer. `proposals` are for RECONCILE. Raises `PluginFailed`, and never takes longer than `timeout_s`."""
        ...

    async def reset(self, reason: str, timeout_s: float) -> None:
        """The planner lets go of it: it may forget what it has learned. Raises nothing."""
        ...

    async def close(self) -> None:
        """End the connection to it."""
        ...


# --- listed
# Plugins of the configuration, as they would register.


def external(config: ExternalPluginConfig) -> Registering:
    """A gRPC server."""
    return _registering(config, config.endpoint, config.protocol_version)


def in_process(config: InProcessPluginConfig) -> Registering:
    """An object in this process."""
    return _registering(config, "", "1.0")


def _registering(
    config: ExternalPluginConfig | InProcessPluginConfig, endpoint: str, protocol_version: str
) -> Registering:
    return Registering(
        plugin_id=config.plugin_id,
        plugin_type=config.plugin_type,
        priority=config.priority,
        endpoint=endpoint,
        version=config.version,
        execution_interval_seconds=config.execution_interval_seconds,
        hold_policy=HoldPolicy[config.hold_policy],
        needs=config.needs,
        protocol_version=protocol_version,
        requires_produced_fields=config.requires_produced_fields,
        observation_window_seconds=config.observation_window_seconds,
    )


# --- counting
# Counters of plugins, under the names of Dynamo's metrics (without their prefix `dynamo_planner_`).

COUNTERS = {
    "plugin_evaluations_total": ("plugin_id", "stage", "result"),
    "plugin_held_over_total": ("plugin_id", "stage"),
    "reject_short_circuited_total": ("plugin_id",),
    "tick_skipped_total": ("plugin_id",),
    "tick_requires_unsatisfied_total": ("plugin_id", "missing_field"),
    "reconcile_clamped_total": ("sub_component_type", "source"),
    "constrain_capped_total": ("sub_component_type", "source"),
    "tick_timeout_total": (),
}
"""Each with its labels."""
HISTOGRAMS = {"plugin_latency_seconds": ("plugin_id", "stage"), "tick_duration_seconds": ()}
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class Durations:
    """How many there were, and how many up to each of `BOUNDS_S` (not cumulated; the last: longer than all)."""

    count: int = 0
    sum_s: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def add(self, seconds: float) -> None:
        """Take one more duration in."""
        self.count += 1
        self.sum_s += seconds
        self.buckets[bisect_left(BOUNDS_S, seconds)] += 1


class Counters:
    """Counts by name and label values. The counts of a plugin go when it goes, so that they do not pile up."""

    def __init__(self) -> None:
        self.totals: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in COUNTERS}
        self.durations: dict[str, defaultdict[tuple[str, ...], Durations]] = {
            name: defaultdict(Durations) for name in HISTOGRAMS
        }

    def add(self, name: str, *labels: str) -> None:
        """One more. KeyError for a name that is not in `COUNTERS`."""
        self.totals[name][labels] += 1

    def took(self, name: str, seconds: float, *labels: str) -> None:
        """One more duration. KeyError for a name that is not in `HISTOGRAMS`."""
        self.durations[name][labels].add(seconds)

    def forget(self, plugin_id: str) -> None:
        """The plugin has left."""
        counted: tuple[dict[tuple[str, ...], Any], ...] = (*self.totals.values(), *self.durations.values())
        for found in counted:
            for labels in [labels for labels in found if plugin_id in labels]:
                del found[labels]


log = logging.getLogger(__name__)

RESET_S = 1.0
"""How long a plugin is waited for when it is let go of."""

Connect = Callable[[Endpoint], Plugin]


@dataclass(slots=True)
class Registered:
    """One plugin. `origin` is `configured`, `installed` or `gateway`; `subject` is who registered it."""

    spec: PluginSpec
    plugin: Plugin
    origin: str
    subject: str
    turn: Turn
    circuit: Circuit = circuits.CLOSED
    evaluations: int = 0
    last_call_s: float | None = None
    heartbeat_s: float | None = None
    lag_s: float = 0.0
    overrides: frozenset[OverrideType] = frozenset()
    trouble: str | None = None
    reported: bool = False


@dataclass(frozen=True, slots=True)
class PluginRow:
    """One plugin, as it is shown and measured. Times are seconds; None: never, or nothing."""

    plugin_id: str
    plugin_type: str
    priority: int
    version: str
    protocol_version: str
    transport: str
    endpoint: str
    origin: str
    circuit_state: CircuitState
    evaluations_total: int
    last_call_seconds_ago: float | None
    cache_age_seconds: float | None
    tick_lag_seconds: float
    override_types: tuple[str, ...]
    trouble: str | None

    def as_json(self) -> dict[str, Any]:
        """For `dynamo planner plugins --json`, and the status."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "override_types": list(self.override_types)}


@dataclass(slots=True)
class Patience:
    """How long the silence of a plugin that has sent heartbeats may last."""

    heartbeat_timeout_s: float = 15.0
    missed_max: int = 2

    @property
    def silence_max_s(self) -> float:
        """A plugin whose last heartbeat is older, in seconds, is removed."""
        return self.heartbeat_timeout_s * self.missed_max


@dataclass
class Registry:
    """All plugins of a planner. `grid_s` is when its ticks began, on its clock."""

    clock: NowClock
    connect: Connect
    tell: Tell
    rules: Rules = field(default_factory=Rules)
    patience: Patience = field(default_factory=Patience)
    grid_s: float = 0.0
    counters: Counters = field(default_factory=Counters)
    faults: dict[str, str] = field(default_factory=dict)
    """Plugins of the configuration that did not come in, each with the reason."""
    _plugins: dict[str, Registered] = field(default_factory=dict)
    _leaving: set[asyncio.Task[None]] = field(default_factory=set)

    # --- coming and going --------------------------------------------------------------------------

    def register(self, said: Registering, subject: str | None, *, origin: str) -> str | None:
        """Take it, or say why not. `subject` is whose token was shown; None: nobody's. `said` makes sense."""
        reason = reject_reason(said, self.rules, authenticated=subject is not None, known=self._plugins)
        if reason is None and len(self._plugins) >= PLUGINS_MAX:
            reason = f"too_many_plugins: there are {PLUGINS_MAX}"
        if reason is not None or subject is None:
            log.warning("planner plugin %s is not taken: %s", said.plugin_id, reason)
            return reason
        try:
            plugin = self.connect(endpoint_of(said.endpoint, self.rules))
        except Exception as error:  # what gRPC has against a target
            log.exception("planner plugin %s: no connection can be made", said.plugin_id)
            return f"transport_build_failed: {type(error).__name__}"
        self.add(spec_of(said), plugin, subject, origin=origin)
        return None

    def add(self, spec: PluginSpec, plugin: Plugin, subject: str, *, origin: str) -> None:
        """Take a plugin whose registration was checked."""
        turn = scheduling.registered(self.clock.now_s(), self.grid_s, self.rules.scale_interval_s)
        self._plugins[spec.plugin_id] = Registered(spec, plugin, origin, subject, turn)
        self.faults.pop(spec.plugin_id, None)
        log.info("planner plugin %s: %s, priority %d, at %s", spec.plugin_id, spec.stage, spec.priority, plugin.where)

    def remove(self, plugin_id: str, reason: str) -> None:
        """It leaves: nothing of it counts from now on. It is told in the background."""
        row = self._plugins.pop(plugin_id)
        self.counters.forget(plugin_id)
        self._well(row)
        log.info("planner plugin %s leaves: %s", plugin_id, reason)
        task = asyncio.ensure_future(_let_go(row.plugin, reason))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def subject_of(self, plugin_id: str) -> str | None:
        """The subject that registered the plugin; None: no such plugin."""
        row = self._plugins.get(plugin_id)
        return None if row is None else row.subject

    def heartbeat(self, plugin_id: str) -> None:
        """It lives. From the first of these on it is expected to send more."""
        self._plugins[plugin_id].heartbeat_s = self.clock.now_s()

    def expire(self) -> None:
        """Remove those whose heartbeats have ended. One that never sent any is left to its circuit."""
        now_s, longest_s = self.clock.now_s(), self.patience.silence_max_s
        for plugin_id, row in list(self._plugins.items()):
            if row.heartbeat_s is not None and now_s - row.heartbeat_s > longest_s:
                self.tell(f"planner: plugin {plugin_id} has sent no heartbeat for {longest_s:g} s, and is removed")
                self.remove(plugin_id, "heartbeat_missed")

    async def close(self) -> None:
        """All leave."""
        for plugin_id in list(self._plugins):
            self.remove(plugin_id, "planner_stopped")
        if self._leaving:
            await asyncio.wait(self._leaving)

    # --- being asked -------------------------------------------------------------------------------

    def of(self, stage: Stage) -> list[Registered]:
        """Those of a stage, the smallest priority first."""
        found = [row for row in self._plugins.values() if row.spec.stage is stage]
        return sorted(found, key=lambda row: (row.spec.priority, row.spec.plugin_id))

    def specs(self) -> tuple[PluginSpec, ...]:
        """The registration of each plugin."""
        return tuple(row.spec for row in self._plugins.values())

    def answered(self, row: Registered) -> None:
        """It gave an answer."""
        row.circuit = circuits.CLOSED
        self._well(row)

    def failed(self, row: Registered, why: str, now_s: float) -> None:
        """It gave none."""
        row.circuit, row.trouble = circuits.failed(row.circuit, now_s), why
        log.warning("planner plugin %s failed: %s", row.spec.plugin_id, why)
        if row.circuit.state is not CircuitState.OPEN:
            return
        row.turn, row.overrides = scheduling.forgotten(row.turn), frozenset()
        name, times = row.spec.plugin_id, row.circuit.failures
        if self._plugins.get(name) is row:
            row.reported = True
            then = f"it is asked again in {circuits.OPEN_S:g} s"
            self.tell(f"planner: plugin {name} failed {times} times in a row ({why}); {then}", _trouble(row))

    def _well(self, row: Registered) -> None:
        if row.reported:
            self.tell(f"planner: the trouble of plugin {row.spec.plugin_id} is over", Over(_trouble(row).name))
        row.trouble, row.reported = None, False

    # --- being shown -------------------------------------------------------------------------------

    def rows(self) -> tuple[PluginRow, ...]:
        """All, in the order of stages and priorities."""
        now_s = self.clock.now_s()
        return tuple(_row(each, now_s) for stage in Stage for each in self.of(stage))


def _row(row: Registered, now_s: float) -> PluginRow:
    return PluginRow(
        plugin_id=row.spec.plugin_id,
        plugin_type=str(row.spec.stage),
        priority=row.spec.priority,
        version=row.spec.version,
        protocol_version=row.spec.protocol_version,
        transport=row.plugin.transport,
        endpoint=row.plugin.where,
        origin=row.origin,
        circuit_state=row.circuit.state,
        evaluations_total=row.evaluations,
        last_call_seconds_ago=None if row.last_call_s is None else round(max(0.0, now_s - row.last_call_s), 3),
        cache_age_seconds=None if row.turn.held is None else round(max(0.0, now_s - row.turn.held_at_s), 3),
        tick_lag_seconds=round(row.lag_s, 3),
        override_types=tuple(sorted(kind.name for kind in row.overrides)),
        trouble=row.trouble,
    )


def _trouble(row: Registered) -> Trouble:
    return Trouble(f"planner plugin {row.spec.plugin_id}")


async def _let_go(plugin: Plugin, reason: str) -> None:
    await plugin.reset(reason, RESET_S)
    await plugin.close()


# --- tokens
# The identity of a plugin follows from its token.

UNAUTHENTICATED = "unauthenticated"
OPTION = "Planner.plugin-registration.auth.static-secrets"


class Tokens:
    """The secrets of now; a file that changes is read again while `follow` runs."""

    def __init__(self, sources: Sequence[str], secrets: Sequence[tuple[ApiKeys, str]]) -> None:
        self._sources = tuple(sources)
        self._secrets = tuple(secrets)

    @classmethod
    def load(cls, auth: AuthConfig, environ: Mapping[str, str]) -> Tokens:
        """Read them. Blocks. Raises `ConfigError`, which names the source and shows no secret."""
        secrets = [
            (ApiKeys.load(parse_source(source), environ, option=OPTION), subject)
            for source, subject in auth.static_secrets.items()
        ]
        return cls(auth.trusted_sources, secrets)

    def subject_of(self, token: str) -> str | None:
        """In whose name the token speaks; None for nobody's. Where no source is trusted, everybody's is the same."""
        if not self._sources:
            return UNAUTHENTICATED
        shown = token.encode()
        for source in self._sources:
            if source == "allow_unauthenticated":
                return UNAUTHENTICATED
            for keys, subject in self._secrets:
                if keys.accepts(shown):
                    return subject
        return None

    async def follow(self) -> None:
        """Read changed files again, until it is cancelled."""
        await asyncio.gather(*(keys.follow() for keys, _ in self._secrets))
