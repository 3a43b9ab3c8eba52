"""Every policy in the simulator: it follows a load that rises and falls, whole decisions included."""

from __future__ import annotations

import pytest

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.values import Needs
from dynamo_local.simulator.options import DECODE, PREFILL, FleetShape, SimulationOptions
from dynamo_local.simulator.simulation import Case, Run, Simulation, run_case
from dynamo_local.simulator.trace import TraceRequest
from tests.fakes.planner.options import load_options, sla_options, throughput_load_options
from tests.fakes.planner.twins import PERF, options, requests
from tests.fakes.planner.wishing import Wishing

SPEED = 0.1
"""Engines at a tenth of their speed: a load that a test can afford keeps several of them busy."""
TWIN = SimulationOptions(shape=FleetShape(1, 1), sim=SimOptions(speed=SPEED, num_gpu_blocks=2000), start_up_s=5.0)
POLICIES: list[PlannerConfig] = [
    load_options(
        adjustment_interval=10.0,
        decode_kv_scale_up_threshold=0.3,
        decode_kv_scale_down_threshold=0.1,
    ),
    sla_options(ttft_ms=2000.0, itl_ms=70.0, throughput_adjustment_interval_seconds=15.0),
    throughput_load_options(
        optimization_target="sla",
        ttft_ms=2000.0,
        itl_ms=70.0,
        throughput_adjustment_interval_seconds=15.0,
        load_adjustment_interval_seconds=5.0,
        enable_load_scaling=True,
        load_predictor="constant",
    ),
]


def rising_and_falling() -> list[TraceRequest]:
    """A minute of 0.5 requests per second, two of 6, two of 0.3; lengths differ, so that models can learn from them."""
    found, began_s = [], 0.0
    for seconds, rate in ((60.0, 0.5), (120.0, 6.0), (120.0, 0.3)):
        found += [TraceRequest(began_s + n / rate, 1000 + 100 * (n % 11), 80) for n in range(int(seconds * rate))]
        began_s += seconds
    return found


def gpus(run: Run, from_s: float, to_s: float) -> list[int]:
    return [point.gpus_held for point in run.points if from_s <= point.at_s <= to_s]


@pytest.mark.parametrize("planner", POLICIES, ids=lambda options: options.policy)
def test_it_follows_a_load_that_rises_and_falls_and_no_request_is_lost(planner: PlannerConfig) -> None:
    trace = rising_and_falling()
    run = run_case(trace, Case("", TWIN, planner))
    assert all(job.last_s is not None for job in run.jobs)
    busy = max(gpus(run, 60.0, 200.0))
    assert busy > 2
    assert run.points[-1].gpus_held < busy
    assert busy <= 8


def test_a_whole_decision_moves_both_roles_at_once_and_a_swap_waits_for_the_gpu() -> None:
    """From 1P3D to 3P1D on four GPUs: two decode workers drain, and two prefill workers take their GPUs then."""
    twin = options(1, 3, gpus=4, start_up_s=2.0)
    driver = PolicyDriver(Wishing({"prefill": 3, "decode": 1}), 0.0)
    trace = requests(*[(n * 1.0, 100, 20) for n in range(40)])
    run = Simulation(twin, trace, planner=driver, perf=PERF).run()
    assert run.acted[0].done == (DECODE, PREFILL) or set(run.acted[0].done) == {DECODE, PREFILL}
    begun = next(point for point in run.points if point.decode.draining == 2)
    assert begun.prefill.waiting == 2
    assert (run.points[-1].prefill.ready, run.points[-1].decode.ready) == (3, 1)
    assert max(point.gpus_held for point in run.points) == 4
    assert all(job.last_s is not None for job in run.jobs)


def test_a_whole_decision_that_is_refused_changes_nothing() -> None:
    driver = PolicyDriver(Wishing({"prefill": 2, "decode": 9}), 0.0)
    run = Simulation(options(1, 1, gpus=4), requests(*[(n * 1.0, 100, 20) for n in range(30)]), planner=driver).run()
    assert {name for name, _ in run.acted[0].refused} == {DECODE, PREFILL}
    assert (run.points[-1].prefill.ready, run.points[-1].decode.ready) == (1, 1)


def test_windows_of_traffic_count_each_request_once() -> None:
    """Two windows of 10 s: who began in it, and the lengths and times of those who ended in it."""
    seen = []

    class Watching(Wishing):
        def propose(self, state, observation, prediction):  # type: ignore[no-untyped-def]
            seen.append(observation.traffic)
            return super().propose(state, observation, prediction)

    driver = PolicyDriver(Watching({"decode": 1}, need=Needs(traffic_window_s=10.0)), 0.0)
    trace = requests(*[(n * 1.0, 100 + n, 5) for n in range(25)])
    Simulation(options(0, 1), trace, planner=driver, perf=PERF).run()
    assert [traffic.num_req for traffic in seen[:2]] == [10, 10]
    assert [traffic.isl for traffic in seen[:2]] == [pytest.approx(104.5), pytest.approx(114.5)]
    assert seen[0].osl == 5
    assert seen[0].itl_ms == pytest.approx(10.0)
    assert seen[0].kv_hit_rate == pytest.approx(0.0)


def test_passes_are_those_of_the_engines_that_serve_at_most_so_many_of_each() -> None:
    seen = []

    class Watching(Wishing):
        def propose(self, state, observation, prediction):  # type: ignore[no-untyped-def]
            seen.append(observation.engines)
            return super().propose(state, observation, prediction)

    driver = PolicyDriver(Watching({"decode": 1}, need=Needs(passes=True)), 0.0)
    Simulation(
        options(1, 1, conditional=False), requests((0.0, 100, 950), (12.0, 100, 5)), planner=driver, perf=PERF
    ).run()
    first = {engine.component: engine for engine in seen[0].values()}
    assert set(first) == {PREFILL, DECODE}
    decode = first[DECODE].passes
    assert 0 < len(decode) <= 64
    assert [one.counter_id for one in decode] == sorted({one.counter_id for one in decode})
    assert decode[-1].wall_time_s == pytest.approx(0.01)
    assert decode[-1].scheduled.num_decode_requests == 1
    assert first[PREFILL].last.heartbeat
