"""The controller: in which order a step becomes true, and who waits for whom. Nothing goes on unless a test says so."""

from __future__ import annotations

import pytest

from dynamo_local.arbiter.controller import LOCK_TRIES, STALL_S, FleetController
from dynamo_local.core.fleet import effects as ins
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.effects import Transition
from dynamo_local.core.fleet.events import Change
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.fleet.lifecycle import IllegalTransition
from dynamo_local.core.types import WorkerState
from dynamo_local.errors import LastReadyWorker
from dynamo_local.system.gpu_locks import GpuLocked
from tests.fakes.arbiter.effects import FakeEffects
from tests.fakes.arbiter.fleet_views import fleet, name, pid_of, put
from tests.fakes.arbiter.hand_clock import HandClock

OTHER = "namespace other"


class Bench:
    """A controller over fake effects; every fleet is validated."""

    def __init__(self, begun: Fleet, *, quick: bool = False) -> None:
        self.clock = HandClock()
        self.effects = FakeEffects(quick=quick)
        self.effects.locked = set(begun.gpus.holder_of)
        self.controller = FleetController(begun, self.effects, self.clock, validates=True)
        self.seen: list[str] = []
        self.controller.subscribe(
            on_event=lambda event: self.seen.append(type(event).__name__),
            on_transition=self._on_transition,
            on_fleet=lambda fleet: self.seen.append(f"{len(fleet.workers)} workers"),
        )

    @property
    def journal(self) -> list[str]:
        """What was asked for since this was last read."""
        found, self.effects.journal = self.effects.journal, []
        return [each.replace("dynamo_", "") for each in found]

    def scale(self, count: int) -> None:
        """`dynamo scale VllmWorker`"""
        change = Change(count, relative=True)
        self.controller.feed(st.Scale(stimulus_id="scale", component="VllmWorker", target=change))

    def drain(self, n: int = 1) -> None:
        """`dynamo drain`"""
        self.controller.feed(st.Drain(stimulus_id="drain", name=name(n)))

    def _on_transition(self, worker: Worker, transition: Transition) -> None:
        self.seen.append(f"{transition.kind} of one that is {worker.state}")


# --- in which order ----------------------------------------------------------------------------------


def test_locks_then_the_commit_then_the_acts() -> None:
    bench = Bench(fleet("ready"))
    bench.scale(1)
    assert bench.journal == ["lock VllmWorker_1", "commit VllmWorker_1"]
    bench.effects.write()
    assert bench.journal == ["spawn VllmWorker_1"]


def test_decisions_do_not_wait_for_the_disk() -> None:
    bench = Bench(fleet("ready", "ready", "ready"))
    bench.scale(-1)
    bench.scale(-1)
    assert [worker.state for worker in bench.controller.fleet.of("VllmWorker")] == ["ready", "draining", "draining"]
    assert len(bench.effects.writes) == 2
    assert bench.effects.begun == []


def test_a_caller_hears_when_its_intent_is_written() -> None:
    """`dynamo scale` answers then."""
    bench, told = Bench(fleet("ready", "ready")), []
    bench.controller.feed(st.Drain(stimulus_id="drain", name=name(1)), committed=lambda: told.append("written"))
    assert told == []
    bench.effects.write()
    assert told == ["written"]
    bench.controller.feed(
        st.Drain(stimulus_id="drain", name=name(1)), committed=lambda: told.append("nothing to write")
    )
    assert told == ["written", "nothing to write"]


def test_acts_on_one_worker_wait_for_each_other_and_for_their_own_commit() -> None:
    """Its drain and its call back: the second begins when the first has ended and its intent is written."""
    bench = Bench(fleet("ready", "ready"))
    bench.drain()
    bench.effects.write()
    bench.controller.feed(st.Drain(cancel=True, stimulus_id="cancel", name=name(1)))
    assert [each.act for each in bench.effects.begun] == [bench.effects.act(ins.Revoke).act]
    bench.effects.act(ins.Revoke).finish()
    assert bench.effects.begun == [], "not written yet"
    bench.effects.write()
    assert bench.effects.act(ins.CallBack).act.requested_by


def test_acts_on_different_workers_go_side_by_side() -> None:
    bench = Bench(fleet("ready"), quick=True)
    bench.scale(3)
    assert len(bench.effects.acts(ins.Spawn)) == 3


