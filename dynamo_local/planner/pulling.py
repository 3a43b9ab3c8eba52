"""One pull of the metrics: every source asked at once, each under a deadline of its own, each value with its age.

A source that is slow, or fails, costs its own sample and nothing else. What it gave before stands until it is older
than three pulls; then it is `Missing`, never 0.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from dynamo_local.clock import Clock
from dynamo_local.core.types import Load, Missing
from dynamo_local.errors import DynamoError
from dynamo_local.planner.rounds import fresh
from dynamo_local.planner.values import Reading

log = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

DEADLINE_PULLS = 0.8
DEADLINE_MAX_S = 1.0
"""A source is not waited for beyond this part of the time between two pulls, and so many seconds at most."""
HUNG_PULLS = 10
"""A source that has not answered for so many pulls is asked anew."""


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
    """What the workers publish of themselves."""

    async def loads(self) -> Mapping[str, Sampled[Load]] | Missing:
        """By watcher name; a worker that does not answer is absent. May raise `DynamoError`."""
        ...


class Puller:
    """Makes readings. `queue` is None where the graph has no prefill component."""

    def __init__(self, loads: LoadSource, queue: QueueSource | None, clock: Clock) -> None:
        self._clock = clock
        self._loads = _Asked(loads.loads, clock)
        self._queue = None if queue is None else _Asked(queue.depth, clock)
        self._known: dict[str, Sampled[Load]] = {}
        self._depth: Sampled[int] | None = None

    async def pull(self, ready: Collection[str], interval_s: float) -> Reading:
        """A reading of the decode workers that are ready, within `DEADLINE_PULLS` of the interval (seconds)."""
        at_s = self._clock.now_s()
        sources = [source for source in (self._loads, self._queue) if source is not None]
        await asyncio.gather(*(source.ask(interval_s) for source in sources))
        return Reading(at_s, self._queue_now(interval_s), self._loads_now(ready, interval_s))

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
        """Wait for nobody any more."""
        for source in (self._loads, self._queue):
            if source is not None:
                source.cancel()


class _Asked(Generic[T]):
    """A source and the one question to it that may be under way. `failed` says why the last got no answer."""

    def __init__(self, ask: Callable[[], Awaitable[T | Missing]], clock: Clock) -> None:
        self._ask = ask
        self._clock = clock
        self._task: asyncio.Future[T | Missing] | None = None
        self._began_s = 0.0
        self._answer: T | None = None
        self.failed: str | None = None

    async def ask(self, interval_s: float) -> None:
        """Return when it has answered, or at the deadline; then the next pull goes on waiting for the same answer."""
        now_s = self._clock.now_s()
        if self._task is not None and now_s - self._began_s > HUNG_PULLS * interval_s:
            self.cancel()
        if self._task is None:
            self._task, self._began_s = asyncio.ensure_future(self._ask()), now_s
            self._task.add_done_callback(_seen)
        # Not wait_for: it would cancel the question.
        await asyncio.wait({self._task}, timeout=min(DEADLINE_MAX_S, DEADLINE_PULLS * interval_s))
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
        except Exception as error:  # a bug: it must not cost the other sources' samples (lesson 15)
            if self.failed != (why := f"{type(error).__name__}: {error}"):
                log.exception("a source of the planner failed")
            self.failed = why

    def take(self) -> T | None:
        """What came since the last time, once."""
        answer, self._answer = self._answer, None
        return answer

    def cancel(self) -> None:
        """Give the question up."""
        if self._task is not None:
            self._task.cancel()
            self._task = None


def _seen(task: asyncio.Future[T]) -> None:
    """A question that was given up may still fail: nobody is to be told of that."""
    if not task.cancelled():
        task.exception()
