"""Blocking calls have a deadline, hang without taking others along, and never hold up the process's end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dynamo_local.clock import run_virtual
from dynamo_local.system.executors import AGAIN_S, CallOverdue, DaemonExecutor, ExecutorStuck, ended, together

LONG_S = 30.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a hung call waits for; opened when the test ends."""
    gate = threading.Event()
    yield gate
    gate.set()


async def overdue(executor: DaemonExecutor, gate: threading.Event) -> None:
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

    began, results = threading.Event(), list[str]()

    def late() -> str:
        began.set()
        gate.wait()
        return "a lock"

    def discard(result: str) -> None:
        results.append(result)
        thrown.set()

    while not began.is_set():  # on a busy host no thread may have come to it: then it is never done
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


# --- cancelling
# `cancelling.ended`: tasks end, whatever they make of their cancellation.


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


# --- together
# Several things at once.


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


POOL_OWNER = f"""
import os, time
from dynamo_local.system.executors import process_pool

if __name__ == "__main__":
    with process_pool(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, {LONG_S}).result()
"""


def test_a_pool_of_processes_ends_with_its_owner_though_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "owner.py").write_text(POOL_OWNER)
    with subprocess.Popen([sys.executable, str(tmp_path / "owner.py")], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        computing = psutil.Process(int(owner.stdout.readline()))
        assert computing.is_running()
        owner.kill()
        _, left = psutil.wait_procs([computing], LONG_S / 3)
    assert left == []
