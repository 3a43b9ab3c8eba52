"""The machine: what the registry says, when it cannot be read, and what an outage of etcd or NATS excuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.backoff import RestartPolicy
from tests.fakes.arbiter.fleet_views import fleet, lease_of, load, name, pid_of, put
from tests.fakes.arbiter.machine import Life

# --- keys ------------------------------------------------------------------------------------------


def test_a_key_of_another_process_is_not_ours() -> None:
    life = Life(fleet("starting"))
    before = life.fleet
    assert life.registered(0, "beef", pid=77) == []
    assert life.registered(0, "beef", name=name(3)) == []
    assert life.fleet == before


def test_a_key_under_a_new_lease_is_the_one_that_counts() -> None:
    life = Life(fleet("ready"))
    life.registered(0, "beef")
    assert life.events() == ["Registered"]
    assert life.key_gone(0, lease_of(0)) == []
    assert (life.state(), life.worker().lease) == ("ready", "beef")


def test_the_same_key_again_is_no_news() -> None:
    life = Life(fleet("ready"))
    life.registered()
    assert life.events() == []


@pytest.mark.parametrize("state", ["crashed", "exited", "backing_off", "faulted"])
def test_the_end_of_a_key_of_one_that_is_gone_is_no_news(state: str) -> None:
    life = Life(put(fleet("ready", state), name(1), lease=lease_of(1)))
    before = life.fleet
    assert life.key_gone(1) == []
    assert life.fleet == before


# --- a ready worker that ends with code 0 --------------------------------------------------------------


def ended_in_order() -> Life:
    """We are told of its end, and have heard nothing of its key."""
    life = Life(fleet("ready", "ready"))
    assert life.gone(1, 0) == [f"look up key of {lease_of(1)} VllmWorker_1"]
    assert (life.state(1), life.worker(1).runs) == ("ready", True)
    return life


def test_one_whose_key_went_first_has_left() -> None:
    life = ended_in_order()
    assert life.looked_up(1, removed=True) == ["sweep VllmWorker_1"]
    assert life.events() == ["LeaseRevoked", "ProcessExited"]
    assert life.state(1) == "exited"


def test_one_whose_key_is_there_has_crashed_as_of_its_end() -> None:
    """Code 0 or not: it was not asked to. What etcd took to answer is not held against it."""
    life = ended_in_order()
    ended_s = life.now_s
    life.now_s += 4.0
    assert life.looked_up(1, removed=False) == [f"revoke {lease_of(1)} VllmWorker_1", "sweep VllmWorker_1"]
    assert (life.state(1), life.worker(1).reason) == ("crashed", "exited with code 0 unasked")
    life.swept(1)
    assert life.worker(1).due_s == max(life.now_s, ended_s + 1.0)


def test_the_end_of_its_key_may_be_heard_before_the_answer() -> None:
    life = ended_in_order()
    life.key_gone(1)
    life.looked_up(1, removed=False)
    assert life.state(1) == "exited"


def test_one_that_is_to_leave_meanwhile_has_left() -> None:
    life = ended_in_order()
    life.feed(st.Drain(stimulus_id="drain", name=name(1)))
    life.looked_up(1, removed=False)
    assert life.state(1) == "exited"


def test_an_answer_about_another_process_changes_nothing() -> None:
    life = Life(fleet("ready"))
    before = life.fleet
    assert life.looked_up(removed=True) == []
    assert life.fleet == before


# --- a lease that went while nobody heard of its worker ----------------------------------------------


def silent_and_gone() -> Life:
    """Two ready workers. The second has answered nothing for four samples when its lease goes."""
    life = Life(fleet("ready", "ready"))
    for _ in range(5):
        life.now_s += 1.0
        life.heard({0: load()})
    life.key_gone(1)
    assert life.state(1) == "draining"
    return life


@pytest.mark.parametrize("code", [-9, 1])
def test_one_that_died_while_it_was_stopped_has_crashed(code: int) -> None:
    life = silent_and_gone()
    life.gone(1, code)
    assert life.events() == ["HealthFailed", "ProcessExited"]
    life.swept(1)
    assert life.state(1) == "backing_off"
    assert (life.worker(1).reason or "").endswith("it had answered nothing when its lease ended")


def test_one_that_was_heard_until_its_lease_went_was_told_to_leave() -> None:
    life = Life(fleet("ready", "ready"))
    life.heard({0: load(), 1: load()})
    life.key_gone(1)
    life.gone(1, -9)
    assert life.state(1) == "exited"


@pytest.mark.parametrize("code", [0, None])
def test_a_silent_one_that_ended_in_order_has_left(code: int | None) -> None:
    life = silent_and_gone()
    life.gone(1, code)
    assert life.state(1) == "exited"


def test_a_silent_one_that_registers_again_is_ready() -> None:
    life = silent_and_gone()
    life.registered(1, "beef")
    assert (life.state(1), life.worker(1).leave.silent_at_expiry) == ("ready", False)


def test_one_that_has_crashed_so_is_drained_as_any_other_that_crashed() -> None:
    life = silent_and_gone()
    life.gone(1, -9)
    life.feed(st.Drain(stimulus_id="drain", name=name(1)))
    assert life.state(1) == "crashed/leaving"
    life = silent_and_gone()
    life.gone(1, -9)
    life.swept(1)
    life.feed(st.Drain(stimulus_id="drain", name=name(1)))
    assert life.state(1) == "exited"


def test_a_person_who_drains_a_silent_one_means_it() -> None:
    life = silent_and_gone()
    assert life.feed(st.Drain(stimulus_id="drain", name=name(1))) == [f"SIGTERM {pid_of(1)} VllmWorker_1"]
    life.gone(1, -9)
    assert life.state(1) == "exited"


# --- the whole registry ----------------------------------------------------------------------------


def test_a_lease_revoked_while_etcd_could_not_be_watched_is_noticed() -> None:
    """Absence counts, once nobody can be about to write the key again: the worker has left routing, and leaves."""
    life = Life(fleet("ready", "ready"))
    assert life.listed(0) == []
    assert life.states() == ["ready", "ready"]
    assert life.after(9.9) == []
    assert life.states() == ["ready", "ready"]
    assert life.after(0.1) == []
    assert life.states() == ["ready", "draining"]
    gone = life.worker(1)
    assert (gone.lease, gone.leave.lease_gone) == (None, True)
    assert gone.reason == "its lease was revoked, or expired, while etcd could not be watched"


@pytest.mark.parametrize("how", ["written again", "listed again"])
def test_a_key_that_is_written_again_was_only_lost(how: str) -> None:
    life = Life(fleet("ready", "ready"))
    life.listed(0)
    life.now_s += 5.0
    if how == "written again":
        life.registered(1)
    else:
        life.listed(0, 1)
    life.after(60.0)
    assert life.states() == ["ready", "ready"]


def test_its_absence_counts_from_the_first_list_without_it() -> None:
    life = Life(fleet("ready", "ready"))
    for _ in range(4):
        life.listed(0)
        life.now_s += 3.0
    life.after(0.0)
    assert life.state(1) == "draining"


def test_one_that_ends_while_its_key_is_absent_has_crashed() -> None:
    life = Life(fleet("ready", "ready"))
    life.listed(0)
    life.gone(1, 0)
    life.looked_up(1, removed=False)
    assert life.state(1) == "crashed"


def test_whoever_has_no_key_yet_is_not_missed() -> None:
    life = Life(fleet("ready", "starting"))
    life.listed(0)
    life.after(60.0)
    assert life.states() == ["ready", "starting"]


def test_one_that_drains_may_well_be_absent() -> None:
    life = Life(fleet("ready", "ready"))
    life.feed(st.Drain(stimulus_id="d", name=name(1)))
    due_s = life.worker(1).due_s
    life.listed(0)
    life.after(10.0)
    assert (life.state(1), life.worker(1).due_s, life.worker(1).lease) == ("draining", due_s, None)


# --- outages ---------------------------------------------------------------------------------------


def die(life: Life, n: int, unit: float) -> None:
    """It ends unasked, and is swept."""
    life.gone(n, 1, unit=unit)
    life.swept(n)


def started(life: Life, within_s: float) -> dict[int, float]:
    """When each decode worker was spawned again, in seconds from now."""
    begin_s, found = life.now_s, {}
    while life.now_s - begin_s < within_s:
        life.now_s += 0.125
        said = life.feed(st.Tick())
        if "look at GPUs" in said:
            said += life.gpus()
        for each in said:
            if each.startswith("spawn"):
                n = int(each.rpartition("_")[2]) if "_" in each else 0
                found[n] = life.now_s - begin_s
                life.up(n, 7000 + n)
    return found


def test_all_that_fail_in_an_outage_come_back_spread_counted_from_its_end() -> None:
    """They load the same disks: 64 starts in a quarter of a second had been seen."""
    life = Life(fleet(*["ready"] * 5))
    life.infra(ok=False)
    for n in range(5):
        die(life, n, unit=n / 4)
        life.now_s += 1.0
    assert life.states() == ["backing_off"] * 5
    assert started(life, 300.0) == {}, "nothing is started while etcd or NATS is away"
    life.infra(ok=True)
    back = started(life, 30.0)
    assert back == {0: 1.0, 1: 2.25, 2: 3.5, 3: 4.75, 4: 6.0}
    assert all(worker.history.failures_s == () for worker in life.fleet.of("VllmWorker")), "they are not to blame"


def test_failures_before_the_outage_was_noticed_are_forgiven() -> None:
    """The first to die of it is seen before it: ten seconds, a lease's time to live."""
    life = Life(fleet("ready", "ready"))
    die(life, 0, 0.5)
    life.now_s += 20.0
    die(life, 1, 0.5)
    life.now_s += 0.5
    life.infra(ok=False)
    assert len(life.worker(0).history.failures_s) == 1, "of long before"
    assert life.worker(1).history.failures_s == ()
    assert (life.worker(1).ended.waiting_for_infra, life.worker(1).due_s) == (True, None)
    life.infra(ok=True)
    assert life.worker(1).due_s == life.now_s + 1.0 + 2.5


