"""KV moves between two engines after one of them has closed its transfers and opened them again.

This is what a sleep and a wake do to NIXL. vLLM's CPU platform has no sleep mode, so the memory itself stays here;
`tests/gpu/test_gpu_vllm_sleep.py` has the whole.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dynamo_local.core.routing.disagg import wake_id
from dynamo_local.engines.vllm.engine import VllmEngine
from dynamo_local.engines.vllm.options import VllmOptions
from tests.vllm.hand_over import tokens_alone, tokens_handed_over
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
    """One engine that prefills, and one that decodes."""
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


async def test_peers_connect_again_to_an_engine_that_woke(engines: dict[str, VllmEngine]) -> None:
    alone = await tokens_alone(engines["decode"], "alone")
    before, where = await tokens_handed_over(engines["prefill"], engines["decode"], "before")
    assert before == alone
    for wakes, sleeper in enumerate(("prefill", "prefill", "decode")):
        await engines[sleeper].renew_transfers()
        after, where_now = await tokens_handed_over(engines["prefill"], engines["decode"], f"after-{wakes}")
        assert after == alone
        expected = where["remote_engine_id"] if sleeper == "decode" else wake_id(where["remote_engine_id"])
        assert where_now["remote_engine_id"] == expected
        where = where_now
