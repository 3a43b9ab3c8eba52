"""`validate` finds each kind of fleet that cannot be: every one is made by breaking one that can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamo_local.core.fleet.fleet import Fleet, FlipTarget, GpusPendingRelease, Intent, Leaving
from dynamo_local.core.fleet.invariants import Violated, validate
from dynamo_local.core.types import WorkerState
from tests.fakes.arbiter.fleet_views import fleet, name, on_ledger, put, worker

STATES = [
    "pending",
    "starting",
    "ready",
    "draining",
    "drain_timed_out",
    "crashed",
    "start_timed_out",
    "backing_off",
    "flipping",
]
STATES = ["pending", "starting", "ready", "draining", "drain_timed_out", "crashed", "start_timed_out", "backing_off"]
STANDBY = ["falling_asleep", "sleeping", "waking"]
COURSES = ["draining/restarting", "draining/returning", "exited/restarting", "exited/returning", "crashed/leaving"]
BUSY = worker(0, "ready").process


@pytest.mark.parametrize("state", [*STATES, *COURSES, *STANDBY, "faulted", "exited"])
def test_each_state_can_be(state: str) -> None:
    validate(fleet("ready", state))


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("ready", {"n": 3}, "is not called as its component and suffix say"),
    ("faulted", {"process": BUSY}, "has a process, or one that is being made"),
    ("pending", {"spawning": True}, "has a process, or one that is being made"),
    ("exited", {"process": BUSY}, "has a process, or one that is being made"),
    ("backing_off", {"process": BUSY}, "has a process, or one that is being made"),
    ("ready", {"process": None}, "has no process, and none is being made"),
    ("draining", {"process": None}, "has no process, and none is being made"),
    ("starting", {"process": None}, "has no process, and none is being made"),
    ("starting", {"spawning": True}, "has a process and another one is being made"),
    ("ready", {"sweeping": True}, "has a process while the last one's remains are cleared"),
    (
        "starting",
        {"gpus_pending_release": GpusPendingRelease(0.0)},
        "has a process while the last one's remains are cleared",
    ),
    ("ready", {"served": False}, "serves and never was ready"),
    ("ready", {"intent": Intent.RETURNING}, "is called back from no drain"),
    ("backing_off", {"intent": Intent.RETURNING}, "is called back from no drain"),
    ("ready", {"intent": Intent.LEAVING}, "is waited for, though nothing of it is being ended"),
    ("starting", {"due_s": None}, "is forgotten: no deadline for its start"),
    ("draining", {"due_s": None}, "is forgotten: no deadline for its drain"),
    ("backing_off", {"due_s": None}, "is forgotten: nothing starts it"),
    (
        "backing_off",
        {"due_s": None, "waiting_for_infra": True},
        "is forgotten: it waits for etcd and NATS, which answer",
    ),
    ("crashed", {"sweeping": False}, "is forgotten: its process is gone and nothing follows"),
    ("start_timed_out", {"sweeping": False}, "is forgotten: its process is gone and nothing follows"),
    ("falling_asleep", {"due_s": None}, "is forgotten: no deadline for its order"),
    ("waking", {"due_s": None}, "is forgotten: no deadline for its order"),
    ("sleeping", {"gpus": ("one",)}, "is booked as asleep"),
    (
        "exited",
        {"gpus_pending_release": GpusPendingRelease(0.0)},
        "is forgotten: nobody looks whether its GPUs come back",
    ),
    ("flipping", {"flip": None}, "is flipping, and becomes None"),
    ("flipping", {"process": None}, "has no process, and none is being made"),
    ("flipping", {"flip": FlipTarget(name(1, "PrefillWorker"), "PrefillWorker", 1)}, "nobody asks how far its change"),
    ("ready", {"flip": FlipTarget(name(1, "PrefillWorker"), "PrefillWorker", 1)}, "is ready, and becomes"),
]


def test_a_process_in_two_roles_is_found() -> None:
    begun = fleet("ready", "ready")
    with pytest.raises(Violated, match="two workers have the same name at birth"):
        validate(put(begun, name(1), spawned_as=name()))
    with pytest.raises(Violated, match="two workers have the same pid"):
        validate(put(begun, name(1), process=begun.workers[name()].process))


def test_two_workers_that_would_be_called_alike_are_found() -> None:
    """And one that would be called as somebody who runs."""
    begun = fleet("flipping", "flipping")
    both = begun.workers[name()].flip
    with pytest.raises(Violated, match="two workers have the same name to become"):
        validate(put(begun, name(1), flip=both))
    taken = FlipTarget(name(2), "VllmWorker", 2, asking=True)
    with pytest.raises(Violated, match="becomes dynamo_VllmWorker_2, which is ready"):
        validate(put(fleet("flipping", None, "ready"), name(), flip=taken))


@pytest.mark.parametrize(("state", "broken", "why"), BROKEN)
def test_a_worker_that_cannot_be_is_found(state: str, broken: dict[str, Any], why: str) -> None:
    with pytest.raises(Violated) as found:
        validate(put(fleet("ready", state), name(1), **broken))
    assert why in str(found.value)
    assert name(1) in str(found.value)


def test_a_pending_worker_that_nobody_looks_for_is_forgotten() -> None:
    begun = fleet("ready", "pending")
    with pytest.raises(Violated, match="is forgotten: nothing starts it"):
        validate(replace(begun, look_s=None))
    validate(replace(begun, look_s=None, looking=True))


def test_a_run_that_leaves_starts_nobody_and_that_is_no_forgetting() -> None:
    validate(replace(fleet("ready", "pending"), look_s=None, leaving=Leaving()))


def _two_holders(begun: Fleet) -> Fleet:
    first = begun.workers[name()].gpus
    ledger = replace(begun.gpus, held_uuids={name(): first, name(1): first})
    return replace(put(begun, name(1), gpus=first), gpus=ledger)


GPUS: list[tuple[Any, str]] = [
    (lambda begun: replace(begun, gpus=begun.gpus.release(name(1))), "the ledger says"),
    (lambda begun: put(begun, name(1), gpus=()), "the ledger says"),
    (lambda begun: replace(begun, gpus=begun.gpus.allocate("dynamo_Nobody", 1)), "the ledger says"),
    (_two_holders, "devices are counted as"),
    (
        lambda begun: replace(
            begun, gpus=replace(begun.gpus, quarantined={begun.workers[name(1)].gpus[0]: "held and quarantined"})
        ),
        "devices are counted as",
    ),
]


@pytest.mark.parametrize(("breaks", "why"), GPUS)
def test_devices_in_two_places_or_in_none_are_found(breaks: Any, why: str) -> None:
    with pytest.raises(Violated, match=why):
        validate(breaks(fleet("ready", "ready")))


@pytest.mark.parametrize("state", ["ready", "starting", "draining"])
def test_a_process_on_too_few_devices_is_found(state: str) -> None:
    """It would run on somebody else's."""
    begun = fleet("ready", state)
    with pytest.raises(Violated, match="runs on 0 GPUs, fewer than it needs"):
        validate(put(replace(begun, gpus=begun.gpus.release(name(1))), name(1), gpus=()))


def test_a_sleeper_of_which_the_ledger_knows_nothing_is_found() -> None:
    """Its residue would be somebody else's memory."""
    begun = fleet("ready", "sleeping")
    with pytest.raises(Violated, match="what it keeps is not booked"):
        validate(replace(begun, gpus=begun.gpus.release(name(1))))


def test_a_fault_that_keeps_its_devices_is_found() -> None:
    """It frees them, once their memory is back."""
    begun = on_ledger([worker(0, "ready"), worker(1, "faulted", gpus=("one",))], 2)
    with pytest.raises(Violated, match="holds GPUs that it does not give back"):
        validate(begun)
    validate(replace(put(begun, name(1), gpus_pending_release=GpusPendingRelease(0.0)), looking=True))


def test_every_broken_rule_is_named() -> None:
    begun = put(fleet("ready", "ready"), name(), served=False)
    with pytest.raises(Violated, match=f"{name()}.*; {name(1)}"):
        validate(put(begun, name(1), served=False))


def test_states_are_all_looked_at() -> None:
    tried = {state for state, *_ in BROKEN} | {"drain_timed_out"}
    assert {str(state) for state in WorkerState} <= tried
