"""The arbiter's metrics on a real fleet and a real ledger: gauges say what is, counters what happened."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from dynamo_local.arbiter.effects import Act
from dynamo_local.arbiter.exporter import Exporter, Place
from dynamo_local.arbiter.links import Links
from dynamo_local.arbiter.metrics import GpuSeconds
from dynamo_local.arbiter.sampler import Sampling
from dynamo_local.arbiter.status import gpu_status
from dynamo_local.arbiter.tasks import Tasks
from dynamo_local.clock import AsyncioClock
from dynamo_local.core.fleet.effects import CallBack, CountRequests
from dynamo_local.core.fleet.events import (
    CalledBack,
    Drain,
    Event,
    GpusSeen,
    KeyGone,
    LoadsHeard,
    ProcessGone,
    RequestsCounted,
)
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.types import Missing, WorkerState
from dynamo_local.errors import ConfigError
from dynamo_local.ports import QueueDepth
from dynamo_local.system.gpus import SimInventory
from tests.fakes.arbiter.effects import FakeEffects, shell_of
from tests.fakes.arbiter.fleet_views import DECODE, FRONTEND, PREFILL, fleet, lease_of, load, name, on_ledger, worker
from tests.fakes.arbiter.hand_clock import HandClock
from tests.tools.scraped import Samples, by_label, samples

WORKERS, DRAINS = "dynamo_arbiter_workers", "dynamo_arbiter_drains_total"
RESTARTS, CUT = "dynamo_arbiter_restarts_total", "dynamo_arbiter_requests_cut_total"
GPUS, GPU_SECONDS = "dynamo_arbiter_gpus", "dynamo_arbiter_gpu_held_seconds_total"
QUEUE, DEATHS = "dynamo_arbiter_prefill_queue_requests", "dynamo_arbiter_task_deaths_total"
TWO_GPUS = (replace(DECODE, gpus_per_worker=2), PREFILL, FRONTEND)


class House:
    """A fleet on its GPUs, the controller that changes it, and the metrics of both. `left` are requests still held at a
    drain's deadline, by worker."""

    def __init__(self, view: Fleet | None = None, place: Place | None = None) -> None:
        self.clock = HandClock()
        self.left: dict[str, int | Missing] = {}
        self.effects = FakeEffects(quick=True, answers={CallBack: _called_back, CountRequests: self._counted})
        self.controller = shell_of(fleet("ready", gpus=4) if view is None else view, self.effects, self.clock)
        self.sampling = Sampling("dynamo", self.controller, Links("dynamo", "01J"), self.clock)
        self.tasks = Tasks(AsyncioClock(), self.effects.tell)
        self.exporter = Exporter(
            self.controller,
            self.sampling,
            self.clock,
            components=("VllmWorker", "PrefillWorker"),
            state=lambda: "ready",
            tasks=self.tasks,
            place=place,
        )
        self.exporter.now()

    def worker(self, n: int = 0) -> Worker:
        """A decode worker, as it is now."""
        return self.controller.fleet.workers[name(n)]

    def feed(self, *stimuli: Event) -> None:
        for event in stimuli:
            self.controller.feed(event)

    def drain(self, *numbers: int) -> None:
        for n in numbers:
            self.feed(Drain(stimulus_id="t", name=name(n), force=True))

    def exits(self, n: int, code: int) -> None:
        pid = self.worker(n).pid
        assert pid is not None
        self.feed(ProcessGone(stimulus_id="t", name=name(n), pid=pid, code=code))

    def gpus_are_seen(self) -> None:
        """As they are, and empty."""
        self.feed(
            GpusSeen(stimulus_id="gpus", devices=tuple(SimInventory(len(self.controller.fleet.gpus.devices)).sample()))
        )

    def scrape(self) -> Samples:
        return samples(self.exporter.metrics.exposition().decode())

    def _counted(self, act: Act) -> Event:
        assert isinstance(act, CountRequests)
        return RequestsCounted(stimulus_id="t", name=act.name, pid=act.pid, in_flight=self.left[act.name])


def _called_back(act: Act) -> Event:
    assert isinstance(act, CallBack)
    return CalledBack(stimulus_id="t", name=act.name, pid=act.pid, requested_by=act.requested_by)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """One ready decode worker on four devices."""
    house = House()
    yield house
    await house.tasks.close()
    await house.exporter.stop()


def test_workers_are_counted_by_component_and_state() -> None:
    workers = [*fleet("ready", "ready").workers.values(), worker(0, "starting", PREFILL)]
    house = House(on_ledger(workers, 4))
    house.drain(1)
    assert by_label(house.scrape(), WORKERS) == {
        ("VllmWorker", "ready"): 1,
        ("VllmWorker", "draining"): 1,
        ("PrefillWorker", "starting"): 1,
    }
    assert house.scrape()[WORKERS, ("VllmWorker", "starting")] == 0.0  # seen to be none, not absent


def test_every_gpu_is_in_one_place_and_the_status_agrees() -> None:
    view = fleet("ready", gpus=4, templates=TWO_GPUS)
    free = next(iter(view.gpus.free))
    view = replace(view, gpus=view.gpus.quarantine(free.uuid, "its memory never came back"))
    house = House(view)
    assert by_label(house.scrape(), GPUS) == {("held",): 2, ("free",): 1, ("quarantined",): 1}
    rows = gpu_status(house.controller.fleet.gpus)
    assert sorted(row["state"] for row in rows) == ["free", "held", "held", "quarantined"]
    assert {row["worker"] for row in rows} == {None, "dynamo_VllmWorker"}
    assert [row["reason"] for row in rows if row["reason"]] == ["its memory never came back"]


