"""Requests from before the start are judged as the planner's own past, and hold workers from the first decision on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.errors import ConfigError
from dynamo_local.planner.choosing import history_of, policy_of
from dynamo_local.planner.policies.slo.hindsight import HOLDS_S, JUDGED_MIN, Hindsight
from dynamo_local.planner.policies.slo.policy import SloPolicy
from dynamo_local.planner.policies.slo.warm_start import HISTORY_REQUESTS, Request, WarmStart, stretches, warmed
from dynamo_local.planner.queueing import Engine, EngineOptions
from dynamo_local.planner.queueing_task import passes_of
from dynamo_local.planner.records.ticks import RECORDED_S, recorded_requests, tick_record
from dynamo_local.planner.values import Ended, Observation, Pool, Reading, Requests, WorkerPools
from dynamo_local.profile.reading import DEFAULT_PROFILE
from dynamo_local.system.json_lines import JsonLog, Skipped

BIN_S = 5.0
GPU_PRICE = 0.2
"""Requests that a GPU must save per interval."""


def bursts(lull_s: float, hours: float = 0.5) -> list[Request]:
    """One request per second, and forty per second in bursts of one minute."""
    found, at_s = list[Request](), 0.0
    while at_s < hours * 3600:
        bursting = at_s % (60.0 + lull_s) < 60.0
        found.append((at_s, 3000, 20))
        at_s += 0.025 if bursting else 1.0
    return found


def begun(requests: list[Request], workers_max: int = 4) -> WarmStart:
    """The warm start by these requests."""
    engine = Engine(passes_of(DEFAULT_PROFILE), EngineOptions())
    found = warmed(requests, engine, 0.5, 0.05, workers_max, lead_s=30.0, gpus=(1, 1), bin_s=BIN_S)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def short_lulls() -> Hindsight:
    return begun(bursts(60.0)).past


def held(past: Hindsight, price: float = GPU_PRICE, now_s: float = 1000.0) -> int:
    """Prefill workers that are held at the first decision, where the rule wants one."""
    return past.begun(now_s).held((1, 1), price, (1, 1), 1.0, now_s)[0]


def test_the_workers_of_bursts_with_short_lulls_are_held_from_the_first_decision_on(short_lulls: Hindsight) -> None:
    assert short_lulls.requests > JUDGED_MIN
    assert held(short_lulls) >= 2


def test_after_a_long_lull_the_workers_of_the_last_burst_are_gone(short_lulls: Hindsight) -> None:
    past = begun([*bursts(1200.0, 1.0), (3600.0 + 1100.0, 3000, 20)]).past
    assert held(past, 5.0) == 1 < held(short_lulls, 5.0)


def test_its_clock_ends_at_the_beginning_of_the_plan(short_lulls: Hindsight) -> None:
    past = short_lulls.begun(500.0)
    assert past.record.judged_until_s == 500.0
    assert past.roles[0].wanted.max() <= 500.0
    assert past.stretches == (), "explain counts what this run has held"


def test_another_number_of_workers_keeps_the_ranks_that_both_have(short_lulls: Hindsight) -> None:
    past = short_lulls
    fewer, more = past.resized(2), past.resized(9)
    assert (fewer.workers_max, more.workers_max) == (2, 9)
    assert (fewer.roles[0].saved == past.roles[0].saved[:2]).all()
    assert (more.roles[0].saved[:4] == past.roles[0].saved).all()
    assert fewer.roles[0].there.shape == (2, len(HOLDS_S))


def test_a_long_history_is_thinned_and_keeps_its_end() -> None:
    came = [(n / 4, 100, 10) for n in range(4 * 86_400)]
    found = stretches(came, 0.0, 86_400.0, BIN_S, 120.0)
    assert sum(len(each.times) for each in found) <= 1.1 * HISTORY_REQUESTS
    last = found[-1]
    assert last.times[-1] == pytest.approx(last.judged_from_s + last.bins * BIN_S, abs=1.0)


# --- the option


def options(**given: Any) -> PlannerConfig:
    return PlannerConfig(policy="slo", **given)


def trace(file: Path, requests: list[Request]) -> Path:
    rows = ({"timestamp": 1000 * at_s, "input_length": isl, "output_length": osl} for at_s, isl, osl in requests)
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_the_policy_begins_with_the_history_of_a_file(tmp_path: Path) -> None:
    policy = policy_of(options(history=trace(tmp_path / "t.jsonl", bursts(60.0, 0.1))))
    assert isinstance(policy, SloPolicy)
    state = policy.first(100.0)
    assert state.past is not None
    assert state.past.requests > JUDGED_MIN
    assert state.means.rate > 1.0


def test_other_targets_take_the_past_that_was_judged_by_them(tmp_path: Path) -> None:
    file = trace(tmp_path / "t.jsonl", bursts(60.0, 0.1))
    before, after = (policy_of(options(history=file, ttft_ms=ttft_ms)) for ttft_ms in (500.0, 50.0))
    assert isinstance(before, SloPolicy)
    assert isinstance(after, SloPolicy)
    state = before.first(100.0)
    changed, same = after.taking_over(state), replace(before, history=None).taking_over(state)
    assert changed.past is not None
    assert changed.past.record.judged_until_s == state.began_s
    assert state.past is not None
    assert changed.past.hopeless > state.past.hopeless, "of 50 ms nobody has a first token"
    assert same.past is state.past


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    with pytest.raises(ConfigError, match=r"Planner: history: .*no file"):
        history_of(options(history=file))
    file.write_text('{"timestamp": 0}')
    with pytest.raises(ConfigError, match=r"history: .*line 1: input_length is missing.*; no other line of"):
        history_of(options(history=file))
    file.write_bytes(b"\x00\xff\n[1]\n" + b"[" * 100_000)
    with pytest.raises(ConfigError, match=r"line 1: this is no JSON.*; no other line of"):
        history_of(options(history=file))
    file.write_text("")
    with pytest.raises(ConfigError, match="holds no request"):
        history_of(options(history=file))


def test_damaged_lines_of_a_file_are_skipped_and_counted_in_one_warning(tmp_path: Path) -> None:
    file = trace(tmp_path / "t.jsonl", [(1.0, 100, 10), (2.0, 100, 10)])
    good, other = file.read_text().split("\n")
    bad = ("{", '{"timestamp": 1e300, "input_length": 1, "output_length": 1}', '{"schema": "dynamo.request.trace.v1"}')
    file.write_text("\n".join([good, *bad, "", other]))
    requests, warning = history_of(options(history=file))
    assert [each[0] for each in requests] == [1.0, 2.0]
    assert warning is not None
    assert warning.startswith(f"Planner: history: {file}: 3 lines are skipped. The first is {file}, line 2: this is no")


def test_files_of_two_formats_have_no_common_clock(tmp_path: Path) -> None:
    trace(tmp_path / "a.jsonl", [(1.0, 100, 10)])
    (tmp_path / "b.jsonl").write_text('{"schema": "dynamo.request.trace.v1", "event_type": "request_start"}')
    with pytest.raises(ConfigError, match="a history has one format"):
        history_of(options(history=tmp_path))


def test_only_slo_takes_it() -> None:
    with pytest.raises(ValueError, match="history is an option of the policy slo"):
        PlannerConfig(policy="load", history="t.jsonl")


# --- the tick log


class Log(JsonLog):
    what = "tick"
    kinds = ()


def seen(since_s: float, at_s: float, *began_s: float) -> Observation:
    ended = tuple(Ended(each + 2.0, 100, 11, ttft_s=1.0, itl_s=0.1) for each in began_s)
    pools = WorkerPools(None, Pool("decode", 1, 1), pending=False)
    return Observation(Reading(at_s, None, {}), pools, requests=Requests(since_s, at_s, (), ended))


def tick(since_s: float, *began_s: float) -> dict[str, Any]:
    return tick_record(seen(since_s, since_s + 5.0, *began_s), decision=None)


def test_recorded_requests_are_those_of_the_log_without_the_time_between_two_planners(tmp_path: Path) -> None:
    path, skipped = tmp_path / "ticks.jsonl", Skipped()
    assert recorded_requests(path, skipped) == []
    Log(path).append([tick(0.0, 1.0), tick(5.0, 6.0), tick(900.0, 901.0), tick(2.0, 3.0)])
    found = recorded_requests(path, skipped)
    assert [each[0] for each in found] == [-19.0, -14.0, -9.0, -4.0]
    assert found[0][1:] == (100, 11)
    assert skipped.warning("the log") is None


def test_of_a_long_log_the_last_hours_count(tmp_path: Path) -> None:
    path = tmp_path / "ticks.jsonl"
    Log(path).append([tick(0.0, 1.0), tick_record(seen(10.0, 10.0 + RECORDED_S, 12.0), decision=None)])
    assert len(recorded_requests(path, Skipped())) == 1


def test_damaged_records_are_skipped_and_named_by_file_and_line(tmp_path: Path) -> None:
    path, skipped = tmp_path / "ticks.jsonl", Skipped()
    endless = tick_record(seen(0.0, math.inf, 1.0), decision=None)
    Log(path).append([tick(0.0, 1.0), {**tick(0.0, 1.0), "pull": "????"}, endless])
    with path.open("a") as file:
        file.write('{"seq": 4, "ki\n')
    assert len(recorded_requests(path, skipped)) == 1
    assert skipped.count == 3
    assert skipped.first == f"{path}, line 4: this is no record"
