"""A registry, and an arbiter's fleet that follows it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from dynamo_local.arbiter.controller import Waiting
from dynamo_local.arbiter.links import Links
from dynamo_local.arbiter.registrations import Registrations
from dynamo_local.core.fleet.fleet import Worker
from dynamo_local.core.fleet.lifecycle import TransitionKind
from tests.fakes.arbiter.effects import FakeEffects, shell_of
from tests.fakes.arbiter.fleet_views import fleet, name, pid_of
from tests.fakes.arbiter.hand_clock import HandClock
from tests.fakes.infra.etcd import FakeEtcd

LEASE = 0x2A


class Registry:
    """An etcd, and one starting worker whose keys in it are followed."""

    def __init__(self) -> None:
        self.etcd = FakeEtcd()
        self.effects = FakeEffects(quick=True, answers={})
        self.controller = shell_of(fleet("starting"), self.effects)
        links = Links("dynamo", "01J")
        links.attach(self.etcd, SimpleNamespace(is_connected=True))
        self.registrations = Registrations("dynamo", self.controller.feed, links)
        self._waiting = Waiting(self.controller, HandClock().now_s)

    @property
    def worker(self) -> Worker:
        return self.controller.fleet.workers[name()]

    @property
    def events(self) -> list[TransitionKind]:
        """What was applied to it, by kind."""
        return [transition.kind for transition in self.effects.transitions]

    async def put(self, *, pid: int | None = None, **facts: Any) -> None:
        """The worker's ready key, as its process (or another of that `pid`) writes it."""
        value = {"pid": pid_of(0) if pid is None else pid, **facts}
        await self.etcd.put(self.key, json.dumps(value).encode())

    @property
    def key(self) -> str:
        return f"dynamo/workers/{name()}:{LEASE:x}"

    async def until(self, done: Callable[[Worker], bool]) -> None:
        """Return once the arbiter sees it so; TimeoutError."""
        async with asyncio.timeout(5.0):
            await self._waiting.until(lambda: done(self.worker))
