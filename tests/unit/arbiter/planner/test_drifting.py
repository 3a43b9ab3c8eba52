"""A planner's profile is compared with the engines that serve, and a person is told where it is off."""

from __future__ import annotations

import asyncio

from dynamo_local.arbiter.profile_check import EVERY_S, ProfileDrift
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.errors import NatsUnavailable
from dynamo_local.planner.sources import PassTracker
from dynamo_local.planner.values import Engines, EngineSeen
from dynamo_local.profile.document import write_document
from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.profile.judgement import expected_s
from dynamo_local.profile.reading import DEFAULT_PROFILE
from tests.fakes.arbiter.quick_clock import QuickClock
from tests.fakes.arbiter.told import Told
from tests.fakes.profile_documents import document
from tests.fakes.profile_folders import write_npz

DECODES = Requests(num_decode_requests=4, sum_decode_kv_tokens=4000)
ENGINE = EngineId("1")


class Engined:
    """An engine whose passes take `factor` times what the profile says; one of the first questions is lost."""

    def __init__(self, profile: str, clock: QuickClock) -> None:
        self.factor = 1.0
        self.asked = 0
        self._expected_s = expected_s(ProfileModel.load(profile), DECODES)
        self._clock = clock

    async def passes(self, tracker: PassTracker) -> Engines:
        """See `ObservationSources`."""
        self.asked += 1
        if self.asked == 2:
            raise NatsUnavailable("it is away")
        took_s = self._expected_s * self.factor
        passes = tuple(ForwardPass(ENGINE, n, took_s, DECODES, at_s=self._clock.at_s) for n in range(64))
        return {ENGINE: EngineSeen("VllmWorker", passes, passes[-1])}

    async def after(self, more: int) -> None:
        """So many questions later."""
        count = self.asked + more
        async with asyncio.timeout(120.0):
            while self.asked < count:
                await asyncio.sleep(0)


async def test_engines_that_become_slower_than_their_profile_are_told_of_and_when_it_is_over(tmp_path):
    """As a note as long as it lasts, in the status and as figures; a lost question changes nothing."""
    profile = write_npz(tmp_path)
    write_document(tmp_path, document())
    clock, told = QuickClock(), Told()
    engine = Engined(profile, clock)
    drifting = ProfileDrift(engine.passes, clock, told)
    assert drifting.status() == {"profile": None, "drift": []}
    drifting.follow(PlannerConfig(policy="slo", profile_results_dir=profile))
    await engine.after(10)
    assert drifting.status()["profile"] == {"name": profile, "measured": True, "certificate": "uncertified"}
    [row] = drifting.status()["drift"]
    assert (row["component"], row["kind"], round(row["p50"], 6)) == ("VllmWorker", "decode", 0.0)
    assert (told, set(clock.slept_s)) == ([], {EVERY_S})
    engine.factor = 1.3
    await engine.after(40)
    assert len(told) == 1
    assert told.notes == told
    assert f"engines are off their profile {profile}: VllmWorker decode +30%" in told[0]
    assert round(drifting.figures()[0].p50, 2) == 0.3
    engine.factor = 1.0
    await engine.after(40)
    assert (len(told), told.notes) == (2, [])
    drifting.close()
    assert drifting.status() == {"profile": None, "drift": []}


async def test_what_is_noted_ends_with_the_planner_and_another_profile_begins_anew(tmp_path):
    """The shipped profile, which `slo` begins with, says that nobody measured it here."""
    clock, told = QuickClock(), Told()
    engine = Engined(DEFAULT_PROFILE, clock)
    engine.factor = 2.0
    drifting = ProfileDrift(engine.passes, clock, told)
    drifting.follow(PlannerConfig(policy="slo"))
    await engine.after(10)
    assert drifting.status()["profile"] == {"name": DEFAULT_PROFILE, "measured": False, "certificate": None}
    assert len(told.notes) == 1
    figures = drifting.figures()
    drifting.follow(PlannerConfig(policy="slo", ttft_ms=300))
    assert drifting.figures() == figures  # the same profile goes on
    drifting.follow(PlannerConfig(policy="slo", profile_results_dir=write_npz(tmp_path)))
    assert (drifting.figures(), told.notes) == ((), [])
    drifting.follow(PlannerConfig(policy="load"))
    asked = engine.asked
    for _ in range(20):
        await asyncio.sleep(0)
    assert engine.asked <= asked + 1
    assert drifting.status()["profile"] is None
