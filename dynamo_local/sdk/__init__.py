"""How a user declares a graph: classes with `@service`, methods with `@endpoint`, `depends`, `link`.

@service(dynamo={"namespace": "dynamo"}, resources={"gpu": 1}, workers=2)
class VllmWorker:
    prefill = depends(PrefillWorker, optional=True)

    @endpoint()
    async def generate(self, request): ...

Frontend.link(Processor).link(VllmWorker)
"""

from __future__ import annotations

from typing import Any

from dynamo_local.sdk.service import (
    Dependency,
    DynamoService,
    EndpointDecl,
    async_on_start,
    bind_dependencies,
    depends,
    dynamo_endpoint,
    endpoint,
    on_shutdown,
    reset_links,
    service,
)
from dynamo_local.sdk.service_config import ServiceConfig

async_on_shutdown = on_shutdown
"""Dynamo's later spelling."""

dynamo_context: dict[str, Any] = {}
"""Filled by the worker's entry point before the class is instantiated, under Dynamo's keys: `runtime`,
`component`, `endpoints`, `namespace`, `service_name`, `lease`, …"""

__all__ = [
    "Dependency",
    "DynamoService",
    "EndpointDecl",
    "ServiceConfig",
    "async_on_shutdown",
    "async_on_start",
    "bind_dependencies",
    "depends",
    "dynamo_context",
    "dynamo_endpoint",
    "endpoint",
    "on_shutdown",
    "reset_links",
    "service",
]
