"""The decisions of a simulated run as a decision log has them, for `dynamo planner report --log`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.forecasting.answers import InlineForecaster
from dynamo_local.planner.records.decision_log import DecisionRecord, Outcome, StepOutcome, inputs_of
from dynamo_local.planner.values import IntervalObservation, Observation
from dynamo_local.simulator.simulation import Acted, Case, Simulation
from dynamo_local.simulator.trace import TraceRequest


def recorded(trace: Sequence[TraceRequest], case: Case, *, began_s: float = 0.0) -> list[DecisionRecord]:
    """The decisions of that case, whose run begins at `began_s` (Unix time). It must have a planner."""
    assert case.planner is not None, "a case without a planner decides nothing"
    options, records = case.planner, list[DecisionRecord]()
    driver = PolicyDriver(case.make_policy(options), 0.0, forecaster=InlineForecaster())

    def record(acted: Acted, observation: Observation) -> None:
        status, decision = driver.status, acted.decision
        seen = IntervalObservation(decision.now_s, status.interval_began_s, status.readings, observation.pools)
        inputs = inputs_of(
            seen, options, traffic=observation.traffic, prediction=driver.prediction, engines=observation.engines
        )
        number = len(records) + 1
        outcomes = dict(_outcomes(acted, no_operation=case.no_operation))
        records.append(DecisionRecord(began_s + decision.now_s, f"planner:{number}", inputs, decision, outcomes))

    picker = case.make_picker()
    Simulation(
        case.options, trace, planner=driver, no_operation=case.no_operation, picker=picker, on_acted=record
    ).run()
    return records


def _outcomes(acted: Acted, *, no_operation: bool) -> Iterator[tuple[str, StepOutcome]]:
    refused = dict(acted.refused)
    for reason in acted.decision.reasons:
        if reason.deferred:
            yield reason.component, StepOutcome(Outcome.DEFERRED)
        elif reason.step and no_operation:
            yield reason.component, StepOutcome(Outcome.NO_OPERATION)
        elif reason.component in refused:
            yield reason.component, StepOutcome(Outcome.REFUSED, reason=refused[reason.component])
        elif reason.step:
            yield reason.component, StepOutcome(Outcome.COMMITTED)
