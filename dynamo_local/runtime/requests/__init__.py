"""Requests between components: over NATS there, over a loopback TCP connection back. See `frames` for the wire."""

from dynamo_local.runtime.requests.client import NatsEndpointClient
from dynamo_local.runtime.requests.context import RequestContext, current_request
from dynamo_local.runtime.requests.dependency import DependencyClient
from dynamo_local.runtime.requests.handlers import Handler
from dynamo_local.runtime.requests.plane import RequestPlane
from dynamo_local.runtime.requests.server import EndpointServer
from dynamo_local.runtime.requests.stream import ResponseStream

__all__ = [
    "DependencyClient",
    "EndpointServer",
    "Handler",
    "NatsEndpointClient",
    "RequestContext",
    "RequestPlane",
    "ResponseStream",
    "current_request",
]
