"""What an engine takes, by its profile and by what was learned about it since. Pure; seconds and tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

PROMPT_STEP = 128
"""Prompt lengths are looked up in steps of so many tokens: the profile has seventeen points."""
PROMPTS_KEPT = 8
"""Of so many demands it is remembered what their prompts take."""
KV_STEPS = 96
CONTEXTS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 32768, 65536)
"""Between two of these, and of `KV_STEPS` + 1 points of KV in use, the time of a decode pass is linear."""


class Passes(Protocol):
    """`profiles.ProfileModel`."""

    @property
    def max_kv_tokens(self) -> int:
        """Tokens that the KV cache of one engine holds."""
        ...

    def ttft_s(self, prompt_tokens: int) -> float:
        """Seconds of a prefill of so many tokens, alone."""
        ...

    def itl_s(self, active_kv_tokens: int, mean_context: float) -> float:
        """Seconds of a decode pass."""
        ...


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How engines are used. `batched_tokens`: prompt tokens of one prefill pass, which prompts share where `batches`
    (else one prompt at a time). `turns`: workers are taken in turn (round robin); else a prefill goes to the first
    that is free, and a stream to where the least KV is in use. `prefill_factor` and `decode_factor` are what was
    measured over what the profile says."""

    batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_kv_tokens: int = 0
    batches: bool = False
    turns: bool = False
    prefill_factor: float = 1.0
    decode_factor: float = 1.0


class Engine:
    """Times of passes, from tables: a queueing twin asks tens of thousands of times."""

    def __init__(self, passes: Passes, options: EngineOptions) -> None:
        self.options = options
        self.max_kv_tokens = options.max_kv_tokens or passes.max_kv_tokens
        self.prompts_s = lru_cache(maxsize=PROMPTS_KEPT)(self._prompts_s)
        """Seconds of each of these prompts: the same ones are asked for again and again."""
        factor = options.prefill_factor
        steps = options.batched_tokens // PROMPT_STEP + 2
        self._prefill = [passes.ttft_s(max(1, step * PROMPT_STEP)) * factor for step in range(steps)]
        kv_step = self.max_kv_tokens / KV_STEPS
        rows = [
            [passes.itl_s(int(column * kv_step), context) * options.decode_factor for column in range(KV_STEPS + 2)]
            for context in CONTEXTS
        ]
        self.itl_s = _decode_pass(rows, kv_step)
        """Seconds of a decode pass with so many tokens of KV in use, so many of them per stream."""

    def pass_s(self, tokens: int) -> float:
        """Of a prefill pass of so many prompt tokens, at most `batched_tokens`."""
        step, rest = divmod(tokens, PROMPT_STEP)
        low = self._prefill[step]
        return low + (self._prefill[step + 1] - low) * rest / PROMPT_STEP

    def prompt_s(self, tokens: int) -> float:
        """Of a whole prompt, in as many passes as it takes."""
        full, rest = divmod(tokens, self.options.batched_tokens)
        return full * self.pass_s(self.options.batched_tokens) + (self.pass_s(rest) if rest else 0.0)

    def _prompts_s(self, tokens: tuple[int, ...]) -> tuple[float, ...]:
        return tuple(self.prompt_s(each) for each in tokens)


def _decode_pass(rows: Sequence[Sequence[float]], kv_step: float) -> Callable[[float, float], float]:
    """A function with all that it needs at hand: nothing is asked as often."""
    rises = [[high - low for low, high in pairwise(row)] for row in rows]
    cells = [
        (float(short), float(long - short), rows[row], rises[row], rows[row + 1], rises[row + 1])
        for row, (short, long) in enumerate(pairwise(CONTEXTS))
    ]
    by_context = [cells[0], *cells, cells[-1]]

    def itl_s(kv_tokens: float, context: float) -> float:
        from_context, width, shorts, short_rises, longs, long_rises = by_context[bisect_right(CONTEXTS, context)]
        at = kv_tokens / kv_step
        if at > KV_STEPS:
            at = KV_STEPS
        column = int(at)
        part = at - column
        short = shorts[column] + short_rises[column] * part
        share = (context - from_context) / width
        if share <= 0:
            return short
        long = longs[column] + long_rises[column] * part
        if share >= 1:
            share = 1.0
        return short + (long - short) * share

    return itl_s
