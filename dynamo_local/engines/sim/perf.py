"""How long a pass takes. `PerfModel` is what the scheduler asks; a profile, or fixed numbers for tests, answers.

A pass lasts `launch_s` (if a prompt starts in it) + the sum of `prefill_s` over its chunks + `decode_s` of its decode
rows, so a prompt alone takes exactly the profile's TTFT for its length, in however many chunks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

from dynamo_local.errors import ConfigError

PROFILES = Path(__file__).parent / "profiles"


class PerfModel(Protocol):
    """Durations in seconds, at speed 1. Pure: the same arguments give the same bits."""

    @property
    def max_kv_tokens(self) -> int:
        """How many tokens the KV cache of this engine holds."""
        ...

    @property
    def launch_s(self) -> float:
        """The fixed part of a prefill, paid once by a pass in which at least one prompt starts."""
        ...

    def prefill_s(self, context_tokens: int, new_tokens: int) -> float:
        """Computing `new_tokens` of a prompt behind `context_tokens` whose KV is there already."""
        ...

    def decode_s(self, batch: int, active_kv_tokens: int, mean_context: float) -> float:
        """One token for each of `batch` (1 or more) sequences that hold `active_kv_tokens` together."""
        ...

    def decode_run_s(self, batch: int, active_kv_tokens: int, passes: int) -> list[float]:
        """`decode_s` of so many passes in a row, each of which adds a token to every sequence: the same bits."""
        ...


@dataclass(frozen=True, slots=True)
class FixedModel:
    """Linear numbers for tests: a known answer to "when?"."""

    prefill_ms_per_token: float = 0.02
    decode_ms: float = 5.0
    decode_ms_per_kv_token: float = 0.0
    launch_ms: float = 0.0
    max_kv_tokens: int = 1_000_000

    @property
    def launch_s(self) -> float:
        return self.launch_ms / 1000

    def prefill_s(self, context_tokens: int, new_tokens: int) -> float:
        return new_tokens * self.prefill_ms_per_token / 1000

    def decode_s(self, batch: int, active_kv_tokens: int, mean_context: float) -> float:
        return (self.decode_ms + active_kv_tokens * self.decode_ms_per_kv_token) / 1000

    def decode_run_s(self, batch: int, active_kv_tokens: int, passes: int) -> list[float]:
        ends = range(active_kv_tokens, active_kv_tokens + batch * passes, batch)
        return [self.decode_s(batch, kv_tokens, kv_tokens / batch) for kv_tokens in ends]


class Line:
    """A piecewise linear curve, made non-decreasing; x ascending.

    Left of the first point it goes on with the first segment's slope where `extend_left`, else it is flat; right of the
    last, with the mean slope of the upper half of the range: one noisy last segment must not decide what is far out.
    """

    __slots__ = ("_extend_left", "_slope", "_x", "_y")

    def __init__(self, x: Sequence[float], y: Sequence[float], *, extend_left: bool) -> None:
        self._x = [float(v) for v in x]
        self._y = list(accumulate((float(v) for v in y), max))
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


class ProfileModel:
    """A measured or estimated engine: TTFT over prompt length, ITL over (active KV tokens, mean context length).

    Prefill right of the profile goes on linearly (mean slope of its upper half); `launch_s` is the curve continued down
    to 0 tokens. Decode outside the profile is the value at its edge, in both directions.
    """

    def __init__(self, prefill_ms: Line, decode_ms: Grid, max_kv_tokens: int) -> None:
        self._prefill_ms = prefill_ms
        self._decode_ms = decode_ms
        self._max_kv_tokens = max_kv_tokens
        self._launch_ms = max(0.0, prefill_ms(0))

    @property
    def max_kv_tokens(self) -> int:
        return self._max_kv_tokens

    @property
    def launch_s(self) -> float:
        return self._launch_ms / 1000

    def prefill_s(self, context_tokens: int, new_tokens: int) -> float:
        return (self._above_launch(context_tokens + new_tokens) - self._above_launch(context_tokens)) / 1000

    def _above_launch(self, tokens: int) -> float:
        return max(0.0, self._prefill_ms(tokens) - self._launch_ms)

    def decode_s(self, batch: int, active_kv_tokens: int, mean_context: float) -> float:
        return self._decode_ms(active_kv_tokens, mean_context) / 1000

    def decode_run_s(self, batch: int, active_kv_tokens: int, passes: int) -> list[float]:
        return [ms / 1000 for ms in self._decode_ms.along(batch, active_kv_tokens, passes)]

    @classmethod
    def load(cls, profile: str) -> ProfileModel:
        """From a profile's name (`dynamo_H200_TP1P_TP1D`) or its folder. Raises `ConfigError`."""
        folder = profile_folder(profile)
        try:
            exact = folder / "mocker_exact.npz"
            decode = _arrays(folder / "selected_decode_interpolation" / "raw_data.npz")
            max_kv_tokens = int(decode["max_kv_tokens"][0])
            if exact.is_file():
                grid = _arrays(exact)
                prefill_ms = Line(grid["prefill_isl"], grid["prefill_ttft_ms"], extend_left=True)
                axes = grid["decode_active_kv_tokens"], grid["decode_context_length"]
                return cls(prefill_ms, Grid(*axes, grid["decode_itl"]), max_kv_tokens)
            prefill = _arrays(folder / "selected_prefill_interpolation" / "raw_data.npz")
            prefill_ms = Line(prefill["prefill_isl"], prefill["prefill_ttft"], extend_left=True)
            return cls(prefill_ms, _grid_of_points(decode, max_kv_tokens), max_kv_tokens)
        except (OSError, KeyError, ValueError, IndexError, ZeroDivisionError) as error:
            raise ConfigError(f"the profile in {folder} cannot be used: {type(error).__name__}: {error}") from error


