"""Hashes of KV blocks: what every process must agree on."""

from __future__ import annotations

import struct

import pytest
from xxhash import xxh3_64_intdigest

from dynamo_local.kv_hashes import block_hashes

TOKENS = [432, 265, 251, 234, 673, 654]


def test_hashes_are_those_of_every_release() -> None:
    assert block_hashes(TOKENS, 2) == [10002850765395953458, 7512002790467179345, 11891079472256123291]


def test_a_hash_chains_little_endian_tokens_to_the_hash_before() -> None:
    first = xxh3_64_intdigest(struct.pack("<Q2I", 7, 432, 265))

    assert block_hashes(TOKENS[:4], 2, lora_id=7) == [first, xxh3_64_intdigest(struct.pack("<Q2I", first, 251, 234))]


def test_only_full_blocks_count() -> None:
    assert block_hashes(TOKENS[:5], 2) == block_hashes(TOKENS[:4], 2)
    assert block_hashes(TOKENS[:1], 2) == block_hashes([], 2) == []


def test_a_chain_goes_on_from_a_parent() -> None:
    """Hashing in parts gives what hashing at once gives."""
    whole = block_hashes(TOKENS, 2)

    assert block_hashes(TOKENS[2:], 2, parent=whole[0]) == whole[1:]


def test_same_tokens_behind_others_or_under_another_adapter_are_other_blocks() -> None:
    hashes = block_hashes([1, 2, 1, 2], 2)

    assert hashes[0] != hashes[1]
    assert set(hashes).isdisjoint(block_hashes([1, 2, 1, 2], 2, lora_id=1))


def test_what_is_no_token_id_is_refused() -> None:
    with pytest.raises(OverflowError):
        block_hashes([-1], 1)
