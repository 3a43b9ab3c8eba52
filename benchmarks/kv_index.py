"""The KV index: full-match questions and stored sequences per second, beside ai-dynamo-runtime's RadixTree (Rust).

The binding is optional: `pip install --no-deps ai-dynamo-runtime==1.6.1`. Both get the same hashes in the same run, in
turn, and must give the same answers. An event is applied from its bytes on the wire: JSON for the binding, msgpack
here. Target: at least as fast as the binding.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from benchmarks.harness import Report, at_least
from benchmarks.routing import SHORT_REQUESTS, full_blocks
from benchmarks.traces import conversation
from dynamo_local.core.routing.kv_events import BlocksStored
from dynamo_local.core.routing.kv_index import EventBatch, KvIndex
from dynamo_local.transport.kv_events import decode_batch, encode_batch

SEQUENCES, SHORT_SEQUENCES, BLOCKS = 1000, 200, 64
PIECE = 50
Sequences = Sequence[list[int]]
Holders = Callable[[int], Sequence[int]]
"""Which workers hold the n-th sequence."""


class Subject(Protocol):
    """An index as it is measured."""

    def encode(self, number: int, worker: int, blocks: list[int]) -> Any:
        """The event "stored", as it arrives."""
        ...

    def apply(self, event: Any) -> None: ...

    def find(self, blocks: list[int]) -> dict[int, int]: ...


class Ours:
    """`core.routing.kv_index.KvIndex`, fed from NATS messages."""

    def __init__(self) -> None:
        self.index = KvIndex()
        self.find = self.index.find_matches

    def encode(self, number: int, worker: int, blocks: list[int]) -> bytes:
        return encode_batch(worker, EventBatch("epoch", number, (BlocksStored(tuple(blocks)),)))

    def apply(self, event: bytes) -> None:
        worker, batch = decode_batch(event)
        for each in batch.events:
            self.index.apply(worker, each)


class Binding:
    """ai-dynamo-runtime's RadixTree. Raises `ImportError` where it is not installed."""

    def __init__(self) -> None:
        from dynamo._core import RadixTree

        self._tree = RadixTree()

    def encode(self, number: int, worker: int, blocks: list[int]) -> tuple[int, bytes]:
        stored = {"parent_hash": None, "blocks": [{"block_hash": block, "tokens_hash": block} for block in blocks]}
        return worker, json.dumps({"event_id": number, "data": {"stored": stored}}).encode()

    def apply(self, event: tuple[int, bytes]) -> None:
        self._tree.apply_event(*event)

    def find(self, blocks: list[int]) -> dict[int, int]:
        scores: dict[tuple[int, int], int] = self._tree.find_matches(blocks).scores
        return {worker: score for (worker, _rank), score in scores.items()}

    def find_bare(self, blocks: list[int]) -> Any:
        """Without our change of its keys, which is not its cost."""
        return self._tree.find_matches(blocks).scores


def run(short: bool) -> Report:
    """1,000 × 64 blocks over 8 and 64 workers, and an hour of a chat service over 8."""
    report = Report("kv_index")
    rounds = 3 if short else 5
    beside = _installed()
    rng = random.Random(1)
    made = [[rng.getrandbits(63) for _ in range(BLOCKS)] for _ in range(SHORT_SEQUENCES if short else SEQUENCES)]
    for workers in (8, 64):
        what = f"{len(made):,} × {BLOCKS} blocks, {workers} workers"
        _measure(report, f"{what}, one holder each", made, lambda n, w=workers: (n % w,), rounds, beside)  # type: ignore[misc]
        _measure(report, f"{what}, all hold all", made, lambda _, w=workers: range(w), 1 if short else 2, beside)  # type: ignore[misc]
    names: dict[int, int] = {}
    hour = conversation(SHORT_REQUESTS if short else None)
    trace = [[names.setdefault(block, rng.getrandbits(63)) for block in full_blocks(row)] for row in hour.rows]
    asked = [blocks for blocks in trace if blocks]
    what = f"{'recorded' if hour.recorded else 'generated'} hour, {len(asked):,} prompts, 8 workers"
    _measure(report, what, asked, lambda n: (n % 8,), rounds, beside)
    report.notes.append(hour.told)
    if not beside:
        report.notes.append(
            "the Rust binding is not installed, so there is nothing to compare with: "
            "pip install --no-deps ai-dynamo-runtime==1.6.1"
        )
    return report


def _installed() -> bool:
    try:
        Binding()
    except ImportError:
        return False
    return True


def _measure(report: Report, what: str, asked: Sequences, holders: Holders, rounds: int, beside: bool) -> None:
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    for _ in range(rounds):
        mine = Ours()
        ours.append(_rates(mine, mine.find, asked, holders))
        if beside:
            other = Binding()
            theirs.append(_rates(other, other.find_bare, asked, holders))
            for blocks in asked[:: max(1, len(asked) // 100)]:
                if mine.find(blocks) != other.find(blocks):
                    raise RuntimeError(f"{what}: the two indexes differ: {mine.find(blocks)} and {other.find(blocks)}")
    report.add(f"{what}: matches", "1/s", (match for match, _ in ours))
    report.add(f"{what}: sequences stored", "1/s", (stored for _, stored in ours))
    if not beside:
        return
    for column, name in enumerate(("matches", "sequences stored")):
        report.add(f"{what}: {name}, binding", "1/s", (rates[column] for rates in theirs))
        ratios = [a[column] / b[column] for a, b in zip(ours, theirs, strict=True)]
        report.add(f"{what}: {name}, ours ÷ binding", "", ratios, at_least(1))


def _rates(
    subject: Subject, find: Callable[[list[int]], Any], asked: Sequences, holders: Holders
) -> tuple[float, float]:
    """(matches, sequences stored) per second."""
    events = [subject.encode(n, worker, blocks) for n, blocks in enumerate(asked) for worker in holders(n)]

    def store(part: Sequence[Any]) -> None:
        for event in part:
            subject.apply(event)
        find(asked[0])  # an index that applies in the background has done so by its answer

    def ask(part: Sequences) -> None:
        for blocks in part:
            find(blocks)

    stored = _rate(store, events)
    return _rate(ask, asked), stored


def _rate(work: Callable[[Sequence[Any]], None], items: Sequence[Any]) -> float:
    """Items per second: the median over pieces that are short enough for a busy machine to leave them alone."""
    took_s = []
    for begin in range(0, len(items), PIECE):
        part = items[begin : begin + PIECE]
        begin_s = time.perf_counter()
        work(part)
        took_s.append((time.perf_counter() - begin_s) / len(part))
    return 1 / statistics.median(took_s)
