"""Elects which planner of a graph acts: the one that holds a coordination Lease.

No two clocks are compared. A lease has expired when it has not changed for its duration, on the reader's clock. The
holder stops acting earlier, `RENEW_WITHIN_S` after its last renewal, before another planner may take the lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dynamo_local.clock import Clock
from dynamo_local.errors import DynamoError
from dynamo_local.kubernetes.api import Conflict, KubeApi, NotThere

LEASE_S = 15
RENEW_WITHIN_S = 10.0
RENEW_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class HeldLease:
    """The lease as of its last change, and when that was seen (planner's clock)."""

    holder: str
    resource_version: str
    seen_s: float
    transitions: int = 0
    duration_s: float = LEASE_S


def looked(lease: Mapping[str, Any], known: HeldLease | None, now_s: float) -> HeldLease:
    """The lease, read now."""
    spec, version = lease.get("spec") or {}, lease["metadata"]["resourceVersion"]
    if known is not None and known.resource_version == version:
        return known
    return HeldLease(
        spec.get("holderIdentity") or "",
        version,
        now_s,
        int(spec.get("leaseTransitions") or 0),
        float(spec.get("leaseDurationSeconds") or LEASE_S),
    )


def may_take(held: HeldLease, own: str, now_s: float) -> bool:
    """Whether it is ours, nobody's, or expired."""
    return held.holder in ("", own) or now_s - held.seen_s > held.duration_s


def claimed(name: str, held: HeldLease | None, own: str, wall_s: float) -> dict[str, Any]:
    """The lease to write. Without `held` it is created."""
    now = datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    changes_hands = held is not None and held.holder != own
    spec: dict[str, Any] = {
        "holderIdentity": own,
        "leaseDurationSeconds": LEASE_S,
        "renewTime": now,
        "leaseTransitions": (0 if held is None else held.transitions) + changes_hands,
    }
    if held is None or changes_hands:
        spec["acquireTime"] = now
    metadata = {"name": name} if held is None else {"name": name, "resourceVersion": held.resource_version}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def released(name: str, held: HeldLease) -> dict[str, Any]:
    """The released lease: the next planner need not wait."""
    spec = {"holderIdentity": "", "leaseDurationSeconds": 1, "leaseTransitions": held.transitions}
    metadata = {"name": name, "resourceVersion": held.resource_version}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


log = logging.getLogger(__name__)


class Election:
    """Runs from `start` to `close`.

    `on_change` is called with True when this planner begins to lead, with False when it stops.
    """

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        name: str,
        identity: str,
        on_change: Callable[[bool], None] = lambda leads: None,
    ) -> None:
        self._on_change = on_change
        self.identity = identity
        self._api = api
        self._clock = clock
        self._name = name
        self._held: HeldLease | None = None
        self._renewed_s: float | None = None
        self._why = "it is not known yet which planner leads"
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Try for the first time, and go on. Raises `Forbidden`, which is final."""
        await self.renew()
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Release the lease, if it is ours. Closing twice is no error."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        is_leader, self._renewed_s = self.follows() is None, None
        if is_leader and self._held is not None:
            try:
                await self._give_back(self._held)
            except DynamoError as error:
                log.info("the lease was not given back, it expires: %s", error)

    async def _give_back(self, held: HeldLease) -> None:
        try:
            await self._api.replace_lease(released(self._name, held))
        except Conflict:  # the renewal that was cut short had arrived, or another planner has the lease
            now = looked(await self._api.lease(self._name), held, self._clock.now_s())
            if now.holder == self.identity:
                await self._api.replace_lease(released(self._name, now))

    def follows(self) -> str | None:
        """Why this planner may not act; None while it leads."""
        if self._renewed_s is None:
            return self._why
        if self._clock.now_s() - self._renewed_s > RENEW_WITHIN_S:
            return f"the lease {self._name} could not be renewed for {RENEW_WITHIN_S:g} s: {self._why}"
        return None

    async def _run(self) -> None:
        while True:
            await self._clock.sleep_until(self._clock.now_s() + RENEW_EVERY_S)
            try:
                await self.renew()
            except DynamoError as error:
                if self._renewed_s is not None and self.follows() is not None:
                    self._lost(f"its lease expired: {error}")
                self._why = str(error)
            except Exception:
                log.exception("the election failed, and goes on")

    async def renew(self) -> None:
        """Renew the lease, take it, or read its holder. Raises the API server's errors."""
        began_s, wall_s = self._clock.now_s(), self._clock.wall_s()
        try:
            self._held = looked(await self._api.lease(self._name), self._held, began_s)
        except NotThere:
            self._held = None
        if self._held is not None and not may_take(self._held, self.identity, began_s):
            self._lost(f"another planner leads ({self._held.holder}, lease {self._name})")
            return
        lease = claimed(self._name, self._held, self.identity, wall_s)
        write = self._api.create_lease if self._held is None else self._api.replace_lease
        try:
            self._held = looked(await write(lease), None, began_s)
        except Conflict:
            self._lost(f"another planner took the lease {self._name} first")
            return
        began, self._renewed_s = self.follows() is not None, began_s  # counted from before the request
        if began:
            log.info("this planner leads (%s, lease %s)", self.identity, self._name)
            self._on_change(True)

    def _lost(self, why: str) -> None:
        led, self._renewed_s, self._why = self._renewed_s is not None, None, why
        if led:
            log.warning("this planner leads no more: %s", why)
            self._on_change(False)
