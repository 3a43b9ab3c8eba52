"""What is asked of the workers: requests with their own lengths, in the bursts in which they come. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests of a stretch of time, as they came, brought to one request per second in the mean.

    `gaps` are the seconds from each request to the next at that rate; `isl` and `osl` its tokens. At λ requests per
    second they come as `times(λ)`: the same bursts, denser.
    """

    gaps: tuple[float, ...]
    isl: tuple[int, ...]
    osl: tuple[int, ...]

    def times(self, rate: float) -> list[float]:
        """Seconds at which they come, at `rate` requests per second."""
        return [at / rate for at in accumulate(self.gaps)]
