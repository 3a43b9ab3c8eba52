"""The caller's side of a process: one response port, one inbox, one client per endpoint."""

from __future__ import annotations

import asyncio
from typing import Final

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.ports import KeyValueStore
from dynamo_local.system.request_log import unbound
from dynamo_local.transport.discovery import InstanceView
from dynamo_local.transport.nats_client import Client
from dynamo_local.transport.requests.calls import ACCEPT_TIMEOUT_S, RequestSender
from dynamo_local.transport.requests.client import NatsEndpointClient

VIEW_START_TIMEOUT_S: Final = 10.0


class RequestPlane:
    """Makes endpoint clients that share a response port. One per process and NATS connection.

    plane = RequestPlane(nats)
    await plane.start()
    client = await plane.client(kv, "dynamo", "VllmWorker", "generate")
    stream = await client.call({"prompt": …})
    """

    def __init__(self, nats: Client, clock: Clock | None = None, *, accept_timeout_s: float = ACCEPT_TIMEOUT_S) -> None:
        self.sender = RequestSender(nats, clock or AsyncioClock(), accept_timeout_s)
        self._clients: dict[tuple[str, str, str], NatsEndpointClient] = {}
        self._making = asyncio.Lock()

    async def start(self) -> None:
        """Raises `NatsUnavailable`."""
        await self.sender.start()

    async def client(self, kv: KeyValueStore, namespace: str, component: str, endpoint: str) -> NatsEndpointClient:
        """The client of that endpoint, made at the first call. The client follows etcd from then on.

        Where etcd does not give the first list in time the client is empty until it does: calls raise `NoWorkers`.
        """
        key = (namespace, component, endpoint)
        async with self._making:
            if key not in self._clients:
                view = InstanceView(kv, namespace, component, endpoint)
                try:
                    with unbound():  # the watch outlives the request that starts it
                        await view.start(VIEW_START_TIMEOUT_S)
                except BaseException:  # cancelled: leave no watch behind
                    await view.close()
                    raise
                self._clients[key] = NatsEndpointClient(self.sender, view, component, endpoint)
            return self._clients[key]

    async def close(self) -> None:
        """Close clients, the port and the inbox; open streams end with `RequestCancelled`."""
        for client in self._clients.values():
            await client.close()
        self._clients.clear()
        await self.sender.close()
