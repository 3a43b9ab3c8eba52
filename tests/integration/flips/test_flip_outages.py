"""etcd goes away in the middle of a flip, on real processes: it ends in the old role or in the new one, not in both."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.drivers.flips import BASE, aflip, counts, each_in_one_role, facts
from tests.drivers.scaled import PATIENCE_S, events, kinds, load, names, settled
from tests.drivers.served import Served, auntil
from tests.drivers.servers import RealEtcd, RealNats

pytestmark = pytest.mark.infra

LEASE_TTL_S = 30
"""Longer than what is tried here: etcd forgets no lease while it stands still."""


def served(etcd: RealEtcd, nats: RealNats, namespace: str) -> Served:
    """Two workers of each role, on an etcd that may be stopped."""
    env = {"ETCD_ENDPOINTS": etcd.endpoint, "NATS_SERVER": nats.address, "DYN_LEASE_TTL_S": str(LEASE_TTL_S)}
    return Served(*counts(), namespace=namespace, env=env)


@contextmanager
def away(etcd: RealEtcd) -> Iterator[None]:
    etcd.pause()
    try:
        yield
    finally:
        etcd.resume()


async def flip_while_away(graph: Served, etcd: RealEtcd, delay_s: float, away_s: float) -> None:
    """A flip of whichever role has more; etcd stops so long after the command."""
    victim = names(graph, max(BASE, key=lambda each: len(names(graph, each))))[-1]
    flipping = asyncio.create_task(aflip(graph, victim))
    await asyncio.sleep(delay_s)  # the moment is what is tried, not what is waited for
    with away(etcd):
        await flipping  # committed, whatever etcd does
        await asyncio.sleep(away_s)  # so long an outage is what is tried
    await settled(graph, PATIENCE_S)
    await each_in_one_role(graph)


@pytest.mark.full
async def test_a_flip_survives_an_etcd_that_is_away_for_a_moment(own_etcd: RealEtcd, nats_server: RealNats) -> None:
    with served(own_etcd, nats_server, "away") as graph:
        graph.start()
        pids = set(facts(graph))
        async with load(graph, streams=4) as streams:
            for delay_s in (0.0, 0.04):
                await flip_while_away(graph, own_etcd, delay_s, 1.0)
                await streams.more(4)
        streams.check()
        assert set(facts(graph)) == pids


@pytest.mark.full
async def test_a_flip_that_cannot_register_ends_in_the_old_role(own_etcd: RealEtcd, nats_server: RealNats) -> None:
    with served(own_etcd, nats_server, "gone") as graph:
        graph.start()
        pids = set(facts(graph))
        async with load(graph, streams=4) as streams:
            before = names(graph, "VllmWorker")
            with away(own_etcd):
                await aflip(graph, before[-1])
                await auntil(lambda: "FlipFailed" in kinds(events(graph, before[-1])), PATIENCE_S, what=graph.status)
            await settled(graph, PATIENCE_S)
            await each_in_one_role(graph)
            assert names(graph, "VllmWorker") == before
            await streams.more(4)
            for delay_s in (0.02, 0.05, 0.1):
                await flip_while_away(graph, own_etcd, delay_s, 12.0)
                await streams.more(4)
        streams.check()
        assert set(facts(graph)) == pids
