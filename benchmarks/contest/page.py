"""docs/contest.md: its tables, and the picture of the frontiers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.contest.measuring import CLAIRVOYANT, DYNAMOS, REPLAY, SERVED, SLO, TWIN, Facts, Row
from benchmarks.contest.trials import TRIALS, Trial
from benchmarks.measured_pages import write_measured
from dynamo_local.simulator.options import FleetShape

PAGE = Path(__file__).parents[2] / "docs" / "contest.md"
COMMAND = "python -m benchmarks.contest --page"
ASKED = {"sin 5–45": (0.995, 1.10), "conversation": (0.963, 1.07), "Azure conversation": (0.99, 1.12)}
"""Asked of `slo` in Dynamo's replay: attainment, and GPU-hours over those of a clairvoyant planner there."""
COLORS = {
    "fixed": "#777777",
    "load": "#c44e52",
    "sla": "#dd8452",
    "throughput-load": "#8172b3",
    "slo": "#2a7fb8",
    CLAIRVOYANT: "#55a868",
}


def write(page: Path, facts: Facts) -> None:
    """Replace what stands between the page's two marks, and draw the picture beside it."""
    write_measured(page, COMMAND, section(facts))
    page.with_suffix(".svg").write_text(picture(facts), encoding="utf-8")


def section(facts: Facts) -> str:
    """The measured figures, as markdown."""
    lines: list[str] = []
    for trial in TRIALS:
        rows = facts.of(TWIN, trial.name)
        if rows:
            lines += [f"### {trial.name}", "", _about(trial, rows), "", *_table(rows), "", *_verdict(rows), ""]
    lines += ["### In Dynamo's replay", "", *_replayed(facts), ""]
    if facts.rows:
        dates = "; ".join(sorted({f"{row.date}, {row.machine}" for row in facts.rows}))
        lines += [f"{dates}; {sum(row.took_s for row in facts.rows) / 60:.0f} min for all.", ""]
    lines.append(f"![Attainment against GPU-hours]({PAGE.with_suffix('.svg').name})")
    return "\n".join(lines)


def _about(trial: Trial, rows: Sequence[Row]) -> str:
    row = rows[-1]
    slower = "" if trial.speed == 1 else f", engines at {trial.speed:g} of their profile's speed"
    return (
        f"{row.source}: {row.requests:,} requests. TTFT {trial.slo.ttft_ms:g} ms, ITL {trial.slo.itl_ms:g} ms, "
        f"start-up {trial.start_up_s:g} s, at most {trial.cap} GPUs{slower}."
    )


def _table(rows: Sequence[Row]) -> Iterable[str]:
    yield "| Planner | Fleet | Within both targets | GPU-hours | TTFT p99, ms | ITL p99, ms | Dropped | Actions |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    beaten = _beaten(rows)
    for row in sorted(rows, key=lambda row: row.case not in SERVED):
        if row in beaten:
            continue
        shape = f"{FleetShape(*row.fleet)}" if row.case == "fixed" else f"from {FleetShape(*row.fleet)}"
        name = row.case if row.case in ("fixed", CLAIRVOYANT) else f"`{SERVED.get(row.case, row.case)}`"
        name += " as served" if row.case in SERVED else ""
        cells = (_ms(row.ttft_p99_ms), _ms(row.itl_p99_ms), f"{row.dropped:,}", str(row.scale_actions))
        yield f"| {name} | {shape} | {row.attainment:.2%} | {row.gpu_hours:.3f} | {' | '.join(cells)} |"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def beaten_by(row: Row, fixed: Sequence[Row]) -> list[Row]:
    """Fixed fleets that serve at least as many, with no more GPU-hours, and are better in one of the two."""
    return [
        each
        for each in fixed
        if each.attainment >= row.attainment
        and each.gpu_hours <= row.gpu_hours
        and (each.attainment, each.gpu_hours) != (row.attainment, row.gpu_hours)
    ]


def _beaten(rows: Sequence[Row]) -> list[Row]:
    """Fixed fleets that are no better than another one, with no fewer GPU-hours."""
    fixed = [row for row in rows if row.case == "fixed"]
    return [row for row in fixed if beaten_by(row, fixed)]


def _verdict(rows: Sequence[Row]) -> Iterable[str]:
    """Each planner against the fixed fleets."""
    fixed = [row for row in rows if row.case == "fixed"]
    if not fixed:
        yield "No fixed fleet was run yet."
        return
    level = []
    for row in rows:
        if row.case in ("fixed", CLAIRVOYANT, *SERVED):
            continue
        beats = [each for each in fixed if beaten_by(each, [row])]
        if better := beaten_by(row, fixed):
            fleet = max(better, key=lambda each: each.attainment)
            kept = f"{fleet.attainment:.2%} at {fleet.gpu_hours:.3f}"
            yield f"* `{row.case}` **loses** to the fixed fleet {FleetShape(*fleet.fleet)} ({kept})."
        elif beats:
            yield f"* `{row.case}` loses to none and beats {_fleets(beats)}."
        else:
            level.append(f"`{row.case}`")
    if level:
        yield f"* Neither better nor worse than the fixed fleets: {', '.join(level)}."
    if beaten := _beaten(rows):
        yield f"* Not shown, because another fixed fleet beats them: {_fleets(beaten)}."


