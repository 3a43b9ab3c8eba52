"""The command as a child of its runner, in the runner's session; the kernel kills it when the runner dies.

So whoever ends the worker's session (arbiter, guardian, the next `dynamo serve`) ends the command with it.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess

from dynamo_local.errors import ConfigError
from dynamo_local.prctl import set_parent_death_signal
from dynamo_local.runtimes.ports import Ports
from dynamo_local.runtimes.values import Launch

KILLED_GONE_S = 5.0


class Child:
    """A started command. `ports` are held for as long as this lives."""

    def __init__(self, launch: Launch, ports: Ports | None = None) -> None:
        """Start it. Raises `ConfigError` where there is no such program, `OSError` where it cannot be run."""
        self.launch = launch
        self._ports = ports
        program = shutil.which(launch.argv[0], path=launch.env.get("PATH"))
        if program is None:
            raise ConfigError(
                f"no program {launch.argv[0]!r} is found; install it, or give its whole path in `command`"
            )
        self._process = subprocess.Popen(  # its output goes where ours does: the worker's log file
            [program, *launch.argv[1:]],
            env=dict(launch.env),
            stdin=subprocess.DEVNULL,
            preexec_fn=functools.partial(set_parent_death_signal, signal.SIGKILL, os.getpid()),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """It has ended, as far as the kernel knows."""
        return self._process.poll() is not None

    async def wait(self) -> int:
        """Its exit code, once it has ended; negative: a signal."""
        await self._gone(None)
        return self._process.wait()

    async def end(self, grace_s: float) -> int | None:
        """SIGTERM, and SIGKILL after the grace (seconds); its exit code, None if it is stuck in the kernel.

        Only the command itself is signalled: what it started is its own to end, and past that the session's end.
        """
        for signum, timeout_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILLED_GONE_S)):
            self._process.send_signal(signum)  # does nothing where it has ended
            if await self._gone(timeout_s):
                return self._process.wait()
        return None

    async def _gone(self, timeout_s: float | None) -> bool:
        from dynamo_local.serve.processes import wait_exit  # asyncio: not before the command runs

        return self.ended or await wait_exit(self.pid, timeout_s)


_current: Child | None = None


def current_child() -> Child:
    """The one that this process was started for; RuntimeError elsewhere (a bug in the caller)."""
    if _current is None:
        raise RuntimeError("no Child: a CommandWorker runs in `serve.serve_command`; tests call set_current_child()")
    return _current


def set_current_child(child: Child | None) -> None:
    """Called once by the entry point, and by tests (None takes it away)."""
    global _current
    _current = child
