"""Two of Linux's `prctl` calls, for death signals and for orphans. Imports little: runners import it first of all."""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping

_DEATH_SIGNAL = "DYN_DEATH_SIGNAL"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)  # loaded before any fork: a preexec function must not import


def set_parent_death_signal(signum: int, parent: int | None = None) -> None:
    """Ask the kernel to send us `signum` when the parent dies. Its thread counts: fork from the main thread.

    A `parent` that died before the kernel was asked would never be noticed: then we end at once.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signum)


def asking_to_die(signum: int, parent: int) -> dict[str, str]:
    """Variables for the environment of an entry point that calls `die_as_asked`."""
    return {_DEATH_SIGNAL: f"{signum:d}:{parent}"}


def die_as_asked(environ: MutableMapping[str, str]) -> None:
    """Ask for the death signal named by `asking_to_die` in our environment, if any: entry points call this first."""
    value = environ.pop(_DEATH_SIGNAL, None)
    if value is not None:
        signum, parent = value.split(":")
        set_parent_death_signal(int(signum), int(parent))


def become_subreaper() -> None:
    """Adopt the orphans of crashed workers instead of leaving them to pid 1."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
