"""Loads and limits of single workers on Kubernetes, from their passes and registrations."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo_local.clock import AsyncioClock
from dynamo_local.core.types import Missing
from dynamo_local.kubernetes.api import ApiAway
from dynamo_local.kubernetes.observation import (
    LOOK_EVERY_S,
    HeardPasses,
    LoadsOfPasses,
    WorkerRegistrations,
    registered,
)
from dynamo_local.planner.values import Pool, WorkerPools
from tests.fakes.kubernetes.workers import BLOCK, KV_BLOCKS, NAMESPACE, told_pass, worker_metadata
from tests.fakes.planner.planner_loop import on_virtual_time

KV = KV_BLOCKS * BLOCK
POOLS = WorkerPools(Pool("P", 1, ready=2), Pool("D", 1, ready=2))
ALL = registered([worker_metadata("d", 1), worker_metadata("p", 2, "prefill")], NAMESPACE)


class Subscription:
    def __init__(self, subjects: set[str], subject: str) -> None:
        self.subjects, self.subject = subjects, subject
        subjects.add(subject)

    async def unsubscribe(self) -> None:
        self.subjects.discard(self.subject)


class Nats:
    """As far as a planner listens."""

    is_connected = True

    def __init__(self) -> None:
        self.subjects: set[str] = set()

    async def subscribe(self, subject: str, *, cb: Any) -> Subscription:
        return Subscription(self.subjects, subject)

    @property
    def namespaces(self) -> set[str]:
        return {subject.split(".")[1] for subject in self.subjects}


async def heard(found: WorkerRegistrations = ALL) -> tuple[HeardPasses, LoadsOfPasses]:
    """From now on; everybody is registered."""
    clock = AsyncioClock()
    passes = HeardPasses(clock, lambda: POOLS)

    async def look() -> WorkerRegistrations:
        return found

    await passes.follow(Nats(), NAMESPACE, look)
    await clock.sleep_until(clock.now_s() + 0.1)
    await passes.close()
    return passes, LoadsOfPasses(passes, lambda: POOLS, clock)


@on_virtual_time
async def test_a_workers_load_is_its_kv_and_what_waits_for_a_prefill() -> None:
    passes, loads = await heard()
    now_s = AsyncioClock().now_s()
    passes.heard("decode", told_pass("1", now_s, kv=KV // 2, running=3))
    passes.heard("decode", told_pass("2", now_s, kv=KV // 4, running=1))
    for worker, waits in (("11", 5), ("12", 2)):
        passes.heard("prefill", told_pass(worker, now_s, waits=waits))
    found = await loads.loads()
    assert set(loads.ready()) == set(found) == {"1", "2"}
    assert [found[name].value.gpu_cache_usage_perc for name in ("1", "2")] == [0.5, 0.25]
    assert found["1"].value.request_active_slots == 3
    depth = await loads.depth()
    assert not isinstance(depth, Missing)
    assert depth.value == 7


@on_virtual_time
async def test_whoever_was_not_heard_is_missing_and_not_idle() -> None:
    """one of two prefill engines is silent, so nobody knows how much waits; a silent decode worker is one
    of those that are ready, and has no load."""
    passes, loads = await heard()
    now_s = AsyncioClock().now_s()
    passes.heard("decode", told_pass("1", now_s))
    passes.heard("prefill", told_pass("11", now_s, waits=9))
    assert set(await loads.loads()) == {"1"}
    assert len(loads.ready()) == 2
    assert isinstance(await loads.depth(), Missing)


@on_virtual_time
async def test_without_a_card_the_kv_use_is_not_known() -> None:
    passes, loads = await heard(registered([worker_metadata("d", 1, blocks=None)], NAMESPACE))
    passes.heard("decode", told_pass("1", AsyncioClock().now_s(), kv=100, running=2))
    (load,) = (await loads.loads()).values()
    assert isinstance(load.value.gpu_cache_usage_perc, Missing)


@on_virtual_time
async def test_limits_are_those_of_the_graphs_own_workers() -> None:
    mine = worker_metadata("mine", 1)
    others = [worker_metadata("a", 2, namespace="default-other", blocks=5), {"spec": {"data": None}}, {}, "text"]
    passes, _ = await heard(registered([*others, mine], NAMESPACE))
    (limits,) = passes.capabilities().values()
    assert (limits.max_kv_tokens, limits.max_num_seqs, limits.context_length) == (KV, 64, 40960)


@pytest.mark.parametrize(
    ("namespace", "is_ours"),
    [("", True), ("-0a1b2c3d", True), ("-2", False), ("-canary12", False), ("x", False)],
)
def test_a_rolling_updates_workers_are_the_graphs_and_a_graph_with_a_longer_name_is_not(
    namespace: str, is_ours: bool
) -> None:
    found = registered([worker_metadata("d", 1, namespace=NAMESPACE + namespace)], NAMESPACE)
    assert found.namespaces == ({NAMESPACE + namespace} if is_ours else set())


@on_virtual_time
async def test_workers_of_a_rolling_update_are_heard_while_they_are_there() -> None:
    clock, nats = AsyncioClock(), Nats()
    passes = HeardPasses(clock, lambda: POOLS)
    there: list[Any] = [[worker_metadata("old", 1, namespace=f"{NAMESPACE}-00000001")]]

    async def look() -> WorkerRegistrations:
        if there[0] is None:
            raise ApiAway("away")
        return registered(there[0], NAMESPACE)

    async def after_the_next_look() -> None:
        await clock.sleep_until(clock.now_s() + LOOK_EVERY_S)

    await passes.follow(nats, NAMESPACE, look)
    await after_the_next_look()
    assert nats.namespaces == {NAMESPACE, f"{NAMESPACE}-00000001"}
    assert f"namespace.{NAMESPACE}.component.backend.forward-pass-metrics" in nats.subjects, "as Dynamo 1.2 publishes"
    there[0] = None
    await after_the_next_look()
    assert nats.namespaces == {NAMESPACE, f"{NAMESPACE}-00000001"}
    there[0] = [worker_metadata("new", 2, namespace=f"{NAMESPACE}-00000002")]
    await after_the_next_look()
    assert nats.namespaces == {NAMESPACE, f"{NAMESPACE}-00000002"}
    await passes.close()


def test_cards_can_be_read_as_they_come_from_the_server() -> None:
    assert registered(json.loads(json.dumps([worker_metadata("d", 1)])), NAMESPACE).limits["backend"].dp_size == 1
