"""The machine: `dynamo restart`, one worker after the other, carried by the fleet itself."""

from __future__ import annotations

import pytest

from dynamo_local.core.fleet import effects as ins
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.events import Change
from dynamo_local.errors import LastReadyWorker, NotRestartable
from tests.fakes.arbiter.fleet_views import fleet, lease_of, name
from tests.fakes.arbiter.machine import Life


def restart(target: str = "VllmWorker", *, force: bool = False, cause: str = "restart:1") -> st.Restart:
    """`dynamo restart`"""
    return st.Restart(stimulus_id=cause, name=target, force=force)


def renew(life: Life, n: int, pid: int) -> list[str]:
    """It leaves, is swept, has its device back, and is ready in a new process. What follows is returned."""
    assert life.leaves(n) == [f"spawn {name(n).removeprefix('dynamo_')}"]
    return life.up(n, pid)


def test_a_rolling_restart_from_the_word_to_the_end() -> None:
    life = Life(fleet("ready", "ready"))
    assert life.feed(restart()) == [f"revoke {lease_of(1)} VllmWorker_1"]
    assert life.did(ins.Commit)[0].head, "a successor goes on with it"
    assert life.states() == ["ready", "draining/restarting"]
    assert renew(life, 1, 71) == [f"revoke {lease_of(0)} VllmWorker"]
    assert life.states() == ["draining/restarting", "ready"]
    assert renew(life, 0, 72) == []
    assert (life.states(), life.fleet.restarts) == (["ready", "ready"], ())
    assert [worker.restarts for worker in life.fleet.of("VllmWorker")] == [1, 1]


def test_each_new_process_is_the_commands() -> None:
    """`dynamo events --story` shows why."""
    life = Life(fleet("ready"))
    life.feed(restart(force=True))
    life.leaves()
    assert [each.stimulus_id for each in life.did(ins.Spawn)] == ["restart:1"]


def test_the_only_worker_is_replaced() -> None:
    """Another one is started first, on another device; when it is ready the old one leaves and stays a template."""
    life = Life(fleet("ready", gpus=2))
    assert life.feed(restart()) == ["spawn VllmWorker_1"]
    assert life.did(ins.Commit)[0].head, "a successor goes on with it"
    assert life.up(1, 71) == [f"revoke {lease_of(0)} VllmWorker"]
    assert (life.states(), life.fleet.restarts) == (["draining", "ready"], ())
    life.leaves()
    assert (life.states(), life.free()) == (["exited", "ready"], [0])


def test_the_only_worker_that_cannot_be_replaced_is_left_alone() -> None:
    life = Life(fleet("ready", gpus=1))
    with pytest.raises(LastReadyWorker, match="too few GPUs"):
        life.feed(restart())
    assert life.feed(restart(force=True))[0].startswith(f"tell: {name()} is the only worker of VllmWorker")
    assert life.state() == "draining/restarting"


def test_the_old_worker_serves_on_where_the_new_one_is_faulted() -> None:
    life = Life(fleet("ready", gpus=2))
    life.feed(restart())
    life.fails_to_start(1, until=lambda: life.fleet.restarts == ())
    life.gpus()
    assert (life.states(), life.free()) == (["ready"], [1])
    assert any(told.startswith(f"restart stopped: {name(1)}: 5 failures") for told in life.told)


def test_the_last_ready_worker_waits_for_its_sibling() -> None:
    life = Life(fleet("ready", "starting"))
    assert life.feed(restart(name())) == []
    assert life.registered(1) == [f"revoke {lease_of(0)} VllmWorker"]


def test_the_sequence_stops_at_a_worker_whose_new_process_is_faulted() -> None:
    life = Life(fleet("ready", "ready"))
    life.feed(restart())
    life.leaves(1)
    life.fails_to_start(1, until=lambda: life.state(1) == "faulted")
    assert life.states() == ["ready", "faulted"]
    assert life.fleet.restarts == ()
    assert any(told.startswith(f"restart stopped: {name(1)}: 5 failures") for told in life.told)


def test_two_restarts_of_the_same_worker_are_one_new_process() -> None:
    life = Life(fleet("ready", "ready"))
    life.feed(restart(name(1)))
    assert life.feed(restart(name(1), cause="restart:2")) == []
    assert len(life.fleet.restarts) == 2
    renew(life, 1, 71)
    assert (life.fleet.restarts, life.worker(1).restarts, life.state(1)) == ((), 1, "ready")


def test_a_restart_of_a_worker_that_starts_anew_starts_it_once_more() -> None:
    life = Life(fleet("ready", "ready"))
    life.feed(restart(name(1)))
    life.leaves(1)
    life.made(1, 71)
    assert life.feed(restart(name(1), cause="restart:2")) == ["SIGTERM 71 VllmWorker_1"]
    renew(life, 1, 72)
    assert (life.fleet.restarts, life.worker(1).restarts) == ((), 2)


def test_a_restart_of_a_worker_whose_process_is_being_made() -> None:
    life = Life(fleet("ready", "pending"))
    life.feed(st.StartAll(stimulus_id="serve"))
    life.begun(1)
    assert life.feed(restart(name(1))) == []
    assert life.made(1, 71) == ["SIGTERM 71 VllmWorker_1"]
    renew(life, 1, 72)
    assert (life.state(1), life.fleet.restarts) == ("ready", ())


@pytest.mark.parametrize("how", ["cancelled", "drained"])
def test_a_restart_that_a_person_calls_off_is_skipped(how: str) -> None:
    life = Life(fleet("ready", "ready", "ready"))
    life.feed(restart())
    if how == "cancelled":
        life.feed(st.Drain(cancel=True, stimulus_id="c", name=name(2)))
        life.called_back(2, requested_by="t")
        assert life.states() == ["ready", "draining/restarting", "ready"]
    else:
        life.feed(st.Drain(stimulus_id="d", name=name(2)))
        assert life.states() == ["ready", "draining/restarting", "draining"]


def test_a_restart_that_is_scaled_away_does_not_come_back() -> None:
    life = Life(fleet("ready", "ready"))
    life.feed(restart(name(1)))
    life.feed(st.Scale(stimulus_id="s", component="VllmWorker", target=Change(-1, relative=True)))
    assert life.state(1) == "draining"
    life.leaves(1)
    assert (life.states(), life.fleet.restarts) == (["ready"], ())


@pytest.mark.parametrize("state", ["faulted", "backing_off", "exited"])
def test_a_person_starts_again_what_has_no_process(state: str) -> None:
    life = Life(fleet(state, "ready"))
    assert life.feed(restart(name())) == ["spawn VllmWorker"]
    assert life.worker().history.failures_s == ()


def test_a_restart_ends_when_its_worker_does() -> None:
    life = Life(fleet("ready", "ready"))
    life.feed(restart(name(1)))
    life.gone(1, -11)
    assert life.state(1) == "exited/restarting"
    life.swept(1)
    assert life.gpus() == ["spawn VllmWorker_1"]


def test_past_its_deadline_a_restart_ends_the_old_process_and_goes_on() -> None:
    life = Life(fleet("ready", "ready"))
    life.feed(restart(name(1)))
    life.after(600.0)
    life.feed(st.RequestsCounted(stimulus_id="x", name=name(1), pid=life.worker(1).pid or 0, in_flight=1))
    assert life.state(1) == "drain_timed_out/restarting"
    renew(life, 1, 71)
    assert life.state(1) == "ready"


def test_what_leaves_for_good_is_not_restarted() -> None:
    life = Life(fleet("ready", "draining"))
    with pytest.raises(NotRestartable):
        life.feed(restart(name(1)))
    assert life.fleet.restarts == ()
