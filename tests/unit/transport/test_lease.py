"""Why a lease is missing, and what the keeper does about it, on the fake etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dynamo_local.clock import AsyncioClock, run_virtual
from dynamo_local.errors import EtcdUnavailable, LeaseNotFound, StateError
from dynamo_local.transport.lease import LeaseKeeper, Lost, Revoked, classify_missing_lease
from tests.drivers.eventually import eventually
from tests.fakes.infra.etcd import FakeEtcd

DEADLINE_S = 5.0


class SkippingClock(AsyncioClock):
    """The loop's clock, and what a suspended process has missed: after `skip` that much has passed at once."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def skip(self, seconds: float) -> None:
        self._ahead_s += seconds

    def now_s(self) -> float:
        return super().now_s() + self._ahead_s

    async def sleep_until(self, deadline_s: float) -> None:
        await asyncio.sleep(max(0.0, deadline_s - self.now_s()))


class Worker:
    """Shows what surrounds a keeper: the statefile's word, and a record of re-grants."""

    def __init__(self, etcd: FakeEtcd) -> None:
        self.etcd = etcd
        self.draining = False
        self.statefile_error: Exception | None = None
        self.regrants: list[int] = []
        self.keys_at_regrant: list[int] = []
        self.failing_regrants = 0
        self.clock = SkippingClock()
        self.keeper = LeaseKeeper(
            etcd, ttl_s=10, is_draining=self.is_draining, on_regrant=self.on_regrant, clock=self.clock
        )

    async def is_draining(self) -> bool:
        if self.statefile_error is not None:
            raise self.statefile_error
        return self.draining

    async def on_regrant(self, lease_id: int) -> None:
        assert self.keeper.lease_id == lease_id
        self.regrants.append(lease_id)
        if self.failing_regrants > 0:
            self.failing_regrants -= 1
            raise OSError("disk full")
        self.keys_at_regrant.append(len((await self.etcd.get_prefix("w/"))[0]))

    async def keys(self) -> list[str]:
        return [kv.key for kv in (await self.etcd.get_prefix("w/"))[0]]

    async def registered_anew(self, first: int) -> None:
        """Return when all keys are there under another lease than `first`."""
        async with asyncio.timeout(DEADLINE_S):
            while self.keeper.lease_id == first or await self.keys() != self.expected():
                await asyncio.sleep(0.005)

    def expected(self, lease_id: int | None = None) -> list[str]:
        lease_id = self.keeper.lease_id if lease_id is None else lease_id
        return [f"w/a:{lease_id:x}", f"w/b:{lease_id:x}"]


@asynccontextmanager
async def at_work() -> AsyncIterator[Worker]:
    before = asyncio.all_tasks()
    found = Worker(FakeEtcd())
    await found.keeper.start()
    for name in ("a", "b"):
        await found.keeper.register(lambda lease, name=name: f"w/{name}:{lease:x}", lambda lease: str(lease).encode())
    yield found
    await found.keeper.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() - before - {asyncio.current_task()} == set(), "a task was left behind"


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with at_work() as found:
        yield found


@pytest.mark.parametrize(
    ("draining", "history_kept", "age_s", "expected"),
    [
        (True, True, 0.0, Revoked),
        (True, True, 60.0, Revoked),
        (True, False, 0.0, Revoked),
        (True, False, 60.0, Revoked),
        (False, True, 0.0, Revoked),
        (False, True, 9.999, Revoked),
        (False, True, 10.0, Lost),
        (False, True, 60.0, Lost),
        (False, False, 0.0, Lost),
        (False, False, 60.0, Lost),
    ],
)
def test_why_a_lease_is_missing(
    draining: bool, history_kept: bool, age_s: float, expected: type[Revoked] | type[Lost]
) -> None:
    """The rule of issue 2: draining, or alive within its TTL on an etcd that kept its data, means revoked."""
    fate = classify_missing_lease(draining=draining, history_kept=history_kept, last_good_age_s=age_s, ttl_s=10)
    assert type(fate) is expected
    assert fate.reason


