"""Dynamo's own client, in a process of its own: `PYTHON asking.py PATH INSTANCE DISCOVERY PLANE`.

It runs by the Python that the worker runs by, in which `dynamo.runtime` is, and maybe nothing of ours: so this file
stands alone. It asks the endpoint of that path (`namespace.component.endpoint`) of one instance (decimal), and writes
the first answer to standard output as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


async def perf_metrics(path: str, instance: int, discovery: str, plane: str) -> Any:
    """The first answer; None where there is none."""
    from dynamo.runtime import DistributedRuntime

    runtime = DistributedRuntime(asyncio.get_running_loop(), discovery, plane)
    try:
        client = await runtime.endpoint(path).client()
        while instance not in client.instance_ids():
            await client.wait_for_instances()
            await asyncio.sleep(0.02)
        async for answer in await client.direct(None, instance):
            return answer.data()
        return None
    finally:
        runtime.shutdown()


def main() -> None:
    """Ends with 0 and the answer, or with 1 and the error as the last line of standard error."""
    path, instance, discovery, plane = sys.argv[1:]
    try:
        sys.stdout.write(json.dumps(asyncio.run(perf_metrics(path, int(instance), discovery, plane))))
        sys.stdout.flush()
        code = 0
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        code = 1
    os._exit(code)  # the runtime's own threads are not waited for


if __name__ == "__main__":
    main()
