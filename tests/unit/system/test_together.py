"""Several things at once."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_local.clock import run_virtual
from dynamo_local.system.executors import together


async def after(seconds: float, result: object) -> object:
    """The result, or the exception that it is."""
    await asyncio.sleep(seconds)
    if isinstance(result, Exception):
        raise result
    return result


def test_they_take_as_long_as_the_longest() -> None:

    async def main() -> tuple[list[object], float]:
        return await together(after(2.0, "a"), after(1.0, "b")), asyncio.get_running_loop().time()

    assert run_virtual(main()) == (["a", "b"], 2.0)


def test_the_first_failure_is_raised_as_it_is_and_nothing_goes_on() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            await asyncio.sleep(0.5)
            ended.append("slow")

    async def main() -> float:
        with pytest.raises(ValueError, match="broken"):
            await together(slow(), after(1.0, ValueError("broken")))
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 1.5
    assert ended == ["slow"]
