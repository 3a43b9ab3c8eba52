"""The interface to the program that runs the processes: our own arbiter, or a stock circusd."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dynamo_local.core.gpus import GpuDevice

ExitCallback = Callable[[str, int, int | None], None]
"""`(watcher name, pid, exit code)`; a negative code is a signal, None where nobody could collect it."""


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """How one process is started: in a session of its own, writing to its own log file.

    `arbiter.deployment.WatcherFactory` makes a worker's, from two records that say less. `core.types.ServiceSpec` is a
    component as it was configured, secrets included. `core.fleet.fleet.Template` is the part of it that decisions
    need, with the run's defaults applied: no command and no environment, so that the fleet holds no secret.
    The statefile keeps a part of this record in a worker's entry.
    """

    #: The watcher's.
    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    log_file: Path
    #: How long it may take to leave: a worker's drain deadline.
    graceful_timeout_s: float = 30.0
    #: Sent by the kernel when the host dies. None: the process outlives the host.
    death_signal: int | None = None
    #: The program is our own entry point and asks the kernel for that signal (`prctl.die_as_asked`), so the host can
    #: use a cheap vfork.
    asks_itself: bool = False
    #: Stay open in the process (the GPU locks).
    inherited_fds: tuple[int, ...] = ()
    #: The component whose worker it is. Empty: it is no worker.
    component: str = ""
    #: A worker's devices, and how many one of its component needs.
    gpus: tuple[GpuDevice, ...] = ()
    gpus_per_worker: int = 0
    #: How long a worker may take until it is ready.
    start_deadline_s: float = 0.0


class ProcessHost(Protocol):
    """Starts processes as watchers. The supervisor ends them, by pid and session."""

    async def start_process(self, spec: LaunchSpec) -> int:
        """A watcher of that name with its one process; the pid. OSError says why it could not be started.

        A watcher of that name whose process is gone is replaced.
        """
        ...

    def rename(self, was: str, name: str, pid: int) -> None:
        """Rename the watcher `was`, whose process is `pid`, to `name`. No effect if the process has ended.

        A former watcher of that name, which has no process any more, is dropped.
        """
        ...

    async def forget(self, name: str) -> None:
        """Drop the watcher of a process that is gone; an unknown name is no error."""
        ...


class SupervisedHost(ProcessHost, Protocol):
    """A host with a control endpoint: our own arbiter, or the plugin under somebody's stock circusd.

    Its maker gives it a supervisor, which answers the commands (`arbiter.supervisor.Supervisor`), and the
    `ExitCallback` that it calls when a process ends.
    """

    def start(self) -> Awaitable[Any]:
        """Make everything ready to start processes and to answer commands."""
        ...

    @property
    def socket_files(self) -> tuple[Path, ...]:
        """The files of the sockets that it listens on."""
        ...

    async def renew_sockets(self) -> None:
        """Listen again where such a file is missing. OSError or `DynamoError` says why that cannot be."""
        ...

    async def close(self) -> None:
        """Close the endpoint. All processes must be gone."""
        ...

    def refuses_to_apply(self, file: str | None, overrides: Sequence[str]) -> Sequence[str]:
        """Why a deployment made of that file and those words would not outlive this host's next start; none, where
        it would."""
        ...


class AdoptingHost(SupervisedHost, Protocol):
    """A host that can take over processes which a killed predecessor started."""

    def adopt_process(self, spec: LaunchSpec, pid: int) -> None:
        """A watcher for a process that runs already; `ProcessLookupError` if it has just ended."""
        ...


class PrewarmingHost(ProcessHost, Protocol):
    """A host in which a process may become another one: it was started as a spare, and is a worker now."""

    def rename_process(self, name: str, spec: LaunchSpec) -> int:
        """The process of the watcher `name` is that of `spec.name` from now on, whose exit is told by that name; its
        pid. `ProcessLookupError` where it has ended, KeyError where there is a watcher of the new name."""
        ...
