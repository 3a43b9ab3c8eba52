"""Shows who a worker is, where etcd, NATS and statefile are fakes."""

from __future__ import annotations

from pathlib import Path

from dynamo_local.transport.access import EtcdAccess, NatsAccess
from dynamo_local.worker.context import Identity


def identity_of(component: str, *, flips_to: str | None = None) -> Identity:
    """The first worker of that component of the namespace `dynamo`."""
    return Identity(
        namespace="dynamo",
        component=component,
        watcher_name=f"dynamo_{component}",
        run_id="01J",
        statefile=Path("/nowhere"),
        etcd_endpoints="",
        nats_server="",
        etcd_access=EtcdAccess.of({}),
        nats_access=NatsAccess.of({}),
        lease_ttl_s=10,
        start_deadline_s=10.0,
        flips_to=flips_to,
    )
