"""Corrections of the profile: measured time over profiled time, learned from requests that ended. Pure.

* **Prefill.** Waiting only adds, so a low quantile of TTFT over the profile's is that of prompts that never waited. If
  all of them waited, it says nothing of the engines. But then the workers were never idle: what they had done by then
  took them no longer than the time that they had, which is a second bound from above.
* **Decode.** An answer's gap between tokens is compared with what the profile says of as many streams as there were
  in its middle. That is known of answers so old that those beside them have ended, too.

Prompts that are prefilled on a decode worker make its gaps longer, whatever its engine can do. That is so while prompts
wait. `judged` is what was learned while they did not: the past is judged by it. `decode` has the pauses too, because
more decode workers do help against them now. Without this, phantom pauses made decode workers worth their price for
hours after each burst.

While even fast answers wait for longer than the target, nothing is learned of decode. Requests that wait there for a
prefill, or are prefilled there, would look like slow engines. With slow engines no fleet seems to help: the factor once
ran to 8, and the fleet stayed at one worker of each role. A factor near 1 counts as 1: bursts alone make the comparison
wrong by so much.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_local.planner.queueing import Passes
from dynamo_local.planner.values import Ended

WINDOW_S = 60.0
SERVED_S = 660.0
"""So long it is remembered how many workers served."""
ENDED_MIN = 30
ANSWERS = 250
"""With more answers than this the policy looks at every second one, or every third: it runs in the arbiter's loop."""
SAMPLE = 150
"""So many of them are compared; all of them say with how many others each one was."""
LOW_QUANTILE = 0.1
WAITED = 0.1
"""Where more of the answers have waited for a prefill, some may have been prefilled by decode workers."""
LONG_QUANTILE = 0.9
"""A quantile of the answers' durations. Requests that began earlier have nearly always ended by now."""
SEEN_MIN_S = 5.0
"""Over less than this it is not told how busy workers were."""
DEAD_BAND = 0.2
STEP = 0.05
"""Factors go in such steps: each new one is a new task for the queueing model."""
SLOWLY = 0.2
LEAST, MOST = 0.2, 8.0
REACHABLE = 0.7
"""A factor is not believed if one request alone then takes more than this share of its target. No fleet would help,
so nothing is planned for that. Decode workers that prefill themselves look that slow."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Measured over expected, as they are learned (`raw`), and as they are used."""

    prefill_raw: float = 1.0
    decode_raw: float = 1.0
    judged_raw: float = 1.0

    @property
    def prefill(self) -> float:
        """The factor of prefill passes."""
        return _used(self.prefill_raw)

    @property
    def decode(self) -> float:
        """The factor of decode passes, with the pauses for prompts that are prefilled there."""
        return _used(self.decode_raw)

    @property
    def judged(self) -> float:
        """The factor of decode passes alone."""
        return _used(self.judged_raw)


@dataclass(frozen=True, slots=True)
class Served:
    """So many workers of each role served from `since_s` to `at_s` (planner's clock, seconds)."""

    since_s: float
    at_s: float
    prefill: int
    decode: int


def with_served(served: tuple[Served, ...], newest: Served) -> tuple[Served, ...]:
    """Those of `SERVED_S`, ascending."""
    return tuple(each for each in (*served, newest) if each.at_s > newest.at_s - SERVED_S)


