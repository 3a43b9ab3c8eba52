"""The machine: leases that somebody else revokes, and when a graph that is up is degraded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.degraded import lacking, shown_state
from dynamo_local.core.fleet.events import Change
from dynamo_local.core.fleet.fleet import Fleet
from tests.fakes.arbiter.fleet_views import fleet, name
from tests.fakes.arbiter.machine import Life


def restarting(*workers: str) -> Fleet:
    """A fleet under `on-foreign-revoke: restart`."""
    return replace(fleet(*workers), restart_revoked=True)


def left(life: Life, n: int) -> None:
    """Its lease is revoked by somebody else; it finishes, and exits."""
    life.key_gone(n)
    life.leaves(n)


def what(life: Life) -> list[str]:
    return [lack.what for lack in lacking(life.fleet)]


def test_one_that_was_revoked_stays_away_and_is_missed() -> None:
    """By default who revokes a lease takes a worker out; that it is gone is told, though another one serves."""
    life = Life(fleet("ready", "ready"))
    left(life, 1)
    assert life.states() == ["ready"]
    assert [lack.component for lack in lacking(life.fleet)] == ["VllmWorker"]
    assert f"{name(1)} left, because somebody else revoked the lease" in what(life)[0]
    assert shown_state("ready", life.fleet) == "degraded"


def test_with_restart_one_that_was_revoked_comes_back() -> None:
    life = Life(restarting("ready", "ready"))
    gpus = life.worker(1).gpus
    life.key_gone(1)
    assert life.state(1) == "draining/restarting"
    assert life.worker(1).reason == "its lease was revoked or has expired; it is started again"
    life.leaves(1)
    assert life.state(1) == "backing_off"
    life.until_due()
    life.gpus()
    assert life.state(1) == "starting"
    life.up(1, pid=77)
    assert life.states() == ["ready", "ready"]
    assert (life.worker(1).gpus, lacking(life.fleet)) == (gpus, ())


def test_with_restart_one_that_is_revoked_again_and_again_is_left_alone_in_the_end() -> None:
    """The pauses and the number are those of crashes: 1, 2, 4 and 8 s, then a fault, which a person clears."""
    life = Life(restarting("ready", "ready"))
    pauses_s = []
    for turn in range(4):
        life.key_gone(1, life.worker(1).lease)
        life.gone(1)
        life.swept(1)
        gone_s = life.now_s
        assert life.state(1) == "backing_off"
        life.until_due()
        life.gpus()
        pauses_s.append(life.now_s - gone_s)
        life.up(1, pid=7000 + turn)
    assert pauses_s == [1.0, 2.0, 4.0, 8.0]

    life.key_gone(1, life.worker(1).lease)
    life.gone(1)
    life.swept(1)
    assert life.state(1) == "faulted"
    assert life.worker(1).reason == "5 failures within 600 s, the last: its lease was revoked or has expired"
    life.gpus()
    assert life.worker(1).gpus == ()
    life.feed(st.Restart(stimulus_id="command:1", name=name(1)))
    assert life.state(1) == "starting"


def test_with_restart_one_that_is_revoked_during_an_outage_waits_for_its_end() -> None:
    life = Life(restarting("ready", "ready"))
    life.key_gone(1)
    life.infra(False)
    life.gone(1)
    life.swept(1)
    assert (life.state(1), life.worker(1).ended.waiting_for_infra) == ("backing_off", True)
    assert life.worker(1).history.failures_s == ()


def test_with_restart_a_scale_down_during_the_pause_is_obeyed() -> None:
    life = Life(restarting("ready", "ready"))
    left(life, 1)
    life.feed(st.Scale(stimulus_id="command:1", component="VllmWorker", target=Change(1, relative=False)))
    life.gpus()
    assert life.states() == ["ready"]


def test_with_restart_one_whose_lease_had_only_expired_goes_on() -> None:
    life = Life(restarting("ready"))
    life.key_gone(0)
    life.registered(0, "beef")
    assert life.states() == ["ready"]


@pytest.mark.parametrize("order", ["drained by a command", "the run leaves"])
def test_with_restart_one_that_we_asked_to_leave_leaves(order: str) -> None:
    life = Life(restarting("ready", "ready"))
    if order == "the run leaves":
        life.feed(st.Leave(stimulus_id="down"))
    else:
        life.feed(st.Drain(stimulus_id="command:1", name=name(1)))
    left(life, 1)
    assert life.state(1) in ("gone", "exited")
    assert life.fleet.revoked == {}


def test_a_drain_by_command_is_not_missed() -> None:
    life = Life(fleet("ready", "ready"))
    life.feed(st.Drain(stimulus_id="command:1", name=name(1)))
    left(life, 1)
    assert lacking(life.fleet) == ()


def test_all_revoked_is_degraded_whatever_follows() -> None:
    life = Life(restarting("ready", "ready"))
    for n in (0, 1):
        life.key_gone(n)
    assert f"{name()} is draining, {name(1)} is draining" in what(life)[0]
    for n in (0, 1):
        life.gone(n)
        life.swept(n)
    life.gpus()
    assert "no worker serves" in what(life)[0]
    life.until_due()
    life.gpus()
    life.up(0, pid=77)
    assert lacking(life.fleet) == ()


@pytest.mark.parametrize("state", ["starting", "crashed", "backing_off", "faulted", "exited"])
def test_a_component_without_a_worker_that_serves_is_missed(state: str) -> None:
    view = fleet(state)
    assert [lack.component for lack in lacking(view)] == ["VllmWorker"]
    assert f"{name()} is {state}" in lacking(view)[0].what


def test_a_component_that_has_never_had_a_worker_is_not_missed() -> None:
    assert lacking(fleet("ready")) == ()


@pytest.mark.parametrize("state", ["starting", "adopting", "leaving"])
def test_only_a_run_that_is_up_is_called_degraded(state: str) -> None:
    assert shown_state(state, fleet("crashed")) == state


def test_a_command_decides_anew_how_many_there_are() -> None:
    """After `dynamo scale` nobody misses what it did not ask for."""
    life = Life(fleet("ready", "ready", "ready"))
    left(life, 1)
    left(life, 2)
    life.feed(st.Scale(stimulus_id="command:1", component="VllmWorker", target=Change(1, relative=True)))
    assert life.fleet.revoked == {}


def test_a_revoked_worker_is_remembered_by_the_statefile() -> None:
    life = Life(fleet("ready", "ready"))
    life.key_gone(1)
    life.gone(1)
    commits = [each for each in life.last if type(each).__name__ == "Commit"]
    assert [commit.head for commit in commits] == [True]
    assert life.fleet.revoked == {name(1): "VllmWorker"}
