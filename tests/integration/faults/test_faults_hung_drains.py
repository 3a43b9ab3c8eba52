"""A worker that hangs while it leaves, and drains that an arbiter's death interrupts: each comes to its end.

Found by the chaos test (seed 1): called back from a drain, hung, its arbiter killed, a worker kept its GPU for ever.
"""

from __future__ import annotations

import os
import signal

import pytest

from dynamo_local.system.processes import is_alive
from tests.drivers.scaled import command, events, kinds
from tests.drivers.served import Served, until
from tests.integration.faults.conftest import ECHO

pytestmark = pytest.mark.infra

PATIENCE_S = 40.0
KEEP = ("--on-arbiter-death", "keep")


def _served(*words: str) -> Served:
    """Three workers, none of which may be silent for more than three seconds."""
    counts = ("--gpus", "sim:4", "--Echo.ServiceArgs.workers=3", "--Host.health-bound-s=3")
    return Served(*counts, *words, target=("echo:Echo",), files={"echo.py": ECHO}, frontend=False)


def test_a_worker_that_hangs_while_it_drains_is_ended_long_before_its_deadline() -> None:
    with _served().started() as served:
        pid = served.pids()["Echo_2"]
        os.kill(pid, signal.SIGSTOP)
        command(served, "drain", name="dynamo_Echo_2")
        until(lambda: "Echo_2" not in served.states(), PATIENCE_S, what=served.status)
        last = events(served, "Echo_2")
        notes = served.status()["notes"]
        assert not is_alive(pid)
        assert kinds(last)[-2:] == ["DrainDeadlinePassed", "ProcessExited"]
        assert last[-2]["stimulus_id"] == "health", "not its deadline"
        assert any("is hung" in note["text"] for note in notes), notes
        assert served.states() == {"Echo": "ready", "Echo_1": "ready"}


@pytest.mark.full
def test_what_an_adoption_finds_leaving_keeps_its_deadline_and_one_called_back_in_vain_is_not_forgotten() -> None:
    with _served(*KEEP, "--Host.health-bound-s=12").started() as served:
        pids = served.pids()
        for name in ("Echo_1", "Echo_2"):
            os.kill(pids[name], signal.SIGSTOP)
            command(served, "drain", name=f"dynamo_{name}")
        command(served, "scale", component="Echo", target="+1")  # takes back the drain that began last
        before = served.worker("Echo_1")["drain"]["deadline_s"]
        served.kill_arbiter()
        served.adopt()
        after = served.worker("Echo_1")["drain"]
        until(lambda: served.states().get("Echo_1", "gone") == "gone", PATIENCE_S, what=served.status)
        until(lambda: served.states() == {"Echo": "ready", "Echo_2": "ready"}, PATIENCE_S, what=served.status)
        assert before <= 600.0
        assert after is None or after["deadline_s"] < before
        assert served.pids()["Echo"] == pids["Echo"]
        assert not is_alive(pids["Echo_1"])
        assert served.pids()["Echo_2"] != pids["Echo_2"]