def test_gpu_seconds_go_on_through_a_drain_and_end_when_the_gpus_are_back() -> None:
    house = House(fleet("ready", gpus=4, templates=TWO_GPUS))
    house.clock.at_s += 10.0
    house.drain(0)
    house.clock.at_s += 5.0
    house.exits(0, 0)
    house.clock.at_s += 1.0  # its memory comes back
    house.gpus_are_seen()
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


def test_a_process_under_a_used_name_is_a_restart_and_the_first_is_none() -> None:
    house = House()
    assert house.scrape()[RESTARTS, ("VllmWorker",)] == 0.0  # from the first: an increase needs a beginning
    house.exits(0, -9)
    due_s = house.worker().due_s
    assert due_s is not None
    house.clock.at_s = due_s
    house.controller.tick()
    house.gpus_are_seen()
    assert by_label(house.scrape(), RESTARTS) == {("VllmWorker",): 1}
    assert (house.worker().state, house.worker().restarts) == (WorkerState.STARTING, 1)  # as the status says


def test_drains_are_counted_by_how_they_end_and_cut_requests_with_them() -> None:
    house = House(fleet(*["ready"] * 5))
    finished, cut, unknown, back = range(1, 5)
    house.drain(finished, cut, unknown, back)
    assert by_label(house.scrape(), DRAINS) == {}
    house.exits(finished, 0)
    house.feed(Drain(cancel=True, stimulus_id="t", name=name(back)))
    house.left = {name(cut): 3, name(unknown): Missing("no answer")}
    house.clock.at_s += DECODE.drain_deadline_s
    house.controller.tick()
    house.exits(cut, -9)
    assert by_label(house.scrape(), DRAINS) == {
        ("VllmWorker", "finished"): 1,
        ("VllmWorker", "timed_out"): 2,
        ("VllmWorker", "taken_back"): 1,
    }
    assert by_label(house.scrape(), CUT) == {("VllmWorker",): 3}


@pytest.mark.parametrize(("asked", "outcome"), [(True, "timed_out"), (False, "failed")])
def test_a_worker_that_hangs_while_it_drains(asked: bool, outcome: str) -> None:
    """It is ended at once. One that nobody asked to leave (its lease went away) has failed, and comes back."""
    house = House(fleet("ready", "ready"))
    if asked:
        house.drain(1)
    else:
        house.feed(KeyGone(stimulus_id="t", name=name(1), lease=lease_of(1)))
    for _ in range(12):
        house.feed(LoadsHeard(stimulus_id="sample", loads={name(): load()}))
        house.clock.at_s += 3.0
    assert by_label(house.scrape(), DRAINS) == {("VllmWorker", outcome): 1}


async def test_a_queue_that_cannot_be_seen_has_no_sample(house: House) -> None:
    assert [key for key in house.scrape() if key[0] == QUEUE] == []
    house.sampling.queue.depth = QueueDepth(pending=0, outstanding=2)
    assert {labels: value for (name, labels), value in house.scrape().items() if name == QUEUE} == {
        ("pending",): 0.0,
        ("outstanding",): 2.0,
    }


async def test_tasks_of_the_arbiter_that_died_are_counted(house: House) -> None:
    died = asyncio.Event()

    async def broken() -> None:
        raise RuntimeError("boom")

    house.tasks.keep("load sampling", broken, on_death=died.set)
    house.tasks.keep("pulse", asyncio.Event().wait)
    assert house.scrape()[DEATHS, ("pulse",)] == 0.0
    async with asyncio.timeout(5.0):
        await died.wait()
    assert house.scrape()[DEATHS, ("load sampling",)] == 1.0


async def test_it_is_served_on_loopback_and_only_read(house: House) -> None:
    assert house.exporter.url is None
    await house.exporter.start()
    url = str(house.exporter.url)
    assert url.startswith("http://127.0.0.1:")
    async with httpx.AsyncClient() as http:
        page = await http.get(url)
        assert page.headers["content-type"].startswith("text/plain; version=")
        assert samples(page.text)["dynamo_arbiter_state", ("ready",)] == 1.0
        assert "date" not in page.headers  # the price of a server that does not tick
        assert (await http.head(url)).text == ""
        assert (await http.post(url)).status_code == 405
        assert (await http.get(url.removesuffix("/metrics"))).status_code == 404
    await house.exporter.stop()
    assert house.exporter.url is None


async def test_on_a_socket_it_is_this_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    path.touch()
    house = House(place=Place(socket=path))
    await house.exporter.start()
    assert house.exporter.url == f"unix://{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path))) as http:
        page = await http.get("http://arbiter/metrics")
    assert samples(page.text)["dynamo_arbiter_state", ("ready",)] == 1.0
    await house.exporter.stop()


async def test_a_scrape_shows_a_key_where_there_are_some(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("scraper-key-1\n")
    keys.chmod(0o600)
    house = House(place=Place(api_key=f"file:{keys}"))
    await house.exporter.start()
    async with httpx.AsyncClient() as http:
        url = str(house.exporter.url)
        assert (await http.get(url)).status_code == 401
        page = await http.get(url, headers={"Authorization": "Bearer scraper-key-1"})
    assert samples(page.text)["dynamo_arbiter_state", ("ready",)] == 1.0
    await house.exporter.stop()
    await house.tasks.close()


async def test_a_port_in_use_is_bad_input_that_names_the_option(house: House) -> None:
    await house.exporter.start()
    port = int(str(house.exporter.url).split(":")[-1].split("/")[0])
    other = House(place=Place(port))
    with pytest.raises(ConfigError, match=rf"Host: port {port} on 127.0.0.1 is in use.*--Host.metrics-port=PORT"):
        await other.exporter.start()
    await other.exporter.stop()
