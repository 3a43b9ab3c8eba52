"""A killed engine leaves nothing in /dev/shm: the helper that clears it up is not killed with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dynamo_local.serve.processes import is_resource_tracker, kill_session, session_members
from tests.fakes.served import until

ENGINE = """
import sys
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
sys.stdin.read()
"""


def test_shared_memory_of_a_killed_session_is_removed() -> None:
    """Everything in the session is killed at once, and the memory goes with the last that shared it."""
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
        assert engine.pid in kill_session(engine.pid)
        engine.wait()
        until(lambda: not memory.exists(), 10.0, what=lambda: list(session_members(engine.pid)))
        until(lambda: not list(session_members(engine.pid)), 10.0)
