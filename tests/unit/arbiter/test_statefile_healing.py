"""Tests what the arbiter puts right in a statefile that others write, too: a worker's own word is newer than ours."""

from __future__ import annotations

import pytest

from dynamo_local.state.schema import State
from tests.fakes.arbiter.fleet_views import name, put
from tests.fakes.arbiter.kept_fleet import KeptFleet

NAME = name()
OURS, OTHER = "2a", "3b"


@pytest.fixture
async def kept() -> KeptFleet:
    """One ready worker under `OURS`, as the file says."""
    kept = KeptFleet("ready")
    kept.fleet = put(kept.fleet, NAME, lease=OURS)
    await kept.statefile.create()
    await kept.statefile.write([NAME], kept.now)
    await write(kept, OURS)
    await kept.statefile.heal(kept.now)
    return kept


async def write(kept: KeptFleet, lease: str | None) -> None:
    """As the worker does, or somebody's editor."""

    def change(state: State) -> None:
        entry = state.components[NAME]
        entry.endpoints, entry.lease = [], lease

    await kept.store.aupdate(change)


def written(kept: KeptFleet) -> str | None:
    return kept.store.read().components[NAME].lease


async def test_a_new_lease_that_the_worker_wrote_before_we_heard_of_it_stays(kept: KeptFleet) -> None:
    await write(kept, OTHER)
    await kept.statefile.heal(kept.now)
    assert written(kept) == OTHER
    kept.fleet = put(kept.fleet, NAME, lease=OTHER)
    await kept.statefile.heal(kept.now)
    await kept.statefile.heal(kept.now)
    assert written(kept) == OTHER


async def test_a_lease_of_which_nothing_is_heard_is_put_right_at_the_second_look(kept: KeptFleet) -> None:
    await write(kept, OTHER)
    await kept.statefile.heal(kept.now)
    await kept.statefile.heal(kept.now)
    assert written(kept) == OURS


async def test_a_lease_that_is_not_there_is_put_right_at_once(kept: KeptFleet) -> None:
    await write(kept, None)
    await kept.statefile.heal(kept.now)
    assert written(kept) == OURS


async def test_an_entry_that_somebody_removed_comes_back_whole(kept: KeptFleet) -> None:
    whole = kept.store.read().components[NAME]
    await kept.store.aupdate(lambda state: state.components.clear())
    await kept.statefile.heal(kept.now)
    assert kept.store.read().components[NAME] == whole
    assert kept.told == []
    kept.file.text, kept.file.version = "{broken", kept.file.version + 1
    await kept.statefile.heal(kept.now)
    assert kept.store.read().components[NAME] == whole
    assert kept.file.aside == ["{broken"]
    assert "the statefile was broken, kept as " in kept.told[0]


async def test_a_file_that_nobody_touched_is_not_written(kept: KeptFleet) -> None:
    await kept.statefile.heal(kept.now)
    before = kept.file.version
    await kept.statefile.heal(kept.now)
    assert kept.file.version == before


async def test_what_a_full_disk_refused_is_written_with_the_next_look(kept: KeptFleet) -> None:
    """Told once for each attempt; the arbiter goes on."""
    kept.file.full = True
    kept.fleet = put(kept.fleet, NAME, reason="scale -1")
    await kept.statefile.write([NAME], kept.now)
    assert kept.statefile.unwritten
    assert "the statefile cannot be written; it is tried again" in kept.told[0]
    assert kept.told.notes == kept.told
    kept.file.full = False
    await kept.statefile.heal(kept.now)
    assert not kept.statefile.unwritten
    assert kept.store.read().components[NAME].reason == "scale -1"
    assert kept.told.notes == []
