"""The Processor: an OpenAI body in, text out. Chat template, tokenizer, choice of a worker, detokenizer.

With the Frontend it speaks this: the request is the validated body and a `request_id`. The answer is a stream of
`{"text", "num_tokens", "finish_reason", "usage"}`. The first item comes as soon as a worker has taken the request, with
`num_tokens: 0` and `prompt_tokens`. The last has a `finish_reason` and the `usage`. Tokens that arrived in
one frame become one item.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from dynamo_local.clock import AsyncioClock
from dynamo_local.components.dispatcher import make_picker
from dynamo_local.components.messages import ApiRequest, TextRequest
from dynamo_local.components.router import Router
from dynamo_local.components.sim_api.texts import TextsRequest
from dynamo_local.components.targets import RoutingOptions, usable_costs
from dynamo_local.components.text.model import TINY_MODEL
from dynamo_local.components.vllm_worker import VllmWorker
from dynamo_local.core.routing.choice import RouterPolicy
from dynamo_local.errors import ConfigError
from dynamo_local.sdk import service
from dynamo_local.sdk.context import current_context
from dynamo_local.sdk.service import async_on_start, depends, endpoint, on_shutdown
from dynamo_local.system.executors import ended
from dynamo_local.transport.requests.handlers import current_request


class ProcessorConfig(RoutingOptions):
    """Options of the `Processor` service."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(
        default=TINY_MODEL,
        min_length=1,
        description="Local model folder with tokenizer.json (nothing is downloaded), or sim-tiny: the built-in one.",
    )
    served_model_name: str | None = Field(
        default=None, min_length=1, description="The model's name in the API; by default `model`."
    )
    router: RouterPolicy | None = Field(
        default=None,
        description="How a worker is picked: least-loaded, slo, kv-load, round-robin or random; kv needs the Router "
        "service. Where there is one it is asked, and this is for when it is away (kv then means kv-load). Default: "
        "slo where ttft or itl is given, else least-loaded.",
    )
    router_seed: int | None = Field(default=None, description="Seed of what is left to chance; None: another each run.")
    router_timeout_s: float = Field(
        default=0.5, gt=0, le=10, description="How long a request waits for the Router before it is routed without it."
    )
    serve_args: dict[str, Any] = Field(
        default_factory=dict,
        description="With vLLM: options of `vllm serve` that its API reads, such as enable-auto-tool-choice, "
        "tool-call-parser or chat-template (docs/vllm.md). The engine's own are in the workers' sections.",
    )
    max_tries: int = Field(
        default=3, ge=1, le=16, description="Workers that may fail a request before its first token until it fails."
    )
    migration_limit: int = Field(
        default=3,
        ge=0,
        le=16,
        description="How often an answer goes on at another worker after its own was lost; 0: never "
        "(docs/migration.md).",
    )


