"""Which charts a report has; one of which nothing is known is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_local.telemetry.planner_report.gathering import Point

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
