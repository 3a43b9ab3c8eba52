"""`router` and `disagg-policy` `slo` on real graphs: decisions as estimated, more targets kept than by `threshold`."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import httpx
import pytest
from openai import AsyncOpenAI

from tests.drivers.scaled import TOKENS, ascale, load, names, settled
from tests.drivers.served import MODEL, Served, auntil, expected, stream_chat
from tests.tools.scraped import by_label, samples

pytestmark = [pytest.mark.infra, pytest.mark.full, pytest.mark.alone, pytest.mark.timeout(240)]


async def timed(client: AsyncOpenAI, prompt: list[int], tokens: int) -> tuple[list[float], int | None]:
    """When each piece of the answer came (`time.monotonic`), and how many tokens it is said to have; None: not said."""
    stream = await client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    times: list[float] = []
    count = None
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].text:
            times.append(time.monotonic())
        if chunk.usage is not None:
            count = chunk.usage.completion_tokens
    return times, count


SPEED = 0.1
TARGETS = {"ttft": 1200, "itl": 60}
WORDS = 2500
DECISION = re.compile(
    r"Remote prefill: (True|False) \(first token in (\d+) ms here, (\d+) ms there; "
    r"expected misses ([\d.]+) here \(([\d.]+) of (\d+) streams\), ([\d.]+) there\)"
)
CLEAR = 0.3
"""Expected misses by which one side has to be dearer for the decision to be beyond doubt."""


@pytest.fixture(scope="module")
def graph() -> Iterator[Served]:
    """Two decode and two prefill workers at a tenth of an H200's speed, with targets."""
    targets = (f"--{name}.{key}={value}" for name in ("VllmWorker", "Processor") for key, value in TARGETS.items())
    counts = (f"--{name}.ServiceArgs.workers=2" for name in ("VllmWorker", "PrefillWorker"))
    with Served(*counts, *targets, f"--Common.sim.speed={SPEED}", f"--Processor.sim.speed={SPEED}") as served:
        yield served.start()


def decisions(served: Served) -> list[tuple[bool, float, float]]:
    """All so far: (remote, expected misses here, expected misses there)."""
    found = []
    for name in ("VllmWorker", "VllmWorker_1"):
        found += [(m[1] == "True", float(m[4]), float(m[7])) for m in DECISION.finditer(served.log(name))]
    return found


