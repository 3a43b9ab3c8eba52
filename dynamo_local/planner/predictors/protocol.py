"""What every predictor is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Predictor(Protocol):
    """Continues a series. Pure: the same series gives the same values, whatever was asked before."""

    @property
    def min_points(self) -> int:
        """With fewer points it is not asked."""
        ...

    def forecast(self, series: Sequence[float], steps: int) -> Sequence[float]:
        """The next `steps` values, 1 or more of them.

        The series has `min_points` values or more, oldest first, all finite, 0 or more, and not all equal. Whatever
        this raises or returns, `continuing.continued` makes values of it that can be used.
        """
        ...
