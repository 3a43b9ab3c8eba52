"""`ports.PrefillQueue` in memory; passes `tests/contract/test_prefill_queue.py` beside the JetStream one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.errors import NatsUnavailable
from dynamo_local.ports import PrefillTask, QueueDepth
from dynamo_local.runtime.prefill_queue import DEFAULT_ACK_WAIT_S, DEFAULT_MAX_DELIVER, DeadLetter
from dynamo_local.runtime.prefill_queue.codec import decode_entry, encode_entry
from dynamo_local.system.logs.request_log import x_request_id

MAX_PAYLOAD_BYTES = 1 << 20


@dataclass
class Entry:
    """`visible_at_s` is when it may be delivered (again); `deliveries` 0 means that it waits."""

    request_id: str
    run_id: str
    data: bytes
    expires_at_s: float
    deliveries: int = 0
    visible_at_s: float = 0.0
    x_request_id: str = ""


@dataclass
class FakeQueueServer:
    """What the clients of one namespace share. With `available = False` every call raises `NatsUnavailable`."""

    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    seen: set[tuple[str, str]] = field(default_factory=set)
    dead: list[DeadLetter] = field(default_factory=list)
    available: bool = True
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def check(self) -> None:
        if not self.available:
            raise NatsUnavailable("the fake queue is switched off")

    def notify(self) -> None:
        """Wake everybody who waits in `pull`."""
        self.changed.set()
        self.changed = asyncio.Event()


class FakePulledTask:
    """An entry in hand; `log` of the answers given, for tests."""

    def __init__(self, queue: FakePrefillQueue, entry: Entry, task: PrefillTask) -> None:
        self._queue = queue
        self._entry = entry
        self.task = task
        self.log: list[str] = []

    async def in_progress(self) -> None:
        self._queue.server.check()
        self.log.append("in_progress")
        self._entry.visible_at_s = self._queue.clock.now_s() + self._queue.ack_wait_s

    async def ack(self) -> None:
        self._queue.server.check()
        self.log.append("ack")
        self._queue.remove(self._entry)

    async def nak(self, delay_s: float = 0.0) -> None:
        self._queue.server.check()
        self.log.append("nak")
        self._entry.visible_at_s = self._queue.clock.now_s() + delay_s
        self._queue.server.notify()


class FakePrefillQueue:
    """One client of a `FakeQueueServer` (of its own if none is given)."""

    def __init__(
        self,
        server: FakeQueueServer | None = None,
        run_id: str = "run",
        *,
        ack_wait_s: float = DEFAULT_ACK_WAIT_S,
        max_deliver: int = DEFAULT_MAX_DELIVER,
        clock: Clock | None = None,
    ) -> None:
        self.server = server or FakeQueueServer()
        self.run_id = run_id
        self.ack_wait_s = ack_wait_s
        self.max_deliver = max_deliver
        self.clock = clock or AsyncioClock()

    async def start(self, *, purge_stale: bool = False) -> None:
        self.server.check()
        if purge_stale:
            for key in [key for key in self.server.entries if key[0] != self.run_id]:
                del self.server.entries[key]
            self.server.dead[:] = [letter for letter in self.server.dead if letter.run_id == self.run_id]

    async def close(self) -> None:
        """Nothing to give back."""

    async def enqueue(self, request_id: str, payload: Mapping[str, Any], *, deadline_s: float) -> None:
        data = encode_entry(payload, MAX_PAYLOAD_BYTES)
        self.server.check()
        key = (self.run_id, request_id)
        if key not in self.server.seen:
            self.server.seen.add(key)
            self.server.entries[key] = Entry(
                request_id, self.run_id, data, self.clock.wall_s() + deadline_s, x_request_id=x_request_id()
            )
            self.server.notify()

    async def cancel(self, request_id: str) -> None:
        self.server.check()
        self.server.entries.pop((self.run_id, request_id), None)

    async def pull(self, timeout_s: float) -> FakePulledTask | None:
        deadline_s = self.clock.now_s() + timeout_s
        while True:
            self.server.check()
            changed = self.server.changed
            now_s = self.clock.now_s()
            for entry in [e for e in self.server.entries.values() if e.visible_at_s <= now_s]:
                if (pulled := self._deliver(entry)) is not None:
                    return pulled
            if now_s >= deadline_s:
                return None
            wake_s = min([deadline_s, *(e.visible_at_s for e in self.server.entries.values())])
            await self._wait(changed, wake_s)

    async def depth(self) -> QueueDepth:
        self.server.check()
        pending = sum(entry.deliveries == 0 for entry in self.server.entries.values())
        return QueueDepth(pending, len(self.server.entries))

    async def dead_letters(self) -> list[DeadLetter]:
        self.server.check()
        return list(self.server.dead)

    def remove(self, entry: Entry) -> None:
        self.server.entries.pop((entry.run_id, entry.request_id), None)

    def _deliver(self, entry: Entry) -> FakePulledTask | None:
        entry.deliveries += 1
        if entry.run_id != self.run_id or entry.expires_at_s <= self.clock.wall_s():
            self.remove(entry)
            return None
        if entry.deliveries > self.max_deliver:
            self.remove(entry)
            reason = f"not finished in {self.max_deliver} attempts"
            letter = DeadLetter(entry.request_id, entry.run_id, self.max_deliver, reason, self.clock.wall_s())
            self.server.dead.append(letter)
            return None
        entry.visible_at_s = self.clock.now_s() + self.ack_wait_s
        task = PrefillTask(entry.request_id, decode_entry(entry.data), entry.deliveries, entry.x_request_id)
        return FakePulledTask(self, entry, task)

    async def _wait(self, changed: asyncio.Event, until_s: float) -> None:
        waiters = {
            asyncio.ensure_future(changed.wait()),
            asyncio.ensure_future(self.clock.sleep_until(until_s)),
        }
        try:
            await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
            await asyncio.wait(waiters)
