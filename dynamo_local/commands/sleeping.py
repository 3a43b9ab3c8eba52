"""How a command sleeps and wakes: by hooks of its section, or, a `vllm serve`, by its own endpoints on loopback.

`engines.sleeping.EngineStandby` does the rest: the rehearsal, the probe after every wake, the memory before and after.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dynamo_local.commands import placeholders
from dynamo_local.commands.child import Child
from dynamo_local.commands.config import CommandConfig
from dynamo_local.commands.launching import search_path
from dynamo_local.engines.process_memory import of_this_session
from dynamo_local.engines.sleeping import EngineMemory, EngineStandby
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
    """See `engines.sleeping.CanSleep`."""

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


__all__ = ["CommandSleep", "HookCommands", "SleepHooks", "take_on_standby"]
