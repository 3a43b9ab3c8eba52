"""The disaggregated graph, in which whoever sends a request to a worker notes when, to whom, and what came of it.

One JSON line `[time, component, lease id, request id, outcome]` per attempt, in `$BENCH_NOTES/<pid>.jsonl`. `time` is
CLOCK_MONOTONIC seconds (one clock for all processes of a host) before anything is sent. `outcome` is "taken" or the
error's code. The measured code is not touched: the notes are the caller's own, around the call.
"""

from __future__ import annotations

import json
import os
import time
from functools import cache
from typing import IO, Any

from dynamo_local.components.frontend import Frontend
from dynamo_local.components.prefill_worker import PrefillWorker
from dynamo_local.components.processor import Processor
from dynamo_local.components.vllm_worker import VllmWorker
from dynamo_local.core.types import Instance
from dynamo_local.errors import DynamoError
from dynamo_local.transport.requests.calls import RequestSender

Frontend.link(Processor).link(VllmWorker).link(PrefillWorker)

_send = RequestSender.send


@cache
def _notes() -> IO[str]:
    return open(os.path.join(os.environ["BENCH_NOTES"], f"{os.getpid()}.jsonl"), "a", buffering=1)


async def _noted(dispatcher: RequestSender, instance: Instance, request_id: str, *rest: Any) -> Any:
    at_s, outcome = time.monotonic(), "cancelled"
    try:
        stream = await _send(dispatcher, instance, request_id, *rest)
        outcome = "taken"
        return stream
    except DynamoError as error:
        outcome = error.code
        raise
    finally:
        _notes().write(json.dumps([at_s, instance.component, instance.lease_id, request_id, outcome]) + "\n")


RequestSender.send = _noted  # type: ignore[method-assign]
