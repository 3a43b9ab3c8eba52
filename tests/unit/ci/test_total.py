"""The last line of `.ci/run`: what CI and people read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.ci.total import main

REPORT = '<testsuites><testsuite tests="{0}" failures="{1}" errors="{2}" skipped="{3}" time="1.5"/></testsuites>'

BROKEN = (
    '<testsuites><testsuite tests="2" failures="1" errors="0" skipped="0" time="1.5"><testcase classname="tests.unit.a"'
    ' name="test_fine"/><testcase classname="tests.unit.a" name="test_bad"><failure message="assert 1 == 2">line 3'
    "\nassert 1 == 2</failure></testcase></testsuite></testsuites>"
)


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """A run of ten tests that all passed but one, which was skipped."""
    (tmp_path / "a.xml").write_text(REPORT.format(10, 0, 0, 1))
    return tmp_path


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_runs_are_added_up(reports: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (reports / "b.xml").write_text(REPORT.format(5, 2, 1, 0))
    assert main([str(reports), "1", "61.25"]) == 1
    assert last_line(capsys) == "=== 2 failed, 11 passed, 1 skipped, 1 error in 61.25s (0:01:01) ==="


def test_a_failure_that_is_no_test_is_an_error(reports: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A lint that failed, or an environment that could not be made: the line must not say that all is well."""
    assert main([str(reports), "1", "3"]) == 1
    assert last_line(capsys) == "=== 9 passed, 1 skipped, 1 error in 3.00s (0:00:03) ==="


def test_failed_tests_are_named_at_the_end(reports: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (reports / "b.xml").write_text(BROKEN)
    assert main([str(reports), "1", "3"]) == 1
    *_, named, line, reason, total = capsys.readouterr().out.splitlines()
    assert named == "failure in b: tests.unit.a::test_bad"
    assert [line.strip(), reason.strip()] == ["line 3", "assert 1 == 2"]
    assert total == "=== 1 failed, 10 passed, 1 skipped in 3.00s (0:00:03) ==="


def test_nothing_that_ran_is_not_taken_for_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "0", "3"]) == 1
    assert last_line(capsys) == "=== no tests ran in 3.00s (0:00:03) ==="
