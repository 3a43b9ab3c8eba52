"""The arbiter itself stands still (Ctrl-Z, a suspended laptop, a paused VM) and goes on: nobody is to blame for it.

Seen: SIGSTOP for 42 seconds, and with the SIGCONT the Frontend "has answered nothing for 42 s" and was killed with all
its streams. The wall clock's jumps have a unit test (`unit/succession/test_clock_jumps.py`): setting the clock of the
host that runs the tests is out of the question.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import psutil
import pytest

from tests.drivers.scaled import events, kinds, load
from tests.drivers.served import Served, auntil

pytestmark = pytest.mark.infra

JUDGED = ("HealthFailed", "ProcessExited", "StartDeadlinePassed", "DrainDeadlinePassed", "LeaseRevoked")


async def _stands_still(pid: int, for_s: float) -> None:
    """SIGSTOP, and SIGCONT when that much time has passed: time is what this is about."""
    os.kill(pid, signal.SIGSTOP)
    try:
        await auntil(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        await asyncio.sleep(for_s)
    finally:
        os.kill(pid, signal.SIGCONT)


async def _stopped_under_load(served: Served, for_s: float, *, judged_within_s: float) -> None:
    """Stop the arbiter while streams run; afterwards every worker is as it was, and not one stream was cut.

    A worker that were held to be hung would be ended within `judged_within_s` after the arbiter goes on.
    """
    served.start()
    pids, arbiter = served.pids(), served.status()["arbiter_pid"]
    async with load(served, streams=4) as found:
        before = found.right
        await _stands_still(arbiter, for_s)
        during = found.right - before
        began_s = time.monotonic()
        await auntil(lambda: time.monotonic() - began_s > judged_within_s or served.pids() != pids)
        await found.more(20)
    found.check()
    assert during, "the load went on without the arbiter"

    status = served.status()
    assert served.pids() == pids
    assert status["arbiter_pid"] == arbiter
    assert [(row["state"], row["restarts"], row["reason"]) for row in status["workers"]] == [
        ("ready", 0, None) for _ in pids
    ]
    assert not set(kinds(events(served))) & set(JUDGED)
    assert all(task["deaths"] == 0 for task in status["tasks"]), status["tasks"]


@pytest.mark.timeout(150)
async def test_an_arbiter_that_was_stopped_for_longer_than_the_bound_of_health_blames_nobody() -> None:
    with Served("--Host.health-bound-s=2") as served:
        await _stopped_under_load(served, 5.0, judged_within_s=4.0)
