"""A caller and servers over a real NATS."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.drivers.servers import RealNats
from tests.drivers.without_arbiter.request_plane import Bench, request_bench


@pytest.fixture
async def bench(nats_server: RealNats, namespace: str) -> AsyncIterator[Bench]:
    """A caller over the shared NATS, and servers as the test wants them."""
    async with request_bench(nats_server, namespace) as made:
        yield made
