"""Cheap experts that continue a rate: means of the last windows, straight lines and parabolas through them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul

MEANS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
LINES = (0.5, 1.0, 2.0, 4.0)
PARABOLAS = (2.0, 4.0)
"""Windows in multiples of the lead. 0 is the shortest window, `SHORTEST` bins."""
SHORTEST = 3


@dataclass(frozen=True, slots=True)
class Expert:
    """A forecast is the sum of the last bins times their weights, the newest first."""

    name: str
    weights: tuple[float, ...]

    def __call__(self, newest_first: Sequence[float]) -> float:
        """The rate that it expects; never below 0."""
        return max(0.0, sum(map(mul, self.weights, newest_first)))


@lru_cache(maxsize=16)
def experts(lead_bins: int) -> tuple[Expert, ...]:
    """Those for a forecast so many bins ahead."""
    found = {}
    for kind, degree, windows in (("mean", 0, MEANS), ("line", 1, LINES), ("parabola", 2, PARABOLAS)):
        for window in windows:
            bins = max(SHORTEST + 2 * degree, round(window * lead_bins))
            found[f"{kind} of {bins}"] = _fit(bins, degree, lead_bins)
    return tuple(Expert(name, weights) for name, weights in found.items())


def _fit(bins: int, degree: int, lead_bins: int) -> tuple[float, ...]:
    """Least squares, evaluated `lead_bins` after the newest bin, as weights of the bins."""
    ages = [-age / bins for age in range(bins)]
    at = lead_bins / bins
    # Orthogonal polynomials over the bins: the fit is the sum of its projections.
    basis: list[list[float]] = []
    ahead: list[float] = []
    for power in range(degree + 1):
        column, value = [age**power for age in ages], at**power
        for other, there in zip(basis, ahead, strict=True):
            part = sum(map(mul, column, other))
            column = [one - part * two for one, two in zip(column, other, strict=True)]
            value -= part * there
        norm = sum(map(mul, column, column)) ** 0.5
        basis.append([one / norm for one in column])
        ahead.append(value / norm)
    return tuple(sum(column[age] * there for column, there in zip(basis, ahead, strict=True)) for age in range(bins))
