"""Tests what the controller may rely on, whatever carries its effects out: the tests' fake, the arbiter, the simulator.

The order of things is the controller's part, and is tested over each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.arbiter.effects import Act
from dynamo_local.core.fleet import effects as ins
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.effects import Commit
from dynamo_local.core.types import WorkerState
from dynamo_local.system.gpu_locks import GpuLocked
from tests.contract.effects_worlds import EffectsWorld, change, on_a_loop
from tests.fakes.arbiter.fleet_views import name

Run = Callable[[Coroutine[Any, Any, None]], None]
Playing = tuple[Run, EffectsWorld]


def _playing(kind: str, folder: Path) -> Iterator[Playing]:
    with on_a_loop(kind, folder) as (runner, world):
        yield runner.run, world


@pytest.fixture(params=["fake", "host", "twin"])
def playing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Playing]:
    yield from _playing(request.param, tmp_path / "gpus")


@pytest.fixture(params=["fake", "host"])
def real_time(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Playing]:
    """Those whose acts take time, on hosts that they share with others."""
    yield from _playing(request.param, tmp_path / "gpus")


def places(journal: list[str], *lines: str) -> list[int]:
    """Where these lines are in the journal."""
    return [journal.index(line) for line in lines]


# --- commits -----------------------------------------------------------------------------------------


def test_commits_are_told_in_their_order_and_once_each(playing: Playing) -> None:
    run, world = playing
    told: list[int] = []

    async def test() -> None:
        for n in range(5):
            world.effects.commit(Commit((name(),)), world.controller.fleet, (), lambda n=n: told.append(n))
        await world.advance(1.0)
        world.effects.commit(Commit(()), world.controller.fleet, (), lambda: told.append(5))
        await world.advance(1.0)

    run(test())
    assert told == [0, 1, 2, 3, 4, 5]


def test_acts_begin_when_their_intent_is_written(playing: Playing) -> None:
    run, world = playing
    committed: list[str | None] = []

    def look(act: Act) -> None:
        if isinstance(act, ins.Spawn):
            committed.append(world.committed(act.name))

    async def test() -> None:
        world.recorder.on_begin = look  # type: ignore[attr-defined]
        world.controller.feed(change(1))
        await world.advance(5.0)

    run(test())
    order = places(world.journal, f"commit {name(1)}", f"written {name(1)}", f"begin spawn {name(1)}")
    assert order == sorted(order)
    assert committed == ["starting"]
    assert world.controller.fleet.workers[name(1)].ready


# --- acts ----------------------------------------------------------------------------------------------


def test_acts_on_different_workers_go_side_by_side(real_time: Playing) -> None:
    run, world = real_time

    async def test() -> None:
        world.controller.feed(change(2))
        await world.advance(5.0)

    run(test())
    first = [line for line in world.journal if "spawn" in line]
    assert first[:2] == [f"begin spawn {name(1)}", f"begin spawn {name(2)}"]
    assert sorted(first[2:]) == [f"end spawn {name(1)}", f"end spawn {name(2)}"]


def test_acts_on_one_worker_go_one_after_the_other(playing: Playing) -> None:
    run, world = playing

    async def test() -> None:
        world.controller.feed(st.Drain(stimulus_id="drain", name=name(), force=True))
        world.controller.feed(st.Drain(cancel=True, stimulus_id="cancel", name=name()))
        await world.advance(5.0)

    run(test())
    lines = [line for line in world.journal if "revoke" in line or "call" in line]
    expected = [f"{when} {what} {name()}" for what in ("revoke", "call") for when in ("begin", "end")]
    assert lines == expected
    assert world.controller.fleet.workers[name()].ready


def test_starts_that_are_called_off_in_time_cost_nothing(real_time: Playing) -> None:
    """All devices are given, taken back and given again before the disk has written the first: one process on each."""
    run, world = real_time

    async def test() -> None:
        for count in (3, -3, 3):
            world.controller.feed(change(count))
        await world.advance(5.0)

    run(test())
    begun = [line for line in world.journal if line.startswith("begin spawn")]
    assert sorted(begun) == [f"begin spawn {name(n)}" for n in (1, 2, 3)]
    assert all(world.controller.fleet.workers[name(n)].ready for n in (1, 2, 3))


def test_the_end_of_a_session_waits_for_nobody(real_time: Playing) -> None:
    run, world = real_time

    async def test() -> None:
        world.hang(name())
        world.controller.feed(st.Drain(stimulus_id="drain", name=name(), force=True))
        world.controller.feed(st.Drain(cancel=True, stimulus_id="cancel", name=name()))
        world.controller.feed(st.Leave(stimulus_id="down", now=True))
        await world.advance(15.0)

    run(test())
    assert f"begin end {name()}" in world.journal
    order = places(world.journal, f"begin end {name()}", f"end call {name()}")
    assert order == sorted(order)
    assert not world.controller.fleet.workers[name()].runs


@pytest.mark.parametrize(
    ("act", "seen"), [(ins.Sweep(name()), st.Swept), (ins.LookAtGpus(), st.GpusSeen), (ins.Forget(name(7)), type(None))]
)
def test_an_act_is_done_once_and_says_what_was_seen(playing: Playing, act: Act, seen: type) -> None:
    run, world = playing
    heard: list[st.Event | None] = []

    async def test() -> None:
        world.effects.begin(act, None, heard.append)
        await world.advance(5.0)

    run(test())
    assert [type(each) for each in heard] == [seen]


def test_who_is_asked_what_it_holds_answers(playing: Playing) -> None:
    run, world = playing
    heard: list[st.Event | None] = []
    worker = world.controller.fleet.workers[name()]
    assert worker.pid is not None

    async def test() -> None:
        world.effects.begin(ins.CountRequests(name(), worker.pid or 0), worker, heard.append)
        await world.advance(5.0)

    run(test())
    (seen,) = heard
    assert isinstance(seen, st.RequestsCounted)
    assert (seen.name, seen.pid) == (name(), worker.pid)
    assert isinstance(seen.in_flight, int)


def test_a_key_that_is_there_is_looked_up_as_such(playing: Playing) -> None:
    run, world = playing
    heard: list[st.Event | None] = []
    worker = world.controller.fleet.workers[name()]

    async def test() -> None:
        act = ins.LookUpKey(name(), worker.pid or 0, worker.lease or "")
        world.effects.begin(act, worker, heard.append)
        await world.advance(1.0)

    run(test())
    (seen,) = heard
    assert isinstance(seen, st.KeyLookedUp)
    assert (seen.name, seen.pid, seen.lease, seen.removed) == (name(), worker.pid, worker.lease, False)


def test_who_left_in_order_before_we_heard_of_it_is_not_started_again(playing: Playing) -> None:
    run, world = playing

    async def test() -> None:
        world.leaves_unheard(name())
        await world.advance(15.0)

    run(test())
    assert f"begin look {name()}" in world.journal
    assert world.controller.fleet.workers[name()].state is WorkerState.EXITED


# --- locks ---------------------------------------------------------------------------------------------


def test_a_step_whose_lock_is_refused_did_not_happen(real_time: Playing) -> None:
    run, world = real_time
    uuid = world.controller.fleet.gpus.free[0].uuid

    async def test() -> None:
        world.taken_elsewhere(uuid)
        world.controller.feed(change(1))
        assert uuid not in world.controller.fleet.workers[name(1)].gpus
        assert uuid in world.controller.fleet.gpus.taken
        await world.advance(5.0)

    run(test())
    assert next(line for line in world.journal if line.startswith("commit")) == f"commit {name(1)}"
    assert world.controller.fleet.workers[name(1)].ready


def test_locks_are_all_or_none_and_what_is_held_stays(real_time: Playing) -> None:
    run, world = real_time

    async def another_worker() -> None:
        world.controller.feed(change(1))
        await world.advance(5.0)

    run(another_worker())
    mine = world.controller.fleet.workers[name(1)].gpus
    free = [device.uuid for device in world.controller.fleet.gpus.free]
    assert world.effects.lock(name(1), mine) == ()
    world.taken_elsewhere(free[1])
    with pytest.raises(GpuLocked) as refused:
        world.effects.lock(name(2), free[:2])
    assert (refused.value.uuid, "namespace other" in refused.value.who) == (free[1], True)
    assert world.effects.lock(name(2), free[:1]) == (free[0],)
    world.effects.unlock([free[0], "GPU-never-seen"])
    assert world.effects.lock(name(2), [free[0]]) == (free[0],)


# --- time ----------------------------------------------------------------------------------------------


def test_the_shell_is_woken_at_the_time_or_a_little_later(playing: Playing) -> None:
    run, world = playing

    async def test() -> None:
        begun_s = world.now_s()
        world.effects.wake_at(begun_s + 5.0)
        world.effects.wake_at(begun_s + 60.0)
        await world.advance(4.9)
        assert "tick" not in world.journal
        await world.advance(0.2)
        assert "tick" in world.journal

    run(test())


def test_an_earlier_wish_comes_first(playing: Playing) -> None:
    run, world = playing

    async def test() -> None:
        begun_s = world.now_s()
        world.effects.wake_at(begun_s + 60.0)
        world.effects.wake_at(begun_s + 5.0)
        await world.advance(5.1)
        assert "tick" in world.journal

    run(test())
