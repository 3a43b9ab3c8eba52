"""The ways to one more worker: one row each.

The name of a way is its scaling option's (`core.lead_times.OptionKind`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from dynamo_local.core.lead_times import OptionKind
from tests.drivers.scaled import PATIENCE_S, ascale, command, names, settled
from tests.drivers.served import AGG, DISAGG, Served, auntil
from tests.drivers.sleepers import asleep, wake

WAKE_S = 0.5
"""Configured seconds of the simulated engine's wake."""


@dataclass(frozen=True, slots=True)
class Way:
    """`words` are for `dynamo serve` of the graph `target`. `prepare` brings the graph to where the way begins, `begin`
    gives the command and returns when it is committed, `undo` takes the worker away again. `component` serves
    afterwards, at its `endpoint`. `times` in each round; `on_vllm`: also on vLLM's CPU build."""

    rung: OptionKind
    words: tuple[str, ...]
    prepare: Callable[[Served], Awaitable[None]]
    begin: Callable[[Served], Awaitable[None]]
    undo: Callable[[Served], Awaitable[None]]
    component: str = "VllmWorker"
    endpoint: str = "generate"
    target: Sequence[str] = AGG
    times: int = 1
    on_vllm: bool = False


async def _nothing(served: Served) -> None:
    """The graph is where it should be."""


async def _one_more(served: Served) -> None:
    await ascale(served, "VllmWorker", "+1")


async def _one_less(served: Served) -> None:
    await ascale(served, "VllmWorker", "-1")
    await settled(served, PATIENCE_S)


async def _warm(served: Served) -> None:
    """A spare is there, and nothing imports."""

    def is_warm() -> bool:
        told = served.status()["spares"]
        return bool(told["spares"]) and all(spare["state"] == "warm" for spare in told["spares"])

    await auntil(is_warm, PATIENCE_S, what=lambda: served.status()["spares"])


def _flip(gives: str) -> Callable[[Served], Awaitable[None]]:
    async def flip(served: Served) -> None:
        name = (await asyncio.to_thread(names, served, gives))[-1]
        await asyncio.to_thread(command, served, "flip", name=f"{served.namespace}_{name}")

    return flip


def _flip_back(gives: str) -> Callable[[Served], Awaitable[None]]:
    async def flip_back(served: Served) -> None:
        await settled(served, PATIENCE_S)
        await _flip(gives)(served)
        await settled(served, PATIENCE_S)

    return flip_back


async def _one_sleeps(served: Served) -> None:
    if "sleeping" not in served.states().values():
        await asleep(served, "VllmWorker_1")


async def _wake_it(served: Served) -> None:
    await asyncio.to_thread(wake, served, "VllmWorker_1")


async def _sleep_again(served: Served) -> None:
    await settled(served, PATIENCE_S)
    await asleep(served, "VllmWorker_1")


_TWO_EACH = tuple(f"--{component}.ServiceArgs.workers=2" for component in ("VllmWorker", "PrefillWorker"))
_MAY_SLEEP = (
    "--VllmWorker.ServiceArgs.workers=2",
    "--VllmWorker.ServiceArgs.standby=0",
    f"--VllmWorker.sim.wake_s={WAKE_S}",
)

WAYS: tuple[Way, ...] = (
    Way(
        OptionKind.FLIP_TO_DECODE,
        _TWO_EACH,
        _nothing,
        _flip("PrefillWorker"),
        _flip_back("VllmWorker"),
        target=DISAGG,
        times=10,
    ),
    Way(
        OptionKind.FLIP_TO_PREFILL,
        _TWO_EACH,
        _nothing,
        _flip("VllmWorker"),
        _flip_back("PrefillWorker"),
        component="PrefillWorker",
        endpoint="canary",
        target=DISAGG,
        times=10,
    ),
    Way(OptionKind.WAKE_1, _MAY_SLEEP, _one_sleeps, _wake_it, _sleep_again),
    Way(OptionKind.PREWARMED, ("--Host.spares=1",), _warm, _one_more, _one_less, on_vllm=True),
    Way(OptionKind.COLD, (), _nothing, _one_more, _one_less, on_vllm=True),
)
