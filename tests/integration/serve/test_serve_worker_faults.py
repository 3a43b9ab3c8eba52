"""Workers die while requests run: the others, and the clients, go on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time

import httpx
import pytest

from tests.drivers.scaled import answer, busy
from tests.drivers.served import Served, asking, auntil, expected

pytestmark = pytest.mark.infra

LONG_PROMPT = "word " * 400


@pytest.mark.full
@pytest.mark.timing
async def test_a_killed_decode_worker_costs_its_streams_and_nothing_else() -> None:
    with Served("--Processor.migration-limit=0").started() as served:
        before = served.pids()
        lease = served.worker("VllmWorker")["lease"]
        async with httpx.AsyncClient(base_url=served.url, timeout=30.0) as http:
            body = {**asking("Die in the middle.", 50_000), "ignore_eos": True, "stream": True}
            body |= body.pop("extra_body", {})
            async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                os.kill(before["VllmWorker"], signal.SIGKILL)
                killed_s = time.monotonic()
                rest = [line async for line in lines if line]
                error_s = time.monotonic() - killed_s
            await auntil(lambda: lease not in " ".join(served.keys()), 2.0, what=served.keys)
            forgotten_s = time.monotonic() - killed_s
            refused = await http.post("/v1/chat/completions", json=asking("Anybody there?", 4))
        row = served.worker("VllmWorker")
        await auntil(lambda: served.states()["VllmWorker"] == "ready", what=served.states)
        assert await answer(served, "Risen from the dead.") == expected("Risen from the dead.", 8)[0]
        after = served.pids()
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert "worker" in error["message"], error
    assert not any(line == "data: [DONE]" for line in rest), "a cut stream must not look finished"
    assert error_s < 1.0
    assert forgotten_s < 2.0
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert row["state"] in ("crashed", "backing_off")
    assert "SIGKILL" in row["reason"]
    assert {name for name in before if before[name] != after[name]} == {"VllmWorker"}


@pytest.mark.full
async def test_the_other_decode_worker_takes_over(two_by_two: Served) -> None:
    before = two_by_two.pids()
    os.kill(before["VllmWorker_1"], signal.SIGKILL)
    prompts = [f"Take over, number {n}." for n in range(10)]
    answers = await asyncio.gather(*(answer(two_by_two, prompt) for prompt in prompts))
    assert answers == [expected(prompt, 8)[0] for prompt in prompts]
    await auntil(lambda: two_by_two.states()["VllmWorker_1"] == "ready", what=two_by_two.states)
    after = two_by_two.pids()
    assert {name for name in before if before[name] != after[name]} == {"VllmWorker_1"}


async def kill_prefilling(*words: str) -> tuple[float, str]:
    """Kill the worker that prefills for a request, which is answered right all the same; seconds until then, and the
    decode worker's log."""
    with Served(*words).started() as served:
        request = asyncio.create_task(answer(served, LONG_PROMPT, 16))
        victim = await auntil(lambda: busy(served, "PrefillWorker"), what=lambda: served.status()["workers"])
        began_s = time.monotonic()
        os.kill(served.pids()[victim], signal.SIGKILL)
        assert await request == expected(LONG_PROMPT, 16)[0]
        return time.monotonic() - began_s, served.log("VllmWorker")


@pytest.mark.timing
@pytest.mark.full
async def test_a_killed_prefill_workers_entry_is_done_by_another() -> None:
    took_s, log = await kill_prefilling("--PrefillWorker.ServiceArgs.workers=2", '--PrefillWorker.sim={"speed": 0.02}')
    assert "Remote prefill: True" in log
    assert "prefilled locally" not in log
    assert took_s < 25.0


@pytest.mark.timing
@pytest.mark.full
async def test_without_any_prefill_worker_left_the_decode_worker_does_it_itself() -> None:
    took_s, log = await kill_prefilling('--PrefillWorker.sim={"speed": 0.001}', "--VllmWorker.prefill-timeout-s=3")
    assert "prefilled locally" in log
    assert took_s < 9.0


@pytest.mark.full
async def test_a_request_that_two_prefill_workers_die_of_ends() -> None:
    words = ("--PrefillWorker.ServiceArgs.workers=2", '--PrefillWorker.sim={"speed": 0.02}')
    with Served(*words).started() as served:
        before = served.pids()
        async with httpx.AsyncClient(base_url=served.url, timeout=60.0) as http:
            request = asyncio.create_task(http.post("/v1/chat/completions", json=asking(LONG_PROMPT, 16)))
            for _ in range(2):
                victim = await auntil(lambda: busy(served, "PrefillWorker"), what=lambda: served.status()["workers"])
                pid = served.pids()[victim]
                os.kill(pid, signal.SIGKILL)
                await auntil(lambda victim=victim, pid=pid: served.pids().get(victim) not in (None, pid))
            response = await request
        assert (response.status_code, response.json()["error"]["code"]) == (502, "kills_workers")
        assert served.pids()["VllmWorker"] == before["VllmWorker"]
        await auntil(lambda: served.status()["prefill_queue"]["outstanding"] == 0, what=served.status)