def _fleets(rows: Sequence[Row]) -> str:
    return ", ".join(str(FleetShape(*row.fleet)) for row in rows)


def _replayed(facts: Facts) -> Iterable[str]:
    rows = [row for trial in TRIALS for row in facts.of(REPLAY, trial.name, SLO)]
    pairs = [row for trial in TRIALS for row in facts.of(REPLAY, trial.name) if row.case != SLO]
    if not rows and not pairs:
        yield "The wheels of ai-dynamo are not installed where this was measured."
    if rows:
        yield from _own(rows)
    if pairs:
        yield from _beside(pairs)


def _own(rows: Sequence[Row]) -> Iterable[str]:
    """`slo`, and what was asked of it."""
    yield "| Trace | From | Within both targets | asked for | GPU-hours | ÷ clairvoyant's | asked for |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for row in rows:
        trial = next(each for each in TRIALS if each.name == row.trial)
        ratio = None if trial.clairvoyant is None else row.gpu_hours / trial.clairvoyant
        kept, paid = ASKED.get(row.trial, (None, None))
        cells = (
            row.trial,
            f"{FleetShape(*row.fleet)}",
            f"{row.attainment:.2%}",
            _asked(kept, "≥", row.attainment, 100),
            f"{row.gpu_hours:.3f}",
            "–" if ratio is None else f"{ratio:.3f}",
            _asked(paid, "≤", ratio, 1),
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "`slo` alone, one setting."
    yield ""


def _beside(rows: Sequence[Row]) -> Iterable[str]:
    """Dynamo's own planner beside ours with the same rules."""
    yield "Dynamo's own planner, and `throughput-load`, with the same options (`sla`, both loops, no profile):"
    yield ""
    yield "| Trace | From | Planner | Within both targets | GPU-hours | Actions |"
    yield "|---|---|---|--:|--:|--:|"
    for row in rows:
        name = row.case if row.case == DYNAMOS else f"`{row.case}`"
        shape = f"{FleetShape(*row.fleet)}"
        cells = (row.trial, shape, name, f"{row.attainment:.2%}", f"{row.gpu_hours:.3f}", str(row.scale_actions))
        yield f"| {' | '.join(cells)} |"


def _asked(bound: float | None, sign: str, value: float | None, factor: int) -> str:
    if bound is None or value is None:
        return "–"
    met = value >= bound if sign == "≥" else value <= bound
    shown = f"{bound * factor:.1f} %" if factor == 100 else f"{bound:.2f}"
    return f"{sign} {shown}{'' if met else ': **missed**'}"


WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 420, 300, 52, 28, 40


def picture(facts: Facts) -> str:
    """One plot for each trial: attainment over GPU-hours, the fixed fleets joined by a line. Rows that are served in
    another way are left out."""
    found = [(trial, [row for row in facts.of(TWIN, trial.name) if row.case not in SERVED]) for trial in TRIALS]
    shown = [(trial, rows) for trial, rows in found if rows]
    columns = min(2, max(1, len(shown)))
    lines = -(-len(shown) // columns) or 1
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{columns * WIDTH}" height="{lines * HEIGHT + 24}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (trial, rows) in enumerate(shown):
        x, y = number % columns * WIDTH, number // columns * HEIGHT
        parts.append(f'<g transform="translate({x} {y})">{"".join(_plot(trial, rows))}</g>')
    for number, (name, color) in enumerate(COLORS.items()):
        x, y = 20 + number * 125, lines * HEIGHT + 12
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{color}"/><text x="{x + 8}" y="{y + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _plot(trial: Trial, rows: Sequence[Row]) -> Iterable[str]:
    least = min(row.attainment for row in rows)
    floor = 0.9 if least >= 0.9 else 0.5 if least >= 0.5 else 0.0
    most = max(row.gpu_hours for row in rows) * 1.05
    wide, high = WIDTH - LEFT - 16, HEIGHT - TOP - BOTTOM

    def at(row: Row) -> tuple[float, float]:
        over = (row.attainment - floor) / (1 - floor)
        return LEFT + wide * row.gpu_hours / most, TOP + high * (1 - over)

    yield f'<text x="{LEFT}" y="16" font-weight="bold">{escape(trial.name)}</text>'
    yield f'<rect x="{LEFT}" y="{TOP}" width="{wide}" height="{high}" fill="none" stroke="#999"/>'
    for tick in range(5):
        share = floor + (1 - floor) * tick / 4
        y = TOP + high * (1 - tick / 4)
        yield f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{share:.1%}</text>'
        x = LEFT + wide * tick / 4
        yield f'<text x="{x:.0f}" y="{TOP + high + 14}" text-anchor="middle">{most * tick / 4:.2f}</text>'
    yield f'<text x="{LEFT + wide / 2:.0f}" y="{TOP + high + 30}" text-anchor="middle">GPU-hours</text>'
    fixed = " ".join("{:.1f},{:.1f}".format(*at(row)) for row in rows if row.case == "fixed")
    yield f'<polyline points="{fixed}" fill="none" stroke="{COLORS["fixed"]}"/>'
    for row in rows:
        x, y = at(row)
        said = escape(f"{row.case} {FleetShape(*row.fleet)}: {row.attainment:.2%} at {row.gpu_hours:.3f}")
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLORS[row.case]}"><title>{said}</title></circle>'
