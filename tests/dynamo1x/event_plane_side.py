"""Dynamo's own side of its event plane, as a process: `event_plane_side.py listen|publish ENDPOINT`.

`listen` prints a line for each pass that its subscriber gets; `publish` prints its connection's id, and then publishes
a pass ten times a second until it is ended.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any


def listen(endpoint: Any) -> None:
    from dynamo.common.forward_pass_metrics import decode
    from dynamo.llm import FpmEventSubscriber

    subscriber = FpmEventSubscriber(endpoint)
    print("listening", flush=True)
    while (data := subscriber.recv()) is not None:
        read = decode(data)
        print(read.worker_id, read.counter_id, read.scheduled_requests.sum_prefill_tokens, flush=True)


def publish(endpoint: Any) -> None:
    import time

    from dynamo._core import FpmDirectPublisher

    worker_id = str(endpoint.connection_id())
    publisher = FpmDirectPublisher(endpoint, worker_id)
    print(worker_id, flush=True)
    while True:
        publisher.publish(
            dp_rank=0,
            scheduled_num_prefill_requests=1,
            scheduled_sum_prefill_tokens=512,
            scheduled_sum_prefill_kv_tokens=64,
            scheduled_num_decode_requests=3,
            scheduled_sum_decode_kv_tokens=4500,
            queued_num_prefill_requests=2,
            queued_sum_prefill_tokens=700,
            queued_num_decode_requests=0,
            queued_sum_decode_kv_tokens=0,
            wall_time_secs=0.01,
        )
        time.sleep(0.1)


async def main() -> None:
    from dynamo.runtime import DistributedRuntime

    role, path = sys.argv[1:3]
    runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp")
    await asyncio.to_thread({"listen": listen, "publish": publish}[role], runtime.endpoint(path))


if __name__ == "__main__":
    asyncio.run(main())
