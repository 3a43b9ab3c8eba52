"""How a command sleeps and wakes: by hooks of its section, or, a `vllm serve`, by its own endpoints on loopback.

`engines.sleep.EngineStandby` does the rest: the rehearsal, the probe after every wake, the memory before and after.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dynamo_local.components.commands import launch as placeholders
from dynamo_local.components.commands.child import Child
from dynamo_local.components.commands.config import CommandConfig
from dynamo_local.components.commands.launch import search_path
from dynamo_local.engines.base import of_this_session
from dynamo_local.engines.sleep import PROBE_PROMPT, PROBE_TIMEOUT_S, EngineMemory, EngineStandby
from dynamo_local.errors import EngineError
from dynamo_local.sdk.context import WorkerContext

log = logging.getLogger("dynamo_local.worker")

HOOK_TIMEOUT_S = 300.0
"""For reading the weights of a large model again."""
LEVEL = "DYN_SLEEP_LEVEL"
"""Tells a hook the level: 1 or 2."""
TAIL_BYTES = 500


class SleepHooks(Protocol):
    """Makes one command sleep and wake. All raise `EngineError`; then the worker is started again."""

    async def sleep(self, level: int) -> None:
        """Return when it has let go of its GPU."""
        ...

    async def wake(self, level: int) -> None:
        """Return when it takes requests again; `level` is the one at which it slept."""
        ...

    async def probe(self) -> tuple[Any, ...]:
        """Its greedy answer to the same prompt; empty where it cannot be asked."""
        ...


class CommandSleep:
    """`engines.sleep.CanSleep` by the hooks of a command."""

    def __init__(self, hooks: SleepHooks) -> None:
        self._hooks = hooks
        self._level = 1

    def cannot_sleep(self) -> str | None:
        return None

    async def sleep(self, level: int) -> None:
        await self._hooks.sleep(level)
        self._level = level

    async def wake(self) -> None:
        await self._hooks.wake(self._level)

    async def probe(self) -> tuple[Any, ...]:
        return await self._hooks.probe()

    async def memory(self) -> EngineMemory:
        return await asyncio.to_thread(of_this_session)


class HookCommands:
    """`sleep-hook` and `wake-hook` of a section: programs that return when it is done, exit code 0.

    `probe` is the runtime's, None where it has none.
    """

    def __init__(self, context: WorkerContext, child: Child, probe: Any = None) -> None:
        config: CommandConfig = context.settings
        self._sleep_words, self._wake_words = (
            placeholders.fill(
                placeholders.words_of(words),
                namespace=context.namespace,
                watcher=context.watcher_name,
                model=config.model,
                ports=child.launch.ports,
            )
            for words in (config.sleep_hook, config.wake_hook)
        )
        self._env: Mapping[str, str] = child.launch.env
        self._probe = probe

    async def sleep(self, level: int) -> None:
        await self._run(self._sleep_words, level)

    async def wake(self, level: int) -> None:
        await self._run(self._wake_words, level)

    async def probe(self) -> tuple[Any, ...]:
        return () if self._probe is None else tuple(await self._probe())

    async def _run(self, words: Sequence[str], level: int) -> None:
        """In our session, so that it dies with the worker."""
        named = shlex.join(words)
        env = {**self._env, LEVEL: str(level), "PATH": search_path(self._env)}
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
        except OSError as error:
            raise EngineError(f"the hook {named} could not be started: {error}") from error
        try:
            async with asyncio.timeout(HOOK_TIMEOUT_S):
                output, _ = await process.communicate()
        except TimeoutError:
            raise EngineError(f"the hook {named} has not ended within {HOOK_TIMEOUT_S:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            said = output[-TAIL_BYTES:].decode("utf-8", "replace").strip() or "it wrote nothing"
            raise EngineError(f"the hook {named} ended with exit code {process.returncode}: {said}")


async def take_on_standby(context: WorkerContext, hooks: SleepHooks, growth_max_bytes: int) -> None:
    """Rehearse, and give the worker what puts its command to sleep. Raises what the rehearsal fails with."""
    context.wait_for("a rehearsal of its sleep")
    sleeper = EngineStandby(CommandSleep(hooks), growth_max_bytes=growth_max_bytes)
    await sleeper.rehearse()
    context.set_sleeper(sleeper)


# --- `vllm serve`'s own sleep endpoints, for `runtime: http`.
#
# They exist in its development mode only, so it must listen on loopback: whoever reaches them can stop it, and more.

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
    """See `components.commands.sleep.SleepHooks`. `model` gives the model's name in the API, once it is known."""

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
    payload = {"model": model, "prompt": list(PROBE_PROMPT), "max_tokens": PROBE_TOKENS, "temperature": 0}
    answer = await _call(f"{base_url}/v1/completions", {**payload, "ignore_eos": True}, PROBE_TIMEOUT_S)
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
