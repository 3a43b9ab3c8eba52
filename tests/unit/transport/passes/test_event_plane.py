"""Envelopes and channels of Dynamo's event plane."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from dynamo_local.ports import KeyValue
from dynamo_local.transport import passes as event_plane
from dynamo_local.transport.passes import seal, subject, unframe, unseal, zmq_endpoints


def test_the_subject_is_dynamos() -> None:
    assert subject("dynamo", "backend") == "namespace.dynamo.component.backend.endpoint.generate.forward-pass-metrics"


def test_an_envelope_has_what_dynamo_reads() -> None:
    sealed = seal(b"pass", publisher_id=7, sequence=3, wall_s=1_700_000_000.5)
    assert msgspec.msgpack.decode(sealed) == {
        "publisher_id": 7,
        "sequence": 3,
        "published_at": 1_700_000_000_500,
        "topic": "forward-pass-metrics",
        "payload": b"pass",
        "published_at_ns": 1_700_000_000_500_000_000,
    }
    assert unseal(sealed) == b"pass"


def test_a_payload_may_be_a_list_of_numbers() -> None:
    assert unseal(msgspec.msgpack.encode({"payload": [1, 2, 255]})) == b"\x01\x02\xff"


@pytest.mark.parametrize("payload", [8 * 2**30, [256], [[]], "text", None], ids=str)
def test_a_hostile_payload_is_none(payload: Any) -> None:
    """`bytes` of a number would be as many zeros: one message of ten bytes, and eight gigabytes."""
    assert unseal(msgspec.msgpack.encode({"payload": payload})) is None


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91" * 60_000, b"\x80", b"x" * (event_plane.MAX_EVENT_BYTES + 1)])
def test_bytes_of_strangers_are_no_envelope(data: bytes) -> None:
    assert unseal(data) is None


def test_over_zeromq_the_envelope_stands_behind_a_head() -> None:
    sealed = seal(b"pass", publisher_id=7, sequence=3, wall_s=1.0)
    head = b"\x01" + len(sealed).to_bytes(4, "big")
    assert unframe([b"forward-pass-metrics", bytes(8), bytes(8), head + sealed]) == b"pass"
    assert unframe([b"forward-pass-metrics", head + sealed]) is None
    assert unframe([b"", b"", b"", b"\x01"]) is None


def test_a_workers_sockets_are_found_by_its_lease() -> None:
    def channel(lease: int, topic: str, value: Any) -> KeyValue:
        return KeyValue(f"v1/event_channels/dynamo/backend/{topic}/{lease:x}", json.dumps(value).encode(), lease)

    mine = {"transport": {"Zmq": {"endpoint": "tcp://127.0.0.1:5001"}}}
    kvs = [
        channel(7, "forward-pass-metrics", mine),
        channel(7, "kv-events", {"transport": {"Zmq": {"endpoint": "tcp://127.0.0.1:5002"}}}),
        channel(8, "forward-pass-metrics", {"transport": {"Zmq": {"endpoint": "tcp://127.0.0.1:5003"}}}),
        channel(7, "forward-pass-metrics", {"transport": {"Nats": {"subject_prefix": "namespace.dynamo"}}}),
        KeyValue("v1/event_channels/dynamo/backend/forward-pass-metrics/7", b"[" * 100_000, 7),
    ]
    assert zmq_endpoints(kvs, 7) == ["tcp://127.0.0.1:5001"]
