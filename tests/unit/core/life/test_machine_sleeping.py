"""The machine: workers are put to sleep, kept asleep and woken, and what happens to them meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamo_local.core.life import instructions as ins
from dynamo_local.core.life import stimuli as st
from dynamo_local.core.life.decisions.scaling import Change
from dynamo_local.core.life.fleet import Fleet
from dynamo_local.core.life.sleeping import ASK_AGAIN_S, ENGINE_S
from dynamo_local.core.life.standby import StandbyFacts
from dynamo_local.core.types import Load
from dynamo_local.errors import (
    DrainNotCancellable,
    DynamoError,
    LastReadyWorker,
    NotEnoughMemory,
    NotSleepable,
    NotWakeable,
    TooManyWorkers,
)
from tests.fakes.arbiter.fleet_views import DECODE, FRONTEND, PREFILL, fleet, lease_of, name, pid_of
from tests.fakes.arbiter.machine import Life

GIB = 1024**3
SLEEPERS = (replace(DECODE, standby=0), replace(PREFILL, standby=0), FRONTEND)


def sleep(n: int = 1, level: int = 1, *, force: bool = False) -> st.Sleep:
    """`dynamo sleep`"""
    return st.Sleep(stimulus_id="sleep:1", name=name(n), level=level, force=force)


def wake(n: int = 1) -> st.Wake:
    """`dynamo wake`"""
    return st.Wake(stimulus_id="wake:1", name=name(n))


def scale(change: int, component: str = "VllmWorker", **more: Any) -> st.Scale:
    """`dynamo scale`"""
    return st.Scale(stimulus_id="scale:1", component=component, change=Change(change, relative=True), **more)


def some(*states: str, gpus: int = 4, **changes: Any) -> Life:
    """Decode workers that may sleep."""
    templates = (replace(SLEEPERS[0], **changes), *SLEEPERS[1:])
    return Life(fleet(*states, gpus=gpus, templates=templates))


def told(life: Life, n: int = 1, **facts: Any) -> list[str]:
    """Its ready key, with what it says of its standby."""
    known = {"vram_bytes": GIB, "host_bytes": GIB, **facts}
    return life.registered(n, standby=StandbyFacts(**known))


def order(life: Life, n: int = 1) -> int:
    """The number of its last order."""
    return life.worker(n).standby.order


def answered(life: Life, n: int = 1, **more: Any) -> list[str]:
    """What it answered to its last order."""
    seen = {"name": name(n), "pid": pid_of(n), "order": order(life, n), **more}
    return life.feed(st.OrderAnswered(stimulus_id="control", **seen))


def asleep(*states: str, gpus: int = 4, **changes: Any) -> Life:
    """`_1` has gone to sleep by itself, as it does."""
    life = some(*states, gpus=gpus, **changes)
    life.feed(sleep())
    told(life, order=order(life), asleep=True)
    life.gpus()
    return life


# --- there and back --------------------------------------------------------------------------------


def test_a_sleep_from_the_word_to_the_end() -> None:
    """Committed, ordered; its GPU is its own until it says that it sleeps, and then somebody else's to have."""
    life = some("ready", "ready")
    assert life.feed(sleep()) == ["order to sleep at level 1 VllmWorker_1"]
    assert [type(each).__name__ for each in life.last] == ["Commit", "OrderSleep", "WaitUntil"]
    assert (life.events(), life.state(1)) == (["SleepRequested"], "falling_asleep")
    assert life.fleet.capacity("VllmWorker") == 1
    assert life.worker(1).due_s == life.now_s + 600.0 + ENGINE_S
    assert answered(life) == []
    held = life.worker(1).gpus
    assert held
    assert told(life, order=order(life), asleep=True) == ["look at GPUs"]
    assert (life.events(), life.state(1), life.worker(1).due_s) == (["Slept"], "sleeping", None)
    assert life.worker(1).gpus == ()
    assert life.worker(1).lease == lease_of(1)
    assert life.fleet.gpus.sleepers[name(1)].uuids == held
    assert len(life.free()) == 3


