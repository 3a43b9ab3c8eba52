"""One kernel lock per GPU: two namespaces on one host never take one device.

A lock is `flock` on `<folder>/<uuid>.lock`, the same lock that `filelock.FileLock` takes, so either excludes the
other. It is our own code for one reason: flock belongs to the *open file*, which a child process inherits. A worker
with the descriptor holds the lock together with the arbiter, and after it. If the arbiter is killed, the GPU stays
reserved until the worker and its children are gone. Then the kernel frees the lock. `filelock` breaks this twice: it
closes its descriptors in forked children, and its release unlocks the open file for all. So `release` only closes our
descriptor.

The file's text names the holder. The text is valid only while the lock is held. Files are never removed: otherwise two
processes could lock two files of one name. systemd-tmpfiles, which ages /var/tmp, skips a locked folder. So the folder
has a shared lock, too.

The lock folder is the same for every shell of a user: no variable moves it. `$DYN_GPU_LOCK_DIR` is one *more* place,
for containers that share GPUs but not /var/tmp. A lock is taken in all places or in none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dynamo_local.errors import GpuError

_UUID = re.compile(r"[A-Za-z0-9-]+")
_PROBE_GRACE_S = 0.05
_PROBE_POLL_S = 0.005
"""`holder_of` takes a lock (shared) for microseconds; an `acquire` waits this long so as not to fail on that."""
_HOLDER_BYTES_MAX = 4096
TEMPORARY = (Path("/var/tmp"), Path("/tmp"))
"""No logout empties them, and no variable says where they are."""


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The holder of a GPU: the worker's watcher, and the arbiter that took the lock for it."""

    namespace: str
    watcher_name: str
    pid: int

    def __str__(self) -> str:
        return f"namespace {self.namespace} (watcher {self.watcher_name}, arbiter pid {self.pid})"


def lock_folders(env: Mapping[str, str], *, temporary: Sequence[Path] = TEMPORARY) -> tuple[Path, ...]:
    """Where the locks of the host's GPUs are. Not created here. Simulated devices' locks are in their run's folder.

    `<temporary>/dynamo-<uid>/gpus`, in the first of `temporary` that may be written; `$DYN_GPU_LOCK_DIR`, if it is set;
    and where earlier releases, which may still run, have made a folder.
    """
    uid = os.getuid()
    usual = next((folder for folder in temporary if os.access(folder, os.W_OK | os.X_OK)), None)
    folders = [] if usual is None else [usual / f"dynamo-{uid}" / "gpus"]
    if env.get("DYN_GPU_LOCK_DIR"):
        folders.append(Path(env["DYN_GPU_LOCK_DIR"]))
    earlier = [Path(f"/run/user/{uid}/dynamo/gpus"), Path(tempfile.gettempdir()) / f"dynamo-{uid}" / "gpus"]
    if env.get("XDG_RUNTIME_DIR"):
        earlier.append(Path(env["XDG_RUNTIME_DIR"]) / "dynamo" / "gpus")
    folders += [folder for folder in earlier if folder.is_dir() and folder.stat().st_uid == uid]
    if not folders:
        raise GpuError(
            f"there is no place for GPU locks: none of {', '.join(map(str, temporary))} may be written; "
            "set DYN_GPU_LOCK_DIR"
        )
    return tuple(dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders))


class GpuLocked(GpuError):
    """Somebody else on this host holds the lock of a device: its `uuid`, and `who`."""

    def __init__(self, uuid: str, who: str) -> None:
        super().__init__(f"GPU {uuid} is held by {who}; choose others with --gpus, or wait")
        self.uuid = uuid
        self.who = who


