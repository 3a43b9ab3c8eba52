"""A worker's registration beside its drain, on the fake etcd: a lease that goes is an order once, not twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dynamo_local.worker.drain import Drain, Phase
from dynamo_local.worker.registration import Endpoints, Registration
from tests.fakes.infra.etcd import FakeEtcd
from tests.fakes.worker.identities import identity_of

READY_KEYS = "dynamo/workers/"
SOON_S = 5.0
TURNS = range(0, 24, 3)
"""So many turns of the event loop between two things: a revoke is noticed, and acted on, within some twenty."""


class Worker:
    """A drain and a registration, joined as the worker process joins them. It has something to finish, for ever."""

    def __init__(self, etcd: FakeEtcd) -> None:
        identity = identity_of("PrefillWorker")
        self.etcd = etcd
        self.drain = Drain(self)
        self.registration = Registration(
            identity,
            Endpoints(identity),
            facts=dict,
            on_change=lambda *, resumed=None: None,
            on_revoked=lambda: self.drain.begin("its lease was revoked"),
            serves=lambda: self.drain.phase is Phase.READY,
        )

    async def start(self) -> None:
        await self.registration.take_lease(self.etcd, self._is_draining)
        await self.registration.register_ready(lambda: asyncio.sleep(0))
        assert self.drain.started()

    async def close(self) -> None:
        await self.drain.close()
        await self.registration.close()

    async def keys(self) -> list[str]:
        """Its ready keys."""
        return [kv.key for kv in (await self.etcd.get_prefix(READY_KEYS))[0]]

    async def _is_draining(self) -> bool:
        return self.drain.phase in (Phase.DRAINING, Phase.LEAVING)

    def unfollow_lease(self) -> None:
        self.registration.unfollow()

    async def end_standby(self) -> None: ...

    def stop_accepting(self, linger_s: float) -> None: ...

    async def deregister(self) -> None:
        await self.registration.deregister()

    async def finish(self) -> None:
        await asyncio.Event().wait()

    async def resume(self) -> None:
        await self.registration.restore()


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    """One that is ready."""
    made = Worker(FakeEtcd())
    await made.start()
    yield made
    await made.close()


async def turns(count: int) -> None:
    """Let others run so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("before_sign", TURNS)
@pytest.mark.parametrize("before_cancel", TURNS)
@pytest.mark.parametrize("how", ["etcd loses its data", "the lease is revoked"])
async def test_a_drain_is_taken_back_though_its_lease_goes_meanwhile(
    worker: Worker, how: str, before_sign: int, before_cancel: int
) -> None:
    """seed 989012058: the worker was told to drain (SIGTERM) as its lease was lost, and called back at once. That the
    old lease was gone was noticed while it came back, was taken for a later order, and it left after the answer."""
    if how == "the lease is revoked":
        assert worker.registration.lease is not None
        await worker.etcd.revoke(worker.registration.lease.lease_id)
    else:
        worker.etcd.restart(lose_data=True)
    await turns(before_sign)
    worker.drain.begin("SIGTERM")
    await turns(before_cancel)
    await worker.drain.cancel()
    await turns(50)
    assert (worker.drain.phase, len(await worker.keys())) == (Phase.READY, 1)
    assert worker.registration.held_lease() in (await worker.keys())[0]


async def test_the_lease_that_it_has_after_that_is_followed(worker: Worker) -> None:
    worker.drain.begin("SIGTERM")
    await worker.drain.cancel()
    assert worker.registration.lease is not None
    await worker.etcd.revoke(worker.registration.lease.lease_id)
    async with asyncio.timeout(SOON_S):
        while worker.drain.phase is Phase.READY:
            await asyncio.sleep(0.005)
    assert (worker.drain.phase, worker.drain.reason) == (Phase.DRAINING, "its lease was revoked")
