"""Which charts a report has; one of which nothing is known is left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from dynamo_local.arbiter.planner_report.data import Point

BLUE, ORANGE, GREEN, RED, GRAY, BLACK = "#1f77b4", "#e07b00", "#2a9d3a", "#d62728", "#888888", "#222222"


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: the figure's name, its words, and how it is drawn. `steps`: it holds its value until the next."""

    figure: str
    label: str
    color: str
    dashed: bool = False
    steps: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves of one unit. Without any of `needs` there is no chart."""

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
        Series(f"capacity_{role}_replicas", "with those that start", BLUE, steps=True),
        Series(f"predicted_num_{role}_replicas", "target", ORANGE, dashed=True, steps=True),
        Series(f"needed_{role}_replicas", "needed, before bounds", GRAY, dashed=True, steps=True),
        Series(f"bound_{role}_replicas", "throughput loop's bound", BLACK, dashed=True, steps=True),
        Series(f"min_{role}_replicas", "floor", RED, dashed=True, steps=True),
    )
    return Chart(title, "workers", curves, (f"num_{role}_replicas",))


PREFILL_RPS, DECODE_RPS = (f"engine_{role}_capacity_requests_per_second" for role in ("prefill", "decode"))

CHARTS = (
    _forecast("Requests", "1/s", "requests_per_second"),
    _latency("Time to first token", "ttft_ms"),
    _latency("Gap between tokens", "itl_ms"),
    _replicas("Prefill workers", "prefill"),
    _replicas("Decode workers", "decode"),
    Chart(
        "GPUs",
        "GPUs",
        (
            Series("gpus_held", "held", GREEN, steps=True),
            Series("max_gpu_budget", "at most", RED, dashed=True, steps=True),
            Series("min_gpu_budget", "at least", GRAY, dashed=True, steps=True),
        ),
        ("gpus_held",),
    ),
    Chart("GPU-hours", "h", (Series("gpu_hours", "since the beginning", GREEN),), ("gpu_hours",)),
    Chart(
        "What one worker takes within its target",
        "1/s",
        (
            Series(PREFILL_RPS, "prefill", ORANGE),
            Series(DECODE_RPS, "decode", GREEN),
            Series("predicted_requests_per_second", "expected of all", BLUE, dashed=True),
        ),
        (PREFILL_RPS, DECODE_RPS),
    ),
    _forecast("Prompts", "tokens", "input_sequence_tokens"),
    _forecast("Answers", "tokens", "output_sequence_tokens"),
    Chart(
        "The fullest engine",
        "tokens",
        (
            Series("queued_prefill_tokens", "prompts that wait", ORANGE),
            Series("queued_decode_kv_tokens", "KV of decodes that wait", RED),
            Series("inflight_decode_kv_tokens", "KV of decodes that run", GREEN),
        ),
        ("queued_prefill_tokens", "inflight_decode_kv_tokens"),
    ),
    Chart(
        "Requests that wait",
        "requests",
        (
            Series("prefill_queue_size", "in the prefill queue", ORANGE),
            Series("num_queued_request", "in a decode worker", GREEN),
        ),
        ("prefill_queue_size", "num_queued_request"),
    ),
    Chart("KV use of decode workers", "0 to 1", (Series("average_kv_load", "mean", GREEN),), ("average_kv_load",)),
)


def column(points: Sequence[Point], figure: str) -> list[float | None]:
    """The figure at each point; None where it is not known."""
    if figure == "gpu_hours":
        return [point.gpu_hours for point in points]
    return [point.figures.get(figure) for point in points]


def known_charts(points: Sequence[Point]) -> list[Chart]:
    """Those that have something to show, each without curves of which nothing is known."""
    known = {name for point in points for name in point.figures} | ({"gpu_hours"} if points else set())
    return [
        Chart(chart.title, chart.unit, tuple(one for one in chart.series if one.figure in known), chart.needs)
        for chart in CHARTS
        if known.intersection(chart.needs)
    ]


# --- drawing
# Curves as SVG. The curves' own picture has the whole time from 0 to `WIDTH`; a part of it is shown by its viewBox.

WIDTH, HEIGHT = 10_000, 1_000
"""Of the curves' own picture, in its units."""
LEFT, TOP, WIDE, HIGH = 64, 34, 880, 150
"""Where the curves are in a chart of `CHART_WIDTH` by `CHART_HEIGHT`."""
CHART_WIDTH, CHART_HEIGHT = 960, 214
HEADROOM = 1.08
"""So much of the highest value is shown: a line at the upper edge would be half hidden."""
TIMES = 6
"""Labels below a chart."""
DAY_S = 86_400
_ROUND_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


