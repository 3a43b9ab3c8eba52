"""Log files: read by us, written by the processes alone."""

from __future__ import annotations

import errno
import os
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO

import pytest

from dynamo_local.errors import BadInput
from dynamo_local.system.log_files import (
    KEPT_DAYS,
    Interleaver,
    colour_of,
    discard_old,
    kept_files,
    last_lines,
    lines_since,
    merged,
    rotate,
    rotate_all,
    set_aside,
    since,
    tail,
    timed,
    written_at,
)

NOW_S = 1.7e9


def test_tail_gives_the_last_lines_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"line {n}\n" for n in range(50_000)))
    assert tail(path, 2) == ["line 49998", "line 49999"]
    assert tail(tmp_path / "missing.log") == []


def test_rotation_keeps_the_writers_descriptor_usable(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "w", buffering=1) as writer:
        for round_ in range(5):
            writer.write(f"round {round_}\n" * 100)
            assert rotate(path, max_bytes=500, kept=3)
        writer.write("after\n")
    assert path.read_text() == "after\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.log", "a.log.1", "a.log.2", "a.log.3"]
    assert "round 4" in (tmp_path / "a.log.1").read_text()
    assert "round 2" in (tmp_path / "a.log.3").read_text()


def test_a_small_or_missing_file_is_not_rotated(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert not rotate(path)
    path.write_text("x")
    assert not rotate(path)


def test_what_was_logged_survives_a_restart_loop(tmp_path: Path) -> None:
    """The tail that a failed start shows is this run's; the first failure of many, which says why, is still there."""
    path = tmp_path / "a.log"
    for run in range(50):
        set_aside(path)
        assert not path.exists()
        path.write_text(f"run {run}\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.log", "a.log.1"]
    assert tail(path) == ["run 49"]
    assert last_lines(path, 100) == [f"run {run}" for run in range(50)]


def test_earlier_starts_are_kept_up_to_a_size(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for run in range(20):
        set_aside(path, max_bytes=30)
        path.write_text(f"run {run:02d} ...\n")
    assert [file.name for file in kept_files(path)] == ["a.log.3", "a.log.2", "a.log.1", "a.log"]
    assert last_lines(path, 100) == [f"run {run:02d} ..." for run in range(14, 20)]


def test_a_full_disk_keeps_no_writer_from_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.log"
    path.write_text("new\n")
    (tmp_path / "a.log.1").write_text("old\n")

    def full(source: BinaryIO, target: BinaryIO, length: int) -> None:
        target.write(source.read(2))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    set_aside(path)
    assert not path.exists()
    assert last_lines(path, 9) == ["old", "new"]


def test_logs_of_processes_that_are_long_gone_are_removed(tmp_path: Path) -> None:
    names = ("quiet.log", "quiet.log.1", "gone.log", "gone.log.2", "events.jsonl", "a.logic", "young.log")
    for name in names:
        (tmp_path / name).touch()
        age_days = 1.0 if name == "young.log" else KEPT_DAYS + 1.0
        os.utime(tmp_path / name, (NOW_S - age_days * 86_400.0,) * 2)
    discard_old(tmp_path, {tmp_path / "quiet.log"}, NOW_S)
    assert {path.name for path in tmp_path.iterdir()} == {"quiet.log", "events.jsonl", "a.logic", "young.log"}


def test_the_last_lines_reach_back_through_rotated_files(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for n, name in enumerate(("a.log.2", "a.log.1", "a.log")):
        (tmp_path / name).write_text("".join(f"line {n}.{m}\n" for m in range(3)))
    assert last_lines(path, 4) == ["line 1.2", "line 2.0", "line 2.1", "line 2.2"]
    assert last_lines(path, 0) == []
    assert last_lines(tmp_path / "none.log", 4) == []


def test_a_tail_may_be_longer_than_a_block(tmp_path: Path) -> None:
    """`dynamo logs -l 10000` gave as many lines as are in 64 KiB."""
    path = tmp_path / "a.log"
    path.write_text("".join(f"line {n}\n" for n in range(50_000)))
    assert tail(path, 20_000) == [f"line {n}" for n in range(30_000, 50_000)]


def test_lines_since_leaves_files_out_that_were_finished_before(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    (tmp_path / "a.log.1").write_text("old\n")
    os.utime(tmp_path / "a.log.1", (NOW_S, NOW_S))
    path.write_text("new\r\nnewer")
    assert list(lines_since(path, NOW_S + 1.0)) == ["new", "newer"]
    assert list(lines_since(path, NOW_S - 1.0)) == ["old", "new", "newer"]


def test_followed_files_give_whole_lines_once_even_across_truncation(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("old\n")
    files, followed = {"a": path}, Interleaver()
    followed.skip(files)
    assert followed.poll(files) == []
    with path.open("a") as file:
        file.write("one\ntw")
    assert followed.poll(files) == [("a", "one")]
    with path.open("a") as file:
        file.write("o\n")
    assert followed.poll(files) == [("a", "two")]
    path.write_text("new\n")
    assert followed.poll(files) == [("a", "new")]


def test_a_file_that_joins_later_is_shown_from_its_beginning(tmp_path: Path) -> None:
    """A worker that was added by `dynamo scale`: nobody has to register it. Of a run before, nothing is shown."""
    followed = Interleaver()
    old, new = tmp_path / "old.log", tmp_path / "new.log"
    old.write_text("yesterday\n")
    os.utime(old, (1e9, 1e9))
    new.write_text("up\n")
    assert followed.poll({"old": old, "new": new, "none": tmp_path / "none.log"}) == [("new", "up")]


def test_the_last_words_of_one_that_left_are_shown_and_its_successor_begins_anew(tmp_path: Path) -> None:
    """Its process writes after its entry is gone; the next one of its name writes into a file of its own."""
    path, followed = tmp_path / "a.log", Interleaver()
    path.write_text("a rather long line\n")
    followed.poll({"a": path})
    with path.open("a") as file:
        file.write("bye\n")
    assert followed.poll({}) == [("a", "bye")]
    set_aside(path)
    path.write_text("a line of the next process, longer than all of the first one's together\n")
    assert [line[:27] for _, line in followed.poll({"a": path})] == ["a line of the next process,"]


def test_a_file_that_cannot_be_rotated_keeps_no_other_from_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = tmp_path / "bad.log", tmp_path / "good.log"
    for path in (bad, good):
        path.write_text("x" * 100)
    (tmp_path / "bad.log.2").write_text("an old one")
    (tmp_path / "bad.log.3").mkdir()
    rotate_all([bad, good], max_bytes=10)
    assert (tmp_path / "good.log.1").read_text() == "x" * 100
    assert good.read_text() == ""
    assert "bad.log has outgrown 10 bytes and cannot be rotated" in caplog.text


def test_colours_are_stable_for_a_set_of_names() -> None:
    names = ["b", "a", "c"]
    assert colour_of("a", names) == colour_of("a", reversed(names))
    assert len({colour_of(name, names) for name in names}) == 3


# --- log times
# When a line was written, and lines of several processes by time.

NOW = datetime(2026, 3, 1, 14, 30).astimezone()
AT = datetime(2026, 3, 1, 14, 5, 21).astimezone()


@pytest.mark.parametrize(
    ("line", "at_s"),
    [
        ("2026-03-01 14:05:21,250 INFO dynamo_local.worker: ready", AT.timestamp() + 0.25),
        ("[26304] 2026/03/01 14:05:21.250000 [INF] Starting nats-server", AT.timestamp() + 0.25),
        ("INFO 03-01 14:05:21 [core.py:58] Initializing a V1 LLM engine", AT.timestamp()),
        ("(EngineCore_0 pid=7) WARNING 03-01 14:05:21 [core.py:58] slow", AT.timestamp()),
        ("[2026-03-01 14:05:21] server_args=ServerArgs(...)", AT.timestamp()),
        ('{"level":"warn","ts":"2026-03-01T14:05:21.250Z","caller":"auth/store.go:1220"}', 1772373921.25),
        ("\x1b[2m2026-03-01T14:05:21.250000Z\x1b[0m \x1b[32m INFO\x1b[0m frontend", 1772373921.25),
        ("2026-03-01T16:05:21+0200 INFO x", 1772373921.0),
    ],
)
def test_the_time_of_a_line_is_read_however_its_process_writes_it(line: str, at_s: float) -> None:
    assert written_at(line, NOW) == at_s


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Traceback (most recent call last):",
        "2026-02-31 14:05:21 x",
        "x" * 200 + "2026-03-01 14:05:21",
        "INFO 03-01",
    ],
)
def test_a_line_without_a_time_has_none(line: str) -> None:
    assert written_at(line, NOW) is None


def test_a_day_without_a_year_is_the_last_one_that_has_been() -> None:
    january = datetime(2027, 1, 2).astimezone()
    assert written_at("INFO 12-31 23:59:59 x", january) == datetime(2026, 12, 31, 23, 59, 59).astimezone().timestamp()


def test_a_line_without_a_time_belongs_to_the_one_before() -> None:
    lines = ["a banner", "2026-03-01 14:05:21 ERROR it failed", "Traceback", "2026-03-01 14:05:22 INFO on"]
    at_s = AT.timestamp()
    assert list(timed(lines, NOW, 7.0)) == list(zip([at_s, at_s, at_s, at_s + 1.0], lines, strict=True))
    assert list(timed(["no", "times"], NOW, 7.0)) == [(7.0, "no"), (7.0, "times")]


def test_lines_are_merged_by_time_and_each_process_s_own_keep_their_order() -> None:
    streams = {"a": [(1.0, "a1"), (4.0, "a2"), (2.0, "a3")], "b": [(3.0, "b1"), (5.0, "b2")]}
    assert list(merged(streams)) == [("a", "a1"), ("b", "b1"), ("a", "a2"), ("a", "a3"), ("b", "b2")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", NOW - timedelta(seconds=90)),
        ("10m", NOW - timedelta(minutes=10)),
        ("1h30m", NOW - timedelta(hours=1.5)),
        ("2d", NOW - timedelta(days=2)),
        ("14:05", datetime(2026, 3, 1, 14, 5).astimezone()),
        ("14:05:21", AT),
        ("23:00", datetime(2026, 2, 28, 23, 0).astimezone()),
        ("2026-03-01", datetime(2026, 3, 1).astimezone()),
        ("2026-03-01 14:05:21", AT),
        ("2026-03-01T14:05:21+00:00", datetime.fromisoformat("2026-03-01T14:05:21+00:00")),
    ],
)
def test_since_is_how_long_ago_or_when(text: str, expected: datetime) -> None:
    assert since(text, NOW) == expected.timestamp()


@pytest.mark.parametrize("text", ["", "10", "-10m", "10x", "nan", "25:00", "tomorrow", "2026-13-01", "1.5h"])
def test_since_refuses_what_it_does_not_understand_and_says_what_it_does(text: str) -> None:
    with pytest.raises(BadInput, match=r"--since .*: say how long ago .90s, 10m"):
        since(text, NOW)


def test_longer_ago_than_there_is_time_is_everything() -> None:
    assert since("9999999999d", NOW) == 0.0
