"""vLLM's sleep mode, as its documentation demands it.

Level 2 reads the weights again between two partial wakes, and the prefix cache is reset after a wake. With NIXL, the
transfers end before a sleep and begin anew after the wake (`nixl_sleep`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from dynamo_local.core.routing.kv_events import AllBlocksCleared
from dynamo_local.engines.vllm import nixl_sleep
from dynamo_local.errors import EngineError
from dynamo_local.ports import KvEventPublisher

NO_PLATFORM = "vLLM's {platform} platform has no sleep mode"
OTHER_CONNECTOR = (
    "with the KV connector {connector} vLLM cannot sleep: it registers the KV cache at the start, and a wake puts "
    f"other memory behind the same addresses; only {nixl_sleep.CONNECTOR} is registered again"
)


def connector_of(given: Any) -> str | None:
    """The connector that vLLM's `--kv-transfer-config` names, a mapping or its JSON."""
    if isinstance(given, str):
        with contextlib.suppress(ValueError):  # vLLM's parser refuses what is no JSON
            given = json.loads(given)
    return given.get("kv_connector") if isinstance(given, Mapping) else None


def other_connector(name: str | None) -> str | None:
    """Why that KV connector rules sleep out; None if it does not, or there is none."""
    return None if name in (None, nixl_sleep.CONNECTOR) else OTHER_CONNECTOR.format(connector=name)


def cannot_sleep(llm: Any) -> str | None:
    """Why this engine cannot; None if it can."""
    from vllm.platforms import current_platform

    config = llm.vllm_config
    if not current_platform.is_sleep_mode_available():
        return NO_PLATFORM.format(platform=str(current_platform.device_type).upper())
    transfer = config.kv_transfer_config
    if transfer is not None and (why := other_connector(transfer.kv_connector)) is not None:
        return why
    if not config.model_config.enable_sleep_mode:
        return "it was started without enable-sleep-mode"
    return None


async def sleep(llm: Any, level: int, kv_events: KvEventPublisher | None) -> None:
    """Nothing runs: the worker has finished its streams. Raises `EngineError`.

    KV that another engine has yet to pull is waited for, until its lease is over.
    """
    try:
        await close_transfers(llm)
        await llm.sleep(level=level)
        if not await llm.is_sleeping():
            raise EngineError("vLLM does not say that it sleeps")
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"vLLM could not be put to sleep: {type(error).__name__}: {error}") from error
    if kv_events is not None:
        kv_events.publish((AllBlocksCleared(),))


async def wake(llm: Any, level: int) -> None:
    """Raises `EngineError`."""
    try:
        if level == 1:
            await llm.wake_up()
        else:
            await llm.wake_up(tags=["weights"])
            await llm.collective_rpc("reload_weights")
            await llm.wake_up(tags=["kv_cache"])
        if await llm.is_sleeping():
            raise EngineError("vLLM says that it still sleeps")
        await open_transfers(llm)
        if not await llm.reset_prefix_cache():
            raise EngineError("vLLM's prefix cache could not be reset after the wake")
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"vLLM could not be woken: {type(error).__name__}: {error}") from error


async def close_transfers(llm: Any) -> None:
    """Waits until nothing runs and no KV is held for another engine. Nothing is begun from here on."""
    if llm.vllm_config.kv_transfer_config is not None:
        await llm.pause_generation(mode="wait")
        await llm.engine_core.call_utility_async(nixl_sleep.CLOSE)


async def open_transfers(llm: Any) -> None:
    """The memory of the KV cache is there again."""
    if llm.vllm_config.kv_transfer_config is not None:
        await llm.engine_core.call_utility_async(nixl_sleep.OPEN)
