"""The page: what is worth knowing first, the charts, the decisions in words. No address of any other place is in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from dynamo_local.arbiter.planner_report.charts import (
    BLUE,
    CHART_WIDTH,
    GREEN,
    HEIGHT,
    HIGH,
    LEFT,
    ORANGE,
    RED,
    TOP,
    WIDE,
    WIDTH,
    Chart,
    chart_svg,
    column,
    known_charts,
    times_svg,
    x_of,
)
from dynamo_local.arbiter.planner_report.data import ForecastErrors, Gathered, Point
from dynamo_local.errors import BadInput
from dynamo_local.planner.records.decision_log import describe
from dynamo_local.planner.records.figures import Line
from dynamo_local.system.pages import STYLE, page_template

# --- script
# What makes the page interactive: a shared cross hair with all values, zoom by dragging, reasons of decisions.
#
# Texts of the log (a plugin's reason is one) only ever become text, never markup.

SCRIPT = """
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const [began, ended] = [data.times[0], data.times[data.times.length - 1]];
const WIDTH = 10000;
let view = [0, WIDTH];
const tip = document.getElementById('tip');
const charts = [...document.querySelectorAll('svg.chart')];

function timeAt(x) { return began + (ended - began) * x / WIDTH; }
function xOf(time) { return ended > began ? WIDTH * (time - began) / (ended - began) : WIDTH / 2; }
function told(time) { return new Date(time * 1000).toISOString().slice(5, 19).replace('T', ' '); }
function rounded(value) {
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString('en') : String(Number(value.toPrecision(4)));
}

function nearest(times, time) {
  let low = 0, high = times.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] < time) low = middle + 1; else high = middle;
  }
  return low > 0 && time - times[low - 1] < times[low] - time ? low - 1 : low;
}

function show() {
  for (const chart of charts) {
    const curves = chart.querySelector('svg.curves');
    const height = curves.viewBox.baseVal.height;
    curves.setAttribute('viewBox', `${view[0]} 0 ${view[1] - view[0]} ${height}`);
    const labels = [...chart.querySelectorAll('text.time')];
    const days = timeAt(view[1]) - timeAt(view[0]) >= 86400;
    labels.forEach((label, n) => {
      const time = told(timeAt(view[0] + (view[1] - view[0]) * n / (labels.length - 1)));
      label.textContent = n === 0 || n === labels.length - 1 ? time : days ? time.slice(0, 11) : time.slice(6);
    });
  }
}

function xAt(area, event) {
  const box = area.getBoundingClientRect();
  return view[0] + (view[1] - view[0]) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
}

function mark(x, name) {
  for (const chart of charts) {
    const curves = chart.querySelector('svg.curves');
    let line = curves.querySelector('.' + name);
    if (!line) {
      line = document.createElementNS('http://www.w3.org/2000/svg', 'line');
      line.setAttribute('class', name);
      line.setAttribute('y1', '0');
      line.setAttribute('y2', '1000');
      line.setAttribute('stroke', '#777');
      line.setAttribute('vector-effect', 'non-scaling-stroke');
      curves.append(line);
    }
    line.setAttribute('x1', x);
    line.setAttribute('x2', x);
  }
}

function unmark(name) { document.querySelectorAll('.' + name).forEach(line => line.remove()); }

function fill(lines) {
  tip.replaceChildren(...lines.map(([text, color]) => {
    const row = document.createElement('div');
    if (color) {
      const dot = document.createElement('span');
      dot.className = 'dot';
      dot.style.background = color;
      row.append(dot);
    }
    row.append(text);
    return row;
  }));
}

function valuesAt(chart, time) {
  const index = nearest(data.times, time);
  const lines = [[told(data.times[index]) + ' UTC']];
  for (const [figure, label, color] of data.charts[chart.dataset.chart]) {
    let at = index;
    while (at >= 0 && data.figures[figure][at] === null) at -= 1;
    if (at >= 0) lines.push([`${label}: ${rounded(data.figures[figure][at])}`, color]);
  }
  return [data.times[index], lines];
}

function changeAt(time) {
  const index = nearest(data.changes.map(change => change.at), time);
  const change = data.changes[index];
  const lines = [[`decision ${change.seq}, ${told(change.at)} UTC`], ...change.words.map(word => [word])];
  return [change.at, lines];
}

