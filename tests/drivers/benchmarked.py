"""A Frontend's counters: a benchmark's own numbers are compared with them."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import httpx

from dynamo_local.components.commands.metrics_text import Metrics


@dataclass(frozen=True)
class Counted:
    """Requests that a worker answers, by their end, and tokens of prompts and answers."""

    succeeded: float = 0.0
    failed: float = 0.0
    prompt_tokens: float = 0.0
    tokens: float = 0.0

    def __sub__(self, before: Counted) -> Counted:
        return Counted(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


def counted(url: str) -> Counted:
    metrics = Metrics(httpx.get(f"{url}/metrics", timeout=30).text)

    def sum_of(name: str, **labels: str) -> float:
        # Before its first request a counter is not there.
        return metrics.sum(f"dynamo_frontend_{name}", **labels) or 0.0

    def ended(status: str) -> float:
        counting = sum_of("requests_total", status=status, endpoint="tokenize")  # a client's question beforehand
        return sum_of("requests_total", status=status) - counting

    return Counted(ended("success"), ended("error"), sum_of("input_sequence_tokens_sum"), sum_of("output_tokens_total"))
