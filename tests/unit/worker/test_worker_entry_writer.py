"""The worker's part of its statefile entry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_local.core.types import WorkerState
from dynamo_local.state.schema import ComponentEntry, State
from dynamo_local.state.store import StateStore
from dynamo_local.worker import process as worker_entry
from dynamo_local.worker.process import Entry, EntryWriter

NAME = "dynamo_W"
READY = Entry(pid=7, lease="ab", endpoints=("dynamo/components/W/e:ab",), draining=None, frontend_url=None)
DRAINING = replace(READY, lease=None, endpoints=(), draining="asked")


class Bench:
    """A statefile and a worker whose truth the test says."""

    def __init__(self, path: Path) -> None:
        self.store = StateStore(path, run_id="run")
        self.truth = READY
        self.commits = 0
        entry = ComponentEntry(watcher_name=NAME, component="W", state=WorkerState.READY)
        self.store.create(State(namespace="dynamo", run_id="run", components={NAME: entry}))
        self.writer = EntryWriter(self.store, NAME, self.tell)

    def tell(self) -> Entry:
        self.commits += 1
        return self.truth

    @property
    def entry(self) -> ComponentEntry:
        return self.store.read().components[NAME]

    def arbiter_says(self, state: WorkerState) -> None:
        with self.store.transaction() as found:
            found.components[NAME].state = state

    async def written(self, truth: Entry, *, resumed: bool | None = None) -> ComponentEntry:
        self.truth = truth
        self.writer.touch(resumed=resumed)
        assert await self.writer.flush(5)
        return self.entry


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """A ready worker, as the arbiter sees it."""
    monkeypatch.setattr(worker_entry, "RETRY_S", 0.02)
    made = Bench(tmp_path / "dynamo.json")
    yield made
    await made.writer.close()


async def test_lease_and_endpoints_are_written_together(bench: Bench) -> None:
    """Also from one lease to the next: an endpoint under another lease would be refused."""
    entry = await bench.written(READY)
    assert (entry.pid, entry.lease, entry.endpoints) == (7, "ab", ["dynamo/components/W/e:ab"])
    entry = await bench.written(replace(READY, lease="cd", endpoints=("dynamo/components/W/e:cd",)))
    assert (entry.lease, entry.endpoints) == ("cd", ["dynamo/components/W/e:cd"])


async def test_a_drain_that_nobody_committed_is_written_with_its_reason(bench: Bench) -> None:
    entry = await bench.written(DRAINING)
    assert (entry.state, entry.reason, entry.lease, entry.endpoints) == (WorkerState.DRAINING, "asked", None, [])
    entry = await bench.written(READY, resumed=True)
    assert (entry.state, entry.reason, entry.lease) == (WorkerState.READY, None, "ab")


@pytest.mark.parametrize("state", [WorkerState.DRAIN_TIMED_OUT, WorkerState.CRASHED, WorkerState.PENDING])
async def test_what_only_the_arbiter_knows_is_left_alone(bench: Bench, state: WorkerState) -> None:
    bench.arbiter_says(state)
    assert (await bench.written(DRAINING)).state is state
    assert (await bench.written(READY, resumed=True)).state is state


async def test_a_committed_drain_that_the_worker_has_not_heard_of_stays(bench: Bench) -> None:
    """The arbiter commits first: a change of ours in between, also after an earlier resume, must not undo it."""
    await bench.written(DRAINING)
    await bench.written(READY, resumed=True)
    bench.arbiter_says(WorkerState.DRAINING)
    assert (await bench.written(replace(READY, lease="ef", endpoints=()))).state is WorkerState.DRAINING


async def test_many_changes_need_few_commits(bench: Bench) -> None:
    for n in range(100):
        bench.truth = replace(READY, lease=f"{n + 1:x}", endpoints=())
        bench.writer.touch()
    assert await bench.writer.flush(5)
    assert (bench.entry.lease, bench.commits <= 3) == ("64", True)


async def test_a_broken_file_is_made_up_for_once_it_is_repaired(bench: Bench) -> None:
    """lesson 9: nothing is lost but time, and a resume is not forgotten."""
    await bench.written(DRAINING)
    good = bench.store.path.read_text()
    bench.store.path.write_text("{")
    bench.truth = READY
    bench.writer.touch(resumed=True)
    assert not await bench.writer.flush(0.1)
    bench.store.path.write_text(good)
    assert await bench.writer.flush(5)
    assert (bench.entry.state, bench.entry.lease) == (WorkerState.READY, "ab")


async def test_an_entry_that_is_gone_is_not_made_again(bench: Bench) -> None:
    with bench.store.transaction() as state:
        del state.components[NAME]
    bench.writer.touch()
    assert await bench.writer.flush(5)
    assert bench.store.read().components == {}


async def test_the_frontends_url_is_the_namespaces(bench: Bench) -> None:
    await bench.written(replace(READY, frontend_url="http://127.0.0.1:1"))
    assert bench.store.read().frontend_url == "http://127.0.0.1:1"


async def test_whether_the_file_says_draining(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    assert not await bench.writer.drains()
    bench.arbiter_says(WorkerState.DRAINING)
    assert await bench.writer.drains()
    await asyncio.to_thread(bench.store.path.write_text, "{")
    assert not await bench.writer.drains()
    assert "cannot tell" in caplog.text
