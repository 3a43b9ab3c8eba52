"""A graph whose workers can sleep; what a test leaves asleep is woken after it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.drivers.scaled import names, settled
from tests.drivers.served import Served
from tests.drivers.sleepers import wake_all

SPEED = 4.0
WAKE_S = 0.3
"""What the configured time of a wake comes to at that speed."""


@pytest.fixture(scope="module")
def shared_graph() -> Iterator[Served]:
    """Two decode workers, a prefill worker, on four simulated GPUs. They keep what they run."""
    words = (
        "--gpus=sim:4",
        "--VllmWorker.ServiceArgs.workers=2",
        "--VllmWorker.ServiceArgs.standby=0",
        "--PrefillWorker.ServiceArgs.standby=0",
        f"--VllmWorker.sim.speed={SPEED}",
        f"--VllmWorker.sim.wake_s={WAKE_S * SPEED}",
        f"--VllmWorker.sim.sleep_s={0.2 * SPEED}",
        "--on-arbiter-death",
        "keep",
    )
    with Served(*words) as served:
        yield served.start()


@pytest.fixture
async def graph(shared_graph: Served) -> AsyncIterator[Served]:
    yield shared_graph
    await wake_all(shared_graph)
    await settled(shared_graph)
    assert names(shared_graph, "VllmWorker")[:2] == ["VllmWorker", "VllmWorker_1"]
