"""Tests what a planner is told of Dynamo's own processes: passes from the event plane, cards, metrics as counters."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from dynamo_local.components.commands import dynamo_1x_events as events
from dynamo_local.components.commands.dynamo_1x_events import (
    ForwardPasses,
    card_key,
    frontend_counters,
    limits_of,
    worker_counters,
)
from dynamo_local.components.commands.metrics_text import Metrics
from dynamo_local.core.passes import EngineId
from dynamo_local.transport.fpm import encode_pass
from dynamo_local.transport.passes import PassRecorder, seal, subject
from tests.drivers.served import auntil
from tests.fakes.data_plane.passes import WORKER, passed
from tests.fakes.infra.etcd import FakeEtcd
from tests.fakes.infra.memory_nats import MemoryNats

OTHER = "5"


class EventPlane:
    """The passes of one worker, heard over a NATS in memory."""

    def __init__(self, etcd: FakeEtcd | None = None, worker_id: int = int(WORKER)) -> None:
        self.server = MemoryNats()
        self.client: Any = self.server.client()
        self.recorder = PassRecorder()
        self.etcd: Any = etcd or FakeEtcd()
        self.passes = ForwardPasses(self.client, self.etcd, self.recorder, "dynamo", "prefill", worker_id)

    async def send(self, data: bytes) -> None:
        await self.client.publish(subject("dynamo", "prefill"), data)
        await asyncio.sleep(0.01)


def message(worker: str, number: int) -> bytes:
    return seal(encode_pass(passed(number, worker=worker)), publisher_id=1, sequence=number, wall_s=1.0)


async def test_of_a_components_workers_each_runner_keeps_its_own() -> None:
    plane = EventPlane()
    await plane.passes.start()
    for number in (1, 2, 5):
        await plane.send(message(WORKER, number))
        await plane.send(message(OTHER, number))
    assert [(one.engine, one.counter_id) for one in plane.recorder.since({}, 64)] == [
        (EngineId(WORKER), 1),
        (EngineId(WORKER), 2),
        (EngineId(WORKER), 5),
    ]
    assert plane.recorder.missed == {0: 2}
    await plane.etcd.close()


async def test_what_waits_for_a_prefill_is_unknown_until_it_is_told() -> None:
    plane = EventPlane()
    await plane.passes.start()
    assert plane.passes.queued is None
    for nonsense in (b"", b"\xc1", msgspec.msgpack.encode({"payload": 8 * 2**30}), message(OTHER, 1)):
        await plane.send(nonsense)
    assert plane.passes.queued is None
    await plane.send(message(WORKER, 1))
    assert plane.passes.queued == 0
    await plane.etcd.close()


async def test_a_worker_that_uses_zeromq_is_heard_on_its_own_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    import zmq
    import zmq.asyncio

    monkeypatch.setattr(events, "LOOK_EVERY_S", 0.02)
    etcd = FakeEtcd()
    lease = await etcd.grant(60)
    plane = EventPlane(etcd, lease)
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.PUB)
    publisher.setsockopt(zmq.LINGER, 0)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    following = asyncio.create_task(plane.passes.follow_zmq())
    where = {"transport": {"kind": "zmq", "endpoint": f"tcp://127.0.0.1:{port}"}}
    key = f"v1/event_channels/dynamo/prefill/forward-pass-metrics/{lease:x}"
    await etcd.put(key, json.dumps(where).encode(), lease)

    async def publish() -> None:
        for number in range(1, 10_000):  # whoever subscribes hears what comes after
            sealed = message(str(lease), number)
            head = b"\x01" + len(sealed).to_bytes(4, "big")
            await publisher.send_multipart([b"forward-pass-metrics", bytes(8), bytes(8), head + sealed])
            await asyncio.sleep(0.01)

    publishing = asyncio.create_task(publish())
    await auntil(lambda: len(plane.recorder.since({}, 64)) > 3)
    for task in (publishing, following):
        task.cancel()
        await asyncio.wait({task})
    publisher.close()
    context.term()
    await plane.etcd.close()


async def test_a_worker_on_nats_is_not_looked_for_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LOOK_EVERY_S", 0.01)
    plane = EventPlane()
    plane.recorder.record(passed(1))
    async with asyncio.timeout(5.0):
        await plane.passes.follow_zmq()
    await plane.etcd.close()


# --- cards -----------------------------------------------------------------------------------------

CARD = {
    "display_name": "tiny",
    "kv_cache_block_size": 64,
    "context_length": 4096,
    "runtime_config": {"total_kv_blocks": 1000, "max_num_seqs": 256, "max_num_batched_tokens": 8192},
}


def test_a_card_stands_beside_its_instance() -> None:
    assert card_key("v1/instances/dynamo/backend/generate/2a") == "v1/mdc/dynamo/backend/generate/2a"


@pytest.mark.parametrize("card", [CARD, {"type": "Model", "card_json": CARD}], ids=["bare", "in an instance"])
def test_a_card_tells_the_engines_limits(card: dict[str, Any]) -> None:
    assert limits_of(json.dumps(card).encode()) == {
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
        "max_kv_tokens": 64_000,
        "context_length": 4096,
        "dp_size": 1,
    }


@pytest.mark.parametrize("value", [b"", b"[]", b"{}", b'{"runtime_config": 3}', b"[" * 100_000, b'{"card_json": 1}'])
def test_what_is_no_card_tells_nothing(value: bytes) -> None:
    assert limits_of(value) == {}


def test_limits_that_cannot_be_are_unknown() -> None:
    broken = {**CARD, "runtime_config": {"total_kv_blocks": "many", "max_num_seqs": -1, "max_num_batched_tokens": True}}
    found = limits_of(json.dumps(broken).encode())
    assert (found["max_num_seqs"], found["max_num_batched_tokens"], found["max_kv_tokens"]) == (None, None, None)


# --- metrics ---------------------------------------------------------------------------------------

FRONTEND = """\
dynamo_frontend_requests_total{model="a"} 5
dynamo_frontend_requests_total{model="b"} 2
dynamo_frontend_time_to_first_token_seconds_sum{model="a"} 1.5
dynamo_frontend_time_to_first_token_seconds_count{model="a"} 5
dynamo_component_router_kv_hit_rate_sum 1.25
dynamo_component_router_kv_hit_rate_count 5
"""


def test_a_frontends_metrics_are_counters() -> None:
    counters = frontend_counters(Metrics(FRONTEND))
    assert (counters["requests"], counters["ttft_s_sum"], counters["ttft_s_count"]) == (7.0, 1.5, 5.0)
    assert (counters["hit_rate_sum"], counters["hit_rate_count"]) == (1.25, 5.0)


def test_requests_count_when_they_begin_where_that_is_told() -> None:
    text = FRONTEND + 'dynamo_frontend_requests_started_total{model="a"} 9\n'
    assert frontend_counters(Metrics(text))["requests"] == 9.0


def test_a_frontend_without_a_request_yet_has_counted_none() -> None:
    assert set(frontend_counters(Metrics("")).values()) == {0.0}


def test_a_worker_tells_its_speculation_where_it_has_some() -> None:
    text = "vllm:spec_decode_num_drafts_total 10\nvllm:spec_decode_num_accepted_tokens_total 15\n"
    assert worker_counters(Metrics(text), {}) == {"drafts": 10.0, "accepted": 15.0}
    assert worker_counters(Metrics(""), {}) == {}


@pytest.mark.parametrize("metric", ["sglang:spec_accept_length", "trtllm_spec_decode_acceptance_length"])
def test_each_look_at_a_mean_accept_length_is_one_observation(metric: str) -> None:
    """Before anything was speculated it is 0, which is none; and what was counted stays where it is gone."""
    counted: dict[str, float] = {}
    for mean in (0.0, 2.0, 3.5):
        counted = worker_counters(Metrics(f"{metric} {mean}\n"), counted)
    assert counted == worker_counters(Metrics(""), counted) == {"accept_length_sum": 5.5, "accept_length_count": 2.0}
