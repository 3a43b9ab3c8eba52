"""A Frontend application around a scripted Processor, in memory or on a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from dynamo_local.components.models_view import ModelCard, ModelsView
from dynamo_local.components.openai import access
from dynamo_local.components.openai.app import create_app
from dynamo_local.components.openai.generation import FrontendDeps
from dynamo_local.components.openai.server import HttpServer, bind_socket
from dynamo_local.components.openai.settings import FrontendConfig
from dynamo_local.core.types import lease_hex
from dynamo_local.ports import KeyValue, PutEvent, SnapshotEvent
from tests.fakes.data_plane.processor import FakeEndpoint

MODEL = "sim-Model"


def put_model(models: ModelsView, name: str = MODEL, lease_id: int = 0xA1, **members: Any) -> str:
    """A worker that serves `name` became ready; returns its key."""
    card = ModelCard(name, "VllmWorker", "generate", members.get("max_model_len", 4096), members.get("created", 1000.0))
    key = f"dynamo/models/{name}:{lease_hex(lease_id)}"
    models.apply(PutEvent(KeyValue(key, card.encode(), lease_id)))
    return key


class House:
    """A Frontend's parts, for a test to look into."""

    def __init__(self, endpoint: FakeEndpoint, serve_model: bool = True, **settings: Any) -> None:
        config = FrontendConfig(**{"request_timeout_s": 10.0, **settings})
        self.endpoint = endpoint
        self.models = ModelsView("dynamo", expected=config.served_model_name)
        self.models.apply(SnapshotEvent((), 1))
        if serve_model:
            put_model(self.models)
        self.deps = FrontendDeps(
            chat=endpoint,
            completions=endpoint,
            models=self.models,
            settings=config,
            keys=access.load_keys(config, {}),
        )
        self.app = create_app(self.deps)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """In memory: no socket."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
            yield client

    @asynccontextmanager
    async def served(self) -> AsyncIterator[HttpServer]:
        """On a free loopback port, by uvicorn."""
        server = HttpServer(self.app, bind_socket("127.0.0.1", 0), tls=access.tls_of(self.deps.settings))
        await server.start()
        try:
            yield server
        finally:
            await server.stop()


@pytest.fixture
def house() -> Callable[..., House]:
    """`house(endpoint, **settings)` makes a Frontend around a scripted Processor."""

    def make(endpoint: FakeEndpoint | None = None, **settings: Any) -> House:
        return House(endpoint if endpoint is not None else FakeEndpoint(), **settings)

    return make


@pytest.fixture
def serve_model() -> Callable[..., str]:
    """`serve_model(models, name, lease_id)` puts a worker's model key."""
    return put_model
