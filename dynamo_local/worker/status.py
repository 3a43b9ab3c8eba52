"""What a worker says of itself when it is asked (`status` of its control endpoint)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from dynamo_local.worker.drain import Drain, Phase
from dynamo_local.worker.served_role import ServedRole

SHOWN_REQUESTS = 100


def worker_status(role: ServedRole, former: Iterable[ServedRole], drain: Drain, *, waiting: str) -> dict[str, Any]:
    """`requests` are at most 100 of the `in_flight`; `pulled` of them came out of a queue. None is "unknown".

    Those of its `former` roles, which are still finished, are among them. `waiting` says what a worker that still
    starts waits for.
    """
    work = [each.work() for each in (role, *former)]
    requests = [request for each in work for request in each.requests]
    load, identity = role.load_or_none(), role.identity
    return {
        "state": str(drain.phase),
        "reason": drain.reason,
        "waiting_for": waiting if drain.phase is Phase.STARTING else None,
        "watcher_name": identity.watcher_name,
        "component": identity.component,
        "run_id": identity.run_id,
        "pid": os.getpid(),
        "lease": role.registration.held_lease(),
        "in_flight": len(requests) + sum(each.unnamed for each in work),
        "requests": requests[:SHOWN_REQUESTS],
        "pulled": sum(each.pulled for each in work),
        "remaining_tokens": None if load is None else load.remaining_tokens,
        "itl_ms": None if load is None else load.itl_ms,
    }
