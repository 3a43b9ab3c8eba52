"""A whole house in this process: Frontend on a real socket, Processor, a worker with the sim engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from openai import AsyncOpenAI

from dynamo_local.components.models_view import ModelCard, ModelsView
from dynamo_local.components.openai.app import create_app
from dynamo_local.components.openai.generation import FrontendDeps
from dynamo_local.components.openai.server import HttpServer, bind_socket
from dynamo_local.components.openai.settings import FrontendConfig
from dynamo_local.components.processor import Processor, ProcessorConfig
from dynamo_local.components.vllm_worker import VllmWorker, VllmWorkerConfig
from dynamo_local.ports import KeyValue, SnapshotEvent
from tests.fakes.data_plane.worker_context import FakeCluster

MODEL = "sim-tiny"


@asynccontextmanager
async def frontend(cluster: FakeCluster) -> AsyncIterator[str]:
    """The URL of one that asks the cluster's Processors."""
    models = ModelsView("dynamo")
    card = ModelCard(MODEL, "VllmWorker", "generate", 4096, 1000.0).encode()
    models.apply(SnapshotEvent((KeyValue(f"dynamo/models/{MODEL}:a1", card, 0xA1),), 1))
    deps = FrontendDeps(
        chat=cluster.client("Processor", "chat/completions"),
        completions=cluster.client("Processor", "completions"),
        texts=cluster.client("Processor", "texts"),
        models=models,
        settings=FrontendConfig(),
    )
    server = HttpServer(create_app(deps), bind_socket("127.0.0.1", 0))
    await server.start()
    try:
        yield server.url
    finally:
        await server.stop()


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """Of the Frontend."""
    cluster = FakeCluster()
    await cluster.start(Processor, ProcessorConfig(router="round-robin"))
    await cluster.start(VllmWorker, VllmWorkerConfig(sim={"speed": 200.0, "num_gpu_blocks": 4096, "block_size": 16}))
    async with frontend(cluster) as made:
        yield made
    await cluster.close()


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    """The `openai` package's, without retries."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30.0) as made:
        yield made


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """Plain HTTP, for what the `openai` package does not know."""
    async with httpx.AsyncClient(base_url=url, timeout=30.0) as made:
        yield made
