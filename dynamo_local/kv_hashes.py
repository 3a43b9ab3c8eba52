"""Hashes of KV blocks: one 64-bit number per full block, which names its tokens, all before them and the adapter.

The only thing that Router, engines and simulations must agree on, so it stands below all of them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

from xxhash import xxh3_64_intdigest


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Four bytes per token, little endian on every machine. Raises OverflowError for an id outside 0..2**32-1."""
    packed = array("I", token_ids)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def block_hashes(
    token_ids: Sequence[int], block_size: int, *, parent: int | None = None, lora_id: int = 0
) -> list[int]:
    """xxh3-64 of (parent's hash, the block's tokens), little endian, for each *full* block of `block_size` tokens.

    `parent` is the hash of the block before; a sequence's first block has `lora_id` (0: no adapter) in its place, so
    equal tokens under another adapter are other blocks. Raises OverflowError for an id outside 0..2**32-1.
    """
    packed = token_bytes(token_ids)
    stride = 4 * block_size
    hashes: list[int] = []
    value = lora_id if parent is None else parent
    for start in range(0, len(packed) - stride + 1, stride):
        value = xxh3_64_intdigest(value.to_bytes(8, "little") + packed[start : start + stride])
        hashes.append(value)
    return hashes
