"""The virtual clock."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest

from dynamo_local.clock import AsyncioClock, VirtualDeadlock, run_virtual, sleep_to_next


def test_an_hour_of_sleeps_passes_in_no_time() -> None:

    async def main() -> list[tuple[str, float]]:
        clock, seen = AsyncioClock(), []

        async def sleeper(name: str, at_s: float) -> None:
            await clock.sleep_until(at_s)
            seen.append((name, clock.now_s()))

        await asyncio.gather(sleeper("late", 3600), sleeper("early", 1.5), sleeper("past", -1))
        return seen

    started_s = time.perf_counter()
    assert run_virtual(main()) == [("past", 0), ("early", pytest.approx(1.5)), ("late", pytest.approx(3600))]
    assert time.perf_counter() - started_s < 5


def test_timeouts_are_virtual_too() -> None:

    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await asyncio.sleep(1000)
        return AsyncioClock().now_s()

    assert run_virtual(main(), start_s=50) == pytest.approx(150)


def test_waiting_for_nothing_is_an_error_and_not_a_hang() -> None:

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(VirtualDeadlock, match="no timer is set"):
        run_virtual(main())


@pytest.mark.parametrize("every_s", [1.0, 0.15])
def test_regular_looks_of_one_period_are_taken_in_one_go(every_s: float) -> None:

    async def main() -> list[list[float]]:
        clock = AsyncioClock()

        async def looks(began_s: float) -> list[float]:
            seen = []
            await clock.sleep_until(began_s)
            while clock.now_s() < 100:
                await sleep_to_next(clock, every_s)
                seen.append(clock.now_s())
            return seen

        return await asyncio.gather(looks(0.0), looks(0.03))

    first, second = run_virtual(main())
    assert first == pytest.approx(second)
    assert [later - at for at, later in pairwise(first)] == pytest.approx([every_s] * (len(first) - 1))
