"""The Router: which worker is to get a prompt, by what each has cached and how busy it is. docs/routing.md."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
from pydantic import ConfigDict, Field

from dynamo_local.clock import AsyncioClock
from dynamo_local.components.messages import RouteRequest, parse_route_request
from dynamo_local.components.targets import RoutingOptions, usable_costs
from dynamo_local.components.text.model import TINY_MODEL
from dynamo_local.components.vllm_worker import VllmWorker
from dynamo_local.core.routing.choice import RouterPolicy, RouterSettings
from dynamo_local.sdk import service
from dynamo_local.sdk.context import current_context
from dynamo_local.sdk.service import async_on_start, depends, endpoint, on_shutdown

FIRST_VIEW_TIMEOUT_S = 5.0
"""How long a start waits to learn what the workers have cached; after that they are asked in the background."""


class RouterConfig(RoutingOptions):
    """Options of the `Router` service."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(default=TINY_MODEL, min_length=1, description="As the workers'; names the key in etcd.")
    served_model_name: str | None = Field(
        default=None, min_length=1, description="The model's name in the API; by default `model`."
    )
    router: RouterPolicy | None = Field(
        default=None,
        description="How a worker is picked: least-loaded, slo, kv, kv-load, round-robin or random. "
        "Changeable at run time, in etcd. Default: slo where ttft or itl is given, else least-loaded.",
    )
    router_seed: int | None = Field(default=None, description="Seed of what is left to chance; None: another each run.")
    kv_block_expiry_s: float | None = Field(
        default=None, gt=0, description="Forget a block that nobody stored or matched for so long; None: never."
    )


@service(dynamo={"namespace": "dynamo", "role": "other"}, workers=1, config=RouterConfig)
class Router:
    """Follows the KV blocks and loads of all workers. Each replica follows all of them, so any can answer."""

    worker = depends(VllmWorker)

    def __init__(self) -> None:
        self._stack = contextlib.AsyncExitStack()  # `stop` is also called after a start that was cut short

    @async_on_start
    async def start(self) -> None:
        """Begin to follow; returns once the present workers have reported their blocks, or after a bound."""
        from dynamo_local.components.dispatcher import samples
        from dynamo_local.components.kv_router import RouteDecisions
        from dynamo_local.core.routing.kv_index import KvIndex
        from dynamo_local.transport.kv_events import KV_BLOCKS_ENDPOINT, KvFeed
        from dynamo_local.transport.load import LoadView
        from dynamo_local.transport.settings import WatchedSettings, router_settings_key

        context = current_context()
        config: RouterConfig = context.settings
        clock = AsyncioClock()
        component = self.worker.component
        key = router_settings_key(context.namespace, config.served_model_name or config.model)
        settings = WatchedSettings(context.kv, key, RouterSettings(config.policy))
        self._stack.push_async_callback(settings.close)
        await settings.start()
        view = LoadView(context.nats, context.namespace, component, clock)
        self._stack.push_async_callback(view.close)
        await view.start()
        index = KvIndex(config.kv_block_expiry_s)
        asking = await context.endpoint_client(component, KV_BLOCKS_ENDPOINT)
        feed = KvFeed(context.nats, context.kv, context.namespace, component, asking, index, clock)
        self._stack.push_async_callback(feed.close)
        await feed.start()
        await feed.synced(FIRST_VIEW_TIMEOUT_S)
        self._index, self._feed, self._settings = index, feed, settings
        self._maker = RouteDecisions(
            await context.endpoint_client(component, "generate"),
            lambda ids: samples(view, clock, ids),
            index,
            lambda: feed.block_sizes,
            lambda: settings.current,
            seed=config.router_seed,
            clock=clock,
            costs=usable_costs(config),
        )

    @endpoint()
    async def generate(self, request: RouteRequest) -> dict[str, Any]:
        """Token ids in; the worker and its prefix hit rate out (`components.messages`: route request, route answer)."""
        answer: dict[str, Any] = msgspec.to_builtins(self._maker.route(parse_route_request(request)))
        return answer

    @endpoint()
    async def status(self, request: None = None) -> dict[str, Any]:
        """This Router's view: the current policy, and how many blocks each worker has, by instance id in hex."""
        return {
            "router": self._settings.current.router,
            "workers": {f"{worker:x}": self._index.count(worker) for worker in sorted(self._feed.workers())},
            "blocks": len(self._index),
            "index_errors": self._maker.index_errors,
        }

    @on_shutdown
    async def stop(self) -> None:
        """End the watches."""
        await self._stack.aclose()
