"""The machine: how workers leave, are called back, and are ended at their deadline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.core.fleet import effects as ins
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.events import Change
from dynamo_local.core.types import Missing
from dynamo_local.errors import DrainNotCancellable, LastReadyWorker
from tests.fakes.arbiter.fleet_views import FRONTEND, PREFILL, fleet, lease_of, load, name, on_ledger, pid_of, worker
from tests.fakes.arbiter.machine import Life

ONE = f"revoke {lease_of(1)} VllmWorker_1"
PID = pid_of(1)


def drain(n: int = 1, *, force: bool = False) -> st.Drain:
    """`dynamo drain`"""
    return st.Drain(stimulus_id="drain:1", name=name(n), force=force)


def cancel(n: int = 1) -> st.Drain:
    """`dynamo drain --cancel`"""
    return st.Drain(cancel=True, stimulus_id="cancel:1", name=name(n))


def scale(count: int) -> st.Scale:
    """`dynamo scale VllmWorker`"""
    return st.Scale(stimulus_id="scale:1", component="VllmWorker", target=Change(count, relative=True))


def draining() -> Life:
    """Two workers, `_1` has just been asked to leave."""
    life = Life(fleet("ready", "ready"))
    life.feed(drain())
    return life


def counted(n: int, in_flight: int | Missing, *requests: str, pid: int = PID) -> st.RequestsCounted:
    """What it still holds."""
    return st.RequestsCounted(
        stimulus_id="drain-deadline", name=name(n), pid=pid, in_flight=in_flight, requests=requests
    )


# --- asked to leave --------------------------------------------------------------------------------


def test_a_drain_from_the_word_to_the_end() -> None:
    """Committed, told, left alone until it is gone; then swept, its device seen to be empty, its entry removed."""
    life = Life(fleet("ready", "ready"))
    assert life.feed(drain()) == [ONE]
    assert [type(each).__name__ for each in life.last] == ["Commit", "Revoke"]
    assert (life.events(), life.state(1)) == (["DrainRequested"], "draining")
    assert (life.worker(1).leave.requested_at_s, life.worker(1).due_s) == (life.now_s, life.now_s + 600.0)
    assert life.key_gone(1) == []
    assert (life.state(1), life.worker(1).lease, life.worker(1).leave.lease_gone) == ("draining", None, False)
    assert life.gone(1) == ["sweep VllmWorker_1"]
    assert life.swept(1) == ["look at GPUs"]
    assert life.gpus() == ["forget VllmWorker_1"]
    assert life.states() == ["ready"]
    assert len(life.free()) == 7


@pytest.mark.parametrize(
    ("leaver", "sign"),
    [
        (worker(1, "ready", PREFILL), f"SIGTERM {pid_of(1, PREFILL)} PrefillWorker_1"),
        (worker(1, "ready", FRONTEND), f"SIGTERM {pid_of(1, FRONTEND)} Frontend_1"),
        (worker(1, "ready"), ONE),
        (worker(1, "ready", lease=None), f"SIGTERM {PID} VllmWorker_1"),
    ],
)
def test_each_is_asked_by_the_sign_that_fits_its_role(leaver: object, sign: str) -> None:
    who = leaver
    life = Life(on_ledger([who], 2))  # type: ignore[list-item]
    assert life.feed(st.Drain(stimulus_id="d", name=who.name, force=True)) == [sign]  # type: ignore[attr-defined]
    assert life.last[0] == ins.Commit((who.name,), life.did(ins.Commit)[0].transitions)  # type: ignore[attr-defined]


def test_where_the_lease_cannot_be_revoked_a_signal_says_the_same() -> None:
    life = draining()
    failed = st.RevokeFailed(stimulus_id="etcd", name=name(1), lease=lease_of(1), why="etcd is away")
    assert life.feed(failed) == [f"SIGTERM {PID} VllmWorker_1"]
    life.gone(1)
    assert life.feed(failed) == []


def test_the_last_ready_worker_is_not_drained_unforced() -> None:
    life = Life(fleet("ready", "starting"))
    before = life.fleet
    with pytest.raises(LastReadyWorker):
        life.feed(drain(0))
    assert life.fleet is before
    assert life.feed(drain(0, force=True)) == [f"revoke {lease_of(0)} VllmWorker"]


@pytest.mark.parametrize(("code", "reason"), [(0, "drain"), (None, "drain"), (1, "drain; exited with code 1 unasked")])
def test_however_it_ends_it_has_left(code: int | None, reason: str) -> None:
    life = draining()
    life.gone(1, code)
    assert (life.state(1), life.worker(1).reason, life.worker(1).ended.failure) == ("exited", reason, None)


def test_a_lease_revoked_from_outside_is_an_order_to_leave() -> None:
    life = Life(fleet("ready", "ready"))
    assert life.key_gone(1) == []
    assert (life.events(), life.state(1)) == (["LeaseRevoked"], "draining")
    gone = life.worker(1)
    assert (gone.leave.lease_gone, gone.leave.requested_at_s, gone.due_s) == (True, None, None)
    assert gone.reason == "its lease was revoked or has expired"
    life.gone(1, 1)
    life.swept(1)
    life.gpus()
    assert life.states() == ["ready"]


def test_a_lease_that_had_only_expired_comes_back() -> None:
    life = Life(fleet("ready", "ready"))
    life.key_gone(1)
    life.registered(1, "beef")
    assert (life.events(), life.state(1), life.worker(1).lease) == (["DrainCancelled"], "ready", "beef")
    assert not life.worker(1).leave.lease_gone


def test_one_that_hangs_after_its_lease_expired_is_a_crash() -> None:
    life = Life(fleet("ready", "ready"))
    life.heard({0: load(), 1: load()})
    life.key_gone(1)
    for _ in range(31):
        life.now_s += 1.0
        life.heard({0: load()})
    assert life.state(1) == "crashed"


def test_one_that_hangs_while_it_is_called_back_from_that_is_a_crash_like_any_other() -> None:
    """Found by the property machine: it would have been called back from no drain for the rest of its life."""
    life = Life(fleet("ready", "ready"))
    life.heard({0: load(), 1: load()})
    life.key_gone(1)
    life.feed(scale(1))
    assert life.state(1) == "draining/returning"
    for _ in range(31):
        life.now_s += 1.0
        life.heard({0: load()})
    assert life.state(1) == "crashed"


def test_a_worker_asked_twice_is_asked_once() -> None:
    life = draining()
    before = life.fleet
    life.now_s += 5.0
    assert life.feed(drain()) == []
    assert life.fleet == before


# --- the deadline ----------------------------------------------------------------------------------


def test_past_its_deadline_it_is_asked_what_that_cuts_and_then_ended() -> None:
    life = draining()
    assert life.after(599.9) == []
    assert life.after(0.1) == ["count requests VllmWorker_1"]
    assert (life.state(1), life.worker(1).leave.counting) == ("draining", True)
    ids = [f"r{n}" for n in range(25)]
    cut = "was not gone 600 s after it was asked to leave; 25 requests were cut"
    told = f"{name(1)} {cut}: {', '.join(ids[:20])} and 5 more"
    assert life.feed(counted(1, 25, *ids)) == [f"tell: {told}", f"end session {PID} VllmWorker_1"]
    assert (life.state(1), life.worker(1).reason) == ("drain_timed_out", cut)
    (transition,) = life.did(ins.Commit)[0].transitions
    assert (transition.kind, transition.details) == ("DrainDeadlinePassed", {"deadline_s": 600.0, "requests_cut": 25})
    life.gone(1, -9)
    assert (life.state(1), life.worker(1).reason) == ("exited", cut)


def test_answers_that_it_ended_because_nobody_read_them_are_in_its_exit() -> None:
    life = draining()
    life.heard({1: replace(load(), unread=5, unread_s=30.0, abandoned=5)})
    told = f"{name(1)} left 5 requests whose clients did not read: their answers were ended (`Host: unread-bound-s`)"
    life.key_gone(1)
    assert f"tell: {told}" in life.gone(1, 0)
    (transition,) = life.did(ins.Commit)[0].transitions
    assert (transition.kind, transition.details) == ("ProcessExited", {"exit_code": 0, "requests_abandoned": 5})


@pytest.mark.parametrize(
    ("heard", "cut"),
    [(True, "3 requests were cut"), (False, "what that cut is unknown (no answer)")],
)
def test_where_it_does_not_answer_its_last_load_is_what_is_known(heard: bool, cut: str) -> None:
    life = draining()
    life.now_s += 600.0 if heard else 595.0
    life.heard({1: load(active=2, waiting=1)})
    for silent_s in () if heard else (3.0, 2.0):
        life.now_s += silent_s
        life.heard({})
    life.after(0.0)
    life.feed(counted(1, Missing("timeout")))
    assert cut in (life.worker(1).reason or "")
    assert life.state(1) == "drain_timed_out"


def test_one_that_leaves_while_it_is_asked_is_not_ended() -> None:
    life = draining()
    life.after(600.0)
    assert life.feed(counted(1, 0, pid=77)) == []
    life.gone(1)
    assert life.feed(counted(1, 0)) == []
    assert life.state(1) == "exited"


def test_one_that_never_served_gets_less_time_unless_it_turns_out_to() -> None:
    life = Life(fleet("ready", "starting"))
    assert life.feed(drain()) == [f"SIGTERM {PID} VllmWorker_1"]
    assert life.worker(1).due_s == life.now_s + 10.0
    life.feed(st.KeyPut(stimulus_id="k", name=name(1), pid=PID, lease=lease_of(1)))
    assert life.did(ins.Revoke) == [ins.Revoke(name(1), lease_of(1), tells=True)]


def test_a_hung_worker_that_drains_is_ended_before_its_deadline() -> None:
    life = draining()
    life.heard({0: load(), 1: load(active=2)})
    for _ in range(31):
        life.now_s += 1.0
        last = life.heard({0: load()})
    assert last[-1] == f"end session {PID} VllmWorker_1"
    assert (life.state(1), life.events()) == ("drain_timed_out", ["DrainDeadlinePassed"])
    assert "is hung" in (life.worker(1).reason or "")


# --- taken back ------------------------------------------------------------------------------------


def test_a_drain_is_taken_back() -> None:
    life = draining()
    before = life.worker(1)
    assert life.feed(cancel()) == ["call back VllmWorker_1"]
    assert life.did(ins.CallBack) == [ins.CallBack(name(1), PID, signalled=True, requested_by="cancel:1")]
    assert life.state(1) == "draining/returning"
    life.key_gone(1)
    assert life.called_back(1, requested_by="cancel:1") == []
    assert (life.events(), life.state(1)) == (["DrainCancelled"], "ready")
    after = life.worker(1)
    assert (after.pid, after.gpus, after.leave.requested_at_s, after.due_s, after.leave.signalled) == (
        PID,
        before.gpus,
        None,
        None,
        False,
    )


@pytest.mark.parametrize("first", ["key", "answer"])
def test_its_key_and_its_answer_may_come_in_either_order(first: str) -> None:
    life = draining()
    life.feed(scale(1))
    life.key_gone(1)
    steps = [lambda: life.registered(1, "beef"), lambda: life.called_back(1)]
    for each in steps if first == "key" else reversed(steps):
        each()
        assert life.state(1) == "ready"
    assert (life.worker(1).lease, life.worker(1).due_s) == ("beef", None)


def test_a_scale_up_takes_a_drain_back_and_starts_anew_where_that_is_too_late() -> None:
    life = draining()
    assert life.feed(scale(1)) == ["call back VllmWorker_1"]
    assert life.called_back(1, "it has exited") == [
        f"tell: the drain of {name(1)} came to its end before it was taken back (it has exited); it starts anew"
    ]
    life.gone(1)
    assert life.state(1) == "exited/returning"
    assert life.swept(1) == ["look at GPUs"]
    assert life.gpus() == ["spawn VllmWorker_1"]


def test_a_person_who_takes_a_drain_back_too_late_is_told_and_nothing_starts() -> None:
    """`dynamo drain --cancel` says no."""
    life = draining()
    life.feed(cancel())
    assert life.called_back(1, "it has exited", requested_by="cancel:1") == []
    assert life.state(1) == "draining"
    life.leaves(1)
    assert life.states() == ["ready"]


def test_a_late_no_to_a_person_does_not_start_what_is_gone() -> None:
    """The exit was seen before the answer."""
    life = draining()
    life.feed(cancel())
    life.gone(1)
    life.called_back(1, "no such worker", requested_by="cancel:1")
    assert life.state(1) == "exited"
    life.swept(1)
    life.gpus()
    assert life.states() == ["ready"]


def test_a_drain_ordered_again_after_it_was_taken_back_is_carried_out() -> None:
    life = draining()
    life.feed(cancel())
    assert life.feed(drain()) == [ONE]
    assert life.state(1) == "draining"
    life.called_back(1)
    assert life.state(1) == "draining"
    assert life.registered(1, "beef") == ["revoke beef VllmWorker_1"], "it had come back in that moment"
    assert life.state(1) == "draining"


@pytest.mark.parametrize("last", ["key", "answer"])
def test_one_that_was_called_back_twice_is_ready_when_it_has_come_back_twice(last: str) -> None:
    """Drained, called back, drained, called back: its first return is seen while the second sign to leave is still on
    its way to it. Taken for ready then, its sibling was drained, and nobody could be found (gentle seed 230)."""
    life = draining()
    life.feed(cancel())
    life.feed(drain())
    life.feed(scale(1))
    life.registered(1, "beef")
    assert life.called_back(1, requested_by="cancel:1") == []
    assert life.state(1) == "draining/returning"
    life.key_gone(1, "beef")
    if last == "key":
        life.registered(1, "cafe")
    else:
        life.called_back(1)
    assert life.state(1) == "ready"


def test_a_call_back_that_nobody_answers_ends_at_the_drains_deadline() -> None:
    life = draining()
    life.feed(scale(1))
    life.after(600.0)
    life.feed(counted(1, 0))
    assert life.state(1) == "drain_timed_out/returning"
    life.gone(1, -9)
    life.swept(1)
    life.gpus()
    assert life.state(1) == "starting"


def test_a_call_back_in_the_moment_of_the_deadline_is_heard() -> None:
    """It came back while it was asked what its end would cut: nothing is ended."""
    life = draining()
    life.after(600.0)
    life.feed(cancel())
    life.called_back(1)
    assert life.feed(counted(1, 0)) == []
    assert life.state(1) == "ready"


def test_a_sign_that_could_not_be_given_does_not_follow_a_call_back() -> None:
    """etcd is away: the signal instead of the revoked lease would end a worker that has just come back."""
    life = draining()
    life.feed(cancel())
    failed = st.RevokeFailed(stimulus_id="etcd", name=name(1), lease=lease_of(1), why="etcd is away")
    assert life.feed(failed) == []
    assert life.called_back(1, requested_by="cancel:1") == []
    assert life.state(1) == "ready"


@pytest.mark.parametrize(("order", "after"), [(cancel(), "draining"), (scale(1), "draining/returning")])
def test_one_that_could_neither_be_told_nor_called_back_is_told_then(order: st.Event, after: str) -> None:
    """etcd and NATS are away: it would serve on, unaware, until its deadline cuts what it streams."""
    life = draining()
    life.feed(order)
    life.feed(st.RevokeFailed(stimulus_id="etcd", name=name(1), lease=lease_of(1), why="etcd is away"))
    requested_by = order.stimulus_id if isinstance(order, st.Drain) and order.cancel else None
    assert life.called_back(1, "NATS is away", requested_by=requested_by)[0] == f"SIGTERM {PID} VllmWorker_1"
    assert life.state(1) == after
    assert f"SIGTERM {PID} VllmWorker_1" not in life.called_back(1, "NATS is away"), "once is enough"


def test_what_was_never_ready_cannot_be_called_back() -> None:
    life = Life(fleet("ready", "starting"))
    life.feed(drain())
    with pytest.raises(DrainNotCancellable):
        life.feed(cancel())


def test_a_drain_taken_back_takes_devices_from_who_waits_for_them() -> None:
    life = Life(on_ledger([worker(0, "ready"), worker(0, "ready", PREFILL), worker(1, "ready", PREFILL)], 3))
    prefill = name(1, "PrefillWorker")
    life.feed(st.Drain(stimulus_id="d", name=prefill))
    order = scale(1)
    life.feed(st.Scale(stimulus_id="s", component=order.component, target=order.target, wait_for_gpus=True))
    assert life.state(1) == "pending"
    life.feed(st.Drain(cancel=True, stimulus_id="c", name=prefill))
    assert life.state(1) == "gone"
