"""The contract of engines that sleep, and the faults of one that `EngineStandby` must find.

A subclass gives the fixture `engine`: started, with nothing to do, and `CanSleep`.
"""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.core.types import Missing
from dynamo_local.engines.sleep import EngineStandby


class SleepContract:
    """See `engines.sleep.CanSleep`."""

    async def test_it_answers_after_each_wake_as_before(self, engine: Any) -> None:
        assert engine.cannot_sleep() is None
        expected = await engine.probe()
        assert expected
        for level in (1, 2, 1, 2):
            await engine.sleep(level)
            await engine.wake()
            assert await engine.probe() == expected

    async def test_it_lets_go_of_its_gpu(self, engine: Any) -> None:
        before = await engine.memory()
        await engine.sleep(1)
        asleep = await engine.memory()
        await engine.wake()
        after = await engine.memory()
        for each in (before, asleep, after):
            assert not isinstance(each.vram_bytes, Missing), each
        assert asleep.vram_bytes < before.vram_bytes / 2
        assert after.vram_bytes > before.vram_bytes / 2

    async def test_standby_rehearses_and_goes_through_cycles(self, engine: Any) -> None:
        standby = EngineStandby(engine)
        assert standby.cannot is not None
        await standby.rehearse()
        assert standby.cannot is None
        for level in (1, 2, 1):
            await standby.sleep(level)
            assert standby.asleep is not None
            await standby.wake()
            assert standby.asleep is None
        assert standby.recycle is None

    @pytest.mark.parametrize("level", [1, 2])
    async def test_nothing_is_cached_after_a_wake(self, engine: Any, level: int) -> None:
        await engine.probe()
        await engine.sleep(level)
        await engine.wake()
        assert engine.prefix_hit_rate(tuple(range(11, 27)) * 8) == 0.0
