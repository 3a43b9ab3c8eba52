"""Fixtures for tests of the planner in its arbiter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.planner.planned_arbiter import Arbiter


@pytest.fixture
async def arbiter(tmp_path: Path) -> AsyncIterator[Arbiter]:
    """With a statefile; its planner is stopped afterwards."""
    arbiter = Arbiter(tmp_path)
    await arbiter.statefile.create()
    yield arbiter
    await arbiter.planning.halt()
    await asyncio.gather(*arbiter.tasks)
