"""A registry that is followed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.fakes.arbiter.registry import Registry


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    """Followed until the test ends."""
    registry = Registry()
    following = asyncio.ensure_future(registry.registrations.follow())
    await registry.registrations.looked_through(5.0)
    yield registry
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following
