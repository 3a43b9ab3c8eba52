"""Writes of the statefile are one after the other, each of the fleet of its turn: none brings back what was before."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.fakes.arbiter.fleet_views import name, put
from tests.fakes.arbiter.kept_fleet import SOON_S, KeptFleet

Work = Callable[[KeptFleet], Awaitable[None]]


@pytest.fixture
async def kept() -> KeptFleet:
    """Two ready workers, as the file says."""
    kept = KeptFleet("ready", "ready")
    await kept.statefile.create()
    await kept.statefile.write(list(kept.fleet.workers), kept.now)
    return kept


async def write(kept: KeptFleet) -> None:
    """A commit of both workers."""
    await kept.statefile.write([name(), name(1)], kept.now)


async def heal(kept: KeptFleet) -> None:
    """The look of every two seconds, after somebody has touched the file."""
    await kept.statefile.heal(kept.now)


@pytest.mark.parametrize("first", [write, heal])
@pytest.mark.parametrize("second", [write, heal])
async def test_a_write_that_is_under_way_does_not_undo_what_came_later(
    kept: KeptFleet, first: Work, second: Work
) -> None:
    """The first is held up on the disk while a worker leaves; the second has its turn after it."""
    kept.fleet = put(kept.fleet, name(), reason="first")
    await kept.store.aupdate(lambda state: setattr(state.components[name(1)], "lease", None))
    kept.reached.clear()
    kept.disk.clear()
    begun = asyncio.ensure_future(first(kept))
    assert await asyncio.to_thread(kept.reached.wait, SOON_S)
    kept.fleet = put(kept.fleet, name(), reason="second")
    kept.fleet = kept.fleet.with_workers({name(): kept.fleet.workers[name()]})
    later = asyncio.ensure_future(second(kept))
    await asyncio.sleep(0)
    kept.disk.set()
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(begun, later)
    state = kept.store.read()
    assert state.components[name()].reason == "second"
    assert list(state.components) == [name()]


async def test_only_one_write_is_at_the_disk(kept: KeptFleet) -> None:
    before = kept.file.version
    kept.fleet = put(kept.fleet, name(), reason="first")
    kept.reached.clear()
    kept.disk.clear()
    begun = asyncio.ensure_future(write(kept))
    assert await asyncio.to_thread(kept.reached.wait, SOON_S)
    kept.reached.clear()
    kept.fleet = put(kept.fleet, name(), reason="second")
    later = asyncio.ensure_future(write(kept))
    assert not await asyncio.to_thread(kept.reached.wait, 0.05)
    kept.disk.set()
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(begun, later)
    assert kept.file.version == before + 2
    assert kept.store.read().components[name()].reason == "second"


async def test_a_write_takes_the_fleet_of_its_turn_not_of_its_order(kept: KeptFleet) -> None:
    """A commit that waited writes what is true when it is written, or a newer one would be undone."""
    kept.reached.clear()
    kept.fleet = put(kept.fleet, name(), reason="first")
    kept.disk.clear()
    begun = asyncio.ensure_future(write(kept))
    assert await asyncio.to_thread(kept.reached.wait, SOON_S)
    ordered = asyncio.ensure_future(kept.statefile.write([name(1)], kept.now))
    await asyncio.sleep(0)
    kept.fleet = put(kept.fleet, name(1), reason="meanwhile")
    kept.disk.set()
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(begun, ordered)
    assert kept.store.read().components[name(1)].reason == "meanwhile"


async def test_a_worker_that_has_left_is_removed_from_the_file(kept: KeptFleet) -> None:
    kept.fleet = kept.fleet.with_workers({name(): kept.fleet.workers[name()]})
    await kept.statefile.write([name(1)], kept.now)
    assert list(kept.store.read().components) == [name()]
