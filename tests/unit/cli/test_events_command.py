"""`dynamo events`: what happened, in words."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.cli.events import in_words
from dynamo_local.core.lifecycle import (
    BackoffStarted,
    DrainDeadlinePassed,
    DrainRequested,
    Event,
    ProcessExited,
    Registered,
    Spawned,
)
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_NOT_RUNNING, EXIT_OK
from dynamo_local.serve.events import EventLog, event_log_path, record_of
from tests.fakes.scripted_arbiter import dynamo

NAME = "dynamo_VllmWorker"


def record(event: Event, before: S, after: S, name: str = NAME, time_s: float | None = None) -> dict[str, Any]:
    """As the supervisor makes it."""
    at_s = time.time() if time_s is None else time_s
    return record_of(event, watcher_name=name, component="VllmWorker", before=before, after=after, time_s=at_s)


DRAIN = DrainRequested(stimulus_id="scale:ab12", reason="scale -1")


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
            Spawned(stimulus_id="spawn", pid=7, pid_start_time=1.5),
            S.STARTING,
            S.STARTING,
            "starting (Spawned by spawn: pid 7)",
        ),
        (
            ProcessExited(stimulus_id="exit:7", exit_code=-signal.SIGKILL),
            S.READY,
            S.CRASHED,
            "ready -> crashed (ProcessExited by exit:7: killed by SIGKILL)",
        ),
        (
            ProcessExited(stimulus_id="exit:7", exit_code=0),
            S.DRAINING,
            S.EXITED,
            "draining -> exited (ProcessExited by exit:7: exit code 0)",
        ),
        (
            ProcessExited(stimulus_id="exit:7", exit_code=None),
            S.READY,
            S.CRASHED,
            "ready -> crashed (ProcessExited by exit:7)",
        ),
        (
            ProcessExited(stimulus_id="exit:7", exit_code=-40),
            S.READY,
            S.CRASHED,
            "ready -> crashed (ProcessExited by exit:7: killed by signal 40)",
        ),
        (
            Registered(stimulus_id="etcd:1f", lease="1f"),
            S.STARTING,
            S.READY,
            "starting -> ready (Registered by etcd:1f: lease 1f)",
        ),
        (
            DrainDeadlinePassed(stimulus_id="deadline", deadline_s=600.0, requests_cut=2),
            S.DRAINING,
            S.DRAIN_TIMED_OUT,
            "draining -> drain_timed_out (DrainDeadlinePassed by deadline: deadline 600 s, requests cut 2)",
        ),
        (
            BackoffStarted(stimulus_id="exit:7", delay_s=1.25),
            S.CRASHED,
            S.BACKING_OFF,
            "crashed -> backing_off (BackoffStarted by exit:7: delay 1.25 s)",
        ),
    ],
)
def test_an_event_is_told_in_words(event: Event, before: S, after: S, words: str) -> None:
    """State, event, cause and what belongs to it; nothing where nothing is known."""
    assert in_words(record(event, before, after)) == f"{NAME} {words}"


def test_events_are_shown_when_the_arbiter_is_gone(
    log: EventLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That is when people look. Those of another day say which."""
    log.append([record(DRAIN, S.READY, S.DRAINING, time_s=86_400.0 * 365), record(DRAIN, S.READY, S.DRAINING)])
    assert dynamo(monkeypatch, "events") == EXIT_OK
    old, new = capsys.readouterr().out.splitlines()
    told = r"dynamo_VllmWorker ready -> draining \(DrainRequested by scale:ab12: scale -1\)"
    assert re.fullmatch(r"197\d-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} " + told, old)
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} " + told, new)


def test_the_last_lines_of_one_worker(
    log: EventLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its full name or without the namespace; `-n` counts that worker's events."""
    log.append([record(DRAIN, S.READY, S.DRAINING, name=f"{NAME}_{n % 2}") for n in range(10)])
    for word in (f"{NAME}_1", "VllmWorker_1"):
        assert dynamo(monkeypatch, "events", "--worker", word, "-n", "3", "--json") == EXIT_OK
        assert [json.loads(line)["seq"] for line in capsys.readouterr().out.splitlines()] == [6, 8, 10]
    assert dynamo(monkeypatch, "events", "-n", "0") == EXIT_OK
    assert capsys.readouterr().out == ""


def test_an_unknown_worker_is_answered_with_those_there_are(
    log: EventLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Silence would look like a worker that nothing happened to."""
    log.append([record(DRAIN, S.READY, S.DRAINING)])
    assert dynamo(monkeypatch, "events", "--worker", "VlmWorker") == EXIT_BAD_INPUT
    assert "no events of a worker named 'VlmWorker'; there are some of: dynamo_VllmWorker" in capsys.readouterr().err


def test_a_namespace_without_events_says_where_it_looked(
    log: EventLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3, as for everything that never ran."""
    assert dynamo(monkeypatch, "events", "--namespace", "other") == EXIT_NOT_RUNNING
    assert "no events of namespace 'other' in " in capsys.readouterr().err


@pytest.fixture
def following(log: EventLog) -> Iterator[subprocess.Popen[str]]:
    """`dynamo events -f -n 1 --worker VllmWorker` in a process of its own; one line of history."""
    log.append([record(DRAIN, S.READY, S.DRAINING) for _ in range(3)])
    words = ["-f", "-n", "1", "--worker", "VllmWorker", "--json"]
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "dynamo_local.cli.main", "events", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    ) as process:
        yield process
        process.kill()


def test_follow_goes_on_until_ctrl_c(log: EventLog, following: subprocess.Popen[str]) -> None:
    """History once, then what comes, of that worker; Ctrl-C is no failure."""
    assert following.stdout is not None
    assert json.loads(following.stdout.readline())["seq"] == 3
    log.append([record(DRAIN, S.READY, S.DRAINING, name="dynamo_Other"), record(DRAIN, S.READY, S.DRAINING)])
    assert json.loads(following.stdout.readline())["seq"] == 5
    following.send_signal(signal.SIGINT)
    assert following.wait(30) == 0
    assert following.stdout.read() == ""
