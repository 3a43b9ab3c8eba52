"""The `Frontend` class as the worker's entry point uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from dynamo_local.components.frontend import Frontend
from dynamo_local.components.models_view import ModelCard
from dynamo_local.components.openai.server import bind_socket
from dynamo_local.components.openai.settings import FrontendConfig
from dynamo_local.core.traffic import Recent
from dynamo_local.core.types import Load, Role
from dynamo_local.errors import ConfigError
from dynamo_local.ports import KeyValue, PutEvent, SnapshotEvent, WatchEvent
from dynamo_local.sdk.context import Work, set_current_context
from tests.fakes.data_plane.processor import FakeEndpoint, answer, last, text

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


class FakeContext:
    """The part of `WorkerContext` that the Frontend uses."""

    namespace = "dynamo"
    watcher_name = "dynamo_Frontend"
    siblings_folder: Path | None = None

    def __init__(self, **settings: Any) -> None:
        self.settings = FrontendConfig(**{"port": 0, **settings})
        self.draining = asyncio.Event()
        self.kv = self
        self.announced: dict[str, str] = {}
        self.callbacks: list[Callable[[], Awaitable[None]]] = []
        self.ready_callbacks: list[Callable[[], Awaitable[None]]] = []
        self.resume_callbacks: list[Callable[[], Awaitable[None]]] = []

    def on_ready(self, callback: Callable[[], Awaitable[None]]) -> None:
        self.ready_callbacks.append(callback)

    def on_resume(self, callback: Callable[[], Awaitable[None]]) -> None:
        self.resume_callbacks.append(callback)

    def on_drain(self, callback: Callable[[], Awaitable[None]]) -> None:
        self.callbacks.append(callback)

    def set_load_source(self, source: Callable[[], Load]) -> None:
        self.load = source

    def set_served_source(self, source: Callable[[], Mapping[str, float]]) -> None:
        self.served = source

    unread_bound_s = 30.0

    def set_work_source(self, source: Callable[[], Work]) -> None:
        self.work = source

    def observe(
        self, counters: Callable[[], Awaitable[Mapping[str, float]]], *, requests: Callable[[float], Recent | None]
    ) -> None:
        self.counters, self.requests = counters, requests

    def vital(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return asyncio.create_task(work, name=name)

    async def announce(self, **facts: str) -> None:
        self.announced.update(facts)

    async def watch_prefix(self, prefix: str) -> AsyncIterator[WatchEvent]:
        assert prefix == "dynamo/models/"
        yield SnapshotEvent((), 1)
        card = ModelCard("m", "VllmWorker", "generate", 100, 1.0)
        yield PutEvent(KeyValue("dynamo/models/m:1", card.encode(), 1))
        await asyncio.Event().wait()


@pytest.fixture
def context() -> Iterator[Callable[..., FakeContext]]:
    """`context(**settings)` makes and sets the process's context."""

    def make(**settings: Any) -> FakeContext:
        made = FakeContext(**settings)
        set_current_context(made)  # type: ignore[arg-type]
        return made

    yield make
    set_current_context(None)


def frontend(chat: FakeEndpoint, completions: FakeEndpoint) -> Any:
    """An instance whose Processor is scripted."""
    endpoints = {"chat/completions": chat, "completions": completions, "api": FakeEndpoint(), "texts": completions}
    return Frontend.create({"processor": SimpleNamespace(endpoint=endpoints.__getitem__)})


def test_the_service_is_declared_as_the_graph_needs_it():
    assert (Frontend.name, Frontend.role, Frontend.namespace) == ("Frontend", Role.FRONTEND, "dynamo")
    assert Frontend.inner.max_workers is None
    assert [dependency.on.name for dependency in Frontend.depends.values()] == ["Processor"]
    assert Frontend.config_model is FrontendConfig
    assert dict(Frontend.endpoints) == {}


async def test_from_start_to_drain_to_stop(context: Callable[..., FakeContext]):
    """The URL is announced once connections are taken; a drain waits for the streams, and may be taken back: the port
    is closed at the stop, and not before."""
    gate = asyncio.Event()
    made = context()
    chat = FakeEndpoint([[text("a")], gate, [last()]])
    served = frontend(chat, FakeEndpoint(answer("plain")))
    await served.start()
    try:
        url = made.announced["frontend_url"]
        async with httpx.AsyncClient(base_url=url) as client, asyncio.timeout(5):
            while (await client.get("/health")).status_code != 200:
                await asyncio.sleep(0.01)
            plain = await client.post("/v1/completions", json={"model": "m", "prompt": "Hi"})
            assert plain.json()["choices"][0]["text"] == "plain"
            running = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
            await chat.called.wait()
            assert made.load() == Load(request_active_slots=0, request_total_slots=8192, num_requests_waiting=1)
            assert [len(made.work().requests), made.work().pulled] == [1, 0]
            assert (await made.counters())["requests"] == 2.0
            made.draining.set()
            (drain,), (resume,) = made.callbacks, made.resume_callbacks
            draining = asyncio.create_task(drain())
            while (await client.get("/health")).status_code == 200:
                await asyncio.sleep(0.01)
            refused = await client.post("/v1/chat/completions", json=CHAT)
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert int(refused.headers["retry-after"]) > 0
            assert not draining.done()
            gate.set()
            assert (await running).status_code == 200
            await draining
            assert (await client.get("/health")).status_code == 503
            made.draining.clear()
            await resume()
            assert (await client.get("/health")).status_code == 200
            assert (await client.post("/v1/completions", json={"model": "m", "prompt": "Hi"})).status_code == 200
            await served.stop()
            with pytest.raises(httpx.ConnectError):
                await client.get("/live")
    finally:
        await served.stop()
    assert not [
        task for task in asyncio.all_tasks() if task.get_name() in ("models-view", "http-server", "the HTTP server")
    ]


async def test_a_port_in_use_fails_the_start(context: Callable[..., FakeContext]):
    """With the port, and how to choose another; nothing is announced."""
    with bind_socket("127.0.0.1", 0) as taken:
        taken.listen()
        made = context(port=taken.getsockname()[1])
        served = frontend(FakeEndpoint(), FakeEndpoint())
        with pytest.raises(ConfigError, match="in use"):
            await served.start()
        await served.stop()
        assert made.announced == {}
