"""The tables of docs/actuators.md, and the figures for `python -m benchmarks`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.actuators.facts import Facts, OfEngine
from benchmarks.actuators.ways import WAKE_S
from benchmarks.harness import Report, at_most, machine_line
from benchmarks.measured_pages import write_measured
from dynamo_local.core.lead_times import OptionKind

PAGE = Path(__file__).parents[2] / "docs" / "actuators.md"
COMMAND = "python -m benchmarks.actuators --page"
COLD_SHARE_TARGET = 1 / 3
FLIP_TARGET_S = 0.5
WAKE_BEYOND_TARGET_S = 0.05
"""Beyond what the engine is configured to take."""
COLD_BEYOND_TARGET_S = 0.2
"""Beyond the engine's own server, started by hand."""
FLIPS = (OptionKind.FLIP_TO_DECODE, OptionKind.FLIP_TO_PREFILL)
WORDS = {
    OptionKind.FLIP_TO_DECODE: "flip to decode",
    OptionKind.FLIP_TO_PREFILL: "flip to prefill (until the canary's first token)",
    OptionKind.WAKE_1: f"wake from level 1 (the engine's own share: {WAKE_S:g} s)",
    OptionKind.PREWARMED: "from a prewarmed process",
    OptionKind.COLD: "cold start",
}


def write(page: Path, facts: Facts) -> None:
    """Replace what stands between the page's two marks."""
    write_measured(page, COMMAND, section(facts))


def report(facts: Facts) -> Report:
    """A flip to prefill has the first token of the canary's prompt: a prefill worker answers with no other."""
    told = Report("actuators", notes=list(facts.absent))
    for engine, of in facts.engines.items():
        cold_s = statistics.median(of.seconds[OptionKind.COLD])
        if of.by_hand:
            told.add(f"{engine}, by hand: command to first token", "s", of.by_hand)
            beyond = [cold - own for cold, own in zip(of.seconds[OptionKind.COLD], of.by_hand, strict=True)]
            told.add(f"{engine}, {OptionKind.COLD}: beyond by hand", "s", beyond, at_most(COLD_BEYOND_TARGET_S))
        for rung, seconds in of.seconds.items():
            told.add(f"{engine}, {rung}: command to first token", "s", seconds)
            if rung in FLIPS:
                told.add(f"{engine}, {rung}: p99 of {len(seconds)}", "s", [p99(seconds)], at_most(FLIP_TARGET_S))
            if rung is OptionKind.WAKE_1:
                beyond = [one - WAKE_S for one in seconds]
                told.add(f"{engine}, {rung}: beyond wake_s", "s", beyond, at_most(WAKE_BEYOND_TARGET_S))
        for rung, seconds in of.seconds.items():
            if rung is not OptionKind.COLD:
                share = statistics.median(seconds) / cold_s
                told.add(f"{engine}, {rung}: of a cold start", "", [share], at_most(COLD_SHARE_TARGET))
    return told


def p99(seconds: Sequence[float]) -> float:
    """The sample that 99 of 100 do not exceed."""
    return sorted(seconds)[max(0, math.ceil(0.99 * len(seconds)) - 1)]


def section(facts: Facts) -> str:
    """The measured figures, as markdown."""
    date, _, about = machine_line(facts.machine).partition("  ")
    before, after = facts.load
    parts = [
        f"{date[:10]}, {about.partition(', load')[0]}; load {before:.1f} before, {after:.1f} after. From the command "
        "to the first token of the new worker, each way in turn in one run:"
    ]
    for engine, of in facts.engines.items():
        parts.append("\n".join(_ways(engine, of)))
        if any(of.stages.values()):
            parts.append("Where the time of a start goes, by the workers' own lines (medians):")
            parts.append("\n".join(_stages(engine, of)))
    return "\n\n".join([*parts, *facts.absent])


def _ways(engine: str, of: OfEngine) -> Iterable[str]:
    cold_s = statistics.median(of.seconds[OptionKind.COLD])
    yield f"| {engine} | Median | 99 of 100 | Longest | Of a cold start |"
    yield "|---|--:|--:|--:|--:|"
    for rung, seconds in of.seconds.items():
        median_s = statistics.median(seconds)
        share = "" if rung is OptionKind.COLD else f"1/{cold_s / median_s:.0f}"
        cells = (f"{median_s:.2f} s", f"{p99(seconds):.2f} s", f"{max(seconds):.2f} s", share)
        yield f"| {WORDS[rung]} ({len(seconds)}) | {' | '.join(cells)} |"
    if of.by_hand:
        cells = (f"{each(of.by_hand):.2f} s" for each in (statistics.median, p99, max))
        yield f"| `vllm serve` by hand ({len(of.by_hand)}) | {' | '.join(cells)} | |"


def _stages(engine: str, of: OfEngine) -> Iterable[str]:
    rungs = [rung for rung in (OptionKind.COLD, OptionKind.PREWARMED) if of.stages.get(rung)]
    names = dict.fromkeys(name for rung in rungs for stages in of.stages[rung] for name in stages)
    yield f"| Stage of a start, {engine} | {' | '.join(WORDS[rung] for rung in rungs)} |"
    yield f"|---|{'--:|' * len(rungs)}"
    for name in names:
        yield f"| {name} | {' | '.join(_median(of.stages[rung], name) for rung in rungs)} |"
    sums = [statistics.median(sum(stages.values()) for stages in of.stages[rung]) for rung in rungs]
    yield f"| **all** | {' | '.join(f'**{each:.2f} s**' for each in sums)} |"


def _median(starts: Sequence[dict[str, float]], name: str) -> str:
    found = [stages[name] for stages in starts if name in stages]
    return f"{statistics.median(found):.2f} s" if found else "–"
