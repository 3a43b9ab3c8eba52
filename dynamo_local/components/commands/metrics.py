"""The metrics of vLLM and SGLang as our `Load`. A metric that they do not have is Missing, never 0.

| Load | vLLM | SGLang |
|---|---|---|
| `request_active_slots` | `vllm:num_requests_running` | `sglang:num_running_reqs` |
| `num_requests_waiting` | `vllm:num_requests_waiting` | `sglang:num_queue_reqs` |
| `gpu_cache_usage_perc` | `vllm:kv_cache_usage_perc` (`vllm:gpu_cache_usage_perc` before 0.11) | `sglang:token_usage` |
| `kv_total_blocks` | `vllm:cache_config_info{num_gpu_blocks}` | `sglang:max_total_num_tokens` (blocks of one token) |
| `gpu_prefix_cache_hit_rate` | `vllm:prefix_cache_hits_total` / `…_queries_total` | `sglang:cache_hit_rate` |
| `itl_ms` | `vllm:inter_token_latency_seconds` | `sglang:inter_token_latency_seconds` |

`remaining_tokens` comes from our own connections. With several engines behind one server (data parallel) counts are
sums, shares are means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dynamo_local.core import served
from dynamo_local.core.types import Load, Missing

RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
TOTAL_TOKENS = ("sglang:max_total_num_tokens",)
HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
HIT_RATE = ("sglang:cache_hit_rate",)
TOKENS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "sglang:prompt_tokens_total",
    "sglang:generation_tokens_total",
)
ITL = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds", "sglang:inter_token_latency_seconds")


ENDED = ("vllm:request_success_total", "sglang:num_requests_total")
GENERATED = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
FIRST = ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds")


class Scrape(Protocol):
    """`metrics_text.Metrics`."""

    def sum(self, name: str, **labels: str) -> float | None:
        """The sum of a metric's samples with these labels; None where there is none."""
        ...

    def first(self, *names: str) -> float | None:
        """The mean of the first of these metrics that there is; None where there is none."""
        ...

    def buckets(self, name: str) -> list[tuple[float, float]]:
        """A histogram's (upper bound, cumulative count), ascending; empty where there is none."""
        ...

    def label(self, label: str) -> str | None:
        """The value that samples give to this label, where they agree; None else."""
        ...


@dataclass(frozen=True, slots=True)
class Latency:
    """A histogram's sum (seconds) and count at one moment."""

    sum_s: float
    count: float


@dataclass(frozen=True, slots=True)
class ServerNumbers:
    """One scrape. `kv_usage` is 0..1, `tokens` counts all that was computed so far."""

    running: int | Missing
    waiting: int | Missing
    kv_usage: float | Missing
    kv_total_blocks: int | Missing
    prefix_hit_rate: float | Missing
    itl: Latency | Missing
    tokens: float | Missing


QUIET_S = 10.0
"""An idle vLLM does not update its gauges: they keep the values of its last step, also after a request was aborted. If
no number has changed for this long, and we have no request there, nothing is in flight."""


@dataclass(frozen=True, slots=True)
class OwnRequests:
    """The count of our own connections, and the tokens that they may still bring (an upper bound)."""

    streams: int = 0
    remaining_tokens: int = 0


def read(scrape: Scrape) -> ServerNumbers:
    """The numbers in a scrape."""
    return ServerNumbers(
        running=_count(scrape, RUNNING),
        waiting=_count(scrape, WAITING),
        kv_usage=_or_missing(scrape.first(*KV_USAGE), KV_USAGE),
        kv_total_blocks=_total_blocks(scrape),
        prefix_hit_rate=_hit_rate(scrape),
        itl=_latency(scrape),
        tokens=_tokens(scrape),
    )


def served_of(scrape: Scrape) -> dict[str, float]:
    """The server's counts since its start, as `core.served` names them. Empty if it lacks requests or tokens."""
    ended, generated = _sum(scrape, ENDED), _sum(scrape, GENERATED)
    if ended is None or generated is None:
        return {}
    found = {served.REQUESTS: ended, served.TOKENS: generated}
    for name, metrics in ((served.TTFT, FIRST), (served.ITL, ITL)):
        found |= served.rebinned(name, next(filter(None, map(scrape.buckets, metrics)), []))
    return found


