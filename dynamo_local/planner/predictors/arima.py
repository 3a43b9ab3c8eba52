"""ARIMA without seasons, its order chosen anew for each forecast (Hyndman and Khandakar's search, by statsforecast).

Dynamo keeps the order of its first fit and hands later points to that model one by one; a point whose update fails is
lost to it. Here every forecast sees the whole series.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arima:
    """`logs`: where the order found has neither an AR nor an MA term, which is a random walk at best, the logarithms
    of 1 + x are tried as well (Dynamo's rule; needless where the series is one of logarithms already)."""

    logs: bool = True
    min_points: int = 5

    def forecast(self, series: Sequence[float], steps: int) -> Sequence[float]:
        values, has_terms = _fitted(series, steps)
        if has_terms or not self.logs:
            return values
        values, _ = _fitted([math.log1p(value) for value in series], steps)
        return [math.expm1(value) for value in values]


def _fitted(series: Sequence[float], steps: int) -> tuple[list[float], bool]:
    """The values, and whether the order found has an AR or an MA term."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fit that did not converge: the next candidate is tried
        import numpy as np
        from statsforecast.models import AutoARIMA

        model = AutoARIMA(season_length=1).fit(np.asarray(series, dtype=float))
        p, q, *_ = model.model_["arma"]
        return [float(value) for value in model.predict(h=steps)["mean"]], bool(p or q)
