"""A graph of simulated engines in this process, for what drives a measurement (`measuring.graph.MeasuredGraph`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from dynamo_local.components.measurement import Measurable, MeasureRequest
from dynamo_local.engines.sim.engine import SimEngine
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.measuring.graph import Worker
from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.transport.passes import PassRecorder


class InProcessGraph:
    """`measure` asks the engine of that worker as its endpoint would."""

    def __init__(self, engines: Mapping[str, Measurable]) -> None:
        self._engines = engines
        self.asked = 0

    @property
    def workers(self) -> list[Worker]:
        return [Worker(name, "VllmWorker", number, ()) for number, name in enumerate(self._engines)]

    async def measure(self, worker: Worker, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        self.asked += 1
        return await self._engines[worker.name].measure(msgspec.convert(dict(request), MeasureRequest))


class Faulty:
    """A `PerfModel` of an engine that takes `factor()` times as long as the profile says, whatever that is now."""

    def __init__(self, factor: Callable[[], float]) -> None:
        self._perf = ProfileModel.load(SimOptions().profile)
        self._factor = factor

    @property
    def max_kv_tokens(self) -> int:
        return self._perf.max_kv_tokens

    @property
    def launch_s(self) -> float:
        return self._perf.launch_s * self._factor()

    def prefill_s(self, context_tokens: int, new_tokens: int) -> float:
        return self._perf.prefill_s(context_tokens, new_tokens) * self._factor()

    def decode_s(self, batch: int, active_kv_tokens: int, mean_context: float) -> float:
        return self._perf.decode_s(batch, active_kv_tokens, mean_context) * self._factor()

    def decode_run_s(self, batch: int, active_kv_tokens: int, passes: int) -> list[float]:
        factor = self._factor()
        return [each_s * factor for each_s in self._perf.decode_run_s(batch, active_kv_tokens, passes)]


@asynccontextmanager
async def in_process(factor: Callable[[], float] | None = None, **speeds: float) -> AsyncIterator[InProcessGraph]:
    """A worker for each name, with an engine of that speed; with a `factor`, faulty ones."""
    async with AsyncExitStack() as stack:
        engines = {}
        for name, speed in speeds.items():
            recorder = PassRecorder()
            perf = None if factor is None else Faulty(factor)
            engine = SimEngine(SimOptions(speed=speed, max_num_seqs=64), perf_model=perf, passes=recorder)
            await engine.start()
            stack.push_async_callback(engine.close)
            engines[name] = Measurable(engine, recorder)
        yield InProcessGraph(engines)
