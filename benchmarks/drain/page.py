"""The table and the plot of docs/drain.md."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from benchmarks.drain.facts import OURS, Facts
from benchmarks.drain.judge import MANY, WINDOW_S, Verdict
from benchmarks.harness import machine, machine_line, percentile
from benchmarks.measured_pages import write_measured

COMMAND = "python -m benchmarks.drain --page"


def write(page: Path, verdict: Verdict, facts: Facts) -> None:
    """Replace what stands between the page's two marks, and draw `drain.png` beside it. ValueError without marks."""
    write_measured(page, COMMAND, section(verdict, facts))
    draw(verdict, facts, page.with_suffix(".png"))


def section(verdict: Verdict, facts: Facts) -> str:
    """The measured figures, as markdown."""
    row = verdict.rows[OURS]
    ups = [up for up in facts.ups if up.with_policy == OURS]
    took_back = sum(up.took_back for up in ups)
    lines = [
        f"{datetime.now(UTC):%Y-%m-%d}, {machine_line(machine()).partition('  ')[2].partition(', load')[0]}: "
        f"{verdict.requests:,} requests in {facts.lasted_s / 60:.0f} minutes, time ×{facts.speed:g}; {facts.trace}.",
        "",
        _policies(verdict),
        "",
        "| Ours | |",
        "|---|---|",
        f"| scale-downs (drains) and scale-ups | {row.downs} and {len(ups)}, {took_back} of these took a drain back |",
        f"| dropped requests, wrong answers | {row.cut}, {row.wrong} |",
        f"| sent to a worker more than {WINDOW_S * 1e3:.0f} ms after it deregistered | {len(verdict.too_late)} |",
        f"| sent within that window: served there, sent on | {verdict.late_served}, {verdict.late_sent_on} |",
        f"| drains that began with {MANY} or more streams that outlasted 30 s | "
        f"{verdict.hard} of {row.downs} ({100 * verdict.hard / row.downs:.0f} %) |",
        f"| from the command to out of routing: p50, p99 | {_ms(verdict.out_of_routing_s)} |",
        f"| from the command to gone: median, longest | {percentile(verdict.drain_s, 0.5):.1f} s, "
        f"{max(verdict.drain_s):.1f} s of the wall clock |",
    ]
    for command in ("status", "scale"):
        took_s = [one.took_s for one in facts.asked if one.command == command and one.draining >= 2]
        lines.append(f"| `{command}` answered while two or more drained: p50, p99 | {_ms(took_s)} |")
    lines.append(f"| a crashed worker's next process, beyond the back-off: p50, p99 | {_ms(facts.over_s)} |")
    lines.append(f"| processes that came or went unasked | {len(facts.unasked)} |")
    return "\n".join([*lines, "", "![Dropped requests by policy](drain.png)"])


def _policies(verdict: Verdict) -> str:
    downs = verdict.rows[OURS].downs
    lines = [
        "| A worker is killed | scale-downs | streams on the victims | dropped | dropped per scale-down | "
        f"would have dropped in our {downs} |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in verdict.rows.values():
        name = "**never: drain**" if row.policy.name == OURS else _when(row.policy.budget_s or 0)
        would = "" if row.policy.name == OURS else f"{row.would_cut:,}"
        share = f"{row.cut / row.downs:.1f}" if row.downs else "–"
        lines.append(f"| {name} | {row.downs} | {row.in_flight:,} | {row.cut + row.wrong} | {share} | {would} |")
    return "\n".join(lines)


def _when(budget_s: float) -> str:
    return f"after {budget_s:g} s" if budget_s else "at once"


def _ms(values_s: list[float]) -> str:
    return f"{percentile(values_s, 0.5) * 1e3:.0f} ms, {percentile(values_s, 0.99) * 1e3:.0f} ms" if values_s else "–"


def draw(verdict: Verdict, facts: Facts, path: Path) -> None:
    """Left: dropped per scale-down by policy. Right: how long the streams on a drained worker still go on."""
    import matplotlib  # the extra `bench`: only this page needs it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    rows = [row for row in verdict.rows.values() if row.downs]
    names = ["drain (ours)" if row.policy.name == OURS else _when(row.policy.budget_s or 0) for row in rows]
    bars = left.bar(names, [row.cut / row.downs for row in rows], color=["tab:green", *["tab:red"] * (len(rows) - 1)])
    left.bar_label(bars, fmt="%.1f")
    left.set_ylabel("dropped requests per scale-down")
    left.set_xlabel("the worker is killed …")
    lasted_s = sorted(seconds * facts.speed for seconds in verdict.remaining_s)
    left_over = [100 * (1 - index / len(lasted_s)) for index in range(len(lasted_s))]
    right.step(lasted_s, left_over, where="post", color="tab:blue")
    for row in rows:
        if row.policy.budget_s:
            right.axvline(row.policy.budget_s, color="tab:red", linestyle="--", linewidth=1)
            right.annotate(f"{row.policy.budget_s:g} s", (row.policy.budget_s, 101), color="tab:red", ha="center")
    right.set_xlabel("seconds after the drain began (engine's time)")
    right.set_ylabel("streams that still go on, %")
    right.set_xlim(0, max(lasted_s))
    right.set_ylim(0, 109)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
