"""A worker's lease in etcd, and the keys that it holds there: from the grant until it is given back.

1. The lease is granted. The first key has the worker's name, and shows which lease to revoke.
2. The endpoints' keys follow, those of colocated components among them.
3. The components' own keys follow.
4. The ready key comes last. The arbiter waits for it.
5. A drain revokes the lease, and all keys go with it.
6. If the drain is taken back, a new lease holds the same keys.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import NoneType
from typing import Any, Protocol

from dynamo_local.core.types import Load, instance_key, lease_hex, lease_key, ready_key
from dynamo_local.errors import EtcdUnavailable, InvalidRequest
from dynamo_local.ports import KeyValueStore
from dynamo_local.sdk.context import COLOCATED
from dynamo_local.sdk.service import DynamoService
from dynamo_local.system.executors import together
from dynamo_local.system.unread import LOOK_EVERY_S
from dynamo_local.transport.discovery import instance_to_value, make_instance, subject_for
from dynamo_local.transport.lease import LeaseKeeper
from dynamo_local.transport.requests.frames import decoder_of
from dynamo_local.transport.requests.handlers import Handler, RequestContext
from dynamo_local.transport.requests.server import EndpointServer
from dynamo_local.worker.context import Context, Identity

# The endpoints that a worker serves on NATS: the component's own, and one for its load.

log = logging.getLogger("dynamo_local.worker")

LOAD_ENDPOINT = "load_metrics"
IDLE_LOG_EVERY_LOOKS = 60


class Endpoints:
    """Each endpoint is served on a subject of its own, whose name has the worker's lease in it."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._served: list[tuple[str, EndpointServer]] = []
        """Component and server: those of colocated components are under the same lease."""

    async def serve(
        self, context: Context, service: DynamoService[Any], component: Any, load: Callable[[], Load]
    ) -> None:
        """Take requests for the methods of `component`, and for its load if it reports one.

        Raises `NatsUnavailable`. The stack of `context` closes these endpoints.
        """
        handlers = {name: getattr(component, declared.method) for name, declared in service.endpoints.items()}
        if service.endpoints and context.load_source is not None:
            handlers.setdefault(LOAD_ENDPOINT, partial(_tell_load, load))
        models: dict[str, Any] = {name: NoneType for name in handlers}
        models |= {name: service.request_model(name) for name in service.endpoints}
        for name, (handler, model) in context.more_endpoints.items():
            handlers[name], models[name] = handler, model
        await self._start(
            context,
            self._identity.component,
            {name: (adapted(handlers[name], models[name]), models[name]) for name in handlers},
        )

    async def serve_colocated(self, context: Context, service: DynamoService[Any], component: Any) -> None:
        """The same for a component that runs in this process: others find it in etcd, and call it over NATS."""
        models = {name: service.request_model(name) for name in service.endpoints}
        handlers = {name: getattr(component, declared.method) for name, declared in service.endpoints.items()}
        served = {name: (_within(context, adapted(handlers[name], model)), model) for name, model in models.items()}
        await self._start(context, service.name, served)

    async def _start(self, context: Context, component: str, handlers: Mapping[str, tuple[Handler, Any]]) -> None:
        servers = []
        for name, (handler, model) in handlers.items():
            subject = self._subject(component, name, context.lease_id)
            decode = decoder_of(model)
            server = EndpointServer(context.nats, subject=subject, handler=handler, name=name, decode=decode)
            context.close_with_worker(server.close)
            servers.append(server)
        self._served += [(component, server) for server in servers]
        await together(*(server.start() for server in servers))

    async def rebind(self, lease_id: int) -> None:
        """Serve the subjects of a new lease instead."""
        for component, server in self._served:
            await server.rebind(self._subject(component, server.name, lease_id))

    def stop_accepting(self, linger_s: float) -> None:
        """Serve what comes within `linger_s`; refuse what comes later."""
        for _component, server in self._served:
            server.stop_accepting(linger_s)

    def resume_accepting(self) -> None:
        """The drain was taken back."""
        for _component, server in self._served:
            server.resume_accepting()

    def until_idle(self) -> list[Callable[[], Awaitable[None]]]:
        """For each endpoint, a function that returns once its requests have ended, or nobody reads their answers."""
        return [partial(_until_idle, server, self._identity.unread_bound_s) for _component, server in self._served]

    @property
    def in_flight(self) -> int:
        """Requests whose caller does not have the whole answer yet, over all endpoints."""
        return sum(server.in_flight for _component, server in self._served)

    def in_flight_ids(self) -> list[str]:
        """Their request ids."""
        return [request_id for _component, server in self._served for request_id in server.in_flight_ids()]

    def unread_s(self) -> list[float]:
        """For how long each answer that waits for its reader has done so."""
        return [seconds for _component, server in self._served for seconds in server.unread_s()]

    @property
    def abandoned(self) -> int:
        """Answers that were ended because nobody read them."""
        return sum(server.abandoned for _component, server in self._served)

    def keys(self, lease_id: int) -> list[str]:
        """The etcd keys that register the endpoints under a lease."""
        return [self._key(component, server.name, lease_id) for component, server in self._served]

    def registrations(self) -> list[tuple[Callable[[int], str], Callable[[int], bytes]]]:
        """For each endpoint, its key and its value in etcd, as functions of the lease."""
        return [
            (partial(self._key, component, server.name), partial(self._value, component, server.name))
            for component, server in self._served
        ]

    def _key(self, component: str, endpoint: str, lease_id: int) -> str:
        return instance_key(self._identity.namespace, component, endpoint, lease_id)

    def _value(self, component: str, endpoint: str, lease_id: int) -> bytes:
        return instance_to_value(make_instance(self._identity.namespace, component, endpoint, lease_id))

    def _subject(self, component: str, endpoint: str, lease_id: int) -> str:
        return subject_for(self._identity.namespace, component, endpoint, lease_id)


