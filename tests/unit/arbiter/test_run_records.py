"""Where runs begin and end, in the event log."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_local.arbiter.event_log import EventLog, EventRecorder, RunRecords, event_log_path, read
from tests.fakes.arbiter.told import Told


@pytest.fixture
def records(tmp_path: Path) -> RunRecords:
    """Those of an arbiter of namespace `ns`, which is we ourselves."""
    deployment: Any = SimpleNamespace(
        graph=SimpleNamespace(namespace="ns", target="g:F"), paths=SimpleNamespace(logs=tmp_path), run_id="01J"
    )
    return RunRecords(deployment, EventRecorder(EventLog(event_log_path(tmp_path)), lambda: 7.0, Told()), lambda: 7.0)


def written(folder: Path) -> list[tuple[str, int | None]]:
    """The event, and the pid of an arbiter that was killed before it."""
    return [(each["event"], each.get("killed_pid")) for each in read(event_log_path(folder))]


async def test_a_run_says_who_runs_it_and_how_it_ended(records: RunRecords, tmp_path: Path) -> None:
    await records.began(adopted=False)
    await records.ended("W died; the end of its log:\n  | boom", 1, ours=True)
    began, ended = read(event_log_path(tmp_path))
    assert (began["run_id"], began["arbiter_pid"], began["target"], began["time"]) == ("01J", os.getpid(), "g:F", 7.0)
    assert (ended["event"], ended["reason"], ended["exit_code"]) == ("RunEnded", "W died; the end of its log:", 1)


async def test_an_arbiter_that_wrote_no_end_is_named_by_the_next(records: RunRecords, tmp_path: Path) -> None:
    await records.began(adopted=False)
    await records.began(adopted=True)
    await records.ended("no etcd", 1, ours=False)
    await records.began(adopted=True)
    await records.ended("dynamo down", 0, ours=True)
    await records.began(adopted=False)
    assert written(tmp_path) == [
        ("RunStarted", None),
        ("RunAdopted", os.getpid()),
        ("RunNotAdopted", None),
        ("RunAdopted", None),
        ("RunEnded", None),
        ("RunStarted", None),
    ]
