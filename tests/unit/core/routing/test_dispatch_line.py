"""In which order prefills are pulled."""

from __future__ import annotations

import pytest

from dynamo_local.core.routing.prompts import LATE_EVERY, PrefillLine, Turns


def test_what_can_keep_its_target_comes_first() -> None:
    line, turns = PrefillLine[str](), Turns()
    for name, start_by_s in (("late 1", 0.5), ("a", 2.0), ("late 2", 0.6), ("b", 2.0)):
        line.append(name, start_by_s)
    assert [line.popleft(turns, 1.0) for _ in range(4)] == ["a", "b", "late 1", "late 2"]
    assert not line


def test_without_targets_it_is_first_in_first_out() -> None:
    line, turns = PrefillLine[int](), Turns()
    for number in range(20):
        line.append(number, None)
    assert [line.popleft(turns, 1e9) for _ in range(20)] == list(range(20))


def test_an_entry_that_is_late_alone_is_not_put_behind_anything() -> None:
    line = PrefillLine[str]()
    line.append("late", 0.0)
    assert line.popleft(Turns(), 1.0) == "late"


def test_removal_from_either_line() -> None:
    line, turns = PrefillLine[str](), Turns()
    for name, start_by_s in (("late", 0.0), ("a", 2.0), ("b", 2.0)):
        line.append(name, start_by_s)
    assert line.popleft(turns, 1.0) == "a"
    assert line.late == 1
    line.remove("late")
    line.remove("b")
    assert len(line) == 0
    with pytest.raises(ValueError, match="not in"):
        line.remove("b")


def test_every_eighth_turn_is_for_what_is_late() -> None:
    line, turns = PrefillLine[str](), Turns()
    line.append("late", 0.0)
    order = []
    for number in range(LATE_EVERY + 1):
        line.append(f"r{number}", 100.0)
        order.append(line.popleft(turns, 1.0))
    assert order.index("late") == LATE_EVERY - 1
