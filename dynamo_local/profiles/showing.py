"""A profile as numbers for a person: what was measured, what a planner takes from it, and where it guesses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from dynamo_local.core.isotonic import isotonic
from dynamo_local.profiles.capacity import DecodeInterpolator, PrefillInterpolator, interpolators
from dynamo_local.profiles.reading import DecodePoints, PrefillPoints, Profile, lines_of

_SAME = 0.005
"""A curve that is within this share of its points needs no note."""


def facts_of(
    profile: Profile, itl_ms: Sequence[float], isl: float | None = None, osl: float | None = None
) -> dict[str, Any]:
    """All of a profile's tables, as plain values for JSON.

    `best` has one entry for each ITL target and each measured context length, and for the context of requests of `isl`
    and `osl` tokens where they are given. Raises `ConfigError` for a profile without throughputs.
    """
    prefill, decode = interpolators(profile)
    contexts = sorted(set(profile.decode.context_length))
    asked = None if isl is None else isl + (osl or 0.0) / 2
    return {
        "profile": profile.name,
        "files": [str(path) for path in profile.files],
        "max_kv_tokens": profile.decode.max_kv_tokens,
        "measured": {
            "isl": [profile.prefill.isl[0], profile.prefill.isl[-1]],
            "context_length": [contexts[0], contexts[-1]],
        },
        "prefill": _prefill_rows(profile.prefill, prefill, isl),
        "decode": _decode_rows(profile.decode, decode),
        "best": [
            _best_row(decode, target, context)
            for context in ([*contexts] if asked is None else [*contexts, asked])
            for target in itl_ms
        ],
        "notes": notes_of(profile),
    }


def _prefill_rows(points: PrefillPoints, model: PrefillInterpolator, isl: float | None) -> list[dict[str, Any]]:
    columns = zip(points.isl, points.ttft_ms, points.thpt_per_gpu, strict=True)
    measured = {length: (ttft_ms, thpt) for length, ttft_ms, thpt in columns}
    rows = []
    for length in sorted({*measured, *(() if isl is None else (isl,))}):
        ttft, thpt = model.interpolate_ttft(length), model.interpolate_thpt_per_gpu(length)
        there = measured.get(length, (None, None))
        rows.append(
            {
                "isl": length,
                "measured_ttft_ms": there[0],
                "measured_thpt_per_gpu": there[1],
                "ttft_ms": ttft.value,
                "thpt_per_gpu": thpt.value,
                "extrapolated": ttft.extrapolated,
            }
        )
    return rows


def _decode_rows(points: DecodePoints, model: DecodeInterpolator) -> list[dict[str, Any]]:
    columns = (points.context_length, points.kv_usage, points.itl_ms, points.thpt_per_gpu)
    rows = []
    for context, usage, itl_ms, thpt in sorted(zip(*columns, strict=True)):
        concurrency = usage * points.max_kv_tokens / context
        rows.append(
            {
                "context_length": context,
                "kv_usage": usage,
                "concurrency": concurrency,
                "measured_itl_ms": itl_ms,
                "measured_thpt_per_gpu": thpt,
                "itl_ms": model.interpolate_itl(concurrency, context).value,
                "thpt_per_gpu": model.interpolate_thpt_per_gpu(concurrency, context).value,
            }
        )
    return rows


def _best_row(model: DecodeInterpolator, itl_ms: float, context: float) -> dict[str, Any]:
    best = model.find_best_throughput_per_gpu(itl_ms, context)
    return {
        "itl_target_ms": itl_ms,
        "context_length": context,
        "thpt_per_gpu": best.value,
        "concurrency": best.concurrency,
        "itl_ms": best.itl_ms,
        "attainable": best.attainable,
        "extrapolated": best.extrapolated,
    }


def notes_of(profile: Profile) -> list[str]:
    """Where the curves are not the measured points."""
    prefill, decode = profile.prefill, profile.decode
    notes = _falling("TTFT", "", list(zip(prefill.isl, prefill.ttft_ms, strict=True)))
    lines = lines_of(decode, decode.itl_ms)
    for context, points in lines.items():
        notes += _falling("ITL", f" at context {context:g}", points)
    for context in sorted(set(decode.context_length) - set(lines)):
        notes.append(f"context {context:g} has one point only, and is left out")
    return notes


def _falling(what: str, where: str, points: Sequence[tuple[float, float]]) -> list[str]:
    """A note where a curve that cannot fall was measured to fall."""
    values = [value for _, value in sorted(points)]
    smooth = isotonic(values)
    if all(abs(a - b) <= _SAME * a for a, b in zip(values, smooth, strict=True)):
        return []
    high, low = max(pairwise(values), key=lambda pair: pair[0] - pair[1])
    return [
        f"{what} falls{where} as the load rises, from {high:.4g} to {low:.4g} ms: "
        "the nearest curve that does not is taken"
    ]
