"""`cancelling.ended`: tasks end, whatever they make of their cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from dynamo_local.clock import run_virtual
from dynamo_local.system.executors import AGAIN_S, ended


def test_one_that_lets_a_cancellation_pass_is_cancelled_again() -> None:
    """As a loop around nats-py may: without this, its end would be awaited for ever."""

    async def scenario() -> float:
        passed = 0

        async def deaf() -> None:
            nonlocal passed
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    passed += 1
                    if passed == 3:
                        raise

        task = await begun(deaf())
        began_s = asyncio.get_running_loop().time()
        await ended(task, None)
        assert task.cancelled()
        return asyncio.get_running_loop().time() - began_s

    assert run_virtual(scenario()) == pytest.approx(2 * AGAIN_S)


def test_what_a_task_does_at_its_end_is_not_interrupted() -> None:

    async def scenario() -> list[str]:
        done: list[str] = []

        async def careful() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(AGAIN_S / 2)
                done.append("given back")

        await ended(await begun(careful()))
        return done

    assert run_virtual(scenario()) == ["given back"]


def test_failures_of_tasks_are_not_raised() -> None:

    async def scenario() -> list[bool]:
        async def failing() -> None:
            raise ValueError("before")

        async def failing_late() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                raise ValueError("with it")

        tasks = [await begun(failing()), await begun(failing_late())]
        await ended(*tasks)
        return [task.done() for task in tasks]

    assert run_virtual(scenario()) == [True, True]


async def begun(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task that waits for something by now."""
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    return task
