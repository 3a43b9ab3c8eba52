"""KV moves between two engines after one of them has closed its transfers and opened them again.

This is what a sleep and a wake do to NIXL. vLLM's CPU platform has no sleep mode, so the memory itself stays here;
`tests/gpu/test_gpu_vllm_sleep.py` has the whole.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio

from dynamo_local.core.routing.disagg import ASK_PREFILL, wake_id
from dynamo_local.engines.vllm.engine import VllmEngine
from dynamo_local.engines.vllm.options import VllmOptions
from tests.contract.engine_contract import collect, request
from tests.vllm.hosts import VllmHost

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # vLLM's and torch's own
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(vllm_host: VllmHost) -> AsyncIterator[dict[str, VllmEngine]]:
    """Who prefills, and who decodes."""
    before = dict(os.environ)
    os.environ.update(vllm_host.env)
    args = {name.replace("-", "_"): value for name, value in vllm_host.args.items() if name != "max-model-len"}
    made = {
        name: VllmEngine(VllmOptions(str(vllm_host.model), max_model_len=4096, transfer=end, args=args), name=name)
        for name, end in (("prefill", "producer"), ("decode", "consumer"))
    }
    for engine in made.values():
        await engine.start()
    yield made
    for engine in made.values():
        await engine.close()
    os.environ.clear()
    os.environ.update(before)


async def handed_over(engines: Mapping[str, VllmEngine], name: str) -> tuple[list[int], Mapping[str, Any]]:
    """The tokens of the engine that decodes with the other's KV, and where that KV was."""
    prefilled = await collect(engines["prefill"], request(f"{name}-p", 1, kv_transfer_params=dict(ASK_PREFILL)))
    params = prefilled[-1].kv_transfer_params
    assert params is not None
    decoded = await collect(engines["decode"], request(f"{name}-d", 8, kv_transfer_params=params))
    return [token for output in decoded for token in output.token_ids], params


async def test_peers_connect_again_to_an_engine_that_woke(engines: dict[str, VllmEngine]) -> None:
    alone = [token for output in await collect(engines["decode"], request("alone", 8)) for token in output.token_ids]
    before, where = await handed_over(engines, "before")
    assert before == alone
    for wakes, sleeper in enumerate(("prefill", "prefill", "decode")):
        await engines[sleeper].renew_transfers()
        after, where_now = await handed_over(engines, f"after-{wakes}")
        assert after == alone
        expected = where["remote_engine_id"] if sleeper == "decode" else wake_id(where["remote_engine_id"])
        assert where_now["remote_engine_id"] == expected
        where = where_now
