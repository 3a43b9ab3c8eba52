"""An arbiter that was killed, and children of dead workers: nothing outlives its run, the next start is clean."""

from __future__ import annotations

import os
import re
import signal

import pytest

from dynamo_local.system.processes import is_alive
from tests.drivers.served import Served, until

pytestmark = pytest.mark.infra

WITH_CHILD = """\
import subprocess
from dynamo_local.sdk import async_on_start, endpoint, service


@service(name="Parent")
class Parent:
    @async_on_start
    async def start(self):
        self.child = subprocess.Popen(["sleep", "1000"])
        print("child", self.child.pid, flush=True)
"""


@pytest.mark.full
def test_children_of_a_dead_worker_die_with_it() -> None:
    with Served(target=("app:Parent",), files={"app.py": WITH_CHILD}, frontend=False).started() as served:
        child = _child(served)
        os.kill(served.pids()["Parent"], signal.SIGKILL)
        until(lambda: not is_alive(child), 5.0)
        until(lambda: served.states()["Parent"] == "ready", what=served.states)
        assert _child(served) != child


@pytest.mark.full
def test_orphans_of_a_killed_arbiter_are_swept_at_the_next_start() -> None:
    with Served(target=("app:Parent",), files={"app.py": WITH_CHILD}, frontend=False).started() as served:
        child = _child(served)
        os.kill(served.status()["arbiter_pid"], signal.SIGKILL)
        until(lambda: not served.pids_of("serve_dynamo"), 5.0)
        served.start()
        assert not is_alive(child)


def _child(served: Served) -> int:
    return int(re.findall(r"child (\d+)", served.log("Parent"))[-1])
