"""One request on the worker: connect back, run the handler, deliver."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from collections.abc import Callable
from typing import Final

from dynamo_local import errors
from dynamo_local.clock import Clock
from dynamo_local.runtime.requests.context import RequestContext
from dynamo_local.runtime.requests.frames import Decode, RequestHeader
from dynamo_local.runtime.requests.handlers import Handler, drive
from dynamo_local.runtime.requests.listener import NAMES, peer_uid
from dynamo_local.runtime.requests.sender import Keep, ResponseSender

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 5.0
"""Deadline for the connection and the caller's GO. A slower caller has given the request up."""


class Exchange:
    """A request that a worker took, from connecting back until the caller has the end of the answer.

    `on_handler_done` is called once, when the handler has ended or will never start; the task that `start`
    gives ends later, when the caller has everything. Errors go to the caller, never out of the task. `kept` is the
    connection on which the request came, where one was kept; `keep` takes it over at the end.
    """

    def __init__(
        self,
        endpoint: str,
        header: RequestHeader,
        handler: Handler,
        decode: Decode,
        clock: Clock,
        on_handler_done: Callable[[], None],
        keep: Keep | None = None,
        kept: asyncio.Transport | None = None,
    ) -> None:
        deadline_s = None if header.remaining_s is None else clock.now_s() + header.remaining_s
        self.context = RequestContext(header.request_id, deadline_s, clock)
        self._endpoint = endpoint
        self._header = header
        self._clock = clock
        self._began_s = clock.now_s()
        self._handler = handler
        self._decode = decode
        self._on_handler_done = on_handler_done
        self._keep = keep
        self._sender: ResponseSender | None = None
        self._handling = True
        self._stopped = False
        self._task = asyncio.create_task(self._run(), name=f"request-{header.request_id}")
        if kept is not None:
            self._sender = self._make_sender()
            self._sender.keep = keep
            self._sender.resume(kept)

    @property
    def task(self) -> asyncio.Task[None]:
        """The handler's; done when the request is."""
        return self._task

    @property
    def pending_bytes(self) -> int:
        """What is buffered of its answer and not yet sent."""
        return 0 if self._sender is None else self._sender.pending_bytes

    def fail(self, error: errors.DynamoError) -> None:
        """Tell the caller `error` now, without waiting for the handler, which is cancelled."""
        if self._sender is not None:
            self._sender.end(error)
        self._stop_handler()

    def abort(self) -> None:
        """Drop the connection, whether or not the caller has everything, and cancel the handler."""
        if self._sender is not None:
            self._sender.abort()
        self._stop_handler()

    def _stop_handler(self) -> None:
        if self._handling and not self._stopped:
            self._stopped = True
            self._task.cancel()

    def _expired(self) -> None:
        self.fail(errors.DeadlineExceeded(f"the deadline of request {self._header.request_id} passed in the worker"))

    async def _run(self) -> None:
        timer: asyncio.TimerHandle | None = None
        if self._header.remaining_s is not None:
            timer = asyncio.get_running_loop().call_later(self._header.remaining_s, self._expired)
        try:
            await self._handle()
            if self._sender is not None and self._sender.finished:
                # The caller closes once it has the end. Until then the request is in flight: if this process ended now,
                # data in the kernel's buffers would be lost.
                await self._sender.lost
        finally:
            if timer is not None:
                timer.cancel()
            if self._sender is not None:
                self._sender.abort()

    async def _handle(self) -> None:
        try:
            payload = await self._connect()
            if payload is not None:
                assert self._sender is not None
                await self._respond(payload, self._sender)
        except asyncio.CancelledError:
            if not self._stopped:
                raise
            self._task.uncancel()
        finally:
            self._handling = False
            self._on_handler_done()

    async def _connect(self) -> bytes | None:
        """The encoded payload once the caller has sent GO; None if it wants no answer any more."""
        header = self._header
        if self._sender is not None:
            return header.payload
        if not _is_loopback(header.host):
            logger.warning("request %s wants its answer at %s, which is not loopback", header.request_id, header.host)
            return None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                sock = _unix_socket(header.socket)
                if sock is None:
                    _, self._sender = await loop.create_connection(self._make_sender, header.host, header.port)
                else:
                    _, self._sender = await loop.create_unix_connection(self._make_sender, sock=sock)
                    self._sender.keep = self._keep if header.keep else None
                follows = await self._sender.go
        except (OSError, TimeoutError) as error:
            logger.info("the caller of request %s could not be reached: %s", header.request_id, error)
            return None
        if follows is None:
            logger.debug("the caller of request %s wants no answer any more", header.request_id)
            return None
        return follows if header.payload is None else header.payload

    def _make_sender(self) -> ResponseSender:
        return ResponseSender(self._header.token, on_lost=self._stop_handler)

    async def _respond(self, payload: bytes, sender: ResponseSender) -> None:
        request_id = self._header.request_id
        try:
            await drive(self._handler, self._decode(payload), self.context, sender.put)
        except asyncio.CancelledError:
            if self._stopped:
                self._log_end("stopped: its caller went away, or its time was over")
                raise
            # Either the process is going down, or the handler awaited something that was cancelled.
            self._log_end("cancelled by the worker")
            sender.end(errors.RequestCancelled(f"the worker cancelled request {request_id}"))
            if self._task.cancelling():
                raise
        except errors.DynamoError as error:
            self._log_end(f"{type(error).__name__}: {error}")
            sender.end(error)
        except Exception as error:  # foreign code: its errors go to the caller and to our log
            logger.exception("the handler of request %s failed", request_id)
            sender.end(error)
        else:
            self._log_end("done")
            sender.end()

    def _log_end(self, how: str) -> None:
        """One line for each request of a client: those without an id (status, loads, Router queries) are not logged."""
        if self._header.x_request_id:
            passed_ms = (self._clock.now_s() - self._began_s) * 1e3
            logger.info("%s of request %s after %.0f ms: %s", self._endpoint, self._header.request_id, passed_ms, how)


def _unix_socket(name: str) -> socket.socket | None:
    """Connected to the caller's; None where it has none, or takes no more at the moment: its port may."""
    if not name.startswith(NAMES):
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(f"\0{name}")  # at once, or not: a full queue is an error here
        if peer_uid(sock) == os.geteuid():  # what comes on it later are requests
            return sock
    except OSError:
        pass
    sock.close()
    return None


def _is_loopback(host: str) -> bool:
    """Whether it is a literal loopback address: a name could resolve to anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
