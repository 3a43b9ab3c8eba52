"""Waiting for a condition on the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dynamo_local.control.shell import Shell
from dynamo_local.core.life.fleet import Fleet, Worker
from dynamo_local.core.life.instructions import Transition
from dynamo_local.core.life.stimuli import Stimulus


class Waiting:
    """Lets tasks wait for a condition on the fleet: an `Observer` of the shell."""

    def __init__(self, shell: Shell, now_s: Callable[[], float]) -> None:
        self._shell = shell
        self._now_s = now_s
        self._changed = asyncio.Event()
        shell.observers.append(self)

    def on_stimulus(self, stimulus: Stimulus) -> None:
        """See `control.effects.Observer`."""

    def on_transition(self, worker: Worker, transition: Transition) -> None:
        """Nothing to do: `on_fleet` is called after it."""

    def on_fleet(self, fleet: Fleet) -> None:
        """Wake everybody who waits."""
        self.notify()

    def notify(self) -> None:
        """Wake everybody who waits, though the fleet is the same."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, done: Callable[[], bool], deadline_s: float | None = None) -> bool:
        """Wait for a condition on the fleet. True when it holds, False at the deadline (of the arbiter's clock)."""
        while not done():
            changed = self._changed
            left_s = None if deadline_s is None else deadline_s - self._now_s()
            if left_s is not None and left_s <= 0:
                return False
            try:
                # Not wait_for: before Python 3.12 it swallows a cancellation that comes together with the change.
                async with asyncio.timeout(left_s):
                    await changed.wait()
            except TimeoutError:
                return done()
        return True
