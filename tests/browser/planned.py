"""The report of an hour whose load rises and falls, planned by `sla` in the simulator. The same bytes each time."""

from __future__ import annotations

from pathlib import Path

from dynamo_local.arbiter.planner_report_page import write_report
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.planner.records.decision_log import DecisionLog, as_json
from dynamo_local.simulator.generator import generate, parse_generated
from dynamo_local.simulator.options import FleetShape, SimulationOptions
from dynamo_local.simulator.records import recorded
from dynamo_local.simulator.simulation import Case

BEGAN_S = 1_767_268_800.0
"""2026-01-01 12:00 UTC."""
LOAD = "sin,rate=9,amplitude=0.85,period=1500,duration=3000,isl=3000,osl=300,seed=7"
SIM = SimOptions()
OPTIONS = PlannerConfig(
    policy="sla",
    profile_results_dir=SIM.profile,
    ttft_ms=400.0,
    itl_ms=12.0,
    throughput_adjustment_interval_seconds=60.0,
    load_predictor="kalman",
    max_gpu_budget=8,
)


def planned_report(folder: Path) -> Path:
    """The report's page, made in that folder."""
    case = Case("sla", SimulationOptions(shape=FleetShape(1, 1), sim=SIM, gpus=8), planner=OPTIONS)
    trace = list(generate(parse_generated(LOAD).options))
    log, to = folder / "decisions.jsonl", folder / "report.html"
    DecisionLog(log).append(as_json(record) for record in recorded(trace, case, began_s=BEGAN_S))
    write_report(log, to, title="Planner of dynamo")
    return to
