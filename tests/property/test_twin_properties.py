"""Properties of the simulator over random traces, fleets and planners."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.routing.disagg import DisaggSettings
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.profile.interpolation import FixedModel
from dynamo_local.simulator.options import FleetShape, LeadOptions, SimulationOptions
from dynamo_local.simulator.simulation import Run, Simulation
from dynamo_local.simulator.trace import TraceRequest
from tests.fakes.planner.options import load_options
from tests.fakes.planner.twins import driven
from tests.tools.examples import examples

# Binary fractions of a second, so that arrivals, pulls and starts really fall on the ends of passes.
TICK_S = 1 / 64
PERF = FixedModel(
    prefill_ms_per_token=1000 / 1024, decode_ms=1000 / 64, decode_ms_per_kv_token=1000 / 8192, launch_ms=1000 / 128
)
SIM = SimOptions(
    num_gpu_blocks=12,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=8,
    kv_transfer_latency_s=TICK_S,
    kv_transfer_bytes_per_s=1e30,
    kv_lease_duration_s=20 * TICK_S,
)


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 120), st.integers(1, 36), st.integers(1, 14), st.integers(0, 2)),
            min_size=1,
            max_size=25,
        )
    )
    return [TraceRequest(at * TICK_S, isl, osl, (family,)) for at, isl, osl, family in sorted(rows)]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[SimulationOptions, PlannerConfig | None]:
    """A fleet, and perhaps a planner with thresholds that such small loads cross."""
    prefill = draw(st.integers(0, 2))
    decode = draw(st.integers(1, 3))
    decode_gpus = draw(st.sampled_from([1, 1, 2]))
    twin = SimulationOptions(
        shape=FleetShape(prefill, decode),
        sim=SIM,
        gpus=8,
        decode_gpus=decode_gpus,
        disagg=DisaggSettings(draw(st.sampled_from([0, 10])), draw(st.sampled_from([1, 2, 9]))),
        conditional=draw(st.booleans()),
        prefill_timeout_s=draw(st.sampled_from([10.0, 90.0])) * TICK_S,
        max_inflight=draw(st.sampled_from([4, 50])),
        max_num_waiting=draw(st.sampled_from([2, 50])),
        request_timeout_s=draw(st.sampled_from([30.5, 600.0])) * TICK_S,
        drain_deadline_s=draw(st.sampled_from([15.0, 1000.0])) * TICK_S,
        leads=LeadOptions(
            flip_s=draw(st.sampled_from([0.0, 2.0, 9.0])) * TICK_S,
            wake_s=draw(st.sampled_from([0.0, 3.0])) * TICK_S,
            spare_s=2 * TICK_S,
            cold_s=draw(st.sampled_from([0.0, 6.0, 30.0])) * TICK_S,
            sleep_s=draw(st.sampled_from([0.0, 1.0])) * TICK_S,
        ),
        spares=draw(st.sampled_from([0, 0, 1])),
        flips=decode_gpus == 1 and draw(st.booleans()),
        standby=draw(st.sampled_from([None, None, FleetShape(1, 1)])),
    )
    planner = load_options(
        adjustment_interval=12 * TICK_S,
        metric_pulling_interval=3 * TICK_S,
        max_gpu_budget=draw(st.sampled_from([6, 8])),
        min_gpu_budget=draw(st.sampled_from([1, 2])),
        decode_kv_scale_up_threshold=0.3,
        decode_kv_scale_down_threshold=0.1,
        prefill_queue_scale_up_threshold=0.3,
        prefill_queue_scale_down_threshold=0.1,
    )
    return twin, draw(st.sampled_from([None, planner, planner]))


def simulate(trace: list[TraceRequest], twin: SimulationOptions, planner: PlannerConfig | None) -> Run:
    return Simulation(twin, trace, planner=driven(planner), perf=PERF).run()


def history(run: Run) -> tuple[Any, ...]:
    jobs = [(job.first_s, job.last_s, job.dropped, job.remote, job.tries) for job in run.jobs]
    return jobs, run.points, run.sightings, run.acted, run.end_s, run.passes, run.preemptions


@settings(max_examples=examples(300))
@given(trace=traces(), world=worlds())
def test_passes_advanced_as_one_event_equal_pass_by_pass(
    trace: list[TraceRequest], world: tuple[SimulationOptions, PlannerConfig | None]
) -> None:
    twin, planner = world
    slow = history(simulate(trace, replace(twin, coalesce=False), planner))
    assert history(simulate(trace, twin, planner)) == slow


@settings(max_examples=examples(200))
@given(trace=traces(), world=worlds())
def test_every_request_has_one_end_and_no_gpu_is_made_up(
    trace: list[TraceRequest], world: tuple[SimulationOptions, PlannerConfig | None]
) -> None:
    twin, planner = world
    run = simulate(trace, twin, planner)
    completed = [job for job in run.jobs if job.last_s is not None]
    dropped = [job for job in run.jobs if job.dropped is not None]
    assert len(completed) + len(dropped) == len(trace)
    assert not {job.number for job in completed} & {job.number for job in dropped}
    assert all(job.request.at_s < job.first_s <= job.last_s for job in completed)
    held_at_first = run.points[0].gpus_held
    for point in run.points:
        assert 0 <= point.gpus_held <= twin.gpus
        if planner is None and twin.standby is None:
            assert point.gpus_held == held_at_first
        if planner is None:
            continue
        if twin.standby is None:  # who is started to sleep is not the planner's
            assert point.gpus_held <= max(planner.max_gpu_budget, held_at_first)
        assert point.decode.ready >= 1
        assert twin.shape.prefill == 0 or point.prefill.ready >= 1


@settings(max_examples=examples(50))
@given(trace=traces(), world=worlds())
def test_the_same_run_twice_is_the_same(
    trace: list[TraceRequest], world: tuple[SimulationOptions, PlannerConfig | None]
) -> None:
    assert history(simulate(trace, *world)) == history(simulate(trace, *world))
