"""vLLM's sleep mode, as its documentation demands it.

Level 2 reads the weights again between two partial wakes, and the prefix cache is reset after a wake.
"""

from __future__ import annotations

from typing import Any

from dynamo_local.core.routing.kv_events import AllBlocksCleared
from dynamo_local.errors import EngineError
from dynamo_local.ports import KvEventPublisher

NO_PLATFORM = "vLLM's {platform} platform has no sleep mode"
NIXL = (
    "with a KV connector vLLM cannot sleep: the KV cache is registered with NIXL at the start, and a wake puts other "
    "memory behind the same addresses"
)
CONNECTOR = "kv_transfer_config"


def cannot_sleep(llm: Any) -> str | None:
    """Why this engine cannot; None if it can."""
    from vllm.platforms import current_platform

    config = llm.vllm_config
    if not current_platform.is_sleep_mode_available():
        return NO_PLATFORM.format(platform=str(current_platform.device_type).upper())
    if config.kv_transfer_config is not None:
        return NIXL
    if not config.model_config.enable_sleep_mode:
        return "it was started without enable-sleep-mode"
    return None


async def sleep(llm: Any, level: int, kv_events: KvEventPublisher | None) -> None:
    """Nothing runs: the worker has finished its streams. Raises `EngineError`."""
    try:
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
        if not await llm.reset_prefix_cache():
            raise EngineError("vLLM's prefix cache could not be reset after the wake")
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"vLLM could not be woken: {type(error).__name__}: {error}") from error
