"""One repetition: what is asked of a worker for a point, and what its answer says. Pure but for the asking."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from dynamo_local.errors import DynamoError
from dynamo_local.profiles.measuring.points import KV_MAX, Kind, Limits, Point
from dynamo_local.profiles.measuring.statistics import Sample, robust_mean

PROMPT_TOKENS = 8192
"""Short prompts are measured several at a time, one after the other: so many tokens, and at most `PROMPTS_MAX`."""
PROMPTS_MAX = 5
PASSES = 40
"""Decode passes of a repetition."""
MIXED_PASSES = 10
"""Those with a prompt beside them."""
MIXED_LONGER = 1000
"""Tokens more for the others meanwhile: until the next prompt is there, a quick engine runs many passes without one."""
TIMEOUT_S = 300.0


class NoMeasurement(DynamoError):
    """A repetition gave nothing that can be counted."""

    code = "no_measurement"


def request_of(point: Point, limits: Limits, seed: int) -> dict[str, Any]:
    """What `components.measuring` is asked for."""
    if point.kind not in (Kind.DECODE, Kind.MIXED):
        prompts = max(1, min(PROMPTS_MAX, PROMPT_TOKENS // point.tokens))
        return {
            "prompts": prompts,
            "tokens": point.tokens,
            "cached": point.cached,
            "seed": seed,
            "timeout_s": TIMEOUT_S,
        }
    # The first of them decode while the last prompts are computed, so the sequences grow by these passes, too.
    filling = math.ceil(point.requests * point.tokens / limits.max_num_batched_tokens)
    grown = filling + PASSES
    tokens = max(1, point.tokens - grown // 2)
    room = (int(limits.max_kv_tokens * (1 + KV_MAX) / 2) - point.chunk) // point.requests - tokens
    longest = grown + (PASSES if point.kind is Kind.DECODE else MIXED_LONGER)
    most = max(2, min(longest, limits.context_length - tokens - 1, room))
    wanted = PASSES if point.kind is Kind.DECODE else MIXED_PASSES
    return {
        "prompts": point.requests,
        "tokens": tokens,
        "passes": min(wanted, max(1, most - filling - 1)),
        "beside": point.chunk,
        "answer_max": most,
        "seed": seed,
        "timeout_s": TIMEOUT_S,
    }


def sample_of(point: Point, answer: Mapping[str, Any], asked: Mapping[str, Any], worker: str, at_s: float) -> Sample:
    """What the answer says. Raises `NoMeasurement`."""
    rows = answer["passes"]
    beside = f" and a prompt of {point.chunk}" if point.chunk else ""
    if point.kind in (Kind.DECODE, Kind.MIXED):
        if rows:
            value_s = robust_mean([row[0] for row in rows])
            return Sample(worker, at_s, value_s * 1000, float(point.requests), fmean(row[2] for row in rows))
        if answer["itl_s"] is None or point.kind is Kind.MIXED:
            raise NoMeasurement(f"no pass had all {point.requests} requests of {point.tokens} tokens in it{beside}")
        kv_tokens = answer.get("kv_tokens") or point.requests * (asked["tokens"] + asked["answer_max"] / 2)
        return Sample(worker, at_s, answer["itl_s"] * 1000, float(point.requests), kv_tokens)
    prompts = int(asked["prompts"])
    if rows:
        cached = point.tokens - sum(row[3] for row in rows) / prompts
        return Sample(worker, at_s, sum(row[0] for row in rows) / prompts * 1000, 1.0, max(0.0, cached))
    if not answer["ttft_s"]:
        raise NoMeasurement(f"no prompt of {point.tokens} tokens was answered")
    return Sample(worker, at_s, robust_mean(answer["ttft_s"]) * 1000, 1.0, float(point.cached))
