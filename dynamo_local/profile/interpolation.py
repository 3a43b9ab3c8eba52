"""How long a pass of an engine takes. `PerfModel` is the interface. A profile implements it, or fixed numbers in tests.

All durations are in seconds, all lengths in tokens.

A pass lasts `launch_s` (if a prompt starts in it) + the sum of `prefill_s` over its chunks + `decode_s` of its decode
rows. So a prompt alone takes exactly the profile's TTFT for its length, whatever its number of chunks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple, Protocol

from dynamo_local.core.isotonic import isotonic
from dynamo_local.core.routing.estimates import Perf
from dynamo_local.errors import ConfigError
from dynamo_local.profile.reading import DecodePoints, PrefillPoints, Profile, lines_of, npz_arrays, read_profile

# Curves and surfaces through measured points, monotone where more work cannot take less time.

CONTEXTS_BETWEEN = 8
"""Context lengths that `surface` adds between two measured ones: what is linear in 1 / context is curved over it."""


class Line:
    """A piecewise linear curve, made non-decreasing (`isotonic`); x ascending, two points or more.

    Left of the first point: the first segment's slope if `extend_left`, else flat. Right of the last point: the mean
    slope of the upper half of the range, so that one noisy last segment does not decide far values.
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


class PerfModel(Perf, Protocol):
    """`Perf`, which decisions use, and the further values that a modelled engine needs."""

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

    def ttft_s(self, prompt_tokens: int) -> float:
        """Time to first token, in seconds, of a prompt of that many tokens that is alone in an idle engine."""
        return self.launch_s + self.prefill_s(0, prompt_tokens)

    def itl_s(self, active_kv_tokens: int, mean_context: float) -> float:
        """Inter-token latency, in seconds, where all running sequences together hold `active_kv_tokens` tokens of KV
        and are `mean_context` tokens long on average."""
        return self._decode_ms(active_kv_tokens, mean_context) / 1000

    @classmethod
    def load(cls, profile: str) -> ProfileModel:
        """From a profile's name (`dynamo_H200_TP1P_TP1D`) or its folder. Raises `ConfigError`."""
        read = read_profile(profile)
        prefill, decode = read.prefill, read.decode
        exact = read.folder / "mocker_exact.npz"
        if exact.is_file():
            return cls(*_exact(exact), decode.max_kv_tokens)
        prefill_ms = Line(prefill.isl, prefill.ttft_ms, extend_left=True)
        return cls(prefill_ms, surface(lines_of(decode, decode.itl_ms), decode.max_kv_tokens), decode.max_kv_tokens)


def _exact(path: Path) -> tuple[Line, Grid]:
    try:
        grid = npz_arrays(path)
        axes = grid["decode_active_kv_tokens"], grid["decode_context_length"]
        prefill_ms = Line(grid["prefill_isl"], grid["prefill_ttft_ms"], extend_left=True)
        return prefill_ms, Grid(*axes, grid["decode_itl"])
    except (OSError, KeyError, ValueError, EOFError, IndexError, ZeroDivisionError) as error:
        raise ConfigError(f"the profile {path} cannot be used: {type(error).__name__}: {error}") from error


# Latency and throughput of one engine at a load, and its largest load within a target. The names are those of
# Dynamo's interpolators.
#
#     prefill, decode = interpolators("dynamo_H200_TP1P_TP1D")
#     prefill.interpolate_ttft(3000).value                 # ms, of a prompt that is alone
#     prefill.interpolate_thpt_per_gpu(3000).value         # prompt tokens/s/GPU
#     decode.interpolate_itl(40, 3150).value               # ms, with 40 requests of 3150 tokens in the engine
#     decode.find_best_throughput_per_gpu(10, 3150).value  # tokens/s/GPU with an ITL of at most 10 ms
#
# More load never takes less time. TTFT over the prompt's length and ITL over the KV in use are made non-decreasing if a
# measurement falls (`core.isotonic`). Throughput follows from latency: prompts one after the other, and for decode the
# running requests divided by ITL (Little's law).


class Estimate(NamedTuple):
    """A value; `extrapolated` where nothing as long, or as loaded, was measured."""

    value: float
    extrapolated: bool


@dataclass(frozen=True, slots=True)
class Best:
    """The most that a decode engine does within an ITL: `value` in tokens/s/GPU, with `concurrency` requests in it, at
    `itl_ms`. Not `attainable`: a single request is slower than the target, and this is what one request gets.
    """

    value: float
    concurrency: float
    itl_ms: float
    attainable: bool
    extrapolated: bool


class PrefillInterpolator:
    """One prompt after the other."""

    def __init__(self, points: PrefillPoints) -> None:
        self._first_isl, self._last_isl = points.isl[0], points.isl[-1]
        self._first_ms = points.ttft_ms[0]
        self._ttft_ms = Line(points.isl, points.ttft_ms, extend_left=True)
        # One GPU's share of the engine's throughput: less with more GPUs, more with parallel attention.
        self._share = median(
            thpt * ttft_ms / isl / 1000
            for isl, ttft_ms, thpt in zip(points.isl, points.ttft_ms, points.thpt_per_gpu, strict=True)
        )

    def interpolate_ttft(self, isl: float) -> Estimate:
        """Milliseconds until the first token of a prompt of `isl` tokens (above 0) that waits for nobody.

        It takes the prompt length alone. Cached prefixes, the batch size and waiting requests are not arguments: a
        profile has one sweep of prompts, each measured alone. The planner applies its correction factor afterwards.
        """
        ttft_ms = self._ttft_ms(isl)
        if isl < self._first_isl:  # the first segment, continued, may end below 0
            ttft_ms = max(ttft_ms, self._first_ms * isl / self._first_isl)
        return Estimate(ttft_ms, not self._first_isl <= isl <= self._last_isl)

    def interpolate_thpt_per_gpu(self, isl: float) -> Estimate:
        """Prompt tokens per second and GPU, with prompts of `isl` tokens one after the other."""
        ttft_ms, extrapolated = self.interpolate_ttft(isl)
        return Estimate(isl / ttft_ms * 1000 * self._share, extrapolated)


