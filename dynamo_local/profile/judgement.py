"""Judges a fresh profile: does it predict points that it was not made from, and a trace? Pure.

*Held out:* a fifth of the points, all of them between others, because no curve is valid outside of its points. The
curves through the rest must predict them: median error at most 5 %, p90 at most 10 %.

*The trace:* the same requests ran on the real engine and in the simulator with this profile. TTFT and ITL must agree
within 10 %, in the median and at p90.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import median

from dynamo_local.core.passes import ForwardPass, Requests
from dynamo_local.profile.fit import decode_points, model_of, prefill_points, usable
from dynamo_local.profile.interpolation import PerfModel
from dynamo_local.profile.points import Kind, Point
from dynamo_local.profile.repetitions import Measured, quantile

HELD_OUT = 5
"""Every so-manieth inner point."""
MEDIAN_MAX = 0.05
P90_MAX = 0.10
TRACE_MAX = 0.10


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Relative errors of the points that were held out, by point; `why_not` where none could be."""

    errors: Mapping[str, float]
    why_not: str | None = None

    @property
    def median(self) -> float | None:
        """None where nothing was held out."""
        return median(self.errors.values()) if self.errors else None

    @property
    def p90(self) -> float | None:
        """The same."""
        return quantile(list(self.errors.values()), 0.9) if self.errors else None


@dataclass(frozen=True, slots=True)
class Compared:
    """One quantity of the trace, ms: on the real engine, and in the simulator."""

    what: str
    real: float
    twin: float

    @property
    def error(self) -> float:
        """Error of the simulator relative to the real engine, signed."""
        return (self.twin - self.real) / self.real


@dataclass(frozen=True, slots=True)
class Certificate:
    """`state`: certified, or uncertified with `where` it is off."""

    state: str
    where: tuple[str, ...] = ()


def held_out(known: Mapping[Point, Measured], max_kv_tokens: int, seed: int = 0) -> HeldOut:
    """The errors of curves without a fifth of the inner points, at these."""
    left_out = _chosen(known, seed)
    kept = {point: each for point, each in known.items() if point not in left_out}
    prefill, decode = prefill_points(kept, 1), decode_points(kept, max_kv_tokens, 1)
    why_not = usable(prefill, decode) or (None if left_out else "no measured point stands between others")
    if why_not is not None:
        return HeldOut({}, why_not)
    model = model_of(prefill, decode)
    errors = {}
    for point in left_out:
        mean = known[point].interval
        assert mean is not None
        samples = known[point].samples
        kv = sum(sample.kv_tokens for sample in samples) / len(samples)
        requests = sum(sample.requests for sample in samples) / len(samples)
        found = model.ttft_s(point.tokens) if point.kind is Kind.PREFILL else model.itl_s(round(kv), kv / requests)
        errors[str(point)] = abs(found * 1000 - mean.mean) / mean.mean
    return HeldOut(errors)


def _chosen(known: Mapping[Point, Measured], seed: int) -> list[Point]:
    """A fifth of the prompts between the shortest and the longest, and of each context's loads between its extremes."""
    lines: dict[tuple[Kind, int], list[Point]] = {}
    for point in sorted(known):
        if point.kind is not Kind.CACHED:
            lines.setdefault((point.kind, point.tokens if point.kind is Kind.DECODE else 0), []).append(point)
    chosen: list[Point] = []
    for kind in (Kind.PREFILL, Kind.DECODE):
        inner = [point for (of, _), line in sorted(lines.items()) if of is kind for point in line[1:-1]]
        ordered = sorted(inner, key=lambda point: blake2b(f"{seed}/{point}".encode(), digest_size=8).digest())
        chosen += ordered[: max(1, round(len(inner) / HELD_OUT))] if inner else []
    return chosen


def certificate(held: HeldOut, trace: Sequence[Compared] | str) -> Certificate:
    """Both verdicts. `trace` as text: the reason why it was not run."""
    where = []
    if held.why_not is not None:
        where.append(f"held-out points: {held.why_not}")
    elif (held.median or 0.0) > MEDIAN_MAX or (held.p90 or 0.0) > P90_MAX:
        worst = max(held.errors, key=lambda name: held.errors[name])
        where.append(
            f"held-out points are off by {held.median:.1%} in the median and {held.p90:.1%} at p90 (allowed: "
            f"{MEDIAN_MAX:.0%} and {P90_MAX:.0%}), the most {worst}: {held.errors[worst]:.0%}"
        )
    if isinstance(trace, str):
        where.append(f"trace: {trace}")
    else:
        where += [
            f"trace: {each.what} is {each.real:.4g} ms on the engine and {each.twin:.4g} ms in the simulator "
            f"({each.error:+.0%}; allowed: {TRACE_MAX:.0%})"
            for each in trace
            if abs(each.error) > TRACE_MAX
        ]
    return Certificate("uncertified" if where else "certified", tuple(where))


