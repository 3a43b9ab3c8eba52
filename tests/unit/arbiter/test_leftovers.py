"""Processes and files of a killed arbiter are found by marks and sessions, ended, and cleared away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.arbiter import leftovers
from dynamo_local.arbiter.adoption import settle
from dynamo_local.arbiter.leftovers import RecordedProcess, Unkillable, end, end_run, recorded, revoke
from dynamo_local.arbiter.marks import guarded_arbiter, guardian_marks, marked, marks, statefiles_elsewhere
from dynamo_local.errors import NamespaceBusy, NotRunning
from dynamo_local.system.liveness import acquire, holder, release
from dynamo_local.system.paths import Paths
from dynamo_local.system.processes import is_alive, start_time_s
from tests.chaos.checks import process_faults
from tests.drivers.served import until

RUN = "01JD3YQZ8E6W4T1V0K2M5N7P9R"
SLEEP = "import time; print('up', flush=True); time.sleep(100)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
WITH_CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], env={{}}); {SLEEP}"

Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """A namespace `test` of its own."""
    paths = Paths.of("test", {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)})
    paths.statefile.parent.mkdir(parents=True, mode=0o700)
    paths.runtime.mkdir(parents=True)
    return paths


@pytest.fixture
def spawn(paths: Paths) -> Iterator[Spawn]:
    """Starts `python -c code` in a session of its own, by default marked as the worker `test_W`; all end with us."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str = SLEEP, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        env = marks("test", paths.statefile, RUN, "test_W") if env is None else env
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words], env=env, start_new_session=True, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield start
    for process in started:
        for pid in leftovers.in_sessions([RecordedProcess("test_W", process.pid, 0.0)]):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def known(process: subprocess.Popen[str]) -> RecordedProcess:
    """As the statefile has it."""
    return RecordedProcess("test_W", process.pid, start_time_s(process.pid))


def write_statefile(paths: Paths, process: subprocess.Popen[str] | None = None, **more: Any) -> None:
    """A statefile with one worker."""
    entry: dict[str, Any] = {"watcher_name": "test_W", "component": "W", "state": "ready"}
    if process is not None:
        entry |= {"pid": process.pid, "pid_start_time": start_time_s(process.pid)}
    state = {"schema_version": 1, "namespace": "test", "run_id": RUN, "components": {"test_W": entry}, **more}
    paths.statefile.write_text(json.dumps(state))


# --- what the statefile says ---------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00"])
def test_a_broken_statefile_is_an_empty_record(paths: Paths, text: str) -> None:
    paths.statefile.write_text(text)
    assert recorded(paths.statefile) == leftovers.RecordedRun()


@pytest.mark.parametrize(
    "more",
    [
        {"components": None, "servers": 3},
        {"components": {"test_W": None}, "servers": {"test_etcd": []}},
        {"components": {"test_W": {"pid": "7", "lease": 7, "other_leases": [8]}}},
        {"components": {"test_W": {"lease": [], "other_leases": "9"}}},
    ],
)
def test_what_makes_no_sense_in_it_is_left_out(paths: Paths, more: dict[str, Any]) -> None:
    write_statefile(paths, **more)
    run = recorded(paths.statefile)
    assert (run.run_id, run.workers, run.servers, dict(run.leases)) == (RUN, (), (), {})


def test_the_leases_of_what_runs_behind_a_worker_are_its_too(paths: Paths) -> None:
    write_statefile(paths, components={"test_W": {"lease": "7a", "other_leases": ["8b", "9c"]}})
    assert recorded(paths.statefile).leases == {"test_W": ("7a", "8b", "9c")}


def test_a_missing_statefile_is_an_empty_record(paths: Paths) -> None:
    assert recorded(paths.statefile) == leftovers.RecordedRun()


# --- finding -------------------------------------------------------------------------------------


def test_marks_find_what_a_run_started_and_nothing_else(paths: Paths, spawn: Spawn) -> None:
    ours = spawn()
    spawn(env=marks("test", Path("/elsewhere/test.json"), RUN, "test_W"))
    spawn(env=marks("tess", paths.statefile, RUN, "test_W"))
    spawn(env={"DYN_STATEFILE": str(paths.statefile)})
    assert [(found.pid, found.name, found.run_id) for found in marked(paths)] == [(ours.pid, "test_W", RUN)]


APART = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True); {SLEEP}"
FORKED = "import os, time; os.fork(); print('up', flush=True); time.sleep(100)"


def test_a_worker_is_known_whatever_its_command_line_says(paths: Paths, spawn: Spawn) -> None:
    """A command's runner is one, as a component's process is; what an arbiter starts leads a session of its own."""
    pids = {spawn(SLEEP, *words).pid for words in ((), ("serve_command.py",), ("dynamo_local.worker.serve_dynamo",))}
    assert {found.pid: found.is_worker for found in marked(paths)} == dict.fromkeys(pids, True)


