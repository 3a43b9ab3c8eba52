"""The windows of traffic that a planner remembers, in the form that predictors continue."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dynamo_local.core.types import Missing
from dynamo_local.planner.values.forecasts import Forecasts, Prediction
from dynamo_local.planner.values.traffic import Traffic

WINDOWS_MAX = 600
"""How many windows are remembered, unless somebody asks for more: 30 hours of 180 s."""
SOURCE = "builtin_load_predict"
"""Who a prediction made of a series is from, under Dynamo's name."""


@dataclass(frozen=True, slots=True)
class Window:
    """Requests that began in one window, and their mean prompt and answer lengths (tokens; 0: not known yet)."""

    num_req: float
    isl: float
    osl: float


@dataclass(frozen=True, slots=True)
class Series:
    """The last `windows_max` windows of `window_s` seconds each, the oldest first; those of a warm-up come before the
    live ones. An immutable value: `after` gives the next one.

    `silent`: no request was seen since the start, or since the warm-up's end. Windows without any are not remembered
    until there is one, because they say when the service was switched on, and nothing about its load.

    `kv_hit_rate` (0..1) and `accept_length` (1 or more) are the last ones that were known; None: never. They are not
    forecast.
    """

    window_s: float
    windows: tuple[Window, ...] = ()
    windows_max: int = WINDOWS_MAX
    silent: bool = True
    kv_hit_rate: float | None = None
    accept_length: float | None = None

    def warmed_up(self, windows: Iterable[Window]) -> Series:
        """With these (of `warmup.read_warmup`) before the live ones, which are still to come."""
        return replace(self, windows=(*windows, *self.windows)[-self.windows_max :])

    def after(self, traffic: Traffic | Missing | None) -> Series:
        """With one more window.

        A window in which nobody counted adds nothing: it is unknown, not idle. Without requests it is idle: the count
        is 0, and the lengths are those of the window before. A count over another time than `window_s` is scaled to it.
        """
        if traffic is None or isinstance(traffic, Missing):
            return self
        seen = replace(
            self,
            kv_hit_rate=_known(traffic.kv_hit_rate, self.kv_hit_rate, 0.0, 1.0),
            accept_length=_known(traffic.accept_length, self.accept_length, 1.0),
        )
        counted = _known(traffic.num_req, None)
        if counted is None or traffic.duration_s <= 0:
            return seen
        num_req = counted * self.window_s / traffic.duration_s
        idle = num_req == 0
        if not math.isfinite(num_req) or (self.silent and idle):
            return seen
        before = self.windows[-1] if self.windows else Window(0.0, 0.0, 0.0)
        window = Window(
            num_req=num_req,
            isl=before.isl if idle else _known(traffic.isl, before.isl, 1.0) or 0.0,
            osl=before.osl if idle else _known(traffic.osl, before.osl) or 0.0,
        )
        return replace(seen, windows=(*self.windows, window)[-self.windows_max :], silent=False)

    @property
    def columns(self) -> tuple[tuple[float, ...], ...]:
        """`num_req`, `isl` and `osl` as three series. Lengths begin where they are first known."""
        counts = tuple(window.num_req for window in self.windows)
        return (
            counts,
            _without_leading_zeros(window.isl for window in self.windows),
            _without_leading_zeros(window.osl for window in self.windows),
        )

    @property
    def known(self) -> bool:
        """Whether there is something in each of the `columns`."""
        windows = self.windows
        return any(one.isl > 0 for one in reversed(windows)) and any(one.osl > 0 for one in reversed(windows))

    def prediction(self, forecasts: Forecasts | Missing, step: int = 1) -> Prediction | Missing:
        """The window `step` steps ahead (1: the next one), made of the forecasts of `columns`.

        `Missing` where one of them is, with its reason: half a prediction is none.
        """
        if isinstance(forecasts, Missing):
            return forecasts
        values: list[float] = []
        for name, ahead in zip(("num_req", "isl", "osl"), forecasts.values, strict=True):
            if isinstance(ahead, Missing):
                return Missing(f"{name}: {ahead.reason}")
            values.append(ahead[step - 1])
        num_req, isl, osl = values
        return Prediction(num_req, isl, osl, self.kv_hit_rate, self.accept_length, SOURCE)


def _known(value: float | Missing, before: float | None, low: float = 0.0, high: float = math.inf) -> float | None:
    """The value where it is known and makes sense, else the one before."""
    if isinstance(value, Missing) or not (math.isfinite(value) and low <= value <= high):
        return before
    return value


def _without_leading_zeros(values: Iterable[float]) -> tuple[float, ...]:
    found = tuple(values)
    first = next((index for index, value in enumerate(found) if value > 0), len(found))
    return found[first:]
