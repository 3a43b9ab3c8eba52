"""vLLM's own sleep mode under the contract of sleeping, with a model that the caller names (DYN_VLLM_MODEL).

It needs a card: vLLM's CPU platform has no sleep mode.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from dynamo_local.engines.vllm.checks import is_installed
from dynamo_local.engines.vllm.engine import VllmEngine
from dynamo_local.engines.vllm.options import Transfer, VllmOptions
from dynamo_local.errors import GpuError
from dynamo_local.system.gpus import open_inventory
from tests.contract.sleep_contract import SleepContract
from tests.vllm.hand_over import tokens_alone, tokens_handed_over

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # vLLM's and torch's own
]


@asynccontextmanager
async def engines(*names: str, memory: float = 0.9, transfer: Transfer = "none") -> AsyncIterator[list[VllmEngine]]:
    """Engines on the first card, started as a worker with `ServiceArgs.standby` starts them."""
    model = os.environ.get("DYN_VLLM_MODEL")
    if not model:
        pytest.skip("DYN_VLLM_MODEL is not set: the folder of a model that fits one GPU")
    if not is_installed() or importlib.metadata.version("vllm").endswith("+cpu"):
        pytest.skip("the CUDA build of vLLM is not installed, and its CPU platform has no sleep mode")
    try:
        devices = open_inventory(None, os.environ).sample()
    except GpuError as error:
        pytest.skip(f"no GPUs here: {error}")
    args = {"enforce_eager": True, "enable_prefix_caching": False, "gpu_memory_utilization": memory}
    if transfer == "none":
        args = {"gpu_memory_utilization": memory}
    options = VllmOptions(model, max_model_len=4096, gpus=1, sleep_mode=True, transfer=transfer, args=args)
    made = [VllmEngine(options, name=name) for name in names]
    before = dict(os.environ)
    os.environ["CUDA_VISIBLE_DEVICES"] = devices[0].uuid
    try:
        for engine in made:
            await engine.start()
        yield made
    finally:
        for engine in made:
            await engine.close()
        os.environ.clear()
        os.environ.update(before)


class TestVllmSleeps(SleepContract):
    """Levels 1 and 2, answers, memory, cache."""

    @pytest_asyncio.fixture(scope="class", loop_scope="module")
    async def engine(self) -> AsyncIterator[Any]:
        async with engines("sleep-contract") as (engine,):
            yield engine


class TestVllmSleepsWithNixl(SleepContract):
    """The same with NIXL."""

    @pytest_asyncio.fixture(scope="class", loop_scope="module")
    async def engine(self) -> AsyncIterator[Any]:
        async with engines("nixl-contract", transfer="both", memory=0.4) as (engine,):
            yield engine


async def test_kv_moves_after_either_side_slept(record_property: Callable[[str, object], None]) -> None:
    """Two engines on one card. NIXL reads memory that other memory replaced with each wake."""
    async with engines("prefill", "decode", transfer="both", memory=0.3) as (prefill, decode):
        expected = await tokens_alone(decode, "alone")
        assert (await tokens_handed_over(prefill, decode, "before"))[0] == expected
        for cycle, (sleeper, level) in enumerate([(prefill, 1), (prefill, 2), (decode, 1), (decode, 2)]):
            began_s = time.monotonic()
            await sleeper.sleep(level)
            slept_s = time.monotonic()
            await sleeper.wake()
            woke_s = time.monotonic()
            assert (await tokens_handed_over(prefill, decode, f"after-{cycle}"))[0] == expected
            took = (slept_s - began_s, woke_s - slept_s, time.monotonic() - woke_s)
            record_property(f"cycle {cycle}", [round(each, 2) for each in took])
