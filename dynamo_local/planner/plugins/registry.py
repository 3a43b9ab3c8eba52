"""The plugins that there are: who comes in, who goes, and what is known of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.clock import NowClock
from dynamo_local.core.notes import Over, Tell, Trouble
from dynamo_local.planner.pipeline import circuit as circuits
from dynamo_local.planner.pipeline import scheduling
from dynamo_local.planner.pipeline.circuit import Circuit, CircuitState
from dynamo_local.planner.pipeline.registering import (
    PLUGINS_MAX,
    Endpoint,
    Registering,
    Rules,
    endpoint_of,
    reject_reason,
    spec_of,
)
from dynamo_local.planner.pipeline.scheduling import Turn
from dynamo_local.planner.pipeline.stages import PluginSpec, Stage
from dynamo_local.planner.plugins.calling import Plugin
from dynamo_local.planner.plugins.counting import Counters
from dynamo_local.planner.values.proposals import OverrideType

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
    told: bool = False


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
        return {**values, "circuit_state": self.circuit_state.name, "override_types": list(self.override_types)}


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
        """Who registered it; None: there is no such plugin."""
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
        """What each plugin said of itself when it registered."""
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
            row.told = True
            then = f"it is asked again in {circuits.OPEN_S:g} s"
            self.tell(f"planner: plugin {name} failed {times} times in a row ({why}); {then}", _trouble(row))

    def _well(self, row: Registered) -> None:
        if row.told:
            self.tell(f"planner: the trouble of plugin {row.spec.plugin_id} is over", Over(_trouble(row).name))
        row.trouble, row.told = None, False

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
