"""Flips and standby in the simulator: what they take, who serves meanwhile, and what they spare."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.core.types import Actuator
from dynamo_local.errors import ConfigError
from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.values import WorkerPools
from dynamo_local.simulator.options import DECODE, PREFILL, FleetShape, LeadOptions, SimulationOptions
from dynamo_local.simulator.simulation import Run, Simulation
from tests.fakes.planner.options import load_options
from tests.fakes.planner.twins import PERF, options, requests
from tests.fakes.planner.wishing import Wishing

LEADS = LeadOptions(flip_s=0.5, wake_s=2.0, cold_s=30.0, sleep_s=0.25)


def played(twin: SimulationOptions, targets: dict[str, int], *, output: int = 20, count: int = 40) -> Run:
    """A request each second; the planner wishes at 10 s, and again every ten."""
    trace = requests(*[(n * 1.0, 100, output) for n in range(count)])
    return Simulation(twin, trace, planner=PolicyDriver(Wishing(targets), 0.0), perf=PERF).run()


def ready_at(run: Run, prefill: int, decode: int) -> float:
    """When so many of each served for the first time."""
    return next(p.at_s for p in run.points if (p.prefill.ready, p.decode.ready) == (prefill, decode))


def test_a_swap_by_flips_takes_a_flip_and_no_start() -> None:
    run = played(options(1, 3, gpus=4, leads=LEADS, flips=True), {"prefill": 3, "decode": 1})
    assert ready_at(run, 3, 1) == 10.5
    assert run.done_by == {"flips": 2}
    assert {point.gpus_held for point in run.points} == {4}
    assert set(run.acted[0].done) == {PREFILL, DECODE}
    assert all(job.last_s is not None for job in run.jobs)


def test_streams_run_on_where_they_began_and_the_flipped_one_pulls_at_once() -> None:
    twin = options(1, 2, gpus=3, leads=LEADS, flips=True, conditional=False)
    run = played(twin, {"prefill": 2, "decode": 1}, output=600, count=20)
    assert ready_at(run, 2, 1) == 10.5
    assert run.done_by == {"flips": 1}
    assert [job.tries for job in run.jobs] == [1] * 20
    assert all(job.last_s is not None and job.remote for job in run.jobs)


def test_a_prefill_worker_that_flips_decodes() -> None:
    twin = options(2, 1, gpus=3, leads=LEADS, flips=True, conditional=False)
    run = played(twin, {"prefill": 1, "decode": 2}, count=60)
    assert ready_at(run, 1, 2) == 10.5
    by_worker = {job.number for job in run.jobs if job.last_s is not None}
    assert by_worker == set(range(60))


def test_one_more_is_woken_and_one_less_sleeps() -> None:
    twin = options(0, 1, gpus=2, leads=LEADS, standby=FleetShape(0, 1))

    class UpAndDown(Wishing):
        def settle(self, state: Any, observation: Any, targets: Any) -> Any:
            wanted = 2 if observation.at_s < 25 else 1
            return Wishing({"decode": wanted}).settle(state, observation, targets[:0] or _only(wanted))

    trace = requests(*[(n * 1.0, 100, 20) for n in range(60)])
    run = Simulation(twin, trace, planner=PolicyDriver(UpAndDown({"decode": 1}), 0.0), perf=PERF).run()
    assert ready_at(run, 0, 2) == 12.0
    assert {kind: run.done_by[kind] for kind in ("wakes", "sleeps")} == {"wakes": 1, "sleeps": 1}
    assert "starts" not in run.done_by
    assert run.points[-1].gpus_held == 1
    assert all(job.last_s is not None for job in run.jobs)


def _only(wanted: int) -> Any:
    from dynamo_local.planner.values import ComponentTarget

    return (ComponentTarget("decode", wanted),)


def test_the_load_planner_flips_at_once_where_a_gpu_would_have_to_be_freed_first() -> None:
    """On a full host the up waited for the drain; it counts on the flip, without knowing of it."""
    planner = load_options(
        adjustment_interval=5.0,
        max_gpu_budget=4,
        decode_kv_scale_up_threshold=0.9,
        decode_kv_scale_down_threshold=0.5,
        prefill_queue_scale_up_threshold=0.05,
        prefill_queue_scale_down_threshold=0.01,
    )
    trace = requests(*[(n * 0.02, 1000, 2) for n in range(1500)])

    def first_prefill(flips: bool) -> float:
        from tests.fakes.planner.twins import driven

        twin = options(1, 3, gpus=4, leads=LEADS, flips=flips, conditional=False)
        run = Simulation(twin, trace, planner=driven(planner), perf=PERF).run()
        assert all(job.last_s is not None for job in run.jobs)
        assert bool(run.done_by.get("flips")) is flips
        return next(point.at_s for point in run.points if point.prefill.ready == 2)

    with_flips, without = first_prefill(True), first_prefill(False)
    assert with_flips + 25 < without


def test_a_planner_is_told_what_there_is_and_how_long_it_takes() -> None:
    seen: list[WorkerPools] = []

    class Watching(Wishing):
        def propose(self, state: Any, observation: Any, prediction: Any) -> Any:
            seen.append(observation.pools)
            return super().propose(state, observation, prediction)

    twin = options(2, 2, gpus=6, leads=LEADS, flips=True, standby=FleetShape(0, 1))
    driver = PolicyDriver(Watching({"prefill": 2, "decode": 2}), 0.0)
    Simulation(twin, requests(*[(n * 1.0, 100, 5) for n in range(15)]), planner=driver, perf=PERF).run()
    pools = seen[0]
    assert pools.prefill is not None
    assert (pools.prefill.flippable, pools.decode.flippable) == (1, 1)
    assert (pools.prefill.asleep, pools.decode.asleep) == (0, 1)
    assert pools.decode.lead_times == {"flip_to_decode": 0.5, "wake_1": 2.0, "cold": 30.0}
    assert pools.decode.start_up_s == 30.0


def test_what_is_configured_may_be_used() -> None:
    assert options(1, 1).actuators == frozenset()
    assert options(1, 1, flips=True).actuators == {Actuator.FLIP}
    assert options(0, 1, flips=True, standby=FleetShape(0, 1)).actuators == {Actuator.WAKE}
    with pytest.raises(ConfigError, match="role"):
        options(1, 1, flips=True, decode_gpus=2)
