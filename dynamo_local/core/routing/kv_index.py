"""Which workers hold which KV blocks, and how far each matches a prompt. Pure; time is an argument.

A block's hash names the block and all before it (`kv_hashes`), so equal hashes mean equal prompts up to there.
Blocks that follow each other and have the same holders are one *run*. Holders are the bits of one whole number. A
question goes from run to run, not from block to block. If its hash at a run's end is the run's last one, all blocks
between are equal, too. If not, a search by halves finds where they part. An event that concerns a part of a run
splits it. Any block may be missing (evicted within, or its event is late): the blocks behind it do not count until
it is back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from dynamo_local.core.routing.choice import NO_HITS, Sample, Sent, SentRequests
from dynamo_local.core.routing.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from dynamo_local.core.types import Load, Missing

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


# --- routing
# Dynamo's cost function: what a worker has cached of the prompt, against how busy it is. Pure.
#
#     2 × score × block_size / token_length − gpu_cache_usage_perc − num_requests_waiting / max over workers
#
# `score` counts blocks matched in a row from the start, so the first term is twice the prefix hit rate. The last term
# is 0 where nobody waits. The highest value wins; ties are left to chance, which the caller brings along.

PREFIX_WEIGHT = 2.0


@dataclass(frozen=True, slots=True)
class LoadTerms:
    """How busy a worker is, with the requests routed to it since its sample. `usage` is a share of its KV cache
    (above 1: more than it has), `waiting` counts requests."""

    usage: float
    waiting: int


def load_terms(load: Load, since: Sequence[Sent], kv_total_tokens: int = 0) -> LoadTerms | Missing:
    """A sample and the requests `since`; `Missing` where the sample does not say how much of the cache is used.

    `kv_total_tokens` turns the tokens of those requests into usage; 0: it is not known.
    """
    usage = load.gpu_cache_usage_perc
    if isinstance(usage, Missing):
        return usage
    coming = sum(sent.tokens for sent in since) / kv_total_tokens if since and kv_total_tokens else 0.0
    return LoadTerms(usage + coming, load.num_requests_waiting + len(since))


def hit_rates(matches: Mapping[int, int], block_size: int, token_length: int) -> dict[int, float]:
    """worker -> share (0..1) of a prompt of `token_length` tokens that its matched blocks hold."""
    if token_length < 1:
        return {}
    return {worker: min(1.0, score * block_size / token_length) for worker, score in matches.items()}


def kv_values(
    terms: Mapping[int, LoadTerms], hits: Mapping[int, float], prefix_weight: float = PREFIX_WEIGHT
) -> dict[int, float]:
    """worker -> the value of the cost function, for each worker of `terms`; `prefix_weight` 0: load alone."""
    waiting = waiting_shares(terms)
    return {
        worker: prefix_weight * hits.get(worker, 0.0) - term.usage - waiting[worker] for worker, term in terms.items()
    }


def waiting_shares(terms: Mapping[int, LoadTerms]) -> dict[int, float]:
    """worker -> its waiting requests as a share of the most that any worker has; 0 where none wait."""
    most = max((term.waiting for term in terms.values()), default=0)
    return {worker: term.waiting / most if most else 0.0 for worker, term in terms.items()}


class KvCost:
    """`core.routing.choice.Picker` by the cost function; without `prefix` by its load terms alone (`kv-load`).

    `choose` picks one of several that are equally good. `block_size` (tokens; 0: not known) says how much of a cache
    the prompts of requests just routed will fill: `routed` gets their uncached tokens. A worker whose load is missing
    is not taken for idle: it counts as busy as the busiest known one, and at least as what is in flight from here.
    """

    def __init__(self, choose: Callable[[Sequence[int]], int], *, prefix: bool = True, block_size: int = 0) -> None:
        self.block_size = block_size
        self._choose = choose
        self._prefix_weight = PREFIX_WEIGHT if prefix else 0.0
        self._sent = SentRequests()

    def pick(
        self,
        candidates: Sequence[int],
        loads: Mapping[int, Sample],
        hits: Mapping[int, float] = NO_HITS,
        prompt_tokens: int = 0,
    ) -> int:
        values = kv_values(self._terms(candidates, loads), hits, self._prefix_weight)
        best = max(values.values())
        ties = [worker for worker in sorted(values) if values[worker] == best]
        return ties[0] if len(ties) == 1 else self._choose(ties)

    def formulas(
        self, candidates: Sequence[int], loads: Mapping[int, Sample], hits: Mapping[int, float]
    ) -> dict[int, str]:
        """worker -> its value of the cost function with the three terms, as Dynamo's Router logs it."""
        terms = self._terms(candidates, loads)
        waiting = waiting_shares(terms)
        return {
            worker: f"{value:.3f} = {self._prefix_weight:.1f} * {hits.get(worker, 0.0):.3f} - {terms[worker].usage:.3f}"
            f" - {waiting[worker]:.3f}"
            for worker, value in kv_values(terms, hits, self._prefix_weight).items()
        }

    def routed(self, instance_id: int, request_id: str, tokens: int, now_s: float, prompt_tokens: int = 0) -> None:
        self._sent.routed(instance_id, request_id, tokens, now_s)

    def finished(self, instance_id: int, request_id: str, now_s: float) -> None:
        self._sent.finished(instance_id, request_id, now_s)

    def _terms(self, candidates: Sequence[int], loads: Mapping[int, Sample]) -> dict[int, LoadTerms]:
        known: dict[int, LoadTerms] = {}
        for worker in candidates:
            sample = loads.get(worker)
            if sample is not None and not isinstance(sample.load, Missing):
                since = self._sent.since(worker, sample.at_s)
                terms = load_terms(sample.load, since, sample.load.kv_total_blocks * self.block_size)
                if not isinstance(terms, Missing):
                    known[worker] = terms
        usage = max((term.usage for term in known.values()), default=0.0)
        waiting = max((term.waiting for term in known.values()), default=0)
        for worker in candidates:
            if worker not in known:
                known[worker] = LoadTerms(usage, max(waiting, len(self._sent.in_flight(worker))))
        return known


