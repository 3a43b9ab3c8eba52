"""Thresholds that change at run time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from dynamo_local.core.routing.choice import RouterSettings
from dynamo_local.core.routing.disagg import DisaggSettings
from dynamo_local.errors import ConfigError
from dynamo_local.ports import DeleteEvent, KeyValue, PutEvent, SnapshotEvent, WatchEvent
from dynamo_local.transport.settings import (
    WatchedSettings,
    disagg_settings_key,
    encode_settings,
    parse_settings,
    router_settings_key,
)
from tests.drivers.eventually import eventually
from tests.fakes.infra.etcd import FakeEtcd

DEFAULT = DisaggSettings(max_local_prefill_length=100, max_prefill_queue_size=2)
KEY = disagg_settings_key("dynamo", "Qwen/Qwen3")


class ScriptedStore:
    """The watching part of `KeyValueStore`: what the test puts into `events` is what the watcher sees."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[WatchEvent | Exception] = asyncio.Queue()
        self.prefix = ""
        self.open_watches = 0

    async def watch_prefix(self, prefix: str) -> AsyncIterator[WatchEvent]:
        self.prefix = prefix
        self.open_watches += 1
        try:
            while True:
                event = await self.events.get()
                self.events.task_done()
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.open_watches -= 1

    def snapshot(self, *kvs: KeyValue) -> None:
        self.events.put_nowait(SnapshotEvent(kvs, 1))

    async def tell(self, event: WatchEvent) -> None:
        """Returns when the watcher has dealt with it."""
        self.events.put_nowait(event)
        await self.events.join()
        await asyncio.sleep(0)


def put(value: bytes, key: str = KEY) -> PutEvent:
    return PutEvent(KeyValue(key, value))


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()


@pytest.fixture
async def watched(store: ScriptedStore) -> AsyncIterator[WatchedSettings]:
    settings = WatchedSettings(store, KEY, DEFAULT)  # type: ignore[arg-type]
    store.snapshot()
    await settings.start()
    yield settings
    await settings.close()
    assert store.open_watches == 0


def test_the_key_is_the_one_of_the_issue() -> None:
    assert KEY == "dynamo/disagg_router/Qwen/Qwen3"


async def test_without_a_key_the_default_is_in_force(watched: WatchedSettings) -> None:
    assert watched.current == DEFAULT


async def test_what_is_there_at_the_start_is_used(store: ScriptedStore) -> None:
    settings = WatchedSettings(store, KEY, DEFAULT)  # type: ignore[arg-type]
    store.snapshot(
        KeyValue(KEY + "-8B", b'{"max_local_prefill_length": 1}'), KeyValue(KEY, encode_settings(DisaggSettings(7, 8)))
    )
    await settings.start()
    assert settings.current == DisaggSettings(7, 8)
    await settings.close()


async def test_a_change_is_seen(store: ScriptedStore, watched: WatchedSettings) -> None:
    await store.tell(put(b'{"max_local_prefill_length": 5, "max_prefill_queue_size": 6}'))
    assert watched.current == DisaggSettings(5, 6)
    await store.tell(put(b'{"max_prefill_queue_size": 9}'))
    assert watched.current == DisaggSettings(100, 9)


async def test_deleting_the_key_restores_the_default(store: ScriptedStore, watched: WatchedSettings) -> None:
    await store.tell(put(b'{"max_prefill_queue_size": 9}'))
    await store.tell(DeleteEvent(KEY))
    assert watched.current == DEFAULT
    await store.tell(put(b'{"max_prefill_queue_size": 9}'))
    await store.tell(SnapshotEvent((), 5))
    assert watched.current == DEFAULT


async def test_a_longer_key_is_somebody_elses(store: ScriptedStore, watched: WatchedSettings) -> None:
    await store.tell(put(b'{"max_prefill_queue_size": 9}', KEY + "-8B"))
    await store.tell(DeleteEvent(KEY + "-8B"))
    assert watched.current == DEFAULT


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"max_prefill_queue_size": -1}', "max_prefill_queue_size must be 0 or more, not -1"),
        (b'{"max_prefill_queue_size": 1.5}', "max_prefill_queue_size must be a whole number"),
        (b'{"max_prefill_queue_size": "3"}', "max_prefill_queue_size must be a whole number"),
        (b'{"max_prefill_queue_size": null}', "max_prefill_queue_size must be a whole number"),
        (b'{"max_prefil_queue_size": 3}', "did you mean 'max_prefill_queue_size'"),
        (b'{"x": 3}', "known are max_local_prefill_length, max_prefill_queue_size"),
    ],
)
async def test_a_value_that_cannot_be_used_changes_nothing(
    store: ScriptedStore, watched: WatchedSettings, caplog: pytest.LogCaptureFixture, value: bytes, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_settings(value, DEFAULT)
    await store.tell(put(b'{"max_prefill_queue_size": 4}'))
    with caplog.at_level(logging.WARNING):
        await store.tell(put(value))
    assert watched.current.max_prefill_queue_size == 4
    assert reason in caplog.text
    assert KEY in caplog.text
    await store.tell(put(b'{"max_prefill_queue_size": 5}'))
    assert watched.current.max_prefill_queue_size == 5


async def test_an_etcd_that_is_away_at_the_start_delays_nobody(
    store: ScriptedStore, caplog: pytest.LogCaptureFixture
) -> None:
    """`start` has a deadline; the value is taken when etcd answers."""
    settings = WatchedSettings(store, KEY, DEFAULT)  # type: ignore[arg-type]
    await settings.start(timeout_s=0.01)
    assert settings.current == DEFAULT
    assert "etcd did not answer" in caplog.text
    await store.tell(SnapshotEvent((KeyValue(KEY, b'{"max_prefill_queue_size": 4}'),), 1))
    assert settings.current.max_prefill_queue_size == 4
    await settings.close()


async def test_a_watch_that_breaks_is_begun_anew(
    store: ScriptedStore, watched: WatchedSettings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected error is logged; the settings stay live: nothing ends silently."""
    monkeypatch.setattr("dynamo_local.transport.settings.REWATCH_PAUSE_S", 0.0)
    store.events.put_nowait(RuntimeError("a bug in the client"))
    await store.tell(put(b'{"max_prefill_queue_size": 4}'))
    assert watched.current.max_prefill_queue_size == 4
    assert "a bug in the client" in caplog.text


async def test_the_routers_policy_is_watched_the_same_way(caplog: pytest.LogCaptureFixture) -> None:
    """`etcdctl put dynamo/router/sim-tiny '{"router": "kv"}'`; nonsense is refused, deletion undoes it."""
    kv = FakeEtcd()
    key = router_settings_key("dynamo", "sim-tiny")
    settings = WatchedSettings(kv, key, RouterSettings("round-robin"))
    await settings.start()
    await kv.put(key, b'{"router": "kv"}')
    await eventually(lambda: settings.current.router == "kv")
    for nonsense in (b'{"router": "kvv"}', b'{"routr": "kv"}'):
        caplog.clear()
        await kv.put(key, nonsense)
        await eventually(lambda: key in caplog.text)  # it is told that it is refused
        assert settings.current.router == "kv"
    await kv.delete(key)
    await eventually(lambda: settings.current.router == "round-robin")
    await settings.close()
    await kv.close()
