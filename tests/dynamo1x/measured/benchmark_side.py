"""A worker as Dynamo's own are, which has measured itself: `benchmark_side.py MODEL_PATH NAME COMPONENT ROWS`.

It serves `generate` and `get_perf_metrics` of `DYN_NAMESPACE.COMPONENT` by Dynamo's runtime. There it answers ROWS, by
commas: `TOKENS:SECONDS` of one prompt each and `REQUESTS:KV:SECONDS` of a decode; if empty, that it has none.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Any


def answer(rows: str) -> dict[str, Any]:
    if not rows:
        return {"status": "error", "message": "no benchmark data"}
    results = []
    for row in rows.split(","):
        *counts, wall_time = row.split(":")
        names = ("sum_prefill_tokens",) if len(counts) == 1 else ("num_decode_requests", "sum_decode_kv_tokens")
        scheduled = dict(zip(names, map(int, counts), strict=True))
        if len(counts) == 1:
            scheduled["num_prefill_requests"] = 1
        fpm = {"version": 1, "worker_id": "", "dp_rank": 0, "wall_time": float(wall_time)}
        point = {"point_type": "prefill" if len(counts) == 1 else "decode"}
        results.append({"point": point, "fpms": [{**fpm, "scheduled_requests": scheduled}]})
    return {"status": "completed", "results": results}


async def main() -> None:
    from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
    from dynamo.runtime import DistributedRuntime

    model, name, component, rows = sys.argv[1:5]
    runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp")

    async def generate(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield {"token_ids": [1], "finish_reason": "stop"}

    async def get_perf_metrics(request: Any = None) -> AsyncIterator[dict[str, Any]]:
        yield answer(rows)

    path = f"{os.environ['DYN_NAMESPACE']}.{component}"
    served = runtime.endpoint(f"{path}.generate")
    await register_model(
        ModelInput.Tokens, ModelType.Chat, served, model, model_name=name, worker_type=WorkerType.Aggregated
    )
    await asyncio.gather(
        served.serve_endpoint(generate), runtime.endpoint(f"{path}.get_perf_metrics").serve_endpoint(get_perf_metrics)
    )


if __name__ == "__main__":
    asyncio.run(main())
