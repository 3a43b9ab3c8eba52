"""The caller's side: connections on which nobody answers at the moment."""

from __future__ import annotations

import asyncio
from typing import Final

IDLE_S: Final = 120.0
"""A connection that was not used for so long is closed. Requests come in bursts: those of the last minutes find as many
connections as they were at once."""

IDLE_MAX: Final = 256
"""Of one worker's endpoint. More are closed as their answers end."""


class _Idle(asyncio.Protocol):
    """Nothing is to be heard on it but its end."""

    def __init__(self, transport: asyncio.Transport, idle: list[_Idle], since_s: float) -> None:
        self.transport = transport
        self.since_s = since_s
        self._idle = idle

    def data_received(self, data: bytes) -> None:
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)


class KeptConnections:
    """By the subject of the endpoint at the other end; the one that was used last is taken first."""

    def __init__(self) -> None:
        self._idle: dict[str, list[_Idle]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def __len__(self) -> int:
        return sum(map(len, self._idle.values()))

    def has(self, subject: str) -> bool:
        """Whether there is one to take."""
        return bool(self._idle.get(subject))

    def take(self, subject: str) -> asyncio.Transport | None:
        """One on which that endpoint can be asked; it is the taker's from now on."""
        idle = self._idle.get(subject)
        while idle:
            transport = idle.pop().transport
            if not transport.is_closing():
                return transport
        return None

    def put(self, subject: str, transport: asyncio.Transport) -> None:
        """Keep it until somebody takes it, or nobody has for `IDLE_S`."""
        idle = self._idle.setdefault(subject, [])
        loop = asyncio.get_running_loop()
        kept = _Idle(transport, idle, loop.time())
        transport.set_protocol(kept)
        if self._closed or len(idle) >= IDLE_MAX:
            transport.abort()
            return
        idle.append(kept)
        if self._timer is None:
            self._timer = loop.call_later(IDLE_S, self._sweep)

    def forget(self, subject: str) -> None:
        """Close those of that endpoint: one was found broken."""
        for kept in self._idle.pop(subject, ()):
            kept.transport.abort()

    def close(self) -> None:
        """Close them all, and whatever comes later."""
        self._closed = True
        for subject in list(self._idle):
            self.forget(subject)
        if self._timer is not None:
            self._timer.cancel()

    def _sweep(self) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        for subject, idle in list(self._idle.items()):
            for kept in idle:
                if kept.since_s + IDLE_S > loop.time():
                    break
                kept.transport.abort()
            if not idle:
                del self._idle[subject]
        if self._idle:
            self._timer = loop.call_later(IDLE_S, self._sweep)
