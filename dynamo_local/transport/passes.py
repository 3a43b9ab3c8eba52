"""Dynamo's event plane, as far as forward passes travel on it: subjects, envelopes, and the frames of its ZMQ form.

On NATS the subject is `namespace.<ns>.component.<component>.endpoint.<endpoint>.forward-pass-metrics` (until Dynamo 1.2
without the endpoint). A message is one envelope: `{"publisher_id", "sequence", "published_at" (ms), "topic", "payload",
"published_at_ns"}`. Its payload is a pass (`fpm`). On ZMQ each publisher has a socket of its own. A message has four
frames: topic, publisher, sequence (8 bytes each, big endian), and the envelope behind a head of 5 bytes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.core.passes import ForwardPass
from dynamo_local.errors import NatsUnavailable
from dynamo_local.ports import KeyValue
from dynamo_local.system.executors import ended
from dynamo_local.transport.decoding import UNREADABLE
from dynamo_local.transport.fpm import encode_pass
from dynamo_local.transport.nats import nats_call
from dynamo_local.transport.nats_client import Client

TOPIC = "forward-pass-metrics"
CHANNELS = "v1/event_channels/"
"""Where Dynamo's publishers register; each key is under its process's lease."""
MAX_EVENT_BYTES = 64 * 1024
FRAME_HEAD = 5


class _Envelope(msgspec.Struct):
    publisher_id: int
    sequence: int
    published_at: int
    topic: str
    payload: bytes
    published_at_ns: int = 0


class _Received(msgspec.Struct):
    """Only what is needed: the rest of an envelope differs by version."""

    payload: bytes | list[int]


_event_decoder = msgspec.msgpack.Decoder(_Received)


def subject(namespace: str, component: str, endpoint: str = "generate") -> str:
    """Where the passes of a component's workers are published on NATS."""
    return f"namespace.{namespace}.component.{component}.endpoint.{endpoint}.{TOPIC}"


def subjects(namespace: str, component: str) -> tuple[str, str]:
    """Where whoever listens to them must: publishers of Dynamo 1.2 and before name no endpoint."""
    return subject(namespace, component), f"namespace.{namespace}.component.{component}.{TOPIC}"


