"""One tick through the plugins: PREDICT one after the other, then PROPOSE, RECONCILE and CONSTRAIN, each all at once.

A plugin that fails, hangs or is away contributes nothing; the tick goes on without it, and never longer than
`tick_max_s`. The policy's own stages take part as plugins that are asked by the loop.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dynamo_local.clock import NowClock
from dynamo_local.errors import DynamoError
from dynamo_local.planner.driver import baseline_of
from dynamo_local.planner.plugins import registration as circuits
from dynamo_local.planner.plugins import registration as scheduling
from dynamo_local.planner.plugins.registry import Registered, Registry
from dynamo_local.planner.stages import (
    BUILTIN_PREDICT,
    BUILTIN_PREDICT_PRIORITY,
    Answer,
    Merged,
    Nothing,
    PipelineContext,
    Predicted,
    Stage,
    context_of,
    filled,
    merge,
    shown,
    unset,
    wanted,
)
from dynamo_local.planner.values import (
    Accept,
    ComponentTarget,
    Needs,
    Observation,
    Override,
    Prediction,
    Proposal,
    Reject,
)

log = logging.getLogger(__name__)

TRAFFIC_WINDOW_S = 60.0
"""The traffic window if neither the plugin nor the policy names one."""


class Action(enum.StrEnum):
    """The outcome of a tick, under Dynamo's names."""

    APPLY = "apply"
    SKIP_NO_TARGETS = "skip_no_targets"
    SKIP_SHORT_CIRCUIT = "skip_short_circuit"
    SKIP_TICK_TIMEOUT = "skip_tick_timeout"


@dataclass(frozen=True, slots=True)
class Tick:
    """The last tick: what it went by, what came out, and why, in words where it was stopped."""

    request_id: str
    at_s: float
    action: Action
    prediction: Prediction | None
    targets: tuple[ComponentTarget, ...] = ()
    why: str = ""


