"""One side of the virtual connector in Dynamo's own code, as a process with ETCD_ENDPOINTS: for test_virtual_dynamo.py.

`connector NAMESPACE 3 1` wants so many decode workers, each once the last number is reached; `2:3` are two prefill
and three decode workers. `coordinator NAMESPACE 3 1` does the same through the connector's own binding. `environment
NAMESPACE 2` takes that many decisions, and says at once that they are carried out.

Each line of its output is JSON; after each number that is reached it waits for a line of input.

The connector is `dynamo.planner.VirtualConnector`, which Dynamo's planner scales through. Its package imports, for
other connectors and for performance models, what cannot all be installed: those modules are empty here, and no code
of theirs is run.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from dynamo._core import DistributedRuntime, VirtualConnectorClient, VirtualConnectorCoordinator

CHECK_S, MAX_WAIT_S = 1, 120
PREFILL, DECODE, ENDPOINT = "prefill", "backend", "generate"
"""Where Dynamo's prefill, and its decode and aggregated workers register."""
Target = tuple[int | None, int]
NOT_HERE = frozenset({"aisimulate_core", "kubernetes", "sklearn"})


class Empty(MetaPathFinder, Loader):
    """Finds the modules that are not here."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in NOT_HERE else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = MagicMock(name=spec.name, __path__=[], __spec__=spec)
        module.__name__ = spec.name
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


def say(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


async def coordinator(runtime: DistributedRuntime, namespace: str, targets: Sequence[Target]) -> None:
    """Decide, and wait for the acknowledgement, one after the other."""
    binding = VirtualConnectorCoordinator(runtime, namespace, CHECK_S, MAX_WAIT_S, MAX_WAIT_S // CHECK_S)
    await binding.async_init()
    for prefill, decode in targets:
        await binding.update_scaling_decision(prefill, decode)
        say(decided=decode, decision_id=binding.read_state().decision_id)
        await until(binding.is_scaling_ready)
        await binding.wait_for_scaling_completion()
        say(done=decode, decision_id=binding.read_state().decision_id)
        await told_to_go_on()


async def connector(runtime: DistributedRuntime, namespace: str, targets: Sequence[Target]) -> None:
    """The same as its planner does it: a target for the role, and stable once discovery shows as many as decided."""
    os.environ.update(SCALING_CHECK_INTERVAL=str(CHECK_S), SCALING_MAX_WAIT_TIME=str(MAX_WAIT_S))
    sys.meta_path.append(Empty())
    from dynamo.planner import SubComponentType, TargetReplica, VirtualConnector, WorkerInfo

    class Provider:
        def get_worker_info(self, role: Any, backend: str = "vllm") -> Any:
            name = PREFILL if role == SubComponentType.PREFILL else DECODE
            return WorkerInfo(component_name=name, endpoint=ENDPOINT)

    own = VirtualConnector(runtime, namespace, Provider(), model_name="tiny")
    await own.async_init()

    async def stable() -> bool:
        of_prefill = PREFILL if prefill is not None else None
        return bool((await own.get_actual_worker_counts(of_prefill, DECODE))[2])

    for prefill, decode in targets:
        both = ((SubComponentType.PREFILL, prefill), (SubComponentType.DECODE, decode))
        wanted = [TargetReplica(sub_component_type=role, desired_replicas=n) for role, n in both if n is not None]
        await own.set_component_replicas(wanted, blocking=False)
        say(decided=decode, decision_id=own.coord.read_state().decision_id)
        await own.wait_for_deployment_ready()
        await until(stable)
        say(done=decode, decision_id=own.coord.read_state().decision_id)
        await told_to_go_on()


async def told_to_go_on() -> None:
    """A line of input: until then things stay as they are, to be looked at."""
    await asyncio.to_thread(sys.stdin.readline)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Return once it holds. Raises TimeoutError."""
    async with asyncio.timeout(MAX_WAIT_S):
        while not await condition():
            await asyncio.sleep(0.1)


async def environment(runtime: DistributedRuntime, namespace: str, targets: Sequence[Target]) -> None:
    client = VirtualConnectorClient(runtime, namespace)
    last = -1
    say(waits=True)
    while last < targets[0][1] - 1:
        await client.wait()
        decision = await client.get()
        if decision.decision_id > last:
            last = decision.decision_id
            say(decision_id=last, prefill=decision.num_prefill_workers, decode=decision.num_decode_workers)
            await client.complete(decision)


SIDES = {"connector": connector, "coordinator": coordinator, "environment": environment}


async def main(side: str, namespace: str, *numbers: str) -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp", event_plane="zmq")
    pairs = [number.rpartition(":") for number in numbers]
    await SIDES[side](runtime, namespace, [(int(first) if first else None, int(last)) for first, _, last in pairs])
    runtime.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
