"""What the registry says of our workers: who is ready, under which lease, and who has left it.

A worker's last key, `{ns}/workers/{watcher}:{lease}`, says that all of its endpoints are registered.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from dynamo_local.core.fleet_view import Course
from dynamo_local.core.lifecycle import DrainCancelled, LeaseRevoked, Registered
from dynamo_local.core.types import LEASE, WorkerState
from dynamo_local.errors import EtcdUnavailable
from dynamo_local.ports import DeleteEvent, PutEvent, SnapshotEvent, WatchEvent
from dynamo_local.serve.fleet import Fleet, Worker
from dynamo_local.serve.links import Links

log = logging.getLogger(__name__)


class Registrations:
    """Follows the registry and tells the fleet."""

    def __init__(self, namespace: str, fleet: Fleet, links: Links) -> None:
        self._prefix = f"{namespace}/workers/"
        self._fleet = fleet
        self._links = links
        self.frontend_url: str | None = None
        self._seen = asyncio.Event()
        self.on_stray: Callable[[Worker], None] = lambda worker: None
        """Called with a worker that was asked to leave and has registered (again)."""

    async def follow(self) -> None:
        """For ever; survives restarts of etcd, and says on `links` whether etcd answers."""
        async for event in self._links.kv.watch_prefix(self._prefix, self._lost):
            self._links.etcd_answers = True
            await self._apply(event)

    async def looked_through(self, timeout_s: float) -> None:
        """Return once the whole registry has been looked through. Raises `EtcdUnavailable`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._seen.wait()
        except TimeoutError:
            raise EtcdUnavailable(f"etcd did not list its keys within {timeout_s:g} s; try again") from None

    def _lost(self) -> None:
        self._links.etcd_answers = False
        log.warning("etcd does not answer; what is known of the workers may be stale until it does")

    async def _apply(self, event: WatchEvent) -> None:
        if isinstance(event, SnapshotEvent):
            for kv in event.kvs:
                await self._registered(kv.key, kv.value)
            self._seen.set()
        elif isinstance(event, PutEvent):
            await self._registered(event.kv.key, event.kv.value)
        elif isinstance(event, DeleteEvent):
            await self._deregistered(event.key)

    def _split(self, key: str) -> tuple[str, str]:
        name, _, lease = key.removeprefix(self._prefix).rpartition(":")
        return name, lease

    async def _registered(self, key: str, value: bytes) -> None:
        name, lease = self._split(key)
        facts = _parsed(key, value)
        worker = self._fleet.workers.get(name)
        if worker is None or worker.pid is None or worker.pid != facts.get("pid"):
            return  # a key of a worker that is gone, until its lease is
        if facts.get("failed"):
            worker.failed = True  # its key's end will be no drain, and its exit is a crash
            return
        new = worker.lease != lease
        worker.lease, worker.endpoints = lease, _endpoints(key, facts, lease)
        worker.other_leases = tuple(filter(LEASE.fullmatch, str(facts.get("leases", "")).split(",")))
        self.frontend_url = facts.get("frontend_url", self.frontend_url)
        event = Registered(stimulus_id=f"etcd:{lease}", lease=lease)
        if worker.state is WorkerState.DRAINING and (worker.asked_s is None or (new and _called_back(worker))):
            # Its lease had only expired (it was stopped, or etcd was away) and it has come back by itself; or it was
            # called back, and this is seen before its answer, or instead of it.
            worker.lease_gone, worker.reason, worker.asked_s, worker.course = False, None, None, Course.STEADY
            await self._fleet.apply({name: DrainCancelled(stimulus_id=f"etcd:{lease}")})
        elif worker.state is WorkerState.DRAINING and new:
            await self._fleet.apply({name: event})
            self.on_stray(worker)
        elif worker.state in (WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING):
            await self._fleet.apply({name: event})

    async def _deregistered(self, key: str) -> None:
        """The key is gone while the process lives: nothing is routed to it any more."""
        name, lease = self._split(key)
        worker = self._fleet.workers.get(name)
        if worker is None or worker.lease != lease or not worker.runs:
            return
        await self.unregistered(worker, lease)

    async def unregistered(self, worker: Worker, lease: str) -> None:
        """This worker's key, which was under that lease, is not there."""
        name, worker.lease, worker.endpoints = worker.name, None, ()
        if worker.failed:
            return
        if worker.state in (WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING):
            worker.lease_gone = worker.state is not WorkerState.DRAINING
            worker.reason = worker.reason or "its lease was revoked or has expired"
            await self._fleet.apply({name: LeaseRevoked(stimulus_id=f"etcd:{lease}", lease=lease)})


def _called_back(worker: Worker) -> bool:
    return worker.course is Course.RETURNING


def _endpoints(key: str, facts: dict[str, Any], lease: str) -> tuple[str, ...]:
    """Those under that lease: any other would make the statefile one that nobody can read."""
    told = facts.get("endpoints")
    told = told if isinstance(told, list) else []
    own = tuple(one for one in told if isinstance(one, str) and one.endswith(f":{lease}"))
    if len(own) < len(told):
        log.warning("the registry's key %s names endpoints that are not under its lease; they are left out", key)
    return own


def _parsed(key: str, value: bytes) -> dict[str, Any]:
    try:
        facts = json.loads(value)
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        log.warning("the registry's key %s holds no JSON object; ignored", key)
        return {}
    return facts
