"""KV-aware routing through the shipped graphs, with real processes: who holds a prefix gets its prompts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections import Counter

import pytest
from openai import AsyncOpenAI

from tests.drivers.routed import decisions, router_status, until_status
from tests.drivers.served import AGG_ROUTER, DISAGG_ROUTER, Served, asking, auntil, expected, messages, tokenizer

pytestmark = [pytest.mark.infra, pytest.mark.timeout(150)]

SMALL = ("--Common.sim.block-size=16", "--VllmWorker.ServiceArgs.workers=2")


def story(n: int) -> str:
    """A prompt of many blocks, whose first differs from all others'."""
    return f"Story number {n}. " + " ".join(
        f"In chapter {k} the ship sails on, and nobody knows where." for k in range(20)
    )


async def ask(client: AsyncOpenAI, prompt: str) -> None:
    answer = await client.chat.completions.create(**asking(prompt, 8))
    assert answer.choices[0].message.content == expected(prompt, 8)[0]


@pytest.mark.timing
async def test_agg_router_prefixes_go_to_their_holder_and_a_killed_router_fails_nothing() -> None:
    with Served(*SMALL, target=AGG_ROUTER).started() as served:
        async with served.client() as client, router_status(served) as status:
            await asyncio.gather(*(ask(client, story(n)) for n in range(4)))
            first = Counter(worker for worker, _, _ in decisions(served))
            assert len(first) == 2, "a burst is spread"
            blocks = (await until_status(status, lambda s: s["blocks"] >= 4 * 10))["blocks"]
            for n in range(4):
                await ask(client, story(n))
            again = decisions(served)[4:]
            assert all(policy == "kv" and rate > 0.9 for _, policy, rate in again), again
            assert Counter(worker for worker, _, _ in again) == first
            served.etcdctl("put", "dynamo/router/sim-tiny", json.dumps({"router": "round-robin"}))
            await until_status(status, lambda s: s["router"] == "round-robin")
            for _ in range(4):
                await ask(client, story(0))
            turns = [worker for worker, _, _ in decisions(served)[8:]]
            assert turns[0::2] != turns[1::2]
            assert len(set(turns)) == 2
            served.etcdctl("del", "dynamo/router/sim-tiny")
            old = served.pids()["Router"]
            os.kill(old, signal.SIGKILL)
            await asyncio.gather(*(ask(client, story(n)) for n in range(12)))
            await auntil(lambda: served.states()["Router"] == "ready" and served.pids().get("Router") != old, 30.0)
            known = await until_status(status, lambda s: s["blocks"] >= blocks)
            assert known["router"] == "kv"
            count = len(decisions(served))
            await ask(client, story(0))
            await auntil(lambda: len(decisions(served)) > count)
            assert decisions(served)[-1][2] > 0.9


@pytest.mark.full
async def test_disagg_router_feeds_the_prefill_rule_and_forgets_a_drained_worker() -> None:
    with Served(*SMALL, "--PrefillWorker.ServiceArgs.workers=1", target=DISAGG_ROUTER).started() as served:
        async with served.client() as client, router_status(served) as status:
            await ask(client, story(0))
            await until_status(status, lambda s: s["blocks"] >= 10)
            await ask(client, story(0))
            (holder, _, cold), (same, _, warm) = decisions(served)
            assert (same, cold) == (holder, 0.0)
            assert warm > 0.9
            length = len(tokenizer().encode_chat(messages(story(0))))
            name = next(n for n in ("VllmWorker", "VllmWorker_1") if served.worker(n)["lease"] == holder)
            prefills = re.findall(r"Remote prefill: (\w+) \(prefill length: (\d+)/(\d+)", served.log(name))
            assert prefills[0] == ("True", str(length), str(length))
            assert prefills[1] == ("False", str(int(length * (1 - warm))), str(length)) or int(prefills[1][1]) < 16
            served.ok("drain", f"dynamo_{name}", "--json")
            left = await until_status(status, lambda s: holder not in s["workers"])
            assert (len(left["workers"]), left["blocks"]) == (1, 0)
            await ask(client, story(0))
            worker, _, rate = decisions(served)[-1]
            assert worker in left["workers"]
            assert rate == 0.0
            os.kill(served.pids()["Router"], signal.SIGKILL)
            await asyncio.gather(*(ask(client, story(n)) for n in range(4)))


@pytest.mark.full
async def test_two_routers_share_the_work_and_one_can_be_drained() -> None:
    with Served(*SMALL, "--Router.ServiceArgs.workers=2", target=AGG_ROUTER).started() as served:
        async with served.client() as client:
            for n in (0, 0, 0, 0, 1, 1, 1, 1):
                await ask(client, story(n))
            one, two = decisions(served), decisions(served, "Router_1")
            assert (len(one), len(two)) == (4, 4)
            assert max(rate for _, _, rate in one) > 0.9
            assert max(rate for _, _, rate in two) > 0.9
            drain = asyncio.create_task(asyncio.to_thread(served.cli, "drain", "dynamo_Router_1"))
            for n in range(8):
                await ask(client, story(n % 2))
            assert (await drain).returncode == 0
            await ask(client, story(0))
            assert decisions(served)[-1][2] > 0.9
