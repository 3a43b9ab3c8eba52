"""Forecasts beside what came: each is kept until the window that it was made for has been observed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dynamo_local.planner.records.figures import Figures, Line, number

FORECAST = ("requests_per_second", "input_sequence_tokens", "output_sequence_tokens")


@dataclass(slots=True)
class ForecastErrors:
    """Of one series: sums of what was observed, of the errors' sizes, and of the errors (forecast less observed)."""

    windows: int = 0
    observed: float = 0.0
    absolute: float = 0.0
    signed: float = 0.0

    @property
    def mean(self) -> float:
        """The mean size of the error, in the series' unit."""
        return self.absolute / self.windows

    @property
    def share(self) -> float | None:
        """The errors' sizes as a share of what was observed; None where nothing was."""
        return self.absolute / self.observed if self.observed > 0 else None

    @property
    def bias(self) -> float:
        """The mean error; above 0 where too much was expected."""
        return self.signed / self.windows


class Forecast:
    """Forecasts whose windows have not ended yet."""

    def __init__(self) -> None:
        self._open: deque[tuple[float, float, Figures]] = deque()

    def met(self, line: Line, figures: Figures, errors: dict[str, ForecastErrors]) -> Figures:
        """`forecast_…` of the window that this line observed, made when it had not begun; the errors are counted."""
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
        """The forecast of the window that has just ended. Those of windows that nobody observed are dropped."""
        while self._open and self._open[0][0] < ended_s - self._open[0][1] / 2:
            self._open.popleft()
        if self._open and self._open[0][0] <= ended_s + self._open[0][1] / 2:
            return self._open.popleft()[2]
        return {}
