"""vLLM's own sleep mode under the contract of sleeping, with a model that the caller names (DYN_VLLM_MODEL).

It needs a card: vLLM's CPU platform has no sleep mode.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from dynamo_local.engines.vllm.checks import is_installed
from dynamo_local.engines.vllm.engine import VllmEngine
from dynamo_local.engines.vllm.options import VllmOptions
from dynamo_local.errors import GpuError
from dynamo_local.system.gpus import open_inventory
from tests.contract.sleep_contract import SleepContract

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # vLLM's and torch's own
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Any]:
    """One engine on one card, started as a worker with `ServiceArgs.standby` starts it."""
    model = os.environ.get("DYN_VLLM_MODEL")
    if not model:
        pytest.skip("DYN_VLLM_MODEL is not set: the folder of a model that fits one GPU")
    if not is_installed() or importlib.metadata.version("vllm").endswith("+cpu"):
        pytest.skip("the CUDA build of vLLM is not installed, and its CPU platform has no sleep mode")
    try:
        devices = open_inventory(None, os.environ).sample()
    except GpuError as error:
        pytest.skip(f"no GPUs here: {error}")
    before = dict(os.environ)
    os.environ["CUDA_VISIBLE_DEVICES"] = devices[0].uuid
    made = VllmEngine(VllmOptions(model, max_model_len=4096, gpus=1, sleep_mode=True), name="sleep-contract")
    try:
        await made.start()
        yield made
    finally:
        await made.close()
        os.environ.clear()
        os.environ.update(before)


class TestVllmSleeps(SleepContract):
    """Levels 1 and 2, answers, memory, cache."""
