"""What Dynamo's workers say on its event plane (NATS), where their metrics do not: how many requests wait in one.

Subjects are `namespace.<ns>.component.<component>.endpoint.<endpoint>.forward-pass-metrics`; a message is msgpack,
`{"publisher_id", "sequence", "published_at", "topic", "payload"}`, and its payload msgpack again. One comes for each
pass of each worker of the component, and one a second from an idle one.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec

from dynamo_local.runtime.nats_errors import nats_call

log = logging.getLogger("dynamo_local.worker")

STALE_S = 3.0
_DECODE = msgspec.msgpack.Decoder()


def queued_prefills(data: bytes) -> tuple[int, int] | None:
    """`(worker id, prefills that wait in it)` of one message; None where it does not say."""
    try:
        payload = _DECODE.decode(data)["payload"]
        facts = _DECODE.decode(bytes(payload))
        return int(facts["worker_id"]), int(facts["queued_requests"]["num_prefill_requests"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None


class ForwardPasses:
    """Follows one worker's messages. `queued` is None until there was one, and once the last is too old."""

    def __init__(self, nats: Any, namespace: str, component: str, worker_id: int) -> None:
        self._nats = nats
        self._subject = f"namespace.{namespace}.component.{component}.endpoint.generate.forward-pass-metrics"
        self._worker_id = worker_id
        self._last: tuple[float, int] | None = None

    async def start(self) -> None:
        """Raises `NatsUnavailable`."""
        with nats_call(self._nats, f"listen on {self._subject}"):
            await self._nats.subscribe(self._subject, cb=self._on_message)

    @property
    def queued(self) -> int | None:
        if self._last is None or time.monotonic() - self._last[0] > STALE_S:
            return None
        return self._last[1]

    async def _on_message(self, message: Any) -> None:
        said = queued_prefills(message.data)
        if said is not None and said[0] == self._worker_id:
            self._last = (time.monotonic(), said[1])
