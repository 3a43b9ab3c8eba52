"""The endpoints that a worker serves on NATS: the component's own, and one for its load."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from types import NoneType
from typing import Any

from dynamo_local.core.types import Load, instance_key
from dynamo_local.errors import InvalidRequest
from dynamo_local.runtime.discovery import instance_to_value, make_instance, subject_for
from dynamo_local.runtime.requests import EndpointServer, Handler, RequestContext
from dynamo_local.runtime.requests.frames import decoder_of
from dynamo_local.sdk.service import DynamoService
from dynamo_local.system.together import together
from dynamo_local.worker.context import Context, Identity

log = logging.getLogger("dynamo_local.worker")

LOAD_ENDPOINT = "load_metrics"
IDLE_LOG_EVERY_S = 60.0


class Endpoints:
    """Each endpoint is served on a subject of its own, whose name has the worker's lease in it."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._servers: list[EndpointServer] = []

    async def serve(
        self, context: Context, service: DynamoService[Any], component: Any, load: Callable[[], Load]
    ) -> None:
        """Take requests from now on, for the methods of `component` and, if it reports its load, for that.

        Raises `NatsUnavailable`. What is started here is closed by `context`'s stack.
        """
        handlers = {name: getattr(component, declared.method) for name, declared in service.endpoints.items()}
        if service.endpoints and context.load_source is not None:
            handlers.setdefault(LOAD_ENDPOINT, partial(_tell_load, load))
        models: dict[str, Any] = {name: NoneType for name in handlers}
        models |= {name: service.request_model(name) for name in service.endpoints}
        for name, (handler, model) in context.more_endpoints.items():
            handlers[name], models[name] = handler, model
        for name, handler in handlers.items():
            server = EndpointServer(
                context.nats,
                subject=self._subject(name, context.lease_id),
                handler=adapted(handler, models[name]),
                name=name,
                decode=decoder_of(models[name]),
            )
            context.close_with_worker(server.close)
            self._servers.append(server)
        await together(*(server.start() for server in self._servers))

    async def rebind(self, lease_id: int) -> None:
        """Serve the subjects of a new lease instead."""
        for server in self._servers:
            await server.rebind(self._subject(server.name, lease_id))

    def stop_accepting(self, linger_s: float) -> None:
        """Serve what comes within `linger_s`; refuse what comes later."""
        for server in self._servers:
            server.stop_accepting(linger_s)

    def resume_accepting(self) -> None:
        """The drain was taken back."""
        for server in self._servers:
            server.resume_accepting()

    def until_idle(self) -> list[Callable[[], Awaitable[None]]]:
        """For each endpoint, a function that returns once its requests have ended."""
        return [partial(_until_idle, server) for server in self._servers]

    @property
    def in_flight(self) -> int:
        """Requests whose caller does not have the whole answer yet, over all endpoints."""
        return sum(server.in_flight for server in self._servers)

    def in_flight_ids(self) -> list[str]:
        """Their request ids."""
        return [request_id for server in self._servers for request_id in server.in_flight_ids()]

    def keys(self, lease_id: int) -> list[str]:
        """The etcd keys that register the endpoints under a lease."""
        return [self._key(server.name, lease_id) for server in self._servers]

    def registrations(self) -> list[tuple[Callable[[int], str], Callable[[int], bytes]]]:
        """For each endpoint, its key and its value in etcd, as functions of the lease."""
        return [(partial(self._key, server.name), partial(self._value, server.name)) for server in self._servers]

    def _key(self, endpoint: str, lease_id: int) -> str:
        return instance_key(self._identity.namespace, self._identity.component, endpoint, lease_id)

    def _value(self, endpoint: str, lease_id: int) -> bytes:
        identity = self._identity
        return instance_to_value(make_instance(identity.namespace, identity.component, endpoint, lease_id))

    def _subject(self, endpoint: str, lease_id: int) -> str:
        return subject_for(self._identity.namespace, self._identity.component, endpoint, lease_id)


async def _tell_load(load: Callable[[], Load], _request: Any) -> dict[str, float | None]:
    return load().numbers()


def adapted(handler: Callable[..., Any], model: Any) -> Handler:
    """Endpoints take the request alone, as Dynamo's do, as the model with which they annotate it: a pydantic one is
    made here, a msgspec one comes from the wire."""
    if not hasattr(model, "model_validate"):
        return lambda payload, _context: handler(payload)

    def validated(payload: Any, _context: RequestContext) -> Any:
        try:
            request = model.model_validate(payload)
        except ValueError as error:
            raise InvalidRequest(f"the request is no {model.__name__}: {error}") from None
        return handler(request)

    return validated


async def _until_idle(server: EndpointServer) -> None:
    while not await server.wait_idle(IDLE_LOG_EVERY_S):
        log.info("%s: %d requests left", server.name, server.in_flight)
