"""The points of a sweep, from the limits of an engine. Pure.

Prompts: the sixteen lengths of Dynamo's profiler, and lengths that double, because short prompts are where TTFT bends.
Decode: up to six context lengths, as Dynamo's, with up to six numbers of requests each, from one to all that fit.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass

PREFILL_STEPS = 16
DECODE_STEPS = 6
SHORTEST = 100
"""Tokens, of a prompt and of a context."""
LEFT_FREE = 512
"""Tokens of the model's context that a prompt leaves for its answer, as Dynamo's profiler does."""
ANSWER = 500
"""Tokens that a request decodes there; here it is what is kept free of a sequence for passes that are measured."""
CONTEXT_MAX = 16_384
"""Unless another longest context is asked for."""
KV_MAX = 0.9
"""Share of the KV cache that is filled at most: above it a scheduler may preempt, which is another measurement."""
MIXED_CONTEXT = 1024
"""Tokens of the requests that decode while a prompt is computed beside them."""
MIXED_CHUNK_MIN, MIXED_CHUNK_MAX = 64, 4096
CACHED = 0.5
"""Share of a prompt that was there before, where a cached prefix is measured."""


class Kind(enum.StrEnum):
    """The kind of a point. `CACHED`: a partly cached prompt. `DECODE`: a pass that only decodes. `MIXED`: a pass that
    also computes a prompt."""

    PREFILL = "prefill"
    CACHED = "cached"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """A prompt of `tokens`, of which `cached` are in the cache. Or `requests` that decode at a context of `tokens`,
    beside a prompt of `chunk` tokens in the same pass."""

    kind: Kind
    tokens: int
    requests: int = 1
    cached: int = 0
    chunk: int = 0

    @property
    def cost(self) -> float:
        """Relative cost of one repetition: computed prompt tokens, and a fixed part."""
        return 4096 + self.tokens * self.requests

    def __str__(self) -> str:
        if self.kind is Kind.DECODE:
            return f"decode, {self.requests} at {self.tokens} tokens"
        if self.kind is Kind.MIXED:
            return f"mixed, {self.requests} at {self.tokens} tokens with a prompt of {self.chunk}"
        return f"prompt of {self.tokens} tokens" + (f", {self.cached} cached" if self.cached else "")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an engine: tokens of its KV cache, tokens of one sequence, requests at once."""

    max_kv_tokens: int
    context_length: int
    max_num_seqs: int
    max_num_batched_tokens: int = 8192

    def within(self, context_max: int) -> Limits:
        """The same, with sequences of `context_max` tokens at most."""
        return Limits(
            self.max_kv_tokens,
            min(self.context_length, context_max),
            self.max_num_seqs,
            self.max_num_batched_tokens,
        )


def sweep(
    limits: Limits, kinds: Collection[Kind], steps: tuple[int, int] = (PREFILL_STEPS, DECODE_STEPS)
) -> list[Point]:
    """The points of those kinds. `steps`: lengths of prompts, and contexts (and loads of each)."""
    points: list[Point] = []
    longest = max(1, min(limits.context_length, int(limits.max_kv_tokens * KV_MAX)) - LEFT_FREE)
    if Kind.PREFILL in kinds:
        lengths = {*_linear(SHORTEST, longest, steps[0]), *_doubling(longest, steps[0])}
        points += [Point(Kind.PREFILL, length) for length in sorted(lengths)]
    if Kind.CACHED in kinds:
        some = _linear(SHORTEST, longest, 4)[1:]
        points += [Point(Kind.CACHED, length, cached=int(length * CACHED)) for length in some]
    if Kind.DECODE in kinds:
        for context in _linear(SHORTEST, longest, steps[1]):
            points += [Point(Kind.DECODE, context, requests) for requests in loads(limits, context, steps[1])]
    if Kind.MIXED in kinds:
        points += _mixed(limits, min(MIXED_CONTEXT, longest), 2 if steps[1] < DECODE_STEPS else 3)
    return points


def _mixed(limits: Limits, context: int, steps: int) -> list[Point]:
    """A few loads without the least, each with a short prompt and one that fills a pass, or `MIXED_CHUNK_MAX`."""
    found = []
    for requests in loads(limits, context, steps)[1:]:
        most = min(MIXED_CHUNK_MAX, limits.max_num_batched_tokens - requests, limits.context_length - 1)
        if most >= MIXED_CHUNK_MIN:
            found += [Point(Kind.MIXED, context, requests, chunk=chunk) for chunk in (most // 8, most)]
    return found


def path_lengths(context_length: int, *, apart: bool) -> list[int]:
    """Prompts whose way over HTTP is measured: more of them where a hand-off is on it (prefill and decode `apart`), for
    that takes longer with its size."""
    longest = max(1, context_length // 2)
    wanted = (128, 512, 1024, 4096) if apart else (128, 1024)
    return sorted({*(min(tokens, longest) for tokens in wanted), longest})


def loads(limits: Limits, context: int, steps: int) -> list[int]:
    """Numbers of requests at that context, from one to all that fit, each about the same factor above the last."""
    most = max(1, min(limits.max_num_seqs, int(limits.max_kv_tokens * KV_MAX) // (context + LEFT_FREE)))
    ratio = most ** (1 / max(1, steps - 1))
    return sorted({round(ratio**step) for step in range(steps)})


def _linear(low: int, high: int, steps: int) -> list[int]:
    if high <= low or steps < 2:
        return [high]
    return sorted({round(low + (high - low) * step / (steps - 1)) for step in range(steps)})


def _doubling(longest: int, steps: int) -> list[int]:
    """Powers of two from 128 on; fewer where a small sweep is asked for."""
    powers = [2**power for power in range(7, 18) if 2**power <= longest]
    return powers if steps >= PREFILL_STEPS else powers[::3]
