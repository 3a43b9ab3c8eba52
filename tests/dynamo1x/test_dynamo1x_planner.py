"""The load planner on graphs of Dynamo 1.x's own workers: what it sees is theirs, what it does is carried out."""

from __future__ import annotations

import asyncio

import pytest

from tests.drivers.served import Served, auntil
from tests.dynamo1x.dynamo_graphs import ask, graph, instances, listed

pytestmark = [pytest.mark.timeout(500)]

DECIDED_S = 120.0
PLANNED = (
    "--planner",
    "--gpus=sim:3",
    "--Planner.adjustment-interval=4",
    "--Planner.metric-pulling-interval=0.5",
    "--Planner.max-gpu-budget=3",
    "--Planner.decode-kv-scale-up-threshold=0.3",
    "--Planner.decode-kv-scale-down-threshold=0.01",
)
MOCKER = "python -m dynamo.mocker --model-path {model} --model-name tiny"


async def _until_decided(served: Served, *, clients: int, tokens: int, name: str) -> None:
    """Under so many streams at once, until the planner has added that worker and it serves."""
    stop = asyncio.Event()

    async def one(number: int) -> None:
        async with served.client() as client:
            while not stop.is_set():
                await ask(client, f"the {number}th of many prompts that keep a cache full " * 12, tokens)

    tasks = [asyncio.create_task(one(number)) for number in range(clients)]
    try:
        await auntil(lambda: served.states().get(name) == "ready", DECIDED_S, what=lambda: _tell_observers(served))
    finally:
        stop.set()
        await asyncio.gather(*tasks, return_exceptions=True)


def _tell_observers(served: Served) -> object:
    status = served.status()
    return status["planner"]["last_decision"], [(w["watcher_name"], w["load"]) for w in status["workers"]]


@pytest.mark.full
async def test_full_caches_bring_another_worker() -> None:
    """KV load is what the workers' metrics say."""
    command = f"--Mocker.command={MOCKER} --num-gpu-blocks-override 64 --block-size 16"
    with graph("agg", *PLANNED, command, "--Mocker.ServiceArgs.resources.gpu=1") as served:
        served.start()
        await listed(served)
        await _until_decided(served, clients=8, tokens=150, name="Mocker_1")
        assert len(instances(served)) >= 2


@pytest.mark.full
async def test_prefills_that_wait_bring_another_prefill_worker() -> None:
    """What waits is in the prefill worker, and in the frontend's router."""
    slow = f"--Prefill.command={MOCKER} --disaggregation-mode prefill --max-num-seqs 1 --speedup-ratio 0.05"
    gpus = (f"--{name}.ServiceArgs.resources.gpu=1" for name in ("Prefill", "Decode"))
    with graph("disagg", *PLANNED, slow, *gpus) as served:
        served.start()
        await listed(served)
        await _until_decided(served, clients=12, tokens=4, name="Prefill_1")
        assert len(instances(served, "prefill")) >= 2
