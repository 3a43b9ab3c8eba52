"""From workers' numbered batches of events to an index that is right: gaps, repetitions, restarts. Pure.

A worker's publisher numbers its batches 1, 2, …; its `epoch` is another one after each restart of it. A batch that is
not the next one is kept, and somebody must ask the worker for what is missing (`needs_sync`, `position`). It answers
with the batches since then, or, where it has them no more, with all blocks that it holds. What is known of a worker
stays in the index meanwhile: an old view routes better than none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dynamo_local.core.kv.events import KvEvent
from dynamo_local.core.kv.index import KvIndex

MAX_BLOCKS = 2**20
"""More blocks than any worker has (16 million tokens and up). Past it what is said of the worker cannot be true, and
all of it is forgotten: whoever publishes under its name must not fill a Router's memory."""

MAX_EARLY = 1024
"""Batches kept while one before them is missing; past it they are dropped, and asked for again."""


class EventBatch(NamedTuple):
    """What one publisher said at once. Without events it only repeats the number of the last batch: a sign of life, by
    which the loss of that one is seen."""

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
