"""The stream: patches, replay, snapshots."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.dashboard.stream import CATCH_UP_MAX, RING_MAX, Stream, encoded, merge_patch, server_sent
from tests.drivers.page import patched

LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3)
OBJECTS = st.recursive(
    st.dictionaries(st.sampled_from("abc"), LEAVES, max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner | LEAVES | st.lists(LEAVES, max_size=2), max_size=3),
    max_leaves=8,
)


def known(value: Any) -> Any:
    """Without keys that are null: they are unknown, as keys that are absent."""
    if isinstance(value, dict):
        return {key: known(each) for key, each in value.items() if each is not None}
    return value


@given(OBJECTS, OBJECTS)
def test_a_patch_makes_the_next_state(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert known(patched(known(before), merge_patch(before, after))) == known(after)


@given(OBJECTS)
def test_nothing_new_is_no_patch(state: dict[str, Any]) -> None:
    assert merge_patch(state, state) == {}


def stream() -> Stream:
    return Stream("e1", lambda: {"points": []})


def test_a_reconnect_misses_nothing_and_gets_nothing_twice() -> None:
    events = stream()
    for n in range(5):
        events.put("point", {"t": n})
    found = events.since("e1-2")
    assert [name for name, _, _ in found] == ["e1-3", "e1-4", "e1-5"]
    assert events.since(found[-1][0]) == []


@pytest.mark.parametrize("after", [None, "", "e0-3", "e1-99", "e1-x", "e1--1", "e1-" + "9" * 40])
def test_an_unknown_id_gets_a_snapshot(after: str | None) -> None:
    events = stream()
    events.put_state({"a": 1})
    [(name, kind, data)] = events.since(after)
    assert (name, kind) == ("e1-1", "snapshot")
    assert json.loads(data) == {"state": {"a": 1}, "points": []}


def test_a_viewer_that_missed_too_much_gets_a_snapshot() -> None:
    events = stream()
    for n in range(RING_MAX + 10):
        events.put("point", {"t": n})
    assert events.since("e1-1")[0][1] == "snapshot"
    assert len(events.since(f"e1-{RING_MAX + 10 - CATCH_UP_MAX}")) == CATCH_UP_MAX


def test_the_same_state_is_no_event() -> None:
    events = stream()
    events.put_state({"a": 1})
    before = events.last_id
    events.put_state({"a": 1})
    assert events.last_id == before


async def test_a_viewer_is_woken_by_an_event() -> None:
    events = stream()
    waiting = asyncio.create_task(events.wait(events.last_id, 30.0))
    await asyncio.sleep(0)
    events.put("point", {})
    assert await waiting
    assert not await events.wait(events.last_id, 0.0)


@pytest.mark.parametrize("hostile", ["</script><script>", "a\nevent: state\ndata: {}", "\x1b[31m", "\u2028", "\ud800"])
def test_a_hostile_name_stays_a_name(hostile: str) -> None:
    block = server_sent([("e1-1", "mark", encoded({"title": hostile}))])
    head, data, rest = block.decode().partition("data: ")
    assert head == "id: e1-1\nevent: mark\n"
    assert data
    assert "<" not in rest
    assert rest.count("\n") == 2
    assert json.loads(rest) == {"title": hostile}


def test_a_number_that_json_does_not_have_is_unknown() -> None:
    assert json.loads(encoded({"a": float("nan"), "b": [float("inf")]})) == {"a": None, "b": [None]}
