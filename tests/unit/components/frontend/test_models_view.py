"""A model is listed from its first ready worker to its last."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable

import pytest

from dynamo_local.components.models_view import (
    Availability,
    ModelCard,
    ModelsView,
    ServedModel,
    model_key_prefix,
    models_prefix,
)
from dynamo_local.errors import EtcdUnavailable
from dynamo_local.ports import DeleteEvent, KeyValue, PutEvent, SnapshotEvent, WatchEvent

Serve = Callable[..., str]


class ScriptedStore:
    """The one method of `KeyValueStore` that the view uses; each watch plays the next script."""

    def __init__(self, *scripts: list[WatchEvent | Exception]) -> None:
        self.scripts = list(scripts)
        self.prefixes: list[str] = []
        self.closed = 0

    async def watch_prefix(self, prefix: str) -> AsyncIterator[WatchEvent]:
        self.prefixes.append(prefix)
        try:
            for event in self.scripts.pop(0):
                if isinstance(event, Exception):
                    raise event
                yield event
            await asyncio.Event().wait()
        finally:
            self.closed += 1


def card(name: str = "m", max_model_len: int = 100, created: float = 5.5) -> ModelCard:
    """A model card of a decode worker."""
    return ModelCard(name, "VllmWorker", "generate", max_model_len, created)


def test_a_model_comes_with_its_first_worker_and_goes_with_its_last(serve_model: Serve):
    view = ModelsView("dynamo")
    assert (view.models(), view.availability("m")) == ([], Availability.UNKNOWN)
    first = serve_model(view, "m", 1, created=20.0, max_model_len=300)
    assert view.get("m") == ServedModel("m", 20, 300, 1, ("VllmWorker",))
    second = serve_model(view, "m", 2, created=10.5, max_model_len=200)
    assert view.get("m") == ServedModel("m", 10, 200, 2, ("VllmWorker",))
    view.apply(DeleteEvent(first))
    assert view.availability("m") is Availability.READY
    view.apply(DeleteEvent(second))
    assert (view.models(), view.availability("m")) == ([], Availability.GONE)


def test_an_expected_model_is_known_before_its_first_worker():
    assert ModelsView("dynamo", expected="m").availability("m") is Availability.GONE
    several = ModelsView("dynamo", expected=("n", "m"))
    assert (several.availability("n"), several.absent()) == (Availability.GONE, ["m", "n"])


def test_a_snapshot_is_the_whole_truth(serve_model: Serve):
    """What is not in it went away unseen, as after a restart of etcd."""
    view = ModelsView("dynamo")
    serve_model(view, "old", 1)
    view.apply(SnapshotEvent((KeyValue("dynamo/models/new:2", card("new").encode(), 2),), 9))
    assert [model.name for model in view.models()] == ["new"]
    assert view.availability("old") is Availability.GONE


def test_models_are_listed_by_name(serve_model: Serve):
    view = ModelsView("dynamo")
    serve_model(view, "b", 1)
    serve_model(view, "org/a:tag", 2)
    serve_model(view, "a", 3)
    assert [model.name for model in view.models()] == ["a", "b", "org/a:tag"]


def test_a_broken_card_is_named_and_left_out(caplog: pytest.LogCaptureFixture):
    view = ModelsView("dynamo")
    with caplog.at_level(logging.ERROR):
        for value in (b"{", b"\xff", b'{"name": "m"}'):
            view.apply(PutEvent(KeyValue("dynamo/models/m:1", value)))
    assert view.models() == []
    assert caplog.text.count("dynamo/models/m:1") == 3


def test_the_keys_and_the_card_are_as_the_workers_write_them():
    assert models_prefix("ns") == "ns/models/"
    assert model_key_prefix("ns", "org/m") == "ns/models/org/m"
    assert json.loads(card().encode()) == {
        "name": "m",
        "component": "VllmWorker",
        "endpoint": "generate",
        "max_model_len": 100,
        "created": 5.5,
    }


async def test_the_view_follows_the_store_through_a_failed_watch(monkeypatch: pytest.MonkeyPatch):
    """A known model stays until the store says otherwise. A watch that fails is started again."""
    monkeypatch.setattr("dynamo_local.components.models_view.WATCH_RETRY_S", 0.0)
    key = "dynamo/models/m:1"
    view = ModelsView("dynamo")
    put = PutEvent(KeyValue(key, card().encode(), 1))
    store = ScriptedStore([SnapshotEvent((), 1), put, EtcdUnavailable("away")], [])
    task = asyncio.create_task(view.follow(store))  # type: ignore[arg-type]
    try:
        assert await view.wait_ready(5.0)
        async with asyncio.timeout(5.0):
            while len(store.prefixes) < 2:
                await asyncio.sleep(0)
        assert store.prefixes == ["dynamo/models/", "dynamo/models/"]
        assert view.availability("m") is Availability.READY
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert store.closed == 2


async def test_waiting_for_a_model_has_a_deadline(serve_model: Serve):
    """The outcome is named."""
    view = ModelsView("dynamo")
    assert not await view.wait_ready(0.01)
    key = serve_model(view, "m", 1)
    assert await view.wait_ready(0.01)
    view.apply(DeleteEvent(key))
    assert not await view.wait_ready(0.01)
