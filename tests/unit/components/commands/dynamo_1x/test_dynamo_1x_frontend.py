"""Dynamo's frontend has a drain of its own, which begins with SIGTERM and is not taken back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo_local.components.commands import dynamo_1x
from dynamo_local.components.commands import probe as probing
from dynamo_local.components.commands.child import Child, set_current_child
from dynamo_local.components.commands.dynamo_1x import DynamoConfig, DynamoWorker
from dynamo_local.components.commands.launch import Launch
from dynamo_local.components.commands.runner import ChildEnded
from dynamo_local.sdk.service import DynamoService
from tests.fakes.data_plane.worker_context import FakeCluster, FakeWorker


@pytest.fixture
async def frontend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[FakeWorker, Child, Path]]:
    """One that is ready; it ends at SIGTERM, but not while the file is there."""
    ready, holds = tmp_path / "ready", tmp_path / "streams"
    script = (
        f"trap 'while [ -e {holds} ]; do sleep 0.02; done; exit 0' TERM; echo > {ready}; while :; do sleep 0.02; done"
    )
    child = Child(Launch(("sh", "-c", script), {"PATH": os.environ["PATH"]}, {"http": 1}))
    async with asyncio.timeout(10.0):
        while not ready.exists():
            await asyncio.sleep(0.01)
    set_current_child(child)

    async def get(url: str, timeout_s: float = 1.0) -> tuple[int, str]:
        return 200, '{"data": [{"id": "m"}]}' if url.endswith("/v1/models") else "dynamo_frontend_inflight_requests 1\n"

    async def is_ok(url: str, every_s: float = 0.0) -> None:
        return None

    monkeypatch.setattr(probing, "get", get)
    monkeypatch.setattr(dynamo_1x, "wait_ok", is_ok)
    service = DynamoService(DynamoWorker, name="Frontend", dynamo={"role": "frontend"}, config=DynamoConfig)
    worker = await FakeCluster().start(
        service,
        DynamoConfig(command="x", role="frontend", runtime="dynamo-1x"),  # type: ignore[arg-type]
    )
    yield worker, child, holds
    for task in worker.context.vital_tasks:
        task.cancel()
    await asyncio.gather(*worker.context.vital_tasks, return_exceptions=True)
    set_current_child(None)
    await child.end(5.0)


async def test_it_is_told_to_end_at_once_and_may_take_its_time(frontend: tuple[FakeWorker, Child, Path]) -> None:
    """Requests keep coming to it until it refuses them: to wait for none would be to wait for ever."""
    worker, child, holds = frontend
    assert worker.context.facts == {"frontend_url": "http://127.0.0.1:1"}
    holds.touch()
    draining = asyncio.create_task(worker.context.run_drain_callbacks())
    await asyncio.sleep(0.1)
    assert not draining.done()
    holds.unlink()
    await asyncio.wait_for(draining, 10.0)
    assert child.ended
    await asyncio.wait_for(worker.context.vital_tasks[0], 10.0)  # it was told: nothing failed


async def test_a_drain_that_is_taken_back_starts_it_anew(frontend: tuple[FakeWorker, Child, Path]) -> None:
    worker, _child, _holds = frontend
    await asyncio.wait_for(worker.context.run_drain_callbacks(), 10.0)
    await worker.context.run_resume_callbacks()
    with pytest.raises(ChildEnded, match="started anew"):
        await worker.context.vital_tasks[-1]
