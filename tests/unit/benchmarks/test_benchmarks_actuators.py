"""The page of the ways to one more worker, from what a run has kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.actuators.facts import Facts, Kept, OfEngine
from benchmarks.actuators.page import COMMAND, PAGE, p99, report, section, write
from benchmarks.measured_pages import END, wrapped
from dynamo_local.core.lead_times import OptionKind

MACHINE = {
    "date": "2026-11-23T10:00:00+00:00",
    "cpu": "a processor",
    "cores_usable": 2,
    "cores": 2,
    "memory_gib": 8.0,
    "load_average": [0.1, 0.2, 0.3],
    "kernel": "6.1",
    "python": "3.11",
}


@pytest.fixture
def facts() -> Facts:
    """A run on one engine."""
    starts = [{"imports": 2.0, "engine": 1.0}, {"imports": 4.0, "engine": 1.0}]
    of = OfEngine(
        {OptionKind.FLIP_TO_DECODE: [0.1, 0.2, 0.9], OptionKind.PREWARMED: [1.0], OptionKind.COLD: [3.0, 5.0]},
        {OptionKind.FLIP_TO_DECODE: [], OptionKind.PREWARMED: [{"engine": 0.9}], OptionKind.COLD: starts},
    )
    return Facts(MACHINE, (0.2, 1.4), {"sim": of}, ["vLLM was not installed there."])


def test_what_was_kept_is_shown_again(facts: Facts, tmp_path: Path) -> None:
    """The lead measures on one machine, and writes the page from the file."""
    Kept(facts).save(tmp_path / "facts.json")
    assert Kept.load(tmp_path / "facts.json").facts == facts


def test_the_page_has_each_way_its_share_of_a_cold_start_and_the_stages(facts: Facts) -> None:
    """No figure is an estimate: what was not measured is not in it."""
    text = section(facts)
    assert "2 of 2 cores" in text
    assert "load 0.2 before, 1.4 after" in text
    assert "| flip to decode (3) | 0.20 s | 0.90 s | 0.90 s | 1/20 |" in text
    assert "| cold start (2) | 4.00 s | 5.00 s | 5.00 s |  |" in text
    assert "| imports | 3.00 s | – |" in text
    assert "| **all** | **4.00 s** | **0.90 s** |" in text
    assert text.endswith("vLLM was not installed there.")


def test_flips_are_judged_by_the_slowest_of_a_hundred(facts: Facts) -> None:
    verdicts = {figure.name: figure.verdict for figure in report(facts).figures if figure.target}
    assert verdicts == {
        "sim, flip_to_decode: p99 of 3": "missed",
        "sim, flip_to_decode: of a cold start": "met",
        "sim, spare: of a cold start": "met",
    }
    assert p99([float(n) for n in range(1, 201)]) == 198.0


def test_the_page_has_a_place_for_it(facts: Facts, tmp_path: Path) -> None:
    page = tmp_path / "actuators.md"
    page.write_text(PAGE.read_text())
    write(page, facts)
    before, after = PAGE.read_text(), page.read_text()
    begin = f"<!-- measured: {COMMAND} -->"
    assert after.partition(begin)[0] == before.partition(begin)[0]
    assert after.partition(END)[2] == before.partition(END)[2]
    assert wrapped(section(facts)) in after
