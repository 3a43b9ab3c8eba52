"""`/metrics` of the Frontend, under Dynamo's names, labels and bucket bounds.

Source: ai-dynamo `lib/llm/src/http/service/metrics.rs`. Planners and dashboards count on these: the label `model` is
in lower case. A request is *queued* from its admission until its first token, and *in flight* until its end. A
response's first tokens give the TTFT alone. Tokens that come together share the time since the last ones evenly. ISL
is recorded with the first token, OSL at the end.

Requests that were refused before their model was known count under `model="unknown"`: a client's invention must not
become a label value.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dynamo_local.core.served import Served
from dynamo_local.core.traffic import (
    HISTOGRAMS,
    HIT_RATE,
    HIT_RATE_METRIC,
    OUTCOMES,
    REQUESTS,
    TARGET_PREFIX,
    Phases,
    RecentRequests,
    outcome_of,
)

PREFIX = "dynamo_frontend"
ROUTER_PREFIX = "dynamo_component_router"
"""Dynamo's routers count under this name, on the page of the frontend that they run in. Ours counts the requests whose
worker a Router chose."""
UNKNOWN_MODEL = "unknown"
CONTENT_TYPE = CONTENT_TYPE_LATEST

Endpoint = Literal["chat_completions", "completions", "embeddings", "responses", "messages", "pooling", "tokenize"]
RequestType = Literal["unary", "stream"]
Status = Literal["success", "error"]


def log_buckets(low: float, high: float, count: int) -> list[float]:
    """Dynamo's bounds: 0, then log-spaced from `low` to `high`, rounded to two significant figures.

    >>> log_buckets(50.0, 32000.0, 10)[:4]
    [0.0, 100.0, 210.0, 430.0]
    """
    ratio = high / low
    bounds = [low * ratio ** (n / (count - 1)) for n in range(1, count)]
    return list(dict.fromkeys([0.0, *(float(f"{bound:.1e}") for bound in bounds)]))


class Gaps:
    """One model's times between tokens: counts by bucket, and their sum."""

    __slots__ = ("_bounds", "counts", "sum_s")

    def __init__(self, bounds: list[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def observe(self, gap_s: float, count: int) -> None:
        """So many tokens came after that time each."""
        self.counts[bisect_left(self._bounds, gap_s)] += count
        self.sum_s += gap_s * count


class GapHistogram(Collector):
    """The histogram of the times between tokens, by model. The library's own takes a lock and a walk through the
    buckets for each token, which cost a microsecond; this adds up in the event loop's thread."""

    def __init__(self, name: str, text: str, bounds: list[float]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._models: dict[str, Gaps] = {}

    def labels(self, model: str) -> Gaps:
        """Those of that model."""
        return self._models.setdefault(model, Gaps(self._bounds))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For the registry."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model"])
        for model, gaps in self._models.items():
            bounds = [*map(floatToGoString, self._bounds), "+Inf"]
            family.add_metric([model], list(zip(bounds, accumulate(gaps.counts), strict=True)), gaps.sum_s)
        yield family


class _Series:
    """The children of one model: looking a label up takes a lock and a dictionary each time."""

    __slots__ = ("cached", "duration", "inflight", "isl", "itl", "osl", "output_tokens", "queued", "started", "ttft")

    def __init__(self, metrics: HttpMetrics, model: str) -> None:
        self.inflight = metrics.inflight_requests.labels(model)
        self.queued = metrics.queued_requests.labels(model)
        self.ttft = metrics.time_to_first_token.labels(model)
        self.itl = metrics.inter_token_latency.labels(model)
        self.isl = metrics.input_sequence_tokens.labels(model)
        self.osl = metrics.output_sequence_tokens.labels(model)
        self.cached = metrics.cached_tokens.labels(model)
        self.output_tokens = metrics.output_tokens.labels(model)
        self.started = metrics.requests_started.labels(model)
        self.duration = metrics.request_duration.labels(model)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """The facts of a request for a record of it; None: not known. `trace` is what the Processor's last item says."""

    model: str
    prompt_tokens: int | None
    tokens: int
    cached_tokens: int | None
    ttft_s: float | None
    itl_s: float | None
    kv_hit_rate: float | None
    phases: Phases | None
    gone: bool
    trace: dict[str, Any] | None
    worker: int | None = None
    """The instance that decoded it."""
    routed_s: float | None = None
    """How long a worker was looked for."""


class RequestObserver:
    """The life of one admitted request. Times are seconds on the caller's monotonic clock."""

    def __init__(
        self, metrics: HttpMetrics, series: _Series, labels: tuple[str, Endpoint, RequestType], started_s: float
    ) -> None:
        self._metrics = metrics
        self._series = series
        self._labels = labels
        self._started_s = started_s
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._prompt_tokens: int | None = None
        self._tokens = 0
        self._ended = False
        self._routed = False
        self._phases: Phases | None = None
        self._gone = False
        self._cached_tokens: int | None = None
        self._kv_hit_rate: float | None = None
        self._trace: dict[str, Any] | None = None
        self._worker: int | None = None
        self._routed_s: float | None = None
        self.migrations = 0
        """How often the answer went on at another worker."""
        self.lost = 0
        """How many workers were lost one after the other with the request: it may be what kills them."""
        series.inflight.inc()
        series.queued.inc()
        metrics.queued += 1

    def on_prompt(self, prompt_tokens: int) -> None:
        """The Processor has sent the prompt's length. It is recorded once, and only for requests that get tokens."""
        if self._prompt_tokens is None:
            self._prompt_tokens = prompt_tokens
            if self._first_s is not None:
                self._series.isl.observe(prompt_tokens)

    def on_tokens(self, count: int, now_s: float) -> None:
        """`count` new tokens arrived together."""
        if count <= 0:
            return
        series = self._series
        series.output_tokens.inc(count)
        self._tokens += count
        if self._first_s is None:
            series.queued.dec()
            self._metrics.queued -= 1
            self._first_s = now_s
            series.ttft.observe(now_s - self._started_s)
            self._metrics.served.first(now_s - self._started_s, count)
            if self._prompt_tokens is not None:
                series.isl.observe(self._prompt_tokens)
        elif self._last_s is not None:
            series.itl.observe((now_s - self._last_s) / count, count)
            self._metrics.served.more(now_s - self._last_s, count)
        self._last_s = now_s

    def on_cached(self, cached_tokens: int) -> None:
        """Prompt tokens that were found in a KV cache. With several answers, the largest number counts."""
        self._cached_tokens = max(cached_tokens, self._cached_tokens or 0)

    def on_routed(self, kv_hit_rate: float) -> None:
        """A Router chose the worker, and knew this share of the prompt to be cached there."""
        if not self._routed:
            self._routed = True
            self._kv_hit_rate = kv_hit_rate
            self._metrics.router.began(self._labels[0], kv_hit_rate)

    def on_migrated(self, times: int) -> None:
        """The answer goes on at another worker, as its own was lost."""
        self.migrations += times
        self._metrics.migrations.labels(self._labels[0], "ongoing_request").inc(times)

    def begins_anew(self) -> None:
        """The answer is generated once more, and nobody has seen the tokens so far: lengths and gaps leave them out."""
        self._tokens, self._last_s = 0, None

    def on_phases(self, phases: Phases) -> None:
        """The worker says how the time to the first token was spent."""
        self._phases = phases

    def on_trace(self, trace: dict[str, Any]) -> None:
        """The Processor names the prompt's blocks and the worker: `hashes` and `worker`."""
        self._trace = trace

    def on_placed(self, routed_s: float | None) -> None:
        """The Processor says how long it looked for a worker."""
        self._routed_s = routed_s

    def on_worker(self, worker: int) -> None:
        """The Processor names the instance that gave the last token."""
        self._worker = worker

    def ended_request(self) -> EndedRequest:
        """The facts so far."""
        ttft_s = None if self._first_s is None else self._first_s - self._started_s
        return EndedRequest(
            self._labels[0],
            self._prompt_tokens,
            self._tokens,
            self._cached_tokens,
            ttft_s,
            self._itl_s(),
            self._kv_hit_rate,
            self._phases,
            self._gone,
            self._trace,
            self._worker,
            self._routed_s,
        )

    def gone(self) -> None:
        """The client went away: the request says nothing about targets."""
        self._gone = True

    def end(self, status: Status, now_s: float) -> None:
        """Once: a second call changes nothing."""
        if self._ended:
            return
        self._ended = True
        self._metrics.served.ended()
        series = self._series
        series.inflight.dec()
        if self._first_s is None:
            series.queued.dec()
            self._metrics.queued -= 1
        elif self._tokens:
            series.osl.observe(self._tokens)
            self._remember(status)
        if self._cached_tokens is not None:
            series.cached.observe(self._cached_tokens)
        series.duration.observe(now_s - self._started_s)
        self._judge(status)
        if self._routed:
            ttft_s = None if self._first_s is None else self._first_s - self._started_s
            streamed_s = 0.0 if self._first_s is None or self._last_s is None else self._last_s - self._first_s
            lengths = (self._prompt_tokens or 0, self._tokens)
            self._metrics.router.ended(self._labels[0], now_s - self._started_s, ttft_s, streamed_s, lengths)
        self._metrics.requests.labels(*self._labels, status).inc()

    def _judge(self, status: Status) -> None:
        """Count the request's outcome against the targets. An answer without tokens (an embedding) has none."""
        if self._gone or not any(self._metrics.targets_s):
            return
        if status != "success":
            self._metrics.outcomes["failed"] += 1
        elif self._first_s is not None:
            outcome = outcome_of(self._first_s - self._started_s, self._itl_s(), self._metrics.targets_s, self._phases)
            self._metrics.outcomes[outcome] += 1

    def _itl_s(self) -> float | None:
        """The mean gap between its tokens; None: it has no two."""
        if self._first_s is None or self._last_s is None or self._tokens < 2:
            return None
        return (self._last_s - self._first_s) / (self._tokens - 1)

    def _remember(self, status: Status) -> None:
        """A request that was cut short says nothing of lengths."""
        first_s, last_s, isl = self._first_s, self._last_s, self._prompt_tokens
        if status != "success" or first_s is None or last_s is None or isl is None:
            return
        self._metrics.recent.answered(last_s, isl, self._tokens, first_s - self._started_s, self._itl_s())


class RouterMetrics:
    """The requests that a Router placed, under Dynamo's names. Gaps between tokens are counted at a request's end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, low: float, high: float, count: int) -> Histogram:
            bounds = log_buckets(low, high, count)
            return Histogram(f"{ROUTER_PREFIX}_{name}", text, ["model"], buckets=bounds, registry=registry)

        self._started = Counter(f"{ROUTER_PREFIX}_requests_started", "Requests placed", ["model"], registry=registry)
        self._requests = Counter(f"{ROUTER_PREFIX}_requests", "Requests that have ended", ["model"], registry=registry)
        self._ttft = histogram("time_to_first_token_seconds", "Time to first token", 0.001, 480.0, 18)
        self._duration = histogram("request_duration_seconds", "Duration of requests", 1.0, 256.0, 10)
        self._isl = histogram("input_sequence_tokens", "Prompt length in tokens", 50.0, 128000.0, 12)
        self._osl = histogram("output_sequence_tokens", "Generated length in tokens", 50.0, 32000.0, 10)
        name = f"{ROUTER_PREFIX}_inter_token_latency_seconds"
        self._itl = GapHistogram(name, "Time between tokens after the first", log_buckets(0.001, 2.0, 13))
        registry.register(self._itl)
        bounds = [n / 20 for n in range(21)]
        text = "Share of the prompt that the chosen worker has cached"
        self._hit_rate = Histogram(HIT_RATE_METRIC, text, ["model"], buckets=bounds, registry=registry)

    def began(self, model: str, kv_hit_rate: float) -> None:
        self._started.labels(model).inc()
        self._hit_rate.labels(model).observe(kv_hit_rate)

    def ended(
        self, model: str, duration_s: float, ttft_s: float | None, streamed_s: float, lengths: tuple[int, int]
    ) -> None:
        """`streamed_s` is the time from the first token to the last, `lengths` those of prompt and answer."""
        self._requests.labels(model).inc()
        self._duration.labels(model).observe(duration_s)
        isl, osl = lengths
        if ttft_s is None:
            return
        self._ttft.labels(model).observe(ttft_s)
        self._isl.labels(model).observe(isl)
        self._osl.labels(model).observe(osl)
        if osl > 1:
            self._itl.labels(model).observe(streamed_s / (osl - 1), osl - 1)

    def hit_rates(self) -> tuple[float, float]:
        """(sum, count) over all models."""
        return _sum(self._hit_rate, "_sum"), _sum(self._hit_rate, "_count")


class HttpMetrics:
    """All of the Frontend's metrics, in a registry of their own. `targets_s` are those for TTFT and ITL, if any."""

    def __init__(self, targets_s: tuple[float | None, float | None] = (None, None)) -> None:
        self.targets_s = targets_s
        self.outcomes: Counts[str] = Counts()
        """Ended requests by `core.traffic.OUTCOMES`."""
        # `…_created` gauges would double the size of the page, and Dynamo has none.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._series: dict[str, _Series] = {}
        self._histograms: dict[str, Collector] = {}
        self.queued = 0
        """Requests of all models that still wait for their first token."""
        self.recent = RecentRequests()
        """The requests of all models, one by one."""
        self.served = Served()
        """The counts of all models that the arbiter hears."""
        model = ["model"]
        self.requests = Counter(
            f"{PREFIX}_requests",
            "Total number of LLM requests processed",
            [*model, "endpoint", "request_type", "status"],
            registry=self.registry,
        )
        self.requests_started = Counter(
            f"{PREFIX}_requests_started", "Total number of LLM requests admitted", model, registry=self.registry
        )
        self.inflight_requests = self._gauge("inflight_requests", "Requests from admission to their end")
        self.queued_requests = self._gauge("queued_requests", "Requests that still wait for their first token")
        self.disconnected_clients = Gauge(
            f"{PREFIX}_disconnected_clients",
            "Clients that went away before their answer was complete",
            registry=self.registry,
        )
        self.migrations = Counter(
            f"{PREFIX}_model_migration",
            "Answers that went on at another worker after their own was lost",
            [*model, "migration_type"],
            registry=self.registry,
        )
        self.output_tokens = Counter(f"{PREFIX}_output_tokens", "Tokens generated", model, registry=self.registry)
        self.request_duration = self._histogram("request_duration_seconds", "Duration of requests", 1.0, 256.0, 10)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Time to first token", 0.001, 480.0, 18
        )
        suffix, text = "inter_token_latency_seconds", "Time between tokens after the first"
        self.inter_token_latency = GapHistogram(f"{PREFIX}_{suffix}", text, log_buckets(0.001, 2.0, 13))
        self.registry.register(self.inter_token_latency)
        self._histograms[suffix] = self.inter_token_latency
        self.input_sequence_tokens = self._histogram(
            "input_sequence_tokens", "Prompt length in tokens", 50.0, 128000.0, 12
        )
        self.output_sequence_tokens = self._histogram(
            "output_sequence_tokens", "Generated length in tokens", 50.0, 32000.0, 10
        )
        self.cached_tokens = self._histogram(
            "cached_tokens", "Prompt tokens found in a KV cache, per request", 50.0, 128000.0, 12
        )

    def begin(self, model: str, endpoint: Endpoint, request_type: RequestType, started_s: float) -> RequestObserver:
        """A request for a served model was admitted; call `end` on what is returned, whatever happens."""
        label = model.lower()
        series = self._series.get(label)
        if series is None:
            series = self._series[label] = _Series(self, label)
        series.started.inc()
        self.recent.began(started_s)
        return RequestObserver(self, series, (label, endpoint, request_type), started_s)

    def refused(self, model: str | None, endpoint: Endpoint, request_type: RequestType) -> None:
        """A request was answered with an error before it was admitted. `model` is None where it is not one of ours."""
        label = UNKNOWN_MODEL if model is None else model.lower()
        self.requests.labels(label, endpoint, request_type, "error").inc()

    def counters(self) -> dict[str, float]:
        """The sums over all models, under the names of `core.traffic`: a planner counts by them."""
        counters = {REQUESTS: _sum(self.requests_started, "_total")}
        for name, suffix in HISTOGRAMS.items():
            histogram = self._histograms[suffix]
            counters[f"{name}_sum"], counters[f"{name}_count"] = _sum(histogram, "_sum"), _sum(histogram, "_count")
        if "router" in self.__dict__:
            counters[f"{HIT_RATE}_sum"], counters[f"{HIT_RATE}_count"] = self.router.hit_rates()
        return counters

    def against_targets(self) -> dict[str, float]:
        """The outcomes of requests, and the targets in ms, as a worker reports them. Empty without targets."""
        if not any(self.targets_s):
            return {}
        names = zip(("ttft_ms", "itl_ms"), self.targets_s, strict=True)
        targets = {f"{TARGET_PREFIX}{name}": 1000 * value for name, value in names if value is not None}
        return targets | {f"{TARGET_PREFIX}{name}": float(self.outcomes[name]) for name in OUTCOMES}

    @cached_property
    def router(self) -> RouterMetrics:
        """On the page from the first request on that a Router placed."""
        return RouterMetrics(self.registry)

    def exposition(self) -> bytes:
        """The text format, for `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"{PREFIX}_{name}", text, ["model"], registry=self.registry)

    def _histogram(self, name: str, text: str, low: float, high: float, count: int) -> Histogram:
        buckets = log_buckets(low, high, count)
        made = Histogram(f"{PREFIX}_{name}", text, ["model"], buckets=buckets, registry=self.registry)
        self._histograms[name] = made
        return made


def _sum(metric: Collector, suffix: str) -> float:
    """Over all samples whose name ends so."""
    samples = (sample for family in metric.collect() for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name.endswith(suffix))