def _within(context: Context, handler: Handler) -> Handler:
    """The handler, in the context of its colocated component. A request has a task, and so a set of variables."""

    def bound(payload: Any, request: RequestContext) -> Any:
        COLOCATED.set(context)
        return handler(payload, request)

    return bound


async def _tell_load(load: Callable[[], Load], _request: Any) -> dict[str, float | None]:
    return load().numbers()


def adapted(handler: Callable[..., Any], model: Any) -> Handler:
    """A `Handler` for an endpoint, which takes the request alone, as its annotated model.

    A pydantic model is made here. A msgspec model comes from the wire.
    """
    if not hasattr(model, "model_validate"):
        return lambda payload, _context: handler(payload)

    def validated(payload: Any, _context: RequestContext) -> Any:
        try:
            request = model.model_validate(payload)
        except ValueError as error:
            raise InvalidRequest(f"the request is no {model.__name__}: {error}") from None
        return handler(request)

    return validated


async def _until_idle(server: EndpointServer, unread_bound_s: float) -> None:
    looks = 0
    while not await server.wait_idle(LOOK_EVERY_S):
        server.end_unread(unread_bound_s)
        looks += 1
        if looks % IDLE_LOG_EVERY_LOOKS == 0:
            log.info("%s: %d requests left", server.name, server.in_flight)


REVOKE_TIMEOUT_S = 5.0
RESUME_TIMEOUT_S = 5.0


class Touch(Protocol):
    """`EntryWriter.touch`, called when the statefile's entry is out of date."""

    def __call__(self, *, resumed: bool | None = None) -> None: ...


