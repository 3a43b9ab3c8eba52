"""Fits measured points: a few numbers, and the curves that planners use. Pure.

The fit contains no queueing. A prompt alone takes an overhead and a time per token, which grows with the tokens before
it. A decoding pass takes an overhead, a time per token of KV that it reads, and a time per request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from dynamo_local.profile.interpolation import Line, ProfileModel, surface
from dynamo_local.profile.points import Kind, Point
from dynamo_local.profile.reading import PREFILL_POINTS_MIN, DecodePoints, PrefillPoints, lines_of
from dynamo_local.profile.repetitions import Measured


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """TTFT in ms: `overhead_ms` + `per_token_ms` · tokens + `per_token_squared_ms` · tokens²."""

    overhead_ms: float
    per_token_ms: float
    per_token_squared_ms: float
    error: float
    """Mean of |fitted − measured| ÷ measured."""


@dataclass(frozen=True, slots=True)
class DecodeFit:
    """A pass in ms: `overhead_ms` + `per_kv_token_ms` · KV tokens + `per_request_ms` · requests."""

    overhead_ms: float
    per_kv_token_ms: float
    per_request_ms: float
    error: float


def prefill_fit(points: Sequence[tuple[float, float]]) -> PrefillFit | None:
    """Fit `(tokens, ms)`. None with fewer than three different lengths."""
    if len({tokens for tokens, _ in points}) < PREFILL_POINTS_MIN:
        return None
    rows = [(1.0, tokens, tokens * tokens) for tokens, _ in points]
    values = [ms for _, ms in points]
    found = not_negative(rows, values)
    return PrefillFit(found[0], found[1], found[2], _error(rows, values, found))


def decode_fit(points: Sequence[tuple[float, float, float]]) -> DecodeFit | None:
    """Fit `(KV tokens, requests, ms)`. None with fewer than four points."""
    if len(points) < 4:
        return None
    rows = [(1.0, kv, requests) for kv, requests, _ in points]
    values = [ms for *_, ms in points]
    found = not_negative(rows, values)
    return DecodeFit(found[0], found[1], found[2], _error(rows, values, found))


def beyond(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit `(tokens, additional ms)`: a fixed part and a part per token, neither negative."""
    found = [(tokens, ms) for tokens, ms in points if ms > 0]
    if len({tokens for tokens, _ in found}) < 2:
        return (fmean(ms for _, ms in found) if found else 0.0), 0.0
    overhead, per_token = not_negative([(1.0, tokens) for tokens, _ in found], [ms for _, ms in found])
    return overhead, per_token


def not_negative(rows: Sequence[tuple[float, ...]], values: Sequence[float]) -> tuple[float, ...]:
    """Least squares of relative errors, without a negative coefficient: what would be negative is left out."""
    import numpy as np

    used = list(range(len(rows[0])))
    weights = 1 / np.array(values)
    while used:
        matrix = np.array([[row[column] for column in used] for row in rows]) * weights[:, None]
        scale = np.abs(matrix).max(axis=0)
        found = np.linalg.lstsq(matrix / scale, np.ones(len(values)), rcond=None)[0] / scale
        worst = int(found.argmin())
        if found[worst] >= 0:
            by_column = dict(zip(used, found.tolist(), strict=True))
            return tuple(by_column.get(column, 0.0) for column in range(len(rows[0])))
        del used[worst]
    return (0.0,) * len(rows[0])


def _error(rows: Sequence[tuple[float, ...]], values: Sequence[float], found: Sequence[float]) -> float:
    fitted = [sum(a * b for a, b in zip(row, found, strict=True)) for row in rows]
    return fmean(abs(a - b) / b for a, b in zip(fitted, values, strict=True))


@dataclass(frozen=True, slots=True)
class SumError:
    """Difference of mixed passes (prefill and decode at once) from the sum of both, relative to the measurement.

    `error`: without sign. `bias`: with sign; above 0, the sum is too long.
    """

    error: float
    bias: float
    points: float


def sum_error(known: Mapping[Point, Measured], model: ProfileModel) -> SumError | None:
    """None where no such pass was measured."""
    found = []
    for point, each in known.items():
        if point.kind is Kind.MIXED:
            kv = fmean(sample.kv_tokens for sample in each.samples)
            total_s = model.ttft_s(point.chunk) + model.itl_s(round(kv), kv / point.requests)
            found.append(total_s * 1000 / _mean(each) - 1)
    if not found:
        return None
    return SumError(fmean(map(abs, found)), fmean(found), float(len(found)))


def prefill_points(known: Mapping[Point, Measured], gpus: int) -> PrefillPoints:
    """The measured prompts, as a profile holds them."""
    rows = sorted((point.tokens, _mean(each)) for point, each in known.items() if point.kind is Kind.PREFILL)
    columns = (tuple(float(isl) for isl, _ in rows), tuple(ms for _, ms in rows))
    return PrefillPoints(*columns, tuple(isl / ms * 1000 / gpus for isl, ms in rows))


def decode_points(known: Mapping[Point, Measured], max_kv_tokens: int, gpus: int) -> DecodePoints:
    """The measured loads. Those of one nominal context stand on one line, at the mean of what they really were."""
    lines: dict[int, list[tuple[float, float, float]]] = {}
    for point, each in known.items():
        if point.kind is Kind.DECODE:
            kv = fmean(sample.kv_tokens for sample in each.samples)
            requests = fmean(sample.requests for sample in each.samples)
            lines.setdefault(point.tokens, []).append((kv, requests, _mean(each)))
    rows = []
    for _, found in sorted(lines.items()):
        context = round(fmean(kv / requests for kv, requests, _ in found), 1)
        rows += [
            (min(1.0, kv / max_kv_tokens), context, ms, requests / ms * 1000 / gpus)
            for kv, requests, ms in sorted(found)
        ]
    return DecodePoints(max_kv_tokens, *zip(*rows, strict=True)) if rows else DecodePoints(max_kv_tokens, (), (), ())


def _mean(each: Measured) -> float:
    known = each.interval
    assert known is not None
    return known.mean


def model_of(prefill: PrefillPoints, decode: DecodePoints) -> ProfileModel:
    """The curves through these points, as `ProfileModel.load` makes them from files."""
    lines = lines_of(decode, decode.itl_ms)
    return ProfileModel(
        Line(prefill.isl, prefill.ttft_ms, extend_left=True),
        surface(lines, decode.max_kv_tokens),
        decode.max_kv_tokens,
    )


def usable(prefill: PrefillPoints, decode: DecodePoints) -> str | None:
    """Why no curves can be drawn through these; None: they can."""
    if len(prefill.isl) < PREFILL_POINTS_MIN:
        return f"{len(prefill.isl)} prompt lengths were measured; {PREFILL_POINTS_MIN} or more are needed"
    full = len(lines_of(decode, decode.itl_ms))
    if full < 2:
        return f"{full} contexts were measured at two loads or more; two such contexts or more are needed"
    return None
