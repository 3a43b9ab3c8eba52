"""The history: levels, bounds, and files that are damaged or cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynamo_local.dashboard.history import (
    DAY_S,
    LEVELS,
    HistoryReader,
    HistoryUnreadable,
    HistoryWriter,
    Levels,
    level_for,
)

NOW_S = 1_795_000_000


def written(path: Path, seconds: int, *, since_s: int = NOW_S) -> HistoryWriter:
    writer = HistoryWriter(path)
    for n in range(seconds):
        writer.add(since_s + n, {"running": float(n), "ttft_p99": float(n % 10), "unknown": None})
    writer.flush(since_s + seconds)
    return writer


def test_coarser_steps_have_means_and_the_worst_latency() -> None:
    levels = Levels()
    found = [row for n in range(11) for row in levels.add(NOW_S + n, {"running": float(n), "ttft_p99": float(n)})]
    [tens] = [row for row in found if row[0] == 10]
    assert tens == (10, NOW_S, {"running": 4.5, "ttft_p99": 9.0})


def test_an_unknown_value_is_never_nought() -> None:
    levels = Levels()
    found = [row for n in range(11) for row in levels.add(NOW_S + n, {"a": None if n % 2 else 4.0, "b": None})]
    [(_, _, values)] = [row for row in found if row[0] == 10]
    assert values == {"a": 4.0}


@pytest.mark.parametrize(
    ("hours", "points", "step_s"),
    [(1 / 60, 60, 1), (1, 1_000, 1), (1, 300, 10), (24, 1_000, 60), (24, 8_000, 10), (24, 80_000, 1), (7 * 24, 10, 60)],
)
def test_the_coarsest_step_that_fills_the_points_is_read(hours: float, points: int, step_s: int) -> None:
    assert level_for(NOW_S - hours * 3600, NOW_S, points, NOW_S) == step_s


def test_a_month_ago_is_read_from_the_minutes() -> None:
    assert level_for(NOW_S - 30 * DAY_S, NOW_S - 30 * DAY_S + 60, 1_000, NOW_S) == 60


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    written(path, 30).close(NOW_S + 30)
    span = HistoryReader(path).span(NOW_S, NOW_S + 30, points=30, columns=["running", "absent"], now_s=NOW_S + 30)
    assert span.step_s == 1
    assert span.columns["t"] == list(range(NOW_S, NOW_S + 30))
    assert span.columns["running"] == list(map(float, range(30)))
    assert span.columns["absent"] == [None] * 30
    assert path.stat().st_mode & 0o077 == 0


def test_gaps_and_marks_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    writer = HistoryWriter(path)
    writer.flush(NOW_S, [{"t": NOW_S, "title": "</script>"}], [{"from": NOW_S - 9, "to": NOW_S, "why": "killed"}])
    reader = HistoryReader(path)
    span = reader.span(NOW_S - 5, NOW_S, points=1, columns=None, now_s=NOW_S)
    assert span.gaps == [{"from": NOW_S - 9, "to": NOW_S, "why": "killed"}]
    assert len(reader.marks(NOW_S - 1, NOW_S)) == 1
    writer.close(NOW_S)


def test_old_parts_fall_out(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    writer = written(path, 61)
    writer.flush(NOW_S + 2 * DAY_S)
    span = HistoryReader(path).span(NOW_S, NOW_S + 60, points=60, columns=None, now_s=NOW_S)
    assert span.columns["t"] == []
    coarse = HistoryReader(path).span(NOW_S, NOW_S + 60, points=5, columns=None, now_s=NOW_S)
    assert (coarse.step_s, len(coarse.columns["t"])) == (10, 6)
    writer.close(NOW_S + 2 * DAY_S)


def test_a_corrupt_file_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    path.write_bytes(b"SQLite format 3\0" + os.urandom(8_192))
    writer = written(path, 3)
    assert "put aside" in str(writer.note)
    assert path.with_name("history.sqlite.corrupt").exists()
    assert len(HistoryReader(path).span(NOW_S, NOW_S + 3, points=3, columns=None, now_s=NOW_S).columns["t"]) == 3
    writer.close(NOW_S + 3)


def test_a_full_file_costs_points_only(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    writer = HistoryWriter(path, bytes_max=48 * 1024)
    for n in range(3_000):
        writer.add(NOW_S + n, {f"column_{k}": 1.0 for k in range(20)})
        if n % 10 == 0:
            writer.flush(NOW_S + n)
    assert "points are lost" in str(writer.note)
    assert path.stat().st_size <= 48 * 1024
    writer.close(NOW_S + 3_000)


def test_a_folder_that_cannot_be_written_costs_points_only(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path / "absent" / "history.sqlite")
    writer.add(NOW_S, {"running": 1.0})
    writer.flush(NOW_S)
    assert "points are lost" in str(writer.note)
    (tmp_path / "absent").mkdir()
    writer.add(NOW_S + 1, {"running": 1.0})
    writer.flush(NOW_S + 1)
    assert writer.note is None
    writer.close(NOW_S + 1)


def test_a_file_that_is_no_history_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    path.write_bytes(b"not a database, and long enough to be looked at" * 100)
    with pytest.raises(HistoryUnreadable, match=r"history\.sqlite"):
        HistoryReader(path).span(NOW_S, NOW_S + 1, points=1, columns=None, now_s=NOW_S)


def test_levels_keep_a_day_a_week_and_a_month() -> None:
    assert {1: DAY_S, 10: 7 * DAY_S, 60: 31 * DAY_S} == LEVELS
