"""Tools, grammars, logprobs, several choices and plain chats, hundreds at once, while their workers drain, flip and
crash."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.drivers.flips import counts
from tests.drivers.mixed_requests import KINDS, disturb, mixed_load, requests, truths
from tests.drivers.scaled import PATIENCE_S
from tests.drivers.served import MODEL, Served, auntil

pytestmark = [pytest.mark.infra, pytest.mark.full, pytest.mark.timeout(1200)]

REQUESTS = 1000
AT_ONCE = int(os.environ.get("DYN_MIXED_AT_ONCE", "300"))
"""On a machine that does nothing else all of them, 1000, may be under way together."""
TOKENS = (12, 40, 120)
ROUNDS = 2


@pytest.fixture(scope="module")
def graph() -> Iterator[Served]:
    """Two decode and two prefill workers, and two Processors, on simulated GPUs; most prefills are remote."""
    with Served(*counts(), "--Processor.ServiceArgs.workers=2", "--VllmWorker.max-prefill-queue-size=1000") as served:
        yield served.start()


async def test_two_thousand_mixed_requests_are_right_whatever_their_workers_do(graph: Served) -> None:
    asked = requests(MODEL, 9, TOKENS)
    truth = await truths(graph.url, asked, at_once=16)
    crashing = ("VllmWorker", "PrefillWorker", "Processor")
    async with mixed_load(graph.url, asked, truth, count=ROUNDS * REQUESTS, at_once=AT_ONCE) as tally:
        await auntil(lambda: tally.right.total() or tally.wrong, PATIENCE_S, what=lambda: tally)
        for _ in range(ROUNDS):
            await disturb(graph, crashing=crashing, patience_s=PATIENCE_S)
            assert not tally.wrong, tally.wrong[:5]
    print(tally)
    assert tally.wrong == [], f"{tally}: {tally.wrong[:5]}"
    assert tally.right.keys() == KINDS.keys()
    assert tally.right.total() + tally.cut.total() >= ROUNDS * REQUESTS
