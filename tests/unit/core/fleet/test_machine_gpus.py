"""The machine: devices are waited for, given back when their memory is, and never given to two."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.core.fleet import effects as ins
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.events import Change
from dynamo_local.core.fleet.step import step
from dynamo_local.core.gpus import GpuDevice
from tests.fakes.arbiter.fleet_views import PREFILL, fleet, name, on_ledger, worker
from tests.fakes.arbiter.machine import Life

OTHER = "namespace other (watcher other_W, arbiter pid 9)"


def busy(life: Life, *indices: int) -> tuple[GpuDevice, ...]:
    """The devices, with memory in use on these."""
    devices = [replace(device, memory_used_bytes=0) for device in life.fleet.gpus.devices]
    return tuple(replace(d, memory_used_bytes=2**36) if d.index in indices else d for d in devices)


def scale(count: int, *, wait: bool = False) -> st.Scale:
    """`dynamo scale VllmWorker`; a planner's with `wait`."""
    change = Change(count, relative=True)
    return st.Scale(stimulus_id="scale:1", component="VllmWorker", target=change, wait_for_gpus=wait)


def leaving() -> Life:
    """Two workers on two devices; `_1` has left, and its device is being looked at."""
    life = Life(fleet("ready", "ready", gpus=2))
    life.feed(scale(-1))
    life.gone(1)
    life.swept(1)
    return life


# --- giving back -----------------------------------------------------------------------------------


def test_memory_that_returns_late_is_waited_for() -> None:
    """A driver takes up to some seconds; it is looked at ten times a second, and nobody gets the device before."""
    life = leaving()
    for _ in range(20):
        assert life.gpus(devices=busy(life, 1)) == []
        assert (life.state(1), life.free()) == ("exited", [])
        assert life.until_due() == ["look at GPUs"]
    assert life.now_s == pytest.approx(100.0 + 2.0)
    assert life.gpus(devices=busy(life)) == ["forget VllmWorker_1"]
    assert life.did(ins.Unlock) == [ins.Unlock(name(1), (life.device(1).uuid,))]
    assert (life.states(), life.free()) == (["ready"], [1])


def test_memory_that_does_not_return_is_quarantined_until_it_has_and_both_is_told() -> None:
    """Somebody has to look at it; the worker's entry does not wait for ever. Once the stranger has ended, the graph
    has the device back without another `serve`."""
    life = leaving()
    life.now_s += 30.1
    life.gpus(devices=busy(life, 1))
    uuid = life.device(1).uuid
    assert list(life.fleet.gpus.quarantined) == [uuid]
    assert life.told[-1].startswith(f"GPU 1 ({uuid}) is quarantined: 64.0 GiB in use")
    assert life.told[-1].endswith(f"still holds it 30 s after {name(1)} ended")
    assert life.states() == ["ready"]
    life.gpus(devices=busy(life, 1))
    life.gpus(stale="the driver hangs")
    assert (list(life.fleet.gpus.quarantined), life.free()) == ([uuid], []), "nobody has seen it empty"
    life.gpus(devices=busy(life)[:1])
    assert list(life.fleet.gpus.quarantined) == [uuid], "it is not seen at all"
    life.gpus(devices=busy(life))
    assert life.told[-1] == f"GPU 1 ({uuid}) is seen to be empty: its quarantine ends"
    assert (life.fleet.gpus.quarantined, life.free()) == ({}, [1])


def test_a_device_that_nobody_could_look_at_is_quarantined_until_it_is_seen_empty() -> None:
    life = leaving()
    life.gpus(stale="the driver hangs")
    assert life.free() == []
    life.now_s += 30.1
    life.gpus(stale="the driver hangs")
    uuid = life.device(1).uuid
    why = f"nobody could see whether {name(1)} left its memory empty: the driver hangs"
    assert life.fleet.gpus.quarantined == {uuid: why}
    life.gpus(devices=busy(life, 1))
    assert list(life.fleet.gpus.quarantined) == [uuid], "it is seen not to be empty"
    life.gpus(devices=busy(life))
    assert life.told[-1] == f"GPU 1 ({uuid}) is seen to be empty: its quarantine ends"
    assert (life.free(), life.fleet.gpus.quarantined) == ([1], {})


def test_a_restart_on_memory_that_never_returns_looks_for_another_device() -> None:
    life = Life(fleet("ready", gpus=2))
    life.feed(st.Restart(stimulus_id="r", name=name(), force=True))
    life.gone()
    life.swept()
    assert life.state() == "pending"
    life.now_s += 30.1
    assert life.gpus(devices=busy(life, 0))[-1] == "spawn VllmWorker"
    assert list(life.fleet.gpus.quarantined) == [life.device(0).uuid]
    assert life.worker().gpus == (life.device(1).uuid,)


