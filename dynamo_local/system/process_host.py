"""The interface to the program that runs the processes: our own arbiter, or a stock circusd."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

ExitCallback = Callable[[str, int, int | None], None]
"""`(watcher name, pid, exit code)`; a negative code is a signal, None where nobody could collect it."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to start: in a session of its own, writing to its own log file.

    `death_signal`: sent by the kernel when the host dies. None: the process outlives the host. `asks_itself`: the
    program is our own entry point and asks the kernel for that signal (`prctl.die_as_asked`), so the host can use
    a cheap vfork.
    `inherited_fds`: stay open in the process (the GPU locks).
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    log_file: Path
    graceful_timeout_s: float = 30.0
    death_signal: int | None = None
    asks_itself: bool = False
    inherited_fds: tuple[int, ...] = field(default=())


class ProcessHost(Protocol):
    """Starts processes as watchers. The supervisor ends them, by pid and session."""

    async def start_process(self, spec: ProcessSpec) -> int:
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

    def adopt_process(self, spec: ProcessSpec, pid: int) -> None:
        """A watcher for a process that runs already; `ProcessLookupError` if it has just ended."""
        ...


class PrewarmingHost(ProcessHost, Protocol):
    """A host in which a process may become another one: it was started as a spare, and is a worker now."""

    def rename_process(self, name: str, spec: ProcessSpec) -> int:
        """The process of the watcher `name` is that of `spec.name` from now on, whose exit is told by that name; its
        pid. `ProcessLookupError` where it has ended, KeyError where there is a watcher of the new name."""
        ...
