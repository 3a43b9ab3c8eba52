"""One kernel lock per GPU: two namespaces on one host never take one device.

A lock is `flock` on `<folder>/<uuid>.lock`, the same lock that `filelock.FileLock` takes, so either excludes the
other. It is made here by hand for one property: flock belongs to the *open file*, which a child process inherits.
A worker that was given the descriptor holds the lock with us, and after us: the arbiter may be killed, the GPU
stays reserved until the worker (and all that inherited the descriptor from it) is gone, and the kernel frees it then.
`filelock` would spoil that twice: it closes its descriptors in forked children, and its release unlocks
the open file for everybody. So `release` here only closes our descriptor.

The file's text says who holds it. It means something only while the lock is held; files are never removed,
because removing one lets two processes lock two files of one name.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from dynamo_local.errors import GpuError

_UUID = re.compile(r"[A-Za-z0-9-]+")
_PROBE_GRACE_S = 0.05
_PROBE_POLL_S = 0.005
"""Somebody who asks who holds a lock takes it (shared) for microseconds; an `acquire` must not fail on that."""
_HOLDER_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Who reserved a GPU: the worker's watcher, and the arbiter that took the lock for it."""

    namespace: str
    watcher_name: str
    pid: int

    def __str__(self) -> str:
        return f"namespace {self.namespace} (watcher {self.watcher_name}, arbiter pid {self.pid})"


def lock_folder(env: Mapping[str, str], *, simulated_for: str | None = None) -> Path:
    """`$DYN_GPU_LOCK_DIR`, else `$XDG_RUNTIME_DIR/dynamo/gpus`, else `<tmp>/dynamo-<uid>/gpus`. Not created here.

    Simulated devices belong to one namespace: `simulated_for` names it and gets a folder of its own, so that
    two namespaces may both run on `sim:8` while the code that locks is the same.
    """
    configured, runtime = env.get("DYN_GPU_LOCK_DIR"), env.get("XDG_RUNTIME_DIR")
    if configured:
        folder = Path(configured)
    elif runtime:
        folder = Path(runtime) / "dynamo" / "gpus"
    else:
        folder = Path(env.get("TMPDIR") or tempfile.gettempdir()) / f"dynamo-{os.getuid()}" / "gpus"
    return folder if simulated_for is None else folder / f"sim-{simulated_for}"


class GpuLocks:
    """The locks that this process holds for its workers. Not for use by several threads at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fds: dict[str, int] = {}

    def acquire(self, uuids: Iterable[str], holder: LockHolder) -> None:
        """Reserve all of them or none. Raises `GpuError` naming who holds one. Waits 50 ms at most.

        A worker that outlived `release` still counts: its GPU is refused until its process is gone.
        """
        taken: dict[str, int] = {}
        try:
            for uuid in uuids:
                if uuid in self._fds or uuid in taken:
                    raise GpuError(f"GPU {uuid} is reserved by this process already; {holder} cannot have it too")
                taken[uuid] = self._lock(uuid, holder)
        except BaseException:
            for fd in taken.values():
                os.close(fd)
            raise
        self._fds |= taken

    def release(self, uuids: Iterable[str]) -> None:
        """Let go of our part. The lock ends when no worker has the descriptor any more. Unknown ones are ignored."""
        for uuid in uuids:
            fd = self._fds.pop(uuid, None)
            if fd is not None:
                os.close(fd)

    def close(self) -> None:
        """Release all."""
        self.release(list(self._fds))

    def held(self) -> frozenset[str]:
        """UUIDs that this process reserved."""
        return frozenset(self._fds)

    def fds_for(self, uuids: Iterable[str]) -> list[int]:
        """Descriptors to hand to the worker: `subprocess.Popen(..., pass_fds=locks.fds_for(uuids))`."""
        return [self._fds[uuid] for uuid in uuids]

    @contextmanager
    def inheritable(self, uuids: Iterable[str]) -> Iterator[list[int]]:
        """For spawners without `pass_fds` (circus with `use_sockets`, hence `close_fds=False`): children that are
        started inside the block inherit the descriptors, later ones do not."""
        fds = self.fds_for(uuids)
        for fd in fds:
            os.set_inheritable(fd, True)
        try:
            yield fds
        finally:
            for fd in fds:
                os.set_inheritable(fd, False)

    def holder_of(self, uuid: str) -> LockHolder | None:
        """Who holds the lock now, in whatever process; None if nobody does."""
        try:
            fd = os.open(self._path(uuid), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            return None if _try_lock(fd, fcntl.LOCK_SH) else _read_holder(fd)
        finally:
            os.close(fd)

    def elsewhere(self, uuids: Iterable[str]) -> dict[str, str]:
        """For the ledger: those that are locked, though not by this process, and by whom."""
        holders = {uuid: self.holder_of(uuid) for uuid in uuids if uuid not in self._fds}
        return {uuid: str(holder) for uuid, holder in holders.items() if holder is not None}

    def _path(self, uuid: str) -> Path:
        if not _UUID.fullmatch(uuid):
            raise GpuError(f"{uuid!r} is not a GPU UUID")
        return self._folder / f"{uuid}.lock"

    def _lock(self, uuid: str, holder: LockHolder) -> int:
        path = self._path(uuid)
        _prepare(self._folder)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise GpuError(f"the GPU lock {path} cannot be opened: {error.strerror}") from error
        try:
            deadline_s = time.monotonic() + _PROBE_GRACE_S
            while not _try_lock(fd, fcntl.LOCK_EX):
                if time.monotonic() >= deadline_s:
                    raise GpuError(f"GPU {uuid} is held by {_read_holder(fd)}; choose others with --gpus, or wait")
                time.sleep(_PROBE_POLL_S)
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(asdict(holder)).encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _try_lock(fd: int, mode: int) -> bool:
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _read_holder(fd: int) -> LockHolder:
    text = os.pread(fd, _HOLDER_BYTES_MAX, 0)
    try:
        value = json.loads(text)
        return LockHolder(str(value["namespace"]), str(value["watcher_name"]), int(value["pid"]))
    except (ValueError, KeyError, TypeError):
        return LockHolder("(unknown)", "(unknown)", 0)  # locked by a plain FileLock, or just about to be described


def _prepare(folder: Path) -> None:
    """Make the folder private to the user; refuse one that somebody else owns, or could swap under us."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for path, owners in ((folder, {os.getuid()}), (folder.parent, {os.getuid(), 0})):
            owner = path.stat().st_uid
            if owner not in owners:
                raise GpuError(f"{path} belongs to uid {owner}, not to you; set XDG_RUNTIME_DIR or DYN_GPU_LOCK_DIR")
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise GpuError(f"the folder for GPU locks, {folder}, cannot be used: {error.strerror}") from error
