"""Columns come back as they were, and small ones are small."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.planner.records.ticks import packed, unpacked

WHOLE = st.integers(-(2**53), 2**53)
MEASURED = st.integers(-(10**12), 10**12).map(lambda n: n / 10**6)
ANY = st.floats(allow_nan=False)


@given(st.integers(0, 30).flatmap(lambda count: st.lists(_columns(count), max_size=4)))
def test_columns_come_back_as_they_were(columns: list[list[float]]) -> None:
    found = unpacked(packed(columns))
    assert found == columns
    assert [[type(value) for value in column] for column in found] == [[type(v) for v in column] for column in columns]


def _columns(count: int) -> st.SearchStrategy[list[float]]:
    def of(values: st.SearchStrategy[float]) -> st.SearchStrategy[list[float]]:
        return st.lists(values, min_size=count, max_size=count)

    return st.one_of(of(WHOLE), of(MEASURED), of(ANY))


@pytest.mark.parametrize(
    ("column", "most"),
    [
        ([0] * 4096, 100),
        (list(range(10**9, 10**9 + 4096)), 100),
        ([round(1_000_000.0 + n / 50, 4) for n in range(4096)], 100),
        ([n * 7919 % 251 for n in range(4096)], 4096 * 1.1),
        ([round(0.01 + (n * 7919 % 251) / 10**6, 6) for n in range(4096)], 4096 * 2.1),
    ],
    ids=["zeros", "numbers of passes", "times", "counts", "durations"],
)
def test_what_is_alike_takes_no_room(column: list[float], most: float) -> None:
    assert len(packed([column])) <= most


def test_what_is_no_column_is_refused() -> None:
    good = packed([[1, 2, 300], [0.5, 1 / 3, 7.0]])
    for spoilt in (good[:-1], good[:-20], good + b"\x00", b"\x04" + good[1:], b""):
        with pytest.raises((ValueError, zlib.error)):
            unpacked(spoilt)
