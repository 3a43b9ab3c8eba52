"""The contract of `ports.Engine` on the simulated engine; `tests/vllm/test_vllm_contract.py` runs it on vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dynamo_local.engines import make_engine
from dynamo_local.ports import Engine
from tests.contract.engine_contract import EngineContract, check_closed


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = make_engine("sim", {"speed": 100.0, "num_gpu_blocks": 400, "max_model_len": 16384})
    await made.start()
    yield made
    await made.close()


class TestSimEngine(EngineContract):
    """The simulated engine."""

    async def test_closed_is_closed(self, engine: Engine) -> None:
        await check_closed(engine)
