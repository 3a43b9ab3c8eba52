"""The contest of planners: what is kept, who beats whom, and a planner that knows."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.contest.clairvoyant import STEP_S, clairvoyant
from benchmarks.contest.measuring import (
    DYNAMOS,
    REPLAY,
    TWIN,
    Facts,
    Row,
    frontier,
    measure_all,
    planner_options,
    slo_of,
)
from benchmarks.contest.page import beaten_by, picture, section
from benchmarks.contest.replay_policy import ReplayPolicy
from benchmarks.contest.trials import TRIALS, Trial
from dynamo_local.config.planner_section import planner_section
from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.policies.throughput_load.policy import ThroughputLoadPolicy
from dynamo_local.profile.reading import read_profile

SIN = TRIALS[0]
ROW = Row(TWIN, SIN.name, "fixed", (2, 2), 100, 0.95, 1.0, 300.0, 9.0, 0, 0, 2.0, "made", "2026-11-22", "a machine")


FEW = ("fixed", "clairvoyant", "load")


@pytest.fixture
def without_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same requests on every machine."""
    monkeypatch.setenv("DYN_TRACES", str(tmp_path))


@pytest.mark.usefixtures("without_recorded")
def test_runs_are_kept_and_another_call_goes_on_where_one_ended(tmp_path: Path) -> None:
    path, said = tmp_path / "contest.jsonl", list[str]()
    facts = Facts.load(path)
    assert not measure_all(facts, [SIN.name], FEW, 60, time.monotonic() - 1, said.append)
    assert said == []
    assert measure_all(facts, [SIN.name], FEW, 60, time.monotonic() + 600, said.append)
    again = Facts.load(path)
    assert again.rows == facts.rows
    assert {row.case for row in again.rows} >= {"load", "clairvoyant", "fixed"}
    assert again.of(TWIN, SIN.name, "fixed")[-1].attainment == pytest.approx(1.0)
    assert [row.case for row in again.rows][-2:] == ["clairvoyant", "load"]  # fixed fleets first, planners last
    count = len(said)
    assert measure_all(again, [SIN.name], FEW, 60, time.monotonic() + 600, said.append)
    assert len(said) == count


@pytest.mark.usefixtures("without_recorded")
def test_the_frontier_begins_small_and_ends_at_the_cap() -> None:
    fleets = frontier(SIN, SIN.requests(1500))
    assert sum(fleets[-1]) == SIN.cap
    assert all(sum(after) == sum(before) + 1 for before, after in pairwise(fleets))


@pytest.mark.usefixtures("without_recorded")
def test_who_knows_the_demand_orders_a_start_up_ahead_and_stays_within_the_cap() -> None:
    requests = SIN.requests(None).rows
    knows = clairvoyant(requests, slo_of(SIN), SIN.start_up_s, SIN.speed)
    ahead = int(SIN.start_up_s / STEP_S)
    for step in range(len(knows.needed) - ahead):
        fleet = knows.needed_from(step * STEP_S)
        assert fleet[0] >= knows.needed[step + ahead][0]
        assert sum(knows.needed[step]) <= SIN.cap
    assert len(set(knows.needed)) > 1


def test_planners_begin_with_the_profile_of_slower_engines(tmp_path: Path) -> None:
    slower = next(trial for trial in TRIALS if trial.speed != 1)
    for policy in ("sla", "throughput-load"):
        policy_of(planner_options(slower, policy, tmp_path))
    of_it = read_profile(str(tmp_path)).prefill.ttft_ms
    shipped = read_profile("dynamo_H200_TP1P_TP1D").prefill.ttft_ms
    assert of_it == pytest.approx([each / slower.speed for each in shipped])


@pytest.mark.usefixtures("without_recorded")
def test_rows_as_served_dispatch_by_targets_and_come_first() -> None:
    facts = Facts(None, [])
    assert measure_all(facts, [SIN.name], ("sla", "sla as served"), 300, time.monotonic() + 600, lambda line: None)
    (remote,), (served,) = facts.of(TWIN, SIN.name, "sla"), facts.of(TWIN, SIN.name, "sla as served")
    assert served.attainment >= remote.attainment
    assert (served.ttft_p99_ms, served.itl_p99_ms) != (remote.ttft_p99_ms, remote.itl_p99_ms)
    names = [line.split("|")[1].strip() for line in section(facts).splitlines() if line.startswith("| `")]
    assert names == ["`sla` as served", "`sla`"]
    assert "as served" not in picture(facts)


