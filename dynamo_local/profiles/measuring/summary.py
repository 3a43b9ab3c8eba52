"""A measured profile in a few lines for a person."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from dynamo_local.profiles.measuring.document import Document, MemoryFacts

FULL = 0.95
"""Such a share of the highest throughput counts as all of it."""
SAME = 0.005
"""Closer to the sum than this is the sum."""
PAYS = 0.5
"""Twice the streams with less than 1.5 times the tokens: beyond the knee."""


def lines_of(document: Document) -> Iterator[str]:
    """What was measured, what one engine can do, what was noticed, and how far it may be believed."""
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
        yield f"trace: {row['what']} {row['real']:.4g} ms here, {row['twin']:.4g} ms in the twin ({row['error']:+.0%})"
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
    lines: dict[int, list[tuple[float, float]]] = {}
    for point in document.points:
        if point.kind == "decode":
            lines.setdefault(point.tokens, []).append((point.requests, point.requests / point.mean_ms))
    for context, line in _some([(context, sorted(line)) for context, line in sorted(lines.items()) if len(line) > 1]):
        knee = _knee(line)
        said = f"up to {knee:.0f} streams" if knee is not None else f"up to all {line[-1][0]:.0f} streams that fit"
        yield f"decode at {context:,} tokens: a further stream costs the others less than half of what it adds {said}"


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
            f"average, {found['points']:.0f} points); planners and the twin take the sum"
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
