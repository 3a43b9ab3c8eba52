"""The machine: how workers come up, fail to, and are tried again."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import pytest

from dynamo_local.core.fleet import effects as ins
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.backoff import RestartHistory, RestartPolicy
from dynamo_local.core.fleet.events import Change
from dynamo_local.core.fleet.fleet import StartPace
from dynamo_local.core.types import lease_hex
from tests.fakes.arbiter.fleet_views import fleet, lease_of, load, name, pid_of, put, worker
from tests.fakes.arbiter.machine import Life

PLUS_ONE = st.Scale(stimulus_id="scale:1", component="VllmWorker", target=Change(1, relative=True))
MINUS_ONE = st.Scale(stimulus_id="scale:2", component="VllmWorker", target=Change(-1, relative=True))


def fragile(*states: str, failures_max: int = 3) -> Life:
    """Workers that are faulted after so many failures."""
    return Life(replace(fleet(*states), policy=RestartPolicy(failures_max=failures_max)))


# --- starting ------------------------------------------------------------------------------------


def test_all_that_is_pending_starts() -> None:
    """`dynamo serve`: the intent is committed, with the devices, before any process is made."""
    life = Life(fleet("pending", "pending"))
    assert life.feed(st.StartAll(stimulus_id="serve")) == ["spawn VllmWorker", "spawn VllmWorker_1"]
    assert life.states() == ["starting", "starting"]
    assert life.free() == [2, 3, 4, 5, 6, 7]
    kinds = [type(each).__name__ for each in life.last]
    assert kinds == ["Lock", "Lock", "Commit", "Spawn", "Spawn"]
    assert {each.stimulus_id for each in life.did(ins.Spawn)} == {"serve"}


def test_starts_beyond_a_few_wait_for_their_turn_with_their_gpus() -> None:
    """64 starts at once on two cores took the time from etcd: leases expired."""
    life = Life(replace(fleet("pending", "pending", "pending", "pending"), pace=StartPace(at_once=2, every_s=0.5)))
    assert life.feed(st.StartAll(stimulus_id="serve")) == ["spawn VllmWorker", "spawn VllmWorker_1"]
    assert life.states() == ["starting", "starting", "pending", "pending"]
    assert life.free() == [4, 5, 6, 7]
    assert life.feed(st.StartAll(stimulus_id="again")) == []
    assert life.after(0.4) == []
    assert life.after(0.1) == ["spawn VllmWorker_2"]
    life.feed(MINUS_ONE)
    life.gpus()
    assert life.states() == ["starting", "starting", "starting"]
    assert life.after(10.0) == []
    assert life.feed(PLUS_ONE) == ["spawn VllmWorker_3"]


def test_a_failed_worker_waits_for_its_turn_as_well() -> None:
    pace = StartPace(at_once=1, every_s=5.0)
    life = Life(replace(fleet(worker(0, "ready"), worker(1, "pending")), pace=pace))
    life.feed(st.StartAll(stimulus_id="serve"))
    life.gone(0, 1)
    life.swept()
    life.after(1.0)
    life.gpus()
    assert life.state() == "backing_off"
    assert life.after(3.5) == []
    assert life.after(0.5) == ["look at GPUs"]
    assert life.gpus() == ["spawn VllmWorker"]


def test_a_worker_is_ready_when_it_says_so() -> None:
    life = Life(fleet("pending"))
    life.feed(st.StartAll(stimulus_id="serve"))
    assert life.worker().due_s is None
    assert life.made() == []
    assert (life.events(), life.worker().pid, life.worker().due_s) == (["Spawned"], pid_of(0), life.now_s + 300.0)
    assert life.registered(endpoints=("e",), other_leases=("abc",)) == []
    assert (life.events(), life.state()) == (["Registered"], "ready")
    ready = life.worker()
    assert (ready.lease, ready.endpoints, ready.other_leases) == (lease_of(0), ("e",), ("abc",))
    health = ready.health
    assert (health.served, health.ready_s, health.heard_s, ready.due_s) == (
        True,
        life.now_s,
        life.now_s,
        None,
    )


@pytest.mark.parametrize(("starts", "first"), [(0, True), (1, False)])
def test_only_the_first_process_of_a_name_puts_an_old_log_aside(starts: int, first: bool) -> None:
    life = Life(fleet(worker(0, "pending", starts=starts)))
    life.feed(st.StartAll(stimulus_id="serve"))
    assert [each.first for each in life.did(ins.Spawn)] == [first]


def test_a_process_that_nobody_asked_for_is_ended() -> None:
    life = Life(fleet("ready"))
    assert life.made(3, 77) == ["end session 77 VllmWorker_3"]
    assert life.made(0, 78) == ["end session 78 VllmWorker"]
    assert life.worker().pid == pid_of(0)


def test_a_late_start_is_ended_and_counts_as_a_failure() -> None:
    life = Life(fleet("pending"))
    life.feed(st.StartAll(stimulus_id="serve"))
    life.made()
    assert life.after(299.9) == []
    assert life.after(0.1) == [f"end session {pid_of(0)} VllmWorker"]
    assert (life.events(), life.state()) == (["StartDeadlinePassed"], "start_timed_out")
    assert life.worker().reason == "was not ready within 300 s"
    assert life.gone(0, -9) == ["sweep VllmWorker"]
    assert life.swept() == ["report: was not ready within 300 s VllmWorker", "look at GPUs"]
    assert life.gpus() == []
    assert (life.state(), life.worker().gpus, len(life.free())) == ("backing_off", (), 8)
    assert life.until_due() == ["spawn VllmWorker"]


def test_a_process_that_sigkill_does_not_end_is_told() -> None:
    life = Life(fleet("pending"))
    life.feed(st.StartAll(stimulus_id="serve"))
    life.made()
    life.after(300.0)
    life.after(10.0)
    assert life.told == [f"{name()}: pid {pid_of(0)} is still there 10 s after SIGKILL (a stuck driver?)"]
    assert life.gone(0, -9) == ["sweep VllmWorker"], "if it ends after all, things go on"


def test_a_spawn_that_is_refused_is_a_failure_like_any_other() -> None:
    life = Life(fleet("pending"))
    life.feed(st.StartAll(stimulus_id="serve"))
    assert life.refused(why="no memory") == ["report: could not be started: no memory VllmWorker"]
    assert (life.events(), life.state()) == (["SpawnFailed", "BackoffStarted"], "backing_off")
    assert life.worker().due_s == life.now_s + 1.0
    assert life.until_due() == ["look at GPUs"], "its own devices, if nobody is on them"
    assert life.gpus() == ["spawn VllmWorker"]


def test_a_start_that_is_taken_back_before_its_process_is_there() -> None:
    life = Life(fleet("ready", "pending"))
    life.feed(st.StartAll(stimulus_id="serve"))
    life.begun(1)
    assert life.feed(MINUS_ONE) == []
    assert life.state(1) == "draining"
    assert life.made(1) == [f"SIGTERM {pid_of(1)} VllmWorker_1"]
    assert life.worker(1).due_s == life.now_s + 10.0
    assert life.gone(1) == ["sweep VllmWorker_1"]
    life.swept(1)
    assert life.gpus() == ["forget VllmWorker_1"]
    assert life.state(1) == "gone"


def test_a_start_that_is_taken_back_and_refused_is_just_gone() -> None:
    life = Life(fleet("ready", "pending"))
    life.feed(st.StartAll(stimulus_id="serve"))
    life.begun(1)
    life.feed(MINUS_ONE)
    life.refused(1)
    assert life.gpus() == ["forget VllmWorker_1"]
    assert life.states() == ["ready"]


# --- failing -------------------------------------------------------------------------------------


def test_a_crash_is_swept_and_backed_off_then_started_on_its_own_devices() -> None:
    life = Life(put(fleet("ready"), name(), other_leases=("abc",)))
    held = life.worker().gpus
    assert life.gone(0, 1) == [
        "revoke abc VllmWorker",
        f"revoke {lease_of(0)} VllmWorker",
        "sweep VllmWorker",
    ]
    assert (life.state(), life.worker().reason) == ("crashed", "exited with code 1 unasked")
    died_s = life.now_s
    life.now_s += 0.4
    assert life.swept() == ["report: exited with code 1 unasked VllmWorker"]
    assert (life.state(), life.worker().due_s) == ("backing_off", died_s + 1.0)
    assert life.worker().gpus == held, "they are kept for it"
    assert life.until_due() == ["look at GPUs"]
    assert life.gpus() == ["spawn VllmWorker"]
    assert (life.events(), life.worker().gpus) == (["BackoffElapsed"], held)
    life.up(0, 77)
    assert (life.state(), life.worker().restarts) == ("ready", 1)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (1, "exited with code 1 unasked"),
        (-9, "was killed by SIGKILL"),
        (None, "ended unasked"),
    ],
)
def test_whoever_goes_unasked_has_crashed_and_it_is_said_how(code: int, why: str) -> None:
    life = Life(fleet("ready"))
    life.gone(0, code)
    assert life.state() == "crashed"
    assert life.worker().reason == why


def test_an_exit_of_another_process_changes_nothing() -> None:
    life = Life(fleet("ready"))
    before = life.fleet
    assert life.gone(0, 1, pid=77) == []
    assert life.gone(5, 1, pid=77) == []
    assert life.swept(0) == []
    assert life.fleet == before


def crash_once(life: Life, pid: int) -> None:
    """From a process to whatever follows its death."""
    life.gone(0, 1)
    life.swept()
    if life.state() == "backing_off":
        life.until_due()
        life.gpus()
        life.made(0, pid)


def test_failures_in_a_row_are_a_fault_and_its_devices_go_back() -> None:
    life = fragile("ready", failures_max=3)
    for pid in (71, 72, 73):
        assert life.state() in ("ready", "starting")
        crash_once(life, pid)
    assert life.state() == "faulted"
    assert life.told[-1].startswith(f"{name()} is faulted: 3 failures within 600 s, the last: exited with code 1")
    assert f"dynamo restart {name()}" in life.told[-1]
    life.gpus()
    assert (life.worker().gpus, len(life.free())) == ((), 8)
    assert life.feed(PLUS_ONE) == ["spawn VllmWorker"]
    assert life.worker().history == RestartHistory()


def test_delays_grow_with_each_failure_in_a_row_and_a_good_run_resets_them() -> None:
    life = Life(replace(fleet("ready"), policy=RestartPolicy(failures_max=100)))
    delays = []
    for pid in range(71, 75):
        life.gone(0, 1)
        died_s = life.now_s
        life.swept()
        delays.append((life.worker().due_s or 0.0) - died_s)
        life.until_due()
        life.gpus()
        life.up(0, pid)
        life.now_s += 70.0 if pid == 73 else 1.0
    assert delays == [1.0, 1.0 * 2, 4.0, 1.0], "the first had run for 100 s, the last for 70 s"


def test_a_crashed_worker_that_is_wanted_no_more_is_not_started_again() -> None:
    life = Life(fleet("ready", "ready"))
    life.gone(1, 1)
    assert life.feed(MINUS_ONE) == []
    assert life.state(1) == "crashed/leaving"
    life.swept(1)
    assert life.gpus() == ["forget VllmWorker_1"]
    assert (life.states(), len(life.free())) == (["ready"], 7)


def test_a_back_off_that_is_taken_back_is_gone_when_its_memory_is_seen_to_be() -> None:
    life = Life(fleet("ready", "ready"))
    life.gone(1, 1)
    life.swept(1)
    assert life.feed(MINUS_ONE) == ["look at GPUs"]
    assert life.state(1) == "exited"
    assert life.gpus() == ["forget VllmWorker_1"]
    assert life.states() == ["ready"]


def test_a_bare_worker_that_leaves_stays_as_the_template() -> None:
    """So that the component can come back under its name."""
    life = Life(fleet("ready", "ready"))
    life.feed(st.Drain(stimulus_id="drain", name=name()))
    life.gone()
    life.swept()
    assert life.gpus() == ["forget VllmWorker"]
    assert life.states() == ["exited", "ready"]
    assert life.feed(PLUS_ONE) == ["spawn VllmWorker"]


def test_an_engine_that_says_that_it_dies_is_a_crash_and_no_drain() -> None:
    life = Life(fleet("ready"))
    assert life.registered(failed=True) == []
    assert life.key_gone() == []
    assert life.state() == "ready"
    life.gone(0, 1)
    assert life.state() == "crashed"


# --- wanted again ----------------------------------------------------------------------------------


def test_a_worker_wanted_again_before_its_last_process_was_swept_waits_for_that() -> None:
    life = Life(fleet("ready", "ready"))
    life.feed(st.Drain(stimulus_id="drain", name=name()))
    life.gone()
    assert life.feed(PLUS_ONE) == ["look at GPUs"], "the bare name is the lowest"
    assert life.state() == "pending"
    assert life.gpus() == [], "its memory is back, its children are not gone"
    assert life.swept() == ["spawn VllmWorker"]


def test_a_worker_taken_back_before_its_last_process_was_swept_is_gone_after_that() -> None:
    life = Life(fleet("ready", "ready", "ready"))
    life.feed(st.Restart(stimulus_id="restart", name=name(2)))
    life.gone(2)
    assert life.state(2) == "exited/restarting"
    life.feed(MINUS_ONE)
    assert life.state(2) == "exited"
    life.swept(2)
    assert life.gpus() == ["forget VllmWorker_2"]
    assert life.states() == ["ready", "ready"]


def test_an_entry_does_not_go_while_its_remains_are_cleared() -> None:
    """Wanted again and taken back, all before the sweep ended: devices that are back are no reason to forget it."""
    life = Life(fleet("ready", "ready"))
    life.feed(st.Drain(stimulus_id="drain", name=name()))
    life.gone()
    life.feed(PLUS_ONE)
    life.feed(st.Drain(stimulus_id="drain", name=name(), force=True))
    assert life.state() == "exited"
    assert life.gpus() == []
    assert life.worker().ended.sweeping
    assert life.swept() == ["look at GPUs"], "it holds them still"
    assert life.gpus() == ["forget VllmWorker"]


# --- health ----------------------------------------------------------------------------------------


def test_a_worker_that_answers_nothing_for_too_long_is_ended() -> None:
    life = Life(fleet("ready", "ready"))
    life.heard({0: load(5), 1: load(6)})
    found: list[str] = []
    while not found:
        life.now_s += 1.0
        found = life.heard({0: load(5)})
    assert found == [f"revoke {lease_of(1)} VllmWorker_1", f"end session {pid_of(1)} VllmWorker_1"]
    assert life.now_s == 100.0 + 31.0
    assert (life.state(1), life.events()) == ("crashed", ["HealthFailed"])
    assert life.worker(1).reason == "is hung: it has answered nothing for 31 s"


@pytest.mark.parametrize("silent_s", [42.0, 3600.0])
def test_silence_counts_only_while_the_arbiter_asked(silent_s: float) -> None:
    """Seen: SIGSTOP of the arbiter for 42 s, then SIGCONT; it killed a frontend with all its streams."""
    life = Life(fleet("ready"))
    life.heard({0: load()})
    life.now_s += silent_s
    assert life.heard({}) == []
    assert life.state() == "ready"
    assert life.worker().health.silent_s == 3.0


def test_silence_is_nobodys_fault_while_nobody_can_be_asked() -> None:
    life = Life(fleet("ready"))
    life.heard({0: load()})
    for blameless in [False] * 20 + [True] + [False] * 20:
        life.now_s += 1.0
        assert life.heard({}, blameless=blameless) == []
    assert life.worker().health.silent_s == 20.0


def test_a_load_that_is_too_old_is_none() -> None:
    """Unknown is not zero, nor what it was."""
    life = Life(fleet("ready"))
    life.heard({0: load(7)})
    for _ in range(3):
        life.now_s += 1.0
        life.heard({})
        assert life.worker().load == load(7)
    life.now_s += 1.0
    life.heard({})
    assert str(life.worker().load) == "Missing(reason='no answer')"


def test_a_start_has_its_own_deadline_and_is_not_hung() -> None:
    life = Life(fleet("starting"))
    for _ in range(100):
        life.now_s += 1.0
        assert life.heard({}) == []
    assert life.state() == "starting"


def test_deadlines_move_when_the_arbiter_stood_still() -> None:
    """Nothing could be seen in that time, so nobody is late for it. A back-off is over when it is over."""
    life = Life(fleet("starting", "draining", "backing_off"))
    before = life.fleet
    life.now_s += 42.0
    life.feed(st.Stalled(for_s=42.0))

    def moved(n: int, field: str) -> float:
        return float(attrgetter(field)(life.worker(n)) - attrgetter(field)(before.workers[name(n)]))

    assert [moved(0, "due_s"), moved(1, "due_s"), moved(1, "leave.requested_at_s"), moved(2, "due_s")] == [
        42.0,
        42.0,
        42.0,
        0.0,
    ]


def test_a_stalled_arbiter_waits_as_long_for_memory_as_one_that_ran() -> None:
    life = Life(fleet("ready", "ready"))
    life.feed(MINUS_ONE)
    life.gone(1)
    life.swept(1)
    life.now_s += 3600.0
    life.feed(st.Stalled(for_s=3600.0))
    busy = [replace(device, memory_used_bytes=2**36) for device in life.fleet.gpus.devices]
    life.gpus(devices=busy)
    assert life.fleet.gpus.quarantined == {}


def test_leases_are_hex() -> None:
    assert lease_of(0) == lease_hex(pid_of(0))
