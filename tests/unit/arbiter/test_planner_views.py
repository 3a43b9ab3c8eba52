"""TensorBoard and Prometheus as the planner's observers: each reading and decision arrives once, acted upon or not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dynamo_local.arbiter import tensorboard
from dynamo_local.arbiter.planner_metrics import PlannerMetrics, PlannerNow
from dynamo_local.arbiter.tensorboard import Board
from dynamo_local.core.types import Load, Missing
from dynamo_local.errors import ConfigError
from dynamo_local.planner.collector import LoopLatency
from dynamo_local.planner.loop import Counts, PlannerState
from dynamo_local.planner.records.decision_log import DecisionRecord, Inputs, Outcome, StepOutcome
from dynamo_local.planner.values import Decision, Observation, Pool, Reading, Reason, Rule, WorkerPools
from tests.fakes.arbiter.hand_clock import HandClock
from tests.tools.event_files import named, read_points
from tests.tools.scraped import by_label, samples

FLEET = WorkerPools(Pool("PrefillWorker", 1, ready=1, gpus_held=1), Pool("VllmWorker", 1, ready=1, gpus_held=1))


def _record(at_s: float, outcome: Outcome, *reasons: Reason) -> DecisionRecord:
    decision = Decision(at_s, {}, reasons, at_s + 30.0)
    inputs = Inputs(at_s - 30.0, 30, 0.0, 0.5, 0.0, FLEET)
    outcomes = {reason.component: StepOutcome(outcome) for reason in reasons if reason.step}
    return DecisionRecord(1.8e9 + at_s, "planner:1", inputs, decision, outcomes)


UP = Reason("VllmWorker", 1, Rule.SCALE_UP, {})
HOLD = Reason("PrefillWorker", 0, Rule.MISSING, {})


async def test_readings_and_actions_are_written_by_the_second_since_the_start(tmp_path: Path) -> None:
    clock = HandClock()
    board = Board(tmp_path, tmp_path, clock, pytest.fail)
    await board.open(Path("tb"))
    for second, queue in ((1, 3), (2, Missing("nats timeout")), (3, 5)):
        clock.at_s = 50.0 + second
        board.on_observation(Observation(Reading(clock.at_s, queue, {"w": Load(gpu_cache_usage_perc=0.5)}), FLEET))
    board.on_decision(_record(53.0, Outcome.NO_OPERATION, UP, HOLD))
    await board.close()
    points = read_points(tmp_path / "tb")
    assert named(points, "prefill_queue_size") == [(1, 3.0), (3, 5.0)]
    assert named(points, "average_kv_load") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert named(points, "decode_scaling_action") == [(3, 1.0)]  # although nothing acts on it
    assert named(points, "prefill_scaling_action") == [(3, 0.0)]
    assert {point.wall_s for point in points if point.step == 3} == {1.8e9 + 53.0}


async def test_a_board_that_is_not_open_takes_nothing_and_one_that_is_opened_again_begins_anew(tmp_path: Path) -> None:
    clock = HandClock()
    board = Board(tmp_path, tmp_path, clock, pytest.fail)
    board.on_observation(Observation(Reading(1.0, 0, {}), FLEET))
    for folder in ("one", "two"):
        await board.open(Path(folder))
        await board.open(Path(folder))  # other options were changed
        clock.at_s += 7.0
        board.on_observation(Observation(Reading(clock.at_s, 0, {}), FLEET))
        await board.close()
        assert board.folder is None
    assert named(read_points(tmp_path / "one"), "num_gpu") == [(7, 2.0)]
    assert named(read_points(tmp_path / "two"), "num_gpu") == [(7, 2.0)]


async def test_a_default_folder_that_cannot_be_written_is_told_and_no_reason_not_to_plan(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file is in its place")
    told: list[str] = []
    board = Board(tmp_path, tmp_path, HandClock(), told.append)
    await board.open(None)
    assert board.folder is None
    assert "no TensorBoard scalars" in told[0]
    with pytest.raises(ConfigError, match="log_dir"):  # one that was asked for is a reason
        await board.open(Path("tensorboard/mine"))


async def test_without_the_extra_a_log_dir_says_so_and_the_planner_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "available", lambda: False)
    said: list[str] = []
    board = Board(tmp_path, tmp_path, HandClock(), said.append)
    await board.open(None)
    assert said == []
    await board.open(Path("tb"))
    assert list(tmp_path.iterdir()) == []
    assert "extra `tensorboard`" in said[0]


def test_decisions_are_counted_by_rule_and_actions_by_what_came_of_them() -> None:
    metrics = PlannerMetrics(CollectorRegistry())
    metrics.on_decision(_record(30.0, Outcome.COMMITTED, UP, HOLD))
    metrics.on_decision(_record(60.0, Outcome.REFUSED, UP, HOLD))
    metrics.on_decision(_record(90.0, Outcome.COMMITTED, Reason("PrefillWorker", -1, Rule.SCALE_DOWN, {})))
    found = samples(generate_latest(metrics.registry).decode())
    assert by_label(found, "dynamo_planner_decisions_total") == {
        ("VllmWorker", "scale_up"): 2,
        ("PrefillWorker", "missing"): 2,
        ("PrefillWorker", "scale_down"): 1,
    }
    assert by_label(found, "dynamo_planner_scale_actions_total") == {
        ("VllmWorker", "up", "committed"): 1,
        ("VllmWorker", "up", "refused"): 1,
        ("PrefillWorker", "down", "committed"): 1,
    }


def test_state_ticks_and_lag_are_those_of_the_loop() -> None:
    counts = Counts(pulls=4, failed_ticks=1, lag_s=0.2)
    metrics = PlannerMetrics(CollectorRegistry(), lambda: PlannerNow(PlannerState.PAUSED, counts, dropped=9))
    metrics.on_observation(Observation(Reading(1.0, None, {}), FLEET))
    found = samples(generate_latest(metrics.registry).decode())
    assert by_label(found, "dynamo_planner_state") == {("paused",): 1.0}
    assert found["dynamo_planner_ticks_total", ()] == 4
    assert found["dynamo_planner_failed_ticks_total", ()] == 1
    assert found["dynamo_planner_tensorboard_dropped_points_total", ()] == 9
    assert found["dynamo_planner_tick_lag_seconds_sum", ()] == 0.2
    assert found["dynamo_planner_tick_lag_seconds_count", ()] == 1


async def test_the_longest_steps_are_told_by_work_and_clock() -> None:
    counts = Counts(latency=LoopLatency(iter((1.0, 1.5, 2.0, 2.125)).__next__, iter((2.0, 2.25, 3.0, 3.125)).__next__))
    await counts.latency.timed("tick", asyncio.sleep(0, None))
    metrics = PlannerMetrics(CollectorRegistry(), lambda: PlannerNow(PlannerState.RUNNING, counts))
    found = samples(generate_latest(metrics.registry).decode())
    assert by_label(found, "dynamo_planner_loop_held_max_seconds") == {("wall", "tick"): 0.5, ("cpu", "tick"): 0.25}