async def ask_long(http: AsyncOpenAI, number: int, turn: int) -> str | None:
    """A chat with a long prompt of its own, so that nothing of it is cached."""
    prompt = f"Client {number}, turn {turn}. " + f"word{number * 1000 + turn} " * (WORDS // 6)
    tokens = TOKENS[(number + turn) % len(TOKENS)]
    answer = await stream_chat(http, prompt, tokens, ignore_eos=True)
    right = answer == expected(prompt, tokens, ignore_eos=True)
    return None if right else f"client {number}, turn {turn}: wrong answer, {answer[1]}"


async def test_drains_under_load_lose_nothing_and_each_prompt_goes_where_it_costs_less(graph: Served) -> None:
    async with load(graph, 16, ask_long) as found:
        await found.more(24)
        for component in ("PrefillWorker", "VllmWorker"):
            await ascale(graph, component, "-1")
            await auntil(lambda name=component: names(graph, name) == [name], 60.0, what=graph.states)
            await found.more(8)
            await ascale(graph, component, "+1")
            await auntil(lambda name=component: len(names(graph, name)) == 2, 60.0, what=graph.states)
            await found.more(8)
    found.check()
    await settled(graph)
    made = decisions(graph)
    assert {remote for remote, _, _ in made} == {True, False}, "one side was never chosen: nothing was weighed"
    clear = [(remote, here, there) for remote, here, there in made if abs(here - there) > CLEAR]
    assert clear, made
    assert [each for each in clear if each[0] is not (each[2] < each[1])] == []


async def test_without_prefill_workers_all_is_local(graph: Served) -> None:
    await ascale(graph, "PrefillWorker", "=0", force=True)
    await auntil(lambda: names(graph, "PrefillWorker") == [], 60.0, what=graph.states)
    try:
        async with load(graph, 2, ask_long) as found:
            await found.more(2)
        found.check()
        logs = graph.log("VllmWorker") + graph.log("VllmWorker_1")
        assert "Remote prefill: False (no prefill worker is registered)" in logs
    finally:
        await ascale(graph, "PrefillWorker", "=2")
        await settled(graph)


SLOW = 0.15
TTFT_MS, ITL_MS = 1500, 70
BURSTS, EVERY_S = 4, 1.0
LONG, SHORT = (3000, 24), (300, 60)
"""Tokens of prompts and answers: each burst has five of the first kind and three of the second."""
CACHED = re.compile(r" by kv, prefix hit rate 0\.9")
TARGET = ("graphs.disagg_router:Frontend", "-f", "configs/disagg_slo.yaml")
BESIDE = (
    f"--Common.sim.speed={SLOW}",
    f"--Common.ttft={TTFT_MS}",
    f"--Common.itl={ITL_MS}",
    "--VllmWorker.ServiceArgs.workers=1",
)
SEEDS_RULE = (
    "--Router.router=least-loaded",
    "--Processor.router=least-loaded",
    "--VllmWorker.disagg-policy=threshold",
    "--VllmWorker.conditional-disagg=true",
    "--VllmWorker.max-local-prefill-length=10",
)


@pytest.fixture(scope="module")
def graphs() -> Iterator[tuple[Served, Served]]:
    """One by targets, one by the seed's rule: two prefill workers and a decode worker each, started side by side."""
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        slo = stack.enter_context(Served(*BESIDE, target=TARGET))
        seed = stack.enter_context(Served(*BESIDE, *SEEDS_RULE, target=TARGET, namespace="seed"))
        for started in [pool.submit(each.start) for each in (slo, seed)]:
            started.result()
        yield slo, seed


@dataclass
class Outcome:
    """The clients' view: of all requests, how many kept both targets, and what went wrong with others."""

    asked: int = 0
    kept: int = 0
    failed: list[str] = field(default_factory=list)

    @property
    def attainment(self) -> float:
        return self.kept / self.asked


async def ask(client: AsyncOpenAI, found: Outcome, prompt: list[int], tokens: int) -> None:
    """One request to its end, by the clock of its client."""
    found.asked += 1
    asked_s = time.monotonic()
    try:
        times, count = await timed(client, prompt, tokens)
    except Exception as error:
        found.failed.append(f"{type(error).__name__}: {error}")
        return
    if count != tokens:
        found.failed.append(f"{count} of {tokens} tokens")
        return
    first_ms, gap_ms = (times[0] - asked_s) * 1000, (times[-1] - times[0]) / (tokens - 1) * 1000
    found.kept += first_ms <= TTFT_MS and gap_ms <= ITL_MS


async def play(served: Served, seed: int) -> Outcome:
    """The bursts, whatever becomes of them: no client waits for another."""
    found, rng = Outcome(), random.Random(seed)
    async with served.client() as client, asyncio.TaskGroup() as group:
        await ask(client, Outcome(), [300] * 50, 4)  # the first request pays for imports and connections
        begin_s = time.monotonic()
        for burst in range(BURSTS):
            await asyncio.sleep(max(0.0, begin_s + burst * EVERY_S - time.monotonic()))
            for length, tokens in (LONG, SHORT, LONG, SHORT, LONG, SHORT, LONG, LONG):
                prompt = [rng.randrange(259, 2048) for _ in range(length)]
                group.create_task(ask(client, found, prompt, tokens))
    assert found.failed == []
    return found


def by_name(served: Served, component: str, prefix: str) -> float:
    """The sum of those counters of the component's workers, as `dynamo status --json` shows them."""
    workers = [worker for worker in served.status()["workers"] if worker["component"] == component]
    told = (worker["dispatch"] or {} for worker in workers)
    return sum(count for each in told for name, count in each.items() if name.startswith(prefix))


@pytest.mark.timing
async def test_slo_keeps_more_targets_than_the_seeds_rule_and_says_why(graphs: tuple[Served, Served]) -> None:
    slo, seed = graphs
    by_slo, by_seed = await play(slo, 1), await play(seed, 1)
    told = f"slo {by_slo.attainment:.0%}, the seed's rule {by_seed.attainment:.0%} of {by_slo.asked}"
    assert by_slo.attainment >= by_seed.attainment, told
    assert by_slo.attainment > 0.3, told
    await auntil(lambda: by_name(slo, "VllmWorker", "prefills.") >= by_slo.asked, what=slo.status)
    shown = slo.cli("status").stdout
    assert "\ndispatch  " in shown, shown
    async with httpx.AsyncClient() as http:
        page = samples((await http.get(slo.status()["metrics_url"])).text)
    prefills = by_label(page, "dynamo_dispatch_prefills_total")
    assert {labels[1] for labels in prefills} >= {"remote"}
    assert not [labels for labels in prefills if labels[2] == "threshold"]
    came = sum(by_label(page, "dynamo_dispatch_first_tokens_total").values())
    seen, error = (
        sum(by_label(page, f"dynamo_dispatch_first_token_{what}_seconds_total").values()) for what in ("seen", "error")
    )
    assert came >= by_slo.asked / 2
    assert error <= seen, f"estimates are off by {error / came:.2f} s where {seen / came:.2f} s came of them"
    assert by_name(seed, "VllmWorker", "prefills.local.threshold") > 0


@pytest.mark.timing
async def test_prefixes_first_and_prefills_by_targets(graphs: tuple[Served, Served]) -> None:
    slo, _ = graphs
    slo.etcdctl("put", f"dynamo/router/{MODEL}", json.dumps({"router": "kv"}))
    again, found = [300 + number % 1000 for number in range(2000)], Outcome()
    async with asyncio.timeout(30.0), slo.client() as client:
        while not CACHED.search(slo.log("Router")):  # the policy, and what was cached, are heard of a little later
            await ask(client, found, again, 4)
    assert found.failed == []
    assert found.asked > 1
    await play(slo, 2)
    assert by_name(slo, "VllmWorker", "prefills.local.") > 0
