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
from dynamo_local.planner.values import Reading

log = logging.getLogger(__name__)

T = TypeVar("T")

STALE_PULLS = 3
"""A value older than so many pulls is none (planner-rules)."""
DEADLINE_PULLS = 0.8
"""Part of the time between two pulls after which a source is not waited for: there must be time left for the rest."""
HUNG_PULLS = 10
"""A source that has not answered for so many pulls is asked anew."""


@dataclass(frozen=True, slots=True)
class Sampled(Generic[T]):
    """A value and when it was measured, on the loop's clock."""

    value: T
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
        oldest_s = self._clock.now_s() - STALE_PULLS * interval_s
        return Reading(at_s, self._queue_now(oldest_s), self._loads_now(ready, oldest_s))

    def _queue_now(self, oldest_s: float) -> int | Missing | None:
        if self._queue is None:
            return None
        taken = self._queue.take()
        if isinstance(taken, Sampled):
            self._depth = taken
        if self._depth is not None and self._depth.at_s >= oldest_s:
            return self._depth.value
        return Missing(f"the prefill queue's depth: {_why(self._queue.failed, self._depth, self._clock.now_s())}")

    def _loads_now(self, ready: Collection[str], oldest_s: float) -> dict[str, Load | Missing]:
        taken = self._loads.take()
        if taken is not None and not isinstance(taken, Missing):
            self._known.update(taken)
        self._known = {name: self._known[name] for name in ready if name in self._known}
        now_s = self._clock.now_s()
        found: dict[str, Load | Missing] = {}
        for name in ready:
            known = self._known.get(name)
            fresh = known is not None and known.at_s >= oldest_s
            why = f"the load of {name}: {_why(self._loads.failed, known, now_s)}"
            found[name] = known.value if known is not None and fresh else Missing(why)
        return found

    def close(self) -> None:
        """Wait for nobody any more."""
        for source in (self._loads, self._queue):
            if source is not None:
                source.cancel()


def _why(failed: str | None, last: Sampled[T] | None, now_s: float) -> str:
    age = "never had" if last is None else f"the last is {now_s - last.at_s:.1f} s old"
    return f"{age} ({failed})" if failed else age


class _Asked(Generic[T]):
    """A source and the one question to it that may be under way."""

    def __init__(self, ask: Callable[[], Awaitable[T]], clock: Clock) -> None:
        self._ask = ask
        self._clock = clock
        self._task: asyncio.Future[T] | None = None
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
        await asyncio.wait({self._task}, timeout=DEADLINE_PULLS * interval_s)
        if not self._task.done():
            self.failed = f"no answer for {self._clock.now_s() - self._began_s:.1f} s"
            return
        task, self._task = self._task, None
        try:
            self._answer = task.result()
            self.failed = self._answer.reason if isinstance(self._answer, Missing) else None
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
