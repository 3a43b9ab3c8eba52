"""Dynamo's workers as they register on Kubernetes, and the passes of their engines."""

from __future__ import annotations

from typing import Any

from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.transport import passes as event_plane
from dynamo_local.transport.fpm import encode_pass

NAMESPACE = "default-serving"
"""The namespace within Dynamo of the graph `serving` in the namespace `default`."""
KV_BLOCKS, BLOCK = 1000, 16


def worker_metadata(
    name: str,
    instance: int,
    component: str = "backend",
    *,
    namespace: str = NAMESPACE,
    blocks: int | None = KV_BLOCKS,
    channels: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Its `DynamoWorkerMetadata`: an endpoint, a model card and event channels, as Dynamo 1.2 writes them."""
    place = {"namespace": namespace, "component": component, "endpoint": "generate", "instance_id": instance}
    engine = {"total_kv_blocks": blocks, "max_num_seqs": 64, "max_num_batched_tokens": 8192}
    card = {"display_name": "m", "kv_cache_block_size": BLOCK, "context_length": 40960, "runtime_config": engine}
    key = f"{namespace}/{component}/generate/{instance:x}"
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoWorkerMetadata",
        "metadata": {"name": name},
        "spec": {
            "data": {
                "endpoints": {key: {"type": "Endpoint", **place, "transport": {"tcp": "10.0.0.1:9999/x"}}},
                "model_cards": {key: {"type": "Model", **place, "card_json": card, "model_suffix": None}},
                "event_channels": channels or {},
            }
        },
    }


def channel(
    address: str,
    component: str = "backend",
    *,
    namespace: str = NAMESPACE,
    topic: str = event_plane.TOPIC,
    kind: str = "Zmq",
    scope: str | None = None,
) -> dict[str, Any]:
    """The event channel of a worker that publishes there. `scope`: as versions after 1.2 write it, of a `component` or
    of an `endpoint`."""
    place: dict[str, Any] = {"namespace": namespace, "component": component}
    if scope == "endpoint":
        place = {"scope": {"kind": scope, "endpoint": {**place, "name": "generate"}}}
    elif scope is not None:
        place = {"scope": {"kind": scope, **place}}
    config = {"endpoint": address} if kind == "Zmq" else {"subject_prefix": address}
    told = {"type": "EventChannel", **place, "topic": topic, "instance_id": 7}
    return {f"{topic}/{address}": {**told, "transport": {"kind": kind, "config": config}}}


def sealed(told: ForwardPass, number: int) -> bytes:
    return event_plane.seal(encode_pass(told), publisher_id=7, sequence=number, wall_s=0.0)


def framed(message: bytes) -> list[bytes]:
    return [event_plane.TOPIC.encode(), bytes(8), bytes(8), b"\x01" + len(message).to_bytes(4, "big") + message]


def told_pass(
    worker: str, at_s: float, *, number: int = 1, kv: int = 0, running: int = 0, waits: int = 0
) -> ForwardPass:
    """A pass of a decode engine with so much KV, or of a prefill engine with so many waiting requests."""
    return ForwardPass(
        EngineId(worker),
        number,
        0.01,
        Requests(num_decode_requests=running, sum_decode_kv_tokens=kv),
        Requests(num_prefill_requests=waits, sum_prefill_tokens=100 * waits),
        at_s,
    )
