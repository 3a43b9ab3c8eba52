"""KV from one engine to another, in one process: for tests of what happens to NIXL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_local.core.routing.disagg import ASK_PREFILL
from dynamo_local.engines.vllm.engine import VllmEngine
from tests.contract.engine_contract import collect, request


async def tokens_alone(engine: VllmEngine, name: str, max_tokens: int = 8) -> list[int]:
    """The answer of an engine that prefills by itself."""
    return [token for output in await collect(engine, request(name, max_tokens)) for token in output.token_ids]


async def tokens_handed_over(prefill: VllmEngine, decode: VllmEngine, name: str) -> tuple[list[int], Mapping[str, Any]]:
    """The answer of the engine that decodes with the other's KV, and where that KV was."""
    prefilled = await collect(prefill, request(f"{name}-p", 1, kv_transfer_params=dict(ASK_PREFILL)))
    params = prefilled[-1].kv_transfer_params
    assert params is not None
    decoded = await collect(decode, request(f"{name}-d", 8, kv_transfer_params=params))
    return [token for output in decoded for token in output.token_ids], params