def _used(raw: float) -> float:
    if abs(raw - 1) < DEAD_BAND:
        return 1.0
    return round(round(raw / STEP) * STEP, 6)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Answers, every `stride`-th of them; of those whose time is from `from_s` to `until_s` all are known."""

    answers: Sequence[Ended]
    stride: int
    from_s: float
    until_s: float

    @property
    def reported(self) -> bool:
        return self.until_s - self.from_s >= SEEN_MIN_S


@dataclass(frozen=True, slots=True)
class Learning:
    """The bases of the factors: the profile's engine, the prompt tokens of one of its passes, and the targets in
    seconds. In `mixed` passes prompts delay tokens, so gaps say nothing of decode passes."""

    passes: Passes
    batched_tokens: int
    ttft_s: float
    itl_s: float
    mixed: bool = False

    def alone_s(self, isl: int) -> float:
        """TTFT of a prompt that never waits, by the profile."""
        full, rest = divmod(isl, self.batched_tokens)
        rest_s = self.passes.ttft_s(rest) if rest else 0.0
        return rest_s + full * self.passes.ttft_s(self.batched_tokens) if full else rest_s


def learned(before: Factors, ended: Sequence[Ended], served: Sequence[Served], by: Learning) -> Factors:
    """The factors after these answers (ascending), with these workers (ascending)."""
    if not served or len(ended) < ENDED_MIN:
        return before
    seen = _seen(ended, served)
    if len(seen.answers) < ENDED_MIN:
        return before
    sample = seen.answers[-SAMPLE:]
    fast_s = _quantile([each.ttft_s for each in sample if each.ttft_s is not None], LOW_QUANTILE)
    decode = None if by.mixed or fast_s > by.ttft_s else _decode(seen, served, by.passes)
    isl = sum(each.isl for each in sample) // len(sample)
    alone_s = [by.alone_s(each.isl) for each in seen.answers]
    waits = _waits(sample, alone_s[-SAMPLE:], before.prefill)
    reachable = REACHABLE * by.itl_s / by.passes.itl_s(isl, isl)
    return Factors(
        _towards(
            before.prefill_raw, _prefill(seen, served, alone_s), REACHABLE * by.ttft_s / max(by.alone_s(isl), 1e-9)
        ),
        _towards(before.decode_raw, decode, reachable),
        _towards(before.judged_raw, None if waits else decode, reachable),
    )


def _waits(sample: Sequence[Ended], alone_s: Sequence[float], prefill: float) -> bool:
    """Whether more than `WAITED` of these answers waited for longer than their prefill takes. `alone_s`: the TTFT of
    each by the profile, if it never waits.

    The dispatch sends a prompt to a decode worker only for a longer wait than that.
    """
    known = [(each.ttft_s, one_s) for each, one_s in zip(sample, alone_s, strict=True) if each.ttft_s is not None]
    return sum(ttft_s > 2 * prefill * one_s for ttft_s, one_s in known) > WAITED * len(known)


def _seen(ended: Sequence[Ended], served: Sequence[Served]) -> _Seen:
    now_s = served[-1].at_s
    long_s = _quantile([each.lasted_s - (each.ttft_s or 0.0) for each in ended[-SAMPLE:]], LONG_QUANTILE)
    until_s = now_s - long_s
    first = bisect_left(ended, until_s - WINDOW_S, key=lambda each: each.at_s)
    from_s = max(until_s - WINDOW_S, served[0].since_s, ended[0].at_s if first == 0 else -math.inf)
    stride = max(1, math.ceil((len(ended) - first) / ANSWERS))
    return _Seen(ended[first::stride], stride, from_s, until_s)


def _towards(before: float, ratio: float | None, reachable: float) -> float:
    if ratio is None or not math.isfinite(ratio) or ratio <= 0:
        return before
    return before + SLOWLY * (min(max(ratio, LEAST), MOST, max(1.0, reachable)) - before)


def _prefill(seen: _Seen, served: Sequence[Served], alone_s: Sequence[float]) -> float | None:
    ratios = []
    busy_s = took_s = expected_s = 0.0  # busy and expected: by the profile
    for each, one_s in zip(seen.answers, alone_s, strict=True):
        if each.ttft_s is None or each.isl <= 0:
            continue
        first_s = one_s + (each.itl_s or 0.0)
        ratios.append(each.ttft_s / first_s)
        took_s += each.ttft_s
        expected_s += first_s
        if seen.from_s < each.at_s - each.lasted_s + each.ttft_s <= seen.until_s:
            busy_s += one_s * seen.stride
    if len(ratios) < ENDED_MIN:
        return None
    fast = _quantile(ratios[-SAMPLE:], LOW_QUANTILE)
    if fast <= 1:  # the quickest had cached prefixes; what all took, with their waiting, is nearer to the others
        return min(1.0, took_s / expected_s)
    if not seen.reported or busy_s <= 0:
        return None  # engines or a queue: that cannot be told yet
    had_s = sum(
        each.prefill * max(0.0, min(each.at_s, seen.until_s) - max(each.since_s, seen.from_s)) for each in served
    )
    return min(fast, max(1.0, had_s / busy_s))


def _decode(seen: _Seen, served: Sequence[Served], passes: Passes) -> float | None:
    reported = [(each.at_s, each.itl_s, each.osl - 1, each.isl) for each in seen.answers if each.itl_s and each.osl > 1]
    starts = sorted(at_s - itl_s * tokens for at_s, itl_s, tokens, _ in reported)
    ends = sorted(at_s for at_s, _, _, _ in reported)
    judged = [
        (middle_s, itl_s, tokens)
        for at_s, itl_s, tokens, _ in reported
        if seen.from_s < (middle_s := at_s - itl_s * tokens / 2) <= seen.until_s
    ]
    if len(judged) < ENDED_MIN or not seen.reported:
        return None
    lasted_s = sum(itl_s * tokens for _, itl_s, tokens, _ in reported)
    context = sum((isl + tokens / 2) * itl_s * tokens for _, itl_s, tokens, isl in reported) / lasted_s
    since = [each.since_s for each in served]
    took_s = expected_s = 0.0
    gaps_s: dict[float, float] = {}  # a few numbers of streams, asked for again and again
    for middle_s, itl_s, tokens in judged[-SAMPLE:]:
        workers = max(1, served[bisect_right(since, middle_s) - 1].decode)
        beside = (bisect_right(starts, middle_s) - bisect_right(ends, middle_s)) * seen.stride
        streams = max(1.0, beside / workers)
        if streams not in gaps_s:
            gaps_s[streams] = passes.itl_s(int(streams * context), context)
        took_s += itl_s * tokens
        expected_s += gaps_s[streams] * tokens
    return took_s / expected_s


def _quantile(values: Sequence[float], share: float) -> float:
    """The quantile of the values; 0 of none."""
    return sorted(values)[int(len(values) * share)] if values else 0.0
