"""Metrics of a run: completion, attainment, GPU-hours, latencies. Pure. docs/simulate.md defines them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dynamo_local.profile.repetitions import quantile
from dynamo_local.simulator.fleet import FleetPoint
from dynamo_local.simulator.options import Slo
from dynamo_local.simulator.process import Job
from dynamo_local.simulator.simulation import Run

_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds; None where nothing was measured. Percentiles are nearest-rank: a value that was seen."""

    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class Metrics:
    """The row of one run. `attainment` is a share of all requests, dropped ones too."""

    requests: int
    completed: int
    dropped: int
    attainment: float
    goodput_rps: float
    gpu_hours: float
    scale_actions: int
    ttft_ms: Spread
    itl_ms: Spread
    duration_s: float
    remote_prefills: int
    preemptions: int
    output_tokens: int
    gpus_mean: float
    dropped_by: dict[str, int]
    """Requests by the reason for which they were dropped."""
    done_by: dict[str, int]
    """Steps by the actuator: `flips`, `wakes`, `starts`, and `sleeps`."""

    def to_dict(self) -> dict[str, Any]:
        """For machines; numbers rounded to a millionth."""
        rounded: dict[str, Any] = _rounded(asdict(self))
        return rounded


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, _DIGITS) if isinstance(value, float) else value


def measure(run: Run, slo: Slo) -> Metrics:
    """The row of a run."""
    completed = [job for job in run.jobs if job.last_s is not None]
    good = sum(within(job, slo) for job in completed)
    hours = gpu_seconds(run.points, run.end_s) / 3600
    seconds = run.end_s
    return Metrics(
        requests=len(run.jobs),
        completed=len(completed),
        dropped=sum(job.dropped is not None for job in run.jobs),
        attainment=good / len(run.jobs) if run.jobs else 0.0,
        goodput_rps=good / seconds if seconds else 0.0,
        gpu_hours=hours,
        scale_actions=sum(len(acted.done) for acted in run.acted),
        ttft_ms=spread([job.ttft_s * 1000 for job in run.jobs if job.ttft_s is not None]),
        itl_ms=spread([job.itl_s * 1000 for job in completed if job.itl_s is not None]),
        duration_s=seconds,
        remote_prefills=sum(job.remote for job in run.jobs),
        preemptions=run.preemptions,
        output_tokens=sum(job.request.output_length for job in completed),
        gpus_mean=hours * 3600 / seconds if seconds else 0.0,
        dropped_by=dict(Counter(sorted(job.dropped.value for job in run.jobs if job.dropped is not None))),
        done_by=dict(sorted(run.done_by.items())),
    )


def within(job: Job, slo: Slo) -> bool:
    """Whether a request completed with its TTFT, and the mean of its own gaps, within the targets."""
    if job.last_s is None or job.ttft_s is None:
        return False
    if slo.ttft_ms is not None and job.ttft_s * 1000 > slo.ttft_ms:
        return False
    return slo.itl_ms is None or job.itl_s is None or job.itl_s * 1000 <= slo.itl_ms


def gpu_seconds(points: Sequence[FleetPoint], end_s: float) -> float:
    """Held GPUs times how long, from the first arrival (0 s) to the last completion."""
    total = 0.0
    ends = [point.at_s for point in points[1:]] + [end_s]
    for point, until_s in zip(points, ends, strict=False):
        total += point.gpus_held * max(0.0, min(until_s, end_s) - max(point.at_s, 0.0))
    return total


def spread(values: Sequence[float]) -> Spread:
    """Mean and percentiles."""
    if not values:
        return Spread()
    ordered = sorted(values)
    return Spread(math.fsum(ordered) / len(ordered), *(quantile(ordered, share) for share in (0.5, 0.95, 0.99)))
