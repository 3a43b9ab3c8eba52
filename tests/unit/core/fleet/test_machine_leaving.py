"""The machine: `dynamo down`, in stages or at once."""

from __future__ import annotations

from dynamo_local.core.fleet import effects as ins
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.draining import has_left
from dynamo_local.core.fleet.events import Change
from dynamo_local.core.types import Missing
from tests.fakes.arbiter.fleet_views import FRONTEND, PREFILL, lease_of, load, name, on_ledger, pid_of, put, worker
from tests.fakes.arbiter.machine import Life

F, D, P = pid_of(0, FRONTEND), pid_of(0), pid_of(0, PREFILL)
FRONT, PRE = name(0, "Frontend"), name(0, "PrefillWorker")
DOWN = st.Leave(stimulus_id="down")
NOW = st.Leave(stimulus_id="down", now=True)


def graph(decode: str = "ready") -> Life:
    """One of each stage."""
    return Life(on_ledger([worker(0, "ready", PREFILL), worker(0, decode), worker(0, "ready", FRONTEND)], 4))


def gone(life: Life, who: str, pid: int, code: int = 0) -> list[str]:
    """Its process has ended. What follows, but for its lease, which is revoked."""
    found = life.feed(st.ProcessGone(stimulus_id=f"exit:{pid}", name=who, pid=pid, code=code))
    return [each for each in found if not each.startswith("revoke ")]


def test_stages_leave_one_after_the_other() -> None:
    life = graph()
    assert life.feed(DOWN) == [f"SIGTERM {F} Frontend"]
    assert not has_left(life.fleet)
    assert gone(life, FRONT, F) == [f"SIGTERM {D} VllmWorker"], "by a signal: etcd may be gone"
    assert gone(life, name(), D) == [f"SIGTERM {P} PrefillWorker"]
    assert life.did(ins.Revoke) == [ins.Revoke(name(), lease_of(0))], "nobody else would, before it expires"
    assert not has_left(life.fleet)
    gone(life, PRE, P)
    assert has_left(life.fleet)


def test_one_that_arrives_in_a_role_that_leaves_already_leaves_with_it() -> None:
    life, becomes = graph(), name(1)
    life.feed(st.Flip(stimulus_id="flip", name=PRE, force=True))
    life.feed(DOWN)
    assert gone(life, FRONT, F) == [f"SIGTERM {D} VllmWorker"]
    arrived = life.feed(st.KeyPut(stimulus_id="etcd", name=becomes, pid=P, lease="beef"))
    assert f"SIGTERM {P} VllmWorker_1" in arrived
    gone(life, name(), D)
    assert not has_left(life.fleet)
    gone(life, becomes, P)
    assert has_left(life.fleet)


def test_a_run_without_processes_has_left_at_once() -> None:
    life = Life(on_ledger([worker(0, "exited"), worker(1, "faulted"), worker(2, "pending")], 4))
    assert life.feed(DOWN) == []
    assert has_left(life.fleet)


def test_nothing_is_started_while_the_run_leaves() -> None:
    """Neither what waits for a device, nor what backs off, nor what was to be restarted, nor what crashes now."""
    life = Life(on_ledger([worker(0, "ready"), worker(1, "pending"), worker(2, "backing_off", due_s=105.0)], 4))
    life.feed(st.Restart(stimulus_id="r", name=name()))
    life.feed(DOWN)
    life.gpus()
    life.after(10.0)
    assert life.gone(0, 1) == [f"revoke {lease_of(0)} VllmWorker"]
    assert life.fleet.restarts == ()
    assert life.states() == ["exited", "pending", "backing_off"]
    assert has_left(life.fleet)


def test_a_worker_that_is_late_is_ended_and_the_next_stage_goes_on() -> None:
    life = graph()
    life.feed(DOWN)
    gone(life, FRONT, F)
    life.heard({0: load(active=2)})
    assert life.after(600.0)[-1] == f"end session {D} VllmWorker"
    assert "2 requests were cut" in life.told[-1]
    assert gone(life, name(), D, -9)[-1] == f"SIGTERM {P} PrefillWorker"


def test_one_that_sigkill_does_not_end_holds_up_nobody() -> None:
    life = graph()
    life.feed(NOW)
    life.after(10.0)
    assert f"pid {F} is still there" in life.told[0]
    assert life.did(ins.EndSession) == [ins.EndSession(name(), D)]


