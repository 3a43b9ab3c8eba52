"""A `ProcessHost` without processes: what would run is a name and a pid, and ends when a test says so."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Mapping

from dynamo_local.system.process_host import ExitCallback, ProcessSpec


class FakeProcessHost:
    """`endings` says of a command with which code it ends by itself (absent: it runs). `watchers` is what is listed.

    `refuse_next` holds errors that the next starts raise.
    """

    def __init__(self, endings: Mapping[tuple[str, ...], int | None] | None = None, *, first_pid: int = 1000) -> None:
        self.on_exit: ExitCallback | None = None
        self.watchers: dict[str, int | None] = {}
        self.specs: dict[int, ProcessSpec] = {}
        self.refuse_next: list[OSError] = []
        self._endings = dict(endings or {})
        self._pids = itertools.count(first_pid)

    async def start_process(self, spec: ProcessSpec) -> int:
        await asyncio.sleep(0)  # as a real one: others run meanwhile
        if self.refuse_next:
            raise self.refuse_next.pop(0)
        if not os.access(spec.argv[0], os.X_OK):
            raise OSError(f"{spec.argv[0]} is not an executable file")
        if self.watchers.get(spec.name) is not None:
            raise KeyError(spec.name)
        pid = next(self._pids)
        self.watchers[spec.name] = pid
        self.specs[pid] = spec
        if (code := self._endings.get(spec.argv)) is not None:
            asyncio.get_running_loop().call_soon(self.end, pid, code)
        return pid

    async def forget(self, name: str) -> None:
        self.watchers.pop(name, None)

    def runs(self, pid: int) -> bool:
        """The process has been started and has not ended."""
        return pid in self.specs

    def signal(self, pid: int, signum: signal.Signals) -> None:
        """As `os.kill`: every signal ends it."""
        if pid not in self.specs:
            raise ProcessLookupError(pid)
        self.end(pid, -signum)

    def end(self, pid: int, code: int | None) -> None:
        """The process ends with this code."""
        name = self.specs.pop(pid).name
        if self.watchers.get(name) == pid:
            self.watchers[name] = None
        if self.on_exit is not None:
            self.on_exit(name, pid, code)
