"""`subprocess.Popen` for one program, without that import, for which the command would wait: it takes half as long as
the interpreter's start (`python -m benchmarks dynamo_1x` shows each millisecond). Light."""

from __future__ import annotations

import os
import signal
import sys

from dynamo_local.system.prctl import set_parent_death_signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

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
    with open(read_fd, "rb") as told:
        failed = told.read()
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
