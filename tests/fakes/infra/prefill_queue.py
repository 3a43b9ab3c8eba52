"""`ports.PrefillQueue` in memory; passes `tests/contract/prefill_queue`, as the JetStream one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.core.routing.prompts import Turns, is_late
from dynamo_local.errors import NatsUnavailable
from dynamo_local.ports import PrefillTask, QueueDepth
from dynamo_local.system.request_log import x_request_id
from dynamo_local.transport.prefill_queue import (
    DEFAULT_ACK_WAIT_S,
    DEFAULT_MAX_DELIVER,
    DeadLetter,
    decode_entry,
    encode_entry,
)

MAX_PAYLOAD_BYTES = 1 << 20


@dataclass
class Entry:
    """`visible_at_s` is when it may be delivered (again); `deliveries` 0 means that it waits. `late`: in the second
    line."""

    request_id: str
    run_id: str
    data: bytes
    expires_at_s: float
    deliveries: int = 0
    visible_at_s: float = 0.0
    x_request_id: str = ""
    start_by_s: float | None = None
    late: bool = False


@dataclass
class FakeQueueServer:
    """State that the clients of one namespace share. With `available = False` every call raises `NatsUnavailable`."""

    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    seen: set[tuple[str, str]] = field(default_factory=set)
    dead: list[DeadLetter] = field(default_factory=list)
    available: bool = True
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def check(self) -> None:
        if not self.available:
            raise NatsUnavailable("the fake queue is switched off")

    def notify(self) -> None:
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
        self._turns = Turns()
        self.deferred = self.late_pulled = 0

    async def start(self, *, purge_stale: bool = False) -> None:
        self.server.check()
        if purge_stale:
            for key in [key for key in self.server.entries if key[0] != self.run_id]:
                del self.server.entries[key]
            self.server.dead[:] = [letter for letter in self.server.dead if letter.run_id == self.run_id]

    async def close(self) -> None:
        """Nothing to give back."""

    async def enqueue(
        self, request_id: str, payload: Mapping[str, Any], *, deadline_s: float, start_within_s: float | None = None
    ) -> None:
        data = encode_entry(payload, MAX_PAYLOAD_BYTES)
        self.server.check()
        key = (self.run_id, request_id)
        if key not in self.server.seen:
            self.server.seen.add(key)
            now_s = self.clock.now_s()
            entry = Entry(request_id, self.run_id, data, now_s + deadline_s, x_request_id=x_request_id())
            entry.start_by_s = None if start_within_s is None else now_s + start_within_s
            self.server.entries[key] = entry
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
            for entry in self._in_turn([e for e in self.server.entries.values() if e.visible_at_s <= now_s]):
                if (pulled := self._deliver(entry)) is not None:
                    self._turns.pulled(late=entry.late)
                    self.late_pulled += entry.late
                    return pulled
            if now_s >= deadline_s:
                return None
            wake_s = min([deadline_s, *(e.visible_at_s for e in self.server.entries.values())])
            await self._wait(changed, wake_s)

    async def depth(self) -> QueueDepth:
        self.server.check()
        waiting = [entry for entry in self.server.entries.values() if entry.deliveries == 0]
        return QueueDepth(len(waiting), len(self.server.entries), sum(entry.late for entry in waiting))

    async def dead_letters(self) -> list[DeadLetter]:
        self.server.check()
        return list(self.server.dead)

    def remove(self, entry: Entry) -> None:
        self.server.entries.pop((entry.run_id, entry.request_id), None)

    def _in_turn(self, visible: list[Entry]) -> Iterator[Entry]:
        """Both lines in the order in which they are asked; what is late on its turn goes behind, if others wait."""
        late = [entry for entry in visible if entry.late]
        if self._turns.late_first:
            yield from late
        for entry in visible:
            if entry.late:
                continue
            others = any(e.deliveries == 0 and e is not entry and not e.late for e in self.server.entries.values())
            if others and is_late(entry.start_by_s, self.clock.now_s()):
                entry.late = True
                self.deferred += 1
                late.append(entry)
                continue
            yield entry
        yield from late

    def _deliver(self, entry: Entry) -> FakePulledTask | None:
        entry.deliveries += 1
        if entry.run_id != self.run_id or entry.expires_at_s <= self.clock.now_s():
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
        waiters = {asyncio.ensure_future(changed.wait()), asyncio.ensure_future(self.clock.sleep_until(until_s))}
        try:
            await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
            await asyncio.wait(waiters)
