"""The fleet as a value: what counts, what is kept for whom, and that nothing moves under a decision."""

from __future__ import annotations

import pytest

from dynamo_local.core.fleet.fleet import Intent
from dynamo_local.core.fleet.lifecycle import NEXT
from dynamo_local.core.fleet.lifecycle import TransitionKind as K
from dynamo_local.core.fleet.moves import (
    BeginDrain,
    CancelDrain,
    Revive,
    SpawnWorker,
    TakeBack,
    intent_after,
    transition_for,
)
from dynamo_local.core.gpus import GpuAsk, GpuLedger, shortage
from dynamo_local.core.types import WorkerState as S
from dynamo_local.system.gpus import SimInventory
from tests.fakes.arbiter.decided import drained
from tests.fakes.arbiter.fleet_views import PREFILL, fleet, name, on_ledger, worker


def test_a_ledger_does_not_move_under_a_decision() -> None:
    before = GpuLedger.of(SimInventory(2).sample())
    then = before.allocate("a", 1)
    assert (len(before.free), dict(before.held)) == (2, {})
    assert (len(then.free), list(then.held)) == (1, ["a"])


def test_a_shortage_says_what_is_kept_for_others() -> None:
    ledger = GpuLedger.of(SimInventory(2).sample())
    asks = [GpuAsk("a", "A", 3)]
    assert "kept for" not in shortage(ledger, asks)
    assert "1 free kept for b;" in shortage(ledger, asks, {"b": 1})


def test_devices_are_kept_for_who_lacks_them_and_come_back_from_who_leaves() -> None:
    workers = [
        worker(0, "backing_off"),
        worker(1, "draining"),
        worker(2, "draining/restarting"),
        worker(3, "faulted"),
        worker(0, "pending", PREFILL),
    ]
    view = on_ledger(workers, 8)
    assert view.promised() == {name(): 1, name(0, "PrefillWorker"): 1}
    assert view.gpus_coming_back() == 1


def test_entries_are_listed_from_the_bare_name_up() -> None:
    view = on_ledger([worker(n, "exited") for n in (10, 2, 0)], 0)
    assert [w.n for w in view.of("VllmWorker")] == [0, 2, 10]


def test_a_worker_is_found_by_its_name_with_and_without_the_namespace() -> None:
    """`dynamo scale` and `restart` speak of `VllmWorker`: who drains `VllmWorker_1` means the worker of that name."""
    view = on_ledger([worker(0, "ready"), worker(1, "ready")], 2)
    assert view.worker(name(1)) is view.worker("VllmWorker_1") is view.find("VllmWorker_1")
    assert view.find("VllmWorker_2") is None
    assert view.find("VllmWorker") is view.worker(name(0))
    drain = drained(view, "VllmWorker_1")
    assert [step.name for step in drain.moves] == [name(1)]


@pytest.mark.parametrize(
    ("move", "state", "event", "course"),
    [
        (Revive(name(), "VllmWorker", 1), S.FAULTED, K.RESTART_REQUESTED, Intent.STEADY),
        (BeginDrain(name(), "why"), S.READY, K.DRAIN_REQUESTED, Intent.STEADY),
        (BeginDrain(name(), restart=True), S.READY, K.DRAIN_REQUESTED, Intent.RESTARTING),
        (BeginDrain(name()), S.DRAINING, None, Intent.STEADY),
        (CancelDrain(name()), S.DRAINING, None, Intent.RETURNING),
        (TakeBack(name()), S.STARTING, K.DRAIN_REQUESTED, Intent.STEADY),
        (TakeBack(name()), S.PENDING, K.REMOVED, Intent.STEADY),
        (TakeBack(name()), S.BACKING_OFF, K.REMOVED, Intent.STEADY),
        (TakeBack(name()), S.FAULTED, K.REMOVED, Intent.STEADY),
        (TakeBack(name()), S.CRASHED, None, Intent.LEAVING),
        (TakeBack(name()), S.START_TIMED_OUT, None, Intent.LEAVING),
        (TakeBack(name()), S.DRAINING, None, Intent.STEADY),
        (SpawnWorker(name(), "VllmWorker", 0, 1), S.PENDING, None, Intent.STEADY),
    ],
)
def test_a_move_has_one_event_and_one_course(
    move: SpawnWorker | Revive | BeginDrain | CancelDrain | TakeBack,
    state: S,
    event: K | None,
    course: Intent,
) -> None:
    """It is committed before it is acted on, and legal in that state."""
    assert transition_for(move, state) == event
    assert intent_after(worker(0, state), move) is course
    assert event is None or (state, event) in NEXT


def test_capacity_is_what_serves_or_will() -> None:
    view = fleet("ready", "starting", "draining/returning", "draining")
    assert view.capacity("VllmWorker") == 3
    assert [w.n for w in view.on_their_way("VllmWorker")] == [1, 2]
