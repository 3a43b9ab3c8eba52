"""The display of a run: lines of all present processes, rotation, and a terminal that goes away."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.arbiter.progress import (
    LOG_POLL_S,
    QUIET_LOG_POLL_S,
    ROTATE_EVERY_S,
    BootReport,
    LastingView,
    PlainView,
    Row,
    ShownLogs,
)
from dynamo_local.system.log_files import MAX_BYTES
from tests.fakes.arbiter.quick_clock import QuickClock

SOON_S = 10.0


class Screen:
    """A `View` that remembers lines, and with which names each was shown."""

    def __init__(self) -> None:
        self.wants_logs = True
        self.lines: list[tuple[str, str]] = []
        self.names: list[str] = []

    def log_line(self, name: str, line: str, names: Sequence[str]) -> None:
        self.lines.append((name, line))
        self.names = list(names)

    def rows(self, title: str, rows: Sequence[Row]) -> None: ...
    def event(self, text: str) -> None: ...
    def ready(self, facts: dict[str, Any]) -> None: ...
    def failed(self, message: str, exit_code: int) -> None: ...
    def close(self) -> None: ...


class House:
    """Log files in a folder, and the loop that shows them. `names` are the processes of now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = ["dynamo_A"]
        self.servers: list[str] = ["dynamo_etcd"]
        self.screen = Screen()
        self.clock = QuickClock()
        self.changing = False
        self.displayed = 0
        self.shown = ShownLogs(
            self.screen, self.clock, lambda: self.names, lambda: self.servers, self.file, self._display
        )

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def write(self, name: str, text: str) -> None:
        with self.file(name).open("a") as file:
            file.write(text)

    @contextlib.asynccontextmanager
    async def runs(self) -> AsyncIterator[None]:
        """The loop goes on meanwhile; that it must not fail, is seen at the end."""
        task = asyncio.ensure_future(self.shown.run(changing=lambda: self.changing))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON_S):
            while not done():
                await asyncio.sleep(0.001)

    def _display(self) -> None:
        self.displayed += 1


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


async def test_lines_of_a_worker_that_was_added_later_are_shown(house: House) -> None:
    async with house.runs():
        house.write("dynamo_A", "one\n")
        await house.until(lambda: house.screen.lines == [("dynamo_A", "one")])
        house.names.append("dynamo_A_1")
        house.write("dynamo_A_1", "two\nhalf")
        await house.until(lambda: len(house.screen.lines) == 2)
        house.write("dynamo_A_1", " a line\n")
        await house.until(lambda: len(house.screen.lines) == 3)
    assert house.screen.lines[1:] == [("dynamo_A_1", "two"), ("dynamo_A_1", "half a line")]
    assert house.screen.names == ["dynamo_A", "dynamo_A_1"]  # by which the colours are chosen


async def test_what_was_logged_before_an_adoption_is_not_shown(house: House) -> None:
    house.write("dynamo_A", "of before\n")
    house.shown.skip_to_end()
    async with house.runs():
        house.write("dynamo_A", "new\n")
        await house.until(lambda: bool(house.screen.lines))
    assert house.screen.lines == [("dynamo_A", "new")]


async def test_who_wants_no_logs_is_not_read_to_but_files_are_rotated_all_the_same(house: House) -> None:
    house.screen.wants_logs = False
    async with house.runs():
        await house.until(lambda: house.clock.at_s > 1.0)
        house.names.append("dynamo_A_1")
        house.write("dynamo_A_1", "a line\n")
        with house.file("dynamo_A_1").open("r+b") as file:
            file.truncate(MAX_BYTES)  # sparse: it costs no disk
        await house.until(lambda: house.file("dynamo_A_1").stat().st_size == 0)
    assert house.file("dynamo_A_1.log").with_name("dynamo_A_1.log.1").stat().st_size == MAX_BYTES
    assert house.clock.at_s > ROTATE_EVERY_S
    assert house.screen.lines == []


async def test_a_servers_lines_are_not_shown_but_its_file_is_rotated(house: House) -> None:
    async with house.runs():
        await house.until(lambda: house.clock.at_s > 1.0)
        house.write("dynamo_etcd", "a line of etcd's\n")
        house.write("dynamo_A", "a line of ours\n")
        with house.file("dynamo_etcd").open("r+b") as file:
            file.truncate(MAX_BYTES)
        await house.until(lambda: house.file("dynamo_etcd").stat().st_size == 0)
    assert house.screen.lines == [("dynamo_A", "a line of ours")]


