"""A GPU driver that answers no call any more: the graph still scales, and leaves.

It held the lock of decisions and, one call after the other, all threads that commits need.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dynamo_local.system.processes import is_alive
from tests.drivers.scaled import command
from tests.drivers.served import Served, until
from tests.fakes.arbiter.nvml_module import NVML
from tests.integration.faults.conftest import ECHO

pytestmark = pytest.mark.infra


def _served() -> Served:
    files = {"echo.py": ECHO, "pynvml.py": NVML}
    return Served("--Echo.ServiceArgs.workers=2", target=("echo:Echo",), files=files, frontend=False)


def _hang(served: Served) -> None:
    Path(served.cwd, "hang").touch()


def test_with_a_hung_driver_scale_and_down_still_work_and_status_says_so() -> None:
    with _served().started() as served:
        assert served.status()["gpu_inventory"]["stale"] is None
        _hang(served)
        assert command(served, "scale", component="Echo", target="=3")["target"] == 3
        until(lambda: list(served.states().values()) == ["ready"] * 3, what=served.status)
        for target in ("=2", "=4", "=2"):
            command(served, "scale", component="Echo", target=target)
        until(lambda: list(served.states().values()).count("ready") == 2, what=served.status)
        shown = served.cli("status").stdout
        assert "ago, decisions go by that: the GPU driver" in shown, shown
        assert served.down().returncode == 0


@pytest.mark.timing
@pytest.mark.full
def test_with_a_hung_driver_down_now_takes_seconds() -> None:
    with _served().started() as served:
        arbiter = served.status()["arbiter_pid"]
        _hang(served)
        command(served, "drain", name="dynamo_Echo_1")
        began_s = time.monotonic()
        served.down("--now")
        assert time.monotonic() - began_s < 15.0
        assert not is_alive(arbiter)