def test_a_back_off_that_ends_in_an_outage_waits_for_its_end() -> None:
    """The failure was its own, long before; but a start would only fail again."""
    life = Life(replace(fleet("ready"), policy=RestartPolicy(first_s=30.0)))
    die(life, 0, 0.0)
    life.now_s += 15.0
    life.infra(ok=False)
    assert (len(life.worker().history.failures_s), life.worker().ended.waiting_for_infra) == (1, False)
    assert life.until_due() == []
    assert life.worker().ended.waiting_for_infra
    life.infra(ok=True)
    assert life.worker().due_s == life.now_s + 30.0


def test_an_outage_told_twice_is_one() -> None:
    life = Life(fleet("ready"))
    life.infra(ok=False)
    life.feed(st.InfraSeen(stimulus_id="sample", ok=False))
    assert life.last == ()


def test_a_worker_held_back_by_an_outage_may_be_taken_away() -> None:
    life = Life(fleet("ready", "ready"))
    life.infra(ok=False)
    die(life, 1, 0.5)
    life.feed(st.Drain(stimulus_id="d", name=name(1)))
    life.gpus()
    life.infra(ok=True)
    assert started(life, 30.0) == {}
    assert life.states() == ["ready"]


def test_failures_in_an_outage_never_fault() -> None:
    life = Life(replace(fleet("ready"), policy=RestartPolicy(failures_max=1), infra_ok=False))
    die(life, 0, 0.0)
    assert life.state() == "backing_off"
    life.infra(ok=True)
    assert started(life, 5.0) == {0: 1.0}
    assert life.worker().pid == 7000 != pid_of(0)
