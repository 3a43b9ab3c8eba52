"""Spans of what becomes of the fleet: decisions of people and planners, and the episodes of workers that follow.

It subscribes to the controller and to the planner, and changes nothing. An episode lasts as long as a worker is in one
of the states of `EPISODES`. A span of its own holds a restart: the end of the old process and the start of the new one.
Each has a link to the command or decision that caused it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from dynamo_local.core.fleet.events import Command, Event, Leave
from dynamo_local.core.fleet.fleet import Intent, Worker
from dynamo_local.core.fleet.lifecycle import Transition, TransitionKind
from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.types import WorkerState as S
from dynamo_local.planner.records.decision_log import DecisionRecord, Outcome
from dynamo_local.planner.values import Observation
from dynamo_local.system.spans import Value

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

    from dynamo_local.system.otel import Episode, Tracing

EPISODES: Final[Mapping[S, str]] = {
    S.STARTING: "start",
    S.DRAINING: "drain",
    S.DRAIN_TIMED_OUT: "drain",
    S.FLIPPING: "flip",
    S.FALLING_ASLEEP: "sleep",
    S.WAKING: "wake",
}
BETWEEN: Final = frozenset({S.PENDING, S.STARTING, S.CRASHED, S.START_TIMED_OUT, S.BACKING_OFF})
"""States of a worker that is on its way to another process."""
DECISION: Final = "planner decision"
ASKED: Final = ("component", "name", "gives", "takes", "force", "cancel", "rolling", "now")
"""Fields of commands."""
FAILURES: Final = frozenset(
    {
        TransitionKind.SPAWN_FAILED,
        TransitionKind.HEALTH_FAILED,
        TransitionKind.START_DEADLINE_PASSED,
        TransitionKind.DRAIN_DEADLINE_PASSED,
        TransitionKind.FLIP_FAILED,
        TransitionKind.FAULTED,
    }
)
CAUSES_KEPT: Final = 256
"""Commands and decisions to which a later span may have a link: the latest ones."""


class FleetSpans:
    """One run's, and its planner's: a `PlannerObserver`."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._causes: dict[str, SpanContext] = {}
        self._leave: str | None = None
        self._deciding: tuple[str, Episode] | None = None
        self._episodes: dict[str, Episode] = {}
        self._restarts: dict[str, Episode] = {}

    # --- causes

    def on_event(self, event: Event) -> None:
        """A command is a cause. A planner's first one begins its decision, which is told in a moment."""
        if not isinstance(event, Command):
            return
        cause = event.stimulus_id
        if isinstance(event, Leave):
            self._leave = cause
        if not cause.startswith("planner:"):
            asked = _plain({name: getattr(event, name, None) for name in ASKED})
            self._begin_cause(f"command {event.kind}", cause, asked).end()
        elif self._deciding is None or self._deciding[0] != cause:
            self._deciding = cause, self._begin_cause(DECISION, cause, {})

    def on_observation(self, observation: Observation) -> None:
        """Only decisions are spans."""

    def on_decision(self, record: DecisionRecord) -> None:
        """The planner has decided, and the connector has answered."""
        deciding, self._deciding, cause = self._deciding, None, record.stimulus_id
        known = deciding is not None and deciding[0] == cause
        span = deciding[1] if deciding is not None and known else self._begin_cause(DECISION, cause, {})
        span.set(_decided(record))
        if any(step.outcome is Outcome.REFUSED for step in record.outcomes.values()):
            span.failed(str(Outcome.REFUSED))
        span.end()

    def _begin_cause(self, name: str, cause: str, attributes: Mapping[str, Value]) -> Episode:
        span = self._tracing.episode(name, {"dynamo.stimulus_id": cause, **attributes})
        self._causes[cause] = span.context
        if len(self._causes) > CAUSES_KEPT:
            del self._causes[next(iter(self._causes))]
        return span

    def _because(self, worker: Worker, transition: Transition) -> Iterable[SpanContext]:
        """The command behind it. A stage of a run's end has the last exit of the stage before as its cause."""
        causes = (transition.stimulus_id, self._leave, worker.cause)
        return [self._causes[cause] for cause in causes if cause in self._causes][:1]

    # --- workers

    def on_transition(self, worker: Worker, transition: Transition) -> None:
        """Begin and end what this transition begins and ends."""
        name = str(transition.details.get("was") or transition.name)
        before, after = EPISODES.get(transition.before), EPISODES.get(transition.after)
        running = self._episodes.get(name)
        if running is not None and before != after:
            self._end(self._episodes.pop(name), transition)
        elif running is not None and transition.kind in FAILURES:
            _fail(running, transition)
        self._follow_restart(name, worker, transition)
        if after is not None and before != after:
            causes = self._because(worker, transition)
            within = self._restarts.get(name)
            self._episodes[name] = self._tracing.episode(after, _about(transition), within=within, because=causes)

    def _follow_restart(self, name: str, worker: Worker, transition: Transition) -> None:
        running, after = self._restarts.get(name), transition.after
        if running is None:
            failed = TRAITS[after].failed and not TRAITS[transition.before].failed
            if (failed and after in BETWEEN) or (after is S.DRAINING and worker.intent is Intent.RESTARTING):
                causes = self._because(worker, transition)
                self._restarts[name] = self._tracing.episode("restart", _about(transition), because=causes)
        elif after is S.READY or after is S.FAULTED or not self._goes_on(worker, after):
            self._end(self._restarts.pop(name), transition)

    @staticmethod
    def _goes_on(worker: Worker, after: S) -> bool:
        if after in BETWEEN or worker.intent is Intent.RESTARTING:
            return True
        return worker.state in BETWEEN  # it has exited, and the same step starts it again

    @staticmethod
    def _end(span: Episode, transition: Transition) -> None:
        span.set({"dynamo.outcome": str(transition.after), **_plain(transition.details)})
        if transition.kind in FAILURES or TRAITS[transition.after].failed:
            _fail(span, transition)
        span.end()


def _fail(span: Episode, transition: Transition) -> None:
    span.set(_plain(transition.details))
    span.failed(str(transition.kind))


def _about(transition: Transition) -> dict[str, Value]:
    return {
        "dynamo.worker": transition.name,
        "dynamo.component": transition.component,
        "dynamo.event": str(transition.kind),
        "dynamo.stimulus_id": transition.stimulus_id,
        **_plain(transition.details),
    }


def _plain(fields: Mapping[str, Any]) -> dict[str, Value]:
    """Those that an attribute can have; a missing one is left out."""
    return {f"dynamo.{name}": value for name, value in fields.items() if isinstance(value, str | bool | int | float)}


def _decided(record: DecisionRecord) -> dict[str, Value]:
    found: dict[str, Value] = {"dynamo.policy": record.inputs.policy}
    for component, target in sorted(record.decision.targets.items()):
        found[f"dynamo.target.{component}"] = target
    for component, step in sorted(record.outcomes.items()):
        found[f"dynamo.outcome.{component}"] = str(step.outcome)
        if step.reason is not None:
            found[f"dynamo.reason.{component}"] = step.reason
    return found
