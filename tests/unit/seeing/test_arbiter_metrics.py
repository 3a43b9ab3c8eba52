"""The arbiter's metrics on a real fleet and a real ledger: gauges say what is, counters what happened."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from dynamo_local.core.lifecycle import (
    BackoffElapsed,
    BackoffStarted,
    DrainCancelled,
    DrainDeadlinePassed,
    DrainRequested,
    Event,
    ProcessExited,
    Registered,
    SpawnRequested,
)
from dynamo_local.core.types import Missing, Role
from dynamo_local.errors import ConfigError
from dynamo_local.ports import QueueDepth
from dynamo_local.serve.fleet import Fleet, Worker
from dynamo_local.serve.gpus import GpuPool
from dynamo_local.serve.inventory import SimInventory
from dynamo_local.serve.links import Links
from dynamo_local.serve.metrics import GpuSeconds
from dynamo_local.serve.plan import WatcherPlan
from dynamo_local.serve.sampling import Sampling
from dynamo_local.serve.seeing import Seeing
from dynamo_local.serve.status import gpu_status
from dynamo_local.state import State
from tests.fakes.hand_clock import HandClock
from tests.fakes.memory_store import MemoryFile, MemoryStore
from tests.fakes.scraped import Samples, by_label, samples
from tests.simulation.world import MemoryEvents, NoLocks

WORKERS, DRAINS = "dynamo_arbiter_workers", "dynamo_arbiter_drains_total"
RESTARTS, CUT = "dynamo_arbiter_restarts_total", "dynamo_arbiter_requests_cut_total"
GPUS, GPU_SECONDS = "dynamo_arbiter_gpus", "dynamo_arbiter_gpu_held_seconds_total"
QUEUE = "dynamo_arbiter_prefill_queue_requests"


class House:
    """Four GPUs, two components, and the metrics of them."""

    def __init__(self) -> None:
        self.clock = HandClock()
        head = State(namespace="dynamo", run_id="01J", circus_endpoint="ipc:///x")
        store = MemoryStore(MemoryFile())
        self.fleet = Fleet(head, store, MemoryEvents(), self.clock)  # type: ignore[arg-type]
        self.pool = GpuPool("dynamo", SimInventory(4), NoLocks())  # type: ignore[arg-type]
        self.pool.sample()
        self.sampling = Sampling("dynamo", self.fleet, Links("dynamo", "01J"), self.clock)
        components = ("VllmWorker", "PrefillWorker")
        self.seeing = Seeing(
            self.fleet, self.pool, self.sampling, self.clock, components=components, state=lambda: "ready"
        )

    async def spawn(self, name: str, gpus: int) -> Worker:
        """A worker that starts."""
        component = name.split("_")[1]
        devices = self.pool.allocate(name, gpus)
        plan = WatcherPlan(name, component, Role.DECODE, ("true",), "/", {}, devices, gpus, Path("/x"), 300.0, 600.0)
        worker = self.fleet.add(plan)
        await self.apply(worker, SpawnRequested(stimulus_id="t"))
        return worker

    async def ready(self, name: str, gpus: int = 1) -> Worker:
        """A worker that serves."""
        worker = await self.spawn(name, gpus)
        await self.apply(worker, Registered(stimulus_id="t", lease="a1"))
        return worker

    async def apply(self, worker: Worker, *events: Event) -> None:
        for event in events:
            await self.fleet.apply({worker.name: event})

    async def free(self, worker: Worker) -> None:
        """Its memory is back."""
        self.pool.give_back(worker.name, worker.gpus, [])
        worker.gpus = ()
        self.fleet.notify()

    def scrape(self) -> Samples:
        return samples(self.seeing.metrics.exposition().decode())


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    await house.fleet.create()
    yield house
    await house.seeing.stop()


async def test_workers_are_counted_by_component_and_state(house: House) -> None:
    await house.ready("dynamo_VllmWorker")
    leaving = await house.ready("dynamo_VllmWorker_1")
    await house.spawn("dynamo_PrefillWorker", 1)
    await house.apply(leaving, DrainRequested(stimulus_id="t"))
    assert by_label(house.scrape(), WORKERS) == {
        ("VllmWorker", "ready"): 1,
        ("VllmWorker", "draining"): 1,
        ("PrefillWorker", "starting"): 1,
    }
    assert house.scrape()[WORKERS, ("VllmWorker", "starting")] == 0.0  # seen to be none, not absent


async def test_every_gpu_is_in_one_place_and_the_status_agrees(house: House) -> None:
    await house.ready("dynamo_VllmWorker", gpus=2)
    free = next(device for device in house.pool.ledger.devices() if device in house.pool.ledger.free())
    house.pool.ledger.quarantine(free.uuid, "its memory never came back")
    assert by_label(house.scrape(), GPUS) == {("held",): 2, ("free",): 1, ("quarantined",): 1}
    rows = gpu_status(house.pool.ledger.snapshot())
    assert sorted(row["state"] for row in rows) == ["free", "held", "held", "quarantined"]
    assert {row["worker"] for row in rows} == {None, "dynamo_VllmWorker"}
    assert [row["reason"] for row in rows if row["reason"]] == ["its memory never came back"]


async def test_gpu_seconds_go_on_through_a_drain_and_end_when_the_gpus_are_back(house: House) -> None:
    worker = await house.ready("dynamo_VllmWorker", gpus=2)
    house.clock.at_s += 10.0
    await house.apply(worker, DrainRequested(stimulus_id="t"))
    house.clock.at_s += 5.0
    await house.apply(worker, ProcessExited(stimulus_id="t", exit_code=0))
    house.clock.at_s += 1.0  # its memory comes back
    await house.free(worker)
    house.clock.at_s += 100.0
    assert by_label(house.scrape(), GPU_SECONDS) == {("VllmWorker",): 32.0}
    assert by_label(house.scrape(), GPU_SECONDS) == {("VllmWorker",): 32.0}  # asking adds nothing


def test_gpu_seconds_of_a_component_that_is_gone_stay() -> None:
    seconds = GpuSeconds()
    seconds.settle(5.0, {"VllmWorker": 2, "PrefillWorker": 1})
    seconds.settle(7.0, {"PrefillWorker": 1})
    seconds.settle(8.0, {})
    seconds.settle(99.0, {})
    assert seconds.totals() == {"VllmWorker": 4.0, "PrefillWorker": 3.0}


async def test_a_process_under_a_used_name_is_a_restart_and_the_first_is_none(house: House) -> None:
    worker = await house.ready("dynamo_VllmWorker")
    assert house.scrape()[RESTARTS, ("VllmWorker",)] == 0.0  # from the first: an increase needs a beginning
    await house.apply(
        worker, ProcessExited(stimulus_id="t", exit_code=-9), BackoffStarted(stimulus_id="t", delay_s=1.0)
    )
    await house.apply(worker, BackoffElapsed(stimulus_id="t"))
    assert by_label(house.scrape(), RESTARTS) == {("VllmWorker",): 1}
    assert worker.restarts == 1  # as the status says


async def test_drains_are_counted_by_how_they_end_and_cut_requests_with_them(house: House) -> None:
    finished, cut, unknown, back = [await house.ready(f"dynamo_VllmWorker_{n}") for n in range(1, 5)]
    for worker in (finished, cut, unknown, back):
        await house.apply(worker, DrainRequested(stimulus_id="t"))
    assert by_label(house.scrape(), DRAINS) == {}
    await house.apply(finished, ProcessExited(stimulus_id="t", exit_code=0))
    await house.apply(back, DrainCancelled(stimulus_id="t"))
    await house.apply(cut, DrainDeadlinePassed(stimulus_id="t", deadline_s=600.0, requests_cut=3))
    await house.apply(cut, ProcessExited(stimulus_id="t", exit_code=-9))
    silent = DrainDeadlinePassed(stimulus_id="t", deadline_s=600.0, requests_cut=Missing("no answer"))
    await house.apply(unknown, silent)
    assert by_label(house.scrape(), DRAINS) == {
        ("VllmWorker", "finished"): 1,
        ("VllmWorker", "timed_out"): 2,
        ("VllmWorker", "taken_back"): 1,
    }
    assert by_label(house.scrape(), CUT) == {("VllmWorker",): 3}


async def test_a_queue_that_cannot_be_seen_has_no_sample(house: House) -> None:
    assert [key for key in house.scrape() if key[0] == QUEUE] == []
    house.sampling.queue.depth = QueueDepth(pending=0, outstanding=2)
    assert {labels: value for (name, labels), value in house.scrape().items() if name == QUEUE} == {
        ("pending",): 0.0,
        ("outstanding",): 2.0,
    }


async def test_it_is_served_on_loopback_and_only_read(house: House) -> None:
    assert house.seeing.url is None
    await house.seeing.start(0)
    url = str(house.seeing.url)
    assert url.startswith("http://127.0.0.1:")
    async with httpx.AsyncClient() as http:
        page = await http.get(url)
        assert page.headers["content-type"].startswith("text/plain; version=")
        assert samples(page.text)["dynamo_arbiter_state", ("ready",)] == 1.0
        assert "date" not in page.headers  # the price of a server that does not tick
        assert (await http.head(url)).text == ""
        assert (await http.post(url)).status_code == 405
        assert (await http.get(url.removesuffix("/metrics"))).status_code == 404
    await house.seeing.stop()
    assert house.seeing.url is None


async def test_a_port_in_use_is_bad_input_that_names_the_option(house: House) -> None:
    await house.seeing.start(0)
    port = int(str(house.seeing.url).split(":")[-1].split("/")[0])
    other = House()
    with pytest.raises(ConfigError, match=rf"Host: port {port} on 127.0.0.1 is in use.*--Host.metrics-port=PORT"):
        await other.seeing.start(port)
    await other.seeing.stop()
