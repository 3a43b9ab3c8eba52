"""A burst of requests is begun in parts, so that what else is to be done is done in between."""

from __future__ import annotations

import asyncio

from dynamo_local.components.openai.route import AT_ONCE, Entrance


async def test_few_requests_are_begun_at_once() -> None:
    entrance, passed = Entrance(), asyncio.Event()
    asyncio.get_running_loop().call_soon(passed.set)
    for _ in range(AT_ONCE):
        await entrance.enter()
    assert not passed.is_set()


async def test_a_burst_is_begun_in_its_order_and_others_have_the_loop_in_between() -> None:
    entrance, count = Entrance(), 5 * AT_ONCE
    begun: list[int] = []
    seen: list[int] = []

    async def request(number: int) -> None:
        await entrance.enter()
        begun.append(number)

    requests = [asyncio.create_task(request(n)) for n in range(count)]
    while len(begun) < count:
        await asyncio.sleep(0)
        seen.append(len(begun))
    await asyncio.gather(*requests)

    assert begun == list(range(count))
    steps = [later - earlier for earlier, later in zip([0, *seen], seen, strict=False)]
    assert max(steps) <= AT_ONCE


async def test_who_gives_up_while_waiting_takes_nobodys_turn() -> None:
    entrance = Entrance()
    waiting = [asyncio.create_task(entrance.enter()) for _ in range(4 * AT_ONCE)]
    await asyncio.sleep(0)
    for task in waiting[AT_ONCE : 3 * AT_ONCE]:
        task.cancel()
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting, return_exceptions=True)
    assert [task.cancelled() for task in waiting].count(True) == 2 * AT_ONCE
