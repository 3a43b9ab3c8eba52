"""The worth of KV-aware routing: an hour of a chat service over eight simulated workers, by each policy.

On a virtual clock, without processes: the schedulers of the sim engine, and the Router's own index and pickers.
The hour is Mooncake's recorded one where it is to be had, else generated (`benchmarks.traces`).
Target: under `kv` at least 2.5 times as much of the prompts is found in the caches as under round-robin.
"""

from __future__ import annotations

import heapq
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.harness import Report, at_least, percentile
from benchmarks.traces import conversation
from dynamo_local.components.dispatcher import make_picker
from dynamo_local.core.routing.choice import RouterPolicy, Sample
from dynamo_local.core.routing.kv_events import KvEvent
from dynamo_local.core.routing.kv_index import KvCost, KvIndex, hit_rates
from dynamo_local.core.types import Load
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.engines.sim.requests import Finished, SchedulerConfig, SimRequest, Started, Tokens
from dynamo_local.engines.sim.scheduler import SimScheduler
from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.simulator.trace import HASH_BLOCK_TOKENS as BLOCK_TOKENS
from dynamo_local.simulator.trace import TraceRequest

WORKERS = 8
BLOCKS = 2000
POLICIES: tuple[RouterPolicy, ...] = ("kv", "kv-load", "least-loaded", "round-robin", "random")
LOAD_AGE_S = 0.1
"""A worker publishes a change of its load at most so often: a picker sees samples up to so old."""
SEED = 1
SHORT_REQUESTS = 1500
REUSE_TARGET = 2.5


@dataclass(slots=True)
class Outcome:
    """One replay. `cached` and `prompt` count tokens, `ttft_s` has one value for each request."""

    cached: int = 0
    prompt: int = 0
    ttft_s: list[float] = field(default_factory=list)
    requests: Counter[int] = field(default_factory=Counter)
    finished: int = 0
    foreseen: float = 0.0
    """Tokens that the index expected to find."""

    @property
    def reuse(self) -> float:
        """Share of prompt tokens that were cached."""
        return self.cached / self.prompt


class Fleet:
    """Workers on one virtual clock, and a Router that hears their events at once."""

    def __init__(self, policy: RouterPolicy) -> None:
        perf = ProfileModel.load(SimOptions().profile)
        config = SchedulerConfig(BLOCKS, BLOCK_TOKENS)
        self.outcome = Outcome()
        self._journals: list[list[KvEvent]] = [[] for _ in range(WORKERS)]
        self._schedulers = [SimScheduler(config, perf, journal) for journal in self._journals]
        self._index = KvIndex()
        self._picker = make_picker(policy, SEED)
        if isinstance(self._picker, KvCost):
            self._picker.block_size = BLOCK_TOKENS
        self._samples: dict[int, Sample] = {}
        self._heap: list[tuple[float, int]] = []
        self._arrived_s: dict[str, float] = {}
        self._worker: dict[str, int] = {}

    def run(self, rows: Sequence[TraceRequest]) -> Outcome:
        """All requests, to their ends."""
        for number, row in enumerate(rows):
            while self._heap and self._heap[0][0] <= row.at_s:
                at_s, worker = heapq.heappop(self._heap)
                self._advance(worker, at_s)
            self._arrive(str(number), row)
        while self._heap:
            at_s, worker = heapq.heappop(self._heap)
            self._advance(worker, at_s)
        return self.outcome

    def _arrive(self, name: str, row: TraceRequest) -> None:
        blocks, now_s, length = full_blocks(row), row.at_s, row.input_length
        hits = hit_rates(self._index.find_matches(blocks), BLOCK_TOKENS, length)
        for worker in range(WORKERS):
            self._sample(worker, now_s)
        worker = self._picker.pick(range(WORKERS), self._samples, hits)
        rate = hits.get(worker, 0.0)
        # A Router's word for the request's size: uncached tokens for kv, else what it may generate.
        tokens = round(length * (1 - rate)) if isinstance(self._picker, KvCost) else row.output_length
        self._picker.routed(worker, name, tokens, now_s)
        self._arrived_s[name], self._worker[name] = now_s, worker
        self.outcome.requests[worker] += 1
        self.outcome.prompt += length
        self.outcome.foreseen += rate * length
        output = row.output_length
        request = SimRequest(name, length, output, max_output_tokens=output, block_keys=blocks)
        self._schedulers[worker].submit(request, now_s)
        self._advance(worker, now_s)

    def _sample(self, worker: int, now_s: float) -> None:
        known = self._samples.get(worker)
        if known is not None and now_s - known.at_s < LOAD_AGE_S:
            return
        self._advance(worker, now_s)
        scheduler = self._schedulers[worker]
        used, total = scheduler.pool.used, scheduler.pool.total
        load = Load(
            request_active_slots=scheduler.num_running,
            kv_active_blocks=used,
            kv_total_blocks=total,
            num_requests_waiting=scheduler.num_waiting,
            gpu_cache_usage_perc=used / total,
            remaining_tokens=scheduler.remaining_tokens,
        )
        self._samples[worker] = Sample(load, now_s)

    def _advance(self, worker: int, now_s: float) -> None:
        scheduler, outcome = self._schedulers[worker], self.outcome
        for event in scheduler.advance(now_s):
            if isinstance(event, Tokens):
                if event.first == 0:
                    outcome.ttft_s.append(event.times_s[0] - self._arrived_s.pop(event.request_id))
            elif isinstance(event, Started):
                outcome.cached += event.num_cached_tokens
            elif isinstance(event, Finished):
                outcome.finished += 1
                self._picker.finished(self._worker.pop(event.request_id), event.request_id, now_s)
        at_s = scheduler.next_event_at(quiet=True)
        journal = self._journals[worker]
        for change in journal:
            self._index.apply(worker, change)
        journal.clear()
        if at_s is not None:
            heapq.heappush(self._heap, (at_s, worker))


