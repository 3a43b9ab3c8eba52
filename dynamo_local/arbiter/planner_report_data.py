"""Reads a decision log of any length into few points, for the planner's report: one pass, in bounded memory.

A point stands for consecutive decisions. Rates, latencies and loads are their means. A count has the value of the last
decision. If there are too many points, each two become one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.planner.records.figures import Figures, Line, all_figures, number

FORECAST = ("requests_per_second", "input_sequence_tokens", "output_sequence_tokens")


@dataclass(slots=True)
class ForecastErrors:
    """The errors of one series' forecasts, as sums. `signed` is forecast minus observed."""

    windows: int = 0
    observed: float = 0.0
    absolute: float = 0.0
    signed: float = 0.0

    @property
    def mean(self) -> float:
        """The mean absolute error, in the series' unit."""
        return self.absolute / self.windows

    @property
    def share(self) -> float | None:
        """The absolute errors divided by the observed values. None if nothing was observed."""
        return self.absolute / self.observed if self.observed > 0 else None

    @property
    def bias(self) -> float:
        """The mean error. Above 0 the forecasts were too high."""
        return self.signed / self.windows


class OpenForecasts:
    """Forecasts whose windows have not been observed yet."""

    def __init__(self) -> None:
        self._open: deque[tuple[float, float, Figures]] = deque()

    def met(self, line: Line, figures: Figures, errors: dict[str, ForecastErrors]) -> Figures:
        """Returns the `forecast_…` that was made earlier for the window of this line, and counts its errors."""
        wall_s = float(line["wall_s"])
        found: Figures = {}
        if "observed_requests_per_second" in figures:
            found = self._made_for(wall_s)
            for name in FORECAST:
                observed, forecast = figures.get(f"observed_{name}"), found.get(f"forecast_{name}")
                if observed is not None and forecast is not None:
                    error = errors.setdefault(name, ForecastErrors())
                    error.windows += 1
                    error.observed += observed
                    error.absolute += abs(forecast - observed)
                    error.signed += forecast - observed
        aims = line["inputs"].get("aims") or {}
        window_s = number(aims.get("window_s"))
        made = {f"forecast_{name}": figures[f"predicted_{name}"] for name in FORECAST if f"predicted_{name}" in figures}
        if window_s and made:
            self._open.append((wall_s + window_s * (number(aims.get("ahead")) or 1), window_s, made))
        return found

    def _made_for(self, ended_s: float) -> Figures:
        """The forecast of the window that has just ended. Forecasts of unobserved windows are dropped."""
        while self._open and self._open[0][0] < ended_s - self._open[0][1] / 2:
            self._open.popleft()
        if self._open and self._open[0][0] <= ended_s + self._open[0][1] / 2:
            return self._open.popleft()[2]
        return {}


POINTS_MAX = 400
CHANGES_MAX = 300
"""The report shows this many of the last decisions with a step. All are counted."""
NOT_LOOKING = 3
"""If the next decision came later than this many announced intervals, the planner had stopped in between."""
NOT_LOOKING_MIN_S = 60.0

_LAST = ("num_", "capacity_", "predicted_num_", "needed_", "min_", "bound_", "max_", "sla_target_", "gpu")
"""Figures with these prefixes have the value of the last decision. All others are means."""


@dataclass(slots=True)
class Point:
    """Consecutive decisions, the last at `wall_s` (Unix time). `gpu_hours` counts from the first point of all."""

    wall_s: float
    decisions: int
    figures: Figures
    counts: Counter[str]
    gpu_hours: float

    def joined(self, later: Point) -> Point:
        """Both as one."""
        figures = {**self.figures, **later.figures}
        for name in figures:
            if not name.startswith(_LAST):
                known = [(one.figures[name], one.counts[name]) for one in (self, later) if name in one.figures]
                figures[name] = sum(value * count for value, count in known) / sum(count for _, count in known)
        decisions, counts = self.decisions + later.decisions, self.counts + later.counts
        return Point(later.wall_s, decisions, figures, counts, later.gpu_hours)


