"""vLLM's API server without its engine and its port: an ASGI application, as `vllm serve` makes it.

Imports vLLM, which takes seconds of CPU: import it in a thread.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import vllm
from starlette.types import ASGIApp
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor import Executor

from dynamo_local.engines.vllm.graph_core import GraphCore, Send
from dynamo_local.errors import ConfigError

_ONLY_WORKERS = {"kv_transfer_config": None, "kv_events_config": None, "speculative_config": None}
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
        core.failed = _told(llm)
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


def _told(llm: Any) -> Any:
    """How the AsyncLLM is told that a request has failed."""
    states = llm.output_processor.request_states

    def failed(request_id: str, error: Exception) -> None:
        if (state := states.get(request_id)) is not None and state.queue is not None:
            state.queue.put(error)

    return failed
