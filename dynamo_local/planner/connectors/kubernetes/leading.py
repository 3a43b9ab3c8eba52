"""Which of several planners of a graph acts: the one that holds a coordination Lease. Pure.

No two clocks are compared: a lease has expired when it has not changed for its duration by the clock of whoever looks.
The holder stops acting earlier, `RENEW_WITHIN_S` after it was last renewed: before anybody else may take it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

LEASE_S = 15
RENEW_WITHIN_S = 10.0
RENEW_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Held:
    """The lease as it was when it last changed, and when that was seen (planner's clock)."""

    holder: str
    resource_version: str
    seen_s: float
    transitions: int = 0
    duration_s: float = LEASE_S


def looked(lease: Mapping[str, Any], known: Held | None, now_s: float) -> Held:
    """The lease, read now."""
    spec, version = lease.get("spec") or {}, lease["metadata"]["resourceVersion"]
    if known is not None and known.resource_version == version:
        return known
    return Held(
        spec.get("holderIdentity") or "",
        version,
        now_s,
        int(spec.get("leaseTransitions") or 0),
        float(spec.get("leaseDurationSeconds") or LEASE_S),
    )


def may_take(held: Held, own: str, now_s: float) -> bool:
    """Whether it is ours, nobody's, or expired."""
    return held.holder in ("", own) or now_s - held.seen_s > held.duration_s


def claimed(name: str, held: Held | None, own: str, wall_s: float) -> dict[str, Any]:
    """The lease as it is to be written; `held` None: it is created."""
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


def released(name: str, held: Held) -> dict[str, Any]:
    """The lease, given back: the next one need not wait."""
    spec = {"holderIdentity": "", "leaseDurationSeconds": 1, "leaseTransitions": held.transitions}
    metadata = {"name": name, "resourceVersion": held.resource_version}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
