"""A guardian ends a run, and writes that end."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.arbiter.event_log import event_log_path, read
from dynamo_local.arbiter.guarded_run import GuardedRun
from dynamo_local.circus_plugins.guardian import end_run
from dynamo_local.system.paths import Paths


@pytest.fixture
def guarded(tmp_path: Path) -> GuardedRun:
    """A run of which nothing lives any more."""
    paths = Paths.of("test", {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)})
    paths.prepare()
    where = (str(paths.runtime), str(paths.statefile), str(paths.logs))
    return GuardedRun("test", "01J", *where, arbiter_pid=4711, arbiter_start_time=1.0, keep=False)


def test_the_end_of_a_run_is_an_event_though_its_arbiter_could_not_write_it(guarded: GuardedRun) -> None:
    end_run(guarded)
    (ended,) = read(event_log_path(guarded.paths.logs))
    assert (ended["event"], ended["run_id"], ended["arbiter_pid"]) == ("RunEnded", "01J", 4711)
    assert not guarded.paths.runtime.exists()


def test_a_log_that_cannot_be_written_ends_the_run_all_the_same(
    guarded: GuardedRun, caplog: pytest.LogCaptureFixture
) -> None:
    event_log_path(guarded.paths.logs).mkdir()
    end_run(guarded)
    assert not guarded.paths.runtime.exists()
    assert "the end of the run is not in the event log" in caplog.text
