"""When requests come: gaps of a Gamma distribution, on a clock that runs as fast as the rate is high."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

from dynamo_local.twin.generator.options import GeneratorOptions

_CLOSE_S = 1e-7
_STEPS_MAX = 200
_CLOCK_CV = 1e-3
"""Below it gaps differ by less than a thousandth: they are all alike, and no shape becomes infinite."""


def arrivals(options: GeneratorOptions, rng: Random) -> Iterator[float]:
    """Seconds, ascending from 0, below `duration`.

    The gaps have a mean of one *expected* request. A gap lasts until the sinusoid has had so many: that stretches them
    where the rate is low, and leaves their coefficient of variation as it is.
    """
    shape = 1 / options.cv**2 if options.cv >= _CLOCK_CV else 0.0
    at_s, expected = 0.0, 0.0
    while at_s < options.duration:
        yield at_s
        expected += rng.gammavariate(shape, 1 / shape) if shape else 1.0
        at_s = _when(options, expected, at_s)


def expected_by(options: GeneratorOptions, at_s: float) -> float:
    """How many requests the rate promises from the beginning until then."""
    turn = 2 * math.pi / options.period
    swing = math.sin(turn * (at_s + options.start)) - math.sin(turn * options.start)
    return options.rate * (at_s - options.amplitude * swing / turn)


def _when(options: GeneratorOptions, expected: float, after_s: float) -> float:
    """The moment at which so many are expected: Newton's steps, and halves where one leaves what is still possible."""
    if options.amplitude == 0:
        return max(after_s, expected / options.rate)
    turn = 2 * math.pi / options.period
    most_off_s = 2 * options.amplitude / turn
    low_s, high_s = after_s, max(after_s, expected / options.rate + most_off_s)
    at_s = (low_s + high_s) / 2
    for _ in range(_STEPS_MAX):
        miss = expected_by(options, at_s) - expected
        if miss < 0:
            low_s = at_s
        else:
            high_s = at_s
        rate = options.rate * (1 - options.amplitude * math.cos(turn * (at_s + options.start)))
        next_s = at_s - miss / rate if rate > 0 else math.inf
        if not low_s <= next_s <= high_s:
            next_s = (low_s + high_s) / 2
        if abs(next_s - at_s) < _CLOSE_S:
            return next_s
        at_s = next_s
    return at_s