class DecodeInterpolator:
    """Many requests at once, told apart by how many there are and how long they are on average."""

    def __init__(self, points: DecodePoints) -> None:
        self.max_kv_tokens = points.max_kv_tokens
        itls = lines_of(points, points.itl_ms)
        self._itl_ms = surface(itls, points.max_kv_tokens)
        # Requests that run, per GPU, by Little's law: fewer than there are where the engine lets some wait.
        running = [thpt * itl / 1000 for thpt, itl in zip(points.thpt_per_gpu, points.itl_ms, strict=True)]
        lines = {context: [(0.0, 0.0), *measured] for context, measured in lines_of(points, running).items()}
        self._running = surface(_once(lines), points.max_kv_tokens)
        self._contexts = sorted(itls)
        self._most_kv = [max(kv for kv, _ in itls[context]) for context in self._contexts]

    def interpolate_itl(self, concurrency: float, context_length: float) -> Estimate:
        """Milliseconds per token with `concurrency` requests of `context_length` tokens each in one engine."""
        kv_tokens = self._kv_tokens(concurrency, context_length)
        return Estimate(self._itl_ms(kv_tokens, context_length), self._beyond(kv_tokens, context_length))

    def interpolate_thpt_per_gpu(self, concurrency: float, context_length: float) -> Estimate:
        """Tokens per second and GPU with those requests in one engine."""
        kv_tokens = self._kv_tokens(concurrency, context_length)
        itl_ms, extrapolated = self.interpolate_itl(concurrency, context_length)
        return Estimate(self._running(kv_tokens, context_length) / itl_ms * 1000, extrapolated)

    def find_best_throughput_per_gpu(self, itl: float, context_length: float) -> Best:
        """The most that one engine does with an ITL of at most `itl` ms, at loads that were measured. A stricter target
        never gives more."""
        alone = self.interpolate_itl(1, context_length)
        if not alone.value <= itl:
            only = self.interpolate_thpt_per_gpu(1, context_length)
            return Best(only.value, 1.0, alone.value, False, only.extrapolated)
        # Between two points of the axis, throughput is a quotient of two straight lines. Its maximum is at an end. So
        # the best load is at a point, at the highest load, or where the target is met exactly.
        highest = max(self._measured_to(context_length), context_length)
        axis = [kv for kv in self._itl_ms.x if kv < highest] + [highest]
        itls = [self._itl_ms(kv, context_length) for kv in axis]
        met = sum(value <= itl for value in itls)
        points = list(zip(axis[:met], itls[:met], strict=True))
        if met < len(axis):
            share = (itl - itls[met - 1]) / (itls[met] - itls[met - 1])
            points.append((axis[met - 1] + (axis[met] - axis[met - 1]) * share, itl))
        loads = [(self._running(kv, context_length) / itl_ms * 1000, kv, itl_ms) for kv, itl_ms in points]
        value, kv, itl_ms = max(loads, key=lambda load: load[0])
        return Best(value, kv / context_length, itl_ms, True, alone.extrapolated)

    def _kv_tokens(self, concurrency: float, context_length: float) -> float:
        return min(concurrency * context_length, float(self.max_kv_tokens))

    def _beyond(self, kv_tokens: float, context_length: float) -> bool:
        """Whether it is outside of what was measured: shorter, longer, or more loaded than both neighbours were."""
        inside = self._contexts[0] <= context_length <= self._contexts[-1]
        return not inside or kv_tokens > self._measured_to(context_length) * (1 + 1e-9)

    def _measured_to(self, context_length: float) -> float:
        """The most KV tokens at that context, between those of its neighbours; outside of them, the nearest's."""
        contexts, most = self._contexts, self._most_kv
        right = min(max(1, bisect_right(contexts, context_length)), len(contexts) - 1)
        share = (context_length - contexts[right - 1]) / (contexts[right] - contexts[right - 1])
        return most[right - 1] + (most[right] - most[right - 1]) * min(1.0, max(0.0, share))


def _once(lines: dict[float, list[tuple[float, float]]]) -> dict[float, list[tuple[float, float]]]:
    """Without a second point at 0 KV tokens."""
    return {context: sorted(dict(points).items()) for context, points in lines.items()}


def interpolators(profile: str | Profile) -> tuple[PrefillInterpolator, DecodeInterpolator]:
    """Both, of a profile's name or folder, or of one that is read. Raises `ConfigError` for one that cannot be used, or
    that has no throughput per GPU."""
    read = read_profile(profile) if isinstance(profile, str) else profile
    for path, points, name in (
        (read.files[0], read.prefill, "prefill_thpt_per_gpu"),
        (read.files[1], read.decode, "z_thpt_per_gpu"),
    ):
        if not points.thpt_per_gpu:
            raise ConfigError(
                f"the profile {path} has no array {name}: a planner cannot size by it, an engine can run by it"
            )
    return PrefillInterpolator(read.prefill), DecodeInterpolator(read.decode)
