"""Commands, decisions and the episodes of workers as spans, with links from one to the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dynamo_local.arbiter.fleet_spans import FleetSpans
from dynamo_local.core.fleet import effects as ins
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.events import Change
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.core.fleet.step import step
from dynamo_local.planner.records.decision_log import DecisionRecord, Inputs, Outcome, StepOutcome
from dynamo_local.planner.values import Decision, WorkerPools
from tests.fakes.arbiter.fleet_views import DECODE, name, on_ledger, pid_of, worker


@dataclass(eq=False)
class FakeSpan:
    """Stands for `system.otel.Episode`. Its context is the span itself."""

    name: str
    attributes: dict[str, Any]
    within: FakeSpan | None
    because: list[FakeSpan]
    error: str | None = None
    ended: bool = False

    @property
    def context(self) -> FakeSpan:
        return self

    def set(self, attributes: dict[str, Any]) -> None:
        self.attributes |= attributes

    def failed(self, error_type: str) -> None:
        self.error = error_type

    def end(self) -> None:
        assert not self.ended
        self.ended = True


@dataclass
class FakeTracing:
    spans: list[FakeSpan] = field(default_factory=list)

    def episode(self, name: str, attributes: dict[str, Any], *, within: Any = None, because: Any = ()) -> FakeSpan:
        self.spans.append(FakeSpan(name, dict(attributes), within, list(because)))
        return self.spans[-1]


class Watched:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.now_s, self.tracing = fleet, 100.0, FakeTracing()
        self.follow = FleetSpans(self.tracing)  # type: ignore[arg-type]

    def feed(self, event: st.Event, after_s: float = 0.0) -> None:
        self.now_s += after_s
        before = self.fleet
        self.fleet, done, _ = step(before, event, self.now_s)
        self.follow.on_event(event)
        for commit in (each for each in done if isinstance(each, ins.Commit)):
            for transition in commit.transitions:
                found = self.fleet.workers.get(transition.name) or before.workers[transition.name]
                self.follow.on_transition(found, transition)

    def gone(self, n: int, code: int = 0, after_s: float = 0.0) -> None:
        gone = st.ProcessGone(stimulus_id=f"exit:{pid_of(n)}", name=name(n), pid=pid_of(n), code=code, unit=0.5)
        self.feed(gone, after_s)

    def named(self, span: str) -> FakeSpan:
        (found,) = [each for each in self.tracing.spans if each.name == span]
        return found


def watched(*states: str) -> Watched:
    return Watched(on_ledger([worker(n, state) for n, state in enumerate(states)], 8))


def test_a_drain_lasts_until_the_process_is_gone_and_names_its_command() -> None:
    fleet = watched("ready", "ready")
    fleet.feed(st.Drain(stimulus_id="drain:1", name=name(1)))
    drain = fleet.named("drain")
    assert drain.because == [fleet.named("command Drain")]
    assert not drain.ended
    fleet.gone(1)
    assert drain.ended
    assert drain.error is None
    assert drain.attributes["dynamo.outcome"] == "exited"


def test_a_drain_past_its_deadline_has_failed() -> None:
    fleet = watched("ready", "ready")
    fleet.feed(st.Drain(stimulus_id="drain:1", name=name(1)))
    fleet.feed(st.Tick(), DECODE.drain_deadline_s + 60)
    fleet.feed(st.RequestsCounted(stimulus_id="count", name=name(1), pid=pid_of(1), in_flight=2))
    fleet.gone(1, -9)
    drain = fleet.named("drain")
    assert drain.ended
    assert drain.error == "DrainDeadlinePassed"
    assert drain.attributes["dynamo.requests_cut"] == 2


def test_a_crash_begins_a_restart_that_holds_the_new_start() -> None:
    fleet = watched("ready", "ready")
    fleet.gone(1, -11)
    restart = fleet.named("restart")
    assert not restart.ended
    assert restart.attributes["dynamo.event"] == "ProcessExited"
    fleet.feed(st.Swept(stimulus_id="swept", name=name(1)))
    fleet.feed(st.Tick(), 60)
    fleet.feed(st.GpusSeen(stimulus_id="gpus", devices=fleet.fleet.gpus.devices))
    start = fleet.named("start")
    assert start.within is restart


def test_a_planners_decision_is_the_cause_of_what_follows() -> None:
    fleet = watched("ready", "ready")
    target = Change(1, relative=False)
    fleet.feed(st.Scale(stimulus_id="planner:7", component=DECODE.component, target=target, by_person=False))
    decision, drain = fleet.named("planner decision"), fleet.named("drain")
    assert drain.because == [decision]
    assert not decision.ended
    fleet.follow.on_decision(record("planner:7", Outcome.COMMITTED))
    assert decision.ended
    assert decision.attributes == {
        "dynamo.stimulus_id": "planner:7",
        "dynamo.policy": "load",
        f"dynamo.target.{DECODE.component}": 1,
        f"dynamo.outcome.{DECODE.component}": "committed",
    }


def test_a_decision_that_was_refused_has_failed() -> None:
    fleet = watched("ready")
    fleet.follow.on_decision(record("planner:8", Outcome.REFUSED))
    decision = fleet.named("planner decision")
    assert decision.ended
    assert decision.error == "refused"


def test_the_stages_of_a_runs_end_name_the_command_that_began_it() -> None:
    fleet = watched("ready")
    fleet.feed(st.Leave(stimulus_id="down"))
    assert fleet.named("drain").because == [fleet.named("command Leave")]


def record(stimulus_id: str, outcome: Outcome) -> DecisionRecord:
    inputs = Inputs(0.0, 1, None, None, None, WorkerPools(None, None))  # type: ignore[arg-type]
    decision = Decision(0.0, {DECODE.component: 1}, (), 10.0)
    return DecisionRecord(0.0, stimulus_id, inputs, decision, {DECODE.component: StepOutcome(outcome)})
