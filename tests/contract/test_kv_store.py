"""One suite for the fake etcd and the real one: what `ports.KeyValueStore` promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest

from dynamo_local.errors import EtcdUnavailable, LeaseNotFound
from dynamo_local.ports import DeleteEvent, KeyValueStore, PutEvent, SnapshotEvent, WatchEvent
from dynamo_local.transport.etcd import EtcdStore
from tests.drivers.servers import RealEtcd
from tests.fakes.infra.etcd import FakeEtcd

EVENT_DEADLINE_S = 5.0


@dataclass
class Subject:
    """A store under test, and how to do bad things to its server."""

    kv: KeyValueStore
    go_away: Callable[[], Awaitable[None]]
    come_back: Callable[[], Awaitable[None]]
    lose_data: Callable[[], Awaitable[None]]


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.infra)])
async def kv(request: pytest.FixtureRequest) -> AsyncIterator[KeyValueStore]:
    store: KeyValueStore
    if request.param == "fake":
        store = FakeEtcd()
    else:
        server: RealEtcd = request.getfixturevalue("etcd_server")
        store = await EtcdStore.connect(server.endpoint)
    yield store
    await store.close()


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.infra)])
async def subject(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    if request.param == "fake":
        fake = FakeEtcd()

        async def fake_away() -> None:
            fake.available = False

        async def fake_back() -> None:
            fake.restart()

        async def fake_loss() -> None:
            fake.restart(lose_data=True)

        yield Subject(fake, fake_away, fake_back, fake_loss)
        await fake.close()
        return
    server = RealEtcd(tmp_path)
    await server.start()
    store = await EtcdStore.connect(server.endpoint)

    async def real_loss() -> None:
        await server.restart(lose_data=True)

    try:
        yield Subject(store, server.kill, server.start, real_loss)
    finally:
        await store.close()
        server.stop_now()


async def following(events: AsyncIterator[WatchEvent]) -> WatchEvent:
    return await asyncio.wait_for(anext(events), EVENT_DEADLINE_S)


async def settled(kv: KeyValueStore) -> None:
    async with asyncio.timeout(EVENT_DEADLINE_S):
        while True:
            try:
                await kv.revision()
            except EtcdUnavailable:
                await asyncio.sleep(0.02)
            else:
                return


async def test_what_was_put_is_got(kv: KeyValueStore, namespace: str) -> None:
    assert await kv.get(f"{namespace}/a") is None
    revision = await kv.put(f"{namespace}/a", b"\x00\xff1")
    found = await kv.get(f"{namespace}/a")
    assert found is not None
    assert (found.key, found.value, found.lease_id, found.mod_revision) == (f"{namespace}/a", b"\x00\xff1", 0, revision)
    assert await kv.revision() == revision


async def test_a_prefix_lists_its_keys_in_order_and_no_others(kv: KeyValueStore, namespace: str) -> None:
    for key in ("b/2", "b/1", "b", "b0", "c/1"):
        revision = await kv.put(f"{namespace}/{key}", key.encode())
    kvs, listed_at = await kv.get_prefix(f"{namespace}/b/")
    assert [(item.key, item.value) for item in kvs] == [(f"{namespace}/b/1", b"b/1"), (f"{namespace}/b/2", b"b/2")]
    assert listed_at == revision


async def test_several_keys_come_in_one_revision_or_not_at_all(kv: KeyValueStore, namespace: str) -> None:
    lease_id = await kv.grant(10)
    await kv.put(f"{namespace}/a", b"old")
    revision = await kv.put_all({f"{namespace}/a": b"1", f"{namespace}/b": b"2"}, lease_id)
    kvs, listed_at = await kv.get_prefix(f"{namespace}/")
    assert [(item.key, item.value, item.lease_id) for item in kvs] == [
        (f"{namespace}/a", b"1", lease_id),
        (f"{namespace}/b", b"2", lease_id),
    ]
    assert {item.mod_revision for item in kvs} == {revision} == {listed_at}
    await kv.revoke(lease_id)
    with pytest.raises(LeaseNotFound):
        await kv.put_all({f"{namespace}/c": b"3", f"{namespace}/d": b"4"}, lease_id)
    assert (await kv.get_prefix(f"{namespace}/"))[0] == []


async def test_delete_says_whether_the_key_was_there(kv: KeyValueStore, namespace: str) -> None:
    await kv.put(f"{namespace}/gone", b"x")
    assert await kv.delete(f"{namespace}/gone") is True
    assert await kv.delete(f"{namespace}/gone") is False


async def test_revoking_a_lease_deletes_its_keys(kv: KeyValueStore, namespace: str) -> None:
    lease_id = await kv.grant(10)
    assert lease_id != 0
    await kv.put(f"{namespace}/leased", b"x", lease_id)
    await kv.put(f"{namespace}/free", b"x")
    found = await kv.get(f"{namespace}/leased")
    assert found is not None
    assert found.lease_id == lease_id
    await kv.revoke(lease_id)
    await kv.revoke(lease_id)
    kvs, _ = await kv.get_prefix(f"{namespace}/")
    assert [item.key for item in kvs] == [f"{namespace}/free"]


async def test_a_lease_that_is_gone_is_a_typed_error(kv: KeyValueStore, namespace: str) -> None:
    lease_id = await kv.grant(10)
    assert await kv.keepalive(lease_id) == 10
    await kv.revoke(lease_id)
    with pytest.raises(LeaseNotFound):
        await kv.keepalive(lease_id)
    with pytest.raises(LeaseNotFound):
        await kv.put(f"{namespace}/x", b"x", lease_id)
    assert await kv.get(f"{namespace}/x") is None


async def test_a_lease_expires_unless_it_is_kept_alive(kv: KeyValueStore, namespace: str) -> None:
    short, kept = await kv.grant(1), await kv.grant(1)
    await kv.put(f"{namespace}/kept", b"x", kept)
    async with aclosing(kv.watch_prefix(f"{namespace}/short")) as events:  # type: ignore[type-var]
        await following(events)
        await kv.put(f"{namespace}/short", b"x", short)
        assert isinstance(await following(events), PutEvent)
        next_event = asyncio.ensure_future(following(events))
        while not next_event.done():
            await kv.keepalive(kept)
            await asyncio.wait({next_event}, timeout=0.2)
        assert next_event.result() == DeleteEvent(f"{namespace}/short")
    assert await kv.get(f"{namespace}/kept") is not None


async def test_a_watch_begins_with_the_truth_and_goes_on_with_changes(kv: KeyValueStore, namespace: str) -> None:
    await kv.put(f"{namespace}/w/old", b"0")
    async with aclosing(kv.watch_prefix(f"{namespace}/w/")) as events:  # type: ignore[type-var]
        snapshot = await following(events)
        assert isinstance(snapshot, SnapshotEvent)
        assert [(item.key, item.value) for item in snapshot.kvs] == [(f"{namespace}/w/old", b"0")]
        lease_id = await kv.grant(10)
        await kv.put(f"{namespace}/w/new", b"1", lease_id)
        await kv.put(f"{namespace}/elsewhere", b"1")
        await kv.put(f"{namespace}/w/old", b"2")
        await kv.delete(f"{namespace}/w/old")
        await kv.revoke(lease_id)
        seen = [await following(events) for _ in range(4)]
    puts = [(event.kv.key, event.kv.value, event.kv.lease_id) for event in seen if isinstance(event, PutEvent)]
    assert puts == [(f"{namespace}/w/new", b"1", lease_id), (f"{namespace}/w/old", b"2", 0)]
    assert seen[2:] == [DeleteEvent(f"{namespace}/w/old"), DeleteEvent(f"{namespace}/w/new")]


async def test_nothing_is_missed_between_snapshot_and_changes(kv: KeyValueStore, namespace: str) -> None:
    writers = asyncio.gather(*(kv.put(f"{namespace}/r/{n:03}", b"") for n in range(100)))
    keys: set[str] = set()
    async with aclosing(kv.watch_prefix(f"{namespace}/r/")) as events:  # type: ignore[type-var]
        while len(keys) < 100:
            event = await following(events)
            assert isinstance(event, SnapshotEvent | PutEvent)
            news = {kv.key for kv in event.kvs} if isinstance(event, SnapshotEvent) else {event.kv.key}
            assert not news & keys
            keys |= news
    await writers


async def test_closing_a_watch_ends_it(kv: KeyValueStore, namespace: str) -> None:
    before = asyncio.all_tasks()
    seen = asyncio.Event()

    async def read() -> None:
        async for _ in kv.watch_prefix(f"{namespace}/"):
            seen.set()

    reader = asyncio.create_task(read())
    await kv.put(f"{namespace}/x", b"")
    await asyncio.wait_for(seen.wait(), EVENT_DEADLINE_S)  # the first is what was there
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    async with asyncio.timeout(EVENT_DEADLINE_S):
        while asyncio.all_tasks() - before:
            await asyncio.sleep(0.01)
    assert await kv.get(f"{namespace}/x") is not None


async def test_closing_the_store_ends_its_watches(kv: KeyValueStore, namespace: str) -> None:
    events = kv.watch_prefix(f"{namespace}/")
    await following(events)
    ended = asyncio.ensure_future(anext(events, None))
    await asyncio.sleep(0.01)
    await kv.close()
    assert await asyncio.wait_for(ended, EVENT_DEADLINE_S) is None
    with pytest.raises(EtcdUnavailable):
        await kv.get("x")


async def test_a_store_that_is_away_is_a_typed_error_in_time(subject: Subject) -> None:
    lease_id = await subject.kv.grant(10)
    await subject.kv.put("stays", b"x", lease_id)
    await subject.go_away()
    calls = (
        lambda: subject.kv.get("a"),
        lambda: subject.kv.get_prefix("a"),
        lambda: subject.kv.put("a", b""),
        lambda: subject.kv.put_all({"a": b"", "b": b""}),
        lambda: subject.kv.delete("a"),
        lambda: subject.kv.revision(),
        lambda: subject.kv.grant(10),
        lambda: subject.kv.keepalive(lease_id),
        lambda: subject.kv.revoke(lease_id),
    )
    for call in calls:
        with pytest.raises(EtcdUnavailable):
            await asyncio.wait_for(call(), EVENT_DEADLINE_S)
    await subject.come_back()
    await settled(subject.kv)
    assert await subject.kv.keepalive(lease_id) == 10
    assert await subject.kv.get("stays") is not None


async def test_a_watch_survives_a_restart_and_says_that_it_was_stale(subject: Subject) -> None:
    lost = asyncio.Event()
    await subject.kv.put("p/kept", b"1")
    async with aclosing(subject.kv.watch_prefix("p/", lost.set)) as events:  # type: ignore[type-var]
        await following(events)
        again = asyncio.ensure_future(following(events))
        await asyncio.sleep(0)
        await subject.go_away()
        await asyncio.wait_for(lost.wait(), EVENT_DEADLINE_S)
        assert not again.done()
        await subject.come_back()
        snapshot = await again
        assert isinstance(snapshot, SnapshotEvent)
        assert [item.key for item in snapshot.kvs] == ["p/kept"]
        await settled(subject.kv)
        await subject.kv.put("p/new", b"2")
        event = await following(events)
        assert isinstance(event, PutEvent)
        assert event.kv.key == "p/new"


async def test_a_watch_survives_the_loss_of_all_data(subject: Subject) -> None:
    for number in range(20):
        await subject.kv.put(f"p/{number}", b"1")
    async with aclosing(subject.kv.watch_prefix("p/")) as events:  # type: ignore[type-var]
        snapshot = await following(events)
        assert isinstance(snapshot, SnapshotEvent)
        again = asyncio.ensure_future(following(events))
        await asyncio.sleep(0)
        await subject.lose_data()
        emptied = await again
        assert isinstance(emptied, SnapshotEvent)
        assert emptied.kvs == ()
        assert emptied.revision < snapshot.revision
        await settled(subject.kv)
        await subject.kv.put("p/new", b"2")
        event = await following(events)
        assert isinstance(event, PutEvent)
        assert event.kv.key == "p/new"


async def test_a_store_remembers_its_own_history_only(subject: Subject) -> None:
    kv = subject.kv
    written = await kv.put("h", b"1")
    await kv.put("h", b"2")
    await kv.delete("h")
    assert await kv.remembers("h", written) is True
    await subject.lose_data()
    await settled(kv)
    assert await kv.remembers("h", written) is False
    for number in range(10):
        await kv.put("other", str(number).encode())
    assert await kv.revision() > written
    assert await kv.remembers("h", written) is False
