"""How long the planner holds the arbiter's event loop: nothing else runs there between two of its awaits.

Each step, from one await to the next, is timed on two clocks: the wall's, which on a busy host counts what others had
of the core meanwhile, and the thread's CPU, which does not. Only measured: nothing is decided by it.
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Longest:
    """Of all steps so far, in seconds. The two may be of different steps."""

    elapsed_s: float = 0.0
    cpu_s: float = 0.0


class Holding:
    """The longest step of each kind of work since this was made. The clocks give seconds of any origin."""

    def __init__(
        self, elapsed_s: Callable[[], float] = time.perf_counter, cpu_s: Callable[[], float] = time.thread_time
    ) -> None:
        self._elapsed_s, self._cpu_s = elapsed_s, cpu_s
        self._longest: dict[str, Longest] = {}

    @property
    def longest(self) -> Mapping[str, Longest]:
        """By the name of the work; what has not run yet is absent."""
        return dict(self._longest)

    @types.coroutine
    def timed(self, what: str, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """As `await work`, with each of its steps timed. What it raises, and a cancellation, pass through."""
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
