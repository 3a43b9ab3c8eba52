"""A worker whose engine has died gives its lease back before it ends: that is no drain, it is started again."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_local.core.lifecycle import Event, LeaseRevoked, Registered
from dynamo_local.core.types import WorkerState
from dynamo_local.ports import DeleteEvent, KeyValue, PutEvent
from dynamo_local.serve.fleet import Worker
from dynamo_local.serve.registrations import Registrations

KEY = "dynamo/workers/dynamo_W:2a"


class FakeFleet:
    """One ready worker, and the events that were applied to it."""

    def __init__(self) -> None:
        worker = Worker(plan=SimpleNamespace(name="dynamo_W"), state=WorkerState.READY, since_s=0.0)  # type: ignore[arg-type]
        worker.pid = 7
        self.workers = {"dynamo_W": worker}
        self.events: list[Event] = []

    async def apply(self, events: dict[str, Event]) -> None:
        self.events += events.values()


def put(**facts: Any) -> PutEvent:
    return PutEvent(KeyValue(KEY, json.dumps({"pid": 7, **facts}).encode(), 0x2A))


@pytest.mark.parametrize(("failed", "seen"), [(True, [Registered]), (False, [Registered, LeaseRevoked])])
async def test_the_end_of_a_failed_workers_key_is_no_drain(failed: bool, seen: list[type[Event]]) -> None:
    fleet = FakeFleet()
    registrations = Registrations("dynamo", fleet, None)  # type: ignore[arg-type]
    await registrations._apply(put())
    if failed:
        await registrations._apply(put(failed=True))
    await registrations._apply(DeleteEvent(KEY))
    assert [type(event) for event in fleet.events] == seen
    assert fleet.workers["dynamo_W"].lease is None


async def test_the_leases_of_what_runs_behind_a_worker_are_noted_if_they_are_leases() -> None:
    """Any other word would make the statefile one that nobody can read."""
    fleet = FakeFleet()
    registrations = Registrations("dynamo", fleet, None)  # type: ignore[arg-type]
    await registrations._apply(put(leases="694d967da694ea16,7b,nonsense,0123456789abcdef0"))
    assert fleet.workers["dynamo_W"].other_leases == ("694d967da694ea16", "7b")


async def test_a_key_of_a_process_before_this_one_says_nothing() -> None:
    fleet = FakeFleet()
    registrations = Registrations("dynamo", fleet, None)  # type: ignore[arg-type]
    await registrations._apply(PutEvent(KeyValue(KEY, json.dumps({"pid": 6, "failed": True}).encode(), 0x2A)))
    assert not fleet.workers["dynamo_W"].failed
