"""The policy `slo`, driven with made observations: bounds, silence, constant load, what is missing."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Missing
from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.forecasting.answers import InlineForecaster
from dynamo_local.planner.policies.slo import forecast as lengths
from dynamo_local.planner.policies.slo.policy import filled
from dynamo_local.planner.policies.slo.scaling_options import Bounds, Fleet
from dynamo_local.planner.values import Decision, Ended, Observation, Pool, Reading, Requests, WorkerPools
from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.profile.reading import DEFAULT_PROFILE
from tests.fakes.planner.options import slo_options

OPTIONS = slo_options(ttft_ms=200, itl_ms=10, max_gpu_budget=8)
PASSES = ProfileModel.load(DEFAULT_PROFILE)
ISL, OSL = 3000, 150


@pytest.fixture(autouse=True)
def _few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A demand of fewer requests: what is tested here does not need the sharpness of many."""
    monkeypatch.setattr(lengths, "REQUESTS", 80)


class World:
    """Workers that are there at once when they are wanted, and clients with a rate over time. `told`: their latencies
    are known. Without prefill workers the graph is aggregated."""

    def __init__(
        self, options: PlannerConfig, fleet: tuple[int, int], slower: float = 1.0, *, told: bool = True
    ) -> None:
        self.driver = PolicyDriver(policy_of(options), 0.0, forecaster=InlineForecaster())
        self.fleet = fleet
        self.slower = slower
        self.told = told
        self.queue = 0
        self.decisions: list[Decision] = []

    def run(self, until_s: float, rate: Callable[[float], float | Missing]) -> None:
        """Tick until then."""
        while (at_s := self.driver.next_at_s) <= until_s:
            prefill = Pool("P", 1, self.fleet[0], gpus_held=self.fleet[0]) if self.fleet[0] else None
            pools = WorkerPools(prefill, Pool("D", 1, self.fleet[1]))
            came = rate(at_s)
            traffic = came if isinstance(came, Missing) else None
            requests = None if isinstance(came, Missing) else self._requests(at_s, came)
            observation = Observation(Reading(at_s, self.queue, {}), pools, traffic=traffic, requests=requests)
            decision = self.driver.tick_now(observation)
            assert decision is not None
            self.decisions.append(decision)
            self.fleet = (decision.targets.get("P", 0), decision.targets["D"])

    def _requests(self, at_s: float, rate: float) -> Requests:
        count = round(rate * 5)
        began = tuple(at_s - 5 + 5 * (number + 0.5) / max(1, count) for number in range(count))
        context, itl_s = ISL + OSL / 2, 0.005
        for _ in range(20):  # streams last longer on slower engines, and so are more at once (Little's law)
            streams = max(1.0, rate / self.fleet[1] * OSL * itl_s)
            itl_s = PASSES.itl_s(int(streams * context), context) * self.slower
        told = (PASSES.ttft_s(ISL) * self.slower + itl_s, itl_s) if self.told else (None, None)
        ended = tuple(Ended(at, ISL, OSL, *told) for at in began)
        return Requests(at_s - 5, at_s, began, ended)

    @property
    def steps(self) -> int:
        """Decisions that changed something."""
        return sum(bool(decision.acts) for decision in self.decisions)


@pytest.mark.full
def test_a_constant_load_is_acted_on_at_most_twice_an_hour() -> None:
    world = World(OPTIONS, (2, 2))
    world.run(300, lambda at_s: 20.0)  # it may find its size first
    before = world.steps
    world.run(300 + 3600, lambda at_s: 20.0)
    assert world.steps - before <= 2


@pytest.mark.parametrize("rate", [*(pytest.param(rate, marks=pytest.mark.full) for rate in (0.0, 20.0, 400.0)), 1.0])
def test_it_is_never_above_the_budget_and_never_below_the_floors(rate: float) -> None:
    options = slo_options(ttft_ms=200, itl_ms=10, max_gpu_budget=6, min_endpoint=2)
    world = World(options, (2, 2))
    world.run(600, lambda at_s: rate if at_s < 300 else 5.0)
    for decision in world.decisions:
        assert sum(decision.targets.values()) <= 6
        assert min(decision.targets.values()) >= 2


@pytest.mark.parametrize(
    ("ruled", "held", "budget", "fleet"),
    [
        ((2, 2), (2, 4), 4, (2, 2)),
        ((1, 3), (2, 4), 4, (1, 3)),
        ((1, 1), (2, 4), 4, (1, 3)),
        ((2, 2), (1, 4), 6, (1, 4)),
        ((2, 2), (0, 9), 5, (1, 4)),
        ((3, 3), (3, 3), 4, (2, 2)),
    ],
)
def test_beyond_the_budget_the_rules_workers_come_before_those_of_the_past(
    ruled: Fleet, held: Fleet, budget: int, fleet: Fleet
) -> None:
    """Else the past takes back in each interval what the rule has swapped (seen: 60 starts in ten minutes)."""
    assert filled(ruled, held, (2, 2), Bounds((1, 1), (1, 1), budget)) == fleet


def test_what_is_missing_changes_nothing() -> None:
    world = World(OPTIONS, (3, 3))
    world.run(300, lambda at_s: 30.0)
    fleet, before = world.fleet, world.steps
    world.run(900, lambda at_s: Missing("nobody told"))
    assert (world.fleet, world.steps) == (fleet, before)
    assert {reason.why for reason in world.decisions[-1].reasons} == {"nobody told"}


