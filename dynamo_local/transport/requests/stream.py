"""The caller's half of a response: a TCP connection that a worker opened, and the stream read from it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final, cast

from dynamo_local import errors
from dynamo_local.transport.requests.frames import (
    MAX_FRAME_BYTES,
    FrameDecoder,
    FrameKind,
    ItemSequence,
    decode_error,
    frame,
)

Take = Callable[[list[Any]], Awaitable[None] | None]
"""Takes the items that arrived together. A consumer that is full returns an awaitable. The producer waits for it."""

MAX_WAITING: Final = 64
"""Batches that wait for an `async for`; beyond it the producer waits."""

BROKEN_OFF: Final = "connection_lost"
"""`details["reason"]` of a `WorkerLost` after the request was accepted: the worker's process is gone, or its host."""


class Enough(Exception):
    """Raised by a `Take` that wants no more: the stream is closed, and `pump` raises this."""


async def pump(stream: Any, take: Take) -> None:
    """Give `take` all items until the stream's end. Raises what the stream ended with, or what `take` raised.

    A stream with a `pump` of its own calls `take` in the callback in which items arrive. An `async for` costs a task
    switch per frame and a resumption in each generator on the way; with five generators that was half of a token's
    cost. Any other stream is iterated. The caller closes the stream.
    """
    own = getattr(stream, "pump", None)
    if own is not None:
        await own(take)
        return
    async for item in stream:
        if (catch_up := take([item])) is not None:
            await catch_up


async def batches_of(pumping: Callable[[Take], Coroutine[Any, Any, None]]) -> AsyncGenerator[list[Any], None]:
    """`async for` over what is pumped. It costs a task per stream, so it stands at the edges only."""
    waiting: deque[list[Any]] = deque()
    changed, free = asyncio.Event(), asyncio.Event()

    def take(batch: list[Any]) -> Awaitable[None] | None:
        waiting.append(batch)
        changed.set()
        if len(waiting) < MAX_WAITING:
            return None
        free.clear()
        return cast(Awaitable[None], free.wait())

    task = asyncio.create_task(pumping(take))
    task.add_done_callback(lambda _: changed.set())
    try:
        while waiting or not task.done():
            if waiting:
                free.set()
                yield waiting.popleft()
            else:
                changed.clear()
                await changed.wait()
        task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


READ_AHEAD_BYTES: Final = 128 * 1024
"""Unread data above this stops the socket from being read; TCP then holds the worker back."""

HELLO_MAX_BYTES: Final = 64
"""How much a connection may send before its token was accepted."""

Greet = Callable[["InboundStream", bytes], None]
"""Called once with the token that a new connection presents."""

OnKept = Callable[["InboundStream", asyncio.Transport], None]
"""Takes over the connection of an answer that has ended, on which its worker takes another request."""


