"""One tick of any policy: in which order, who else is asked, and what a change in between does to it."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_local.clock import run_virtual
from dynamo_local.core.types import Missing
from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.policies.load_planner import LoadPlanner
from dynamo_local.planner.values import (
    ComponentTarget,
    Decision,
    Forecasts,
    ForecastTask,
    Needs,
    Observation,
    Prediction,
    Proposal,
)
from tests.fakes.planner.observations import DECODE, PREFILL, reading, worker_pools
from tests.fakes.planner.options import load_options
from tests.fakes.planner.wishing import Wishing

TASK = ForecastTask("constant", ((3.0, 4.0),))
POOLS = worker_pools(1, 1)
OPTIONS = load_options(adjustment_interval=10.0, metric_pulling_interval=5.0)


def observation(at_s: float = 10.0, kv: float = 0.95) -> Observation:
    return Observation(reading(at_s, 0, kv), POOLS)


class Foresight:
    """Knows the next number; `takes_s` on the loop's clock."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.takes_s = takes_s
        self.asked: list[ForecastTask] = []

    async def run(self, task: ForecastTask, deadline_s: float) -> Forecasts | Missing:
        self.asked.append(task)
        if self.takes_s:
            await asyncio.sleep(self.takes_s)
        return Forecasts(((5.0,),))


class Others:
    """Plugins that say so."""

    def __init__(self, prediction: Prediction | None, targets: tuple[ComponentTarget, ...]) -> None:
        self.prediction = prediction
        self.said = targets
        self.heard: list[Prediction | None] = []

    def needs(self, needs: Needs) -> Needs:
        return needs

    async def predict(self, observation: Observation, own: Prediction | None) -> Prediction | None:
        self.heard.append(own)
        return self.prediction

    async def targets(
        self, observation: Observation, prediction: Prediction | None, proposals: tuple[Proposal, ...]
    ) -> tuple[ComponentTarget, ...]:
        self.heard.append(prediction)
        return self.said


def targets(decision: Decision | None) -> dict[str, int]:
    assert decision is not None
    return dict(decision.targets)


def test_a_tick_goes_from_forecast_to_targets() -> None:
    foresight = Foresight()
    driver = PolicyDriver(Wishing({"prefill": 3, "decode": 5}, task=TASK), 0.0, forecaster=foresight)
    assert driver.next_at_s == 10.0
    decision = driver.tick_now(observation())
    assert targets(decision) == {PREFILL: 3, DECODE: 5}
    assert foresight.asked == [TASK]
    assert driver.prediction == Prediction(num_req=5.0, source="wishing")
    assert driver.next_at_s == 20.0


def test_others_may_predict_and_want_something_else() -> None:
    others = Others(Prediction(num_req=9.0), (ComponentTarget("decode", 7),))
    driver = PolicyDriver(Wishing({"decode": 5}, task=TASK), 0.0, forecaster=Foresight(), pipeline=others)
    assert targets(driver.tick_now(observation())) == {PREFILL: 1, DECODE: 7}
    assert [None if each is None else each.num_req for each in others.heard] == [5.0, 9.0]


def test_without_a_forecaster_a_forecast_is_missing_and_the_policy_goes_on() -> None:
    driver = PolicyDriver(Wishing({"decode": 2}, task=TASK), 0.0)
    assert targets(driver.tick_now(observation()))[DECODE] == 2
    assert driver.prediction is None


def test_a_pull_of_before_a_persons_change_decides_nothing() -> None:
    driver = PolicyDriver(Wishing({"decode": 5}), 0.0)
    driver.manual(11.0)
    assert driver.tick_now(observation(10.5)) is None
    assert driver.next_at_s == 21.0


def test_a_change_while_a_forecast_is_waited_for_takes_the_decision_back() -> None:

    async def run() -> None:
        for change in ("manual", "options"):
            driver = PolicyDriver(Wishing({"decode": 5}, task=TASK), 0.0, forecaster=Foresight(2.0))
            tick = asyncio.ensure_future(driver.tick(observation()))
            await asyncio.sleep(1.0)
            if change == "manual":
                driver.manual(11.0)
            else:
                driver.change(Wishing({"decode": 1}), 11.0)
            assert await tick is None

    run_virtual(run())


def test_a_tick_that_fails_leaves_the_state_of_before() -> None:
    class Broken(Wishing):
        def settle(self, state: object, observation: Observation, targets: object) -> tuple[object, Decision | None]:  # type: ignore[override]
            raise ZeroDivisionError

    driver = PolicyDriver(Broken({"decode": 5}), 0.0)
    with pytest.raises(ZeroDivisionError):
        driver.tick_now(observation())
    assert driver.next_at_s == 10.0


def test_other_options_go_on_and_another_policy_begins() -> None:
    driver = PolicyDriver(LoadPlanner(OPTIONS), 0.0)
    assert driver.tick_now(observation(5.0)) is None
    driver.change(LoadPlanner(OPTIONS.model_copy(update=dict(decode_kv_scale_up_threshold=0.99))), 6.0)
    assert driver.next_at_s == 10.0
    assert targets(driver.tick_now(observation(10.0))) == {PREFILL: 1, DECODE: 1}
    driver.change(Wishing({"decode": 5}), 12.0)
    assert driver.next_at_s == 22.0


def test_plugins_are_asked_where_something_is_decided() -> None:
    """The load planner pulls every second: a plugin's turn would be over before the interval is."""
    others = Others(None, ())
    driver = PolicyDriver(LoadPlanner(OPTIONS), 0.0, pipeline=others)
    driver.tick_now(observation(5.0, 0.7))
    assert others.heard == []
    driver.tick_now(observation(10.0, 0.7))
    assert others.heard == [None, None]


def test_where_time_does_not_pass_nobody_may_wait() -> None:
    driver = PolicyDriver(Wishing({"decode": 5}, task=TASK), 0.0, forecaster=Foresight(1.0))

    async def run() -> None:
        with pytest.raises(RuntimeError, match="waits"):
            driver.tick_now(observation())

    run_virtual(run())
