"""Dynamo's event plane, as far as forward passes travel on it: subjects, envelopes, and the frames of its ZMQ form.

On NATS the subject is `namespace.<ns>.component.<component>.endpoint.<endpoint>.forward-pass-metrics` (until Dynamo 1.2
without the endpoint); a message is one envelope: `{"publisher_id", "sequence", "published_at" (ms), "topic", "payload",
"published_at_ns"}`; its payload is a pass (`fpm`). On ZMQ each publisher has a socket of its own, and a message four
frames: the topic, publisher and sequence (8 bytes each, big endian), and the envelope behind a head of 5 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from dynamo_local.ports import KeyValue
from dynamo_local.runtime.decoding import UNREADABLE

TOPIC = "forward-pass-metrics"
CHANNELS = "v1/event_channels/"
"""Where Dynamo's publishers register; each key is under its process's lease."""
MAX_BYTES = 64 * 1024
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


_decoder = msgspec.msgpack.Decoder(_Received)


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
    if len(data) > MAX_BYTES:
        return None
    try:
        payload = _decoder.decode(data).payload
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
