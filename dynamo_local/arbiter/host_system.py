"""The operating system, as the arbiter's effects need it. `System` is what is needed, `HostSystem` the real one."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from dynamo_local.errors import DynamoError
from dynamo_local.system.executors import SWEEP_DEADLINE_S, SWEEPS
from dynamo_local.system.log_files import set_aside
from dynamo_local.system.processes import aend_session, send_signal, start_time_s

log = logging.getLogger(__name__)


class System(Protocol):
    """Requests to the operating system. The simulation has its own."""

    def send_signal(self, pid: int, signum: int) -> None:
        """To the process; one that is gone is no error."""
        ...

    async def end_session(self, pid: int) -> None:
        """SIGKILL to everything in the process's session."""
        ...

    def start_time_s(self, pid: int) -> float | None:
        """Seconds since boot at which the process began; None where it is gone."""
        ...

    async def end_children(self, name: str) -> list[str]:
        """End what a worker's processes left behind outside of their sessions; says what that was."""
        ...

    def put_log_aside(self, path: Path) -> None:
        """Rotate an old log file away. Blocks."""
        ...


class HostSystem:
    """`sweep` ends what a worker that is gone left behind, and says what that was; `sweep_all` does so for all workers,
    when all are gone. Both block."""

    def __init__(self, sweep: Callable[[str], list[str]], sweep_all: Callable[[], list[str]]) -> None:
        self._sweep = sweep
        self._sweep_all = sweep_all

    def send_signal(self, pid: int, signum: int) -> None:
        send_signal(pid, signal.Signals(signum))

    async def end_session(self, pid: int) -> None:
        await aend_session(pid)

    def start_time_s(self, pid: int) -> float | None:
        return start_time_s(pid)

    async def end_children(self, name: str) -> list[str]:
        return await SWEEPS.run(
            lambda: self._sweep(name), SWEEP_DEADLINE_S, what=f"looking for what {name} left behind"
        )

    async def end_what_is_left(self) -> None:
        """End what any worker left behind outside of its session. A process that cannot be ended is logged."""
        try:
            ended = await SWEEPS.run(self._sweep_all, SWEEP_DEADLINE_S, what="looking for what workers left behind")
        except DynamoError as error:
            log.warning("something of a worker that is gone stays behind: %s", error)
            return
        for what in ended:
            log.warning("left behind by a worker that is gone, ended: %s", what)

    def put_log_aside(self, path: Path) -> None:
        set_aside(path)
