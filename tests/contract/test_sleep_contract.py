"""The contract of sleeping on the simulated engine and on a fake; `tests/vllm/test_vllm_sleep.py` runs it on vLLM.

The fake goes wrong when it is told to: each corruption and each growth must be found.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo_local.core.types import Missing
from dynamo_local.engines import make_engine
from dynamo_local.engines.sleep import EngineMemory, EngineStandby, WakeCorrupted
from dynamo_local.errors import EngineError
from tests.contract.sleep_contract import SleepContract

GIB = 1024**3
ANSWER = (3, 1, 4, 1, 5, 9, 2, 6)


class FakeSleeper:
    """`CanSleep` in a few lines. After wake `wrong_at` (from 1) token `wrong_token` is another one. `grows` bytes of
    GPU and main memory stay behind at each wake. `fails_at` names a step that raises."""

    def __init__(
        self, *, wrong_at: int = 0, wrong_token: int = 0, grows: tuple[int, int] = (0, 0), fails_at: str = ""
    ) -> None:
        self.wakes = 0
        self.level: int | None = None
        self._wrong_at, self._wrong_token = wrong_at, wrong_token
        self._grows, self._fails_at = grows, fails_at

    def cannot_sleep(self) -> str | None:
        return None

    async def sleep(self, level: int) -> None:
        if self._fails_at == "sleep" and self.wakes:
            raise EngineError("it could not be put to sleep")
        assert self.level is None
        self.level = level

    async def wake(self) -> None:
        if self._fails_at == "wake" and self.wakes:
            raise EngineError("it could not be woken")
        assert self.level is not None
        self.level = None
        self.wakes += 1

    async def probe(self) -> tuple[Any, ...]:
        assert self.level is None
        answer = list(ANSWER)
        if self._wrong_at and self.wakes >= self._wrong_at:
            if self._wrong_token == len(ANSWER):
                return ANSWER[:-1]
            answer[self._wrong_token] += 1
        return tuple(answer)

    async def memory(self) -> EngineMemory:
        vram, host = (each * self.wakes for each in self._grows)
        if self.level is None:
            return EngineMemory(70 * GIB + vram, 4 * GIB + host)
        return EngineMemory(GIB + vram, (20 if self.level == 1 else 4) * GIB + host)

    def prefix_hit_rate(self, _prompt: Any) -> float:
        return 0.0


class TestSimSleeps(SleepContract):
    """The simulated engine."""

    @pytest.fixture
    async def engine(self) -> AsyncIterator[Any]:
        made = make_engine("sim", {"speed": 1000.0})
        await made.start()
        yield made
        await made.close()


class TestFakeSleeps(SleepContract):
    """The fake, which does as it should unless it is told otherwise."""

    @pytest.fixture
    def engine(self) -> FakeSleeper:
        return FakeSleeper()


@pytest.mark.parametrize("token", range(len(ANSWER) + 1))
@pytest.mark.parametrize("wake", range(1, 9))
async def test_each_corruption_is_found_at_the_wake_that_made_it(wake: int, token: int) -> None:
    standby = EngineStandby(FakeSleeper(wrong_at=wake, wrong_token=token))
    if wake == 1:
        with pytest.raises(WakeCorrupted, match="after wake 1 "):
            await standby.rehearse()
        return
    await standby.rehearse()
    for _ in range(wake - 2):
        await standby.sleep(1)
        await standby.wake()
    await standby.sleep(2)
    with pytest.raises(WakeCorrupted, match=f"after wake {wake} "):
        await standby.wake()


@pytest.mark.parametrize("cycles_to_the_bound", range(1, 9))
@pytest.mark.parametrize("where", ["GPU memory", "main memory"])
async def test_each_growth_is_found_in_the_cycle_that_passes_the_bound(where: str, cycles_to_the_bound: int) -> None:
    step = GIB // cycles_to_the_bound + 1
    standby = EngineStandby(FakeSleeper(grows=(step, 0) if where == "GPU memory" else (0, step)), growth_max_bytes=GIB)
    await standby.rehearse()
    for cycle in range(1, cycles_to_the_bound + 1):
        assert standby.recycle is None, cycle
        await standby.sleep(2)
        await standby.wake()
    assert standby.recycle is not None
    assert f"its {where} awake has grown from" in standby.recycle


async def test_growth_of_what_it_keeps_asleep_is_found_asleep() -> None:
    standby = EngineStandby(FakeSleeper(grows=(2 * GIB, 0)), growth_max_bytes=GIB)
    await standby.rehearse()
    await standby.sleep(1)
    assert "its GPU memory asleep has grown from 1.0 GiB to 3.0 GiB" in (standby.recycle or "")


@pytest.mark.parametrize("step", ["sleep", "wake"])
async def test_an_engine_that_fails_is_not_believed(step: str) -> None:
    standby = EngineStandby(FakeSleeper(fails_at=step))
    await standby.rehearse()

    async def cycle() -> None:
        await standby.sleep(1)
        await standby.wake()

    with pytest.raises(EngineError, match="it could not be"):
        await cycle()


async def test_what_the_rehearsal_took_of_main_memory_is_known() -> None:
    standby = EngineStandby(FakeSleeper())
    assert isinstance(standby.rehearsed_bytes, Missing)
    await standby.rehearse()
    assert standby.rehearsed_bytes == 16 * GIB


async def test_the_simulated_engine_refuses_requests_while_it_sleeps() -> None:
    made: Any = make_engine("sim", {"speed": 1000.0, "corrupt_after_wakes": 1})
    await made.start()
    try:
        await made.sleep(1)
        with pytest.raises(EngineError, match="the engine sleeps"):
            await made.probe()
        await made.wake()
        standby = EngineStandby(made)
        await standby.rehearse()
    finally:
        await made.close()
