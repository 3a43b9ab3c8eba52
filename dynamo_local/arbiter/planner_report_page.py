"""Writes the planner's report: one HTML page that needs no other file, made from the decision log.

`dynamo planner report` calls `write_report`. The arbiter has reports written by a process of its own, which yields the
processors to all that serve: `python -m dynamo_local.arbiter.planner_report_page LOG FOLDER SINCE NAMESPACE`. The page
draws its charts itself, with uPlot, which it has within it.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dynamo_local.arbiter.planner_report_data import ForecastErrors, Point, ReportData, collect
from dynamo_local.core.traffic import kept_words
from dynamo_local.errors import BadInput, DynamoError, NotRunning
from dynamo_local.planner.records.decision_log import describe, of_run, oldest_first
from dynamo_local.planner.records.figures import Line
from dynamo_local.system.pages import STYLE, page_template, write_page
from dynamo_local.system.prctl import die_as_asked

REPORTS_KEPT = 30
"""The folder keeps this many reports. Older ones are removed."""
WORDS_MAX = 400
"""Characters of one line of a decision: a plugin may give a reason of any length."""
ROWS_MAX = 100
"""Rows of the table of decisions with a step."""
NICE = 10
CHART_STYLE = "figure { margin: 1rem 0 }\n.u-legend th, .u-legend td { border: 0 }"
UPLOT = Path(__file__).parents[1] / "dashboard" / "static" / "vendor"
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


# --- what is drawn -------------------------------------------------------------------------------


def drawn(charts: Sequence[Chart], points: Sequence[Point], changes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The data of `planner_report.js`: the charts' curves over the points' times, and the steps of decisions."""
    lanes = sorted({component for change in changes for component in change["steps"]})
    steps = [
        (change["at"], lanes.index(component), step > 0, _color(step, outcome))
        for change in changes
        for component, (step, outcome) in change["steps"].items()
    ]

    def curve(one: Series) -> dict[str, Any]:
        return {**asdict(one), "values": [_short(value) for value in column(points, one.figure)]}

    curves = [
        {"title": f"{chart.title} ({chart.unit})", "series": [curve(one) for one in chart.series]} for chart in charts
    ]
    return {"t": [round(point.wall_s, 1) for point in points], "charts": curves, "lanes": lanes, "steps": steps}


def _color(step: int, outcome: str) -> str:
    return RED if outcome == "refused" else BLUE if outcome == "deferred" else GREEN if step > 0 else ORANGE


def _short(value: float | None) -> float | None:
    """Five digits are more than a curve shows."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _scripts() -> tuple[str, ...]:
    """uPlot with its licence, and what draws with it."""
    return f"/*\n{_vendored('LICENSE')}*/\n{_vendored('js')}", Path(__file__).with_name("planner_report.js").read_text()


def _vendored(kind: str) -> str:
    """uPlot, as the page has it (`tests.tools.vendor`)."""
    return (UPLOT / f"uplot.{kind}").read_text(encoding="utf-8")


def _allowed(script: str) -> str:
    """The script's hash, by which the page's policy allows it and no other one."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


# --- the page ------------------------------------------------------------------------------------


def page(data: ReportData, title: str) -> str:
    """The HTML of the report."""
    changes = [_change(line) for line in data.changes]
    inside = [change for change in changes if data.points[0].wall_s <= change["at"] <= data.points[-1].wall_s]
    scripts = _scripts()
    return _PAGE.render(
        title=title,
        style=f"{_vendored('css')}\n{STYLE}\n{CHART_STYLE}",
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src {' '.join(map(_allowed, scripts))}",
        data=drawn(known_charts(data.points), data.points, inside),
        scripts=scripts,
        per_point=data.per_point,
        facts=list(facts(data)),
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
<p>Times are UTC. A drag zooms into all charts, a double click shows everything again.</p>
<noscript><p>The charts need JavaScript. The tables do not.</p></noscript>
<div id="charts"></div>
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
</table>
<script type="application/json" id="data">{{ data | tojson }}</script>
{% for script in scripts %}
<script>{{ script | safe }}</script>
{% endfor %}""",  # noqa: E501 - a line of HTML
    head='<meta http-equiv="Content-Security-Policy" content="{{ policy }}">\n',
)


# --- files ---------------------------------------------------------------------------------------


def write_report(log: Path, to: Path, *, since_s: float | None = None, title: str, run: str = "all") -> int:
    """Write the report of a run's decisions after `since_s` (Unix time).

    Returns the number of decisions. Raises `NotRunning` where there are none, `BadInput` where it cannot be written.
    """
    if to.suffix == ".svg":
        raise BadInput(f"{to}: the report is a page, not a picture; give it a name such as {to.with_suffix('.html')}")
    data = collect(line for line in of_run(oldest_first(log), run) if since_s is None or line["wall_s"] >= since_s)
    if not data.points:
        when = "" if since_s is None else f" after {datetime.fromtimestamp(since_s).astimezone():%Y-%m-%d %H:%M:%S}"
        raise NotRunning(f"there is no decision{when} in {log}: nothing to report; `dynamo planner status` says why")
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
