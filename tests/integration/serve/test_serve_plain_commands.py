"""Components that are plain processes (`runtime: none`), without a Python graph: served, scaled, started again."""

from __future__ import annotations

import os
import signal
import urllib.request

import psutil
import pytest

from dynamo_local.arbiter.marks import marked
from tests.drivers.scaled import scale
from tests.drivers.served import Served, until

pytestmark = [pytest.mark.infra, pytest.mark.timeout(200)]

WAIT_S = 60.0
FILE = """
Pages:
  command: python -m http.server {port:http} --bind 127.0.0.1
  role: frontend
  health-url: http://127.0.0.1:{port:http}/
Idle:
  command: [sh, -c, 'trap "exit 0" TERM; while :; do sleep 0.1; done']
"""


def _child(served: Served, name: str) -> int:
    return psutil.Process(served.pids()[name]).children()[0].pid


@pytest.mark.full
def test_processes_are_served_scaled_and_started_again() -> None:
    with Served(target=("-f", "graph.yaml"), files={"graph.yaml": FILE}, frontend=False).started() as served:
        with urllib.request.urlopen(served.url, timeout=10.0) as answer:
            assert answer.status == 200
        scale(served, "Idle", "2")
        until(lambda: served.states().get("Idle_1") == "ready", WAIT_S, what=served.states)
        for victim in ("command", "runner"):
            runner, command = served.pids()["Idle_1"], _child(served, "Idle_1")
            os.kill(command if victim == "command" else runner, signal.SIGKILL)
            until(lambda old=command: not psutil.pid_exists(old), WAIT_S, what=victim)
            until(lambda old=runner: served.pids().get("Idle_1") not in (None, old), WAIT_S, what=served.states)
            until(lambda: served.states().get("Idle_1") == "ready", WAIT_S, what=served.states)
        scale(served, "Idle", "1")
        until(lambda: "Idle_1" not in served.states(), WAIT_S, what=served.states)
        log = served.log("Idle_1")
        assert "was killed by SIGKILL" in log
        assert "the command has ended with exit code 0" in log


@pytest.mark.full
def test_processes_outlive_a_killed_arbiter_and_are_taken_back() -> None:
    with Served(
        "--on-arbiter-death", "keep", target=("-f", "graph.yaml"), files={"graph.yaml": FILE}, frontend=False
    ).started() as (served):
        before = {name: (pid, _child(served, name)) for name, pid in served.pids().items()}
        workers = {found.name: found.pid for found in marked(served.paths) if found.is_worker}
        assert workers == {f"dynamo_{name}": pid for name, (pid, _) in before.items()}, "guardian and chaos see runners"
        served.kill_arbiter()
        assert all(psutil.pid_exists(pid) for pids in before.values() for pid in pids)
        served.adopt()
        assert {name: (pid, _child(served, name)) for name, pid in served.pids().items()} == before
        assert set(served.states().values()) == {"ready"}
