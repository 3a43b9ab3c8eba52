"""Writes the planner's report: one HTML page that needs no other file, made from the decision log.

`dynamo planner report` calls `write_report`. The arbiter has reports written by a process of its own, which yields the
processors to all that serve: `python -m dynamo_local.arbiter.planner_report_page LOG FOLDER SINCE NAMESPACE`. Charts
need matplotlib (the extra `report`). Without matplotlib the page has its tables only, and says what to install.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dynamo_local.arbiter.planner_report_data import ForecastErrors, Point, ReportData, collect
from dynamo_local.core.traffic import kept_words
from dynamo_local.errors import BadInput, DynamoError, NotRunning, how_to_install
from dynamo_local.planner.records.decision_log import describe, of_run, oldest_first
from dynamo_local.planner.records.figures import Line
from dynamo_local.system.pages import STYLE, check_plots, page_template, svg, write_page
from dynamo_local.system.prctl import die_as_asked

REPORTS_KEPT = 30
"""The folder keeps this many reports. Older ones are removed."""
PICTURED = 7
"""A picture has this many of the charts."""
WORDS_MAX = 400
"""Characters of one line of a decision: a plugin may give a reason of any length."""
ROWS_MAX = 100
"""Rows of the table of decisions with a step."""
NICE = 10
WIDTH_IN, HEIGHT_IN = 10.0, 2.3
"""Inches of one chart."""
_OURS = re.compile(r"planner_report_\d{8}T\d{6}Z(_\d+)?\.html")

BLUE, ORANGE, GREEN, RED, GRAY, BLACK = "#1f77b4", "#e07b00", "#2a9d3a", "#d62728", "#888888", "#222222"


@dataclass(frozen=True, slots=True)
class Series:
    """One curve. With `steps` the figure keeps its value until the next point."""

    figure: str
    label: str
    color: str
    dashed: bool = False
    steps: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves of one unit. A page has the chart if one of `needs` is known."""

    title: str
    unit: str
    series: tuple[Series, ...]
    needs: tuple[str, ...]


def _forecast(title: str, unit: str, name: str) -> Chart:
    observed, forecast = f"observed_{name}", f"forecast_{name}"
    curves = (Series(observed, "observed", BLUE), Series(forecast, "forecast for that window", ORANGE, dashed=True))
    return Chart(title, unit, curves, (observed, forecast))


def _latency(title: str, name: str) -> Chart:
    curves = (
        Series(f"observed_{name}", "observed, mean", BLUE),
        Series(f"estimated_{name}", "estimated", ORANGE),
        Series(f"sla_target_{name}", "target", RED, dashed=True, steps=True),
    )
    return Chart(title, "ms", curves, (f"observed_{name}", f"estimated_{name}"))


def _replicas(title: str, role: str) -> Chart:
    curves = (
        Series(f"num_{role}_replicas", "ready", GREEN, steps=True),
        Series(f"capacity_{role}_replicas", "ready or starting", BLUE, steps=True),
        Series(f"predicted_num_{role}_replicas", "target", ORANGE, dashed=True, steps=True),
        Series(f"needed_{role}_replicas", "needed, before bounds", GRAY, dashed=True, steps=True),
        Series(f"bound_{role}_replicas", "throughput loop's bound", BLACK, dashed=True, steps=True),
        Series(f"min_{role}_replicas", "floor", RED, dashed=True, steps=True),
    )
    return Chart(title, "workers", curves, (f"num_{role}_replicas",))


