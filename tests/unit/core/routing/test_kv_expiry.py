"""Blocks that nobody uses are forgotten, where an expiry is set."""

from __future__ import annotations

from dynamo_local.core.routing.kv_index import KvIndex


def test_expired_blocks_are_forgotten_unless_matched() -> None:
    index = KvIndex(expiry_s=10.0)
    index.stored(1, [1, 2], now_s=0.0)
    index.stored(2, [8, 9], now_s=0.0)
    assert index.find_matches([1, 2], now_s=8.0) == {1: 2}

    index.stored(3, [5], now_s=15.0)

    assert index.find_matches([8, 9], now_s=15.0) == {}
    assert index.blocks(2) == frozenset()
    assert index.find_matches([1, 2], now_s=17.0) == {1: 2}
    assert index.find_matches([1, 2], now_s=27.5) == {}
    assert len(index) == 0
