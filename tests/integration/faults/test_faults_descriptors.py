"""The arbiter runs out of file descriptors: it says so, spawns nothing for a while, and goes on when it has some again.

libzmq ends its process when it has none for a connection: the arbiter, and with it all workers, died of the
`dynamo status` that asked what was wrong.
"""

from __future__ import annotations

import os
import signal

import pytest

from dynamo_local.state.store import load
from dynamo_local.system.descriptors import SPARE
from dynamo_local.system.processes import is_alive
from tests.drivers.host_facts import descriptors
from tests.drivers.scaled import events, kinds
from tests.drivers.served import Served, until
from tests.integration.faults.conftest import ECHO
from tests.tools.host_faults import no_descriptors

pytestmark = pytest.mark.infra

PATIENCE_S = 40.0


@pytest.mark.full
def test_an_arbiter_without_descriptors_says_so_and_starts_workers_once_it_has_some() -> None:
    words = ("--gpus", "sim:8", "--Echo.ServiceArgs.workers=3")
    with Served(*words, target=("echo:Echo",), files={"echo.py": ECHO}, frontend=False).started() as served:
        pids, arbiter = served.pids(), served.status()["arbiter_pid"]
        with no_descriptors(served):
            assert served.cli_status()["state"] == "ready"
            os.kill(pids["Echo_1"], signal.SIGKILL)
            until(lambda: not is_alive(pids["Echo_1"]), PATIENCE_S)
        until(lambda: served.pids().get("Echo_1") not in (None, pids["Echo_1"]), PATIENCE_S, what=served.status)
        until(lambda: set(served.states().values()) == {"ready"}, PATIENCE_S, what=served.status)
        until(lambda: len(descriptors(arbiter)) > SPARE, PATIENCE_S)  # it has its own again
        status = served.status()
        told = [line for line in served.log("arbiter").splitlines() if "file descriptors" in line]
        assert ["left (the limit" in told[0], "there are file descriptors again" in told[-1]] == [True, True], told
        assert [note for note in status["notes"] if "descriptors" in note["text"]] == []
        assert status["arbiter_pid"] == arbiter
        assert not list(served.paths.statefile.parent.glob("*.corrupt-*")), "what cannot be read now is not broken"
        assert set(load(served.paths.statefile).components) == {f"dynamo_{name}" for name in pids}
        assert {name: pid for name, pid in served.pids().items() if name != "Echo_1"} == {
            name: pid for name, pid in pids.items() if name != "Echo_1"
        }
        assert "HealthFailed" not in kinds(events(served))
        assert all(task["running"] for task in status["tasks"]), status["tasks"]
