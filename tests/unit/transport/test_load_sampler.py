"""Tests who answers late lives: on a starved host all answers may take longer than a question is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from dynamo_local.clock import AsyncioClock, run_virtual
from dynamo_local.core.types import Load
from dynamo_local.transport.load import STALE_AFTER_S, LoadSampler, load_subject
from tests.fakes.infra.memory_nats import LATENCY_S, MemoryNats

NAMESPACE = "dynamo"
QUESTION_S = 0.25
SOON_S = 2 * LATENCY_S


class OneClock(AsyncioClock):
    """People's time and the loop's are one."""

    def wall_s(self) -> float:
        return self.now_s()


class Asked:
    """Workers that keep the questions, and answer when they are told to; and who asks them."""

    def __init__(self) -> None:
        server = MemoryNats()
        self._workers, self.clock = server.client(), OneClock()
        nats: Any = server.client()
        self.sampler = LoadSampler(nats, NAMESPACE, self.clock)
        self.questions: list[str] = []

    async def start(self) -> None:
        """They listen, and were asked once, in vain."""

        async def keep(message: Any) -> None:
            self.questions.append(message.reply)

        await self._workers.subscribe(load_subject(NAMESPACE), cb=keep)
        assert await self.sample() == {}
        assert len(self.questions) == 1

    async def sample(self) -> dict[str, tuple[int, float]]:
        """Active requests and age, by worker."""
        reports = await self.sampler.sample(QUESTION_S, expected=2)
        return {name: (report.load.request_active_slots, report.age_s) for name, report in reports.items()}

    async def answer(self, question: int, watcher: str, *, active: int = 0, age_s: float = 0.0) -> None:
        said = {"watcher_name": watcher, "component": "Frontend", "instance_id": 1}
        load = Load(request_active_slots=active).numbers()
        data = msgspec.json.encode({**said, "load": load, "published_at_s": self.clock.wall_s() - age_s})
        await self._workers.publish(self.questions[question], data)
        await asyncio.sleep(SOON_S)


def virtually(test: Callable[[Asked], Awaitable[None]]) -> Callable[[], None]:
    async def main() -> None:
        asked = Asked()
        await asked.start()
        await test(asked)

    def run() -> None:
        run_virtual(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@virtually
async def test_an_answer_after_its_time_is_part_of_the_next_sample(asked: Asked) -> None:
    await asked.answer(0, "a", active=3, age_s=0.5)
    await asyncio.sleep(0.1)
    assert await asked.sample() == {"a": (3, pytest.approx(0.5 + SOON_S + 0.1 + QUESTION_S))}


@virtually
async def test_an_answer_counts_once(asked: Asked) -> None:
    """Who has answered nothing since is silent."""
    await asked.answer(0, "a")
    assert list(await asked.sample()) == ["a"]
    assert await asked.sample() == {}


@virtually
async def test_a_late_answer_does_not_end_the_wait_for_those_of_now(asked: Asked) -> None:
    for name in "ab":
        await asked.answer(0, name, active=1)
    asking = asyncio.create_task(asked.sample())
    await asyncio.sleep(SOON_S)
    await asked.answer(1, "a", active=2)
    assert not asking.done()
    await asked.answer(1, "b", active=2)
    assert {name: active for name, (active, _) in (await asking).items()} == {"a": 2, "b": 2}


@virtually
async def test_an_answer_that_is_too_old_says_nothing_of_now(asked: Asked) -> None:
    await asked.answer(0, "a", age_s=STALE_AFTER_S)
    assert await asked.sample() == {}
