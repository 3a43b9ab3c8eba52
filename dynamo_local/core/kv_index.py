"""Which workers hold which KV blocks, and how far each matches a prompt. Pure; time is an argument.

A block's hash names the block and all before it (`kv_hashes`), so the index is flat: hash -> set of workers, as the
bits of one whole number. A question is a running intersection over the prompt's hashes: it ends where nobody is left,
and where the set changes is searched by halves, for it only ever shrinks. An inner block may be missing (evicted, or
its event is late): the blocks behind it do not count until it is back, and need not be told again then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, repeat
from operator import and_, or_

from dynamo_local.core.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent

_FIRST_LOOK = 16
_LOOK = 512
"""Blocks per step of a question: most prompts match nothing, and of a long one only the beginning."""


class KvIndex:
    """The blocks of all workers. With `expiry_s`, what was neither stored nor matched for so long is forgotten."""

    def __init__(self, expiry_s: float | None = None) -> None:
        self._expiry_s = expiry_s
        self._workers: dict[int, int] = {}
        """hash -> the bits of those that hold it; never 0."""
        self._held: dict[int, set[int]] = {}
        """worker -> hashes."""
        self._bit: dict[int, int] = {}
        self._of_bit: dict[int, int] = {}
        self._named: dict[int, tuple[int, ...]] = {}
        """bits -> workers: few sets are asked for, and those again and again."""
        self._used_at_s: OrderedDict[int, float] = OrderedDict()

    # --- questions -------------------------------------------------------------------------------

    def find_matches(self, block_hashes: Sequence[int], now_s: float = 0.0) -> dict[int, int]:
        """worker -> how many of these blocks it holds in a row from the first; workers without the first are left out.

        `now_s` matters with `expiry_s` only.
        """
        if not block_hashes or (holders := self._workers.get(block_hashes[0])) is None:
            return {}
        if self._expiry_s is not None:
            self._expire(now_s, self._expiry_s)
            if (holders := self._workers.get(block_hashes[0])) is None:
                return {}
        scores: dict[int, int] = {}
        count, begin, end = len(block_hashes), 0, _FIRST_LOOK
        while holders and begin < count:
            look = block_hashes[begin:end] if begin or end < count else block_hashes
            sets = list(accumulate(map(self._workers.get, look, repeat(0)), and_, initial=holders))
            holders = self._leavers(sets, begin, scores)
            begin, end = end, end + _LOOK
        if holders:
            scores.update(dict.fromkeys(self._names(holders), count))
        if self._expiry_s is not None and scores:
            self._touch(block_hashes[: max(scores.values())], now_s)
        return scores

    def _leavers(self, sets: list[int], begin: int, scores: dict[int, int]) -> int:
        """Note the scores of those who leave within `sets` (which only shrink); returns who is left at their end.

        `sets[i]` hold the blocks up to `begin + i`, that one excluded.
        """
        last = sets[-1]
        low, current = 0, sets[0]
        while current != last:
            high = len(sets) - 1
            while high - low > 1:
                middle = (low + high) // 2
                if sets[middle] == current:
                    low = middle
                else:
                    high = middle
            scores.update(dict.fromkeys(self._names(current & ~sets[high]), begin + low))
            low, current = high, sets[high]
        return last

    def _names(self, bits: int) -> tuple[int, ...]:
        names = self._named.get(bits)
        if names is None:
            rest, found = bits, []
            while rest:
                lowest = rest & -rest
                found.append(self._of_bit[lowest])
                rest ^= lowest
            if len(self._named) >= 4096:
                self._named.clear()
            names = self._named[bits] = tuple(found)
        return names

    def workers(self) -> frozenset[int]:
        """Those that hold a block, or held one."""
        return frozenset(self._held)

    def blocks(self, worker: int) -> frozenset[int]:
        """All hashes that it holds."""
        return frozenset(self._held.get(worker, ()))

    def count(self, worker: int) -> int:
        """How many blocks it holds."""
        return len(self._held.get(worker, ()))

    def __len__(self) -> int:
        """Different blocks, whoever holds them."""
        return len(self._workers)

    # --- events ----------------------------------------------------------------------------------

    def apply(self, worker: int, event: KvEvent, now_s: float = 0.0) -> None:
        """One event of a worker. Telling it twice changes nothing."""
        if isinstance(event, BlocksStored):
            self.stored(worker, event.block_hashes, now_s)
        elif isinstance(event, BlocksRemoved):
            self.removed(worker, event.block_hashes)
        elif isinstance(event, AllBlocksCleared):
            self.cleared(worker)

    def stored(self, worker: int, block_hashes: Collection[int], now_s: float = 0.0) -> None:
        """The worker holds these blocks now."""
        held = self._held.get(worker)
        if held is None:
            held = self._held[worker] = set()
        bit = self._bit_of(worker)
        workers = self._workers
        workers.update(zip(block_hashes, map(or_, map(workers.get, block_hashes, repeat(0)), repeat(bit)), strict=True))
        held.update(block_hashes)
        if self._expiry_s is not None:
            self._touch(block_hashes, now_s)
            self._expire(now_s, self._expiry_s)

    def removed(self, worker: int, block_hashes: Iterable[int]) -> None:
        """The worker holds these blocks no more; those that it did not hold are no error."""
        held = self._held.get(worker)
        if held:
            gone = held.intersection(block_hashes)
            held -= gone
            self._drop(gone, self._bit[worker])

    def cleared(self, worker: int) -> None:
        """The worker holds nothing."""
        held = self._held.get(worker)
        if held:
            self._drop(held, self._bit[worker])
            held.clear()

    def worker_gone(self, worker: int) -> None:
        """Forget the worker and all that it held; an unknown one is no error."""
        self.cleared(worker)
        self._held.pop(worker, None)
        bit = self._bit.pop(worker, None)
        if bit is not None:
            del self._of_bit[bit]
            self._named.clear()

    def replace(self, worker: int, block_hashes: Collection[int], now_s: float = 0.0) -> None:
        """The worker holds exactly these blocks: the whole truth, in place of what events said so far."""
        self.removed(worker, self.blocks(worker).difference(block_hashes))
        self.stored(worker, block_hashes, now_s)

    # --- inside ----------------------------------------------------------------------------------

    def _bit_of(self, worker: int) -> int:
        bit = self._bit.get(worker)
        if bit is None:
            bit = 1
            while bit in self._of_bit:  # the lowest that is free: sets stay small numbers, however many come and go
                bit <<= 1
            self._bit[worker] = bit
            self._of_bit[bit] = worker
        return bit

    def _drop(self, block_hashes: Iterable[int], bit: int) -> None:
        workers = self._workers
        for block in block_hashes:
            left = workers[block] & ~bit
            if left:
                workers[block] = left
            else:
                del workers[block]
                if self._expiry_s is not None:
                    self._used_at_s.pop(block, None)

    def _touch(self, block_hashes: Iterable[int], now_s: float) -> None:
        used = self._used_at_s
        for block in block_hashes:
            used[block] = now_s
            used.move_to_end(block)

    def _expire(self, now_s: float, expiry_s: float) -> None:
        used = self._used_at_s
        while used and next(iter(used.values())) < now_s - expiry_s:
            block, _ = used.popitem(last=False)
            for worker in self._names(self._workers.pop(block)):
                self._held[worker].discard(block)
