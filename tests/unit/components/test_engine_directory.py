"""Tests who hands KV over: cards in etcd, loaded at the first KV, forgotten when they go."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo_local.components.handoffs import EngineCard, EngineDirectory, engine_key
from dynamo_local.errors import KvTransferError
from dynamo_local.ports import EngineInfo
from tests.drivers.eventually import eventually
from tests.fakes.infra.etcd import FakeEtcd

INFO = EngineInfo("vllm", "decode", "llama", 4096, 32, 300, 16)
CARD = EngineCard("p1", "vllm", "llama", 32, "127.0.0.1", 20000, "dynamo_PrefillWorker")


def params(**changes: Any) -> dict[str, Any]:
    return {"remote_engine_id": "p1", "remote_host": "127.0.0.1", "remote_port": 20000, **changes}


async def put(kv: FakeEtcd, card: EngineCard) -> int:
    lease = await kv.grant(10)
    await kv.put(engine_key("ns", card.engine_id), card.encode(), lease)
    return lease


async def test_an_engine_is_known_from_its_first_kv_to_the_end_of_its_lease() -> None:
    kv = FakeEtcd()
    directory = EngineDirectory(kv, "ns", INFO)
    lease = await put(kv, CARD)
    assert directory.known == frozenset()
    await directory.check(params())
    assert directory.known == {"p1"}
    await kv.revoke(lease)
    await eventually(lambda: not directory.known)
    await directory.check(params())  # it is leaving: its KV is still good
    await put(kv, CARD)
    await directory.check(params())
    assert directory.known == {"p1"}
    await directory.close()


@pytest.mark.parametrize(
    ("card", "changes", "words"),
    [
        ({"model": "qwen"}, {}, "runs model qwen, and this worker llama"),
        ({"engine": "sim"}, {}, "runs the sim engine, and this worker vllm"),
        ({}, {"remote_port": 20016}, "is said to be at 127.0.0.1:20016"),
    ],
)
async def test_kv_that_cannot_be_meant_is_refused(card: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    """Another model's KV would be pulled without an error, and the answer would be nonsense."""
    import msgspec

    kv = FakeEtcd()
    directory = EngineDirectory(kv, "ns", INFO)
    await put(kv, msgspec.structs.replace(CARD, **card))
    with pytest.raises(KvTransferError, match=words):
        await directory.check(params(**changes))
    await directory.close()


async def test_without_etcd_the_kv_is_pulled_unchecked() -> None:
    kv = FakeEtcd()
    kv.available = False
    directory = EngineDirectory(kv, "ns", INFO)
    async with asyncio.timeout(3.0):
        await directory.check(params())
    await directory.close()
    kv.available = True
    await kv.put(engine_key("ns", "p1"), b"{")
    directory = EngineDirectory(kv, "ns", INFO)
    await directory.check(params())
    await directory.close()
