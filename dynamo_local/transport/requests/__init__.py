"""Requests between components: over NATS there, over a loopback TCP connection back. See `frames` for the wire."""

from dynamo_local.transport.requests.client import DependencyClient, NatsEndpointClient
from dynamo_local.transport.requests.handlers import Handler, RequestContext, current_request
from dynamo_local.transport.requests.plane import RequestPlane
from dynamo_local.transport.requests.server import EndpointServer
from dynamo_local.transport.requests.stream import ResponseStream

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
