"""The machine: workers that change their role, stay what they were, or die of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.core.fleet import effects as ins
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.events import Change
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.types import Role
from dynamo_local.errors import (
    BeingRestarted,
    DynamoError,
    FlipNotCancellable,
    FlipUnderWay,
    LastReadyWorker,
    NotApplicable,
    NotFlippable,
    NotRestartable,
    TooManyWorkers,
)
from tests.fakes.arbiter.fleet_views import (
    DECODE,
    FRONTEND,
    PREFILL,
    TEMPLATES,
    lease_of,
    load,
    name,
    on_ledger,
    pid_of,
    put,
    worker,
)
from tests.fakes.arbiter.machine import Life

PID = pid_of(1)
NEW = name(1, "PrefillWorker")
LEASE = "beef"


def two_and_one() -> Fleet:
    """Two decode workers and one that prefills."""
    return on_ledger([worker(0, "ready"), worker(1, "ready"), worker(0, "ready", PREFILL)], 4)


def flip(who: str = name(1), *, force: bool = False) -> st.Flip:
    """`dynamo flip`"""
    return st.Flip(stimulus_id="flip:1", name=who, force=force)


def flipping() -> Life:
    """`_1` has just been asked to prefill."""
    life = Life(two_and_one())
    life.feed(flip())
    return life


def answered(
    error: str | None = None, *, lease: str | None = LEASE, unknown: bool = False, who: str = name(1), pid: int = PID
) -> st.FlipAnswered:
    """What the worker says."""
    return st.FlipAnswered(
        stimulus_id="control",
        name=who,
        pid=pid,
        to=NEW,
        lease=None if error else lease,
        endpoints=() if error else (f"dynamo/components/PrefillWorker/status:{lease}",),
        error=error,
        unknown=unknown,
    )


def key(who: str = NEW, lease: str = LEASE, pid: int = PID) -> st.KeyPut:
    """Its ready key under that name."""
    return st.KeyPut(stimulus_id=f"etcd:{lease}", name=who, pid=pid, lease=lease)


def prefiller(life: Life) -> Worker:
    """The worker under its new name."""
    return life.fleet.workers[NEW]


# --- there -------------------------------------------------------------------------------------------


def test_a_flip_from_the_word_to_the_end() -> None:
    """Committed, asked, and when its new key is seen: name, role and component change in one commit."""
    life = Life(two_and_one())
    gpus = life.worker(1).gpus
    assert life.feed(flip()) == [f"flip to {NEW} VllmWorker_1"]
    assert [type(each).__name__ for each in life.last] == ["Commit", "FlipRole"]
    assert (life.events(), life.state(1)) == (["FlipRequested"], "flipping")
    assert (life.fleet.capacity("VllmWorker"), life.fleet.capacity("PrefillWorker")) == (1, 2)
    assert life.feed(flip()) == []  # the same command twice is nothing new
    assert life.feed(key()) == ["rename dynamo_VllmWorker_1 PrefillWorker_1", f"revoke {lease_of(1)} PrefillWorker_1"]
    assert life.events() == ["Flipped"]
    commit = life.did(ins.Commit)[0]
    assert set(commit.names) == {name(1), NEW}
    assert life.state(1) == "gone"
    now = prefiller(life)
    assert (now.component, now.role, now.n, now.state) == ("PrefillWorker", Role.PREFILL, 1, "ready")
    assert (now.pid, now.gpus, now.lease, now.start.spawned_as, now.flip) == (PID, gpus, LEASE, name(1), None)
    assert life.feed(answered()) == []  # its answer comes later: nothing is new
    assert life.key_gone(1) == []  # and so is the end of its old key


def test_its_answer_may_come_before_its_key() -> None:
    life = flipping()
    life.feed(answered())
    assert (prefiller(life).state, prefiller(life).lease) == ("ready", LEASE)
    assert life.feed(key()) == []
    assert life.events() == []


def test_its_old_key_may_go_first() -> None:
    life = flipping()
    life.key_gone(1)
    assert (life.state(1), life.worker(1).lease) == ("flipping", None)
    assert life.feed(key())[0] == "rename dynamo_VllmWorker_1 PrefillWorker_1"


def test_the_bare_worker_leaves_its_entry_as_a_template() -> None:
    """So that the component can come back, under a name that nobody has."""
    life = Life(two_and_one())
    life.feed(flip(name()))
    life.feed(key(pid=pid_of(0)))
    rest = life.fleet.workers[name()]
    assert (rest.state, rest.pid, rest.gpus, rest.component) == ("exited", None, (), "VllmWorker")
    assert prefiller(life).start.spawned_as == name()
    scaled = life.feed(st.Scale(stimulus_id="s", component="VllmWorker", target=Change(1, relative=True)))
    assert "spawn VllmWorker_2" in scaled  # not the bare name, under which the process was made that prefills now


def test_back_again_it_has_the_name_of_its_birth() -> None:
    life = flipping()
    life.feed(key())
    assert name(1) in life.fleet.reserved()
    life.feed(flip(NEW))
    life.feed(key(name(1), "cafe"))
    assert (life.worker(1).start.spawned_as, life.worker(1).lease, life.worker(1).pid) == (None, "cafe", PID)
    assert life.fleet.reserved() == frozenset()


def test_a_retired_component_keeps_no_template() -> None:
    retired = tuple(replace(each, retired=each is DECODE) for each in TEMPLATES)
    life = Life(on_ledger([worker(0, "ready"), worker(0, "ready", PREFILL)], 2, retired))
    life.feed(flip(name(), force=True))
    life.feed(key(pid=pid_of(0)))
    assert name() not in life.fleet.workers


def test_who_serves_with_a_fingerprint_has_that_of_its_new_component() -> None:
    """Else the next apply would give it a new process, though nothing differs."""
    templates = (replace(DECODE, fingerprint="d"), replace(PREFILL, fingerprint="p"), FRONTEND)
    begun = on_ledger([worker(0, "ready"), worker(1, "ready", launched="d")], 4, templates)
    life = Life(begun)
    life.feed(flip())
    life.feed(key(name(0, "PrefillWorker")))
    assert life.fleet.workers[name(0, "PrefillWorker")].start.launched == "p"


# --- not there -----------------------------------------------------------------------------------------


def test_a_flip_that_fails_ends_in_the_old_role() -> None:
    life = flipping()
    life.feed(answered("no hand-off succeeded"))
    assert (life.events(), life.state(1), life.worker(1).flip) == (["FlipFailed"], "ready", None)
    assert (life.fleet.capacity("VllmWorker"), life.fleet.capacity("PrefillWorker")) == (2, 1)
    assert "no hand-off succeeded" in life.told[0]


def test_one_that_has_lost_its_registration_over_it_leaves() -> None:
    life = flipping()
    life.key_gone(1)
    life.feed(answered("it is draining"))
    assert life.state(1) == "draining"


def test_while_nobody_can_tell_it_is_asked_again() -> None:
    """NATS was away: it may have flipped. The question is the same, and its answer says how far it is."""
    life = flipping()
    life.feed(answered("no answer", unknown=True))
    assert life.state(1) == "flipping"
    assert life.until_due() == [f"flip to {NEW} VllmWorker_1"]
    life.feed(answered())
    assert prefiller(life).ready


def test_a_flip_is_taken_back() -> None:
    """At once: it does not wait for the answer to the flip. What became of it that answer says."""
    life = flipping()
    assert life.feed(st.Flip(cancel=True, stimulus_id="c", name=name(1))) == ["call off flip VllmWorker_1"]
    assert life.feed(st.Flip(cancel=True, stimulus_id="c", name=name(1))) == []
    life.feed(answered("it was taken back"))
    assert life.state(1) == "ready"
    assert life.told == []


def test_a_cancel_may_come_too_late() -> None:
    life = flipping()
    life.feed(st.Flip(cancel=True, stimulus_id="c", name=name(1)))
    life.feed(key())
    assert prefiller(life).ready
    assert "taken back too late" in life.told[0]
    with pytest.raises(FlipNotCancellable):
        life.feed(st.Flip(cancel=True, stimulus_id="c", name=NEW))


@pytest.mark.parametrize("code", [0, 1, -9])
def test_one_that_dies_of_it_is_started_in_its_old_role(code: int) -> None:
    """Nobody has seen it in the new one."""
    life = flipping()
    assert life.gone(1, code) == [f"revoke {lease_of(1)} VllmWorker_1", "sweep VllmWorker_1"]
    assert (life.state(1), life.worker(1).flip) == ("crashed", None)
    life.swept(1)
    assert life.state(1) == "backing_off"


def test_one_that_hangs_in_it_is_ended() -> None:
    life = flipping()
    life.fleet = put(life.fleet, name(1), silent_s=29.0, heard_s=0.0)
    life.now_s += 3.0
    life.fleet = replace(life.fleet, sampled_s=life.now_s - 3.0)
    life.heard({})
    assert life.state(1) == "crashed"


def test_one_that_answers_under_its_new_name_does_not_hang() -> None:
    life = flipping()
    life.heard({1: load()})
    for _ in range(12):
        life.now_s += 3.0
        life.feed(st.LoadsHeard(stimulus_id="sample", loads={NEW: load(active=3)}))
    assert (life.state(1), life.worker(1).load) == ("flipping", load(active=3))


def test_its_end_may_be_heard_under_its_old_name() -> None:
    """circus's watcher is renamed a moment later than the fleet."""
    life = flipping()
    life.feed(key())
    sweep = life.feed(st.ProcessGone(stimulus_id=f"exit:{PID}", name=name(1), pid=PID, code=-9, unit=0.0))
    assert sweep == [f"revoke {LEASE} PrefillWorker_1", "sweep PrefillWorker_1"]
    assert life.did(ins.Sweep)[0].spawned_as == name(1)
    assert prefiller(life).state == "crashed"
    assert name(1) in life.fleet.reserved()  # what it has left behind is still being ended
    life.feed(st.Swept(stimulus_id="sweep", name=NEW))
    assert name(1) not in life.fleet.reserved()


