"""Small simulated runs, with an engine whose times can be added up by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.forecasting.answers import InlineForecaster
from dynamo_local.profile.interpolation import FixedModel
from dynamo_local.simulator.options import FleetShape, SimulationOptions
from dynamo_local.simulator.simulation import Run, Simulation
from dynamo_local.simulator.trace import TraceRequest

PERF = FixedModel(prefill_ms_per_token=0.1, decode_ms=10.0)
"""A prompt of 100 tokens takes 10 ms, and so does each token after the first."""


def requests(*rows: tuple[float, int, int]) -> list[TraceRequest]:
    return [TraceRequest(*row) for row in rows]


def options(prefill: int, decode: int, **more: Any) -> SimulationOptions:
    sim = {"kv_transfer_latency_s": 0.0, "kv_transfer_bytes_per_s": 1e30, **more.pop("sim", {})}
    return SimulationOptions(shape=FleetShape(prefill, decode), sim=SimOptions(**sim), **more)


def run(twin: SimulationOptions, trace: Sequence[TraceRequest], planner: PlannerConfig | None = None) -> Run:
    return Simulation(twin, trace, planner=driven(planner), perf=PERF).run()


def driven(planner: PlannerConfig | None) -> PolicyDriver | None:
    if planner is None:
        return None
    return PolicyDriver(policy_of(planner), 0.0, forecaster=InlineForecaster())
