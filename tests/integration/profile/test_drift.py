"""Engines that are slower than the profile that their planner goes by: told while they serve."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from dynamo_local.profile.judgement import PASSES_MIN
from tests.drivers.planned import DECODE, open_loop, planner, steady
from tests.drivers.served import Served, auntil
from tests.fakes.profile_folders import slow_engine

pytestmark = [pytest.mark.infra, pytest.mark.full, pytest.mark.timeout(300)]

SLOWER = 1.25


async def test_engines_slower_than_their_profile_are_seen_in_the_status_the_metrics_and_a_note(tmp_path: Path) -> None:
    """Four fifths of the profiled speed: each decode pass and each prompt takes a quarter longer."""
    profile = slow_engine(tmp_path / "profile")
    words = (
        "--VllmWorker.conditional-disagg=false",
        f"--Common.sim.profile={profile}",
        f"--Common.sim.speed={1 / SLOWER}",
        *("--planner", "--Planner.policy=slo", f"--Planner.profile-results-dir={profile}"),
        *("--Planner.ttft=5000", "--Planner.itl=200", "--Planner.min-endpoint=1"),
    )
    with Served(*words) as served:
        served.start()
        answers = await open_loop(served, steady(rate=2.0, seconds=20.0, prompt_words=100, tokens=40))
        assert answers.wrong == []

        def decode() -> list[dict[str, object]]:
            rows = planner(served, "status")["drift"]
            return [row for row in rows if (row["component"], row["kind"]) == (DECODE, "decode")]

        [row] = await auntil(decode, 60.0, what=lambda: planner(served, "status"))
        assert row["passes"] >= PASSES_MIN
        assert row["p50"] == pytest.approx(SLOWER - 1, abs=0.08), row
        with urllib.request.urlopen(served.status()["metrics_url"], timeout=10.0) as answer:
            assert f'dynamo_planner_profile_drift_ratio{{component="{DECODE}",kind="decode"' in answer.read().decode()
        said = served.cli("planner", "status").stdout
        assert f"profile   {profile} (not measured by `dynamo profile`" in said
        assert f"drift     {DECODE} decode: +" in said
        notes = [note["text"] for note in served.status()["notes"] if "off their profile" in note["text"]]
        assert any(f"{DECODE} decode" in note for note in notes), notes