PREFILL_RPS, DECODE_RPS = (f"engine_{role}_capacity_requests_per_second" for role in ("prefill", "decode"))
GPU_BOUNDS = (
    Series("gpus_held", "held", GREEN, steps=True),
    Series("max_gpu_budget", "at most", RED, dashed=True, steps=True),
    Series("min_gpu_budget", "at least", GRAY, dashed=True, steps=True),
)
CAPACITY = (
    Series(PREFILL_RPS, "prefill", ORANGE),
    Series(DECODE_RPS, "decode", GREEN),
    Series("predicted_requests_per_second", "expected load of all", BLUE, dashed=True),
)
FULLEST = (
    Series("queued_prefill_tokens", "waiting prompts", ORANGE),
    Series("queued_decode_kv_tokens", "KV of waiting decodes", RED),
    Series("inflight_decode_kv_tokens", "KV of running decodes", GREEN),
)
WAITING = (
    Series("prefill_queue_size", "in the prefill queue", ORANGE),
    Series("num_queued_request", "in a decode worker", GREEN),
)
CHARTS = (
    _forecast("Requests", "1/s", "requests_per_second"),
    _latency("Time to first token", "ttft_ms"),
    _latency("Gap between tokens", "itl_ms"),
    Chart("Requests within both targets", "0 to 1", (Series("kept_targets", "last minute", GREEN),), ("kept_targets",)),
    _replicas("Prefill workers", "prefill"),
    _replicas("Decode workers", "decode"),
    Chart("GPUs", "GPUs", GPU_BOUNDS, ("gpus_held",)),
    Chart("GPU-hours", "h", (Series("gpu_hours", "since the beginning", GREEN),), ("gpu_hours",)),
    Chart("Requests that one worker serves within its target", "1/s", CAPACITY, (PREFILL_RPS, DECODE_RPS)),
    _forecast("Prompts", "tokens", "input_sequence_tokens"),
    _forecast("Answers", "tokens", "output_sequence_tokens"),
    Chart("The fullest engine", "tokens", FULLEST, ("queued_prefill_tokens", "inflight_decode_kv_tokens")),
    Chart("Waiting requests", "requests", WAITING, ("prefill_queue_size", "num_queued_request")),
    Chart("KV use of decode workers", "0 to 1", (Series("average_kv_load", "mean", GREEN),), ("average_kv_load",)),
)


def column(points: Sequence[Point], figure: str) -> list[float | None]:
    """The figure at each point, None where it is not known."""
    if figure == "gpu_hours":
        return [point.gpu_hours for point in points]
    return [point.figures.get(figure) for point in points]


def known_charts(points: Sequence[Point]) -> list[Chart]:
    """The charts with something to show. Curves without a value are left out."""
    known = {name for point in points for name in point.figures} | ({"gpu_hours"} if points else set())
    return [
        Chart(chart.title, chart.unit, tuple(one for one in chart.series if one.figure in known), chart.needs)
        for chart in CHARTS
        if known.intersection(chart.needs)
    ]


# --- drawing -------------------------------------------------------------------------------------


