"""The machine: what goes wrong with workers on standby, how so many are kept, and what a successor finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.core.fleet import effects as ins
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.fleet import Fleet, Standby, StandbyFacts
from dynamo_local.core.types import Load
from dynamo_local.errors import DrainNotCancellable
from tests.fakes.arbiter.fleet_views import name
from tests.fakes.arbiter.machine import Life
from tests.fakes.sleepers import answered, asleep, order, scale, sleep, some, told, wake

# --- what goes wrong -------------------------------------------------------------------------------


def test_streams_without_end_are_not_cut_for_a_sleep() -> None:
    life = some("ready", "ready")
    life.feed(sleep())
    answered(life)
    assert life.until_due() == [
        "tell: dynamo_VllmWorker_1: it was not asleep 720 s after it was asked to; it serves again",
        "order to wake VllmWorker_1",
    ]


def test_one_that_does_not_wake_is_ended_and_started_again() -> None:
    life = asleep("ready", "ready")
    life.feed(wake())
    answered(life)
    life.until_due()
    assert (life.state(1), life.events()) == ("crashed", ["HealthFailed"])
    assert life.did(ins.EndSession)
    assert "was not awake 300 s after" in (life.worker(1).reason or "")


@pytest.mark.parametrize(("state", "again"), [("falling_asleep", True), ("sleeping", True), ("waking", False)])
def test_a_crash_brings_it_back_to_what_it_was_meant_to_be(state: str, again: bool) -> None:
    life = some("ready", state)
    life.gone(1, -9)
    assert (life.state(1), life.worker(1).reason) == ("crashed", "was killed by SIGKILL")
    life.swept(1)
    life.until_due()
    life.gpus()
    assert life.state(1) == "starting"
    assert life.fleet.gpus.sleepers == {}
    life.made(1)
    told(life)
    assert life.state(1) == ("falling_asleep" if again else "ready")


def test_the_reason_that_it_gave_itself_is_shown() -> None:
    life = asleep("ready", "ready")
    life.feed(wake())
    life.registered(1, failed=True, why="WakeCorrupted: after wake 2 the engine answers otherwise")
    life.gone(1, 1)
    assert (life.worker(1).reason or "").startswith("WakeCorrupted: after wake 2")


def test_one_that_answers_nothing_is_hung_asleep_or_not() -> None:
    life = asleep("ready", "ready")
    life.heard({0: Load(), 1: Load()})
    for _ in range(40):
        life.now_s += 1.0
        life.heard({0: Load()})
    assert life.state(1) == "crashed"


@pytest.mark.parametrize("state", ["falling_asleep", "sleeping", "waking"])
def test_a_drain_of_one_on_standby_is_not_taken_back(state: str) -> None:
    life = some("ready", state)
    life.feed(st.Drain(stimulus_id="drain:1", name=name(1)))
    assert life.state(1) == "draining"
    with pytest.raises(DrainNotCancellable, match="it was asleep"):
        life.feed(st.Drain(cancel=True, stimulus_id="cancel:1", name=name(1)))
    assert life.feed(scale(1)) == ["spawn VllmWorker_2"]
    life.gone(1, 0)
    life.swept(1)
    life.gpus()
    assert life.state(1) == "gone"


@pytest.mark.parametrize("heard_first", [True, False])
def test_a_lease_revoked_outside_is_an_order_to_leave_asleep_too(heard_first: bool) -> None:
    life = asleep("ready", "ready")
    if heard_first:
        life.key_gone(1)
        assert life.state(1) == "sleeping"
        life.gone(1, 0)
    else:
        life.gone(1, 0)
        life.looked_up(1, removed=True)
    assert life.state(1) == "exited"


def test_a_lease_that_expired_comes_back_under_another_number() -> None:
    life = asleep("ready", "ready")
    life.key_gone(1)
    life.registered(1, "abc", standby=StandbyFacts(order=order(life), asleep=True))
    assert (life.state(1), life.worker(1).lease, life.worker(1).leave.lease_gone) == ("sleeping", "abc", False)


# --- kept ------------------------------------------------------------------------------------------


def kept(count: int = 1, gpus: int = 3) -> Life:
    """One worker that serves, so many to be kept asleep."""
    return some("ready", gpus=gpus, standby=count)


def test_so_many_are_started_and_put_to_sleep() -> None:
    life = kept()
    life.feed(st.Tick())
    assert life.state(1) == "pending"
    assert life.gpus() == ["spawn VllmWorker_1"]
    life.made(1)
    assert life.fleet.capacity("VllmWorker") == 1
    assert told(life) == ["order to sleep at level 1 VllmWorker_1"]
    told(life, order=1, asleep=True)
    life.gpus()
    assert life.states() == ["ready", "sleeping"]
    assert life.feed(scale(1))[0] == "order to wake VllmWorker_1"
    told(life, order=2, asleep=False)
    life.gpus()
    assert life.states() == ["ready", "ready", "starting"]


def test_nobody_is_kept_where_the_gpus_are_others() -> None:
    life = kept(gpus=1)
    life.feed(st.Tick())
    life.gpus()
    assert life.states() == ["ready"]


def test_one_that_is_still_to_sleep_is_simply_left_awake() -> None:
    life = kept(gpus=2)
    life.feed(st.Tick())
    life.gpus()
    life.made(1)
    life.feed(scale(1))
    assert life.fleet.capacity("VllmWorker") == 2
    told(life)
    assert life.state(1) == "ready"


def test_an_engine_that_cannot_sleep_is_found_out_once() -> None:
    life = kept()
    life.feed(st.Tick())
    life.gpus()
    life.made(1)
    told(life, cannot="vLLM's CPU platform has no sleep mode")
    assert life.state(1) == "draining"
    assert "no worker can be kept on standby: vLLM's CPU platform has no sleep mode" in life.told[0]
    life.gone(1, 0)
    life.swept(1)
    life.gpus()
    life.gpus()
    assert life.states() == ["ready"]


@pytest.mark.parametrize("is_asleep", [True, False])
def test_a_process_that_has_grown_is_replaced(is_asleep: bool) -> None:
    """Asleep at once; awake as `dynamo restart` does it. Then it is what it was."""
    life = asleep("ready", "ready")
    life.feed(wake())
    if is_asleep:
        told(life, order=order(life), asleep=False)
        life.feed(sleep())
    told(life, order=order(life), asleep=is_asleep, recycle="its GPU memory has grown")
    assert life.state(1) == "draining/restarting"
    assert "its GPU memory has grown" in life.told[-1]
    life.gone(1, 0)
    life.swept(1)
    life.gpus()
    life.made(1, 77)
    life.registered(1, "4d", standby=StandbyFacts())
    assert life.state(1) == ("falling_asleep" if is_asleep else "ready")


def test_a_rolling_restart_comes_to_sleepers_and_waits_for_none() -> None:
    life = asleep("ready", "ready", "ready")
    life.feed(st.Restart(stimulus_id="restart:1", name="VllmWorker"))
    assert life.states() == ["ready", "draining/restarting", "draining/restarting"]


def test_one_that_starts_only_to_sleep_is_nobody_who_serves_meanwhile() -> None:
    """It is registered for a moment. A restart that waited for another worker took it for the sibling that serves on:
    then it slept, and nobody was there."""
    life = some("ready", "starting", "starting", standby=1)
    sleeper = replace(life.worker(1), standby=Standby(wanted=True))
    life.fleet = life.fleet.with_workers({**life.fleet.workers, name(1): sleeper})
    life.feed(st.Restart(stimulus_id="restart:1", name=name()))
    assert told(life) == ["order to sleep at level 1 VllmWorker_1"]
    assert life.states() == ["ready", "falling_asleep", "starting"]
    life.registered(2)
    assert life.states() == ["draining/restarting", "falling_asleep", "ready"]


# --- a successor -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("falling_asleep", ["order to sleep at level 1 VllmWorker_1"]),
        ("sleeping", []),
        ("waking", ["order to wake VllmWorker_1"]),
    ],
)
def test_a_successor_gives_the_orders_again(state: str, words: list[str]) -> None:
    """With the same number, so that a worker that has it does nothing twice."""
    life = some("ready", state)
    assert life.feed(st.Resume(stimulus_id="adopt")) == words
    assert order(life) == 1


def test_a_worker_that_fell_asleep_unseen_is_found_asleep() -> None:
    """The order was given by the killed arbiter, its end seen by nobody."""
    life = some("ready", "falling_asleep")
    told(life, order=1, asleep=True)
    assert life.state(1) == "sleeping"


def test_down_ends_sleepers_like_all_others() -> None:
    life = asleep("ready", "ready")
    life.feed(st.Leave(stimulus_id="down"))
    assert life.states() == ["draining", "draining"]


def test_the_fleet_says_who_is_what() -> None:
    fleet_: Fleet = asleep("ready", "ready").fleet
    sleeper = fleet_.workers[name(1)]
    assert (sleeper.counts, sleeper.stands_by, sleeper.settled, sleeper.cancellable) == (False, True, True, False)
    assert fleet_.gpus_coming_back() == 0
