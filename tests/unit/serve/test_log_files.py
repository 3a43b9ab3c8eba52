"""Log files: read by us, written by the processes alone."""

from __future__ import annotations

import os
from pathlib import Path

from dynamo_local.serve.logs import Interleaver, colour_of, rotate, set_aside, tail


def test_tail_gives_the_last_lines_of_a_large_file(tmp_path: Path) -> None:
    """A failing start shows the end of the worker's log, and must not read gigabytes for it."""
    path = tmp_path / "a.log"
    path.write_text("".join(f"line {n}\n" for n in range(50_000)))
    assert tail(path, 2) == ["line 49998", "line 49999"]
    assert tail(tmp_path / "missing.log") == []


def test_rotation_keeps_the_writers_descriptor_usable(tmp_path: Path) -> None:
    """The writer goes on in the same file; three old ones are kept."""
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
    """Nothing happens below the bound."""
    path = tmp_path / "a.log"
    assert not rotate(path)
    path.write_text("x")
    assert not rotate(path)


def test_a_run_begins_its_logs_anew_and_keeps_the_last_ones(tmp_path: Path) -> None:
    """The tail that a failed start shows is this run's."""
    path = tmp_path / "a.log"
    for run in range(5):
        set_aside(path)
        assert not path.exists()
        path.write_text(f"run {run}\n")
    assert (tmp_path / "a.log.1").read_text() == "run 3\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.log", "a.log.1", "a.log.2", "a.log.3"]


def test_followed_files_give_whole_lines_once_even_across_truncation(tmp_path: Path) -> None:
    """A half-written line waits for its end; a truncated file is read from its new start."""
    path = tmp_path / "a.log"
    path.write_text("old\n")
    followed = Interleaver(from_end=True)
    followed.watch("a", path)
    assert list(followed.poll()) == []
    with path.open("a") as file:
        file.write("one\ntw")
    assert list(followed.poll()) == [("a", "one")]
    with path.open("a") as file:
        file.write("o\n")
    assert list(followed.poll()) == [("a", "two")]
    path.write_text("new\n")
    assert list(followed.poll()) == [("a", "new")]


def test_colours_are_stable_for_a_set_of_names() -> None:
    """The same process keeps its colour, whatever order the lines come in."""
    names = ["b", "a", "c"]
    assert colour_of("a", names) == colour_of("a", reversed(names))
    assert len({colour_of(name, names) for name in names}) == 3
