"""A graph of simulated engines in this process, for what drives a measurement (`profiling.graph.MeasuredGraph`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from dynamo_local.components.measuring import Measurable, MeasureRequest
from dynamo_local.engines.sim.engine import SimEngine
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.profiling.graph import Worker
from dynamo_local.runtime.passes.recorder import PassRecorder


class InProcessGraph:
    """`measure` asks the engine of that worker as its endpoint would."""

    def __init__(self, engines: Mapping[str, Measurable]) -> None:
        self._engines = engines
        self.asked = 0

    @property
    def workers(self) -> list[Worker]:
        """All of them."""
        return [Worker(name, "VllmWorker", number, ()) for number, name in enumerate(self._engines)]

    async def measure(self, worker: Worker, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """See `MeasuredGraph`."""
        self.asked += 1
        return await self._engines[worker.name].measure(msgspec.convert(dict(request), MeasureRequest))


@asynccontextmanager
async def in_process(**speeds: float) -> AsyncIterator[InProcessGraph]:
    """A worker for each name, with an engine of that speed."""
    async with AsyncExitStack() as stack:
        engines = {}
        for name, speed in speeds.items():
            recorder = PassRecorder()
            engine = SimEngine(SimOptions(speed=speed, max_num_seqs=64), passes=recorder)
            await engine.start()
            stack.push_async_callback(engine.close)
            engines[name] = Measurable(engine, recorder)
        yield InProcessGraph(engines)
