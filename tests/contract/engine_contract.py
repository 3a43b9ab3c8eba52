"""The contract of `ports.Engine`: one suite for the simulated engine and for vLLM.

A subclass gives the fixture `engine`: a started one that takes prompts of `PROMPT` and has nothing else to do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import cast

import pytest

from dynamo_local.errors import EngineError, InvalidRequest
from dynamo_local.ports import Engine, EngineOutput, EngineRequest, SamplingParams

PROMPT = tuple(range(300, 400))
TIMEOUT_S = 30.0


def request(name: str, max_tokens: int = 8, **more: object) -> EngineRequest:
    return EngineRequest(name, PROMPT, SamplingParams(max_tokens, temperature=0.0, ignore_eos=True), **more)  # type: ignore[arg-type]


def outputs(engine: Engine, asked: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
    return cast(AsyncGenerator[EngineOutput, None], engine.generate(asked))


async def collect(engine: Engine, asked: EngineRequest) -> list[EngineOutput]:
    async with asyncio.timeout(TIMEOUT_S):
        return [output async for output in outputs(engine, asked)]


async def until_idle(engine: Engine) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while (load := engine.load()).request_active_slots or load.num_requests_waiting or load.gpu_cache_usage_perc:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await engine.load_changed()


class EngineContract:
    """See `ports.Engine`."""

    async def test_it_says_what_it_is(self, engine: Engine) -> None:
        info = engine.info
        assert info.engine_id
        assert info.num_gpu_blocks * info.block_size >= info.max_model_len > len(PROMPT)
        assert info.max_num_seqs >= 2

    async def test_tokens_come_once_and_the_last_output_has_a_reason(self, engine: Engine) -> None:
        first = await collect(engine, request("a"))
        assert [output.finish_reason for output in first] == [None] * (len(first) - 1) + ["length"]
        tokens = [token for output in first for token in output.token_ids]
        assert len(tokens) == 8
        again = [token for output in await collect(engine, request("a")) for token in output.token_ids]
        assert again == tokens

    async def test_side_by_side_they_do_not_mix(self, engine: Engine) -> None:
        answers = await asyncio.gather(*(collect(engine, request("same", n)) for n in (3, 5, 7)))
        assert [sum(len(output.token_ids) for output in answer) for answer in answers] == [3, 5, 7]

    async def test_leaving_early_frees_everything(self, engine: Engine) -> None:
        async with contextlib.aclosing(outputs(engine, request("long", 2000))) as stream:
            async with asyncio.timeout(TIMEOUT_S):
                await anext(stream)
            assert engine.load().remaining_tokens > 0
        await until_idle(engine)
        assert engine.load().remaining_tokens == 0

    @pytest.mark.parametrize("prompt", [(), tuple(range(300, 301)) * 200_000], ids=["empty", "too long"])
    async def test_prompts_that_cannot_be_are_refused(self, engine: Engine, prompt: tuple[int, ...]) -> None:
        asked = EngineRequest("bad", prompt, SamplingParams(4))
        with pytest.raises(InvalidRequest):
            await collect(engine, asked)
        await until_idle(engine)

    async def test_without_hand_offs_there_is_nothing_to_wait_for(self, engine: Engine) -> None:
        async with asyncio.timeout(5.0):
            await engine.wait_handoffs()

    async def test_the_hit_rate_is_a_share(self, engine: Engine) -> None:
        await collect(engine, request("known"))
        assert 0.0 <= engine.prefix_hit_rate(PROMPT) <= 1.0
        assert engine.prefix_hit_rate(()) == 0.0


async def check_closed(engine: Engine) -> None:
    """After `close`: nobody waits for its failure any more, and nothing is taken."""
    waiting = asyncio.ensure_future(engine.wait_failed())
    await engine.close()
    async with asyncio.timeout(TIMEOUT_S):
        await waiting
    with pytest.raises(EngineError):
        await collect(engine, request("late"))
