"""Log files: read by us, written by the processes alone."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import BinaryIO

import pytest

from dynamo_local.system.log_files import (
    KEPT_DAYS,
    Interleaver,
    colour_of,
    discard_old,
    kept_files,
    last_lines,
    lines_since,
    rotate,
    rotate_all,
    set_aside,
    tail,
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
