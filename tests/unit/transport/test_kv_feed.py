"""KV events from publisher to index, over a NATS in memory that loses messages, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dynamo_local.clock import run_virtual
from dynamo_local.core.routing.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored
from dynamo_local.core.routing.kv_index import KvIndex
from dynamo_local.core.types import instance_key
from dynamo_local.errors import WorkerLost
from dynamo_local.transport import kv_events as kv_publisher
from dynamo_local.transport.discovery import instance_to_value, make_instance
from dynamo_local.transport.kv_events import KvFeed, NatsKvEventPublisher, kv_events_subject
from tests.fakes.data_plane.endpoints import FakeEndpointClient
from tests.fakes.infra.etcd import FakeEtcd
from tests.fakes.infra.memory_nats import MemoryNats


class Host:
    """A Router's feed, and workers that can be started and ended."""

    def __init__(self) -> None:
        self.nats, self.kv = MemoryNats(), FakeEtcd()
        self.client = FakeEndpointClient({}, endpoint="kv_blocks")
        self.index = KvIndex()
        self.feed = KvFeed(self.nats.client(), self.kv, "dynamo", "VllmWorker", self.client, self.index)  # type: ignore[arg-type]
        self.publishers: dict[int, NatsKvEventPublisher] = {}

    async def worker(self, worker: int) -> NatsKvEventPublisher:
        publisher = NatsKvEventPublisher(self.nats.client(), "dynamo", "VllmWorker", lambda: worker)  # type: ignore[arg-type]
        publisher.block_size = 16
        await publisher.start()
        self.publishers[worker] = publisher
        self.client.add_instance(worker, lambda payload, _context: publisher.answer(payload))
        instance = make_instance("dynamo", "VllmWorker", "kv_blocks", worker)
        await self.kv.put(self._key(worker), instance_to_value(instance))
        return publisher

    async def gone(self, worker: int) -> None:
        await self.kv.delete(self._key(worker))
        self.client.remove_instance(worker)

    def _key(self, worker: int) -> str:
        return instance_key("dynamo", "VllmWorker", "kv_blocks", worker)

    async def knows(self, worker: int, blocks: set[int], within_s: float = 5.0) -> None:
        async with asyncio.timeout(within_s):
            while self.index.blocks(worker) != blocks:
                await asyncio.sleep(0.01)

    async def asked(self) -> int:
        return len(self.client.calls)


def on_a_host(main: Callable[[Host], Awaitable[None]]) -> None:
    """Run on virtual time; everything is closed behind."""

    async def run() -> None:
        host = Host()
        await host.feed.start()
        try:
            await main(host)
        finally:
            await host.feed.close()
            for publisher in host.publishers.values():
                await publisher.close()
            await host.client.close()
            await host.kv.close()

    run_virtual(run())


def test_events_arrive_in_order_and_nobody_is_asked_for_them() -> None:

    async def main(host: Host) -> None:
        publisher = await host.worker(7)
        await host.knows(7, set())
        await asyncio.sleep(0.1)
        publisher.publish((BlocksStored((1, 2, 3)), BlocksStored((4,), parent=3)))
        await host.knows(7, {1, 2, 3, 4})
        publisher.publish((BlocksRemoved((2, 9)),))
        await host.knows(7, {1, 3, 4})
        publisher.publish((AllBlocksCleared(), BlocksStored((5,))))
        await host.knows(7, {5})
        assert await host.asked() == 1
        assert host.feed.block_sizes == {7: 16}

    on_a_host(main)


def test_a_feed_that_comes_late_learns_what_is_there() -> None:

    async def main(host: Host) -> None:
        publisher = await host.worker(7)
        many = range(kv_publisher.BATCH_BLOCKS * 2 + 5)
        publisher.publish((BlocksStored(tuple(many)), BlocksRemoved((0,))))
        late = KvIndex()
        feed = KvFeed(host.nats.client(), host.kv, "dynamo", "VllmWorker", host.client, late)  # type: ignore[arg-type]
        await feed.start()
        assert await feed.synced(5.0)
        assert late.blocks(7) == set(many[1:])
        await feed.close()

    on_a_host(main)