def picture(charts: Sequence[Chart], points: Sequence[Point], changes: Sequence[dict[str, Any]] = ()) -> str:
    """The charts below each other as one SVG element, after the decisions with a step. Raises without matplotlib."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    times = [datetime.fromtimestamp(point.wall_s, UTC) for point in points]

    def draw(figure: Any) -> None:
        count = len(charts) + bool(changes)
        axes = list(figure.subplots(count, 1, squeeze=False)[:, 0])
        if changes:
            _draw_changes(axes[0], changes)
        for chart, axis in zip(charts, axes[len(axes) - len(charts) :], strict=True):
            for one in chart.series:
                _draw_curve(axis, one, times, column(points, one.figure))
            axis.set_title(f"{chart.title} ({chart.unit})", loc="left")
            axis.set_ylim(bottom=0)
            axis.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=7, ncols=6, frameon=False)
        for axis in axes:
            axis.grid(alpha=0.3)
            if times[0] < times[-1]:
                axis.set_xlim(times[0], times[-1])
            locator = AutoDateLocator(tz=UTC)
            axis.xaxis.set_major_locator(locator)
            axis.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=UTC))

    return svg(draw, WIDTH_IN, HEIGHT_IN * (len(charts) + bool(changes)))


def _draw_curve(axis: Any, series: Series, times: Sequence[datetime], values: Sequence[float | None]) -> None:
    """Figures with `steps` are drawn with gaps. The others are observed less often than decisions are made."""
    found = [(at, value) for at, value in zip(times, values, strict=True) if value is not None or series.steps]
    axis.plot(
        [at for at, _ in found],
        [float("nan") if value is None else float(f"{value:.5g}") for _, value in found],
        color=series.color,
        label=series.label,
        linewidth=1.2,
        linestyle="--" if series.dashed else "-",
        drawstyle="steps-post" if series.steps else "default",
        marker="." if len(found) == 1 else None,
    )


def _draw_changes(axis: Any, changes: Sequence[dict[str, Any]]) -> None:
    """A lane for each component, with a mark for each step."""
    components = sorted({component for change in changes for component in change["steps"]})
    marks: dict[tuple[str, str], list[tuple[datetime, int]]] = {}
    for change in changes:
        for component, (step, outcome) in change["steps"].items():
            color = RED if outcome == "refused" else BLUE if outcome == "deferred" else GREEN if step > 0 else ORANGE
            at = datetime.fromtimestamp(change["at"], UTC), components.index(component)
            marks.setdefault(("^" if step > 0 else "v", color), []).append(at)
    for (marker, color), found in sorted(marks.items()):
        axis.plot([at for at, _ in found], [lane for _, lane in found], marker, color=color, markersize=6)
    # matplotlib reads a name between two $ as mathematics.
    axis.set_yticks(range(len(components)), [component.replace("$", r"\$") for component in components])
    axis.set_ylim(-0.5, len(components) - 0.5)
    axis.set_title("Decisions with a step (▲ up, ▼ down; red: refused, blue: waits for a GPU)", loc="left")


# --- the page ------------------------------------------------------------------------------------


def page(data: ReportData, title: str) -> str:
    """The HTML of the report."""
    charts, changes = known_charts(data.points), [_change(line) for line in data.changes]
    inside = [change for change in changes if data.points[0].wall_s <= change["at"] <= data.points[-1].wall_s]
    try:
        check_plots()
        drawn, missing = picture(charts, data.points, inside), None
    except BadInput:
        drawn, missing = None, f"This page has no charts, because matplotlib is missing: {how_to_install('report')}."
    return _PAGE.render(
        title=title,
        style=STYLE,
        per_point=data.per_point,
        facts=list(facts(data)),
        drawn=drawn,
        missing=missing,
        shown=len(inside),
        rules=sorted(data.rules.items(), key=lambda item: (item[0][0], -item[1])),
        rows=changes[-ROWS_MAX:][::-1],
        changed=data.changed,
    )


def facts(data: ReportData) -> Iterator[tuple[str, str]]:
    """The rows of the first table: name and value."""
    began_s, ended_s = data.points[0].wall_s, data.points[-1].wall_s
    yield "from, to", f"{_utc(began_s)}, {_utc(ended_s)} UTC"
    yield "policy", ", ".join(data.policies)
    done = ", ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in data.steps.most_common())
    yield "decisions", f"{data.decisions:,}, of these {data.changed:,} with a step" + (f" ({done})" if done else "")
    if data.looked_s > 0:
        mean = data.gpu_hours * 3600 / data.looked_s
        yield "GPU-hours", f"{data.gpu_hours:.2f}, {mean:.2f} GPUs in the mean of {_span(data.looked_s)}"
    for words in kept_words(data.targets):
        yield "requests", words
    for what, label in (("ttft_ms", "mean TTFT within its target"), ("itl_ms", "mean ITL within its target")):
        attained = data.attained[what]
        if attained.windows:
            share = attained.within / attained.windows
            yield label, f"{attained.within} of {attained.windows} windows ({share:.0%})"
    names = {"requests_per_second": "requests/s", "input_sequence_tokens": "prompt", "output_sequence_tokens": "answer"}
    for name, label in names.items():
        if name in data.errors:
            yield f"forecast of {label}", _error(data.errors[name])


def _error(error: ForecastErrors) -> str:
    share = "" if error.share is None else f" ({error.share:.0%} of the observed value)"
    side = "much" if error.bias > 0 else "little"
    bias = f"; in the mean {abs(error.bias):.4g} too {side}" if error.bias else ""
    return f"off by {error.mean:.4g} in the mean of {error.windows} windows{share}{bias}"


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def _utc(wall_s: float) -> str:
    return f"{datetime.fromtimestamp(wall_s, UTC):%Y-%m-%d %H:%M:%S}"


def _change(line: Line) -> dict[str, Any]:
    """A decision with a step: its time, number and words. `steps` has each component's step and outcome."""
    try:
        texts = describe(line).splitlines()
    except BadInput as error:
        texts = [f"written by another version: {error}"]
    steps = {
        reason["component"]: (reason["step"], str(line["outcomes"].get(reason["component"], {}).get("outcome", "")))
        for reason in line["decision"]["reasons"]
        if reason["step"]
    }
    return {
        "at": float(line["wall_s"]),
        "seq": line.get("seq", ""),
        "time": _utc(float(line["wall_s"])),
        "words": [word if len(word) <= WORDS_MAX else f"{word[: WORDS_MAX - 1]}…" for word in texts],
        "steps": steps,
    }


