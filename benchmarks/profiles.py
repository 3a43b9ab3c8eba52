"""How good a profile's interpolation is, and how far it departs from that of Dynamo's first SLA planner.

* Left out: each inner point (of decode: each inner context's whole line) is predicted from the others. The error is
  |predicted - measured| / measured.
* Departure: ours against Dynamo's, `1D cubic` over prompts and `griddata cubic, 100 x 100, nearest outside` over KV use
  and context, inside of what was measured.

Both need scipy (the extra `bench`), which nothing else does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from statistics import quantiles
from typing import Any

from benchmarks.harness import Report, at_most
from dynamo_local.errors import BadInput, how_to_install
from dynamo_local.profile.interpolation import DecodeInterpolator, PrefillInterpolator, interpolators
from dynamo_local.profile.reading import DecodePoints, PrefillPoints, Profile, read_profile, shipped_profiles

CELLS = 100
"""Dynamo's grid, in both directions."""

WORKED = ((3000.0, 49_481.0), (10.0, 4_556.0), (8.0, 3_195.0))
"""planning-facts: throughput at a prompt of 3000 tokens, and within 10 and 8 ms at a context of 3150."""

Curve = Callable[[float], float]


def run(short: bool) -> Report:
    """Both shipped profiles."""
    if find_spec("scipy") is None:
        raise BadInput(f"this needs scipy: {how_to_install('bench')}")
    report = Report("profiles")
    for name in shipped_profiles():
        profile = read_profile(name)
        _prefill_left_out(report, profile)
        _decode_left_out(report, profile)
        _departures(report, profile)
        _cost(report, profile, 200 if short else 2000)
    return report


# --- left out ----------------------------------------------------------------------------------


def _prefill_left_out(report: Report, profile: Profile) -> None:
    points = profile.prefill
    methods = {"ours": _ours_ttft, "PCHIP": _scipy_ttft("pchip"), "cubic": _scipy_ttft("cubic")}
    for name, method in methods.items():
        errors = []
        for at in range(1, len(points.isl) - 1):
            rest = replace(points, **{field: _without(getattr(points, field), at) for field in PrefillPoints.__slots__})
            errors.append(_error(method(rest)(points.isl[at]), points.ttft_ms[at]))
        report.add(f"{profile.name}: TTFT left out, {name}", "%", _percent(errors))


def _decode_left_out(report: Report, profile: Profile) -> None:
    points, contexts = profile.decode, sorted(set(profile.decode.context_length))
    for what, column in (("ITL", "itl_ms"), ("tokens/s/GPU", "thpt_per_gpu")):
        for name, method in (("ours", _ours_decode), ("Dynamo's", _dynamos_decode)):
            errors = []
            for left_out in contexts[1:-1]:
                rest = _only(points, [context != left_out for context in points.context_length])
                found = method(rest, column)
                rows = zip(points.kv_usage, points.context_length, getattr(points, column), strict=True)
                errors += [_error(found(usage, left_out), value) for usage, at, value in rows if at == left_out]
            report.add(f"{profile.name}: {what} of a context left out, {name}", "%", _percent(errors))


def _error(found: float, measured: float) -> float:
    return abs(found - measured) / measured


def _percent(errors: Sequence[float]) -> list[float]:
    """Least, median, 90 % and greatest."""
    return sorted(100 * error for error in errors)


def _without(values: Sequence[float], at: int) -> tuple[float, ...]:
    return (*values[:at], *values[at + 1 :])


def _only(points: DecodePoints, keep: Sequence[bool]) -> DecodePoints:
    columns = {
        field: tuple(value for value, kept in zip(getattr(points, field), keep, strict=True) if kept)
        for field in DecodePoints.__slots__
        if field != "max_kv_tokens"
    }
    return replace(points, **columns)


# --- ours and Dynamo's -------------------------------------------------------------------------


def _ours_ttft(points: PrefillPoints) -> Curve:
    return lambda isl: PrefillInterpolator(points).interpolate_ttft(isl).value


def _scipy_ttft(kind: str) -> Callable[[PrefillPoints], Curve]:
    def made(points: PrefillPoints) -> Curve:
        from scipy import interpolate

        if kind == "pchip":
            return lambda isl: float(interpolate.PchipInterpolator(points.isl, points.ttft_ms)(isl))
        return lambda isl: float(interpolate.interp1d(points.isl, points.ttft_ms, kind="cubic")(isl))

    return made


def _ours_decode(points: DecodePoints, column: str) -> Callable[[float, float], float]:
    model = DecodeInterpolator(points)
    ask = model.interpolate_itl if column == "itl_ms" else model.interpolate_thpt_per_gpu
    return lambda usage, context: ask(usage * points.max_kv_tokens / context, context).value


