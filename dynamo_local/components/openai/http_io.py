"""One HTTP exchange: the body in, the answer out, and noticing that the client went away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from dynamo_local.components.limits import shortened
from dynamo_local.components.openai.errors import ApiError
from dynamo_local.components.openai.responses import error_event

BODY_TIMEOUT_S = 30.0
"""A client that has not sent its body by then gets 408; without a bound it could hold up a drain for ever."""

SEND_TIMEOUT_S = 5.0
"""How long sending an error, or the end of an answer, to a client that does not read may take."""

JSON = "application/json"

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


def require_json(scope: Scope) -> None:
    """Raises `ApiError` 415 unless the client says that it sends JSON.

    A web page in somebody's browser may send any other kind of body to any address without asking first. CORS calls
    it a simple request. It must not be able to start generations.
    """
    given = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1")
    if given.partition(";")[0].strip().lower() != JSON:
        said = f"not {shortened(given)!r}" if given else "and the request has none"
        raise ApiError(415, f"The Content-Type must be {JSON}, {said}.", code="unsupported_media_type")


async def read_body(scope: Scope, receive: Receive, max_bytes: int, take: Callable[[int], None]) -> bytes:
    """The whole body. Raises `ApiError` 413 or 408, what `take` raises for the size of a part, or `ClientGone`.

    uvicorn reads and drops what a client still sends after a 413: closing at once would reset the connection before
    the client has seen the answer.
    """
    declared = dict(scope["headers"]).get(b"content-length", b"")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    connection = connection_of(scope)
    if connection is not None and (whole := connection.body()) is not None:
        if len(whole) > max_bytes:
            raise _too_large(max_bytes)
        take(len(whole))
        return whole
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                take(len(part))
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError as error:
        raise ApiError(
            408,
            f"The request's body did not arrive within {BODY_TIMEOUT_S:g} s.",
            code="request_timeout",
            headers={"Connection": "close"},  # what is missing of the body would be taken for the next request
        ) from error


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"The request's body is larger than {max_bytes} bytes, this Frontend's `max_body_bytes`.",
        code="request_too_large",
    )


class Connection(Protocol):
    """The client's connection, where the server gives it (`http_protocol`): what ASGI's messages would cost a task and
    several calls for each token."""

    def write(self, data: bytes) -> bool:
        """A part of the body. False where it must go the usual way: before the answer's head, or while the client does
        not read."""
        ...

    def on_lost(self, callback: Callable[[], None] | None) -> bool:
        """Call it once the client has left. False where it has already."""
        ...

    def body(self) -> bytes | None:
        """The request's whole body where it has arrived, as a small one has with its head; None: it must be awaited."""
        ...

    def all_sent(self) -> bool:
        """Whether nothing waits here for the client to read it: what is written now is taken at once."""
        ...

    def unread_s(self) -> float | None:
        """For how long the client has taken nothing of what waits for it. None: nothing does."""
        ...

    def cut(self) -> None:
        """Close it now, whatever of the answer is unread."""
        ...


CONNECTION: Final = "dynamo.connection"
"""Its name among the scope's extensions."""


def connection_of(scope: Scope) -> Connection | None:
    """None: another server's."""
    found: Connection | None = scope.get("extensions", {}).get(CONNECTION)
    return found


async def until_disconnect(work: Coroutine[Any, Any, T], receive: Receive, connection: Connection | None = None) -> T:
    """The result of `work`; `ClientGone` if the client leaves first, after `work` was cancelled and has ended."""
    if connection is None:
        return await _beside_receive(work, receive)
    task = asyncio.current_task()
    assert task is not None
    gone = False

    def left() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    if not connection.on_lost(left):
        work.close()
        raise ClientGone
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        connection.on_lost(None)


async def _beside_receive(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`; `ClientGone` if the client leaves first, after `work` was cancelled and has ended.

    Starlette's StreamingResponse would notice at the next write at the earliest, its JSONResponse never; an
    engine would go on computing for nobody.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        gone.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer that is given at once. Without a `content-type` of its own it is JSON."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class Reply:
    """The response of one HTTP exchange."""

    __slots__ = ("_connection", "_send", "_started", "has_content")

    def __init__(self, send: Send, connection: Connection | None = None) -> None:
        self._send = send
        self._connection = connection
        self._started = False
        self.has_content = False
        """Whether the client has got a part of the answer: more than the head and comments."""

    def push(self, data: bytes) -> Awaitable[None] | None:
        """`event` without a task switch: None where it is written, else what is to be awaited before the next one."""
        if self.has_content and self._connection is not None and self._connection.write(data):
            return None
        return self.event(data)

    @property
    def started(self) -> bool:
        """Whether the client has got anything, the head included."""
        return self._started

    async def event(self, data: bytes) -> None:
        """Server-sent events, in one write; the first brings the status line with it."""
        self.has_content = True
        await self.comment(data)

    async def comment(self, data: bytes) -> None:
        """A comment between server-sent events, which clients skip. The answer may still become any other."""
        if not self._started:
            self._started = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # a buffering nginx in between would hold tokens back
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, answer: Whole | None, timeout_s: float) -> None:
        """The whole answer; of a stream of events (None) its end. TimeoutError where the client does not read."""
        if self._connection is not None and self._connection.all_sent():
            await (self.end() if answer is None else self.whole(answer))  # waits for nobody
            return
        async with asyncio.timeout(timeout_s):
            await (self.end() if answer is None else self.whole(answer))

    async def end(self) -> None:
        """The end of a stream of events."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, answer: Whole) -> None:
        """All of it. After a comment it is an event, because the status line has been sent."""
        if self._started:
            await self.event(b"data: %b\n\n" % answer.body)
            await self.end()
            return
        self._started = self.has_content = True
        headers = {"content-type": "application/json", **{name.lower(): v for name, v in answer.headers.items()}}
        headers["content-length"] = str(len(answer.body))
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": answer.status, "headers": raw})
        await self._send({"type": "http.response.body", "body": answer.body, "more_body": False})

    def cut(self) -> None:
        """The client has not read the answer in time: close its connection."""
        if self._connection is not None:
            self._connection.cut()

    async def fail(self, error: ApiError, path: str = "") -> None:
        """The error as the answer of that path; or, in a stream that has begun, as its last event, with no `[DONE]`
        after it.

        Raises TimeoutError where the client does not read.
        """
        async with asyncio.timeout(SEND_TIMEOUT_S):
            if self._started:
                await self.event(error_event(error, path))
                await self.end()
            else:
                await self.whole(Whole(error.status, error.body(path), error.headers))