async def test_the_display_is_kept_up_to_date_while_something_changes_and_only_then(house: House) -> None:
    house.changing = True
    async with house.runs():
        await house.until(lambda: house.displayed > 3)
        house.changing = False
        await asyncio.sleep(0)
        await house.until(lambda: house.clock.slept_s[-1] == QUIET_LOG_POLL_S)
        before = house.displayed
        at_s = house.clock.at_s
        await house.until(lambda: house.clock.at_s > at_s + 5 * QUIET_LOG_POLL_S)
        assert house.displayed == before


async def test_quiet_files_are_looked_at_less_often_until_a_line_comes(house: House) -> None:
    """66 files, seven times a second, for nobody. A sleep to a common point of time is up to half as long again."""
    async with house.runs():
        await house.until(lambda: house.clock.slept_s[-1:] == [pytest.approx(QUIET_LOG_POLL_S)])
        looks = len(house.clock.slept_s)
        house.write("dynamo_A", "one\n")
        await house.until(lambda: bool(house.screen.lines))
        await house.until(lambda: any(slept_s <= LOG_POLL_S * 1.51 for slept_s in house.clock.slept_s[looks:]))


async def test_a_file_that_is_not_there_or_not_ours_to_read_stops_nobody(house: House) -> None:
    house.names += ["dynamo_Gone", "dynamo_Folder"]
    house.file("dynamo_Folder").mkdir()
    async with house.runs():
        house.write("dynamo_A", "one\n")
        await house.until(lambda: house.screen.lines == [("dynamo_A", "one")])
        await house.until(lambda: house.clock.at_s > 2 * ROTATE_EVERY_S)


async def test_logs_of_workers_that_left_long_ago_go_and_those_of_the_run_stay(house: House) -> None:
    for name in ("dynamo_A", "dynamo_A_1", "dynamo_arbiter", "dynamo_guardian"):
        house.write(name, "long ago\n")
        os.utime(house.file(name), (0.0, 0.0))
    async with house.runs():
        await house.until(lambda: not house.file("dynamo_A_1").exists())
    assert {file.stem for file in house.folder.iterdir()} == {"dynamo_A", "dynamo_arbiter", "dynamo_guardian"}


SCRIPT = """
import sys
from pathlib import Path
from dynamo_local.arbiter.progress import open_view
view = open_view()
view.event("first"); sys.stdin.read()
for n in range(3):
    view.event("nobody reads this"); view.log_line("dynamo_W", "nor this", ["dynamo_W"])
Path(sys.argv[1]).write_text(f"wants logs: {view.wants_logs}")
view.failed("and not this", 1); view.close(); print("at the end"); sys.exit(7)
"""


class Full(io.StringIO):
    """Takes nothing."""

    def write(self, text: str) -> int:
        """As a full disk."""
        raise OSError(28, os.strerror(28))


def test_a_view_that_fails_is_not_tried_again() -> None:
    silenced: list[str] = []
    view = LastingView(PlainView(Full()), lambda: silenced.append("once"))
    assert view.wants_logs
    view.event("lost")
    view.rows("title", [Row("dynamo_W", "ready", "0", 1.0)])
    view.ready({"namespace": "dynamo"})
    view.close()
    assert not view.wants_logs
    assert silenced == ["once"]


def test_a_process_whose_output_nobody_reads_goes_on_and_ends_as_it_means_to(tmp_path: Path) -> None:
    told = tmp_path / "told"
    words = [sys.executable, "-c", SCRIPT, str(told)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n"
        process.stdout.close()
        process.stdin.close()
        assert process.wait(30) == 7
    assert told.read_text() == "wants logs: False"


def test_a_boot_report_is_read_to_its_end_and_then_nobody_reads_the_output(tmp_path: Path) -> None:
    """A detached run prints into its parent's memory while that waits; what came later would grow for ever."""
    silenced: list[str] = []
    report = BootReport(tmp_path / "report", lambda: silenced.append("once"))
    report.event("a start")
    assert silenced == []
    report.ready({"namespace": "dynamo"})
    report.event("of the run")
    report.close()
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "report").read_text().splitlines()]
    assert (kinds, silenced) == (["event", "ready"], ["once"])
