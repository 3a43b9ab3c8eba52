"""A Kalman filter for a level and its trend, with Dynamo's model and defaults.

The state is (level, trend); from one window to the next the trend is added to the level. Only the level is measured.
The first value is the level to begin with; each later one corrects what was predicted for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

VARIANCE_AT_FIRST = 1000.0
"""Of level and trend, before anything is known of them."""


@dataclass(frozen=True, slots=True)
class Kalman:
    """`q_level` and `q_trend` are the variances by which level and trend change in a window, `r` that of a measurement:
    in the square of the series' unit (with `log1p`, of its logarithm)."""

    q_level: float = 1.0
    q_trend: float = 0.1
    r: float = 10.0
    min_points: int = 5

    def forecast(self, series: Sequence[float], steps: int) -> Sequence[float]:
        level, trend = series[0], 0.0
        # The covariance is [[a, b], [b, d]].
        a, b, d = VARIANCE_AT_FIRST, 0.0, VARIANCE_AT_FIRST
        for value in series[1:]:
            level, a, b, d = level + trend, a + 2 * b + d + self.q_level, b + d, d + self.q_trend
            gain_level, gain_trend = a / (a + self.r), b / (a + self.r)
            off = value - level
            level, trend = level + gain_level * off, trend + gain_trend * off
            a, b, d = a * (1 - gain_level), b * (1 - gain_level), d - gain_trend * b
        return [level + trend * step for step in range(1, steps + 1)]
