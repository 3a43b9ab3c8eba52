"""Reports on disk: whole, the last ones kept, on a schedule and at the end, by a process of their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_local.arbiter import planner_report_page, planner_report_schedule
from dynamo_local.arbiter.planner_report_page import write_next, write_report
from dynamo_local.arbiter.planner_report_schedule import ReportSchedule, reports_folder
from dynamo_local.errors import BadInput, NotRunning
from dynamo_local.planner.records.decision_log import DecisionLog, decision_log_path
from tests.drivers.served import auntil
from tests.fakes.arbiter.hand_clock import HandClock
from tests.fakes.planner.logged_lines import BEGAN_S, WINDOW_S, line


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Three decisions."""
    path = decision_log_path(tmp_path)
    DecisionLog(path).append({**line(n), "seq": n} for n in (1, 2, 3))
    return path


def test_a_report_is_of_the_decisions_since_then_and_replaces_an_older_one(log: Path, tmp_path: Path) -> None:
    to = tmp_path / "r.html"
    assert write_report(log, to, title="T") == 3
    assert write_report(log, to, since_s=BEGAN_S + 2 * WINDOW_S, title="T") == 2
    assert "of these 0 with a step" in to.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"decisions.jsonl", "r.html"}


def test_without_decisions_there_is_nothing_to_report(log: Path, tmp_path: Path) -> None:
    with pytest.raises(NotRunning, match="no decision after"):
        write_report(log, tmp_path / "r.html", since_s=BEGAN_S * 2, title="T")
    with pytest.raises(NotRunning):
        write_report(tmp_path / "none.jsonl", tmp_path / "r.html", title="T")
    assert not (tmp_path / "r.html").exists()


def test_a_file_that_cannot_be_written_is_named(log: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be written"):
        write_report(log, tmp_path / "no" / "r.html", title="T")


@pytest.mark.full
def test_rotated_logs_are_read_oldest_first(tmp_path: Path) -> None:
    path = decision_log_path(tmp_path)
    log = DecisionLog(path, max_bytes=6000)
    for n in range(1, 8):
        log.append([{**line(n), "seq": n}])
    assert path.with_name("decisions.jsonl.1").exists()
    assert write_report(path, tmp_path / "r.html", title="T") > 2


@pytest.mark.full
def test_only_our_oldest_reports_go(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_report_page, "REPORTS_KEPT", 2)
    folder = reports_folder(tmp_path)
    folder.mkdir()
    (folder / "mine.html").write_text("a user's own")
    (folder / ".planner_report_20260101T000000Z.html.77").write_text("its process was killed")
    for hour in range(4):
        (folder / f"planner_report_20260101T0{hour}0000Z.html").write_text("old")
    path = write_next(log, folder, since_s=0.0, title="T")
    assert path is not None
    names = {each.name for each in folder.iterdir()}
    assert names == {"mine.html", "planner_report_20260101T030000Z.html", path.name}
    assert write_next(log, folder, since_s=BEGAN_S * 2, title="T") is None


class Planner:
    """A planner whose reports are scheduled on a clock of our own."""

    def __init__(self, folder: Path, hours: float | None = 2.0) -> None:
        self.clock = HandClock()
        self.hours = hours
        self.told: list[str] = []
        self.waited = 0
        self.schedule = ReportSchedule(
            "dynamo", folder, self.clock, hours=lambda: self.hours, written=self.written, tell=self.told.append
        )

    async def written(self) -> None:
        self.waited += 1

    @property
    def reports(self) -> int:
        folder = self.schedule.folder
        return len(list(folder.iterdir())) if folder.is_dir() else 0


@pytest.fixture
def planner(log: Path, tmp_path: Path) -> Planner:
    """Its decisions are later than its start."""
    found = Planner(tmp_path)
    found.clock.wall_s = lambda: BEGAN_S + found.clock.at_s  # type: ignore[method-assign]
    return found


@pytest.mark.full
async def test_a_report_is_written_when_the_hours_are_over_and_one_at_the_end(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner_report_schedule, "LEAVING_S", planner_report_schedule.DEADLINE_S)  # on a busy machine
    planner.schedule.began()
    planner.clock.at_s += 7199.0
    await planner.schedule.look()
    assert planner.reports == 0
    planner.clock.at_s += 1.0
    await planner.schedule.look()
    assert (planner.reports, planner.told) == (1, [])
    await planner.schedule.look()
    assert planner.reports == 1
    planner.clock.at_s -= 7200.0  # so that there are decisions since the last one
    planner.schedule.began()
    planner.schedule.ended()
    await planner.schedule.close()
    assert (planner.reports, planner.waited, planner.told) == (2, 2, [])


async def test_without_an_interval_nothing_is_written(planner: Planner) -> None:
    planner.hours = None
    planner.schedule.began()
    planner.clock.at_s += 1e6
    await planner.schedule.look()
    planner.schedule.ended()
    await planner.schedule.close()
    assert (planner.reports, planner.told) == (0, [])


@pytest.mark.full
async def test_an_interval_that_is_changed_counts_at_once(planner: Planner) -> None:
    planner.schedule.began()
    planner.clock.at_s += 3600.0
    await planner.schedule.look()
    assert planner.reports == 0
    planner.hours = 1.0
    await planner.schedule.look()
    assert planner.reports == 1


async def test_a_report_that_cannot_be_written_is_told(planner: Planner) -> None:
    planner.schedule.folder.write_text("a file is in its place")
    planner.schedule.began()
    planner.schedule.ended()
    await asyncio.wait_for(planner.schedule.close(), 60)
    await auntil(lambda: bool(planner.told), what=lambda: planner.told)
    assert "cannot be made" in planner.told[0]


def test_the_arbiter_loads_nothing_of_what_writes_pages() -> None:
    code = "import sys, dynamo_local.arbiter.composition; print({'jinja2', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
