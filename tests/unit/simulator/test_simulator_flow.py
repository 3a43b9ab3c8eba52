"""The way of requests and the life of workers in the simulator."""

from __future__ import annotations

import ast
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dynamo_local.engines.sim.engine as process_engine
import dynamo_local.simulator.flow as twin_flow
from dynamo_local.arbiter.planner_report_page import write_report
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.routing.decode_choice import SloPicker
from dynamo_local.core.routing.disagg import DisaggSettings
from dynamo_local.core.routing.estimates import Targets, Timing
from dynamo_local.core.types import Role, WorkerState
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.engines.sim.scheduler import SimScheduler
from dynamo_local.errors import ConfigError
from dynamo_local.planner.records.decision_log import DecisionLog, as_json, describe, read
from dynamo_local.profile.repetitions import quantile
from dynamo_local.simulator.fleet import FleetPoint, RoleCount
from dynamo_local.simulator.metrics import gpu_seconds, measure, spread
from dynamo_local.simulator.options import DECODE, PREFILL, FleetShape, SimulationOptions, Slo
from dynamo_local.simulator.process import Dropped, Job
from dynamo_local.simulator.records import recorded
from dynamo_local.simulator.report import decision_rows
from dynamo_local.simulator.simulation import Case, Run, Simulation, run_case
from dynamo_local.simulator.trace import TraceRequest
from tests.fakes.planner.options import load_options, sla_options
from tests.fakes.planner.twins import PERF, driven, options, requests, run

QUICK = load_options(adjustment_interval=1.0, metric_pulling_interval=0.1)


def test_process_and_twin_run_the_same_engine_class() -> None:
    assert twin_flow.SimScheduler is process_engine.SimScheduler is SimScheduler


