"""GPU locks between processes: real files, real processes, the kernel's rules."""

from __future__ import annotations

import os
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from dynamo_local.errors import GpuError
from dynamo_local.serve.gpu_locks import GpuLocks, LockHolder, lock_folder

A, B = "GPU-aaaaaaaa-0000", "GPU-bbbbbbbb-0000"
MINE = LockHolder("dynamo", "dynamo_VllmWorker", os.getpid())
THEIRS = LockHolder("other", "other_VllmWorker", 4711)

SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where this test's locks live."""
    return tmp_path / "run" / "gpus"


@pytest.fixture
def locks(folder: Path) -> Iterator[GpuLocks]:
    """This process's locks."""
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
    """The error says which namespace, watcher and pid have it."""
    locks.acquire([A], MINE)
    message = rf"GPU {A} is held by namespace dynamo \(watcher dynamo_VllmWorker, arbiter pid {os.getpid()}\)"
    with pytest.raises(GpuError, match=message):
        rivals.acquire([A], THEIRS)
    assert rivals.holder_of(A) == MINE
    assert rivals.elsewhere([A, B]) == {A: str(MINE)}
    assert locks.elsewhere([A, B]) == {}


def test_all_or_none(locks: GpuLocks, rivals: GpuLocks) -> None:
    """If one of two is taken, the other is not kept."""
    locks.acquire([B], MINE)
    with pytest.raises(GpuError, match=B):
        rivals.acquire([A, B], THEIRS)
    assert rivals.held() == frozenset()
    assert locks.holder_of(A) is None


def test_one_process_cannot_give_one_gpu_to_two_workers(locks: GpuLocks) -> None:
    """Never one GPU with two holders, not even under one arbiter."""
    locks.acquire([A], MINE)
    with pytest.raises(GpuError, match="reserved by this process already"):
        locks.acquire([B, A], LockHolder("dynamo", "dynamo_VllmWorker_1", os.getpid()))
    with pytest.raises(GpuError, match="reserved by this process already"):
        locks.acquire([B, B], MINE)
    assert locks.held() == {A}


def test_a_released_gpu_can_be_reserved_by_another(locks: GpuLocks, rivals: GpuLocks) -> None:
    """Without a worker on it the lock ends with the release; the holder's text is replaced."""
    locks.acquire([A], LockHolder("a-namespace-with-a-long-name", "w" * 60, 1))
    locks.release([A, B])
    rivals.acquire([A], THEIRS)
    assert locks.holder_of(A) == THEIRS


def test_the_lock_is_the_one_that_filelock_takes(locks: GpuLocks, folder: Path) -> None:
    """`FileLock` and ours exclude each other on one file, both ways."""
    locks.acquire([A], MINE)
    with pytest.raises(Timeout):
        FileLock(folder / f"{A}.lock").acquire(timeout=0)
    other = FileLock(folder / f"{B}.lock")
    with other, pytest.raises(GpuError, match=f"GPU {B} is held by"):
        locks.acquire([B], MINE)


def test_the_lock_outlives_the_release_while_the_worker_lives(locks: GpuLocks, rivals: GpuLocks) -> None:
    """The worker inherited the descriptor: releasing early frees nothing until its process is gone."""
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
    """Another worker, spawned while the lock is held, does not keep somebody else's GPU."""
    locks.acquire([A], MINE)
    sibling = subprocess.Popen(SLEEPER, close_fds=False)
    try:
        locks.release([A])
        rivals.acquire([A], THEIRS)
    finally:
        sibling.kill()
        sibling.wait(5)


def test_descriptors_are_inheritable_inside_the_block_only(locks: GpuLocks, rivals: GpuLocks) -> None:
    """For a spawner with `close_fds=False` (circus): the child of the block holds the lock."""
    locks.acquire([A], MINE)
    with locks.inheritable([A]) as fds:
        worker = subprocess.Popen(SLEEPER, close_fds=False)
        assert [os.get_inheritable(fd) for fd in fds] == [True]
    try:
        assert [os.get_inheritable(fd) for fd in fds] == [False]
        locks.release([A])
        assert rivals.holder_of(A) == MINE
    finally:
        worker.kill()
        worker.wait(5)
    assert rivals.holder_of(A) is None


ARBITER = """
import os, subprocess, sys
from pathlib import Path
from dynamo_local.serve.gpu_locks import GpuLocks, LockHolder
locks = GpuLocks(Path(sys.argv[1]))
locks.acquire([sys.argv[2]], LockHolder("dynamo", "dynamo_VllmWorker", os.getpid()))
code = "import signal; signal.pause()"
fds = locks.fds_for([sys.argv[2]])
worker = subprocess.Popen([sys.executable, "-c", code], pass_fds=fds, stdout=subprocess.DEVNULL)
print(worker.pid, flush=True)
worker.wait()
"""


def test_the_lock_outlives_a_killed_arbiter_and_ends_with_the_worker(folder: Path, rivals: GpuLocks) -> None:
    """lesson 4: `kill -9` of the arbiter leaves its worker's GPU reserved; the worker's death frees it."""
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
    """0700 and 0600, also if the folder was there with a wider mode; files stay after the release."""
    folder.mkdir(parents=True, mode=0o755)
    locks.acquire([A], MINE)
    locks.release([A])
    path = folder / f"{A}.lock"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_of_somebody_else_is_refused(locks: GpuLocks, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner is checked before anything is written there."""
    folder.mkdir(parents=True)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(GpuError, match="not to you; set XDG_RUNTIME_DIR"):
        locks.acquire([A], MINE)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("uuid", ["../../etc/passwd", "", "GPU/1", "a.b"])
def test_a_uuid_cannot_lead_out_of_the_folder(locks: GpuLocks, uuid: str) -> None:
    """Names come from the statefile too: only letters, digits and dashes."""
    with pytest.raises(GpuError, match="is not a GPU UUID"):
        locks.acquire([uuid], MINE)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """The error says which folder and why."""
    (tmp_path / "file").write_text("")
    with pytest.raises(GpuError, match=r"file/gpus, cannot be used: (File exists|Not a directory)"):
        GpuLocks(tmp_path / "file" / "gpus").acquire([A], MINE)


def test_where_the_locks_live() -> None:
    """An own variable first, then the runtime folder, then one per user; simulated devices apart."""
    assert lock_folder({"DYN_GPU_LOCK_DIR": "/x", "XDG_RUNTIME_DIR": "/run/user/1"}) == Path("/x")
    assert lock_folder({"XDG_RUNTIME_DIR": "/run/user/1"}) == Path("/run/user/1/dynamo/gpus")
    assert lock_folder({"TMPDIR": "/t"}) == Path(f"/t/dynamo-{os.getuid()}/gpus")
    assert lock_folder({"DYN_GPU_LOCK_DIR": "/x"}, simulated_for="ns") == Path("/x/sim-ns")


def test_two_namespaces_may_both_have_all_simulated_devices(tmp_path: Path) -> None:
    """Simulated devices are private to a namespace, though their UUIDs are the same."""
    env = {"DYN_GPU_LOCK_DIR": str(tmp_path / "gpus")}
    one, two = (GpuLocks(lock_folder(env, simulated_for=name)) for name in ("one", "two"))
    try:
        one.acquire([A], MINE)
        two.acquire([A], THEIRS)
        assert (one.held(), two.held()) == ({A}, {A})
    finally:
        one.close()
        two.close()
