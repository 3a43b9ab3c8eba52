"""A killed engine leaves nothing in /dev/shm: the helper that clears it up is not killed with it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dynamo_local.arbiter import leftovers
from dynamo_local.system.processes import is_resource_tracker, kill_session, session_members
from tests.drivers.host_facts import UNIT_TESTS_MEMORY
from tests.drivers.served import until

ENGINE = f"""
import os, sys
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory("{UNIT_TESTS_MEMORY}%d" % os.getpid(), create=True, size=4096)
print(memory.name, flush=True)
sys.stdin.read()
"""


@contextmanager
def running_engine() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """In a session of its own, with its helper, and the memory that it shares."""
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    ) as engine:
        assert engine.stdout is not None
        memory = Path("/dev/shm") / engine.stdout.readline().strip()
        assert memory.exists()
        # Between its fork and its exec the helper looks like the engine.
        until(lambda: any(is_resource_tracker(pid) for pid in session_members(engine.pid)), 10.0)
        yield engine, memory


def test_shared_memory_of_a_killed_session_is_removed() -> None:
    with running_engine() as (engine, memory):
        assert engine.pid in kill_session(engine.pid)
        engine.wait()
        until(lambda: not memory.exists(), 10.0, what=lambda: list(session_members(engine.pid)))
        until(lambda: not list(session_members(engine.pid)), 10.0)


def test_the_helper_has_its_moment_from_when_the_others_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "TRACKER_GRACE_S", 0.5)
    with running_engine() as (engine, memory), subprocess.Popen(["sleep", "60"]) as late:
        began_s = time.monotonic()

        def find() -> dict[int, str]:
            found = {pid: "helper" for pid in session_members(engine.pid) if is_resource_tracker(pid)}
            if time.monotonic() < began_s + 1.5:
                return {**found, late.pid: "late"}  # not reaped: it counts as long as it is found
            engine.kill()
            engine.wait()
            return found

        leftovers.end(find)
        assert not memory.exists()