@pytest.mark.parametrize("name", ["test_etcd", "test_nats", "test_guardian"])
def test_the_servers_and_the_guardian_are_no_workers(paths: Paths, spawn: Spawn, name: str) -> None:
    spawn(env=marks("test", paths.statefile, RUN, name))
    assert [found.is_worker for found in marked(paths)] == [False]


@pytest.mark.parametrize("code", [APART, FORKED])
def test_what_a_worker_starts_is_no_worker(paths: Paths, spawn: Spawn, code: str) -> None:
    worker = spawn(code)
    until(lambda: len(marked(paths)) == 2, 10.0)
    assert [found.pid for found in marked(paths) if found.is_worker] == [worker.pid]
    for found in marked(paths):
        os.kill(found.pid, signal.SIGKILL)


def test_two_processes_of_one_worker_are_a_fault_to_the_chaos_test(paths: Paths, spawn: Spawn) -> None:
    pids = {spawn(SLEEP, "serve_command.py").pid for _ in range(2)}
    (fault,) = process_faults(paths)
    assert fault.startswith("test_W has the processes [")
    assert all(str(pid) in fault for pid in pids)


def test_we_and_those_who_started_us_are_never_found(paths: Paths) -> None:
    """`dynamo serve` typed in a shell that descends from a worker must not end that shell, nor itself."""
    code = (
        "import os, subprocess, sys\n"
        "from pathlib import Path\n"
        "from dynamo_local.arbiter.marks import marked\n"
        "from dynamo_local.system.paths import Paths\n"
        "if len(sys.argv) == 1: sys.exit(subprocess.call([sys.executable, __file__, 'inner']))\n"
        "statefile = Path(os.environ['DYN_STATEFILE'])\n"
        "print(marked(Paths('test', statefile.parent, statefile, statefile.parent)))\n"
    )
    script = paths.runtime / "script.py"
    script.write_text(code)
    env = {**os.environ, **marks("test", paths.statefile, RUN, "test_W")}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_session_holds_a_child_without_marks_also_when_its_leader_is_dead(spawn: Spawn) -> None:
    """a crashed engine's helper, started with another environment."""
    leader = spawn(WITH_CHILD)
    worker = known(leader)
    child = next(pid for pid in leftovers.in_sessions([worker]) if pid != leader.pid)
    leader.kill()
    leader.wait()
    assert leftovers.in_sessions([worker]) == {child: "test_W"}


def test_a_pid_that_was_given_to_somebody_else_is_left_alone(spawn: Spawn) -> None:
    stranger = spawn(env={})
    for off_s in (-100.0, 100.0):
        reused = RecordedProcess("test_W", stranger.pid, (start_time_s(stranger.pid) or 0.0) + off_s)
        assert leftovers.in_sessions([reused]) == {}
        assert not reused.alive
    assert not RecordedProcess("test_W", stranger.pid, None).alive


# --- ending --------------------------------------------------------------------------------------


def test_ended_means_gone(spawn: Spawn) -> None:
    process = spawn(DEAF)
    assert end(lambda: {process.pid: "test_W"} if is_alive(process.pid) else {}) == [f"test_W (pid {process.pid})"]
    assert not is_alive(process.pid)


