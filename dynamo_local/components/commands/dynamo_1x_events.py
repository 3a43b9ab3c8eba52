"""A Dynamo worker's forward passes, from its event plane: over NATS, or over its own ZeroMQ socket.

On NATS a component's workers share a subject, so that each runner hears all of them and keeps its own worker's: some
fifty microseconds a message. Over ZeroMQ it hears that one alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

from dynamo_local.components.commands.metrics_text import Metrics
from dynamo_local.core.traffic import (
    ACCEPT_LENGTH,
    ACCEPT_LENGTH_METRICS,
    ENDED,
    HISTOGRAMS,
    HIT_RATE,
    HIT_RATE_METRIC,
    REQUESTS,
    STARTED,
)
from dynamo_local.errors import InfraUnavailable
from dynamo_local.ports import KeyValueStore
from dynamo_local.transport import passes as event_plane
from dynamo_local.transport.fpm import decode_pass
from dynamo_local.transport.nats import nats_call
from dynamo_local.transport.passes import PassRecorder

log = logging.getLogger("dynamo_local.worker")

STALE_S = 3.0
LOOK_EVERY_S = 2.0


class ForwardPasses:
    """Records one worker's passes. `queued` is None until there was one, and once the last is too old."""

    def __init__(
        self, nats: Any, kv: KeyValueStore, recorder: PassRecorder, namespace: str, component: str, worker_id: int
    ) -> None:
        self._nats = nats
        self._kv = kv
        self._recorder = recorder
        self._subject = event_plane.subject(namespace, component)
        self._worker_id = worker_id
        recorder.worker_id = str(worker_id)
        self._mark = recorder.worker_id.encode()

    async def start(self) -> None:
        """Listen on NATS. Raises `NatsUnavailable`."""
        with nats_call(self._nats, f"listen on {self._subject}"):
            await self._nats.subscribe(self._subject, cb=self._on_message)

    async def follow_zmq(self) -> None:
        """Listen to the worker's own sockets as soon as it has registered some; return where it uses NATS."""
        endpoints: list[str] = []
        while not endpoints:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._recorder.last() is not None:
                return
            try:
                kvs, _revision = await self._kv.get_prefix(event_plane.CHANNELS)
            except InfraUnavailable as error:
                log.debug("the event channels cannot be listed: %s", error)
                continue
            endpoints = event_plane.zmq_endpoints(kvs, self._worker_id)
        await self._listen(endpoints)

    @property
    def queued(self) -> int | None:
        """Requests that wait for a prefill there, as the worker said last."""
        last = self._recorder.last()
        if last is None or asyncio.get_running_loop().time() - last.at_s > STALE_S:
            return None
        return last.queued.num_prefill_requests

    async def _listen(self, endpoints: list[str]) -> None:
        import zmq
        import zmq.asyncio

        log.info("the worker's passes come over ZeroMQ from %s", ", ".join(endpoints))
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, event_plane.MAX_EVENT_BYTES)
            socket.subscribe(b"")
            for endpoint in endpoints:
                socket.connect(endpoint)
            while True:
                self._record(event_plane.unframe(await socket.recv_multipart()))
        finally:
            socket.close()
            context.term()

    async def _on_message(self, message: Any) -> None:
        if self._mark in message.data:  # else it is another worker's, and need not be read
            self._record(event_plane.unseal(message.data))

    def _record(self, payload: bytes | None) -> None:
        passed = None if payload is None else decode_pass(payload, asyncio.get_running_loop().time())
        if passed is not None and passed.engine.worker_id == self._recorder.worker_id:
            self._recorder.record(passed)


# --- Dynamo's own processes as planners see them: a worker's card, and metrics as counters.

FRONTEND = "dynamo_frontend_"
SPECULATION = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}


def card_key(instance_key: str) -> str:
    """Where the card of the instance with that key is."""
    return instance_key.replace("v1/instances/", "v1/mdc/", 1)


def limits_of(value: bytes) -> dict[str, int | None]:
    """The engine's limits in a card; empty where it is none (others write there, too)."""
    try:
        card = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    card = card.get("card_json", card) if isinstance(card, dict) else {}
    engine = card.get("runtime_config") if isinstance(card, dict) else None
    if not isinstance(engine, dict):
        return {}
    blocks, size = _count(engine.get("total_kv_blocks")), _count(card.get("kv_cache_block_size"))
    return {
        "max_num_batched_tokens": _count(engine.get("max_num_batched_tokens")),
        "max_num_seqs": _count(engine.get("max_num_seqs")),
        "max_kv_tokens": blocks * size if blocks and size else None,
        "context_length": _count(engine.get("context_length")) or _count(card.get("context_length")),
        "dp_size": _count(engine.get("data_parallel_size")) or 1,
    }


def frontend_counters(metrics: Metrics) -> dict[str, float]:
    """A frontend's counters, under the names of `core.traffic`. Before its first request it has no series: 0."""
    started = metrics.sum(FRONTEND + STARTED)
    ended = metrics.sum(FRONTEND + ENDED)
    counters = {REQUESTS: (ended or 0.0) if started is None else started}
    sources = {name: FRONTEND + suffix for name, suffix in HISTOGRAMS.items()} | {HIT_RATE: HIT_RATE_METRIC}
    for name, metric in sources.items():
        for part in ("sum", "count"):
            counters[f"{name}_{part}"] = metrics.sum(f"{metric}_{part}") or 0.0
    return counters


def worker_counters(metrics: Metrics, before: Mapping[str, float]) -> dict[str, float]:
    """A worker's counters of its engine's speculation. `before` is the last answer of this function.

    vLLM counts it. SGLang and TRT-LLM tell a mean of just now: each look at it is one observation.
    """
    found = {name: metrics.sum(metric) for name, metric in SPECULATION.items()}
    counters = {name: value for name, value in found.items() if value is not None}
    mean = metrics.first(*ACCEPT_LENGTH_METRICS)
    looks = (0.0, 0.0) if mean is None or mean < 1.0 else (mean, 1.0)  # 0: nothing was speculated yet
    for part, more in zip(("sum", "count"), looks, strict=True):
        name = f"{ACCEPT_LENGTH}_{part}"
        if more or name in before:
            counters[name] = before.get(name, 0.0) + more
    return counters


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
