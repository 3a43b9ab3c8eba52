"""A start that was broken off is closed like any other: what had been made is ended, what had not is no error."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_local.components import engine_options
from dynamo_local.components.engine_options import start_engine
from dynamo_local.components.frontend import Frontend
from dynamo_local.components.prefill_worker import PrefillWorker
from dynamo_local.components.processor import Processor
from dynamo_local.components.vllm_worker import VllmWorker, VllmWorkerConfig
from dynamo_local.sdk.service import DynamoService


class SlowEngine:
    """Never loaded."""

    def __init__(self) -> None:
        self.starting = asyncio.Event()
        self.closed = False

    async def start(self) -> None:
        self.starting.set()
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed = True


async def test_an_engine_that_is_cancelled_while_it_loads_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SlowEngine()
    monkeypatch.setattr(engine_options, "make_engine", lambda *_words, **_more: engine)
    starting = asyncio.create_task(start_engine(VllmWorkerConfig(), 0))
    await engine.starting.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert engine.closed


@pytest.mark.parametrize("service", [Frontend, Processor, VllmWorker, PrefillWorker], ids=lambda s: s.name)
async def test_a_component_that_has_not_started_can_be_stopped(service: DynamoService[Any]) -> None:
    before = asyncio.all_tasks()
    instance = service.create({attribute: SimpleNamespace(component="X") for attribute in service.depends})
    assert service.on_shutdown
    for hook in service.on_shutdown:
        await getattr(instance, hook)()
    assert asyncio.all_tasks() == before