def test_a_wake_from_the_word_to_the_end() -> None:
    """Its own devices, locked again in the same step; capacity from then on."""
    life = asleep("ready", "ready")
    assert life.feed(wake()) == ["order to wake VllmWorker_1"]
    assert (life.events(), life.state(1)) == (["WakeRequested"], "waking")
    assert life.fleet.capacity("VllmWorker") == 2
    assert (len(life.worker(1).gpus), len(life.free())) == (1, 2)
    assert told(life, order=order(life), asleep=False) == []
    assert (life.events(), life.state(1), life.worker(1).due_s) == (["Woken"], "ready", None)
    assert life.fleet.gpus.sleepers == {}


def test_woken_before_it_sleeps_it_was_never_away() -> None:
    """Its GPU stays its own."""
    life = some("ready", "ready")
    life.feed(sleep())
    assert life.feed(wake()) == ["order to wake VllmWorker_1"]
    assert life.state(1) == "waking"
    assert told(life, order=order(life) - 1, asleep=True) == []  # it slept before the second order reached it
    assert life.state(1) == "waking"
    told(life, order=order(life), asleep=False)
    assert life.state(1) == "ready"


def test_what_it_says_of_an_earlier_order_is_out_of_date() -> None:
    """A list of all keys, after etcd was away, shows what was before the order."""
    life = some("ready", "ready")
    life.feed(sleep())
    told(life, order=0, asleep=False)
    assert life.state(1) == "falling_asleep"


def test_an_order_of_which_nobody_knows_is_given_again() -> None:
    """The same number: the worker takes it once."""
    life = some("ready", "ready")
    life.feed(sleep())
    answered(life, error="no answer within 2 s")
    assert life.after(ASK_AGAIN_S) == ["order to sleep at level 1 VllmWorker_1"]
    (again,) = life.did(ins.OrderSleep)
    assert again.order == order(life)
    answered(life)
    assert life.worker(1).standby.ask_s is None


def test_one_that_will_not_sleep_serves_on() -> None:
    """A person is told why."""
    life = some("ready", "ready")
    life.feed(sleep())
    answered(life, refused="this worker cannot sleep: it has no sleep mode")
    assert (life.state(1), life.fleet.capacity("VllmWorker")) == ("ready", 2)
    assert "it has no sleep mode" in life.told[-1]


# --- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("life", "stimulus", "error", "why"),
    [
        (some("ready"), sleep(0), LastReadyWorker, "the last ready worker of VllmWorker"),
        (Life(fleet("ready", "ready")), sleep(), NotSleepable, "set `ServiceArgs.standby` of VllmWorker"),
        (some("ready", "starting"), sleep(), NotSleepable, "only a ready worker"),
        (some("ready", "ready"), sleep(level=3), NotSleepable, "there is no sleep level 3"),
        (asleep("ready", "ready"), sleep(level=2), NotSleepable, "sleeping at level 1 already"),
        (some("ready", "starting"), wake(), NotWakeable, "not asleep"),
        (asleep("ready", "ready", max_workers=1), wake(), TooManyWorkers, "its class allows 1"),
    ],
)
def test_refusals_change_nothing(life: Life, stimulus: st.Stimulus, error: type[DynamoError], why: str) -> None:
    """Each says why."""
    before = life.fleet
    with pytest.raises(error, match=why):
        life.feed(stimulus)
    assert life.fleet is before


def test_too_little_main_memory_is_said_with_the_numbers() -> None:
    """Level 1 keeps the weights there, level 2 does not."""
    life = some("ready", "ready")
    told(life, rehearsed_bytes=16 * GIB)
    life.gpus(host_free_bytes=4 * GIB)
    with pytest.raises(NotEnoughMemory, match=r"takes 16\.0 GiB of main memory for its weights, 4\.0 GiB are free"):
        life.feed(sleep())
    assert life.feed(sleep(level=2)) == ["order to sleep at level 2 VllmWorker_1"]


def test_what_is_so_already_is_no_refusal() -> None:
    """Nothing happens."""
    life = asleep("ready", "ready")
    assert life.feed(sleep()) == []
    life.feed(wake())
    assert life.feed(wake()) == []


# --- the GPU meanwhile -----------------------------------------------------------------------------


