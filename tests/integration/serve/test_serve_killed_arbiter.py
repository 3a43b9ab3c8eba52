"""An arbiter that was killed, and children of dead workers: nothing outlives its run, the next start is clean."""

from __future__ import annotations

import os
import re
import signal

import pytest

from dynamo_local.errors import EXIT_NOT_RUNNING
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


# --- the arbiter ---------------------------------------------------------------------------------


@pytest.mark.full
def test_a_killed_arbiter_takes_its_workers_along_and_the_next_start_is_clean() -> None:
    """lesson 3, lesson 10: no orphan keeps a GPU; `status` says so; `serve` clears what was left and starts anew."""
    with Served() as served:
        served.start()
        first = served.status()
        pids = [first["arbiter_pid"], *served.pids().values(), served.server_pid("etcd"), served.server_pid("nats")]
        os.kill(first["arbiter_pid"], signal.SIGKILL)
        until(lambda: not [pid for pid in pids if pid and is_alive(pid)], 5.0, what=served.processes)

        status, down = served.cli("status"), served.cli("down")
        assert (status.returncode, down.returncode) == (EXIT_NOT_RUNNING, EXIT_NOT_RUNNING)
        # Its guardian may have cleared it away by then.
        assert "has been killed" in status.stderr or "nothing runs" in status.stderr, status.stderr
        assert "dynamo serve" in status.stderr

        served.start()
        assert served.status()["run_id"] != first["run_id"]
        assert set(served.states().values()) == {"ready"}
        leases = {worker["lease"] for worker in served.status()["workers"]}
        assert {key.rpartition(":")[2] for key in served.keys("dynamo/components/")} <= leases


@pytest.mark.full
def test_children_of_a_dead_worker_die_with_it() -> None:
    """lesson 3: what an engine started in its session does not outlive its worker (it would keep VRAM)."""
    with Served(target=("app:Parent",), files={"app.py": WITH_CHILD}, frontend=False) as served:
        served.start()
        child = _child(served)
        os.kill(served.pids()["Parent"], signal.SIGKILL)

        until(lambda: not is_alive(child), 5.0)
        until(lambda: served.states()["Parent"] == "ready", what=served.states)
        assert _child(served) != child


@pytest.mark.full
def test_orphans_of_a_killed_arbiter_are_swept_at_the_next_start() -> None:
    """lesson 3: a worker's own child survives `kill -9` of the arbiter; the environment marks it as ours."""
    with Served(target=("app:Parent",), files={"app.py": WITH_CHILD}, frontend=False) as served:
        served.start()
        child = _child(served)
        os.kill(served.status()["arbiter_pid"], signal.SIGKILL)
        until(lambda: not served.pids_of("serve_dynamo"), 5.0)

        served.start()

        assert not is_alive(child)


def _child(served: Served) -> int:
    """The pid that the last of the Parents wrote."""
    return int(re.findall(r"child (\d+)", served.log("Parent"))[-1])
