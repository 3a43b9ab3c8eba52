"""The arbiter's side of the page: starts its process, starts it again if it dies, ends it with the run.

The process outlives a killed arbiter, so that the page shows the gap. The arbiter that adopts the run finds it by its
socket.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from dynamo_local.arbiter.deployment import Settings
from dynamo_local.clock import Clock
from dynamo_local.system.fd_messages import peer_of
from dynamo_local.system.paths import Paths
from dynamo_local.system.processes import aend_session, wait_exit

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
DELAY_MAX_S = 60.0
STOP_TIMEOUT_S = 5.0
HEARD_S = 5.0
"""A page that has not asked for the status for so long is gone: it asks once a second."""
ENVIRONMENT = ("PATH", "HOME", "LANG", "TMPDIR", "XDG_RUNTIME_DIR", "LD_LIBRARY_PATH", "TZ")
"""Beside these it gets Python's own variables and the folders of dynamo-local: no key and no token."""


class DashboardProcess:
    """Keeps the page's process running, if the settings ask for one."""

    def __init__(self, paths: Paths, settings: Settings, clock: Clock) -> None:
        self._paths = paths
        self._settings = settings
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._next_s = 0.0
        self._delay_s = LOOK_EVERY_S
        self._url = ""
        self._heard_s = -HEARD_S

    @property
    def wanted(self) -> bool:
        """Whether there is to be one."""
        return self._settings.dashboard is not None or self._settings.history

    @property
    def link(self) -> str:
        """The command that prints a link to the page."""
        return f"dynamo dashboard --print-url -n {self._paths.namespace}"

    def heard(self, url: str) -> None:
        """A page asked for the status, and said where it is served. It may be one that a person has started."""
        self._url, self._heard_s = url, self._clock.now_s()

    def status(self) -> dict[str, Any] | None:
        """Where the page is served, without a code; None where none is."""
        if self._clock.now_s() - self._heard_s >= HEARD_S:
            return None
        return {"url": self._url, "link": self.link}

    async def run(self) -> None:
        """Look every two seconds, until cancelled."""
        while self.wanted:
            if self._process is not None and self._process.poll() is not None:
                log.warning("the page's process ended (exit code %s); its log says why", self._process.returncode)
                self._process = None
            if self._process is None and self._clock.now_s() >= self._next_s and listener(self._paths) is None:
                self._delay_s = min(self._delay_s * 2, DELAY_MAX_S)
                self._next_s = self._clock.now_s() + self._delay_s
                try:
                    self._start()
                except OSError as error:
                    log.error("the page's process cannot be started: %s", error)
            await self._clock.sleep_until(self._clock.now_s() + LOOK_EVERY_S)

    async def stop(self) -> None:
        """End it."""
        pid = listener(self._paths) if self.wanted else None
        if self._process is not None and self._process.poll() is None:
            pid = self._process.pid
        if pid is None:
            return
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            return
        if not await wait_exit(pid, STOP_TIMEOUT_S):
            await aend_session(pid)
            await wait_exit(pid, STOP_TIMEOUT_S)
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)

    def _start(self) -> None:
        settings = {
            "namespace": self._paths.namespace,
            "port": self._settings.dashboard,
            "history": True,
            "with_run": True,
        }
        own = ("PYTHON", "LC_", "DYN_LOCAL_")
        env = {name: value for name, value in os.environ.items() if name in ENVIRONMENT or name.startswith(own)}
        output = os.open(self._paths.page_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dynamo_local.dashboard", "--settings", json.dumps(settings)],
                cwd="/",
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        finally:
            os.close(output)


def listener(paths: Paths) -> int | None:
    """The pid of the page's process, by its socket; None where nobody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(paths.page_socket))
        except OSError:
            return None
        return peer_of(probe)[0]
