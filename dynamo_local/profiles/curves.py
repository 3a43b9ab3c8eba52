"""Curves and surfaces through measured points, monotone where more work cannot take less time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise

from dynamo_local.core.isotonic import isotonic

CONTEXTS_BETWEEN = 8
"""Context lengths that `surface` adds between two measured ones: what is linear in 1 / context is curved over it."""


class Line:
    """A piecewise linear curve, made non-decreasing (`isotonic`); x ascending, two points or more.

    Left of the first point it goes on with the first segment's slope where `extend_left`, else it is flat; right of the
    last, with the mean slope of the upper half of the range: one noisy last segment must not decide what is far out.
    """

    __slots__ = ("_extend_left", "_slope", "_x", "_y")

    def __init__(self, x: Sequence[float], y: Sequence[float], *, extend_left: bool) -> None:
        self._x = [float(v) for v in x]
        self._y = isotonic(y)
        self._extend_left = extend_left
        middle = (len(self._x) - 1) // 2
        self._slope = (self._y[-1] - self._y[middle]) / (self._x[-1] - self._x[middle])

    def __call__(self, x: float) -> float:
        xs, ys = self._x, self._y
        if x >= xs[-1]:
            return ys[-1] + (x - xs[-1]) * self._slope
        right = bisect_right(xs, x)
        if right == 0:
            if not self._extend_left:
                return ys[0]
            right = 1
        left = right - 1
        return ys[left] + (x - xs[left]) * (ys[right] - ys[left]) / (xs[right] - xs[left])


class Grid:
    """Bilinear interpolation over ascending axes; outside them the edge's value. `z[i][j]` is at (x[i], y[j])."""

    __slots__ = ("_x", "_y", "_z")

    def __init__(self, x: Sequence[float], y: Sequence[float], z: Sequence[Sequence[float]]) -> None:
        self._x, self._y, self._z = list(x), list(y), [list(row) for row in z]

    def __call__(self, x: float, y: float) -> float:
        i, fx = _cell(self._x, x)
        j, fy = _cell(self._y, y)
        low, high = self._z[i], self._z[i + 1]
        a = low[j] + (low[j + 1] - low[j]) * fy
        b = high[j] + (high[j + 1] - high[j]) * fy
        return a + (b - a) * fx

    @property
    def x(self) -> tuple[float, ...]:
        """The first axis: between two of its values, the surface is linear."""
        return tuple(self._x)

    def along(self, batch: int, start: int, count: int) -> list[float]:
        """The values at `(x, x / batch)` for `count` values of x from `start` in steps of `batch`.

        Bit for bit those of single calls, at a fraction of the time: within a cell only the two distances change.
        """
        values: list[float] = []
        xs, ys = self._x, self._y
        x, stop = start, start + batch * count
        while x < stop:
            i, j, y = _place(xs, x), _place(ys, x / batch), x / batch
            if not 0 <= i < len(xs) - 1:
                values.append(self(x, y))
                x += batch
                continue
            # Where y is outside its axis, its edge counts: the distance to it is 0 or 1, whatever y is.
            edge = 0.0 if j < 0 else 1.0 if j >= len(ys) - 1 else None
            j = min(max(j, 0), len(ys) - 2)
            x0, dx, y0, dy = xs[i], xs[i + 1] - xs[i], ys[j], ys[j + 1] - ys[j]
            until = min(stop, x + batch * _steps(x, batch, xs[i + 1], ys, j, edge))
            low, dlow = self._z[i][j], self._z[i][j + 1] - self._z[i][j]
            high, dhigh = self._z[i + 1][j], self._z[i + 1][j + 1] - self._z[i + 1][j]
            at_all = range(x, until, batch)
            if edge is None:
                values += [
                    (a := low + dlow * (fy := (at / batch - y0) / dy)) + (high + dhigh * fy - a) * ((at - x0) / dx)
                    for at in at_all
                ]
            else:
                a = low + dlow * edge
                rise = high + dhigh * edge - a
                values += [a + rise * ((at - x0) / dx) for at in at_all]
            x = until
        return values


def _place(axis: list[float], value: float) -> int:
    """The cell of an axis in whose inside, or on whose left end, the value lies; -1 or the last point: outside it.

    The first point itself counts as outside, as it does for `_cell`: there the distance is exactly 0.
    """
    if value <= axis[0]:
        return -1
    return bisect_right(axis, value) - 1


def _steps(x: int, batch: int, x_end: float, ys: list[float], j: int, edge: float | None) -> int:
    """How many passes from x on certainly stay in the cell; 1 or more."""
    steps = int((x_end - x) / batch)
    if edge is None:
        steps = min(steps, int(ys[j + 1] - x / batch))
    elif edge == 0.0:
        steps = min(steps, int(ys[0] - x / batch))
    return max(1, steps)


def _cell(axis: list[float], value: float) -> tuple[int, float]:
    """The cell of an axis that holds the value, and where in it (0..1, clamped)."""
    if value <= axis[0]:
        return 0, 0.0
    if value >= axis[-1]:
        return len(axis) - 2, 1.0
    i = bisect_right(axis, value) - 1
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


def surface(lines: Mapping[float, Sequence[tuple[float, float]]], x_end: float) -> Grid:
    """A grid over (KV tokens, context length) from `(KV tokens, value)` points on lines of equal context length.

    Along a line: `Line`, from 0 to `x_end` at least. Across lines, at equal KV tokens: linear in 1 / context. The time
    of a pass is about a + b·KV + c·requests, and there are KV / context requests.
    """
    contexts = sorted(lines)
    curves = [Line(*zip(*sorted(lines[context]), strict=True), extend_left=False) for context in contexts]
    xs = sorted({0.0, float(x_end)} | {float(x) for points in lines.values() for x, _ in points})
    columns = [(contexts[0], 0, 0.0)]
    for left, (low, high) in enumerate(pairwise(contexts)):
        for step in range(1, CONTEXTS_BETWEEN + 1):
            context = low * (high / low) ** (step / (CONTEXTS_BETWEEN + 1))
            columns.append((context, left, (1 / low - 1 / context) / (1 / low - 1 / high)))
        columns.append((high, left, 1.0))

    def row(x: float) -> list[float]:
        values = [curve(x) for curve in curves]
        return [
            values[left] if share == 0.0 else values[left + 1] if share == 1.0 else _between(values, left, share)
            for _, left, share in columns
        ]

    return Grid(xs, [context for context, _, _ in columns], [row(x) for x in xs])


def _between(values: Sequence[float], left: int, share: float) -> float:
    return values[left] + (values[left + 1] - values[left]) * share
