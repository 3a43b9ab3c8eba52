"""An engine's load, from vLLM's statistics and from the streams of this process, which are more recent. Pure."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from dynamo_local.core.types import Load

HIT_RATE_REQUESTS = 1000
"""How many requests the prefix hit rate covers, as in vLLM's own log."""
ITL_WEIGHT = 0.1


@dataclass(slots=True)
class LiveRequest:
    """A running request: how many tokens may still come at most, and when the last ones came (loop's clock)."""

    remaining: int
    last_s: float | None = None


class Statistics:
    """Fed by a stat logger (`record`, after each pass) and by the streams (`opened`, `produced`, `closed`)."""

    def __init__(self, slots: int, blocks: int) -> None:
        self._slots = slots
        self._blocks = blocks
        self._live: dict[str, LiveRequest] = {}
        self._running = 0
        self._usage = 0.0
        self._queries: deque[tuple[int, int, int]] = deque()
        self._seen = [0, 0, 0]
        self._itl_s: float | None = None
        self.prompt_tokens: Counter[str] = Counter()
        """Prompt tokens by where their KV came from, under vLLM's names (`external_kv_transfer`, …)."""
        self.counters: dict[str, float] = {"prefix_queries": 0, "prefix_hits": 0}
        """See `ports.Engine.counters`."""

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> bool:
        """vLLM's `SchedulerStats` and `IterationStats` of one pass; either may be None. True if the load changed."""
        before = self._running, self._usage
        if scheduler_stats is not None:
            self._running = scheduler_stats.num_running_reqs
            self._usage = scheduler_stats.kv_cache_usage
            self._observe(scheduler_stats.prefix_cache_stats)
            self._count_drafts(getattr(scheduler_stats, "spec_decoding_stats", None))
        prompt_tokens = getattr(iteration_stats, "prompt_token_stats", None)
        if prompt_tokens is not None:
            self.prompt_tokens.update(
                local_compute=prompt_tokens.computed,
                local_cache_hit=prompt_tokens.local_cache_hit,
                external_kv_transfer=prompt_tokens.external_kv_transfer,
            )
        return before != (self._running, self._usage)

    def _observe(self, stats: Any) -> None:
        if stats is None or not stats.requests:
            return
        self.counters["prefix_queries"] += stats.queries
        self.counters["prefix_hits"] += stats.hits
        sample = (stats.requests, stats.queries, stats.hits)
        self._queries.append(sample)
        self._seen = [a + b for a, b in zip(self._seen, sample, strict=True)]
        while len(self._queries) > 1 and self._seen[0] > HIT_RATE_REQUESTS:
            self._seen = [a - b for a, b in zip(self._seen, self._queries.popleft(), strict=True)]

    def _count_drafts(self, stats: Any) -> None:
        """`SpecDecodingStats` of one pass; None where nothing was drafted."""
        if stats is not None:
            self.counters["drafts"] = self.counters.get("drafts", 0) + stats.num_drafts
            self.counters["accepted"] = self.counters.get("accepted", 0) + stats.num_accepted_tokens

    def opened(self, request_id: str, max_tokens: int) -> None:
        """A request was given to the engine."""
        self._live[request_id] = LiveRequest(max_tokens)

    def produced(self, request_id: str, tokens: int, now_s: float) -> None:
        """The request produced so many tokens."""
        live = self._live.get(request_id)
        if live is None or not tokens:
            return
        live.remaining = max(0, live.remaining - tokens)
        if live.last_s is not None:
            sample_s = (now_s - live.last_s) / tokens
            self._itl_s = sample_s if self._itl_s is None else self._itl_s + ITL_WEIGHT * (sample_s - self._itl_s)
        live.last_s = now_s

    def closed(self, request_id: str) -> None:
        """The request ended, for whatever reason."""
        self._live.pop(request_id, None)

    @property
    def num_live(self) -> int:
        """Requests that the engine has."""
        return len(self._live)

    def load(self, num_held: int) -> Load:
        """The current load. `num_held` requests have ended here, but their KV is kept for another engine.

        An engine without work makes no passes, so its last statistics of cache use may be out of date: without running
        requests and held KV the use is 0.
        """
        live = len(self._live)
        running = min(self._running, live)
        usage = self._usage if live or num_held else 0.0
        _, queries, hits = self._seen
        return Load(
            request_active_slots=running,
            request_total_slots=self._slots,
            kv_active_blocks=round(usage * self._blocks),
            kv_total_blocks=self._blocks,
            num_requests_waiting=live - running,
            gpu_cache_usage_perc=usage,
            gpu_prefix_cache_hit_rate=hits / queries if queries else 0.0,
            remaining_tokens=sum(request.remaining for request in self._live.values()),
            itl_ms=None if self._itl_s is None else self._itl_s * 1000,
        )