_PAGE = page_template(
    """{% if per_point > 1 %}
<p>A point of a curve stands for up to {{ per_point }} decisions: their mean, or the last value of a count.</p>
{% endif %}
{% if shown < changed %}
<p>The first chart has the last {{ shown }} of {{ "{:,}".format(changed) }} decisions with a step.</p>
{% endif %}
{% if drawn %}
<p>Times are UTC.</p>
{{ drawn | safe }}
{% else %}
<p>{{ missing }}</p>
{% endif %}
<h2>Which rule decided</h2>
<table class="words">
<tr><th>component</th><th>rule</th><th>decisions</th></tr>
{% for (component, rule), count in rules %}
<tr><td>{{ component }}</td><td>{{ rule }}</td><td>{{ count }}</td></tr>
{% endfor %}
</table>
<h2>Decisions with a step, the last first</h2>
{% if changed > rows | length %}
<p>The last {{ rows | length }} of {{ changed }}. <code>dynamo planner explain</code> and <code>history --changes</code> show all that are logged.</p>
{% endif %}
<table class="words">
<tr><th>at</th><th>decision</th><th>in words</th></tr>
{% for row in rows %}
<tr><td>{{ row.time }}</td><td>{{ row.seq }}</td><td>{% for word in row.words %}{{ word }}{% if not loop.last %}<br>{% endif %}{% endfor %}</td></tr>
{% endfor %}
</table>""",  # noqa: E501 - a line of HTML
    head="<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n",
)


# --- files ---------------------------------------------------------------------------------------


def write_report(log: Path, to: Path, *, since_s: float | None = None, title: str, run: str = "all") -> int:
    """Write the report of a run's decisions after `since_s` (Unix time), as a page or as a picture (`.svg`).

    Returns the number of decisions. Raises `NotRunning` where there are none, `BadInput` where it cannot be written.
    """
    data = collect(line for line in of_run(oldest_first(log), run) if since_s is None or line["wall_s"] >= since_s)
    if not data.points:
        when = "" if since_s is None else f" after {datetime.fromtimestamp(since_s).astimezone():%Y-%m-%d %H:%M:%S}"
        raise NotRunning(f"there is no decision{when} in {log}: nothing to report; `dynamo planner status` says why")
    if to.suffix == ".svg":
        check_plots("a picture")
        write_page(to, f'<?xml version="1.0"?>\n{picture(known_charts(data.points)[:PICTURED], data.points)}')
    else:
        write_page(to, page(data, title))
    return data.decisions


def write_next(log: Path, folder: Path, *, since_s: float, title: str) -> Path | None:
    """Write a report with the time in its name, and remove the oldest ones.

    Returns None where there was no decision since. Raises `BadInput`.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"the folder {folder} of reports cannot be made: {error.strerror}") from error
    path = _free(folder)
    try:
        write_report(log, path, since_s=since_s, title=title)
    except NotRunning:
        return None
    names = [each for each in folder.iterdir() if _OURS.fullmatch(each.name)]
    halves = folder.glob(".planner_report_*.html.*")  # of processes that were killed
    for old in (*sorted(names)[:-REPORTS_KEPT], *halves):
        old.unlink(missing_ok=True)
    return path


def title_of(namespace: str) -> str:
    """`Planner of dynamo on gpu-host`"""
    return f"Planner of {namespace} on {socket.gethostname()}"


def _free(folder: Path) -> Path:
    name = f"planner_report_{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    path, n = folder / f"{name}.html", 1
    while path.exists():
        path, n = folder / f"{name}_{n}.html", n + 1
    return path


def main() -> None:
    """Write one report. An error is one line on standard error."""
    die_as_asked(os.environ)
    os.nice(NICE)
    log, folder, since, namespace = sys.argv[1:]
    try:
        write_next(Path(log), Path(folder), since_s=float(since), title=title_of(namespace))
    except DynamoError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
