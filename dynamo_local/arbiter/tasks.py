"""The arbiter's own tasks: those that must run as long as it does are started again when they die, and named.

A loop that dies silently is the worst of an arbiter's faults: without samples all workers look silent, without the
registry nobody is seen to come or go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from dynamo_local.clock import Clock
from dynamo_local.core.notes import Elsewhere, Tell
from dynamo_local.system.executors import ended

log = logging.getLogger(__name__)

AGAIN_S, AGAIN_MAX_S = 0.5, 30.0
END_WITHIN_S = 5.0
RAN_WELL_S = 60.0
"""A task that ran for so long before it died begins with the shortest delay again."""


@dataclass(slots=True)
class TaskState:
    """One task that is kept alive. `deaths` counts how often it died; `why` is the last reason, None while it runs."""

    name: str
    deaths: int = 0
    why: str | None = None
    next_s: float | None = None

    def as_json(self, now_s: float) -> dict[str, Any]:
        """For `dynamo status --json`: `again_s` is how long until it is started again."""
        again_s = None if self.next_s is None else round(max(0.0, self.next_s - now_s), 3)
        return {
            "task": self.name,
            "running": self.why is None,
            "deaths": self.deaths,
            "why": self.why,
            "again_s": again_s,
        }


class Tasks:
    """Background work of one arbiter. `tell` is for a person."""

    def __init__(self, clock: Clock, tell: Tell) -> None:
        self._clock = clock
        self._tell = tell
        self._tasks: set[asyncio.Task[Any]] = set()
        self.kept: dict[str, TaskState] = {}

    def keep(
        self,
        name: str,
        work: Callable[[], Coroutine[Any, Any, Any]],
        *,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        """Run `work()` for as long as the arbiter lives; when it ends or fails it is started again, with back-off.

        `on_death` makes safe what depends on it.
        """
        state = self.kept.setdefault(name, TaskState(name))
        self.run(self._kept(state, work, on_death))

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something that ends by itself. An exception is logged and reported."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def close(self) -> None:
        """End all of them; one that does not end is named in the log, and left."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        try:
            async with asyncio.timeout(END_WITHIN_S):
                await ended(*tasks)
        except TimeoutError:
            left = ", ".join(repr(task.get_coro()) for task in tasks if not task.done())
            log.error("did not end within %g s: %s", END_WITHIN_S, left)

    def status(self) -> list[dict[str, Any]]:
        """The status of the tasks that are kept alive."""
        now_s = self._clock.now_s()
        return [state.as_json(now_s) for state in self.kept.values()]

    async def _kept(
        self, state: TaskState, work: Callable[[], Coroutine[Any, Any, Any]], on_death: Callable[[], None]
    ) -> None:
        delay_s = AGAIN_S
        while True:
            began_s = self._clock.now_s()
            try:
                await work()
                why = "it ended by itself"
            except asyncio.CancelledError:
                if _is_ending():
                    raise
                why = "what it waited for was cancelled"
            except Exception as error:
                log.exception("the arbiter's task %s died", state.name)
                why = f"{type(error).__name__}: {error}"
            if self._clock.now_s() - began_s >= RAN_WELL_S:
                delay_s = AGAIN_S
            state.deaths, state.why = state.deaths + 1, why
            state.next_s = self._clock.now_s() + delay_s
            self._make_safe(state.name, on_death)
            self._tell(f"the arbiter's {state.name} died ({why}); it is started again in {delay_s:g} s", Elsewhere())
            await self._clock.sleep_until(state.next_s)
            delay_s = min(AGAIN_MAX_S, delay_s * 2)
            state.why = state.next_s = None

    def _make_safe(self, name: str, on_death: Callable[[], None]) -> None:
        try:
            on_death()
        except Exception:  # a bug in that must not keep the task from being started again
            log.exception("what depends on the arbiter's task %s was not made safe", name)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the arbiter's %s failed: %s", task.get_coro(), error, exc_info=error)
            self._tell(f"arbiter: {type(error).__name__}: {error}")


def _is_ending() -> bool:
    """Whether this task itself is being cancelled, and not only something that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