class Registration:
    """The worker's keys in etcd. `on_change` is called after each change.

    `facts`: go into the value of the ready key. `on_revoked`: called after somebody revoked the lease. `serves`:
    whether the worker is ready and not draining.
    """

    def __init__(
        self,
        identity: Identity,
        endpoints: Endpoints,
        *,
        facts: Callable[[], Mapping[str, Any]],
        on_change: Touch,
        on_revoked: Callable[[], None],
        serves: Callable[[], bool],
    ) -> None:
        self._identity = identity
        self._endpoints = endpoints
        self._facts = facts
        self._on_change = on_change
        self._on_revoked = on_revoked
        self._serves = serves
        self._lease: LeaseKeeper | None = None
        self._given_back = False
        self._watch: asyncio.Task[None] | None = None
        self._lease_key = partial(lease_key, identity.namespace, identity.watcher_name)
        self.ready = False
        """All keys of a ready worker are in etcd, as far as we know."""
        self._was_ready = False

    # --- what one may ask ------------------------------------------------------------------------

    @property
    def lease(self) -> LeaseKeeper | None:
        """None before `take_lease`."""
        return self._lease

    @property
    def revoked(self) -> bool:
        """Somebody has revoked the lease."""
        return self._lease is not None and self._lease.revoked.is_set()

    @property
    def holds_lease(self) -> bool:
        """A lease was granted and has not been given back."""
        return self._lease is not None and bool(self._lease.lease_id) and not self._given_back

    def held_lease(self) -> str | None:
        """The lease in hex; None before it is granted, and once it was given back."""
        return lease_hex(self._lease.lease_id) if self._lease is not None and self.holds_lease else None

    def endpoint_keys(self) -> tuple[str, ...]:
        """The endpoint keys that are registered now."""
        if self._lease is None or not self.holds_lease or not self.ready:
            return ()
        return tuple(self._endpoints.keys(self._lease.lease_id))

    # --- coming ------------------------------------------------------------------------------------

    async def take_lease(self, kv: KeyValueStore, is_draining: Callable[[], Awaitable[bool]]) -> LeaseKeeper:
        """Grant the lease, keep it alive, and put its first key. Raises `EtcdUnavailable`, `LeaseNotFound`."""
        identity = self._identity
        self._lease = lease = LeaseKeeper(
            kv, ttl_s=identity.lease_ttl_s, is_draining=is_draining, on_regrant=self._on_regrant
        )
        await lease.start()
        self._follow()
        # The first key is watched, so a revoke is seen at once even during a long start. The key's name contains the
        # worker's name, so that a person finds the lease to revoke.
        about = json.dumps({"pid": os.getpid(), "run_id": identity.run_id}).encode()
        await lease.register(self._lease_key, lambda _lease: about)
        self._on_change()
        return lease

    async def register_endpoints(self) -> None:
        """Register the endpoints. Requests may come at once. Raises as `LeaseKeeper.register`."""
        assert self._lease is not None
        await self._lease.register_all(self._endpoints.registrations())

    async def register_ready(self, flush: Callable[[], Awaitable[object]]) -> None:
        """Put the last key after `flush`: the endpoints are in the statefile before the worker is seen as ready."""
        assert self._lease is not None
        self.ready = self._was_ready = True
        self._on_change()
        await flush()
        await self._lease.register(self._ready_key, self._ready_value)

    def _ready_key(self, lease_id: int) -> str:
        return ready_key(self._identity.namespace, self._identity.watcher_name, lease_id)

    def _ready_value(self, lease_id: int) -> bytes:
        about = {"pid": os.getpid(), "endpoints": self._endpoints.keys(lease_id) if self.ready else [], **self._facts()}
        return json.dumps(about).encode()

    # --- standby -----------------------------------------------------------------------------------

    async def withdraw(self) -> None:
        """All keys but those of the worker itself are gone: nobody sends it anything. Raises as `LeaseKeeper`'s."""
        assert self._lease is not None
        self.ready = False
        self._on_change(resumed=False)
        await self._lease.withdraw((self._lease_key, self._ready_key))

    async def come_back(self) -> None:
        """Put all keys again. Raises as `LeaseKeeper.restore`."""
        assert self._lease is not None
        await self._lease.restore()
        self.ready = True
        self._on_change()

    async def tell(self) -> None:
        """Put the ready key as it should be now. Raises as `LeaseKeeper.register`."""
        assert self._lease is not None
        await self._lease.put_again(self._ready_key)

    # --- going, and coming back ----------------------------------------------------------------------

    async def deregister(self) -> None:
        """Return when no key of ours is in etcd any more; tried for ever. May be cancelled."""
        self.ready = False
        self._on_change(resumed=False)
        while True:
            try:
                await self.give_back(REVOKE_TIMEOUT_S)
            except EtcdUnavailable as error:
                log.warning("the lease cannot be revoked, trying again: %s", error)
            else:
                return

    async def give_back(self, timeout_s: float) -> None:
        """Return once etcd has none of our keys. Raises `EtcdUnavailable`; then the lease expires later."""
        assert self._lease is not None
        await self._lease.revoke(timeout_s)
        self._given_back, self.ready = True, False
        self._on_change()

    async def give_back_failed(self, timeout_s: float, why: str) -> None:
        """Record a failure with its reason, then give the lease back.

        Without the record, the arbiter would take this for a drain and not start the worker again. (The exit came 15 ms
        after the end of the key.)
        """
        assert self._lease is not None
        if self._was_ready and self.holds_lease:
            failed = json.dumps({"pid": os.getpid(), "failed": True, "why": why}).encode()
            await self._lease.register(self._ready_key, lambda _lease: failed, timeout_s)
        await self.give_back(timeout_s)

    async def restore(self) -> None:
        """Take a new lease and put all keys under it. Raises `EtcdUnavailable`."""
        assert self._lease is not None
        # The drain may have been stopped halfway: remove the old keys, whose subjects nobody serves.
        await self.give_back(RESUME_TIMEOUT_S)
        await self._lease.reinstate(RESUME_TIMEOUT_S)
        self._given_back, self.ready = False, True
        self._on_change(resumed=True)
        self._follow()

    async def close(self) -> None:
        """Stop watching and keeping the lease alive; if it was not given back it expires by itself."""
        self.unfollow()
        if self._watch is not None:
            await asyncio.wait({self._watch})
        if self._lease is not None:
            await self._lease.close()

    # --- the lease ---------------------------------------------------------------------------------

    def unfollow(self) -> None:
        """That the lease was revoked is told nobody, until `restore` has taken another one."""
        if self._watch is not None:
            self._watch.cancel()

    def _follow(self) -> None:
        self.unfollow()
        self._watch = asyncio.create_task(self._until_revoked(), name="lease watch")

    async def _until_revoked(self) -> None:
        assert self._lease is not None
        await self._lease.revoked.wait()
        self._on_revoked()

    async def _on_regrant(self, lease_id: int) -> None:
        """There is a new lease. Serve its subjects before its keys are put."""
        if self._serves():
            log.warning("etcd lost the lease; registering again under %s", lease_hex(lease_id))
        await self._endpoints.rebind(lease_id)
        self._on_change()
