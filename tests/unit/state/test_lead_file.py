"""The leads of a host over all runs, and what is said of them."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from dynamo_local.core.lead_times import KEPT, LeadTimes, LeadTimeSummary, OptionKind
from dynamo_local.errors import StateError
from dynamo_local.state.leads import NAMESPACES_MAX, LeadFile
from dynamo_local.state.raw import namespaces

OF = {"W": "vllm:/m:1"}


def test_what_one_run_measured_the_next_one_knows(tmp_path: Path) -> None:
    file = LeadFile(tmp_path)
    for seconds in (3.0, 1.0, 2.0):
        file.add("dynamo", "W", OF["W"], OptionKind.PREWARMED, seconds)
    found = LeadFile(tmp_path).read("dynamo", OF)
    assert found == {"W": {"spare": (3.0, 1.0, 2.0)}}
    assert LeadTimes({}, found).of(OptionKind.PREWARMED, "W") == LeadTimeSummary(3, 2.0, 2.0, 3.0)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert namespaces({"DYN_LOCAL_STATE_DIR": str(tmp_path)}) == []


def test_another_model_begins_anew(tmp_path: Path) -> None:
    file = LeadFile(tmp_path)
    file.add("dynamo", "W", "vllm:/large:1", "cold", 300.0)
    assert file.read("dynamo", OF) == {}
    file.add("dynamo", "W", OF["W"], "cold", 20.0)
    assert file.read("dynamo", OF) == {"W": {"cold": (20.0,)}}


def test_the_file_is_bounded(tmp_path: Path) -> None:
    file = LeadFile(tmp_path)
    for n in range(KEPT + 5):
        file.add("old", "W", OF["W"], "cold", float(n))
    assert file.read("old", OF)["W"]["cold"] == tuple(float(n) for n in range(5, KEPT + 5))
    for n in range(NAMESPACES_MAX):
        file.add(f"n{n}", "W", OF["W"], "cold", 1.0)
    assert file.read("old", OF) == {}
    assert file.read("n0", OF) == {"W": {"cold": (1.0,)}}


def _add(folder: Path, n: int) -> None:
    LeadFile(folder).add("dynamo", "W", OF["W"], "cold", float(n))


def test_runs_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(_add, [tmp_path] * 20, range(20)))
    assert sorted(LeadFile(tmp_path).read("dynamo", OF)["W"]["cold"]) == [float(n) for n in range(20)]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version": 1}', '{"version": 1, "namespaces": {"a": 1}}', '{"version": "1", "namespaces": {}}']
    + [
        json.dumps({"version": 1, "namespaces": {"a": {"components": {"W": {"of": "x", "rungs": {"cold": [bad]}}}}}})
        for bad in (-1, "1", None, True)
    ],
)
def test_a_broken_file_is_put_aside_and_begun_anew(tmp_path: Path, text: str) -> None:
    file = LeadFile(tmp_path)
    file.path.write_text(text)
    file.add("dynamo", "W", OF["W"], "cold", 1.0)
    assert file.read("dynamo", OF) == {"W": {"cold": (1.0,)}}
    assert [path.read_text() for path in tmp_path.glob("*.corrupt-*")] == [text]


def test_a_file_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    file, text = LeadFile(tmp_path), '{"version": 2, "leads": []}'
    file.path.write_text(text)
    with pytest.raises(StateError, match="newer"):
        file.add("dynamo", "W", OF["W"], "cold", 1.0)
    assert file.path.read_text() == text


def test_a_run_counts_what_earlier_ones_measured_and_says_its_own() -> None:
    leads = LeadTimes(host={"W": {"cold": (10.0, 30.0), "a_rung_of_tomorrow": (1.0,)}}).noted(
        OptionKind.COLD, "W", 20.0
    )
    rows = {(row["component"], row["rung"]): row for row in leads.as_json()}
    assert rows["W", "cold"]["run"] == {"count": 1, "last_s": 20.0, "median_s": 20.0, "p90_s": 20.0}
    assert rows["W", "cold"]["host"] == {"count": 3, "last_s": 20.0, "median_s": 20.0, "p90_s": 30.0}
    assert rows["W", "a_rung_of_tomorrow"]["run"] is None
    assert leads.of(OptionKind.PREWARMED, "W") is None


@pytest.mark.parametrize("seconds", [-0.1, float("nan"), float("inf")])
def test_a_time_that_none_can_be_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="lead"):
        LeadTimes().noted(OptionKind.COLD, "W", seconds)
