"""A measured profile in a few lines for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from dynamo_local.core.isotonic import isotonic
from dynamo_local.profile.document import Document, MemoryFacts
from dynamo_local.profile.interpolation import DecodeInterpolator, PrefillInterpolator, interpolators
from dynamo_local.profile.reading import DecodePoints, PrefillPoints, Profile, lines_of

FULL = 0.95
"""Such a share of the highest throughput counts as all of it."""
SAME = 0.005
"""Closer to the sum than this is the sum."""
PAYS = 0.5
"""Twice the streams with less than 1.5 times the tokens: beyond the knee."""


def summary_lines(document: Document) -> Iterator[str]:
    """Lines: the measured engines, the capacity of one, the host's faults, and the verdict."""
    for role, engine in document.engines.items():
        yield (
            f"{role}: {engine.component}, {engine.engine} {engine.version} on {engine.gpus} GPU each; KV cache of "
            f"{engine.max_kv_tokens:,} tokens, {engine.max_num_seqs} sequences"
        )
    yield from prompts(document)
    yield from streams(document)
    yield from knees(document)
    yield from mixed(document)
    yield from spread(document)
    for each in document.end_to_end:
        yield (
            f"over HTTP: a prompt of {each.tokens} tokens has its first token after {each.ttft_ms:.1f} ms, "
            f"{each.ttft_ms - each.engine_ttft_ms:+.1f} ms to the engine's"
        )
    if document.beyond_engine:
        fixed_ms, per_token_ms = (document.beyond_engine[name] for name in ("overhead_ms", "per_token_ms"))
        handoff = ", hand-off included" if "prefill" in document.engines else ""
        yield (
            f"beyond the engine a first token takes {fixed_ms:.2f} ms, and {1000 * per_token_ms:.3f} ms for each 1,000 "
            f"tokens of its prompt{handoff}"
        )
    for component, rungs in document.actions.items():
        yield f"{component}: " + ", ".join(f"{rung} {seconds:.2f} s" for rung, seconds in sorted(rungs.items()))
    for component, states in document.memory.items():
        yield f"{component} holds " + "; ".join(f"{state}: {_memory(facts)}" for state, facts in states.items())
    for text in document.noticed:
        yield f"noticed: {text}"
    errors = document.certificate.held_out
    if errors:
        yield f"held-out points: {median(errors.values()):.1%} off in the median"
    for row in document.certificate.trace:
        simulated = f"{row['twin']:.4g} ms in the simulator ({row['error']:+.0%})"
        yield f"trace: {row['what']} {row['real']:.4g} ms here, {simulated}"
    yield document.certificate.state
    for where in document.certificate.where:
        yield f"  {where}"


def prompts(document: Document) -> Iterator[str]:
    """How many prompts one engine computes, of a short, a middle and a long one."""
    found = sorted((p.tokens, p.mean_ms) for p in document.points if p.kind == "prefill")
    for tokens, ms in _some(found):
        yield f"one engine sustains {1000 / ms:.2f} prompts/s of {tokens:,} tokens, each within TTFT {ms:.1f} ms"


def streams(document: Document) -> Iterator[str]:
    """How many streams one engine decodes, and how fast, at each context's most."""
    most: dict[int, tuple[float, float]] = {}
    for point in document.points:
        if point.kind == "decode":
            most[point.tokens] = max(most.get(point.tokens, (0.0, 0.0)), (point.requests, point.mean_ms))
    for context, (requests, ms) in _some(sorted(most.items())):
        yield f"one engine sustains {requests:.0f} streams of {context:,} tokens within ITL {ms:.2f} ms"


def knees(document: Document) -> Iterator[str]:
    """From which prompt length, and up to how many streams, more work at once still pays."""
    rates = sorted((p.tokens, p.tokens / p.mean_ms) for p in document.points if p.kind == "prefill")
    if len(rates) > 2:
        most = max(rate for _, rate in rates)
        tokens = next(tokens for tokens, rate in rates if rate >= FULL * most)
        yield f"prefill has its full throughput ({1000 * most:,.0f} tokens/s) from prompts of {tokens:,} tokens on"
    by_context: dict[int, list[tuple[float, float]]] = {}
    for point in document.points:
        if point.kind == "decode":
            by_context.setdefault(point.tokens, []).append((point.requests, point.requests / point.mean_ms))
    for context, loads in _some(
        [(context, sorted(loads)) for context, loads in sorted(by_context.items()) if len(loads) > 1]
    ):
        knee = _knee(loads)
        load = f"up to {knee:.0f} streams" if knee is not None else f"up to all {loads[-1][0]:.0f} streams that fit"
        yield f"decode at {context:,} tokens: a further stream costs the others less than half of what it adds {load}"


def _knee(line: list[tuple[float, float]]) -> float | None:
    """The last load before tokens/s rise by less than half as much as streams do; None: they always do."""
    for (low, rate), (high, more) in pairwise(line):
        if (more / rate - 1) < PAYS * (high / low - 1):
            return low
    return None


def mixed(document: Document) -> Iterator[str]:
    """How far passes that prefill and decode at once are the sum of both."""
    found = document.fit.get("mixed")
    if found is not None:
        bias = found["bias"]
        than = "as long as" if abs(bias) < SAME else f"{abs(bias):.1%} {'less' if bias > 0 else 'more'} than"
        yield (
            f"passes that prefill and decode at once take {than} the sum of both (off by {found['error']:.1%} on "
            f"average, {found['points']:.0f} points); planners and the simulator take the sum"
        )


def spread(document: Document) -> Iterator[str]:
    """How sure the points are."""
    shares = [p.half_width_ms / p.mean_ms for p in document.points if p.half_width_ms is not None and p.mean_ms > 0]
    if shares:
        wide = sum(share > 0.03 for share in shares)
        yield (
            f"{len(document.points)} points; confidence intervals of ±{median(shares):.1%} in the median, "
            f"{wide} wider than ±3 %"
        )


def _memory(facts: MemoryFacts) -> str:
    known = [
        f"{number / 2**30:.2f} GiB of {what}"
        for what, number in (("the GPU's memory", facts.vram_bytes), ("main memory", facts.host_bytes))
        if number is not None
    ]
    return " and ".join(known) or "not known"


def _some(rows: list) -> list:  # type: ignore[type-arg]  # of any pairs
    return [rows[0], rows[len(rows) // 2], rows[-1]] if len(rows) > 3 else rows


# A profile's numbers for a person: measured points, the planner's curves, and where these are extrapolated.

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
    requested = None if isl is None else isl + (osl or 0.0) / 2
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
            for context in ([*contexts] if requested is None else [*contexts, requested])
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
