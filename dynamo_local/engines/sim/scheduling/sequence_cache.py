"""The KV blocks of sequences: looked up in the cache, allocated, filled and freed."""

from __future__ import annotations

from collections import deque

from dynamo_local.core.kv.events import KvEvent
from dynamo_local.engines.sim.scheduling.blocks import BlockPool
from dynamo_local.engines.sim.scheduling.requests import Seq

_HIT_RATE_REQUESTS = 1000
"""The prefix hit rate covers the last thousand requests, as vLLM's does."""


class SequenceCache:
    """One engine's KV cache, of `num_blocks` blocks of `block_size` tokens. `journal` gets its events."""

    def __init__(self, num_blocks: int, block_size: int, journal: list[KvEvent] | None = None) -> None:
        self.pool = BlockPool(num_blocks, journal)
        self.block_size = block_size
        self._queried: deque[tuple[int, int]] = deque()
        self._queried_tokens = self._hit_tokens = 0

    # --- prefix hits ---------------------------------------------------------------------------

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the cache, over the last thousand requests; 0.0 before the first."""
        return self._hit_tokens / self._queried_tokens if self._queried_tokens else 0.0

    def count_hits(self, tokens: int, hits: int) -> None:
        """A request with a prompt of `tokens` was admitted and found `hits` of them."""
        self._queried.append((tokens, hits))
        self._queried_tokens += tokens
        self._hit_tokens += hits
        if len(self._queried) > _HIT_RATE_REQUESTS:
            tokens, hits = self._queried.popleft()
            self._queried_tokens -= tokens
            self._hit_tokens -= hits

    # --- a sequence begins -----------------------------------------------------------------------

    def start(self, seq: Seq, budget: int) -> bool:
        """Give the first chunk, of at most `budget` tokens, its blocks, cached ones first; False: too few are free."""
        size = self.block_size
        if seq.generated and seq.request.output_keys is not None:
            seq.keys = [*seq.request.block_keys, *seq.request.output_keys(seq.total - 1)]
        # The last token is always computed: its logits are what the next token comes from.
        matched = self.pool.match(seq.keys, (seq.total - 1) // size)
        cached = len(matched) * size
        step = min(seq.total - cached, budget)
        if not self._take(seq, matched, -(-(cached + step) // size) - len(matched)):
            return False
        seq.computed, seq.stored, seq.step, seq.starts = cached, len(matched), step, True
        self.store(seq, cached + step)
        return True

    def start_pull(self, seq: Seq) -> int | None:
        """Allocate the whole prompt; how many of its tokens are to be pulled, or None where too few blocks are free."""
        size, prompt = self.block_size, seq.request.num_prompt_tokens
        matched = self.pool.match(seq.keys, prompt // size)
        if not self._take(seq, matched, -(-prompt // size) - len(matched)):
            return None
        seq.computed, seq.stored = min(len(matched) * size, prompt - 1), len(matched)
        return prompt - len(matched) * size

    def _take(self, seq: Seq, matched: list[int], need: int) -> bool:
        if not self.pool.can_take(matched, need):
            return False
        self.pool.share(matched)
        seq.blocks = matched + self.pool.take(need)
        return True

    # --- it goes on, and ends --------------------------------------------------------------------

    def store(self, seq: Seq, computed: int) -> None:
        """Tell the pool what this pass fills blocks with (as vLLM: at scheduling, so that neighbours share)."""
        full = min(computed // self.block_size, len(seq.keys))
        if full > seq.stored:
            parent = seq.keys[seq.stored - 1] if seq.stored else None
            self.pool.store(seq.blocks[seq.stored : full], seq.keys[seq.stored : full], parent)
            seq.stored = full

    def free(self, seq: Seq) -> None:
        """Give the blocks back; full ones of the output become reusable now, those of the prompt are already."""
        full = seq.computed // self.block_size
        if seq.request.output_keys is not None and seq.generated and full > seq.stored:
            every = [*seq.request.block_keys, *seq.request.output_keys(seq.computed)]
            keys = every[seq.stored : full]
            parent = every[seq.stored - 1] if seq.stored else None
            self.pool.store(seq.blocks[seq.stored : seq.stored + len(keys)], keys, parent)
        self.pool.release(seq.blocks)
        seq.blocks = []
