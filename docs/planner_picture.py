"""Draw docs/planner-report.svg: `python docs/planner_picture.py`. The same bytes each time.

One simulated hour with a load that rises and falls, planned by `sla`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from dynamo_local.arbiter.planner_report_page import write_report
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.planner.records.decision_log import DecisionLog, as_json
from dynamo_local.simulator.generator import generate, parse_generated
from dynamo_local.simulator.options import FleetShape, SimulationOptions
from dynamo_local.simulator.records import recorded
from dynamo_local.simulator.simulation import Case

PICTURE = Path(__file__).with_name("planner-report.svg")
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


def drawn(folder: Path) -> bytes:
    """The picture, made in that folder."""
    case = Case("sla", SimulationOptions(shape=FleetShape(1, 1), sim=SIM, gpus=8), planner=OPTIONS)
    trace = list(generate(parse_generated(LOAD).options))
    log, picture = folder / "decisions.jsonl", folder / PICTURE.name
    DecisionLog(log).append(as_json(record) for record in recorded(trace, case, began_s=BEGAN_S))
    write_report(log, picture, title="")
    return picture.read_bytes()


def main() -> None:
    """Write it."""
    with tempfile.TemporaryDirectory() as folder:
        PICTURE.write_bytes(drawn(Path(folder)))


if __name__ == "__main__":
    main()
