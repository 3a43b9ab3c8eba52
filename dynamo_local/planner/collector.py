"""One observation of the metrics: every source asked at once, each under a deadline of its own, each value with its
age.

A source that is slow, or fails, costs its own sample and nothing else. Its last value is used until it is older
than three pulls; then it is `Missing`, never 0.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import types
from collections.abc import Callable, Collection, Coroutine, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from dynamo_local.clock import Clock
from dynamo_local.core.types import Load, Missing
from dynamo_local.errors import DynamoError
from dynamo_local.planner.policies.load_planner import fresh
from dynamo_local.planner.sources import PassSource, RequestSource, TrafficSource
from dynamo_local.planner.values import Capabilities, Engines, Reading, Requests, Traffic

# --- holding
# How long the planner holds the arbiter's event loop: nothing else runs there between two of its awaits.
#
# Two clocks time each step, from one await to the next. The wall clock also counts the work of other processes on a
# busy host. The thread's CPU clock does not. Nothing is decided by these times.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Longest:
    """The longest step so far, in seconds. The two may be of different steps."""

    elapsed_s: float = 0.0
    cpu_s: float = 0.0


class LoopLatency:
    """The longest step of each kind of work since this was made. The clocks give seconds of any origin."""

    def __init__(
        self, elapsed_s: Callable[[], float] = time.perf_counter, cpu_s: Callable[[], float] = time.thread_time
    ) -> None:
        self._elapsed_s, self._cpu_s = elapsed_s, cpu_s
        self._longest: dict[str, Longest] = {}

    @property
    def longest(self) -> Mapping[str, Longest]:
        """The longest step of each kind of work. Work that has not run yet is absent."""
        return dict(self._longest)

    @types.coroutine
    def timed(self, what: str, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """As `await work`, with each of its steps timed. Its exceptions and a cancellation pass through."""
        go_on: Callable[[], Any] = lambda: work.send(None)  # noqa: E731
        while True:
            elapsed_s, cpu_s = self._elapsed_s(), self._cpu_s()
            try:
                waits_for = go_on()
            except StopIteration as done:
                answer: T = done.value
                return answer
            finally:
                self._note(what, self._elapsed_s() - elapsed_s, self._cpu_s() - cpu_s)
            try:
                value = yield waits_for
            except BaseException as error:  # thrown into whoever awaits: into the work, then
                go_on = lambda error=error: work.throw(error)  # type: ignore[misc]  # noqa: E731
            else:
                go_on = lambda value=value: work.send(value)  # type: ignore[misc]  # noqa: E731

    def _note(self, what: str, elapsed_s: float, cpu_s: float) -> None:
        known = self._longest.get(what, Longest())
        self._longest[what] = Longest(max(known.elapsed_s, elapsed_s), max(known.cpu_s, cpu_s))


log = logging.getLogger(__name__)

T_co = TypeVar("T_co", covariant=True)

DEADLINE_PULLS = 0.8
DEADLINE_MAX_S = 1.0
"""A source is waited for at most this share of the time between two pulls, and at most `DEADLINE_MAX_S`."""
TRAFFIC_DEADLINE_S = 5.0
"""The same for a window of traffic, which another server may have to sum up."""
REQUESTS_WINDOWS = 3
"""An answer that was missed is made up for by the next one, if that is no further away."""
HUNG_PULLS = 10
"""A source that has not answered for this many pulls is asked again."""


@dataclass(frozen=True, slots=True)
class Sampled(Generic[T_co]):
    """A value and when it was measured, on the loop's clock."""

    value: T_co
    at_s: float


class QueueSource(Protocol):
    """How deep the prefill queue is."""

    async def depth(self) -> Sampled[int] | Missing:
        """Requests that nobody has pulled yet. May raise `DynamoError`."""
        ...


class LoadSource(Protocol):
    """The loads that the workers report."""

    async def loads(self) -> Mapping[str, Sampled[Load]] | Missing:
        """The load of each worker, by watcher name. A worker that does not answer is absent. May raise
        `DynamoError`."""
        ...