def in_flight(numbers: ServerNumbers | Missing, own: OwnRequests, quiet_s: float, *, hands_over: bool) -> int:
    """Requests that the server holds, those of other clients included: its own count, but never less than ours.

    `quiet_s` is how many seconds its numbers have not changed. A server that `hands_over` (a prefill server) holds a
    request's KV until it was pulled: as long as its cache is in use, it is not done.
    """
    if isinstance(numbers, Missing) or isinstance(numbers.running, Missing) or quiet_s >= QUIET_S:
        return own.streams
    waiting = 0 if isinstance(numbers.waiting, Missing) else numbers.waiting
    kept = hands_over and not isinstance(numbers.kv_usage, Missing) and numbers.kv_usage > 0
    return max(own.streams, numbers.running + waiting, int(kept))


def load_of(numbers: ServerNumbers | Missing, own: OwnRequests, before: ServerNumbers | Missing) -> Load:
    """The load to publish. A server that does not count its requests has those of our Frontend.

    A KV use that is not known is `Missing`: a planner must not take the server for idle. `before` is the scrape before
    this one: the latency is that of the time between.
    """
    if isinstance(numbers, Missing):
        return Load(own.streams, gpu_cache_usage_perc=numbers, remaining_tokens=own.remaining_tokens)
    counted = not isinstance(numbers.running, Missing) and not isinstance(numbers.waiting, Missing)
    total = 0 if isinstance(numbers.kv_total_blocks, Missing) else numbers.kv_total_blocks
    used = 0.0 if isinstance(numbers.kv_usage, Missing) else numbers.kv_usage
    hit_rate = 0.0 if isinstance(numbers.prefix_hit_rate, Missing) else numbers.prefix_hit_rate
    return Load(
        request_active_slots=numbers.running if counted else own.streams,  # type: ignore[arg-type]
        num_requests_waiting=numbers.waiting if counted else 0,  # type: ignore[arg-type]
        gpu_cache_usage_perc=numbers.kv_usage,
        kv_total_blocks=total,
        kv_active_blocks=round(used * total),
        gpu_prefix_cache_hit_rate=hit_rate,
        remaining_tokens=own.remaining_tokens,
        itl_ms=_itl_ms(numbers, before),
    )


def _itl_ms(numbers: ServerNumbers, before: ServerNumbers | Missing) -> float | None:
    if isinstance(before, Missing) or isinstance(numbers.itl, Missing) or isinstance(before.itl, Missing):
        return None
    count = numbers.itl.count - before.itl.count
    if count <= 0:  # no tokens since, or the server was restarted
        return None
    return (numbers.itl.sum_s - before.itl.sum_s) / count * 1000.0


def _sum(scrape: Scrape, names: tuple[str, ...], suffix: str = "") -> float | None:
    return next((value for name in names if (value := scrape.sum(name + suffix)) is not None), None)


def _count(scrape: Scrape, names: tuple[str, ...]) -> int | Missing:
    value = _or_missing(_sum(scrape, names), names)
    return value if isinstance(value, Missing) else round(value)


def _or_missing(value: float | None, names: tuple[str, ...]) -> float | Missing:
    return Missing(f"the server's metrics have none of {', '.join(names)}") if value is None else value


def _total_blocks(scrape: Scrape) -> int | Missing:
    engines, blocks = scrape.sum("vllm:cache_config_info"), scrape.label("num_gpu_blocks") or ""
    return round(engines) * int(blocks) if engines and blocks.isdigit() else _count(scrape, TOTAL_TOKENS)


def _tokens(scrape: Scrape) -> float | Missing:
    values = [value for name in TOKENS if (value := scrape.sum(name)) is not None]
    return sum(values) if values else _or_missing(None, TOKENS)


def _hit_rate(scrape: Scrape) -> float | Missing:
    hits, queries = _sum(scrape, HITS), _sum(scrape, QUERIES)
    if hits is not None and queries:
        return hits / queries
    return _or_missing(scrape.first(*HIT_RATE), (*HITS, *HIT_RATE))


def _latency(scrape: Scrape) -> Latency | Missing:
    sum_s, count = _sum(scrape, ITL, "_sum"), _sum(scrape, ITL, "_count")
    if sum_s is None or count is None:
        return Missing(f"the server's metrics have none of {', '.join(ITL)}")
    return Latency(sum_s, count)
