"""Dispatch under targets in the simulator: the real functions, and their worth where prefill is at its limit."""

from __future__ import annotations

import ast
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import dynamo_local.simulator.flow as twin_flow
from dynamo_local.core.routing.decode_choice import SloPicker
from dynamo_local.core.routing.estimates import Targets, Timing
from dynamo_local.simulator.metrics import measure
from dynamo_local.simulator.options import SimulationOptions, Slo
from dynamo_local.simulator.simulation import Run, Simulation
from dynamo_local.simulator.trace import TraceRequest
from tests.fakes.planner.twins import PERF, options, requests

TARGETS = Targets(0.5, 0.03)


def busy(seed: int = 1, rate: float = 12.0, seconds: float = 30.0) -> list[TraceRequest]:
    """Prompts of 100 to 3,000 tokens in bursts, answers of 1 to 200: more than one prefill worker computes in time."""
    rng, found, at_s = random.Random(seed), [], 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        found.append((at_s, rng.randrange(100, 3000), rng.randrange(1, 200)))
    return requests(*found)


def play(twin: SimulationOptions, trace: list[TraceRequest], *, slo: bool = True) -> Run:
    picker = SloPicker(Timing(PERF, twin.sim.speed), TARGETS) if slo else None
    return Simulation(twin, trace, perf=PERF, picker=picker).run()


def by_targets(prefill: int, decode: int, **more: Any) -> SimulationOptions:
    return replace(options(prefill, decode), disagg_policy="slo", targets=TARGETS, **more)


def attained(run: Run) -> float:
    return measure(run, Slo(500, 30)).attainment


def test_process_and_twin_dispatch_by_the_same_functions() -> None:
    imported = {
        alias.name
        for path in Path(twin_flow.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {"DecodeSide", "PrefillLine", "Turns", "Timing"} <= imported


def test_every_request_has_one_end_under_overload() -> None:
    trace = busy(rate=40.0, seconds=10.0)
    run = play(by_targets(1, 1), trace)
    assert [job.dropped for job in run.jobs] == [None] * len(trace)
    assert all(job.last_s is not None for job in run.jobs)


def test_it_is_not_below_the_better_of_the_two_rules() -> None:
    for shape in ((1, 2), (2, 1), (2, 2), (1, 3)):
        trace = busy()
        slo = attained(play(by_targets(*shape), trace))
        threshold = attained(play(options(*shape), trace, slo=False))
        remote = attained(play(options(*shape, conditional=False), trace, slo=False))
        assert slo >= max(threshold, remote), (shape, slo, threshold, remote)


def test_the_same_trace_gives_the_same_run_pass_by_pass() -> None:
    trace = busy(seed=3, seconds=8.0)
    one, other = (
        [(job.remote, job.first_s, job.last_s) for job in play(by_targets(1, 2, coalesce=coalesce), trace).jobs]
        for coalesce in (True, False)
    )
    assert one == other
