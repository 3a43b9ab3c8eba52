"""Has the planner's reports written, in the arbiter: at an interval, and when the planner stops.

A process of its own writes each report from the decision log. So the arbiter's event loop is never blocked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from dynamo_local.clock import Clock
from dynamo_local.planner.forecasting.process import INHERITED
from dynamo_local.planner.records.decision_log import decision_log_path
from dynamo_local.system.prctl import asking_to_die
from dynamo_local.system.processes import wait_exit

log = logging.getLogger(__name__)

LOOK_EVERY_S = 30.0
"""How often to check whether a report is due. The interval may change at any time."""
DEADLINE_S = 120.0
LEAVING_S = 25.0
"""How long a run that leaves waits for its last report, after its workers are gone. Kubernetes gives a pod 30 s."""
COMMAND = (sys.executable, "-P", "-m", "dynamo_local.arbiter.planner_report_page")


def reports_folder(logs: Path) -> Path:
    """Where the reports of the namespace with that log folder are."""
    return logs / "planner_reports"


class ReportSchedule:
    """Between `began` and `ended` a planner runs. `hours` is the present interval (None: no reports).

    `written` returns when the decisions so far are in the log.
    """

    def __init__(
        self,
        namespace: str,
        logs: Path,
        clock: Clock,
        *,
        hours: Callable[[], float | None],
        written: Callable[[], Coroutine[Any, Any, None]],
        tell: Callable[[str], None],
    ) -> None:
        self.folder = reports_folder(logs)
        self._namespace = namespace
        self._log = decision_log_path(logs)
        self._clock = clock
        self._hours = hours
        self._written = written
        self._tell = tell
        self._since_s: float | None = None
        self._writing = asyncio.Lock()
        self._last: set[asyncio.Task[None]] = set()

    def began(self) -> None:
        """The planner starts. The next report covers the time from now on."""
        self._since_s = self._clock.wall_s()

    def ended(self) -> None:
        """The planner has stopped. Write a report in the background."""
        since_s, self._since_s = self._since_s, None
        if since_s is not None and self._hours() is not None:
            task = asyncio.ensure_future(self._write(since_s))
            self._last.add(task)
            task.add_done_callback(self._last.discard)

    async def run(self) -> None:
        """Write each report that is due, until cancelled."""
        while True:
            await self._clock.sleep_until(self._clock.now_s() + LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Write a report if one is due."""
        hours, now_s, since_s = self._hours(), self._clock.wall_s(), self._since_s
        if hours is not None and since_s is not None and now_s - since_s >= hours * 3600:
            self._since_s = now_s
            await self._write(since_s)

    async def close(self) -> None:
        """Wait for the last report, at most `LEAVING_S`."""
        if not self._last:
            return
        _, late = await asyncio.wait(self._last, timeout=LEAVING_S)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
            self._tell("the planner's last report was not written in time; `dynamo planner report` makes it")

    async def _write(self, since_s: float) -> None:
        async with self._writing:
            await self._written()
            arguments = (str(self._log), str(self.folder), repr(since_s), self._namespace)
            try:
                why = await _run((*COMMAND, *arguments), DEADLINE_S)
            except OSError as error:
                why = f"its process cannot be started: {error.strerror or error}"
        if why:
            log.warning("the planner's report was not written: %s", why)
            self._tell(f"the planner's report was not written: {why}")


async def _run(command: tuple[str, ...], deadline_s: float) -> str:
    """Run the command. Returns its last line on standard error, empty on success."""
    inherited = {name: value for name, value in os.environ.items() if any(fnmatchcase(name, it) for it in INHERITED)}
    with subprocess.Popen(  # noqa: ASYNC220 - waited for by its pidfd; see `forecasting.process`
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**inherited, **asking_to_die(signal.SIGKILL, os.getpid())},
        start_new_session=True,
    ) as process:
        try:
            if not await wait_exit(process.pid, deadline_s):
                return f"it took longer than {deadline_s:g} s"
            said = process.stderr.read().decode("utf-8", "replace") if process.stderr is not None else ""
            return said.strip().splitlines()[-1] if said.strip() else ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
