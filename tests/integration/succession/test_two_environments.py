"""A live run is never taken for a dead one, whatever the variables of the shell that asks: on real processes.

cron, sudo and a container's exec have no XDG_RUNTIME_DIR; logind removes that folder at the last logout.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_BUSY, EXIT_NOT_RUNNING, EXIT_OK
from dynamo_local.system.gpu_locks import lock_folders
from dynamo_local.system.processes import is_alive
from tests.drivers.served import Served, until
from tests.fakes.arbiter.nvml_module import NVML
from tests.integration.faults.conftest import ECHO

pytestmark = pytest.mark.infra

KEEP = ("--on-arbiter-death", "keep")
Shell = Callable[[Served], dict[str, str]]


def _cron(served: Served) -> dict[str, str]:
    """As cron, sudo -u and `docker exec` have it."""
    return {"TMPDIR": str(served.folder), **{name: served.env[name] for name in ("PATH", "HOME", "LANG")}}


def _other_runtime(served: Served) -> dict[str, str]:
    (served.folder / "other").mkdir(mode=0o700, exist_ok=True)
    return {**served.env, "XDG_RUNTIME_DIR": str(served.folder / "other")}


def _state_said(served: Served) -> dict[str, str]:
    """The state folder by its own variable, and everything else elsewhere."""
    env = {**_cron(served), "HOME": str(served.folder / "nobody")}
    return {**env, "DYN_LOCAL_STATE_DIR": str(served.paths.statefile.parent)}


def _linked_home(served: Served) -> dict[str, str]:
    link = served.folder / "link"
    if not link.is_symlink():
        link.symlink_to(served.env["HOME"])
    return {**_cron(served), "HOME": str(link)}


SHELLS: Mapping[str, Shell] = {
    "cron": _cron,
    "another XDG_RUNTIME_DIR": _other_runtime,
    "DYN_LOCAL_STATE_DIR": _state_said,
    "a home that is a link": _linked_home,
}
EACH_SHELL = [pytest.param(shell, marks=() if shell == "cron" else pytest.mark.full) for shell in SHELLS]
"""The one that differs in all things each time, the others in `tox -m full`."""


def _echo(*words: str, env: Mapping[str, str] | None = None, files: Mapping[str, str] | None = None) -> Served:
    gpus = () if files else ("--gpus", "sim:4")
    files = {"echo.py": ECHO, **(files or {})}
    return Served(*gpus, *words, target=("echo:Echo",), files=files, frontend=False, env=env)


def _status(served: Served, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    done = served.ok("status", "--json", env=env)
    status: dict[str, Any] = json.loads(done)
    return status


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with _echo(*KEEP) as served:
        yield served.start()


@pytest.mark.parametrize("shell", EACH_SHELL)
def test_the_run_is_found_and_nothing_of_it_is_ended(running: Served, shell: str) -> None:
    env, before = SHELLS[shell](running), running.status()
    assert _status(running, env)["run_id"] == before["run_id"]
    for words in ((), ("--adopt",), ("--replace",)):
        done = running.cli(*running.serve_words(*words), env=env)
        assert done.returncode == EXIT_BUSY, done.stdout + done.stderr
        assert f"pid {before['arbiter_pid']}" in done.stderr
    after = running.status()
    assert [row["pid"] for row in after["workers"]] == [row["pid"] for row in before["workers"]]
    assert "is refused" in running.cli("drain", "Echo", env=env).stderr, "it was found"


def test_an_arbiter_without_its_lock_and_statefile_is_still_alive(running: Served) -> None:
    before = running.status()
    shutil.rmtree(running.paths.statefile.parent)
    done = running.cli(*running.serve_words())
    assert done.returncode == EXIT_BUSY, done.stdout + done.stderr
    until(running.paths.statefile.exists, what=running.paths.statefile.parent)
    assert _status(running)["workers"][0]["pid"] == before["workers"][0]["pid"]


def test_a_stranger_to_the_state_folder_is_told_where_it_is(running: Served) -> None:
    env = {**_other_runtime(running), "DYN_LOCAL_STATE_DIR": str(running.folder / "elsewhere")}
    for command in ("status", "down"):
        done = running.cli(command, "--namespace", "dynamo", env=env)
        assert done.returncode == EXIT_NOT_RUNNING
        assert f"say DYN_LOCAL_STATE_DIR={running.paths.statefile.parent}" in done.stderr
    assert running.states() == {"Echo": "ready"}


def test_two_runs_never_share_a_runtime_folder(running: Served) -> None:
    env = {**running.env, "DYN_LOCAL_STATE_DIR": str(running.folder / "elsewhere")}
    done = running.cli(*running.serve_words(), env=env)
    assert done.returncode == EXIT_BUSY, done.stdout + done.stderr
    assert f"pid {running.status()['arbiter_pid']}" in done.stderr
    assert running.states() == {"Echo": "ready"}


@pytest.mark.parametrize("lost", ["runtime folder", pytest.param("control socket", marks=pytest.mark.full)])
def test_what_is_removed_under_a_live_run_is_made_again(running: Served, lost: str) -> None:
    before = running.status()
    if lost == "control socket":
        running.paths.control_socket.unlink()
    else:
        shutil.rmtree(running.paths.runtime.parent)
    after = _status(running, _cron(running))
    assert (after["run_id"], after["arbiter_pid"]) == (before["run_id"], before["arbiter_pid"])
    assert [row["pid"] for row in after["workers"]] == [row["pid"] for row in before["workers"]]
    for target in ("+1", "-1"):
        running.ok("scale", "Echo", target, "--wait", "--timeout", "60", timeout_s=90.0)


@pytest.mark.parametrize("shell", ["cron", pytest.param("DYN_LOCAL_STATE_DIR", marks=pytest.mark.full)])
def test_down_of_another_shell_leaves_nothing(shell: str) -> None:
    with _echo().started() as served:
        arbiter = served.status()["arbiter_pid"]
        shutil.rmtree(served.paths.runtime)
        done = served.ok("down", env=SHELLS[shell](served), timeout_s=90.0)
        assert "dead" not in done
        assert not is_alive(arbiter)
        assert served.leftovers() == []


@pytest.mark.full
def test_down_reaches_an_arbiter_that_cannot_have_a_socket_any_more() -> None:
    with _echo().started() as served:
        shutil.rmtree(served.paths.runtime.parent)
        served.paths.runtime.parent.write_text("in the way")
        asked = served.cli("status")
        assert asked.returncode == EXIT_NOT_RUNNING
        assert "has no control socket" in asked.stderr
        assert served.cli("down", timeout_s=90.0).returncode == EXIT_OK
        assert served.leftovers() == []


@pytest.mark.parametrize("shell", EACH_SHELL)
def test_a_killed_arbiters_run_is_adopted_by_another_shell(shell: str) -> None:
    with _echo(*KEEP).started() as served:
        before = served.status()
        served.kill_arbiter()
        env = SHELLS[shell](served)
        served.ok(*served.serve_words("--adopt", "--detach"), env=env, timeout_s=90.0)
        for each in (env, served.env):
            after = _status(served, each)
            assert after["run_id"] == before["run_id"]
            assert [row["pid"] for row in after["workers"]] == [row["pid"] for row in before["workers"]]
        assert served.down().returncode == EXIT_OK
        assert served.leftovers() == []


@pytest.mark.full
def test_a_run_whose_runtime_folder_went_with_its_arbiter_is_adopted() -> None:
    with _echo(*KEEP).started() as served:
        pids = served.pids()
        served.kill_arbiter()
        shutil.rmtree(served.paths.runtime.parent)
        served.ok(*served.serve_words("--adopt", "--detach"), timeout_s=90.0)
        assert served.pids() == pids
        assert served.states() == {"Echo": "ready"}
        served.ok("scale", "Echo", "+1", "--wait", "--timeout", "60", timeout_s=90.0)


@pytest.mark.full
def test_a_run_whose_runtime_folder_and_guardian_are_gone_is_not_adopted_and_not_ended() -> None:
    with _echo(*KEEP).started() as served:
        pids = served.pids()
        served.kill_arbiter(guardian=True)
        shutil.rmtree(served.paths.runtime.parent)
        refused = served.cli(*served.serve_words("--adopt", "--detach"), timeout_s=90.0)
        assert refused.returncode not in (EXIT_OK, EXIT_BUSY)
        for said in ("cannot be adopted", "no guardian lives", "`dynamo down`", "--replace"):
            assert said in refused.stdout + refused.stderr
        assert all(is_alive(pid) for pid in pids.values())
        assert served.cli("down", timeout_s=90.0).returncode == EXIT_OK
        assert served.leftovers() == []


def test_a_run_of_an_earlier_release_is_adopted() -> None:
    with _echo(*KEEP).started() as served:
        pids = served.pids()
        served.kill_arbiter()
        raw = served.statefile()
        del raw["log_dir"]
        served.paths.statefile.write_text(json.dumps(raw))
        served.paths.lock.unlink()
        env = {**_cron(served), "DYN_LOCAL_LOG_DIR": str(served.folder / "other-logs")}
        served.ok(*served.serve_words("--adopt", "--detach"), env=env, timeout_s=90.0)
        assert served.pids() == pids
        assert "adopt" in served.log("arbiter") or served.paths.log_file("dynamo_arbiter").exists()


@pytest.mark.full
def test_two_runs_never_hold_one_gpu_because_their_shells_differ() -> None:
    with _echo("--gpus", "0,1", files={"pynvml.py": NVML}).started() as one:
        other = {**one.env, "HOME": str(one.folder / "home2"), "XDG_RUNTIME_DIR": str(one.folder / "run2")}
        for name in ("HOME", "XDG_RUNTIME_DIR"):
            Path(other[name]).mkdir(mode=0o700)
        try:
            words = ("serve", "echo:Echo", "--namespace", "second", "--gpus", "0", "--detach")
            refused = one.cli(*words, env=other, timeout_s=90.0)
            assert refused.returncode == EXIT_BAD_INPUT, refused.stdout + refused.stderr
            assert "namespace dynamo (watcher dynamo_Echo" in refused.stderr
        finally:
            for name in one.statefile()["components"]["dynamo_Echo"]["resources"]["gpu_uuids"]:
                (lock_folders({})[0] / f"{name}.lock").unlink(missing_ok=True)
