"""Blocking calls have a deadline, hang without taking others along, and never hold up the process's end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from dynamo_local.system.executors import CallOverdue, DaemonExecutor, ExecutorStuck

LONG_S = 30.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a hung call waits for; opened when the test ends."""
    gate = threading.Event()
    yield gate
    gate.set()


async def overdue(executor: DaemonExecutor, gate: threading.Event) -> None:
    """Lose one of its threads."""
    with pytest.raises(CallOverdue, match="the driver has not returned within"):
        await executor.run(gate.wait, 0.05, what="the driver")


async def test_it_returns_what_the_work_returns_or_raises() -> None:
    executor = DaemonExecutor("test", threads=1)
    assert await executor.run(lambda: 42, LONG_S, what="x") == 42
    with pytest.raises(ZeroDivisionError):
        await executor.run(lambda: 1 // 0, LONG_S, what="x")

    def late() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        await executor.run(late, LONG_S, what="x")
    with pytest.raises(TimeoutError, match="of its own"):
        executor.run_now(late, LONG_S, what="x")


async def test_the_work_is_not_done_on_the_loops_thread() -> None:
    executor = DaemonExecutor("test", threads=1)
    assert await executor.run(threading.get_ident, LONG_S, what="x") != threading.get_ident()


async def test_with_all_threads_lost_new_calls_are_refused_at_once(gate: threading.Event) -> None:
    executor = DaemonExecutor("test", threads=2)
    await overdue(executor, gate)
    assert await executor.run(lambda: 1, LONG_S, what="x") == 1, "one thread is left"
    await overdue(executor, gate)
    assert executor.stuck == 2
    with pytest.raises(ExecutorStuck, match="the test calls before have not returned"):
        await executor.run(lambda: 1, LONG_S, what="x")
    with pytest.raises(ExecutorStuck):
        executor.run_now(lambda: 1, LONG_S, what="x")


async def test_a_thread_whose_call_returned_after_all_works_again(gate: threading.Event) -> None:
    executor = DaemonExecutor("test", threads=1)
    await overdue(executor, gate)
    gate.set()
    async with asyncio.timeout(LONG_S):
        while executor.stuck:
            await asyncio.sleep(0.001)
    assert await executor.run(lambda: 1, LONG_S, what="x") == 1


async def test_a_result_that_came_too_late_is_discarded(gate: threading.Event) -> None:
    executor, thrown = DaemonExecutor("test", threads=1), threading.Event()

    def late() -> str:
        gate.wait()
        return "a lock"

    results: list[str] = []

    def discard(result: str) -> None:
        results.append(result)
        thrown.set()

    with pytest.raises(CallOverdue):
        await executor.run(late, 0.05, what="x", discard=discard)
    gate.set()
    assert await asyncio.to_thread(thrown.wait, LONG_S)
    assert results == ["a lock"]


async def test_the_result_of_a_cancelled_caller_is_discarded(gate: threading.Event) -> None:
    executor, thrown = DaemonExecutor("test", threads=1), threading.Event()
    began = threading.Event()

    def work() -> int:
        began.set()
        gate.wait()
        return 1

    task = asyncio.create_task(executor.run(work, LONG_S, what="x", discard=lambda _: thrown.set()))
    assert await asyncio.to_thread(began.wait, LONG_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    assert await asyncio.to_thread(thrown.wait, LONG_S)


async def test_work_that_never_began_is_never_done(gate: threading.Event) -> None:
    executor, done = DaemonExecutor("test", threads=1), threading.Event()
    hung = asyncio.create_task(executor.run(gate.wait, LONG_S, what="x"))
    await asyncio.sleep(0)
    with pytest.raises(CallOverdue, match="found no free thread"):
        await executor.run(done.set, 0.05, what="y")
    gate.set()
    await hung
    assert await executor.run(lambda: 1, LONG_S, what="z") == 1
    assert not done.is_set()


HANGS = """
import asyncio, threading
from dynamo_local.system.executors import CallOverdue, DaemonExecutor

async def main():
    try:
        await DaemonExecutor("test", threads=1).run(threading.Event().wait, 0.05, what="the driver")
    except CallOverdue as error:
        print(error)

asyncio.run(main())
print("over")
"""


def test_a_call_that_never_returns_holds_up_neither_asyncio_nor_the_interpreter() -> None:
    """`dynamo down` waits for the arbiter's process to end."""
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=LONG_S, check=True)
    assert done.stdout.splitlines() == ["the driver has not returned within 0.05 s", "over"]
