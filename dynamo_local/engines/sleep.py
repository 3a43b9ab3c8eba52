"""Standby for engines that can sleep: one rehearsal at the start, and a check after every wake.

A sleep releases GPU memory under a running process, and a wake takes it back. In the field, answers changed after a
wake, and memory grew with each cycle. So a greedy probe must give the same answer after each wake as at the start, and
memory is measured before and after each cycle.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from dynamo_local.core.gpus import gib
from dynamo_local.core.types import Missing
from dynamo_local.errors import EngineError
from dynamo_local.ports import EngineRequest, SamplingParams
from dynamo_local.system.start_stages import Stages

log = logging.getLogger(__name__)

PROBE_PROMPT = tuple(range(11, 27))
"""Token ids that every tokenizer has; fewer than a KV block, so that nothing of it is cached."""
PROBE_TIMEOUT_S = 60.0
GROWTH_MAX_BYTES = 1024**3
"""The default of `standby-growth-max-bytes`: more than this over all cycles, and the process is replaced."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of the engine's processes, bytes: per device (the maximum over the devices), and main memory."""

    vram_bytes: int | Missing
    host_bytes: int | Missing


class CanSleep(Protocol):
    """The interface that `EngineStandby` needs. Engines of `ports.Engine` and commands with hooks implement it."""

    def cannot_sleep(self) -> str | None:
        """Why it cannot; None if it can. Valid after its start."""
        ...

    async def sleep(self, level: int) -> None:
        """Let go of the GPU's memory; nothing may run. Level 1 keeps the weights in main memory, 2 keeps none.

        Raises `EngineError`; then the engine is of no use any more.
        """
        ...

    async def wake(self) -> None:
        """Have the memory again, with the weights, and an empty KV cache. Raises as `sleep`."""
        ...

    async def probe(self) -> tuple[Any, ...]:
        """The greedy answer to the same prompt, each time. Raises `EngineError` past its deadline."""
        ...

    async def memory(self) -> EngineMemory:
        """Memory in use now."""
        ...


async def answer_of(engine: Any, name: str, count: int) -> tuple[int, ...]:
    """The probe of an engine of `ports.Engine`: so many tokens, greedily. Raises `EngineError` past its deadline."""
    sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    tokens: list[int] = []
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            async with aclosing(engine.generate(EngineRequest(name, PROBE_PROMPT, sampling))) as outputs:
                async for output in outputs:
                    tokens += output.token_ids
    except TimeoutError:
        raise EngineError(f"the probe was not answered within {PROBE_TIMEOUT_S:g} s") from None
    return tuple(tokens)


class WakeCorrupted(EngineError):
    """The engine answers otherwise than before it slept: none of its answers can be trusted."""


@dataclass(frozen=True, slots=True)
class _Cycle:
    """Memory in one cycle: awake before, asleep, awake after."""

    before: EngineMemory
    asleep: EngineMemory
    after: EngineMemory


class EngineStandby:
    """One engine's standby.

    `cannot`: why the engine cannot sleep. `asleep`: the memory that it keeps while it sleeps. `recycle`: why its
    process should be replaced, once its memory has grown by more than `growth_max_bytes`.
    """

    def __init__(self, engine: CanSleep, *, growth_max_bytes: int = GROWTH_MAX_BYTES) -> None:
        self._engine = engine
        self._growth_max_bytes = growth_max_bytes
        self._expected: tuple[Any, ...] = ()
        self._first: _Cycle | None = None
        self._before: EngineMemory | None = None
        self._count = 0
        self.asleep: EngineMemory | None = None
        self.recycle: str | None = None
        self.cannot: str | None = "it has not been rehearsed yet"

    @property
    def rehearsed_bytes(self) -> int | Missing:
        """The main memory that sleeping at level 1 took when it was rehearsed."""
        if self._first is None:
            return Missing("not rehearsed")
        asleep, awake = self._first.asleep.host_bytes, self._first.before.host_bytes
        if isinstance(asleep, Missing) or isinstance(awake, Missing):
            return asleep if isinstance(asleep, Missing) else awake
        return max(0, asleep - awake)

    async def rehearse(self) -> None:
        """Learn how the engine answers, and go through one cycle: the first wake of a process may take ten times the
        next. Raises `WakeCorrupted`, or what the engine fails with."""
        self.cannot = self._engine.cannot_sleep()
        if self.cannot is not None:
            log.warning("this worker cannot sleep: %s", self.cannot)
            return
        self._expected = await self._engine.probe()
        before = await self._engine.memory()
        await self.sleep(1)
        asleep = self.asleep or before
        await self.wake()
        self._first = _Cycle(before, asleep, await self._engine.memory())
        self.recycle = None
        log.info("a sleep was rehearsed: %s", self._first)

    async def sleep(self, level: int) -> None:
        """Raises what the engine fails with."""
        self._before = await self._engine.memory()
        await self._engine.sleep(level)
        self.asleep = await self._engine.memory()
        if self._first is not None and level == 1:
            self._check_growth("asleep", self._first.asleep, self.asleep)

    async def wake(self) -> None:
        """Raises `WakeCorrupted` where the probe is answered otherwise, and what the engine fails with."""
        stages = Stages()
        await self._engine.wake()
        stages.passed("wake")
        self.asleep = None
        self._count += 1
        answer = await self._engine.probe()
        stages.passed("probe")
        if answer != self._expected:
            where = _differ(self._expected, answer)
            raise WakeCorrupted(f"after wake {self._count} the engine answers otherwise than at its start: {where}")
        if self._first is not None:
            self._check_growth("awake", self._first.after, await self._engine.memory())
            stages.passed("memory")
        log.info("the engine is awake after %s", stages.describe(3))

    def _check_growth(self, when: str, first: EngineMemory, now: EngineMemory) -> None:
        for what, then, is_now in (
            ("GPU memory", first.vram_bytes, now.vram_bytes),
            ("main memory", first.host_bytes, now.host_bytes),
        ):
            if isinstance(then, Missing) or isinstance(is_now, Missing):
                continue
            if is_now - then > self._growth_max_bytes:
                self.recycle = (
                    f"its {what} {when} has grown from {gib(then)} to {gib(is_now)} over {self._count} wakes, by more "
                    f"than the {gib(self._growth_max_bytes)} allowed"
                )
                log.warning("%s", self.recycle)


def _differ(expected: tuple[Any, ...], answer: tuple[Any, ...]) -> str:
    same = next((n for n, (a, b) in enumerate(zip(expected, answer, strict=False)) if a != b), None)
    at = min(len(expected), len(answer)) if same is None else same
    return f"token {at} of the probe, {len(answer)} of {len(expected)} tokens"
