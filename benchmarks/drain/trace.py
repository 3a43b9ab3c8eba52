"""Requests of a chat service (`benchmarks.traces`), made small enough for a host whose two cores play eight GPUs.

Every `THINNING`-th request is taken. Prompts are `PROMPT_SCALE` times shorter; the engine is given a profile that takes
as long for them. Answers end at `answer_max`. Time is divided by `speed`, and the trace begins anew when it is over.
Arrivals, the lengths of answers and shared prefixes are the trace's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dynamo_local.simulator.trace import HASH_BLOCK_TOKENS as BLOCK_TOKENS
from dynamo_local.simulator.trace import TraceRequest

PROMPT_SCALE = 16
PROMPT_MAX = 4096
"""Tokens, after scaling: the longest 2 % are cut."""
NATURAL_MAX = 96
"""Answers up to this length may end by themselves (`finish_reason` "stop"); longer ones go on to their limit."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: when (seconds after the start, wall clock), what, and how long an answer it wants."""

    at_s: float
    prompt: str
    max_tokens: int
    ignore_eos: bool


def asks(trace: Sequence[TraceRequest], *, thinning: int, speed: float, answer_max: int) -> Iterator[Ask]:
    """Requests for ever, in order of time; the same arguments give the same requests."""
    taken = trace[::thinning]
    length_s = (trace[-1].at_s - trace[0].at_s) / speed
    number = 0
    while True:
        begin_s = number // len(taken) * length_s
        for row in taken:
            at_s = begin_s + row.at_s / speed
            tokens = min(row.output_length, answer_max)
            yield Ask(at_s, _prompt(number, row), tokens, ignore_eos=tokens > NATURAL_MAX)
            number += 1


def _prompt(number: int, row: TraceRequest) -> str:
    """Text of about as many tokens as the (scaled) request has, beginning as others of the same blocks do.

    Every request ends in a number of its own, so no two have the same right answer.
    """
    length = max(8, min(PROMPT_MAX, row.input_length // PROMPT_SCALE))
    words = (f" b{block:x}" + " the" * (BLOCK_TOKENS // PROMPT_SCALE - 6) for block in row.hash_ids)
    text, tokens = "", 0
    for block in words:
        if tokens >= length:
            break
        text += block
        tokens += BLOCK_TOKENS // PROMPT_SCALE
    return f"{text.strip()} Request {number}."