def given_away() -> Life:
    """One device; `_1` sleeps on it, and a prefill worker has it."""
    life = asleep("ready", "ready", gpus=2)
    life.feed(scale(1, "PrefillWorker"))
    assert [worker.gpus for worker in life.fleet.of("PrefillWorker")] == [life.fleet.gpus.sleepers[name(1)].uuids]
    return life


def test_a_sleeper_whose_gpu_is_held_is_not_woken_and_the_holder_is_named() -> None:
    """Nor by a scale, which looks for another device and finds none."""
    life = given_away()
    with pytest.raises(NotWakeable, match="dynamo_PrefillWorker holds GPU 1"):
        life.feed(wake())
    with pytest.raises(DynamoError, match=r"dynamo_VllmWorker_1 sleeps on GPU 1 and keeps 1\.0 GiB there"):
        life.feed(scale(1))


def test_a_wake_waits_for_a_holder_that_leaves() -> None:
    """It is capacity on its way, and has the device before anybody who looks for any."""
    life = given_away()
    prefill = name(component="PrefillWorker")
    pid = pid_of(0, PREFILL)
    life.feed(st.SpawnBegun(stimulus_id="spawn", name=prefill))
    life.feed(st.ProcessMade(stimulus_id="spawn", name=prefill, pid=pid, start_time=1.0, started_at=1.0))
    life.feed(st.Drain(stimulus_id="drain:1", name=prefill, force=True))
    assert life.feed(wake()) == ["look at GPUs"]
    assert (life.state(1), life.worker(1).on_its_way) == ("sleeping", True)
    life.feed(st.ProcessGone(stimulus_id="exit", name=prefill, pid=pid, code=0))
    life.feed(st.Swept(stimulus_id="sweep", name=prefill))
    assert "order to wake VllmWorker_1" in life.gpus()
    assert life.state(1) == "waking"


def test_beside_a_residue_that_is_too_large_nobody_is_started() -> None:
    """With the numbers."""
    life = some("ready", "ready", gpus=2)
    life.feed(sleep())
    told(life, order=order(life), asleep=True, vram_bytes=20 * GIB)
    life.gpus()
    with pytest.raises(DynamoError, match=r"sleeps on GPU 1 and keeps 20\.0 GiB there"):
        life.feed(scale(1, "PrefillWorker"))


def test_a_sleeper_of_unknown_residue_shares_its_device_with_nobody() -> None:
    """Missing is not zero."""
    life = some("ready", "ready", gpus=2)
    life.feed(sleep())
    life.registered(1, standby=StandbyFacts(order=order(life), asleep=True))
    life.gpus()
    with pytest.raises(DynamoError, match="keeps an unknown amount"):
        life.feed(scale(1, "PrefillWorker"))


# --- scaling ---------------------------------------------------------------------------------------


def test_one_more_wakes_a_sleeper_before_it_starts_another() -> None:
    """Unless told not to."""
    life = asleep("ready", "ready")
    other = Life(life.fleet)
    assert life.feed(scale(1)) == ["order to wake VllmWorker_1"]
    assert other.feed(scale(1, wake=False)) == ["spawn VllmWorker_2"]


def test_one_that_is_being_woken_goes_on_sleeping_when_fewer_are_wanted() -> None:
    """Its streams have not begun."""
    life = asleep("ready", "ready")
    life.feed(wake())
    assert life.feed(scale(-1)) == ["order to sleep at level 1 VllmWorker_1"]
    assert life.state(1) == "falling_asleep"


# --- what goes wrong -------------------------------------------------------------------------------


def test_streams_without_end_are_not_cut_for_a_sleep() -> None:
    """It is woken, which does them no harm."""
    life = some("ready", "ready")
    life.feed(sleep())
    answered(life)
    assert life.until_due() == [
        "tell: dynamo_VllmWorker_1: it was not asleep 720 s after it was asked to; it serves again",
        "order to wake VllmWorker_1",
    ]


def test_one_that_does_not_wake_is_ended_and_started_again() -> None:
    """Its start deadline is its wake's."""
    life = asleep("ready", "ready")
    life.feed(wake())
    answered(life)
    life.until_due()
    assert (life.state(1), life.events()) == ("crashed", ["HealthFailed"])
    assert life.did(ins.EndSession)
    assert "was not awake 300 s after" in (life.worker(1).reason or "")


