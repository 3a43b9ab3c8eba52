"""The targets, and the sources of the estimates."""

from __future__ import annotations

import enum
import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from dynamo_local.core.isotonic import isotonic

DisaggPolicy = Literal["slo", "threshold"]
"""How a decode worker decides where a prompt is prefilled: by what it will cost; by length and queue (the seed's)."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds; None: none. `itl_s` holds for the mean of a request's own gaps between tokens."""

    ttft_s: float | None = None
    itl_s: float | None = None

    @classmethod
    def of_ms(cls, ttft_ms: float | None, itl_ms: float | None) -> Targets:
        """From milliseconds, as they are configured."""
        return cls(None if ttft_ms is None else ttft_ms / 1000, None if itl_ms is None else itl_ms / 1000)

    @property
    def seconds(self) -> tuple[float | None, float | None]:
        """Both."""
        return self.ttft_s, self.itl_s

    @property
    def given(self) -> bool:
        """Whether there is one."""
        return self.ttft_s is not None or self.itl_s is not None


class Perf(Protocol):
    """How long an engine's passes take, in seconds at speed 1. Pure: the same arguments give the same bits."""

    @property
    def max_kv_tokens(self) -> int:
        """How many tokens the KV cache of this engine holds."""
        ...

    @property
    def launch_s(self) -> float:
        """The fixed part of a prefill in seconds, paid once by a pass in which at least one prompt starts."""
        ...

    def prefill_s(self, context_tokens: int, new_tokens: int) -> float:
        """Seconds to compute `new_tokens` of a prompt behind `context_tokens` whose KV is there already."""
        ...

    def decode_s(self, batch: int, active_kv_tokens: int, mean_context: float) -> float:
        """Seconds for one token of each of `batch` (1 or more) sequences.

        Together they hold `active_kv_tokens` tokens of KV; their mean length is `mean_context` tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class Timing:
    """An engine's times at its speed: `speed` divides those of the profile."""

    perf: Perf
    speed: float = 1.0

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """A prompt alone, of which the first `cached_tokens` need not be computed; at least its last token is."""
        cached = max(0, min(cached_tokens, prompt_tokens - 1))
        return (self.perf.launch_s + self.perf.prefill_s(cached, prompt_tokens - cached)) / self.speed

    def itl_s(self, batch: int, kv_tokens: int) -> float:
        """A pass that decodes `batch` sequences with `kv_tokens` together; 0.0 of none."""
        if batch < 1:
            return 0.0
        return self.perf.decode_s(batch, kv_tokens, kv_tokens / batch) / self.speed


@dataclass(frozen=True, slots=True)
class Costs:
    """The basis of decisions: the engine's times, and the targets."""

    timing: Timing
    targets: Targets


# --- learning
# The figures that are learned while requests are served: the lengths of answers, and the errors of estimates.