def test_process_and_twin_decide_by_the_same_functions() -> None:
    """Routing, the conditional decision, the machine and its shell, the ledger, policy and intervals have no second
    copy."""
    twin = {path.name: ast.parse(path.read_text()) for path in Path(twin_flow.__file__).parent.glob("*.py")}
    imported = {
        alias.name
        for tree in twin.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {
        "decide_prefill",
        "LeastLoaded",
        "FleetController",
        "GpuLedger",
        "policy_of",
        "PolicyDriver",
        "pools_of",
    } <= imported


def test_prompts_queue_for_the_prefill_worker_first_in_first_out() -> None:
    """One prefill worker, three prompts of 100 ms at once: replies 100 ms apart, in the order of arrival."""
    twin = options(1, 1, conditional=False)
    jobs = run(twin, requests(*[(0.0, 1000, 1)] * 3)).jobs
    assert [job.remote for job in jobs] == [True] * 3
    assert [job.first_s for job in jobs] == [pytest.approx(0.1 * n + 0.01) for n in (1, 2, 3)]


def test_the_queue_limit_keeps_prefills_local() -> None:
    """A queue of one entry at most: the first is pulled at once, the second waits there, the third stays local."""
    twin = options(1, 1, disagg=DisaggSettings(10, 1))
    jobs = run(twin, requests((0.0, 1000, 1), (0.06, 1000, 1), (0.07, 1000, 1))).jobs
    assert [job.remote for job in jobs] == [True, True, False]


def test_short_prompts_stay_local() -> None:
    assert not run(options(1, 1), requests((0.0, 10, 2))).jobs[0].remote
    assert run(options(1, 1), requests((0.0, 11, 2))).jobs[0].remote


def test_a_remote_prefill_that_takes_too_long_is_done_locally() -> None:
    twin = options(1, 1, conditional=False, prefill_timeout_s=0.15)
    jobs = run(twin, requests((0.0, 1000, 1), (0.0, 1000, 1))).jobs
    assert jobs[0].first_s == pytest.approx(0.11)
    # Queued until 0.1, given up at 0.15, a whole prefill of 0.1 s.
    assert jobs[1].first_s == pytest.approx(0.25)


def test_a_lease_that_ends_before_the_pull_is_no_error_of_the_client() -> None:
    twin = options(1, 1, conditional=False, sim={"kv_lease_duration_s": 0.2, "num_gpu_blocks": 2, "max_num_seqs": 1})
    jobs = run(twin, requests((0.0, 20, 50), (0.0, 100, 2))).jobs
    assert [job.dropped for job in jobs] == [None, None]
    assert jobs[1].first_s is not None
    assert jobs[1].first_s > jobs[0].last_s


def test_an_overload_queues_until_the_clients_deadline() -> None:
    jobs = run(options(0, 1, request_timeout_s=1.0), requests(*[(0.0, 10, 10)] * 4000)).jobs
    assert {job.dropped for job in jobs} == {None, Dropped.DEADLINE}
    assert [job.dropped for job in jobs[:20]] == [None] * 20


def test_a_request_past_its_deadline_leaves_room_for_others() -> None:
    slow, quick = (0.0, 100, 1000), (2.0, 100, 2)
    for twin in (options(0, 1, request_timeout_s=1.0, sim={"max_num_seqs": 1}), options(1, 1, request_timeout_s=1.0)):
        assert [job.dropped for job in run(twin, requests(slow, quick)).jobs] == [Dropped.DEADLINE, None]
    queued = options(1, 1, conditional=False, request_timeout_s=0.25)
    assert [job.dropped for job in run(queued, requests(*[(0.0, 1000, 1)] * 4)).jobs][2:] == [Dropped.DEADLINE] * 2


def test_a_full_frontend_refuses() -> None:
    jobs = run(options(0, 1, max_inflight=2), requests(*[(0.0, 100, 1)] * 3)).jobs
    assert [job.dropped for job in jobs] == [None, None, Dropped.FRONTEND_FULL]


def test_full_workers_refuse() -> None:
    twin = options(0, 1, max_num_waiting=2, sim={"max_num_seqs": 1})
    jobs = run(twin, requests((0.0, 100, 5), (0.01, 100, 5), (0.01, 100, 5), (0.01, 100, 5))).jobs
    assert [job.dropped for job in jobs] == [None, None, None, Dropped.WORKERS_FULL]


def simulation(prefill: int, decode: int, trace: list, planner: PlannerConfig = QUICK, **more) -> Simulation:
    return Simulation(options(prefill, decode, **more), trace, planner=driven(planner), perf=PERF)


def test_idle_workers_drain_down_to_the_floor_and_requests_go_on() -> None:
    twin = simulation(0, 3, requests((0.5, 100, 100), (0.6, 100, 100), (0.7, 100, 100), (9.0, 10, 1)))
    found = twin.run()
    assert all(job.last_s is not None for job in found.jobs)
    assert found.points[-1].decode.ready == 1
    drained = next(point for point in found.points if point.decode.draining)
    freed = next(point for point in found.points if point.gpus_held == 2)
    assert drained.at_s == pytest.approx(1.0)
    # Its stream of 100 tokens ends at 0.7 + 0.01 + 0.99 s; until then it holds its GPU.
    assert freed.at_s == pytest.approx(1.7, abs=0.01)
    assert [acted.done for acted in found.acted if acted.done] == [("VllmWorker",)] * 2


def test_load_adds_workers_that_serve_after_their_start_up() -> None:
    """Ten prompts a second of 200 ms each: the queue grows, a prefill worker comes, 2 s later it pulls."""
    trace = requests(*[(0.1 * n, 2000, 1) for n in range(100)])
    found = simulation(1, 1, trace, conditional=False, start_up_s=2.0, prefill_timeout_s=99.0).run()
    began = next(point for point in found.points if point.prefill.starting)
    served = next(point for point in found.points if point.prefill.ready == 2)
    assert served.at_s - began.at_s == pytest.approx(2.0)
    assert began.gpus_held == 3
    assert max(point.gpus_held for point in found.points) <= 8


def test_decisions_are_told_in_words_with_what_became_of_them() -> None:
    trace = requests(*[(0.1 * n, 2000, 1) for n in range(30)])
    rows = decision_rows(simulation(1, 1, trace, gpus=2, conditional=False, prefill_timeout_s=99.0).run())
    assert rows[0][0] == "1 s"
    assert rows[0][1].startswith("PrefillWorker +1 (scale_up): the queue ")
    assert rows[0][2].startswith("refused: too few GPUs")


def test_an_up_on_a_host_without_a_free_gpu_is_refused_and_told() -> None:
    trace = requests(*[(0.1 * n, 2000, 1) for n in range(30)])
    found = simulation(1, 1, trace, gpus=2, conditional=False, prefill_timeout_s=99.0).run()
    assert any("too few GPUs" in why for acted in found.acted for _, why in acted.refused)
    assert max(point.gpus_held for point in found.points) == 2


def test_a_drain_is_taken_back_by_the_same_process() -> None:
    trace = requests((0.0, 100, 500), (0.0, 100, 500))
    twin = simulation(0, 2, trace)
    fleet = twin.fleet
    for number, request in enumerate(trace):
        twin.flow.arrive(Job(number, request), 0.0)
    before = fleet.processes["dynamo_VllmWorker_1"]
    assert fleet.scale(DECODE, -1, 0.1, "test").refused is None
    assert fleet.view().workers["dynamo_VllmWorker_1"].state is WorkerState.DRAINING
    assert [process.name for process in fleet.serving(Role.AGGREGATED)] == ["dynamo_VllmWorker"]
    assert fleet.scale(DECODE, 1, 0.2, "test").refused is None
    assert fleet.view().workers["dynamo_VllmWorker_1"].state is WorkerState.READY
    assert fleet.processes["dynamo_VllmWorker_1"] is before
    assert len(fleet.serving(Role.AGGREGATED)) == 2


def test_a_drain_past_its_deadline_cuts_what_streams_and_moves_what_waits() -> None:
    """One of two workers is told to go while it streams and others wait there: the stream is lost, they are not."""
    twin = simulation(
        0, 2, requests((0.0, 100, 900), *[(0.0, 100, 2)] * 5), drain_deadline_s=1.0, sim={"max_num_seqs": 1}
    )
    jobs = twin.run().jobs
    assert sum(job.dropped is not None for job in jobs) <= 1
    assert all(job.ended for job in jobs)


def test_an_entry_that_was_never_ready_is_taken_back() -> None:
    twin = simulation(1, 1, requests((0.0, 10, 1)))
    fleet = twin.fleet
    fleet.scale(PREFILL, 1, 0.0, "test")
    assert fleet.view().workers["dynamo_PrefillWorker_1"].state is WorkerState.STARTING
    fleet.scale(PREFILL, -1, 1.0, "test")
    assert "dynamo_PrefillWorker_1" not in fleet.view().workers
    assert fleet.points[-1].gpus_held == 2


@pytest.mark.parametrize(
    ("shape", "more", "words"),
    [
        ((5, 5), {}, "needs 10 GPUs, and there are 8"),
        ((1, 0), {}, "needs one decode worker or more"),
        ((1, 1), {"sim": {"block_size": 48}}, "does not divide 512"),
    ],
)
def test_shapes_that_cannot_be_are_refused(shape: tuple[int, int], more: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options(*shape, **more)


# --- simulator dispatch
# Dispatch under targets in the simulator: the real functions, and their worth where prefill is at its limit.

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


# --- simulator metrics
# Metrics of small runs that can be added up by hand.


def test_one_request_on_an_aggregated_worker() -> None:
    """100 tokens of prompt take 10 ms, the two tokens after the first 10 ms each: done after 30 ms on one GPU."""
    found = measure(run(options(0, 1), requests((0.0, 100, 3))), Slo())
    assert (found.requests, found.completed, found.dropped) == (1, 1, 0)
    assert found.ttft_ms.mean == pytest.approx(10.0)
    assert found.itl_ms.p99 == pytest.approx(10.0)
    assert found.duration_s == pytest.approx(0.03)
    assert found.goodput_rps == pytest.approx(1 / 0.03)
    assert found.gpu_hours == pytest.approx(0.03 / 3600)
    assert (found.scale_actions, found.remote_prefills, found.output_tokens) == (0, 0, 3)


def test_one_request_through_a_prefill_worker() -> None:
    """Prefill there (10 ms), a hand-over of 5 ms, one decode pass for the last prompt token: first token at 25 ms."""
    twin = options(1, 1, sim={"kv_transfer_latency_s": 0.005})
    found = measure(run(twin, requests((0.0, 100, 3))), Slo())
    assert found.ttft_ms.mean == pytest.approx(25.0)
    assert found.itl_ms.mean == pytest.approx(10.0)
    assert found.duration_s == pytest.approx(0.045)
    assert found.gpu_hours == pytest.approx(2 * 0.045 / 3600)
    assert found.remote_prefills == 1


def test_attainment_is_a_share_of_all_requests_dropped_ones_too() -> None:
    """One in time, one late because it waits its turn, one that fits no model: a third."""
    twin = options(0, 1, sim={"max_num_seqs": 1, "max_model_len": 500})
    run_ = run(twin, requests((0.0, 100, 3), (0.0, 100, 3), (0.0, 499, 2)))
    found = measure(run_, Slo(ttft_ms=20.0))
    assert (found.completed, found.dropped) == (2, 1)
    assert run_.jobs[2].dropped == "longer than max_model_len"
    assert found.attainment == pytest.approx(1 / 3)
    assert found.goodput_rps == pytest.approx(1 / found.duration_s)


def test_attainment_needs_both_targets_of_the_request_itself() -> None:
    """Each request's own mean gap counts; a request of one token has none, and so holds any ITL target."""
    trace = requests((0.0, 100, 11), (0.05, 500, 2), (1.0, 100, 1))
    run_ = run(options(0, 1), trace)
    gaps_ms = [None if job.itl_s is None else job.itl_s * 1000 for job in run_.jobs]
    # The second's prompt (50 ms) shares a pass with a token of the first: ten gaps of 10 ms and 50 more.
    assert gaps_ms == [pytest.approx(15.0), pytest.approx(10.0), None]
    assert measure(run_, Slo(itl_ms=12.0)).attainment == pytest.approx(2 / 3)
    assert measure(run_, Slo(itl_ms=15.1)).attainment == 1.0
    assert measure(run_, Slo(ttft_ms=9.0, itl_ms=99.0)).attainment == 0.0
    assert measure(run_, Slo()).attainment == 1.0


def test_gpu_seconds_count_from_the_first_arrival_to_the_last_completion() -> None:
    none = RoleCount()
    points = [FleetPoint(at_s, none, none, held) for at_s, held in ((0.0, 2), (10.0, 5), (15.0, 3), (50.0, 8))]
    assert gpu_seconds(points, 20.0) == 10 * 2 + 5 * 5 + 5 * 3
    assert gpu_seconds(points, 12.0) == 10 * 2 + 2 * 5
    assert gpu_seconds([], 12.0) == 0.0


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [quantile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50.0, 95.0, 99.0, 100.0]
    assert quantile([3.0], 0.5) == 3.0
    found = spread([4.0, 1.0, 2.0])
    assert (found.mean, found.p50, found.p99) == (pytest.approx(7 / 3), 2.0, 4.0)
    assert spread([]).mean is None


# --- simulator records
# A simulated run's decisions as a log: they can be told, and reported, as those of a real one.

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
