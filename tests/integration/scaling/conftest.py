"""A graph that the tests of a module scale up and down; after each test it is made what it was."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.drivers.scaled import ascale, names, settled
from tests.drivers.served import Served, auntil

BASE = {"VllmWorker": 2, "PrefillWorker": 2}


@pytest.fixture(scope="module")
def shared_graph() -> Iterator[Served]:
    """Two decode and two prefill workers, on eight simulated GPUs.

    A token takes 20 ms and more: what a test measures must not wait for the test's own client of many streams.
    """
    counts = (f"--{name}.ServiceArgs.workers={count}" for name, count in BASE.items())
    with Served(*counts, "--VllmWorker.sim.speed=0.25") as served:
        yield served.start()


@pytest.fixture
async def graph(shared_graph: Served) -> AsyncIterator[Served]:
    """The module's graph, with the workers that it began with, before and after."""
    yield shared_graph
    await settled(shared_graph)
    for component, count in BASE.items():
        right = [component, *(f"{component}_{n}" for n in range(1, count))]
        if names(shared_graph, component) != right:  # the names as well: so down to the template first
            await ascale(shared_graph, component, "=1")
            await auntil(lambda name=component: names(shared_graph, name) == [name], what=shared_graph.states)
            await ascale(shared_graph, component, f"={count}")
    await settled(shared_graph)
    await auntil(lambda: len(shared_graph.states()) == 1 + sum(BASE.values()), what=shared_graph.states)
