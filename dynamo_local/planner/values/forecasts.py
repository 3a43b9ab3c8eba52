"""What is expected of the next window, and the question that asks for it."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.core.types import Missing


@dataclass(frozen=True, slots=True)
class Prediction:
    """The next window: requests, mean prompt and answer lengths (tokens), KV hit rate, accept length.

    None: nobody has an opinion (a field of Dynamo's `PredictionData` that is not set). `source` names who said it.
    """

    num_req: float | None = None
    isl: float | None = None
    osl: float | None = None
    kv_hit_rate: float | None = None
    accept_length: float | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class ForecastTask:
    """Series to be continued by `steps` windows each, off the arbiter's loop. Plain numbers, so that it can be sent to
    another process. `predictor` is its name (constant, arima, …), `options` are its own."""

    predictor: str
    series: tuple[tuple[float, ...], ...]
    steps: int = 1
    window_s: float = 180.0
    options: tuple[tuple[str, float | str | bool], ...] = ()


@dataclass(frozen=True, slots=True)
class Forecasts:
    """The answer: for each series its next `steps` values, or why there are none. `notes` says of each fit that failed
    why it did, and what stands in its place."""

    values: tuple[tuple[float, ...] | Missing, ...]
    notes: tuple[str, ...] = ()
