"""`vllm serve`'s own sleep endpoints, for `runtime: http`.

They exist in its development mode only, so it must listen on loopback: whoever reaches them can stop it, and more.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from dynamo_local.commands.sleeping import HOOK_TIMEOUT_S
from dynamo_local.engines.sleeping import PROBE_PROMPT, PROBE_TIMEOUT_S
from dynamo_local.errors import EngineError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PROBE_TOKENS = 16


def is_vllm(words: Sequence[str]) -> bool:
    """`vllm serve …`, or the module behind it."""
    names = [word.rpartition("/")[2] for word in words]
    return any(a == "vllm" and b == "serve" for a, b in itertools.pairwise(names)) or any(
        word.startswith("vllm.entrypoints") for word in words
    )


def why_not(words: Sequence[str]) -> str | None:
    """Why that command could not be put to sleep by its endpoints; None if it could."""
    if not is_vllm(words):
        return "only `vllm serve` has sleep endpoints that we know; give `sleep-hook` and `wake-hook`"
    if "--enable-sleep-mode" not in words:
        return "the command needs --enable-sleep-mode"
    if "--kv-transfer-config" in words or any(word.startswith("--kv-transfer-config=") for word in words):
        return "with a KV connector vLLM cannot sleep: what is registered with NIXL does not survive a wake"
    host = _value(words, "--host")
    if host not in LOOPBACK:
        where = "on all addresses" if host is None else f"on {host}"
        return f"it would listen {where}, and its sleep endpoints with it: give it --host 127.0.0.1"
    return None


def _value(words: Sequence[str], option: str) -> str | None:
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == option:
            return after
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


class ServerSleep:
    """See `commands.sleeping.SleepHooks`. `model` gives the model's name in the API, once it is known."""

    def __init__(self, base_url: str, model: Callable[[], str | None]) -> None:
        self._base_url = base_url
        self._model = model

    async def sleep(self, level: int) -> None:
        await self._post(f"/sleep?level={level}")
        if not await self._sleeps():
            raise EngineError(f"{self._base_url} does not say that it sleeps")

    async def wake(self, level: int) -> None:
        if level == 1:
            await self._post("/wake_up")
        else:
            await self._post("/wake_up?tags=weights")
            await self._post("/collective_rpc", {"method": "reload_weights"})
            await self._post("/wake_up?tags=kv_cache")
        if await self._sleeps():
            raise EngineError(f"{self._base_url} says that it still sleeps")
        await self._post("/reset_prefix_cache")

    async def probe(self) -> tuple[Any, ...]:
        return await probe(self._base_url, self._model())

    async def _sleeps(self) -> bool:
        answer = await _call(f"{self._base_url}/is_sleeping", None, PROBE_TIMEOUT_S, method="GET")
        return bool(json.loads(answer).get("is_sleeping"))

    async def _post(self, path: str, body: Any = None) -> None:
        await _call(self._base_url + path, body, HOOK_TIMEOUT_S)


async def probe(base_url: str, model: str | None) -> tuple[Any, ...]:
    """The greedy completion of a prompt of token ids; empty for a server that lists no model."""
    if model is None:
        return ()
    asked = {"model": model, "prompt": list(PROBE_PROMPT), "max_tokens": PROBE_TOKENS, "temperature": 0}
    answer = await _call(f"{base_url}/v1/completions", {**asked, "ignore_eos": True}, PROBE_TIMEOUT_S)
    try:
        return tuple(json.loads(answer)["choices"][0]["text"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"{base_url}/v1/completions answers the probe with no completion: {error}") from None


async def _call(url: str, body: Any, timeout_s: float, *, method: str = "POST") -> str:
    """Raises `EngineError` for anything but a success."""
    import httpx

    try:
        async with asyncio.timeout(timeout_s):
            async with httpx.AsyncClient(timeout=timeout_s, trust_env=False) as client:
                answer = await client.request(method, url, json=body)
    except (TimeoutError, httpx.HTTPError) as error:
        raise EngineError(f"no answer from {url}: {error or type(error).__name__}") from error
    if not answer.is_success:
        raise EngineError(f"{url} answers {answer.status_code}: {answer.text[:200]}")
    return answer.text