class Collector:
    """Asks the sources. `queue` is None where the graph has no prefill component; without `traffic` and `passes` those
    are missing. `held`: what their steps took of the loop."""

    def __init__(
        self,
        loads: LoadSource,
        queue: QueueSource | None,
        clock: Clock,
        *,
        traffic: TrafficSource | None = None,
        passes: PassSource | None = None,
        requests: RequestSource | None = None,
    ) -> None:
        self._clock = clock
        self.latency = LoopLatency()
        self._loads = self._pending("loads", loads.loads)
        self._queue = None if queue is None else self._pending("queue", queue.depth)
        self._known: dict[str, Sampled[Load]] = {}
        self._depth: Sampled[int] | None = None
        self._window_s = 0.0
        self._traffic = None if traffic is None else self._pending("traffic", partial(self._ask, traffic))
        self._requests = None if requests is None else self._pending("requests", partial(self._ask_requests, requests))
        self._requests_s = 0.0
        self._requests_to_s = -math.inf
        self._passes = passes
        self._engines = None if passes is None else self._pending("passes", passes.passes)

    def _pending(self, what: str, ask: Callable[[], Coroutine[Any, Any, T | Missing]]) -> _PendingSample[T]:
        async def timed() -> T | Missing:
            return await self.latency.timed(what, ask())

        return _PendingSample(timed, self._clock)

    async def collect(self, ready: Collection[str], interval_s: float) -> Reading:
        """A reading of the decode workers that are ready, within `DEADLINE_PULLS` of the interval (seconds)."""
        at_s = self._clock.now_s()
        sources = [source for source in (self._loads, self._queue) if source is not None]
        await asyncio.gather(*(source.ask(interval_s) for source in sources))
        return Reading(at_s, self._queue_now(interval_s), self._loads_now(ready, interval_s))

    async def traffic(self, window_s: float | None) -> Traffic | Missing | None:
        """The window of so many seconds that ends now; None where none is wanted."""
        if window_s is None:
            return None
        if self._traffic is None:
            return Missing("nothing here measures the traffic")
        self._window_s = window_s
        await self._traffic.ask(window_s, at_most_s=TRAFFIC_DEADLINE_S)
        return self._traffic.take() or Missing(f"the traffic is not known: {self._traffic.failed}")

    async def _ask(self, source: TrafficSource) -> Traffic | Missing:
        return await source.traffic(self._window_s)

    async def requests(self, window_s: float) -> Requests | None:
        """Those since the last call of this, one by one; of `window_s` seconds at first, and where the last ones are
        longer ago than `REQUESTS_WINDOWS` of these. None where they are not known so."""
        if self._requests is None:
            return None
        since_s = self._clock.now_s() - self._requests_to_s
        self._requests_s = since_s if since_s <= REQUESTS_WINDOWS * window_s else window_s
        await self._requests.ask(window_s)
        found = self._requests.take()
        if found is not None:
            self._requests_to_s = found.at_s
        return found

    async def _ask_requests(self, source: RequestSource) -> Requests | Missing:
        return await source.requests(self._requests_s)

    async def engines(self, interval_s: float) -> tuple[Engines, Mapping[str, Capabilities]]:
        """The passes of the engines since the last call, and their limits. Nothing, if they did not come in time."""
        if self._passes is None or self._engines is None:
            return {}, {}
        await self._engines.ask(interval_s)
        return self._engines.take() or {}, self._passes.capabilities()

    def _queue_now(self, interval_s: float) -> float | Missing | None:
        if self._queue is None:
            return None
        self._depth = self._queue.take() or self._depth
        return self._fresh(self._depth, interval_s, "the prefill queue's depth", self._queue.failed)

    def _loads_now(self, ready: Collection[str], interval_s: float) -> dict[str, Load | Missing]:
        self._known.update(self._loads.take() or {})
        self._known = {name: self._known[name] for name in ready if name in self._known}
        failed = self._loads.failed
        return {name: self._fresh(self._known.get(name), interval_s, f"the load of {name}", failed) for name in ready}

    def _fresh(self, last: Sampled[T] | None, interval_s: float, what: str, failed: str | None) -> T | Missing:
        if last is None:
            return Missing(f"{what} was never had" + (f" ({failed})" if failed else ""))
        now_s = self._clock.now_s()
        value = fresh(last.value, taken_at_s=last.at_s, now_s=now_s, pulling_interval_s=interval_s)
        if isinstance(value, Missing):
            return Missing(f"{what} is {value.reason}" + (f" ({failed})" if failed else ""))
        return value

    def close(self) -> None:
        """Cancel all pending samples."""
        for source in (self._loads, self._queue, self._traffic, self._requests, self._engines):
            if source is not None:
                source.cancel()


class _PendingSample(Generic[T]):
    """A source, with at most one call to it under way. `failed` says why the last call gave no sample."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T | Missing]], clock: Clock) -> None:
        self._ask = ask
        self._clock = clock
        self._task: asyncio.Future[T | Missing] | None = None
        self._began_s = 0.0
        self._answer: T | None = None
        self.failed: str | None = None

    async def ask(self, interval_s: float, at_most_s: float = DEADLINE_MAX_S) -> None:
        """Return when it has answered, or at the deadline; the next observation then waits for the same call."""
        now_s = self._clock.now_s()
        if self._task is not None and now_s - self._began_s > HUNG_PULLS * interval_s:
            self.cancel()
        if self._task is None:
            self._task, self._began_s = asyncio.ensure_future(self._ask()), now_s
            self._task.add_done_callback(_seen)
        # Not wait_for, which would cancel the call.
        await asyncio.wait({self._task}, timeout=min(at_most_s, DEADLINE_PULLS * interval_s))
        if not self._task.done():
            self.failed = f"no answer for {self._clock.now_s() - self._began_s:.1f} s"
            return
        task, self._task = self._task, None
        try:
            answer = task.result()
            self._answer = None if isinstance(answer, Missing) else answer
            self.failed = answer.reason if isinstance(answer, Missing) else None
        except DynamoError as error:
            self.failed = str(error)
        except asyncio.CancelledError:
            self.failed = "it was cancelled"
        except Exception as error:  # a bug: it must not cost the other sources' samples
            if self.failed != (why := f"{type(error).__name__}: {error}"):
                log.exception("a source of the planner failed")
            self.failed = why

    def take(self) -> T | None:
        """The sample that came since the last call of this, if any."""
        answer, self._answer = self._answer, None
        return answer

    def cancel(self) -> None:
        """Cancel the call."""
        if self._task is not None:
            self._task.cancel()
            self._task = None


def _seen(task: asyncio.Future[T]) -> None:
    """Retrieve the exception of a cancelled call, so that it is not logged."""
    if not task.cancelled():
        task.exception()