def test_some_traces_are_made_on_every_machine() -> None:
    made = [trial for trial in TRIALS if not trial.file]
    assert len(made) == 3
    for trial in made:
        requests = trial.requests(5)
        assert not requests.recorded
        assert not requests.missing
        assert len(requests.rows) == 5
        assert trial.clairvoyant is None  # of Dynamo's replay, which is for recorded ones


def test_a_planner_loses_where_a_fixed_fleet_is_better_in_one_and_no_worse_in_the_other() -> None:
    fixed = [ROW, replace(ROW, fleet=(3, 3), attainment=0.99, gpu_hours=1.5)]
    slo = replace(ROW, case="slo", attainment=0.97, gpu_hours=1.2)
    assert beaten_by(slo, fixed) == []
    assert beaten_by(replace(slo, gpu_hours=1.5), fixed) == [fixed[1]]
    assert beaten_by(replace(slo, attainment=0.94), fixed) == [fixed[0]]


def test_the_page_says_who_won_and_what_was_missed() -> None:
    conversation: Trial = next(trial for trial in TRIALS if trial.name == "conversation")
    replayed = replace(ROW, judge=REPLAY, trial=conversation.name, case="slo", attainment=0.95, gpu_hours=4.0)
    slo, load = replace(ROW, case="slo", attainment=0.94), replace(ROW, case="load", gpu_hours=0.5)
    dynamos = replace(replayed, case=DYNAMOS, attainment=0.5)
    facts = Facts(None, [ROW, slo, load, replayed, dynamos])
    text = section(facts)
    assert "| conversation | 2P2D | Dynamo's planner | 50.00% | 4.000 | 0 |" in text
    assert "`slo` **loses** to the fixed fleet 2P2D" in text
    assert "`load` loses to none and beats 2P2D." in text
    assert "≥ 96.3 %: **missed**" in text
    assert "≤ 1.07 |" in text
    assert len(ElementTree.fromstring(picture(facts)).findall(".//{*}polyline")) == 1


WORDS = (
    "num_prefill_requests sum_prefill_tokens var_prefill_length sum_prefill_kv_tokens num_decode_requests "
    "sum_decode_kv_tokens var_decode_kv_tokens num_queued_prefill sum_queued_prefill_tokens num_queued_decode "
    "sum_queued_decode_kv_tokens"
)
NO_WORK = dict.fromkeys(WORDS.split(), 0)


def told_by_the_replay(now_s: float, tokens: int, queued_tokens: int) -> dict[str, object]:
    """Two workers of each role, of which those for prefill have a queue; 10 requests in each interval of 5 s."""
    prefill = {"num_prefill_requests": 1, "sum_prefill_tokens": tokens, "sum_queued_prefill_tokens": queued_tokens}
    decode = {"num_decode_requests": tokens // 500, "sum_decode_kv_tokens": tokens}
    passes = {"prefill": (prefill, tokens / 50_000), "decode": (decode, 0.004 + tokens / 10_000_000)}
    snapshot: dict[str, object] = {
        "now_ms": now_s * 1000,
        "traffic": {"duration_s": 5.0, "num_req": 10, "avg_isl": 3000.0, "avg_osl": 100.0, "shape_count": 10},
    }
    for role, (work, wall_time) in passes.items():
        each = {**NO_WORK, **work, "dp_rank": 0, "wall_time": wall_time}
        snapshot |= {
            f"active_{role}_ids": [0, 1],
            f"{role}_fpm_snapshots": [{**each, "worker_id": number} for number in (0, 1)],
            f"starting_{role}_count": 0,
            f"draining_{role}_count": 0,
            f"non_draining_{role}_count": 2,
        }
    return snapshot


@pytest.mark.parametrize(("queued_tokens", "wanted"), [(0, {1, 2}), (60_000, {2, 3})])
def test_in_dynamos_replay_prefill_grows_by_a_queue_and_shrinks_without(queued_tokens: int, wanted: set[int]) -> None:
    options = {"policy": "throughput-load", "optimization_target": "sla", "enable_load_scaling": True, "ttft_ms": 500}
    policy = ReplayPolicy(
        ThroughputLoadPolicy(planner_section("Planner", {**options, "enable_throughput_scaling": False}))
    )
    targets = set()
    now_s = policy.initial_tick_ms() / 1000
    for number in range(8):
        answer = policy.on_tick(told_by_the_replay(now_s, 1000 * (number + 1), queued_tokens))
        targets.add(answer["target_prefill"])
        now_s = (answer["next_tick_ms"] or 0) / 1000
    assert targets == wanted
