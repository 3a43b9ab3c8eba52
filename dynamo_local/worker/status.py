"""What a worker says of itself when it is asked (`status` of its control endpoint)."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from dynamo_local.errors import DynamoError
from dynamo_local.sdk.context import Work
from dynamo_local.worker.context import Context, Identity
from dynamo_local.worker.drain import Drain, Phase
from dynamo_local.worker.endpoints import Endpoints

SHOWN_REQUESTS = 100


def worker_status(
    identity: Identity, drain: Drain, endpoints: Endpoints, context: Context | None, *, lease: str | None, waiting: str
) -> dict[str, Any]:
    """`requests` are at most 100 of the `in_flight`; `pulled` of them came out of a queue. None is "unknown".

    `lease` is in hex, None while there is none; `waiting` says what a worker that still starts waits for.
    """
    requests = endpoints.in_flight_ids()
    work, load = Work(), None
    if context is not None:
        work = context.work_source()
        requests += work.requests
        with contextlib.suppress(DynamoError):  # the program behind the component does not answer: unknown
            load = context.load_source() if context.load_source is not None else None
    return {
        "state": str(drain.phase),
        "reason": drain.reason,
        "waiting_for": waiting if drain.phase is Phase.STARTING else None,
        "watcher_name": identity.watcher_name,
        "component": identity.component,
        "run_id": identity.run_id,
        "pid": os.getpid(),
        "lease": lease,
        "in_flight": len(requests) + work.unnamed,
        "requests": requests[:SHOWN_REQUESTS],
        "pulled": work.pulled,
        "remaining_tokens": None if load is None else load.remaining_tokens,
        "itl_ms": None if load is None else load.itl_ms,
    }