def test_a_start_that_is_called_off_before_it_began_is_never_begun() -> None:
    """Up, down and up again before the disk has written the first: one process is made, for the last order."""
    bench = Bench(fleet("ready", gpus=2))
    (uuid,) = (device.uuid for device in bench.controller.fleet.gpus.free)
    bench.scale(1)
    bench.scale(-1)
    bench.scale(1)
    bench.effects.write()
    bench.effects.act(ins.Forget).finish()
    assert bench.effects.act(ins.Spawn).act.name == name(1)
    bench.effects.act(ins.Spawn).finish()
    assert bench.effects.begun == []
    assert bench.controller.fleet.gpus.holder_of[uuid] == name(1)
    assert uuid in bench.effects.locked


def test_a_start_that_has_begun_cannot_be_called_off() -> None:
    """The machine hears of it before anything else happens."""
    bench = Bench(fleet("ready"), quick=True)
    bench.scale(1)
    assert bench.controller.fleet.workers[name(1)].start.spawn_begun
    bench.scale(-1)
    assert bench.controller.fleet.workers[name(1)].state is WorkerState.DRAINING
    assert bench.effects.act(ins.Spawn)


def test_the_end_of_a_session_overtakes_an_act_that_hangs() -> None:
    bench = Bench(fleet("ready", "ready"), quick=True)
    bench.drain()
    bench.effects.quick = False
    bench.controller.feed(st.Leave(stimulus_id="down", now=True))
    assert bench.effects.acts(ins.EndSession) == []
    bench.effects.write()
    assert {each.act.pid for each in bench.effects.acts(ins.EndSession)} == {pid_of(0), pid_of(1)}  # type: ignore[union-attr]
    assert len(bench.effects.acts(ins.Revoke)) == 1, "it still hangs"


def test_what_an_act_observed_is_the_next_stimulus() -> None:
    bench = Bench(fleet("ready"), quick=True)
    bench.scale(1)
    made = st.ProcessMade(stimulus_id="spawn", name=name(1), pid=77, start_time=1.0, started_at=1.0)
    bench.effects.act(ins.Spawn).finish(made)
    assert bench.controller.fleet.workers[name(1)].pid == 77
    gone = st.ProcessGone(stimulus_id="exit:77", name=name(1), pid=77, code=1)
    bench.controller.feed(gone)
    bench.effects.act(ins.Sweep).finish(st.Swept(stimulus_id="sweep", name=name(1)))
    assert bench.effects.reports == [(name(1), "exited with code 1 unasked", WorkerState.CRASHED)]


def test_a_defect_in_what_follows_does_not_hold_up_the_next_act() -> None:
    bench = Bench(fleet("ready", "ready"), quick=True)
    bench.drain()
    bench.controller.feed(st.Drain(cancel=True, stimulus_id="cancel", name=name(1)))
    impossible = st.ProcessRefused(stimulus_id="x", name=name(1), why="not asked")
    bench.controller.fleet = put(bench.controller.fleet, name(1), state=WorkerState.READY, spawning=True)
    with pytest.raises(IllegalTransition):
        bench.effects.act(ins.Revoke).finish(impossible)
    assert bench.effects.acts(ins.CallBack)


# --- locks -------------------------------------------------------------------------------------------


def test_a_refused_lock_undoes_the_step_and_another_device_is_chosen() -> None:
    bench = Bench(fleet("ready"))
    first, second = [device.uuid for device in bench.controller.fleet.gpus.free[:2]]
    bench.effects.elsewhere[first] = OTHER
    bench.scale(1)
    assert bench.controller.fleet.workers[name(1)].gpus == (second,)
    assert bench.controller.fleet.gpus.taken == {first: OTHER}
    assert bench.journal == [f"refused {first}", "lock VllmWorker_1", "commit VllmWorker_1"]
    assert bench.seen == ["GpuReserved", "1 workers", "Scale", "SpawnRequested of one that is starting", "2 workers"]


def test_all_devices_of_a_step_or_none() -> None:
    bench = Bench(fleet("ready", gpus=3))
    first, second = [device.uuid for device in bench.controller.fleet.gpus.free]
    bench.effects.elsewhere[second] = OTHER
    with pytest.raises(Exception, match="too few GPUs"):
        bench.scale(2)
    assert bench.effects.locked == {bench.controller.fleet.workers[name()].gpus[0]}
    assert first not in bench.effects.locked
    assert list(bench.controller.fleet.workers) == [name()]


def test_a_host_that_refuses_everything_is_an_error_in_the_end() -> None:
    bench = Bench(fleet("pending", gpus=LOCK_TRIES + 4))
    bench.effects.elsewhere = {device.uuid: OTHER for device in bench.controller.fleet.gpus.devices}
    with pytest.raises(GpuLocked):
        bench.controller.feed(st.StartAll(stimulus_id="serve"))
    assert bench.effects.locked == set()