class InboundStream(asyncio.Protocol):
    """One connection from a worker: first a token, then the frames of a response.

    Everything runs in the event loop's callbacks, so a token costs no task switch until somebody reads it.
    """

    def __init__(self, greet: Greet, on_closed: Callable[[InboundStream], None], on_kept: OnKept | None = None) -> None:
        self._greet: Greet | None = greet
        self._on_kept = on_kept
        self._on_closed = on_closed
        self._decoder = FrameDecoder(HELLO_MAX_BYTES)
        self._sequence = ItemSequence()
        self._batches: deque[list[Any]] = deque()
        self._unread_bytes = 0
        self._paused = False
        self._finished = False
        self._error: errors.DynamoError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._taker: _Taker | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._who = "a worker"
        self.subject = ""
        """The subject of the endpoint that answers."""
        self.refusal: errors.DynamoError | None = None
        """With what a worker that was asked again has refused."""
        self.taken: asyncio.Future[bool] | None = None
        """Where a worker was asked again: whether it has taken the request. False: it has refused, or is gone."""
        self.loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self.loop.create_future()
        self.transport: asyncio.Transport | None = None

    # --- the socket's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports have the methods of asyncio.Transport without deriving from it.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._finished:
            return
        self._unread_bytes += len(data)
        try:
            for kind, number, body in self._decoder.feed(data):
                self._take(kind, number, body)
        except errors.DynamoError as error:
            self.finish(error)
            return
        if self._unread_bytes > READ_AHEAD_BYTES and self._batches and not self._paused:
            self._pause()

    def _take(self, kind: int, number: int, body: bytes | memoryview) -> None:
        if self._finished:
            return
        if self._greet is not None:
            greet, self._greet = self._greet, None
            if kind != FrameKind.HELLO:
                raise errors.StreamGap("a connection did not start with its token")
            self._unread_bytes = 0
            self._decoder.max_frame_bytes = MAX_FRAME_BYTES
            greet(self, bytes(body))
        elif kind == FrameKind.DATA:
            self._batches.append(self._sequence.data(number, body))
            self._is_taken()
            self._wake()
        elif kind == FrameKind.END or kind == FrameKind.END_KEPT:
            self._sequence.end(number)
            self._is_taken()
            self._finish(None, keep=kind == FrameKind.END_KEPT)
        elif kind == FrameKind.ERROR:
            error = decode_error(body)
            if self.taken is not None and not self.taken.done():
                self.refusal = error
            self.finish(error)
        elif kind == FrameKind.TAKEN and self.taken is not None:
            self._is_taken()
        else:
            raise errors.StreamGap(f"a frame of unknown kind {kind} from {self._who}: mixed versions?")

    def _is_taken(self) -> None:
        if self.taken is not None and not self.taken.done():
            self.taken.set_result(True)

    def connection_lost(self, exc: Exception | None) -> None:
        reason = f": {exc}" if exc else ""
        self.finish(
            errors.WorkerLost(
                f"the connection to {self._who} closed after {self._sequence.received} items, before the end of the "
                f"stream{reason}; the worker is gone, send the request again",
                reason=BROKEN_OFF,
            )
        )
        self._is_closed()

    def _is_closed(self) -> None:
        self.closed.set_result(None)
        self._on_closed(self)

    # --- the listener's side ---

    def accept(self, who: str, payload: bytes) -> None:
        """The token was good: tell the worker to go on. `who` names the worker in errors."""
        assert self.transport is not None
        self._who = who
        self.transport.write(frame(FrameKind.GO, 0, payload))

    def ask(self, transport: asyncio.Transport, subject: str, who: str, header: bytes) -> None:
        """Ask a worker again, on the connection of a former answer; `taken` says what came of it."""
        self._greet = None
        self._decoder.max_frame_bytes = MAX_FRAME_BYTES
        self._who, self.subject, self.transport = who, subject, transport
        self.taken = self.loop.create_future()
        transport.set_protocol(self)
        transport.write(frame(FrameKind.ASK, 0, header))

    def give_up(self, why: errors.DynamoError) -> None:
        """Wait no longer for the worker that was asked to take the request."""
        if self.taken is not None and not self.taken.done():
            self.refusal = why
            self.finish(why)

    def expire_at(self, deadline_s: float) -> None:
        """End the stream with `DeadlineExceeded` at `deadline_s` of the event loop's clock."""
        if not self._finished:
            self._deadline = self.loop.call_at(deadline_s, self._expired)

    def _expired(self) -> None:
        self.finish(
            errors.DeadlineExceeded(
                f"the request's deadline passed after {self._sequence.received} items from {self._who}"
            )
        )

    def finish(self, error: errors.DynamoError | None) -> None:
        """End the stream, once: what was received before can still be read. Closes the connection."""
        self._finish(error, keep=False)

    def _finish(self, error: errors.DynamoError | None, *, keep: bool) -> None:
        if self._finished:
            return
        self._finished = True
        self._error = error
        if self.taken is not None and not self.taken.done():
            self.taken.set_result(False)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if keep and self._on_kept is not None:
            self._leave_connection(self._on_kept)
        elif self.transport is not None:
            # abort: there is nothing of ours to flush, and the worker must notice now.
            self.transport.abort()
        self._wake()

    def _leave_connection(self, on_kept: OnKept) -> None:
        transport, self.transport = self.transport, None
        assert transport is not None
        if self._paused:
            transport.resume_reading()
        self._is_closed()
        on_kept(self, transport)

    # --- the reader's side ---

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self._finished

    @property
    def unread_bytes(self) -> int:
        """Received and not yet given to the reader, as on the wire."""
        return self._unread_bytes

    def discard(self) -> None:
        """Discard the rest: the reader has stopped."""
        self.finish(errors.RequestCancelled("the stream was closed by its reader"))
        self._batches.clear()

    def take_ready(self) -> list[Any] | None:
        """All items received so far, in one list; None if there are none."""
        if not self._batches:
            return None
        batch = self._batches.popleft()
        while self._batches:
            batch += self._batches.popleft()
        self._unread_bytes = 0
        if self._paused and not self._finished:
            self._resume()
        return batch

    async def next_batch(self) -> list[Any] | None:
        """At least one item, or None at the end. Raises what the stream ended with."""
        while (batch := self.take_ready()) is None:
            if self._finished:
                if self._error is not None:
                    raise self._error
                return None
            if self._waiter is not None:
                raise RuntimeError("two tasks read one response stream")
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return batch

    async def pump(self, take: Take) -> None:
        """Give `take` what has come and what comes, as it arrives. Raises what the stream ended with, or `take`."""
        if self._waiter is not None or self._taker is not None:
            raise RuntimeError("two tasks read one response stream")
        self._taker = taker = _Taker(self, take)
        try:
            taker.give()
            await taker.done
        finally:
            self._taker = None
            taker.leave()
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._taker is not None:
            self._taker.give()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _pause(self) -> None:
        assert self.transport is not None
        self._paused = True
        self.transport.pause_reading()

    def _resume(self) -> None:
        assert self.transport is not None
        self._paused = False
        self.transport.resume_reading()


