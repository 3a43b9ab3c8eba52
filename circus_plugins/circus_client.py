"""A client of a stock circusd that concurrent callers may share.

circus's own `AsyncCircusClient` hangs with two concurrent calls and ignores its timeout. Here each call has an id and a
deadline, and a command that a busy circusd refuses is tried again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import uuid
from typing import Any

import zmq
import zmq.asyncio

from dynamo_local.errors import DynamoError

log = logging.getLogger(__name__)

REPLY_TIMEOUT_S = 30.0
"""circusd answers in milliseconds. `stats` of a large one stops its loop for seconds."""
RETRY_FIRST_S = 0.005
RETRY_MAX_S = 0.25
_BUSY = ("arbiter is already running", "arbiter is restarting")


class CircusdError(DynamoError):
    """circusd refused a command. The message has its words."""

    code = "circusd"


class CircusdBusy(CircusdError):
    """circusd runs one command at a time and refuses others meanwhile, for as long as a slow stop takes."""

    code = "circusd_busy"


class CircusdSilent(CircusdError):
    """circusd does not answer: it is gone, or stuck."""

    code = "circusd_silent"


class CircusClient:
    """Commands to the circusd at `endpoint`. Use inside of one running loop; `close` ends all calls."""

    def __init__(self, endpoint: str, *, reply_timeout_s: float = REPLY_TIMEOUT_S) -> None:
        self.endpoint = endpoint
        self._reply_timeout_s = reply_timeout_s
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(endpoint)
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._slot = asyncio.Lock()
        self._reader = asyncio.ensure_future(self._read())

    async def call(self, command: str, **properties: Any) -> dict[str, Any]:
        """The reply. Raises `CircusdBusy`, `CircusdSilent`, or `CircusdError` for any other refusal."""
        call_id = uuid.uuid4().hex
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        message = {"id": call_id, "command": command, "properties": properties}
        try:
            async with asyncio.timeout(self._reply_timeout_s):
                await self._socket.send(json.dumps(message).encode())
                reply = await future
        except TimeoutError:
            raise CircusdSilent(
                f"circusd at {self.endpoint} did not answer {command!r} within {self._reply_timeout_s:g} s"
            ) from None
        finally:
            del self._waiting[call_id]
        if reply.get("status") == "ok":
            return reply
        reason = str(reply.get("reason"))
        busy = any(word in reason for word in _BUSY)
        raise (CircusdBusy if busy else CircusdError)(f"circusd refused {command!r}: {reason}")

    async def exclusive(self, command: str, *, patience_s: float, **properties: Any) -> dict[str, Any]:
        """Send a command that needs circusd's only slot. Refusals are tried again, with jitter, for `patience_s`
        seconds.

        Our own commands wait for each other here, so circusd does not refuse them. Raises what `call` raises.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + patience_s
        delay_s = RETRY_FIRST_S
        while True:
            try:
                async with self._slot:
                    return await self.call(command, **properties)
            except CircusdBusy:
                if loop.time() + delay_s > deadline_s:
                    raise
            await asyncio.sleep(random.uniform(0.5, 1.0) * delay_s)
            delay_s = min(2 * delay_s, RETRY_MAX_S)

    async def _read(self) -> None:
        while True:
            raw = await self._socket.recv()
            try:
                reply = json.loads(raw)
                future = self._waiting.get(reply["id"])
            except (ValueError, TypeError, KeyError):
                log.warning("circusd sent what is no reply: %r", raw[:200])
                continue
            if future is not None and not future.done():  # its caller has given up
                future.set_result(reply)

    async def close(self) -> None:
        """Close the connection."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        for future in self._waiting.values():
            future.cancel()
        self._socket.close()
        self._context.term()