def seal(payload: bytes, *, publisher_id: int, sequence: int, wall_s: float) -> bytes:
    """The payload in its envelope."""
    wall_ns = int(wall_s * 1e9)
    return msgspec.msgpack.encode(_Envelope(publisher_id, sequence, wall_ns // 1_000_000, TOPIC, payload, wall_ns))


def unseal(data: bytes) -> bytes | None:
    """The payload of an envelope; None for what is none, whatever it is."""
    if len(data) > MAX_EVENT_BYTES:
        return None
    try:
        payload = _event_decoder.decode(data).payload
        return payload if isinstance(payload, bytes) else bytes(payload)
    except (*UNREADABLE, ValueError):  # a number that is no byte
        return None


def unframe(frames: Sequence[bytes]) -> bytes | None:
    """The payload of a ZMQ message; None for what is none."""
    return unseal(frames[-1][FRAME_HEAD:]) if len(frames) == 4 and len(frames[-1]) > FRAME_HEAD else None


def zmq_endpoints(kvs: Iterable[KeyValue], lease_id: int) -> list[str]:
    """Where the process with that lease publishes its passes over ZMQ, from the keys under `CHANNELS`."""
    mine = (kv for kv in kvs if kv.lease_id == lease_id and TOPIC in kv.key)
    return [address for kv in mine for address in _addresses(kv.value)]


def _addresses(value: bytes) -> list[str]:
    """Texts that begin as a ZMQ address, wherever they stand in the JSON: its shape differs by version."""
    try:
        left: list[Any] = [json.loads(value)]
    except (ValueError, RecursionError):
        return []
    found = []
    while left:
        here = left.pop()
        if isinstance(here, dict):
            left += here.values()
        elif isinstance(here, list):
            left += here
        elif isinstance(here, str) and here.startswith(("tcp://", "ipc://")):
            found.append(here)
    return found


# Publishes a worker's passes as Dynamo's workers do: each as a message of its own on the event plane (NATS).

log = logging.getLogger(__name__)

UNSENT_PASSES = 1024


class PassEvents:
    """`publish` is a recorder's listener. A pass that cannot be sent is lost: the numbers of the passes show it."""

    def __init__(
        self, nats: Client, namespace: str, component: str, worker_id: Callable[[], str], clock: Clock | None = None
    ) -> None:
        self._nats = nats
        self._subject = subject(namespace, component)
        self._worker_id = worker_id
        self._clock = clock or AsyncioClock()
        self._publisher_id = secrets.randbits(53)
        self._sequence = 0
        self._unsent: deque[ForwardPass] = deque(maxlen=UNSENT_PASSES)
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._complained = False

    def start(self) -> None:
        """Send what is published from now on."""
        self._task = asyncio.create_task(self._run(), name=f"passes on {self._subject}")

    async def close(self) -> None:
        """Send no more."""
        await ended(self._task)
        self._task = None

    def publish(self, passed: ForwardPass) -> None:
        """Send it soon. Never waits; beyond a thousand unsent the oldest is forgotten."""
        self._unsent.append(passed)
        self._news.set()

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._unsent:
                await self._send(self._unsent.popleft())

    async def _send(self, passed: ForwardPass) -> None:
        payload = encode_pass(passed, self._worker_id())
        message = seal(payload, publisher_id=self._publisher_id, sequence=self._sequence, wall_s=self._clock.wall_s())
        self._sequence += 1
        try:
            with nats_call(self._nats, "publish a forward pass"):
                await self._nats.publish(self._subject, message)
            self._complained = False
        except NatsUnavailable as error:
            log.log(logging.DEBUG if self._complained else logging.WARNING, "%s", error)
            self._complained = True


# A worker keeps the last 2,048 passes of each rank until a planner asks.

KEPT_PASSES = 2048
"""Ten seconds of an engine that makes two hundred a second: a planner asks every five."""


class PassRecorder:
    """`ports.PassSink`. `at_s` of what is recorded is on the worker's clock; the worker id is filled in by who tells.

    `listeners` are called with each pass; `refresh` is called before the passes are read, so that an engine can record
    what has ended meanwhile.
    """

    def __init__(self) -> None:
        self.worker_id: str | None = None
        """Where it is not the worker's own instance id: a command registers itself."""
        self._ranks: dict[int, deque[ForwardPass]] = {}
        self.missed: dict[int, int] = {}
        """Passes that never came, by rank, as the gaps in their numbers show."""
        self.listeners: list[Callable[[ForwardPass], None]] = []
        self.refresh: Callable[[], None] = lambda: None

    def record(self, passed: ForwardPass) -> None:
        """Keep it. A number below the last one: the engine was started again, and everything begins anew."""
        rank = passed.engine.dp_rank
        kept = self._ranks.setdefault(rank, deque(maxlen=KEPT_PASSES))
        if kept:
            ahead = passed.counter_id - kept[-1].counter_id - 1
            if ahead < -1:
                kept.clear()
            elif ahead > 0:
                self.missed[rank] = self.missed.get(rank, 0) + ahead
        kept.append(passed)
        for listener in self.listeners:
            listener(passed)

    def since(self, after: Mapping[int, int], most: int) -> list[ForwardPass]:
        """The passes after a number, for each rank (all of a rank that is not in `after`), oldest first. At most
        `most` passes, evenly spread, and a heartbeat only if it is the last of all."""
        self.refresh()
        return [passed for rank, kept in self._ranks.items() for passed in _newer(kept, after.get(rank, -1), most)]

    def last(self) -> ForwardPass | None:
        """The latest of all ranks."""
        ends = [kept[-1] for kept in self._ranks.values() if kept]
        return max(ends, key=lambda passed: passed.at_s) if ends else None


def _newer(kept: deque[ForwardPass], after: int, most: int) -> list[ForwardPass]:
    if not kept:
        return []
    last = kept[-1]
    anew = after > last.counter_id
    newest_first = takewhile(lambda passed: anew or passed.counter_id > after, reversed(kept))
    passes = [passed for passed in newest_first if not passed.heartbeat][::-1]
    if len(passes) > most:
        passes = [passes[(n + 1) * len(passes) // most - 1] for n in range(most)]
    return [*passes, last] if last.heartbeat else passes
