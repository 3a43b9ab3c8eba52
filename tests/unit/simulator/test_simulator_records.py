"""A simulated run's decisions as a log: they can be told, and reported, as those of a real one."""

from __future__ import annotations

from pathlib import Path

from dynamo_local.arbiter.planner_report_page import write_report
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.planner.records.decision_log import DecisionLog, as_json, describe, read
from dynamo_local.simulator.options import FleetShape, SimulationOptions
from dynamo_local.simulator.records import recorded
from dynamo_local.simulator.simulation import Case, run_case
from dynamo_local.simulator.trace import TraceRequest
from tests.fakes.planner.options import sla_options

SIM = SimOptions()
CASE = Case(
    "sla",
    SimulationOptions(shape=FleetShape(1, 1), sim=SIM, gpus=8),
    planner=sla_options(
        profile_results_dir=SIM.profile, ttft_ms=400.0, itl_ms=12.0, throughput_adjustment_interval_seconds=20.0
    ),
)
BURST = [TraceRequest(n / 20, 3000, 100) for n in range(1000)]


def test_they_are_those_of_the_run_with_what_they_were_made_from(tmp_path: Path) -> None:
    records = recorded(BURST, CASE, began_s=1.8e9)
    assert [record.decision for record in records] == [acted.decision for acted in run_case(BURST, CASE).acted]
    assert any(record.outcomes for record in records)
    log = tmp_path / "decisions.jsonl"
    DecisionLog(log).append(as_json(record) for record in records)
    assert "seen: 20 requests/s, prompts of 3,000" in describe(read(log)[1])
    assert write_report(log, tmp_path / "r.html", title="T") == len(records)
    assert "forecast of requests/s" in (tmp_path / "r.html").read_text()
