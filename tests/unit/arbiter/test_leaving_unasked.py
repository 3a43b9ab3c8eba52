"""Workers that were leaving when their arbiter died: what its successor makes of what the statefile says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamo_local.arbiter.adoption import Adoption, Found
from dynamo_local.core.fleet import events as st
from dynamo_local.worker.process import Entry
from tests.fakes.arbiter.fleet_views import fleet, name, pid_of
from tests.fakes.arbiter.kept_fleet import KeptFleet
from tests.fakes.arbiter.machine import Life, story

LEAVE, RESTART = False, True


class Watches:
    """A host on which the successor finds every process that it looks for."""

    def adopt_process(self, spec: Any, pid: int) -> None: ...


class Run:
    """Two workers, an arbiter (`life`) that writes into a statefile, into which they write too, and its successor."""

    def __init__(self, *workers: str, restart_revoked: bool) -> None:
        self.kept = KeptFleet(*workers)
        self.life = Life(replace(self.kept.fleet, restart_revoked=restart_revoked))

    async def written(self) -> None:
        """The statefile says what the arbiter knows."""
        self.kept.fleet = self.life.fleet
        if self.kept.file.text is None:
            await self.kept.statefile.create()
        await self.kept.statefile.write(self.life.fleet.workers, self.kept.now, head=True)

    def drains_by_itself(self, n: int) -> None:
        """The worker has seen that its lease is gone, and writes that."""
        found = Entry(pid=pid_of(n), lease=None, endpoints=(), draining="its lease was revoked", frontend_url=None)
        with self.kept.store.transaction() as state:
            found.write(state, name(n), resumed=False)

    async def revoked(self, *, seen: bool = True) -> None:
        """Somebody revokes the lease of `_1`, which drains; the arbiter has `seen` it, or is dead by then."""
        await self.written()
        if seen:
            self.life.key_gone(1)
            await self.written()
        self.drains_by_itself(1)
        if seen:
            await self.written()

    def successor(self, *, lives: bool) -> Life:
        """It has looked through the registry, in which the bare worker still is; `_1` may have ended meanwhile."""
        pids = {name(n): pid_of(n) for n in ((0, 1) if lives else (0,))}
        before = self.life.fleet
        adoption = Adoption(Found(self.kept.store.read(), pids), Watches())  # type: ignore[arg-type]
        taken = adoption.workers(replace(before, workers={}, restarts=(), look_s=None), 100.0)
        life = Life(fleet())
        life.fleet = adoption.watch(taken, lambda worker: None)  # type: ignore[arg-type, return-value]
        life.fleet = life.fleet.with_workers(
            {**life.fleet.workers, name(): life.fleet.workers[name()].changed(lease="abc")}
        )
        life.feed(st.Resume(stimulus_id="adopt", gone=adoption.gone))
        return life


def ends(life: Life, *, lives: bool) -> Life:
    """Its process ends in order, if it has not yet; what it left behind is swept, its device looked at."""
    if lives:
        assert story(life.last) == [], "it drains, and needs no sign"
        life.gone(1)
    life.swept(1)
    life.gpus()
    return life


@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize("seen", [True, False])
async def test_one_that_somebody_else_revoked_leaves_and_is_missed(lives: bool, seen: bool) -> None:
    run = Run("ready", "ready", restart_revoked=LEAVE)
    await run.revoked(seen=seen)
    life = ends(run.successor(lives=lives), lives=lives)
    assert (life.states(), life.fleet.revoked) == (["ready"], {name(1): "VllmWorker"})


@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize("seen", [True, False])
async def test_one_that_comes_back_does_so_by_the_restart_policy(lives: bool, seen: bool) -> None:
    """`on-foreign-revoke: restart`: it drains to its end first, and its return is counted: whoever revokes every lease
    has no worker started without a pause, whichever arbiter it is."""
    run = Run("ready", "ready", restart_revoked=RESTART)
    await run.revoked(seen=seen)
    life = run.successor(lives=lives)
    if lives:
        assert life.state(1) == "draining/restarting"
        assert (life.worker(1).reason or "").count("it is started again") == 1
    ends(life, lives=lives)
    assert (life.states(), len(life.worker(1).history.failures_s)) == (["ready", "backing_off"], 1)


async def test_one_that_had_left_before_is_counted_too() -> None:
    run = Run("ready", "ready", restart_revoked=RESTART)
    await run.revoked()
    run.life.gone(1)
    await run.written()
    life = run.successor(lives=False)
    assert (life.state(1), len(life.worker(1).history.failures_s)) == ("backing_off", 1)


async def test_one_that_is_restarted_by_command_is_not_counted() -> None:
    run = Run("ready", "ready", restart_revoked=RESTART)
    run.life.feed(st.Restart(stimulus_id="command:1", name=name(1)))
    run.life.gone(1)
    await run.written()
    life = run.successor(lives=False)
    life.gpus()
    assert (life.state(1), life.worker(1).history.failures_s) == ("starting", ())


@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize("restart_revoked", [LEAVE, RESTART])
async def test_a_drain_that_was_ordered_goes_on(lives: bool, restart_revoked: bool) -> None:
    run = Run("ready", "ready", restart_revoked=restart_revoked)
    run.life.now_s = 90.0
    run.life.feed(st.Drain(stimulus_id="command:1", name=name(1)))
    await run.written()
    run.drains_by_itself(1)
    life = run.successor(lives=lives)
    if lives:
        assert story(life.last) == [f"SIGTERM {pid_of(1)} VllmWorker_1"]
        assert life.worker(1).due_s == 90.0 + 600.0
        life.gone(1)
    life.swept(1)
    life.gpus()
    assert (life.states(), life.fleet.revoked) == (["ready"], {})


@pytest.mark.parametrize("written_by_itself", [True, False])
async def test_one_that_was_revoked_and_then_taken_away_does_not_come_back(written_by_itself: bool) -> None:
    run = Run("ready", "ready", restart_revoked=RESTART)
    await run.written()
    run.life.key_gone(1)
    if written_by_itself:
        run.drains_by_itself(1)
    run.life.feed(st.Drain(stimulus_id="command:1", name=name(1)))
    await run.written()
    life = run.successor(lives=True)
    assert life.state(1) == "draining"
    life.gone(1)
    life.swept(1)
    life.gpus()
    assert (life.states(), life.fleet.revoked) == (["ready"], {})


async def test_one_that_was_to_leave_before_its_process_was_there_is_asked() -> None:
    run = Run("ready", "pending", restart_revoked=RESTART)
    run.life.feed(st.GpusSeen(stimulus_id="gpus", devices=run.life.fleet.gpus.devices))
    run.life.begun(1)
    run.life.feed(st.Drain(stimulus_id="command:1", name=name(1)))
    await run.written()
    life = run.successor(lives=True)
    assert story(life.last) == [f"SIGTERM {pid_of(1)} VllmWorker_1"]
    assert (life.state(1), life.worker(1).due_s is None) == ("draining", False)


async def test_one_that_was_stopped_past_its_lease_has_registered_again() -> None:
    run = Run("ready", "ready", restart_revoked=RESTART)
    await run.written()
    run.life.key_gone(1)
    await run.written()
    state = run.kept.store.read().components[name(1)]
    assert (state.state, state.course) == ("ready", "restarting")
    taken = Adoption(Found(run.kept.store.read(), {name(1): pid_of(1)}), Watches()).workers(  # type: ignore[arg-type]
        replace(run.life.fleet, workers={}), 100.0
    )
    assert (taken.workers[name(1)].state, taken.workers[name(1)].intent) == ("ready", "steady")
