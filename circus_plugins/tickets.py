"""Gives each new worker its command, environment, log file and GPU locks, once, over a private socket.

`exec_worker` is the other end. A descriptor sent over the socket is the same open file as ours, so the GPUs' locks hold
as long as the worker lives, as under our own arbiter. Environments never pass through circusd, which would show them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo_local.circus_plugins.exec_worker import HEADER_BYTES
from dynamo_local.system.fd_messages import peer_of
from dynamo_local.system.process_host import LaunchSpec
from dynamo_local.system.processes import aend_session

log = logging.getLogger(__name__)

CLAIM_TIMEOUT_S = 30.0
"""From the new process's first message to its exec: milliseconds, except on a machine that swaps."""
_NAME_BYTES_MAX = 256
_ERROR_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Claim:
    """The process that took a ticket and became the worker. `pidfd` was opened while it surely lived."""

    pid: int
    pidfd: int


@dataclass(slots=True, eq=False)
class Offer:
    """An expected start. `claimed` fails with OSError if the process could not become the worker."""

    spec: LaunchSpec
    claimed: asyncio.Future[Claim] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Tickets:
    """The socket at `path` and the offers that wait there. The death of `parent`, circusd's pid, ends the workers."""

    def __init__(self, path: Path, *, parent: int) -> None:
        self.path = path
        self._parent = parent
        self._offers: dict[str, Offer] = {}
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Listen. The socket is the user's alone."""
        self.path.unlink(missing_ok=True)  # left by a killed plugin, and we hold the namespace's lock
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(str(self.path))
            self.path.chmod(0o600)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._run(self._accept(listener))

    async def close(self) -> None:
        """Stop listening; starts under way fail."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self.path.unlink(missing_ok=True)

    def offer(self, spec: LaunchSpec) -> Offer:
        """Allow one start of that name."""
        offer = self._offers[spec.name] = Offer(spec)
        return offer

    def withdraw(self, offer: Offer) -> None:
        """Withdraw the offer. A process that comes for it later ends by itself."""
        if self._offers.get(offer.spec.name) is offer:
            del self._offers[offer.spec.name]

    def _run(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            peer, _ = await loop.sock_accept(listener)
            self._run(self._serve(peer))

    async def _serve(self, peer: socket.socket) -> None:
        with peer:
            try:
                async with asyncio.timeout(CLAIM_TIMEOUT_S):
                    await self._hand_out(peer)
            except (OSError, TimeoutError) as error:
                log.warning("a process that came for its ticket went away: %s", error)

    async def _hand_out(self, peer: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        pid, uid = peer_of(peer)
        name = (await loop.sock_recv(peer, _NAME_BYTES_MAX)).decode("utf-8", "replace").strip()
        offer = self._offers.pop(name, None) if uid == os.getuid() else None
        if offer is None:
            log.warning("pid %d (uid %d) wants to be %s, which nobody starts now: refused", pid, uid, name)
            return
        try:
            claim = await self._become(peer, pid, offer.spec)
        except TimeoutError:
            _fail(offer, OSError(f"{name}: pid {pid} did not become the worker within {CLAIM_TIMEOUT_S:g} s"))
        except OSError as error:
            _fail(offer, error)
        except asyncio.CancelledError:
            _fail(offer, OSError(f"{name}: the plugin is leaving"))
            raise
        else:
            if offer.claimed.done():  # cancelled meanwhile: the process must not run without an owner
                await aend_session(claim.pid)
                os.close(claim.pidfd)
            else:
                offer.claimed.set_result(claim)

    async def _become(self, peer: socket.socket, pid: int, spec: LaunchSpec) -> Claim:
        loop = asyncio.get_running_loop()
        ticket = {
            "argv": spec.argv,
            "env": dict(spec.env),
            "cwd": spec.cwd,
            "death_signal": spec.death_signal,
            "parent": self._parent,
        }
        body = json.dumps(ticket).encode()
        pidfd = os.pidfd_open(pid)
        try:
            log_fd = os.open(spec.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                socket.send_fds(peer, [len(body).to_bytes(HEADER_BYTES, "big")], [log_fd, *spec.inherited_fds])
            finally:
                os.close(log_fd)
            await loop.sock_sendall(peer, body)
            failure = await loop.sock_recv(peer, _ERROR_BYTES_MAX)  # closed without a word: it has become the worker
            if failure:
                number, _, text = failure.decode("utf-8", "replace").partition(":")
                raise OSError(int(number), text.rstrip(": "), spec.argv[0])
        except BaseException:
            os.close(pidfd)
            raise
        return Claim(pid, pidfd)


def _fail(offer: Offer, error: OSError) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):  # the waiting start was cancelled
        offer.claimed.set_exception(error)
        offer.claimed.exception()  # mark it as retrieved, even if nobody awaits it
