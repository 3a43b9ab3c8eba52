"""Writes the planner's decisions and observations beside the processes' logs, in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.notes import Over, Tell, Trouble
from dynamo_local.errors import StateError
from dynamo_local.planner.records import decision_log as decisions
from dynamo_local.planner.records import ticks
from dynamo_local.planner.records.decision_log import DecisionLog, DecisionRecord
from dynamo_local.planner.records.ticks import TickLog
from dynamo_local.planner.values import Decision, Observation
from dynamo_local.system.json_lines import JsonLog

UNWRITABLE = Trouble("the log of decisions")
TICKS_UNWRITABLE = Trouble("the log of ticks")

GO_ON_EVERY = 200
"""The tick log repeats the options after this many ticks, so that each of its files has them several times."""

Background = Callable[[Coroutine[Any, Any, Any]], None]
Made = Callable[[], dict[str, Any]]
"""Makes a record, in the thread that writes it."""


class OrderedWriter:
    """Writes records of a log in a thread, in order."""

    def __init__(self, log: JsonLog, background: Background, tell: Tell, trouble: Trouble) -> None:
        self._log = log
        self._background = background
        self._tell = tell
        self._trouble = trouble
        self._waiting: list[Made] = []
        self._writing = asyncio.Lock()
        self._unwritten = False

    def put(self, record: Made) -> None:
        """Write it soon."""
        self._waiting.append(record)
        self._background(self._write())

    async def written(self) -> None:
        """Returns when all records so far were written, or could not be."""
        if self._waiting or self._writing.locked():
            await self._write()

    async def _write(self) -> None:
        async with self._writing:
            waiting, self._waiting = self._waiting, []
            try:
                await asyncio.to_thread(lambda: self._log.append([make() for make in waiting]))
            except StateError as error:
                self._tell(str(error), self._trouble)
                self._unwritten = True
            else:
                if self._unwritten:
                    self._tell(f"{self._trouble.name} is written again", Over(self._trouble.name))
                self._unwritten = False


class LoggedDecisions:
    """The decision log as an observer of the planner. Make it in a thread: it reads the last number.

    `beside` gives what a line has beside the record.
    """

    def __init__(
        self,
        make: Callable[[Path], DecisionLog],
        path: Path,
        background: Background,
        tell: Tell,
        beside: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._beside = beside
        self.log = make(path)
        self._lines = OrderedWriter(self.log, background, tell, UNWRITABLE)

    def on_observation(self, observation: Observation) -> None:
        """The tick log has the observations."""

    def on_decision(self, record: DecisionRecord) -> None:
        logged = {**decisions.as_json(record), **self._beside()}
        self._lines.put(lambda: logged)

    async def written(self) -> None:
        await self._lines.written()


class LoggedTicks:
    """A `Recorder` that writes the tick log, for `dynamo planner replay`. Make it in a thread."""

    def __init__(self, make: Callable[[Path], TickLog], path: Path, background: Background, tell: Tell) -> None:
        self._lines = OrderedWriter(make(path), background, tell, TICKS_UNWRITABLE)
        self._options: PlannerConfig | None = None
        self._since = 0

    def began(self, options: PlannerConfig, at_s: float) -> None:
        self._say(ticks.BEGAN, options, at_s)

    def changed(self, options: PlannerConfig, at_s: float) -> None:
        self._say(ticks.CHANGED, options, at_s)

    def manual(self, at_s: float) -> None:
        self._lines.put(partial(ticks.manual_record, at_s))

    def ticked(self, observation: Observation, decision: Decision | None) -> None:
        """The observation is immutable, so the thread may read it."""
        self._since += 1
        if self._since >= GO_ON_EVERY and self._options is not None:
            self._say(ticks.GOES_ON, self._options, observation.at_s)
        self._lines.put(partial(ticks.tick_record, observation, decision))

    async def written(self) -> None:
        await self._lines.written()

    def _say(self, kind: str, options: PlannerConfig, at_s: float) -> None:
        self._options, self._since = options, 0
        self._lines.put(partial(ticks.options_record, kind, options, at_s))
