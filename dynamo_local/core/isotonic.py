"""Isotonic regression: what is measured, or counted, made to rise where it cannot fall. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat


def isotonic(values: Iterable[float], weights: Iterable[float] | None = None) -> list[float]:
    """The non-decreasing values that are nearest to these in the sum of squares (pool adjacent violators).

    Each square counts as much as its weight (positive; by default all the same). Values that do not fall come back as
    they are, bit for bit.
    """
    pools: list[tuple[float, float, int]] = []
    for value, given in zip(values, repeat(1.0) if weights is None else weights, strict=False):
        mean, weight, count = float(value), given, 1
        while pools and pools[-1][0] > mean:
            before, more, places = pools.pop()
            mean, weight, count = (before * more + mean * weight) / (more + weight), more + weight, places + count
        pools.append((mean, weight, count))
    return [mean for mean, _, count in pools for _ in range(count)]
