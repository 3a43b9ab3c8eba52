"""The judge's bench: families are the same everywhere, the frontier's hull, regret, and the rules of rivals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.regret.families import CAP, EVEN, FAMILIES, ODD, Load, load_of, requests_of
from benchmarks.regret.frontier import FIXED, Row, Runs, frontier, hashed, hull, least_hours, share_at
from benchmarks.regret.replayed import Held
from benchmarks.regret.report import CLAIRVOYANT, Task, Verdict, run_task, table, verdict
from benchmarks.regret.rivals import RIVALS
from dynamo_local.errors import BadInput

FLEETS = [(2.0, 0.5), (4.0, 0.9), (3.0, 0.6), (6.0, 0.95), (8.0, 0.95), (10.0, 1.0)]
LINE = [(0.0, 0.0), (2.0, 0.5), (4.0, 0.9), (6.0, 0.95), (10.0, 1.0)]
SHORT_HOURS = 0.03


def row(fleet: tuple[int, int], kept: Sequence[int], gpu_s: Sequence[float], policy: str = FIXED) -> Row:
    return Row(policy, fleet, (100,) * len(kept), tuple(kept), tuple(gpu_s), 0.1)


@pytest.fixture(scope="module")
def load() -> Load:
    return load_of("swing", 0, SHORT_HOURS)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fixed fleets are simulated once for all tests."""
    return tmp_path_factory.mktemp("regret")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_and_a_seed_give_the_same_requests_and_another_seed_others(family: str) -> None:
    requests = requests_of(family, 1, 0.25)
    assert requests == requests_of(family, 1, 0.25)
    assert requests != requests_of(family, 2, 0.25)
    assert requests[0].at_s == 0
    assert all(before.at_s <= after.at_s for before, after in pairwise(requests))
    assert requests[-1].at_s <= 0.25 * 3600
    assert all(8 <= each.input_length <= 32_000 and 2 <= each.output_length <= 4_000 for each in requests)


@pytest.mark.parametrize("family", ["lulls", "tails", "prefixes"])
def test_a_load_is_of_the_size_that_was_meant(family: str) -> None:
    load = load_of(family, 0)
    assert 5_000 <= len(load.requests) <= 30_000
    assert 2.3 * 3600 <= load.requests[-1].at_s <= 3.6 * 3600
    assert 2 <= sum(load.likely) <= CAP


def test_half_of_the_families_are_odd() -> None:
    assert len(ODD) == len(EVEN) == len(FAMILIES) / 2
    assert not set(ODD) & set(EVEN)


def test_conversations_share_prefixes_and_others_do_not() -> None:
    shared = [name for each in requests_of("prefixes", 0, 0.5) for name in each.hash_ids]
    assert len(set(shared)) < len(shared)
    assert not any(each.hash_ids for each in requests_of("steady", 0, 0.5))


def test_an_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match="no family of loads is called storms"):
        requests_of("storms", 0)


def test_the_hull_leaves_out_fleets_that_a_mixture_beats() -> None:
    assert hull(FLEETS) == LINE
    assert hull([]) == [(0.0, 0.0)]


@pytest.mark.parametrize(("share", "hours"), [(0.0, 0.0), (0.5, 2.0), (0.7, 3.0), (0.975, 8.0), (1.0, 10.0)])
def test_least_hours_lie_on_the_line_and_share_at_is_its_inverse(share: float, hours: float) -> None:
    assert least_hours(LINE, share) == pytest.approx(hours)
    assert share_at(LINE, hours) == pytest.approx(share)


def test_regret_is_the_share_of_gpu_hours_that_a_fixed_fleet_does_not_need(load: Load) -> None:
    fleets = [row((1, 1), [50, 90], [3600, 3600]), row((2, 2), [90, 99], [7200, 7200])]
    same = verdict(load, fleets[0], fleets, 0)
    assert (same.regret, same.gain) == (pytest.approx(0), pytest.approx(0))
    dear = verdict(load, row((1, 1), [50, 90], [3600, 7200], "slo"), fleets, 0)
    assert dear.regret == pytest.approx(0.5)
    assert dear.gain < 0
    late = verdict(load, row((1, 1), [0, 99], [36_000, 5400], "slo"), fleets, 1)
    assert late.regret == pytest.approx(-0.25)
    assert late.share == pytest.approx(0.99)


def test_a_share_that_no_fixed_fleet_keeps_is_held_against_the_best(load: Load) -> None:
    fleets = [row((1, 1), [50], [3600]), row((2, 2), [90], [7200])]
    found = verdict(load, row((1, 1), [95], [7200], "slo"), fleets, 0)
    assert found.beyond
    assert found.regret == pytest.approx(0)


def test_the_table_begins_with_the_losses() -> None:
    verdicts = [
        Verdict("swing", 0, "slo", 0.0, 100, 0.99, 2.0, -0.1, 0.02, False, 1.0),
        Verdict("lulls", 0, "slo", 0.0, 100, 0.95, 3.0, 0.4, -0.03, False, 1.0),
    ]
    lines = table(verdicts).splitlines()
    worst = [line.split()[0] for line in lines[2:] if line]
    assert worst.index("lulls") < worst.index("swing")
    assert "+40.0%" in table(verdicts)


@pytest.mark.parametrize("policy", [FIXED, CLAIRVOYANT, *RIVALS, "load"])
def test_a_policy_runs_and_a_second_call_finds_what_is_kept(policy: str, kept: Path) -> None:
    task = Task("swing", 0, SHORT_HOURS, (policy,), kept)
    first = run_task(task)
    assert [each.policy for each in first] == [policy]
    assert 0 < first[0].share <= 1
    assert run_task(task) == first


def test_the_frontier_grows_until_more_gpus_do_not_help(load: Load, kept: Path) -> None:
    rows = frontier(Runs(load, kept))
    assert max(map(Row.share, rows)) >= 0.95
    assert {each.fleet for each in rows} <= {each.fleet for each in Runs(load, kept).rows}


def test_a_load_with_other_targets_is_another(load: Load) -> None:
    assert hashed(load) == hashed(load_of("swing", 0, SHORT_HOURS))
    other = replace(load, slo=dataclasses.replace(load.slo, ttft_ms=1.0))
    assert hashed(load) != hashed(other)


class Grows:
    """A policy of the replay that wants one decode worker more at its first tick."""

    def initial_tick_ms(self) -> float:
        return 10_000.0

    def on_tick(self, snapshot: Mapping[str, Any]) -> dict[str, float | int | None]:
        wanted = 3 if snapshot["now_ms"] == self.initial_tick_ms() else None
        return {"target_prefill": None, "target_decode": wanted, "next_tick_ms": None}


def test_in_dynamos_replay_a_worker_is_held_from_its_order_to_the_end_of_its_drain() -> None:
    held = Held(Grows(), 4)
    for now_s, staying, total in ((10, 2, 2), (11, 3, 3), (70, 2, 3), (80, 2, 2)):
        counts = {"non_draining_prefill_count": 2, "total_prefill_count": 2}
        counts |= {"non_draining_decode_count": staying, "total_decode_count": total}
        answer = held.on_tick({"now_ms": now_s * 1000.0, **counts})
        assert answer["next_tick_ms"] == (now_s + 1) * 1000
    assert held.gpu_s(60.0) == pytest.approx(4 * 10 + 5 * 50)
    assert held.gpu_s(100.0) == pytest.approx(4 * 10 + 5 * 70 + 4 * 20)
