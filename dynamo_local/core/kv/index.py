"""Which workers hold which KV blocks, and how far each matches a prompt. Pure; time is an argument.

A block's hash names the block and all before it (`kv_hashes`), so equal hashes mean equal prompts up to there. Blocks
that follow each other and have the same holders are one *run*; holders are the bits of one whole number. A question
goes from run to run, not from block to block: where its hash at a run's end is the run's last one, all between are
equal, too; else the place where they part is searched by halves. An event that concerns a part of a run splits it.
Any block may be missing (evicted within, or its event is late): what is behind it does not count until it is back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import repeat

from dynamo_local.core.kv.events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent

_NAMED_MAX = 4096


class _Run:
    """Blocks that follow each other, held by the same workers (never by none)."""

    __slots__ = ("blocks", "holders")

    def __init__(self, blocks: list[int], holders: int) -> None:
        self.blocks = blocks
        self.holders = holders


class KvIndex:
    """The blocks of all workers. With `expiry_s`, runs neither stored nor matched for so long are forgotten."""

    def __init__(self, expiry_s: float | None = None) -> None:
        self._expiry_s = expiry_s
        self._run_of: dict[int, _Run] = {}
        self._runs: dict[_Run, float] = {} if expiry_s is None else OrderedDict()
        """All runs and, with an expiry, when each was used last: the longest unused first."""
        self._bit: dict[int, int] = {}
        self._of_bit: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._named: dict[int, tuple[int, ...]] = {}
        """bits -> workers: few sets are asked for, and those again and again."""

    # --- questions -------------------------------------------------------------------------------

    def find_matches(self, block_hashes: Sequence[int], now_s: float = 0.0) -> dict[int, int]:
        """worker -> how many of these blocks it holds in a row from the first; workers without the first are left out.

        `now_s` matters with `expiry_s` only.
        """
        if self._expiry_s is not None:
            self._expire(now_s, self._expiry_s)
        scores: dict[int, int] = {}
        run_of, count = self._run_of, len(block_hashes)
        holders, at = -1, 0
        while at < count:
            run = run_of.get(block_hashes[at])
            if run is None:
                break
            left = holders & run.holders
            if left != holders:
                if at:
                    scores.update(dict.fromkeys(self._names(holders & ~left), at))
                    if not left:
                        return scores
                holders = left
            if self._expiry_s is not None:
                self._touch(run, now_s)
            at += self._common(run.blocks, block_hashes, at)
        if at:
            scores.update(dict.fromkeys(self._names(holders), at))
        return scores

    @staticmethod
    def _common(blocks: list[int], block_hashes: Sequence[int], at: int) -> int:
        """How many blocks the run and the prompt from `at` have in common: at least one."""
        first = 0 if blocks[0] == block_hashes[at] else blocks.index(block_hashes[at])
        high = min(len(blocks) - first, len(block_hashes) - at)
        if blocks[first + high - 1] == block_hashes[at + high - 1]:
            return high
        low = 1
        while high - low > 1:
            middle = (low + high) // 2
            if blocks[first + middle - 1] == block_hashes[at + middle - 1]:
                low = middle
            else:
                high = middle
        return low

    def _names(self, bits: int) -> tuple[int, ...]:
        names = self._named.get(bits)
        if names is None:
            rest, found = bits, []
            while rest:
                lowest = rest & -rest
                found.append(self._of_bit[lowest])
                rest ^= lowest
            if len(self._named) >= _NAMED_MAX:
                self._named.clear()
            names = self._named[bits] = tuple(found)
        return names

    def blocks(self, worker: int) -> frozenset[int]:
        """All hashes that it holds."""
        bit = self._bit.get(worker, 0)
        return frozenset(block for run in self._runs if run.holders & bit for block in run.blocks)

    def count(self, worker: int) -> int:
        """How many blocks it holds."""
        return self._counts.get(worker, 0)

    def __len__(self) -> int:
        """Different blocks, whoever holds them."""
        return len(self._run_of)

    # --- events ----------------------------------------------------------------------------------

    def apply(self, worker: int, event: KvEvent, now_s: float = 0.0) -> None:
        """One event of a worker. Telling it twice changes nothing."""
        if isinstance(event, BlocksStored):
            self.stored(worker, event.block_hashes, event.parent, now_s)
        elif isinstance(event, BlocksRemoved):
            self.removed(worker, event.block_hashes)
        elif isinstance(event, AllBlocksCleared):
            self.cleared(worker)

    def stored(self, worker: int, block_hashes: Sequence[int], parent: int | None = None, now_s: float = 0.0) -> None:
        """The worker holds these blocks now, which follow each other; `parent` is the one before, as far as known."""
        bit = self._bit.get(worker) or self._new_bit(worker)
        run_of, begin, count = self._run_of, 0, len(block_hashes)
        while begin < count:
            run = run_of.get(block_hashes[begin])
            if run is not None:
                end = begin + self._common(run.blocks, block_hashes, begin)
                self._hold(worker, bit, run, block_hashes[begin], end - begin, now_s)
            else:
                part = block_hashes[begin:] if begin else block_hashes
                end = count
                if not run_of.keys().isdisjoint(part):
                    end = next(n for n in range(begin + 1, count) if block_hashes[n] in run_of)
                    part = block_hashes[begin:end]
                self._append(worker, bit, part, block_hashes[begin - 1] if begin else parent, now_s)
            begin = end
        if self._expiry_s is not None:
            self._expire(now_s, self._expiry_s)

    def removed(self, worker: int, block_hashes: Iterable[int]) -> None:
        """The worker holds these blocks no more; those that it did not hold are no error."""
        bit = self._bit.get(worker)
        if bit is None:
            return
        run_of = self._run_of
        parts: dict[_Run, set[int]] = {}
        for block in block_hashes:
            run = run_of.get(block)
            if run is not None and run.holders & bit:
                parts.setdefault(run, set()).add(block)
        for run, gone in parts.items():
            self._counts[worker] -= len(gone)
            if len(gone) == len(run.blocks):
                self._release(run, bit)
                continue
            for part in self._split(run, _pieces(run.blocks, gone)):
                if part.blocks[0] in gone:
                    self._release(part, bit)

    def cleared(self, worker: int) -> None:
        """The worker holds nothing."""
        if self._counts.get(worker):
            bit = self._bit[worker]
            for run in [run for run in self._runs if run.holders & bit]:
                self._release(run, bit)
            self._counts[worker] = 0

    def worker_gone(self, worker: int) -> None:
        """Forget the worker and all that it held; an unknown one is no error."""
        self.cleared(worker)
        bit = self._bit.pop(worker, None)
        if bit is not None:
            del self._of_bit[bit]
            del self._counts[worker]
            self._named.clear()

    def replace(self, worker: int, runs: Iterable[Sequence[int]], now_s: float = 0.0) -> None:
        """The worker holds exactly these runs of blocks: the whole truth, in place of what events said so far."""
        runs = list(runs)
        self.removed(worker, self.blocks(worker).difference(*runs))
        for run in runs:
            self.stored(worker, run, None, now_s)

    # --- inside ----------------------------------------------------------------------------------

    def _new_bit(self, worker: int) -> int:
        bit = 1
        while bit in self._of_bit:  # the lowest that is free: sets stay small numbers, however many come and go
            bit <<= 1
        self._bit[worker] = bit
        self._of_bit[bit] = worker
        self._counts[worker] = 0
        return bit

    def _append(self, worker: int, bit: int, blocks: Sequence[int], parent: int | None, now_s: float) -> None:
        """Blocks that nobody holds: they make the run that ends in `parent` longer, if the worker alone holds that."""
        run = None if parent is None else self._run_of.get(parent)
        if run is not None and run.holders == bit and run.blocks[-1] == parent:
            run.blocks.extend(blocks)
        else:
            run = _Run(list(blocks), bit)
            self._runs[run] = now_s
        self._run_of.update(zip(blocks, repeat(run)))
        self._counts[worker] += len(blocks)
        if self._expiry_s is not None:
            self._touch(run, now_s)

    def _hold(self, worker: int, bit: int, run: _Run, block: int, length: int, now_s: float) -> None:
        """So many blocks of one run, from that one: all of it or a part."""
        if not run.holders & bit:
            if length < len(run.blocks):
                first = 0 if run.blocks[0] == block else run.blocks.index(block)
                run = self._split(run, [first, first + length])[1 if first else 0]
            run.holders |= bit
            self._counts[worker] += length
        if self._expiry_s is not None:
            self._touch(run, now_s)

    def _split(self, run: _Run, cuts: Sequence[int]) -> list[_Run]:
        """The run's parts: `cuts` are where one begins or ends. The first keeps the object."""
        blocks = run.blocks
        places = [cut for cut in cuts if 0 < cut < len(blocks)]
        parts = [run]
        for begin, end in zip(places, [*places[1:], len(blocks)], strict=True):
            part = _Run(blocks[begin:end], run.holders)
            self._run_of.update(zip(part.blocks, repeat(part)))
            self._runs[part] = self._runs[run]
            if isinstance(self._runs, OrderedDict):
                self._runs.move_to_end(part, last=False)  # as old as the whole; at worst it goes a little early
            parts.append(part)
        if places:
            del blocks[places[0] :]
        return parts

    def _release(self, run: _Run, bit: int) -> None:
        """One holder less; a run without one is forgotten."""
        run.holders &= ~bit
        if not run.holders:
            del self._runs[run]
            for block in run.blocks:
                self._run_of.pop(block, None)

    def _touch(self, run: _Run, now_s: float) -> None:
        self._runs[run] = now_s
        if isinstance(self._runs, OrderedDict):
            self._runs.move_to_end(run)

    def _expire(self, now_s: float, expiry_s: float) -> None:
        while self._runs:
            run, used_at_s = next(iter(self._runs.items()))
            if used_at_s >= now_s - expiry_s:
                return
            for worker in self._names(run.holders):
                self._counts[worker] -= len(run.blocks)
            self._release(run, run.holders)


def _pieces(blocks: Sequence[int], marked: set[int]) -> list[int]:
    """Where marked and unmarked blocks change over."""
    flags = [block in marked for block in blocks]
    return [n for n in range(1, len(flags)) if flags[n] != flags[n - 1]]
