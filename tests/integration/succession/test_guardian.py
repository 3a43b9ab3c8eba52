"""`kill -9` of the arbiter under the default policy: the guardian ends the whole run, on real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynamo_local.errors import EXIT_NOT_RUNNING
from dynamo_local.system.processes import is_alive
from dynamo_local.transport.etcd import EtcdStore
from tests.drivers.served import Served, until
from tests.drivers.servers import RealEtcd

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
    """Their pids."""
    return [int(pid) for pid in re.findall(r"children (\d+) (\d+) (\d+)", served.log("Parent"))[-1]]


def kill_arbiter(served: Served) -> float:
    """SIGKILL it; the time of that."""
    pid = served.status()["arbiter_pid"]
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return killed_s


def alive(pids: list[int]) -> list[int]:
    """Those that live."""
    return [pid for pid in pids if is_alive(pid)]


def nothing_left(served: Served) -> bool:
    """No process, no file."""
    return served.leftovers() == []


@pytest.mark.timing
def test_a_killed_arbiter_leaves_nothing_within_two_seconds() -> None:
    """lesson 3, lesson 10: workers, grandchildren that ignore SIGTERM, etcd, NATS, statefile and sockets are gone."""
    with parent() as served:
        served.start()
        pids = [pid for pid, _ in served.processes()] + children(served)
        assert len(pids) >= 8  # arbiter, guardian, etcd, NATS, worker, three children (one of them without marks)

        killed_s = kill_arbiter(served)
        until(lambda: nothing_left(served) and not alive(pids), PATIENCE_S, what=served.leftovers)
        took_s = time.monotonic() - killed_s

        assert "policy: end" in served.log("guardian")
        if os.getloadavg()[0] < len(os.sched_getaffinity(0)):
            assert took_s < GONE_S
        assert served.cli("status").returncode == EXIT_NOT_RUNNING
        assert served.cli("down").returncode == EXIT_NOT_RUNNING


@pytest.mark.full
async def test_the_leases_are_revoked_in_an_etcd_that_stays(own_etcd: RealEtcd) -> None:
    env = {"ETCD_ENDPOINTS": own_etcd.endpoint, "DYN_LEASE_TTL_S": "60"}
    with Served(target=("app:Parent",), files={"app.py": STUBBORN}, frontend=False, env=env) as served:
        served.start()
        kv = await EtcdStore.connect(own_etcd.endpoint)
        try:
            assert (await kv.get_prefix("dynamo/workers/"))[0]

            kill_arbiter(served)
            until(lambda: nothing_left(served), PATIENCE_S, what=served.leftovers)

            assert (await kv.get_prefix("dynamo/"))[0] == []
        finally:
            await kv.close()


@pytest.mark.full
def test_a_guardian_that_dies_is_started_again_and_does_its_work() -> None:
    with parent() as served:
        served.start()
        first = served.status()["guardian_pid"]
        os.kill(first, signal.SIGKILL)
        until(lambda: served.status()["guardian_pid"] not in (None, first), PATIENCE_S, what=served.status)

        kill_arbiter(served)

        until(lambda: nothing_left(served), PATIENCE_S, what=served.leftovers)


@pytest.mark.full
def test_in_an_orderly_down_the_guardian_does_nothing() -> None:
    """It is ended by the arbiter, before that ends; and it was given neither a secret nor the worker's environment."""
    with Served(
        target=("app:Parent",), files={"app.py": STUBBORN}, frontend=False, env={"HF_TOKEN": "hush", "SECRET": "hush"}
    ) as served:
        served.start()
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

        until(lambda: nothing_left(served), PATIENCE_S, what=served.leftovers)


@pytest.mark.full
def test_a_new_serve_right_after_the_kill_starts_anew() -> None:
    """It waits for a guardian at work, or does the work itself and ends the guardian: never both, never half."""
    with parent() as served:
        served.start()
        first = served.status()["run_id"]
        old = children(served)

        kill_arbiter(served)
        served.start()

        assert served.status()["run_id"] != first
        assert alive(old) == []
        assert served.states() == {"Parent": "ready"}
        assert len(served.pids_of("circus_plugins.guardian")) == 1


def test_arbiter_and_guardian_killed_the_next_serve_sweeps_and_says_so() -> None:
    with parent() as served:
        served.start()
        old = children(served)
        status = served.status()
        etcd = served.server_pid("etcd")
        os.kill(status["guardian_pid"], signal.SIGSTOP)  # it must not be quicker than the second kill
        os.kill(status["arbiter_pid"], signal.SIGKILL)
        os.kill(status["guardian_pid"], signal.SIGKILL)
        until(lambda: not served.pids_of("serve_dynamo"), PATIENCE_S)
        assert etcd is not None
        assert is_alive(etcd)

        done = served.cli(*served.serve_words("--detach"))

        assert done.returncode == 0, done.stderr
        assert f"left over from a dead run of dynamo, ended: dynamo_etcd (pid {etcd})" in done.stdout
        assert alive(old) == []


@pytest.mark.full
def test_down_ends_what_arbiter_and_guardian_left() -> None:
    """`dynamo down` needs no arbiter."""
    with parent() as served:
        served.start()
        status = served.status()
        os.kill(status["guardian_pid"], signal.SIGSTOP)
        os.kill(status["arbiter_pid"], signal.SIGKILL)
        os.kill(status["guardian_pid"], signal.SIGKILL)

        done = served.down()

        assert "its arbiter is dead" in done.stdout
        assert "ended dynamo_etcd" in done.stdout
        assert nothing_left(served)


@pytest.mark.full
def test_strangers_of_the_same_namespace_elsewhere_are_left_alone() -> None:
    """A mark is namespace *and* statefile: another user's, or another folder's, run of `dynamo` is not ours."""
    stranger = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={"DYN_NAMESPACE": "dynamo", "DYN_STATEFILE": "/elsewhere/dynamo.json", "DYN_WATCHER_NAME": "dynamo_W"},
        start_new_session=True,
    )
    try:
        with parent() as served:
            served.start()
            kill_arbiter(served)
            until(lambda: nothing_left(served), PATIENCE_S, what=served.leftovers)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
