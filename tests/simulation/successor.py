"""`dynamo serve --adopt`: the arbiter after one that died takes the processes over, by what the statefile says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dynamo_local.arbiter.adoption import Adoption, Found, hold_gpus
from dynamo_local.core.fleet.events import Resume
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.fleet.states import TRAITS, HasProcess
from dynamo_local.core.gpus import GpuLedger
from dynamo_local.core.types import WorkerState
from dynamo_local.state.schema import State
from tests.simulation.commands import Commands

if TYPE_CHECKING:
    from tests.simulation.watched_controller import WatchedController
    from tests.simulation.world import World

LISTED_WITHIN_S = 10.0


class Successor(Commands):
    """A part of `Arbiter`, which has all that is named here."""

    world: World
    controller: WatchedController
    wanted: set[str]
    restarts: set[str]
    pool: Any
    host: Any
    effects: Any
    statefile: Any
    registrations: Any
    sampling: Any
    spares: Any
    _background: Any
    _feed: Any
    _heal: Any
    _beat: Any

    async def adopt(self, predecessor: Successor) -> None:
        """Go on where `predecessor` stood. It ends nothing, but what was to be ended."""
        state: State = self.statefile.store.read()
        sample = await self.pool.look()
        found = Found(state, dict(_running(self.world, state)))
        ledger = hold_gpus(found, GpuLedger.of(sample.devices, elsewhere=sample.elsewhere), self.pool)
        adoption = Adoption(found, self.host)
        self.statefile.head = state.model_copy(update={"components": {}})
        # `apply` has changed what later starts go by: a successor has that from its command line.
        empty = replace(self.controller.fleet, gpus=ledger, templates=predecessor.controller.fleet.templates)
        self.controller.check(fleets=False)
        self.controller.fleet = _known(adoption.workers(empty, self.world.clock.now_s()))
        self.wanted = {worker.name for worker in self.controller.fleet.workers.values() if self._is_meant(worker)}
        self.restarts |= predecessor.restarts
        self.controller.fleet = adoption.watch(self.controller.fleet, self.effects.spec)
        self._background(self.registrations.follow())
        await self.registrations.looked_through(LISTED_WITHIN_S)
        self.controller.check(fleets=True)
        self._feed(Resume(stimulus_id="adopt", gone=adoption.gone))
        await self.statefile.write(self.controller.fleet.workers, lambda: self.controller.fleet)
        self._watch()

    def _watch(self) -> None:
        """What an arbiter does beside all else."""
        self._background(self.sampling.run())
        self._background(self._heal())
        self._background(self._beat())
        self._background(self.spares.pool.run())

    def _is_meant(self, worker: Worker) -> bool:
        """It is to serve, as the statefile has it."""
        revoked = worker.state is WorkerState.DRAINING and worker.leave.lease_gone
        return worker.counts or (revoked and self.world.restart_revoked)


def _running(world: World, state: State) -> Iterator[tuple[str, int]]:
    """As `adoption` finds them: by pid and start time, else by the mark in the environment."""
    for name, entry in state.components.items():
        for process in world.living():
            marked = process.spec.name == name and entry.pid in (None, process.pid)
            may_run = TRAITS[entry.state].process is not HasProcess.NO
            known = entry.pid == process.pid if entry.pid_start_time is not None else marked and may_run
            if known:
                yield name, process.pid


def _known(fleet: Fleet) -> Fleet:
    """When a simulated process began, the kernel does not say."""
    workers = {}
    for name, worker in fleet.workers.items():
        began = None if worker.process is None else replace(worker.process, start_time=float(worker.process.pid))
        workers[name] = replace(worker, process=began)
    return fleet.with_workers(workers)