async def test_keys_carry_the_lease(worker: Worker) -> None:
    assert await worker.keys() == worker.expected()
    kv = await worker.etcd.get(worker.expected()[0])
    assert kv is not None
    assert (kv.value, kv.lease_id) == (str(worker.keeper.lease_id).encode(), worker.keeper.lease_id)


async def test_the_lease_is_kept_alive() -> None:
    etcd = FakeEtcd()
    keeper = Worker(etcd).keeper
    keeper.ttl_s = 1
    await keeper.start()
    async with asyncio.timeout(DEADLINE_S):
        while etcd.calls.count("keepalive") < 5:
            await asyncio.sleep(0.01)
    assert etcd.lease_ids() == (keeper.lease_id,)
    await keeper.close()
    assert etcd.lease_ids() == ()


@pytest.mark.timing
async def test_a_revoke_from_outside_is_reported_at_once(worker: Worker) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await worker.etcd.revoke(worker.keeper.lease_id)
    await asyncio.wait_for(worker.keeper.revoked.wait(), DEADLINE_S)
    assert loop.time() - began_s < 0.1
    assert await worker.keys() == []
    assert worker.regrants == []
    with pytest.raises(LeaseNotFound, match="revoked"):
        await worker.keeper.register(lambda lease: "w/late", lambda lease: b"")


async def test_an_expired_lease_is_granted_anew(worker: Worker) -> None:
    first = worker.keeper.lease_id
    worker.clock.skip(11)  # the suspension, as the monotonic clock shows it
    worker.etcd.advance(11)
    await worker.registered_anew(first)
    assert len(worker.keys_at_regrant) == 1
    assert await worker.keys() == worker.expected()
    assert not worker.keeper.revoked.is_set()


