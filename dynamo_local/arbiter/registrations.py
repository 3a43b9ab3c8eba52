"""The registry of our workers: which are ready, under which lease, and which have left.

A worker's last key, `{ns}/workers/{watcher}:{lease}`, says that all of its endpoints are registered.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from dynamo_local.arbiter.links import Links
from dynamo_local.arbiter.statefile import facts_of
from dynamo_local.core.fleet.events import Event, KeyGone, KeyPut, RegistryListed
from dynamo_local.core.types import LEASE
from dynamo_local.errors import EtcdUnavailable
from dynamo_local.ports import DeleteEvent, KeyValue, PutEvent, SnapshotEvent, WatchEvent

log = logging.getLogger(__name__)


class Registrations:
    """Follows the registry and feeds what it sees to the controller."""

    def __init__(self, namespace: str, feed: Callable[[Event], Any], links: Links) -> None:
        self._prefix = f"{namespace}/workers/"
        self._feed = feed
        self._links = links
        self.frontend_url: str | None = None
        self._seen = asyncio.Event()

    async def follow(self) -> None:
        """Run for ever. Survives restarts of etcd, and tells `links` whether etcd answers."""
        async for event in self._links.kv.watch_prefix(self._prefix, self._lost):
            self._links.etcd_seen(True)
            self._apply(event)

    async def looked_through(self, timeout_s: float) -> None:
        """Return once the whole registry has been looked through. Raises `EtcdUnavailable`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._seen.wait()
        except TimeoutError:
            raise EtcdUnavailable(f"etcd did not list its keys within {timeout_s:g} s; try again") from None

    def _lost(self) -> None:
        self._links.etcd_seen(False)
        log.warning("etcd does not answer; what is known of the workers may be stale until it does")

    def _apply(self, event: WatchEvent) -> None:
        if isinstance(event, SnapshotEvent):
            for kv in event.kvs:
                self._put(kv)
            listed = frozenset(self._split(kv.key) for kv in event.kvs)
            self._feed(RegistryListed(stimulus_id="registry", keys=listed))
            self._seen.set()
        elif isinstance(event, PutEvent):
            self._put(event.kv)
        elif isinstance(event, DeleteEvent):
            name, lease = self._split(event.key)
            self._links.ready_keys.pop(event.key, None)
            self._feed(KeyGone(stimulus_id=f"etcd:{lease}", name=name, lease=lease))

    def _split(self, key: str) -> tuple[str, str]:
        name, _, lease = key.removeprefix(self._prefix).rpartition(":")
        return name, lease

    def _put(self, kv: KeyValue) -> None:
        key = kv.key
        name, lease = self._split(key)
        facts = _parsed(key, kv.value)
        pid = facts.get("pid")
        if not isinstance(pid, int):
            return
        self._feed(
            KeyPut(
                stimulus_id=f"etcd:{lease}",
                name=name,
                pid=pid,
                lease=lease,
                endpoints=_endpoints(key, facts, lease),
                other_leases=tuple(filter(LEASE.fullmatch, str(facts.get("leases", "")).split(","))),
                failed=bool(facts.get("failed")),
                why=None if facts.get("why") is None else str(facts["why"]),
                standby=facts_of(facts.get("standby")),
            )
        )
        known = self._links.ready_keys
        for older in [one for one in known if self._split(one)[0] == name]:
            del known[older]
        known[key] = kv.mod_revision
        self.frontend_url = facts.get("frontend_url", self.frontend_url)


def _endpoints(key: str, facts: dict[str, Any], lease: str) -> tuple[str, ...]:
    """Those under that lease: any other would make the statefile one that nobody can read."""
    named = facts.get("endpoints")
    named = named if isinstance(named, list) else []
    own = tuple(one for one in named if isinstance(one, str) and one.endswith(f":{lease}"))
    if len(own) < len(named):
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