# --- tracker
# From workers' numbered batches of events to an index that is right: gaps, repetitions, restarts. Pure.
#
# A worker's publisher numbers its batches 1, 2, …. Its `epoch` differs after each restart. A batch that is not the next
# one is kept, and the worker must be asked for the missing ones (`needs_sync`, `position`). The worker answers with the
# batches since then. If it has them no more, it answers with all blocks that it holds. The known blocks stay in the
# index meanwhile: an old view routes better than none.
MAX_BLOCKS = 2**20
"""More blocks than any worker has (16 million tokens and up). Past it what is said of the worker cannot be true, and
all of it is forgotten: whoever publishes under its name must not fill a Router's memory."""

MAX_EARLY = 1024
"""Batches kept while one before them is missing; past it they are dropped, and asked for again."""


class EventBatch(NamedTuple):
    """One publisher's message. Without events it only repeats the number of the last batch. This sign of life shows
    if that batch was lost."""

    epoch: str
    seq: int
    events: tuple[KvEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All blocks that a worker held after batch `seq`, as runs of blocks that follow each other."""

    epoch: str
    seq: int
    runs: Sequence[Sequence[int]]


@dataclass(slots=True)
class _View:
    epoch: str | None = None
    seq: int = 0
    head: int = 0
    """The highest number heard of."""
    early: dict[int, EventBatch] = field(default_factory=dict)


class KvTracker:
    """Keeps `index` as its workers' batches say. Only workers that have `joined` are listened to."""

    def __init__(self, index: KvIndex) -> None:
        self.index = index
        self._views: dict[int, _View] = {}

    def joined(self, worker: int) -> None:
        """It is registered. It must be asked first: it may have held blocks before we listened."""
        self._views.setdefault(worker, _View())

    def gone(self, worker: int) -> None:
        """Its registration has ended: nothing of it is left. Late batches of it are ignored."""
        self._views.pop(worker, None)
        self.index.worker_gone(worker)

    def workers(self) -> frozenset[int]:
        """Those that have joined."""
        return frozenset(self._views)

    def needs_sync(self, worker: int) -> bool:
        """Whether it must be asked: something is missing."""
        view = self._views.get(worker)
        return view is not None and (view.epoch is None or view.seq < view.head)

    def position(self, worker: int) -> tuple[str, int]:
        """`(epoch, seq)` after which batches are wanted; `("", 0)`: everything."""
        view = self._views.get(worker) or _View()
        return view.epoch or "", view.seq

    def receive(self, worker: int, batch: EventBatch, now_s: float = 0.0) -> None:
        """A batch as it was published, in whatever order it came."""
        view = self._views.get(worker)
        if view is None:
            return
        if view.epoch is not None and batch.epoch != view.epoch:
            view = self._views[worker] = _View()
        if batch.seq <= view.seq:
            return
        view.head = max(view.head, batch.seq)
        if batch.events:
            if len(view.early) >= MAX_EARLY:
                view.early.clear()
            view.early[batch.seq] = batch
            self._catch_up(worker, view, now_s)

    def replayed(self, worker: int, batches: Iterable[EventBatch], now_s: float = 0.0) -> None:
        """The worker's answer: what it has published since `position`."""
        view = self._views.get(worker)
        if view is None:
            return
        for batch in batches:
            if batch.epoch == view.epoch and batch.seq > view.seq:
                view.early[batch.seq] = batch
                view.head = max(view.head, batch.seq)
        self._catch_up(worker, view, now_s)

    def rebuilt(self, worker: int, snapshot: Snapshot, now_s: float = 0.0) -> None:
        """The worker's answer: all that it holds."""
        view = self._views.get(worker)
        if view is None or (snapshot.epoch == view.epoch and snapshot.seq < view.seq):
            return
        self.index.replace(worker, snapshot.runs, now_s)
        view.epoch, view.seq = snapshot.epoch, snapshot.seq
        view.early = {s: b for s, b in view.early.items() if b.epoch == snapshot.epoch and s > snapshot.seq}
        view.head = max(view.early, default=view.seq)
        self._catch_up(worker, view, now_s)

    def _catch_up(self, worker: int, view: _View, now_s: float) -> None:
        """Apply what follows on each other."""
        if view.epoch is None:
            return
        while (batch := view.early.pop(view.seq + 1, None)) is not None:
            for event in batch.events:
                self.index.apply(worker, event, now_s)
            view.seq += 1
            if self.index.count(worker) > MAX_BLOCKS:
                self.index.cleared(worker)
