"""The arbiter begins `slo` with a past: its history file, or what the tick log has of the planner before."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Load
from dynamo_local.errors import ConfigError
from dynamo_local.planner.policies.slo.policy import SloPolicy
from dynamo_local.planner.policies.slo.scaling_options import START_UP_S
from dynamo_local.planner.policies.slo.warm_start import WarmStart
from dynamo_local.planner.records.ticks import TickLog, tick_log_path, tick_record
from dynamo_local.planner.scaling_times import ScalingTimes
from dynamo_local.planner.values import Ended, Observation, Reading, Requests
from tests.fakes.planner.observations import worker_pools
from tests.fakes.planner.planned_arbiter import Arbiter

SLO = PlannerConfig(policy="slo", ttft_ms=500, itl_ms=20)
COUNT = 60


def recorded(arbiter: Arbiter) -> Path:
    """The tick log of a planner that saw a request a second for a minute."""
    path = tick_log_path(arbiter.folder)
    ticks = []
    for since_s in range(0, COUNT, 5):
        at_s = since_s + 5.0
        ended = tuple(Ended(at_s, 1000, 10, ttft_s=0.1, itl_s=0.01) for _ in range(5))
        reading = Reading(at_s, 0, {"w": Load()})
        seen = Observation(reading, worker_pools(1, 1), requests=Requests(float(since_s), at_s, (), ended))
        ticks.append(tick_record(seen, None))
    TickLog(path).append(ticks)
    return path


async def history_of(
    arbiter: Arbiter, options: PlannerConfig = SLO, before: PlannerConfig | None = None
) -> WarmStart | None:
    """With `before`: of a planner that runs with these."""
    if before is not None:
        arbiter.planning = arbiter.made(before)
    policy = await arbiter.planning.prepared(options, begins=before is None)
    assert isinstance(policy, SloPolicy)
    return policy.history


async def test_after_a_restart_it_begins_with_the_tick_log(arbiter: Arbiter) -> None:
    assert await history_of(arbiter) is None
    recorded(arbiter)
    past = await history_of(arbiter)
    assert past is not None
    assert past.rate == pytest.approx(1.0, rel=0.2)
    assert past.gpus == (1, 1)


@pytest.mark.parametrize("change", [{"policy": "load"}, {"ttft_ms": 250}, {"itl_ms": 50}])
async def test_other_targets_judge_the_tick_log_anew(arbiter: Arbiter, change: dict[str, Any]) -> None:
    recorded(arbiter)
    assert await history_of(arbiter, before=SLO.model_copy(update=change)) is not None


async def test_other_options_read_no_history(arbiter: Arbiter, tmp_path: Path) -> None:
    """Its file may be gone by now."""
    recorded(arbiter)
    with_file = SLO.model_copy(update={"history": tmp_path / "gone.jsonl"})
    for before in (SLO, with_file):
        assert await history_of(arbiter, before.model_copy(update={"max_gpu_budget": 4}), before) is None


async def test_a_planner_that_goes_on_knows_what_was_recorded_before_its_pause(
    arbiter: Arbiter, caplog: pytest.LogCaptureFixture
) -> None:
    await arbiter.planning.start({"policy": "slo", "ttft": 500, "itl": 20})
    await arbiter.planning.pause()
    recorded(arbiter)
    with caplog.at_level(logging.INFO, logger="dynamo_local"):
        await arbiter.planning.resume()
    assert f"the planner begins with {COUNT} requests" in caplog.text


async def test_a_history_file_goes_before_the_tick_log(arbiter: Arbiter, tmp_path: Path) -> None:
    recorded(arbiter)
    file = tmp_path / "trace.jsonl"
    rows = ({"timestamp": 100 * n, "input_length": 1000, "output_length": 10} for n in range(600))
    file.write_text("\n".join(map(json.dumps, rows)))
    past = await history_of(arbiter, SLO.model_copy(update={"history": file}))
    assert past is not None
    assert past.rate == pytest.approx(10.0, rel=0.1)


@pytest.mark.parametrize("change", [{}, {"ttft_ms": 250}], ids=["resume", "set"])
async def test_a_planner_that_goes_on_knows_its_own_run_and_not_the_file(
    arbiter: Arbiter, tmp_path: Path, change: dict[str, Any]
) -> None:
    """The file is yesterday's, and may be gone."""
    recorded(arbiter)
    options = SLO.model_copy(update={"history": tmp_path / "gone.jsonl"})
    arbiter.planning = arbiter.made(options)
    policy = await arbiter.planning.prepared(options.model_copy(update=change), begins=not change, goes_on=True)
    assert isinstance(policy, SloPolicy)
    assert policy.history is not None
    assert policy.history.rate == pytest.approx(1.0, rel=0.2)


async def test_a_history_that_is_no_trace_is_refused_and_nothing_starts(arbiter: Arbiter, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(b"PK\x03\x04\n\x00\n")
    with pytest.raises(ConfigError, match=r"Planner: history: .*trace.jsonl, line 1: this is no JSON"):
        await arbiter.planning.start({"policy": "slo", "ttft": 500, "itl": 20, "history": str(file)})
    assert arbiter.planning.status()["state"] == "stopped"


async def test_one_warning_counts_damaged_lines_and_names_the_first(
    arbiter: Arbiter, caplog: pytest.LogCaptureFixture
) -> None:
    path = recorded(arbiter)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], "{", lines[3].replace('"pull":"', '"pull":"?'), *lines[4:], ""]))
    with caplog.at_level(logging.WARNING):
        assert await history_of(arbiter) is not None
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("the planner's recorded requests: 2 lines are skipped. The first is ")
    assert f"{path}, line 5: record 4 of the log of ticks cannot be read" in told


async def test_the_measured_start_up_is_the_lead(arbiter: Arbiter) -> None:
    policy = await arbiter.planning.prepared(SLO)
    assert isinstance(policy, SloPolicy)
    assert policy.start_up_s == START_UP_S
    known = {"PrefillWorker": 70.0, "VllmWorker": 90.0}
    arbiter.planning = arbiter.made(SLO, times=ScalingTimes(lambda: 0.0, known=known.get))
    policy = await arbiter.planning.prepared(SLO)
    assert isinstance(policy, SloPolicy)
    assert policy.start_up_s == 90.0