def compared(real: Sequence[tuple[float, float | None]], twin: Sequence[tuple[float, float | None]]) -> list[Compared]:
    """p50 and p90 of both runs, from `(TTFT ms, ITL ms or None)` of their requests."""
    found = []
    for what, column in (("TTFT", 0), ("ITL", 1)):
        ours = [value for row in real if (value := row[column]) is not None]
        theirs = [value for row in twin if (value := row[column]) is not None]
        if ours and theirs:
            for name, share in (("p50", 0.5), ("p90", 0.9)):
                found.append(Compared(f"{what} {name}", quantile(ours, share), quantile(theirs, share)))
    return found


# Drift: serving engines beside the profile's prediction for the same passes. Pure.
#
# It compares single passes, so no queue and no client is in it: the tokens that a pass computed, and its duration. The
# median and p90 of the last minutes are compared, as for the trace above.

WINDOW_S = 300.0
PASSES_MIN = 50
"""Fewer passes than this give no verdict."""
KEPT = 512
"""Passes of a component and kind."""
NOTED = 0.15
OVER = 0.10
"""Once it was noted, it is over below this: a drift at the bound is not told of again and again."""

PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"


@dataclass(frozen=True, slots=True)
class Drifted:
    """A component's passes of one kind (`prefill`, `decode`, `mixed`): `p50` and `p90` are shares (0.2: a fifth longer
    than the profile says)."""

    component: str
    kind: str
    p50: float
    p90: float
    passes: int


def expected_s(model: PerfModel, scheduled: Requests) -> float:
    """The profile's prediction for such a pass. Several prompts count as equally long."""
    prompts, decodes = scheduled.num_prefill_requests, scheduled.num_decode_requests
    took_s = 0.0
    if prompts:
        each, before = scheduled.sum_prefill_tokens / prompts, scheduled.sum_prefill_kv_tokens / prompts
        took_s = model.launch_s + prompts * model.prefill_s(round(before), round(each))
    if decodes:
        kv_tokens = scheduled.sum_decode_kv_tokens
        took_s += model.decode_s(decodes, kv_tokens, kv_tokens / decodes)
    return took_s


def kind_of(scheduled: Requests) -> str | None:
    """None: it computed nothing, or is not told what."""
    prefills, decodes = scheduled.sum_prefill_tokens > 0, scheduled.num_decode_requests > 0
    if prefills and decodes:
        return MIXED
    return PREFILL if prefills else DECODE if decodes else None


class Drift:
    """Fed with passes (`seen`), asked for figures. `noted` says of which a person was told."""

    def __init__(self, model: PerfModel) -> None:
        self._model = model
        self._pairs: dict[tuple[str, str], deque[tuple[float, float, float]]] = {}
        self.noted: frozenset[tuple[str, str]] = frozenset()

    def seen(self, component: str, passes: Iterable[ForwardPass]) -> None:
        """Those of one of its engines; heartbeats are left out."""
        for passed in passes:
            kind = kind_of(passed.scheduled)
            if passed.heartbeat or kind is None:
                continue
            expected = expected_s(self._model, passed.scheduled)
            if expected > 0 and math.isfinite(expected):
                pairs = self._pairs.setdefault((component, kind), deque(maxlen=KEPT))
                pairs.append((passed.at_s, passed.wall_time_s, expected))

    def figures(self, now_s: float) -> tuple[Drifted, ...]:
        """Drift of the last minutes, by component and kind."""
        return tuple(self._figures(now_s))

    def _figures(self, now_s: float) -> Iterator[Drifted]:
        for (component, kind), pairs in sorted(self._pairs.items()):
            lately = [(took, expected) for at_s, took, expected in pairs if at_s > now_s - WINDOW_S]
            if len(lately) >= PASSES_MIN:
                took, expected = zip(*lately, strict=True)
                p50, p90 = (quantile(took, share) / quantile(expected, share) - 1 for share in (0.5, 0.9))
                yield Drifted(component, kind, p50, p90, len(lately))

    def news(self, figures: Iterable[Drifted]) -> tuple[list[Drifted], list[Drifted]]:
        """Those that are too far off now and were not, and those that were and are not any more. Nothing is said of
        what has no figure: who serves nothing has not come back to its profile."""
        began, over = [], []
        for each in figures:
            key = (each.component, each.kind)
            if key not in self.noted and abs(each.p50) > NOTED:
                began.append(each)
                self.noted |= {key}
            elif key in self.noted and abs(each.p50) < OVER:
                over.append(each)
                self.noted -= {key}
        return began, over


def words(each: Drifted) -> str:
    """`VllmWorker decode +18 % (p90 +25 %, of 512 passes)`"""
    return f"{each.component} {each.kind} {each.p50:+.0%} (p90 {each.p90:+.0%}, of {each.passes} passes)"
