"""The decision log as an observer of the planner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from dynamo_local.core.notes import Over, Tell, Trouble
from dynamo_local.errors import StateError
from dynamo_local.planner.records import decision_log as decisions
from dynamo_local.planner.records.decision_log import DecisionLog
from dynamo_local.planner.records.record import DecisionRecord
from dynamo_local.planner.values.pull import Pull

UNWRITABLE = Trouble("the log of decisions")


class LoggedDecisions:
    """Writes the decision log, in a thread, in order. Made in a thread: it reads the last number."""

    def __init__(
        self,
        make: Callable[[Path], DecisionLog],
        path: Path,
        background: Callable[[Coroutine[Any, Any, Any]], None],
        tell: Tell,
    ) -> None:
        self.log = make(path)
        self._background = background
        self._tell = tell
        self._waiting: list[dict[str, Any]] = []
        self._writing = asyncio.Lock()
        self._unwritten = False

    def on_pull(self, pull: Pull) -> None:
        """Of no interest here."""

    def on_decision(self, record: DecisionRecord) -> None:
        """Write it soon."""
        self._waiting.append(decisions.as_json(record))
        self._background(self._write())

    async def written(self) -> None:
        """Returns when all decisions so far were written, or could not be."""
        if self._waiting or self._writing.locked():
            await self._write()

    async def _write(self) -> None:
        async with self._writing:
            waiting, self._waiting = self._waiting, []
            try:
                await asyncio.to_thread(self.log.append, waiting)
            except StateError as error:
                self._tell(str(error), UNWRITABLE)
                self._unwritten = True
            else:
                if self._unwritten:
                    self._tell("the log of decisions is written again", Over(UNWRITABLE.name))
                self._unwritten = False
