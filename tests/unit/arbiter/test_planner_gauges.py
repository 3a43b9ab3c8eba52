"""The planner's gauges under Dynamo's names: each of them, and no sample where nothing is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dynamo_local.arbiter.planner_metrics import PlannerGauges, PlannerNow
from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.core.types import Missing
from dynamo_local.planner.loop import PlannerState
from dynamo_local.planner.values import EngineSeen, FixedFleet, Observation, Reading
from dynamo_local.profile.judgement import Drifted
from tests.fakes.planner.logged_lines import DECODE, POOLS, PREFILL, reasons, record
from tests.tools.scraped import Samples, samples

EXPECTED = {
    "num_prefill_replicas": 2,
    "num_decode_replicas": 3,
    "predicted_num_prefill_replicas": 2,
    "predicted_num_decode_replicas": 4,
    "observed_requests_per_second": 4,
    "observed_input_sequence_tokens": 3000,
    "observed_output_sequence_tokens": 300,
    "observed_ttft_ms": 240,
    "observed_itl_ms": 9,
    "observed_request_duration_seconds": 3,
    "predicted_requests_per_second": 5,
    "predicted_input_sequence_tokens": 3100,
    "predicted_output_sequence_tokens": 310,
    "engine_prefill_capacity_requests_per_second": 2.5,
    "engine_decode_capacity_requests_per_second": 1.5,
    "estimated_ttft_ms": 250,
    "estimated_itl_ms": 9.5,
    "sla_target_ttft_ms": 300,
    "sla_target_itl_ms": 10,
    "gpu_hours": 1.25,
    "fixed_fleet_gpu_hours_ratio": 0.9,
}
FIXED = FixedFleet(1.0, 0.991, 6.3, (5, 2), 0.992, 7.0)


class Scraped:
    """Gauges whose planner runs since second 0."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.now = PlannerNow(PlannerState.RUNNING, gpu_hours=1.25, fixed_fleet=FIXED)
        self.gauges = PlannerGauges(self.registry, lambda: self.now)

    def samples(self) -> Samples:
        return samples(generate_latest(self.registry).decode())

    def plain(self) -> dict[str, float]:
        """Those without labels, without their prefix."""
        return {
            name.removeprefix("dynamo_planner_"): value
            for (name, labels), value in self.samples().items()
            if not labels
        }

    def states(self, enum: str) -> dict[str, str]:
        """What each component's enum says; AssertionError where it says two things."""
        found: dict[str, str] = {}
        for (name, labels), value in self.samples().items():
            if name == f"dynamo_planner_{enum}" and value:
                assert labels[0] not in found
                found[labels[0]] = labels[1]
        return found


def observation(*engines: tuple[str, int, ForwardPass | Missing], at_s: float = 179.0) -> Observation:
    """With these ranks of workers."""
    seen = {EngineId(worker, rank): EngineSeen(DECODE, last=last) for worker, rank, last in engines}
    return Observation(Reading(at_s, 0, {}), POOLS, engines=seen)


@pytest.fixture
def scraped() -> Scraped:
    """After a pull and a decision."""
    found = Scraped()
    found.gauges.on_observation(observation())
    found.gauges.on_decision(record())
    return found


def test_every_gauge_has_its_value(scraped: Scraped) -> None:
    assert scraped.plain() == EXPECTED


def test_how_far_engines_are_off_their_profile_is_told_by_component_kind_and_quantile() -> None:
    fresh = Scraped()
    name = "dynamo_planner_profile_drift_ratio"
    assert not any(key == name for key, _ in fresh.samples())
    fresh.now = replace(fresh.now, drift=(Drifted("VllmWorker", "decode", 0.18, 0.25, 512),))
    told = {labels: value for (key, labels), value in fresh.samples().items() if key == name}
    assert told == {("VllmWorker", "decode", "0.5"): 0.18, ("VllmWorker", "decode", "0.9"): 0.25}


