"""Spares of a simulated host: the pool and its sockets are real, its processes import nothing."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_local.arbiter.prewarmed import (
    ENDED_TIMEOUT_S,
    PrewarmedHost,
    PrewarmedKind,
    PrewarmedProcesses,
    PrewarmedRules,
)
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.core.fleet.states import ROLES, TRAITS
from dynamo_local.core.notes import Tell
from dynamo_local.system import fd_messages
from dynamo_local.system.paths import Paths
from dynamo_local.system.process_host import LaunchSpec

if TYPE_CHECKING:
    from tests.simulation.world import SimHost, World

Run = Callable[[Coroutine[Any, Any, None]], object]

KIND = PrewarmedKind("sim", "/", ())
WARM_WITHIN_S = 20.0
"""Of a spare; one that takes longer is given up."""
FATES_EVERY_S = 4.0


@dataclass(frozen=True, slots=True)
class SpareFate:
    """How one spare will behave. `warm_s` None: its imports never end; `fails`: they do; `refuses`: it will not be the
    worker that it is told to be; `answers`: it is, or dies of it."""

    warm_s: float | None = 0.4
    fails: bool = False
    order_s: float = 0.005
    refuses: bool = False
    answers: bool = True


BAD = (
    SpareFate(warm_s=None),
    SpareFate(warm_s=3.0),
    SpareFate(fails=True),
    SpareFate(refuses=True),
    SpareFate(order_s=2.0),
    SpareFate(order_s=15.0),
    SpareFate(answers=False),
)


class SimSpare:
    """One process in the part of a prewarmed process. It ends with its socket, and has no GPU and no entry."""

    def __init__(self, world: World, pid: int, spec: LaunchSpec, fate: SpareFate) -> None:
        self.world = world
        self.pid = pid
        self.spec = spec
        self._fate = fate
        self._connection = socket.socket(fileno=os.dup(spec.inherited_fds[0]))
        self._connection.setblocking(False)
        self._task = asyncio.ensure_future(self._live())

    def die(self) -> None:
        """Nothing of it runs any more."""
        self._connection.close()
        self._task.cancel()

    async def _live(self) -> None:
        fate, code = self._fate, 1
        try:
            await asyncio.sleep(fate.warm_s if fate.warm_s is not None else 10_000.0)
            if fate.fails:
                await fd_messages.asend(self._connection, {"error": "its modules cannot be imported"})
                return
            await fd_messages.asend(self._connection, {"warm": True})
            await self._obey(await fd_messages.areceive(self._connection))
        except OSError:  # the arbiter is gone, or has closed its end
            code = 0
        finally:
            self._connection.close()
            self.world.spare_exits(self, code)

    async def _obey(self, order: dict[str, Any]) -> None:
        await asyncio.sleep(self._fate.order_s)
        if self._fate.refuses:
            await fd_messages.asend(self._connection, {"error": "the marks need 9999 bytes"})
        elif self._fate.answers:
            name = order["env"]["DYN_WATCHER_NAME"]
            await fd_messages.asend(self._connection, {"became": name})
            worker = LaunchSpec(name, tuple(order["argv"]), order["env"], order["cwd"], Path(os.devnull))
            self.world.becomes(self, worker)


class SimSpares:
    """The spares of one arbiter: what `arbiter.prewarmed` is to a real one."""

    def __init__(
        self,
        world: World,
        host: SimHost,
        paths: Paths,
        *,
        run: Run,
        tell: Tell,
        fleet: Callable[[], Fleet],
        record: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        count = world.spares_wanted
        self._host = host
        self._fleet = fleet
        self._count = count
        rules = PrewarmedRules(count, lambda name: {}, None, None, None, WARM_WITHIN_S)
        self.pool = PrewarmedProcesses(
            host,
            paths,
            rules,
            world.clock,
            wanted=lambda: (KIND,) if count else (),
            calm=self._calm,
            background=run,
            on_change=record,
            tell=tell,
            end=self._end,
        )
        self.host = _Spared(host, self.pool, self._kind_of)

    @property
    def full(self) -> bool:
        """As many are warm as are to be."""
        return self.pool.counts().get((KIND.engine, "warm"), 0) == self._count

    def _calm(self) -> bool:
        workers = self._fleet().workers.values()
        return not any(TRAITS[worker.state].comes_up and TRAITS[worker.state].runs for worker in workers)

    def _kind_of(self, name: str) -> PrewarmedKind | None:
        worker = self._fleet().workers.get(name)
        return KIND if worker is not None and ROLES[worker.role].computes else None

    async def _end(self, pid: int) -> None:
        if not self._host.dead:  # else it was its host that died: nobody is ended by that
            await self._host.end(pid, ENDED_TIMEOUT_S)


class _Spared(PrewarmedHost):
    """There are no files in this world, and a spare is handed an open log."""

    async def start_process(self, spec: LaunchSpec) -> int:
        """See `ProcessHost`."""
        return await super().start_process(replace(spec, log_file=Path(os.devnull)))


async def mishaps(world: World) -> None:
    """Spares die, and later ones are drawn to behave badly; until cancelled."""
    rng = random.Random()
    rng.setstate(world.rng.getstate())  # beside what else a seed chooses
    while True:
        await asyncio.sleep(rng.expovariate(1 / FATES_EVERY_S))
        if world.spares and rng.random() < 0.5:
            victim = rng.choice(list(world.spares.values()))
            world.note(f"* {victim.spec.name} ({victim.pid}) dies")
            world.spare_exits(victim, -9)
        else:
            world.spare_fates += rng.choices(BAD, k=rng.choice((1, 1, 2)))
