"""vLLM's KV events under our own hashes; without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo_local.core.routing.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from dynamo_local.engines.vllm.kv_events import KvBlocks, KvEventBridge
from dynamo_local.kv_hashes import block_hashes

TOKENS = list(range(100, 112))
OURS = block_hashes(TOKENS, 4)


def stored(theirs: Sequence[bytes], tokens: Sequence[int], parent: bytes | None = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(theirs),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(*theirs: bytes) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(theirs), "medium": "GPU"}


def test_blocks_are_named_as_everybody_here_names_them() -> None:
    """A chain in one event, and its end in a second one that names its parent by vLLM's hash."""
    blocks = KvBlocks()
    assert blocks.translate([stored([b"a", b"b"], TOKENS[:8])]) == [BlocksStored(tuple(OURS[:2]), None)]
    assert blocks.translate([stored([b"c"], TOKENS[8:], b"b")]) == [BlocksStored((OURS[2],), OURS[1])]
    assert blocks.translate([removed(b"c", b"unknown")]) == [BlocksRemoved((OURS[2],))]
    assert blocks.translate([{"type": "AllBlocksCleared"}, {"type": "SomethingNew"}]) == [AllBlocksCleared()]


def test_a_block_is_gone_with_its_last_copy() -> None:
    blocks = KvBlocks()
    assert blocks.translate([stored([b"a"], TOKENS[:4]), stored([b"a", b"b"], TOKENS[:8])]) == [
        BlocksStored((OURS[0],), None),
        BlocksStored((OURS[1],), OURS[0]),
    ]
    assert blocks.translate([removed(b"a")]) == []
    assert blocks.hit_rate(TOKENS, 4) == 8 / 12
    assert blocks.translate([removed(b"a")]) == [BlocksRemoved((OURS[0],))]
    assert blocks.hit_rate(TOKENS, 4) == 0.0


def test_what_tokens_do_not_name_is_left_out() -> None:
    blocks = KvBlocks()
    assert blocks.translate([stored([b"a"], TOKENS[:4], extra_keys=[("image", 0)])]) == []
    assert blocks.translate([stored([b"b"], TOKENS[4:8], b"a")]) == []
    assert blocks.translate([stored([b"c"], TOKENS[:4], medium="CPU")]) == []
    assert blocks.translate([stored([b"d"], TOKENS[:4], group_idx=1)]) == []
    lora = blocks.translate([stored([b"e"], TOKENS[:4], lora_id=7, extra_keys=[("adapter",)])])
    assert lora == [BlocksStored(tuple(block_hashes(TOKENS[:4], 4, lora_id=7)), None)]


class Published:
    """A publisher that remembers."""

    def __init__(self) -> None:
        self.events: list[KvEvent] = []

    def publish(self, events: Sequence[KvEvent]) -> None:
        self.events += events


def frames(seq: int, *events: dict[str, Any]) -> list[bytes]:
    return [b"", seq.to_bytes(8, "big"), msgspec.msgpack.encode([0.5, list(events), 0])]


def test_after_a_gap_nothing_counts_as_cached() -> None:
    published = Published()
    bridge = KvEventBridge("ipc:///nowhere", published)
    bridge.received(frames(0, stored([b"a"], TOKENS[:4])))
    bridge.received(frames(2, stored([b"b"], TOKENS[:4])))
    assert published.events == [BlocksStored((OURS[0],), None), AllBlocksCleared(), BlocksStored((OURS[0],), None)]
    assert bridge.blocks.hit_rate(TOKENS[:4], 4) == 1.0
