"""The connection to NATS: a first connect with a deadline, endless reconnects, and a close that never raises.

nats-py's defaults are for a server far away. It waits two seconds between attempts, and gives up after sixty. If
told to try for ever afterwards, it also tries for ever on the first connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from dynamo_local.errors import NatsUnavailable
from dynamo_local.system.executors import within
from dynamo_local.transport.access import NatsAccess
from dynamo_local.transport.nats_client import (
    BadSubjectError,
    Client,
    ConnectionClosedError,
    FlushTimeoutError,
    MaxPayloadError,
    Msg,
    NatsError,
    NoRespondersError,
    OutboundBufferLimitError,
    Subscription,
)

log = logging.getLogger(__name__)

NO_ACCESS = NatsAccess()
RECONNECT_WAIT_S = 0.15
"""Pause between attempts to reconnect."""
PENDING_BYTES = 16 * 1024 * 1024
"""Bytes that may wait to be sent, also while reconnecting; above it, publishing raises `OutboundBufferLimitError`."""
CANCEL_AGAIN_S = 0.1
"""Pause between cancellations of a call to nats-py that outlived its deadline: it can let one of them pass."""
PING_INTERVAL_S = 5
"""With two pings outstanding a server that is silent is given up after 15 s (nats-py's default: six minutes)."""
FLUSH_TIMEOUT_S = 10
"""nats-py's own, for callers that name none."""
PONG_WITHIN_S = 60
"""Longer than a silent server is put up with: by then a ping's answer has come, or its connection has ended."""


def _is_news(record: logging.LogRecord) -> bool:
    """asyncio warns at the end of each connection that nats-py upgraded to TLS; nothing is wrong."""
    return "eof_received() has no effect when using ssl" not in record.getMessage()


logging.getLogger("asyncio").addFilter(_is_news)


async def connect_nats(
    url: str,
    access: NatsAccess = NO_ACCESS,
    *,
    name: str = "dynamo-local",
    timeout_s: float = 5.0,
    on_closed: Callable[[], Awaitable[None]] | None = None,
) -> NatsClient:
    """Connect to `nats://host:port` or `tls://host:port` (user or token may be in the URL; those of `access` win).

    The client reconnects for ever on its own. `on_closed` is called when it has ended for good: by `close`, or
    because the server disconnected us with an error that nats-py takes for final.

    Raises `NatsUnavailable` past `timeout_s` or when the credentials are refused, `ConfigError` for certificates that
    cannot be used.
    """
    where = show_url(url)
    tls = access.context(urlsplit(url).scheme)
    client = NatsClient() if tls is None else _TlsClient()
    watcher = _Watcher(client, where, on_closed)
    try:
        connecting = client.connect(
            url,
            name=name,
            token=access.token,
            user=access.user,
            password=access.password,
            tls=tls,
            error_cb=watcher.error,
            disconnected_cb=watcher.disconnected,
            reconnected_cb=watcher.reconnected,
            closed_cb=watcher.closed,
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # annotated int; asyncio.sleep gets it
            connect_timeout=2,
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=2,
            pending_size=PENDING_BYTES,
        )
        await _within(timeout_s, connecting)
    except BaseException as error:
        watcher.quiet = True
        await close_quietly(client)
        if isinstance(error, TimeoutError):
            reason = f" ({watcher.last})" if watcher.last else ""
            raise NatsUnavailable(
                f"NATS did not answer within {timeout_s:g} s at {where}{reason}; is it running, is the address right?"
            ) from error
        if _is_refusal(error):
            raise NatsUnavailable(
                f"NATS at {where} refused our credentials: check NATS_AUTH_*, the token file or the URL"
            ) from None
        if isinstance(error, (OSError, NatsError, ValueError)):
            raise NatsUnavailable(f"NATS at {where} cannot be used: {error}") from error
        raise
    watcher.connecting = False
    return client


async def close_quietly(client: Client, timeout_s: float = 2.0) -> None:
    """Close the connection, whatever its state; never raises for what the network does. Twice is no error."""
    try:
        await _within(timeout_s, client.close())
    except TimeoutError:
        log.warning("the connection to NATS did not close within %g s, and was dropped", timeout_s)
    except (OSError, NatsError, AssertionError) as error:  # nats-py asserts that its connect has begun
        log.debug("closing the connection to NATS: %s", error)
    await asyncio.sleep(0)  # nats-py cancels its tasks without awaiting them: let them end


async def _within(timeout_s: float, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; past the deadline, cancel it until it has ended, and raise `TimeoutError`.

    nats-py can let one cancellation pass and go on for ever: its close does. So does Python 3.11's
    `asyncio.wait_for` if the awaited work ends at the same moment. `asyncio.timeout` cancels only once.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            raise TimeoutError
        task.result()
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)


def show_url(url: str) -> str:
    """The URL without user, password or token: fit for a log."""
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _is_refusal(error: BaseException) -> bool:
    """Whether the credentials were refused. On the first connect nats-py raises that as a plain `Error`."""
    return isinstance(error, NatsError) and "authorization" in str(error).lower()


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


Heard = Callable[[bytes, bytes, bytes, bytes | None], None]
"""Takes a message's subject, the subject for its answer, its data, and its headers as they came."""

NO_RESPONDERS = b"NATS/1.0 503"
_SUBJECT = re.compile(r"[!-~]+")


def header_block(headers: Mapping[str, str]) -> bytes:
    """Headers for `post` and `ask`. A line break in a value is dropped."""
    lines = (f"{name}: {''.join(value.splitlines())}\r\n" for name, value in headers.items())
    return f"NATS/1.0\r\n{''.join(lines)}\r\n".encode()


def headers_of(block: bytes | None) -> dict[str, str]:
    """The headers of a message. A status of the server is not among them."""
    lines = (block or b"").decode(errors="replace").split("\r\n")[1:]
    return {name: value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}


class NatsClient(Client):
    """nats-py's client, with cheap messages, and with two faults repaired: a close during a reconnect, and a flush
    that is cancelled.

    nats-py takes two tasks, a queue and a timer for an answer, and wakes a third task to send. The prefill queue needs
    a dozen messages per request. So `hear`, `post` and `ask` call and write in callbacks of the event loop.

    A close and a reconnect wait for the end of the same transport. If one stops waiting, it cancels the other. The
    close of nats-py ends there, without its callback.

    A flush is a ping. nats-py (2.16) sets the result of its future when the answer comes, even if a timeout or the
    caller has cancelled that future meanwhile. This raises, and ends the loop that reads. The client then says that
    it is connected and hears nothing more. 15 s later its own pings are found to be unanswered.
    """

    def __init__(self) -> None:
        super().__init__()
        self._flushes: set[asyncio.Task[None]] = set()
        self._heard: dict[int, Heard] = {}
        self._write_due = False
        self._answers = ""
        self._asked: dict[bytes, asyncio.Future[tuple[bytes, bytes | None]]] = {}
        self._numbers = itertools.count()

    async def hear(self, subject: str, heard: Heard) -> Subscription:
        """Call `heard` with each message as it is read. A later post reaches the server after this."""
        unused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        subscription = await self.subscribe(subject, future=unused)  # with a future: no task
        self._heard[subscription._id] = heard
        return subscription

    def post(self, subject: str, data: bytes, *, reply: str = "", headers: bytes = b"", within_s: float = 0.0) -> None:
        """Send at the end of this pass of the event loop, or with what else is sent `within_s`. The caller has looked
        whether there is a connection.

        Raises nats-py's errors for what cannot be sent.
        """
        if not _SUBJECT.fullmatch(subject):
            raise BadSubjectError
        if self.is_closed:
            raise ConnectionClosedError
        if len(data) > self._max_payload:
            raise MaxPayloadError
        size = len(headers) + len(data)
        line = f"HPUB {subject} {reply} {len(headers)} {size}" if headers else f"PUB {subject} {reply} {size}"
        command = b"".join((line.encode(), b"\r\n", headers, data, b"\r\n"))
        if self._pending_data_size + len(command) > PENDING_BYTES:
            raise OutboundBufferLimitError
        self._pending.append(command)
        self._pending_data_size += len(command)
        if within_s:
            asyncio.get_running_loop().call_later(within_s, self._write)
        elif not self._write_due:
            self._write_due = True
            asyncio.get_running_loop().call_soon(self._write)

    async def ask(
        self, subject: str, data: bytes, timeout_s: float, *, headers: bytes = b""
    ) -> tuple[bytes, bytes | None]:
        """The data and the headers of the answer. Raises TimeoutError, `NoRespondersError`, or what `post` does."""
        if not self._answers:
            self._answers = self.new_inbox()
            await self.hear(f"{self._answers}.*", self._answered)
        answers = f"{self._answers}.{next(self._numbers)}"
        future: asyncio.Future[tuple[bytes, bytes | None]] = asyncio.get_running_loop().create_future()
        key = answers.encode()
        self._asked[key] = future
        try:
            self.post(subject, data, reply=answers, headers=headers)
            return await within(future, timeout_s)
        finally:
            del self._asked[key]

    def _answered(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        future = self._asked.get(subject)
        if future is None or future.done():
            return
        if headers is not None and headers.startswith(NO_RESPONDERS):
            future.set_exception(NoRespondersError())
        else:
            future.set_result((data, headers))

    def _write(self) -> None:
        """All that waits, in one TLS record. While there is no connection it waits for the next one."""
        self._write_due = False
        if not self._pending or not self.is_connected or self._transport is None:
            return
        commands, self._pending, self._pending_data_size = self._pending, [], 0
        try:
            self._transport.write(b"".join(commands))
        except (OSError, RuntimeError) as error:  # it has ended, which the reader is about to notice
            log.debug("writing to NATS: %s", error)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        heard = self._heard.get(sid)
        if heard is None:
            await super()._process_msg(sid, subject, reply, data, headers)  # type: ignore[arg-type]  # None: no headers
            return
        try:
            heard(subject, reply, data, headers)
        except Exception:  # it would end the loop that reads
            log.exception("a message on %s could not be taken", subject.decode(errors="replace"))

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._heard.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    async def flush(self, timeout: int = FLUSH_TIMEOUT_S) -> None:
        flushing = asyncio.create_task(super().flush(PONG_WITHIN_S), name="NATS flush")
        self._flushes.add(flushing)
        flushing.add_done_callback(self._flushed)
        done, _ = await asyncio.wait({flushing}, timeout=timeout)
        if not done:
            raise FlushTimeoutError
        if flushing.cancelled():  # by `_close`
            raise ConnectionClosedError
        flushing.result()

    def _flushed(self, flushing: asyncio.Task[None]) -> None:
        self._flushes.discard(flushing)
        if not flushing.cancelled():
            flushing.exception()  # told to who waits, if anybody does

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        try:
            await super()._close(status, do_cbs)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            if do_cbs and self._closed_cb is not None:
                await self._closed_cb()
        finally:
            for flushing in self._flushes:
                flushing.cancel()


class _TlsClient(NatsClient):
    """Tells nothing to a server that says it needs no TLS: nats-py would send the token to it in the clear."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and not info.get("tls_required"):
            raise NatsError("it speaks no TLS, so it is not the server that we know")
        await super()._process_info(info, initial_connection)


class _Watcher:
    """nats-py's callbacks: logs what happens to one connection, and ends a first connect that cannot succeed."""

    def __init__(self, client: Client, where: str, on_closed: Callable[[], Awaitable[None]] | None) -> None:
        self.client = client
        self.where = where
        self.connecting = True
        self.quiet = False
        self.last = ""
        self._on_closed = on_closed

    async def error(self, error: Exception) -> None:
        self.last = _reason(error)
        if self.connecting:
            if _is_refusal(error) and not self.quiet:
                raise error  # out of Client.connect, which would try the same credentials for ever
            return
        log.warning("NATS at %s: %s", self.where, self.last)

    async def disconnected(self) -> None:
        if not self.connecting and not self.client.is_closed:
            log.warning("the connection to NATS at %s was lost", self.where)

    async def reconnected(self) -> None:
        log.info("connected to NATS at %s again", self.where)

    async def closed(self) -> None:
        if not self.connecting and self._on_closed is not None:
            await self._on_closed()


# Turns failures of the NATS client into our typed errors. A subscription returns only when the server has it.

CALL_TIMEOUT_S = 2.0
"""Deadline of one round trip. A healthy local server answers in under 1 ms (0.5 ms for consumer info)."""


@contextlib.contextmanager
def nats_call(nats: Client, what: str) -> Iterator[None]:
    """Run NATS calls in the block. `what` ("read the depth of …") completes "could not …" in the error.

    Raises `NatsUnavailable` at once while disconnected. Otherwise the client would buffer the message, and deliver it
    after the reconnect, long after the caller got its error.
    """
    if not nats.is_connected:
        raise NatsUnavailable(f"could not {what}: not connected to NATS; retry once the server is back")
    try:
        yield
    except (TimeoutError, NatsError, OSError) as error:
        detail = str(error) or type(error).__name__
        raise NatsUnavailable(f"could not {what}: {detail}; retry, or look at the NATS server's log") from error


async def flush(nats: Client) -> None:
    """Return when the server has processed what was sent before, e.g. a subscription.

    nats-py (2.16) writes its PING past its own buffer of commands, so one `flush()` can be answered before a SUB has
    even left. When the answer comes the buffer has been written, and the second PING comes after it. With one, 1
    in 10 requests still reached a listener that had "unsubscribed and flushed".
    """
    for _ in range(2):
        await nats.flush(int(CALL_TIMEOUT_S))


async def subscribe(nats: Client, subject: str, heard: Callable[[Msg], Awaitable[None]], what: str) -> Subscription:
    """Hear what is published from now on: the server has it when this returns. `what` is as in `nats_call`.

    Raises `NatsUnavailable`.
    """
    with nats_call(nats, what):
        subscription = await nats.subscribe(subject, cb=heard)
        try:
            await flush(nats)
        except BaseException:
            with contextlib.suppress(NatsError):
                await unsubscribe(nats, subscription)
            raise
    return subscription


async def unsubscribe(nats: Client, subscription: Subscription | None) -> None:
    """Hear no more. None and a connection that has ended are no error: the subscription ended with it."""
    if subscription is not None and not nats.is_closed:
        await subscription.unsubscribe()
