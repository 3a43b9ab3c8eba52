"""Models that share the GPUs, in the arbiter: what is measured, which orders follow, and what a person is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from dynamo_local.arbiter.commands import Commands
from dynamo_local.arbiter.model_shares import (
    ModelMetrics,
    ModelShares,
    prefill_targets,
    stranded,
    usable_gpus,
)
from dynamo_local.core.fleet.events import Leave
from dynamo_local.core.fleet.fleet import Fleet, Template
from dynamo_local.core.gpu_shares import LET_GO, HeldNow, Sharing
from dynamo_local.core.served import LastMinute
from dynamo_local.core.types import GraphSpec, Missing, Resources, Role, ServiceSpec
from dynamo_local.errors import NoWorkers
from dynamo_local.system.gpu_pool import GpuSample
from dynamo_local.system.gpus import SimInventory
from tests.drivers.eventually import eventually
from tests.fakes.arbiter.effects import FakeEffects, shell_of
from tests.fakes.arbiter.fleet_views import load, name, on_ledger, worker
from tests.fakes.arbiter.hand_clock import HandClock
from tests.fakes.infra.etcd import FakeEtcd

SHARING = Sharing(floor=0, min_stay_s=5.0, idle_s=60.0)
KEY = "dynamo/held/dynamo_Frontend"


def template(component: str) -> Template:
    return Template(component, Role.DECODE, gpus_per_worker=1, shared_floor=0)


def spec(component: str) -> ServiceSpec:
    return ServiceSpec(component, Role.DECODE, workers=0, resources=Resources(1), sharing=SHARING)


class House:
    """Models a, b, … on so many GPUs, with one ready worker for each that `ready` names."""

    def __init__(self, models: str, ready: str, gpus: int, *, since_s: float = 0.0) -> None:
        self.clock, self.etcd, self.told = HandClock(), FakeEtcd(), list[str]()
        self.asked: list[tuple[str, str, list[str]]] = []
        self.unreachable = False
        templates = tuple(template(each) for each in models)
        workers = [worker(0, "ready", template(each), since_s=since_s, load=load()) for each in ready]
        self.effects = FakeEffects(quick=True, answers={})
        self.controller = shell_of(on_ledger(workers, gpus, templates), self.effects)
        self.graph = GraphSpec("dynamo", "models", tuple(spec(each) for each in models))
        sampling: Any = SimpleNamespace(last_minute=LastMinute())
        links: Any = SimpleNamespace(kv=self.etcd)

        async def look() -> GpuSample:
            return GpuSample(tuple(SimInventory(gpus).sample()), {})

        self.shares = ModelShares(
            lambda: self.graph,
            self.controller,
            Commands(self.controller, look),
            sampling,
            links,
            lambda component: {},
            self.clock,
            lambda text, about=None: self.told.append(text),
            self.control,
        )

    async def control(self, name: str, op: str, *, timeout_s: float, components: list[str]) -> None:
        """A worker's control endpoint; `asked` keeps what it was asked."""
        self.asked.append((name, op, components))
        if self.unreachable:
            raise NoWorkers(f"no process of {name} answers")

    @property
    def fleet(self) -> Fleet:
        return self.controller.fleet

    def row(self, model: str) -> dict[str, Any]:
        return next(each for each in self.shares.status() if each["component"] == model)

    async def hears(self, **held: int) -> None:
        """A Frontend tells what it holds; returns when that was heard."""
        since_s = self.clock.now_s()
        value = msgspec.json.encode({model: HeldNow(count, since_s) for model, count in held.items()})
        following = asyncio.create_task(self.shares.follow())
        await self.etcd.put(KEY, value)
        shown = [row["component"] for row in self.shares.status()]
        await eventually(lambda: all(self.row(each)["held"] == held[each] for each in shown if each in held))
        following.cancel()


async def test_a_held_request_takes_the_gpu_of_a_model_that_nobody_uses() -> None:
    house = House("ab", "a", gpus=1)
    house.clock.at_s = 120.0
    await house.shares.decide()
    await house.hears(b=2)
    await house.shares.decide()
    assert (house.fleet.capacity("a"), house.fleet.capacity("b")) == (0, 1)
    assert house.row("b")["held"] == 2
    assert "held" in house.row("b")["why"]


async def test_a_worker_that_has_just_come_stays() -> None:
    house = House("ab", "a", gpus=1, since_s=49.0)
    await house.hears(b=1)
    await house.shares.decide()
    assert (house.fleet.capacity("a"), house.fleet.capacity("b")) == (1, 0)


async def test_a_free_gpu_is_used_at_once() -> None:
    house = House("ab", "a", gpus=2, since_s=49.0)
    await house.hears(b=1)
    await house.shares.decide()
    assert (house.fleet.capacity("a"), house.fleet.capacity("b")) == (1, 1)


