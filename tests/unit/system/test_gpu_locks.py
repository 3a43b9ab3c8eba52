"""GPU locks between processes: real files, real processes, the kernel's rules."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from dynamo_local.errors import GpuError
from dynamo_local.system.gpu_locks import GpuLocked, GpuLocks, LockHolder, lock_folders
from dynamo_local.system.paths import Paths

A, B = "GPU-aaaaaaaa-0000", "GPU-bbbbbbbb-0000"
MINE = LockHolder("dynamo", "dynamo_VllmWorker", os.getpid())
THEIRS = LockHolder("other", "other_VllmWorker", 4711)

SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "gpus"


@pytest.fixture
def locks(folder: Path) -> Iterator[GpuLocks]:
    locks = GpuLocks(folder)
    yield locks
    locks.close()


@pytest.fixture
def rivals(folder: Path) -> Iterator[GpuLocks]:
    """Another namespace's: flock belongs to the open file, so a second object is a rival in one process too."""
    locks = GpuLocks(folder)
    yield locks
    locks.close()


def gone(pid: int) -> None:
    """Wait until the process `pid`, which need not be our child, is gone; at most five seconds."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ready, _, _ = select.select([fd], [], [], 5.0)
        assert ready, f"process {pid} is still there"
    finally:
        os.close(fd)


def test_a_reserved_gpu_is_refused_with_its_holder(locks: GpuLocks, rivals: GpuLocks) -> None:
    locks.acquire([A], MINE)
    message = rf"GPU {A} is held by namespace dynamo \(watcher dynamo_VllmWorker, arbiter pid {os.getpid()}\)"
    with pytest.raises(GpuError, match=message):
        rivals.acquire([A], THEIRS)
    assert rivals.holder_of(A) == MINE
    assert rivals.elsewhere([A, B]) == {A: str(MINE)}
    assert locks.elsewhere([A, B]) == {}


def test_all_or_none(locks: GpuLocks, rivals: GpuLocks) -> None:
    locks.acquire([B], MINE)
    with pytest.raises(GpuError, match=B):
        rivals.acquire([A, B], THEIRS)
    assert rivals.held() == frozenset()
    assert locks.holder_of(A) is None


@pytest.mark.timing
def test_an_event_loop_is_refused_at_once(locks: GpuLocks, rivals: GpuLocks) -> None:
    locks.acquire([B], MINE)
    before_s = time.monotonic()
    for _ in range(40):
        with pytest.raises(GpuLocked) as refused:
            rivals.try_acquire([A, B], THEIRS)
        assert (refused.value.uuid, refused.value.who) == (B, str(MINE))
    assert time.monotonic() - before_s < 40 * 0.05 / 2, "each of them waited its grace"
    assert rivals.held() == frozenset()
    rivals.try_acquire([A], THEIRS)
    assert rivals.held() == {A}


def test_one_process_cannot_give_one_gpu_to_two_workers(locks: GpuLocks) -> None:
    locks.acquire([A], MINE)
    with pytest.raises(GpuError, match="reserved by this process already"):
        locks.acquire([B, A], LockHolder("dynamo", "dynamo_VllmWorker_1", os.getpid()))
    with pytest.raises(GpuError, match="reserved by this process already"):
        locks.acquire([B, B], MINE)
    assert locks.held() == {A}


def test_a_released_gpu_can_be_reserved_by_another(locks: GpuLocks, rivals: GpuLocks) -> None:
    locks.acquire([A], LockHolder("a-namespace-with-a-long-name", "w" * 60, 1))
    locks.release([A, B])
    rivals.acquire([A], THEIRS)
    assert locks.holder_of(A) == THEIRS


def test_the_lock_is_the_one_that_filelock_takes(locks: GpuLocks, folder: Path) -> None:
    locks.acquire([A], MINE)
    with pytest.raises(Timeout):
        FileLock(folder / f"{A}.lock").acquire(timeout=0)
    other = FileLock(folder / f"{B}.lock")
    with other, pytest.raises(GpuError, match=f"GPU {B} is held by"):
        locks.acquire([B], MINE)


def test_the_lock_outlives_the_release_while_the_worker_lives(locks: GpuLocks, rivals: GpuLocks) -> None:
    locks.acquire([A], MINE)
    worker = subprocess.Popen(SLEEPER, pass_fds=locks.fds_for([A]))
    try:
        locks.release([A])
        assert rivals.holder_of(A) == MINE
        for contender in (rivals, locks):
            with pytest.raises(GpuError, match="is held by namespace dynamo"):
                contender.acquire([A], THEIRS)
    finally:
        worker.kill()
        worker.wait(5)
    rivals.acquire([A], THEIRS)


def test_a_child_without_the_descriptor_does_not_hold_the_lock(locks: GpuLocks, rivals: GpuLocks) -> None:
    locks.acquire([A], MINE)
    sibling = subprocess.Popen(SLEEPER, close_fds=False)
    try:
        locks.release([A])
        rivals.acquire([A], THEIRS)
    finally:
        sibling.kill()
        sibling.wait(5)


ARBITER = """
import os, subprocess, sys
from pathlib import Path
from dynamo_local.system.gpu_locks import GpuLocks, LockHolder
locks = GpuLocks(Path(sys.argv[1]))
locks.acquire([sys.argv[2]], LockHolder("dynamo", "dynamo_VllmWorker", os.getpid()))
code = "import signal; signal.pause()"
fds = locks.fds_for([sys.argv[2]])
worker = subprocess.Popen([sys.executable, "-c", code], pass_fds=fds, stdout=subprocess.DEVNULL)
print(worker.pid, flush=True)
worker.wait()
"""


def test_the_lock_outlives_a_killed_arbiter_and_ends_with_the_worker(folder: Path, rivals: GpuLocks) -> None:
    """`kill -9` of the arbiter leaves its worker's GPU reserved; the worker's death frees it."""
    arbiter = subprocess.Popen([sys.executable, "-c", ARBITER, str(folder), A], stdout=subprocess.PIPE, text=True)
    worker_pid = None
    try:
        assert arbiter.stdout is not None
        worker_pid = int(arbiter.stdout.readline())
        arbiter.send_signal(signal.SIGKILL)
        arbiter.wait(5)
        with pytest.raises(GpuError, match=f"arbiter pid {arbiter.pid}"):
            rivals.acquire([A], THEIRS)
    finally:
        if worker_pid is not None:
            os.kill(worker_pid, signal.SIGKILL)
        arbiter.kill()
        arbiter.communicate(timeout=5)
    gone(worker_pid)
    rivals.acquire([A], THEIRS)


def test_the_folder_and_files_are_private(locks: GpuLocks, folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o755)
    locks.acquire([A], MINE)
    locks.release([A])
    path = folder / f"{A}.lock"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_of_somebody_else_is_refused(locks: GpuLocks, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(GpuError, match="not to you"):
        locks.acquire([A], MINE)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("uuid", ["../../etc/passwd", "", "GPU/1", "a.b"])
def test_a_uuid_cannot_lead_out_of_the_folder(locks: GpuLocks, uuid: str) -> None:
    with pytest.raises(GpuError, match="is not a GPU UUID"):
        locks.acquire([uuid], MINE)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GpuError, match=r"file/gpus, cannot be used: (File exists|Not a directory)"):
        GpuLocks(tmp_path / "file" / "gpus").acquire([A], MINE)


def test_the_locks_of_a_host_lie_in_one_place_for_every_shell(tmp_path: Path) -> None:
    """A run that is started by cron must not take the GPU of one that was started in a terminal."""
    one = tmp_path / f"dynamo-{os.getuid()}" / "gpus"
    for env in ({}, {"XDG_RUNTIME_DIR": "/nowhere/1"}, {"HOME": "/nowhere/2", "TMPDIR": "/nowhere/3"}):
        assert lock_folders(env, temporary=[tmp_path])[0] == one
    assert lock_folders({"DYN_GPU_LOCK_DIR": "/x"}, temporary=[tmp_path])[:2] == (one, Path("/x"))


def test_a_host_without_a_place_for_locks_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(GpuError, match="set DYN_GPU_LOCK_DIR"):
        lock_folders({"TMPDIR": "/nowhere"}, temporary=[tmp_path / "none"])
    assert lock_folders({"DYN_GPU_LOCK_DIR": "/x"}, temporary=[tmp_path / "none"])[0] == Path("/x")


def test_where_earlier_releases_lock_is_locked_too(tmp_path: Path) -> None:
    earlier = tmp_path / "run" / "dynamo" / "gpus"
    earlier.mkdir(parents=True)
    env = {"XDG_RUNTIME_DIR": str(tmp_path / "run")}
    assert earlier in lock_folders(env, temporary=[tmp_path])


def test_a_lock_is_taken_in_all_places_or_in_none(tmp_path: Path) -> None:
    """Whoever looks in one of them sees it; where one is taken, nothing is left locked in the others."""
    here, there = tmp_path / "here", tmp_path / "there"
    both, one, other = GpuLocks(here, there), GpuLocks(here), GpuLocks(there)
    try:
        both.acquire([A], MINE)
        assert (one.holder_of(A), other.holder_of(A)) == (MINE, MINE)
        both.release([A])
        other.acquire([A], THEIRS)
        with pytest.raises(GpuError, match="is held by"):
            both.acquire([A], MINE)
        assert one.holder_of(A) is None
        assert both.holder_of(A) == THEIRS
    finally:
        for locks in (both, one, other):
            locks.close()


def test_a_worker_of_an_earlier_release_gets_the_locks_that_it_lacks(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    arbiter, worker, rival = GpuLocks(new, old), GpuLocks(old), GpuLocks(new)
    try:
        worker.acquire([A], MINE)
        arbiter.take_free([A], MINE)
        with pytest.raises(GpuError):
            rival.acquire([A], THEIRS)
        worker.release([A])
        arbiter.release([A])
        rival.acquire([A], THEIRS)
    finally:
        for locks in (arbiter, worker, rival):
            locks.close()


def test_the_folder_is_locked_against_those_who_clear_temporary_files(locks: GpuLocks, folder: Path) -> None:
    locks.acquire([A], MINE)
    fd = os.open(folder, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locks.close()
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)


def test_a_folder_that_was_removed_is_made_again(locks: GpuLocks, rivals: GpuLocks, folder: Path) -> None:
    locks.acquire([A], MINE)
    shutil.rmtree(folder)
    locks.acquire([B], MINE)
    assert rivals.holder_of(B) == MINE


def test_two_namespaces_may_both_have_all_simulated_devices(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    one, two = (GpuLocks(Paths.of(name, env).simulated_gpu_locks) for name in ("one", "two"))
    try:
        one.acquire([A], MINE)
        two.acquire([A], THEIRS)
        assert (one.held(), two.held()) == ({A}, {A})
    finally:
        one.close()
        two.close()
