"""The fleet as a value: what counts, what is kept for whom, and that nothing moves under a decision."""

from __future__ import annotations

import pytest

from dynamo_local.core.fleet.builder import StepBuilder
from dynamo_local.core.fleet.commands import carry_out
from dynamo_local.core.fleet.fleet import Intent
from dynamo_local.core.fleet.lifecycle import TransitionKind as K
from dynamo_local.core.fleet.moves import Move
from dynamo_local.core.fleet.moves import MoveKind as M
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
    ("move", "state", "kind", "intent"),
    [
        (Move(M.SPAWN, name()), S.FAULTED, K.RESTART_REQUESTED, Intent.STEADY),
        (Move(M.DRAIN, name(), "why"), S.READY, K.DRAIN_REQUESTED, Intent.STEADY),
        (Move(M.DRAIN, name(), restart=True), S.READY, K.DRAIN_REQUESTED, Intent.RESTARTING),
        (Move(M.DRAIN, name()), S.DRAINING, None, Intent.STEADY),
        (Move(M.CANCEL_DRAIN, name()), S.DRAINING, None, Intent.RETURNING),
        (Move(M.TAKE_BACK, name()), S.STARTING, K.DRAIN_REQUESTED, Intent.STEADY),
        (Move(M.TAKE_BACK, name()), S.PENDING, K.REMOVED, Intent.STEADY),
        (Move(M.TAKE_BACK, name()), S.BACKING_OFF, K.REMOVED, Intent.STEADY),
        (Move(M.TAKE_BACK, name()), S.FAULTED, K.REMOVED, Intent.STEADY),
        (Move(M.TAKE_BACK, name()), S.CRASHED, None, Intent.LEAVING),
        (Move(M.TAKE_BACK, name()), S.START_TIMED_OUT, None, Intent.LEAVING),
        (Move(M.TAKE_BACK, name()), S.DRAINING, None, Intent.STEADY),
    ],
)
def test_a_move_commits_one_transition_and_one_intent(move: Move, state: S, kind: K | None, intent: Intent) -> None:
    builder = StepBuilder(on_ledger([worker(0, state)], 1), 0.0, "t")
    carry_out(builder, [move])
    assert [each.kind for each in builder.transitions[:1]] == ([] if kind is None else [kind])
    assert builder.worker(name()).intent is intent


def test_capacity_is_what_serves_or_will() -> None:
    view = fleet("ready", "starting", "draining/returning", "draining")
    assert view.capacity("VllmWorker") == 3
    assert [w.n for w in view.on_their_way("VllmWorker")] == [1, 2]