@pytest.mark.parametrize("unreachable", [False, True])
async def test_requests_for_a_removed_model_end_when_no_worker_of_it_is_left(unreachable: bool) -> None:
    house = House("a", "a", gpus=2)
    house.unreachable = unreachable
    await house.hears(a=1, removed=2)
    await house.shares.decide()
    await house.shares.decide()
    assert house.asked == [("dynamo_Frontend", LET_GO, ["removed"])] * 2


async def test_requests_for_a_removed_model_wait_while_a_worker_of_it_serves_or_will() -> None:
    house = House("ab", "ab", gpus=2)
    house.graph = replace(house.graph, services=house.graph.services[:1])
    await house.hears(a=1, b=1)
    await house.shares.decide()
    assert house.asked == []


async def test_a_key_that_cannot_be_read_is_ignored() -> None:
    house = House("a", "", gpus=1)
    following = asyncio.create_task(house.shares.follow())
    await house.etcd.put(KEY, b"[1, 2]")
    await house.etcd.put("dynamo/held/dynamo_Frontend_1", msgspec.json.encode({"a": HeldNow(3, 50.0)}))
    await eventually(lambda: house.row("a")["held"] == 3)
    following.cancel()


async def test_a_run_that_leaves_gets_no_orders() -> None:
    house = House("ab", "a", gpus=2)
    await house.hears(b=1)
    house.controller.feed(Leave(stimulus_id="down"))
    await house.shares.decide()
    assert house.fleet.capacity("b") == 0


async def test_a_model_in_trouble_holds_no_other_up_and_is_told_once() -> None:
    """`c` has a faulted worker, which only a person starts again."""
    house = House("abc", "a", gpus=3)
    view = house.fleet
    faulted = worker(0, "faulted", template("c"))
    house.controller.fleet = view.with_workers({**view.workers, faulted.name: faulted})
    await house.hears(b=1, c=1)
    await house.shares.decide()
    assert house.fleet.capacity("b") == 1
    assert house.fleet.capacity("c") == 0


@pytest.mark.parametrize(("elsewhere", "found"), [(False, []), (True, [name(0, "a")])])
def test_sleepers_of_an_earlier_arbiter_are_found(elsewhere: bool, found: list[str]) -> None:
    view = on_ledger([worker(0, "sleeping", template("a"))], 1, (template("a"),))
    (uuid,) = view.gpus.sleepers[name(0, "a")].uuids
    if elsewhere:
        view = replace(view, gpus=view.gpus.reserved_elsewhere(uuid, "an earlier arbiter"))
    assert stranded(view, {"a"}) == found
    assert stranded(view, {"b"}) == []


def test_a_sleeper_that_keeps_nobody_knows_how_much_is_found() -> None:
    """In a container NVML shows no process of ours: nothing could start beside such a sleeper."""
    view = on_ledger([worker(0, "sleeping", template("a"))], 1, (template("a"),))
    unknown = Missing("another pid namespace")
    sleepers = {each: replace(kept, vram_bytes=unknown) for each, kept in view.gpus.sleepers.items()}
    assert stranded(replace(view, gpus=replace(view.gpus, sleepers=sleepers)), {"a"}) == [name(0, "a")]


async def test_metrics_name_the_model() -> None:
    house, registry = House("ab", "a", gpus=1), CollectorRegistry()
    ModelMetrics(registry, house.shares.status)
    await house.hears(b=2)
    assert registry.get_sample_value("dynamo_arbiter_model_workers", {"model": "a", "state": "ready"}) == 1
    assert registry.get_sample_value("dynamo_arbiter_model_held", {"model": "b"}) == 2


@pytest.mark.parametrize(
    ("decode", "wanted", "prefill"),
    [
        ((), 2, 4),
        (("ready", "ready"), 1, 4),
        (("ready", "draining"), 1, 4),
        (("falling_asleep",), 0, 2),
        (("ready",), 1, 2),
        (("starting",), 0, 0),
    ],
)
def test_prefill_workers_stay_until_the_worker_that_leaves_is_gone(
    decode: tuple[str, ...], wanted: int, prefill: int
) -> None:
    beside = replace(spec("a_PrefillWorker"), sharing=Sharing(beside="a", each=2))
    view = on_ledger([worker(n, state, template("a")) for n, state in enumerate(decode)], 8, (template("a"),))
    assert prefill_targets((spec("a"), beside, spec("b")), {"a": wanted, "b": 1}, view) == {"a_PrefillWorker": prefill}


def test_a_faulted_prefill_worker_is_not_ordered_again() -> None:
    beside = replace(spec("a_PrefillWorker"), sharing=Sharing(beside="a", each=2))
    workers = [worker(0, "ready", template("a")), worker(0, "ready", template(beside.name))]
    workers.append(worker(1, "faulted", template(beside.name)))
    view = on_ledger(workers, 8, (template("a"), template(beside.name)))
    assert prefill_targets((spec("a"), beside), {"a": 1}, view) == {beside.name: 1}


def test_gpus_of_strangers_are_not_shared() -> None:
    view = on_ledger([worker(0, "ready", template("a"))], 3, (template("a"),))
    assert usable_gpus(view, {"a"}) == 3
    assert usable_gpus(view, set()) == 2