def test_a_restart_on_its_own_device_keeps_the_lock() -> None:
    life = Life(fleet("ready", gpus=1))
    life.feed(st.Restart(stimulus_id="r", name=name(), force=True))
    life.gone()
    life.swept()
    assert life.did(ins.Lock) == [ins.Lock(name(), (life.device(0).uuid,))]
    life.gpus()
    assert not life.did(ins.Unlock)
    assert life.worker().gpus == (life.device(0).uuid,)


# --- waiting ---------------------------------------------------------------------------------------


def test_a_worker_waits_for_the_device_of_one_that_leaves() -> None:
    life = Life(on_ledger([worker(0, "ready"), worker(0, "ready", PREFILL), worker(1, "ready", PREFILL)], 3))
    prefill = name(1, "PrefillWorker")
    life.feed(st.Drain(stimulus_id="d", name=prefill))
    life.feed(scale(1, wait=True))
    assert life.state(1) == "pending"
    for _ in range(3):
        assert life.until_due() == ["look at GPUs"]
        assert life.gpus() == []
    life.feed(
        st.ProcessGone(stimulus_id="x", name=prefill, pid=life.fleet.workers[prefill].pid or 0, code=0),
    )
    life.feed(st.Swept(stimulus_id="x", name=prefill))
    life.gpus()
    assert life.state(1) == "starting"
    assert [each.stimulus_id for each in life.did(ins.Spawn)] == ["scale:1"], "it is still that command's"


def test_the_one_that_has_waited_longest_starts_first() -> None:
    waits = [worker(0, "ready"), worker(1, "pending", since_s=5.0), worker(2, "pending", since_s=3.0)]
    life = Life(on_ledger(waits, 2))
    assert life.gpus() == ["spawn VllmWorker_2"]
    assert life.state(1) == "pending"


def test_a_device_that_a_stranger_took_is_waited_for() -> None:
    life = Life(on_ledger([worker(0, "pending")], 1))
    assert life.gpus(devices=busy(life, 0)) == []
    assert life.until_due() == ["look at GPUs"]
    assert life.gpus(devices=busy(life)) == ["spawn VllmWorker"]


def test_a_look_that_is_under_way_is_not_begun_twice() -> None:
    life = leaving()
    assert life.fleet.looking
    life.feed(st.Drain(stimulus_id="d", name=name(), force=True))
    life.gone()
    assert life.swept() == [], "somebody is looking"
    assert life.gpus(devices=busy(life, 0)) == ["forget VllmWorker_1", "look at GPUs"]


def test_nobody_looks_while_nobody_waits() -> None:
    life = leaving()
    life.gpus(devices=busy(life))
    assert life.after(3600.0) == []
    assert (life.fleet.look_s, life.fleet.looking) == (None, False)


# --- other namespaces --------------------------------------------------------------------------------


def test_a_device_is_locked_before_the_step_is_valid() -> None:
    life = Life(fleet("ready", gpus=2))
    life.feed(scale(1))
    assert isinstance(life.last[0], ins.Lock)
    assert life.last[0] == ins.Lock(name(1), (life.device(1).uuid,))


def test_where_another_namespace_was_quicker_another_device_is_chosen() -> None:
    life = Life(fleet("ready", gpus=3))
    life.feed(st.GpuReserved(stimulus_id="scale:1", uuid=life.device(1).uuid, who=OTHER))
    assert life.fleet.gpus.taken == {life.device(1).uuid: OTHER}
    life.feed(scale(1))
    assert life.worker(1).gpus == (life.device(2).uuid,)


def test_a_restart_whose_device_was_taken_meanwhile_gives_it_up_and_looks_for_others() -> None:
    life = Life(fleet("ready", gpus=2))
    life.gone(0, 1)
    life.swept()
    life.now_s = life.worker().due_s or 0.0
    refused, _, _ = step(life.fleet, st.Tick(), life.now_s)
    assert refused.workers[name()].ended.gpus_pending_release is not None, (
        "this step asks for the lock; say that it was refused"
    )
    life.feed(st.GpuReserved(stimulus_id="clock", uuid=life.device(0).uuid, who=OTHER))
    assert (life.worker().gpus, life.worker().ended.gpus_pending_release) == ((), None)
    assert life.after(0.0)[0] == "spawn VllmWorker"
    assert life.worker().gpus == (life.device(1).uuid,)


def test_a_running_workers_device_is_its_own_whoever_says_so() -> None:
    life = Life(fleet("ready", gpus=1))
    life.feed(st.GpuReserved(stimulus_id="x", uuid=life.device(0).uuid, who=OTHER))
    assert life.worker().gpus == (life.device(0).uuid,)