LENGTHS_KEPT = 512
"""Answers whose lengths are remembered."""
PRIOR_LENGTHS = (8, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Assumed answers before any has ended. Each real one replaces one of these."""

CORRECTION_MAX = 2.0
"""An estimate is never stretched beyond this, or pressed below its inverse. An error that is larger shows something
that the profile does not know."""
CORRECTION_WEIGHT = 0.05
"""The weight of one observation against all before it."""


RISK_BELIEF = 10.0
"""An assumed risk counts as much as this many estimates."""
RISK_KEEPS = 0.98
"""How much what was seen before counts when one more is seen: some fifty count."""


class AnswerLengths:
    """The lengths of the last answers. They say how probably one that has so many tokens ends soon."""

    def __init__(self, kept: int = LENGTHS_KEPT) -> None:
        self._kept = max(kept, len(PRIOR_LENGTHS))
        self._sorted = sorted(PRIOR_LENGTHS)
        self._order = deque(PRIOR_LENGTHS)
        self._prior = len(PRIOR_LENGTHS)

    def ended(self, tokens: int) -> None:
        """An answer has come to its end after so many tokens."""
        if tokens < 1:
            return
        if self._prior or len(self._order) >= self._kept:
            old = self._order.popleft()
            self._sorted.pop(bisect_right(self._sorted, old) - 1)
            self._prior = max(0, self._prior - 1)
        self._order.append(tokens)
        insort(self._sorted, tokens)

    @property
    def mean(self) -> float:
        """Tokens of an answer."""
        return math.fsum(self._sorted) / len(self._sorted)

    def ends_within(self, generated: int, more: float) -> float:
        """How probably (0..1) an answer of `generated` tokens so far ends before it has `more` further ones.

        One that is longer than all that were seen may end at any time: it is taken to go on for as long again.
        """
        if more <= 0:
            return 0.0
        longer = len(self._sorted) - bisect_right(self._sorted, generated)
        if not longer:
            return min(1.0, more / max(1, generated))
        ends = bisect_right(self._sorted, generated + more) - (len(self._sorted) - longer)
        return min(1.0, max(0.0, ends / longer))


class Correction:
    """The factor for estimates: the smoothed quotient of observed and estimated times, within `CORRECTION_MAX` and
    its inverse. 1.0 before the first observation."""

    def __init__(self) -> None:
        self._log = 0.0

    @property
    def factor(self) -> float:
        """At least 1 / `CORRECTION_MAX`, at most `CORRECTION_MAX`."""
        return math.exp(self._log)

    def seen(self, observed_s: float, estimated_s: float) -> None:
        """This came of an (uncorrected) estimate; values that are no durations are left out."""
        if not (observed_s > 0 and estimated_s > 0 and math.isfinite(observed_s) and math.isfinite(estimated_s)):
            return
        bound = math.log(CORRECTION_MAX)
        ratio = min(bound, max(-bound, math.log(observed_s) - math.log(estimated_s)))
        self._log += (ratio - self._log) * CORRECTION_WEIGHT


class Risk:
    """The probability that an estimate, as some share of a bound, turns out above it. At first it is assumed. Later
    it comes from estimates that were as near to their bounds. It never falls as the share rises."""

    STEP = 0.1
    CENTRES = tuple(0.35 + 0.1 * number for number in range(10))

    def __init__(self, believed: Callable[[float], float]) -> None:
        self._believed = [believed(centre) for centre in self.CENTRES]
        self._seen = [0.0] * len(self.CENTRES)
        self._missed = [0.0] * len(self.CENTRES)
        self._curve = isotonic(self._believed)

    def seen(self, share: float, *, missed: bool) -> None:
        """An estimate of that share of its bound was missed, or kept."""
        place = min(len(self.CENTRES) - 1, max(0, round((share - self.CENTRES[0]) / self.STEP)))
        self._seen[place] = self._seen[place] * RISK_KEEPS + 1.0
        self._missed[place] = self._missed[place] * RISK_KEEPS + missed
        weights = [RISK_BELIEF + seen for seen in self._seen]
        rows = zip(self._believed, self._missed, weights, strict=True)
        shares = [(believed * RISK_BELIEF + missed) / weight for believed, missed, weight in rows]
        self._curve = isotonic(shares, weights)

    def of(self, share: float) -> float:
        """0..1, evenly between the centres of what is counted together."""
        place = (share - self.CENTRES[0]) / self.STEP
        if place <= 0:
            return self._curve[0] * max(0.0, share / self.CENTRES[0])
        if place >= len(self._curve) - 1:
            return self._curve[-1]
        low = int(place)
        return self._curve[low] + (self._curve[low + 1] - self._curve[low]) * (place - low)


class Mean:
    """A mean that forgets: the newest value counts `weight`. None before the first."""

    def __init__(self, weight: float = 0.05) -> None:
        self._weight = weight
        self.value: float | None = None

    def seen(self, value: float) -> None:
        """One more."""
        self.value = value if self.value is None else self.value + (value - self.value) * self._weight


class Share:
    """Which share of the time lately went into something: what is `over_s` seconds old counts a third as much."""

    def __init__(self, over_s: float) -> None:
        self._over_s = over_s
        self._sum_s = 0.0
        self._at_s = -math.inf

    def add(self, took_s: float, now_s: float) -> None:
        """It took so long, until now."""
        self._sum_s = self._left_s(now_s) + took_s
        self._at_s = max(self._at_s, now_s)

    def value(self, now_s: float) -> float:
        """0..1."""
        return min(1.0, self._left_s(now_s) / self._over_s)

    def _left_s(self, now_s: float) -> float:
        return self._sum_s * math.exp(-max(0.0, now_s - self._at_s) / self._over_s) if self._sum_s else 0.0


# --- misses
# How probably a target is missed, and what a pause does to the streams that run.

SURE_BELOW, SURE_ABOVE = 0.4, 1.2
"""An estimate of a wait below the first share of a bound keeps it, one above the second breaks it."""
GAP_BELOW, GAP_ABOVE = 0.6, 1.2
"""The same for a gap between tokens, which is the mean of many."""


class Stream(NamedTuple):
    """An answer that runs: tokens so far (1 or more), and when the first came (seconds)."""

    generated: int
    first_s: float


def misses_first_token(estimated_s: float, left_s: float | None, risk: Risk) -> float:
    """How probably (0..1) a first token that is estimated to come in `estimated_s` comes later than in `left_s`.

    None: there is no target to miss.
    """
    if left_s is None:
        return 0.0
    return 1.0 if left_s <= 0.0 else risk.of(estimated_s / left_s)


def likely_above(estimated_s: float, bound_s: float) -> float:
    """How probably (0..1) what is estimated so turns out above a bound (above 0), before anything was seen of it.

    It rises slowly at first, and begins early. A request that waits in a queue is late more often than its mean
    says, because others join at the same moment. It is seldom early.
    """
    return _rising(estimated_s / bound_s, SURE_BELOW, SURE_ABOVE)


def gap_above(estimated_s: float, bound_s: float) -> float:
    """How probably (0..1) a stream whose gap is estimated so has a mean gap above a bound (above 0)."""
    return _rising(estimated_s / bound_s, GAP_BELOW, GAP_ABOVE)


def _rising(share: float, none: float, sure: float) -> float:
    return min(1.0, max(0.0, (share - none) / (sure - none))) ** 2


def misses_gap(
    stream: Stream, now_s: float, pause_s: float, itl_s: float, target_s: float, lengths: AnswerLengths
) -> float:
    """How probably (0..1) the mean gap of a stream is above `target_s` when it ends, if it pauses now for `pause_s` and
    then has a token every `itl_s`.

    Below the target each token makes up for `target_s - itl_s`: it misses only if it ends before it has caught up.
    Above it, each token costs as much: it keeps the target only if it ends before what it has saved is used up.
    """
    saved_s = target_s * (stream.generated - 1) - (now_s - stream.first_s) - pause_s
    gain_s = target_s - itl_s
    if gain_s > 0:
        return lengths.ends_within(stream.generated, -saved_s / gain_s) if saved_s < 0 else 0.0
    if saved_s <= 0:
        return 1.0
    return 0.0 if gain_s == 0 else 1.0 - lengths.ends_within(stream.generated, saved_s / -gain_s)


def harm(
    streams: Iterable[Stream],
    now_s: float,
    *,
    before_s: float,
    more_s: float,
    itl_s: float,
    target_s: float | None,
    lengths: AnswerLengths,
) -> float:
    """How many of the streams a pause of `more_s`, behind one of `before_s` that comes anyway, makes miss their target
    (expected, 0 or more). None: there is no target to miss."""
    if target_s is None or more_s <= 0:
        return 0.0
    total = 0.0
    for stream in streams:
        after = misses_gap(stream, now_s, before_s + more_s, itl_s, target_s, lengths)
        if after > 0.0:
            total += max(0.0, after - misses_gap(stream, now_s, before_s, itl_s, target_s, lengths))
    return total


# --- tally
# The results of decisions about prefills, in numbers that only grow: how many, why, and how well estimates held.


class Why(enum.StrEnum):
    """Why a prompt is prefilled where it is."""

    FEWER_MISSES = "fewer_misses"
    """The other way would cost more expected misses of targets."""
    SOONER = "sooner"
    """Both ways cost as many; people wait less this way."""
    THRESHOLD = "threshold"
    """Decided by length and queue: the policy is threshold, or slo has no profile."""
    NO_PREFILL_WORKER = "no_prefill_worker"
    QUEUE_UNKNOWN = "queue_unknown"
    CANNOT_TRAVEL = "cannot_travel"
    """A prefill worker would not get all that the prompt is: images, an adapter, log-probabilities of the prompt."""
    CAME_BACK = "came_back"
    """It was sent away, and no KV came in time: prefilled here after all. Counted once more."""


@dataclass(slots=True)
class FirstTokens:
    """Requests that went one way: the estimated and the real time to the first token (seconds)."""

    count: int = 0
    estimated_s: float = 0.0
    seen_s: float = 0.0
    error_s: float = 0.0
    """Sum of the distances between the two."""

    def came(self, estimated_s: float, seen_s: float) -> None:
        """One more."""
        self.count += 1
        self.estimated_s += estimated_s
        self.seen_s += seen_s
        self.error_s += abs(seen_s - estimated_s)

    def numbers(self, way: str) -> Mapping[str, float]:
        """The counts by name, for `DispatchCounts.numbers`."""
        return {
            f"first_tokens.{way}": self.count,
            f"first_token_estimated_s.{way}": self.estimated_s,
            f"first_token_seen_s.{way}": self.seen_s,
            f"first_token_error_s.{way}": self.error_s,
        }


@dataclass(slots=True)
class Prefills:
    """Decisions by way and reason."""

    by: dict[tuple[str, Why], int] = field(default_factory=dict)

    def decided(self, *, remote: bool, why: Why) -> None:
        """One more."""
        key = ("remote" if remote else "local", why)
        self.by[key] = self.by.get(key, 0) + 1

    def count(self, *, remote: bool) -> int:
        """Decisions of one way; a prompt that came back counts as both."""
        way = "remote" if remote else "local"
        return sum(count for (each, _), count in self.by.items() if each == way)