def drained(bench: Bench) -> None:
    """The second of two workers has left, but for its device; from here on files are written when a test says so."""
    bench.drain()
    bench.effects.act(ins.Revoke).finish()
    bench.controller.feed(st.ProcessGone(stimulus_id="exit", name=name(1), pid=pid_of(1), code=0))
    bench.effects.act(ins.Revoke).finish()
    bench.effects.act(ins.Sweep).finish(st.Swept(stimulus_id="sweep", name=name(1)))
    bench.effects.quick = False


def test_a_device_that_somebody_else_of_ours_was_given_since_stays_locked() -> None:
    bench = Bench(fleet("ready", "ready", gpus=2), quick=True)
    drained(bench)
    uuid = bench.controller.fleet.workers[name(1)].gpus[0]
    seen = st.GpusSeen(stimulus_id="gpus", devices=bench.controller.fleet.gpus.devices)
    bench.effects.act(ins.LookAtGpus).finish(seen)
    assert uuid not in bench.controller.fleet.gpus.holder_of
    bench.scale(1)
    assert bench.controller.fleet.gpus.holder_of[uuid] == name(1)
    bench.effects.write()
    assert uuid in bench.effects.locked


def test_a_device_that_nobody_holds_is_unlocked_when_that_is_written() -> None:
    bench = Bench(fleet("ready", "ready", gpus=2), quick=True)
    drained(bench)
    seen = st.GpusSeen(stimulus_id="gpus", devices=bench.controller.fleet.gpus.devices)
    bench.effects.act(ins.LookAtGpus).finish(seen)
    assert len(bench.effects.locked) == 2
    bench.effects.write()
    assert len(bench.effects.locked) == 1


# --- refusals, time, ends ----------------------------------------------------------------------------


def test_a_refused_command_changes_nothing() -> None:
    bench = Bench(fleet("ready"))
    before = bench.controller.fleet
    with pytest.raises(LastReadyWorker):
        bench.drain(0)
    assert bench.controller.fleet is before
    assert (bench.journal, bench.seen) == ([], [])


def test_it_asks_to_be_woken_and_lets_happen_what_is_due() -> None:
    bench = Bench(fleet("ready", "ready"), quick=True)
    bench.drain()
    due_s = bench.clock.at_s + 600.0
    assert bench.effects.wakes == [due_s]
    bench.clock.at_s += 100.0
    bench.controller.tick()
    assert (bench.effects.wakes, bench.controller.fleet.workers[name(1)].leave.counting) == ([due_s, due_s], False)
    bench.clock.at_s = due_s
    bench.effects.act(ins.Revoke).finish()
    bench.controller.tick()
    assert bench.effects.act(ins.CountRequests)


def test_an_arbiter_that_stood_still_notices_before_anything_is_due() -> None:
    bench = Bench(fleet("ready", "ready"), quick=True)
    bench.drain()
    bench.controller.pulse()
    bench.clock.at_s += 700.0
    bench.controller.tick()
    worker = bench.controller.fleet.workers[name(1)]
    assert (worker.state, worker.due_s) == ("draining", 50.0 + 600.0 + 700.0)
    assert "Stalled" in bench.seen
    assert "Tick" not in bench.seen


def test_a_pulse_that_comes_in_time_is_no_stall() -> None:
    bench = Bench(fleet("ready"))
    for late_s in (1.0, 1.5, STALL_S):
        bench.controller.pulse()
        bench.clock.at_s += late_s
    bench.controller.pulse()
    assert bench.seen == []


def test_observers_hear_the_stimulus_then_what_it_changed() -> None:
    bench = Bench(fleet("ready", "starting"))
    lease = f"{pid_of(1):x}"
    bench.controller.feed(st.KeyPut(stimulus_id="etcd", name=name(1), pid=pid_of(1), lease=lease))
    assert bench.seen == ["KeyPut", "Registered of one that is ready", "2 workers"]


def test_a_person_is_told_when_it_is_true() -> None:
    bench = Bench(fleet("ready"))
    bench.controller.feed(st.Restart(stimulus_id="restart", name="VllmWorker", force=True))
    assert bench.effects.told == []
    bench.effects.write()
    assert "is the only worker of VllmWorker" in bench.effects.told[0]


def test_a_shell_that_let_go_of_its_fleet_begins_nothing() -> None:
    bench = Bench(fleet("ready", "ready"))
    bench.drain()
    bench.controller.stopped = True
    bench.effects.write()
    assert bench.effects.begun == []