def test_before_the_first_decision_there_is_none() -> None:
    fresh = Scraped()
    fresh.now = replace(fresh.now, gpu_hours=None, fixed_fleet=None)
    assert fresh.samples() == {}


@pytest.mark.parametrize(
    ("change", "absent"),
    [
        (
            {"traffic": Missing("Prometheus is away"), "prediction": None},
            {"observed_", "predicted_requests", "predicted_i", "predicted_o"},
        ),
        ({"prediction": None}, {"predicted_requests", "predicted_i", "predicted_o"}),
        ({"told": reasons(prefill={}, decode={})}, {"engine_", "estimated_"}),
        ({"told": reasons(decode={})}, {"engine_decode", "estimated_itl"}),
    ],
    ids=["no traffic", "no forecast", "no model", "one role without a model"],
)
def test_what_the_last_decision_did_not_know_is_absent(
    scraped: Scraped, change: dict[str, Any], absent: set[str]
) -> None:
    scraped.gauges.on_decision(record(2, **change))
    gone = {name for name in EXPECTED if name.startswith(tuple(absent))}
    assert gone
    assert set(scraped.plain()) == set(EXPECTED) - gone


def test_a_tick_of_the_load_loop_leaves_what_is_of_the_window(scraped: Scraped) -> None:
    told = reasons(1, prefill={"estimated_ttft_ms": 280.0}, decode={"estimated_itl_ms": 12.0})
    told = tuple(
        replace(reason, decisions={**reason.decisions, "throughput_scaling_decision": "unset"}) for reason in told
    )
    scraped.gauges.on_decision(record(2, step=1, traffic=None, prediction=None, told=told))
    changed = {"estimated_ttft_ms": 280, "estimated_itl_ms": 12, "predicted_num_decode_replicas": 5}
    assert scraped.plain() == {**EXPECTED, **changed}
    assert scraped.states("load_scaling_decision") == {PREFILL: "no_change", DECODE: "scale_up"}
    assert scraped.states("throughput_scaling_decision") == {PREFILL: "set_lower_bound", DECODE: "set_lower_bound"}


def test_each_rank_has_its_load_and_goes_with_its_worker(scraped: Scraped) -> None:
    last = ForwardPass(EngineId("7"), 3, 0.01, Requests(sum_decode_kv_tokens=50), Requests(1, 900, 0.0, 0, 1, 20))
    names = [
        f"dynamo_planner_engine_{name}"
        for name in ("queued_prefill_tokens", "queued_decode_kv_tokens", "inflight_decode_kv_tokens")
    ]
    scraped.gauges.on_observation(
        observation(("7", 0, last), ("7", 1, last), ("8", 0, Missing("no pass yet")), at_s=180.0)
    )
    found = scraped.samples()
    assert [found[name, ("0", "7")] for name in names] == [900, 20, 50]  # dp_rank, worker_id
    assert {labels for name, labels in found if name in names} == {("0", "7"), ("1", "7")}
    scraped.gauges.on_observation(observation(at_s=181.0))
    assert not {labels for name, labels in scraped.samples() if name in names}


def test_a_stopped_planner_shows_only_the_gpu_hours(scraped: Scraped) -> None:
    scraped.now = replace(scraped.now, state=PlannerState.STOPPED, since_s=200.0)
    assert scraped.plain() == {"gpu_hours": 1.25}
    assert scraped.states("load_scaling_decision") == {}


def test_a_planner_that_was_started_again_has_forgotten_the_last_run_s(scraped: Scraped) -> None:
    scraped.now = replace(scraped.now, since_s=200.0, fixed_fleet=None)
    assert scraped.plain() == {"gpu_hours": 1.25}


def test_a_paused_planner_shows_the_workers(scraped: Scraped) -> None:
    scraped.now = replace(scraped.now, state=PlannerState.PAUSED)
    assert set(scraped.plain()) == {"num_prefill_replicas", "num_decode_replicas", "gpu_hours"}
