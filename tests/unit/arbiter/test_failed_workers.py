"""A worker whose engine has died gives its lease back before it ends: that is no drain, it is started again."""

from __future__ import annotations

import pytest

from dynamo_local.core.fleet.lifecycle import TransitionKind as K
from dynamo_local.core.types import WorkerState
from tests.fakes.arbiter.fleet_views import pid_of
from tests.fakes.arbiter.registry import Registry


@pytest.mark.parametrize(("failed", "seen"), [(True, [K.REGISTERED]), (False, [K.REGISTERED, K.LEASE_REVOKED])])
async def test_the_end_of_a_failed_workers_key_is_no_drain(registry: Registry, failed: bool, seen: list[K]) -> None:
    await registry.put()
    if failed:
        await registry.put(failed=True)
    await registry.until(lambda worker: worker.ready and worker.health.engine_failed is failed)
    await registry.etcd.delete(registry.key)
    await registry.until(lambda worker: worker.lease is None)
    assert registry.events == seen
    assert registry.worker.state is (WorkerState.READY if failed else WorkerState.DRAINING)


async def test_the_leases_of_what_runs_behind_a_worker_are_noted_if_they_are_leases(registry: Registry) -> None:
    """Any other word would make the statefile one that nobody can read."""
    await registry.put(leases="694d967da694ea16,7b,nonsense,0123456789abcdef0")
    await registry.until(lambda worker: worker.ready)
    assert registry.worker.other_leases == ("694d967da694ea16", "7b")


async def test_a_key_of_a_process_before_this_one_says_nothing(registry: Registry) -> None:
    await registry.put(pid=pid_of(0) - 1, failed=True)
    await registry.put()
    await registry.until(lambda worker: worker.ready)
    assert not registry.worker.health.engine_failed
