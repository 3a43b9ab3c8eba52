"""Facts in a worker's registry key."""

from __future__ import annotations

import logging

import pytest

from dynamo_local.core.types import WorkerState
from tests.fakes.arbiter.registry import Registry

OWN = "dynamo/components/VllmWorker/generate:2a"


@pytest.mark.parametrize(("facts", "taken"), [({"endpoints": [OWN]}, (OWN,)), ({}, ())])
async def test_endpoints_under_the_lease_are_taken(
    registry: Registry, caplog: pytest.LogCaptureFixture, facts: dict[str, object], taken: tuple[str, ...]
) -> None:
    await registry.put(**facts)
    await registry.until(lambda worker: worker.ready)
    assert registry.worker.endpoints == taken
    assert caplog.records == []


@pytest.mark.parametrize("told", [[OWN, "dynamo/VllmWorker/generate"], [OWN, 7], [OWN, OWN.replace("2a", "12a:b")]])
async def test_others_are_left_out_and_told(
    registry: Registry, caplog: pytest.LogCaptureFixture, told: list[object]
) -> None:
    """They would make the statefile invalid, and the arbiter would write it anew every two seconds (seen)."""
    with caplog.at_level(logging.WARNING):
        await registry.put(endpoints=told)
        await registry.until(lambda worker: worker.ready)
    assert registry.worker.endpoints == (OWN,)
    assert "left out" in caplog.text


async def test_what_is_no_list_names_no_endpoint(registry: Registry) -> None:
    await registry.put(endpoints=OWN)
    await registry.until(lambda worker: worker.ready)
    assert registry.worker.endpoints == ()


@pytest.mark.parametrize("value", [b"not json", b"[]", b"{}", b'{"pid": "7"}'])
async def test_a_key_that_says_nothing_makes_nobody_ready(registry: Registry, value: bytes) -> None:
    await registry.etcd.put(registry.key, value)
    await registry.put(endpoints=[OWN])
    await registry.until(lambda worker: worker.ready)
    assert registry.events == ["Registered"]


async def test_where_the_frontend_listens_is_taken_from_its_key(registry: Registry) -> None:
    await registry.put(frontend_url="http://127.0.0.1:8000")
    await registry.until(lambda worker: worker.state is WorkerState.READY)
    assert registry.registrations.frontend_url == "http://127.0.0.1:8000"