# --- beside other things ---------------------------------------------------------------------------------


def test_down_meets_a_flip_as_a_drain() -> None:
    life = flipping()
    asked = life.feed(st.Leave(stimulus_id="down"))
    assert f"SIGTERM {PID} VllmWorker_1" in asked
    assert (life.state(1), life.worker(1).flip) == ("draining", None)
    assert life.feed(key()) == []
    assert life.feed(answered()) == []


@pytest.mark.parametrize(
    ("order", "refusal"),
    [
        (st.Drain(stimulus_id="d", name=name(1), force=True), FlipUnderWay),
        (st.Restart(stimulus_id="r", name=name(1)), FlipUnderWay),
        (st.Restart(stimulus_id="r", name="VllmWorker"), FlipUnderWay),
        (st.Apply(stimulus_id="a", templates=TEMPLATES), NotApplicable),
        (flip(name(0)), LastReadyWorker),
    ],
)
def test_what_waits_until_a_flip_is_over(order: st.Event, refusal: type[DynamoError]) -> None:
    life = flipping()
    before = life.fleet
    with pytest.raises(refusal):
        life.feed(order)
    assert life.fleet is before


def test_a_scale_down_leaves_alone_who_is_about_to_come() -> None:
    life = flipping()
    fewer = st.Scale(stimulus_id="s", component="PrefillWorker", target=Change(-1, relative=True), force=True)
    assert life.feed(fewer) == [f"SIGTERM {pid_of(0, PREFILL)} PrefillWorker"]
    with pytest.raises(FlipUnderWay):
        life.feed(fewer)


