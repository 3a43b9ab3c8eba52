"""`slo` for router and prefills in a real graph: decisions as estimated, and drains under load lose nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from openai import AsyncOpenAI

from tests.drivers.scaled import TOKENS, ascale, load, names, settled
from tests.drivers.served import Served, auntil, expected, stream_chat

pytestmark = [pytest.mark.infra, pytest.mark.timeout(240)]

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


@pytest.mark.full
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


@pytest.mark.full
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
