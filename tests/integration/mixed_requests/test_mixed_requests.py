"""Tools, grammars, logprobs, several choices and plain chats, a thousand at once, while their workers drain, flip and
crash."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.drivers.flips import counts, flip
from tests.drivers.mixed_requests import KINDS, Tally, mixed_load, requests, truths
from tests.drivers.scaled import PATIENCE_S, ascale, names, settled
from tests.drivers.served import MODEL, Served, auntil

pytestmark = [pytest.mark.infra, pytest.mark.full, pytest.mark.timeout(1200)]

REQUESTS = 1000
TOKENS = (12, 40, 120)


@pytest.fixture(scope="module")
def graph() -> Iterator[Served]:
    """Two decode and two prefill workers, and two Processors, on simulated GPUs; most prefills are remote."""
    with Served(*counts(), "--Processor.ServiceArgs.workers=2", "--VllmWorker.max-prefill-queue-size=1000") as served:
        yield served.start()


async def disturb(served: Served) -> None:
    """Drains, flips, crashes, of each role."""
    await ascale(served, "VllmWorker", "-1")
    await settled(served, PATIENCE_S)
    await ascale(served, "VllmWorker", "+1")
    await settled(served, PATIENCE_S)
    became = await flip(served, names(served, "VllmWorker")[-1])
    await flip(served, became)
    for component in ("VllmWorker", "PrefillWorker", "Processor"):
        await crash(served, component)


async def crash(served: Served, component: str) -> None:
    """SIGKILL to one, and wait for its successor."""
    name = names(served, component)[-1]
    pid = served.pids()[name]
    os.kill(pid, signal.SIGKILL)
    await auntil(lambda: served.pids().get(name) not in (None, pid), PATIENCE_S, what=served.states)
    await settled(served, PATIENCE_S)


def check(tally: Tally) -> None:
    """None is wrong, each kind came right."""
    print(tally)
    assert tally.wrong == [], f"{tally}: {tally.wrong[:5]}"
    assert tally.right.keys() == KINDS.keys()


async def test_a_thousand_mixed_requests_at_once_are_right_whatever_their_workers_do(graph: Served) -> None:
    """Each answer is the one of an undisturbed graph; a stream that has begun may end with an error that a client may
    repeat, and what it had got is right."""
    asked = requests(MODEL, 9, TOKENS)
    truth = await truths(graph.url, asked, at_once=16)
    async with mixed_load(graph.url, asked, truth, count=2 * REQUESTS, at_once=REQUESTS) as tally:
        await auntil(lambda: tally.right.total() > 0, PATIENCE_S, what=lambda: tally)
        for _ in range(2):
            await disturb(graph)
            assert not tally.wrong, tally.wrong[:5]
    check(tally)
    assert tally.right.total() + tally.cut.total() >= 2 * REQUESTS