class PluginPipeline:
    """The policy's driver calls `predict` and then `targets` in each tick; neither raises."""

    def __init__(
        self, registry: Registry, clock: NowClock, *, request_timeout_s: float = 5.0, tick_max_s: float = 30.0
    ) -> None:
        self.registry = registry
        self.last: Tick | None = None
        self._clock = clock
        self._request_timeout_s = request_timeout_s
        self._tick_max_s = tick_max_s
        self._run = secrets.token_hex(4)
        self._ticks = 0
        self._context: PipelineContext | None = None
        self._began_s = 0.0

    def needs(self, needs: Needs) -> Needs:
        """The needs of the policy and of the plugins."""
        return wanted(needs, self.registry.specs(), TRAFFIC_WINDOW_S)

    async def predict(self, observation: Observation, own: Prediction | None) -> Prediction | None:
        """The policy's prediction (None: it has none), with what plugins say. A tick begins."""
        self.registry.expire()
        self._ticks += 1
        context = self._context = context_of(observation, f"{self._run}-{self._ticks}")
        self._began_s = self._clock.now_s()
        try:
            async with asyncio.timeout(self._tick_max_s):
                return await self._predicted(context, own)
        except TimeoutError:
            self._ends(context, Action.SKIP_TICK_TIMEOUT, own, why=self._late())
            self._context = None
            return own

    async def targets(
        self, observation: Observation, prediction: Prediction | None, proposals: tuple[Proposal, ...]
    ) -> tuple[ComponentTarget, ...]:
        """The proposals of the policy, merged with those of plugins, reconciled and constrained. None: do nothing."""
        context, self._context = self._context, None
        if context is None or context.at_s != observation.at_s:
            return ()  # the tick was given up
        context = replace(context, predictions=prediction)
        left_s = max(0.0, self._began_s + self._tick_max_s - self._clock.now_s())
        try:
            async with asyncio.timeout(left_s):
                merged = await self._merged(context, proposals, baseline_of(observation))
        except TimeoutError:
            self._ends(context, Action.SKIP_TICK_TIMEOUT, prediction, why=self._late())
            return ()
        if (by := merged.rejected) is not None:
            self.registry.counters.add("reject_short_circuited_total", by.plugin_id)
            reason = by.result.reason if isinstance(by.result, Reject) else ""
            self._ends(context, Action.SKIP_SHORT_CIRCUIT, prediction, why=f"{by.plugin_id} rejects: {reason}")
            return ()
        action = Action.APPLY if merged.targets else Action.SKIP_NO_TARGETS
        self._ends(context, action, prediction, merged.targets)
        return merged.targets

    # --- the stages --------------------------------------------------------------------------------

    async def _predicted(self, context: PipelineContext, own: Prediction | None) -> Prediction | None:
        """The policy's own prediction has its place among the priorities."""
        so_far, spoken = None, False
        for row in self.registry.of(Stage.PREDICT):
            if not spoken and row.spec.priority >= BUILTIN_PREDICT_PRIORITY:
                so_far, spoken = filled(so_far, own, BUILTIN_PREDICT), True
            said = await self._contribution(row, replace(context, predictions=so_far), ())
            if isinstance(said, Predicted):
                so_far = filled(so_far, said.prediction, row.spec.plugin_id)
                if said.final:
                    return so_far
        return so_far if spoken else filled(so_far, own, BUILTIN_PREDICT)

    async def _merged(self, context: PipelineContext, own: tuple[Proposal, ...], baseline: dict[str, int]) -> Merged:
        proposals = (*own, *await self._proposals(Stage.PROPOSE, context, ()))
        merged = merge(proposals, baseline)
        for stage in (Stage.RECONCILE, Stage.CONSTRAIN):
            if merged.rejected is not None:
                break
            if merged.targets:
                context = replace(context, decision_id=f"{context.request_id}-d", proposal=merged.targets)
            said = await self._proposals(stage, context, proposals)
            merged = merge(said, baseline, merged.targets, bounds_only=stage is Stage.CONSTRAIN)
            self._count_clamps(stage, merged)
        return merged

    def _count_clamps(self, stage: Stage, merged: Merged) -> None:
        name = "reconcile_clamped_total" if stage is Stage.RECONCILE else "constrain_capped_total"
        for clamp in merged.clamps:
            self.registry.counters.add(name, clamp.sub_component_type, clamp.source)
        for plugin_id, role in merged.dropped:
            log.warning("planner plugin %s: its target for %s does not count in %s", plugin_id, role, stage)

    async def _proposals(
        self, stage: Stage, context: PipelineContext, before: Sequence[Proposal]
    ) -> tuple[Proposal, ...]:
        """The answers of the plugins of a stage, all called at once."""
        rows = self.registry.of(stage)
        if not rows:
            return ()
        said = await asyncio.gather(*(self._contribution(row, context, before) for row in rows))
        return tuple(_heard(zip(rows, said, strict=True)))

    # --- one plugin --------------------------------------------------------------------------------

    async def _contribution(
        self, row: Registered, context: PipelineContext, proposals: Sequence[Proposal]
    ) -> Answer | None:
        """The plugin's answer in this tick, or its last answer if that one still holds; None: no answer."""
        counters, name, now_s = self.registry.counters, row.spec.plugin_id, context.at_s
        if not circuits.admits(row.circuit, now_s):
            return None
        missing = unset(context, row.spec.requires)
        if missing is not None:
            counters.add("tick_requires_unsatisfied_total", name, missing)
            return None
        if not scheduling.is_due(row.turn, row.spec, now_s):
            counters.add("tick_skipped_total", name)
            if row.turn.held is not None:
                counters.add("plugin_held_over_total", name, row.spec.stage)
            return row.turn.held
        row.lag_s = scheduling.lag_s(row.turn, row.spec, now_s)
        return await self._requested(row, context, proposals)

    async def _requested(
        self, row: Registered, context: PipelineContext, proposals: Sequence[Proposal]
    ) -> Answer | None:
        """Its answer; None where it gave none. Whatever it does is counted, and raises nothing."""
        registry, spec, began_s = self.registry, row.spec, self._clock.now_s()
        row.circuit, row.last_call_s = circuits.was_called(row.circuit), began_s
        row.evaluations += 1
        row.overrides = frozenset()
        result = "error"
        try:
            answer = await row.plugin.ask(spec.stage, context, proposals, self._request_timeout_s)
            row.turn = scheduling.answered(row.turn, spec, answer, context.at_s)
            row.overrides = frozenset(t.type for t in answer.targets) if isinstance(answer, Override) else frozenset()
            registry.answered(row)
            result = _result(answer)
            return answer
        except asyncio.CancelledError:  # the tick took too long: its probe, or its turn, has failed
            registry.failed(row, "it had not answered when the tick was given up", context.at_s)
            raise
        except DynamoError as error:
            registry.failed(row, str(error), context.at_s)
        except Exception as error:  # a bug, or what a library raises: it must not cost the others' answers
            log.exception("planner plugin %s", spec.plugin_id)
            registry.failed(row, f"{type(error).__name__}: {shown(error)}", context.at_s)
        finally:
            registry.counters.add("plugin_evaluations_total", spec.plugin_id, spec.stage, result)
            took_s = max(0.0, self._clock.now_s() - began_s)
            registry.counters.took("plugin_latency_seconds", took_s, spec.plugin_id, spec.stage)
        return None

    # --- the end -----------------------------------------------------------------------------------

    def _late(self) -> str:
        self.registry.counters.add("tick_timeout_total")
        return f"the plugins took longer than {self._tick_max_s:g} s"

    def _ends(
        self,
        context: PipelineContext,
        action: Action,
        prediction: Prediction | None,
        targets: tuple[ComponentTarget, ...] = (),
        *,
        why: str = "",
    ) -> None:
        self.registry.counters.took("tick_duration_seconds", max(0.0, self._clock.now_s() - self._began_s))
        self.last = Tick(context.request_id, context.at_s, action, prediction, targets, why)
        if why:
            log.warning("planner: tick %s: %s: %s", context.request_id, action, why)


def _heard(said: Iterable[tuple[Registered, Answer | None]]) -> Iterable[Proposal]:
    for row, answer in said:
        if isinstance(answer, Accept | Override | Reject):
            yield Proposal(row.spec.plugin_id, row.spec.priority, answer)
        elif isinstance(answer, Nothing):
            yield Proposal(row.spec.plugin_id, row.spec.priority, Accept())


def _result(answer: Answer) -> str:
    """As `plugin_evaluations_total` calls it."""
    match answer:
        case Override():
            return "override"
        case Reject():
            return "reject"
        case Nothing():
            return "error"
    return "accept"
