"""Prophet: a trend with bends, and the seasons that its library switches on once it sees two of their periods.

Fitted anew for each forecast, to the last `window_size` windows. They are dated from 2024-01-01 on, one after the
other: a series knows no time of day. With 50 windows of 180 s, which are Dynamo's defaults, all seasons stay off; a day
is seen from 960 such windows on.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

BEGINS = "2024-01-01"


@dataclass(frozen=True, slots=True)
class Prophet:
    """`window_s` is the time from one value to the next."""

    window_s: float
    window_size: int = 50
    min_points: int = 5

    def forecast(self, series: Sequence[float], steps: int) -> Sequence[float]:
        known = list(series[-self.window_size :])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pandas
            import prophet

            apart = pandas.Timedelta(seconds=self.window_s)
            times = pandas.date_range(BEGINS, periods=len(known) + steps, freq=apart)
            model = prophet.Prophet(uncertainty_samples=0)  # the mean alone: nothing is drawn by chance
            model.fit(pandas.DataFrame({"ds": times[: len(known)], "y": known}))
            told = model.predict(pandas.DataFrame({"ds": times[len(known) :]}))
        return [float(value) for value in told["yhat"]]
