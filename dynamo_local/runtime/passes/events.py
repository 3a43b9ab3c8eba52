"""Publishes a worker's passes as Dynamo's workers do: each as a message of its own on the event plane (NATS)."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.core.passes import ForwardPass
from dynamo_local.errors import NatsUnavailable
from dynamo_local.runtime.nats_client import Client
from dynamo_local.runtime.nats_errors import nats_call
from dynamo_local.runtime.passes import event_plane
from dynamo_local.runtime.passes.fpm import encode_pass
from dynamo_local.system.cancelling import ended

log = logging.getLogger(__name__)

UNSENT_PASSES = 1024


class PassEvents:
    """`publish` is a recorder's listener. What cannot be sent is lost: the numbers of the passes show it."""

    def __init__(
        self, nats: Client, namespace: str, component: str, worker_id: Callable[[], str], clock: Clock | None = None
    ) -> None:
        self._nats = nats
        self._subject = event_plane.subject(namespace, component)
        self._worker_id = worker_id
        self._clock = clock or AsyncioClock()
        self._publisher_id = secrets.randbits(53)
        self._sequence = 0
        self._unsent: deque[ForwardPass] = deque(maxlen=UNSENT_PASSES)
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._complained = False

    def start(self) -> None:
        """Send what is published from now on."""
        self._task = asyncio.create_task(self._run(), name=f"passes on {self._subject}")

    async def close(self) -> None:
        """Send no more."""
        await ended(self._task)
        self._task = None

    def publish(self, passed: ForwardPass) -> None:
        """Send it soon. Never waits; beyond a thousand unsent the oldest is forgotten."""
        self._unsent.append(passed)
        self._news.set()

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._unsent:
                await self._send(self._unsent.popleft())

    async def _send(self, passed: ForwardPass) -> None:
        payload = encode_pass(passed, self._worker_id())
        message = event_plane.seal(
            payload, publisher_id=self._publisher_id, sequence=self._sequence, wall_s=self._clock.wall_s()
        )
        self._sequence += 1
        try:
            with nats_call(self._nats, "publish a forward pass"):
                await self._nats.publish(self._subject, message)
            self._complained = False
        except NatsUnavailable as error:
            log.log(logging.DEBUG if self._complained else logging.WARNING, "%s", error)
            self._complained = True
