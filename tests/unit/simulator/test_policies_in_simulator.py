"""Every policy in the simulator: it follows a load that rises and falls, whole decisions included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_local.cli.simulate import leads_of
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Actuator
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.errors import BadInput, ConfigError
from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.values import Needs, WorkerPools
from dynamo_local.simulator.fleet import VirtualFleet
from dynamo_local.simulator.options import DECODE, PREFILL, FleetShape, LeadOptions, SimulationOptions
from dynamo_local.simulator.process import Agenda, What
from dynamo_local.simulator.simulation import Case, Run, Simulation, run_case
from dynamo_local.simulator.trace import TraceRequest
from dynamo_local.state.leads import LeadFile
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


# --- simulator actuators
# Flips and standby in the simulator: what they take, who serves meanwhile, and what they spare.

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


# --- simulator spares
# Spares and leads in the simulator.


def starts(options: SimulationOptions, *at_s: float) -> list[float]:
    """When each of the workers that are asked for at these times is ready, from then on."""
    agenda = Agenda()
    fleet = VirtualFleet(options, agenda, lambda *about: None, 0.0)  # type: ignore[arg-type, return-value]
    for n, asked_s in enumerate(at_s):
        assert not fleet.scale(DECODE, 1, asked_s, f"test:{n}").refused
    found = []
    while agenda.next_at_s is not None:
        ready_s, what, _ = agenda.pop()
        if what == What.STARTED:
            found.append(ready_s)
    return sorted(found)


def test_a_spare_starts_a_worker_sooner_and_the_next_one_takes_a_cold_start_to_come() -> None:
    options = SimulationOptions(FleetShape(0, 1), spares=1, leads=LeadOptions(spare_s=2.0, cold_s=30.0))
    assert starts(options, 0.0, 1.0, 31.0, 33.0) == [2.0, 31.0, 35.0, 61.0]


def test_without_spares_a_start_takes_the_start_up() -> None:
    assert starts(SimulationOptions(FleetShape(0, 1), start_up_s=7.0), 0.0, 1.0) == [7.0, 8.0]


def test_leads_are_given_by_name() -> None:
    assert leads_of(["flip=0.2,cold=45"], 30.0) == LeadOptions(flip_s=0.2, cold_s=45.0)
    assert leads_of([], 12.0) == LeadOptions(cold_s=12.0)


@pytest.mark.parametrize("text", ["slow=1", "cold=x", "cold=-1", "cold=inf", "cold=nan", "cold"])
def test_a_lead_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="--lead"):
        leads_of([text], 30.0)


def test_measured_leads_are_the_medians_of_the_slowest_component(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    file = LeadFile(tmp_path)
    with pytest.raises(BadInput, match="nothing was measured"):
        leads_of(["measured"], 30.0)
    for component, rung, *samples in (("VllmWorker", "cold", 20.0, 22.0, 90.0), ("PrefillWorker", "cold", 18.0)):
        for seconds in samples:
            file.add("dynamo", component, "vllm:/m:1", rung, seconds)
    file.add("dynamo", "VllmWorker", "vllm:/m:1", "spare", 2.5)
    file.add("dynamo", "Frontend", "sim:sim-tiny:0", "cold", 400.0)
    assert leads_of(["measured"], 30.0) == LeadOptions(cold_s=22.0, spare_s=2.5)
    assert leads_of(["cold=9", "measured", "wake=1"], 30.0) == LeadOptions(cold_s=9.0, spare_s=2.5, wake_s=1.0)
    with pytest.raises(BadInput, match="other"):
        leads_of(["measured:other"], 30.0)