def profile_folder(profile: str) -> Path:
    """The folder of a shipped profile, or of a path. Raises `ConfigError` naming those that ship."""
    for folder in (PROFILES / profile, Path(profile).expanduser()):
        if (folder / "selected_decode_interpolation" / "raw_data.npz").is_file():
            return folder
    shipped = sorted(path.name for path in PROFILES.iterdir() if path.is_dir())
    raise ConfigError(
        f"there is no engine profile {profile!r}: give a folder that holds selected_decode_interpolation/raw_data.npz, "
        f"or one of: {', '.join(shipped)}"
    )


def _arrays(path: Path) -> dict[str, Any]:
    # numpy is imported only where a profile is read: 0.1 s that `dynamo status` and others need not pay.
    import numpy as np

    with np.load(path, allow_pickle=False) as data:
        return {name: data[name].tolist() for name in data.files}


def _grid_of_points(decode: dict[str, Any], max_kv_tokens: int) -> Grid:
    """A grid from scattered points: they lie on lines of equal context length; each becomes a `Line` over KV tokens."""
    lines: dict[float, list[tuple[float, float]]] = {}
    for usage, context, itl_ms in zip(decode["x_kv_usage"], decode["y_context_length"], decode["z_itl"], strict=True):
        lines.setdefault(context, []).append((usage * max_kv_tokens, itl_ms))
    if len(lines) < 2 or min(len(points) for points in lines.values()) < 2:
        raise ValueError("the decode profile needs two context lengths or more, with two points or more each")
    contexts = sorted(lines)
    curves = [Line(*zip(*sorted(lines[context]), strict=True), extend_left=False) for context in contexts]
    kv_tokens = sorted({0.0, float(max_kv_tokens)} | {x for points in lines.values() for x, _ in points})
    if any(b <= a for a, b in pairwise(kv_tokens)):
        raise ValueError("the decode profile's KV usage is not ascending")
    return Grid(kv_tokens, contexts, [[curve(x) for curve in curves] for x in kv_tokens])