for (const chart of charts) {
  const area = chart.querySelector('.area');
  let from = null;
  area.addEventListener('pointermove', event => {
    const x = xAt(area, event);
    const isTimeline = chart.dataset.chart === 'changes';
    const [at, lines] = isTimeline ? changeAt(timeAt(x)) : valuesAt(chart, timeAt(x));
    mark(xOf(at), 'cross');
    fill(lines);
    tip.style.display = 'block';
    const left = event.clientX + 16 + tip.offsetWidth > innerWidth;
    tip.style.left = (left ? Math.max(4, event.clientX - 16 - tip.offsetWidth) : event.clientX + 16) + 'px';
    tip.style.top = Math.max(4, Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8)) + 'px';
    if (from !== null) mark(from, 'from');
  });
  area.addEventListener('pointerleave', () => {
    tip.style.display = 'none';
    unmark('cross');
    unmark('from');
    from = null;
  });
  area.addEventListener('pointerdown', event => { from = xAt(area, event); event.preventDefault(); });
  area.addEventListener('pointerup', event => {
    const to = xAt(area, event);
    if (from !== null && Math.abs(to - from) > (view[1] - view[0]) / 100) {
      view = [Math.min(from, to), Math.max(from, to)];
      show();
    }
    from = null;
    unmark('from');
  });
  area.addEventListener('dblclick', () => { view = [0, WIDTH]; show(); });
}
""".strip()

WORDS_MAX = 400
"""Characters of a decision's line; a plugin may give any reason."""
ROWS_MAX = 100
"""Of the table of changes; the timeline has more of them."""
LANE = 40
"""Pixels of a component in the timeline."""
LABEL, LABEL_MAX = 9, 14
"""Letters of its name that fit before the lane; and that do so narrower."""


def page(found: Gathered, title: str) -> str:
    """The HTML of what was gathered."""
    charts, changes = known_charts(found.points), [_change(line) for line in found.changes]
    inside = [change for change in changes if found.points[0].wall_s <= change["at"] <= found.points[-1].wall_s]
    drawn = [(n, chart_svg(chart, found.points)) for n, chart in enumerate(charts)]
    return _PAGE.render(
        title=title,
        style=f"{STYLE}\n{_STYLE}",
        script=SCRIPT,
        per_point=found.per_point,
        facts=list(facts(found)),
        charts=[svg.replace("<svg ", f'<svg data-chart="{n}" ', 1) for n, svg in drawn],
        timeline=timeline(inside, found.points, found.changed) if inside else None,
        rules=sorted(found.rules.items(), key=lambda item: (item[0][0], -item[1])),
        decisions=found.decisions,
        rows=changes[-ROWS_MAX:][::-1],
        changed=found.changed,
        data=_data(found.points, charts, inside),
    )


def facts(found: Gathered) -> Iterator[tuple[str, str]]:
    """What one wants to know first."""
    began_s, ended_s = found.points[0].wall_s, found.points[-1].wall_s
    yield "from, to", f"{_utc(began_s)}, {_utc(ended_s)} UTC"
    yield "policy", ", ".join(found.policies)
    done = ", ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in found.steps.most_common())
    yield "decisions", f"{found.decisions:,}, of these {found.changed:,} with a step" + (f" ({done})" if done else "")
    if found.looked_s > 0:
        mean = found.gpu_hours * 3600 / found.looked_s
        yield "GPU-hours", f"{found.gpu_hours:.2f}, {mean:.2f} GPUs in the mean of {_span(found.looked_s)}"
    for what, label in (("ttft_ms", "mean TTFT within its target"), ("itl_ms", "mean ITL within its target")):
        attained = found.attained[what]
        if attained.windows:
            share = attained.within / attained.windows
            yield label, f"{attained.within} of {attained.windows} windows ({share:.0%})"
    names = {"requests_per_second": "requests/s", "input_sequence_tokens": "prompt", "output_sequence_tokens": "answer"}
    for name, label in names.items():
        if name in found.errors:
            yield f"forecast of {label}", _error(found.errors[name])


def _error(error: ForecastErrors) -> str:
    share = "" if error.share is None else f" ({error.share:.0%} of what came)"
    side = "much" if error.bias > 0 else "little"
    bias = f"; in the mean {abs(error.bias):.4g} too {side}" if error.bias else ""
    return f"off by {error.mean:.4g} in the mean of {error.windows} windows{share}{bias}"


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def _utc(wall_s: float) -> str:
    return f"{datetime.fromtimestamp(wall_s, UTC):%Y-%m-%d %H:%M:%S}"


# --- the decisions -------------------------------------------------------------------------------


def _change(line: Line) -> dict[str, Any]:
    """A decision with a step: when, which, its lines, and for each component whether it went up, and what became of
    it."""
    try:
        told = describe(line).splitlines()
    except BadInput as error:
        told = [f"written by another version: {error}"]
    steps = {
        reason["component"]: (reason["step"], str(line["outcomes"].get(reason["component"], {}).get("outcome", "")))
        for reason in line["decision"]["reasons"]
        if reason["step"]
    }
    return {
        "at": float(line["wall_s"]),
        "seq": line.get("seq", ""),
        "time": _utc(float(line["wall_s"])),
        "words": [word if len(word) <= WORDS_MAX else f"{word[: WORDS_MAX - 1]}…" for word in told],
        "steps": steps,
    }


