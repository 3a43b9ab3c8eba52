"""Whether a fresh profile may be believed: it predicts points that it was not made from, and a trace. Pure.

*Held out:* a fifth of the points, of those that stand between others (no curve can be asked what lies outside of it).
The curves through the rest must predict them: median error at most 5 %, p90 at most 10 %.

*The trace:* the same requests went through the real engine and through the twin with this profile. TTFT and ITL must
agree within 10 %, in the median and at p90.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import median

from dynamo_local.profiles.measuring.fit import decode_points, model_of, prefill_points, usable
from dynamo_local.profiles.measuring.plan import Measured
from dynamo_local.profiles.measuring.points import Kind, Point
from dynamo_local.profiles.measuring.statistics import quantile

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
    """One quantity of the trace, ms: on the real engine, and in the twin."""

    what: str
    real: float
    twin: float

    @property
    def error(self) -> float:
        """Of the twin's, relative to the real one; signed."""
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
    """What both say; `trace` as text: why it was not run."""
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
            f"trace: {each.what} is {each.real:.4g} ms on the engine and {each.twin:.4g} ms in the twin "
            f"({each.error:+.0%}; allowed: {TRACE_MAX:.0%})"
            for each in trace
            if abs(each.error) > TRACE_MAX
        ]
    return Certificate("uncertified" if where else "certified", tuple(where))


def compared(real: Sequence[tuple[float, float | None]], twin: Sequence[tuple[float, float | None]]) -> list[Compared]:
    """Of (TTFT ms, ITL ms or None) of the requests of both: p50 and p90 of each."""
    found = []
    for what, column in (("TTFT", 0), ("ITL", 1)):
        ours = [value for row in real if (value := row[column]) is not None]
        theirs = [value for row in twin if (value := row[column]) is not None]
        if ours and theirs:
            for name, share in (("p50", 0.5), ("p90", 0.9)):
                found.append(Compared(f"{what} {name}", quantile(ours, share), quantile(theirs, share)))
    return found
