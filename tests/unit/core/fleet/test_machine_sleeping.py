"""The machine: workers are put to sleep, kept asleep and woken, and what happens to them meanwhile."""

from __future__ import annotations

import pytest

from dynamo_local.core.fleet import effects as ins
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.fleet import StandbyFacts
from dynamo_local.core.fleet.sleeping import ASK_AGAIN_S, ENGINE_S
from dynamo_local.errors import DynamoError, LastReadyWorker, NotEnoughMemory, NotSleepable, NotWakeable, TooManyWorkers
from tests.fakes.arbiter.fleet_views import PREFILL, fleet, lease_of, name, pid_of
from tests.fakes.arbiter.machine import Life
from tests.fakes.sleepers import GIB, answered, asleep, order, scale, sleep, some, told, wake

# --- there and back --------------------------------------------------------------------------------


def test_a_sleep_from_the_word_to_the_end() -> None:
    """Committed, ordered; its GPU is its own until it says that it sleeps, and then somebody else's to have."""
    life = some("ready", "ready")
    assert life.feed(sleep()) == ["order to sleep at level 1 VllmWorker_1"]
    assert [type(each).__name__ for each in life.last] == ["Commit", "Order"]
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
    life = asleep("ready", "ready")
    assert life.feed(wake()) == ["order to wake VllmWorker_1"]
    assert (life.events(), life.state(1)) == (["WakeRequested"], "waking")
    assert life.fleet.capacity("VllmWorker") == 2
    assert (len(life.worker(1).gpus), len(life.free())) == (1, 2)
    assert told(life, order=order(life), asleep=False) == []
    assert (life.events(), life.state(1), life.worker(1).due_s) == (["Woken"], "ready", None)
    assert life.fleet.gpus.sleepers == {}


def test_woken_before_it_sleeps_it_was_never_away() -> None:
    life = some("ready", "ready")
    life.feed(sleep())
    assert life.feed(wake()) == ["order to wake VllmWorker_1"]
    assert life.state(1) == "waking"
    assert told(life, order=order(life) - 1, asleep=True) == []  # it slept before the second order reached it
    assert life.state(1) == "waking"
    told(life, order=order(life), asleep=False)
    assert life.state(1) == "ready"


def test_what_it_says_of_an_earlier_order_is_out_of_date() -> None:
    life = some("ready", "ready")
    life.feed(sleep())
    told(life, order=0, asleep=False)
    assert life.state(1) == "falling_asleep"


def test_an_order_of_which_nobody_knows_is_given_again() -> None:
    life = some("ready", "ready")
    life.feed(sleep())
    answered(life, error="no answer within 2 s")
    assert life.after(ASK_AGAIN_S) == ["order to sleep at level 1 VllmWorker_1"]
    (again,) = life.did(ins.Order)
    assert again.order == order(life)
    answered(life)
    assert life.worker(1).standby.ask_s is None


def test_one_that_will_not_sleep_serves_on() -> None:
    life = some("ready", "ready")
    life.feed(sleep())
    answered(life, refused="this worker cannot sleep: it has no sleep mode")
    assert (life.state(1), life.fleet.capacity("VllmWorker")) == ("ready", 2)
    assert "it has no sleep mode" in life.told[-1]


# --- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("life", "event", "error", "why"),
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
def test_refusals_change_nothing(life: Life, event: st.Event, error: type[DynamoError], why: str) -> None:
    before = life.fleet
    with pytest.raises(error, match=why):
        life.feed(event)
    assert life.fleet is before


def test_too_little_main_memory_is_said_with_the_numbers() -> None:
    life = some("ready", "ready")
    told(life, rehearsed_bytes=16 * GIB)
    life.gpus(host_free_bytes=4 * GIB)
    with pytest.raises(NotEnoughMemory, match=r"takes 16\.0 GiB of main memory for its weights, 4\.0 GiB are free"):
        life.feed(sleep())
    assert life.feed(sleep(level=2)) == ["order to sleep at level 2 VllmWorker_1"]


def test_what_is_so_already_is_no_refusal() -> None:
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
    life = given_away()
    with pytest.raises(NotWakeable, match="dynamo_PrefillWorker holds GPU 1"):
        life.feed(wake())
    with pytest.raises(DynamoError, match=r"dynamo_VllmWorker_1 sleeps on GPU 1 and keeps 1\.0 GiB there"):
        life.feed(scale(1))


def test_a_wake_waits_for_a_holder_that_leaves() -> None:
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
    life = some("ready", "ready", gpus=2)
    life.feed(sleep())
    told(life, order=order(life), asleep=True, vram_bytes=20 * GIB)
    life.gpus()
    with pytest.raises(DynamoError, match=r"sleeps on GPU 1 and keeps 20\.0 GiB there"):
        life.feed(scale(1, "PrefillWorker"))


def test_a_sleeper_of_unknown_residue_shares_its_device_with_nobody() -> None:
    life = some("ready", "ready", gpus=2)
    life.feed(sleep())
    life.registered(1, standby=StandbyFacts(order=order(life), asleep=True))
    life.gpus()
    with pytest.raises(DynamoError, match="keeps an unknown amount"):
        life.feed(scale(1, "PrefillWorker"))


# --- scaling ---------------------------------------------------------------------------------------


def test_one_more_wakes_a_sleeper_before_it_starts_another() -> None:
    life = asleep("ready", "ready")
    other = Life(life.fleet)
    assert life.feed(scale(1)) == ["order to wake VllmWorker_1"]
    assert other.feed(scale(1, wake=False)) == ["spawn VllmWorker_2"]


def test_one_that_is_being_woken_goes_on_sleeping_when_fewer_are_wanted() -> None:
    life = asleep("ready", "ready")
    life.feed(wake())
    assert life.feed(scale(-1)) == ["order to sleep at level 1 VllmWorker_1"]
    assert life.state(1) == "falling_asleep"
