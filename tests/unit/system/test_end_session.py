"""A session is found and ended without the event loop standing still, and also where /proc cannot be read."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from dynamo_local.system import processes
from dynamo_local.system.processes import aend_session, is_alive, session_members, wait_exit
from tests.drivers.served import auntil

FAMILY = "import subprocess, sys; c = subprocess.Popen(['sleep', '600']); print(c.pid, flush=True); c.wait()"


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """The pids of a session's leader and of its child."""
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        child = int(leader.stdout.readline())
        yield leader.pid, child
        leader.kill()


async def test_the_whole_session_is_ended(family: tuple[int, int]) -> None:
    """A child that its leader leaves behind would keep its GPU."""
    leader, child = family
    assert set(await aend_session(leader)) == {leader, child}
    assert await wait_exit(leader, 10.0)
    await auntil(lambda: not is_alive(child), 10.0)
    assert list(session_members(leader)) == []
    assert await aend_session(leader) == []


async def test_it_looks_through_proc_in_a_thread(family: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of processes that takes tens of milliseconds, in which no command would be answered."""
    looked_in: list[int] = []

    def members(session: int) -> list[int]:
        looked_in.append(threading.get_ident())
        return []

    monkeypatch.setattr(processes, "session_members", members)
    await aend_session(family[0])
    assert looked_in
    assert threading.get_ident() not in looked_in


async def test_where_proc_hangs_leader_and_group_are_killed_all_the_same(
    family: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading the command line of a process that hangs in the kernel may hang, too: `down --now` ends what it can."""
    leader, child = family
    free = threading.Event()

    def hangs(session: int) -> list[int]:
        free.wait()
        return []

    monkeypatch.setattr(processes, "session_members", hangs)
    assert await aend_session(leader, deadline_s=0.05) == [leader]
    assert await wait_exit(leader, 10.0)
    await auntil(lambda: not is_alive(child), 10.0)
    assert "only its leader and its process group are killed" in caplog.text
    free.set()
