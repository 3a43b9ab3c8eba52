"""What Dynamo's own processes say of themselves, for planners: a worker's card, and metrics as counters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dynamo_local.commands.metrics_text import Metrics
from dynamo_local.core.traffic import (
    ACCEPT_LENGTH,
    ACCEPT_LENGTH_METRICS,
    ENDED,
    HISTOGRAMS,
    HIT_RATE,
    HIT_RATE_METRIC,
    REQUESTS,
    STARTED,
)

FRONTEND = "dynamo_frontend_"
SPECULATION = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}


def card_key(instance_key: str) -> str:
    """Where the card of the instance with that key is."""
    return instance_key.replace("v1/instances/", "v1/mdc/", 1)


def limits_of(value: bytes) -> dict[str, int | None]:
    """The engine's limits in a card; empty where it is none (others write there, too)."""
    try:
        card = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    card = card.get("card_json", card) if isinstance(card, dict) else {}
    engine = card.get("runtime_config") if isinstance(card, dict) else None
    if not isinstance(engine, dict):
        return {}
    blocks, size = _count(engine.get("total_kv_blocks")), _count(card.get("kv_cache_block_size"))
    return {
        "max_num_batched_tokens": _count(engine.get("max_num_batched_tokens")),
        "max_num_seqs": _count(engine.get("max_num_seqs")),
        "max_kv_tokens": blocks * size if blocks and size else None,
        "context_length": _count(engine.get("context_length")) or _count(card.get("context_length")),
        "dp_size": _count(engine.get("data_parallel_size")) or 1,
    }


def frontend_counters(metrics: Metrics) -> dict[str, float]:
    """Of Dynamo's frontend, under the names of `core.traffic`. Before its first request it has no series: 0."""
    started = metrics.sum(FRONTEND + STARTED)
    ended = metrics.sum(FRONTEND + ENDED)
    told = {REQUESTS: (ended or 0.0) if started is None else started}
    sources = {name: FRONTEND + suffix for name, suffix in HISTOGRAMS.items()} | {HIT_RATE: HIT_RATE_METRIC}
    for name, metric in sources.items():
        for part in ("sum", "count"):
            told[f"{name}_{part}"] = metrics.sum(f"{metric}_{part}") or 0.0
    return told


def worker_counters(metrics: Metrics, before: Mapping[str, float]) -> dict[str, float]:
    """Of Dynamo's worker: its engine's speculation, where it does that. `before` is what this answered last.

    vLLM counts it. SGLang and TRT-LLM tell a mean of just now: each look at it is one observation.
    """
    found = {name: metrics.sum(metric) for name, metric in SPECULATION.items()}
    told = {name: value for name, value in found.items() if value is not None}
    mean = metrics.first(*ACCEPT_LENGTH_METRICS)
    looks = (0.0, 0.0) if mean is None or mean < 1.0 else (mean, 1.0)  # 0: nothing was speculated yet
    for part, more in zip(("sum", "count"), looks, strict=True):
        name = f"{ACCEPT_LENGTH}_{part}"
        if more or name in before:
            told[name] = before.get(name, 0.0) + more
    return told


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
