"""Tests what runs beside the real graphs: at the same time, after what it waits for, and heard of when it fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.tools.ci.side_by_side import NICER, main


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def meets(mine: Path, other: Path) -> list[str]:
    return python(
        "import pathlib, sys, time\n"
        f"pathlib.Path({str(mine)!r}).touch()\n"
        "deadline = time.monotonic() + 30\n"
        f"while not pathlib.Path({str(other)!r}).exists():\n"
        "    time.sleep(0.01)\n"
        "    if time.monotonic() > deadline: sys.exit('alone')\n"
    )


def test_lanes_run_at_the_same_time(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(["--lane", *meets(one, two), "--lane", *meets(two, one)]) == 0


def test_a_lane_goes_on_after_a_failure_and_the_failure_is_the_exit_code(tmp_path: Path) -> None:
    after = python(f"import pathlib; pathlib.Path({str(tmp_path / 'after')!r}).touch()")
    assert main(["--lane", *python("pass"), "--lane", *python("raise SystemExit(7)"), "--then", *after]) == 7
    assert (tmp_path / "after").exists()


def test_who_was_killed_has_failed() -> None:
    assert main(["--lane", *python("import os; os.kill(os.getpid(), 9)")]) == 128 + 9


def test_what_a_later_lane_wrote_is_shown_whole_and_each_command_has_its_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = tmp_path / "reports" / "a.times"
    words = ("--lane", *python("pass"), "--lane", *python("print('one\\ntwo')"))
    assert main(["--times", str(times), *words]) == 0
    shown = capsys.readouterr().out
    assert "\none\ntwo\n" in shown
    assert [line.split(" s  ")[1].split(":")[0] for line in times.read_text().splitlines()] == [
        "lane 1, exit code 0",
        "lane 2, exit code 0",
    ]
    assert shown.endswith(times.read_text())


def test_later_lanes_give_way(capsys: pytest.CaptureFixture[str]) -> None:
    says = python("import os; print('nice', os.nice(0))")
    assert main(["--lane", *python("pass"), "--lane", *says]) == 0
    assert f"nice {min(19, os.nice(0) + NICER)}\n" in capsys.readouterr().out


def test_nothing_to_run_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
