"""`dynamo events`: what happened, in words."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.arbiter.event_log import EventLog, aside_record, event_log_path, record_of, server_record
from dynamo_local.arbiter.servers import ServerEvent
from dynamo_local.cli.events import in_words
from dynamo_local.core.fleet.effects import Note
from dynamo_local.core.fleet.lifecycle import Transition
from dynamo_local.core.fleet.lifecycle import TransitionKind as K
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_NOT_RUNNING, EXIT_OK
from tests.fakes.arbiter.scripted_arbiter import dynamo

NAME = "dynamo_VllmWorker"


def happened(kind: K, cause: str, **details: Any) -> Transition:
    """Between states that `record` fills in."""
    return Transition("", "VllmWorker", S.READY, S.READY, kind, cause, details)


def record(event: Transition, before: S, after: S, name: str = NAME, time_s: float | None = None) -> dict[str, Any]:
    """As the supervisor makes it."""
    at_s = time.time() if time_s is None else time_s
    return record_of(replace(event, name=name, before=before, after=after), time_s=at_s)


DRAIN = happened(K.DRAIN_REQUESTED, "scale:ab12", reason="scale -1")
DRAINED = (DRAIN, S.READY, S.DRAINING)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EventLog:
    """The log of namespace `dynamo`, where the command looks for it. No arbiter runs."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("DYN_LOCAL_LOG_DIR", str(tmp_path))
    monkeypatch.delenv("DYN_NAMESPACE", raising=False)
    (tmp_path / "dynamo").mkdir()
    return EventLog(event_log_path(tmp_path / "dynamo"))


@pytest.mark.parametrize(
    ("event", "before", "after", "words"),
    [
        (DRAIN, S.READY, S.DRAINING, "ready -> draining (DrainRequested by scale:ab12: scale -1)"),
        (
            happened(K.SPAWNED, "spawn", pid=7, pid_start_time=1.5),
            S.STARTING,
            S.STARTING,
            "starting (Spawned by spawn: pid 7)",
        ),
        (
            happened(K.PROCESS_EXITED, "exit:7", exit_code=-signal.SIGKILL),
            S.READY,
            S.CRASHED,
            "ready -> crashed (ProcessExited by exit:7: killed by SIGKILL)",
        ),
        (
            happened(K.PROCESS_EXITED, "exit:7", exit_code=0),
            S.DRAINING,
            S.EXITED,
            "draining -> exited (ProcessExited by exit:7: exit code 0)",
        ),
        (
            happened(K.PROCESS_EXITED, "exit:7", exit_code=None),
            S.READY,
            S.CRASHED,
            "ready -> crashed (ProcessExited by exit:7)",
        ),
        (
            happened(K.PROCESS_EXITED, "exit:7", exit_code=-40),
            S.READY,
            S.CRASHED,
            "ready -> crashed (ProcessExited by exit:7: killed by signal 40)",
        ),
        (
            happened(K.REGISTERED, "etcd:1f", lease="1f"),
            S.STARTING,
            S.READY,
            "starting -> ready (Registered by etcd:1f: lease 1f)",
        ),
        (
            happened(K.DRAIN_DEADLINE_PASSED, "deadline", deadline_s=600.0, requests_cut=2),
            S.DRAINING,
            S.DRAIN_TIMED_OUT,
            "draining -> drain_timed_out (DrainDeadlinePassed by deadline: deadline 600 s, requests cut 2)",
        ),
        (
            happened(K.BACKOFF_STARTED, "exit:7", delay_s=1.25),
            S.CRASHED,
            S.BACKING_OFF,
            "crashed -> backing_off (BackoffStarted by exit:7: delay 1.25 s)",
        ),
    ],
)
def test_an_event_is_told_in_words(event: Transition, before: S, after: S, words: str) -> None:
    assert in_words(record(event, before, after)) == f"{NAME} {words}"


