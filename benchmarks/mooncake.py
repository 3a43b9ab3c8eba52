"""Mooncake's conversation trace: 12,031 real requests, with the identities of their 512-token blocks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import NamedTuple

CONVERSATION = Path(__file__).parent / "data" / "conversation_trace.jsonl.gz"
BLOCK_TOKENS = 512


class Row(NamedTuple):
    """One request. `hash_ids` name its blocks, each with all before it; the last one may not be full."""

    at_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def full_blocks(self) -> tuple[int, ...]:
        """Those that can be had again."""
        return self.hash_ids[: self.input_length // BLOCK_TOKENS]


def read_trace(path: Path = CONVERSATION, first: int | None = None) -> list[Row]:
    """The requests of a `.jsonl` or `.jsonl.gz` in Mooncake's format; the `first` so many, or all."""
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()[:first]
    rows = (json.loads(line) for line in lines)
    return [
        Row(row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(row["hash_ids"])) for row in rows
    ]