@service(dynamo={"namespace": "dynamo", "role": "other"}, workers=1, config=ProcessorConfig)
class Processor:
    """Turns OpenAI requests into token requests to the workers, and their tokens into text."""

    worker = depends(VllmWorker)
    router = depends(Router, optional=True)

    def __init__(self) -> None:
        self._stack = contextlib.AsyncExitStack()  # `stop` is also called after a start that was cut short

    @async_on_start
    async def start(self) -> None:
        """Load the tokenizer (off the loop: it is megabytes of JSON) and begin to watch workers and models."""
        from dynamo_local.components.dispatcher import Dispatcher, RouterClient, samples
        from dynamo_local.components.models_view import ModelCard, ModelsView, adapters_prefix
        from dynamo_local.components.pipeline import Pipeline
        from dynamo_local.components.text.tokenizer import load_tokenizer
        from dynamo_local.components.vllm_api.host import ApiHost
        from dynamo_local.transport.load import LoadView

        context = current_context()
        config: ProcessorConfig = context.settings
        name = config.served_model_name or config.model
        adapters = adapters_of(config.serve_args)
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model)
        client = await context.endpoint_client(self.worker.component, "generate")
        clock = AsyncioClock()
        self._view = LoadView(context.nats, context.namespace, self.worker.component, clock)
        self._stack.push_async_callback(self._view.close)
        if config.policy not in ("round-robin", "random"):
            await self._view.start()
        picker = make_picker(config.policy, config.router_seed, costs=usable_costs(config))
        models = ModelsView(context.namespace, name)
        follow = asyncio.create_task(models.follow(context.kv), name="model cards")
        self._stack.push_async_callback(ended, follow)
        router = None
        if self.router is not None:
            asking = await context.endpoint_client(self.router.component, "generate")
            router = RouterClient(asking, config.router_timeout_s, clock)
        dispatcher = Dispatcher(
            client,
            picker,
            lambda ids: samples(self._view, clock, ids),
            max_tries=config.max_tries,
            migration_limit=config.migration_limit,
            clock=clock,
            router=router,
        )
        self._pipeline = Pipeline(tokenizer, models, dispatcher, name)
        self._api = ApiHost(dispatcher, models, name, config.serve_args)
        self._stack.push_async_callback(self._api.close)
        for each in adapters:
            card = ModelCard(each.name, context.component, "api", None, time.time(), parent=name, root=each.path)
            await context.register_key(adapters_prefix(context.namespace) + each.name, card.encode())

    @on_shutdown
    async def stop(self) -> None:
        """End the watches."""
        await self._stack.aclose()

    @endpoint(name="chat/completions")
    async def chat_completions(self, request: TextRequest) -> AsyncIterable[Any]:
        """`POST /v1/chat/completions`, streamed."""
        return self._pipeline.answering("chat", request, _remaining_s())

    @endpoint(name="completions")
    async def completions(self, request: TextRequest) -> AsyncIterable[Any]:
        """`POST /v1/completions`, streamed."""
        return self._pipeline.answering("completion", request, _remaining_s())

    @endpoint(name="api")
    async def api(self, request: ApiRequest) -> AsyncGenerator[Any, None]:
        """Any POST that the engine's own API answers, as the client made it; see `vllm_api.messages`."""
        async with contextlib.aclosing(self._api.run(request)) as items:
            async for item in items:
                yield item

    @endpoint(name="texts")
    async def texts(self, request: TextsRequest) -> dict[str, Any]:
        """`POST /tokenize`, `/detokenize`, `/v1/embeddings`: what needs no worker."""
        return await self._pipeline.texts(request)


def _remaining_s() -> float | None:
    """The rest of the caller's deadline. It goes on to the worker."""
    request = current_request()
    return request.remaining_s() if request is not None else None


# --- LoRA adapters that a Processor's `serve-args` name. Each is a model with a name of its own.

_FORM = "`lora-modules` is a list of NAME=FOLDER, or of mappings with a `name` and a `path`"


@dataclass(frozen=True, slots=True)
class Adapter:
    """One of them, and the folder that it is in."""

    name: str
    path: str


def adapters_of(serve_args: Mapping[str, Any]) -> list[Adapter]:
    """Those of `lora-modules`, as `vllm serve` reads it.

    Raises `ConfigError` for another form, and for a folder without an adapter: `vllm serve` would not start with it,
    and a worker would fail the requests that name it.
    """
    given = serve_args.get("lora-modules", serve_args.get("lora_modules"))
    if given is None:
        return []
    several = isinstance(given, Sequence) and not isinstance(given, str)
    found = [_adapter(item) for item in (given if several else [given])]
    for adapter in found:
        folder = Path(adapter.path)
        if folder.is_absolute() and not (folder / "adapter_config.json").is_file():
            raise ConfigError(
                f"Processor.serve-args: the adapter {adapter.name!r} is not in {adapter.path}, which has no "
                "adapter_config.json"
            )
    return found


def _adapter(item: Any) -> Adapter:
    if isinstance(item, str) and "=" in item and "," not in item:
        name, _, path = item.partition("=")
        return Adapter(name, path)
    try:
        fields = json.loads(item) if isinstance(item, str) else item
        return Adapter(str(fields["name"]), str(fields["path"]))
    except (ValueError, TypeError, LookupError) as error:
        raise ConfigError(f"Processor.serve-args: {item!r} is no adapter; {_FORM}") from error
