"""What a worker says about its KV cache. Blocks are named by `kv_hashes.block_hashes`: each hash stands for a block and
all before it, so an event says everything about a block without those around it."""

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