def timeline(changes: Sequence[dict[str, Any]], points: Sequence[Point], changed: int) -> str:
    """A lane for each component: up and down, carried out or not. `changed`: so many decisions had a step."""
    told = f" (the last {len(changes)} of {changed:,})" if len(changes) < changed else ""
    components = sorted({component for change in changes for component in change["steps"]})
    high = LANE * len(components)
    lanes = []
    for n, component in enumerate(components):
        middle = TOP + LANE * n + LANE // 2
        name = _short(component)
        narrow = "" if len(name) <= LABEL else f' textLength="{LEFT - 10}" lengthAdjust="spacingAndGlyphs"'
        lanes.append(f'<text x="{LEFT - 6}" y="{middle + 4}" text-anchor="end"{narrow}>{name}</text>')
        lanes.append(f'<line x1="{LEFT}" x2="{LEFT + WIDE}" y1="{middle}" y2="{middle}" stroke="#e4e4e4"/>')
    marks = []
    for change in changes:
        x = x_of(change["at"], points)
        for component, (step, outcome) in change["steps"].items():
            lane = HEIGHT / len(components)
            begin = lane * (components.index(component) + 0.5)
            end = begin - 0.42 * lane if step > 0 else begin + 0.42 * lane
            color = RED if outcome == "refused" else BLUE if outcome == "deferred" else GREEN if step > 0 else ORANGE
            marks.append(
                f'<path d="M{x} {begin:.0f}V{end:.0f}" stroke="{color}" stroke-width="2.5" '
                f'vector-effect="non-scaling-stroke"/>'
            )
    times = times_svg(points).replace(f'y="{TOP + HIGH + 16}"', f'y="{TOP + high + 16}"')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" data-chart="changes" class="chart" '
        f'viewBox="0 0 {CHART_WIDTH} {TOP + high + 30}" font-family="sans-serif" font-size="11">'
        f'<text x="{LEFT}" y="14" font-size="13" font-weight="bold">Decisions with a step</text>'
        f'<text x="{LEFT + 170}" y="14">up: more workers; down: fewer; red: refused; blue: waits for a GPU{told}</text>'
        f"{''.join(lanes)}{times}"
        f'<svg class="curves" x="{LEFT}" y="{TOP}" width="{WIDE}" height="{high}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'preserveAspectRatio="none">{"".join(marks)}</svg>'
        f'<rect class="area" x="{LEFT}" y="{TOP}" width="{WIDE}" height="{high}" fill="none" stroke="#bbbbbb" '
        f'pointer-events="all"/></svg>'
    )


def _short(component: str) -> str:
    """A name that fits before the lane, without what a markup could begin with."""
    kept = "".join(letter for letter in component if letter.isalnum() or letter in "_-")
    return kept if len(kept) <= LABEL_MAX else f"{kept[: LABEL_MAX - 1]}…"


# --- what the script reads -----------------------------------------------------------------------


def _data(points: Sequence[Point], charts: Sequence[Chart], changes: Sequence[dict[str, Any]]) -> str:
    figures = {one.figure: column(points, one.figure) for chart in charts for one in chart.series}
    data = {
        "times": [round(point.wall_s, 1) for point in points],
        "figures": {name: [_few_digits(value) for value in values] for name, values in figures.items()},
        "charts": [[(one.figure, one.label, one.color) for one in chart.series] for chart in charts],
        "changes": [{key: change[key] for key in ("at", "seq", "words")} for change in changes],
    }
    # Nothing in it can end the element that it stands in.
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _few_digits(value: float | None) -> float | int | None:
    if value is None:
        return None
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() else short


_STYLE = """
.chart { display: block; margin: .4rem 0; user-select: none }
.area { cursor: crosshair }
#tip { position: fixed; display: none; pointer-events: none; max-width: 34rem; background: #fffffff2;
  border: 1px solid #999; border-radius: 4px; padding: .3rem .5rem; font-size: 12px; box-shadow: 0 1px 4px #0003 }
.dot { display: inline-block; width: .6em; height: .6em; border-radius: 50%; margin-right: .4em }
""".strip()

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_PAGE = page_template(
    """{% if per_point > 1 %}
<p>A point of a curve stands for up to {{ per_point }} decisions: their mean, or the last of what is counted.</p>
{% endif %}
<p>Point at a chart for its values, at the decisions for their reasons; drag to look closer, double-click for all. Times are UTC.</p>
{% if timeline %}
{{ timeline | safe }}
{% endif %}
{% for chart in charts %}
{{ chart | safe }}
{% endfor %}
<h2>Which rule decided</h2>
<table class="words">
<tr><th>component</th><th>rule</th><th>decisions</th></tr>
{% for (component, rule), count in rules %}
<tr><td>{{ component }}</td><td>{{ rule }}</td><td>{{ count }}</td></tr>
{% endfor %}
</table>
<h2>Decisions with a step, the last first</h2>
{% if changed > rows | length %}
<p>The last {{ rows | length }} of {{ changed }}; <code>dynamo planner explain</code> and <code>history --changes</code> tell all that are logged.</p>
{% endif %}
<table class="words">
<tr><th>at</th><th>decision</th><th>in words</th></tr>
{% for row in rows %}
<tr><td>{{ row.time }}</td><td>{{ row.seq }}</td><td>{% for word in row.words %}{{ word }}{% if not loop.last %}<br>{% endif %}{% endfor %}</td></tr>
{% endfor %}
</table>
<div id="tip"></div>
<script type="application/json" id="data">{{ data | safe }}</script>
<script>
{{ script | safe }}
</script>""",  # noqa: E501 - a line of HTML
    head=f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n',
)
