"""The files by which a detached start is followed: whoever was killed meanwhile leaves none for ever."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dynamo_local.serve.progress import errors_beside, new_boot_report


@pytest.fixture
def left_behind(tmp_path: Path) -> Path:
    """A report whose reader was killed: nobody holds its lock."""
    fd, path = new_boot_report(tmp_path)
    os.write(fd, b"{}\n")
    errors_beside(path).touch()
    os.close(fd)
    return path


def test_what_a_killed_start_left_is_removed_by_the_next(left_behind: Path, tmp_path: Path) -> None:
    fd, path = new_boot_report(tmp_path)
    os.close(fd)

    assert list(tmp_path.iterdir()) == [path]


def test_a_report_that_is_read_stays(tmp_path: Path) -> None:
    """Two namespaces may be started at the same time: each reader holds a lock on its own."""
    first, path = new_boot_report(tmp_path)
    os.write(first, b"{}\n")
    second, other = new_boot_report(tmp_path)

    assert set(tmp_path.iterdir()) == {path, other}
    os.close(first)
    os.close(second)


def test_one_that_is_being_made_stays_for_a_while(tmp_path: Path) -> None:
    """Between its making and its lock it is empty, and young."""
    young, old = tmp_path / "boot-young.jsonl", tmp_path / "boot-old.jsonl"
    young.touch()
    old.touch()
    os.utime(old, (time.time() - 3600, time.time() - 3600))
    fd, path = new_boot_report(tmp_path)
    os.close(fd)

    assert set(tmp_path.iterdir()) == {young, path}
