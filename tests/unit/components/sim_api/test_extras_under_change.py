"""Requests of every kind, many at once, in one process: workers and Processors leave and die. On real processes:
tests/integration/mixed_requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from dynamo_local.components.prefill_worker import PrefillWorker, PrefillWorkerConfig
from dynamo_local.components.processor import Processor, ProcessorConfig
from dynamo_local.components.vllm_worker import VllmWorker, VllmWorkerConfig
from tests.drivers.mixed_requests import KINDS, Tally, mixed_load, requests, truths
from tests.fakes.data_plane.worker_context import FakeCluster, FakeWorker
from tests.unit.components.sim_api.conftest import MODEL, frontend

SIM = {"speed": 4.0, "num_gpu_blocks": 8192, "block_size": 16}
COUNT = 140
AT_ONCE = 28
PROGRESS_DEADLINE_S = 300.0


@pytest.mark.full
# It takes 15 s alone, and took more than the usual 180 s on a busy machine. pytest's alarm then rang in a callback of a
# connection. asyncio closed that connection, and the test failed with its client's ReadError.
@pytest.mark.timeout(900)
async def test_no_answer_is_wrong_whoever_leaves_or_dies():
    """No answer is cut by a lost worker. A lost Processor cuts those that have begun, and gives no wrong one."""
    cluster = FakeCluster(ack_wait_s=0.5)
    make: dict[str, Callable[[], Awaitable[FakeWorker]]] = {
        "prefill": lambda: cluster.start(PrefillWorker, PrefillWorkerConfig(sim=SIM)),
        "decode": lambda: cluster.start(VllmWorker, VllmWorkerConfig(remote_prefill=True, sim=SIM)),
        "processor": lambda: cluster.start(Processor, ProcessorConfig(router="round-robin")),
    }
    there = {name: [await made() for _ in range(2)] for name, made in make.items()}
    new: dict[str, list[FakeWorker]] = {name: [] for name in make}
    async with frontend(cluster) as url:
        asked = requests(MODEL, 1, (6, 20, 60))
        truth = await truths(url, asked, at_once=14)
        async with mixed_load(url, asked, truth, count=COUNT, at_once=AT_ONCE) as tally:
            for name in make:
                for how in (FakeWorker.kill, FakeWorker.drain):
                    for worker in there[name]:
                        # An answer is tried three times, so it must not meet three of them.
                        await progress(tally, AT_ONCE)
                        assert name == "processor" or not tally.cut
                        new[name].append(await make[name]())
                        await how(worker)
                    there[name], new[name] = new[name], []
    await cluster.close()
    assert tally.wrong == [], f"{tally}: {tally.wrong[:5]}"
    assert tally.right.keys() == KINDS.keys()
    assert tally.right.total() + tally.cut.total() >= COUNT
    assert tally.cut.total() < COUNT / 4


async def progress(tally: Tally, more: int) -> None:
    """So many more answers have come, and others are under way."""
    enough = tally.right.total() + more
    async with asyncio.timeout(PROGRESS_DEADLINE_S):
        while not tally.wrong and (tally.right.total() < enough or not tally.open):
            await asyncio.sleep(0.005)
