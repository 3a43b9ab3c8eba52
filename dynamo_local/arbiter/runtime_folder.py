"""Restores the sockets and files of a live run in its runtime folder.

logind removes a user's runtime folder at the last logout, and tmpfiles or people clear temporary ones. Without this the
run would go on, but no command could reach it, and no new worker could read the token of NATS.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from dynamo_local.arbiter.servers import EmbeddedServers
from dynamo_local.clock import Clock, sleep_to_next
from dynamo_local.errors import DynamoError
from dynamo_local.system.executors import FILES
from dynamo_local.system.paths import Paths

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
FILES_DEADLINE_S = 10.0


class Listener(Protocol):
    """A part of the arbiter with sockets in the runtime folder: the process host, the exporter, the control API."""

    @property
    def socket_files(self) -> tuple[Path, ...]:
        """The present files of its sockets."""
        ...

    async def renew_sockets(self) -> None:
        """Listen again if such a file is missing. OSError or `DynamoError` gives the reason if that fails."""
        ...


class RuntimeFolder:
    """Call `run` for as long as the run lives."""

    def __init__(
        self,
        paths: Paths,
        listeners: Sequence[Listener],
        servers: EmbeddedServers,
        clock: Clock,
        tell: Callable[[str], None],
    ) -> None:
        self._paths = paths
        self._listeners = listeners
        self._servers = servers
        self._clock = clock
        self._tell = tell
        self._trouble: str | None = None

    async def run(self) -> None:
        """Restore missing files until cancelled. A failure is told once, and tried again at each look."""
        while True:
            await sleep_to_next(self._clock, LOOK_EVERY_S)
            try:
                await self.look()
                self._trouble = None
            except (DynamoError, OSError) as error:
                if self._trouble is None:
                    self._tell(f"what is missing of {self._paths.runtime} cannot be made again: {error}")
                self._trouble = str(error)

    async def look(self) -> None:
        """Look once. Raises `DynamoError` or `OSError` if something is missing and cannot be restored."""
        missing = await FILES.run(self._missing, FILES_DEADLINE_S, what=f"looking at {self._paths.runtime}")
        if not missing:
            return
        await FILES.run(self._make_files, FILES_DEADLINE_S, what=f"making {self._paths.runtime} again")
        for listener in self._listeners:
            await listener.renew_sockets()
        self._tell(f"{missing} was removed while the run goes on; made again")

    def _missing(self) -> str:
        if not self._paths.runtime.is_dir():
            return str(self._paths.runtime)
        sockets = [path for listener in self._listeners for path in listener.socket_files]
        gone = [path for path in (*sockets, *self._servers.files) if not path.exists()]
        return ", ".join(str(path) for path in gone)

    def _make_files(self) -> None:
        self._paths.prepare()
        self._servers.restore_files()
