"""Tests what the operating system refuses becomes one line with what to do, and never a traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
import zmq

from dynamo_local.errors import EXIT_FAILED, DynamoError
from dynamo_local.system.host_errors import DESCRIPTORS_MIN, HostRefused, host_refused, telling


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOMEM, "free some memory"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "file-nr"),
        (errno.ENOSPC, "df -h"),
        (errno.EROFS, "XDG_RUNTIME_DIR, DYN_LOCAL_STATE_DIR, DYN_LOCAL_LOG_DIR"),
        (errno.EACCES, "choose folders that you may write"),
        (errno.EAGAIN, "ulimit -u"),
    ],
)
def test_it_says_what_to_what_and_what_to_do(number: int, advice: str) -> None:
    error = host_refused(OSError(number, os.strerror(number), "/some/file"), "the graph cannot be started")
    assert isinstance(error, HostRefused)
    assert error.exit_code == EXIT_FAILED
    assert str(error).startswith(f"the graph cannot be started: /some/file: {os.strerror(number)}; ")
    assert advice in str(error)
    assert "\n" not in str(error)


def test_other_kinds_of_the_same() -> None:
    assert "Cannot allocate memory; free some" in str(host_refused(MemoryError()))
    for text in ("x.so: failed to map segment from shared object", "Importing zmq.backend.cython failed with "):
        assert "address space (`ulimit -v`)" in str(host_refused(ImportError(text)))
    assert "processes or of address space" in str(host_refused(RuntimeError("can't start new thread")))
    assert "Read-only file system; choose" in str(host_refused(zmq.ZMQError(errno.EROFS)))
    assert str(host_refused(OSError("x is not an executable file"))) == "x is not an executable file"


@pytest.mark.parametrize(
    ("error", "starved"),
    [(MemoryError(), True), (RuntimeError("can't start new thread"), True), (OSError(errno.ENOSPC, "full"), False)],
)
def test_a_lack_of_memory_or_threads_is_told_from_others(error: Exception, starved: bool) -> None:
    refused = host_refused(error)
    assert refused is not None
    assert refused.starved == starved


def test_a_bug_stays_a_bug() -> None:
    assert host_refused(ValueError("a bug")) is None
    assert host_refused(ImportError("No module named 'x'")) is None
    assert host_refused(RuntimeError("a bug")) is None


def test_a_block_tells_what_it_was_about() -> None:
    with (
        pytest.raises(HostRefused, match=r"the arbiter cannot log: /sys/x: .*; choose folders"),
        telling("the arbiter cannot log"),
    ):
        raise OSError(errno.EROFS, "Read-only file system", "/sys/x")
    with pytest.raises(DynamoError, match=r"^ours$"), telling("x"):
        raise DynamoError("ours")


LIMITED = """
import resource, sys
from dynamo_local.system.host_errors import ensure_descriptors
soft, hard = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    ensure_descriptors()
except Exception as error:
    print(type(error).__name__, error)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [
        (64, 1024, "(1024, 1024)"),
        (1024, 4500, "(4096, 4500)"),
        (4200, 4500, "(4200, 4500)"),
        (24, 24, f"HostRefused only 24 files may be open at a time, {DESCRIPTORS_MIN} are needed"),
    ],
)
def test_a_small_limit_of_open_files_is_raised_or_refused(soft: int, hard: int, then: str) -> None:
    words = [sys.executable, "-c", LIMITED, str(soft), str(hard)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.startswith(then)