@pytest.mark.parametrize(("state", "again"), [("falling_asleep", True), ("sleeping", True), ("waking", False)])
def test_a_crash_brings_it_back_to_what_it_was_meant_to_be(state: str, again: bool) -> None:
    """A sleeper is started to sleep, one that was being woken to serve."""
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
    """A probe that was answered otherwise, for one."""
    life = asleep("ready", "ready")
    life.feed(wake())
    life.registered(1, failed=True, why="WakeCorrupted: after wake 2 the engine answers otherwise")
    life.gone(1, 1)
    assert (life.worker(1).reason or "").startswith("WakeCorrupted: after wake 2")


def test_one_that_answers_nothing_is_hung_asleep_or_not() -> None:
    """It is health-checked as any."""
    life = asleep("ready", "ready")
    life.heard({0: Load(), 1: Load()})
    for _ in range(40):
        life.now_s += 1.0
        life.heard({0: Load()})
    assert life.state(1) == "crashed"


@pytest.mark.parametrize("state", ["falling_asleep", "sleeping", "waking"])
def test_a_drain_of_one_on_standby_is_not_taken_back(state: str) -> None:
    """There is no way back into routing: its engine may sleep."""
    life = some("ready", state)
    life.feed(st.Drain(stimulus_id="drain:1", name=name(1)))
    assert life.state(1) == "draining"
    with pytest.raises(DrainNotCancellable, match="it was asleep"):
        life.feed(st.CancelDrain(stimulus_id="cancel:1", name=name(1)))
    assert life.feed(scale(1)) == ["spawn VllmWorker_2"]
    life.gone(1, 0)
    life.swept(1)
    life.gpus()
    assert life.state(1) == "gone"


@pytest.mark.parametrize("heard_first", [True, False])
def test_a_lease_revoked_outside_is_an_order_to_leave_asleep_too(heard_first: bool) -> None:
    """It exits in order, and is not started again."""
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
    """It was stopped, and still sleeps."""
    life = asleep("ready", "ready")
    life.key_gone(1)
    life.registered(1, "abc", standby=StandbyFacts(order=order(life), asleep=True))
    assert (life.state(1), life.worker(1).lease, life.worker(1).lease_gone) == ("sleeping", "abc", False)


# --- kept ------------------------------------------------------------------------------------------


def kept(count: int = 1, gpus: int = 3) -> Life:
    """One worker that serves, so many to be kept asleep."""
    return some("ready", gpus=gpus, standby=count)


def test_so_many_are_started_and_put_to_sleep() -> None:
    """They are no capacity from the first; what is woken is replaced."""
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
    """They have none to start on."""
    life = kept(gpus=1)
    life.feed(st.Tick())
    life.gpus()
    assert life.states() == ["ready"]


def test_one_that_is_still_to_sleep_is_simply_left_awake() -> None:
    """It starts anyway."""
    life = kept(gpus=2)
    life.feed(st.Tick())
    life.gpus()
    life.made(1)
    life.feed(scale(1))
    assert life.fleet.capacity("VllmWorker") == 2
    told(life)
    assert life.state(1) == "ready"


def test_an_engine_that_cannot_sleep_is_found_out_once() -> None:
    """The worker leaves, no other one is started for it, and a person is told."""
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
    """They are no reason to hold up those that serve."""
    life = asleep("ready", "ready", "ready")
    life.feed(st.Restart(stimulus_id="restart:1", target="VllmWorker"))
    assert life.states() == ["ready", "draining/restarting", "draining/restarting"]


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
    """In their stage."""
    life = asleep("ready", "ready")
    life.feed(st.Leave(stimulus_id="down"))
    assert life.states() == ["draining", "draining"]


def test_the_fleet_says_who_is_what() -> None:
    """Sleepers are no capacity, and give no device back to anybody who hopes for some."""
    fleet_: Fleet = asleep("ready", "ready").fleet
    sleeper = fleet_.workers[name(1)]
    assert (sleeper.counts, sleeper.stands_by, sleeper.settled, sleeper.cancellable) == (False, True, True, False)
    assert fleet_.gpus_coming_back() == 0
