"""Dynamo's replay as a judge of planners (`benchmarks.regret --replay`)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.regret.families import load_of
from benchmarks.regret.frontier import FIXED, Runs
from benchmarks.regret.replayed import in_replay
from benchmarks.regret.report import CLAIRVOYANT, Task, maker_of, run_task
from benchmarks.regret.rivals import RIVALS

LOAD = load_of("lulls", 0, 0.1)


def test_more_gpus_keep_more_requests_and_a_fixed_fleet_holds_its_gpus_all_the_time() -> None:
    small, large = (in_replay(LOAD, fleet, None) for fleet in ((1, 1), (6, 2)))
    assert len(small.kept) < len(large.kept) <= len(LOAD.requests)
    assert set(large.kept) <= {each.at_s for each in LOAD.requests}
    assert math.fsum(large.gpu_s) == pytest.approx(8 * LOAD.requests[-1].at_s)


@pytest.mark.parametrize("policy", ["slo", "load", "throughput-load", CLAIRVOYANT, *RIVALS])
def test_a_policy_changes_the_fleet_there(policy: str) -> None:
    maker, first = maker_of(LOAD, policy, replay=True)
    found = in_replay(LOAD, first, maker)
    assert math.fsum(found.gpu_s) != pytest.approx(sum(first) * LOAD.requests[-1].at_s)
    assert found.kept


def test_both_judges_keep_their_runs_apart(tmp_path: Path) -> None:
    ours, theirs = (run_task(Task("lulls", 0, 0.05, (FIXED,), tmp_path, replay=replay)) for replay in (False, True))
    assert ours[0].policy == theirs[0].policy == FIXED
    load = load_of("lulls", 0, 0.05)
    assert {each.fleet for each in Runs(load, tmp_path / "replay").rows}
    assert Runs(load, tmp_path / "replay").rows != Runs(load, tmp_path).rows