@pytest.mark.full
def test_silence_shrinks_to_the_floor_and_a_cold_start_holds() -> None:
    world = World(OPTIONS, (3, 3))
    world.run(120, lambda at_s: 0.0)
    assert world.fleet == (3, 3)  # nobody has come yet: lengths are not known
    world.run(600, lambda at_s: 20.0)
    world.run(1800, lambda at_s: 0.0)
    assert world.fleet == (1, 1)


@pytest.mark.full
def test_a_step_of_five_times_the_load_is_answered_within_a_lead() -> None:
    world = World(OPTIONS, (1, 1))
    world.run(600, lambda at_s: 8.0)
    world.run(630, lambda at_s: 40.0)
    assert world.fleet[0] >= 3
    assert sum(world.fleet) > 4


@pytest.mark.parametrize("slower", [pytest.param(0.7, marks=pytest.mark.full), 1.3])
def test_a_wrong_profile_is_corrected_within_ten_minutes(slower: float) -> None:
    world = World(OPTIONS, (4, 4), slower)
    world.run(600, lambda at_s: 20.0)
    numbers = {reason.component: reason.numbers["profile_factor"] for reason in world.decisions[-1].reasons}
    assert numbers["P"] == pytest.approx(slower, abs=0.15)
    assert numbers["D"] == pytest.approx(slower, abs=0.15)


def test_a_factor_is_said_where_it_is_much() -> None:
    world = World(OPTIONS.model_copy(update=dict(min_endpoint=4)), (4, 4), 1.5)
    world.run(400, lambda at_s: 20.0)
    notes = " ".join(world.decisions[-1].notes)
    assert re.search(r"prefill takes 1\.[45] times what the profile says", notes)


def test_a_worker_that_crashes_is_wanted_again() -> None:
    world = World(OPTIONS, (3, 3))
    world.run(400, lambda at_s: 30.0)
    settled = world.fleet
    for lost in ((1, 0), (0, 1), (1, 1)):
        world.fleet = (max(1, settled[0] - lost[0]), max(1, settled[1] - lost[1]))
        world.run(world.driver.next_at_s + 60, lambda at_s: 30.0)
        assert (world.fleet[0] >= settled[0], world.fleet[1] >= settled[1]) == (True, True)


def test_an_aggregated_graph_follows_its_load() -> None:
    world = World(OPTIONS, (0, 2))
    world.run(200, lambda at_s: 4.0)
    calm = world.fleet
    world.run(400, lambda at_s: 40.0)
    assert world.fleet[0] == 0
    assert world.fleet[1] > calm[1]
    assert all(set(decision.targets) == {"D"} for decision in world.decisions)
    assert {reason.component for reason in world.decisions[-1].reasons} == {"D"}


def test_what_waits_is_cleared_beside_what_comes() -> None:
    calm, pressed = World(OPTIONS, (2, 2)), World(OPTIONS, (2, 2))
    for world in (calm, pressed):
        world.run(300, lambda at_s: 10.0)
    pressed.queue = 600
    for world in (calm, pressed):
        world.run(315, lambda at_s: 10.0)
    assert pressed.fleet[0] > calm.fleet[0]
    pressed.queue = 0
    pressed.run(900, lambda at_s: 10.0)
    assert sum(pressed.fleet) <= sum(calm.fleet) + 1


@pytest.mark.parametrize("rate", [60.0, 120.0])
def test_a_fleet_that_is_overrun_from_the_first_request_on_grows(rate: float) -> None:
    """A price of what a GPU serves in the mean was one of what came: on two GPUs that serve next to nothing of it the
    third seemed too dear, for ever."""
    options = OPTIONS.model_copy(update=dict(max_gpu_budget=24))
    world = World(options, (1, 1), told=False)
    world.run(60, lambda at_s: rate)
    assert sum(world.fleet) > 6, world.decisions[-1].reasons[0].why


def test_no_worker_leaves_while_more_comes_than_the_budget_can_serve() -> None:
    """Else all workers are worth nothing, and the last one is left with all the requests."""
    world = World(OPTIONS, (2, 2))
    world.run(120, lambda at_s: 30.0)
    before = len(world.decisions)
    world.run(300, lambda at_s: 600.0)
    totals = [sum(decision.targets.values()) for decision in world.decisions[before:]]
    assert totals == sorted(totals)
    assert totals[-1] == 8
    assert "more comes than 8 GPUs can serve in time" in world.decisions[-1].reasons[0].why
    world.run(900, lambda at_s: 5.0)
    assert sum(world.fleet) < 8
    assert "more comes" not in world.decisions[-1].reasons[0].why


def test_targets_that_no_engine_can_keep_hold_no_workers() -> None:
    world = World(slo_options(ttft_ms=1, itl_ms=1, max_gpu_budget=8), (3, 3))
    world.run(400, lambda at_s: 20.0)
    assert world.fleet == (1, 1)
    assert "these targets cannot be kept" in world.decisions[-1].reasons[0].why


def test_a_reason_tells_forecast_band_price_and_who_binds() -> None:
    world = World(OPTIONS, (2, 2))
    world.run(300, lambda at_s: 20.0)
    why = world.decisions[-1].reasons[0].why
    assert "requests/s expected in 30 s (" in why
    assert "binds" in why
    assert "one less would miss" in why


def test_a_fleet_that_is_held_in_total_stays_whole_once_the_past_is_judged() -> None:
    world = World(OPTIONS.model_copy(update={"min_gpu_budget": 8}), (4, 4))
    world.run(900.0, lambda at_s: 2.0)
    assert {sum(decision.targets.values()) for decision in world.decisions} == {8}
