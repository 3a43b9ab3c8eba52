"""Requests that wait for a prefill where prefill workers are commands."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_local.arbiter.planner_observation import ArbiterWorld, prefills_wait_in
from dynamo_local.arbiter.sampler import LoadsSample
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.types import GraphSpec, Load, Missing, Role, ServiceSpec, WorkerState
from dynamo_local.planner.scaling_times import ScalingTimes
from dynamo_local.planner.values import Reading
from tests.fakes.arbiter.hand_clock import HandClock

READY, STARTING = WorkerState.READY, WorkerState.STARTING
KNOWN = Load(prefills_waiting=0)
GRAPH = GraphSpec(
    "dynamo",
    "disagg.yaml",
    (
        ServiceSpec("Frontend", Role.FRONTEND, runtime="dynamo-1x"),
        ServiceSpec("Decode", Role.DECODE, runtime="dynamo-1x"),
        ServiceSpec("Prefill", Role.PREFILL, runtime="dynamo-1x"),
    ),
)
FRONTEND = Load(num_requests_waiting=50, prefills_waiting=3)


def worker(name: str, role: Role, state: WorkerState = READY) -> Worker:
    """As the fleet has it."""
    component, _, n = name.partition("_")
    return Worker(name, component, role, int(n or 0), state)


FLEET = [
    worker("Frontend", Role.FRONTEND),
    worker("Decode", Role.DECODE),
    worker("Prefill", Role.PREFILL),
    worker("Prefill_1", Role.PREFILL),
    worker("Prefill_2", Role.PREFILL, STARTING),
]


async def waiting(loads: dict[str, tuple[Load, float]], failed: Missing | None = None) -> Any:
    """What the planner's queue source answers."""

    async def sample() -> LoadsSample:
        return LoadsSample(loads, failed)

    controller: Any = SimpleNamespace(fleet=Fleet("dynamo", (), {w.name: w for w in FLEET}))
    sampling: Any = SimpleNamespace(loads=sample)
    nothing: Any = None
    clock = HandClock()
    waiting_in = prefills_wait_in(GRAPH, "Prefill")
    times = ScalingTimes(clock.now_s)
    world = ArbiterWorld(controller, sampling, nothing, "Prefill", "Decode", clock, times, waiting_in=waiting_in)
    return await world.depth()


async def test_what_waits_in_prefill_workers_and_in_the_frontends_routers_is_added_up() -> None:
    found = await waiting(
        {
            "Frontend": (FRONTEND, 49.0),
            "Prefill": (Load(prefills_waiting=2), 48.5),
            "Prefill_1": (Load(prefills_waiting=4, num_requests_waiting=4), 49.5),
            "Decode": (Load(num_requests_waiting=100), 49.5),
        }
    )
    assert (found.value, found.at_s) == (9, 48.5)


@pytest.mark.parametrize(
    "loads",
    [
        {"Frontend": (FRONTEND, 49.0), "Prefill": (KNOWN, 49.0)},
        {"Prefill": (KNOWN, 49.0), "Prefill_1": (KNOWN, 49.0)},
        {"Frontend": (Load(), 49.0), "Prefill": (KNOWN, 49.0), "Prefill_1": (KNOWN, 49.0)},
        {"Frontend": (FRONTEND, 49.0), "Prefill": (KNOWN, 49.0), "Prefill_1": (Load(), 49.0)},
    ],
    ids=["a worker is silent", "the frontend is silent", "the frontend does not know", "a worker does not know"],
)
async def test_a_part_of_the_sum_is_no_sum(loads: dict[str, tuple[Load, float]]) -> None:
    assert isinstance(await waiting(loads), Missing)


async def test_nobody_could_be_asked() -> None:
    assert await waiting({}, Missing("NATS is away")) == Missing("NATS is away")


def test_a_kv_use_that_nobody_knows_is_no_sample() -> None:
    unknown, known = Load(gpu_cache_usage_perc=Missing("not told")), Load(gpu_cache_usage_perc=0.5)
    reading = Reading(1.0, None, {"Decode": unknown, "Decode_1": known})
    assert reading.kv.count == 1


def test_other_commands_say_it_as_any_worker_does_and_their_frontends_hold_nothing_back() -> None:
    services = tuple(
        replace(spec, runtime="http" if spec.role is not Role.FRONTEND else None) for spec in GRAPH.services
    )
    assert prefills_wait_in(replace(GRAPH, services=services), "Prefill") == {"Prefill": "num_requests_waiting"}


def test_a_graph_with_our_own_prefill_workers_has_a_queue() -> None:
    services = tuple(replace(spec, runtime=None) for spec in GRAPH.services)
    assert prefills_wait_in(replace(GRAPH, services=services), "Prefill") == {}
    assert prefills_wait_in(GRAPH, None) == {}