def test_what_does_not_die_is_told_by_name(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    process = spawn()
    monkeypatch.setattr(leftovers.os, "kill", lambda pid, signum: None)
    with pytest.raises(Unkillable, match=rf"test_W \(pid {process.pid}\)"):
        end(lambda: {process.pid: "test_W"}, timeout_s=0.05)


@pytest.mark.timing
def test_an_etcd_that_does_not_answer_holds_nothing_up(caplog: pytest.LogCaptureFixture) -> None:
    began_s = time.monotonic()
    revoke("http://127.0.0.1:1", None, ["694d967da694ea1a"])
    assert time.monotonic() - began_s < 2.0
    assert "expire by themselves" in caplog.text


def test_the_whole_run_is_ended_and_its_files_are_gone(paths: Paths, spawn: Spawn) -> None:
    """of the state folder only our own file."""
    worker = spawn(DEAF)
    other = paths.statefile.with_name("other.json")
    other.write_text("{}")
    write_statefile(paths, worker)
    assert end_run(paths) == [f"test_W (pid {worker.pid})"]
    assert (paths.statefile.exists(), paths.runtime.exists(), other.exists()) == (False, False, True)


def test_a_broken_statefile_is_set_aside_not_lost(paths: Paths, spawn: Spawn) -> None:
    worker = spawn()
    paths.statefile.write_text("{")
    assert end_run(paths) == [f"test_W (pid {worker.pid})"]
    assert [path.read_text() for path in paths.statefile.parent.glob("test.json.corrupt-*")] == ["{"]


# --- what `serve` does with it -------------------------------------------------------------------


@pytest.mark.parametrize("held", [False, True])
def test_the_text_of_a_killed_owner_goes_with_its_run_and_that_of_a_live_one_stays(paths: Paths, held: bool) -> None:
    owner = acquire(paths.runtime_lock, paths.namespace, "`dynamo serve`")
    if not held:
        text = (of := paths.runtime_lock.with_suffix(".owner")).read_text()
        release(owner)
        of.write_text(text)  # as after a SIGKILL
    end_run(paths)
    assert holder(paths.runtime_lock) == (f"pid {os.getpid()} (`dynamo serve`)" if held else "another process")
    release(owner)


def test_an_empty_namespace_is_taken_in_silence(paths: Paths) -> None:
    told: list[str] = []
    assert settle(paths, adopt=False, replace=False, tell=told.append) is None
    assert told == []


def test_live_workers_that_were_to_be_kept_are_not_touched(paths: Paths, spawn: Spawn) -> None:
    worker = spawn()
    write_statefile(paths, worker, on_arbiter_death="keep")
    with pytest.raises(NamespaceBusy, match=r"--adopt.*dynamo down.*--replace"):
        settle(paths, adopt=False, replace=False, tell=print)
    assert is_alive(worker.pid)
    assert paths.statefile.exists()


@pytest.mark.parametrize(("policy", "replace"), [("end", False), ("keep", True)])
def test_others_are_swept_and_named(paths: Paths, spawn: Spawn, policy: str, replace: bool) -> None:
    worker, told = spawn(), list[str]()
    write_statefile(paths, worker, on_arbiter_death=policy)
    assert settle(paths, adopt=False, replace=replace, tell=told.append) is None
    assert not is_alive(worker.pid)
    assert f"left over from a dead run of test, ended: test_W (pid {worker.pid})" in told


def test_a_worker_nobody_knows_of_is_not_swept_by_accident(paths: Paths, spawn: Spawn) -> None:
    worker = spawn(SLEEP, "dynamo_local.worker.serve_dynamo")
    with pytest.raises(NamespaceBusy, match="1 live workers"):
        settle(paths, adopt=False, replace=False, tell=print)
    assert is_alive(worker.pid)


def test_only_what_lives_can_be_adopted(paths: Paths, spawn: Spawn) -> None:
    with pytest.raises(NotRunning):
        settle(paths, adopt=True, replace=False, tell=print)
    write_statefile(paths)
    with pytest.raises(NotRunning):
        settle(paths, adopt=True, replace=False, tell=print)
    assert paths.statefile.exists()


def test_adoption_finds_the_living_by_pid_and_start_time_and_ends_orphans(paths: Paths, spawn: Spawn) -> None:
    worker = spawn(WITH_CHILD)
    orphan = spawn(env=marks("test", paths.statefile, RUN, "test_W_1"))
    write_statefile(paths, worker, on_arbiter_death="keep")
    found = settle(paths, adopt=True, replace=False, tell=print)
    assert found is not None
    assert dict(found.pids) == {"test_W": worker.pid}
    assert found.notes == (f"test_W_1 (pid {orphan.pid})",)
    assert len(leftovers.in_sessions([known(worker)])) == 2


@pytest.mark.parametrize("state", ["starting", "ready"])
def test_a_worker_without_a_start_time_is_known_by_its_environment(paths: Paths, spawn: Spawn, state: str) -> None:
    worker = spawn(SLEEP, "dynamo_local.worker.serve_dynamo")
    write_statefile(paths, components={"test_W": {"watcher_name": "test_W", "component": "W", "state": state}})
    found = settle(paths, adopt=True, replace=False, tell=print)
    assert found is not None
    assert dict(found.pids) == {"test_W": worker.pid}


def test_a_guardian_tells_whose_it_is(paths: Paths, spawn: Spawn) -> None:
    """Where lock and statefile were removed, it is the last who knows that the arbiter lives: `serve` is refused."""
    arbiter = spawn(env={})
    guardian = spawn(env={**marks("test", paths.statefile, RUN, "test_guardian"), **guardian_marks(arbiter.pid)})
    assert guarded_arbiter(marked(paths)) == arbiter.pid
    with pytest.raises(NamespaceBusy, match=f"pid {arbiter.pid}"):
        settle(paths, adopt=False, replace=True, tell=print)
    assert is_alive(guardian.pid)
    arbiter.kill()
    arbiter.wait()
    assert guarded_arbiter(marked(paths)) is None


def test_a_run_elsewhere_is_named_by_its_statefile(paths: Paths, spawn: Spawn, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "test.json"
    spawn(env=marks("test", elsewhere, RUN, "test_W"))
    spawn(env=marks("test", paths.statefile, RUN, "test_W"))
    assert elsewhere in statefiles_elsewhere(paths)
    assert paths.statefile not in statefiles_elsewhere(paths)