class GpuLocks:
    """The locks that this process holds for its workers. For one thread; only `holders_of` may be called from others.

    `folders`: a lock is one file in each of them. An event loop uses `try_acquire`: some system calls on small files,
    and no wait.
    """

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._fds: dict[str, tuple[int, ...]] = {}
        self._folder_fds: dict[Path, int] = {}

    def acquire(self, uuids: Iterable[str], holder: LockHolder) -> None:
        """Reserve all of them or none. Raises `GpuError` naming who holds one. Waits 50 ms at most.

        A worker that outlived `release` still counts: its GPU is refused until its process is gone.
        """
        self._fds |= self._lock_all(self._not_ours(uuids, holder), holder)

    def try_acquire(self, uuids: Iterable[str], holder: LockHolder) -> None:
        """`acquire` for an event loop: it never waits, not even for a `holder_of` in another process."""
        self._fds |= self._lock_all(self._not_ours(uuids, holder), holder, grace_s=0.0)

    def take_free(self, uuids: Iterable[str], holder: LockHolder) -> None:
        """Lock these in every place where nobody does: for a worker of an earlier release, which holds its own lock in
        fewer places than we look. Without waiting."""
        for uuid in self._not_ours(uuids, holder):
            taken: list[int] = []
            for path in self._paths(uuid):
                with contextlib.suppress(GpuLocked):
                    taken.append(self._lock(uuid, path, holder, 0.0))
            if taken:
                self._fds[uuid] = tuple(taken)

    def _not_ours(self, uuids: Iterable[str], holder: LockHolder) -> list[str]:
        wanted = list(uuids)
        for uuid in wanted:
            if uuid in self._fds or wanted.count(uuid) > 1:
                raise GpuError(f"GPU {uuid} is reserved by this process already; {holder} cannot have it too")
        return wanted

    def _lock_all(
        self, uuids: Iterable[str], holder: LockHolder, grace_s: float = _PROBE_GRACE_S
    ) -> dict[str, tuple[int, ...]]:
        """Descriptors by UUID, all or none."""
        taken: dict[str, tuple[int, ...]] = {}
        try:
            for uuid in uuids:
                for path in self._paths(uuid):
                    taken[uuid] = (*taken.get(uuid, ()), self._lock(uuid, path, holder, grace_s))
        except BaseException:
            _close_all(taken.values())
            raise
        return taken

    def release(self, uuids: Iterable[str]) -> None:
        """Let go of our part. The lock ends when no worker has the descriptor any more. Unknown ones are ignored."""
        for uuid in uuids:
            _close_all([self._fds.pop(uuid, ())])

    def close(self) -> None:
        """Release all."""
        self.release(list(self._fds))
        _close_all([tuple(self._folder_fds.values())])
        self._folder_fds.clear()

    def held(self) -> frozenset[str]:
        """UUIDs that this process reserved."""
        return frozenset(self._fds)

    def fds_for(self, uuids: Iterable[str]) -> list[int]:
        """Descriptors to hand to the worker: `subprocess.Popen(..., pass_fds=locks.fds_for(uuids))`."""
        locks = [fd for uuid in uuids for fd in self._fds[uuid]]
        return [*locks, *self._folder_fds.values()] if locks else []

    def holder_of(self, uuid: str) -> LockHolder | None:
        """The holder of the lock, in any process. None: free."""
        return next(filter(None, map(_holder_in, self._paths(uuid))), None)

    def holders_of(self, uuids: Iterable[str]) -> dict[str, str]:
        """UUID -> holder in words, this process included. Reads files. Any thread may call it."""
        holders = {uuid: self.holder_of(uuid) for uuid in uuids}
        return {uuid: str(holder) for uuid, holder in holders.items() if holder is not None}

    def elsewhere(self, uuids: Iterable[str]) -> dict[str, str]:
        """For the ledger: those that are locked, though not by this process, and by whom."""
        return self.holders_of(uuid for uuid in uuids if uuid not in self._fds)

    def _paths(self, uuid: str) -> list[Path]:
        if not _UUID.fullmatch(uuid):
            raise GpuError(f"{uuid!r} is not a GPU UUID")
        return [folder / f"{uuid}.lock" for folder in self._folders]

    def _lock(self, uuid: str, path: Path, holder: LockHolder, grace_s: float) -> int:
        self._prepare_folders()
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise GpuError(f"the GPU lock {path} cannot be opened: {error.strerror}") from error
        try:
            deadline_s = time.monotonic() + grace_s
            while not _try_lock(fd, fcntl.LOCK_EX):
                if time.monotonic() >= deadline_s:
                    raise GpuLocked(uuid, str(_read_holder(fd)))
                time.sleep(_PROBE_POLL_S)
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(asdict(holder)).encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _prepare_folders(self) -> None:
        """Make them, and hold them against those who clear temporary folders of what looks unused."""
        for folder in self._folders:
            held = self._folder_fds.get(folder)
            if held is not None and os.fstat(held).st_nlink:
                continue
            if held is not None:  # somebody has removed it all the same
                os.close(self._folder_fds.pop(folder))
            _prepare(folder)
            self._folder_fds[folder] = fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _try_lock(fd, fcntl.LOCK_SH)


def _close_all(fds: Iterable[Iterable[int]]) -> None:
    for each in fds:
        for fd in each:
            os.close(fd)


def _holder_in(path: Path) -> LockHolder | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return None if _try_lock(fd, fcntl.LOCK_SH) else _read_holder(fd)
    finally:
        os.close(fd)


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
        return LockHolder("(unknown)", "(unknown)", 0)  # locked by a plain FileLock, or its text is not written yet


def _prepare(folder: Path) -> None:
    """Make the folder private to the user; refuse one that somebody else owns, or could swap under us."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for path, owners in ((folder, {os.getuid()}), (folder.parent, {os.getuid(), 0})):
            owner = path.stat().st_uid
            if owner not in owners:
                raise GpuError(f"{path} belongs to uid {owner}, not to you; have its owner remove it")
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise GpuError(f"the folder for GPU locks, {folder}, cannot be used: {error.strerror}") from error
