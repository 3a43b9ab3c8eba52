"""A planner's observation of real vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dynamo_local.core.passes import ForwardPass
from dynamo_local.core.types import Missing
from dynamo_local.planner.values import Engines
from tests.drivers.observed import NATIVE, observing
from tests.vllm.asking import complete, prompts
from tests.vllm.hosts import VllmHost

pytestmark = [pytest.mark.vllm, pytest.mark.infra, pytest.mark.full, pytest.mark.timeout(1500)]

TOKENS = 8
WITHIN_S = 60.0


async def test_each_pass_is_told_with_what_it_computed(vllm_host: VllmHost, tmp_path: Path) -> None:
    with vllm_host.aggregated(tmp_path, **{"enable-prefix-caching": False}).started() as served:
        roles = {name: role for name, role in NATIVE.items() if name != "PrefillWorker"}
        async with observing(served, roles) as (observed, _), served.client() as http:

            async def engines() -> Engines:
                async with asyncio.timeout(WITHIN_S):
                    while True:
                        found = await observed.passes()
                        if found and not any(isinstance(seen.last, Missing) for seen in found.values()):
                            return found
                        await asyncio.sleep(0.2)

            before = next(iter((await engines()).values())).last
            assert isinstance(before, ForwardPass)
            assert before.heartbeat
            asked = [await complete(http, prompt, TOKENS) for prompt in prompts(3)]
            passes: list[ForwardPass] = []
            async with asyncio.timeout(WITHIN_S):
                while sum(one.scheduled.num_decode_requests for one in passes) < 3 * (TOKENS - 1):
                    await asyncio.sleep(0.5)
                    passes += [one for seen in (await engines()).values() for one in seen.passes]
            assert sum(one.scheduled.num_decode_requests for one in passes) == 3 * (TOKENS - 1)
            assert sum(one.scheduled.sum_prefill_tokens for one in passes) == sum(size for _, size, _ in asked)
            assert all(0.0 < one.wall_time_s < 30.0 for one in passes)
            numbers = [one.counter_id for one in passes]
            assert numbers == sorted(set(numbers))
            contexts = [one.scheduled.sum_decode_kv_tokens for one in passes if one.scheduled.num_decode_requests]
            assert max(contexts) == max(size for _, size, _ in asked) + TOKENS - 1
            can = observed.capabilities()["VllmWorker"]
            assert can.max_num_seqs == vllm_host.args["max-num-seqs"]
            assert can.max_num_batched_tokens is not None
            assert can.max_kv_tokens is not None