@dataclass(slots=True)
class Attainment:
    """How many windows had a mean within the target. `windows` counts those with a mean and a target."""

    within: int = 0
    windows: int = 0


@dataclass(slots=True)
class ReportData:
    """The data of one report. `steps` counts decided steps by outcome, `rules` decisions by component and rule."""

    points: list[Point] = field(default_factory=list)
    changes: deque[Line] = field(default_factory=lambda: deque(maxlen=CHANGES_MAX))
    policies: list[str] = field(default_factory=list)
    decisions: int = 0
    changed: int = 0
    gpu_hours: float = 0.0
    looked_s: float = 0.0
    """Seconds in which the planner decided. Gaps are left out here and in `gpu_hours`."""
    steps: Counter[str] = field(default_factory=Counter)
    rules: Counter[tuple[str, str]] = field(default_factory=Counter)
    errors: dict[str, ForecastErrors] = field(default_factory=dict)
    attained: dict[str, Attainment] = field(default_factory=lambda: {"ttft_ms": Attainment(), "itl_ms": Attainment()})
    per_point: int = 1
    targets: Mapping[str, Any] | None = None
    """The last decision's shares of requests that kept the targets; None: there were no targets."""

    def add(self, point: Point) -> None:
        """Add one decision. All points but the last stand for `per_point` decisions."""
        if self.points and self.points[-1].decisions < self.per_point:
            self.points[-1] = self.points[-1].joined(point)
            return
        if len(self.points) == POINTS_MAX:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [earlier.joined(later) for earlier, later in pairs]
            self.per_point *= 2
        self.points.append(point)


def collect(lines: Iterable[Line]) -> ReportData:
    """Read these lines, the oldest first. An unreadable line is left out."""
    found, forecast = ReportData(), OpenForecasts()
    before: tuple[float, float, float] | None = None  # when, GPUs held, the longest time to the next decision
    for line in lines:
        try:
            figures = all_figures(line)
            figures |= forecast.met(line, figures, found.errors)
            wall_s, patience_s = float(line["wall_s"]), _patience_s(line)
            _count(found, line)
        except (KeyError, TypeError, AttributeError, ValueError):  # of another version, or edited
            continue
        if before is not None and 0 < wall_s - before[0] <= before[2]:
            found.looked_s += wall_s - before[0]
            found.gpu_hours += before[1] * (wall_s - before[0]) / 3600
        before = (wall_s, figures.get("gpus_held", 0.0), patience_s)
        _compare(found, figures)
        found.add(Point(wall_s, 1, figures, Counter(dict.fromkeys(figures, 1)), found.gpu_hours))
    return found


def _patience_s(line: Line) -> float:
    announced = number(line["decision"].get("next_tick_at")), number(line["decision"].get("now_s"))
    if announced[0] is None or announced[1] is None:
        return NOT_LOOKING_MIN_S
    return max(NOT_LOOKING_MIN_S, NOT_LOOKING * (announced[0] - announced[1]))


def _count(found: ReportData, line: Line) -> None:
    policy = line["inputs"].get("policy", "load")
    if policy not in found.policies:
        found.policies.append(policy)
    found.decisions += 1
    found.targets = line.get("targets") or found.targets
    for reason in line["decision"]["reasons"]:
        found.rules[reason["component"], str(reason["rule"])] += 1
    for outcome in line.get("outcomes", {}).values():
        found.steps[str(outcome["outcome"])] += 1
    if any(reason["step"] for reason in line["decision"]["reasons"]):
        found.changed += 1
        found.changes.append(line)


def _compare(found: ReportData, figures: Figures) -> None:
    for what, attainment in found.attained.items():
        observed, target = figures.get(f"observed_{what}"), figures.get(f"sla_target_{what}")
        if observed is not None and target is not None:
            attainment.windows += 1
            attainment.within += observed <= target