def test_names_that_are_promised_go_to_nobody_else() -> None:
    life = Life(on_ledger([worker(n, "ready") for n in range(3)] + [worker(0, "ready", PREFILL)], 6))
    life.feed(flip(name(1)))
    life.feed(flip(name(2)))
    life.feed(st.Scale(stimulus_id="s", component="PrefillWorker", target=Change(1, relative=True)))
    becomes = [each.flip.name for each in life.fleet.workers.values() if each.flip is not None]
    assert becomes == [NEW, name(2, "PrefillWorker")]
    assert name(3, "PrefillWorker") in life.fleet.workers


def test_a_successor_asks_again() -> None:
    life = flipping()
    life.fleet = put(life.fleet, name(1), flip=replace(life.worker(1).flip, asking=False), due_s=0.0)  # type: ignore[type-var]
    assert life.feed(st.Resume(stimulus_id="adopt")) == [f"flip to {NEW} VllmWorker_1"]


# --- refused ---------------------------------------------------------------------------------------------


def _with(template: object, *also: Worker) -> Fleet:
    begun = on_ledger([worker(0, "ready"), worker(1, "ready"), worker(0, "ready", PREFILL), *also], 6)
    return replace(begun, templates=(template, PREFILL, FRONTEND))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fleet", "who", "refusal", "words"),
    [
        (_with(replace(DECODE, flips_to=None, cannot_flip="block_size: 16 and 32")), name(1), NotFlippable, "16 and"),
        (_with(DECODE, worker(2, "draining")), name(2), NotFlippable, "is draining: only a worker that is ready"),
        (_with(DECODE, worker(2, "starting")), name(2), NotFlippable, "is starting"),
        (_with(DECODE, worker(0, "ready", FRONTEND)), name(0, "Frontend"), NotFlippable, "cannot change its role"),
        (_with(replace(DECODE, fingerprint="b"), worker(2, "ready", launched="a")), name(2), NotFlippable, "another"),
        (_with(DECODE), name(0, "PrefillWorker"), LastReadyWorker, "without a ready worker"),
    ],
)
def test_who_cannot_flip_and_why(fleet: Fleet, who: str, refusal: type[DynamoError], words: str) -> None:
    with pytest.raises(refusal, match=words):
        Life(fleet).feed(flip(who))


def test_a_component_has_its_bound() -> None:
    begun = replace(two_and_one(), templates=(DECODE, replace(PREFILL, max_workers=1), FRONTEND))
    with pytest.raises(TooManyWorkers):
        Life(begun).feed(flip())


def test_nobody_becomes_what_is_wanted_no_more() -> None:
    begun = replace(two_and_one(), templates=(DECODE, replace(PREFILL, retired=True), FRONTEND))
    with pytest.raises(NotFlippable, match="wanted no more"):
        Life(begun).feed(flip())


def test_who_is_still_to_be_restarted_does_not_flip() -> None:
    """Its new process would be of the old role. A template whose name is a live process's is not brought back."""
    life = Life(two_and_one())
    life.feed(st.Restart(stimulus_id="r", name="VllmWorker"))
    with pytest.raises(BeingRestarted):
        life.feed(flip(name(0)))
    life = Life(two_and_one())
    life.feed(flip(name()))
    life.feed(key(pid=pid_of(0)))
    with pytest.raises(NotRestartable, match="has another role now"):
        life.feed(st.Restart(stimulus_id="r", name=name()))
