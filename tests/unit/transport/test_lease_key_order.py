"""In which order a worker's keys come, on the fake etcd: its ready key says that all the others are there."""

from __future__ import annotations

import pytest

from dynamo_local.transport.lease import LeaseKeeper
from tests.drivers.eventually import eventually
from tests.fakes.infra.etcd import FakeEtcd

OWN, GENERATE, LOAD, READY = (f"w/{name}:{{:x}}".format for name in ("worker", "generate", "load", "ready"))


async def not_draining() -> bool:
    """What the statefile says."""
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
