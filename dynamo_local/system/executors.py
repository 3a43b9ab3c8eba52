"""Threads for calls that may block: one executor for each thing they block on, and a deadline for each call.

Python has one default executor. Sixteen calls that hang in a driver would leave no thread for a commit, and the end of
`asyncio.run` and of the interpreter would wait for each. So the GPU driver, files and scans of /proc have an executor
each. Their threads are daemons: the process can end while a call hangs.

Use `await SWEEPS.run(work, deadline_s, what="...")`. A thread cannot be interrupted. Past the deadline the caller gets
`CallOverdue`, and the thread stays lost until its call returns. While every thread is lost, new calls are refused at
once with `ExecutorStuck`.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dynamo_local.errors import DynamoError

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

T = TypeVar("T")

log = logging.getLogger(__name__)

QUEUE_MAX = 1024
"""How many calls may wait for a thread. Usually a handful do; at this many something is wrong: more are refused."""


class CallOverdue(DynamoError):
    """A blocking call did not return before its deadline. It may still finish later, unobserved."""

    code = "call_overdue"
    retryable = True


class ExecutorStuck(CallOverdue):
    """Refused at once: every thread that could make the call hangs in an earlier one."""

    code = "executor_stuck"


class _Call(Generic[T]):
    """One piece of work. A result that the caller has given up on is discarded."""

    def __init__(self, work: Callable[[], T], discard: Callable[[T], None] | None) -> None:
        self._work = work
        self._discard = discard
        self._lock = threading.Lock()
        self._results: list[T] = []
        self._abandoned = False
        self.running = False
        self.finished = False

    def __call__(self) -> T:
        with self._lock:
            if self._abandoned:
                raise CallOverdue("nobody waits for it any more")
            self.running = True
        try:
            result = self._work()
        finally:
            with self._lock:
                self.finished = True
        with self._lock:
            self._results.append(result)
            abandoned = self._abandoned
        if abandoned:
            self._discard_results()
        return result

    def abandon(self) -> None:
        """The caller has given up: discard the result."""
        with self._lock:
            self._abandoned = True
        self._discard_results()

    def _discard_results(self) -> None:
        with self._lock:
            results, self._results = self._results, []
        if self._discard is not None:
            for result in results:
                self._discard(result)


class DaemonExecutor(Executor):
    """At most `threads` daemon threads, made when they are needed. For use from one event loop, or from none."""

    def __init__(self, name: str, *, threads: int) -> None:
        self.name = name
        self._max_threads = threads
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0
        self._overdue: set[_Call[Any]] = set()

    @property
    def stuck(self) -> int:
        """How many threads hang in a call whose deadline has passed."""
        with self._lock:
            self._overdue = {call for call in self._overdue if not call.finished}
            return len(self._overdue)

    async def run(
        self, work: Callable[[], T], deadline_s: float, *, what: str, discard: Callable[[T], None] | None = None
    ) -> T:
        """`work()` in a thread; what it returns or raises. `what` names it in errors ("a sweep of /proc").

        Raises `CallOverdue` after `deadline_s` seconds, waiting for a thread included, and `ExecutorStuck` at once
        where no thread is left. A result that comes too late, or to a cancelled caller, goes to `discard` (in that
        thread): locks and descriptors must be given back.
        """
        call = _Call(work, discard)
        deadline = asyncio.timeout(deadline_s)
        try:
            async with deadline:
                # Through the loop, not our own `submit`: the simulation's loop has no threads and runs the call itself.
                return await asyncio.get_running_loop().run_in_executor(self, call)
        except TimeoutError as error:
            self._give_up(call)
            if not deadline.expired():
                raise  # the work's own
            state = "has not returned" if call.running else "found no free thread"
            raise CallOverdue(f"{what} {state} within {deadline_s:g} s") from error
        except asyncio.CancelledError:
            self._give_up(call)
            raise

    def _give_up(self, call: _Call[Any]) -> None:
        call.abandon()
        if call.running and not call.finished:
            with self._lock:
                self._overdue.add(call)

    def run_now(self, work: Callable[[], T], deadline_s: float, *, what: str) -> T:
        """`run` for code without an event loop: the caller itself waits."""
        call = _Call(work, None)
        future = self.submit(call)
        try:
            return future.result(deadline_s)
        except TimeoutError as error:
            if future.done():
                raise  # the work's own
            future.cancel()
            self._give_up(call)
            raise CallOverdue(f"{what} has not returned within {deadline_s:g} s") from error

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See `Executor`. Raises `ExecutorStuck`."""
        stuck = self.stuck
        if stuck >= self._max_threads:
            raise ExecutorStuck(f"the {self.name} calls before have not returned: nothing is asked until they do")
        if self._queue.qsize() >= QUEUE_MAX:
            raise ExecutorStuck(f"{QUEUE_MAX} {self.name} calls wait already, and {stuck} threads are stuck")
        future: Future[T] = Future()
        self._queue.put((future, lambda: fn(*args, **kwargs)))
        with self._lock:
            if self._idle < self._queue.qsize() and self._threads < self._max_threads:
                threading.Thread(target=self._work, name=f"{self.name}-{next(_NUMBERS)}", daemon=True).start()
                self._threads += 1
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `Executor`. There is nothing to do: the threads are daemons, and wait for work at no cost."""

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            try:
                future, work = self._queue.get()
            finally:
                with self._lock:
                    self._idle -= 1
            if future.set_running_or_notify_cancel():
                _settle(future, work)
            del future, work  # an idle thread must keep no objects alive


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except BaseException as error:  # as concurrent.futures does: every exception goes to the caller
        future.set_exception(error)
        # Its traceback holds this frame, and this frame holds the future, which holds the error. Without the `del` the
        # data that the work has read stays in memory until the garbage collector runs.
        del future, work
    else:
        future.set_result(result)


_NUMBERS = itertools.count()

FILES = DaemonExecutor("file", threads=8)
"""For locks, logs and the statefile."""
SWEEPS = DaemonExecutor("process table", threads=2)
"""For reading all of /proc: reading the command line of a process that hangs in the kernel can block."""
SWEEP_DEADLINE_S = 60.0
"""Longer than `leftovers.end` itself takes to give up on a process that cannot be killed."""


AGAIN_S = 2.0
"""Time for a cancelled task to clean up. Giving an entry back to the queue takes some milliseconds."""


async def ended(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel these tasks and wait for their end. Their exceptions are dropped. None stands for no task.

    One cancellation may not be enough. Python 3.11's `asyncio.wait_for`, which nats-py calls, loses a cancellation that
    comes together with the awaited result. The `publish` of nats-py loses one while it waits for its buffer. A loop
    around such a call would run for ever. So the cancellation is repeated.
    """
    given = [task for task in tasks if task is not None]
    left = {task for task in given if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
        for task in left:
            log.warning("%r has not ended %g s after it was cancelled; cancelled again", task, AGAIN_S)
    for task in given:
        if not task.cancelled():
            task.exception()  # seen: asyncio would log it as never retrieved


async def within(future: asyncio.Future[T], timeout_s: float) -> T:
    """The future's result. Past `timeout_s` both get TimeoutError, the caller and the future. It costs no task."""
    timer = asyncio.get_running_loop().call_later(max(0.0, timeout_s), _out_of_time, future)
    try:
        return await future
    finally:
        timer.cancel()


def _out_of_time(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Their results, in order. The first failure is raised as it is, once the others were cancelled and have ended."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def process_pool(processes: int | None = None) -> ProcessPoolExecutor:
    """Fresh processes for work that computes (None: one for each core). They end with this process, also if it is
    killed. Submit work in a thread that outlives the pool: the kernel takes its end for that of the process."""
    import multiprocessing  # most processes never need it
    from concurrent.futures import ProcessPoolExecutor

    from dynamo_local.system.prctl import set_parent_death_signal

    killed = signal.SIGKILL, os.getpid()
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, context, initializer=set_parent_death_signal, initargs=killed)


# The end of a process that has done everything, whatever Python still waits for.
#
# Python waits at its exit for cancelled tasks, for threads and for libraries (gRPC among them), without a bound. The
# arbiter would take a worker that left in order for hung, and `dynamo down` would wait for its arbiter.

END_WITHIN_S = 10.0
"""An exit takes some tens of milliseconds, and a second on a busy host."""


def end_at_the_latest(code: int, within_s: float = END_WITHIN_S) -> None:
    """Have this process end with `code` after `within_s` seconds, should it still be there: its log then says what it
    waited for. To be called once all that must be done is done, in the thread of the event loop if there is one."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    # A daemon: threads that are none are what Python may be waiting for.
    threading.Thread(target=_end, args=(code, within_s, loop), name="end at the latest", daemon=True).start()


def end_now(code: int) -> None:
    """End the process without waiting. Logged and printed text is written first."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end(code: int, within_s: float, loop: asyncio.AbstractEventLoop | None) -> None:
    time.sleep(within_s)
    log.error("still there %g s after the end of its work, so it ends now. Left behind:\n%s", within_s, _left(loop))
    end_now(code)


def _left(loop: asyncio.AbstractEventLoop | None) -> str:
    """The stacks of all threads but this one, and of the tasks that have not ended."""
    text = io.StringIO()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, stack in sys._current_frames().items():
        if ident != threading.get_ident():
            text.write(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(stack))}")
    for task in asyncio.all_tasks(loop) if loop is not None and not loop.is_closed() else ():
        text.write(f"task {task.get_name()}:\n")
        task.print_stack(file=text)
    return text.getvalue()