def test_a_gap_is_replayed_from_the_workers_buffer() -> None:
    """What NATS lost is asked for as batches; the next message, or a sign of life a second later, shows the gap."""

    async def main(host: Host) -> None:
        publisher = await host.worker(7)
        publisher.publish((BlocksStored((1,)),))
        await host.knows(7, {1})
        host.nats.up = False
        for block in range(2, 12):
            publisher.publish((BlocksStored((block,)),))
            await asyncio.sleep(0.01)
        host.nats.up = True
        await host.knows(7, set(range(1, 12)), within_s=3.0)
        assert host.client.calls[-1].payload["seq"] == 1
        assert host.client.calls[-1].payload["epoch"]

    on_a_host(main)


def test_more_than_the_buffer_holds_rebuilds_the_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_publisher, "KEPT_BATCHES", 3)

    async def main(host: Host) -> None:
        publisher = await host.worker(7)
        publisher.publish((BlocksStored((1,)),))
        await host.knows(7, {1})
        host.nats.up = False
        for block in range(2, 12):
            publisher.publish((BlocksStored((block,)), BlocksRemoved((block - 1,))))
            await asyncio.sleep(0.01)
        host.nats.up = True
        await host.knows(7, {11}, within_s=3.0)
        items = [item async for item in publisher.answer({"epoch": "", "seq": 0})]
        assert (items[0]["replay"], items[1]) == (False, {"runs": [(11).to_bytes(8, "little")]})

    on_a_host(main)


def test_a_worker_that_is_gone_leaves_the_index_and_its_late_events_are_nothing() -> None:

    async def main(host: Host) -> None:
        one, two = await host.worker(1), await host.worker(2)
        one.publish((BlocksStored((5, 6)),))
        two.publish((BlocksStored((5,)),))
        await host.knows(1, {5, 6})
        await host.knows(2, {5})
        await host.gone(1)
        await host.knows(1, set())
        one.publish((BlocksStored((7,)),))
        await asyncio.sleep(2.5)
        assert host.index.find_matches([5, 6]) == {2: 1}
        assert host.feed.workers() == {2}
        assert host.feed.block_sizes == {2: 16}

    on_a_host(main)


def test_a_restarted_publisher_is_asked_for_all() -> None:

    async def main(host: Host) -> None:
        old = await host.worker(7)
        old.publish((BlocksStored((1, 2)),))
        await host.knows(7, {1, 2})
        await old.close()
        host.client.remove_instance(7)
        new = await host.worker(7)
        new.publish((BlocksStored((3,)),))
        await host.knows(7, {3})

    on_a_host(main)


def test_a_worker_that_cannot_be_asked_is_asked_again() -> None:
    """Its endpoint may be registered a moment later than it is seen; what comes meanwhile is not lost."""

    async def main(host: Host) -> None:
        host.client.refuse(7, WorkerLost("not registered (any more)"))
        publisher = await host.worker(7)
        await asyncio.sleep(0.6)
        publisher.publish((BlocksStored((1,)),))
        host.client.refuse(7, None)
        await host.knows(7, {1})

    on_a_host(main)


def test_garbage_on_the_subject_is_counted_and_harms_nothing() -> None:

    async def main(host: Host) -> None:
        publisher = await host.worker(7)
        stranger = host.nats.client()
        for data in (b"", b"\xc1", b"\x93\x01\x02\x03", b"{}", b"\x94\x07\xa1e\x02\x91\x92\xa6stored\xc4\x03abc"):
            await stranger.publish(kv_events_subject("dynamo", "VllmWorker"), data)
        publisher.publish((BlocksStored((1,)),))
        await host.knows(7, {1})
        assert host.feed.garbage == 5

    on_a_host(main)


async def test_an_answer_begins_where_the_asker_is() -> None:
    publisher = NatsKvEventPublisher(MemoryNats().client(), "dynamo", "VllmWorker", lambda: 7)  # type: ignore[arg-type]
    for block in (1, 2, 3):
        publisher.publish((BlocksStored((block,)),))

    async def answer(epoch: str, seq: int) -> list[Any]:
        return [item async for item in publisher.answer({"epoch": epoch, "seq": seq})]

    epoch = (await answer("", 0))[0]["epoch"]
    assert [len(await answer(epoch, seq)) for seq in (0, 1, 3)] == [4, 3, 1]
    assert (await answer(epoch, 4))[0]["replay"] is False
    assert (await answer("other", 1))[1:] == [{"runs": [block.to_bytes(8, "little") for block in (1, 2, 3)]}]
