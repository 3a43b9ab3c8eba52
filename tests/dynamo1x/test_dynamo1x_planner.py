"""The planners on graphs of Dynamo 1.x's own workers: what they see is theirs, what they do is carried out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.drivers.planned import POLICY_WORDS, decided, planner
from tests.drivers.served import Served, auntil
from tests.dynamo1x.dynamo_graphs import ask, graph, instances, listed
from tests.fakes.profile_folders import SLOW_KV_TOKENS, slow_engine, slow_mocker

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
    command = f"--Mocker.command={MOCKER} --num-gpu-blocks-override 64 --block-size 16"
    with graph("agg", *PLANNED, command, "--Mocker.ServiceArgs.resources.gpu=1").started() as served:
        await listed(served)
        await _until_decided(served, clients=8, tokens=150, name="Mocker_1")
        assert len(instances(served)) >= 2


@pytest.mark.full
async def test_prefills_that_wait_bring_another_prefill_worker() -> None:
    slow = f"--Prefill.command={MOCKER} --disaggregation-mode prefill --max-num-seqs 1 --speedup-ratio 0.05"
    gpus = (f"--{name}.ServiceArgs.resources.gpu=1" for name in ("Prefill", "Decode"))
    with graph("disagg", *PLANNED, slow, *gpus).started() as served:
        await listed(served)
        await _until_decided(served, clients=12, tokens=4, name="Prefill_1")
        assert len(instances(served, "prefill")) >= 2


BLOCK_SIZE = 16
RISES_AND_FALLS = ((0.5, 4.0, 20), (2.0, 20.0, 150), (0.5, 16.0, 20))
"""Requests a second, for so many seconds, of so many tokens: two a second of 150 need two decode workers or three."""


async def _open_loop(served: Served, rate: float, seconds: float, tokens: int) -> list[str]:
    """Each request at its time; what failed, or had another number of tokens than it asked for."""
    async with served.client() as client:
        asked = []
        for n in range(int(rate * seconds)):
            asked.append(asyncio.create_task(ask(client, f"{n} of {rate:g}" + " the" * 100, tokens)))
            await asyncio.sleep(1 / rate)
        answers = await asyncio.gather(*asked, return_exceptions=True)
    return [repr(answer) for answer in answers if isinstance(answer, BaseException)]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", POLICY_WORDS)
async def test_each_policy_follows_a_load_that_rises_and_falls(policy: str, tmp_path: Path) -> None:
    profile = slow_engine(tmp_path / "profile")
    plays = f"--planner-profile-data {slow_mocker(tmp_path / 'mocker.npz')} --block-size {BLOCK_SIZE}"
    plays += f" --num-gpu-blocks-override {SLOW_KV_TOKENS // BLOCK_SIZE}"
    words = [
        *(f"--{name}.command={MOCKER} --disaggregation-mode {name.lower()} {plays}" for name in ("Prefill", "Decode")),
        *(f"--{name}.ServiceArgs.resources.gpu=1" for name in ("Prefill", "Decode")),
        "--planner",
        "--gpus=sim:4",
        *POLICY_WORDS[policy],
        f"--Planner.profile-results-dir={profile}",
        "--Planner.throughput-adjustment-interval-seconds=4",
        "--Planner.metric-pulling-interval=0.5",
        "--Planner.ttft=1500",
        "--Planner.itl=60",
        "--Planner.load-predictor=constant",
        "--Planner.max-gpu-budget=4",
    ]
    with graph("disagg", *words).started() as served:
        await listed(served)
        for rate, seconds, tokens in RISES_AND_FALLS:
            assert await _open_loop(served, rate, seconds, tokens) == []
        await auntil(lambda: set(served.states()) == {"Frontend", "Prefill", "Decode"}, DECIDED_S, what=served.states)
        most = max(record["decision"]["targets"].get("Decode", 0) for record in decided(served))
        assert most >= 2, decided(served)[-5:]
        assert planner(served, "status")["failed_ticks"] == 0
