"""A planner's observation of a real graph on the simulated engine: all requests, and every engine's passes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from dynamo_local.core.passes import ForwardPass
from dynamo_local.core.types import Missing
from dynamo_local.planner.sources import STALE_AFTER_S
from dynamo_local.planner.values import Capabilities, EngineSeen
from tests.drivers.observed import all_seen, counted, observing
from tests.drivers.served import DISAGG, Served, messages, stream_chat, tokenizer

pytestmark = [pytest.mark.infra, pytest.mark.timeout(200)]

WORDS = (
    "--VllmWorker.ServiceArgs.workers=2",
    "--PrefillWorker.ServiceArgs.workers=2",
    "--VllmWorker.conditional-disagg=false",
    "--VllmWorker.fpm-events=true",
)
REQUESTS, TOKENS = 12, 30
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(*WORDS, target=DISAGG).started() as graph:
        yield graph


def prompt(n: int) -> str:
    return f"Number {n}: " + "the same words again " * 20


async def ask_all(served: Served, count: int = REQUESTS) -> None:
    async with served.client() as http, asyncio.TaskGroup() as group:
        for n in range(count):
            group.create_task(stream_chat(http, prompt(n), TOKENS, ignore_eos=True))


def computed(seen: EngineSeen) -> int:
    return sum(one.scheduled.sum_prefill_tokens + one.scheduled.num_decode_requests for one in seen.passes)


async def test_the_traffic_is_what_was_sent(served: Served) -> None:
    async with observing(served, counting=True) as (observed, _):
        quiet = await counted(observed, asyncio.get_running_loop().time() + 1.0)
        assert quiet.num_req == 0.0
        await ask_all(served)
        traffic = await counted(observed, quiet.at_s)
        assert traffic.num_req == REQUESTS
        sizes = [len(tokenizer().encode_chat(messages(prompt(n)))) for n in range(REQUESTS)]
        assert traffic.isl == pytest.approx(sum(sizes) / REQUESTS)
        assert traffic.osl == TOKENS
        assert isinstance(traffic.ttft_ms, float)
        assert traffic.ttft_ms > 0.0
        assert isinstance(traffic.request_duration_s, float)
        assert traffic.request_duration_s < 30.0
        assert isinstance(traffic.kv_hit_rate, float)
        assert 0.0 <= traffic.kv_hit_rate < 1.0
        assert traffic.accept_length == 1.0


async def test_every_engines_passes_arrive(served: Served) -> None:
    async with observing(served) as (observed, _):
        await all_seen(observed, 4)
        await ask_all(served)
        found = await all_seen(observed, 4)
        prefilled = sum(computed(seen) for seen in found.values() if seen.component == "PrefillWorker")
        decoded = sum(computed(seen) for seen in found.values() if seen.component == "VllmWorker")
        assert prefilled > 0
        assert decoded > 0
        passes = [one for seen in found.values() for one in seen.passes]
        assert all(0.0 < one.wall_time_s < 5.0 for one in passes)
        assert observed.capabilities()["VllmWorker"] == Capabilities(
            max_num_batched_tokens=8192,
            max_num_seqs=256,
            max_kv_tokens=observed.capabilities()["VllmWorker"].max_kv_tokens,
            context_length=observed.capabilities()["VllmWorker"].context_length,
        )


async def test_a_stopped_engine_is_missing_not_idle(served: Served) -> None:
    async with observing(served) as (observed, fleet):
        await all_seen(observed, 4)
        pid = served.pids()["VllmWorker_1"]
        os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(WITHIN_S):
                while not (
                    stale := [seen for seen in (await observed.passes()).values() if isinstance(seen.last, Missing)]
                ):
                    await asyncio.sleep(0.2)
            assert [seen.component for seen in stale] == ["VllmWorker"]
            assert isinstance(stale[0].last, Missing)
            assert "VllmWorker_1" in stale[0].last.reason
        finally:
            os.kill(pid, signal.SIGCONT)
        found = await all_seen(observed, 4)
        now_s = asyncio.get_running_loop().time()
        assert all(isinstance(s.last, ForwardPass) and now_s - s.last.at_s < STALE_AFTER_S for s in found.values())
        fleet.look()