class _Taker:
    """The consumer of a stream's items as they arrive. `done` at the end of the stream, or when `take` has raised."""

    __slots__ = ("_catch_up", "_context", "_inbound", "_take", "done")

    def __init__(self, inbound: InboundStream, take: Take) -> None:
        self._inbound = inbound
        self._take = take
        self._context = contextvars.copy_context()
        self._catch_up: asyncio.Future[None] | None = None
        self.done: asyncio.Future[None] = inbound.loop.create_future()

    def give(self) -> None:
        """All that there is, unless the taker must catch up first."""
        inbound, done = self._inbound, self.done
        while self._catch_up is None and not done.done() and (batch := inbound.take_ready()) is not None:
            try:
                catch_up = self._context.run(self._take, batch)
            except Exception as error:
                done.set_exception(error)
                return
            if catch_up is not None:
                self._catch_up = asyncio.ensure_future(catch_up)
                self._catch_up.add_done_callback(self._go_on)
        if self._catch_up is None and inbound.finished and not done.done():
            done.set_result(None)

    def _go_on(self, catch_up: asyncio.Future[None]) -> None:
        self._catch_up = None
        if self.done.done() or catch_up.cancelled():
            return
        if (error := catch_up.exception()) is not None:
            self.done.set_exception(error)
        else:
            self.give()

    def leave(self) -> None:
        """Nothing more is given."""
        self.done.cancel()
        if self._catch_up is not None:
            self._catch_up.cancel()


class ResponseStream:
    """A streaming answer (`ports.ResponseStream`). One reader; iterate to the end, or `aclose()`.

    Iteration raises what the handler raised, under its own type, or `WorkerLost`, `StreamGap`, `DeadlineExceeded`.
    """

    def __init__(self, instance_id: int, inbound: InboundStream) -> None:
        self.instance_id = instance_id
        self._inbound = inbound
        self._batch: list[Any] = []
        self._at = 0

    @property
    def unread_bytes(self) -> int:
        """Received and not yet given to the reader: bounded, whatever the worker sends."""
        return self._inbound.unread_bytes

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._at == len(self._batch):
            batch = await self._inbound.next_batch()
            if batch is None:
                self._batch, self._at = [], 0
                raise StopAsyncIteration
            self._batch, self._at = batch, 0
        item = self._batch[self._at]
        self._at += 1
        return item

    async def pump(self, take: Take) -> None:
        """Call `take` with the items in groups, as they arrive, until the end."""
        if rest := self._batch[self._at :]:
            self._batch, self._at = [], 0
            if (catch_up := take(rest)) is not None:
                await catch_up
        await self._inbound.pump(take)

    async def single(self) -> Any:
        """The one value of a unary handler. `RequestError` if there was none, or more than one."""
        found: list[Any] = []
        try:
            async for item in self:
                found.append(item)
                if len(found) > 1:
                    raise errors.RequestError("a single value was expected, but the handler streams: iterate over it")
        finally:
            await self.aclose()
        if not found:
            raise errors.RequestError("a single value was expected, but the handler gave none")
        return found[0]

    async def aclose(self) -> None:
        """Stop; a handler that still runs is cancelled. Idempotent, and no error after the end."""
        self._batch, self._at = [], 0
        self._inbound.discard()

    def __del__(self) -> None:
        # Dropped half read, for example by `break`: otherwise the handler would wait for its reader for ever.
        if not self._inbound.finished:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the connection with it
                self._inbound.loop.call_soon_threadsafe(self._inbound.discard)
