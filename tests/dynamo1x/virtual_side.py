"""One side of the virtual connector in Dynamo's own code, as a process with ETCD_ENDPOINTS: for test_virtual_dynamo.py.

virtual_side.py coordinator NAMESPACE 3 1   wants so many decode workers, each once the last number is reached
virtual_side.py connector NAMESPACE 3 1     the same through its planner's VirtualConnector, which stands on the first
virtual_side.py environment NAMESPACE 2     takes that many decisions, and says at once that they are carried out

Each line of its output is JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from dynamo._core import DistributedRuntime, VirtualConnectorClient, VirtualConnectorCoordinator

CHECK_S, MAX_WAIT_S = 1, 120


def say(**facts: Any) -> None:
    """One line."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


async def planner(runtime: DistributedRuntime, namespace: str, targets: list[int]) -> None:
    """Decide, and wait for the acknowledgement, one after the other."""
    coordinator = VirtualConnectorCoordinator(runtime, namespace, CHECK_S, MAX_WAIT_S, MAX_WAIT_S // CHECK_S)
    await coordinator.async_init()
    for target in targets:
        await coordinator.update_scaling_decision(None, target)
        say(decided=target, decision_id=coordinator.read_state().decision_id)
        while not await coordinator.is_scaling_ready():
            await asyncio.sleep(0.1)
        await coordinator.wait_for_scaling_completion()
        say(done=target, decision_id=coordinator.read_state().decision_id)


async def environment(runtime: DistributedRuntime, namespace: str, count: int) -> None:
    """Take decisions and complete them."""
    client = VirtualConnectorClient(runtime, namespace)
    last = -1
    say(waits=True)
    while last < count - 1:
        await client.wait()
        decision = await client.get()
        if decision.decision_id > last:
            last = decision.decision_id
            say(decision_id=last, prefill=decision.num_prefill_workers, decode=decision.num_decode_workers)
            await client.complete(decision)


async def main(side: str, namespace: str, *numbers: str) -> None:
    """Without NATS: neither side needs it."""
    runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp", event_plane="zmq")
    if side == "planner":
        await planner(runtime, namespace, [int(number) for number in numbers])
    else:
        await environment(runtime, namespace, int(numbers[0]))
    runtime.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
