"""`dynamo bench`: our load generator. Its figures are those of `vllm bench serve`, under the same names."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from statistics import fmean, median, pstdev
from typing import Any

from dynamo_local.components.measurement import LOWEST_TOKEN, TOKENS
from dynamo_local.errors import DynamoError
from dynamo_local.measuring.stream import Server, answer_to
from dynamo_local.simulator.trace import TraceRequest

LATENCIES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
STATISTICS = {"mean": "Mean", "median": "Median", "std": "Std", "p99": "P99"}


class NoAnswer(DynamoError):
    """No request was answered, so that there is nothing to report."""

    code = "no_answer"


@dataclass(frozen=True, slots=True)
class Sent:
    """One request: its prompt and answer in tokens, when it began and ended, and the times of its pieces of text.

    `error` says why there is no whole answer.
    """

    input_tokens: int
    began_s: float
    ended_s: float
    times_s: tuple[float, ...] = ()
    output_tokens: int = 0
    error: str | None = None


def arrivals(count: int, rate: float, isl: int, osl: int, seed: int) -> list[TraceRequest]:
    """Requests of equal lengths with Poisson arrivals. An infinite rate: all at once."""
    random, at_s, found = Random(seed), 0.0, []
    for _ in range(count):
        found.append(TraceRequest(at_s, isl, osl))
        at_s += random.expovariate(rate) if math.isfinite(rate) else 0.0
    return found


@dataclass(frozen=True, slots=True)
class Load:
    """The load: requests with their times, and how many may be under way at once (None: any number)."""

    requests: Sequence[TraceRequest]
    concurrency: int | None = None
    seed: int = 0


@dataclass(slots=True)
class Generator:
    """Sends a load to an OpenAI server. `on_end` is called at each request's end."""

    server: Server
    model: str
    on_end: Callable[[], None] = field(default=lambda: None)

    async def run(self, load: Load) -> list[Sent]:
        """All requests, whatever becomes of each."""
        random, began_s = Random(load.seed), time.monotonic()
        slots = asyncio.Semaphore(load.concurrency or len(load.requests) or 1)

        async def one(request: TraceRequest, own: Random) -> Sent:
            await asyncio.sleep(began_s + request.at_s - time.monotonic())
            async with slots:
                sent = await self._send(request, own)
            self.on_end()
            return sent

        return list(await asyncio.gather(*(one(each, Random(random.getrandbits(32))) for each in load.requests)))

    async def _send(self, request: TraceRequest, random: Random) -> Sent:
        tokens = request.output_length
        body = {
            "model": self.model,
            "prompt": [LOWEST_TOKEN + random.randrange(TOKENS) for _ in range(request.input_length)],
            "max_tokens": tokens,
            "min_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        whole = self.server.request("/v1/completions", json.dumps(body).encode())
        began_s = time.monotonic()
        stream = await answer_to(whole, self.server)
        counted = stream.usage.get("completion_tokens") or len(stream.times_s)  # without usage: a piece per token
        times_s = tuple(stream.times_s)
        return Sent(request.input_length, began_s, time.monotonic(), times_s, counted, stream.fault())


def figures(sent: Sequence[Sent]) -> dict[str, Any]:
    """The figures of a run, as `vllm bench serve` names and computes them. Raises `NoAnswer`."""
    whole = [each for each in sent if each.error is None]
    if not whole:
        raise NoAnswer(f"none of {len(sent)} requests was answered; the first: {sent[0].error if sent else 'none'}")
    duration_s = max(each.ended_s for each in sent) - min(each.began_s for each in sent)
    inputs, outputs = (sum(getattr(each, name) for each in whole) for name in ("input_tokens", "output_tokens"))
    samples = {
        "ttft": [each.times_s[0] - each.began_s for each in whole],
        "tpot": [
            (each.times_s[-1] - each.times_s[0]) / (each.output_tokens - 1) for each in whole if each.output_tokens > 1
        ],
        "itl": [after - before for each in whole for before, after in pairwise(each.times_s)],
        "e2el": [each.times_s[-1] - each.began_s for each in whole],
    }
    return {
        "completed": len(whole),
        "failed": len(sent) - len(whole),
        "duration": duration_s,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(whole) / duration_s,
        "output_throughput": outputs / duration_s,
        "total_token_throughput": (inputs + outputs) / duration_s,
        **{key: value for name, values in samples.items() for key, value in _statistics(name, values).items()},
        "errors": list(dict.fromkeys(each.error for each in sent if each.error is not None))[:5],
    }


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(value * 1000 for value in seconds)
    if not ordered:
        return {f"{statistic}_{name}_ms": None for statistic in STATISTICS}
    at = (len(ordered) - 1) * 0.99  # linear between two samples, as numpy's percentile
    low, part = int(at), at - int(at)
    p99 = ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * part
    values = (fmean(ordered), median(ordered), pstdev(ordered), p99)
    return {f"{statistic}_{name}_ms": value for statistic, value in zip(STATISTICS, values, strict=True)}


ROWS = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration": "Benchmark duration (s)",
    "total_input_tokens": "Total input tokens",
    "total_output_tokens": "Total generated tokens",
    "request_throughput": "Request throughput (req/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "total_token_throughput": "Total token throughput (tok/s)",
}


def table(found: Mapping[str, Any]) -> list[str]:
    """The figures, as `vllm bench serve` prints them."""
    lines = ["{s:{c}^{n}}".format(s=" Serving Benchmark Result ", n=50, c="=")]
    lines += [_row(label, found[key]) for key, label in ROWS.items()]
    for name, title in LATENCIES.items():
        lines.append("{s:{c}^{n}}".format(s=title, n=50, c="-"))
        lines += [
            _row(f"{label} {name.upper()} (ms)", found[f"{key}_{name}_ms"])
            for key, label in STATISTICS.items()
            if key != "std"
        ]
    return [*lines, "=" * 50]


def _row(label: str, value: float | None) -> str:
    shown = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label + ':':<40} {shown:<10}".rstrip()
