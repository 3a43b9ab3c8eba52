"""A graph of one component with a GPU per worker, quick to start, for faults that are about its arbiter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.drivers.scaled import ascale, settled
from tests.drivers.served import Served

ECHO = """\
from dynamo_local.sdk import endpoint, service


@service(name="Echo", resources={"gpu": 1})
class Echo:
    @endpoint()
    async def generate(self, request: dict):
        yield request
"""


@pytest.fixture(scope="module")
def shared_echo() -> Iterator[Served]:
    words = ("--gpus", "sim:8", "--Echo.ServiceArgs.workers=2")
    with Served(*words, target=("echo:Echo",), files={"echo.py": ECHO}, frontend=False) as served:
        yield served.start()


@pytest.fixture
async def echo(shared_echo: Served) -> AsyncIterator[Served]:
    """The module's graph with two ready workers, before and after."""
    yield shared_echo
    await settled(shared_echo)
    await ascale(shared_echo, "Echo", "=2")
    await settled(shared_echo)
