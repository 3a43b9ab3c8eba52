"""Compares faster scaling options with cold starts at equal GPU-hours."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.contest import rungs
from benchmarks.contest.rungs import (
    ASKED,
    COLD,
    LOADS,
    PRICES,
    RUNGS,
    Facts,
    Load,
    Row,
    Stretch,
    measure_all,
    missed_at,
    section,
    spared,
)
from benchmarks.measured_pages import write_measured
from dynamo_local.planner.policies.slo import forecast as lengths

ROW = Row("bursts", 0, COLD, 1.0, 1000, 100, 2.0, {"starts": 3}, 1.0, "2026-11-23", "a machine")
BOTH = "flips, 1 of each role on standby"


def test_what_is_missed_at_as_many_gpu_hours_is_on_the_line_and_never_rises() -> None:
    curve = [(1.0, 100.0), (2.0, 50.0), (3.0, 60.0)]
    assert [missed_at(hours, curve) for hours in (0.5, 1.5, 2.0, 2.5, 9.0)] == [100.0, 75.0, 50.0, 50.0, 50.0]


def test_each_seed_is_compared_with_its_own_curve() -> None:
    curve = [replace(ROW, thrift=thrift, gpu_hours=3.0 - number / 2) for number, thrift in enumerate(PRICES)]
    curve = [replace(row, missed=int(400 - 100 * row.gpu_hours)) for row in curve]
    other = [replace(row, seed=1, missed=2 * row.missed) for row in curve]
    both = [replace(ROW, rungs=BOTH, seed=seed, gpu_hours=2.5, missed=75) for seed in (0, 1)]
    facts = Facts(None, [*curve, *other, *both])
    assert spared(facts, "bursts", BOTH) == pytest.approx([0.5, 0.75])
    assert "62% (50%, 75%)" in section(facts)
    facts = Facts(None, [*curve, replace(both[0], missed=120)])
    assert "**less than a third**" in section(facts)


def test_every_load_has_other_samples_in_the_order_of_time() -> None:
    for load in LOADS:
        first, second = load.requests(0), load.requests(1)
        assert first == load.requests(0) != second
        assert all(before.at_s <= after.at_s for before, after in pairwise(first))
        assert first[-1].at_s <= sum(each.seconds for each in load.stretches)


def test_runs_are_kept_and_sleepers_at_the_beginning_are_paid_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, "REQUESTS", 60)  # a demand of fewer requests: what is tested here is no figure
    monkeypatch.setattr(rungs, "LOADS", (replace(LOADS[1], stretches=(Stretch("chat,rate=2", 40),)),))
    monkeypatch.setattr(rungs, "PRICES", (1.0,))
    monkeypatch.setattr(rungs, "RUNGS", (RUNGS[0], RUNGS[3]))
    path, said = tmp_path / "rungs.jsonl", list[str]()
    assert not measure_all(Facts.load(path), [0], time.monotonic() - 1, said.append)
    assert said == []
    facts = Facts.load(path)
    assert measure_all(facts, [0], time.monotonic() + 600, said.append)
    assert Facts.load(path).rows == facts.rows
    all_on, cold, both = facts.rows
    assert (all_on.rungs, cold.rungs, both.rungs) == ("4P4D", COLD, BOTH)
    assert all_on.missed <= cold.missed
    assert both.gpu_hours >= 2 * 45 / 3600
    assert measure_all(Facts.load(path), [0], time.monotonic() + 600, said.append)
    assert len(said) == 3


@pytest.mark.full
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_with_flips_and_standby_a_third_fewer_are_missed_at_equal_gpu_hours(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rungs, "LOADS", (load,))
    monkeypatch.setattr(rungs, "RUNGS", (RUNGS[0], RUNGS[3]))
    facts = Facts()
    assert measure_all(facts, [0], time.monotonic() + 1800, print)
    assert spared(facts, load.name, BOTH)[0] >= ASKED


def test_a_page_may_have_several_measured_parts(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    parts = [f"<!-- measured: {name} -->\nold\n<!-- end of what was measured -->\n" for name in ("a", "b")]
    page.write_text("\n".join(["top", parts[0], "between", parts[1], "end"]))
    write_measured(page, "a", "new")
    found = page.read_text()
    assert "between" in found
    assert (found.count("new"), found.count("old")) == (1, 1)
