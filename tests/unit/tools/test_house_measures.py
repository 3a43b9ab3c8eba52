"""Tests what `tests/tools/house.py` counts."""

from __future__ import annotations

from pathlib import Path

from tests.tools import house
from tests.tools.pages import ROOT


def test_lines_of_code_hold_no_comment_and_no_docstring(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""Text.\n\nMore.\n"""\n\n# why\nX = (\n    1,\n)  # a\n\ndef f() -> None:\n    """Text."""\n')
    assert house.code_lines(path) == 4


def test_circles_are_found() -> None:
    assert house.circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


def test_a_way_counts_modules_once_and_changes_of_package_each_time() -> None:
    assert house.way(["cli.main:main", "arbiter.x:f", "cli.main:g", "cli.other"]) == (3, 2)


def test_every_waypoint_is_there() -> None:
    assert list(house.missing_waypoints(ROOT)) == []
