"""One worker's control endpoint, on NATS subject `{ns}.control.{watcher_name}`.

Request and answer are JSON: `{"op": "drain", "args": {"reason": "…"}}`, answered by `{"result": {…}}` or by
`{"error": {"code", "message", "details"}}` (`errors.to_wire`). Core NATS is used, not a queue. Without a
listener the server refuses a message at once ("no responders"). So a command never reaches a later process of that
name.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dynamo_local.errors import (
    DeadlineExceeded,
    DynamoError,
    InvalidRequest,
    NatsUnavailable,
    NoWorkers,
    RemoteError,
    from_wire,
    to_wire,
)
from dynamo_local.transport.nats import nats_call, subscribe, unsubscribe
from dynamo_local.transport.nats_client import Client, Msg, NatsError, NoRespondersError, Subscription

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 1.0
"""How long `close` waits for answers that are under way."""

MAX_REQUEST_BYTES = 64 * 1024
MAX_ANSWERING = 256
"""Requests at once. The arbiter sends a handful. A caller without an answer asks again."""

Op = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""One operation: the arguments in, the answer out. A `DynamoError` it raises is the answer, typed."""


def control_subject(namespace: str, watcher_name: str) -> str:
    """`dynamo.control.dynamo_VllmWorker_1`."""
    return f"{namespace}.control.{watcher_name}"


class ControlServer:
    """Answers one worker's operations. Each runs as a task of its own: a long one does not hold up a `status`."""

    def __init__(self, nats: Client, namespace: str, watcher_name: str, ops: Mapping[str, Op]) -> None:
        self._nats = nats
        self._subject = control_subject(namespace, watcher_name)
        self._ops = ops
        self._subscription: Subscription | None = None
        self._answering: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises `NatsUnavailable`. Survives reconnects of the NATS client."""
        self._subscription = await subscribe(self._nats, self._subject, self._on_message, f"serve {self._subject}")

    async def close(self) -> None:
        """Take no more requests; wait, within a bound, for answers that are under way."""
        subscription, self._subscription = self._subscription, None
        try:
            await unsubscribe(self._nats, subscription)
        except NatsError as error:
            log.info("the control subscription ended with its connection: %s", error)
        if self._answering:
            _, late = await asyncio.wait(tuple(self._answering), timeout=CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    async def _on_message(self, message: Msg) -> None:
        if len(self._answering) >= MAX_ANSWERING:
            log.warning("%s: a request is not answered, %d are already being answered", self._subject, MAX_ANSWERING)
            return
        task = asyncio.create_task(self._answer(message), name=f"control {self._subject}")
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, message: Msg) -> None:
        answer: dict[str, Any]
        try:
            op, args = self._parse(message.data)
            answer = {"result": dict(await op(args))}
        except DynamoError as error:
            answer = {"error": to_wire(error)}
        except Exception as error:  # a bug of ours: tell the caller, and go on
            log.exception("a control request on %s failed", self._subject)
            answer = {"error": to_wire(error)}
        if not message.reply:
            return
        try:
            with nats_call(self._nats, f"answer on {self._subject}"):
                await self._nats.publish(message.reply, json.dumps(answer, default=str).encode())
        except NatsUnavailable as error:
            log.warning("%s", error)

    def _parse(self, data: bytes) -> tuple[Op, Mapping[str, Any]]:
        if len(data) > MAX_REQUEST_BYTES:
            raise InvalidRequest(f"a control request has {MAX_REQUEST_BYTES} bytes at most, not {len(data)}")
        try:
            request = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the control request is not JSON: {error}") from None
        name = request.get("op") if isinstance(request, dict) else None
        op = self._ops.get(name) if isinstance(name, str) else None
        if op is None:
            raise InvalidRequest(f"unknown operation {repr(name)[:80]}; there are: {', '.join(self._ops)}", param="op")
        args = request.get("args") or {}
        if not isinstance(args, dict):
            raise InvalidRequest("args must be a JSON object", param="args")
        return op, args


class ControlClient:
    """Asks any worker of a namespace. One client serves any number of calls at once."""

    def __init__(self, nats: Client, namespace: str) -> None:
        self._nats = nats
        self._namespace = namespace

    async def call(self, watcher_name: str, op: str, timeout_s: float = 2.0, **args: Any) -> dict[str, Any]:
        """The worker's answer.

        Raises `NoWorkers` (no process of that name listens), `DeadlineExceeded` (it listens and did not answer
        within `timeout_s`), or `NatsUnavailable`. Also raises what the worker answered, such as
        `DrainNotCancellable`.
        """
        subject = control_subject(self._namespace, watcher_name)
        data = json.dumps({"op": op, "args": args}).encode()
        with nats_call(self._nats, f"ask {watcher_name} for {op}"):
            try:
                message = await self._nats.request(subject, data, timeout=timeout_s)
            except NoRespondersError:
                raise NoWorkers(f"no process of {watcher_name} answers on {subject}: it is gone, or starting") from None
            except TimeoutError:
                if not self._nats.is_connected:
                    raise
                raise DeadlineExceeded(f"{watcher_name} did not answer {op} within {timeout_s:g} s") from None
        return _result(watcher_name, message.data)


def _result(watcher_name: str, data: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and isinstance(answer.get("result"), dict):
        return dict(answer["result"])
    if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
        raise from_wire(answer["error"])
    raise RemoteError(f"{watcher_name} answered something that is no answer: {data[:200]!r}", type="protocol")
