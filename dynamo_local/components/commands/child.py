"""The command as a child of its runner, in the runner's session; the kernel kills it when the runner dies.

So whoever ends the worker's session (arbiter, guardian, the next `dynamo serve`) ends the command with it.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from dynamo_local.components.commands.ports import Ports
from dynamo_local.errors import ConfigError
from dynamo_local.system.host_leases import is_free
from dynamo_local.system.prctl import set_parent_death_signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

    from dynamo_local.components.commands.launch import Launch


# --- `subprocess.Popen` for one program, without the import of `subprocess`. That import takes half as long as the
# interpreter's start, and the command would wait for it (`python -m benchmarks dynamo_1x`).

IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores: the program would inherit that, but expects the defaults, as from a shell."""
STDIN, STDERR = 0, 2


def spawn(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a program, found in its own environment's PATH; its pid. The kernel kills it when we die.

    It has no input; its output goes where ours does; of our other files it inherits none. Call it from the main
    thread, before there are others: the child runs Python until it becomes the program. Raises `OSError` where it
    cannot be run, and collects the child then.
    """
    read_fd, write_fd = os.pipe()  # the kernel closes it when the program runs; otherwise it carries the errno
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(argv, env, write_fd, parent)
    os.close(write_fd)
    with open(read_fd, "rb") as errors:
        failed = errors.read()
    if failed:
        os.waitpid(pid, 0)
        raise OSError(int(failed), os.strerror(int(failed)), argv[0])
    return pid


def _become(argv: Sequence[str], env: Mapping[str, str], write_fd: int, parent: int) -> NoReturn:
    """Run the program, or end. The parent's code must not run here: no exception, exit handler or flushed buffer."""
    try:
        set_parent_death_signal(signal.SIGKILL, parent)
        for signum in IGNORED_BY_PYTHON:
            signal.signal(signum, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), STDIN)
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > STDERR and fd != write_fd:
                _close(fd)
        os.execvpe(argv[0], list(argv), dict(env))
    except OSError as error:
        os.write(write_fd, b"%d" % (error.errno or 0))
    except BaseException as error:  # also an argument that exec refuses, such as one with a NUL
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
    finally:
        os._exit(127)


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:  # that of the listing itself
        pass


KILLED_GONE_S = 5.0
LOOK_EVERY_S = 0.01


class Child:
    """A started command. `ports` are held for as long as this lives."""

    def __init__(self, launch: Launch, ports: Ports | None = None) -> None:
        """Start it. Raises `ConfigError` where there is no such program, `OSError` where it cannot be run."""
        self.launch = launch
        self._ports = ports
        self._code: int | None = None
        try:
            self.pid = spawn(launch.argv, launch.env)
        except FileNotFoundError:
            raise ConfigError(
                f"there is no program {launch.argv[0]!r}; install it, or give its whole path in `command`"
            ) from None

    @property
    def code(self) -> int | None:
        """Its exit code, negative: a signal; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    @property
    def ended(self) -> bool:
        """It has ended, as far as the kernel knows."""
        return self.code is not None

    def let_it_start(self, timeout_s: float) -> None:
        """Return when it listens on a port of `Launch.signs`, when it has ended, or after that time.

        Blocks; returns at once if there is no such port. Whatever we load meanwhile competes with it for the cores: on
        two cores it then took three times as long to come up.
        """
        signs = [self.launch.ports[name] for name in self.launch.signs]
        deadline_s = time.monotonic() + timeout_s
        while any(is_free(port) for port in signs) and not self.ended and time.monotonic() < deadline_s:
            time.sleep(LOOK_EVERY_S)

    async def wait(self) -> int:
        """Its exit code, once it has ended; negative: a signal."""
        while (code := self.code) is None:
            await self._gone(None)
        return code

    def terminate(self) -> None:
        """SIGTERM, to the command itself."""
        self._signal(signal.SIGTERM)

    async def end(self, grace_s: float) -> int | None:
        """SIGTERM, and SIGKILL after the grace (seconds); its exit code, None if it is stuck in the kernel.

        Only the command itself is signalled. It must end what it started; the rest ends with the session.
        """
        for signum, timeout_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILLED_GONE_S)):
            self._signal(signum)
            if await self._gone(timeout_s):
                return await self.wait()
        return None

    def _signal(self, signum: int) -> None:
        if not self.ended:  # not yet reaped, so the pid cannot be another process's
            os.kill(self.pid, signum)

    async def _gone(self, timeout_s: float | None) -> bool:
        from dynamo_local.system.processes import wait_exit  # imports asyncio: not before the command runs

        return self.ended or await wait_exit(self.pid, timeout_s)


_current: Child | None = None


def current_child() -> Child:
    """The one that this process was started for; RuntimeError elsewhere (a bug in the caller)."""
    if _current is None:
        raise RuntimeError("no Child: a CommandWorker runs in `worker.serve_command`; tests call set_current_child()")
    return _current


def set_current_child(child: Child | None) -> None:
    """Called once by the entry point, and by tests (None takes it away)."""
    global _current
    _current = child