def run(short: bool) -> Report:
    """Every policy over the same requests; the short form takes the first of them only, too few for the target."""
    report = Report("routing")
    asked = conversation(SHORT_REQUESTS if short else None)
    rows = asked.rows
    outcomes = {policy: Fleet(policy).run(rows) for policy in POLICIES}
    for policy, outcome in outcomes.items():
        if outcome.finished != len(rows):
            raise RuntimeError(f"{policy}: {outcome.finished} of {len(rows)} requests came to their end")
        report.add(f"{policy}: prompt tokens reused", "%", [outcome.reuse * 100])
        report.add(f"{policy}: TTFT, mean", "ms", [statistics.fmean(outcome.ttft_s) * 1000])
        report.add(f"{policy}: TTFT, p99", "ms", [percentile(outcome.ttft_s, 0.99) * 1000])
        shares = outcome.requests.values()
        report.add(f"{policy}: requests of the busiest worker ÷ mean", "", [max(shares) / (len(rows) / WORKERS)])
    ratio = outcomes["kv"].reuse / outcomes["round-robin"].reuse
    report.add("reuse, kv ÷ round-robin", "", [ratio], None if short else at_least(REUSE_TARGET))
    faster = statistics.fmean(outcomes["round-robin"].ttft_s) / statistics.fmean(outcomes["kv"].ttft_s)
    report.add("mean TTFT, round-robin ÷ kv", "", [faster])
    foreseen = outcomes["kv"].foreseen / outcomes["kv"].cached
    report.add("kv: tokens that the index foresaw ÷ found", "", [foreseen])
    report.notes.append(asked.told)
    report.notes.append(
        f"{len(rows):,} requests over {WORKERS} workers of {BLOCKS:,} blocks of {BLOCK_TOKENS} tokens, profile "
        f"{SimOptions().profile}; an endless cache common to all would reuse {endless(rows) * 100:.1f} %"
    )
    return report


def full_blocks(row: TraceRequest) -> tuple[int, ...]:
    """The ids of its full blocks: those that can be had again."""
    return row.hash_ids[: row.input_length // BLOCK_TOKENS]


def endless(rows: Sequence[TraceRequest]) -> float:
    """Share of prompt tokens that one cache without an end would have had."""
    seen: set[int] = set()
    found = 0
    for row in rows:
        # The last token is always computed: a prompt that is all blocks gives up its last one.
        blocks = full_blocks(row)
        found += sum(block in seen for block in blocks[: (row.input_length - 1) // BLOCK_TOKENS])
        seen.update(blocks)
    return found * BLOCK_TOKENS / sum(row.input_length for row in rows)
