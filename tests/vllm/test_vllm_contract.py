"""The contract of `ports.Engine` on vLLM: one engine for all, in this process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dynamo_local.engines.vllm import VllmEngine, VllmOptions
from dynamo_local.ports import Engine
from tests.fakes.engine_contract import EngineContract, check_closed
from tests.vllm.hosts import VllmHost

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # vLLM's and torch's own
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(vllm_host: VllmHost) -> AsyncIterator[Engine]:
    """Started once; the last test closes it."""
    before = dict(os.environ)
    os.environ.update(vllm_host.env)
    args = {name.replace("-", "_"): value for name, value in vllm_host.args.items() if name != "max-model-len"}
    made = VllmEngine(VllmOptions(str(vllm_host.model), max_model_len=4096, args=args), name="contract")
    await made.start()
    yield made
    await made.close()
    os.environ.clear()
    os.environ.update(before)


class TestVllmEngine(EngineContract):
    """vLLM on the CPU."""

    async def test_closed_is_closed(self, engine: Engine) -> None:
        """See `check_closed`; the last of the module."""
        await check_closed(engine)
