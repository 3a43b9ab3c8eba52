"""An engine's load, from vLLM's own statistics and from what this process knows sooner. Pure bookkeeping."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from dynamo_local.core.types import Load

HIT_RATE_REQUESTS = 1000
"""The prefix hit rate is that of the last so many requests, as in vLLM's own log."""
ITL_WEIGHT = 0.1


@dataclass(slots=True)
class Live:
    """A request that runs: the most tokens that may still come, and when the last ones came (loop's clock)."""

    remaining: int
    last_s: float | None = None


class Statistics:
    """Fed by a stat logger (`record`, after each pass) and by the streams (`opened`, `produced`, `closed`)."""

    def __init__(self, slots: int, blocks: int) -> None:
        self._slots = slots
        self._blocks = blocks
        self._live: dict[str, Live] = {}
        self._running = 0
        self._usage = 0.0
        self._queries: deque[tuple[int, int, int]] = deque()
        self._seen = [0, 0, 0]
        self._itl_s: float | None = None
        self.prompt_tokens: Counter[str] = Counter()
        """Prompt tokens by where their KV came from, under vLLM's names (`external_kv_transfer`, …)."""

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> bool:
        """vLLM's `SchedulerStats` and `IterationStats` of one pass; either may be None. True if the load changed."""
        before = self._running, self._usage
        if scheduler_stats is not None:
            self._running = scheduler_stats.num_running_reqs
            self._usage = scheduler_stats.kv_cache_usage
            self._observe(scheduler_stats.prefix_cache_stats)
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
        sample = (stats.requests, stats.queries, stats.hits)
        self._queries.append(sample)
        self._seen = [a + b for a, b in zip(self._seen, sample, strict=True)]
        while len(self._queries) > 1 and self._seen[0] > HIT_RATE_REQUESTS:
            self._seen = [a - b for a, b in zip(self._seen, self._queries.popleft(), strict=True)]

    def opened(self, request_id: str, max_tokens: int) -> None:
        """A request was given to the engine."""
        self._live[request_id] = Live(max_tokens)

    def produced(self, request_id: str, tokens: int, now_s: float) -> None:
        """It brought so many tokens."""
        live = self._live.get(request_id)
        if live is None or not tokens:
            return
        live.remaining = max(0, live.remaining - tokens)
        if live.last_s is not None:
            sample_s = (now_s - live.last_s) / tokens
            self._itl_s = sample_s if self._itl_s is None else self._itl_s + ITL_WEIGHT * (sample_s - self._itl_s)
        live.last_s = now_s

    def closed(self, request_id: str) -> None:
        """It ended, however."""
        self._live.pop(request_id, None)

    @property
    def num_live(self) -> int:
        """Requests that the engine has."""
        return len(self._live)

    def load(self, num_held: int) -> Load:
        """Now. `num_held` requests have ended here, but their KV is kept for another engine.

        An engine without work makes no passes and says nothing more, so its last word on cache use may be out of
        date: nothing lives and nothing is held means that nothing is used.
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
