"""A worker's reports about its KV cache. `kv_hashes.block_hashes` names the blocks: each hash stands for a block and
all before it. So an event is complete without the blocks around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class BlocksStored(NamedTuple):
    """Blocks that follow each other are cached now. `parent` is the hash of the block before them; None: the root."""

    block_hashes: tuple[int, ...]
    parent: int | None = None


class BlocksRemoved(NamedTuple):
    """Blocks were evicted, in any order."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole cache was emptied."""


KvEvent = BlocksStored | BlocksRemoved | AllBlocksCleared