def test_now_ends_stage_after_stage_at_once() -> None:
    life = graph()
    assert life.feed(NOW) == [f"end session {F} Frontend"]
    assert life.events() == ["DrainRequested", "DrainDeadlinePassed"]
    assert gone(life, FRONT, F, -9) == [f"end session {D} VllmWorker"]
    gone(life, name(), D, -9)
    gone(life, PRE, P, -9)
    assert has_left(life.fleet)


def test_now_may_come_later() -> None:
    life = graph()
    life.feed(DOWN)
    assert life.feed(NOW) == [f"end session {F} Frontend"]
    assert gone(life, FRONT, F, -9) == [f"end session {D} VllmWorker"]
    assert life.feed(NOW) == [], "asked a third time"


def test_a_second_down_changes_nothing() -> None:
    life = graph()
    life.feed(DOWN)
    before = life.fleet
    assert life.feed(DOWN) == []
    assert life.fleet == before


def test_a_process_that_is_being_made_is_waited_for_and_asked_then() -> None:
    """Else it would be left behind."""
    life = Life(on_ledger([worker(0, "pending")], 1))
    life.feed(st.StartAll(stimulus_id="serve"))
    life.begun()
    life.feed(DOWN)
    assert not has_left(life.fleet)
    assert life.made() == [f"SIGTERM {D} VllmWorker"]
    gone(life, name(), D)
    assert has_left(life.fleet)


def test_a_process_that_is_made_after_now_is_ended_at_once() -> None:
    life = Life(on_ledger([worker(0, "pending")], 1))
    life.feed(st.StartAll(stimulus_id="serve"))
    life.begun()
    life.feed(NOW)
    assert life.made() == [f"end session {D} VllmWorker"]


def test_one_that_is_called_back_leaves_all_the_same() -> None:
    life = graph()
    life.feed(st.Drain(stimulus_id="d", name=name(), force=True))
    life.feed(st.Drain(cancel=True, stimulus_id="c", name=name()))
    life.feed(DOWN)
    assert gone(life, FRONT, F) == [f"SIGTERM {D} VllmWorker"]
    assert life.state() == "draining"


def test_one_that_never_answered_leaves_with_an_unknown_cut() -> None:
    life = graph()
    life.fleet = put(life.fleet, FRONT, load=Missing("no answer"))
    life.feed(NOW)
    cuts = [each.details.get("requests_cut") for each in life.did(ins.Commit)[0].transitions]
    assert cuts == [None, Missing("no answer")]


def test_a_crash_while_the_run_leaves_is_reported_and_not_restarted() -> None:
    life = graph()
    life.feed(DOWN)
    assert gone(life, name(), D, 1)[-1] == "report: exited with code 1 unasked VllmWorker"
    assert life.state() == "crashed"
    assert gone(life, FRONT, F) == [f"SIGTERM {P} PrefillWorker"]


def test_one_that_was_wanted_again_and_taken_back_keeps_no_devices() -> None:
    """It was to start on those of its last process; then the run left, before that was cleared away."""
    life = Life(on_ledger([worker(0, "ready")], 1))
    life.feed(st.Drain(stimulus_id="d", name=name(), force=True))
    life.gone(0, 0)
    for change in (1, -1):
        order = st.Scale(stimulus_id="s", component="VllmWorker", target=Change(change, relative=True), force=True)
        life.feed(order)
    life.feed(DOWN)
    life.swept(0)
    life.gpus()
    assert (life.state(), life.worker().gpus, life.fleet.gpus.held) == ("exited", (), {})


def test_a_drain_of_our_own_is_not_told_as_a_lost_lease() -> None:
    """Ctrl-C: a worker gives its lease back when it has been asked to leave; that is no stranger's doing."""
    life = Life(on_ledger([worker(0, "ready"), worker(1, "ready")], 4))
    life.feed(DOWN)
    life.key_gone(0)
    assert life.worker(0).reason == "down"
    life.gone(0, 0)
    assert life.worker(0).reason == "down"


def test_a_worker_that_is_silent_while_the_run_leaves_has_until_its_deadline() -> None:
    """Its streams may still run: a process that ends has better things to do than to answer."""
    life = graph()
    life.heard({0: load()})
    life.feed(DOWN)
    gone(life, FRONT, F)
    for _ in range(11):
        life.now_s += 3.0
        assert life.heard({}) == []
    assert life.worker().health.silent_s > life.fleet.health_bound_s
    assert life.state() == "draining"
