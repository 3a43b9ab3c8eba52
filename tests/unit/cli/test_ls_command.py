"""`dynamo ls`: all graphs of a user, whatever became of their arbiters."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.arbiter.event_log import EventLog, ended_in_its_place, event_log_path
from dynamo_local.arbiter.guarded_run import GuardedRun
from dynamo_local.cli import ls
from dynamo_local.errors import EXIT_NOT_RUNNING, EXIT_OK, NotRunning
from dynamo_local.state.run_id import new_run_id
from dynamo_local.system.liveness import acquire, release
from dynamo_local.system.paths import Paths
from dynamo_local.system.processes import start_time_s
from tests.fakes.arbiter.scripted_arbiter import dynamo

RUN_ID = new_run_id(1_772_373_921_000)
ANSWER = {
    "namespace": "alive",
    "state": "degraded",
    "run_id": RUN_ID,
    "arbiter_pid": 4711,
    "frontend_url": "http://127.0.0.1:8000",
    "workers": [
        {"state": "ready", "gpus": ["10"]},
        {"state": "starting", "gpus": ["2"]},
        {"state": "ready", "gpus": []},
        {"state": "exited", "gpus": []},
    ],
}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host on which nothing of ours is."""
    for name, value in (("XDG_RUNTIME_DIR", "run"), ("HOME", "home"), ("DYN_LOCAL_STATE_DIR", "state")):
        (tmp_path / value).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / value))
    return tmp_path


def paths(namespace: str) -> Paths:
    """Where that namespace's things are on this host."""
    found = Paths.of(namespace, os.environ)
    found.prepare()
    return found


def left(namespace: str, **entry: Any) -> None:
    """A statefile with one worker, as an arbiter leaves it that is killed."""
    worker = {"watcher_name": "W", "component": "W", "resources": {"allocated_gpus": ["0", "1"]}, **entry}
    raw = {"run_id": RUN_ID, "arbiter_pid": 7, "components": {"W": worker}}
    paths(namespace).statefile.write_text(json.dumps(raw))


def listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert dynamo(monkeypatch, "ls", "--json") == EXIT_OK
    runs: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return runs


def test_each_namespace_is_listed_with_what_became_of_it(
    host: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ls, "ask_arbiter", lambda asked, *_, **__: _answer(asked))
    left("dead", pid=2**22 + 1, pid_start_time=1.0)
    left("kept", pid=os.getpid(), pid_start_time=start_time_s(os.getpid()))
    left("silent")
    paths("torn").statefile.write_text('{"run_id": ')
    paths("theirs").statefile.write_text('{"theme": "dark"}')
    paths("alive").control_socket.touch()
    held = [acquire(paths(name).lock, name, "`dynamo serve`") for name in ("alive", "silent")]
    try:
        runs = {run["namespace"]: run for run in listed(monkeypatch, capsys)}
    finally:
        for lock in held:
            release(lock)
    assert {name: run["state"] for name, run in runs.items()} == {
        "alive": "degraded",
        "dead": "dead",
        "kept": "kept",
        "silent": "not_answering",
        "torn": "dead",
    }
    assert runs["alive"] | {"note": None} == {
        "namespace": "alive",
        "state": "degraded",
        "run_id": RUN_ID,
        "arbiter_pid": 4711,
        "workers_ready": 2,
        "workers": 3,
        "gpus": ["2", "10"],
        "since": 1_772_373_921.0,
        "frontend_url": "http://127.0.0.1:8000",
        "note": None,
    }
    assert (runs["kept"]["workers"], runs["kept"]["gpus"], runs["kept"]["arbiter_pid"]) == (1, ["0", "1"], 7)
    assert "a worker lives on" in runs["kept"]["note"]
    assert f"pid {os.getpid()} (`dynamo serve`)" in runs["silent"]["note"]
    assert "is not valid JSON" in runs["torn"]["note"]


def test_a_run_that_ended_with_its_arbiter_is_listed_for_a_day_and_explained(
    host: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for namespace, age_s in (("lately", 60.0), ("long-ago", 2 * 86_400.0)):
        logs = paths(namespace).logs
        guarded = GuardedRun(namespace, RUN_ID, "", "", str(logs), 4711, 1.0, keep=False)
        death = "was killed by SIGKILL"
        ended_in_its_place(EventLog(event_log_path(logs)), guarded, death, ["a", "b"], time.time() - age_s)
    (run,) = listed(monkeypatch, capsys)
    assert (run["namespace"], run["state"], run["run_id"]) == ("lately", "ended", RUN_ID)
    assert "its arbiter (pid 4711) was killed by SIGKILL at " in run["note"]
    for command in ("status", "down"):
        assert dynamo(monkeypatch, command, "-n", "lately") == EXIT_NOT_RUNNING
        said = capsys.readouterr().err
        assert "the guardian ended its 2 workers, etcd and NATS" in said
        assert str(paths("lately").logs / "lately_arbiter.log") in said


def _answer(asked: Paths) -> dict[str, Any]:
    if asked.namespace != "alive":
        raise NotRunning(f"the arbiter of {asked.namespace!r} did not answer")
    return {"graph": ANSWER}


def test_the_table_says_what_is_known(
    host: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = ls.render([ls.of_status(ANSWER), ls.of_statefile("old", {"components": {"W": {}}}, "dead", "a note")])
    head, alive, old = [line.split() for line in table.splitlines()]
    assert head == list(ls.COLUMNS)
    assert [*alive[:5], alive[-1]] == ["alive", "degraded", "2/3", "ready", "2,10", "http://127.0.0.1:8000"]
    assert old == ["old", "dead", "1", "-", "-", "-", "a", "note"]


def test_where_there_is_nothing_it_says_where_it_looked(
    host: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dynamo(monkeypatch, "ls") == EXIT_OK
    out, err = capsys.readouterr()
    assert (out, str(host / "state") in err) == ("", True)
    assert listed(monkeypatch, capsys) == []
