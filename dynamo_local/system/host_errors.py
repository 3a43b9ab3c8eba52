"""Refusals of the host (memory, descriptors, disk space, a folder), as one line that says what to do.

`telling` adds the current action to the message where it is known. `cli.main` explains all other `OSError`s.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from dynamo_local.errors import DynamoError

DESCRIPTORS_MIN = 128
"""An arbiter without workers has some 40 files and sockets open, and needs two for each worker. libzmq ends the whole
process where it gets none."""
DESCRIPTORS_RAISED_TO = 4096
_ADVICE = {
    errno.ENOMEM: "free some memory, or raise the limit of its control group or address space (`ulimit -v`)",
    errno.EAGAIN: "raise the limit of processes or of address space (`ulimit -u`, `ulimit -v`), or end some",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "the whole host has run out of open files: see /proc/sys/fs/file-nr",
    errno.ENOSPC: "free some space (`df -h`, and `df -i` for inodes)",
    errno.EDQUOT: "your disk quota is used up (`quota`)",
    errno.EFBIG: "raise the limit of file sizes (`ulimit -f`)",
    errno.EIO: "the disk fails: see `dmesg`",
    errno.ENOEXEC: "it is not a program for this machine",
}
_UNNUMBERED = {
    "failed to map segment from shared object": errno.ENOMEM,
    "can't start new thread": errno.EAGAIN,
    "Importing zmq.backend.cython failed with ": errno.ENOMEM,
    "failed to reserve page summary memory": errno.ENOMEM,
    "SIGXFSZ": errno.EFBIG,
}
"""Refusals that Python, the dynamic linker, pyzmq, Go and a signal tell without an errno. pyzmq hides a `MemoryError`,
which has no text."""
_FOLDERS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ELOOP})
FOLDER_ADVICE = "choose folders that you may write: XDG_RUNTIME_DIR, DYN_LOCAL_STATE_DIR, DYN_LOCAL_LOG_DIR"


class HostRefused(DynamoError):
    """The operating system refused something that we cannot do without. The message says what, and what to do."""

    code = "host_refused"
    starved = False
    """There is no memory, or no thread can start."""


def host_refused(error: BaseException, what: str | None = None) -> HostRefused | None:
    """The typed form of an OS error (also pyzmq's, which has an errno, too), or of a lack of memory or threads.

    None for any other error.

    `what` says what could not be done ("the arbiter cannot start").
    """
    if isinstance(error, MemoryError):
        number: int | None = errno.ENOMEM
    elif isinstance(error, OSError) or type(error).__name__ == "ZMQError":
        number = getattr(error, "errno", None)
    else:
        number = _unnumbered(str(error)) if isinstance(error, ImportError | RuntimeError) else None
        if number is None:
            return None
    reason = os.strerror(number) if number is not None else str(error) or type(error).__name__
    files = [str(name) for name in (getattr(error, "filename", None), getattr(error, "filename2", None)) if name]
    parts = [what, *files, reason]
    advice = _ADVICE.get(number or 0) or (FOLDER_ADVICE if number in _FOLDERS else None)
    refused = HostRefused(": ".join(part for part in parts if part) + (f"; {advice}" if advice else ""))
    refused.starved = number in (errno.ENOMEM, errno.EAGAIN)
    return refused


def advice_in(text: str) -> str | None:
    """The advice for a refusal of the host that a program's log, or its end by a signal, names; None: it names none."""
    named = (number for number in _ADVICE if os.strerror(number).lower() in text.lower())
    number = _unnumbered(text) or next(named, None)
    return None if number is None else f"{os.strerror(number)}: {_ADVICE[number]}"


def _unnumbered(text: str) -> int | None:
    return next((number for said, number in _UNNUMBERED.items() if said in text), None)


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Turn an OS error raised in the block into `HostRefused`; our own errors pass unchanged."""
    try:
        yield
    except OSError as error:
        refused = host_refused(error, what)
        assert refused is not None
        raise refused from error


def ensure_descriptors() -> None:
    """Raise our limit of open files where it is small and may be raised; `HostRefused` if we could not even start.

    A worker does it, too: it inherits the arbiter's, and a frontend out of descriptors resets its clients' connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= DESCRIPTORS_RAISED_TO:
        return
    raised = DESCRIPTORS_RAISED_TO if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_RAISED_TO)
    if raised > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    if raised < DESCRIPTORS_MIN:
        raise HostRefused(
            f"only {raised} files may be open at a time, {DESCRIPTORS_MIN} are needed and two more per worker; "
            f"{_ADVICE[errno.EMFILE]}"
        )
