"""vLLM's API server without its engine and its port: an ASGI application, as `vllm serve` makes it.

Imports vLLM, which takes seconds of CPU: import it in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import vllm
from starlette.types import ASGIApp
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.exceptions import VLLMValidationError
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor import Executor

from dynamo_local.engines.vllm.core_requests import Wire, core_continued, sampling_of, why_prefilled_here
from dynamo_local.errors import ConfigError, WorkerLost
from dynamo_local.ports import SamplingParams

try:  # vLLM 0.33 moved it
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
except ModuleNotFoundError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args


@dataclass(frozen=True, slots=True)
class CoreCall:
    """A request to a worker. `prefill_here` says why no prefill worker can compute the prompt, if so."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    core: list[bytes]
    prefill_here: str | None
    lora_id: int = 0
    """The adapter's number in vLLM, by which its KV blocks are hashed; 0: the model itself."""
    continued: Callable[[Sequence[int]], CoreCall | None] = lambda given: None
    """The call that goes on after these tokens of the answer, at another worker; None: it cannot."""


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
        call = self._call(request)
        name = request.request_id
        pump = self._pumps[name] = asyncio.create_task(self._pump(name, call), name=f"vLLM request {name}")
        pump.add_done_callback(lambda _: self._pumps.pop(name, None))

    def _call(self, request: EngineCoreRequest) -> CoreCall:
        def continued(given: Sequence[int]) -> CoreCall | None:
            found = core_continued(request, given)
            return None if found is None else self._call(found)

        return CoreCall(
            request.prompt_token_ids or [],
            sampling_of(request),
            self._wire.encode(request),
            why_prefilled_here(request),
            0 if request.lora_request is None else request.lora_request.lora_int_id,
            continued,
        )

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


_ONLY_WORKERS = {
    "kv_transfer_config": None,
    "kv_events_config": None,
    "speculative_config": None,
    "otlp_traces_endpoint": None,
    "collect_detailed_traces": None,
}
"""Arguments that mean nothing to who computes nothing."""

_SEVERAL_WORKERS = 2
"""Number of API processes given to vLLM. With one, vLLM caches sent images and later sends only their names. The next
request may go to another worker, which does not have them."""

_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size")


@dataclass(frozen=True, slots=True)
class Engine:
    """Facts about the workers' engine for the API: arguments, context length, tasks, version."""

    words: Sequence[str]
    max_model_len: int
    tasks: Sequence[str]
    version: str


class VllmApi:
    """The application and what is behind it. Made in two steps, as `build` blocks for seconds."""

    def __init__(self, args: Namespace, llm: Any, core: GraphCore, tasks: list[Any]) -> None:
        self._args = args
        self._llm = llm
        self._core = core
        self._tasks = tasks

    @classmethod
    def build(cls, engine: Engine, serve_words: Sequence[str], send: Send) -> VllmApi:
        """In a thread. `serve_words` are arguments of `vllm serve` that its API reads. Raises `ConfigError`."""
        if engine.version != vllm.__version__:
            raise ConfigError(
                f"the workers run vLLM {engine.version}, this Processor has {vllm.__version__}; install the same one"
            )
        args = _parsed([*engine.words, *serve_words], engine.max_model_len)
        try:
            engine_args = AsyncEngineArgs.from_cli_args(args)
            engine_args._api_process_count = _SEVERAL_WORKERS
            config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        except (ValueError, TypeError, OSError) as error:
            raise ConfigError(f"vLLM's API refuses its options: {' '.join(str(error).split())}") from error
        core = GraphCore(send, engine.tasks)
        with _as_engine_core(core):
            llm = AsyncLLM(config, Executor, log_stats=False, log_requests=args.enable_log_requests)
        core.failed = _failure_callback(llm)
        return cls(args, llm, core, list(engine.tasks))

    async def app(self) -> ASGIApp:
        """The application. In the event loop in which it is to be called."""
        app = build_app(self._args, self._tasks, self._llm.model_config)
        await init_app_state(self._llm, app.state, self._args, self._tasks)
        return app

    def close(self) -> None:
        """End what is under way."""
        self._llm.shutdown()


def _parsed(words: Sequence[str], max_model_len: int) -> Namespace:
    parser = make_arg_parser(FlexibleArgumentParser(add_help=False))
    parser.error = _refused  # type: ignore[method-assign]
    args = parser.parse_args(list(words))
    validate_parsed_serve_args(args)
    for name, value in _ONLY_WORKERS.items():
        setattr(args, name, value)
    for name in _PARALLEL:
        setattr(args, name, 1)
    args.max_model_len = max_model_len
    args.api_key = None  # the Frontend asks for it
    return args


def _refused(message: str) -> Any:
    raise ConfigError(f"Processor.serve-args: {message}")


@contextlib.contextmanager
def _as_engine_core(core: GraphCore) -> Iterator[None]:
    """While an AsyncLLM is made, it gets this for its EngineCore: it makes its client by this one function."""
    made = EngineCoreClient.__dict__["make_async_mp_client"]
    EngineCoreClient.make_async_mp_client = staticmethod(lambda *_, **__: core)
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = made


def _failure_callback(llm: Any) -> Any:
    """How the AsyncLLM is told that a request has failed."""
    states = llm.output_processor.request_states

    def failed(request_id: str, error: Exception) -> None:
        if (state := states.get(request_id)) is not None and state.queue is not None:
            state.queue.put(error)

    return failed