def chart_svg(chart: Chart, points: Sequence[Point], *, y: float | None = None) -> str:
    """One chart; `y` is its place where several are in one picture."""
    columns = [column(points, one.figure) for one in chart.series]
    highest = max((value for values in columns for value in values if value is not None), default=0.0)
    ticks = y_ticks(highest * HEADROOM)
    place = f' y="{y:g}" height="{CHART_HEIGHT}" width="{CHART_WIDTH}"' if y is not None else ""
    curves = "".join(curve(one, values, points, ticks[-1]) for one, values in zip(chart.series, columns, strict=True))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}"{place} '
        f'font-family="sans-serif" font-size="11">'
        f'<text x="{LEFT}" y="14" font-size="13" font-weight="bold">{escape(chart.title)}</text>'
        f"{_legend(chart)}{_y_axis(ticks, chart.unit)}{times_svg(points)}{_frame(curves)}</svg>"
    )


def _frame(inner: str) -> str:
    return (
        f'<svg class="curves" x="{LEFT}" y="{TOP}" width="{WIDE}" height="{HIGH}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">{inner}</svg>'
        f'<rect class="area" x="{LEFT}" y="{TOP}" width="{WIDE}" height="{HIGH}" fill="none" '
        f'stroke="#bbbbbb" pointer-events="all"/>'
    )


def curve(series: Series, values: Sequence[float | None], points: Sequence[Point], highest: float) -> str:
    """A path; it is broken where a value is not known."""
    found: list[str] = []
    pen = False
    last = ""
    for point, value in zip(points, values, strict=True):
        if value is None:
            # Windows are observed less often than decisions are made: only what holds its value is broken.
            pen = pen and not series.steps
            continue
        x, height = x_of(point.wall_s, points), str(round(HEIGHT * (1 - min(1.0, value / highest))))
        if not pen:
            found.append(f"M{x} {height}")
        elif series.steps:
            found.append(f"H{x}" if height == last else f"H{x}V{height}")
        else:
            found.append(f"L{x} {height}")
        pen, last = True, height
    dashes = ' stroke-dasharray="5 3"' if series.dashed else ""
    return (
        f'<path d="{"".join(found)}" fill="none" stroke="{series.color}" stroke-width="1.5"{dashes} '
        f'stroke-linecap="round" vector-effect="non-scaling-stroke"/>'
    )


def x_of(wall_s: float, points: Sequence[Point]) -> int:
    """Where a time (Unix, seconds) is in the curves' picture."""
    began_s, ended_s = points[0].wall_s, points[-1].wall_s
    return round(WIDTH * (wall_s - began_s) / (ended_s - began_s)) if ended_s > began_s else WIDTH // 2


def y_ticks(highest: float) -> list[float]:
    """Round numbers from 0 to at least `highest`."""
    rough = max(highest, 1e-6) / 4
    power = 10 ** math.floor(math.log10(rough))
    step = next(step * power for step in _ROUND_STEPS if step * power >= rough * (1 - 1e-9))
    return [step * n for n in range(math.ceil(highest / step - 1e-9) + 1)] if highest > 0 else [0.0, 1.0]


def _y_axis(ticks: Sequence[float], unit: str) -> str:
    found = [f'<text x="8" y="{TOP - 10}" fill="#666666">{escape(unit)}</text>']
    for tick in ticks:
        at = TOP + HIGH * (1 - tick / ticks[-1])
        found.append(
            f'<line x1="{LEFT}" x2="{LEFT + WIDE}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e4e4e4"/>'
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end" fill="#444444">{_number(tick)}</text>'
        )
    return "".join(found)


def times_svg(points: Sequence[Point]) -> str:
    """Labels of the time, UTC."""
    began_s, ended_s = points[0].wall_s, points[-1].wall_s
    inner = "%H:%M:%S" if ended_s - began_s < DAY_S else "%m-%d %H:%M"
    found = []
    for n in range(TIMES):
        share = n / (TIMES - 1)
        at = datetime.fromtimestamp(began_s + share * (ended_s - began_s), UTC)
        anchor = "start" if n == 0 else "end" if n == TIMES - 1 else "middle"
        label = f"{at:%m-%d %H:%M:%S}" if n in (0, TIMES - 1) else f"{at:{inner}}"
        found.append(
            f'<text class="time" x="{LEFT + share * WIDE:.1f}" y="{TOP + HIGH + 16}" '
            f'text-anchor="{anchor}" fill="#444444">{label}</text>'
        )
    return "".join(found)


def _legend(chart: Chart) -> str:
    found, x = [], LEFT + 8.0 * len(chart.title) + 28
    for one in chart.series:
        dashes = ' stroke-dasharray="5 3"' if one.dashed else ""
        found.append(
            f'<line x1="{x:.0f}" x2="{x + 18:.0f}" y1="10" y2="10" stroke="{one.color}" stroke-width="2"{dashes}/>'
            f'<text x="{x + 23:.0f}" y="14">{escape(one.label)}</text>'
        )
        x += 38 + 5.8 * len(one.label)
    return "".join(found)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def picture(charts: Sequence[Chart], points: Sequence[Point]) -> str:
    """Some charts below each other, as one SVG file."""
    rows = "".join(chart_svg(chart, points, y=CHART_HEIGHT * n) for n, chart in enumerate(charts))
    high = CHART_HEIGHT * len(charts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {CHART_WIDTH} {high}" width="{CHART_WIDTH}" '
        f'height="{high}"><rect width="100%" height="100%" fill="white"/>{rows}</svg>\n'
    )