def _dynamos_decode(points: DecodePoints, column: str) -> Callable[[float, float], float]:
    grid = _grid(points, column)
    longest = max(points.context_length)

    def nearest(usage: float, context: float) -> float:
        row = min(CELLS - 1, max(0, round(context / longest * (CELLS - 1))))
        return float(grid[row][min(CELLS - 1, max(0, round(usage * (CELLS - 1))))])

    return nearest


def _grid(points: DecodePoints, column: str) -> Any:
    import numpy as np
    from scipy.interpolate import griddata

    at = (np.array(points.kv_usage), np.array(points.context_length))
    cells = np.meshgrid(np.linspace(0, 1, CELLS), np.linspace(0, max(points.context_length), CELLS))
    values = np.array(getattr(points, column))
    cubic = griddata(at, values, tuple(cells), method="cubic")
    return np.where(np.isnan(cubic), griddata(at, values, tuple(cells), method="nearest"), cubic)


def _departures(report: Report, profile: Profile) -> None:
    from scipy.interpolate import interp1d

    prefill, decode = interpolators(profile)
    points = profile.prefill
    dynamos = interp1d(points.isl, points.thpt_per_gpu, kind="cubic")
    lengths = [points.isl[0] + (points.isl[-1] - points.isl[0]) * n / 200 for n in range(201)]
    away = [_error(prefill.interpolate_thpt_per_gpu(isl).value, float(dynamos(isl))) for isl in lengths]
    report.add(f"{profile.name}: prefill throughput, departure from Dynamo's", "%", _percent(away))
    itls, thpts = _grid(profile.decode, "itl_ms"), _grid(profile.decode, "thpt_per_gpu")
    report.notes.append(f"{profile.name}: {int((itls <= 0).sum() + (thpts <= 0).sum())} cells of Dynamo's are negative")
    for what, grid, ask in (
        ("ITL", itls, decode.interpolate_itl),
        ("decode throughput", thpts, decode.interpolate_thpt_per_gpu),
    ):
        away = [_error(value, float(theirs)) for value, theirs in _inside(profile.decode, grid, ask) if theirs > 0]
        report.add(f"{profile.name}: {what}, departure from Dynamo's", "%", _percent(away))
    _best(report, profile, decode, itls, thpts)


def _inside(points: DecodePoints, grid: Any, ask: Any) -> Iterator[tuple[float, float]]:
    """Ours and theirs, in each cell that is not extrapolated."""
    longest = max(points.context_length)
    for row in range(1, CELLS):
        for column in range(1, CELLS):
            context, usage = longest * row / (CELLS - 1), column / (CELLS - 1)
            found = ask(usage * points.max_kv_tokens / context, context)
            if not found.extrapolated:
                yield found.value, grid[row][column]


def _best(report: Report, profile: Profile, decode: DecodeInterpolator, itls: Any, thpts: Any) -> None:
    longest, contexts = max(profile.decode.context_length), sorted(set(profile.decode.context_length))
    away = []
    for context in (contexts[0] + (contexts[-1] - contexts[0]) * n / 20 for n in range(21)):
        row = round(context / longest * (CELLS - 1))
        for target in (6.0, 8.0, 10.0, 15.0, 20.0, 30.0):
            ours = decode.find_best_throughput_per_gpu(target, context)
            theirs = next((thpts[row][n] for n in reversed(range(CELLS)) if itls[row][n] <= target), thpts[row][0])
            if ours.attainable and not ours.extrapolated and theirs > 0:
                away.append(_error(ours.value, float(theirs)))
    report.add(f"{profile.name}: best throughput within an ITL, departure", "%", _percent(away))
    if profile.name.startswith("dynamo_H200"):
        prefill = interpolators(profile)[0]
        values = [prefill.interpolate_thpt_per_gpu(WORKED[0][0]).value]
        values += [decode.find_best_throughput_per_gpu(itl, 3150).value for itl, _ in WORKED[1:]]
        for value, (_, dynamos) in zip(values, WORKED, strict=True):
            away_percent = 100 * (value / dynamos - 1)
            report.notes.append(f"worked value {dynamos:,.0f}: ours {value:,.0f} ({away_percent:+.1f} %)")


def _cost(report: Report, profile: Profile, rounds: int) -> None:
    decode = interpolators(profile)[1]
    took = []
    for n in range(rounds):
        began_s = time.perf_counter()
        decode.find_best_throughput_per_gpu(5 + n % 30, 500 + 7 * n % 9000)
        took.append((time.perf_counter() - began_s) * 1e6)
    report.add(f"{profile.name}: find_best_throughput_per_gpu", "us", quantiles(took, n=10), at_most(1000.0))
