"""The contract of `ports.Engine` on vLLM: one engine for all, in this process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from dynamo_local.core.routing.disagg import ASK_PREFILL
from dynamo_local.core.routing.kv_events import BlocksStored, KvEvent
from dynamo_local.engines.vllm.engine import VllmEngine
from dynamo_local.engines.vllm.options import VllmOptions
from dynamo_local.errors import KvTransferError
from dynamo_local.kv_hashes import block_hashes
from dynamo_local.ports import Engine
from tests.contract.engine_contract import PROMPT, EngineContract, check_closed, collect, request, until_idle
from tests.vllm.hosts import VllmHost

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.full,
    pytest.mark.timeout(1500),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # vLLM's and torch's own
]

PULL_TIMEOUT_S = 8.0
LEASE_S = 12


class Published:
    """A publisher that remembers."""

    def __init__(self) -> None:
        self.events: list[KvEvent] = []

    def publish(self, events: Sequence[KvEvent]) -> None:
        self.events += events


PUBLISHED = Published()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(vllm_host: VllmHost) -> AsyncIterator[Engine]:
    before = dict(os.environ)
    os.environ.update(vllm_host.env)
    args = {name.replace("-", "_"): value for name, value in vllm_host.args.items() if name != "max-model-len"}
    args["enable_prefix_caching"] = True
    args["kv_transfer_config"] = {"kv_connector_extra_config": {"kv_lease_duration": LEASE_S}}
    options = VllmOptions(
        str(vllm_host.model), max_model_len=4096, transfer="consumer", kv_pull_timeout_s=PULL_TIMEOUT_S, args=args
    )
    made = VllmEngine(options, name="contract", kv_events=PUBLISHED)
    await made.start()
    yield made
    await made.close()
    os.environ.clear()
    os.environ.update(before)


class TestVllmEngine(EngineContract):
    """vLLM on the CPU."""

    async def test_kv_of_an_engine_that_is_gone_is_an_error(self, engine: Engine) -> None:
        gone = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "00000000-0000-0000-0000-000000000000",
            "remote_request_id": "nobody",
            "remote_block_ids": [[1, 2, 3, 4]],
            "remote_host": "127.0.0.1",
            "remote_port": 9,
            "tp_size": 1,
        }
        began_s = time.monotonic()
        with pytest.raises(KvTransferError, match="prefill it again"):
            await collect(engine, request("orphan", kv_transfer_params=gone))
        assert time.monotonic() - began_s < PULL_TIMEOUT_S + 5.0
        await until_idle(engine)
        assert await collect(engine, request("orphan-local"))

    async def test_kv_for_another_engine_is_kept_until_its_lease_is_over(self, engine: Engine) -> None:
        answer = await collect(engine, request("handed-over", 1, kv_transfer_params=dict(ASK_PREFILL)))
        params = answer[-1].kv_transfer_params
        assert params is not None
        assert params["remote_engine_id"] == engine.info.engine_id
        assert (params["remote_host"], params["remote_port"]) == engine.info.handoff_address
        assert engine.load().gpu_cache_usage_perc > 0.0
        began_s = time.monotonic()
        async with asyncio.timeout(3 * LEASE_S):
            await engine.wait_handoffs()
        assert time.monotonic() - began_s > LEASE_S / 2
        assert engine.load().gpu_cache_usage_perc == 0.0

    async def test_its_kv_events_are_ours(self, engine: Engine) -> None:
        await collect(engine, request("cached"))
        known = block_hashes(PROMPT, engine.info.block_size)
        async with asyncio.timeout(10.0):
            while engine.prefix_hit_rate(PROMPT) == 0.0:
                await asyncio.sleep(0.05)  # events come over a socket of vLLM's
        assert engine.prefix_hit_rate(PROMPT) == len(known) * engine.info.block_size / len(PROMPT)
        stored = {
            value for event in PUBLISHED.events if isinstance(event, BlocksStored) for value in event.block_hashes
        }
        assert set(known) <= stored

    async def test_closed_is_closed(self, engine: Engine) -> None:
        await check_closed(engine)
