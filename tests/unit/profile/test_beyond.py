"""Tests what a first token takes beyond the engine's time, as a fixed part and one per token."""

from __future__ import annotations

import pytest

from dynamo_local.profile.document import read_document, write_document
from dynamo_local.profile.fit import beyond
from dynamo_local.profile.points import path_lengths
from dynamo_local.profile.summary import summary_lines
from tests.fakes.profile_documents import document, engine


@pytest.mark.parametrize(
    ("context", "apart", "lengths"),
    [
        (16_384, False, [128, 1024, 8192]),
        (16_384, True, [128, 512, 1024, 4096, 8192]),
        (1024, True, [128, 512]),
        (100, False, [50]),
    ],
)
def test_more_lengths_are_asked_over_http_where_a_hand_off_is_on_the_way(context, apart, lengths):
    assert path_lengths(context, apart=apart) == lengths


@pytest.mark.parametrize(
    ("points", "fixed_ms", "per_token_ms"),
    [
        ([(128, 3.128), (1024, 4.024), (8192, 11.192)], 3.0, 0.001),
        ([(128, 3.0), (1024, 2.0), (8192, 1.0)], None, 0.0),  # a hand-off never becomes shorter with its length
        ([(128, 4.0)], 4.0, 0.0),
        ([(128, 4.0), (128, 6.0)], 5.0, 0.0),
        ([(128, -1.0), (1024, -2.0)], 0.0, 0.0),
        ([], 0.0, 0.0),
    ],
)
def test_what_comes_on_top_is_a_fixed_part_and_one_per_token(points, fixed_ms, per_token_ms):
    found = beyond(points)
    assert found[1] == pytest.approx(per_token_ms, abs=1e-9)
    if fixed_ms is None:
        assert 1.0 < found[0] < 3.0
    else:
        assert found[0] == pytest.approx(fixed_ms)


def test_it_is_kept_and_told_with_the_hand_off_where_there_is_one(tmp_path):
    way = {"overhead_ms": 3.0, "per_token_ms": 0.002}
    write_document(tmp_path, document(beyond_engine=way, engines={"prefill": engine(), "decode": engine()}))
    kept = read_document(tmp_path)
    assert kept is not None
    assert kept.beyond_engine == way
    [line] = [line for line in summary_lines(kept) if line.startswith("beyond the engine")]
    assert "3.00 ms, and 2.000 ms for each 1,000 tokens of its prompt, hand-off included" in line
    assert not any(line.startswith("beyond the engine") for line in summary_lines(document()))