def test_the_last_lines_of_one_worker(
    log: EventLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log.append([record(DRAIN, S.READY, S.DRAINING, name=f"{NAME}_{n % 2}") for n in range(10)])
    for word in (f"{NAME}_1", "VllmWorker_1"):
        assert dynamo(monkeypatch, "events", "--worker", word, "-l", "3", "--json") == EXIT_OK
        assert [json.loads(line)["seq"] for line in capsys.readouterr().out.splitlines()] == [6, 8, 10]
    assert dynamo(monkeypatch, "events", "-l", "0") == EXIT_OK
    assert capsys.readouterr().out == ""


def test_an_unknown_worker_is_answered_with_those_there_are(
    log: EventLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Silence would look like a worker that nothing happened to."""
    log.append([record(DRAIN, S.READY, S.DRAINING)])
    assert dynamo(monkeypatch, "events", "--worker", "VlmWorker") == EXIT_BAD_INPUT
    assert "no events of a worker named 'VlmWorker'; there are some of: dynamo_VllmWorker" in capsys.readouterr().err


def test_n_is_the_namespace_as_everywhere(
    log: EventLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dynamo(monkeypatch, "events", "-n", "other") == EXIT_NOT_RUNNING


def test_a_namespace_without_events_says_where_it_looked(
    log: EventLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dynamo(monkeypatch, "events", "--namespace", "other") == EXIT_NOT_RUNNING
    assert "no events of namespace 'other' in " in capsys.readouterr().err


# --- runs and servers ----------------------------------------------------------------------------------


def run(event: str, pid: int, **more: Any) -> dict[str, Any]:
    head = {"time": 0.0, "watcher_name": "dynamo_arbiter", "component": "arbiter", "event": event, "from": "", "to": ""}
    return {**head, "stimulus_id": "serve", "run_id": "01J", "arbiter_pid": pid, **more}


@pytest.mark.parametrize(
    ("boundary", "words"),
    [
        (run("RunStarted", 7, target="g:F", killed_pid=None), "run 01J begins: g:F, arbiter pid 7"),
        (
            run("RunAdopted", 8, target="g:F", killed_pid=7),
            "run 01J is being taken back: g:F, arbiter pid 8, the one before (pid 7) wrote no end: it was killed",
        ),
        (run("RunEnded", 8, reason="dynamo down", exit_code=0), "run 01J ends: dynamo down, arbiter pid 8"),
        (
            run("RunNotAdopted", 8, reason="no etcd", exit_code=1),
            "run 01J was not taken back: no etcd, arbiter pid 8, exit code 1",
        ),
        (run("RunEnded", 8, reason="W died", exit_code=1), "run 01J ends: W died, arbiter pid 8, exit code 1"),
    ],
)
def test_where_a_run_begins_and_ends_is_said(boundary: dict[str, Any], words: str) -> None:
    assert in_words(boundary) == f"---- {words} ----"


def test_a_server_s_death_is_an_event_like_a_worker_s() -> None:
    died = ServerEvent("dynamo_etcd", "etcd", "ServerDied", "running", "restarting", "exit:7", 7, "was killed", 0.2)
    assert in_words(server_record(died, 1.0)) == (
        "dynamo_etcd running -> restarting (ServerDied by exit:7: was killed, pid 7, next try 0.2 s)"
    )


def test_one_worker_s_events_say_where_its_runs_end(
    log: EventLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began, other = run("RunStarted", 9), record(DRAIN, S.READY, S.DRAINING, name="dynamo_Other")
    log.append([began, record(*DRAINED), other, run("RunEnded", 9), began, record(*DRAINED)])
    assert dynamo(monkeypatch, "events", "--worker", "VllmWorker", "-l", "2", "--json") == EXIT_OK
    assert [json.loads(line)["seq"] for line in capsys.readouterr().out.splitlines()] == [2, 4, 5, 6]
    assert dynamo(monkeypatch, "events", "--worker", "Nobody") == EXIT_BAD_INPUT


# --- one worker's life -------------------------------------------------------------------------------

STORY = (
    (DRAIN, S.READY, S.DRAINING, ["revoke 1f"]),
    (happened(K.PROCESS_EXITED, "exit:7", exit_code=0), S.DRAINING, S.EXITED, ["sweep", "forget"]),
)


def told(event: Transition, before: S, after: S, instructions: list[str], name: str = NAME) -> dict[str, Any]:
    """As the arbiter records an event, with what it did about that worker in the same step."""
    return {**record(event, before, after, name), "instructions": instructions}


def test_a_story_is_each_event_with_its_cause_and_what_was_done_about_it(
    log: EventLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log.append([told(*STORY[0]), told(*STORY[0], name=f"{NAME}_1"), told(*STORY[1])])
    for word in (NAME, "VllmWorker"):
        assert dynamo(monkeypatch, "events", "--story", word) == EXIT_OK
        lines = [
            line.split(maxsplit=2)[2] if line[0].isdigit() else line for line in capsys.readouterr().out.splitlines()
        ]
        assert lines == [
            f"{NAME} ready -> draining (DrainRequested by scale:ab12: scale -1)",
            "    -> revoke 1f",
            f"{NAME} draining -> exited (ProcessExited by exit:7: exit code 0)",
            "    -> sweep",
            "    -> forget",
        ]


def test_a_story_has_what_was_done_while_the_state_stayed_the_same(
    log: EventLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    aside = aside_record(Note(NAME, "VllmWorker", S.DRAINING, "RevokeFailed", "etcd:1f"), time_s=time.time())
    log.append([told(*STORY[0]), {**aside, "instructions": ["SIGTERM 7"]}])
    assert dynamo(monkeypatch, "events", "--story", NAME, "-l", "1") == EXIT_OK
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(f"{NAME} draining (RevokeFailed by etcd:1f)")
    assert second == "    -> SIGTERM 7"
    assert dynamo(monkeypatch, "events", "-l", "1") == EXIT_OK
    assert "DrainRequested" in capsys.readouterr().out


def test_a_line_of_all_events_has_no_room_for_what_was_done(
    log: EventLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log.append([told(*STORY[0])])
    assert dynamo(monkeypatch, "events") == EXIT_OK
    assert capsys.readouterr().out.rstrip().endswith("(DrainRequested by scale:ab12: scale -1)")


def test_a_story_from_before_instructions_were_recorded_is_its_events(
    log: EventLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log.append([record(*STORY[0][:3]), told(*STORY[1][:3], instructions=[])])
    assert dynamo(monkeypatch, "events", "--story", NAME) == EXIT_OK
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_story_as_json_is_the_records(
    log: EventLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log.append([told(*each) for each in STORY])
    assert dynamo(monkeypatch, "events", "--story", NAME, "--json") == EXIT_OK
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["instructions"] for each in records] == [["revoke 1f"], ["sweep", "forget"]]


def test_the_last_events_of_a_story(
    log: EventLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log.append([told(*each) for each in STORY])
    assert dynamo(monkeypatch, "events", "--story", NAME, "-l", "1") == EXIT_OK
    assert [line.strip() for line in capsys.readouterr().out.splitlines()[1:]] == ["-> sweep", "-> forget"]


def test_a_story_is_about_one_worker(
    log: EventLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two names would be a question that nobody can answer; one that is unknown lists those there are."""
    log.append([told(*STORY[0])])
    assert dynamo(monkeypatch, "events", "--story", NAME, "--worker", NAME) == EXIT_OK
    capsys.readouterr()
    assert dynamo(monkeypatch, "events", "--story", NAME, "--worker", "Other") == EXIT_BAD_INPUT
    assert f"--story {NAME} is about that worker alone; leave --worker Other out" in capsys.readouterr().err
    assert dynamo(monkeypatch, "events", "--story", "Other") == EXIT_BAD_INPUT
    assert f"no events of a worker named 'Other'; there are some of: {NAME}" in capsys.readouterr().err


# --- following ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def followed(*words: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "dynamo_local.cli.main", "events", "-f", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    ) as process:
        yield process
        process.kill()


@pytest.fixture
def following(log: EventLog) -> Iterator[subprocess.Popen[str]]:
    """`dynamo events -f -l 1 --worker VllmWorker`; one line of history."""
    log.append([record(DRAIN, S.READY, S.DRAINING) for _ in range(3)])
    with followed("-l", "1", "--worker", "VllmWorker", "--json") as process:
        yield process


def test_a_story_goes_on_as_events_come(log: EventLog) -> None:
    log.append([told(*STORY[0])])
    with followed("--story", NAME) as process:
        assert process.stdout is not None
        assert "DrainRequested" in process.stdout.readline()
        assert process.stdout.readline() == "    -> revoke 1f\n"
        log.append([told(*STORY[1], name=f"{NAME}_1"), told(*STORY[1])])
        assert f"{NAME} draining -> exited" in process.stdout.readline()
        assert process.stdout.readline() == "    -> sweep\n"
