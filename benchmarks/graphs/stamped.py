"""The aggregated graph, with a worker that notes when its engine yielded each token.

Between those times and a client's lies all that this project adds: worker, data plane, Processor, Frontend, HTTP.
CLOCK_MONOTONIC is one clock for all processes of a host. The notes go to `$BENCH_STAMPS/<request id>`, 16 bytes per
output (time in seconds, number of tokens), once the stream has ended.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import AsyncGenerator
from pathlib import Path

from dynamo_local.components.frontend import Frontend
from dynamo_local.components.processor import Processor
from dynamo_local.components.vllm_worker import VllmWorker
from dynamo_local.engines.sim.engine import SimEngine
from dynamo_local.ports import EngineOutput, EngineRequest

Frontend.link(Processor, colocate=True).link(VllmWorker)  # type: ignore[attr-defined]

_generate = SimEngine.generate
STAMPS = Path(os.environ.get("BENCH_STAMPS", "."))


async def _stamped(engine: SimEngine, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
    stamps = array("d")
    try:
        async for output in _generate(engine, request):
            stamps.append(time.monotonic())
            stamps.append(len(output.token_ids))
            yield output
    finally:
        # The Frontend's request id, without what the worker adds to make it the engine's own.
        name = request.request_id.rpartition("-")[0]
        (STAMPS / name).write_bytes(stamps.tobytes())


SimEngine.generate = _stamped  # type: ignore[method-assign,assignment]
