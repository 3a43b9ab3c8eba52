"""The HTML page of one or more runs: tables, plots as inline SVG, every decision. Self-contained, and the same bytes
for the same runs. Needs matplotlib (the extra `report`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.planner.policies.explain import explain_reason
from dynamo_local.planner.values import Reason
from dynamo_local.profile.repetitions import quantile
from dynamo_local.simulator.fleet import FleetPoint
from dynamo_local.simulator.metrics import Metrics
from dynamo_local.simulator.options import Slo
from dynamo_local.simulator.simulation import Acted, Run
from dynamo_local.system.pages import STYLE, page_template, svg, write_page

BINS = 120
"""How many spans of time a run is cut into for the curves of load and latency."""


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """One run for the page."""

    name: str
    run: Run
    metrics: Metrics


def write_report(
    path: Path, title: str, facts: Sequence[tuple[str, str]], reports: Sequence[ReportedRun], slo: Slo
) -> None:
    """Write the page. `facts` are `(what, value)` of the whole. Raises `BadInput` without matplotlib, or where the file
    cannot be written."""
    plots = [_plot(one, slo) for one in reports]
    text = _PAGE.render(
        title=title,
        style=STYLE,
        facts=facts,
        head=[label for label, _ in _cells(reports[0].metrics)] if reports else [],
        rows=[(one.name, [value for _, value in _cells(one.metrics)]) for one in reports],
        runs=[(one.name, plot, decision_rows(one.run)) for one, plot in zip(reports, plots, strict=True)],
    )
    write_page(path, text)


def _cells(metrics: Metrics) -> list[tuple[str, str]]:
    def ms(value: float | None) -> str:
        return "–" if value is None else f"{value:.1f}"

    return [
        ("requests", f"{metrics.requests}"),
        ("completed", f"{metrics.completed}"),
        ("dropped", f"{metrics.dropped}"),
        ("attainment", f"{metrics.attainment:.2%}"),
        ("goodput, 1/s", f"{metrics.goodput_rps:.2f}"),
        ("GPU-hours", f"{metrics.gpu_hours:.3f}"),
        ("GPUs, mean", f"{metrics.gpus_mean:.2f}"),
        ("scale actions", f"{metrics.scale_actions}"),
        ("TTFT mean, ms", ms(metrics.ttft_ms.mean)),
        ("TTFT p95, ms", ms(metrics.ttft_ms.p95)),
        ("ITL mean, ms", ms(metrics.itl_ms.mean)),
        ("ITL p95, ms", ms(metrics.itl_ms.p95)),
    ]


# --- decisions ---------------------------------------------------------------------------------


def decision_rows(run: Run) -> list[tuple[str, str, str]]:
    """`(time, the decision in words, what became of it)` of every step that was decided; holds are left out."""
    return [
        (f"{acted.decision.now_s:.0f} s", explain_reason(reason), _became(acted, reason))
        for acted in run.acted
        for reason in acted.decision.reasons
        if reason.step
    ]


def _became(acted: Acted, reason: Reason) -> str:
    refused = dict(acted.refused).get(reason.component)
    if refused is not None:
        return f"refused: {refused}"
    if reason.deferred:
        return "waits for a GPU" if reason.step > 0 else "had not started"
    return "done" if reason.component in acted.done else "not carried out"


# --- plots -------------------------------------------------------------------------------------


def _plot(report: ReportedRun, slo: Slo) -> str:
    """Load, workers, TTFT and what the planner saw, over the minutes of the run, as one SVG."""

    planned = bool(report.run.sightings)

    def draw(figure: Any) -> None:
        axes = figure.subplots(4 if planned else 3, 1, sharex=True)
        run, width_s = report.run, max(report.run.end_s / BINS, 1.0)
        _load(axes[0], run, width_s)
        _workers(axes[1], run)
        _ttft(axes[2], run, width_s, slo)
        if planned:
            _decisions(axes[3], run)
        for axis in axes:
            axis.grid(alpha=0.3)
            axis.set_xlim(0, max(run.end_s / 60, 1 / 60))
        axes[-1].set_xlabel("minutes after the first arrival")

    return svg(draw, 10, 9.5 if planned else 7.2)


def _binned(times_s: Sequence[float], values: Sequence[float], width_s: float) -> dict[int, list[float]]:
    bins: dict[int, list[float]] = {}
    for at_s, value in zip(times_s, values, strict=True):
        bins.setdefault(math.floor(at_s / width_s), []).append(value)
    return bins


def _load(axis: Any, run: Run, width_s: float) -> None:
    at = [job.request.at_s for job in run.jobs]
    last = math.floor(max(run.end_s, at[-1] if at else 0.0) / width_s)
    middles = [(index + 0.5) * width_s / 60 for index in range(last + 1)]
    counts = _binned(at, at, width_s)
    axis.step(middles, [len(counts.get(i, ())) / width_s for i in range(last + 1)], where="mid", color="tab:blue")
    axis.set_ylabel("requests/s", color="tab:blue")
    tokens = _binned(at, [float(job.request.input_length) for job in run.jobs], width_s)
    other = axis.twinx()
    sums = [math.fsum(tokens.get(i, ())) / width_s for i in range(last + 1)]
    other.step(middles, sums, where="mid", color="tab:gray", alpha=0.6)
    other.set_ylabel("prompt tokens/s", color="tab:gray")
    axis.set_title("load")


def _workers(axis: Any, run: Run) -> None:
    points = [*run.points, _at(run.points[-1], run.end_s)] if run.points else []
    minutes = [max(point.at_s, 0.0) / 60 for point in points]
    for name, color in (("prefill", "tab:orange"), ("decode", "tab:green")):
        ready = [getattr(point, name).ready for point in points]
        if not any(ready):
            continue
        axis.step(minutes, ready, where="post", color=color, label=f"{name}, ready")
        coming = [getattr(point, name).starting + getattr(point, name).waiting for point in points]
        both = [a + b for a, b in zip(ready, coming, strict=True)]
        axis.step(minutes, both, where="post", color=color, linestyle=":", label=f"{name}, with those on their way")
    held = [point.gpus_held for point in points]
    axis.step(minutes, held, where="post", color="black", linewidth=0.8, label="GPUs held")
    axis.set_ylim(0, 1.4 * max([1, *held]))  # room for the legend
    axis.set_ylabel("workers")
    axis.legend(loc="upper right", fontsize=7, ncols=3)
    axis.set_title("workers by role")


def _at(point: FleetPoint, at_s: float) -> FleetPoint:
    return FleetPoint(max(at_s, point.at_s), point.prefill, point.decode, point.gpus_held)


def _ttft(axis: Any, run: Run, width_s: float, slo: Slo) -> None:
    jobs = [(job.request.at_s, job.ttft_s * 1000) for job in run.jobs if job.ttft_s is not None]
    bins = _binned([at_s for at_s, _ in jobs], [value for _, value in jobs], width_s)
    minutes = [(index + 0.5) * width_s / 60 for index in sorted(bins)]
    for share, color in ((0.5, "tab:blue"), (0.95, "tab:red")):
        values = [quantile(bins[index], share) for index in sorted(bins)]
        axis.plot(minutes, values, color=color, marker=".", markersize=3, linewidth=1, label=f"p{share * 100:.0f}")
    if slo.ttft_ms is not None:
        axis.axhline(slo.ttft_ms, color="black", linestyle="--", linewidth=0.8, label="target")
    if bins:
        axis.set_yscale("log")
        axis.legend(loc="upper right", fontsize=7, ncols=3)
    axis.set_ylabel("TTFT, ms")
    axis.set_title("time to first token, by arrival")


def _decisions(axis: Any, run: Run) -> None:
    seen = [(s.at_s / 60, s.queue, s.kv) for s in run.sightings]
    axis.plot(
        [m for m, _, kv in seen if kv is not None], [kv for _, _, kv in seen if kv is not None], color="tab:green"
    )
    axis.set_ylabel("mean KV use of decode", color="tab:green")
    axis.set_ylim(0, 1.05)
    queue = axis.twinx()
    depths = [(seen.at_s / 60, seen.queue) for seen in run.sightings if seen.queue is not None]
    minutes, values = [minute for minute, _ in depths], [depth for _, depth in depths]
    queue.plot(minutes, values, color="tab:orange", linewidth=0.7, alpha=0.7)
    queue.set_ylabel("prefill queue", color="tab:orange")
    queue.set_ylim(bottom=0)
    for acted in run.acted:
        for component, step in acted.decision.acts:
            if component in acted.done:
                color = "tab:orange" if component == "PrefillWorker" else "tab:green"
                marker = "^" if step > 0 else "v"
                minute = acted.decision.now_s / 60
                axis.plot([minute], [0.97 if step > 0 else 0.03], color=color, marker=marker, markersize=7)
    axis.set_title("what the planner saw and did (▲ one more, ▼ one less)")


_PAGE = page_template(
    """<table>
<tr><th>run</th>{% for label in head %}<th>{{ label }}</th>{% endfor %}</tr>
{% for name, cells in rows %}
<tr><td>{{ name }}</td>{% for cell in cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% for name, plot, decisions in runs %}
<h2>{{ name }}</h2>
{{ plot | safe }}
{% if decisions %}
<table class="words">
<tr><th>at</th><th>decision</th><th>outcome</th></tr>
{% for row in decisions %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endif %}
{% endfor %}"""
)
