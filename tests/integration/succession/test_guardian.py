"""`kill -9` of the arbiter under the default policy: the guardian ends the whole run, on real processes."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from dynamo_local.errors import EXIT_NOT_RUNNING
from dynamo_local.system.processes import is_alive
from tests.drivers.served import Served, until

pytestmark = pytest.mark.infra

STUBBORN = """\
import subprocess, sys
from dynamo_local.sdk import async_on_start, endpoint, service

IGNORE = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"


@service(name="Parent")
class Parent:
    @async_on_start
    async def start(self):
        command = [sys.executable, "-c", IGNORE]
        child = subprocess.Popen(command)
        own_session = subprocess.Popen(command, start_new_session=True)
        no_environment = subprocess.Popen(command, env={})
        print("children", child.pid, own_session.pid, no_environment.pid, flush=True)
"""

GONE_S = 2.0
"""From the kill until nothing is left, on a quiet machine."""
PATIENCE_S = 10.0
"""The same where the other tests of a run share two cores."""


def parent() -> Served:
    """A worker with three children that ignore SIGTERM: in its session, in one of their own, without our marks."""
    return Served(target=("app:Parent",), files={"app.py": STUBBORN}, frontend=False)


def children(served: Served) -> list[int]:
    return [int(pid) for pid in re.findall(r"children (\d+) (\d+) (\d+)", served.log("Parent"))[-1]]


def kill_arbiter(served: Served) -> float:
    pid = served.status()["arbiter_pid"]
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return killed_s


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if is_alive(pid)]


@pytest.mark.timing
def test_a_killed_arbiter_leaves_nothing_within_two_seconds() -> None:
    with parent().started() as served:
        pids = [pid for pid, _ in served.processes()] + children(served)
        assert len(pids) >= 8  # arbiter, guardian, etcd, NATS, worker, three children (one of them without marks)
        killed_s = kill_arbiter(served)
        until(lambda: not served.leftovers() and not alive(pids), PATIENCE_S, what=served.leftovers)
        took_s = time.monotonic() - killed_s
        assert "policy: end" in served.log("guardian")
        if os.getloadavg()[0] < len(os.sched_getaffinity(0)):
            assert took_s < GONE_S
        assert served.cli("status").returncode == EXIT_NOT_RUNNING
        assert served.cli("down").returncode == EXIT_NOT_RUNNING


@pytest.mark.full
def test_a_guardian_that_dies_is_started_again_and_does_its_work() -> None:
    with parent().started() as served:
        first = served.status()["guardian_pid"]
        os.kill(first, signal.SIGKILL)
        until(lambda: served.status()["guardian_pid"] not in (None, first), PATIENCE_S, what=served.status)
        kill_arbiter(served)
        until(lambda: not served.leftovers(), PATIENCE_S, what=served.leftovers)


@pytest.mark.full
def test_in_an_orderly_down_the_guardian_does_nothing() -> None:
    """The arbiter ends it first. It has neither a secret nor the worker's environment."""
    with Served(
        target=("app:Parent",), files={"app.py": STUBBORN}, frontend=False, env={"HF_TOKEN": "hush", "SECRET": "hush"}
    ).started() as served:
        guardian = served.status()["guardian_pid"]
        about = Path(f"/proc/{guardian}/environ").read_bytes() + Path(f"/proc/{guardian}/cmdline").read_bytes()
        options = served.cli("ctl", "options", "dynamo_guardian").stdout
        listed = served.cli("ctl", "list").stdout
        served.down()
        assert not is_alive(guardian)
        assert "is gone" not in served.log("guardian")
    assert b"hush" not in about
    assert "hush" not in options
    assert "dynamo_guardian" in listed


@pytest.mark.full
def test_killed_in_the_middle_of_its_start_it_leaves_nothing_either() -> None:
    with parent() as served:
        process = served.popen(*served.serve_words())
        until(lambda: served.pids_of("serve_dynamo"), what=served.foreground_output)
        process.kill()
        until(lambda: not served.leftovers(), PATIENCE_S, what=served.leftovers)


@pytest.mark.full
def test_a_new_serve_right_after_the_kill_starts_anew() -> None:
    with parent().started() as served:
        first = served.status()["run_id"]
        old = children(served)
        kill_arbiter(served)
        served.start()
        assert served.status()["run_id"] != first
        assert alive(old) == []
        assert served.states() == {"Parent": "ready"}
        assert len(served.pids_of("circus_plugins.guardian")) == 1


@pytest.mark.full
def test_arbiter_and_guardian_killed_the_next_serve_sweeps_and_says_so() -> None:
    with parent().started() as served:
        old = children(served)
        etcd = served.server_pid("etcd")
        served.kill_arbiter(guardian=True)
        until(lambda: not served.pids_of("serve_dynamo"), PATIENCE_S)
        assert etcd is not None
        assert is_alive(etcd)
        done = served.ok(*served.serve_words("--detach"))
        assert f"left over from a dead run of dynamo, ended: dynamo_etcd (pid {etcd})" in done
        assert alive(old) == []


@pytest.mark.full
def test_down_ends_what_arbiter_and_guardian_left() -> None:
    with parent().started() as served:
        served.kill_arbiter(guardian=True)
        done = served.down()
        assert "its arbiter is dead" in done.stdout
        assert "ended dynamo_etcd" in done.stdout
        assert served.leftovers() == []
