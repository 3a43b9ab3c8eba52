"""The paged KV cache: blocks with reference counts, and prefix reuse of full blocks by content key. Pure.

A block is *used* (references > 0), *cached* (free, but its content can be had again; oldest goes first) or *blank*.
used + cached + blank = total, always.

Blocks that become reusable, or cease to be, can be recorded as events of a KV cache (`journal`); keys must then be the
block hashes of `kv_hashes`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from typing import cast

from dynamo_local.core.routing.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from dynamo_local.engines.sim.requests import Seq


class BlockPool:
    """`total` blocks, numbered from 0. Events are appended to `journal`, if there is one; its reader empties it."""

    __slots__ = ("_blank", "_by_key", "_cached", "_keys", "_references", "journal", "total")

    def __init__(self, total: int, journal: list[KvEvent] | None = None) -> None:
        self.total = total
        self.journal = journal
        self._references = [0] * total
        self._keys: list[Hashable | None] = [None] * total
        self._by_key: dict[Hashable, int] = {}
        self._blank = list(range(total - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that can be taken now: blank, or cached and unreferenced."""
        return len(self._blank) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that are held by somebody."""
        return self.total - self.free

    def match(self, keys: Sequence[Hashable], limit: int) -> list[int]:
        """The blocks that hold the longest run of `keys` from the first, at most `limit` of them. Changes nothing."""
        found: list[int] = []
        by_key = self._by_key
        for key in keys[:limit]:
            block = by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def can_take(self, matched: Sequence[int], new: int) -> bool:
        """Whether `new` blocks are free besides the matched ones (some of which may be free and cached themselves)."""
        free = len(self._blank) + len(self._cached)
        return free >= new and free - sum(1 for block in matched if not self._references[block]) >= new

    def share(self, matched: Iterable[int]) -> None:
        """One more reference to each."""
        references = self._references
        for block in matched:
            if not references[block]:
                del self._cached[block]
            references[block] += 1

    def take(self, count: int) -> list[int]:
        """So many blocks with one reference each: blank ones first, then the least recently used cached ones.

        The caller has asked `free` or `can_take` before; IndexError or KeyError otherwise.
        """
        blank = self._blank
        split = max(0, len(blank) - count)
        taken = blank[split:]
        del blank[split:]
        taken.reverse()
        if len(taken) < count:
            taken += self._evict(count - len(taken))
        references = self._references
        for block in taken:
            references[block] = 1
        return taken

    def _evict(self, count: int) -> list[int]:
        """So many cached blocks, without their content."""
        cached, keys, by_key = self._cached, self._keys, self._by_key
        taken = [cached.popitem(last=False)[0] for _ in range(count)]
        evicted: list[Hashable] = []
        for block in taken:
            key = keys[block]
            if key is not None:
                keys[block] = None
                del by_key[key]
                evicted.append(key)
        if evicted and self.journal is not None:
            self.journal.append(BlocksRemoved(cast(tuple[int, ...], tuple(evicted))))
        return taken

    def store(self, blocks: Sequence[int], keys: Sequence[Hashable], parent: Hashable | None = None) -> None:
        """Say what full blocks hold. Content that another block holds already stays with that one (as in vLLM).

        `parent` is the key of the block before them, None for the first of a sequence.
        """
        by_key, known = self._by_key, self._keys
        if self.journal is None:
            for block, key in zip(blocks, keys, strict=True):
                if known[block] is None and key not in by_key:
                    known[block] = key
                    by_key[key] = block
            return
        run: list[Hashable] = []
        run_parent = before = parent
        for block, key in zip(blocks, keys, strict=True):
            if known[block] is None and key not in by_key:
                known[block] = key
                by_key[key] = block
                if not run:
                    run_parent = before
                run.append(key)
            elif run:
                self._stored(run, run_parent)
                run = []
            before = key
        if run:
            self._stored(run, run_parent)

    def _stored(self, run: list[Hashable], parent: Hashable | None) -> None:
        if self.journal is not None:
            self.journal.append(BlocksStored(cast(tuple[int, ...], tuple(run)), cast("int | None", parent)))

    def clear(self) -> bool:
        """Forget all content; False, and nothing is changed, while blocks are in use (as vLLM's reset)."""
        if self.used:
            return False
        for block in self._cached:
            self._keys[block] = None
        self._blank += reversed(self._cached)
        self._cached.clear()
        self._by_key.clear()
        if self.journal is not None:
            self.journal.append(AllBlocksCleared())
        return True

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each. Last ones first, so that of a sequence's blocks the tail is evicted first."""
        references, keys, cached = self._references, self._keys, self._cached
        for block in reversed(blocks):
            count = references[block] - 1
            references[block] = count
            if not count:
                if keys[block] is None:
                    self._blank.append(block)
                else:
                    cached[block] = None


# --- The KV blocks of sequences: looked up in the cache, allocated, filled and freed.

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
