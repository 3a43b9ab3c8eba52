"""The EngineCore client of AsyncLLM in a Processor.

It sends requests to the graph's workers and returns their outputs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest

from dynamo_local.engines.vllm.core_requests import Wire, sampling_of, why_prefilled_here
from dynamo_local.errors import WorkerLost
from dynamo_local.ports import SamplingParams


@dataclass(frozen=True, slots=True)
class CoreCall:
    """A request to a worker. `prefill_here` says why no prefill worker can compute the prompt, if so."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    core: list[bytes]
    prefill_here: str | None
    lora_id: int = 0
    """The adapter's number in vLLM, by which its KV blocks are hashed; 0: the model itself."""


Items = Sequence[Mapping[str, Any]]


class Send(Protocol):
    """Has a worker serve a call: the items of `components.messages`, as they arrived together. It runs in a task of its
    own, in the context of the HTTP request."""

    def __call__(self, call: CoreCall) -> AsyncGenerator[Items, None]:
        """Closed, it cancels the request."""
        ...


class GraphCore:
    """The part of `EngineCoreClient` that an API process uses.

    `failed` is told why a request has no more outputs; who builds the AsyncLLM sets it.
    """

    engine_ranks_managed = (0,)

    def __init__(self, send: Send, tasks: Sequence[str]) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.failed: Callable[[str, Exception], None] = lambda _id, _error: None
        self._send = send
        self._tasks = list(tasks)  # as EngineCore gives them: vLLM shows them to clients
        self._wire = Wire()
        self._pumps: dict[str, asyncio.Task[None]] = {}
        self._outputs: list[EngineCoreOutput] = []
        self._ready = asyncio.Event()

    async def get_supported_tasks_async(self) -> list[str]:
        """As the worker said."""
        return self._tasks

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Returns at once; what becomes of it is an output, or told to `failed`. Raises vLLM's own error for what a
        client must not say here."""
        if ((params := request.sampling_params) is not None) and "kv_transfer_params" in (params.extra_args or {}):
            raise VLLMValidationError(
                "kv_transfer_params: this graph hands KV over by itself; leave it out", parameter="kv_transfer_params"
            )
        call = CoreCall(
            request.prompt_token_ids or [],
            sampling_of(request),
            self._wire.encode(request),
            why_prefilled_here(request),
            0 if request.lora_request is None else request.lora_request.lora_int_id,
        )
        name = request.request_id
        pump = self._pumps[name] = asyncio.create_task(self._pump(name, call), name=f"vLLM request {name}")
        pump.add_done_callback(lambda _: self._pumps.pop(name, None))

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        """Nothing more of them is wanted."""
        for name in request_ids:
            if (pump := self._pumps.get(name)) is not None:
                pump.cancel()

    async def get_output_async(self) -> EngineCoreOutputs:
        """All that has come since the last call, or the next."""
        await self._ready.wait()
        self._ready.clear()
        outputs, self._outputs = self._outputs, []
        return EngineCoreOutputs(outputs=outputs)

    async def add_lora_async(self, lora_request: Any) -> bool:
        """Workers load an adapter with the first request that names it."""
        return True

    def shutdown(self, timeout: float | None = None) -> None:
        """End all calls."""
        for pump in self._pumps.values():
            pump.cancel()

    async def _pump(self, name: str, call: CoreCall) -> None:
        try:
            async with contextlib.aclosing(self._send(call)) as batches:
                async for batch in batches:
                    if self._take(name, batch):
                        return
            raise WorkerLost("the worker's answer ended without a finish reason; send the request again")
        except Exception as error:
            self.failed(name, error)

    def _take(self, name: str, items: Items) -> bool:
        """Whether the last one is among them."""
        finished = False
        for item in items:
            core, token_ids = item.get("core"), item["token_ids"]
            if core is not None:
                output = self._wire.output(core)
                output.request_id = name
            elif token_ids:
                output = EngineCoreOutput(name, list(token_ids))
            else:
                continue  # "taken"
            finished = output.finish_reason is not None
            self._outputs.append(output)
            self._ready.set()
        return finished
