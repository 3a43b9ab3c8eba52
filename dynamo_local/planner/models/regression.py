"""Least squares over a bounded set of samples that stays spread over what was seen. Pure, and without numpy: a fit of
64 samples takes a tenth of a millisecond, so that it may run in the arbiter's loop.

The fit standardises its features and leaves out a direction in which they do not vary: where two features always rise
together (requests and their KV, under constant load) the effect is shared between them, instead of being any two
large numbers of opposite sign.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MIN_PREDICTION_S = 1e-6
"""No pass takes less."""

_FLAT = 1e-9
"""Of a mean: a feature that varies less does not vary. Of 1: two features whose correlation is nearer to 1 are one."""


class Sample(NamedTuple):
    """One or two features, and what was measured (seconds)."""

    x: tuple[float, ...]
    y: float


@dataclass(frozen=True, slots=True)
class Linear:
    """`intercept + sum(coefficients * x)`, in seconds."""

    coefficients: tuple[float, ...]
    intercept: float

    def at(self, x: tuple[float, ...]) -> float:
        """Seconds; at least a microsecond."""
        value = self.intercept
        for coefficient, feature in zip(self.coefficients, x, strict=True):
            value += coefficient * feature
        return max(MIN_PREDICTION_S, value)


def kept(samples: Sequence[Sample], *, most: int, buckets: int) -> tuple[Sample, ...]:
    """Of these (oldest first) at most `most`: the fullest bucket loses its oldest until it is so.

    Buckets divide the range that was seen into `buckets` equal parts, for two features into a square of as many
    (16: 4 x 4). So a load that stays the same for an hour does not push out what was learned of other loads.
    """
    if len(samples) <= most:
        return tuple(samples)
    dimensions = len(samples[0].x)
    parts = buckets if dimensions == 1 else math.isqrt(buckets)
    places = [0] * len(samples)
    for values in zip(*(sample.x for sample in samples), strict=True):
        low = min(values)
        span = max(values) - low
        if span > 0:
            last = parts - 1
            places = [
                place * parts + min(last, int(parts * (value - low) / span))
                for place, value in zip(places, values, strict=True)
            ]
    rooms: dict[int, deque[int]] = {}
    for index, place in enumerate(places):
        rooms.setdefault(place, deque()).append(index)
    dropped = set()
    counts = {place: len(indices) for place, indices in rooms.items()}
    for _ in range(len(samples) - most):
        largest = max(counts.values())
        fullest = min((place for place, count in counts.items() if count == largest), key=lambda place: rooms[place][0])
        dropped.add(rooms[fullest].popleft())
        counts[fullest] -= 1
    return tuple(sample for index, sample in enumerate(samples) if index not in dropped)


def fitted(samples: Sequence[Sample]) -> Linear | None:
    """The least squares line or plane with intercept. A feature that does not vary has the coefficient 0; None where
    none varies: then nothing is known of what a larger load would take."""
    if not samples:
        return None
    count, dimensions = len(samples), len(samples[0].x)
    means = [sum(sample.x[d] for sample in samples) / count for d in range(dimensions)]
    mean_y = sum(sample.y for sample in samples) / count
    spreads = [math.sqrt(sum((sample.x[d] - means[d]) ** 2 for sample in samples) / count) for d in range(dimensions)]
    varied = [d for d in range(dimensions) if spreads[d] > _FLAT * max(1.0, abs(means[d]))]
    if not varied:
        return None
    with_y = [
        sum((sample.x[d] - means[d]) * (sample.y - mean_y) for sample in samples) / (count * spreads[d]) for d in varied
    ]
    if len(varied) == 1:
        slopes = [with_y[0]]
    else:
        first, second = varied
        between = sum((s.x[first] - means[first]) * (s.x[second] - means[second]) for s in samples)
        slopes = _solved(with_y[0], with_y[1], between / (count * spreads[first] * spreads[second]))
    coefficients = [0.0] * dimensions
    for d, slope in zip(varied, slopes, strict=True):
        coefficients[d] = slope / spreads[d]
    offset = sum(coefficient * mean for coefficient, mean in zip(coefficients, means, strict=True))
    return Linear(tuple(coefficients), mean_y - offset)


def proportional(samples: Sequence[Sample]) -> Linear:
    """The line through 0 of one feature above 0: the most that a larger load takes, whatever the fixed part is."""
    return Linear((sum(sample.y for sample in samples) / sum(sample.x[0] for sample in samples),), 0.0)


def spread(samples: Sequence[Sample], dimension: int) -> float:
    """How much a feature varies: its standard deviation over its mean; 0 for one that does not."""
    values = [sample.x[dimension] for sample in samples]
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    return deviation / abs(mean) if deviation > _FLAT * max(1.0, abs(mean)) and mean else 0.0


def _solved(first: float, second: float, correlation: float) -> list[float]:
    """Both standardised slopes: the pseudo-inverse of [[1, c], [c, 1]], by its eigenvectors (1, 1) and (1, -1)."""
    together = (first + second) / (2 * (1 + correlation)) if 1 + correlation > _FLAT else 0.0
    apart = (first - second) / (2 * (1 - correlation)) if 1 - correlation > _FLAT else 0.0
    return [together + apart, together - apart]
