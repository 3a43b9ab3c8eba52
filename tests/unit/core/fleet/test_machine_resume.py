"""The machine: a successor goes on with every worker where the killed arbiter stood."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.core.fleet import effects as ins
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.fleet import RestartPlan, Worker
from dynamo_local.core.types import WorkerState
from tests.fakes.arbiter.fleet_views import fleet, lease_of, name, pid_of, worker
from tests.fakes.arbiter.machine import Life, story

ONE = f"revoke {lease_of(1)} VllmWorker_1"
END = f"end session {pid_of(1)} VllmWorker_1"


def adopted(n: int, state: str, *, lives: bool = True) -> Worker:
    """As `arbiter.adoption` makes it: nothing is due, nothing is being cleared, and the registry has the lease."""
    found = worker(n, state)
    asked_s = 90.0 if found.state is WorkerState.DRAINING else None
    process = found.process or (worker(n, "ready").process if found.state.endswith(("crashed", "timed_out")) else None)
    return found.changed(
        due_s=None,
        sweeping=False,
        signalled=False,
        requested_at_s=asked_s,
        process=process if lives else None,
        starts=1,
    )


def resume(*workers: Worker, gone: tuple[int, ...] = (), **more: object) -> Life:
    """One that serves, and these."""
    begun = replace(fleet("ready", *workers), look_s=None, **more)  # type: ignore[arg-type]
    life = Life(fleet())
    life.fleet = begun  # nothing is under way yet: `validate` holds from the first step on
    life.feed(st.Resume(stimulus_id="adoption", gone={name(n): pid_of(n) for n in gone}))
    return life


def done(life: Life) -> list[str]:
    """What is done to the world."""
    return story(life.last)


@pytest.mark.parametrize(
    ("before", "after", "does"),
    [
        ("ready", "ready", []),
        ("starting", "starting", []),
        ("draining", "draining", [ONE]),
        ("draining/restarting", "draining/restarting", [ONE]),
        ("draining/returning", "draining/returning", ["call back VllmWorker_1"]),
        ("drain_timed_out", "drain_timed_out", [END]),
        ("crashed", "crashed", [END]),
        ("start_timed_out", "start_timed_out", [END]),
    ],
)
def test_whoever_lives_goes_on_as_was_decided(before: str, after: str, does: list[str]) -> None:
    life = resume(adopted(1, before))
    assert (life.state(1), done(life)) == (after, does)
    assert life.worker(1).pid == pid_of(1)
    assert (life.worker(1).due_s is None) == (before == "ready")


@pytest.mark.parametrize(
    ("before", "after", "does"),
    [
        ("pending", "starting", ["spawn VllmWorker_1"]),
        ("backing_off", "starting", ["spawn VllmWorker_1"]),
        ("faulted", "faulted", []),
        ("exited", "gone", ["forget VllmWorker_1"]),
        ("exited/restarting", "starting", ["spawn VllmWorker_1"]),
        ("exited/returning", "starting", ["spawn VllmWorker_1"]),
    ],
)
def test_whoever_has_no_process_goes_on_too(before: str, after: str, does: list[str]) -> None:
    life = resume(adopted(1, before, lives=False))
    assert (life.state(1), [each for each in done(life) if not each.startswith("report")]) == (after, does)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ready", "backing_off"),
        ("starting", "backing_off"),
        ("draining", "gone"),
        ("draining/restarting", "starting"),
        ("draining/returning", "starting"),
        ("drain_timed_out", "gone"),
        ("crashed", "backing_off"),
        ("crashed/leaving", "gone"),
        ("start_timed_out", "backing_off"),
    ],
)
def test_a_process_that_ended_while_nobody_watched_is_a_process_that_ended(before: str, after: str) -> None:
    """Swept, its device seen to be empty, and what follows its state follows."""
    life = resume(adopted(1, before, lives=False), gone=(1,))
    assert "sweep VllmWorker_1" in done(life)
    life.swept(1)
    life.gpus()
    assert life.state(1) == after


def test_leases_of_those_that_are_gone_are_revoked() -> None:
    life = resume(adopted(1, "ready", lives=False).changed(other_leases=("abc",)), gone=(1,))
    assert {each.lease for each in life.did(ins.Revoke)} == {lease_of(1), "abc"}


def test_a_worker_that_the_registry_does_not_know_has_left_routing() -> None:
    life = resume(adopted(1, "ready").changed(lease=None))
    assert life.state(1) == "draining"
    assert "while nobody watched" in (life.worker(1).reason or "")


def test_a_drains_deadline_goes_on_from_when_it_was_asked() -> None:
    life = resume(adopted(1, "draining"))
    assert life.worker(1).due_s == 90.0 + 600.0


def test_a_restart_goes_on_with_the_next() -> None:
    plan = RestartPlan("restart:1", ((name(1), 1), (name(), 1)), begun=frozenset({name(1)}))
    life = resume(adopted(1, "exited/restarting", lives=False), restarts=(plan,))
    assert life.state(1) == "starting"
    life.up(1, 71)
    assert life.state(0) == "draining/restarting"


def test_a_faulted_workers_devices_go_back() -> None:
    life = resume(adopted(1, "faulted", lives=False).changed(gpus=("one",)))
    life.gpus()
    assert (life.worker(1).gpus, life.state(1)) == ((), "faulted")


def test_a_worker_that_was_to_have_its_devices_again_waits_for_their_memory() -> None:
    life = resume(adopted(1, "pending", lives=False).changed(gpus=("one",)))
    assert (life.state(1), done(life)) == ("pending", ["look at GPUs"])
    busy = tuple(replace(device, memory_used_bytes=2**36) for device in life.fleet.gpus.devices)
    assert life.gpus(devices=busy) == []
    assert life.gpus(devices=tuple(replace(device, memory_used_bytes=0) for device in busy)) == ["spawn VllmWorker_1"]


def test_a_back_off_whose_device_was_taken_meanwhile_looks_for_another() -> None:
    life = resume(adopted(1, "backing_off", lives=False).changed(gpus=("one",)))
    life.feed(st.GpuReserved(stimulus_id="x", uuid=life.worker(1).gpus[0], who="namespace other"))
    assert life.worker(1).gpus == ()
    assert life.gpus(elsewhere={life.device(1).uuid: "namespace other"}) == ["spawn VllmWorker_1"]
    assert life.worker(1).gpus == (life.device(2).uuid,)
