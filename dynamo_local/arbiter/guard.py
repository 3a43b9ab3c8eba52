"""The arbiter's side of the guardian: starts it before all others, restarts it if it dies, ends it last.

It gets no parent-death signal, because it must outlive the arbiter. Its environment is smaller than a worker's: the
path of our code, its credentials for etcd, and the marks by which a successor finds it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from dynamo_local.arbiter import leftovers
from dynamo_local.arbiter.deployment import Deployment
from dynamo_local.arbiter.guarded_run import OPTION, GuardedRun
from dynamo_local.arbiter.marks import GUARDIAN, guardian_marks, marks
from dynamo_local.clock import Clock
from dynamo_local.core.types import watcher_name
from dynamo_local.system.executors import SWEEP_DEADLINE_S, SWEEPS
from dynamo_local.system.paths import Paths
from dynamo_local.system.process_host import LaunchSpec, ProcessHost
from dynamo_local.system.processes import aend_session, start_time_s, wait_exit

log = logging.getLogger(__name__)

ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_*", "LD_LIBRARY_PATH", "PYTHON*", "ETCD_AUTH_*")
RESTART_DELAY_S = 0.2
RESTART_DELAY_MAX_S = 10.0
RAN_WELL_S = 30.0
STOP_TIMEOUT_S = 2.0
PLUGIN = "dynamo_local.circus_plugins.guardian.Guardian"


class GuardianProcess:
    """Keeps one guardian running. `files` names the files that it restores after the arbiter's death."""

    def __init__(
        self, host: ProcessHost, deployment: Deployment, clock: Clock, files: Callable[[], Iterable[Path]]
    ) -> None:
        paths, run_id, keep = deployment.paths, deployment.run_id, deployment.settings.keep_on_arbiter_death
        self.name = watcher_name(paths.namespace, GUARDIAN)
        self.log_file = paths.log_file(self.name)
        self.keep = keep
        self.pid: int | None = None
        self._host = host
        self._paths = paths
        self._run_id = run_id
        self._clock = clock
        self._files = files
        self._leaving = False
        self._started_s = 0.0
        self._delay_s = RESTART_DELAY_S
        self._restarting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it. OSError says why that failed."""
        self._started_s = self._clock.now_s()
        file = self._write_guarded_run()
        self.pid = await self._host.start_process(
            LaunchSpec(
                self.name,
                guardian_argv(self._paths, file),
                env={
                    **environment(os.environ),
                    **marks(self._paths.namespace, self._paths.statefile, self._run_id, self.name),
                    **guardian_marks(os.getpid()),
                },
                cwd="/",  # a folder without the user's Python modules
                log_file=self.log_file,
                graceful_timeout_s=STOP_TIMEOUT_S,
                death_signal=None,
            )
        )

    def _write_guarded_run(self) -> Path:
        file = self._paths.runtime / "guardian.json"
        guarded = GuardedRun(
            namespace=self._paths.namespace,
            run_id=self._run_id,
            runtime=str(self._paths.runtime),
            statefile=str(self._paths.statefile),
            logs=str(self._paths.logs),
            arbiter_pid=os.getpid(),
            arbiter_start_time=start_time_s(os.getpid()) or 0.0,
            keep=self.keep,
            files=tuple(str(path) for path in self._files()),
        )
        guarded.write(file)
        return file

    async def replace(self) -> None:
        """Start our guardian, then end that of the dead predecessor. So the workers are watched all the time."""
        await self.start()
        before = partial(leftovers.end_guardian, self._paths, but=self.pid)
        await SWEEPS.run(before, SWEEP_DEADLINE_S, what="ending the previous guardian")

    def exited(self, name: str, code: int | None) -> bool:
        """The host calls this for every exit. Returns False if it was not the guardian's. A dead one is restarted."""
        if name != self.name:
            return False
        self.pid = None
        if not self._leaving:
            ran_well = self._clock.now_s() - self._started_s > RAN_WELL_S
            delay_s = RESTART_DELAY_S if ran_well else self._delay_s
            self._delay_s = min(delay_s * 2, RESTART_DELAY_MAX_S)
            log.warning("the guardian ended (exit code %s); starting it again in %.1f s", code, delay_s)
            self._restarting = asyncio.ensure_future(self._restart(delay_s))
        return True

    async def _restart(self, delay_s: float) -> None:
        while not self._leaving:
            await self._clock.sleep_until(self._clock.now_s() + delay_s)
            try:
                await self.start()
            except OSError as error:
                log.error("the guardian cannot be started, trying again in %g s: %s", RESTART_DELAY_MAX_S, error)
                delay_s = RESTART_DELAY_MAX_S
            else:
                return

    async def stop(self) -> None:
        """End it. From now on nobody acts if the arbiter dies."""
        self._leaving = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait({self._restarting})
        pid = self.pid
        if pid is not None:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                log.debug("the guardian was gone before us")
            await wait_exit(pid, STOP_TIMEOUT_S)
            await aend_session(pid)
            await wait_exit(pid, STOP_TIMEOUT_S)
            await asyncio.sleep(0)  # let the host's own exit callback reap it
        await self._host.forget(self.name)


def guardian_argv(paths: Paths, guarded_file: Path) -> tuple[str, ...]:
    """circus's command for a plugin, as `circus.plugins.get_plugin_cmd` builds it, without a shell's quoting."""
    return (
        sys.executable,
        "-c",
        "from circus import plugins;plugins.main()",
        "--endpoint",
        paths.circus_endpoint,
        "--pubsub",
        f"ipc://{paths.events_socket}",
        "--log-level",
        "info",
        "--config",
        f"{OPTION}:{guarded_file}",
        PLUGIN,
    )


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of our environment that a guardian gets."""
    return {name: value for name, value in environ.items() if any(fnmatchcase(name, known) for known in ENVIRONMENT)}
