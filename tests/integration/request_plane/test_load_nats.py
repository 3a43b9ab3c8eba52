"""Loads over a real NATS: one question, many answers; and the live view."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from nats.aio.client import Client

from dynamo_local.core.types import Load, Missing
from dynamo_local.errors import NatsUnavailable
from dynamo_local.transport.load import LoadPublisher, LoadReport, LoadSampler, LoadView
from dynamo_local.transport.nats import close_quietly, connect_nats
from tests.drivers.servers import RealNats

pytestmark = pytest.mark.infra

LOAD = Load(3, 8, 40, 100, 2, 0.4, 0.25, 1234, 12.5)


async def never_changes() -> None:
    await asyncio.Event().wait()


@pytest.fixture
async def nats(nats_server: RealNats) -> AsyncIterator[Client]:
    client = await connect_nats(nats_server.url, nats_server.access, name="test")
    yield client
    await close_quietly(client)


StartWorker = Callable[..., Awaitable[LoadPublisher]]


@pytest.fixture
async def start_worker(nats: Client, namespace: str) -> AsyncIterator[StartWorker]:
    """`await start_worker(n, source=…)` publishes as the n-th worker."""
    publishers = []

    async def start(n: int, source: Callable[[], Load] = lambda: LOAD, component: str = "VllmWorker") -> LoadPublisher:
        publisher = LoadPublisher(nats, namespace, component, f"w{n}", lambda: 2**62 + n, source, never_changes)
        await publisher.start()
        publishers.append(publisher)
        return publisher

    yield start
    for publisher in publishers:
        await publisher.close()


async def test_a_sample_has_every_workers_load(nats: Client, namespace: str, start_worker: StartWorker) -> None:
    for n in range(3):
        await start_worker(n)
    await start_worker(3, component="PrefillWorker")
    async with asyncio.timeout(5):
        reports = await LoadSampler(nats, namespace).sample(timeout_s=60, expected=4)
    assert sorted(reports) == ["w0", "w1", "w2", "w3"]
    report = reports["w3"]
    assert (report.load, report.component, report.instance_id) == (LOAD, "PrefillWorker", 2**62 + 3)
    assert 0 <= report.age_s < 5


async def test_what_a_worker_does_not_know_arrives_as_missing(
    nats: Client, namespace: str, start_worker: StartWorker
) -> None:
    unknown = Load(request_active_slots=3, gpu_cache_usage_perc=Missing("its metrics have no KV use"))
    assert unknown.numbers()["gpu_cache_usage_perc"] is None
    await start_worker(0, lambda: unknown)
    async with asyncio.timeout(5):
        reports = await LoadSampler(nats, namespace).sample(timeout_s=60, expected=1)
    load = reports["w0"].load
    assert (load.request_active_slots, load.gpu_cache_usage_perc) == (3, Missing("w0 does not know its KV use"))


async def test_a_silent_worker_is_absent(nats: Client, namespace: str, start_worker: StartWorker) -> None:
    def broken() -> Load:
        raise RuntimeError("no load yet")

    await start_worker(0)
    await start_worker(1, source=broken)
    reports = await LoadSampler(nats, namespace).sample(timeout_s=0.25, expected=2)
    assert list(reports) == ["w0"]


async def test_without_workers_a_sample_is_empty_at_once(nats: Client, namespace: str) -> None:
    async with asyncio.timeout(5):
        assert await LoadSampler(nats, namespace).sample(timeout_s=60, expected=3) == {}
        assert await LoadSampler(nats, namespace).sample(timeout_s=60, expected=0) == {}


async def test_garbage_among_the_answers_is_left_out(
    nats: Client, namespace: str, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    async def foreign(msg: object) -> None:
        for _ in range(3):
            await nats.publish(msg.reply, b"{}")  # type: ignore[attr-defined]

    subscription = await nats.subscribe(f"{namespace}.load", cb=foreign)
    await start_worker(0)
    sampler = LoadSampler(nats, namespace)
    assert list(await sampler.sample(timeout_s=0.25, expected=2)) == ["w0"]
    assert list(await sampler.sample(timeout_s=0.25, expected=2)) == ["w0"]
    assert caplog.text.count("something that is no load") == 1
    await subscription.unsubscribe()


async def test_other_namespaces_do_not_answer(nats: Client, namespace: str, start_worker: StartWorker) -> None:
    await start_worker(0)
    assert await LoadSampler(nats, f"{namespace}x").sample(timeout_s=0.25, expected=1) == {}


async def test_a_sample_without_nats_is_an_error(nats: Client, namespace: str) -> None:
    await close_quietly(nats)
    with pytest.raises(NatsUnavailable):
        await LoadSampler(nats, namespace).sample(expected=1)


async def test_a_view_follows_what_is_published(nats: Client, namespace: str, start_worker: StartWorker) -> None:
    view = LoadView(nats, namespace, "VllmWorker")
    await view.start()
    try:
        await start_worker(0)
        await start_worker(1, component="PrefillWorker")
        async with asyncio.timeout(5):
            while not (loads := view.loads()):
                await asyncio.sleep(0.005)
        assert list(loads) == [2**62]
        report = view.get(2**62)
        assert isinstance(report, LoadReport)
        assert report.load == LOAD
        assert isinstance(view.get(2**62 + 1), Missing)
    finally:
        await view.close()