async def test_a_lease_that_expires_while_its_keepalive_is_under_way_is_no_revoke(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, keeper = worker.keeper.lease_id, worker.keeper
    expires_s = worker.clock.now_s() + keeper.ttl_s
    worker.clock.skip(9.9)
    asked_s = []

    async def late(lease_id: int) -> float:
        asked_s.append(worker.clock.now_s())
        await worker.clock.sleep_until(expires_s)
        monkeypatch.undo()
        return await worker.etcd.keepalive(lease_id)

    monkeypatch.setattr(worker.etcd, "keepalive", late)
    worker.etcd.advance(11)
    await eventually(lambda: keeper.lease_id != first or keeper.revoked.is_set())
    assert asked_s[0] < expires_s
    assert not keeper.revoked.is_set()


async def test_a_loss_is_seen_though_others_have_registered_first(worker: Worker) -> None:
    old_revision = await worker.etcd.revision()
    first = worker.keeper.lease_id
    worker.etcd.restart(lose_data=True)
    for number in range(50):
        worker.etcd.put_now(f"others/{number}", b"")
    assert await worker.etcd.revision() > old_revision
    await worker.registered_anew(first)
    assert not worker.keeper.revoked.is_set()


async def test_a_draining_worker_stays_out_when_etcd_loses_its_data(worker: Worker) -> None:
    worker.draining = True
    worker.etcd.restart(lose_data=True)
    await asyncio.wait_for(worker.keeper.revoked.wait(), DEADLINE_S)
    assert await worker.keys() == []


async def test_a_statefile_that_cannot_be_read_leaves_the_other_rule(worker: Worker) -> None:
    worker.statefile_error = StateError("broken")
    first = worker.keeper.lease_id
    worker.etcd.restart(lose_data=True)
    await worker.registered_anew(first)
    assert await worker.keys() == worker.expected()


async def test_a_failing_callback_is_tried_again_before_any_key(worker: Worker) -> None:
    worker.failing_regrants = 2
    first = worker.keeper.lease_id
    worker.etcd.restart(lose_data=True)
    await worker.registered_anew(first)
    assert len(worker.regrants) == 3
    assert worker.keys_at_regrant == [0]
    assert len(set(worker.regrants)) == 1
    assert await worker.keys() == worker.expected()


async def test_etcd_away_in_the_middle_of_mending_is_no_revoke(worker: Worker) -> None:
    first = worker.keeper.lease_id
    worker.etcd.restart(lose_data=True)
    worker.etcd.fail_next(3)
    await worker.registered_anew(first)
    assert await worker.keys() == worker.expected()
    assert not worker.keeper.revoked.is_set()


async def test_a_key_deleted_by_hand_comes_back(worker: Worker) -> None:
    await worker.etcd.delete(worker.expected()[0])
    async with asyncio.timeout(DEADLINE_S):
        while await worker.keys() != worker.expected():
            await asyncio.sleep(0.005)
    assert worker.regrants == []


def test_our_own_revoke_confirms_and_is_not_reported() -> None:
    """Giving the lease back is not being thrown out; it returns when the keys are gone, and twice is no error."""

    async def main() -> None:
        async with at_work() as worker:
            await worker.keeper.revoke()
            await worker.keeper.revoke()
            assert await worker.keys() == []
            assert worker.etcd.lease_ids() == ()
            await asyncio.sleep(worker.keeper.ttl_s)
            assert not worker.keeper.revoked.is_set()
            with pytest.raises(LeaseNotFound, match="given back"):
                await worker.keeper.register(lambda lease: "w/late", lambda lease: b"")

    run_virtual(main())


def test_a_revoke_that_etcd_does_not_answer_has_a_deadline() -> None:
    """It is an error in time, and nothing keeps the lease alive any more."""

    async def main() -> None:
        async with at_work() as worker:
            worker.etcd.available = False
            with pytest.raises(EtcdUnavailable):
                await asyncio.wait_for(worker.keeper.revoke(timeout_s=0.3), DEADLINE_S)
            worker.etcd.available = True
            worker.etcd.advance(11)
            await asyncio.sleep(worker.keeper.ttl_s)
            assert (worker.etcd.lease_ids(), worker.regrants) == ((), [])

    run_virtual(main())


@pytest.mark.parametrize("ours", [True, False])
async def test_reinstating_registers_everything_under_a_new_lease(worker: Worker, ours: bool) -> None:
    """A drain that is taken back: new lease, callback first, all keys, and the next revoke is seen again."""
    first = worker.keeper.lease_id
    if ours:
        await worker.keeper.revoke()
    else:
        await worker.etcd.revoke(first)
        await worker.keeper.revoked.wait()
    assert await worker.keeper.reinstate() != first
    assert await worker.keys() == worker.expected()
    assert worker.regrants == [worker.keeper.lease_id]
    assert worker.keys_at_regrant == [0]
    assert not worker.keeper.revoked.is_set()
    await worker.etcd.revoke(worker.keeper.lease_id)
    await asyncio.wait_for(worker.keeper.revoked.wait(), DEADLINE_S)


async def test_reinstating_a_lease_that_is_held_changes_nothing(worker: Worker) -> None:
    first = worker.keeper.lease_id
    assert await worker.keeper.reinstate() == first
    assert worker.regrants == []


async def test_starting_waits_for_etcd_and_gives_up_in_time() -> None:
    """It comes up when etcd does, and past the deadline it says so."""
    etcd = FakeEtcd()
    etcd.available = False
    worker = Worker(etcd)
    with pytest.raises(EtcdUnavailable):
        await asyncio.wait_for(worker.keeper.start(timeout_s=0.3), DEADLINE_S)
    starting = asyncio.create_task(worker.keeper.start(timeout_s=DEADLINE_S))
    await asyncio.sleep(0)
    etcd.available = True
    assert await starting in etcd.lease_ids()
    await worker.keeper.close()


async def test_a_key_that_could_not_be_registered_is_not_kept(worker: Worker) -> None:
    worker.etcd.available = False
    with pytest.raises(EtcdUnavailable):
        await worker.keeper.register(lambda lease: "w/c", lambda lease: b"", timeout_s=0.3)
    first = worker.keeper.lease_id
    worker.etcd.restart(lose_data=True)
    await worker.registered_anew(first)
    assert await worker.keys() == worker.expected()


async def test_a_later_lease_carries_only_what_etcd_has_taken(worker: Worker) -> None:
    """seed 740000277: etcd lost its data while a key was being registered. The keeper put it with its other keys before
    `register` had tried again: others saw the worker in a role which it did not know yet that it had."""
    worker.etcd.available = False
    registering = asyncio.create_task(worker.keeper.register(lambda lease: f"w/c:{lease:x}", lambda lease: b"c"))
    await eventually(lambda: worker.etcd.calls.count("put_all") == 3, DEADLINE_S)
    worker.etcd.restart(lose_data=True)
    async with asyncio.timeout(DEADLINE_S):
        while f"w/c:{worker.keeper.lease_id:x}" not in await worker.keys():
            await asyncio.sleep(0.001)
    for _ in range(20):
        await asyncio.sleep(0)
    assert registering.done()
    await registering
    assert len(worker.regrants) == 1


async def test_a_lease_that_was_lost_is_no_lease_that_was_revoked(worker: Worker) -> None:
    """Past its timeout `register` says that etcd is unavailable: after a revoke the key is known not to be there."""
    worker.etcd.restart(lose_data=True)
    with pytest.raises(EtcdUnavailable, match="lost"):
        await worker.keeper.register(lambda lease: f"w/c:{lease:x}", lambda lease: b"c", timeout_s=0.0)


async def test_closing_gives_the_lease_back(worker: Worker) -> None:
    await worker.keeper.close()
    await worker.keeper.close()
    assert worker.etcd.lease_ids() == ()
    other = Worker(worker.etcd)
    await other.keeper.start()
    worker.etcd.available = False
    await asyncio.wait_for(other.keeper.close(), 1.5)


# --- lease key order
# In which order a worker's keys come, on the fake etcd: its ready key says that all the others are there.

OWN, GENERATE, LOAD, READY = (f"w/{name}:{{:x}}".format for name in ("worker", "generate", "load", "ready"))


async def not_draining() -> bool:
    return False


@pytest.mark.parametrize("drained", [True, False], ids=["a drain is taken back", "etcd has lost the lease"])
async def test_under_a_later_lease_no_key_comes_after_the_ready_key_also_after_a_sleep(drained: bool) -> None:
    """Who believes the ready key may drain the only other worker. Once a worker had slept and woken, its ready key came
    before those of its endpoints."""
    etcd = FakeEtcd()
    keeper = LeaseKeeper(etcd, is_draining=not_draining)
    first = await keeper.start()
    for key in (OWN, GENERATE, LOAD, READY):
        await keeper.register(key, lambda lease: b"")
    await keeper.withdraw((OWN, READY))
    assert [kv.key for kv in (await etcd.get_prefix("w/"))[0]] == [READY(first), OWN(first)]
    await keeper.restore()
    puts = etcd.calls.count("put_all")
    if drained:
        await keeper.revoke()
        await keeper.reinstate()
    else:
        etcd.restart(lose_data=True)
        await eventually(lambda: etcd.calls.count("put_all") > puts)
    kvs, _ = await etcd.get_prefix("w/")
    later = keeper.lease_id
    assert later != first
    revisions = {kv.key: kv.mod_revision for kv in kvs}
    assert revisions.keys() == {OWN(later), GENERATE(later), LOAD(later), READY(later)}
    assert max(revisions.values()) == revisions[READY(later)]
    await keeper.close()
